/* ops.c - devices by name, their memory, and one checked entry per operation.
 *
 * Called by model (operations) and engine (open, close, memory). Every argument is
 * checked here, once for all backends, and the backend's table is called; backends trust
 * what they get. Nothing here computes. Ids and picks are looked at too where buffers are
 * host memory; a backend with memory of its own must be safe against those it finds. */
#include <math.h>
#include <stdio.h>

#include "dev/cpu.h"
#include "dev/fmt_page.h"
#include "dev/lane.h"
#include "dev/ref.h"
#ifdef HX_CUDA
#include "dev/cuda_dev.h"
#endif

enum {
    MAX_STREAMS = 8, /* residual streams; backends keep per-row arrays of them */
    MAX_TAPS = 8,
    MAX_POOL = 8,
    MAX_TOP = 20, /* alternatives of a sampled row */
};

/* ---- checks ---------------------------------------------------------- */

/* The first failed check of a call; later ones do nothing. */
typedef struct {
    const char *op;
    hx_err *err;
    int rc;
    bool host; /* buffers can be read here */
} check;

enum { F32 = 4, I32 = 4 }; /* bytes */

#define REFUSE(c, ...)                                                                   \
    do {                                                                                 \
        if ((c)->rc == 0)                                                                \
            (c)->rc = hx_fail((c)->err, HX_EARG, __VA_ARGS__);                           \
    } while (0)

static void range(check *c, const char *name, int64_t v, int64_t lo, int64_t hi)
{
    if (v < lo || v > hi)
        REFUSE(c, "%s: %s is %lld, must be %lld to %lld", c->op, name, (long long)v,
               (long long)lo, (long long)hi);
}

/* A count whose products are checked where buffers are. */
static void at_least(check *c, const char *name, int64_t v, int64_t lo)
{
    if (v < lo)
        REFUSE(c, "%s: %s is %lld, must be at least %lld", c->op, name, (long long)v,
               (long long)lo);
}

/* Four dimensions; unused ones are 1. False when the product overflows or one is
 * negative. */
static bool volume(int64_t a, int64_t b, int64_t d, int64_t e, size_t *out)
{
    return a >= 0 && b >= 0 && d >= 0 && e >= 0 && hx_mul((size_t)a, (size_t)b, out) &&
           hx_mul(*out, (size_t)d, out) && hx_mul(*out, (size_t)e, out) &&
           *out <= PTRDIFF_MAX;
}

/* b holds n bytes and is aligned for items of size bytes. */
static void holds(check *c, const char *name, hx_buf b, size_t n, size_t size)
{
    if (n > 0 && b.p == NULL)
        REFUSE(c, "%s: %s is missing, needs %zu bytes", c->op, name, n);
    else if (b.n < n)
        REFUSE(c, "%s: %s has %zu bytes, needs %zu", c->op, name, b.n, n);
    else if ((uintptr_t)b.p % size != 0)
        REFUSE(c, "%s: %s is not aligned to %zu bytes", c->op, name, size);
}

static void dense(check *c, const char *name, hx_buf b, int64_t n0, int64_t n1,
                  int64_t n2)
{
    size_t n;

    if (!volume(n0, n1, n2, F32, &n))
        REFUSE(c, "%s: %s: shape [%lld, %lld, %lld] is negative or too large", c->op,
               name, (long long)n0, (long long)n1, (long long)n2);
    else
        holds(c, name, b, n, F32);
}

/* rows of dim floats, ld floats apart. */
static void strided(check *c, const char *name, hx_buf b, int64_t rows, int64_t dim,
                    int64_t ld)
{
    size_t n;

    if (ld < dim)
        REFUSE(c, "%s: rows of %s are %lld floats apart, must be at least %lld", c->op,
               name, (long long)ld, (long long)dim);
    else if (!volume(rows, ld, 1, F32, &n))
        REFUSE(c, "%s: %s: %lld rows of %lld floats are negative or too large", c->op,
               name, (long long)rows, (long long)ld);
    else if (rows > 0)
        holds(c, name, b, n - (size_t)(ld - dim) * F32, F32);
}

static void not_negative(check *c, const char *name, float v)
{
    if (!(v >= 0 && v < (float)INFINITY))
        REFUSE(c, "%s: %s is %g, must be 0 or more and finite", c->op, name, (double)v);
}

/* i32 ids in host memory, each lo .. hi - 1. */
static void host_ids_in(check *c, const char *name, hx_buf b, int64_t n, int64_t lo,
                        int64_t hi)
{
    dense(c, name, b, n, 1, 1);
    for (int64_t i = 0; i < n && c->rc == 0; i++) {
        const int32_t id = ((const int32_t *)b.p)[i];

        if (id < lo || id >= hi)
            REFUSE(c, "%s: %s[%lld] is %d, must be %lld to %lld", c->op, name,
                   (long long)i, id, (long long)lo, (long long)hi - 1);
    }
}

/* The same in memory of the device. */
static void ids_in(check *c, const char *name, hx_buf b, int64_t n, int64_t lo,
                   int64_t hi)
{
    if (c->host)
        host_ids_in(c, name, b, n, lo, hi);
    else
        dense(c, name, b, n, 1, 1);
}

static void mat_exl3(check *c, const char *name, const hx_mat *m)
{
    const bool half = m->k2 % 2 != 0; /* half bits exist below 4 and for MUL1 only */

    if (m->suh == NULL || m->svh == NULL)
        REFUSE(c, "%s: %s has no suh or svh", c->op, name);
    else if (m->k2 < 2 || m->k2 > 16 ||
             (half && (m->k2 > 7 || m->codebook != HX_CB_MUL1)))
        REFUSE(c, "%s: %s has 2 x bits = %d; 2 to 16, odd ones 3, 5, 7 with mul1 only",
               c->op, name, m->k2);
    else if ((unsigned)m->codebook >= HX_N_CB)
        REFUSE(c, "%s: %s has unknown codebook %d", c->op, name, (int)m->codebook);
    else if (m->n_pad != (m->n + 127) / 128 * 128 || m->k_pad != (m->k + 127) / 128 * 128)
        REFUSE(c,
               "%s: %s [%lld, %lld] is padded to [%lld, %lld], must be the next "
               "multiples of 128",
               c->op, name, (long long)m->n, (long long)m->k, (long long)m->n_pad,
               (long long)m->k_pad);
}

