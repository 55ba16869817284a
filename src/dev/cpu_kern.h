/* cpu_kern.h - the vector kernels under cpu.c, cpu_attn.c and cpu_sample.c, and what
 * these three share. Nobody else includes it.
 *
 * A kernel works on plain arrays of f32, knows no operation and no thread, and exists
 * once per instruction set: cpu_kern_*.c compile the one text of cpu_kern_body.h. All
 * give the same bits: elements are computed alone, and sums have 16 lanes whatever the
 * registers hold (element i goes to lane i mod 16, in order of i; then the upper half is
 * added to the lower, twice, and 4 lanes join as (0 + 2) + (1 + 3)). Lengths need not be
 * multiples of anything, pointers need no alignment. Parameters are many, as in BLAS:
 * arrays with the distance of their rows. */
#ifndef HX_CPU_KERN_H
#define HX_CPU_KERN_H

#include "dev/cpu.h"

#define HX_KERN_BLOCK 512 /* elements that one f32 sum spans; blocks join in double */
#define HX_KERN_LANES 16
#define HX_KERN_COLS  32 /* columns of a KDA state that are carried together */

/* One row of one KDA head, ready for the recurrence; width floats each but o. */
typedef struct {
    const float *k, *v;   /* k' */
    const float *decay;   /* exp g */
    const float *dk, *dq; /* decay k', decay q'; dq NULL: the row has no output */
    float beta, kq;       /* kq: k' . q' */
    float *o;
} hx_kern_kda;

typedef struct {
    double (*sum)(const float *x, int64_t n);
    double (*dot)(const float *x, const float *y, int64_t n);
    double (*spread)(const float *x, float mean, int64_t n); /* sum of (x - mean)^2 */
    /* y = (x - mean) scale w + b; w, b may be NULL */
    void (*norm)(float *y, const float *x, float mean, float scale, const float *w,
                 const float *b, int64_t n);
    /* y = base + coef[0] x_0 + coef[1] x_1 + …, fused, in this order; x_i is ldx floats
     * after x_(i-1); base NULL: 0 */
    void (*mix)(float *y, const float *base, const float *coef, const float *x,
                int64_t ldx, int64_t n_x, int64_t n);
    /* hc_merge of one row */
    void (*merge)(float *streams, const float *y, const float *post, const float *comb,
                  int64_t n_stream, int64_t n);
    /* The maps of hc_mix for up to 16 rows, in place: m [n (2 + n)][16] becomes pre,
     * post, comb */
    void (*hc_maps)(float *m, int64_t rows, const float *scale, const float *base,
                    int64_t n_stream, float eps, int32_t iters);
    void (*swiglu)(float *y, const float *gate, const float *up, float limit, int64_t n);
    /* y = bound sigmoid(a (x + b)); b may be NULL */
    void (*gate)(float *y, const float *x, const float *b, float a, float bound,
                 int64_t n);
    /* y = x scale w sigmoid(z) */
    void (*gated)(float *y, const float *x, float scale, const float *w, const float *z,
                  int64_t n);
    /* w [n, taps] to wt [taps, ldw] */
    void (*taps)(float *wt, int64_t ldw, const float *w, int64_t taps, int64_t n);
    /* y = silu(sum over j of w[j, :] u[j][:]); w [taps, ldw] */
    void (*conv)(float *y, const float *const *u, const float *w, int64_t ldw,
                 int64_t taps, int64_t n);

    /* decay = exp g, dk = decay k, dq = decay q; q and dq may be NULL */
    void (*kda_terms)(float *decay, float *dk, float *dq, const float *g, const float *k,
                      const float *q, int64_t n);
    /* One pass over HX_KERN_COLS columns of a state [n, .] from src to dst: first the row
     * done, whose w = beta (v - u) is given, is added; then u and the output of the row
     * next are taken from that state and its w is left. Either may be NULL; dst is
     * written only with done. v and o are read and written from column j0 on, at most n
     * of them. */
    void (*kda_pass)(const float *src, int64_t ld_src, float *dst, int64_t ld_dst,
                     int64_t n, int64_t j0, const hx_kern_kda *done,
                     const hx_kern_kda *next, float *w);

    /* c[i, j] = a_i . b_j over k <= HX_KERN_BLOCK elements, or more at some loss */
    void (*dots)(float *c, int64_t ldc, const float *a, int64_t lda, int64_t m,
                 const float *b, int64_t ldb, int64_t n, int64_t k);
    /* z_i = keep[i] z_i + sum over j < n of p[i, j] c_j; z_i and c_j have width floats;
     * keep NULL: z is only written */
    void (*blend)(float *z, int64_t ldz, const float *keep, const float *p, int64_t ldp,
                  int64_t m, const float *c, int64_t ldc, int64_t n, int64_t width);
    /* s = exp(s scale - top), top = max(*top, scale s), left in *top; returns the sum */
    float (*soften)(float *s, float scale, float *top, int64_t n);
    float (*exp)(float x);
    /* y = sum over h of w[h] w_scale max(0, s[h, :] scale) */
    void (*relu_mix)(float *y, const float *s, int64_t lds, const float *w, int64_t n_w,
                     float scale, float w_scale, int64_t n);
    /* out = sum over s of softmax_s(gate[s] + ape[s, :]) key[s]; per channel */
    void (*pool)(float *out, const float *const *key, const float *const *gate,
                 const float *ape, int64_t pool_n, int64_t n);

    void (*widen)(float *out, const void *in, hx_fmt fmt, float scale, int64_t n);
    void (*narrow)(uint16_t *out, const float *in, int64_t n); /* to bf16 */

    float (*peak)(const float *x, int64_t n, bool *nan); /* the largest that is no NaN */
    /* The first lo <= x <= hi, or n */
    int64_t (*find)(const float *x, int64_t n, float lo, float hi);
    /* p = exp((x - top) inv), 0 below 1e-37; returns the sum. p may be NULL */
    double (*weigh)(float *p, const float *x, float top, float inv, int64_t n);
    /* How many x >= lo, and the sum of their p; p may be NULL */
    int64_t (*tally)(const float *x, const float *p, float lo, int64_t n, double *mass);
} hx_kern;

