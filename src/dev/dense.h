/* dense.h - products and factors of f32 matrices, for the EXL3 encoder and the Hessians of
 * quantize. Row-major; sides are multiples of 16. The bits of a result depend neither on
 * the machine nor on the number of threads (enc_kern.h). */
#ifndef HX_DENSE_H
#define HX_DENSE_H

#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c[m, n] += sign a[m, k] b[k, n]; a's rows lie ars and its columns acs floats apart. */
typedef struct {
    float *c;
    const float *a, *b;
    int64_t ldc, ars, acs, ldb, m, n, k;
    float sign;
} hx_dense_args;
void hx_dense_mul(hx_pool *pool, const hx_dense_args *p);

/* The upper triangle of c[n, n] += sign x^T x, x [k, n] with rows ldx apart. Entries of
 * diagonal blocks below the diagonal are written too. */
void hx_dense_gram(hx_pool *pool, float *c, int64_t ldc, const float *x, int64_t ldx,
                   int64_t k, int64_t n, float sign);
void hx_dense_mirror(float *c, int64_t n); /* upper triangle to lower */

/* The upper triangle of a[n, n] becomes U with U^T U = a. False: a is not positive
 * definite (and is spoilt). */
bool hx_dense_factor(hx_pool *pool, float *a, int64_t n);
/* x[n] becomes the solution of U^T U x = x. */
void hx_dense_solve(const float *u, int64_t n, float *x);

#ifdef __cplusplus
}
#endif
#endif