/* n, k: expected, or 0 for any. */
static void mat(check *c, const char *name, const hx_mat *m, bool plain, int64_t n,
                int64_t k)
{
    size_t bytes;

    if (m == NULL || m->w == NULL)
        REFUSE(c, "%s: matrix %s is missing", c->op, name);
    else if ((unsigned)m->fmt >= HX_N_FMT || (plain && m->fmt == HX_FMT_EXL3))
        REFUSE(c, "%s: matrix %s has a format that this operation does not take (%s)",
               c->op, name,
               (unsigned)m->fmt < HX_N_FMT ? hx_fmt_name(m->fmt) : "unknown");
    else if (m->n < 1 || m->k < 1 || !volume(m->n, m->k, sizeof(double), 1, &bytes))
        REFUSE(c, "%s: matrix %s is [%lld, %lld]", c->op, name, (long long)m->n,
               (long long)m->k);
    else if ((n > 0 && m->n != n) || (k > 0 && m->k != k))
        REFUSE(c, "%s: matrix %s is [%lld, %lld], expected [%lld, %lld]", c->op, name,
               (long long)m->n, (long long)m->k, (long long)(n > 0 ? n : m->n),
               (long long)(k > 0 ? k : m->k));
    else if (m->fmt == HX_FMT_FP8 &&
             (m->scale == NULL || m->block_n < 1 || m->block_k < 1))
        REFUSE(c, "%s: matrix %s has no scales, or blocks of %d x %d", c->op, name,
               m->block_n, m->block_k);
    else if (m->fmt == HX_FMT_EXL3)
        mat_exl3(c, name, m);
}

/* What a call does with the spans' positions. */
enum {
    OWNS = 1,    /* writes state of the slot: a slot at most once */
    COMMITS = 2, /* folds pending rows */
    PENDS = 4,   /* its rows become pending */
};

static void span_ok(check *c, const hx_rows *rows, int32_t i, int use)
{
    const hx_span *s = &rows->span[i];
    const int64_t first = i == 0 ? 0 : (int64_t)s[-1].row0 + s[-1].n_row;

    if (s->slot < 0)
        REFUSE(c, "%s: span %d: slot %d", c->op, i, s->slot);
    else if (s->n_row < 0 || s->row0 < first || (int64_t)s->row0 + s->n_row > rows->n_row)
        REFUSE(c, "%s: span %d: %d rows from %d on, expected rows %lld to %lld in order",
               c->op, i, s->n_row, s->row0, (long long)first, (long long)rows->n_row - 1);
    else if (s->pos0 < 0 || (int64_t)s->pos0 + s->n_row > INT32_MAX)
        REFUSE(c, "%s: span %d: %d rows from position %d on", c->op, i, s->n_row,
               s->pos0);
    else if ((use & COMMITS) != 0 &&
             (s->commit < 0 || s->commit > HX_MIN(HX_PEND_MAX, s->pos0)))
        REFUSE(c, "%s: span %d: %d pending rows to fold at position %d, must be 0 to %d",
               c->op, i, s->commit, s->pos0, HX_MIN(HX_PEND_MAX, s->pos0));
    else if ((use & PENDS) != 0 && s->n_row > HX_PEND_MAX)
        REFUSE(c, "%s: span %d: %d rows, a slot holds %d pending", c->op, i, s->n_row,
               HX_PEND_MAX);
    for (int32_t j = 0; j < i && (use & OWNS) != 0; j++)
        if (rows->span[j].slot == s->slot)
            REFUSE(c, "%s: spans %d and %d share slot %d", c->op, j, i, s->slot);
}

static void spans(check *c, const hx_rows *rows, int use)
{
    range(c, "rows", rows->n_row, 0, INT32_MAX);
    range(c, "spans", rows->n_span, 0, INT32_MAX);
    if (rows->n_span > 0 && rows->span == NULL)
        REFUSE(c, "%s: spans are missing", c->op);
    for (int32_t i = 0; i < rows->n_span && c->rc == 0; i++)
        span_ok(c, rows, i, use);
}

/* Every slot of the spans has its [n1, n2] floats in b. */
static void slots(check *c, const char *name, hx_buf b, const hx_rows *rows, int64_t n1,
                  int64_t n2)
{
    for (int32_t i = 0; i < rows->n_span && c->rc == 0; i++)
        dense(c, name, b, (int64_t)rows->span[i].slot + 1, n1, n2);
}

/* Pages of one slot for items from .. to - 1, per to a page. */
static void pages_of(check *c, const char *name, const hx_pages *g, int32_t slot,
                     int64_t from, int64_t to, int64_t per)
{
    for (int64_t p = from / per; p * per < to && c->rc == 0; p++) {
        const int32_t id = p < g->max_page ? g->table[slot * g->max_page + p] : -1;

        if (id < 0 || id >= g->n_page)
            REFUSE(c,
                   "%s: %s: slot %d has no page for positions from %lld on (entry %d of "
                   "%lld pages)",
                   c->op, name, slot, (long long)(p * HX_PAGE), id, (long long)g->n_page);
    }
}

/* Paged memory, items of unit positions each. whole: also what earlier calls stored. */
static void pages(check *c, const char *name, const hx_pages *g, const hx_rows *rows,
                  int64_t unit, bool whole)
{
    const int64_t per = HX_PAGE / unit;
    size_t n;

    if (g->fmt != HX_CACHE_BF16 && g->fmt != HX_CACHE_F32 && g->fmt != HX_CACHE_FP8)
        REFUSE(c, "%s: %s has unknown format %d", c->op, name, (int)g->fmt);
    at_least(c, "page width", g->width, 1);
    at_least(c, "pages of a slot", g->max_page, 0);
    if (c->rc != 0)
        return;
    const int64_t size = hx_page_value_bytes(g->fmt);
    if (!volume(g->n_page, per, g->width + (g->fmt == HX_CACHE_FP8), size, &n))
        REFUSE(c, "%s: %s: %lld pages of width %lld", c->op, name, (long long)g->n_page,
               (long long)g->width);
    else
        holds(c, name, g->data, n, (size_t)size);
    for (int32_t i = 0; i < rows->n_span && c->rc == 0; i++) {
        const hx_span *s = &rows->span[i];
        const int64_t end = ((int64_t)s->pos0 + s->n_row) / unit;

        if (s->n_row > 0 && end > 0 && g->table == NULL)
            REFUSE(c, "%s: %s has no page table", c->op, name);
        else if (s->n_row > 0)
            pages_of(c, name, g, s->slot, whole ? 0 : s->pos0 / unit, end, per);
    }
}

