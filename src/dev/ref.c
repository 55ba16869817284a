/* ref.c - what every operation means: scalar C, sums in double, one rounding to f32 when
 * a result is stored. Called through hx_ref_ops after ops.c has checked the arguments;
 * the fast backends are tested against it.
 *
 * Written to be read beside the formulas of dev.h. Independent parts are shared out to
 * the pool; nothing here depends on how. It must never be optimised at the price of
 * clarity. */
#include <math.h>

#include "dev/fmt_exl3.h"
#include "dev/fmt_page.h"
#include "dev/lane.h"
#include "dev/ref.h"

enum {
    BLOCK = 128,     /* inputs and outputs of a product that are decoded together */
    ROWS = 256,      /* rows that share one decoded block */
    MAX_STREAMS = 8, /* this and the next two: ops.c refuses more */
    MAX_TAPS = 8,
    MAX_POOL = 8,
    COLS = 16, /* columns of a KDA state that are carried together */
};

/* ---- small parts ----------------------------------------------------- */

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double silu(double x)
{
    return x / (1.0 + exp(-x));
}

/* silu(min(gate, limit)) * clamp(up, -limit, limit); limit 0: no clamp */
static double gated(double gate, double up, double limit)
{
    if (limit > 0) {
        gate = fmin(gate, limit);
        up = fmax(-limit, fmin(up, limit));
    }
    return silu(gate) * up;
}

/* The part of the scratch that belongs to one worker, behind shared bytes for all. */
static void *worker_scratch(const hx_dev *dev, size_t shared, size_t each, int worker)
{
    return (char *)dev->scratch + shared + each * (size_t)worker;
}

static int fits(const hx_dev *dev, const char *op, size_t shared, size_t each,
                hx_err *err)
{
    const size_t need = shared + each * (size_t)hx_pool_size(dev->pool);

    if (need <= dev->scratch_bytes)
        return 0;
    return hx_fail(err, HX_EARG,
                   "%s: needs %zu bytes of scratch, the device was opened with %zu; "
                   "open it with larger limits",
                   op, need, dev->scratch_bytes);
}

/* ---- ranking --------------------------------------------------------- */

/* Entries in falling order of key, equal ones by lower id, found one at a time:
 * e[0..left) is a heap, e[left..n) holds the best n - left, best last. */
typedef struct {
    double key;
    int32_t id;
} entry;
typedef struct {
    entry *e;
    int64_t n, left;
} ranking;

static bool better(entry a, entry b)
{
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}

static void sift(entry *e, int64_t i, int64_t n)
{
    for (int64_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && better(e[c + 1], e[c]))
            c++;
        if (!better(e[c], e[i]))
            return;
        const entry t = e[i];
        e[i] = e[c];
        e[c] = t;
    }
}

static ranking rank(entry *e, int64_t n)
{
    for (int64_t i = n / 2; i-- > 0;)
        sift(e, i, n);
    return (ranking) { e, n, n };
}

/* The entry that i others precede, i < n. */
static entry ranked(ranking *r, int64_t i)
{
    while (r->n - r->left <= i) {
        const entry t = r->e[0];

        r->left--;
        r->e[0] = r->e[r->left];
        r->e[r->left] = t;
        sift(r->e, 0, r->left);
    }
    return r->e[r->n - 1 - i];
}

/* ---- products with weight matrices ----------------------------------- */

/* y[r, h, o] = sum over i of W_h[o, i] x[r, h, i] for every row and head. W_h is the rows
 * first + h * stride .. of m, transposed on request. x is f32 or double, y as well. */
typedef struct {
    const hx_mat *m;
    int64_t rows, heads, n_in, n_out, first, stride;
    bool transposed;
    const float *xf;
    const double *xd;
    int64_t ldx;
    const int64_t *from; /* row r is row from[r] of x; NULL: r */
    float *yf;
    double *yd;
    int64_t ldy;
    const int64_t *to; /* as from, for y */
    hx_dev *dev;
    size_t shared; /* bytes of scratch that are in use */
} product;

typedef struct {
    double w[BLOCK][BLOCK]; /* [input][output] */
    double x[BLOCK];
    double y[ROWS][BLOCK];
} product_work;

/* P a for one block of 128: Sylvester-Hadamard over sqrt(128). exl3.md 5 */
static void rotate(double *a)
{
    for (int d = 1; d < BLOCK; d *= 2)
        for (int i = 0; i < BLOCK; i++)
            if ((i & d) == 0) {
                const double s = a[i] + a[i + d], t = a[i] - a[i + d];

                a[i] = s;
                a[i + d] = t;
            }
    for (int i = 0; i < BLOCK; i++)
        a[i] /= sqrt(128.0);
}

/* W[n, k] of a plain format. */
static double weight_at(const hx_mat *m, int64_t n, int64_t k)
{
    const int64_t i = n * m->k + k;

    switch (m->fmt) {
    case HX_FMT_F32:
        return hx_f32_at(m->w, i);
    case HX_FMT_F16:
        return hx_f16_at(m->w, i);
    case HX_FMT_BF16:
        return hx_bf16_at(m->w, i);
    case HX_FMT_FP8:
        return (double)hx_fp8_at(m->w, i) * hx_fp8_scale(m, n, k);
    default:
        hx_assert(!"a plain format");
        return 0;
    }
}

/* Rotated weights: 8 x 8 tiles of 16 x 16. */
static void exl3_block(const hx_mat *m, int64_t i0, int64_t o0, double w[BLOCK][BLOCK])
{
    float tile[256];

    for (int ti = 0; ti < BLOCK; ti += 16)
        for (int to = 0; to < BLOCK; to += 16) {
            hx_exl3_tile(m, (i0 + ti) / 16, (o0 + to) / 16, tile);
            for (int i = 0; i < 16; i++)
                for (int o = 0; o < 16; o++)
                    w[ti + i][to + o] = tile[16 * i + o];
        }
}

static void plain_block(const product *p, int64_t row0, int64_t i0, int64_t o0,
                        double w[BLOCK][BLOCK])
{
    for (int64_t i = 0; i < BLOCK; i++)
        for (int64_t o = 0; o < BLOCK; o++) {
            const bool inside = i0 + i < p->n_in && o0 + o < p->n_out;

            w[i][o] = !inside         ? 0
                      : p->transposed ? weight_at(p->m, row0 + i0 + i, o0 + o)
                                      : weight_at(p->m, row0 + o0 + o, i0 + i);
        }
}

