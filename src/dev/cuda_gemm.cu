/* cuda_gemm.cu - products with many rows on the GPU (cuda_gemm.h). Called by
 * cuda_rows.cu, cuda_experts.cu and cuda_heads.cu. Never allocates, synchronises or
 * reads back.
 *
 * A thread block multiplies 128 outputs, a group, with up to 256 rows: the weights of a
 * group come to shared memory as stored, each warp makes those of its 16 outputs the A
 * operand in its registers, which is the order of a tile, and the rows are the B operand.
 * So a weight is decoded once for 256 rows, while the tensor cores work. Of weights that
 * are an image both operands of a product lie in shared memory. */
#include <type_traits>

#include "dev/cuda_gemm.h"

enum {
    OUT_ROWS = 64, /* that leave together */
    OUT_BYTES = OUT_ROWS * GROUP * 4,
    MOST_STAGES = 6,
    MOST_SHARED = 200 << 10, /* bytes: with less a thread block takes 128 rows */
    SHARE = 2,               /* thread blocks of a cluster on Hopper */
};

/* Of a thread block with N rows: those that multiply, and one more warp, which copies. For
 * 256 rows it brings three along, as registers move between groups of four warps only. */
template <int N> constexpr int threads_of = 32 * (WARPS + (N == MOST_ROWS ? 4 : 1));

/* ---- multiplying ------------------------------------------------------------------ */

/* One thread block's piece of work at a time. */
struct piece {
    int group, pos, rows;
    bool spare; /* one group too many: nothing of it leaves */
    const uint8_t *w;
    const uint16_t *svh;
    const float *out_scale;
};

/* Of a cluster's thread blocks; 0 without clusters. */
HX_DEVICE int rank_of(const hx_gemm &p)
{
    uint32_t rank = 0;

#if HX_WGMMA
    if (p.share > 1)
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return (int)rank;
}

/* Piece t of the cluster, this thread block's part of it. */
HX_DEVICE bool piece_at(const hx_gemm &p, int64_t t, int block_rows, piece *x)
{
    const int n_block =
        p.block != NULL ? *p.n_block : (p.rows + block_rows - 1) / block_rows;
    const int n_set = (p.groups + p.share - 1) / p.share;

    if (t >= (int64_t)n_block * n_set)
        return false;
    const int64_t per_band = (int64_t)n_block * p.band;
    const int band = (int)(t / per_band), at = (int)(t - band * per_band);
    const int width = min(p.band, n_set - band * p.band);
    const int b = at / width;

    x->group = (band * p.band + at % width) * p.share + rank_of(p);
    x->spare = x->group >= p.groups;
    x->group = min(x->group, p.groups - 1);
    x->w = p.w;
    x->svh = p.svh;
    x->out_scale = p.out_scale;
    x->pos = b * block_rows;
    x->rows = min(block_rows, p.rows - x->pos);
    if (p.block == NULL)
        return true;
    x->pos = p.block[b].pos;
    x->rows = p.block[b].rows;
    if (p.expert != NULL) {
        const hx_cuda_mat *m = matrix_of(&p.expert[p.block[b].expert], p.which);

        x->w = (const uint8_t *)m->trellis;
        x->svh = (const uint16_t *)m->svh;
    } else {
        x->w += p.block[b].expert * p.w_head;
        x->out_scale += (int64_t)p.block[b].expert * p.groups * GROUP;
    }
    return true;
}

/* Stages of 64 inputs in shared memory, filled and emptied in turn. */
struct pipe {
    uint8_t *x, *w;       /* [stages] rows, weights */
    uint32_t full, empty; /* [stages] barriers */
    int x_bytes, w_bytes, stages, at;
    uint32_t phase;

    __device__ __forceinline__ void next()
    {
        if (++at == stages) {
            at = 0;
            phase ^= 1;
        }
    }
};

/* Where a stage's bytes come from. The rows' lie in one or two pieces; those of the weights
 * in one, or in four rows of tiles. */
