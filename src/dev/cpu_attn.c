/* cpu_attn.c - the CPU operations that read and write sequence memory: short convolution,
 * gated delta rule, latents and pooled index keys, index scores, latent attention.
 *
 * Called through hx_cpu_ops once ops.c has checked the arguments. Allocates nothing. A
 * row's sums follow its own position only; how rows, heads or positions are shared out to
 * threads never changes a bit. */
#include <math.h>

#include "dev/cpu_kern.h"
#include "dev/fmt_page.h"

enum { WORK_FLOATS = HX_KERN_WORKER_BYTES / sizeof(float) };

/* ---- short convolution ----------------------------------------------- */

enum { CONV_COLS = 256, MAX_TAPS = 8 };

/* Per worker: the taps of a block of channels, and what lies before a span's first row.
 */
typedef struct {
    float w[MAX_TAPS][CONV_COLS];
    float past[MAX_TAPS - 1 + HX_PEND_MAX][CONV_COLS];
} conv_work;

/* One span, n channels from c0 on. */
static void conv_span(const hx_kern *v, const hx_conv_short_args *a, const hx_span *s,
                      int64_t c0, int64_t n, conv_work *k)
{
    const int64_t ch = a->channels, back = a->taps - 1, n_past = back + s->commit;
    const size_t bytes = (size_t)n * sizeof(float);
    float *state = (float *)a->state.p + s->slot * back * ch + c0;
    float *pend = (float *)a->pend.p + (int64_t)s->slot * HX_PEND_MAX * ch + c0;
    const float *u = (const float *)a->u.p + s->row0 * ch + c0, *tap[MAX_TAPS];
    float *y = (float *)a->y.p + s->row0 * ch + c0;

    for (int64_t i = 0; i < back; i++)
        if (s->pos0 == 0)
            memset(k->past[i], 0, bytes);
        else
            memcpy(k->past[i], state + i * ch, bytes);
    for (int64_t i = 0; i < s->commit; i++)
        memcpy(k->past[back + i], pend + i * ch, bytes);
    for (int64_t t = 0; t < s->n_row; t++) {
        for (int64_t j = 0; j < a->taps; j++) {
            const int64_t at = t - back + j;

            tap[j] = at < 0 ? k->past[n_past + at] : u + at * ch;
        }
        v->conv(y + t * ch, tap, k->w[0], CONV_COLS, a->taps, n);
        if (a->hold)
            memcpy(pend + t * ch, u + t * ch, bytes);
    }
    for (int64_t i = 0; i < back; i++) {
        const int64_t at = (a->hold ? 0 : s->n_row) - back + i;

        memcpy(state + i * ch, at < 0 ? k->past[n_past + at] : u + at * ch, bytes);
    }
}

static void conv_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_conv_short_args *a = c->args;
    conv_work *k = hx_cpu_work(c->dev, worker);

    for (int64_t b = begin; b < end; b++) {
        const int64_t c0 = b * CONV_COLS, n = HX_MIN(CONV_COLS, a->channels - c0);

        c->v->taps(k->w[0], CONV_COLS, (const float *)a->w.p + c0 * a->taps, a->taps, n);
        for (int32_t i = 0; i < a->rows.n_span; i++)
            conv_span(c->v, a, &a->rows.span[i], c0, n, k);
    }
}

int hx_cpu_conv_short(hx_dev *d, const hx_conv_short_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, conv_part, a, (a->channels + CONV_COLS - 1) / CONV_COLS,
                      16 * (a->rows.n_row + a->rows.n_span) * CONV_COLS);
}

/* ---- KDA ------------------------------------------------------------- */

static void kda_gate_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_kda_gate_args *a = c->args;
    const float *dt = a->dt_bias.p;

    (void)worker;
    for (int64_t h = 0; h < a->heads; h++) {
        const float rate = (float)exp((double)((const float *)a->a_log.p)[h]);

        for (int64_t r = begin; r < end; r++) {
            const int64_t at = (r * a->heads + h) * a->width;

            c->v->gate((float *)a->g.p + at, (const float *)a->f.p + at,
                       dt + h * a->width, rate, a->bound, a->width);
        }
    }
    c->v->gate((float *)a->beta.p + begin * a->heads,
               (const float *)a->b.p + begin * a->heads, NULL, 1, 1,
               (end - begin) * a->heads);
}

