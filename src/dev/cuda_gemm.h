/* cuda_gemm.h - products with many rows on the GPU, what their files share; nobody else
 * includes it.
 *
 * cuda_rows.cu    one matrix
 * cuda_gemm.cu    the product
 * cuda_few.cu     the same of up to 64 rows, on Hopper
 * cuda_dense.cu   the same of weights that are an image, on Hopper
 * cuda_image.cu   rows, and weights, become halves
 * cuda_experts.cu routed experts
 * cuda_heads.cu   a matrix for each head
 *
 * Inputs and weights are halves, sums f32 on the tensor cores. First the inputs become
 * halves, rotated if the format wants that, in the very layout that shared memory will
 * have (the image). Plain formats become an image too, and so does EXL3 where so many rows
 * follow that to decode once is cheaper. The sums are rotated and scaled on their way out.
 *
 * A row's result depends on the row and the matrix alone: every output is one chain of
 * 16-input products in ascending order, however many rows a thread block takes together,
 * whichever block that is and whichever rows lie beside it. */
#ifndef HX_CUDA_GEMM_H
#define HX_CUDA_GEMM_H

#include "dev/cuda.h"
#include "dev/cuda_plain.h"
#include "dev/cuda_tensor.h"

enum {
    GROUP = 128,                  /* outputs of a rotation */
    WARPS = GROUP / 16,           /* that multiply a group */
    STEP = 64,                    /* inputs of a stage of the pipeline */
    IMAGE_ROWS = 64,              /* pieces start and are copied in multiples of these */
    PART = IMAGE_ROWS * STEP * 2, /* bytes of their inputs of a step */
    MOST_ROWS = 256,              /* of a thread block */
    ENDING_BYTES = 2 * GROUP * 4, /* factor and bias of each output */
    K2_HALF = 32,                 /* "twice the bits" of an image */
    ROW_THREADS = 256,
};

/* ---- images -------------------------------------------------------------------- */

/* Place of input i of row r of an image, in which BLOCK rows' parts of a step follow each
 * other: 256 of the inputs, a group of the weights. */
template <int BLOCK>
HX_DEVICE uint8_t *image_at(uint8_t *image, int steps, uint32_t r, uint32_t i)
{
    return image + (int64_t)(r / BLOCK * steps + i / STEP) * (BLOCK * 128) +
           (r % BLOCK * 128 + 16 * ((i / 8 ^ r) & 7) + i % 8 * 2);
}

static inline size_t up_256(size_t n)
{
    return (n + 255) / 256 * 256;
}

static inline int64_t up_128(int64_t n)
{
    return (n + 127) / 128 * 128;
}

static inline size_t image_bytes(int64_t positions, int64_t k_pad)
{
    return (size_t)(hx_ceil_div(positions, MOST_ROWS) * MOST_ROWS * k_pad) * 2;
}

/* Of a row of the image: what its sums are multiplied with, and what is added before to
 * the first of each rotation. */
struct hx_row_scale {
    float by, first;
};

/* Position p of the image: input row, and matrix of the scales. */
struct hx_image_in {
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
    bool mul1;           /* the weights are pair_mul1's */
    hx_row_scale *scale; /* [positions] */
};

HX_DEVICE const hx_cuda_mat *matrix_of(const hx_cuda_expert *e, int which)
{
    return which == 0 ? &e->gate : which == 1 ? &e->up : &e->down;
}

/* The power of two that brings a magnitude below 2^15; 1 where there is none. */
HX_DEVICE float up_scale(float most)
{
    const int e = (int)(hx_bits_of(most) >> 23 & 255) - 127;

    if (most == 0 || e > 127)
        return 1.0f;
    return hx_float_of((uint32_t)(127 + min(max(14 - e, -100), 100)) << 23);
}

/* positions rows of the image, from act(x, up) or x. */
cudaError_t hx_cuda_image_rows(hx_image_in *p, int64_t positions, const hx_cuda_work *w,
                               cudaStream_t stream);

/* Outputs first … become an image; out_scale of plain formats alone. */
cudaError_t hx_cuda_image_weights(const hx_mat *m, int64_t first, int64_t outputs,
                                  uint8_t *image, float *out_scale, const hx_cuda_work *w,
                                  cudaStream_t stream);

