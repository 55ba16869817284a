/* cuda.h - what the CUDA files of dev share among themselves; nobody else includes it.
 * Products with EXL3 matrices for decode calls: their jobs, their work memory, and the
 * device functions that make and end them. */
#ifndef HX_CUDA_H
#define HX_CUDA_H

#include <cuda_runtime.h>

#include "dev/cuda_dev.h"
#include "dev/fmt_exl3.h"

enum {
    HX_CUDA_JOB_ROWS = 16, /* most rows of one job */
    HX_CUDA_FEW_ROWS = 4,  /* of a product that makes its activations itself */
    HX_CUDA_MAX_BPS = 4    /* most 128-input blocks of four warps */
};

/* One product y[row, 0..n) = W x[row, 0..k) (+ bias) of up to HX_CUDA_JOB_ROWS rows.
 * Device memory; trellis 16-byte aligned, it may be mapped host memory. */
typedef struct {
    const void *trellis, *suh, *svh, *bias;
    const float *x; /* may be NULL where the activations are there already */
    float *y;
    int64_t ldx, ldy, n, k;
    const int32_t *row; /* [rows] row of x and y; NULL: 0, 1, 2 … */
    int32_t slot;       /* added to the row: its place in the work memory */
    int32_t rows;       /* 0: nothing to do */
} hx_cuda_job;

/* Factors of a quantised block (canon.h, step 2). */
typedef struct {
    float q;
    int32_t sum;
} hx_cuda_scale;

/* Device memory that products use: one owner, one stream. */
typedef struct {
    int *ticket; /* [n_ticket], zero between launches; n_pad / 128 for each job */
    int64_t n_ticket;
    void *p; /* [bytes], 256-byte aligned */
    size_t bytes;
    hx_cuda_gpu gpu;
    bool overlap; /* launches may overlap their ends */
} hx_cuda_work;

/* What jobs of one launch have in common. */
typedef struct {
    int64_t n_pad, k_pad;
    int k2, n_job, rows; /* rows: the most of any job */
    int64_t slots;       /* rows in the work memory */
    hx_codebook codebook;
    int quads, bps; /* 4 warps each, 1, 2 or 4, and 128-input blocks of each,
                     * 1, 2 or 4; 0: choose */
    bool listed;    /* the jobs are an array, hx_cuda_jobs() */
    bool fresh;     /* they come from the launch just before */
} hx_cuda_shape;

/* Work memory, as laid out for a shape. */
typedef struct {
    uint2 *plane;         /* [slots, k_pad / 128, 32] */
    hx_cuda_scale *scale; /* [slots, k_pad / 128] */
    float *part;          /* [slots, n_pad / 128, splits, 128] */
    int *ticket;
} hx_cuda_area;

size_t hx_cuda_area_bytes(const hx_cuda_shape *s, const hx_cuda_gpu *g);
cudaError_t hx_cuda_area_of(const hx_cuda_shape *s, const hx_cuda_work *w,
                            hx_cuda_area *out);

/* Products: hx_cuda_rows() one job, by value; hx_cuda_jobs() a device array [n_job] whose
 * activations are in the area already. */
cudaError_t hx_cuda_rows(const hx_cuda_job *job, const hx_cuda_shape *s,
                         const hx_cuda_work *w, cudaStream_t stream);
cudaError_t hx_cuda_jobs(const hx_cuda_job *jobs, const hx_cuda_shape *s,
                         const hx_cuda_work *w, cudaStream_t stream);

/* Constants of MCG and 3INST: product, sum, kept bits. The last one is an argument too,
 * as an instruction has room for one constant and the next step has another. */
typedef struct {
    uint32_t mul, add, keep;
} hx_cuda_codebook;

static inline hx_cuda_codebook hx_cuda_codebook_of(hx_codebook c)
{
    return c == HX_CB_MCG
               ? hx_cuda_codebook { HX_EXL3_MCG, 0, 0x8FFF8FFFu }
               : hx_cuda_codebook { HX_EXL3_3INST, HX_EXL3_3INST_ADD, 0x8FFF8FFFu };
}

/* ---- experts ------------------------------------------------------------ */

typedef hx_lease_mat hx_cuda_mat;
typedef hx_lease hx_cuda_expert;

/* hx_op_moe's arguments on the device; experts of one shape, rate by projection. */
typedef struct {
    float *y;
    const float *x;
    const int32_t *id;            /* [rows, active] */
    const hx_cuda_expert *expert; /* [n_expert] */
    int rows, active;
    int64_t d, f, d_pad, f_pad; /* model and expert width */
    int k2_gate, k2_up, k2_down;
    hx_codebook codebook;
    float limit;
    int quads, bps_in, bps_out; /* as in hx_cuda_shape */
    int n_expert, first, end;   /* looked at by hx_cuda_experts_many alone */
} hx_cuda_moe;

