/* cuda_kda.cu - the linear-attention operations on the GPU: short convolution, gates,
 * gated delta rule of decode rows, output norm. Called through the operation table in
 * cuda.cu; kda_chunk of cuda_chunk.cu calls hx_cuda_kda_fold. Never allocates, waits or
 * reads back; spans are read where they are, so that a decode step can be replayed.
 *
 * The gated delta rule of a few rows is the recurrence itself: a thread keeps its piece of
 * a head's state in registers, so a row costs four fp32 operations per state element and
 * no memory. Many rows are a matter of matrix units: cuda_chunk.cu. */
#include "dev/cuda.h"
#include "dev/cuda_dev.h"

/* ---- short convolution ----------------------------------------------- */

enum {
    CONV_THREADS = 128,
    CONV_ROWS = 16, /* of a block: more than the taps, so only the first sees the state */
};

typedef struct {
    float *y, *state, *pend;
    const float *u, *w;
    int64_t channels;
    int hold;
} conv_args;

template <int TAPS> HX_DEVICE void conv_push(float *past, float u)
{
#pragma unroll
    for (int i = 0; i + 1 < TAPS; i++)
        past[i] = past[i + 1];
    past[TAPS - 1] = u;
}

/* Folds the pending rows; past[1 .. TAPS - 1] are the last inputs before the span. */
template <int TAPS>
HX_DEVICE void conv_begin(const conv_args &a, const hx_span &s, int64_t c, float *past)
{
    const float *state = a.state + s.slot * (TAPS - 1) * a.channels + c;
    const float *pend = a.pend + (int64_t)s.slot * HX_PEND_MAX * a.channels + c;

#pragma unroll
    for (int i = 0; i + 1 < TAPS; i++)
        past[i + 1] = s.pos0 > 0 ? state[i * a.channels] : 0.0f;
    for (int i = 0; i < s.commit; i++)
        conv_push<TAPS>(past, pend[i * a.channels]);
}

/* The state after the span: what was folded (hold), or that and all rows. */
template <int TAPS>
HX_DEVICE void conv_keep(const conv_args &a, const hx_span &s, int64_t c, float *past)
{
    float *state = a.state + s.slot * (TAPS - 1) * a.channels + c;

    if (a.hold == 0)
        for (int64_t t = max(0, s.n_row - (TAPS - 1)); t < s.n_row; t++)
            conv_push<TAPS>(past, a.u[(s.row0 + t) * a.channels + c]);
#pragma unroll
    for (int i = 0; i + 1 < TAPS; i++)
        state[i * a.channels] = past[i + 1];
}

template <int TAPS>
__global__ void conv_rows(const conv_args a, const __grid_constant__ hx_cuda_spans spans);

extern "C" int hx_cuda_conv_short(hx_dev *d, const hx_conv_short_args *a, hx_err *err)
{
    const conv_args k = { (float *)a->y.p,
                          (float *)a->state.p,
                          (float *)a->pend.p,
                          (const float *)a->u.p,
                          (const float *)a->w.p,
                          a->channels,
                          a->hold };
    const int64_t per_span = a->hold ? HX_PEND_MAX : HX_MAX(a->rows.n_row, 1);
    const dim3 grid((unsigned)hx_ceil_div(a->channels, CONV_THREADS),
                    (unsigned)hx_ceil_div(per_span, CONV_ROWS), (unsigned)a->rows.n_span);
    hx_cuda *c = hx_cuda_of(d);
    hx_cuda_spans spans;
    const int rc = hx_cuda_spans_of(&spans, &a->rows, "conv_short", err);

    if (rc != 0)
        return rc;
    switch (a->taps) {
#define CASE(n)                                                                          \
    case n:                                                                              \
        HX_LAUNCH_NEXT(c, "conv_short", err, conv_rows<n>, grid, CONV_THREADS, 0, k,     \
                       spans);                                                           \
        break
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
#undef CASE
    }
    return 0;
}