int hx_cpu_kda_gate(hx_dev *d, const hx_kda_gate_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, kda_gate_part, a, a->rows, 8 * a->heads * a->width);
}

static void kda_out_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_kda_out_args *a = c->args;

    (void)worker;
    for (int64_t i = begin * a->heads; i < end * a->heads; i++) {
        const int64_t at = i * a->width;
        const float *o = (const float *)a->o.p + at;
        const double ms = c->v->dot(o, o, a->width) / (double)a->width;

        c->v->gated((float *)a->y.p + at, o, (float)(1 / sqrt(ms + (double)a->eps)),
                    a->w.p, (const float *)a->z.p + at, a->width);
    }
}

int hx_cpu_kda_out(hx_dev *d, const hx_kda_out_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, kda_out_part, a, a->rows, 8 * a->heads * a->width);
}

/* The state of one head is walked in blocks of HX_KERN_COLS columns, which stay in the
 * first cache; a row's update and its successor's reads share one pass
 * (hx_kern.kda_pass). So the plain recurrence costs 4 fused operations per state element
 * and row, no more than the chunked form with blocks of 64 (69 thousand per row of a 128
 * x 128 head against 66 thousand), in registers, without its range problems: decode and
 * prefill run the same text. */
enum {
    KDA_BATCH = 32, /* rows prepared together; a decode call has at most 2 HX_PEND_MAX */
    KDA_ROW = 5     /* arrays of width floats that a prepared row needs */
};

typedef struct {
    const hx_cpu_call *c;
    const hx_kda_step_args *a;
    float *state; /* [width, width] of this slot and head */
    float *cols;  /* [width, HX_KERN_COLS] */
    float *room;  /* [batch, KDA_ROW, width] */
    hx_kern_kda row[KDA_BATCH];
    int64_t n_row;
} kda_head;

static float *kda_room(const kda_head *k, int64_t row, int which)
{
    return k->room + (row * KDA_ROW + which) * k->a->width;
}

/* Adds a pending row to the batch; rec is copied, because new rows take its place. */
static void kda_add_pending(kda_head *k, const float *rec)
{
    const int64_t n = k->a->width, i = k->n_row++;
    float *kr = kda_room(k, i, 0), *vr = kda_room(k, i, 1);
    float *decay = kda_room(k, i, 2), *dk = kda_room(k, i, 3);

    memcpy(kr, rec, (size_t)n * sizeof(float));
    memcpy(vr, rec + n, (size_t)n * sizeof(float));
    k->c->v->kda_terms(decay, dk, NULL, rec + 2 * n, kr, NULL, n);
    k->row[i] =
        (hx_kern_kda) { .k = kr, .v = vr, .decay = decay, .dk = dk, .beta = rec[3 * n] };
}

/* Adds row r of the call. */
static void kda_add_row(kda_head *k, int64_t r, int64_t h)
{
    const hx_kda_step_args *a = k->a;
    const hx_kern *v = k->c->v;
    const int64_t n = a->width, in = r * a->ld + h * n, at = (r * a->heads + h) * n,
                  i = k->n_row++;
    const float *q = (const float *)a->q.p + in, *kr = (const float *)a->k.p + in;
    float *kn = kda_room(k, i, 0), *decay = kda_room(k, i, 2), *dk = kda_room(k, i, 3);
    float *dq = kda_room(k, i, 4);

    v->norm(kn, kr, 0, (float)(1 / sqrt(v->dot(kr, kr, n) + 1e-6)), NULL, NULL, n);
    v->norm(dq, q, 0, (float)(1 / sqrt((v->dot(q, q, n) + 1e-6) * (double)n)), NULL, NULL,
            n);
    const float kq = (float)v->dot(kn, dq, n);
    v->kda_terms(decay, dk, dq, (const float *)a->g.p + at, kn, dq, n);
    k->row[i] = (hx_kern_kda) {
        .k = kn,
        .v = (const float *)a->v.p + in,
        .decay = decay,
        .dk = dk,
        .dq = dq,
        .beta = ((const float *)a->beta.p)[r * a->heads + h],
        .kq = kq,
        .o = (float *)a->o.p + at,
    };
}

