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
 * Plain formats become an image first, and so does EXL3 where so many rows follow that to
 * decode once is cheaper; then both operands of a product lie in shared memory. */
#include <type_traits>

#include "dev/cuda.h"
#include "dev/cuda_plain.h"
#include "dev/cuda_tensor.h"

enum {
    GROUP = 128,                  /* outputs of a thread block: one rotation */
    WARPS = GROUP / 16,           /* that multiply */
    STEP = 64,                    /* inputs of a stage of the pipeline */
    IMAGE_ROWS = 64,              /* pieces start and are copied in multiples of these */
    PART = IMAGE_ROWS * STEP * 2, /* bytes of their inputs of a step */
    MOST_ROWS = 256,              /* of a thread block */
    OUT_ROWS = 64,                /* that leave together */
    OUT_BYTES = OUT_ROWS * GROUP * 4,
    ENDING_BYTES = 2 * GROUP * 4, /* factor and bias of each output */
    MOST_STAGES = 6,
    MOST_SHARED = 200 << 10, /* bytes: with less a thread block takes 128 rows */
    K2_HALF = 32,            /* "twice the bits" of an image */
    ONCE_ROWS = 2048,        /* so many: EXL3 becomes an image first, on Hopper */
    ONCE_OUTPUTS = 2048,     /* if work memory takes that much of it */
    ONCE_BYTES = 96 << 20,   /* of it at a time */
    SHARE = 2,               /* thread blocks of a cluster on Hopper */
    ROW_THREADS = 256,
    IMAGE_THREADS = 512, /* most of a row that becomes an image */
    HELD = 4,            /* 128-input blocks of it that a warp keeps */
};

/* Of a thread block with N rows: those that multiply, and one more warp, which copies. For
 * 256 rows it brings three along, as registers move between groups of four warps only. */
template <int N> constexpr int threads_of = 32 * (WARPS + (N == MOST_ROWS ? 4 : 1));

/* Place of input i of row r of an image, in which BLOCK rows' parts of a step follow each
 * other: 256 of the inputs, a group of the weights. */
template <int BLOCK>
HX_DEVICE uint8_t *image_at(uint8_t *image, int steps, uint32_t r, uint32_t i)
{
    return image + (int64_t)(r / BLOCK * steps + i / STEP) * (BLOCK * 128) +
           (r % BLOCK * 128 + 16 * ((i / 8 ^ r) & 7) + i % 8 * 2);
}

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
    bool wide; /* x (and up) can be read 16 bytes at a time, to the end */
    uint8_t *image;
    float *scale; /* [positions] what the row was divided by, a power of two */
};

HX_DEVICE const hx_cuda_mat *matrix_of(const hx_cuda_expert *e, int which)
{
    return which == 0 ? &e->gate : which == 1 ? &e->up : &e->down;
}

/* Four inputs of a row as they come; those past the end are 0. */
struct inputs {
    float4 x, up;
    uint2 suh;
};

HX_DEVICE float4 load4(const float *x, int64_t n)
{
    return make_float4(n > 0 ? x[0] : 0, n > 1 ? x[1] : 0, n > 2 ? x[2] : 0,
                       n > 3 ? x[3] : 0);
}

/* wide: x, up and suh can be read in one piece each, to the end. */
template <bool ACT>
HX_DEVICE inputs load_inputs(const image_in &p, int64_t row, const uint16_t *suh,
                             int64_t at, bool wide)
{
    const float *x = p.x + row * p.ldx + at, *up = ACT ? p.up + row * p.ldx + at : NULL;
    inputs in = {};

    if (wide) {
        in.x = *(const float4 *)x;
        if (ACT)
            in.up = *(const float4 *)up;
        if (suh != NULL)
            in.suh = *(const uint2 *)(suh + at);
        return in;
    }
    in.x = load4(x, p.k - at);
    if (ACT)
        in.up = load4(up, p.k - at);
    if (suh != NULL)
        in.suh = make_uint2(suh[at] | (uint32_t)suh[at + 1] << 16,
                            suh[at + 2] | (uint32_t)suh[at + 3] << 16);
    return in;
}

