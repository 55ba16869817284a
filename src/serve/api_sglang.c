/* api_sglang.c - POST /generate as SGLang shapes it (text or ids, batches, cumulative
 * streams, log-probabilities of prompt and answer), and what its clients ask about the
 * server: /model_info, /server_info, /flush_cache.
 *
 * Requests arrive from server.c on a worker, answers from generate.c on the pump.
 * Log-probabilities of prompts come from hx_score(), on one of the few slow workers,
 * before the answer begins. On the stream nothing but comments precedes the first token:
 * clients time it. */
#include "serve/serve.h"

#include <stdio.h>

#define N_TOP_MAX 20
#define IDS_MAX   65536 /* of token_ids_logprob */

/* Lists of a meta_info, without brackets: what was predicted, what was likely, what was
 * asked about. */
typedef struct {
    hx_sb values, tops, picks;
} lists;

typedef struct {
    char id[40];
    hx_sb text, ids; /* escaped, without quotes; without brackets */
    lists out;
    int64_t n_token, n_told; /* handed out; of those, in the last event */
    hx_gen_event end;        /* its kind is END when it has come */
} answer;

/* What scoring a prompt gave. */
typedef struct {
    lists in, after;    /* of the prompt; of what follows its last token */
    float *end_logprob; /* [n_eos] that an end id follows the prompt */
} scored;

typedef struct {
    hx_call *c;
    hx_generate req;
    hx_prompts prompts;
    hx_str rid; /* the client's own name of the request, or {NULL, 0} */
    bool want_logprobs, want_text, array;
    bool no_answer; /* max_new_tokens 0 */
    int64_t start;  /* first prompt position with log-probabilities; -1: none */
    const int32_t *pick;
    int64_t n_pick;
    scored *scored; /* [n_prompt], or NULL */
    answer *answer; /* [n_answer] */
    int32_t n_answer;
} request;

/* ---- log-probabilities -------------------------------------------------- */

/* [logprob, id, text]; the text only where asked for. JSON has no -Infinity. Nine digits
 * bring a float back. */
static void put_entry(const request *t, hx_sb *b, const float *logprob, int32_t id)
{
    if (logprob != NULL)
        hx_sb_printf(b, "[%.9g,%d,", (double)HX_MAX(*logprob, -9999.0f), id);
    else
        hx_sb_printf(b, "[null,%d,", id);
    if (t->want_text)
        hx_json_put_str(b, hx_token_bytes(t->c->engine, id, NULL));
    else
        hx_sb_str(b, "null");
    hx_sb_char(b, ']');
}

static void put_comma(hx_sb *b)
{
    if (b->n > 0)
        hx_sb_char(b, ',');
}

static void add_tops(const request *t, hx_sb *b, const hx_choice *top)
{
    put_comma(b);
    if (top == NULL) {
        hx_sb_str(b, "null");
        return;
    }
    hx_sb_char(b, '[');
    for (int32_t i = 0; i < t->req.sampling.n_top; i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_entry(t, b, &top[i].logprob, top[i].token);
    }
    hx_sb_char(b, ']');
}

static void add_picks(const request *t, hx_sb *b, const float *logprob)
{
    put_comma(b);
    if (logprob == NULL) {
        hx_sb_str(b, "null");
        return;
    }
    hx_sb_char(b, '[');
    for (int64_t i = 0; i < t->n_pick; i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_entry(t, b, &logprob[i], t->pick[i]);
    }
    hx_sb_char(b, ']');
}

static void add_value(const request *t, hx_sb *b, const float *logprob, int32_t id)
{
    put_comma(b);
    put_entry(t, b, logprob, id);
}

/* Writes the rows of one prompt. Row i is position from + i and predicts the token after
 * it; the first token that is listed has none before it to be predicted by. */
