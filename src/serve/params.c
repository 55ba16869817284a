/* params.c - typed fields of a request body, and the sampling fields of OpenAI's family.
 *
 * Called by dialects on a worker. House rules: null is absent, unknown fields are
 * ignored, a known field of the wrong type or out of range is a 400 that names it. Reads
 * only. */
#include "serve/serve.h"

#include <math.h>
#include <stdio.h>

#define N_MAX      16 /* answers of one prompt */
#define STOP_MAX   16
#define STOP_BYTES 256

const hx_json *hx_params_get(const hx_json *obj, const char *name)
{
    const hx_json *j = hx_json_get(obj, name);

    return hx_json_kind(j) == HX_JSON_NULL ? NULL : j;
}

int hx_params_refuse(hx_call *c, const char *param, const hx_json *found,
                     hx_json_type wanted, const char *expected)
{
    const hx_json_type kind = hx_json_kind(found);
    const hx_str text = hx_json_str(found);
    char value[64];

    if (kind == HX_JSON_NULL)
        return hx_server_problem(c, 400, param, "missing_required_parameter",
                                 "%s: found nothing, expected %s", param, expected);
    snprintf(value, sizeof value, "%s",
             kind == HX_JSON_ARRAY && hx_json_len(found) == 0 ? "an empty list"
                                                              : hx_json_kind_name(found));
    if (kind == wanted && kind == HX_JSON_STRING)
        snprintf(value, sizeof value, "\"%.*s\"", (int)HX_MIN(text.n, 40u), text.p);
    return hx_server_problem(c, 400, param,
                             kind == wanted ? "invalid_value" : "invalid_type",
                             "%s: found %s, expected %s", param, value, expected);
}

static int wrong_type(hx_call *c, const char *name, const char *expected,
                      const hx_json *found)
{
    return hx_server_problem(c, 400, name, "invalid_type", "%s: found %s, expected %s",
                             name, hx_json_kind_name(found), expected);
}

int hx_params_bool(hx_call *c, const hx_json *obj, const char *name, bool *out)
{
    const hx_json *j = hx_params_get(obj, name);

    if (j == NULL)
        return 0;
    if (hx_json_kind(j) != HX_JSON_BOOL)
        return wrong_type(c, name, "true or false", j);
    *out = hx_json_bool(j, false);
    return 0;
}

static bool is_whole(const hx_json *j)
{
    const hx_json_type k = hx_json_kind(j);

    return k == HX_JSON_INT ||
           (k == HX_JSON_DOUBLE && hx_json_num(j, 0.5) == floor(hx_json_num(j, 0.5)));
}

int hx_params_int(hx_call *c, const hx_json *obj, const char *name, int64_t min,
                  int64_t max, int64_t *out)
{
    const hx_json *j = hx_params_get(obj, name);
    int64_t v;

    if (j == NULL)
        return 0;
    if (!is_whole(j))
        return wrong_type(c, name, "a whole number", j);
    v = hx_json_int(j, INT64_MIN);
    if (v < min || v > max)
        return hx_server_problem(c, 400, name, "invalid_value",
                                 "%s: %.17g, expected %lld..%lld", name,
                                 hx_json_num(j, 0), (long long)min, (long long)max);
    *out = v;
    return 0;
}

int hx_params_num(hx_call *c, const hx_json *obj, const char *name, double min,
                  double max, double *out)
{
    const hx_json *j = hx_params_get(obj, name);
    const hx_json_type k = hx_json_kind(j);
    const double v = hx_json_num(j, 0);

    if (j == NULL)
        return 0;
    if (k != HX_JSON_INT && k != HX_JSON_DOUBLE)
        return wrong_type(c, name, "a number", j);
    if (!(v >= min && v <= max))
        return hx_server_problem(c, 400, name, "invalid_value", "%s: %g, expected %g..%g",
                                 name, v, min, max);
    *out = v;
    return 0;
}

