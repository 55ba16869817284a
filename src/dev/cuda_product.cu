/* cuda_product.cu - matmul, head_matmul and moe of the CUDA backend in the canonical
 * arithmetic (canon.h): the plain formats here, EXL3 through cuda.h. Called through
 * hx_cuda_ops once ops.c has checked the arguments. Must never allocate, wait or read
 * device memory from the host; how work is cut must never change a bit.
 *
 * A thread owns one block of 128 inputs of one output and its eight lanes, so that a lane
 * never leaves its thread; the blocks of an output are neighbours in a warp and join by
 * shuffles. */
#include "dev/cuda.h"
#include "dev/cuda_dev.h"
#include "dev/cuda_plain.h"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    BLOCK = HX_CANON_BLOCK,
    PITCH =
        BLOCK + 4, /* floats from block to block in shared memory: no bank conflicts */
    MAX_ROWS = 4,  /* rows that share a reading of the weights */
    LEVELS = 10,   /* of the tree over chunks of blocks: up to 2^20 inputs */
    COLUMN_BLOCKS = 4, /* of 128 inputs side by side in a transposed product */
    MAX_PICKS = 1024,  /* of one call of hx_cuda_experts */
    MAX_BESIDE = 4,    /* products of one launch */
};

static const int64_t MAX_GRID_Y = 65535;

static int no_scratch(const hx_cuda *c, const char *op, hx_err *err)
{
    return hx_fail(
        err, HX_EARG,
        "%s: %zu bytes of scratch are too few; open the device with larger limits", op,
        c->scratch_bytes);
}

/* ---- plain products -------------------------------------------------- */

/* y[r, z, o] = sum of W[first + z * stride + o, i] x[r, z, i]. With picks, z is a pick
 * and the matrix that of its expert. */
struct plain {
    hx_plain_mat m;
    const float *x;
    float *y;
    int64_t rows, n, ldx, ldy; /* n outputs */
    int64_t x_head, y_head;    /* floats from z to z */
    int64_t first, stride;
    const int32_t *id; /* picks: [gridDim.z] */
    const hx_cuda_expert *expert;
    int64_t first_expert, end_expert; /* picks of others have no matrix */
    int which, x_div; /* 0 gate, 1 up, 2 down; x row of pick z: z / x_div */
    bool x_wide;      /* x can be copied 16 bytes at a time */
};

/* Products of one launch, as long in k and of one format; n > 1: z is which of them. */
struct plain_set {
    plain p[MAX_BESIDE];
    int n;
};

template <int FMT, int RB>
__global__ void plain_rows(const __grid_constant__ plain_set set, int log_l);

static int log2_up(int64_t n)
{
    int l = 0;

    while (((int64_t)1 << l) < n)
        l++;
    return l;
}

template <int RB>
static int plain_launch(hx_cuda *c, const char *op, const plain_set &set, hx_fmt fmt,
                        int64_t nz, hx_err *err)
{
    const int64_t rows = set.p[0].rows, row_groups = hx_ceil_div(rows, RB) * nz;
    int64_t n = 0;
    int log_l = HX_MIN(log2_up(hx_ceil_div(set.p[0].m.k, BLOCK)), 5);

    for (int i = 0; i < set.n; i++)
        n = HX_MAX(n, set.p[i].n);
    /* Fewer threads an output share inputs better; more of them fill the device. */
    while (RB > 1 && log_l > 3 &&
           hx_ceil_div(n, WARPS * (32 >> (log_l - 1))) * row_groups >= 2 * c->gpu.n_sm)
        log_l--;
    const int64_t per_block = WARPS * (32 >> log_l);
    const dim3 grid((unsigned)hx_ceil_div(n, per_block), (unsigned)hx_ceil_div(rows, RB),
                    (unsigned)nz);
    const size_t shared = sizeof(float) * ((size_t)RB << log_l) * PITCH;

    HX_PLAIN_SWITCH(fmt, HX_LAUNCH_NEXT(c, op, err, (plain_rows<FMT, RB>), grid, THREADS,
                                        shared, set, log_l));
    return 0;
}

/* Rows in turns that a grid holds. nz: heads or picks of the one product, or the number of
 * products. */
static int plain_products(hx_cuda *c, const char *op, plain_set set, hx_fmt fmt,
                          int64_t nz, hx_err *err)
{
    const int64_t rows = set.p[0].rows;

    for (int64_t r = 0; r < rows; r += MAX_GRID_Y) {
        const int64_t now = HX_MIN(MAX_GRID_Y, rows - r);

        for (int i = 0; i < set.n; i++) {
            plain *p = &set.p[i];

            p->rows = now;
            p->x_wide = (uintptr_t)p->x % 16 == 0 && p->m.k % 4 == 0 && p->ldx % 4 == 0 &&
                        p->x_head % 4 == 0;
        }
        const int rc = now == 1   ? plain_launch<1>(c, op, set, fmt, nz, err)
                       : now == 2 ? plain_launch<2>(c, op, set, fmt, nz, err)
                                  : plain_launch<MAX_ROWS>(c, op, set, fmt, nz, err);
        if (rc != 0)
            return rc;
        for (int i = 0; i < set.n; i++) {
            set.p[i].x += now * set.p[i].ldx;
            set.p[i].y += now * set.p[i].ldy;
        }
    }
    return 0;
}

