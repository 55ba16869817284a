/* quantize_calib.c - calibration: rows of text through the model one layer at a time, and
 * the Hessian of every input on the way. Called by quantize.c. Rows stand in a file
 * between layers, so memory, and that of a GPU, holds one layer and one row. The model's
 * code is not touched: the device's table of operations is replaced by one that looks at
 * products first. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#include "cli/quantize.h"
#include "dev/enc_ops.h"
#include "dev/fmt_plain.h"

#define TEXT_MAX (1u << 30)
#define OUT_ROWS 64   /* of logits at a time, which nobody looks at */
#define MIN_ROW  16   /* tokens; a shorter rest of a text is left out */
#define NOISE    1e-3 /* of a product's variance: between 5 and 6 bits */

/* Sum of x x^T over rows, where the device has its memory, and what the shrinkage needs. */
typedef struct {
    float *sum;
    int64_t k, k_pad, rows;
    double fourth; /* sum of |x|^4 */
} gram;

struct qz_calib {
    hx_model *model;
    hx_dev *dev;
    const hx_dev_ops *ops; /* the device's own */
    hx_dev_ops spy;
    hx_cache *cache;
    hx_graph *graph;
    const qz_text *text;
    char work[2100];
    int64_t layer; /* whose inputs are looked at; -1: none */
    gram *gram;    /* [n_gram] of that layer, by QZ_H_… */
    int64_t n_gram;
    int noisy;   /* class of the layer whose products get noise; -1: none */
    int n_noise; /* products that got some in this call */
    hx_enc sums; /* of rows */
    hx_buf row;  /* scratch for rows of an expert: x, gate, up */
    hx_buf pad;  /* … for rows with padding */
    hx_buf list; /* … for row numbers, i32 [rows] */
    float *host; /* … for what a device gives or takes; unused where that is the host */
    size_t host_floats;
    int32_t *id;    /* picks of a call [rows, active], and the rows of one expert */
    double *square; /* [rows] */
};

/* ---- text ------------------------------------------------------------------- */

/* The last row may be shorter. */
static int read_json_rows(qz_text *t, const hx_json *j, int64_t max_rows, hx_err *err)
{
    const size_t rows = HX_MIN(hx_json_len(j), (size_t)max_rows);

    for (size_t r = 0; r < rows; r++) {
        const size_t n = hx_json_len(hx_json_at(j, r)), cols = (size_t)t->cols;

        if (n > cols || (n < cols && r + 1 < rows))
            return hx_fail(err, HX_EFORMAT,
                           "calibration: row %zu has %zu ids, expected %zu as in row 0",
                           r, n, cols);
    }
    if ((t->id = hx_realloc(NULL, (rows * (size_t)t->cols + 1) * sizeof *t->id)) == NULL)
        return hx_fail(err, HX_ENOMEM, "calibration: no memory");
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < hx_json_len(hx_json_at(j, r)); i++)
            t->id[t->n_id++] = (int32_t)hx_json_int(hx_json_at(hx_json_at(j, r), i), -1);
    return 0;
}

static int read_text_rows(qz_text *t, hx_str text, const char *name,
                          const char *model_dir, hx_err *err)
{
    char path[2200], *json = NULL;
    hx_tok *tok = NULL;
    hx_ids ids = { 0 };
    hx_err why = { 0 };
    size_t n;
    int rc;

    snprintf(path, sizeof path, "%s/tokenizer.json", model_dir);
    if ((rc = hx_file_read(path, TEXT_MAX, &json, &n, err)) != 0)
        return rc;
    if ((rc = hx_tok_open(&tok, (hx_str) { json, n }, path, err)) == 0 &&
        (rc = hx_tok_encode(tok, text, NULL, &ids, &why)) != 0)
        hx_fail(err, rc, "%s: %.200s", name, why.msg);
    hx_tok_close(tok);
    hx_free(json);
    t->id = ids.p;
    t->n_id = ids.n;
    return rc;
}

int qz_text_read(qz_text *t, const char *path, const char *model_dir, int64_t max_rows,
                 int64_t cols, int64_t n_vocab, hx_err *err)
{
    hx_json *j = NULL;
    char *text;
    size_t n;
    int rc;

    *t = (qz_text) { .cols = cols };
    if ((rc = hx_file_read(path, TEXT_MAX, &text, &n, err)) != 0)
        return rc;
    if (n > 0 && text[0] == '[' &&
        hx_json_parse(&j, (hx_str) { text, n }, 0, NULL) == 0 &&
        hx_json_len(hx_json_at(j, 0)) > 0) {
        t->cols = (int64_t)hx_json_len(hx_json_at(j, 0));
        rc = read_json_rows(t, j, max_rows, err);
    } else {
        rc = read_text_rows(t, (hx_str) { text, n }, path, model_dir, err);
    }
    hx_json_free(j);
    hx_free(text);
    t->n_id = HX_MIN(t->n_id, max_rows * t->cols);
    if (t->n_id % t->cols < MIN_ROW)
        t->n_id -= t->n_id % t->cols;
    t->n_row = (t->n_id + t->cols - 1) / t->cols;
    for (int64_t i = 0; rc == 0 && i < t->n_id; i++)
        if (t->id[i] < 0 || t->id[i] >= n_vocab)
            rc = hx_fail(err, HX_EFORMAT, "%s: id %d, expected 0..%lld", path, t->id[i],
                         (long long)n_vocab - 1);
    if (rc == 0 && t->n_id == 0)
        rc = hx_fail(err, HX_EFORMAT, "%s: fewer than %d tokens", path, MIN_ROW);
    if (rc != 0)
        qz_text_free(t);
    return rc;
}

