/* cuda_lane.cu - the GPU's side of the CPU lane: hx_op_plan, and the waiting of
 * hx_op_combine; and what the GPU does beside its one stream: pinned memory, pushes on a
 * copy stream, recorded graphs. Called through the tables in cuda.cu. */
#include "dev/cuda.h"
#include "dev/cuda_dev.h"
#include "dev/cuda_lane.h"
#include "dev/plan.h"

enum {
    THREADS = 512,
    /* each with a piece on its way: few multiprocessors that others must share, enough for
     * the link */
    FETCH_BLOCKS = 8,
    FETCH_THREADS = 256,
    FETCH_LOADS = HX_AHEAD_PIECE / 16 / FETCH_THREADS
};

static const size_t SIDE_SCRATCH = (size_t)32 << 20;

/* ---- plan ----------------------------------------------------------------- */

struct plan_args {
    const int32_t *id, *resident;
    int32_t *here, *there, *log;
    const float *x;
    int rows, active, n_expert, layer;
    int64_t dim;
    hx_rates rates;
    bool lane, ahead, fetched, learn;
    hx_cuda_lane to;
    hx_ahead from;
    hx_lease *at;
};

/* The entries that the plan before had changed lead home again, those of what is kept to
 * where it comes; the list of the next fetch is empty. Then waits until all of it has come:
 * the fetch is at work, or it would not have begun with these. kept: what keep_fetched()
 * returned. */
static __device__ void end_fetch(const plan_args &a, int32_t kept)
{
    hx_ahead_state *s = (hx_ahead_state *)a.from.state.p;
    const hx_ahead_list none = {};
    const int k = threadIdx.x;

    if (k < HX_AHEAD_SLOTS) {
        hx_plan_restore(s, k);
        __syncwarp((1u << HX_AHEAD_SLOTS) - 1);
        if (kept >= 0)
            hx_plan_keep(s, &a.from, &a.at[kept], k);
        while (kept >= 0 && *(volatile uint32_t *)&s->list[a.layer & 1].part[k] <
                                hx_plan_pieces(a.from.record_bytes))
            ;
        __threadfence();
    }
    if (k == 32)
        s->list[(a.layer + 1) & 1] = none;
}

/* A warp, a lane an item: what the fetch for this layer has begun to bring and the layer
 * has picked stays here; the rest of it stops. Returns the lane's expert if it stays, else
 * -1; coming: the experts that are still to come, parts of which count as such. The fetch
 * may be at work meanwhile, or not have begun. */
static __device__ int32_t keep_fetched(const plan_args &a, uint8_t *side,
                                       const int32_t *count, float *coming)
{
    hx_ahead_state *s = (hx_ahead_state *)a.from.state.p;
    hx_ahead_list *l = &s->list[a.layer & 1];
    const uint32_t pieces = hx_plan_pieces(a.from.record_bytes);
    const int k = threadIdx.x & 31;
    const hx_ahead_counts before = s->count;
    const int n = a.fetched ? *(volatile int32_t *)&l->n : 0;
    bool wanted = false;
    uint32_t part = 0;
    int32_t e = -1;

    __threadfence();
    if (k < n) {
        e = *(volatile int32_t *)&l->id[k];
        part = *(volatile uint32_t *)&l->part[k];
        wanted = count[e] > 0 && side[e] == HX_SIDE_LINK;
    }
    const bool keep = wanted && part > 0;
    const uint32_t kept = __ballot_sync(~0u, keep), picked = __ballot_sync(~0u, wanted),
                   all = __reduce_add_sync(~0u, part),
                   left = __reduce_add_sync(~0u, keep ? pieces - part : 0),
                   vain = __reduce_add_sync(~0u, keep ? 0 : part);
    if (k == 0) {
        *(volatile uint32_t *)&l->stop = HX_AHEAD_STOP | kept;
        s->count.named = before.named + n;
        s->count.picked = before.picked + __popc(picked);
        s->count.used = before.used + __popc(kept);
        s->count.pieces = before.pieces + all;
        s->count.vain = before.vain + vain;
        *(hx_ahead_counts *)a.from.told.p = s->count;
        *coming = (float)left / (float)pieces;
    }
    if (keep)
        side[e] = HX_SIDE_AHEAD;
    return keep ? e : -1;
}