/* One block: 128 channels, 16 rows of a span; a thread has one channel, its taps and its
 * last inputs in registers. Grid (channels / 128, rows / 16, spans). The block of a
 * span's first rows folds and writes the state, which no other block reads. Moves u and y
 * once; per span the state in and out and the pending rows. */
template <int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_rows(const conv_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    const hx_span s = hx_span_at(spans, (int32_t)blockIdx.z);
    const int64_t c = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x, n = a.channels;
    const int64_t t0 = (int64_t)blockIdx.y * CONV_ROWS,
                  t1 = min(t0 + CONV_ROWS, (int64_t)s.n_row);
    const float *u = a.u + s.row0 * n + c;
    float past[TAPS], w[TAPS];

    if (c >= n || (t0 > 0 && t0 >= s.n_row))
        return;
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        w[j] = a.w[c * TAPS + j];
    past[0] = 0;
    if (t0 == 0) {
        float last[TAPS];

        conv_begin<TAPS>(a, s, c, past);
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            last[j] = past[j];
        conv_keep<TAPS>(a, s, c, last);
    } else {
#pragma unroll
        for (int j = 1; j < TAPS; j++)
            past[j] = u[(t0 - TAPS + j) * n];
    }
#pragma unroll 4
    for (int64_t t = t0; t < t1; t++) {
        const float now = u[t * n];
        float sum = 0;

        conv_push<TAPS>(past, now);
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            sum = fmaf(w[j], past[j], sum);
        a.y[(s.row0 + t) * n + c] = sum * hx_sigmoid(sum);
        if (a.hold != 0)
            a.pend[((int64_t)s.slot * HX_PEND_MAX + t) * n + c] = now;
    }
}

/* ---- gates ----------------------------------------------------------- */

enum { ROW_THREADS = 128 };

typedef struct {
    float *g, *beta;
    const float *f, *b, *a_log, *dt_bias;
    int heads, width;
    float bound;
} gate_args;

__global__ void gate_rows(const gate_args a);

/* Rows from r on that one launch takes: the second dimension of a grid ends at 65,535. */
static int64_t grid_rows(int64_t rows, int64_t r)
{
    return HX_MIN(rows - r, 65535);
}

extern "C" int hx_cuda_kda_gate(hx_dev *d, const hx_kda_gate_args *a, hx_err *err)
{
    const int64_t n = a->heads * a->width;
    hx_cuda *c = hx_cuda_of(d);

    if (n > INT32_MAX / 2)
        return hx_fail(err, HX_EUNSUP,
                       "kda_gate: %lld heads of %lld are too wide for cuda",
                       (long long)a->heads, (long long)a->width);
    for (int64_t r = 0; r < a->rows; r += grid_rows(a->rows, r)) {
        const gate_args k = { (float *)a->g.p + r * n,
                              (float *)a->beta.p + r * a->heads,
                              (const float *)a->f.p + r * n,
                              (const float *)a->b.p + r * a->heads,
                              (const float *)a->a_log.p,
                              (const float *)a->dt_bias.p,
                              (int)a->heads,
                              (int)a->width,
                              a->bound };

        HX_LAUNCH_NEXT(
            c, "kda_gate", err, gate_rows,
            dim3((unsigned)hx_ceil_div(n, ROW_THREADS), (unsigned)grid_rows(a->rows, r)),
            ROW_THREADS, 0, k);
    }
    return 0;
}

/* One log-decay; rate: exp(a_log) of its head. */
HX_DEVICE float gate_of(float f, float rate, float dt_bias, float bound)
{
    return bound * hx_sigmoid(rate * (f + dt_bias));
}

/* One block: 128 of the heads * width channels of one row; the first blocks of a row do
 * its beta as well. Grid (heads * width / 128, rows). Moves f and g. */
__global__ void __launch_bounds__(ROW_THREADS) gate_rows(const gate_args a)
{
    hx_cuda_in_turn();
    const int i = (int)blockIdx.x * ROW_THREADS + (int)threadIdx.x;
    const int64_t r = blockIdx.y, n = (int64_t)a.heads * a.width;

    if (i < n)
        a.g[r * n + i] =
            gate_of(a.f[r * n + i], expf(a.a_log[i / a.width]), a.dt_bias[i], a.bound);
    if (i < a.heads)
        a.beta[r * a.heads + i] = hx_sigmoid(a.b[r * a.heads + i]);
}

