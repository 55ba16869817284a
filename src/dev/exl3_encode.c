/* exl3_encode.c - a weight matrix to EXL3: scales and rotation, the gain, error feedback
 * through the input's Hessian (LDLQ), refit of the scales. Called by quantize. Works in
 * f32, as [k, n] (inputs by outputs), the layout of tiles. Source: exl3.md 10.
 *
 * One thing differs from the reference quantizer: the Hessian that steers the feedback is
 * rotated with the input scales, not with their signs alone (exl3.md 10.6), because the
 * error that the model sees is that of the scaled matrix. */
#include <math.h>

#include "dev/dense.h"
#include "dev/exl3_encode.h"
#include "dev/fmt_exl3.h"

#define BLOCK   128 /* of the rotation, and rows between two large updates */
#define TILE    16
#define STRIP   32          /* outputs that are encoded together: two tiles */
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
    hx_pool *pool;
    hx_exl3_out *out;
    int64_t n, k;   /* padded */
    float *w;       /* [k, n] the matrix */
    float *h;       /* [k, k] damped Hessian */
    float *rot;     /* [k, n] the matrix scaled and rotated, then times the gain */
    float *q;       /* [k, n] what the states are worth, then the matrix that they give */
    float *u;       /* [k, k] a factor; row block b then holds inv(U_bb) U_b */
    float *su, *sv; /* [k], [n] */
    float *work;    /* [workers][2][k, STRIP] targets and errors of a strip */
    hx_trellis *trellis;
} encoder;

/* ---- rotation ----------------------------------------------------------- */

typedef struct {
    float *x;
    int64_t n;
} rotation;

/* Aligned groups of 128 values. */
static void rotate_group(void *ud, int64_t begin, int64_t end, int worker)
{
    const rotation *r = ud;

    (void)worker;
    for (int64_t g = begin; g < end; g++) {
        float *x = r->x + g * BLOCK;

        for (int64_t w = 1; w < BLOCK; w *= 2)
            for (int64_t i = 0; i < BLOCK; i += 2 * w)
                for (int64_t j = i; j < i + w; j++) {
                    const float a = x[j], b = x[j + w];

                    x[j] = a + b;
                    x[j + w] = a - b;
                }
        for (int64_t i = 0; i < BLOCK; i++)
            x[i] *= sqrtf(1.0f / BLOCK);
    }
}

/* x P, x [rows, n] */
static void rotate_right(hx_pool *pool, float *x, int64_t rows, int64_t n)
{
    rotation r = { x, n };

    hx_pool_run(pool, rows * n / BLOCK, 64, rotate_group, &r);
}

/* Groups of 128 rows, STRIP columns at a time, which stay in the cache. */
static void rotate_rows(void *ud, int64_t begin, int64_t end, int worker)
{
    const rotation *r = ud;
    const int64_t n = r->n, wide = n / STRIP;

    (void)worker;
    for (int64_t g = begin; g < end; g++) {
        float *x = r->x + g / wide * BLOCK * n + g % wide * STRIP;

        for (int64_t w = 1; w < BLOCK; w *= 2)
            for (int64_t i = 0; i < BLOCK; i++)
                for (int64_t j = 0; (i & w) == 0 && j < STRIP; j++) {
                    const float a = x[i * n + j], b = x[(i + w) * n + j];

                    x[i * n + j] = a + b;
                    x[(i + w) * n + j] = a - b;
                }
        for (int64_t i = 0; i < BLOCK; i++)
            for (int64_t j = 0; j < STRIP; j++)
                x[i * n + j] *= sqrtf(1.0f / BLOCK);
    }
}

/* P x, x [rows, n] */
static void rotate_left(hx_pool *pool, float *x, int64_t rows, int64_t n)
{
    rotation r = { x, n };

    hx_pool_run(pool, rows / BLOCK * (n / STRIP), 4, rotate_rows, &r);
}

/* ---- scales ------------------------------------------------------------- */

static float sign_of(const float *given, uint64_t seed, int64_t i)
{
    if (given != NULL)
        return given[i] < 0 ? -1.0f : 1.0f;
    return hx_rng_at(seed, (uint64_t)i) & 1 ? -1.0f : 1.0f;
}

static double rms(const float *x, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sqrt(sum / (double)n);
}

/* The matrix transposed and padded, and output scales: the rms of each output in units of
 * their mean, with a random sign. Outputs without weights have the scale 0. */
