/* cpu_kern_scalar.c - the kernels of cpu_kern_body.h for any machine, with the 4-lane
 * vectors that x86-64 and aarch64 always have. Called through hx_kern_scalar. Without FMA
 * instructions mad() is a library call and slow: the price of the same bits. */
#include "dev/cpu_kern.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define W      4
#define TABLE  hx_kern_scalar
#define KERNEL static
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef vf v4;

INLINE vf mad(vf a, vf b, vf c)
{
#if defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int l = 0; l < W; l++)
        c[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return c;
#endif
}

INLINE vf larger(vf a, vf b)
{
    const vi m = a > b;

    return (vf)((m & (vi)a) | (~m & (vi)b));
}

INLINE vf smaller(vf a, vf b)
{
    const vi m = a < b;

    return (vf)((m & (vi)a) | (~m & (vi)b));
}

INLINE bool any(vi m)
{
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}

#include "dev/cpu_kern_body.h"