/* The rows' inputs go to host memory, 4 R D bytes: to be there when a job is posted. */
static __device__ void send_rows(const plan_args &a)
{
    const int64_t n = a.rows * a.dim;
    const bool wide = (uintptr_t)a.x % 16 == 0 && (uintptr_t)a.to.x % 16 == 0;
    const int64_t n4 = wide ? n / 4 : 0;

    for (int64_t i = threadIdx.x; i < n4; i += THREADS)
        ((float4 *)a.to.x)[i] = ((const float4 *)a.x)[i];
    for (int64_t i = 4 * n4 + threadIdx.x; i < n; i += THREADS)
        a.to.x[i] = a.x[i];
}

/* The job's number goes last. before: jobs so far. */
static __device__ void post_job(const plan_args &a, uint32_t before)
{
    if (threadIdx.x == 0) {
        a.to.box->layer = a.layer;
        a.to.box->rows = a.rows;
        a.to.box->active = a.active;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        a.to.sent->jobs = before + 1;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a.to.sent->ns));
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&a.to.box->posted),
                     "r"(before + 1)
                     : "memory");
    }
}

/* Those of the picked experts that are neither here nor on their way, fewest rows first. */
static __device__ void rank_missing(const int32_t *count, const int32_t *missing, int n,
                                    int32_t *rank, int32_t *rows)
{
    for (int m = threadIdx.x; m < n; m += THREADS) {
        int at = 0;

        for (int o = 0; o < n; o++)
            at += hx_plan_before(count[missing[o]], missing[o], count[missing[m]],
                                 missing[m]);
        rank[m] = at;
        rows[at] = count[missing[m]];
    }
}

/* One thread block: everything. Shared: counts and sides of all experts, the missing
 * ones. Where there is a lane the rows' inputs go to host memory, 4 R D bytes, and, when a
 * job is posted, its number last. */
__global__ void __launch_bounds__(THREADS) plan_picks(const __grid_constant__ plan_args a)
{
    __shared__ int32_t count[HX_PLAN_MAX_EXPERT];
    __shared__ uint8_t side[HX_PLAN_MAX_EXPERT];
    __shared__ int32_t missing[HX_PLAN_MAX_PICK], rows[HX_PLAN_MAX_PICK],
        rank[HX_PLAN_MAX_PICK];
    __shared__ int n_missing, n_here, take;
    __shared__ float coming;
    const int picks = a.rows * a.active;
    int32_t kept = -1;
    uint32_t jobs = 0;
    hx_plan_seen seen = {};

    if (threadIdx.x == 0)
        n_missing = n_here = 0, coming = 0;
    for (int e = threadIdx.x; e < a.n_expert; e += THREADS) {
        count[e] = 0;
        side[e] = a.resident[e] >= 0 ? HX_SIDE_HERE : HX_SIDE_LINK;
    }
    __syncthreads();
    hx_cuda_after_previous();
    if (!a.ahead)
        hx_cuda_allow_next(); /* else it may start when this one ends: moe's thread blocks
                               * could keep those of the fetch away that is waited for */
    if (a.lane && threadIdx.x == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a.to.sent->begin_ns));
        jobs = a.to.sent->jobs;
        seen = a.to.sent->seen;
    }
    for (int p = threadIdx.x; p < picks; p += THREADS)
        atomicAdd(&count[a.id[p]], 1);
    if (a.lane)
        send_rows(a);
    __syncthreads();
    if (a.ahead) {
        if (threadIdx.x < 32)
            kept = keep_fetched(a, side, count, &coming);
        __syncthreads();
    }
    for (int e = threadIdx.x; e < a.n_expert; e += THREADS) {
        const bool here = side[e] != HX_SIDE_LINK;

        if (count[e] > 0 && here)
            atomicAdd(&n_here, 1);
        if (count[e] > 0 && !here)
            missing[atomicAdd(&n_missing, 1)] = e;
    }
    __syncthreads();
    rank_missing(count, missing, n_missing, rank, rows);
    __syncthreads();
    if (threadIdx.x == 0) {
        take = hx_plan_lane(&a.rates, rows, n_missing, n_here, coming,
                            a.learn ? &seen : NULL);
        if (a.lane)
            a.to.sent->out = take > 0;
        if (a.learn)
            a.to.sent->seen = seen;
    }
    __syncthreads();
    for (int m = threadIdx.x; m < n_missing; m += THREADS)
        if (rank[m] < take)
            side[missing[m]] = HX_SIDE_LANE;
    __syncthreads();
    for (int p = threadIdx.x; p < picks; p += THREADS) {
        const int32_t id = a.id[p];
        const bool lane = side[id] == HX_SIDE_LANE;

        if (a.lane && take > 0)
            a.to.id[p] = lane ? id : -1;
        a.here[p] = lane ? -1 : id;
        a.there[p] = lane ? id : -1;
        a.log[p] = id | (int32_t)side[id] << 24;
    }
    if (a.lane && take > 0)
        post_job(a, jobs);
    if (a.ahead)
        end_fetch(a, kept);
}

