/* cpu.c - the CPU backend: its operation table, its scratch, and the operations that
 * treat rows on their own (embedding, norms, mHC, router, combine). cpu_attn.c has those
 * that own sequence memory, cpu_sample.c ranking and sampling, cpu_matmul.c products with
 * weights.
 *
 * Called through hx_cpu_ops once ops.c has checked the arguments. Allocates nothing. Work
 * is shared out to the pool; no result may depend on how. */
#include <math.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "dev/cpu_kern.h"
#include "dev/lane.h"
#include "dev/fmt_fp8.h"

enum {
    ROWS = 16, /* rows that share widened weights: the lanes of hc_maps */
    OUTS = 12, /* weight rows that are widened together: they stay in the first cache */
    MAX_STREAMS = 8 /* ops.c: same bound */
};

/* ---- the backend ----------------------------------------------------- */

const hx_dev_ops hx_cpu_ops = { .name = "cpu",
#define X(op) .op = hx_cpu_##op,
                                HX_OPS(X)
#undef X
};

#if defined(__x86_64__)
static const hx_kern *const kernels[HX_N_ISA] = { &hx_kern_scalar, &hx_kern_avx2,
                                                  &hx_kern_avx512 };
#else
static const hx_kern *const kernels[HX_N_ISA] = { &hx_kern_scalar, NULL, NULL };
#endif

