/* cuda_plain.h - reading matrices of the plain formats in kernels: one weight, or eight
 * neighbours of a row. Included by cuda_ops.cu and cuda_product.cu. */
#ifndef HX_CUDA_PLAIN_H
#define HX_CUDA_PLAIN_H

#include <cuda_fp16.h>

#include "dev/cuda_dev.h"
#include "dev/fmt_fp8.h"

/* What a kernel needs of a hx_mat. */
typedef struct {
    const void *w, *bias; /* bias: f16 [n] or NULL */
    const float *scale;   /* FP8 */
    int64_t n, k;
    int32_t block_n, block_k;
    bool wide; /* rows are aligned for eight weights at once, and k % 8 == 0 */
} hx_plain_mat;

static inline size_t hx_plain_bytes(hx_fmt f)
{
    return f == HX_FMT_F32 ? 4 : f == HX_FMT_FP8 ? 1 : 2;
}

static inline hx_plain_mat hx_plain_of(const hx_mat *m)
{
    const size_t align = HX_MIN(8 * hx_plain_bytes(m->fmt), 16);

    return hx_plain_mat { m->w,
                          m->bias,
                          (const float *)m->scale,
                          m->n,
                          m->k,
                          m->block_n,
                          m->block_k,
                          (uintptr_t)m->w % align == 0 && m->k % 8 == 0 };
}

/* Does `what` with FMT set to a plain format. */
#define HX_PLAIN_SWITCH(fmt, what)                                                       \
    switch (fmt) {                                                                       \
    case HX_FMT_F32: {                                                                   \
        constexpr int FMT = HX_FMT_F32;                                                  \
        what;                                                                            \
        break;                                                                           \
    }                                                                                    \
    case HX_FMT_F16: {                                                                   \
        constexpr int FMT = HX_FMT_F16;                                                  \
        what;                                                                            \
        break;                                                                           \
    }                                                                                    \
    case HX_FMT_BF16: {                                                                  \
        constexpr int FMT = HX_FMT_BF16;                                                 \
        what;                                                                            \
        break;                                                                           \
    }                                                                                    \
    default: {                                                                           \
        constexpr int FMT = HX_FMT_FP8;                                                  \
        what;                                                                            \
        break;                                                                           \
    }                                                                                    \
    }

/* As hx_f16_to, in one instruction. */
HX_DEVICE float hx_half_to(uint16_t h)
{
    return __half2float(__ushort_as_half(h));
}

/* Starts to copy 16 bytes to shared memory, zeros when not inside. */
HX_DEVICE void hx_copy16(void *to, const void *from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(inside ? 16 : 0));
}

HX_DEVICE void hx_copy_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

HX_DEVICE float hx_plain_scale(const hx_plain_mat &m, int64_t n, int64_t k)
{
    const uint32_t per_row = ((uint32_t)m.k + m.block_k - 1) / (uint32_t)m.block_k;
    const uint32_t bn = (uint32_t)n / (uint32_t)m.block_n,
                   bk = (uint32_t)k / (uint32_t)m.block_k;

    return m.scale[(int64_t)bn * per_row + bk];
}

/* W[n, k]; FP8: value * scale, rounded once. */
template <int FMT>
HX_DEVICE float hx_plain_at(const hx_plain_mat &m, int64_t n, int64_t k)
{
    const int64_t i = n * m.k + k;

    if (FMT == HX_FMT_F32)
        return ((const float *)m.w)[i];
    if (FMT == HX_FMT_F16)
        return hx_half_to(((const uint16_t *)m.w)[i]);
    if (FMT == HX_FMT_BF16)
        return hx_bf16_to(((const uint16_t *)m.w)[i]);
    return hx_e4m3_to(((const uint8_t *)m.w)[i]) * hx_plain_scale(m, n, k);
}

/* Eight weights as stored, 16 or 32 bytes or 8. */
template <int FMT> struct hx_raw8 {
    uint4 v;
};
template <> struct hx_raw8<HX_FMT_F32> {
    uint4 v, more;
};
template <> struct hx_raw8<HX_FMT_FP8> {
    uint2 v;
};

/* W[n, k … k + 7] of a wide matrix, k a multiple of 8; 0 past the row's end. */
template <int FMT>
HX_DEVICE hx_raw8<FMT> hx_plain_raw8(const hx_plain_mat &m, int64_t n, int64_t k)
{
    constexpr int bytes = FMT == HX_FMT_F32 ? 4 : FMT == HX_FMT_FP8 ? 1 : 2;
    hx_raw8<FMT> r = {};

    if (k < m.k)
        r = *(const hx_raw8<FMT> *)((const char *)m.w + (n * m.k + k) * bytes);
    return r;
}

/* The scale that all weights of a block of 128 inputs from k on share, or NaN when they
 * have several. Only FP8 has one. */
template <int FMT>
HX_DEVICE float hx_plain_block_scale(const hx_plain_mat &m, int64_t n, int64_t k)
{
    if (FMT != HX_FMT_FP8 || m.block_k % 128 != 0)
        return NAN;
    return k < m.k ? hx_plain_scale(m, n, k) : 0.0f;
}

/* scale: of the block, as above. */
template <int FMT>
HX_DEVICE void hx_plain_widen8(float w[8], const hx_raw8<FMT> &r, const hx_plain_mat &m,
                               int64_t n, int64_t k, float scale)
{
    const uint32_t *u = (const uint32_t *)&r;

    if (FMT == HX_FMT_F32) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            w[j] = hx_float_of(u[j]);
    } else if (FMT == HX_FMT_FP8) {
        const bool block = m.block_k % 128 == 0, eight = m.block_k % 8 == 0;
        const float first = block ? scale : k < m.k ? hx_plain_scale(m, n, k) : 0.0f;

#pragma unroll
        for (int j = 0; j < 8; j++)
            w[j] = hx_e4m3_to((uint8_t)(u[j / 4] >> (8 * (j % 4)))) *
                   (eight || k >= m.k ? first : hx_plain_scale(m, n, k + j));
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint16_t h = (uint16_t)(u[j / 2] >> (16 * (j % 2)));

            w[j] = FMT == HX_FMT_F16 ? hx_half_to(h) : hx_bf16_to(h);
        }
    }
}

/* The same of any matrix. */
template <int FMT>
HX_DEVICE void hx_plain_load8(float w[8], const hx_plain_mat &m, int64_t n, int64_t k)
{
    if (m.wide) {
        hx_plain_widen8<FMT>(w, hx_plain_raw8<FMT>(m, n, k), m, n, k,
                             hx_plain_block_scale<FMT>(m, n, k));
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        w[j] = k + j < m.k ? hx_plain_at<FMT>(m, n, k + j) : 0.0f;
}

#endif