static void pool_pages(check *c, const hx_pages *g, const hx_rows *rows, int64_t unit,
                       bool whole)
{
    if (g->fmt == HX_CACHE_FP8)
        REFUSE(c, "%s: pooled keys are f32 or bf16, not fp8", c->op);
    else
        pages(c, "pool", g, rows, unit, whole);
}

/* Pools of n positions: no more than MAX_POOL, and a page holds whole ones. */
static void pool_size(check *c, int64_t n)
{
    range(c, "positions of a pool", n, 1, MAX_POOL);
    if (c->rc == 0 && HX_PAGE % n != 0)
        REFUSE(c, "%s: pools of %lld positions do not divide a page of %d", c->op,
               (long long)n, HX_PAGE);
}

/* Pools that the last row of any span sees. */
static int64_t most_pools(const hx_rows *rows, int64_t n)
{
    int64_t most = 0;

    for (int32_t i = 0; i < rows->n_span; i++)
        most = HX_MAX(most, ((int64_t)rows->span[i].pos0 + rows->span[i].n_row) / n);
    return most;
}

/* ---- the checks of each operation ------------------------------------ */

static void check_embed(check *c, const hx_embed_args *a)
{
    mat(c, "table", a->table, true, 0, 0);
    at_least(c, "streams", a->streams, 1);
    if (c->rc != 0)
        return;
    dense(c, "y", a->y, a->rows, a->streams, a->table->k);
    ids_in(c, "id", a->id, a->rows, 0, a->table->n);
}

static void check_rmsnorm(check *c, const hx_rmsnorm_args *a)
{
    at_least(c, "dim", a->dim, 1);
    not_negative(c, "eps", a->eps);
    strided(c, "x", a->x, a->rows, a->dim, a->ldx);
    strided(c, "y", a->y, a->rows, a->dim, a->ldy);
    if (a->w.p != NULL)
        dense(c, "w", a->w, a->dim, 1, 1);
}

static void check_layernorm(check *c, const hx_layernorm_args *a)
{
    at_least(c, "dim", a->dim, 1);
    not_negative(c, "eps", a->eps);
    strided(c, "x", a->x, a->rows, a->dim, a->ldx);
    strided(c, "y", a->y, a->rows, a->dim, a->ldy);
    if (a->w.p != NULL)
        dense(c, "w", a->w, a->dim, 1, 1);
    if (a->b.p != NULL)
        dense(c, "b", a->b, a->dim, 1, 1);
}

static void check_matmul(check *c, const hx_matmul_args *a)
{
    const int64_t rows = a->rows;

    for (; a != NULL; a = a->beside) {
        mat(c, "w", a->w, false, 0, 0);
        if (c->rc != 0)
            return;
        strided(c, "x", a->x, rows, a->w->k, a->ldx);
        strided(c, "y", a->y, rows, a->w->n, a->ldy);
    }
}

static void check_head_matmul(check *c, const hx_head_matmul_args *a)
{
    mat(c, "w", a->w, true, 0, 0);
    if (c->rc != 0)
        return;
    range(c, "heads", a->heads, 1, a->w->n);
    range(c, "n", a->n, 1, a->w->n);
    range(c, "first", a->first, 0, a->w->n - a->n);
    range(c, "stride", a->stride, 1, a->w->n);
    if (c->rc == 0 && a->heads - 1 > (a->w->n - a->first - a->n) / a->stride)
        REFUSE(c,
               "head_matmul: %lld heads of %lld rows, %lld apart from row %lld on, do "
               "not fit a "
               "matrix of %lld rows",
               (long long)a->heads, (long long)a->n, (long long)a->stride,
               (long long)a->first, (long long)a->w->n);
    dense(c, "x", a->x, a->rows, a->heads, a->transposed ? a->n : a->w->k);
    dense(c, "y", a->y, a->rows, a->heads, a->transposed ? a->w->k : a->n);
}

static void check_swiglu(check *c, const hx_swiglu_args *a)
{
    not_negative(c, "limit", a->limit);
    dense(c, "gate", a->gate, a->rows, a->dim, 1);
    dense(c, "up", a->up, a->rows, a->dim, 1);
    dense(c, "y", a->y, a->rows, a->dim, 1);
}

static void check_hc_mix(check *c, const hx_hc_mix_args *a)
{
    const int64_t s = a->streams_n;

    range(c, "streams", s, 1, MAX_STREAMS);
    range(c, "dim", a->dim, 1, INT64_MAX / MAX_STREAMS);
    not_negative(c, "norm_eps", a->norm_eps);
    not_negative(c, "eps", a->eps);
    if (c->rc != 0)
        return;
    dense(c, "x", a->x, a->rows, a->dim, 1);
    dense(c, "post", a->post, a->rows, s, 1);
    dense(c, "comb", a->comb, a->rows, s, s);
    dense(c, "streams", a->streams, a->rows, s, a->dim);
    if (a->y.p != NULL)
        dense(c, "y", a->y, a->rows, a->dim, 1);
    if (a->w.p != NULL)
        dense(c, "w", a->w, a->dim, 1, 1);
    if (s == 1 && a->fn == NULL)
        return;
    range(c, "iters", a->iters, 1, 1000);
    mat(c, "fn", a->fn, true, s * (2 + s), s * a->dim);
    dense(c, "base", a->base, s * (2 + s), 1, 1);
    dense(c, "scale", a->scale, 3, 1, 1);
}

