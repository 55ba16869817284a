/* cuda_few.cu - products with up to 64 rows on Hopper (cuda_gemm.h). Called by
 * cuda_gemm.cu. Never allocates, synchronises or reads back.
 *
 * With few rows the decoding is all the work, and 128 outputs a multiprocessor leave most of
 * them idle. So a cluster of two thread blocks has a group: each 64 outputs, whose weights
 * sixteen warps decode into shared memory, two a stage in turn; the rows, which the two copy
 * for one another, are the A operand. Sums and their order are the others'. */
#include "dev/cuda_gemm.h"

enum {
    FEW_ROWS = 64,
    FEW_OUTPUTS = 64,
    FEW_SHARE = GROUP / FEW_OUTPUTS,
    FEW_STAGES = 8,
    FEW_WARPS = FEW_OUTPUTS / 32, /* that decode a stage */
    FEW_DECODE = FEW_WARPS * FEW_STAGES,
    FEW_AHEAD = 2, /* turns whose tiles such a warp has on their way */
    FEW_WEIGHTS = FEW_OUTPUTS * 128,
    FEW_OUT = FEW_ROWS / FEW_SHARE * GROUP * 4,
    FEW_THREADS = 32 * (4 + FEW_DECODE + 1),
};

static __host__ __device__ inline int few_x_bytes(int rows)
{
    return (rows + 7) / 8 * 1024;
}

static __host__ __device__ inline int few_bytes(int rows, int k2)
{
    return FEW_STAGES * (few_x_bytes(rows) + FEW_WEIGHTS) +
           FEW_DECODE * FEW_AHEAD * 128 * k2 + FEW_OUT + ENDING_BYTES +
           3 * FEW_STAGES * 8;
}

/* Shared memory of a thread block. */
struct few {
    uint8_t *x, *weights, *tiles; /* [stages] */
    float *out, *factor, *bias;   /* [32 rows][128], [128], [128] */
    uint32_t full, made, empty;   /* [stages] barriers */
    int x_bytes, rank;
};

#if HX_WGMMA

/* The rows' copies: a part of each stage, for all. One thread. */
HX_DEVICE void few_produce(const hx_gemm &p, const few &s)
{
    const int mine = s.x_bytes / FEW_SHARE;
    const uint8_t *from = p.image + s.rank * mine;

    for (int step = 0; step < p.steps; step++, from += MOST_ROWS * 128) {
        const int at = step % FEW_STAGES;

        hx_bar_wait(s.empty + 8 * at, (step / FEW_STAGES & 1) ^ 1);
        hx_bar_expect(s.full + 8 * at, s.x_bytes);
        hx_bulk_copy_all(hx_shared_of(s.x + at * s.x_bytes + s.rank * mine), from, mine,
                         s.full + 8 * at, FEW_SHARE);
    }
}

/* One of the sixteen warps: 32 outputs of the stages at, at + 8 … */
template <class F> HX_DEVICE void few_decode(const hx_gemm &p, const few &s, int mine)
{
    const int at = mine % FEW_STAGES, part = mine / FEW_STAGES;
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const int row_bytes = 32 * p.k2, turn_bytes = 4 * row_bytes;
    const int64_t pitch = (int64_t)p.groups * 128 * p.k2;
    const int turns = (p.steps - at + FEW_STAGES - 1) / FEW_STAGES;
    const uint8_t *from =
        p.w + 4 * at * pitch +
        ((int64_t)blockIdx.x * FEW_WARPS + part) * row_bytes; /* two columns of tiles */
    uint8_t *tiles = s.tiles + mine * FEW_AHEAD * turn_bytes;
    uint8_t *to = s.weights + at * FEW_WEIGHTS;
    const auto fetch = [&](int turn) {
        for (int i = lane; i < 8 * p.k2 && turn < turns; i += 32)
            hx_copy16(tiles + turn % FEW_AHEAD * turn_bytes + 16 * i,
                      from + ((int64_t)turn * 4 * FEW_STAGES + i / (2 * p.k2)) * pitch +
                          i % (2 * p.k2) * 16,
                      true);
        hx_copy_commit();
    };

    for (int turn = 0; turn < FEW_AHEAD; turn++)
        fetch(turn);
    for (int turn = 0; turn < turns; turn++) {
        const uint8_t *tile = tiles + turn % FEW_AHEAD * turn_bytes;

        hx_copy_wait_older<FEW_AHEAD - 1>();
        __syncwarp();
        hx_bar_wait(s.empty + 8 * at, (turn & 1) ^ 1);
#pragma unroll
        for (int t = 0; t < 8; t++) {
            uint32_t a[4];

            F::decode(tile + t * (row_bytes / 2), p.k2, p.cb, lane, a);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(uint32_t *)image_at<FEW_OUTPUTS>(
                    to, 1, 32 * part + 16 * (t & 1) + g + 8 * (i & 1),
                    16 * (t >> 1) + 2 * q + 8 * (i >> 1)) = a[i];
        }
        hx_bar_wait(s.full + 8 * at, turn & 1); /* so that made means both */
        hx_wgmma_wrote();
        __syncwarp();
        if (lane == 0)
            hx_bar_arrive(s.made + 8 * at);
        fetch(turn + FEW_AHEAD);
    }
}

/* Four warps: 64 rows times 64 outputs; the sums of rows 0 to 31 go to the thread block of
 * rank 0, the others to rank 1. */
