/* quantize_calib.c - calibration: rows of text through the model one layer at a time, and
 * the Hessian of every input on the way. Called by quantize.c. Rows stand in a file
 * between layers, so memory holds one layer and one row. The model's code is not touched:
 * the device's table of operations is replaced by one that looks at products first. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#include "cli/quantize.h"
#include "dev/dense.h"
#include "dev/exl3_encode.h"
#include "dev/fmt_plain.h"

#define TEXT_MAX (1u << 30)
#define OUT_ROWS 64   /* of logits at a time, which nobody looks at */
#define MIN_ROW  16   /* tokens; a shorter rest of a text is left out */
#define NOISE    1e-3 /* of a product's variance: between 5 and 6 bits */

/* Sum of x x^T over rows, and what the shrinkage needs. */
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
    float *row;  /* scratch for rows of an expert: x, gate, up */
    size_t row_floats;
    float *pad; /* scratch for rows with padding */
    size_t pad_floats;
};

/* ---- text ------------------------------------------------------------------- */

static int read_json_rows(qz_text *t, const hx_json *j, int64_t max_rows, hx_err *err)
{
    const size_t rows = HX_MIN(hx_json_len(j), (size_t)max_rows);

    for (size_t r = 0; r < rows; r++)
        if (hx_json_len(hx_json_at(j, r)) != (size_t)t->cols && r + 1 < rows)
            return hx_fail(err, HX_EFORMAT,
                           "calibration: row %zu has %zu ids, expected %lld as in row 0",
                           r, hx_json_len(hx_json_at(j, r)), (long long)t->cols);
    if ((t->id = hx_realloc(NULL, (rows * (size_t)t->cols + 1) * sizeof *t->id)) == NULL)
        return hx_fail(err, HX_ENOMEM, "calibration: no memory");
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < hx_json_len(hx_json_at(j, r)); i++)
            t->id[t->n_id++] = (int32_t)hx_json_int(hx_json_at(hx_json_at(j, r), i), -1);
    return 0;
}

