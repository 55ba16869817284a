/* http_test.c - the HTTP transport (http.c, http_read.c, http_write.c) over real sockets
 * on loopback, with a client of its own. Expected statuses come from RFC 9110 and 9112.
 * Prints what a request and an event cost. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "serve/http.h"

/* Sanitizers make everything slower and larger; bars on time and memory then stretch. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 20
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SLOW 20
#endif
#endif
#ifndef SLOW
#define SLOW 1
#endif

/* ---- a server with a few routes ---------------------------------------- */

typedef struct {
    hx_http *h;
    int port;
    pthread_t thread;
    _Atomic int active;        /* handler threads */
    _Atomic bool open;         /* lets /hold answer */
    _Atomic int64_t gone_us;   /* when on_gone was called */
    _Atomic int stalled;       /* floods that ended in false */
    _Atomic int64_t flooded;   /* bytes that they had sent */
    hx_exchange *gathered[32]; /* by /gather, for the test to answer */
    _Atomic int n_gathered;
} server;

typedef struct {
    server *s;
    hx_exchange *x;
    void (*fn)(server *s, hx_exchange *x);
} job;

static void nap(int64_t us)
{
    usleep((useconds_t)us);
}

/* What arrived, as text that tests compare. */
static void echo(server *s, hx_exchange *x)
{
    const hx_str probe = hx_http_header(x, "x-probe");
    hx_sb b = { 0 };

    (void)s;
    hx_sb_printf(&b, "%.*s|%.*s|%.*s|%.*s|", (int)x->method.n, x->method.p,
                 (int)x->path.n, x->path.p, (int)x->query.n,
                 x->query.p != NULL ? x->query.p : "", (int)probe.n,
                 probe.p != NULL ? probe.p : "");
    hx_sb_add(&b, x->body.p, x->body.n);
    if (b.bad)
        hx_http_reply(x, 503, NULL, NULL, HX_STR(""));
    else
        hx_http_reply(x, 200, "text/plain", NULL, (hx_str) { b.p, b.n });
    hx_sb_free(&b);
}

static void slow(server *s, hx_exchange *x)
{
    nap(20000);
    echo(s, x);
}

static void hold(server *s, hx_exchange *x)
{
    while (!atomic_load(&s->open))
        nap(1000);
    echo(s, x);
}

static char ten_mb[10 << 20]; /* filled by main() */

static void big(server *s, hx_exchange *x)
{
    (void)s;
    hx_http_reply(x, 200, "application/octet-stream", "X-Extra: yes\r\n",
                  (hx_str) { ten_mb, sizeof(ten_mb) });
}

static void post_news(void *ud)
{
    sem_post(ud);
}

/* Sends and waits until the client has caught up; false when it has gone. */
static bool say(server *s, hx_exchange *x, hx_str bytes, sem_t *news)
{
    hx_http_state state = hx_http_send(x, bytes);

    hx_http_flush(s->h);
    while (state == HX_HTTP_FULL) {
        sem_wait(news);
        state = hx_http_send(x, HX_STR(""));
    }
    return state == HX_HTTP_OPEN;
}

static void begin_events(hx_exchange *x)
{
    hx_http_begin_stream(x, "text/event-stream; charset=utf-8",
                         HX_STR(": keepalive\n\n"));
}

static void begin(hx_exchange *x, sem_t *news)
{
    sem_init(news, 0, 0);
    hx_http_on_news(x, post_news, news);
    begin_events(x);
}

static void end(hx_exchange *x, sem_t *news)
{
    hx_http_on_news(x, NULL, NULL);
    hx_http_end(x);
    sem_destroy(news);
}

/* /events: n events as the query says, each of 100 bytes. */
static void events(server *s, hx_exchange *x)
{
    const int n = x->query.n > 0 ? (int)strtol(x->query.p, NULL, 10) : 3;
    char text[101];
    sem_t news;

    begin(x, &news);
    for (int i = 0; i < n; i++) {
        snprintf(text, sizeof(text), "data: %092d\n\n", i);
        if (!say(s, x, (hx_str) { text, 100 }, &news))
            break;
    }
    end(x, &news);
}

static void note_gone(void *ud)
{
    server *s = ud;

    atomic_store(&s->gone_us, hx_now_us());
}

/* Begins and then says nothing until the client goes. */
static void silent(server *s, hx_exchange *x)
{
    hx_http_on_news(x, note_gone, s);
    begin_events(x);
    hx_http_flush(s->h);
    for (int i = 0; i < 10000 && !hx_http_gone(x); i++)
        nap(1000);
    hx_http_end(x);
}

/* Lines of JSON in place of events. */
static void silent_lines(server *s, hx_exchange *x)
{
    hx_http_begin_stream(x, "application/x-ndjson", HX_STR("{\"idle\":1}\n"));
    hx_http_flush(s->h);
    for (int i = 0; i < 10000 && !hx_http_gone(x); i++)
        nap(1000);
    hx_http_end(x);
}

/* The same without a word: prefill of a request that does not stream. */
static void think(server *s, hx_exchange *x)
{
    hx_http_on_news(x, note_gone, s);
    for (int i = 0; i < 10000 && !hx_http_gone(x); i++)
        nap(1000);
    hx_http_on_news(x, NULL, NULL);
    echo(s, x);
}

static void flood(server *s, hx_exchange *x)
{
    char text[10000];
    sem_t news;

    memset(text, 'x', sizeof(text));
    begin(x, &news);
    while (say(s, x, (hx_str) { text, sizeof(text) }, &news))
        atomic_fetch_add(&s->flooded, (int64_t)sizeof(text));
    atomic_fetch_add(&s->stalled, 1);
    end(x, &news);
}

static void mute(server *s, hx_exchange *x)
{
    (void)s;
    hx_http_end(x);
}

static void gather(server *s, hx_exchange *x)
{
    s->gathered[atomic_load(&s->n_gathered)] = x;
    atomic_fetch_add(&s->n_gathered, 1);
}

static const struct {
    const char *path;
    void (*fn)(server *s, hx_exchange *x);
    bool threaded;
} routes[] = {
    { "/slow", slow, true },          { "/hold", hold, true },
    { "/worker", echo, true },        { "/big", big, true },
    { "/events", events, true },      { "/silent", silent, true },
    { "/think", think, true },        { "/flood", flood, true },
    { "/mute", mute, false },         { "/gather", gather, false },
    { "/lines", silent_lines, true },
};

static void *run_job(void *ud)
{
    job *j = ud;
    server *s = j->s;

    j->fn(s, j->x);
    free(j);
    atomic_fetch_sub(&s->active, 1);
    return NULL;
}

static void handle(void *ud, hx_exchange *x)
{
    server *s = ud;
    pthread_t thread;
    job *j;

    for (size_t i = 0; i < HX_LEN(routes); i++) {
        if (!hx_str_is(x->path, routes[i].path))
            continue;
        if (!routes[i].threaded) {
            routes[i].fn(s, x);
            return;
        }
        j = malloc(sizeof(*j));
        *j = (job) { s, x, routes[i].fn };
        atomic_fetch_add(&s->active, 1);
        assert_int_equal(pthread_create(&thread, NULL, run_job, j), 0);
        pthread_detach(thread);
        return;
    }
    echo(s, x);
}

static void *run_loop(void *ud)
{
    server *s = ud;

    hx_http_run(s->h, NULL);
    return NULL;
}

static void start(server *s, hx_http_opt opt)
{
    hx_err err = { 0 };

    *s = (server) { 0 };
    if (hx_http_open(&s->h, &opt, handle, s, &err) != 0)
        fail_msg("%s", err.msg);
    s->port = hx_http_port(s->h);
    assert_int_equal(pthread_create(&s->thread, NULL, run_loop, s), 0);
}

static void await_idle(server *s)
{
    for (int i = 0; i < 5000 * SLOW && atomic_load(&s->active) > 0; i++)
        nap(1000);
    assert_int_equal(atomic_load(&s->active), 0);
}

static void finish_up(server *s)
{
    pthread_join(s->thread, NULL);
    await_idle(s);
    hx_http_close(s->h);
}

static void stop(server *s)
{
    atomic_store(&s->open, true);
    hx_http_stop(s->h, 1000);
    finish_up(s);
}

/* ---- a client ----------------------------------------------------------- */

typedef struct {
    int fd;
    char *p; /* bytes read and not yet used */
    size_t n, cap;
} client;

typedef struct {
    int status;
    char *head, *body;
    size_t n_body;
} reply;

