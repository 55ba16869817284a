/* api_responses.c - POST /v1/responses and what it keeps: a request becomes one for chat
 * completions (turns.c); answers are read again, deleted and cancelled by their id.
 *
 * Runs on workers. Items and tools of kinds that run on OpenAI's side are left out, as is
 * everything unknown; what would change the answer's meaning if left out is refused.
 * Writes no events: api_responses_events.c does. */
#include "serve/api_responses.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ITEM_PAGE_MAX 100

/* Chat completions' names on the left. */
static const hx_rename names[] = {
    { "messages", "input" },
    { "max_tokens", "max_output_tokens" },
    { "response_format.json_schema", "text.format" },
    { "response_format", "text.format" },
    { "reasoning_effort", "reasoning.effort" },
    { NULL, NULL },
};

/* What is read here; all else means what it means in chat completions. */
static const char *const own[] = {
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "reasoning",
    "text",
    "max_output_tokens",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "reasoning_effort",
    "n",
    "store",
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
    "include",
    "truncation",
    "top_logprobs",
    "logprobs",
    "metadata",
    "stream_options",
    "service_tier",
    NULL,
};

typedef struct {
    hx_responder *r;
    hx_call *c;
    hx_turns turns;
    hx_item *input; /* [n_input] as they will be kept */
    size_t n_input;
    size_t n_tool; /* written */
} reader;

/* ---- items to turns ------------------------------------------------------- */

/* Text of a string or of a list of parts. */
static int read_text(reader *d, const char *field, const hx_json *j, hx_sb *out)
{
    static const char *const kinds[] = { "input_text", "output_text", "text",
                                         "summary_text", "reasoning_text" };
    char at[48], why[160];

    if (hx_json_kind(j) == HX_JSON_STRING) {
        hx_sb_add(out, hx_json_str(j).p, hx_json_str(j).n);
        return 0;
    }
    if (hx_json_kind(j) != HX_JSON_ARRAY)
        return hx_turns_refuse(&d->turns, field, j, HX_JSON_STRING,
                               "a string or a list of parts");
    for (size_t i = 0; i < hx_json_len(j); i++) {
        const hx_json *part = hx_json_at(j, i);
        const hx_str type = hx_json_str(hx_json_get(part, "type"));
        const bool refusal = hx_str_is(type, "refusal");
        const hx_json *text = hx_json_get(part, refusal ? "refusal" : "text");
        size_t k = 0;

        snprintf(at, sizeof at, "%s[%zu]", field, i);
        while (k < HX_LEN(kinds) && !hx_str_is(type, kinds[k]))
            k++;
        if (type.p == NULL)
            return hx_turns_refuse(&d->turns, at, part, HX_JSON_OBJECT,
                                   "{\"type\":\"input_text\",\"text\":…}");
        if (k == HX_LEN(kinds) && !refusal) {
            snprintf(why, sizeof why,
                     "parts of type \"%.40s\" are not supported; only text is", type.p);
            return hx_turns_bad(&d->turns, at, why);
        }
        snprintf(at, sizeof at, "%s[%zu].%s", field, i, refusal ? "refusal" : "text");
        if (hx_json_kind(text) != HX_JSON_STRING)
            return hx_turns_refuse(&d->turns, at, text, HX_JSON_STRING, "a string");
        hx_sb_add(out, hx_json_str(text).p, hx_json_str(text).n);
    }
    return 0;
}

