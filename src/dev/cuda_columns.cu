/* cuda_columns.cu - EXL3 products of 5 to 16 rows of one matrix on Hopper
 * (cuda_matmul.h): MUL1. Called by cuda_matmul.cu. Never allocates, synchronises or reads
 * back.
 *
 * 4 RQ rows are 8 RQ columns of 64 outputs x 32 k-slots, the planes of a row neighbours.
 * A stage is 64 inputs, four rows of tiles. Lane 4 g + q takes of row q of them the runs of
 * output g: with inputs 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of all four rows the tensor cores
 * have two products. So the columns have, for every t, these inputs of row 0, 1, 2, 3, each
 * four times; they lie in memory as shared memory wants them, RQ * 2048 bytes a stage, two
 * matrices of hx_wgmma_matrix with two t each. */
#include "dev/cuda_matmul.h"

#define COLUMN_STAGES 3

/* Bytes from row to row of a stage's tiles: the four rows' runs lie in other banks. */
template <int K2> constexpr int tile_pitch = 128 * K2 + 32;

template <int K2, int RQ>
constexpr int column_stage = (2048 * RQ + 4 * tile_pitch<K2> + 1023) / 1024 * 1024;

/* Row quads of a product with columns. */
#define COLUMN_RQ(rows) ((rows) <= 8 ? 2 : 4)

/* Grid (blocks of k / 4, 4 * rq), 128 threads: a warp makes one block of one row; absent
 * rows are zeros. */
__global__ void __launch_bounds__(QUAD)
    exl3_to_columns(const __grid_constant__ hx_cuda_job j, int64_t n_block, int rq,
                    hx_cuda_area area)
{
    const int lane = threadIdx.x & 31, t = lane >> 2, q = lane & 3, r = blockIdx.y;
    const int64_t b = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
    hx_cuda_scale scale = {};
    uint2 v = {};

    hx_cuda_in_turn();
    if (b >= n_block)
        return;
    if (r < j.rows) {
        float x[4];

        inputs(x, &j, row_of(&j, r), b * 128 + 4 * lane);
        v = hx_cuda_planes(x, &scale);
    }
    uint8_t *to = (uint8_t *)area.plane +
                  (b * 4 + (t >> 2) * 2 + (q >> 1)) * (1024 * rq) + r * 256 + 4 * (t & 3);
    for (int p = 0; p < 2; p++)
        for (int m = 0; m < 4; m++)
            *(uint32_t *)(to + p * 128 + 16 * ((4 * (q & 1) + m) ^ ((2 * r + p) & 7))) =
                __byte_perm(p == 0 ? v.x : v.y, 0, 0x1111u * (uint32_t)m);
    if (lane == 0)
        area.scale[b * 4 * rq + r] = scale;
}

#if HX_WGMMA

/* d [64, 8 RQ] (+)= a [64, 32] b [8 RQ, 32]^T by four warps, u8 times s8. */
template <int RQ>
__device__ static inline void wgmma_u8(int32_t *d, uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint64_t b, int add)
{
    if constexpr (RQ == 2)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p;}"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]),
                       "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {" HX_D16 "}, "
                     "{%16, %17, %18, %19}, %20, p;}"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]),
                       "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]),
                       "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]),
                       "+r"(d[15])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

/* Stages of a quad. A warp's first lane copies a row of tiles and a quarter of the columns,
 * so that no warp keeps the others waiting for long. */
struct column_pipe {
    uint8_t *ring;
    uint32_t full, empty;           /* [stages] barriers */
    const uint8_t *tiles, *columns; /* of the next stage, the warp's */
    int64_t pitch;                  /* of four rows of tiles */
    int left;                       /* stages not asked for */
    int at, phase;                  /* the stage in use, and its turn's parity */
};

template <int K2, int RQ>
__device__ static inline void fetch_stage_tiles(column_pipe &s, int warp, int at)
{
    const uint32_t to = hx_shared_of(s.ring + at * column_stage<K2, RQ> + 2048 * RQ);

    if (warp == 0)
        hx_bar_expect(s.full + 8 * at, 2048 * RQ + 512 * K2);
    hx_bulk_copy(to + warp * tile_pitch<K2>, s.tiles, 128 * K2, s.full + 8 * at);
    s.tiles += s.pitch;
}

