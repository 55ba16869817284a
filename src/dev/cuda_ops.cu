/* cuda_ops.cu - the operations of the CUDA backend that are neither products nor need
 * pages: embedding, norms, swiglu, residual streams, the picks of the router, combine.
 * Called through hx_cuda_ops once ops.c has checked the arguments. Must never allocate,
 * wait or read device memory from the host.
 *
 * All of them move memory: a thread takes four neighbours, as one 16-byte access where
 * the address allows it. The order of a sum never depends on the address. */
#include "dev/cuda_dev.h"
#include "dev/cuda_lane.h"
#include "dev/cuda_plain.h"

enum {
    THREADS = 256,
    VEC = 4,         /* neighbours of a thread */
    SLICE = 512,     /* inputs of a partial sum of hc_mix */
    MIX_ROWS = 4,    /* rows that share the weights of a slice */
    MIX_OUTS = 4,    /* outputs whose weights a warp has on their way at a time */
    MAX_STREAMS = 8, /* ops.c: same bound */
};

static const int64_t MAX_GRID_Y = 65535;

static bool aligned16(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

/* Floats at + 0 … 3 of a row of n; 0 past the end. */
HX_DEVICE void load4(float v[4], const float *row, int64_t at, int64_t n, bool wide)
{
    if (wide) {
        const float4 f = *(const float4 *)(row + at);

        v[0] = f.x;
        v[1] = f.y;
        v[2] = f.z;
        v[3] = f.w;
        return;
    }
    for (int i = 0; i < 4; i++)
        v[i] = at + i < n ? row[at + i] : 0.0f;
}

HX_DEVICE void store4(float *row, int64_t at, int64_t n, bool wide, const float v[4])
{
    if (wide) {
        *(float4 *)(row + at) = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
    for (int i = 0; i < 4; i++)
        if (at + i < n)
            row[at + i] = v[i];
}

/* ---- embed ----------------------------------------------------------- */

struct embed_args {
    float *y;
    const int32_t *id;
    hx_plain_mat m;
    int64_t streams;
};

/* An id outside the table leaves NaN, which sampling reports. */
template <int FMT> __global__ void embed_rows(const __grid_constant__ embed_args a);

extern "C" int hx_cuda_embed(hx_dev *d, const hx_embed_args *a, hx_err *err)
{
    const embed_args k = { (float *)a->y.p, (const int32_t *)a->id.p,
                           hx_plain_of(a->table), a->streams };
    const dim3 grid((unsigned)a->rows, (unsigned)hx_ceil_div(a->table->k, THREADS));

    HX_PLAIN_SWITCH(a->table->fmt, HX_LAUNCH(hx_cuda_of(d), "embed", err, embed_rows<FMT>,
                                             grid, THREADS, 0, k));
    return 0;
}

/* A block: 256 columns of one row, for all streams. Grid (R, D / 256). Moves R D weights
 * and 4 R S D bytes. */
template <int FMT> __global__ void embed_rows(const __grid_constant__ embed_args a)
{
    const int64_t r = blockIdx.x, k = a.m.k;
    const int64_t c = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    const int64_t id = a.id[r];

    if (c >= k)
        return;
    const float v = id >= 0 && id < a.m.n ? hx_plain_at<FMT>(a.m, id, c) : NAN;
    for (int64_t s = 0; s < a.streams; s++)
        a.y[(r * a.streams + s) * k + c] = v;
}

/* ---- norms ----------------------------------------------------------- */

struct norm_args {
    float *y;
    const float *x, *w, *b;
    int64_t dim, ldx, ldy;
    float eps;
    bool wide;
};

/* Threads for a row of dim, whole warps; the order of its sums hangs on it. */
static unsigned norm_threads(int64_t dim)
{
    const int64_t n = hx_ceil_div(hx_ceil_div(dim, VEC), 32) * 32;

    return (unsigned)HX_MIN(n, 512);
}

static norm_args norm_of(hx_buf y, hx_buf x, hx_buf w, hx_buf b, int64_t dim, int64_t ldx,
                         int64_t ldy, float eps)
{
    const bool wide = aligned16(y.p) && aligned16(x.p) && aligned16(w.p) &&
                      aligned16(b.p) && dim % VEC == 0 && ldx % VEC == 0 &&
                      ldy % VEC == 0;

    return norm_args { (float *)y.p,
                       (const float *)x.p,
                       (const float *)w.p,
                       (const float *)b.p,
                       dim,
                       ldx,
                       ldy,
                       eps,
                       wide };
}

template <bool MEAN> __global__ void norm_rows(const __grid_constant__ norm_args a);

extern "C" int hx_cuda_rmsnorm(hx_dev *d, const hx_rmsnorm_args *a, hx_err *err)
{
    const norm_args k =
        norm_of(a->y, a->x, a->w, hx_buf { NULL, 0 }, a->dim, a->ldx, a->ldy, a->eps);

    HX_LAUNCH(hx_cuda_of(d), "rmsnorm", err, norm_rows<false>, dim3((unsigned)a->rows),
              norm_threads(a->dim), 0, k);
    return 0;
}

extern "C" int hx_cuda_layernorm(hx_dev *d, const hx_layernorm_args *a, hx_err *err)
{
    const norm_args k = norm_of(a->y, a->x, a->w, a->b, a->dim, a->ldx, a->ldy, a->eps);

    HX_LAUNCH(hx_cuda_of(d), "layernorm", err, norm_rows<true>, dim3((unsigned)a->rows),
              norm_threads(a->dim), 0, k);
    return 0;
}

/* One row a block. MEAN: less its mean, plus b. Grid R. Moves 8 R D bytes; the second and
 * third pass over the row hit the caches. */
template <bool MEAN> __global__ void norm_rows(const __grid_constant__ norm_args a)
{
    __shared__ float shared[33];
    const float *x = a.x + (int64_t)blockIdx.x * a.ldx;
    float *y = a.y + (int64_t)blockIdx.x * a.ldy;
    const int64_t step = (int64_t)blockDim.x * VEC, first = (int64_t)threadIdx.x * VEC;
    float mean = 0, sum = 0;

    if (MEAN) {
        for (int64_t i = first; i < a.dim; i += step) {
            float v[4];

            load4(v, x, i, a.dim, a.wide);
            for (int j = 0; j < 4; j++)
                sum += v[j];
        }
        mean = hx_block_sum(sum, shared) / (float)a.dim;
        sum = 0;
    }
    for (int64_t i = first; i < a.dim; i += step) {
        float v[4];

        load4(v, x, i, a.dim, a.wide);
        for (int j = 0; j < 4; j++) {
            const float t = i + j < a.dim ? v[j] - mean : 0.0f;

            sum = fmaf(t, t, sum);
        }
    }
    const float scale = 1.0f / sqrtf(hx_block_sum(sum, shared) / (float)a.dim + a.eps);
    for (int64_t i = first; i < a.dim; i += step) {
        float v[4], w[4] = { 1, 1, 1, 1 }, b[4] = { 0, 0, 0, 0 };

        load4(v, x, i, a.dim, a.wide);
        if (a.w != NULL)
            load4(w, a.w, i, a.dim, a.wide);
        if (MEAN && a.b != NULL)
            load4(b, a.b, i, a.dim, a.wide);
        for (int j = 0; j < 4; j++)
            v[j] = MEAN ? fmaf((v[j] - mean) * scale, w[j], b[j]) : v[j] * scale * w[j];
        store4(y, i, a.dim, a.wide, v);
    }
}

/* ---- swiglu ---------------------------------------------------------- */

struct swiglu_args {
    float *y;
    const float *gate, *up;
    int64_t n;
    float limit;
    bool wide;
};

__global__ void swiglu_all(const swiglu_args a);

extern "C" int hx_cuda_swiglu(hx_dev *d, const hx_swiglu_args *a, hx_err *err)
{
    const int64_t n = a->rows * a->dim;
    const swiglu_args k = { (float *)a->y.p,
                            (const float *)a->gate.p,
                            (const float *)a->up.p,
                            n,
                            a->limit,
                            aligned16(a->y.p) && aligned16(a->gate.p) &&
                                aligned16(a->up.p) };

    HX_LAUNCH(hx_cuda_of(d), "swiglu", err, swiglu_all,
              dim3((unsigned)hx_ceil_div(n, THREADS * VEC)), THREADS, 0, k);
    return 0;
}

/* 1024 elements a block. Moves 12 R dim bytes. */
__global__ void swiglu_all(const swiglu_args a)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VEC;
    const bool wide = a.wide && i + VEC <= a.n;
    float g[4], u[4];

    if (i >= a.n)
        return;
    load4(g, a.gate, i, a.n, wide);
    load4(u, a.up, i, a.n, wide);
    for (int j = 0; j < 4; j++)
        g[j] = hx_canon_act(g[j], u[j], a.limit);
    store4(a.y, i, a.n, wide, g);
}

/* ---- streams --------------------------------------------------------- */

struct mix_args {
    float *x, *post, *comb, *part; /* part: [R, slices, S (2 + S) + 1] */
    const float *streams, *base, *scale;
    hx_plain_mat fn;
    int64_t rows, dim, slices;
    float norm_eps, eps;
    int iters;
    bool wide;
};

template <int FMT> __global__ void mix_dots(const __grid_constant__ mix_args a);
template <int S> __global__ void mix_rows(const __grid_constant__ mix_args a);
__global__ void mix_copy(const mix_args a);

static int64_t mix_slices(int64_t width)
{
    return hx_ceil_div(width, SLICE);
}

/* Some rows: those whose partial sums the scratch holds. */
static int mix_some(hx_cuda *c, const mix_args &k, int fmt, int64_t s, hx_err *err)
{
    const dim3 grid((unsigned)k.slices, (unsigned)hx_ceil_div(k.rows, MIX_ROWS));
    const dim3 rows((unsigned)hx_ceil_div(k.dim, THREADS * VEC) + 1, (unsigned)k.rows);

    HX_PLAIN_SWITCH(fmt, HX_LAUNCH(c, "hc_mix", err, mix_dots<FMT>, grid, THREADS, 0, k));
#define CASE(n)                                                                          \
    case n:                                                                              \
        HX_LAUNCH(c, "hc_mix", err, mix_rows<n>, rows, THREADS, 0, k);                   \
        return 0
    switch (s) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
    }
#undef CASE
    return 0;
}

