/* liveness_test.c - what every dialect that streams owes its clients, on real sockets with
 * tests/fake_engine.c: the head at once, also while the model is loaded; no long silence in
 * loading, queue, scoring and prefill; and after the head an error in the dialect's own
 * shape. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "../../tests/fake_server.c"

#define KEEPALIVE_MS 40
#define PHASE_MS     500 /* of loading, of each prompt */
#define SILENCE_MS                                                                       \
    350 /* longer than any keepalive on a busy machine, shorter than a phase */

#define EVENTS   "text/event-stream"
#define COMMENT  ": keepalive\n\n"
#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"@\"}]"

/* What a stream of a dialect looks like. */
static const struct {
    const char *path, *body; /* @: the script; the object is still open */
    const char *type;
    const char *idle;          /* in silence, before anything else */
    const char *last;          /* of a whole answer */
    const char *error, *where; /* how an error begins; its message */
    const char *plain;         /* the message, where nothing streams */
    bool usual;                /* streams unasked */
} all[] = {
    { "/v1/chat/completions", "{\"stream\":true," MESSAGES, EVENTS, COMMENT,
      "data: [DONE]\n\n", "data: {\"error\":", "error.message", "error.message", false },
    { "/v1/completions", "{\"stream\":true,\"prompt\":\"@\"", EVENTS, COMMENT,
      "data: [DONE]\n\n", "data: {\"error\":", "error.message", "error.message", false },
    { "/v1/completions", "{\"stream\":true,\"echo\":true,\"logprobs\":1,\"prompt\":\"@\"",
      EVENTS, COMMENT, "data: [DONE]\n\n", "data: {\"error\":", "error.message",
      "error.message", false },
    { "/v1/responses", "{\"stream\":true,\"input\":\"@\"", EVENTS, COMMENT,
      "event: response.completed\n", "event: error\ndata: {\"type\":\"error\"", "message",
      "error.message", false },
    { "/v1/messages", "{\"stream\":true,\"max_tokens\":50," MESSAGES, EVENTS,
      "event: ping\ndata: {\"type\":\"ping\"}\n\n", "event: message_stop\n",
      "event: error\ndata: {\"type\":\"error\",", "error.message", "error.message",
      false },
    { "/generate", "{\"stream\":true,\"text\":\"@\"", EVENTS, COMMENT, "data: [DONE]\n\n",
      "data: {\"error\":", "error.message", "error.message", false },
    { "/generate",
      "{\"stream\":true,\"return_logprob\":true,\"logprob_start_len\":0,\"text\":\"@\"",
      EVENTS, COMMENT, "data: [DONE]\n\n", "data: {\"error\":", "error.message",
      "error.message", false },
    { "/api/chat", "{" MESSAGES, "application/x-ndjson",
      "{\"message\":{\"role\":\"assistant\",\"content\":\"\"},\"done\":false}\n",
      "\"done\":true,", "{\"error\":", "error", "error", true },
    { "/api/generate", "{\"prompt\":\"@\"", "application/x-ndjson",
      "{\"response\":\"\",\"done\":false}\n", "\"done\":true,", "{\"error\":", "error",
      "error", true },
};
#define N ((int)HX_LEN(all))

/* A request on its way, and what came of it. */
typedef struct {
    int port, i; /* of all */
    const char *script, *more;
    hx_sb raw;
    response *r;
    int64_t head_us, silence_us; /* to the head; the longest pause between two reads */
    pthread_t thread;
} client;

static void *run_client(void *ud)
{
    client *c = ud;
    const int fd = dial(c->port);
    int64_t last = hx_now_us();
    hx_sb body = { 0 }, raw = { 0 };
    char buf[65536];
    ssize_t n;

    const char *form = all[c->i].body, *at = strchr(form, '@');
    hx_sb_printf(&body, "%.*s%s%s%s}", (int)(at - form), form, c->script, at + 1,
                 c->more);
    send_request(fd, "POST", all[c->i].path, NULL, body.p);
    while ((n = recv(fd, buf, sizeof buf, 0)) > 0) {
        const int64_t now = hx_now_us();

        if (raw.n == 0)
            c->head_us = now - last;
        else
            c->silence_us = HX_MAX(c->silence_us, now - last);
        last = now;
        hx_sb_add(&raw, buf, (size_t)n);
    }
    close(fd);
    hx_sb_free(&body);
    c->raw = raw;
    return NULL;
}

static void start_client(client *c, const fixture *f, int i, const char *script,
                         const char *more)
{
    *c = (client) { .port = f->port, .i = i, .script = script, .more = more };
    assert_int_equal(pthread_create(&c->thread, NULL, run_client, c), 0);
}

static void end_client(client *c)
{
    pthread_join(c->thread, NULL);
    c->r = parse(c->raw);
}

/* A server whose model is still to come. */
static void open_loading(fixture *f, int32_t streams)
{
    *f = start_with(&(hx_server_opt) { .drain_ms = 1000, .keepalive_ms = KEEPALIVE_MS },
                    fake_open(streams, 64, 8192));
    go(f);
}

static void close_loading(fixture *f)
{
    hx_server_stop(f->server);
    pthread_join(f->thread, NULL);
    hx_server_close(f->server);
    fake_close(f->engine);
}

/* One slot for all: each waits for the model, for its turn, for its scores, for its
 * prompt. */