static int plain_product(hx_cuda *c, const char *op, const plain &p, hx_fmt fmt,
                         int64_t nz, hx_err *err)
{
    plain_set set = {};

    set.p[0] = p;
    set.n = 1;
    return plain_products(c, op, set, fmt, nz, err);
}

/* The matrix of a pick, which the launch before may have made, or false when it has none. */
HX_DEVICE bool matrix_of(const plain &p, int64_t z, hx_plain_mat *m)
{
    if (p.id == NULL)
        return true;
    hx_cuda_after_previous();
    const int32_t id = p.id[z];
    if (id < p.first_expert || id >= p.end_expert)
        return false;
    const hx_cuda_expert *e = &p.expert[id];
    const hx_cuda_mat *a = p.which == 0 ? &e->gate : p.which == 1 ? &e->up : &e->down;
    m->w = a->trellis;
    m->scale = (const float *)a->suh;
    m->bias = a->svh;
    return true;
}

/* Inputs i0 … of RB rows into shared memory, 0 past the end. Whole block. */
template <int RB>
HX_DEVICE void stage_inputs(float *xs, const float *x, const plain &p, int64_t r0,
                            int64_t i0, int log_l)
{
    __syncthreads();
    if (p.x_wide) {
        for (int i = threadIdx.x; i < RB << (log_l + 5); i += THREADS) {
            const int r = i >> (log_l + 5), at = 4 * (i & ((32 << log_l) - 1));
            const bool inside = r0 + r < p.rows && i0 + at < p.m.k;

            hx_copy16(xs + ((r << log_l) + (at >> 7)) * PITCH + (at & 127),
                      inside ? x + r * p.ldx + i0 + at : x, inside);
        }
        hx_copy_wait();
        __syncthreads();
        return;
    }
    for (int i = threadIdx.x; i < RB << (log_l + 7); i += THREADS) {
        const int r = i >> (log_l + 7), at = i & ((BLOCK << log_l) - 1);
        const bool inside = r0 + r < p.rows && i0 + at < p.m.k;

        xs[((r << log_l) + (at >> 7)) * PITCH + (at & 127)] =
            inside ? x[r * p.ldx + i0 + at] : 0.0f;
    }
    __syncthreads();
}

/* Eight weights onto the eight lanes of each row; step: floats from row to row of x. */
template <int RB>
HX_DEVICE void add_lanes(float acc[RB][8], const float w[8], const float *x, int step)
{
#pragma unroll
    for (int r = 0; r < RB; r++) {
        const float4 lo = *(const float4 *)(x + r * step);
        const float4 hi = *(const float4 *)(x + r * step + 4);

        acc[r][0] = fmaf(w[0], lo.x, acc[r][0]);
        acc[r][1] = fmaf(w[1], lo.y, acc[r][1]);
        acc[r][2] = fmaf(w[2], lo.z, acc[r][2]);
        acc[r][3] = fmaf(w[3], lo.w, acc[r][3]);
        acc[r][4] = fmaf(w[4], hi.x, acc[r][4]);
        acc[r][5] = fmaf(w[5], hi.y, acc[r][5]);
        acc[r][6] = fmaf(w[6], hi.z, acc[r][6]);
        acc[r][7] = fmaf(w[7], hi.w, acc[r][7]);
    }
}

/* Four warps, 2^log_l threads an output, RB rows. Grid (outputs, R / RB, heads, picks or
 * products); shared: RB chunks of 2^log_l blocks of x. Reads the weights once for RB
 * rows. */
