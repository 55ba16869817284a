/* canon_test.c - the canonical arithmetic: canon.h against its definition, every
 * instruction set of this CPU against a plain evaluation of canon.h, bit for bit, and its
 * error against double precision. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "dev/cpu_matmul.h"
#include "dev/fmt_exl3.h"
#include "dev/fmt_fp8.h"

static const char *const isa_name[HX_N_ISA] = { "scalar", "avx2", "avx512" };
static const char *const cb_name[HX_N_CB] = { "3inst", "mcg", "mul1" };
static const int rates[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };

static uint64_t seed = 1;

static uint32_t rnd(void)
{
    return (uint32_t)(hx_rng_at(7, seed++) >> 32);
}

static float normal(void)
{
    return (float)hx_rng_normal(11, seed++);
}

static bool rate_ok(int k2, int cb)
{
    return k2 % 2 == 0 || cb == HX_CB_MUL1;
}

static const hx_mm_kernels *table(int isa)
{
#if defined(__x86_64__)
    return isa == HX_ISA_AVX512 ? &hx_mm_avx512
           : isa == HX_ISA_AVX2 ? &hx_mm_avx2
                                : &hx_mm_scalar;
#else
    (void)isa;
    return &hx_mm_scalar;
#endif
}

/* Equal bits; NaNs are equal whatever their payload. */
static void same_floats(const char *what, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (hx_bits_of(a[i]) != hx_bits_of(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            fail_msg("%s: element %zu is %.9g, expected %.9g", what, i, (double)a[i],
                     (double)b[i]);
}

/* ---- canon.h itself -------------------------------------------------- */

/* -ffp-contract=off must be in force: 1 - (1 - 2^-12)(1 + 2^-12) is 0 with a rounded
 * product. */
static void no_contraction(void **state)
{
    volatile float a = 1 - 0x1p-12f, b = 1 + 0x1p-12f, one = 1;
    const float x = a, y = b;

    (void)state;
    assert_true(one - x * y == 0.0f || x * y == 1 - 0x1p-24f);
    assert_true(fmaf(-x, y, one) == 0x1p-24f);
}

static void rotation(void **state)
{
    float v[128];
    double want[128] = { 0 };

    (void)state;
    for (int i = 0; i < 128; i++)
        v[i] = normal();
    for (int i = 0; i < 128; i++)
        for (int j = 0; j < 128; j++)
            want[i] += (__builtin_popcount((unsigned)(i & j)) % 2 ? -1 : 1) *
                       (double)v[j] / sqrt(128);
    hx_canon_rotate(v);
    for (int i = 0; i < 128; i++)
        assert_true(fabs((double)v[i] - want[i]) < 2e-6);
}

static void planes(void **state)
{
    (void)state;
    for (int a = -HX_CANON_AMAX; a <= HX_CANON_AMAX; a++) {
        int i, j, mi, mj;

        hx_canon_planes(a, &i, &j);
        hx_canon_planes(-a, &mi, &mj);
        assert_true(254 * i + j == a && abs(i) <= 127 && abs(j) <= 127 && mi == -i &&
                    mj == -j);
    }
}

static void quantize_edges(void **state)
{
    float x[128] = { 0 }, q;
    int16_t a[128];

    (void)state;
    assert_int_equal(hx_canon_quantize(x, a, &q), 0);
    assert_true(q == 0 && a[0] == 0);
    x[3] = -2;
    x[5] = 1.0f / 32385; /* half a step: to even */
    x[6] = 3.0f / 32385;
    assert_int_equal(hx_canon_quantize(x, a, &q), -32385 + 0 + 2 - (x[5] > 1.0f / 32385));
    assert_true(q == 2.0f / 32385 && a[3] == -32385);
    x[0] = NAN;
    hx_canon_quantize(x, a, &q);
    assert_true(isnan(q));
    x[0] = -INFINITY;
    hx_canon_quantize(x, a, &q);
    assert_true(isinf(q));
}

/* Step 5 as it is written: neighbours, level by level, an odd last one moves up. */
static float tree_of(const float *t, int64_t n)
{
    float *v = malloc((size_t)(n + 1) * sizeof(float));
    float sum;

    memcpy(v, t, (size_t)n * sizeof(float));
    for (; n > 1; n = (n + 1) / 2)
        for (int64_t i = 0; i < (n + 1) / 2; i++)
            v[i] = 2 * i + 1 < n ? v[2 * i] + v[2 * i + 1] : v[2 * i];
    sum = v[0];
    free(v);
    return sum;
}

static void tree(void **state)
{
    float t[300], level[32];

    (void)state;
    for (uint32_t n = 1; n < 300; n++) {
        for (uint32_t i = 0; i < n; i++) {
            t[i] = normal();
            hx_canon_tree_add(level, 1, i, t[i]);
        }
        assert_true(hx_canon_tree_sum(level, 1, n) == tree_of(t, n));
    }
}

static void exponential(void **state)
{
    double worst = 0;

    (void)state;
    for (double x = -87; x <= 88; x += 0.000137) {
        const double want = exp((double)(float)x);

        worst = fmax(worst, fabs((double)hx_canon_exp((float)x) / want - 1));
    }
    print_message("exp: largest relative error 2^%.2f\n", log2(worst));
    assert_true(worst < 0x1p-22);
    assert_true(hx_canon_exp(-1e30f) > 0 && hx_canon_exp(-1e30f) < 1.7e-38f);
    assert_true(hx_canon_exp(INFINITY) > 1e38f && isfinite(hx_canon_exp(INFINITY)));
    assert_true(isnan(hx_canon_act(NAN, 1, 10)) && isnan(hx_canon_act(1, NAN, 10)));
    assert_true(hx_canon_act(100, 100, 10) == hx_canon_act(10, 10, 0));
    assert_true(hx_canon_act(-100, -100, 10) == hx_canon_act(-100, -10, 0));
}

/* ---- kernels --------------------------------------------------------- */

static void decode_all(void **state)
{
    int16_t *want = hx_alloc(4096), *got = hx_alloc(4096);

    (void)state;
    for (int isa = HX_ISA_SCALAR; isa < HX_N_ISA; isa++)
        for (int cb = 0; cb < HX_N_CB && hx_cpu_has((hx_isa)isa); cb++)
            for (size_t i = 0; i < HX_LEN(rates); i++) {
                const size_t bytes = (size_t)hx_exl3_tile_bytes(rates[i]);

                if (!rate_ok(rates[i], cb))
                    continue;
                for (int rep = 0; rep < 40; rep++) {
                    /* exactly as long as the tiles, at any alignment: readers past the
                     * end show */
                    const size_t skip = rep % 5,
                                 row = bytes + (rep & 1 ? 7 * bytes + 3 : 0);
                    const size_t size = skip + 7 * row + bytes;
                    uint8_t *block = malloc(size);

                    for (size_t b = 0; b < size; b++)
                        block[b] = (uint8_t)rnd();
                    hx_mm_scalar.decode(block + skip, row, rates[i], (hx_codebook)cb,
                                        want);
                    table(isa)->decode(block + skip, row, rates[i], (hx_codebook)cb, got);
                    free(block);
                    for (int j = 0; j < 2048; j++)
                        if (want[j] != got[j])
                            fail_msg("%s %s rate %g: weight %d is %d, expected %d",
                                     isa_name[isa], cb_name[cb], rates[i] / 2.0, j,
                                     got[j], want[j]);
                }
            }
    hx_free(want);
    hx_free(got);
}

/* All states of a codebook through the vector code: K = 16 would be one state per two
 * bytes; K = 8 tiles hold every state at even or odd bytes. */
static void decode_every_state(void **state)
{
    int16_t *want = hx_alloc(4096), *got = hx_alloc(4096);
    uint8_t block[8 * 256];

    (void)state;
    for (int isa = HX_ISA_AVX2; isa < HX_N_ISA; isa++)
        for (int cb = 0; cb < HX_N_CB && hx_cpu_has((hx_isa)isa); cb++)
            for (int s = 0; s < 65536; s += 1024) {
                for (int i = 0; i < 2048;
                     i++) { /* states s, s + 1, … big-endian in the stream */
                    const int v = s + i / 2;

                    block[i ^ 3] = (uint8_t)(i % 2 ? v : v >> 8);
                }
                hx_mm_scalar.decode(block, 256, 16, (hx_codebook)cb, want);
                table(isa)->decode(block, 256, 16, (hx_codebook)cb, got);
                assert_memory_equal(want, got, 4096);
            }
    hx_free(want);
    hx_free(got);
}

static void fill_row(float *x, int kind)
{
    for (int i = 0; i < 128; i++)
        x[i] = kind == 1   ? 0
               : kind == 2 ? normal() * 1e-41f
                           : normal() * (float)pow(10, kind % 7);
    if (kind == 3)
        x[17] = NAN;
    if (kind == 4)
        x[99] = INFINITY;
    if (kind == 5)
        for (int i = 0; i < 128; i++)
            x[i] = (float)((int)(rnd() % 3) - 1);
}

static void rows_all(void **state)
{
    hx_mm_exl3 *want = hx_alloc(sizeof(*want)), *got = hx_alloc(sizeof(*got));
    float x[128], y[128], z[128], h[128];
    uint8_t scale[257];

    (void)state;
    for (int isa = HX_ISA_AVX2; isa < HX_N_ISA; isa++)
        for (int rep = 0; rep < 200 && hx_cpu_has((hx_isa)isa); rep++) {
            const hx_mm_kernels *k = table(isa);

            fill_row(x, rep % 20);
            fill_row(y, rep % 11);
            for (int i = 0; i < 128; i++) {
                const uint16_t f = hx_f16_from(normal());

                memcpy(scale + 1 + 2 * i, &f, 2);
            }
            for (int mul1 = 0; mul1 < 2; mul1++) {
                const size_t n = mul1 ? HX_MM_MUL1_BYTES : HX_MM_EXL3_BYTES;

                memset(want, 0, sizeof(*want));
                memset(got, 0, sizeof(*got));
                hx_mm_scalar.quantize(x, scale + 1, mul1, want);
                k->quantize(x, scale + 1, mul1, got);
                same_floats("quantize", &got->q, &want->q, 1);
                got->q = want->q;
                assert_memory_equal(got, want, n);
            }
            memcpy(z, y, sizeof(z));
            memcpy(h, y, sizeof(h));
            k->rotate(z, scale + 1);
            hx_mm_scalar.rotate(h, scale + 1);
            same_floats("rotate", z, h, 128);
            k->act(z, x, y, rep & 1 ? 1.5f : 0);
            hx_mm_scalar.act(h, x, y, rep & 1 ? 1.5f : 0);
            same_floats("act", z, h, 128);
        }
    hx_free(want);
    hx_free(got);
}

static void widen_all(void **state)
{
    uint8_t in[600];
    float want[129], got[129];

    (void)state;
    for (int isa = HX_ISA_AVX2; isa < HX_N_ISA; isa++)
        for (int fmt = HX_FMT_F32; fmt <= HX_FMT_FP8 && hx_cpu_has((hx_isa)isa); fmt++)
            for (int n = 0; n <= 128; n++) {
                for (size_t i = 0; i < sizeof(in); i++)
                    in[i] = (uint8_t)rnd();
                want[n] = got[n] = 5;
                hx_mm_scalar.widen(want, in + 1, (hx_fmt)fmt, 0.3f, n);
                table(isa)->widen(got, in + 1, (hx_fmt)fmt, 0.3f, n);
                same_floats(hx_fmt_name((hx_fmt)fmt), got, want, (size_t)n + 1);
            }
}

/* ---- matrices -------------------------------------------------------- */

typedef struct {
    hx_mat m;
    uint8_t *w, *scale, *suh, *svh, *bias;
    int16_t *ints; /* EXL3: [k_pad, n_pad] integer weights */
} matrix;

static uint8_t *random_bytes(size_t n)
{
    uint8_t *p = malloc(n);

    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)rnd();
    return p;
}

static uint8_t *random_halves(int64_t n, float size)
{
    uint16_t *p = malloc((size_t)n * 2);

    for (int64_t i = 0; i < n; i++)
        p[i] = hx_f16_from(normal() * size);
    return (uint8_t *)p;
}

static void set_plain(matrix *a)
{
    const int64_t n = a->m.n * a->m.k;

    a->w = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) {
        const float v = normal();

        if (a->m.fmt == HX_FMT_F32)
            ((float *)(void *)a->w)[i] = v;
        else if (a->m.fmt == HX_FMT_FP8)
            a->w[i] = (uint8_t)(rnd() % 0x70 | (v < 0 ? 0x80 : 0));
        else
            ((uint16_t *)(void *)a->w)[i] =
                a->m.fmt == HX_FMT_F16 ? hx_f16_from(v) : hx_bf16_from(v);
    }
    a->m.block_n = 24;
    a->m.block_k = 40;
    float *scale = malloc((size_t)((a->m.n / 24 + 1) * (a->m.k / 40 + 1)) * 4);
    for (int64_t i = 0; i < (a->m.n / 24 + 1) * (a->m.k / 40 + 1); i++)
        scale[i] = 0.01f + fabsf(normal());
    a->scale = (uint8_t *)scale;
}