void qz_text_free(qz_text *t)
{
    hx_free(t->id);
    *t = (qz_text) { .id = NULL };
}

/* ---- looking at products ----------------------------------------------------- */

static int reserve(qz_calib *c, hx_buf *b, int64_t floats, hx_err *err)
{
    const size_t bytes = (size_t)floats * sizeof(float);

    if (bytes <= b->n)
        return 0;
    hx_dev_free(c->dev, b);
    return hx_dev_alloc(c->dev, b, bytes, err);
}

/* Where floats of a device can be read and written by the host. */
static int mirror_of(qz_calib *c, hx_buf b, int64_t floats, float **out, hx_err *err)
{
    float *more;

    *out = b.p;
    if (hx_dev_is_host(c->dev))
        return 0;
    if ((size_t)floats > c->host_floats) {
        if ((more = hx_realloc(c->host, (size_t)floats * sizeof(float))) == NULL)
            return hx_fail(err, HX_ENOMEM, "calibration: no memory for %lld floats",
                           (long long)floats);
        c->host = more;
        c->host_floats = (size_t)floats;
    }
    *out = c->host;
    return 0;
}

static int pull(qz_calib *c, hx_buf b, int64_t floats, float **out, hx_err *err)
{
    const int rc = mirror_of(c, b, floats, out, err);

    return rc != 0 || *out == b.p
               ? rc
               : hx_dev_get(c->dev, *out, b, (size_t)floats * sizeof(float), err);
}

static int push(qz_calib *c, hx_buf b, int64_t floats, const float *from, hx_err *err)
{
    return from == b.p ? 0
                       : hx_dev_put(c->dev, b, from, (size_t)floats * sizeof(float), err);
}

/* Rows that are not finite do not count. */
static int look(qz_calib *c, int64_t which, const float *x, int64_t ldx, int64_t rows,
                int64_t k, hx_err *err)
{
    const hx_enc_ops *ops = c->sums.ops;
    gram *g = &c->gram[which];
    int rc;

    if (rows == 0)
        return 0;
    if (g->sum == NULL) {
        g->k = k;
        g->k_pad = HX_EXL3_PAD(k);
        if ((rc = ops->alloc(&c->sums, &g->sum, g->k_pad * g->k_pad, err)) != 0)
            return rc;
    }
    if ((rc = reserve(c, &c->pad, rows * g->k_pad, err)) != 0)
        return rc;
    float *const pad = c->pad.p;

    if (k != g->k_pad)
        ops->zero(&c->sums, pad, rows * g->k_pad);
    ops->copy(&c->sums, pad, g->k_pad, x, ldx, rows, k);
    if ((rc = ops->dot_rows(&c->sums, pad, pad, rows, g->k_pad, c->square, err)) != 0)
        return rc;
    for (int64_t r = 0; r < rows; r++) {
        if (isfinite(c->square[r])) {
            g->fourth += c->square[r] * c->square[r];
            g->rows++;
        } else {
            ops->zero(&c->sums, pad + r * g->k_pad, g->k_pad);
        }
    }
    ops->gram(&c->sums, g->sum, pad, rows, g->k_pad);
    return 0;
}

/* Adds to each output what a search of distortion NOISE would add to it, about: noise in
 * proportion to the output's rms over the rows. times: how many such errors at once. */
static int add_noise(qz_calib *c, hx_buf out, int64_t ldy, int64_t rows, int64_t n,
                     int times, hx_err *err)
{
    const uint64_t seed = (uint64_t)c->n_noise++ << 32;
    const int64_t all = (rows - 1) * ldy + n;
    float *y;
    int rc = pull(c, out, all, &y, err);

    if (rc != 0)
        return rc;
    for (int64_t j = 0; j < n; j++) {
        double sum = 0;

        for (int64_t r = 0; r < rows; r++)
            sum += (double)y[r * ldy + j] * (double)y[r * ldy + j];
        const double rms = sqrt(sum / (double)rows * NOISE * times);

        for (int64_t r = 0; r < rows && isfinite(rms); r++)
            y[r * ldy + j] +=
                (float)(rms * hx_rng_normal(seed | (uint64_t)j, (uint64_t)r));
    }
    return push(c, out, all, y, err);
}