int hx_params_str(hx_call *c, const hx_json *obj, const char *name, hx_str *out)
{
    const hx_json *j = hx_params_get(obj, name);

    if (j == NULL)
        return 0;
    if (hx_json_kind(j) != HX_JSON_STRING)
        return wrong_type(c, name, "a string", j);
    *out = hx_json_str(j);
    return 0;
}

int hx_params_ids(hx_call *c, const hx_json *list, const char *param, const int32_t **out,
                  int64_t *n)
{
    const size_t len = hx_json_len(list);
    int32_t *id;

    if (hx_json_kind(list) != HX_JSON_ARRAY)
        return wrong_type(c, param, "a list of token ids", list);
    if ((id = hx_arena_alloc(&c->arena, HX_MAX(len, 1u) * sizeof *id)) == NULL)
        return hx_server_problem(c, 413, param, "request_too_large",
                                 "%s: %zu ids are too many", param, len);
    for (size_t i = 0; i < len; i++) {
        const hx_json *j = hx_json_at(list, i);
        const int64_t v = hx_json_kind(j) == HX_JSON_INT ? hx_json_int(j, -1) : -1;

        if (v < 0 || v >= c->info->n_vocab)
            return hx_server_problem(c, 400, param, "invalid_value",
                                     "%s[%zu]: no token id; expected 0..%d", param, i,
                                     c->info->n_vocab - 1);
        id[i] = (int32_t)v;
    }
    *out = id;
    *n = (int64_t)len;
    return 0;
}

/* ---- sampling ----------------------------------------------------------- */

typedef struct {
    const char *name;
    size_t at; /* of a float in hx_request */
    double min, max;
} number;

#define FLOAT(json, field, lo, hi)                                                       \
    {                                                                                    \
        json, offsetof(hx_request, field), lo, hi                                        \
    }

static const number numbers[] = {
    FLOAT("temperature", temperature, 0, 100),
    FLOAT("top_p", top_p, 0, 1),
    FLOAT("min_p", min_p, 0, 1),
    FLOAT("repetition_penalty", repeat_penalty, 0.01, 100),
    FLOAT("presence_penalty", presence_penalty, -2, 2),
    FLOAT("frequency_penalty", frequency_penalty, -2, 2),
};

static int read_numbers(hx_call *c, hx_request *r)
{
    for (size_t i = 0; i < HX_LEN(numbers); i++) {
        const number *d = &numbers[i];
        float *at = (float *)(void *)((char *)r + d->at);
        double v = (double)*at;
        int rc;

        if ((rc = hx_params_num(c, c->body, d->name, d->min, d->max, &v)) != 0)
            return rc;
        *at = (float)v;
    }
    return 0;
}

static int read_stop(hx_call *c, hx_request *r)
{
    const hx_json *j = hx_params_get(c->body, "stop");
    const bool one = hx_json_kind(j) == HX_JSON_STRING;
    const size_t n = one ? 1 : hx_json_len(j);
    hx_str *stop;

    if (j == NULL)
        return 0;
    if (!one && hx_json_kind(j) != HX_JSON_ARRAY)
        return wrong_type(c, "stop", "a string or a list of strings", j);
    if (n > STOP_MAX)
        return hx_server_problem(c, 400, "stop", "invalid_value",
                                 "stop: %zu texts, at most %d", n, STOP_MAX);
    if ((stop = hx_arena_alloc(&c->arena, HX_MAX(n, 1u) * sizeof *stop)) == NULL)
        return hx_server_problem(c, 503, "stop", "out_of_memory", "stop: no memory");
    for (size_t i = 0; i < n; i++) {
        const hx_json *text = one ? j : hx_json_at(j, i);
        char param[32];

        stop[i] = hx_json_str(text);
        snprintf(param, sizeof param, "stop[%zu]", i);
        if (stop[i].n == 0)
            return hx_params_refuse(c, param, text, HX_JSON_STRING,
                                    "a string that is not empty");
        if (stop[i].n > STOP_BYTES)
            return hx_server_problem(c, 400, param, "invalid_value",
                                     "%s: %zu bytes, at most %d", param, stop[i].n,
                                     STOP_BYTES);
    }
    r->stop = stop;
    r->n_stop = (int32_t)n;
    return 0;
}

