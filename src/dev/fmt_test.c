/* fmt_test.c - weight formats: conversions over all their values, EXL3 decoding and
 * products against the vectors of the format's specification and the outputs of the
 * reference quantizer. Reads tests/data/exl3, and the full set when ../shared lies beside
 * the checkout. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "dev/cpu.h"
#include "dev/fmt_exl3.h"
#include "dev/fmt_page.h"

static const char *const isa_name[HX_N_ISA] = { "scalar", "avx2", "avx512" };
static const char *const cb_name[HX_N_CB] = { "3inst", "mcg", "mul1" };

/* Relative rms of a canonical product against double. MUL1 weights are not rounded to
 * fp16 as those of the double reference are: 2.1e-4. The rest is the 15 bits of the
 * activations. */
static const double product_bound[HX_N_CB] = { 5e-5, 5e-5, 3e-4 };

/* ---- conversions ----------------------------------------------------- */

/* value of a floating-point pattern: man_bits of mantissa, exponent bias */
static double value_of(unsigned mag, int man_bits, int bias)
{
    const int e = (int)(mag >> man_bits), m = (int)(mag & ((1u << man_bits) - 1));

    return e == 0 ? ldexp(m, 1 - bias - man_bits)
                  : ldexp(m + (1 << man_bits), e - bias - man_bits);
}

static void f16_values(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 0x7C00; h++) {
        assert_true((double)hx_f16_to((uint16_t)h) == value_of(h, 10, 15));
        assert_true((double)hx_f16_to((uint16_t)(h | 0x8000)) == -value_of(h, 10, 15));
        assert_int_equal(hx_f16_from(hx_f16_to((uint16_t)h)), h);
        /* half way to the next, and the floats beside it; the next after the largest is
         * 65536 */
        const float mid = (float)((value_of(h, 10, 15) + value_of(h + 1, 10, 15)) / 2);
        assert_int_equal(hx_f16_from(mid), h + (h & 1));
        assert_int_equal(hx_f16_from(nextafterf(mid, 0)), h);
        assert_int_equal(hx_f16_from(-nextafterf(mid, INFINITY)), 0x8000 | (h + 1));
    }
    assert_true(signbit(hx_f16_to(0x8000)) && isinf(hx_f16_to(0xFC00)) &&
                isnan(hx_f16_to(0x7C01)));
    assert_int_equal(hx_f16_from(1e30f), 0x7C00);
    assert_int_equal(hx_f16_from(-INFINITY), 0xFC00);
    assert_true(isnan(hx_f16_to(hx_f16_from(NAN))));
    assert_int_equal(hx_f16_from(-1e-30f), 0x8000);
}

static void bf16_values(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 0x7F7F; h++) {
        const double a = value_of(h, 7, 127), b = value_of(h + 1, 7, 127);
        const float mid = (float)((a + b) / 2);

        assert_true((double)hx_bf16_to((uint16_t)h) == a);
        assert_int_equal(hx_bf16_from((float)a), h);
        assert_int_equal(hx_bf16_from(mid), h + (h & 1));
        assert_int_equal(hx_bf16_from(nextafterf(mid, 0)), h);
        assert_int_equal(hx_bf16_from(-nextafterf(mid, INFINITY)), 0x8000 | (h + 1));
    }
    assert_int_equal(hx_bf16_from(3.4e38f), 0x7F80);
    assert_true(isnan(hx_bf16_to(hx_bf16_from(hx_float_of(0x7F800001)))));
}

static void e4m3_values(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 0x7F; b++) {
        assert_true((double)hx_e4m3_to((uint8_t)b) == value_of(b, 3, 7));
        assert_true((double)hx_e4m3_to((uint8_t)(b | 0x80)) == -value_of(b, 3, 7));
    }
    assert_true(hx_e4m3_to(0x7E) == 448 && isnan(hx_e4m3_to(0x7F)) &&
                isnan(hx_e4m3_to(0xFF)));
}