static int16_t *integer_weights(const hx_mat *m)
{
    int16_t *w = malloc((size_t)(m->n_pad * m->k_pad) * sizeof(*w));

    for (int64_t tk = 0; tk < m->k_pad / 16; tk++)
        for (int64_t tn = 0; tn < m->n_pad / 16; tn++)
            for (int p = 0; p < 256; p++) {
                const uint32_t s = hx_exl3_state(hx_exl3_tile_at(m, tk, tn), m->k2, p);

                w[(16 * tk + hx_exl3_row(p)) * m->n_pad + 16 * tn + hx_exl3_col(p)] =
                    (int16_t)hx_exl3_int(s, m->codebook);
            }
    return w;
}

static matrix matrix_new(hx_fmt fmt, int64_t n, int64_t k, int k2, int cb, bool bias)
{
    matrix a = { .m = { .fmt = fmt, .n = n, .k = k } };

    if (fmt == HX_FMT_EXL3) {
        a.m.n_pad = (n + 127) / 128 * 128;
        a.m.k_pad = (k + 127) / 128 * 128;
        a.m.k2 = k2;
        a.m.codebook = (hx_codebook)cb;
        a.w = random_bytes((size_t)(a.m.n_pad * a.m.k_pad / 16 * k2));
        a.suh = random_halves(a.m.k_pad, 0.05f);
        a.svh = random_halves(a.m.n_pad, 1);
    } else
        set_plain(&a);
    a.bias = bias ? random_halves(n, 1) : NULL;
    a.m.w = a.w;
    a.m.scale = a.scale;
    a.m.suh = a.suh;
    a.m.svh = a.svh;
    a.m.bias = a.bias;
    if (fmt == HX_FMT_EXL3)
        a.ints = integer_weights(&a.m);
    return a;
}