static void take_rows(request *t, scored *s, const hx_score_args *a)
{
    const hx_request *r = &t->req.sampling;
    const int64_t n = a->n_tokens - a->from;
    const bool listed = t->start >= 0 && t->start < a->n_tokens;

    for (int64_t i = 0; i < n; i++) {
        lists *to = i + 1 < n ? &s->in : &s->after;
        const hx_choice *top = r->n_top > 0 ? a->top + i * r->n_top : NULL;

        if (listed && i == 0) {
            add_value(t, &s->in.values, NULL, a->tokens[a->from]);
            add_tops(t, &s->in.tops, NULL);
            add_picks(t, &s->in.picks, NULL);
        }
        if (listed && i + 1 < n)
            add_value(t, &to->values, &a->logprob[i], a->tokens[a->from + i + 1]);
        if (listed || i + 1 == n) {
            add_tops(t, &to->tops, top);
            add_picks(t, &to->picks, a->id_logprob + i * a->n_ids);
        }
    }
    for (int32_t k = 0; k < t->c->info->n_eos; k++)
        s->end_logprob[k] = a->id_logprob[(n - 1) * a->n_ids + t->n_pick + k];
}

/* The ids asked about, and the end ids: an answer may be over before it begins. */
static int score_prompt(request *t, int32_t i)
{
    hx_call *c = t->c;
    const hx_prompt *p = &t->prompts.prompt[i];
    const int64_t from = t->start >= 0 ? HX_MIN(t->start, p->n - 1) : p->n - 1;
    const size_t rows = (size_t)(p->n - from);
    const size_t n_ids = (size_t)(t->n_pick + c->info->n_eos);
    const size_t n_top = (size_t)t->req.sampling.n_top;
    hx_score_args a = { .tokens = p->id,
                        .n_tokens = p->n,
                        .from = from,
                        .n_top = (int32_t)n_top,
                        .n_ids = (int32_t)n_ids };
    int32_t *ids = hx_arena_alloc(&c->arena, n_ids * sizeof *ids);
    hx_err err = { 0 };
    int rc;

    a.logprob = hx_arena_alloc(&c->arena, rows * sizeof *a.logprob);
    a.top = hx_arena_alloc(&c->arena, rows * HX_MAX(n_top, 1u) * sizeof *a.top);
    a.id_logprob = hx_arena_alloc(&c->arena, rows * n_ids * sizeof *a.id_logprob);
    t->scored[i].end_logprob =
        hx_arena_alloc(&c->arena, n_ids * sizeof *t->scored[i].end_logprob);
    if (ids == NULL || a.logprob == NULL || a.top == NULL || a.id_logprob == NULL ||
        t->scored[i].end_logprob == NULL)
        return hx_server_problem(
            c, 413, "logprob_start_len", "request_too_large",
            "logprob_start_len: %zu positions with %zu ids each are too many for the "
            "memory of a request",
            rows, n_ids + n_top);
    for (int64_t k = 0; k < t->n_pick; k++)
        ids[k] = t->pick[k];
    for (int32_t k = 0; k < c->info->n_eos; k++)
        ids[t->n_pick + k] = c->info->eos[k];
    a.ids = ids;
    if (n_top == 0)
        a.top = NULL;
    if ((rc = hx_score(c->engine, &a, &err)) != 0)
        return hx_server_problem_err(c, rc, "input_ids", &err);
    take_rows(t, &t->scored[i], &a);
    return 0;
}

/* A leaving client is noticed between two prompts only: hx_score() cannot be cancelled.
 */
static int score_prompts(request *t)
{
    int rc = 0;

    t->scored = hx_arena_alloc(&t->c->arena, (size_t)t->prompts.n * sizeof *t->scored);
    if (t->scored == NULL)
        return hx_server_no_memory(t->c);
    for (int32_t i = 0; rc == 0 && i < t->prompts.n; i++)
        rc = hx_http_gone(t->c->x) ? HX_ECANCEL : score_prompt(t, i);
    return rc;
}

/* ---- answers ------------------------------------------------------------ */