/* Copies n columns between rows ld_to and ld_from floats apart. */
static void copy_cols(float *to, int64_t ld_to, const float *from, int64_t ld_from,
                      int64_t rows, int64_t n)
{
    for (int64_t d = 0; d < rows; d++)
        memcpy(to + d * ld_to, from + d * ld_from, (size_t)n * sizeof(float));
}

/* Runs the batch; the state moves past its first keep rows. */
static void kda_run(kda_head *k, int64_t keep)
{
    const int64_t n = k->a->width, last = k->n_row - 1;
    float w[HX_KERN_COLS];

    for (int64_t j0 = 0; j0 < n && last >= 0; j0 += HX_KERN_COLS) {
        const bool whole = j0 + HX_KERN_COLS <= n;
        const float *src = k->state + j0;
        int64_t lds = n;

        if (!whole) { /* the rest of a width that no block divides: all in cols */
            memset(k->cols, 0, (size_t)(n * HX_KERN_COLS) * sizeof(float));
            copy_cols(k->cols, HX_KERN_COLS, src, n, n, n - j0);
            src = k->cols;
            lds = HX_KERN_COLS;
        }
        k->c->v->kda_pass(src, lds, NULL, 0, n, j0, NULL, &k->row[0], w);
        for (int64_t i = 0; i < HX_MAX(keep, last); i++) {
            const bool home = whole && i == keep - 1;
            float *dst = home ? k->state + j0 : k->cols;
            const int64_t ldd = home ? n : HX_KERN_COLS;

            k->c->v->kda_pass(src, lds, dst, ldd, n, j0, &k->row[i],
                              i < last ? &k->row[i + 1] : NULL, w);
            if (!whole && i == keep - 1)
                copy_cols(k->state + j0, n, dst, ldd, n, n - j0);
            src = dst;
            lds = ldd;
        }
    }
    k->n_row = 0;
}

/* Keeps the span's rows, which begin at row first of the batch, as pending rows. */
static void kda_hold(const kda_head *k, const hx_span *s, int64_t h, int64_t first)
{
    const hx_kda_step_args *a = k->a;
    const int64_t n = a->width;
    const size_t bytes = (size_t)n * sizeof(float);

    for (int64_t t = 0; t < s->n_row; t++) {
        const hx_kern_kda *row = &k->row[first + t];
        float *rec = (float *)a->pend.p +
                     (((int64_t)s->slot * HX_PEND_MAX + t) * a->heads + h) * (3 * n + 1);

        memcpy(rec, row->k, bytes);
        memcpy(rec + n, row->v, bytes);
        memcpy(rec + 2 * n, (const float *)a->g.p + ((s->row0 + t) * a->heads + h) * n,
               bytes);
        rec[3 * n] = row->beta;
    }
}

static void kda_begin(kda_head *k, const hx_span *s, int64_t h)
{
    const hx_kda_step_args *a = k->a;
    const int64_t n = a->width;
    const float *pend = (const float *)a->pend.p;

    k->state = (float *)a->state.p + (s->slot * a->heads + h) * n * n;
    k->n_row = 0;
    if (s->pos0 == 0)
        memset(k->state, 0, (size_t)(n * n) * sizeof(float));
    for (int64_t i = 0; i < s->commit; i++)
        kda_add_pending(k, pend + (((int64_t)s->slot * HX_PEND_MAX + i) * a->heads + h) *
                                      (3 * n + 1));
}

static kda_head kda_open(const hx_cpu_call *c, int worker)
{
    const hx_kda_step_args *a = c->args;
    float *work = hx_cpu_work(c->dev, worker);

    return (kda_head) {
        .c = c, .a = a, .cols = work, .room = work + a->width * HX_KERN_COLS
    };
}