static int read_stop_ids(hx_call *c, hx_request *r)
{
    const hx_json *j = hx_params_get(c->body, "stop_token_ids");
    int64_t n = 0;
    int rc;

    if (j == NULL)
        return 0;
    if ((rc = hx_params_ids(c, j, "stop_token_ids", &r->stop_ids, &n)) != 0)
        return rc;
    if (n > STOP_MAX)
        return hx_server_problem(c, 400, "stop_token_ids", "invalid_value",
                                 "stop_token_ids: %lld ids, at most %d", (long long)n,
                                 STOP_MAX);
    r->n_stop_ids = (int32_t)n;
    return 0;
}

/* A decimal token id below n_vocab, or -1. */
static int32_t id_of_key(hx_str key, int32_t n_vocab)
{
    int64_t v = 0;

    if (key.n == 0 || key.n > 9)
        return -1;
    for (size_t i = 0; i < key.n; i++) {
        if (key.p[i] < '0' || key.p[i] > '9')
            return -1;
        v = v * 10 + key.p[i] - '0';
    }
    return v < n_vocab ? (int32_t)v : -1;
}

static int read_bias(hx_call *c, hx_request *r)
{
    const hx_json *j = hx_params_get(c->body, "logit_bias");
    const size_t n = hx_json_len(j);
    hx_bias *bias;

    if (j == NULL)
        return 0;
    if (hx_json_kind(j) != HX_JSON_OBJECT)
        return wrong_type(c, "logit_bias", "an object of token ids", j);
    if (n > 4096)
        return hx_server_problem(c, 400, "logit_bias", "invalid_value",
                                 "logit_bias: %zu entries, at most 4096", n);
    if ((bias = hx_arena_alloc(&c->arena, HX_MAX(n, 1u) * sizeof *bias)) == NULL)
        return hx_server_problem(c, 503, "logit_bias", "out_of_memory",
                                 "logit_bias: no memory");
    for (size_t i = 0; i < n; i++) {
        hx_str key;
        const hx_json *v = hx_json_member(j, i, &key);
        const double d = hx_json_num(v, NAN);

        bias[i] = (hx_bias) { id_of_key(key, c->info->n_vocab), (float)d };
        if (bias[i].token < 0)
            return hx_server_problem(
                c, 400, "logit_bias", "invalid_value",
                "logit_bias: \"%.*s\" is no token id; expected 0..%d",
                (int)HX_MIN(key.n, 40u), key.p, c->info->n_vocab - 1);
        if (!(d >= -100 && d <= 100))
            return hx_server_problem(
                c, 400, "logit_bias", "invalid_value",
                "logit_bias: value of %d: expected a number, -100..100", bias[i].token);
    }
    r->bias = bias;
    r->n_bias = (int32_t)n;
    return 0;
}

static int read_integers(hx_call *c, hx_generate *g)
{
    hx_request *r = &g->sampling;
    int64_t top_k = r->top_k, n = 1, seed;
    int rc;

    seed = (int64_t)(hx_server_random(c->server) >> 1);
    if ((rc = hx_params_int(c, c->body, "max_tokens", 0, INT32_MAX, &r->max_new)) != 0 ||
        (rc = hx_params_int(c, c->body, "max_completion_tokens", 0, INT32_MAX,
                            &r->max_new)) != 0 ||
        (rc = hx_params_int(c, c->body, "min_tokens", 0, INT32_MAX, &r->min_new)) != 0 ||
        (rc = hx_params_int(c, c->body, "top_k", -1, INT32_MAX, &top_k)) != 0 ||
        (rc = hx_params_int(c, c->body, "n", 1, N_MAX, &n)) != 0 ||
        (rc = hx_params_int(c, c->body, "seed", INT64_MIN + 1, INT64_MAX, &seed)) != 0)
        return rc;
    r->top_k = (int32_t)HX_MAX(top_k, 0);
    r->seed = (uint64_t)seed;
    g->n = (int32_t)n;
    return 0;
}