static void take_matrix(encoder *e)
{
    const hx_exl3_job *job = e->job;
    double mean = 0;

    for (int64_t j = 0; j < job->n; j++) {
        e->sv[j] = (float)rms(job->w + j * job->k, job->k);
        mean += (double)e->sv[j] / (double)job->n;
        for (int64_t i = 0; i < job->k; i++)
            e->w[i * e->n + j] = job->w[j * job->k + i];
    }
    for (int64_t j = 0; mean > 0 && j < e->n; j++)
        e->sv[j] *= (float)(1 / mean) * sign_of(job->sign_out, job->seed + 1, j);
}

/* rot = P (W / su / sv) P, where su brings each half-rotated row to the same rms. Rows
 * that f16 cannot scale count as 0. */
static void regularise(encoder *e)
{
    const int64_t n = e->n, k = e->k;

    for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; j < n; j++)
            e->rot[i * n + j] = e->sv[j] != 0 ? e->w[i * n + j] / e->sv[j] : 0;
    rotate_right(e->pool, e->rot, k, n);
    for (int64_t i = 0; i < k; i++) {
        float *row = e->rot + i * n;
        const float su = (float)rms(row, n) / ROW_RMS;

        e->su[i] = su < 1e-7f ? 0 : -su * sign_of(e->job->sign_in, e->job->seed, i);
        for (int64_t j = 0; j < n; j++)
            row[j] = e->su[i] != 0 ? row[j] / e->su[i] : 0;
    }
    rotate_left(e->pool, e->rot, k, n);
}

/* ---- Hessian ------------------------------------------------------------ */

static double mean_diag(const float *h, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (double)h[i * n + i];
    return sum / (double)n;
}

static void add_diag(float *h, int64_t n, double x)
{
    for (int64_t i = 0; i < n; i++)
        h[i * n + i] += (float)x;
}

/* The damped Hessian; the identity where there is none or one of nothing. */
static void take_hessian(encoder *e)
{
    const size_t bytes = (size_t)(e->k * e->k) * sizeof(float);
    double mean;

    if (e->job->h != NULL)
        memcpy(e->h, e->job->h, bytes);
    mean = mean_diag(e->h, e->k) * (double)e->k / (double)e->job->k;
    if (!(mean > 1e-20)) {
        memset(e->h, 0, bytes);
        mean = 1;
        add_diag(e->h, e->k, 1);
    }
    add_diag(e->h, e->k, (double)HX_EXL3_DAMP * mean);
}

/* Row block b of u becomes inv(U_bb) U_b. */
static void normalise_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const encoder *e = ud;
    const int64_t k = e->k;

    (void)worker;
    for (int64_t b = begin; b < end; b++)
        for (int64_t i = TILE - 1; i >= 0; i--) {
            float *ri = e->u + (b * TILE + i) * k;

            for (int64_t r = i + 1; r < TILE; r++) {
                const float f = ri[b * TILE + r], *rr = e->u + (b * TILE + r) * k;

                for (int64_t c = (b + 1) * TILE; c < k; c++)
                    ri[c] -= f * rr[c];
            }
            for (int64_t c = (b + 1) * TILE; c < k; c++)
                ri[c] /= ri[b * TILE + i];
        }
}

/* u = what feeds errors of later row blocks back to earlier ones: the block LDL of
 * P diag(su) H diag(su) P, from its Cholesky factor. False: it has none. */
static bool make_feedback(encoder *e)
{
    const int64_t k = e->k;
    double mean = 0;

    for (int t = 0; t < TRY_MAX; t++) {
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < k; j++)
                e->u[i * k + j] = e->su[i] * e->h[i * k + j] * e->su[j];
        rotate_right(e->pool, e->u, k, k);
        rotate_left(e->pool, e->u, k, k);
        mean = mean_diag(e->u, k);
        if (!(mean > 0))
            return false;
        add_diag(e->u, k, mean * (double)(FLOOR + (float)t * MORE));
        if (hx_dense_factor(e->pool, e->u, k)) {
            hx_pool_run(e->pool, k / TILE, 1, normalise_part, e);
            return true;
        }
    }
    return false;
}

/* ---- gain ---------------------------------------------------------------- */

/* The error of sample tiles under one gain. */
typedef struct {
    encoder *e;
    int64_t n_tile;
    float gain;
    double sum[SAMPLE / 2]; /* per pair */
} trial;

static void read_tile(const encoder *e, int64_t tile, float gain, float out[256])
{
    const int64_t wide = e->n / TILE;
    const float *at = e->rot + tile / wide * TILE * e->n + tile % wide * TILE;

    for (int p = 0; p < 256; p++)
        out[p] = gain * at[hx_exl3_row(p) * e->n + hx_exl3_col(p)];
}

