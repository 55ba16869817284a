/* bench_follow.c - the mixes of hoist bench serve that need no server. "follow": what the
 * next turn of a long conversation costs, beside its first; with --park-dir also after a
 * restart; with experts behind a GPU beside the time that the link alone would take.
 * "newcomer": what a prompt of that length does to three streams. Called by bench_serve.c.
 *
 * Uses hoist.h only, and ids instead of text, so that synthetic models can be measured. */
#include <stdlib.h>
#include <unistd.h>

#include "cli/bench.h"

#define ROUNDS   3
#define ANSWER   64
#define LONG     20000 /* tokens of the conversation before its next turns */
#define SLACK_MS 50.0  /* that a turn may take beside the link */

typedef struct {
    hx_engine *e;
    hx_info info;
    int32_t *id; /* [cap] the conversation; a round's is made anew */
    int64_t n, cap;
    bench_report *out;
} talk;

/* What one request took. */
typedef struct {
    double ms; /* to the first token */
    double
        link_ms; /* of that, what bringing the missing experts takes at the link's rate */
    int64_t cached;
} turn;

static double push_ms(const hx_experts *a, const hx_experts *b)
{
    const double n =
        (double)(b->stage_bytes - a->stage_bytes) / (double)HX_MAX(b->expert_bytes, 1);

    return n * b->us[1] / 1e3;
}

/* Sends the conversation; its answer is added to it. */
static int send(talk *t, turn *out, hx_err *err)
{
    const hx_request r = {
        .tokens = t->id, .n_tokens = t->n, .max_new = ANSWER, .ignore_eos = true
    };
    hx_experts before, after;
    hx_stream *s;
    hx_event ev = { 0 };
    int rc;

    hx_get_experts(t->e, &before);
    after = before;
    if ((rc = hx_submit(t->e, &r, &s, err)) != 0)
        return rc;
    while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR) {
        hx_next(s, &ev, -1);
        if (ev.kind != HX_EV_TOKENS)
            continue;
        memcpy(t->id + t->n, ev.tokens, (size_t)ev.n_tokens * sizeof *t->id);
        t->n += ev.n_tokens;
    }
    *out = (turn) { .ms = (double)(ev.times.first_us - ev.times.queued_us) / 1e3,
                    .cached = ev.cached };
    if (ev.kind == HX_EV_ERROR) {
        *err = ev.err;
        rc = ev.err.code;
    }
    hx_stream_free(s);
    usleep(20000); /* figures are of the step before, and states are kept after the end */
    hx_get_experts(t->e, &after);
    out->link_ms = push_ms(&before, &after);
    return rc;
}

static void say(talk *t, uint64_t seed, int64_t n)
{
    bench_random_ids(&t->info, seed, t->id + t->n, n);
    t->n += n;
}

/* Figures of the rounds of one kind of turn. */
static void report(const talk *t, const char *what, const turn *v, const turn *cold,
                   int n)
{
    double ms[ROUNDS], part[ROUNDS], link[ROUNDS], over[ROUNDS], cached[ROUNDS];
    char name[96];

    for (int i = 0; i < n; i++) {
        ms[i] = v[i].ms;
        part[i] = 100 * v[i].ms / HX_MAX(cold[i].ms, 1e-9);
        link[i] = v[i].link_ms;
        over[i] = (v[i].ms - SLACK_MS) / HX_MAX(v[i].link_ms, 1e-9);
        cached[i] = (double)v[i].cached;
    }
    snprintf(name, sizeof name, "follow: %s, first token", what);
    bench_figure(t->out, name, "ms", ms, n);
    if (v == cold)
        return;
    snprintf(name, sizeof name, "follow: %s, of the first turn's", what);
    bench_figure(t->out, name, "%", part, n);
    snprintf(name, sizeof name, "follow: %s, kept", what);
    bench_figure(t->out, name, "tokens", cached, n);
    if (link[0] <= 0)
        return;
    snprintf(name, sizeof name, "follow: %s, link alone", what);
    bench_figure(t->out, name, "ms", link, n);
    snprintf(name, sizeof name, "follow: %s, less %g ms, by the link's", what, SLACK_MS);
    bench_figure(t->out, name, "x", over, n);
}

/* New tokens of the turns; 0 sends the same prompt once more. */
static const int64_t added[] = { 20, 100, 512, 0 };

