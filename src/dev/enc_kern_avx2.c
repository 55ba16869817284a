/* enc_kern_avx2.c - the kernels of enc_kern_body.h with AVX2 and FMA. Called through hx_enc_avx2
 * once hx_cpu_has(HX_ISA_AVX2); empty on other machines. */
#include "dev/enc_kern.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define W      8
#define TALL   4
#define TABLE  hx_enc_avx2
#define KERNEL static __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((target("avx2,fma"), always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));

INLINE vf spread(const float *p, int bits)
{
    if (bits >= 3)
        return (vf)_mm256_broadcast_ss(p);
    const __m256i at = bits == 1 ? _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)
                                 : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(p), at);
}

#define mad(a, b, c)  ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define smaller(a, b) ((vf)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define keep_less(c, best, which, t)                                                     \
    do {                                                                                 \
        const __m256 lt_ = _mm256_cmp_ps((__m256)(c), (__m256)(best), _CMP_LT_OQ);       \
        best = smaller(c, best);                                                         \
        which = (vi)_mm256_castps_si256(                                                 \
            _mm256_blendv_ps(_mm256_castsi256_ps((__m256i)(which)),                      \
                             _mm256_castsi256_ps((__m256i)(t)), lt_));                   \
    } while (0)

INLINE void put_picks(uint8_t *p, const vi which[2])
{
    const __m256i w = _mm256_packs_epi32((__m256i)which[0], (__m256i)which[1]);
    const __m256i b = _mm256_packus_epi16(w, w); /* 0-3, 8-11, …; 4-7, 12-15, … */
    const __m256i o =
        _mm256_permutevar8x32_epi32(b, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0));

    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(o));
}

#include "dev/enc_kern_body.h"
#endif
