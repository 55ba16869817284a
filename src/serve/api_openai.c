/* api_openai.c - POST /v1/chat/completions: a chat request to the neutral one, its
 * answers to JSON or to chunks of an event stream. Also what both OpenAI dialects write
 * the same way.
 *
 * Requests arrive from server.c on a worker, answers from generate.c on the pump. Tokens'
 * JSON is written by hand: one chunk per token must cost microseconds. Never touches
 * sockets but through hx_http_*. */
#include "serve/serve.h"

#include <stdio.h>
#include <time.h>

#define N_TOP_MAX 20

/* ---- messages to template variables ------------------------------------- */

typedef struct {
    hx_call *c;
    hx_sb *b;
    size_t i; /* of the message */
} message;

static int bad_message(const message *m, const char *rest, const char *why)
{
    char param[96];

    snprintf(param, sizeof param, "messages[%zu]%s", m->i, rest);
    return hx_server_problem(m->c, 400, param, "invalid_value", "%s: %s", param, why);
}

static int refuse_at(const message *m, const char *rest, const hx_json *found,
                     hx_json_type wanted, const char *expected)
{
    char param[96];

    snprintf(param, sizeof param, "messages[%zu]%s", m->i, rest);
    return hx_params_refuse(m->c, param, found, wanted, expected);
}

static void put_member(hx_sb *b, const char *name, hx_str text)
{
    hx_sb_printf(b, ",\"%s\":", name);
    hx_json_put_str(b, text);
}

/* Results a tool may give that only the template understands. */
static bool is_tool_part(const hx_json *part)
{
    return hx_json_has(part, "output") ||
           hx_str_is(hx_json_str(hx_json_get(part, "type")), "tool_reference");
}

/* Parts of text, by the names that clients give them. */
static const struct {
    const char *type, *member;
    bool reasoning;
} part_types[] = {
    { "text", "text", false },          { "input_text", "text", false },
    { "output_text", "text", false },   { "refusal", "refusal", false },
    { "thinking", "thinking", true },   { "reasoning", "text", true },
    { "reasoning_text", "text", true },
};

/* One text part is appended to text, or to reasoning. */
static int put_part(const message *m, size_t j, const hx_json *part, hx_sb *text,
                    hx_sb *reasoning)
{
    const hx_str type = hx_json_str(hx_json_get(part, "type"));
    const hx_json *value = part;
    char at[48];
    size_t t = 0;

    snprintf(at, sizeof at, ".content[%zu]", j);
    while (t < HX_LEN(part_types) && !hx_str_is(type, part_types[t].type))
        t++;
    if (hx_json_kind(part) != HX_JSON_STRING && t == HX_LEN(part_types)) {
        char why[128];

        if (type.p == NULL)
            return refuse_at(m, at, part, HX_JSON_OBJECT,
                             "{\"type\":\"text\",\"text\":…}");
        snprintf(why, sizeof why,
                 "parts of type \"%.40s\" are not supported yet; only text is", type.p);
        return bad_message(m, at, why);
    }
    if (hx_json_kind(part) != HX_JSON_STRING)
        value = hx_json_get(part, part_types[t].member);
    if (hx_json_kind(value) != HX_JSON_STRING) {
        snprintf(at, sizeof at, ".content[%zu].%s", j, part_types[t].member);
        return refuse_at(m, at, value, HX_JSON_STRING, "a string");
    }
    if (hx_json_kind(part) != HX_JSON_STRING && part_types[t].reasoning)
        text = reasoning;
    hx_sb_add(text, hx_json_str(value).p, hx_json_str(value).n);
    return 0;
}

/* Text parts become one string: every template takes that. Null becomes "": older
 * templates print None. */