/* The spy is found from the device: only the table in front of it is ours. */
static qz_calib *owner(const hx_dev *d)
{
    return (qz_calib *)(void *)((char *)(uintptr_t)d->ops - offsetof(qz_calib, spy));
}

/* Which Hessian the input of w is for; QZ_H_NONE: no one's. */
static int32_t input_of(const qz_calib *c, const hx_mat *w)
{
    const hx_model *m = c->model;

    if (c->layer < 0)
        return QZ_H_NONE;
    if (c->layer == m->desc.n_layer)
        return w == &m->head ? QZ_H_ATTN : QZ_H_NONE;
    const hx_layer *l = &m->layer[c->layer];
    const struct {
        const hx_mat *w;
        int32_t hess;
    } list[] = { { &l->kda.qkv[0], QZ_H_ATTN }, { &l->mla.q_a, QZ_H_ATTN },
                 { &l->mla.q_b, QZ_H_QUERY },   { &l->kda.o, QZ_H_O },
                 { &l->mla.o, QZ_H_O },         { &l->dense.gate, QZ_H_MLP },
                 { &l->dense.down, QZ_H_DOWN } };

    for (size_t i = 0; i < HX_LEN(list); i++)
        if (w == list[i].w)
            return list[i].hess;
    return QZ_H_NONE;
}

/* The class of a matrix of the current layer that is to be quantised, or -1. */
static int class_of(const qz_calib *c, const hx_mat *w)
{
    const hx_layer *l = &c->model->layer[c->layer];
    const hx_mat *const attn[] = { &l->kda.qkv[0], &l->kda.qkv[1], &l->kda.qkv[2],
                                   &l->kda.o,      &l->mla.q_a,    &l->mla.q_b,
                                   &l->mla.kv_a,   &l->mla.o,      &l->mla.index_q };

    for (size_t i = 0; i < HX_LEN(attn); i++)
        if (w == attn[i])
            return QZ_ATTN;
    if (w == &l->dense.gate || w == &l->dense.up || w == &l->dense.down)
        return l->ffn == HX_FFN_DENSE ? QZ_DENSE : QZ_SHARED;
    return -1;
}

static int spy_matmul(hx_dev *d, const hx_matmul_args *a, hx_err *err)
{
    qz_calib *c = owner(d);
    const int32_t hess = input_of(c, a->w);
    int rc;

    if (hess >= 0 && c->gram != NULL &&
        (rc = look(c, hess, a->x.p, a->ldx, a->rows, a->w->k, err)) != 0)
        return rc;
    if ((rc = c->ops->matmul(d, a, err)) != 0)
        return rc;
    return c->noisy >= 0 && class_of(c, a->w) == c->noisy
               ? add_noise(c, a->y, a->ldy, a->rows, a->w->n, 1, err)
               : 0;
}

/* The input of one expert's down for the rows that picked it, as c->id says. */
static int look_at_expert(qz_calib *c, const hx_moe_args *a, int32_t e, hx_err *err)
{
    const hx_expert *w = &a->expert[e];
    const int64_t k = w->gate.k, f = w->gate.n, picks = a->rows * a->active;
    int32_t *rows = c->id + picks;
    int64_t n = 0;
    int rc;

    for (int64_t i = 0; i < picks; i++)
        if (c->id[i] == e)
            rows[n++] = (int32_t)(i / a->active);
    if (n == 0)
        return 0;
    if ((rc = reserve(c, &c->row, n * (k + 2 * f), err)) != 0 ||
        (rc = hx_dev_put(c->dev, c->list, rows, (size_t)n * sizeof *rows, err)) != 0)
        return rc;
    const hx_mat table = { .fmt = HX_FMT_F32, .n = a->rows, .k = k, .w = a->x.p };
    const hx_buf x = c->row, gate = hx_buf_at(x, (size_t)(n * k) * sizeof(float)),
                 up = hx_buf_at(gate, (size_t)(n * f) * sizeof(float));
    const hx_embed_args gather = {
        .y = x, .id = c->list, .table = &table, .rows = n, .streams = 1
    };
    hx_matmul_args mul = {
        .y = gate, .x = x, .w = &w->gate, .rows = n, .ldx = k, .ldy = f, .prefill = true
    };
    const hx_swiglu_args act = {
        .y = gate, .gate = gate, .up = up, .rows = n, .dim = f, .limit = a->limit
    };

    if ((rc = c->ops->embed(c->dev, &gather, err)) != 0 ||
        (rc = c->ops->matmul(c->dev, &mul, err)) != 0)
        return rc;
    mul.y = up;
    mul.w = &w->up;
    if ((rc = c->ops->matmul(c->dev, &mul, err)) != 0 ||
        (rc = c->ops->swiglu(c->dev, &act, err)) != 0)
        return rc;
    return look(c, QZ_H_EXPERT + e, gate.p, f, n, f, err);
}

