/* cuda_matmul.cu - products with EXL3 matrices on the GPU in the canonical arithmetic
 * (canon.h): the bits of cpu_matmul.c for decode calls, up to 16 rows a job. Called
 * through the operation table in cuda.cu and, for experts, by cuda_moe.cu. Never
 * allocates, synchronises or reads back.
 *
 * The activations, every 128-input block of every row rotated and quantised, are made by
 * each thread block for its inputs while its weights are on their way or, with more than a
 * few rows or weights and for experts, by a launch of their own. Every weight is read once
 * and multiplied on the tensor cores: the weights of 16 outputs are the A operand of an mma,
 * the planes i and j of four activation rows the eight columns of its B operand.
 * cuda_matmul.h says which products have another kernel.
 *
 * MUL1: the 32-bit product of a state and the multiplier is four unsigned bytes whose sum
 * is the weight, so it is four k-slots of mma.m16n8k32 (u8 x s8) as it stands, against an
 * activation repeated four times. MCG, 3INST: the weight is 256 hi + lo, one product
 * each. */
#include "dev/cuda_matmul.h"

#define ROWS_MMA   4   /* activation rows in one B operand */
#define PLANE      256 /* bytes of the planes of a block of a row */
#define PLANE_STEP 288 /* the same in shared memory, and the scale: no conflicts */
#define MADE_LOAD  24 /* from here on a launch of its own makes the activations cheaper */
/* Row quads, codebook: what fits the registers. */
#define MOST_QUADS(rq, half) ((rq) == 4 && (half) ? 2 : MAX_QUADS)
#define MOST_BPS(rq)         ((rq) == 4 ? 2 : HX_CUDA_MAX_BPS)

/* ---- activations -------------------------------------------------------- */

/* Grid (blocks of k / 4, rows), 128 threads: a warp makes one block of one row. */
__global__ void __launch_bounds__(QUAD)
    exl3_quantize(const __grid_constant__ hx_cuda_job j, int64_t n_block,
                  hx_cuda_area area)
{
    const int lane = threadIdx.x & 31;
    const int64_t b = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5),
                  at = b * 128 + 4 * lane;
    const int64_t row = blockIdx.y;
    const int64_t out = (j.slot + row) * n_block + b;
    float v[4];

    hx_cuda_in_turn();
    if (b >= n_block)
        return;
    inputs(v, &j, row, at);
    hx_cuda_quantize(v, area.plane + out * 32, &area.scale[out]);
}

/* ---- weights ------------------------------------------------------------ */

/* Waits until at most n groups are still on their way. */
__device__ static inline void copy_wait(int n)
{
    switch (n) {
    case 0:
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        break;
    case 1:
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        break;
    case 2:
        asm volatile("cp.async.wait_group 2;" ::: "memory");
        break;
    default:
        asm volatile("cp.async.wait_group 3;" ::: "memory");
        break;
    }
}

/* The weight of a state in the low 16 bits: the sum of an fp16 pair (fmt_exl3.h), whose
 * unit 2^-13 an fp32 has in its last place if 1.5 * 2^23 is added to 8192 times its
 * value. */
__device__ static inline uint32_t half_weight(uint32_t state, hx_cuda_codebook cb)
{
    const uint32_t y = ((state * cb.mul + cb.add) & cb.keep) ^ 0x3B603B60u;
    float f;

    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; add.rn.f16 l, l, h; cvt.f32.f16 %0, l;}"
        : "=f"(f)
        : "r"(y));
    return hx_bits_of(fmaf(f, 8192.0f, 12582912.0f));
}

/* ---- multiplying ---------------------------------------------------------- */

/* Where a lane finds a block of 128 inputs in shared memory. */
struct place {
    const uint8_t *tiles;     /* the warp's first tile; a row of tiles is 128 K2 bytes */
    const uint32_t *plane[4]; /* the lane's row and plane of each row quad */
};