static void e4m3_rounds(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 0x7E; b++) {
        const float x = hx_e4m3_to((uint8_t)b), y = hx_e4m3_to((uint8_t)(b + 1)),
                    mid = (x + y) / 2;

        assert_int_equal(hx_e4m3_from(x), b);
        assert_int_equal(hx_e4m3_from(-x), 0x80 | b);
        assert_int_equal(hx_e4m3_from(mid), b + (b & 1));
        assert_int_equal(hx_e4m3_from(nextafterf(mid, 0)), b);
        assert_int_equal(hx_e4m3_from(-nextafterf(mid, INFINITY)), 0x80 | (b + 1));
    }
    assert_int_equal(hx_e4m3_from(464), 0x7E);
    assert_int_equal(hx_e4m3_from(nextafterf(464, 500)), 0x7F);
    assert_int_equal(hx_e4m3_from(-INFINITY), 0xFF);
    assert_int_equal(hx_e4m3_from(NAN) & 0x7F, 0x7F);
}

/* Items of any size: what is read is the nearest e4m3 of the scale, fits bf16 exactly, and
 * what holds no number is none. */
static void fp8_items(void **state)
{
    uint8_t item[4], scale;

    (void)state;
    for (int k = -126; k < 127; k++)
        for (float top = 1; top < 2; top += 0.03125f) {
            const float v[] = { ldexpf(top, k), -ldexpf(top, k - 3), ldexpf(1.3f, k - 20),
                                0 };

            hx_page_put_fp8(item, &scale, v, 4);
            for (int i = 0; i < 4; i++) {
                const float got = hx_e4m3_to(item[i]) * hx_page_scale(scale);

                assert_true(hx_bf16_to(hx_bf16_from(got)) == got);
                assert_true(fabsf(got - v[i]) <=
                            fmaxf(fabsf(v[i]) / 16, ldexpf(1, HX_MAX(k - 18, -127))));
            }
        }
    for (int i = 0; i < 3; i++) {
        const float v[] = { 1, i == 0 ? NAN : i == 1 ? INFINITY : -INFINITY, 0, 0 };

        hx_page_put_fp8(item, &scale, v, 4);
        for (int j = 0; j < 4; j++)
            assert_false(isfinite(hx_e4m3_to(item[j]) * hx_page_scale(scale)));
    }
}

static void unaligned_and_scales(void **state)
{
    const float scale[] = { 2, 3, 5, 7, 11, 13 };
    const uint8_t raw[] = { 0xFF, 0x00, 0x3C, 0x80, 0x3F };
    const hx_mat m = { .n = 5, .k = 9, .block_n = 3, .block_k = 4, .scale = scale };

    (void)state;
    assert_true(hx_f16_at(raw + 1, 0) == 1 && hx_bf16_at(raw + 1, 1) == 1);
    assert_true(hx_fp8_scale(&m, 2, 3) == 2 && hx_fp8_scale(&m, 2, 8) == 5 &&
                hx_fp8_scale(&m, 3, 0) == 7 && hx_fp8_scale(&m, 4, 8) == 13);
}

static void sizes_and_expand(void **state)
{
    const float scale[] = { 2, 0.5f };
    const uint16_t bf16[] = { 0x3F80, 0xC000, 0x3F00, 0x0000 };
    const uint8_t fp8[] = { 0x38, 0xC0, 0x30, 0x00 };
    hx_mat m = { .fmt = HX_FMT_BF16, .n = 2, .k = 2, .w = bf16 };
    float out[4];

    (void)state;
    assert_int_equal(hx_mat_bytes(&m), 8);
    assert_int_equal(hx_mat_expand(&m, out, NULL), 0);
    assert_true(out[0] == 1 && out[1] == -2 && out[2] == 0.5f && out[3] == 0);
    m = (hx_mat) { .fmt = HX_FMT_FP8,
                   .n = 2,
                   .k = 2,
                   .w = fp8,
                   .scale = scale,
                   .block_n = 1,
                   .block_k = 128,
                   .bias = bf16 };
    assert_int_equal(hx_mat_bytes(&m), 4 + 8 + 4);
    assert_int_equal(hx_mat_expand(&m, out, NULL), 0);
    assert_true(out[0] == 2 && out[1] == -4 && out[2] == 0.25f && out[3] == 0);
    m = (hx_mat) {
        .fmt = HX_FMT_EXL3, .n = 100, .k = 200, .n_pad = 128, .k_pad = 256, .k2 = 7
    };
    assert_int_equal(hx_mat_bytes(&m), 128 * 256 / 16 * 7 + 2 * (128 + 256));
    assert_string_equal(hx_fmt_name(HX_FMT_FP8), "fp8_e4m3");
    assert_string_equal(hx_fmt_name(HX_N_FMT), "unknown");
}

