/* cuda_experts.cu - routed experts of many rows as products with many rows (cuda_gemm.h).
 * Called by cuda_product.cu. Never allocates, synchronises or reads back. */
#include "dev/cuda_gemm.h"

/* ---- experts -------------------------------------------------------------------------- */

enum { PLAN_THREADS = 1024 };

/* Picks sorted by expert, each expert from a multiple of 64 on: its positions. They are
 * worked on a window at a time. */
struct plan {
    const int32_t *id;               /* [picks] */
    int picks, n_expert, first, end; /* other experts' picks are left out */
    int window, n_window, block_rows;
    int32_t *pick;       /* [n_window * window] pick of a position, or -1 */
    hx_row_block *block; /* [n_window, window / 64], positions of the window */
    int32_t *n_block;    /* [n_window] */
};

/* One block. Shared: two counters an expert. Reads the ids twice. Which pick of an expert
 * comes first differs from run to run, and no result depends on it. */
__global__ void __launch_bounds__(PLAN_THREADS)
    plan_experts(const __grid_constant__ plan p)
{
    extern __shared__ int32_t counter[];
    int32_t *count = counter, *at = counter + p.n_expert;
    const int positions = p.n_window * p.window;

    hx_cuda_after_previous();
    hx_cuda_allow_next();
    for (int e = threadIdx.x; e < p.n_expert; e += PLAN_THREADS)
        count[e] = 0;
    for (int i = threadIdx.x; i < p.n_window; i += PLAN_THREADS)
        p.n_block[i] = 0;
    for (int i = threadIdx.x; i < positions; i += PLAN_THREADS)
        p.pick[i] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < p.picks; i += PLAN_THREADS)
        if (p.id[i] >= p.first && p.id[i] < p.end)
            atomicAdd(&count[p.id[i]], 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t sum = 0;

        for (int e = 0; e < p.n_expert; e++) {
            at[e] = sum;
            sum += (count[e] + IMAGE_ROWS - 1) / IMAGE_ROWS * IMAGE_ROWS;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.n_expert; e += PLAN_THREADS)
        for (int from = at[e], end = at[e] + count[e]; from < end;) {
            const int w = from / p.window;
            const int to = min(min(from + p.block_rows, end), (w + 1) * p.window);

            p.block[w * (p.window / IMAGE_ROWS) + atomicAdd(&p.n_block[w], 1)] =
                hx_row_block { e, from - w * p.window, to - from };
            from = to;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < p.picks; i += PLAN_THREADS)
        if (p.id[i] >= p.first && p.id[i] < p.end)
            p.pick[atomicAdd(&at[p.id[i]], 1)] = i;
}

/* Work memory: the plan, then a window's image (of x, later of the activations), scales
 * and sums of gate and up. */
struct many_layout {
    int64_t positions; /* the most there can be */
    size_t block, n_block, image, scale, gate, up, bytes;
};

static many_layout many_layout_of(const hx_cuda_moe *m, int64_t window)
{
    const int64_t picks = (int64_t)m->rows * m->active;
    many_layout l = {};

    l.positions =
        hx_ceil_div(picks + (IMAGE_ROWS - 1) * HX_MIN(picks, m->n_expert), IMAGE_ROWS) *
        IMAGE_ROWS;
    if (window == 0)
        window = hx_ceil_div(l.positions, MOST_ROWS) * MOST_ROWS;
    const int64_t n_window = hx_ceil_div(l.positions, window);
    const size_t image = image_bytes(window, HX_MAX(m->d_pad, m->f_pad));

    l.block = up_256((size_t)(n_window * window) * sizeof(int32_t));
    l.n_block =
        l.block + up_256((size_t)(n_window * window / IMAGE_ROWS) * sizeof(hx_row_block));
    l.image = l.n_block + up_256((size_t)n_window * sizeof(int32_t));
    l.scale = l.image + image;
    l.gate = l.scale + up_256((size_t)window * sizeof(hx_row_scale));
    l.up = l.gate + up_256((size_t)(window * m->f) * sizeof(float));
    l.bytes = l.up + up_256((size_t)(window * m->f) * sizeof(float));
    return l;
}

