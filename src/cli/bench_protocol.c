/* bench_protocol.c - measurements that follow published protocols, so that figures can stand
 * beside others'. Called by bench.c. docs/QUALITY.md and docs/SPEED.md say whose they are and
 * where ours differ: ours run inside the process, so no HTTP is in them.
 *
 * A protocol over random ids can never carry a figure of speculation: drafts of random text are
 * guessed badly or, in a loop, too well. The table says which those are. */
#include <math.h>

#include "cli/bench.h"

enum { MAX_STREAMS = 4 };

/* ---- random-prefill -------------------------------------------------------- */

/* Fresh random ids every time; the clock stops at the first event, then the client leaves. */
static int random_prefill(bench_run *b, hx_err *err)
{
    static const int64_t lengths[] = { 512 /* warms up */, 8192, 32768 };
    enum { REPS = 3 };
    int32_t *ids = hx_new(int32_t, 32768);
    int rc = ids == NULL ? hx_fail(err, HX_ENOMEM, "bench: no memory") : 0;
    int measured = 0;

    for (size_t i = 0; rc == 0 && i < HX_LEN(lengths); i++) {
        const int64_t n = lengths[i];
        double rate[REPS], ttft[REPS];
        char name[64];

        if (n + 64 > b->info.ctx_tokens) {
            printf("%lld tokens: skipped, the context is %lld (--ctx)\n", (long long)n,
                   (long long)b->info.ctx_tokens);
            continue;
        }
        for (int k = 0; rc == 0 && k < (i == 0 ? 1 : REPS); k++) {
            bench_stream s = { .ids = ids, .n_ids = n, .first_only = true };
            const int64_t start = hx_now_us();

            bench_random_ids(&b->info, b->seed + 100 * i + (uint64_t)k, ids, n);
            rc = bench_streams(b->e, &s, 1, NULL, NULL, err);
            ttft[k] = (double)(hx_now_us() - start) / 1e6;
            rate[k] = (double)n / ttft[k];
            if (i > 0)
                bench_prompt(b->out, ids, n);
        }
        if (rc != 0 || i == 0)
            continue;
        measured++;
        snprintf(name, sizeof name, "prefill, %lld tokens", (long long)n);
        bench_figure(b->out, name, "tok/s", rate, REPS);
        snprintf(name, sizeof name, "time to first event, %lld tokens", (long long)n);
        bench_figure(b->out, name, "s", ttft, REPS);
    }
    hx_free(ids);
    if (rc == 0 && measured == 0)
        rc = hx_fail(err, HX_EARG,
                     "random-prefill: needs a context of 8256 tokens (--ctx)");
    return rc;
}

/* ---- greedy decode ------------------------------------------------------------ */

static const char *const topics[] = {
    "how a transistor works",
    "the water cycle",
    "how a compiler works",
    "the causes of the French Revolution",
    "how vaccines train immunity",
    "plate tectonics",
    "how public-key cryptography works",
    "the history of the printing press",
};

/* The ids of a prompt with thinking closed; freed with hx_free(). */
static int topic_ids(bench_run *b, int round, int stream, int32_t **ids, int64_t *n,
                     hx_err *err)
{
    char text[256];

    /* The first line differs everywhere, so no kept prefix helps. */
    snprintf(text, sizeof text,
             "Request %llu-%d-%d.\nWrite a detailed explanation of %s "
             "(variant %d).",
             (unsigned long long)b->seed, round, stream,
             topics[(size_t)(round * MAX_STREAMS + stream) % HX_LEN(topics)], stream);
    return cli_chat_ids(b->e, text, true, ids, n, err);
}

static void count_stops(bench_run *b, int natural, int all)
{
    char json[64];

    snprintf(json, sizeof json, "{\"natural\":%d,\"all\":%d}", natural, all);
    bench_member(b->out, "ends", json);
    if (natural < all)
        printf("%d of %d answers were cut off at their limit\n", all - natural, all);
}

