/* cuda_rows.cu - products of one matrix with many rows (cuda_gemm.h): what becomes an image,
 * and how much at a time. Called by cuda_product.cu. Never allocates, synchronises or reads
 * back. */
#include "dev/cuda_gemm.h"

enum {
    ONCE_ROWS = 2048,      /* so many: EXL3 becomes an image first, on Hopper */
    ONCE_OUTPUTS = 2048,   /* if work memory takes that much of it */
    ONCE_BYTES = 96 << 20, /* of it at a time */
};

/* Image, scales. */
static size_t rows_bytes(int64_t rows, int64_t k_pad)
{
    return image_bytes(rows, k_pad) + up_256((size_t)rows * sizeof(hx_row_scale));
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

static cudaError_t multiply_rows(const hx_cuda_many *a, int64_t r0, int64_t rows,
                                 int64_t outputs, const hx_cuda_work *w,
                                 cudaStream_t stream)
{
    const hx_mat *m = a->w;
    const int64_t k_pad = up_128(m->k);
    const bool exl3 = m->fmt == HX_FMT_EXL3, as_is = outputs == 0;
    hx_image_in in = {};
    hx_gemm p = {};

    if (as_is)
        outputs = up_128(m->n);
    in.x = a->x + r0 * a->ldx;
    in.ldx = a->ldx;
    in.k = m->k;
    in.suh = exl3 ? (const uint16_t *)m->suh : NULL;
    in.steps = (int)(k_pad / STEP);
    in.image = (uint8_t *)w->p;
    in.mul1 = exl3 && m->codebook == HX_CB_MUL1;
    in.scale = (hx_row_scale *)(in.image + image_bytes(rows, k_pad));
    cudaError_t rc = hx_cuda_image_rows(&in, rows, w, stream);
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
        p.wide = (uintptr_t)p.y % 16 == 0 && p.ldy % 4 == 0 && (uintptr_t)p.svh % 8 == 0;
        p.n = HX_MIN(outputs, m->n - n);
        p.groups = (int)(here / GROUP);
        if (!as_is)
            rc = hx_cuda_image_weights(m, n, here, image, out_scale, w, stream);
        if (rc == cudaSuccess)
            rc = hx_cuda_gemm(&p, w, m->codebook, 0, stream);
    }
    return rc;
}

cudaError_t hx_cuda_rows_many(const hx_cuda_many *a, const hx_cuda_work *w,
                              cudaStream_t stream)
{
    int64_t rows = HX_MIN(a->rows, (int64_t)1 << 24), outputs;
    cudaError_t rc = fit(a, &rows, &outputs, w->bytes, w->gpu.hopper);

    for (int64_t r = 0; r < a->rows && rc == cudaSuccess; r += rows)
        rc = multiply_rows(a, r, HX_MIN(rows, a->rows - r), outputs, w, stream);
    return rc;
}
