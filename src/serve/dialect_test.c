/* dialect_test.c - the Responses and Messages APIs over real sockets with fake_engine.c in
 * place of a model. Shapes and the order of events are those of the public references of
 * both APIs; what an answer must say is written in the script of its prompt. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "../../tests/fake_server.c"

static const hx_server_opt quick = { .drain_ms = 3000 };

/* ---- events ---------------------------------------------------------------- */

typedef struct {
    hx_sb names; /* "created in_progress …", without "response." and repeats of deltas */
    hx_json *event[4096];
    size_t n;
} events;

static void add_name(events *e, const char *name)
{
    hx_sb *b = &e->names;
    const size_t n = strlen(name);

    if (b->n >= n && strcmp(b->p + b->n - n, name) == 0 && strstr(name, "delta") != NULL)
        return;
    hx_sb_printf(b, b->n > 0 ? " %s" : "%s", name);
}

static events *read_events(response *r)
{
    events *e = hx_new(events, 1);
    const char *p = r->body.p, *end;
    char name[80];

    assert_int_equal(r->status, 200);
    assert_non_null(strstr(r->raw.p, "text/event-stream"));
    for (; p != NULL && *p != '\0'; p = end + 2) {
        end = strstr(p, "\n\n");
        assert_non_null(end);
        if (*p == ':')
            continue;
        assert_int_equal(sscanf(p, "event: %79s", name), 1);
        const char *data = strstr(p, "\ndata: ");
        assert_non_null(data);
        data += 7;
        hx_json **j = &e->event[e->n++];
        assert_int_equal(
            hx_json_parse(j, (hx_str) { data, (size_t)(end - data) }, 0, NULL), 0);
        assert_str(*j, "type", name);
        add_name(e, strncmp(name, "response.", 9) == 0 ? name + 9 : name);
    }
    return e;
}

static const hx_json *last(const events *e)
{
    return e->event[e->n - 1];
}

static void free_events(events *e)
{
    for (size_t i = 0; i < e->n; i++)
        hx_json_free(e->event[i]);
    hx_sb_free(&e->names);
    hx_free(e);
}

/* What the deltas of type add up to for block i; index: the member that tells it. */
static void add_up(const events *e, const char *type, const char *index, int64_t i,
                   const char *path, hx_sb *out)
{
    for (size_t k = 0; k < e->n; k++)
        if (strcmp(str_at(e->event[k], "type"), type) == 0 &&
            hx_json_int(at(e->event[k], index), -1) == i)
            hx_sb_str(out, str_at(e->event[k], path));
}

static hx_sb text_of(const hx_json *j)
{
    hx_sb b = { 0 };

    hx_json_write(&b, j);
    return b;
}

/* ---- requests ---------------------------------------------------------------- */

static response *respond(const fixture *f, const char *input, const char *more)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"input\":");
    hx_json_put_str(&b, hx_str_c(input));
    hx_sb_printf(&b, "%s}", more);
    response *r = post(f, "/v1/responses", b.p);
    hx_sb_free(&b);
    return r;
}

static response *message(const fixture *f, const char *user, const char *more)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"max_tokens\":4000,\"messages\":[{\"role\":\"user\",\"content\":");
    hx_json_put_str(&b, hx_str_c(user));
    hx_sb_printf(&b, "}]%s}", more);
    response *r = post(f, "/v1/messages", b.p);
    hx_sb_free(&b);
    return r;
}

#define TOOLS                                                                            \
    ",\"tools\":[{\"type\":\"function\",\"name\":\"get\",\"parameters\":{\"type\":"      \
    "\"object\",\"properties\":{\"q\":{\"type\":\"string\"},\"n\":{\"type\":"            \
    "\"integer\"}}}},{\"type\":\"function\",\"name\":\"now\",\"parameters\":{}}]"
#define A_TOOLS                                                                          \
    ",\"thinking\":{\"type\":\"adaptive\"},\"tools\":[{\"name\":\"get\",\"input_"        \
    "schema\":{\"type\":\"object\",\"properties\":{\"q\":{\"type\":\"string\"},\"n\":"   \
    "{\"type\":\"integer\"}}}},{\"name\":\"now\",\"input_schema\":{}}]"
#define GET                                                                              \
    "<tool_call>|get|<arg_key>|q|</arg_key>|<arg_value>|a \"b\"|\n|c|</arg_value>|<arg_" \
    "key>|n|</arg_key>|<arg_value>|4|2|</arg_value>|</tool_call>"
#define NOW "<tool_call>|now|</tool_call>"

/* ---- what is asked for ---------------------------------------------------------- */

typedef struct {
    const char *body,
        *prompt; /* what the template is given, as the fake one renders it */
} rendering;

static void check_renderings(const char *path, const char *text, const rendering *cases,
                             size_t n)
{
    fixture *f = start(&quick, 4, 16, 8192);

    for (size_t i = 0; i < n; i++) {
        response *r = post(f, path, cases[i].body);
        const hx_json *said = r->json;

        if (r->status != 200)
            print_error("case %zu: %s\n", i, r->body.p);
        assert_int_equal(r->status, 200);
        assert_string_equal(str_at(said, text), cases[i].prompt);
        done(r);
    }
    stop(f);
}

/* An answer without reasoning that is the prompt. */
#define ECHO   "[[</think>|$prompt]]"
#define IN(s)  "{\"input\":[" s "]}"
#define USER   "{\"role\":\"user\",\"content\":\"" ECHO "\"}"
#define THINK  "<think>"
#define U_ECHO "user:" ECHO ";" THINK