/* ---- output norm ----------------------------------------------------- */

typedef struct {
    float *y;
    const float *o, *z, *w;
    int64_t n; /* rows * heads */
    int width;
    float eps;
} out_args;

__global__ void out_heads(const out_args a);

extern "C" int hx_cuda_kda_out(hx_dev *d, const hx_kda_out_args *a, hx_err *err)
{
    const out_args k = { (float *)a->y.p,
                         (const float *)a->o.p,
                         (const float *)a->z.p,
                         (const float *)a->w.p,
                         a->rows * a->heads,
                         (int)a->width,
                         a->eps };
    hx_cuda *c = hx_cuda_of(d);

    if (a->width > INT32_MAX || hx_ceil_div(k.n, ROW_THREADS / 32) > INT32_MAX)
        return hx_fail(err, HX_EUNSUP,
                       "kda_out: %lld rows of %lld heads are too many for cuda",
                       (long long)a->rows, (long long)a->heads);
    HX_LAUNCH_NEXT(c, "kda_out", err, out_heads,
                   dim3((unsigned)hx_ceil_div(k.n, ROW_THREADS / 32)), ROW_THREADS, 0, k);
    return 0;
}

/* One warp: one head of one row. Grid rows * heads / 4. Moves o, z and y; o is read
 * twice, the second time from the cache. y may be o: a lane keeps to its elements. */
__global__ void __launch_bounds__(ROW_THREADS) out_heads(const out_args a)
{
    hx_cuda_in_turn();
    const int64_t i = (int64_t)blockIdx.x * (ROW_THREADS / 32) + (threadIdx.x >> 5);
    const int64_t at = i * a.width;
    float ss = 0;

    if (i >= a.n)
        return;
    for (int d = threadIdx.x & 31; d < a.width; d += 32)
        ss = fmaf(a.o[at + d], a.o[at + d], ss);
    const float scale = 1.0f / sqrtf(hx_warp_sum(ss) / (float)a.width + a.eps);
    for (int d = threadIdx.x & 31; d < a.width; d += 32)
        a.y[at + d] = a.w[d] * (a.o[at + d] * scale) * hx_sigmoid(a.z[at + d]);
}

/* ---- gated delta rule ------------------------------------------------ */

/* A block has 32 columns of a head's state [K, V], a warp 8: lane = 16 * group + part
 * holds, of the four columns of its group, rows k = 64 i + 4 part + e, e < 4, i < K / 64.
 * So a row's operands, which all columns share, come out of shared memory half as often
 * as with two columns a lane. A sum over k is a chain of FMAs in order of k inside a lane
 * and a tree over the 16 parts. */
enum {
    KDA_WARPS = 4,
    KDA_COLS = 32,
    MAX_WIDTH = 128,
    MINE = 4, /* columns of a lane */
};

typedef struct {
    float *o, *state, *pend;
    const float *q, *k, *v, *g, *beta;
    const float *a_log, *dt_bias; /* NULL: g and beta are ready */
    int *ticket;                  /* [spans, heads], zero before and after */
    int64_t ld;
    int heads, width;
    float bound;
    bool fold; /* nothing but pending rows */
} kda_args;

/* K: the width rounded up. All rows lie prepared in shared memory together: the pending
 * ones, which the state moves past, and the new ones, which become pending. */
template <int K_> struct kda_shape {
    static constexpr int K = K_, KI = K / 64,
                         LANE = K / 32; /* elements of a lane in a vector */
    static constexpr int MOST = 2 * HX_PEND_MAX;
    /* A prepared row: decay k', decay q', k', decay, v of the columns, beta, k' q'. */
    static constexpr int V = 4 * K, BETA = V + KDA_COLS, ROW = BETA + 4;
    static constexpr size_t SHARED = MOST * ROW * sizeof(float);
};

