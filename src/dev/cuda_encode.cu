/* cuda_encode.cu - the EXL3 encoder's operations (enc_ops.h) on a GPU. Called through the
 * device's hx_dev_link by exl3_encode.c. Decides nothing, and gives the bits of
 * enc_host.c: the same fused and unfused roundings in the same order.
 *
 * The search is what costs: 2 x 256 x 65,536 candidates per tile of 256 weights, each a
 * difference, a fused multiply-add and half a minimum of three. A block of 512 threads has
 * a tile; each thread holds its 128 of the 65,536 values for a whole walk, most of them as
 * floats, costs go round through shared memory, and no picks are kept: every few positions
 * the costs of all overlaps go to global memory, and the way back evaluates the few
 * candidates again that lead to the one state it needs. */
#include <cuda_fp16.h>

#include "dev/cuda_dev.h"
#include "dev/enc_kern.h"
#include "dev/enc_ops.h"
#include "dev/fmt_exl3.h"

namespace
{

enum {
    TILE = HX_ENC_TILE,
    SPAN = HX_ENC_BLOCK,
    LOG_THREADS = 9,
    THREADS = 1 << LOG_THREADS, /* of a search */
    OWN = 65536 / THREADS,      /* states of each */
    DEEP = 256,                 /* terms of a sum between writes, as in dense.c */
    STEP = 64,                  /* rows that a factor advances by, as there */
    SIDE = 128,                 /* of a block of a product */
    SLAB = 16,                  /* terms of it that are in shared memory */
};

struct gpu {
    hx_cuda *c;
    cudaError_t rc; /* the first that an operation without a result met */
    float *r, *v, *marks, *cost;
    double *sum;
    int *bad;
    int n_block; /* of a search */
    bool room;   /* for values in shared memory */
    char *tiles; /* of search() and tiles() */
    size_t tiles_bytes;
};

gpu *own(const hx_enc *e)
{
    return (gpu *)e->own;
}

void note(gpu *g, cudaError_t rc)
{
    if (g->rc == cudaSuccess)
        g->rc = rc;
}

#define RUN(g, kernel, grid, block, bytes, ...)                                          \
    do {                                                                                 \
        kernel<<<(grid), (block), (bytes), (g)->c->stream>>>(__VA_ARGS__);               \
        note((g), cudaGetLastError());                                                   \
    } while (0)

/* Device to host, and whatever went wrong until then. */
int fetch(gpu *g, void *to, const void *from, size_t bytes, hx_err *err)
{
    note(g, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, g->c->stream));
    note(g, cudaStreamSynchronize(g->c->stream));
    return g->rc == cudaSuccess ? 0 : hx_cuda_fail(err, "EXL3 encoder", g->rc);
}

void upload(gpu *g, void *to, const void *from, size_t bytes)
{
    note(g, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, g->c->stream));
}

int blocks_for(int64_t n, int threads)
{
    return (int)HX_MIN(hx_ceil_div(n, threads), 1 << 20);
}

/* ---- elements ---------------------------------------------------------------- */

#define EACH(i, n)                                                                       \
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (n);            \
         i += (int64_t)gridDim.x * blockDim.x)

__global__ void scale_all(float *y, const float *x, const float *r, const float *c,
                          int64_t rows, int64_t cols)
{
    EACH(i, rows * cols)
    y[i] = x[i] * (r[i / cols] * c[i % cols]);
}

__global__ void subtract_all(float *y, const float *x, int64_t n)
{
    EACH(i, n)
    y[i] = x[i] - y[i];
}

__global__ void times_all(float *y, const float *x, int64_t n)
{
    EACH(i, n)
    y[i] *= x[i];
}

__global__ void diag_out(const float *x, int64_t n, float *out)
{
    EACH(i, n)
    out[i] = x[i * n + i];
}

__global__ void diag_in(float *x, int64_t n, const float *in)
{
    EACH(i, n)
    x[i * n + i] = in[i];
}

/* Block: 32 x 32 elements, 32 x 8 threads. */
__global__ void transpose_tile(float *y, int64_t ldy, const float *x, int64_t rows,
                               int64_t cols)
{
    __shared__ float s[32][33];
    const int64_t i0 = blockIdx.y * 32, j0 = blockIdx.x * 32;

    for (int k = threadIdx.y; k < 32; k += 8)
        if (i0 + k < rows && j0 + threadIdx.x < cols)
            s[k][threadIdx.x] = x[(i0 + k) * cols + j0 + threadIdx.x];
    __syncthreads();
    for (int k = threadIdx.y; k < 32; k += 8)
        if (j0 + k < cols && i0 + threadIdx.x < rows)
            y[(j0 + k) * ldy + i0 + threadIdx.x] = s[threadIdx.x][k];
}

/* Block: 32 sums, of columns (DOWN) or of rows, 256 threads; one lane each adds 64 products
 * while all make the next. Rows and columns: multiples of 64. */
template <bool DOWN>
__global__ void dots(const float *a, const float *b, int64_t n, int64_t cols, double *sum)
{
    __shared__ double s[2][64][33];
    const int64_t first = blockIdx.x * 32;
    const int term = DOWN ? threadIdx.x / 32 : threadIdx.x % 64,
              who = DOWN ? threadIdx.x % 32 : threadIdx.x / 64;
    const int64_t at = DOWN ? term * cols + first + who : (first + who) * cols + term;
    double total = 0;

    for (int64_t t = 0; t < n; t += 64) {
        double(*const now)[33] = s[t / 64 & 1];

#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int64_t x = DOWN ? at + (t + 8 * i) * cols : at + t + 4 * i * cols;

            now[DOWN ? term + 8 * i : term][DOWN ? who : who + 4 * i] =
                (double)a[x] * (double)b[x];
        }
        __syncthreads();
        if (threadIdx.x < 32)
#pragma unroll 16
            for (int i = 0; i < 64; i++)
                total += now[i][threadIdx.x];
    }
    if (threadIdx.x < 32)
        sum[first + threadIdx.x] = total;
}

/* ---- rotation ------------------------------------------------------------------ */

/* Warp: a group of 128 values, four neighbours per lane. */
__global__ void rotate_groups(float *x, int64_t n_group)
{
    const int64_t g = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) >> 5;
    const int lane = threadIdx.x & 31;

    if (g >= n_group)
        return;
    float4 *at = (float4 *)(x + g * SPAN) + lane;
    const float4 in = *at;
    float v[4] = { in.x + in.y, in.x - in.y, in.z + in.w, in.z - in.w }, o[4];

    o[0] = v[0] + v[2];
    o[1] = v[1] + v[3];
    o[2] = v[0] - v[2];
    o[3] = v[1] - v[3];
    for (int w = 1; w < 32; w *= 2)
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_xor_sync(~0u, o[i], w);

            o[i] = (lane & w) == 0 ? o[i] + other : other - o[i];
        }
    *at = make_float4(o[0] * HX_CANON_ROOT, o[1] * HX_CANON_ROOT, o[2] * HX_CANON_ROOT,
                      o[3] * HX_CANON_ROOT);
}

