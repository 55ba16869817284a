/* cuda_gemm.cu - products with many rows on the GPU: prefill of matmul and of routed
 * experts. Inputs and weights are halves, sums f32 on the tensor cores. Called by
 * cuda_product.cu. Never allocates, synchronises or reads back.
 *
 * A row's result depends on the row and the matrix alone: every output is one chain of
 * 16-input products in ascending order, however many rows a thread block takes together,
 * whichever block that is and whichever rows lie beside it.
 *
 * First the inputs become halves, rotated if the format wants that, in the very layout
 * that shared memory will have (the image). Then a thread block multiplies 128 outputs, a
 * group, with up to 256 rows: the weights of a group come to shared memory as stored, each
 * warp makes those of its 16 outputs the A operand in its registers, which is the order
 * of a tile, and the rows are the B operand. So a weight is decoded once for 256 rows,
 * while the tensor cores work. The sums are rotated and scaled on their way out.
 *
 * Plain formats are stored as tiles of halves first (hx_cuda_many); then all is the same. */
#include "dev/cuda.h"
#include "dev/cuda_plain.h"
#include "dev/cuda_tensor.h"

enum {
    GROUP = 128,                  /* outputs of a thread block: one rotation */
    WARPS = GROUP / 16,           /* that multiply */
    STEP = 64,                    /* inputs of a stage of the pipeline */
    IMAGE_ROWS = 64,              /* rows whose parts of a step lie together */
    PART = IMAGE_ROWS * STEP * 2, /* bytes of these */
    MOST_ROWS = 256,              /* of a thread block */
    OUT_ROWS = 64,                /* that leave together */
    OUT_PITCH = GROUP + 4,        /* floats; no bank conflicts */
    OUT_BYTES = OUT_ROWS * OUT_PITCH * 4,
    MOST_STAGES = 6,
    MOST_SHARED = 200 << 10, /* bytes: with less a thread block takes 128 rows */
    K2_HALF = 32,            /* "twice the bits" of tiles of halves */
    ROW_THREADS = 256,
};

/* Of a thread block with N rows: those that multiply, and one more warp, which copies. For
 * 256 rows it brings three along, as registers move between groups of four warps only. */
template <int N> constexpr int threads_of = 32 * (WARPS + (N == MOST_ROWS ? 4 : 1));

/* ---- rows become an image ------------------------------------------------------ */

/* Position p of the image: input row, and matrix of the scales. */
struct image_in {
    const float *x, *up; /* up: the input is act(x, up) */
    int64_t ldx, k;
    const uint16_t *suh;          /* one matrix; NULL: no rotation */
    const hx_cuda_expert *expert; /* or of the pick's expert */
    int which;                    /* 0 gate, 1 up, 2 down */
    const int32_t *pick, *id;     /* [positions]: pick or -1; its expert */
    int active;                   /* x row of a pick: pick / active; 0: the position */
    float limit;
    int steps; /* of 64 inputs */
    bool wide; /* x (and up) can be read 16 bytes at a time */
    uint8_t *image;
    float *scale; /* [positions] what the row was divided by, a power of two */
};

HX_DEVICE const hx_cuda_mat *matrix_of(const hx_cuda_expert *e, int which)
{
    return which == 0 ? &e->gate : which == 1 ? &e->up : &e->down;
}

/* Four inputs from at on, 0 past the end. */
HX_DEVICE void load4(const image_in &p, const float *x, int64_t at, float v[4])
{
    if (p.wide && at + 4 <= p.k) {
        const float4 all = *(const float4 *)(x + at);

        v[0] = all.x;
        v[1] = all.y;
        v[2] = all.z;
        v[3] = all.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = at + i < p.k ? x[at + i] : 0.0f;
}

/* The same of the activation, times suh. */
template <bool ACT>
HX_DEVICE void load_inputs(const image_in &p, int64_t row, const uint16_t *suh,
                           int64_t at, float v[4])
{
    float u[4];

    load4(p, p.x + row * p.ldx, at, v);
    if (ACT)
        load4(p, p.up + row * p.ldx, at, u);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (ACT)
            v[i] = hx_canon_act(v[i], u[i], p.limit);
        if (suh != NULL)
            v[i] = v[i] * hx_half_to(suh[at + i]);
    }
}

/* The power of two that brings a magnitude below 2^15; 1 where there is none. */
HX_DEVICE float up_scale(float most)
{
    const int e = (int)(hx_bits_of(most) >> 23 & 255) - 127;

    if (most == 0 || e > 127)
        return 1.0f;
    return hx_float_of((uint32_t)(127 + min(max(14 - e, -100), 100)) << 23);
}

/* One block: one position. Grid positions. Reads the row, twice, the second time from the
 * cache, and writes half its bytes. */