static void test_input(void **state)
{
    static const rendering cases[] = {
        { "{\"input\":\"" ECHO "\"}", U_ECHO },
        { "{\"input\":\"" ECHO "\",\"instructions\":\"Be\"}", "system:Be;" U_ECHO },
        { IN("{\"role\":\"developer\",\"content\":\"D\"}," USER), "system:D;" U_ECHO },
        { IN("{\"type\":\"message\",\"role\":\"system\",\"content\":[{\"type\":"
             "\"input_text\",\"text\":\"a\"},{\"type\":\"input_text\",\"text\":\"b\"}]}"
             "," USER),
          "system:ab;" U_ECHO },
        { IN("{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":"
             "[{\"type\":\"output_text\",\"text\":\"y\"},{\"type\":\"refusal\","
             "\"refusal\":\"z\"}]}," USER),
          "user:x;assistant:yz;" U_ECHO },
        /* reasoning, text and calls are one turn; a result ends it */
        { IN("{\"type\":\"reasoning\",\"summary\":[],\"content\":[{\"type\":"
             "\"reasoning_text\",\"text\":\"R\"}]},{\"role\":\"assistant\",\"content\":"
             "\"t\"},{\"type\":\"function_call\",\"call_id\":\"1\",\"name\":\"f\","
             "\"arguments\":\"{\\\"a\\\": 1}\"},{\"type\":\"function_call\",\"call_id\":"
             "\"2\",\"name\":\"g\",\"arguments\":\"\"},{\"type\":\"function_call_"
             "output\","
             "\"call_id\":\"1\",\"output\":\"o\"},{\"type\":\"function_call_output\","
             "\"call_id\":null,\"output\":[{\"type\":\"input_text\",\"text\":\"p\"}]},"
             "{\"type\":\"reasoning\",\"summary\":[{\"type\":\"summary_text\",\"text\":"
             "\"S\"}]},{\"role\":\"assistant\",\"content\":\"u\"}," USER),
          "assistant:(R)t!{\"name\":\"f\",\"arguments\":{\"a\":1}}!{\"name\":\"g\","
          "\"arguments\":{}};tool:o;tool:p;assistant:(S)u;" U_ECHO },
        { IN("{\"type\":\"reasoning\",\"summary\":[],\"encrypted_content\":\"hoist:E\"},"
             "{\"role\":\"assistant\",\"content\":\"t\"}," USER),
          "assistant:(E)t;" U_ECHO },
        { IN("{\"type\":\"reasoning\",\"summary\":[],\"encrypted_content\":\"gAAAA\"},"
             "{\"role\":\"assistant\",\"content\":\"t\"}," USER),
          "assistant:t;" U_ECHO },
        { IN("{\"type\":\"custom_tool_call\",\"call_id\":\"1\",\"name\":\"apply_patch\","
             "\"input\":\"*** \\\"x\\\"\"},{\"type\":\"custom_tool_call_output\",\"call_"
             "id\":\"1\",\"output\":\"ok\"}," USER),
          "assistant:!{\"name\":\"apply_patch\",\"arguments\":{\"input\":\"*** "
          "\\\"x\\\"\"}};tool:ok;" U_ECHO },
        /* what ran elsewhere, and what nobody knows */
        { IN("{\"type\":\"web_search_call\",\"id\":\"w\",\"status\":\"completed\"},"
             "{\"type\":\"compaction\",\"encrypted_content\":\"x\"},{\"type\":\"zzz\"}"
             "," USER),
          U_ECHO },
        { "{\"input\":\"" ECHO "\",\"reasoning\":{\"effort\":\"xhigh\"}}",
          "[effort=max]" U_ECHO },
        { "{\"input\":\"" ECHO "\"" TOOLS "}", "[tools=2]" U_ECHO },
        { "{\"input\":\"" ECHO "\",\"tools\":[{\"type\":\"web_search\"},{\"type\":"
          "\"custom\",\"name\":\"p\"},{\"type\":\"local_shell\"}]}",
          "[tools=1]" U_ECHO },
        { "{\"input\":\"" ECHO "\",\"stream_options\":{\"include_obfuscation\":false},"
          "\"service_tier\":\"flex\",\"zzz\":1,\"temperature\":null,\"store\":null}",
          U_ECHO },
        { "{\"input\":\"" ECHO "\",\"chat_template_kwargs\":{\"extra\":7}}",
          "[extra=7]" U_ECHO },
    };

    (void)state;
    check_renderings("/v1/responses", "output.0.content.0.text", cases, HX_LEN(cases));
}

#define MSG(s) "{\"max_tokens\":999,\"messages\":[" s "]}"
#define A_ECHO "user:[[$prompt]];<think></think>"
#define ADD_H                                                                            \
    "{\"type\":\"tool_addition\",\"tool\":{\"type\":\"tool_definition\",\"definition\":" \
    "{"                                                                                  \
    "\"name\":\"h\",\"input_schema\":{}}}}"
#define A_USER   "{\"role\":\"user\",\"content\":\"[[$prompt]]\"}"
#define TEXT_(s) "{\"type\":\"text\",\"text\":\"" s "\"}"

static void test_messages_in(void **state)
{
    static const rendering cases[] = {
        { MSG(A_USER), A_ECHO },
        { "{\"system\":\"Be\",\"messages\":[" A_USER "]}", "system:Be;" A_ECHO },
        { "{\"system\":[" TEXT_("x-anthropic-billing-header: cch=1;") "," TEXT_(
              "a") "," TEXT_("b") "],\"messages\":[" A_USER "]}",
          "system:a\nb;" A_ECHO },
        { "{\"system\":[],\"messages\":[" A_USER "]}", A_ECHO },
        { MSG("{\"role\":\"user\",\"content\":[" TEXT_("a") "," TEXT_(
              "[[$prompt]]") "]}"),
          "user:a\n[[$prompt]];<think></think>" },
        { MSG("{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":"
              "[{\"type\":\"thinking\",\"thinking\":\"T\",\"signature\":\"other\"},{"
              "\"type\":\"redacted_thinking\",\"data\":\"zz\"}," TEXT_(
                  "y") ",{\"type\":"
                       "\"tool_use\",\"id\":\"1\",\"name\":\"f\",\"input\":{\"a\":[1]}},{"
                       "\"type\":"
                       "\"tool_use\",\"id\":\"2\",\"name\":\"g\",\"input\":{}},{\"type\":"
                       "\"server_"
                       "tool_use\",\"id\":\"3\",\"name\":\"h\",\"input\":{}}]},{\"role\":"
                       "\"user\","
                       "\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"1\","
                       "\"content\":"
                       "\"o\"},{\"type\":\"tool_result\",\"tool_use_id\":\"2\",\"is_"
                       "error\":true,"
                       "\"content\":[" TEXT_("p") "," TEXT_(
                           "q") "]},{\"type\":\"tool_result\","
                                "\"tool_use_id\":\"9\"}," TEXT_("[[$prompt]]") "]}"),
          "user:x;assistant:(T)y!{\"name\":\"f\",\"arguments\":{\"a\":[1]}}!{\"name\":"
          "\"g\",\"arguments\":{}};tool:o;tool:p\nq;tool:;" A_ECHO },
        { MSG("{\"role\":\"system\",\"content\":\"S\"}," A_USER), "system:S;" A_ECHO },
        { MSG("{\"role\":\"user\",\"content\":[" TEXT_(
              "x") ",{\"type\":\"mid_conv_system\","
                   "\"content\":[" TEXT_("S") "]}," TEXT_("[[$prompt]]") "]}"),
          "user:x;system:S;" A_ECHO },
        { MSG("{\"role\":\"user\",\"content\":[{\"type\":\"document\",\"source\":{"
              "\"type\":\"text\",\"media_type\":\"text/plain\",\"data\":\"D\"}}," TEXT_(
                  "[[$prompt]]") "]}"),
          "user:D\n[[$prompt]];<think></think>" },
        { "{\"output_config\":{\"effort\":\"low\"},\"messages\":[" A_USER "]}",
          "[effort=low]" A_ECHO },
        { "{\"thinking\":{\"type\":\"disabled\"},\"messages\":[" A_USER "]}", A_ECHO },
        { "{\"tools\":[{\"name\":\"f\",\"input_schema\":{}},{\"name\":\"g\",\"input_"
          "schema\":{},"
          "\"defer_loading\":true},{\"name\":\"h\",\"input_schema\":{}}],\"messages\":[{"
          "\"role\":"
          "\"system\",\"content\":[" ADD_H "," ADD_H
          ",{\"type\":\"tool_removal\",\"tool\":{\"type\":"
          "\"tool_reference\",\"name\":\"f\"}},{\"type\":\"tool_addition\",\"tool\":{"
          "\"type\":"
          "\"tool_reference\",\"name\":\"g\"}},{\"type\":\"tool_addition\",\"tool\":{"
          "\"type\":"
          "\"mcp_toolset_reference\",\"server_name\":\"x\"}}]}," A_USER "]}",
          "[tools=2]" A_ECHO },
        { "{\"tools\":[{\"type\":\"custom\",\"name\":\"f\",\"input_schema\":{}},{"
          "\"type\":\"web_search_20250305\",\"name\":\"web_search\"}],\"messages\":"
          "[" A_USER "]}",
          "[tools=1]" A_ECHO },
        { "{\"metadata\":{\"user_id\":\"u\"},\"zzz\":[],\"stop_sequences\":null,"
          "\"service_"
          "tier\":\"auto\",\"messages\":[" A_USER "]}",
          A_ECHO },
    };

    (void)state;
    check_renderings("/v1/messages", "content.0.text", cases, HX_LEN(cases));
}

