/* cuda_moe.cu - routed experts on the GPU: hx_op_moe for decode calls, with the bits of
 * the CPU. Called through the operation table in cuda.cu. Never allocates, synchronises
 * or reads back: the rows of an expert are found on the device, so a graph of the call
 * serves any routing.
 *
 * Four launches: the activations of gate and up for every pick, and beside that the plan;
 * gate and up; the activations of down; down. An expert's weights are read once for all
 * its rows. */
#include "dev/cuda.h"

#define WARPS     4
#define THREADS   (32 * WARPS)
#define MAX_PICKS 1024

#define FEW_ROWS                                                                         \
    4 /* of a job: those with more are launched apart, as their kernel is slower */

/* Picks that a job can have: as the kernels step. An expert with more, as ids that repeat
 * in a row give it, has several jobs. */
#define JOB_ROWS(rows)                                                                   \
    ((rows) == 1 ? 1 : (rows) <= FEW_ROWS ? FEW_ROWS : (rows) <= 8 ? 8 : HX_CUDA_JOB_ROWS)

/* How many jobs of more than FEW_ROWS rows there can be. */
#define MANY_JOBS(picks) ((picks) / (FEW_ROWS + 1))

/* Work memory after the areas: intermediate rows, jobs and their rows. */
struct layout {
    hx_cuda_shape in, out;
    size_t area; /* bytes of the larger of the two areas */
    size_t gu, job, row, bytes;
};

struct moe {
    hx_cuda_moe a;
    hx_cuda_area in, out;
    float *gu;           /* [2, picks, f]: gate, then up */
    hx_cuda_job *job[2]; /* [3, picks], [3, MANY_JOBS]: gate, up, down; few rows, more */
    int32_t *row;        /* [picks, HX_CUDA_JOB_ROWS]: picks of a job */
};

/* A job of rows picks, place at among those of its kind. */
__device__ static void put_job(const moe &m, int picks, int32_t id, int many, int at,
                               int rows, const int32_t *row)
{
    const hx_cuda_expert *e = &m.a.expert[id];
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
        m.job[many][w * (many ? MANY_JOBS(picks) : picks) + at] = j;
    }
}

/* Rows of an expert become a job, in the order of their first pick. One thread block. */
__device__ static void plan(const moe &m, int picks)
{
    __shared__ int32_t id[MAX_PICKS];
    __shared__ uint8_t rows[MAX_PICKS]; /* of the job that begins with this pick, or 0 */
    const int most = JOB_ROWS(m.a.rows);

    for (int p = threadIdx.x; p < picks; p += THREADS)
        id[p] = m.a.id[p];
    for (int i = threadIdx.x; i < 3 * picks; i += THREADS)
        m.job[0][i].rows = 0;
    for (int i = threadIdx.x; i < 3 * MANY_JOBS(picks); i += THREADS)
        m.job[1][i].rows = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < picks; p += THREADS) {
        int before = 0, from = 0;

        for (int o = 0; o < picks; o++) {
            before += o < p && id[o] == id[p];
            from += o >= p && id[o] == id[p];
        }
        rows[p] = (uint8_t)(id[p] >= 0 && before % most == 0 ? min(from, most) : 0);
    }
    __syncthreads();
    for (int p = threadIdx.x; p < picks; p += THREADS) {
        const int n = rows[p], many = n > FEW_ROWS;
        int32_t *row = m.row + p * HX_CUDA_JOB_ROWS;
        int at = 0;

        if (n == 0)
            continue;
        for (int o = 0; o < p; o++)
            at += rows[o] != 0 && (rows[o] > FEW_ROWS) == many;
        for (int o = p, i = 0; i < n; o++)
            if (id[o] == id[p])
                row[i++] = o;
        put_job(m, picks, id[p], many, at, n, row);
    }
}

/* Activations of gate and up. Grid (blocks of d / 4, picks + 1, 2), 128 threads; the
 * extra y is the plan. */
__global__ void __launch_bounds__(THREADS) moe_in(const __grid_constant__ moe m)
{
    const int pick = blockIdx.y, picks = m.a.rows * m.a.active, lane = threadIdx.x & 31;
    const int64_t n_block = m.a.d_pad / 128;
    const int64_t b = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5),
                  at = b * 128 + 4 * lane;

    hx_cuda_in_turn();
    if (pick == picks) {
        if (blockIdx.x == 0 && blockIdx.z == 0)
            plan(m, picks);
        return;
    }
    const int32_t id = m.a.id[pick];
    if (b >= n_block || id < 0)
        return;
    const hx_cuda_expert *e = &m.a.expert[id];
    const uint16_t *suh =
        (const uint16_t *)(blockIdx.z == 0 ? e->gate.suh : e->up.suh) + at;
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
    const int64_t b = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5),
                  at = b * 128 + 4 * lane;

    hx_cuda_in_turn();
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