int hx_params_grammar(hx_call *c, hx_generate *g, hx_grammar_kind kind, const char *param,
                      const hx_json *v)
{
    hx_sb text = { 0 };
    char *copy;

    if (g->sampling.grammar_kind != HX_GRAMMAR_NONE)
        return hx_server_problem(c, 400, param, "invalid_value",
                                 "%s: the answer is constrained by %s already", param,
                                 g->grammar_param);
    if (hx_json_kind(v) == HX_JSON_STRING)
        hx_sb_add(&text, hx_json_str(v).p, hx_json_str(v).n);
    else if (v != NULL)
        hx_json_write(&text, v);
    copy = text.bad ? NULL : hx_arena_dup(&c->arena, text.n > 0 ? text.p : "", text.n);
    g->sampling.grammar_kind = kind;
    g->sampling.grammar = (hx_str) { copy, text.n };
    g->grammar_param = param;
    hx_sb_free(&text);
    return copy != NULL ? 0
                        : hx_server_problem(c, 503, param, "out_of_memory",
                                            "request: no memory for its grammar");
}

static int read_response_format(hx_call *c, hx_generate *g)
{
    const hx_json *format = hx_params_get(c->body, "response_format");
    const hx_str type = hx_json_str(hx_params_get(format, "type"));
    const hx_json *schema = hx_params_get(hx_params_get(format, "json_schema"), "schema");

    if (schema == NULL) /* llama.cpp and others have it beside the type */
        schema = hx_params_get(format, "schema");
    if (format == NULL)
        return 0;
    if (hx_json_kind(format) != HX_JSON_OBJECT)
        return wrong_type(c, "response_format", "an object", format);
    if (hx_str_is(type, "text"))
        return 0;
    if (hx_str_is(type, "json_object") && schema == NULL)
        return hx_params_grammar(c, g, HX_GRAMMAR_JSON, "response_format", NULL);
    if (!hx_str_is(type, "json_object") && !hx_str_is(type, "json_schema"))
        return hx_params_refuse(c, "response_format.type", hx_params_get(format, "type"),
                                HX_JSON_STRING,
                                "\"text\", \"json_object\" or \"json_schema\"");
    if (hx_json_kind(schema) != HX_JSON_OBJECT)
        return hx_params_refuse(c, "response_format.json_schema.schema", schema,
                                HX_JSON_OBJECT, "an object");
    return hx_params_grammar(c, g, HX_GRAMMAR_JSON_SCHEMA, "response_format", schema);
}

/* One field that asks for a grammar, of the body or of an object in it. */
typedef struct {
    const char *in, *name; /* in: NULL: the body */
    hx_grammar_kind kind;
    hx_json_type type, other;
} guide;

static int read_guide(hx_call *c, hx_generate *g, const guide *d)
{
    const hx_json *in = d->in == NULL ? c->body : hx_params_get(c->body, d->in);
    const hx_json *v = hx_params_get(in, d->name);
    const bool is_switch = d->type == HX_JSON_BOOL;

    if (v == NULL || (is_switch && !hx_json_bool(v, true)))
        return 0;
    if (d->kind == HX_GRAMMAR_CHOICE && hx_json_kind(v) == HX_JSON_ARRAY &&
        hx_json_len(v) == 0)
        return hx_params_refuse(c, d->name, v, HX_JSON_ARRAY,
                                "a list of at least one string");
    if (hx_json_kind(v) != d->type && hx_json_kind(v) != d->other)
        return wrong_type(c, d->name,
                          is_switch                   ? "true or false"
                          : d->type == HX_JSON_OBJECT ? "a schema"
                          : d->type == HX_JSON_ARRAY  ? "a list of strings"
                                                      : "a string",
                          v);
    return hx_params_grammar(c, g, d->kind, d->name, is_switch ? NULL : v);
}