/* c[row quad][tile]: sums of a block, those of outputs g and g + 8 and row q: planes i
 * and j of g, then of g + 8 (g = lane / 4, q = lane % 4). */
template <int K2, int RQ>
__device__ static inline void block_mul1(const place &at, int lane, int32_t c[RQ][2][4])
{
#pragma unroll(RQ == 1 ? 4 : 2)
    for (int t = 0; t < 8; t++) {
        uint32_t b[RQ][4];

        for (int rq = 0; rq < RQ; rq++)
            for (int i = 0; i < 4; i++)
                b[rq][i] = __byte_perm(at.plane[rq][8 * t], 0, 0x1111u * (uint32_t)i);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            uint32_t s[8];

            hx_cuda_windows<K2>((const uint32_t *)(at.tiles + (8 * t + tile) * 16 * K2),
                                lane, s);
            for (int i = 0; i < 8; i++)
                s[i] *= HX_EXL3_MUL1;
            for (int rq = 0; rq < RQ; rq++) {
                mma_u8(c[rq][tile], s[0], s[4], s[1], s[5], b[rq][0], b[rq][1]);
                mma_u8(c[rq][tile], s[2], s[6], s[3], s[7], b[rq][2], b[rq][3]);
            }
        }
    }
}

/* The same with weights 256 hi + lo, two rows of tiles in one mma. */
template <int K2, int RQ>
__device__ static inline void block_half(const place &at, int lane, hx_cuda_codebook cb,
                                         int32_t lo[RQ][2][4], int32_t hi[RQ][2][4])
{
#pragma unroll 1
    for (int t = 0; t < 8; t += 2)
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            uint32_t a_lo[4], a_hi[4]; /* [2 row of tiles + column half] */

#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t s[8];

                hx_cuda_windows<K2>(
                    (const uint32_t *)(at.tiles + (8 * (t + k) + tile) * 16 * K2), lane,
                    s);
                for (int h = 0; h < 2; h++) {
                    const uint32_t *p = s + 4 * h;
                    const uint32_t v =
                        __byte_perm(half_weight(p[0], cb), half_weight(p[1], cb), 0x5410);
                    const uint32_t w =
                        __byte_perm(half_weight(p[2], cb), half_weight(p[3], cb), 0x5410);

                    a_lo[2 * k + h] = __byte_perm(v, w, 0x6420);
                    a_hi[2 * k + h] = __byte_perm(v, w, 0x7531);
                }
            }
            for (int rq = 0; rq < RQ; rq++) {
                const uint32_t b0 = at.plane[rq][8 * t], b1 = at.plane[rq][8 * t + 8];

                mma_u8(lo[rq][tile], a_lo[0], a_lo[1], a_lo[2], a_lo[3], b0, b1);
                mma_s8(hi[rq][tile], a_hi[0], a_hi[1], a_hi[2], a_hi[3], b0, b1);
            }
        }
}

/* ---- the kernel ------------------------------------------------------------- */

/* A block's 8 rows of 8 tiles, by one quad: two rows a warp. */
template <int K2>
__device__ static inline void fetch_tiles(const hx_product &p, const hx_cuda_job *j,
                                          int64_t block, uint8_t *to)
{
    constexpr int row_bytes = 128 * K2;
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const int64_t pitch = p.n_pad * K2;
    const uint8_t *from = (const uint8_t *)j->trellis + (block * 8 + warp) * pitch +
                          (int64_t)blockIdx.x * row_bytes + 16 * lane;

    to += warp * row_bytes + 16 * lane;
    for (int r = 0; r < 2; r++, from += 4 * pitch, to += 4 * row_bytes)
#pragma unroll
        for (int at = 0; at < row_bytes; at += 512)
            if (at + 512 <= row_bytes || at + 16 * lane < row_bytes)
                copy16(to + at, from + at);
}

