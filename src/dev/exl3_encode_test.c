/* exl3_encode_test.c - the EXL3 encoder: searches against the vectors of the format's
 * specification, all instruction sets bit for bit, whole matrices against those of the
 * reference quantizer, measured through the decoder of fmt.c in double.
 *
 *   exl3_encode_test all      the full set of ../shared (a minute); else a part of it */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../../tests/golden.h"
#include "dev/dense.h"
#include "dev/enc_kern.h"
#include "dev/exl3_encode.h"
#include "dev/fmt_exl3.h"

#define SHARED "../shared/spec/data/"

static const char *const cb_name[HX_N_CB] = { "3inst", "mcg", "mul1" };
static const int rates[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };
static bool all_cases;

static char *read_file(const char *path)
{
    char *raw;
    size_t n;
    hx_err err;

    if (hx_file_read(path, 64u << 20, &raw, &n, &err) != 0)
        fail_msg("%s", err.msg);
    return raw;
}

static hx_pool *open_pool(void)
{
    hx_pool *pool;

    assert_int_equal(hx_pool_open(&pool, hx_sys_n_cpu(), NULL, NULL), 0);
    return pool;
}

/* ---- search ------------------------------------------------------------ */

/* A walk is closed if the packed tile gives its states back. */
static void check_ring(int k2, const uint16_t state[256])
{
    uint8_t tile[256];

    hx_trellis_pack(k2, state, tile);
    for (int p = 0; p < 256; p++)
        assert_int_equal(hx_exl3_state(tile, k2, p), state[p]);
}

static double cost_of(const float target[256], const float value[256])
{
    double sum = 0;

    for (int p = 0; p < 256; p++)
        sum += ((double)value[p] - target[p]) * ((double)value[p] - target[p]);
    return sum;
}

/* encode_mul1: four tiles at 2, 2.5, 3 and 4 bits; states by another implementation. */
static void vectors(void **state)
{
    static const struct {
        int k2, states, cost;
    } at[] = {
        { 4, 4096, 6144 }, { 5, 6208, 8256 }, { 6, 8320, 10368 }, { 8, 10432, 12480 }
    };
    char *raw = read_file("tests/data/exl3/exl3_encode/encode_mul1.bin");
    const float *tile = (const float *)(const void *)raw;

    (void)state;
    for (size_t c = 0; c < HX_LEN(at); c++) {
        const uint16_t *want = (const uint16_t *)(const void *)(raw + at[c].states);
        const double *cost = (const double *)(const void *)(raw + at[c].cost);
        hx_trellis *t;

        assert_int_equal(hx_trellis_open(&t, HX_CB_MUL1, at[c].k2, 1, NULL), 0);
        for (int i = 0; i < 4; i += 2) {
            float target[2][256], value[2][256];
            uint16_t s[2][256];

            for (int j = 0; j < 2; j++)
                for (int p = 0; p < 256; p++)
                    target[j][p] =
                        tile[(i + j) * 256 + 16 * hx_exl3_row(p) + hx_exl3_col(p)];
            hx_trellis_search(t, 0, (const float(*)[256])target, s, value);
            for (int j = 0; j < 2; j++) {
                const double got = cost_of(target[j], value[j]);

                assert_memory_equal(s[j], want + (i + j) * 256, sizeof s[j]);
                assert_true(fabs(got / cost[i + j] - 1) < 1e-5); /* theirs are f32 sums */
            }
        }
        hx_trellis_close(t);
    }
    hx_free(raw);
}

/* Mean squared error of N(0, 1) at the best of a few scales, from the table of exl3.md
 * 10.5 (16 tiles there, 8 here: 6 per cent is the spread of so few). */
static const double distortion[HX_N_CB][17] = {
    [HX_CB_MUL1] = { 0, 0, .273, .138, .0678, .0342, .0173, .00877, .00440, 0, .00111, 0,
                     2.9e-4, 0, 8e-5, 0, 2e-5 },
    [HX_CB_MCG] = { 0, 0, .267, 0, .0682, 0, .0171, 0, .00450, 0, .00116, 0, 3.0e-4, 0,
                    8e-5, 0, 2e-5 },
};