static void kda_step_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    kda_head k = kda_open(c, worker);

    for (int64_t i = begin; i < end; i++) {
        const hx_span *s = &k.a->rows.span[i / k.a->heads];
        const int64_t h = i % k.a->heads;

        kda_begin(&k, s, h);
        for (int64_t t = 0; t < s->n_row; t++)
            kda_add_row(&k, s->row0 + t, h);
        kda_hold(&k, s, h, s->commit);
        kda_run(&k, s->commit);
    }
}

static void kda_chunk_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    kda_head k = kda_open(c, worker);
    const int64_t fit =
        (WORK_FLOATS - k.a->width * HX_KERN_COLS) / (KDA_ROW * k.a->width);
    const int64_t batch = HX_MIN(KDA_BATCH, fit);

    for (int64_t i = begin; i < end; i++) {
        const hx_span *s = &k.a->rows.span[i / k.a->heads];
        const int64_t h = i % k.a->heads;

        kda_begin(&k, s, h);
        for (int64_t t = 0; t < s->n_row; t++) {
            if (k.n_row == batch)
                kda_run(&k, batch);
            kda_add_row(&k, s->row0 + t, h);
        }
        kda_run(&k, k.n_row);
    }
}

static int kda(hx_dev *d, hx_pool_fn *part, const hx_kda_step_args *a, hx_err *err)
{
    const hx_kda_gate_args gate = hx_kda_step_gate(a);
    const int64_t spans = HX_MAX(a->rows.n_span, 1),
                  need = HX_KERN_COLS + 2 * HX_PEND_MAX * KDA_ROW;
    int rc;

    if (a->width > WORK_FLOATS / need)
        return hx_fail(err, HX_EUNSUP,
                       "kda: heads of width %lld, the cpu backend takes up to %lld",
                       (long long)a->width, (long long)(WORK_FLOATS / need));
    if (a->a_log.p != NULL && (rc = hx_cpu_kda_gate(d, &gate, err)) != 0)
        return rc;
    return hx_cpu_run(d, part, a, a->rows.n_span * a->heads,
                      (3 + 4 * a->rows.n_row / spans) * a->width * a->width);
}

int hx_cpu_kda_step(hx_dev *d, const hx_kda_step_args *a, hx_err *err)
{
    return kda(d, kda_step_part, a, err);
}

int hx_cpu_kda_chunk(hx_dev *d, const hx_kda_chunk_args *a, hx_err *err)
{
    return kda(d, kda_chunk_part, a, err);
}

/* ---- paged memory ---------------------------------------------------- */

static void page_read(const hx_kern *v, const hx_pages *g, int32_t slot, int64_t i,
                      int64_t per, float *out)
{
    static const hx_fmt fmt[] = { [HX_CACHE_BF16] = HX_FMT_BF16,
                                  [HX_CACHE_F32] = HX_FMT_F32,
                                  [HX_CACHE_FP8] = HX_FMT_FP8 };
    const hx_page_item row = hx_page_row(g, slot, i, per);

    v->widen(out, row.v, fmt[g->fmt],
             g->fmt == HX_CACHE_FP8 ? hx_page_scale(*row.scale) : 1, g->width);
}

static void page_write(const hx_kern *v, const hx_pages *g, int32_t slot, int64_t i,
                       int64_t per, const float *in)
{
    const hx_page_item row = hx_page_row(g, slot, i, per);

    if (g->fmt == HX_CACHE_FP8)
        hx_page_put_fp8(row.v, row.scale, in, g->width);
    else if (g->fmt == HX_CACHE_F32)
        memcpy(row.v, in, (size_t)g->width * sizeof(float));
    else
        v->narrow(row.v, in, g->width);
}

/* Floats between widened rows: whole vectors, and not a power of two, which would send
 * the same columns of all rows to the same sets of the first cache. */
static int64_t wide_ld(int64_t width)
{
    return (width + 15) / 16 * 16 + 16;
}

int hx_cpu_latent_append(hx_dev *d, const hx_latent_append_args *a, hx_err *err)
{
    const hx_kern *v = hx_cpu_kern(d);

    (void)err;
    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t t = 0; t < s->n_row; t++)
            page_write(v, &a->cache, s->slot, s->pos0 + t, HX_PAGE,
                       (const float *)a->c.p + (s->row0 + t) * a->ldc);
    return 0;
}

