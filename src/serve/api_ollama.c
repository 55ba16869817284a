/* api_ollama.c - the part of Ollama's API that clients need to talk to a model: /api/chat,
 * /api/generate, /api/show, /api/tags, /api/ps, /api/version.
 *
 * A chat is translated to the messages of OpenAI's dialect, which api_openai.c turns into
 * the template's variables; answers are lines of JSON, streamed unless the client says
 * otherwise. Requests arrive from server.c on a worker, answers from generate.c on the
 * pump. Pulls, copies and deletes nothing. */
#include "serve/serve.h"

#include <stdio.h>
#include <time.h>

#define LINES      "application/x-ndjson"
#define BODY_DEPTH 160 /* a request may nest 128 deep; what is made of it, deeper */
#define API_VERSION                                                                      \
    "0.13.0" /* of Ollama, whose API this is; clients ask for a least one */

typedef struct {
    hx_call *c;
    hx_generate req;
    bool message;                /* answers as /api/chat does, else as /api/generate */
    hx_prompt raw;               /* of /api/generate without the template */
    hx_sb head;                  /* {"model":… of every line, up to the time */
    hx_sb idle;                  /* an empty line of an answer, for long silence */
    hx_sb text, thinking, calls; /* unstreamed; calls without brackets */
    hx_sb call;                  /* the one that is being made */
    hx_gen_event end;
} ollama;

void hx_ollama_write_problem(hx_sb *b, const hx_problem *p)
{
    hx_sb_str(b, "{\"error\":");
    hx_json_put_str(b, hx_str_c(p->msg));
    hx_sb_char(b, '}');
}

/* ,"NAME":"2026-11-29T17:46:18.123456Z" */
static void put_time(hx_sb *b, const char *name, int64_t us)
{
    const time_t s = (time_t)(us / 1000000);
    struct tm t;

    if (gmtime_r(&s, &t) != NULL)
        hx_sb_printf(b, ",\"%s\":\"%04d-%02d-%02dT%02d:%02d:%02d.%06dZ\"", name,
                     1900 + t.tm_year, t.tm_mon + 1, t.tm_mday, t.tm_hour, t.tm_min,
                     t.tm_sec, (int)(us % 1000000));
}

static int64_t wall_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- a chat as OpenAI shapes it ------------------------------------------ */

static void put_member(hx_sb *b, const char *name, const hx_json *value)
{
    if (value == NULL)
        return;
    hx_sb_printf(b, ",\"%s\":", name);
    hx_json_write(b, value);
}

/* Images as parts, which api_openai.c refuses: no model here sees any. */
static void put_images(hx_sb *b, const hx_json *content, const hx_json *images)
{
    hx_sb_str(b, ",\"content\":[{\"type\":\"text\",\"text\":");
    hx_json_put_str(b, hx_json_str(content));
    hx_sb_char(b, '}');
    for (size_t i = 0; i < hx_json_len(images); i++)
        hx_sb_str(b, ",{\"type\":\"image_url\"}");
    hx_sb_char(b, ']');
}

static int check_images(hx_call *c, const hx_json *owner, const char *param)
{
    const hx_json *images = hx_params_get(owner, "images");
    bool ok = images == NULL || hx_json_kind(images) == HX_JSON_ARRAY;

    for (size_t i = 0; ok && i < hx_json_len(images); i++)
        ok = hx_json_kind(hx_json_at(images, i)) == HX_JSON_STRING;
    return ok ? 0
              : hx_server_problem(c, 400, param, "invalid_type",
                                  "%s: expected a list of base64 strings", param);
}

/* Calls that come back keep their ids; others get one, for here a call's result follows it
 * in order. n: calls of the conversation so far. */
