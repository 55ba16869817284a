/* bench.c - `hoist bench`: the report, streams that run together, and the plain decode and
 * prefill figures. Called by main.c. Uses hoist.h only; bench ops is in tools.c, the protocols
 * that match published ones in bench_protocol.c, comparing in bench_compare.c. */
#include <math.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <time.h>

#include "cli/bench.h"

#define REPEATS 5
#define LONG_US (6 * 1000000LL)
#define SHORT   32 /* context of decode where none is asked for */
#define LENGTHS 16

/* ---- report ------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(const double *v, int n)
{
    double s[64];

    hx_assert(n >= 1 && n <= (int)HX_LEN(s));
    memcpy(s, v, (size_t)n * sizeof *s);
    qsort(s, (size_t)n, sizeof *s, by_value);
    return n % 2 != 0 ? s[n / 2] : (s[n / 2 - 1] + s[n / 2]) / 2;
}

void bench_figure(bench_report *r, const char *name, const char *unit, const double *v,
                  int n)
{
    const double mid = bench_median(v, n);
    double lo = v[0], hi = v[0];

    for (int i = 1; i < n; i++) {
        lo = HX_MIN(lo, v[i]);
        hi = HX_MAX(hi, v[i]);
    }
    if (!r->quiet) {
        printf("%-44s %12.4g %s", name, mid, unit);
        if (n > 1)
            printf("  (%.4g to %.4g, %d runs)", lo, hi, n);
        putchar('\n');
        fflush(stdout); /* figures come minutes apart, often into a pipe */
    }
    hx_sb_str(&r->figures, r->figures.n == 0 ? "\n" : ",\n");
    hx_json_put_str(&r->figures, hx_str_c(name));
    hx_sb_printf(
        &r->figures,
        ":{\"unit\":\"%s\",\"median\":%.6g,\"min\":%.6g,\"max\":%.6g,\"spread\":%.4g,"
        "\"all\":[",
        unit, mid, lo, hi, mid != 0 ? (hi - lo) / mid : 0.0);
    for (int i = 0; i < n; i++)
        hx_sb_printf(&r->figures, "%s%.6g", i > 0 ? "," : "", v[i]);
    hx_sb_str(&r->figures, "]}");
}

void bench_one(bench_report *r, const char *name, const char *unit, double v)
{
    bench_figure(r, name, unit, &v, 1);
}

void bench_prompt(bench_report *r, const int32_t *ids, int64_t n)
{
    unsigned char md[SHA256_DIGEST_LENGTH];

    SHA256((const unsigned char *)ids, (size_t)n * sizeof *ids, md);
    hx_sb_str(&r->prompts, r->prompts.n > 0 ? ",\"" : "\"");
    for (size_t i = 0; i < sizeof md; i++)
        hx_sb_printf(&r->prompts, "%02x", md[i]);
    hx_sb_char(&r->prompts, '"');
}

void bench_member(bench_report *r, const char *name, const char *json)
{
    hx_sb_printf(&r->extra, ",\"%s\":%s", name, json);
}

static void put_model(hx_sb *b, const hx_cli *c, const hx_info *info)
{
    hx_sb_str(b, ",\n\"model\":");
    hx_sb_str(b, "{\"name\":");
    hx_json_put_str(b, hx_str_c(info != NULL ? info->name : c->model));
    if (info == NULL) {
        hx_sb_char(b, '}');
        return;
    }
    hx_sb_str(b, ",\"device\":");
    hx_json_put_str(b, hx_str_c(info->device));
    hx_sb_printf(
        b,
        ",\"weight_bytes\":%llu,\"parameters\":%llu,\"ctx_tokens\":%lld,"
        "\"streams\":%d,\"kv\":\"%s\",\"cache_bytes\":%llu,\"work_bytes\":%llu}",
        (unsigned long long)info->weight_bytes, (unsigned long long)info->n_param,
        (long long)info->ctx_tokens, info->max_streams, c->kv != NULL ? c->kv : "bf16",
        (unsigned long long)info->cache_bytes, (unsigned long long)info->work_bytes);
}

