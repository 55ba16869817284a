/* fmt_plain.h - weight formats F32, F16 and BF16: conversions of single values, one text
 * for C and CUDA. Used by every backend. Rows are stored one after the other,
 * little-endian, at any alignment. No conversion may depend on _Float16, __fp16 or the
 * rounding mode. */
#ifndef HX_FMT_PLAIN_H
#define HX_FMT_PLAIN_H

#include "dev/canon.h"

HX_HD float hx_f16_to(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7FFFu;

    if (mag >= 0x7C00) /* infinity, NaN */
        return hx_float_of(sign | 0x7F800000u | (mag & 0x3FF) << 13);
    if (mag < 0x0400) /* 0 and subnormal: a multiple of 2^-24 */
        return hx_float_of(sign | hx_bits_of((float)mag * 0x1p-24f));
    return hx_float_of(sign | ((mag << 13) + ((127 - 15) << 23)));
}

/* Round to nearest, ties to even; too large becomes infinity, a NaN a quiet one. */
HX_HD uint16_t hx_f16_from(float x)
{
    const uint32_t u = hx_bits_of(x), sign = u >> 16 & 0x8000, mag = u & 0x7FFFFFFFu;
    uint32_t h;

    if (mag > 0x7F800000u)
        h = 0x7E00;
    else if (mag >= 0x477FF000u) /* 65520: half way past the largest */
        h = 0x7C00;
    else if (mag < 0x38800000u) /* below 2^-14: the sum rounds at 2^-24 */
        h = hx_bits_of(hx_float_of(mag) + 0.5f) - hx_bits_of(0.5f);
    else
        h = (mag - ((127 - 15) << 23) + 0xFFF + (mag >> 13 & 1)) >> 13;
    return (uint16_t)(sign | h);
}

HX_HD float hx_bf16_to(uint16_t b)
{
    return hx_float_of((uint32_t)b << 16);
}

/* Round to nearest, ties to even; a NaN stays one. */
HX_HD uint16_t hx_bf16_from(float x)
{
    const uint32_t u = hx_bits_of(x);

    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

/* Element i of an array at any address. */
HX_HD uint16_t hx_u16_at(const void *p, int64_t i)
{
    uint16_t v;

    memcpy(&v, (const uint8_t *)p + 2 * i, sizeof(v));
    return v;
}

HX_HD float hx_f32_at(const void *p, int64_t i)
{
    float v;

    memcpy(&v, (const uint8_t *)p + 4 * i, sizeof(v));
    return v;
}

HX_HD float hx_f16_at(const void *p, int64_t i)
{
    return hx_f16_to(hx_u16_at(p, i));
}

HX_HD float hx_bf16_at(const void *p, int64_t i)
{
    return hx_bf16_to(hx_u16_at(p, i));
}

#endif
