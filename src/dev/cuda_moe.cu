/* cuda_moe.cu - routed experts on the GPU: hx_op_moe for decode calls, with the bits of
 * the CPU. Called through the operation table in cuda.cu. Never allocates, synchronises or
 * reads back: the rows of an expert are found on the device, so a graph of the call serves
 * any routing.
 *
 * Four launches: the activations of gate and up for every pick, and beside that the plan;
 * gate and up; the activations of down; down. An expert's weights are read once for all its
 * rows. */
#include "dev/cuda.h"

#define WARPS   4
#define THREADS (32 * WARPS)
#define MAX_PICKS 1024

/* Work memory after the areas: intermediate rows, jobs and their rows. */
struct layout {
    hx_cuda_shape in, out;
    size_t        area;   /* bytes of the larger of the two areas */
    size_t        gu, job, row, bytes;
};

struct moe {
    hx_cuda_moe  a;
    hx_cuda_area in, out;
    float       *gu;      /* [2, picks, f]: gate, then up */
    hx_cuda_job *job;     /* [3, picks]: gate, up, down */
    int32_t     *row;     /* [picks, HX_CUDA_JOB_ROWS]: picks of a job */
};

/* Rows of an expert become jobs of up to HX_CUDA_JOB_ROWS picks, in the order of their
 * first pick. One thread block. */
__device__ static void plan(const moe &m, int picks)
{
    __shared__ int32_t id[MAX_PICKS];
    __shared__ uint8_t first[MAX_PICKS];

    for (int p = threadIdx.x; p < picks; p += THREADS) {
        id[p] = m.a.id[p];
        for (int w = 0; w < 3; w++)
            m.job[w * picks + p].rows = 0;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < picks; p += THREADS) {
        int rank = 0;

        for (int o = 0; o < p; o++)
            rank += id[o] == id[p];
        first[p] = id[p] >= 0 && rank % HX_CUDA_JOB_ROWS == 0;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < picks; p += THREADS) {
        int at = 0, rows = 0;

        if (first[p] == 0)
            continue;
        for (int o = 0; o < p; o++)
            at += first[o];
        int32_t *row = m.row + at * HX_CUDA_JOB_ROWS;
        for (int o = p; o < picks && rows < HX_CUDA_JOB_ROWS; o++)
            if (id[o] == id[p])
                row[rows++] = o;
        const hx_cuda_expert *e = &m.a.expert[id[p]];
        const hx_cuda_mat *mat[3] = { &e->gate, &e->up, &e->down };
        for (int w = 0; w < 3; w++) {
            hx_cuda_job j = {};

            j.trellis = mat[w]->trellis;
            j.svh = mat[w]->svh;
            j.n = j.ldy = w == 2 ? m.a.d : m.a.f;
            j.k = w == 2 ? m.a.f : m.a.d;
            j.y = w == 2 ? m.a.y : m.gu + (int64_t)w * picks * m.a.f;
            j.row = row;
            j.slot = w == 1 ? picks : 0;
            j.rows = rows;
            m.job[w * picks + at] = j;
        }
    }
}

/* Activations of gate and up. Grid (blocks of d / 4, picks + 1, 2), 128 threads; the extra
 * y is the plan. */
__global__ void __launch_bounds__(THREADS) moe_in(const __grid_constant__ moe m)
{
    const int pick = blockIdx.y, picks = m.a.rows * m.a.active, lane = threadIdx.x & 31;
    const int64_t n_block = m.a.d_pad / 128;
    const int64_t b = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5), at = b * 128 + 4 * lane;

    hx_cuda_after_previous();
    hx_cuda_allow_next();
    if (pick == picks) {
        if (blockIdx.x == 0 && blockIdx.z == 0)
            plan(m, picks);
        return;
    }
    const int32_t id = m.a.id[pick];
    if (b >= n_block || id < 0)
        return;
    const hx_cuda_expert *e = &m.a.expert[id];
    const uint16_t *suh = (const uint16_t *)(blockIdx.z == 0 ? e->gate.suh : e->up.suh) + at;
    const float *x = m.a.x + (int64_t)(pick / m.a.active) * m.a.d + at;
    const int64_t to = ((int64_t)blockIdx.z * picks + pick) * n_block + b;
    float v[4];

    for (int i = 0; i < 4; i++)
        v[i] = (at + i < m.a.d ? x[i] : 0.0f) * hx_f16_to(suh[i]);
    hx_cuda_quantize(v, m.in.plane + to * 32, &m.in.scale[to]);
}

