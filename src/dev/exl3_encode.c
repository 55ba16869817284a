/* exl3_encode.c - a weight matrix to EXL3: scales and rotation, the gain, error feedback
 * through the input's Hessian (LDLQ), refit of the scales. Called by quantize. Works in
 * f32, as [k, n] (inputs by outputs), the layout of tiles, on matrices that only the
 * operations of enc_ops.h touch: they lie on the host or on a GPU. Source: exl3.md 10.
 *
 * One thing differs from the reference quantizer: the Hessian that steers the feedback is
 * rotated with the input scales, not with their signs alone (exl3.md 10.6), because the
 * error that the model sees is that of the scaled matrix. */
#include <math.h>

#include "dev/enc_ops.h"
#include "dev/fmt_exl3.h"

#define TILE    HX_ENC_TILE
#define ROW_RMS 1.24371088f /* of the rotated rows before the gain: the format's habit */
#define SAMPLE  64          /* tiles that gains are tried on, */
#define MANY    1024        /* … in matrices of at least so many */
#define STEP    0.1f        /* between gains that are tried */
#define ROUNDS  2           /* of the refit */
#define RIDGE   1e-6f       /* of the refit's equations, of their mean diagonal */
#define FLOOR   1e-5f       /* of a Hessian's, for inputs whose weights are all 0 */
#define MORE    0.05f       /* more where it cannot be factored, so often: */
#define TRY_MAX 10

typedef struct {
    const hx_exl3_job *job;
    const hx_enc_ops *ops;
    hx_exl3_out *out;
    hx_enc m;       /* whoever computes; the matrices up to hw are there */
    int64_t n, k;   /* padded */
    float *w;       /* [k, n] the matrix */
    float *h;       /* [k, k] damped Hessian */
    float *rot;     /* [k, n] the matrix scaled and rotated, then times the gain */
    float *q;       /* [k, n] what the states are worth, then the matrix that they give */
    float *u;       /* [k, k] a factor; row block b then holds inv(U_bb) U_b */
    float *hw;      /* [k, n] scratch, then H W */
    float *su, *sv; /* [k], [n] */
    float *by_k, *by_n; /* [k], [n] factors of an operation */
    float *diag;        /* [k] */
    double *sum;        /* [2 max(k, n)] */
} encoder;

/* ---- scales ------------------------------------------------------------- */

static float sign_of(const float *given, uint64_t seed, int64_t i)
{
    if (given != NULL)
        return given[i] < 0 ? -1.0f : 1.0f;
    return hx_rng_at(seed, (uint64_t)i) & 1 ? -1.0f : 1.0f;
}

static const float *all(float *v, int64_t n, float x)
{
    for (int64_t i = 0; i < n; i++)
        v[i] = x;
    return v;
}

static float inverse(float x)
{
    return x != 0 ? 1 / x : 0;
}

/* The sentence for the first weight that is not finite. */
static int bad_weight(const hx_exl3_job *job, hx_err *err)
{
    int64_t i = 0;

    while (i + 1 < job->n * job->k && isfinite(job->w[i]))
        i++;
    return hx_fail(err, HX_EARG, "EXL3: weight [%lld, %lld] is not finite",
                   (long long)(i / job->k), (long long)(i % job->k));
}

/* The matrix transposed and padded, and output scales: the rms of each output in units of
 * their mean, with a random sign. Outputs without weights have the scale 0. */
static int take_matrix(encoder *e, hx_err *err)
{
    const hx_exl3_job *job = e->job;
    double mean = 0;
    int rc;

    e->ops->put(&e->m, e->q, job->w, job->n * job->k);
    e->ops->transpose(&e->m, e->w, e->n, e->q, job->n, job->k);
    if ((rc = e->ops->dot_columns(&e->m, e->w, e->w, e->k, e->n, e->sum, err)) != 0)
        return rc;
    for (int64_t j = 0; j < e->n; j++) {
        if (!isfinite(e->sum[j]))
            return bad_weight(job, err);
        e->sv[j] = (float)sqrt(e->sum[j] / (double)job->k);
        mean += (double)e->sv[j] / (double)job->n;
    }
    for (int64_t j = 0; mean > 0 && j < e->n; j++)
        e->sv[j] *= (float)(1 / mean) * sign_of(job->sign_out, job->seed + 1, j);
    return 0;
}