struct source {
    const uint8_t *x, *w;
    int64_t x_more, w_pitch, w_next; /* distance to the second piece; to the next row of
                                      * tiles; to the next stage */
    int bytes, more, n_w, each;      /* of x; of w */
};

HX_DEVICE source source_of(const hx_gemm &p, const pipe &s, const piece &t)
{
    const bool image = p.k2 == K2_HALF;
    const int parts = (t.rows + IMAGE_ROWS - 1) / IMAGE_ROWS;
    const int first = t.pos % MOST_ROWS / IMAGE_ROWS,
              here = min(parts, MOST_ROWS / IMAGE_ROWS - first);
    source f;

    f.x = p.image + (int64_t)(t.pos / MOST_ROWS) * p.steps * (MOST_ROWS * 128) +
          first * PART;
    f.bytes = here * PART / p.share; /* the others of the cluster copy the rest */
    f.more = (parts - here) * PART / p.share;
    f.x_more = (int64_t)p.steps * (MOST_ROWS * 128) - first * PART;
    f.n_w = image ? 1 : 4;
    f.each = s.w_bytes / f.n_w;
    f.w_pitch = (int64_t)p.groups * f.each;
    f.w_next = image ? f.each : 4 * f.w_pitch;
    f.w = t.w + (int64_t)t.group * (image ? p.steps : 1) * f.each;
    return f;
}

HX_DEVICE void fill(const hx_gemm &p, const pipe &s, const source &f, int rank)
{
    uint8_t *x_to = s.x + s.at * s.x_bytes, *w_to = s.w + s.at * s.w_bytes;

#if HX_BULK
    const uint32_t full = s.full + 8 * s.at;

    hx_bar_expect(full, (f.bytes + f.more) * p.share + s.w_bytes);
    hx_bulk_copy_all(hx_shared_of(x_to) + rank * f.bytes, f.x + rank * f.bytes, f.bytes,
                     full, p.share);
    if (f.more > 0)
        hx_bulk_copy_all(hx_shared_of(x_to) + f.bytes * p.share + rank * f.more,
                         f.x + f.x_more + rank * f.more, f.more, full, p.share);
    for (int i = 0; i < f.n_w; i++)
        hx_bulk_copy(hx_shared_of(w_to) + i * f.each, f.w + i * f.w_pitch, f.each, full);
#else
    const int lane = threadIdx.x & 31;

    for (int b = 16 * lane; b < f.bytes; b += 512)
        hx_copy16(x_to + b, f.x + b, true);
    for (int b = 16 * lane; b < f.more; b += 512)
        hx_copy16(x_to + f.bytes + b, f.x + f.x_more + b, true);
    for (int i = 0; i < f.n_w; i++)
        for (int b = 16 * lane; b < f.each; b += 512)
            hx_copy16(w_to + i * f.each + b, f.w + i * f.w_pitch + b, true);
    hx_bar_arrive_copies(s.full + 8 * s.at);
    (void)rank;
#endif
}

/* A warp is done with a stage: those who fill it hear of it, in every thread block of the
 * cluster. */
HX_DEVICE void drained(const hx_gemm &p, const pipe &s, int at)
{
    const int lane = threadIdx.x & 31;

    if (lane < p.share)
        hx_bar_arrive_at(s.empty + 8 * at, lane);
}

/* The last warp keeps the stages full; one thread of it where copies are counted, for the
 * lanes of a warp would copy in turn: eight a stage kept the others waiting a third of their
 * time (H200). */
template <int N> HX_DEVICE void produce(const hx_gemm &p, pipe s)
{
    const int share = p.share, rank = rank_of(p);
    piece t;

    if (HX_BULK && (threadIdx.x & 31) != 0)
        return;
    for (int64_t i = blockIdx.x / share; piece_at(p, i, N, &t); i += gridDim.x / share) {
        source f = source_of(p, s, t);

        for (int step = 0; step < p.steps; step++, s.next()) {
            hx_bar_wait(s.empty + 8 * s.at, s.phase ^ 1);
            fill(p, s, f, rank);
            f.x += MOST_ROWS * 128;
            f.w += f.w_next;
        }
    }
}