#if defined(__x86_64__)
/* clang 14 does not know the name for __builtin_cpu_supports(). */
static bool has_f16c(void)
{
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool hx_cpu_has(hx_isa isa)
{
    if (isa == HX_ISA_SCALAR)
        return true;
#if defined(__x86_64__)
    if (isa == HX_ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               has_f16c();
    if (isa == HX_ISA_AVX512)
        return hx_cpu_has(HX_ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return false;
}

size_t hx_cpu_scratch_bytes(const hx_dev_limits *l, int n_thread)
{
    const size_t own =
        HX_KERN_WORKER_BYTES * (size_t)n_thread + HX_KERN_SHARED_BYTES(n_thread);

    return HX_MAX(own, hx_cpu_matmul_scratch_bytes(l, n_thread));
}

const hx_kern *hx_cpu_kern(const hx_dev *d)
{
    return kernels[d->level];
}

void *hx_cpu_work(const hx_dev *d, int worker)
{
    return (char *)d->scratch + HX_KERN_WORKER_BYTES * (size_t)worker;
}

static float *shared_work(const hx_dev *d)
{
    return hx_cpu_work(d, hx_pool_size(d->pool));
}

/* A part of a run should last for some microseconds at least: about 8 results a cycle. */
static int64_t grain(int64_t cost)
{
    return HX_MAX(131072 / HX_MAX(cost, 1), 1);
}

int hx_cpu_run(hx_dev *d, hx_pool_fn *fn, const void *args, int64_t n, int64_t cost)
{
    hx_cpu_call c = { .dev = d, .v = hx_cpu_kern(d), .args = args };

    hx_pool_run(d->pool, n, grain(cost), fn, &c);
    return 0;
}

/* ---- weights --------------------------------------------------------- */

/* Columns k0 .. k0 + n - 1 of row r of a plain matrix, as f32. */
static void widen_row(const hx_kern *v, const hx_mat *m, int64_t r, int64_t k0, int64_t n,
                      float *out)
{
    static const uint8_t size[HX_N_FMT] = {
        [HX_FMT_F32] = 4,
        [HX_FMT_F16] = 2,
        [HX_FMT_BF16] = 2,
        [HX_FMT_FP8] = 1,
    };
    const char *in = (const char *)m->w + (r * m->k + k0) * size[m->fmt];

    if (m->fmt != HX_FMT_FP8) {
        v->widen(out, in, m->fmt, 1, n);
        return;
    }
    for (int64_t k = k0, run; k < k0 + n; k += run) {
        run = HX_MIN((k / m->block_k + 1) * m->block_k, k0 + n) - k;
        v->widen(out + (k - k0), in + (k - k0), m->fmt, hx_fp8_scale(m, r, k), run);
    }
}

/* Rows of x against rows of a plain matrix, a block of inputs at a time. */
typedef struct {
    const hx_kern *v;
    const hx_mat *m;
    const float *x; /* [rows, ldx] */
    int64_t ldx, rows;
    float *wide; /* [OUTS, HX_KERN_BLOCK] */
    float *c;    /* [rows, ldc] */
    int64_t ldc;
} product;

/* c[r, o] = x[r, k0 .. k0 + n) . W[o0 + o, k0 .. k0 + n), o < n_out, n <= HX_KERN_BLOCK
 */
static void multiply_block(const product *p, int64_t o0, int64_t n_out, int64_t k0,
                           int64_t n)
{
    for (int64_t o = 0; o < n_out; o += OUTS) {
        const int64_t few = HX_MIN(OUTS, n_out - o);

        for (int64_t i = 0; i < few; i++)
            widen_row(p->v, p->m, o0 + o + i, k0, n, p->wide + i * HX_KERN_BLOCK);
        p->v->dots(p->c + o, p->ldc, p->x + k0, p->ldx, p->rows, p->wide, HX_KERN_BLOCK,
                   few, n);
    }
}

/* ---- rows on their own ----------------------------------------------- */

static void embed_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_embed_args *a = c->args;
    const int64_t dim = a->table->k;

    (void)worker;
    for (int64_t r = begin; r < end; r++) {
        float *y = (float *)a->y.p + r * a->streams * dim;

        widen_row(c->v, a->table, ((const int32_t *)a->id.p)[r], 0, dim, y);
        for (int64_t s = 1; s < a->streams; s++)
            memcpy(y + s * dim, y, (size_t)dim * sizeof(float));
    }
}

int hx_cpu_embed(hx_dev *d, const hx_embed_args *a, hx_err *err)
{
    const int32_t *id = a->id.p;

    for (int64_t r = 0; r < a->rows; r++)
        if (id[r] < 0 || id[r] >= a->table->n)
            return hx_fail(err, HX_EARG, "embed: row %lld: id %d, must be 0 to %lld",
                           (long long)r, id[r], (long long)a->table->n - 1);
    return hx_cpu_run(d, embed_part, a, a->rows, a->streams * a->table->k);
}

static void rmsnorm_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_rmsnorm_args *a = c->args;

    (void)worker;
    for (int64_t r = begin; r < end; r++) {
        const float *x = (const float *)a->x.p + r * a->ldx;
        const double ms = c->v->dot(x, x, a->dim) / (double)a->dim;

        c->v->norm((float *)a->y.p + r * a->ldy, x, 0,
                   (float)(1 / sqrt(ms + (double)a->eps)), a->w.p, NULL, a->dim);
    }
}

int hx_cpu_rmsnorm(hx_dev *d, const hx_rmsnorm_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, rmsnorm_part, a, a->rows, 2 * a->dim);
}

static void layernorm_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_layernorm_args *a = c->args;

    (void)worker;
    for (int64_t r = begin; r < end; r++) {
        const float *x = (const float *)a->x.p + r * a->ldx;
        const float mean = (float)(c->v->sum(x, a->dim) / (double)a->dim);
        const double var = c->v->spread(x, mean, a->dim) / (double)a->dim;

        c->v->norm((float *)a->y.p + r * a->ldy, x, mean,
                   (float)(1 / sqrt(var + (double)a->eps)), a->w.p, a->b.p, a->dim);
    }
}

int hx_cpu_layernorm(hx_dev *d, const hx_layernorm_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, layernorm_part, a, a->rows, 3 * a->dim);
}

static void swiglu_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_swiglu_args *a = c->args;
    const int64_t at = begin * a->dim;

    (void)worker;
    c->v->swiglu((float *)a->y.p + at, (const float *)a->gate.p + at,
                 (const float *)a->up.p + at, a->limit, (end - begin) * a->dim);
}

