/* cuda_matmul.cu - products with EXL3 matrices on the GPU in the canonical arithmetic (canon.h):
 * the bits of cpu_matmul.c, for decode calls of 1 to 16 rows. Called through the operation table
 * in cuda.cu and, for experts, by cuda_moe.cu. Never allocates, synchronises or reads back.
 *
 * The integer sum of a block comes from the tensor cores: the 32-bit product of a state and the
 * codebook's multiplier is four unsigned bytes, and those are four k-slots of an
 * mma.m16n8k32 (s8 x u8) whose A operand repeats the activation four times. Rows 0 to 7 of A are
 * the planes i of up to eight activation rows, rows 8 to 15 their planes j (canon.h, step 2), so
 * one pass over the weights serves both planes. */
#include "dev/cuda.h"
#include "dev/fmt_exl3.h"

#define GROUP_COLS 128                /* outputs of one thread block: one Hadamard block */
#define WARPS      8                  /* each one 16-column tile of the group */
#define THREADS    (32 * WARPS)
#define ROWS_MMA   8                  /* activation rows in one A operand */
#define MAX_BPS    8                  /* 128-input blocks of one thread block */

/* ---- pieces ------------------------------------------------------------ */

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
    case 0: asm volatile("cp.async.wait_group 0;"); break;
    case 1: asm volatile("cp.async.wait_group 1;"); break;
    case 2: asm volatile("cp.async.wait_group 2;"); break;
    case 3: asm volatile("cp.async.wait_group 3;"); break;
    case 4: asm volatile("cp.async.wait_group 4;"); break;
    case 5: asm volatile("cp.async.wait_group 5;"); break;
    case 6: asm volatile("cp.async.wait_group 6;"); break;
    default: asm volatile("cp.async.wait_group 7;"); break;
    }
}

__device__ static inline void mma_s8u8(int32_t c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The rotation of 128 values, four neighbours a lane; the order of canon.h. */
__device__ static inline void rotate(float v[4])
{
    const int lane = threadIdx.x & 31;
    float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];

    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
    for (int w = 1; w < 32; w *= 2)
        for (int i = 0; i < 4; i++) {
            const float o = __shfl_xor_sync(~0u, v[i], w);

            v[i] = (lane & w) != 0 ? o - v[i] : v[i] + o;
        }
    for (int i = 0; i < 4; i++)
        v[i] = v[i] * HX_CANON_ROOT;
}

/* The eight 16-bit windows of a lane: stream positions 8 lane … 8 lane + 7 of a tile in shared
 * memory. Positions whose windows lie in the same two words share them. */
template <int K2>
__device__ static inline void windows(const uint32_t *tile, int lane, uint32_t s[8])
{
    constexpr int words = 4 * K2;
    constexpr int per = K2 <= 8 ? 8 : K2 == 14 ? 2 : 4;

    for (int g = 0; g < 8; g += per) {
        const int end = ((8 * lane + g + per) * K2) >> 1;      /* bit after the group's last */
        const int w = (end - 1) >> 5, h = w == 0 ? words - 1 : w - 1;
        const uint32_t lo = tile[w], hi = tile[h];
        const int sh = 31 - ((end - 1) & 31);
        const uint32_t x = __funnelshift_r(lo, hi, sh), y = hi >> sh;

        for (int j = 0; j < per; j++) {
            const int p = 8 * lane + g + j + 1;
            const int down = K2 % 2 == 0 ? (per - 1 - j) * (K2 / 2) : end - ((p * K2) >> 1);

            s[g + j] = (down + 16 <= 32 ? x >> down : __funnelshift_r(x, y, down & 31)) & 0xFFFF;
        }
    }
}

/* ---- the kernel ----------------------------------------------------------- */

/* Activations of one block of one row, as the A operand wants them: for tile row t and q = lane & 3
 * the planes of inputs 2q, 2q + 1, 2q + 8, 2q + 9. */
struct act_block {
    uint32_t plane[8][4][2];          /* [tile row][q][i, j] */
};

