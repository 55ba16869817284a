/* server_test.c - the whole server over real sockets, with tests/fake_engine.c in place
 * of a model: routes, parameters, shapes, streams, cancelling, draining. Shapes are those
 * of OpenAI's API reference; what an answer must say is written in the script of its
 * prompt. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <sys/resource.h>
#include <sys/wait.h>

#include "../../tests/fake_server.c"

/* ---- routes -------------------------------------------------------------- */

static void test_loading(void **state)
{
    fixture f = start_with(&(hx_server_opt) { .drain_ms = 1000 }, fake_open(1, 1, 100));
    response *r;
    stream *s;
    char head[16];

    (void)state;
    hx_server_set_loading(f.server, 42, 100);
    go(&f);
    const int fd[2] = { dial(f.port), dial(f.port) };
    r = request(&f, "GET", "/health", NULL);
    assert_int_equal(r->status, 503);
    assert_str(r->json, "status", "loading");
    assert_true(hx_json_num(at(r->json, "progress"), 0) == 0.42);
    done(r);
    r = post(&f, "/v1/chat/completions", "{}");
    assert_int_equal(r->status, 503);
    assert_non_null(strstr(r->raw.p, "Retry-After: 2"));
    assert_str(r->json, "error.code", "model_loading");
    assert_str(r->json, "error.type", "server_error");
    done(r);
    /* The rate is that of what is loaded now, without what was there: 990 of 1,000 bytes are
     * left, of which 10 came since, of another 10^8 nearly all. */
    const int64_t first_us = hx_now_us();
    hx_server_set_loading(f.server, 1000, 2000);
    const int64_t begun_us = hx_now_us();
    usleep(100000);
    hx_server_set_loading(f.server, 1010, 2000);
    const int64_t asked_us = hx_now_us();
    r = post(&f, "/v1/chat/completions", "{}");
    const char *later = strstr(r->raw.p, "Retry-After: ");
    assert_non_null(later);
    const int64_t wait_s = strtol(later + 13, NULL, 10);
    assert_true(wait_s >= (asked_us - begun_us) * 99 / 1000000);
    assert_true(wait_s <= (hx_now_us() - first_us) * 99 / 1000000 + 1);
    done(r);
    hx_server_set_loading(f.server, 1, 100000000);
    hx_server_set_loading(f.server, 2, 100000000);
    usleep(1000);
    r = post(&f, "/v1/chat/completions", "{}");
    assert_non_null(strstr(r->raw.p, "Retry-After: 600"));
    done(r);
    r = request(&f, "GET", "/", NULL);
    assert_int_equal(r->status, 200);
    done(r);
    /* Who streams has the headers at once, and the answer when the model has come. */
    send_request(
        fd[0], "POST", "/v1/chat/completions", NULL,
        "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}");
    send_request(fd[1], "POST", "/v1/completions", NULL, "{\"stream\":true,\"n\":-1}");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(recv(fd[i], head, 15, MSG_PEEK | MSG_WAITALL), 15);
        assert_memory_equal(head, "HTTP/1.1 200 OK", 15);
    }
    hx_server_set_engine(f.server, f.engine);
    r = receive(fd[0]);
    s = read_stream(r);
    assert_string_equal(TEXT(s->reasoning), "ok");
    assert_true(s->done);
    free_stream(s);
    done(r);
    r = receive(fd[1]);
    s = read_stream(r);
    assert_str(s->error, "error.param", "n");
    free_stream(s);
    done(r);
    r = request(&f, "GET", "/health", NULL);
    assert_int_equal(r->status, 200);
    assert_str(r->json, "status", "ok");
    done(r);
    hx_server_stop(f.server);
    pthread_join(f.thread, NULL);
    hx_server_close(f.server);
    fake_close(f.engine);
}

static void test_open(void **state)
{
    fixture *f = start(NULL, 1, 1, 100);
    hx_server *s = (hx_server *)f;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_server_open(&s, &(hx_server_opt) { .port = f->port }, &err),
                     HX_EIO);
    assert_null(s);
    assert_non_null(strstr(err.msg, "in use"));
    assert_int_equal(hx_server_open(&s, &(hx_server_opt) { .api_key = "" }, &err),
                     HX_EARG);
    assert_null(s);
    stop(f);
}

static void test_routes(void **state)
{
    static const struct {
        const char *method, *path, *body;
        int status;
        const char *has;
    } cases[] = {
        { "GET", "/", NULL, 200, "Hoist" },
        { "HEAD", "/", NULL, 200, NULL },
        { "GET", "/health", NULL, 200, "ok" },
        { "GET", "/v1/models", NULL, 200, "\"fake\"" },
        { "GET", "/models/", NULL, 200, "\"fake\"" },
        { "GET", "/v1/models?client_version=0.160.0", NULL, 200, ",\"models\":[]}" },
        { "GET", "/v1/models?xclient_version=0.160.0", NULL, 200,
          "\"last_id\":\"fake\"}" },
        { "GET", "/v1/models/fake", NULL, 200, "\"max_model_len\":4096" },
        { "GET", "/v1/models/other", NULL, 404, "model_not_found" },
        { "GET", "/metrics", NULL, 200, "hoist_requests_running" },
        { "GET", "/nothing", NULL, 404, "not_found" },
        { "GET", "/v1/chat/completions", NULL, 405, "method_not_allowed" },
        { "DELETE", "/v1/models", NULL, 405, "method_not_allowed" },
        { "POST", "/tokenize", "{\"content\":\"ab<think>\"}", 200, "[97,98,256]" },
        { "POST", "/v1/tokenize/", "{\"prompt\":\"a\"}", 200, "\"count\":1" },
        { "POST", "/tokenize", "{\"content\":\"" FAKE_LONGER "a\"}", 200,
          "[224,224,224,224,224,224,97]" },
        { "POST", "/v1/completions", "{\"prompt\":\"" FAKE_LONGER "[[ok]]\"}", 200,
          "\"text\":\"ok\"" },
        { "POST", "/tokenize", "{\"text\":\"a\"}", 200, "\"max_model_len\":4096" },
        { "POST", "/tokenize", "{}", 400, "\"content\"" },
        { "POST", "/tokenize", "{\"content\":5}", 400, "\"content\"" },
        { "POST", "/detokenize", "{\"tokens\":[104,105,226,130,172]}", 200,
          "\"hi\xe2\x82\xac\"" },
        { "POST", "/detokenize", "{\"tokens\":[104,-1]}", 400, "tokens[1]" },
        { "POST", "/detokenize", "{\"tokens\":\"x\"}", 400, "\"tokens\"" },
        { "POST", "/v1/chat/completions/",
          "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", 200, "ok" },
        { "PUT", "/v1/responses/x", "", 405, "takes GET, DELETE, POST only" },
        { "POST", "/chat/completions",
          "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", 200, "ok" },
        { "POST", "/completions", "{\"prompt\":\"x\"}", 200, "text_completion" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = request(f, cases[i].method, cases[i].path, cases[i].body);

        if (r->status != cases[i].status ||
            (cases[i].has != NULL && strstr(TEXT(r->body), cases[i].has) == NULL))
            fail_msg("%s %s: %d %s", cases[i].method, cases[i].path, r->status,
                     TEXT(r->body));
        if (r->status == 405)
            assert_non_null(strstr(r->raw.p, "Allow: "));
        done(r);
    }
    stop(f);
}

static void test_key(void **state)
{
    static const struct {
        const char *path, *header;
        int status;
    } cases[] = {
        { "/health", NULL, 200 },
        { "/v1/models", NULL, 401 },
        { "/", NULL, 401 },
        { "/nothing", NULL, 401 },
        { "/v1/models", "Authorization: Bearer secret\r\n", 200 },
        { "/v1/models", "authorization: bearer secret\r\n", 200 },
        { "/v1/models", "X-Api-Key: secret\r\n", 200 },
        { "/v1/models", "Authorization: Bearer secre\r\n", 401 },
        { "/v1/models", "Authorization: Bearer secrets\r\n", 401 },
        { "/v1/models", "Authorization: Bearer \r\n", 401 },
        { "/v1/models", "x-api-key: Secret\r\n", 401 },
    };
    fixture *f =
        start(&(hx_server_opt) { .api_key = "secret", .served_name = "mine" }, 1, 1, 100);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        const int fd = dial(f->port);

        send_request(fd, "GET", cases[i].path, cases[i].header, NULL);
        response *r = receive(fd);
        if (r->status != cases[i].status)
            fail_msg("%s %s: %d", cases[i].path, cases[i].header, r->status);
        if (r->status == 401)
            assert_str(r->json, "error.code", "invalid_api_key");
        else if (i > 0)
            assert_str(r->json, "data.0.id", "mine");
        done(r);
    }
    stop(f);
}

