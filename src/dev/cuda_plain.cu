/* cuda_plain.cu - products of plain matrices with many rows in the canonical arithmetic
 * (canon.h): the router's scores of a prompt. Called by cuda_product.cu, which has a kernel
 * for few rows with the same bits. Never allocates, synchronises or reads back.
 *
 * A thread block multiplies 64 rows with 32 outputs, a block of 128 inputs at a time; a
 * thread has four rows and two outputs, and of each of these products all eight lanes. */
#include "dev/cuda.h"
#include "dev/cuda_plain.h"

enum {
    THREADS = 256,
    BLOCK = HX_CANON_BLOCK,
    PITCH = BLOCK + 4, /* floats from row to row in shared memory: no bank conflicts */
    TILE_ROWS = 64,
    TILE_OUTS = 32,
    ROWS = 4, /* of a thread: every 16th */
    OUTS = 2,
    LEVELS = 6,                             /* of the tree */
    TILE = (TILE_ROWS + TILE_OUTS) * PITCH, /* floats of a block of inputs */
};

struct plain_many {
    hx_plain_mat m;
    const float *x;
    float *y;
    int64_t rows, ldx, ldy;
};

/* The rows' inputs i0 … start to shared memory, zeros past the end. */
HX_DEVICE void fetch_rows(const plain_many &p, int64_t r0, int64_t i0, float *to)
{
#pragma unroll
    for (int i = threadIdx.x; i < TILE_ROWS * BLOCK / 4; i += THREADS) {
        const int r = i / (BLOCK / 4), at = i % (BLOCK / 4) * 4;
        const bool inside = r0 + r < p.rows && i0 + at < p.m.k;

        hx_copy16(to + r * PITCH + at, inside ? p.x + (r0 + r) * p.ldx + i0 + at : p.x,
                  inside);
    }
}

/* The thread's weights of a block of inputs, eight of every 16th output: on their way, then
 * to shared memory. */
template <int FMT> struct some_weights {
    static constexpr int each = TILE_OUTS * BLOCK / 8 / THREADS;
    hx_raw8<FMT> raw[each];

    __device__ __forceinline__ void fetch(const plain_many &p, int64_t o0, int64_t i0)
    {
#pragma unroll
        for (int j = 0; j < each; j++)
            raw[j] = hx_plain_raw8<FMT>(p.m, output(p, o0, j), i0 + input());
    }
    __device__ __forceinline__ void put(const plain_many &p, int64_t o0, int64_t i0,
                                        float *to) const
    {
#pragma unroll
        for (int j = 0; j < each; j++) {
            const int64_t o = output(p, o0, j), i = i0 + input();
            float w[8];

            hx_plain_widen8<FMT>(w, raw[j], p.m, o, i,
                                 hx_plain_block_scale<FMT>(p.m, o, i));
            float *at = to + (j * (THREADS / 16) + threadIdx.x / 16) * PITCH + input();
            *(float4 *)at = make_float4(w[0], w[1], w[2], w[3]);
            *(float4 *)(at + 4) = make_float4(w[4], w[5], w[6], w[7]);
        }
    }

  private:
    __device__ __forceinline__ static int input(void)
    {
        return threadIdx.x % 16 * 8;
    }
    __device__ __forceinline__ static int64_t output(const plain_many &p, int64_t o0,
                                                     int j)
    {
        return min(o0 + j * (THREADS / 16) + threadIdx.x / 16, p.m.n - 1);
    }
};

/* A block of inputs: lane l of a product sums inputs 8 t + l. */
HX_DEVICE void multiply_block(const float *x, const float *w, float sum[ROWS][OUTS])
{
    float acc[ROWS][OUTS][8] = {};

#pragma unroll 2
    for (int i = 0; i < BLOCK; i += 8)
#pragma unroll
        for (int h = 0; h < 8; h += 4) {
            float4 a[ROWS], b[OUTS];

#pragma unroll
            for (int r = 0; r < ROWS; r++)
                a[r] = *(const float4 *)(x + r * 16 * PITCH + i + h);
#pragma unroll
            for (int o = 0; o < OUTS; o++)
                b[o] = *(const float4 *)(w + o * 16 * PITCH + i + h);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int o = 0; o < OUTS; o++) {
                    float *to = acc[r][o] + h;

                    to[0] = fmaf(b[o].x, a[r].x, to[0]);
                    to[1] = fmaf(b[o].y, a[r].y, to[1]);
                    to[2] = fmaf(b[o].z, a[r].z, to[2]);
                    to[3] = fmaf(b[o].w, a[r].w, to[3]);
                }
        }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int o = 0; o < OUTS; o++)
            sum[r][o] = hx_canon_lanes(acc[r][o]);
}