/* Thinking is opened where it is asked for, and only there. */
static void test_thinking_switch(void **state)
{
    static const struct {
        const char *more, *kind;
    } cases[] = {
        { "", "text" },
        { ",\"thinking\":null", "text" },
        { ",\"thinking\":{\"type\":\"disabled\"}", "text" },
        { ",\"thinking\":{\"type\":\"adaptive\"}", "thinking" },
        { ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}", "thinking" },
    };
    fixture *f = start(&quick, 4, 16, 8192);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = message(f, "[[so|</think>|yes]]", cases[i].more);

        assert_int_equal(r->status, 200);
        assert_str(r->json, "content.0.type", cases[i].kind);
        done(r);
    }
    stop(f);
}

static void test_sampling(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);
    response *r;

    (void)state;
    r = respond(f, "[[</think>|$params]]",
                ",\"temperature\":0.5,\"top_p\":0.25,\"max_output_tokens\":99,\"top_k\":"
                "7,\"min_p\":0.1,\"stop_token_ids\":[5]");
    assert_str(
        r->json, "output.0.content.0.text",
        "t=0.50 p=0.25 k=7 m=0.10 r=0.00 pp=0.00 fp=0.00 max=99 min=0 eos=0 bias=0 "
        "ids=1");
    assert_num(r->json, "max_output_tokens", 99);
    done(r);
    r = message(f, "[[$params]]", ",\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7");
    assert_str(r->json, "content.0.text",
               "t=0.50 p=0.25 k=7 m=0.00 r=0.00 pp=0.00 fp=0.00 max=4000 min=0 eos=0 "
               "bias=0 ids=0");
    done(r);
    stop(f);
}

/* ---- what is refused ---------------------------------------------------------------- */

/* Messages: what the sentence begins with; Responses: the field at fault. */
typedef struct {
    const char *path, *body;
    int status;
    const char *param;
} refusal;

static const refusal responses_refused[] = {
    { "/responses", "{}", 400, "input" },
    { "/responses", "[]", 400, "(none)" },
    { "/responses", "{\"input\":7}", 400, "input" },
    { "/responses", "{\"input\":[]}", 400, "input" },
    { "/responses", IN("5"), 400, "input[0]" },
    { "/responses", IN("{\"role\":\"tool\",\"content\":\"x\"}"), 400, "input[0].role" },
    { "/responses", IN("{\"role\":\"user\"}"), 400, "input[0].content" },
    { "/responses", IN("{\"role\":\"user\",\"content\":[{\"type\":\"input_file\"}]}"),
      400, "input[0].content[0]" },
    { "/responses",
      IN(USER ",{\"type\":\"function_call\",\"name\":\"f\",\"arguments\":\"{\"}"), 400,
      "input[1].arguments" },
    { "/responses",
      IN(USER ",{\"type\":\"function_call\",\"name\":\"f\",\"arguments\":{}}"), 400,
      "input[1].arguments" },
    { "/responses", IN(USER ",{\"type\":\"function_call\",\"arguments\":\"{}\"}"), 400,
      "input[1].name" },
    { "/responses", IN("{\"type\":\"custom_tool_call\",\"name\":\"f\"}"), 400,
      "input[0].input" },
    { "/responses", IN("{\"type\":\"function_call_output\",\"output\":5}"), 400,
      "input[0].output" },
    { "/responses", IN("{\"type\":\"item_reference\",\"id\":\"msg_1\"}"), 404,
      "input[0]" },
    { "/responses", "{\"input\":\"x\",\"previous_response_id\":\"resp_1\"}", 404,
      "previous_response_id" },
    { "/responses", "{\"input\":\"x\",\"previous_response_id\":1}", 400,
      "previous_response_id" },
    { "/responses", "{\"input\":\"x\",\"background\":true}", 400, "background" },
    { "/responses", "{\"input\":\"x\",\"prompt\":{\"id\":\"p\"}}", 400, "prompt" },
    { "/responses", "{\"input\":\"x\",\"instructions\":[]}", 400, "instructions" },
    { "/responses", "{\"input\":\"x\",\"stream\":\"yes\"}", 400, "stream" },
    { "/responses", "{\"input\":\"x\",\"store\":1}", 400, "store" },
    { "/responses", "{\"input\":\"x\",\"include\":\"all\"}", 400, "include" },
    { "/responses", "{\"input\":\"x\",\"reasoning\":\"low\"}", 400, "reasoning" },
    { "/responses", "{\"input\":\"x\",\"reasoning\":{\"effort\":3}}", 400,
      "reasoning.effort" },
    { "/responses", "{\"input\":\"x\",\"text\":{\"format\":{\"type\":\"json_schema\"}}}",
      400, "text.format.schema" },
    { "/responses", "{\"input\":\"x\",\"max_output_tokens\":-1}", 400,
      "max_output_tokens" },
    { "/responses", "{\"input\":\"x\",\"top_logprobs\":21}", 400, "top_logprobs" },
    { "/responses", "{\"input\":\"x\",\"tools\":[{\"type\":\"function\"}]}", 400,
      "tools[0].name" },
    { "/responses",
      "{\"input\":\"x\",\"tool_choice\":{\"type\":\"function\",\"name\":"
      "\"f\"}}",
      400, "tool_choice" },
    { "/responses", "{\"input\":\"raise!\"}", 400, "input" },
};