typedef struct {
    double aggregate, per_stream, ttft;
    int natural;
} round_result;

static int decode_round(bench_run *b, int round, int streams, round_result *out,
                        hx_err *err)
{
    bench_stream s[MAX_STREAMS] = { 0 };
    int32_t *ids[MAX_STREAMS] = { 0 };
    int64_t first = INT64_MAX, last = 0, all = 0;
    int rc = 0;

    *out = (round_result) { 0 };
    for (int i = 0; rc == 0 && i < streams; i++) {
        if ((rc = topic_ids(b, round, i, &ids[i], &s[i].n_ids, err)) != 0)
            break;
        s[i].ids = ids[i];
        s[i].max_new = b->c->n != 0
                           ? b->c->n
                           : HX_MAX(64, (b->info.ctx_tokens - s[i].n_ids) / streams - 64);
        bench_prompt(b->out, ids[i], s[i].n_ids);
    }
    if (rc == 0)
        rc = bench_streams(b->e, s, streams, NULL, NULL, err);
    for (int i = 0; rc == 0 && i < streams; i++) {
        const hx_times *t = &s[i].times;

        first = HX_MIN(first, t->first_us);
        last = HX_MAX(last, t->done_us);
        all += s[i].n;
        out->ttft = HX_MAX(out->ttft, (double)(t->first_us - t->queued_us) / 1e6);
        out->natural += s[i].stop == HX_STOP_EOS;
        out->per_stream += (double)(s[i].n - 1) / streams * 1e6 /
                           (double)HX_MAX(t->done_us - t->first_us, 1);
    }
    out->aggregate = (double)all * 1e6 / (double)HX_MAX(last - first, 1);
    for (int i = 0; i < streams; i++)
        hx_free(ids[i]);
    return rc;
}

static int greedy_decode(bench_run *b, hx_err *err)
{
    static const int streams[] = { 1, 2, 4 };
    enum { ROUNDS = 2 };
    int natural = 0, all = 0, rc;

    for (size_t i = 0; i < HX_LEN(streams); i++) {
        double aggregate[ROUNDS], per_stream[ROUNDS], ttft[ROUNDS];
        char name[64];

        if (streams[i] > b->info.max_streams)
            continue;
        for (int k = 0; k < ROUNDS; k++) {
            round_result r;

            if ((rc = decode_round(b, (int)i * ROUNDS + k, streams[i], &r, err)) != 0)
                return rc;
            aggregate[k] = r.aggregate;
            per_stream[k] = r.per_stream;
            ttft[k] = r.ttft;
            natural += r.natural;
            all += streams[i];
        }
        snprintf(name, sizeof name, "decode C%d, together", streams[i]);
        bench_figure(b->out, name, "tok/s", aggregate, ROUNDS);
        snprintf(name, sizeof name, "decode C%d, each", streams[i]);
        bench_figure(b->out, name, "tok/s", per_stream, ROUNDS);
        snprintf(name, sizeof name, "decode C%d, slowest first token", streams[i]);
        bench_figure(b->out, name, "s", ttft, ROUNDS);
    }
    count_stops(b, natural, all);
    return 0;
}

/* ---- decode at 32k ---------------------------------------------------------------- */

