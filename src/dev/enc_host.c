/* enc_host.c - the encoder's operations (enc_ops.h) on the host's threads. Called through
 * hx_enc_host by exl3_encode.c. Decides nothing. */
#include <math.h>

#include "dev/enc_ops.h"
#include "dev/fmt_exl3.h"

#define STRIP 32 /* outputs that are encoded together: two tiles */

/* ---- open, memory -------------------------------------------------------- */

int hx_enc_open(hx_enc *e, hx_pool *pool, hx_dev *dev, hx_err *err)
{
    const hx_dev_link *link = dev != NULL ? dev->ops->link : NULL;

    e->pool = pool;
    e->dev = dev;
    e->ops = link != NULL && link->encode != NULL ? link->encode : &hx_enc_host;
    e->own = NULL;
    return e->ops->open(e, err);
}

void hx_enc_close(hx_enc *e)
{
    if (e->ops != NULL)
        e->ops->close(e);
}

static int host_open(hx_enc *e, hx_err *err)
{
    return hx_trellis_open((hx_trellis **)&e->own, e->codebook, e->k2,
                           hx_pool_size(e->pool), err);
}

static void host_close(hx_enc *e)
{
    hx_trellis_close(e->own);
}

static int host_alloc(hx_enc *e, float **out, int64_t n, hx_err *err)
{
    (void)e;
    return (*out = hx_new(float, n)) != NULL
               ? 0
               : hx_fail(err, HX_ENOMEM, "EXL3: no memory for %lld floats", (long long)n);
}

static void host_free(hx_enc *e, float *p)
{
    (void)e;
    hx_free(p);
}

static void host_put(hx_enc *e, float *to, const float *from, int64_t n)
{
    (void)e;
    memcpy(to, from, (size_t)n * sizeof(float));
}

static int host_get(hx_enc *e, float *to, const float *from, int64_t n, hx_err *err)
{
    (void)err;
    host_put(e, to, from, n);
    return 0;
}

static void host_zero(hx_enc *e, float *x, int64_t n)
{
    (void)e;
    memset(x, 0, (size_t)n * sizeof(float));
}

/* ---- elements ------------------------------------------------------------- */

static void host_copy(hx_enc *e, float *y, int64_t ldy, const float *x, int64_t ldx,
                      int64_t rows, int64_t cols)
{
    (void)e;
    for (int64_t i = 0; i < rows; i++)
        memcpy(y + i * ldy, x + i * ldx, (size_t)cols * sizeof(float));
}

static void host_transpose(hx_enc *e, float *y, int64_t ldy, const float *x, int64_t rows,
                           int64_t cols)
{
    (void)e;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            y[j * ldy + i] = x[i * cols + j];
}

static void host_scale(hx_enc *e, float *y, const float *x, const float *r,
                       const float *c, int64_t rows, int64_t cols)
{
    (void)e;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            y[i * cols + j] = x[i * cols + j] * (r[i] * c[j]);
}

static void host_subtract(hx_enc *e, float *y, const float *x, int64_t n)
{
    (void)e;
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] - y[i];
}

static void host_times(hx_enc *e, float *y, const float *x, int64_t n)
{
    (void)e;
    for (int64_t i = 0; i < n; i++)
        y[i] *= x[i];
}

static int host_get_diag(hx_enc *e, const float *x, int64_t n, float *out, hx_err *err)
{
    (void)e, (void)err;
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i * n + i];
    return 0;
}

static void host_put_diag(hx_enc *e, float *x, int64_t n, const float *in)
{
    (void)e;
    for (int64_t i = 0; i < n; i++)
        x[i * n + i] = in[i];
}

static int host_dot_rows(hx_enc *e, const float *a, const float *b, int64_t rows,
                         int64_t cols, double *sum, hx_err *err)
{
    (void)e, (void)err;
    for (int64_t i = 0; i < rows; i++) {
        sum[i] = 0;
        for (int64_t j = 0; j < cols; j++)
            sum[i] += (double)a[i * cols + j] * (double)b[i * cols + j];
    }
    return 0;
}

static int host_dot_columns(hx_enc *e, const float *a, const float *b, int64_t rows,
                            int64_t cols, double *sum, hx_err *err)
{
    (void)e, (void)err;
    memset(sum, 0, (size_t)cols * sizeof(double));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            sum[j] += (double)a[i * cols + j] * (double)b[i * cols + j];
    return 0;
}

/* ---- rotation -------------------------------------------------------------- */

typedef struct {
    float *x;
    int64_t n;
} rotation;