/* The weights of a stage. */
template <class F>
HX_DEVICE void decode_stage(const hx_gemm &p, const pipe &s, uint32_t a[4][4])
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint8_t *w = s.w + s.at * s.w_bytes;

    if constexpr (std::is_same_v<F, halves>) {
#if !HX_WGMMA
        const int row = 16 * warp + (lane & 15);

#pragma unroll
        for (int i = 0; i < 4; i++)
            hx_ldmatrix(a[i], hx_shared_of(w) + row * 128 +
                                  16 * ((2 * i + (lane >> 4)) ^ (row & 7)));
#endif
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            F::decode(w + i * (s.w_bytes / 4) + warp * (s.w_bytes / 32), p.k2, p.cb, lane,
                      a[i]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        HX_PIN(a[i >> 2][i & 3], "r");
}

#if HX_WGMMA

/* A stage's products join the queue; those of the stage before end; then, while these run,
 * the weights of the next stage are made. So the tensor cores always have work. */
template <class F, int N>
HX_DEVICE void multiply_stage(const hx_gemm &p, pipe &s, float *d, uint32_t now[4][4],
                              uint32_t then[4][4], int step)
{
    const int at = s.at, before = (at == 0 ? s.stages : at) - 1;
    const uint64_t x = hx_wgmma_matrix(hx_shared_of(s.x + at * s.x_bytes));

    hx_wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; i++)
        hx_wgmma<N>(d, now[i], x + 2 * i, step + i > 0);
    hx_wgmma_commit();
    hx_wgmma_wait_older();
#pragma unroll
    for (int i = 0; i < 16; i++)
        HX_PIN(then[i >> 2][i & 3], "r");
    if (step > 0)
        drained(p, s, before);
    s.next();
    if (step + 1 < p.steps) {
        hx_bar_wait(s.full + 8 * s.at, s.phase);
        decode_stage<F>(p, s, then);
    }
}

/* The same of weights that lie there as the rows do: nothing to make. */
template <int N> HX_DEVICE void multiply_images(const hx_gemm &p, pipe &s, float *d)
{
    for (int step = 0; step < p.steps; step++, s.next()) {
        const int at = s.at, before = (at == 0 ? s.stages : at) - 1;
        const uint64_t x = hx_wgmma_matrix(hx_shared_of(s.x + at * s.x_bytes));
        const uint64_t w = hx_wgmma_matrix(
            hx_shared_of(s.w + at * s.w_bytes + (threadIdx.x >> 7) * PART));

        hx_bar_wait(s.full + 8 * at, s.phase);
        hx_wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            hx_wgmma_shared<N>(d, w + 2 * i, x + 2 * i, step + i > 0);
        hx_wgmma_commit();
        hx_wgmma_wait_older();
        if (step > 0)
            drained(p, s, before);
    }
    hx_wgmma_wait();
    drained(p, s, (s.at == 0 ? s.stages : s.at) - 1);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        HX_PIN(d[i], "f");
}

template <class F, int N> HX_DEVICE void multiply(const hx_gemm &p, pipe &s, float *d)
{
    if constexpr (std::is_same_v<F, halves>)
        return multiply_images<N>(p, s, d);
    uint32_t a[2][4][4] = {};

    hx_bar_wait(s.full + 8 * s.at, s.phase);
    decode_stage<F>(p, s, a[0]);
    for (int step = 0; step < p.steps; step += 2) {
        multiply_stage<F, N>(p, s, d, a[0], a[1], step);
        multiply_stage<F, N>(p, s, d, a[1], a[0], step + 1);
    }
    hx_wgmma_wait();
    drained(p, s, (s.at == 0 ? s.stages : s.at) - 1);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        HX_PIN(d[i], "f");
#pragma unroll
    for (int i = 0; i < 32; i++)
        HX_PIN(a[i >> 4][i >> 2 & 3][i & 3], "r");
}