static int take_message(reader *d, const hx_json *item)
{
    static const struct {
        const char *from, *to; /* to NULL: the assistant */
    } roles[] = { { "user", "user" },
                  { "assistant", NULL },
                  { "system", "system" },
                  { "developer", "system" } };
    const hx_str role = hx_json_str(hx_json_get(item, "role"));
    hx_sb text = { 0 };
    size_t i = 0;
    int rc;

    while (i < HX_LEN(roles) && !hx_str_is(role, roles[i].from))
        i++;
    if (i == HX_LEN(roles))
        return hx_turns_refuse(&d->turns, ".role", hx_json_get(item, "role"),
                               HX_JSON_STRING, "user, assistant, system or developer");
    rc = read_text(d, ".content", hx_json_get(item, "content"), &text);
    if (rc == 0 && roles[i].to != NULL)
        hx_turns_say(&d->turns, roles[i].to, (hx_str) { text.p, text.n });
    else if (rc == 0)
        hx_turns_assistant(&d->turns, (hx_str) { text.p, text.n });
    d->turns.b.bad = d->turns.b.bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

/* Two names as the model knows them: as one. "functions" is where those without a namespace
 * are. */
static hx_str join_names(hx_call *c, hx_str space, hx_str name)
{
    hx_sb b = { 0 };
    hx_str all;

    if (space.n == 0 || hx_str_is(space, "functions"))
        return name;
    hx_sb_add(&b, space.p, space.n);
    hx_sb_str(&b, "__");
    hx_sb_add(&b, name.p, name.n);
    all = (hx_str) { b.bad ? NULL : hx_arena_dup(&c->arena, b.p, b.n), b.n };
    hx_sb_free(&b);
    return all;
}

static hx_str called_name(const reader *d, const hx_json *item)
{
    return join_names(d->c, hx_json_str(hx_json_get(item, "namespace")),
                      hx_json_str(hx_json_get(item, "name")));
}

static int take_call(reader *d, const hx_json *item)
{
    const hx_str name = called_name(d, item);
    const hx_str args = hx_json_str(hx_json_get(item, "arguments"));
    hx_json *parsed = NULL;
    bool ok;

    if (name.p == NULL)
        return hx_turns_refuse(&d->turns, ".name", hx_json_get(item, "name"),
                               HX_JSON_STRING, "a string");
    ok = args.n == 0 || (hx_json_parse(&parsed, args, 0, NULL) == 0 &&
                         hx_json_kind(parsed) == HX_JSON_OBJECT);
    hx_json_free(parsed);
    if (!ok || (args.p == NULL && hx_params_get(item, "arguments") != NULL))
        return hx_turns_refuse(&d->turns, ".arguments", hx_json_get(item, "arguments"),
                               HX_JSON_STRING, "a string that holds a JSON object");
    hx_turns_call(&d->turns, hx_json_str(hx_json_get(item, "call_id")), name, args);
    return 0;
}

/* A custom tool takes plain text; to the model it is a function of one string. */
static int take_custom_call(reader *d, const hx_json *item)
{
    const hx_json *input = hx_json_get(item, "input");
    const hx_str name = called_name(d, item);
    hx_sb args = { 0 };

    if (name.p == NULL)
        return hx_turns_refuse(&d->turns, ".name", hx_json_get(item, "name"),
                               HX_JSON_STRING, "a string");
    if (hx_json_kind(input) != HX_JSON_STRING)
        return hx_turns_refuse(&d->turns, ".input", input, HX_JSON_STRING, "a string");
    hx_sb_str(&args, "{\"input\":");
    hx_json_put_str(&args, hx_json_str(input));
    hx_sb_char(&args, '}');
    hx_turns_call(&d->turns, hx_json_str(hx_json_get(item, "call_id")), name,
                  (hx_str) { args.p, args.n });
    d->turns.b.bad = d->turns.b.bad || args.bad;
    hx_sb_free(&args);
    return 0;
}

static int take_output(reader *d, const hx_json *item)
{
    const hx_json *output = hx_json_get(item, "output");
    hx_sb text = { 0 };
    int rc = 0;

    if (hx_json_kind(output) == HX_JSON_OBJECT)
        hx_json_write(&text, output);
    else if (hx_json_kind(output) != HX_JSON_NULL)
        rc = read_text(d, ".output", output, &text);
    if (rc == 0)
        hx_turns_result(&d->turns, hx_json_str(hx_json_get(item, "call_id")), NULL,
                        (hx_str) { text.p, text.n });
    d->turns.b.bad = d->turns.b.bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

/* Its text, or what a client that drops that gives back. */
static int take_reasoning(reader *d, const hx_json *item)
{
    const hx_json *content = hx_params_get(item, "content");
    const hx_json *summary = hx_params_get(item, "summary");
    const hx_str sealed = hx_json_str(hx_json_get(item, "encrypted_content"));
    const size_t n = sizeof HX_RESPONSES_SEALED - 1;
    hx_sb text = { 0 };
    int rc = 0;

    if (hx_json_len(content) > 0)
        rc = read_text(d, ".content", content, &text);
    else if (sealed.n >= n && memcmp(sealed.p, HX_RESPONSES_SEALED, n) == 0)
        hx_sb_add(&text, sealed.p + n, sealed.n - n);
    else if (hx_json_len(summary) > 0)
        rc = read_text(d, ".summary", summary, &text);
    if (rc == 0 && text.n > 0)
        hx_turns_reasoning(&d->turns, (hx_str) { text.p, text.n });
    d->turns.b.bad = d->turns.b.bad || text.bad;
    hx_sb_free(&text);
    return rc;
}

/* prefix: of an id that the item gets when it has none. run NULL: kept, but nothing for
 * the model. */
typedef struct {
    const char *type, *prefix;
    int (*run)(reader *d, const hx_json *item);
} item_kind;

static const item_kind item_kinds[] = {
    { "message", "msg_", take_message },
    { "reasoning", "rs_", take_reasoning },
    { "function_call", "fc_", take_call },
    { "function_call_output", "fco_", take_output },
    { "custom_tool_call", "ctc_", take_custom_call },
    { "custom_tool_call_output", "ctco_", take_output },
    { NULL, "item_", NULL },
};

static const item_kind *find_kind(const hx_json *item)
{
    const hx_str type = hx_json_str(hx_params_get(item, "type"));
    const item_kind *k = item_kinds;

    while (k->type != NULL && !hx_str_is(type, k->type) && type.p != NULL)
        k++;
    return k; /* without a type: a message */
}

static int take_item(reader *d, const hx_json *item)
{
    const item_kind *k = find_kind(item);

    if (hx_json_kind(item) != HX_JSON_OBJECT)
        return hx_turns_refuse(&d->turns, "", item, HX_JSON_OBJECT, "an object");
    return k->run != NULL ? k->run(d, item) : 0;
}

/* ---- items as they are kept ------------------------------------------------ */

/* A message's string becomes its one part: what clients expect of a list of items. */
static void write_content(hx_sb *b, const hx_json *item, const hx_json *content)
{
    const bool said = hx_str_is(hx_json_str(hx_json_get(item, "role")), "assistant");

    if (hx_json_kind(content) != HX_JSON_STRING) {
        hx_json_write(b, content);
        return;
    }
    hx_sb_printf(b, "[{\"type\":\"%s\",\"text\":", said ? "output_text" : "input_text");
    hx_json_put_str(b, hx_json_str(content));
    hx_sb_str(b, said ? ",\"annotations\":[],\"logprobs\":[]}]" : "}]");
}

static int keep_item(reader *d, const hx_json *item)
{
    const item_kind *k = find_kind(item);
    const hx_str given = hx_json_str(hx_params_get(item, "id"));
    hx_item *kept = &d->input[d->n_input];
    hx_sb b = { 0 };
    char id[40];

    hx_server_new_id(d->c->server, k->prefix, id);
    kept->id = given.p != NULL ? given : hx_str_c(id);
    hx_sb_str(&b, "{\"id\":");
    hx_json_put_str(&b, kept->id);
    if (hx_params_get(item, "type") == NULL)
        hx_sb_str(&b, ",\"type\":\"message\"");
    for (size_t i = 0; i < hx_json_len(item); i++) {
        hx_str key;
        const hx_json *value = hx_json_member(item, i, &key);

        if (hx_str_is(key, "id"))
            continue;
        hx_sb_char(&b, ',');
        hx_json_put_str(&b, key);
        hx_sb_char(&b, ':');
        if (hx_str_is(key, "content"))
            write_content(&b, item, value);
        else
            hx_json_write(&b, value);
    }
    hx_sb_char(&b, '}');
    kept->id.p = hx_arena_dup(&d->c->arena, kept->id.p, kept->id.n);
    kept->json = (hx_str) { b.bad ? NULL : hx_arena_dup(&d->c->arena, b.p, b.n), b.n };
    hx_sb_free(&b);
    d->n_input++;
    return kept->id.p != NULL && kept->json.p != NULL ? 0 : hx_server_no_memory(d->c);
}

/* ---- input ------------------------------------------------------------------ */

/* Items that an earlier answer kept: "{…},{…}". */
static int take_kept(reader *d, const hx_sb *items, bool keep)
{
    hx_json *list = NULL;
    hx_sb b = { 0 };
    int rc = 0;

    hx_sb_char(&b, '[');
    hx_sb_add(&b, items->p, items->n);
    hx_sb_char(&b, ']');
    if (items->bad || b.bad ||
        hx_json_parse(&list, (hx_str) { b.p, b.n }, 160, NULL) != 0)
        rc = hx_server_no_memory(d->c);
    for (size_t i = 0; rc == 0 && i < hx_json_len(list); i++)
        if ((rc = take_item(d, hx_json_at(list, i))) == 0 && keep)
            rc = keep_item(d, hx_json_at(list, i));
    hx_json_free(list);
    hx_sb_free(&b);
    return rc;
}

static int take_previous(reader *d)
{
    hx_sb items = { 0 };
    int rc;

    if ((rc = hx_params_str(d->c, d->c->body, "previous_response_id", &d->r->previous)) !=
            0 ||
        d->r->previous.p == NULL)
        return rc;
    snprintf(d->turns.at, sizeof d->turns.at, "previous_response_id");
    rc = hx_response_store_history(hx_server_responses(d->c->server), d->r->previous,
                                   &items);
    if (rc == HX_EARG)
        rc = hx_server_problem(d->c, 404, d->turns.at, "previous_response_not_found",
                               "previous_response_id: no response \"%.*s\" is kept here",
                               (int)HX_MIN(d->r->previous.n, 80u), d->r->previous.p);
    else if (rc == HX_EBUSY)
        rc = hx_turns_bad(&d->turns, "", "that response still runs");
    else if (rc != 0)
        rc = hx_server_no_memory(d->c);
    else
        rc = take_kept(d, &items, false);
    hx_sb_free(&items);
    return rc;
}

static int take_reference(reader *d, hx_str id)
{
    hx_sb item = { 0 };
    int rc = hx_response_store_item(hx_server_responses(d->c->server), id, &item);

    if (rc == 0)
        rc = take_kept(d, &item, true);
    else
        rc = hx_server_problem(d->c, 404, d->turns.at, "item_not_found",
                               "%s: no item \"%.*s\" is kept here", d->turns.at,
                               (int)HX_MIN(id.n, 80u), id.p);
    hx_sb_free(&item);
    return rc;
}

static int take_string(reader *d, hx_str text)
{
    hx_item *kept = &d->input[d->n_input++];
    hx_sb b = { 0 };
    char id[40];

    hx_turns_say(&d->turns, "user", text);
    hx_server_new_id(d->c->server, "msg_", id);
    hx_sb_printf(&b,
                 "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"user\",\"content\":"
                 "[{\"type\":\"input_text\",\"text\":",
                 id);
    hx_json_put_str(&b, text);
    hx_sb_str(&b, "}]}");
    kept->id = (hx_str) { hx_arena_dup(&d->c->arena, id, strlen(id)), strlen(id) };
    kept->json = (hx_str) { b.bad ? NULL : hx_arena_dup(&d->c->arena, b.p, b.n), b.n };
    hx_sb_free(&b);
    return kept->id.p != NULL && kept->json.p != NULL ? 0 : hx_server_no_memory(d->c);
}

static int take_list(reader *d, const hx_json *input)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < hx_json_len(input); i++) {
        const hx_json *item = hx_json_at(input, i);
        const hx_str type = hx_json_str(hx_json_get(item, "type"));
        const hx_str id = hx_json_str(hx_json_get(item, "id"));

        snprintf(d->turns.at, sizeof d->turns.at, "input[%zu]", i);
        /* AI SDKs leave the type out of a reference, as the API allows. */
        if (hx_str_is(type, "item_reference") ||
            (type.p == NULL && id.p != NULL && hx_json_len(item) == 1)) {
            rc = id.p != NULL ? take_reference(d, id)
                              : hx_turns_refuse(&d->turns, ".id", hx_json_get(item, "id"),
                                                HX_JSON_STRING, "a string");
            continue;
        }
        if ((rc = take_item(d, item)) == 0)
            rc = keep_item(d, item);
    }
    return rc;
}