/* rot = P (W / su / sv) P, where su brings each half-rotated row to the same rms. Rows
 * that f16 cannot scale count as 0. */
static int regularise(encoder *e, hx_err *err)
{
    const int64_t n = e->n, k = e->k;
    int rc;

    for (int64_t j = 0; j < n; j++)
        e->by_n[j] = inverse(e->sv[j]);
    e->ops->scale(&e->m, e->rot, e->w, all(e->by_k, k, 1), e->by_n, k, n);
    e->ops->rotate_right(&e->m, e->rot, k, n);
    if ((rc = e->ops->dot_rows(&e->m, e->rot, e->rot, k, n, e->sum, err)) != 0)
        return rc;
    for (int64_t i = 0; i < k; i++) {
        const float su = (float)sqrt(e->sum[i] / (double)n) / ROW_RMS;

        e->su[i] = su < 1e-7f ? 0 : -su * sign_of(e->job->sign_in, e->job->seed, i);
        e->by_k[i] = inverse(e->su[i]);
    }
    e->ops->scale(&e->m, e->rot, e->rot, e->by_k, all(e->by_n, n, 1), k, n);
    e->ops->rotate_left(&e->m, e->rot, k, n);
    return 0;
}

/* ---- Hessian ------------------------------------------------------------ */

static double mean_of(const float *x, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i];
    return sum / (double)n;
}

/* The damped Hessian; the identity where there is none or one of nothing. */
static int take_hessian(encoder *e, hx_err *err)
{
    double mean;
    int rc;

    if (e->job->h != NULL)
        e->ops->put(&e->m, e->h, e->job->h, e->k * e->k);
    if ((rc = e->ops->get_diag(&e->m, e->h, e->k, e->diag, err)) != 0)
        return rc;
    mean = mean_of(e->diag, e->k) * (double)e->k / (double)e->job->k;
    if (!(mean > 1e-20)) {
        e->ops->zero(&e->m, e->h, e->k * e->k);
        all(e->diag, e->k, 1);
        mean = 1;
    }
    for (int64_t i = 0; i < e->k; i++)
        e->diag[i] += (float)((double)HX_EXL3_DAMP * mean);
    e->ops->put_diag(&e->m, e->h, e->k, e->diag);
    return 0;
}

/* u = what feeds errors of later row blocks back to earlier ones: the block LDL of
 * P diag(su) H diag(su) P, from its Cholesky factor; 0 where it has none. */
static int make_feedback(encoder *e, hx_err *err)
{
    const int64_t k = e->k;
    bool done = false;
    int rc;

    for (int t = 0; t < TRY_MAX; t++) {
        e->ops->scale(&e->m, e->u, e->h, e->su, e->su, k, k);
        e->ops->rotate_right(&e->m, e->u, k, k);
        e->ops->rotate_left(&e->m, e->u, k, k);
        if ((rc = e->ops->get_diag(&e->m, e->u, k, e->diag, err)) != 0)
            return rc;
        const double mean = mean_of(e->diag, k);

        if (!(mean > 0))
            break; /* nothing but zeros */
        for (int64_t i = 0; i < k; i++)
            e->diag[i] += (float)(mean * (double)(FLOOR + (float)t * MORE));
        e->ops->put_diag(&e->m, e->u, k, e->diag);
        if ((rc = e->ops->factor(&e->m, e->u, k, &done, err)) != 0)
            return rc;
        if (done) {
            e->ops->normalise(&e->m, e->u, k);
            return 0;
        }
    }
    e->ops->zero(&e->m, e->u, k * k);
    return 0;
}

/* ---- gain ---------------------------------------------------------------- */

/* Sample tiles lie on diagonals, so that all rows and columns have their say. */
static int64_t sample_tile(const encoder *e, int64_t i, int64_t n)
{
    const int64_t tall = e->k / TILE, wide = e->n / TILE;

    return i * tall / n * wide + (i * 7 + i / wide) % wide;
}

/* Sample tiles, and their error under a gain. */
typedef struct {
    float tile[SAMPLE][256], target[SAMPLE][256], value[SAMPLE][256];
    uint16_t state[SAMPLE][256];
} trial;