/* Sample tiles lie on diagonals, so that all rows and columns have their say. */
static int64_t sample_tile(const encoder *e, int64_t i, int64_t n)
{
    const int64_t tall = e->k / TILE, wide = e->n / TILE;

    return i * tall / n * wide + (i * 7 + i / wide) % wide;
}

static void trial_part(void *ud, int64_t begin, int64_t end, int worker)
{
    trial *t = ud;
    float target[2][256], value[2][256];
    uint16_t state[2][256];

    for (int64_t i = begin; i < end; i++) {
        for (int j = 0; j < 2; j++)
            read_tile(t->e, sample_tile(t->e, i * 2 + j, t->n_tile), t->gain, target[j]);
        hx_trellis_search(t->e->trellis, worker, (const float(*)[256])target, state,
                          value);
        t->sum[i] = 0;
        for (int p = 0; p < 512; p++) {
            const double d = (double)((&value[0][0])[p] - (&target[0][0])[p]);

            t->sum[i] += d * d;
        }
    }
}

static double try_gain(trial *t, float gain)
{
    double sum = 0;

    t->gain = gain;
    hx_pool_run(t->e->pool, t->n_tile / 2, 1, trial_part, t);
    for (int64_t i = 0; i < t->n_tile / 2; i++)
        sum += t->sum[i];
    return sum / ((double)gain * (double)gain);
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
static float find_gain(encoder *e)
{
    trial t = { .e = e, .n_tile = SAMPLE };
    float gain = usual_gain(e->job);
    double low = try_gain(&t, gain - STEP), mid = try_gain(&t, gain),
           high = try_gain(&t, gain + STEP);

    while (low < mid && gain > 3 * STEP) {
        gain -= STEP;
        high = mid;
        mid = low;
        low = try_gain(&t, gain - STEP);
    }
    while (high < mid && gain < 2) {
        gain += STEP;
        low = mid;
        mid = high;
        high = try_gain(&t, gain + STEP);
    }
    if (low + high > 2 * mid)
        gain += STEP * (float)((low - high) / (low - 2 * mid + high) / 2);
    return gain;
}

/* Brings the rotated matrix to the codebook's level. In a matrix of few tiles a sample says
 * less than the rotation does, which makes all matrices alike. */
static void apply_gain(encoder *e)
{
    const int64_t n_tile = e->k / TILE * (e->n / TILE);
    const float gain =
        (n_tile < MANY ? usual_gain(e->job) : find_gain(e)) / drift(e->job->k2);

    for (int64_t i = 0; i < e->k * e->n; i++)
        e->rot[i] *= gain;
    for (int64_t i = 0; i < e->k; i++)
        e->su[i] /= gain;
    e->out->gain = gain;
}

/* ---- the search, with feedback ------------------------------------------- */

/* Rows r0 .. r0 + 15 of a strip of two tiles: targets to states, values, errors. */
static void encode_block(encoder *e, int worker, int64_t strip, int64_t r0,
                         const float *t, float *err)
{
    const int64_t n = e->n, j0 = strip * STRIP;
    const int tile_bytes = hx_exl3_tile_bytes(e->job->k2);
    float target[2][256], value[2][256];
    uint16_t state[2][256];

    for (int i = 0; i < 2; i++)
        for (int p = 0; p < 256; p++)
            target[i][p] = t[(r0 + hx_exl3_row(p)) * STRIP + i * TILE + hx_exl3_col(p)];
    hx_trellis_search(e->trellis, worker, (const float(*)[256])target, state, value);
    for (int i = 0; i < 2; i++) {
        const int64_t tile = r0 / TILE * (n / TILE) + strip * 2 + i;

        hx_trellis_pack(e->job->k2, state[i],
                        (uint8_t *)e->out->trellis + tile * tile_bytes);
        for (int p = 0; p < 256; p++) {
            const int64_t r = r0 + hx_exl3_row(p), c = i * TILE + hx_exl3_col(p);

            e->q[r * n + j0 + c] = value[i][p];
            err[r * STRIP + c] = e->rot[r * n + j0 + c] - value[i][p];
        }
    }
}

/* Row blocks from the last to the first; each target takes in the errors of all blocks
 * below it. Strips know nothing of each other. */
static void strip_part(void *ud, int64_t begin, int64_t end, int worker)
{
    encoder *e = ud;
    const int64_t n = e->n, k = e->k;
    float *t = e->work + (int64_t)worker * 2 * k * STRIP, *err = t + k * STRIP;

    for (int64_t s = begin; s < end; s++) {
        for (int64_t i = 0; i < k; i++)
            memcpy(t + i * STRIP, e->rot + i * n + s * STRIP, STRIP * sizeof(float));
        for (int64_t r = k - TILE; r >= 0; r -= TILE) {
            const int64_t span = r / BLOCK * BLOCK;
            hx_dense_args near = { .c = t + span * STRIP,
                                   .a = e->u + span * k + r,
                                   .b = err + r * STRIP,
                                   .ldc = STRIP,
                                   .ars = k,
                                   .acs = 1,
                                   .ldb = STRIP,
                                   .m = r - span,
                                   .n = STRIP,
                                   .k = TILE,
                                   .sign = 1 };

            encode_block(e, worker, s, r, t, err);
            hx_dense_mul(NULL, &near);
            if (r != span)
                continue;
            near.c = t;
            near.a = e->u + span;
            near.m = span;
            near.k = BLOCK;
            hx_dense_mul(NULL, &near);
        }
    }
}

/* ---- refit ---------------------------------------------------------------- */

/* c = a b for a [k, k] symmetric and b [k, n]. */
static void mul_square(const encoder *e, float *c, const float *a, const float *b)
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

    memset(c, 0, (size_t)(e->k * e->n) * sizeof(float));
    hx_dense_mul(e->pool, &p);
}