static void check_hc_merge(check *c, const hx_hc_merge_args *a)
{
    const int64_t s = a->streams_n;

    range(c, "streams", s, 1, MAX_STREAMS);
    at_least(c, "dim", a->dim, 1);
    dense(c, "streams", a->streams, a->rows, s, a->dim);
    dense(c, "y", a->y, a->rows, a->dim, 1);
    dense(c, "post", a->post, a->rows, s, 1);
    dense(c, "comb", a->comb, a->rows, s, s);
}

static void check_hc_mean(check *c, const hx_hc_mean_args *a)
{
    range(c, "streams", a->streams_n, 1, MAX_STREAMS);
    at_least(c, "dim", a->dim, 1);
    dense(c, "streams", a->streams, a->rows, a->streams_n, a->dim);
    dense(c, "y", a->y, a->rows, a->dim, 1);
}

static void check_conv_short(check *c, const hx_conv_short_args *a)
{
    range(c, "taps", a->taps, 1, MAX_TAPS);
    at_least(c, "channels", a->channels, 1);
    spans(c, &a->rows, OWNS | COMMITS | (a->hold ? PENDS : 0));
    dense(c, "y", a->y, a->rows.n_row, a->channels, 1);
    dense(c, "u", a->u, a->rows.n_row, a->channels, 1);
    dense(c, "w", a->w, a->channels, a->taps, 1);
    slots(c, "state", a->state, &a->rows, a->taps - 1, a->channels);
    slots(c, "pend", a->pend, &a->rows, HX_PEND_MAX, a->channels);
}

static void check_kda_gate(check *c, const hx_kda_gate_args *a)
{
    at_least(c, "heads", a->heads, 1);
    at_least(c, "width", a->width, 1);
    dense(c, "g", a->g, a->rows, a->heads, a->width);
    dense(c, "f", a->f, a->rows, a->heads, a->width);
    dense(c, "beta", a->beta, a->rows, a->heads, 1);
    dense(c, "b", a->b, a->rows, a->heads, 1);
    dense(c, "a_log", a->a_log, a->heads, 1, 1);
    dense(c, "dt_bias", a->dt_bias, a->heads, a->width, 1);
    if (!(a->bound < 0))
        REFUSE(c, "kda_gate: bound is %g, must be below 0", (double)a->bound);
}

static void kda_args(check *c, const hx_kda_step_args *a, int use)
{
    const hx_kda_gate_args gate = hx_kda_step_gate(a);

    range(c, "heads", a->heads, 1, INT32_MAX);
    range(c, "width", a->width, 1, INT16_MAX);
    if (c->rc != 0)
        return;
    const int64_t hw = a->heads * a->width, rec = a->heads * (3 * a->width + 1);
    spans(c, &a->rows, OWNS | COMMITS | use);
    strided(c, "q", a->q, a->rows.n_row, hw, a->ld);
    strided(c, "k", a->k, a->rows.n_row, hw, a->ld);
    strided(c, "v", a->v, a->rows.n_row, hw, a->ld);
    dense(c, "o", a->o, a->rows.n_row, hw, 1);
    dense(c, "g", a->g, a->rows.n_row, hw, 1);
    dense(c, "beta", a->beta, a->rows.n_row, a->heads, 1);
    slots(c, "state", a->state, &a->rows, hw, a->width);
    slots(c, "pend", a->pend, &a->rows, HX_PEND_MAX, rec);
    if (a->a_log.p != NULL)
        check_kda_gate(c, &gate);
}

static void check_kda_step(check *c, const hx_kda_step_args *a)
{
    kda_args(c, a, PENDS);
}

static void check_kda_chunk(check *c, const hx_kda_chunk_args *a)
{
    kda_args(c, a, 0);
}

static void check_kda_out(check *c, const hx_kda_out_args *a)
{
    at_least(c, "heads", a->heads, 1);
    at_least(c, "width", a->width, 1);
    not_negative(c, "eps", a->eps);
    dense(c, "y", a->y, a->rows, a->heads, a->width);
    dense(c, "o", a->o, a->rows, a->heads, a->width);
    dense(c, "z", a->z, a->rows, a->heads, a->width);
    dense(c, "w", a->w, a->width, 1, 1);
}

static void check_latent_append(check *c, const hx_latent_append_args *a)
{
    spans(c, &a->rows, OWNS);
    pages(c, "cache", &a->cache, &a->rows, 1, false);
    strided(c, "c", a->c, a->rows.n_row, a->cache.width, a->ldc);
}

static void check_index_append(check *c, const hx_index_append_args *a)
{
    const int64_t width = a->pool.width;

    spans(c, &a->rows, OWNS);
    pool_size(c, a->pool_n);
    if (c->rc != 0)
        return;
    pool_pages(c, &a->pool, &a->rows, a->pool_n, false);
    dense(c, "key", a->key, a->rows.n_row, width, 1);
    dense(c, "gate", a->gate, a->rows.n_row, width, 1);
    dense(c, "ape", a->ape, a->pool_n, width, 1);
    slots(c, "ring", a->ring, &a->rows, HX_RING * 2, width);
}

static void check_index_score(check *c, const hx_index_score_args *a)
{
    spans(c, &a->rows, 0);
    pool_size(c, a->pool_n);
    at_least(c, "heads", a->heads, 1);
    if (c->rc != 0)
        return;
    pool_pages(c, &a->pool, &a->rows, a->pool_n, true);
    dense(c, "q", a->q, a->rows.n_row, a->heads, a->pool.width);
    dense(c, "w", a->w, a->rows.n_row, a->heads, 1);
    strided(c, "score", a->score, a->rows.n_row, most_pools(&a->rows, a->pool_n),
            a->ld_score);
}

static void check_topk(check *c, const hx_topk_args *a)
{
    spans(c, &a->rows, 0);
    pool_size(c, a->pool_n);
    at_least(c, "k", a->k, 1);
    if (c->rc != 0)
        return;
    dense(c, "pick", a->pick, a->rows.n_row, a->k, 1);
    dense(c, "n_pick", a->n_pick, a->rows.n_row, 1, 1);
    strided(c, "score", a->score, a->rows.n_row, most_pools(&a->rows, a->pool_n),
            a->ld_score);
}