static int write_report(const bench_report *r, const hx_cli *c, const hx_info *info)
{
    hx_sb b = { 0 };
    char when[64];
    const time_t now = time(NULL);
    struct tm tm;
    hx_err err = { 0 };
    int rc;

    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    hx_sb_printf(&b, "{\"kind\":\"hoist bench\",\"finished\":\"%s\"", when);
    bench_machine(&b, &r->gpu, c->threads != 0 ? (int)c->threads : hx_sys_n_cpu());
    put_model(&b, c, info);
    hx_sb_str(&b, ",\n\"protocol\":{\"name\":");
    hx_json_put_str(&b, hx_str_c(r->protocol));
    hx_sb_str(&b, ",\"about\":");
    hx_json_put_str(&b, hx_str_c(r->about));
    hx_sb_printf(
        &b,
        ",\"text\":\"%s\",\"speculative\":false,\"seed\":%lld%s,"
        "\"prompts_sha256\":[%s]},\n\"figures\":{%s}}\n",
        r->random_text ? "random ids" : "natural", (long long)(c->has_seed ? c->seed : 1),
        r->extra.p != NULL ? r->extra.p : "", r->prompts.p != NULL ? r->prompts.p : "",
        r->figures.p != NULL ? r->figures.p : "");
    b.bad |= r->figures.bad || r->prompts.bad || r->extra.bad || r->gpu.bad;
    rc = cli_write(c->json, &b, &err) != 0 ? cli_fail(&err) : 0;
    hx_sb_free(&b);
    return rc;
}

/* ---- streams ---------------------------------------------------------------- */

void bench_random_ids(const hx_info *info, uint64_t seed, int32_t *ids, int64_t n)
{
    const uint64_t top = (uint64_t)HX_MAX(info->n_token * 9 / 10, 1);

    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)(hx_rng_at(seed, (uint64_t)i) % top);
}

/* Takes what stream i has, waiting up to wait_ms: 1 when it has ended, 2 when fn has seen
 * enough. */
static int take(hx_stream *stream, bench_stream *s, int i, int wait_ms,
                bench_event_fn *fn, void *ud, hx_err *err)
{
    hx_event ev = { 0 };

    while (hx_next(stream, &ev, wait_ms) == 1) {
        s->n = ev.generated;
        s->times = ev.times;
        if (ev.kind == HX_EV_TOKENS && fn != NULL && fn(ud, i, hx_now_us(), &ev))
            return 2;
        if (ev.kind == HX_EV_ERROR) {
            *err = ev.err;
            return ev.err.code;
        }
        if (ev.kind == HX_EV_DONE) {
            s->stop = ev.stop;
            return 1;
        }
        if (ev.kind == HX_EV_TOKENS && s->first_only) {
            s->stop = HX_STOP_CANCEL;
            return 1;
        }
        wait_ms = 0;
    }
    return 0;
}

int bench_streams(hx_engine *e, bench_stream *s, int n, bench_event_fn *fn, void *ud,
                  hx_err *err)
{
    hx_stream *stream[64] = { 0 };
    bool ended[64] = { 0 };
    int open = 0, rc = 0;

    hx_assert(n <= 64);
    for (; rc == 0 && open < n; open++) {
        const hx_request r = { .tokens = s[open].ids,
                               .n_tokens = s[open].n_ids,
                               .max_new = s[open].max_new,
                               .temperature = s[open].temperature,
                               .seed = s[open].seed,
                               .ignore_eos = s[open].ignore_eos };

        if ((rc = hx_submit(e, &r, &stream[open], err)) != 0)
            break;
    }
    /* All are read in turn: an answer that nobody takes would be paused. */
    for (int left = open; rc == 0 && left > 0;)
        for (int i = 0, first = 1; rc == 0 && i < n; i++) {
            if (ended[i])
                continue;
            if ((rc = take(stream[i], &s[i], i, first ? 5 : 0, fn, ud, err)) == 1) {
                ended[i] = true;
                left--;
                rc = 0;
            }
            first = 0;
        }
    for (int i = 0; i < open; i++)
        hx_stream_free(stream[i]);
    return HX_MIN(rc, 0);
}

/* ---- decode, prefill ----------------------------------------------------------- */