/* Inputs i0 .. i0 + 127 of row r, scaled and rotated for EXL3. */
static void load_inputs(const product *p, int64_t r, int64_t head, int64_t i0, double *x)
{
    const int64_t at = (p->from != NULL ? p->from[r] : r) * p->ldx + head * p->n_in + i0;

    for (int64_t i = 0; i < BLOCK; i++)
        x[i] = i0 + i >= p->n_in ? 0
               : p->xd != NULL   ? p->xd[at + i]
                                 : (double)p->xf[at + i];
    if (p->m->fmt == HX_FMT_EXL3) {
        for (int64_t i = 0; i < BLOCK; i++)
            x[i] *= hx_f16_at(p->m->suh, i0 + i);
        rotate(x);
    }
}

static void store_outputs(const product *p, int64_t r, int64_t head, int64_t o0,
                          double *y)
{
    const int64_t at = (p->to != NULL ? p->to[r] : r) * p->ldy + head * p->n_out + o0;
    const int64_t n = HX_MIN(BLOCK, p->n_out - o0);

    if (p->m->fmt == HX_FMT_EXL3) {
        rotate(y);
        for (int64_t o = 0; o < n; o++)
            y[o] *= hx_f16_at(p->m->svh, o0 + o);
    }
    for (int64_t o = 0; o < n; o++) {
        if (p->m->bias != NULL)
            y[o] += hx_f16_at(p->m->bias, o0 + o);
        if (p->yd != NULL)
            p->yd[at + o] = y[o];
        else
            p->yf[at + o] = (float)y[o];
    }
}

static void multiply_block(const double *restrict x, double w[BLOCK][BLOCK],
                           double *restrict y)
{
    for (int i = 0; i < BLOCK; i++) {
        const double xi = x[i], *restrict wi = w[i];

        for (int o = 0; o < BLOCK; o++)
            y[o] += xi * wi[o];
    }
}

/* Items are blocks of 128 outputs, head after head. */
static void product_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const product *p = ud;
    product_work *k = worker_scratch(p->dev, p->shared, sizeof(*k), worker);
    const int64_t per_head = (p->n_out + BLOCK - 1) / BLOCK;

    for (int64_t item = begin; item < end; item++) {
        const int64_t head = item / per_head, o0 = item % per_head * BLOCK;

        for (int64_t r0 = 0; r0 < p->rows; r0 += ROWS) {
            const int64_t n = HX_MIN(ROWS, p->rows - r0);

            memset(k->y, 0, (size_t)n * sizeof(k->y[0]));
            for (int64_t i0 = 0; i0 < p->n_in; i0 += BLOCK) {
                if (p->m->fmt == HX_FMT_EXL3)
                    exl3_block(p->m, i0, o0, k->w);
                else
                    plain_block(p, p->first + head * p->stride, i0, o0, k->w);
                for (int64_t r = 0; r < n; r++) {
                    load_inputs(p, r0 + r, head, i0, k->x);
                    multiply_block(k->x, k->w, k->y[r]);
                }
            }
            for (int64_t r = 0; r < n; r++)
                store_outputs(p, r0 + r, head, o0, k->y[r]);
        }
    }
}

/* The whole matrix as one head. */
static product whole(hx_dev *dev, const hx_mat *m, int64_t rows)
{
    return (product) { .m = m,
                       .rows = rows,
                       .heads = 1,
                       .n_in = m->k,
                       .n_out = m->n,
                       .ldx = m->k,
                       .ldy = m->n,
                       .dev = dev };
}

static int multiply(product *p, const char *op, hx_err *err)
{
    const int rc = fits(p->dev, op, p->shared, sizeof(product_work), err);

    if (rc != 0)
        return rc;
    hx_pool_run(p->dev->pool, p->heads * ((p->n_out + BLOCK - 1) / BLOCK), 1,
                product_part, p);
    return 0;
}

static int ref_matmul(hx_dev *dev, const hx_matmul_args *a, hx_err *err)
{
    product p = whole(dev, a->w, a->rows);

    p.xf = a->x.p;
    p.ldx = a->ldx;
    p.yf = a->y.p;
    p.ldy = a->ldy;
    const int rc = multiply(&p, "matmul", err);
    if (rc != 0 || a->beside == NULL)
        return rc;
    hx_matmul_args beside = *a->beside;
    beside.rows = a->rows;
    return ref_matmul(dev, &beside, err);
}

static int ref_head_matmul(hx_dev *dev, const hx_head_matmul_args *a, hx_err *err)
{
    product p = whole(dev, a->w, a->rows);

    p.heads = a->heads;
    p.n_in = a->transposed ? a->n : a->w->k;
    p.n_out = a->transposed ? a->w->k : a->n;
    p.first = a->first;
    p.stride = a->stride;
    p.transposed = a->transposed;
    p.xf = a->x.p;
    p.ldx = p.heads * p.n_in;
    p.yf = a->y.p;
    p.ldy = p.heads * p.n_out;
    return multiply(&p, "head_matmul", err);
}

/* Expert x on n rows: from[i] is the row of a->x, to[i] the row of a->y. What lies
 * between the products stays in double. from is the start of the scratch, which holds
 * ROWS of each. */
static int expert_rows(hx_dev *dev, const hx_moe_args *a, const hx_expert *x,
                       int64_t *from, const int64_t *to, int64_t n, hx_err *err)
{
    const int64_t f = x->gate.n;
    double *gate = (double *)(from + 2 * ROWS), *up = gate + ROWS * f;
    product p = whole(dev, &x->gate, n);
    int rc;

    p.shared =
        (size_t)(2 * ROWS) * sizeof(int64_t) + (size_t)(2 * ROWS * f) * sizeof(double);
    p.xf = a->x.p;
    p.from = from;
    p.yd = gate;
    if ((rc = multiply(&p, "moe", err)) != 0)
        return rc;
    p.m = &x->up;
    p.yd = up;
    if ((rc = multiply(&p, "moe", err)) != 0)
        return rc;
    for (int64_t i = 0; i < n * f; i++)
        gate[i] = gated(gate[i], up[i], a->limit);

    product down = whole(dev, &x->down, n);
    down.shared = p.shared;
    down.xd = gate;
    down.yf = a->y.p;
    down.to = to;
    return multiply(&down, "moe", err);
}

static int ref_moe(hx_dev *dev, const hx_moe_args *a, hx_err *err)
{
    const int32_t *id = a->id.p;
    const int64_t n_pick = a->rows * a->active;
    int64_t *from = dev->scratch, *to = from + ROWS;
    int rc;

    if ((rc = fits(dev, "moe", (size_t)(2 * ROWS) * sizeof(int64_t), 0, err)) != 0)
        return rc;
    for (int64_t e = a->first; e < hx_moe_end(a); e++) {
        int64_t n = 0;

        for (int64_t i = 0; i < n_pick; i++) {
            if (id[i] == e) {
                from[n] = i / a->active;
                to[n++] = i;
            }
            if (n > 0 && (n == ROWS || i + 1 == n_pick)) {
                const hx_expert x = hx_moe_expert(a, e);

                if ((rc = expert_rows(dev, a, &x, from, to, n, err)) != 0)
                    return rc;
                n = 0;
            }
        }
    }
    return 0;
}