/* Aligned groups of 128 values. */
static void rotate_group(void *ud, int64_t begin, int64_t end, int worker)
{
    const rotation *r = ud;

    (void)worker;
    for (int64_t g = begin; g < end; g++) {
        float *x = r->x + g * HX_ENC_BLOCK;

        for (int64_t w = 1; w < HX_ENC_BLOCK; w *= 2)
            for (int64_t i = 0; i < HX_ENC_BLOCK; i += 2 * w)
                for (int64_t j = i; j < i + w; j++) {
                    const float a = x[j], b = x[j + w];

                    x[j] = a + b;
                    x[j + w] = a - b;
                }
        for (int64_t i = 0; i < HX_ENC_BLOCK; i++)
            x[i] *= HX_CANON_ROOT;
    }
}

static void host_rotate_right(hx_enc *e, float *x, int64_t rows, int64_t cols)
{
    rotation r = { x, cols };

    hx_pool_run(e->pool, rows * cols / HX_ENC_BLOCK, 64, rotate_group, &r);
}

/* Groups of 128 rows, STRIP columns at a time, which stay in the cache. */
static void rotate_rows(void *ud, int64_t begin, int64_t end, int worker)
{
    const rotation *r = ud;
    const int64_t n = r->n, wide = n / STRIP;

    (void)worker;
    for (int64_t g = begin; g < end; g++) {
        float *x = r->x + g / wide * HX_ENC_BLOCK * n + g % wide * STRIP;

        for (int64_t w = 1; w < HX_ENC_BLOCK; w *= 2)
            for (int64_t i = 0; i < HX_ENC_BLOCK; i++)
                for (int64_t j = 0; (i & w) == 0 && j < STRIP; j++) {
                    const float a = x[i * n + j], b = x[(i + w) * n + j];

                    x[i * n + j] = a + b;
                    x[(i + w) * n + j] = a - b;
                }
        for (int64_t i = 0; i < HX_ENC_BLOCK; i++)
            for (int64_t j = 0; j < STRIP; j++)
                x[i * n + j] *= HX_CANON_ROOT;
    }
}

static void host_rotate_left(hx_enc *e, float *x, int64_t rows, int64_t cols)
{
    rotation r = { x, cols };

    hx_pool_run(e->pool, rows / HX_ENC_BLOCK * (cols / STRIP), 4, rotate_rows, &r);
}

/* ---- algebra ---------------------------------------------------------------- */

static void host_mul(hx_enc *e, const hx_dense_args *p)
{
    hx_dense_mul(e->pool, p);
}

static void host_gram(hx_enc *e, float *c, const float *x, int64_t rows, int64_t n)
{
    hx_dense_gram(e->pool, c, n, x, n, rows, n, 1);
}

static int host_factor(hx_enc *e, float *a, int64_t n, bool *done, hx_err *err)
{
    (void)err;
    *done = hx_dense_factor(e->pool, a, n);
    return 0;
}

static int host_solve(hx_enc *e, const float *u, int64_t n, float *x, hx_err *err)
{
    (void)e, (void)err;
    hx_dense_solve(u, n, x);
    return 0;
}

typedef struct {
    float *u;
    int64_t n;
} square;

static void normalise_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const square *s = ud;
    const int64_t n = s->n;

    (void)worker;
    for (int64_t b = begin; b < end; b++)
        for (int64_t i = HX_ENC_TILE - 1; i >= 0; i--) {
            float *ri = s->u + (b * HX_ENC_TILE + i) * n;

            for (int64_t r = i + 1; r < HX_ENC_TILE; r++) {
                const float f = ri[b * HX_ENC_TILE + r],
                            *rr = s->u + (b * HX_ENC_TILE + r) * n;

                for (int64_t c = (b + 1) * HX_ENC_TILE; c < n; c++)
                    ri[c] -= f * rr[c];
            }
            for (int64_t c = (b + 1) * HX_ENC_TILE; c < n; c++)
                ri[c] /= ri[b * HX_ENC_TILE + i];
        }
}

static void host_normalise(hx_enc *e, float *u, int64_t n)
{
    square s = { u, n };

    hx_pool_run(e->pool, n / HX_ENC_TILE, 1, normalise_part, &s);
}

/* ---- tiles ------------------------------------------------------------------ */

static int host_tiles(hx_enc *e, const float *x, int64_t n, const int64_t *at,
                      int64_t n_tile, float (*out)[256], hx_err *err)
{
    const int64_t wide = n / HX_ENC_TILE;

    (void)e, (void)err;
    for (int64_t i = 0; i < n_tile; i++)
        for (int p = 0; p < 256; p++)
            out[i][p] = x[(at[i] / wide * HX_ENC_TILE + hx_exl3_row(p)) * n +
                          at[i] % wide * HX_ENC_TILE + hx_exl3_col(p)];
    return 0;
}

typedef struct {
    hx_trellis *trellis;
    const float (*target)[256];
    uint16_t (*state)[256];
    float (*value)[256];
} pairs;