template <int FMT, int RB>
__global__ void __launch_bounds__(THREADS)
    plain_rows(const __grid_constant__ plain_set set, int log_l)
{
    extern __shared__ __align__(16) float xs[];
    const plain &p = set.p[set.n > 1 ? blockIdx.z : 0];
    const int64_t z = set.n > 1 ? 0 : blockIdx.z;
    const int lane = threadIdx.x & 31, l = 1 << log_l, b = lane & (l - 1);
    const int64_t group = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int64_t o = group * (32 >> log_l) + (lane >> log_l);
    const int64_t r0 = (int64_t)blockIdx.y * RB, k = p.m.k;
    const int64_t n_block = (k + BLOCK - 1) / BLOCK;
    const float *x =
        p.x + r0 * p.ldx + (p.id != NULL ? z / p.x_div * p.ldx : z * p.x_head);
    hx_plain_mat m = p.m;
    float level[LEVELS][RB];

    if ((int64_t)blockIdx.x * WARPS * (32 >> log_l) >= p.n || !matrix_of(p, z, &m))
        return;
    const int64_t row = p.first + z * p.stride + (o < p.n ? o : p.n - 1);
    const int chunks = (int)((n_block + l - 1) >> log_l);
    for (int c = 0; c < chunks; c++) {
        const int64_t i0 = (int64_t)c << (log_l + 7), mine = i0 + b * BLOCK;
        const float *v = xs + b * PITCH;
        float acc[RB][8] = {}, t[RB];

        if (m.wide) {
            /* The first weights are on their way while the inputs are fetched. */
            constexpr int N = FMT == HX_FMT_F32 || RB > 1 ? 8 : 16;
            const float scale = hx_plain_block_scale<FMT>(m, row, mine);
            hx_raw8<FMT> raw[N];

#pragma unroll
            for (int h = 0; h < BLOCK / 8; h += N) {
#pragma unroll
                for (int s = 0; s < N; s++)
                    raw[s] = hx_plain_raw8<FMT>(m, row, mine + 8 * (h + s));
                if (h == 0 && c == 0)
                    hx_cuda_in_turn();
                if (h == 0)
                    stage_inputs<RB>(xs, x, p, r0, i0, log_l);
                if (mine < k)
#pragma unroll
                    for (int s = 0; s < N; s++) {
                        float w[8];

                        hx_plain_widen8<FMT>(w, raw[s], m, row, mine + 8 * (h + s),
                                             scale);
                        add_lanes<RB>(acc, w, v + 8 * (h + s), PITCH << log_l);
                    }
            }
        } else {
            if (c == 0)
                hx_cuda_in_turn();
            stage_inputs<RB>(xs, x, p, r0, i0, log_l);
            for (int s = 0; s < BLOCK && mine < k; s += 8) {
                float w[8];

                hx_plain_load8<FMT>(w, m, row, mine + s);
                add_lanes<RB>(acc, w, v + s, PITCH << log_l);
            }
        }
        /* The blocks of a chunk are a subtree; one without a partner moves up. */
        const int here = (int)min((int64_t)l, n_block - ((int64_t)c << log_l));
#pragma unroll
        for (int r = 0; r < RB; r++) {
            t[r] = hx_canon_lanes(acc[r]);
            for (int w = 1; w < l; w *= 2) {
                const float other = __shfl_xor_sync(~0u, t[r], w);

                if (((b ^ w) & ~(w - 1)) < here)
                    t[r] = t[r] + other;
            }
        }
#pragma unroll
        for (int r = 0; r < RB; r++)
#pragma unroll
            for (int q = 0; q < LEVELS; q++) {
                if ((c >> q & 1) == 0) {
                    level[q][r] = t[r];
                    break;
                }
                t[r] = level[q][r] + t[r];
            }
    }
    if (b != 0 || o >= p.n)
        return;
#pragma unroll
    for (int r = 0; r < RB; r++) {
        float sum = 0;
        bool any = false;

#pragma unroll
        for (int q = 0; q < LEVELS; q++)
            if ((chunks >> q & 1) != 0) {
                sum = any ? level[q][r] + sum : level[q][r];
                any = true;
            }
        if (m.bias != NULL)
            sum = sum + hx_half_to(((const uint16_t *)m.bias)[o]);
        if (r0 + r < p.rows)
            p.y[(r0 + r) * p.ldy + z * p.y_head + o] = sum;
    }
}

/* ---- transposed: absorbed queries ------------------------------------ */

template <int FMT, int RB> __global__ void plain_columns(const __grid_constant__ plain p);

static int column_product(hx_cuda *c, plain p, hx_fmt fmt, int64_t nz, hx_err *err)
{
    const int64_t rows = p.rows,
                  blocks = HX_MIN(hx_ceil_div(p.n, BLOCK), (int64_t)COLUMN_BLOCKS);

    for (int64_t r = 0; r < rows; r += MAX_GRID_Y) {
        p.rows = HX_MIN(MAX_GRID_Y, rows - r);
        const int rb = p.rows == 1 ? 1 : MAX_ROWS;
        const dim3 grid((unsigned)hx_ceil_div(p.m.k, 32),
                        (unsigned)hx_ceil_div(p.rows, rb), (unsigned)nz);
        const unsigned threads = (unsigned)(32 * blocks);
        const size_t shared = (size_t)(blocks * BLOCK * 32) * hx_plain_bytes(fmt);

        if (rb == 1)
            HX_PLAIN_SWITCH(fmt,
                            HX_LAUNCH_NEXT(c, "head_matmul", err, (plain_columns<FMT, 1>),
                                           grid, threads, shared, p))
        else
            HX_PLAIN_SWITCH(fmt, HX_LAUNCH_NEXT(c, "head_matmul", err,
                                                (plain_columns<FMT, MAX_ROWS>), grid,
                                                threads, shared, p))
        p.x += p.rows * p.ldx;
        p.y += p.rows * p.ldy;
    }
    return 0;
}

template <int FMT> __host__ __device__ constexpr int weight_bytes(void)
{
    return FMT == HX_FMT_F32 ? 4 : FMT == HX_FMT_FP8 ? 1 : 2;
}

/* Starts to copy len rows of 32 columns into the warp's tile, all at once. */
template <int FMT>
HX_DEVICE void fetch_tile(char *tile, const hx_plain_mat &m, int64_t row, int64_t col,
                          int len)
{
    constexpr int row_bytes = 32 * weight_bytes<FMT>(), per = row_bytes / 16;
    const char *from = (const char *)m.w + (row * m.k + col) * weight_bytes<FMT>();

    for (int i = threadIdx.x & 31; i < len * per; i += 32)
        hx_copy16(tile + i * 16,
                  from + i / per * m.k * weight_bytes<FMT>() + i % per * 16, true);
}