template <int K2, int RQ>
__device__ static inline void fetch_stage_columns(column_pipe &s, int warp, int at)
{
    hx_bulk_copy(hx_shared_of(s.ring + at * column_stage<K2, RQ> + warp * (512 * RQ)),
                 s.columns, 512 * RQ, s.full + 8 * at);
    s.columns += 2048 * RQ;
}

/* A stage's products onto d[tile], or as its first. While the tensor cores have one tile,
 * the next is decoded. The stage before is empty once two groups of this one have begun. */
template <int K2, int RQ>
__device__ static inline void multiply_stage(column_pipe &s, bool first, bool add,
                                             uint32_t a[2][8], int32_t d[2][4 * RQ])
{
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, q = lane & 3;
    const int before = s.at == 0 ? COLUMN_STAGES - 1 : s.at - 1;
    const uint8_t *stage = s.ring + s.at * column_stage<K2, RQ>;
    const uint8_t *tiles = stage + 2048 * RQ + q * tile_pitch<K2> + 2 * warp * 16 * K2;
    /* The shuffle tells the compiler that all lanes have the same. */
    const uint64_t b = hx_wgmma_matrix(__shfl_sync(~0u, hx_shared_of(stage), 0));
    uint32_t r[2][K2 / 2 + 1];

    if constexpr (K2 % 2 == 0)
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
            run_words<K2 / 2>(r[tile], (const uint32_t *)(tiles + tile * 16 * K2),
                              lane >> 2, ((lane >> 2) - 1) & 7, (lane - 4) & 31);
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const uint64_t now = b + (uint32_t)((t >> 1) * 64 * RQ + (t & 1) * 4);

#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            uint32_t *w = a[tile], window[8];

            if constexpr (K2 % 2 == 0)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    window[i] = run_window<K2 / 2>(r[tile], 8 * t + i);
            else
                hx_cuda_windows<K2>((const uint32_t *)(tiles + tile * 16 * K2),
                                    (lane & 28) + t, window);
            hx_wgmma_wait_older();
#pragma unroll
            for (int i = 0; i < 8; i++)
                HX_PIN(w[i], "r");
            if (t == 0 && tile == 1 && !first && lane == 0)
                hx_bar_arrive(s.empty + 8 * before);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; i++) {
                w[i] = window[i] * HX_EXL3_MUL1;
                HX_PIN(w[i], "r");
            }
            hx_wgmma_begin();
            wgmma_u8<RQ>(d[tile], w[0], w[4], w[1], w[5], now, add || t > 0);
            wgmma_u8<RQ>(d[tile], w[2], w[6], w[3], w[7], now + 2, 1);
            hx_wgmma_commit();
        }
        if (t == 1 && lane == 0 && !first && s.left > 0) {
            hx_bar_wait(s.empty + 8 * before, s.at == 0 ? s.phase ^ 1 : s.phase);
            fetch_stage_tiles<K2, RQ>(s, warp, before);
            fetch_stage_columns<K2, RQ>(s, warp, before);
            s.left--;
        }
        __syncwarp();
    }
}

/* A quad's blocks, mine of them: their subtree of every row and output, in to[128 rq +
 * thread of the quad] outputs 8 i + g of the warp, i = 0 … 3, of row 4 rq + q. */
template <int K2, int RQ>
__device__ static inline void multiply_columns(column_pipe &s, int mine,
                                               const hx_cuda_scale *scale, float4 *to)
{
    uint32_t a[2][8] = {};
    int32_t d[2][4 * RQ] = {};
    float two[RQ][4], all[RQ][4]; /* sums of up to two terms, of four */

#pragma unroll
    for (int i = 0; i < 4 * RQ; i++)
        two[i >> 2][i & 3] = all[i >> 2][i & 3] = -0.0f; /* plus x is x */
    for (int b = 0; b < mine; b++, scale += 4 * RQ) {
        hx_cuda_scale now[RQ];

#pragma unroll
        for (int rq = 0; rq < RQ; rq++)
            *(uint2 *)&now[rq] =
                __ldcg((const uint2 *)scale + 4 * rq + (threadIdx.x & 3));
        for (int half = 0; half < 2; half++) {
            hx_bar_wait(s.full + 8 * s.at, s.phase);
            multiply_stage<K2, RQ>(s, b == 0 && half == 0, half != 0, a, d);
            if (++s.at == COLUMN_STAGES) {
                s.at = 0;
                s.phase ^= 1;
            }
        }
        hx_wgmma_wait();
#pragma unroll
        for (int i = 0; i < 8 * RQ; i++)
            HX_PIN(d[i / (4 * RQ)][i % (4 * RQ)], "r");
#pragma unroll
        for (int rq = 0; rq < RQ; rq++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t *sum = &d[i >> 1][4 * rq + 2 * (i & 1)];

                two[rq][i] = two[rq][i] + term<false>(sum, sum, now[rq]);
            }
        if ((b & 1) == 0 && b + 1 < mine)
            continue;
#pragma unroll
        for (int i = 0; i < 4 * RQ; i++) {
            all[i >> 2][i & 3] = all[i >> 2][i & 3] + two[i >> 2][i & 3];
            two[i >> 2][i & 3] = -0.0f;
        }
    }
    __syncthreads(); /* to lies where the stages were */
    if (mine > 0)
#pragma unroll
        for (int rq = 0; rq < RQ; rq++)
            to[QUAD * rq + (threadIdx.x & (QUAD - 1))] =
                make_float4(all[rq][0], all[rq][1], all[rq][2], all[rq][3]);
    __syncthreads();
}

