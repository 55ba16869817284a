/* cpu_test.c - what ops_test.c does not see of the CPU backend: that every kernel has the
 * same bits on every instruction set and length, the number formats in full, long
 * recurrences at the edge of the range of exp, and ranking against a plain sort. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "dev/canon.h"
#include "dev/cpu_kern.h"

static const hx_kern *kernels_of(hx_isa isa)
{
    const hx_dev d = { .level = isa };

    return hx_cpu_kern(&d);
}

static float uniform(uint64_t *at)
{
    return (float)(hx_rng_unit(7, (*at)++) * 2 - 1);
}

static float *fill(size_t n, uint64_t seed, float size)
{
    float *p = hx_new(float, n);

    assert_non_null(p);
    for (size_t i = 0; i < n; i++)
        p[i] = uniform(&seed) * size;
    return p;
}

/* ---- kernels --------------------------------------------------------- */

enum { MAX_N = 1100, OUT = 64 * MAX_N };

/* Every kernel once, on n elements of x; results one after the other from out on. */
static float *run_sums(const hx_kern *v, float *out, const float *x, int64_t n)
{
    double mass;
    bool nan;

    *out++ = (float)v->sum(x, n);
    *out++ = (float)v->dot(x, x + 1, n);
    *out++ = (float)v->spread(x, 0.1f, n);
    *out++ = v->peak(x, n, &nan);
    *out++ = (float)v->find(x, n, 0.9f, 1.5f);
    *out++ = (float)v->weigh(NULL, x, 1, 100, n);
    *out++ = (float)v->tally(x, NULL, 0.2f, n, &mass);
    *out++ = (float)v->tally(x, x + 3, 0.2f, n, &mass);
    *out++ = (float)mass;
    *out = (float)v->weigh(out + 1, x, 1, 3, n);
    return out + 1 + n;
}

static float *run_elements(const hx_kern *v, float *out, const float *x, int64_t n)
{
    const float *row[4] = { x, x + 7, x + 20, x + 31 };
    float top = -1;

    v->norm(out, x, 0.2f, 1.3f, x + 5, x + 9, n), out += n;
    v->mix(out, x, x + 50, x + 3, 17, 5, n), out += n;
    for (int64_t s = 1; s <= 5; s++) {
        memcpy(out, x, (size_t)(s * n) * sizeof(float));
        v->merge(out, x + 40, x, x + 8, s, n), out += s * n;
    }
    v->swiglu(out, x, x + 11, 0.5f, n), out += n;
    v->gate(out, x, x + 2, 3, -5, n), out += n;
    v->gated(out, x, 0.7f, x + 1, x + 2, n), out += n;
    v->taps(out, n, x, 4, n), v->taps(out, n, x, 3, n), out += 4 * n;
    v->conv(out, row, x, 3, 4, n), out += n;
    memcpy(out, x, (size_t)n * sizeof(float));
    *out = v->soften(out, 40, &top, n), out += n;
    *out++ = v->exp(x[0] * 80);
    v->relu_mix(out, x, 9, x + 30, 6, 0.3f, 0.2f, n), out += n;
    v->pool(out, row, row + 1, x, 3, n), out += n;
    v->narrow((uint16_t *)out, x, n), v->widen(out + n, out, HX_FMT_BF16, 1, n),
        out += 2 * n;
    v->widen(out, x, HX_FMT_F16, 1, n), out += n;
    v->widen(out, x, HX_FMT_FP8, 0.3f, n), out += n;
    return out;
}

static float *run_products(const hx_kern *v, float *out, const float *x, int64_t n)
{
    const int64_t m = 1 + n % 9, w = 1 + n % 67;

    v->dots(out, 8, x, 3, m, x + 5, 2, 1 + n % 8, n), out += m * 8;
    v->blend(out, w, NULL, x, 5, m, x + 2, 3, n % 20, w);
    v->blend(out, w, x + 1, x, 5, m, x + 2, 3, n % 20, w), out += m * w;
    return out;
}

