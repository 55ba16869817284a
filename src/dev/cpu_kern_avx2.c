/* cpu_kern_avx2.c - the kernels of cpu_kern_body.h with AVX2 and FMA. Called through
 * hx_kern_avx2 once hx_cpu_has(HX_ISA_AVX2); empty on other machines. */
#include "dev/cpu_kern.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define W      8
#define TABLE  hx_kern_avx2
#define TARGET target("avx2,fma,f16c")
#define KERNEL static __attribute__((TARGET))
#define INLINE static inline __attribute__((TARGET, always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float v4 __attribute__((vector_size(16)));

#define mad(a, b, c)  ((vf)_mm256_fmadd_ps(a, b, c))
#define larger(a, b)  ((vf)_mm256_max_ps(a, b))
#define smaller(a, b) ((vf)_mm256_min_ps(a, b))
#define any(m)        (_mm256_movemask_ps((__m256)(m)) != 0)

#include "dev/cpu_kern_body.h"
#endif