/* A row as it comes from memory: lane has k = lane + 32 j. */
template <class T> struct kda_raw {
    float q[T::LANE], k[T::LANE], g[T::LANE], v, beta;
};

/* One head of one span, as a block sees it. */
struct kda_head {
    const kda_args &a;
    hx_span s;
    int h, c0; /* its first column */
    int n;     /* rows, folded ones first */

    /* What a slot keeps of pending row i: k', v, g, beta. */
    __device__ __forceinline__ float *record(int i) const
    {
        return a.pend +
               (((int64_t)s.slot * HX_PEND_MAX + i) * a.heads + h) * (3 * a.width + 1);
    }

    /* The log-decay of channel d of a row, as it came in. */
    __device__ __forceinline__ float gate(float g, int d) const
    {
        return a.a_log == NULL
                   ? g
                   : gate_of(g, expf(a.a_log[h]), a.dt_bias[h * a.width + d], a.bound);
    }
};

/* Row i of the head; zeros past the width. */
template <class T>
static __device__ __forceinline__ void kda_load(const kda_head &x, int i, kda_raw<T> &r)
{
    const kda_args &a = x.a;
    const int lane = threadIdx.x & 31;
    const bool folded = i < x.s.commit;
    const int64_t row = (int64_t)x.s.row0 + i - x.s.commit;
    const int64_t in = row * a.ld + (int64_t)x.h * a.width;
    const float *rec = x.record(i), *k = folded ? rec : a.k + in;
    const float *v = folded ? rec + a.width : a.v + in;
    const float *g = folded ? rec + 2 * a.width : a.g + (row * a.heads + x.h) * a.width;

#pragma unroll
    for (int j = 0; j < T::LANE; j++) {
        const int at = lane + 32 * j;
        const bool ok = at < a.width;

        r.q[j] = ok && !folded ? a.q[in + at] : 0.0f;
        r.k[j] = ok ? k[at] : 0.0f;
        r.g[j] = ok ? g[at] : 0.0f;
    }
    r.v = x.c0 + lane < a.width ? v[x.c0 + lane] : 0.0f;
    r.beta = folded ? rec[3 * a.width] : a.beta[row * a.heads + x.h];
    if (folded || a.a_log == NULL)
        return;
#pragma unroll
    for (int j = 0; j < T::LANE; j++)
        if (lane + 32 * j < a.width)
            r.g[j] = x.gate(r.g[j], lane + 32 * j);
    r.beta = hx_sigmoid(r.beta);
}

/* Normalises the row, if it is fresh (pending ones are), and writes what the recurrence
 * wants to shared memory. */
template <class T>
static __device__ __forceinline__ void kda_prepare(const kda_head &x, kda_raw<T> &r,
                                                   bool fresh, float *to)
{
    const int lane = threadIdx.x & 31;
    float kk = 0, qq = 0, kq = 0;

    if (fresh) {
#pragma unroll
        for (int j = 0; j < T::LANE; j++) {
            kk = fmaf(r.k[j], r.k[j], kk);
            qq = fmaf(r.q[j], r.q[j], qq);
        }
        const float ks = 1.0f / sqrtf(hx_warp_sum(kk) + 1e-6f);
        const float qs = 1.0f / sqrtf((hx_warp_sum(qq) + 1e-6f) * (float)x.a.width);
#pragma unroll
        for (int j = 0; j < T::LANE; j++) {
            r.k[j] *= ks;
            r.q[j] *= qs;
            kq = fmaf(r.k[j], r.q[j], kq);
        }
        kq = hx_warp_sum(kq);
    }
#pragma unroll
    for (int j = 0; j < T::LANE; j++) {
        const int at = lane + 32 * j;
        const float decay = expf(r.g[j]);

        to[at] = decay * r.k[j];
        to[T::K + at] = decay * r.q[j];
        to[2 * T::K + at] = r.k[j];
        to[3 * T::K + at] = decay;
    }
    to[T::V + lane] = r.v;
    if (lane == 0) {
        to[T::BETA] = r.beta;
        to[T::BETA + 1] = kq;
    }
}