static int ref_router(hx_dev *dev, const hx_router_args *a, hx_err *err)
{
    const int64_t n_expert = a->w->n;
    const float *bias = a->bias.p;
    product p = whole(dev, a->w, a->rows);
    int rc;

    p.xf = a->x.p;
    p.yf = a->score.p;
    p.shared = (size_t)n_expert * sizeof(entry);
    if ((rc = multiply(&p, "router", err)) != 0)
        return rc;
    for (int64_t r = 0; r < a->rows; r++) {
        float *sc = (float *)a->score.p + r * n_expert;
        float *weight = (float *)a->weight.p + r * a->active;
        int32_t *id = (int32_t *)a->id.p + r * a->active;
        entry *e = dev->scratch;
        double sum = 0;

        for (int64_t i = 0; i < n_expert; i++) {
            sc[i] = (float)sigmoid(sc[i]);
            e[i] = (entry) { (double)sc[i] + bias[i], (int32_t)i };
        }
        ranking best = rank(e, n_expert);
        for (int64_t i = 0; i < a->active; i++) {
            id[i] = ranked(&best, i).id;
            sum += sc[id[i]];
        }
        for (int64_t i = 0; i < a->active; i++)
            weight[i] = (float)(sc[id[i]] / (sum + 1e-20) * a->factor);
    }
    return 0;
}

static int ref_plan(hx_dev *dev, const hx_plan_args *a, hx_err *err)
{
    return hx_lane_plan(dev, a, err);
}

static int ref_combine(hx_dev *dev, const hx_combine_args *a, hx_err *err)
{
    const float *part = a->part.p, *base = a->base.p, *weight = a->weight.p;
    float *y = a->y.p;

    (void)dev, (void)err;
    if (a->there.p != NULL)
        hx_lane_take(a);
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t i = 0; i < a->dim; i++) {
            double sum = base[r * a->dim + i];

            for (int64_t p = r * a->active; p < (r + 1) * a->active; p++)
                sum += (double)weight[p] * part[p * a->dim + i];
            y[r * a->dim + i] = (float)sum;
        }
    return 0;
}

/* ---- rows on their own ----------------------------------------------- */

static int ref_embed(hx_dev *dev, const hx_embed_args *a, hx_err *err)
{
    const int32_t *id = a->id.p;
    const int64_t dim = a->table->k;
    float *y = a->y.p;

    (void)dev, (void)err;
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t s = 0; s < a->streams; s++)
            for (int64_t i = 0; i < dim; i++)
                *y++ = (float)weight_at(a->table, id[r], i);
    return 0;
}

static int ref_rmsnorm(hx_dev *dev, const hx_rmsnorm_args *a, hx_err *err)
{
    const float *x = a->x.p, *w = a->w.p;
    float *y = a->y.p;

    (void)dev, (void)err;
    for (int64_t r = 0; r < a->rows; r++, x += a->ldx, y += a->ldy) {
        double ss = 0;

        for (int64_t i = 0; i < a->dim; i++)
            ss += (double)x[i] * x[i];
        const double scale = 1.0 / sqrt(ss / (double)a->dim + (double)a->eps);
        for (int64_t i = 0; i < a->dim; i++)
            y[i] = (float)(x[i] * scale * (w != NULL ? (double)w[i] : 1.0));
    }
    return 0;
}

static int ref_layernorm(hx_dev *dev, const hx_layernorm_args *a, hx_err *err)
{
    const float *x = a->x.p, *w = a->w.p, *b = a->b.p;
    float *y = a->y.p;

    (void)dev, (void)err;
    for (int64_t r = 0; r < a->rows; r++, x += a->ldx, y += a->ldy) {
        double mean = 0, var = 0;

        for (int64_t i = 0; i < a->dim; i++)
            mean += x[i];
        mean /= (double)a->dim;
        for (int64_t i = 0; i < a->dim; i++)
            var += (x[i] - mean) * (x[i] - mean);
        const double scale = 1.0 / sqrt(var / (double)a->dim + (double)a->eps);
        for (int64_t i = 0; i < a->dim; i++)
            y[i] = (float)((x[i] - mean) * scale * (w != NULL ? (double)w[i] : 1.0) +
                           (b != NULL ? (double)b[i] : 0.0));
    }
    return 0;
}

static int ref_swiglu(hx_dev *dev, const hx_swiglu_args *a, hx_err *err)
{
    const float *gate = a->gate.p, *up = a->up.p;
    float *y = a->y.p;

    (void)dev, (void)err;
    for (int64_t i = 0; i < a->rows * a->dim; i++)
        y[i] = (float)gated(gate[i], up[i], a->limit);
    return 0;
}

/* ---- streams --------------------------------------------------------- */

/* comb becomes doubly stochastic up to eps: softmax of each row, then iters column and
 * iters - 1 row normalisations. glm5_next.md 3 */
static void sinkhorn(double *comb, int64_t n, double eps, int32_t iters)
{
    for (int64_t i = 0; i < n; i++) {
        double *row = comb + i * n, top = row[0], sum = 0;

        for (int64_t j = 1; j < n; j++)
            top = fmax(top, row[j]);
        for (int64_t j = 0; j < n; j++)
            sum += row[j] = exp(row[j] - top);
        for (int64_t j = 0; j < n; j++)
            row[j] = row[j] / sum + eps;
    }
    for (int32_t turn = 0; turn < 2 * iters - 1; turn++) {
        const int64_t step = turn % 2 == 0 ? n : 1; /* along columns, then rows */

        for (int64_t line = 0; line < n; line++) {
            double *c = comb + line * (step == n ? 1 : n), sum = 0;

            for (int64_t i = 0; i < n; i++)
                sum += c[i * step];
            for (int64_t i = 0; i < n; i++)
                c[i * step] /= sum + eps;
        }
    }
}