static int try_gain(encoder *e, trial *t, float gain, double *error, hx_err *err)
{
    double sum = 0;
    int rc;

    for (int i = 0; i < SAMPLE; i++)
        for (int p = 0; p < 256; p++)
            t->target[i][p] = gain * t->tile[i][p];
    if ((rc = e->ops->search(&e->m, (const float(*)[256])t->target, SAMPLE, t->state,
                             t->value, err)) != 0)
        return rc;
    for (int i = 0; i < SAMPLE; i++)
        for (int p = 0; p < 256; p++) {
            const double d = (double)(t->value[i][p] - t->target[i][p]);

            sum += d * d;
        }
    *error = sum / ((double)gain * (double)gain);
    return 0;
}

/* Where normal values of rms ROW_RMS meet their codebook best (measured on 96 to 160 tiles
 * of them). The other two codebooks are 1.24 times as wide as MUL1. */
static float usual_gain(const hx_exl3_job *job)
{
    static const float by_rate[17] = {
        [2] = .86f,  [3] = .824f,  [4] = .795f,  [5] = .772f,  [6] = .761f, [7] = .755f,
        [8] = .734f, [10] = .713f, [12] = .677f, [14] = .650f, [16] = .637f
    };

    return by_rate[job->k2] * (job->codebook == HX_CB_MUL1 ? 1 : 1.23f);
}

/* Feedback makes values grow by so much (k2 2 to 6; measured, exl3.md 10.4). */
static float drift(int k2)
{
    static const float by_rate[] = { 1.08f, 1.035f, 1.018f, 1.009f, 1.004f };

    return k2 - 2 < (int)HX_LEN(by_rate) ? by_rate[k2 - 2] : 1;
}

/* The gain at which a sample of the matrix is coded best: downhill from the usual one to a
 * point whose neighbours are worse, then by a parabola. */
static int find_gain(encoder *e, trial *t, float *out, hx_err *err)
{
    int64_t at[SAMPLE];
    float gain = usual_gain(e->job);
    double low, mid, high;
    int rc;

    for (int i = 0; i < SAMPLE; i++)
        at[i] = sample_tile(e, i, SAMPLE);
    if ((rc = e->ops->tiles(&e->m, e->rot, e->n, at, SAMPLE, t->tile, err)) != 0 ||
        (rc = try_gain(e, t, gain - STEP, &low, err)) != 0 ||
        (rc = try_gain(e, t, gain, &mid, err)) != 0 ||
        (rc = try_gain(e, t, gain + STEP, &high, err)) != 0)
        return rc;
    while (low < mid && gain > 3 * STEP) {
        gain -= STEP;
        high = mid;
        mid = low;
        if ((rc = try_gain(e, t, gain - STEP, &low, err)) != 0)
            return rc;
    }
    while (high < mid && gain < 2) {
        gain += STEP;
        low = mid;
        mid = high;
        if ((rc = try_gain(e, t, gain + STEP, &high, err)) != 0)
            return rc;
    }
    if (low + high > 2 * mid)
        gain += STEP * (float)((low - high) / (low - 2 * mid + high) / 2);
    *out = gain;
    return 0;
}

/* Brings the rotated matrix to the codebook's level. In a matrix of few tiles a sample says
 * less than the rotation does, which makes all matrices alike. */
static int apply_gain(encoder *e, hx_err *err)
{
    float gain = usual_gain(e->job);

    if (e->k / TILE * (e->n / TILE) >= MANY) {
        trial *t = hx_new(trial, 1);
        const int rc = t != NULL
                           ? find_gain(e, t, &gain, err)
                           : hx_fail(err, HX_ENOMEM, "EXL3: no memory for a sample");

        hx_free(t);
        if (rc != 0)
            return rc;
    }
    gain /= drift(e->job->k2);
    e->ops->scale(&e->m, e->rot, e->rot, all(e->by_k, e->k, gain), all(e->by_n, e->n, 1),
                  e->k, e->n);
    for (int64_t i = 0; i < e->k; i++)
        e->su[i] /= gain;
    e->out->gain = gain;
    return 0;
}

/* ---- refit ---------------------------------------------------------------- */

/* c = a b for a [k, k] symmetric and b [k, n]. */
static void mul_square(encoder *e, float *c, const float *a, const float *b)
{
    const hx_dense_args p = { .c = c,
                              .a = a,
                              .b = b,
                              .ldc = e->n,
                              .ars = e->k,
                              .acs = 1,
                              .ldb = e->n,
                              .m = e->k,
                              .n = e->n,
                              .k = e->k,
                              .sign = 1 };

    e->ops->zero(&e->m, c, e->k * e->n);
    e->ops->mul(&e->m, &p);
}