/* Makes the new rows, which lie prepared in room, pending. All blocks of the head read
 * the pending rows that these replace, so the last block that has done so does it. */
template <class T>
static __device__ __forceinline__ void kda_hold(const kda_head &x, const float *room,
                                                int blocks)
{
    __shared__ int last;
    const kda_args &a = x.a;

    if (threadIdx.x == 0) {
        int *ticket = &a.ticket[(int64_t)blockIdx.y * a.heads + x.h];

        last = blocks == 1 || atomicAdd(ticket, 1) == blocks - 1;
        if (last && blocks > 1)
            *ticket = 0;
    }
    __syncthreads();
    if (last == 0)
        return;
    for (int i = threadIdx.x; i < x.s.n_row * a.width; i += 32 * KDA_WARPS) {
        const int t = i / a.width, d = i % a.width;
        const int64_t row = (int64_t)x.s.row0 + t;
        const float *in = room + (x.s.commit + t) * T::ROW;
        float *rec = x.record(t);

        rec[d] = in[2 * T::K + d];
        rec[a.width + d] = a.v[row * a.ld + (int64_t)x.h * a.width + d];
        rec[2 * a.width + d] = x.gate(a.g[(row * a.heads + x.h) * a.width + d], d);
        if (d == 0)
            rec[3 * a.width] = in[T::BETA];
    }
}

/* Sums of four values over the 16 lanes of a group; lane has that of column part % 4. */
HX_DEVICE float parts_sum(const float (&v)[MINE])
{
    const int part = threadIdx.x & 15;
    const bool odd = (part & 1) != 0, high = (part & 2) != 0;
    const float a = (odd ? v[1] : v[0]) + __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    const float b = (odd ? v[3] : v[2]) + __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    float s = (high ? b : a) + __shfl_xor_sync(~0u, high ? a : b, 2);

    s += __shfl_xor_sync(~0u, s, 4);
    return s + __shfl_xor_sync(~0u, s, 8);
}

/* The lane's piece of the state: [i][e][column]. */
template <class T> struct kda_state {
    float s[T::KI][4][MINE];
};

HX_DEVICE void four(float (&to)[4], const float *p)
{
    const float4 v = *(const float4 *)p;

    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
}

/* One row: w = beta (v - (decay S)^T k'), o = (decay S)^T q' + (k' q') w, and, where the
 * state is still needed, S = decay S + k' w^T. A lane computes w and o of column part % 4
 * of its group. o: where that goes, or NULL. */
template <class T>
static __device__ __forceinline__ void kda_row(kda_state<T> &st, const float *row,
                                               int col, bool move, float *o)
{
    const int part = threadIdx.x & 15;
    const float2 bk = *(const float2 *)(row + T::BETA); /* beta, k' q' */
    const float v = row[T::V + col + (part & 3)];
    float u[MINE] = {}, p[MINE] = {}, w[MINE];

#pragma unroll
    for (int i = 0; i < T::KI; i++) {
        float dk[4], dq[4];

        four(dk, row + 64 * i + 4 * part);
        four(dq, row + T::K + 64 * i + 4 * part);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int c = 0; c < MINE; c++) {
                u[c] = fmaf(dk[e], st.s[i][e][c], u[c]);
                p[c] = fmaf(dq[e], st.s[i][e][c], p[c]);
            }
    }
    const float mine = bk.x * (v - parts_sum(u)), out = fmaf(bk.y, mine, parts_sum(p));
    if (move) {
#pragma unroll
        for (int c = 0; c < MINE; c++)
            w[c] = __shfl_sync(~0u, mine, c, 16);
#pragma unroll
        for (int i = 0; i < T::KI; i++) {
            float k[4], decay[4];

            four(k, row + 2 * T::K + 64 * i + 4 * part);
            four(decay, row + 3 * T::K + 64 * i + 4 * part);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 0; c < MINE; c++)
                    st.s[i][e][c] = fmaf(k[e], w[c], decay[e] * st.s[i][e][c]);
        }
    }
    if (o != NULL)
        *o = out;
}