/* The planes of rows of a block, and their scales, by one quad: made before. */
__device__ static inline void fetch_planes(const hx_product &p, const hx_cuda_job *j,
                                           int64_t block, uint8_t *to)
{
    const int c = threadIdx.x & 15;

    for (int r = threadIdx.x >> 4 & 7; r < j->rows; r += 8) {
        const int64_t at = (j->slot + row_of(j, r)) * (p.k_pad / 128) + block;
        uint4 *row = (uint4 *)(to + r * PLANE_STEP);

        row[c] = __ldcg((const uint4 *)(p.area.plane + at * 32) + c);
        if (c == 0)
            *(hx_cuda_scale *)(row + PLANE / 16) = p.area.scale[at];
    }
}

/* The same, made here: a warp takes every fourth block of a row. */
__device__ static inline void make_planes(const hx_cuda_job *j, int64_t block0, int mine,
                                          int plane_bytes, uint8_t *to)
{
    for (int i = threadIdx.x >> 5 & 3; i < mine * j->rows; i += QUAD / 32) {
        const int b = i % mine, r = i / mine;
        uint8_t *row = to + b * plane_bytes + r * PLANE_STEP;
        float v[4];

        inputs(v, j, row_of(j, r), (block0 + b) * 128 + 4 * (threadIdx.x & 31));
        hx_cuda_quantize(v, (uint2 *)row, (hx_cuda_scale *)(row + PLANE));
    }
}

/* A quad's products: its blocks' subtree of every row and output into out [rows, 128] or,
 * where that is NULL, the work memory. tiles, planes: the quad's shared memory; the tiles
 * are on their way, a group of copies for each block. */
template <int K2, int RQ, bool HALF>
__device__ static inline void
multiply_quad(const hx_product &p, const hx_cuda_job *j, int mine, const uint8_t *tiles,
              const uint8_t *planes, float *out, hx_cuda_codebook cb)
{
    constexpr int tile_bytes = 16 * K2, slots = MOST_BPS(RQ) <= 2 ? 1 : 2;
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int rows = j->rows, plane_bytes = p.rows * PLANE_STEP;
    const uint8_t *scale[RQ];
    place at;
    float level[RQ][2][2][slots];

    for (int rq = 0; rq < RQ; rq++) { /* absent rows repeat the last */
        const int r = min(rq * ROWS_MMA + (g >> 1), rows - 1);
        const int r_out = min(rq * ROWS_MMA + q, rows - 1);

        at.plane[rq] = (const uint32_t *)(planes + r * PLANE_STEP) + 2 * q + (g & 1);
        scale[rq] = planes + r_out * PLANE_STEP + PLANE;
    }
    at.tiles = tiles + 2 * warp * tile_bytes;
    for (int b = 0; b < p.bps; b++) {
        int32_t lo[RQ][2][4] = {}, hi[HALF ? RQ : 1][2][4] = {};

        copy_wait(mine - 1 - b);
        __syncthreads();
        if (b >= mine)
            continue;
        if constexpr (HALF)
            block_half<K2, RQ>(at, lane, cb, lo, hi);
        else
            block_mul1<K2, RQ>(at, lane, lo);
        at.tiles += 64 * tile_bytes;
        for (int rq = 0; rq < RQ; rq++) {
            const hx_cuda_scale s = *(const hx_cuda_scale *)scale[rq];

            at.plane[rq] += plane_bytes / sizeof(uint32_t);
            scale[rq] += plane_bytes;
            for (int i = 0; i < 4; i++)
                tree_put<slots>(level[rq][i >> 1][i & 1], b,
                                term<HALF>(&lo[rq][i >> 1][2 * (i & 1)],
                                           &hi[HALF ? rq : 0][i >> 1][2 * (i & 1)], s));
        }
    }
    if (out != NULL)
        __syncthreads(); /* it lies where the tiles were */
    for (int rq = 0; rq < RQ; rq++) {
        const int r = rq * ROWS_MMA + q;

        if (r < rows && mine > 0) {
            float *to = out != NULL ? out + r * GROUP_COLS
                                    : part_of(p, j, r) + blockIdx.y * GROUP_COLS;

            for (int i = 0; i < 4; i++)
                to[32 * warp + 8 * i + g] =
                    tree_get<slots>(level[rq][i >> 1][i & 1], mine);
        }
    }
}