static void put_list(hx_sb *b, const char *name, const hx_sb *list)
{
    hx_sb_printf(b, ",\"%s\":[", name);
    hx_sb_add(b, list->p, list->n);
    hx_sb_char(b, ']');
    b->bad = b->bad || list->bad;
}

static void put_lists(const request *t, hx_sb *b, const char *side, const lists *l)
{
    char name[64];

    snprintf(name, sizeof name, "%s_token_logprobs", side);
    put_list(b, name, &l->values);
    if (t->req.sampling.n_top > 0) {
        snprintf(name, sizeof name, "%s_top_logprobs", side);
        put_list(b, name, &l->tops);
    }
    if (t->n_pick > 0) {
        snprintf(name, sizeof name, "%s_token_ids_logprobs", side);
        put_list(b, name, &l->picks);
    }
}

static void put_finish(const request *t, const answer *k, hx_sb *b)
{
    const hx_gen_event *e = &k->end;

    hx_sb_str(b, ",\"finish_reason\":");
    if (e->kind != HX_GEN_END) {
        hx_sb_str(b, "null");
    } else if (e->stop == HX_STOP_LENGTH) {
        hx_sb_printf(b, "{\"type\":\"length\",\"length\":%lld}", (long long)e->n_answer);
    } else if (e->stop == HX_STOP_CANCEL) {
        hx_sb_str(b, "{\"type\":\"abort\",\"message\":\"cancelled\"}");
    } else {
        hx_sb_str(b, "{\"type\":\"stop\",\"matched\":");
        if (e->stop == HX_STOP_TEXT && e->stop_index >= 0 &&
            e->stop_index < t->req.sampling.n_stop)
            hx_json_put_str(b, t->req.sampling.stop[e->stop_index]);
        else if (e->stop == HX_STOP_EOS && e->stop_index >= 0)
            hx_sb_printf(b, "%d", e->stop_index);
        else
            hx_sb_str(b, "null");
        hx_sb_char(b, '}');
    }
}

/* One answer as far as it has come. The prompt's lists go with its end only: they would
 * make every event of a stream megabytes long. */
static void put_answer(request *t, int32_t index, hx_sb *b)
{
    answer *k = &t->answer[index];
    const bool ended = k->end.kind == HX_GEN_END;
    const int32_t prompt = index / t->req.n;
    const hx_times *time = &k->end.times;

    hx_sb_str(b, "{\"text\":\"");
    hx_sb_add(b, k->text.p, k->text.n);
    hx_sb_str(b, "\",\"output_ids\":[");
    hx_sb_add(b, k->ids.p, k->ids.n);
    hx_sb_str(b, "],\"meta_info\":{\"id\":");
    hx_json_put_str(b, t->rid.p != NULL ? t->rid : hx_str_c(k->id));
    put_finish(t, k, b);
    hx_sb_printf(b,
                 ",\"prompt_tokens\":%lld,\"completion_tokens\":%lld,"
                 "\"cached_tokens\":%lld",
                 (long long)t->prompts.prompt[prompt].n,
                 (long long)(ended ? k->end.n_answer : k->n_token),
                 (long long)k->end.n_cached);
    if (ended)
        hx_sb_printf(b, ",\"e2e_latency\":%.6f",
                     (double)(time->done_us - time->queued_us) / 1e6);
    if (t->want_logprobs && ended)
        put_lists(t, b, "input",
                  t->scored != NULL ? &t->scored[prompt].in : &(lists) { 0 });
    if (t->want_logprobs)
        put_lists(t, b, "output", &k->out);
    hx_sb_char(b, '}');
    if (t->array && t->req.stream)
        hx_sb_printf(b, ",\"index\":%d", index);
    hx_sb_char(b, '}');
    b->bad = b->bad || k->text.bad || k->ids.bad;
    k->n_told = k->n_token;
}

static void stream_answer(request *t, int32_t index, hx_sb *out)
{
    hx_sb_str(out, "data: ");
    put_answer(t, index, out);
    hx_sb_str(out, "\n\n");
}