/* Their activation, times suh. */
template <bool ACT>
HX_DEVICE void values_of(const image_in &p, const inputs &in, bool rotate, float v[4])
{
    const float *x = &in.x.x, *up = &in.up.x;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t h = (i < 2 ? in.suh.x : in.suh.y) >> (16 * (i & 1));

        v[i] = ACT ? hx_canon_act(x[i], up[i], p.limit) : x[i];
        if (rotate)
            v[i] = v[i] * hx_half_to((uint16_t)h);
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

/* Sum and difference, two of a rotation's values. */
HX_DEVICE void fold(float &a, float &b)
{
    const float sum = a + b;

    b = a - b;
    a = sum;
}

/* A rotation of 128 values, four neighbours a lane, but for the factor. */
HX_DEVICE void rotate_inputs(float v[4])
{
    fold(v[0], v[1]);
    fold(v[2], v[3]);
    fold(v[0], v[2]);
    fold(v[1], v[3]);
#pragma unroll
    for (int w = 1; w < 32; w *= 2) {
        const float sign = (threadIdx.x & w) != 0 ? -1.0f : 1.0f;

#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = fmaf(v[i], sign, __shfl_xor_sync(~0u, v[i], w));
    }
}

/* Four inputs of a block of the row at pos, as halves after the rotation. */
HX_DEVICE void put_inputs(const image_in &p, uint32_t pos, uint32_t block, float v[4],
                          bool rotate, float up)
{
    __half2 h[2];

    if (rotate) {
        rotate_inputs(v);
        up *= HX_CANON_ROOT;
    }
    h[0] = __floats2half2_rn(v[0] * up, v[1] * up);
    h[1] = __floats2half2_rn(v[2] * up, v[3] * up);
    *(uint2 *)image_at<MOST_ROWS>(
        p.image, p.steps, pos, 128 * block + 4 * (threadIdx.x & 31)) = *(const uint2 *)h;
}

/* One block: one position. Grid positions. Reads the row, what its warps cannot keep a
 * second time from the cache, and writes half its bytes. */
template <bool ACT>
__global__ void __launch_bounds__(IMAGE_THREADS)
    rows_to_image(const __grid_constant__ image_in p)
{
    __shared__ float shared[33];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_warp = blockDim.x >> 5;
    const int64_t pos = blockIdx.x;
    const uint16_t *suh = p.suh;
    int64_t row = pos;
    float most = 0, held[HELD][4], v[4];
    inputs in[HELD];

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
    const bool rotate = suh != NULL, wide = p.wide && (uintptr_t)suh % 8 == 0;
#pragma unroll
    for (int h = 0; h < HELD; h++) /* all on their way before one is looked at */
        if (2 * (warp + h * n_warp) < p.steps)
            in[h] =
                load_inputs<ACT>(p, row, suh, (warp + h * n_warp) * 128 + 4 * lane, wide);
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (2 * (warp + h * n_warp) < p.steps) {
            values_of<ACT>(p, in[h], rotate, held[h]);
            for (int i = 0; i < 4; i++)
                most = fmaxf(most, fabsf(held[h][i]));
        }
    for (int b = warp + HELD * n_warp; 2 * b < p.steps; b += n_warp) {
        values_of<ACT>(p,
                       load_inputs<ACT>(p, row, suh, (int64_t)b * 128 + 4 * lane, wide),
                       rotate, v);
        for (int i = 0; i < 4; i++)
            most = fmaxf(most, fabsf(v[i]));
    }
    most = hx_block_max(most, shared);
    /* A rotation of 128 values makes none larger than sqrt(128) times the largest. */
    const float up = up_scale(rotate ? most * 11.5f : most);
    if (threadIdx.x == 0)
        p.scale[pos] = 1.0f / up;
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (2 * (warp + h * n_warp) < p.steps)
            put_inputs(p, pos, warp + h * n_warp, held[h], rotate, up);
    for (int b = warp + HELD * n_warp; 2 * b < p.steps; b += n_warp) {
        values_of<ACT>(p,
                       load_inputs<ACT>(p, row, suh, (int64_t)b * 128 + 4 * lane, wide),
                       rotate, v);
        put_inputs(p, pos, b, v, rotate, up);
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

/* An image. */
struct halves {
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
    int share;      /* thread blocks of a cluster: neighbouring groups, the same rows */
    int block_rows; /* of a thread block; 0: choose */
    bool wide;      /* y takes 16 bytes at a time */
    hx_cuda_codebook cb;
};

/* One thread block's piece of work at a time. */
struct piece {
    int group, pos, rows;
    bool spare; /* one group too many: nothing of it leaves */
    const uint8_t *w;
    const uint16_t *svh;
    const float *out_scale;
};

/* Of a cluster's thread blocks; 0 without clusters. */
HX_DEVICE int rank_of(const gemm &p)
{
    uint32_t rank = 0;

#if HX_WGMMA
    if (p.share > 1)
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return (int)rank;
}

/* Piece t of the cluster, this thread block's part of it. */
HX_DEVICE bool piece_at(const gemm &p, int64_t t, int block_rows, piece *x)
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

HX_DEVICE source source_of(const gemm &p, const pipe &s, const piece &t)
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

HX_DEVICE void fill(const gemm &p, const pipe &s, const source &f, int rank)
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
HX_DEVICE void drained(const gemm &p, const pipe &s, int at)
{
    const int lane = threadIdx.x & 31;

    if (lane < p.share)
        hx_bar_arrive_at(s.empty + 8 * at, lane);
}

/* The last warp keeps the stages full; one thread of it where copies are counted, for the
 * lanes of a warp would copy in turn: eight a stage kept the others waiting a third of their
 * time (H200). */
template <int N> HX_DEVICE void produce(const gemm &p, pipe s)
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
HX_DEVICE void decode_stage(const gemm &p, const pipe &s, uint32_t a[4][4])
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
    if (step > 0)
        drained(p, s, before);
    s.next();
    if (step + 1 < p.steps) {
        hx_bar_wait(s.full + 8 * s.at, s.phase);
        decode_stage<F>(p, s, then);
    }
}

/* The same of weights that lie there as the rows do: nothing to make. */
template <int N> HX_DEVICE void multiply_images(const gemm &p, pipe &s, float *d)
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

template <class F, int N> HX_DEVICE void multiply(const gemm &p, pipe &s, float *d)
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
        drained(p, s, s.at);
    }
}