HX_DEVICE void few_multiply(const hx_gemm &p, const few &s)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    float d[FEW_OUTPUTS / 2];

    for (int step = 0; step < p.steps; step++) {
        const int at = step % FEW_STAGES, phase = step / FEW_STAGES & 1;
        const uint64_t x = hx_wgmma_matrix(hx_shared_of(s.x + at * s.x_bytes));
        const uint64_t w = hx_wgmma_matrix(hx_shared_of(s.weights + at * FEW_WEIGHTS));

        hx_bar_wait(s.made + 8 * at, phase);
        hx_wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            hx_wgmma_shared<FEW_OUTPUTS>(d, x + 2 * i, w + 2 * i, step + i > 0);
        hx_wgmma_commit();
        hx_wgmma_wait_older();
        if (step > 0 && lane < FEW_SHARE)
            hx_bar_arrive_at(s.empty + 8 * ((step - 1) % FEW_STAGES), lane);
    }
    hx_wgmma_wait();
#pragma unroll
    for (int i = 0; i < FEW_OUTPUTS / 2; i++)
        HX_PIN(d[i], "f");
#pragma unroll
    for (int i = 0; i < FEW_OUTPUTS / 4; i++)
        hx_put_at(hx_shared_of(s.out + (16 * (warp & 1) + g + 8 * (i & 1)) * GROUP +
                               FEW_OUTPUTS * s.rank + 8 * (i >> 1) + 2 * q),
                  warp >> 1, d[2 * i], d[2 * i + 1]);
}

#endif

/* 64 outputs, all rows. Grid: two for a group, a cluster. Shared: few_bytes. Reads its
 * weights once, of the image a half. */
template <class F>
__global__ void __launch_bounds__(FEW_THREADS) gemm_few(const __grid_constant__ hx_gemm p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, q = threadIdx.x & 3;
    const int64_t first = (int64_t)(blockIdx.x / FEW_SHARE) * GROUP;
    few s;

    s.rank = blockIdx.x % FEW_SHARE;
    s.x_bytes = few_x_bytes(p.rows);
    s.x = shared;
    s.weights = s.x + FEW_STAGES * s.x_bytes;
    s.out = (float *)(s.weights + FEW_STAGES * FEW_WEIGHTS);
    s.factor = (float *)((uint8_t *)s.out + FEW_OUT);
    s.bias = s.factor + GROUP;
    s.tiles = (uint8_t *)(s.bias + GROUP);
    s.full = hx_shared_of(s.tiles) + FEW_DECODE * FEW_AHEAD * 128 * p.k2;
    s.made = s.full + 8 * FEW_STAGES;
    s.empty = s.made + 8 * FEW_STAGES;
    if (threadIdx.x < FEW_STAGES) {
        hx_bar_init(s.full + 8 * threadIdx.x, 1);
        hx_bar_init(s.made + 8 * threadIdx.x, FEW_WARPS);
        hx_bar_init(s.empty + 8 * threadIdx.x, 4 * FEW_SHARE);
        hx_bar_init_done();
    }
    hx_cluster_meet();
    if (warp >= 4 + FEW_DECODE) {
        hx_cuda_after_previous();
        if ((threadIdx.x & 31) == 0)
            few_produce(p, s);
    } else if (warp >= 4) {
        few_decode<F>(p, s, warp - 4);
    } else {
        const int64_t col = first + threadIdx.x;
        const bool in = col < p.n;

        s.factor[threadIdx.x] = in ? hx_half_to(p.svh[col]) * HX_CANON_ROOT : 0.0f;
        s.bias[threadIdx.x] = in && p.bias != NULL ? hx_half_to(p.bias[col]) : 0.0f;
        few_multiply(p, s);
    }
    __syncwarp();
    hx_cluster_meet();
    const int row = 32 * s.rank + (int)(threadIdx.x >> 2);
    if (warp >= 4)
        return;
    const float sign = (q & 2) != 0 ? -1.0f : 1.0f;
    float v[8][4];

#pragma unroll
    for (int i = 0; i < 8; i++) {
        *(float4 *)v[i] =
            *(const float4 *)(s.out + (threadIdx.x >> 2) * GROUP + 16 * i + 4 * q);
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[i][k] = fmaf(v[i][k], sign, __shfl_xor_sync(~0u, v[i][k], 2));
    }
    rotate_sums(v);
    hx_cuda_after_previous();
    if (row < p.rows)
        leave(p, v, s.factor + 4 * q, s.bias + 4 * q, p.scale[row], row, first + 4 * q);
#endif
}

template <class F>
static cudaError_t launch_few(const hx_gemm &p, const hx_cuda_work *w,
                              cudaStream_t stream)
{
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t cfg = {};
    const cudaError_t rc =
        cudaFuncSetAttribute(gemm_few<F>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             few_bytes(p.rows, p.k2));

    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim = { FEW_SHARE, 1, 1 };
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cfg.gridDim = dim3((unsigned)(p.groups * FEW_SHARE));
    cfg.blockDim = dim3(FEW_THREADS);
    cfg.dynamicSmemBytes = (size_t)few_bytes(p.rows, p.k2);
    cfg.stream = stream;
    cfg.attrs = attr;
    cfg.numAttrs = w->overlap ? 2 : 1;
    return rc != cudaSuccess ? rc : cudaLaunchKernelEx(&cfg, gemm_few<F>, p);
}

bool hx_cuda_few_takes(const hx_gemm *p, const hx_cuda_work *w)
{
    hx_gemm_limits l = {};

    return hx_cuda_gemm_limits(&l) == cudaSuccess && l.share > 1 && p->block == NULL &&
           p->rows <= FEW_ROWS && p->block_rows == 0 && p->groups * FEW_SHARE <= w->n_sm;
}

cudaError_t hx_cuda_few(hx_gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                        cudaStream_t stream)
{
    p->cb = hx_cuda_codebook_of(codebook);
    return with_exl3(p->k2, codebook,
                     [&](auto f) { return launch_few<decltype(f)>(*p, w, stream); });
}