static void search_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const pairs *p = ud;

    for (int64_t i = 2 * begin; i < 2 * end; i += 2)
        hx_trellis_search(p->trellis, worker, p->target + i, p->state + i, p->value + i);
}

static int host_search(hx_enc *e, const float (*target)[256], int64_t n_tile,
                       uint16_t (*state)[256], float (*value)[256], hx_err *err)
{
    pairs p = { e->own, target, state, value };

    (void)err;
    hx_pool_run(e->pool, n_tile / 2, 1, search_part, &p);
    return 0;
}

typedef struct {
    const hx_enc *e;
    const hx_enc_feed *a;
    float *strip; /* [workers][2][k, STRIP] targets and errors */
} feeding;

/* Rows r0 .. r0 + 15 of a strip of two tiles: targets to states, values, errors. */
static void encode_block(const feeding *f, int worker, int64_t strip, int64_t r0,
                         const float *t, float *err)
{
    const int64_t n = f->e->n, j0 = strip * STRIP;
    const int tile_bytes = hx_exl3_tile_bytes(f->e->k2);
    float target[2][256], value[2][256];
    uint16_t state[2][256];

    for (int i = 0; i < 2; i++)
        for (int p = 0; p < 256; p++)
            target[i][p] =
                t[(r0 + hx_exl3_row(p)) * STRIP + i * HX_ENC_TILE + hx_exl3_col(p)];
    hx_trellis_search(f->e->own, worker, (const float(*)[256])target, state, value);
    for (int i = 0; i < 2; i++) {
        const int64_t tile = r0 / HX_ENC_TILE * (n / HX_ENC_TILE) + strip * 2 + i;

        hx_trellis_pack(f->e->k2, state[i], (uint8_t *)f->a->trellis + tile * tile_bytes);
        for (int p = 0; p < 256; p++) {
            const int64_t r = r0 + hx_exl3_row(p), c = i * HX_ENC_TILE + hx_exl3_col(p);

            f->a->q[r * n + j0 + c] = value[i][p];
            err[r * STRIP + c] = f->a->rot[r * n + j0 + c] - value[i][p];
        }
    }
}

/* Strips know nothing of each other. */
static void feed_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const feeding *f = ud;
    const int64_t n = f->e->n, k = f->e->k;
    float *t = f->strip + (int64_t)worker * 2 * k * STRIP, *err = t + k * STRIP;

    for (int64_t s = begin; s < end; s++) {
        for (int64_t i = 0; i < k; i++)
            memcpy(t + i * STRIP, f->a->rot + i * n + s * STRIP, STRIP * sizeof(float));
        for (int64_t r = k - HX_ENC_TILE; r >= 0; r -= HX_ENC_TILE) {
            const int64_t span = r / HX_ENC_BLOCK * HX_ENC_BLOCK;
            hx_dense_args near = { .c = t + span * STRIP,
                                   .a = f->a->u + span * k + r,
                                   .b = err + r * STRIP,
                                   .ldc = STRIP,
                                   .ars = k,
                                   .acs = 1,
                                   .ldb = STRIP,
                                   .m = r - span,
                                   .n = STRIP,
                                   .k = HX_ENC_TILE,
                                   .sign = 1 };

            encode_block(f, worker, s, r, t, err);
            hx_dense_mul(NULL, &near);
            if (r != span)
                continue;
            near.c = t;
            near.a = f->a->u + span;
            near.m = span;
            near.k = HX_ENC_BLOCK;
            hx_dense_mul(NULL, &near);
        }
    }
}

static int host_feed(hx_enc *e, const hx_enc_feed *a, hx_err *err)
{
    feeding f = { e, a, hx_new(float, hx_pool_size(e->pool) * 2 * e->k * STRIP) };

    if (f.strip == NULL)
        return hx_fail(err, HX_ENOMEM, "EXL3: no memory for strips of %lld rows",
                       (long long)e->k);
    hx_pool_run(e->pool, e->n / STRIP, 1, feed_part, &f);
    hx_free(f.strip);
    return 0;
}

const hx_enc_ops hx_enc_host = {
    .open = host_open,
    .close = host_close,
    .alloc = host_alloc,
    .free = host_free,
    .put = host_put,
    .get = host_get,
    .zero = host_zero,
    .copy = host_copy,
    .transpose = host_transpose,
    .scale = host_scale,
    .subtract = host_subtract,
    .times = host_times,
    .get_diag = host_get_diag,
    .put_diag = host_put_diag,
    .dot_rows = host_dot_rows,
    .dot_columns = host_dot_columns,
    .rotate_right = host_rotate_right,
    .rotate_left = host_rotate_left,
    .mul = host_mul,
    .gram = host_gram,
    .factor = host_factor,
    .solve = host_solve,
    .normalise = host_normalise,
    .tiles = host_tiles,
    .search = host_search,
    .feed = host_feed,
};