static float *run_kda(const hx_kern *v, float *out, const float *x, int64_t n)
{
    float w[HX_KERN_COLS], *terms = out;
    hx_kern_kda row = { .k = x,
                        .v = x + 1,
                        .decay = out,
                        .dk = out + n,
                        .dq = out + 2 * n,
                        .beta = 0.4f,
                        .kq = 0.3f,
                        .o = out + 3 * n };

    v->kda_terms(terms, terms + n, terms + 2 * n, x + 9, x, x + 3, n), out += 4 * n;
    memset(terms + 3 * n, 0, (size_t)n * sizeof(float));
    for (int i = 0; i < 2; i++) {
        v->kda_pass(x, 5, NULL, 0, n, 0, NULL, &row, w);
        v->kda_pass(x, 5, out, HX_KERN_COLS, n, 0, &row, &row, w);
        v->kda_pass(out, HX_KERN_COLS, out, HX_KERN_COLS, n, 0, &row, NULL, w);
        row.o = NULL;
    }
    return out + HX_KERN_COLS * n;
}

static float *run_maps(const hx_kern *v, float *out, const float *x, int64_t n)
{
    const int64_t s = 1 + n % 8;

    memcpy(out, x, (size_t)(s * (2 + s) * HX_KERN_LANES) * sizeof(float));
    v->hc_maps(out, HX_KERN_LANES, x, x + 40, s, 1e-6f, 20);
    return out + s * (2 + s) * HX_KERN_LANES;
}

static void test_same_bits(void **state)
{
    static float *(*const run[])(const hx_kern *, float *, const float *, int64_t) = {
        run_sums, run_elements, run_products, run_kda, run_maps,
    };
    float *x = fill(8 * MAX_N, 3, 1), *want = hx_new(float, OUT),
          *got = hx_new(float, OUT);

    (void)state;
    assert_non_null(want);
    assert_non_null(got);
    for (int isa = HX_ISA_SCALAR + 1; isa < HX_N_ISA; isa++) {
        if (!hx_cpu_has((hx_isa)isa)) {
            printf("           this CPU lacks instruction set %d: not tested\n", isa);
            continue;
        }
        for (size_t i = 0; i < HX_LEN(run); i++)
            for (int64_t n = 1; n < MAX_N; n += n < 70 ? 1 : 171) {
                memset(want, 0, OUT * sizeof(float));
                memset(got, 0, OUT * sizeof(float));
                const int64_t used =
                    run[i](kernels_of(HX_ISA_SCALAR), want, x + n % 5, n) - want;
                run[i](kernels_of((hx_isa)isa), got, x + n % 5, n);
                assert_true(used <= OUT);
                for (int64_t j = 0; j < OUT; j++)
                    if (memcmp(&want[j], &got[j], sizeof(float)) != 0)
                        fail_msg("group %zu, %d elements, result %d: %.9g, expected %.9g",
                                 i, (int)n, (int)j, (double)got[j], (double)want[j]);
            }
    }
    hx_free(x);
    hx_free(want);
    hx_free(got);
}

static void test_exp(void **state)
{
    (void)state;
    for (int isa = 0; isa < HX_N_ISA; isa++) {
        if (!hx_cpu_has((hx_isa)isa))
            continue;
        const hx_kern *v = kernels_of((hx_isa)isa);

        for (double x = -120; x < 120; x += 0.00713) {
            const float e = v->exp((float)x), canon = hx_canon_exp((float)x);
            float g = (float)x, u = 3 - g, y;

            assert_memory_equal(&e, &canon, sizeof(e));
            if (fabs(x) < 87)
                assert_true(fabs((double)e / exp((double)(float)x) - 1) < 0x1p-22);
            v->swiglu(&y, &g, &u, 10, 1);
            const float act = hx_canon_act(g, u, 10);
            assert_memory_equal(&y, &act, sizeof(y));
        }
    }
}

/* Value of a small float: sign, exponent and mantissa bits, bias. */
static double small_float(unsigned bits, int e_bits, int m_bits, int bias)
{
    const unsigned m = bits & ((1u << m_bits) - 1),
                   e = bits >> m_bits & ((1u << e_bits) - 1);
    const double sign = (bits >> (e_bits + m_bits) & 1) != 0 ? -1 : 1;

    return sign * (e == 0 ? ldexp(m, 1 - bias - m_bits)
                          : ldexp((1u << m_bits) + m, (int)e - bias - m_bits));
}