/* Activations of down. Grid (blocks of f / 4, picks), 128 threads. */
__global__ void __launch_bounds__(THREADS) moe_mid(const __grid_constant__ moe m)
{
    const int pick = blockIdx.y, picks = m.a.rows * m.a.active, lane = threadIdx.x & 31;
    const int64_t n_block = m.a.f_pad / 128;
    const int64_t b = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5), at = b * 128 + 4 * lane;

    hx_cuda_after_previous();
    hx_cuda_allow_next();
    const int32_t id = m.a.id[pick];
    if (b >= n_block || id < 0)
        return;
    const uint16_t *suh = (const uint16_t *)m.a.expert[id].down.suh + at;
    const float *g = m.gu + pick * m.a.f + at, *u = g + picks * m.a.f;
    const int64_t to = pick * n_block + b;
    float v[4];

    for (int i = 0; i < 4; i++)
        v[i] = (at + i < m.a.f ? hx_canon_act(g[i], u[i], m.a.limit) : 0.0f) *
               hx_f16_to(suh[i]);
    hx_cuda_quantize(v, m.out.plane + to * 32, &m.out.scale[to]);
}

static layout layout_of(const hx_cuda_moe *m, int n_sm)
{
    const int picks = m->rows * m->active;
    const bool same = m->k2_gate == m->k2_up;
    layout l = {};

    l.in.n_pad = m->f_pad;
    l.in.k_pad = m->d_pad;
    l.in.k2 = m->k2_gate;
    l.in.n_job = same ? 2 * picks : picks;
    l.in.rows = HX_MIN(m->rows, HX_CUDA_JOB_ROWS);
    l.in.slots = 2 * picks;
    l.in.codebook = m->codebook;
    l.in.bps = m->bps_in;
    l.in.chained = l.in.fresh = true;
    l.out = l.in;
    l.out.n_pad = m->d_pad;
    l.out.k_pad = m->f_pad;
    l.out.k2 = m->k2_down;
    l.out.n_job = l.out.slots = picks;
    l.out.bps = m->bps_out;
    l.out.fresh = false;
    l.area = (HX_MAX(hx_cuda_area_bytes(&l.in, n_sm), hx_cuda_area_bytes(&l.out, n_sm)) + 255) /
             256 * 256;
    l.gu = l.area;
    l.job = l.gu + (2 * (size_t)picks * (size_t)m->f * sizeof(float) + 255) / 256 * 256;
    l.row = l.job + 3 * (size_t)picks * sizeof(hx_cuda_job);
    l.bytes = l.row + (size_t)picks * HX_CUDA_JOB_ROWS * sizeof(int32_t);
    return l;
}

size_t hx_cuda_moe_bytes(const hx_cuda_moe *m, int n_sm)
{
    return layout_of(m, n_sm).bytes;
}

cudaError_t hx_cuda_experts(const hx_cuda_moe *a, const hx_cuda_work *w, cudaStream_t stream)
{
    const int picks = a->rows * a->active;
    layout l = layout_of(a, w->n_sm);
    moe m = {};
    cudaError_t rc;

    if (picks < 1 || picks > MAX_PICKS || l.bytes > w->bytes)
        return cudaErrorInvalidValue;
    if ((rc = hx_cuda_area_of(&l.in, w, &m.in)) != cudaSuccess ||
        (rc = hx_cuda_area_of(&l.out, w, &m.out)) != cudaSuccess)
        return rc;
    m.a = *a;
    m.gu = (float *)((char *)w->p + l.gu);
    m.job = (hx_cuda_job *)((char *)w->p + l.job);
    m.row = (int32_t *)((char *)w->p + l.row);

    const unsigned in = (unsigned)((a->d_pad / 128 + WARPS - 1) / WARPS);
    const unsigned mid = (unsigned)((a->f_pad / 128 + WARPS - 1) / WARPS);
    rc = hx_cuda_launch(w->overlap, moe_in, dim3(in, (unsigned)picks + 1, 2), dim3(THREADS), 0, stream,
                        m);
    if (rc == cudaSuccess)
        rc = hx_cuda_jobs(m.job, &l.in, w, stream);
    if (rc == cudaSuccess && a->k2_gate != a->k2_up) {
        l.in.k2 = a->k2_up;
        rc = hx_cuda_jobs(m.job + picks, &l.in, w, stream);
    }
    if (rc == cudaSuccess)
        rc = hx_cuda_launch(w->overlap, moe_mid, dim3(mid, (unsigned)picks), dim3(THREADS), 0,
                            stream, m);
    if (rc == cudaSuccess)
        rc = hx_cuda_jobs(m.job + 2 * picks, &l.out, w, stream);
    return rc;
}