/* What the threads of a quad have of row quad rq becomes rows of outputs. */
template <int RQ> __device__ static inline void put_row(float *out, int rq, float4 v)
{
    const int lane = threadIdx.x & 31;
    float *to =
        out + (4 * rq + (lane & 3)) * GROUP_COLS + (threadIdx.x & 96) + (lane >> 2);

    to[0] = v.x;
    to[8] = v.y;
    to[16] = v.z;
    to[24] = v.w;
}

#endif

/* One thread block: 128 outputs, 4 RQ rows, 1 to 4 quads with bps blocks of inputs each.
 * Grid (n_pad / 128, splits). Reads every trellis byte of its part once, and of the columns
 * RQ * 4096 bytes a block. The splits' work memory is [group][split][RQ][128 float4].
 * Shared: the quads' stages; after the products RQ * 2048 bytes a quad, and the rows. */
template <int K2, int RQ>
__global__ void __launch_bounds__(QUAD *(RQ == 4 ? 4 : 5))
    exl3_columns(const __grid_constant__ hx_product p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t stages[];
    __shared__ uint64_t bar[MAX_QUADS][2 * COLUMN_STAGES];
    const int quad = threadIdx.x / QUAD, me = threadIdx.x & (QUAD - 1), warp = me >> 5,
              lane = me & 31;
    const int n_quad = blockDim.x / QUAD, n_split = gridDim.y;
    const int64_t n_block = p.k_pad / 128, first = (int64_t)blockIdx.y * p.bps * n_quad;
    const int64_t block0 = first + quad * p.bps;
    const int mine = (int)max((int64_t)0, min((int64_t)p.bps, n_block - block0));
    const int here = (int)min((int64_t)n_quad, (n_block - first + p.bps - 1) / p.bps);
    const hx_cuda_job *j = &p.one;
    column_pipe s;

    s.ring = stages + quad * COLUMN_STAGES * column_stage<K2, RQ>;
    s.full = hx_shared_of(&bar[quad][0]);
    s.empty = s.full + 8 * COLUMN_STAGES;
    s.pitch = p.n_pad * K2 * 4;
    s.tiles = (const uint8_t *)j->trellis + block0 * 2 * s.pitch + warp * (s.pitch / 4) +
              (int64_t)blockIdx.x * (128 * K2);
    s.columns = (const uint8_t *)p.area.plane + block0 * (4096 * RQ) + warp * (512 * RQ);
    s.left = max(0, 2 * mine - COLUMN_STAGES);
    s.at = s.phase = 0;
    if (me == 0) {
        for (int i = 0; i < COLUMN_STAGES; i++) {
            hx_bar_init(s.full + 8 * i, 1);
            hx_bar_init(s.empty + 8 * i, 4);
        }
        hx_bar_init_done();
    }
    __syncthreads();
    if (lane == 0)
        for (int i = 0; i < COLUMN_STAGES && i < 2 * mine; i++)
            fetch_stage_tiles<K2, RQ>(s, warp, i);
    hx_cuda_in_turn();
    if (lane == 0)
        for (int i = 0; i < COLUMN_STAGES && i < 2 * mine; i++)
            fetch_stage_columns<K2, RQ>(s, warp, i);
    __syncwarp();
    float4 *sums = (float4 *)stages;
    float *out = (float *)(sums + n_quad * RQ * QUAD);
    float4 *part = (float4 *)p.area.part + (int64_t)blockIdx.x * n_split * RQ * QUAD + me;
    multiply_columns<K2, RQ>(s, mine, p.area.scale + block0 * 4 * RQ,
                             sums + quad * RQ * QUAD);
    for (int rq = quad; rq < RQ; rq += n_quad) {
        const float4 *v = sums + rq * QUAD + me;
        const int step = RQ * QUAD;
        float4 t = v[0];

        if (here > 1)
            t = plus(t, v[step]);
        if (here > 2)
            t = plus(t, here > 3 ? plus(v[2 * step], v[3 * step]) : v[2 * step]);
        if (n_split == 1)
            put_row<RQ>(out, rq, t);
        else
            part[(int64_t)blockIdx.y * step + rq * QUAD] = t;
    }
    if (n_split > 1) {
        if (!is_last(&p.area.ticket[blockIdx.x], n_split))
            return;
        for (int rq = quad; rq < RQ; rq += n_quad)
            put_row<RQ>(out, rq,
                        join((const float *)(part + rq * QUAD), RQ * QUAD * 4, n_split));
    }
    __syncthreads();
    for (int r = threadIdx.x >> 5; r < j->rows; r += blockDim.x >> 5)
        finish(j, row_of(j, r), ((const float4 *)out)[r * 32 + (threadIdx.x & 31)],
               (const uint16_t *)j->svh + col_of());
#endif
}