static void test_silence(void **state)
{
    fixture f;
    client c[N];

    (void)state;
    open_loading(&f, 1);
    for (int i = 0; i < N; i++)
        start_client(&c[i], &f, i, "[[{prefill=500,score=500}a|b]]", "");
    usleep(PHASE_MS * 1000);
    hx_server_set_engine(f.server, f.engine);
    for (int i = 0; i < N; i++) {
        const char *body;

        end_client(&c[i]);
        body = c[i].r->body.p;
        printf("%-22s head after %3d ms, longest silence %3d ms\n", all[i].path,
               (int)(c[i].head_us / 1000), (int)(c[i].silence_us / 1000));
        assert_int_equal(c[i].r->status, 200);
        assert_non_null(strstr(c[i].r->raw.p, all[i].type));
        assert_true(c[i].head_us < SILENCE_MS * 1000);
        assert_true(c[i].silence_us < SILENCE_MS * 1000);
        for (int k = 0; k < 3; k++, body += strlen(all[i].idle))
            assert_memory_equal(body, all[i].idle, strlen(all[i].idle));
        assert_non_null(strstr(body, all[i].last));
        assert_null(strstr(body, all[i].error));
        done(c[i].r);
    }
    close_loading(&f);
}

/* The error that ends a stream, and the sentence in it. */
static void check_error(const client *c, const char *sentence)
{
    const char *at = strstr(c->r->body.p, all[c->i].error), *json;
    hx_json *j;

    if (at == NULL)
        fail_msg("%s: %s", all[c->i].path, c->r->body.p);
    assert_non_null(json = strchr(at, '{'));
    assert_int_equal(hx_json_parse(&j, (hx_str) { json, strcspn(json, "\n") }, 0, NULL),
                     0);
    if (strstr(str_at(j, all[c->i].where), sentence) == NULL)
        fail_msg("%s: %s", all[c->i].path, at);
    assert_null(strstr(at, all[c->i].last));
    hx_json_free(j);
    /* Clients of this one look for the object that failed. */
    if (strcmp(all[c->i].path, "/v1/responses") == 0) {
        assert_non_null(at = strstr(at, "event: response.failed\ndata: "));
        assert_int_equal(hx_json_parse(&j, hx_str_c(strchr(at, '{')), 0, NULL), 0);
        assert_str(j, "response.status", "failed");
        assert_int_equal(strncmp(str_at(j, "response.id"), "resp_", 5), 0);
        assert_true(strstr(str_at(j, "response.error.message"), sentence) != NULL);
        hx_json_free(j);
    }
}

/* A request that turns out to be wrong once the model is there; one whose answer breaks. */
static void test_errors(void **state)
{
    fixture f;
    client wrong[N], broken[N];

    (void)state;
    open_loading(&f, 64);
    for (int i = 0; i < N; i++) {
        start_client(&wrong[i], &f, i, "[[a]]",
                     strstr(all[i].path, "/api/") != NULL ? ",\"options\":[]"
                     : strcmp(all[i].path, "/generate") == 0
                         ? ",\"sampling_params\":{\"temperature\":\"warm\"}"
                         : ",\"temperature\":\"warm\"");
        start_client(&broken[i], &f, i, "[[{error=1}a|b]]", "");
    }
    usleep(PHASE_MS * 500);
    hx_server_set_engine(f.server, f.engine);
    for (int i = 0; i < N; i++) {
        end_client(&wrong[i]);
        end_client(&broken[i]);
        assert_int_equal(wrong[i].r->status, 200);
        check_error(&wrong[i], strstr(all[i].path, "/api/") != NULL ? "options: found"
                                                                    : "temperature");
        check_error(&broken[i], "broke as the script says");
        done(wrong[i].r);
        done(broken[i].r);
    }
    close_loading(&f);
}

/* The server ends before the model has come. */
static void test_stopped(void **state)
{
    fixture f;
    client c[N];

    (void)state;
    open_loading(&f, 1);
    for (int i = 0; i < N; i++)
        start_client(&c[i], &f, i, "[[a]]", "");
    usleep(PHASE_MS * 500);
    close_loading(&f);
    for (int i = 0; i < N; i++) {
        end_client(&c[i]);
        assert_int_equal(c[i].r->status, 200);
        check_error(&c[i], "the server stops");
        done(c[i].r);
    }
}

/* Who does not stream is told to come again, in the dialect's words. */
static void test_unstreamed(void **state)
{
    fixture f;

    (void)state;
    open_loading(&f, 1);
    for (int i = 0; i < N; i++) {
        response *r = post(&f, all[i].path,
                           all[i].usual ? "{\"stream\":false}" : "{\"prompt\":\"x\"}");

        assert_int_equal(r->status, 503);
        assert_non_null(strstr(r->raw.p, "Retry-After: "));
        assert_non_null(strstr(str_at(r->json, all[i].plain), "being loaded"));
        done(r);
    }
    hx_server_set_engine(f.server, f.engine);
    close_loading(&f);
}

/* Ollama's clients ask so for the model to be loaded; they are answered when it is. */
static void test_load(void **state)
{
    fixture f;
    int fd[2];

    (void)state;
    open_loading(&f, 1);
    for (int i = 0; i < 2; i++)
        fd[i] = dial(f.port);
    send_request(fd[0], "POST", "/api/chat", NULL, "{\"model\":\"m\"}");
    send_request(fd[1], "POST", "/api/generate", NULL, "{\"model\":\"m\"}");
    usleep(PHASE_MS * 500);
    hx_server_set_engine(f.server, f.engine);
    for (int i = 0; i < 2; i++) {
        response *r = receive(fd[i]);

        assert_int_equal(r->status, 200);
        assert_non_null(strstr(r->body.p, "\"done\":true,\"done_reason\":\"load\"}\n"));
        done(r);
    }
    close_loading(&f);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_silence), cmocka_unit_test(test_errors),
        cmocka_unit_test(test_stopped), cmocka_unit_test(test_unstreamed),
        cmocka_unit_test(test_load),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("liveness", tests, NULL, NULL);
}