/* n streams that decode together: from the moment when the last of them has begun until
 * they have n_new tokens each, in the mean, since. */
typedef struct {
    hx_engine *e;
    int n;
    int64_t n_new, seen[8], all, base, from_us, to_us;
    hx_experts before, after;
} together;

static bool watch(void *ud, int i, int64_t now_us, const hx_event *ev)
{
    together *t = ud;
    int begun = 0;

    t->seen[i] += ev->n_tokens;
    t->all += ev->n_tokens;
    if (t->from_us > 0 && t->all - t->base < t->n * t->n_new)
        return false;
    if (t->from_us > 0) {
        t->to_us = now_us;
        hx_get_experts(t->e, &t->after);
        return true;
    }
    for (int j = 0; j < t->n; j++)
        begun += t->seen[j] > 0;
    if (begun == t->n) {
        t->from_us = now_us;
        t->base = t->all;
        hx_get_experts(t->e, &t->before);
    }
    return false;
}

/* One round of n streams over depth ids each. Only the first round of a depth reads them:
 * the others go on from what it left. The streams have no end of their own: those that
 * begin first must not end first. */
static int decode_round(bench_run *b, together *t, const int32_t *ids, int64_t depth,
                        int round, hx_err *err)
{
    bench_stream s[8] = { 0 };
    int rc;

    for (int j = 0; j < t->n; j++)
        s[j] = (bench_stream) { .ids = ids + j * depth,
                                .n_ids = depth,
                                .temperature = 1,
                                .seed = b->seed + (uint64_t)(round * 64 + j),
                                .ignore_eos = true };
    if ((rc = bench_streams(b->e, s, t->n, watch, t, err)) != 0)
        return rc;
    for (int j = 0; j < t->n; j++)
        if (t->to_us == 0 || depth + s[j].n >= b->info.ctx_tokens)
            return hx_fail(err, HX_EARG,
                           "bench: decode from %lld tokens on, %lld by each of %d: the "
                           "context of %lld ended before; give a larger --ctx or a "
                           "smaller -n",
                           (long long)depth, (long long)t->n_new, t->n,
                           (long long)b->info.ctx_tokens);
    return 0;
}

/* Measurements that take long are repeated less often. */
static bool again(int n, int64_t start_us)
{
    return n < REPEATS && (n < 2 || hx_now_us() - start_us < LONG_US);
}

static int decode_at(bench_run *b, int n, int64_t depth, hx_err *err)
{
    int32_t *ids = hx_new(int32_t, n * depth);
    double rate[REPEATS + 1]; /* the first run warms up */
    together t = { 0 };       /* of the last run */
    char name[64];
    int rc = ids == NULL ? hx_fail(err, HX_ENOMEM, "bench: no memory") : 0, k = 0;

    for (int64_t start = hx_now_us(); rc == 0 && again(k - 1, start); k++) {
        if (k == 0 || depth == SHORT)
            bench_random_ids(&b->info, b->seed + (uint64_t)(k * 64 + 7 * depth), ids,
                             n * depth);
        for (int j = 0; k > 0 && j < n; j++)
            bench_prompt(b->out, ids + j * depth, depth);
        t = (together) { .e = b->e, .n = n, .n_new = b->c->n != 0 ? b->c->n : 128 };
        rc = decode_round(b, &t, ids, depth, k, err);
        rate[k] = (double)(t.all - t.base) * 1e6 / (double)HX_MAX(t.to_us - t.from_us, 1);
        if (k == 0)
            start = hx_now_us();
    }
    hx_free(ids);
    if (rc != 0)
        return rc;
    snprintf(name, sizeof name, "decode, %d stream%s", n, n > 1 ? "s" : "");
    if (depth != SHORT)
        snprintf(name, sizeof name, "decode, %d stream%s at %lld", n, n > 1 ? "s" : "",
                 (long long)depth);
    bench_figure(b->out, name, "tok/s", rate + 1, k - 1);
    if (t.after.n_slot > 0)
        bench_lanes(b->out, name,
                    &(bench_stretch) { .n_stream = n,
                                       .seconds = (double)(t.to_us - t.from_us) / 1e6,
                                       .before = &t.before,
                                       .after = &t.after });
    return 0;
}

