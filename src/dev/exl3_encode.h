/* exl3_encode.h - making EXL3 matrices: the search for a tile's states and, around it,
 * scales, rotation, error feedback and refit. Source: exl3.md section 10.
 *
 * Called by quantize and tests; nothing that runs models needs it. The result depends on
 * the arguments alone, not on the machine or the number of threads. */
#ifndef HX_EXL3_ENCODE_H
#define HX_EXL3_ENCODE_H

#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- tiles ------------------------------------------------------------ */

/* Searches closed walks of one codebook and rate. n_worker searches may run at once. */
typedef struct hx_trellis hx_trellis;

/* k2: twice the bits per weight, 2, 4, …, 16; with MUL1 also 3, 5, 7.
 * Errors: HX_EARG, HX_ENOMEM. */
int hx_trellis_open(hx_trellis **out, hx_codebook codebook, int k2, int n_worker,
                    hx_err *err);
void hx_trellis_close(hx_trellis *t);
bool hx_trellis_takes(hx_codebook codebook, int k2);

/* States of two tiles, in stream order, whose values come near to target: two passes of
 * Viterbi, the first to learn where the ring closes. value [2][256]: what the states are
 * worth. */
void hx_trellis_search(hx_trellis *t, int worker, const float target[2][256],
                       uint16_t state[2][256], float value[2][256]);
/* The tile of a closed walk: hx_exl3_tile_bytes(k2) bytes. */
void hx_trellis_pack(int k2, const uint16_t state[256], uint8_t *tile);

/* ---- matrices --------------------------------------------------------- */

#define HX_EXL3_DAMP 0.025f /* of the mean diagonal, added to every Hessian */

typedef struct {
    const float *w; /* [n, k], finite */
    const float *h; /* mean of x x^T over inputs x, [k_pad, k_pad]; padded inputs 0; NULL:
                     * the identity */
    int64_t n, k;
    hx_codebook codebook;
    int32_t k2;
    uint64_t seed;                   /* of the signs */
    const float *sign_in, *sign_out; /* [k_pad], [n_pad] instead; NULL: from the seed */
    hx_dev
        *dev; /* who works: a GPU; NULL, or a device without such operations: the pool */
} hx_exl3_job;

/* Sides of an EXL3 matrix are multiples of this. */
#define HX_EXL3_PAD(n) (((n) + 127) / 128 * 128)

typedef struct {
    uint16_t *trellis;   /* [k_pad/16, n_pad/16, 8 k2], by the caller, as suh and svh */
    uint16_t *suh, *svh; /* f16 [k_pad], [n_pad] */
    double proxy; /* tr(E H E^T) / tr(W H W^T) with the damped H, of what is stored */
    double mse;   /* |E|^2 / |W|^2 */
    float gain;   /* of the rotated weights before the search */
} hx_exl3_out;

/* All threads of the pool (NULL: this one), or the GPU, work on the one matrix, with the
 * same bits. Memory, there: about 4 (2 k^2 + 4 k n) bytes. Errors: HX_EARG, HX_ENOMEM,
 * HX_EDEVICE. */
int hx_exl3_encode(const hx_exl3_job *job, hx_pool *pool, hx_exl3_out *out, hx_err *err);

#ifdef __cplusplus
}
#endif
#endif