static int spy_moe(hx_dev *d, const hx_moe_args *a, hx_err *err)
{
    qz_calib *c = owner(d);
    const size_t bytes = (size_t)(a->rows * a->active) * sizeof *c->id;
    int rc;

    if (c->gram != NULL && c->layer >= 0 && c->layer < c->model->desc.n_layer &&
        a->expert == c->model->layer[c->layer].expert) {
        if ((rc = hx_dev_get(d, c->id, a->id, bytes, err)) != 0)
            return rc;
        for (int32_t e = 0; e < (int32_t)a->n_expert; e++)
            if ((rc = look_at_expert(c, a, e, err)) != 0)
                return rc;
    }
    rc = c->ops->moe(d, a, err);
    return rc == 0 && c->noisy == QZ_ROUTED
               ? add_noise(c, a->y, a->expert->down.n, a->rows * a->active,
                           a->expert->down.n, 3, err)
               : rc;
}

/* ---- opening ------------------------------------------------------------------ */

int qz_calib_open(qz_calib **out, hx_model *m, const qz_text *text, const char *work,
                  const hx_dev_opt *opt, hx_err *err)
{
    const int64_t cols = text->cols;
    hx_dev_opt dev = *opt;
    qz_calib *c = hx_new(qz_calib, 1);
    int rc;

    *out = NULL;
    if (c == NULL || (c->square = hx_new(double, cols)) == NULL ||
        (c->id = hx_new(int32_t, cols * (m->desc.n_active + 1))) == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "calibration: no memory");
        goto fail;
    }
    c->model = m;
    c->text = text;
    c->layer = c->noisy = -1;
    snprintf(c->work, sizeof c->work, "%s", work);
    dev.limits = hx_model_limits(&m->desc, cols, cols);
    /* The last two say which search there is room for: none is made. */
    c->sums =
        (hx_enc) { .n = HX_MAX(cols, 128), .k = 128, .codebook = HX_CB_MUL1, .k2 = 16 };
    if ((rc = hx_dev_open(&c->dev, &dev, err)) != 0 ||
        (rc = hx_enc_open(&c->sums, c->dev->pool, c->dev, err)) != 0 ||
        (rc = hx_dev_alloc(c->dev, &c->list, (size_t)cols * sizeof(int32_t), err)) != 0 ||
        (rc = hx_cache_open(&c->cache, &m->desc, c->dev, 1, cols,
                            (int32_t)((cols + HX_PAGE - 1) / HX_PAGE), HX_CACHE_F32,
                            err)) != 0 ||
        (rc = hx_graph_open(&c->graph, m, c->dev, c->cache, cols, OUT_ROWS, cols, err)) !=
            0)
        goto fail;
    c->ops = c->dev->ops;
    c->spy = *c->ops;
    c->spy.matmul = spy_matmul;
    c->spy.moe = spy_moe;
    c->dev->ops = &c->spy;
    *out = c;
    return 0;
fail:
    qz_calib_close(c);
    return rc;
}

static void drop_grams(qz_calib *c)
{
    for (int64_t i = 0; c->gram != NULL && i < c->n_gram; i++)
        c->sums.ops->free(&c->sums, c->gram[i].sum);
    hx_free(c->gram);
    c->gram = NULL;
    c->n_gram = 0;
}

void qz_calib_close(qz_calib *c)
{
    if (c == NULL)
        return;
    drop_grams(c);
    if (c->ops != NULL)
        c->dev->ops = c->ops;
    hx_graph_close(c->graph);
    hx_cache_close(c->cache);
    hx_enc_close(&c->sums);
    if (c->dev != NULL) {
        hx_dev_free(c->dev, &c->row);
        hx_dev_free(c->dev, &c->pad);
        hx_dev_free(c->dev, &c->list);
    }
    hx_dev_close(c->dev);
    hx_free(c->host);
    hx_free(c->id);
    hx_free(c->square);
    hx_free(c);
}

hx_dev *qz_calib_dev(const qz_calib *c)
{
    return c->dev;
}

/* ---- layers on a device --------------------------------------------------------- */

/* A layer, or what is outside of them, on the device, and the model's pointers as they
 * were. */
typedef struct {
    int64_t layer; /* -1: nothing is there */
    hx_buf at;
    hx_layer was;
    hx_expert *expert;
    hx_mat embed, head;
    hx_buf norm;
} stay;