static client dial_at(int port, int rcvbuf)
{
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct timeval patience = { .tv_sec = 20 };
    client c = { .fd = socket(AF_INET, SOCK_STREAM, 0) };
    int one = 1;

    assert_true(c.fd >= 0);
    if (rcvbuf > 0)
        setsockopt(c.fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof(rcvbuf));
    setsockopt(c.fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    setsockopt(c.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    assert_int_equal(connect(c.fd, (struct sockaddr *)&a, sizeof(a)), 0);
    return c;
}

static client dial(const server *s)
{
    return dial_at(s->port, 0);
}

static void hang_up(client *c)
{
    close(c->fd);
    free(c->p);
    *c = (client) { .fd = -1 };
}

/* A reset instead of a proper end. */
static void slam(client *c)
{
    const struct linger l = { 1, 0 };

    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &l, sizeof(l));
    hang_up(c);
}

/* False when the server has closed. */
static bool put(client *c, const void *p, size_t n)
{
    size_t done = 0;

    while (done < n) {
        const ssize_t k = send(c->fd, (const char *)p + done, n - done, MSG_NOSIGNAL);

        if (k <= 0)
            return false;
        done += (size_t)k;
    }
    return true;
}

static bool put_str(client *c, const char *s)
{
    return put(c, s, strlen(s));
}

/* Reads more; false at the end, -1 on a reset or when nothing comes. */
static int more(client *c)
{
    ssize_t k;

    if (c->cap - c->n < 65536) {
        c->cap = c->cap * 2 + 65536 * 2;
        c->p = realloc(c->p, c->cap);
        assert_non_null(c->p);
    }
    k = recv(c->fd, c->p + c->n, c->cap - c->n - 1, 0);
    if (k > 0)
        c->n += (size_t)k;
    c->p[c->n] = '\0';
    return k > 0 ? 1 : (int)k;
}

static void use(client *c, size_t n)
{
    memmove(c->p, c->p + n, c->n - n + 1);
    c->n -= n;
}

static void reply_free(reply *r)
{
    free(r->head);
    free(r->body);
    *r = (reply) { 0 };
}

static char *copy(const char *p, size_t n)
{
    char *s = malloc(n + 1);

    memcpy(s, p, n);
    s[n] = '\0';
    return s;
}

/* The value of a head's line, "" when absent, in a buffer that this thread's next call
 * overwrites. */
static const char *field(const reply *r, const char *name)
{
    static _Thread_local char value[600];
    const char *at = strcasestr(r->head, name);

    value[0] = '\0';
    if (at != NULL)
        sscanf(at + strlen(name), ": %599[^\r]", value);
    return value;
}

/* Undoes chunks; waits for all of them. False when the connection ends first. */
static bool get_chunks(client *c, reply *r)
{
    size_t at = 0;

    r->body = calloc(1, 1);
    for (;;) {
        const char *eol;
        size_t n;

        while ((eol = c->n > at ? memmem(c->p + at, c->n - at, "\r\n", 2) : NULL) == NULL)
            if (more(c) <= 0)
                return false;
        n = strtoul(c->p + at, NULL, 16);
        at = (size_t)(eol - c->p) + 2;
        while (c->n < at + n + 2)
            if (more(c) <= 0)
                return false;
        assert_memory_equal(c->p + at + n, "\r\n", 2);
        r->body = realloc(r->body, r->n_body + n + 1);
        memcpy(r->body + r->n_body, c->p + at, n);
        r->n_body += n;
        r->body[r->n_body] = '\0';
        at += n + 2;
        if (n == 0)
            break;
    }
    use(c, at);
    return true;
}

/* Reads one response; its status, or 0 when the connection ends before one is complete.
 */
static int get_for(client *c, reply *r, bool head_only)
{
    char *end;
    size_t n;

    *r = (reply) { 0 };
    while ((end = c->n > 0 ? memmem(c->p, c->n, "\r\n\r\n", 4) : NULL) == NULL)
        if (more(c) <= 0)
            return 0;
    n = (size_t)(end - c->p) + 4;
    r->head = copy(c->p, n);
    use(c, n);
    assert_int_equal(sscanf(r->head, "HTTP/1.1 %d ", &r->status), 1);
    if (head_only || r->status == 204 || r->status == 100)
        return r->status;
    if (strcmp(field(r, "\r\nTransfer-Encoding"), "chunked") == 0)
        return get_chunks(c, r) ? r->status : 0;
    if (field(r, "\r\nContent-Length")[0] == '\0') {
        while (more(c) > 0)
            ;
        n = c->n;
    } else {
        n = strtoul(field(r, "\r\nContent-Length"), NULL, 10);
    }
    while (c->n < n)
        if (more(c) <= 0)
            return 0;
    r->body = copy(c->p, n);
    r->n_body = n;
    if (n > 0)
        use(c, n);
    return r->status;
}

static int get(client *c, reply *r)
{
    return get_for(c, r, false);
}

/* Sends, and expects this status and body (NULL: any). */
static void ask(client *c, const char *request, int status, const char *body)
{
    reply r;

    assert_true(put_str(c, request));
    assert_int_equal(get(c, &r), status);
    if (body != NULL)
        assert_string_equal(r.body, body);
    reply_free(&r);
}

static bool at_end(client *c)
{
    return c->n == 0 && more(c) == 0;
}

static bool wait_for(const _Atomic int64_t *v, int64_t ms)
{
    for (int64_t i = 0; i < ms * 4 && atomic_load(v) == 0; i++)
        nap(250);
    return atomic_load(v) != 0;
}

/* ---- reading requests --------------------------------------------------- */

static const char post[] = "POST /a%20b/?q=1 HTTP/1.1\r\nHost: x\r\nX-Probe: \t v w \r\n"
                           "Transfer-Encoding: chunked\r\n\r\n"
                           "5;a=b\r\nhello\r\n00006\r\n world\r\n0\r\nTrailer: t\r\n\r\n";
static const char post_echo[] = "POST|/a b|q=1|v w|hello world";

static void test_split(void **state)
{
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    ask(&c, post, 200, post_echo);
    for (size_t i = 0; i + 1 < sizeof(post); i++) { /* one byte a packet */
        assert_true(put(&c, post + i, 1));
        nap(50);
    }
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, post_echo);
    reply_free(&r);
    for (size_t i = 1; i + 1 < sizeof(post); i++) { /* in two */
        assert_true(put(&c, post, i));
        nap(300);
        assert_true(put(&c, post + i, sizeof(post) - 1 - i));
        assert_int_equal(get(&c, &r), 200);
        assert_string_equal(r.body, post_echo);
        reply_free(&r);
    }
    hang_up(&c);
    stop(&s);
}

/* Every cut of a request in three parts, without sockets. */
static void test_reader_cuts(void **state)
{
    const size_t n = sizeof(post) - 1;
    const hx_http_opt opt = { .max_head_bytes = 1000, .max_body_bytes = 1000 };

    (void)state;
    for (size_t i = 0; i <= n; i++) {
        for (size_t j = i; j <= n; j++) {
            hx_http_reader *r = hx_http_read_open(&opt);
            size_t used = hx_http_read_feed(r, post, i);

            used += hx_http_read_feed(r, post + i, j - i);
            used += hx_http_read_feed(r, post + j, n - j);
            assert_int_equal(used, n);
            assert_int_equal(r->state, HX_READ_DONE);
            assert_true(hx_str_is((hx_str) { r->body.p, r->body.n }, "hello world"));
            assert_true(hx_str_is(r->path, "/a b") && hx_str_is(r->query, "q=1"));
            assert_int_equal(hx_http_read_feed(r, "GET", 3), 0);
            hx_http_read_close(r);
        }
    }
}

/* Shapes that proxies and servers have read differently, and other faults. 0: closed at
 * most. Each must be answered with this status and the connection be closed: what follows
 * is never taken for a request. */