static void matrix_free(matrix *a)
{
    free(a->w);
    free(a->scale);
    free(a->suh);
    free(a->svh);
    free(a->bias);
    free(a->ints);
}

/* canon.h read aloud: y = W x for one row. */
static void canon_exl3(const matrix *a, const float *x, float *y)
{
    const hx_mat *m = &a->m;
    const int64_t blocks = m->k_pad / 128;
    float *t = malloc((size_t)(blocks * m->n_pad) * 4);
    float *out = malloc((size_t)m->n_pad * 4);

    for (int64_t b = 0; b < blocks; b++) {
        float v[128], q;
        int16_t act[128];
        int hi[128], lo[128];

        for (int i = 0; i < 128; i++)
            v[i] =
                b * 128 + i < m->k ? x[b * 128 + i] * hx_f16_at(m->suh, b * 128 + i) : 0;
        hx_canon_rotate(v);
        const int32_t act_sum = hx_canon_quantize(v, act, &q);
        for (int i = 0; i < 128; i++)
            hx_canon_planes(act[i], &hi[i], &lo[i]);
        for (int64_t o = 0; o < m->n_pad; o++) {
            const int16_t *w = a->ints + b * 128 * m->n_pad + o;
            int64_t sum = 0, sum_i = 0, sum_j = 0;

            for (int i = 0; i < 128; i++, w += m->n_pad) {
                sum += *w * act[i];
                sum_i += *w * hi[i];
                sum_j += *w * lo[i];
            }
            assert_true(sum_i == (int32_t)sum_i && sum_j == (int32_t)sum_j);
            assert_true(m->codebook != HX_CB_MUL1 || sum == (int32_t)sum);
            t[o * blocks + b] =
                m->codebook == HX_CB_MUL1
                    ? hx_canon_term_mul1((int32_t)sum, act_sum, q)
                    : hx_canon_term_half((int32_t)sum_i, (int32_t)sum_j, q);
        }
    }
    for (int64_t o = 0; o < m->n_pad; o++)
        out[o] = tree_of(t + o * blocks, blocks);
    for (int64_t o = 0; o < m->n_pad; o += 128)
        hx_canon_rotate(out + o);
    for (int64_t o = 0; o < m->n; o++)
        y[o] = out[o] * hx_f16_at(m->svh, o);
    free(t);
    free(out);
}