extern "C" int hx_cuda_plan(hx_dev *d, const hx_plan_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    plan_args k = {};

    if (a->rows == 0)
        return 0;
    k.id = (const int32_t *)a->id.p;
    k.resident = (const int32_t *)a->resident.p;
    k.here = (int32_t *)a->here.p;
    k.there = (int32_t *)a->there.p;
    k.log = (int32_t *)a->log.p;
    k.x = (const float *)a->x.p;
    k.rows = (int)a->rows;
    k.active = (int)a->active;
    k.n_expert = (int)a->n_expert;
    k.layer = a->layer;
    k.dim = a->dim;
    k.rates = a->rates;
    k.lane = a->lane != NULL;
    k.learn = a->learn && k.lane;
    if (k.lane)
        k.to = hx_cuda_lane_of(a->lane);
    k.ahead = a->ahead != NULL;
    k.fetched = a->fetched;
    k.at = (hx_lease *)a->at.p;
    if (k.ahead)
        k.from = *a->ahead;
    HX_LAUNCH_NEXT(c, "plan", err, plan_picks, dim3(1), THREADS, 0, k);
    return 0;
}

/* ---- fetch ---------------------------------------------------------------- */

struct fetch_args {
    const int32_t *id, *resident;
    const hx_lease *at;
    hx_ahead_list *list;
    char *slots;
    size_t record;
    int rows, active;
};

/* The first block makes the list, the others wait for it: what it is made from may have
 * changed when they begin, for this layer's plan changes the table and the next prediction
 * the picks. One thread of a block. */
static __device__ void make_list(const fetch_args &a, const int32_t *pick, int picks)
{
    int32_t item[HX_AHEAD_SLOTS];
    const int n = hx_plan_fetch(pick, picks, item);

    for (int k = 0; k < n; k++) {
        *(volatile int32_t *)&a.list->id[k] = item[k];
        *(const void *volatile *)&a.list->from[k] = a.at[item[k]].gate.trellis;
    }
    __threadfence();
    *(volatile int32_t *)&a.list->n = n;
    __threadfence();
    *(volatile uint32_t *)&a.list->made = 1;
}

/* Piece by piece, block by block, the records of the list; before each a look whether the
 * layer's plan has come. Moves record_bytes an item over the link. Grid FETCH_BLOCKS. */
__global__ void __launch_bounds__(FETCH_THREADS)
    fetch_records(const __grid_constant__ fetch_args a)
{
    __shared__ int32_t pick[HX_PLAN_MAX_PICK];
    __shared__ const void *record[HX_AHEAD_SLOTS];
    __shared__ int n;
    __shared__ uint32_t stop;
    const int picks = a.rows * a.active, words = (int)(a.record / 16);
    const uint32_t pieces = hx_plan_pieces(a.record);

    for (int i = threadIdx.x; i < picks && blockIdx.x == 0; i += FETCH_THREADS)
        pick[i] = hx_plan_predicted(a.id, a.resident, a.at, a.rows, a.active, i);
    __syncthreads();
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0)
            make_list(a, pick, picks);
        while (*(volatile uint32_t *)&a.list->made == 0)
            ;
        __threadfence();
        n = *(volatile int32_t *)&a.list->n;
        for (int k = 0; k < n; k++)
            record[k] = *(const void *volatile *)&a.list->from[k];
    }
    __syncthreads();
    for (int k = 0; k < n; k++) {
        const uint4 *from = (const uint4 *)record[k];
        uint4 *to = (uint4 *)(a.slots + (size_t)k * a.record);

        for (uint32_t p = blockIdx.x; p < pieces; p += FETCH_BLOCKS) {
            const int at = (int)p * (HX_AHEAD_PIECE / 16) + (int)threadIdx.x;
            uint4 v[FETCH_LOADS];

            if (threadIdx.x == 0)
                stop = *(volatile uint32_t *)&a.list->stop;
            __syncthreads();
            if (stop != 0 && (stop & 1u << k) == 0)
                break;
#pragma unroll
            for (int i = 0; i < FETCH_LOADS; i++)
                if (at + i * FETCH_THREADS < words)
                    v[i] = __ldcs(from + at + i * FETCH_THREADS);
#pragma unroll
            for (int i = 0; i < FETCH_LOADS; i++)
                if (at + i * FETCH_THREADS < words)
                    to[at + i * FETCH_THREADS] = v[i];
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                atomicAdd(&a.list->part[k], 1u);
            }
        }
        __syncthreads(); /* stop has been read */
    }
}