template <bool ACT>
__global__ void __launch_bounds__(ROW_THREADS)
    rows_to_image(const __grid_constant__ image_in p)
{
    __shared__ float shared[33];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_warp = blockDim.x >> 5;
    const int64_t pos = blockIdx.x;
    const uint16_t *suh = p.suh;
    int64_t row = pos;
    float most = 0, v[4];

    hx_cuda_after_previous();
    hx_cuda_allow_next();
    if (p.pick != NULL) {
        const int32_t pick = p.pick[pos];

        if (pick < 0)
            return;
        if (p.expert != NULL)
            suh = (const uint16_t *)matrix_of(&p.expert[p.id[pick]], p.which)->suh;
        row = p.active > 0 ? pick / p.active : pos;
    }
    for (int b = warp; 2 * b < p.steps; b += n_warp) {
        load_inputs<ACT>(p, row, suh, (int64_t)b * 128 + 4 * lane, v);
        for (int i = 0; i < 4; i++)
            most = fmaxf(most, fabsf(v[i]));
    }
    most = hx_block_max(most, shared);
    /* A rotation of 128 values makes none larger than sqrt(128) times the largest. */
    const float up = up_scale(suh != NULL ? most * 11.5f : most);
    if (threadIdx.x == 0)
        p.scale[pos] = 1.0f / up;
    for (int b = warp; 2 * b < p.steps; b += n_warp) {
        const int64_t step = 2 * b + (lane >> 4);
        const int r = (int)(pos % IMAGE_ROWS), piece = lane >> 1 & 7;
        uint8_t *to = p.image + (pos / IMAGE_ROWS * p.steps + step) * PART + r * 128 +
                      16 * (piece ^ (r & 7)) + 8 * (lane & 1);
        __half2 h[2];

        load_inputs<ACT>(p, row, suh, (int64_t)b * 128 + 4 * lane, v);
        if (suh != NULL)
            hx_cuda_rotate(v);
        h[0] = __floats2half2_rn(v[0] * up, v[1] * up);
        h[1] = __floats2half2_rn(v[2] * up, v[3] * up);
        *(uint2 *)to = *(const uint2 *)h;
    }
}

/* ---- weights become registers ---------------------------------------------------- */

/* Decoders of a tile: lane's a[0..3], as mma.m16n8k16 wants 16 outputs x 16 inputs.
 * Outputs g, g + 8 and inputs 2 q, 2 q + 1, 2 q + 8, 2 q + 9 are the eight positions of
 * the lane (fmt_exl3.h). */

/* As hx_cuda_windows of a rate that is no constant; PER windows fit two words. */
template <int PER>
HX_DEVICE void windows_of(const uint32_t *tile, int k2, int lane, uint32_t s[8])
{
    const int words = 4 * k2;

#pragma unroll
    for (int g = 0; g < 8; g += PER) {
        const int end = ((8 * lane + g + PER) * k2) >> 1;
        const int w = (end - 1) >> 5, h = w == 0 ? words - 1 : w - 1;
        const int sh = 31 - ((end - 1) & 31);
        const int far = (((g + PER) * k2) >> 1) - (((g + 1) * k2) >> 1);
        const int d = far > 16 ? far - 16 : 0;
        const uint32_t lo = tile[w], hi = tile[h];
        const uint64_t both = (uint64_t)hi << 32 | lo;
        const uint32_t x = (uint32_t)(both >> sh), z = (uint32_t)(both >> (sh + d));

#pragma unroll
        for (int j = g; j < g + PER; j++) {
            const int down = (((g + PER) * k2) >> 1) - (((j + 1) * k2) >> 1);

            s[j] = (down > 16 ? z >> (down - d) : x >> down) & 0xFFFF;
        }
    }
}

/* Two fp16 values of MUL1: 1024 + the byte sum is a half as it stands. */
HX_DEVICE uint32_t pair_mul1(uint32_t s0, uint32_t s1)
{
    const uint32_t a = __dp4a(s0 * HX_EXL3_MUL1, 0x01010101u, 0x6400u);
    const uint32_t b = __dp4a(s1 * HX_EXL3_MUL1, 0x01010101u, 0x6400u);
    uint32_t v;

    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(v)
        : "r"(__byte_perm(a, b, 0x5410)), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    return v;
}

HX_DEVICE uint32_t pair_half(uint32_t s0, uint32_t s1, hx_cuda_codebook cb)
{
    const uint32_t a = ((s0 * cb.mul + cb.add) & cb.keep) ^ 0x3B603B60u;
    const uint32_t b = ((s1 * cb.mul + cb.add) & cb.keep) ^ 0x3B603B60u;
    uint32_t v;

    asm("add.rn.f16x2 %0, %1, %2;"
        : "=r"(v)
        : "r"(__byte_perm(a, b, 0x5410)), "r"(__byte_perm(a, b, 0x7632)));
    return v;
}

/* EXL3 of K2, or of any rate of which PER windows fit two words. */
template <int K2, int PER, bool HALF> struct exl3 {
    HX_DEVICE void decode(const uint8_t *tile, int k2, hx_cuda_codebook cb, int lane,
                          uint32_t a[4])
    {
        uint32_t s[8];

        if constexpr (K2 != 0)
            hx_cuda_windows<K2>((const uint32_t *)tile, lane, s);
        else
            windows_of<PER>((const uint32_t *)tile, k2, lane, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int to = (i & 1) << 1 | i >> 1; /* j 4 … 7 are output g + 8 */

            a[to] = HALF ? pair_half(s[2 * i], s[2 * i + 1], cb)
                         : pair_mul1(s[2 * i], s[2 * i + 1]);
        }
    }
};