size_t hx_cuda_moe_bytes(const hx_cuda_moe *m, const hx_cuda_gpu *g);
cudaError_t hx_cuda_experts(const hx_cuda_moe *m, const hx_cuda_work *w,
                            cudaStream_t stream);

/* ---- many rows (cuda_gemm.h) --------------------------------------------- */

/* y[r, 0..n) = W x[r, 0..k) (+ bias), any format; the matrix is in device memory, the
 * trellis 16-byte aligned, or in mapped host memory. Halves on the tensor cores, f32 sums;
 * a row has the same bits in calls of any number of rows. */
typedef struct {
    const hx_mat *w;
    const float *x;
    float *y;
    int64_t rows, ldx, ldy;
    int block_rows; /* of a thread block, 64, 128 or 256; 0: choose. All give the same bits */
    int once; /* EXL3: decoded first, 1, or while multiplying, -1; 0: choose. So here */
} hx_cuda_many;

/* Work memory that takes all rows at once, and of many rows' EXL3 so much decoded that the
 * kernels are at their best; with less, but enough for one row (and of a plain format 128
 * outputs), they are taken in turns. */
size_t hx_cuda_many_bytes(const hx_mat *w, int64_t rows);
cudaError_t hx_cuda_rows_many(const hx_cuda_many *a, const hx_cuda_work *w,
                              cudaStream_t stream);

/* Routed experts in this arithmetic, any number of rows: y[r, a] of every id >= 0. Picks
 * are sorted by expert on the device, up to 63 places lost an expert, and worked on in
 * windows of so many places (a multiple of 256; 0: all); the largest that fits is taken.
 * An expert's weights are read once for every 256 of its picks, and once more where
 * windows meet. */
size_t hx_cuda_experts_many_bytes(const hx_cuda_moe *m, int64_t window);
cudaError_t hx_cuda_experts_many(const hx_cuda_moe *m, const hx_cuda_work *w,
                                 cudaStream_t stream);

/* head_matmul in this arithmetic; with less work memory than for all rows they are taken in
 * turns. */
size_t hx_cuda_heads_many_bytes(const hx_head_matmul_args *a, int64_t rows);
cudaError_t hx_cuda_heads_many(const hx_head_matmul_args *a, const hx_cuda_work *w,
                               cudaStream_t stream);

/* Launches with the permission to start while the launch before it ends. Every kernel so
 * launched waits before it lets the next one start: what is older than the launch before
 * is complete. */
template <class... P, class... A>
static cudaError_t hx_cuda_launch(bool overlap, void (*kernel)(P...), dim3 grid,
                                  dim3 block, size_t shared, cudaStream_t stream,
                                  A &&...args)
{
    cudaLaunchAttribute attr = {};
    cudaLaunchConfig_t cfg = {};

    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cfg.gridDim = grid;
    cfg.blockDim = block;
    cfg.dynamicSmemBytes = shared;
    cfg.stream = stream;
    cfg.attrs = &attr;
    cfg.numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelEx(&cfg, kernel, static_cast<A &&>(args)...);
}

/* Whether c's launches may overlap. Those on the side may not: what starts early there and
 * waits keeps the others out of its multiprocessor. */
#define hx_cuda_overlap(c) ((c)->gpu.overlap && !(c)->side.on)

/* As HX_LAUNCH of cuda_dev.h, of a kernel that waits for the launch before it. */
#define HX_LAUNCH_NEXT(c, op, err, kernel, grid, block, shared, ...)                     \
    do {                                                                                 \
        const dim3 grid_ = (grid);                                                       \
        const size_t shared_ = (shared);                                                 \
        cudaError_t rc_ = cudaSuccess;                                                   \
                                                                                         \
        if (shared_ > 32 * 1024)                                                         \
            rc_ = cudaFuncSetAttribute(                                                  \
                kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_);      \
        if (rc_ == cudaSuccess && grid_.x > 0 && grid_.y > 0 && grid_.z > 0)             \
            rc_ = hx_cuda_launch(hx_cuda_overlap(c), kernel, grid_, dim3(block),         \
                                 shared_, (c)->stream, __VA_ARGS__);                     \
        if (rc_ != cudaSuccess)                                                          \
            return hx_cuda_fail((err), (op), rc_);                                       \
    } while (0)

/* ---- device functions ----------------------------------------------------- */