/* The numbers of --tokens, or those of other; returns how many, or an error. */
static int lengths_of(const bench_run *b, const char *other, int64_t out[LENGTHS],
                      hx_err *err)
{
    const char *p = b->c->tokens != NULL ? b->c->tokens : other;
    int n = 0;

    for (char *end; *p != '\0'; p = end + (*end == ',')) {
        out[n] = strtoll(p, &end, 10);
        if (end == p || (*end != ',' && *end != '\0') || out[n] < 1 ||
            out[n] > INT32_MAX || ++n == LENGTHS)
            return hx_fail(err, HX_EARG,
                           "--tokens %.60s: expected numbers, fewer than %d, like "
                           "32,32768",
                           b->c->tokens, LENGTHS);
    }
    return n;
}

static int bench_decode(bench_run *b, hx_err *err)
{
    static const int streams[] = { 1, 2, 4, 8 };
    int64_t depth[LENGTHS];
    const int n = lengths_of(b, "32", depth, err);
    int rc = HX_MIN(n, 0);

    for (int d = 0; d < n; d++)
        for (size_t i = 0;
             rc == 0 && i < HX_LEN(streams) && streams[i] <= b->info.max_streams; i++)
            rc = decode_at(b, streams[i], depth[d], err);
    return rc;
}

static int by_time(const void *a, const void *b)
{
    const double x = ((const hx_op_time *)a)->us, y = ((const hx_op_time *)b)->us;

    return (x < y) - (x > y);
}

/* Where a prompt's time goes: one more of them with every operation waited for; and what
 * came over the link in r, the last of the others. */
static int prefill_parts(bench_run *b, const char *what, bench_stream *s,
                         bench_reading *r, hx_err *err)
{
    hx_op_time t[HX_OP_TIMES];
    char name[128];
    int rc;

    hx_profile(b->e, true);
    rc = bench_streams(b->e, s, 1, NULL, NULL, err);
    hx_get_profile(b->e, t);
    hx_profile(b->e, false);
    if (rc != 0)
        return rc;
    qsort(t, HX_OP_TIMES, sizeof *t, by_time);
    for (int i = 0; i < HX_OP_TIMES && t[i].name != NULL; i++) {
        snprintf(name, sizeof name, "%s: %s", what, t[i].name);
        bench_one(b->out, name, "ms", t[i].us / 1e3);
        if (strcmp(t[i].name, "copies") != 0) /* those wait for the link */
            r->work_ms += t[i].us / 1e3;
    }
    if (r->bytes > 0)
        bench_link(b->out, what, r);
    return 0;
}

static int prefill_of(bench_run *b, int64_t n, hx_err *err)
{
    int32_t *ids = hx_new(int32_t, n);
    double rate[REPEATS + 1], ms[REPEATS + 1]; /* the first run warms up */
    bench_stream s = { .ids = ids, .n_ids = n, .max_new = 1 };
    hx_experts before, after;
    char name[64];
    int rc = ids == NULL ? hx_fail(err, HX_ENOMEM, "bench: no memory") : 0, k = 0;

    for (int64_t start = hx_now_us(); rc == 0 && again(k - 1, start); k++) {
        bench_random_ids(&b->info, b->seed + (uint64_t)(1000 * n + k), ids, n);
        if (k > 0)
            bench_prompt(b->out, ids, n);
        hx_get_experts(b->e, &before);
        rc = bench_streams(b->e, &s, 1, NULL, NULL, err);
        ms[k] = (double)HX_MAX(s.times.first_us - s.times.queued_us, 1) / 1e3;
        rate[k] = (double)n / ms[k] * 1e3;
    }
    if (rc == 0) {
        hx_get_experts(b->e, &after);
        snprintf(name, sizeof name, "time to first token, %lld tokens", (long long)n);
        bench_figure(b->out, name, "ms", ms + 1, k - 1);
        snprintf(name, sizeof name, "prefill, %lld tokens", (long long)n);
        bench_figure(b->out, name, "tok/s", rate + 1, k - 1);
        bench_random_ids(&b->info, b->seed + (uint64_t)(1000 * n + k), ids, n);
        bench_reading r = { .ms = ms[k - 1],
                            .bytes = after.stage_bytes - before.stage_bytes,
                            .n_chunk =
                                (n + b->info.chunk_tokens - 1) / b->info.chunk_tokens,
                            .experts = &after };
        rc = prefill_parts(b, name, &s, &r, err);
    }
    hx_free(ids);
    return rc;
}