static const refusal messages_refused[] = {
    { "/messages", "{}", 400, "messages: found nothing" },
    { "/messages", "{\"messages\":[]}", 400, "messages: found an empty list" },
    { "/messages", "{\"messages\":[", 400, "request body: " },
    { "/messages", MSG("{\"role\":\"tool\",\"content\":\"x\"}"), 400,
      "messages[0].role: " },
    { "/messages", MSG("{\"role\":\"user\"}"), 400, "messages[0].content: " },
    { "/messages", MSG("{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}"), 400,
      "messages[0].content[0]: blocks of type \"image\" are" },
    { "/messages",
      MSG("{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"content\":[{"
          "\"type\":\"image\"}]}]}"),
      400, "messages[0].content[0].content[0]: blocks of type \"image\" are" },
    { "/messages",
      MSG("{\"role\":\"system\",\"content\":[{\"type\":\"tool_addition\",\"tool\":{"
          "\"type\":"
          "\"tool_definition\",\"definition\":{\"name\":\"h\"}}}]}"),
      400, "messages[0].content[0].tool.definition.input_schema: found nothing" },
    { "/messages",
      MSG("{\"role\":\"user\",\"content\":[{\"type\":\"mid_conv_system\",\"content\":{}}]"
          "}"),
      400, "messages[0].content[0].content: found object" },
    { "/messages", MSG("{\"role\":\"user\",\"content\":[\"x\"]}"), 400,
      "messages[0].content[0]: found string, expected a block" },
    { "/messages",
      MSG("{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"name\":"
          "\"f\","
          "\"input\":\"{}\"}]}," A_USER),
      400, "messages[0].content[0].input: " },
    { "/messages",
      MSG("{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":"
          "\"a\",\"signature\":\"hoist.0000000000000000\"}]}," A_USER),
      400, "messages[0].content[0].signature: " },
    { "/messages", MSG(A_USER ",{\"role\":\"assistant\",\"content\":\"{\"}"), 400,
      "messages[1]: the last message" },
    { "/messages", "{\"system\":5,\"messages\":[" A_USER "]}", 400, "system: " },
    { "/messages", "{\"system\":[{\"type\":\"image\"}],\"messages\":[" A_USER "]}", 400,
      "system[0]: " },
    { "/messages", "{\"max_tokens\":\"x\",\"messages\":[" A_USER "]}", 400,
      "max_tokens: found string" },
    { "/messages", "{\"stop_sequences\":\"\",\"messages\":[" A_USER "]}", 400,
      "stop_sequences: found string" },
    { "/messages", "{\"tool_choice\":{\"type\":\"some\"},\"messages\":[" A_USER "]}", 400,
      "tool_choice.type: " },
    { "/messages",
      "{\"tool_choice\":{\"type\":\"tool\",\"name\":\"f\"},\"messages\":[" A_USER "]}",
      400, "tool_choice.name: " },
    { "/messages", "{\"output_config\":5,\"messages\":[" A_USER "]}", 400,
      "output_config: found integer" },
    { "/messages/count_tokens", "{\"messages\":5}", 400, "messages: found integer" },
    { "/messages", MSG("{\"role\":\"user\",\"content\":\"raise!\"}"), 400,
      "template: raised" },
};

static response *refuse(fixture *f, const refusal *c)
{
    char path[64];

    snprintf(path, sizeof path, "/v1%s", c->path);
    response *r = post(f, path, c->body);

    if (r->status != c->status)
        fail_msg("%s: status %d, %s", c->body, r->status, r->body.p);
    assert_non_null(strstr(r->raw.p, "\r\nrequest-id: req_"));
    return r;
}

static void test_responses_refused(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);

    (void)state;
    for (size_t i = 0; i < HX_LEN(responses_refused); i++) {
        const refusal *c = &responses_refused[i];
        response *r = refuse(f, c);
        const char *why = str_at(r->json, "error.message");

        assert_str(r->json, "error.param", c->param);
        /* the sentence names it, too */
        if (c->status == 400 && c->param[0] != '(' && strncmp(why, "template", 8) != 0)
            assert_int_equal(strncmp(why, c->param, strcspn(c->param, "[.")), 0);
        done(r);
    }
    stop(f);
}

static void test_messages_refused(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);

    (void)state;
    for (size_t i = 0; i < HX_LEN(messages_refused); i++) {
        const refusal *c = &messages_refused[i];
        response *r = refuse(f, c);

        assert_str(r->json, "type", "error");
        assert_str(r->json, "error.type", "invalid_request_error");
        if (strncmp(str_at(r->json, "error.message"), c->param, strlen(c->param)) != 0)
            fail_msg("%s: %s", c->body, r->body.p);
        done(r);
    }
    stop(f);
}

static void test_other_errors(void **state)
{
    fixture *f = start(&(hx_server_opt) { .api_key = "k", .drain_ms = 3000 }, 1, 1, 100);
    response *r;
    int fd;

    (void)state;
    r = post(f, "/v1/messages", "{}");
    assert_int_equal(r->status, 401);
    assert_str(r->json, "type", "error");
    assert_str(r->json, "error.type", "authentication_error");
    done(r);
    r = request(f, "GET", "/v1/messages", NULL);
    assert_int_equal(r->status, 401);
    done(r);
    fd = dial(f->port);
    send_request(
        fd, "POST", "/v1/messages",
        "x-api-key: k\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: a,b\r\n",
        MSG(A_USER));
    r = receive(fd);
    assert_int_equal(r->status, 200);
    done(r);
    fd = dial(f->port);
    send_request(fd, "PUT", "/v1/responses/resp_1", "x-api-key: k\r\n", NULL);
    r = receive(fd);
    assert_int_equal(r->status, 405);
    done(r);
    stop(f);
}

static void test_overflow(void **state)
{
    fixture *f = start(&quick, 1, 1, 20);
    response *r;

    (void)state;
    for (int k = 0; k < 2; k++) {
        const char *more = k == 1 ? ",\"stream\":true" : "";

        r = respond(f, "01234567890123456789", more); /* "user:…;" and <think> */
        assert_int_equal(r->status, 400);
        assert_str(r->json, "error.code", "context_length_exceeded");
        assert_str(r->json, "error.param", "input");
        assert_num(r->json, "error.n_prompt_tokens", 27);
        assert_num(r->json, "error.n_ctx", 20);
        done(r);
        r = message(f, "01234567890123456789", more);
        assert_int_equal(r->status, 400);
        assert_str(r->json, "error.message",
                   "prompt is too long: 28 tokens > 19 maximum");
        done(r);
    }
    stop(f);
}