#endif

/* What ends a piece: factor and bias of output threadIdx.x; scale and place of row 64
 * (lane / 8) + 8 warp + lane % 8. */
struct ending {
    float factor, bias, scale;
    int32_t row;
};

HX_DEVICE ending ending_of(const gemm &p, const piece &t)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int r = 64 * (lane >> 3) + 8 * warp + (lane & 7);
    const int64_t col = (int64_t)t.group * GROUP + threadIdx.x;
    const bool in = threadIdx.x < GROUP && col < p.n;
    ending e;

    e.factor = !in                   ? 0.0f
               : t.svh != NULL       ? hx_half_to(t.svh[col]) * HX_CANON_ROOT
               : t.out_scale != NULL ? t.out_scale[col]
                                     : 1.0f;
    e.bias = in && p.bias != NULL ? hx_half_to(p.bias[col]) : 0.0f;
    e.scale = r < t.rows ? p.scale[t.pos + r] : 0.0f;
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

/* A quarter of a row's sums, outputs 16 i + 4 (lane % 4) … + 3, those of a rotation past
 * its step over distance 8: the other steps, one of them between lanes. */
HX_DEVICE void rotate_sums(float v[8][4])
{
    const float sign = (threadIdx.x & 1) != 0 ? -1.0f : 1.0f;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        fold(v[i][0], v[i][1]);
        fold(v[i][2], v[i][3]);
        fold(v[i][0], v[i][2]);
        fold(v[i][1], v[i][3]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int w = 1; w < 8; w *= 2)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if ((i & w) == 0)
                    fold(v[i][k], v[i + w][k]);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[i][k] = fmaf(v[i][k], sign, __shfl_xor_sync(~0u, v[i][k], 1));
}

/* A quarter of a row, from output col on, leaves. factor, bias: those of these outputs. */
HX_DEVICE void leave(const gemm &p, float v[8][4], const float *factor, const float *bias,
                     float scale, int64_t row, int64_t col)
{
    float *y = p.y + row * p.ldy + col;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 f = *(const float4 *)(factor + 16 * i);

        v[i][0] = v[i][0] * (f.x * scale);
        v[i][1] = v[i][1] * (f.y * scale);
        v[i][2] = v[i][2] * (f.z * scale);
        v[i][3] = v[i][3] * (f.w * scale);
    }
    if (p.bias == NULL && p.wide && col + 7 * 16 + 4 <= p.n) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            *(float4 *)(y + 16 * i) = *(const float4 *)v[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (col + 16 * i + k < p.n)
                y[16 * i + k] = p.bias != NULL ? v[i][k] + bias[16 * i + k] : v[i][k];
}

/* Rows of the piece leave 64 at a time through shared memory, where a quarter of a row is
 * a thread's. */