/* The quads' sums of every row join; the result goes to the work memory or, if this is
 * all of it, to y. */
__device__ static inline void join_quads(const hx_cuda_job *j, const hx_product &p,
                                         int n_quad, const float *out)
{
    const int step = j->rows * 32, lane = threadIdx.x & 31;

    for (int r = threadIdx.x >> 5; r < j->rows; r += blockDim.x >> 5) {
        const float4 *v = (const float4 *)out + r * 32 + lane;
        float4 t = v[0];

        if (n_quad > 1)
            t = plus(t, v[step]);
        if (n_quad > 2)
            t = plus(t, n_quad > 3 ? plus(v[2 * step], v[3 * step]) : v[2 * step]);
        if (gridDim.y == 1)
            finish(j, row_of(j, r), t, (const uint16_t *)j->svh + col_of());
        else
            *(float4 *)(part_of(p, j, r) + blockIdx.y * GROUP_COLS + 4 * lane) = t;
    }
}

/* One thread block: 128 outputs, all rows of a job, 1 to 4 quads with bps blocks of
 * inputs each. Grid (n_pad / 128, splits, jobs). Reads every trellis byte of its part
 * once, all of them in flight at once, and the inputs or rows * 256 bytes of activations
 * a block. Splits leave their subtree in the work memory; the last to come joins them. Shared: the
 * tiles of all blocks, then their activations; after the products rows * 128 floats a
 * quad. */
template <int K2, int RQ, bool HALF>
__global__ void __launch_bounds__(QUAD *MOST_QUADS(RQ, HALF), RQ == 1 ? 2 : 1)
    exl3_rows(const __grid_constant__ hx_product p, hx_cuda_codebook cb)
{
    /* A 16-byte copy into shared memory that lies otherwise in its 128-byte line than its
     * source costs two requests a line: 22 GB/s from host memory, not 51 (H200). */
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int block_bytes = 1024 * K2;
    const int quad = threadIdx.x / QUAD, lane = threadIdx.x & 31, n_split = gridDim.y;
    const int64_t n_block = p.k_pad / 128;
    const int64_t first = (int64_t)blockIdx.y * p.bps * (blockDim.x / QUAD);
    const int64_t block0 = first + quad * p.bps;
    const int mine = (int)max((int64_t)0, min((int64_t)p.bps, n_block - block0));
    const int plane_bytes = p.rows * PLANE_STEP;
    uint8_t *tiles = shared + quad * p.bps * block_bytes;
    uint8_t *planes =
        shared + p.bps * (blockDim.x / QUAD) * block_bytes + quad * p.bps * plane_bytes;

    if (p.fresh)
        hx_cuda_after_previous();
    const hx_cuda_job *j = p.many != NULL ? p.many + blockIdx.z : &p.one;
    const int rows = j->rows;
    for (int b = 0; b < mine && rows > 0; b++) {
        fetch_tiles<K2>(p, j, block0 + b, tiles + b * block_bytes);
        hx_copy_commit();
    }
    hx_cuda_in_turn();
    if (rows == 0)
        return;
    if (RQ == 1 && !p.made)
        make_planes(j, block0, mine, plane_bytes, planes);
    else
        for (int b = 0; b < mine; b++)
            fetch_planes(p, j, block0 + b, planes + b * plane_bytes);
    const bool direct = blockDim.x == QUAD && n_split > 1;
    float *out = (float *)shared;
    multiply_quad<K2, RQ, HALF>(p, j, mine, tiles, planes,
                                direct ? NULL : out + quad * rows * GROUP_COLS, cb);
    if (!direct) {
        __syncthreads();
        join_quads(
            j, p,
            (int)min((int64_t)(blockDim.x / QUAD), (n_block - first + p.bps - 1) / p.bps),
            out);
    }
    if (n_split == 1 ||
        !is_last(&p.area.ticket[(int64_t)blockIdx.z * gridDim.x + blockIdx.x], n_split))
        return;
    for (int r = threadIdx.x >> 5; r < rows; r += blockDim.x >> 5)
        finish(j, row_of(j, r), join(part_of(p, j, r) + 4 * lane, GROUP_COLS, n_split),
               (const uint16_t *)j->svh + col_of());
}

