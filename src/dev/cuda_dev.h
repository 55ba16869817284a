/* cuda_dev.h - the CUDA backend as its own files see it; ops.c takes hx_cuda_backend_*
 * from it in a build with CUDA, nobody else includes it.
 *
 * cuda.cu         the device: open, close, memory, copies, the operation table
 * cuda_ops.cu     rows on their own, streams, routing
 * cuda_product.cu products: plain formats, and the dispatch to those of cuda.h
 * cuda_sample.cu  sampling
 * cuda_kda.cu     short convolution and gated delta rule, row by row
 * cuda_chunk.cu   gated delta rule in chunks
 * cuda_attn.cu    what needs pages: latents, index, attention
 * cuda_mla.cu     attention of prefill rows on Hopper
 * cuda_encode.cu  the EXL3 encoder's operations (enc_ops.h), for quantize
 * cuda_lane.cu    plan, and what runs beside the stream: pins, pushes, graphs
 * cuda_matmul.h   products with EXL3 matrices, and the files of these; cuda_moe.cu: experts
 *                 of them (cuda.h)
 * cuda_gemm.h     products with many rows, and the files of these
 *
 * Everything runs on the device's one stream. A launcher never allocates, waits or reads
 * device memory, and what it passes to a kernel depends on sizes only (n_row, n_span and
 * shapes): positions come from hx_rows.dev and pages from table_dev when these are there,
 * so that a decode step can be captured as a graph and replayed. Sums have an order that
 * depends on a row's own length, never on its neighbours or on how busy the device is. */
#ifndef HX_CUDA_DEV_H
#define HX_CUDA_DEV_H

#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const hx_dev_ops hx_cuda_ops;
extern const hx_dev_link hx_cuda_link; /* cuda_lane.cu */
extern const struct hx_enc_ops hx_cuda_encode;
/* Fills d->own, d->isa and d->text. opt->name: "cuda" or "cuda:N". */
int hx_cuda_open(hx_dev *d, const hx_dev_opt *opt, hx_err *err);
void hx_cuda_close(hx_dev *d);
/* Waits for all that was launched; the error of a kernel that failed. */
int hx_cuda_sync(hx_dev *d, hx_err *err);
/* Has this system a GPU, or the kernel's part of a driver for one? Then whatever keeps it
 * from being used is an error of opening it, not a reason to go without it. */
bool hx_cuda_is_there(void);

/* The operations; that of moe is hx_cuda_moe_op, for cuda.h has a struct hx_cuda_moe. */
#define HX_CUDA_OPS(X)                                                                   \
    X(embed, hx_cuda_embed)                                                              \
    X(rmsnorm, hx_cuda_rmsnorm)                                                          \
    X(layernorm, hx_cuda_layernorm)                                                      \
    X(matmul, hx_cuda_matmul)                                                            \
    X(head_matmul, hx_cuda_head_matmul)                                                  \
    X(swiglu, hx_cuda_swiglu)                                                            \
    X(hc_mix, hx_cuda_hc_mix)                                                            \
    X(hc_merge, hx_cuda_hc_merge)                                                        \
    X(hc_mean, hx_cuda_hc_mean)                                                          \
    X(conv_short, hx_cuda_conv_short)                                                    \
    X(kda_gate, hx_cuda_kda_gate)                                                        \
    X(kda_step, hx_cuda_kda_step)                                                        \
    X(kda_chunk, hx_cuda_kda_chunk)                                                      \
    X(kda_out, hx_cuda_kda_out)                                                          \
    X(latent_append, hx_cuda_latent_append)                                              \
    X(index_append, hx_cuda_index_append)                                                \
    X(index_score, hx_cuda_index_score)                                                  \
    X(topk, hx_cuda_topk)                                                                \
    X(mla_attend, hx_cuda_mla_attend)                                                    \
    X(router, hx_cuda_router)                                                            \
    X(plan, hx_cuda_plan)                                                                \
    X(moe, hx_cuda_moe_op)                                                               \
    X(combine, hx_cuda_combine)                                                          \
    X(sample, hx_cuda_sample)
#define X(op, name) int name(hx_dev *d, const hx_##op##_args *a, hx_err *err);
HX_CUDA_OPS(X)
#undef X

/* What sample leaves as the id of a row that has none to choose; the host looks at it. */
enum { HX_SAMPLE_BAD_LOGIT = -1, HX_SAMPLE_ALL_BANNED = -2 };