/* What the answer must keep to, by the names of OpenAI, vLLM (guided_*, later
 * structured_outputs), SGLang (regex, ebnf) and llama.cpp (grammar, json_schema). */
static int read_constraints(hx_call *c, hx_generate *g)
{
#define SCHEMA HX_GRAMMAR_JSON_SCHEMA, HX_JSON_OBJECT, HX_JSON_STRING
#define TEXT   HX_JSON_STRING, HX_JSON_STRING
#define LIST   HX_JSON_ARRAY, HX_JSON_ARRAY
#define IN     "structured_outputs"
    static const guide guides[] = {
        { NULL, "guided_json", SCHEMA },
        { NULL, "guided_regex", HX_GRAMMAR_REGEX, TEXT },
        { NULL, "guided_choice", HX_GRAMMAR_CHOICE, LIST },
        { NULL, "guided_grammar", HX_GRAMMAR_EBNF, TEXT },
        { IN, "json", SCHEMA },
        { IN, "regex", HX_GRAMMAR_REGEX, TEXT },
        { IN, "choice", HX_GRAMMAR_CHOICE, LIST },
        { IN, "grammar", HX_GRAMMAR_EBNF, TEXT },
        { IN, "json_object", HX_GRAMMAR_JSON, HX_JSON_BOOL, HX_JSON_BOOL },
        { NULL, "regex", HX_GRAMMAR_REGEX, TEXT },
        { NULL, "ebnf", HX_GRAMMAR_EBNF, TEXT },
        { NULL, "grammar", HX_GRAMMAR_EBNF, TEXT },
        { NULL, "json_schema", SCHEMA },
    };
    const hx_json *outputs = hx_params_get(c->body, IN);
    bool include_stop = false;
    int rc;

    if (outputs != NULL && hx_json_kind(outputs) != HX_JSON_OBJECT)
        return wrong_type(c, IN, "an object", outputs);
    if ((rc = read_response_format(c, g)) != 0)
        return rc;
    for (size_t i = 0; i < HX_LEN(guides); i++)
        if ((rc = read_guide(c, g, &guides[i])) != 0)
            return rc;
#undef SCHEMA
#undef TEXT
#undef LIST
#undef IN
    if ((rc = hx_params_bool(c, c->body, "include_stop_str_in_output", &include_stop)) !=
        0)
        return rc;
    if (include_stop)
        return hx_server_problem(
            c, 400, "include_stop_str_in_output", "unsupported_value",
            "include_stop_str_in_output: not supported; stop texts are "
            "never shown");
    return 0;
}

static int read_stream(hx_call *c, hx_generate *g)
{
    const hx_json *options = hx_params_get(c->body, "stream_options");
    int rc;

    if ((rc = hx_params_bool(c, c->body, "stream", &g->stream)) != 0 ||
        (rc = hx_params_bool(c, c->body, "return_progress", &g->progress)) != 0)
        return rc;
    g->progress = g->progress && g->stream;
    if (options == NULL)
        return 0;
    if (hx_json_kind(options) != HX_JSON_OBJECT)
        return wrong_type(c, "stream_options", "an object", options);
    if ((rc = hx_params_bool(c, options, "include_usage", &g->usage)) != 0)
        return rc;
    g->usage = g->usage && g->stream;
    return 0;
}

/* thinking and reasoning are objects of some APIs and switches of others. */
static int read_switch(hx_call *c, hx_generate *g, const char *name)
{
    static const char *const types[] = { "disabled", "enabled", "adaptive", "auto" };
    const hx_json *j = hx_params_get(c->body, name), *type = hx_params_get(j, "type");
    bool on = true;
    size_t i = 0;
    int rc = 0;

    if (hx_json_kind(j) == HX_JSON_BOOL)
        on = hx_json_bool(j, true);
    else if (hx_json_kind(j) == HX_JSON_OBJECT)
        rc = hx_params_bool(c, j, "enabled", &on);
    else if (j != NULL)
        rc = wrong_type(c, name, "an object, true or false", j);
    while (type != NULL && i < HX_LEN(types) && !hx_str_is(hx_json_str(type), types[i]))
        i++;
    if (rc == 0 && i == HX_LEN(types))
        rc = hx_params_refuse(c, "thinking.type", type, HX_JSON_STRING,
                              "disabled, enabled, adaptive or auto");
    g->no_thinking = g->no_thinking || !on || (type != NULL && i == 0);
    return rc;
}

