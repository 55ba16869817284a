/* plan.h - how the missing experts of a layer are shared out between a device and the CPU
 * lane: one text for host and device, a pure function of counts and measured costs. */
#ifndef HX_PLAN_H
#define HX_PLAN_H

#include "dev/canon.h"
#include "dev/dev.h"

/* What the sides took, beside what they were expected to: memory, clocks and CPUs are
 * shared while both are at work, as they are not when costs are measured. */
typedef struct {
    float lane_more;              /* the lane takes (1 + this) times as long */
    float device_us;              /* the device takes so much longer */
    float lane_want, device_want; /* of the job that is out, uncorrected, in us; 0: these
                                   * are not to be corrected */
} hx_plan_seen;

/* Within lane_us of its post a job was answered, within device_us the device was done. */
HX_HD void hx_plan_learn(hx_plan_seen *s, float lane_us, float device_us)
{
    const float weight = 0.05f;

    if (!(s->lane_want > 0))
        return;
    s->lane_more += weight * (lane_us / s->lane_want - 1 - s->lane_more);
    s->device_us += weight * (device_us - s->device_want - s->device_us);
    s->lane_more = s->lane_more < 4 ? s->lane_more : 4;
    s->device_us = s->device_us < 500 ? s->device_us : 500;
    s->device_us = s->device_us > 0 ? s->device_us : 0;
}

/* How many of n missing experts, whose row counts rise, the lane takes from the front; the
 * device reads the others from host memory beside n_here that it holds, coming of which
 * (in experts, a part of one counts as such) are still on their way. Both sides work at
 * once: the longer one counts. Equal times: the fewer for the lane. seen corrects, and gets
 * what is to be expected; or NULL. */
HX_HD int hx_plan_lane(const hx_rates *r, const int32_t *rows, int n, int n_here,
                       float coming, hx_plan_seen *seen)
{
    const float more = seen != NULL ? 1 + seen->lane_more : 1,
                later = seen != NULL ? seen->device_us : 0,
                here = (float)n_here * r->here_us + coming * r->link_us;
    float lane = r->post_us, best = later + here + (float)n * r->link_us;
    int take = 0;

    if (!(r->lane_us > 0))
        return 0;
    for (int k = 1; k <= n; k++) {
        const float device = here + (float)(n - k) * r->link_us;

        lane += r->lane_us + (float)(rows[k - 1] - 1) * r->row_us;
        const float both = later + device > more * lane ? later + device : more * lane;
        if (!(both < best))
            continue;
        best = both;
        take = k;
        if (seen != NULL) {
            seen->lane_want = lane;
            seen->device_want = device;
        }
    }
    if (take == 0 && seen != NULL) /* was slow for a while: gets another chance */
        seen->lane_more -= 0.01f * seen->lane_more;
    return take;
}

/* The distinct ones of n predicted picks, the likeliest first and -1 where there is nothing
 * to fetch, as far as there are slots. */
HX_HD int hx_plan_fetch(const int32_t *pick, int n, int32_t *id)
{
    int have = 0;

    for (int i = 0; i < n && have < HX_AHEAD_SLOTS; i++) {
        bool again = pick[i] < 0;

        for (int o = 0; o < have && !again; o++)
            again = id[o] == pick[i];
        if (!again)
            id[have++] = pick[i];
    }
    return have;
}

/* Rank by rank, then row by row: predicted pick i of all rows. */
HX_HD int32_t hx_plan_predicted(const int32_t *id, const int32_t *resident,
                                const hx_lease *at, int rows, int active, int i)
{
    const int32_t e = id[i % rows * active + i / rows];

    /* copied 16 bytes at a time */
    return resident[e] < 0 && (uintptr_t)at[e].gate.trellis % 16 == 0 ? e : -1;
}

/* Where an expert's matrices lie when its record has gone from where it is to base. */
HX_HD hx_lease hx_plan_moved(const hx_lease *at, const void *base)
{
    const char *from = (const char *)at->gate.trellis, *to = (const char *)base;
    hx_lease moved = *at;
    const void **part = (const void **)&moved;

    for (size_t i = 0; i < sizeof moved / sizeof *part; i++)
        part[i] = part[i] != NULL ? to + ((const char *)part[i] - from) : NULL;
    return moved;
}

HX_HD uint32_t hx_plan_pieces(size_t record_bytes)
{
    return (uint32_t)((record_bytes + HX_AHEAD_PIECE - 1) / HX_AHEAD_PIECE);
}

/* The entry of item k that the plan before had changed leads home again, unless somebody
 * else has changed it meanwhile. */
HX_HD void hx_plan_restore(hx_ahead_state *s, int k)
{
    hx_lease *entry = s->entry[k];

    s->entry[k] = NULL;
    if (entry != NULL && entry->gate.trellis == s->now[k])
        *entry = s->was[k];
}

/* Item k of the list is computed with where it comes to; entry: its own in the table. */
HX_HD void hx_plan_keep(hx_ahead_state *s, const hx_ahead *to, hx_lease *entry, int k)
{
    s->now[k] = (char *)to->slots.p + (size_t)k * to->record_bytes;
    s->entry[k] = entry;
    s->was[k] = *entry;
    *entry = hx_plan_moved(entry, s->now[k]);
}

/* Whether missing expert a comes before b in the order of hx_plan_lane(). */
HX_HD bool hx_plan_before(int32_t rows_a, int32_t a, int32_t rows_b, int32_t b)
{
    return rows_a != rows_b ? rows_a < rows_b : a < b;
}

#endif