/* ---- EXL3 bits and codebooks ----------------------------------------- */

/* The closed form of exl3.md 3.3, by 32-bit words, for random rings of all rates. */
static void exl3_states(void **state)
{
    static const int rates[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };
    uint8_t tile[256];
    uint64_t n = 0;

    (void)state;
    for (size_t r = 0; r < HX_LEN(rates); r++) {
        const int k2 = rates[r], words = 4 * k2;
        bool seen[256] = { false };

        for (int i = 0; i < 16 * k2; i++)
            tile[i] = (uint8_t)hx_rng_at(3, n++);
        for (int p = 0; p < 256; p++) {
            const int e = (p + 1) * (k2 >> 1) + ((k2 & 1) != 0 ? (p + 1) >> 1 : 0);
            const int i = (e - 1) >> 5, h = (i + words - 1) % words;
            uint32_t lo, hi;

            memcpy(&lo, tile + 4 * i, 4);
            memcpy(&hi, tile + 4 * h, 4);
            const uint64_t both = (uint64_t)hi << 32 | lo;
            assert_int_equal(hx_exl3_state(tile, k2, p),
                             both >> (31 - ((e - 1) & 31)) & 0xFFFF);
            seen[16 * hx_exl3_row(p) + hx_exl3_col(p)] = true;
        }
        for (int i = 0; i < 256; i++)
            assert_true(seen[i]);
    }
}

/* Over all states: the integer is the value, exactly and in 16 bits; figures of
 * exl3.md 4. */
static void exl3_codebooks(void **state)
{
    static const double mean[] = { 0.000210, -0.000037, -0.001931 };
    static const double deviation[] = { 1.243711, 1.244112, 1.000310 };
    static const double least[] = { -3.95703, -3.94922, -3.45312 };
    static const double most[] = { 3.97266, 3.94922, 3.34766 };

    (void)state;
    for (int cb = 0; cb < HX_N_CB; cb++) {
        double sum = 0, square = 0, lo = 0, hi = 0;

        for (uint32_t s = 0; s < 65536; s++) {
            const int w = hx_exl3_int(s, (hx_codebook)cb);
            const double v = (double)hx_exl3_value(s, (hx_codebook)cb);

            assert_true((double)hx_f16_to(hx_exl3_half(s, (hx_codebook)cb)) == v);
            if (cb == HX_CB_MUL1) {
                assert_true(w >= -512 && w <= 493);
                const double affine = (double)HX_CANON_K_INV * w + (double)HX_CANON_C2;
                assert_true(affine == (double)HX_CANON_K_INV * (w + 1536) - 10.3828125);
                assert_true(fabs(affine - v) <= 0.00098);
            } else
                assert_true(w == (int16_t)w && w / 8192.0 == v);
            sum += v;
            square += v * v;
            lo = fmin(lo, v);
            hi = fmax(hi, v);
        }
        sum /= 65536;
        assert_true(fabs(sum - mean[cb]) < 1e-6);
        assert_true(fabs(sqrt(square / 65536 - sum * sum) - deviation[cb]) < 1e-6);
        assert_true(fabs(lo - least[cb]) < 1e-5 && fabs(hi - most[cb]) < 1e-5);
    }
}

/* ---- products through every instruction set -------------------------- */

static hx_dev device(int isa, const hx_dev_limits *l)
{
    hx_dev d = { .level = isa, .isa = isa_name[isa] };

    d.scratch_bytes = hx_cpu_matmul_scratch_bytes(l, 1);
    d.scratch = hx_alloc(d.scratch_bytes);
    assert_non_null(d.scratch);
    return d;
}

static double relative_rms(const float *got, const float *want, int64_t n)
{
    double err = 0, all = 0;

    for (int64_t i = 0; i < n; i++) {
        err += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        all += (double)want[i] * (double)want[i];
    }
    return sqrt(err / all);
}