/* Element of a plain matrix. */
static float plain_at(const hx_mat *m, int64_t n, int64_t k)
{
    const int64_t i = n * m->k + k;

    return m->fmt == HX_FMT_F32    ? hx_f32_at(m->w, i)
           : m->fmt == HX_FMT_F16  ? hx_f16_at(m->w, i)
           : m->fmt == HX_FMT_BF16 ? hx_bf16_at(m->w, i)
                                   : hx_fp8_at(m->w, i) * hx_fp8_scale(m, n, k);
}

/* Rows first … of a plain matrix. */
static void canon_plain(const hx_mat *m, int64_t first, int64_t n, const float *x,
                        float *y)
{
    const int64_t blocks = (m->k + 127) / 128;
    float *t = malloc((size_t)blocks * 4);

    for (int64_t o = 0; o < n; o++) {
        for (int64_t b = 0; b < blocks; b++) {
            float w[128] = { 0 }, v[128] = { 0 };

            for (int64_t i = 0; i < 128 && b * 128 + i < m->k; i++) {
                w[i] = plain_at(m, first + o, b * 128 + i);
                v[i] = x[b * 128 + i];
            }
            t[b] = hx_canon_dot(w, v);
        }
        y[o] = tree_of(t, blocks);
    }
    free(t);
}

