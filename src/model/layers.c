/* layers.c - the mathematics of each sub-layer as a list of operations: KDA, MLA with its
 * indexer, dense MLP, MoE. Called by graph.c with a workspace; owns no memory, allocates
 * nothing, knows no file and no request. Formulas: glm5_next.md 4 to 7. */
#include <math.h>

#include "model/model.h"

static hx_buf floats_at(hx_buf b, int64_t offset)
{
    return hx_buf_at(b, (size_t)offset * sizeof(float));
}

/* y = w x for all rows; beside: see hx_matmul_args. */
static hx_matmul_args product(const hx_layer_call *c, hx_buf y, int64_t ldy, hx_buf x,
                              int64_t ldx, const hx_mat *w, const hx_matmul_args *beside)
{
    return (hx_matmul_args) { .y = y,
                              .x = x,
                              .w = w,
                              .rows = c->rows.n_row,
                              .ldx = ldx,
                              .ldy = ldy,
                              .prefill = c->phase == HX_PHASE_PREFILL,
                              .beside = beside };
}

static int linear(const hx_layer_call *c, hx_buf y, int64_t ldy, hx_buf x, int64_t ldx,
                  const hx_mat *w, hx_err *err)
{
    const hx_matmul_args a = product(c, y, ldy, x, ldx, w, NULL);

    return hx_op_matmul(c->dev, &a, err);
}

/* Decode rows leave most of a device idle: what does not depend on each other runs side by
 * side. The order of the calls is one in which they can also run one after the other. */
static int fork_side(const hx_layer_call *c, hx_err *err)
{
    return c->phase == HX_PHASE_DECODE ? hx_dev_side(c->dev, true, err) : 0;
}

static int end_side(const hx_layer_call *c, hx_err *err)
{
    return c->phase == HX_PHASE_DECODE ? hx_dev_side(c->dev, false, err) : 0;
}

static int join_side(const hx_layer_call *c, hx_err *err)
{
    return c->phase == HX_PHASE_DECODE ? hx_dev_join(c->dev, err) : 0;
}

/* The first rows of data, ld values of 4 bytes each. */
static void tap(const hx_layer_call *c, const char *what, hx_buf data, int64_t ld,
                int64_t rows)
{
    data.n = (size_t)(rows * ld) * 4;
    if (c->tap != NULL)
        c->tap(c->tap_ud, c->layer, what, data, rows);
}

/* ---- KDA ------------------------------------------------------------- */

/* Copies n bytes of the slot's state, of which each slot has n in all, to where they lie in
 * the state that is kept. */
static int keep_state(const hx_layer_call *c, hx_buf all, size_t n, size_t at,
                      hx_err *err)
{
    if (c->keep == NULL)
        return 0;
    return hx_dev_get(c->dev, c->keep + at,
                      hx_buf_at(all, (size_t)c->rows.span[0].slot * n), n, err);
}

/* q, k and v after convolution and SiLU: c->b f32 [R, 3 H K]. */
static int kda_qkv(const hx_layer_call *c, const hx_kda *w, hx_layer_mem *mem,
                   hx_err *err)
{
    const int64_t wide = 3 * c->d->kda_heads * c->d->kda_width;
    int64_t at = 0;
    int rc;

    for (int32_t i = 0; i < w->n_qkv; i++) {
        if ((rc = linear(c, floats_at(c->a, at), wide, c->x, c->d->width, &w->qkv[i],
                         err)) != 0)
            return rc;
        at += w->qkv[i].n;
    }
    const hx_conv_short_args conv = {
        .y = c->b,
        .u = c->a,
        .w = w->conv,
        .state = mem->conv_state,
        .pend = mem->conv_pend,
        .rows = c->rows,
        .channels = wide,
        .taps = c->d->conv_taps,
        .hold = c->phase == HX_PHASE_DECODE,
    };
    if ((rc = hx_op_conv_short(c->dev, &conv, err)) != 0)
        return rc;
    return keep_state(c, mem->conv_state, mem->conv_bytes, mem->state_at + mem->kda_bytes,
                      err);
}