/* Picks ascend, so that the first and the last bound them. */
static void picks(check *c, const hx_mla_attend_args *a, const hx_span *s)
{
    for (int64_t t = 0; t < s->n_row && c->rc == 0; t++) {
        const int64_t row = s->row0 + t, seen = (s->pos0 + t + 1) / a->pool_n;
        const int32_t *pick = (const int32_t *)a->pick.p + row * a->k_pick;
        const int32_t n = ((const int32_t *)a->n_pick.p)[row];

        if (n < 0 || n > HX_MIN(a->k_pick, seen))
            REFUSE(c, "mla_attend: row %lld picks %d pools of %lld visible, at most %lld",
                   (long long)row, n, (long long)seen, (long long)a->k_pick);
        else if (n > 0 && (pick[0] < 0 || pick[n - 1] >= seen))
            REFUSE(c, "mla_attend: row %lld picks pools %d to %d of %lld visible",
                   (long long)row, pick[0], pick[n - 1], (long long)seen);
        else if (n == 0 && (s->pos0 + t + 1) % a->pool_n == 0)
            REFUSE(c, "mla_attend: row %lld attends nothing", (long long)row);
    }
}

static void check_mla_attend(check *c, const hx_mla_attend_args *a)
{
    spans(c, &a->rows, 0);
    at_least(c, "heads", a->heads, 1);
    pages(c, "cache", &a->cache, &a->rows, 1, true);
    dense(c, "z", a->z, a->rows.n_row, a->heads, a->cache.width);
    dense(c, "q", a->q, a->rows.n_row, a->heads, a->cache.width);
    if (a->pick.p == NULL)
        return;
    pool_size(c, a->pool_n);
    at_least(c, "k_pick", a->k_pick, 1);
    dense(c, "pick", a->pick, a->rows.n_row, a->k_pick, 1);
    dense(c, "n_pick", a->n_pick, a->rows.n_row, 1, 1);
    for (int32_t i = 0; i < a->rows.n_span && c->rc == 0 && c->host; i++)
        picks(c, a, &a->rows.span[i]);
}

static void check_router(check *c, const hx_router_args *a)
{
    mat(c, "w", a->w, true, 0, 0);
    if (c->rc != 0)
        return;
    range(c, "active experts", a->active, 1, a->w->n);
    dense(c, "x", a->x, a->rows, a->w->k, 1);
    dense(c, "bias", a->bias, a->w->n, 1, 1);
    dense(c, "score", a->score, a->rows, a->w->n, 1);
    dense(c, "id", a->id, a->rows, a->active, 1);
    dense(c, "weight", a->weight, a->rows, a->active, 1);
}

static hx_mat leased(hx_mat m, const hx_lease_mat *at)
{
    m.w = at->trellis;
    if (m.fmt == HX_FMT_EXL3) {
        m.suh = at->suh;
        m.svh = at->svh;
    } else {
        m.scale = at->suh;
        m.bias = at->svh;
    }
    return m;
}

hx_hc_merge_args hx_hc_mix_merge(const hx_hc_mix_args *a)
{
    return (hx_hc_merge_args) { .streams = a->streams,
                                .y = a->y,
                                .post = a->post,
                                .comb = a->comb,
                                .rows = a->rows,
                                .streams_n = a->streams_n,
                                .dim = a->dim };
}

hx_rmsnorm_args hx_hc_mix_norm(const hx_hc_mix_args *a)
{
    return (hx_rmsnorm_args) { .y = a->x,
                               .x = a->x,
                               .w = a->w,
                               .rows = a->rows,
                               .dim = a->dim,
                               .ldx = a->dim,
                               .ldy = a->dim,
                               .eps = a->norm_eps };
}

hx_kda_gate_args hx_kda_step_gate(const hx_kda_step_args *a)
{
    return (hx_kda_gate_args) { .g = a->g,
                                .beta = a->beta,
                                .f = a->g,
                                .b = a->beta,
                                .a_log = a->a_log,
                                .dt_bias = a->dt_bias,
                                .rows = a->rows.n_row,
                                .heads = a->heads,
                                .width = a->width,
                                .bound = a->bound };
}

hx_expert hx_moe_expert(const hx_moe_args *a, int64_t e)
{
    const hx_expert x = a->expert[e];
    const hx_lease *at = a->at.p;

    if (at == NULL)
        return x;
    return (hx_expert) { leased(x.gate, &at[e].gate), leased(x.up, &at[e].up),
                         leased(x.down, &at[e].down) };
}

static void check_plan(check *c, const hx_plan_args *a)
{
    range(c, "experts", a->n_expert, 1, HX_PLAN_MAX_EXPERT);
    range(c, "active experts", a->active, 1, a->n_expert);
    at_least(c, "dim", a->dim, 1);
    dense(c, "here", a->here, a->rows, a->active, 1);
    dense(c, "there", a->there, a->rows, a->active, 1);
    dense(c, "log", a->log, a->rows, a->active, 1);
    dense(c, "x", a->x, a->rows, a->dim, 1);
    dense(c, "resident", a->resident, a->n_expert, 1, 1);
    ids_in(c, "id", a->id, a->rows * a->active, 0, a->n_expert);
    if (a->ahead != NULL && a->at.n / sizeof(hx_lease) < (size_t)a->n_expert)
        REFUSE(c, "plan: at has %zu bytes for %lld experts", a->at.n,
               (long long)a->n_expert);
    if (a->rows * a->active > HX_PLAN_MAX_PICK)
        REFUSE(c, "plan: %lld rows of %lld picks, at most %d picks go in a call",
               (long long)a->rows, (long long)a->active, HX_PLAN_MAX_PICK);
    if (a->learn && a->lane == NULL)
        REFUSE(c, "plan: there is no lane to learn from");
    if (a->lane != NULL && (a->rows * a->active > a->lane->max_pick ||
                            a->rows > a->lane->max_rows || a->dim != a->lane->dim))
        REFUSE(
            c,
            "plan: %lld rows of width %lld, the lane was opened for %lld of width %lld",
            (long long)a->rows, (long long)a->dim, (long long)a->lane->max_rows,
            (long long)a->lane->dim);
}

/* Only the experts that are picked are looked at, or all where the picks are not to be
 * seen; all have the first one's shapes. */
