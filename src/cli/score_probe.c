/* score_probe.c - probes of `hoist score` that generate: greedy continuations to compare, and
 * codes hidden in long filler. Called by score.c; uses hoist.h as any program would. */
#include <errno.h>
#include <stdlib.h>

#include "cli/score.h"

int score_greedy(hx_engine *e, const score_greedy_args *a, int64_t *n_out, hx_err *err)
{
    const hx_request r = {
        .tokens = a->prompt, .n_tokens = a->n_prompt, .max_new = a->n_new, .n_top = 2
    };
    hx_stream *s;
    hx_event ev = { 0 };
    int rc;

    *n_out = 0;
    if ((rc = hx_submit(e, &r, &s, err)) != 0)
        return rc;
    while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR) {
        hx_next(s, &ev, -1);
        for (int32_t i = 0; ev.kind == HX_EV_TOKENS && i < ev.n_tokens; i++) {
            const hx_choice *top = &ev.top[2 * i];

            a->out[*n_out] = ev.tokens[i];
            a->margin[(*n_out)++] = top[0].logprob - top[1].logprob;
        }
    }
    if (ev.kind == HX_EV_ERROR) {
        rc = ev.err.code;
        *err = ev.err;
    }
    hx_stream_free(s);
    return rc;
}

/* ---- needle ----------------------------------------------------------- */

#define N_DEPTH    5
#define ANSWER_MAX 64

/* Plain sentences in a seeded order: no sentence names a number or a code. */
static void put_filler(hx_sb *b, uint64_t seed, uint64_t i)
{
    static const char *const who[] = { "The baker",   "My neighbour",  "A young sailor",
                                       "The teacher", "An old friend", "The gardener",
                                       "A traveller", "The librarian" };
    static const char *const did[] = { "walked along", "wrote about", "slowly left",
                                       "painted",      "remembered",  "looked for",
                                       "returned to",  "spoke of" };
    static const char *const what[] = { "the river",         "a quiet garden",
                                        "the white house",   "the long road",
                                        "an open window",    "the market",
                                        "the small harbour", "a field of barley" };
    const uint64_t r = hx_rng_at(seed, i);

    hx_sb_printf(b, "%s %s %s. ", who[r % 8], did[r / 8 % 8], what[r / 64 % 8]);
}

/* The prompt's ids, thinking closed; freed with hx_free(). */
static int needle_prompt(hx_engine *e, int64_t n_tokens, double depth, int code,
                         uint64_t seed, int32_t **ids, int64_t *n, hx_err *err)
{
    hx_sb text = { 0 };
    bool put = false;
    int rc = 0;

    *ids = NULL;
    hx_sb_str(&text, "Read this text. ");
    /* About 7 tokens a sentence; what the tokenizer says goes to the report. */
    for (int64_t i = 0, all = HX_MAX(n_tokens / 7, 4); i < all; i++) {
        if (!put && (double)i >= depth * (double)all) {
            hx_sb_printf(&text, "The secret code is %d. ", code);
            put = true;
        }
        put_filler(&text, seed, (uint64_t)i);
    }
    hx_sb_str(&text, "What is the secret code?");
    rc = text.bad ? hx_fail(err, HX_ENOMEM, "needle: no memory for its text")
                  : cli_chat_ids(e, text.p, true, ids, n, err);
    hx_sb_free(&text);
    return rc;
}

static int needle_once(hx_engine *e, int64_t n_tokens, double depth, uint64_t seed,
                       hx_sb *b, bool *found, hx_err *err)
{
    const int code = (int)(10000 + hx_rng_at(seed, 1u << 30) % 90000);
    int32_t *ids = NULL, out[ANSWER_MAX];
    float margin[ANSWER_MAX];
    char text[ANSWER_MAX * 32], want[16];
    int64_t n = 0, n_out = 0, n_text;
    int rc;

    if ((rc = needle_prompt(e, n_tokens, depth, code, seed, &ids, &n, err)) == 0) {
        const score_greedy_args a = { ids, n, ANSWER_MAX, out, margin };

        rc = score_greedy(e, &a, &n_out, err);
    }
    hx_free(ids);
    if (rc != 0)
        return rc;
    n_text = HX_MIN(hx_detokenize(e, out, n_out, text, sizeof text - 1),
                    (int64_t)sizeof text - 1);
    text[HX_MAX(n_text, 0)] = '\0';
    snprintf(want, sizeof want, "%d", code);
    *found = strstr(text, want) != NULL;
    hx_sb_printf(b,
                 "{\"prompt_tokens\":%lld,\"depth\":%.2f,\"code\":\"%d\",\"found\":%s,"
                 "\"answer\":",
                 (long long)n, depth, code, *found ? "true" : "false");
    hx_json_put_str(b, hx_str_c(text));
    hx_sb_char(b, '}');
    return 0;
}

int score_needle(hx_engine *e, const char *lengths, uint64_t seed, hx_sb *b, hx_err *err)
{
    const char *p = lengths;
    hx_info info;
    int rc = 0;

    hx_get_info(e, &info);
    hx_sb_char(b, '[');
    while (rc == 0) {
        char *end;
        const long long n = strtoll(p, &end, 10);
        int found = 0;

        if (n < 32 || n > INT32_MAX || (*end != '\0' && *end != ','))
            return hx_fail(err, HX_EARG,
                           "--needle: \"%.60s\", expected lengths like 1000,8000",
                           lengths);
        if (n > info.ctx_tokens)
            return hx_fail(err, HX_EARG, "--needle: %lld tokens, the context has %lld", n,
                           (long long)info.ctx_tokens);
        for (int d = 0; rc == 0 && d < N_DEPTH; d++) {
            bool yes = false;

            hx_sb_str(b, b->p[b->n - 1] == '[' ? "" : ",");
            rc = needle_once(e, n, 0.1 + 0.2 * d, seed * 64 + (uint64_t)d, b, &yes, err);
            found += yes;
        }
        if (rc == 0)
            printf("needle, %lld tokens: %d of %d found\n", n, found, N_DEPTH);
        if (*end == '\0')
            break;
        p = end + 1;
    }
    hx_sb_char(b, ']');
    return rc;
}