static void every_rate(void **state)
{
    (void)state;
    for (int cb = 0; cb < HX_N_CB; cb++)
        for (size_t r = 0; r < HX_LEN(rates); r++) {
            const float std = cb == HX_CB_MUL1 ? 1.0f : 1.2441f;
            double best = 1;
            hx_trellis *t;

            if (!hx_trellis_takes((hx_codebook)cb, rates[r])) {
                assert_int_equal(hx_trellis_open(&t, (hx_codebook)cb, rates[r], 1, NULL),
                                 HX_EARG);
                continue;
            }
            assert_int_equal(hx_trellis_open(&t, (hx_codebook)cb, rates[r], 1, NULL), 0);
            for (int g = 0; g < 3; g++) {
                const float gain = std * (0.8f + 0.1f * (float)(g + (rates[r] < 8)));
                double sum = 0;

                for (int i = 0; i < 8; i += 2) {
                    float target[2][256], value[2][256];
                    uint16_t s[2][256];

                    for (int p = 0; p < 512; p++)
                        (&target[0][0])[p] =
                            gain * (float)hx_rng_normal(7, (uint64_t)(i * 256 + p));
                    hx_trellis_search(t, 0, (const float(*)[256])target, s, value);
                    for (int j = 0; j < 2; j++) {
                        check_ring(rates[r], s[j]);
                        sum +=
                            cost_of(target[j], value[j]) / (double)(gain * gain) / 2048;
                    }
                }
                best = HX_MIN(best, sum);
            }
            if (distortion[cb][rates[r]] != 0 && rates[r] < 12)
                assert_true(best < distortion[cb][rates[r]] * 1.06);
            hx_trellis_close(t);
            if (!all_cases && rates[r] == 4)
                r += 2; /* the low rates are slow */
        }
}

/* All instruction sets give the bits of the plain one. */
static void same_bits(void **state)
{
    static const hx_enc_kern *const kern[HX_N_ISA] = {
        &hx_enc_scalar,
#if defined(__x86_64__)
        &hx_enc_avx2,
        &hx_enc_avx512
#endif
    };
    enum { PREV = 65536 / 2 + HX_ENC_GROUP };
    static float value[65536], prev[2][PREV], next[HX_N_ISA][2][PREV];
    static uint8_t pick[HX_N_ISA][2][PREV];
    static float a[48 * 40], b[40 * 48], c[HX_N_ISA][48 * 48];

    (void)state;
    for (int i = 0; i < 65536; i++)
        value[i] = (float)hx_rng_normal(1, (uint64_t)i);
    for (int i = 0; i < PREV; i++)
        for (int j = 0; j < 2; j++)
            prev[j][i] = hx_rng_unit(2, (uint64_t)(2 * i + j)) < 0.1
                             ? HX_ENC_FAR
                             : (float)hx_rng_unit(3, (uint64_t)(2 * i + j));
    for (int i = 0; i < 48 * 40; i++) {
        a[i] = (float)hx_rng_normal(4, (uint64_t)i);
        b[i] = (float)hx_rng_normal(5, (uint64_t)i);
    }
    for (int isa = 0; isa < HX_N_ISA; isa++) {
        if (!hx_cpu_has((hx_isa)isa))
            continue;
        for (int in = 1; in <= 8; in++)
            for (int out = HX_MAX(1, in - (in <= 4)); out <= HX_MIN(in + (in < 4), 8);
                 out++)
                for (int track = 0; track < 2; track++) {
                    hx_enc_step s = { .value = value,
                                      .prev = { prev[0], prev[1] },
                                      .target = { 0.5f, -1 },
                                      .in = in,
                                      .out = out };
                    const size_t n = 65536u >> out;

                    if (in != out && in + out > 7)
                        continue;
                    for (int j = 0; j < 2; j++) {
                        s.next[j] = next[isa][j];
                        s.pick[j] = track ? pick[isa][j] : NULL;
                    }
                    kern[isa]->step(&s);
                    if (isa == 0) /* what follows is compared after the last set */
                        continue;
                    for (int j = 0; j < 2; j++) {
                        s.next[j] = next[0][j];
                        s.pick[j] = track ? pick[0][j] : NULL;
                    }
                    kern[0]->step(&s);
                    for (int j = 0; j < 2; j++) {
                        assert_memory_equal(next[0][j], next[isa][j], n * sizeof(float));
                        if (track)
                            assert_memory_equal(pick[0][j], pick[isa][j], n);
                    }
                }
        kern[isa]->product(c[isa], 48, a, 1, 48, b, 48, 48, 48, 40, -1);
        kern[isa]->product(c[isa], 48, a, 40, 1, b, 48, 48, 48, 40, 1);
        assert_memory_equal(c[0], c[isa], sizeof c[0]);
    }
}