/* Block: 128 rows of 32 columns, 256 threads. */
__global__ void rotate_columns(float *x, int64_t cols)
{
    __shared__ float s[SPAN][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float *at = x + blockIdx.y * (int64_t)SPAN * cols + blockIdx.x * 32 + lane;

    for (int i = warp; i < SPAN; i += 8)
        s[i][lane] = at[i * cols];
    for (int w = 1; w < SPAN; w *= 2) {
        __syncthreads();
        for (int k = warp; k < SPAN / 2; k += 8) {
            const int i = (k / w) * 2 * w + k % w;
            const float a = s[i][lane], b = s[i + w][lane];

            s[i][lane] = a + b;
            s[i + w][lane] = a - b;
        }
    }
    __syncthreads();
    for (int i = warp; i < SPAN; i += 8)
        at[i * cols] = s[i][lane] * HX_CANON_ROOT;
}

/* ---- products --------------------------------------------------------------------- */

/* Block: 128 x 128 of c, 256 threads with 8 x 8 each; 16 terms are in shared memory while
 * the next are on their way. BY_ROW: a's terms are neighbours, else its rows are. upper:
 * blocks below the diagonal have nothing to do. */
template <bool BY_ROW>
__global__ void __launch_bounds__(256) product(const hx_dense_args p, bool upper)
{
    __shared__ __align__(16) float as[2][SLAB][SIDE], bs[2][SLAB][SIDE];
    const int64_t i0 = blockIdx.y * (int64_t)SIDE, j0 = blockIdx.x * (int64_t)SIDE;
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int al = BY_ROW ? (threadIdx.x >> 7) * 8 : ty,
              ai = BY_ROW ? threadIdx.x & 127 : tx * 8;
    float acc[8][8] = {};
    float4 ra[2], rb[2];

    if (upper && j0 + SIDE <= i0)
        return;
    auto load = [&](int64_t l0) {
        const float4 zero = make_float4(0, 0, 0, 0);
        const bool a_in = i0 + ai < p.m && l0 + al < p.k,
                   b_in = j0 + tx * 8 < p.n && l0 + ty < p.k;

        for (int h = 0; h < 2; h++) {
            ra[h] = rb[h] = zero;
            if (a_in)
                ra[h] = *(const float4 *)(p.a + (i0 + ai) * p.ars + (l0 + al) * p.acs +
                                          4 * h);
            if (b_in)
                rb[h] = *(const float4 *)(p.b + (l0 + ty) * p.ldb + j0 + tx * 8 + 4 * h);
        }
    };
    auto store = [&](int to) {
        for (int h = 0; h < 2; h++) {
            if (BY_ROW) {
                as[to][al + 4 * h][ai] = ra[h].x;
                as[to][al + 4 * h + 1][ai] = ra[h].y;
                as[to][al + 4 * h + 2][ai] = ra[h].z;
                as[to][al + 4 * h + 3][ai] = ra[h].w;
            } else {
                *(float4 *)&as[to][al][ai + 4 * h] = ra[h];
            }
            *(float4 *)&bs[to][ty][tx * 8 + 4 * h] = rb[h];
        }
    };
    load(0);
    store(0);
    __syncthreads();
    for (int64_t l = 0; l < p.k; l += SLAB) {
        const int at = (int)(l / SLAB) & 1;
        const bool more = l + SLAB < p.k;

        if (more)
            load(l + SLAB);
#pragma unroll
        for (int s = 0; s < SLAB; s++) {
            const float4 a0 = *(float4 *)&as[at][s][ty * 4],
                         a1 = *(float4 *)&as[at][s][64 + ty * 4],
                         b0 = *(float4 *)&bs[at][s][tx * 4],
                         b1 = *(float4 *)&bs[at][s][64 + tx * 4];
            const float a[8] = { a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w },
                        b[8] = { b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w };

            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++)
                    acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
        if (more)
            store(at ^ 1);
        if (!more || (l + SLAB) % DEEP == 0)
            for (int i = 0; i < 8; i++)
                for (int h = 0; h < 2; h++) {
                    const int64_t r = i0 + (i & 4) * 16 + ty * 4 + (i & 3),
                                  c = j0 + 64 * h + tx * 4;

                    if (r >= p.m || c >= p.n)
                        continue;
                    float4 *to = (float4 *)(p.c + r * p.ldc + c), x = *to;

                    x.x = fmaf(acc[i][4 * h], p.sign, x.x);
                    x.y = fmaf(acc[i][4 * h + 1], p.sign, x.y);
                    x.z = fmaf(acc[i][4 * h + 2], p.sign, x.z);
                    x.w = fmaf(acc[i][4 * h + 3], p.sign, x.w);
                    *to = x;
                    for (int j = 0; j < 4; j++)
                        acc[i][4 * h + j] = 0;
                }
        __syncthreads();
    }
}

void multiply(gpu *g, const hx_dense_args *p, bool upper)
{
    const dim3 grid((unsigned)hx_ceil_div(p->n, SIDE), (unsigned)hx_ceil_div(p->m, SIDE));

    if (p->m <= 0 || p->n <= 0)
        return;
    if (p->acs == 1)
        RUN(g, product<true>, grid, 256, 0, *p, upper);
    else
        RUN(g, product<false>, grid, 256, 0, *p, upper);
}

/* ---- factor -------------------------------------------------------------------------- */

/* One block, 1,024 threads: the square at (at, at) becomes its factor. Within 16 rows a
 * row after the other, divided by its root wherever it is read; the rows below then take
 * in all 16, in the same order. */
__global__ void __launch_bounds__(1024)
    factor_square(float *a, int64_t n, int64_t at, int *bad)
{
    __shared__ float s[STEP][STEP + 1];
    float *square = a + at * n + at;
    const int c = threadIdx.x % STEP, r0 = threadIdx.x / STEP; /* r0 < 16 */

    for (int r = r0; r < STEP; r += TILE)
        s[r][c] = square[r * n + c];
    for (int b = 0; b < STEP; b += TILE) {
        const int r = b + r0;

        for (int i = b; i < b + TILE; i++) {
            __syncthreads();
            const float root = s[i][i], whole = sqrtf(root);

            if (!(root > 0) || root > 1e38f) {
                *bad = 1;
                return;
            }
            if (r > i && c >= r)
                s[r][c] -= s[i][r] / whole * (s[i][c] / whole);
        }
        __syncthreads();
        const float mine = c >= r ? s[r][c] / sqrtf(s[r][r]) : 0;

        __syncthreads();
        if (c >= r)
            s[r][c] = mine;
        __syncthreads();
        for (int later = r + TILE; later < STEP; later += TILE)
            for (int i = b; c >= later && i < b + TILE; i++)
                s[later][c] -= s[i][later] * s[i][c];
    }
    __syncthreads();
    for (int r = r0; r < STEP; r += TILE)
        square[r * n + c] = s[r][c];
}

/* Thread: a column right of that square, 64 rows, 16 at a time: all at once would be more
 * code than the instruction cache holds. */
__global__ void __launch_bounds__(128) factor_panel(float *a, int64_t n, int64_t at)
{
    __shared__ __align__(16) float s[STEP][STEP], x[STEP][128];
    const int64_t c = at + STEP + blockIdx.x * 128 + threadIdx.x;
    const int me = threadIdx.x;

    for (int i = me; i < STEP * STEP; i += 128)
        s[i / STEP][i % STEP] = a[(at + i / STEP) * n + at + i % STEP];
    __syncthreads();
    if (c >= n)
        return;
    for (int i = 0; i < STEP; i++)
        x[i][me] = a[(at + i) * n + c];
#pragma unroll 1
    for (int b = 0; b < STEP; b += TILE) {
        float v[TILE], y[TILE];

#pragma unroll
        for (int i = 0; i < TILE; i++)
            v[i] = x[b + i][me];
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            v[i] /= s[b + i][b + i];
#pragma unroll
            for (int r = i + 1; r < TILE; r++)
                v[r] -= s[b + i][b + r] * v[i];
            a[(at + b + i) * n + c] = v[i];
        }
#pragma unroll 1
        for (int later = b + TILE; later < STEP; later += TILE) {
#pragma unroll
            for (int r = 0; r < TILE; r++)
                y[r] = x[later + r][me];
#pragma unroll
            for (int i = 0; i < TILE; i++)
#pragma unroll
                for (int r = 0; r < TILE; r++)
                    y[r] -= s[b + i][later + r] * v[i];
#pragma unroll
            for (int r = 0; r < TILE; r++)
                x[later + r][me] = y[r];
        }
    }
}

