/* enc_kern.h - the two inner loops of the EXL3 encoder: a step of the Viterbi search, and
 * products of f32 matrices. Called by exl3_encode.c and dense.c only.
 *
 * Each exists once per instruction set: enc_kern_*.c compile the one text of
 * enc_kern_body.h. All give the same bits: multiplications are fused with what they are
 * added to, elements are computed alone, and sums run in order. */
#ifndef HX_ENC_KERN_H
#define HX_ENC_KERN_H

#include "dev/cpu.h"

/* More than any path costs; the start of an overlap that no path may begin in. */
#define HX_ENC_FAR 1e30f
#define HX_ENC_GROUP                                                                     \
    16 /* overlaps that are carried together; cost arrays end with as
                         * many floats to spare */

/* One position of two tiles. An overlap o, the low 16 - out bits of a state, can come from
 * 2^out states t << (16 - out) | o, each of which follows the overlap state >> in:
 *   next[o] = min over t of prev[state >> in] + (value[state] - target)^2
 * and pick[o] is that t, the smallest of equal ones. */
typedef struct {
    const float *value; /* [65536] */
    const float *prev[2];
    float *next[2];
    uint8_t *pick[2]; /* NULL: not wanted */
    float target[2];
    int in, out; /* bits of this position and of the next: 1..8 */
} hx_enc_step;

typedef struct {
    void (*step)(const hx_enc_step *s);
    /* c[i, j] += sign sum over l of a[i * ars + l * acs] b[l * ldb + j], m a multiple of 8
     * and n of 16 */
    void (*product)(float *c, int64_t ldc, const float *a, int64_t ars, int64_t acs,
                    const float *b, int64_t ldb, int64_t m, int64_t n, int64_t k,
                    float sign);
} hx_enc_kern;

extern const hx_enc_kern hx_enc_scalar, hx_enc_avx2, hx_enc_avx512;
const hx_enc_kern *hx_enc_best(void); /* for this machine (dense.c) */

#endif
