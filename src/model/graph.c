/* graph.c - the layer walk and its workspace: embedding, layers in slices, output matrix.
 *
 * One graph serves calls of up to max_rows rows; the engine keeps two, for prefill and
 * for decode, so that decode steps can run between the slices of a prefill chunk. All
 * memory is taken at open; for longer calls the workspace may move to memory that somebody
 * lends. Called by the engine thread only.
 *
 * What a long call keeps of each row is its streams. All else a sub-layer needs while it
 * runs, and its rows go through it in windows: what they share (recurrent state, positions)
 * lies in sequence memory. */
#include "model/model.h"

#define ALIGN      256
#define SCORE_ROWS 64 /* whose index scores are computed together, at full context */
/* On a device with memory of its own: */
#define FULL_ROWS   256
#define SCORE_BYTES ((size_t)128 << 20)
/* Of a synthetic model's picks, so many are predicted one layer before: published runs of
 * real models say 0.65 to 0.75. */
#define SYNTH_RECALL 0.7
#define DRAW_MAX     64 /* active experts of such a model */

/* Kinds of sub-layers. */
enum { KDA, MLA, DENSE, MOE, N_KIND };

struct hx_graph {
    hx_model *model;
    hx_dev *dev;
    hx_cache *cache;
    int64_t max_rows, max_out, ld_score;
    int64_t room;               /* rows that the workspace holds now */
    hx_buf mem, area, score;    /* taken at open, for max_rows */
    hx_buf streams, id;         /* f32 [R, S, D]; i32 [R] */
    hx_buf span;                /* hx_span [HX_SPAN_MAX] */
    hx_buf hidden, logits;      /* f32 [n_out, D], [n_out, N] */
    hx_layer_call call[N_KIND]; /* their buffers share memory */
    int64_t window[N_KIND];     /* rows at a time */
    uint64_t bytes;
    const hx_batch *batch; /* since begin */
    hx_span part;          /* of the batch: the rows of a window */
    bool whole;            /* each kind takes all rows at once, in the same place */
    bool due;     /* y of the last sub-layer is still to be merged into the streams */
    int64_t next; /* layer that comes next */
    hx_dev_graph *step[HX_SPAN_MAX]; /* recorded decode steps, by rows - 1 */
    bool ran[HX_SPAN_MAX];           /* once as it is: what comes up at first is there */
    hx_buf drawn;                    /* see hx_layer_call */
    int32_t *draw;                   /* [2, n_layer, R, A] the same on the host */
};

/* ---- workspace --------------------------------------------------------------- */

/* Memory handed out in order; p NULL: only counted. */
typedef struct {
    char *p;
    size_t at;
} carver;

static hx_buf carve(carver *w, size_t bytes)
{
    const hx_buf b = { w->p != NULL ? w->p + w->at : NULL, bytes };

    w->at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return b;
}

/* Buffers of a kind of sub-layer for so many rows, as layers.c fills them. */
static void carve_call(carver *w, const hx_desc *d, int kind, int64_t rows,
                       hx_layer_call *c)
{
    const int64_t hk = d->kda_heads * d->kda_width, hz = d->mla_heads * d->latent,
                  heads = d->mla_heads * HX_MAX(d->k_width, d->v_width),
                  mla = d->q_rank + d->latent + 2 * d->index_width + d->index_heads;
    const struct {
        hx_buf *b;
        int64_t any, of[N_KIND]; /* floats of a row, whatever the kind, and by kind */
    } want[] = {
        { &c->x, d->width, { 0 } },
        { &c->y, d->width, { 0 } },
        { &c->post, d->streams, { 0 } },
        { &c->comb, d->streams * d->streams, { 0 } },
        { &c->a, 0, { 3 * hk, heads, d->dense_width, d->shared_width } },
        { &c->b, 0, { 3 * hk, hz, d->dense_width, d->shared_width } },
        { &c->c, 0, { hk, hz } },
        { &c->e, 0, { hk, d->index_heads * d->index_width } },
        { &c->g, 0, { hk } },
        { &c->small, 0, { 2 * d->kda_width + d->kda_heads, mla } },
        { &c->pick, 0, { [MLA] = d->index_topk } },
        { &c->n_pick, 0, { [MLA] = 1 } },
        { &c->part, 0, { [MOE] = d->n_active * d->width } },
        { &c->route_id, 0, { [MOE] = d->n_active } },
        { &c->route_w, 0, { [MOE] = d->n_active } },
        { &c->route_score, 0, { [MOE] = d->n_expert } },
    };

    for (size_t i = 0; i < HX_LEN(want); i++)
        *want[i].b = carve(w, (size_t)rows * sizeof(float) *
                                  (size_t)(want[i].any + want[i].of[kind]));
}