/* ---- answers ------------------------------------------------------------------------- */

#define ADDED "output_item.added content_part.added "
#define ENDED "content_part.done output_item.done "
#define CALL                                                                             \
    "output_item.added function_call_arguments.delta function_call_arguments.done "      \
    "output_item.done "
#define BEGAN   "created in_progress "
#define TEXT_EV ADDED "output_text.delta output_text.done " ENDED
#define THOUGHT ADDED "reasoning_text.delta reasoning_text.done " ENDED
#define SUMMARY                                                                          \
    "output_item.added reasoning_summary_part.added reasoning_summary_text.delta "       \
    "reasoning_summary_text.done reasoning_summary_part.done output_item.done "

static const struct {
    const char *script, *more, *names, *status;
} streams[] = {
    { "[[</think>|hi| there]]", "", BEGAN TEXT_EV "completed", "completed" },
    { "[[so| be it|</think>|hi]]", "", BEGAN THOUGHT TEXT_EV "completed", "completed" },
    { "[[so| be it|</think>|hi]]", ",\"reasoning\":{\"summary\":\"auto\"}",
      BEGAN SUMMARY TEXT_EV "completed", "completed" },
    { "[[so|</think>|Look:|" GET "]]", TOOLS, BEGAN THOUGHT TEXT_EV CALL "completed",
      "completed" },
    { "[[</think>|" GET "|\n|" GET "]]", TOOLS, BEGAN CALL CALL "completed",
      "completed" },
    { "[[</think>|" NOW "]]", TOOLS, BEGAN CALL "completed", "completed" },
    /* a call before reasoning is closed closes it */
    { "[[so|" GET "]]", TOOLS, BEGAN THOUGHT CALL "completed", "completed" },
    { "[[</think>|" GET "|and|" NOW "]]", TOOLS, BEGAN CALL TEXT_EV CALL "completed",
      "completed" },
    { "[[</think>]]", "", BEGAN "completed", "completed" },
    { "[[so| be| it]]", "", BEGAN THOUGHT "completed", "completed" },
    { "[[so|</think>|a|b|c]]", ",\"max_output_tokens\":3",
      BEGAN THOUGHT TEXT_EV "incomplete", "incomplete" },
    { "[[</think>|" GET "]]", TOOLS ",\"max_output_tokens\":8", BEGAN CALL "incomplete",
      "incomplete" },
    { "[[</think>|a|b|STOP|c]]", ",\"stop\":\"STOP\"", BEGAN TEXT_EV "completed",
      "completed" },
};

/* Items without what differs between two answers. */
static hx_sb shape_of(const hx_json *output)
{
    static const char *const own[] = { "\"id\":\"", "\"call_id\":\"" };
    hx_sb b = text_of(output);

    for (size_t k = 0; k < HX_LEN(own); k++)
        for (char *p = b.p; (p = strstr(p, own[k])) != NULL;)
            for (p += strlen(own[k]); *p != '"'; p++)
                *p = '_';
    for (char *p = b.p; (p = strstr(p, "ctc__")) != NULL;)
        memcpy(p, "_____", 5);
    return b;
}

static void check_items(const events *e)
{
    const hx_json *output = at(last(e), "response.output");

    for (size_t i = 0; i < hx_json_len(output); i++) {
        const hx_json *item = hx_json_at(output, i);
        const bool call = strcmp(str_at(item, "type"), "function_call") == 0;
        const bool text = strcmp(str_at(item, "type"), "message") == 0;
        const bool summary = hx_json_len(at(item, "summary")) > 0;
        hx_sb b = { 0 };

        add_up(e,
               call      ? "response.function_call_arguments.delta"
               : text    ? "response.output_text.delta"
               : summary ? "response.reasoning_summary_text.delta"
                         : "response.reasoning_text.delta",
               "output_index", (int64_t)i, "delta", &b);
        assert_str(item,
                   call      ? "arguments"
                   : summary ? "summary.0.text"
                             : "content.0.text",
                   TEXT(b));
        hx_sb_free(&b);
        for (size_t k = 0; k < i; k++)
            assert_string_not_equal(str_at(item, "id"),
                                    str_at(hx_json_at(output, k), "id"));
    }
}

static void test_response_events(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);
    char more[1000], path[64];

    (void)state;
    for (size_t i = 0; i < HX_LEN(streams); i++) {
        snprintf(more, sizeof more, "%s,\"stream\":true", streams[i].more);
        response *r = respond(f, streams[i].script, more);
        events *e = read_events(r);
        const hx_json *response_ = at(last(e), "response");

        assert_string_equal(e->names.p, streams[i].names);
        assert_str(response_, "status", streams[i].status);
        for (size_t k = 0; k < e->n; k++)
            assert_num(e->event[k], "sequence_number", (int64_t)k);
        check_items(e);
        response *whole = respond(f, streams[i].script, streams[i].more);
        hx_sb a = shape_of(at(response_, "output"));
        hx_sb b = shape_of(at(whole->json, "output"));
        assert_string_equal(a.p, b.p);
        assert_num(whole->json, "usage.output_tokens",
                   hx_json_int(at(response_, "usage.output_tokens"), -1));
        done(whole);
        /* what is kept is what was sent */
        snprintf(path, sizeof path, "/v1/responses/%s", str_at(response_, "id"));
        whole = request(f, "GET", path, NULL);
        hx_sb_free(&a);
        hx_sb_free(&b);
        a = text_of(response_);
        b = text_of(whole->json);
        assert_string_equal(a.p, b.p);
        hx_sb_free(&a);
        hx_sb_free(&b);
        done(whole);
        free_events(e);
        done(r);
    }
    stop(f);
}

#define B_TEXT  "content_block_start content_block_delta content_block_stop "
#define M_BEGAN "message_start ping "
#define M_ENDED "message_delta message_stop"

