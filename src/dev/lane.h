/* lane.h - the CPU lane: experts computed on the CPU beside a device. A device posts a job
 * (op plan) to memory that both see and takes the answer from there (op combine); nobody
 * else waits. Used by ops.c and the back ends; opened by model/store.c. */
#ifndef HX_LANE_H
#define HX_LANE_H

#include "dev/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HX_PLAN_MAX_EXPERT = 4096, HX_PLAN_MAX_PICK = 1024 }; /* of one call */

/* What the device remembers. */
typedef struct {
    uint32_t jobs, out;   /* posted so far; 1 while one is out */
    uint32_t late, known; /* jobs that were given up, and of these the host knows: none is
                           * waited for while they differ */
    uint32_t awaited;     /* answers that were not there yet when they were needed */
    uint64_t ns;          /* when the last job was posted */
    uint64_t wait_ns;     /* spent waiting for answers */
    uint64_t post_ns; /* from posting to seeing an awaited answer, less the lane's time */
    uint64_t begin_ns, busy_ns; /* when the last plan began; from plans to answers */
    hx_plan_seen seen;
} hx_lane_sent;

/* The mailbox; a job is there when posted differs from the one done. Each word has one
 * writer; words of different writers lie in lines of their own. What the device writes it
 * never reads: that would take as long as a post. */
typedef struct {
    uint32_t posted;             /* device: jobs so far; written last */
    int32_t layer, rows, active; /* of the job */
    int32_t unused_a[12];
    uint64_t answer; /* lane: jobs answered, and in the upper half the microseconds from
                      * seeing the last one to its answer */
    uint32_t failed; /* lane: jobs that could not be done */
    int32_t unused_b[13];
    hx_lane_sent told; /* device: a copy of its own */
    uint32_t late;     /* device: as in there, by whoever has given up */
} hx_lane_box;

struct hx_lane {
    /* memory that both see */
    hx_lane_box *box;
    int32_t *id; /* [max_pick] expert, or -1 */
    float *x;    /* [max_rows, dim] */
    float *y;    /* [max_pick, dim] */
    hx_buf sent; /* the device's own: hx_lane_sent */
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
    int64_t deadline_us; /* how long combine waits; 0: as hx_lane_expect() says */
} hx_lane_opt;

/* What of the time from posting to seeing an answer was not the lane's own. */
HX_HD uint64_t hx_lane_post_ns(uint64_t ns, uint64_t answer)
{
    const uint64_t took = 1000 * (answer >> 32);

    return ns > took ? ns - took : 0;
}

int hx_lane_open(hx_lane **out, const hx_lane_opt *opt, hx_err *err);
/* What an expert takes, measured: combine waits 2 s, or where the CPUs are slow many times as
 * long as the largest job takes. Before steps are recorded. */
void hx_lane_expect(hx_lane *l, double expert_us);
void hx_lane_close(hx_lane *l); /* NULL is fine */
/* Between awake and rest the lane's thread polls; else it sleeps. Calls nest. */
void hx_lane_awake(hx_lane *l);
void hx_lane_rest(hx_lane *l);
/* HX_EDEVICE when a job came too late or failed since the last call, else 0. */
int hx_lane_late(hx_lane *l, hx_err *err);
/* Adds to *out what the lane knows: times, jobs. */
void hx_lane_report(const hx_lane *l, hx_experts *out);
/* Microseconds that n experts of a layer take, all rows with each of them, rows <=
 * max_rows, rows * n <= max_pick. On the caller's thread, while no job is out. */
int hx_lane_time(hx_lane *l, int32_t layer, const int32_t *id, int64_t n, int64_t rows,
                 double *us, hx_err *err);

/* plan, the waiting of combine and fetch where the device is the host: ref.c, cpu.c, ops.c. */
int hx_lane_plan(hx_dev *d, const hx_plan_args *a, hx_err *err);
void hx_lane_take(const hx_combine_args *a); /* the lane's rows into a->part */
void hx_lane_fetch(const hx_fetch_args *a);

#ifdef __cplusplus
}
#endif
#endif
