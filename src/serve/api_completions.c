/* api_completions.c - POST /v1/completions: raw prompts (text or ids, one or a list) to
 * the neutral request, answers to JSON or chunks, log-probabilities in the old shape.
 *
 * Requests arrive from server.c on a worker, answers from generate.c on the pump; shares
 * what answers are wrapped in with api_openai.c. */
#include "serve/serve.h"

#include <stdio.h>
#include <time.h>

#define N_TOP_MAX   20
#define BEST_OF_MAX 16

/* The four lists of a logprobs object, without brackets. */
typedef struct {
    hx_sb tokens, values, tops, offsets;
} old_logprobs;

typedef struct {
    hx_sb text;      /* unstreamed */
    old_logprobs lp; /* not yet handed out */
    hx_stop stop;
    double sum; /* best_of: of the log-probabilities of n tokens */
    int64_t n;
    bool taken; /* best_of: answered already */
} choice;

typedef struct {
    hx_call *c;
    hx_generate req;
    const hx_prompt *prompt; /* [req.n_prompt] */
    const hx_str *text;      /* [req.n_prompt] as given, or decoded where it is echoed */
    hx_str suffix;           /* {NULL, 0}: none */
    bool no_answer;          /* max_tokens 0: the prompt is all there is */
    bool logprobs;           /* asked for; best_of needs them in any case */
    int32_t n_best;          /* answers of each prompt that are given, of req.n */
    hx_sb head;              /* of every chunk, up to its choices */
    choice *choice;          /* [n_choice] */
    int32_t n_choice;
    hx_openai_sum sum;
} completion;

/* ---- log-probabilities -------------------------------------------------- */

/* A token as a JSON string. Part of a character is spelled bytes:\xe2\x80, as OpenAI did.
 */
static void put_token(const completion *t, hx_sb *b, int32_t id)
{
    const hx_str s = hx_token_bytes(t->c->engine, id, NULL);

    if (hx_utf8_ok(s.p, s.n)) {
        hx_json_put_str(b, s);
        return;
    }
    hx_sb_str(b, "\"bytes:");
    for (size_t i = 0; i < s.n; i++)
        hx_sb_printf(b, "\\\\x%02x", (unsigned char)s.p[i]);
    hx_sb_char(b, '"');
}

/* JSON has no -Infinity. */
static void put_value(hx_sb *b, float v)
{
    hx_sb_printf(b, "%.6g", (double)HX_MAX(v, -9999.0f));
}

/* The chosen token comes last where it is not among the most likely. */
static void put_top(const completion *t, hx_sb *b, const hx_choice *top, hx_choice chosen)
{
    bool among = false;

    hx_sb_char(b, '{');
    for (int32_t i = 0; i < t->req.sampling.n_top || !among; i++) {
        const hx_choice c = i < t->req.sampling.n_top ? top[i] : chosen;

        if (i > 0)
            hx_sb_char(b, ',');
        put_token(t, b, c.token);
        hx_sb_char(b, ':');
        put_value(b, c.logprob);
        among = among || c.token == chosen.token;
    }
    hx_sb_char(b, '}');
}

/* logprob NULL: the first token of a prompt has none. */
static void add_logprob(const completion *t, old_logprobs *lp, int32_t id,
                        const float *logprob, const hx_choice *top, int64_t offset)
{
    const char *comma = lp->tokens.n > 0 ? "," : "";

    hx_sb_str(&lp->tokens, comma);
    put_token(t, &lp->tokens, id);
    hx_sb_str(&lp->values, comma);
    if (logprob != NULL)
        put_value(&lp->values, *logprob);
    else
        hx_sb_str(&lp->values, "null");
    hx_sb_str(&lp->tops, comma);
    if (logprob != NULL && top != NULL)
        put_top(t, &lp->tops, top, (hx_choice) { id, *logprob });
    else
        hx_sb_str(&lp->tops, "null");
    hx_sb_printf(&lp->offsets, "%s%lld", comma, (long long)offset);
}