/* What log-decay, step size and output gate are made of: c->g f32 [R, H, K], beta f32
 * [R, H], c->c f32 [R, H K]. */
static int kda_gates(const hx_layer_call *c, const hx_kda *w, hx_buf beta, hx_err *err)
{
    const int64_t d = c->d->width, wide = c->d->kda_heads * c->d->kda_width;
    const hx_buf f = c->small, z = floats_at(f, c->rows.n_row * w->f_a.n);
    const hx_matmul_args b = product(c, beta, c->d->kda_heads, c->x, d, &w->b, NULL),
                         g_a = product(c, z, w->g_a.n, c->x, d, &w->g_a, &b),
                         f_a = product(c, f, w->f_a.n, c->x, d, &w->f_a, &g_a),
                         g_b = product(c, c->c, wide, z, w->g_a.n, &w->g_b, NULL),
                         f_b = product(c, c->g, wide, f, w->f_a.n, &w->f_b, &g_b);
    int rc;

    if ((rc = fork_side(c, err)) != 0 || (rc = hx_op_matmul(c->dev, &f_a, err)) != 0 ||
        (rc = hx_op_matmul(c->dev, &f_b, err)) != 0)
        return rc;
    return end_side(c, err);
}

/* Gates and the gated delta rule: c->e f32 [R, H K]. */
static int kda_delta(const hx_layer_call *c, const hx_kda *w, hx_layer_mem *mem,
                     hx_buf beta, hx_err *err)
{
    const int64_t h = c->d->kda_heads, k = c->d->kda_width, hk = h * k;
    const hx_kda_step_args delta = {
        .o = c->e,
        .q = c->b,
        .k = floats_at(c->b, hk),
        .v = floats_at(c->b, 2 * hk),
        .g = c->g,
        .beta = beta,
        .state = mem->kda_state,
        .pend = mem->kda_pend,
        .rows = c->rows,
        .heads = h,
        .width = k,
        .ld = 3 * hk,
        .a_log = w->a_log,
        .dt_bias = w->dt_bias,
        .bound = c->d->gate_bound,
    };
    const int rc = c->phase == HX_PHASE_DECODE ? hx_op_kda_step(c->dev, &delta, err)
                                               : hx_op_kda_chunk(c->dev, &delta, err);

    return rc != 0 ? rc
                   : keep_state(c, mem->kda_state, mem->kda_bytes, mem->state_at, err);
}

int hx_layers_kda(const hx_layer_call *c, const hx_kda *w, hx_layer_mem *mem, hx_err *err)
{
    const int64_t h = c->d->kda_heads, k = c->d->kda_width, rows = c->rows.n_row;
    const hx_buf beta = floats_at(c->small, rows * (w->f_a.n + w->g_a.n));
    const hx_kda_out_args out = { .y = c->e,
                                  .o = c->e,
                                  .z = c->c,
                                  .w = w->o_norm,
                                  .rows = rows,
                                  .heads = h,
                                  .width = k,
                                  .eps = c->d->norm_eps };
    int rc;

    if ((rc = kda_gates(c, w, beta, err)) != 0 || (rc = kda_qkv(c, w, mem, err)) != 0 ||
        (rc = join_side(c, err)) != 0 || (rc = kda_delta(c, w, mem, beta, err)) != 0 ||
        (rc = hx_op_kda_out(c->dev, &out, err)) != 0)
        return rc;
    return linear(c, c->y, c->d->width, c->e, h * k, &w->o, err);
}

/* ---- MLA ------------------------------------------------------------- */

/* Views of c->small, each dense [R, .]. */
typedef struct {
    hx_buf qr, latent, key, gate, weight;
} mla_rows;

