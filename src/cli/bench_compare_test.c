/* bench_compare_test.c - intervals of ratios against values worked out elsewhere, and how often
 * they hold the truth. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "cli/bench_compare.c"

static logs logs_from(const double *v, int n)
{
    hx_sb b = { 0 };
    hx_json *j;
    hx_err err;
    logs l;

    hx_sb_str(&b, "{\"all\":[");
    for (int i = 0; i < n; i++)
        hx_sb_printf(&b, "%s%.17g", i > 0 ? "," : "", v[i]);
    hx_sb_str(&b, "]}");
    assert_int_equal(hx_json_parse(&j, (hx_str) { b.p, b.n }, 0, &err), 0);
    assert_true(logs_of(j, &l));
    hx_json_free(j);
    hx_sb_free(&b);
    return l;
}

/* Points of Student's t from printed tables. */
static void test_t(void **state)
{
    (void)state;
    assert_float_equal(t95(1), 12.706, 1e-9);
    assert_float_equal(t95(4.9), 2.776, 1e-9);
    assert_float_equal(t95(10), 2.228, 1e-9);
    assert_float_equal(t95(60), 2.000, 2e-3);
    assert_float_equal(t95(120), 1.980, 1e-3);
    assert_float_equal(t95(0.5), 12.706, 1e-9);
}

/* (10, 11, 12.5) and (21, 22, 26, 20): the ratio and Welch's degrees of freedom 4.504 were worked
 * out in Python; df counts as 4. */
static void test_ratio(void **state)
{
    const double a[] = { 10, 11, 12.5 }, b[] = { 21, 22, 26, 20 };
    const logs la = logs_from(a, 3), lb = logs_from(b, 4);
    const double ratio = 1.9909503528;
    double r[3];

    (void)state;
    assert_true(ratio_of(&la, &lb, r));
    assert_float_equal(r[0], ratio, 1e-6);
    assert_float_equal(r[1], ratio * exp(-2.776 * sqrt(0.004178802541 + 0.003249679024)),
                       1e-4);
    assert_float_equal(r[2], ratio * exp(2.776 * sqrt(0.004178802541 + 0.003249679024)),
                       1e-4);
    const logs one = logs_from(a, 1);

    assert_false(ratio_of(&one, &lb, r));
    assert_true(isnan(r[1]));
}

/* Two machines of one speed, 10 % noise: 95 of 100 intervals of 5 runs hold 1. */
static void test_coverage(void **state)
{
    int in = 0;

    (void)state;
    for (uint64_t k = 0; k < 1000; k++) {
        double a[5], b[5], r[3];

        for (uint64_t i = 0; i < 5; i++) {
            a[i] = 100 * exp(0.1 * hx_rng_normal(k, i));
            b[i] = 100 * exp(0.1 * hx_rng_normal(k, 5 + i));
        }
        const logs la = logs_from(a, 5), lb = logs_from(b, 5);

        assert_true(ratio_of(&la, &lb, r));
        in += r[1] <= 1 && 1 <= r[2];
    }
    if (in < 930 ||
        in > 985) /* 950 +- 2.9 deviations; rounding df down widens a little */
        fail_msg("%d of 1000 intervals hold the truth", in);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_t),
        cmocka_unit_test(test_ratio),
        cmocka_unit_test(test_coverage),
    };

    return cmocka_run_group_tests_name("bench_compare", tests, NULL, NULL);
}