static float *widen_halves(const void *p, int64_t n)
{
    float *x = malloc((size_t)n * sizeof(float));

    for (int64_t i = 0; i < n; i++)
        x[i] = hx_f16_at(p, i);
    return x;
}

/* y [rows, n] in double against the canonical product of every instruction set. */
static void check_product(const char *name, const hx_mat *m, const void *x16,
                          int64_t rows, const float *want)
{
    const hx_dev_limits l = { .max_rows = rows, .max_k = m->k, .max_n = m->n };
    float *x = widen_halves(x16, rows * m->k),
          *y = malloc((size_t)(rows * m->n) * sizeof(float));

    for (int isa = 0; isa < HX_N_ISA; isa++) {
        if (!hx_cpu_has((hx_isa)isa))
            continue;
        hx_dev d = device(isa, &l);
        const hx_matmul_args a = { .y = { y, (size_t)(rows * m->n) * 4 },
                                   .x = { x, (size_t)(rows * m->k) * 4 },
                                   .w = m,
                                   .rows = rows,
                                   .ldx = m->k,
                                   .ldy = m->n };

        assert_int_equal(hx_cpu_matmul(&d, &a, NULL), 0);
        const double e = relative_rms(y, want, rows * m->n);
        if (e > product_bound[m->codebook])
            fail_msg("%s, %s: relative rms error %.2e", name, isa_name[isa], e);
        hx_free(d.scratch);
    }
    free(x);
    free(y);
}

/* Decoded tiles against What [k, n], bit for bit. */
static void check_what(const char *name, const hx_mat *m, const uint8_t *what)
{
    float tile[256];

    for (int64_t tk = 0; tk < m->k / 16; tk++)
        for (int64_t tn = 0; tn < m->n / 16; tn++) {
            hx_exl3_tile(m, tk, tn, tile);
            for (int i = 0; i < 256; i++) {
                const int64_t at = (16 * tk + i / 16) * m->n + 16 * tn + i % 16;

                if (hx_f16_from(tile[i]) != hx_u16_at(what, at) ||
                    hx_f16_at(what, at) != tile[i])
                    fail_msg("%s: What[%d] is %g, expected %g", name, (int)at,
                             (double)tile[i], (double)hx_f16_at(what, at));
            }
        }
}

/* hx_mat_expand() gives [n, k]; the reference is [k, n] and rounds in double, so that
 * the last bit may differ. */
static void check_expand(const char *name, const hx_mat *m, const float *want)
{
    float *w = malloc((size_t)(m->n * m->k) * sizeof(float));

    assert_int_equal(hx_mat_expand(m, w, NULL), 0);
    for (int64_t k = 0; k < m->k; k++)
        for (int64_t n = 0; n < m->n; n++)
            if (fabsf(w[n * m->k + k] - want[k * m->n + n]) >
                0x1p-23f * fabsf(want[k * m->n + n]))
                fail_msg("%s: W[%d, %d] is %.9g, expected %.9g", name, (int)n, (int)k,
                         (double)w[n * m->k + k], (double)want[k * m->n + n]);
    free(w);
}

static hx_codebook codebook_of(const hx_json *c)
{
    const hx_str s = hx_json_str(hx_json_get(c, "codebook"));

    for (int cb = 0; cb < HX_N_CB; cb++)
        if (hx_str_is(s, cb_name[cb]))
            return (hx_codebook)cb;
    fail_msg("unknown codebook");
    return HX_CB_MUL1;
}

typedef struct {
    char *p;
    size_t n;
} bytes;

static bytes read_all(const char *dir, hx_str file)
{
    char path[300];
    bytes b;
    hx_err err;

    snprintf(path, sizeof(path), "%s/%.*s", dir, (int)file.n, file.p);
    if (hx_file_read(path, (size_t)64 << 20, &b.p, &b.n, &err) != 0)
        fail_msg("%s", err.msg);
    return b;
}

static hx_json *read_json(const char *dir, const char *file)
{
    const bytes b = read_all(dir, hx_str_c(file));
    hx_json *j;
    hx_err err;

    if (hx_json_parse(&j, (hx_str) { b.p, b.n }, 0, &err) != 0)
        fail_msg("%s/%s: %s", dir, file, err.msg);
    hx_free(b.p);
    return j;
}