int hx_params_thinking(hx_call *c, hx_generate *g)
{
    static const struct {
        const char *in, *name; /* in: the object, NULL: the body */
    } budgets[] = {
        { NULL, "thinking_budget" },        { NULL, "thinking_token_budget" },
        { NULL, "thinking_budget_tokens" }, { NULL, "reasoning_budget" },
        { NULL, "max_thinking_tokens" },    { "reasoning", "max_tokens" },
        { "thinking", "budget_tokens" },    { "chat_template_kwargs", "thinking_budget" },
    };
    int64_t budget = -1;
    int rc;

    if ((rc = read_switch(c, g, "thinking")) != 0 ||
        (rc = read_switch(c, g, "reasoning")) != 0)
        return rc;
    for (size_t i = 0; i < HX_LEN(budgets); i++) {
        const hx_json *in =
            budgets[i].in == NULL ? c->body : hx_params_get(c->body, budgets[i].in);

        if (hx_json_kind(in) == HX_JSON_OBJECT &&
            (rc = hx_params_int(c, in, budgets[i].name, -1, INT32_MAX, &budget)) != 0)
            return rc;
    }
    g->think_budget = budget;
    g->no_thinking = g->no_thinking || budget == 0;
    return 0;
}

int hx_params_sampling(hx_call *c, hx_generate *g)
{
    hx_request *r = &g->sampling;
    int rc;

    r->temperature = c->info->temperature;
    r->top_p = c->info->top_p;
    r->top_k = c->info->top_k;
    g->model = hx_server_model_name(c->server);
    if ((rc = hx_params_shared(c, c->body, g)) != 0 || (rc = read_integers(c, g)) != 0 ||
        (rc = read_constraints(c, g)) != 0 || (rc = read_stream(c, g)) != 0)
        return rc;
    return hx_params_str(c, c->body, "model", &g->model);
}

/* ---- for dialects with names of their own -------------------------------- */

int hx_params_shared(hx_call *c, const hx_json *obj, hx_generate *g)
{
    hx_json *body = c->body;
    hx_request *r = &g->sampling;
    bool skip_special = !g->keep_special, pin = false;
    int64_t priority = 0;
    int rc;

    c->body = (hx_json *)(uintptr_t)obj;
    if ((rc = read_numbers(c, r)) == 0 && (rc = read_stop(c, r)) == 0 &&
        (rc = read_stop_ids(c, r)) == 0 && (rc = read_bias(c, r)) == 0 &&
        (rc = hx_params_bool(c, obj, "ignore_eos", &r->ignore_eos)) == 0 &&
        (rc = hx_params_int(c, obj, "priority", -1000, 1000, &priority)) == 0 &&
        (rc = hx_params_int(c, obj, "deadline_ms", 0, INT32_MAX, &r->deadline_ms)) == 0 &&
        (rc = hx_params_bool(c, obj, "loop_guard", &g->loop_guard)) == 0 &&
        (rc = hx_params_bool(c, obj, "pin", &pin)) == 0)
        rc = hx_params_bool(c, obj, "skip_special_tokens", &skip_special);
    c->body = body;
    g->keep_special = !skip_special;
    r->pin = pin;
    r->priority = (int32_t)-priority; /* as vLLM: the smaller goes first */
    g->unpin = !pin && hx_params_get(obj, "pin") != NULL;
    /* The engine takes 0 for off; asked for, it means the smallest nucleus: one token. */
    if (r->top_p == 0 && hx_params_get(obj, "top_p") != NULL)
        r->top_p = 1e-6f;
    return rc;
}