template <int RG>
struct __align__(16) shared_head {
    act_block act[RG][MAX_BPS][ROWS_MMA];      /* [row group][block][row] */
    float     q[RG][MAX_BPS][ROWS_MMA];
    int32_t   sum[RG][MAX_BPS][ROWS_MMA];
    float     out[RG * ROWS_MMA][GROUP_COLS];
    int       last;
};

/* Rotates and quantises block b of row r (canon.h, steps 1 and 2), one warp. */
__device__ static void make_act(const hx_cuda_job *j, int64_t block, int r, act_block *out, float *q,
                                int32_t *sum)
{
    const int lane = threadIdx.x & 31;
    const int64_t at = block * 128 + 4 * lane;
    const float *x = j->x + r * j->ldx + at;
    const uint16_t *suh = (const uint16_t *)j->suh + at;
    float v[4];
    uint32_t peak = 0;
    int32_t a[4], total = 0;

    for (int i = 0; i < 4; i++)
        v[i] = (at + i < j->k ? x[i] : 0.0f) * hx_f16_to(suh[i]);
    rotate(v);
    for (int i = 0; i < 4; i++)
        peak = max(peak, hx_bits_of(v[i]) & 0x7FFFFFFFu);
    peak = __reduce_max_sync(~0u, peak);

    const float top = (float)HX_CANON_AMAX, m = hx_float_of(peak);
    const float inv = peak == 0 ? 0.0f : __fdiv_rn(top, m);
    for (int i = 0; i < 4; i++) {
        float t = v[i] * inv;

        t = t < top ? t : top;
        t = t > -top ? t : -top;
        a[i] = __float2int_rn(t);
        total += a[i];
    }
    total = __reduce_add_sync(~0u, total);
    if (lane == 0) {
        *q = __fdiv_rn(m, top);
        *sum = total;
    }
    /* Input 4 lane + i of the block: tile row lane / 4, row 4 (lane & 3) + i of the tile. */
    uint8_t *bytes = (uint8_t *)out->plane[lane >> 2];
    for (int i = 0; i < 4; i++) {
        const int row = 4 * (lane & 3) + i, slot = (row & 1) + 2 * (row >> 3);
        int pi, pj;

        hx_canon_planes(a[i], &pi, &pj);
        bytes[((row & 7) >> 1) * 8 + slot] = (uint8_t)pi;
        bytes[((row & 7) >> 1) * 8 + 4 + slot] = (uint8_t)pj;
    }
}

/* One thread block: 128 outputs, bps blocks of inputs, all rows. Grid (n_pad / 128, splits, jobs), 256
 * threads. Reads every trellis byte of its part once (16-byte copies, all in flight at once), writes
 * rows x 128 floats. Splits leave their subtree in scratch; the last one to come joins them in tree order,
 * rotates, scales and writes y. Shared: the head, then bps * 8 rows of 8 tiles. */
