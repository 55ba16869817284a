/* fake_server.c - for tests of the server: the whole of it over real sockets with
 * fake_engine.c in place of a model, and a client. Included by the test. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fake_engine.c"
#include "serve/serve.h"

/* ---- a server under test ------------------------------------------------- */

typedef struct {
    hx_server *server;
    hx_engine *engine;
    pthread_t thread;
    int port, rc;
} fixture;

static void *run_server(void *ud)
{
    fixture *f = ud;
    hx_err err;

    f->rc = hx_server_run(f->server, &err);
    return NULL;
}

static fixture start_with(const hx_server_opt *opt, hx_engine *e)
{
    fixture f = { .engine = e };
    hx_err err = { 0 };

    assert_int_equal(hx_server_open(&f.server, opt, &err), 0);
    f.port = hx_server_port(f.server);
    return f;
}

static void go(fixture *f)
{
    pthread_create(&f->thread, NULL, run_server, f);
}

static inline fixture *start(const hx_server_opt *opt, int32_t streams, int64_t queue,
                             int64_t ctx)
{
    const hx_server_opt none = { .drain_ms = 3000 };
    fixture *f = hx_new(fixture, 1);

    *f = start_with(opt != NULL ? opt : &none, fake_open(streams, queue, ctx));
    hx_server_set_engine(f->server, f->engine);
    go(f);
    return f;
}

static inline void stop(fixture *f)
{
    hx_server_stop(f->server);
    pthread_join(f->thread, NULL);
    assert_int_equal(f->rc, 0);
    hx_server_close(f->server);
    fake_close(f->engine);
    hx_free(f);
}

/* ---- a client ------------------------------------------------------------ */

/* rcvbuf 0: the system's */
static int dial_at(int port, int rcvbuf)
{
    const struct timeval limit = { .tv_sec = 20 };
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr = { htonl(INADDR_LOOPBACK) } };
    const int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (rcvbuf > 0)
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof rcvbuf);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static int dial(int port)
{
    return dial_at(port, 0);
}

static void send_request(int fd, const char *method, const char *path,
                         const char *headers, const char *body)
{
    hx_sb b = { 0 };

    hx_sb_printf(&b, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s", method, path,
                 headers != NULL ? headers : "");
    if (body != NULL)
        hx_sb_printf(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n",
                     strlen(body));
    hx_sb_str(&b, "\r\n");
    hx_sb_str(&b, body != NULL ? body : "");
    assert_int_equal(send(fd, b.p, b.n, MSG_NOSIGNAL), b.n);
    hx_sb_free(&b);
}

typedef struct {
    int status;
    hx_sb raw, body;
    hx_json *json; /* of a JSON body */
} response;

static void dechunk(response *r, char *p, char *end)
{
    while (p < end) {
        char *data;
        const size_t n = strtoul(p, &data, 16);

        data += 2;
        if (n == 0)
            return;
        hx_sb_add(&r->body, data, n);
        p = data + n + 2;
    }
    fail_msg("chunked body has no end");
}

/* All that came over a connection. */
static response *parse(hx_sb raw)
{
    response *r = hx_new(response, 1);
    char *head_end = strstr(raw.p, "\r\n\r\n");

    r->raw = raw;
    assert_int_equal(sscanf(raw.p, "HTTP/1.1 %d", &r->status), 1);
    assert_non_null(head_end);
    *head_end = '\0';
    if (strstr(raw.p, "Transfer-Encoding: chunked") != NULL)
        dechunk(r, head_end + 4, raw.p + raw.n);
    else
        hx_sb_add(&r->body, head_end + 4, (size_t)(raw.p + raw.n - head_end - 4));
    if (strstr(raw.p, "application/json") != NULL && r->body.n > 0)
        assert_int_equal(
            hx_json_parse(&r->json, (hx_str) { r->body.p, r->body.n }, 0, NULL), 0);
    return r;
}

static response *receive(int fd)
{
    char buf[65536];
    hx_sb raw = { 0 };
    ssize_t n;

    while ((n = recv(fd, buf, sizeof buf, 0)) > 0)
        hx_sb_add(&raw, buf, (size_t)n);
    assert_int_equal(n, 0);
    close(fd);
    return parse(raw);
}

static void done(response *r)
{
    hx_json_free(r->json);
    hx_sb_free(&r->raw);
    hx_sb_free(&r->body);
    hx_free(r);
}

static response *request(const fixture *f, const char *method, const char *path,
                         const char *body)
{
    const int fd = dial(f->port);

    send_request(fd, method, path, NULL, body);
    return receive(fd);
}

static response *post(const fixture *f, const char *path, const char *body)
{
    return request(f, "POST", path, body);
}

/* "choices.0.message.content" */
static const hx_json *at(const hx_json *j, const char *path)
{
    char name[64];

    while (*path != '\0' && j != NULL) {
        const size_t n = strcspn(path, ".");

        snprintf(name, sizeof name, "%.*s", (int)n, path);
        j = hx_json_kind(j) == HX_JSON_ARRAY ? hx_json_at(j, strtoul(name, NULL, 10))
                                             : hx_json_get(j, name);
        path += n + (path[n] == '.');
    }
    return j;
}