/* ---- algebra ------------------------------------------------------------- */

static void factors(void **state)
{
    enum { N = 208, K = 300 };
    static float x[K * N], a[N * N], u[N * N], r[N];
    hx_pool *pool = open_pool();
    double worst = 0;

    (void)state;
    for (int i = 0; i < K * N; i++)
        x[i] = (float)hx_rng_normal(9, (uint64_t)i);
    hx_dense_gram(pool, a, N, x, N, K, N, 1);
    hx_dense_mirror(a, N);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            double want = 0;

            for (int l = 0; l < K; l++)
                want += (double)x[l * N + i] * x[l * N + j];
            worst = fmax(worst, fabs(want - (double)a[i * N + j]));
        }
    assert_true(worst < 1e-3); /* of sums about 300 */
    memcpy(u, a, sizeof u);
    assert_true(hx_dense_factor(pool, u, N));
    worst = 0;
    for (int i = 0; i < N; i++)
        for (int j = i; j < N; j++) {
            double got = 0;

            for (int l = 0; l <= i; l++)
                got += (double)u[l * N + i] * u[l * N + j];
            worst = fmax(worst, fabs(got - (double)a[i * N + j]));
        }
    assert_true(worst < 1e-3);
    for (int i = 0; i < N; i++) {
        double b = 0;

        for (int j = 0; j < N; j++)
            b += (double)a[i * N + j] * (j % 5 - 2);
        r[i] = (float)b;
    }
    hx_dense_solve(u, N, r);
    for (int i = 0; i < N; i++)
        assert_true(fabs((double)r[i] - (i % 5 - 2)) < 1e-2);
    a[70 * N + 70] = -1;
    assert_false(hx_dense_factor(pool, a, N));
    hx_pool_close(pool);
}

/* ---- matrices ------------------------------------------------------------ */

typedef struct {
    double mse, proxy;
} quality;

/* Encodes and measures what the decoder makes of it. h: damped in the measure, or NULL. */
static quality encode_and_measure(const hx_exl3_job *job, hx_pool *pool)
{
    const int64_t n_pad = HX_EXL3_PAD(job->n), k_pad = HX_EXL3_PAD(job->k);
    uint16_t *trellis = hx_new(uint16_t, n_pad * k_pad / 32 * job->k2);
    uint16_t *suh = hx_new(uint16_t, k_pad), *svh = hx_new(uint16_t, n_pad);
    float *got = hx_new(float, job->n * job->k);
    hx_exl3_out out = { .trellis = trellis, .suh = suh, .svh = svh };
    const hx_mat m = { .fmt = HX_FMT_EXL3,
                       .n = job->n,
                       .k = job->k,
                       .n_pad = n_pad,
                       .k_pad = k_pad,
                       .w = trellis,
                       .suh = suh,
                       .svh = svh,
                       .k2 = job->k2,
                       .codebook = job->codebook };
    double e2 = 0, w2 = 0, ehe = 0, whw = 0, mean = 0;
    hx_err err = { 0 };

    if (hx_exl3_encode(job, pool, &out, &err) != 0)
        fail_msg("%s", err.msg);
    assert_int_equal(hx_mat_expand(&m, got, NULL), 0);
    for (int64_t i = 0; i < job->k && job->h != NULL; i++)
        mean += (double)job->h[i * k_pad + i] / (double)job->k;
    for (int64_t j = 0; j < job->n; j++)
        for (int64_t i = 0; i < job->k; i++) {
            const double w = (double)job->w[j * job->k + i],
                         e = (double)got[j * job->k + i] - w;

            e2 += e * e;
            w2 += w * w;
            for (int64_t l = 0; l < job->k && job->h != NULL; l++) {
                const double h = (double)job->h[i * k_pad + l] +
                                 (i == l ? (double)HX_EXL3_DAMP * mean : 0);
                const double wl = (double)job->w[j * job->k + l],
                             el = (double)got[j * job->k + l] - wl;

                ehe += e * h * el;
                whw += w * h * wl;
            }
        }
    assert_true(fabs(out.mse / (e2 / w2) - 1) < 1e-3);
    if (job->h != NULL)
        assert_true(fabs(out.proxy / (ehe / whw) - 1) < 1e-3);
    hx_free(trellis);
    hx_free(suh);
    hx_free(svh);
    hx_free(got);
    return (quality) { e2 / w2, job->h != NULL ? ehe / whw : e2 / w2 };
}