/* The pooled key of the pool whose last position is pos, from the ring. */
static void pool_key(const hx_kern *v, const hx_index_append_args *a, int32_t slot,
                     int64_t pos, float *out)
{
    const int64_t n = a->pool_n, width = a->pool.width;
    const float *ring = (const float *)a->ring.p + (int64_t)slot * HX_RING * 2 * width;
    const float *key[HX_PEND_MAX], *gate[HX_PEND_MAX];

    for (int64_t s = 0; s < n; s++) {
        key[s] = ring + (pos - n + 1 + s) % HX_RING * 2 * width;
        gate[s] = key[s] + width;
    }
    v->pool(out, key, gate, a->ape.p, n, width);
    page_write(v, &a->pool, slot, pos / n, HX_PAGE / n, out);
}

static void index_append_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_index_append_args *a = c->args;
    const int64_t width = a->pool.width;
    const size_t bytes = (size_t)width * sizeof(float);

    for (const hx_span *s = a->rows.span + begin; s < a->rows.span + end; s++)
        for (int64_t t = 0; t < s->n_row; t++) {
            const int64_t pos = s->pos0 + t, from = (s->row0 + t) * width;
            float *ring = (float *)a->ring.p +
                          (s->slot * (int64_t)HX_RING + pos % HX_RING) * 2 * width;

            memcpy(ring, (const float *)a->key.p + from, bytes);
            memcpy(ring + width, (const float *)a->gate.p + from, bytes);
            if ((pos + 1) % a->pool_n == 0)
                pool_key(c->v, a, s->slot, pos, hx_cpu_work(c->dev, worker));
        }
}

int hx_cpu_index_append(hx_dev *d, const hx_index_append_args *a, hx_err *err)
{
    if (a->pool.width > WORK_FLOATS)
        return hx_fail(err, HX_EUNSUP,
                       "index_append: keys of %lld are too wide for the cpu backend",
                       (long long)a->pool.width);
    return hx_cpu_run(d, index_append_part, a, a->rows.n_span,
                      8 * (a->rows.n_row / HX_MAX(a->rows.n_span, 1) + 1) *
                          a->pool.width);
}

/* ---- index scores ---------------------------------------------------- */

enum {
    KEYS = 64,        /* pooled keys, or latents, that are widened together */
    QUERIES = 64,     /* (row, head) pairs that share them, or the heads of one row */
    SCORE_POOLS = 256 /* pools of an item */
};

typedef struct {
    hx_cpu_call c;
    const hx_index_score_args *a;
    int64_t per, n_chunk; /* rows of a block; items of a block */
} score_call;

/* Pools p0 .. p1 - 1 for the rows of a block, as far as each sees them. */
static void score_block(const score_call *sc, const hx_cpu_rows *b, int64_t p0,
                        int64_t p1, float *work)
{
    const hx_index_score_args *a = sc->a;
    const hx_kern *v = sc->c.v;
    const int64_t h = a->heads, width = a->pool.width, ld = wide_ld(width),
                  row = b->span->row0 + b->t0;
    const float *q = (const float *)a->q.p + row * h * width,
                *w = (const float *)a->w.p + row * h;
    float *score = (float *)a->score.p + row * a->ld_score, *dots = work + KEYS * ld;
    const int64_t pos = b->span->pos0 + b->t0;

    p1 = HX_MIN(p1, (pos + b->n) / a->pool_n);
    for (; p0 < p1; p0 += KEYS) {
        const int64_t n = HX_MIN(KEYS, p1 - p0);

        for (int64_t i = 0; i < n; i++)
            page_read(v, &a->pool, b->span->slot, p0 + i, HX_PAGE / a->pool_n,
                      work + i * ld);
        v->dots(dots, KEYS, q, width, b->n * h, work, ld, n, width);
        for (int64_t t = 0; t < b->n; t++) {
            const int64_t seen = HX_MIN((pos + t + 1) / a->pool_n - p0, n);

            v->relu_mix(score + t * a->ld_score + p0, dots + t * h * KEYS, KEYS,
                        w + t * h, h, a->scale, a->w_scale, seen);
        }
    }
}