#else

template <class F, int N> HX_DEVICE void multiply(const hx_gemm &p, pipe &s, float *d)
{
    const int lane = threadIdx.x & 31;

#pragma unroll
    for (int i = 0; i < N / 2; i++)
        d[i] = 0;
    for (int step = 0; step < p.steps; step++, s.next()) {
        uint32_t a[4][4];

        hx_bar_wait(s.full + 8 * s.at, s.phase);
        decode_stage<F>(p, s, a);
        const uint32_t x = hx_shared_of(s.x + s.at * s.x_bytes);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < N; r += 16) {
                const int row = r + (lane & 7) + (lane >> 4) * 8,
                          c = 2 * i + (lane >> 3 & 1);
                uint32_t b[4];

                hx_ldmatrix(b, x + row * 128 + 16 * (c ^ (row & 7)));
                hx_mma(d + r / 2, a[i], b[0], b[1]);
                hx_mma(d + r / 2 + 4, a[i], b[2], b[3]);
            }
        __syncwarp();
        drained(p, s, s.at);
    }
}

#endif

/* What ends a piece: factor and bias of output threadIdx.x; scale and place of row 64
 * (lane / 8) + 8 warp + lane % 8. */
struct ending {
    float factor, bias;
    hx_row_scale scale;
    int32_t row;
};

HX_DEVICE ending ending_of(const hx_gemm &p, const piece &t)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int r = 64 * (lane >> 3) + 8 * warp + (lane & 7);
    const int64_t col = (int64_t)t.group * GROUP + threadIdx.x;
    const bool in = threadIdx.x < GROUP && col < p.n;
    ending e;

    e.factor = !in                   ? 0.0f
               : t.svh != NULL       ? hx_half_to(t.svh[col])
               : t.out_scale != NULL ? t.out_scale[col]
                                     : 1.0f;
    e.bias = in && p.bias != NULL ? hx_half_to(p.bias[col]) : 0.0f;
    e.scale = p.scale[t.pos + min(r, t.rows - 1)];
    e.row = r < t.rows && p.row != NULL ? p.row[t.pos + r] : t.pos + r;
    return e;
}

/* The sums of 64 rows go to shared memory: 16-byte piece i of a row lies at i ^ swap(row),
 * so that neither side has bank conflicts. */
HX_DEVICE int swap(int row)
{
    return (row & 2) | ((row >> 2 ^ row) & 1) << 2;
}

HX_DEVICE void put_sums(const float *d, float *out, bool rotate)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;

#pragma unroll
    for (int i = 0; i < OUT_ROWS / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int r = 2 * q + j, piece = (4 * warp + (g >> 2)) ^ swap(r);
            float *to = out + (8 * i + r) * GROUP + (g & 3);
            float low = d[4 * i + j], high = d[4 * i + j + 2]; /* outputs g, g + 8 */

            if (rotate)
                fold(low, high);
            to[4 * piece] = low;
            to[4 * (piece ^ 2)] = high;
        }
}

/* Rows of the piece leave 64 at a time through shared memory, where a quarter of a row is
 * a thread's. */
template <int N>
HX_DEVICE void store(const hx_gemm &p, const piece &t, const ending &e, const float *d,
                     float *out)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
    const int r = 8 * warp + (lane >> 2);
    const int64_t col = (int64_t)t.group * GROUP + 4 * q;
    float *factor = out + OUT_ROWS * GROUP, *bias = factor + GROUP;