/* Tiles of halves in this order. */
struct halves {
    HX_DEVICE void decode(const uint8_t *tile, int k2, hx_cuda_codebook cb, int lane,
                          uint32_t a[4])
    {
        const uint4 v = ((const uint4 *)tile)[lane];

        a[0] = v.x;
        a[1] = v.y;
        a[2] = v.z;
        a[3] = v.w;
    }
};

/* ---- multiplying ------------------------------------------------------------------ */

/* Up to 256 neighbouring positions of one expert or head, from a multiple of 64 on. */
struct row_block {
    int32_t expert, pos, rows;
};

struct gemm {
    const uint8_t *w;
    const uint16_t *svh, *bias;   /* svh NULL: no rotation */
    const float *out_scale;       /* [outputs] or NULL */
    const hx_cuda_expert *expert; /* or NULL */
    int which;
    const row_block *block; /* NULL: one matrix, blocks of N rows */
    const int32_t *n_block;
    int64_t w_head; /* of blocks without experts: bytes of a head's weights */
    const uint8_t *image;
    const float *scale;
    float *y;
    const int32_t *row; /* [positions] row of y; NULL: the position */
    int64_t ldy, n;
    int rows, groups, steps, band, k2, stages; /* band: groups side by side in time */
    int block_rows;                            /* of a thread block; 0: choose */
    bool wide;                                 /* y takes 16 bytes at a time */
    hx_cuda_codebook cb;
};

/* One thread block's piece of work at a time. */
struct piece {
    int group, pos, rows;
    const uint8_t *w;
    const uint16_t *svh;
    const float *out_scale;
};

HX_DEVICE bool piece_at(const gemm &p, int64_t t, int block_rows, piece *x)
{
    const int n_block =
        p.block != NULL ? *p.n_block : (p.rows + block_rows - 1) / block_rows;

    if (t >= (int64_t)n_block * p.groups)
        return false;
    const int64_t per_band = (int64_t)n_block * p.band;
    const int band = (int)(t / per_band), at = (int)(t - band * per_band);
    const int width = min(p.band, p.groups - band * p.band);
    const int b = at / width;

    x->group = band * p.band + at % width;
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

/* One stage: the rows' parts and four rows of tiles. One warp. */
HX_DEVICE void fill(const gemm &p, const pipe &s, const piece &t, int step)
{
    const int lane = threadIdx.x & 31, parts = (t.rows + IMAGE_ROWS - 1) / IMAGE_ROWS;
    const int tiles = s.w_bytes / 4; /* bytes of a row of them */
    const uint8_t *w = t.w + ((int64_t)4 * step * p.groups + t.group) * tiles;
    const uint8_t *x = p.image + ((int64_t)t.pos / IMAGE_ROWS * p.steps + step) * PART;
    const int64_t w_pitch = (int64_t)p.groups * tiles, x_pitch = (int64_t)p.steps * PART;
    uint8_t *x_to = s.x + s.at * s.x_bytes, *w_to = s.w + s.at * s.w_bytes;

#if HX_BULK
    if (lane == 0)
        hx_bar_expect(s.full + 8 * s.at, parts * PART + s.w_bytes);
    __syncwarp();
    if (lane < parts)
        hx_bulk_copy(hx_shared_of(x_to + lane * PART), x + lane * x_pitch, PART,
                     s.full + 8 * s.at);
    else if (lane >= 28)
        hx_bulk_copy(hx_shared_of(w_to + (lane - 28) * tiles), w + (lane - 28) * w_pitch,
                     tiles, s.full + 8 * s.at);
#else
    for (int i = 0; i < parts; i++)
        for (int b = 16 * lane; b < PART; b += 512)
            hx_copy16(x_to + i * PART + b, x + i * x_pitch + b, true);
    for (int i = 0; i < 4; i++)
        for (int b = 16 * lane; b < tiles; b += 512)
            hx_copy16(w_to + i * tiles + b, w + i * w_pitch + b, true);
    hx_bar_arrive_copies(s.full + 8 * s.at);
#endif
}

/* The last warp: keeps the stages full. */
template <int N> HX_DEVICE void produce(const gemm &p, pipe s)
{
    piece t;

    for (int64_t i = blockIdx.x; piece_at(p, i, N, &t); i += gridDim.x)
        for (int step = 0; step < p.steps; step++, s.next()) {
            hx_bar_wait(s.empty + 8 * s.at, s.phase ^ 1);
            fill(p, s, t, step);
        }
}

/* The weights of a stage. */
template <class F>
HX_DEVICE void decode_stage(const gemm &p, const pipe &s, uint32_t a[4][4])
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint8_t *tile = s.w + s.at * s.w_bytes + warp * (s.w_bytes / 32);

#pragma unroll
    for (int i = 0; i < 4; i++)
        F::decode(tile + i * (s.w_bytes / 4), p.k2, p.cb, lane, a[i]);
#pragma unroll
    for (int i = 0; i < 16; i++)
        HX_PIN(a[i >> 2][i & 3], "r");
}

#if HX_WGMMA

/* A stage's products join the queue; those of the stage before end; then, while these run,
 * the weights of the next stage are made. So the tensor cores always have work. */
