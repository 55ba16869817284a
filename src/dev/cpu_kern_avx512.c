/* cpu_kern_avx512.c - the kernels of cpu_kern_body.h with AVX-512. Called through
 * hx_kern_avx512 once hx_cpu_has(HX_ISA_AVX512); empty on other machines. */
#include "dev/cpu_kern.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define W      16
#define TABLE  hx_kern_avx512
#define TARGET target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define KERNEL static __attribute__((TARGET))
#define INLINE static inline __attribute__((TARGET, always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));

#define mad(a, b, c)  ((vf)_mm512_fmadd_ps(a, b, c))
#define larger(a, b)  ((vf)_mm512_max_ps(a, b))
#define smaller(a, b) ((vf)_mm512_min_ps(a, b))
#define any(m)        (_mm512_movepi32_mask((__m512i)(m)) != 0)

#include "dev/cpu_kern_body.h"
#endif