static mla_rows split_small(const hx_layer_call *c)
{
    const hx_desc *d = c->d;
    const int64_t r = c->rows.n_row;
    mla_rows m = { .qr = c->small };

    m.latent = floats_at(m.qr, r * d->q_rank);
    m.key = floats_at(m.latent, r * d->latent);
    m.gate = floats_at(m.key, r * d->index_width);
    m.weight = floats_at(m.gate, r * d->index_width);
    return m;
}

static int norm_rows(const hx_layer_call *c, hx_buf x, hx_buf w, int64_t dim, hx_err *err)
{
    const hx_rmsnorm_args a = { .y = x,
                                .x = x,
                                .w = w,
                                .rows = c->rows.n_row,
                                .dim = dim,
                                .ldx = dim,
                                .ldy = dim,
                                .eps = c->d->norm_eps };

    return hx_op_rmsnorm(c->dev, &a, err);
}

/* Latent, index key and index weight of every row; latents and keys go to memory. */
static int mla_remember(const hx_layer_call *c, const hx_mla *w, hx_layer_mem *mem,
                        const mla_rows *m, hx_err *err)
{
    const hx_desc *d = c->d;
    const int64_t iw = d->index_width;
    const hx_matmul_args weight = product(c, m->weight, d->index_heads, c->x, d->width,
                                          &w->index_weight, NULL),
                         gate = product(c, m->gate, iw, c->x, d->width, &w->index_gate,
                                        &weight),
                         key = product(c, m->key, iw, c->x, d->width, &w->index_k, &gate);
    int rc;

    if ((rc = linear(c, m->latent, d->latent, c->x, d->width, &w->kv_a, err)) != 0 ||
        (rc = norm_rows(c, m->latent, w->kv_norm, d->latent, err)) != 0 ||
        (rc = hx_op_matmul(c->dev, &key, err)) != 0)
        return rc;
    const hx_layernorm_args ln = { .y = m->key,
                                   .x = m->key,
                                   .w = w->index_norm_w,
                                   .b = w->index_norm_b,
                                   .rows = c->rows.n_row,
                                   .dim = d->index_width,
                                   .ldx = d->index_width,
                                   .ldy = d->index_width,
                                   .eps = 1e-6f };
    const hx_latent_append_args latent = {
        .c = m->latent, .ldc = d->latent, .cache = mem->latent, .rows = c->rows
    };
    const hx_index_append_args index = { .key = m->key,
                                         .gate = m->gate,
                                         .ape = w->ape,
                                         .ring = mem->ring,
                                         .pool = mem->pool,
                                         .rows = c->rows,
                                         .pool_n = d->pool_n };
    if ((rc = hx_op_layernorm(c->dev, &ln, err)) != 0 ||
        (rc = hx_op_latent_append(c->dev, &latent, err)) != 0)
        return rc;
    return hx_op_index_append(c->dev, &index, err);
}

/* Rows of one kind (all attended, or selected by the indexer) that stand together. */
#define SEG_SPANS 64
typedef struct {
    hx_span span[SEG_SPANS];
    int32_t n_span;
    int64_t row0, n_row;
    bool sparse;
} mla_seg;

/* What all rows of a call have in common. */
typedef struct {
    const hx_layer_call *c;
    hx_layer_mem *mem;
    hx_buf iq, iw;    /* queries and weights of the indexer */
    int64_t ld_score; /* pools that the longest row sees, at least */
} mla_attend;

