/* graph.c - the layer walk and its workspace: embedding, layers in slices, output matrix.
 *
 * One graph serves calls of up to max_rows rows; the engine keeps two, for prefill and
 * for decode, so that decode steps can run between the slices of a prefill chunk. All
 * memory is taken at open. Called by the engine thread only. */
#include "model/model.h"

/* Rows whose index scores are computed together; bounds the score buffer. */
#define SCORE_ROWS 64
/* Of a synthetic model's picks, so many are predicted one layer before: published runs of
 * real models say 0.65 to 0.75. */
#define SYNTH_RECALL 0.7
#define DRAW_MAX     64 /* active experts of such a model */

struct hx_graph {
    hx_model *model;
    hx_dev *dev;
    hx_cache *cache;
    int64_t max_rows, max_out;
    hx_buf streams, x, y, post,
        comb;              /* f32 [R, S, D], [R, D], [R, D], [R, S], [R, S, S] */
    hx_buf id, span;       /* i32 [R]; hx_span [HX_SPAN_MAX] */
    hx_buf hidden, logits; /* f32 [n_out, D], [n_out, N] */
    hx_layer_call call;
    uint64_t bytes;
    const hx_batch *batch;           /* since begin */
    int64_t next;                    /* layer that comes next */
    hx_dev_graph *step[HX_SPAN_MAX]; /* recorded decode steps, by rows - 1 */
    bool ran[HX_SPAN_MAX];           /* once as it is: what comes up at first is there */
    hx_buf drawn;                    /* see hx_layer_call */
    int32_t *draw;                   /* [2, n_layer, R, A] the same on the host */
};

/* Widths, in floats per row, of the workspace's scratch buffers: what layers.c puts there. */
typedef struct {
    int64_t a, b, c, e;
} widths;

static widths wide_floats(const hx_desc *d)
{
    const int64_t hk = d->kda_heads * d->kda_width, hz = d->mla_heads * d->latent,
                  mlp = HX_MAX(d->dense_width, d->shared_width);

    return (widths) {
        .a = HX_MAX(HX_MAX(3 * hk, mlp), d->mla_heads * HX_MAX(d->k_width, d->v_width)),
        .b = HX_MAX(HX_MAX(3 * hk, mlp), hz),
        .c = HX_MAX(hk, hz),
        .e = HX_MAX(HX_MAX(hk, d->index_heads * d->index_width), d->n_active * d->width),
    };
}

static int64_t narrow_floats(const hx_desc *d)
{
    const int64_t mla = d->q_rank + d->latent + 2 * d->index_width + d->index_heads;
    const int64_t kda = d->kda_width + d->kda_heads;

    return HX_MAX(mla, kda);
}

uint64_t hx_graph_row_bytes(const hx_desc *d)
{
    const int64_t mixes = d->streams * (2 + d->streams),
                  kda = d->kda_heads * d->kda_width;
    const widths w = wide_floats(d);

    return sizeof(float) *
           (uint64_t)((d->streams + 2) * d->width + w.a + w.b + w.c + w.e + kda +
                      narrow_floats(d) + 2 * d->n_active + d->n_expert + mixes);
}

static int take(hx_graph *g, hx_buf *b, int64_t rows, int64_t floats, hx_err *err)
{
    const size_t bytes = (size_t)rows * (size_t)floats * sizeof(float);

    g->bytes += bytes;
    return hx_dev_alloc(g->dev, b, HX_MAX(bytes, 64), err);
}