static void test_message_events(void **state)
{
    static const struct {
        const char *script, *more, *names, *stop;
    } cases[] = {
        { "[[hi| there]]", "", M_BEGAN B_TEXT M_ENDED, "end_turn" },
        { "[[so|</think>|hi]]", A_TOOLS, M_BEGAN B_TEXT B_TEXT M_ENDED, "end_turn" },
        { "[[so|</think>|Look:|" GET "]]", A_TOOLS, M_BEGAN B_TEXT B_TEXT B_TEXT M_ENDED,
          "tool_use" },
        { "[[so|" GET "|" NOW "]]", A_TOOLS, M_BEGAN B_TEXT B_TEXT B_TEXT M_ENDED,
          "tool_use" },
        { "[[a|b|c]]", ",\"max_tokens\":2", M_BEGAN B_TEXT M_ENDED, "max_tokens" },
        { "[[a|b|STOP|c]]", ",\"stop_sequences\":[\"X\",\"STOP\"]",
          M_BEGAN B_TEXT M_ENDED, "stop_sequence" },
        { "[[</think>]]", A_TOOLS, M_BEGAN M_ENDED, "end_turn" },
    };
    fixture *f = start(&quick, 4, 16, 8192);
    char more[1000];

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        snprintf(more, sizeof more, "%s,\"stream\":true", cases[i].more);
        response *r = message(f, cases[i].script, more);
        response *whole = message(f, cases[i].script, cases[i].more);
        events *e = read_events(r);
        const hx_json *delta = e->event[e->n - 2], *content = at(whole->json, "content");

        assert_string_equal(e->names.p, cases[i].names);
        assert_str(delta, "delta.stop_reason", cases[i].stop);
        assert_str(whole->json, "stop_reason", cases[i].stop);
        assert_str(delta, "delta.stop_sequence",
                   strcmp(cases[i].stop, "stop_sequence") == 0 ? "STOP" : "(none)");
        assert_num(e->event[0], "message.usage.input_tokens",
                   hx_json_int(at(whole->json, "usage.input_tokens"), -1));
        assert_num(delta, "usage.output_tokens",
                   hx_json_int(at(whole->json, "usage.output_tokens"), -1));
        for (size_t k = 0; k < hx_json_len(content); k++) {
            const hx_json *block = hx_json_at(content, k);
            const bool call = strcmp(str_at(block, "type"), "tool_use") == 0;
            const bool text = strcmp(str_at(block, "type"), "text") == 0;
            const char *field = call ? "partial_json" : text ? "text" : "thinking";
            char path[40];
            hx_sb b = { 0 };

            snprintf(path, sizeof path, "delta.%s", field);
            for (size_t m = 0; m < e->n; m++)
                if (hx_json_int(at(e->event[m], "index"), -1) == (int64_t)k &&
                    at(e->event[m], path) != NULL)
                    hx_sb_str(&b, str_at(e->event[m], path));
            if (call) {
                hx_json *input = NULL;
                hx_sb want = text_of(at(block, "input")), got;

                assert_int_equal(hx_json_parse(&input, (hx_str) { b.p, b.n }, 0, NULL),
                                 0);
                got = text_of(input);
                assert_string_equal(got.p, want.p);
                hx_sb_free(&got);
                hx_sb_free(&want);
                hx_json_free(input);
            } else {
                assert_str(block, field, TEXT(b));
            }
            hx_sb_free(&b);
        }
        free_events(e);
        done(whole);
        done(r);
    }
    stop(f);
}

/* The same answer in pieces of every size gives the same items. */
static void test_splits(void **state)
{
    static const char *const parts[] = { "so be it",
                                         "</think>",
                                         "Look: \xe2\x82\xac!",
                                         "<tool_call>",
                                         "get",
                                         "<arg_key>",
                                         "q",
                                         "</arg_key>",
                                         "<arg_value>",
                                         "a \"b\" </arg \\n d",
                                         "</arg_value>",
                                         "</tool_call>",
                                         NULL };
    fixture *f = start(&quick, 4, 16, 8192);
    hx_sb want = { 0 };

    (void)state;
    for (size_t size = 40; size > 0; size--) {
        hx_sb script = { 0 };

        hx_sb_str(&script, "[[");
        for (size_t i = 0; parts[i] != NULL; i++) {
            const size_t n = strlen(parts[i]);
            const bool marker = parts[i][0] == '<';

            for (size_t k = 0; k < n; k += marker ? n : size) {
                hx_sb_add(&script, parts[i] + k, marker ? n : HX_MIN(size, n - k));
                hx_sb_char(&script, '|');
            }
        }
        hx_sb_str(&script, "]]");
        /* a cut character cannot travel in a JSON body, so such sizes are left out */
        if (hx_utf8_ok(script.p, script.n) && strstr(script.p, "\xe2|") == NULL) {
            response *r = respond(f, script.p, TOOLS);
            hx_sb got = shape_of(at(r->json, "output"));

            if (want.p == NULL)
                hx_sb_str(&want, got.p);
            assert_string_equal(got.p, want.p);
            hx_sb_free(&got);
            done(r);
        }
        hx_sb_free(&script);
    }
    assert_non_null(strstr(want.p, "{\\\"q\\\":\\\"a \\\\\\\"b\\\\\\\""));
    hx_sb_free(&want);
    stop(f);
}

/* Plain text to the client, one argument to the model; its pieces are those of the text. */
static void test_custom_tool(void **state)
{
    static const struct {
        const char *args, *input;
    } cases[] = {
        { "<arg_key>|input|</arg_key>|<arg_value>|*** "
          "\"a\"|\n|\x01|+b\\\\|c|</arg_value>|",
          "*** \"a\"\n\x01+b\\\\c" },
        { "<arg_key>|input|</arg_key>|<arg_value>|</arg_value>|", "" },
        { "<arg_key>|input|</arg_key>|<arg_value>|x|</arg_value>|<arg_key>|more|</"
          "arg_key>|"
          "<arg_value>|y|</arg_value>|",
          "x" },
        { "<arg_key>|other|</arg_key>|<arg_value>|x|</arg_value>|", "{\"other\":\"x\"}" },
        { "", "{}" },
    };
    static const char more[] =
        ",\"tools\":[{\"type\":\"custom\",\"name\":\"patch\"}],\"stream\":true";
    fixture *f = start(&quick, 4, 16, 8192);
    char script[400];

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        snprintf(script, sizeof script, "[[</think>|<tool_call>|patch|%s</tool_call>]]",
                 cases[i].args);
        response *r = respond(f, script, more);
        events *e = read_events(r);
        hx_sb b = { 0 };

        assert_str(last(e), "response.output.0.type", "custom_tool_call");
        assert_str(last(e), "response.output.0.name", "patch");
        assert_str(last(e), "response.output.0.input", cases[i].input);
        add_up(e, "response.custom_tool_call_input.delta", "output_index", 0, "delta",
               &b);
        assert_string_equal(TEXT(b), cases[i].input);
        if (i == 0)
            assert_true(e->n > 9); /* in more than one piece */
        hx_sb_free(&b);
        free_events(e);
        done(r);
    }
    stop(f);
}

