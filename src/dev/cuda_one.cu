/* cuda_one.cu - EXL3 products of one row on the GPU (cuda_matmul.h): MUL1, whole bits.
 * Called by cuda_matmul.cu. Never allocates, synchronises or reads back.
 *
 * With one row of activations the columns of B are many: columns 2 c and 2 c + 1 hold its
 * two planes in the k-slots of lanes whose q is c and zeros elsewhere, so that a lane's
 * sums are those of its own weights, whatever its neighbours have. A lane takes a run. */
#include "dev/cuda_matmul.h"

#define ROW_PLANE                                                                        \
    528 /* bytes of a plane of a block, each input four times; no conflicts */
#define ROW_SCALE (2 * ROW_PLANE) /* place of the scale in a block */
#define ROW_BLOCK 1152            /* bytes of a block */
#define ROW_ZERO  544             /* bytes of zeros, from byte 32 on */
#define ROW_PARTS 8               /* of a thread block, each with its own inputs */

/* Stages on their way or in use, of two rows of tiles each, of a warp with 64 * sets
 * outputs. */
__host__ __device__ constexpr int row_stages(int sets)
{
    return sets == 1 ? 4 : 2;
}

/* A row of 4 * SETS tiles: c[2]: sums of the sets or, of one, of every other mma. */
template <int K, int SETS>
__device__ static inline void row_tiles(int32_t c[2][4], const uint8_t *tiles,
                                        const uint4 *act, int lane)
{
    const int before = (lane & 24) + ((lane - 1) & 7);
    uint32_t r[SETS][K + 1];

#pragma unroll
    for (int set = 0; set < SETS; set++)
        run_words<K>(r[set], (const uint32_t *)(tiles + set * 128 * K), lane, before,
                     before);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const uint4 b = act[q];

#pragma unroll
        for (int set = 0; set < SETS; set++) {
            uint32_t s[8];

#pragma unroll
            for (int i = 0; i < 8; i++)
                s[i] = run_window<K>(r[set], 8 * q + i) * HX_EXL3_MUL1;
            mma_u8(c[set], s[0], s[4], s[1], s[5], b.x, b.y);
            mma_u8(c[SETS == 1 ? 1 : set], s[2], s[6], s[3], s[7], b.z, b.w);
        }
    }
}

/* A lane's share of a stage: two rows of tiles of BYTES, by a warp. */
template <int BYTES>
__device__ static inline void row_fetch(uint8_t *to, const uint8_t *from, int64_t pitch,
                                        int lane)
{
#pragma unroll
    for (int r = 0; r < 2; r++, to += BYTES, from += pitch)
#pragma unroll
        for (int at = 0; at < BYTES; at += 512)
            if (at + 512 <= BYTES || at + 16 * lane < BYTES)
                copy16(to + at + 16 * lane, from + at + 16 * lane);
}

/* The planes of a lane's four inputs of a block, each value four times. */
__device__ static inline void row_spread(uint8_t *block, uint2 v)
{
    uint4 *plane = (uint4 *)block + (threadIdx.x & 31);

    for (int h = 0; h < 2; h++) {
        const uint32_t x = h == 0 ? v.x : v.y;

        plane[h * (ROW_PLANE / 16)] =
            make_uint4(__byte_perm(x, 0, 0x0000), __byte_perm(x, 0, 0x1111),
                       __byte_perm(x, 0, 0x2222), __byte_perm(x, 0, 0x3333));
    }
}

/* The activations of n blocks from block first on, by all warps: at most MAX_BPS each. */
__device__ static inline void row_planes(const hx_product &p, const hx_cuda_job *j,
                                         int64_t first, int n, uint8_t *to)
{
    const int warp = threadIdx.x >> 5, n_warp = blockDim.x >> 5, lane = threadIdx.x & 31;
    const int64_t row = row_of(j, 0), at = (j->slot + row) * (p.k_pad / 128) + first;

    if (p.made) {
        uint2 v[HX_CUDA_MAX_BPS];

#pragma unroll
        for (int i = 0; i < HX_CUDA_MAX_BPS; i++)
            if (warp + i * n_warp < n)
                v[i] = __ldcg(p.area.plane + (at + warp + i * n_warp) * 32 + lane);
#pragma unroll
        for (int i = 0; i < HX_CUDA_MAX_BPS; i++)
            if (warp + i * n_warp < n)
                row_spread(to + (warp + i * n_warp) * ROW_BLOCK, v[i]);
        for (int b = threadIdx.x; b < n; b += blockDim.x)
            *(hx_cuda_scale *)(to + b * ROW_BLOCK + ROW_SCALE) = p.area.scale[at + b];
        return;
    }
#pragma unroll 1
    for (int b = warp; b < n; b += n_warp) {
        uint8_t *block = to + b * ROW_BLOCK;
        float x[4];

        inputs(x, j, row, (first + b) * 128 + 4 * lane);
        hx_cuda_quantize(x, (uint2 *)block, (hx_cuda_scale *)(block + ROW_SCALE));
        const uint2 v = ((uint2 *)block)[lane];
        __syncwarp();
        row_spread(block, v);
    }
}

