/* cuda_ops.cu - the operations of the CUDA backend that are neither products nor need
 * pages: embedding, norms, swiglu, residual streams, the picks of the router, combine.
 * Called through hx_cuda_ops once ops.c has checked the arguments. Must never allocate,
 * wait or read device memory from the host.
 *
 * All of them move memory: a thread takes four neighbours, as one 16-byte access where
 * the address allows it. The order of a sum never depends on the address. */
#include "dev/cuda.h"
#include "dev/cuda_dev.h"
#include "dev/cuda_lane.h"
#include "dev/cuda_plain.h"

enum {
    THREADS = 256,
    VEC = 4,           /* neighbours of a thread */
    SLICE = 64,        /* columns, of all streams, of a partial sum of hc_mix */
    MIX_ROWS = 4,      /* rows that a warp multiplies at a time */
    MIX_MOST = 16,     /* rows that share the weights of a slice, in a call of many */
    MIX_MANY = 256,    /* rows of such a call */
    MIX_THREADS = 512, /* of a row's norm: as rmsnorm takes for a wide row */
    MIX_OUTS = 4,      /* outputs whose weights a warp has on their way at a time */
    MIX_AHEAD = 2,     /* times four columns that a thread asks for at first */
    MAX_STREAMS = 8,   /* ops.c: same bound */
    FULL_STREAMS =
        4, /* with so many, and nothing odd, mix_dots knows all at compile time */
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

    HX_PLAIN_SWITCH(a->table->fmt, HX_LAUNCH_NEXT(hx_cuda_of(d), "embed", err,
                                                  embed_rows<FMT>, grid, THREADS, 0, k));
    return 0;
}

/* A block: 256 columns of one row, for all streams. Grid (R, D / 256). Moves R D weights
 * and 4 R S D bytes. */
template <int FMT> __global__ void embed_rows(const __grid_constant__ embed_args a)
{
    hx_cuda_in_turn();
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

    HX_LAUNCH_NEXT(hx_cuda_of(d), "rmsnorm", err, norm_rows<false>,
                   dim3((unsigned)a->rows), norm_threads(a->dim), 0, k);
    return 0;
}

extern "C" int hx_cuda_layernorm(hx_dev *d, const hx_layernorm_args *a, hx_err *err)
{
    const norm_args k = norm_of(a->y, a->x, a->w, a->b, a->dim, a->ldx, a->ldy, a->eps);

    HX_LAUNCH_NEXT(hx_cuda_of(d), "layernorm", err, norm_rows<true>,
                   dim3((unsigned)a->rows), norm_threads(a->dim), 0, k);
    return 0;
}

/* One row a block. MEAN: less its mean, plus b. Grid R. Moves 8 R D bytes; the second and
 * third pass over the row hit the caches. */
template <bool MEAN> __global__ void norm_rows(const __grid_constant__ norm_args a)
{
    hx_cuda_in_turn();
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

    HX_LAUNCH_NEXT(hx_cuda_of(d), "swiglu", err, swiglu_all,
                   dim3((unsigned)hx_ceil_div(n, THREADS * VEC)), THREADS, 0, k);
    return 0;
}

/* 1024 elements a block. Moves 12 R dim bytes. */
__global__ void swiglu_all(const swiglu_args a)
{
    hx_cuda_in_turn();
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
    float *x, *post, *comb, *part; /* part: [R, S (2 + S) + 1, slices] */
    float *streams;
    const float *y, *w, *base, *scale; /* y, w: may be NULL */
    hx_plain_mat fn;
    int64_t rows, dim, slices;
    float norm_eps, eps;
    int s, iters, block_rows; /* of mix_dots */
    bool wide;
};

template <int FMT, int N, bool FULL>
__global__ void mix_dots(const __grid_constant__ mix_args a);
template <int S> __global__ void mix_rows(const __grid_constant__ mix_args a);
__global__ void mix_copy(const mix_args a);