/* The pools that rows row0 on, which are all rows of *rows, attend. */
static int select_pools(const mla_attend *m, const hx_rows *rows, int64_t row0,
                        hx_err *err)
{
    const hx_layer_call *c = m->c;
    const hx_desc *d = c->d;
    const hx_index_score_args score = {
        .score = c->score,
        .q = floats_at(m->iq, row0 * d->index_heads * d->index_width),
        .w = floats_at(m->iw, row0 * d->index_heads),
        .pool = m->mem->pool,
        .rows = *rows,
        .heads = d->index_heads,
        .pool_n = d->pool_n,
        .ld_score = m->ld_score,
        .scale = 1.0f / sqrtf((float)d->index_width),
        .w_scale = 1.0f / sqrtf((float)d->index_heads),
    };
    const hx_topk_args topk = { .pick = c->pick,
                                .n_pick = c->n_pick,
                                .score = c->score,
                                .rows = *rows,
                                .k = d->index_topk,
                                .pool_n = d->pool_n,
                                .ld_score = m->ld_score };
    int rc;

    if ((rc = hx_op_index_score(c->dev, &score, err)) != 0 ||
        (rc = hx_op_topk(c->dev, &topk, err)) != 0)
        return rc;
    tap(c, "index_score", c->score, m->ld_score, rows->n_row);
    tap(c, "pick", c->pick, d->index_topk, rows->n_row);
    return 0;
}

/* Attention of rows row0 on, which are all rows of *rows. */
static int attend_rows(const mla_attend *m, const hx_rows *rows, int64_t row0,
                       bool sparse, hx_err *err)
{
    const hx_layer_call *c = m->c;
    const hx_desc *d = c->d;
    const int64_t hz = d->mla_heads * d->latent;
    const hx_mla_attend_args att = { .z = floats_at(c->c, row0 * hz),
                                     .q = floats_at(c->b, row0 * hz),
                                     .pick = sparse ? c->pick : (hx_buf) { 0 },
                                     .n_pick = sparse ? c->n_pick : (hx_buf) { 0 },
                                     .cache = m->mem->latent,
                                     .rows = *rows,
                                     .heads = d->mla_heads,
                                     .pool_n = d->pool_n,
                                     .k_pick = d->index_topk,
                                     .scale = 1.0f / sqrtf((float)d->k_width),
                                     .prefill = c->phase == HX_PHASE_PREFILL };

    return hx_op_mla_attend(c->dev, &att, err);
}

static int attend_seg(const mla_attend *m, mla_seg *s, hx_err *err)
{
    const hx_rows rows = { .span = s->span, .n_span = s->n_span, .n_row = s->n_row };
    int rc = s->n_row > 0 && s->sparse ? select_pools(m, &rows, s->row0, err) : 0;

    if (rc == 0 && s->n_row > 0)
        rc = attend_rows(m, &rows, s->row0, s->sparse, err);
    s->row0 += s->n_row;
    s->n_row = s->n_span = 0;
    return rc;
}

/* Attention of all rows. Up to index_topk pools every position is attended and needs no
 * scores; beyond, rows are scored in groups that the score buffer holds, unless the calls
 * must not depend on positions: then all have been. A row's result does not depend on its
 * group. */
static int attend(mla_attend *m, hx_err *err)
{
    const hx_layer_call *c = m->c;
    const int64_t first_sparse = (c->d->index_topk + 1) * c->d->pool_n - 1; /* position */
    mla_seg s = { 0 };
    int rc;

    if (c->uniform)
        return attend_rows(m, &c->rows, 0, true, err);
    for (int32_t i = 0; i < c->rows.n_span; i++)
        m->ld_score = HX_MAX(m->ld_score, (c->rows.span[i].pos0 + c->rows.span[i].n_row) /
                                              c->d->pool_n);
    const int64_t most =
        HX_MIN(c->rows.n_row, (int64_t)(c->score.n / sizeof(float)) / m->ld_score);
    for (int32_t i = 0; i < c->rows.n_span; i++) {
        const hx_span sp = c->rows.span[i];

        for (int32_t done = 0; done < sp.n_row;) {
            const int64_t pos = sp.pos0 + done;
            const bool sparse = pos >= first_sparse;
            int64_t n = sp.n_row - done;

            if (!sparse)
                n = HX_MIN(n, first_sparse - pos);
            if (s.n_row > 0 &&
                (s.sparse != sparse || s.n_span == SEG_SPANS ||
                 (sparse && s.n_row == most)) &&
                (rc = attend_seg(m, &s, err)) != 0)
                return rc;
            if (sparse)
                n = HX_MIN(n, most - s.n_row);
            s.sparse = sparse;
            s.span[s.n_span++] = (hx_span) { .slot = sp.slot,
                                             .row0 = (int32_t)s.n_row,
                                             .n_row = (int32_t)n,
                                             .pos0 = (int32_t)pos };
            s.n_row += n;
            done += (int32_t)n;
        }
    }
    return attend_seg(m, &s, err);
}