/* What is refused before its body has come is refused in the words of its path's API. */
static void test_early(void **state)
{
#define KEY "x-api-key: secret\r\n"
#define BIG "Content-Length: 40000000\r\n"
    static const struct {
        const char *path, *headers;
        int status;
        const char *at, *says;
    } cases[] = {
        { "/v1/messages", KEY BIG, 413, "error.type", "request_too_large" },
        { "/v1/messages", BIG, 401, "error.type", "authentication_error" },
        { "/v1/messages", "Content-Length: 9\r\n", 401, "type", "error" },
        { "/api/chat", KEY BIG, 413, "error",
          "request body of more than 33554432 bytes" },
        { "/api/chat", "Content-Length: 9\r\n", 401, "error",
          "API key: missing or wrong; send Authorization: Bearer KEY" },
        { "/api/none", KEY BIG, 413, "error",
          "request body of more than 33554432 bytes" },
        { "/v1/chat/completions", KEY BIG, 413, "error.code", "request_too_large" },
        { "/flush_cache", KEY "Content-Length: 9\r\n", 403, "error.code", "forbidden" },
    };
#undef KEY
#undef BIG
    fixture *f =
        start(&(hx_server_opt) { .api_key = "secret", .admin_key = "admin" }, 1, 1, 100);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        const int fd = dial(f->port);

        send_request(fd, "POST", cases[i].path, cases[i].headers, NULL);
        response *r = receive(fd);
        assert_int_equal(r->status, cases[i].status);
        assert_str(r->json, cases[i].at, cases[i].says);
        assert_int_equal(strstr(r->raw.p, "\r\nWWW-Authenticate: Bearer") != NULL,
                         r->status == 401);
        assert_non_null(strstr(r->raw.p, "\r\nrequest-id: req_"));
        done(r);
    }
    stop(f);
}

/* ---- requests ------------------------------------------------------------ */

#define USER "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"

#define TWENTY "01234567890123456789"

static const struct {
    const char *body, *param, *code;
} refusals[] = {
    { "{", "", "invalid_json" },
    { "", "", "invalid_json" },
    { "[]", "", "invalid_json" },
    { "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", "", "invalid_json" },
    { "{}", "messages", "missing_required_parameter" },
    { "{\"messages\":null}", "messages", "missing_required_parameter" },
    { "{\"messages\":5}", "messages", "invalid_type" },
    { "{\"messages\":[]}", "messages", "invalid_value" },
    { "{\"messages\":[5]}", "messages[0]", "invalid_type" },
    { "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"king\","
      "\"content\":\"b\"}]}",
      "messages[1].role", "invalid_value" },
    { "{\"messages\":[{\"role\":\"user\",\"content\":7}]}", "messages[0].content",
      "invalid_type" },
    { "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":"
      "\"a\"},"
      "{\"type\":\"image_url\",\"image_url\":{\"url\":\"data:,\"}}]}]}",
      "messages[0].content[1]", "invalid_value" },
    { "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
      "messages[0].content[0].text", "missing_required_parameter" },
    { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{"
      "\"name\":\"f\","
      "\"arguments\":\"{\"}}]}]}",
      "messages[0].tool_calls[0].function", "invalid_value" },
    { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{"
      "\"name\":\"f\","
      "\"arguments\":\"[1]\"}}]}]}",
      "messages[0].tool_calls[0].function", "invalid_value" },
    { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]}",
      "messages[0].tool_calls[0].function.name", "missing_required_parameter" },
    { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":\"f\"}]}",
      "messages[0].tool_calls", "invalid_type" },
    { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":7,"
      "\"function\":{\"name\":\"f\"}}]}]}",
      "messages[0].tool_calls[0].id", "invalid_type" },
    { "{\"messages\":[{\"role\":\"tool\",\"content\":\"\",\"tool_call_id\":7}]}",
      "messages[0].tool_call_id", "invalid_type" },
    { "{" USER ",\"functions\":[{\"name\":\"f\"}]}", "functions", "unsupported_value" },
    { "{" USER ",\"web_search_options\":{}}", "web_search_options", "unsupported_value" },
    { "{" USER ",\"modalities\":[\"text\",\"audio\"]}", "modalities", "invalid_value" },
    { "{" USER ",\"modalities\":\"text\"}", "modalities", "invalid_type" },
    { "{" USER ",\"tools\":[{\"type\":7}]}", "tools[0].type", "invalid_type" },
    { "{" USER ",\"tools\":[{\"function\":{\"name\":\"f\",\"description\":7}}]}",
      "tools[0].function.description", "invalid_type" },
    { "{" USER ",\"tool_choice\":7}", "tool_choice", "invalid_type" },
    { "{" USER ",\"guided_choice\":[]}", "guided_choice", "invalid_value" },
    { "{\"messages\":[{\"role\":\"user\",\"content\":\"raise!\"}]}", "messages",
      "invalid_value" },
    { "{" USER ",\"tools\":{}}", "tools", "invalid_type" },
    { "{" USER ",\"tools\":[{\"type\":\"function\"}]}", "tools[0].function.name",
      "missing_required_parameter" },
    { "{" USER ",\"tool_choice\":\"required\"}", "tool_choice", "invalid_value" },
    { "{" USER ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}}",
      "tool_choice", "invalid_value" },
    { "{" USER ",\"tool_choice\":\"maybe\"}", "tool_choice", "invalid_value" },
    { "{" USER ",\"thinking\":\"disabled\"}", "thinking", "invalid_type" },
    { "{" USER ",\"thinking\":{\"type\":\"off\"}}", "thinking.type", "invalid_value" },
    { "{" USER ",\"reasoning\":\"low\"}", "reasoning", "invalid_type" },
    { "{" USER ",\"response_format\":{\"type\":\"xml\"}}", "response_format.type",
      "invalid_value" },
    { "{" USER ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}}",
      "response_format.json_schema.schema", "missing_required_parameter" },
    { "{" USER ",\"guided_regex\":\"a\",\"guided_choice\":[\"a\"]}", "guided_choice",
      "invalid_value" },
    { "{" USER ",\"response_format\":\"json\"}", "response_format", "invalid_type" },
    { "{" USER ",\"guided_json\":5}", "guided_json", "invalid_type" },
    { "{" USER ",\"grammar\":5}", "grammar", "invalid_type" },
    { "{" USER ",\"structured_outputs\":[]}", "structured_outputs", "invalid_type" },
    { "{" USER ",\"structured_outputs\":{\"choice\":\"a\"}}", "choice", "invalid_type" },
    { "{" USER ",\"temperature\":\"hot\"}", "temperature", "invalid_type" },
    { "{" USER ",\"temperature\":-1}", "temperature", "invalid_value" },
    { "{" USER ",\"top_p\":1.5}", "top_p", "invalid_value" },
    { "{" USER ",\"min_p\":-0.1}", "min_p", "invalid_value" },
    { "{" USER ",\"presence_penalty\":3}", "presence_penalty", "invalid_value" },
    { "{" USER ",\"max_tokens\":0}", "max_tokens", "invalid_value" },
    { "{" USER ",\"max_completion_tokens\":0}", "max_completion_tokens",
      "invalid_value" },
    { "{" USER ",\"max_tokens\":-5}", "max_tokens", "invalid_value" },
    { "{" USER ",\"max_tokens\":1.5}", "max_tokens", "invalid_type" },
    { "{" USER ",\"max_completion_tokens\":\"9\"}", "max_completion_tokens",
      "invalid_type" },
    { "{" USER ",\"n\":0}", "n", "invalid_value" },
    { "{" USER ",\"n\":17}", "n", "invalid_value" },
    { "{" USER ",\"n\":true}", "n", "invalid_type" },
    { "{" USER ",\"seed\":1e300}", "seed", "invalid_value" },
    { "{" USER ",\"stop\":5}", "stop", "invalid_type" },
    { "{" USER ",\"stop\":[\"a\",\"\"]}", "stop[1]", "invalid_value" },
    { "{" USER ",\"stop\":[7]}", "stop[0]", "invalid_type" },
    { "{" USER ",\"stop\":\"" TWENTY TWENTY TWENTY TWENTY TWENTY TWENTY TWENTY TWENTY
          TWENTY TWENTY TWENTY TWENTY TWENTY "\"}",
      "stop[0]", "invalid_value" },
    { "{" USER ",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\","
      "\"10\",\"11\",\"12\","
      "\"13\",\"14\",\"15\",\"16\",\"17\"]}",
      "stop", "invalid_value" },
    { "{" USER ",\"stop_token_ids\":[99999]}", "stop_token_ids", "invalid_value" },
    { "{" USER ",\"logit_bias\":{\"x\":1}}", "logit_bias", "invalid_value" },
    { "{" USER ",\"logit_bias\":{\"5\":101}}", "logit_bias", "invalid_value" },
    { "{" USER ",\"logit_bias\":[]}", "logit_bias", "invalid_type" },
    { "{" USER ",\"logprobs\":3}", "logprobs", "invalid_type" },
    { "{" USER ",\"top_logprobs\":3}", "top_logprobs", "invalid_value" },
    { "{" USER ",\"logprobs\":true,\"top_logprobs\":21}", "top_logprobs",
      "invalid_value" },
    { "{" USER ",\"stream\":1}", "stream", "invalid_type" },
    { "{" USER ",\"stream\":true,\"stream_options\":{\"include_usage\":1}}",
      "include_usage", "invalid_type" },
    { "{" USER ",\"model\":1}", "model", "invalid_type" },
    { "{" USER ",\"reasoning_effort\":\"huge\"}", "reasoning_effort", "invalid_value" },
    { "{" USER ",\"chat_template_kwargs\":[]}", "chat_template_kwargs", "invalid_type" },
    { "{" USER ",\"continue_final_message\":true}", "continue_final_message",
      "unsupported_value" },
    { "{" USER ",\"include_stop_str_in_output\":true}", "include_stop_str_in_output",
      "unsupported_value" },
};