/* One prefix of random ids for all rounds: the second goes on from what the first left. */
static int decode_32k(bench_run *b, hx_err *err)
{
    enum { PREFIX = 32768, ROUNDS = 2 };
    const int64_t max_new = b->c->n != 0 ? b->c->n : 256;
    double rate[ROUNDS], ttft[ROUNDS];
    int32_t *ids, *question = NULL;
    int64_t n_question = 0;
    int natural = 0, rc;

    if ((rc = topic_ids(b, 99, 0, &question, &n_question, err)) != 0)
        return rc;
    if (PREFIX + n_question + max_new > b->info.ctx_tokens) {
        hx_free(question);
        return hx_fail(
            err, HX_EARG,
            "decode-32k: needs a context of %lld tokens, this engine has %lld; give "
            "--ctx",
            (long long)(PREFIX + n_question + max_new), (long long)b->info.ctx_tokens);
    }
    if ((ids = hx_new(int32_t, PREFIX + n_question)) == NULL)
        rc = hx_fail(err, HX_ENOMEM, "bench: no memory");
    for (int k = 0; rc == 0 && k < ROUNDS; k++) {
        bench_stream s = { .ids = ids, .n_ids = PREFIX + n_question, .max_new = max_new };

        bench_random_ids(&b->info, b->seed + 32, ids, PREFIX);
        memcpy(ids + PREFIX, question, (size_t)n_question * sizeof *ids);
        bench_prompt(b->out, ids, s.n_ids);
        if ((rc = bench_streams(b->e, &s, 1, NULL, NULL, err)) != 0)
            break;
        rate[k] = (double)(s.n - 1) * 1e6 /
                  (double)HX_MAX(s.times.done_us - s.times.first_us, 1);
        ttft[k] = (double)(s.times.first_us - s.times.queued_us) / 1e6;
        natural += s.stop == HX_STOP_EOS;
    }
    if (rc == 0) {
        bench_figure(b->out, "decode C1 at 32k", "tok/s", rate, ROUNDS);
        bench_one(b->out, "first token at 32k, fresh", "s", ttft[0]);
        bench_one(b->out, "first token at 32k, again", "s", ttft[1]);
        count_stops(b, natural, ROUNDS);
    }
    hx_free(ids);
    hx_free(question);
    return rc;
}

/* ---- evenness ------------------------------------------------------------------------ */

enum { MAX_EVENTS = 1 << 16 };

typedef struct {
    int64_t *us, *chars; /* [n] when, and how many characters so far */
    int n;
    int64_t so_far;
} delivery;

static bool note(void *ud, int i, int64_t now_us, const hx_event *ev)
{
    delivery *d = ud;

    (void)i; /* there is one stream */
    d->so_far += (int64_t)ev->bytes.n;
    if (d->n < MAX_EVENTS) {
        d->us[d->n] = now_us;
        d->chars[d->n++] = d->so_far;
    }
    return false;
}

/* Share of all characters that had come by a time. */
static double share_by(const delivery *d, int64_t us)
{
    int64_t had = 0;

    for (int i = 0; i < d->n && d->us[i] <= us; i++)
        had = d->chars[i];
    return d->so_far > 0 ? (double)had / (double)d->so_far : NAN;
}

/* Half of the text should be there at half time, and the end should bring no flood. */
static int evenness(bench_run *b, hx_err *err)
{
    delivery d = { .us = hx_new(int64_t, MAX_EVENTS),
                   .chars = hx_new(int64_t, MAX_EVENTS) };
    bench_stream s = { .max_new = b->c->n };
    int32_t *ids = NULL;
    int rc =
        d.us == NULL || d.chars == NULL ? hx_fail(err, HX_ENOMEM, "bench: no memory") : 0;

    if (rc == 0)
        rc = cli_chat_ids(b->e, "Write an essay about the history of clocks.", true, &ids,
                          &s.n_ids, err);
    s.ids = ids;
    if (rc == 0) {
        bench_prompt(b->out, ids, s.n_ids);
        rc = bench_streams(b->e, &s, 1, note, &d, err);
    }
    if (rc == 0 && d.n < 2)
        rc = hx_fail(err, HX_EARG,
                     "evenness: the answer came in %d pieces; no spread to measure", d.n);
    if (rc == 0) {
        const int64_t first = d.us[0], last = d.us[d.n - 1];
        const double half = share_by(&d, first + (last - first) / 2),
                     tail = 1 - share_by(&d, last - 1000000);

        bench_one(b->out, "events", "", d.n);
        bench_one(b->out, "span", "s", (double)(last - first) / 1e6);
        bench_one(b->out, "share by half time", "", half);
        bench_one(b->out, "share in the last second", "", tail);
        bench_member(b->out, "pass", half >= 0.40 && tail <= 0.10 ? "true" : "false");
        if (last - first < 10000000)
            printf("the answer took under 10 s: its last second is over a tenth of it "
                   "anyway\n");
    }
    hx_free(ids);
    hx_free(d.us);
    hx_free(d.chars);
    return rc;
}

