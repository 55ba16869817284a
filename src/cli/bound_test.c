/* bound_test.c - the bound of a step against all splits of its misses, tried one by one. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "bound.c"

/* The longer side of the best split into whole experts, ms. */
static double best_of_all(const hx_experts *x, int missing)
{
    double best = INFINITY;

    for (int lane = 0; lane <= (x->us[2] > 0 ? missing : 0); lane++)
        best = fmin(best, fmax(lane * x->us[2], (missing - lane) * x->us[1]) / 1e3);
    return best;
}

static void test_split(void **state)
{
    const double us[][2] = { { 190, 143 }, { 190, 190 }, { 50, 2000 }, { 200, 0 } };
    const int misses[] = { 0, 1, 7, 188, 1414 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(us); i++)
        for (size_t k = 0; k < HX_LEN(misses); k++) {
            const hx_experts x = { .us = { 5, us[i][0], us[i][1] },
                                   .expert_bytes = 9000000 };
            const cli_bound b = cli_step_bound(&x, 10, misses[k]);
            const double all = best_of_all(&x, misses[k]),
                         one = fmin(us[i][0], fmax(us[i][1], 1)) / 1e3;

            assert_true(b.lanes_ms <= all + 1e-9 && b.lanes_ms >= all - one);
            assert_true(fabs(b.link + b.lane - misses[k]) < 1e-9);
            assert_true(fabs(b.ms - (b.lanes_ms + 0.05)) < 1e-9);
        }
}

/* Host memory that gives less to both than they could read, and the rest at the copies'
 * rate: 100 experts of 9 MB at 90 GB/s are 10 ms, 8,200 MB at 4,100 GB/s 2. */
static void test_memory(void **state)
{
    hx_experts x = { .us = { 5, 190, 143 },
                     .expert_bytes = 9000000,
                     .rest_bytes = 7300000000,
                     .host_gbs = 90,
                     .copy_gbs = 4100 };
    cli_bound b = cli_step_bound(&x, 100, 100);

    (void)state;
    assert_true(fabs(b.host_ms - 10) < 1e-9 && fabs(b.gpu_ms - 2) < 1e-9);
    assert_true(fabs(b.ms - 12) < 1e-9);
    assert_string_equal(b.limit, "host memory");
    x.host_gbs = 200;
    b = cli_step_bound(&x, 100, 100);
    assert_true(fabs(b.ms - (100 / (1 / .190 + 1 / .143) + 2)) < 1e-9);
    assert_string_equal(b.limit, "CPU lane");
    assert_string_equal(cli_step_bound(&x, 100, 0).limit, "GPU");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_memory),
    };

    return cmocka_run_group_tests_name("bound", tests, NULL, NULL);
}