static int put_content(const message *m, const hx_json *content, bool tool,
                       hx_sb *reasoning)
{
    hx_sb text = { 0 };
    int rc = 0;

    if (tool && hx_json_kind(content) == HX_JSON_ARRAY && hx_json_len(content) > 0 &&
        is_tool_part(hx_json_at(content, 0))) {
        hx_sb_str(m->b, ",\"content\":");
        hx_json_write(m->b, content);
        return 0;
    }
    if (hx_json_kind(content) == HX_JSON_STRING ||
        hx_json_kind(content) == HX_JSON_NULL) {
        put_member(m->b, "content", hx_json_str(content));
        return 0;
    }
    if (hx_json_kind(content) != HX_JSON_ARRAY)
        return refuse_at(m, ".content", content, HX_JSON_STRING,
                         "a string or a list of parts");
    for (size_t j = 0; rc == 0 && j < hx_json_len(content); j++)
        rc = put_part(m, j, hx_json_at(content, j), &text, reasoning);
    if (rc == 0)
        put_member(m->b, "content", (hx_str) { text.p, text.n });
    m->b->bad = m->b->bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

/* Clients send arguments as the string they got; the template needs the object. */
static int put_arguments(const message *m, const char *at, const hx_json *args)
{
    const hx_str text = hx_json_str(args);
    hx_json *parsed = NULL;

    if (args == NULL || hx_json_kind(args) == HX_JSON_NULL ||
        (hx_json_kind(args) == HX_JSON_STRING && text.n == 0)) {
        hx_sb_str(m->b, "{}");
        return 0;
    }
    if (hx_json_kind(args) == HX_JSON_OBJECT) {
        hx_json_write(m->b, args);
        return 0;
    }
    if (hx_json_kind(args) != HX_JSON_STRING ||
        hx_json_parse(&parsed, text, 64, NULL) != 0 ||
        hx_json_kind(parsed) != HX_JSON_OBJECT) {
        hx_json_free(parsed);
        return bad_message(
            m, at, "arguments: expected a JSON object, or a string that holds one");
    }
    hx_json_write(m->b, parsed);
    hx_json_free(parsed);
    return 0;
}

static int put_calls(const message *m, const hx_json *calls)
{
    int rc;

    if (hx_json_kind(calls) != HX_JSON_ARRAY)
        return refuse_at(m, ".tool_calls", calls, HX_JSON_ARRAY, "a list");
    hx_sb_str(m->b, ",\"tool_calls\":[");
    for (size_t j = 0; j < hx_json_len(calls); j++) {
        const hx_json *call = hx_json_at(calls, j), *f = hx_json_get(call, "function");
        const hx_json *name = hx_json_get(f, "name"), *id = hx_params_get(call, "id");
        char at[64];

        snprintf(at, sizeof at, ".tool_calls[%zu].id", j);
        if (id != NULL && hx_json_kind(id) != HX_JSON_STRING)
            return refuse_at(m, at, id, HX_JSON_STRING, "a string");
        snprintf(at, sizeof at, ".tool_calls[%zu].function.name", j);
        if (hx_json_kind(name) != HX_JSON_STRING)
            return refuse_at(m, at, name, HX_JSON_STRING, "a string");
        snprintf(at, sizeof at, ".tool_calls[%zu].function", j);
        hx_sb_str(m->b, j > 0 ? ",{\"type\":\"function\"" : "{\"type\":\"function\"");
        if (id != NULL)
            put_member(m->b, "id", hx_json_str(id));
        hx_sb_str(m->b, ",\"function\":{\"name\":");
        hx_json_put_str(m->b, hx_json_str(name));
        hx_sb_str(m->b, ",\"arguments\":");
        if ((rc = put_arguments(m, at, hx_json_get(f, "arguments"))) != 0)
            return rc;
        hx_sb_str(m->b, "}}");
    }
    hx_sb_char(m->b, ']');
    return 0;
}

/* The call of an API before tools. */
static int put_function_call(const message *m, const hx_json *call)
{
    int rc;

    if (hx_json_kind(hx_json_get(call, "name")) != HX_JSON_STRING)
        return refuse_at(m, ".function_call.name", hx_json_get(call, "name"),
                         HX_JSON_STRING, "a string");
    hx_sb_str(m->b, ",\"tool_calls\":[{\"type\":\"function\",\"function\":{\"name\":");
    hx_json_put_str(m->b, hx_json_str(hx_json_get(call, "name")));
    hx_sb_str(m->b, ",\"arguments\":");
    if ((rc = put_arguments(m, ".function_call", hx_json_get(call, "arguments"))) != 0)
        return rc;
    hx_sb_str(m->b, "}}]");
    return 0;
}

/* parts: reasoning that came among the content. */
static int put_assistant(const message *m, const hx_json *j, const hx_sb *parts)
{
    const hx_json *reasoning = hx_params_get(j, "reasoning_content");
    const hx_json *calls = hx_params_get(j, "tool_calls");
    const hx_json *old = hx_params_get(j, "function_call");

    if (reasoning == NULL)
        reasoning = hx_params_get(j, "reasoning");
    if (reasoning != NULL && hx_json_kind(reasoning) != HX_JSON_STRING)
        return refuse_at(m, ".reasoning_content", reasoning, HX_JSON_STRING, "a string");
    if (reasoning != NULL)
        put_member(m->b, "reasoning_content", hx_json_str(reasoning));
    else if (parts->n > 0)
        put_member(m->b, "reasoning_content", (hx_str) { parts->p, parts->n });
    if (calls != NULL && (hx_json_len(calls) > 0 || hx_json_kind(calls) != HX_JSON_ARRAY))
        return put_calls(m, calls);
    return old != NULL ? put_function_call(m, old) : 0;
}

static int take_name(const message *m, const hx_json *j, const char *name, hx_str *out)
{
    const hx_json *v = hx_params_get(j, name);
    char at[32];

    *out = hx_json_str(v);
    snprintf(at, sizeof at, ".%s", name);
    return v == NULL || hx_json_kind(v) == HX_JSON_STRING
               ? 0
               : refuse_at(m, at, v, HX_JSON_STRING, "a string");
}

static int put_message(const message *m, const hx_json *j)
{
    static const struct {
        const char *from, *to;
    } roles[] = {
        { "system", "system" },       { "developer", "system" }, { "user", "user" },
        { "assistant", "assistant" }, { "tool", "tool" },        { "function", "tool" },
    };
    static const char *const names[] = { "tool_call_id", "name" };
    const hx_str role = hx_json_str(hx_json_get(j, "role"));
    hx_sb reasoning = { 0 };
    size_t r = 0;
    int rc;

    if (hx_json_kind(j) != HX_JSON_OBJECT)
        return refuse_at(m, "", j, HX_JSON_OBJECT, "an object");
    while (r < HX_LEN(roles) && !hx_str_is(role, roles[r].from))
        r++;
    if (r == HX_LEN(roles))
        return refuse_at(m, ".role", hx_json_get(j, "role"), HX_JSON_STRING,
                         "system, developer, user, assistant or tool");
    hx_sb_printf(m->b, m->i > 0 ? ",{\"role\":\"%s\"" : "{\"role\":\"%s\"", roles[r].to);
    rc = put_content(m, hx_json_get(j, "content"), hx_str_is(role, "tool"), &reasoning);
    for (size_t i = 0; rc == 0 && i < HX_LEN(names); i++) {
        hx_str text = { NULL, 0 };

        if ((rc = take_name(m, j, names[i], &text)) == 0 && text.p != NULL)
            put_member(m->b, names[i], text);
    }
    if (rc == 0 && hx_str_is(role, "assistant"))
        rc = put_assistant(m, j, &reasoning);
    hx_sb_char(m->b, '}');
    m->b->bad = m->b->bad || reasoning.bad;
    hx_sb_free(&reasoning);
    return rc;
}

static int put_messages(hx_call *c, hx_sb *b)
{
    const hx_json *list = hx_params_get(c->body, "messages");
    message m = { c, b, 0 };
    int rc;

    if (hx_json_kind(list) != HX_JSON_ARRAY || hx_json_len(list) == 0)
        return hx_params_refuse(c, "messages", list, HX_JSON_ARRAY,
                                "a list of at least one message");
    hx_sb_str(b, "\"messages\":[");
    for (; m.i < hx_json_len(list); m.i++)
        if ((rc = put_message(&m, hx_json_at(list, m.i))) != 0)
            return rc;
    hx_sb_char(b, ']');
    return 0;
}

/* ---- tools and switches ------------------------------------------------- */

/* Writes the functions; other types of tools are left out. */
static int put_tools(hx_call *c, const hx_json *tools, hx_sb *b, size_t *n)
{
    *n = 0;
    for (size_t i = 0; i < hx_json_len(tools); i++) {
        const hx_json *t = hx_json_at(tools, i), *f = hx_json_get(t, "function");
        const hx_json *type = hx_params_get(t, "type"), *name = hx_json_get(f, "name");
        const hx_json *about = hx_params_get(f, "description");
        char param[64];

        snprintf(param, sizeof param, "tools[%zu].type", i);
        if (type != NULL && hx_json_kind(type) != HX_JSON_STRING)
            return hx_params_refuse(c, param, type, HX_JSON_STRING, "a string");
        if (type != NULL && !hx_str_is(hx_json_str(type), "function"))
            continue;
        snprintf(param, sizeof param, "tools[%zu].function.name", i);
        if (hx_json_str(name).n == 0)
            return hx_params_refuse(c, param, name, HX_JSON_STRING,
                                    "a string that is not empty");
        snprintf(param, sizeof param, "tools[%zu].function.description", i);
        if (about != NULL && hx_json_kind(about) != HX_JSON_STRING)
            return hx_params_refuse(c, param, about, HX_JSON_STRING, "a string");
        hx_sb_str(b, (*n)++ > 0 ? "," : ",\"tools\":[");
        hx_json_write(b, t);
    }
    if (*n > 0)
        hx_sb_char(b, ']');
    return 0;
}

/* The tools that are left of "allowed_tools", which chat completions nest and responses do
 * not. */
static int allow_tools(hx_call *c, hx_generate *g, const hx_json *choice)
{
    const hx_json *inner = hx_params_get(choice, "allowed_tools");
    const hx_json *list = hx_params_get(inner != NULL ? inner : choice, "tools");
    const hx_str mode =
        hx_json_str(hx_params_get(inner != NULL ? inner : choice, "mode"));

    if (hx_json_kind(list) != HX_JSON_ARRAY)
        return hx_params_refuse(c, "tool_choice.allowed_tools.tools", list, HX_JSON_ARRAY,
                                "a list");
    g->allowed = list;
    g->tool_choice = hx_str_is(mode, "required") ? HX_TOOLS_REQUIRED : HX_TOOLS_AUTO;
    return 0;
}

/* "auto" and its kind; {"type":"function","function":{"name":…}}, also with the name
 * beside the type; {"type":"allowed_tools",…}. */
static int read_tool_choice(hx_call *c, hx_generate *g)
{
    static const struct {
        const char *name;
        hx_tool_choice choice;
    } words[] = { { "auto", HX_TOOLS_AUTO },
                  { "none", HX_TOOLS_NONE },
                  { "required", HX_TOOLS_REQUIRED },
                  { "any", HX_TOOLS_REQUIRED } };
    const hx_json *choice = hx_params_get(c->body, "tool_choice");
    const hx_json *function = hx_params_get(choice, "function");
    const hx_str type = hx_json_str(
        hx_json_kind(choice) == HX_JSON_OBJECT ? hx_params_get(choice, "type") : choice);

    if (choice == NULL)
        return 0;
    if (hx_str_is(type, "allowed_tools"))
        return allow_tools(c, g, choice);
    g->tool_name =
        hx_json_str(hx_params_get(function != NULL ? function : choice, "name"));
    if (g->tool_name.n > 0) {
        g->tool_choice = HX_TOOLS_NAMED;
        return 0;
    }
    for (size_t i = 0; i < HX_LEN(words); i++)
        if (hx_str_is(type, words[i].name)) {
            g->tool_choice = words[i].choice;
            return 0;
        }
    return hx_params_refuse(c, "tool_choice", choice,
                            hx_json_kind(choice) == HX_JSON_OBJECT ? HX_JSON_OBJECT
                                                                   : HX_JSON_STRING,
                            "\"auto\", \"none\", \"required\" or "
                            "{\"type\":\"function\",\"function\":{\"name\":…}}");
}

/* What would change the answer, and is not done. */
static int refuse_unsupported(hx_call *c)
{
    static const struct {
        const char *name, *instead;
    } fields[] = {
        { "functions", "send them as tools" },
        { "web_search_options", "search with a tool" },
        { "audio", "answers are text" },
    };
    const hx_json *modes = hx_params_get(c->body, "modalities");

    for (size_t i = 0; i < HX_LEN(fields); i++)
        if (hx_params_get(c->body, fields[i].name) != NULL)
            return hx_server_problem(c, 400, fields[i].name, "unsupported_value",
                                     "%s: not supported; %s", fields[i].name,
                                     fields[i].instead);
    if (modes != NULL && hx_json_kind(modes) != HX_JSON_ARRAY)
        return hx_params_refuse(c, "modalities", modes, HX_JSON_ARRAY, "a list");
    for (size_t i = 0; i < hx_json_len(modes); i++)
        if (!hx_str_is(hx_json_str(hx_json_at(modes, i)), "text"))
            return hx_params_refuse(c, "modalities", hx_json_at(modes, i), HX_JSON_STRING,
                                    "\"text\": answers are text");
    return 0;
}

static int read_tools(hx_call *c, hx_generate *g, hx_sb *b)
{
    const hx_json *tools = hx_params_get(c->body, "tools");
    bool parallel = true;
    size_t n;
    int rc;

    if (tools != NULL && hx_json_kind(tools) != HX_JSON_ARRAY)
        return hx_params_refuse(c, "tools", tools, HX_JSON_ARRAY, "a list");
    if ((rc = refuse_unsupported(c)) != 0 || (rc = read_tool_choice(c, g)) != 0 ||
        (rc = hx_params_bool(c, c->body, "parallel_tool_calls", &parallel)) != 0)
        return rc;
    g->one_call = !parallel;
    /* A model that is shown tools writes about them, one way or another. */
    if (tools == NULL || g->tool_choice == HX_TOOLS_NONE)
        return 0;
    if ((rc = put_tools(c, tools, b, &n)) == 0 && n > 0)
        g->tools = tools;
    return rc;
}

/* Names of other APIs map to the three that templates know. */
static int put_effort(hx_call *c, hx_generate *g, hx_sb *b)
{
    static const struct {
        const char *from, *to;
    } efforts[] = {
        { "none", "low" },  { "minimal", "low" }, { "low", "low" }, { "medium", "high" },
        { "high", "high" }, { "xhigh", "max" },   { "max", "max" },
    };
    const hx_json *reasoning = hx_params_get(c->body, "reasoning");
    hx_str effort = { 0 };
    size_t i = 0;
    int rc;

    if ((rc = hx_params_thinking(c, g)) != 0 ||
        (hx_json_kind(reasoning) == HX_JSON_OBJECT &&
         (rc = hx_params_str(c, reasoning, "effort", &effort)) != 0) ||
        (rc = hx_params_str(c, c->body, "reasoning_effort", &effort)) != 0 ||
        effort.p == NULL)
        return rc;
    while (i < HX_LEN(efforts) && !hx_str_is(effort, efforts[i].from))
        i++;
    if (i == HX_LEN(efforts))
        return hx_server_problem(c, 400, "reasoning_effort", "invalid_value",
                                 "reasoning_effort: found \"%.*s\", expected none, "
                                 "minimal, low, medium, high, "
                                 "xhigh or max",
                                 (int)HX_MIN(effort.n, 40u), effort.p);
    g->no_thinking = g->no_thinking || hx_str_is(effort, "none");
    put_member(b, "reasoning_effort", hx_str_c(efforts[i].to));
    return 0;
}

/* chat_template_kwargs go to the template as they are, but for what the request itself
 * says. */
static int put_kwargs(hx_call *c, hx_generate *g, hx_sb *b)
{
    const hx_json *kwargs = hx_params_get(c->body, "chat_template_kwargs");
    bool thinking = true, think = true, clear = false;
    int rc;

    if (kwargs == NULL)
        return 0;
    if (hx_json_kind(kwargs) != HX_JSON_OBJECT)
        return hx_server_problem(c, 400, "chat_template_kwargs", "invalid_type",
                                 "chat_template_kwargs: found %s, expected an object",
                                 hx_json_kind_name(kwargs));
    if ((rc = hx_params_bool(c, kwargs, "enable_thinking", &thinking)) != 0 ||
        (rc = hx_params_bool(c, kwargs, "thinking", &think)) != 0 ||
        (rc = hx_params_bool(c, kwargs, "clear_thinking", &clear)) != 0)
        return rc;
    g->no_thinking = g->no_thinking || !thinking || !think;
    g->rendered_anew = clear;
    for (size_t i = 0; i < hx_json_len(kwargs); i++) {
        hx_str key;
        const hx_json *value = hx_json_member(kwargs, i, &key);

        if (hx_str_is(key, "messages") || hx_str_is(key, "tools") ||
            hx_str_is(key, "add_generation_prompt"))
            continue;
        hx_sb_char(b, ',');
        hx_json_put_str(b, key);
        hx_sb_char(b, ':');
        hx_json_write(b, value);
    }
    return 0;
}

static int put_vars(hx_call *c, hx_generate *g, hx_sb *b)
{
    bool add = true, go_on = false;
    int rc;

    if ((rc = hx_params_bool(c, c->body, "add_generation_prompt", &add)) != 0 ||
        (rc = hx_params_bool(c, c->body, "continue_final_message", &go_on)) != 0)
        return rc;
    if (go_on)
        return hx_server_problem(c, 400, "continue_final_message", "unsupported_value",
                                 "continue_final_message: not supported");
    hx_sb_char(b, '{');
    if ((rc = put_messages(c, b)) != 0 || (rc = read_tools(c, g, b)) != 0 ||
        (rc = put_effort(c, g, b)) != 0 || (rc = put_kwargs(c, g, b)) != 0)
        return rc;
    hx_sb_printf(b, ",\"add_generation_prompt\":%s}", add ? "true" : "false");
    return 0;
}

int hx_openai_vars(hx_call *c, hx_generate *g)
{
    hx_sb b = { 0 };
    int rc = put_vars(c, g, &b);

    if (rc == 0) {
        g->vars = (hx_str) { b.bad ? NULL : hx_arena_dup(&c->arena, b.p, b.n), b.n };
        if (g->vars.p == NULL)
            rc = hx_server_problem(c, 413, "messages", "request_too_large",
                                   "messages: %zu bytes are too many", b.n);
    }
    hx_sb_free(&b);
    return rc;
}

/* ---- what answers are wrapped in ----------------------------------------- */

static void write_head(hx_sb *b, const char *id, const char *object, hx_str model)
{
    hx_sb_printf(b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", id,
                 object, (long long)time(NULL));
    hx_json_put_str(b, model);
    hx_sb_str(b, ",\"system_fingerprint\":\"hoist-" HX_VERSION "\",\"choices\":[");
}

void hx_openai_write_head(hx_sb *b, hx_call *c, const char *prefix, const char *object,
                          hx_str model)
{
    char id[40];

    hx_server_new_id(c->server, prefix, id);
    write_head(b, id, object, model);
}

/* A prompt counts once, however many answers it has. */
void hx_openai_add(hx_openai_sum *s, const hx_gen_event *ev, bool new_prompt)
{
    s->n_prompt += new_prompt ? ev->n_prompt : 0;
    s->n_cached += new_prompt ? ev->n_cached : 0;
    s->n_answer += ev->n_answer;
    s->n_reasoning += ev->n_reasoning;
    s->times = ev->times;
    s->experts = ev->experts;
    s->miss = ev->miss;
    s->miss_pos = ev->miss_pos;
}

static void write_usage(hx_sb *b, const hx_openai_sum *s)
{
    hx_sb_printf(
        b,
        "\"usage\":{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,"
        "\"total_tokens\":%lld,\"prompt_tokens_details\":{\"cached_tokens\":%lld},"
        "\"completion_tokens_details\":{\"reasoning_tokens\":%lld}}",
        (long long)s->n_prompt, (long long)s->n_answer,
        (long long)(s->n_prompt + s->n_answer), (long long)s->n_cached,
        (long long)s->n_reasoning);
}

static double per_second(int64_t n, double ms)
{
    return ms > 0 ? (double)n * 1000 / ms : 0;
}

void hx_openai_write_timings(hx_sb *b, const hx_openai_sum *s)
{
    const hx_times *t = &s->times;
    const int64_t first = t->first_us > 0 ? t->first_us : t->done_us;
    const double prompt_ms = (double)(first - t->started_us) / 1e3;
    const double answer_ms = (double)(t->done_us - first) / 1e3;
    const int64_t n_read = s->n_prompt - s->n_cached;
    const hx_expert_use *u = &s->experts;
    const int64_t all = u->here + u->link + u->lane + u->ahead;

    hx_sb_printf(
        b,
        "\"timings\":{\"prompt_n\":%lld,\"prompt_ms\":%.3f,\"prompt_per_second\":%.2f,"
        "\"predicted_n\":%lld,\"predicted_ms\":%.3f,\"predicted_per_second\":%.2f,"
        "\"queue_ms\":%.3f,\"cache_n\":%lld,\"cache_miss\":\"%s\","
        "\"cache_miss_at\":%lld",
        (long long)n_read, prompt_ms, per_second(n_read, prompt_ms),
        (long long)s->n_answer, answer_ms, per_second(s->n_answer, answer_ms),
        (double)(t->started_us - t->queued_us) / 1e3, (long long)s->n_cached,
        s->miss == HX_MISS_NONE ? "" : hx_miss_name(s->miss), (long long)s->miss_pos);
    if (all > 0)
        hx_sb_printf(b,
                     ",\"experts\":{\"here\":%lld,\"link\":%lld,\"lane\":%lld,"
                     "\"ahead\":%lld,\"hit_rate\":%.4f,\"wait_ms\":%.3f}",
                     (long long)u->here, (long long)u->link, (long long)u->lane,
                     (long long)u->ahead, (double)u->here / (double)all,
                     (double)u->wait_us / 1e3);
    hx_sb_char(b, '}');
}

void hx_openai_write_progress(hx_sb *b, const hx_gen_progress *p)
{
    const int64_t start = p->times.started_us;

    hx_sb_printf(
        b,
        "\"prompt_progress\":{\"total\":%lld,\"cache\":%lld,\"processed\":%lld,"
        "\"time_ms\":%lld,\"queue\":%lld",
        (long long)p->n_prompt, (long long)p->n_cached, (long long)p->n_prefilled,
        (long long)(start != 0 ? (hx_now_us() - start) / 1000 : 0), (long long)p->queue);
    if (p->eta_ms >= 0)
        hx_sb_printf(b, ",\"eta_ms\":%lld", (long long)p->eta_ms);
    hx_sb_char(b, '}');
}

void hx_openai_write_tail(hx_sb *b, const hx_openai_sum *s)
{
    hx_sb_str(b, "],");
    write_usage(b, s);
    hx_sb_char(b, ',');
    hx_openai_write_timings(b, s);
    hx_sb_char(b, '}');
}

void hx_openai_end_chunk(hx_sb *b, const hx_generate *g, const hx_openai_sum *sum)
{
    if (g->usage) {
        hx_sb_str(b, ",\"usage\":null");
    } else if (sum != NULL) {
        hx_sb_char(b, ',');
        hx_openai_write_timings(b, sum);
    }
    hx_sb_str(b, "}\n\n");
}

int hx_openai_end(hx_call *c, int rc, const hx_openai_last *last)
{
    hx_sb b = { 0 };

    if (last->req->usage) {
        hx_sb_add(&b, last->head->p, last->head->n);
        hx_openai_write_tail(&b, last->sum);
        hx_sb_str(&b, "\n\n");
    }
    hx_sb_str(&b, "data: [DONE]\n\n");
    rc = hx_server_end(c, rc, (hx_str) { b.p, b.bad ? 0 : b.n }, last->whole, last->ud);
    hx_sb_free(&b);
    hx_sb_free(last->head);
    return rc;
}

/* ---- answers ------------------------------------------------------------ */

typedef struct {
    char id[40];
    hx_sb name, args;
} tool_call;

typedef struct {
    hx_sb content, reasoning; /* unstreamed */
    tool_call *call;          /* [n_call] unstreamed */
    int32_t n_call;
    hx_sb logprobs; /* entries not yet handed out, "{…},{…}" */
    hx_stop stop;
    bool called;
    int32_t loop_tokens, loop_times; /* as in hx_gen_event */
} choice;

typedef struct {
    hx_call *c;
    hx_generate req;
    char id[40];
    hx_sb head;     /* of every chunk, up to its choices */
    choice *choice; /* [n] */
    hx_openai_sum sum;
    int32_t n_ended;
    bool bad; /* memory ran out */
} chat;

static void put_token_text(hx_sb *b, hx_str bytes)
{
    hx_sb_str(b, "\"token\":");
    hx_json_put_str(b, bytes);
}

/* {"token":…,"logprob":…,"bytes":[…] without its end. JSON has no -Infinity. */
static void put_logprob(hx_sb *b, hx_str bytes, float logprob)
{
    hx_sb_char(b, '{');
    put_token_text(b, bytes);
    hx_sb_printf(b, ",\"logprob\":%.6g,\"bytes\":[", (double)HX_MAX(logprob, -9999.0f));
    for (size_t i = 0; i < bytes.n; i++)
        hx_sb_printf(b, i > 0 ? ",%u" : "%u", (unsigned char)bytes.p[i]);
    hx_sb_char(b, ']');
}

void hx_openai_add_logprob(hx_sb *b, hx_engine *e, const hx_gen_event *ev, int32_t n_top)
{
    if (b->n > 0)
        hx_sb_char(b, ',');
    put_logprob(b, hx_token_bytes(e, ev->token, NULL), ev->logprob);
    hx_sb_str(b, ",\"top_logprobs\":[");
    for (int32_t i = 0; ev->top != NULL && i < n_top; i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_logprob(b, hx_token_bytes(e, ev->top[i].token, NULL), ev->top[i].logprob);
        hx_sb_char(b, '}');
    }
    hx_sb_str(b, "]}");
}

static const char *finish_reason(const choice *k)
{
    return k->stop == HX_STOP_LENGTH          ? "length"
           : k->called && k->loop_tokens == 0 ? "tool_calls"
                                              : "stop";
}

/* What only this server says of an answer. */
static void put_extra(hx_sb *b, const choice *k)
{
    if (k->loop_tokens > 0)
        hx_sb_printf(b, ",\"hoist\":{\"loop\":{\"tokens\":%d,\"times\":%d}}",
                     k->loop_tokens, k->loop_times);
}

/* ---- streamed ----------------------------------------------------------- */

static void begin_chunk(const chat *t, int32_t index, hx_sb *out)
{
    hx_sb_add(out, t->head.p, t->head.n);
    hx_sb_printf(out, "{\"index\":%d,\"delta\":{", index);
}

static void end_chunk(chat *t, int32_t index, const char *finish, hx_sb *out)
{
    choice *k = &t->choice[index];

    hx_sb_char(out, '}');
    if (t->req.sampling.want_logprobs && k->logprobs.n > 0) {
        hx_sb_str(out, ",\"logprobs\":{\"content\":[");
        hx_sb_add(out, k->logprobs.p, k->logprobs.n);
        hx_sb_str(out, "],\"refusal\":null}");
        k->logprobs.n = 0;
    }
    if (finish != NULL) {
        hx_sb_printf(out, ",\"finish_reason\":\"%s\"", finish);
        put_extra(out, k);
        hx_sb_str(out, "}]");
    } else {
        hx_sb_str(out, ",\"finish_reason\":null}]");
    }
    hx_openai_end_chunk(out, &t->req, finish != NULL ? &t->sum : NULL);
}

static void stream_reply(chat *t, int32_t index, const hx_reply_event *ev, hx_sb *out)
{
    char id[40];

    if (ev->kind == HX_REPLY_CALL_END)
        return;
    begin_chunk(t, index, out);
    switch (ev->kind) {
    case HX_REPLY_REASONING:
        hx_sb_str(out, "\"reasoning_content\":");
        hx_json_put_str(out, ev->text);
        hx_sb_str(out, ",\"reasoning\":");
        hx_json_put_str(out, ev->text);
        break;
    case HX_REPLY_CONTENT:
        hx_sb_str(out, "\"content\":");
        hx_json_put_str(out, ev->text);
        break;
    case HX_REPLY_CALL:
        hx_server_new_id(t->c->server, "call_", id);
        hx_sb_printf(out,
                     "\"tool_calls\":[{\"index\":%d,\"id\":\"%s\",\"type\":\"function\","
                     "\"function\":{\"name\":",
                     ev->call, id);
        hx_json_put_str(out, ev->text);
        hx_sb_str(out, ",\"arguments\":\"\"}}]");
        break;
    default:
        hx_sb_printf(
            out, "\"tool_calls\":[{\"index\":%d,\"function\":{\"arguments\":", ev->call);
        hx_json_put_str(out, ev->text);
        hx_sb_str(out, "}}]");
    }
    end_chunk(t, index, NULL, out);
}

/* ---- unstreamed --------------------------------------------------------- */

static void collect_call(chat *t, choice *k, const hx_reply_event *ev)
{
    tool_call *grown = hx_realloc(k->call, (size_t)(k->n_call + 1) * sizeof *grown);

    if (grown == NULL) {
        t->bad = true;
        return;
    }
    k->call = grown;
    tool_call *call = &k->call[k->n_call++];
    *call = (tool_call) { 0 };
    hx_server_new_id(t->c->server, "call_", call->id);
    hx_sb_add(&call->name, ev->text.p, ev->text.n);
}

static void collect_reply(chat *t, choice *k, const hx_reply_event *ev)
{
    switch (ev->kind) {
    case HX_REPLY_REASONING:
        hx_sb_add(&k->reasoning, ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CONTENT:
        hx_sb_add(&k->content, ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CALL:
        collect_call(t, k, ev);
        break;
    case HX_REPLY_ARGS:
        if (ev->call < k->n_call)
            hx_sb_add(&k->call[ev->call].args, ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CALL_END:
        break;
    }
}

static bool is_blank(const hx_sb *b)
{
    for (size_t i = 0; i < b->n; i++)
        if (memchr(" \t\r\n", b->p[i], 4) == NULL)
            return false;
    return true;
}

static void put_message_json(hx_sb *b, const choice *k)
{
    hx_sb_str(b, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (k->n_call > 0 && is_blank(&k->content))
        hx_sb_str(b, "null");
    else
        hx_json_put_str(b, (hx_str) { k->content.p, k->content.n });
    hx_sb_str(b, ",\"refusal\":null"); /* OpenAI's clients may count on it */
    if (k->reasoning.n > 0) {
        put_member(b, "reasoning_content", (hx_str) { k->reasoning.p, k->reasoning.n });
        put_member(b, "reasoning", (hx_str) { k->reasoning.p, k->reasoning.n });
    }
    for (int32_t i = 0; i < k->n_call; i++) {
        const tool_call *call = &k->call[i];

        hx_sb_printf(b, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":",
                     i > 0 ? "," : ",\"tool_calls\":[", call->id);
        hx_json_put_str(b, (hx_str) { call->name.p, call->name.n });
        hx_sb_str(b, ",\"arguments\":");
        hx_json_put_str(b, (hx_str) { call->args.p, call->args.n });
        hx_sb_str(b, "}}");
        b->bad = b->bad || call->name.bad || call->args.bad;
    }
    hx_sb_str(b, k->n_call > 0 ? "]}" : "}");
    b->bad = b->bad || k->content.bad || k->reasoning.bad || k->logprobs.bad;
}

static void reply_whole(void *ud)
{
    chat *t = ud;
    hx_sb b = { 0 };

    write_head(&b, t->id, "chat.completion", t->req.model);
    for (int32_t i = 0; i < t->req.n; i++) {
        const choice *k = &t->choice[i];

        hx_sb_printf(&b, i > 0 ? ",{\"index\":%d," : "{\"index\":%d,", i);
        put_message_json(&b, k);
        if (t->req.sampling.want_logprobs) {
            hx_sb_str(&b, ",\"logprobs\":{\"content\":[");
            hx_sb_add(&b, k->logprobs.p, k->logprobs.n);
            hx_sb_str(&b, "],\"refusal\":null}");
        } else {
            hx_sb_str(&b, ",\"logprobs\":null");
        }
        hx_sb_printf(&b, ",\"finish_reason\":\"%s\"", finish_reason(k));
        put_extra(&b, k);
        hx_sb_char(&b, '}');
    }
    hx_openai_write_tail(&b, &t->sum);
    b.bad = b.bad || t->bad;
    hx_server_reply_json(t->c, &b);
    hx_sb_free(&b);
}

/* ---- one request -------------------------------------------------------- */

static void on_event(void *ud, const hx_gen_event *ev, hx_sb *out)
{
    chat *t = ud;
    choice *k = &t->choice[ev->index];

    switch (ev->kind) {
    case HX_GEN_TOKEN:
        hx_openai_add_logprob(&k->logprobs, t->c->engine, ev, t->req.sampling.n_top);
        break;
    case HX_GEN_REPLY:
        if (t->req.stream)
            stream_reply(t, ev->index, ev->reply, out);
        else
            collect_reply(t, k, ev->reply);
        break;
    case HX_GEN_TEXT:
        break;
    case HX_GEN_END:
        k->stop = ev->stop;
        k->called = ev->n_call > 0;
        k->loop_tokens = ev->loop_tokens;
        k->loop_times = ev->loop_times;
        hx_openai_add(&t->sum, ev, t->n_ended++ == 0);
        if (t->req.stream) {
            begin_chunk(t, ev->index, out);
            end_chunk(t, ev->index, finish_reason(k), out);
        }
        break;
    }
    out->bad = out->bad || k->logprobs.bad;
}

static void on_progress(void *ud, const hx_gen_progress *p, hx_sb *out)
{
    const chat *t = ud;

    hx_sb_add(out, t->head.p, t->head.n);
    hx_sb_printf(out, "{\"index\":%d,\"delta\":{},\"finish_reason\":null}],", p->index);
    hx_openai_write_progress(out, p);
    hx_sb_str(out, "}\n\n");
}

static void begin_stream(chat *t)
{
    hx_sb out = { 0 };

    hx_sb_str(&t->head, "data: ");
    write_head(&t->head, t->id, "chat.completion.chunk", t->req.model);
    hx_server_begin_stream(t->c, (hx_str) { NULL, 0 });
    for (int32_t i = 0; i < t->req.n; i++) {
        begin_chunk(t, i, &out);
        hx_sb_str(&out, "\"role\":\"assistant\",\"content\":\"\"");
        end_chunk(t, i, NULL, &out);
    }
    hx_http_send(t->c->x, (hx_str) { out.p, out.n });
    hx_sb_free(&out);
}

static void write_problem(const hx_call *c, hx_sb *out)
{
    hx_sb_str(out, "data: ");
    hx_server_write_problem(out, &c->problem);
    hx_sb_str(out, "\n\n");
}

const hx_stream_form hx_openai_stream = {
    .type = "text/event-stream; charset=utf-8",
    .idle = { ": keepalive\n\n", 13 },
    .problem = write_problem,
};

static void free_choices(chat *t)
{
    for (int32_t i = 0; t->choice != NULL && i < t->req.n; i++) {
        choice *k = &t->choice[i];

        for (int32_t j = 0; j < k->n_call; j++) {
            hx_sb_free(&k->call[j].name);
            hx_sb_free(&k->call[j].args);
        }
        hx_free(k->call);
        hx_sb_free(&k->content);
        hx_sb_free(&k->reasoning);
        hx_sb_free(&k->logprobs);
    }
}

static int on_end(void *ud, int rc)
{
    chat *t = ud;

    rc = hx_openai_end(t->c, rc,
                       &(hx_openai_last) { &t->head, &t->req, &t->sum, reply_whole, t });
    free_choices(t);
    return rc;
}

static int read_logprobs(hx_call *c, hx_request *r)
{
    int64_t n_top = 0;
    int rc;

    if ((rc = hx_params_bool(c, c->body, "logprobs", &r->want_logprobs)) != 0 ||
        (rc = hx_params_int(c, c->body, "top_logprobs", 0, N_TOP_MAX, &n_top)) != 0)
        return rc;
    if (n_top > 0 && !r->want_logprobs)
        return hx_server_problem(c, 400, "top_logprobs", "invalid_value",
                                 "top_logprobs: needs logprobs true");
    r->n_top = (int32_t)n_top;
    return 0;
}

int hx_openai_chat(hx_call *c)
{
    chat *t = hx_arena_alloc(&c->arena, sizeof *t);
    hx_gen *gen;
    int rc;

    if (t == NULL)
        return hx_server_no_memory(c);
    *t = (chat) { .c = c, .req = { .chat = true } };
    if ((rc = hx_params_sampling(c, &t->req)) != 0 ||
        (rc = read_logprobs(c, &t->req.sampling)) != 0 ||
        (rc = hx_openai_vars(c, &t->req)) != 0)
        return rc;
    const char *most = hx_params_get(c->body, "max_completion_tokens") != NULL
                           ? "max_completion_tokens"
                           : "max_tokens";
    if (t->req.sampling.max_new == 0 && hx_params_get(c->body, most) != NULL)
        return hx_server_problem(c, 400, most, "invalid_value",
                                 "%s: 0, expected at least 1", most);
    if ((t->choice = hx_arena_alloc(&c->arena, (size_t)t->req.n * sizeof *t->choice)) ==
        NULL)
        return hx_server_no_memory(c);
    if ((rc = hx_gen_open(&gen, c, &t->req)) != 0)
        return rc;
    hx_server_new_id(c->server, "chatcmpl-", t->id);
    hx_gen_set_id(gen, t->id);
    if (t->req.stream)
        begin_stream(t);
    return hx_gen_start(gen, &(hx_gen_sink) { .event = on_event,
                                              .end = on_end,
                                              .progress = on_progress,
                                              .ud = t,
                                              .stream = t->req.stream });
}

/* POST /chat/completions/ID/end_thinking */
int hx_openai_act(hx_call *c)
{
    static const char act[] = "/end_thinking", under[] = "/chat/completions/";
    hx_str id = c->x->path;
    const char *at = memmem(id.p, id.n, under, sizeof under - 1);
    hx_sb b = { 0 };

    id.n -= (size_t)(at + sizeof under - 1 - id.p);
    id.p = at + sizeof under - 1;
    if (id.n < sizeof act || memcmp(id.p + id.n - (sizeof act - 1), act, sizeof act - 1))
        return hx_server_problem(c, 404, NULL, "not_found",
                                 "no such path; an answer takes /end_thinking");
    id.n -= sizeof act - 1;
    if (!hx_gen_end_thinking(hx_server_pump(c->server), id))
        return hx_server_problem(c, 404, "id", "not_found",
                                 "no answer of the id %.*s is running",
                                 (int)HX_MIN(id.n, 64u), id.p);
    hx_sb_str(&b, "{\"id\":");
    hx_json_put_str(&b, id);
    hx_sb_str(&b, ",\"object\":\"chat.completion.action\",\"end_thinking\":true}");
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}