/* ---- structured, prose ------------------------------------------------------------------ */

static int one_prompt(bench_run *b, const char *text, hx_err *err)
{
    enum { RUNS = 5 };
    double rate[RUNS], wall[RUNS];
    int32_t *ids;
    int64_t n;
    int natural = 0, rc;

    if ((rc = cli_chat_ids(b->e, text, true, &ids, &n, err)) != 0)
        return rc;
    bench_prompt(b->out, ids, n);
    for (int k = 0; rc == 0 && k < RUNS; k++) {
        bench_stream s = { .ids = ids,
                           .n_ids = n,
                           .max_new = b->c->n != 0 ? b->c->n : 400 };

        if ((rc = bench_streams(b->e, &s, 1, NULL, NULL, err)) != 0)
            break;
        rate[k] = (double)(s.n - 1) * 1e6 /
                  (double)HX_MAX(s.times.done_us - s.times.first_us, 1);
        wall[k] =
            (double)s.n * 1e6 / (double)HX_MAX(s.times.done_us - s.times.queued_us, 1);
        natural += s.stop == HX_STOP_EOS;
    }
    hx_free(ids);
    if (rc != 0)
        return rc;
    bench_figure(b->out, "decode", "tok/s", rate, RUNS);
    bench_figure(b->out, "delivered over the whole time", "tok/s", wall, RUNS);
    count_stops(b, natural, RUNS);
    return 0;
}

static int structured(bench_run *b, hx_err *err)
{
    return one_prompt(
        b, "Count from 1 to 200, separated by commas. Write only the numbers.", err);
}

static int prose(bench_run *b, hx_err *err)
{
    return one_prompt(b, "Explain how a hash map works, in plain prose.", err);
}

/* ---- the table ---------------------------------------------------------------------------- */

static const struct {
    const char *name, *about;
    bool random_text;
    int (*run)(bench_run *b, hx_err *err);
} protocols[] = {
    { "random-prefill",
      "warm-up of 512 random ids; then fresh random ids of each length, 3 times; rate = "
      "ids / time "
      "to the first event; the answer is cancelled there",
      true, random_prefill },
    { "greedy-decode",
      "1, 2, 4 streams, 2 rounds; different prompts, thinking closed; greedy to the "
      "natural end "
      "(or -n); together = all tokens / (last - earliest first), each = (n - 1) / (last "
      "- first)",
      false, greedy_decode },
    { "decode-32k",
      "one prefix of 32768 random ids, then a question; greedy; 2 rounds over the same "
      "prefix",
      true, decode_32k },
    { "evenness",
      "one essay, greedy; characters by time of each event; pass: at least 0.40 by half "
      "time and at "
      "most 0.10 in the last second",
      false, evenness },
    { "structured",
      "counting 1 to 200, thinking closed, greedy, 5 runs of up to 400 tokens", false,
      structured },
    { "prose",
      "an explanation of hash maps, thinking closed, greedy, 5 runs of up to 400 tokens",
      false, prose },
};

int bench_protocol(bench_run *b, const char *name, hx_err *err)
{
    for (size_t i = 0; i < HX_LEN(protocols); i++)
        if (strcmp(name, protocols[i].name) == 0) {
            b->out->protocol = protocols[i].name;
            b->out->about = protocols[i].about;
            b->out->random_text = protocols[i].random_text;
            return protocols[i].run(b, err);
        }
    return hx_fail(
        err, HX_EARG,
        "--protocol: \"%.40s\", expected random-prefill, greedy-decode, decode-32k, "
        "evenness, structured or prose",
        name);
}