extern const hx_kern hx_kern_scalar, hx_kern_avx2, hx_kern_avx512;

/* ---- shared by the operations ---------------------------------------- */

/* Scratch: one area per worker, then one that an operation may use as a whole. */
#define HX_KERN_WORKER_BYTES           ((size_t)384 << 10)
#define HX_KERN_SHARED_BYTES(n_thread) HX_MAX((size_t)1 << 20, (size_t)(n_thread) << 16)

/* An operation's call as the pool's functions see it. */
typedef struct {
    const hx_dev *dev;
    const hx_kern *v;
    const void *args;
} hx_cpu_call;

/* Runs fn(&call, begin, end, worker) over n items of cost operations each. Returns 0. */
int hx_cpu_run(hx_dev *d, hx_pool_fn *fn, const void *args, int64_t n, int64_t cost);
const hx_kern *hx_cpu_kern(const hx_dev *d);
void *hx_cpu_work(const hx_dev *d, int worker);

/* Rows t0 .. t0 + n - 1 of a span that are treated together. */
typedef struct {
    const hx_span *span;
    int64_t t0, n;
} hx_cpu_rows;

/* How many blocks of at most per rows the spans give, and the i-th of them. */
static inline int64_t hx_cpu_count_blocks(const hx_rows *rows, int64_t per)
{
    int64_t n = 0;

    for (int32_t i = 0; i < rows->n_span; i++)
        n += (rows->span[i].n_row + per - 1) / per;
    return n;
}

static inline hx_cpu_rows hx_cpu_find_block(const hx_rows *rows, int64_t per, int64_t i)
{
    const hx_span *s = rows->span;

    for (int64_t n; i >= (n = (s->n_row + per - 1) / per); s++)
        i -= n;
    return (
        hx_cpu_rows) { .span = s, .t0 = i * per, .n = HX_MIN(per, s->n_row - i * per) };
}

#define X(op) int hx_cpu_##op(hx_dev *, const hx_##op##_args *, hx_err *);
HX_OPS(X)
#undef X

#endif