/* What of a GPU, and of the code that runs there, decides how work is cut and launched. */
typedef struct {
    int n_sm;
    size_t block_bytes, sm_bytes; /* shared memory that a block can have; in all */
    bool overlap; /* kernels wait for the launch before them, themselves */
    bool hopper;  /* they have wgmma and clusters */
} hx_cuda_gpu;

/* Scratch that the largest operation of each file needs. Shared: contents last one call.
 */
size_t hx_cuda_ops_scratch_bytes(const hx_dev_limits *l);
size_t hx_cuda_product_scratch_bytes(const hx_dev_limits *l, const hx_cuda_gpu *g);
size_t hx_cuda_sample_scratch_bytes(const hx_dev_limits *l);
size_t hx_cuda_attn_scratch_bytes(const hx_dev_limits *l);
size_t hx_cuda_chunk_scratch_bytes(const hx_dev_limits *l);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include "dev/canon.h"

enum {
    /* Bytes of shared memory that a block can have on any GPU: no more on sm_86, sm_89 and
     * sm_120. */
    HX_CUDA_LEAST_SHARED = 99 << 10,
    HX_CUDA_STAGES = 4, /* calls that may have host data on its way at a time */
    HX_CUDA_SPANS = 64, /* spans that fit into the arguments of a kernel */
    HX_CUDA_MARKS = 64, /* pushes whose end can be asked for at a time */
};

/* Host data of a call (sampling parameters, expert tables): pinned memory, and a device
 * copy of it, used in turn. */
typedef struct {
    char *host, *dev;
    cudaEvent_t used; /* when the last call that took it is done */
} hx_cuda_stage;

/* State of one device. */
typedef struct {
    int device;
    hx_cuda_gpu gpu;
    cudaStream_t stream, copies; /* operations, pushes */
    cudaEvent_t mark[HX_CUDA_MARKS], hold;
    uint64_t n_mark;
    char *scratch; /* device memory, 256-byte aligned */
    size_t scratch_bytes;
    int *ticket; /* device memory, [n_ticket], zero between launches */
    int64_t n_ticket;
    struct {
        cudaStream_t stream;
        char *scratch;
        size_t scratch_bytes;
        int *ticket;
        cudaEvent_t fork, join;
        bool on; /* operations go there now */
    } side; /* what operations beside the stream have instead of these; or, while they are
             * launched, what the others have */
    hx_cuda_stage stage[HX_CUDA_STAGES];
    size_t stage_bytes; /* of each */
    int next_stage;
    struct hx_cuda_tables *tables; /* cuda_product.cu: where experts lie */
    struct {
        cudaStream_t stream;
        cudaEvent_t begin, end;
    } ahead;            /* fetches */
    cudaEvent_t now[2]; /* marks, in turn */
    uint64_t n_now;
} hx_cuda;

static inline hx_cuda *hx_cuda_of(const hx_dev *d)
{
    return (hx_cuda *)d->own;
}

/* cuda_product.cu, at open and close. */
int hx_cuda_tables_open(hx_cuda *c, const hx_dev_limits *l, hx_err *err);
void hx_cuda_tables_close(hx_cuda *c);

/* cuda_lane.cu, at open and close. */
int hx_cuda_link_open(hx_cuda *c, hx_err *err);
int hx_cuda_side_open(hx_cuda *c, hx_err *err); /* after scratch and tickets are there */
void hx_cuda_link_close(hx_cuda *c);

/* cuda_kda.cu: brings states past their pending rows (kda_step, without new rows). */
int hx_cuda_kda_fold(hx_dev *d, const hx_kda_step_args *a, hx_err *err);

/* cuda_mla.cu: mla_attend of prefill rows on Hopper; whether it takes such a call. */
bool hx_cuda_mla_takes(const hx_cuda *c, const hx_mla_attend_args *a);
int hx_cuda_mla_rows(hx_cuda *c, const hx_mla_attend_args *a, hx_err *err);

/* cuda.cu: the current device, and the code that is loaded there. */
cudaError_t hx_cuda_gpu_read(hx_cuda_gpu *g);

/* cuda.cu: device memory; the sentence names what it is for, and both numbers. */
int hx_cuda_alloc_for(void **out, size_t bytes, const char *what, hx_err *err);

/* cuda.cu: the sentence for rc; returns HX_ENOMEM, HX_EDEVICE or HX_ELOST. */
int hx_cuda_fail(hx_err *err, const char *op, cudaError_t rc);
/* The same where host memory was to be locked. */
int hx_cuda_no_lock(hx_err *err, const char *what, size_t bytes, cudaError_t rc);

/* Takes the next stage; waits only when HX_CUDA_STAGES calls are still on their way. Then
 * fill ->host, and hx_cuda_stage_put() copies n bytes on the stream to ->dev. */