static void test_widen(void **state)
{
    const hx_kern *v;

    (void)state;
    for (int isa = 0; isa < HX_N_ISA && hx_cpu_has((hx_isa)isa); isa++) {
        v = kernels_of((hx_isa)isa);
        for (unsigned i = 0; i < 65536; i++) {
            const uint16_t h = (uint16_t)i;
            float f16, bf16;

            v->widen(&f16, &h, HX_FMT_F16, 1, 1);
            v->widen(&bf16, &h, HX_FMT_BF16, 1, 1);
            if ((h & 0x7fff) > 0x7c00)
                assert_true(isnan(f16));
            else if ((h & 0x7fff) == 0x7c00)
                assert_true(isinf(f16) && (f16 < 0) == (h >> 15));
            else
                assert_true((double)f16 == small_float(i, 5, 10, 15));
            if ((h & 0x7f80) != 0x7f80)
                assert_true((double)bf16 == small_float(i, 8, 7, 127));
        }
        for (unsigned i = 0; i < 256; i++) {
            const uint8_t b = (uint8_t)i;
            float f;

            v->widen(&f, &b, HX_FMT_FP8, 0.1f, 1);
            if ((b & 0x7f) == 0x7f)
                assert_true(isnan(f));
            else
                assert_true(f == (float)small_float(i, 4, 3, 7) * 0.1f);
        }
    }
}

/* Nearest of the two neighbours, the even one of equally near. */
static void test_narrow(void **state)
{
    (void)state;
    for (int isa = 0; isa < HX_N_ISA && hx_cpu_has((hx_isa)isa); isa++)
        for (uint64_t i = 0; i < 100000; i++) {
            const uint32_t bits = (uint32_t)hx_rng_at(5, i) << (i % 4 == 0 ? 15 : 0);
            const double low = small_float(bits >> 16, 8, 7, 127),
                         high = small_float((bits >> 16) + 1, 8, 7, 127);
            uint16_t got;
            float x;

            memcpy(&x, &bits, sizeof(x));
            kernels_of((hx_isa)isa)->narrow(&got, &x, 1);
            if ((bits & 0x7f800000) == 0x7f800000 || (bits & 0x7fff0000) == 0x7f7f0000) {
                assert_true(!isnan(x) || ((got & 0x7f80) == 0x7f80 && (got & 0x7f) != 0));
                continue;
            }
            const double down = fabs((double)x - low), up = fabs((double)x - high);
            const bool want_up = up < down || (up == down && (bits >> 16 & 1) != 0);
            assert_int_equal(got, (uint16_t)((bits >> 16) + want_up));
        }
}

/* ---- operations ------------------------------------------------------ */