extern "C" int hx_cuda_hc_mix(hx_dev *d, const hx_hc_mix_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const int64_t s = a->streams_n, width = s * a->dim, n = s * (2 + s) + 1;
    mix_args k = {};

    k.x = (float *)a->x.p;
    k.post = (float *)a->post.p;
    k.comb = (float *)a->comb.p;
    k.streams = (const float *)a->streams.p;
    k.rows = a->rows;
    k.dim = a->dim;
    if (a->fn == NULL) {
        HX_LAUNCH(c, "hc_mix", err, mix_copy,
                  dim3((unsigned)hx_ceil_div(a->dim, THREADS), (unsigned)a->rows),
                  THREADS, 0, k);
        return 0;
    }
    k.base = (const float *)a->base.p;
    k.scale = (const float *)a->scale.p;
    k.fn = hx_plain_of(a->fn);
    k.norm_eps = a->norm_eps;
    k.eps = a->eps;
    k.iters = a->iters;
    k.slices = mix_slices(width);
    k.part = (float *)c->scratch;
    k.wide = aligned16(k.x) && aligned16(k.streams) && a->dim % VEC == 0;
    const int64_t fit =
        HX_MIN((int64_t)(c->scratch_bytes / sizeof(float)) / (k.slices * n), MAX_GRID_Y);
    if (fit < 1)
        return hx_fail(err, HX_EARG,
                       "hc_mix: %zu bytes of scratch are too few; open the "
                       "device with larger limits",
                       c->scratch_bytes);
    for (int64_t r = 0; r < a->rows; r += fit) {
        mix_args part = k;

        part.rows = HX_MIN(fit, a->rows - r);
        part.x += r * a->dim;
        part.post += r * s;
        part.comb += r * s * s;
        part.streams += r * width;
        const int rc = mix_some(c, part, a->fn->fmt, s, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* S = 1 without maps. Grid (D / 256, R). */
__global__ void mix_copy(const mix_args a)
{
    const int64_t r = blockIdx.y, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < a.dim)
        a.x[r * a.dim + i] = a.streams[r * a.dim + i];
    if (i == 0)
        a.post[r] = a.comb[r] = 1.0f;
}

/* A block: one slice of 512 inputs, four rows, all outputs and the sum of squares; a warp
 * takes every eighth output, four of them at a time. Grid (slices, R / 4), 8 KiB shared.
 * Reads the weights once for four rows, and the streams once. */
template <int FMT> __global__ void mix_dots(const __grid_constant__ mix_args a)
{
    __shared__ __align__(16) float x[MIX_ROWS][SLICE];
    const int64_t width = a.fn.k, i0 = (int64_t)blockIdx.x * SLICE;
    const int64_t r0 = (int64_t)blockIdx.y * MIX_ROWS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_out = (int)a.fn.n;
    const int n_row = (int)min((int64_t)MIX_ROWS, a.rows - r0);

    for (int i = threadIdx.x; i < MIX_ROWS * SLICE; i += THREADS) {
        const int r = i / SLICE, k = i % SLICE;

        x[r][k] =
            r < n_row && i0 + k < width ? a.streams[(r0 + r) * width + i0 + k] : 0.0f;
    }
    /* Every warp comes once at least, for the barrier. */
    for (int j0 = warp; j0 <= n_out || j0 == warp; j0 += MIX_OUTS * THREADS / 32) {
        float w[MIX_OUTS][SLICE / 256][8], sum[MIX_OUTS][MIX_ROWS] = {};

#pragma unroll
        for (int o = 0; o < MIX_OUTS; o++)
#pragma unroll
            for (int i = 0; i < SLICE / 256; i++)
                if (j0 + o * THREADS / 32 < n_out)
                    hx_plain_load8<FMT>(w[o][i], a.fn, j0 + o * THREADS / 32,
                                        i0 + 256 * i + 8 * lane);
        if (j0 == warp)
            __syncthreads(); /* the inputs are there */
#pragma unroll
        for (int i = 0; i < SLICE / 256; i++)
#pragma unroll
            for (int r = 0; r < MIX_ROWS; r++) {
                float v[8];

                load4(v, x[r], 256 * i + 8 * lane, SLICE, true);
                load4(v + 4, x[r], 256 * i + 8 * lane + 4, SLICE, true);
#pragma unroll
                for (int o = 0; o < MIX_OUTS; o++) {
                    const bool squares = j0 + o * THREADS / 32 == n_out;

#pragma unroll
                    for (int q = 0; q < 8; q++)
                        sum[o][r] = fmaf(squares ? v[q] : w[o][i][q], v[q], sum[o][r]);
                }
            }
#pragma unroll
        for (int o = 0; o < MIX_OUTS; o++)
#pragma unroll
            for (int r = 0; r < MIX_ROWS; r++) {
                const float t = hx_warp_sum(sum[o][r]);
                const int j = j0 + o * THREADS / 32;

                if (lane == 0 && j <= n_out && r < n_row)
                    a.part[((r0 + r) * a.slices + blockIdx.x) * (n_out + 1) + j] = t;
            }
    }
}

/* 1 / x to the last bit or two; x is neither 0 nor subnormal. */
HX_DEVICE float reciprocal(float x)
{
    float r;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r, fmaf(-x, r, 1.0f), r);
}

/* comb becomes doubly stochastic up to eps (glm5_next.md 3), in registers of one thread:
 * four sums at a time hide each other's latency, and nothing waits for a neighbour. */
template <int S> HX_DEVICE void sinkhorn(float c[S][S], float eps, int iters)
{
#pragma unroll
    for (int i = 0; i < S; i++) {
        float top = c[i][0], sum = 0;

#pragma unroll
        for (int j = 1; j < S; j++)
            top = fmaxf(top, c[i][j]);
#pragma unroll
        for (int j = 0; j < S; j++)
            sum += c[i][j] = hx_canon_exp(c[i][j] - top);
#pragma unroll
        for (int j = 0; j < S; j++)
            c[i][j] = c[i][j] / sum + eps;
    }
#pragma unroll 1
    for (int turn = 0; turn < iters; turn++) {
        float inv[S];

#pragma unroll
        for (int j = 0; j < S; j++) {
            inv[j] = eps;
#pragma unroll
            for (int i = 0; i < S; i++)
                inv[j] += c[i][j];
            inv[j] = reciprocal(inv[j]);
        }
#pragma unroll
        for (int i = 0; i < S * S; i++)
            c[i / S][i % S] *= inv[i % S];
        if (turn == iters - 1)
            return;
#pragma unroll
        for (int i = 0; i < S; i++) {
            inv[i] = eps;
#pragma unroll
            for (int j = 0; j < S; j++)
                inv[i] += c[i][j];
            inv[i] = reciprocal(inv[i]);
        }
#pragma unroll
        for (int i = 0; i < S * S; i++)
            c[i / S][i % S] *= inv[i / S];
    }
}

/* Joins the partial sums of a row: m[0 … S (2 + S)). Then the last block makes the maps,
 * the others x. Grid (D / 1024 + 1, R). Moves 4 S D bytes a row and reads the partial
 * sums once a block. */
template <int S> __global__ void mix_rows(const __grid_constant__ mix_args a)
{
    constexpr int n = S * (2 + S);
    __shared__ float m[n + 1];
    const int64_t r = blockIdx.y, slices = a.slices;
    const int t = threadIdx.x;
    const bool maps = blockIdx.x == gridDim.x - 1;

    if (t <= n && (maps || t < S || t == n)) {
        const float *part = a.part + r * slices * (n + 1) + t;
        float sum = 0;

#pragma unroll 32
        for (int64_t i = 0; i < slices; i++)
            sum += part[i * (n + 1)];
        m[t] = sum;
    }
    __syncthreads();
    const float norm = 1.0f / sqrtf(m[n] / (float)(S * a.dim) + a.norm_eps);
    if (!maps) {
        const int64_t i = ((int64_t)blockIdx.x * THREADS + t) * VEC;
        float sum[4] = {}, v[4];

        if (i >= a.dim)
            return;
#pragma unroll
        for (int s = 0; s < S; s++) {
            const float pre =
                hx_sigmoid(fmaf(m[s] * norm, a.scale[0], a.base[s])) + a.eps;

            load4(v, a.streams + (r * S + s) * a.dim, i, a.dim, a.wide);
            for (int j = 0; j < 4; j++)
                sum[j] = fmaf(pre, v[j], sum[j]);
        }
        store4(a.x + r * a.dim, i, a.dim, a.wide, sum);
        return;
    }
    if (t < S)
        a.post[r * S + t] =
            2.0f * hx_sigmoid(fmaf(m[S + t] * norm, a.scale[1], a.base[S + t]));
    if (t != 32)
        return;
    float c[S][S];
#pragma unroll
    for (int i = 0; i < S * S; i++)
        c[i / S][i % S] = fmaf(m[2 * S + i] * norm, a.scale[2], a.base[2 * S + i]);
    sinkhorn<S>(c, a.eps, a.iters);
#pragma unroll
    for (int i = 0; i < S * S; i++)
        a.comb[r * S * S + i] = c[i / S][i % S];
}

struct merge_args {
    float *streams;
    const float *y, *post, *comb;
    int64_t s, dim;
    bool wide;
};

__global__ void merge_rows(const merge_args a);
__global__ void mean_rows(const merge_args a);

static dim3 stream_grid(int64_t dim, int64_t rows)
{
    return dim3((unsigned)rows, (unsigned)hx_ceil_div(dim, THREADS * VEC));
}

extern "C" int hx_cuda_hc_merge(hx_dev *d, const hx_hc_merge_args *a, hx_err *err)
{
    const merge_args k = { (float *)a->streams.p,
                           (const float *)a->y.p,
                           (const float *)a->post.p,
                           (const float *)a->comb.p,
                           a->streams_n,
                           a->dim,
                           aligned16(a->streams.p) && aligned16(a->y.p) &&
                               a->dim % VEC == 0 };

    HX_LAUNCH(hx_cuda_of(d), "hc_merge", err, merge_rows, stream_grid(a->dim, a->rows),
              THREADS, 0, k);
    return 0;
}

/* 1024 columns of all streams of a row. Grid (R, D / 1024). Moves 8 R S D + 4 R D bytes.
 */
__global__ void merge_rows(const merge_args a)
{
    __shared__ float map[MAX_STREAMS * (MAX_STREAMS + 1)]; /* post, comb */
    const int64_t r = blockIdx.x, i = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * VEC;
    const int s = (int)a.s;
    float *row = a.streams + r * s * a.dim;
    float old[MAX_STREAMS][4], y[4];

    for (int j = threadIdx.x; j < s * (s + 1); j += THREADS)
        map[j] = j < s ? a.post[r * s + j] : a.comb[r * s * s + j - s];
    __syncthreads();
    if (i >= a.dim)
        return;
    load4(y, a.y + r * a.dim, i, a.dim, a.wide);
#pragma unroll
    for (int j = 0; j < MAX_STREAMS; j++)
        if (j < s)
            load4(old[j], row + j * a.dim, i, a.dim, a.wide);
    for (int j = 0; j < s; j++) {
        float sum[4];

        for (int q = 0; q < 4; q++)
            sum[q] = map[j] * y[q];
#pragma unroll
        for (int k = 0; k < MAX_STREAMS; k++)
            if (k < s)
                for (int q = 0; q < 4; q++)
                    sum[q] = fmaf(map[s + k * s + j], old[k][q], sum[q]);
        store4(row + j * a.dim, i, a.dim, a.wide, sum);
    }
}

extern "C" int hx_cuda_hc_mean(hx_dev *d, const hx_hc_mean_args *a, hx_err *err)
{
    const merge_args k = { (float *)a->y.p,
                           (const float *)a->streams.p,
                           NULL,
                           NULL,
                           a->streams_n,
                           a->dim,
                           aligned16(a->streams.p) && aligned16(a->y.p) &&
                               a->dim % VEC == 0 };

    HX_LAUNCH(hx_cuda_of(d), "hc_mean", err, mean_rows, stream_grid(a->dim, a->rows),
              THREADS, 0, k);
    return 0;
}

/* streams: the mean, y: the streams. Grid (R, D / 1024). Moves 4 R (S + 1) D bytes. */
__global__ void mean_rows(const merge_args a)
{
    const int64_t r = blockIdx.x, i = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * VEC;
    float sum[4] = {}, v[4];

    if (i >= a.dim)
        return;
    for (int64_t s = 0; s < a.s; s++) {
        load4(v, a.y + (r * a.s + s) * a.dim, i, a.dim, a.wide);
        for (int q = 0; q < 4; q++)
            sum[q] += v[q];
    }
    for (int q = 0; q < 4; q++)
        sum[q] /= (float)a.s;
    store4(a.streams + r * a.dim, i, a.dim, a.wide, sum);
}

/* ---- router ---------------------------------------------------------- */

struct pick_args {
    int32_t *id;
    float *weight, *score;
    const float *bias;
    int n_expert, active;
    float factor;
};

__global__ void router_pick(const pick_args a);

extern "C" int hx_cuda_router(hx_dev *d, const hx_router_args *a, hx_err *err)
{
    const hx_matmul_args scores = { a->score, a->x, a->w, a->rows, a->w->k, a->w->n };
    const pick_args k = { (int32_t *)a->id.p,
                          (float *)a->weight.p,
                          (float *)a->score.p,
                          (const float *)a->bias.p,
                          (int)a->w->n,
                          (int)a->active,
                          a->factor };
    const unsigned threads = (unsigned)HX_MIN(hx_ceil_div(a->w->n, 32) * 32, 1024);
    const int rc = hx_cuda_matmul(d, &scores, err);

    if (rc != 0)
        return rc;
    HX_LAUNCH(hx_cuda_of(d), "router", err, router_pick, dim3((unsigned)a->rows), threads,
              (size_t)a->w->n * sizeof(double) + (size_t)a->active * sizeof(float), k);
    return 0;
}

/* One row: the rank of an expert is how many are better, equal ones by lower id; NaN is
 * the worst. Grid R, 8 E + 4 A bytes shared. Moves 8 R E bytes. */
__global__ void router_pick(const pick_args a)
{
    extern __shared__ double key[];
    float *best = (float *)(key + a.n_expert);
    float *score = a.score + (int64_t)blockIdx.x * a.n_expert;
    const int64_t out = (int64_t)blockIdx.x * a.active;

    for (int e = threadIdx.x; e < a.n_expert; e += blockDim.x) {
        const float sc = hx_sigmoid(score[e]);
        const double k = (double)sc + (double)a.bias[e];

        score[e] = sc;
        key[e] = k == k ? k : -(double)INFINITY;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < a.n_expert; e += blockDim.x) {
        const double k = key[e];
        int rank = 0;

        for (int o = 0; o < e; o++)
            rank += key[o] >= k;
        for (int o = e + 1; o < a.n_expert; o++)
            rank += key[o] > k;
        if (rank < a.active) {
            a.id[out + rank] = e;
            best[rank] = score[e];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.active; i += blockDim.x) {
        float sum = 0;

        for (int j = 0; j < a.active; j++)
            sum += best[j];
        a.weight[out + i] = best[i] / (sum + 1e-20f) * a.factor;
    }
}

/* ---- combine --------------------------------------------------------- */

enum { FETCH = 8 }; /* picks on their way at a time: host memory is 2 us away */

struct combine_args {
    float *y;
    const float *base, *part, *weight;
    const int32_t *there; /* NULL: no lane */
    int64_t active, dim;
    bool wide;
    hx_cuda_lane lane;
};

__global__ void combine_rows(const combine_args a);

extern "C" int hx_cuda_combine(hx_dev *d, const hx_combine_args *a, hx_err *err)
{
    combine_args k = { (float *)a->y.p,
                       (const float *)a->base.p,
                       (const float *)a->part.p,
                       (const float *)a->weight.p,
                       (const int32_t *)a->there.p,
                       a->active,
                       a->dim,
                       aligned16(a->y.p) && aligned16(a->base.p) &&
                           aligned16(a->part.p) && a->dim % VEC == 0,
                       {} };

    if (k.there != NULL)
        k.lane = hx_cuda_lane_of(a->lane);

    HX_LAUNCH(hx_cuda_of(d), "combine", err, combine_rows, stream_grid(a->dim, a->rows),
              THREADS, 0, k);
    return 0;
}

/* From host memory that was written a moment ago: no cache may answer. */
HX_DEVICE void load4_fresh(float v[4], const float *row, int64_t at, int64_t n, bool wide)
{
    if (wide) {
        const float4 x = __ldcv((const float4 *)(row + at));

        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        return;
    }
    for (int q = 0; q < VEC; q++)
        v[q] = at + q < n ? __ldcv(row + at + q) : 0.0f;
}

/* 1024 columns of a row. Grid (R, D / 1024). Moves 4 R (A + 2) D bytes; those of the
 * lane's picks come from host memory. */
__global__ void combine_rows(const combine_args a)
{
    const int64_t r = blockIdx.x, i = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * VEC;
    const int64_t end = (r + 1) * a.active;
    float sum[4], v[FETCH][4];

    if (a.there != NULL)
        hx_cuda_lane_wait(a.lane);

    if (i >= a.dim)
        return;
    load4(sum, a.base + r * a.dim, i, a.dim, a.wide);
    for (int64_t p = r * a.active; p < end; p += FETCH) {
#pragma unroll
        for (int f = 0; f < FETCH; f++) {
            if (p + f < end && a.there != NULL && a.there[p + f] >= 0)
                load4_fresh(v[f], a.lane.y + (p + f) * a.dim, i, a.dim, a.wide);
            else if (p + f < end)
                load4(v[f], a.part + (p + f) * a.dim, i, a.dim, a.wide);
        }
#pragma unroll
        for (int f = 0; f < FETCH; f++)
            for (int q = 0; q < 4; q++)
                if (p + f < end)
                    sum[q] = fmaf(a.weight[p + f], v[f][q], sum[q]);
    }
    store4(a.y + r * a.dim, i, a.dim, a.wide, sum);
}

/* Partial sums of hc_mix for a few hundred rows; larger calls go in parts. */
size_t hx_cuda_ops_scratch_bytes(const hx_dev_limits *l)
{
    const int64_t rows = HX_MAX(1, HX_MIN(l->max_rows, 256));

    return (size_t)(rows * mix_slices(HX_MAX(l->max_k, 1)) *
                    (MAX_STREAMS * (2 + MAX_STREAMS) + 1)) *
           sizeof(float);
}