static int run_rounds(talk *t, uint64_t seed, int64_t n_long, hx_err *err)
{
    turn cold[ROUNDS], next[HX_LEN(added)][ROUNDS];
    int rc;

    for (int k = 0; k < ROUNDS; k++) {
        t->n = 0;
        say(t, seed + (uint64_t)k, n_long);
        if ((rc = send(t, &cold[k], err)) != 0)
            return rc;
        for (size_t i = 0; i < HX_LEN(added); i++) {
            if (added[i] > 0)
                say(t, seed + 100 + i, added[i]);
            else
                t->n -= ANSWER;
            if ((rc = send(t, &next[i][k], err)) != 0)
                return rc;
        }
    }
    report(t, "first turn", cold, cold, ROUNDS);
    for (size_t i = 0; i < HX_LEN(added); i++) {
        char what[40];

        snprintf(what, sizeof what, "%lld new tokens", (long long)added[i]);
        report(t, added[i] > 0 ? what : "the same again", next[i], cold, ROUNDS);
    }
    return 0;
}

/* The last conversation goes on from its files. */
static int run_restart(talk *t, const hx_cli *c, uint64_t seed, hx_err *err)
{
    turn cold, next;
    int rc;

    hx_close(t->e);
    t->e = NULL;
    if (cli_open_engine(&t->e, c, NULL, NULL) != 0)
        return hx_fail(err, HX_EIO, "bench: the model does not open a second time");
    say(t, seed + 200, 100);
    if ((rc = send(t, &next, err)) != 0)
        return rc;
    /* What it would take from the start. */
    const int64_t n = t->n - ANSWER;
    t->n = 0;
    say(t, seed + 300, n);
    if ((rc = send(t, &cold, err)) != 0)
        return rc;
    report(t, "after a restart", &next, &cold, 1);
    return 0;
}

/* ---- a newcomer beside streams ------------------------------------------------------ */

#define BESIDE    3 /* streams */
#define BEFORE_US 3000000

/* When tokens of a stream came. */
typedef struct {
    hx_stream *s;
    int64_t *at, n, cap;
} series;