/* Writes and empties. */
static void put_logprobs(const completion *t, hx_sb *b, old_logprobs *lp)
{
    const struct {
        const char *name;
        hx_sb *list;
    } part[] = {
        { "\"tokens\":[", &lp->tokens },
        { "],\"token_logprobs\":[", &lp->values },
        { "],\"top_logprobs\":[", &lp->tops },
        { "],\"text_offset\":[", &lp->offsets },
    };

    if (!t->logprobs) {
        hx_sb_str(b, "\"logprobs\":null");
        return;
    }
    hx_sb_str(b, "\"logprobs\":{");
    for (size_t i = 0; i < HX_LEN(part); i++) {
        hx_sb_str(b, part[i].name);
        hx_sb_add(b, part[i].list->p, part[i].list->n);
        b->bad = b->bad || part[i].list->bad;
        part[i].list->n = 0;
    }
    hx_sb_str(b, "]}");
}

/* The log-probabilities of an echoed prompt, into every choice of it. */
static int score_prompt(completion *t, int32_t i)
{
    hx_call *c = t->c;
    const hx_prompt *p = &t->prompt[i];
    const int32_t n_top = t->req.sampling.n_top;
    float *logprob = hx_arena_alloc(&c->arena, (size_t)p->n * sizeof *logprob);
    hx_choice *top =
        hx_arena_alloc(&c->arena, (size_t)p->n * (size_t)HX_MAX(n_top, 1) * sizeof *top);
    const hx_score_args a = { .tokens = p->id,
                              .n_tokens = p->n,
                              .logprob = logprob,
                              .top = n_top > 0 ? top : NULL,
                              .n_top = n_top };
    hx_err err = { 0 };
    int rc;

    if (logprob == NULL || top == NULL)
        return hx_server_too_large(c, "prompt");
    if ((rc = hx_score(c->engine, &a, &err)) != 0)
        return hx_server_problem_err(c, rc, "prompt", &err);
    for (int32_t k = i * t->req.n; k < (i + 1) * t->req.n; k++) {
        hx_utf8_stream utf8 = { 0 };
        hx_sb text = { 0 };
        int64_t offset = 0;

        for (int64_t j = 0; j < p->n; j++) {
            const float *v = j > 0 ? &logprob[j - 1] : NULL;

            add_logprob(t, &t->choice[k].lp, p->id[j], v,
                        n_top > 0 && j > 0 ? &top[(j - 1) * n_top] : NULL, offset);
            text.n = 0;
            hx_utf8_feed(&utf8, hx_token_bytes(c->engine, p->id[j], NULL), &text);
            offset += hx_gen_count_chars((hx_str) { text.p, text.n });
        }
        hx_sb_free(&text);
    }
    return 0;
}

/* A leaving client is noticed between two prompts only: hx_score() cannot be cancelled.
 */
static int score_prompts(completion *t)
{
    int rc = 0;

    for (int32_t i = 0; rc == 0 && i < t->req.n_prompt; i++)
        rc = hx_http_gone(t->c->x) ? HX_ECANCEL : score_prompt(t, i);
    return rc;
}

/* ---- answers ------------------------------------------------------------ */

static const char *finish_reason(hx_stop stop)
{
    return stop == HX_STOP_LENGTH ? "length" : "stop";
}

static void put_chunk(completion *t, int32_t index, hx_str text, const char *finish,
                      hx_sb *out)
{
    hx_sb_add(out, t->head.p, t->head.n);
    hx_sb_printf(out, "{\"index\":%d,\"text\":", index);
    hx_json_put_str(out, text);
    hx_sb_char(out, ',');
    put_logprobs(t, out, &t->choice[index].lp);
    if (finish != NULL)
        hx_sb_printf(out, ",\"finish_reason\":\"%s\"}]", finish);
    else
        hx_sb_str(out, ",\"finish_reason\":null}]");
    hx_openai_end_chunk(out, &t->req, finish != NULL ? &t->sum : NULL);
}

static void put_text(completion *t, int32_t index, hx_str text, hx_sb *out)
{
    if (t->req.stream)
        put_chunk(t, index, text, NULL, out);
    else
        hx_sb_add(&t->choice[index].text, text.p, text.n);
}