static int link_fetch(hx_dev *d, const hx_fetch_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    hx_ahead_state *s = (hx_ahead_state *)a->to->state.p;
    fetch_args k = {};
    cudaError_t rc;

    k.id = (const int32_t *)a->id.p;
    k.resident = (const int32_t *)a->resident.p;
    k.at = (const hx_lease *)a->at.p;
    k.list = &s->list[a->layer & 1];
    k.slots = (char *)a->to->slots.p;
    k.record = a->to->record_bytes;
    k.rows = (int)a->rows;
    k.active = (int)a->active;
    if ((rc = cudaEventRecord(c->ahead.begin, c->stream)) == cudaSuccess &&
        (rc = cudaStreamWaitEvent(c->ahead.stream, c->ahead.begin, 0)) == cudaSuccess) {
        fetch_records<<<FETCH_BLOCKS, FETCH_THREADS, 0, c->ahead.stream>>>(k);
        rc = cudaGetLastError();
    }
    if (rc == cudaSuccess)
        rc = cudaEventRecord(c->ahead.end, c->ahead.stream);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "fetch", rc);
}

static int link_fetched(hx_dev *d, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const cudaError_t rc = cudaStreamWaitEvent(c->stream, c->ahead.end, 0);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "fetch", rc);
}

/* ---- memory that host and device share -------------------------------------- */

static hx_cuda *current(hx_dev *d)
{
    cudaSetDevice(hx_cuda_of(d)->device);
    return hx_cuda_of(d);
}

static int link_memory(hx_dev *d, uint64_t *free_bytes, uint64_t *total, hx_err *err)
{
    size_t f = 0, t = 0;

    current(d);
    const cudaError_t rc = cudaMemGetInfo(&f, &t);
    *free_bytes = f;
    *total = t;
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "memory", rc);
}

static int link_pin(hx_dev *d, void *p, size_t bytes, hx_err *err)
{
    void *seen = NULL;

    current(d);
    cudaError_t rc =
        cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (rc == cudaSuccess)
        rc = cudaHostGetDevicePointer(&seen, p, 0);
    if (rc != cudaSuccess)
        return hx_cuda_no_lock(err, "pin", bytes, rc);
    if (seen == p)
        return 0;
    cudaHostUnregister(p);
    return hx_fail(err, HX_EUNSUP,
                   "device cuda: host memory lies at other addresses for the GPU on this "
                   "system; use the device cpu");
}

static void link_unpin(hx_dev *d, void *p)
{
    current(d);
    cudaHostUnregister(p);
}

static int link_shared(hx_dev *d, hx_buf *out, size_t bytes, hx_err *err)
{
    void *p = NULL;

    current(d);
    *out = hx_buf { NULL, 0 };
    const cudaError_t rc =
        cudaHostAlloc(&p, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (rc != cudaSuccess)
        return hx_cuda_no_lock(err, "shared memory", bytes, rc);
    memset(p, 0, bytes);
    *out = hx_buf { p, bytes };
    return 0;
}

static void link_unshared(hx_dev *d, hx_buf *b)
{
    current(d);
    if (b->p != NULL)
        cudaFreeHost(b->p);
    *b = hx_buf { NULL, 0 };
}

/* ---- pushes ------------------------------------------------------------------ */

static int link_push(hx_dev *d, hx_buf to, const void *from, size_t bytes, hx_err *err)
{
    const cudaError_t rc =
        cudaMemcpyAsync(to.p, from, bytes, cudaMemcpyHostToDevice, current(d)->copies);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "push", rc);
}