template <int N>
HX_DEVICE void store(const gemm &p, const piece &t, const ending &e, const float *d,
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
        const float scale = __shfl_sync(~0u, e.scale, 8 * c + (lane >> 2));
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

/* ---- few rows ------------------------------------------------------------------------- */

/* With few rows the decoding is all the work, and 128 outputs a multiprocessor leave most of
 * them idle. So a cluster of two thread blocks has a group: each 64 outputs, whose weights
 * sixteen warps decode into shared memory, two a stage in turn; the rows, which the two copy
 * for one another, are the A operand. Sums and their order are the others'. */
enum {
    FEW_ROWS = 64,
    FEW_OUTPUTS = 64,
    FEW_SHARE = GROUP / FEW_OUTPUTS,
    FEW_STAGES = 8,
    FEW_WARPS = FEW_OUTPUTS / 32, /* that decode a stage */
    FEW_DECODE = FEW_WARPS * FEW_STAGES,
    FEW_AHEAD = 2, /* turns whose tiles such a warp has on their way */
    FEW_WEIGHTS = FEW_OUTPUTS * 128,
    FEW_OUT = FEW_ROWS / FEW_SHARE * GROUP * 4,
    FEW_THREADS = 32 * (4 + FEW_DECODE + 1),
};

static __host__ __device__ inline int few_x_bytes(int rows)
{
    return (rows + 7) / 8 * 1024;
}

static __host__ __device__ inline int few_bytes(int rows, int k2)
{
    return FEW_STAGES * (few_x_bytes(rows) + FEW_WEIGHTS) +
           FEW_DECODE * FEW_AHEAD * 128 * k2 + FEW_OUT + ENDING_BYTES +
           3 * FEW_STAGES * 8;
}

/* Shared memory of a thread block. */
struct few {
    uint8_t *x, *weights, *tiles; /* [stages] */
    float *out, *factor, *bias;   /* [32 rows][128], [128], [128] */
    uint32_t full, made, empty;   /* [stages] barriers */
    int x_bytes, rank;
};

#if HX_WGMMA

/* The rows' copies: a part of each stage, for all. One thread. */
HX_DEVICE void few_produce(const gemm &p, const few &s)
{
    const int mine = s.x_bytes / FEW_SHARE;
    const uint8_t *from = p.image + s.rank * mine;

    for (int step = 0; step < p.steps; step++, from += MOST_ROWS * 128) {
        const int at = step % FEW_STAGES;

        hx_bar_wait(s.empty + 8 * at, (step / FEW_STAGES & 1) ^ 1);
        hx_bar_expect(s.full + 8 * at, s.x_bytes);
        hx_bulk_copy_all(hx_shared_of(s.x + at * s.x_bytes + s.rank * mine), from, mine,
                         s.full + 8 * at, FEW_SHARE);
    }
}

/* One of the sixteen warps: 32 outputs of the stages at, at + 8 … */
template <class F> HX_DEVICE void few_decode(const gemm &p, const few &s, int mine)
{
    const int at = mine % FEW_STAGES, part = mine / FEW_STAGES;
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const int row_bytes = 32 * p.k2, turn_bytes = 4 * row_bytes;
    const int64_t pitch = (int64_t)p.groups * 128 * p.k2;
    const int turns = (p.steps - at + FEW_STAGES - 1) / FEW_STAGES;
    const uint8_t *from =
        p.w + 4 * at * pitch +
        ((int64_t)blockIdx.x * FEW_WARPS + part) * row_bytes; /* two columns of tiles */
    uint8_t *tiles = s.tiles + mine * FEW_AHEAD * turn_bytes;
    uint8_t *to = s.weights + at * FEW_WEIGHTS;
    const auto fetch = [&](int turn) {
        for (int i = lane; i < 8 * p.k2 && turn < turns; i += 32)
            hx_copy16(tiles + turn % FEW_AHEAD * turn_bytes + 16 * i,
                      from + ((int64_t)turn * 4 * FEW_STAGES + i / (2 * p.k2)) * pitch +
                          i % (2 * p.k2) * 16,
                      true);
        hx_copy_commit();
    };

    for (int turn = 0; turn < FEW_AHEAD; turn++)
        fetch(turn);
    for (int turn = 0; turn < turns; turn++) {
        const uint8_t *tile = tiles + turn % FEW_AHEAD * turn_bytes;

        hx_copy_wait_older<FEW_AHEAD - 1>();
        __syncwarp();
        hx_bar_wait(s.empty + 8 * at, (turn & 1) ^ 1);
#pragma unroll
        for (int t = 0; t < 8; t++) {
            uint32_t a[4];

            F::decode(tile + t * (row_bytes / 2), p.k2, p.cb, lane, a);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(uint32_t *)image_at<FEW_OUTPUTS>(
                    to, 1, 32 * part + 16 * (t & 1) + g + 8 * (i & 1),
                    16 * (t >> 1) + 2 * q + 8 * (i >> 1)) = a[i];
        }
        hx_bar_wait(s.full + 8 * at, turn & 1); /* so that made means both */
        hx_wgmma_wrote();
        __syncwarp();
        if (lane == 0)
            hx_bar_arrive(s.made + 8 * at);
        fetch(turn + FEW_AHEAD);
    }
}

/* Four warps: 64 rows times 64 outputs; the sums of rows 0 to 31 go to the thread block of
 * rank 0, the others to rank 1. */
HX_DEVICE void few_multiply(const gemm &p, const few &s)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    float d[FEW_OUTPUTS / 2];

    for (int step = 0; step < p.steps; step++) {
        const int at = step % FEW_STAGES, phase = step / FEW_STAGES & 1;
        const uint64_t x = hx_wgmma_matrix(hx_shared_of(s.x + at * s.x_bytes));
        const uint64_t w = hx_wgmma_matrix(hx_shared_of(s.weights + at * FEW_WEIGHTS));

        hx_bar_wait(s.made + 8 * at, phase);
        hx_wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            hx_wgmma_shared<FEW_OUTPUTS>(d, x + 2 * i, w + 2 * i, step + i > 0);
        hx_wgmma_commit();
        hx_wgmma_wait_older();
        if (step > 0 && lane < FEW_SHARE)
            hx_bar_arrive_at(s.empty + 8 * ((step - 1) % FEW_STAGES), lane);
    }
    hx_wgmma_wait();
#pragma unroll
    for (int i = 0; i < FEW_OUTPUTS / 2; i++)
        HX_PIN(d[i], "f");
#pragma unroll
    for (int i = 0; i < FEW_OUTPUTS / 4; i++)
        hx_put_at(hx_shared_of(s.out + (16 * (warp & 1) + g + 8 * (i & 1)) * GROUP +
                               FEW_OUTPUTS * s.rank + 8 * (i >> 1) + 2 * q),
                  warp >> 1, d[2 * i], d[2 * i + 1]);
}

