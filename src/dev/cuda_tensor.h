/* cuda_tensor.h - tensor cores, barriers and asynchronous copies for kernels that multiply
 * many rows: wgmma and bulk copies where the code is compiled for Hopper (sm_90a),
 * mma.sync and cp.async elsewhere. Included by cuda_gemm.h, cuda_matmul.h, cuda_mla.cu, and
 * cuda.cu, which tells hosts what was compiled. Nothing here knows a weight format. */
#ifndef HX_CUDA_TENSOR_H
#define HX_CUDA_TENSOR_H

#include <cuda_fp16.h>

#include "dev/cuda_dev.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HX_WGMMA 1 /* warps multiply in groups of four */
#else
#define HX_WGMMA 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HX_BULK 1 /* one thread copies, and the bytes are counted */
#else
#define HX_BULK 0
#endif

HX_DEVICE uint32_t hx_shared_of(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers in shared memory --------------------------------------------- */

HX_DEVICE void hx_bar_init(uint32_t bar, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

/* After the last init, before a thread syncs with the others. */
HX_DEVICE void hx_bar_init_done(void)
{
#if HX_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

HX_DEVICE void hx_bar_arrive(uint32_t bar)
{
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(bar)
                 : "memory");
}

/* The same of the barrier at this place in another thread block of the cluster. */
HX_DEVICE void hx_bar_arrive_at(uint32_t bar, int rank)
{
#if HX_WGMMA
    asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [a];}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
#else
    hx_bar_arrive(bar);
    (void)rank;
#endif
}

/* Two floats to this place in another thread block of the cluster. */
HX_DEVICE void hx_put_at(uint32_t to, int rank, float a, float b)
{
#if HX_WGMMA
    asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1;\n"
                 "st.shared::cluster.v2.f32 [a], {%2, %3};}" ::"r"(to),
                 "r"(rank), "f"(a), "f"(b)
                 : "memory");
#endif
}

/* All threads of a cluster. */
HX_DEVICE void hx_cluster_meet(void)
{
#if HX_WGMMA
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
#endif
}

/* Until the phase of that parity is over. */
HX_DEVICE void hx_bar_wait(uint32_t bar, uint32_t parity)
{
#if HX_BULK
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#endif
}

#if HX_BULK
HX_DEVICE void hx_bar_expect(uint32_t bar, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
}

/* n bytes, a multiple of 16, both ends aligned to 16; the barrier counts them. */
HX_DEVICE void hx_bulk_copy(uint32_t to, const void *from, int n, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(n), "r"(bar)
                 : "memory");
}

/* The same to that place of every thread block of a cluster of n, and its barrier. */
HX_DEVICE void hx_bulk_copy_all(uint32_t to, const void *from, int bytes, uint32_t bar,
                                int n)
{
#if HX_WGMMA
    if (n > 1) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                     "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar),
                     "h"((uint16_t)((1 << n) - 1))
                     : "memory");
        return;
    }
