/* cuda_attn.cu - sequence memory on the GPU: latents, pooled index keys, index scores,
 * the best of them, attention over latents. Called through the operation table in
 * cuda.cu. Never allocates, waits or reads back; spans and page tables are read where
 * they are, so that a decode step can be replayed at any length.
 *
 * All sums are fp32 FMAs in an order that follows the row's own length, decode and prefill
 * alike; attention of prefill rows on Hopper is cuda_mla.cu. */
#include <cuda_fp16.h>

#include "dev/cuda.h"
#include "dev/cuda_pages.h"

enum { ROW_THREADS = 128 };

static const int64_t GRID_Y = 65535; /* the most of a grid's second dimension */

/* ---- pages ----------------------------------------------------------- */

HX_DEVICE void page_store(const page_args &g, int64_t at, float v)
{
    if (g.f32 != 0)
        ((float *)g.data)[at] = v;
    else
        ((uint16_t *)g.data)[at] = hx_bf16_from(v);
}

HX_DEVICE float wide(float v)
{
    return v;
}

HX_DEVICE float wide(uint16_t v)
{
    return hx_bf16_to(v);
}

/* ---- latents --------------------------------------------------------- */

typedef struct {
    const float *c;
    int64_t ldc, row0;
    page_args cache;
} latent_args;

__global__ void append_latents(const latent_args a,
                               const __grid_constant__ hx_cuda_spans spans);

extern "C" int hx_cuda_latent_append(hx_dev *d, const hx_latent_append_args *a,
                                     hx_err *err)
{
    latent_args k = { (const float *)a->c.p, a->ldc, 0, {} };
    hx_cuda *c = hx_cuda_of(d);
    hx_cuda_spans spans;
    int rc;

    if ((rc = hx_cuda_spans_of(&spans, &a->rows, "latent_append", err)) != 0 ||
        (rc = pages_of(&k.cache, &a->cache, "latent_append", err)) != 0)
        return rc;
    HX_LAUNCH_NEXT(c, "latent_append", err, append_latents, dim3((unsigned)a->rows.n_row),
                   ROW_THREADS, 0, k, spans);
    return 0;
}

/* As hx_page_put_fp8, by the block. */
HX_DEVICE void store_fp8(const page_args &g, int64_t at, int64_t scale_at, const float *c)
{
    __shared__ uint32_t peak;
    uint8_t *data = (uint8_t *)g.data;
    uint32_t mine = 0;

    if (threadIdx.x == 0)
        peak = 0;
    for (int i = threadIdx.x; i < g.width; i += ROW_THREADS)
        mine = max(mine, hx_bits_of(c[i]) & 0x7FFFFFFFu);
    __syncthreads();
    atomicMax(&peak, mine);
    __syncthreads();
    const uint8_t scale = hx_page_scale_of(peak);
    for (int i = threadIdx.x; i < g.width; i += ROW_THREADS)
        data[at + i] = hx_e4m3_from(c[i] * hx_page_unscale(scale));
    if (threadIdx.x == 0)
        data[scale_at] = scale;
}

/* One block: one row. Grid rows. Reads the row, writes it rounded. */
__global__ void __launch_bounds__(ROW_THREADS)
    append_latents(const latent_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    const int64_t row = blockIdx.x;
    const hx_span s = hx_span_of_row(spans, row);

    if (s.n_row == 0)
        return;
    const int pos = s.pos0 + (int)(row - s.row0);
    const int64_t at = page_item(a.cache, s.slot, pos, HX_PAGE);
    if (a.cache.fp8 != 0) {
        store_fp8(a.cache, at, page_scale(a.cache, at, pos), a.c + row * a.ldc);
        return;
    }
    for (int i = threadIdx.x; i < a.cache.width; i += ROW_THREADS)
        page_store(a.cache, at + i, a.c[row * a.ldc + i]);
}

/* ---- pooled index keys ----------------------------------------------- */

enum { MAX_POOL = 8, POOLS = 1, RING = 2 };

typedef struct {
    const float *key, *gate, *ape;
    float *ring;
    page_args pool;
    int pool_n, what; /* POOLS, RING or both */
} index_args;

/* Key and gate of position pos in a slot's ring. */
HX_DEVICE float *ring_at(const index_args &a, int slot, int pos)
{
    return a.ring + ((int64_t)slot * HX_RING + pos % HX_RING) * 2 * a.pool.width;
}

/* Channel c of the pool that ends with row t of the span, from rows of the call and,
 * before these, from the ring. */
HX_DEVICE float pool_key(const index_args &a, const hx_span &s, int t, int c)
{
    const int width = a.pool.width, first = t - a.pool_n + 1;
    float logit[MAX_POOL], key[MAX_POOL], top = -INFINITY, mass = 0, sum = 0;

#pragma unroll
    for (int i = 0; i < MAX_POOL; i++) {
        if (i >= a.pool_n)
            break;
        const int64_t at = ((int64_t)s.row0 + first + i) * width + c;
        const float *old = ring_at(a, s.slot, s.pos0 + first + i);

        key[i] = first + i >= 0 ? a.key[at] : old[c];
        logit[i] = (first + i >= 0 ? a.gate[at] : old[width + c]) + a.ape[i * width + c];
        top = fmaxf(top, logit[i]);
    }
#pragma unroll
    for (int i = 0; i < MAX_POOL; i++) {
        if (i >= a.pool_n)
            break;
        const float e = expf(logit[i] - top);

        mass += e;
        sum = fmaf(e, key[i], sum);
    }
    return sum / mass;
}

__global__ void append_index(const index_args a,
                             const __grid_constant__ hx_cuda_spans spans);

/* Up to HX_RING - P + 1 rows take no place in the ring that a pool still needs: one
 * launch does both. */
extern "C" int hx_cuda_index_append(hx_dev *d, const hx_index_append_args *a, hx_err *err)
{
    const bool once = a->rows.n_row + a->pool_n - 1 <= HX_RING;
    index_args k = { (const float *)a->key.p,
                     (const float *)a->gate.p,
                     (const float *)a->ape.p,
                     (float *)a->ring.p,
                     {},
                     (int)a->pool_n,
                     once ? POOLS | RING : POOLS };
    const dim3 grid((unsigned)a->rows.n_row);
    hx_cuda *c = hx_cuda_of(d);
    hx_cuda_spans spans;
    int rc;

    if ((rc = hx_cuda_spans_of(&spans, &a->rows, "index_append", err)) != 0 ||
        (rc = pages_of(&k.pool, &a->pool, "index_append", err)) != 0)
        return rc;
    HX_LAUNCH_NEXT(c, "index_append", err, append_index, grid, ROW_THREADS, 0, k, spans);
    if (once)
        return 0;
    k.what = RING;
    HX_LAUNCH_NEXT(c, "index_append", err, append_index, grid, ROW_THREADS, 0, k, spans);
    return 0;
}

/* One block: one row. Grid rows. Where a pool ends, makes its key; keeps the row in the
 * ring, if it is among the span's last HX_RING. */
__global__ void __launch_bounds__(ROW_THREADS)
    append_index(const index_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    const int64_t row = blockIdx.x;
    const hx_span s = hx_span_of_row(spans, row);
    const int t = (int)(row - s.row0), pos = s.pos0 + t, width = a.pool.width;

    if (s.n_row == 0)
        return;
    if ((a.what & POOLS) != 0 && (pos + 1) % a.pool_n == 0) {
        const int64_t to = page_item(a.pool, s.slot, pos / a.pool_n, HX_PAGE / a.pool_n);

        for (int c = threadIdx.x; c < width; c += ROW_THREADS)
            page_store(a.pool, to + c, pool_key(a, s, t, c));
    }
    if ((a.what & RING) != 0 && t >= s.n_row - HX_RING) {
        float *to = ring_at(a, s.slot, pos);

        for (int c = threadIdx.x; c < width; c += ROW_THREADS) {
            to[c] = a.key[row * width + c];
            to[width + c] = a.gate[row * width + c];
        }
    }
}

/* ---- small dense products -------------------------------------------- */

/* dot[a][b] += x[x0 + 4 a] . y[y0 + 8 b] over n floats, for the warp's lanes: lane = 8 *
 * xi + yi has x0 = xi and y0 = yi. Rows are ld floats apart; ld is 4 more than a multiple
 * of 32, so that no two lanes meet in a bank. */
template <int A, int B>
HX_DEVICE void warp_dots(float (&dot)[A][B], const float *x, const float *y, int ld,
                         int n)
{
#pragma unroll 4
    for (int k = 0; k < n; k += 4) {
        float4 xv[A], yv[B];

#pragma unroll
        for (int i = 0; i < A; i++)
            xv[i] = *(const float4 *)(x + 4 * i * ld + k);
#pragma unroll
        for (int j = 0; j < B; j++)
            yv[j] = *(const float4 *)(y + 8 * j * ld + k);
#pragma unroll
        for (int i = 0; i < A; i++)
#pragma unroll
            for (int j = 0; j < B; j++) {
                dot[i][j] = fmaf(xv[i].x, yv[j].x, dot[i][j]);
                dot[i][j] = fmaf(xv[i].y, yv[j].y, dot[i][j]);
                dot[i][j] = fmaf(xv[i].z, yv[j].z, dot[i][j]);
                dot[i][j] = fmaf(xv[i].w, yv[j].w, dot[i][j]);
            }
    }
}