/* The products of a warp's blocks of inputs, mine of them: their subtree for its
 * 64 * SETS outputs into the ring of tiles, of which all but the last stage are on their
 * way; from: the lane's tiles in memory. */
template <int K, int SETS>
__device__ static inline void row_multiply(const hx_product &p, int mine, uint8_t *ring,
                                           const uint8_t *from, const uint8_t *act,
                                           const uint8_t *zero)
{
    constexpr int bytes = SETS * 128 * K, stages = row_stages(SETS);
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const bool mine_q = g >> 1 == (lane & 3);
    const uint8_t *b_at = mine_q ? act + (g & 1) * ROW_PLANE : zero;
    const int64_t pitch = p.n_pad * K * 2;
    float level[SETS][2][2];
    int left = 4 * mine - (stages - 1); /* stages not asked for */

    from += 2 * (stages - 1) * pitch;
    for (int b = 0; b < mine; b++) {
        int32_t c[2][4] = {};

#pragma unroll 1
        for (int t = 0; t < 4; t++) {
            const uint8_t *tiles = ring + 2 * (t & (stages - 1)) * bytes;
            const uint4 *b_row = (const uint4 *)b_at + 8 * t;

            hx_copy_wait_older<stages - 2>();
            __syncwarp();
            if (left-- > 0)
                row_fetch<bytes>(ring + 2 * ((t - 1) & (stages - 1)) * bytes, from, pitch,
                                 lane);
            hx_copy_commit();
            from += 2 * pitch;
            row_tiles<K, SETS>(c, tiles, b_row, lane);
            row_tiles<K, SETS>(c, tiles + bytes, b_row + 4, lane);
        }
        const hx_cuda_scale s = *(const hx_cuda_scale *)(act + ROW_SCALE);

        act += ROW_BLOCK;
        b_at += mine_q ? ROW_BLOCK : 0;
#pragma unroll
        for (int o = 0; o < 2 * SETS; o++) {
            int32_t lo[2] = { c[o >> 1][2 * (o & 1)], c[o >> 1][2 * (o & 1) + 1] };

            if (SETS == 1) {
                lo[0] += c[1][2 * o];
                lo[1] += c[1][2 * o + 1];
            }
            tree_put<2>(level[o >> 1][o & 1], b, term<false>(lo, lo, s));
        }
    }
    __syncwarp();
    if (mine > 0)
#pragma unroll
        for (int o = 0; o < 2 * SETS; o++)
            ((float *)ring)[64 * (o >> 1) + 16 * (lane >> 3) + 8 * (o & 1) + (lane & 7)] =
                tree_get<2>(level[o >> 1][o & 1], mine);
}

/* True in the warp that comes last of the group's splits. */
__device__ static bool is_last_warp(int *ticket, int n_split)
{
    int last = 0;

    __threadfence();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        last = atomicAdd(ticket, 1) == n_split - 1;
        if (last)
            *ticket = 0;
    }
    last = __shfl_sync(~0u, last, 0);
    __threadfence();
    return last != 0;
}

/* One thread block: 128 outputs of one row, parts with bps blocks of inputs each; a part
 * is one warp, or two of 64 outputs. Grid and splits as below. Shared: a ring of tiles a
 * warp, which also takes its sums, then the activations of all blocks, then zeros. */