/* Weight of the lane's column in row i of the tile, which is W[row, col]. */
template <int FMT>
HX_DEVICE float tile_at(const char *tile, int i, const hx_plain_mat &m, int64_t row,
                        int64_t col)
{
    const int at = i * 32 + (threadIdx.x & 31);

    if (FMT == HX_FMT_F32)
        return ((const float *)tile)[at];
    if (FMT == HX_FMT_F16)
        return hx_half_to(((const uint16_t *)tile)[at]);
    if (FMT == HX_FMT_BF16)
        return hx_bf16_to(((const uint16_t *)tile)[at]);
    return hx_e4m3_to(((const uint8_t *)tile)[at]) * hx_plain_scale(m, row, col);
}

/* 32 columns, a warp for each 128 inputs, RB rows; p.n inputs, p.m.k outputs. Grid
 * (k / 32, R / RB, heads), shared: a tile of 128 x 32 weights for each warp. Reads the
 * weights of the head once for RB rows. */
template <int FMT, int RB>
__global__ void __launch_bounds__(32 * COLUMN_BLOCKS)
    plain_columns(const __grid_constant__ plain p)
{
    hx_cuda_in_turn();
    extern __shared__ __align__(16) char tiles[];
    __shared__ float xs[RB][COLUMN_BLOCKS * BLOCK], term[RB][COLUMN_BLOCKS][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int64_t col = (int64_t)blockIdx.x * 32 + lane, k = p.m.k;
    const int64_t r0 = (int64_t)blockIdx.y * RB, z = blockIdx.z;
    const int64_t n_block = (p.n + BLOCK - 1) / BLOCK;
    const int chunks = (int)((n_block + COLUMN_BLOCKS - 1) / COLUMN_BLOCKS);
    const uintptr_t odd = (uintptr_t)p.m.w | (uintptr_t)(k * weight_bytes<FMT>());
    const bool tiled = odd % 16 == 0 && (int64_t)(blockIdx.x + 1) * 32 <= k;
    char *tile = tiles + warp * BLOCK * 32 * weight_bytes<FMT>();
    float level[LEVELS][RB];

    for (int c = 0; c < chunks; c++) {
        const int64_t i0 = (int64_t)c * COLUMN_BLOCKS * BLOCK;
        const int here =
            (int)min((int64_t)COLUMN_BLOCKS, n_block - (int64_t)c * COLUMN_BLOCKS);
        const int64_t first = i0 + warp * BLOCK;
        const int len = (int)min((int64_t)BLOCK, p.n - first);
        float acc[RB] = {};

        __syncthreads();
        if (tiled && warp < here)
            fetch_tile<FMT>(tile, p.m, p.first + z * p.stride + first, col - lane, len);
        for (int i = threadIdx.x; i < here * BLOCK; i += blockDim.x)
            for (int r = 0; r < RB; r++)
                xs[r][i] = r0 + r < p.rows && i0 + i < p.n
                               ? p.x[(r0 + r) * p.ldx + z * p.x_head + i0 + i]
                               : 0.0f;
        hx_copy_wait();
        __syncthreads();
        if (warp < here && col < k) {
            const int64_t row = p.first + z * p.stride + first;

            const float *v = &xs[0][warp * BLOCK];

#pragma unroll 8
            for (int i = 0; i < len; i++) {
                const float w = tiled ? tile_at<FMT>(tile, i, p.m, row + i, col)
                                      : hx_plain_at<FMT>(p.m, row + i, col);

#pragma unroll
                for (int r = 0; r < RB; r++)
                    acc[r] = fmaf(w, v[r * COLUMN_BLOCKS * BLOCK + i], acc[r]);
            }
        }
        for (int r = 0; r < RB; r++)
            term[r][warp][lane] = acc[r];
        __syncthreads();
        if (warp == 0)
#pragma unroll
            for (int r = 0; r < RB; r++) {
                float lv[4], t;

                for (int b = 0; b < here; b++)
                    hx_canon_tree_add(lv, 1, (uint32_t)b, term[r][b][lane]);
                t = hx_canon_tree_sum(lv, 1, (uint32_t)here);
#pragma unroll
                for (int q = 0; q < LEVELS; q++) {
                    if ((c >> q & 1) == 0) {
                        level[q][r] = t;
                        break;
                    }
                    t = level[q][r] + t;
                }
            }
    }
    if (warp != 0 || col >= k)
        return;
#pragma unroll
    for (int r = 0; r < RB; r++) {
        float sum = 0;
        bool any = false;

#pragma unroll
        for (int q = 0; q < LEVELS; q++)
            if ((chunks >> q & 1) != 0) {
                sum = any ? level[q][r] + sum : level[q][r];
                any = true;
            }
        if (r0 + r < p.rows)
            p.y[(r0 + r) * p.ldy + z * p.y_head + col] = sum;
    }
}

/* ---- EXL3 ------------------------------------------------------------ */

static hx_cuda_work work_of(const hx_cuda *c)
{
    hx_cuda_work w = {};

    w.ticket = c->ticket;
    w.n_ticket = c->n_ticket;
    w.p = c->scratch;
    w.bytes = c->scratch_bytes;
    w.gpu = c->gpu;
    w.overlap = hx_cuda_overlap(c);
    return w;
}

static hx_cuda_shape shape_of(const hx_mat *m, int64_t rows)
{
    hx_cuda_shape s = {};

    s.n_pad = m->n_pad;
    s.k_pad = m->k_pad;
    s.k2 = m->k2;
    s.n_job = 1;
    s.rows = (int)rows;
    s.slots = rows;
    s.codebook = m->codebook;
    return s;
}

static int exl3_matmul(hx_cuda *c, const hx_matmul_args *a, hx_err *err)
{
    const hx_cuda_work w = work_of(c);
    int64_t most = HX_MIN(a->rows, (int64_t)HX_CUDA_JOB_ROWS);

    for (; most > 0; most /= 2) {
        const hx_cuda_shape s = shape_of(a->w, most);

        if (hx_cuda_area_bytes(&s, &c->gpu) <= c->scratch_bytes)
            break;
    }
    if (most == 0 && a->rows > 0)
        return no_scratch(c, "matmul", err);
    for (int64_t r = 0; r < a->rows; r += most) {
        const hx_cuda_shape s = shape_of(a->w, HX_MIN(most, a->rows - r));
        hx_cuda_job j = {};

        j.trellis = a->w->w;
        j.suh = a->w->suh;
        j.svh = a->w->svh;
        j.bias = a->w->bias;
        j.x = (const float *)a->x.p + r * a->ldx;
        j.y = (float *)a->y.p + r * a->ldy;
        j.ldx = a->ldx;
        j.ldy = a->ldy;
        j.n = a->w->n;
        j.k = a->w->k;
        j.rows = s.rows;
        const cudaError_t rc = hx_cuda_rows(&j, &s, &w, c->stream);
        if (rc != cudaSuccess)
            return hx_cuda_fail(err, "matmul", rc);
    }
    return 0;
}

/* Prefill rows take the tensor cores, however few they are. */
static int many_matmul(hx_cuda *c, const hx_matmul_args *a, hx_err *err)
{
    const hx_cuda_work w = work_of(c);
    hx_cuda_many m = {};

    m.w = a->w;
    m.x = (const float *)a->x.p;
    m.y = (float *)a->y.p;
    m.rows = a->rows;
    m.ldx = a->ldx;
    m.ldy = a->ldy;
    const cudaError_t rc = hx_cuda_rows_many(&m, &w, c->stream);
    if (rc == cudaErrorInvalidValue)
        return no_scratch(c, "matmul", err);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "matmul", rc);
}