static hx_dev *open_cpu(int n_thread)
{
    const hx_dev_opt opt = { .n_threads = n_thread,
                             .limits = { .max_rows = 512,
                                         .max_k = 1024,
                                         .max_n = 70000,
                                         .max_active = 8,
                                         .max_expert = 16,
                                         .max_heads = 8,
                                         .max_ctx = 4096 } };
    hx_dev *d;
    hx_err err;

    if (hx_dev_open(&d, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    return d;
}

static hx_buf buf_of(void *p, size_t n)
{
    return (hx_buf) { p, n * sizeof(float) };
}

enum { KDA_N = 200, KDA_H = 2, KDA_W = 72 };

/* The recurrence as glm5_next.md 4 writes it, in double. */
static void plain_kda(const hx_kda_step_args *a, int64_t h, double *o)
{
    static double s[KDA_W][KDA_W];

    memset(s, 0, sizeof(s));
    for (int64_t t = 0; t < KDA_N; t++) {
        const float *q = (const float *)a->q.p + t * a->ld + h * KDA_W,
                    *k = (const float *)a->k.p + t * a->ld + h * KDA_W;
        const float *v = (const float *)a->v.p + t * a->ld + h * KDA_W,
                    *g = (const float *)a->g.p + (t * KDA_H + h) * KDA_W;
        const double beta = (double)((const float *)a->beta.p)[t * KDA_H + h];
        double qq = 1e-6, kk = 1e-6;

        for (int i = 0; i < KDA_W; i++) {
            qq += (double)q[i] * (double)q[i];
            kk += (double)k[i] * (double)k[i];
        }
        for (int j = 0; j < KDA_W; j++) {
            double u = 0, out = 0;

            for (int i = 0; i < KDA_W; i++) {
                s[i][j] *= exp((double)g[i]);
                u += s[i][j] * (double)k[i] / sqrt(kk);
            }
            for (int i = 0; i < KDA_W; i++) {
                s[i][j] += (double)k[i] / sqrt(kk) * beta * ((double)v[j] - u);
                out += s[i][j] * (double)q[i] / sqrt(qq) / sqrt(KDA_W);
            }
            o[(t * KDA_H + h) * KDA_W + j] = out;
        }
    }
}

/* Decays from none at all to exp(-5) a row: 1000 nats over the run. Prefill in one call
 * and in three, then decode in calls of 1 to 8 rows with rejected drafts: one answer. */
static void test_kda_runs(void **state)
{
    const size_t n = KDA_N * KDA_H * KDA_W, rec = HX_PEND_MAX * KDA_H * (3 * KDA_W + 1);
    float *qkv = fill(3 * n, 1, 1), *g = fill(n, 2, 1), *beta = fill(KDA_N * KDA_H, 3, 1);
    float *o = hx_new(float, n), *one = hx_new(float, n),
          *s = hx_new(float, KDA_H *KDA_W *KDA_W);
    float *pend = hx_new(float, rec);
    double *want = hx_new(double, n), worst = 0, size = 0;
    hx_dev *d = open_cpu(2);
    hx_err err = { 0 };

    (void)state;
    for (size_t i = 0; i < n; i++)
        g[i] = i % KDA_W < 8 ? -5 : i % KDA_W < 16 ? 0 : g[i] * 2.5f - 2.5f;
    for (size_t i = 0; i < KDA_N * KDA_H; i++)
        beta[i] = beta[i] * 0.5f + 0.5f;
    hx_span span = { .n_row = KDA_N };
    hx_kda_step_args a = {
        .o = buf_of(o, n),
        .q = buf_of(qkv, 3 * n),
        .k = buf_of(qkv + KDA_H * KDA_W, 3 * n - KDA_H * KDA_W),
        .v = buf_of(qkv + 2 * KDA_H * KDA_W, 3 * n - 2 * KDA_H * KDA_W),
        .g = buf_of(g, n),
        .beta = buf_of(beta, KDA_N * KDA_H),
        .state = buf_of(s, KDA_H * KDA_W * KDA_W),
        .pend = buf_of(pend, rec),
        .rows = { &span, 1, KDA_N },
        .heads = KDA_H,
        .width = KDA_W,
        .ld = 3 * KDA_H * KDA_W,
    };
    assert_int_equal(hx_op_kda_chunk(d, &a, &err), 0);
    for (int64_t h = 0; h < KDA_H; h++)
        plain_kda(&a, h, want);
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)o[i] - want[i]));
        size = fmax(size, fabs(want[i]));
    }
    assert_true(size > 0.02 && worst < 2e-6 * size);

    a.o = buf_of(one, n);
    hx_kda_step_args part = a;
    for (int64_t at = 0, commit = 0, k = 0; at < KDA_N; k++) {
        const bool chunk = at < 128;
        const int64_t m = HX_MIN(chunk ? 64 : 1 + k % 8, KDA_N - at),
                      keep = chunk ? m : HX_MAX(m - k % 3, 1);

        span = (hx_span) { .n_row = (int32_t)m,
                           .pos0 = (int32_t)at,
                           .commit = (int32_t)commit };
        part.rows.n_row = m;
        part.q = hx_buf_at(a.q, (size_t)(at * a.ld) * 4);
        part.k = hx_buf_at(a.k, (size_t)(at * a.ld) * 4);
        part.v = hx_buf_at(a.v, (size_t)(at * a.ld) * 4);
        part.g = hx_buf_at(a.g, (size_t)(at * KDA_H * KDA_W) * 4);
        part.o = hx_buf_at(a.o, (size_t)(at * KDA_H * KDA_W) * 4);
        part.beta = hx_buf_at(a.beta, (size_t)(at * KDA_H) * 4);
        assert_int_equal(
            chunk ? hx_op_kda_chunk(d, &part, &err) : hx_op_kda_step(d, &part, &err), 0);
        commit = chunk ? 0 : keep;
        at += keep;
    }
    assert_memory_equal(o, one, n * sizeof(float));
    hx_dev_close(d);
    float *all[] = { qkv, g, beta, o, one, s, pend };
    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_free(all[i]);
    hx_free(want);
}

/* Rows that do not fit one wave of hc_mix (96 of them here) are as when they are alone.
 */