int hx_cpu_swiglu(hx_dev *d, const hx_swiglu_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, swiglu_part, a, a->rows, 8 * a->dim);
}

static void combine_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_combine_args *a = c->args;

    (void)worker;
    for (int64_t r = begin; r < end; r++)
        c->v->mix((float *)a->y.p + r * a->dim, (const float *)a->base.p + r * a->dim,
                  (const float *)a->weight.p + r * a->active,
                  (const float *)a->part.p + r * a->active * a->dim, a->dim, a->active,
                  a->dim);
}

int hx_cpu_combine(hx_dev *d, const hx_combine_args *a, hx_err *err)
{
    (void)err;
    if (a->there.p != NULL)
        hx_lane_take(a);
    return hx_cpu_run(d, combine_part, a, a->rows, a->active * a->dim);
}

int hx_cpu_plan(hx_dev *d, const hx_plan_args *a, hx_err *err)
{
    return hx_lane_plan(d, a, err);
}

/* ---- mHC ------------------------------------------------------------- */

/* A wave of row blocks. First, for each block of ROWS rows and each of HX_KERN_BLOCK
 * inputs: part [ROWS, n_out + 1], the products with fn and the sum of squares; then, per
 * row block, these join in double and become maps and the collapsed row. So that one row
 * at a real width still has work for several threads. */
typedef struct {
    hx_cpu_call c;
    const hx_hc_mix_args *a;
    int64_t row0, n_row, n_k, n_out, width;
    float *part;
} hc_wave;

static float *hc_part_of(const hc_wave *w, int64_t row_block, int64_t k_block)
{
    return w->part + (row_block * w->n_k + k_block) * ROWS * (w->n_out + 1);
}

static void hc_product_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hc_wave *w = ud;
    product p = { .v = w->c.v,
                  .m = w->a->fn,
                  .ldx = w->width,
                  .ldc = w->n_out + 1,
                  .wide = hx_cpu_work(w->c.dev, worker) };

    for (int64_t i = begin; i < end; i++) {
        const int64_t rb = i / w->n_k, k0 = i % w->n_k * HX_KERN_BLOCK;
        const int64_t n = HX_MIN(HX_KERN_BLOCK, w->width - k0);

        p.x = (const float *)w->a->streams.p + (w->row0 + rb * ROWS) * w->width;
        p.rows = HX_MIN(ROWS, w->n_row - rb * ROWS);
        p.c = hc_part_of(w, rb, i % w->n_k);
        multiply_block(&p, 0, w->n_out, k0, n);
        for (int64_t r = 0; r < p.rows; r++) {
            const float *x = p.x + r * w->width + k0;

            p.c[r * p.ldc + w->n_out] = (float)p.v->dot(x, x, n);
        }
    }
}

/* m [n_out, ROWS]: fn f / rms(f) of the rows of a block; lanes past them are 0. */
static void hc_join(const hc_wave *w, int64_t rb, int64_t rows, float *m)
{
    memset(m, 0, (size_t)(w->n_out * ROWS) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        double scale = 0;

        for (int64_t o = w->n_out; o >= 0; o--) {
            double sum = 0;

            for (int64_t k = 0; k < w->n_k; k++)
                sum += (double)hc_part_of(w, rb, k)[r * (w->n_out + 1) + o];
            if (o == w->n_out)
                scale = 1 / sqrt(sum / (double)w->width + (double)w->a->norm_eps);
            else
                m[o * ROWS + r] = (float)(sum * scale);
        }
    }
}