size_t hx_cuda_experts_many_bytes(const hx_cuda_moe *m, int64_t window)
{
    return many_layout_of(m, window).bytes;
}

/* One window: gate and up, activation, down. */
static cudaError_t multiply_window(const hx_cuda_moe *m, const plan *pl, int i,
                                   const many_layout *l, const hx_cuda_work *w,
                                   cudaStream_t stream)
{
    char *mem = (char *)w->p;
    float *gate = (float *)(mem + l->gate), *up = (float *)(mem + l->up);
    const int k2[3] = { m->k2_gate, m->k2_up, m->k2_down };
    hx_image_in in = {};
    hx_gemm p = {};
    cudaError_t rc = cudaSuccess;

    in.expert = p.expert = m->expert;
    in.pick = pl->pick + (int64_t)i * pl->window;
    in.id = m->id;
    in.limit = m->limit;
    in.mul1 = m->codebook == HX_CB_MUL1;
    p.image = in.image = (uint8_t *)mem + l->image;
    p.scale = in.scale = (hx_row_scale *)(mem + l->scale);
    p.block = pl->block + (int64_t)i * (pl->window / IMAGE_ROWS);
    p.n_block = pl->n_block + i;
    p.block_rows = pl->block_rows;
    for (int which = 0; which < 3 && rc == cudaSuccess; which++) {
        const bool down = which == 2;
        const int64_t k_pad = down ? m->f_pad : m->d_pad;

        in.which = p.which = which;
        in.x = down ? gate : m->x;
        in.up = down ? up : NULL;
        in.active = down ? 0 : m->active;
        in.ldx = in.k = down ? m->f : m->d;
        in.steps = p.steps = (int)(k_pad / STEP);
        p.n = p.ldy = down ? m->d : m->f;
        p.groups = (int)((down ? m->d_pad : m->f_pad) / GROUP);
        p.y = down ? m->y : which == 0 ? gate : up;
        p.row = down ? in.pick : NULL;
        p.wide = (uintptr_t)p.y % 16 == 0 && p.ldy % 4 == 0;
        p.k2 = k2[which];
        rc = hx_cuda_image_rows(&in, pl->window, w, stream);
        if (rc == cudaSuccess)
            rc = hx_cuda_gemm(&p, w, m->codebook, pl->window / IMAGE_ROWS, stream);
    }
    return rc;
}

cudaError_t hx_cuda_experts_many(const hx_cuda_moe *m, const hx_cuda_work *w,
                                 cudaStream_t stream)
{
    const int most = HX_MAX(HX_MAX(m->k2_gate, m->k2_up), m->k2_down);
    int64_t window = hx_ceil_div(many_layout_of(m, 0).positions, MOST_ROWS) * MOST_ROWS;
    plan p = {};
    cudaError_t rc;

    while (window > MOST_ROWS && many_layout_of(m, window).bytes > w->bytes)
        window = hx_ceil_div(window / 2, MOST_ROWS) * MOST_ROWS;
    const many_layout l = many_layout_of(m, window);
    if (l.bytes > w->bytes || l.positions > INT32_MAX / 2)
        return cudaErrorInvalidValue;
    p.id = m->id;
    p.picks = m->rows * m->active;
    p.n_expert = m->n_expert;
    p.first = m->first;
    p.end = m->end;
    p.window = (int)window;
    p.n_window = (int)hx_ceil_div(l.positions, window);
    p.block_rows = hx_cuda_gemm_rows(most, &w->gpu);
    p.pick = (int32_t *)w->p;
    p.block = (hx_row_block *)((char *)w->p + l.block);
    p.n_block = (int32_t *)((char *)w->p + l.n_block);
    rc = hx_cuda_launch(w->overlap, plan_experts, dim3(1), dim3(PLAN_THREADS),
                        2 * (size_t)m->n_expert * sizeof(int32_t), stream, p);
    for (int i = 0; i < p.n_window && rc == cudaSuccess; i++)
        rc = multiply_window(m, &p, i, &l, w, stream);
    return rc;
}