/* Calls f(where, its four values, columns inside) for the lane's piece of the state. A
 * warp touches whole 32-byte sectors. */
template <class T, class F>
static __device__ __forceinline__ void kda_visit(const kda_head &x, kda_state<T> &st,
                                                 int col, F f)
{
    const int part = threadIdx.x & 15, width = x.a.width, at = x.c0 + col;
    float *p = x.a.state + ((int64_t)x.s.slot * x.a.heads + x.h) * width * width + at;

#pragma unroll
    for (int i = 0; i < T::KI; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int k = 64 * i + 4 * part + e;

            f(p + k * width, st.s[i][e], k < width ? width - at : 0);
        }
}

/* Whether the lane's columns lie together at an address that is a multiple of 16. */
HX_DEVICE bool kda_fours(const kda_args &a)
{
    return a.width % MINE == 0 && ((uintptr_t)a.state & 15) == 0;
}

template <class T>
static __device__ __forceinline__ void kda_read(const kda_head &x, kda_state<T> &st,
                                                int col)
{
    if (x.s.pos0 == 0)
        kda_visit<T>(x, st, col, [](float *, float(&s)[MINE], int) {
            for (int c = 0; c < MINE; c++)
                s[c] = 0;
        });
    else if (kda_fours(x.a))
        kda_visit<T>(x, st, col, [](float *p, float(&s)[MINE], int n) {
            const float4 v = n > 0 ? *(const float4 *)p : make_float4(0, 0, 0, 0);

            s[0] = v.x;
            s[1] = v.y;
            s[2] = v.z;
            s[3] = v.w;
        });
    else
        kda_visit<T>(x, st, col, [](float *p, float(&s)[MINE], int n) {
            for (int c = 0; c < MINE; c++)
                s[c] = c < n ? p[c] : 0;
        });
}

template <class T>
static __device__ __forceinline__ void kda_write(const kda_head &x, kda_state<T> &st,
                                                 int col)
{
    if (kda_fours(x.a))
        kda_visit<T>(x, st, col, [](float *p, float(&s)[MINE], int n) {
            if (n > 0)
                *(float4 *)p = make_float4(s[0], s[1], s[2], s[3]);
        });
    else
        kda_visit<T>(x, st, col, [](float *p, float(&s)[MINE], int n) {
            for (int c = 0; c < MINE; c++)
                if (c < n)
                    p[c] = s[c];
        });
}

/* The head's rows in order. */
template <class T>
static __device__ __forceinline__ void kda_run(const kda_head &x, kda_state<T> &st,
                                               const float *room, int col)
{
    const kda_args &a = x.a;
    const int at = x.c0 + col + (int)(threadIdx.x & 15);
    const int64_t ldo = (int64_t)a.heads * a.width;
    const bool out = (threadIdx.x & 15) < MINE && at < a.width;
    float *o = a.o + ((int64_t)x.s.row0 - x.s.commit) * ldo + (int64_t)x.h * a.width + at;

    for (int i = 0; i < x.n; i++, o += ldo, room += T::ROW) {
        kda_row<T>(st, room, col, i < x.s.commit || i + 1 < x.n,
                   out && i >= x.s.commit ? o : NULL);
        if (i == x.s.commit - 1)
            kda_write<T>(x, st, col);
    }
}

template <class T>
__global__ void kda_rows(const kda_args a, const __grid_constant__ hx_cuda_spans spans);