/* Thread: 16 rows of a column, right of their diagonal block. */
__global__ void normalise_block(float *u, int64_t n)
{
    __shared__ float s[TILE][TILE];
    const int64_t b = blockIdx.y, c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    float *rows = u + b * TILE * n;
    float x[TILE];

    s[threadIdx.x / TILE][threadIdx.x % TILE] =
        rows[threadIdx.x / TILE * n + b * TILE + threadIdx.x % TILE];
    __syncthreads();
    if (c < (b + 1) * TILE || c >= n)
        return;
#pragma unroll
    for (int i = 0; i < TILE; i++)
        x[i] = rows[i * n + c];
#pragma unroll
    for (int i = TILE - 1; i >= 0; i--) {
#pragma unroll
        for (int r = i + 1; r < TILE; r++)
            x[i] -= s[i][r] * x[r];
        x[i] /= s[i][i];
        rows[i * n + c] = x[i];
    }
}

/* 64 entries of U^T y = x, by every block for itself; then what they take from the rest
 * of x, a thread per entry. */
__global__ void solve_down(const float *u, int64_t n, int64_t at, float *x, float *y)
{
    __shared__ float s[STEP][STEP + 1], v[STEP];
    const int64_t j = at + STEP + blockIdx.x * (int64_t)blockDim.x + threadIdx.x;

    for (int i = threadIdx.x; i < STEP * STEP; i += blockDim.x)
        s[i / STEP][i % STEP] = u[(at + i / STEP) * n + at + i % STEP];
    if (threadIdx.x < STEP)
        v[threadIdx.x] = x[at + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < STEP; i++) {
        if (threadIdx.x == i)
            v[i] /= s[i][i];
        __syncthreads();
        if (threadIdx.x > i && threadIdx.x < STEP)
            v[threadIdx.x] -= s[i][threadIdx.x] * v[i];
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x < STEP)
        y[at + threadIdx.x] = v[threadIdx.x];
    if (j >= n)
        return;
    float r = x[j];

#pragma unroll 16
    for (int i = 0; i < STEP; i++)
        r -= u[(at + i) * n + j] * v[i];
    x[j] = r;
}

__global__ void widen(const float *x, int64_t n, double *out)
{
    EACH(i, n)
    out[i] = (double)x[i];
}

/* The same for U x = rest, from the last entries to the first. */
__global__ void solve_up(const float *u, int64_t n, int64_t at, double *rest, float *x)
{
    __shared__ float s[STEP][STEP + 1];
    __shared__ double v[STEP];
    __shared__ float w[STEP];
    const int64_t i0 = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;

    for (int i = threadIdx.x; i < STEP * STEP; i += blockDim.x)
        s[i / STEP][i % STEP] = u[(at + i / STEP) * n + at + i % STEP];
    if (threadIdx.x < STEP)
        v[threadIdx.x] = rest[at + threadIdx.x];
    __syncthreads();
    for (int i = STEP - 1; i >= 0; i--) {
        if (threadIdx.x == i)
            w[i] = (float)(v[i] / (double)s[i][i]);
        __syncthreads();
        if (threadIdx.x < i)
            v[threadIdx.x] -= (double)s[threadIdx.x][i] * (double)w[i];
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x < STEP)
        x[at + threadIdx.x] = w[threadIdx.x];
    if (i0 >= at)
        return;
    double r = rest[i0];

#pragma unroll 16
    for (int j = STEP - 1; j >= 0; j--)
        r -= (double)u[i0 * n + at + j] * (double)w[j];
    rest[i0] = r;
}

/* ---- the search ------------------------------------------------------------------------ */

/* A codebook without branches: x = state mul + add; y = x & keep ^ flip; the value is the
 * sum of y's halves, the lower increased by sum times each byte of x, and multiplied by
 * factor. */
struct book {
    uint32_t mul, add, keep, flip, sum;
    unsigned short factor;
};

book book_of(hx_codebook codebook)
{
    const uint32_t keep = 0x8FFF8FFFu, flip = 0x3B603B60u;
    const unsigned short one = 0x3C00;

    if (codebook == HX_CB_MUL1)
        return book { HX_EXL3_MUL1, 0, 0, 0xC9316400u, 0x01010101u, 0x1EEE };
    if (codebook == HX_CB_MCG)
        return book { HX_EXL3_MCG, 0, keep, flip, 0, one };
    return book { HX_EXL3_3INST, HX_EXL3_3INST_ADD, keep, flip, 0, one };
}

/* hx_exl3_value as the format has it: one fp16 operation. */
HX_DEVICE __half value_of(uint32_t s, const book &k)
{
    const uint32_t x = s * k.mul + k.add, y = x & k.keep ^ k.flip,
                   low = __dp4a(x, k.sum, y);

    return __hfma(__ushort_as_half((unsigned short)low), __ushort_as_half(k.factor),
                  __ushort_as_half((unsigned short)(y >> 16)));
}

/* Positions between two sets of costs that are kept: more take less memory, and more
 * candidates on the way back. Even where positions of two lengths take turns. */
__host__ __device__ constexpr int stride_of(int k2)
{
    constexpr int by_rate[17] = { 0, 0, 8, 6, 4, 4, 3, 2, 2, 0, 2, 0, 1, 0, 1, 0, 1 };

    return by_rate[k2];
}

__host__ __device__ constexpr int overlaps_of(int k2)
{
    return 65536 >> (k2 / 2);
}

/* The kernels: rate, and whether shared memory has room for 80 KiB of values. Two sets of
 * costs are there too (256 KiB at 1 bit, 128 at 2, 64 at 3, …), below 3 bits only then. */