static void canon_matmul(const matrix *a, const float *x, float *y)
{
    const hx_mat *m = &a->m;

    if (m->fmt == HX_FMT_EXL3)
        canon_exl3(a, x, y);
    else
        canon_plain(m, 0, m->n, x, y);
    for (int64_t o = 0; o < m->n && m->bias != NULL; o++)
        y[o] += hx_f16_at(m->bias, o);
}

/* ---- operations ------------------------------------------------------ */

static hx_dev device(int isa, int n_thread, const hx_dev_limits *l)
{
    hx_dev d = { .level = isa, .isa = isa_name[isa] };

    if (n_thread > 1)
        assert_int_equal(hx_pool_open(&d.pool, n_thread, NULL, NULL), 0);
    d.scratch_bytes = hx_cpu_matmul_scratch_bytes(l, n_thread);
    d.scratch = hx_alloc(d.scratch_bytes);
    assert_non_null(d.scratch);
    return d;
}

static void device_free(hx_dev *d)
{
    hx_pool_close(d->pool);
    hx_free(d->scratch);
}

static float *floats(int64_t n)
{
    float *p = malloc((size_t)n * 4);

    for (int64_t i = 0; i < n; i++)
        p[i] = normal();
    return p;
}

static hx_buf buf(float *p, int64_t n)
{
    return (hx_buf) { p, (size_t)n * 4 };
}

/* Rows of x through all instruction sets and 1 or 3 threads, in calls of any size. */
static void check_matmul(const matrix *a, int64_t rows)
{
    const hx_mat *m = &a->m;
    const int64_t ldx = m->k + 3, ldy = m->n + 5;
    const hx_dev_limits l = { .max_rows = rows, .max_k = m->k, .max_n = m->n };
    float *x = floats(rows * ldx), *want = floats(rows * ldy), *got = floats(rows * ldy);
    char what[100];

    for (int64_t r = 0; r < rows; r++)
        if (r < 20 || r % 37 == 0)
            canon_matmul(a, x + r * ldx, want + r * ldy);
    for (int isa = 0; isa < HX_N_ISA; isa++)
        for (int threads = 1; threads <= 3 && hx_cpu_has((hx_isa)isa); threads += 2) {
            hx_dev d = device(isa, threads, &l);

            for (int64_t i = 0; i < rows * ldy; i++)
                got[i] = 77;
            assert_int_equal(hx_cpu_matmul(&d,
                                           &(hx_matmul_args) { .y = buf(got, rows * ldy),
                                                               .x = buf(x, rows * ldx),
                                                               .w = m,
                                                               .rows = rows,
                                                               .ldx = ldx,
                                                               .ldy = ldy },
                                           NULL),
                             0);
            for (int64_t r = 0; r < rows; r++) {
                snprintf(what, sizeof(what), "%s %s k2 %d %s [%d, %d] row %d of %d",
                         isa_name[isa], hx_fmt_name(m->fmt), m->k2, cb_name[m->codebook],
                         (int)m->n, (int)m->k, (int)r, (int)rows);
                if (r < 20 || r % 37 == 0)
                    same_floats(what, got + r * ldy, want + r * ldy, (size_t)m->n);
                for (int64_t i = m->n; i < ldy; i++)
                    assert_true(got[r * ldy + i] == 77);
            }
            device_free(&d);
        }
    free(x);
    free(want);
    free(got);
}

static void matmul_exl3(void **state)
{
    static const int64_t shapes[][2] = {
        { 128, 128 }, { 130, 300 }, { 16, 1 }, { 256, 896 }
    };

    (void)state;
    for (int cb = 0; cb < HX_N_CB; cb++)
        for (size_t i = 0; i < HX_LEN(rates); i++)
            for (size_t j = 0; j < HX_LEN(shapes) && rate_ok(rates[i], cb); j++) {
                matrix a = matrix_new(HX_FMT_EXL3, shapes[j][0], shapes[j][1], rates[i],
                                      cb, j == 1);

                check_matmul(&a, 1); /* has a kernel of its own */
                check_matmul(&a, 2 + (int64_t)((i + j) % 15));
                matrix_free(&a);
            }
}

