/* cuda_heads.cu - products with many rows of a matrix for each head (cuda_gemm.h). Called
 * by cuda_product.cu. Never allocates, synchronises or reads back. */
#include "dev/cuda_gemm.h"

/* ---- heads: a matrix each ------------------------------------------------------------- */

struct heads_in {
    hx_plain_mat m;
    int64_t n, stride, first; /* W_h: rows h * stride + first … + n - 1 */
    bool transposed;
    int tiles, steps; /* of 16 outputs; of 16 inputs */
    uint8_t *w;       /* [heads] images */
    float *out_scale; /* [heads, 16 tiles] */
};

/* Weight of output o and input i. */
template <int FMT>
HX_DEVICE float head_weight(const heads_in &p, int64_t row0, int64_t o, int64_t i)
{
    const int64_t n = p.transposed ? i : o, k = p.transposed ? o : i;

    return n < p.n && k < p.m.k ? hx_plain_at<FMT>(p.m, row0 + n, k) : 0.0f;
}

/* One block: the tiles of 16 outputs of a head. Grid (tiles, heads), 256 threads. Reads
 * their weights twice, the second time from the cache. */
template <int FMT>
__global__ void __launch_bounds__(ROW_THREADS)
    heads_to_halves(const __grid_constant__ heads_in p)
{
    __shared__ uint32_t most[16];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int64_t row0 = blockIdx.y * p.stride + p.first, o0 = (int64_t)blockIdx.x * 16;
    uint8_t *w = p.w + blockIdx.y * (int64_t)p.steps * p.tiles * 512;
    float m = 0;

    if (threadIdx.x < 16)
        most[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x / 16; i < 16 * p.steps; i += ROW_THREADS / 16)
        m = fmaxf(m, fabsf(head_weight<FMT>(p, row0, o0 + threadIdx.x % 16, i)));
    atomicMax(&most[threadIdx.x % 16], hx_bits_of(m));
    __syncthreads();
    const float up[2] = { up_scale(hx_float_of(most[g])),
                          up_scale(hx_float_of(most[g + 8])) };
    if (threadIdx.x < 16)
        p.out_scale[((int64_t)blockIdx.y * p.tiles + blockIdx.x) * 16 + threadIdx.x] =
            1.0f / up_scale(hx_float_of(most[threadIdx.x]));
    for (int step = warp; step < p.steps; step += ROW_THREADS / 32) {
        __half2 h[4];

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t o = o0 + g + 8 * (i & 1), at = 16 * step + 2 * q + 8 * (i >> 1);

            h[i] = __floats2half2_rn(head_weight<FMT>(p, row0, o, at) * up[i & 1],
                                     head_weight<FMT>(p, row0, o, at + 1) * up[i & 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(__half2 *)image_at<GROUP>(w, p.steps / 4, o0 + g + 8 * (i & 1),
                                        16 * step + 2 * q + 8 * (i >> 1)) = h[i];
    }
}

/* Positions of a call's heads: those of head h from h * pitch on. */
struct heads_plan {
    int rows, heads, pitch, block_rows;
    int32_t *pick; /* [heads * pitch] row * heads + head, or -1 */
    hx_row_block *block;
    int32_t *n_block;
};

__global__ void __launch_bounds__(ROW_THREADS)
    plan_heads(const __grid_constant__ heads_plan p)
{
    const int at = blockIdx.x * ROW_THREADS + threadIdx.x, h = at / p.pitch,
              r = at % p.pitch, each = (p.rows + p.block_rows - 1) / p.block_rows;

    if (at == 0)
        *p.n_block = p.heads * each;
    if (h >= p.heads)
        return;
    p.pick[at] = r < p.rows ? r * p.heads + h : -1;
    if (r < p.rows && r % p.block_rows == 0)
        p.block[h * each + r / p.block_rows] =
            hx_row_block { h, at, min(p.block_rows, p.rows - r) };
}

/* Work memory: the heads' weights, then the plan, image and scales of some rows. */
struct heads_layout {
    int64_t inputs, outputs, k_pad, n_pad, pitch;
    size_t out_scale, pick, block, n_block, image, scale, bytes;
};

static heads_layout heads_layout_of(const hx_head_matmul_args *a, int64_t rows)
{
    heads_layout l = {};

    l.inputs = a->transposed ? a->n : a->w->k;
    l.outputs = a->transposed ? a->w->k : a->n;
    l.k_pad = up_128(l.inputs);
    l.n_pad = up_128(l.outputs);
    l.pitch = hx_ceil_div(rows, IMAGE_ROWS) * IMAGE_ROWS;
    const int64_t positions = a->heads * l.pitch;
    l.out_scale = up_256((size_t)(a->heads * l.k_pad * l.n_pad) * 2);
    l.pick = l.out_scale + up_256((size_t)(a->heads * l.n_pad) * sizeof(float));
    l.block = l.pick + up_256((size_t)positions * sizeof(int32_t));
    l.n_block = l.block + up_256((size_t)(positions / IMAGE_ROWS) * sizeof(hx_row_block));
    l.image = l.n_block + 256;
    l.scale = l.image + image_bytes(positions, l.k_pad);
    l.bytes = l.scale + up_256((size_t)positions * sizeof(hx_row_scale));
    return l;
}

size_t hx_cuda_heads_many_bytes(const hx_head_matmul_args *a, int64_t rows)
{
    return heads_layout_of(a, rows).bytes;
}

static cudaError_t heads_rows(const hx_head_matmul_args *a, const heads_layout *l,
                              int64_t r0, int64_t rows, int block_rows,
                              const hx_cuda_work *w, cudaStream_t stream)
{
    char *mem = (char *)w->p;
    const int64_t positions = a->heads * l->pitch;
    heads_plan plan = { (int)rows,
                        (int)a->heads,
                        (int)l->pitch,
                        block_rows,
                        (int32_t *)(mem + l->pick),
                        (hx_row_block *)(mem + l->block),
                        (int32_t *)(mem + l->n_block) };
    hx_image_in in = {};
    hx_gemm p = {};

    cudaError_t rc = hx_cuda_launch(false, plan_heads,
                                    dim3((unsigned)hx_ceil_div(positions, ROW_THREADS)),
                                    dim3(ROW_THREADS), 0, stream, plan);
    in.x = (const float *)a->x.p + r0 * a->heads * l->inputs;
    in.ldx = in.k = l->inputs;
    in.pick = plan.pick;
    in.active = 1;
    in.steps = p.steps = (int)(l->k_pad / STEP);
    in.image = (uint8_t *)mem + l->image;
    in.scale = (hx_row_scale *)(mem + l->scale);
    if (rc == cudaSuccess)
        rc = hx_cuda_image_rows(&in, positions, w, stream);
    p.w = (const uint8_t *)mem;
    p.w_head = l->k_pad * l->n_pad * 2;
    p.out_scale = (const float *)(mem + l->out_scale);
    p.block = plan.block;
    p.n_block = plan.n_block;
    p.block_rows = block_rows;
    p.image = in.image;
    p.scale = in.scale;
    p.row = plan.pick;
    p.y = (float *)a->y.p + r0 * a->heads * l->outputs;
    p.ldy = p.n = l->outputs;
    p.wide = (uintptr_t)p.y % 16 == 0 && p.ldy % 4 == 0;
    p.groups = (int)(l->n_pad / GROUP);
    p.k2 = K2_HALF;
    return rc != cudaSuccess
               ? rc
               : hx_cuda_gemm(&p, w, HX_CB_MUL1, a->heads * hx_ceil_div(rows, block_rows),
                              stream);
}

cudaError_t hx_cuda_heads_many(const hx_head_matmul_args *a, const hx_cuda_work *w,
                               cudaStream_t stream)
{
    int64_t rows = HX_MIN(a->rows, INT32_MAX / 2 / a->heads);
    cudaError_t rc = cudaSuccess;

    while (rows > 1 && heads_layout_of(a, rows).bytes > w->bytes)
        rows = rows > MOST_ROWS ? hx_ceil_div(rows / 2, MOST_ROWS) * MOST_ROWS : rows / 2;
    const heads_layout l = heads_layout_of(a, rows);
    if (l.bytes > w->bytes)
        return cudaErrorInvalidValue;
    const heads_in in = { hx_plain_of(a->w),
                          a->n,
                          a->stride,
                          a->first,
                          a->transposed,
                          (int)(l.n_pad / 16),
                          (int)(l.k_pad / 16),
                          (uint8_t *)w->p,
                          (float *)((char *)w->p + l.out_scale) };
    HX_PLAIN_SWITCH(a->w->fmt,
                    rc = hx_cuda_launch(false, heads_to_halves<FMT>,
                                        dim3((unsigned)in.tiles, (unsigned)a->heads),
                                        dim3(ROW_THREADS), 0, stream, in));
    for (int64_t r = 0; r < a->rows && rc == cudaSuccess; r += rows)
        rc = heads_rows(a, &l, r, HX_MIN(rows, a->rows - r),
                        hx_cuda_gemm_rows(K2_HALF, &w->gpu), w, stream);
    return rc;
}
