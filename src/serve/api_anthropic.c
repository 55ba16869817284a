/* api_anthropic.c - POST /v1/messages and /v1/messages/count_tokens: a request becomes
 * one for chat completions (turns.c), its answer a message or the events of one.
 *
 * Requests arrive from server.c on a worker, answers from generate.c on the pump. Blocks
 * and tools that run on Anthropic's side are left out, as is everything unknown; what the
 * model cannot take, as images, is refused. */
#include "serve/serve.h"

#include <stdio.h>

#define BLOCK_JOIN "\n" /* between text blocks of one message, which know of no other */

/* Chat completions' names on the left. */
static const hx_rename names[] = {
    { "stop", "stop_sequences" },
    { "reasoning_effort", "output_config.effort" },
    { "response_format.json_schema", "output_config.format" },
    { "response_format", "output_config.format" },
    { NULL, NULL },
};

/* What is read here; all else means what it means in chat completions. */
static const char *const own[] = {
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "stop_sequences",
    "output_config",
    "output_format",
    "stop",
    "response_format",
    "reasoning_effort",
    "max_completion_tokens",
    "n",
    "stream_options",
    "metadata",
    "service_tier",
    "container",
    "mcp_servers",
    "context_management",
    "cache_control",
    NULL,
};

typedef struct {
    hx_call *c;
    hx_generate req;
    char id[40];
    hx_blocks blocks;
    hx_sb *out; /* of the event in hand */
    hx_openai_sum sum;
    hx_stop stop;
    int32_t stop_index;
    bool called;
} message;

typedef struct {
    message *m;
    hx_call *c;
    hx_turns turns;
    const hx_json *change[256]; /* [n_change] of tools, in the order of the messages */
    size_t n_change;
} reader;

static hx_str type_of(const hx_json *j)
{
    return hx_json_str(hx_json_get(j, "type"));
}

/* ---- errors ------------------------------------------------------------------ */