static size_t call_bytes(const hx_desc *d, int kind, int64_t rows)
{
    carver w = { 0 };
    hx_layer_call c;

    carve_call(&w, d, kind, rows, &c);
    return w.at;
}

/* Rows that every kind takes at once: a host's products have no room for more. */
static int64_t full_rows(const hx_graph *g, int64_t rows)
{
    return HX_MIN(rows, hx_dev_is_host(g->dev) ? g->max_rows : FULL_ROWS);
}

/* What all kinds share. */
static size_t area_bytes(const hx_graph *g, int64_t rows)
{
    const hx_desc *d = &g->model->desc;
    size_t bytes = 0;

    for (int k = 0; k < N_KIND; k++)
        bytes = HX_MAX(bytes, call_bytes(d, k, full_rows(g, rows)));
    return hx_dev_is_host(g->dev)
               ? bytes
               : HX_MAX(bytes, call_bytes(d, MOE, HX_MIN(rows, HX_MOE_ROWS)));
}

static size_t score_bytes(const hx_graph *g, int64_t rows)
{
    const size_t row = (size_t)g->ld_score * sizeof(float),
                 some = (size_t)HX_MIN(rows, SCORE_ROWS) * row;

    return full_rows(g, rows) == rows
               ? some
               : HX_MAX(some, HX_MIN((size_t)rows * row, SCORE_BYTES));
}

/* Rows of a call that a kind takes at a time: all, or as many as fit, in even parts. */
static int64_t window_of(const hx_graph *g, int kind, int64_t rows, size_t area)
{
    const hx_desc *d = &g->model->desc;
    const bool host = hx_dev_is_host(g->dev);
    const int64_t pages = host ? 0 : (int64_t)(area / call_bytes(d, kind, HX_PAGE)),
                  most = HX_MAX(pages * HX_PAGE, full_rows(g, rows));

    if (rows <= most || (!host && call_bytes(d, kind, rows) <= area))
        return rows; /* the last page may not be full */
    const int64_t n = (rows + most - 1) / most, each = (rows + n - 1) / n;
    return HX_MIN((each + HX_PAGE - 1) / HX_PAGE * HX_PAGE, most);
}

/* The workspace of calls of rows rows in w, but for what is large enough already. */
static void lay_out(hx_graph *g, carver *w, int64_t rows)
{
    const hx_desc *d = &g->model->desc;
    const size_t bytes = area_bytes(g, rows);
    hx_buf area = g->area, score = g->score;

    g->streams = carve(w, (size_t)(rows * d->streams * d->width) * sizeof(float));
    g->id = carve(w, (size_t)rows * sizeof(int32_t));
    if (bytes > area.n) {
        area = carve(w, bytes);
        score = carve(w, score_bytes(g, rows));
    }
    if (rows == g->max_rows) {
        g->area = area;
        g->score = score;
    }
    for (int k = 0; k < N_KIND; k++) {
        carver in = { area.p, 0 };

        g->window[k] = window_of(g, k, rows, bytes);
        carve_call(&in, d, k, g->window[k], &g->call[k]);
        g->call[k].score = score;
    }
    g->room = rows;
}

static size_t room_of(const hx_graph *g, int64_t rows)
{
    hx_graph copy = *g;
    carver w = { 0 };

    lay_out(&copy, &w, rows);
    return w.at;
}

uint64_t hx_graph_room(const hx_graph *g, int64_t rows)
{
    return rows <= g->max_rows ? 0 : room_of(g, rows);
}

void hx_graph_move(hx_graph *g, hx_buf mem, int64_t rows)
{
    carver w = { mem.p != NULL ? mem.p : g->mem.p, 0 };

    lay_out(g, &w, mem.p != NULL ? rows : g->max_rows);
}

static int take(hx_graph *g, hx_buf *b, size_t bytes, hx_err *err)
{
    g->bytes += bytes;
    return hx_dev_alloc(g->dev, b, HX_MAX(bytes, 64), err);
}