/* ---- safetensors ----------------------------------------------------- */

typedef struct {
    bytes raw;
    hx_json *head;
    const uint8_t *data;
} tensors;

static tensors tensors_read(const char *dir, hx_str file)
{
    tensors t = { .raw = read_all(dir, file) };
    uint64_t n;
    hx_err err;

    memcpy(&n, t.raw.p, sizeof(n));
    assert_true(n + 8 < t.raw.n);
    if (hx_json_parse(&t.head, (hx_str) { t.raw.p + 8, n }, 0, &err) != 0)
        fail_msg("%s", err.msg);
    t.data = (const uint8_t *)t.raw.p + 8 + n;
    return t;
}

static void tensors_free(tensors *t)
{
    hx_json_free(t->head);
    hx_free(t->raw.p);
}

/* NULL when there is none. */
static const uint8_t *tensor(const tensors *t, const char *name)
{
    const hx_json *e = hx_json_get(t->head, name);

    return e == NULL
               ? NULL
               : t->data + hx_json_int(hx_json_at(hx_json_get(e, "data_offsets"), 0), 0);
}

/* key.trellis, key.suh, key.svh */
static hx_mat linear(const tensors *t, const char *key, hx_codebook cb)
{
    char name[200];
    hx_mat m = { .fmt = HX_FMT_EXL3, .codebook = cb };

    snprintf(name, sizeof(name), "%s.trellis", key);
    const hx_json *shape = hx_json_get(hx_json_get(t->head, name), "shape");
    m.w = tensor(t, name);
    m.k = m.k_pad = 16 * hx_json_int(hx_json_at(shape, 0), 0);
    m.n = m.n_pad = 16 * hx_json_int(hx_json_at(shape, 1), 0);
    m.k2 = (int32_t)(hx_json_int(hx_json_at(shape, 2), 0) / 8);
    snprintf(name, sizeof(name), "%s.suh", key);
    m.suh = tensor(t, name);
    snprintf(name, sizeof(name), "%s.svh", key);
    m.svh = tensor(t, name);
    assert_true(m.w != NULL && m.suh != NULL && m.svh != NULL);
    return m;
}

/* ---- expert layers --------------------------------------------------- */

typedef struct {
    const tensors *t;
    const char *prefix; /* of the tensors' names, before the expert's number */
    hx_codebook cb;
    int64_t n_expert, rows, active;
    const void *x16, *weight16;
    const int32_t *id;
} moe_case;

/* Sum of weighted experts against a double reference [rows, D]. */
static void check_moe(const char *name, const moe_case *c, float limit, const float *want)
{
    hx_expert e[16];
    char key[200];

    for (int64_t i = 0; i < c->n_expert; i++) {
        static const char *const part[] = { "gate_proj", "up_proj", "down_proj" };
        hx_mat *const to[] = { &e[i].gate, &e[i].up, &e[i].down };

        for (int p = 0; p < 3; p++) {
            snprintf(key, sizeof(key), "%.*s%d.%s", (int)strcspn(c->prefix, "%"),
                     c->prefix, (int)i, part[p]);
            *to[p] = linear(c->t, key, c->cb);
        }
    }
    const int64_t dim = e[0].gate.k, n = c->rows * c->active;
    const hx_dev_limits l = { .max_rows = c->rows,
                              .max_k = dim,
                              .max_n = e[0].gate.n,
                              .max_active = c->active,
                              .max_expert = c->n_expert };
    float *x = widen_halves(c->x16, c->rows * dim),
          *part = malloc((size_t)(n * dim) * sizeof(float));
    float *y = malloc((size_t)(c->rows * dim) * sizeof(float));

    for (int isa = 0; isa < HX_N_ISA; isa++) {
        if (!hx_cpu_has((hx_isa)isa))
            continue;
        hx_dev d = device(isa, &l);
        const hx_moe_args a = { .y = { part, (size_t)(n * dim) * 4 },
                                .x = { x, (size_t)(c->rows * dim) * 4 },
                                .id = { (void *)(uintptr_t)c->id, (size_t)n * 4 },
                                .expert = e,
                                .n_expert = c->n_expert,
                                .rows = c->rows,
                                .active = c->active,
                                .limit = limit };

        assert_int_equal(hx_cpu_moe(&d, &a, NULL), 0);
        for (int64_t i = 0; i < c->rows * dim; i++) {
            double sum = 0;

            for (int64_t k = 0; k < c->active; k++) {
                const int64_t pair = i / dim * c->active + k;

                sum += (double)hx_f16_at(c->weight16, pair) *
                       (double)part[pair * dim + i % dim];
            }
            y[i] = (float)sum;
        }
        const double err = relative_rms(y, want, c->rows * dim);
        /* three products in a row */
        if (err > 3 * product_bound[c->cb])
            fail_msg("%s limit %g, %s: relative rms error %.2e", name, (double)limit,
                     isa_name[isa], err);
        hx_free(d.scratch);
    }
    free(x);
    free(part);
    free(y);
}