static void layer_leave(qz_calib *c, stay *s)
{
    hx_model *m = c->model;

    if (s->layer == m->desc.n_layer) {
        m->embed = s->embed;
        m->head = s->head;
        m->norm = s->norm;
    } else if (s->layer >= 0) {
        m->layer[s->layer] = s->was;
        if (s->was.expert != NULL)
            memcpy(s->was.expert, s->expert,
                   (size_t)m->desc.n_expert * sizeof *s->expert);
    }
    if (s->at.p != NULL)
        hx_dev_free(c->dev, &s->at);
    hx_free(s->expert);
    *s = (stay) { .layer = -1 };
}

/* layer n_layer: embedding, output matrix, the norm before it. */
static int layer_enter(qz_calib *c, stay *s, int64_t layer, hx_err *err)
{
    hx_model *m = c->model;
    int rc;

    *s = (stay) { .layer = -1 };
    if (hx_dev_is_host(c->dev))
        return 0;
    s->embed = m->embed;
    s->head = m->head;
    s->norm = m->norm;
    if (layer < m->desc.n_layer) {
        s->was = m->layer[layer];
        if (s->was.expert != NULL) {
            const size_t bytes = (size_t)m->desc.n_expert * sizeof *s->expert;

            if ((s->expert = hx_new(hx_expert, m->desc.n_expert)) == NULL)
                return hx_fail(err, HX_ENOMEM, "calibration: no memory");
            memcpy(s->expert, s->was.expert, bytes);
        }
    }
    s->layer = layer;
    if ((rc = hx_model_place_layer(m, c->dev, layer, &s->at, err)) != 0)
        layer_leave(c, s);
    return rc;
}

/* ---- rows through layers ------------------------------------------------------- */

/* One row of text as a call of its own; the slot is dropped afterwards. */
typedef struct {
    hx_span span;
    hx_batch batch;
} row_call;

static int row_begin(qz_calib *c, row_call *r, int64_t row, hx_err *err)
{
    const qz_text *t = c->text;
    const int64_t n = HX_MIN(t->cols, t->n_id - row * t->cols);
    const int32_t slot = hx_cache_take(c->cache);
    int rc;

    hx_assert(slot >= 0);
    if ((rc = hx_cache_grow(c->cache, slot, n, err)) != 0) {
        hx_cache_drop(c->cache, slot);
        return rc;
    }
    r->span = (hx_span) { .slot = slot, .n_row = (int32_t)n };
    r->batch = (hx_batch) { .phase = HX_PHASE_PREFILL,
                            .id = t->id + row * t->cols,
                            .rows = { .span = &r->span, .n_span = 1, .n_row = n } };
    return 0;
}

/* Of a token: its streams. */
static size_t row_floats(const hx_model *m)
{
    return (size_t)(m->desc.streams * m->desc.width);
}

static void activations_path(const qz_calib *c, int64_t layer, char path[2200])
{
    snprintf(path, 2200, "%s/rows-%lld", c->work, (long long)(layer & 1));
}

/* A row before layer: embedded, or from place at of a file. */
static int row_load(qz_calib *c, const row_call *r, int64_t layer, uint64_t at, int fd,
                    hx_err *err)
{
    if (layer == 0)
        return hx_graph_begin(c->graph, &r->batch, err);
    const hx_buf to = hx_graph_streams(c->graph);
    const int64_t floats = r->batch.rows.n_row * (int64_t)row_floats(c->model);
    float *x;
    int rc;

    if ((rc = hx_graph_resume(c->graph, &r->batch, layer, err)) != 0 ||
        (rc = mirror_of(c, to, floats, &x, err)) != 0 ||
        (rc = qz_read_at(fd, x, (size_t)floats * sizeof *x, at, "activations", err)) != 0)
        return rc;
    return push(c, to, floats, x, err);
}

static int row_save(qz_calib *c, const row_call *r, uint64_t at, int fd, hx_err *err)
{
    const int64_t floats = r->batch.rows.n_row * (int64_t)row_floats(c->model);
    float *x;
    const int rc = pull(c, hx_graph_streams(c->graph), floats, &x, err);

    return rc != 0
               ? rc
               : qz_write_at(fd, x, (size_t)floats * sizeof *x, at, "activations", err);
}

/* One row through layer (n_layer: to the logits). Looked at, or kept in the file out. */
static int pass_row(qz_calib *c, int64_t row, int64_t layer, int in, int out, bool looked,
                    hx_err *err)
{
    const int64_t n_layer = c->model->desc.n_layer, n_out = OUT_ROWS;
    const uint64_t at =
        (uint64_t)(row * c->text->cols) * row_floats(c->model) * sizeof(float);
    row_call r;
    int rc = row_begin(c, &r, row, err);

    if (rc != 0)
        return rc;
    const int64_t n = r.batch.rows.n_row;

    c->layer = looked ? layer : -1;
    rc = row_load(c, &r, layer, at, in, err);
    if (rc == 0 && layer < n_layer)
        rc = hx_graph_layers(c->graph, layer, layer + 1, err);
    for (int64_t i = 0; rc == 0 && layer == n_layer && i < n; i += n_out)
        rc = hx_graph_out(c->graph, i, HX_MIN(n_out, n - i), err);
    if (rc == 0 && !looked)
        rc = row_save(c, &r, at, out, err);
    c->layer = -1;
    hx_cache_drop(c->cache, r.span.slot);
    return rc;
}