static void check_moe(check *c, const hx_moe_args *a)
{
    const hx_expert *x = a->expert;
    size_t n_pick;

    range(c, "experts", a->n_expert, 1, INT32_MAX);
    range(c, "active experts", a->active, 1, a->n_expert);
    not_negative(c, "limit", a->limit);
    if (x == NULL || !volume(a->rows, a->active, I32, 1, &n_pick))
        REFUSE(c, "moe: experts are missing, or too many rows (%lld)",
               (long long)a->rows);
    if (c->rc != 0)
        return;
    if (a->at.p != NULL && a->at.n / sizeof(hx_lease) < (size_t)a->n_expert)
        REFUSE(c, "moe: at has %zu bytes for %lld experts", a->at.n,
               (long long)a->n_expert);
    range(c, "first expert", a->first, 0, a->end);
    range(c, "end of experts", a->end, 0, a->prefill ? a->n_expert : 0);
    const int64_t d = x[0].gate.k, f = x[0].gate.n;
    dense(c, "y", a->y, a->rows, a->active, d);
    dense(c, "x", a->x, a->rows, d, 1);
    ids_in(c, "id", a->id, a->rows * a->active, INT32_MIN, a->n_expert);
    const int64_t n = c->host ? a->rows * a->active : a->n_expert;
    for (int64_t i = 0; i < n && c->rc == 0; i++) {
        const int64_t id = c->host ? ((const int32_t *)a->id.p)[i] : i;

        if (id < 0)
            continue;
        mat(c, "gate", &x[id].gate, false, f, d);
        mat(c, "up", &x[id].up, false, f, d);
        mat(c, "down", &x[id].down, false, d, f);
    }
}

static void check_combine(check *c, const hx_combine_args *a)
{
    at_least(c, "active experts", a->active, 0);
    at_least(c, "dim", a->dim, 1);
    dense(c, "y", a->y, a->rows, a->dim, 1);
    dense(c, "base", a->base, a->rows, a->dim, 1);
    dense(c, "part", a->part, a->rows, a->active, a->dim);
    dense(c, "weight", a->weight, a->rows, a->active, 1);
    if (a->there.p == NULL)
        return;
    dense(c, "there", a->there, a->rows, a->active, 1);
    if (a->lane == NULL || a->dim != a->lane->dim || a->rows > a->lane->max_rows)
        REFUSE(c, "combine: picks are with a lane, which is not there or is another");
}

static void list_in(check *c, const char *name, const int32_t *id, int64_t n, int64_t hi)
{
    at_least(c, name, n, 0);
    if (c->rc == 0 && n > 0)
        host_ids_in(c, name, (hx_buf) { (void *)(uintptr_t)id, (size_t)n * I32 }, n, 0,
                    hi);
}

static void sample_row(check *c, const hx_sample_row *s, int64_t n_vocab)
{
    const struct {
        const char *name;
        float v;
    } at[] = {
        { "temperature", s->temperature },
        { "top_p", s->top_p },
        { "min_p", s->min_p },
        { "repeat", s->repeat },
    };

    for (size_t i = 0; i < HX_LEN(at); i++)
        not_negative(c, at[i].name, at[i].v);
    range(c, "top_k", s->top_k, 0, INT32_MAX);
    range(c, "n_top", s->n_top, 0, MAX_TOP);
    list_in(c, "hist_id", s->hist_id, s->n_hist, n_vocab);
    if (s->n_hist > 0 && s->hist_count == NULL)
        REFUSE(c, "sample: hist_count is missing");
    list_in(c, "ban", s->ban, s->n_ban, n_vocab);
    at_least(c, "biases", s->n_bias, 0);
    if (s->n_bias > 0 && s->bias == NULL)
        REFUSE(c, "sample: biases are missing");
    for (int32_t i = 0; i < s->n_bias && c->rc == 0; i++)
        range(c, "id of a bias", s->bias[i].token, 0, n_vocab - 1);
}

static void check_sample(check *c, const hx_sample_args *a)
{
    range(c, "n_vocab", a->n_vocab, 1, INT32_MAX);
    range(c, "n_token", a->n_token, 1, a->n_vocab);
    dense(c, "id", a->id, a->rows, 1, 1);
    dense(c, "logits", a->logits, a->rows, a->n_vocab, 1);
    dense(c, "scratch", a->scratch, a->rows, 2, a->n_vocab);
    holds(c, "scratch", a->scratch, 0, sizeof(double));
    if (a->rows > 0 && a->row == NULL)
        REFUSE(c, "sample: rows are missing");
    bool logprob = false, top = false;
    for (int64_t r = 0; r < a->rows && c->rc == 0; r++) {
        sample_row(c, &a->row[r], a->n_vocab);
        logprob |= a->row[r].want_logprob;
        top |= a->row[r].n_top > 0;
    }
    if (logprob)
        dense(c, "logprob", a->logprob, a->rows, 1, 1);
    if (top)
        dense(c, "top", a->top, a->rows, MAX_TOP, sizeof(hx_choice) / F32);
}

_Static_assert(HX_N_OP < HX_OP_TIMES, "a place for each kind, and for copies");

/* Waits for the device; adds what has passed since start to a kind's time. */
static int64_t clock_op(hx_dev *d, int kind, const char *name, int64_t start, hx_err *err)
{
    hx_op_time *t = &d->times[kind];
    char any;

    if (!hx_dev_is_host(d))
        hx_dev_get(d, &any, (hx_buf) { 0 }, 0, err);
    t->name = name;
    t->calls++;
    t->us += (double)(hx_now_us() - start);
    return hx_now_us();
}