static void hc_mix_row(const hx_hc_mix_args *a, int64_t r)
{
    const int64_t n = a->streams_n, width = n * a->dim;
    const float *f = (const float *)a->streams.p + r * width, *base = a->base.p;
    const float *scale = a->scale.p;
    float *x = (float *)a->x.p + r * a->dim, *post = (float *)a->post.p + r * n;
    float *comb = (float *)a->comb.p + r * n * n;
    double m[MAX_STREAMS * (2 + MAX_STREAMS)], pre[MAX_STREAMS], ss = 0;

    for (int64_t i = 0; i < width; i++)
        ss += (double)f[i] * f[i];
    const double norm = 1.0 / sqrt(ss / (double)width + (double)a->norm_eps);
    for (int64_t j = 0; j < n * (2 + n); j++) {
        const double part = scale[j < n ? 0 : j < 2 * n ? 1 : 2];

        m[j] = 0;
        for (int64_t i = 0; i < width; i++)
            m[j] += weight_at(a->fn, j, i) * f[i];
        m[j] = m[j] * norm * part + base[j];
    }
    for (int64_t i = 0; i < n; i++) {
        pre[i] = sigmoid(m[i]) + (double)a->eps;
        post[i] = (float)(2 * sigmoid(m[n + i]));
    }
    sinkhorn(m + 2 * n, n, a->eps, a->iters);
    for (int64_t i = 0; i < n * n; i++)
        comb[i] = (float)m[2 * n + i];
    for (int64_t c = 0; c < a->dim; c++) {
        double sum = 0;

        for (int64_t i = 0; i < n; i++)
            sum += pre[i] * f[i * a->dim + c];
        x[c] = (float)sum;
    }
}

static void hc_mix_part(void *ud, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    for (int64_t r = begin; r < end; r++)
        hc_mix_row(ud, r);
}

static int ref_hc_merge(hx_dev *dev, const hx_hc_merge_args *a, hx_err *err)
{
    const int64_t n = a->streams_n, dim = a->dim;

    (void)dev, (void)err;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *y = (const float *)a->y.p + r * dim,
                    *post = (const float *)a->post.p + r * n;
        const float *comb = (const float *)a->comb.p + r * n * n;
        float *s = (float *)a->streams.p + r * n * dim;

        for (int64_t c = 0; c < dim; c++) {
            double old[MAX_STREAMS];

            for (int64_t i = 0; i < n; i++)
                old[i] = s[i * dim + c];
            for (int64_t j = 0; j < n; j++) {
                double sum = (double)post[j] * y[c];

                for (int64_t i = 0; i < n; i++)
                    sum += comb[i * n + j] * old[i];
                s[j * dim + c] = (float)sum;
            }
        }
    }
    return 0;
}

static int ref_hc_mix(hx_dev *dev, const hx_hc_mix_args *a, hx_err *err)
{
    const hx_hc_merge_args merge = hx_hc_mix_merge(a);
    const hx_rmsnorm_args norm = hx_hc_mix_norm(a);
    hx_hc_mix_args copy = *a;

    if (a->y.p != NULL)
        ref_hc_merge(dev, &merge, err);
    if (a->fn != NULL) {
        hx_pool_run(dev->pool, a->rows, 1, hc_mix_part, &copy);
    } else {
        memcpy(a->x.p, a->streams.p, (size_t)(a->rows * a->dim) * sizeof(float));
        for (int64_t r = 0; r < a->rows; r++)
            ((float *)a->post.p)[r] = ((float *)a->comb.p)[r] = 1;
    }
    return a->w.p != NULL ? ref_rmsnorm(dev, &norm, err) : 0;
}

static int ref_hc_mean(hx_dev *dev, const hx_hc_mean_args *a, hx_err *err)
{
    const float *s = a->streams.p;
    float *y = a->y.p;

    (void)dev, (void)err;
    for (int64_t r = 0; r < a->rows; r++, s += a->streams_n * a->dim)
        for (int64_t c = 0; c < a->dim; c++) {
            double sum = 0;

            for (int64_t i = 0; i < a->streams_n; i++)
                sum += s[i * a->dim + c];
            *y++ = (float)(sum / (double)a->streams_n);
        }
    return 0;
}

/* ---- KDA ------------------------------------------------------------- */

static void push(float *past, int64_t n, float u)
{
    memmove(past, past + 1, (size_t)(n - 1) * sizeof(*past));
    past[n - 1] = u;
}

/* One channel of one span. past: the last taps raw inputs, the newest last. */
static void conv_channel(const hx_conv_short_args *a, const hx_span *s, int64_t c)
{
    const int64_t n = a->channels, taps = a->taps;
    float *state = (float *)a->state.p + s->slot * (taps - 1) * n + c;
    float *pend = (float *)a->pend.p + (int64_t)s->slot * HX_PEND_MAX * n + c;
    const float *w = (const float *)a->w.p + c * taps;
    float past[MAX_TAPS] = { 0 }, *folded = past + 1;

    for (int64_t i = 0; i < taps - 1 && s->pos0 > 0; i++)
        folded[i] = state[i * n];
    for (int64_t i = 0; i < s->commit; i++)
        push(past, taps, pend[i * n]);
    for (int64_t i = 0; i < taps - 1; i++)
        state[i * n] = folded[i];
    for (int64_t r = s->row0; r < s->row0 + s->n_row; r++) {
        const float u = ((const float *)a->u.p)[r * n + c];
        double sum = 0;

        push(past, taps, u);
        for (int64_t j = 0; j < taps; j++)
            sum += (double)w[j] * past[j];
        ((float *)a->y.p)[r * n + c] = (float)silu(sum);
        if (a->hold)
            pend[(r - s->row0) * n] = u;
    }
    for (int64_t i = 0; i < taps - 1 && !a->hold; i++)
        state[i * n] = folded[i];
}

static void conv_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_conv_short_args *a = ud;

    (void)worker;
    for (int64_t c = begin; c < end; c++)
        for (int32_t i = 0; i < a->rows.n_span; i++)
            conv_channel(a, &a->rows.span[i], c);
}

static int ref_conv_short(hx_dev *dev, const hx_conv_short_args *a, hx_err *err)
{
    hx_conv_short_args copy = *a;

    (void)err;
    hx_pool_run(dev->pool, a->channels, 64, conv_part, &copy);
    return 0;
}

static int ref_kda_gate(hx_dev *dev, const hx_kda_gate_args *a, hx_err *err)
{
    const float *f = a->f.p, *b = a->b.p, *a_log = a->a_log.p, *dt = a->dt_bias.p;
    float *g = a->g.p, *beta = a->beta.p;

    (void)dev, (void)err;
    for (int64_t i = 0; i < a->rows * a->heads; i++) {
        const int64_t h = i % a->heads;

        beta[i] = (float)sigmoid(b[i]);
        for (int64_t d = 0; d < a->width; d++) {
            const double x = (double)f[i * a->width + d] + dt[h * a->width + d];

            g[i * a->width + d] = (float)(a->bound * sigmoid(exp(a_log[h]) * x));
        }
    }
    return 0;
}

/* One row of one head, as it is kept pending: f32 k', v, g, beta. The state moves by
 * these values alone, now or when they are folded later; that is why R rows have the bits
 * of R serial calls. */
typedef struct {
    const float *k, *v;
    double *decay, *q; /* exp g, q' [width] */
    double beta;
    float *o; /* NULL: the row is only folded */
} kda_row;

/* The rows, in order, on columns j0 .. j0 + n - 1 of S: columns never meet. S is f32
 * memory, so it is rounded after each row. */