/* Matrix units take bf16 and sum in fp32. An fp32 value is the exact sum of three bf16,
 * so with operands that are stored as bf16 three products of a matrix give those of fp32.
 * The units cut off what they add up, so the two small ones go first and sums stay short.
 */
enum { SPLIT_BF16 = 3 };

HX_DEVICE uint32_t pack_bf16(float lo, float hi)
{
    uint32_t r;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Two neighbours of a row, largest part first. */
HX_DEVICE void split_bf16(float x, float y, uint32_t (&part)[SPLIT_BF16])
{
#pragma unroll
    for (int i = 0; i < SPLIT_BF16; i++) {
        part[i] = pack_bf16(x, y);
        x -= hx_float_of(part[i] << 16);
        y -= hx_float_of(part[i] & 0xFFFF0000u);
    }
}

/* d += a b: a [16, 16] and b [16, 8] bf16. Of d, a lane has row lane / 4, columns
 * 2 (lane % 4) and the next, and the same of row lane / 4 + 8. */
HX_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four matrices [8, 8] of bf16; the lanes give the addresses of their rows. */
HX_DEVICE void load_matrices(uint32_t (&r)[4], const uint16_t *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

HX_DEVICE void load_transposed(uint32_t (&r)[4], const uint16_t *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* 16 bytes to shared memory on their own; zeros instead where in is false. */
HX_DEVICE void copy16(void *to, const void *from, bool in)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(in ? 16 : 0)
                 : "memory");
}

HX_DEVICE void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

HX_DEVICE void copy_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Waits for all but the newest group. */
HX_DEVICE void copy_wait_older(void)
{
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

/* Rows lane / 4 and lane / 4 + 8 of x, columns of one step of 16, as operand a. Rows from
 * n_row on and columns from n_col on are 0. PAIRS: ld and n_col are even and x is a
 * multiple of 8. */
template <bool PAIRS>
HX_DEVICE void split_rows(uint32_t (&a)[SPLIT_BF16][4], const float *x, int64_t ld,
                          int n_row, int n_col)
{
    const int lane = threadIdx.x & 31, c = 2 * (lane & 3);

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = (lane >> 2) + 8 * (i & 1), col = c + 8 * (i >> 1);
        const float *at = x + row * ld + col;
        const bool in0 = row < n_row && col < n_col, in1 = row < n_row && col + 1 < n_col;
        uint32_t part[SPLIT_BF16];
        float2 v;

        if (PAIRS)
            v = in0 ? *(const float2 *)at : make_float2(0, 0);
        else
            v = make_float2(in0 ? at[0] : 0.0f, in1 ? at[1] : 0.0f);
        split_bf16(v.x, v.y, part);
#pragma unroll
        for (int k = 0; k < SPLIT_BF16; k++)
            a[k][i] = part[k];
    }
}

/* ---- index scores ---------------------------------------------------- */

enum {
    SCORE_POOLS = 64, /* of a tile; a warp has half of them; as MMA_POOLS */
    SCORE_HEADS = 32, /* likewise */
    SCORE_WIDTH = 128,
    SCORE_LD = SCORE_WIDTH + 4,
    SCORE_THREADS = 128,
};

typedef struct {
    float *score;
    const float *q, *w;
    page_args pool;
    int64_t ld_score, row0;
    int heads, pool_n;
    float scale, w_scale;
} score_args;

typedef struct {
    float q[SCORE_HEADS][SCORE_LD], key[SCORE_POOLS][SCORE_LD];
    float w[SCORE_HEADS], half[SCORE_POOLS];
} score_room;

/* n rows of m floats into rows SCORE_LD apart, rows up to n_all and columns up to
 * SCORE_WIDTH filled with 0. from(row) is where a row begins. */
template <class T, class F>
HX_DEVICE void score_fill(float (*to)[SCORE_LD], int n_all, int n, int m, const T *p,
                          F from)
{
    const bool fours = m % 4 == 0 && ((uintptr_t)p & (4 * sizeof(T) - 1)) == 0;

    for (int i = threadIdx.x; i < n_all * (SCORE_WIDTH / 4); i += SCORE_THREADS) {
        const int r = i / (SCORE_WIDTH / 4), c = i % (SCORE_WIDTH / 4) * 4;
        float v[4] = { 0, 0, 0, 0 };

        if (r < n && c < m) {
            const T *at = p + from(r) + c;
            T raw[4];

            if (fours && ((uintptr_t)at & (4 * sizeof(T) - 1)) == 0)
                memcpy(raw, __builtin_assume_aligned(at, 4 * sizeof(T)), sizeof(raw));
            else
                for (int e = 0; e < 4; e++)
                    raw[e] = at[c + e < m ? e : 0];
            for (int e = 0; e < 4; e++)
                v[e] = c + e < m ? wide(raw[e]) : 0.0f;
        }
        *(float4 *)&to[r][c] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

/* Queries and weights of heads from h0 on, channels from c0 on. */
HX_DEVICE void score_queries(const score_args &a, int64_t row, int h0, int c0,
                             score_room *room)
{
    const int n = min(SCORE_HEADS, a.heads - h0), width = a.pool.width;
    const float *q = a.q + (row * a.heads + h0) * width + c0;

    score_fill(room->q, SCORE_HEADS, n, min(SCORE_WIDTH, width - c0), q,
               [=](int r) { return (int64_t)r * width; });
    if (threadIdx.x < SCORE_HEADS)
        room->w[threadIdx.x] = (int)threadIdx.x < n
                                   ? a.w[row * a.heads + h0 + threadIdx.x] * a.w_scale
                                   : 0.0f;
}

/* Keys of n pools from p0 on, channels from c0 on. */
template <class T>
HX_DEVICE void score_keys(const score_args &a, int slot, int p0, int n, int c0,
                          score_room *room)
{
    const int per = HX_PAGE / a.pool_n;

    score_fill(room->key, SCORE_POOLS, n, min(SCORE_WIDTH, a.pool.width - c0),
               (const T *)a.pool.data + c0,
               [=](int r) { return page_item(a.pool, slot, p0 + r, per); });
}

/* The heads in shared memory: adds w relu(dot) to the lane's pools, and across the lanes
 * of a pool. A warp has 16 heads and 32 pools, a lane 4 and 4. */
HX_DEVICE void score_heads(const score_args &a, const float (&dot)[4][4],
                           const score_room *room, float (&sum)[4])
{
    const int lane = threadIdx.x & 31, h0 = (threadIdx.x >> 6) * 16 + (lane >> 3);

#pragma unroll
    for (int j = 0; j < 4; j++) {
        float part = 0;

#pragma unroll
        for (int i = 0; i < 4; i++)
            part = fmaf(room->w[h0 + 4 * i], fmaxf(0.0f, dot[i][j] * a.scale), part);
        part += __shfl_xor_sync(~0u, part, 8);
        part += __shfl_xor_sync(~0u, part, 16);
        sum[j] += part;
    }
}

enum {
    MMA_POOLS = 64, /* of a tile; a warp has 16 of them and 16 heads */
    MMA_STEPS = SCORE_WIDTH / 16,
    MMA_KEY_LD = SCORE_WIDTH + 8,
    MMA_THREADS = 256,
};

template <class T>
__global__ void score_pools(const score_args a,
                            const __grid_constant__ hx_cuda_spans spans);
__global__ void score_pools_mma(const score_args a,
                                const __grid_constant__ hx_cuda_spans spans);

/* Positions that a row may have: what the spans say, or, where they lie on the device,
 * what a slot has pages for. */
static int64_t most_positions(const hx_rows *r, int64_t max_page)
{
    int64_t most = 0;

    if (r->dev.p != NULL)
        return max_page * HX_PAGE;
    for (int32_t i = 0; i < r->n_span; i++)
        most = HX_MAX(most, (int64_t)r->span[i].pos0 + r->span[i].n_row);
    return HX_MIN(most, max_page * HX_PAGE);
}

extern "C" int hx_cuda_index_score(hx_dev *d, const hx_index_score_args *a, hx_err *err)
{
    score_args k = { (float *)a->score.p,
                     (const float *)a->q.p,
                     (const float *)a->w.p,
                     {},
                     a->ld_score,
                     0,
                     (int)a->heads,
                     (int)a->pool_n,
                     a->scale,
                     a->w_scale };
    const int64_t pools =
        HX_MIN(most_positions(&a->rows, a->pool.max_page) / a->pool_n, a->ld_score);
    hx_cuda *c = hx_cuda_of(d);
    hx_cuda_spans spans;
    int rc;

    if ((rc = hx_cuda_spans_of(&spans, &a->rows, "index_score", err)) != 0 ||
        (rc = pages_of(&k.pool, &a->pool, "index_score", err)) != 0)
        return rc;
    if (a->heads > INT16_MAX)
        return hx_fail(err, HX_EUNSUP, "index_score: %lld heads, cuda takes up to %d",
                       (long long)a->heads, INT16_MAX);
    const bool mma = k.pool.f32 == 0 && a->heads <= SCORE_HEADS &&
                     k.pool.width <= SCORE_WIDTH && k.pool.width % 16 == 0 &&
                     ((uintptr_t)k.pool.data & 15) == 0 && ((uintptr_t)k.q & 7) == 0;
    for (; k.row0 < a->rows.n_row; k.row0 += GRID_Y) {
        const int64_t rows = HX_MIN(a->rows.n_row - k.row0, GRID_Y);
        const dim3 grid((unsigned)HX_MIN(hx_ceil_div(pools, SCORE_POOLS),
                                         hx_ceil_div(2 * c->gpu.n_sm, rows)),
                        (unsigned)rows);

        if (mma)
            HX_LAUNCH_NEXT(c, "index_score", err, score_pools_mma, grid, MMA_THREADS, 0,
                           k, spans);
        else if (k.pool.f32 != 0)
            HX_LAUNCH_NEXT(c, "index_score", err, score_pools<float>, grid, SCORE_THREADS,
                           sizeof(score_room), k, spans);
        else
            HX_LAUNCH_NEXT(c, "index_score", err, score_pools<uint16_t>, grid,
                           SCORE_THREADS, sizeof(score_room), k, spans);
    }
    return 0;
}

/* One block: tiles of 64 pools of one row, as many as the grid leaves it; heads 32 and
 * channels 128 at a time. Grid (blocks, rows). Shared memory holds the queries and the
 * keys as f32. Reads each key once a row: 4096 FMAs for 256 bytes, so arithmetic bounds
 * it and rows need not share keys. */
template <class T>
__global__ void __launch_bounds__(SCORE_THREADS)
    score_pools(const score_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    extern __shared__ __align__(16) char shared[];
    score_room *room = (score_room *)shared;
    const int64_t row = a.row0 + blockIdx.y;
    const hx_span s = hx_span_of_row(spans, row);
    const int seen = s.n_row == 0 ? 0 : (int)((s.pos0 + (row - s.row0) + 1) / a.pool_n);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = a.pool.width;
    const float *q = room->q[(warp >> 1) * 16 + (lane >> 3)];
    const float *key = room->key[(warp & 1) * 32 + (lane & 7)];
    const bool whole = a.heads <= SCORE_HEADS && width <= SCORE_WIDTH;

    if (whole && (int)blockIdx.x * SCORE_POOLS < seen)
        score_queries(a, row, 0, 0, room);
    for (int p0 = blockIdx.x * SCORE_POOLS; p0 < seen; p0 += gridDim.x * SCORE_POOLS) {
        const int n = min(SCORE_POOLS, seen - p0);
        float sum[4] = { 0, 0, 0, 0 };

        for (int h0 = 0; h0 < a.heads; h0 += SCORE_HEADS) {
            float dot[4][4] = {};

            for (int c0 = 0; c0 < width; c0 += SCORE_WIDTH) {
                if (!whole)
                    score_queries(a, row, h0, c0, room);
                score_keys<T>(a, s.slot, p0, n, c0, room);
                __syncthreads();
                warp_dots<4, 4>(dot, q, key, SCORE_LD,
                                min(SCORE_WIDTH, (width - c0 + 3) & ~3));
                if (c0 + SCORE_WIDTH >= width)
                    score_heads(a, dot, room, sum);
                __syncthreads();
            }
        }
        const int at = (warp & 1) * 32 + lane;
        if (warp >= 2 && lane < 8)
            for (int j = 0; j < 4; j++)
                room->half[at + 8 * j] = sum[j];
        __syncthreads();
        if (warp < 2 && lane < 8)
            for (int j = 0; j < 4; j++)
                if (at + 8 * j < n)
                    a.score[row * a.ld_score + p0 + at + 8 * j] =
                        sum[j] + room->half[at + 8 * j];
        __syncthreads();
    }
}

typedef struct {
    uint16_t key[2][MMA_POOLS][MMA_KEY_LD];
    float half[MMA_POOLS];
} mma_score_room;

/* Begins to copy the keys of pools p0 on; width is a multiple of 16. */
HX_DEVICE void mma_keys(const score_args &a, int slot, int p0, int seen,
                        uint16_t (*to)[MMA_KEY_LD])
{
    const int per = HX_PAGE / a.pool_n, chunks = a.pool.width / 8;

#pragma unroll
    for (int j = 0; j < MMA_POOLS * SCORE_WIDTH / 8 / MMA_THREADS; j++) {
        const int at = threadIdx.x + MMA_THREADS * j, r = at / chunks,
                  c = at % chunks * 8;
        const bool in = p0 + r < seen;

        if (r < MMA_POOLS)
            copy16(&to[r][c],
                   (const uint16_t *)a.pool.data +
                       (in ? page_item(a.pool, slot, p0 + r, per) + c : 0),
                   in);
    }
    copy_commit();
}

/* As score_pools for up to 32 heads and keys of up to 128 bf16, on the matrix units: 8
 * warps, 2 groups of 16 heads times 4 of 16 pools. The queries are split once and stay in
 * registers; keys come a tile ahead. */
__global__ void __launch_bounds__(MMA_THREADS, 2)
    score_pools_mma(const score_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    __shared__ __align__(16) mma_score_room room;
    const int64_t row = a.row0 + blockIdx.y;
    const hx_span s = hx_span_of_row(spans, row);
    const int seen = s.n_row == 0 ? 0 : (int)((s.pos0 + (row - s.row0) + 1) / a.pool_n);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = a.pool.width;
    const int h0 = (warp >> 2) * 16, h = h0 + (lane >> 2), steps = width / 16;
    const int stride = gridDim.x * MMA_POOLS;
    uint32_t q[MMA_STEPS][SPLIT_BF16][4];
    float w[2];

    if ((int)blockIdx.x * MMA_POOLS >= seen)
        return;
    mma_keys(a, s.slot, blockIdx.x * MMA_POOLS, seen, room.key[0]);
    for (int i = 0; i < 2; i++)
        w[i] = h + 8 * i < a.heads ? a.w[row * a.heads + h + 8 * i] * a.w_scale : 0.0f;
#pragma unroll
    for (int k = 0; k < MMA_STEPS; k++)
        split_rows<true>(q[k], a.q + (row * a.heads + h0) * width + 16 * k, width,
                         a.heads - h0, width - 16 * k);
    for (int p0 = blockIdx.x * MMA_POOLS, turn = 0; p0 < seen; p0 += stride, turn ^= 1) {
        float sum[2][2];

        mma_keys(a, s.slot, p0 + stride, seen, room.key[turn ^ 1]);
        copy_wait_older();
        __syncthreads();
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const uint16_t *key =
                &room.key[turn][16 * (warp & 3) + 8 * t + (lane & 7)][lane >> 3 << 3];
            uint32_t b[MMA_STEPS / 2][4];
            float small[4] = {}, big[2][4] = {};

#pragma unroll
            for (int k = 0; k < MMA_STEPS / 2; k++)
                load_matrices(b[k], key + 32 * k);
#pragma unroll
            for (int part = SPLIT_BF16 - 1; part >= 0; part--)
#pragma unroll
                for (int k = 0; k < MMA_STEPS; k++)
                    if (k < steps)
                        mma_bf16(part > 0 ? small : big[k / 4], q[k][part],
                                 b[k / 2][2 * (k & 1)], b[k / 2][2 * (k & 1) + 1]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float d0 = (big[0][i] + big[1][i]) + small[i];
                const float d1 = (big[0][2 + i] + big[1][2 + i]) + small[2 + i];
                float part = w[0] * fmaxf(0.0f, d0 * a.scale);

                part = fmaf(w[1], fmaxf(0.0f, d1 * a.scale), part);
                part += __shfl_xor_sync(~0u, part, 4);
                part += __shfl_xor_sync(~0u, part, 8);
                sum[t][i] = part + __shfl_xor_sync(~0u, part, 16);
            }
        }
        const int at = 16 * (warp & 3) + 2 * lane;
        if (warp >= 4 && lane < 4)
            for (int t = 0; t < 4; t++)
                room.half[at + 8 * (t >> 1) + (t & 1)] = sum[t >> 1][t & 1];
        __syncthreads();
        if (warp < 4 && lane < 4)
            for (int t = 0; t < 4; t++) {
                const int p = at + 8 * (t >> 1) + (t & 1);

                if (p0 + p < seen)
                    a.score[row * a.ld_score + p0 + p] =
                        sum[t >> 1][t & 1] + room.half[p];
            }
        __syncthreads();
    }
}

/* ---- the best scores ------------------------------------------------- */

enum {
    TOPK_THREADS = 1024,
    TOPK_BINS = 2048, /* of 11 bits, 11 bits and 10 bits of a key */
    TOPK_EACH = 8,    /* scores that a thread reads together */
};

typedef struct {
    int32_t *pick, *n_pick;
    const float *score;
    int64_t ld_score, k;
    int pool_n;
} topk_args;

typedef struct {
    uint32_t count[TOPK_BINS];
    uint32_t warp[33];
    uint32_t bin, above; /* where the k-th score lies, and scores in higher bins */
} topk_room;

/* Scores as integers of the same order; both zeros are one value. */
HX_DEVICE uint32_t score_key(float x)
{
    const uint32_t u = hx_bits_of(x == 0.0f ? 0.0f : x);

    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

/* Sum of v over the threads before this one; *total over all. */
HX_DEVICE uint32_t sum_before(uint32_t v, uint32_t *warp_sum, uint32_t *total)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t inside = v, w;

    for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, inside, d);

        inside += lane >= d ? o : 0;
    }
    if (lane == 31)
        warp_sum[warp] = inside;
    __syncthreads();
    w = warp_sum[lane];
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, w, d);

        w += lane >= d ? o : 0;
    }
    *total = __shfl_sync(~0u, w, 31);
    w = __shfl_sync(~0u, w, (warp + 31) & 31); /* of the warps up to the one before */
    __syncthreads();
    return inside - v + (warp > 0 ? w : 0);
}