#endif

/* 64 outputs, all rows. Grid: two for a group, a cluster. Shared: few_bytes. Reads its
 * weights once, of the image a half. */
template <class F>
__global__ void __launch_bounds__(FEW_THREADS) gemm_few(const __grid_constant__ gemm p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, q = threadIdx.x & 3;
    const int64_t first = (int64_t)(blockIdx.x / FEW_SHARE) * GROUP;
    few s;

    s.rank = blockIdx.x % FEW_SHARE;
    s.x_bytes = few_x_bytes(p.rows);
    s.x = shared;
    s.weights = s.x + FEW_STAGES * s.x_bytes;
    s.out = (float *)(s.weights + FEW_STAGES * FEW_WEIGHTS);
    s.factor = (float *)((uint8_t *)s.out + FEW_OUT);
    s.bias = s.factor + GROUP;
    s.tiles = (uint8_t *)(s.bias + GROUP);
    s.full = hx_shared_of(s.tiles) + FEW_DECODE * FEW_AHEAD * 128 * p.k2;
    s.made = s.full + 8 * FEW_STAGES;
    s.empty = s.made + 8 * FEW_STAGES;
    if (threadIdx.x < FEW_STAGES) {
        hx_bar_init(s.full + 8 * threadIdx.x, 1);
        hx_bar_init(s.made + 8 * threadIdx.x, FEW_WARPS);
        hx_bar_init(s.empty + 8 * threadIdx.x, 4 * FEW_SHARE);
        hx_bar_init_done();
    }
    hx_cluster_meet();
    if (warp >= 4 + FEW_DECODE) {
        hx_cuda_after_previous();
        if ((threadIdx.x & 31) == 0)
            few_produce(p, s);
    } else if (warp >= 4) {
        few_decode<F>(p, s, warp - 4);
    } else {
        const int64_t col = first + threadIdx.x;
        const bool in = col < p.n;

        s.factor[threadIdx.x] = in ? hx_half_to(p.svh[col]) * HX_CANON_ROOT : 0.0f;
        s.bias[threadIdx.x] = in && p.bias != NULL ? hx_half_to(p.bias[col]) : 0.0f;
        few_multiply(p, s);
    }
    __syncwarp();
    hx_cluster_meet();
    const int row = 32 * s.rank + (int)(threadIdx.x >> 2);
    if (warp >= 4)
        return;
    const float sign = (q & 2) != 0 ? -1.0f : 1.0f;
    float v[8][4];

#pragma unroll
    for (int i = 0; i < 8; i++) {
        *(float4 *)v[i] =
            *(const float4 *)(s.out + (threadIdx.x >> 2) * GROUP + 16 * i + 4 * q);
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[i][k] = fmaf(v[i][k], sign, __shfl_xor_sync(~0u, v[i][k], 2));
    }
    rotate_sums(v);
    hx_cuda_after_previous();
    if (row < p.rows)
        leave(p, v, s.factor + 4 * q, s.bias + 4 * q, p.scale[row], row, first + 4 * q);
#endif
}

/* ---- weights become an image -------------------------------------------------------- */

struct exl3_in {
    const uint8_t *w;      /* the trellis from the first output on */
    int groups, steps, k2; /* groups: of the whole matrix */
    hx_cuda_codebook cb;
    uint8_t *image;
};

/* One block: a step of a group. Grid (groups, steps), 256 threads. Shared: 16 KB of the
 * image, the tiles. Reads each tile once, writes 512 bytes of it. */
template <class F>
__global__ void __launch_bounds__(32 * WARPS)
    exl3_to_image(const __grid_constant__ exl3_in p)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int row_bytes = 128 * p.k2, vectors = row_bytes / 16;
    const int64_t step = blockIdx.y, group = blockIdx.x;
    const uint8_t *from = p.w + (4 * step * p.groups + group) * row_bytes;
    uint8_t *tiles = shared + 2 * PART;

    hx_cuda_allow_next();
    for (int i = threadIdx.x; i < 4 * vectors; i += 32 * WARPS)
        ((uint4 *)tiles)[i] =
            *(const uint4 *)(from + (int64_t)(i / vectors) * p.groups * row_bytes +
                             i % vectors * 16);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 4; t++) {
        uint32_t a[4];

        F::decode(tiles + t * row_bytes + warp * (row_bytes / 8), p.k2, p.cb, lane, a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)image_at<GROUP>(shared, 1, 16 * warp + g + 8 * (i & 1),
                                         16 * t + 2 * q + 8 * (i >> 1)) = a[i];
    }
    __syncthreads();
    hx_cuda_after_previous();
    uint4 *to = (uint4 *)(p.image + (group * p.steps + step) * (GROUP * 128));