static double dot(const float *a, const float *b, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Per output, the factor c = q^T H w / q^T H q. */
static void refit_outputs(encoder *e, const float *hw, const float *hq, double *sum)
{
    const int64_t n = e->n;

    memset(sum, 0, (size_t)(2 * n) * sizeof(double));
    for (int64_t i = 0; i < e->k * n; i++) {
        sum[i % n] += (double)e->q[i] * (double)hw[i];
        sum[n + i % n] += (double)e->q[i] * (double)hq[i];
    }
    for (int64_t j = 0; j < n; j++) {
        const double c = sum[n + j] > 0 ? sum[j] / sum[n + j] : 1;

        sum[j] = c > 0.5 && c < 2 ? c : 1;
        e->sv[j] *= (float)sum[j];
    }
    for (int64_t i = 0; i < e->k * n; i++)
        e->q[i] *= (float)sum[i % n];
}

/* Per input, the factors r that solve ((Q Q^T) o H) r = rowsum(Q o (H W)). qt: [n, k]
 * scratch; uses u. */
static void refit_inputs(encoder *e, const float *hw, float *qt, float *r)
{
    const int64_t n = e->n, k = e->k;

    for (int64_t i = 0; i < k; i++) {
        r[i] = (float)dot(e->q + i * n, hw + i * n, n);
        for (int64_t j = 0; j < n; j++)
            qt[j * k + i] = e->q[i * n + j];
    }
    memset(e->u, 0, (size_t)(k * k) * sizeof(float));
    hx_dense_gram(e->pool, e->u, k, qt, k, n, k, 1);
    for (int64_t i = 0; i < k * k; i++)
        e->u[i] *= e->h[i];
    const double mean = mean_diag(e->u, k);

    for (int64_t i = 0; i < k; i++) /* inputs without weights: r = 0 = 1 0 */
        e->u[i * k + i] += e->u[i * k + i] > 0 ? (float)mean * RIDGE : (float)mean;
    if (!(mean > 0) || !hx_dense_factor(e->pool, e->u, k))
        return;
    hx_dense_solve(e->u, k, r);
    for (int64_t i = 0; i < k; i++) {
        const float f = r[i] > 0.25f && r[i] < 4 ? r[i] : 1;

        e->su[i] *= f;
        for (int64_t j = 0; j < n; j++)
            e->q[i * n + j] *= f;
    }
}

/* q = diag(su) P What P diag(sv): the values of the states become the matrix. */
static void unrotate(encoder *e)
{
    const int64_t n = e->n;

    rotate_left(e->pool, e->q, e->k, n);
    rotate_right(e->pool, e->q, e->k, n);
    for (int64_t i = 0; i < e->k * n; i++)
        e->q[i] *= e->su[i / n] * e->sv[i % n];
}

/* The scales as they are stored, q with them, and how good that is. x [k, n] scratch. */
static void finish(encoder *e, const float *hw, float *x)
{
    const int64_t n = e->n, k = e->k, all = k * n;
    double e2, w2, ehe, whw = dot(e->w, hw, all);

    for (int64_t i = 0; i < k; i++) {
        e->out->suh[i] = hx_f16_from(e->su[i]);
        if (e->su[i] != 0)
            e->su[i] = hx_f16_to(e->out->suh[i]) / e->su[i];
    }
    for (int64_t j = 0; j < n; j++) {
        e->out->svh[j] = hx_f16_from(e->sv[j]);
        if (e->sv[j] != 0)
            e->sv[j] = hx_f16_to(e->out->svh[j]) / e->sv[j];
    }
    for (int64_t i = 0; i < all; i++)
        e->q[i] = e->w[i] - e->q[i] * e->su[i / n] * e->sv[i % n];
    mul_square(e, x, e->h, e->q);
    ehe = dot(e->q, x, all);
    e2 = dot(e->q, e->q, all);
    w2 = dot(e->w, e->w, all);
    e->out->proxy = whw > 0 ? ehe / whw : 0;
    e->out->mse = w2 > 0 ? e2 / w2 : 0;
}

/* ---- all of it ------------------------------------------------------------- */

static int check_job(const hx_exl3_job *job, hx_err *err)
{
    if (job->n < 1 || job->k < 1 || job->n > INT32_MAX / 2 || job->k > 1 << 17)
        return hx_fail(err, HX_EARG, "EXL3: no matrix of %lld outputs and %lld inputs",
                       (long long)job->n, (long long)job->k);
    for (int64_t i = 0; i < job->n * job->k; i++)
        if (!isfinite(job->w[i]))
            return hx_fail(err, HX_EARG, "EXL3: weight [%lld, %lld] is not finite",
                           (long long)(i / job->k), (long long)(i % job->k));
    return 0;
}

static int encode(encoder *e, hx_err *err)
{
    const int64_t all = e->k * e->n;
    int rc = 0;

    take_matrix(e);
    regularise(e);
    take_hessian(e);
    if (!make_feedback(e)) /* nothing but zeros */
        memset(e->u, 0, (size_t)(e->k * e->k) * sizeof(float));
    apply_gain(e);
    hx_pool_run(e->pool, e->n / STRIP, 1, strip_part, e);

    /* From here on rot and the strips' memory are free. */
    float *hw = hx_new(float, all), *hq = e->rot, *r = hx_new(float, e->k);
    double *sum = hx_new(double, 2 * e->n);

    if (hw == NULL || r == NULL || sum == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "EXL3: no memory for a refit");
    } else {
        mul_square(e, hw, e->h, e->w);
        unrotate(e);
        for (int i = 0; i < ROUNDS; i++) {
            mul_square(e, hq, e->h, e->q);
            refit_outputs(e, hw, hq, sum);
            refit_inputs(e, hw, hq, r);
        }
        finish(e, hw, hq);
    }
    hx_free(hw);
    hx_free(r);
    hx_free(sum);
    return rc;
}

