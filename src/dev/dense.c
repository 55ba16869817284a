/* dense.c - products and factors of f32 matrices in blocks that fit the caches. Called by
 * exl3_encode.c and quantize. Knows nothing of weights; allocates nothing. */
#include <math.h>

#include "dev/dense.h"
#include "dev/enc_kern.h"

enum {
    ROWS = 64,  /* of a product that one worker does at a time */
    COLS = 128, /* … */
    DEEP = 256, /* terms of a sum between writes; a block of b is 128 KiB */
    STEP = 64   /* rows that a factor advances by */
};

const hx_enc_kern *hx_enc_best(void)
{
#if defined(__x86_64__)
    if (hx_cpu_has(HX_ISA_AVX512))
        return &hx_enc_avx512;
    if (hx_cpu_has(HX_ISA_AVX2))
        return &hx_enc_avx2;
#endif
    return &hx_enc_scalar;
}

static void mul_block(const hx_dense_args *p, int64_t i, int64_t j)
{
    const hx_enc_kern *kern = hx_enc_best();
    const int64_t m = HX_MIN(ROWS, p->m - i), n = HX_MIN(COLS, p->n - j);

    for (int64_t l = 0; l < p->k; l += DEEP)
        kern->product(p->c + i * p->ldc + j, p->ldc, p->a + i * p->ars + l * p->acs,
                      p->ars, p->acs, p->b + l * p->ldb + j, p->ldb, m, n,
                      HX_MIN(DEEP, p->k - l), p->sign);
}

static void mul_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_dense_args *p = ud;
    const int64_t wide = (p->n + COLS - 1) / COLS;

    (void)worker;
    for (int64_t b = begin; b < end; b++)
        mul_block(p, b / wide * ROWS, b % wide * COLS);
}

void hx_dense_mul(hx_pool *pool, const hx_dense_args *p)
{
    const int64_t tall = (p->m + ROWS - 1) / ROWS, wide = (p->n + COLS - 1) / COLS;
    hx_dense_args args = *p;

    hx_pool_run(pool, tall * wide, 1, mul_part, &args);
}

/* Block rows from the bottom up have ever more blocks: row i has wide - i / 2. */
static void gram_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_dense_args *p = ud;

    (void)worker;
    for (int64_t b = begin; b < end; b++)
        for (int64_t i = b * ROWS, j = i / COLS * COLS; j < p->n; j += COLS)
            mul_block(p, i, j);
}

void hx_dense_gram(hx_pool *pool, float *c, int64_t ldc, const float *x, int64_t ldx,
                   int64_t k, int64_t n, float sign)
{
    hx_dense_args args = { .c = c,
                           .a = x,
                           .b = x,
                           .ldc = ldc,
                           .ars = 1,
                           .acs = ldx,
                           .ldb = ldx,
                           .m = n,
                           .n = n,
                           .k = k,
                           .sign = sign };

    hx_pool_run(pool, (n + ROWS - 1) / ROWS, 1, gram_part, &args);
}

void hx_dense_mirror(float *c, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++)
            c[i * n + j] = c[j * n + i];
}

/* ---- factor ------------------------------------------------------------ */

/* A panel of STEP rows whose first square is factored. */
typedef struct {
    float *row;
    int64_t n, at, step;
} panel;

/* Rows at .. at + step of the triangle, its columns [c0, c1): the square is U already
 * where c0 > at. */
static bool eliminate(const panel *p, int64_t c0, int64_t c1, bool square)
{
    for (int64_t i = 0; i < p->step; i++) {
        float *ri = p->row + i * p->n;
        const int64_t from = square ? p->at + i : c0;
        float root = ri[p->at + i];

        if (square) {
            if (!(root > 0) || root > 1e38f)
                return false;
            root = sqrtf(root);
        }
        for (int64_t c = from; c < c1; c++)
            ri[c] /= root;
        for (int64_t r = i + 1; r < p->step; r++) {
            float *rr = p->row + r * p->n;
            const float f = ri[p->at + r];

            for (int64_t c = square ? p->at + r : c0; c < c1; c++)
                rr[c] -= f * ri[c];
        }
    }
    return true;
}

static void panel_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const panel *p = ud;
    const int64_t first = p->at + p->step;

    (void)worker;
    for (int64_t b = begin; b < end; b++)
        eliminate(p, first + b * COLS, HX_MIN(first + (b + 1) * COLS, p->n), false);
}

bool hx_dense_factor(hx_pool *pool, float *a, int64_t n)
{
    for (int64_t at = 0; at < n; at += STEP) {
        const int64_t step = HX_MIN(STEP, n - at), rest = n - at - step;
        panel p = { a + at * n, n, at, step };

        if (!eliminate(&p, at, at + step, true))
            return false;
        hx_pool_run(pool, (rest + COLS - 1) / COLS, 1, panel_part, &p);
        hx_dense_gram(pool, a + (at + step) * n + at + step, n, p.row + at + step, n,
                      step, rest, -1);
    }
    return true;
}

/* Later terms first in the second half: what a block of x takes away from those above it
 * can then be done at once (cuda_encode.cu). */
void hx_dense_solve(const float *u, int64_t n, float *x)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] /= u[i * n + i];
        for (int64_t j = i + 1; j < n; j++)
            x[j] -= u[i * n + j] * x[i];
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        double sum = (double)x[i];

        for (int64_t j = n - 1; j > i; j--)
            sum -= (double)u[i * n + j] * (double)x[j];
        x[i] = (float)(sum / (double)u[i * n + i]);
    }
}