static void kda_columns(float *state, int64_t width, const kda_row *row, int64_t n_row,
                        bool keep, int64_t j0, double (*s)[COLS])
{
    const int64_t n = HX_MIN(COLS, width - j0);

    for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < n; j++)
            s[i][j] = state[i * width + j0 + j];
    for (const kda_row *r = row; r < row + n_row; r++) {
        double u[COLS] = { 0 }, o[COLS] = { 0 };

        for (int64_t i = 0; i < width; i++)
            for (int64_t j = 0; j < n; j++) {
                s[i][j] *= r->decay[i];
                u[j] += s[i][j] * r->k[i];
            }
        for (int64_t i = 0; i < width; i++)
            for (int64_t j = 0; j < n; j++) {
                s[i][j] = (float)(s[i][j] + r->k[i] * (r->beta * (r->v[j0 + j] - u[j])));
                o[j] += r->o != NULL ? s[i][j] * r->q[i] : 0;
            }
        for (int64_t j = 0; j < n && r->o != NULL; j++)
            r->o[j0 + j] = (float)o[j];
    }
    for (int64_t i = 0; i < width && keep; i++)
        for (int64_t j = 0; j < n; j++)
            state[i * width + j0 + j] = (float)s[i][j];
}

typedef struct {
    const hx_kda_step_args *a;
    hx_dev *dev;
    bool chunk;
    size_t each;
} kda_call;

/* A worker's scratch: HX_PEND_MAX rows and COLS columns of the state; for the chunked form
 * four arrays of HX_PAGE rows beside that, two rows of coefficients and one of decays. */
static size_t kda_bytes(int64_t width, bool chunk)
{
    const size_t w = (size_t)width;

    return (2 * HX_PEND_MAX + COLS + (chunk ? 4 * HX_PAGE + 1 : 0)) * w * sizeof(double) +
           (chunk ? 2 * HX_PAGE * sizeof(double) : 0);
}

/* Reads a record of pending memory [3 width + 1]. */
static kda_row kda_read(const float *rec, int64_t width, double *decay)
{
    for (int64_t i = 0; i < width; i++)
        decay[i] = exp(rec[2 * width + i]);
    return (
        kda_row) { .k = rec, .v = rec + width, .decay = decay, .beta = rec[3 * width] };
}

static double inverse_norm(const float *x, int64_t n)
{
    double ss = 0;

    for (int64_t i = 0; i < n; i++)
        ss += (double)x[i] * x[i];
    return 1.0 / sqrt(ss + 1e-6);
}

/* Writes the record of row r, head h, and returns it with q' and its output. */
static kda_row kda_write(const hx_kda_step_args *a, int64_t r, int64_t h, float *rec,
                         double *decay, double *q)
{
    const int64_t w = a->width, in = r * a->ld + h * w, out = (r * a->heads + h) * w;
    const float *qr = (const float *)a->q.p + in, *kr = (const float *)a->k.p + in;
    const double kn = inverse_norm(kr, w), qn = inverse_norm(qr, w) / sqrt((double)w);

    for (int64_t i = 0; i < w; i++) {
        rec[i] = (float)(kr[i] * kn);
        q[i] = qr[i] * qn;
    }
    memcpy(rec + w, (const float *)a->v.p + in, (size_t)w * sizeof(float));
    memcpy(rec + 2 * w, (const float *)a->g.p + out, (size_t)w * sizeof(float));
    rec[3 * w] = ((const float *)a->beta.p)[r * a->heads + h];

    kda_row row = kda_read(rec, w, decay);
    row.q = q;
    row.o = (float *)a->o.p + out;
    return row;
}

/* Folds the slot's pending rows into its state; returns the state. */
static float *kda_fold(const hx_kda_step_args *a, const hx_span *s, int64_t h,
                       double *decay, double (*cols)[COLS])
{
    const int64_t w = a->width, rec_n = 3 * w + 1;
    float *state = (float *)a->state.p + (s->slot * a->heads + h) * w * w;
    const float *pend = (const float *)a->pend.p +
                        ((int64_t)s->slot * HX_PEND_MAX * a->heads + h) * rec_n;
    kda_row row[HX_PEND_MAX];

    if (s->pos0 == 0)
        memset(state, 0, (size_t)(w * w) * sizeof(float));
    for (int64_t i = 0; i < s->commit; i++)
        row[i] = kda_read(pend + i * a->heads * rec_n, w, decay + i * w);
    for (int64_t j = 0; j < w && s->commit > 0; j += COLS)
        kda_columns(state, w, row, s->commit, true, j, cols);
    return state;
}

/* One head of one span, row by row; the rows become pending. */
static void kda_serial(const hx_kda_step_args *a, const hx_span *s, int64_t h,
                       double *work)
{
    const int64_t w = a->width, rec_n = 3 * w + 1;
    double *decay = work, *q = decay + HX_PEND_MAX * w;
    double(*cols)[COLS] = (double(*)[COLS])(q + HX_PEND_MAX * w);
    float *state = kda_fold(a, s, h, decay, cols);
    float *pend =
        (float *)a->pend.p + ((int64_t)s->slot * HX_PEND_MAX * a->heads + h) * rec_n;
    kda_row row[HX_PEND_MAX];

    for (int64_t i = 0; i < s->n_row; i++)
        row[i] = kda_write(a, s->row0 + i, h, pend + i * a->heads * rec_n, decay + i * w,
                           q + i * w);
    for (int64_t j = 0; j < w && s->n_row > 0; j += COLS)
        kda_columns(state, w, row, s->n_row, false, j, cols);
}

/* A chunk's rows in double: q', k', the decay's logarithm summed from the chunk's start,
 * and the corrected values, each [n, width]. */
typedef struct {
    double *q, *k, *g, *v;
    int64_t n, width;
} kda_block;

static void block_read(kda_block *b, const hx_kda_step_args *a, int64_t row0, int64_t h)
{
    const int64_t w = b->width;

    for (int64_t i = 0; i < b->n; i++) {
        const int64_t in = (row0 + i) * a->ld + h * w;
        const float *q = (const float *)a->q.p + in, *k = (const float *)a->k.p + in,
                    *g = (const float *)a->g.p + ((row0 + i) * a->heads + h) * w;
        const double qn = inverse_norm(q, w) / sqrt((double)w), kn = inverse_norm(k, w);

        for (int64_t d = 0; d < w; d++) {
            b->q[i * w + d] = q[d] * qn;
            b->k[i * w + d] = (float)(k[d] * kn);
            b->g[i * w + d] = g[d] + (i > 0 ? b->g[(i - 1) * w + d] : 0);
        }
    }
}

/* mine[j] = sum_d x[d] k_j[d] exp(G_i[d] - G_j[d]) for x = k_i (j < i) and q_i (j <= i).
 * Differences of G only: exp(G_i) and exp(-G_j) by themselves leave the range. */