/* ---- test data ------------------------------------------------------- */

/* exl3_vectors: arrays at offsets of a file. */
static const uint8_t *array(const hx_json *c, const bytes *b, const char *name)
{
    const hx_json *a = hx_json_get(hx_json_get(c, "arrays"), name);

    return a == NULL ? NULL
                     : (const uint8_t *)b->p + hx_json_int(hx_json_get(a, "offset"), 0);
}

static void vector_case(const char *dir, const hx_json *c)
{
    const hx_str name = hx_json_str(hx_json_get(c, "name"));
    const bytes b = read_all(dir, hx_json_str(hx_json_get(c, "file")));
    const int64_t k = hx_json_int(hx_json_get(c, "k"), 0),
                  n = hx_json_int(hx_json_get(c, "n"), 0);
    const hx_mat m = { .fmt = HX_FMT_EXL3,
                       .n = n,
                       .k = k,
                       .n_pad = n,
                       .k_pad = k,
                       .k2 = (int32_t)(hx_json_int(hx_json_get(c, "words_per_tile"), 0) /
                                       8),
                       .codebook = codebook_of(c),
                       .w = array(c, &b, "trellis"),
                       .suh = array(c, &b, "suh"),
                       .svh = array(c, &b, "svh") };

    check_what(name.p, &m, array(c, &b, "What"));
    check_product(name.p, &m, array(c, &b, "x"), hx_json_int(hx_json_get(c, "m"), 0),
                  (const void *)array(c, &b, "y"));
    if (array(c, &b, "W") != NULL)
        check_expand(name.p, &m, (const void *)array(c, &b, "W"));
    hx_free(b.p);
}

static void vectors(const char *dir)
{
    hx_json *man = read_json(dir, "manifest.json");
    const hx_json *cases = hx_json_get(man, "cases"),
                  *moe = hx_json_at(hx_json_get(man, "moe"), 0);

    assert_true(hx_json_len(cases) >= 10);
    for (size_t i = 0; i < hx_json_len(cases); i++)
        vector_case(dir, hx_json_at(cases, i));

    const bytes b = read_all(dir, hx_json_str(hx_json_get(moe, "file")));
    tensors t = tensors_read(dir, hx_json_str(hx_json_get(moe, "checkpoint")));
    const moe_case c = { &t,
                         hx_json_str(hx_json_get(moe, "key")).p,
                         codebook_of(moe),
                         4,
                         5,
                         2,
                         array(moe, &b, "x"),
                         array(moe, &b, "weights"),
                         (const void *)array(moe, &b, "top") };
    /* y_limit_2 clamps after silu, as the reference kernels do and we do not */
    check_moe("tiny_checkpoint", &c, 0, (const void *)array(moe, &b, "y_limit_0"));
    tensors_free(&t);
    hx_free(b.p);
    print_message("%s: %zu cases\n", dir, hx_json_len(cases));
    hx_json_free(man);
}