static void score_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const score_call *sc = ud;

    for (int64_t i = begin; i < end; i++) {
        const hx_cpu_rows b = hx_cpu_find_block(&sc->a->rows, sc->per, i / sc->n_chunk);
        const int64_t p0 = i % sc->n_chunk * SCORE_POOLS;

        score_block(sc, &b, p0, p0 + SCORE_POOLS, hx_cpu_work(sc->c.dev, worker));
    }
}

int hx_cpu_index_score(hx_dev *d, const hx_index_score_args *a, hx_err *err)
{
    score_call sc = { .c = { .dev = d, .v = hx_cpu_kern(d) },
                      .a = a,
                      .per = HX_MAX(QUERIES / a->heads, 1) };
    int64_t most = 0;

    if (KEYS * (wide_ld(a->pool.width) + sc.per * a->heads) > WORK_FLOATS)
        return hx_fail(err, HX_EUNSUP,
                       "index_score: %lld heads of %lld are too many for the cpu backend",
                       (long long)a->heads, (long long)a->pool.width);
    for (int32_t i = 0; i < a->rows.n_span; i++)
        most = HX_MAX(most, ((int64_t)a->rows.span[i].pos0 + a->rows.span[i].n_row) /
                                a->pool_n);
    sc.n_chunk = (most + SCORE_POOLS - 1) / SCORE_POOLS;
    hx_pool_run(d->pool, hx_cpu_count_blocks(&a->rows, sc.per) * sc.n_chunk, 1,
                score_part, &sc);
    return 0;
}

/* ---- attention over latents ------------------------------------------ */

typedef struct {
    hx_cpu_call c;
    const hx_mla_attend_args *a;
    int64_t per, heads, n_group; /* rows of a block, heads of an item, items of a block */
    int64_t keys;                /* latents of a block of positions */
} attend_call;

/* One item at work: rows times heads queries, row by row, against blocks of latents. */
typedef struct {
    int64_t rows, heads;
    const float *q;        /* [rows, heads, width] */
    float *z, *c;          /* likewise; latents [keys, wide_ld(width)] */
    int64_t seen[QUERIES]; /* positions of the block that each row attends */
    float top[QUERIES], keep[QUERIES];
    double mass[QUERIES];
    float p[QUERIES * KEYS];
} attend_work;

/* The positions that a row attends, in ascending order: pool_n of each pick, then the
 * tail. */
typedef struct {
    const int32_t *pick;
    int64_t n_picked, pool_n, tail0, n;
} position_list;

static position_list positions(const hx_mla_attend_args *a, int64_t row, int64_t pos)
{
    position_list l = { .n = pos + 1 };

    if (a->pick.p != NULL) {
        l.pick = (const int32_t *)a->pick.p + row * a->k_pick;
        l.pool_n = a->pool_n;
        l.n_picked = ((const int32_t *)a->n_pick.p)[row] * a->pool_n;
        l.tail0 = (pos + 1) / a->pool_n * a->pool_n;
        l.n = l.n_picked + (pos + 1 - l.tail0);
    }
    return l;
}

static int64_t position_at(const position_list *l, int64_t i)
{
    if (l->pick == NULL)
        return i;
    if (i < l->n_picked)
        return l->pick[i / l->pool_n] * l->pool_n + i % l->pool_n;
    return l->tail0 + (i - l->n_picked);
}

/* Softmax of one query over n scores of a block, relative to the largest score so far. */
static void soften_query(const hx_kern *v, attend_work *k, int64_t i, int64_t n,
                         float scale)
{
    const float before = k->top[i];
    const float sum = v->soften(k->p + i * KEYS, scale, &k->top[i], n);

    k->keep[i] = v->exp(before - k->top[i]);
    k->mass[i] = k->mass[i] * (double)k->keep[i] + (double)sum;
}

