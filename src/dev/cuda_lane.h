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
    hx_lane_sent *sent; /* device memory */
    int64_t deadline_ns;
} hx_cuda_lane;

static inline hx_cuda_lane hx_cuda_lane_of(const hx_lane *l)
{
    return hx_cuda_lane {
        l->box, l->id, l->x, l->y, (hx_lane_sent *)l->sent.p, 1000 * l->deadline_us
    };
}

/* Waits until the lane has answered the job that is out; every thread of the block calls
 * it. After the deadline, or once a job of before was given up, goes on without. A look at
 * the answer takes more than a microsecond, so there is no need to sleep in between. */
HX_DEVICE void hx_cuda_lane_wait(const hx_cuda_lane &l)
{
    if (threadIdx.x == 0 && l.sent->out != 0 && l.sent->late == l.sent->known) {
        const bool one = blockIdx.x == 0 && blockIdx.y == 0;
        hx_lane_sent *sent = l.sent;
        uint64_t start, now, answer;
        bool early = false;

        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        for (;; early = true) {
            asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                         : "=l"(answer)
                         : "l"(&l.box->answer)
                         : "memory");
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
            if ((int32_t)((uint32_t)answer - sent->jobs) >= 0)
                break;
            if ((int64_t)(now - start) > l.deadline_ns) {
                const uint32_t late = sent->known + 1; /* for this thread block, maybe */

                *(volatile uint32_t *)&sent->late = late;
                *(volatile uint32_t *)&l.box->late = late;
                break;
            }
        }
        if (one) {
            sent->wait_ns += now - start;
            sent->busy_ns += now - sent->begin_ns;
            hx_plan_learn(&sent->seen,
                          early ? (float)(now - sent->ns) / 1e3f : (float)(answer >> 32),
                          (float)(start - sent->ns) / 1e3f);
            if (early) {
                sent->awaited++;
                sent->post_ns += hx_lane_post_ns(now - sent->ns, answer);
            }
            l.box->told = *sent; /* the step's end makes it visible */
        }
    }
    __syncthreads();
}

#endif