static void put_calls(hx_sb *b, const hx_json *calls, size_t *n)
{
    hx_sb_str(b, ",\"tool_calls\":[");
    for (size_t i = 0; i < hx_json_len(calls); i++, ++*n) {
        const hx_json *call = hx_json_at(calls, i);
        const hx_str id = hx_json_str(hx_json_get(call, "id"));

        hx_sb_str(b, i > 0 ? ",{\"id\":" : "{\"id\":");
        if (id.n > 0)
            hx_json_put_str(b, id);
        else
            hx_sb_printf(b, "\"call_%zu\"", *n);
        hx_sb_str(b, ",\"type\":\"function\",\"function\":");
        hx_json_write(b, hx_json_get(call, "function"));
        hx_sb_char(b, '}');
    }
    hx_sb_char(b, ']');
}

static void put_message(hx_sb *b, const hx_json *m, size_t *n_call)
{
    const hx_json *images = hx_params_get(m, "images");
    const hx_json *calls = hx_params_get(m, "tool_calls");
    const hx_json *content = hx_params_get(m, "content");

    if (hx_json_kind(m) != HX_JSON_OBJECT) {
        hx_json_write(b, m); /* api_openai.c will say what is wrong */
        return;
    }
    hx_sb_str(b, "{\"role\":");
    hx_json_write(b, hx_json_get(m, "role"));
    if (hx_json_len(images) > 0)
        put_images(b, content, images);
    else
        put_member(b, "content", content);
    put_member(b, "reasoning_content", hx_params_get(m, "thinking"));
    put_member(b, "name", hx_params_get(m, "tool_name"));
    put_member(b, "tool_call_id", hx_params_get(m, "tool_call_id"));
    if (hx_json_kind(calls) == HX_JSON_ARRAY)
        put_calls(b, calls, n_call);
    else
        put_member(b, "tool_calls", calls);
    hx_sb_char(b, '}');
}

static void put_messages(hx_sb *b, const hx_json *messages)
{
    size_t n_call = 0;

    if (hx_json_kind(messages) != HX_JSON_ARRAY) {
        hx_json_write(b, messages);
        return;
    }
    hx_sb_char(b, '[');
    for (size_t i = 0; i < hx_json_len(messages); i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_message(b, hx_json_at(messages, i), &n_call);
    }
    hx_sb_char(b, ']');
}

/* /api/generate: its prompt is what a user says. */
static void put_prompt(hx_sb *b, const hx_json *body)
{
    const hx_json *system = hx_params_get(body, "system");
    const hx_json *images = hx_params_get(body, "images");
    const hx_json *prompt = hx_params_get(body, "prompt");

    hx_sb_char(b, '[');
    if (hx_json_str(system).n > 0) {
        hx_sb_str(b, "{\"role\":\"system\"");
        put_member(b, "content", system);
        hx_sb_str(b, "},");
    }
    hx_sb_str(b, "{\"role\":\"user\"");
    if (hx_json_len(images) > 0)
        put_images(b, prompt, images);
    else
        put_member(b, "content", prompt);
    hx_sb_str(b, "}]");
}

/* think: whether, or how much. */
static int put_think(hx_call *c, hx_sb *b)
{
    const hx_json *think = hx_params_get(c->body, "think");

    if (think == NULL)
        return 0;
    if (hx_json_kind(think) == HX_JSON_STRING)
        put_member(b, "reasoning_effort", think);
    else if (hx_json_kind(think) == HX_JSON_BOOL)
        hx_sb_printf(b, ",\"chat_template_kwargs\":{\"enable_thinking\":%s}",
                     hx_json_bool(think, true) ? "true" : "false");
    else
        return hx_server_problem(c, 400, "think", "invalid_type",
                                 "think: found %s, expected true, false, \"low\", "
                                 "\"medium\" or \"high\"",
                                 hx_json_kind_name(think));
    return 0;
}

/* The template's variables, through the other dialect's body, which lives as long as the
 * call: tools are borrowed from it. */
