/* bench.h - what the files of `hoist bench` share: the report, figures with their spread, and
 * what machine they come from. */
#ifndef HX_BENCH_H
#define HX_BENCH_H

#include "cli/cli.h"

/* Collects one result; printed as it comes, written as JSON at the end. */
typedef struct {
    hx_sb figures; /* members of "figures" */
    hx_sb prompts; /* elements of "prompts_sha256" */
    hx_sb extra;   /* further members of "protocol" */
    hx_sb gpu; /* member "gpu", read before the engine was closed: clocks under load */
    const char *protocol, *about;
    bool
        random_text; /* prompts are random ids: no figure of speculation may come of them */
    char device[64];
    bool quiet; /* figures go to the result only */
} bench_report;

/* A figure of n measurements, in the order they were made; shows median and range. */
void bench_figure(bench_report *r, const char *name, const char *unit, const double *v,
                  int n);
void bench_one(bench_report *r, const char *name, const char *unit, double v);
/* Notes the hash of a prompt's ids. */
void bench_prompt(bench_report *r, const int32_t *ids, int64_t n);
void bench_member(bench_report *r, const char *name,
                  const char *json);         /* of "protocol" */
double bench_median(const double *v, int n); /* n up to 64 */

/* Appends the member "gpu" to an object: driver, clocks now. bench_machine.c */
void bench_gpu(hx_sb *b);
/* Appends "build", "machine", "gpu" (gpu, or read now) and "ceilings" (measured now, with
 * n_threads). */
void bench_machine(hx_sb *b, const hx_sb *gpu, int n_threads);

/* An engine under measurement. */
typedef struct {
    hx_engine *e;
    hx_info info;
    const hx_cli *c;
    bench_report *out;
    uint64_t seed;
} bench_run;

/* One stream's part in a run. */
typedef struct {
    const int32_t *ids;
    int64_t n_ids, max_new;
    float temperature;
    uint64_t seed;
    bool ignore_eos, first_only; /* first_only: cancelled at its first token */

    int64_t n; /* tokens of the answer */
    hx_times times;
    hx_stop stop;
} bench_stream;

/* Called for every event with tokens of stream i, when it was received; with true all
 * streams are cancelled: it has seen enough. */
typedef bool bench_event_fn(void *ud, int i, int64_t now_us, const hx_event *ev);

/* Runs all streams together to their ends. fn may be NULL. */
int bench_streams(hx_engine *e, bench_stream *s, int n, bench_event_fn *fn, void *ud,
                  hx_err *err);
/* Seeded ids of plain text tokens: an endless supply of fresh prompts. */
void bench_random_ids(const hx_info *info, uint64_t seed, int32_t *ids, int64_t n);

/* What caches make of a recorded trace. bench_trace.c */
int bench_trace(const hx_cli *c, bench_report *out);

/* Where experts ran in a stretch of decode, beside the bound. bench_lanes.c */
typedef struct {
    int n_stream;
    double seconds;
    const hx_experts *before, *after;
} bench_stretch;

void bench_lanes(bench_report *out, const char *what, const bench_stretch *t);

/* What came over the link for a prompt in so many chunks, beside the bound: the link's time,
 * or what the GPU has to do itself. bench_lanes.c */
typedef struct {
    double ms, work_ms; /* to the first token; operations, one by one */
    uint64_t bytes;
    int64_t n_chunk;
    const hx_experts *experts;
} bench_reading;

void bench_link(bench_report *out, const char *what, const bench_reading *r);

int bench_ops(const hx_cli *c, bench_report *out);               /* tools.c */
int bench_protocol(bench_run *b, const char *name, hx_err *err); /* bench_protocol.c */
int bench_compare(const hx_cli *c);                              /* bench_compare.c */
int bench_serve(const hx_cli *c, bench_report *out);             /* bench_serve.c */
/* bench_follow.c: what turns of a long conversation take, what a newcomer does to streams */
int bench_follow(const hx_cli *c, bool turns, bool newcomer, bench_report *out);

#endif