static void matmul_rows(void **state)
{
    static const int64_t rows[] = { 1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                    11, 12, 13, 14, 15, 16, 64, 65, 600 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(rows); i++)
        for (int kind = 0; kind < 3; kind++) {
            matrix a = kind == 2 ? matrix_new(HX_FMT_BF16, 33, 256, 0, 0, false)
                                 : matrix_new(HX_FMT_EXL3, 128, 256, kind ? 8 : 6,
                                              kind ? HX_CB_MCG : HX_CB_MUL1, false);

            check_matmul(&a, rows[i]);
            matrix_free(&a);
        }
}

static void matmul_plain(void **state)
{
    static const int64_t shapes[][2] = {
        { 1, 1 }, { 17, 130 }, { 130, 300 }, { 128, 256 }, { 24, 1111 }
    };

    (void)state;
    for (int fmt = HX_FMT_F32; fmt <= HX_FMT_FP8; fmt++)
        for (size_t j = 0; j < HX_LEN(shapes); j++)
            for (int64_t rows = 1; rows < 80; rows = rows * 3 + 1) {
                matrix a =
                    matrix_new((hx_fmt)fmt, shapes[j][0], shapes[j][1], 0, 0, j == 2);

                check_matmul(&a, rows);
                matrix_free(&a);
            }
}

static void check_head(const matrix *a, int64_t rows, int64_t heads, int64_t n,
                       int64_t stride, int64_t first, bool transposed)
{
    const hx_mat *m = &a->m;
    const int64_t in = transposed ? n : m->k, out = transposed ? m->k : n;
    const hx_dev_limits l = { .max_rows = rows, .max_k = m->k, .max_n = m->n };
    float *x = floats(rows * heads * in), *want = floats(rows * heads * out);
    float *got = floats(rows * heads * out), t[64];

    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const float *xr = x + (r * heads + h) * in;
            float *y = want + (r * heads + h) * out;

            if (!transposed)
                canon_plain(m, h * stride + first, n, xr, y);
            for (int64_t k = 0; k < m->k && transposed; k++) {
                for (int64_t b = 0; b * 128 < n; b++) {
                    t[b] = 0;
                    for (int64_t i = b * 128; i < HX_MIN(n, b * 128 + 128); i++)
                        t[b] = fmaf(plain_at(m, h * stride + first + i, k), xr[i], t[b]);
                }
                y[k] = tree_of(t, (n + 127) / 128);
            }
        }
    for (int isa = 0; isa < HX_N_ISA; isa++)
        for (int threads = 1; threads <= 3 && hx_cpu_has((hx_isa)isa); threads += 2) {
            hx_dev d = device(isa, threads, &l);

            memset(got, 0xFF, (size_t)(rows * heads * out) * 4);
            assert_int_equal(hx_cpu_head_matmul(&d,
                                                &(hx_head_matmul_args) {
                                                    .y = buf(got, rows * heads * out),
                                                    .x = buf(x, rows * heads * in),
                                                    .w = m,
                                                    .rows = rows,
                                                    .heads = heads,
                                                    .n = n,
                                                    .stride = stride,
                                                    .first = first,
                                                    .transposed = transposed },
                                                NULL),
                             0);
            same_floats("head_matmul", got, want, (size_t)(rows * heads * out));
            device_free(&d);
        }
    free(x);
    free(want);
    free(got);
}

static void head_all(void **state)
{
    (void)state;
    for (int fmt = HX_FMT_F32; fmt <= HX_FMT_FP8; fmt++)
        for (int transposed = 0; transposed < 2; transposed++) {
            matrix a = matrix_new((hx_fmt)fmt, 3 * 200, 256, 0, 0, false);
            matrix b = matrix_new((hx_fmt)fmt, 2 * 150, 77, 0, 0, false);

            check_head(&a, 1, 3, 72, 200, 128, transposed);
            check_head(&a, 67, 3, 160, 200, 0, transposed);
            check_head(&b, 5, 2, 130, 150, 20, transposed);
            matrix_free(&a);
            matrix_free(&b);
        }
}