/* Some rows: those whose partial sums the scratch holds. */
static int mix_some(hx_cuda *c, const mix_args &k, int fmt, hx_err *err)
{
    const dim3 grid((unsigned)k.slices, (unsigned)hx_ceil_div(k.rows, k.block_rows));
    const dim3 rows(2, (unsigned)k.rows);
    const size_t row_bytes = (size_t)k.dim * sizeof(float);

    if (k.s == FULL_STREAMS && k.wide && k.fn.wide && k.dim % SLICE == 0) {
        HX_PLAIN_SWITCH(fmt, HX_LAUNCH_NEXT(c, "hc_mix", err,
                                            (mix_dots<FMT, FULL_STREAMS, true>), grid,
                                            THREADS, 0, k));
    } else {
        HX_PLAIN_SWITCH(fmt, HX_LAUNCH_NEXT(c, "hc_mix", err,
                                            (mix_dots<FMT, MAX_STREAMS, false>), grid,
                                            THREADS, 0, k));
    }
#define CASE(n)                                                                          \
    case n:                                                                              \
        HX_LAUNCH_NEXT(c, "hc_mix", err, mix_rows<n>, rows, MIX_THREADS, row_bytes, k);  \
        return 0
    switch (k.s) {
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

/* Without maps: nothing to gain by doing all at once. */
static int mix_none(hx_dev *d, const hx_hc_mix_args *a, const mix_args &k, hx_err *err)
{
    const hx_hc_merge_args merge = hx_hc_mix_merge(a);
    const hx_rmsnorm_args norm = hx_hc_mix_norm(a);
    const int rc = a->y.p != NULL ? hx_cuda_hc_merge(d, &merge, err) : 0;

    if (rc != 0)
        return rc;
    HX_LAUNCH_NEXT(hx_cuda_of(d), "hc_mix", err, mix_copy,
                   dim3((unsigned)hx_ceil_div(a->dim, THREADS), (unsigned)a->rows),
                   THREADS, 0, k);
    return a->w.p != NULL ? hx_cuda_rmsnorm(d, &norm, err) : 0;
}

extern "C" int hx_cuda_hc_mix(hx_dev *d, const hx_hc_mix_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const int64_t s = a->streams_n, n = s * (2 + s) + 1;
    mix_args k = {};

    k.x = (float *)a->x.p;
    k.post = (float *)a->post.p;
    k.comb = (float *)a->comb.p;
    k.streams = (float *)a->streams.p;
    k.rows = a->rows;
    k.dim = a->dim;
    if (a->fn == NULL)
        return mix_none(d, a, k, err);
    k.y = (const float *)a->y.p;
    k.w = (const float *)a->w.p;
    k.base = (const float *)a->base.p;
    k.scale = (const float *)a->scale.p;
    k.fn = hx_plain_of(a->fn);
    k.fn.wide = k.fn.wide && a->dim % 8 == 0;
    k.norm_eps = a->norm_eps;
    k.eps = a->eps;
    k.s = (int)s;
    k.iters = a->iters;
    k.block_rows = a->rows >= MIX_MANY ? MIX_MOST : MIX_ROWS;
    k.slices = hx_ceil_div(a->dim, SLICE);
    k.part = (float *)c->scratch;
    k.wide = aligned16(k.x) && aligned16(k.streams) && aligned16(k.w) && aligned16(k.y) &&
             a->dim % VEC == 0;
    const int64_t fit =
        HX_MIN((int64_t)(c->scratch_bytes / sizeof(float)) / (k.slices * n), MAX_GRID_Y);
    if (fit < 1 || (size_t)a->dim * sizeof(float) > c->gpu.block_bytes - 1024)
        return hx_fail(err, HX_EARG,
                       "hc_mix: %zu bytes of scratch or %zu of shared memory are too few "
                       "for %lld streams of %lld; open the device with larger limits",
                       c->scratch_bytes, c->gpu.block_bytes, (long long)s,
                       (long long)a->dim);
    for (int64_t r = 0; r < a->rows; r += fit) {
        mix_args part = k;

        part.rows = HX_MIN(fit, a->rows - r);
        part.x += r * a->dim;
        part.post += r * s;
        part.comb += r * s * s;
        part.streams += r * s * a->dim;
        part.y += k.y != NULL ? r * a->dim : 0;
        const int rc = mix_some(c, part, a->fn->fmt, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* S = 1 without maps. Grid (D / 256, R). */
__global__ void mix_copy(const mix_args a)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.y, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < a.dim)
        a.x[r * a.dim + i] = a.streams[r * a.dim + i];
    if (i == 0)
        a.post[r] = a.comb[r] = 1.0f;
}

/* Sums of the S streams of a column, weighed: hc_merge of one column, S up to N. map:
 * post, comb. */
template <int N> HX_DEVICE void merge_column(float v[N], float y, const float *map, int s)
{
    float old[N];

#pragma unroll
    for (int j = 0; j < N; j++)
        old[j] = v[j];
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j >= s)
            break;
        v[j] = map[j] * y;
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k < s)
                v[j] = fmaf(map[s + k * s + j], old[k], v[j]);
    }
}