/* Counts the keys that agree with `prefix` above the digit at `shift`, by that digit.
 * Warps whose keys all fall into one bin add once: ties are common. */
HX_DEVICE void topk_count(const float *score, int n, uint32_t prefix, uint32_t mask,
                          int shift, topk_room *room)
{
    for (int i = threadIdx.x; i < TOPK_BINS; i += TOPK_THREADS)
        room->count[i] = 0;
    __syncthreads();
    for (int i0 = 0; i0 < n; i0 += TOPK_THREADS * TOPK_EACH) {
        uint32_t bin[TOPK_EACH];

#pragma unroll
        for (int e = 0; e < TOPK_EACH; e++) {
            const int i = i0 + TOPK_THREADS * e + threadIdx.x;
            const uint32_t key = i < n ? score_key(score[i]) : 0;

            bin[e] = i < n && ((key ^ prefix) & mask) == 0
                         ? key >> shift & (TOPK_BINS - 1)
                         : TOPK_BINS;
        }
#pragma unroll
        for (int e = 0; e < TOPK_EACH; e++) {
            int same;

            __match_all_sync(~0u, bin[e], &same);
            if (bin[e] < TOPK_BINS && (same == 0 || (threadIdx.x & 31) == 0))
                atomicAdd(&room->count[bin[e]], same != 0 ? 32 : 1);
        }
    }
    __syncthreads();
}