/* The shape of jobs with few rows, or that of the others. */
static hx_cuda_shape of_kind(const hx_cuda_shape *few, const hx_cuda_moe *m, int many)
{
    const int picks = m->rows * m->active;
    hx_cuda_shape s = *few;

    if (many) {
        s.n_job = few->n_job / picks * MANY_JOBS(picks);
        s.rows = JOB_ROWS(m->rows);
    }
    return s;
}

static layout layout_of(const hx_cuda_moe *m, const hx_cuda_gpu *g)
{
    const int picks = m->rows * m->active;
    const bool same = m->k2_gate == m->k2_up;
    layout l = {};

    l.in.n_pad = m->f_pad;
    l.in.k_pad = m->d_pad;
    l.in.k2 = m->k2_gate;
    l.in.n_job = same ? 2 * picks : picks;
    l.in.rows = HX_MIN(JOB_ROWS(m->rows), FEW_ROWS);
    l.in.slots = 2 * picks;
    l.in.codebook = m->codebook;
    l.in.quads = m->quads;
    l.in.bps = m->bps_in;
    l.in.listed = l.in.fresh = true;
    l.out = l.in;
    l.out.n_pad = m->d_pad;
    l.out.k_pad = m->f_pad;
    l.out.k2 = m->k2_down;
    l.out.n_job = l.out.slots = picks;
    l.out.bps = m->bps_out;
    l.out.fresh = false;
    hx_cuda_shape launched[3] = { l.in, l.in, l.out };
    launched[1].k2 = m->k2_up;
    for (int i = 0; i < 6; i++) {
        const hx_cuda_shape one = of_kind(&launched[i / 2], m, i % 2);

        l.area = HX_MAX(l.area, hx_cuda_area_bytes(&one, g));
    }
    l.area = (l.area + 255) / 256 * 256;
    l.gu = l.area;
    l.job = l.gu + (2 * (size_t)picks * (size_t)m->f * sizeof(float) + 255) / 256 * 256;
    l.row = l.job + 3 * (size_t)(picks + MANY_JOBS(picks)) * sizeof(hx_cuda_job);
    l.bytes = l.row + (size_t)picks * HX_CUDA_JOB_ROWS * sizeof(int32_t);
    return l;
}

size_t hx_cuda_moe_bytes(const hx_cuda_moe *m, const hx_cuda_gpu *g)
{
    return layout_of(m, g).bytes;
}

/* The products of projection which (and the next, if n_job says so). */
static cudaError_t launch_kinds(const moe *m, const hx_cuda_shape *few, int which,
                                const hx_cuda_work *w, cudaStream_t stream)
{
    const int picks = m->a.rows * m->a.active;
    cudaError_t rc = hx_cuda_jobs(m->job[0] + which * picks, few, w, stream);

    if (rc != cudaSuccess || m->a.rows <= FEW_ROWS)
        return rc;
    const hx_cuda_shape many = of_kind(few, &m->a, 1);
    return hx_cuda_jobs(m->job[1] + which * MANY_JOBS(picks), &many, w, stream);
}

cudaError_t hx_cuda_experts(const hx_cuda_moe *a, const hx_cuda_work *w,
                            cudaStream_t stream)
{
    const int picks = a->rows * a->active;
    layout l = layout_of(a, &w->gpu);
    moe m = {};
    cudaError_t rc;

    if (picks < 1 || picks > MAX_PICKS || l.bytes > w->bytes)
        return cudaErrorInvalidValue;
    m.a = *a;
    m.gu = (float *)((char *)w->p + l.gu);
    m.job[0] = (hx_cuda_job *)((char *)w->p + l.job);
    m.job[1] = m.job[0] + 3 * picks;
    m.row = (int32_t *)((char *)w->p + l.row);
    if ((rc = hx_cuda_area_of(&l.in, w, &m.in)) != cudaSuccess ||
        (rc = hx_cuda_area_of(&l.out, w, &m.out)) != cudaSuccess)
        return rc;

    const unsigned in = (unsigned)((a->d_pad / 128 + WARPS - 1) / WARPS);
    const unsigned mid = (unsigned)((a->f_pad / 128 + WARPS - 1) / WARPS);
    rc = hx_cuda_launch(w->overlap, moe_in, dim3(in, (unsigned)picks + 1, 2),
                        dim3(THREADS), 0, stream, m);
    if (rc == cudaSuccess)
        rc = launch_kinds(&m, &l.in, 0, w, stream);
    if (rc == cudaSuccess && a->k2_gate != a->k2_up) {
        l.in.k2 = a->k2_up;
        rc = launch_kinds(&m, &l.in, 1, w, stream);
    }
    if (rc == cudaSuccess)
        rc = hx_cuda_launch(w->overlap, moe_mid, dim3(mid, (unsigned)picks),
                            dim3(THREADS), 0, stream, m);
    if (rc == cudaSuccess)
        rc = launch_kinds(&m, &l.out, 2, w, stream);
    return rc;
}