static void test_hc_waves(void **state)
{
    enum { S = 8, D = 2048, R = 100, OUTS = S * (2 + S) };
    float *streams = fill((size_t)R * S * D, 1, 1),
          *fn = fill((size_t)OUTS * S * D, 2, 0.02f);
    float *base = fill(OUTS, 3, 1), scale[3] = { 1, 0.5f, 2 };
    float *x = hx_new(float, (R + 1) * D), *post = hx_new(float, (R + 1) * S);
    float *comb = hx_new(float, (R + 1) * S * S);
    const hx_mat m = { .fmt = HX_FMT_F32, .n = OUTS, .k = S * D, .w = fn };
    const hx_hc_mix_args a = { .x = buf_of(x, (R + 1) * D),
                               .post = buf_of(post, (R + 1) * S),
                               .comb = buf_of(comb, (R + 1) * S * S),
                               .streams = buf_of(streams, (size_t)R * S * D),
                               .base = buf_of(base, OUTS),
                               .scale = buf_of(scale, 3),
                               .fn = &m,
                               .rows = R,
                               .streams_n = S,
                               .dim = D,
                               .norm_eps = 1e-5f,
                               .eps = 1e-6f,
                               .iters = 20 };
    static const size_t rows[] = { 0, 15, 95, 96, 99 };
    hx_dev *d = open_cpu(2);
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_op_hc_mix(d, &a, &err), 0);
    for (size_t i = 0; i < HX_LEN(rows); i++) {
        hx_hc_mix_args one = a;

        one.rows = 1;
        one.streams = hx_buf_at(a.streams, rows[i] * S * D * 4);
        one.x = hx_buf_at(a.x, (size_t)R * D * 4);
        one.post = hx_buf_at(a.post, (size_t)R * S * 4);
        one.comb = hx_buf_at(a.comb, (size_t)R * S * S * 4);
        assert_int_equal(hx_op_hc_mix(d, &one, &err), 0);
        assert_memory_equal(x + rows[i] * D, one.x.p, D * 4);
        assert_memory_equal(post + rows[i] * S, one.post.p, S * 4);
        assert_memory_equal(comb + rows[i] * S * S, one.comb.p, S * S * 4);
        for (int64_t j = 0; j < S; j++) { /* columns sum to 1 after the last turn */
            double sum = 0;

            for (int64_t k = 0; k < S; k++)
                sum += (double)comb[rows[i] * S * S + (size_t)(k * S + j)];
            assert_true(fabs(sum - 1) < 1e-5);
        }
    }
    hx_dev_close(d);
    float *all[] = { streams, fn, base, x, post, comb };
    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_free(all[i]);
}

/* ---- ranking --------------------------------------------------------- */

typedef struct {
    double x;
    int32_t id;
} ranked;

static int compare(const void *pa, const void *pb)
{
    const ranked *a = pa, *b = pb;

    return a->x != b->x ? (a->x > b->x ? -1 : 1) : a->id < b->id ? -1 : 1;
}

