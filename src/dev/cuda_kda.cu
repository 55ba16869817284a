/* cuda_kda.cu - the linear-attention operations on the GPU: short convolution, gates, gated
 * delta rule, output norm. Called through the operation table in cuda.cu. Never allocates,
 * waits or reads back; spans are read where they are, so that a decode step can be replayed.
 *
 * The gated delta rule is one kernel for decode and prefill. A thread keeps its piece of a
 * head's state in registers, so a row costs four fp32 operations per state element and no
 * memory. The chunked form needs more than that: for 64 rows of a 128 x 128 head 69
 * thousand products a row against 66 thousand, and it pays only on matrix units, whose
 * fp16 and tf32 inputs cost more accuracy than the bound allows. So prefill has the bits
 * of decode, wherever it is cut. */
#include "dev/cuda_dev.h"

/* ---- short convolution ----------------------------------------------- */

enum {
    CONV_THREADS = 128,
    CONV_ROWS = 16, /* of a block: more than the taps, so only the first sees the state */
};

typedef struct {
    float       *y, *state, *pend;
    const float *u, *w;
    int64_t      channels;
    int          hold;
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

/* One block: 128 channels, 16 rows of a span; a thread has one channel, its taps and its
 * last inputs in registers. Grid (channels / 128, rows / 16, spans). The block of a span's
 * first rows folds and writes the state, which no other block reads. Moves u and y once;
 * per span the state in and out and the pending rows. */
template <int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_rows(const conv_args a, const __grid_constant__ hx_cuda_spans spans)
{
    const hx_span s = hx_span_at(spans, (int32_t)blockIdx.z);
    const int64_t c = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x, n = a.channels;
    const int64_t t0 = (int64_t)blockIdx.y * CONV_ROWS, t1 = min(t0 + CONV_ROWS, (int64_t)s.n_row);
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

extern "C" int hx_cuda_conv_short(hx_dev *d, const hx_conv_short_args *a, hx_err *err)
{
    const conv_args k = { (float *)a->y.p,       (float *)a->state.p,   (float *)a->pend.p,
                          (const float *)a->u.p, (const float *)a->w.p, a->channels,
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
        HX_LAUNCH(c, "conv_short", err, conv_rows<n>, grid, CONV_THREADS, 0, k, spans);  \
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

/* ---- gates ----------------------------------------------------------- */

enum { ROW_THREADS = 128 };

typedef struct {
    float       *g, *beta;
    const float *f, *b, *a_log, *dt_bias;
    int          heads, width;
    float        bound;
} gate_args;

/* One block: 128 of the heads * width channels of one row; the first blocks of a row do its
 * beta as well. Grid (heads * width / 128, rows). Moves f and g. */
__global__ void __launch_bounds__(ROW_THREADS) gate_rows(const gate_args a)
{
    const int i = (int)blockIdx.x * ROW_THREADS + (int)threadIdx.x;
    const int64_t r = blockIdx.y, n = (int64_t)a.heads * a.width;

    if (i < n) {
        const float rate = expf(a.a_log[i / a.width]);

        a.g[r * n + i] = a.bound * hx_sigmoid(rate * (a.f[r * n + i] + a.dt_bias[i]));
    }
    if (i < a.heads)
        a.beta[r * a.heads + i] = hx_sigmoid(a.b[r * a.heads + i]);
}

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
        return hx_fail(err, HX_EUNSUP, "kda_gate: %lld heads of %lld are too wide for cuda",
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

        HX_LAUNCH(c, "kda_gate", err, gate_rows,
                  dim3((unsigned)hx_ceil_div(n, ROW_THREADS), (unsigned)grid_rows(a->rows, r)),
                  ROW_THREADS, 0, k);
    }
    return 0;
}

/* ---- output norm ----------------------------------------------------- */

typedef struct {
    float       *y;
    const float *o, *z, *w;
    int64_t      n; /* rows * heads */
    int          width;
    float        eps;
} out_args;

/* One warp: one head of one row. Grid rows * heads / 4. Moves o, z and y; o is read
 * twice, the second time from the cache. y may be o: a lane keeps to its elements. */
__global__ void __launch_bounds__(ROW_THREADS) out_heads(const out_args a)
{
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
        return hx_fail(err, HX_EUNSUP, "kda_out: %lld rows of %lld heads are too many for cuda",
                       (long long)a->rows, (long long)a->heads);
    HX_LAUNCH(c, "kda_out", err, out_heads, dim3((unsigned)hx_ceil_div(k.n, ROW_THREADS / 32)),
              ROW_THREADS, 0, k);
    return 0;
}

/* ---- gated delta rule ------------------------------------------------ */

/* A block has 32 columns of a head's state [K, V], a warp 8: lane = 8 * pair + part holds,
 * of the two columns of its pair, rows k = 32 i + 4 part + e, e < 4, i < KI. A sum over k is
 * a chain of FMAs in order of k inside a lane and a butterfly over the 8 parts. */
enum {
    KDA_WARPS = 4,
    KDA_THREADS = 32 * KDA_WARPS,
    KDA_COLS = 32,
    MAX_WIDTH = 128,
};

typedef struct {
    float       *o, *state, *pend;
    const float *q, *k, *v, *g, *beta;
    int         *ticket; /* [spans, heads], zero before and after */
    int64_t      ld;
    int          heads, width;
} kda_args;

/* KI: rows of the state / 32. HOLD: decode, where the new rows become pending and the state
 * moves past the folded ones only; all rows are one batch. Otherwise prefill. */
template <int KI_, bool HOLD_> struct kda_shape {
    static constexpr int KI = KI_;
    static constexpr bool HOLD = HOLD_;
    static constexpr int BATCH = HOLD ? 2 * HX_PEND_MAX : 8; /* rows prepared together */
    static constexpr int EACH = BATCH / KDA_WARPS;           /* by one warp */
    /* A prepared row: decay k', decay q', k', decay, v of the columns, beta, k' q'. */
    static constexpr int K = 32 * KI, V = 4 * K, BETA = V + KDA_COLS, ROW = BETA + 4;
    static constexpr size_t SHARED = (HOLD ? 1 : 2) * BATCH * ROW * sizeof(float);
};

/* A row as it comes from memory: lane has k = lane + 32 j. */
template <class T> struct kda_raw {
    float q[T::KI], k[T::KI], g[T::KI], v, beta;
};

/* One head of one span, as a block sees it. */
struct kda_head {
    const kda_args &a;
    hx_span         s;
    int             h, c0;   /* its first column */
    int             n, keep; /* rows, folded ones first; rows that the state moves past */

    /* What a slot keeps of pending row i: k', v, g, beta. */
    __device__ __forceinline__ float *record(int i) const
    {
        return a.pend + (((int64_t)s.slot * HX_PEND_MAX + i) * a.heads + h) * (3 * a.width + 1);
    }
};

/* Row i of the head; zeros past the width. */
template <class T>
static __device__ __forceinline__ void kda_load(const kda_head &x, int i, kda_raw<T> &r)
{
    const kda_args &a = x.a;
    const int lane = threadIdx.x & 31;

    if (i >= x.n)
        return;
    const bool folded = i < x.s.commit;
    const int64_t row = (int64_t)x.s.row0 + i - x.s.commit;
    const int64_t in = row * a.ld + (int64_t)x.h * a.width;
    const float *rec = x.record(i), *k = folded ? rec : a.k + in;
    const float *v = folded ? rec + a.width : a.v + in;
    const float *g = folded ? rec + 2 * a.width : a.g + (row * a.heads + x.h) * a.width;

#pragma unroll
    for (int j = 0; j < T::KI; j++) {
        const int at = lane + 32 * j;
        const bool ok = at < a.width;

        r.q[j] = ok && !folded ? a.q[in + at] : 0.0f;
        r.k[j] = ok ? k[at] : 0.0f;
        r.g[j] = ok ? g[at] : 0.0f;
    }
    r.v = x.c0 + lane < a.width ? v[x.c0 + lane] : 0.0f;
    r.beta = folded ? rec[3 * a.width] : a.beta[row * a.heads + x.h];
}

/* Normalises the row and writes what the recurrence wants to shared memory. */
template <class T>
static __device__ __forceinline__ void kda_prepare(const kda_head &x, int i, kda_raw<T> &r,
                                                   float *to)
{
    const int lane = threadIdx.x & 31;
    float kk = 0, qq = 0, kq = 0;

    if (i >= x.n)
        return;
    if (i >= x.s.commit) {
#pragma unroll
        for (int j = 0; j < T::KI; j++) {
            kk = fmaf(r.k[j], r.k[j], kk);
            qq = fmaf(r.q[j], r.q[j], qq);
        }
        const float ks = 1.0f / sqrtf(hx_warp_sum(kk) + 1e-6f);
        const float qs = 1.0f / sqrtf((hx_warp_sum(qq) + 1e-6f) * (float)x.a.width);
#pragma unroll
        for (int j = 0; j < T::KI; j++) {
            r.k[j] *= ks;
            r.q[j] *= qs;
            kq = fmaf(r.k[j], r.q[j], kq);
        }
        kq = hx_warp_sum(kq);
    }
#pragma unroll
    for (int j = 0; j < T::KI; j++) {
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

/* Makes the new rows, which lie prepared in room, pending. All blocks of the head read the
 * pending rows that these replace, so the last block that has done so does it. */
template <class T>
static __device__ __forceinline__ void kda_hold(const kda_head &x, const float *room, int blocks)
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
    for (int t = 0; t < x.s.n_row; t++) {
        const int64_t row = (int64_t)x.s.row0 + t;
        const float *in = room + (x.s.commit + t) * T::ROW;
        float *rec = x.record(t);

        for (int d = threadIdx.x; d < a.width; d += KDA_THREADS) {
            rec[d] = in[2 * T::K + d];
            rec[a.width + d] = a.v[row * a.ld + (int64_t)x.h * a.width + d];
            rec[2 * a.width + d] = a.g[(row * a.heads + x.h) * a.width + d];
        }
        if (threadIdx.x == 0)
            rec[3 * a.width] = in[T::BETA];
    }
}

HX_DEVICE float parts_sum(float v)
{
    v += __shfl_xor_sync(~0u, v, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    v += __shfl_xor_sync(~0u, v, 4);
    return v;
}

/* The lane's piece of the state: [i][e][column]. */
template <class T> struct kda_state {
    float s[T::KI][4][2];
};

/* One row: w = beta (v - (decay S)^T k'), o = (decay S)^T q' + (k' q') w, and, where the
 * state is still needed, S = decay S + k' w^T. o: of the lane's columns, of which n_col lie
 * inside, or NULL. */
template <class T>
static __device__ __forceinline__ void kda_row(kda_state<T> &st, const float *row, int col,
                                               bool move, float *o, int n_col)
{
    const int part = threadIdx.x & 7;
    const float4 *dk = (const float4 *)row + part, *dq = (const float4 *)(row + T::K) + part;
    const float4 *k = (const float4 *)(row + 2 * T::K) + part;
    const float4 *decay = (const float4 *)(row + 3 * T::K) + part;
    const float2 v = *(const float2 *)(row + T::V + col);
    const float2 bk = *(const float2 *)(row + T::BETA); /* beta, k' q' */
    float u[2] = { 0, 0 }, p[2] = { 0, 0 };

#pragma unroll
    for (int i = 0; i < T::KI; i++) {
        const float4 a = dk[8 * i], b = dq[8 * i];
        const float ka[4] = { a.x, a.y, a.z, a.w }, qa[4] = { b.x, b.y, b.z, b.w };

#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                u[c] = fmaf(ka[e], st.s[i][e][c], u[c]);
                p[c] = fmaf(qa[e], st.s[i][e][c], p[c]);
            }
    }
    const float w[2] = { bk.x * (v.x - parts_sum(u[0])), bk.x * (v.y - parts_sum(u[1])) };
    if (move) {
#pragma unroll
        for (int i = 0; i < T::KI; i++) {
            const float4 a = k[8 * i], b = decay[8 * i];
            const float ka[4] = { a.x, a.y, a.z, a.w }, da[4] = { b.x, b.y, b.z, b.w };

#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    st.s[i][e][c] = fmaf(ka[e], w[c], da[e] * st.s[i][e][c]);
        }
    }
    if (o != NULL) {
        const float o0 = fmaf(bk.y, w[0], parts_sum(p[0]));
        const float o1 = fmaf(bk.y, w[1], parts_sum(p[1]));

        if (part == 0 && n_col > 0)
            o[0] = o0;
        if (part == 1 && n_col > 1)
            o[1] = o1;
    }
}

/* Calls f(where, its two values, columns inside) for the lane's piece of the state. A warp
 * touches whole 32-byte sectors. */
template <class T, class F>
static __device__ __forceinline__ void kda_visit(const kda_head &x, kda_state<T> &st, int col, F f)
{
    const int part = threadIdx.x & 7, width = x.a.width, at = x.c0 + col;
    float *p = x.a.state + ((int64_t)x.s.slot * x.a.heads + x.h) * width * width + at;

#pragma unroll
    for (int i = 0; i < T::KI; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int k = 32 * i + 4 * part + e;

            f(p + k * width, st.s[i][e], k < width ? width - at : 0);
        }
}

/* Whether the lane's two columns lie together at an address that is a multiple of 8. */
HX_DEVICE bool kda_pairs(const kda_args &a)
{
    return a.width % 2 == 0 && ((uintptr_t)a.state & 7) == 0;
}

template <class T>
static __device__ __forceinline__ void kda_read(const kda_head &x, kda_state<T> &st, int col)
{
    if (x.s.pos0 == 0)
        kda_visit<T>(x, st, col, [](float *, float *s, int) { s[0] = s[1] = 0; });
    else if (kda_pairs(x.a))
        kda_visit<T>(x, st, col, [](float *p, float *s, int n) {
            const float2 v = n > 0 ? *(const float2 *)p : make_float2(0, 0);

            s[0] = v.x;
            s[1] = v.y;
        });
    else
        kda_visit<T>(x, st, col, [](float *p, float *s, int n) {
            s[0] = n > 0 ? p[0] : 0;
            s[1] = n > 1 ? p[1] : 0;
        });
}

template <class T>
static __device__ __forceinline__ void kda_write(const kda_head &x, kda_state<T> &st, int col)
{
    if (kda_pairs(x.a))
        kda_visit<T>(x, st, col, [](float *p, float *s, int n) {
            if (n > 0)
                *(float2 *)p = make_float2(s[0], s[1]);
        });
    else
        kda_visit<T>(x, st, col, [](float *p, float *s, int n) {
            if (n > 0)
                p[0] = s[0];
            if (n > 1)
                p[1] = s[1];
        });
}

/* Rows i0 on of the head, a batch at most. */
template <class T>
static __device__ __forceinline__ void kda_batch(const kda_head &x, kda_state<T> &st, int i0,
                                                 const float *room, int col)
{
    const kda_args &a = x.a;
    const int m = min(T::BATCH, x.n - i0);

    for (int r = 0; r < m; r++) {
        const int i = i0 + r;
        const int64_t row = (int64_t)x.s.row0 + i - x.s.commit;
        float *o = i < x.s.commit ? NULL
                                  : a.o + (row * a.heads + x.h) * a.width + x.c0 + col;

        kda_row<T>(st, room + r * T::ROW, col, i < x.keep || i + 1 < x.n, o,
                   a.width - x.c0 - col);
        if (T::HOLD && i == x.keep - 1)
            kda_write<T>(x, st, col);
    }
}

/* One block: 32 columns of one head of one span, all rows in order. Grid (heads * width / 32,
 * spans). Rows are prepared a batch at a time, in prefill while the batch before runs; shared
 * memory holds one batch, or two. Moves the state in, and out where it changed, and the rows;
 * q, k and g once for each block of a head. */
template <class T>
__global__ void __launch_bounds__(KDA_THREADS, T::HOLD ? 3 : 4)
    kda_rows(const kda_args a, const __grid_constant__ hx_cuda_spans spans)
{
    extern __shared__ __align__(16) float room[];
    const int blocks = (a.width + KDA_COLS - 1) / KDA_COLS, warp = threadIdx.x >> 5;
    const int col = 8 * warp + 2 * ((threadIdx.x & 31) >> 3);
    kda_head x = { a, hx_span_at(spans, (int32_t)blockIdx.y), (int)blockIdx.x / blocks,
                   (int)blockIdx.x % blocks * KDA_COLS, 0, 0 };
    kda_state<T> st;
    kda_raw<T> raw[T::EACH];

    x.n = x.s.commit + x.s.n_row;
    x.keep = T::HOLD ? x.s.commit : x.n;
    if (x.n == 0 && x.s.pos0 > 0)
        return;
    kda_read<T>(x, st, col);
    if (x.keep == 0 && x.s.pos0 == 0)
        kda_write<T>(x, st, col);
    for (int i0 = -T::BATCH; i0 < x.n; i0 += T::BATCH) {
        const bool more = !T::HOLD || i0 < 0;
        const int half = T::HOLD ? 0 : i0 / T::BATCH & 1;
        float *next = room + (T::HOLD ? 0 : half ^ 1) * T::BATCH * T::ROW;

        if (more)
#pragma unroll
            for (int j = 0; j < T::EACH; j++)
                kda_load<T>(x, i0 + T::BATCH + warp + KDA_WARPS * j, raw[j]);
        if (i0 >= 0)
            kda_batch<T>(x, st, i0, room + half * T::BATCH * T::ROW, col);
        if (more)
#pragma unroll
            for (int j = 0; j < T::EACH; j++)
                kda_prepare<T>(x, i0 + T::BATCH + warp + KDA_WARPS * j, raw[j],
                               next + (warp + KDA_WARPS * j) * T::ROW);
        __syncthreads();
        if (T::HOLD && i0 < 0 && x.s.n_row > 0)
            kda_hold<T>(x, room, blocks);
    }
    if (!T::HOLD && x.keep > 0)
        kda_write<T>(x, st, col);
}

template <class T>
static int kda_launch(hx_dev *d, const char *op, const hx_kda_step_args *a, hx_err *err)
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
                         c->ticket,
                         a->ld,
                         (int)a->heads,
                         (int)a->width };
    const dim3 grid((unsigned)(a->heads * hx_ceil_div(a->width, KDA_COLS)),
                    (unsigned)a->rows.n_span);
    hx_cuda_spans spans;
    const int rc = hx_cuda_spans_of(&spans, &a->rows, op, err);

    if (rc != 0)
        return rc;
    if (T::HOLD && a->heads * a->rows.n_span > c->n_ticket)
        return hx_fail(err, HX_EARG,
                       "%s: %lld heads of %d spans, the device was opened for %lld in all; "
                       "open it with larger limits",
                       op, (long long)a->heads, a->rows.n_span, (long long)c->n_ticket);
    HX_LAUNCH(c, op, err, kda_rows<T>, grid, KDA_THREADS, T::SHARED, k, spans);
    return 0;
}

static int check_width(const char *op, const hx_kda_step_args *a, hx_err *err)
{
    if (a->width <= MAX_WIDTH && a->heads <= INT32_MAX / MAX_WIDTH)
        return 0;
    return hx_fail(err, HX_EUNSUP, "%s: %lld heads of width %lld, cuda takes widths up to %d", op,
                   (long long)a->heads, (long long)a->width, MAX_WIDTH);
}

extern "C" int hx_cuda_kda_step(hx_dev *d, const hx_kda_step_args *a, hx_err *err)
{
    const int rc = check_width("kda_step", a, err);

    if (rc != 0)
        return rc;
    return a->width <= 32 ? kda_launch<kda_shape<1, true>>(d, "kda_step", a, err)
                          : kda_launch<kda_shape<4, true>>(d, "kda_step", a, err);
}

extern "C" int hx_cuda_kda_chunk(hx_dev *d, const hx_kda_chunk_args *a, hx_err *err)
{
    const int rc = check_width("kda_chunk", a, err);

    if (rc != 0)
        return rc;
    return a->width <= 32 ? kda_launch<kda_shape<1, false>>(d, "kda_chunk", a, err)
                          : kda_launch<kda_shape<4, false>>(d, "kda_chunk", a, err);
}