/* quantize_k3_mul1: correlated inputs, uneven channels; proxy error 0.00687 by another
 * implementation with refit. */
static void hessian(void **state)
{
    GOLDEN_NEED(SHARED "exl3_vectors/quantize_k3_mul1.bin");
    char *raw = read_file(SHARED "exl3_vectors/quantize_k3_mul1.bin");
    hx_pool *pool = open_pool();
    float *w = hx_new(float, 128 * 256);
    static const struct {
        int k2;
        double theirs;
    } want[] = { { 4, .02253 }, { 5, .01079 }, { 6, .00521 }, { 8, .00135 } };

    (void)state;
    for (int i = 0; i < 256; i++)
        for (int j = 0; j < 128; j++)
            memcpy(&w[j * 256 + i], raw + 4 * (i * 128 + j), 4);
    for (size_t i = 0; i < HX_LEN(want); i++) {
        const hx_exl3_job job = {
            .w = w,
            .h = (const float *)(const void *)(raw + 131072),
            .n = 128,
            .k = 256,
            .codebook = HX_CB_MUL1,
            .k2 = want[i].k2,
            .sign_in = (const float *)(const void *)(raw + 393216),
            .sign_out = (const float *)(const void *)(raw + 394240),
        };
        const quality q = encode_and_measure(&job, pool);

        print_message("K = %g: proxy error %.5f, theirs %.5f\n", want[i].k2 / 2.0,
                      q.proxy, want[i].theirs);
        /* Theirs with the full suh too. With a matrix this small the error changes by 2
         * per cent, up or down, with the last digits of the gain. */
        assert_true(q.proxy < want[i].theirs * 1.04);
        if (want[i].k2 == 6)
            assert_true(q.proxy <= 0.006867173339573108);
    }
    hx_free(w);
    hx_pool_close(pool);
    hx_free(raw);
}

/* err_identity of the reference quantizer's own matrices. */
static void golden_cases(void **state)
{
    GOLDEN_NEED(SHARED "exl3_golden/MANIFEST.json");
    hx_json *man = golden_json(SHARED "exl3_golden/MANIFEST.json");
    golden_file in = golden_open(SHARED "exl3_golden/inputs.safetensors");
    const hx_json *cases = hx_json_get(man, "cases");
    hx_pool *pool = open_pool();
    double sum = 0;
    int n = 0;

    (void)state;
    for (size_t i = 0; i < hx_json_len(cases); i++) {
        const hx_json *c = hx_json_at(cases, i);
        const hx_str name = hx_json_str(hx_json_get(c, "name")),
                     cb = hx_json_str(hx_json_get(c, "codebook"));
        const hx_json *t = hx_json_get(in.head, hx_json_str(hx_json_get(c, "weight")).p);
        hx_exl3_job job = { .n = hx_json_int(hx_json_get(c, "out"), 0),
                            .k = hx_json_int(hx_json_get(c, "in"), 0),
                            .k2 = (int32_t)(2 * hx_json_int(hx_json_get(c, "K"), 0)),
                            .seed = 1 };
        const char *raw =
            in.data + hx_json_int(hx_json_at(hx_json_get(t, "data_offsets"), 0), 0);
        const double theirs =
            hx_json_num(hx_json_get(hx_json_get(c, "err_identity"), "rel_mse"), 0);

        if (!all_cases && (name.p[0] != 'b' || job.k2 == 4 || job.k2 == 8))
            continue;
        while (!hx_str_is(cb, cb_name[job.codebook]))
            job.codebook++;
        float *w = hx_new(float, job.n *job.k);

        for (int64_t j = 0; j < job.n * job.k; j++) /* through f16, as theirs were */
            w[j] = hx_f16_to(hx_f16_from(hx_bf16_at(raw, j)));
        job.w = w;
        const double ours = encode_and_measure(&job, pool).mse;

        if (all_cases || ours > theirs)
            print_message("%.*s: %.6f, theirs %.6f: %.4f\n", (int)name.n, name.p, ours,
                          theirs, ours / theirs);
        assert_true(ours <= theirs * 1.01);
        sum += ours / theirs;
        n++;
        hx_free(w);
    }
    print_message("mean squared error: %.4f of theirs over %d matrices\n", sum / n, n);
    assert_true(n >= 6 && sum / n <= 1);
    hx_pool_close(pool);
    golden_close(&in);
    hx_json_free(man);
}