int hx_layers_mla(const hx_layer_call *c, const hx_mla *w, hx_layer_mem *mem, hx_err *err)
{
    const hx_desc *d = c->d;
    const mla_rows m = split_small(c);
    const int64_t stride = d->k_width + d->v_width;
    mla_attend att = { .c = c, .mem = mem, .iq = c->e, .iw = m.weight };
    int rc;

    att.ld_score = c->uniform ? c->ld_score : 1;
    if ((rc = fork_side(c, err)) != 0 || (rc = mla_remember(c, w, mem, &m, err)) != 0 ||
        (rc = end_side(c, err)) != 0 ||
        (rc = linear(c, m.qr, d->q_rank, c->x, d->width, &w->q_a, err)) != 0 ||
        (rc = norm_rows(c, m.qr, w->q_norm, d->q_rank, err)) != 0 ||
        (rc = linear(c, c->e, d->index_heads * d->index_width, m.qr, d->q_rank,
                     &w->index_q, err)) != 0 ||
        (rc = fork_side(c, err)) != 0 ||
        (c->uniform && (rc = select_pools(&att, &c->rows, 0, err)) != 0) ||
        (rc = end_side(c, err)) != 0 ||
        (rc = linear(c, c->a, d->mla_heads * d->k_width, m.qr, d->q_rank, &w->q_b,
                     err)) != 0)
        return rc;
    const hx_head_matmul_args absorb = { .y = c->b,
                                         .x = c->a,
                                         .w = &w->kv_b,
                                         .rows = c->rows.n_row,
                                         .heads = d->mla_heads,
                                         .n = d->k_width,
                                         .stride = stride,
                                         .first = 0,
                                         .transposed = true,
                                         .prefill = c->phase == HX_PHASE_PREFILL };
    const hx_head_matmul_args expand = { .y = c->a,
                                         .x = c->c,
                                         .w = &w->kv_b,
                                         .rows = c->rows.n_row,
                                         .heads = d->mla_heads,
                                         .n = d->v_width,
                                         .stride = stride,
                                         .first = d->k_width,
                                         .transposed = false,
                                         .prefill = c->phase == HX_PHASE_PREFILL };
    if ((rc = hx_op_head_matmul(c->dev, &absorb, err)) != 0 ||
        (rc = join_side(c, err)) != 0 || (rc = attend(&att, err)) != 0 ||
        (rc = hx_op_head_matmul(c->dev, &expand, err)) != 0)
        return rc;
    return linear(c, c->y, d->width, c->a, d->mla_heads * d->v_width, &w->o, err);
}

/* ---- feed-forward ---------------------------------------------------- */

int hx_layers_dense(const hx_layer_call *c, const hx_expert *w, hx_buf y, hx_err *err)
{
    const int64_t d = c->d->width, f = w->gate.n;
    const hx_swiglu_args act = { .y = c->a,
                                 .gate = c->a,
                                 .up = c->b,
                                 .rows = c->rows.n_row,
                                 .dim = f,
                                 .limit = c->d->swiglu_limit };
    int rc;

    if ((rc = linear(c, c->a, f, c->x, d, &w->gate, err)) != 0 ||
        (rc = linear(c, c->b, f, c->x, d, &w->up, err)) != 0 ||
        (rc = hx_op_swiglu(c->dev, &act, err)) != 0)
        return rc;
    return linear(c, y, d, c->a, f, &w->down, err);
}

