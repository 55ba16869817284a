/* enc_ops.h - the operations that the EXL3 encoder is made of. exl3_encode.c calls them
 * and holds all that decides anything; enc_host.c has them for the host's threads,
 * cuda_encode.cu for a GPU. Both give the same bits: every element is computed alone, by
 * the same roundings, and sums run in the order that is named here.
 *
 * Matrices are f32, row-major, in the memory of whoever computes; vectors and what is
 * read back lie in host memory. An operation that returns nothing cannot fail on the
 * host; on a GPU what went wrong shows at the next one that returns something. */
#ifndef HX_ENC_OPS_H
#define HX_ENC_OPS_H

#include "dev/dense.h"
#include "dev/exl3_encode.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    HX_ENC_TILE = 16,   /* rows and columns */
    HX_ENC_BLOCK = 128, /* of the rotation, and rows between two large updates */
};

typedef struct hx_enc_ops hx_enc_ops;

typedef struct {
    const hx_enc_ops *ops;
    hx_pool *pool;
    hx_dev *dev;
    hx_codebook codebook;
    int k2;
    int64_t n, k; /* the largest matrix: k rows of n, or k of k */
    void *own;    /* the backend's */
} hx_enc;

/* Row blocks of 16 from the last to the first: what rot has there, and what u feeds back
 * of the errors of all blocks below, becomes states and their values.
 *   err[r, :] = rot[r, :] - q[r, :]
 *   target[i, :] = rot[i, :] + sum over blocks below of u[i, r] err[r, :], r ascending in
 *                  a sum; one sum per tile within a span of 128 rows, one per span above it */
typedef struct {
    const float *rot;  /* [k, n] */
    const float *u;    /* [k, k], right of the diagonal blocks */
    float *q;          /* [k, n] what the states are worth */
    float *work;       /* [k, n] scratch */
    uint16_t *trellis; /* [k/16, n/16, 8 k2] host memory */
} hx_enc_feed;

struct hx_enc_ops {
    /* Takes codebook, k2, n and k of e, and makes e->own; close takes what open left. */
    int (*open)(hx_enc *e, hx_err *err);
    void (*close)(hx_enc *e);
    int (*alloc)(hx_enc *e, float **out, int64_t n, hx_err *err); /* zeroed */
    void (*free)(hx_enc *e, float *p);                            /* NULL is fine */
    void (*put)(hx_enc *e, float *to, const float *from, int64_t n);
    int (*get)(hx_enc *e, float *to, const float *from, int64_t n, hx_err *err);
    void (*zero)(hx_enc *e, float *x, int64_t n);
    /* y[i, j] = x[i, j], rows ldy and ldx apart */
    void (*copy)(hx_enc *e, float *y, int64_t ldy, const float *x, int64_t ldx,
                 int64_t rows, int64_t cols);
    /* y[cols, rows] = x[rows, cols]^T; rows of y ldy apart */
    void (*transpose)(hx_enc *e, float *y, int64_t ldy, const float *x, int64_t rows,
                      int64_t cols);
    /* y[i, j] = x[i, j] (r[i] c[j]); y may be x */
    void (*scale)(hx_enc *e, float *y, const float *x, const float *r, const float *c,
                  int64_t rows, int64_t cols);
    void (*subtract)(hx_enc *e, float *y, const float *x, int64_t n); /* y = x - y */
    void (*times)(hx_enc *e, float *y, const float *x, int64_t n);    /* y = y x */
    int (*get_diag)(hx_enc *e, const float *x, int64_t n, float *out, hx_err *err);
    void (*put_diag)(hx_enc *e, float *x, int64_t n, const float *in);
    /* sum[i] = a[i, :] . b[i, :], or of columns, in double and in order */
    int (*dot_rows)(hx_enc *e, const float *a, const float *b, int64_t rows, int64_t cols,
                    double *sum, hx_err *err);
    int (*dot_columns)(hx_enc *e, const float *a, const float *b, int64_t rows,
                       int64_t cols, double *sum, hx_err *err);
    /* x = x P or P x, P = H128 / sqrt(128) on aligned groups of 128 */
    void (*rotate_right)(hx_enc *e, float *x, int64_t rows, int64_t cols);
    void (*rotate_left)(hx_enc *e, float *x, int64_t rows, int64_t cols);
    /* dense.h */
    void (*mul)(hx_enc *e, const hx_dense_args *p);
    void (*gram)(hx_enc *e, float *c, const float *x, int64_t rows, int64_t n);
    int (*factor)(hx_enc *e, float *a, int64_t n, bool *done, hx_err *err);
    int (*solve)(hx_enc *e, const float *u, int64_t n, float *x, hx_err *err);
    /* Row block b of the factor u, 16 rows, becomes inv(U_bb) U_b right of U_bb. */
    void (*normalise)(hx_enc *e, float *u, int64_t n);
    /* Tiles at[i] of x [k, n], by rows of tiles, in stream order. */
    int (*tiles)(hx_enc *e, const float *x, int64_t n, const int64_t *at, int64_t n_tile,
                 float (*out)[256], hx_err *err);
    /* hx_trellis_search of n_tile tiles, an even number; host memory */
    int (*search)(hx_enc *e, const float (*target)[256], int64_t n_tile,
                  uint16_t (*state)[256], float (*value)[256], hx_err *err);
    int (*feed)(hx_enc *e, const hx_enc_feed *a, hx_err *err);
};

extern const hx_enc_ops hx_enc_host;

/* On the device, where it has the operations, else on the pool's threads (NULL: on this
 * one). close takes what open left. */
int hx_enc_open(hx_enc *e, hx_pool *pool, hx_dev *dev, hx_err *err);
void hx_enc_close(hx_enc *e);

#ifdef __cplusplus
}
#endif
#endif