/* clang-format off */
#define RATES(X)                                                                         \
    X(2, 0) X(3, 0) X(4, 0) X(4, 1) X(5, 0) X(5, 1) X(6, 0) X(6, 1) X(7, 0) X(7, 1)      \
    X(8, 0) X(8, 1) X(10, 0) X(10, 1) X(12, 1) X(14, 1) X(16, 1)
/* clang-format on */

__host__ __device__ constexpr bool costs_shared(int k2, bool room)
{
    return room || k2 > 5;
}

__host__ __device__ constexpr int shared_of(int k2, bool room)
{
    return (costs_shared(k2, room) ? 8 * overlaps_of(k2) : 0) +
           (room ? 10 * THREADS * (int)sizeof(float4) : 0);
}

__host__ __device__ constexpr int marks_of(int k2)
{
    return 256 / stride_of(k2) + 1;
}

/* A thread's states: s = u << (16 - UPPER) | j << LOWER | i, with all u and i, and j its
 * own. Most candidates for an overlap differ in u, so a thread has them together; those
 * with the same i >> bits follow the same overlap, so they share a read. */
template <int K2> struct split {
    enum {
        UPPER = K2 <= 6   ? 3
                : K2 <= 8 ? 4
                          : 5,
        LOWER = 16 - LOG_THREADS - UPPER,
        /* of an overlap's bits, those that choose 16 bytes of the 128 that all banks give */
        TURN = (1 << (LOWER - 2)) - 1
    };
};

/* Where the cost of overlap o is kept: next to those of other j. */
template <int K2> HX_DEVICE int kept_at(int o)
{
    constexpr int I = split<K2>::LOWER;

    return (o & ((1 << I) - 1)) << (16 - K2 / 2 - I) | o >> I;
}

/* Where it is in shared memory: threads that are neighbours write to, and read from,
 * different banks. */
template <int K2> HX_DEVICE int placed(int o)
{
    return o ^ (o >> 5 & split<K2>::TURN) << 2;
}

/* j of thread tid. Threads that have candidates for the same overlaps are neighbours. */
template <int K2> HX_DEVICE int group_of(int tid)
{
    constexpr int twice = HX_MAX(K2 / 2 - split<K2>::UPPER, 0);

    return (tid & ((1 << twice) - 1)) << (LOG_THREADS - twice) | tid >> twice;
}

/* Values of a thread's states, four neighbours together, group u << (LOWER - 2) | i >> 2:
 * some in shared memory (where there is room), some as floats, the rest two to a register,
 * mixed so that the first are read and the last converted all the time. */
template <bool ROOM> struct values {
    enum { FAR = ROOM ? 10 : 0, WHOLE = ROOM ? 18 : 10, PAIRS = OWN / 4 - FAR - WHOLE };
    float4 *far; /* of this thread; THREADS apart */
    float whole[4 * WHOLE];
    uint32_t pair[2 * PAIRS];
};

__host__ __device__ constexpr int order_of(int group)
{
    return group * 11 % (OWN / 4);
}

template <bool ROOM>
HX_DEVICE void values_at(const values<ROOM> &v, int group, float *out)
{
    const int h = order_of(group), w = h - v.FAR, p = w - v.WHOLE;

    if (w < 0)
        *(float4 *)out = v.far[h * THREADS];
    else
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = p < 0 ? v.whole[4 * w + i]
                           : __half2float(__ushort_as_half(
                                 (unsigned short)(v.pair[2 * p + i / 2] >> i % 2 * 16)));
}

template <int K2, bool ROOM>
HX_DEVICE void fill(values<ROOM> &v, int j, const book &codebook)
{
    constexpr int U = split<K2>::UPPER, I = split<K2>::LOWER;

#pragma unroll
    for (int g = 0; g < OWN / 4; g++) {
        const int h = order_of(g), w = h - v.FAR, p = w - v.WHOLE;
        const int st =
            (g >> (I - 2)) << (16 - U) | j << I | (g & ((1 << (I - 2)) - 1)) << 2;
        __half2 x[2];
        float4 f;

#pragma unroll
        for (int i = 0; i < 2; i++)
            x[i] = __halves2half2(value_of(st + 2 * i, codebook),
                                  value_of(st + 2 * i + 1, codebook));
        f = make_float4(__low2float(x[0]), __high2float(x[0]), __low2float(x[1]),
                        __high2float(x[1]));
        if (w < 0) {
            v.far[h * THREADS] = f;
        } else if (p < 0) {
            v.whole[4 * w] = f.x;
            v.whole[4 * w + 1] = f.y;
            v.whole[4 * w + 2] = f.z;
            v.whole[4 * w + 3] = f.w;
        } else {
            v.pair[2 * p] = *(uint32_t *)&x[0];
            v.pair[2 * p + 1] = *(uint32_t *)&x[1];
        }
    }
}

/* Costs of N overlaps, aligned to as many. */
template <int N> HX_DEVICE void read(float *to, const float *from)
{
    if (N == 1)
        to[0] = *from;
    else if (N == 2)
        *(float2 *)to = *(const float2 *)from;
    else
        *(float4 *)to = *(const float4 *)from;
}

/* One position: next[o] = min over t of prev[state >> IN] + (value - target)^2. Costs are
 * not negative, so they compare as integers. mark: also there, or NULL. */
template <int IN, int OUT, int K2, bool ROOM>
HX_DEVICE void step(const values<ROOM> &v, const float *prev, float *next, float *mark,
                    float target, int j)
{
    constexpr int U = split<K2>::UPPER, I = split<K2>::LOWER, T = 1 << HX_MIN(OUT, U),
                  N = (1 << U) / T, TWICE = HX_MAX(OUT - U, 0);
    constexpr int NEAR = I > IN ? 1 << (I - IN) : 1, AT_ONCE = HX_MIN(NEAR, 4);
    const int base = I > IN ? j << (I > IN ? I - IN : 0) : j >> (I > IN ? 0 : IN - I);
    const int o = j << I & (overlaps_of(2 * OUT) - 1);

#pragma unroll
    for (int c = 0; c < N; c++) {
        float before[T][NEAR];

#pragma unroll
        for (int q = 0; q < 1 << I; q += 4) {
            uint32_t best[4], cost[2][4];

#pragma unroll
            for (int t = 0; t < T; t++) {
                const int u = t * N + c;

                if (q == 0)
#pragma unroll
                    for (int k = 0; k < NEAR; k += AT_ONCE)
                        read<AT_ONCE>(before[t] + k,
                                      prev + placed<K2>(base + k) + (u << (16 - U - IN)));
                float value[4];

                values_at(v, (u << I | q) >> 2, value);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float a = value[i] - target;

                    cost[t & 1][i] =
                        __float_as_uint(fmaf(a, a, before[t][(q | i) >> IN]));
                }
                if (t & 1)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        best[i] = t == 1 ? min(cost[0][i], cost[1][i])
                                         : __vimin3_u32(best[i], cost[0][i], cost[1][i]);
            }
#pragma unroll
            for (int w = 1; w < 1 << TWICE; w *= 2)
                for (int i = 0; i < 4; i++)
                    best[i] = min(best[i], __shfl_xor_sync(~0u, best[i], w));
            if ((threadIdx.x & ((1 << TWICE) - 1)) != 0)
                continue;
            *(uint4 *)(next + placed<K2>(o + q) + (c << (16 - U))) =
                make_uint4(best[0], best[1], best[2], best[3]);
            if (mark != NULL)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    mark[(o >> I) + kept_at<K2>(c << (16 - U) | q | i)] =
                        __uint_as_float(best[i]);
        }
    }
}

