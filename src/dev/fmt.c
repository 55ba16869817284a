/* fmt.c - the table of weight formats: names, sizes, and the exact expansion to f32.
 * Called by loaders, tools and tests; never inside a step. Decoding itself is in fmt_*.h.
 */
#include "dev/fmt_exl3.h"
#include "dev/fmt_fp8.h"

_Static_assert(HX_CANON_AMAX == 254 * 127 + 127, "two int8 planes");

enum { BLOCK = HX_CANON_BLOCK };

static const struct {
    const char *name;
    int bits;
} formats[HX_N_FMT] = {
#define X(id, text, bit_n) [HX_FMT_##id] = { text, bit_n },
    HX_FORMATS(X)
#undef X
};

const char *hx_fmt_name(hx_fmt f)
{
    return (unsigned)f < HX_N_FMT ? formats[f].name : "unknown";
}

static size_t ceil_div(int64_t a, int64_t b)
{
    return (size_t)((a + b - 1) / b);
}

size_t hx_mat_bytes(const hx_mat *m)
{
    size_t bytes = m->bias != NULL ? 2 * (size_t)m->n : 0;

    if (m->fmt == HX_FMT_EXL3)
        return bytes + (size_t)m->n_pad * (size_t)m->k_pad / 16 * (size_t)m->k2 +
               2 * (size_t)(m->n_pad + m->k_pad);
    bytes += (size_t)m->n * (size_t)m->k * (size_t)formats[m->fmt].bits / 8;
    if (m->fmt == HX_FMT_FP8)
        bytes += 4 * ceil_div(m->n, m->block_n) * ceil_div(m->k, m->block_k);
    return bytes;
}

/* Unscaled transform of 128 values that lie step apart. */
static void rotate(double *v, int step)
{
    for (int w = 1; w < BLOCK; w *= 2)
        for (int i = 0; i < BLOCK; i++)
            if ((i & w) == 0) {
                const double a = v[i * step], b = v[(i + w) * step];

                v[i * step] = a + b;
                v[(i + w) * step] = a - b;
            }
}

/* diag(suh) P What P diag(svh) of one 128 x 128 block. Exact in double up to the one
 * rounding: What has 16 bits, its rotation 14 more, the scales 22. */
static void expand_block(const hx_mat *m, int64_t k0, int64_t n0, double *w, float *out)
{
    float tile[256];

    for (int tk = 0; tk < BLOCK; tk += 16)
        for (int tn = 0; tn < BLOCK; tn += 16) {
            hx_exl3_tile(m, (k0 + tk) / 16, (n0 + tn) / 16, tile);
            for (int i = 0; i < 256; i++)
                w[(tk + i / 16) * BLOCK + tn + i % 16] = (double)tile[i];
        }
    for (int i = 0; i < BLOCK; i++)
        rotate(w + i * BLOCK, 1);
    for (int i = 0; i < BLOCK; i++)
        rotate(w + i, BLOCK);
    for (int64_t n = n0; n < HX_MIN(n0 + BLOCK, m->n); n++)
        for (int64_t k = k0; k < HX_MIN(k0 + BLOCK, m->k); k++)
            out[n * m->k + k] =
                (float)(w[(k - k0) * BLOCK + n - n0] / BLOCK *
                        ((double)hx_f16_at(m->suh, k) * (double)hx_f16_at(m->svh, n)));
}

int hx_mat_expand(const hx_mat *m, float *out, hx_err *err)
{
    double *w;

    if (m->fmt == HX_FMT_EXL3) {
        if ((w = hx_new(double, BLOCK *BLOCK)) == NULL)
            return hx_fail(err, HX_ENOMEM,
                           "matrix [%lld, %lld]: no memory for a block to expand it",
                           (long long)m->n, (long long)m->k);
        for (int64_t k = 0; k < m->k; k += BLOCK)
            for (int64_t n = 0; n < m->n; n += BLOCK)
                expand_block(m, k, n, w, out);
        hx_free(w);
        return 0;
    }
    for (int64_t n = 0; n < m->n; n++)
        for (int64_t k = 0; k < m->k; k++) {
            const int64_t i = n * m->k + k;

            switch (m->fmt) {
            case HX_FMT_F32:
                out[i] = hx_f32_at(m->w, i);
                break;
            case HX_FMT_F16:
                out[i] = hx_f16_at(m->w, i);
                break;
            case HX_FMT_BF16:
                out[i] = hx_bf16_at(m->w, i);
                break;
            case HX_FMT_FP8:
                out[i] = hx_fp8_at(m->w, i) * hx_fp8_scale(m, n, k);
                break;
            default:
                return hx_fail(err, HX_EUNSUP, "matrix of unknown format %d",
                               (int)m->fmt);
            }
        }
    return 0;
}