/* Text is kept as it goes out, escaped: every event of a stream repeats it. */
static void add_text(answer *k, hx_str text)
{
    hx_sb quoted = { 0 };

    hx_json_put_str(&quoted, text);
    if (quoted.n >= 2)
        hx_sb_add(&k->text, quoted.p + 1, quoted.n - 2);
    k->text.bad = k->text.bad || quoted.bad;
    hx_sb_free(&quoted);
}

static void add_token(request *t, answer *k, const hx_gen_event *ev)
{
    k->n_token++;
    put_comma(&k->ids);
    hx_sb_printf(&k->ids, "%d", ev->token);
    if (!t->want_logprobs)
        return;
    add_value(t, &k->out.values, &ev->logprob, ev->token);
    if (t->req.sampling.n_top > 0)
        add_tops(t, &k->out.tops, ev->top);
}

/* The distribution after the prompt was computed with the prompt's, so it stands here
 * also when its best token was an end id, which no event names. */
static void add_scored_end(request *t, answer *k, int32_t prompt)
{
    const scored *s = t->scored != NULL ? &t->scored[prompt] : NULL;
    const hx_info *i = t->c->info;

    if (s == NULL)
        return;
    hx_sb_add(&k->out.picks, s->after.picks.p, s->after.picks.n);
    if (k->n_token > 0)
        return;
    hx_sb_add(&k->out.tops, s->after.tops.p, s->after.tops.n);
    for (int32_t e = 0; e < i->n_eos; e++)
        if (k->end.stop == HX_STOP_EOS && i->eos[e] == k->end.stop_index)
            add_value(t, &k->out.values, &s->end_logprob[e], i->eos[e]);
}

static void on_event(void *ud, const hx_gen_event *ev, hx_sb *out)
{
    request *t = ud;
    answer *k = &t->answer[ev->index];

    switch (ev->kind) {
    case HX_GEN_TOKEN:
        add_token(t, k, ev);
        break;
    case HX_GEN_TEXT:
        add_text(k, ev->text);
        if (t->req.stream && (ev->text.n > 0 || k->n_token > k->n_told))
            stream_answer(t, ev->index, out);
        break;
    case HX_GEN_REPLY:
        break;
    case HX_GEN_END:
        k->end = *ev;
        add_scored_end(t, k, ev->index / t->req.n);
        if (t->req.stream)
            stream_answer(t, ev->index, out);
        break;
    }
    out->bad = out->bad || k->text.bad || k->out.values.bad || k->out.tops.bad;
}

static void reply_whole(void *ud)
{
    request *t = ud;
    hx_sb b = { 0 };

    if (t->array)
        hx_sb_char(&b, '[');
    for (int32_t i = 0; i < t->n_answer; i++) {
        if (i > 0)
            hx_sb_char(&b, ',');
        put_answer(t, i, &b);
    }
    if (t->array)
        hx_sb_char(&b, ']');
    hx_server_reply_json(t->c, &b);
    hx_sb_free(&b);
}

static void free_lists(lists *l)
{
    hx_sb_free(&l->values);
    hx_sb_free(&l->tops);
    hx_sb_free(&l->picks);
}

static void free_all(request *t)
{
    for (int32_t i = 0; i < t->n_answer; i++) {
        hx_sb_free(&t->answer[i].text);
        hx_sb_free(&t->answer[i].ids);
        free_lists(&t->answer[i].out);
    }
    for (int32_t i = 0; t->scored != NULL && i < t->prompts.n; i++) {
        free_lists(&t->scored[i].in);
        free_lists(&t->scored[i].after);
    }
}

static int on_end(void *ud, int rc)
{
    request *t = ud;

    rc = hx_server_end(t->c, rc, HX_STR("data: [DONE]\n\n"), reply_whole, t);
    free_all(t);
    return rc;
}

/* ---- one request -------------------------------------------------------- */