static void test_refused(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(refusals); i++) {
        response *r = post(f, "/v1/chat/completions", refusals[i].body);
        const hx_json *param = at(r->json, "error.param");
        const bool same = refusals[i].param[0] == '\0'
                              ? hx_json_kind(param) == HX_JSON_NULL
                              : hx_str_is(hx_json_str(param), refusals[i].param);

        if (r->status != 400 || !same ||
            !hx_str_is(hx_json_str(at(r->json, "error.code")), refusals[i].code))
            fail_msg("%s: %d %s", refusals[i].body, r->status, TEXT(r->body));
        assert_str(r->json, "error.type", "invalid_request_error");
        assert_true(hx_json_str(at(r->json, "error.message")).n > 0);
        done(r);
    }
    const int fd = dial(f->port);

    send_request(fd, "POST", "/v1/chat/completions", "Content-Encoding: gzip\r\n",
                 "{" USER "}");
    response *r = receive(fd);
    assert_int_equal(r->status, 415);
    assert_str(r->json, "error.code", "unsupported_media_type");
    done(r);
    stop(f);
}

/* What the template gets, as the fake engine renders it. */
static void test_messages(void **state)
{
    static const struct {
        const char *body, *text;
    } cases[] = {
        { "{" USER "}", "user:x;<think>" },
        { "{\"messages\":[{\"role\":\"developer\",\"content\":\"d\"},{\"role\":\"user\","
          "\"content\":[{\"type\":"
          "\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}]}",
          "system:d;user:ab;<think>" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\","
          "\"content\":null,"
          "\"reasoning\":\"hm\",\"tool_calls\":[{\"id\":\"c1\",\"type\":\"function\","
          "\"function\":{\"name\":\"f\","
          "\"arguments\":\"{\\\"a\\\": [1, "
          "2]}\"}},{\"function\":{\"name\":\"g\",\"arguments\":{\"b\":\"c\"}}}]},"
          "{\"role\":\"tool\",\"tool_call_id\":null,\"content\":\"17\"}]}",
          "user:q;assistant:(hm)!{\"name\":\"f\",\"arguments\":{\"a\":[1,2]}}!{\"name\":"
          "\"g\",\"arguments\":"
          "{\"b\":\"c\"}};tool:17;<think>" },
        { "{\"messages\":[{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"tool_"
          "calls\":[{\"function\":"
          "{\"name\":\"f\",\"arguments\":\"\"}}]}]}",
          "assistant:(r)!{\"name\":\"f\",\"arguments\":{}};<think>" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"system\","
          "\"content\":\"s\"},"
          "{\"role\":\"user\"}]}",
          "user:a;system:s;user:;<think>" },
        { "{" USER ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},{"
          "\"type\":\"web_search\"}]}",
          "[tools=1]user:x;<think>" },
        { "{" USER ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
          "\"tool_choice\":\"none\"}",
          "user:x;<think>" },
        { "{\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\","
          "\"thinking\":\"t\"},{\"type\":\"output_text\",\"text\":\"o\"}],\"function_"
          "call\":"
          "{\"name\":\"f\",\"arguments\":{\"a\":1}}},{\"role\":\"function\",\"name\":"
          "\"f\","
          "\"content\":\"r\"}]}",
          "assistant:(t)o!{\"name\":\"f\",\"arguments\":{\"a\":1}};tool:r;<think>" },
        { "{" USER
          ",\"tools\":[{\"type\":\"web_search\"}],\"parallel_tool_calls\":false}",
          "user:x;<think>" },
        { "{" USER ",\"reasoning_effort\":\"medium\"}", "[effort=high]user:x;<think>" },
        { "{" USER ",\"reasoning_effort\":\"minimal\"}", "[effort=low]user:x;<think>" },
        { "{" USER ",\"reasoning_effort\":\"xhigh\"}", "[effort=max]user:x;<think>" },
        { "{" USER ",\"chat_template_kwargs\":{\"extra\":7,\"messages\":[],\"reasoning_"
          "effort\":\"low\"}}",
          "[effort=low][extra=7]user:x;<think>" },
        { "{" USER ",\"add_generation_prompt\":false}", "user:x;" },
        { "{\"messages\":[{\"role\":\"king\"}],\"messages\":[{\"role\":\"user\","
          "\"content\":\"last\"}]}",
          "user:last;<think>" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = post(f, "/tokenize", cases[i].body), *text;
        hx_sb b = { 0 };

        if (r->status != 200)
            fail_msg("%s: %s", cases[i].body, TEXT(r->body));
        text = post(f, "/detokenize", r->body.p);
        if (!hx_str_is(hx_json_str(at(text->json, "prompt")), cases[i].text))
            fail_msg("%s: got %s", cases[i].body, TEXT(text->body));
        hx_sb_free(&b);
        done(text);
        done(r);
    }
    stop(f);
}

static void test_params(void **state)
{
    static const struct {
        const char *more, *text;
    } cases[] = {
        { "", "t=0.90 p=0.95 k=0 m=0.00 r=0.00 pp=0.00 fp=0.00 max=0 min=0 eos=0 bias=0 "
              "ids=0" },
        { ",\"temperature\":null,\"top_p\":null,\"max_tokens\":null,\"stop\":null,"
          "\"tools\":null,\"seed\":null,"
          "\"user\":\"u\",\"metadata\":{},\"store\":true,\"unknown\":[1]",
          "t=0.90 p=0.95 k=0 m=0.00 r=0.00 pp=0.00 fp=0.00 max=0 min=0 eos=0 bias=0 "
          "ids=0" },
        { ",\"temperature\":0,\"top_p\":0.5,\"top_k\":-1,\"min_p\":0.1,\"repetition_"
          "penalty\":1.1,"
          "\"presence_penalty\":-2,\"frequency_penalty\":2,\"max_tokens\":9,\"max_"
          "completion_tokens\":8.0,"
          "\"min_tokens\":1,\"ignore_eos\":true,\"logit_bias\":{\"5\":-100,\"6\":1.5},"
          "\"stop_token_ids\":[1,2]",
          "t=0.00 p=0.50 k=0 m=0.10 r=1.10 pp=-2.00 fp=2.00 max=8 min=1 eos=1 bias=2 "
          "ids=2" },
        { ",\"top_k\":40,\"response_format\":{\"type\":\"text\"},\"tool_choice\":"
          "\"auto\"",
          "t=0.90 p=0.95 k=40 m=0.00 r=0.00 pp=0.00 fp=0.00 max=0 min=0 eos=0 bias=0 "
          "ids=0" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = chat(f, "[[</think>|$params]]", cases[i].more);

        assert_int_equal(r->status, 200);
        assert_str(r->json, "choices.0.message.content", cases[i].text);
        done(r);
    }
    stop(f);
}

/* ---- chat ---------------------------------------------------------------- */

static void test_chat(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);
    response *r =
        chat(f, "[[hm|m|</think>|Hi|\\xE2|\\x82|\\xAC|!!]]", ",\"model\":\"any\"");
    const hx_json *j = r->json;

    (void)state;
    assert_int_equal(r->status, 200);
    assert_int_equal(strncmp(str_at(j, "id"), "chatcmpl-", 9), 0);
    assert_str(j, "object", "chat.completion");
    assert_str(j, "model", "any");
    assert_str(j, "system_fingerprint", "hoist-0.1.0");
    assert_true(hx_json_int(at(j, "created"), 0) > 1700000000);
    assert_str(j, "choices.0.message.role", "assistant");
    assert_str(j, "choices.0.message.reasoning_content", "hmm");
    assert_str(j, "choices.0.message.reasoning", "hmm");
    assert_false(hx_json_has(at(j, "choices.0.message"), "tool_calls"));
    assert_str(j, "choices.0.finish_reason", "stop");
    assert_num(j, "usage.completion_tokens", 8);
    assert_num(j, "usage.total_tokens", 8 + hx_json_int(at(j, "usage.prompt_tokens"), 0));
    assert_num(j, "usage.completion_tokens_details.reasoning_tokens", 3);
    assert_num(j, "usage.prompt_tokens_details.cached_tokens", 0);
    assert_num(j, "timings.predicted_n", 8);
    assert_true(hx_json_num(at(j, "timings.queue_ms"), -1) >= 0);
    done(r);

    /* Whole characters only; what is none becomes U+FFFD. */
    r = chat(f, "[[</think>|\\xE2|\\x82|\\xAC|\\xFF|x]]", "");
    assert_str(r->json, "choices.0.message.content", "\xe2\x82\xac\xef\xbf\xbdx");
    done(r);

    r = chat(f, "[[</think>|one|two|STOP|three]]", ",\"stop\":\"oST\"");
    assert_str(r->json, "choices.0.message.content", "onetw");
    assert_str(r->json, "choices.0.finish_reason", "stop");
    done(r);

    r = chat(f, "[[</think>|one|two|three]]", ",\"max_tokens\":2");
    assert_str(r->json, "choices.0.message.content", "one");
    assert_str(r->json, "choices.0.finish_reason", "length");
    done(r);

    r = chat(f, "[[</think>|a|<image>|b]]", "");
    assert_str(r->json, "choices.0.message.content", "ab");
    done(r);
    r = chat(f, "[[</think>|a|<image>|b]]", ",\"skip_special_tokens\":false");
    assert_str(r->json, "choices.0.message.content", "a<image>b");
    done(r);
    stop(f);
}

static void test_no_thinking(void **state)
{
    static const char *const more[] = {
        ",\"reasoning_effort\":\"none\"",
        ",\"chat_template_kwargs\":{\"enable_thinking\":false}",
        ",\"thinking\":{\"type\":\"disabled\"}"
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(more); i++) {
        response *with = chat(f, "[[Hi]]", ",\"reasoning_effort\":\"low\"");
        response *r = chat(f, "[[Hi]]", more[i]);

        assert_str(with->json, "choices.0.message.reasoning_content", "Hi");
        assert_str(with->json, "choices.0.message.content", "");
        assert_str(r->json, "choices.0.message.content", "Hi");
        assert_false(hx_json_has(at(r->json, "choices.0.message"), "reasoning_content"));
        if (i == 0)
            assert_num(r->json, "usage.prompt_tokens",
                       1 + hx_json_int(at(with->json, "usage.prompt_tokens"), 0));
        done(with);
        done(r);
    }
    stop(f);
}

#define TOOLS                                                                            \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\","         \
    "\"parameters\":{\"type\":"                                                          \
    "\"object\",\"properties\":{\"city\":{\"type\":\"string\"},\"days\":{\"type\":"      \
    "\"integer\"}}}}}]"

static const char *const answers[] = {
    "[[I| "
    "call|.|</think>|<tool_call>|get|_weather|<arg_key>|city|</"
    "arg_key>|<arg_value>|Lis|bon \"x\"|"
    "</arg_value>|<arg_key>|days|</arg_key>|<arg_value>|3|</arg_value>|</tool_call>]]",
    "[[</think>|Both|.\n|<tool_call>|get_weather|<arg_key>|city|</"
    "arg_key>|<arg_value>|Rom|a|</arg_value>|"
    "</tool_call>|\n|<tool_call>|get_weather|</tool_call>]]",
    "[[think|ing|</think>|plain| text| \\u| caf\xc3\xa9|\xe2\x82\xac| end]]",
    "[[still "
    "thinking|<tool_call>|get_weather|<arg_key>|city|</arg_key>|<arg_value>|Oslo|</"
    "arg_value>|</tool_call>]]",
    "[[</think>|\n|\n|</tool_call>|x]]",
};

static void flatten_calls(const hx_json *calls, hx_sb *out)
{
    for (size_t i = 0; i < hx_json_len(calls); i++) {
        const hx_json *call = hx_json_at(calls, i);
        hx_json *args = NULL;

        assert_str(call, "type", "function");
        assert_int_equal(
            hx_json_parse(&args, hx_json_str(at(call, "function.arguments")), 0, NULL),
            0);
        assert_true(hx_json_kind(args) == HX_JSON_OBJECT);
        hx_json_free(args);
        hx_sb_printf(out, "%s|%s|%s", i > 0 ? ";" : "", str_at(call, "function.name"),
                     str_at(call, "function.arguments"));
    }
}

/* Deltas add up to the unstreamed message. */
static void test_streams(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(answers); i++) {
        response *whole = chat(f, answers[i], TOOLS ",\"logprobs\":true");
        response *r = chat(f, answers[i], TOOLS ",\"logprobs\":true,\"stream\":true");
        stream *s = read_stream(r);
        const hx_json *m = at(whole->json, "choices.0.message");
        hx_sb calls = { 0 }, logprobs = { 0 };

        flatten_calls(at(m, "tool_calls"), &calls);
        assert_string_equal(TEXT(s->calls), TEXT(calls));
        if (hx_json_kind(at(m, "content")) == HX_JSON_STRING)
            assert_string_equal(TEXT(s->content), str_at(m, "content"));
        else
            assert_int_equal(strspn(TEXT(s->content), " \n"), s->content.n);
        assert_string_equal(TEXT(s->reasoning), hx_json_has(m, "reasoning_content")
                                                    ? str_at(m, "reasoning_content")
                                                    : "");
        assert_str(whole->json, "choices.0.finish_reason", s->finish);
        const hx_json *lp = at(whole->json, "choices.0.logprobs.content");
        for (size_t k = 0; k < hx_json_len(lp); k++)
            hx_sb_str(&logprobs, str_at(hx_json_at(lp, k), "token"));
        assert_string_equal(TEXT(s->logprobs), TEXT(logprobs));
        assert_true(s->done);
        assert_int_equal(s->n_role, 1);
        assert_int_equal(s->n_usage + s->n_null_usage + s->n_empty, 0);
        hx_sb_free(&calls);
        hx_sb_free(&logprobs);
        free_stream(s);
        done(r);
        done(whole);
    }
    stop(f);
}