#pragma unroll
    for (int i = threadIdx.x; i < GROUP * 128 / 16; i += 32 * WARPS)
        to[i] = ((const uint4 *)shared)[i];
}

struct halves_in {
    hx_plain_mat m;
    int64_t first;    /* output of the first tile */
    int tiles, steps; /* of 16 outputs; of 64 inputs */
    uint8_t *w;       /* the image */
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
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(__half2 *)image_at<GROUP>(p.w, p.steps,
                                        (int64_t)blockIdx.x * 16 + g + 8 * (i & 1),
                                        16 * step + 2 * q + 8 * (i >> 1)) = h[i];
    }
}

/* ---- launching ---------------------------------------------------------------------- */

/* Of the device: shared memory that a block can have, and a multiprocessor; thread blocks
 * that share rows. */
struct limits {
    int block, all, share;
};

static cudaError_t limits_of(limits *l)
{
    int dev, cc = 0;
    cudaError_t rc = cudaGetDevice(&dev);

    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&l->block, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                    dev);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&l->all, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                    dev);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&cc, cudaDevAttrComputeCapabilityMajor, dev);
    l->share = cc == 9 ? SHARE : 1;
    return rc;
}

static size_t shared_bytes(int n, int k2, int stages)
{
    return (size_t)stages * (size_t)(n * 128 + 512 * k2) + OUT_BYTES + ENDING_BYTES +
           16 * MOST_STAGES;
}