static int read_chat(ollama *o)
{
    hx_call *c = o->c;
    hx_json *given = c->body;
    hx_err err = { 0 };
    hx_sb b = { 0 };
    int rc;

    hx_sb_str(&b, "{\"messages\":");
    if (o->message)
        put_messages(&b, hx_params_get(given, "messages"));
    else
        put_prompt(&b, given);
    if (o->message)
        put_member(&b, "tools", hx_params_get(given, "tools"));
    rc = put_think(c, &b);
    hx_sb_char(&b, '}');
    if (rc == 0 && b.bad)
        rc = hx_server_no_memory(c);
    else if (rc == 0 &&
             (rc = hx_json_parse(&c->also, (hx_str) { b.p, b.n }, BODY_DEPTH, &err)) != 0)
        rc = hx_server_problem_err(c, rc, NULL, &err);
    hx_sb_free(&b);
    if (rc != 0)
        return rc;
    c->body = c->also;
    rc = hx_openai_vars(c, &o->req);
    c->body = given;
    return rc;
}

/* ---- answers ------------------------------------------------------------ */

static void put_head(const ollama *o, hx_sb *b)
{
    hx_sb_add(b, o->head.p, o->head.n);
    put_time(b, "created_at", wall_us());
}

/* What one line says, and the end of all of them. */
static void put_said(const ollama *o, hx_str text, hx_str thinking, hx_str calls,
                     hx_sb *b)
{
    if (o->message)
        hx_sb_str(b, ",\"message\":{\"role\":\"assistant\",\"content\":");
    else
        hx_sb_str(b, ",\"response\":");
    hx_json_put_str(b, text);
    if (thinking.n > 0) {
        hx_sb_str(b, ",\"thinking\":");
        hx_json_put_str(b, thinking);
    }
    if (calls.n > 0) {
        hx_sb_str(b, ",\"tool_calls\":[");
        hx_sb_add(b, calls.p, calls.n);
        hx_sb_char(b, ']');
    }
    if (o->message)
        hx_sb_char(b, '}');
}

/* Durations in nanoseconds; before the prompt is read it waited for its turn. */
static void put_end(const ollama *o, hx_sb *b)
{
    const hx_gen_event *e = &o->end;
    const hx_times *t = &e->times;
    const int64_t first = t->first_us > 0 ? t->first_us : t->done_us;

    hx_sb_printf(b,
                 ",\"done\":true,\"done_reason\":\"%s\",\"total_duration\":%lld,"
                 "\"load_duration\":%lld,\"prompt_eval_count\":%lld,"
                 "\"prompt_eval_duration\":%lld,\"eval_count\":%lld,"
                 "\"eval_duration\":%lld}",
                 e->stop == HX_STOP_LENGTH ? "length" : "stop",
                 (long long)(t->done_us - t->queued_us) * 1000,
                 (long long)(t->started_us - t->queued_us) * 1000, (long long)e->n_prompt,
                 (long long)(first - t->started_us) * 1000, (long long)e->n_answer,
                 (long long)(t->done_us - first) * 1000);
}

static void say(ollama *o, hx_str text, hx_str thinking, hx_str calls, hx_sb *out)
{
    if (!o->req.stream) {
        hx_sb_add(&o->text, text.p, text.n);
        hx_sb_add(&o->thinking, thinking.p, thinking.n);
        if (calls.n > 0 && o->calls.n > 0)
            hx_sb_char(&o->calls, ',');
        hx_sb_add(&o->calls, calls.p, calls.n);
        out->bad = out->bad || o->text.bad || o->thinking.bad || o->calls.bad;
        return;
    }
    put_head(o, out);
    put_said(o, text, thinking, calls, out);
    hx_sb_str(out, ",\"done\":false}\n");
}