static const struct {
    int status;
    const char *text;
} faults[] = {
#define H  "Host: x\r\n"
#define TE "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
    { 400, "GET / HTTP/1.1\r\nHost : x\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\nHo st: x\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A: b\r\n c\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A: b\r\n\tc\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n Host: x\r\n\r\n" },
    { 400, "GET / HTTP/1.1\nHost: x\n\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A: b\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A: b\rC: d\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A: b\r\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "\n" },
    { 400, "\nGET / HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H ": empty\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "no colon\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "nocolon\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A: \x01\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H "A\x80: b\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\n" H H "\r\n" },
    { 400, "GET / HTTP/1.1\r\nHost: a b\r\n\r\n" },
    { 400, "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n" },
    { 400, "GET  / HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /  HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /a b HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET / HTTP/1.1 \r\n" H "\r\n" },
    { 400, " GET / HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET\t/\tHTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /\xc3\xa9 HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /%4 HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /%zz HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /%00 HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /%ff HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /#f HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET a HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET * HTTP/1.1\r\n" H "\r\n" },
    { 400, "GET /\r\n\r\n" },
    { 400, "GET / http/1.1\r\n" H "\r\n" },
    { 400, "GET / RTSP/1.0\r\n" H "\r\n" },
    { 400, "\x16\x03\x01\x02" },
    { 505, "GET / HTTP/2.0\r\n" H "\r\n" },
    { 505, "GET / HTTP/1.2\r\n" H "\r\n" },
    { 505, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" },
    { 501, "FOO / HTTP/1.1\r\n" H "\r\n" },
    { 501, "get / HTTP/1.1\r\n" H "\r\n" },
    { 501, "TRACE / HTTP/1.1\r\n" H "\r\n" },
    { 501, "CONNECT a:1 HTTP/1.1\r\n" H "\r\n" },
    { 417, "POST / HTTP/1.1\r\n" H "Expect: tea\r\nContent-Length: 1\r\n\r\na" },
    /* lengths */
    { 400, "POST / HTTP/1.1\r\n" H
           "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" },
    { 400, "POST / HTTP/1.1\r\n" H
           "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: 3, 3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: +3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: -3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: 0x3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: 3 3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length:\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length: 99999999999999999999\r\n\r\nabc" },
    { 413, "POST / HTTP/1.1\r\n" H "Content-Length: 9999999999999999999\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Content-Length : 3\r\n\r\nabc" },
    { 400, "POST / HTTP/1.1\r\n" H "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" },
    { 400, "POST / HTTP/1.1\r\n" H "Transfer-Encoding:\r\n\r\n0\r\n\r\n" },
    { 400, "POST / HTTP/1.1\r\n" H
           "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" },
    { 501, "POST / HTTP/1.1\r\n" H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" },
    { 501,
      "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" },
    { 501, "POST / HTTP/1.1\r\n" H "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" },
    { 501, "POST / HTTP/1.1\r\n" H "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n" },
    { 400, "POST / HTTP/1.0\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" },
    /* chunks */
    { 400, TE "5\nhello\r\n0\r\n\r\n" },
    { 400, TE "5\r\nhello\n0\r\n\r\n" },
    { 400, TE "5\r\nhelloXX0\r\n\r\n" },
    { 400, TE "5\r\nhello0\r\n\r\n" },
    { 400, TE "5\r\nhello\r\n\r\n0\r\n\r\n" },
    { 400, TE "5\rZhello\r\n0\r\n\r\n" },
    { 400, TE "5\r\nhello\rX0\r\n\r\n" },
    { 400, TE "5 \r\nhello\r\n0\r\n\r\n" },
    { 400, TE " 5\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "0x5\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "+5\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "-1\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "5;a\nb\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "5;\nhello\r\n0\r\n\r\n" },
    { 400, TE "fffffffffffffffff\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "\r\nhello\r\n0\r\n\r\n" },
    { 400, TE "0\r\nA: b\r\n c\r\n\r\n" },
    { 400, TE "0\r\nA: b\n\r\n" },
    { 400, TE "0\n\r\n" },
    { 400, TE "0\r\n\n" },
};

static int status_of(const char *p, size_t n, size_t cut)
{
    const hx_http_opt opt = { .max_head_bytes = 32768, .max_body_bytes = 1 << 20 };
    hx_http_reader *r = hx_http_read_open(&opt);
    size_t i = 0;
    int status;

    while (i < n && r->state != HX_READ_DONE && r->state != HX_READ_BAD)
        i += hx_http_read_feed(r, p + i, HX_MIN(cut, n - i));
    status = r->state == HX_READ_DONE ? 200 : r->status;
    hx_http_read_close(r);
    return status;
}

static void test_faults(void **state)
{
    static const char next[] = "GET /next HTTP/1.1\r\nHost: x\r\n\r\n";
    const int64_t errors = hx_counted(HX_C_http_errors_total);
    server s;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    for (size_t i = 0; i < HX_LEN(faults); i++) {
        client c = dial(&s);
        hx_json *j = NULL;
        reply r;
        int got;

        put_str(&c, faults[i].text);
        put_str(&c, next);
        got = get(&c, &r);
        if (got != faults[i].status)
            fail_msg("case %zu: %d, expected %d: %s", i, got, faults[i].status,
                     faults[i].text);
        assert_string_equal(field(&r, "\r\nConnection"), "close");
        assert_string_equal(field(&r, "\r\nContent-Type"), "application/json");
        assert_int_equal(hx_json_parse(&j, (hx_str) { r.body, r.n_body }, 0, NULL), 0);
        assert_true(hx_json_str(hx_json_get(hx_json_get(j, "error"), "message")).n > 0);
        assert_true(hx_json_str(hx_json_get(hx_json_get(j, "error"), "code")).n > 0);
        assert_true(hx_json_has(hx_json_get(j, "error"), "param"));
        assert_true(hx_str_is(hx_json_str(hx_json_get(hx_json_get(j, "error"), "type")),
                              got < 500 ? "invalid_request_error" : "server_error"));
        hx_json_free(j);
        if (!at_end(&c))
            fail_msg("case %zu: not closed: %s", i, faults[i].text);
        reply_free(&r);
        hang_up(&c);
        /* However it is cut, the verdict is the same. */
        for (size_t cut = 1; cut < 40; cut++) {
            got = status_of(faults[i].text, strlen(faults[i].text), cut);
            if (got != faults[i].status && got != 0)
                fail_msg("case %zu cut at %zu: %d, expected %d", i, cut, got,
                         faults[i].status);
        }
    }
    assert_int_equal(hx_counted(HX_C_http_errors_total) - errors, HX_LEN(faults));
    stop(&s);
}

static const struct {
    const char *text, *echo;
} goods[] = {
    { "GET / HTTP/1.1\r\n" H "\r\n", "GET|/|||" },
    { "\r\n\r\nGET / HTTP/1.1\r\n" H "\r\n", "GET|/|||" },
    { "GET // HTTP/1.1\r\n" H "\r\n", "GET|/|||" },
    { "GET /?a=%20b&c HTTP/1.1\r\n" H "\r\n", "GET|/|a=%20b&c||" },
    { "GET /v1/models/ HTTP/1.1\r\n" H "\r\n", "GET|/v1/models|||" },
    { "GET /v1/models/org%2Fname%C3%A9 HTTP/1.1\r\n" H "\r\n",
      "GET|/v1/models/org/name\xc3\xa9|||" },
    { "GET http://h:80/p/?q HTTP/1.1\r\n" H "\r\n", "GET|/p|q||" },
    { "GET http://h HTTP/1.1\r\n" H "\r\n", "GET|/|||" },
    { "DELETE /p HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n", "DELETE|/p|||" },
    { "PUT /p HTTP/1.1\r\nhOsT:x\r\nCONTENT-length:2\r\n\r\nab", "PUT|/p|||ab" },
    { "PATCH /p HTTP/1.1\r\n" H "X-PROBE:  a \xc3\xa9 b\t\r\n\r\n",
      "PATCH|/p||a \xc3\xa9 b|" },
    { "GET / HTTP/1.1\r\n" H "X-Probe:\r\nX-Probe: second\r\n\r\n", "GET|/|||" },
    { "GET / HTTP/1.1\r\n" H "X-Prob: 1\r\nX-Probes: 2\r\n\r\n", "GET|/|||" },
    { "POST / HTTP/1.1\r\n" H "Content-Length: 0\r\n\r\n", "POST|/|||" },
    { "POST / HTTP/1.1\r\n" H "Content-Length: 3 \r\n\r\na\nb", "POST|/|||a\nb" },
    { TE "0\r\n\r\n", "POST|/|||" },
    { TE "A\r\n\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n", "POST|/|||\r\n\r\n\r\n\r\n\r\n" },
    { TE "1;x=y\r\n \r\n1\r\n\n\r\n0\r\nT: v\r\nContent-Type: x\r\n\r\n",
      "POST|/||| \n" },
    { TE "0\r\nContent-Length: 5\r\n\r\n", "POST|/|||" }, /* trailers frame nothing */
    /* An upgrade that we do not take is no upgrade (Java's client offers h2c always). */
    { "POST / HTTP/1.1\r\n" H "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
      "HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nContent-Length: 2\r\n\r\nab",
      "POST|/|||ab" },
    { "GET / HTTP/1.1\r\n" H "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
      "GET|/|||" },
};

static void test_goods(void **state)
{
    server s;
    client c;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    for (size_t i = 0; i < HX_LEN(goods); i++) {
        reply r;

        put_str(&c, goods[i].text); /* one connection for all: framing must hold */
        if (get(&c, &r) != 200 || strcmp(r.body, goods[i].echo) != 0)
            fail_msg("case %zu: %d %s", i, r.status, r.body != NULL ? r.body : "");
        reply_free(&r);
        for (size_t cut = 1; cut < 60; cut++)
            assert_int_equal(status_of(goods[i].text, strlen(goods[i].text), cut), 200);
    }
    hang_up(&c);
    stop(&s);
}

static void test_pipeline(void **state)
{
    char text[8192] = "", want[64];
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    /* The first is slow, the others are answered at once; order stays. */
    ask(&c,
        "GET /slow HTTP/1.1\r\n" H "\r\nGET /1 HTTP/1.1\r\n" H "\r\n"
        "POST /worker HTTP/1.1\r\n" H "Content-Length: 3\r\n\r\nabc"
        "HEAD /2 HTTP/1.1\r\n" H "\r\nGET /3 HTTP/1.1\r\n" H "\r\n",
        200, "GET|/slow|||");
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, "GET|/1|||");
    reply_free(&r);
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, "POST|/worker|||abc");
    reply_free(&r);
    assert_int_equal(get_for(&c, &r, true), 200);
    reply_free(&r);
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, "GET|/3|||");
    reply_free(&r);
    /* Two hundred in one packet, half of them through a worker. */
    for (int i = 0; i < 200; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text),
                 "GET %s?%d HTTP/1.1\r\n%s\r\n", i % 2 ? "/worker" : "/", i, H);
    assert_true(put_str(&c, text));
    for (int i = 0; i < 200; i++) {
        assert_int_equal(get(&c, &r), 200);
        snprintf(want, sizeof(want), "GET|%s|%d||", i % 2 ? "/worker" : "/", i);
        assert_string_equal(r.body, want);
        reply_free(&r);
    }
    /* Then the client shuts its side: what was asked before is still answered. */
    ask(&c, "GET /a HTTP/1.1\r\n" H "\r\n", 200, NULL);
    put_str(&c, "GET /slow HTTP/1.1\r\n" H "\r\nGET /b HTTP/1.1\r\n" H "\r\n");
    shutdown(c.fd, SHUT_WR);
    assert_int_equal(get(&c, &r), 200);
    reply_free(&r);
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, "GET|/b|||");
    reply_free(&r);
    assert_true(at_end(&c));
    hang_up(&c);
    stop(&s);
}