/* What a block has of its tile. */
struct bench {
    float target[256], err[TILE][TILE];
    uint16_t state[256];
    uint32_t overlap;
    unsigned long long best;
};

/* Positions first .. first + 255 round the ring. The costs before every stride that begins
 * at 0 or later and within the walk are kept in marks, one set after the other. */
template <int K2, bool ROOM>
HX_DEVICE void walk(const bench &s, float4 *far, float *cost, float *marks, int first,
                    int j, const book &codebook)
{
    constexpr int N = overlaps_of(K2), L = K2 / 2, H = (K2 + 1) / 2;
    float target = s.target[first];
    int p = first, turn = 0, due = first != 0 ? 256 - first : stride_of(K2);
    values<ROOM> v;

    asm volatile("" : "+r"(j)); /* values are made here, not kept during the way back */
    v.far = far + threadIdx.x;
    fill<K2, ROOM>(v, j, codebook);
#pragma unroll 1
    do {
        const int to = p + 1 & 255;
        const float now = target;
        float *mark = NULL;

        if (--due == 0) {
            mark = marks;
            marks += N;
            due = stride_of(K2);
        }
        target = s.target[to];
        /* Else the compiler makes floats of them once, more than there are registers. */
#pragma unroll
        for (int k = 0; k < 2 * v.PAIRS; k++)
            asm volatile("" : "+r"(v.pair[k]));
        if (L == H || (p & 1) == 0)
            step<L, H, K2, ROOM>(v, cost + turn, cost + (turn ^ N), mark, now, j);
        else
            step<H, L, K2, ROOM>(v, cost + turn, cost + (turn ^ N), mark, now, j);
        __syncthreads();
        p = to;
        turn ^= N;
    } while (p != first);
}

/* Bits that positions from .. to - 1 own, counted from an even one. */
template <int K2> __host__ __device__ constexpr int bits_of(int from, int to)
{
    return (to * K2 >> 1) - (from * K2 >> 1);
}

/* A way back from overlap o over positions start .. start + TOP: lanes of a warp have the
 * paths f << LANES | lane of that many choices, the latest in the low bits. */
template <int K2, int TOP> struct paths {
    enum {
        ALL = bits_of<K2>(1, TOP + 2),
        LANES = HX_MIN(ALL, 5),
        N = 1 << (ALL - LANES),
        LAST = 16 - bits_of<K2>(TOP + 1, TOP + 2), /* bits of o */
        TO = bits_of<K2>(0, TOP + 1)               /* from there to the overlap before */
    };
    float cost[N];
    uint32_t path[N];
    uint32_t lane, mine; /* mine: the lane's path and o, f's bits left out */
};

/* Position start + D: the smallest cost, of equal ones the smallest choice, of every path
 * of later choices. */
template <int K2, int TOP, int D>
HX_DEVICE void choose(paths<K2, TOP> &w, const float *target, const book &codebook)
{
    typedef paths<K2, TOP> W;
    constexpr int AT = bits_of<K2>(D + 2, TOP + 2), END = bits_of<K2>(D + 1, TOP + 2),
                  TO = bits_of<K2>(D + 1, TOP + 1), N = 1 << HX_MAX(END - 5, 0),
                  LEFT = 1 << HX_MAX(AT - 5, 0);

#pragma unroll
    for (int f = 0; f < N; f++) {
        const uint32_t st =
            (w.mine >> TO & 0xFFFF) + ((uint32_t)f << (W::LANES + W::LAST) >> TO);
        const float a = __half2float(value_of(st, codebook)) - target[D];

        w.cost[f] = fmaf(a, a, w.cost[f]);
    }
#pragma unroll
    for (int f = LEFT; f < N; f++) {
        const bool less = w.cost[f] < w.cost[f % LEFT];

        w.cost[f % LEFT] = less ? w.cost[f] : w.cost[f % LEFT];
        w.path[f % LEFT] = less ? w.path[f] : w.path[f % LEFT];
    }
#pragma unroll
    for (int b = AT; b < HX_MIN(END, (int)W::LANES); b++) {
        const float c = __shfl_xor_sync(~0u, w.cost[0], 1 << b);
        const uint32_t x = __shfl_xor_sync(~0u, w.path[0], 1 << b);
        const uint32_t mask = (1u << END) - (1u << AT);
        const bool less =
            c < w.cost[0] | (c == w.cost[0] & (x & mask) < (w.path[0] & mask));

        w.cost[0] = less ? c : w.cost[0];
        w.path[0] = less ? x : w.path[0];
    }
    if constexpr (D < TOP)
        choose<K2, TOP, D + 1>(w, target, codebook);
}

/* The states of those positions from the costs kept before them, earlier choices first as
 * the walk made them; returns the overlap before. */
template <int K2, int TOP>
HX_DEVICE uint32_t back(bench &s, const float *mark, const book &codebook, int start,
                        uint32_t o)
{
    typedef paths<K2, TOP> W;
    W w;

    w.lane = threadIdx.x & ((1 << W::LANES) - 1);
    w.mine = w.lane << W::LAST | o;
    mark += kept_at<K2>(w.mine >> W::TO);
    asm volatile("" : "+l"(mark)); /* one address, and distances known in advance */
#pragma unroll
    for (int f = 0; f < W::N; f++) {
        w.path[f] = f << W::LANES | w.lane;
        w.cost[f] =
            __ldcg(&mark[kept_at<K2>((uint32_t)f << (W::LANES + W::LAST) >> W::TO)]);
    }
    choose<K2, TOP, 0>(w, s.target + start, codebook);

    const uint32_t all = w.path[0] << W::LAST | o;

    if (threadIdx.x <= TOP)
        s.state[start + threadIdx.x] =
            (uint16_t)(all >> bits_of<K2>(threadIdx.x + 1, TOP + 1));
    return all >> W::TO;
}

/* The states from position LAST back to 0 of the walk that ends in s.overlap, which
 * becomes the overlap before position 0. One warp, a stride at a time. */
template <int K2, int LAST>
HX_DEVICE void trace(bench &s, const float *marks, const book &codebook)
{
    constexpr int S = stride_of(K2), N = overlaps_of(K2);
    int at = LAST / S;
    uint32_t o =
        back<K2, LAST % S>(s, marks + at * (int64_t)N, codebook, at * S, s.overlap);

#pragma unroll 1
    while (--at >= 0)
        o = back<K2, S - 1>(s, marks + at * (int64_t)N, codebook, at * S, o);
    if (threadIdx.x == 0)
        s.overlap = o;
}

