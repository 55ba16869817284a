/* enc_kern_scalar.c - the kernels of enc_kern_body.h for any machine, with the 4-lane
 * vectors that x86-64 and aarch64 always have. Called through hx_enc_scalar. Without FMA
 * instructions mad() is a library call and slow: the price of the same bits. */
#include "dev/enc_kern.h"

#define W      4
#define TALL   4
#define TABLE  hx_enc_scalar
#define KERNEL static
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));

INLINE vf spread(const float *p, int bits)
{
    return (vf) { p[0], p[1 >> bits], p[2 >> bits], p[3 >> bits] };
}

INLINE vf mad(vf a, vf b, vf c)
{
    for (int l = 0; l < W; l++)
        c[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return c;
}

INLINE vf choose(vi m, vf a, vf b)
{
    return (vf)((m & (vi)a) | (~m & (vi)b));
}

#define smaller(a, b) choose((a) < (b), a, b)
#define keep_less(c, best, which, t)                                                     \
    do {                                                                                 \
        const vi lt_ = (c) < (best);                                                     \
        best = choose(lt_, c, best);                                                     \
        which = (lt_ & (t)) | (~lt_ & which);                                            \
    } while (0)

INLINE void put_picks(uint8_t *p, const vi which[4])
{
    for (int i = 0; i < HX_ENC_GROUP; i++)
        p[i] = (uint8_t)which[i / W][i % W];
}

#include "dev/enc_kern_body.h"
