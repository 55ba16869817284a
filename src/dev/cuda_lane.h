/* cuda_lane.h - the CPU lane as kernels see it: the mailbox's addresses, and the wait for
 * an answer. Included by cuda_lane.cu (plan) and cuda_ops.cu (combine). */
#ifndef HX_CUDA_LANE_H
#define HX_CUDA_LANE_H

#include "dev/cuda_dev.h"
#include "dev/lane.h"

typedef struct {
    hx_lane_box *box; /* host memory */
    int32_t *id;
    float *x;
    const float *y;
    uint32_t *sent; /* device memory */
    int64_t deadline_ns;
} hx_cuda_lane;

static inline hx_cuda_lane hx_cuda_lane_of(const hx_lane *l)
{
    return hx_cuda_lane {
        l->box, l->id, l->x, l->y, (uint32_t *)l->sent.p, 1000 * l->deadline_us
    };
}

/* Waits until the lane has answered the job that is out; every thread of the block calls
 * it. After the deadline, or once a job of before was given up, goes on without. */
HX_DEVICE void hx_cuda_lane_wait(const hx_cuda_lane &l)
{
    if (threadIdx.x == 0 && l.sent[1] != 0) {
        const uint32_t job = l.sent[0];
        uint64_t start, now;
        uint32_t done, late;

        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        for (;;) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(done)
                         : "l"(&l.box->done)
                         : "memory");
            if ((int32_t)(done - job) >= 0)
                break;
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                         : "=r"(late)
                         : "l"(&l.box->late)
                         : "memory");
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
            if (late != 0 || (int64_t)(now - start) > l.deadline_ns) {
                if (blockIdx.x == 0 && blockIdx.y == 0)
                    asm volatile(
                        "st.relaxed.sys.global.u32 [%0], %1;" ::"l"(&l.box->late),
                        "r"(late + 1)
                        : "memory");
                break;
            }
            __nanosleep(200);
        }
        if (blockIdx.x == 0 && blockIdx.y == 0) {
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
            l.box->wait_ns += now - start;
        }
    }
    __syncthreads();
}

#endif