/* Four columns of the slice of a row, a thread each: its streams, merged where that comes
 * first, to shared memory. Whole block. */
template <int N, bool FULL>
HX_DEVICE void mix_inputs(const mix_args &a, int64_t r0, int n_row,
                          float x[MIX_MOST][N * SLICE])
{
    static_assert(THREADS == MIX_MOST * SLICE / VEC, "a thread has a place");
    __shared__ float map[MIX_MOST][N * (N + 1)];
    const int r = threadIdx.x / (SLICE / VEC), c = threadIdx.x % (SLICE / VEC),
              s = FULL ? N : a.s;
    const int64_t col = (int64_t)blockIdx.x * SLICE + VEC * c;
    const bool in = r < n_row, wide = FULL || (a.wide && col < a.dim);
    float *row = a.streams + (r0 + r) * s * a.dim;
    float v[N][VEC] = {}, y[VEC] = {};

    if (in) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < s)
                load4(v[j], row + j * a.dim, col, a.dim, wide);
        if (a.y != NULL) {
            load4(y, a.y + (r0 + r) * a.dim, col, a.dim, wide);
            for (int j = c; j < s * (s + 1); j += SLICE / VEC)
                map[r][j] =
                    j < s ? a.post[(r0 + r) * s + j] : a.comb[(r0 + r) * s * s + j - s];
        }
    }
    if (a.y != NULL) {
        __syncthreads();
#pragma unroll
        for (int q = 0; q < VEC; q++) {
            float column[N];

#pragma unroll
            for (int j = 0; j < N; j++)
                column[j] = v[j][q];
            merge_column<N>(column, y[q], map[r], s);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j][q] = column[j];
        }
    }
    if (in)
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < s) {
                if (a.y != NULL)
                    store4(row + j * a.dim, col, a.dim, wide, v[j]);
                *(float4 *)(x[r] + j * SLICE + VEC * c) =
                    make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
            }
    __syncthreads();
}

/* A lane's weights of the slice: outputs j0 …, columns 8 lane … of each 256. */
template <int FMT, int CHUNKS, bool FULL>
HX_DEVICE void mix_weights(const mix_args &a, int j0, float w[MIX_OUTS][CHUNKS][8])
{
    const int64_t c0 = (int64_t)blockIdx.x * SLICE;

#pragma unroll
    for (int o = 0; o < MIX_OUTS; o++)
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int at = 256 * i + 8 * (threadIdx.x & 31), c = at % SLICE;

            const int64_t input = at / SLICE * a.dim + c0 + c;

            if (FULL && j0 + o < a.fn.n)
                hx_plain_widen8<FMT>(w[o][i], hx_plain_raw8<FMT>(a.fn, j0 + o, input),
                                     a.fn, j0 + o, input,
                                     hx_plain_block_scale<FMT>(a.fn, j0 + o, input));
            else if (!FULL && j0 + o < a.fn.n && at < a.s * SLICE && c0 + c < a.dim)
                hx_plain_load8<FMT>(w[o][i], a.fn, j0 + o, input);
            else
                for (int q = 0; q < 8; q++)
                    w[o][i][q] = 0;
        }
}