/* The call and those beside it that one launch can do with it; *rest: the first of the
 * others. */
static plain_set plain_set_of(const hx_matmul_args *a, const hx_matmul_args **rest)
{
    const hx_matmul_args *first = a;
    plain_set set = {};

    for (; a != NULL && set.n < MAX_BESIDE && a->w->fmt == first->w->fmt &&
           a->w->k == first->w->k;
         a = a->beside) {
        plain *p = &set.p[set.n++];

        p->m = hx_plain_of(a->w);
        p->x = (const float *)a->x.p;
        p->y = (float *)a->y.p;
        p->rows = first->rows;
        p->n = a->w->n;
        p->ldx = a->ldx;
        p->ldy = a->ldy;
    }
    *rest = a;
    return set;
}

extern "C" int hx_cuda_matmul(hx_dev *d, const hx_matmul_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const hx_matmul_args *rest = a->beside;
    int rc;

    if (a->prefill) {
        rc = many_matmul(c, a, err);
    } else if (a->w->fmt == HX_FMT_EXL3) {
        rc = exl3_matmul(c, a, err);
    } else if (hx_cuda_plain_takes(c, a)) {
        rc = hx_cuda_plain_many(c, a, err);
    } else {
        const plain_set set = plain_set_of(a, &rest);

        rc = plain_products(c, "matmul", set, a->w->fmt, set.n, err);
    }
    if (rc != 0 || rest == NULL)
        return rc;
    hx_matmul_args beside = *rest;
    beside.rows = a->rows;
    return hx_cuda_matmul(d, &beside, err);
}

extern "C" int hx_cuda_head_matmul(hx_dev *d, const hx_head_matmul_args *a, hx_err *err)
{
    plain p = {};

    if (a->prefill) {
        hx_cuda *c = hx_cuda_of(d);
        const hx_cuda_work w = work_of(c);
        const cudaError_t rc = hx_cuda_heads_many(a, &w, c->stream);

        if (rc == cudaErrorInvalidValue)
            return no_scratch(c, "head_matmul", err);
        return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "head_matmul", rc);
    }
    p.m = hx_plain_of(a->w);
    p.m.bias = NULL;
    p.x = (const float *)a->x.p;
    p.y = (float *)a->y.p;
    p.rows = a->rows;
    p.n = a->n;
    p.x_head = a->transposed ? a->n : a->w->k;
    p.y_head = a->transposed ? a->w->k : a->n;
    p.ldx = a->heads * p.x_head;
    p.ldy = a->heads * p.y_head;
    p.first = a->first;
    p.stride = a->stride;
    if (a->transposed)
        return column_product(hx_cuda_of(d), p, a->w->fmt, a->heads, err);
    return plain_product(hx_cuda_of(d), "head_matmul", p, a->w->fmt, a->heads, err);
}