/* Finds the bin that holds the k-th best of what was counted. */
HX_DEVICE void topk_find(uint32_t k, topk_room *room)
{
    const int b =
        TOPK_BINS - 2 - 2 * threadIdx.x; /* the thread's bins are b + 1, then b */
    const uint32_t hi = room->count[b + 1], lo = room->count[b];
    uint32_t total, above = sum_before(hi + lo, room->warp, &total);

    if (above < k && k <= above + hi) {
        room->bin = b + 1;
        room->above = above;
    } else if (above + hi < k && k <= above + hi + lo) {
        room->bin = b;
        room->above = above + hi;
    }
    __syncthreads();
}

/* Writes the indices of scores above the key and of the first `ties` equal to it. */
HX_DEVICE void topk_write(const float *score, int n, uint32_t key, uint32_t ties,
                          int32_t *pick, topk_room *room)
{
    uint32_t above = 0, equal = 0;

    for (int i0 = 0; i0 < n; i0 += TOPK_THREADS * TOPK_EACH) {
        const int i = i0 + TOPK_EACH * threadIdx.x;
        uint32_t k[TOPK_EACH], mine = 0,
                               total; /* above in the low half, equal in the high */

#pragma unroll
        for (int e = 0; e < TOPK_EACH; e++) {
            k[e] = i + e < n ? score_key(score[i + e]) : 0;
            mine +=
                i + e >= n ? 0 : (k[e] > key ? 1u : 0u) + (k[e] == key ? 0x10000u : 0u);
        }
        const uint32_t before = sum_before(mine, room->warp, &total);
        uint32_t a = above + (before & 0xFFFF), q = equal + (before >> 16);
#pragma unroll
        for (int e = 0; e < TOPK_EACH; e++) {
            if (i + e >= n)
                break;
            if (k[e] > key || (k[e] == key && q < ties))
                pick[a + min(q, ties)] = i + e;
            a += k[e] > key;
            q += k[e] == key;
        }
        above += total & 0xFFFF;
        equal += total >> 16;
    }
}

__global__ void topk_rows(const topk_args a, const __grid_constant__ hx_cuda_spans spans);

extern "C" int hx_cuda_topk(hx_dev *d, const hx_topk_args *a, hx_err *err)
{
    const topk_args k = { (int32_t *)a->pick.p,
                          (int32_t *)a->n_pick.p,
                          (const float *)a->score.p,
                          a->ld_score,
                          a->k,
                          (int)a->pool_n };
    hx_cuda *c = hx_cuda_of(d);
    hx_cuda_spans spans;
    const int rc = hx_cuda_spans_of(&spans, &a->rows, "topk", err);

    if (rc != 0)
        return rc;
    HX_LAUNCH_NEXT(c, "topk", err, topk_rows, dim3((unsigned)a->rows.n_row), TOPK_THREADS,
                   0, k, spans);
    return 0;
}

/* One block: one row. Grid rows. Radix selection in three digits finds the key of the
 * k-th best score, a scan in index order writes the picks. Reads the scores four times,
 * from the cache but for the first. */
__global__ void __launch_bounds__(TOPK_THREADS)
    topk_rows(const topk_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    __shared__ topk_room room;
    const int64_t row = blockIdx.x;
    const hx_span s = hx_span_of_row(spans, row);
    const float *score = a.score + row * a.ld_score;
    int32_t *pick = a.pick + row * a.k;

    if (s.n_row == 0)
        return;
    const int n = (int)((s.pos0 + (row - s.row0) + 1) / a.pool_n);
    if (threadIdx.x == 0)
        a.n_pick[row] = (int32_t)min(a.k, (int64_t)n);
    if (n <= a.k) {
        for (int i = threadIdx.x; i < n; i += TOPK_THREADS)
            pick[i] = i;
        return;
    }
    uint32_t k = (uint32_t)a.k, key = 0, mask = 0;
    for (int shift = 21; shift >= -1; shift -= 11) {
        const int at = max(shift, 0); /* the last digit has 10 bits */

        topk_count(score, n, key, mask, at, &room);
        topk_find(k, &room);
        key = (key & mask) | room.bin << at;
        mask = ~0u << at;
        k -= room.above;
        __syncthreads();
    }
    topk_write(score, n, key, k, pick, &room);
}

/* ---- attention over latents ------------------------------------------ */

/* A row's positions are cut into at most SPLITS parts of at least SPLIT positions, by its
 * own length alone. A block has one part and 16 heads, which share each latent it reads;
 * a second kernel joins the parts. bf16 latents go through the matrix units; f32 ones,
 * which are for comparisons, through fp32 FMAs. Either way arithmetic, not memory, bounds
 * it (16 thousand FMAs for a latent of 1,024 bytes), so prefill rows share no latents. */
enum {
    SPLIT = 64,
    SPLITS = 64,
    TILE = 16, /* latents in shared memory */
    HEADS = 16,
    ATTEND_WARPS = 8,
    ATTEND_THREADS = 32 * ATTEND_WARPS,
    MAX_LATENT = 512,
    LATENT_LD = MAX_LATENT + 4,
    ATTEND_ROWS = 8, /* rows that fit into the scratch at once, at least */
    JOIN = 4,        /* channels of a thread that joins */
};

typedef struct {
    float *z, *part, *norm; /* part [rows, splits, heads, ld]; norm [.., 2] */
    const float *q;
    pick_args pick;
    page_args cache;
    int64_t row0, splits;
    int heads, ld; /* ld: the width, rounded up to a multiple of JOIN */
    float scale;
} attend_args;

typedef struct {
    float q[HEADS][LATENT_LD], c[TILE][LATENT_LD];
    float dot[ATTEND_WARPS][HEADS][TILE];
    float p[TILE][HEADS], keep[HEADS];
} attend_room;
static_assert(sizeof(attend_room) <= HX_CUDA_LEAST_SHARED, "any GPU takes it");

/* Positions of a part of a list of n. */
HX_DEVICE int split_of(int n)
{
    int split = SPLIT;

    while ((int64_t)split * SPLITS < n)
        split *= 2;
    return split;
}

/* Puts positions i0 on of the list, TILE at most, into shared memory, 0 past end and past
 * the width. */
HX_DEVICE void tile_fill(const attend_args &a, const position_list &l, int i0, int end,
                         int pad, attend_room *room)
{
    for (int r = threadIdx.x / 32; r < TILE; r += ATTEND_WARPS) {
        const bool in = i0 + r < end;
        const int pos = in ? position_at(l, i0 + r) : 0;
        const int64_t at = in ? page_item(a.cache, l.slot, pos, HX_PAGE) : 0;
        const float *c = (const float *)a.cache.data + at;
        const uint8_t *b = (const uint8_t *)a.cache.data;

        if (a.cache.fp8 != 0) {
            const float scale =
                in ? hx_page_scale(b[page_scale(a.cache, at, pos)]) : 0.0f;

            for (int d = threadIdx.x & 31; d < pad; d += 32)
                room->c[r][d] =
                    in && d < a.cache.width ? hx_e4m3_to(b[at + d]) * scale : 0.0f;
            continue;
        }
#pragma unroll 4
        for (int d = threadIdx.x & 31; d < pad; d += 32)
            room->c[r][d] = in && d < a.cache.width ? c[d] : 0.0f;
    }
}