static int compare_ids(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* Kinds of values: spread, few different ones, zeros of both signs, steep, one outlier.
 */
static float value_of(int kind, uint64_t i)
{
    const float u = (float)hx_rng_normal(11, i);

    switch (kind) {
    case 0:
        return u;
    case 1:
        return floorf(u);
    case 2:
        return u > 1 ? u : u > 0 ? 0.0f : -0.0f;
    case 3:
        return u * 8;
    default:
        return i % 5000 == 17 ? 1e30f : u * 1e-20f;
    }
}

static void test_topk(void **state)
{
    static const int32_t sizes[] = { 1, 7, 8, 9, 64, 65, 500, 3001 },
                         picks[] = { 1, 2, 8, 33, 512, 5000 };
    hx_dev *d = open_cpu(1);
    ranked *r = hx_new(ranked, 3001);
    float *score = hx_new(float, 3001);
    int32_t *pick = hx_new(int32_t, 5000), n_pick, want[3001];
    hx_err err = { 0 };

    (void)state;
    for (int kind = 0; kind < 5; kind++)
        for (size_t c = 0; c < HX_LEN(sizes) * HX_LEN(picks); c++) {
            const int32_t n = sizes[c % HX_LEN(sizes)], k = picks[c / HX_LEN(sizes)];
            const hx_span span = { .n_row = 1, .pos0 = n - 1 };
            const hx_topk_args a = { .pick = buf_of(pick, 5000),
                                     .n_pick = buf_of(&n_pick, 1),
                                     .score = buf_of(score, 3001),
                                     .rows = { &span, 1, 1 },
                                     .k = k,
                                     .pool_n = 1,
                                     .ld_score = n };

            for (int32_t i = 0; i < n; i++) {
                score[i] = value_of(kind, (uint64_t)(c * 5000) + (uint64_t)i);
                r[i] = (ranked) { (double)score[i], i };
            }
            qsort(r, (size_t)n, sizeof(*r), compare);
            assert_int_equal(hx_op_topk(d, &a, &err), 0);
            assert_int_equal(n_pick, HX_MIN(k, n));
            for (int32_t i = 0; i < n_pick; i++)
                want[i] = r[i].id;
            qsort(want, (size_t)n_pick, sizeof(*want), compare_ids);
            assert_memory_equal(pick, want, (size_t)n_pick * sizeof(*want));
        }
    hx_dev_close(d);
    hx_free(r);
    hx_free(score);
    hx_free(pick);
}

/* The id that a row draws, by a sort in double; *gap: how near the draw is to a boundary.
 */
static int32_t plain_sample(const hx_sample_row *s, ranked *r, int64_t n, double u,
                            double *gap)
{
    int64_t k = s->top_k > 0 ? HX_MIN(s->top_k, n) : n, m = 0;
    double mass = 0, kept = 0, sum = 0, best;

    *gap = 1;
    qsort(r, (size_t)n, sizeof(*r), compare);
    best = r[0].x;
    for (int64_t i = 0; i < k; i++)
        mass += exp((r[i].x - best) / (double)s->temperature);
    const double want = s->top_p > 0 && s->top_p < 1 ? (double)s->top_p * mass : mass * 2;
    for (; m < k && (m == 0 || kept < want); m++) {
        const double p = exp((r[m].x - best) / (double)s->temperature);

        if (s->min_p > 0 && p < (double)s->min_p)
            break;
        *gap = fmin(*gap, fabs(kept + p - want) / mass);
        kept += p;
    }
    for (int64_t i = 0; i < m; i++) {
        sum += exp((r[i].x - best) / (double)s->temperature);
        *gap = fmin(*gap, fabs(sum - u * kept) / mass);
        if (sum > u * kept)
            return r[i].id;
    }
    return r[m - 1].id;
}

static void test_sample(void **state)
{
    enum { N = 70000 };
    static const int32_t sizes[] = { 3, 40, 4096, N };
    static const hx_sample_row rows[] = {
        { .temperature = 1 },
        { .temperature = 0.3f, .top_p = 0.9f },
        { .temperature = 2, .top_k = 40 },
        { .temperature = 1, .top_k = 5, .top_p = 0.5f },
        { .temperature = 0.7f, .min_p = 0.05f },
        { .temperature = 1.5f, .top_k = 3000, .top_p = 0.95f, .min_p = 1e-4f },
        { .temperature = 1e-3f },
        { .temperature = 1e-39f },
        { .temperature = 1, .top_p = 0.999f },
        { .temperature = 1, .top_k = 1 },
    };
    hx_dev *d = open_cpu(1);
    ranked *r = hx_new(ranked, N);
    float *x = hx_new(float, N), *scratch = hx_new(float, 2 * N);
    int32_t id, n_unsure = 0, n_all = 0;
    hx_err err = { 0 };

    (void)state;
    for (uint64_t c = 0; c < 4 * 4 * HX_LEN(rows) * 3; c++) {
        hx_sample_row s = rows[c / 16 % HX_LEN(rows)];
        const int64_t n = sizes[c % 4];
        const hx_sample_args a = { .id = buf_of(&id, 1),
                                   .logits = buf_of(x, N),
                                   .scratch = buf_of(scratch, 2 * N),
                                   .row = &s,
                                   .rows = 1,
                                   .n_vocab = n,
                                   .n_token = n };
        double gap;

        s.seed = 3;
        s.counter = c;
        for (int64_t i = 0; i < n; i++) {
            x[i] = value_of((int)(c / 4 % 4), c * N + (uint64_t)i);
            r[i] = (ranked) { (double)x[i], (int32_t)i };
        }
        assert_int_equal(hx_op_sample(d, &a, &err), 0);
        const int32_t want = plain_sample(&s, r, n, hx_rng_unit(s.seed, s.counter), &gap);
        n_all++;
        if (gap < 1e-6)
            n_unsure++; /* f32 weights may fall on the other side */
        else
            assert_int_equal(id, want);
    }
    assert_true(n_unsure * 4 < n_all);
    hx_dev_close(d);
    hx_free(r);
    hx_free(x);
    hx_free(scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_exp),
        cmocka_unit_test(test_widen),     cmocka_unit_test(test_narrow),
        cmocka_unit_test(test_kda_runs),  cmocka_unit_test(test_hc_waves),
        cmocka_unit_test(test_topk),      cmocka_unit_test(test_sample),
    };

    return cmocka_run_group_tests_name("cpu", tests, NULL, NULL);
}