/* ---- experts --------------------------------------------------------- */

/* Where the experts of a layer lie, on the device: one entry per array of experts that
 * was seen, made anew when the array says something else. */
typedef struct {
    const hx_expert *key;
    int64_t n;
    hx_cuda_expert *host; /* [max_expert] */
    hx_cuda_expert *dev;
} table;

struct hx_cuda_tables {
    int64_t max_expert;
    int n_table, next;
    hx_cuda_expert *host, *now; /* [n_table, max_expert], [max_expert] */
    void *dev;
    table t[1];
};

enum { N_TABLE = 128 }; /* layers with experts of all models that share the device */

int hx_cuda_tables_open(hx_cuda *c, const hx_dev_limits *l, hx_err *err)
{
    const size_t n = (size_t)HX_MAX(l->max_expert, 1);
    hx_cuda_tables *t =
        (hx_cuda_tables *)hx_calloc(1, sizeof(hx_cuda_tables) + N_TABLE * sizeof(table));

    c->tables = t;
    if (t == NULL || (t->host = hx_new(hx_cuda_expert, N_TABLE * n)) == NULL ||
        (t->now = hx_new(hx_cuda_expert, n)) == NULL)
        return hx_fail(err, HX_ENOMEM, "device cuda: no memory for tables of %zu experts",
                       n);
    t->max_expert = (int64_t)n;
    t->n_table = N_TABLE;
    if (hx_cuda_alloc_for(&t->dev, N_TABLE * n * sizeof(hx_cuda_expert),
                          "tables of experts", err) != 0)
        return HX_ENOMEM;
    for (int i = 0; i < N_TABLE; i++) {
        t->t[i].host = t->host + (size_t)i * n;
        t->t[i].dev = (hx_cuda_expert *)t->dev + (size_t)i * n;
    }
    return 0;
}

void hx_cuda_tables_close(hx_cuda *c)
{
    hx_cuda_tables *t = c->tables;

    if (t == NULL)
        return;
    if (t->dev != NULL)
        cudaFree(t->dev);
    hx_free(t->host);
    hx_free(t->now);
    hx_free(t);
}

static hx_cuda_mat mat_of(const hx_mat *m)
{
    if (m->fmt == HX_FMT_EXL3)
        return hx_cuda_mat { m->w, m->suh, m->svh };
    return hx_cuda_mat { m->w, m->scale, m->bias };
}

static table *find_table(hx_cuda_tables *t, const hx_expert *key)
{
    for (int i = 0; i < t->n_table; i++)
        if (t->t[i].key == key)
            return &t->t[i];
    table *at = &t->t[t->next];
    t->next = (t->next + 1) % t->n_table;
    at->key = NULL;
    return at;
}

/* The table of a->expert on the device; copied only when it is new or has changed. */
static int expert_table(hx_cuda *c, const hx_moe_args *a, const hx_cuda_expert **out,
                        hx_err *err)
{
    hx_cuda_tables *t = c->tables;
    const size_t bytes = (size_t)a->n_expert * sizeof(hx_cuda_expert);
    table *at = find_table(t, a->expert);

    if (a->n_expert > t->max_expert || bytes > c->stage_bytes)
        return hx_fail(err, HX_EARG,
                       "moe: %lld experts, the device was opened for %lld; open it with "
                       "larger limits",
                       (long long)a->n_expert, (long long)t->max_expert);
    for (int64_t e = 0; e < a->n_expert; e++) {
        const hx_expert *x = &a->expert[e];

        t->now[e] = hx_cuda_expert { mat_of(&x->gate), mat_of(&x->up), mat_of(&x->down) };
    }
    *out = at->dev;
    if (at->key == a->expert && at->n == a->n_expert &&
        memcmp(at->host, t->now, bytes) == 0)
        return 0;
    at->key = a->expert;
    at->n = a->n_expert;
    memcpy(at->host, t->now, bytes);
    hx_cuda_stage *s = hx_cuda_stage_take(c);
    memcpy(s->host, t->now, bytes);
    cudaError_t rc =
        cudaMemcpyAsync(at->dev, s->host, bytes, cudaMemcpyHostToDevice, c->stream);
    if (rc == cudaSuccess)
        rc = hx_cuda_stage_done(c, s);
    if (rc == cudaSuccess)
        return 0;
    at->key = NULL;
    return hx_cuda_fail(err, "moe", rc);
}

static bool same_kind(const hx_mat *a, const hx_mat *b)
{
    return a->fmt == b->fmt && a->n == b->n && a->k == b->k && a->k2 == b->k2 &&
           a->codebook == b->codebook && a->block_n == b->block_n &&
           a->block_k == b->block_k;
}