static int take_all(hx_graph *g, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const size_t out = (size_t)g->max_out * sizeof(float);
    int rc;

    if ((rc = take(g, &g->mem, room_of(g, g->max_rows), err)) != 0 ||
        (rc = take(g, &g->span, HX_SPAN_MAX * sizeof(hx_span), err)) != 0 ||
        (rc = take(g, &g->hidden, out * (size_t)d->width, err)) != 0 ||
        (rc = take(g, &g->logits, out * (size_t)d->n_vocab, err)) != 0)
        return rc;
    hx_graph_move(g, (hx_buf) { 0 }, 0);
    return 0;
}

static int take_drawn(hx_graph *g, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const int64_t n = 2 * d->n_layer * g->max_rows * d->n_active;

    hx_assert(d->n_active <= DRAW_MAX);
    if ((g->draw = hx_new(int32_t, n)) == NULL)
        return hx_fail(err, HX_ENOMEM, "graph: no memory for drawn picks");
    return hx_dev_alloc(g->dev, &g->drawn, (size_t)n * sizeof(int32_t), err);
}

/* Distinct experts of a layer by their shares; at: number of the first draw. */
static void draw_picks(const float *share, int64_t n_expert, int32_t *pick, int64_t n,
                       uint64_t seed, uint64_t at)
{
    for (int64_t i = 0; i < n;) {
        const double x = hx_rng_unit(seed, at++);
        int64_t lo = 0, hi = n_expert - 1;
        bool again = false;

        while (lo < hi) { /* the first whose sum exceeds x */
            const int64_t mid = (lo + hi) / 2;

            if ((double)share[mid] > x)
                hi = mid;
            else
                lo = mid + 1;
        }
        for (int64_t o = 0; o < i && !again; o++)
            again = pick[o] == lo;
        pick[i] = (int32_t)lo;
        i += !again;
    }
}

/* Picks of a synthetic model's decode row at a position; and what the router of the layer
 * before would make of them: each is right with a chance of SYNTH_RECALL, else one that is
 * not picked, drawn like the picks. */
static void draw_row(hx_graph *g, int64_t l, uint64_t draw, int32_t pos, int32_t *pick,
                     int32_t *predicted)
{
    const hx_desc *d = &g->model->desc;
    const int64_t a = d->n_active, n = HX_MIN(2 * a, d->n_expert);
    const uint64_t seed = hx_rng_at(draw, (uint64_t)l), at = (uint64_t)pos << 16;
    int32_t drawn[2 * DRAW_MAX];

    draw_picks(g->model->share + l * d->n_expert, d->n_expert, drawn, n, seed, at);
    memcpy(pick, drawn, (size_t)a * sizeof *pick);
    for (int64_t i = 0; i < a; i++) {
        const bool right =
            a + i >= n || hx_rng_unit(~seed, at + (uint64_t)i) < SYNTH_RECALL;

        predicted[i] = drawn[right ? i : a + i];
    }
}

static int draw_all(hx_graph *g, const hx_batch *b, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const int64_t rows = b->rows.n_row, a = d->n_active;

    for (int64_t l = 0; l < d->n_layer; l++)
        for (int32_t i = 0; i < b->rows.n_span && d->ffn[l] == HX_FFN_MOE; i++) {
            const hx_span *s = &b->rows.span[i];

            for (int32_t r = 0; r < s->n_row; r++) {
                const int64_t at = (l * rows + s->row0 + r) * a;

                draw_row(g, l, b->draw != NULL ? b->draw[i] : 0, s->pos0 + r,
                         g->draw + at, g->draw + d->n_layer * rows * a + at);
            }
        }
    g->call[MOE].drawn = g->drawn;
    return hx_dev_put(g->dev, g->drawn, g->draw,
                      (size_t)(2 * d->n_layer * rows * a) * sizeof(int32_t), err);
}