/* One expert for one row, from the other checked pieces. m: gate, up, down. */
static void canon_expert(const matrix *m, const float *x, float limit, float *y)
{
    const int64_t width = m->m.n;
    float *g = floats(width), *u = floats(width);

    canon_matmul(&m[0], x, g);
    canon_matmul(&m[1], x, u);
    for (int64_t i = 0; i < width; i++)
        g[i] = hx_canon_act(g[i], u[i], limit);
    canon_matmul(&m[2], g, y);
    free(g);
    free(u);
}

enum { N_EXPERT = 5 };

/* Experts of different formats, rates and codebooks in one layer. */
static void make_experts(int64_t dim, int64_t width, matrix m[N_EXPERT][3], hx_expert *e)
{
    static const struct {
        hx_fmt fmt;
        int k2[3], cb;
    } kind[N_EXPERT] = {
        { HX_FMT_EXL3, { 6, 6, 8 }, HX_CB_MUL1 },
        { HX_FMT_EXL3, { 8, 8, 8 }, HX_CB_MCG },
        { HX_FMT_BF16, { 0 }, 0 },
        { HX_FMT_EXL3, { 5, 4, 12 }, HX_CB_MUL1 },
        { HX_FMT_FP8, { 0 }, 0 },
    };

    for (int i = 0; i < N_EXPERT; i++) {
        m[i][0] = matrix_new(kind[i].fmt, width, dim, kind[i].k2[0], kind[i].cb, false);
        m[i][1] = matrix_new(kind[i].fmt, width, dim, kind[i].k2[1], kind[i].cb, i == 3);
        m[i][2] = matrix_new(kind[i].fmt, dim, width, kind[i].k2[2], kind[i].cb, i == 3);
        if (i == 0) /* a scale vector that gate and up share */
            m[i][1].m.suh = m[i][0].m.suh;
        e[i] = (hx_expert) { m[i][0].m, m[i][1].m, m[i][2].m };
    }
}

static void check_moe(int64_t dim, int64_t width, int64_t rows, int64_t active,
                      float limit)
{
    matrix m[N_EXPERT][3];
    hx_expert e[N_EXPERT];
    const hx_dev_limits l = { .max_rows = rows,
                              .max_k = dim,
                              .max_n = width,
                              .max_active = active,
                              .max_expert = N_EXPERT };
    const int64_t n = rows * active;
    float *x = floats(rows * dim), *want = floats(n * dim), *got = floats(n * dim);
    int32_t *id = malloc((size_t)n * sizeof(*id));

    make_experts(dim, width, m, e);
    for (int64_t i = 0; i < n; i++) {
        id[i] = (int32_t)(rnd() % (N_EXPERT + 1)) - 1;
        if (rows > 100) /* one crowded expert */
            id[i] = rnd() % 8 == 0 ? id[i] : 1;
        if (active == 8) /* few experts: bands are cut */
            id[i] = i == 3 || (i == 5 && limit > 0) ? id[i] : -1;
        for (int64_t j = 0; j < dim; j++)
            want[i * dim + j] = 77;
        if (id[i] >= 0)
            canon_expert(m[id[i]], x + i / active * dim, limit, want + i * dim);
    }
    for (int isa = 0; isa < HX_N_ISA; isa++)
        for (int threads = 1; threads <= 3 && hx_cpu_has((hx_isa)isa); threads += 2) {
            hx_dev d = device(isa, threads, &l);
            const hx_moe_args a = { .y = buf(got, n * dim),
                                    .x = buf(x, rows * dim),
                                    .id = { id, (size_t)n * 4 },
                                    .expert = e,
                                    .n_expert = N_EXPERT,
                                    .rows = rows,
                                    .active = active,
                                    .limit = limit };

            for (int64_t i = 0; i < n * dim; i++)
                got[i] = 77;
            assert_int_equal(hx_cpu_moe(&d, &a, NULL), 0);
            same_floats(isa_name[isa], got, want, (size_t)(n * dim));
            id[n - 1] += N_EXPERT + 1;
            assert_int_equal(hx_cpu_moe(&d, &a, NULL), HX_EARG);
            id[n - 1] -= N_EXPERT + 1;
            device_free(&d);
        }
    for (int i = 0; i < 3 * N_EXPERT; i++)
        matrix_free(&m[i / 3][i % 3]);
    free(x);
    free(want);
    free(got);
    free(id);
}