/* Of 16 values, value i summed over the lanes, as hx_warp_sum does, for lanes 2 i and
 * 2 i + 1 alone; the first of N = 8, 4, 2, 1 steps. Each step halves the values that a
 * lane still has to do with. */
template <int N> HX_DEVICE float sums_of(float v[2 * N])
{
    const bool up = (threadIdx.x & 2 * N) != 0;

#pragma unroll
    for (int i = 0; i < N; i++) {
        const float other = __shfl_xor_sync(~0u, up ? v[i] : v[i + N], 2 * N);

        v[i] = (up ? v[i + N] : v[i]) + other;
    }
    if constexpr (N > 1)
        return sums_of<N / 2>(v);
    return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}

/* Partial sums of four rows and outputs. x: the rows. */
template <int N, int CHUNKS, bool FULL>
HX_DEVICE void mix_some_dots(const mix_args &a, int64_t r0, int n_row, int j0,
                             const float x[MIX_ROWS][N * SLICE],
                             const float w[MIX_OUTS][CHUNKS][8])
{
    static_assert(MIX_OUTS * MIX_ROWS == 16, "two lanes a sum");
    const int lane = threadIdx.x & 31, width = (FULL ? N : a.s) * SLICE;
    float sum[MIX_OUTS * MIX_ROWS] = {};

#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int at = 256 * i + 8 * lane;

        if (at >= width)
            break;
#pragma unroll
        for (int r = 0; r < MIX_ROWS; r++) {
            float v[8];

            load4(v, x[r], at, width, true);
            load4(v + 4, x[r], at + 4, width, true);
#pragma unroll
            for (int o = 0; o < MIX_OUTS; o++)
#pragma unroll
                for (int q = 0; q < 8; q++)
                    sum[MIX_ROWS * o + r] = fmaf(w[o][i][q], v[q], sum[MIX_ROWS * o + r]);
        }
    }
    const float t = sums_of<8>(sum);
    const int j = j0 + lane / 8, r = lane / 2 % MIX_ROWS;

    if (lane % 2 == 0 && j < a.fn.n && r < n_row)
        a.part[((r0 + r) * (a.fn.n + 1) + j) * a.slices + blockIdx.x] = t;
}

/* Partial sum of a row's squares, by a warp. */
template <int N, int CHUNKS, bool FULL>
HX_DEVICE void mix_squares(const mix_args &a, int64_t r, const float x[N * SLICE])
{
    const int lane = threadIdx.x & 31, width = (FULL ? N : a.s) * SLICE;
    float sum = 0, v[8];

#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int at = 256 * i + 8 * lane;

        if (at >= width)
            break;
        load4(v, x, at, width, true);
        load4(v + 4, x, at + 4, width, true);
#pragma unroll
        for (int q = 0; q < 8; q++)
            sum = fmaf(v[q], v[q], sum);
    }
    sum = hx_warp_sum(sum);
    if (lane == 0)
        a.part[(r * (a.fn.n + 1) + a.fn.n) * a.slices + blockIdx.x] = sum;
}

/* A block: one slice of 64 columns, up to 16 rows, all outputs, four to a warp, and the sum
 * of squares. Grid (slices, R / block_rows). Reads the weights once for its rows, and the
 * streams once; with y writes them. */