template <int K, int SETS>
__global__ void __launch_bounds__(32 * ROW_PARTS, 3)
    exl3_row(const __grid_constant__ hx_product p)
{
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int bytes = SETS * 128 * K, stages = row_stages(SETS), warps = 2 / SETS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp / warps;
    const int n_warp = blockDim.x >> 5, n_part = n_warp / warps, n_split = gridDim.y;
    const int64_t n_block = p.k_pad / 128, first = (int64_t)blockIdx.y * p.bps * n_part;
    const int64_t block0 = first + part * p.bps;
    const int here = (int)min((int64_t)(n_part * p.bps), n_block - first);
    const int mine = max(0, min(p.bps, here - part * p.bps));
    constexpr int ring_bytes = 2 * stages * bytes;
    uint8_t *ring = shared + warp * ring_bytes;
    uint8_t *act = shared + n_warp * ring_bytes;
    uint8_t *zero = act + n_part * p.bps * ROW_BLOCK + 32;

    if (p.fresh)
        hx_cuda_after_previous();
    const hx_cuda_job *j = p.many != NULL ? p.many + blockIdx.z : &p.one;
    const int rows = j->rows;
    const int64_t pitch = p.n_pad * K * 2;
    const uint8_t *from = (const uint8_t *)j->trellis + block0 * 8 * pitch +
                          (int64_t)blockIdx.x * 256 * K + warp % warps * bytes;
    for (int i = 0; i < stages - 1; i++) {
        if (i < 4 * mine && rows > 0)
            row_fetch<bytes>(ring + 2 * i * bytes, from + 2 * i * pitch, pitch, lane);
        hx_copy_commit();
    }
    hx_cuda_in_turn();
    if (rows == 0)
        return;
    uint16_t svh[4]; /* on its way in time */
    for (int i = 0; i < 4; i++)
        svh[i] = warp == 0 ? ((const uint16_t *)j->svh)[col_of() + i] : 0;
    for (int i = threadIdx.x; i < (ROW_ZERO - 32) / 16; i += blockDim.x)
        ((uint4 *)zero)[i] = make_uint4(0, 0, 0, 0);
    row_planes(p, j, first, here, act);
    __syncthreads();
    row_multiply<K, SETS>(p, mine, ring, from, act + part * p.bps * ROW_BLOCK, zero);
    __syncthreads();
    if (warp != 0)
        return;
    const float4 *sum =
        (const float4 *)(shared + (SETS == 2 ? 0 : lane >> 4) * ring_bytes) +
        (SETS == 2 ? lane : lane & 15);
    float *part_at = part_of(p, j, 0);
    float4 v[ROW_PARTS];
#pragma unroll
    for (int i = 0; i < ROW_PARTS; i++)
        v[i] =
            i * p.bps < here ? sum[i * warps * ring_bytes / 16] : make_float4(0, 0, 0, 0);
    join8(v, (here + p.bps - 1) / p.bps);
    if (n_split > 1) {
        *(float4 *)(part_at + blockIdx.y * GROUP_COLS + 4 * lane) = v[0];
        if (!is_last_warp(&p.area.ticket[(int64_t)blockIdx.z * gridDim.x + blockIdx.x],
                          n_split))
            return;
        v[0] = join(part_at + 4 * lane, GROUP_COLS, n_split);
    }
    finish(j, row_of(j, 0), v[0], svh);
}

bool hx_cuda_one_takes(const hx_cuda_shape *s)
{
    return s->rows == 1 && s->codebook == HX_CB_MUL1 && s->k2 % 2 == 0;
}

/* Sets of 64 outputs of a warp: one where there are few blocks of weights. */
static int row_sets(hx_cut c)
{
    return c.quads <= 4 && c.bps == 1 ? 1 : 2;
}

static size_t row_bytes(const hx_cuda_shape *s, hx_cut c)
{
    return (size_t)c.quads * (2 * (size_t)row_stages(row_sets(c)) * 128 * s->k2 +
                              (size_t)c.bps * ROW_BLOCK) +
           32 + ROW_ZERO;
}

/* Of one row, quads being its parts: some 15 warps for every multiprocessor, at once. */
hx_cut hx_cuda_one_cut(const hx_cuda_shape *s, int n_sm)
{
    const int64_t blocks = s->k_pad / 128, load = load_of(s, n_sm);
    hx_cut c = { s->quads, s->bps, 0 };

    if (c.quads == 0) {
        c.quads = load < 12 || load >= 120 ? 4 : ROW_PARTS;
        c.bps = load < 30 ? 1 : load < 60 ? 2 : HX_CUDA_MAX_BPS;
    }
    while (c.quads > 1 &&
           (c.quads / 2 * c.bps >= blocks || row_bytes(s, c) > MOST_SHARED))
        c.quads /= 2;
    c.splits = (blocks + c.quads * c.bps - 1) / (c.quads * c.bps);
    return c;
}

cudaError_t hx_cuda_one(const hx_product *p, const hx_cuda_shape *s,
                        const hx_cuda_work *w, cudaStream_t stream)
{
    const hx_cut c = hx_cuda_one_cut(s, w->gpu.n_sm);
    const size_t bytes = row_bytes(s, c);

    return with_k2(s->k2, [&](auto rate) {
        constexpr int k = decltype(rate)::value / 2;

        if constexpr (decltype(rate)::value % 2 != 0)
            return cudaErrorInvalidValue;
        else if (row_sets(c) == 1)
            return start(exl3_row<k, 1>, s, c, 64 * c.quads, bytes, w, stream, *p);
        else
            return start(exl3_row<k, 2>, s, c, 32 * c.quads, bytes, w, stream, *p);
    });
}