static cudaEvent_t event_of(const hx_cuda *c, uint64_t ticket)
{
    return c->mark[ticket % HX_CUDA_MARKS];
}

static int link_push_mark(hx_dev *d, uint64_t *ticket, hx_err *err)
{
    hx_cuda *c = current(d);

    *ticket = ++c->n_mark;
    const cudaError_t rc = cudaEventRecord(event_of(c, *ticket), c->copies);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "push", rc);
}

/* An older mark's event may stand for a later one by now: that only makes it late. */
static bool link_pushed(hx_dev *d, uint64_t ticket)
{
    return cudaEventQuery(event_of(current(d), ticket)) == cudaSuccess;
}

static int link_await_push(hx_dev *d, uint64_t ticket, hx_err *err)
{
    hx_cuda *c = current(d);
    const cudaError_t rc = cudaStreamWaitEvent(c->stream, event_of(c, ticket), 0);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "push", rc);
}

static int link_hold_push(hx_dev *d, hx_err *err)
{
    hx_cuda *c = current(d);
    cudaError_t rc = cudaEventRecord(c->hold, c->stream);

    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->copies, c->hold, 0);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "push", rc);
}

/* ---- marks ------------------------------------------------------------------ */

static int link_bring(hx_dev *d, void *to, hx_buf from, size_t bytes, hx_err *err)
{
    const cudaError_t rc =
        cudaMemcpyAsync(to, from.p, bytes, cudaMemcpyDeviceToHost, current(d)->stream);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "bring", rc);
}

static int link_copy(hx_dev *d, hx_buf to, hx_buf from, size_t bytes, hx_err *err)
{
    const cudaError_t rc = cudaMemcpyAsync(to.p, from.p, bytes, cudaMemcpyDeviceToDevice,
                                           current(d)->stream);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "copy", rc);
}

static int link_mark(hx_dev *d, uint64_t *ticket, hx_err *err)
{
    hx_cuda *c = current(d);

    *ticket = ++c->n_now;
    const cudaError_t rc = cudaEventRecord(c->now[*ticket % 2], c->stream);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "mark", rc);
}

static int link_reach(hx_dev *d, uint64_t ticket, hx_err *err)
{
    const cudaError_t rc = cudaEventSynchronize(current(d)->now[ticket % 2]);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "mark", rc);
}

/* ---- beside the stream ------------------------------------------------------------ */

template <class T> static void swap(T &a, T &b)
{
    const T was = a;

    a = b;
    b = was;
}

/* What launchers take from the device changes places. */
static void change_sides(hx_cuda *c)
{
    swap(c->stream, c->side.stream);
    swap(c->scratch, c->side.scratch);
    swap(c->scratch_bytes, c->side.scratch_bytes);
    swap(c->ticket, c->side.ticket);
}

static int link_side(hx_dev *d, bool side, hx_err *err)
{
    hx_cuda *c = current(d);
    cudaError_t rc = cudaSuccess;

    if (side == c->side.on)
        return 0;
    if (side && (rc = cudaEventRecord(c->side.fork, c->stream)) == cudaSuccess)
        rc = cudaStreamWaitEvent(c->side.stream, c->side.fork, 0);
    change_sides(c);
    c->side.on = side;
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "side", rc);
}

static int link_join(hx_dev *d, hx_err *err)
{
    hx_cuda *c = current(d);
    cudaError_t rc = cudaEventRecord(c->side.join, c->side.stream);

    if (rc == cudaSuccess)
        rc = cudaStreamWaitEvent(c->stream, c->side.join, 0);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "join", rc);
}

int hx_cuda_side_open(hx_cuda *c, hx_err *err)
{
    const size_t tickets = (size_t)c->n_ticket * sizeof(int);
    void *p;
    cudaError_t rc = cudaStreamCreateWithFlags(&c->side.stream, cudaStreamNonBlocking);

    c->side.scratch_bytes = HX_MIN(c->scratch_bytes, SIDE_SCRATCH);
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&c->side.fork, cudaEventDisableTiming);
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&c->side.join, cudaEventDisableTiming);
    if (rc != cudaSuccess)
        return hx_cuda_fail(err, "open", rc);
    if (hx_cuda_alloc_for(&p, c->side.scratch_bytes, "scratch", err) != 0)
        return HX_ENOMEM;
    c->side.scratch = (char *)p;
    if (hx_cuda_alloc_for(&p, tickets, "tickets", err) != 0)
        return HX_ENOMEM;
    c->side.ticket = (int *)p;
    rc = cudaMemsetAsync(p, 0, tickets, c->stream);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "open", rc);
}