/* A second request larger than what is read ahead waits in the socket. */
static void test_ahead(void **state)
{
    const size_t n = 600000;
    char *text = malloc(n + 200);
    server s;
    client c;
    reply r;
    int k;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    k = snprintf(
        text, 200,
        "GET /hold HTTP/1.1\r\n%s\r\nPOST /x HTTP/1.1\r\n%sContent-Length: %zu\r\n\r\n",
        H, H, n);
    memset(text + k, 'z', n);
    assert_true(put(&c, text, (size_t)k + n));
    nap(50000);
    atomic_store(&s.open, true);
    assert_int_equal(get(&c, &r), 200);
    reply_free(&r);
    assert_int_equal(get(&c, &r), 200);
    assert_int_equal(r.n_body, n + strlen("POST|/x|||"));
    reply_free(&r);
    hang_up(&c);
    free(text);
    stop(&s);
}

static void test_keep_alive(void **state)
{
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    put_str(&c, "GET / HTTP/1.1\r\n" H "Connection: close\r\n\r\n");
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(field(&r, "\r\nConnection"), "close");
    assert_true(at_end(&c));
    reply_free(&r);
    hang_up(&c);
    c = dial(&s);
    put_str(&c, "GET / HTTP/1.0\r\n\r\n");
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(field(&r, "\r\nConnection"), "close");
    assert_true(at_end(&c));
    reply_free(&r);
    hang_up(&c);
    c = dial(&s);
    for (int i = 0; i < 2; i++) {
        put_str(&c, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        assert_int_equal(get(&c, &r), 200);
        assert_string_equal(field(&r, "\r\nConnection"), "keep-alive");
        reply_free(&r);
    }
    /* An event stream on HTTP/1.0 ends with the connection. */
    put_str(&c, "GET /events?2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(field(&r, "\r\nConnection"), "close");
    assert_string_equal(field(&r, "\r\nTransfer-Encoding"), "");
    assert_int_equal(r.n_body, 200);
    reply_free(&r);
    hang_up(&c);
    /* A handler that says nothing does not leave the client waiting. */
    c = dial(&s);
    put_str(&c, "GET /mute HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(get(&c, &r), 0);
    hang_up(&c);
    stop(&s);
}

/* ---- limits ------------------------------------------------------------- */

static void expect_refusal(server *s, const char *text, int status)
{
    client c = dial(s);
    reply r;

    put_str(&c, text);
    assert_int_equal(get(&c, &r), status);
    assert_true(at_end(&c));
    reply_free(&r);
    hang_up(&c);
}

static void test_limits(void **state)
{
    static char text[70000];
    server s;
    client c;
    reply r;
    size_t n;

    (void)state;
    start(&s, (hx_http_opt) { .max_body_bytes = 1000, .max_head_bytes = 20000 });
    /* 413 comes before any of the body, also to who waits for "100 Continue". */
    expect_refusal(&s, "POST / HTTP/1.1\r\n" H "Content-Length: 1001\r\n\r\n", 413);
    expect_refusal(&s,
                   "POST / HTTP/1.1\r\n" H
                   "Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n",
                   413);
    c = dial(&s);
    n = (size_t)snprintf(text, sizeof(text),
                         "POST / HTTP/1.1\r\n%sContent-Length: 1000\r\n\r\n", H);
    memset(text + n, 'b', 1000);
    text[n + 1000] = '\0';
    ask(&c, text, 200, NULL);
    /* Chunked: as soon as the sum is too large. */
    assert_true(put_str(&c, TE));
    for (int i = 0; i < 10; i++)
        assert_true(
            put_str(&c, "64\r\n"
                        "0123456789012345678901234567890123456789012345678901234567890123"
                        "456789012345678901234567890123456789\r\n"));
    assert_true(put_str(&c, "1\r\nx"));
    assert_int_equal(get(&c, &r), 413);
    assert_true(at_end(&c));
    reply_free(&r);
    hang_up(&c);
    /* A body that is on its way does not make the answer get lost. */
    c = dial(&s);
    put_str(&c, "POST / HTTP/1.1\r\n" H "Content-Length: 8000000\r\n\r\n");
    memset(text, 'b', sizeof(text));
    for (int i = 0; i < 100; i++)
        if (!put(&c, text, sizeof(text)))
            break;
    assert_int_equal(get(&c, &r), 413);
    reply_free(&r);
    hang_up(&c);
    /* Request line, head, number of headers, chunk extensions. */
    n = (size_t)snprintf(text, sizeof(text), "GET /");
    memset(text + n, 'a', 8200);
    text[n + 8200] = '\0';
    expect_refusal(&s, text, 414);
    memset(text + n, 'a', 8000);
    snprintf(text + n + 8000, 100, " HTTP/1.1\r\n%s\r\n", H);
    c = dial(&s);
    ask(&c, text, 200, NULL);
    hang_up(&c);
    n = (size_t)snprintf(text, sizeof(text), "GET / HTTP/1.1\r\n%sA: ", H);
    memset(text + n, 'a', 20000);
    text[n + 20000] = '\0';
    expect_refusal(&s, text, 431);
    for (int count = 99; count <= 100; count++) {
        n = (size_t)snprintf(text, sizeof(text), "GET / HTTP/1.1\r\n%s", H);
        for (int i = 0; i < count; i++)
            n += (size_t)snprintf(text + n, sizeof(text) - n, "A%d: b\r\n", i);
        snprintf(text + n, sizeof(text) - n, "\r\n");
        c = dial(&s);
        ask(&c, text, count == 99 ? 200 : 431, NULL);
        hang_up(&c);
    }
    n = (size_t)snprintf(text, sizeof(text), "%s1;", TE);
    memset(text + n, 'e', 2000);
    text[n + 2000] = '\0';
    expect_refusal(&s, text, 400);
    n = (size_t)snprintf(text, sizeof(text), "%s0\r\nT: ", TE);
    memset(text + n, 'e', 2000);
    text[n + 2000] = '\0';
    expect_refusal(&s, text, 400);
    stop(&s);
}

static void test_expect(void **state)
{
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    put_str(&c,
            "POST / HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    assert_int_equal(get(&c, &r), 100);
    assert_string_equal(r.head, "HTTP/1.1 100 Continue\r\n\r\n");
    reply_free(&r);
    ask(&c, "ab", 200, "POST|/|||ab");
    /* Not when the body came along, not on HTTP/1.0. */
    ask(&c, "POST / HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\nab",
        200, "POST|/|||ab");
    put_str(&c,
            "POST / HTTP/1.0\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    nap(20000);
    ask(&c, "ab", 200, "POST|/|||ab");
    hang_up(&c);
    stop(&s);
}

static void test_slow_requests(void **state)
{
    static const char slow_head[] =
        "GET / HTTP/1.1\r\nHost: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";
    int64_t t0, took;
    server s;
    client c, head, body;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { .head_ms = 150, .body_ms = 250, .idle_ms = 400 });
    c = dial(&s);
    head = dial(&s);
    body = dial(&s);
    t0 = hx_now_us();
    put_str(&body, "POST / HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nab");
    for (size_t i = 0; i + 1 < sizeof(slow_head);
         i++) { /* a byte now and then is no excuse */
        if (!put(&head, slow_head + i, 1) ||
            recv(head.fd, &r, 1, MSG_PEEK | MSG_DONTWAIT) == 1)
            break;
        nap(5000);
    }
    assert_int_equal(get(&head, &r), 408);
    took = hx_now_us() - t0;
    assert_in_range(took, 140000, 300000 * SLOW);
    assert_true(at_end(&head));
    reply_free(&r);
    assert_int_equal(get(&body, &r), 408);
    took = hx_now_us() - t0;
    assert_in_range(took, 240000, 500000 * SLOW);
    reply_free(&r);
    /* An idle connection is closed without a word. */
    assert_true(at_end(&c));
    took = hx_now_us() - t0;
    assert_in_range(took, 390000, 700000 * SLOW);
    hang_up(&c);
    hang_up(&head);
    hang_up(&body);
    stop(&s);
}

static void test_too_many(void **state)
{
    client held[4], extra[200];
    server s;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { .max_connections = 4 });
    for (int i = 0; i < 4; i++) {
        held[i] = dial(&s);
        ask(&held[i], "GET / HTTP/1.1\r\n" H "\r\n", 200, NULL);
    }
    for (size_t i = 0; i < HX_LEN(extra); i++)
        extra[i] = dial(&s);
    /* Some hear why, all are closed, nobody waits. */
    for (size_t i = 0; i < HX_LEN(extra); i++) {
        const int status = get(&extra[i], &r);

        assert_true(status == 503 || (status == 0 && i >= 64));
        reply_free(&r);
        hang_up(&extra[i]);
    }
    ask(&held[2], "GET /x HTTP/1.1\r\n" H "\r\n", 200, "GET|/x|||");
    hang_up(&held[0]);
    for (int i = 0; i < 200; i++) { /* a place is free as soon as its client has gone */
        client c = dial(&s);
        int status;

        put_str(&c, "GET / HTTP/1.1\r\n" H "\r\n");
        status = get(&c, &r);
        reply_free(&r);
        hang_up(&c);
        if (status == 200)
            break;
        assert_true(i < 199);
        nap(5000);
    }
    for (int i = 1; i < 4; i++)
        hang_up(&held[i]);
    stop(&s);
}

/* All bodies together have a limit too: sixteen times that of one. */
static void test_all_bodies(void **state)
{
    client c[40];
    char *text = malloc(90000);
    int refused = 0;
    server s;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { .max_body_bytes = 100000 });
    memset(text, 'x', 90000);
    for (size_t i = 0; i < HX_LEN(c); i++) {
        c[i] = dial(&s);
        put_str(&c[i], "POST /hold HTTP/1.1\r\n" H "Content-Length: 90000\r\n\r\n");
        put(&c[i], text, 90000);
    }
    nap(50000 * SLOW);
    atomic_store(&s.open, true);
    for (size_t i = 0; i < HX_LEN(c); i++) {
        const int status = get(&c[i], &r);

        assert_true(status == 200 || status == 503);
        refused += status == 503;
        reply_free(&r);
        hang_up(&c[i]);
    }
    assert_in_range(refused, 20,
                    30); /* 16 fit, or as many more as end before the others come */
    free(text);
    stop(&s);
}

/* ---- answers ------------------------------------------------------------ */

static void test_head_and_cors(void **state)
{
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    put_str(&c, "HEAD /p HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(get_for(&c, &r, true), 200);
    assert_string_equal(field(&r, "\r\nContent-Length"), "9");
    assert_string_equal(field(&r, "\r\nAccess-Control-Allow-Origin"), "*");
    assert_int_equal(strlen(field(&r, "\r\nDate")),
                     strlen("Sun, 06 Nov 1994 08:49:37 GMT"));
    reply_free(&r);
    put_str(&c, "HEAD /events HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(get_for(&c, &r, true), 200);
    reply_free(&r);
    put_str(&c, "OPTIONS /v1/chat/completions HTTP/1.1\r\n" H "Origin: http://a\r\n"
                "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: "
                "anthropic-version,x-stainless-os,authorization\r\n\r\n");
    assert_int_equal(get(&c, &r), 204);
    assert_string_equal(field(&r, "\r\nAccess-Control-Allow-Origin"), "*");
    assert_string_equal(field(&r, "\r\nAccess-Control-Allow-Headers"),
                        "anthropic-version,x-stainless-os,authorization");
    assert_non_null(strstr(field(&r, "\r\nAccess-Control-Allow-Methods"), "POST"));
    assert_null(strcasestr(r.head, "Content-Length"));
    reply_free(&r);
    put_str(&c, "OPTIONS * HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(get(&c, &r), 204);
    assert_non_null(strstr(field(&r, "\r\nAccess-Control-Allow-Headers"), "x-api-key"));
    reply_free(&r);
    ask(&c, "GET /end HTTP/1.1\r\n" H "\r\n", 200, "GET|/end|||");
    hang_up(&c);
    stop(&s);

    start(&s, (hx_http_opt) { .cors = "https://chat.example" });
    c = dial(&s);
    put_str(&c, "GET / HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(field(&r, "\r\nAccess-Control-Allow-Origin"),
                        "https://chat.example");
    assert_string_equal(field(&r, "\r\nVary"), "Origin");
    reply_free(&r);
    hang_up(&c);
    stop(&s);

    start(&s, (hx_http_opt) { .cors = "off" });
    c = dial(&s);
    put_str(&c, "OPTIONS / HTTP/1.1\r\n" H "Access-Control-Request-Headers: a\r\n\r\n");
    assert_int_equal(get(&c, &r), 204);
    assert_null(strcasestr(r.head, "Access-Control"));
    assert_non_null(strcasestr(r.head, "\r\nAllow: "));
    reply_free(&r);
    put_str(&c, "GET /events HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(get(&c, &r), 200);
    assert_null(strcasestr(r.head, "Access-Control"));
    reply_free(&r);
    hang_up(&c);
    stop(&s);
}

static void test_events(void **state)
{
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    for (int round = 0; round < 3; round++) {
        put_str(&c, "POST /events?1000 HTTP/1.1\r\n" H "Content-Length: 0\r\n\r\n");
        assert_int_equal(get(&c, &r), 200);
        assert_string_equal(field(&r, "\r\nContent-Type"),
                            "text/event-stream; charset=utf-8");
        assert_string_equal(field(&r, "\r\nCache-Control"), "no-cache");
        assert_string_equal(field(&r, "\r\nX-Accel-Buffering"), "no");
        assert_string_equal(field(&r, "\r\nAccess-Control-Allow-Origin"), "*");
        assert_int_equal(r.n_body, 100000);
        for (int i = 0; i < 1000; i++)
            assert_int_equal(strtol(r.body + 100 * i + 6, NULL, 10), i);
        reply_free(&r);
    }
    hang_up(&c);
    stop(&s);
}

static void test_keepalive_comment(void **state)
{
    server s;
    client c;
    int n = 0;

    (void)state;
    start(&s, (hx_http_opt) { .keepalive_ms = 50 });
    c = dial(&s);
    put_str(&c, "GET /silent HTTP/1.1\r\n" H "\r\n");
    while (n < 4 && more(&c) > 0) {
        n = 0;
        for (const char *p = c.p;
             (p = strstr(p, "\r\n\r\nd\r\n: keepalive\n\n\r\n")) != NULL; p++)
            n++;
        for (const char *p = c.p; (p = strstr(p, "\r\nd\r\n: keepalive\n\n\r\n")) != NULL;
             p++)
            n++;
    }
    assert_in_range(n, 4, 20);
    hang_up(&c);
    stop(&s);
}

static void test_keepalive_line(void **state)
{
    server s;
    client c;
    const char *p;
    int n = 0;

    (void)state;
    start(&s, (hx_http_opt) { .keepalive_ms = 50 });
    c = dial(&s);
    put_str(&c, "GET /lines HTTP/1.1\r\n" H "\r\n");
    while (n < 3 && more(&c) > 0)
        for (n = 0, p = c.p; (p = strstr(p, "\r\nb\r\n{\"idle\":1}\n\r\n")) != NULL; p++)
            n++;
    assert_non_null(strstr(c.p, "Content-Type: application/x-ndjson\r\n"));
    assert_null(strstr(c.p, "keepalive\n"));
    assert_in_range(n, 3, 20);
    hang_up(&c);
    stop(&s);
}

/* Who is not admitted is answered before his body has come; others are not asked again. */
static bool admit_some(void *ud, const hx_exchange *x)
{
    (void)ud;
    return hx_http_header(x, "x-probe").n > 0;
}

static void test_admit(void **state)
{
    server s;
    client c;
    reply r;

    (void)state;
    start(&s, (hx_http_opt) { .admit = admit_some });
    c = dial(&s);
    put_str(&c, "POST / HTTP/1.1\r\n" H "Content-Length: 1000000\r\n\r\n");
    assert_int_equal(get(&c, &r), 401);
    assert_string_equal(field(&r, "\r\nConnection"), "close");
    assert_non_null(strstr(r.body, "authentication_error"));
    reply_free(&r);
    assert_true(at_end(&c));
    hang_up(&c);
    c = dial(&s);
    put_str(&c, "POST / HTTP/1.1\r\n" H "X-Probe: 1\r\nContent-Length: 3\r\n\r\na");
    nap(20000);
    put_str(&c, "bc");
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, "POST|/||1|abc");
    reply_free(&r);
    put_str(&c, "OPTIONS / HTTP/1.1\r\n" H "Content-Length: 3\r\n\r\na");
    nap(20000);
    put_str(&c, "bc");
    assert_int_equal(get(&c, &r), 204);
    reply_free(&r);
    hang_up(&c);
    stop(&s);
}

static void test_slow_reader(void **state)
{
    const int32_t stall_ms = SLOW > 1 ? 2000 : 500;
    server s;
    client c;
    reply r;
    char few[1000];
    int64_t t0;

    (void)state;
    start(&s, (hx_http_opt) { .stall_ms = stall_ms, .max_queue_bytes = 100000 });
    /* Slow is not stuck: a few bytes now and then, far fewer than the socket's queue
     * holds. */
    c = dial_at(s.port, 4096);
    put_str(&c, "GET /big HTTP/1.1\r\n" H "\r\nGET /after HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(more(&c), 1);
    t0 = hx_now_us();
    while (hx_now_us() - t0 < stall_ms * 2000ll) {
        const ssize_t n = recv(c.fd, few, sizeof(few), 0);

        assert_true(n > 0);
        memcpy(c.p + c.n, few, (size_t)n);
        c.n += (size_t)n;
        c.p = realloc(c.p, c.cap += (size_t)n);
        nap(10000);
    }
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(field(&r, "\r\nX-Extra"), "yes");
    assert_int_equal(r.n_body, sizeof(ten_mb));
    assert_true(memcmp(r.body, ten_mb, sizeof(ten_mb)) == 0);
    reply_free(&r);
    assert_int_equal(get(&c, &r), 200);
    assert_string_equal(r.body, "GET|/after|||");
    reply_free(&r);
    hang_up(&c);
    /* A client that takes nothing: the queue stays small, the worker gets false in time.
     */
    c = dial_at(s.port, 4096);
    put_str(&c, "GET /flood HTTP/1.1\r\n" H "\r\n");
    for (int i = 0; i < 10 * stall_ms && atomic_load(&s.stalled) == 0; i++)
        nap(1000);
    assert_int_equal(atomic_load(&s.stalled), 1);
    assert_in_range(atomic_load(&s.flooded), 90000,
                    12 << 20); /* the rest is the kernel's */
    hang_up(&c);
    c = dial_at(s.port, 4096); /* the same for a plain answer */
    put_str(&c, "GET /big HTTP/1.1\r\n" H "\r\n");
    nap(stall_ms * 2000);
    while (more(&c) > 0)
        ;
    assert_true(c.n < sizeof(ten_mb));
    hang_up(&c);
    stop(&s);
}

/* Sending never waits: it says FULL once too much waits, and news comes when that is
 * over, after all that was sent. What nobody flushes does not go out. */
static void test_full(void **state)
{
    enum { PIECE = 10000, LIMIT = 200000 };
    static char text[PIECE];
    hx_http_state was = HX_HTTP_OPEN;
    sem_t news;
    server s;
    client c;
    reply r;
    int n = 0;

    (void)state;
    memset(text, 'f', sizeof(text));
    start(&s, (hx_http_opt) { .max_queue_bytes = LIMIT });
    c = dial_at(s.port, 4096);
    put_str(&c, "GET /gather HTTP/1.1\r\n" H "\r\n");
    while (atomic_load(&s.n_gathered) == 0)
        nap(1000);
    begin(s.gathered[0], &news);
    assert_int_equal(hx_http_send(s.gathered[0], HX_STR("held")), HX_HTTP_OPEN);
    assert_int_equal(poll(&(struct pollfd) { .fd = c.fd, .events = POLLIN }, 1, 50), 0);
    for (; was == HX_HTTP_OPEN; n++) {
        was = hx_http_send(s.gathered[0], (hx_str) { text, PIECE });
        hx_http_flush(s.h);
        assert_true(n < 10000);
    }
    assert_int_equal(was, HX_HTTP_FULL);
    assert_true(n >= LIMIT / PIECE);
    for (int still = 0; still < 5; nap(20000)) { /* the socket may take some more */
        if (hx_http_send(s.gathered[0], HX_STR("")) == HX_HTTP_FULL) {
            still++;
            continue;
        }
        hx_http_send(s.gathered[0], (hx_str) { text, PIECE });
        hx_http_flush(s.h);
        still = 0;
        n++;
    }
    while (sem_trywait(&news) == 0)
        ;
    nap(20000);
    assert_int_equal(sem_trywait(&news), -1); /* nobody reads */
    while (sem_trywait(&news) != 0)
        assert_int_equal(more(&c), 1);
    assert_int_equal(hx_http_send(s.gathered[0], HX_STR("")), HX_HTTP_OPEN);
    end(s.gathered[0], &news);
    assert_int_equal(get(&c, &r), 200);
    assert_int_equal(r.n_body, 4 + n * PIECE);
    reply_free(&r);
    hang_up(&c);
    stop(&s);
}

/* ---- clients that vanish ------------------------------------------------ */

static void check_gone(const char *request, void (*leave)(client *c), const char *how)
{
    server s;
    client c;
    int64_t t0;

    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    put_str(&c, request);
    nap(30000);
    assert_int_equal(atomic_load(&s.gone_us), 0);
    t0 = hx_now_us();
    leave(&c);
    assert_true(wait_for(&s.gone_us, 5000));
    printf("# gone, %s: %lld us\n", how, (long long)(atomic_load(&s.gone_us) - t0));
    assert_true(atomic_load(&s.gone_us) - t0 < 100000 * SLOW);
    if (c.fd >= 0)
        hang_up(&c);
    stop(&s);
}

static void half_close(client *c)
{
    shutdown(c->fd, SHUT_WR);
}

static void test_gone(void **state)
{
    static const char silent_get[] = "GET /silent HTTP/1.1\r\n" H "\r\n";
    static const char think_post[] =
        "POST /think HTTP/1.1\r\n" H "Content-Length: 2\r\n\r\nab";
    static const char ahead[] =
        "GET /think HTTP/1.1\r\n" H "\r\nGET /x HTTP/1.1\r\n" H "\r\nGET ";

    (void)state;
    check_gone(silent_get, hang_up, "stream closed");
    check_gone(silent_get, half_close, "stream half closed");
    check_gone(silent_get, slam, "stream reset");
    check_gone(think_post, hang_up, "prefill closed");
    check_gone(think_post, half_close, "prefill half closed");
    check_gone(think_post, slam, "prefill reset");
    check_gone(ahead, hang_up, "pipelined closed");
}

/* Streams, answers and uploads whose clients leave at any moment. */
static void *vanish(void *ud)
{
    static const char *const requests[] = {
        "GET /events?5000 HTTP/1.1\r\n" H "\r\n",
        "GET /worker HTTP/1.1\r\n" H "\r\nGET /events?50 HTTP/1.1\r\n" H
        "\r\nGET /slow HTTP/1.1\r\n" H "\r\n",
        "GET /big HTTP/1.1\r\n" H "\r\n",
        "GET /flood HTTP/1.1\r\n" H "\r\n",
        "GET /silent HTTP/1.1\r\n" H "\r\n",
        "POST /worker HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        "HEAD /events?5000 HTTP/1.1\r\n" H "\r\n",
        "GET /think HTTP/1.1\r\n" H "\r\n",
    };
    const server *s = ud;
    const uint64_t seed = (uint64_t)hx_now_us();

    for (uint64_t i = 0; i < 120 / (SLOW > 1 ? 3 : 1); i++) {
        const uint64_t dice = hx_rng_at(seed, i);
        client c = dial(s);

        put_str(&c, requests[dice % HX_LEN(requests)]);
        if (dice & 256)
            nap((int64_t)(dice >> 16) % 3000);
        if (dice & 512 &&
            poll(&(struct pollfd) { .fd = c.fd, .events = POLLIN }, 1, 3) == 1)
            more(&c);
        if (dice & 1024)
            slam(&c);
        else
            hang_up(&c);
    }
    return NULL;
}

static void test_vanish(void **state)
{
    const int64_t live = hx_test_live_allocs();
    pthread_t t[6];
    server s;
    client c;

    (void)state;
    start(&s, (hx_http_opt) { .keepalive_ms = 2, .max_queue_bytes = 20000 });
    for (size_t i = 0; i < HX_LEN(t); i++)
        pthread_create(&t[i], NULL, vanish, &s);
    for (size_t i = 0; i < HX_LEN(t); i++)
        pthread_join(t[i], NULL);
    await_idle(&s);
    c = dial(&s);
    ask(&c, "GET / HTTP/1.1\r\n" H "\r\n", 200, "GET|/|||");
    hang_up(&c);
    stop(&s);
    assert_int_equal(hx_test_live_allocs(), live);
    assert_int_equal(hx_counted(HX_C_http_connections), 0);
}

static void test_idle_crowd(void **state)
{
    enum { N = 1000 };
    static client c[N];
    struct rlimit files;
    uint64_t before, after;
    int64_t live;
    server s;

    (void)state;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = HX_MIN(files.rlim_max, 8192u);
    setrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_cur < 2 * N + 100) {
        printf("SKIP idle_crowd: only %lu open files allowed\n",
               (unsigned long)files.rlim_cur);
        skip();
    }
    start(&s, (hx_http_opt) { 0 });
    c[0] = dial(&s);
    ask(&c[0], "GET / HTTP/1.1\r\n" H "\r\n", 200, NULL);
    nap(50000);
    live = hx_test_live_allocs();
    before = hx_sys_rss_bytes();
    for (int i = 1; i < N; i++)
        c[i] = dial(&s);
    for (int i = 0; i < N; i++) /* each has been served once: that must leave nothing */
        put_str(&c[i], "GET / HTTP/1.1\r\n" H "\r\n");
    for (int i = 0; i < N; i++) {
        char buf[1024];

        assert_true(recv(c[i].fd, buf, sizeof(buf), 0) > 0);
    }
    for (int i = 0; i < 5000 && hx_test_live_allocs() - live != N - 1; i++)
        nap(1000);
    after = hx_sys_rss_bytes();
    printf("# an idle connection: %.1f KiB\n",
           (double)((int64_t)after - (int64_t)before) / 1024 / (N - 1));
    assert_int_equal(hx_test_live_allocs() - live, N - 1);
    if (SLOW == 1)
        assert_true(after < before + (N - 1) * 4096ull);
    ask(&c[N / 2], "GET /x HTTP/1.1\r\n" H "\r\n", 200, "GET|/x|||");
    for (int i = 0; i < N; i++)
        hang_up(&c[i]);
    stop(&s);
}

/* ---- stopping ----------------------------------------------------------- */

static void test_drain(void **state)
{
    client idle, part, held, late;
    server s;
    reply r;
    int64_t t0;
    int fd;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    idle = dial(&s);
    part = dial(&s);
    held = dial(&s);
    ask(&idle, "GET / HTTP/1.1\r\n" H "\r\n", 200, NULL);
    put_str(&part, "GET / HTTP/1.1\r\n");
    put_str(&held, "GET /hold HTTP/1.1\r\n" H "\r\nGET /second HTTP/1.1\r\n" H "\r\n");
    nap(30000);
    hx_http_stop(s.h, 10000);
    assert_true(at_end(&idle));
    assert_int_equal(get(&part, &r), 503);
    reply_free(&r);
    late = (client) { .fd = fd = socket(AF_INET, SOCK_STREAM, 0) };
    assert_int_equal(connect(late.fd,
                             (struct sockaddr *)&(struct sockaddr_in) {
                                 .sin_family = AF_INET,
                                 .sin_port = htons((uint16_t)s.port),
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK) },
                             sizeof(struct sockaddr_in)),
                     -1);
    close(fd);
    /* What is in progress gets its answer; what waits behind it does not. */
    atomic_store(&s.open, true);
    assert_int_equal(get(&held, &r), 200);
    assert_string_equal(field(&r, "\r\nConnection"), "close");
    reply_free(&r);
    assert_int_equal(get(&held, &r), 0);
    hang_up(&idle);
    hang_up(&part);
    hang_up(&held);
    finish_up(&s);

    /* What takes longer than the time it was given has a second more to say so; then it is
     * closed, and its worker hears of it. */
    start(&s, (hx_http_opt) { 0 });
    held = dial(&s);
    put_str(&held, "GET /silent HTTP/1.1\r\n" H "\r\n");
    nap(30000);
    t0 = hx_now_us();
    hx_http_stop(s.h, 100);
    assert_int_equal(get(&held, &r), 0);
    reply_free(&r);
    finish_up(&s);
    assert_in_range(hx_now_us() - t0, 1090000, 1400000 * SLOW);
    assert_true(atomic_load(&s.gone_us) != 0);
    hang_up(&held);

    /* A second, impatient stop shortens the first; a stop before the loop runs is not
     * lost. */
    start(&s, (hx_http_opt) { 0 });
    held = dial(&s);
    put_str(&held, "GET /silent HTTP/1.1\r\n" H "\r\n");
    nap(30000);
    hx_http_stop(s.h, 60000);
    nap(20000);
    hx_http_stop(s.h, 0);
    finish_up(&s);
    hang_up(&held);
    s = (server) { 0 };
    assert_int_equal(hx_http_open(&s.h, &(hx_http_opt) { 0 }, handle, &s, NULL), 0);
    hx_http_stop(s.h, 5000);
    assert_int_equal(hx_http_run(s.h, NULL), 0);
    hx_http_close(s.h);
}

/* ---- opening ------------------------------------------------------------ */

static void test_addresses(void **state)
{
    static const struct {
        const char *host;
        int32_t port;
        const char *cors;
        int rc;
    } cases[] = {
        { NULL, 0, NULL, 0 },
        { "127.0.0.1", 0, NULL, 0 },
        { "localhost", 0, "https://a.example", 0 },
        { "0.0.0.0", 0, "off", 0 },
        { "example.org", 0, NULL, HX_EARG },
        { "", 0, NULL, HX_EARG },
        { "127.0.0.256", 0, NULL, HX_EARG },
        { "[127.0.0.1]", 0, NULL, HX_EARG },
        { "127.0.0.1", 65536, NULL, HX_EARG },
        { "127.0.0.1", -1, NULL, HX_EARG },
        { "127.0.0.1", 0, "a\r\nb", HX_EARG },
        { "127.0.0.1", 0, "https://a, https://b", HX_EARG },
        { "203.0.113.7", 0, NULL, HX_EIO }, /* documentation range: not ours */
    };
    hx_http *h, *second;
    hx_http_opt opt;
    hx_err err;

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        opt = (hx_http_opt) { .host = cases[i].host,
                              .port = cases[i].port,
                              .cors = cases[i].cors };
        err = (hx_err) { 0 };
        assert_int_equal(hx_http_open(&h, &opt, handle, NULL, &err), cases[i].rc);
        assert_int_equal(h == NULL, cases[i].rc != 0);
        assert_int_equal(err.msg[0] == '\0', cases[i].rc == 0);
        hx_http_close(h);
    }
    for (int i = 0; i < 2; i++) {
        opt = (hx_http_opt) { .host = i == 0 ? "::1" : "[::1]" };
        if (hx_http_open(&h, &opt, handle, NULL, &err) != 0)
            assert_int_equal(err.code, HX_EIO); /* a machine without IPv6 */
        else
            assert_true(hx_http_port(h) > 0);
        hx_http_close(h);
    }
    /* In use: the sentence names host and port. */
    assert_int_equal(hx_http_open(&h, &(hx_http_opt) { 0 }, handle, NULL, NULL), 0);
    opt = (hx_http_opt) { .port = hx_http_port(h) };
    assert_int_equal(hx_http_open(&second, &opt, handle, NULL, &err), HX_EIO);
    assert_non_null(strstr(err.msg, "127.0.0.1"));
    assert_non_null(strstr(err.msg, "in use"));
    assert_int_equal(strtol(strstr(err.msg, "port ") + 5, NULL, 10), opt.port);
    assert_null(second);
    hx_http_close(h);
    hx_http_close(NULL);
}

/* ---- memory that is not there ------------------------------------------- */

static const char *const failing[] = {
    "POST /worker HTTP/1.1\r\n" H "Content-Length: 5000\r\n\r\n",
    "GET /events?3 HTTP/1.1\r\n" H "\r\n",
    "GET / HTTP/1.1\r\n" H "\r\nGET /slow HTTP/1.1\r\n" H "\r\nGET / HTTP/1.1\r\n" H
    "\r\n",
    "POST / HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    "OPTIONS / HTTP/1.1\r\n" H "\r\n",
    "GET / HTTP/9\r\n\r\n",
};

static void test_no_memory(void **state)
{
    static char text[5000];
    const int64_t live = hx_test_live_allocs();
    server s;
    hx_http *h;
    int rc = -1;

    (void)state;
    memset(text, 'b', sizeof(text));
    for (int64_t k = 1; rc != 0; k++) {
        hx_err err = { 0 };

        hx_test_fail_at(k);
        rc = hx_http_open(&h, &(hx_http_opt) { 0 }, handle, NULL, &err);
        assert_true(rc == 0 || (rc == HX_ENOMEM && err.msg[0] != '\0' && h == NULL));
        assert_true(k < 10);
        hx_test_fail_at(0);
        hx_http_close(h);
    }
    start(&s, (hx_http_opt) { 0 });
    for (size_t i = 0; i < HX_LEN(failing); i++) {
        int64_t k = 0, seen;

        do {
            client c;
            reply r;
            int status;

            hx_test_fail_at(++k);
            c = dial(&s);
            put_str(&c, failing[i]);
            if (i == 0)
                put(&c, text, sizeof(text));
            if (i == 3) {
                status = get(&c, &r);
                reply_free(&r);
                put_str(&c, "123456789");
            }
            shutdown(c.fd, SHUT_WR);
            while ((status = get(&c, &r)) != 0) {
                assert_true(status == 200 || status == 503 || status == 204 ||
                            status == 505);
                reply_free(&r);
            }
            reply_free(&r);
            hang_up(&c);
            seen = hx_test_fail_at(0);
            c = dial(&s); /* the next one is served as ever */
            ask(&c, "GET /worker HTTP/1.1\r\n" H "\r\n", 200, "GET|/worker|||");
            hang_up(&c);
            assert_true(k < 100);
        } while (seen >= k);
        assert_true(k > 3);
    }
    stop(&s);
    assert_int_equal(hx_test_live_allocs(), live);
    assert_int_equal(hx_counted(HX_C_http_connections), 0);
}

/* ---- what it costs ------------------------------------------------------ */

static void test_cost_request(void **state)
{
    static const char *const paths[] = { "/", "/worker" };
    static const char *const names[] = { "answered on the loop", "by a new thread" };
    server s;
    client c;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    c = dial(&s);
    for (size_t p = 0; p < HX_LEN(paths); p++) {
        const int n = 1000 / SLOW;
        int64_t best = INT64_MAX;
        char text[200];

        snprintf(text, sizeof(text),
                 "POST %s HTTP/1.1\r\n%sContent-Length: 5\r\n\r\nhello", paths[p], H);
        for (int round = 0; round < 5; round++) {
            const int64_t t0 = hx_now_us();

            for (int i = 0; i < n; i++)
                ask(&c, text, 200, NULL);
            best = HX_MIN(best, hx_now_us() - t0);
        }
        printf("# one small request, %s: %.1f us, %.0f a second\n", names[p],
               (double)best / n, n * 1e6 / (double)best);
        assert_true((double)best / n < 1000 * SLOW);
    }
    hang_up(&c);
    stop(&s);
}

static void *drink(void *ud)
{
    client c = dial(ud);
    char text[100];
    reply r;

    snprintf(text, sizeof(text), "GET /events?%d HTTP/1.1\r\n%s\r\n", 2000 / SLOW, H);
    put_str(&c, text);
    r.status = get(&c, &r);
    assert_int_equal(r.n_body, 200000 / SLOW);
    reply_free(&r);
    hang_up(&c);
    return NULL;
}

/* 32 streams as fast as they go, where events share writes. */
static void test_cost_burst(void **state)
{
    pthread_t t[32];
    int64_t best = INT64_MAX;
    server s;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    for (int round = 0; round < 3; round++) {
        const int64_t t0 = hx_now_us();

        for (size_t i = 0; i < HX_LEN(t); i++)
            pthread_create(&t[i], NULL, drink, &s);
        for (size_t i = 0; i < HX_LEN(t); i++)
            pthread_join(t[i], NULL);
        best = HX_MIN(best, hx_now_us() - t0);
    }
    printf("# one 100-byte event, 32 streams at full speed: %.2f us\n",
           (double)best / (32 * 2000 / SLOW));
    assert_true((double)best / (32 * 2000 / SLOW) < 20 * SLOW);
    stop(&s);
}

static int64_t cpu_us(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* 32 streams that get an event each per step, as decoding does it: every event is a write
 * of its own. Time is that of the processor: the sending calls and the loop thread. */
static void test_cost_step(void **state)
{
    enum { N = 32, STEPS = 300 / SLOW };
    const hx_str event = {
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}],"
        "\"object\":\"chat.completion.chunk\"}      \n\n",
        100
    };
    int64_t sending = 0, looping;
    client c[N];
    clockid_t loop_clock;
    server s;

    (void)state;
    start(&s, (hx_http_opt) { 0 });
    assert_int_equal(pthread_getcpuclockid(s.thread, &loop_clock), 0);
    for (int i = 0; i < N; i++) {
        c[i] = dial(&s);
        put_str(&c[i], "GET /gather HTTP/1.1\r\n" H "\r\n");
    }
    while (atomic_load(&s.n_gathered) < N)
        nap(1000);
    for (int i = 0; i < N; i++)
        begin_events(s.gathered[i]);
    looping = cpu_us(loop_clock);
    for (int step = 0; step < STEPS; step++) {
        const int64_t t0 = cpu_us(CLOCK_THREAD_CPUTIME_ID);

        for (int i = 0; i < N; i++)
            assert_int_equal(hx_http_send(s.gathered[i], event), HX_HTTP_OPEN);
        hx_http_flush(s.h);
        sending += cpu_us(CLOCK_THREAD_CPUTIME_ID) - t0;
        nap(300);
    }
    looping = cpu_us(loop_clock) - looping;
    for (int i = 0; i < N; i++) {
        reply r;

        hx_http_end(s.gathered[i]);
        assert_int_equal(get(&c[i], &r), 200);
        assert_int_equal(r.n_body, 100 * STEPS);
        reply_free(&r);
        hang_up(&c[i]);
    }
    printf("# one 100-byte event, 32 streams in step: %.2f us sending, %.2f us on the "
           "loop\n",
           (double)sending / (N * STEPS), (double)looping / (N * STEPS));
    assert_true((double)(sending + looping) / (N * STEPS) < 20 * SLOW);
    stop(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* First, while the heap has no free memory that would hide what connections take.
         */
        cmocka_unit_test(test_idle_crowd),     cmocka_unit_test(test_reader_cuts),
        cmocka_unit_test(test_split),          cmocka_unit_test(test_faults),
        cmocka_unit_test(test_goods),          cmocka_unit_test(test_pipeline),
        cmocka_unit_test(test_ahead),          cmocka_unit_test(test_keep_alive),
        cmocka_unit_test(test_limits),         cmocka_unit_test(test_expect),
        cmocka_unit_test(test_slow_requests),  cmocka_unit_test(test_too_many),
        cmocka_unit_test(test_all_bodies),     cmocka_unit_test(test_head_and_cors),
        cmocka_unit_test(test_events),         cmocka_unit_test(test_keepalive_comment),
        cmocka_unit_test(test_keepalive_line), cmocka_unit_test(test_admit),
        cmocka_unit_test(test_slow_reader),    cmocka_unit_test(test_full),
        cmocka_unit_test(test_gone),           cmocka_unit_test(test_vanish),
        cmocka_unit_test(test_drain),          cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_no_memory),      cmocka_unit_test(test_cost_request),
        cmocka_unit_test(test_cost_burst),     cmocka_unit_test(test_cost_step),
    };

    for (size_t i = 0; i < sizeof(ten_mb); i++)
        ten_mb[i] = (char)('a' + i % 23);
    return cmocka_run_group_tests_name("http", tests, NULL, NULL);
}