template <class F, int N>
HX_DEVICE void multiply_stage(const gemm &p, pipe &s, float *d, uint32_t now[4][4],
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
    if (step > 0 && (threadIdx.x & 31) == 0)
        hx_bar_arrive(s.empty + 8 * before);
    s.next();
    if (step + 1 < p.steps) {
        hx_bar_wait(s.full + 8 * s.at, s.phase);
        decode_stage<F>(p, s, then);
    }
}

template <class F, int N> HX_DEVICE void multiply(const gemm &p, pipe &s, float *d)
{
    uint32_t a[2][4][4] = {};

    hx_bar_wait(s.full + 8 * s.at, s.phase);
    decode_stage<F>(p, s, a[0]);
    for (int step = 0; step < p.steps; step += 2) {
        multiply_stage<F, N>(p, s, d, a[0], a[1], step);
        multiply_stage<F, N>(p, s, d, a[1], a[0], step + 1);
    }
    hx_wgmma_wait();
    if ((threadIdx.x & 31) == 0)
        hx_bar_arrive(s.empty + 8 * ((s.at == 0 ? s.stages : s.at) - 1));
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        HX_PIN(d[i], "f");
#pragma unroll
    for (int i = 0; i < 32; i++)
        HX_PIN(a[i >> 4][i >> 2 & 3][i & 3], "r");
}

#else

template <class F, int N> HX_DEVICE void multiply(const gemm &p, pipe &s, float *d)
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
        if (lane == 0)
            hx_bar_arrive(s.empty + 8 * s.at);
    }
}

#endif

/* What a lane needs to end the rows of its warp: 8 of every 64, those of row warp + 8 i. */
struct ending {
    float svh[4], bias[4];
    float scale; /* of row 64 (lane / 8) + warp + 8 (lane % 8) of the piece */
    int32_t row;
};

HX_DEVICE ending ending_of(const gemm &p, const piece &t)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int r = 64 * (lane >> 3) + warp + 8 * (lane & 7);
    const int64_t col = (int64_t)t.group * GROUP + 4 * lane;
    ending e;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool in = col + i < p.n;

        e.svh[i] = !in                   ? 0.0f
                   : t.svh != NULL       ? hx_half_to(t.svh[col + i])
                   : t.out_scale != NULL ? t.out_scale[col + i]
                                         : 1.0f;
        e.bias[i] = in && p.bias != NULL ? hx_half_to(p.bias[col + i]) : 0.0f;
    }
    e.scale = r < t.rows ? p.scale[t.pos + r] : 0.0f;
    e.row = r < t.rows && p.row != NULL ? p.row[t.pos + r] : t.pos + r;
    return e;
}

/* Rows of the piece leave 64 at a time through shared memory, where a warp finds the 128
 * sums of a row. */
template <int N>
HX_DEVICE void store(const gemm &p, const piece &t, const ending &e, const float *d,
                     float *out)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int64_t col = (int64_t)t.group * GROUP + 4 * lane;

#pragma unroll
    for (int c = 0; c < N / OUT_ROWS; c++) {
        if (c * OUT_ROWS >= t.rows)
            break;
        hx_bar_sync(1, 32 * WARPS);
#pragma unroll
        for (int i = 0; i < OUT_ROWS / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                out[(8 * i + 2 * q + (j & 1)) * OUT_PITCH + 16 * warp + g +
                    8 * (j >> 1)] = d[4 * (8 * c + i) + j];
        hx_bar_sync(1, 32 * WARPS);
#pragma unroll 2
        for (int i = 0; i < OUT_ROWS / WARPS; i++) {
            const int r = warp + WARPS * i;
            const float scale = __shfl_sync(~0u, e.scale, 8 * c + i);
            const int64_t row = __shfl_sync(~0u, e.row, 8 * c + i);
            const float4 sum = *(const float4 *)(out + r * OUT_PITCH + 4 * lane);
            float v[4] = { sum.x, sum.y, sum.z, sum.w };

            if (t.svh != NULL)
                hx_cuda_rotate(v);
#pragma unroll
            for (int k = 0; k < 4; k++)
                v[k] = v[k] * (e.svh[k] * scale) + e.bias[k];
            if (c * OUT_ROWS + r >= t.rows)
                continue;
            float *y = p.y + row * p.ldy + col;
            if (p.wide && col + 4 <= p.n)
                *(float4 *)y = make_float4(v[0], v[1], v[2], v[3]);
            else
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (col + k < p.n)
                        y[k] = v[k];
        }
    }
}

/* Eight warps multiply, 16 outputs each, with N rows; one copies. Grid: as many blocks as
 * fit, each takes pieces in turn. Shared: stages of N x 64 halves and 64 x 128 weights as
 * stored, 33 KB for the sums on their way out, the barriers. Moves the weights of a group
 * once for every N rows, the image once for every group; y once. */