/* What the next layer will probably pick, as its router sees the input of this one. */
static int predict(const hx_layer_call *c, const hx_layer *next, hx_err *err)
{
    const hx_router_args route = { .id = c->store->ahead.id,
                                   .weight = c->store->ahead.w,
                                   .x = c->x,
                                   .bias = next->router_bias,
                                   .score = c->store->ahead.score,
                                   .w = &next->router,
                                   .rows = c->rows.n_row,
                                   .active = c->d->n_active,
                                   .factor = c->d->route_factor };

    return hx_op_router(c->dev, &route, err);
}

/* Layer l's part of a table i32 [n_layer, R, A] of drawn picks. */
static hx_buf drawn_at(const hx_layer_call *c, int64_t l)
{
    return hx_buf_at(c->drawn, (size_t)(l * c->rows.n_row * c->d->n_active) * 4);
}

int hx_layers_moe(const hx_layer_call *c, const hx_layer *w, hx_err *err)
{
    const hx_desc *d = c->d;
    const int64_t rows = c->rows.n_row;
    const hx_router_args route = { .id = c->route_id,
                                   .weight = c->route_w,
                                   .x = c->x,
                                   .bias = w->router_bias,
                                   .score = c->route_score,
                                   .w = &w->router,
                                   .rows = rows,
                                   .active = d->n_active,
                                   .factor = d->route_factor };
    hx_moe_args moe = { .y = c->part,
                        .x = c->x,
                        .id = c->route_id,
                        .expert = w->expert,
                        .n_expert = d->n_expert,
                        .rows = rows,
                        .active = d->n_active,
                        .limit = d->swiglu_limit,
                        .prefill = c->phase == HX_PHASE_PREFILL };
    hx_combine_args combine = { .y = c->y,
                                .base = c->y,
                                .part = c->part,
                                .weight = c->route_w,
                                .rows = rows,
                                .active = d->n_active,
                                .dim = d->width };
    const hx_store_call call = { c->layer, c->all_rows, c->last };
    const bool ahead = c->phase == HX_PHASE_DECODE && c->store != NULL &&
                       hx_ahead_after(c->store, c->layer);
    int rc;

    if ((rc = fork_side(c, err)) != 0 ||
        (rc = hx_layers_dense(c, &w->dense, c->y, err)) != 0 ||
        (ahead && (rc = predict(c, w + 1, err)) != 0) || (rc = end_side(c, err)) != 0 ||
        (rc = hx_op_router(c->dev, &route, err)) != 0)
        return rc;
    tap(c, "router_score", c->route_score, d->n_expert, rows);
    tap(c, "router_id", c->route_id, d->n_active, rows);
    tap(c, "router_w", c->route_w, d->n_active, rows);
    if (c->drawn.p != NULL)
        moe.id = drawn_at(c, c->layer);
    hx_count(HX_C_expert_rows_total, rows * d->n_active);
    if (c->store != NULL && c->phase == HX_PHASE_DECODE &&
        (rc = hx_store_plan(c->store, c->layer, rows, moe.id, c->x, &moe, &combine,
                            err)) != 0)
        return rc;
    do {
        if ((c->store != NULL && moe.prefill &&
             (rc = hx_store_prefill(c->store, &call, &moe, err)) != 0) ||
            (rc = hx_op_moe(c->dev, &moe, err)) != 0)
            return rc;
    } while (moe.end != 0 && moe.end < d->n_expert);
    if ((rc = join_side(c, err)) != 0 ||
        (c->store != NULL && c->phase == HX_PHASE_DECODE &&
         (rc = hx_ahead_end(c->store, c->layer, err)) != 0) ||
        (ahead &&
         (rc = hx_ahead_fetch(c->store, c->layer, rows,
                              c->drawn.p != NULL ? drawn_at(c, d->n_layer + c->layer + 1)
                                                 : c->store->ahead.id,
                              err)) != 0))
        return rc;
    return hx_op_combine(c->dev, &combine, err);
}