#endif
    hx_bulk_copy(to, from, bytes, bar);
}
#else
/* This thread's cp.async so far count as one arrival when they are there. */
HX_DEVICE void hx_bar_arrive_copies(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
#endif

/* This thread's cp.async since the last one are a group; until all but N groups are there. */
HX_DEVICE void hx_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> HX_DEVICE void hx_copy_wait_older(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Threads of a part of the block, n of them, meet. */
HX_DEVICE void hx_bar_sync(int id, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}

/* Each of the four warps of a group has n registers a thread from here on. */
template <int N> HX_DEVICE void hx_registers_more(void)
{
#if HX_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

template <int N> HX_DEVICE void hx_registers_fewer(void)
{
#if HX_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* ---- tensor cores ------------------------------------------------------------ */

/* The value stays where it is in the program's order, between asm volatile. */
#define HX_PIN(r, constraint) asm volatile("" : "+" constraint(r)::"memory")

#if HX_WGMMA

/* What a matrix of 128-byte rows in shared memory, at a multiple of 1,024 bytes, is to
 * wgmma: 16-byte piece c of row r lies at piece c ^ (r & 7), eight rows are 1,024 bytes.
 * Adding 2 moves on 16 halves. */
HX_DEVICE uint64_t hx_wgmma_matrix(uint32_t at)
{
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

HX_DEVICE void hx_wgmma_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

HX_DEVICE void hx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

HX_DEVICE void hx_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/* Until no more than the last group is on its way. */
HX_DEVICE void hx_wgmma_wait_older(void)
{
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

/* The same rows as the 16 inputs of a product, their 64 halves being outputs: more outputs
 * lie block bytes on. Adding 128 moves on 16 rows. */
HX_DEVICE uint64_t hx_wgmma_turned(uint32_t at, uint32_t block)
{
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(block >> 4) << 16 |
           (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

/* What this thread wrote to shared memory is there for wgmma once threads have met. */
HX_DEVICE void hx_wgmma_wrote(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* clang-format off */
#define HX_D16 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HX_D32 \
    HX_D16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
    "%30, %31"
#define HX_D64 \
    HX_D32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
    "%60, %61, %62, %63"
#define HX_D128 \
    HX_D64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, " \
    "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, " \
    "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, " \
    "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, " \
    "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"
#define HX_F4(i)  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define HX_F16(i) HX_F4(i), HX_F4((i) + 4), HX_F4((i) + 8), HX_F4((i) + 12)
#define HX_F32(i) HX_F16(i), HX_F16((i) + 16)
#define HX_F64(i) HX_F32(i), HX_F32((i) + 32)
#define HX_F128(i) HX_F64(i), HX_F64((i) + 64)
#define HX_WGMMA_F16(n, D, F, a0, a1, a2, a3, m, on)                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " on ", 0;\n"                             \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" D "}, "         \
                 "{" a0 ", " a1 ", " a2 ", " a3 "}, " m ", p, 1, 1, 0;}"                   \
                 : F                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define HX_WGMMA_SHARED(n, D, F, m, w, on)                                                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " on ", 0;\n"                             \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" D "}, "         \
                 m ", " w ", p, 1, 1, 0, 0;}"                                              \
                 : F                                                                       \
                 : "l"(a), "l"(b), "r"(add))
/* clang-format on */

/* d [64, N] (+)= a [64, 16] b [N, 16]^T by four warps, f16 in, f32 sums; a lies as in
 * mma.m16n8k16, 16 rows a warp; of d a lane has rows g and g + 8 and columns 8 i + 2 q and
 * the next at 4 i: (g, 2 q), (g, 2 q + 1), (g + 8, 2 q), (g + 8, 2 q + 1). add 0: d = a b. */
template <int N>
HX_DEVICE void hx_wgmma(float *d, const uint32_t a[4], uint64_t b, int add)
{
    if constexpr (N == 64)
        HX_WGMMA_F16("64", HX_D32, HX_F32(0), "%32", "%33", "%34", "%35", "%36", "%37");
    else if constexpr (N == 128)
        HX_WGMMA_F16("128", HX_D64, HX_F64(0), "%64", "%65", "%66", "%67", "%68", "%69");
    else
        HX_WGMMA_F16("256", HX_D128, HX_F128(0), "%128", "%129", "%130", "%131", "%132",
                     "%133");
}

/* The same, both in shared memory (hx_wgmma_matrix). */
template <int N> HX_DEVICE void hx_wgmma_shared(float *d, uint64_t a, uint64_t b, int add)
{
    if constexpr (N == 32)
        HX_WGMMA_SHARED("32", HX_D16, HX_F16(0), "%16", "%17", "%18");
    else if constexpr (N == 64)
        HX_WGMMA_SHARED("64", HX_D32, HX_F32(0), "%32", "%33", "%34");
    else if constexpr (N == 128)
        HX_WGMMA_SHARED("128", HX_D64, HX_F64(0), "%64", "%65", "%66");
    else
        HX_WGMMA_SHARED("256", HX_D128, HX_F128(0), "%128", "%129", "%130");
}

/* d [64, 256] += a [64, 16] b [16, 256], b from hx_wgmma_turned. */
HX_DEVICE void hx_wgmma_turned256(float *d, const uint32_t a[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" HX_D128 "}, "
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : HX_F128(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#else

/* d [16, 8] += a [16, 16] b [8, 16]^T */
HX_DEVICE void hx_mma(float *d, const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four 8 x 8 matrices of halves; lane l gives row l % 8 of matrix l / 8. */
HX_DEVICE void hx_ldmatrix(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

#endif
#endif