template <class F, int N>
__global__ void __launch_bounds__(threads_of<N>, N == 64 ? 2 : 1)
    gemm_pieces(const __grid_constant__ gemm p)
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
    s.full = hx_shared_of(out) + OUT_BYTES;
    s.empty = s.full + 8 * MOST_STAGES;
    s.at = 0;
    s.phase = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < s.stages; i++) {
            hx_bar_init(s.full + 8 * i, HX_BULK ? 1 : 32);
            hx_bar_init(s.empty + 8 * i, WARPS);
        }
        hx_bar_init_done();
    }
    __syncthreads();
    hx_cuda_after_previous();
    if (warp >= WARPS) {
        if (N == MOST_ROWS)
            hx_registers_fewer<40>();
        if (warp == WARPS)
            produce<N>(p, s);
    } else {
        if (N == MOST_ROWS)
            hx_registers_more<232>();
        for (int64_t i = blockIdx.x; piece_at(p, i, N, &t); i += gridDim.x) {
            const ending e = ending_of(p, t);
            float d[N / 2];

            if (N == MOST_ROWS && t.rows <= 128)
                multiply<F, 128>(p, s, d);
            else
                multiply<F, N>(p, s, d);
            store<N>(p, t, e, d, out);
        }
    }
}

/* ---- plain formats become tiles of halves ------------------------------------------- */

struct halves_in {
    hx_plain_mat m;
    int64_t first;    /* output of the first tile */
    int tiles;        /* of 16 outputs in a row of tiles */
    uint8_t *w;       /* [k / 16, tiles, 512] */
    float *out_scale; /* [16 tiles] */
};

/* One block: the tiles of 16 outputs. Grid tiles, 256 threads. Reads their weights twice,
 * the second time from the cache. */
template <int FMT>
__global__ void __launch_bounds__(ROW_THREADS)
    plain_to_halves(const __grid_constant__ halves_in p)
{
    __shared__ uint32_t most[16];
    __shared__ float up[16];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int64_t n0 = p.first + (int64_t)blockIdx.x * 16, k = p.m.k;
    const int n_step = (int)((k + 127) / 128 * 8);

    if (threadIdx.x < 16)
        most[threadIdx.x] = 0;
    __syncthreads();
    if (FMT != HX_FMT_F16)
        for (int o = 0; o < 16 && n0 + o < p.m.n; o++) {
            float m = 0;

            for (int64_t i = 8 * threadIdx.x; i < k; i += 8 * ROW_THREADS) {
                float w[8];

                hx_plain_load8<FMT>(w, p.m, n0 + o, i);
                for (int j = 0; j < 8; j++)
                    m = fmaxf(m, fabsf(w[j]));
            }
            m = hx_warp_max(m);
            if (lane == 0)
                atomicMax(&most[o], hx_bits_of(m));
        }
    __syncthreads();
    if (threadIdx.x < 16) {
        up[threadIdx.x] =
            FMT == HX_FMT_F16 ? 1.0f : up_scale(hx_float_of(most[threadIdx.x]));
        p.out_scale[(int64_t)blockIdx.x * 16 + threadIdx.x] = 1.0f / up[threadIdx.x];
    }
    __syncthreads();
    for (int step = warp; step < n_step; step += ROW_THREADS / 32) {
        __half2 h[4];

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int o = g + 8 * (i & 1);
            const int64_t at = 16 * step + 2 * q + 8 * (i >> 1);
            const bool in = n0 + o < p.m.n;

            h[i] = __floats2half2_rn(
                in && at < k ? hx_plain_at<FMT>(p.m, n0 + o, at) * up[o] : 0.0f,
                in && at + 1 < k ? hx_plain_at<FMT>(p.m, n0 + o, at + 1) * up[o] : 0.0f);
        }
        ((uint4 *)(p.w + ((int64_t)step * p.tiles + blockIdx.x) * 512))[lane] =
            *(const uint4 *)h;
    }
}

/* ---- launching ---------------------------------------------------------------------- */

/* Bytes of shared memory that a block can have, and a multiprocessor. */
static cudaError_t shared_limits(int *block, int *all)
{
    int dev;
    cudaError_t rc = cudaGetDevice(&dev);

    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(block, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev);
    if (rc == cudaSuccess)
        rc =
            cudaDeviceGetAttribute(all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, dev);
    return rc;
}

static size_t shared_bytes(int n, int k2, int stages)
{
    return (size_t)stages * (size_t)(n * 128 + 512 * k2) + OUT_BYTES + 16 * MOST_STAGES;
}