/* Grid (R / 64, N / 32). Shared: two blocks of inputs of 64 rows and 32 outputs. Reads the
 * rows once for 32 outputs, the weights once for 64 rows. */
template <int FMT>
__global__ void __launch_bounds__(THREADS)
    plain_tiles(const __grid_constant__ plain_many p)
{
    extern __shared__ __align__(16) float tiles[];
    const int64_t r0 = (int64_t)blockIdx.x * TILE_ROWS,
                  o0 = (int64_t)blockIdx.y * TILE_OUTS;
    const int n_block = (int)((p.m.k + BLOCK - 1) / BLOCK);
    const int ty = threadIdx.x / 32 % 2 * 8 + threadIdx.x / 4 % 8,
              tx = threadIdx.x / 64 * 4 + threadIdx.x % 4;
    float level[LEVELS][ROWS][OUTS];
    some_weights<FMT> w;

    w.fetch(p, o0, 0);
    hx_cuda_in_turn();
    fetch_rows(p, r0, 0, tiles);
    w.put(p, o0, 0, tiles + TILE_ROWS * PITCH);
    for (int c = 0; c < n_block; c++) {
        float *now = tiles + c % 2 * TILE, *then = tiles + (c + 1) % 2 * TILE;
        const int64_t next = (int64_t)(c + 1) * BLOCK;
        float t[ROWS][OUTS];

        hx_copy_wait();
        __syncthreads();
        if (c + 1 < n_block) {
            fetch_rows(p, r0, next, then);
            w.fetch(p, o0, next);
        }
        multiply_block(now + ty * PITCH, now + (TILE_ROWS + tx) * PITCH, t);
        if (c + 1 < n_block)
            w.put(p, o0, next, then + TILE_ROWS * PITCH);
            /* A block without a partner moves up. */
#pragma unroll
        for (int q = 0; q < LEVELS; q++) {
            const bool last = (c >> q & 1) == 0;

#pragma unroll
            for (int i = 0; i < ROWS * OUTS; i++)
                if (last)
                    level[q][i / OUTS][i % OUTS] = t[i / OUTS][i % OUTS];
                else
                    t[i / OUTS][i % OUTS] =
                        level[q][i / OUTS][i % OUTS] + t[i / OUTS][i % OUTS];
            if (last)
                break;
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS * OUTS; i++) {
        const int64_t r = r0 + ty + i / OUTS * 16, o = o0 + tx + i % OUTS * 16;
        float sum = 0;
        bool any = false;

#pragma unroll
        for (int q = 0; q < LEVELS; q++)
            if ((n_block >> q & 1) != 0) {
                sum = any ? level[q][i / OUTS][i % OUTS] + sum
                          : level[q][i / OUTS][i % OUTS];
                any = true;
            }
        if (r < p.rows && o < p.m.n)
            p.y[r * p.ldy + o] = p.m.bias != NULL
                                     ? sum + hx_half_to(((const uint16_t *)p.m.bias)[o])
                                     : sum;
    }
}

static_assert(2 * TILE * sizeof(float) <= HX_CUDA_LEAST_SHARED, "any GPU takes it");

bool hx_cuda_plain_takes(const hx_cuda *c, const hx_matmul_args *a)
{
    const hx_mat *m = a->w;

    return m->fmt != HX_FMT_EXL3 && hx_plain_of(m).wide && (uintptr_t)a->x.p % 16 == 0 &&
           a->ldx % 4 == 0 && m->k <= ((1 << LEVELS) - 1) * BLOCK &&
           hx_ceil_div(a->rows, TILE_ROWS) * hx_ceil_div(m->n, TILE_OUTS) >= c->gpu.n_sm;
}

int hx_cuda_plain_many(hx_cuda *c, const hx_matmul_args *a, hx_err *err)
{
    const plain_many p = {
        hx_plain_of(a->w), (const float *)a->x.p, (float *)a->y.p, a->rows, a->ldx, a->ldy
    };
    const dim3 grid((unsigned)hx_ceil_div(a->rows, TILE_ROWS),
                    (unsigned)hx_ceil_div(a->w->n, TILE_OUTS));

    HX_PLAIN_SWITCH(a->w->fmt, HX_LAUNCH_NEXT(c, "matmul", err, plain_tiles<FMT>, grid,
                                              THREADS, 2 * TILE * sizeof(float), p));
    return 0;
}