/* One kernel serves all experts: they must look alike. */
static int check_alike(const hx_moe_args *a, hx_err *err)
{
    const hx_expert *x = a->expert;
    const bool exl3 = x[0].gate.fmt == HX_FMT_EXL3;

    if (x[0].gate.fmt != x[0].up.fmt || x[0].gate.fmt != x[0].down.fmt ||
        x[0].gate.codebook != x[0].up.codebook ||
        x[0].gate.codebook != x[0].down.codebook)
        return hx_fail(
            err, HX_EUNSUP,
            "moe: device cuda takes experts whose three matrices have one format");
    for (int64_t e = 0; e < a->n_expert; e++) {
        if (!same_kind(&x[e].gate, &x[0].gate) || !same_kind(&x[e].up, &x[0].up) ||
            !same_kind(&x[e].down, &x[0].down))
            return hx_fail(
                err, HX_EUNSUP,
                "moe: expert %lld has another format or rate than expert 0; device "
                "cuda takes experts of one kind",
                (long long)e);
        if (exl3 &&
            (x[e].gate.bias != NULL || x[e].up.bias != NULL || x[e].down.bias != NULL))
            return hx_fail(err, HX_EUNSUP,
                           "moe: expert %lld has a bias; device cuda takes none",
                           (long long)e);
    }
    return 0;
}

__global__ void act_picks(float *gate, const float *up, int64_t n, float limit);

/* Experts of plain formats: three products with a matrix per pick. */
static int plain_experts(hx_cuda *c, const hx_moe_args *a, const hx_cuda_expert *expert,
                         int64_t r0, int64_t rows, hx_err *err)
{
    const hx_expert *x = a->expert;
    const int64_t picks = rows * a->active, f = x->gate.n, dim = x->gate.k;
    float *gate = (float *)c->scratch, *up = gate + picks * f;
    plain p = {};
    int rc;

    p.m = hx_plain_of(&x->gate);
    p.m.wide = p.m.k % 8 == 0;
    for (int64_t e = 0; e < a->n_expert; e++)
        p.m.wide = p.m.wide && hx_plain_of(&x[e].gate).wide && hx_plain_of(&x[e].up).wide;
    p.x = (const float *)a->x.p + r0 * dim;
    p.y = gate;
    p.rows = 1;
    p.n = f;
    p.ldx = dim;
    p.y_head = f;
    p.id = (const int32_t *)a->id.p + r0 * a->active;
    p.expert = expert;
    p.first_expert = a->first;
    p.end_expert = hx_moe_end(a);
    p.x_div = (int)a->active;
    if ((rc = plain_product(c, "moe", p, x->gate.fmt, picks, err)) != 0)
        return rc;
    p.which = 1;
    p.y = up;
    if ((rc = plain_product(c, "moe", p, x->gate.fmt, picks, err)) != 0)
        return rc;
    HX_LAUNCH_NEXT(c, "moe", err, act_picks,
                   dim3((unsigned)hx_ceil_div(picks * f, THREADS)), THREADS, 0, gate, up,
                   picks * f, a->limit);
    p.m = hx_plain_of(&x->down);
    for (int64_t e = 0; e < a->n_expert; e++)
        p.m.wide = p.m.wide && hx_plain_of(&x[e].down).wide;
    p.which = 2;
    p.x = gate;
    p.y = (float *)a->y.p + r0 * a->active * dim;
    p.n = dim;
    p.ldx = f;
    p.y_head = dim;
    p.x_div = 1;
    return plain_product(c, "moe", p, x->gate.fmt, picks, err);
}

/* 128 elements a block; those of picks without an expert are whatever was there. */
__global__ void act_picks(float *gate, const float *up, int64_t n, float limit)
{
    hx_cuda_in_turn();
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < n)
        gate[i] = hx_canon_act(gate[i], up[i], limit);
}

static hx_cuda_moe experts_of(const hx_moe_args *a, const hx_cuda_expert *expert,
                              int64_t r0, int64_t rows)
{
    const hx_expert *x = a->expert;
    hx_cuda_moe m = {};

    m.y = (float *)a->y.p + r0 * a->active * x->gate.k;
    m.x = (const float *)a->x.p + r0 * x->gate.k;
    m.id = (const int32_t *)a->id.p + r0 * a->active;
    m.expert = expert;
    m.rows = (int)rows;
    m.active = (int)a->active;
    m.d = x->gate.k;
    m.f = x->gate.n;
    m.d_pad = x->gate.k_pad;
    m.f_pad = x->gate.n_pad;
    m.k2_gate = x->gate.k2;
    m.k2_up = x->up.k2;
    m.k2_down = x->down.k2;
    m.codebook = x->gate.codebook;
    m.limit = a->limit;
    m.n_expert = (int)a->n_expert;
    m.first = (int)a->first;
    m.end = (int)hx_moe_end(a);
    return m;
}

/* Whether rows rows at a time fit the scratch, the tickets and a grid. */
static bool experts_fit(const hx_cuda *c, const hx_moe_args *a, int64_t rows)
{
    const hx_expert *x = a->expert;
    const int64_t picks = rows * a->active;

    if (x->gate.fmt != HX_FMT_EXL3)
        return picks <= MAX_GRID_Y &&
               (size_t)(2 * picks * x->gate.n) * sizeof(float) <= c->scratch_bytes;
    const hx_cuda_moe m = experts_of(a, NULL, 0, rows);
    return picks <= MAX_PICKS && hx_cuda_moe_bytes(&m, &c->gpu) <= c->scratch_bytes &&
           2 * picks * HX_MAX(x->gate.n_pad, x->down.n_pad) / 128 <= c->n_ticket;
}