static int take_input(reader *d)
{
    const hx_json *input = hx_params_get(d->c->body, "input");
    const size_t n = hx_json_len(input);
    hx_str instructions = { 0 };
    int rc;

    if ((rc = hx_params_str(d->c, d->c->body, "instructions", &instructions)) != 0)
        return rc;
    if (hx_json_kind(input) != HX_JSON_STRING &&
        (hx_json_kind(input) != HX_JSON_ARRAY ||
         (n == 0 && hx_params_get(d->c->body, "previous_response_id") == NULL)))
        return hx_params_refuse(d->c, "input", input, HX_JSON_ARRAY,
                                "a string or a list of at least one item");
    if ((d->input = hx_arena_alloc(&d->c->arena, (n + 1) * sizeof *d->input)) == NULL)
        return hx_server_no_memory(d->c);
    if (instructions.n > 0)
        hx_turns_say(&d->turns, "system", instructions);
    if ((rc = take_previous(d)) != 0)
        return rc;
    return hx_json_kind(input) == HX_JSON_STRING ? take_string(d, hx_json_str(input))
                                                 : take_list(d, input);
}

/* ---- tools -------------------------------------------------------------------- */

static void put_custom_parameters(hx_sb *b, const hx_json *tool)
{
    const hx_json *grammar = hx_params_get(hx_params_get(tool, "format"), "definition");

    hx_sb_str(b, ",\"parameters\":{\"type\":\"object\",\"properties\":{\"input\":{"
                 "\"type\":\"string\"");
    if (grammar != NULL) {
        hx_sb_str(b, ",\"description\":");
        hx_json_write(b, grammar);
    }
    hx_sb_str(b, "}},\"required\":[\"input\"]}");
}