/* One block of n positions: neighbours that see as many of them go through together. */
static void attend_block(const attend_call *ac, attend_work *k, int64_t n, bool first)
{
    const hx_kern *v = ac->c.v;
    const int64_t width = ac->a->cache.width, ld = wide_ld(width), h = k->heads;

    v->dots(k->p, KEYS, k->q, width, k->rows * h, k->c, ld, n, width);
    for (int64_t t = 0, end; t < k->rows; t = end) {
        const int64_t seen = k->seen[t];

        for (end = t + 1; end < k->rows && k->seen[end] == seen;)
            end++;
        if (seen <= 0)
            continue;
        for (int64_t i = t * h; i < end * h; i++)
            soften_query(v, k, i, seen, ac->a->scale);
        v->blend(k->z + t * h * width, width, first ? NULL : k->keep + t * h,
                 k->p + t * h * KEYS, KEYS, (end - t) * h, k->c, ld, seen, width);
    }
}

/* Rows of a block and heads from h0 on: all heads when there are several rows. */
static void attend_item(const attend_call *ac, const hx_cpu_rows *b, int64_t h0,
                        attend_work *k)
{
    const hx_mla_attend_args *a = ac->a;
    const int64_t width = a->cache.width, ld = wide_ld(width),
                  row = b->span->row0 + b->t0;
    const int64_t from = (row * a->heads + h0) * width, pos = b->span->pos0 + b->t0;
    const position_list l = positions(a, row + b->n - 1, pos + b->n - 1);

    k->rows = b->n;
    k->heads = HX_MIN(ac->heads, a->heads - h0);
    k->q = (const float *)a->q.p + from;
    k->z = (float *)a->z.p + from;
    k->c = (float *)k + WORK_FLOATS - ac->keys * ld;
    for (int64_t i = 0; i < k->rows * k->heads; i++) {
        k->top[i] = -INFINITY;
        k->mass[i] = 0;
    }
    for (int64_t i0 = 0; i0 < l.n; i0 += ac->keys) {
        const int64_t n = HX_MIN(ac->keys, l.n - i0);

        for (int64_t i = 0; i < n; i++)
            page_read(ac->c.v, &a->cache, b->span->slot, position_at(&l, i0 + i), HX_PAGE,
                      k->c + i * ld);
        for (int64_t t = 0; t < k->rows; t++)
            k->seen[t] = HX_MIN(n, l.n - (k->rows - 1 - t) - i0);
        attend_block(ac, k, n, i0 == 0);
    }
    for (int64_t i = 0; i < k->rows * k->heads; i++)
        ac->c.v->norm(k->z + i * width, k->z + i * width, 0, (float)(1 / k->mass[i]),
                      NULL, NULL, width);
}

static void attend_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const attend_call *ac = ud;

    for (int64_t i = begin; i < end; i++) {
        const hx_cpu_rows b = hx_cpu_find_block(&ac->a->rows, ac->per, i / ac->n_group);

        attend_item(ac, &b, i % ac->n_group * ac->heads, hx_cpu_work(ac->c.dev, worker));
    }
}

int hx_cpu_mla_attend(hx_dev *d, const hx_mla_attend_args *a, hx_err *err)
{
    const int64_t room = WORK_FLOATS - (int64_t)(sizeof(attend_work) / sizeof(float)) - 1;
    attend_call ac = { .c = { .dev = d, .v = hx_cpu_kern(d) },
                       .a = a,
                       .heads = HX_MIN(a->heads, QUERIES),
                       .keys = HX_MIN(KEYS, room / wide_ld(a->cache.width)) };

    if (ac.keys < 1)
        return hx_fail(err, HX_EUNSUP,
                       "mla_attend: latents of %lld are too wide for the cpu backend",
                       (long long)a->cache.width);
    ac.per = a->pick.p != NULL ? 1 : HX_MAX(QUERIES / a->heads, 1);
    const int64_t blocks = hx_cpu_count_blocks(&a->rows, ac.per);

    /* With few rows the heads are shared out, in groups that still reuse a widened
     * latent. */
    while (ac.heads > 8 && blocks * (a->heads / ac.heads) < 2 * hx_pool_size(d->pool))
        ac.heads /= 2;
    ac.n_group = (a->heads + ac.heads - 1) / ac.heads;
    if (ac.n_group > 1)
        ac.per = 1;
    hx_pool_run(d->pool, hx_cpu_count_blocks(&a->rows, ac.per) * ac.n_group, 1,
                attend_part, &ac);
    return 0;
}