template <class F, int N>
static cudaError_t launch(gemm p, const hx_cuda_work *w, int64_t pieces, int limit,
                          int all, cudaStream_t stream)
{
    const int each = N == 64 && all >= 2 * 64 * 1024 ? 2 : 1;
    const size_t room = (size_t)HX_MIN(limit, all / each - 1024);
    const int64_t grid = HX_MIN(pieces, (int64_t)w->n_sm * each);
    cudaError_t rc;

    for (p.stages = MOST_STAGES; shared_bytes(N, p.k2, p.stages) > room; p.stages--)
        ;
    const size_t bytes = shared_bytes(N, p.k2, p.stages);
    rc = cudaFuncSetAttribute(gemm_pieces<F, N>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (rc != cudaSuccess)
        return rc;
    return hx_cuda_launch(w->overlap, gemm_pieces<F, N>, dim3((unsigned)grid),
                          dim3(threads_of<N>), bytes, stream, p);
}

/* The most rows of a thread block for which two stages fit. */
static int most_rows(int k2, int limit)
{
    int n = limit >= MOST_SHARED ? MOST_ROWS : MOST_ROWS / 2;

    while (n > 64 && shared_bytes(n, k2, 2) > (size_t)limit)
        n /= 2;
    return n;
}

/* Rows of a thread block. A step of 64 inputs takes at least so many cycles (tensor cores;
 * below 128 rows the decoding), estimated; all give the same bits. */
static int choose_rows(const gemm *p, int n_sm, int limit)
{
    static const int rows[] = { 64, 128, 256 };
    static const int64_t cycles[] = { 430, 580, 1060 };
    int64_t least = INT64_MAX;
    int best = 64;

    for (int i = 0; i < 3 && rows[i] <= most_rows(p->k2, limit); i++) {
        const int64_t pieces = hx_ceil_div(p->rows, rows[i]) * p->groups;
        const int64_t cost = hx_ceil_div(pieces, n_sm) * cycles[i];

        if (cost < least) {
            least = cost;
            best = rows[i];
        }
    }
    return best;
}

/* blocks: the most there can be, with a plan. */
template <class F>
static cudaError_t launch_rows(gemm *p, const hx_cuda_work *w, int64_t blocks,
                               cudaStream_t stream)
{
    int limit = 0, all = 0;
    const cudaError_t rc = shared_limits(&limit, &all);

    if (rc != cudaSuccess)
        return rc;
    const int n = p->block_rows > 0 ? p->block_rows : choose_rows(p, w->n_sm, limit);
    if (p->block == NULL) {
        blocks = hx_ceil_div(p->rows, n);
        p->band = HX_MIN(p->groups, 64);
    } else {
        p->band = p->groups;
    }
    const int64_t pieces = blocks * p->groups;
    return n == 64    ? launch<F, 64>(*p, w, pieces, limit, all, stream)
           : n == 128 ? launch<F, 128>(*p, w, pieces, limit, all, stream)
                      : launch<F, 256>(*p, w, pieces, limit, all, stream);
}

template <bool HALF>
static cudaError_t launch_exl3(gemm *p, const hx_cuda_work *w, int64_t blocks,
                               cudaStream_t stream)
{
    switch (p->k2) {
    case 6:
        return launch_rows<exl3<6, 0, HALF>>(p, w, blocks, stream);
    case 8:
        return launch_rows<exl3<8, 0, HALF>>(p, w, blocks, stream);
    case 12:
        return launch_rows<exl3<12, 0, HALF>>(p, w, blocks, stream);
    case 2:
    case 3:
    case 4:
    case 5:
        return launch_rows<exl3<0, 8, HALF>>(p, w, blocks, stream);
    default:
        return launch_rows<exl3<0, 2, HALF>>(p, w, blocks, stream);
    }
}

static cudaError_t launch_gemm(gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                               int64_t blocks, cudaStream_t stream)
{
    if (p->k2 == K2_HALF)
        return launch_rows<halves>(p, w, blocks, stream);
    p->cb = hx_cuda_codebook_of(codebook);
    return codebook == HX_CB_MUL1 ? launch_exl3<false>(p, w, blocks, stream)
                                  : launch_exl3<true>(p, w, blocks, stream);
}

/* positions rows of the image, from act(x, up) or x. */
static cudaError_t launch_image(image_in *p, int64_t positions, const hx_cuda_work *w,
                                cudaStream_t stream)
{
    p->wide = (uintptr_t)p->x % 16 == 0 && (uintptr_t)p->up % 16 == 0 && p->ldx % 4 == 0;
    const unsigned warps = (unsigned)HX_MIN(p->steps / 2, ROW_THREADS / 32);

    return hx_cuda_launch(w->overlap,
                          p->up != NULL ? rows_to_image<true> : rows_to_image<false>,
                          dim3((unsigned)positions), dim3(32 * warps), 0, stream, *p);
}

/* ---- one matrix ----------------------------------------------------------------------- */

static size_t up_256(size_t n)
{
    return (n + 255) / 256 * 256;
}

static int64_t up_128(int64_t n)
{
    return (n + 127) / 128 * 128;
}

static size_t image_bytes(int64_t positions, int64_t k_pad)
{
    return (size_t)(hx_ceil_div(positions, IMAGE_ROWS) * (k_pad / STEP)) * PART;
}

/* Image, scales. */
static size_t rows_bytes(int64_t rows, int64_t k_pad)
{
    return image_bytes(rows, k_pad) + up_256((size_t)rows * sizeof(float));
}

/* n outputs as tiles of halves, and their scales. */
static size_t halves_bytes(int64_t n, int64_t k_pad)
{
    return (size_t)n * (size_t)k_pad * 2 + up_256((size_t)n * sizeof(float));
}

size_t hx_cuda_many_bytes(const hx_mat *w, int64_t rows)
{
    return rows_bytes(rows, up_128(w->k)) +
           (w->fmt == HX_FMT_EXL3 ? 0 : halves_bytes(up_128(w->n), up_128(w->k)));
}

/* Rows, and outputs of a plain format, that go together. */
static cudaError_t fit(const hx_mat *w, int64_t *rows, int64_t *outputs, size_t bytes)
{
    const int64_t k_pad = up_128(w->k);
    size_t left = bytes;

    *outputs = up_128(w->n);
    if (w->fmt != HX_FMT_EXL3) {
        const size_t half = HX_MAX(bytes / 2, halves_bytes(GROUP, k_pad));

        while (*outputs > GROUP && halves_bytes(*outputs, k_pad) > half)
            *outputs = up_128(*outputs / 2);
        left = bytes - HX_MIN(bytes, halves_bytes(*outputs, k_pad));
    }
    while (*rows > 1 && rows_bytes(*rows, k_pad) > left)
        *rows = *rows > 2 * MOST_ROWS ? (*rows / 2 + 255) / 256 * 256 : *rows / 2;
    return rows_bytes(*rows, k_pad) <= left ? cudaSuccess : cudaErrorInvalidValue;
}

/* Outputs first … of a plain matrix become tiles in w. */
static cudaError_t launch_halves(const hx_mat *m, int64_t first, int64_t outputs,
                                 uint8_t *w, float *out_scale, const hx_cuda_work *work,
                                 cudaStream_t stream)
{
    const halves_in in = { hx_plain_of(m), first, (int)(outputs / 16), w, out_scale };

    HX_PLAIN_SWITCH(m->fmt, return hx_cuda_launch(false, plain_to_halves<FMT>,
                                                  dim3((unsigned)in.tiles),
                                                  dim3(ROW_THREADS), 0, stream, in));
    (void)work;
    return cudaSuccess;
}

static cudaError_t multiply_rows(const hx_cuda_many *a, int64_t r0, int64_t rows,
                                 int64_t outputs, const hx_cuda_work *w,
                                 cudaStream_t stream)
{
    const hx_mat *m = a->w;
    const int64_t k_pad = up_128(m->k);
    const bool exl3 = m->fmt == HX_FMT_EXL3;
    image_in in = {};
    gemm p = {};

    in.x = a->x + r0 * a->ldx;
    in.ldx = a->ldx;
    in.k = m->k;
    in.suh = exl3 ? (const uint16_t *)m->suh : NULL;
    in.steps = (int)(k_pad / STEP);
    in.image = (uint8_t *)w->p;
    in.scale = (float *)(in.image + image_bytes(rows, k_pad));
    cudaError_t rc = launch_image(&in, rows, w, stream);
    p.image = in.image;
    p.scale = in.scale;
    p.rows = (int)rows;
    p.block_rows = a->block_rows;
    p.steps = in.steps;
    p.ldy = a->ldy;
    p.k2 = exl3 ? m->k2 : K2_HALF;
    uint8_t *tiles = (uint8_t *)w->p + rows_bytes(rows, k_pad);
    float *out_scale = (float *)(tiles + outputs * k_pad * 2);
    for (int64_t n = 0; n < m->n && rc == cudaSuccess; n += outputs) {
        const int64_t here = up_128(HX_MIN(outputs, m->n - n));

        p.w = (const uint8_t *)m->w;
        p.svh = exl3 ? (const uint16_t *)m->svh : NULL;
        p.bias = m->bias != NULL ? (const uint16_t *)m->bias + n : NULL;
        p.y = a->y + r0 * a->ldy + n;
        p.wide = (uintptr_t)p.y % 16 == 0 && p.ldy % 4 == 0;
        p.n = HX_MIN(outputs, m->n - n);
        p.groups = (int)(here / GROUP);
        if (!exl3) {
            p.w = tiles;
            p.out_scale = out_scale;
            rc = launch_halves(m, n, here, tiles, out_scale, w, stream);
        }
        if (rc == cudaSuccess)
            rc = launch_gemm(&p, w, m->codebook, 0, stream);
    }
    return rc;
}

cudaError_t hx_cuda_rows_many(const hx_cuda_many *a, const hx_cuda_work *w,
                              cudaStream_t stream)
{
    int64_t rows = HX_MIN(a->rows, (int64_t)1 << 24), outputs;
    cudaError_t rc = fit(a->w, &rows, &outputs, w->bytes);

    for (int64_t r = 0; r < a->rows && rc == cudaSuccess; r += rows)
        rc = multiply_rows(a, r, HX_MIN(rows, a->rows - r), outputs, w, stream);
    return rc;
}

/* ---- heads: a matrix each ------------------------------------------------------------- */

struct heads_in {
    hx_plain_mat m;
    int64_t n, stride, first; /* W_h: rows h * stride + first … + n - 1 */
    bool transposed;
    int tiles, steps; /* of 16 outputs; of 16 inputs */
    uint8_t *w;       /* [heads, steps, tiles, 512] */
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
    const int64_t tile0 = blockIdx.y * (int64_t)p.steps * p.tiles + blockIdx.x;
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
        ((uint4 *)(p.w + (tile0 + (int64_t)step * p.tiles) * 512))[lane] =
            *(const uint4 *)h;
    }
}