/* Names the place of a field that was refused inside another. */
static void prefix_param(hx_call *c, const char *prefix)
{
    char inner[sizeof c->problem.param];

    memcpy(inner, c->problem.param, sizeof inner);
    if (inner[0] != '\0' && strncmp(inner, prefix, strlen(prefix)) != 0)
        snprintf(c->problem.param, sizeof c->problem.param, "%s.%.70s", prefix, inner);
}

static int read_grammar(hx_call *c, const hx_json *s, hx_generate *g)
{
    static const struct {
        const char *name, *param;
        hx_grammar_kind kind;
    } kinds[] = {
        { "json_schema", "sampling_params.json_schema", HX_GRAMMAR_JSON_SCHEMA },
        { "regex", "sampling_params.regex", HX_GRAMMAR_REGEX },
        { "ebnf", "sampling_params.ebnf", HX_GRAMMAR_EBNF },
    };
    static const char *const names[] = { "structural_tag", "stop_regex", "no_stop_trim",
                                         "custom_params" };
    int rc;

    for (size_t i = 0; i < HX_LEN(names); i++) {
        const hx_json *v = hx_params_get(s, names[i]);

        if (v != NULL && (hx_json_kind(v) != HX_JSON_BOOL || hx_json_bool(v, false)))
            return hx_server_problem(c, 400, names[i], "unsupported_value",
                                     "sampling_params.%s: not supported", names[i]);
    }
    for (size_t i = 0; i < HX_LEN(kinds); i++) {
        const hx_json *v = hx_params_get(s, kinds[i].name);
        const bool schema = kinds[i].kind == HX_GRAMMAR_JSON_SCHEMA;

        if (v == NULL)
            continue;
        if (hx_json_kind(v) != HX_JSON_STRING &&
            !(schema && hx_json_kind(v) == HX_JSON_OBJECT))
            return hx_server_problem(c, 400, kinds[i].name, "invalid_type",
                                     "%s: found %s, expected a string%s", kinds[i].param,
                                     hx_json_kind_name(v), schema ? " or a schema" : "");
        if ((rc = hx_params_grammar(c, g, kinds[i].kind, kinds[i].param, v)) != 0)
            return rc;
    }
    return 0;
}

static int read_sampling(request *t)
{
    hx_call *c = t->c;
    hx_generate *g = &t->req;
    hx_request *r = &g->sampling;
    const hx_json *s = hx_params_get(c->body, "sampling_params");
    int64_t n = 1, top_k = 0, max_new = -1;
    int64_t seed = (int64_t)(hx_server_random(c->server) >> 1);
    int rc;

    r->temperature = 1;
    r->top_p = 1;
    if (s != NULL && hx_json_kind(s) != HX_JSON_OBJECT)
        return hx_server_problem(c, 400, "sampling_params", "invalid_type",
                                 "sampling_params: found %s, expected one object for all "
                                 "prompts",
                                 hx_json_kind_name(s));
    if ((rc = hx_params_shared(c, s, g)) == 0 &&
        (rc = hx_params_int(c, s, "max_new_tokens", 0, INT32_MAX, &max_new)) == 0 &&
        (rc = hx_params_int(c, s, "min_new_tokens", 0, INT32_MAX, &r->min_new)) == 0 &&
        (rc = hx_params_int(c, s, "top_k", -1, INT32_MAX, &top_k)) == 0 &&
        (rc = hx_params_int(c, s, "n", 1, 16, &n)) == 0 &&
        (rc = hx_params_int(c, s, "sampling_seed", INT64_MIN + 1, INT64_MAX, &seed)) == 0)
        rc = read_grammar(c, s, g);
    if (rc != 0)
        prefix_param(c, "sampling_params");
    r->seed = (uint64_t)seed;
    r->top_k = (int32_t)HX_MAX(top_k, 0);
    r->max_new = HX_MAX(max_new, 0);
    t->no_answer = max_new == 0;
    g->n = (int32_t)n;
    return rc;
}