static void put_tool(reader *d, const hx_json *tool, hx_str shown, bool custom)
{
    static const char *const members[] = { "description", "parameters", "strict",
                                           "defer_loading" };
    hx_sb *b = &d->turns.b;

    hx_sb_str(b, d->n_tool++ > 0 ? "," : ",\"tools\":[");
    hx_sb_str(b, "{\"type\":\"function\",\"function\":{\"name\":");
    hx_json_put_str(b, shown);
    for (size_t i = 0; i < HX_LEN(members); i++) {
        const hx_json *v = hx_params_get(tool, members[i]);

        if (v == NULL || (custom && strcmp(members[i], "parameters") == 0))
            continue;
        hx_sb_printf(b, ",\"%s\":", members[i]);
        hx_json_write(b, v);
    }
    if (custom)
        put_custom_parameters(b, tool);
    hx_sb_str(b, "}}");
}

/* Remembers how the client knows a tool that the model knows as shown. */
static int note_tool(reader *d, const hx_responses_tool *t)
{
    hx_responder *r = d->r;

    if (r->n_tool % 16 == 0) {
        hx_responses_tool *grown =
            hx_arena_alloc(&d->c->arena, (r->n_tool + 16) * sizeof *grown);

        if (grown == NULL)
            return hx_server_no_memory(d->c);
        if (r->n_tool > 0)
            memcpy(grown, r->tool, r->n_tool * sizeof *grown);
        r->tool = grown;
    }
    r->tool[r->n_tool++] = *t; /* strings of the body, which lives as long */
    return 0;
}

