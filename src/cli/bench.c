/* bench.c - `hoist bench`: the report, streams that run together, and the plain decode and
 * prefill figures. Called by main.c. Uses hoist.h only; bench ops is in tools.c, the protocols
 * that match published ones in bench_protocol.c, comparing in bench_compare.c. */
#include <math.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <time.h>

#include "cli/bench.h"

#define REPEATS 5

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
    printf("%-44s %12.4g %s", name, mid, unit);
    if (n > 1)
        printf("  (%.4g to %.4g, %d runs)", lo, hi, n);
    putchar('\n');
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
    if (info == NULL) {
        hx_sb_str(b, "null");
        return;
    }
    hx_sb_str(b, "{\"name\":");
    hx_json_put_str(b, hx_str_c(info->name));
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
    bench_machine(&b, c->threads != 0 ? (int)c->threads : hx_sys_n_cpu());
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
    b.bad |= r->figures.bad || r->prompts.bad || r->extra.bad;
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

/* Takes what stream i has, waiting up to wait_ms. 1 when it has ended. */
static int take(hx_stream *stream, bench_stream *s, int wait_ms, bench_event_fn *fn,
                void *ud, hx_err *err)
{
    hx_event ev = { 0 };

    while (hx_next(stream, &ev, wait_ms) == 1) {
        s->n = ev.generated;
        s->times = ev.times;
        if (ev.kind == HX_EV_TOKENS && fn != NULL)
            fn(ud, hx_now_us(), &ev);
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
            if ((rc = take(stream[i], &s[i], first ? 5 : 0, fn, ud, err)) == 1) {
                ended[i] = true;
                left--;
                rc = 0;
            }
            first = 0;
        }
    for (int i = 0; i < open; i++)
        hx_stream_free(stream[i]);
    return rc;
}

/* ---- decode, prefill ----------------------------------------------------------- */

static int bench_decode(bench_run *b, hx_err *err)
{
    static const int streams[] = { 1, 2, 4, 8 };
    const int64_t n_new = b->c->n != 0 ? b->c->n : 128;
    int rc;

    for (size_t i = 0; i < HX_LEN(streams) && streams[i] <= b->info.max_streams; i++) {
        double rate[REPEATS], seconds = 0;
        hx_experts before, after;
        char name[64];

        for (int k = -1; k < REPEATS; k++) { /* the first run warms up */
            bench_stream s[8] = { 0 };
            int32_t ids[8][32];
            int64_t first = 0, last = 0;

            hx_get_experts(b->e, &before); /* of the last run */

            for (int j = 0; j < streams[i]; j++) {
                const uint64_t seed = b->seed + (uint64_t)(k * 64 + j);

                bench_random_ids(&b->info, seed, ids[j], 32);
                s[j] = (bench_stream) { .ids = ids[j],
                                        .n_ids = 32,
                                        .max_new = n_new,
                                        .temperature = 1,
                                        .seed = seed,
                                        .ignore_eos = true };
            }
            if ((rc = bench_streams(b->e, s, streams[i], NULL, NULL, err)) != 0)
                return rc;
            for (int j = 0; j < streams[i]; j++) {
                first = HX_MAX(first, s[j].times.first_us);
                last = HX_MAX(last, s[j].times.done_us);
            }
            seconds = (double)(last - first) / 1e6;
            if (k >= 0)
                rate[k] = (double)(streams[i] * (n_new - 1)) / seconds;
        }
        snprintf(name, sizeof name, "decode, %d stream%s", streams[i],
                 streams[i] > 1 ? "s" : "");
        bench_figure(b->out, name, "tok/s", rate, REPEATS);
        hx_get_experts(b->e, &after);
        if (after.n_slot > 0)
            bench_lanes(b->out, name, &before, &after, seconds);
    }
    return 0;
}

static int bench_prefill(bench_run *b, hx_err *err)
{
    static const int64_t lengths[] = { 20, 100, 512, 2048, 8192 };
    int32_t *ids = hx_new(int32_t, 8192);
    int rc = ids == NULL ? hx_fail(err, HX_ENOMEM, "bench: no memory") : 0;

    for (size_t i = 0; rc == 0 && i < HX_LEN(lengths) && lengths[i] < b->info.ctx_tokens;
         i++) {
        double rate[REPEATS], ms[REPEATS];
        char name[64];

        for (int k = -1; rc == 0 && k < REPEATS; k++) {
            bench_stream s = { .ids = ids, .n_ids = lengths[i], .max_new = 1 };
            double us;

            bench_random_ids(&b->info, b->seed + 1000 * (i + 1) + (uint64_t)k, ids,
                             lengths[i]);
            rc = bench_streams(b->e, &s, 1, NULL, NULL, err);
            us = (double)HX_MAX(s.times.first_us - s.times.queued_us, 1);
            if (k >= 0) {
                rate[k] = (double)lengths[i] / us * 1e6;
                ms[k] = us / 1e3;
            }
        }
        if (rc != 0)
            break;
        snprintf(name, sizeof name, "prefill, %lld tokens", (long long)lengths[i]);
        bench_figure(b->out, name, "tok/s", rate, REPEATS);
        snprintf(name, sizeof name, "time to first token, %lld tokens",
                 (long long)lengths[i]);
        bench_figure(b->out, name, "ms", ms, REPEATS);
    }
    hx_free(ids);
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
        out->about =
            "decode: streams of 32 random ids, answers sampled at temperature 1 past "
            "end ids, first run dropped; prefill: fresh random ids, one token";
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
    const bool ops = strcmp(what, "ops") == 0, serve = strcmp(what, "serve") == 0;
    hx_info info = { 0 };
    int rc;

    if (strcmp(what, "compare") == 0)
        return bench_compare(c);
    if (serve) {
        out.protocol = "serve";
        out.about = "mixes of clients over HTTP";
        out.random_text = false;
    }
    rc = ops     ? bench_ops(c, &out)
         : serve ? bench_serve(c, &out)
                 : bench_engine(c, &out, &info);
    if (rc == 0 && c->json != NULL)
        rc = write_report(&out, c, ops || serve ? NULL : &info);
    hx_sb_free(&out.figures);
    hx_sb_free(&out.prompts);
    hx_sb_free(&out.extra);
    return rc;
}