static int read_logprobs(request *t)
{
    hx_call *c = t->c;
    const hx_json *b = c->body, *pick = hx_params_get(b, "token_ids_logprob");
    int64_t n_top = 0;
    int rc;

    t->start = -1;
    if ((rc = hx_params_bool(c, b, "return_logprob", &t->want_logprobs)) != 0 ||
        (rc = hx_params_bool(c, b, "return_text_in_logprobs", &t->want_text)) != 0 ||
        (rc = hx_params_int(c, b, "logprob_start_len", -1, INT32_MAX, &t->start)) != 0 ||
        (rc = hx_params_int(c, b, "top_logprobs_num", 0, N_TOP_MAX, &n_top)) != 0 ||
        (pick != NULL &&
         (rc = hx_params_ids(c, pick, "token_ids_logprob", &t->pick, &t->n_pick)) != 0))
        return rc;
    if (t->n_pick > IDS_MAX)
        return hx_server_problem(c, 400, "token_ids_logprob", "invalid_value",
                                 "token_ids_logprob: %lld ids, at most %d",
                                 (long long)t->n_pick, IDS_MAX);
    if (!t->want_logprobs) {
        t->start = -1;
        t->n_pick = 0;
        return 0;
    }
    t->req.sampling.want_logprobs = true;
    t->req.sampling.n_top = (int32_t)n_top;
    if (t->n_pick > 0 && !t->no_answer && t->req.sampling.max_new != 1)
        return hx_server_problem(
            c, 400, "token_ids_logprob", "unsupported_value",
            "token_ids_logprob: known for the prompt and one token after it; set "
            "max_new_tokens to 1 or 0");
    return 0;
}

static int read_prompts(request *t)
{
    static const char *const media[] = { "image_data", "video_data",
                                         "audio_data", "input_embeds",
                                         "lora_path",  "custom_logit_processor" };
    hx_call *c = t->c;
    const bool text = hx_params_get(c->body, "text") != NULL;
    const bool ids = hx_params_get(c->body, "input_ids") != NULL;

    for (size_t i = 0; i < HX_LEN(media); i++)
        if (hx_params_get(c->body, media[i]) != NULL)
            return hx_server_problem(c, 400, media[i], "unsupported_value",
                                     "%s: not supported", media[i]);
    if (text == ids)
        return hx_server_problem(c, 400, text ? "input_ids" : "text",
                                 text ? "invalid_value" : "missing_required_parameter",
                                 "text, input_ids: expected one of them, found %s",
                                 text ? "both" : "neither");
    return hx_prompts_read(c, text ? "text" : "input_ids",
                           text ? HX_PROMPT_TEXT : HX_PROMPT_IDS, false, &t->prompts);
}

static int answer_request(request *t)
{
    hx_gen *gen = NULL;
    int rc;

    if (!t->no_answer && (rc = hx_gen_open(&gen, t->c, &t->req)) != 0)
        return on_end(t, rc);
    if (t->req.stream) {
        hx_server_begin_stream(t->c, (hx_str) { NULL, 0 });
        hx_http_send(t->c->x, HX_STR(""));
    }
    const hx_gen_sink sink = {
        .event = on_event, .end = on_end, .ud = t, .stream = t->req.stream
    };
    return t->no_answer ? hx_gen_none(t->c, &t->req, &sink) : hx_gen_start(gen, &sink);
}

static int score_and_answer(hx_call *c)
{
    request *t = c->state;
    const int rc = score_prompts(t);

    return rc != 0 ? on_end(t, rc) : answer_request(t);
}

