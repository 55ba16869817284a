/* cuda_matmul.cu - products with EXL3 matrices on the GPU in the canonical arithmetic
 * (canon.h): the bits of cpu_matmul.c for decode calls, up to 16 rows a job. Called
 * through the operation table in cuda.cu and, for experts, by cuda_moe.cu. Never
 * allocates, synchronises or reads back.
 *
 * The activations, every 128-input block of every row rotated and quantised, are made by
 * each thread block for its inputs while its weights are on their way or, with more than a
 * few rows or weights and for experts, by a launch of their own. Every weight is read once
 * and multiplied on the tensor cores: the weights of 16 outputs are the A operand of an mma,
 * the planes i and j of four activation rows the eight columns of its B operand. One row
 * (MUL1, whole bits) has a kernel of its own, in which these columns keep lanes apart. On
 * Hopper 5 to 16 rows of one matrix are columns of wgmma, which has them from shared memory.
 *
 * MUL1: the 32-bit product of a state and the multiplier is four unsigned bytes whose sum
 * is the weight, so it is four k-slots of mma.m16n8k32 (u8 x s8) as it stands, against an
 * activation repeated four times. MCG, 3INST: the weight is 256 hi + lo, one product
 * each. */
#include "dev/cuda.h"
#include "dev/cuda_tensor.h"

#define GROUP_COLS 128 /* outputs of a thread block: one rotation */
#define QUAD       128 /* threads: four warps, each two 16-column tiles */
#define MAX_QUADS  4   /* of a thread block, each with its own inputs */
#define ROWS_MMA   4   /* activation rows in one B operand */
#define PLANE      256 /* bytes of the planes of a block of a row */
#define PLANE_STEP 288 /* the same in shared memory, and the scale: no conflicts */
#define MAX_LEVELS 5   /* of the join: 8 * 2^5 - 8 splits */
#define MADE_LOAD  24 /* from here on a launch of its own makes the activations cheaper */
#define MOST_SHARED                                                                      \
    (96 << 10) /* bytes of a thread block that any GPU from sm_80 on has */

/* Row quads, codebook: what fits the registers. */
#define MOST_QUADS(rq, half) ((rq) == 4 && (half) ? 2 : MAX_QUADS)
#define MOST_BPS(rq)         ((rq) == 4 ? 2 : HX_CUDA_MAX_BPS)

/* What the products of a launch are given. */
struct product {
    hx_cuda_job one;
    const hx_cuda_job *many; /* NULL: one */
    hx_cuda_area area;
    int64_t n_pad, k_pad;
    int bps;  /* 128-input blocks of a quad */
    int rows; /* the most, for which shared memory is sized */
    bool fresh;
    bool made;    /* the activations are in the area */
    bool columns; /* as columns */
};

/* ---- activations -------------------------------------------------------- */

__device__ static inline int64_t row_of(const hx_cuda_job *j, int r)
{
    return j->row != NULL ? j->row[r] : r;
}

/* Four inputs of a row, from input at on, times suh. */
__device__ static inline void inputs(float v[4], const hx_cuda_job *j, int64_t row,
                                     int64_t at)
{
    const uint16_t *suh = (const uint16_t *)j->suh + at;
    const float *x = j->x + row * j->ldx + at;

    for (int i = 0; i < 4; i++)
        v[i] = (at + i < j->k ? x[i] : 0.0f) * hx_f16_to(suh[i]);
}

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

__device__ static inline void copy16(void *to, const void *from)
{
    const uint32_t dst = (uint32_t)__cvta_generic_to_shared(to);

    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(from));
}

__device__ static inline void copy_commit(void)
{
    asm volatile("cp.async.commit_group;");
}

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