/* Sides that are no multiple of 128, outputs and inputs without weights, nothing at all;
 * one and two threads give the same bytes. */
static void odd_shapes(void **state)
{
    enum { N = 200, K = 136, N_PAD = 256, K_PAD = 256, K2 = 8 };
    static float w[N * K], h[K_PAD * K_PAD];
    static uint16_t trellis[2][N_PAD * K_PAD / 32 * K2], suh[2][K_PAD], svh[2][N_PAD];
    hx_exl3_job job = { .w = w, .h = h, .n = N, .k = K, .codebook = HX_CB_MCG, .k2 = K2 };
    hx_pool *pool[2] = { NULL, NULL };

    (void)state;
    assert_int_equal(hx_pool_open(&pool[1], 2, NULL, NULL), 0);
    for (int i = 0; i < N * K; i++)
        if (i / K != 3 && i % K != 7)
            w[i] = (float)hx_rng_normal(1, (uint64_t)i) * 0.02f;
    for (int i = 0; i < K; i++)
        h[i * K_PAD + i] = i == 9 ? 0 : 1 + (float)(i % 3);
    for (int t = 0; t < 2; t++) {
        hx_exl3_out out = { .trellis = trellis[t], .suh = suh[t], .svh = svh[t] };

        assert_int_equal(hx_exl3_encode(&job, pool[t], &out, NULL), 0);
        assert_true(out.proxy < 0.006);
    }
    assert_memory_equal(trellis[0], trellis[1], sizeof trellis[0]);
    assert_memory_equal(suh[0], suh[1], sizeof suh[0]);
    assert_memory_equal(svh[0], svh[1], sizeof svh[0]);
    assert_int_equal(svh[0][3] & 0x7fff, 0);
    assert_int_equal(suh[0][7] & 0x7fff, 0);
    assert_true(encode_and_measure(&job, pool[1]).proxy < 0.006);

    hx_exl3_out out = { .trellis = trellis[0], .suh = suh[0], .svh = svh[0] };
    hx_err err;

    memset(w, 0, sizeof w);
    assert_int_equal(hx_exl3_encode(&job, NULL, &out, NULL), 0);
    assert_true(out.mse == 0 && suh[0][0] == 0);
    w[5] = NAN;
    assert_int_equal(hx_exl3_encode(&job, NULL, &out, &err), HX_EARG);
    assert_non_null(strstr(err.msg, "[0, 5] is not finite"));
    hx_pool_close(pool[1]);
}

/* The k-th allocation fails, for every k. */
static void no_memory(void **state)
{
    static float w[128 * 128];
    static uint16_t trellis[128 * 128 / 32 * 16], suh[128], svh[128];
    const hx_exl3_job job = {
        .w = w, .n = 128, .k = 128, .codebook = HX_CB_MUL1, .k2 = 16
    };
    hx_exl3_out out = { .trellis = trellis, .suh = suh, .svh = svh };
    const int64_t before = hx_test_live_allocs();
    int rc = HX_ENOMEM;
    hx_err err;

    (void)state;
    for (int64_t k = 1; rc == HX_ENOMEM; k++) {
        hx_test_fail_at(k);
        rc = hx_exl3_encode(&job, NULL, &out, &err);
        hx_test_fail_at(0);
        assert_int_equal(hx_test_live_allocs(), before);
    }
    assert_int_equal(rc, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors),    cmocka_unit_test(every_rate),
        cmocka_unit_test(same_bits),  cmocka_unit_test(factors),
        cmocka_unit_test(hessian),    cmocka_unit_test(golden_cases),
        cmocka_unit_test(odd_shapes), cmocka_unit_test(no_memory),
    };

    all_cases = argc > 1 && strcmp(argv[1], "all") == 0;
    return cmocka_run_group_tests_name("exl3_encode", tests, NULL, NULL);
}