/* Prefill rows, in turns of which the picks can be counted. */
static int many_experts(hx_cuda *c, const hx_moe_args *a, const hx_cuda_expert *expert,
                        hx_err *err)
{
    const hx_cuda_work w = work_of(c);
    const int64_t most = (1 << 24) / HX_MAX(a->active, 1);

    for (int64_t r = 0; r < a->rows; r += most) {
        const hx_cuda_moe m = experts_of(a, expert, r, HX_MIN(most, a->rows - r));
        const cudaError_t rc = hx_cuda_experts_many(&m, &w, c->stream);

        if (rc == cudaErrorInvalidValue)
            return no_scratch(c, "moe", err);
        if (rc != cudaSuccess)
            return hx_cuda_fail(err, "moe", rc);
    }
    return 0;
}

extern "C" int hx_cuda_moe_op(hx_dev *d, const hx_moe_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const hx_cuda_work w = work_of(c);
    const hx_cuda_expert *expert = NULL;
    int64_t most = a->rows;
    int rc;

    if (a->at.p != NULL)
        expert = (const hx_cuda_expert *)a->at.p;
    else if ((rc = check_alike(a, err)) != 0 ||
             (rc = expert_table(c, a, &expert, err)) != 0)
        return rc;
    if (a->prefill && a->rows > 0 && a->expert->gate.fmt == HX_FMT_EXL3)
        return many_experts(c, a, expert, err);
    while (most > 0 && !experts_fit(c, a, most))
        most /= 2;
    if (most == 0 && a->rows > 0)
        return no_scratch(c, "moe", err);
    for (int64_t r = 0; r < a->rows; r += most) {
        const int64_t rows = HX_MIN(most, a->rows - r);

        if (a->expert->gate.fmt != HX_FMT_EXL3) {
            if ((rc = plain_experts(c, a, expert, r, rows, err)) != 0)
                return rc;
            continue;
        }
        const hx_cuda_moe m = experts_of(a, expert, r, rows);
        const cudaError_t launched = hx_cuda_experts(&m, &w, c->stream);
        if (launched != cudaSuccess)
            return hx_cuda_fail(err, "moe", launched);
    }
    return 0;
}

/* ---- scratch --------------------------------------------------------- */

/* The same for prefill: of a matrix of a plain format, which takes more, and of experts. */
static void many_scratch(const hx_dev_limits *l, size_t *one, size_t *many)
{
    hx_mat mat = {}, latent = {};
    hx_head_matmul_args head = {};
    hx_cuda_moe m = {};

    mat.fmt = HX_FMT_F32;
    mat.k = HX_MAX(l->max_k, 1);
    mat.n = HX_CANON_BLOCK;
    *one = HX_MAX(*one, hx_cuda_many_bytes(&mat, 1));
    mat.n = HX_MAX(l->max_n, mat.k);
    *many = HX_MAX(*many, hx_cuda_many_bytes(&mat, HX_MAX(l->max_rows, 1)));
    head.w = &latent;
    head.heads = HX_MAX(l->max_heads, 1);
    head.n = latent.k = 512;
    *one = HX_MAX(*one, hx_cuda_heads_many_bytes(&head, 1));
    *many = HX_MAX(*many, hx_cuda_heads_many_bytes(&head, HX_MAX(l->max_rows, 1)));
    m.rows = (int)HX_MAX(l->max_rows, 1);
    m.active = (int)HX_MAX(l->max_active, 1);
    m.n_expert = (int)HX_MAX(l->max_expert, 1);
    m.d = m.f = m.d_pad = m.f_pad = hx_ceil_div(mat.k, HX_CANON_BLOCK) * HX_CANON_BLOCK;
    *one = HX_MAX(*one, hx_cuda_experts_many_bytes(&m, 256));
    *many = HX_MAX(*many, hx_cuda_experts_many_bytes(&m, 0));
}

/* Enough for one row of the largest product; more rows at once up to some 256 MiB. */
size_t hx_cuda_product_scratch_bytes(const hx_dev_limits *l, const hx_cuda_gpu *g)
{
    const int64_t k = HX_MAX(l->max_k, 1), n = HX_MAX(l->max_n, k);
    const int64_t active = HX_MAX(l->max_active, 1);
    const size_t some = (size_t)256 << 20;
    size_t one, many;
    hx_cuda_shape s = {};
    hx_cuda_moe m = {};

    s.n_pad = (n + 127) / 128 * 128;
    s.k_pad = (k + 127) / 128 * 128;
    s.n_job = 1;
    s.codebook = HX_CB_MUL1; /* which takes most */
    s.slots = s.rows = 1;
    one = hx_cuda_area_bytes(&s, g);
    s.slots = s.rows = HX_CUDA_JOB_ROWS;
    many = hx_cuda_area_bytes(&s, g);
    m.active = (int)active;
    m.d = m.f = m.d_pad = m.f_pad = s.k_pad;
    m.rows = 1;
    one = HX_MAX(one, hx_cuda_moe_bytes(&m, g));
    m.rows = (int)HX_MAX(HX_MIN(l->max_rows, MAX_PICKS / active), 1);
    many = HX_MAX(many, hx_cuda_moe_bytes(&m, g));
    many_scratch(l, &one, &many);
    return HX_MAX(one, HX_MIN(many, some));
}