/* Scores of a tile: a warp has 16 heads, 16 latents and an eighth of the channels. */
HX_DEVICE void attend_dots(int pad, attend_room *room)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = pad / ATTEND_WARPS;
    float dot[4][2] = {};

    warp_dots<4, 2>(dot, &room->q[lane >> 3][warp * part],
                    &room->c[lane & 7][warp * part], LATENT_LD, part);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            room->dot[warp][(lane >> 3) + 4 * i][(lane & 7) + 8 * j] = dot[i][j];
}

/* A thread has one head and one latent; 16 lanes share a head and its running softmax. */
HX_DEVICE void attend_soften(float scale, int n, float &top, float &mass,
                             attend_room *room)
{
    const int h = threadIdx.x >> 4, i = threadIdx.x & 15;
    float s = 0, best, sum;

#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++)
        s += room->dot[w][h][i];
    s = i < n ? s * scale : -INFINITY;
    best = s;
    for (int d = 8; d > 0; d /= 2)
        best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
    best = fmaxf(best, top);
    const float p = i < n ? expf(s - best) : 0.0f, keep = expf(top - best);
    sum = p;
    for (int d = 8; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    mass = fmaf(mass, keep, sum);
    top = best;
    room->p[i][h] = p;
    if (i == 0)
        room->keep[h] = keep;
}

/* z = keep z + p c: a thread has 8 heads and 4 channels. */
HX_DEVICE void attend_blend(float (&z)[8][4], int pad, const attend_room *room)
{
    const int h0 = (threadIdx.x >> 7) * 8, d = (threadIdx.x & 127) * 4;

    if (d >= pad)
        return;
#pragma unroll
    for (int h = 0; h < 8; h++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            z[h][e] *= room->keep[h0 + h];
#pragma unroll 4
    for (int i = 0; i < TILE; i++) {
        const float4 c = *(const float4 *)&room->c[i][d];
        const float4 a = *(const float4 *)&room->p[i][h0],
                     b = *(const float4 *)&room->p[i][h0 + 4];
        const float p[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };

#pragma unroll
        for (int h = 0; h < 8; h++) {
            z[h][0] = fmaf(p[h], c.x, z[h][0]);
            z[h][1] = fmaf(p[h], c.y, z[h][1]);
            z[h][2] = fmaf(p[h], c.z, z[h][2]);
            z[h][3] = fmaf(p[h], c.w, z[h][3]);
        }
    }
}

/* What a block works on. */
struct attend_part {
    position_list l;
    int head0, n_head, begin, end;
    int64_t row, at; /* row of q; where the part of head0 goes, in heads */
};

HX_DEVICE attend_part attend_begin(const attend_args &a, const hx_cuda_spans &spans)
{
    const int groups = (a.heads + HEADS - 1) / HEADS, part = (int)blockIdx.x / groups;
    attend_part x;

    x.row = a.row0 + blockIdx.y;
    x.l = positions_of(a.pick, spans, x.row);
    const int split = split_of(x.l.n);
    x.head0 = (int)blockIdx.x % groups * HEADS;
    x.n_head = min(HEADS, a.heads - x.head0);
    x.begin = part * split;
    x.end = min(x.l.n, x.begin + split);
    x.at = ((int64_t)blockIdx.y * a.splits + part) * a.heads + x.head0;
    return x;
}

/* The running softmax of a head, known to its 16 lanes. */
HX_DEVICE void attend_norm(const attend_args &a, const attend_part &x, float top,
                           float mass)
{
    const int h = threadIdx.x >> 4;

    if ((threadIdx.x & 15) == 0 && h < x.n_head) {
        a.norm[2 * (x.at + h)] = top;
        a.norm[2 * (x.at + h) + 1] = mass;
    }
}

/* The same for bf16 latents. 8 warps; for scores a warp has an eighth of the channels and
 * all latents of a tile, for z an eighth of the channels too. */
enum {
    MMA_TILE = 32,
    MMA_LD = MAX_LATENT + 8, /* so that 8 rows at one column lie in different banks */
    MMA_DOT_LD = MMA_TILE + 8,
    MMA_P_LD = MMA_TILE + 8,
    MMA_PART = MAX_LATENT / ATTEND_WARPS, /* channels of a warp, at most */
};

typedef struct {
    uint16_t c[2][MMA_TILE][MMA_LD]; /* the tile at work and the next */
    float dot[ATTEND_WARPS][HEADS][MMA_DOT_LD];
    uint16_t p[SPLIT_BF16][HEADS][MMA_P_LD];
    float keep[HEADS];
    int64_t from[2 * MMA_TILE]; /* where the latents of two tiles begin */
} mma_room;
static_assert(sizeof(mma_room) <= HX_CUDA_LEAST_SHARED, "any GPU takes it");

__global__ void attend_parts(const attend_args a,
                             const __grid_constant__ hx_cuda_spans spans);
template <bool VEC>
__global__ void attend_parts_mma(const attend_args a,
                                 const __grid_constant__ hx_cuda_spans spans);

/* The same for FP8 latents. The two parts of a half hold 22 bits of a query or weight, and
 * an e4m3 is exact as a half, so two products do where bf16 needs three. Warps have 64
 * channels each; a tile is a whole part of what rows up to SPLIT * SPLITS positions
 * attend, as what bounds those is the way through one tile. */
enum {
    FP8_PART = 64,
    FP8_TILE = 64,
    FP8_LD = MAX_LATENT + 32, /* bytes: rows 0 to 3 lie 32 bytes apart in the banks */
    FP8_DOT_LD = FP8_TILE + 8,
    FP8_P_LD = FP8_TILE + 8,
    SPLIT_F16 = 2,
    FP8_UP = 14, /* weights are halves of up to 2^14 */
};

typedef struct {
    uint8_t c[FP8_TILE][FP8_LD]; /* row fp8_row(i): the tile's i-th latent */
    float dot[ATTEND_WARPS][HEADS][FP8_DOT_LD];
    uint16_t p[SPLIT_F16][HEADS][FP8_P_LD];
    float keep[HEADS], unit; /* of weights */
    int64_t from[FP8_TILE];
    uint8_t scale[FP8_TILE]; /* 0 past the end */
} fp8_room;
static_assert(sizeof(fp8_room) <= HX_CUDA_LEAST_SHARED, "any GPU takes it");

__global__ void attend_parts_fp8(const attend_args a,
                                 const __grid_constant__ hx_cuda_spans spans);
__global__ void attend_join(const attend_args a,
                            const __grid_constant__ hx_cuda_spans spans);

/* Parts of the longest row of a call. */
static int64_t most_splits(const hx_mla_attend_args *a)
{
    int64_t n = most_positions(&a->rows, a->cache.max_page);

    if (a->pick.p != NULL)
        n = HX_MIN(n, (a->k_pick + 1) * a->pool_n - 1);
    return HX_MAX(HX_MIN(hx_ceil_div(n, SPLIT), (int64_t)SPLITS), 1);
}

static size_t attend_bytes(int64_t splits, int64_t heads, int64_t width)
{
    return (size_t)(splits * heads * (width + 2)) * sizeof(float);
}

size_t hx_cuda_attn_scratch_bytes(const hx_dev_limits *l)
{
    return (size_t)HX_MIN(l->max_rows, (int64_t)ATTEND_ROWS) *
           attend_bytes(HX_MIN((int64_t)SPLITS, hx_ceil_div(l->max_ctx, SPLIT) + 1),
                        l->max_heads, MAX_LATENT);
}

static int attend_rows(hx_cuda *c, const attend_args *k, const hx_cuda_spans *spans,
                       int64_t rows, hx_err *err)
{
    const dim3 grid((unsigned)(k->splits * hx_ceil_div(k->heads, HEADS)), (unsigned)rows);

    const bool whole = k->cache.width % 16 == 0 &&
                       (((uintptr_t)k->cache.data | (uintptr_t)k->q) & 15) == 0;

    if (k->cache.fp8 != 0 && whole)
        HX_LAUNCH_NEXT(c, "mla_attend", err, attend_parts_fp8, grid, ATTEND_THREADS,
                       sizeof(fp8_room), *k, *spans);
    else if (k->cache.f32 != 0 || k->cache.fp8 != 0)
        HX_LAUNCH_NEXT(c, "mla_attend", err, attend_parts, grid, ATTEND_THREADS,
                       sizeof(attend_room), *k, *spans);
    else if (k->cache.width % 8 == 0 &&
             (((uintptr_t)k->cache.data | (uintptr_t)k->q) & 15) == 0)
        HX_LAUNCH_NEXT(c, "mla_attend", err, attend_parts_mma<true>, grid, ATTEND_THREADS,
                       sizeof(mma_room), *k, *spans);
    else
        HX_LAUNCH_NEXT(c, "mla_attend", err, attend_parts_mma<false>, grid,
                       ATTEND_THREADS, sizeof(mma_room), *k, *spans);
    HX_LAUNCH_NEXT(c, "mla_attend", err, attend_join,
                   dim3((unsigned)k->heads, (unsigned)rows), ROW_THREADS, 0, *k, *spans);
    return 0;
}

extern "C" int hx_cuda_mla_attend(hx_dev *d, const hx_mla_attend_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    attend_args k = { (float *)a->z.p,
                      (float *)c->scratch,
                      NULL,
                      (const float *)a->q.p,
                      picks_of(a),
                      {},
                      0,
                      most_splits(a),
                      (int)a->heads,
                      (int)hx_ceil_div(a->cache.width, JOIN) * JOIN,
                      a->scale };
    const size_t each = attend_bytes(k.splits, a->heads, k.ld);
    const int64_t fit = HX_MIN((int64_t)(c->scratch_bytes / each), GRID_Y);
    hx_cuda_spans spans;
    int rc;

    if (a->cache.width > MAX_LATENT || a->heads > INT16_MAX)
        return hx_fail(
            err, HX_EUNSUP,
            "mla_attend: %lld heads of width %lld, cuda takes up to %d of up to %d",
            (long long)a->heads, (long long)a->cache.width, INT16_MAX, MAX_LATENT);
    if (a->prefill && hx_cuda_mla_takes(c, a))
        return hx_cuda_mla_rows(c, a, err);
    if (fit < 1)
        return hx_fail(
            err, HX_EARG,
            "mla_attend: needs %zu bytes of scratch a row, the device was opened "
            "with %zu; open it with larger limits",
            each, c->scratch_bytes);
    if ((rc = hx_cuda_spans_of(&spans, &a->rows, "mla_attend", err)) != 0 ||
        (rc = pages_of(&k.cache, &a->cache, "mla_attend", err)) != 0)
        return rc;
    for (; k.row0 < a->rows.n_row; k.row0 += fit) {
        const int64_t rows = HX_MIN(a->rows.n_row - k.row0, fit);

        k.norm = k.part + rows * k.splits * a->heads * k.ld;
        if ((rc = attend_rows(c, &k, &spans, rows, err)) != 0)
            return rc;
    }
    return 0;
}

/* One block: one part of one row's positions, 16 heads, f32 latents. Grid (splits * heads
 * / 16, rows). Shared memory: the queries, a tile of 16 latents and its scores, 74 KiB.
 */
__global__ void __launch_bounds__(ATTEND_THREADS, 2)
    attend_parts(const attend_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    extern __shared__ __align__(16) char shared[];
    attend_room *room = (attend_room *)shared;
    const attend_part x = attend_begin(a, spans);
    const int width = a.cache.width, pad = (width + 31) & ~31;
    float z[8][4] = {}, top = -INFINITY, mass = 0;

    if (x.begin >= x.l.n)
        return;
    for (int h = threadIdx.x / 32; h < HEADS; h += ATTEND_WARPS)
        for (int d = threadIdx.x & 31; d < pad; d += 32)
            room->q[h][d] = h < x.n_head && d < width
                                ? a.q[(x.row * a.heads + x.head0 + h) * width + d]
                                : 0.0f;
    for (int i0 = x.begin; i0 < x.end; i0 += TILE) {
        tile_fill(a, x.l, i0, x.end, pad, room);
        __syncthreads();
        attend_dots(pad, room);
        __syncthreads();
        attend_soften(a.scale, x.end - i0, top, mass, room);
        __syncthreads();
        attend_blend(z, pad, room);
        __syncthreads();
    }
    const int h0 = (threadIdx.x >> 7) * 8, d = (threadIdx.x & 127) * 4;
#pragma unroll
    for (int h = 0; h < 8; h++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (h0 + h < x.n_head && d + e < width)
                a.part[(x.at + h0 + h) * a.ld + d + e] = z[h][e];
    attend_norm(a, x, top, mass);
}

/* Where latent i of the list begins; negative past the end. */
HX_DEVICE int64_t mma_find(const attend_args &a, const attend_part &x, int i)
{
    return i < x.end ? page_item(a.cache, x.l.slot, position_at(x.l, i), HX_PAGE) : -1;
}

/* Begins to copy the latents that begin at from[0 .. MMA_TILE), 0 past the width. VEC: 16
 * bytes at a time. */
template <bool VEC>
HX_DEVICE void mma_tile(const attend_args &a, const int64_t *from, int pad,
                        uint16_t (*to)[MMA_LD])
{
    const uint16_t *data = (const uint16_t *)a.cache.data;
    const int lane = threadIdx.x & 31, width = a.cache.width;

#pragma unroll
    for (int j = 0; j < MMA_TILE / ATTEND_WARPS; j++) {
        const int r = (threadIdx.x >> 5) + ATTEND_WARPS * j;
        const int64_t at = from[r];

        if (VEC) {
#pragma unroll
            for (int c = 0; c < MAX_LATENT; c += 256)
                if (c + 8 * lane < width)
                    copy16(&to[r][c + 8 * lane], data + (at < 0 ? 0 : at + c + 8 * lane),
                           at >= 0);
        } else {
            for (int d = lane; d < width; d += 32)
                to[r][d] = at < 0 ? 0 : data[at + d];
        }
        for (int d = width + lane; d < pad; d += 32)
            to[r][d] = 0;
    }
    copy_commit();
}

/* Scores of a tile over the warp's steps of 16 channels. */
HX_DEVICE void mma_dots(const uint32_t (&q)[MMA_PART / 16][SPLIT_BF16][4], int steps,
                        const uint16_t *c, float (*dot)[MMA_DOT_LD])
{
    const int lane = threadIdx.x & 31;

#pragma unroll
    for (int n = 0; n < MMA_TILE; n += 8) {
        const uint16_t *at = c + (n + (lane & 7)) * MMA_LD + (lane >> 3 << 3);
        uint32_t b[MMA_PART / 32][4];
        float d[4] = {};

#pragma unroll
        for (int k = 0; k < MMA_PART / 32; k++)
            if (2 * k < steps)
                load_matrices(b[k], at + 32 * k);
#pragma unroll
        for (int part = SPLIT_BF16 - 1; part >= 0; part--)
#pragma unroll
            for (int k = 0; k < MMA_PART / 16; k++)
                if (k < steps)
                    mma_bf16(d, q[k][part], b[k / 2][2 * (k & 1)],
                             b[k / 2][2 * (k & 1) + 1]);
        float *to = &dot[lane >> 2][n + 2 * (lane & 3)];
        *(float2 *)to = make_float2(d[0], d[1]);
        *(float2 *)(to + 8 * MMA_DOT_LD) = make_float2(d[2], d[3]);
    }
}

/* As attend_soften; a thread has one head and two latents. */
HX_DEVICE void mma_soften(float scale, int n, float &top, float &mass, mma_room *room)
{
    const int h = threadIdx.x >> 4, i = 2 * (threadIdx.x & 15);
    float s[2] = { 0, 0 }, best, sum;
    uint32_t part[SPLIT_BF16];

#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) {
        const float2 v = *(const float2 *)&room->dot[w][h][i];

        s[0] += v.x;
        s[1] += v.y;
    }
    s[0] = i < n ? s[0] * scale : -INFINITY;
    s[1] = i + 1 < n ? s[1] * scale : -INFINITY;
    best = fmaxf(s[0], s[1]);
    for (int d = 8; d > 0; d /= 2)
        best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
    best = fmaxf(best, top);
    const float p0 = i < n ? expf(s[0] - best) : 0.0f;
    const float p1 = i + 1 < n ? expf(s[1] - best) : 0.0f, keep = expf(top - best);
    sum = p0 + p1;
    for (int d = 8; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    mass = fmaf(mass, keep, sum);
    top = best;
    split_bf16(p0, p1, part);
#pragma unroll
    for (int k = 0; k < SPLIT_BF16; k++)
        *(uint32_t *)&room->p[k][h][i] = part[k];
    if (i == 0)
        room->keep[h] = keep;
}

/* z = keep z + p c over the warp's channels, 16 at a time. */
HX_DEVICE void mma_blend(float (&z)[MMA_PART / 8][4], int steps, const uint16_t *c,
                         const mma_room *room)
{
    const int lane = threadIdx.x & 31, r = (lane & 7) + (lane & 8), half = lane >> 4 << 3;
    const float keep0 = room->keep[lane >> 2], keep1 = room->keep[(lane >> 2) + 8];
    uint32_t p[MMA_TILE / 16][SPLIT_BF16][4];

#pragma unroll
    for (int k = 0; k < MMA_TILE / 16; k++)
#pragma unroll
        for (int part = 0; part < SPLIT_BF16; part++)
            load_matrices(p[k][part], &room->p[part][r][16 * k + half]);
#pragma unroll
    for (int n = 0; n < MMA_PART / 16; n++) {
        uint32_t b[MMA_TILE / 16][4];
        float d[2][4] = {};

        if (n >= steps)
            break;
#pragma unroll
        for (int k = 0; k < MMA_TILE / 16; k++)
            load_transposed(b[k], c + (16 * k + r) * MMA_LD + 16 * n + half);
#pragma unroll
        for (int part = SPLIT_BF16 - 1; part >= 0; part--)
#pragma unroll
            for (int k = 0; k < MMA_TILE / 16; k++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    mma_bf16(d[i], p[k][part], b[k][2 * i], b[k][2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                z[2 * n + i][e] = fmaf(z[2 * n + i][e], e < 2 ? keep0 : keep1, d[i][e]);
    }
}

/* Grid as attend_parts. Shared memory: two tiles of 32 latents, the scores of a tile from
 * each warp, its weights; 91 KiB. Queries stay in registers, as three bf16 each. */
template <bool VEC>
__global__ void __launch_bounds__(ATTEND_THREADS, 2)
    attend_parts_mma(const attend_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    extern __shared__ __align__(16) char shared[];
    mma_room *room = (mma_room *)shared;
    const attend_part x = attend_begin(a, spans);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = a.cache.width;
    const int pad = (width + 127) & ~127, steps = pad / (16 * ATTEND_WARPS),
              d0 = 16 * warp * steps;
    uint32_t q[MMA_PART / 16][SPLIT_BF16][4];
    float z[MMA_PART / 8][4] = {}, top = -INFINITY, mass = 0;

    if (x.begin >= x.l.n)
        return;
    if (threadIdx.x < 2 * MMA_TILE)
        room->from[threadIdx.x] = mma_find(a, x, x.begin + (int)threadIdx.x);
    __syncthreads();
    mma_tile<VEC>(a, room->from, pad, room->c[0]);
    mma_tile<VEC>(a, room->from + MMA_TILE, pad, room->c[1]);
#pragma unroll
    for (int k = 0; k < MMA_PART / 16; k++)
        if (k < steps)
            split_rows<VEC>(q[k], a.q + (x.row * a.heads + x.head0) * width + d0 + 16 * k,
                            width, x.n_head, width - d0 - 16 * k);
    for (int i0 = x.begin, turn = 0; i0 < x.end; i0 += MMA_TILE, turn ^= 1) {
        const uint16_t *c = room->c[turn][0];

        copy_wait_older();
        __syncthreads();
        if (threadIdx.x < MMA_TILE)
            room->from[threadIdx.x] =
                mma_find(a, x, i0 + 2 * MMA_TILE + (int)threadIdx.x);
        mma_dots(q, steps, c + d0, room->dot[warp]);
        __syncthreads();
        mma_soften(a.scale, x.end - i0, top, mass, room);
        __syncthreads();
        mma_blend(z, steps, c + d0, room);
        __syncthreads();
        mma_tile<VEC>(a, room->from, pad, room->c[turn]);
    }
#pragma unroll
    for (int n = 0; n < MMA_PART / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int h = (lane >> 2) + 8 * i, d = d0 + 8 * n + 2 * (lane & 3);
            float *to = a.part + (x.at + h) * a.ld + d;

            if (n >= 2 * steps || h >= x.n_head || d >= width)
                continue;
            if (VEC) {
                *(float2 *)to = make_float2(z[n][2 * i], z[n][2 * i + 1]);
            } else {
                to[0] = z[n][2 * i];
                if (d + 1 < width)
                    to[1] = z[n][2 * i + 1];
            }
        }
    attend_norm(a, x, top, mass);
}

/* ---- attention over FP8 latents ---------------------------------------- */

/* What a product with halves of e4m3 must be multiplied by. */
#if __CUDA_ARCH__ >= 890
static const float FP8_UNIT = 1;
#else
static const float FP8_UNIT = 256;
#endif

/* Two e4m3, in the lower and in the upper byte pair's first bytes, as halves. */
HX_DEVICE void fp8_halves(uint32_t &lo, uint32_t &hi, uint32_t four)
{
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(lo), "=r"(hi)
        : "r"(four));
#else
    /* the fields moved to those of a half leave a factor of 2^8, for subnormals too */
    const uint32_t a = __byte_perm(four, 0, 0x1404), b = __byte_perm(four, 0, 0x3424);

    lo = (a & 0x80008000u) | (a & 0x7F007F00u) >> 1;
    hi = (b & 0x80008000u) | (b & 0x7F007F00u) >> 1;
#endif
}

/* Two neighbours of a row, larger part first. */
HX_DEVICE void split_f16(float x, float y, uint32_t (&part)[SPLIT_F16])
{
    const __half2 hi = __floats2half2_rn(x, y);
    const float2 big = __half22float2(hi);
    const __half2 lo = __floats2half2_rn(x - big.x, y - big.y);

    memcpy(&part[0], &hi, 4);
    memcpy(&part[1], &lo, 4);
}

/* As mma_bf16, for halves; the compiler may order it. */
HX_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Where the i-th latent of a tile lies in shared memory: latents 2 j and 2 j + 1 go into
 * one operand of a lane j, which reads them as rows that meet no other lane's bank, be it
 * as eight rows of scores or as four pairs of rows of z. */
HX_DEVICE int fp8_row(int i)
{
    const int j = i >> 1 & 3;

    return (i & ~7) + ((i & 1) == 0 ? j : 4 + (j ^ 2));
}

/* Begins to copy the latents i0 on of the list, 0 past its end and past the width. */
HX_DEVICE void fp8_tile(const attend_args &a, const attend_part &x, int i0,
                        fp8_room *room)
{
    const uint8_t *data = (const uint8_t *)a.cache.data;
    const int mine = threadIdx.x, c = 16 * (threadIdx.x & 31);

    if (mine < FP8_TILE) {
        const bool in = i0 + mine < x.end;
        const int pos = in ? position_at(x.l, i0 + mine) : 0;
        const int64_t at = in ? page_item(a.cache, x.l.slot, pos, HX_PAGE) : -1;

        room->from[mine] = at;
        room->scale[mine] = in ? data[page_scale(a.cache, at, pos)] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < FP8_TILE / ATTEND_WARPS; j++) {
        const int i = (threadIdx.x >> 5) + ATTEND_WARPS * j;
        const int64_t from = room->from[i];
        const bool in = from >= 0 && c < a.cache.width;

        copy16(&room->c[fp8_row(i)][c], data + (in ? from + c : 0), in);
    }
    copy_commit();
}

/* The lane's 16 of the warp's 64 channels of the queries of heads lane / 4 and + 8. */
HX_DEVICE void fp8_load_queries(const attend_args &a, const attend_part &x,
                                float4 (&v)[2][4])
{
    const int lane = threadIdx.x & 31, width = a.cache.width,
              c = FP8_PART * (threadIdx.x >> 5) + 16 * (lane & 3);

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = (lane >> 2) + 8 * r;
        const float *from = a.q + (x.row * a.heads + x.head0 + h) * width + c;

#pragma unroll
        for (int k = 0; k < 4; k++)
            v[r][k] = h < x.n_head && c < width ? ((const float4 *)from)[k]
                                                : make_float4(0, 0, 0, 0);
    }
}

/* The same as operands, halves of up to 2^14; unit makes scores of products. */
HX_DEVICE void fp8_split_queries(const float4 (&v)[2][4],
                                 uint32_t (&q)[FP8_PART / 16][SPLIT_F16][4],
                                 float (&unit)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t peak = 0;

#pragma unroll
        for (int k = 0; k < 4; k++)
            peak = max(max(peak, hx_bits_of(v[r][k].x) & 0x7FFFFFFFu),
                       max(hx_bits_of(v[r][k].y) & 0x7FFFFFFFu,
                           max(hx_bits_of(v[r][k].z) & 0x7FFFFFFFu,
                               hx_bits_of(v[r][k].w) & 0x7FFFFFFFu)));
        peak = max(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = max(peak, __shfl_xor_sync(~0u, peak, 2));
        const uint32_t e = max(peak >> 23, 27u);
        const float up = hx_float_of((267 - e) << 23);

        unit[r] = hx_float_of((e - 13) << 23) * FP8_UNIT;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t part[SPLIT_F16];

            split_f16(v[r][k].x * up, v[r][k].y * up, part);
            q[k][0][r] = part[0];
            q[k][1][r] = part[1];
            split_f16(v[r][k].z * up, v[r][k].w * up, part);
            q[k][0][2 + r] = part[0];
            q[k][1][2 + r] = part[1];
        }
    }
}

/* Scores of a tile over the warp's channels, without the latents' scales; c: the first of
 * the warp's channels. */
HX_DEVICE void fp8_dots(const uint32_t (&q)[FP8_PART / 16][SPLIT_F16][4],
                        const float (&unit)[2], const uint8_t (*c)[FP8_LD],
                        float (*dot)[FP8_DOT_LD])
{
    const int lane = threadIdx.x & 31;
    const uint8_t *at = &c[fp8_row(lane >> 2)][16 * (lane & 3)];
    float *to = &dot[lane >> 2][2 * (lane & 3)];

#pragma unroll 1
    for (int n0 = 0; n0 < FP8_TILE; n0 += 32) {
        uint4 raw[4];
        float d[4][4] = {};

#pragma unroll
        for (int n = 0; n < 4; n++)
            raw[n] = *(const uint4 *)(at + (n0 + 8 * n) * FP8_LD);
#pragma unroll
        for (int k = 0; k < FP8_PART / 16; k++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t b0, b1;

                fp8_halves(b0, b1,
                           k == 0   ? raw[n].x
                           : k == 1 ? raw[n].y
                           : k == 2 ? raw[n].z
                                    : raw[n].w);
                mma_f16(d[n], q[k][1], b0, b1);
                mma_f16(d[n], q[k][0], b0, b1);
            }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            *(float2 *)(to + n0 + 8 * n) =
                make_float2(d[n][0] * unit[0], d[n][1] * unit[0]);
            *(float2 *)(to + n0 + 8 * n + 8 * FP8_DOT_LD) =
                make_float2(d[n][2] * unit[1], d[n][3] * unit[1]);
        }
    }
}

/* As mma_soften over the warps that have channels; a thread has one head and four latents.
 * Weights are multiplied by the latents' scales, relative to the largest of the tile. */
HX_DEVICE void fp8_soften(float scale, int n, int warps, float &top, float &mass,
                          fp8_room *room)
{
    const int h = threadIdx.x >> 4, i = 4 * (threadIdx.x & 15);
    const uint32_t scales = *(const uint32_t *)&room->scale[i];
    float s[4] = {}, best = top, sum = 0;
    uint32_t most = 0, part[2][SPLIT_F16];

#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++)
        if (w < warps) {
            const float4 v = *(const float4 *)&room->dot[w][h][i];

            s[0] += v.x;
            s[1] += v.y;
            s[2] += v.z;
            s[3] += v.w;
        }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const uint8_t byte = scales >> 8 * e;

        most = max(most, (uint32_t)byte);
        s[e] = i + e < n ? s[e] * hx_page_scale(byte) * scale : -INFINITY;
        best = fmaxf(best, s[e]);
    }
    most = __reduce_max_sync(~0u, most);
    for (int d = 8; d > 0; d /= 2)
        best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int up = (int)(scales >> 8 * e & 0xFF) - (int)most + FP8_UP + 127;

        s[e] = i + e < n ? expf(s[e] - best) : 0.0f;
        sum += s[e];
        s[e] *= hx_float_of((uint32_t)max(up, 0) << 23);
    }
    for (int d = 8; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    const float keep = expf(top - best);
    mass = fmaf(mass, keep, sum);
    top = best;
    split_f16(s[0], s[1], part[0]);
    split_f16(s[2], s[3], part[1]);
#pragma unroll
    for (int k = 0; k < SPLIT_F16; k++)
        *(uint2 *)&room->p[k][h][i] = make_uint2(part[0][k], part[1][k]);
    if (i == 0)
        room->keep[h] = keep;
    if (threadIdx.x == 0)
        room->unit = hx_page_scale((uint8_t)most) * (FP8_UNIT / (1 << FP8_UP));
}

/* The part's z = p c over the warp's channels, plus what it keeps of the tiles before: a
 * lane has heads lane / 4 and + 8, 16 channels; to: the first of them, or NULL past the
 * width. */
HX_DEVICE void fp8_blend(const attend_args &a, const attend_part &x, bool first,
                         const fp8_room *room, const uint8_t (*c)[FP8_LD], float *to)
{
    const int lane = threadIdx.x & 31, r = (lane & 7) + (lane & 8), half = lane >> 4 << 3;
    const float unit = room->unit;
    const uint8_t *at = &c[lane & 3][8 * (lane >> 2)];
    const int odd = (4 + ((lane & 3) ^ 2) - (lane & 3)) * FP8_LD;

#pragma unroll
    for (int j0 = 0; j0 < 8; j0 += 4) {
        float d[4][4] = {};

#pragma unroll
        for (int k = 0; k < FP8_TILE / 16; k++) {
            uint32_t p[SPLIT_F16][4], b[4][2];

#pragma unroll
            for (int part = 0; part < SPLIT_F16; part++)
                load_matrices(p[part], &room->p[part][r][16 * k + half]);
#pragma unroll
            for (int i = 0; i < 2; i++) { /* latents 2 j and 2 j + 1 of eight, twice */
                const uint8_t *row = at + (16 * k + 8 * i) * FP8_LD + j0;
                const uint32_t v = *(const uint32_t *)row,
                               w = *(const uint32_t *)(row + odd);

                fp8_halves(b[0][i], b[1][i], __byte_perm(v, w, 0x5140));
                fp8_halves(b[2][i], b[3][i], __byte_perm(v, w, 0x7362));
            }
#pragma unroll
            for (int part = SPLIT_F16 - 1; part >= 0; part--)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma_f16(d[j], p[part], b[j][0], b[j][1]);
        }
        /* columns 2 j and 2 j + 1 of an operand are channels j and j + 8 of a lane's 16 */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = (lane >> 2) + 8 * (i >> 1);
            float4 *z = (float4 *)(to + (int64_t)h * a.ld + 8 * (i & 1) + j0);
            float4 v = make_float4(d[0][i] * unit, d[1][i] * unit, d[2][i] * unit,
                                   d[3][i] * unit);

            if (h >= x.n_head || to == NULL)
                continue;
            if (!first) {
                const float keep = room->keep[h];

                v.x = fmaf(z->x, keep, v.x);
                v.y = fmaf(z->y, keep, v.y);
                v.z = fmaf(z->z, keep, v.z);
                v.w = fmaf(z->w, keep, v.w);
            }
            *z = v;
        }
    }
}