/* Per output, the factor c = q^T H w / q^T H q. */
static int refit_outputs(encoder *e, const float *hq, hx_err *err)
{
    const int64_t n = e->n;
    double *const hw = e->sum, *const sq = e->sum + n;
    int rc;

    if ((rc = e->ops->dot_columns(&e->m, e->q, e->hw, e->k, n, hw, err)) != 0 ||
        (rc = e->ops->dot_columns(&e->m, e->q, hq, e->k, n, sq, err)) != 0)
        return rc;
    for (int64_t j = 0; j < n; j++) {
        const double c = sq[j] > 0 ? hw[j] / sq[j] : 1;

        e->by_n[j] = c > 0.5 && c < 2 ? (float)c : 1;
        e->sv[j] *= e->by_n[j];
    }
    e->ops->scale(&e->m, e->q, e->q, all(e->by_k, e->k, 1), e->by_n, e->k, n);
    return 0;
}

/* Per input, the factors r that solve ((Q Q^T) o H) r = rowsum(Q o (H W)). qt: [n, k]
 * scratch; uses u. */
static int refit_inputs(encoder *e, float *qt, hx_err *err)
{
    const int64_t n = e->n, k = e->k;
    float *const r = e->by_k;
    bool done = false;
    int rc;

    if ((rc = e->ops->dot_rows(&e->m, e->q, e->hw, k, n, e->sum, err)) != 0)
        return rc;
    for (int64_t i = 0; i < k; i++)
        r[i] = (float)e->sum[i];
    e->ops->transpose(&e->m, qt, k, e->q, k, n);
    e->ops->zero(&e->m, e->u, k * k);
    e->ops->gram(&e->m, e->u, qt, n, k);
    e->ops->times(&e->m, e->u, e->h, k * k);
    if ((rc = e->ops->get_diag(&e->m, e->u, k, e->diag, err)) != 0)
        return rc;
    const double mean = mean_of(e->diag, k);

    for (int64_t i = 0; i < k; i++) /* inputs without weights: r = 0 = 1 0 */
        e->diag[i] += e->diag[i] > 0 ? (float)mean * RIDGE : (float)mean;
    e->ops->put_diag(&e->m, e->u, k, e->diag);
    if (!(mean > 0))
        return 0;
    if ((rc = e->ops->factor(&e->m, e->u, k, &done, err)) != 0 || !done ||
        (rc = e->ops->solve(&e->m, e->u, k, r, err)) != 0)
        return rc;
    for (int64_t i = 0; i < k; i++) {
        r[i] = r[i] > 0.25f && r[i] < 4 ? r[i] : 1;
        e->su[i] *= r[i];
    }
    e->ops->scale(&e->m, e->q, e->q, r, all(e->by_n, n, 1), k, n);
    return 0;
}

/* q = diag(su) P What P diag(sv): the values of the states become the matrix. */
static void unrotate(encoder *e)
{
    e->ops->rotate_left(&e->m, e->q, e->k, e->n);
    e->ops->rotate_right(&e->m, e->q, e->k, e->n);
    e->ops->scale(&e->m, e->q, e->q, e->su, e->sv, e->k, e->n);
}

/* Of scales as computed, those that are stored and what they are of them. */
static void store_scales(const float *scale, int64_t n, uint16_t *out, float *ratio)
{
    for (int64_t i = 0; i < n; i++) {
        out[i] = hx_f16_from(scale[i]);
        ratio[i] = scale[i] != 0 ? hx_f16_to(out[i]) / scale[i] : 0;
    }
}

static int dot(encoder *e, const float *a, const float *b, double *out, hx_err *err)
{
    const int rc = e->ops->dot_rows(&e->m, a, b, e->k, e->n, e->sum, err);

    *out = 0;
    for (int64_t i = 0; rc == 0 && i < e->k; i++)
        *out += e->sum[i];
    return rc;
}

