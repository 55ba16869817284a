/* cuda_matmul.h - EXL3 products in the canonical arithmetic on the GPU, what their files
 * share; nobody else includes it.
 *
 * cuda_matmul.cu  the product and the choice of its kernel; up to 4 rows, and all rows of
 *                 experts, of the other codebooks and where there is no Hopper
 * cuda_one.cu     one row of MUL1, whole bits
 * cuda_columns.cu 5 to 16 rows of one matrix of MUL1 as columns of wgmma, on Hopper
 *
 * A thread block has 128 outputs and a part of the inputs; parts leave their subtree of the
 * sums (canon.h, step 5) in the work memory, and the last to come joins them. */
#ifndef HX_CUDA_MATMUL_H
#define HX_CUDA_MATMUL_H

#include <type_traits>

#include "dev/cuda.h"
#include "dev/cuda_tensor.h"

#define GROUP_COLS  128 /* outputs of a thread block: one rotation */
#define QUAD        128 /* threads: four warps, each two 16-column tiles */
#define MAX_QUADS   4   /* of a thread block, each with its own inputs */
#define MAX_LEVELS  5   /* of the join: 8 * 2^5 - 8 splits */
#define MOST_SHARED (HX_CUDA_LEAST_SHARED - 3072) /* bytes: the rest is static */

/* What the products of a launch are given. */
struct hx_product {
    hx_cuda_job one;
    const hx_cuda_job *many; /* NULL: one */
    hx_cuda_area area;
    int64_t n_pad, k_pad;
    int bps;  /* 128-input blocks of a quad */
    int rows; /* the most, for which shared memory is sized */
    bool fresh;
    bool made; /* the activations are in the area */
};

/* ---- inputs ------------------------------------------------------------- */

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

/* 16 bytes into shared memory. */
__device__ static inline void copy16(void *to, const void *from)
{
    const uint32_t dst = (uint32_t)__cvta_generic_to_shared(to);

    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(from));
}

/* ---- weights ---------------------------------------------------------------- */

/* A run: 32 stream positions, all 16 inputs of an output of a tile and of the next but
 * seven. With whole bits it is K words, and every window lies at a place that is known when
 * this is compiled. */

/* The window that ends with position p of a run; r: the word before it, then its words.
 * Windows that lie at a multiple of 8 in a word are taken by one byte permutation, others
 * are moved there. */
template <int K> __device__ static inline uint32_t run_window(const uint32_t *r, int p)
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

/* Run `at` of tiles, and the last word of the run before it in the ring, which lane `from`
 * takes. */
template <int K>
__device__ static inline void run_words(uint32_t r[K + 1], const uint32_t *tiles, int at,
                                        int before, int from)
{
    constexpr int wide = K % 4 == 0 ? 4 : K % 2 == 0 ? 2 : 1;
    const uint32_t *run = tiles + at * K;

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
        r[0] = __shfl_sync(~0u, r[K], from);
    else
        r[0] = tiles[before * K + K - 1];
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
__device__ static inline float4 join(const float *part, int64_t step, int n)
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
__device__ static inline void finish(const hx_cuda_job *j, int64_t row, float4 t,
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
__device__ static inline bool is_last(int *ticket, int n_split)
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

/* The splits' sums of a row and the thread block's outputs. */
__device__ static inline float *part_of(const hx_product &p, const hx_cuda_job *j, int r)
{
    return p.area.part +
           ((j->slot + row_of(j, r)) * gridDim.x + blockIdx.x) * gridDim.y * GROUP_COLS;
}

/* ---- launching -------------------------------------------------------------- */

/* How the inputs are split: quads of a thread block and 128-input blocks of a quad,
 * powers of two, so that each holds a subtree. */
struct hx_cut {
    int quads, bps;
    int64_t splits;
};

/* 128 x 128 blocks of weights a multiprocessor. */
static inline int64_t load_of(const hx_cuda_shape *s, int n_sm)
{
    return s->n_pad / GROUP_COLS * s->n_job * (s->k_pad / 128) / n_sm;
}

/* One row of MUL1: whether its kernel takes it, how it cuts, and the product. */
bool hx_cuda_one_takes(const hx_cuda_shape *s);
hx_cut hx_cuda_one_cut(const hx_cuda_shape *s, int n_sm);
cudaError_t hx_cuda_one(const hx_product *p, const hx_cuda_shape *s,
                        const hx_cuda_work *w, cudaStream_t stream);

/* Columns: the same, and their rows in the work memory. */
bool hx_cuda_columns_takes(const hx_cuda_shape *s, const hx_cuda_gpu *g);
hx_cut hx_cuda_columns_cut(const hx_cuda_shape *s, int n_sm);
int hx_cuda_columns_rows(int rows);
cudaError_t hx_cuda_to_columns(const hx_cuda_job *j, const hx_cuda_shape *s,
                               const hx_cuda_area *area, const hx_cuda_work *w,
                               cudaStream_t stream);
cudaError_t hx_cuda_columns(const hx_product *p, const hx_cuda_shape *s,
                            const hx_cuda_work *w, cudaStream_t stream);

/* A kernel for all thread blocks of a cut. */
template <class... P>
static cudaError_t start(void (*kernel)(P...), const hx_cuda_shape *s, hx_cut c,
                         int threads, size_t bytes, const hx_cuda_work *w,
                         cudaStream_t stream, P... a)
{
    const dim3 grid((unsigned)(s->n_pad / GROUP_COLS), (unsigned)c.splits,
                    (unsigned)s->n_job);

    /* One thread block more on one multiprocessor would leave another idle. */
    const int64_t per =
        ((int64_t)grid.x * grid.y * grid.z + w->gpu.n_sm - 1) / w->gpu.n_sm;
    if (per == 1 || (per <= 4 && hx_cuda_one_takes(s)))
        bytes = HX_MAX(bytes, w->gpu.sm_bytes / (size_t)(per + 1));
    const cudaError_t rc = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (rc != cudaSuccess)
        return rc;
    return hx_cuda_launch(w->overlap, kernel, grid, dim3((unsigned)threads), bytes,
                          stream, a...);
}

/* what() of the rate, twice the bits. */
template <class What> static cudaError_t with_k2(int k2, const What &what)
{
    switch (k2) {
    case 2:
        return what(std::integral_constant<int, 2>());
    case 3:
        return what(std::integral_constant<int, 3>());
    case 4:
        return what(std::integral_constant<int, 4>());
    case 5:
        return what(std::integral_constant<int, 5>());
    case 6:
        return what(std::integral_constant<int, 6>());
    case 7:
        return what(std::integral_constant<int, 7>());
    case 8:
        return what(std::integral_constant<int, 8>());
    case 10:
        return what(std::integral_constant<int, 10>());
    case 12:
        return what(std::integral_constant<int, 12>());
    case 14:
        return what(std::integral_constant<int, 14>());
    case 16:
        return what(std::integral_constant<int, 16>());
    default:
        return cudaErrorInvalidValue;
    }
}

#endif