template <int K2, int RG>
__global__ void __launch_bounds__(THREADS) exl3_rows(const hx_cuda_job *jobs, hx_cuda_split sp)
{
    extern __shared__ __align__(16) uint8_t raw[];
    shared_head<RG> *sh = (shared_head<RG> *)raw;
    uint8_t *tiles = raw + sizeof(shared_head<RG>);
    const hx_cuda_job *j = &jobs[blockIdx.z];
    constexpr int tile_bytes = 16 * K2, row_bytes = 8 * tile_bytes, block_bytes = 8 * row_bytes;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rows = j->rows;
    const int64_t block0 = (int64_t)blockIdx.y * sp.bps, n_block = j->k_pad / 128;
    const int mine = (int)min((int64_t)sp.bps, n_block - block0);
    const int64_t pitch = j->n_pad / 16 * tile_bytes;      /* bytes of a row of tiles */

    if (rows == 0)
        return;
    const uint8_t *src = (const uint8_t *)j->trellis + block0 * 8 * pitch + (int64_t)blockIdx.x * row_bytes;
    for (int b = 0; b < mine; b++) {
        for (int i = threadIdx.x; i < block_bytes / 16; i += THREADS)
            copy16(tiles + b * block_bytes + i * 16,
                   src + (b * 8 + i * 16 / row_bytes) * pitch + i * 16 % row_bytes);
        copy_commit();
    }
    for (int i = warp; i < mine * RG * ROWS_MMA; i += WARPS) {
        const int b = i / (RG * ROWS_MMA), r = i % (RG * ROWS_MMA);
        act_block *out = &sh->act[r / ROWS_MMA][b][r % ROWS_MMA];

        if (r < rows)
            make_act(j, block0 + b, r, out, &sh->q[r / ROWS_MMA][b][r % ROWS_MMA],
                     &sh->sum[r / ROWS_MMA][b][r % ROWS_MMA]);
        else
            for (int k = lane; k < 64; k += 32)
                ((uint32_t *)out)[k] = 0;
    }

    const int g = lane >> 2, q = lane & 3;
    float level[4][RG][4];            /* finished subtrees of 1, 2, 4, 8 blocks */
    for (int b = 0; b < mine; b++) {
        int32_t c[RG][2][4] = {};

        copy_wait(mine - 1 - b);
        __syncthreads();
        const uint8_t *base = tiles + b * block_bytes + warp * tile_bytes;
#pragma unroll 2
        for (int t = 0; t < 8; t++) {
            uint32_t s[8];

            windows<K2>((const uint32_t *)(base + t * row_bytes), lane, s);
            for (int i = 0; i < 8; i++)
                s[i] *= HX_EXL3_MUL1;
            for (int rg = 0; rg < RG; rg++) {
                const uint32_t pi = sh->act[rg][b][g].plane[t][q][0], pj = sh->act[rg][b][g].plane[t][q][1];
                const uint32_t a0[4] = { __byte_perm(pi, 0, 0x0000), __byte_perm(pj, 0, 0x0000),
                                         __byte_perm(pi, 0, 0x1111), __byte_perm(pj, 0, 0x1111) };
                const uint32_t a1[4] = { __byte_perm(pi, 0, 0x2222), __byte_perm(pj, 0, 0x2222),
                                         __byte_perm(pi, 0, 0x3333), __byte_perm(pj, 0, 0x3333) };

                mma_s8u8(c[rg][0], a0, s[0], s[1]);
                mma_s8u8(c[rg][0], a1, s[2], s[3]);
                mma_s8u8(c[rg][1], a0, s[4], s[5]);
                mma_s8u8(c[rg][1], a1, s[6], s[7]);
            }
        }
        for (int rg = 0; rg < RG; rg++)
            for (int i = 0; i < 4; i++) {
                const int32_t total = sh->sum[rg][b][g];
                const int32_t *cc = c[rg][i >> 1];
                const uint32_t sum = 254u * (uint32_t)cc[i & 1] + (uint32_t)cc[2 + (i & 1)] -
                                     512u * (uint32_t)total;
                float t = fmaf((float)(int32_t)sum, HX_CANON_K_INV, HX_CANON_C2 * (float)total) *
                          sh->q[rg][b][g];

#pragma unroll
                for (int l = 0; l < 4; l++) {
                    if ((b >> l & 1) == 0) {
                        level[l][rg][i] = t;
                        break;
                    }
                    t = level[l][rg][i] + t;
                }
            }
    }
    /* What is left of the tree joins from the right. */
    for (int rg = 0; rg < RG; rg++)
        for (int i = 0; i < 4; i++) {
            const int r = rg * ROWS_MMA + g, col = 16 * warp + 8 * (i >> 1) + 2 * q + (i & 1);
            float t = 0;
            bool any = false;

#pragma unroll
            for (int l = 0; l < 4; l++)
                if ((mine >> l & 1) != 0) {
                    t = any ? level[l][rg][i] + t : level[l][rg][i];
                    any = true;
                }
            if (r < rows)
                sh->out[r][col] = t;
        }
    __syncthreads();

    const int n_split = gridDim.y;
    if (n_split > 1) {
        float *part = sp.scratch + (((int64_t)blockIdx.z * gridDim.x + blockIdx.x) * n_split) *
                                       (RG * ROWS_MMA * GROUP_COLS);
        int *ticket = sp.ticket + (int64_t)blockIdx.z * gridDim.x + blockIdx.x;

        for (int i = threadIdx.x; i < rows * GROUP_COLS; i += THREADS)
            part[(int64_t)blockIdx.y * (RG * ROWS_MMA * GROUP_COLS) + i] = sh->out[i >> 7][i & 127];
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            sh->last = atomicAdd(ticket, 1) == n_split - 1;
            if (sh->last)
                *ticket = 0;
        }
        __syncthreads();
        if (!sh->last)
            return;
        __threadfence();
        for (int i = threadIdx.x; i < rows * GROUP_COLS; i += THREADS) {
            float lv[8];

            for (int s = 0; s < n_split; s++)
                hx_canon_tree_add(lv, 1, (uint32_t)s,
                                  __ldcg(&part[(int64_t)s * (RG * ROWS_MMA * GROUP_COLS) + i]));
            sh->out[i >> 7][i & 127] = hx_canon_tree_sum(lv, 1, (uint32_t)n_split);
        }
        __syncthreads();
    }
    for (int r = warp; r < rows; r += WARPS) {
        const int64_t col = (int64_t)blockIdx.x * GROUP_COLS + 4 * lane;
        const uint16_t *svh = (const uint16_t *)j->svh + col, *bias = (const uint16_t *)j->bias;
        float v[4];

        for (int i = 0; i < 4; i++)
            v[i] = sh->out[r][4 * lane + i];
        rotate(v);
        for (int i = 0; i < 4; i++)
            if (col + i < j->n) {
                float y = v[i] * hx_f16_to(svh[i]);

                if (bias != NULL)
                    y = y + hx_f16_to(bias[col + i]);
                j->y[r * j->ldy + col + i] = y;
            }
    }
}