static void test_tools(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);
    response *r = chat(f, answers[0], TOOLS);

    (void)state;
    assert_str(r->json, "choices.0.finish_reason", "tool_calls");
    assert_true(hx_json_kind(at(r->json, "choices.0.message.content")) == HX_JSON_NULL);
    assert_str(r->json, "choices.0.message.tool_calls.0.function.name", "get_weather");
    assert_str(r->json, "choices.0.message.tool_calls.0.function.arguments",
               "{\"city\":\"Lisbon \\\"x\\\"\",\"days\":3}");
    done(r);
    r = chat(f, answers[1], TOOLS);
    assert_str(r->json, "choices.0.message.content", "Both.\n");
    assert_string_not_equal(str_at(r->json, "choices.0.message.tool_calls.0.id"),
                            str_at(r->json, "choices.0.message.tool_calls.1.id"));
    assert_str(r->json, "choices.0.message.tool_calls.1.function.arguments", "{}");
    done(r);
    /* Cut inside the second call: length wins. */
    r = chat(f, answers[1], TOOLS ",\"max_tokens\":15");
    assert_str(r->json, "choices.0.finish_reason", "length");
    done(r);
    /* Without tools the markup is text. */
    r = chat(f, "[[</think>|<tool_call>|f|</tool_call>]]", "");
    assert_str(r->json, "choices.0.message.content", "<tool_call>f</tool_call>");
    assert_str(r->json, "choices.0.finish_reason", "stop");
    done(r);
    stop(f);
}

static void test_usage_chunk(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);
    response *r = chat(f, "[[</think>|a|b]]",
                       ",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    stream *s = read_stream(r);

    (void)state;
    assert_int_equal(s->n_usage, 1);
    assert_int_equal(s->n_empty, 1);
    assert_int_equal(s->n_null_usage, s->n_chunk - 1);
    assert_int_equal(s->completion_tokens, 3);
    assert_non_null(strstr(r->body.p, "\"timings\""));
    free_stream(s);
    done(r);
    r = chat(f, "[[</think>|a]]", ",\"stream\":true,\"stream_options\":{}");
    assert_null(strstr(r->body.p, "usage"));
    assert_non_null(strstr(r->body.p, "\"timings\""));
    done(r);
    stop(f);
}

static void test_several(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);
    response *r = chat(f, "[[</think>|$seed]]", ",\"n\":3,\"seed\":7"), *other;

    (void)state;
    assert_int_equal(hx_json_len(at(r->json, "choices")), 3);
    assert_str(r->json, "choices.0.message.content", "seed=7");
    assert_str(r->json, "choices.1.message.content", "seed=8");
    assert_str(r->json, "choices.2.message.content", "seed=9");
    assert_num(r->json, "choices.2.index", 2);
    assert_num(r->json, "usage.completion_tokens", 6);
    assert_num(r->json, "usage.total_tokens",
               6 + hx_json_int(at(r->json, "usage.prompt_tokens"), 0));
    assert_true(hx_json_int(at(r->json, "usage.prompt_tokens"), 0) < 50);
    done(r);
    r = chat(f, "[[</think>|$seed]]", "");
    other = chat(f, "[[</think>|$seed]]", "");
    assert_string_not_equal(str_at(r->json, "choices.0.message.content"),
                            str_at(other->json, "choices.0.message.content"));
    assert_string_not_equal(str_at(r->json, "id"), str_at(other->json, "id"));
    done(r);
    done(other);
    r = chat(f, "[[</think>|$seed]]", ",\"n\":2,\"seed\":1,\"stream\":true");
    assert_non_null(strstr(r->body.p, "{\"index\":0,\"delta\":{\"content\":\"seed=1\"}"));
    assert_non_null(strstr(r->body.p, "{\"index\":1,\"delta\":{\"content\":\"seed=2\"}"));
    done(r);
    stop(f);
}