static int bench_prefill(bench_run *b, hx_err *err)
{
    int64_t length[LENGTHS];
    const int n = lengths_of(b, "20,100,512,2048,8192,32768", length, err);
    int rc = HX_MIN(n, 0);

    for (int i = 0; rc == 0 && i < n; i++)
        if (b->c->tokens != NULL || length[i] < b->info.ctx_tokens)
            rc = prefill_of(b, length[i], err);
    return rc;
}

static int bench_engine(const hx_cli *c, bench_report *out, hx_info *info)
{
    const bool both = c->what == NULL;
    const int64_t start = hx_now_us();
    bench_run b = { .c = c, .out = out, .seed = c->has_seed ? (uint64_t)c->seed : 1 };
    hx_err err = { 0 };
    int rc;

    if ((rc = cli_open_engine(&b.e, c, NULL, NULL)) != 0)
        return rc;
    hx_get_info(b.e, &b.info);
    *info = b.info;
    printf("%s on %s\n", b.info.name, b.info.device);
    bench_one(out, "ready after", "s", (double)(hx_now_us() - start) / 1e6);
    if (c->protocol != NULL) {
        rc = bench_protocol(&b, c->protocol, &err);
    } else {
        out->protocol = "plain";
        out->about = "decode: streams of random ids, 32 or the depth, answers sampled at "
                     "temperature "
                     "1 past end ids, first run dropped; prefill: fresh random ids, one "
                     "token; its "
                     "parts: one run more, every operation waited for";
        out->random_text = true;
        if (both || strcmp(c->what, "decode") == 0)
            rc = bench_decode(&b, &err);
        if (rc == 0 && (both || strcmp(c->what, "prefill") == 0))
            rc = bench_prefill(&b, &err);
    }
    bench_one(out, "resident memory", "MB", (double)hx_sys_rss_bytes() / 1e6);
    /* Names are the engine's; the report outlives it. */
    info->name = strrchr(c->model, '/') != NULL ? strrchr(c->model, '/') + 1 : c->model;
    snprintf(out->device, sizeof out->device, "%s", b.info.device);
    info->device = out->device;
    bench_gpu(&out->gpu);
    hx_close(b.e);
    return rc != 0 ? cli_fail(&err) : 0;
}

int cmd_bench(const hx_cli *c)
{
    bench_report out = { .protocol = "ops",
                         .about =
                             "EXL3 products of 4096 inputs and 2048 outputs, read from "
                             "memory; repetitions one after another",
                         .random_text = true };
    const char *what = c->what != NULL ? c->what : "";
    const bool ops = strcmp(what, "ops") == 0, serve = strcmp(what, "serve") == 0,
               trace = strcmp(what, "trace") == 0;
    hx_info info = { 0 };
    int rc;

    if (strcmp(what, "compare") == 0)
        return bench_compare(c);
    if ((rc = cli_try_write(c->json)) != 0)
        return rc;
    if (serve) {
        out.protocol = "serve";
        out.about = "mixes of clients over HTTP";
        out.random_text = false;
        hx_sb_str(&out.extra, ",\"mixes\":");
        hx_json_put_str(&out.extra, hx_str_c(c->mixes != NULL ? c->mixes : "all"));
    }
    rc = ops     ? bench_ops(c, &out)
         : trace ? bench_trace(c, &out)
         : serve ? bench_serve(c, &out)
                 : bench_engine(c, &out, &info);
    if (rc == 0 && c->json != NULL)
        rc = write_report(&out, c, ops || serve || trace ? NULL : &info);
    hx_sb_free(&out.figures);
    hx_sb_free(&out.prompts);
    hx_sb_free(&out.extra);
    hx_sb_free(&out.gpu);
    return rc;
}