/* Grid as attend_parts. Shared memory: a tile of 64 latents, its scores from each warp,
 * its weights; 75 KiB. Longer parts, of rows that attend more than SPLIT * SPLITS
 * positions, go through it tile by tile. */
__global__ void __launch_bounds__(ATTEND_THREADS, 3)
    attend_parts_fp8(const attend_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    extern __shared__ __align__(16) char shared[];
    fp8_room *room = (fp8_room *)shared;
    const attend_part x = attend_begin(a, spans);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d0 = FP8_PART * warp,
              d = d0 + 16 * (lane & 3), width = a.cache.width,
              warps = (width + FP8_PART - 1) / FP8_PART;
    const uint8_t(*c)[FP8_LD] = (const uint8_t(*)[FP8_LD]) & room->c[0][d0];
    float top = -INFINITY, mass = 0;

    if (x.begin >= x.l.n)
        return;
    for (int i0 = x.begin; i0 < x.end; i0 += FP8_TILE) {
        uint32_t q[FP8_PART / 16][SPLIT_F16][4];
        float4 raw[2][4];
        float unit[2];

        fp8_load_queries(a, x, raw);
        fp8_tile(a, x, i0, room);
        fp8_split_queries(raw, q, unit);
        copy_wait();
        __syncthreads();
        if (warp < warps)
            fp8_dots(q, unit, c, room->dot[warp]);
        __syncthreads();
        fp8_soften(a.scale, x.end - i0, warps, top, mass, room);
        __syncthreads();
        if (warp < warps)
            fp8_blend(a, x, i0 == x.begin, room, c,
                      d < width ? a.part + x.at * a.ld + d : NULL);
    }
    attend_norm(a, x, top, mass);
}