static void golden_linear(const char *dir, const tensors *inputs, const hx_json *c)
{
    const hx_str name = hx_json_str(hx_json_get(c, "name"));
    tensors t = tensors_read(dir, hx_json_str(hx_json_get(c, "file")));
    const hx_mat m = linear(&t, "linear", codebook_of(c));

    assert_int_equal(m.k2, 2 * hx_json_int(hx_json_get(c, "K"), 0));
    if (tensor(&t, "expect.w_inner") != NULL)
        check_what(name.p, &m, tensor(&t, "expect.w_inner"));
    float *want = malloc((size_t)(32 * m.n) * sizeof(float));
    memcpy(want, tensor(&t, "expect.y_f64"), (size_t)(32 * m.n) * sizeof(float));
    check_product(name.p, &m, tensor(inputs, hx_json_str(hx_json_get(c, "x")).p), 32,
                  want);
    free(want);
    tensors_free(&t);
}

static void golden_moe(const char *dir, const hx_json *j)
{
    static const struct {
        float limit;
        const char *name;
    } limits[] = {
        { 0, "expect.out_f64_limit0p0" },
        { 10, "expect.out_f64_limit10p0" },
        { 1, "expect.out_f64_limit1p0" },
    };
    tensors t = tensors_read(dir, hx_json_str(hx_json_get(j, "file")));
    moe_case c = { .t = &t,
                   .prefix = "model.layers.0.mlp.experts.",
                   .cb = codebook_of(j),
                   .n_expert = hx_json_int(hx_json_get(j, "experts"), 0),
                   .rows = hx_json_int(hx_json_get(j, "tokens"), 0),
                   .active = hx_json_int(hx_json_get(j, "topk"), 0),
                   .x16 = tensor(&t, "x"),
                   .weight16 = tensor(&t, "weights") };
    const int64_t dim = hx_json_int(hx_json_get(j, "hidden"), 0);
    int32_t id[64];
    float *want = malloc((size_t)(c.rows * dim) * sizeof(float));

    for (int64_t i = 0; i < c.rows * c.active; i++)
        memcpy(&id[i], tensor(&t, "selected") + 8 * i, 4);
    c.id = id;
    for (size_t i = 0; i < HX_LEN(limits); i++) {
        memcpy(want, tensor(&t, limits[i].name), (size_t)(c.rows * dim) * sizeof(float));
        check_moe(hx_json_str(hx_json_get(j, "name")).p, &c, limits[i].limit, want);
    }
    free(want);
    tensors_free(&t);
}

static void golden(const char *dir)
{
    hx_json *man = read_json(dir, "MANIFEST.json");
    const hx_json *cases = hx_json_get(man, "cases"), *moe = hx_json_get(man, "moe");
    tensors inputs = tensors_read(dir, HX_STR("inputs.safetensors"));

    assert_true(hx_json_len(cases) >= 3 && hx_json_len(moe) >= 2);
    for (size_t i = 0; i < hx_json_len(cases); i++)
        golden_linear(dir, &inputs, hx_json_at(cases, i));
    for (size_t i = 0; i < hx_json_len(moe); i++)
        golden_moe(dir, hx_json_at(moe, i));
    print_message("%s: %zu linears, %zu expert layers\n", dir, hx_json_len(cases),
                  hx_json_len(moe));
    tensors_free(&inputs);
    hx_json_free(man);
}

static void exl3_part(void **state)
{
    (void)state;
    vectors("tests/data/exl3/exl3_vectors");
    golden("tests/data/exl3/exl3_golden");
}

static void exl3_all(void **state)
{
    (void)state;
    if (!hx_file_exists("../shared/spec/data/exl3_vectors/manifest.json")) {
        print_message("SKIP exl3_all: ../shared not beside the checkout\n");
        skip();
    }
    vectors("../shared/spec/data/exl3_vectors");
    golden("../shared/spec/data/exl3_golden");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f16_values),       cmocka_unit_test(bf16_values),
        cmocka_unit_test(e4m3_values),      cmocka_unit_test(e4m3_rounds),
        cmocka_unit_test(fp8_items),        cmocka_unit_test(unaligned_and_scales),
        cmocka_unit_test(sizes_and_expand), cmocka_unit_test(exl3_states),
        cmocka_unit_test(exl3_codebooks),   cmocka_unit_test(exl3_part),
        cmocka_unit_test(exl3_all),
    };

    return cmocka_run_group_tests_name("fmt", tests, NULL, NULL);
}