static void hc_maps_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hc_wave *w = ud;
    const hx_hc_mix_args *a = w->a;
    const int64_t n = a->streams_n;
    float m[MAX_STREAMS * (2 + MAX_STREAMS) * ROWS], pre[MAX_STREAMS];

    (void)worker;
    for (int64_t rb = begin; rb < end; rb++) {
        const int64_t rows = HX_MIN(ROWS, w->n_row - rb * ROWS);

        hc_join(w, rb, rows, m);
        w->c.v->hc_maps(m, rows, a->scale.p, a->base.p, n, a->eps, a->iters);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = w->row0 + rb * ROWS + i;

            for (int64_t s = 0; s < n; s++) {
                pre[s] = m[s * ROWS + i];
                ((float *)a->post.p)[r * n + s] = m[(n + s) * ROWS + i];
            }
            for (int64_t s = 0; s < n * n; s++)
                ((float *)a->comb.p)[r * n * n + s] = m[(2 * n + s) * ROWS + i];
            w->c.v->mix((float *)a->x.p + r * a->dim, NULL, pre,
                        (const float *)a->streams.p + r * w->width, a->dim, n, a->dim);
        }
    }
}

/* x as it is before the norm, and the maps. */
static int mix_rows(hx_dev *d, const hx_hc_mix_args *a, hx_err *err)
{
    const int64_t n = a->streams_n, width = n * a->dim;

    if (a->fn == NULL) {
        memcpy(a->x.p, a->streams.p, (size_t)(a->rows * a->dim) * sizeof(float));
        for (int64_t r = 0; r < a->rows; r++)
            ((float *)a->post.p)[r] = ((float *)a->comb.p)[r] = 1;
        return 0;
    }
    hc_wave w = { .c = { .dev = d, .v = hx_cpu_kern(d) },
                  .a = a,
                  .n_out = n * (2 + n),
                  .width = width,
                  .n_k = (width + HX_KERN_BLOCK - 1) / HX_KERN_BLOCK,
                  .part = shared_work(d) };
    const int64_t block = ROWS * (w.n_out + 1) * w.n_k * (int64_t)sizeof(float);
    const int64_t fit = (int64_t)HX_KERN_SHARED_BYTES(hx_pool_size(d->pool)) / block;

    if (fit < 1)
        return hx_fail(err, HX_EUNSUP,
                       "hc_mix: %lld streams of %lld are too wide for the cpu backend",
                       (long long)n, (long long)a->dim);
    for (w.row0 = 0; w.row0 < a->rows; w.row0 += w.n_row) {
        w.n_row = HX_MIN(fit * ROWS, a->rows - w.row0);
        const int64_t rows = HX_MIN(ROWS, w.n_row), n_block = (w.n_row + ROWS - 1) / ROWS;

        hx_pool_run(d->pool, n_block * w.n_k,
                    grain(rows * w.n_out * HX_MIN(width, HX_KERN_BLOCK) * 2),
                    hc_product_part, &w);
        hx_pool_run(d->pool, n_block, grain(rows * width * 2), hc_maps_part, &w);
    }
    return 0;
}

static void hc_merge_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_hc_merge_args *a = c->args;
    const int64_t n = a->streams_n;

    (void)worker;
    for (int64_t r = begin; r < end; r++)
        c->v->merge((float *)a->streams.p + r * n * a->dim,
                    (const float *)a->y.p + r * a->dim, (const float *)a->post.p + r * n,
                    (const float *)a->comb.p + r * n * n, n, a->dim);
}

int hx_cpu_hc_merge(hx_dev *d, const hx_hc_merge_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, hc_merge_part, a, a->rows,
                      a->streams_n * (a->streams_n + 1) * a->dim);
}

int hx_cpu_hc_mix(hx_dev *d, const hx_hc_mix_args *a, hx_err *err)
{
    const hx_hc_merge_args merge = hx_hc_mix_merge(a);
    const hx_rmsnorm_args norm = hx_hc_mix_norm(a);
    int rc = a->y.p != NULL ? hx_cpu_hc_merge(d, &merge, err) : 0;

    if (rc == 0)
        rc = mix_rows(d, a, err);
    return rc == 0 && a->w.p != NULL ? hx_cpu_rmsnorm(d, &norm, err) : rc;
}

static void hc_mean_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_hc_mean_args *a = c->args;
    float even[MAX_STREAMS];

    (void)worker;
    for (int64_t s = 0; s < a->streams_n; s++)
        even[s] = 1.0f / (float)a->streams_n;
    for (int64_t r = begin; r < end; r++)
        c->v->mix((float *)a->y.p + r * a->dim, NULL, even,
                  (const float *)a->streams.p + r * a->streams_n * a->dim, a->dim,
                  a->streams_n, a->dim);
}