/* A function or a custom tool, perhaps in a namespace; others run elsewhere. */
static int take_tool(reader *d, const hx_json *tool, hx_str space)
{
    const hx_str type = hx_json_str(hx_json_get(tool, "type"));
    hx_responses_tool t = { .name = hx_json_str(hx_json_get(tool, "name")),
                            .space = space,
                            .custom = hx_str_is(type, "custom") };

    if (hx_json_kind(tool) != HX_JSON_OBJECT)
        return hx_turns_refuse(&d->turns, "", tool, HX_JSON_OBJECT, "an object");
    if (!t.custom && !hx_str_is(type, "function"))
        return 0;
    if (t.name.n == 0)
        return hx_turns_refuse(&d->turns, ".name", hx_json_get(tool, "name"),
                               HX_JSON_STRING, "a string that is not empty");
    t.shown = join_names(d->c, space, t.name);
    if (t.shown.p == NULL)
        return hx_server_no_memory(d->c);
    put_tool(d, tool, t.shown, t.custom);
    return t.custom || space.n > 0 ? note_tool(d, &t) : 0;
}

/* A list of tools; field names it. */
static int take_tool_list(reader *d, const char *field, const hx_json *tools)
{
    int rc = 0;

    if (tools != NULL && hx_json_kind(tools) != HX_JSON_ARRAY)
        return hx_server_problem(d->c, 400, field, "invalid_type",
                                 "%s: found %s, expected a list", field,
                                 hx_json_kind_name(tools));
    for (size_t i = 0; rc == 0 && i < hx_json_len(tools); i++) {
        const hx_json *t = hx_json_at(tools, i), *inner = hx_json_get(t, "tools");
        const bool space = hx_str_is(hx_json_str(hx_json_get(t, "type")), "namespace");

        snprintf(d->turns.at, sizeof d->turns.at, "%s[%zu]", field, i);
        if (!space)
            rc = take_tool(d, t, (hx_str) { NULL, 0 });
        for (size_t j = 0; space && rc == 0 && j < hx_json_len(inner); j++) {
            snprintf(d->turns.at, sizeof d->turns.at, "%s[%zu].tools[%zu]", field, i, j);
            rc = take_tool(d, hx_json_at(inner, j), hx_json_str(hx_json_get(t, "name")));
        }
    }
    return rc;
}

/* Codex sends its tools as an item of the input. */
static int take_tools(reader *d, const hx_json *tools)
{
    const hx_json *input = hx_params_get(d->c->body, "input");
    const bool items = hx_json_kind(input) == HX_JSON_ARRAY;
    int rc = take_tool_list(d, "tools", tools);

    for (size_t i = 0; items && rc == 0 && i < hx_json_len(input); i++) {
        const hx_json *item = hx_json_at(input, i);
        char field[40];

        snprintf(field, sizeof field, "input[%zu].tools", i);
        if (hx_str_is(hx_json_str(hx_json_get(item, "type")), "additional_tools"))
            rc = take_tool_list(d, field, hx_params_get(item, "tools"));
    }
    if (d->n_tool > 0)
        hx_sb_char(&d->turns.b, ']');
    return rc;
}

/* To the model a custom tool is a function, too. */
static void put_named(hx_sb *b, hx_str name)
{
    hx_sb_str(b, "{\"type\":\"function\",\"function\":{\"name\":");
    hx_json_put_str(b, name);
    hx_sb_str(b, "}}");
}