/* One block: one head of one row. Grid (heads, rows). Joins the parts in ascending order;
 * moves them and z. */
__global__ void __launch_bounds__(ROW_THREADS)
    attend_join(const attend_args a, const __grid_constant__ hx_cuda_spans spans)
{
    hx_cuda_in_turn();
    __shared__ float weight[SPLITS], room[33];
    const int64_t row = a.row0 + blockIdx.y;
    const position_list l = positions_of(a.pick, spans, row);
    const int n = (l.n + split_of(l.n) - 1) / split_of(l.n), width = a.cache.width;
    const int64_t first = (int64_t)blockIdx.y * a.splits * a.heads + blockIdx.x;
    const bool mine = (int)threadIdx.x < n;
    const float *norm = a.norm + 2 * (first + (int64_t)threadIdx.x * a.heads);

    if (n == 0)
        return;
    const float top = mine ? norm[0] : -INFINITY, mass = mine ? norm[1] : 0.0f;
    const float best = hx_block_max(top, room), w = mine ? expf(top - best) : 0.0f;
    if (mine)
        weight[threadIdx.x] = w;
    const float total = hx_block_sum(mass * w, room);
    const int64_t ld = (int64_t)a.heads * a.ld;
    for (int d = JOIN * threadIdx.x; d < width; d += JOIN * ROW_THREADS) {
        const float *part = a.part + first * a.ld + d;
        float z[JOIN] = {};

        /* many loads at once: there is one block for a head, and it waits for them alone
         */
#pragma unroll 16
        for (int i = 0; i < n; i++) {
            const float4 v = *(const float4 *)(part + i * ld);

            z[0] = fmaf(v.x, weight[i], z[0]);
            z[1] = fmaf(v.y, weight[i], z[1]);
            z[2] = fmaf(v.z, weight[i], z[2]);
            z[3] = fmaf(v.w, weight[i], z[3]);
        }
        for (int e = 0; e < JOIN && d + e < width; e++)
            a.z[(row * a.heads + blockIdx.x) * width + d + e] = z[e] / total;
    }
}