template <int FMT, int N, bool FULL>
__global__ void __launch_bounds__(THREADS, FULL ? 3 : 1)
    mix_dots(const __grid_constant__ mix_args a)
{
    constexpr int CHUNKS = N * SLICE / 256, WARPS = THREADS / 32;
    __shared__ __align__(16) float x[MIX_MOST][N * SLICE];
    const int64_t r0 = (int64_t)blockIdx.y * a.block_rows;
    const int warp = threadIdx.x >> 5,
              n_row = (int)min((int64_t)a.block_rows, a.rows - r0);
    float w[MIX_OUTS][CHUNKS][8];

    mix_weights<FMT, CHUNKS, FULL>(a, MIX_OUTS * warp, w);
    hx_cuda_in_turn();
    mix_inputs<N, FULL>(a, r0, n_row, x);
    for (int j0 = MIX_OUTS * warp; j0 < a.fn.n; j0 += MIX_OUTS * WARPS) {
        if (j0 != MIX_OUTS * warp)
            mix_weights<FMT, CHUNKS, FULL>(a, j0, w);
        for (int r = 0; r < n_row; r += MIX_ROWS)
            mix_some_dots<N, CHUNKS, FULL>(a, r0 + r, n_row - r, j0, x + r, w);
    }
    for (int r = WARPS - 1 - warp; r < n_row; r += WARPS)
        mix_squares<N, CHUNKS, FULL>(a, r0 + r, x[r]);
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

/* m[0 … S (2 + S)] of a row from its partial sums, a warp each. Whole block. */
template <int S> HX_DEVICE void mix_join(const mix_args &a, int64_t r, float *m)
{
    constexpr int n = S * (2 + S);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    for (int j = warp; j <= n; j += MIX_THREADS / 32) {
        const float *part = a.part + (r * (n + 1) + j) * a.slices;
        float sum = 0;

        for (int64_t i = lane; i < a.slices; i += 32)
            sum += part[i];
        sum = hx_warp_sum(sum);
        if (lane == 0)
            m[j] = sum;
    }
    __syncthreads();
}

/* Streams of four columns of a row. */
template <int S>
HX_DEVICE void mix_load(float v[S][VEC], const mix_args &a, int64_t r, int64_t i)
{
#pragma unroll
    for (int s = 0; s < S; s++)
        load4(v[s], a.streams + (r * S + s) * a.dim, i, a.dim, a.wide && i < a.dim);
}

/* Weights of the norm of four columns. */
HX_DEVICE void mix_norm(float w[VEC], const mix_args &a, int64_t i)
{
    load4(w, a.w, i, a.dim, a.wide && i < a.dim);
}

/* x of a row, and its norm. pre: the streams' weights; row: [D] shared; ahead, w: the
 * thread's first columns, which were asked for before. */
template <int S>
HX_DEVICE void mix_collapse(const mix_args &a, int64_t r, const float pre[S],
                            float ahead[MIX_AHEAD][S][VEC], const float w[MIX_AHEAD][VEC],
                            float *row)
{
    __shared__ float shared[33];
    const int first = threadIdx.x * VEC, step = MIX_THREADS * VEC;
    float sum = 0;

    const auto take = [&](int64_t i, const float v[S][VEC]) {
        float x[VEC] = {};

#pragma unroll
        for (int s = 0; s < S; s++)
            for (int j = 0; j < VEC; j++)
                x[j] = fmaf(pre[s], v[s][j], x[j]);
        store4(a.w != NULL ? row : a.x + r * a.dim, i, a.dim, a.wide, x);
        for (int j = 0; j < VEC; j++)
            sum = i + j < a.dim ? fmaf(x[j], x[j], sum) : sum;
    };
#pragma unroll
    for (int t = 0; t < MIX_AHEAD; t++)
        if (first + t * step < a.dim)
            take(first + t * step, ahead[t]);
    for (int64_t i = first + MIX_AHEAD * step; i < a.dim; i += step) {
        float v[S][VEC];

        mix_load<S>(v, a, r, i);
        take(i, v);
    }
    if (a.w == NULL)
        return;
    const float scale =
        1.0f / sqrtf(hx_block_sum(sum, shared) / (float)a.dim + a.norm_eps);
    const auto put = [&](int64_t i, const float w[VEC]) {
        float x[VEC];

        load4(x, row, i, a.dim, a.wide);
        for (int j = 0; j < VEC; j++)
            x[j] = x[j] * scale * w[j];
        store4(a.x + r * a.dim, i, a.dim, a.wide, x);
    };
#pragma unroll
    for (int t = 0; t < MIX_AHEAD; t++)
        if (first + t * step < a.dim)
            put(first + t * step, w[t]);
    for (int64_t i = first + MIX_AHEAD * step; i < a.dim; i += step) {
        float more[VEC];

        mix_norm(more, a, i);
        put(i, more);
    }
}

/* Joins the partial sums of a row; then one block makes x, the other the maps. Grid
 * (2, R), 4 D bytes shared. Moves 4 S D bytes a row and reads the partial sums twice. */
template <int S>
__global__ void __launch_bounds__(MIX_THREADS)
    mix_rows(const __grid_constant__ mix_args a)
{
    extern __shared__ __align__(16) float row[];
    __shared__ float m[S * (2 + S) + 1], base[S * (2 + S)], scale[3];
    const int64_t r = blockIdx.y;
    float ahead[MIX_AHEAD][S][VEC];
    float w[MIX_AHEAD][VEC];

    /* What is the model's is asked for before the launch before is done. */
    for (int i = threadIdx.x; i < S * (2 + S); i += MIX_THREADS)
        base[i] = a.base[i];
    if (threadIdx.x < 3)
        scale[threadIdx.x] = a.scale[threadIdx.x];
    if (blockIdx.x == 0 && a.w != NULL)
#pragma unroll
        for (int t = 0; t < MIX_AHEAD; t++)
            mix_norm(w[t], a, (threadIdx.x + t * MIX_THREADS) * VEC);
    hx_cuda_in_turn();
    if (blockIdx.x == 0)
#pragma unroll
        for (int t = 0; t < MIX_AHEAD; t++)
            mix_load<S>(ahead[t], a, r, (threadIdx.x + t * MIX_THREADS) * VEC);
    mix_join<S>(a, r, m);
    const float norm = 1.0f / sqrtf(m[S * (2 + S)] / (float)(S * a.dim) + a.norm_eps);
    if (blockIdx.x == 0) {
        float pre[S];

#pragma unroll
        for (int s = 0; s < S; s++)
            pre[s] = hx_sigmoid(fmaf(m[s] * norm, scale[0], base[s])) + a.eps;
        mix_collapse<S>(a, r, pre, ahead, w, row);
        return;
    }
    if (threadIdx.x < S)
        a.post[r * S + threadIdx.x] =
            2.0f *
            hx_sigmoid(fmaf(m[S + threadIdx.x] * norm, scale[1], base[S + threadIdx.x]));
    if (threadIdx.x != 32)
        return;
    float c[S][S];
#pragma unroll
    for (int i = 0; i < S * S; i++)
        c[i / S][i % S] = fmaf(m[2 * S + i] * norm, scale[2], base[2 * S + i]);
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

    HX_LAUNCH_NEXT(hx_cuda_of(d), "hc_merge", err, merge_rows,
                   stream_grid(a->dim, a->rows), THREADS, 0, k);
    return 0;
}

/* 1024 columns of all streams of a row. Grid (R, D / 1024). Moves 8 R S D + 4 R D bytes.
 */
__global__ void merge_rows(const merge_args a)
{
    hx_cuda_in_turn();
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

    HX_LAUNCH_NEXT(hx_cuda_of(d), "hc_mean", err, mean_rows, stream_grid(a->dim, a->rows),
                   THREADS, 0, k);
    return 0;
}

/* streams: the mean, y: the streams. Grid (R, D / 1024). Moves 4 R (S + 1) D bytes. */
__global__ void mean_rows(const merge_args a)
{
    hx_cuda_in_turn();
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
    const int64_t whole = hx_ceil_div(a->w->n, 32) * 32;
    const unsigned threads = (unsigned)HX_MIN(whole, 1024);
    const int rc = hx_cuda_matmul(d, &scores, err);

    if (rc != 0)
        return rc;
    HX_LAUNCH_NEXT(hx_cuda_of(d), "router", err, router_pick, dim3((unsigned)a->rows),
                   threads,
                   (size_t)whole * sizeof(double) +
                       (size_t)(whole / 32 * HX_MIN(a->active, 32)) *
                           (sizeof(double) + sizeof(int)) +
                       (size_t)a->active * sizeof(float),
                   k);
    return 0;
}

/* One row: the rank of an expert is how many are better, equal ones by lower id; NaN is
 * the worst. Only those that are among the best of their 32 can be picked: their ranks are
 * counted among these. Grid R, 8 bytes an expert, 12 for each of the best and 4 A shared.
 * Moves 8 R E bytes. */
__global__ void router_pick(const pick_args a)
{
    hx_cuda_in_turn();
    extern __shared__ double key[];
    const int n = a.n_expert, whole = (n + 31) / 32 * 32, most = min(a.active, 32),
              n_good = whole / 32 * most;
    double *good = key + whole;
    int *who = (int *)(good + n_good);
    float *best = (float *)(who + n_good);
    float *score = a.score + (int64_t)blockIdx.x * n;
    const int64_t out = (int64_t)blockIdx.x * a.active;

    for (int e = threadIdx.x; e < whole; e += blockDim.x) {
        if (e >= n) { /* the last 32 may be fewer */
            key[e] = NAN;
            continue;
        }
        const float sc = hx_sigmoid(score[e]);
        const double k = (double)sc + (double)a.bias[e];

        score[e] = sc;
        key[e] = k == k ? k : -(double)INFINITY;
    }
    for (int i = threadIdx.x; i < n_good; i += blockDim.x)
        who[i] = -1, good[i] = NAN;
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += blockDim.x) {
        const double k = key[e];
        const int from = e & ~31;
        int rank = 0;

#pragma unroll 8
        for (int o = from; o < from + 32; o++)
            rank += key[o] > k || (key[o] == k && o < e);
        if (rank < most) {
            good[e / 32 * most + rank] = k;
            who[e / 32 * most + rank] = e;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_good; i += blockDim.x) {
        const double k = good[i];
        int rank = 0;

        if (who[i] < 0)
            continue;
#pragma unroll 8
        for (int o = 0; o < n_good; o++)
            rank += good[o] > k || (good[o] == k && o < i);
        if (rank < a.active) {
            a.id[out + rank] = who[i];
            best[rank] = score[who[i]];
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

    HX_LAUNCH_NEXT(hx_cuda_of(d), "combine", err, combine_rows,
                   stream_grid(a->dim, a->rows), THREADS, 0, k);
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
    hx_cuda_in_turn();
    const int64_t r = blockIdx.x, i = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * VEC;
    const int64_t first = r * a.active, end = first + a.active;
    const bool in = i < a.dim;
    float sum[4], v[FETCH][4];

    if (in)
        load4(sum, a.base + r * a.dim, i, a.dim, a.wide);
    for (int64_t p = first; p < end; p += FETCH) {
        bool lane[FETCH];

#pragma unroll
        for (int f = 0; f < FETCH; f++) {
            lane[f] = p + f < end && a.there != NULL && a.there[p + f] >= 0;
            if (in && p + f < end && !lane[f])
                load4(v[f], a.part + (p + f) * a.dim, i, a.dim, a.wide);
        }
        if (p == first && a.there != NULL)
            hx_cuda_lane_wait(a.lane);
#pragma unroll
        for (int f = 0; f < FETCH; f++)
            if (in && lane[f])
                load4_fresh(v[f], a.lane.y + (p + f) * a.dim, i, a.dim, a.wide);
#pragma unroll
        for (int f = 0; f < FETCH; f++)
            for (int q = 0; q < 4; q++)
                if (p + f < end)
                    sum[q] = fmaf(a.weight[p + f], v[f][q], sum[q]);
    }
    if (in)
        store4(a.y + r * a.dim, i, a.dim, a.wide, sum);
}

/* Partial sums of hc_mix for a few hundred rows; larger calls go in parts. */
size_t hx_cuda_ops_scratch_bytes(const hx_dev_limits *l)
{
    const int64_t rows = HX_MAX(1, HX_MIN(l->max_rows, 256));

    return (size_t)(rows * hx_ceil_div(HX_MAX(l->max_k, 1), SLICE) *
                    (MAX_STREAMS * (2 + MAX_STREAMS) + 1)) *
           sizeof(float);
}