#pragma unroll
    for (int c = 0; c < N / OUT_ROWS; c++) {
        if (c * OUT_ROWS >= t.rows)
            break;
        hx_bar_sync(1, 32 * WARPS);
        if (c == 0 && threadIdx.x < GROUP) {
            factor[threadIdx.x] = e.factor;
            bias[threadIdx.x] = e.bias;
        }
        put_sums(d + 32 * c, out, t.svh != NULL);
        hx_bar_sync(1, 32 * WARPS);
        const hx_row_scale scale = { __shfl_sync(~0u, e.scale.by, 8 * c + (lane >> 2)),
                                     __shfl_sync(~0u, e.scale.first,
                                                 8 * c + (lane >> 2)) };
        const int64_t row = __shfl_sync(~0u, e.row, 8 * c + (lane >> 2));
        float v[8][4];

#pragma unroll
        for (int i = 0; i < 8; i++)
            *(float4 *)v[i] =
                *(const float4 *)(out + r * GROUP + 4 * ((q + 4 * i) ^ swap(r)));
        if (t.svh != NULL)
            rotate_sums(v);
        if (c * OUT_ROWS + r < t.rows && !t.spare)
            leave(p, v, factor + 4 * q, bias + 4 * q, scale, row, col);
    }
}

/* Eight warps multiply, 16 outputs each, with N rows; one copies. Grid: as many blocks as
 * fit, each takes pieces in turn. Shared: stages of N x 64 halves and 64 x 128 weights as
 * stored, 33 KB for the sums on their way out, the barriers. Moves the weights of a group
 * once for every N rows, the image once for every group; y once. */
template <class F, int N>
__global__ void __launch_bounds__(threads_of<N>, N == 64 ? 2 : 1)
    gemm_pieces(const __grid_constant__ hx_gemm p)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5;
    pipe s;
    piece t;

    s.stages = p.stages;
    s.x_bytes = N * 128;
    s.w_bytes = 512 * p.k2;
    s.x = shared;
    s.w = s.x + s.stages * s.x_bytes;
    float *out = (float *)(s.w + s.stages * s.w_bytes);
    s.full = hx_shared_of(out) + OUT_BYTES + ENDING_BYTES;
    s.empty = s.full + 8 * MOST_STAGES;
    s.at = 0;
    s.phase = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < s.stages; i++) {
            hx_bar_init(s.full + 8 * i, HX_BULK ? 1 : 32);
            hx_bar_init(s.empty + 8 * i, WARPS * p.share);
        }
        hx_bar_init_done();
    }
    __syncthreads();
    if (p.share > 1)
        hx_cluster_meet();
    hx_cuda_after_previous();
    if (warp >= WARPS) {
        if (N == MOST_ROWS)
            hx_registers_fewer<40>();
        if (warp == WARPS)
            produce<N>(p, s);
    } else {
        if (N == MOST_ROWS)
            hx_registers_more<232>();
        for (int64_t i = blockIdx.x / p.share; piece_at(p, i, N, &t);
             i += gridDim.x / p.share) {
            const ending e = ending_of(p, t);
            float d[N / 2];

            if (N == MOST_ROWS && t.rows <= 128)
                multiply<F, 128>(p, s, d);
            else
                multiply<F, N>(p, s, d);
            store<N>(p, t, e, d, out);
        }
    }
    if (p.share > 1)
        hx_cluster_meet(); /* none ends while others reach into its shared memory */
}

/* ---- launching ---------------------------------------------------------------------- */

static constexpr size_t shared_bytes(int n, int k2, int stages)
{
    return (size_t)stages * (size_t)(n * 128 + 512 * k2) + OUT_BYTES + ENDING_BYTES +
           16 * MOST_STAGES;
}
static_assert(shared_bytes(64, K2_HALF, 2) <= HX_CUDA_LEAST_SHARED, "any GPU takes it");