/* ---- products ------------------------------------------------------------------ */

/* Up to 256 neighbouring positions of one expert or head, from a multiple of 64 on. */
struct hx_row_block {
    int32_t expert, pos, rows;
};

struct hx_gemm {
    const uint8_t *w;
    const uint16_t *svh, *bias;   /* svh NULL: no rotation */
    const float *out_scale;       /* [outputs] or NULL */
    const hx_cuda_expert *expert; /* or NULL */
    int which;
    const hx_row_block *block; /* NULL: one matrix, blocks of N rows */
    const int32_t *n_block;
    int64_t w_head; /* of blocks without experts: bytes of a head's weights */
    const uint8_t *image;
    const hx_row_scale *scale;
    float *y;
    const int32_t *row; /* [positions] row of y; NULL: the position */
    int64_t ldy, n;
    int rows, groups, steps, band, k2, stages; /* band: groups side by side in time */
    int share;      /* thread blocks of a cluster: neighbouring groups, the same rows */
    int block_rows; /* of a thread block; 0: choose */
    bool wide;      /* y takes 16 bytes at a time */
    int *ticket;    /* [groups], zero between launches; cuda_few.cu's */
    hx_cuda_codebook cb;
};

/* The most rows of a thread block for which two stages fit. */
int hx_cuda_gemm_rows(int k2, const hx_cuda_gpu *g);

/* blocks: the most there can be, with a plan. */
cudaError_t hx_cuda_gemm(hx_gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                         int64_t blocks, cudaStream_t stream);

/* The same of one EXL3 matrix and up to 64 rows, on Hopper; whether it takes such a call. */
bool hx_cuda_few_takes(const hx_gemm *p, const hx_cuda_work *w);
cudaError_t hx_cuda_few(hx_gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                        cudaStream_t stream);

/* The same of one matrix whose weights are an image, on Hopper. */
cudaError_t hx_cuda_dense(const hx_gemm *p, const hx_cuda_work *w, cudaStream_t stream);

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

/* Two weights of MUL1 as integers, byte sum - 510: 1024 + the sum is a half as it stands.
 * The weight is HX_CANON_K_INV times integer + MUL1_REST, and rows_to_image sees to the
 * rest. Small integers have few bits set, so the tensor cores take less power. */
#define MUL1_REST (HX_CANON_C2 / HX_CANON_K_INV - 2.0f)

HX_DEVICE uint32_t pair_mul1(uint32_t s0, uint32_t s1)
{
    const uint32_t a = __dp4a(s0 * HX_EXL3_MUL1, 0x01010101u, 0x6400u);
    const uint32_t b = __dp4a(s1 * HX_EXL3_MUL1, 0x01010101u, 0x6400u);
    uint32_t v;

    asm("add.rn.f16x2 %0, %1, %2;"
        : "=r"(v)
        : "r"(__byte_perm(a, b, 0x5410)), "r"(0xE5FEE5FEu));
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
    static constexpr int most = K2 != 0 ? K2 : PER == 8 ? 5 : 16; /* twice the bits */

    HX_DEVICE int rate(int k2)
    {
        return K2 != 0 ? K2 : k2;
    }
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

/* ---- sums leave ------------------------------------------------------------------ */

/* Sum and difference, two of a rotation's values. */
HX_DEVICE void fold(float &a, float &b)
{
    const float sum = a + b;

    b = a - b;
    a = sum;
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
HX_DEVICE void leave(const hx_gemm &p, float v[8][4], const float *factor,
                     const float *bias, hx_row_scale scale, int64_t row, int64_t col)
{
    float *y = p.y + row * p.ldy + col;

    if (col % GROUP == 0)
        v[0][0] += scale.first;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 f = *(const float4 *)(factor + 16 * i);

        v[i][0] = v[i][0] * (f.x * scale.by);
        v[i][1] = v[i][1] * (f.y * scale.by);
        v[i][2] = v[i][2] * (f.z * scale.by);
        v[i][3] = v[i][3] * (f.w * scale.by);
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

#endif
