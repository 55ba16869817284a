/* fmt_exl3.h - weight format EXL3: where a weight's 16-bit state lies in a tile, and what
 * it is worth. One text for C and CUDA, plain and slow: the meaning that every kernel
 * must reproduce. Source: exl3.md sections 3 to 5, after QTIP (arXiv:2406.11235).
 *
 * A matrix is What [k_pad, n_pad] in tiles of 16 inputs x 16 outputs, output tiles next
 * to each other, 16 k2 bytes each (k2: twice the bits per weight). A tile is a ring of
 * 128 k2 bits; the state of stream position p is the 16 bits that end at bit (p + 1) k2 /
 * 2, cyclic. */
#ifndef HX_FMT_EXL3_H
#define HX_FMT_EXL3_H

#include "dev/dev.h"
#include "dev/fmt_plain.h"

#define HX_EXL3_MUL1      0x83DCD12Du
#define HX_EXL3_MCG       0xCBAC1FEDu
#define HX_EXL3_3INST     89226354u
#define HX_EXL3_3INST_ADD 64248484u

HX_HD int hx_exl3_tile_bytes(int k2)
{
    return 16 * k2;
}

/* Tile of inputs 16 tk … and outputs 16 tn …. */
HX_HD const uint8_t *hx_exl3_tile_at(const hx_mat *m, int64_t tk, int64_t tn)
{
    return (const uint8_t *)m->w +
           (tk * (m->n_pad / 16) + tn) * hx_exl3_tile_bytes(m->k2);
}

/* Input and output inside the tile of stream position p. */
HX_HD int hx_exl3_row(int p)
{
    return 2 * (p >> 3 & 3) + (p & 1) + 8 * (p >> 1 & 1);
}

HX_HD int hx_exl3_col(int p)
{
    return (p >> 5) + 8 * (p >> 2 & 1);
}

/* Byte q of the bit stream, most significant bit first, is byte q ^ 3 of the tile: words
 * are little-endian. q may be -1 or -2. */
HX_HD uint32_t hx_exl3_state(const uint8_t *tile, int k2, int p)
{
    const int last = (((p + 1) * k2) >> 1) - 1, q = last >> 3, n = hx_exl3_tile_bytes(k2);
    uint32_t s = 0;

    for (int i = q - 2; i <= q; i++)
        s = s << 8 | tile[(i < 0 ? i + n : i) ^ 3];
    return s >> (7 - (last & 7)) & 0xFFFF;
}

/* 0 … 1005 */
HX_HD int hx_exl3_byte_sum(uint32_t state)
{
    const uint32_t x = state * HX_EXL3_MUL1;

    return (int)((x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24));
}

/* A half of magnitude 0.125 … 2 in units of 2^-13. */
HX_HD int hx_exl3_units(uint32_t half)
{
    const int mag = (int)(0x400 | (half & 0x3FF)) << ((half >> 10 & 31) - 12);

    return (half & 0x8000) != 0 ? -mag : mag;
}

/* The canonical integer weight (canon.h, step 3). */
HX_HD int hx_exl3_int(uint32_t state, hx_codebook codebook)
{
    if (codebook == HX_CB_MUL1)
        return hx_exl3_byte_sum(state) - 512;

    const uint32_t x = codebook == HX_CB_MCG ? state * HX_EXL3_MCG
                                             : state * HX_EXL3_3INST + HX_EXL3_3INST_ADD;
    const uint32_t y = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const int v = hx_exl3_units(y & 0xFFFF) + hx_exl3_units(y >> 16),
              mag = v < 0 ? -v : v;
    int shift = 0; /* the sum is an fp16: 11 bits, ties to even */

    while (mag >> shift >= 2048)
        shift++;
    const int odd = mag >> shift & 1, half = (1 << shift) >> 1;
    const int r = (mag + half - (shift > 0 && odd == 0)) >> shift << shift;
    return v < 0 ? -r : r;
}

/* The weight, exact: a value that fp16 holds. */
HX_HD float hx_exl3_value(uint32_t state, hx_codebook codebook)
{
    if (codebook != HX_CB_MUL1)
        return (float)hx_exl3_int(state, codebook) * HX_CANON_UNIT;
    /* exact in fp32: a multiple of 2^-18 below 4 */
    return hx_f16_to(hx_f16_from(
        (float)(1024 + hx_exl3_byte_sum(state)) * HX_CANON_K_INV - 10.3828125f));
}

HX_HD uint16_t hx_exl3_half(uint32_t state, hx_codebook codebook)
{
    return hx_f16_from(hx_exl3_value(state, codebook));
}

/* Tile (tk, tn) of What, out[input][output]. */
HX_HD void hx_exl3_tile(const hx_mat *m, int64_t tk, int64_t tn, float out[256])
{
    const uint8_t *tile = hx_exl3_tile_at(m, tk, tn);

    for (int p = 0; p < 256; p++)
        out[16 * hx_exl3_row(p) + hx_exl3_col(p)] =
            hx_exl3_value(hx_exl3_state(tile, m->k2, p), m->codebook);
}

#endif
