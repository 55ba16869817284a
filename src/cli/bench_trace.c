/* bench_trace.c - `hoist bench trace FILE`: recorded picks through the expert cache of the
 * store, and beside it through the plain LRU and two caches with hindsight. Called by
 * bench.c. Opens no model. */
#include <stdlib.h>

#include "cli/bench.h"
#include "model/trace.h"

#define TRACE_MAX ((size_t)1 << 32)

enum { SIZES_MAX = 16 };

/* N[,N..], or some shares of all experts. */
static int read_sizes(const char *text, int64_t all, int32_t *out, int *n, hx_err *err)
{
    static const int percent[] = { 5, 10, 20, 30, 50 };

    for (*n = 0; text == NULL && *n < (int)HX_LEN(percent); ++*n)
        out[*n] = (int32_t)HX_MAX(all * percent[*n] / 100, 1);
    for (const char *p = text; p != NULL; ++*n) {
        char *end;
        const long v = strtol(p, &end, 10);

        if (end == p || (*end != ',' && *end != '\0') || v < 1 || v > all ||
            *n == SIZES_MAX)
            return hx_fail(err, HX_EARG,
                           "--slots: \"%.60s\", expected up to %d sizes in 1..%lld", text,
                           SIZES_MAX, (long long)all);
        out[*n] = (int32_t)v;
        p = *end == ',' ? end + 1 : NULL;
    }
    return 0;
}

static double share(int64_t a, int64_t b)
{
    return 100.0 * (double)a / (double)HX_MAX(b, 1);
}

/* One line of the table. */
static int replay_size(const hx_trace *t, int32_t n_slot, int64_t from, bench_report *out,
                       hx_err *err)
{
    const int64_t all = t->shape.n_moe * t->shape.n_expert;
    const double steps = (double)(t->n_step - from);
    double hit[HX_N_TRACE_POLICY], moves[HX_N_TRACE_POLICY];
    char name[96];
    int rc;

    for (int p = 0; p < HX_N_TRACE_POLICY; p++) {
        hx_trace_result r;

        if ((rc = hx_trace_replay(t, (hx_trace_policy)p, n_slot, from, &r, err)) != 0)
            return rc;
        hit[p] = share(r.hits, r.items);
        moves[p] = (double)r.moves / steps;
        snprintf(name, sizeof name, "%d slots: hits, %s", n_slot,
                 hx_trace_policy_name((hx_trace_policy)p));
        bench_one(out, name, "%", hit[p]);
        snprintf(name, sizeof name, "%d slots: moves, %s", n_slot,
                 hx_trace_policy_name((hx_trace_policy)p));
        bench_one(out, name, "a step", moves[p]);
    }
    snprintf(name, sizeof name, "%d slots: gap to the optimum", n_slot);
    bench_one(out, name, "points", hit[HX_TRACE_BELADY] - hit[HX_TRACE_CLOCK]);
    printf("%6d %5.1f %%", n_slot, share(n_slot, all));
    for (int p = 0; p < HX_N_TRACE_POLICY; p++)
        printf("  %6.2f %7.2f", hit[p], moves[p]);
    printf("  %6.2f\n", hit[HX_TRACE_BELADY] - hit[HX_TRACE_CLOCK]);
    return 0;
}

static int replay(const hx_trace *t, const hx_cli *c, bench_report *out, hx_err *err)
{
    const int64_t all = t->shape.n_moe * t->shape.n_expert, from = t->n_step / 2;
    int32_t sizes[SIZES_MAX];
    int n, rc;

    if ((rc = read_sizes(c->slots, all, sizes, &n, err)) != 0)
        return rc;
    printf("%lld decode steps, %lld picks, %.1f distinct experts a step; %lld layers of "
           "%lld experts, %lld picked\n",
           (long long)t->n_step, (long long)t->n_pick,
           (double)t->begin[t->n_step] / (double)HX_MAX(t->n_step, 1),
           (long long)t->shape.n_moe, (long long)t->shape.n_expert,
           (long long)t->shape.n_active);
    printf("hits of distinct experts in %%, and moves a step, over the second half\n\n"
           " slots   share");
    for (int p = 0; p < HX_N_TRACE_POLICY; p++)
        printf("  %9s moves", hx_trace_policy_name((hx_trace_policy)p));
    printf("     gap\n");
    bench_prompt(out, t->item, t->begin[t->n_step]); /* what went in */
    out->quiet = true;
    for (int i = 0; rc == 0 && i < n; i++)
        rc = replay_size(t, sizes[i], from, out, err);
    out->quiet = false;
    return rc;
}

int bench_trace(const hx_cli *c, bench_report *out)
{
    hx_trace *t = NULL;
    hx_err err = { 0 }, why = { 0 };
    char *bytes = NULL;
    size_t n = 0;
    int rc;

    out->protocol = "trace";
    out->about =
        "recorded picks replayed through caches of experts; the first half of the "
        "steps warms up; gap: hits of the optimum (Belady with bypass) less "
        "those of the CLOCK";
    out->random_text = false;
    if ((rc = hx_file_read(c->model, TRACE_MAX, &bytes, &n, &err)) == 0) {
        if ((rc = hx_trace_parse(&t, (hx_str) { bytes, n }, &why)) == 0)
            rc = replay(t, c, out, &err);
        else
            hx_fail(&err, rc, "%s: %.250s", c->model, why.msg);
    }
    hx_trace_close(t);
    hx_free(bytes);
    return rc != 0 ? cli_fail(&err) : 0;
}