/* The same, known when this is compiled. */
template <int N> __device__ static inline void copy_wait_but(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

#define MMA(name, type)                                                                  \
    __device__ static inline void name(int32_t c[4], uint32_t a0, uint32_t a1,           \
                                       uint32_t a2, uint32_t a3, uint32_t b0,            \
                                       uint32_t b1)                                      \
    {                                                                                    \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." type ".s8.s32 "            \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"             \
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                    \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));            \
    }
MMA(mma_u8, "u8")
MMA(mma_s8, "s8")
#undef MMA

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

/* The term of canon.h, step 4, of the sums of planes i and j. */
template <bool HALF>
__device__ static inline float term(const int32_t lo[2], const int32_t hi[2],
                                    hx_cuda_scale s)
{
    if (HALF)
        return hx_canon_term_half(256 * hi[0] + lo[0], 256 * hi[1] + lo[1], s.q);
    return hx_canon_term_mul1(
        (int32_t)(254u * (uint32_t)lo[0] + (uint32_t)lo[1] - 512u * (uint32_t)s.sum),
        s.sum, s.q);
}

/* ---- the tree (canon.h, step 5) -------------------------------------------- */

/* Takes term b of a quad. level[0]: an odd term; level[1]: a finished subtree of 2, after
 * the last of 4. Quads of at most two terms keep their sum in level[0]. */
template <int SLOTS>
__device__ static inline void tree_put(float level[SLOTS], int b, float t)
{
    if ((b & 1) == 0)
        level[0] = t;
    else if (SLOTS == 1)
        level[0] = level[0] + t;
    else
        level[1] = (b & 2) == 0 ? level[0] + t : level[1] + (level[0] + t);
}

/* The sum of n terms, at most 4: what is left joins from the right. */
template <int SLOTS>
__device__ static inline float tree_get(const float level[SLOTS], int n)
{
    if (SLOTS == 1 || n == 1)
        return level[0];
    return n == 3 ? level[1] + level[0] : level[1];
}