static void test_logprobs(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);
    response *r = chat(f, "[[no|</think>|Hi|\xc3\xa9\xc3\xa9]]",
                       ",\"logprobs\":true,\"top_logprobs\":2");

    (void)state;
    assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.content")), 2);
    assert_str(r->json, "choices.0.logprobs.content.0.token", "Hi");
    assert_true(hx_json_num(at(r->json, "choices.0.logprobs.content.0.logprob"), 1) ==
                -0.5);
    assert_num(r->json, "choices.0.logprobs.content.0.bytes.1", 'i');
    assert_int_equal(
        hx_json_len(at(r->json, "choices.0.logprobs.content.0.top_logprobs")), 2);
    assert_str(r->json, "choices.0.logprobs.content.0.top_logprobs.1.token", "B");
    assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.content.1.bytes")), 4);
    done(r);
    r = chat(f, "[[</think>|Hi]]", ",\"logprobs\":true,\"top_logprobs\":0");
    assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.content")), 1);
    assert_true(hx_json_kind(at(r->json, "choices.0.logprobs.content.0.top_logprobs")) ==
                HX_JSON_ARRAY);
    assert_int_equal(
        hx_json_len(at(r->json, "choices.0.logprobs.content.0.top_logprobs")), 0);
    done(r);
    r = post(f, "/v1/completions",
             "{\"prompt\":\"[[\xc3\xa9\xc3\xa9|\\\\xE2|\\\\x82|\\\\xAC|end]]\","
             "\"logprobs\":1}");
    assert_str(r->json, "choices.0.text",
               "\xc3\xa9\xc3\xa9\xe2\x82\xac"
               "end");
    assert_str(r->json, "choices.0.logprobs.tokens.1", "bytes:\\xe2");
    assert_num(r->json, "choices.0.logprobs.text_offset.0", 0);
    assert_num(r->json, "choices.0.logprobs.text_offset.1", 2);
    assert_num(r->json, "choices.0.logprobs.text_offset.4", 3);
    assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.top_logprobs")), 5);
    assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.token_logprobs")), 5);
    assert_true(
        hx_json_num(hx_json_get(at(r->json, "choices.0.logprobs.top_logprobs.4"), "end"),
                    9) == 0);
    done(r);
    stop(f);
}

/* ---- completions --------------------------------------------------------- */