static void on_event(void *ud, const hx_gen_event *ev, hx_sb *out)
{
    completion *t = ud;
    choice *k = &t->choice[ev->index];
    const int32_t prompt = ev->index / t->req.n;

    switch (ev->kind) {
    case HX_GEN_TOKEN:
        k->sum += (double)ev->logprob;
        k->n++;
        if (!t->logprobs)
            break;
        add_logprob(t, &k->lp, ev->token, &ev->logprob, ev->top,
                    ev->offset + (t->req.echo ? hx_gen_count_chars(t->text[prompt]) : 0));
        break;
    case HX_GEN_TEXT:
        put_text(t, ev->index, ev->text, out);
        break;
    case HX_GEN_REPLY:
        break;
    case HX_GEN_END:
        k->stop = ev->stop;
        hx_openai_add(&t->sum, ev, ev->index % t->req.n == 0);
        if (t->req.stream)
            put_chunk(t, ev->index, HX_STR(""), finish_reason(ev->stop), out);
        break;
    }
    out->bad = out->bad || k->lp.tops.bad || k->text.bad;
}

static void on_progress(void *ud, const hx_gen_progress *p, hx_sb *out)
{
    const completion *t = ud;

    hx_sb_add(out, t->head.p, t->head.n);
    hx_sb_printf(out,
                 "{\"index\":%d,\"text\":\"\",\"logprobs\":null,"
                 "\"finish_reason\":null}],",
                 p->index);
    hx_openai_write_progress(out, p);
    hx_sb_str(out, "}\n\n");
}

static void put_choice(completion *t, int32_t i, choice *k, hx_sb *b)
{
    hx_sb_printf(b, i > 0 ? ",{\"index\":%d,\"text\":" : "{\"index\":%d,\"text\":", i);
    hx_json_put_str(b, (hx_str) { k->text.p, k->text.n });
    hx_sb_char(b, ',');
    put_logprobs(t, b, &k->lp);
    hx_sb_printf(b, ",\"finish_reason\":\"%s\"}", finish_reason(k->stop));
    b->bad = b->bad || k->text.bad;
}

/* The mean log-probability of a token; an empty answer is certain. */
static double worth(const choice *k)
{
    return k->n > 0 ? k->sum / (double)k->n : 0;
}

/* The answer to a prompt that is given as its i-th: in order, or the best not yet taken.
 */
static choice *pick(completion *t, int32_t prompt, int32_t i)
{
    choice *all = &t->choice[prompt * t->req.n], *best = NULL;

    if (t->n_best == t->req.n)
        return &all[i];
    for (int32_t j = 0; j < t->req.n; j++)
        if (!all[j].taken && (best == NULL || worth(&all[j]) > worth(best)))
            best = &all[j];
    best->taken = true;
    return best;
}

static void reply_whole(void *ud)
{
    completion *t = ud;
    hx_sb b = { 0 };

    hx_openai_write_head(&b, t->c, "cmpl-", "text_completion", t->req.model);
    for (int32_t i = 0; i < t->req.n_prompt * t->n_best; i++)
        put_choice(t, i, pick(t, i / t->n_best, i % t->n_best), &b);
    hx_openai_write_tail(&b, &t->sum);
    hx_server_reply_json(t->c, &b);
    hx_sb_free(&b);
}

static void begin(completion *t)
{
    hx_sb out = { 0 };

    if (t->req.stream) {
        hx_sb_str(&t->head, "data: ");
        hx_openai_write_head(&t->head, t->c, "cmpl-", "text_completion", t->req.model);
        hx_server_begin_stream(t->c, (hx_str) { NULL, 0 });
    }
    for (int32_t i = 0; t->req.echo && i < t->n_choice; i++)
        put_text(t, i, t->text[i / t->req.n], &out);
    if (t->req.stream)
        hx_http_send(t->c->x, (hx_str) { out.p, out.n });
    hx_sb_free(&out);
}

static void free_all(completion *t)
{
    for (int32_t i = 0; i < t->n_choice; i++) {
        choice *k = &t->choice[i];

        hx_sb_free(&k->text);
        hx_sb_free(&k->lp.tokens);
        hx_sb_free(&k->lp.values);
        hx_sb_free(&k->lp.tops);
        hx_sb_free(&k->lp.offsets);
    }
}

static int on_end(void *ud, int rc)
{
    completion *t = ud;

    rc = hx_openai_end(t->c, rc,
                       &(hx_openai_last) { &t->head, &t->req, &t->sum, reply_whole, t });
    free_all(t);
    return rc;
}