/* Positions of a call's heads: those of head h from h * pitch on. */
struct heads_plan {
    int rows, heads, pitch, block_rows;
    int32_t *pick; /* [heads * pitch] row * heads + head, or -1 */
    row_block *block;
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
            row_block { h, at, min(p.block_rows, p.rows - r) };
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
    l.n_block = l.block + up_256((size_t)(positions / IMAGE_ROWS) * sizeof(row_block));
    l.image = l.n_block + 256;
    l.scale = l.image + image_bytes(positions, l.k_pad);
    l.bytes = l.scale + up_256((size_t)positions * sizeof(float));
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
                        (row_block *)(mem + l->block),
                        (int32_t *)(mem + l->n_block) };
    image_in in = {};
    gemm p = {};

    cudaError_t rc = hx_cuda_launch(false, plan_heads,
                                    dim3((unsigned)hx_ceil_div(positions, ROW_THREADS)),
                                    dim3(ROW_THREADS), 0, stream, plan);
    in.x = (const float *)a->x.p + r0 * a->heads * l->inputs;
    in.ldx = in.k = l->inputs;
    in.pick = plan.pick;
    in.active = 1;
    in.steps = p.steps = (int)(l->k_pad / STEP);
    in.image = (uint8_t *)mem + l->image;
    in.scale = (float *)(mem + l->scale);
    if (rc == cudaSuccess)
        rc = launch_image(&in, positions, w, stream);
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
               : launch_gemm(&p, w, HX_CB_MUL1, a->heads * hx_ceil_div(rows, block_rows),
                             stream);
}