static const char *str_at(const hx_json *j, const char *path)
{
    const hx_str s = hx_json_str(at(j, path));

    return s.p != NULL ? s.p : "(none)";
}

#define assert_str(j, path, want) assert_string_equal(str_at(j, path), want)
#define assert_num(j, path, want) assert_int_equal(hx_json_int(at(j, path), -12345), want)

/* Chat with one user message; more: further members, begins with a comma. */
static inline response *chat(const fixture *f, const char *user, const char *more)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"messages\":[{\"role\":\"user\",\"content\":");
    hx_json_put_str(&b, hx_str_c(user));
    hx_sb_printf(&b, "}]%s}", more);
    response *r = post(f, "/v1/chat/completions", b.p);
    hx_sb_free(&b);
    return r;
}

/* ---- streams ------------------------------------------------------------- */

typedef struct {
    hx_sb content, reasoning, calls, logprobs; /* calls: name(args); */
    char finish[32];
    int n_chunk, n_role, n_usage, n_null_usage, n_empty, n_call;
    int64_t completion_tokens;
    bool done; /* [DONE] came last */
    hx_json *error;
} stream;

static void take_delta(stream *s, const hx_json *chunk)
{
    const hx_json *delta = at(chunk, "choices.0.delta"), *calls = at(delta, "tool_calls");
    const hx_str content = hx_json_str(at(delta, "content"));
    const hx_str reasoning = hx_json_str(at(delta, "reasoning_content"));

    assert_str(chunk, "object", "chat.completion.chunk");
    s->n_role += hx_json_has(delta, "role");
    hx_sb_add(&s->content, content.p, content.n);
    hx_sb_add(&s->reasoning, reasoning.p, reasoning.n);
    assert_true(hx_str_eq(reasoning, hx_json_str(at(delta, "reasoning"))));
    for (size_t i = 0; i < hx_json_len(calls); i++) {
        const hx_json *call = hx_json_at(calls, i);
        const bool opens = hx_json_has(call, "id");

        if (opens) {
            assert_num(call, "index", s->n_call);
            assert_str(call, "type", "function");
            assert_int_equal(strncmp(str_at(call, "id"), "call_", 5), 0);
            hx_sb_printf(&s->calls, "%s|%s|", s->n_call++ > 0 ? ";" : "",
                         str_at(call, "function.name"));
        } else {
            assert_num(call, "index", s->n_call - 1);
            assert_false(hx_json_has(at(call, "function"), "name"));
        }
        hx_sb_str(&s->calls, str_at(call, "function.arguments"));
    }
    const hx_json *lp = at(chunk, "choices.0.logprobs.content");
    for (size_t i = 0; i < hx_json_len(lp); i++)
        hx_sb_str(&s->logprobs, str_at(hx_json_at(lp, i), "token"));
}

static void take_chunk(stream *s, const hx_json *chunk)
{
    assert_true(hx_json_kind(hx_json_get(chunk, "choices")) == HX_JSON_ARRAY);
    s->n_chunk++;
    s->n_null_usage +=
        hx_json_has(chunk, "usage") && hx_json_kind(at(chunk, "usage")) == HX_JSON_NULL;
    if (hx_json_kind(at(chunk, "usage")) == HX_JSON_OBJECT) {
        s->n_usage++;
        s->completion_tokens = hx_json_int(at(chunk, "usage.completion_tokens"), -1);
        assert_int_equal(hx_json_len(at(chunk, "choices")), 0);
    }
    if (hx_json_len(at(chunk, "choices")) == 0) {
        s->n_empty++;
        return;
    }
    assert_true(s->finish[0] == '\0');
    take_delta(s, chunk);
    if (hx_json_kind(at(chunk, "choices.0.finish_reason")) == HX_JSON_STRING)
        snprintf(s->finish, sizeof s->finish, "%s",
                 str_at(chunk, "choices.0.finish_reason"));
}

static inline stream *read_stream(response *r)
{
    stream *s = hx_new(stream, 1);
    const char *p = r->body.p;

    assert_int_equal(r->status, 200);
    assert_non_null(strstr(r->raw.p, "text/event-stream"));
    while (p != NULL && *p != '\0') {
        const char *end = strstr(p, "\n\n");
        hx_json *chunk;

        assert_non_null(end);
        assert_false(s->done);
        if (strncmp(p, "data: [DONE]", 12) == 0) {
            s->done = true;
        } else if (*p != ':') {
            assert_int_equal(strncmp(p, "data: ", 6), 0);
            assert_int_equal(
                hx_json_parse(&chunk, (hx_str) { p + 6, (size_t)(end - p - 6) }, 0, NULL),
                0);
            if (hx_json_has(chunk, "error")) {
                s->error = chunk;
            } else {
                take_chunk(s, chunk);
                hx_json_free(chunk);
            }
        }
        p = end + 2;
    }
    return s;
}

static inline void free_stream(stream *s)
{
    hx_sb_free(&s->content);
    hx_sb_free(&s->reasoning);
    hx_sb_free(&s->calls);
    hx_sb_free(&s->logprobs);
    hx_json_free(s->error);
    hx_free(s);
}

#define TEXT(sb) ((sb).p != NULL ? (sb).p : "")