/* All rows. */
static int pass_rows(qz_calib *c, int64_t layer, int in, int out, bool looked,
                     hx_err *err)
{
    stay here, ends = { .layer = -1 };
    int rc = layer_enter(c, &here, layer, err);

    if (rc == 0 && layer == 0)
        rc = layer_enter(c, &ends, c->model->desc.n_layer, err);
    for (int64_t r = 0; rc == 0 && r < c->text->n_row; r++)
        rc = pass_row(c, r, layer, in, out, looked, err);
    layer_leave(c, &ends);
    layer_leave(c, &here);
    return rc;
}

/* ---- Hessians -------------------------------------------------------------------- */

/* Sum to mean, drawn to a multiple of the identity as far as so few rows cannot tell it
 * from one (Ledoit and Wolf 2004, J. Multivariate Analysis 88): an expert that no row
 * reached gets the identity, one with many rows its own Hessian. */
static void shrink(const gram *g, float *sum)
{
    const int64_t k = g->k_pad, real = g->k;
    const double n = (double)g->rows;
    double trace = 0, all = 0;

    hx_dense_mirror(sum, k);
    for (int64_t i = 0; i < k * k; i++) {
        sum[i] /= (float)n;
        all += (double)sum[i] * (double)sum[i];
    }
    for (int64_t i = 0; i < real; i++)
        trace += (double)sum[i * k + i];
    const double mu = trace / (double)real, spread = all - trace * mu,
                 noise = (g->fourth / n - all) / n;
    const double part = spread > 0 ? HX_MIN(HX_MAX(noise / spread, 0), 1) : 1;

    for (int64_t i = 0; i < k * k; i++)
        sum[i] *= (float)(1 - part);
    for (int64_t i = 0; i < real; i++)
        sum[i * k + i] += (float)(part * mu);
}

static void hessians_path(const qz_calib *c, int64_t layer, char path[2200])
{
    snprintf(path, 2200, "%s/hessians-%lld", c->work, (long long)layer);
}