/* A call is handed out whole: its arguments are an object here, not text. */
static void take_reply(ollama *o, const hx_reply_event *ev, hx_sb *out)
{
    const hx_str none = { "", 0 };
    char id[40];

    switch (ev->kind) {
    case HX_REPLY_REASONING:
        say(o, none, ev->text, none, out);
        break;
    case HX_REPLY_CONTENT:
        say(o, ev->text, none, none, out);
        break;
    case HX_REPLY_CALL:
        hx_server_new_id(o->c->server, "call_", id);
        o->call.n = 0;
        hx_sb_printf(&o->call, "{\"id\":\"%s\",\"function\":{\"index\":%d,\"name\":", id,
                     ev->call);
        hx_json_put_str(&o->call, ev->text);
        hx_sb_str(&o->call, ",\"arguments\":");
        break;
    case HX_REPLY_ARGS:
        hx_sb_add(&o->call, ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CALL_END:
        hx_sb_str(&o->call, "}}");
        out->bad = out->bad || o->call.bad;
        say(o, none, none, (hx_str) { o->call.p, o->call.n }, out);
        break;
    }
}

static void on_event(void *ud, const hx_gen_event *ev, hx_sb *out)
{
    const hx_str none = { "", 0 };
    ollama *o = ud;

    switch (ev->kind) {
    case HX_GEN_TOKEN:
        break;
    case HX_GEN_REPLY:
        take_reply(o, ev->reply, out);
        break;
    case HX_GEN_TEXT:
        say(o, ev->text, none, none, out);
        break;
    case HX_GEN_END:
        o->end = *ev;
        if (!o->req.stream)
            break;
        put_head(o, out);
        put_said(o, none, none, none, out);
        put_end(o, out);
        hx_sb_char(out, '\n');
        break;
    }
}

static void reply_whole(void *ud)
{
    ollama *o = ud;
    hx_sb b = { 0 };

    put_head(o, &b);
    put_said(o, (hx_str) { o->text.p, o->text.n },
             (hx_str) { o->thinking.p, o->thinking.n },
             (hx_str) { o->calls.p, o->calls.n }, &b);
    put_end(o, &b);
    b.bad = b.bad || o->head.bad;
    hx_server_reply_json(o->c, &b);
    hx_sb_free(&b);
}

static void write_error(const hx_call *c, hx_sb *out)
{
    hx_ollama_write_problem(out, &c->problem);
    hx_sb_char(out, '\n');
}

#define IDLE_CHAT                                                                        \
    "{\"message\":{\"role\":\"assistant\",\"content\":\"\"},\"done\":false}\n"
#define IDLE_TEXT "{\"response\":\"\",\"done\":false}\n"

const hx_stream_form hx_ollama_chat_stream = { .type = LINES,
                                               .idle = { IDLE_CHAT,
                                                         sizeof IDLE_CHAT - 1 },
                                               .problem = write_error,
                                               .usual = true };
const hx_stream_form hx_ollama_generate_stream = { .type = LINES,
                                                   .idle = { IDLE_TEXT,
                                                             sizeof IDLE_TEXT - 1 },
                                                   .problem = write_error,
                                                   .usual = true };

static int on_end(void *ud, int rc)
{
    ollama *o = ud;
    hx_sb *all[] = { &o->head, &o->idle, &o->text, &o->thinking, &o->calls, &o->call };

    rc = hx_server_end(o->c, rc, HX_STR(""), reply_whole, o);
    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_sb_free(all[i]);
    return rc;
}

/* ---- one request -------------------------------------------------------- */

/* num_ctx, num_gpu and the like set a model up, which is done here when it is loaded; so
 * they count as unknown. */
static int read_options(ollama *o)
{
    hx_call *c = o->c;
    hx_request *r = &o->req.sampling;
    const hx_json *opt = hx_params_get(c->body, "options");
    int64_t top_k = c->info->top_k, most = -1;
    int64_t seed = (int64_t)(hx_server_random(c->server) >> 1);
    double repeat = 1;
    int rc;

    r->temperature = c->info->temperature;
    r->top_p = c->info->top_p;
    if (opt != NULL && hx_json_kind(opt) != HX_JSON_OBJECT)
        return hx_server_problem(c, 400, "options", "invalid_type",
                                 "options: found %s, expected an object",
                                 hx_json_kind_name(opt));
    if ((rc = hx_params_shared(c, opt, &o->req)) != 0 ||
        (rc = hx_params_num(c, opt, "repeat_penalty", 0.01, 100, &repeat)) != 0 ||
        (rc = hx_params_int(c, opt, "top_k", -1, INT32_MAX, &top_k)) != 0 ||
        (rc = hx_params_int(c, opt, "num_predict", -2, INT32_MAX, &most)) != 0 ||
        (rc = hx_params_int(c, opt, "num_ctx", 0, INT32_MAX, &(int64_t) { 0 })) != 0 ||
        (rc = hx_params_int(c, opt, "seed", INT64_MIN + 1, INT64_MAX, &seed)) != 0)
        return rc;
    r->repeat_penalty = (float)repeat;
    r->top_k = (int32_t)HX_MAX(top_k, 0);
    r->max_new = HX_MAX(most, 0);
    r->seed = (uint64_t)seed;
    return 0;
}

static int read_format(ollama *o)
{
    hx_call *c = o->c;
    const hx_json *format = hx_params_get(c->body, "format");

    if (format == NULL ||
        (hx_json_kind(format) == HX_JSON_STRING && hx_json_str(format).n == 0))
        return 0;
    if (hx_str_is(hx_json_str(format), "json"))
        return hx_params_grammar(c, &o->req, HX_GRAMMAR_JSON, "format", NULL);
    if (hx_json_kind(format) != HX_JSON_OBJECT)
        return hx_server_problem(c, 400, "format", "invalid_value",
                                 "format: expected \"json\" or a JSON schema");
    return hx_params_grammar(c, &o->req, HX_GRAMMAR_JSON_SCHEMA, "format", format);
}

/* /api/generate: the prompt as it is, or with something to fill in before the suffix. */
static int read_raw(ollama *o, bool raw)
{
    hx_call *c = o->c;
    hx_str prompt = HX_STR(""), suffix = HX_STR(""), system;
    int rc;

    if ((rc = hx_params_str(c, c->body, "prompt", &prompt)) != 0 ||
        (rc = hx_params_str(c, c->body, "suffix", &suffix)) != 0 ||
        (rc = hx_params_str(c, c->body, "system", &system)) != 0 ||
        (rc = check_images(c, c->body, "images")) != 0)
        return rc;
    if (!raw && suffix.n == 0) {
        o->req.chat = true;
        return 0;
    }
    o->req.prompt = &o->raw;
    o->req.n_prompt = 1;
    return suffix.n > 0 ? hx_prompts_infill(c, "suffix", prompt, suffix, &o->raw)
                        : hx_prompts_tokenize(c, "prompt", prompt, &o->raw);
}

/* Nothing to say: clients ask so for the model to be loaded, which it is. */
static int answer_load(ollama *o)
{
    hx_sb b = { 0 };

    put_head(o, &b);
    put_said(o, HX_STR(""), HX_STR(""), HX_STR(""), &b);
    hx_sb_str(&b, ",\"done\":true,\"done_reason\":\"load\"}");
    if (o->req.stream)
        hx_sb_char(&b, '\n');
    if (o->c->begun) /* while it was loaded */
        hx_server_end(o->c, 0, (hx_str) { b.p, b.bad ? 0 : b.n }, NULL, NULL);
    else
        hx_server_reply_json(o->c, &b);
    hx_sb_free(&b);
    hx_sb_free(&o->head);
    return 0;
}

static int check_message_images(hx_call *c)
{
    const hx_json *messages = hx_params_get(c->body, "messages");
    char param[40];
    int rc;

    for (size_t i = 0;
         hx_json_kind(messages) == HX_JSON_ARRAY && i < hx_json_len(messages); i++) {
        snprintf(param, sizeof param, "messages[%zu].images", i);
        if ((rc = check_images(c, hx_json_at(messages, i), param)) != 0)
            return rc;
    }
    return 0;
}

/* Whether it says nothing: false, 0, "" or nothing at all. */
static bool is_off(const hx_json *v)
{
    switch (hx_json_kind(v)) {
    case HX_JSON_NULL:
        return true;
    case HX_JSON_STRING:
        return hx_json_str(v).n == 0;
    case HX_JSON_BOOL:
        return !hx_json_bool(v, true);
    case HX_JSON_INT:
        return hx_json_int(v, 1) == 0;
    default:
        return false;
    }
}

/* What would change the answer and cannot be done. */
static int refuse_fields(hx_call *c)
{
    static const char *const names[] = { "template", "logprobs", "top_logprobs" };

    for (size_t i = 0; i < HX_LEN(names); i++)
        if (!is_off(hx_params_get(c->body, names[i])))
            return hx_server_problem(c, 400, names[i], "unsupported_value",
                                     "%s: not supported", names[i]);
    return 0;
}

static int read_request(ollama *o)
{
    hx_call *c = o->c;
    bool raw = false;
    int rc;

    o->req.stream = true;
    o->req.n = 1;
    o->req.model = hx_server_model_name(c->server);
    o->req.chat = o->message;
    if ((rc = hx_params_str(c, c->body, "model", &o->req.model)) != 0 ||
        (rc = hx_params_bool(c, c->body, "stream", &o->req.stream)) != 0 ||
        (rc = hx_params_bool(c, c->body, "raw", &raw)) != 0 ||
        (rc = refuse_fields(c)) != 0 || (rc = read_options(o)) != 0 ||
        (rc = read_format(o)) != 0)
        return rc;
    return o->message ? check_message_images(c) : read_raw(o, raw);
}

static int run(ollama *o, bool load)
{
    hx_call *c = o->c;
    hx_gen *gen;
    int rc;

    hx_sb_str(&o->head, "{\"model\":");
    hx_json_put_str(&o->head, o->req.model);
    if (load)
        return answer_load(o);
    if ((o->req.chat && (rc = read_chat(o)) != 0) ||
        (rc = hx_gen_open(&gen, c, &o->req)) != 0)
        return on_end(o, rc);
    if (o->req.stream) {
        say(o, HX_STR(""), HX_STR(""), HX_STR(""), &o->idle);
        hx_server_begin_stream(c, (hx_str) { o->idle.p, o->idle.n });
        hx_http_send(c->x, HX_STR(""));
    }
    return hx_gen_start(
        gen, &(hx_gen_sink) {
                 .event = on_event, .end = on_end, .ud = o, .stream = o->req.stream });
}

static int open_request(hx_call *c, bool message, ollama **out)
{
    ollama *o = hx_arena_alloc(&c->arena, sizeof *o);

    *out = o;
    if (o == NULL)
        return hx_server_no_memory(c);
    *o = (ollama) { .c = c, .message = message };
    return read_request(o);
}

int hx_ollama_chat(hx_call *c)
{
    const hx_json *messages = hx_params_get(c->body, "messages");
    ollama *o;
    const int rc = open_request(c, true, &o);

    return rc != 0
               ? rc
               : run(o, messages == NULL || (hx_json_kind(messages) == HX_JSON_ARRAY &&
                                             hx_json_len(messages) == 0));
}

int hx_ollama_generate(hx_call *c)
{
    ollama *o;
    const int rc = open_request(c, false, &o);

    return rc != 0 ? rc
                   : run(o, hx_json_str(hx_params_get(c->body, "prompt")).n == 0 &&
                                hx_json_str(hx_params_get(c->body, "suffix")).n == 0);
}

/* ---- about the model ---------------------------------------------------- */

static int reply(hx_call *c, hx_sb *b)
{
    hx_server_reply_json(c, b);
    hx_sb_free(b);
    return 0;
}

static bool has_markup(const hx_info *i)
{
    return i->reply_format != NULL && strcmp(i->reply_format, "plain") != 0;
}

static void put_details(hx_sb *b, const hx_info *i)
{
    hx_sb_str(b, ",\"details\":{\"parent_model\":\"\",\"format\":\"safetensors\","
                 "\"family\":");
    hx_json_put_str(b, hx_str_c(i->arch));
    hx_sb_str(b, ",\"families\":[");
    hx_json_put_str(b, hx_str_c(i->arch));
    hx_sb_printf(b,
                 "],\"parameter_size\":\"%.1f%c\",\"quantization_level\":\"%.2f bpw\"}",
                 (double)i->n_param / (i->n_param >= 1000000000 ? 1e9 : 1e6),
                 i->n_param >= 1000000000 ? 'B' : 'M',
                 i->n_param > 0 ? 8.0 * (double)i->weight_bytes / (double)i->n_param : 0);
}

/* There are no layers of an image to hash: the digest tells models of one server apart
 * from those of another by name and size. */
static void put_model(hx_sb *b, const hx_call *c)
{
    const hx_str name = hx_server_model_name(c->server);
    uint64_t h = c->info->weight_bytes;

    hx_sb_str(b, "{\"name\":");
    hx_json_put_str(b, name);
    hx_sb_str(b, ",\"model\":");
    hx_json_put_str(b, name);
    put_time(b, "modified_at", hx_server_created_s(c->server) * 1000000);
    hx_sb_printf(b, ",\"size\":%llu,\"digest\":\"",
                 (unsigned long long)c->info->weight_bytes);
    for (size_t i = 0; i < name.n; i++)
        h = hx_rng_at(h, (unsigned char)name.p[i]);
    for (uint64_t i = 0; i < 4; i++)
        hx_sb_printf(b, "%016llx", (unsigned long long)hx_rng_at(h, i));
    hx_sb_char(b, '"');
    put_details(b, c->info);
}

int hx_ollama_tags(hx_call *c)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"models\":[");
    put_model(&b, c);
    hx_sb_str(&b, "}]}");
    return reply(c, &b);
}