__device__ static inline float4 plus(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Joins the first n of eight neighbours into v[0]. */
__device__ static inline void join8(float4 v[8], int n)
{
#pragma unroll
    for (int w = 1; w < 8; w *= 2)
#pragma unroll
        for (int i = 0; i < 8; i += 2 * w)
            if (i + w < n)
                v[i] = plus(v[i], v[i + w]);
}

/* Four outputs of n splits, step floats apart. Eight at a time, so that their loads
 * overlap. */
__device__ static float4 join(const float *part, int64_t step, int n)
{
    float4 level[MAX_LEVELS], t = make_float4(0, 0, 0, 0);
    bool any = false;
    const int n_batch = (n + 7) / 8;

    for (int b = 0; b < n_batch; b++) {
        const int have = n - 8 * b;
        float4 v[8];

#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = i < have ? __ldcg((const float4 *)(part + (8 * b + i) * step))
                            : make_float4(0, 0, 0, 0);
        join8(v, have);
        bool carry = true;
#pragma unroll
        for (int l = 0; l < MAX_LEVELS; l++) {
            const bool full = (b >> l & 1) != 0;

            if (carry && full)
                v[0] = plus(level[l], v[0]);
            else if (carry)
                level[l] = v[0];
            carry = carry && full;
        }
    }
#pragma unroll
    for (int l = 0; l < MAX_LEVELS; l++)
        if ((n_batch >> l & 1) != 0) {
            t = any ? plus(level[l], t) : level[l];
            any = true;
        }
    return t;
}

/* The first of a lane's four outputs. */
__device__ static inline int64_t col_of(void)
{
    return (int64_t)blockIdx.x * GROUP_COLS + 4 * (threadIdx.x & 31);
}

/* canon.h, step 6: y of four neighbouring outputs a lane. svh: theirs. */
__device__ static void finish(const hx_cuda_job *j, int64_t row, float4 t,
                              const uint16_t svh[4])
{
    const int64_t col = col_of();
    const uint16_t *bias = (const uint16_t *)j->bias;
    float v[4] = { t.x, t.y, t.z, t.w };

    hx_cuda_rotate(v);
    for (int i = 0; i < 4; i++)
        if (col + i < j->n) {
            float y = v[i] * hx_f16_to(svh[i]);

            if (bias != NULL)
                y = y + hx_f16_to(bias[col + i]);
            j->y[row * j->ldy + col + i] = y;
        }
}

/* True in the thread block that comes last of the group's splits. */
__device__ static bool is_last(int *ticket, int n_split)
{
    __shared__ int last;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == n_split - 1;
        if (last)
            *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return last != 0;
}

/* ---- the kernel ------------------------------------------------------------- */

/* The splits' sums of a row and the thread block's outputs. */
__device__ static inline float *part_of(const product &p, const hx_cuda_job *j, int r)
{
    return p.area.part +
           ((j->slot + row_of(j, r)) * gridDim.x + blockIdx.x) * gridDim.y * GROUP_COLS;
}

/* A block's 8 rows of 8 tiles, by one quad: two rows a warp. */
template <int K2>
__device__ static inline void fetch_tiles(const product &p, const hx_cuda_job *j,
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
__device__ static inline void fetch_planes(const product &p, const hx_cuda_job *j,
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
multiply_quad(const product &p, const hx_cuda_job *j, int mine, const uint8_t *tiles,
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
__device__ static inline void join_quads(const hx_cuda_job *j, const product &p,
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
    exl3_rows(const __grid_constant__ product p, hx_cuda_codebook cb)
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
        copy_commit();
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

/* ---- one row ------------------------------------------------------------------ */

/* With one row of activations the columns of B are many: columns 2 c and 2 c + 1 hold its
 * two planes in the k-slots of lanes whose q is c and zeros elsewhere, so that a lane's
 * sums are those of its own weights, whatever its neighbours have. A lane takes the 32
 * stream positions of an output and the next but seven, all 16 inputs of the tile: K whole
 * words, and every window lies at a place that is known when this is compiled. */

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

/* The window that ends with position p of a run; r: the word before it, then its words.
 * Windows that lie at a multiple of 8 in a word are taken by one byte permutation, others
 * are moved there. */
template <int K> __device__ static inline uint32_t row_window(const uint32_t *r, int p)
{
    const int end = K * (p + 1), i = (end - 1) >> 5, at = 31 - ((end - 1) & 31);

    if (at > 16) { /* in two words */
        const int right = at > 24 ? at - 8 : at;

        return __byte_perm(__funnelshift_r(r[i + 1], r[i], right), 0,
                           at == right ? 0x4410 : 0x4421);
    }
    const int left = -at & 7;

    return __byte_perm(r[i + 1] << left, 0,
                       at + left == 0   ? 0x4410
                       : at + left == 8 ? 0x4421
                                        : 0x4432);
}

/* A lane's run, and the last word of the run before it in the ring. */
template <int K>
__device__ static inline void row_words(uint32_t r[K + 1], const uint32_t *tiles,
                                        int lane)
{
    constexpr int wide = K % 4 == 0 ? 4 : K % 2 == 0 ? 2 : 1;
    const uint32_t *run = tiles + lane * K;
    const int before = (lane & 24) + ((lane - 1) & 7);

#pragma unroll
    for (int i = 0; i < K; i += wide)
        if constexpr (wide == 4) {
            const uint4 v = *(const uint4 *)(run + i);
            r[i + 1] = v.x, r[i + 2] = v.y, r[i + 3] = v.z, r[i + 4] = v.w;
        } else if constexpr (wide == 2) {
            const uint2 v = *(const uint2 *)(run + i);
            r[i + 1] = v.x, r[i + 2] = v.y;
        } else {
            r[i + 1] = run[i];
        }
    if constexpr (wide == 4) /* read, they would lie in few banks */
        r[0] = __shfl_sync(~0u, r[K], before);
    else
        r[0] = tiles[before * K + K - 1];
}

/* A row of 4 * SETS tiles: c[2]: sums of the sets or, of one, of every other mma. */
template <int K, int SETS>
__device__ static inline void row_tiles(int32_t c[2][4], const uint8_t *tiles,
                                        const uint4 *act, int lane)
{
    uint32_t r[SETS][K + 1];

#pragma unroll
    for (int set = 0; set < SETS; set++)
        row_words<K>(r[set], (const uint32_t *)(tiles + set * 128 * K), lane);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const uint4 b = act[q];

#pragma unroll
        for (int set = 0; set < SETS; set++) {
            uint32_t s[8];

#pragma unroll
            for (int i = 0; i < 8; i++)
                s[i] = row_window<K>(r[set], 8 * q + i) * HX_EXL3_MUL1;
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
__device__ static inline void row_planes(const product &p, const hx_cuda_job *j,
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
__device__ static inline void row_multiply(const product &p, int mine, uint8_t *ring,
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

            copy_wait_but<stages - 2>();
            __syncwarp();
            if (left-- > 0)
                row_fetch<bytes>(ring + 2 * ((t - 1) & (stages - 1)) * bytes, from, pitch,
                                 lane);
            copy_commit();
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
    exl3_row(const __grid_constant__ product p)
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
        copy_commit();
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

/* ---- 5 to 16 rows on Hopper --------------------------------------------------- */

/* 4 RQ rows are 8 RQ columns of 64 outputs x 32 k-slots, the planes of a row neighbours.
 * They lie in memory as shared memory wants them: for each 64 inputs, a stage, RQ * 2048
 * bytes, of them for each two rows of tiles a matrix of hx_wgmma_matrix whose rows are the
 * columns; in these, for each row of tiles, the inputs 2 q, 2 q + 1, 2 q + 8, 2 q + 9, all
 * q of one before the next, each four times. */
#define COLUMN_STAGES 3

template <int K2, int RQ>
constexpr int column_stage = (2048 * RQ + 512 * K2 + 1023) / 1024 * 1024;

/* Row quads of a product with columns. */
#define COLUMN_RQ(rows) ((rows) <= 8 ? 2 : 4)

/* Grid (blocks of k / 4, 4 * rq), 128 threads: a warp makes one block of one row; absent
 * rows are zeros. */
__global__ void __launch_bounds__(QUAD)
    exl3_to_columns(const __grid_constant__ hx_cuda_job j, int64_t n_block, int rq,
                    hx_cuda_area area)
{
    const int lane = threadIdx.x & 31, t = lane >> 2, r = blockIdx.y;
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
    uint8_t *to = (uint8_t *)area.plane + (b * 4 + (t >> 1)) * (1024 * rq) + r * 256 +
                  4 * (lane & 3);
    for (int p = 0; p < 2; p++)
        for (int m = 0; m < 4; m++)
            *(uint32_t *)(to + p * 128 + 16 * ((4 * (t & 1) + m) ^ ((2 * r + p) & 7))) =
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

/* Stages of 64 inputs of a quad, filled by its first thread. */
struct column_pipe {
    uint8_t *ring;
    uint32_t full, empty; /* [stages] barriers */
    const uint8_t *tiles, *columns;
    int64_t pitch; /* of a row of tiles */
    int steps;     /* of all */
    int at, phase; /* the stage in use, and its turn's parity */
};

template <int K2, int RQ>
__device__ static inline void fetch_stage_tiles(const column_pipe &s, int step, int at)
{
    const uint32_t to = hx_shared_of(s.ring + at * column_stage<K2, RQ> + 2048 * RQ);

    hx_bar_expect(s.full + 8 * at, 2048 * RQ + 512 * K2);
    for (int r = 0; r < 4; r++)
        hx_bulk_copy(to + r * 128 * K2, s.tiles + (4 * (int64_t)step + r) * s.pitch,
                     128 * K2, s.full + 8 * at);
}

template <int K2, int RQ>
__device__ static inline void fetch_stage_columns(const column_pipe &s, int step, int at)
{
    hx_bulk_copy(hx_shared_of(s.ring + at * column_stage<K2, RQ>),
                 s.columns + (int64_t)step * (2048 * RQ), 2048 * RQ, s.full + 8 * at);
}

/* A stage's products onto d[tile], or as its first. While the tensor cores have one tile,
 * the next is decoded. The stage before is empty once two groups of this one have begun. */
template <int K2, int RQ>
__device__ static inline void multiply_stage(const column_pipe &s, int step,
                                             uint32_t a[2][8], int32_t d[2][4 * RQ])
{
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const int before = s.at == 0 ? COLUMN_STAGES - 1 : s.at - 1;
    const uint8_t *stage = s.ring + s.at * column_stage<K2, RQ>;
    const uint8_t *tiles = stage + 2048 * RQ + 2 * warp * 16 * K2;
    /* The shuffle tells the compiler that all lanes have the same. */
    const uint64_t b = hx_wgmma_matrix(__shfl_sync(~0u, hx_shared_of(stage), 0));

#pragma unroll
    for (int t = 0; t < 4; t++) {
        const uint64_t now = b + (uint32_t)((t >> 1) * 64 * RQ + (t & 1) * 4);

#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            uint32_t *w = a[tile];

            hx_wgmma_wait_older();
#pragma unroll
            for (int i = 0; i < 8; i++)
                HX_PIN(w[i], "r");
            if (t == 0 && tile == 1 && step > 0 && lane == 0)
                hx_bar_arrive(s.empty + 8 * before);
            __syncwarp();
            hx_cuda_windows<K2>((const uint32_t *)(tiles + (8 * t + tile) * 16 * K2),
                                lane, w);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                w[i] *= HX_EXL3_MUL1;
                HX_PIN(w[i], "r");
            }
            hx_wgmma_begin();
            wgmma_u8<RQ>(d[tile], w[0], w[4], w[1], w[5], now, (step & 1) + t);
            wgmma_u8<RQ>(d[tile], w[2], w[6], w[3], w[7], now + 2, 1);
            hx_wgmma_commit();
        }
        if (t == 1 && (threadIdx.x & (QUAD - 1)) == 0 && step > 0 &&
            step - 1 + COLUMN_STAGES < s.steps) {
            const int next = step - 1 + COLUMN_STAGES;

            hx_bar_wait(s.empty + 8 * before, s.at == 0 ? s.phase ^ 1 : s.phase);
            fetch_stage_tiles<K2, RQ>(s, next, before);
            fetch_stage_columns<K2, RQ>(s, next, before);
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
    float level[RQ][4][2];

    for (int b = 0; b < mine; b++, scale += 4 * RQ) {
        hx_cuda_scale now[RQ];

#pragma unroll
        for (int rq = 0; rq < RQ; rq++)
            *(uint2 *)&now[rq] =
                __ldcg((const uint2 *)scale + 4 * rq + (threadIdx.x & 3));
        for (int half = 0; half < 2; half++) {
            hx_bar_wait(s.full + 8 * s.at, s.phase);
            multiply_stage<K2, RQ>(s, 2 * b + half, a, d);
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

                tree_put<2>(level[rq][i], b, term<false>(sum, sum, now[rq]));
            }
    }
    __syncthreads(); /* to lies where the stages were */
    if (mine > 0)
#pragma unroll
        for (int rq = 0; rq < RQ; rq++)
            to[QUAD * rq + (threadIdx.x & (QUAD - 1))] = make_float4(
                tree_get<2>(level[rq][0], mine), tree_get<2>(level[rq][1], mine),
                tree_get<2>(level[rq][2], mine), tree_get<2>(level[rq][3], mine));
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
__global__ void __launch_bounds__(QUAD *(RQ == 4 ? 4 : 6))
    exl3_columns(const __grid_constant__ product p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t stages[];
    __shared__ uint64_t bar[MAX_QUADS][2 * COLUMN_STAGES];
    const int quad = threadIdx.x / QUAD, me = threadIdx.x & (QUAD - 1);
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
    s.pitch = p.n_pad * K2;
    s.tiles = (const uint8_t *)j->trellis + block0 * 8 * s.pitch +
              (int64_t)blockIdx.x * (128 * K2);
    s.columns = (const uint8_t *)p.area.plane + block0 * (4096 * RQ);
    s.steps = 2 * mine;
    s.at = s.phase = 0;
    if (me == 0) {
        for (int i = 0; i < COLUMN_STAGES; i++) {
            hx_bar_init(s.full + 8 * i, 1);
            hx_bar_init(s.empty + 8 * i, 4);
        }
        hx_bar_init_done();
        for (int i = 0; i < COLUMN_STAGES && i < s.steps; i++)
            fetch_stage_tiles<K2, RQ>(s, i, i);
    }
    __syncthreads();
    hx_cuda_in_turn();
    if (me == 0)
        for (int i = 0; i < COLUMN_STAGES && i < s.steps; i++)
            fetch_stage_columns<K2, RQ>(s, i, i);
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

/* ---- launching -------------------------------------------------------------- */

/* How the inputs are split: quads of a thread block and 128-input blocks of a quad,
 * powers of two, so that each holds a subtree. */
struct cut {
    int quads, bps;
    int64_t splits;
};

/* 128 x 128 blocks of weights a multiprocessor. */
static int64_t load_of(const hx_cuda_shape *s, int n_sm)
{
    return s->n_pad / GROUP_COLS * s->n_job * (s->k_pad / 128) / n_sm;
}

/* Whether the kernel for one row takes it. */
static bool is_one_row(const hx_cuda_shape *s)
{
    return s->rows == 1 && s->codebook == HX_CB_MUL1 && s->k2 % 2 == 0;
}

/* Sets of 64 outputs of a warp: one where there are few blocks of weights. */
static int row_sets(cut c)
{
    return c.quads <= 4 && c.bps == 1 ? 1 : 2;
}

static size_t row_bytes(const hx_cuda_shape *s, cut c)
{
    return (size_t)c.quads * (2 * (size_t)row_stages(row_sets(c)) * 128 * s->k2 +
                              (size_t)c.bps * ROW_BLOCK) +
           32 + ROW_ZERO;
}

/* Of one row, quads being its parts: some 15 warps for every multiprocessor, at once. */
static cut row_cut(const hx_cuda_shape *s, int n_sm)
{
    const int64_t blocks = s->k_pad / 128, load = load_of(s, n_sm);
    cut c = { s->quads, s->bps, 0 };

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

/* Whether a product of the shape has its rows as columns. */
static bool has_columns(const hx_cuda_shape *s)
{
    int dev, cc = 0;

    return !s->listed && s->rows > HX_CUDA_FEW_ROWS && s->codebook == HX_CB_MUL1 &&
           cudaGetDevice(&dev) == cudaSuccess &&
           cudaDeviceGetAttribute(&cc, cudaDevAttrComputeCapabilityMajor, dev) ==
               cudaSuccess &&
           cc == 9;
}

/* Long ways for a quad once there are enough of them: a beginning and an end cost as much
 * as 20 tiles. */
static cut column_cut(const hx_cuda_shape *s, int n_sm)
{
    const int64_t blocks = s->k_pad / 128, load = load_of(s, n_sm);
    const bool wide = s->rows > 8;
    cut c = { s->quads, s->bps, 0 };

    if (c.quads == 0) {
        c.quads = load < 8 ? wide ? 2 : 4 : load < 20 ? 4 : 2;
        c.bps = load < 8 ? wide ? 2 : 1 : HX_CUDA_MAX_BPS;
        while (c.quads > 1 && c.quads / 2 * c.bps >= blocks)
            c.quads /= 2;
    }
    c.splits = (blocks + c.quads * c.bps - 1) / (c.quads * c.bps);
    return c;
}

/* Measured on an H200 (132 multiprocessors), by their load: with few blocks of weights, the quads of a thread block share the join; with many, small
 * thread blocks even out. */
static cut cut_of(const hx_cuda_shape *s, int n_sm)
{
    const bool half = s->codebook != HX_CB_MUL1;
    const int rq = s->rows <= HX_CUDA_FEW_ROWS ? 1 : s->rows <= 8 ? 2 : 4;
    const int64_t blocks = s->k_pad / 128, load = load_of(s, n_sm);
    cut c = { s->quads, s->bps, 0 };

    if (is_one_row(s))
        return row_cut(s, n_sm);
    if (has_columns(s))
        return column_cut(s, n_sm);
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
static void area_parts(const hx_cuda_shape *s, int n_sm, size_t part[3])
{
    const int64_t slots =
        has_columns(s) ? HX_MAX(s->slots, (int64_t)4 * COLUMN_RQ(s->rows)) : s->slots;
    const size_t blocks = (size_t)(slots * (s->k_pad / 128));

    part[0] = blocks * (has_columns(s) ? 4 * PLANE : PLANE);
    part[1] = (blocks * sizeof(hx_cuda_scale) + 255) / 256 * 256;
    part[2] = (size_t)(slots * s->n_pad * cut_of(s, n_sm).splits) * sizeof(float);
}

size_t hx_cuda_area_bytes(const hx_cuda_shape *s, int n_sm)
{
    size_t part[3];

    area_parts(s, n_sm, part);
    return part[0] + part[1] + part[2];
}

cudaError_t hx_cuda_area_of(const hx_cuda_shape *s, const hx_cuda_work *w,
                            hx_cuda_area *out)
{
    size_t part[3];

    area_parts(s, w->n_sm, part);
    if (part[0] + part[1] + part[2] > w->bytes ||
        s->n_pad / GROUP_COLS * s->n_job > w->n_ticket)
        return cudaErrorInvalidValue;
    out->plane = (uint2 *)w->p;
    out->scale = (hx_cuda_scale *)((char *)w->p + part[0]);
    out->part = (float *)((char *)w->p + part[0] + part[1]);
    out->ticket = w->ticket;
    return cudaSuccess;
}

/* A kernel for all thread blocks of a cut. */
template <class... P>
static cudaError_t start(void (*kernel)(P...), const hx_cuda_shape *s, cut c, int threads,
                         size_t bytes, const hx_cuda_work *w, cudaStream_t stream, P... a)
{
    const dim3 grid((unsigned)(s->n_pad / GROUP_COLS), (unsigned)c.splits,
                    (unsigned)s->n_job);
    int dev, sm_bytes = 0;
    cudaError_t rc = cudaGetDevice(&dev);

    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sm_bytes,
                                    cudaDevAttrMaxSharedMemoryPerMultiprocessor, dev);
    /* One thread block more on one multiprocessor would leave another idle. */
    const int64_t per = ((int64_t)grid.x * grid.y * grid.z + w->n_sm - 1) / w->n_sm;
    if (per == 1 || (per <= 4 && is_one_row(s)))
        bytes = HX_MAX(bytes, (size_t)(sm_bytes / (per + 1)));
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)bytes);
    if (rc != cudaSuccess)
        return rc;
    return hx_cuda_launch(w->overlap, kernel, grid, dim3((unsigned)threads), bytes,
                          stream, a...);
}

template <int K2, int RQ, bool HALF>
static cudaError_t launch(const product &p, const hx_cuda_shape *s, const hx_cuda_work *w,
                          cudaStream_t stream)
{
    const cut c = cut_of(s, w->n_sm);
    const size_t rows = (size_t)p.rows, per_block = 1024 * K2 + rows * PLANE_STEP;

    if constexpr (RQ > 1 && !HALF)
        if (p.columns)
            return start(exl3_columns<K2, RQ>, s, c, QUAD * c.quads,
                         (size_t)(c.quads * COLUMN_STAGES * column_stage<K2, RQ>), w,
                         stream, p);
    const size_t bytes = (size_t)c.quads * HX_MAX((size_t)c.bps * per_block,
                                                  rows * GROUP_COLS * sizeof(float));

    return start(exl3_rows<K2, RQ, HALF>, s, c, QUAD * c.quads, bytes, w, stream, p,
                 hx_cuda_codebook_of(s->codebook));
}

template <int K2, bool HALF>
static cudaError_t launch_rows(const product &p, const hx_cuda_shape *s,
                               const hx_cuda_work *w, cudaStream_t stream)
{
    if constexpr (!HALF && K2 % 2 == 0)
        if (is_one_row(s)) {
            const cut c = cut_of(s, w->n_sm);

            return row_sets(c) == 1 ? start(exl3_row<K2 / 2, 1>, s, c, 64 * c.quads,
                                            row_bytes(s, c), w, stream, p)
                                    : start(exl3_row<K2 / 2, 2>, s, c, 32 * c.quads,
                                            row_bytes(s, c), w, stream, p);
        }
    return s->rows <= HX_CUDA_FEW_ROWS ? launch<K2, 1, HALF>(p, s, w, stream)
           : s->rows <= 8              ? launch<K2, 2, HALF>(p, s, w, stream)
                                       : launch<K2, 4, HALF>(p, s, w, stream);
}

static cudaError_t multiply(product *p, const hx_cuda_shape *s, const hx_cuda_work *w,
                            cudaStream_t stream)
{
    cudaError_t rc = hx_cuda_area_of(s, w, &p->area);
    const bool half = s->codebook != HX_CB_MUL1;

    if (rc != cudaSuccess)
        return rc;
    p->n_pad = s->n_pad;
    p->k_pad = s->k_pad;
    p->bps = cut_of(s, w->n_sm).bps;
    p->rows = s->rows;
    p->fresh = s->fresh;
    if (s->rows < 1 || s->rows > HX_CUDA_JOB_ROWS ||
        cut_of(s, w->n_sm).splits > 8 * ((1 << MAX_LEVELS) - 1))
        return cudaErrorInvalidValue;
#define CASE(k)                                                                          \
    case k:                                                                              \
        return half ? launch_rows<k, true>(*p, s, w, stream)                             \
                    : launch_rows<k, false>(*p, s, w, stream)
    switch (s->k2) {
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
        CASE(10);
        CASE(12);
        CASE(14);
        CASE(16);
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

cudaError_t hx_cuda_rows(const hx_cuda_job *job, const hx_cuda_shape *s,
                         const hx_cuda_work *w, cudaStream_t stream)
{
    const int64_t n_block = s->k_pad / 128;
    hx_cuda_shape shape = *s;
    product p = {};
    cudaError_t rc;

    shape.n_job = 1;
    shape.rows = job->rows;
    if ((rc = hx_cuda_area_of(&shape, w, &p.area)) != cudaSuccess)
        return rc;
    p.made = job->rows > HX_CUDA_FEW_ROWS || load_of(&shape, w->n_sm) >= MADE_LOAD;
    p.columns = has_columns(&shape);
    if (p.columns)
        rc = hx_cuda_launch(
            w->overlap, exl3_to_columns,
            dim3((unsigned)((n_block + 3) / 4), (unsigned)(4 * COLUMN_RQ(job->rows))),
            dim3(QUAD), 0, stream, *job, n_block, COLUMN_RQ(job->rows), p.area);
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
    product p = {};

    p.many = jobs;
    p.made = true;
    return multiply(&p, s, w, stream);
}
