/* bound.c - the least that a decode step takes by measured costs: what plan predicts, and
 * what bench prints beside a measured step. */
#include "cli/cli.h"

cli_bound cli_step_bound(const hx_experts *x, double here, double missing)
{
    const double mb = (double)x->expert_bytes / 1e6, link_us = x->us[1],
                 lane_us = x->us[2];
    cli_bound b = { .link = missing,
                    .gpu_mb = (double)x->rest_bytes / 1e6 + here * mb,
                    .limit = missing > 0 ? "link" : "GPU" };

    if (lane_us > 0 && link_us > 0) /* both end at once */
        b.link = missing * lane_us / (link_us + lane_us);
    b.lane = missing - b.link;
    b.lanes_ms = b.link * link_us / 1e3;
    b.host_ms = x->host_gbs > 0 ? missing * mb / x->host_gbs : 0;
    b.gpu_ms = x->copy_gbs > 0 ? b.gpu_mb / x->copy_gbs : here * x->us[0] / 1e3;
    if (b.host_ms > b.lanes_ms)
        b.limit = "host memory";
    else if (b.lane > b.link)
        b.limit = "CPU lane";
    b.ms = HX_MAX(b.lanes_ms, b.host_ms) + b.gpu_ms;
    return b;
}
