/* plan.h - how the missing experts of a layer are shared out between a device and the CPU
 * lane: one text for host and device, a pure function of counts and measured costs. */
#ifndef HX_PLAN_H
#define HX_PLAN_H

#include "dev/canon.h"
#include "dev/dev.h"

/* How many of n missing experts, whose row counts rise, the lane takes from the front; the
 * device reads the others from host memory beside n_here that it holds. Both sides work at
 * once: the longer one counts. Equal times: the fewer for the lane. */
HX_HD int hx_plan_lane(const hx_rates *r, const int32_t *rows, int n, int n_here)
{
    const float here = (float)n_here * r->here_us;
    float lane = r->post_us, best = here + (float)n * r->link_us;
    int take = 0;

    if (!(r->lane_us > 0))
        return 0;
    for (int k = 1; k <= n; k++) {
        const float device = here + (float)(n - k) * r->link_us;

        lane += r->lane_us + (float)(rows[k - 1] - 1) * r->row_us;
        const float both = device > lane ? device : lane;
        if (both < best) {
            best = both;
            take = k;
        }
    }
    return take;
}

/* Whether missing expert a comes before b in the order of hx_plan_lane(). */
HX_HD bool hx_plan_before(int32_t rows_a, int32_t a, int32_t rows_b, int32_t b)
{
    return rows_a != rows_b ? rows_a < rows_b : a < b;
}

#endif