/* It never expires: a year from now is what such clients can show. */
int hx_ollama_ps(hx_call *c)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"models\":[");
    put_model(&b, c);
    put_time(&b, "expires_at", wall_us() + (int64_t)365 * 86400 * 1000000);
    hx_sb_printf(&b, ",\"size_vram\":0,\"context_length\":%lld}]}",
                 (long long)c->info->ctx_tokens);
    return reply(c, &b);
}

int hx_ollama_show(hx_call *c)
{
    const hx_info *i = c->info;
    const hx_str mine = hx_server_model_name(c->server);
    hx_str name = { 0 };
    hx_sb b = { 0 };
    int rc;

    if ((rc = hx_params_str(c, c->body, "name", &name)) != 0 ||
        (rc = hx_params_str(c, c->body, "model", &name)) != 0)
        return rc;
    if (name.n > 7 && memcmp(name.p + name.n - 7, ":latest", 7) == 0)
        name.n -= 7;
    if (!hx_str_eq(name, mine))
        return hx_server_problem(c, 404, "model", "model_not_found",
                                 "model '%.*s' not found", (int)HX_MIN(name.n, 80u),
                                 name.p != NULL ? name.p : "");
    hx_sb_str(&b, "{\"modelfile\":\"\",\"parameters\":\"\",\"template\":\"\",\"license\":"
                  "\"\"");
    put_time(&b, "modified_at", hx_server_created_s(c->server) * 1000000);
    put_details(&b, i);
    hx_sb_str(&b, ",\"model_info\":{\"general.architecture\":");
    hx_json_put_str(&b, hx_str_c(i->arch));
    hx_sb_printf(&b,
                 ",\"general.parameter_count\":%llu,\"%s.context_length\":%lld,"
                 "\"%s.embedding_length\":%d,\"%s.block_count\":%d,"
                 "\"%s.expert_count\":%d,\"%s.expert_used_count\":%d}",
                 (unsigned long long)i->n_param, i->arch, (long long)i->ctx_tokens,
                 i->arch, i->width, i->arch, i->n_layer, i->arch, i->n_expert, i->arch,
                 i->n_expert_active);
    hx_sb_printf(&b, ",\"capabilities\":[\"completion\"%s]}",
                 has_markup(i) ? ",\"tools\",\"thinking\"" : "");
    return reply(c, &b);
}

int hx_ollama_version(hx_call *c)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"version\":\"" API_VERSION "\",\"hoist\":\"" HX_VERSION "\"}");
    return reply(c, &b);
}