hx_cuda_stage *hx_cuda_stage_take(hx_cuda *c);
cudaError_t hx_cuda_stage_put(hx_cuda *c, hx_cuda_stage *s, size_t n);
/* After the last kernel that reads s->dev. */
cudaError_t hx_cuda_stage_done(hx_cuda *c, hx_cuda_stage *s);

/* cuda_plain.cu: a plain product with many rows in the canonical arithmetic, and whether
 * it takes one. */
bool hx_cuda_plain_takes(const hx_cuda *c, const hx_matmul_args *a);
int hx_cuda_plain_many(hx_cuda *c, const hx_matmul_args *a, hx_err *err);

/* kernel<<<grid, block, shared bytes, stream of c>>>(...); returns from the launcher when
 * that fails. An empty grid launches nothing. */
#define HX_LAUNCH(c, op, err, kernel, grid, block, shared, ...)                          \
    do {                                                                                 \
        const dim3 grid_ = (grid);                                                       \
        cudaError_t rc_ = cudaSuccess;                                                   \
                                                                                         \
        if ((shared) > 32 * 1024)                                                        \
            rc_ = cudaFuncSetAttribute(                                                  \
                kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(shared));     \
        if (rc_ == cudaSuccess && grid_.x > 0 && grid_.y > 0 && grid_.z > 0) {           \
            kernel<<<grid_, (block), (shared), (c)->stream>>>(__VA_ARGS__);              \
            rc_ = cudaGetLastError();                                                    \
        }                                                                                \
        if (rc_ != cudaSuccess)                                                          \
            return hx_cuda_fail((err), (op), rc_);                                       \
    } while (0)

static inline int64_t hx_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* ---- spans ----------------------------------------------------------- */

/* The spans of a call as a kernel argument: `const __grid_constant__ hx_cuda_spans s`. */
typedef struct {
    const hx_span *dev; /* NULL: in */
    int32_t n;
    hx_span in[HX_CUDA_SPANS];
} hx_cuda_spans;

/* cuda.cu. Fails with HX_EARG when there are too many spans and none on the device. */
int hx_cuda_spans_of(hx_cuda_spans *out, const hx_rows *r, const char *op, hx_err *err);

#define HX_DEVICE static __device__ __forceinline__

HX_DEVICE hx_span hx_span_at(const hx_cuda_spans &s, int32_t i)
{
    return s.dev != NULL ? s.dev[i] : s.in[i];
}

/* The span that row r lies in; n_row 0 when it lies in none. */
HX_DEVICE hx_span hx_span_of_row(const hx_cuda_spans &s, int64_t r)
{
    for (int32_t i = 0; i < s.n; i++) {
        const hx_span at = hx_span_at(s, i);

        if (r >= at.row0 && r < (int64_t)at.row0 + at.n_row)
            return at;
    }
    return hx_span { 0, 0, 0, 0, 0 };
}

/* ---- reductions: the order depends on the block's size alone --------- */

HX_DEVICE float hx_warp_sum(float v)
{
    for (int w = 16; w > 0; w /= 2)
        v += __shfl_xor_sync(~0u, v, w);
    return v;
}

HX_DEVICE float hx_warp_max(float v)
{
    for (int w = 16; w > 0; w /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, w));
    return v;
}

/* Sum over a block of whole warps, the same in every thread; shared: 33 floats of the
 * caller. Every thread of the block must call it. */
HX_DEVICE float hx_block_sum(float v, float *shared)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31,
              n = (blockDim.x + 31) >> 5;

    v = hx_warp_sum(v);
    if (lane == 0)
        shared[warp] = v;
    __syncthreads();
    if (warp == 0) {
        v = hx_warp_sum(lane < n ? shared[lane] : 0.0f);
        if (lane == 0)
            shared[32] = v;
    }
    __syncthreads();
    v = shared[32];
    __syncthreads();
    return v;
}

HX_DEVICE float hx_block_max(float v, float *shared)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31,
              n = (blockDim.x + 31) >> 5;

    v = hx_warp_max(v);
    if (lane == 0)
        shared[warp] = v;
    __syncthreads();
    if (warp == 0) {
        v = hx_warp_max(lane < n ? shared[lane] : -INFINITY);
        if (lane == 0)
            shared[32] = v;
    }
    __syncthreads();
    v = shared[32];
    __syncthreads();
    return v;
}

HX_DEVICE float hx_sigmoid(float x)
{
    return 1.0f / (1.0f + hx_canon_exp(-x));
}

#endif
#endif