static int take(series *x, hx_err *err)
{
    hx_event ev;

    while (x->n < x->cap && hx_next(x->s, &ev, 0) == 1) {
        for (int32_t i = 0; ev.kind == HX_EV_TOKENS && i < ev.n_tokens && x->n < x->cap;
             i++)
            x->at[x->n++] = hx_now_us();
        if (ev.kind == HX_EV_ERROR) {
            *err = ev.err;
            return ev.err.code;
        }
        if (ev.kind == HX_EV_DONE && x->n < x->cap)
            return hx_fail(err, HX_EARG,
                           "bench: a stream ended after %lld tokens, expected %lld",
                           (long long)x->n, (long long)x->cap);
    }
    return 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Gaps of all streams that end between two moments, sorted; returns how many. */
static int64_t gaps_of(const series *x, int64_t from_us, int64_t to_us, double *gap)
{
    int64_t n = 0;

    for (int k = 0; k < BESIDE; k++)
        for (int64_t i = 1; i < x[k].n; i++)
            if (x[k].at[i] > from_us && x[k].at[i] <= to_us)
                gap[n++] = (double)(x[k].at[i] - x[k].at[i - 1]) / 1e3;
    qsort(gap, (size_t)n, sizeof *gap, by_value);
    return n;
}

static int submit(talk *t, const int32_t *id, int64_t n, int64_t max_new, hx_stream **s,
                  hx_err *err)
{
    return hx_submit(t->e,
                     &(hx_request) { .tokens = id,
                                     .n_tokens = n,
                                     .max_new = max_new,
                                     .temperature = 1,
                                     .ignore_eos = true,
                                     .no_store = true },
                     s, err);
}

/* Streams for a while alone, once each has begun, then beside a prompt of n_long tokens;
 * us: to its first token; x3: what had become of the experts at these three moments. */
static int run_streams(talk *t, series *x, int64_t n_long, int64_t *from_us, int64_t *us,
                       hx_experts *x3, hx_err *err)
{
    series late = { .at = &(int64_t) { 0 }, .cap = 1 };
    int64_t start = 0;
    int rc = 0;

    for (int k = 0; k < BESIDE && rc == 0; k++)
        rc = submit(t, t->id + 64 * k, 64, x[k].cap, &x[k].s, err);
    while (rc == 0 && late.n == 0) {
        bool all = true;

        for (int k = 0; k < BESIDE && rc == 0; k++) {
            rc = take(&x[k], err);
            all = all && x[k].n > 0;
        }
        if (rc == 0 && late.s != NULL) {
            rc = take(&late, err);
        } else if (rc == 0 && start == 0 && all) {
            start = hx_now_us();
            hx_get_experts(t->e, &x3[0]);
        } else if (rc == 0 && start > 0 && hx_now_us() - start > BEFORE_US) {
            hx_get_experts(t->e, &x3[1]);
            *from_us = hx_now_us();
            rc = submit(t, t->id, n_long, 1, &late.s, err);
        }
        usleep(500);
    }
    hx_get_experts(t->e, &x3[2]);
    *us = late.at[0] - *from_us;
    hx_stream_free(late.s);
    for (int k = 0; k < BESIDE; k++)
        hx_stream_free(x[k].s);
    return rc;
}

/* Distinct experts that a decode step between two moments did not find in GPU memory. */
static double missing(const hx_experts *a, const hx_experts *b)
{
    return (double)(b->link + b->lane + b->ahead - a->link - a->lane - a->ahead) /
           (double)HX_MAX(b->steps - a->steps, 1);
}

static int run_beside(talk *t, uint64_t seed, int64_t n_long, hx_err *err)
{
    const int64_t cap = t->info.ctx_tokens - 64;
    series x[BESIDE] = { 0 };
    double *gap = hx_new(double, BESIDE *cap);
    int64_t from = 0, us = 0;
    hx_experts x3[3] = { 0 };
    turn alone;
    int rc = gap == NULL ? HX_ENOMEM : 0;

    for (int k = 0; k < BESIDE; k++)
        if ((x[k] = (series) { .at = hx_new(int64_t, cap), .cap = cap }).at == NULL)
            rc = HX_ENOMEM;
    t->n = 0;
    say(t, seed + 500, n_long);
    if (rc != 0)
        rc = hx_fail(err, rc, "bench: no memory");
    else if ((rc = send(t, &alone, err)) == 0) {
        bench_one(t->out, "newcomer: first token alone", "ms", alone.ms);
        bench_random_ids(&t->info, seed + 501, t->id, n_long);
        rc = run_streams(t, x, n_long, &from, &us, x3, err);
    }
    if (rc == 0) {
        const double before =
            (double)gaps_of(x, from - BEFORE_US / 2, from, gap) / (BEFORE_US / 2e6);
        const int64_t n = HX_MAX(gaps_of(x, from, from + us, gap), 1);

        bench_one(t->out, "newcomer: rate of three streams before", "tok/s", before);
        bench_one(t->out, "newcomer: rate they keep", "%",
                  100 * (double)n * 1e6 / (double)us / HX_MAX(before, 1e-9));
        bench_one(t->out, "newcomer: gap p50", "ms", gap[n / 2]);
        bench_one(t->out, "newcomer: gap p99 / p50", "x", gap[n * 99 / 100] / gap[n / 2]);
        bench_one(t->out, "newcomer: first token beside / alone", "x",
                  (double)us / 1e3 / alone.ms);
        if (x3[2].n_slot < x3[2].n_expert) {
            bench_one(t->out, "newcomer: experts missing before", "a step",
                      missing(&x3[0], &x3[1]));
            bench_one(t->out, "newcomer: experts missing beside", "a step",
                      missing(&x3[1], &x3[2]));
        }
    }
    for (int k = 0; k < BESIDE; k++)
        hx_free(x[k].at);
    hx_free(gap);
    return rc;
}

int bench_follow(const hx_cli *c, bool turns, bool newcomer, bench_report *out)
{
    const uint64_t seed = c->has_seed ? (uint64_t)c->seed : 1;
    talk t = { .out = out };
    int64_t n_long = c->n != 0 ? c->n : LONG, more = 0;
    hx_err err = { 0 };
    int rc;

    if ((rc = cli_open_engine(&t.e, c, NULL, NULL)) != 0)
        return rc;
    hx_get_info(t.e, &t.info);
    for (size_t i = 0; i < HX_LEN(added); i++)
        more += added[i] + ANSWER;
    more += 100 + ANSWER;
    t.cap = t.info.ctx_tokens;
    n_long = HX_MIN(n_long, t.cap - more - 1);
    if (n_long < 64)
        rc = hx_fail(&err, HX_EARG,
                     "bench: context of %lld tokens, expected at least %lld",
                     (long long)t.cap, (long long)more + 65);
    else if ((t.id = hx_new(int32_t, t.cap)) == NULL)
        rc = hx_fail(&err, HX_ENOMEM, "bench: no memory");
    else if (newcomer && t.info.max_streams <= BESIDE)
        rc = hx_fail(&err, HX_EARG, "bench: room for %d streams, newcomer needs %d",
                     t.info.max_streams, BESIDE + 1);
    if (rc == 0 && newcomer)
        rc = run_beside(&t, seed, n_long, &err);
    if (rc == 0 && turns)
        rc = run_rounds(&t, seed, n_long, &err);
    if (rc == 0 && turns && c->park_dir != NULL)
        rc = run_restart(&t, c, seed, &err);
    bench_one(out, turns ? "follow: conversation" : "newcomer: prompt", "tokens",
              (double)n_long);
    hx_free(t.id);
    hx_close(t.e);
    return rc != 0 ? cli_fail(&err) : 0;
}