template <class T>
static int kda_launch(hx_dev *d, const char *op, const hx_kda_step_args *a, bool fold,
                      hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const kda_args k = { (float *)a->o.p,
                         (float *)a->state.p,
                         (float *)a->pend.p,
                         (const float *)a->q.p,
                         (const float *)a->k.p,
                         (const float *)a->v.p,
                         (const float *)a->g.p,
                         (const float *)a->beta.p,
                         (const float *)a->a_log.p,
                         (const float *)a->dt_bias.p,
                         c->ticket,
                         a->ld,
                         (int)a->heads,
                         (int)a->width,
                         a->bound,
                         fold };
    const dim3 grid((unsigned)(a->heads * hx_ceil_div(a->width, KDA_COLS)),
                    (unsigned)a->rows.n_span);
    hx_cuda_spans spans;
    const int rc = hx_cuda_spans_of(&spans, &a->rows, op, err);

    if (rc != 0)
        return rc;
    if (a->heads * a->rows.n_span > c->n_ticket)
        return hx_fail(
            err, HX_EARG,
            "%s: %lld heads of %d spans, the device was opened for %lld in all; "
            "open it with larger limits",
            op, (long long)a->heads, a->rows.n_span, (long long)c->n_ticket);
    HX_LAUNCH_NEXT(c, op, err, kda_rows<T>, grid, 32 * KDA_WARPS, T::SHARED, k, spans);
    return 0;
}

static int check_width(const char *op, const hx_kda_step_args *a, hx_err *err)
{
    if (a->width <= MAX_WIDTH && a->heads <= INT32_MAX / MAX_WIDTH)
        return 0;
    return hx_fail(err, HX_EUNSUP,
                   "%s: %lld heads of width %lld, cuda takes widths up to %d", op,
                   (long long)a->heads, (long long)a->width, MAX_WIDTH);
}

extern "C" int hx_cuda_kda_step(hx_dev *d, const hx_kda_step_args *a, hx_err *err)
{
    const int rc = check_width("kda_step", a, err);

    if (rc != 0)
        return rc;
    return a->width <= 64 ? kda_launch<kda_shape<64>>(d, "kda_step", a, false, err)
                          : kda_launch<kda_shape<128>>(d, "kda_step", a, false, err);
}

int hx_cuda_kda_fold(hx_dev *d, const hx_kda_step_args *a, hx_err *err)
{
    const int rc = check_width("kda_chunk", a, err);

    if (rc != 0)
        return rc;
    return a->width <= 64 ? kda_launch<kda_shape<64>>(d, "kda_chunk", a, true, err)
                          : kda_launch<kda_shape<128>>(d, "kda_chunk", a, true, err);
}

/* One block: 32 columns of one head of one span, all rows in order. The state is fetched
 * while the launch before ends, which must not be what wrote it. Grid (heads * width / 32,
 * spans). Moves the state in, and out where it changed, and the rows; q, k and g once
 * for each block of a head. */
template <class T>
__global__ void __launch_bounds__(32 * KDA_WARPS, 4)
    kda_rows(const kda_args a, const __grid_constant__ hx_cuda_spans spans)
{
    extern __shared__ __align__(16) float room[];
    const int blocks = (a.width + KDA_COLS - 1) / KDA_COLS, warp = threadIdx.x >> 5;
    const int col = 8 * warp + MINE * ((threadIdx.x & 31) >> 4);
    kda_head x = { a, hx_span_at(spans, (int32_t)blockIdx.y), (int)blockIdx.x / blocks,
                   (int)blockIdx.x % blocks * KDA_COLS, 0 };
    kda_state<T> st;

    if (a.fold)
        x.s.n_row = 0;
    x.n = x.s.commit + x.s.n_row;
    const bool idle = x.n == 0 && x.s.pos0 > 0;
    if (!idle)
        kda_read<T>(x, st, col);
    hx_cuda_in_turn();
    if (idle)
        return;
    if (x.s.commit == 0 && x.s.pos0 == 0)
        kda_write<T>(x, st, col);
#pragma unroll 1
    for (int i = warp; i < x.n; i += KDA_WARPS) {
        kda_raw<T> raw;

        kda_load<T>(x, i, raw);
        kda_prepare<T>(x, raw, i >= x.s.commit, room + i * T::ROW);
    }
    __syncthreads();
    if (x.s.n_row > 0)
        kda_hold<T>(x, room, blocks);
    kda_run<T>(x, st, room, col);
}