int hx_sglang_generate(hx_call *c)
{
    request *t = hx_arena_alloc(&c->arena, sizeof *t);
    int rc;

    if (t == NULL)
        return hx_server_no_memory(c);
    *t = (request) { .c = c, .req = { .every_token = true } };
    if ((rc = read_sampling(t)) != 0 || (rc = read_logprobs(t)) != 0 ||
        (rc = hx_params_bool(c, c->body, "stream", &t->req.stream)) != 0 ||
        (rc = hx_params_str(c, c->body, "rid", &t->rid)) != 0 ||
        (rc = read_prompts(t)) != 0)
        return rc;
    t->req.prompt = t->prompts.prompt;
    t->req.n_prompt = t->prompts.n;
    if ((rc = hx_gen_check(c, &t->req)) != 0)
        return rc;
    t->n_answer = t->prompts.n * t->req.n;
    t->array = t->prompts.list || t->req.n > 1;
    t->answer = hx_arena_alloc(&c->arena, (size_t)t->n_answer * sizeof *t->answer);
    if (t->answer == NULL)
        return hx_server_no_memory(c);
    for (int32_t i = 0; i < t->n_answer; i++)
        hx_server_new_id(c->server, "", t->answer[i].id);
    c->state = t;
    return t->start >= 0 || t->n_pick > 0
               ? hx_server_defer(c, score_and_answer, t->req.stream)
               : answer_request(t);
}

/* ---- about the server --------------------------------------------------- */

static int reply(hx_call *c, hx_sb *b)
{
    hx_server_reply_json(c, b);
    hx_sb_free(b);
    return 0;
}

int hx_sglang_model_info(hx_call *c)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"model_path\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b, ",\"tokenizer_path\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b, ",\"is_generation\":true,\"preferred_sampling_params\":null,"
                  "\"weight_version\":\"default\",\"has_image_understanding\":false,"
                  "\"has_audio_understanding\":false,\"model_type\":");
    hx_json_put_str(&b, hx_str_c(c->info->arch));
    hx_sb_printf(&b, ",\"context_length\":%lld}", (long long)c->info->ctx_tokens);
    return reply(c, &b);
}

/* The names are those that SGLang's server has for its arguments; what does not exist here
 * or is chosen by the engine has the value that leaves the choice to it. */
int hx_sglang_server_info(hx_call *c)
{
    const hx_info *i = c->info;
    hx_status st;
    hx_sb b = { 0 };

    hx_get_status(c->engine, &st);
    hx_sb_str(&b, "{\"model_path\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b, ",\"served_model_name\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_printf(&b,
                 ",\"version\":\"hoist-" HX_VERSION "\",\"context_length\":%lld,"
                 "\"max_total_num_tokens\":%lld,\"load_seconds\":%.2f,"
                 "\"server_args\":{\"engine\":\"hoist\",\"context_length\":%lld,"
                 "\"max_running_requests\":%d,\"max_queued_requests\":%lld,"
                 "\"max_total_num_tokens\":%lld,\"chunked_prefill_size\":null,"
                 "\"kv_cache_dtype\":\"auto\",\"env\":{},\"device\":",
                 (long long)i->ctx_tokens, (long long)st.pages * 64,
                 hx_server_load_s(c->server), (long long)i->ctx_tokens, i->max_streams,
                 (long long)i->max_queue, (long long)st.pages * 64);
    hx_json_put_str(&b, hx_str_c(i->device));
    hx_sb_printf(&b,
                 "},\"internal_states\":[{\"running\":%lld,\"waiting\":%lld,"
                 "\"pages\":%lld,\"pages_used\":%lld}]}",
                 (long long)st.running, (long long)st.waiting, (long long)st.pages,
                 (long long)st.pages_used);
    return reply(c, &b);
}

int hx_sglang_flush_cache(hx_call *c)
{
    hx_sb b = { 0 };
    hx_err err = { 0 };
    const int64_t n = hx_forget(c->engine, &err);

    if (n < 0)
        return hx_server_problem_err(c, (int)n, NULL, &err);
    hx_sb_printf(&b,
                 "{\"success\":true,\"flushed_states\":%lld,\"message\":\"kept prefixes "
                 "are given up, but for what running requests use\"}",
                 (long long)n);
    return reply(c, &b);
}