int hx_cpu_hc_mean(hx_dev *d, const hx_hc_mean_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, hc_mean_part, a, a->rows, a->streams_n * a->dim);
}

/* ---- router ---------------------------------------------------------- */

/* Items are ROWS rows times OUTS experts. */
static void router_score_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_router_args *a = c->args;
    const int64_t n = a->w->n, width = a->w->k, n_block = (n + OUTS - 1) / OUTS;
    float part[ROWS * OUTS];
    double sum[ROWS * OUTS];
    product p = { .v = c->v,
                  .m = a->w,
                  .ldx = width,
                  .c = part,
                  .ldc = OUTS,
                  .wide = hx_cpu_work(c->dev, worker) };

    for (int64_t i = begin; i < end; i++) {
        const int64_t r0 = i / n_block * ROWS, e0 = i % n_block * OUTS,
                      few = HX_MIN(OUTS, n - e0);

        p.x = (const float *)a->x.p + r0 * width;
        p.rows = HX_MIN(ROWS, a->rows - r0);
        memset(sum, 0, sizeof(sum));
        for (int64_t k0 = 0; k0 < width; k0 += HX_KERN_BLOCK) {
            multiply_block(&p, e0, few, k0, HX_MIN(HX_KERN_BLOCK, width - k0));
            for (int64_t r = 0; r < p.rows; r++)
                for (int64_t e = 0; e < few; e++)
                    sum[r * OUTS + e] += (double)part[r * OUTS + e];
        }
        for (int64_t r = 0; r < p.rows; r++) {
            float *score = (float *)a->score.p + (r0 + r) * n + e0;

            for (int64_t e = 0; e < few; e++)
                score[e] = (float)sum[r * OUTS + e];
            c->v->gate(score, score, NULL, 1, 1, few);
        }
    }
}

/* The best of one row, by insertion: most experts fail the first comparison. */
static void pick_experts(const hx_router_args *a, int64_t r, double *key)
{
    const float *score = (const float *)a->score.p + r * a->w->n, *bias = a->bias.p;
    float *weight = (float *)a->weight.p + r * a->active;
    int32_t *id = (int32_t *)a->id.p + r * a->active;
    double sum = 1e-20;

    for (int64_t e = 0, n = 0; e < a->w->n; e++) {
        const double k = (double)score[e] + (double)bias[e];
        int64_t at;

        if (n == a->active && !(k > key[n - 1]))
            continue;
        n = HX_MIN(n + 1, a->active);
        for (at = n - 1; at > 0 && k > key[at - 1]; at--) {
            key[at] = key[at - 1];
            id[at] = id[at - 1];
        }
        key[at] = k;
        id[at] = (int32_t)e;
    }
    for (int64_t i = 0; i < a->active; i++)
        sum += (double)score[id[i]];
    for (int64_t i = 0; i < a->active; i++)
        weight[i] = (float)((double)score[id[i]] / sum * (double)a->factor);
}

static void router_pick_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;

    for (int64_t r = begin; r < end; r++)
        pick_experts(c->args, r, hx_cpu_work(c->dev, worker));
}

int hx_cpu_router(hx_dev *d, const hx_router_args *a, hx_err *err)
{
    const int64_t rows = HX_MIN(ROWS, a->rows), n = a->w->n;
    const int64_t items = (a->rows + ROWS - 1) / ROWS * ((n + OUTS - 1) / OUTS);

    if ((size_t)a->active > HX_KERN_WORKER_BYTES / sizeof(double))
        return hx_fail(err, HX_EUNSUP,
                       "router: %lld active experts are too many for the cpu backend",
                       (long long)a->active);
    hx_cpu_run(d, router_score_part, a, items, rows * OUTS * a->w->k * 2);
    return hx_cpu_run(d, router_pick_part, a, a->rows, 8 * n);
}