/* The scales as they are stored, q with them, and how good that is. x [k, n] scratch. */
static int finish(encoder *e, float *x, hx_err *err)
{
    double e2, w2, ehe, whw;
    int rc;

    store_scales(e->su, e->k, e->out->suh, e->by_k);
    store_scales(e->sv, e->n, e->out->svh, e->by_n);
    e->ops->scale(&e->m, e->q, e->q, e->by_k, e->by_n, e->k, e->n);
    e->ops->subtract(&e->m, e->q, e->w, e->k * e->n);
    mul_square(e, x, e->h, e->q);
    if ((rc = dot(e, e->w, e->hw, &whw, err)) != 0 ||
        (rc = dot(e, e->q, x, &ehe, err)) != 0 ||
        (rc = dot(e, e->q, e->q, &e2, err)) != 0 ||
        (rc = dot(e, e->w, e->w, &w2, err)) != 0)
        return rc;
    e->out->proxy = whw > 0 ? ehe / whw : 0;
    e->out->mse = w2 > 0 ? e2 / w2 : 0;
    return 0;
}

/* ---- all of it ------------------------------------------------------------- */

static int encode(encoder *e, hx_err *err)
{
    const hx_enc_feed feed = {
        .rot = e->rot, .u = e->u, .q = e->q, .work = e->hw, .trellis = e->out->trellis
    };
    float *const hq = e->rot; /* free once the states are there */
    int rc;

    if ((rc = take_matrix(e, err)) != 0 || (rc = regularise(e, err)) != 0 ||
        (rc = take_hessian(e, err)) != 0 || (rc = make_feedback(e, err)) != 0 ||
        (rc = apply_gain(e, err)) != 0 || (rc = e->ops->feed(&e->m, &feed, err)) != 0)
        return rc;
    mul_square(e, e->hw, e->h, e->w);
    unrotate(e);
    for (int i = 0; i < ROUNDS; i++) {
        mul_square(e, hq, e->h, e->q);
        if ((rc = refit_outputs(e, hq, err)) != 0 || (rc = refit_inputs(e, hq, err)) != 0)
            return rc;
    }
    return finish(e, hq, err);
}

/* Host memory, and the matrices where they are worked on. */
static int take_memory(encoder *e, hx_pool *pool, hx_err *err)
{
    const int64_t kn = e->k * e->n, kk = e->k * e->k;
    const struct {
        float **to;
        int64_t n;
    } far[] = { { &e->w, kn }, { &e->h, kk }, { &e->rot, kn },
                { &e->q, kn }, { &e->u, kk }, { &e->hw, kn } };
    int rc = 0;

    e->su = hx_new(float, e->k);
    e->sv = hx_new(float, e->n);
    e->by_k = hx_new(float, e->k);
    e->by_n = hx_new(float, e->n);
    e->diag = hx_new(float, e->k);
    e->sum = hx_new(double, 2 * HX_MAX(e->k, e->n));
    if (e->su == NULL || e->sv == NULL || e->by_k == NULL || e->by_n == NULL ||
        e->diag == NULL || e->sum == NULL)
        return hx_fail(err, HX_ENOMEM, "EXL3: no memory for the scales");
    if ((rc = hx_enc_open(&e->m, pool, e->job->dev, err)) != 0)
        return rc;
    e->ops = e->m.ops;
    for (size_t i = 0; rc == 0 && i < HX_LEN(far); i++)
        rc = e->ops->alloc(&e->m, far[i].to, far[i].n, err);
    return rc;
}

int hx_exl3_encode(const hx_exl3_job *job, hx_pool *pool, hx_exl3_out *out, hx_err *err)
{
    encoder e = {
        .job = job, .out = out, .n = HX_EXL3_PAD(job->n), .k = HX_EXL3_PAD(job->k)
    };
    int rc;

    if (job->n < 1 || job->k < 1 || job->n > INT32_MAX / 2 || job->k > 1 << 17)
        return hx_fail(err, HX_EARG, "EXL3: no matrix of %lld outputs and %lld inputs",
                       (long long)job->n, (long long)job->k);
    e.m = (hx_enc) { .codebook = job->codebook, .k2 = job->k2, .n = e.n, .k = e.k };
    if ((rc = take_memory(&e, pool, err)) == 0)
        rc = encode(&e, err);
    if (e.ops != NULL) {
        float *const far[] = { e.w, e.h, e.rot, e.q, e.u, e.hw };

        for (size_t i = 0; i < HX_LEN(far); i++)
            e.ops->free(&e.m, far[i]);
    }
    hx_enc_close(&e.m);
    hx_free(e.su);
    hx_free(e.sv);
    hx_free(e.by_k);
    hx_free(e.by_n);
    hx_free(e.diag);
    hx_free(e.sum);
    return rc;
}
