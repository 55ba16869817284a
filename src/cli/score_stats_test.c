/* score_stats_test.c - divergences against values worked out by hand, intervals against theory. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "cli/score.h"

static void near(double a, double b, double bound)
{
    if (!(fabs(a - b) <= bound))
        fail_msg("%.12g, expected %.12g within %g", a, b, bound);
}

/* p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = 1/2 ln 2 - 1/4 ln 2. */
static void test_kl(void **state)
{
    const float p[] = { 5, 5 - logf(2), 5 - logf(2) }, q[] = { -logf(2), -logf(2), 0 };
    int32_t best;

    (void)state;
    const double lp = score_lse(p, 3, NULL), lq = score_lse(q, 3, NULL);

    near(score_kl(p, lp, q, lq, 3), 0.25 * log(2), 1e-7);
    near(score_kl(p, lp, p, lp, 3), 0, 0);
    near(score_lse(q, 3, &best), log(2), 1e-7);
    assert_int_equal(best, 2);
}

/* Over two of the ids, renormalised: (2/3, 1/3) from (1/2, 1/2). */
static void test_kl_top(void **state)
{
    const double p[] = { log(0.5), log(0.25) }, q[] = { log(0.1), log(0.1) },
                 missing[] = { log(0.1), -INFINITY };

    (void)state;
    near(score_kl_top(p, q, 2), 2.0 / 3 * log(4.0 / 3) + 1.0 / 3 * log(2.0 / 3), 1e-12);
    /* An id that one side lacks has the published scorer's floor of 1e-30. */
    near(score_kl_top(p, missing, 2),
         2.0 / 3 * log(2.0 / 3) + 1.0 / 3 * log(1.0 / 3 / 1e-29), 1e-9);
}

static score_series normal_series(int64_t docs, int64_t per_doc, double doc_spread,
                                  uint64_t seed)
{
    score_series s = { 0 };
    uint64_t at = 0;

    for (int64_t d = 0; d < docs; d++) {
        const double base = 3 + doc_spread * hx_rng_normal(seed, at++);

        for (int64_t i = 0; i < per_doc; i++) {
            const double x = base + hx_rng_normal(seed, at++);

            score_add(&s, (score_point) { .kl = (float)x,
                                          .nll = (float)x,
                                          .doc = (int32_t)d,
                                          .pos = (int32_t)i,
                                          .same = hx_rng_unit(seed, at++) < 0.9 });
        }
    }
    return s;
}

/* Independent positions of 200 documents: the interval of the mean is 1.96 / sqrt(n) to each
 * side; with documents that differ it must cover their spread, not the positions'. */
static void test_intervals(void **state)
{
    hx_err err = { 0 };

    (void)state;
    for (int spread = 0; spread < 2; spread++) {
        score_series s = normal_series(200, 25, spread, 5);
        const double half = 1.96 * sqrt(spread / 200.0 + 1.0 / 5000);
        double mean = 0;
        score_summary sum;

        for (int64_t i = 0; i < s.n; i++)
            mean += (double)s.p[i].kl / (double)s.n;
        assert_int_equal(score_summarize(&sum, &s, 1, &err), 0);
        assert_int_equal(sum.n_unit, 200);
        assert_int_equal(sum.unit_block, 0);
        near(sum.kl.value, mean, 1e-9);
        /* 1000 resamples and 200 units: the half width itself is known to about 7 %. */
        near((sum.kl.hi - sum.kl.lo) / 2, half, 0.2 * half);
        near(sum.perplexity.value, exp(mean), 1e-6 * exp(mean));
        assert_true(sum.top1.lo < 0.9 + 0.02 && sum.top1.hi > 0.9 - 0.02);
        /* The 99th percentile of a normal law: 2.326 deviations above its mean. */
        if (spread == 0)
            near(sum.kl_p99.value, 3 + 2.326, 0.15);
        hx_free(s.p);
    }
}

/* The true mean lies in 95 % of the intervals. */
static void test_coverage(void **state)
{
    int in = 0;
    hx_err err = { 0 };

    (void)state;
    for (uint64_t k = 0; k < 200; k++) {
        score_series s = normal_series(40, 3, 1, 100 + k);
        score_summary sum;

        assert_int_equal(score_summarize(&sum, &s, k, &err), 0);
        in += sum.kl.lo <= 3 && 3 <= sum.kl.hi;
        hx_free(s.p);
    }
    printf("%d of 200 intervals hold the mean\n", in);
    if (in < 176 || in > 199) /* binomial, 200 draws of 0.94: 3.5 deviations */
        fail_msg("%d of 200 intervals hold the mean", in);
}

/* One document alone is cut in blocks; a single block has no interval. */
static void test_blocks(void **state)
{
    score_series s = normal_series(1, 640, 0, 9), small = normal_series(1, 20, 0, 9);
    score_summary sum;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(score_summarize(&sum, &s, 1, &err), 0);
    assert_int_equal(sum.n_unit, 10);
    assert_int_equal(sum.unit_block, 64);
    assert_true(sum.kl.lo < sum.kl.value && sum.kl.value < sum.kl.hi);
    assert_int_equal(score_summarize(&sum, &small, 1, &err), 0);
    assert_int_equal(sum.n_unit, 1);
    assert_true(isnan(sum.kl.lo) && isnan(sum.kl.hi) && !isnan(sum.kl.value));
    hx_free(s.p);
    hx_free(small.p);
}

static void test_bins(void **state)
{
    score_series s = { 0 };
    score_bin bin[SCORE_BINS];

    (void)state;
    for (int i = 0; i < 40; i++)
        score_add(&s, (score_point) { .kl = i < 16 ? 1 : i < 32 ? 2 : NAN, .pos = i });
    assert_int_equal(score_bins(bin, &s), 2);
    assert_int_equal(bin[0].n, 16);
    assert_int_equal(bin[1].from, 16);
    assert_int_equal(bin[1].to, 31);
    near(bin[0].kl, 1, 0);
    near(bin[1].kl, 2, 0);
    hx_free(s.p);
}

static void test_no_memory(void **state)
{
    score_series s = normal_series(10, 5, 0, 2);
    score_summary sum;
    hx_err err = { 0 };

    (void)state;
    for (int64_t k = 1; k <= 4; k++) {
        hx_test_fail_at(k);
        assert_int_equal(score_summarize(&sum, &s, 1, &err), HX_ENOMEM);
    }
    hx_test_fail_at(0);
    hx_free(s.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kl),        cmocka_unit_test(test_kl_top),
        cmocka_unit_test(test_intervals), cmocka_unit_test(test_coverage),
        cmocka_unit_test(test_blocks),    cmocka_unit_test(test_bins),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests_name("score_stats", tests, NULL, NULL);
}
