/* replay.c - run --replay: takes one line of a record that serve --record wrote, runs the
 * request again and says whether the answer is the same. Called by run.c; uses hoist.h
 * only. */
#include <stdlib.h>

#include "cli/cli.h"

#define RECORD_MAX (1u << 30)

typedef struct {
    hx_json *line;
    hx_request r;
    int32_t *prompt, *want, *stop_ids, *forced;
    hx_str stop[16];
    hx_bias *bias;
    int64_t n_want;
    hx_str finish;
} recorded;

static void close_recorded(recorded *q)
{
    hx_free(q->prompt);
    hx_free(q->want);
    hx_free(q->stop_ids);
    hx_free(q->forced);
    hx_free(q->bias);
    hx_json_free(q->line);
}

/* Splits FILE:N; N 0 is the last line. */
static int64_t split_name(const char *arg, char *path, size_t cap)
{
    const char *colon = strrchr(arg, ':');
    char *end = NULL;
    const long long n = colon != NULL ? strtoll(colon + 1, &end, 10) : 0;
    const bool given = colon != NULL && end != colon + 1 && *end == '\0' && n > 0;

    snprintf(path, cap, "%.*s", given ? (int)(colon - arg) : (int)strlen(arg), arg);
    return given ? n : 0;
}

static int find_line(const char *arg, hx_json **out, hx_err *err)
{
    char path[4096], *text;
    const int64_t want = split_name(arg, path, sizeof path);
    hx_str line = { NULL, 0 };
    hx_err why = { 0 };
    int64_t n = 0;
    size_t bytes;
    int rc;

    if ((rc = hx_file_read(path, RECORD_MAX, &text, &bytes, err)) != 0)
        return rc;
    for (size_t at = 0; at < bytes && (want == 0 || n < want); n++) {
        const char *end = memchr(text + at, '\n', bytes - at);

        line =
            (hx_str) { text + at, end != NULL ? (size_t)(end - text) - at : bytes - at };
        at += line.n + 1;
    }
    if (n < HX_MAX(want, 1))
        rc = hx_fail(err, HX_EARG, "%s: %lld lines, no line %lld", path, (long long)n,
                     (long long)HX_MAX(want, 1));
    else if ((rc = hx_json_parse(out, line, 0, &why)) != 0)
        hx_fail(err, rc, "%s: line %lld: %.200s", path, (long long)n, why.msg);
    hx_free(text);
    return rc;
}

static int read_ids(const hx_json *list, int32_t **out, int64_t *n, hx_err *err)
{
    *n = (int64_t)hx_json_len(list);
    if ((*out = hx_new(int32_t, HX_MAX(*n, 1))) == NULL)
        return hx_fail(err, HX_ENOMEM, "record: no memory for %lld ids", (long long)*n);
    for (int64_t i = 0; i < *n; i++)
        (*out)[i] = (int32_t)hx_json_int(hx_json_at(list, (size_t)i), -1);
    return 0;
}

static float num(const hx_json *j, const char *name)
{
    return (float)hx_json_num(hx_json_get(j, name), 0);
}

static int64_t whole(const hx_json *j, const char *name)
{
    return hx_json_int(hx_json_get(j, name), 0);
}

static int read_lists(recorded *q, hx_err *err)
{
    const hx_json *j = q->line, *stop = hx_json_get(j, "stop"),
                  *bias = hx_json_get(j, "bias");
    int64_t n_ids;
    int rc;

    if ((rc = read_ids(hx_json_get(j, "prompt"), &q->prompt, &q->r.n_tokens, err)) != 0 ||
        (rc = read_ids(hx_json_get(j, "answer"), &q->want, &q->n_want, err)) != 0 ||
        (rc = read_ids(hx_json_get(j, "stop_ids"), &q->stop_ids, &n_ids, err)) != 0 ||
        (rc = read_ids(hx_json_get(j, "forced"), &q->forced, &q->r.n_forced, err)) != 0)
        return rc;
    q->r.forced = q->forced;
    q->r.tokens = q->prompt;
    q->r.stop_ids = q->stop_ids;
    q->r.n_stop_ids = (int32_t)n_ids;
    q->r.stop = q->stop;
    q->r.n_stop = (int32_t)HX_MIN(hx_json_len(stop), HX_LEN(q->stop));
    for (int32_t i = 0; i < q->r.n_stop; i++)
        q->stop[i] = hx_json_str(hx_json_at(stop, (size_t)i));
    q->r.n_bias = (int32_t)hx_json_len(bias);
    if ((q->bias = hx_new(hx_bias, HX_MAX(q->r.n_bias, 1))) == NULL)
        return hx_fail(err, HX_ENOMEM, "record: no memory");
    q->r.bias = q->bias;
    for (int32_t i = 0; i < q->r.n_bias; i++) {
        const hx_json *pair = hx_json_at(bias, (size_t)i);

        q->bias[i] = (hx_bias) { (int32_t)hx_json_int(hx_json_at(pair, 0), 0),
                                 (float)hx_json_num(hx_json_at(pair, 1), 0) };
    }
    return 0;
}

/* Somebody ended the reasoning while it went on: that is a budget, looked at afterwards. */
static void end_thinking(recorded *q)
{
    hx_request *r = &q->r;
    int64_t at = 0;

    while (at < q->n_want && q->want[at] != r->think_end)
        at++;
    if (at == q->n_want)
        return;
    r->think_max = at;
    if (at == 0) { /* which is no budget */
        r->forced = &r->think_end;
        r->n_forced = 1;
    }
}