/* ---- graphs -------------------------------------------------------------------- */

struct hx_dev_graph {
    cudaGraphExec_t exec;
};

static int link_record(hx_dev *d, hx_err *err)
{
    const cudaError_t rc =
        cudaStreamBeginCapture(current(d)->stream, cudaStreamCaptureModeThreadLocal);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "record", rc);
}

static int link_record_end(hx_dev *d, hx_dev_graph **out, hx_err *err)
{
    cudaGraph_t graph = NULL;
    hx_dev_graph *g = hx_new(hx_dev_graph, 1);
    cudaError_t rc = cudaStreamEndCapture(current(d)->stream, &graph);

    *out = NULL;
    if (rc == cudaSuccess && g != NULL)
        rc = cudaGraphInstantiate(&g->exec, graph, 0);
    if (graph != NULL)
        cudaGraphDestroy(graph);
    if (g == NULL)
        return hx_fail(err, HX_ENOMEM, "record: no memory");
    if (rc != cudaSuccess) {
        hx_free(g);
        return hx_cuda_fail(err, "record", rc);
    }
    *out = g;
    return 0;
}

static int link_replay(hx_dev *d, hx_dev_graph *g, hx_err *err)
{
    const cudaError_t rc = cudaGraphLaunch(g->exec, current(d)->stream);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "replay", rc);
}

static void link_graph_free(hx_dev_graph *g)
{
    cudaGraphExecDestroy(g->exec);
    hx_free(g);
}

/* ---- open and close ---------------------------------------------------------------- */

int hx_cuda_link_open(hx_cuda *c, hx_err *err)
{
    cudaError_t rc = cudaStreamCreateWithFlags(&c->copies, cudaStreamNonBlocking);

    for (int i = 0; i < HX_CUDA_MARKS && rc == cudaSuccess; i++)
        rc = cudaEventCreateWithFlags(&c->mark[i], cudaEventDisableTiming);
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&c->hold, cudaEventDisableTiming);
    for (int i = 0; i < 2 && rc == cudaSuccess; i++)
        rc = cudaEventCreateWithFlags(&c->now[i],
                                      cudaEventDisableTiming | cudaEventBlockingSync);
    if (rc == cudaSuccess)
        rc = cudaStreamCreateWithFlags(&c->ahead.stream, cudaStreamNonBlocking);
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&c->ahead.begin, cudaEventDisableTiming);
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&c->ahead.end, cudaEventDisableTiming);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "open", rc);
}

void hx_cuda_link_close(hx_cuda *c)
{
    if (c->copies != NULL) {
        cudaStreamSynchronize(c->copies);
        cudaStreamDestroy(c->copies);
    }
    for (int i = 0; i < HX_CUDA_MARKS; i++)
        if (c->mark[i] != NULL)
            cudaEventDestroy(c->mark[i]);
    if (c->hold != NULL)
        cudaEventDestroy(c->hold);
    for (int i = 0; i < 2; i++)
        if (c->now[i] != NULL)
            cudaEventDestroy(c->now[i]);
    if (c->ahead.stream != NULL)
        cudaStreamDestroy(c->ahead.stream);
    if (c->ahead.begin != NULL)
        cudaEventDestroy(c->ahead.begin);
    if (c->ahead.end != NULL)
        cudaEventDestroy(c->ahead.end);
    if (c->side.stream != NULL)
        cudaStreamDestroy(c->side.stream);
    if (c->side.fork != NULL)
        cudaEventDestroy(c->side.fork);
    if (c->side.join != NULL)
        cudaEventDestroy(c->side.join);
    if (c->side.scratch != NULL)
        cudaFree(c->side.scratch);
    if (c->side.ticket != NULL)
        cudaFree(c->side.ticket);
}

const hx_dev_link hx_cuda_link = {
    link_memory,  link_pin,        link_unpin,     link_shared,     link_unshared,
    link_push,    link_push_mark,  link_pushed,    link_await_push, link_hold_push,
    link_bring,   link_copy,       link_mark,      link_reach,      link_fetch,
    link_fetched, link_side,       link_join,      link_record,     link_record_end,
    link_replay,  link_graph_free, &hx_cuda_encode
};