/* Both passes of exl3_trellis.c over s.target; s.state. */
template <int K2, bool ROOM>
HX_DEVICE void search_tile(bench &s, float4 *far, float *cost, float *marks,
                           const book &codebook, int j)
{
    constexpr int N = overlaps_of(K2), HALF = 128; /* 0, 128 and 256 are even */

#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        const uint32_t seam = s.overlap;

        for (int o = threadIdx.x; o < N; o += THREADS)
            cost[placed<K2>(o)] = marks[kept_at<K2>(o)] =
                pass == 0 || o == seam ? 0 : HX_ENC_FAR;
        if (threadIdx.x == 0)
            s.best = ~0ull;
        __syncthreads();
        walk<K2, ROOM>(s, far, cost, marks + pass * N, pass == 0 ? HALF : 0, j, codebook);
        if (pass == 0) {
            unsigned long long best = ~0ull;

            for (int o = threadIdx.x; o < N; o += THREADS)
                best = min(best, (unsigned long long)__float_as_uint(cost[placed<K2>(o)])
                                         << 32 |
                                     o);
            atomicMin(&s.best, best);
            __syncthreads();
            if (threadIdx.x == 0)
                s.overlap = (uint32_t)s.best;
            __syncthreads();
        }
        /* The second ends where it began. */
        if (threadIdx.x < 32 && pass == 0)
            trace<K2, HALF - 1>(s, marks, codebook);
        else if (threadIdx.x < 32)
            trace<K2, 255>(s, marks, codebook);
        __syncthreads();
    }
}

/* Byte q of a packed tile, by stream order. */
HX_DEVICE uint8_t packed_byte(int k2, const uint16_t *state, int q)
{
    uint32_t byte = 0;

    for (int b = 8 * q; b < 8 * q + 8; b++) {
        const int half = k2 / 2, off = b % k2, odd = off >= half;
        const int last = odd ? k2 - 1 - off : half - 1 - off;

        byte = byte << 1 | (state[b / k2 * 2 + odd] >> last & 1);
    }
    return (uint8_t)byte;
}

/* A launch: n_tile tiles of their own (target), or all column tiles of the 128 rows that
 * begin at row. */
struct search_args {
    const float *target;
    uint16_t *state;
    float *value;
    int64_t n_tile;
    const float *rot, *u;
    float *work, *q; /* work: targets, which become errors */
    uint8_t *trellis;
    int64_t n, k, row;
    float *marks, *cost; /* per block */
    book codebook;
};

/* Block: a tile after the other. Memory traffic: the kept costs, overlaps x 4 bytes every
 * few positions, written once and read in part. */
template <int K2, bool ROOM>
__global__ void __launch_bounds__(THREADS, 1) search_tiles(const search_args a)
{
    extern __shared__ __align__(16) float dynamic[];
    __shared__ bench s;
    constexpr int N = overlaps_of(K2), BYTES = 16 * K2;
    float *cost =
        costs_shared(K2, ROOM) ? dynamic : a.cost + blockIdx.x * (int64_t)(2 * N);
    float4 *far = (float4 *)(dynamic + 2 * N);
    float *marks = a.marks + blockIdx.x * (int64_t)(marks_of(K2) * N);
    const int j = group_of<K2>(threadIdx.x);

    const int p = threadIdx.x & 255, r = hx_exl3_row(p), c = hx_exl3_col(p);

    for (int64_t tile = blockIdx.x; tile < a.n_tile; tile += gridDim.x) {
        for (int64_t row = a.row + (a.target == NULL ? SPAN - TILE : 0); row >= a.row;
             row -= TILE) {
            const int64_t at = (row + r) * a.n + tile * TILE + c;

            if (threadIdx.x < 256)
                s.target[p] = a.target != NULL ? a.target[tile * 256 + p] : a.work[at];
            __syncthreads();
            search_tile<K2, ROOM>(s, far, cost, marks, a.codebook, j);
            if (threadIdx.x < 256) {
                const float v = __half2float(value_of(s.state[p], a.codebook));

                if (a.target != NULL) {
                    a.state[tile * 256 + p] = s.state[p];
                    a.value[tile * 256 + p] = v;
                } else {
                    a.q[at] = v;
                    a.work[at] = s.err[r][c] = a.rot[at] - v;
                }
            }
            __syncthreads();
            if (a.target != NULL)
                continue;
            if (threadIdx.x < BYTES)
                a.trellis[(row / TILE * (a.n / TILE) + tile) * BYTES +
                          (threadIdx.x ^ 3)] = packed_byte(K2, s.state, threadIdx.x);
            for (int m = threadIdx.x; m < (row - a.row) * TILE; m += THREADS) {
                const float *u = a.u + (a.row + m / TILE) * a.k + row;
                float *to = a.work + (a.row + m / TILE) * a.n + tile * TILE + m % TILE;
                float sum = 0;

#pragma unroll
                for (int l = 0; l < TILE; l++)
                    sum = fmaf(u[l], s.err[l][m % TILE], sum);
                *to += sum;
            }
            __syncthreads();
        }
    }
}

static_assert(shared_of(12, true) + sizeof(bench) <= HX_CUDA_LEAST_SHARED,
              "any GPU takes it");

