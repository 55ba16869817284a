/* fmt_page.h - how items (latents, pooled index keys) lie in pages of sequence memory, one
 * text for C and CUDA, used by every backend. Never looks at what an item says.
 *
 * F32, BF16: [items, width]. FP8: e4m3 [items, width], then one byte s per item [items];
 * a value is e4m3 * 2^(s - 127). A power of two costs no precision, as e4m3 has the same
 * relative error over 2^15 (channels of a latent differ by less), and leaves values that
 * bf16 holds exactly, so that one scale for an item is enough and multiplies out of sums.
 */
#ifndef HX_FMT_PAGE_H
#define HX_FMT_PAGE_H

#include "dev/fmt_fp8.h"

enum {
    HX_PAGE_SCALE_MIN = 10, /* smallest product then: 2^-126, no subnormal */
};

HX_HD int64_t hx_page_value_bytes(hx_cache_fmt f)
{
    return f == HX_CACHE_F32 ? 4 : f == HX_CACHE_BF16 ? 2 : 1;
}

HX_HD int64_t hx_page_bytes(hx_cache_fmt f, int64_t items, int64_t width)
{
    return items * (width * hx_page_value_bytes(f) + (f == HX_CACHE_FP8 ? 1 : 0));
}

/* The scale byte of an item whose largest magnitude has these bits: the largest e4m3, 448,
 * is 1.75 * 2^8, and up to 1.8125 rounds to it. With an infinity or NaN among the values
 * it is 255, an infinity itself, so that the item cannot be read as numbers. */
HX_HD uint8_t hx_page_scale_of(uint32_t peak)
{
    const uint32_t e = (peak + 0x17FFFFu) >> 23;

    if (peak >= 0x7F800000u)
        return 255;
    return (uint8_t)(e < HX_PAGE_SCALE_MIN + 8 ? HX_PAGE_SCALE_MIN : e - 8);
}

HX_HD float hx_page_scale(uint8_t s)
{
    return hx_float_of((uint32_t)s << 23);
}

/* What makes a value of that item an e4m3. */
HX_HD float hx_page_unscale(uint8_t s)
{
    return s == 255 ? 0.0f : hx_float_of((uint32_t)(254 - s) << 23);
}

/* An item of an FP8 page. */
static inline void hx_page_put_fp8(uint8_t *item, uint8_t *scale, const float *v,
                                   int64_t width)
{
    uint32_t peak = 0;

    for (int64_t i = 0; i < width; i++) {
        const uint32_t u = hx_bits_of(v[i]) & 0x7FFFFFFFu;

        peak = u > peak ? u : peak;
    }
    *scale = hx_page_scale_of(peak);
    for (int64_t i = 0; i < width; i++)
        item[i] = hx_e4m3_from(v[i] * hx_page_unscale(*scale));
}

#ifndef __CUDACC__ /* kernels read the table on the device: cuda_pages.h */
typedef struct {
    void *v;
    uint8_t *scale; /* of FP8 */
} hx_page_item;

/* Item i of a slot's paged memory, with per items in a page. */
static inline hx_page_item hx_page_row(const hx_pages *g, int32_t slot, int64_t i,
                                       int64_t per)
{
    const int64_t id = g->table[slot * g->max_page + i / per], at = i % per;
    char *page = (char *)g->data.p + id * hx_page_bytes(g->fmt, per, g->width);

    return (hx_page_item) { page + at * g->width * hx_page_value_bytes(g->fmt),
                            (uint8_t *)page + per * g->width + at };
}
#endif

#endif