static void test_completions(void **state)
{
    static const struct {
        const char *body, *first, *second;
    } cases[] = {
        { "{\"prompt\":\"[[a|bc]]\"}", "abc", "(none)" },
        { "{\"prompt\":[\"[[a1]]\",\"[[b1]]\"]}", "a1", "b1" },
        { "{\"prompt\":[91,91,113,113,93,93]}", "qq", "(none)" },
        { "{\"prompt\":[[91,91,113,113,93,93],[91,91,114,114,93,93]]}", "qq", "rr" },
        { "{\"prompt\":\"[[$seed]]\",\"n\":2,\"seed\":1,\"best_of\":2}", "seed=1",
          "seed=2" },
        { "{\"prompt\":[\"[[ab]]\",\"[[cd]]\"],\"echo\":true}", "[[ab]]ab", "[[cd]]cd" },
        { "{\"prompt\":[91,91,113,113,93,93],\"echo\":true}", "[[qq]]qq", "(none)" },
        { "{\"prompt\":\"[[ab]]\",\"echo\":true,\"max_tokens\":0}", "[[ab]]", "(none)" },
        { "{\"prompt\":\"[[<think>|x]]\"}", "<think>x", "(none)" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = post(f, "/v1/completions", cases[i].body);

        if (r->status != 200)
            fail_msg("%s: %s", cases[i].body, TEXT(r->body));
        assert_str(r->json, "object", "text_completion");
        assert_str(r->json, "choices.0.text", cases[i].first);
        assert_str(r->json, "choices.1.text", cases[i].second);
        done(r);
    }
    response *r = post(f, "/v1/completions",
                       "{\"prompt\":\"ab[[cc|d]]\",\"echo\":true,\"logprobs\":2}");
    assert_true(hx_json_kind(at(r->json, "choices.0.logprobs.token_logprobs.0")) ==
                HX_JSON_NULL);
    assert_true(hx_json_num(at(r->json, "choices.0.logprobs.token_logprobs.1"), 9) == -1);
    assert_str(r->json, "choices.0.logprobs.tokens.10", "cc");
    assert_num(r->json, "choices.0.logprobs.text_offset.11", 12);
    assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.top_logprobs.1")), 3);
    done(r);
    r = post(f, "/v1/completions",
             "{\"prompt\":[\"[[a|b]]\",\"[[c]]\"],\"stream\":true,\"echo\":true}");
    assert_non_null(strstr(
        r->body.p,
        "{\"index\":1,\"text\":\"[[c]]\",\"logprobs\":null,\"finish_reason\":null}"));
    assert_non_null(strstr(r->body.p, "\"finish_reason\":\"stop\""));
    assert_non_null(strstr(r->body.p, "data: [DONE]\n\n"));
    done(r);
    stop(f);
}

static void test_completions_refused(void **state)
{
    static const struct {
        const char *body, *param;
    } cases[] = {
        { "{}", "prompt" },
        { "{\"prompt\":\"\"}", "prompt" },
        { "{\"prompt\":[]}", "prompt" },
        { "{\"prompt\":[[]]}", "prompt[0]" },
        { "{\"prompt\":[\"a\",\"\"]}", "prompt[1]" },
        { "{\"prompt\":[\"a\",5]}", "prompt[1]" },
        { "{\"prompt\":[5,\"a\"]}", "prompt" },
        { "{\"prompt\":{}}", "prompt" },
        { "{\"prompt\":[-1]}", "prompt" },
        { "{\"prompt\":\"a\",\"suffix\":\"b\"}", "suffix" },
        { "{\"prompt\":\"a\",\"best_of\":2,\"n\":3}", "best_of" },
        { "{\"prompt\":\"a\",\"best_of\":2,\"stream\":true}", "best_of" },
        { "{\"prompt\":\"a\",\"best_of\":17}", "best_of" },
        { "{\"prompt\":\"a\",\"logprobs\":21}", "logprobs" },
        { "{\"prompt\":\"a\",\"logprobs\":true}", "logprobs" },
        { "{\"prompt\":\"a\",\"echo\":1}", "echo" },
        { "{\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = post(f, "/v1/completions", cases[i].body);

        if (r->status != 400 ||
            !hx_str_is(hx_json_str(at(r->json, "error.param")), cases[i].param))
            fail_msg("%s: %d %s", cases[i].body, r->status, TEXT(r->body));
        done(r);
    }
    stop(f);
}

/* ---- other dialects ------------------------------------------------------ */

#define NEVER "\"[[{prefill=60000}a]]\"" /* beside a deadline */

static void test_dialects(void **state)
{
    static const struct {
        const char *path, *body;
        int status;
        const char *has;
    } cases[] = {
        { "/generate", "{\"text\":\"[[a|bc]]\"}", 200, "{\"text\":\"abc\"" },
        { "/generate", "{\"text\":[\"[[a1]]\",\"[[b1]]\"]}", 200, "},{\"text\":\"b1\"" },
        /* a character in three tokens: the first event comes with the first */
        { "/generate", "{\"text\":\"[[\\\\xe2|\\\\x82|\\\\xac]]\",\"stream\":true}", 200,
          "data: {\"text\":\"\",\"output_ids\":[226]" },
        { "/generate", "{\"text\":\"[[\\\\xe2|\\\\x82|\\\\xac]]\",\"stream\":true}", 200,
          "data: {\"text\":\"\xe2\x82\xac\",\"output_ids\":[226,130,172]" },
        { "/generate", "{\"text\":\"[[{error=1}a|b]]\",\"stream\":true}", 200,
          "data: {\"error\":{\"message\":\"device: broke" },
        { "/generate",
          "{\"text\":\"ab[[x]]\",\"return_logprob\":true,"
          "\"logprob_start_len\":1,\"sampling_params\":{\"max_new_tokens\":0}}",
          200, "\"input_token_logprobs\":[[null,98,null],[-1,91,null],[-1,91,null]" },
        { "/v1/embeddings", "{\"input\":\"ab\"}", 200, "\"embedding\":[0.44721359" },
        { "/v1/embeddings", "{\"input\":\"ab\",\"dimensions\":2}", 200, "[0.44721359" },
        { "/v1/embeddings", "{\"input\":\"ab\",\"dimensions\":1}", 400,
          "have 2 numbers" },
        { "/v1/embeddings", "{\"input\":[\"ab\",\"c\"],\"encoding_format\":\"base64\"}",
          200, "\"index\":1,\"embedding\":\"LvnkPi75ZD8=\"" },
        { "/v1/completions", "{\"prompt\":\"a\",\"suffix\":\"b\"}", 400,
          "<|code_prefix|>" },
        { "/api/chat", "{" USER ",\"stream\":false}", 200,
          "\"message\":{\"role\":\"assistant\",\"content\":\"\",\"thinking\":\"ok\"}" },
        { "/api/generate", "{\"prompt\":\"[[a|b]]\",\"raw\":true}", 200,
          "\"response\":\"b\",\"done\":false}\n" },
        { "/api/generate", "{\"prompt\":\"[[{error=1}a|b]]\",\"raw\":true}", 200,
          "{\"error\":\"device: broke as the script says\"}\n" },
        { "/api/chat", "{\"messages\":7}", 400, "{\"error\":\"messages" },
        { "/api/chat", "{" USER ",\"stream\":1}", 400, "{\"error\":\"stream" },
        { "/api/nothing", "{}", 404, "{\"error\":\"no such path" },
        { "/v1/completions", "{\"prompt\":" NEVER ",\"deadline_ms\":30}", 504,
          "\"type\":\"server_error\",\"param\":null,\"code\":\"timeout\"" },
        { "/v1/messages",
          "{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":" NEVER
          "}],\"deadline_ms\":30}",
          504, "\"type\":\"timeout_error\"" },
        { "/v1/responses", "{\"input\":" NEVER ",\"deadline_ms\":30,\"stream\":true}",
          200, "\"code\":\"timeout\"" },
        { "/generate", "{\"text\":" NEVER ",\"sampling_params\":{\"deadline_ms\":30}}",
          504, "\"code\":\"timeout\"" },
        { "/api/generate",
          "{\"prompt\":" NEVER ",\"options\":{\"deadline_ms\":30},\"stream\":false}", 504,
          "{\"error\":\"deadline: it has passed\"}" },
        { "/apply-template", "{" USER "}", 200, "{\"prompt\":\"user:x;<think>\"}" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = post(f, cases[i].path, cases[i].body);

        if (r->status != cases[i].status || strstr(TEXT(r->body), cases[i].has) == NULL)
            fail_msg("%s %s: %d %s", cases[i].path, cases[i].body, r->status,
                     TEXT(r->body));
        done(r);
    }
    stop(f);
}

/* ---- errors of the engine ------------------------------------------------ */

static void wait_idle(const fixture *f, int64_t limit_ms)
{
    const int64_t start_us = hx_now_us();
    hx_status st;

    do {
        usleep(5000);
        hx_get_status(f->engine, &st);
        if (hx_now_us() - start_us > limit_ms * 1000)
            fail_msg("still %lld running, %lld waiting", (long long)st.running,
                     (long long)st.waiting);
    } while (st.running + st.waiting > 0);
}

static void wait_state(const fixture *f, int64_t running, int64_t waiting)
{
    hx_status st;

    for (int i = 0; i < 2000; i++) {
        hx_get_status(f->engine, &st);
        if (st.running == running && st.waiting == waiting)
            return;
        usleep(2000);
    }
    fail_msg("%lld running, %lld waiting", (long long)st.running, (long long)st.waiting);
}

static void test_overflow(void **state)
{
    fixture *f = start(NULL, 1, 1, 20);
    response *r = post(f, "/v1/completions",
                       "{\"prompt\":\"01234567890123456789\",\"stream\":true}");

    (void)state;
    assert_int_equal(r->status, 400);
    assert_str(r->json, "error.code", "context_length_exceeded");
    assert_str(r->json, "error.type", "invalid_request_error");
    assert_num(r->json, "error.n_prompt_tokens", 20);
    assert_num(r->json, "error.n_ctx", 20);
    assert_non_null(strstr(str_at(r->json, "error.message"), "20"));
    done(r);
    r = post(f, "/v1/completions",
             "{\"prompt\":\"01234567890123456789\",\"echo\":true,\"max_tokens\":0,"
             "\"logprobs\":1}");
    assert_int_equal(r->status, 400);
    assert_str(r->json, "error.code", "context_length_exceeded");
    done(r);
    r = post(f, "/v1/completions", "{\"prompt\":\"[[a|b|c|d]]78901234\"}");
    assert_int_equal(r->status, 200);
    assert_str(r->json, "choices.0.finish_reason", "length");
    assert_str(r->json, "choices.0.text", "a");
    done(r);
    stop(f);
}

/* Reads on until words have come; text: what came so far, [2000]. */
static void read_until(int fd, char *text, const char *words)
{
    size_t n = strlen(text);

    while (strstr(text, words) == NULL) {
        const ssize_t more = recv(fd, text + n, 1999 - n, 0);

        assert_true(more > 0);
        n += (size_t)more;
        text[n] = '\0';
    }
}

/* Who waits hears where, at once, and each change as it comes. */
static void test_places(void **state)
{
    fixture *f = start(NULL, 1, 3, 4096);
    const int fd[] = { dial(f->port), dial(f->port), dial(f->port), dial(f->port) };
    static const char slow[] = "{\"prompt\":\"[[{prefill=60000}a|b]]\"}",
                      later[] = "{\"prompt\":\"[[a]]\",\"stream\":true}";
    char text[2000] = "";

    (void)state;
    for (int i = 0; i < 4; i++) {
        send_request(fd[i], "POST", "/v1/completions", NULL, i == 0 ? slow : later);
        wait_state(f, 1, i);
    }
    const int64_t start = hx_now_us();
    read_until(fd[3], text, ": queue 3\n\n");
    close(fd[1]);
    read_until(fd[3], text, ": queue 2\n\n");
    close(fd[2]);
    read_until(fd[3], text, ": queue 1\n\n");
    close(fd[0]);
    read_until(fd[3], text, "[DONE]");
    assert_true(hx_now_us() - start < 30000000);
    close(fd[3]);
    wait_idle(f, 1000);
    stop(f);
}

static void test_queue_full(void **state)
{
    fixture *f = start(NULL, 1, 1, 4096);
    const int a = dial(f->port), b = dial(f->port);
    static const char slow[] = "{\"prompt\":\"[[{prefill=60000}a|b]]\"}",
                      later[] = "{\"prompt\":\"[[a]]\",\"stream\":true}";
    static const struct {
        const char *path, *body;
    } refused[] = {
        { "/v1/completions", "{\"prompt\":\"x\"}" },
        { "/v1/completions", "{\"prompt\":\"x\",\"stream\":true}" },
        { "/v1/completions", "{\"prompt\":\"x\",\"echo\":true,\"logprobs\":1}" },
        { "/v1/chat/completions",
          "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}" },
        { "/v1/chat/completions",
          "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"stream\":true}" },
    };
    char head[2000] = "";
    response *r;

    (void)state;
    send_request(a, "POST", "/v1/completions", NULL, slow);
    wait_state(f, 1, 0);
    send_request(b, "POST", "/v1/completions", NULL, later);
    wait_state(f, 1, 1);
    read_until(b, head, ": queue 1\n\n");
    for (size_t i = 0; i < HX_LEN(refused); i++) {
        r = post(f, refused[i].path, refused[i].body);
        assert_int_equal(r->status, 429);
        assert_str(r->json, "error.type", "rate_limit_error");
        assert_str(r->json, "error.code", "rate_limit_exceeded");
        assert_non_null(strstr(r->raw.p, "Retry-After: "));
        done(r);
    }
    close(b);
    wait_state(f, 1, 0);
    /* One of two answers has a place: neither is made. */
    r = post(f, "/v1/completions", "{\"prompt\":\"x\",\"n\":2,\"stream\":true}");
    assert_int_equal(r->status, 429);
    done(r);
    wait_state(f, 1, 0);
    close(a);
    wait_idle(f, 1000);
    stop(f);
}

/* Requests count for the key that they came with. */
static void test_clients(void **state)
{
    fixture *f = start(NULL, 8, 8, 4096);
    static const char *const head[] = { NULL, "Authorization: Bearer a\r\n",
                                        "X-Api-Key: b\r\n", "x-api-key: a\r\n" };
    hx_stream_info info[8];
    int fd[4];

    (void)state;
    for (int i = 0; i < 4; i++) {
        fd[i] = dial(f->port);
        send_request(fd[i], "POST", "/v1/completions", head[i],
                     "{\"prompt\":\"[[{prefill=60000}a|b]]\"}");
        wait_state(f, i + 1, 0);
    }
    assert_int_equal(hx_get_streams(f->engine, info, 8), 4);
    assert_int_equal(info[0].client, 0);
    assert_true(info[1].client != 0 && info[2].client != 0);
    assert_true(info[1].client != info[2].client);
    assert_true(info[1].client == info[3].client);
    for (int i = 0; i < 4; i++)
        close(fd[i]);
    wait_idle(f, 1000);
    stop(f);
}

/* What /health, /slots and /stats say of an engine at work, at fault, with a queue. */
static void test_observe(void **state)
{
    fixture *f = start(NULL, 1, 1, 4096);
    const int a = dial(f->port), b = dial(f->port);
    response *r;

    (void)state;
    send_request(a, "POST", "/v1/completions", NULL,
                 "{\"prompt\":\"[[{prefill=60000}a|b]]\"}");
    wait_state(f, 1, 0);
    send_request(b, "POST", "/v1/completions", NULL, "{\"prompt\":\"secret words\"}");
    wait_state(f, 1, 1);
    r = request(f, "GET", "/slots", NULL);
    assert_int_equal(r->status, 200);
    assert_int_equal(hx_json_len(r->json), 2);
    assert_num(r->json, "1.n_prompt", 12);
    assert_str(r->json, "1.state", "waiting");
    assert_null(strstr(r->body.p, "secret"));
    done(r);
    r = request(f, "GET", "/stats", NULL);
    assert_num(r->json, "requests.running", 1);
    assert_num(r->json, "requests.waiting", 1);
    assert_true(hx_json_kind(at(r->json, "fault")) == HX_JSON_NULL);
    done(r);
    f->engine->wait_ms = 12345;
    r = post(f, "/v1/completions", "{\"prompt\":\"x\"}");
    assert_int_equal(r->status, 429);
    assert_non_null(strstr(r->raw.p, "Retry-After: 13"));
    done(r);
    r = request(f, "GET", "/health", NULL);
    assert_int_equal(r->status, 200);
    done(r);
    f->engine->fault = "stalled";
    r = request(f, "GET", "/health", NULL);
    assert_int_equal(r->status, 503);
    assert_str(r->json, "status", "error");
    assert_str(r->json, "reason", "stalled");
    done(r);
    r = request(f, "GET", "/stats", NULL);
    assert_str(r->json, "fault", "stalled");
    done(r);
    close(a);
    close(b);
    wait_idle(f, 1000);
    stop(f);
}

static void test_engine_error(void **state)
{
    fixture *f = start(NULL, 2, 4, 4096);
    response *r = chat(f, "[[{error=2}</think>|a|b|c]]", "");
    stream *s;

    (void)state;
    assert_int_equal(r->status, 500);
    assert_str(r->json, "error.type", "server_error");
    assert_str(r->json, "error.message", "device: broke as the script says");
    done(r);
    r = chat(f, "[[{error=2}</think>|a|b|c]]", ",\"stream\":true");
    s = read_stream(r);
    assert_string_equal(TEXT(s->content), "a");
    assert_false(s->done);
    assert_str(s->error, "error.message", "device: broke as the script says");
    free_stream(s);
    done(r);
    /* One of two answers breaks: the other is cancelled. */
    r = post(f, "/v1/completions",
             "{\"prompt\":[\"[[{error=0}a]]\",\"[[{prefill=60000}a]]\"]}");
    assert_int_equal(r->status, 500);
    done(r);
    wait_idle(f, 1000);
    stop(f);
}

/* ---- clients that leave -------------------------------------------------- */

static void test_gone(void **state)
{
    static const char *const bodies[] = {
        "{\"prompt\":\"[[{prefill=60000}a|b]]\"}",
        "{\"prompt\":\"[[{prefill=60000}a|b]]\",\"stream\":true}",
        "{\"prompt\":\"[[{delay=20,repeat=5000}a|b]]\"}",
        "{\"prompt\":\"[[{delay=20,repeat=5000}a|b]]\",\"stream\":true,\"n\":2}",
    };
    fixture *f = start(NULL, 1, 16, 8192);

    (void)state;
    for (size_t i = 0; i < HX_LEN(bodies); i++) {
        const int first = dial(f->port);

        send_request(first, "POST", "/v1/completions", NULL, bodies[i]);
        wait_state(f, 1, i == 3 ? 1 : 0);
        const int second = dial(f->port);
        send_request(second, "POST", "/v1/completions", NULL, bodies[i & 1]);
        wait_state(f, 1, i == 3 ? 2 : 1);
        usleep(30000);
        close(second); /* in the queue */
        for (int k = 0; k < 200; k++) {
            hx_status st;
            hx_get_status(f->engine, &st);
            if (st.waiting == (i == 3 ? 1 : 0))
                break;
            assert_true(k < 199);
            usleep(5000);
        }
        close(first); /* in prefill, in decode */
        wait_idle(f, 1000);
    }
    response *r = chat(f, "[[</think>|fine]]", "");
    assert_str(r->json, "choices.0.message.content", "fine");
    done(r);
    stop(f);
}

/* ---- scoring ------------------------------------------------------------- */

/* Scoring blocks a worker: few do it at once, so that others are answered meanwhile. */
static void test_scoring(void **state)
{
    enum { N = 24 };
    fixture *f = start(NULL, 4, 64, 4096);
    hx_sb many = { 0 };
    int fd[N];

    (void)state;
    for (int i = 0; i < N; i++) {
        fd[i] = dial(f->port);
        send_request(fd[i], "POST", "/v1/completions", NULL,
                     "{\"prompt\":\"[[{score=60}a]]\",\"echo\":true,\"logprobs\":0}");
    }
    while (atomic_load(&f->engine->n_scoring) == 0)
        usleep(1000);
    response *r = chat(f, "[[</think>|now]]", "");
    assert_str(r->json, "choices.0.message.content", "now");
    done(r);
    assert_true(atomic_load(&f->engine->n_scoring) > 0);
    for (int i = 0; i < N; i++) {
        r = receive(fd[i]);
        assert_str(r->json, "choices.0.text", "[[{score=60}a]]a");
        assert_int_equal(hx_json_len(at(r->json, "choices.0.logprobs.tokens")), 16);
        done(r);
    }
    assert_in_range(atomic_load(&f->engine->max_scoring), 1, (8 + hx_sys_n_cpu()) / 2);
    /* A client that leaves: what it asked for ends with the prompt at work. */
    hx_sb_str(&many, "{\"echo\":true,\"logprobs\":0,\"prompt\":[\"[[{score=50}a]]\"");
    for (int i = 1; i < 200; i++)
        hx_sb_str(&many, ",\"[[{score=50}a]]\"");
    hx_sb_str(&many, "]}");
    fd[0] = dial(f->port);
    send_request(fd[0], "POST", "/v1/completions", NULL, many.p);
    hx_sb_free(&many);
    while (atomic_load(&f->engine->n_scoring) == 0)
        usleep(1000);
    close(fd[0]);
    const int64_t start_us = hx_now_us();
    stop(f); /* waits for it */
    assert_true(hx_now_us() - start_us < 3000000);
}

/* ---- clients that read slowly -------------------------------------------- */

static int32_t tokens_out(const fixture *f)
{
    int32_t n = 0;

    pthread_mutex_lock(&f->engine->lock);
    for (int32_t i = 0; i < FAKE_SLOTS; i++)
        if (f->engine->slot[i] != NULL)
            n += f->engine->slot[i]->n_out;
    pthread_mutex_unlock(&f->engine->lock);
    return n;
}

#define LONG "0123456789abcdefghijklmnopqrstuvwxyz0123456789abcdefghijklmnopqrstuvwxyz"

/* Returns once the streams that fd does not read are paused; how many tokens they have.
 */
static int32_t start_stalled(const fixture *f, int *fd)
{
    int32_t before, n = -1;

    *fd = dial_at(f->port, 32768);
    send_request(*fd, "POST", "/v1/completions", NULL,
                 "{\"prompt\":\"[[{repeat=30000}" LONG "]]\",\"stream\":true,\"n\":2}");
    wait_state(f, 2, 0);
    do {
        before = n;
        usleep(300000);
        n = tokens_out(f);
    } while (n != before);
    return n;
}

/* It pauses its own streams and nobody else's, and gets all once it reads. */
static void test_slow_client(void **state)
{
    enum { N = 2 * 30000 };
    fixture *f = start(&(hx_server_opt) { .drain_ms = 300 }, 4, 16, 1 << 20);
    int32_t n = 0;
    int fd;
    response *r;

    (void)state;
    assert_in_range(start_stalled(f, &fd), 1000, N - 1);
    r = chat(f, "[[{repeat=3000}</think>|on]]", ",\"stream\":true");
    stream *s = read_stream(r);
    assert_int_equal(s->content.n, 2 * 3000);
    free_stream(s);
    done(r);
    r = receive(fd);
    /* Near ones only: sanitizers look at all that memmem() may read, every time. */
    for (const char *p = r->body.p, *to = p + r->body.n;
         (p = memmem(p, HX_MIN((size_t)(to - p), 1000u), LONG, strlen(LONG))) != NULL;
         p += strlen(LONG))
        n++;
    assert_int_equal(n, N);
    assert_non_null(strstr(r->body.p + r->body.n - 20, "data: [DONE]"));
    done(r);
    start_stalled(f, &fd);
    close(fd); /* paused streams end too */
    wait_idle(f, 1000);
    start_stalled(f, &fd);
    stop(f);
    close(fd);
}

/* Clients that leave at any moment, with all kinds of requests. */
static void *leave_early(void *ud)
{
    static const char *const bodies[] = {
        "{\"prompt\":\"[[{delay=1,repeat=50}a|b]]\",\"stream\":true}",
        "{\"prompt\":\"[[{repeat=2000}a|b]]\",\"stream\":true,\"n\":3}",
        "{\"prompt\":\"[[{delay=1,repeat=5}a|b]]\",\"n\":2}",
        "{\"prompt\":\"[[{prefill=3}a]]\",\"echo\":true,\"logprobs\":1}",
        "{\"prompt\":\"[[{error=3,repeat=5}a|b]]\",\"stream\":true}",
        "{\"prompt\":\"[[a]]\",\"stream\":true}",
    };
    const fixture *f = ud;
    const uint64_t seed = (uint64_t)hx_now_us();
    char buf[4096];

    for (uint64_t i = 0; i < 60; i++) {
        const uint64_t dice = hx_rng_at(seed, i);
        const struct linger reset = { 1, 0 };
        const int fd = dial(f->port);

        send_request(fd, "POST", "/v1/completions", NULL, bodies[dice % HX_LEN(bodies)]);
        usleep((useconds_t)(dice >> 16) % 4000);
        if (dice & 512)
            (void)!recv(fd, buf, sizeof buf, MSG_DONTWAIT);
        if (dice & 1024)
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        close(fd);
    }
    return NULL;
}

static void test_vanish(void **state)
{
    fixture *f = start(NULL, 8, 64, 8192);
    pthread_t thread[6];

    (void)state;
    for (size_t i = 0; i < HX_LEN(thread); i++)
        pthread_create(&thread[i], NULL, leave_early, f);
    for (size_t i = 0; i < HX_LEN(thread); i++)
        pthread_join(thread[i], NULL);
    wait_idle(f, 5000);
    response *r = chat(f, "[[</think>|fine]]", "");
    /* Requests of those that left may still come from workers that had no CPU so far. */
    for (int i = 0; i < 500 && r->status == 429; i++) {
        done(r);
        usleep(10000);
        r = chat(f, "[[</think>|fine]]", "");
    }
    if (r->status != 200)
        fail_msg("status %d: %s", r->status, r->body.p);
    assert_str(r->json, "choices.0.message.content", "fine");
    done(r);
    stop(f);
}

/* ---- many at once -------------------------------------------------------- */

typedef struct {
    const fixture *f;
    int i, n_token;
    bool ok;
} client;

static void *one_client(void *ud)
{
    client *c = ud;
    char prompt[64];
    response *r;
    hx_sb want = { 0 };

    snprintf(prompt, sizeof prompt, "[[{delay=2,repeat=%d}c%d|x]]", c->n_token / 2, c->i);
    for (int k = 0; k < c->n_token / 2; k++)
        hx_sb_printf(&want, "c%dx", c->i);
    r = chat(c->f, prompt, ",\"reasoning_effort\":\"none\",\"stream\":true");
    stream *s = read_stream(r);
    c->ok = strcmp(TEXT(s->content), want.p) == 0 && s->done;
    hx_sb_free(&want);
    free_stream(s);
    done(r);
    return NULL;
}

static void test_many(void **state)
{
    enum { N = 64 };
    fixture *f = start(NULL, 64, 64, 8192);
    pthread_t thread[N];
    client c[N];

    (void)state;
    for (int i = 0; i < N; i++) {
        c[i] = (client) { .f = f, .i = i, .n_token = 100 };
        pthread_create(&thread[i], NULL, one_client, &c[i]);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(thread[i], NULL);
        assert_true(c[i].ok);
    }
    wait_idle(f, 1000);
    stop(f);
}

static double cpu_us(void)
{
    struct rusage u;

    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e6 +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* A process of its own, so that the clients do not count: n requests at once, all read to
 * their ends. Exit status 0 when every answer ended with [DONE]. */
static pid_t fork_clients(int port, int n, const char *body)
{
    const pid_t pid = fork();
    int fd[64], n_done = 0;
    char buf[65536];

    if (pid != 0)
        return pid;
    for (int i = 0; i < n; i++) {
        fd[i] = dial(port);
        send_request(fd[i], "POST", "/v1/completions", NULL, body);
    }
    for (int i = 0; i < n; i++) {
        ssize_t got, last = 0;

        while ((got = recv(fd[i], buf, sizeof buf, 0)) > 0)
            last = got;
        n_done += memmem(buf, (size_t)last, "0\r\n\r\n", 5) != NULL;
    }
    _exit(n_done == n ? 0 : 1);
}

/* Figures, with bounds that only a blunder exceeds. CPU of the server's threads and of
 * the fake engine, per token at 32 streams of 100 tokens/s; wall time of a short request.
 */
static void test_cost(void **state)
{
    enum { N = 32, TOKENS = 200, REQUESTS = 200 };
    fixture *f = start(NULL, N, 64, 8192);
    double us = cpu_us();
    int status = -1;
    char body[200];

    (void)state;
    snprintf(body, sizeof body,
             "{\"prompt\":\"[[{delay=10,repeat=%d}token]]\",\"stream\":true}", TOKENS);
    waitpid(fork_clients(f->port, N, body), &status, 0);
    assert_int_equal(status, 0);
    us = (cpu_us() - us) / (N * TOKENS);
    const int64_t start_us = hx_now_us();
    for (int i = 0; i < REQUESTS; i++)
        done(chat(f, "[[</think>|x]]", ""));
    const double request_us = (double)(hx_now_us() - start_us) / REQUESTS;
    print_message("server: %.1f us of CPU per token at %d streams, %.0f us per request\n",
                  us, N, request_us);
    assert_true(us < 2000 && request_us < 100000);
    stop(f);
}

/* ---- the end ------------------------------------------------------------- */

static void test_drain(void **state)
{
    fixture *f = start(&(hx_server_opt) { .drain_ms = 400 }, 4, 16, 8192);
    const int ends = dial(f->port), lasts = dial(f->port);
    response *r;
    stream *s;

    (void)state;
    send_request(ends, "POST", "/v1/chat/completions", NULL,
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"[[{delay=20}</"
                 "think>|a|b|c|d|e]]\"}],\"stream\":true}");
    send_request(lasts, "POST", "/v1/completions", NULL,
                 "{\"prompt\":\"[[{prefill=60000}a]]\"}");
    wait_state(f, 2, 0);
    const int64_t start_us = hx_now_us();
    hx_server_stop(f->server);
    r = receive(ends);
    s = read_stream(r);
    assert_string_equal(TEXT(s->content), "abcde");
    assert_true(s->done);
    free_stream(s);
    done(r);
    pthread_join(f->thread, NULL);
    assert_in_range(hx_now_us() - start_us, 100000, 3000000);
    assert_int_equal(f->rc, 0);
    close(lasts);
    hx_server_close(f->server);
    fake_close(f->engine);
    hx_free(f);
}

/* What the stop cuts off says so: an error as its last event, or a 503. */
static void test_cut_off(void **state)
{
    static const char *const ask[] = { "/v1/chat/completions", "/v1/completions",
                                       "/v1/messages", "/v1/responses" };
    enum { N = HX_LEN(ask) };
    fixture *f = start(&(hx_server_opt) { .drain_ms = 60000 }, N + 1, 16, 1 << 20);
    const int plain = dial(f->port);
    const int64_t start_us = hx_now_us();
    int fd[N];
    response *r;

    (void)state;
    for (int i = 0; i < N; i++) {
        char body[256];

        snprintf(
            body, sizeof body,
            "{\"stream\":true,\"max_tokens\":9999,%s:\"[[{delay=5,repeat=9999}ab]]\"%s}",
            i == 1   ? "\"prompt\""
            : i == 3 ? "\"input\""
                     : "\"messages\":[{\"role\":\"user\",\"content\"",
            i == 1 || i == 3 ? "" : "}]");
        fd[i] = dial(f->port);
        send_request(fd[i], "POST", ask[i], NULL, body);
    }
    send_request(plain, "POST", "/v1/completions", NULL,
                 "{\"prompt\":\"[[{prefill=60000}a]]\"}");
    wait_state(f, N + 1, 0);
    hx_server_stop(f->server);
    hx_server_stop(f->server); /* now, please */
    for (int i = 0; i < N; i++) {
        r = receive(fd[i]);
        assert_int_equal(r->status, 200);
        assert_non_null(strstr(TEXT(r->body), "the server is shutting down"));
        assert_null(strstr(TEXT(r->body), "[DONE]"));
        done(r);
    }
    r = receive(plain);
    assert_int_equal(r->status, 503);
    assert_non_null(strstr(TEXT(r->body), "\"code\":\"shutting_down\""));
    done(r);
    pthread_join(f->thread, NULL);
    assert_true(hx_now_us() - start_us < 10000000);
    close(plain);
    hx_server_close(f->server);
    fake_close(f->engine);
    hx_free(f);
}

static void test_no_leaks(void **state)
{
    (void)state;
    assert_int_equal(hx_test_live_allocs(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),         cmocka_unit_test(test_loading),
        cmocka_unit_test(test_routes),       cmocka_unit_test(test_key),
        cmocka_unit_test(test_refused),      cmocka_unit_test(test_messages),
        cmocka_unit_test(test_params),       cmocka_unit_test(test_chat),
        cmocka_unit_test(test_no_thinking),  cmocka_unit_test(test_streams),
        cmocka_unit_test(test_tools),        cmocka_unit_test(test_usage_chunk),
        cmocka_unit_test(test_several),      cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_completions),  cmocka_unit_test(test_completions_refused),
        cmocka_unit_test(test_dialects),     cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_places),       cmocka_unit_test(test_queue_full),
        cmocka_unit_test(test_observe),      cmocka_unit_test(test_clients),
        cmocka_unit_test(test_engine_error), cmocka_unit_test(test_gone),
        cmocka_unit_test(test_scoring),      cmocka_unit_test(test_slow_client),
        cmocka_unit_test(test_vanish),       cmocka_unit_test(test_many),
        cmocka_unit_test(test_cost),         cmocka_unit_test(test_drain),
        cmocka_unit_test(test_cut_off),      cmocka_unit_test(test_early),
        cmocka_unit_test(test_no_leaks),
    };

    return cmocka_run_group_tests_name("server", tests, NULL, NULL);
}