template <int K2, bool ROOM> void launch_search(gpu *g, const search_args &a)
{
    const int bytes = shared_of(K2, ROOM), n = (int)HX_MIN(a.n_tile, g->n_block);

    note(g, cudaFuncSetAttribute(search_tiles<K2, ROOM>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    RUN(g, (search_tiles<K2, ROOM>), n, THREADS, bytes, a);
}

void search_all(gpu *g, int k2, search_args a)
{
    a.marks = g->marks;
    a.cost = g->cost;
    switch (k2 << 1 | g->room) {
#define X(rate, room)                                                                    \
    case rate << 1 | room:                                                               \
        launch_search<rate, room>(g, a);                                                 \
        return;
        RATES(X)
#undef X
    }
}

/* ---- operations ------------------------------------------------------------------------- */

void enc_close(hx_enc *e)
{
    gpu *g = own(e);

    if (g == NULL)
        return;
    void *const list[] = { g->r, g->v, g->marks, g->cost, g->sum, g->bad, g->tiles };

    cudaStreamSynchronize(g->c->stream);
    for (void *p : list)
        cudaFree(p);
    hx_free(g);
    e->own = NULL;
}

int enc_open(hx_enc *e, hx_err *err)
{
    const size_t side = (size_t)HX_MAX(e->n, e->k), one = sizeof(float);
    const size_t overlaps = 65536u >> (e->k2 / 2);
    gpu *g = hx_new(gpu, 1);

    if (!hx_trellis_takes(e->codebook, e->k2)) {
        hx_free(g);
        return hx_trellis_open((hx_trellis **)&e->own, e->codebook, e->k2, 1, err);
    }
    if (g == NULL)
        return hx_fail(err, HX_ENOMEM, "EXL3: no memory for an encoder");
    e->own = g;
    g->c = hx_cuda_of(e->dev);
    cudaSetDevice(g->c->device);
    g->n_block =
        (int)HX_MAX(HX_MIN(e->n / TILE, g->c->gpu.n_sm), HX_MIN(64, g->c->gpu.n_sm));
    g->room = e->k2 > 11 || (e->k2 > 3 && shared_of(e->k2, true) + sizeof(bench) <=
                                              g->c->gpu.block_bytes);
    const struct {
        void **to;
        size_t bytes;
    } need[] = { { (void **)&g->r, side * one },
                 { (void **)&g->v, side * one },
                 { (void **)&g->sum, side * sizeof(double) },
                 { (void **)&g->bad, sizeof(int) },
                 { (void **)&g->marks,
                   (size_t)g->n_block * overlaps * one * (size_t)marks_of(e->k2) },
                 { (void **)&g->cost, costs_shared(e->k2, g->room)
                                          ? 0
                                          : (size_t)g->n_block * 2 * overlaps * one } };

    for (size_t i = 0; i < HX_LEN(need); i++)
        if (hx_cuda_alloc_for(need[i].to, need[i].bytes, "the EXL3 encoder", err) != 0)
            return HX_ENOMEM;
    return 0;
}

int enc_alloc(hx_enc *e, float **out, int64_t n, hx_err *err)
{
    void *p;

    if (hx_cuda_alloc_for(&p, (size_t)n * sizeof(float), "the EXL3 encoder", err) != 0)
        return HX_ENOMEM;
    *out = (float *)p;
    note(own(e), cudaMemsetAsync(p, 0, (size_t)n * sizeof(float), own(e)->c->stream));
    return 0;
}

void enc_free(hx_enc *e, float *p)
{
    (void)e;
    cudaFree(p);
}

struct copying {
    char *to;
    const char *from;
    size_t n;
};

enum { PART = 1 << 16 };

void copy_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const copying *c = (const copying *)ud;
    const size_t at = (size_t)begin * PART;

    (void)worker;
    memcpy(c->to + at, c->from + at, HX_MIN((size_t)end * PART, c->n) - at);
}

/* Through pinned memory that all threads fill: three times as fast as one thread does it
 * (H200, 16 CPUs: 5.3 GB/s). */
void enc_put(hx_enc *e, float *to, const float *from, int64_t n)
{
    gpu *g = own(e);
    const size_t bytes = (size_t)n * sizeof(float);

    for (size_t at = 0; at < bytes; at += g->c->stage_bytes) {
        hx_cuda_stage *s = hx_cuda_stage_take(g->c);
        copying c = { s->host, (const char *)from + at,
                      HX_MIN(g->c->stage_bytes, bytes - at) };

        hx_pool_run(e->pool, (int64_t)((c.n + PART - 1) / PART), 1, copy_part, &c);
        note(g, cudaMemcpyAsync((char *)to + at, s->host, c.n, cudaMemcpyHostToDevice,
                                g->c->stream));
        note(g, hx_cuda_stage_done(g->c, s));
    }
}

int enc_get(hx_enc *e, float *to, const float *from, int64_t n, hx_err *err)
{
    return fetch(own(e), to, from, (size_t)n * sizeof(float), err);
}

void enc_copy(hx_enc *e, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
              int64_t cols)
{
    const size_t one = sizeof(float);

    note(own(e),
         cudaMemcpy2DAsync(y, (size_t)ldy * one, x, (size_t)ldx * one, (size_t)cols * one,
                           (size_t)rows, cudaMemcpyDeviceToDevice, own(e)->c->stream));
}

void enc_zero(hx_enc *e, float *x, int64_t n)
{
    note(own(e), cudaMemsetAsync(x, 0, (size_t)n * sizeof(float), own(e)->c->stream));
}

void enc_transpose(hx_enc *e, float *y, int64_t ldy, const float *x, int64_t rows,
                   int64_t cols)
{
    const dim3 grid((unsigned)hx_ceil_div(cols, 32), (unsigned)hx_ceil_div(rows, 32));

    RUN(own(e), transpose_tile, grid, dim3(32, 8), 0, y, ldy, x, rows, cols);
}

void enc_scale(hx_enc *e, float *y, const float *x, const float *r, const float *c,
               int64_t rows, int64_t cols)
{
    gpu *g = own(e);

    upload(g, g->r, r, (size_t)rows * sizeof(float));
    upload(g, g->v, c, (size_t)cols * sizeof(float));
    RUN(g, scale_all, blocks_for(rows * cols, 1024), 256, 0, y, x, g->r, g->v, rows,
        cols);
}

void enc_subtract(hx_enc *e, float *y, const float *x, int64_t n)
{
    RUN(own(e), subtract_all, blocks_for(n, 1024), 256, 0, y, x, n);
}

void enc_times(hx_enc *e, float *y, const float *x, int64_t n)
{
    RUN(own(e), times_all, blocks_for(n, 1024), 256, 0, y, x, n);
}

int enc_get_diag(hx_enc *e, const float *x, int64_t n, float *out, hx_err *err)
{
    gpu *g = own(e);

    RUN(g, diag_out, blocks_for(n, 256), 256, 0, x, n, g->r);
    return fetch(g, out, g->r, (size_t)n * sizeof(float), err);
}

void enc_put_diag(hx_enc *e, float *x, int64_t n, const float *in)
{
    gpu *g = own(e);

    upload(g, g->r, in, (size_t)n * sizeof(float));
    RUN(g, diag_in, blocks_for(n, 256), 256, 0, x, n, g->r);
}

int enc_dot_rows(hx_enc *e, const float *a, const float *b, int64_t rows, int64_t cols,
                 double *sum, hx_err *err)
{
    gpu *g = own(e);

    RUN(g, dots<false>, (unsigned)(rows / 32), 256, 0, a, b, cols, cols, g->sum);
    return fetch(g, sum, g->sum, (size_t)rows * sizeof(double), err);
}

int enc_dot_columns(hx_enc *e, const float *a, const float *b, int64_t rows, int64_t cols,
                    double *sum, hx_err *err)
{
    gpu *g = own(e);

    RUN(g, dots<true>, (unsigned)(cols / 32), 256, 0, a, b, rows, cols, g->sum);
    return fetch(g, sum, g->sum, (size_t)cols * sizeof(double), err);
}

void enc_rotate_right(hx_enc *e, float *x, int64_t rows, int64_t cols)
{
    const int64_t n = rows * cols / SPAN;

    RUN(own(e), rotate_groups, (unsigned)hx_ceil_div(n, 8), 256, 0, x, n);
}

void enc_rotate_left(hx_enc *e, float *x, int64_t rows, int64_t cols)
{
    const dim3 grid((unsigned)(cols / 32), (unsigned)(rows / SPAN));

    RUN(own(e), rotate_columns, grid, 256, 0, x, cols);
}

void enc_mul(hx_enc *e, const hx_dense_args *p)
{
    multiply(own(e), p, false);
}

/* The upper triangle of c += sign x^T x, x [rows, n]. */
void gram_of(gpu *g, float *c, int64_t ldc, const float *x, int64_t ldx, int64_t rows,
             int64_t n, float sign)
{
    hx_dense_args p = {};

    p.c = c;
    p.a = p.b = x;
    p.ldc = ldc;
    p.ars = 1;
    p.acs = p.ldb = ldx;
    p.m = p.n = n;
    p.k = rows;
    p.sign = sign;
    multiply(g, &p, true);
}

void enc_gram(hx_enc *e, float *c, const float *x, int64_t rows, int64_t n)
{
    gram_of(own(e), c, n, x, n, rows, n, 1);
}

int enc_factor(hx_enc *e, float *a, int64_t n, bool *done, hx_err *err)
{
    gpu *g = own(e);
    int bad = 0;

    note(g, cudaMemsetAsync(g->bad, 0, sizeof(int), g->c->stream));
    for (int64_t at = 0; at < n; at += STEP) {
        const int64_t next = at + STEP, rest = n - next;

        RUN(g, factor_square, 1, 1024, 0, a, n, at, g->bad);
        if (rest == 0)
            break;
        RUN(g, factor_panel, blocks_for(rest, 128), 128, 0, a, n, at);
        gram_of(g, a + next * n + next, n, a + at * n + next, n, STEP, rest, -1);
    }
    const int rc = fetch(g, &bad, g->bad, sizeof bad, err);

    *done = bad == 0;
    return rc;
}

int enc_solve(hx_enc *e, const float *u, int64_t n, float *x, hx_err *err)
{
    gpu *g = own(e);

    upload(g, g->r, x, (size_t)n * sizeof(float));
    for (int64_t at = 0; at < n; at += STEP)
        RUN(g, solve_down, (unsigned)HX_MAX(hx_ceil_div(n - at - STEP, 256), 1), 256, 0,
            u, n, at, g->r, g->v);
    RUN(g, widen, blocks_for(n, 256), 256, 0, g->v, n, g->sum);
    for (int64_t at = n - STEP; at >= 0; at -= STEP)
        RUN(g, solve_up, (unsigned)HX_MAX(hx_ceil_div(at, 256), 1), 256, 0, u, n, at,
            g->sum, g->r);
    return fetch(g, x, g->r, (size_t)n * sizeof(float), err);
}

void enc_normalise(hx_enc *e, float *u, int64_t n)
{
    const dim3 grid((unsigned)hx_ceil_div(n, 256), (unsigned)(n / TILE));

    RUN(own(e), normalise_block, grid, 256, 0, u, n);
}

/* Room for n_tile tiles: targets, values, states, places. */
int take_tiles(gpu *g, int64_t n_tile, hx_err *err)
{
    const size_t want = (size_t)n_tile * (256 * 10 + 8);
    void *p;

    if (want <= g->tiles_bytes)
        return 0;
    cudaFree(g->tiles);
    g->tiles = NULL;
    g->tiles_bytes = 0;
    if (hx_cuda_alloc_for(&p, want, "tiles", err) != 0)
        return HX_ENOMEM;
    g->tiles = (char *)p;
    g->tiles_bytes = want;
    return 0;
}

__global__ void gather_tiles(const float *x, int64_t n, const int64_t *at, float *out)
{
    const int64_t tile = at[blockIdx.x], wide = n / TILE;
    const int p = threadIdx.x;

    out[blockIdx.x * 256 + p] = x[(tile / wide * TILE + hx_exl3_row(p)) * n +
                                  tile % wide * TILE + hx_exl3_col(p)];
}

int enc_tiles(hx_enc *e, const float *x, int64_t n, const int64_t *at, int64_t n_tile,
              float (*out)[256], hx_err *err)
{
    gpu *g = own(e);
    const int rc = take_tiles(g, n_tile, err);

    if (rc != 0)
        return rc;
    int64_t *places = (int64_t *)g->tiles;
    float *values = (float *)(places + n_tile);

    upload(g, places, at, (size_t)n_tile * sizeof *at);
    RUN(g, gather_tiles, (unsigned)n_tile, 256, 0, x, n, places, values);
    return fetch(g, out, values, (size_t)n_tile * sizeof *out, err);
}

int enc_search(hx_enc *e, const float (*target)[256], int64_t n_tile,
               uint16_t (*state)[256], float (*value)[256], hx_err *err)
{
    gpu *g = own(e);
    const size_t n = (size_t)n_tile * 256;
    search_args a = {};
    int rc = take_tiles(g, n_tile, err);

    if (rc != 0)
        return rc;
    a.target = (float *)g->tiles;
    a.value = (float *)g->tiles + n;
    a.state = (uint16_t *)(a.value + n);
    a.n_tile = n_tile;
    a.codebook = book_of(e->codebook);
    upload(g, g->tiles, target, n * sizeof(float));
    search_all(g, e->k2, a);
    rc = fetch(g, state, a.state, n * sizeof(uint16_t), err);
    return rc != 0 ? rc : fetch(g, value, a.value, n * sizeof(float), err);
}

int enc_feed(hx_enc *e, const hx_enc_feed *f, hx_err *err)
{
    gpu *g = own(e);
    const int64_t n = e->n, k = e->k;
    const size_t bytes = (size_t)(k / TILE * (n / TILE)) * 16 * (size_t)e->k2;
    search_args a = {};
    void *trellis;
    int rc;

    if (hx_cuda_alloc_for(&trellis, bytes, "tiles", err) != 0)
        return HX_ENOMEM;
    note(g, cudaMemcpyAsync(f->work, f->rot, (size_t)(k * n) * sizeof(float),
                            cudaMemcpyDeviceToDevice, g->c->stream));
    a.n_tile = n / TILE;
    a.rot = f->rot;
    a.u = f->u;
    a.work = f->work;
    a.q = f->q;
    a.trellis = (uint8_t *)trellis;
    a.n = n;
    a.k = k;
    a.codebook = book_of(e->codebook);
    for (a.row = k - SPAN; a.row >= 0; a.row -= SPAN) {
        hx_dense_args far = {};

        search_all(g, e->k2, a);
        far.c = f->work;
        far.a = f->u + a.row;
        far.b = f->work + a.row * n;
        far.ldc = far.ldb = n;
        far.ars = k;
        far.acs = 1;
        far.m = a.row;
        far.n = n;
        far.k = SPAN;
        far.sign = 1;
        multiply(g, &far, false);
    }
    rc = fetch(g, f->trellis, trellis, bytes, err);
    cudaFree(trellis);
    return rc;
}

} // namespace

extern "C" const hx_enc_ops hx_cuda_encode = {
    enc_open,        enc_close,        enc_alloc,       enc_free,      enc_put,
    enc_get,         enc_zero,         enc_copy,        enc_transpose, enc_scale,
    enc_subtract,    enc_times,        enc_get_diag,    enc_put_diag,  enc_dot_rows,
    enc_dot_columns, enc_rotate_right, enc_rotate_left, enc_mul,       enc_gram,
    enc_factor,      enc_solve,        enc_normalise,   enc_tiles,     enc_search,
    enc_feed
};