/* ---- launching -------------------------------------------------------------- */

template <int K2, int RG>
static cudaError_t launch(const hx_cuda_job *jobs, int n_job, int64_t n_pad, int64_t k_pad,
                          hx_cuda_split sp, cudaStream_t stream)
{
    const size_t bytes = sizeof(shared_head<RG>) + (size_t)sp.bps * 64 * 16 * K2;
    const int64_t splits = (k_pad / 128 + sp.bps - 1) / sp.bps;
    const dim3 grid((unsigned)(n_pad / GROUP_COLS), (unsigned)splits, (unsigned)n_job);
    cudaError_t rc = cudaFuncSetAttribute(exl3_rows<K2, RG>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)bytes);

    if (rc != cudaSuccess)
        return rc;
    exl3_rows<K2, RG><<<grid, THREADS, bytes, stream>>>(jobs, sp);
    return cudaGetLastError();
}

cudaError_t hx_cuda_exl3_rows(const hx_cuda_job *jobs, int n_job, int rows, int k2, int64_t n_pad,
                              int64_t k_pad, hx_cuda_split sp, cudaStream_t stream)
{
#define CASE(k)                                                                           \
    case k:                                                                               \
        return rows <= ROWS_MMA ? launch<k, 1>(jobs, n_job, n_pad, k_pad, sp, stream)     \
                                : launch<k, 2>(jobs, n_job, n_pad, k_pad, sp, stream)
    switch (k2) {
        CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7);
        CASE(8); CASE(10); CASE(12); CASE(14); CASE(16);
    default:
        return cudaErrorInvalidValue;
    }
#undef CASE
}

/* How many 128-input blocks a thread block takes: a power of two, so that it holds a subtree; small
 * enough that all multiprocessors have work twice over, large enough that the joins stay few. */
int hx_cuda_exl3_bps(int64_t n_pad, int64_t k_pad, int n_job, int n_sm)
{
    const int64_t groups = n_pad / GROUP_COLS * n_job, blocks = k_pad / 128;
    int bps = MAX_BPS;

    while (bps > 1 && groups * ((blocks + bps - 1) / bps) < 2 * n_sm)
        bps /= 2;
    while ((blocks + bps - 1) / bps > 64 && bps < MAX_BPS)
        bps *= 2;
    return bps;
}