static void block_weights(const kda_block *b, int64_t i, double *of_k, double *of_q)
{
    const int64_t w = b->width;
    const double *q = b->q + i * w, *k = b->k + i * w, *g = b->g + i * w;

    for (int64_t j = 0; j <= i; j++) {
        of_k[j] = of_q[j] = 0;
        for (int64_t d = 0; d < w; d++) {
            const double t = b->k[j * w + d] * exp(g[d] - b->g[j * w + d]);

            of_k[j] += k[d] * t;
            of_q[j] += q[d] * t;
        }
    }
}

/* The rows of a chunk from the state S at its start (glm5_next.md 4):
 *   v'_i = beta_i (v_i - S^T (k_i exp G_i) - sum_{j < i} of_k[j] v'_j)
 *   o_i  = S^T (q_i exp G_i) + sum_{j <= i} of_q[j] v'_j
 *   S    = diag(exp G_n) S + sum_j (k_j exp(G_n - G_j)) v'_j^T */
static void block_run(const kda_block *b, const hx_kda_step_args *a, int64_t row0,
                      int64_t h, float *state, double *of)
{
    const int64_t w = b->width;
    double *of_k = of, *of_q = of + HX_PAGE, *decay = of + 2 * HX_PAGE;

    for (int64_t i = 0; i < b->n; i++) {
        const float *v = (const float *)a->v.p + (row0 + i) * a->ld + h * w;
        float *o = (float *)a->o.p + ((row0 + i) * a->heads + h) * w;
        const double beta = ((const float *)a->beta.p)[(row0 + i) * a->heads + h];

        block_weights(b, i, of_k, of_q);
        for (int64_t d = 0; d < w; d++)
            decay[d] = exp(b->g[i * w + d]);
        for (int64_t c = 0; c < w; c++) {
            double u = 0, y = 0;

            for (int64_t d = 0; d < w; d++) {
                const double s = state[d * w + c] * decay[d];

                u += s * b->k[i * w + d];
                y += s * b->q[i * w + d];
            }
            for (int64_t j = 0; j < i; j++) {
                u += of_k[j] * b->v[j * w + c];
                y += of_q[j] * b->v[j * w + c];
            }
            b->v[i * w + c] = beta * (v[c] - u);
            o[c] = (float)(y + of_q[i] * b->v[i * w + c]);
        }
    }
    for (int64_t d = 0; d < w; d++) {
        const double last = b->g[(b->n - 1) * w + d], all = exp(last);

        for (int64_t j = 0; j < b->n; j++)
            of_k[j] = b->k[j * w + d] * exp(last - b->g[j * w + d]);
        for (int64_t c = 0; c < w; c++) {
            double s = state[d * w + c] * all;

            for (int64_t j = 0; j < b->n; j++)
                s += of_k[j] * b->v[j * w + c];
            state[d * w + c] = (float)s;
        }
    }
}

/* One head of one span, in chunks cut at multiples of HX_PAGE of the position. */
static void kda_chunked(const hx_kda_step_args *a, const hx_span *s, int64_t h,
                        double *work)
{
    const int64_t w = a->width;
    double(*cols)[COLS] = (double(*)[COLS])(work + 2 * HX_PEND_MAX * w);
    double *at = (double *)(cols + w), *of = at + 4 * HX_PAGE * w;
    kda_block b = {
        at, at + HX_PAGE * w, at + 2 * HX_PAGE * w, at + 3 * HX_PAGE * w, 0, w
    };
    float *state = kda_fold(a, s, h, work, cols);

    for (int64_t done = 0; done < s->n_row; done += b.n) {
        b.n = HX_MIN(HX_PAGE - (s->pos0 + done) % HX_PAGE, s->n_row - done);
        block_read(&b, a, s->row0 + done, h);
        block_run(&b, a, s->row0 + done, h, state, of);
    }
}

static void kda_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const kda_call *c = ud;

    for (int64_t i = begin; i < end; i++)
        (c->chunk ? kda_chunked : kda_serial)(c->a, &c->a->rows.span[i / c->a->heads],
                                              i % c->a->heads,
                                              worker_scratch(c->dev, 0, c->each, worker));
}

static int kda(hx_dev *dev, const char *op, const hx_kda_step_args *a, bool chunk,
               hx_err *err)
{
    const hx_kda_gate_args gate = hx_kda_step_gate(a);
    kda_call c = {
        .a = a, .dev = dev, .chunk = chunk, .each = kda_bytes(a->width, chunk)
    };
    int rc = fits(dev, op, 0, c.each, err);

    if (rc == 0 && a->a_log.p != NULL)
        rc = ref_kda_gate(dev, &gate, err);
    if (rc != 0)
        return rc;
    hx_pool_run(dev->pool, a->rows.n_span * a->heads, 1, kda_part, &c);
    return 0;
}

static int ref_kda_step(hx_dev *dev, const hx_kda_step_args *a, hx_err *err)
{
    return kda(dev, "kda_step", a, false, err);
}

static int ref_kda_chunk(hx_dev *dev, const hx_kda_chunk_args *a, hx_err *err)
{
    return kda(dev, "kda_chunk", a, true, err);
}

static int ref_kda_out(hx_dev *dev, const hx_kda_out_args *a, hx_err *err)
{
    const float *o = a->o.p, *z = a->z.p, *w = a->w.p;
    float *y = a->y.p;
    const int64_t n = a->width;

    (void)dev, (void)err;
    for (int64_t i = 0; i < a->rows * a->heads; i++, o += n, z += n, y += n) {
        double ss = 0;

        for (int64_t d = 0; d < n; d++)
            ss += (double)o[d] * o[d];
        const double scale = 1.0 / sqrt(ss / (double)n + (double)a->eps);
        for (int64_t d = 0; d < n; d++)
            y[d] = (float)(w[d] * (o[d] * scale) * sigmoid(z[d]));
    }
    return 0;
}

/* ---- paged memory ---------------------------------------------------- */

static double page_get(const hx_pages *g, hx_page_item row, int64_t i)
{
    return g->fmt == HX_CACHE_F32 ? (double)hx_f32_at(row.v, i)
           : g->fmt == HX_CACHE_BF16
               ? (double)hx_bf16_at(row.v, i)
               : (double)hx_fp8_at(row.v, i) * (double)hx_page_scale(*row.scale);
}

static void page_put(const hx_pages *g, hx_page_item row, int64_t i, double v)
{
    if (g->fmt == HX_CACHE_F32)
        ((float *)row.v)[i] = (float)v;
    else
        ((uint16_t *)row.v)[i] = hx_bf16_from((float)v);
}