/* Tools of a namespace have one name to the model and two to the client. */
static void test_namespace(void **state)
{
    static const char more[] =
        ",\"tools\":[{\"type\":\"function\",\"name\":\"now\",\"parameters\":{}},{"
        "\"type\":"
        "\"namespace\",\"name\":\"mcp\",\"description\":\"d\",\"tools\":[{\"type\":"
        "\"function\",\"name\":\"now\",\"parameters\":{}}]}]";
    fixture *f = start(&quick, 4, 16, 8192);
    response *r =
        respond(f, "[[</think>|<tool_call>|mcp__now|</tool_call>|" NOW "]]", more);

    (void)state;
    assert_str(r->json, "output.0.type", "function_call");
    assert_str(r->json, "output.0.name", "now");
    assert_str(r->json, "output.0.namespace", "mcp");
    assert_str(r->json, "output.1.name", "now");
    assert_null(at(r->json, "output.1.namespace"));
    done(r);
    r = post(f, "/v1/responses",
             IN("{\"type\":\"function_call\",\"call_id\":\"1\",\"name\":\"now\","
                "\"namespace\":\"mcp\",\"arguments\":\"{}\"}," USER));
    assert_str(r->json, "output.0.content.0.text",
               "assistant:!{\"name\":\"mcp__now\",\"arguments\":{}};" U_ECHO);
    done(r);
    stop(f);
}

/* Tools that come as an item of the input, in the namespace of those that have none. */
static void test_additional_tools(void **state)
{
    static const char item[] =
        "{\"type\":\"additional_tools\",\"role\":\"developer\",\"tools\":[{\"type\":"
        "\"namespace\",\"name\":\"functions\",\"tools\":[{\"type\":\"function\",\"name\":"
        "\"now\",\"parameters\":{}},{\"type\":\"custom\",\"name\":\"exec\"}]}]},";
    fixture *f = start(&quick, 4, 16, 8192);
    hx_sb b = { 0 };
    response *r;

    (void)state;
    hx_sb_printf(
        &b,
        "{\"input\":[%s{\"role\":\"user\",\"content\":"
        "\"[[</think>|<tool_call>|exec|<arg_key>|input|</arg_key>|<arg_value>|ls|"
        "</arg_value>|</tool_call>|" NOW "]]\"}]}",
        item);
    r = post(f, "/v1/responses", b.p);
    assert_str(r->json, "output.0.type", "custom_tool_call");
    assert_str(r->json, "output.0.name", "exec");
    assert_str(r->json, "output.0.namespace", "functions");
    assert_str(r->json, "output.0.input", "ls");
    assert_str(r->json, "output.1.type", "function_call");
    assert_str(r->json, "output.1.name", "now");
    done(r);
    b.n = 0;
    hx_sb_printf(&b,
                 "{\"input\":[%s{\"type\":\"function_call\",\"call_id\":\"1\",\"name\":"
                 "\"now\",\"namespace\":\"functions\",\"arguments\":\"{}\"}," USER "]}",
                 item);
    r = post(f, "/v1/responses", b.p);
    assert_non_null(strstr(str_at(r->json, "output.0.content.0.text"),
                           "assistant:!{\"name\":\"now\",\"arguments\":{}};"));
    done(r);
    hx_sb_free(&b);
    r = post(
        f, "/v1/responses",
        IN("{\"type\":\"additional_tools\",\"tools\":[{\"type\":\"custom\"}]}," USER));
    assert_int_equal(r->status, 400);
    assert_str(r->json, "error.param", "input[0].tools[0].name");
    done(r);
    stop(f);
}

/* All three dialects say the same of one answer. */
static void test_same_as_chat(void **state)
{
    static const char script[] = "[[so| be|</think>|it| is]]";
    fixture *f = start(&quick, 4, 16, 8192);
    response *a = chat(f, script, ",\"stream\":true"), *b = respond(f, script, "");
    response *c = message(f, script, ",\"thinking\":{\"type\":\"adaptive\"}");
    stream *said = read_stream(a);

    (void)state;
    assert_str(b->json, "output.0.content.0.text", TEXT(said->reasoning));
    assert_str(b->json, "output.1.content.0.text", TEXT(said->content));
    assert_str(c->json, "content.0.thinking", TEXT(said->reasoning));
    assert_str(c->json, "content.1.text", TEXT(said->content));
    assert_num(c->json, "usage.input_tokens",
               hx_json_int(at(b->json, "usage.input_tokens"), -1));
    assert_num(
        c->json, "usage.output_tokens_details.thinking_tokens",
        hx_json_int(at(b->json, "usage.output_tokens_details.reasoning_tokens"), -1));
    free_stream(said);
    done(a);
    done(b);
    done(c);
    stop(f);
}

/* ---- failures ---------------------------------------------------------------------------- */

static void test_engine_error(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);
    char path[64];
    response *r;
    events *e;

    (void)state;
    r = respond(f, "[[{error=2}</think>|a|b]]", "");
    assert_int_equal(r->status, 500);
    assert_str(r->json, "error.type", "server_error");
    done(r);
    r = respond(f, "[[{error=2}</think>|a|b]]", ",\"stream\":true");
    e = read_events(r);
    assert_string_equal(e->names.p, BEGAN ADDED "output_text.delta error failed");
    assert_str(e->event[e->n - 2], "code", "engine_error");
    assert_str(last(e), "response.status", "failed");
    assert_str(last(e), "response.error.code", "engine_error");
    assert_non_null(strstr(str_at(last(e), "response.error.message"), "broke"));
    assert_str(last(e), "response.output.0.content.0.text", "a");
    assert_str(last(e), "response.output.0.status", "incomplete");
    snprintf(path, sizeof path, "/v1/responses/%s", str_at(last(e), "response.id"));
    free_events(e);
    done(r);
    r = request(f, "GET", path, NULL);
    assert_str(r->json, "status", "failed");
    done(r);
    r = message(f, "[[{error=1}a|b]]", "");
    assert_int_equal(r->status, 500);
    assert_str(r->json, "error.type", "api_error");
    done(r);
    r = message(f, "[[{error=1}a|b]]", ",\"stream\":true");
    e = read_events(r);
    assert_string_equal(e->names.p,
                        M_BEGAN "content_block_start content_block_delta error");
    assert_str(last(e), "error.type", "api_error");
    free_events(e);
    done(r);
    stop(f);
}

static void wait_idle(const fixture *f)
{
    for (int i = 0; i < 200; i++) {
        hx_status st;

        hx_get_status(f->engine, &st);
        if (st.running + st.waiting == 0)
            return;
        usleep(10000);
    }
    fail_msg("a request still runs after two seconds");
}

static void test_gone(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);
    static const char *const bodies[][2] = {
        { "/v1/responses", "{\"input\":\"[[{delay=50,repeat=500}a]]\",\"stream\":true}" },
        { "/v1/responses", "{\"input\":\"[[{delay=50,repeat=500}a]]\"}" },
        { "/v1/messages",
          "{\"messages\":[{\"role\":\"user\",\"content\":\"[[{prefill=60000}"
          "a]]\"}],\"stream\":true}" },
        { "/v1/messages", "{\"messages\":[{\"role\":\"user\",\"content\":\"[[{delay=50,"
                          "repeat=500}a]]\"}]}" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(bodies); i++) {
        const int fd = dial(f->port);

        send_request(fd, "POST", bodies[i][0], NULL, bodies[i][1]);
        usleep(60000);
        close(fd);
        wait_idle(f);
    }
    stop(f);
}

