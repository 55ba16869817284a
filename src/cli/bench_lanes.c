/* bench_lanes.c - bench decode and prefill: where experts ran, or came from, beside what their
 * costs allow. Called by bench.c for models whose experts do not all fit the GPU. */
#include "cli/bench.h"

typedef struct {
    const char *name;
    double v;
    const char *unit;
} row;

static void put_rows(bench_report *out, const char *what, const row *r, size_t n)
{
    char name[96];

    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "%s: %s", what, r[i].name);
        bench_one(out, name, r[i].unit, r[i].v);
    }
}

void bench_lanes(bench_report *out, const char *what, const bench_stretch *t)
{
    const hx_experts *a = t->before, *b = t->after;
    const double steps = (double)(b->steps - a->steps),
                 mb = (double)b->expert_bytes / 1e6,
                 here = (double)(b->here - a->here) / steps,
                 link = (double)(b->link - a->link) / steps,
                 lane = (double)(b->lane - a->lane) / steps,
                 ahead = (double)(b->ahead - a->ahead) / steps,
                 missing = link + lane + ahead,
                 named = (double)(b->predicted - a->predicted),
                 step = t->seconds / steps * 1e3;
    const cli_bound bound = cli_step_bound(b, here, missing);
    const row counts[] = {
        { "slots", b->n_slot, "experts" },
        { "distinct experts", here + missing, "a step" },
        { "in GPU memory", here, "a step" },
        { "hits of distinct experts", 100 * here / (here + missing), "%" },
        { "over the link", link, "a step" },
        { "on the CPU", lane, "a step" },
        { "fetched before they were picked", ahead, "a step" },
        { "predicted among the missing", named / steps, "a step" },
        { "of these picked",
          100 * (double)(b->predicted_right - a->predicted_right) / HX_MAX(named, 1),
          "%" },
        { "fetched", (double)(b->fetch_bytes - a->fetch_bytes) / steps / 1e6,
          "MB a step" },
        { "of these in vain", (double)(b->vain_bytes - a->vain_bytes) / steps / 1e6,
          "MB a step" },
        { "moved in", (double)(b->pushed - a->pushed) / steps, "a step" },
        { "evicted", (double)(b->evicted - a->evicted) / steps, "a step" },
        { "GPU waits for the CPU", (double)(b->wait_us - a->wait_us) / steps / 1e3,
          "ms a step" },
        { "from picks to answers of the CPU",
          (double)(b->busy_us - a->busy_us) / steps / 1e3, "ms a step" },
        { "CPU on experts", (double)(b->lane_us - a->lane_us) / steps / 1e3,
          "ms a step" },
        { "jobs of the CPU", (double)(b->jobs - a->jobs) / steps, "a step" },
        { "of these awaited", (double)(b->awaited - a->awaited) / steps, "a step" },
        { "post, as it went",
          (double)(b->post_us - a->post_us) / (double)HX_MAX(b->awaited - a->awaited, 1),
          "us" },
        { "bytes over the link", link * mb, "MB a step" },
        { "bytes on the CPU", lane * mb, "MB a step" },
        { "link, over the whole step", link * mb / step, "GB/s" },
        { "step", step, "ms" },
    };
    const row bounds[] = {
        { "expert in GPU memory", b->us[0], "us" },
        { "expert over the link", b->us[1], "us" },
        { "expert on the CPU", b->us[2], "us" },
        { "there, each row more", b->us[3], "us" },
        { "post to the CPU", b->us[4], "us" },
        { "host memory, read by GPU and CPUs", b->host_gbs, "GB/s" },
        { "GPU memory, copies", b->copy_gbs, "GB/s" },
        { "bound: misses at the rates of link and CPU", bound.lanes_ms, "ms" },
        { "bound: misses at that of host memory", bound.host_ms, "ms" },
        { "bound: the rest at that of GPU memory", bound.gpu_ms, "ms" },
        { "bound: the longer of the misses', and the rest", bound.ms, "ms" },
        { "bound: over the link or fetched", bound.link, "a step" },
        { "bound: on the CPU", bound.lane, "a step" },
        { "bound: rate", 1e3 * t->n_stream / HX_MAX(bound.ms, 1e-3), "tok/s" },
        { "share of the bound", 100 * bound.ms / step, "%" },
    };

    if (steps <= 0)
        return;
    put_rows(out, what, counts, HX_LEN(counts));
    if (b->copy_gbs <= 0)
        return; /* memory stands in for a GPU: nothing was measured */
    put_rows(out, what, bounds, HX_LEN(bounds));

    const double gpu = link * b->us[1], cpu = lane * (b->us[2] + b->us[4] * (lane > 0));

    printf("%s: the %s limits\n", what,
           gpu < 1 && cpu < 1 ? "GPU"
           : gpu >= cpu       ? "link"
                              : "CPU lane");
}

void bench_link(bench_report *out, const char *what, const bench_reading *r)
{
    const hx_experts *x = r->experts;
    const double all = (double)r->n_chunk * x->n_expert * (double)x->expert_bytes,
                 ceiling = (double)x->expert_bytes / HX_MAX(x->us[1], 1e-3) / 1e3,
                 rate = (double)r->bytes / r->ms / 1e6,
                 link_ms = (double)r->bytes / ceiling / 1e6,
                 bound = HX_MAX(link_ms, r->work_ms);
    const row rows[] = {
        { "experts over the link", (double)r->bytes / 1e9, "GB" },
        { "hits: those that were there", 100 * HX_MAX(1 - (double)r->bytes / all, 0),
          "%" },
        { "link, over the whole prompt", rate, "GB/s" },
        { "link, as experts are read in place", ceiling, "GB/s" },
        { "share of that", 100 * rate / ceiling, "%" },
        { "bound: the link", link_ms, "ms" },
        { "bound: operations one by one", r->work_ms, "ms" },
        { "share of the longer", 100 * bound / r->ms, "%" },
    };

    put_rows(out, what, rows, HX_LEN(rows));
    printf("%s: the %s limits\n", what, link_ms >= r->work_ms ? "link" : "GPU");
}