int hx_graph_open(hx_graph **out, hx_model *m, hx_dev *dev, hx_cache *c, int64_t max_rows,
                  int64_t max_out, int64_t max_ctx, hx_err *err)
{
    hx_graph *g;
    int rc;

    *out = NULL;
    if (max_rows < 1 || max_out < 1)
        return hx_fail(err, HX_EARG,
                       "graph: %lld rows, %lld logits rows; each must be at least 1",
                       (long long)max_rows, (long long)max_out);
    if ((g = hx_new(hx_graph, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "graph: no memory");
    g->model = m;
    g->dev = dev;
    g->cache = c;
    g->max_rows = max_rows;
    g->max_out = max_out;
    g->ld_score = (max_ctx + m->desc.pool_n - 1) / m->desc.pool_n;
    if ((rc = take_all(g, err)) != 0 ||
        (m->share != NULL && (rc = take_drawn(g, err)) != 0)) {
        hx_graph_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void hx_graph_close(hx_graph *g)
{
    if (g == NULL)
        return;
    for (size_t i = 0; i < HX_LEN(g->step); i++)
        hx_dev_graph_free(g->dev, g->step[i]);
    hx_dev_free(g->dev, &g->mem);
    hx_dev_free(g->dev, &g->span);
    hx_dev_free(g->dev, &g->hidden);
    hx_dev_free(g->dev, &g->logits);
    hx_dev_free(g->dev, &g->drawn);
    hx_free(g->draw);
    hx_free(g);
}

uint64_t hx_graph_bytes(const hx_graph *g)
{
    return g->bytes;
}

void hx_graph_tap(hx_graph *g, hx_tap_fn *fn, void *ud)
{
    for (int k = 0; k < N_KIND; k++) {
        g->call[k].tap = fn;
        g->call[k].tap_ud = ud;
    }
}

hx_buf hx_graph_logits(const hx_graph *g)
{
    return g->logits;
}

hx_buf hx_graph_hidden(const hx_graph *g)
{
    return g->hidden;
}

hx_buf hx_graph_streams(const hx_graph *g)
{
    return g->streams;
}

int hx_graph_resume(hx_graph *g, const hx_batch *b, int64_t next, hx_err *err)
{
    const size_t n_id = (size_t)b->rows.n_row, n_span = (size_t)b->rows.n_span;
    int rc;

    if (b->rows.n_span > HX_SPAN_MAX)
        return hx_fail(err, HX_EARG, "graph: %d spans, at most %d", b->rows.n_span,
                       HX_SPAN_MAX);
    if (b->rows.n_row < 1 || b->rows.n_row > g->room)
        return hx_fail(err, HX_EARG, "graph: %lld rows, expected 1..%lld",
                       (long long)b->rows.n_row, (long long)g->room);
    g->batch = b;
    g->next = next;
    g->whole = b->phase == HX_PHASE_DECODE;
    g->due = false;
    for (int k = 0; k < N_KIND; k++) {
        hx_layer_call *c = &g->call[k];

        hx_assert(b->rows.n_span == 1 ||
                  (b->rows.n_row <= g->window[k] && b->n_snap == 0));
        g->whole = g->whole && g->window[k] == g->room;
        c->dev = g->dev;
        c->d = &g->model->desc;
        c->store = g->model->store;
        c->phase = b->phase;
        c->uniform = !hx_dev_is_host(g->dev) && b->phase == HX_PHASE_DECODE;
        c->ld_score = g->ld_score;
        c->all_rows = b->rows.n_row;
        c->drawn = (hx_buf) { 0 };
    }
    if (g->draw != NULL && b->phase == HX_PHASE_DECODE && (rc = draw_all(g, b, err)) != 0)
        return rc;
    /* A call that failed may have left the device on its side. */
    if ((rc = hx_dev_side(g->dev, false, err)) != 0 ||
        (rc = b->ids.p != NULL
                  ? hx_dev_copy(g->dev, g->id, b->ids, n_id * sizeof *b->id, err)
                  : hx_dev_put(g->dev, g->id, b->id, n_id * sizeof *b->id, err)) != 0)
        return rc;
    return hx_dev_put(g->dev, g->span, b->rows.span, n_span * sizeof(hx_span), err);
}

static int embed_rows(hx_graph *g, hx_err *err)
{
    const hx_embed_args embed = { .y = g->streams,
                                  .id = g->id,
                                  .table = &g->model->embed,
                                  .rows = g->batch->rows.n_row,
                                  .streams = g->model->desc.streams };

    return hx_op_embed(g->dev, &embed, err);
}

int hx_graph_begin(hx_graph *g, const hx_batch *b, hx_err *err)
{
    const int rc = hx_graph_resume(g, b, 0, err);

    return rc != 0 ? rc : embed_rows(g, err);
}

/* Streams of a window that begins at row0. */
static hx_buf streams_at(const hx_graph *g, int64_t row0)
{
    const hx_desc *d = &g->model->desc;

    return hx_buf_at(g->streams, (size_t)(row0 * d->streams * d->width) * sizeof(float));
}

/* Spreads the sub-layer's output y over the streams. */
static int merge(hx_graph *g, const hx_layer_call *c, int64_t row0, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const hx_hc_merge_args a = { .streams = streams_at(g, row0),
                                 .y = c->y,
                                 .post = c->post,
                                 .comb = c->comb,
                                 .rows = c->rows.n_row,
                                 .streams_n = d->streams,
                                 .dim = d->width };

    g->due = false;
    return hx_op_hc_merge(g->dev, &a, err);
}

/* Collapses the streams, once they have what is due, to the sub-layer's normalised input
 * x. */
static int site_open(hx_graph *g, const hx_layer_call *c, int64_t row0, const hx_hc *hc,
                     hx_buf norm, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const hx_hc_mix_args mix = { .x = c->x,
                                 .post = c->post,
                                 .comb = c->comb,
                                 .streams = streams_at(g, row0),
                                 .base = hc->base,
                                 .scale = hc->scale,
                                 .fn = hc->fn.w != NULL ? &hc->fn : NULL,
                                 .rows = c->rows.n_row,
                                 .streams_n = d->streams,
                                 .dim = d->width,
                                 .norm_eps = d->norm_eps,
                                 .eps = d->hc_eps,
                                 .iters = d->hc_iters,
                                 .y = g->due ? c->y : (hx_buf) { 0 },
                                 .w = norm };

    g->due = false;
    return hx_op_hc_mix(g->dev, &mix, err);
}

/* The output of a sub-layer goes to the streams, or waits for the next to open. */
static int site_close(hx_graph *g, const hx_layer_call *c, int64_t row0, hx_err *err)
{
    g->due = g->whole;
    return g->due ? 0 : merge(g, c, row0, err);
}

static void tap(const hx_layer_call *c, const char *what, hx_buf data, int64_t rows)
{
    if (c->tap != NULL)
        c->tap(c->tap_ud, c->layer, what, data, rows);
}

/* The rows of the window at row0: at most n, and no further than to a row where the state is
 * kept. */
static void set_window(hx_graph *g, hx_layer_call *c, int64_t row0, int64_t n, bool snaps)
{
    const hx_batch *b = g->batch;
    int64_t end = HX_MIN(row0 + n, b->rows.n_row);

    c->keep = NULL;
    for (int32_t i = 0; snaps && i < b->n_snap; i++)
        if (b->snap[i].row > row0 && b->snap[i].row <= end) {
            end = b->snap[i].row;
            c->keep = b->snap[i].state;
        }
    c->last = end == b->rows.n_row;
    c->rows = b->rows;
    c->rows.dev = g->span;
    if (end - row0 == b->rows.n_row)
        return;
    g->part = b->rows.span[0];
    g->part.n_row = (int32_t)(end - row0);
    g->part.pos0 += (int32_t)row0;
    g->part.commit = row0 == 0 ? g->part.commit : 0;
    c->rows = (hx_rows) { .span = &g->part, .n_span = 1, .n_row = end - row0 };
}

static int mix_rows(hx_graph *g, int64_t l, hx_err *err)
{
    const hx_layer *w = &g->model->layer[l];
    const int kind = w->mixer == HX_MIX_KDA ? KDA : MLA;
    hx_layer_mem *mem = &g->cache->mem[l];
    hx_layer_call *c = &g->call[kind];
    int rc;

    c->layer = l;
    for (int64_t at = 0; at < g->batch->rows.n_row; at += c->rows.n_row) {
        set_window(g, c, at, g->window[kind], kind == KDA);
        if ((rc = site_open(g, c, at, &w->hc_attn, w->norm_attn, err)) != 0 ||
            (rc = kind == KDA ? hx_layers_kda(c, &w->kda, mem, err)
                              : hx_layers_mla(c, &w->mla, mem, err)) != 0)
            return rc;
        tap(c, "attn_out", c->y, c->rows.n_row);
        if ((rc = site_close(g, c, at, err)) != 0)
            return rc;
    }
    return 0;
}

static int ffn_kind(const hx_graph *g, int64_t l)
{
    return g->model->layer[l].ffn == HX_FFN_DENSE ? DENSE : MOE;
}

static int ffn_rows(hx_graph *g, int64_t l, hx_err *err)
{
    const hx_layer *w = &g->model->layer[l];
    const int kind = ffn_kind(g, l);
    hx_layer_call *c = &g->call[kind];
    int rc;

    c->layer = l;
    for (int64_t at = 0; at < g->batch->rows.n_row; at += c->rows.n_row) {
        set_window(g, c, at, g->window[kind], false);
        if ((rc = site_open(g, c, at, &w->hc_ffn, w->norm_ffn, err)) != 0)
            return rc;
        tap(c, "mlp_in", c->x, c->rows.n_row);
        if ((rc = kind == DENSE ? hx_layers_dense(c, &w->dense, c->y, err)
                                : hx_layers_moe(c, w, err)) != 0)
            return rc;
        tap(c, "mlp_out", c->y, c->rows.n_row);
        if ((rc = site_close(g, c, at, err)) != 0)
            return rc;
    }
    if (g->due && c->tap != NULL && (rc = merge(g, c, 0, err)) != 0)
        return rc;
    tap(c, "streams", g->streams, g->batch->rows.n_row);
    return 0;
}

static int one_layer(hx_graph *g, int64_t l, hx_err *err)
{
    const int rc = mix_rows(g, l, err);

    return rc != 0 ? rc : ffn_rows(g, l, err);
}

int hx_graph_layers(hx_graph *g, int64_t l0, int64_t l1, hx_err *err)
{
    hx_assert(g->batch != NULL && l0 == g->next && l1 <= g->model->desc.n_layer);
    for (int64_t l = l0; l < l1; l++) {
        const int rc = one_layer(g, l, err);

        if (rc != 0)
            return rc;
    }
    g->next = l1;
    return g->due ? merge(g, &g->call[ffn_kind(g, l1 - 1)], 0, err) : 0;
}

/* Of the first n hidden rows. */
static int logits_of(hx_graph *g, int64_t n, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const hx_matmul_args head = { .y = g->logits,
                                  .x = g->hidden,
                                  .w = &g->model->head,
                                  .rows = n,
                                  .ldx = d->width,
                                  .ldy = d->n_vocab };

    return hx_op_matmul(g->dev, &head, err);
}

int hx_graph_out(hx_graph *g, int64_t row0, int64_t n, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const size_t row_bytes = (size_t)(d->streams * d->width) * sizeof(float);
    int rc;

    hx_assert(g->batch != NULL && g->next == d->n_layer);
    hx_assert(row0 >= 0 && n >= 1 && n <= g->max_out && row0 + n <= g->batch->rows.n_row);
    const hx_hc_mean_args mean = { .y = g->hidden,
                                   .streams =
                                       hx_buf_at(g->streams, (size_t)row0 * row_bytes),
                                   .rows = n,
                                   .streams_n = d->streams,
                                   .dim = d->width };
    const hx_rmsnorm_args rms = { .y = g->hidden,
                                  .x = g->hidden,
                                  .w = g->model->norm,
                                  .rows = n,
                                  .dim = d->width,
                                  .ldx = d->width,
                                  .ldy = d->width,
                                  .eps = d->norm_eps };

    if ((rc = hx_op_hc_mean(g->dev, &mean, err)) != 0 ||
        (rc = hx_op_rmsnorm(g->dev, &rms, err)) != 0)
        return rc;
    return logits_of(g, n, err);
}

static int whole_step(hx_graph *g, hx_err *err)
{
    int rc = embed_rows(g, err);

    if (rc == 0)
        rc = hx_graph_layers(g, 0, g->model->desc.n_layer, err);
    return rc != 0 ? rc : hx_graph_out(g, 0, g->batch->rows.n_row, err);
}

int hx_graph_step(hx_graph *g, const hx_batch *b, hx_err *err)
{
    const int64_t at = b->rows.n_row - 1;
    hx_err why = { 0 };
    int rc = hx_graph_resume(g, b, 0, err), ended;

    hx_assert(b->phase == HX_PHASE_DECODE);
    if (rc != 0)
        return rc;
    if (hx_dev_is_host(g->dev) || g->call[MOE].tap != NULL || g->dev->times != NULL ||
        b->rows.n_span != b->rows.n_row || !g->ran[at]) {
        g->ran[at] = true;
        return whole_step(g, err);
    }
    if (g->step[at] == NULL) {
        if ((rc = hx_dev_record(g->dev, err)) != 0)
            return rc;
        rc = whole_step(g, err);
        ended = hx_dev_record_end(g->dev, &g->step[at], rc == 0 ? err : &why);
        if (rc != 0 || (rc = ended) != 0)
            return rc;
    }
    g->next = g->model->desc.n_layer;
    return hx_dev_replay(g->dev, g->step[at], err);
}

int hx_graph_head(hx_graph *g, const float *hidden, hx_err *err)
{
    const size_t bytes = (size_t)g->model->desc.width * sizeof *hidden;
    const int rc = hx_dev_put(g->dev, g->hidden, hidden, bytes, err);

    return rc != 0 ? rc : logits_of(g, 1, err);
}
