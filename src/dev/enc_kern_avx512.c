/* enc_kern_avx512.c - the kernels of enc_kern_body.h with AVX-512. Called through
 * hx_enc_avx512 once hx_cpu_has(HX_ISA_AVX512); empty on other machines. */
#include "dev/enc_kern.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define W      16
#define TALL   8
#define TABLE  hx_enc_avx512
#define TARGET target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define KERNEL static __attribute__((TARGET))
#define INLINE static inline __attribute__((TARGET, always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));

INLINE vf spread(const float *p, int bits)
{
    const __m512i lane =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

    if (bits >= 4)
        return (vf)_mm512_set1_ps(*p);
    return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(lane, (unsigned)bits),
                                     _mm512_loadu_ps(p));
}

#define mad(a, b, c)  ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define smaller(a, b) ((vf)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define keep_less(c, best, which, t)                                                     \
    do {                                                                                 \
        const __mmask16 lt_ =                                                            \
            _mm512_cmp_ps_mask((__m512)(c), (__m512)(best), _CMP_LT_OQ);                 \
        best = smaller(c, best);                                                         \
        which = (vi)_mm512_mask_mov_epi32((__m512i)(which), lt_, (__m512i)(t));          \
    } while (0)

INLINE void put_picks(uint8_t *p, const vi which[1])
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)which[0]));
}

#include "dev/enc_kern_body.h"
#endif