/* ---- launching -------------------------------------------------------------- */

/* Measured on an H200 (132 multiprocessors), by their load: with few blocks of weights, the
 * quads of a thread block share the join; with many, small thread blocks even out. */
static hx_cut cut_of(const hx_cuda_shape *s, const hx_cuda_gpu *g)
{
    const bool half = s->codebook != HX_CB_MUL1;
    const int rq = s->rows <= HX_CUDA_FEW_ROWS ? 1 : s->rows <= 8 ? 2 : 4;
    const int64_t blocks = s->k_pad / 128, load = load_of(s, g->n_sm);
    hx_cut c = { s->quads, s->bps, 0 };

    if (hx_cuda_one_takes(s))
        return hx_cuda_one_cut(s, g->n_sm);
    if (hx_cuda_columns_takes(s, g))
        return hx_cuda_columns_cut(s, g->n_sm);
    if (c.quads == 0) {
        c.quads = load < 8 ? MAX_QUADS : load < 20 ? rq == 1 ? 4 : 2 : rq == 4 ? 2 : 1;
        c.bps = load < 8 ? 1 : load < 40 || s->k2 > 8 ? 2 : HX_CUDA_MAX_BPS;
    }
    c.quads = HX_MIN(c.quads, MOST_QUADS(rq, half));
    c.bps = HX_MIN(c.bps, MOST_BPS(rq));
    while (c.quads * c.bps > 1 &&
           c.quads * c.bps * (1024 * s->k2 + s->rows * PLANE_STEP) > MOST_SHARED)
        if (c.quads > 1)
            c.quads /= 2;
        else
            c.bps /= 2;
    c.splits = (blocks + c.quads * c.bps - 1) / (c.quads * c.bps);
    return c;
}

/* Bytes of the parts of an area, each a multiple of 256. */
static void area_parts(const hx_cuda_shape *s, const hx_cuda_gpu *g, size_t part[3])
{
    const bool columns = hx_cuda_columns_takes(s, g);
    const int64_t slots =
        columns ? HX_MAX(s->slots, (int64_t)hx_cuda_columns_rows(s->rows)) : s->slots;
    const size_t blocks = (size_t)(slots * (s->k_pad / 128));

    part[0] = blocks * (columns ? 4 * PLANE : PLANE);
    part[1] = (blocks * sizeof(hx_cuda_scale) + 255) / 256 * 256;
    part[2] = (size_t)(slots * s->n_pad * cut_of(s, g).splits) * sizeof(float);
}

size_t hx_cuda_area_bytes(const hx_cuda_shape *s, const hx_cuda_gpu *g)
{
    size_t part[3];

    area_parts(s, g, part);
    return part[0] + part[1] + part[2];
}

cudaError_t hx_cuda_area_of(const hx_cuda_shape *s, const hx_cuda_work *w,
                            hx_cuda_area *out)
{
    size_t part[3];

    area_parts(s, &w->gpu, part);
    if (part[0] + part[1] + part[2] > w->bytes ||
        s->n_pad / GROUP_COLS * s->n_job > w->n_ticket)
        return cudaErrorInvalidValue;
    out->plane = (uint2 *)w->p;
    out->scale = (hx_cuda_scale *)((char *)w->p + part[0]);
    out->part = (float *)((char *)w->p + part[0] + part[1]);
    out->ticket = w->ticket;
    return cudaSuccess;
}