int hx_exl3_encode(const hx_exl3_job *job, hx_pool *pool, hx_exl3_out *out, hx_err *err)
{
    encoder e = { .job = job,
                  .pool = pool,
                  .out = out,
                  .n = HX_EXL3_PAD(job->n),
                  .k = HX_EXL3_PAD(job->k) };
    const int n_worker = hx_pool_size(pool);
    int rc = check_job(job, err);

    if (rc != 0)
        return rc;
    e.w = hx_new(float, e.k *e.n);
    e.h = hx_new(float, e.k *e.k);
    e.rot = hx_new(float, e.k *e.n);
    e.q = hx_new(float, e.k *e.n);
    e.u = hx_new(float, e.k *e.k);
    e.su = hx_new(float, e.k);
    e.sv = hx_new(float, e.n);
    e.work = hx_new(float, n_worker * 2 * e.k * STRIP);
    if (e.w == NULL || e.h == NULL || e.rot == NULL || e.q == NULL || e.u == NULL ||
        e.su == NULL || e.sv == NULL || e.work == NULL)
        rc = hx_fail(err, HX_ENOMEM, "EXL3: no memory for a matrix [%lld, %lld]",
                     (long long)job->n, (long long)job->k);
    else if ((rc = hx_trellis_open(&e.trellis, job->codebook, job->k2, n_worker, err)) ==
             0)
        rc = encode(&e, err);
    hx_trellis_close(e.trellis);
    float *const all[] = { e.w, e.h, e.rot, e.q, e.u, e.su, e.sv, e.work };

    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_free(all[i]);
    return rc;
}