/* ---- one request -------------------------------------------------------- */

/* An empty suffix is none: clients send it so. */
static int read_prompts(completion *t)
{
    hx_prompts p;
    int rc = hx_prompts_read(t->c, "prompt", HX_PROMPT_TEXT | HX_PROMPT_IDS,
                             t->req.echo || t->suffix.n > 0, &p);

    for (int32_t i = 0; rc == 0 && t->suffix.n > 0 && i < p.n; i++)
        rc = hx_prompts_infill(t->c, "suffix", p.text[i], t->suffix, &p.prompt[i]);
    t->req.prompt = t->prompt = p.prompt;
    t->req.n_prompt = p.n;
    t->text = p.text;
    return rc;
}

static int read_fields(completion *t)
{
    hx_call *c = t->c;
    hx_request *r = &t->req.sampling;
    int64_t n_top = -1, best_of = 0;
    int rc;

    if ((rc = hx_params_sampling(c, &t->req)) != 0 ||
        (rc = hx_params_bool(c, c->body, "echo", &t->req.echo)) != 0 ||
        (rc = hx_params_int(c, c->body, "logprobs", 0, N_TOP_MAX, &n_top)) != 0 ||
        (rc = hx_params_int(c, c->body, "best_of", 1, BEST_OF_MAX, &best_of)) != 0 ||
        (rc = hx_params_str(c, c->body, "suffix", &t->suffix)) != 0)
        return rc;
    t->n_best = t->req.n;
    if (best_of != 0 && best_of < t->n_best)
        return hx_server_problem(c, 400, "best_of", "invalid_value",
                                 "best_of: %lld, expected at least n (%d)",
                                 (long long)best_of, t->n_best);
    if (best_of > t->n_best && t->req.stream)
        return hx_server_problem(c, 400, "best_of", "invalid_value",
                                 "best_of: which answer is best shows at the end, so it "
                                 "cannot be streamed");
    t->req.n = (int32_t)HX_MAX(best_of, t->n_best);
    t->logprobs = n_top >= 0;
    r->want_logprobs = t->logprobs || t->req.n > t->n_best;
    r->n_top = (int32_t)HX_MAX(n_top, 0);
    t->no_answer =
        r->max_new == 0 && (hx_params_get(c->body, "max_tokens") != NULL ||
                            hx_params_get(c->body, "max_completion_tokens") != NULL);
    if (t->no_answer && !t->req.echo)
        return hx_server_problem(c, 400, "max_tokens", "invalid_value",
                                 "max_tokens: 0 needs echo; expected at least 1");
    if (t->req.echo && t->suffix.n > 0)
        return hx_server_problem(c, 400, "echo", "invalid_value",
                                 "echo: not together with suffix");
    return read_prompts(t);
}

static int answer(completion *t)
{
    hx_gen *gen = NULL;
    int rc;

    if (!t->no_answer && (rc = hx_gen_open(&gen, t->c, &t->req)) != 0)
        return on_end(t, rc);
    begin(t);
    const hx_gen_sink sink = { .event = on_event,
                               .end = on_end,
                               .progress = on_progress,
                               .ud = t,
                               .stream = t->req.stream };
    return t->no_answer ? hx_gen_none(t->c, &t->req, &sink) : hx_gen_start(gen, &sink);
}

static int score_and_answer(hx_call *c)
{
    completion *t = c->state;
    const int rc = score_prompts(t);

    return rc != 0 ? on_end(t, rc) : answer(t);
}

int hx_completions(hx_call *c)
{
    completion *t = hx_arena_alloc(&c->arena, sizeof *t);
    int rc;

    if (t == NULL)
        return hx_server_too_large(c, "prompt");
    *t = (completion) { .c = c };
    if ((rc = read_fields(t)) != 0 || (rc = hx_gen_check(c, &t->req)) != 0)
        return rc;
    t->n_choice = t->req.n_prompt * t->req.n;
    if ((t->choice =
             hx_arena_alloc(&c->arena, (size_t)t->n_choice * sizeof *t->choice)) == NULL)
        return hx_server_too_large(c, "prompt");
    c->state = t;
    return t->req.echo && t->logprobs
               ? hx_server_defer(c, score_and_answer, t->req.stream)
               : answer(t);
}