template <int K2, int RQ, bool HALF>
static cudaError_t launch(const hx_product *p, const hx_cuda_shape *s,
                          const hx_cuda_work *w, cudaStream_t stream)
{
    const hx_cut c = cut_of(s, &w->gpu);
    const size_t rows = (size_t)p->rows, per_block = 1024 * K2 + rows * PLANE_STEP;
    const size_t bytes = (size_t)c.quads * HX_MAX((size_t)c.bps * per_block,
                                                  rows * GROUP_COLS * sizeof(float));

    return start(exl3_rows<K2, RQ, HALF>, s, c, QUAD * c.quads, bytes, w, stream, *p,
                 hx_cuda_codebook_of(s->codebook));
}

template <bool HALF>
static cudaError_t launch_rows(const hx_product *p, const hx_cuda_shape *s,
                               const hx_cuda_work *w, cudaStream_t stream)
{
    return with_k2(s->k2, [&](auto rate) {
        constexpr int K2 = decltype(rate)::value;

        return s->rows <= HX_CUDA_FEW_ROWS ? launch<K2, 1, HALF>(p, s, w, stream)
               : s->rows <= 8              ? launch<K2, 2, HALF>(p, s, w, stream)
                                           : launch<K2, 4, HALF>(p, s, w, stream);
    });
}

static cudaError_t multiply(hx_product *p, const hx_cuda_shape *s, const hx_cuda_work *w,
                            cudaStream_t stream)
{
    cudaError_t rc = hx_cuda_area_of(s, w, &p->area);
    const bool half = s->codebook != HX_CB_MUL1;

    if (rc != cudaSuccess)
        return rc;
    p->n_pad = s->n_pad;
    p->k_pad = s->k_pad;
    p->bps = cut_of(s, &w->gpu).bps;
    p->rows = s->rows;
    p->fresh = s->fresh;
    if (s->rows < 1 || s->rows > HX_CUDA_JOB_ROWS ||
        cut_of(s, &w->gpu).splits > 8 * ((1 << MAX_LEVELS) - 1))
        return cudaErrorInvalidValue;
    if (hx_cuda_one_takes(s))
        return hx_cuda_one(p, s, w, stream);
    if (hx_cuda_columns_takes(s, &w->gpu))
        return hx_cuda_columns(p, s, w, stream);
    return half ? launch_rows<true>(p, s, w, stream)
                : launch_rows<false>(p, s, w, stream);
}

cudaError_t hx_cuda_rows(const hx_cuda_job *job, const hx_cuda_shape *s,
                         const hx_cuda_work *w, cudaStream_t stream)
{
    const int64_t n_block = s->k_pad / 128;
    hx_cuda_shape shape = *s;
    hx_product p = {};
    cudaError_t rc;

    shape.n_job = 1;
    shape.rows = job->rows;
    if ((rc = hx_cuda_area_of(&shape, w, &p.area)) != cudaSuccess)
        return rc;
    p.made = job->rows > HX_CUDA_FEW_ROWS || load_of(&shape, w->gpu.n_sm) >= MADE_LOAD;
    if (hx_cuda_columns_takes(&shape, &w->gpu))
        rc = hx_cuda_to_columns(job, &shape, &p.area, w, stream);
    else if (p.made)
        rc = hx_cuda_launch(w->overlap, exl3_quantize,
                            dim3((unsigned)((n_block + 3) / 4), (unsigned)job->rows),
                            dim3(QUAD), 0, stream, *job, n_block, p.area);
    if (rc != cudaSuccess)
        return rc;
    p.one = *job;
    return multiply(&p, &shape, w, stream);
}

cudaError_t hx_cuda_jobs(const hx_cuda_job *jobs, const hx_cuda_shape *s,
                         const hx_cuda_work *w, cudaStream_t stream)
{
    hx_product p = {};

    p.many = jobs;
    p.made = true;
    return multiply(&p, s, w, stream);
}