cudaError_t hx_cuda_heads_many(const hx_head_matmul_args *a, const hx_cuda_work *w,
                               cudaStream_t stream)
{
    int64_t rows = HX_MIN(a->rows, INT32_MAX / 2 / a->heads);
    int limit = 0, all = 0;
    cudaError_t rc = shared_limits(&limit, &all);

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
    if (rc == cudaSuccess)
        HX_PLAIN_SWITCH(a->w->fmt,
                        rc = hx_cuda_launch(false, heads_to_halves<FMT>,
                                            dim3((unsigned)in.tiles, (unsigned)a->heads),
                                            dim3(ROW_THREADS), 0, stream, in));
    for (int64_t r = 0; r < a->rows && rc == cudaSuccess; r += rows)
        rc = heads_rows(a, &l, r, HX_MIN(rows, a->rows - r), most_rows(K2_HALF, limit), w,
                        stream);
    return rc;
}

/* ---- experts -------------------------------------------------------------------------- */

enum { PLAN_THREADS = 1024 };

/* Picks sorted by expert, each expert from a multiple of 64 on: its positions. They are
 * worked on a window at a time. */
struct plan {
    const int32_t *id; /* [picks] */
    int picks, n_expert, window, n_window, block_rows;
    int32_t *pick;    /* [n_window * window] pick of a position, or -1 */
    row_block *block; /* [n_window, window / 64], positions of the window */
    int32_t *n_block; /* [n_window] */
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
        if ((uint32_t)p.id[i] < (uint32_t)p.n_expert)
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
                row_block { e, from - w * p.window, to - from };
            from = to;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < p.picks; i += PLAN_THREADS)
        if ((uint32_t)p.id[i] < (uint32_t)p.n_expert)
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
        l.block + up_256((size_t)(n_window * window / IMAGE_ROWS) * sizeof(row_block));
    l.image = l.n_block + up_256((size_t)n_window * sizeof(int32_t));
    l.scale = l.image + image;
    l.gate = l.scale + up_256((size_t)window * sizeof(float));
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
    image_in in = {};
    gemm p = {};
    cudaError_t rc = cudaSuccess;

    in.expert = p.expert = m->expert;
    in.pick = pl->pick + (int64_t)i * pl->window;
    in.id = m->id;
    in.limit = m->limit;
    p.image = in.image = (uint8_t *)mem + l->image;
    p.scale = in.scale = (float *)(mem + l->scale);
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
        rc = launch_image(&in, pl->window, w, stream);
        if (rc == cudaSuccess)
            rc = launch_gemm(&p, w, m->codebook, pl->window / IMAGE_ROWS, stream);
    }
    return rc;
}

cudaError_t hx_cuda_experts_many(const hx_cuda_moe *m, const hx_cuda_work *w,
                                 cudaStream_t stream)
{
    const int most = HX_MAX(HX_MAX(m->k2_gate, m->k2_up), m->k2_down);
    int64_t window = hx_ceil_div(many_layout_of(m, 0).positions, MOST_ROWS) * MOST_ROWS;
    int limit = 0, all = 0;
    plan p = {};
    cudaError_t rc;

    while (window > MOST_ROWS && many_layout_of(m, window).bytes > w->bytes)
        window = hx_ceil_div(window / 2, MOST_ROWS) * MOST_ROWS;
    const many_layout l = many_layout_of(m, window);
    if (l.bytes > w->bytes || l.positions > INT32_MAX / 2)
        return cudaErrorInvalidValue;
    if ((rc = shared_limits(&limit, &all)) != cudaSuccess)
        return rc;
    p.id = m->id;
    p.picks = m->rows * m->active;
    p.n_expert = m->n_expert;
    p.window = (int)window;
    p.n_window = (int)hx_ceil_div(l.positions, window);
    p.block_rows = most_rows(most, limit);
    p.pick = (int32_t *)w->p;
    p.block = (row_block *)((char *)w->p + l.block);
    p.n_block = (int32_t *)((char *)w->p + l.n_block);
    rc = hx_cuda_launch(w->overlap, plan_experts, dim3(1), dim3(PLAN_THREADS),
                        2 * (size_t)m->n_expert * sizeof(int32_t), stream, p);
    for (int i = 0; i < p.n_window && rc == cudaSuccess; i++)
        rc = multiply_window(m, &p, i, &l, w, stream);
    return rc;
}