#define X(op)                                                                            \
    static int timed_##op(hx_dev *d, const hx_##op##_args *a, hx_err *err)               \
    {                                                                                    \
        const int64_t start = clock_op(d, HX_N_OP, "copies", hx_now_us(), err);          \
        const int rc = d->ops->op(d, a, err);                                            \
                                                                                         \
        clock_op(d, HX_OP_##op, #op, start, err);                                        \
        return rc;                                                                       \
    }                                                                                    \
    int hx_op_##op(hx_dev *d, const hx_##op##_args *a, hx_err *err)                      \
    {                                                                                    \
        check c = { #op, err, 0, true };                                                 \
                                                                                         \
        if (d == NULL || a == NULL)                                                      \
            return hx_fail(err, HX_EARG, #op ": no device or no arguments");             \
        c.host = hx_dev_is_host(d);                                                      \
        check_##op(&c, a);                                                               \
        return c.rc != 0          ? c.rc                                                 \
               : d->times != NULL ? timed_##op(d, a, err)                                \
                                  : d->ops->op(d, a, err);                               \
    }
HX_OPS(X)
#undef X

/* ---- devices --------------------------------------------------------- */

typedef struct {
    const hx_dev_ops *ops;
    size_t (*scratch_bytes)(const hx_dev_limits *, int n_thread); /* of the host */
    int (*open)(hx_dev *, const hx_dev_opt *, hx_err *); /* NULL: nothing of its own */
    void (*close)(hx_dev *);
    bool (*is_there)(void); /* NULL: not chosen unless named */
} backend;

static const backend backends[] = {
    { &hx_cpu_ops, hx_cpu_scratch_bytes, NULL, NULL, NULL },
    { &hx_ref_ops, hx_ref_scratch_bytes, NULL, NULL, NULL },
#ifdef HX_CUDA
    { &hx_cuda_ops, NULL, hx_cuda_open, hx_cuda_close, hx_cuda_is_there },
#endif
};

static const char *const isa_names[HX_N_ISA] = {
    [HX_ISA_SCALAR] = "scalar",
    [HX_ISA_AVX2] = "avx2",
    [HX_ISA_AVX512] = "avx512",
};

/* A name, or a name and a number: "cuda:1". */
static const backend *find_backend(const char *name)
{
    for (size_t i = 0; i < HX_LEN(backends); i++) {
        const backend *b = &backends[i];
        const size_t n = strlen(b->ops->name);

        if (strncmp(b->ops->name, name, n) == 0 &&
            (name[n] == 0 || (name[n] == ':' && b->open != NULL)))
            return b;
    }
    return NULL;
}

static int unknown_device(const char *name, hx_err *err)
{
    const bool cuda = strncmp(name, "cuda", 4) == 0 && (name[4] == 0 || name[4] == ':');

    if (cuda)
        return hx_fail(
            err, HX_EUNSUP,
            "device %s: this program was built without CUDA; build it where nvcc "
            "is installed, or use the device cpu",
            name);
    return hx_fail(err, HX_EARG,
                   "device %s: unknown; there are cpu, ref, cuda and cuda:N", name);
}

/* An operation that the table lacks, or NULL. */
static const char *lacking(const hx_dev_ops *t)
{
#define X(op)                                                                            \
    if (t->op == NULL)                                                                   \
        return #op;
    HX_OPS(X)
#undef X
    return NULL;
}

/* Sets level and name of the instruction set: the one asked for, or the best there is. */
static int choose_isa(hx_dev *d, const char *name, hx_err *err)
{
    if (d->ops == &hx_ref_ops) {
        d->isa = "double";
        if (name == NULL || strcmp(name, d->isa) == 0)
            return 0;
        return hx_fail(err, HX_EARG, "device ref: instruction set %s; it has only %s",
                       name, d->isa);
    }
    for (int i = HX_N_ISA; i-- > 0;) {
        if (name != NULL && strcmp(name, isa_names[i]) != 0)
            continue;
        if (hx_cpu_has((hx_isa)i)) {
            d->level = i;
            d->isa = isa_names[i];
            return 0;
        }
        if (name != NULL)
            return hx_fail(err, HX_EARG,
                           "device cpu: this CPU lacks %s; leave the instruction set "
                           "out to get the best there is",
                           name);
    }
    return hx_fail(err, HX_EARG,
                   "device cpu: instruction set %s is unknown; there are avx512, avx2 "
                   "and scalar",
                   name);
}

const char *hx_dev_default(void)
{
    for (size_t i = 0; i < HX_LEN(backends); i++)
        if (backends[i].is_there != NULL && backends[i].is_there())
            return backends[i].ops->name;
    return hx_cpu_ops.name;
}

int hx_dev_open(hx_dev **out, const hx_dev_opt *opt, hx_err *err)
{
    const char *name = opt->name != NULL ? opt->name : hx_dev_default(), *missing;
    const backend *b = find_backend(name);
    hx_dev *d = NULL;
    int rc;

    *out = NULL;
    if (b == NULL) {
        rc = unknown_device(name, err);
        goto fail;
    }
    if ((missing = lacking(b->ops)) != NULL) {
        rc = hx_fail(err, HX_EUNSUP, "device %s lacks %s", name, missing);
        goto fail;
    }
    if ((d = hx_new(hx_dev, 1)) == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "device %s: no memory for %zu bytes", name,
                     sizeof(*d));
        goto fail;
    }
    d->ops = b->ops;
    if (b->open != NULL) {
        hx_dev_opt named = *opt;

        named.name = name;
        if ((rc = b->open(d, &named, err)) != 0)
            goto fail;
        *out = d;
        return 0;
    }
    if ((rc = choose_isa(d, opt->isa, err)) != 0 ||
        (rc = hx_pool_open(&d->pool, opt->n_threads, opt->cpus, err)) != 0)
        goto fail;
    const int n = hx_pool_size(d->pool);
    d->scratch_bytes = b->scratch_bytes(&opt->limits, n);
    if (d->scratch_bytes > 0 && (d->scratch = hx_map(d->scratch_bytes, false)) == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "device %s: no memory for %zu bytes of scratch",
                     name, d->scratch_bytes);
        goto fail;
    }
    snprintf(d->text, sizeof(d->text), "%s (%s, %d thread%s)", d->ops->name, d->isa, n,
             n == 1 ? "" : "s");
    *out = d;
    return 0;
fail:
    hx_dev_close(d);
    return rc;
}

void hx_dev_close(hx_dev *d)
{
    if (d == NULL)
        return;
    const backend *b = find_backend(d->ops->name);
    if (b->close != NULL)
        b->close(d);
    hx_pool_close(d->pool);
    if (d->scratch != NULL)
        hx_unmap(d->scratch, d->scratch_bytes);
    hx_free(d);
}

/* Large buffers come straight from the system: backed as they are touched, in large pages
 * where there are some. */
static bool is_mapped(size_t bytes)
{
    return bytes >= (size_t)2 << 20;
}

int hx_dev_alloc(hx_dev *d, hx_buf *out, size_t bytes, hx_err *err)
{
    void *p = NULL;

    *out = (hx_buf) { NULL, 0 };
    if (d->ops->alloc != NULL) {
        const int rc = d->ops->alloc(d, out, bytes, err);

        d->used_bytes += rc == 0 ? bytes : 0;
        return rc;
    }
    if (bytes > 0 &&
        (p = is_mapped(bytes) ? hx_map(bytes, true) : hx_alloc(bytes)) == NULL)
        return hx_fail(err, HX_ENOMEM, "device %s: no memory for a buffer of %zu bytes",
                       d->ops->name, bytes);
    *out = (hx_buf) { p, bytes };
    d->used_bytes += bytes;
    return 0;
}

void hx_dev_free(hx_dev *d, hx_buf *b)
{
    d->used_bytes -= b->n;
    if (d->ops->free != NULL)
        d->ops->free(d, b);
    else if (is_mapped(b->n))
        hx_unmap(b->p, b->n);
    else
        hx_free(b->p);
    *b = (hx_buf) { NULL, 0 };
}

int hx_dev_put(hx_dev *d, hx_buf to, const void *from, size_t bytes, hx_err *err)
{
    hx_assert(bytes <= to.n);
    if (d->ops->put != NULL)
        return d->ops->put(d, to, from, bytes, err);
    memcpy(to.p, from, bytes);
    return 0;
}

int hx_dev_get(hx_dev *d, void *to, hx_buf from, size_t bytes, hx_err *err)
{
    hx_assert(bytes <= from.n);
    if (d->ops->get != NULL)
        return d->ops->get(d, to, from, bytes, err);
    memcpy(to, from.p, bytes);
    return 0;
}

bool hx_dev_is_host(const hx_dev *d)
{
    return d->ops->alloc == NULL;
}

/* ---- beside host memory: where they are one, there is little to do ------- */

int hx_dev_memory(hx_dev *d, uint64_t *free_bytes, uint64_t *total, hx_err *err)
{
    if (d->ops->link != NULL)
        return d->ops->link->memory(d, free_bytes, total, err);
    *free_bytes = *total = hx_sys_mem_bytes();
    return 0;
}

int hx_dev_pin(hx_dev *d, void *p, size_t bytes, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->pin(d, p, bytes, err) : 0;
}

void hx_dev_unpin(hx_dev *d, void *p)
{
    if (d->ops->link != NULL)
        d->ops->link->unpin(d, p);
}

int hx_dev_shared(hx_dev *d, hx_buf *out, size_t bytes, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->shared(d, out, bytes, err)
                                : hx_dev_alloc(d, out, bytes, err);
}

void hx_dev_unshared(hx_dev *d, hx_buf *b)
{
    if (d->ops->link != NULL)
        d->ops->link->unshared(d, b);
    else
        hx_dev_free(d, b);
}

int hx_dev_push(hx_dev *d, hx_buf to, const void *from, size_t bytes, hx_err *err)
{
    hx_assert(bytes <= to.n);
    return d->ops->link != NULL ? d->ops->link->push(d, to, from, bytes, err)
                                : hx_dev_put(d, to, from, bytes, err);
}

int hx_dev_bring(hx_dev *d, void *to, hx_buf from, size_t bytes, hx_err *err)
{
    hx_assert(bytes <= from.n);
    return d->ops->link != NULL ? d->ops->link->bring(d, to, from, bytes, err)
                                : hx_dev_get(d, to, from, bytes, err);
}

int hx_dev_copy(hx_dev *d, hx_buf to, hx_buf from, size_t bytes, hx_err *err)
{
    hx_assert(bytes <= from.n && bytes <= to.n);
    return d->ops->link != NULL ? d->ops->link->copy(d, to, from, bytes, err)
                                : hx_dev_put(d, to, from.p, bytes, err);
}

int hx_dev_mark(hx_dev *d, uint64_t *ticket, hx_err *err)
{
    *ticket = 0;
    return d->ops->link != NULL ? d->ops->link->mark(d, ticket, err) : 0;
}

int hx_dev_reach(hx_dev *d, uint64_t ticket, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->reach(d, ticket, err) : 0;
}

int hx_dev_fetch(hx_dev *d, const hx_fetch_args *a, hx_err *err)
{
    hx_assert(a->to->slots.n >= HX_AHEAD_SLOTS * a->to->record_bytes);
    if (d->ops->link != NULL)
        return d->ops->link->fetch(d, a, err);
    hx_lane_fetch(a);
    return 0;
}

int hx_dev_fetched(hx_dev *d, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->fetched(d, err) : 0;
}

int hx_dev_push_mark(hx_dev *d, uint64_t *ticket, hx_err *err)
{
    *ticket = 0;
    return d->ops->link != NULL ? d->ops->link->push_mark(d, ticket, err) : 0;
}

bool hx_dev_pushed(hx_dev *d, uint64_t ticket)
{
    return d->ops->link == NULL || d->ops->link->pushed(d, ticket);
}

int hx_dev_await_push(hx_dev *d, uint64_t ticket, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->await_push(d, ticket, err) : 0;
}

int hx_dev_hold_push(hx_dev *d, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->hold_push(d, err) : 0;
}

int hx_dev_side(hx_dev *d, bool side, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->side(d, side, err) : 0;
}

int hx_dev_join(hx_dev *d, hx_err *err)
{
    return d->ops->link != NULL ? d->ops->link->join(d, err) : 0;
}

int hx_dev_record(hx_dev *d, hx_err *err)
{
    return d->ops->link->record(d, err);
}

int hx_dev_record_end(hx_dev *d, hx_dev_graph **out, hx_err *err)
{
    return d->ops->link->record_end(d, out, err);
}

int hx_dev_replay(hx_dev *d, hx_dev_graph *g, hx_err *err)
{
    return d->ops->link->replay(d, g, err);
}

void hx_dev_graph_free(hx_dev *d, hx_dev_graph *g)
{
    if (g != NULL)
        d->ops->link->graph_free(g);
}