static void moe_all(void **state)
{
    (void)state;
    check_moe(256, 128, 1, 4, 10);
    check_moe(200, 150, 3, 2, 0);
    check_moe(128, 256, 130, 5, 1);
    check_moe(384, 384, 9, 3, 10);
    for (int i = 0; i < 4;
         i++) { /* 5 and 3 blocks: cuts of different lengths, and none */
        check_moe(640, 384, 1, 8, 0);
        check_moe(640, 384, 1, 8, 10);
    }
}

/* Rows in scratch that takes only a few at a time give the same bits. */
static void little_scratch(void **state)
{
    const hx_dev_limits one = { .max_rows = 1, .max_k = 384, .max_n = 384 };
    matrix a = matrix_new(HX_FMT_EXL3, 256, 384, 7, HX_CB_MUL1, false);
    float *x = floats(50 * 384), *want = floats(50 * 256), *got = floats(50 * 256);
    hx_dev d = device(HX_ISA_SCALAR, 1, &one);
    hx_err err;

    (void)state;
    for (int r = 0; r < 50; r++)
        canon_matmul(&a, x + r * 384, want + r * 256);
    const hx_matmul_args args = { .y = buf(got, 50 * 256),
                                  .x = buf(x, 50 * 384),
                                  .w = &a.m,
                                  .rows = 50,
                                  .ldx = 384,
                                  .ldy = 256 };
    assert_int_equal(hx_cpu_matmul(&d, &args, NULL), 0);
    same_floats("little scratch", got, want, 50 * 256);
    d.scratch_bytes = 10000;
    assert_int_equal(hx_cpu_matmul(&d, &args, &err), HX_ENOMEM);
    device_free(&d);
    matrix_free(&a);
    free(x);
    free(want);
    free(got);
}

/* ---- error against double -------------------------------------------- */

/* Relative rms against W x with the exact weights, in double. */
static double error_of(const matrix *a, int64_t rows)
{
    const hx_mat *m = &a->m;
    float *w = malloc((size_t)(m->n * m->k) * 4), *x = floats(m->k), *y = floats(m->n);
    double err = 0, all = 0;

    assert_int_equal(hx_mat_expand(m, w, NULL), 0);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < m->k; i++)
            x[i] = normal();
        canon_matmul(a, x, y);
        for (int64_t o = 0; o < m->n; o++) {
            double want = 0;

            for (int64_t i = 0; i < m->k; i++)
                want += (double)w[o * m->k + i] * (double)x[i];
            err += (want - (double)y[o]) * (want - (double)y[o]);
            all += want * want;
        }
    }
    free(w);
    free(x);
    free(y);
    return sqrt(err / all);
}

/* MUL1: the codebook rounds k_inv S + C to fp16 (rms 2.1e-4), canonical weights do not;
 * the activations have 15 bits, which alone is the error of the other codebooks. */
static void error_bounds(void **state)
{
    static const double bound[HX_N_CB] = { 5e-5, 5e-5, 3e-4 };

    (void)state;
    for (int cb = 0; cb < HX_N_CB; cb++) {
        matrix a = matrix_new(HX_FMT_EXL3, 256, 2048, 6, cb, false);
        const double e = error_of(&a, 4);

        print_message("%s: relative rms error %.2e\n", cb_name[cb], e);
        assert_true(e < bound[cb]);
        matrix_free(&a);
    }
    for (int fmt = HX_FMT_F32; fmt <= HX_FMT_FP8; fmt++) {
        matrix a = matrix_new((hx_fmt)fmt, 64, 2048, 0, 0, false);
        const double e = error_of(&a, 2);

        print_message("%s: relative rms error %.2e\n", hx_fmt_name((hx_fmt)fmt), e);
        assert_true(e < 3e-7);
        matrix_free(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_contraction), cmocka_unit_test(rotation),
        cmocka_unit_test(planes),         cmocka_unit_test(quantize_edges),
        cmocka_unit_test(tree),           cmocka_unit_test(exponential),
        cmocka_unit_test(decode_all),     cmocka_unit_test(decode_every_state),
        cmocka_unit_test(rows_all),       cmocka_unit_test(widen_all),
        cmocka_unit_test(matmul_exl3),    cmocka_unit_test(matmul_rows),
        cmocka_unit_test(matmul_plain),   cmocka_unit_test(head_all),
        cmocka_unit_test(moe_all),        cmocka_unit_test(little_scratch),
        cmocka_unit_test(error_bounds),
    };

    for (int isa = 0; isa < HX_N_ISA; isa++)
        if (!hx_cpu_has((hx_isa)isa))
            print_message("this CPU lacks %s: not tested\n", isa_name[isa]);
    return cmocka_run_group_tests_name("canon", tests, NULL, NULL);
}