static int put_allowed(reader *d, const hx_json *choice)
{
    const hx_json *allowed = hx_params_get(choice, "tools");
    const hx_json *mode = hx_params_get(choice, "mode");
    hx_sb *b = &d->turns.b;

    if (hx_json_kind(allowed) != HX_JSON_ARRAY || hx_json_kind(mode) != HX_JSON_STRING)
        return hx_server_problem(d->c, 400, "tool_choice", "invalid_value",
                                 "tool_choice: allowed_tools needs a mode and a list of "
                                 "tools");
    hx_sb_str(b, ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{"
                 "\"mode\":");
    hx_json_write(b, mode);
    hx_sb_str(b, ",\"tools\":[");
    for (size_t i = 0; i < hx_json_len(allowed); i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_named(b, hx_json_str(hx_json_get(hx_json_at(allowed, i), "name")));
    }
    hx_sb_str(b, "]}}");
    return 0;
}

/* Words are the same in both APIs. */
static int take_choice(reader *d, const hx_json *tools)
{
    const hx_json *choice = hx_params_get(d->c->body, "tool_choice");
    const hx_str type = hx_json_str(hx_params_get(choice, "type"));
    const hx_str name = hx_json_str(hx_params_get(choice, "name"));

    if (hx_str_is(type, "allowed_tools"))
        return put_allowed(d, choice);
    if (hx_json_kind(choice) != HX_JSON_OBJECT) {
        hx_turns_put(&d->turns, "tool_choice", choice);
        return 0;
    }
    if (!hx_toolset_has(tools, name))
        return hx_server_problem(d->c, 400, "tool_choice", "invalid_value",
                                 "tool_choice: expected \"auto\", \"none\", \"required\" "
                                 "or one of the tools, by type and name");
    hx_sb_str(&d->turns.b, ",\"tool_choice\":");
    put_named(&d->turns.b, name);
    return 0;
}

/* ---- switches --------------------------------------------------------------- */

static int get_object(hx_call *c, const char *name, const hx_json **out)
{
    *out = hx_params_get(c->body, name);
    if (*out != NULL && hx_json_kind(*out) != HX_JSON_OBJECT)
        return hx_server_problem(c, 400, name, "invalid_type",
                                 "%s: found %s, expected an object", name,
                                 hx_json_kind_name(*out));
    return 0;
}

static int take_reasoning_switches(reader *d)
{
    const hx_json *reasoning, *summary;
    int rc = get_object(d->c, "reasoning", &reasoning);

    if (rc != 0)
        return rc;
    summary = hx_params_get(reasoning, "summary");
    if (summary == NULL)
        summary = hx_params_get(reasoning, "generate_summary");
    d->r->summary = summary != NULL && !hx_str_is(hx_json_str(summary), "none");
    hx_turns_put(&d->turns, "reasoning_effort", hx_params_get(reasoning, "effort"));
    return 0;
}

static int take_format(reader *d)
{
    const hx_json *text, *format;
    hx_sb *b = &d->turns.b;
    int rc = get_object(d->c, "text", &text);

    if (rc != 0 || (format = hx_params_get(text, "format")) == NULL)
        return rc;
    if (!hx_str_is(hx_json_str(hx_json_get(format, "type")), "json_schema")) {
        hx_turns_put(&d->turns, "response_format", format);
        return 0;
    }
    hx_sb_str(b, ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":");
    hx_json_write(b, format);
    hx_sb_char(b, '}');
    return 0;
}

/* Log-probabilities are asked for by either of two fields. */
static int take_include(reader *d)
{
    const hx_json *include = hx_params_get(d->c->body, "include");
    const hx_json *top = hx_params_get(d->c->body, "top_logprobs");
    bool logprobs = top != NULL;

    if (include != NULL && hx_json_kind(include) != HX_JSON_ARRAY)
        return hx_server_problem(d->c, 400, "include", "invalid_type",
                                 "include: found %s, expected a list",
                                 hx_json_kind_name(include));
    for (size_t i = 0; i < hx_json_len(include); i++) {
        const hx_str what = hx_json_str(hx_json_at(include, i));

        if (hx_str_is(what, "reasoning.encrypted_content"))
            d->r->encrypted = true;
        if (hx_str_is(what, "message.output_text.logprobs"))
            logprobs = true;
    }
    d->r->req.sampling.want_logprobs = logprobs;
    return 0;
}

/* What would change the answer if it were left out. */
static int refuse(hx_call *c)
{
    static const char *const unsupported[] = { "conversation", "prompt" };
    bool background = false;
    hx_str truncation = { 0 };
    int rc;

    for (size_t i = 0; i < HX_LEN(unsupported); i++)
        if (hx_params_get(c->body, unsupported[i]) != NULL)
            return hx_server_problem(c, 400, unsupported[i], "unsupported_value",
                                     "%s: not supported; send the items as input",
                                     unsupported[i]);
    if ((rc = hx_params_bool(c, c->body, "background", &background)) != 0 ||
        (rc = hx_params_str(c, c->body, "truncation", &truncation)) != 0)
        return rc;
    if (background)
        return hx_server_problem(c, 400, "background", "unsupported_value",
                                 "background: not supported; use stream");
    if (truncation.p != NULL && !hx_str_is(truncation, "auto") &&
        !hx_str_is(truncation, "disabled"))
        return hx_server_problem(c, 400, "truncation", "invalid_value",
                                 "truncation: expected \"auto\" or \"disabled\"");
    return 0;
}

/* ---- what the object repeats -------------------------------------------------- */

static void put_member(hx_sb *b, const hx_json *body, const char *name, const char *dflt)
{
    const hx_json *v = hx_params_get(body, name);

    hx_sb_printf(b, ",\"%s\":", name);
    if (v != NULL)
        hx_json_write(b, v);
    else
        hx_sb_str(b, dflt);
}

/* An object of switches, of which clients expect one member even if it was not given. */
static void put_object(hx_sb *b, const hx_json *body, const char *name,
                       const char *member, const char *dflt)
{
    const hx_json *given = hx_params_get(body, name);

    hx_sb_printf(b, ",\"%s\":{", name);
    if (hx_params_get(given, member) == NULL)
        hx_sb_printf(b, "\"%s\":%s", member, dflt);
    for (size_t i = 0, n = b->n; i < hx_json_len(given); i++) {
        hx_str key;
        const hx_json *v = hx_json_member(given, i, &key);

        if (hx_json_kind(v) == HX_JSON_NULL)
            continue;
        if (b->n > n || hx_params_get(given, member) == NULL)
            hx_sb_char(b, ',');
        hx_json_put_str(b, key);
        hx_sb_char(b, ':');
        hx_json_write(b, v);
    }
    hx_sb_char(b, '}');
}

/* Numbers as they are in force. */
static int write_echo(hx_responder *r)
{
    static const struct {
        const char *name, *dflt;
    } members[] = {
        { "instructions", "null" },
        { "metadata", "{}" },
        { "tools", "[]" },
        { "tool_choice", "\"auto\"" },
        { "parallel_tool_calls", "true" },
        { "max_output_tokens", "null" },
        { "max_tool_calls", "null" },
        { "previous_response_id", "null" },
        { "store", "true" },
        { "truncation", "\"disabled\"" },
        { "user", "null" },
        { "prompt_cache_key", "null" },
        { "safety_identifier", "null" },
    };
    const hx_request *q = &r->req.sampling;
    hx_sb b = { 0 };

    hx_sb_str(&b, ",\"model\":");
    hx_json_put_str(&b, r->req.model);
    hx_sb_printf(&b,
                 ",\"temperature\":%g,\"top_p\":%g,\"top_logprobs\":%d,"
                 "\"service_tier\":\"default\"",
                 (double)q->temperature, (double)q->top_p, q->n_top);
    put_object(&b, r->c->body, "reasoning", "effort", "null");
    put_object(&b, r->c->body, "text", "format", "{\"type\":\"text\"}");
    for (size_t i = 0; i < HX_LEN(members); i++)
        put_member(&b, r->c->body, members[i].name, members[i].dflt);
    r->echo = (hx_str) { b.bad ? NULL : hx_arena_dup(&r->c->arena, b.p, b.n), b.n };
    hx_sb_free(&b);
    return r->echo.p != NULL ? 0 : hx_server_no_memory(r->c);
}

/* ---- requests ------------------------------------------------------------------ */

static int read_conversation(reader *d)
{
    hx_call *c = d->c;
    const hx_json *tools = hx_params_get(c->body, "tools");
    int rc;

    if ((rc = refuse(c)) != 0 || (rc = take_input(d)) != 0)
        return rc;
    hx_turns_end(&d->turns);
    if ((rc = take_tools(d, tools)) != 0 || (rc = take_choice(d, tools)) != 0 ||
        (rc = take_reasoning_switches(d)) != 0 || (rc = take_format(d)) != 0 ||
        (rc = take_include(d)) != 0)
        return rc;
    hx_turns_put(&d->turns, "max_tokens", hx_params_get(c->body, "max_output_tokens"));
    hx_turns_rest(&d->turns, own);
    return hx_turns_use(&d->turns, &d->r->req, names);
}

static int read_request(reader *d)
{
    hx_call *c = d->c;
    hx_request *q = &d->r->req.sampling;
    int64_t n_top = 0;
    int rc;

    hx_turns_open(&d->turns, c);
    rc = read_conversation(d);
    hx_turns_free(&d->turns);
    if (rc != 0)
        return rc;
    if ((rc = hx_params_bool(c, c->body, "store", &d->r->store)) != 0 ||
        (rc = hx_params_int(c, c->body, "top_logprobs", 0, 20, &n_top)) != 0)
        return rc;
    q->n_top = (int32_t)n_top;
    if (q->max_new == 0 && hx_params_get(c->body, "max_output_tokens") != NULL)
        return hx_server_problem(c, 400, "max_output_tokens", "invalid_value",
                                 "max_output_tokens: 0, expected at least 1");
    return 0;
}

static int make(hx_call *c, reader *d)
{
    hx_responder *r = hx_arena_alloc(&c->arena, sizeof *r);

    if (r == NULL)
        return hx_server_no_memory(c);
    *r = (hx_responder) {
        .c = c, .req = { .chat = true }, .created_s = (int64_t)time(NULL), .store = true
    };
    hx_server_new_id(c->server, "resp_", r->id);
    c->state = r;
    *d = (reader) { .c = c, .r = r };
    return hx_turns_rename(c, names, read_request(d));
}

int hx_responses_create(hx_call *c)
{
    reader d;
    int rc;

    if ((rc = make(c, &d)) != 0 || (rc = write_echo(d.r)) != 0)
        return rc;
    if ((rc = hx_gen_open(&d.r->gen, c, &d.r->req)) != 0)
        return hx_turns_rename(c, names, rc);
    return hx_responses_start(d.r, d.input, d.n_input);
}

int hx_responses_count(hx_call *c)
{
    hx_sb b = { 0 };
    int64_t n = 0;
    reader d;
    int rc;

    if ((rc = make(c, &d)) != 0 || (rc = hx_gen_count_prompt(c, &d.r->req, &n)) != 0)
        return hx_turns_rename(c, names, rc);
    c->n_prompt = n;
    hx_sb_printf(&b, "{\"object\":\"response.input_tokens\",\"input_tokens\":%lld}",
                 (long long)n);
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}

/* ---- kept responses ----------------------------------------------------------- */

/* The path's "responses/ID" and what follows: "" or "/…". */
static hx_str get_id(const hx_call *c, hx_str *rest)
{
    static const char before[] = "responses/";
    const size_t n = sizeof before - 1;
    const hx_str path = c->x->path;
    const char *p = (const char *)memmem(path.p, path.n, before, n) + n;
    const char *end = path.p + path.n, *slash = memchr(p, '/', (size_t)(end - p));

    if (slash == NULL)
        slash = end;
    *rest = (hx_str) { slash, (size_t)(end - slash) };
    return (hx_str) { p, (size_t)(slash - p) };
}

static int not_found(hx_call *c, hx_str id)
{
    return hx_server_problem(c, 404, "response_id", "response_not_found",
                             "response: no \"%.*s\" is kept here", (int)HX_MIN(id.n, 80u),
                             id.p);
}

static int no_path(hx_call *c)
{
    return hx_server_problem(c, 404, NULL, "not_found", "no such path: %s", c->path);
}

static int reply_kept(hx_call *c, int rc, hx_str id, hx_sb *b)
{
    if (rc == 0)
        hx_server_reply_json(c, b);
    hx_sb_free(b);
    if (rc == HX_ENOMEM)
        return hx_server_no_memory(c);
    return rc != 0 ? not_found(c, id) : 0;
}

static int retrieve_inputs(hx_call *c, hx_str id)
{
    const hx_str limit = hx_server_query(c, "limit"), order = hx_server_query(c, "order");
    hx_item_page page = { .limit = 20,
                          .newest_first = !hx_str_is(order, "asc"),
                          .after = hx_server_query(c, "after") };
    char digits[8];
    hx_sb b = { 0 };
    int rc;

    if (limit.p != NULL) {
        snprintf(digits, sizeof digits, "%.*s", (int)HX_MIN(limit.n, 7u), limit.p);
        page.limit = strtol(digits, NULL, 10);
    }
    if (page.limit < 1 || page.limit > ITEM_PAGE_MAX)
        return hx_server_problem(c, 400, "limit", "invalid_value",
                                 "limit: expected 1..%d", ITEM_PAGE_MAX);
    if (order.p != NULL && page.newest_first && !hx_str_is(order, "desc"))
        return hx_server_problem(c, 400, "order", "invalid_value",
                                 "order: found \"%.*s\", expected asc or desc",
                                 (int)HX_MIN(order.n, 40u), order.p);
    rc = hx_response_store_inputs(hx_server_responses(c->server), id, &page, &b);
    if (rc == HX_EFORMAT) {
        hx_sb_free(&b);
        return hx_server_problem(c, 400, "after", "invalid_value",
                                 "after: no item \"%.*s\" of this response",
                                 (int)HX_MIN(page.after.n, 80u), page.after.p);
    }
    return reply_kept(c, rc, id, &b);
}

int hx_responses_retrieve(hx_call *c)
{
    hx_str rest;
    const hx_str id = get_id(c, &rest);
    hx_sb b = { 0 };

    if (hx_str_is(rest, "/input_items"))
        return retrieve_inputs(c, id);
    if (rest.n > 0)
        return no_path(c);
    if (hx_str_is(hx_server_query(c, "stream"), "true"))
        return hx_server_problem(c, 400, "stream", "unsupported_value",
                                 "stream: a kept response is read at once");
    return reply_kept(c, hx_response_store_read(hx_server_responses(c->server), id, &b),
                      id, &b);
}

int hx_responses_delete(hx_call *c)
{
    hx_str rest;
    const hx_str id = get_id(c, &rest);
    hx_sb b = { 0 };
    int rc;

    if (rest.n > 0)
        return no_path(c);
    rc = hx_response_store_remove(hx_server_responses(c->server), id);
    hx_sb_str(&b, "{\"id\":");
    hx_json_put_str(&b, id);
    hx_sb_str(&b, ",\"object\":\"response\",\"deleted\":true}");
    return reply_kept(c, rc, id, &b);
}

/* One that has ended stays as it is. */
int hx_responses_act(hx_call *c)
{
    hx_responses *store = hx_server_responses(c->server);
    hx_str rest;
    const hx_str id = get_id(c, &rest);
    hx_sb b = { 0 };
    int rc;

    if (!hx_str_is(rest, "/cancel"))
        return no_path(c);
    if ((rc = hx_response_store_cancel(store, id)) == 0)
        rc = hx_response_store_read(store, id, &b);
    return reply_kept(c, rc, id, &b);
}