static int take_all(hx_graph *g, int64_t max_ctx, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const int64_t r = g->max_rows, s = d->streams;
    const widths w = wide_floats(d);
    hx_layer_call *c = &g->call;

    c->score_rows = HX_MIN(r, SCORE_ROWS);
    c->ld_score = (max_ctx + d->pool_n - 1) / d->pool_n;
    const struct {
        hx_buf *b;
        int64_t rows, floats;
    } want[] = {
        { &g->streams, r, s * d->width },
        { &g->x, r, d->width },
        { &g->y, r, d->width },
        { &g->post, r, s },
        { &g->comb, r, s * s },
        { &g->id, r, 1 },
        { &g->span, HX_SPAN_MAX, sizeof(hx_span) / sizeof(float) },
        { &g->hidden, g->max_out, d->width },
        { &g->logits, g->max_out, d->n_vocab },
        { &c->a, r, w.a },
        { &c->b, r, w.b },
        { &c->c, r, w.c },
        { &c->e, r, w.e },
        { &c->g, r, d->kda_heads * d->kda_width },
        { &c->small, r, narrow_floats(d) },
        { &c->route_id, r, d->n_active },
        { &c->route_w, r, d->n_active },
        { &c->route_score, r, d->n_expert },
        { &c->score, c->score_rows, c->ld_score },
        { &c->pick, c->score_rows, d->index_topk },
        { &c->n_pick, c->score_rows, 1 },
    };

    for (size_t i = 0; i < HX_LEN(want); i++) {
        const int rc = take(g, want[i].b, want[i].rows, want[i].floats, err);

        if (rc != 0)
            return rc;
    }
    c->part = c->e; /* experts run when attention is done with it */
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

/* Picks of a synthetic model's decode rows, each row's by itself, from its slot and
 * position; and what the router of the layer before would make of them: each is right with
 * a chance of SYNTH_RECALL, else one that is not picked, drawn like the picks. */
static void draw_row(hx_graph *g, int64_t l, const hx_span *s, int32_t r, int32_t *pick,
                     int32_t *predicted)
{
    const hx_desc *d = &g->model->desc;
    const int64_t a = d->n_active, n = HX_MIN(2 * a, d->n_expert);
    const uint64_t seed = (uint64_t)(l * 1000 + s->slot), at = (uint64_t)(s->pos0 + r)
                                                               << 16;
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

                draw_row(g, l, s, r, g->draw + at, g->draw + d->n_layer * rows * a + at);
            }
        }
    g->call.drawn = g->drawn;
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
    if ((rc = take_all(g, max_ctx, err)) != 0 ||
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
    hx_layer_call *c = &g->call;
    hx_buf *all[] = { &g->streams,  &g->x,       &g->y,           &g->post,   &g->comb,
                      &g->id,       &g->span,    &g->hidden,      &g->logits, &c->a,
                      &c->b,        &c->c,       &c->e,           &c->g,      &c->small,
                      &c->route_id, &c->route_w, &c->route_score, &c->score,  &c->pick,
                      &c->n_pick };

    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_dev_free(g->dev, all[i]);
    for (size_t i = 0; i < HX_LEN(g->step); i++)
        hx_dev_graph_free(g->dev, g->step[i]);
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
    g->call.tap = fn;
    g->call.tap_ud = ud;
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
    const hx_desc *d = &g->model->desc;
    const size_t n_id = (size_t)b->rows.n_row, n_span = (size_t)b->rows.n_span;
    hx_layer_call *c = &g->call;
    int rc;

    if (b->rows.n_span > HX_SPAN_MAX)
        return hx_fail(err, HX_EARG, "graph: %d spans, at most %d", b->rows.n_span,
                       HX_SPAN_MAX);
    if (b->rows.n_row < 1 || b->rows.n_row > g->max_rows)
        return hx_fail(err, HX_EARG, "graph: %lld rows, expected 1..%lld",
                       (long long)b->rows.n_row, (long long)g->max_rows);
    g->batch = b;
    g->next = next;
    c->dev = g->dev;
    c->d = d;
    c->store = g->model->store;
    c->phase = b->phase;
    c->uniform = !hx_dev_is_host(g->dev) && b->phase == HX_PHASE_DECODE;
    c->rows = b->rows;
    c->snap = b->snap;
    c->n_snap = b->n_snap;
    c->rows.dev = g->span;
    c->x = g->x;
    c->y = g->y;
    c->drawn = (hx_buf) { 0 };
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

/* Collapses the streams to the sub-layer's normalised input x. */
static int site_open(hx_graph *g, const hx_hc *hc, hx_buf norm, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const int64_t rows = g->batch->rows.n_row;
    const hx_hc_mix_args mix = { .x = g->x,
                                 .post = g->post,
                                 .comb = g->comb,
                                 .streams = g->streams,
                                 .base = hc->base,
                                 .scale = hc->scale,
                                 .fn = hc->fn.w != NULL ? &hc->fn : NULL,
                                 .rows = rows,
                                 .streams_n = d->streams,
                                 .dim = d->width,
                                 .norm_eps = d->norm_eps,
                                 .eps = d->hc_eps,
                                 .iters = d->hc_iters };
    const hx_rmsnorm_args rms = { .y = g->x,
                                  .x = g->x,
                                  .w = norm,
                                  .rows = rows,
                                  .dim = d->width,
                                  .ldx = d->width,
                                  .ldy = d->width,
                                  .eps = d->norm_eps };
    const int rc = hx_op_hc_mix(g->dev, &mix, err);

    return rc != 0 ? rc : hx_op_rmsnorm(g->dev, &rms, err);
}

/* Spreads the sub-layer's output y over the streams. */
static int site_close(hx_graph *g, hx_err *err)
{
    const hx_desc *d = &g->model->desc;
    const hx_hc_merge_args merge = { .streams = g->streams,
                                     .y = g->y,
                                     .post = g->post,
                                     .comb = g->comb,
                                     .rows = g->batch->rows.n_row,
                                     .streams_n = d->streams,
                                     .dim = d->width };

    return hx_op_hc_merge(g->dev, &merge, err);
}

static void tap(const hx_graph *g, const char *what, hx_buf data)
{
    const hx_layer_call *c = &g->call;

    if (c->tap != NULL)
        c->tap(c->tap_ud, c->layer, what, data, c->rows.n_row);
}

static int one_layer(hx_graph *g, int64_t l, hx_err *err)
{
    const hx_layer *w = &g->model->layer[l];
    hx_layer_mem *mem = &g->cache->mem[l];
    hx_layer_call *c = &g->call;
    int rc;

    c->layer = l;
    if ((rc = site_open(g, &w->hc_attn, w->norm_attn, err)) != 0)
        return rc;
    rc = w->mixer == HX_MIX_KDA ? hx_layers_kda(c, &w->kda, mem, err)
                                : hx_layers_mla(c, &w->mla, mem, err);
    if (rc != 0)
        return rc;
    tap(g, "attn_out", g->y);
    if ((rc = site_close(g, err)) != 0 ||
        (rc = site_open(g, &w->hc_ffn, w->norm_ffn, err)) != 0)
        return rc;
    tap(g, "mlp_in", g->x);
    rc = w->ffn == HX_FFN_DENSE ? hx_layers_dense(c, &w->dense, g->y, err)
                                : hx_layers_moe(c, w, err);
    if (rc != 0)
        return rc;
    tap(g, "mlp_out", g->y);
    if ((rc = site_close(g, err)) != 0)
        return rc;
    tap(g, "streams", g->streams);
    return 0;
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
    return 0;
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
    const hx_matmul_args head = { .y = g->logits,
                                  .x = g->hidden,
                                  .w = &g->model->head,
                                  .rows = n,
                                  .ldx = d->width,
                                  .ldy = d->n_vocab };

    if ((rc = hx_op_hc_mean(g->dev, &mean, err)) != 0 ||
        (rc = hx_op_rmsnorm(g->dev, &rms, err)) != 0)
        return rc;
    return hx_op_matmul(g->dev, &head, err);
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
    if (hx_dev_is_host(g->dev) || g->call.tap != NULL ||
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
    const hx_desc *d = &g->model->desc;
    const hx_matmul_args head = { .y = g->logits,
                                  .x = g->hidden,
                                  .w = &g->model->head,
                                  .rows = 1,
                                  .ldx = d->width,
                                  .ldy = d->n_vocab };
    const int rc =
        hx_dev_put(g->dev, g->hidden, hidden, (size_t)d->width * sizeof *hidden, err);

    return rc != 0 ? rc : hx_op_matmul(g->dev, &head, err);
}