/* Whether a product of the shape has its rows as columns. */
bool hx_cuda_columns_takes(const hx_cuda_shape *s, const hx_cuda_gpu *g)
{
    return g->hopper && !s->listed && s->rows > HX_CUDA_FEW_ROWS &&
           s->codebook == HX_CB_MUL1;
}

/* Long ways for a quad once there are enough of them: a beginning and an end cost as much
 * as 20 tiles. */
hx_cut hx_cuda_columns_cut(const hx_cuda_shape *s, int n_sm)
{
    const int64_t blocks = s->k_pad / 128, load = load_of(s, n_sm);
    const bool wide = s->rows > 8;
    hx_cut c = { s->quads, s->bps, 0 };

    if (c.quads == 0) {
        c.quads = load < 8 ? wide ? 2 : 4 : load < 20 ? 4 : wide ? 2 : 1;
        c.bps = load < 8 ? wide ? 2 : 1 : HX_CUDA_MAX_BPS;
        while (c.quads > 1 && c.quads / 2 * c.bps >= blocks)
            c.quads /= 2;
    }
    c.splits = (blocks + c.quads * c.bps - 1) / (c.quads * c.bps);
    return c;
}

/* Rows in the work memory. */
int hx_cuda_columns_rows(int rows)
{
    return 4 * COLUMN_RQ(rows);
}

cudaError_t hx_cuda_to_columns(const hx_cuda_job *j, const hx_cuda_shape *s,
                               const hx_cuda_area *area, const hx_cuda_work *w,
                               cudaStream_t stream)
{
    const int64_t n_block = s->k_pad / 128;
    const int rq = COLUMN_RQ(j->rows);

    return hx_cuda_launch(w->overlap, exl3_to_columns,
                          dim3((unsigned)((n_block + 3) / 4), (unsigned)(4 * rq)),
                          dim3(QUAD), 0, stream, *j, n_block, rq, *area);
}

template <int RQ>
static cudaError_t launch(const hx_product *p, const hx_cuda_shape *s,
                          const hx_cuda_work *w, cudaStream_t stream)
{
    const hx_cut c = hx_cuda_columns_cut(s, w->gpu.n_sm);

    return with_k2(s->k2, [&](auto rate) {
        constexpr int K2 = decltype(rate)::value;

        return start(exl3_columns<K2, RQ>, s, c, QUAD * c.quads,
                     (size_t)(c.quads * COLUMN_STAGES * column_stage<K2, RQ>), w, stream,
                     *p);
    });
}

cudaError_t hx_cuda_columns(const hx_product *p, const hx_cuda_shape *s,
                            const hx_cuda_work *w, cudaStream_t stream)
{
    return COLUMN_RQ(s->rows) == 2 ? launch<2>(p, s, w, stream)
                                   : launch<4>(p, s, w, stream);
}