/* Agents look for the words "prompt is too long" to shorten their conversation. */
void hx_anthropic_write_problem(hx_sb *b, const hx_problem *p)
{
    static const struct {
        int status;
        const char *type;
    } types[] = {
        { 401, "authentication_error" }, { 403, "permission_error" },
        { 404, "not_found_error" },      { 413, "request_too_large" },
        { 429, "rate_limit_error" },     { 503, "overloaded_error" },
        { 504, "timeout_error" },
    };
    const char *type =
        p->status >= 500 || p->status < 0 ? "api_error" : "invalid_request_error";
    char text[128];

    for (size_t i = 0; i < HX_LEN(types); i++)
        if (types[i].status == p->status)
            type = types[i].type;
    hx_sb_printf(b, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", type);
    snprintf(text, sizeof text, "prompt is too long: %lld tokens > %lld maximum",
             (long long)p->n_prompt, (long long)p->n_ctx - 1);
    hx_json_put_str(b, hx_str_c(p->n_ctx > 0 ? text : p->msg));
    hx_sb_str(b, "}}");
}

/* ---- signatures --------------------------------------------------------------- */

#define ROTL(x, n) ((x) << (n) | (x) >> (64 - (n)))

static void sip_round(uint64_t v[4])
{
    v[0] += v[1], v[1] = ROTL(v[1], 13) ^ v[0], v[0] = ROTL(v[0], 32);
    v[2] += v[3], v[3] = ROTL(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = ROTL(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = ROTL(v[1], 17) ^ v[2], v[2] = ROTL(v[2], 32);
}

/* SipHash-2-4: Aumasson & Bernstein 2012. */
static uint64_t sip_hash(const uint64_t key[2], hx_str s)
{
    uint64_t v[4] = { key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
                      key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573 };

    for (size_t i = 0; i <= s.n / 8; i++) {
        const size_t n = HX_MIN(s.n - 8 * i, 8u);
        uint64_t m = n < 8 ? (uint64_t)s.n << 56 : 0;

        for (size_t j = 0; j < n; j++)
            m |= (uint64_t)(unsigned char)s.p[8 * i + j] << (8 * j);
        v[3] ^= m;
        sip_round(v);
        sip_round(v);
        v[0] ^= m;
    }
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* Tells reasoning of ours that came back whole from what was altered on the way. The key
 * is no secret, so that signatures outlive the server. */
static void sign(hx_str thinking, char out[24])
{
    static const uint64_t key[2] = { 0x486f697374207468, 0x696e6b696e672031 };

    snprintf(out, 24, "hoist.%016llx", (unsigned long long)sip_hash(key, thinking));
}

/* ---- messages to turns ----------------------------------------------------------- */

static void join(hx_sb *text, hx_str more)
{
    if (text->n > 0 && more.n > 0)
        hx_sb_str(text, BLOCK_JOIN);
    hx_sb_add(text, more.p, more.n);
}

/* A line that counts requests, at the head of each prompt, would keep the prompts from
 * having a common beginning. */
static hx_str without_billing(hx_str s)
{
    static const char line[] = "x-anthropic-billing-header:";
    const char *end;

    while (s.n >= sizeof line - 1 && memcmp(s.p, line, sizeof line - 1) == 0) {
        end = memchr(s.p, '\n', s.n);
        s.n = end != NULL ? (size_t)(s.p + s.n - end - 1) : 0;
        s.p = end != NULL ? end + 1 : s.p;
    }
    return s;
}

static int refuse_block(reader *d, const hx_json *block)
{
    const hx_str type = type_of(block);
    char why[160];

    if (hx_json_kind(block) != HX_JSON_OBJECT)
        return hx_turns_refuse(&d->turns, "", block, HX_JSON_OBJECT,
                               "a block with a type");
    if (type.p == NULL)
        return hx_turns_refuse(&d->turns, ".type", hx_json_get(block, "type"),
                               HX_JSON_STRING, "a string");
    snprintf(why, sizeof why, "blocks of type \"%.40s\" are not supported; only text is",
             type.p);
    return hx_turns_bad(&d->turns, "", why);
}

/* The text of a block that is shown to the model; d->turns.at names it. */
static int read_block(reader *d, const hx_json *block, hx_sb *text)
{
    const hx_str type = type_of(block);
    const hx_json *source = hx_json_get(block, "source"), *t = hx_json_get(block, "text");

    if (hx_str_is(type, "document") && hx_str_is(type_of(source), "text"))
        t = hx_json_get(source, "data");
    else if (!hx_str_is(type, "text"))
        return refuse_block(d, block);
    if (hx_json_kind(t) != HX_JSON_STRING)
        return hx_turns_refuse(&d->turns, ".text", t, HX_JSON_STRING, "a string");
    join(text, hx_json_str(t));
    return 0;
}

/* The content of the block at d->turns.at: a string or text blocks. */
static int read_text(reader *d, const hx_json *content, hx_sb *text)
{
    char at[sizeof d->turns.at];
    int rc = 0;

    if (hx_json_kind(content) == HX_JSON_STRING) {
        join(text, hx_json_str(content));
        return 0;
    }
    if (hx_json_kind(content) != HX_JSON_ARRAY)
        return hx_turns_refuse(&d->turns, ".content", content, HX_JSON_STRING,
                               "a string or a list of blocks");
    memcpy(at, d->turns.at, sizeof at);
    for (size_t i = 0; rc == 0 && i < hx_json_len(content); i++) {
        snprintf(d->turns.at, sizeof d->turns.at, "%.40s.content[%zu]", at, i);
        rc = read_block(d, hx_json_at(content, i), text);
    }
    memcpy(d->turns.at, at, sizeof at);
    return rc;
}

static int take_system(reader *d)
{
    const hx_json *system = hx_params_get(d->c->body, "system");
    hx_sb text = { 0 };
    int rc = 0;

    snprintf(d->turns.at, sizeof d->turns.at, "system");
    if (hx_json_kind(system) == HX_JSON_ARRAY) {
        for (size_t i = 0; rc == 0 && i < hx_json_len(system); i++) {
            const hx_json *block = hx_json_at(system, i), *t = hx_json_get(block, "text");

            snprintf(d->turns.at, sizeof d->turns.at, "system[%zu]", i);
            if (hx_str_is(type_of(block), "text") && hx_json_kind(t) == HX_JSON_STRING)
                join(&text, without_billing(hx_json_str(t)));
            else
                rc = hx_turns_refuse(&d->turns, "", block, HX_JSON_OBJECT,
                                     "{\"type\":\"text\",\"text\":…}");
        }
    } else if (hx_json_kind(system) == HX_JSON_STRING) {
        join(&text, without_billing(hx_json_str(system)));
    } else if (system != NULL) {
        rc = hx_turns_refuse(&d->turns, "", system, HX_JSON_STRING,
                             "a string or a list of text blocks");
    }
    if (rc == 0 && text.n > 0)
        hx_turns_say(&d->turns, "system", (hx_str) { text.p, text.n });
    d->turns.b.bad = d->turns.b.bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

/* Names of tools that a client looked up; the template shows the tools. */
static bool put_references(reader *d, hx_str id, const hx_json *content)
{
    hx_sb b = { 0 };
    hx_json *parts = NULL;

    if (hx_json_kind(content) != HX_JSON_ARRAY || hx_json_len(content) == 0)
        return false;
    for (size_t i = 0; i < hx_json_len(content); i++) {
        const hx_json *block = hx_json_at(content, i);

        if (!hx_str_is(type_of(block), "tool_reference")) {
            hx_sb_free(&b);
            return false;
        }
        hx_sb_str(&b, i > 0 ? ",{" : "[{");
        hx_sb_str(&b, "\"type\":\"tool_reference\",\"name\":");
        hx_json_put_str(&b, hx_json_str(hx_json_get(block, "tool_name")));
        hx_sb_char(&b, '}');
    }
    hx_sb_char(&b, ']');
    if (b.bad || hx_json_parse(&parts, (hx_str) { b.p, b.n }, 0, NULL) != 0)
        d->turns.b.bad = true;
    else
        hx_turns_result(&d->turns, id, parts, (hx_str) { NULL, 0 });
    hx_json_free(parts);
    hx_sb_free(&b);
    return true;
}

/* What a change of tools is about: a definition, or a reference to one of the tools. */
static const hx_json *changed_tool(const hx_json *block, bool *defined)
{
    const hx_json *tool = hx_json_get(block, "tool");

    *defined = hx_str_is(type_of(tool), "tool_definition");
    return *defined ? hx_json_get(tool, "definition") : tool;
}

/* A tool comes or goes amid the conversation; put_tools() reads what is noted here. */
static int take_change(reader *d, const hx_json *block)
{
    bool defined;
    const hx_json *tool = changed_tool(block, &defined);
    const hx_str name = hx_json_str(hx_json_get(tool, "name"));

    if (!defined && !hx_str_is(type_of(tool), "tool_reference"))
        return 0; /* of tools that run on Anthropic's side */
    if (name.n == 0)
        return hx_turns_refuse(&d->turns, ".tool.name", hx_json_get(tool, "name"),
                               HX_JSON_STRING, "a string that is not empty");
    if (defined && hx_json_kind(hx_json_get(tool, "input_schema")) != HX_JSON_OBJECT)
        return hx_turns_refuse(&d->turns, ".tool.definition.input_schema",
                               hx_json_get(tool, "input_schema"), HX_JSON_OBJECT,
                               "an object");
    if (d->n_change == HX_LEN(d->change))
        return hx_turns_bad(&d->turns, "", "more changes of tools than are kept in mind");
    d->change[d->n_change++] = block;
    return 0;
}

static bool is_change(const hx_json *block)
{
    return hx_str_is(type_of(block), "tool_addition") ||
           hx_str_is(type_of(block), "tool_removal");
}

static int take_result(reader *d, const hx_json *block)
{
    const hx_str id = hx_json_str(hx_json_get(block, "tool_use_id"));
    const hx_json *content = hx_params_get(block, "content");
    hx_sb text = { 0 };
    int rc = 0;

    if (put_references(d, id, content))
        return 0;
    if (content != NULL)
        rc = read_text(d, content, &text);
    if (rc == 0)
        hx_turns_result(&d->turns, id, NULL, (hx_str) { text.p, text.n });
    d->turns.b.bad = d->turns.b.bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

/* Results and text in their order; neighbouring text is one message. */
static int take_user(reader *d, const char *role, const hx_json *content)
{
    hx_sb text = { 0 };
    char at[sizeof d->turns.at];
    bool any = false; /* block that is no text */
    int rc = 0;

    if (hx_json_kind(content) == HX_JSON_STRING) {
        hx_turns_say(&d->turns, role, hx_json_str(content));
        return 0;
    }
    if (hx_json_kind(content) != HX_JSON_ARRAY)
        return hx_turns_refuse(&d->turns, ".content", content, HX_JSON_STRING,
                               "a string or a list of blocks");
    memcpy(at, d->turns.at, sizeof at);
    for (size_t i = 0; rc == 0 && i < hx_json_len(content); i++) {
        const hx_json *block = hx_json_at(content, i);
        const bool result = hx_str_is(type_of(block), "tool_result"),
                   system = hx_str_is(type_of(block), "mid_conv_system"),
                   change = is_change(block);

        snprintf(d->turns.at, sizeof d->turns.at, "%.40s.content[%zu]", at, i);
        if ((result || system) && text.n > 0) {
            hx_turns_say(&d->turns, role, (hx_str) { text.p, text.n });
            text.n = 0;
        }
        rc = result   ? take_result(d, block)
             : system ? take_user(d, "system", hx_json_get(block, "content"))
             : change ? take_change(d, block)
                      : read_block(d, block, &text);
        any = any || result || system || change;
    }
    if (rc == 0 && (text.n > 0 || !any))
        hx_turns_say(&d->turns, role, (hx_str) { text.p, text.n });
    d->turns.b.bad = d->turns.b.bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

static int take_thinking(reader *d, const hx_json *block)
{
    const hx_json *thinking = hx_json_get(block, "thinking");
    const hx_str given = hx_json_str(hx_json_get(block, "signature"));
    char ours[24];

    if (hx_json_kind(thinking) != HX_JSON_STRING)
        return hx_turns_refuse(&d->turns, ".thinking", thinking, HX_JSON_STRING,
                               "a string");
    sign(hx_json_str(thinking), ours);
    if (given.n >= 6 && memcmp(given.p, ours, 6) == 0 && !hx_str_is(given, ours))
        return hx_turns_bad(
            &d->turns, ".signature",
            "thinking was altered; send the block back as it came, or leave it "
            "out");
    hx_turns_reasoning(&d->turns, hx_json_str(thinking));
    return 0;
}

static int take_use(reader *d, const hx_json *block)
{
    const hx_json *name = hx_json_get(block, "name"),
                  *input = hx_json_get(block, "input");
    hx_sb args = { 0 };

    if (hx_json_kind(name) != HX_JSON_STRING)
        return hx_turns_refuse(&d->turns, ".name", name, HX_JSON_STRING, "a string");
    if (input != NULL && hx_json_kind(input) != HX_JSON_OBJECT)
        return hx_turns_refuse(&d->turns, ".input", input, HX_JSON_OBJECT, "an object");
    if (input != NULL)
        hx_json_write(&args, input);
    hx_turns_call(&d->turns, hx_json_str(hx_json_get(block, "id")), hx_json_str(name),
                  (hx_str) { args.p, args.n });
    d->turns.b.bad = d->turns.b.bad || args.bad;
    hx_sb_free(&args);
    return 0;
}

/* redacted_thinking and what Anthropic's own tools left is nothing to this model. */
static int take_assistant(reader *d, const hx_json *content)
{
    char at[sizeof d->turns.at];
    int rc = 0;

    if (hx_json_kind(content) == HX_JSON_STRING) {
        hx_turns_assistant(&d->turns, hx_json_str(content));
        return 0;
    }
    memcpy(at, d->turns.at, sizeof at);
    for (size_t i = 0; rc == 0 && i < hx_json_len(content); i++) {
        const hx_json *block = hx_json_at(content, i), *text = hx_json_get(block, "text");
        const hx_str type = type_of(block);

        snprintf(d->turns.at, sizeof d->turns.at, "%.40s.content[%zu]", at, i);
        if (hx_str_is(type, "thinking"))
            rc = take_thinking(d, block);
        else if (hx_str_is(type, "tool_use"))
            rc = take_use(d, block);
        else if (type.p == NULL)
            rc = refuse_block(d, block);
        else if (hx_str_is(type, "text") && hx_json_str(text).p == NULL)
            rc = hx_turns_refuse(&d->turns, ".text", text, HX_JSON_STRING, "a string");
        else if (hx_str_is(type, "text"))
            hx_turns_assistant(&d->turns, hx_json_str(text));
    }
    return rc;
}

static int take_message(reader *d, const hx_json *m, size_t i, bool last)
{
    const hx_str role = hx_json_str(hx_json_get(m, "role"));
    const hx_json *content = hx_json_get(m, "content");
    const bool user = hx_str_is(role, "user"), system = hx_str_is(role, "system");

    snprintf(d->turns.at, sizeof d->turns.at, "messages[%zu]", i);
    if (hx_json_kind(m) != HX_JSON_OBJECT)
        return hx_turns_refuse(&d->turns, "", m, HX_JSON_OBJECT, "an object");
    if (!user && !system && !hx_str_is(role, "assistant"))
        return hx_turns_refuse(&d->turns, ".role", hx_json_get(m, "role"), HX_JSON_STRING,
                               "user, assistant or system");
    if (user || system)
        return take_user(d, user ? "user" : "system", content);
    if (hx_json_kind(content) != HX_JSON_STRING && hx_json_kind(content) != HX_JSON_ARRAY)
        return hx_turns_refuse(&d->turns, ".content", content, HX_JSON_STRING,
                               "a string or a list of blocks");
    if (last)
        return hx_turns_bad(
            &d->turns, "",
            "the last message is the assistant's; going on with an answer that "
            "has begun is not supported");
    return take_assistant(d, content);
}

static int take_messages(reader *d)
{
    const hx_json *list = hx_params_get(d->c->body, "messages");
    const size_t n = hx_json_len(list);
    int rc = 0;

    if (hx_json_kind(list) != HX_JSON_ARRAY || n == 0)
        return hx_params_refuse(d->c, "messages", list, HX_JSON_ARRAY,
                                "a list of at least one message");
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = take_message(d, hx_json_at(list, i), i, i == n - 1);
    return rc;
}

/* ---- tools and switches ------------------------------------------------------------ */

/* The last change of a tool, or NULL. */
static const hx_json *last_change(const reader *d, hx_str name)
{
    bool defined;

    for (size_t i = d->n_change; i-- > 0;)
        if (hx_str_eq(
                hx_json_str(hx_json_get(changed_tool(d->change[i], &defined), "name")),
                name))
            return d->change[i];
    return NULL;
}

static void put_tool(reader *d, const hx_json *t, bool shown, size_t *n)
{
    static const struct {
        const char *from, *to;
    } members[] = { { "name", "name" },
                    { "description", "description" },
                    { "input_schema", "parameters" },
                    { "defer_loading", "defer_loading" } };
    hx_sb *b = &d->turns.b;
    bool first = true;

    hx_sb_str(b, (*n)++ > 0 ? "," : ",\"tools\":[");
    hx_sb_str(b, "{\"type\":\"function\",\"function\":{");
    for (size_t j = 0; j < HX_LEN(members) - shown; j++) {
        const hx_json *v = hx_params_get(t, members[j].from);

        if (v == NULL)
            continue;
        hx_sb_printf(b, first ? "\"%s\":" : ",\"%s\":", members[j].to);
        hx_json_write(b, v);
        first = false;
    }
    hx_sb_str(b, "}}");
}

/* Tools of other types than one's own have no schema for the model. All stand at the head of
 * the prompt, as the messages leave them. */
static int put_tools(reader *d, const hx_json *tools)
{
    bool defined = false;
    size_t n = 0;

    for (size_t i = 0; i < hx_json_len(tools); i++) {
        const hx_json *t = hx_json_at(tools, i), *type = hx_params_get(t, "type"),
                      *change;

        if (type != NULL && !hx_str_is(hx_json_str(type), "custom"))
            continue;
        snprintf(d->turns.at, sizeof d->turns.at, "tools[%zu]", i);
        if (hx_json_str(hx_json_get(t, "name")).n == 0)
            return hx_turns_refuse(&d->turns, ".name", hx_json_get(t, "name"),
                                   HX_JSON_STRING, "a string that is not empty");
        if (hx_json_kind(hx_json_get(t, "input_schema")) != HX_JSON_OBJECT)
            return hx_turns_refuse(&d->turns, ".input_schema",
                                   hx_json_get(t, "input_schema"), HX_JSON_OBJECT,
                                   "an object");
        change = last_change(d, hx_json_str(hx_json_get(t, "name")));
        if (change != NULL)
            changed_tool(change, &defined);
        if (change == NULL || (!defined && hx_str_is(type_of(change), "tool_addition")))
            put_tool(d, t, change != NULL, &n);
    }
    for (size_t i = 0; i < d->n_change; i++) {
        const hx_json *t = changed_tool(d->change[i], &defined);

        if (defined && hx_str_is(type_of(d->change[i]), "tool_addition") &&
            last_change(d, hx_json_str(hx_json_get(t, "name"))) == d->change[i])
            put_tool(d, t, true, &n);
    }
    if (n > 0)
        hx_sb_char(&d->turns.b, ']');
    return 0;
}

static int take_choice(reader *d, const hx_json *tools)
{
    static const struct {
        const char *from, *to; /* to NULL: one tool */
    } choices[] = {
        { "auto", "auto" }, { "none", "none" }, { "any", "required" }, { "tool", NULL }
    };
    const hx_json *choice = hx_params_get(d->c->body, "tool_choice");
    const hx_str name = hx_json_str(hx_params_get(choice, "name"));
    hx_sb *b = &d->turns.b;
    bool alone = false;
    size_t i = 0;

    if (choice == NULL)
        return 0;
    while (i < HX_LEN(choices) && !hx_str_is(type_of(choice), choices[i].from))
        i++;
    if (i == HX_LEN(choices))
        return hx_params_refuse(d->c, "tool_choice.type", hx_json_get(choice, "type"),
                                HX_JSON_STRING, "auto, any, tool or none");
    if (choices[i].to == NULL && !hx_toolset_has(tools, name))
        return hx_params_refuse(d->c, "tool_choice.name", hx_json_get(choice, "name"),
                                HX_JSON_STRING, "the name of one of the tools");
    if (choices[i].to != NULL) {
        hx_sb_printf(b, ",\"tool_choice\":\"%s\"", choices[i].to);
    } else {
        hx_sb_str(b, ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":");
        hx_json_put_str(b, name);
        hx_sb_str(b, "}}");
    }
    if (hx_params_bool(d->c, choice, "disable_parallel_tool_use", &alone) != 0)
        return HX_EARG;
    hx_sb_str(b, alone ? ",\"parallel_tool_calls\":false" : "");
    return 0;
}

/* As in Anthropic's API, there is no thinking unless it is asked for. */
static int take_thinking_switch(reader *d)
{
    const hx_json *thinking = hx_params_get(d->c->body, "thinking");
    const hx_str type = type_of(thinking);
    int64_t budget = 0, max = INT64_MAX;
    int rc;

    if (thinking == NULL) {
        hx_sb_str(&d->turns.b, ",\"thinking\":{\"type\":\"disabled\"}");
        return 0;
    }
    if (!hx_str_is(type, "enabled") && !hx_str_is(type, "adaptive") &&
        !hx_str_is(type, "disabled"))
        return hx_server_problem(d->c, 400, "thinking", "invalid_value",
                                 "thinking.type: expected enabled, adaptive or disabled");
    if ((rc = hx_params_int(d->c, thinking, "budget_tokens", 1, INT32_MAX, &budget)) !=
            0 ||
        (rc = hx_params_int(d->c, d->c->body, "max_tokens", 1, INT32_MAX, &max)) != 0)
        return rc;
    if (budget >= max)
        return hx_server_problem(
            d->c, 400, "thinking", "invalid_value",
            "max_tokens: %lld, expected more than thinking.budget_tokens, %lld",
            (long long)max, (long long)budget);
    hx_turns_put(&d->turns, "thinking", thinking);
    return 0;
}

/* output_format is the older place of output_config.format. */
static int take_output(reader *d)
{
    const hx_json *config = hx_params_get(d->c->body, "output_config");
    const hx_json *format = hx_params_get(config, "format");
    hx_sb *b = &d->turns.b;

    if (config != NULL && hx_json_kind(config) != HX_JSON_OBJECT)
        return hx_server_problem(d->c, 400, "output_config", "invalid_type",
                                 "output_config: found %s, expected an object",
                                 hx_json_kind_name(config));
    if (format == NULL)
        format = hx_params_get(d->c->body, "output_format");
    hx_turns_put(&d->turns, "reasoning_effort", hx_params_get(config, "effort"));
    if (format == NULL)
        return 0;
    if (!hx_str_is(type_of(format), "json_schema"))
        return hx_server_problem(d->c, 400, "output_config.format", "invalid_value",
                                 "output_config.format.type: expected json_schema");
    hx_sb_str(b, ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":");
    hx_json_write(b, format);
    hx_sb_char(b, '}');
    return 0;
}

static int read_conversation(reader *d)
{
    static const char *const lists[] = { "tools", "stop_sequences" };
    const hx_json *tools = hx_params_get(d->c->body, "tools");
    int rc;

    for (size_t i = 0; i < HX_LEN(lists); i++) {
        const hx_json *list = hx_params_get(d->c->body, lists[i]);

        if (list != NULL && hx_json_kind(list) != HX_JSON_ARRAY)
            return hx_server_problem(d->c, 400, lists[i], "invalid_type",
                                     "%s: found %s, expected a list", lists[i],
                                     hx_json_kind_name(list));
    }
    if ((rc = take_system(d)) != 0 || (rc = take_messages(d)) != 0)
        return rc;
    hx_turns_end(&d->turns);
    if ((rc = put_tools(d, tools)) != 0 || (rc = take_choice(d, tools)) != 0 ||
        (rc = take_thinking_switch(d)) != 0 || (rc = take_output(d)) != 0)
        return rc;
    hx_turns_put(&d->turns, "stop", hx_params_get(d->c->body, "stop_sequences"));
    hx_turns_rest(&d->turns, own);
    return 0;
}

static int read_request(message *m)
{
    reader d = { .m = m, .c = m->c };
    int rc;

    hx_turns_open(&d.turns, m->c);
    if ((rc = read_conversation(&d)) == 0)
        rc = hx_turns_use(&d.turns, &m->req, names);
    hx_turns_free(&d.turns);
    if (rc == 0 && m->req.sampling.max_new == 0 &&
        hx_params_get(m->c->body, "max_tokens") != NULL)
        rc = hx_server_problem(m->c, 400, "max_tokens", "invalid_value",
                               "max_tokens: 0, expected at least 1");
    return hx_turns_rename(m->c, names, rc);
}

/* ---- answers ---------------------------------------------------------------------- */

static void put_block(hx_sb *b, const hx_block *k, bool whole)
{
    const hx_str text = whole ? (hx_str) { k->text.p, k->text.n } : (hx_str) { "", 0 };
    char signature[24] = "";

    switch (k->kind) {
    case HX_BLOCK_REASONING:
        if (whole)
            sign(text, signature);
        hx_sb_str(b, "{\"type\":\"thinking\",\"thinking\":");
        hx_json_put_str(b, text);
        hx_sb_printf(b, ",\"signature\":\"%s\"}", signature);
        break;
    case HX_BLOCK_TEXT:
        hx_sb_str(b, "{\"type\":\"text\",\"text\":");
        hx_json_put_str(b, text);
        hx_sb_char(b, '}');
        break;
    case HX_BLOCK_CALL:
        hx_sb_printf(b, "{\"type\":\"tool_use\",\"id\":\"%s\",\"name\":", k->id);
        hx_json_put_str(b, (hx_str) { k->name.p, k->name.n });
        hx_sb_str(b, ",\"input\":");
        hx_sb_add(b, text.n > 0 ? text.p : "{}", text.n > 0 ? text.n : 2);
        hx_sb_char(b, '}');
        break;
    }
}

static void put_stop(hx_sb *b, const message *m)
{
    const hx_request *q = &m->req.sampling;
    const bool text =
        m->stop == HX_STOP_TEXT && m->stop_index >= 0 && m->stop_index < q->n_stop;

    hx_sb_printf(b, "\"stop_reason\":\"%s\",\"stop_sequence\":",
                 m->stop == HX_STOP_LENGTH ? "max_tokens"
                 : text                    ? "stop_sequence"
                 : m->called               ? "tool_use"
                                           : "end_turn");
    if (text)
        hx_json_put_str(b, q->stop[m->stop_index]);
    else
        hx_sb_str(b, "null");
}

/* Tokens from the cache are not among input_tokens. Before the answer it is not known how
 * many there are: then all count as read. */
static void put_usage(hx_sb *b, int64_t n_prompt, const hx_openai_sum *s)
{
    hx_sb_printf(b,
                 "\"usage\":{\"input_tokens\":%lld,\"cache_creation_input_tokens\":0,"
                 "\"cache_read_input_tokens\":%lld,\"output_tokens\":%lld,"
                 "\"output_tokens_details\":{\"thinking_tokens\":%lld}}",
                 (long long)(n_prompt - s->n_cached), (long long)s->n_cached,
                 (long long)s->n_answer, (long long)s->n_reasoning);
}

static void put_head(hx_sb *b, const message *m)
{
    hx_sb_printf(
        b,
        "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", m->id);
    hx_json_put_str(b, m->req.model);
    hx_sb_str(b, ",\"content\":[");
}

static void reply_whole(void *ud)
{
    message *m = ud;
    hx_sb b = { 0 };

    put_head(&b, m);
    for (int32_t i = 0; i < m->blocks.n; i++) {
        if (i > 0)
            hx_sb_char(&b, ',');
        put_block(&b, &m->blocks.block[i], true);
    }
    hx_sb_str(&b, "],");
    put_stop(&b, m);
    hx_sb_char(&b, ',');
    put_usage(&b, m->sum.n_prompt, &m->sum);
    hx_sb_char(&b, '}');
    hx_server_reply_json(m->c, &b);
    hx_sb_free(&b);
}

/* ---- events ------------------------------------------------------------------------- */

static void begin_event(message *m, const char *type)
{
    hx_sb_printf(m->out, "event: %s\ndata: {\"type\":\"%s\"", type, type);
}

static void end_event(message *m)
{
    hx_sb_str(m->out, "}\n\n");
}

static void on_open(void *ud, int32_t i)
{
    message *m = ud;
    hx_block *k = &m->blocks.block[i];

    if (k->kind == HX_BLOCK_CALL)
        hx_server_new_id(m->c->server, "toolu_", k->id);
    if (!m->req.stream)
        return;
    begin_event(m, "content_block_start");
    hx_sb_printf(m->out, ",\"index\":%d,\"content_block\":", i);
    put_block(m->out, k, false);
    end_event(m);
}

static void send_delta(message *m, int32_t i, const char *type, const char *field,
                       hx_str text)
{
    begin_event(m, "content_block_delta");
    hx_sb_printf(m->out, ",\"index\":%d,\"delta\":{\"type\":\"%s\",\"%s\":", i, type,
                 field);
    hx_json_put_str(m->out, text);
    hx_sb_char(m->out, '}');
    end_event(m);
}

static void on_piece(void *ud, int32_t i, hx_str text)
{
    static const struct {
        const char *type, *field;
    } deltas[] = { [HX_BLOCK_REASONING] = { "thinking_delta", "thinking" },
                   [HX_BLOCK_TEXT] = { "text_delta", "text" },
                   [HX_BLOCK_CALL] = { "input_json_delta", "partial_json" } };
    message *m = ud;
    const hx_block_kind kind = m->blocks.block[i].kind;

    if (m->req.stream)
        send_delta(m, i, deltas[kind].type, deltas[kind].field, text);
}

static void on_close(void *ud, int32_t i)
{
    message *m = ud;
    const hx_block *k = &m->blocks.block[i];
    char signature[24];

    if (!m->req.stream)
        return;
    if (k->kind == HX_BLOCK_REASONING) {
        sign((hx_str) { k->text.p, k->text.n }, signature);
        send_delta(m, i, "signature_delta", "signature", hx_str_c(signature));
    }
    begin_event(m, "content_block_stop");
    hx_sb_printf(m->out, ",\"index\":%d", i);
    end_event(m);
}

static void send_end(message *m)
{
    begin_event(m, "message_delta");
    hx_sb_str(m->out, ",\"delta\":{");
    put_stop(m->out, m);
    hx_sb_str(m->out, "},");
    put_usage(m->out, m->sum.n_prompt, &m->sum);
    end_event(m);
    begin_event(m, "message_stop");
    end_event(m);
}

static void on_event(void *ud, const hx_gen_event *ev, hx_sb *out)
{
    message *m = ud;
    const hx_blocks_sink sink = {
        .open = on_open, .piece = on_piece, .close = on_close, .ud = m
    };

    m->out = out;
    if (ev->kind == HX_GEN_REPLY)
        hx_blocks_take(&m->blocks, ev->reply, &sink);
    if (ev->kind == HX_GEN_END) {
        m->stop = ev->stop;
        m->stop_index = ev->stop_index;
        m->called = ev->n_call > 0;
        hx_openai_add(&m->sum, ev, true);
        hx_blocks_end(&m->blocks, &sink);
        if (m->req.stream)
            send_end(m);
    }
    out->bad = out->bad || m->blocks.bad;
}

static int on_end(void *ud, int rc)
{
    message *m = ud;

    rc = hx_server_end(m->c, rc, HX_STR(""), reply_whole, m);
    hx_blocks_free(&m->blocks);
    return rc;
}

#define PING "event: ping\ndata: {\"type\":\"ping\"}\n\n"

static void write_error(const hx_call *c, hx_sb *out)
{
    hx_sb_str(out, "event: error\ndata: ");
    hx_anthropic_write_problem(out, &c->problem);
    hx_sb_str(out, "\n\n");
}

/* Clients drop pings before they look at the order of events. */
const hx_stream_form hx_anthropic_stream = {
    .type = "text/event-stream; charset=utf-8",
    .idle = { PING, sizeof PING - 1 },
    .problem = write_error,
};

static void begin_stream(message *m)
{
    hx_sb out = { 0 };

    m->out = &out;
    begin_event(m, "message_start");
    hx_sb_str(&out, ",\"message\":");
    put_head(&out, m);
    hx_sb_str(&out, "],\"stop_reason\":null,\"stop_sequence\":null,");
    put_usage(&out, m->c->n_prompt, &m->sum);
    hx_sb_char(&out, '}');
    end_event(m);
    hx_sb_str(&out, PING);
    hx_server_begin_stream(m->c, (hx_str) { NULL, 0 });
    hx_http_send(m->c->x, (hx_str) { out.p, out.n });
    hx_sb_free(&out);
}

/* ---- requests ----------------------------------------------------------------------- */

static int make(hx_call *c, message **out)
{
    message *m = hx_arena_alloc(&c->arena, sizeof *m);

    *out = m;
    if (m == NULL)
        return hx_server_no_memory(c);
    *m = (message) { .c = c, .req = { .chat = true } };
    return read_request(m);
}

int hx_anthropic_messages(hx_call *c)
{
    hx_gen *gen;
    message *m;
    int rc;

    if ((rc = make(c, &m)) != 0)
        return rc;
    hx_server_new_id(c->server, "msg_", m->id);
    if ((rc = hx_gen_open(&gen, c, &m->req)) != 0)
        return hx_turns_rename(c, names, rc);
    if (m->req.stream)
        begin_stream(m);
    hx_gen_set_id(gen, m->id);
    return hx_gen_start(gen, &(hx_gen_sink) { .event = on_event,
                                              .end = on_end,
                                              .ud = m,
                                              .stream = m->req.stream,
                                              .waiting = HX_STR(PING) });
}

int hx_anthropic_count(hx_call *c)
{
    hx_sb b = { 0 };
    int64_t n = 0;
    message *m;
    int rc;

    if ((rc = make(c, &m)) != 0 || (rc = hx_gen_count_prompt(c, &m->req, &n)) != 0)
        return rc;
    c->n_prompt = n;
    hx_sb_printf(&b, "{\"input_tokens\":%lld}", (long long)n);
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}