static int read_recorded(recorded *q, const char *arg, hx_err *err)
{
    hx_request *r = &q->r;
    const hx_json *j;
    int rc;

    if ((rc = find_line(arg, &q->line, err)) != 0)
        return rc;
    j = q->line;
    if (hx_json_kind(hx_json_get(j, "prompt")) != HX_JSON_ARRAY)
        return hx_fail(err, HX_EFORMAT, "%.100s: the line is no record of a request",
                       arg);
    r->min_new = whole(j, "min_new");
    r->max_new = whole(j, "max_new");
    r->temperature = num(j, "temperature");
    r->top_p = num(j, "top_p");
    r->min_p = num(j, "min_p");
    r->top_k = (int32_t)whole(j, "top_k");
    r->repeat_penalty = num(j, "repeat_penalty");
    r->presence_penalty = num(j, "presence_penalty");
    r->frequency_penalty = num(j, "frequency_penalty");
    r->ignore_eos = hx_json_bool(hx_json_get(j, "ignore_eos"), false);
    r->grammar_kind = (hx_grammar_kind)whole(j, "grammar_kind");
    r->grammar_after = (int32_t)whole(j, "grammar_after");
    r->grammar_at = (int32_t)whole(j, "grammar_at");
    r->grammar_lazy = hx_json_bool(hx_json_get(j, "grammar_lazy"), false);
    r->grammar_again = hx_json_bool(hx_json_get(j, "grammar_again"), false);
    r->grammar = hx_json_str(hx_json_get(j, "grammar"));
    r->think_end = (int32_t)whole(j, "think_end");
    r->think_max = whole(j, "think_max");
    /* A string: JSON numbers end at 2^53 in many readers. */
    const hx_str seed = hx_json_str(hx_json_get(j, "seed"));
    for (size_t i = 0; i < seed.n && seed.p[i] >= '0' && seed.p[i] <= '9'; i++)
        r->seed = r->seed * 10 + (uint64_t)(seed.p[i] - '0');
    q->finish = hx_json_str(hx_json_get(j, "finish"));
    if ((rc = read_lists(q, err)) == 0 &&
        hx_json_bool(hx_json_get(j, "thinking_ended"), false))
        end_thinking(q);
    return rc;
}

/* Compares as the tokens come; -1: no difference yet, else where. */
static int64_t compare(const recorded *q, const hx_event *ev, int64_t at)
{
    for (int32_t i = 0; i < ev->n_tokens; i++)
        if (at + i >= q->n_want || ev->tokens[i] != q->want[at + i])
            return at + i;
    return -1;
}

/* Says whether at tokens, the last event's among them, are those of the record; diff: the
 * first that is not, or -1. 0: they are, and the answer ended as it did. */
static int report(const recorded *q, const hx_event *ev, int64_t at, int64_t diff,
                  bool whole_answer)
{
    static const char *const finish[] = { "none", "eos", "text", "length", "cancel" };
    const bool same_end = !whole_answer || hx_str_is(q->finish, finish[ev->stop]);

    if (diff < 0 && at == q->n_want && same_end) {
        printf("equal: %lld tokens, %.*s\n", (long long)at, (int)q->finish.n,
               q->finish.p);
        return 0;
    }
    if (diff >= 0)
        printf("different: token %lld of the answer is %d, was %d\n", (long long)diff,
               ev->tokens[diff - (at - ev->n_tokens)],
               diff < q->n_want ? q->want[diff] : -1);
    else
        printf("different: ends after %lld tokens (%s), was %lld (%.*s)\n", (long long)at,
               finish[ev->stop], (long long)q->n_want, (int)q->finish.n, q->finish.p);
    return HX_EFORMAT;
}

static int run_again(hx_engine *e, recorded *q, hx_err *err)
{
    const bool whole_answer = hx_str_is(q->finish, "eos") ||
                              hx_str_is(q->finish, "text") ||
                              hx_str_is(q->finish, "length");
    int64_t at = 0, diff = -1;
    hx_event ev = { 0 };
    hx_stream *s;
    int rc;

    /* What was cut short is compared as far as it came. */
    if (!whole_answer)
        q->r.max_new = HX_MAX(q->n_want, 1);
    if ((rc = hx_submit(e, &q->r, &s, err)) != 0)
        return rc;
    while (diff < 0 && ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR) {
        hx_next(s, &ev, -1);
        if (ev.kind == HX_EV_TOKENS) {
            diff = compare(q, &ev, at);
            at += ev.n_tokens;
        }
    }
    if (ev.kind == HX_EV_ERROR)
        rc = hx_fail(err, ev.err.code, "%.200s", ev.err.msg);
    else
        rc = report(q, &ev, at, diff, whole_answer);
    hx_stream_free(s);
    return rc;
}

int cli_replay(hx_engine *e, const hx_cli *c)
{
    recorded q = { 0 };
    hx_err err = { 0 };
    int rc = read_recorded(&q, c->replay, &err);

    if (rc == 0 && hx_json_bool(hx_json_get(q.line, "forced_later"), false))
        fprintf(stderr, "hoist: warning: tokens of this answer were forced from outside; "
                        "it cannot come out the same\n");
    if (rc == 0)
        rc = run_again(e, &q, &err);
    close_recorded(&q);
    if (err.code != 0)
        return cli_fail(&err);
    return rc != 0 ? 1 : 0;
}
