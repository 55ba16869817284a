/* lane.h - the CPU lane: experts computed on the CPU beside a device. A device posts a job
 * (op plan) to memory that both see and takes the answer from there (op combine); nobody
 * else waits. Used by ops.c and the back ends; opened by model/store.c. */
#ifndef HX_LANE_H
#define HX_LANE_H

#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HX_PLAN_MAX_EXPERT = 4096, HX_PLAN_MAX_PICK = 1024 }; /* of one call */

/* The mailbox; a job is there when posted differs from done. Each word has one writer;
 * words of different writers lie in lines of their own. */
typedef struct {
    uint32_t posted;             /* device: jobs so far; written last */
    int32_t layer, rows, active; /* of the job */
    int32_t unused_a[12];
    uint32_t done;   /* lane: jobs answered */
    uint32_t failed; /* lane: jobs that could not be done */
    int32_t unused_b[14];
    uint32_t late; /* device: jobs it did not wait for any longer */
    uint32_t unused_c;
    uint64_t wait_ns; /* device: spent waiting for answers */
    int32_t unused_d[12];
} hx_lane_box;

struct hx_lane {
    /* memory that both see */
    hx_lane_box *box;
    int32_t *id; /* [max_pick] expert, or -1 */
    float *x;    /* [max_rows, dim] */
    float *y;    /* [max_pick, dim] */
    hx_buf sent; /* the device's own: u32 jobs posted, u32 1 while one is out */
    int64_t max_rows, max_pick, dim, deadline_us;
    struct hx_lane_host *host; /* lane.c */
};

/* dev: who posts. cpu: the CPU device that computes, taken over. expert: [n_layer] arrays
 * [n_expert], NULL for layers without. Errors: HX_ENOMEM. */
typedef struct {
    hx_dev *dev, *cpu;
    const hx_expert *const *expert;
    int64_t n_layer, n_expert, active, max_rows, dim;
    float limit;
    int64_t deadline_us; /* how long combine waits; 0: 2 s */
} hx_lane_opt;

int hx_lane_open(hx_lane **out, const hx_lane_opt *opt, hx_err *err);
void hx_lane_close(hx_lane *l); /* NULL is fine */
/* Between awake and rest the lane's thread polls; else it sleeps. Calls nest. */
void hx_lane_awake(hx_lane *l);
void hx_lane_rest(hx_lane *l);
/* HX_EDEVICE when a job came too late or failed since the last call, else 0. */
int hx_lane_late(hx_lane *l, hx_err *err);
int hx_lane_threads(const hx_lane *l);
/* Microseconds that the device has waited for the lane, and that the lane has computed. */
int64_t hx_lane_wait_us(const hx_lane *l);
int64_t hx_lane_busy_us(const hx_lane *l);
/* Microseconds that n experts of a layer take, all rows with each of them, rows <=
 * max_rows, rows * n <= max_pick. On the caller's thread, while no job is out. */
int hx_lane_time(hx_lane *l, int32_t layer, const int32_t *id, int64_t n, int64_t rows,
                 double *us, hx_err *err);

/* plan and the waiting of combine where the device is the host: ref.c, cpu.c. */
int hx_lane_plan(hx_dev *d, const hx_plan_args *a, hx_err *err);
void hx_lane_take(const hx_combine_args *a); /* the lane's rows into a->part */

#ifdef __cplusplus
}
#endif
#endif