static void test_cancel(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);
    const int fd = dial(f->port);
    char buf[4096], id[64], path[96];
    ssize_t n;
    response *r;

    (void)state;
    send_request(fd, "POST", "/v1/responses", NULL,
                 "{\"input\":\"[[{delay=20,repeat=3000}</think>|a]]\",\"stream\":true}");
    n = recv(fd, buf, sizeof buf - 1, 0);
    assert_true(n > 0);
    buf[n] = '\0';
    while (strstr(buf, "\"id\":\"resp_") == NULL) {
        const ssize_t more = recv(fd, buf + n, sizeof buf - 1 - (size_t)n, 0);

        assert_true(more > 0);
        n += more;
        buf[n] = '\0';
    }
    assert_int_equal(sscanf(strstr(buf, "\"id\":\"resp_"), "\"id\":\"%40[^\"]", id), 1);
    snprintf(path, sizeof path, "/v1/responses/%s", id);
    r = request(f, "GET", path, NULL);
    assert_str(r->json, "status", "in_progress");
    done(r);
    snprintf(path, sizeof path, "/v1/responses/%s/cancel", id);
    r = post(f, path, "");
    assert_int_equal(r->status, 200);
    assert_str(r->json, "status", "cancelled");
    done(r);
    wait_idle(f);
    close(fd);
    r = request(f, "POST", "/v1/responses/resp_1/cancel", NULL);
    assert_int_equal(r->status, 404);
    done(r);
    stop(f);
}

/* ---- what is kept --------------------------------------------------------------------------- */

static void test_previous(void **state)
{
    static const char *const wrong[][2] = { { "limit", "0" },
                                            { "order", "newest" },
                                            { "after", "msg_1" } };
    fixture *f = start(&quick, 4, 16, 8192);
    char more[200];
    response *a, *b, *r;

    (void)state;
    a = respond(f, "[[R|</think>|one]]", ",\"instructions\":\"I\"");
    snprintf(more, sizeof more, ",\"previous_response_id\":\"%s\"",
             str_at(a->json, "id"));
    b = respond(f, ECHO, more);
    /* instructions are not handed on */
    assert_str(b->json, "output.0.content.0.text",
               "user:[[R|</think>|one]];assistant:(R)one;" U_ECHO);
    snprintf(
        more, sizeof more,
        "{\"input\":[{\"id\":\"%s\"},{\"type\":\"item_reference\",\"id\":\"%s\"}," USER
        "]}",
        str_at(a->json, "output.0.id"), str_at(a->json, "output.1.id"));
    r = post(f, "/v1/responses", more);
    assert_str(r->json, "output.0.content.0.text", "assistant:(R)one;" U_ECHO);
    done(r);
    snprintf(more, sizeof more, "/v1/responses/%s/input_items?order=asc&limit=2",
             str_at(b->json, "id"));
    r = request(f, "GET", more, NULL);
    assert_str(r->json, "data.0.content.0.text", "[[R|</think>|one]]");
    assert_str(r->json, "data.1.type", "reasoning");
    assert_str(r->json, "last_id", str_at(a->json, "output.0.id"));
    assert_true(hx_json_bool(at(r->json, "has_more"), false));
    done(r);
    for (size_t i = 0; i < HX_LEN(wrong); i++) {
        snprintf(more, sizeof more, "/v1/responses/%s/input_items?%s=%s",
                 str_at(b->json, "id"), wrong[i][0], wrong[i][1]);
        r = request(f, "GET", more, NULL);
        assert_int_equal(r->status, 400);
        assert_str(r->json, "error.param", wrong[i][0]);
        done(r);
    }
    done(a);
    done(b);
    stop(f);
}

static void test_counts(void **state)
{
    fixture *f = start(&quick, 4, 16, 8192);
    response *r;

    (void)state;
    r = post(f, "/v1/messages/count_tokens",
             MSG("{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\"}]}"));
    assert_int_equal(r->status, 200); /* an empty message is one */
    done(r);
    r = post(f, "/v1/messages/count_tokens", MSG(A_USER));
    assert_num(r->json, "input_tokens", strlen("user:[[$prompt]];") + 2);
    done(r);
    r = post(f, "/v1/messages/count_tokens",
             "{\"thinking\":{\"type\":\"adaptive\"},\"messages\":[" A_USER "]}");
    assert_num(r->json, "input_tokens", strlen("user:[[$prompt]];") + 1);
    done(r);
    r = post(f, "/v1/responses/input_tokens", "{\"input\":\"abc\"}");
    assert_num(r->json, "input_tokens", strlen("user:abc;") + 1);
    assert_str(r->json, "object", "response.input_tokens");
    done(r);
    stop(f);
}

static void test_many(void **state)
{
    enum { N = 48 };
    fixture *f = start(&quick, 8, 64, 8192);
    int fd[N];

    (void)state;
    for (int i = 0; i < N; i++) {
        fd[i] = dial(f->port);
        if (i % 2 == 0)
            send_request(fd[i], "POST", "/v1/responses", NULL,
                         "{\"input\":\"[[{repeat=20}a|b|c]]\",\"stream\":true,"
                         "\"reasoning\":{\"effort\":\"none\"}}");
        else
            send_request(
                fd[i], "POST", "/v1/messages", NULL,
                "{\"messages\":[{\"role\":\"user\",\"content\":\"[[{repeat=20}a|b|"
                "c]]\"}],\"stream\":true}");
    }
    for (int i = 0; i < N; i++) {
        response *r = receive(fd[i]);
        events *e = read_events(r);
        hx_sb b = { 0 };

        if (i % 2 == 0)
            add_up(e, "response.output_text.delta", "output_index", 0, "delta", &b);
        else
            add_up(e, "content_block_delta", "index", 0, "delta.text", &b);
        assert_int_equal(b.n, 60);
        hx_sb_free(&b);
        free_events(e);
        done(r);
    }
    stop(f);
}

static void test_no_leaks(void **state)
{
    (void)state;
    assert_int_equal(hx_test_live_allocs(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_input),
        cmocka_unit_test(test_messages_in),
        cmocka_unit_test(test_thinking_switch),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_responses_refused),
        cmocka_unit_test(test_messages_refused),
        cmocka_unit_test(test_other_errors),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_response_events),
        cmocka_unit_test(test_message_events),
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_same_as_chat),
        cmocka_unit_test(test_custom_tool),
        cmocka_unit_test(test_namespace),
        cmocka_unit_test(test_additional_tools),
        cmocka_unit_test(test_engine_error),
        cmocka_unit_test(test_gone),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_previous),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_no_leaks),
    };

    return cmocka_run_group_tests_name("dialect", tests, NULL, NULL);
}