static int ref_latent_append(hx_dev *dev, const hx_latent_append_args *a, hx_err *err)
{
    (void)dev, (void)err;
    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t t = 0; t < s->n_row; t++) {
            const float *c = (const float *)a->c.p + (s->row0 + t) * a->ldc;
            const hx_page_item row =
                hx_page_row(&a->cache, s->slot, s->pos0 + t, HX_PAGE);

            if (a->cache.fmt == HX_CACHE_FP8)
                hx_page_put_fp8(row.v, row.scale, c, a->cache.width);
            for (int64_t i = 0; a->cache.fmt != HX_CACHE_FP8 && i < a->cache.width; i++)
                page_put(&a->cache, row, i, c[i]);
        }
    return 0;
}

/* The pooled key of the pool whose last position is pos. */
static void pool_key(const hx_index_append_args *a, int32_t slot, int64_t pos)
{
    const int64_t n = a->pool_n, width = a->pool.width;
    const float *ring = (const float *)a->ring.p + (int64_t)slot * HX_RING * 2 * width;
    const float *ape = a->ape.p;
    const hx_page_item row = hx_page_row(&a->pool, slot, pos / n, HX_PAGE / n);

    for (int64_t c = 0; c < width; c++) {
        double logit[MAX_POOL], top = -INFINITY, mass = 0, key = 0;

        for (int64_t s = 0; s < n; s++) {
            const int64_t at = (pos - n + 1 + s) % HX_RING * 2 * width;

            logit[s] = (double)ring[at + width + c] + ape[s * width + c];
            top = fmax(top, logit[s]);
        }
        for (int64_t s = 0; s < n; s++) {
            const int64_t at = (pos - n + 1 + s) % HX_RING * 2 * width;

            mass += exp(logit[s] - top);
            key += exp(logit[s] - top) * ring[at + c];
        }
        page_put(&a->pool, row, c, key / mass);
    }
}

static int ref_index_append(hx_dev *dev, const hx_index_append_args *a, hx_err *err)
{
    const size_t bytes = (size_t)a->pool.width * sizeof(float);

    (void)dev, (void)err;
    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t t = 0; t < s->n_row; t++) {
            const int64_t pos = s->pos0 + t, from = (s->row0 + t) * a->pool.width;
            float *ring =
                (float *)a->ring.p +
                (s->slot * (int64_t)HX_RING + pos % HX_RING) * 2 * a->pool.width;

            memcpy(ring, (const float *)a->key.p + from, bytes);
            memcpy(ring + a->pool.width, (const float *)a->gate.p + from, bytes);
            if ((pos + 1) % a->pool_n == 0)
                pool_key(a, s->slot, pos);
        }
    return 0;
}

/* One row of a span, handed to the pool. */
typedef struct {
    const void *args;
    hx_dev *dev;
    int32_t slot;
    int64_t row, pos;
    size_t each;
} row_call;

static void score_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const row_call *c = ud;
    const hx_index_score_args *a = c->args;
    const int64_t width = a->pool.width;
    const float *w = (const float *)a->w.p + c->row * a->heads;

    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const hx_page_item key = hx_page_row(&a->pool, c->slot, p, HX_PAGE / a->pool_n);
        double sum = 0;

        for (int64_t h = 0; h < a->heads; h++) {
            const float *q = (const float *)a->q.p + (c->row * a->heads + h) * width;
            double qk = 0;

            for (int64_t i = 0; i < width; i++)
                qk += q[i] * page_get(&a->pool, key, i);
            sum += (double)w[h] * a->w_scale * fmax(0, qk * a->scale);
        }
        ((float *)a->score.p)[c->row * a->ld_score + p] = (float)sum;
    }
}

static int ref_index_score(hx_dev *dev, const hx_index_score_args *a, hx_err *err)
{
    (void)err;
    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t t = 0; t < s->n_row; t++) {
            row_call c = {
                .args = a, .slot = s->slot, .row = s->row0 + t, .pos = s->pos0 + t
            };

            hx_pool_run(dev->pool, (c.pos + 1) / a->pool_n, 16, score_part, &c);
        }
    return 0;
}

static int ref_topk(hx_dev *dev, const hx_topk_args *a, hx_err *err)
{
    entry *e = dev->scratch;

    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t t = 0; t < s->n_row; t++) {
            const int64_t row = s->row0 + t, n = (s->pos0 + t + 1) / a->pool_n;
            const int64_t k = HX_MIN(a->k, n);
            const float *score = (const float *)a->score.p + row * a->ld_score;
            int32_t *pick = (int32_t *)a->pick.p + row * a->k;
            const int rc = fits(dev, "topk", (size_t)n * sizeof(entry), 0, err);

            if (rc != 0)
                return rc;
            ((int32_t *)a->n_pick.p)[row] = (int32_t)k;
            for (int64_t i = 0; i < n; i++)
                e[i] = (entry) { score[i], (int32_t)i };
            if (k == 0)
                continue;
            ranking best = rank(e, n);
            const entry last = ranked(&best, k - 1);
            for (int32_t i = 0; i < n; i++)
                if (!better(last, (entry) { score[i], i }))
                    *pick++ = i;
        }
    return 0;
}

/* The i-th of the positions that a row attends, in ascending order. */
static int64_t attended(const hx_mla_attend_args *a, const int32_t *pick, int64_t n_pick,
                        int64_t pos, int64_t i)
{
    if (pick == NULL)
        return i;
    if (i < n_pick * a->pool_n)
        return pick[i / a->pool_n] * a->pool_n + i % a->pool_n;
    return pos - (pos + 1) % a->pool_n + 1 + (i - n_pick * a->pool_n);
}

static void attend_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const row_call *c = ud;
    const hx_mla_attend_args *a = c->args;
    const int64_t width = a->cache.width;
    const int32_t *pick =
        a->pick.p == NULL ? NULL : (const int32_t *)a->pick.p + c->row * a->k_pick;
    const int64_t n_pick = pick == NULL ? 0 : ((const int32_t *)a->n_pick.p)[c->row];
    const int64_t n =
        pick == NULL ? c->pos + 1 : n_pick * a->pool_n + (c->pos + 1) % a->pool_n;
    double *z = worker_scratch(c->dev, 0, c->each, worker), *p = z + width;

    for (int64_t h = begin; h < end; h++) {
        const float *q = (const float *)a->q.p + (c->row * a->heads + h) * width;
        float *out = (float *)a->z.p + (c->row * a->heads + h) * width;
        double top = -INFINITY, mass = 0;

        for (int64_t i = 0; i < n; i++) {
            const hx_page_item row = hx_page_row(
                &a->cache, c->slot, attended(a, pick, n_pick, c->pos, i), HX_PAGE);

            p[i] = 0;
            for (int64_t d = 0; d < width; d++)
                p[i] += q[d] * page_get(&a->cache, row, d);
            p[i] *= a->scale;
            top = fmax(top, p[i]);
        }
        memset(z, 0, (size_t)width * sizeof(*z));
        for (int64_t i = 0; i < n; i++) {
            const hx_page_item row = hx_page_row(
                &a->cache, c->slot, attended(a, pick, n_pick, c->pos, i), HX_PAGE);
            const double e = exp(p[i] - top);

            mass += e;
            for (int64_t d = 0; d < width; d++)
                z[d] += e * page_get(&a->cache, row, d);
        }
        for (int64_t d = 0; d < width; d++)
            out[d] = (float)(z[d] / mass);
    }
}