/* sets: pieces of a cluster. */
template <class F, int N>
static cudaError_t launch(gemm p, const hx_cuda_work *w, int64_t sets, const limits *l,
                          cudaStream_t stream)
{
    const bool few = sets * p.share <= w->n_sm;
    const int each = N == 64 && l->all >= 2 * 64 * 1024 && !few ? 2 : 1;
    const size_t room = (size_t)HX_MIN(l->block, l->all / each - 1024);
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t cfg = {};

    for (p.stages = MOST_STAGES; shared_bytes(N, p.k2, p.stages) > room; p.stages--)
        ;
    /* Two thread blocks on one multiprocessor would leave another idle. */
    cfg.dynamicSmemBytes = HX_MAX(shared_bytes(N, p.k2, p.stages),
                                  few ? (size_t)HX_MIN(l->block, l->all / 2) : 0);
    cfg.gridDim =
        dim3((unsigned)(HX_MIN(sets, (int64_t)w->n_sm * each / p.share) * p.share));
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

template <class F>
static cudaError_t launch_few(const gemm &p, const hx_cuda_work *w, cudaStream_t stream)
{
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t cfg = {};
    const cudaError_t rc =
        cudaFuncSetAttribute(gemm_few<F>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             few_bytes(p.rows, p.k2));

    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim = { FEW_SHARE, 1, 1 };
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cfg.gridDim = dim3((unsigned)(p.groups * FEW_SHARE));
    cfg.blockDim = dim3(FEW_THREADS);
    cfg.dynamicSmemBytes = (size_t)few_bytes(p.rows, p.k2);
    cfg.stream = stream;
    cfg.attrs = attr;
    cfg.numAttrs = w->overlap ? 2 : 1;
    return rc != cudaSuccess ? rc : cudaLaunchKernelEx(&cfg, gemm_few<F>, p);
}

/* The most rows of a thread block for which two stages fit. */
static int most_rows(int k2, int limit)
{
    int n = limit >= MOST_SHARED ? MOST_ROWS : MOST_ROWS / 2;

    while (n > 64 && shared_bytes(n, k2, 2) > (size_t)limit)
        n /= 2;
    return n;
}

/* Rows of a thread block, by the time of a wave of them (4096 inputs, us, H200); all give
 * the same bits. */
static int choose_rows(const gemm *p, int n_sm, int limit)
{
    static const int rows[] = { 64, 128, 256 };
    static const int64_t wave[] = { 44, 48, 62 };
    int64_t least = INT64_MAX;
    int best = 64;

    for (int i = 0; i < 3 && rows[i] <= most_rows(p->k2, limit); i++) {
        const int64_t pieces = hx_ceil_div(p->rows, rows[i]) * p->groups;
        const int64_t cost = hx_ceil_div(pieces, n_sm) * wave[i];

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
    limits l = {};
    const cudaError_t rc = limits_of(&l);

    if (rc != cudaSuccess)
        return rc;
    if constexpr (!std::is_same_v<F, halves>)
        if (l.share > 1 && p->block == NULL && p->rows <= FEW_ROWS &&
            p->block_rows == 0 && p->groups * FEW_SHARE <= w->n_sm)
            return launch_few<F>(*p, w, stream);
    const int n = p->block_rows > 0 ? p->block_rows : choose_rows(p, w->n_sm, l.block);
    p->share = p->groups > 1 ? l.share : 1;
    const int64_t sets = hx_ceil_div(p->groups, p->share);
    p->band = (int)(p->block == NULL ? HX_MIN(sets, 64 / p->share) : sets);
    if (p->block == NULL)
        blocks = hx_ceil_div(p->rows, n);
    return n == 64    ? launch<F, 64>(*p, w, blocks * sets, &l, stream)
           : n == 128 ? launch<F, 128>(*p, w, blocks * sets, &l, stream)
                      : launch<F, 256>(*p, w, blocks * sets, &l, stream);
}

/* what() of the decoder of a rate. */
template <bool HALF, class What> static cudaError_t with_rate(int k2, const What &what)
{
    switch (k2) {
    case 6:
        return what(exl3<6, 0, HALF>());
    case 8:
        return what(exl3<8, 0, HALF>());
    case 12:
        return what(exl3<12, 0, HALF>());
    case 2:
    case 3:
    case 4:
    case 5:
        return what(exl3<0, 8, HALF>());
    default:
        return what(exl3<0, 2, HALF>());
    }
}

template <class What>
static cudaError_t with_exl3(int k2, hx_codebook codebook, const What &what)
{
    return codebook == HX_CB_MUL1 ? with_rate<false>(k2, what)
                                  : with_rate<true>(k2, what);
}

static cudaError_t launch_gemm(gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                               int64_t blocks, cudaStream_t stream)
{
    if (p->k2 == K2_HALF)
        return launch_rows<halves>(p, w, blocks, stream);
    p->cb = hx_cuda_codebook_of(codebook);
    return with_exl3(p->k2, codebook, [&](auto f) {
        return launch_rows<decltype(f)>(p, w, blocks, stream);
    });
}

/* positions rows of the image, from act(x, up) or x. */
static cudaError_t launch_image(image_in *p, int64_t positions, const hx_cuda_work *w,
                                cudaStream_t stream)
{
    p->wide = (uintptr_t)p->x % 16 == 0 && (uintptr_t)p->up % 16 == 0 &&
              p->ldx % 4 == 0 && p->k == (int64_t)p->steps * STEP;
    const unsigned warps =
        (unsigned)HX_MIN(hx_ceil_div(p->steps / 2, HELD), IMAGE_THREADS / 32);

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
    return (size_t)(hx_ceil_div(positions, MOST_ROWS) * MOST_ROWS * k_pad) * 2;
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
    const size_t image = halves_bytes(up_128(w->n), up_128(w->k));

    return rows_bytes(rows, up_128(w->k)) + (w->fmt != HX_FMT_EXL3 ? image
                                             : rows < ONCE_ROWS
                                                 ? 0
                                                 : HX_MIN(image, (size_t)ONCE_BYTES));
}

/* Rows, and outputs that become an image, that go together; no outputs: EXL3 as it is. */
static cudaError_t fit(const hx_cuda_many *a, int64_t *rows, int64_t *outputs,
                       size_t bytes, bool hopper)
{
    const int64_t k_pad = up_128(a->w->k), n_pad = up_128(a->w->n);
    const bool exl3 = a->w->fmt == HX_FMT_EXL3;
    size_t left = bytes;

    *outputs = exl3 ? 0 : n_pad;
    if (!exl3) {
        const size_t half = HX_MAX(bytes / 2, halves_bytes(GROUP, k_pad));

        while (*outputs > GROUP && halves_bytes(*outputs, k_pad) > half)
            *outputs = up_128(*outputs / 2);
        left = bytes - HX_MIN(bytes, halves_bytes(*outputs, k_pad));
    }
    while (*rows > 1 && rows_bytes(*rows, k_pad) > left)
        *rows = *rows > 2 * MOST_ROWS ? (*rows / 2 + 255) / 256 * 256 : *rows / 2;
    if (rows_bytes(*rows, k_pad) > left)
        return cudaErrorInvalidValue;
    if (exl3 && (a->once > 0 || (a->once == 0 && hopper && *rows >= ONCE_ROWS))) {
        left = HX_MIN(left - rows_bytes(*rows, k_pad), (size_t)ONCE_BYTES);
        for (int64_t turns = 1; *outputs == 0 && n_pad / turns >= GROUP; turns++)
            if (halves_bytes(up_128(hx_ceil_div(n_pad, turns)), k_pad) <= left)
                *outputs = up_128(hx_ceil_div(n_pad, turns));
        if (a->once == 0 && *outputs < HX_MIN(n_pad, (int64_t)ONCE_OUTPUTS))
            *outputs = 0;
    }
    return cudaSuccess;
}

/* Outputs first … become an image. */
static cudaError_t launch_weights(const hx_mat *m, int64_t first, int64_t outputs,
                                  uint8_t *image, float *out_scale, const hx_cuda_work *w,
                                  cudaStream_t stream)
{
    const int steps = (int)(up_128(m->k) / STEP);
    const halves_in in = { hx_plain_of(m), first, (int)(outputs / 16),
                           steps,          image, out_scale };
    const exl3_in tiles = { (const uint8_t *)m->w + first * m->k2,
                            (int)(m->n_pad / GROUP),
                            steps,
                            m->k2,
                            hx_cuda_codebook_of(m->codebook),
                            image };

    if (m->fmt == HX_FMT_EXL3)
        return with_exl3(m->k2, m->codebook, [&](auto f) {
            return hx_cuda_launch(w->overlap, exl3_to_image<decltype(f)>,
                                  dim3((unsigned)(outputs / GROUP), (unsigned)steps),
                                  dim3(32 * WARPS), 2 * PART + 512 * (size_t)m->k2,
                                  stream, tiles);
        });
    HX_PLAIN_SWITCH(m->fmt, return hx_cuda_launch(false, plain_to_halves<FMT>,
                                                  dim3((unsigned)in.tiles),
                                                  dim3(ROW_THREADS), 0, stream, in));
    return cudaSuccess;
}

static cudaError_t multiply_rows(const hx_cuda_many *a, int64_t r0, int64_t rows,
                                 int64_t outputs, const hx_cuda_work *w,
                                 cudaStream_t stream)
{
    const hx_mat *m = a->w;
    const int64_t k_pad = up_128(m->k);
    const bool exl3 = m->fmt == HX_FMT_EXL3, as_is = outputs == 0;
    image_in in = {};
    gemm p = {};

    if (as_is)
        outputs = up_128(m->n);
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
    p.k2 = as_is ? m->k2 : K2_HALF;
    uint8_t *image = (uint8_t *)w->p + rows_bytes(rows, k_pad);
    float *out_scale = (float *)(image + outputs * k_pad * 2);
    for (int64_t n = 0; n < m->n && rc == cudaSuccess; n += outputs) {
        const int64_t here = up_128(HX_MIN(outputs, m->n - n));

        p.w = as_is ? (const uint8_t *)m->w : image;
        p.svh = exl3 ? (const uint16_t *)m->svh + n : NULL;
        p.out_scale = exl3 ? NULL : out_scale;
        p.bias = m->bias != NULL ? (const uint16_t *)m->bias + n : NULL;
        p.y = a->y + r0 * a->ldy + n;
        p.wide = (uintptr_t)p.y % 16 == 0 && p.ldy % 4 == 0;
        p.n = HX_MIN(outputs, m->n - n);
        p.groups = (int)(here / GROUP);
        if (!as_is)
            rc = launch_weights(m, n, here, image, out_scale, w, stream);
        if (rc == cudaSuccess)
            rc = launch_gemm(&p, w, m->codebook, 0, stream);
    }
    return rc;
}

cudaError_t hx_cuda_rows_many(const hx_cuda_many *a, const hx_cuda_work *w,
                              cudaStream_t stream)
{
    int64_t rows = HX_MIN(a->rows, (int64_t)1 << 24), outputs;
    limits l = {};
    cudaError_t rc = limits_of(&l);

    if (rc == cudaSuccess)
        rc = fit(a, &rows, &outputs, w->bytes, l.share > 1);
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
    limits lim = {};
    cudaError_t rc = limits_of(&lim);

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
        rc = heads_rows(a, &l, r, HX_MIN(rows, a->rows - r),
                        most_rows(K2_HALF, lim.block), w, stream);
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
    limits lim = {};
    plan p = {};
    cudaError_t rc;

    while (window > MOST_ROWS && many_layout_of(m, window).bytes > w->bytes)
        window = hx_ceil_div(window / 2, MOST_ROWS) * MOST_ROWS;
    const many_layout l = many_layout_of(m, window);
    if (l.bytes > w->bytes || l.positions > INT32_MAX / 2)
        return cudaErrorInvalidValue;
    if ((rc = limits_of(&lim)) != cudaSuccess)
        return rc;
    p.id = m->id;
    p.picks = m->rows * m->active;
    p.n_expert = m->n_expert;
    p.window = (int)window;
    p.n_window = (int)hx_ceil_div(l.positions, window);
    p.block_rows = most_rows(most, lim.block);
    p.pick = (int32_t *)w->p;
    p.block = (row_block *)((char *)w->p + l.block);
    p.n_block = (int32_t *)((char *)w->p + l.n_block);
    rc = hx_cuda_launch(w->overlap, plan_experts, dim3(1), dim3(PLAN_THREADS),
                        2 * (size_t)m->n_expert * sizeof(int32_t), stream, p);
    for (int i = 0; i < p.n_window && rc == cudaSuccess; i++)
        rc = multiply_window(m, &p, i, &l, w, stream);
    return rc;
}
