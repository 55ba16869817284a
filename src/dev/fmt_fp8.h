/* fmt_fp8.h - weight format FP8 (E4M3, no infinities; Micikevicius et al. 2022,
 * arXiv:2209.05433) with one f32 scale per block of block_n x block_k weights. One text
 * for C and CUDA, used by every backend. A weight is value * scale. */
#ifndef HX_FMT_FP8_H
#define HX_FMT_FP8_H

#include "dev/dev.h"
#include "dev/fmt_plain.h"

/* Moving the fields to those of f32 leaves a factor of 2^120, for subnormals too. */
HX_HD float hx_e4m3_to(uint8_t b)
{
    const uint32_t sign = (uint32_t)(b & 0x80) << 24, mag = b & 0x7Fu;

    if (mag == 0x7F)
        return hx_float_of(sign | 0x7FC00000u);
    return hx_float_of(sign | hx_bits_of(hx_float_of(mag << 20) * 0x1p120f));
}

/* Round to nearest, ties to even; what is too large, or no number, becomes NaN. */
HX_HD uint8_t hx_e4m3_from(float x)
{
    const uint32_t u = hx_bits_of(x), sign = u >> 24 & 0x80, mag = u & 0x7FFFFFFFu;
    uint32_t h;

    if (mag > 0x43E80000u) /* 464: half way past the largest, 448 */
        h = 0x7F;
    else if (mag < 0x3C800000u) /* below 2^-6: the sum rounds at 2^-9 */
        h = hx_bits_of(hx_float_of(mag) + 0x1p14f) - hx_bits_of(0x1p14f);
    else
        h = (mag - ((127 - 7) << 23) + 0x7FFFF + (mag >> 20 & 1)) >> 20;
    return (uint8_t)(sign | h);
}

HX_HD float hx_fp8_at(const void *p, int64_t i)
{
    return hx_e4m3_to(((const uint8_t *)p)[i]);
}

/* Scale of W[n, k]. */
HX_HD float hx_fp8_scale(const hx_mat *m, int64_t n, int64_t k)
{
    const int64_t per_row = (m->k + m->block_k - 1) / m->block_k;

    return hx_f32_at(m->scale, n / m->block_n * per_row + k / m->block_k);
}

#endif