static int ref_mla_attend(hx_dev *dev, const hx_mla_attend_args *a, hx_err *err)
{
    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t t = 0; t < s->n_row; t++) {
            row_call c = { .args = a,
                           .dev = dev,
                           .slot = s->slot,
                           .row = s->row0 + t,
                           .pos = s->pos0 + t };
            int rc;

            c.each = (size_t)(a->cache.width + c.pos + 1) * sizeof(double);
            if ((rc = fits(dev, "mla_attend", 0, c.each, err)) != 0)
                return rc;
            hx_pool_run(dev->pool, a->heads, 1, attend_part, &c);
        }
    return 0;
}

/* ---- sampling -------------------------------------------------------- */

/* Logits of one row after penalties, bias, mask and bans; not allowed: -INFINITY. */
static void adjust(const hx_sample_args *a, const hx_sample_row *s, double *l)
{
    for (int32_t i = 0; i < s->n_hist; i++) {
        double *x = &l[s->hist_id[i]];

        if (s->repeat > 0)
            *x = *x > 0 ? *x / s->repeat : *x * s->repeat;
        if (s->hist_count[i] > 0)
            *x -= (double)s->frequency * s->hist_count[i] + s->presence;
    }
    for (int32_t i = 0; i < s->n_bias; i++) {
        double *x = &l[s->bias[i].token];

        *x = s->bias[i].bias <= -100 ? -INFINITY : *x + s->bias[i].bias;
    }
    for (int64_t i = 0; i < a->n_token && s->mask != NULL; i++)
        if ((s->mask[i / 32] >> (i % 32) & 1) == 0)
            l[i] = -INFINITY;
    for (int32_t i = 0; i < s->n_ban; i++)
        l[s->ban[i]] = -INFINITY;
    for (int64_t i = a->n_token; i < a->n_vocab; i++)
        l[i] = -INFINITY;
}

/* One of the ranked ids: of the first top_k, the smallest set that holds top_p of their
 * mass, and of these the ones with at least min_p of the best's probability. */
static int32_t draw(const hx_sample_row *s, ranking *ids)
{
    const int64_t n = s->top_k > 0 ? HX_MIN(s->top_k, ids->n) : ids->n;
    const double best = ranked(ids, 0).key, t = s->temperature;
    const double top_p = s->top_p > 0 ? fmin(s->top_p, 1) : 1;
    double mass = 0, kept = 0, sum = 0;
    int64_t m = 0;

    for (int64_t i = 0; i < n; i++)
        mass += exp((ranked(ids, i).key - best) / t);
    for (; m < n && (m == 0 || kept < top_p * mass); m++) {
        const double p = exp((ranked(ids, m).key - best) / t);

        if (p < s->min_p)
            break;
        kept += p;
    }
    const double u = hx_rng_unit(s->seed, s->counter) * kept;
    for (int64_t i = 0; i < m - 1; i++)
        if ((sum += exp((ranked(ids, i).key - best) / t)) > u)
            return ranked(ids, i).id;
    return ranked(ids, m - 1).id;
}

static int sample_row(hx_dev *dev, const hx_sample_args *a, int64_t r, hx_err *err)
{
    const hx_sample_row *s = &a->row[r];
    const float *logits = (const float *)a->logits.p + r * a->n_vocab;
    hx_choice *top = (hx_choice *)a->top.p + 20 * r;
    double *l = (double *)a->scratch.p + r * a->n_vocab, mass = 0;
    ranking ids = { .e = dev->scratch };

    for (int64_t i = 0; i < a->n_vocab; i++) {
        if (i < a->n_token && isnan(logits[i]))
            return hx_fail(err, HX_EARG,
                           "sample: row %lld: the logit of id %lld is not a number",
                           (long long)r, (long long)i);
        l[i] = logits[i];
    }
    adjust(a, s, l);
    for (int64_t i = 0; i < a->n_token; i++)
        if (l[i] > -INFINITY)
            ids.e[ids.n++] = (entry) { l[i], (int32_t)i };
    if (ids.n == 0)
        return hx_fail(err, HX_EARG, "sample: row %lld: every id is banned",
                       (long long)r);
    ids = rank(ids.e, ids.n);

    const entry best = ranked(&ids, 0);
    const int32_t id = s->temperature > 0 ? draw(s, &ids) : best.id;
    ((int32_t *)a->id.p)[r] = id;
    if (!s->want_logprob && s->n_top == 0)
        return 0;
    for (int64_t i = 0; i < a->n_token; i++)
        mass += exp(l[i] - best.key);
    const double norm = best.key + log(mass);
    if (s->want_logprob)
        ((float *)a->logprob.p)[r] = (float)(l[id] - norm);
    for (int32_t i = 0; i < s->n_top; i++) {
        const entry e = i < ids.n ? ranked(&ids, i) : (entry) { -INFINITY, -1 };

        top[i] = (hx_choice) { e.id, (float)(e.key - norm) };
    }
    return 0;
}

static int ref_sample(hx_dev *dev, const hx_sample_args *a, hx_err *err)
{
    int rc = fits(dev, "sample", (size_t)a->n_vocab * sizeof(entry), 0, err);

    for (int64_t r = 0; r < a->rows && rc == 0; r++)
        rc = sample_row(dev, a, r, err);
    return rc;
}

/* ---- the backend ----------------------------------------------------- */

const hx_dev_ops hx_ref_ops = { .name = "ref",
#define X(op) .op = ref_##op,
                                HX_OPS(X)
#undef X
};

size_t hx_ref_scratch_bytes(const hx_dev_limits *l, int n_thread)
{
    const size_t each = HX_MAX(sizeof(product_work),
                               HX_MAX(kda_bytes(l->max_k, true),
                                      (size_t)(l->max_ctx + l->max_k) * sizeof(double)));
    const size_t moe = 2 * ROWS * (sizeof(int64_t) + (size_t)l->max_k * sizeof(double));
    const size_t ranks =
        (size_t)HX_MAX(l->max_n, HX_MAX(l->max_ctx, l->max_expert)) * sizeof(entry);

    return HX_MAX(moe, ranks) + each * (size_t)n_thread;
}