/* sets: pieces of a cluster. */
template <class F, int N>
static cudaError_t launch(hx_gemm p, const hx_cuda_work *w, int64_t sets,
                          cudaStream_t stream)
{
    const hx_cuda_gpu *g = &w->gpu;
    const bool few = sets * p.share <= g->n_sm;
    const int each =
        N == 64 && !few && shared_bytes(N, p.k2, 2) <= g->sm_bytes / 2 - 1024 ? 2 : 1;
    const size_t room = HX_MIN(g->block_bytes, g->sm_bytes / each - 1024);
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t cfg = {};

    for (p.stages = MOST_STAGES; shared_bytes(N, p.k2, p.stages) > room; p.stages--)
        ;
    /* Two thread blocks on one multiprocessor would leave another idle. */
    cfg.dynamicSmemBytes = HX_MAX(shared_bytes(N, p.k2, p.stages),
                                  few ? HX_MIN(g->block_bytes, g->sm_bytes / 2) : 0);
    cfg.gridDim =
        dim3((unsigned)(HX_MIN(sets, (int64_t)g->n_sm * each / p.share) * p.share));
    cfg.blockDim = dim3(threads_of<N>);
    cfg.stream = stream;
    cfg.attrs = attr;
    if (w->overlap) {
        attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attr[0].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs = 1;
    }
    if (p.share > 1) {
        attr[cfg.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attr[cfg.numAttrs].val.clusterDim = { (unsigned)p.share, 1, 1 };
        cfg.numAttrs++;
    }
    const cudaError_t rc = cudaFuncSetAttribute(
        gemm_pieces<F, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
        (int)cfg.dynamicSmemBytes);
    return rc != cudaSuccess ? rc : cudaLaunchKernelEx(&cfg, gemm_pieces<F, N>, p);
}

/* The most rows of a thread block for which two stages fit. */
int hx_cuda_gemm_rows(int k2, const hx_cuda_gpu *g)
{
    int n = g->block_bytes >= MOST_SHARED ? MOST_ROWS : MOST_ROWS / 2;

    while (n > 64 && shared_bytes(n, k2, 2) > g->block_bytes)
        n /= 2;
    return n;
}

/* Rows of a thread block, by the time of a wave of them (4096 inputs, us, H200); all give
 * the same bits. */
static int choose_rows(const hx_gemm *p, const hx_cuda_gpu *g)
{
    static const int rows[] = { 64, 128, 256 };
    static const int64_t wave[] = { 44, 48, 62 };
    int64_t least = INT64_MAX;
    int best = 64;

    for (int i = 0; i < 3 && rows[i] <= hx_cuda_gemm_rows(p->k2, g); i++) {
        const int64_t pieces = hx_ceil_div(p->rows, rows[i]) * p->groups;
        const int64_t cost = hx_ceil_div(pieces, g->n_sm) * wave[i];

        if (cost < least) {
            least = cost;
            best = rows[i];
        }
    }
    return best;
}

/* blocks: the most there can be, with a plan. */
template <class F>
static cudaError_t launch_rows(hx_gemm *p, const hx_cuda_work *w, int64_t blocks,
                               cudaStream_t stream)
{
    const int n = p->block_rows > 0 ? p->block_rows : choose_rows(p, &w->gpu);

    if constexpr (std::is_same_v<F, halves>)
        if (n == MOST_ROWS && w->gpu.hopper && p->groups > 1 && p->block == NULL)
            return hx_cuda_dense(p, w, stream);
    p->share = w->gpu.hopper && p->groups > 1 ? SHARE : 1;
    const int64_t sets = hx_ceil_div(p->groups, p->share);
    p->band = (int)(p->block == NULL ? HX_MIN(sets, 64 / p->share) : sets);
    if (p->block == NULL)
        blocks = hx_ceil_div(p->rows, n);
    return n == 64    ? launch<F, 64>(*p, w, blocks * sets, stream)
           : n == 128 ? launch<F, 128>(*p, w, blocks * sets, stream)
                      : launch<F, 256>(*p, w, blocks * sets, stream);
}

cudaError_t hx_cuda_gemm(hx_gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                         int64_t blocks, cudaStream_t stream)
{
    if (p->k2 == K2_HALF)
        return launch_rows<halves>(p, w, blocks, stream);
    if (hx_cuda_few_takes(p, w))
        return hx_cuda_few(p, w, codebook, stream);
    p->cb = hx_cuda_codebook_of(codebook);
    return with_exl3(p->k2, codebook, [&](auto f) {
        return launch_rows<decltype(f)>(p, w, blocks, stream);
    });
}