static int read_text_rows(qz_text *t, hx_str text, const char *model_dir, hx_err *err)
{
    char path[2200], *json = NULL;
    hx_tok *tok = NULL;
    hx_ids ids = { 0 };
    size_t n;
    int rc;

    snprintf(path, sizeof path, "%s/tokenizer.json", model_dir);
    if ((rc = hx_file_read(path, TEXT_MAX, &json, &n, err)) != 0)
        return rc;
    if ((rc = hx_tok_open(&tok, (hx_str) { json, n }, path, err)) == 0)
        rc = hx_tok_encode(tok, text, NULL, &ids, err);
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
        rc = read_text_rows(t, (hx_str) { text, n }, model_dir, err);
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

static int reserve(float **p, size_t *have, int64_t want, hx_err *err)
{
    float *more;

    if ((size_t)want <= *have)
        return 0;
    if ((more = hx_realloc(*p, (size_t)want * sizeof(float))) == NULL)
        return hx_fail(err, HX_ENOMEM, "calibration: no memory for %lld floats",
                       (long long)want);
    *p = more;
    *have = (size_t)want;
    return 0;
}

static bool add_norms(const float *x, int64_t k, double *fourth)
{
    double sum = 0;

    for (int64_t i = 0; i < k; i++)
        sum += (double)x[i] * (double)x[i];
    if (!isfinite(sum))
        return false;
    *fourth += sum * sum;
    return true;
}

/* Rows that are not finite do not count. */
static int look(qz_calib *c, int64_t which, const float *x, int64_t ldx, int64_t rows,
                int64_t k, hx_err *err)
{
    gram *g = &c->gram[which];
    int64_t n = 0;
    int rc;

    if (rows == 0)
        return 0;
    if (g->sum == NULL) {
        g->k = k;
        g->k_pad = HX_EXL3_PAD(k);
        if ((g->sum = hx_new(float, g->k_pad * g->k_pad)) == NULL)
            return hx_fail(err, HX_ENOMEM,
                           "calibration: no memory for a Hessian of %lld inputs",
                           (long long)k);
    }
    if ((rc = reserve(&c->pad, &c->pad_floats, rows * g->k_pad, err)) != 0)
        return rc;
    for (int64_t r = 0; r < rows; r++) {
        float *to = c->pad + n * g->k_pad;

        if (!add_norms(x + r * ldx, k, &g->fourth))
            continue;
        memcpy(to, x + r * ldx, (size_t)k * sizeof(float));
        memset(to + k, 0, (size_t)(g->k_pad - k) * sizeof(float));
        n++;
    }
    g->rows += n;
    hx_dense_gram(c->dev->pool, g->sum, g->k_pad, c->pad, g->k_pad, n, g->k_pad, 1);
    return 0;
}

/* Adds to each output what a search of distortion NOISE would add to it, about: noise in
 * proportion to the output's rms over the rows. times: how many such errors at once. */
static void add_noise(qz_calib *c, float *y, int64_t ldy, int64_t rows, int64_t n,
                      int times)
{
    const uint64_t seed = (uint64_t)c->n_noise++ << 32;

    for (int64_t j = 0; j < n; j++) {
        double sum = 0;

        for (int64_t r = 0; r < rows; r++)
            sum += (double)y[r * ldy + j] * (double)y[r * ldy + j];
        const double rms = sqrt(sum / (double)rows * NOISE * times);

        for (int64_t r = 0; r < rows && isfinite(rms); r++)
            y[r * ldy + j] +=
                (float)(rms * hx_rng_normal(seed | (uint64_t)j, (uint64_t)r));
    }
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
    if (c->noisy >= 0 && class_of(c, a->w) == c->noisy)
        add_noise(c, a->y.p, a->ldy, a->rows, a->w->n, 1);
    return 0;
}

/* The input of one expert's down for the rows that picked it. */
static int look_at_expert(qz_calib *c, const hx_moe_args *a, int32_t e, hx_err *err)
{
    const hx_expert *w = &a->expert[e];
    const int32_t *id = a->id.p;
    const int64_t k = w->gate.k, f = w->gate.n;
    int64_t n = 0;
    int rc = reserve(&c->row, &c->row_floats, a->rows * (k + 2 * f), err);

    if (rc != 0)
        return rc;
    float *x = c->row, *gate = x + a->rows * k, *up = gate + a->rows * f;

    for (int64_t i = 0; i < a->rows * a->active; i++)
        if (id[i] == e)
            memcpy(x + n++ * k, (const float *)a->x.p + i / a->active * k,
                   (size_t)k * sizeof(float));
    if (n == 0)
        return 0;
    const hx_buf bx = { x, (size_t)(n * k) * sizeof(float) },
                 bg = { gate, (size_t)(n * f) * sizeof(float) },
                 bu = { up, (size_t)(n * f) * sizeof(float) };
    hx_matmul_args mul = {
        .y = bg, .x = bx, .w = &w->gate, .rows = n, .ldx = k, .ldy = f, .prefill = true
    };
    const hx_swiglu_args act = {
        .y = bg, .gate = bg, .up = bu, .rows = n, .dim = f, .limit = a->limit
    };

    if ((rc = c->ops->matmul(c->dev, &mul, err)) != 0)
        return rc;
    mul.y = bu;
    mul.w = &w->up;
    if ((rc = c->ops->matmul(c->dev, &mul, err)) != 0 ||
        (rc = c->ops->swiglu(c->dev, &act, err)) != 0)
        return rc;
    return look(c, QZ_H_EXPERT + e, gate, f, n, f, err);
}

static int spy_moe(hx_dev *d, const hx_moe_args *a, hx_err *err)
{
    qz_calib *c = owner(d);
    int rc;

    if (c->gram != NULL && c->layer >= 0 && c->layer < c->model->desc.n_layer &&
        a->expert == c->model->layer[c->layer].expert)
        for (int32_t e = 0; e < (int32_t)a->n_expert; e++)
            if ((rc = look_at_expert(c, a, e, err)) != 0)
                return rc;
    if ((rc = c->ops->moe(d, a, err)) == 0 && c->noisy == QZ_ROUTED)
        add_noise(c, a->y.p, a->expert->down.n, a->rows * a->active, a->expert->down.n,
                  3);
    return rc;
}

/* ---- opening ------------------------------------------------------------------ */

int qz_calib_open(qz_calib **out, hx_model *m, const qz_text *text, const char *work,
                  int n_threads, const char *cpus, hx_err *err)
{
    const int64_t cols = text->cols;
    const hx_dev_opt opt = { .n_threads = n_threads,
                             .cpus = cpus,
                             .limits = hx_model_limits(&m->desc, cols, cols) };
    qz_calib *c = hx_new(qz_calib, 1);
    int rc;

    *out = NULL;
    if (c == NULL)
        return hx_fail(err, HX_ENOMEM, "calibration: no memory");
    c->model = m;
    c->text = text;
    c->layer = c->noisy = -1;
    snprintf(c->work, sizeof c->work, "%s", work);
    if ((rc = hx_dev_open(&c->dev, &opt, err)) != 0 ||
        (rc = hx_cache_open(&c->cache, &m->desc, c->dev, 1, cols,
                            (int32_t)((cols + HX_PAGE - 1) / HX_PAGE), HX_CACHE_F32,
                            err)) != 0 ||
        (rc = hx_graph_open(&c->graph, m, c->dev, c->cache, cols, OUT_ROWS, cols, err)) !=
            0) {
        qz_calib_close(c);
        return rc;
    }
    c->ops = c->dev->ops;
    c->spy = *c->ops;
    c->spy.matmul = spy_matmul;
    c->spy.moe = spy_moe;
    c->dev->ops = &c->spy;
    *out = c;
    return 0;
}

static void drop_grams(qz_calib *c)
{
    for (int64_t i = 0; i < c->n_gram; i++)
        hx_free(c->gram[i].sum);
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
    hx_dev_close(c->dev);
    hx_free(c->row);
    hx_free(c->pad);
    hx_free(c);
}

hx_pool *qz_calib_pool(const qz_calib *c)
{
    return c->dev->pool;
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

static size_t row_floats(const qz_calib *c)
{
    return (size_t)(c->model->desc.streams * c->model->desc.width);
}

static void activations_path(const qz_calib *c, int64_t layer, char path[2200])
{
    snprintf(path, 2200, "%s/rows-%lld", c->work, (long long)(layer & 1));
}

/* Row row before layer: embedded, or from the file in. */
static int row_load(qz_calib *c, const row_call *r, int64_t row, int64_t layer, int in,
                    hx_err *err)
{
    const uint64_t bytes = row_floats(c) * sizeof(float);

    if (layer == 0)
        return hx_graph_begin(c->graph, &r->batch, err);
    const int rc = hx_graph_resume(c->graph, &r->batch, layer, err);

    return rc != 0
               ? rc
               : qz_read_at(in, hx_graph_streams(c->graph).p,
                            (size_t)r->batch.rows.n_row * bytes,
                            (uint64_t)(row * c->text->cols) * bytes, "activations", err);
}

static int pass_row(qz_calib *c, int64_t row, int64_t layer, int in, int out, hx_err *err)
{
    const int64_t n_layer = c->model->desc.n_layer, n_out = OUT_ROWS;
    const uint64_t bytes = row_floats(c) * sizeof(float);
    row_call r;
    int rc = row_begin(c, &r, row, err);

    if (rc != 0)
        return rc;
    const int64_t n = r.batch.rows.n_row;

    c->layer = -1;
    rc = row_load(c, &r, row, HX_MAX(layer - 1, 0), in, err);
    if (rc == 0 && layer > 0 &&
        (rc = hx_graph_layers(c->graph, layer - 1, layer, err)) == 0)
        rc = qz_write_at(out, hx_graph_streams(c->graph).p, (size_t)n * bytes,
                         (uint64_t)(row * c->text->cols) * bytes, "activations", err);
    c->layer = layer;
    if (rc == 0 && layer < n_layer)
        rc = hx_graph_layers(c->graph, layer, layer + 1, err);
    for (int64_t at = 0; rc == 0 && layer == n_layer && at < n; at += n_out)
        rc = hx_graph_out(c->graph, at, HX_MIN(n_out, n - at), err);
    c->layer = -1;
    hx_cache_drop(c->cache, r.span.slot);
    return rc;
}

/* ---- Hessians -------------------------------------------------------------------- */

/* Sum to mean, drawn to a multiple of the identity as far as so few rows cannot tell it
 * from one (Ledoit and Wolf 2004, J. Multivariate Analysis 88): an expert that no row
 * reached gets the identity, one with many rows its own Hessian. */
static void shrink(gram *g)
{
    const int64_t k = g->k_pad, real = g->k;
    const double n = (double)g->rows;
    double trace = 0, all = 0;

    hx_dense_mirror(g->sum, k);
    for (int64_t i = 0; i < k * k; i++) {
        g->sum[i] /= (float)n;
        all += (double)g->sum[i] * (double)g->sum[i];
    }
    for (int64_t i = 0; i < real; i++)
        trace += (double)g->sum[i * k + i];
    const double mu = trace / (double)real, spread = all - trace * mu,
                 noise = (g->fourth / n - all) / n;
    const double part = spread > 0 ? HX_MIN(HX_MAX(noise / spread, 0), 1) : 1;

    for (int64_t i = 0; i < k * k; i++)
        g->sum[i] *= (float)(1 - part);
    for (int64_t i = 0; i < real; i++)
        g->sum[i * k + i] += (float)(part * mu);
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
        gram *g = &c->gram[i];
        const int64_t k = g->rows > 0 ? g->k_pad : 0;

        if (k > 0)
            shrink(g);
        if ((rc = qz_write_at(fd, &k, sizeof k, (uint64_t)i * sizeof k, path, err)) == 0)
            rc = qz_write_at(fd, g->sum, (size_t)(k * k) * sizeof(float), at, path, err);
        at += (uint64_t)(k * k) * sizeof(float);
    }
    if (rc == 0 && fdatasync(fd) != 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    close(fd);
    return rc;
}

int qz_calib_hessian(qz_calib *c, int64_t layer, int32_t hess, float **out, hx_err *err)
{
    char path[2200];
    uint64_t at = 0;
    int64_t k = 0;
    int fd, rc = 0;
    const int64_t n =
        layer < c->model->desc.n_layer
            ? QZ_H_EXPERT +
                  (c->model->layer[layer].ffn == HX_FFN_MOE ? c->model->desc.n_expert : 0)
            : 1;

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
            rc = hx_fail(err, HX_ENOMEM, "calibration: no memory for a Hessian");
        else
            rc = qz_read_at(fd, *out, (size_t)(k * k) * sizeof(float),
                            at + (uint64_t)n * sizeof k, path, err);
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
    const hx_desc *d = &c->model->desc;
    const bool moe = layer < d->n_layer && c->model->layer[layer].ffn == HX_FFN_MOE;
    char in_path[2200], out_path[2200], old[2200];
    int in = -1, out = -1, rc = 0;

    c->n_gram = layer < d->n_layer ? QZ_H_EXPERT + (moe ? d->n_expert : 0) : 1;
    if ((c->gram = hx_new(gram, c->n_gram)) == NULL)
        return hx_fail(err, HX_ENOMEM, "calibration: no memory");
    activations_path(c, layer - 1, in_path);
    activations_path(c, layer, out_path);
    if (layer > 1 && (in = open(in_path, O_RDONLY | O_CLOEXEC)) < 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", in_path, strerror(errno));
    if (rc == 0 && layer > 0 &&
        (out = open(out_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666)) < 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", out_path, strerror(errno));
    for (int64_t r = 0; rc == 0 && r < c->text->n_row; r++)
        rc = pass_row(c, r, layer, in, out, err);
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
    return (uint64_t)((variant * v->rows + row) * c->text->cols) * row_floats(c) *
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
    const size_t bytes = (size_t)r.batch.rows.n_row * row_floats(c) * sizeof(float);

    if (layer == 0)
        rc = hx_graph_begin(c->graph, &r.batch, err);
    else if ((rc = hx_graph_resume(c->graph, &r.batch, layer, err)) == 0)
        rc = qz_read_at(v->fd, hx_graph_streams(c->graph).p, bytes,
                        variant_at(c, v, from, row), "activations", err);
    c->layer = layer;
    c->noisy = noisy;
    c->n_noise = 0;
    if (rc == 0 && (rc = hx_graph_layers(c->graph, layer, layer + 1, err)) == 0)
        rc = qz_write_at(v->fd, hx_graph_streams(c->graph).p, bytes,
                         variant_at(c, v, to, row), "activations", err);
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
            const float *logits = hx_graph_logits(c->graph).p;

            if ((rc = hx_graph_resume(c->graph, &r.batch, d->n_layer, err)) != 0 ||
                (rc = qz_read_at(v->fd, hx_graph_streams(c->graph).p,
                                 (size_t)n * row_floats(c) * sizeof(float),
                                 variant_at(c, v, i, row), "activations", err)) != 0 ||
                (rc = hx_graph_out(c->graph, at, m, err)) != 0)
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

static int run_variants(qz_calib *c, variants *v, float *clean, hx_err *err)
{
    const int64_t n_layer = c->model->desc.n_layer;
    int rc;

    v->n = 1;
    for (int64_t l = 0; l < n_layer; l++) {
        const int64_t old = v->n;

        for (int k = 0; k < QZ_N_CLASS; k++)
            if (has_class(&c->model->layer[l], k)) {
                v->layer[v->n] = (int)l;
                v->class[v->n++] = k;
            }
        for (int64_t row = 0; row < v->rows; row++)
            for (int64_t i = v->n - 1; i >= 0; i--) /* the clean one last: new ones
                                                     * start from it */
                if ((rc = step_variant(c, v, row, l, i < old ? i : 0, i,
                                       i < old ? -1 : v->class[i], err)) != 0)
                    return rc;
    }
    for (int64_t row = 0; row < v->rows; row++)
        if ((rc = compare_row(c, v, row, clean, err)) != 0)
            return rc;
    return 0;
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
        rc = hx_fail(err, HX_ENOMEM, "calibration: no memory");
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

uint64_t qz_calib_bytes(const hx_model *m, const qz_text *text)
{
    const hx_desc *d = &m->desc;
    const uint64_t row = (uint64_t)(d->streams * d->width) * sizeof(float);
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