/* File: per Hessian its side (i64, 0: none), then their values in that order. */
static int write_hessians(qz_calib *c, int64_t layer, hx_err *err)
{
    char path[2200];
    uint64_t at = (uint64_t)c->n_gram * sizeof(int64_t);
    int fd, rc = 0;

    hessians_path(c, layer, path);
    if ((fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) < 0)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    for (int64_t i = 0; rc == 0 && i < c->n_gram; i++) {
        const gram *g = &c->gram[i];
        const int64_t k = g->rows > 0 ? g->k_pad : 0;
        const hx_buf sum = { g->sum, (size_t)(k * k) * sizeof(float) };
        float *h = NULL;

        rc = qz_write_at(fd, &k, sizeof k, (uint64_t)i * sizeof k, path, err);
        if (rc != 0 || k == 0)
            continue;
        if ((rc = pull(c, sum, k * k, &h, err)) == 0) {
            shrink(g, h);
            rc = qz_write_at(fd, h, sum.n, at, path, err);
        }
        at += (uint64_t)(k * k) * sizeof(float);
    }
    if (rc == 0 && fdatasync(fd) != 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    close(fd);
    return rc;
}

/* Of layer; n_layer: the input of lm_head's. */
static int64_t n_hessian(const qz_calib *c, int64_t layer)
{
    const hx_model *m = c->model;

    if (layer == m->desc.n_layer)
        return 1;
    return QZ_H_EXPERT + (m->layer[layer].ffn == HX_FFN_MOE ? m->desc.n_expert : 0);
}

int qz_calib_hessian(qz_calib *c, int64_t layer, int32_t hess, float **out, hx_err *err)
{
    const uint64_t sides = (uint64_t)n_hessian(c, layer) * sizeof(int64_t);
    char path[2200];
    uint64_t at = 0;
    int64_t k = 0;
    int fd, rc = 0;

    *out = NULL;
    hessians_path(c, layer, path);
    if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    for (int32_t i = 0; rc == 0 && i <= hess; i++) {
        at += (uint64_t)(k * k) * sizeof(float);
        rc = qz_read_at(fd, &k, sizeof k, (uint64_t)i * sizeof k, path, err);
    }
    if (rc == 0 && k > 0) {
        if ((*out = hx_new(float, k *k)) == NULL)
            rc = hx_fail(err, HX_ENOMEM,
                         "calibration: no memory for a Hessian of %lld inputs",
                         (long long)k);
        else
            rc = qz_read_at(fd, *out, (size_t)(k * k) * sizeof(float), sides + at, path,
                            err);
    }
    close(fd);
    if (rc != 0) {
        hx_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- passes ------------------------------------------------------------------------ */

int qz_calib_pass(qz_calib *c, int64_t layer, hx_err *err)
{
    char in_path[2200], out_path[2200], old[2200];
    int in = -1, out = -1, rc = 0;

    c->n_gram = n_hessian(c, layer);
    if ((c->gram = hx_new(gram, c->n_gram)) == NULL)
        return hx_fail(err, HX_ENOMEM, "calibration: no memory");
    activations_path(c, layer - 1, in_path);
    activations_path(c, layer, out_path);
    if (layer > 1 && (in = open(in_path, O_RDONLY | O_CLOEXEC)) < 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", in_path, strerror(errno));
    if (rc == 0 && layer > 0 &&
        (out = open(out_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666)) < 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", out_path, strerror(errno));
    if (rc == 0 && layer > 0)
        rc = pass_rows(c, layer - 1, in, out, false, err);
    if (rc == 0)
        rc = pass_rows(c, layer, out, -1, true, err);
    if (rc == 0)
        rc = write_hessians(c, layer, err);
    if (rc == 0 && out >= 0 && fdatasync(out) != 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", out_path, strerror(errno));
    if (in >= 0)
        close(in);
    if (out >= 0)
        close(out);
    if (rc == 0 && layer > 0) {
        hessians_path(c, layer - 1, old);
        unlink(old);
    }
    drop_grams(c);
    return rc;
}

/* ---- weights of groups -------------------------------------------------------------- */

/* Variants of the rows: 0 as they are, then one per group with noise in that group, which
 * goes on through the later layers. All move on together, so each layer is read once. */
typedef struct {
    int64_t n, rows; /* variants, rows of text in each */
    int layer[HX_LAYER_MAX * QZ_N_CLASS + 1], class[HX_LAYER_MAX * QZ_N_CLASS + 1];
    double kl[HX_LAYER_MAX * QZ_N_CLASS + 1];
    int fd;
} variants;

static uint64_t variant_at(const qz_calib *c, const variants *v, int64_t variant,
                           int64_t row)
{
    return (uint64_t)((variant * v->rows + row) * c->text->cols) * row_floats(c->model) *
           sizeof(float);
}

static bool has_class(const hx_layer *l, int class)
{
    return class == QZ_ATTN || (class == QZ_DENSE) == (l->ffn == HX_FFN_DENSE);
}

/* One row of variant from through layer, kept as variant to; noisy: class or -1. */
static int step_variant(qz_calib *c, variants *v, int64_t row, int64_t layer,
                        int64_t from, int64_t to, int noisy, hx_err *err)
{
    row_call r;
    int rc = row_begin(c, &r, row, err);

    if (rc != 0)
        return rc;
    rc = row_load(c, &r, layer, variant_at(c, v, from, row), v->fd, err);
    c->layer = layer;
    c->noisy = noisy;
    c->n_noise = 0;
    if (rc == 0 && (rc = hx_graph_layers(c->graph, layer, layer + 1, err)) == 0)
        rc = row_save(c, &r, variant_at(c, v, to, row), v->fd, err);
    c->layer = c->noisy = -1;
    hx_cache_drop(c->cache, r.span.slot);
    return rc;
}

/* Divergence of b from a, of n logits each, in nats. */
static double divergence(const float *a, const float *b, int64_t n)
{
    double top_a = (double)a[0], top_b = (double)b[0], sum_a = 0, sum_b = 0, kl = 0;

    for (int64_t i = 1; i < n; i++) {
        top_a = HX_MAX(top_a, (double)a[i]);
        top_b = HX_MAX(top_b, (double)b[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        sum_a += exp((double)a[i] - top_a);
        sum_b += exp((double)b[i] - top_b);
    }
    const double shift = top_b + log(sum_b) - top_a - log(sum_a);

    for (int64_t i = 0; i < n; i++)
        kl += exp((double)a[i] - top_a) / sum_a * ((double)a[i] - (double)b[i] + shift);
    return kl;
}

/* Logits of all variants of a row, OUT_ROWS positions at a time, against the first. */
static int compare_row(qz_calib *c, variants *v, int64_t row, float *clean, hx_err *err)
{
    const hx_desc *d = &c->model->desc;
    row_call r;
    int rc = row_begin(c, &r, row, err);

    if (rc != 0)
        return rc;
    const int64_t n = r.batch.rows.n_row;

    for (int64_t at = 0; rc == 0 && at < n; at += OUT_ROWS)
        for (int64_t i = 0; rc == 0 && i < v->n; i++) {
            const int64_t m = HX_MIN(OUT_ROWS, n - at);
            float *logits;

            if ((rc = row_load(c, &r, d->n_layer, variant_at(c, v, i, row), v->fd,
                               err)) != 0 ||
                (rc = hx_graph_out(c->graph, at, m, err)) != 0 ||
                (rc = pull(c, hx_graph_logits(c->graph), m * d->n_vocab, &logits, err)) !=
                    0)
                break;
            if (i == 0)
                memcpy(clean, logits, (size_t)(m * d->n_vocab) * sizeof(float));
            for (int64_t p = 0; i > 0 && p < m; p++)
                v->kl[i] += divergence(clean + p * d->n_vocab, logits + p * d->n_vocab,
                                       d->n_vocab);
        }
    hx_cache_drop(c->cache, r.span.slot);
    return rc;
}

/* All variants through a layer; those that begin with it from the clean one. */
static int variants_layer(qz_calib *c, variants *v, int64_t l, hx_err *err)
{
    const int64_t old = v->n;
    int rc = 0;

    for (int k = 0; k < QZ_N_CLASS; k++)
        if (has_class(&c->model->layer[l], k)) {
            v->layer[v->n] = (int)l;
            v->class[v->n++] = k;
        }
    for (int64_t row = 0; rc == 0 && row < v->rows; row++)
        for (int64_t i = v->n - 1; rc == 0 && i >= 0; i--) /* the clean one last */
            rc = step_variant(c, v, row, l, i < old ? i : 0, i,
                              i < old ? -1 : v->class[i], err);
    return rc;
}

static int run_variants(qz_calib *c, variants *v, float *clean, hx_err *err)
{
    const int64_t n_layer = c->model->desc.n_layer;
    stay here, ends;
    int rc = layer_enter(c, &ends, n_layer, err);

    v->n = 1;
    for (int64_t l = 0; rc == 0 && l < n_layer; l++) {
        if ((rc = layer_enter(c, &here, l, err)) == 0)
            rc = variants_layer(c, v, l, err);
        layer_leave(c, &here);
    }
    for (int64_t row = 0; rc == 0 && row < v->rows; row++)
        rc = compare_row(c, v, row, clean, err);
    layer_leave(c, &ends);
    return rc;
}

int qz_calib_weigh(qz_calib *c, double (*weight)[QZ_N_CLASS], int64_t max_rows,
                   hx_err *err)
{
    char path[2200];
    variants *v = hx_new(variants, 1);
    float *clean = hx_new(float, OUT_ROWS * c->model->desc.n_vocab);
    int rc = 0;

    snprintf(path, sizeof path, "%s/variants", c->work);
    if (v == NULL || clean == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "calibration: no memory for logits of %d positions",
                     OUT_ROWS);
    } else if ((v->fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) < 0) {
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    } else {
        v->rows = HX_MIN(max_rows, c->text->n_row);
        rc = run_variants(c, v, clean, err);
        close(v->fd);
        unlink(path);
    }
    for (int64_t i = 1; rc == 0 && i < v->n; i++)
        weight[v->layer[i]][v->class[i]] =
            HX_MAX(v->kl[i], 1e-9 * NOISE) / NOISE /
            (double)HX_MIN(v->rows * c->text->cols, c->text->n_id);
    hx_free(v);
    hx_free(clean);
    return rc;
}

uint64_t qz_calib_weigh_bytes(const hx_model *m, const qz_text *text, int64_t max_rows)
{
    const uint64_t tokens = (uint64_t)(HX_MIN(max_rows, text->n_row) * text->cols);
    uint64_t n = 1;

    for (int64_t l = 0; l < m->desc.n_layer; l++)
        for (int k = 0; k < QZ_N_CLASS; k++)
            n += has_class(&m->layer[l], k);
    return n * tokens * row_floats(m) * sizeof(float);
}

uint64_t qz_calib_bytes(const hx_model *m, const qz_text *text)
{
    const hx_desc *d = &m->desc;
    const uint64_t row = row_floats(m) * sizeof(float);
    const int64_t side[] = { d->width, d->q_rank,
                             HX_MAX(d->kda_heads * d->kda_width,
                                    d->mla_heads * d->v_width),
                             d->width, HX_MAX(d->dense_width, d->shared_width) };
    uint64_t h = 0;

    for (size_t i = 0; i < HX_LEN(side); i++)
        h += (uint64_t)(HX_EXL3_PAD(side[i]) * HX_EXL3_PAD(side[i])) * sizeof(float);
    h += (uint64_t)d->n_expert *
         (uint64_t)(HX_EXL3_PAD(d->expert_width) * HX_EXL3_PAD(d->expert_width)) *
         sizeof(float);
    return 2 * (uint64_t)text->n_id * row + 2 * h;
}