/* Until here a kernel may run beside the one before it in the stream. */
__device__ static inline void hx_cuda_after_previous(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* From here on the next kernel may start, up to its own hx_cuda_after_previous(). */
__device__ static inline void hx_cuda_allow_next(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Both: for kernels that have nothing to do before. */
__device__ static inline void hx_cuda_in_turn(void)
{
    hx_cuda_after_previous();
    hx_cuda_allow_next();
}

/* The rotation of 128 values, four neighbours a lane; the order of canon.h. */
__device__ static inline void hx_cuda_rotate(float v[4])
{
    const int lane = threadIdx.x & 31;
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];

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

/* Eight windows of 16 bits, those of stream positions 8 lane … 8 lane + 7 of a tile in
 * shared memory. Positions that fit two words share them. A window that lies at a
 * multiple of 8 in a word is taken by one byte permutation; another is moved there by a
 * left shift, which the compiler may give to the multiplier. */
template <int K2>
__device__ static inline void hx_cuda_windows(const uint32_t *tile, int lane,
                                              uint32_t s[8])
{
    constexpr int words = 4 * K2;
    constexpr int per = K2 == 14 ? 2 : K2 <= 6 || K2 == 8 ? 8 : 4;

#pragma unroll
    for (int g = 0; g < 8; g += per) {
        const int end = ((8 * lane + g + per) * K2) >> 1; /* bit after the group's last */
        const int w = (end - 1) >> 5, h = w == 0 ? words - 1 : w - 1;
        const int sh = 31 - ((end - 1) & 31);
        const uint32_t lo = tile[w], hi = tile[h], x = __funnelshift_r(lo, hi, sh);
        const int far = (((g + per) * K2) >> 1) - (((g + 1) * K2) >> 1);
        const int d = far > 16 ? far - 16 : 0; /* z: the group's first window on top */
        const uint32_t z = far > 16 ? __funnelshift_r(lo, hi, sh + d) : x;

#pragma unroll
        for (int j = g; j < g + per; j++) {
            const int down = (((g + per) * K2) >> 1) - (((j + 1) * K2) >> 1);

            const bool on_z =
                down > 16 || (down >= d && (down - d) % 8 == 0 && down % 8 != 0);
            const int at = on_z ? down - d : down, left = -at & 7;

            s[j] = __byte_perm((on_z ? z : x) << left, 0,
                               at + left == 0   ? 0x4410
                               : at + left == 8 ? 0x4421
                                                : 0x4432);
        }
    }
}

/* Rotates and quantises a block of x * suh (canon.h, steps 1 and 2), four neighbours a
 * lane, one warp. Lane 4 t + q gets the planes i and j of the inputs 2q, 2q + 1, 2q + 8,
 * 2q + 9 of tile row t, as the tensor cores want them. */
__device__ static inline uint2 hx_cuda_planes(float v[4], hx_cuda_scale *scale)
{
    const int lane = threadIdx.x & 31, l = lane & 3;
    const float top = (float)HX_CANON_AMAX;
    uint32_t peak = 0, wi = 0, wj = 0;
    int32_t total = 0;

    hx_cuda_rotate(v);
    for (int i = 0; i < 4; i++)
        peak = max(peak, hx_bits_of(v[i]) & 0x7FFFFFFFu);
    peak = __reduce_max_sync(~0u, peak);
    const float m = hx_float_of(peak), inv = peak == 0 ? 0.0f : __fdiv_rn(top, m);
    for (int i = 0; i < 4; i++) {
        float t = v[i] * inv;
        int pi, pj;

        t = t < top ? t : top;
        t = t > -top ? t : -top;
        const int a = __float2int_rn(t);
        hx_canon_planes(a, &pi, &pj);
        total += a;
        wi |= (uint32_t)(pi & 255) << (8 * i);
        wj |= (uint32_t)(pj & 255) << (8 * i);
    }
    total = __reduce_add_sync(~0u, total);
    /* Lane 4 t + l has inputs 4 l … 4 l + 3 of tile row t; pair q wants two of lane q / 2
     * and two of lane 2 + q / 2. */
    const int from = (lane & ~3) + (l >> 1);
    const uint32_t pick = (l & 1) != 0 ? 0x7632 : 0x5410;
    const uint32_t i0 = __shfl_sync(~0u, wi, from), i1 = __shfl_sync(~0u, wi, from + 2);
    const uint32_t j0 = __shfl_sync(~0u, wj, from), j1 = __shfl_sync(~0u, wj, from + 2);

    *scale = hx_cuda_scale { __fdiv_rn(m, top), total };
    return make_uint2(__byte_perm(i0, i1, pick), __byte_perm(j0, j1, pick));
}

/* The same into memory. */
__device__ static inline void hx_cuda_quantize(float v[4], uint2 *plane,
                                               hx_cuda_scale *scale)
{
    hx_cuda_scale mine;

    plane[threadIdx.x & 31] = hx_cuda_planes(v, &mine);
    if ((threadIdx.x & 31) == 0)
        *scale = mine;
}

#endif
