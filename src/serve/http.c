/* http.c - owns the listening socket, the connections, their timers and their queues:
 * requests come in through http_read.c and go to the handler, what the handler says goes
 * out.
 *
 * One loop thread (whoever runs hx_http_run()) owns all but the fields that a comment
 * says hx_http.lock guards. Handlers reach it through those: they append to a
 * connection's out-queue, link the connection in the ready list and wake the loop; nobody
 * waits for a client. A connection is freed by the loop only, once its handles are
 * closed, its exchange has ended and it is in no list; so a client may vanish at any
 * moment.
 *
 * Reading never stops while an answer is made, for that is how a closed client is seen:
 * bytes of the next request wait in ahead. Never blocks the loop, never parses a body. */
#include "serve/http.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <uv.h>

#define LINGER_MS     2000  /* after our end: how long a client may be silent */
#define FAREWELL_MS   1000  /* for the ends of answers that the stop cuts off */
#define LINGER_ALL_MS 30000 /* and how long it may go on sending */
#define READ_BYTES    65536
#define WRITE_BYTES   1048576 /* of one write */
#define SLICE_BYTES   65536   /* of one that waits for the client */
#define AHEAD_BYTES   65536   /* read past a request in work; then reading does stop */
#define SPARE_PLACES                                                                     \
    64                /* above the limit, to hear a 503; others, and those who
                               * would have to shake hands first, are closed */
#define BODIES     16 /* times max_body_bytes: memory of all bodies together */
#define FILES_KEPT 64 /* for the rest of the program: models, kept states, logs */

typedef enum {
    IDLE,    /* between requests: no reader, no buffers */
    READING, /* a request comes in */
    BUSY,    /* answered by the handler or by us, till all is out */
    LINGER   /* our side is shut down; waits for the client's end */
} conn_state;

typedef union {
    uv_handle_t handle;
    uv_stream_t stream;
    uv_tcp_t tcp;
    uv_pipe_t pipe; /* a unix socket */
} sock;

typedef struct conn {
    sock sock;
    uv_timer_t timer;
    uv_write_t write;
    uv_shutdown_t shutdown;
    hx_http *h;
    struct conn *prev, *next; /* all that are not freed */
    conn_state state;
    int n_handle;       /* of sock and timer: not yet closed */
    bool closed;        /* handles are closing or closed */
    bool eof;           /* nothing more will be read */
    bool in_body;       /* the timer is the body's */
    bool paused;        /* ahead is full */
    bool writing;       /* c->write is under way */
    bool streams;       /* begun, as the loop last saw it */
    hx_tls_conn *tls;   /* NULL: none */
    hx_http_reader *in; /* the request; NULL when IDLE */
    size_t body_bytes;  /* counted in h->body_bytes */
    hx_sb ahead;        /* bytes after the request, from n_ahead on */
    size_t n_ahead;
    hx_sb wire; /* being written, from n_sent on */
    size_t n_sent;
    int n_queued;      /* in the socket, when watch() last looked */
    uint64_t moved_ms; /* when the client last took something or we had more */

    /* Set before the handler gets the exchange or by it; the loop reads after its end. */
    hx_exchange x;
    bool keep, head_only;
    int minor;
    _Atomic bool gone;

    /* h->lock guards the rest. */
    hx_sb out;        /* said, not yet in wire */
    size_t behind;    /* bytes said and not yet taken by the client */
    bool begun;       /* an event stream */
    hx_str keepalive; /* borrowed until the end of the exchange */
    bool ended;       /* the exchange is ours again */
    bool broken;      /* no memory for out */
    bool full;        /* hx_http_send() said so: news when it is over */
    bool ready;       /* in h->ready */
    struct conn *next_ready;
    void (*news_fn)(void *ud);
    void *news_ud;
} conn;

struct hx_http {
    hx_http_opt opt;
    char *cors; /* NULL: off */
    hx_http_fn *fn;
    void *ud;
    int port;
    uv_loop_t loop;
    uv_async_t wake;
    uv_timer_t drain;
    sock listener, spare;
    bool local;      /* they are unix sockets */
    hx_tls *tls;     /* NULL: plain */
    hx_sb plain;     /* what TLS has read */
    bool spare_busy; /* spare is closing */
    bool waiting;    /* a client waits for spare */
    conn *conns;
    int32_t n_open;              /* of conns: with open handles */
    size_t body_bytes;           /* held by readers */
    _Atomic bool stopping, over; /* over: what still runs says goodbye */
    _Atomic int64_t stop_ms;     /* a new hx_http_stop(), or -1 */
    uv_mutex_t lock;             /* guards ready and the conn fields named above */
    conn *ready;                 /* connections with news for the loop */
    char buf[READ_BYTES];
};

static void on_timer(uv_timer_t *t);
static void on_written(uv_write_t *w, int status);

/* ---- ends of a connection --------------------------------------------- */

static void release_request(conn *c)
{
    hx_http_read_close(c->in);
    c->in = NULL;
    c->h->body_bytes -= c->body_bytes;
    c->body_bytes = 0;
}

static void conn_free(conn *c)
{
    release_request(c);
    hx_tls_free(c->tls);
    if (c->prev != NULL)
        c->prev->next = c->next;
    else
        c->h->conns = c->next;
    if (c->next != NULL)
        c->next->prev = c->prev;
    hx_sb_free(&c->ahead);
    hx_sb_free(&c->wire);
    hx_sb_free(&c->out);
    hx_free(c);
}

/* Frees what nobody can reach any more; true if it did. */
static bool conn_reap(conn *c)
{
    hx_http *h = c->h;
    bool ready;

    if (c->n_handle > 0 || c->state == BUSY)
        return false;
    uv_mutex_lock(&h->lock);
    ready = c->ready;
    uv_mutex_unlock(&h->lock);
    if (!ready)
        conn_free(c);
    return !ready;
}

static void on_closed(uv_handle_t *handle)
{
    conn *c = handle->data;
    hx_http *h = c->h;

    if (--c->n_handle > 0)
        return;
    hx_count(HX_C_http_connections, -1);
    h->n_open--;
    conn_reap(c);
    if (h->n_open == 0 && atomic_load(&h->stopping))
        uv_stop(&h->loop);
}

/* Whoever makes the answer hears of it. Caller holds the lock, so that after
 * hx_http_on_news(x, NULL) the function does not run. */
static void tell(const conn *c)
{
    if (c->news_fn != NULL)
        c->news_fn(c->news_ud);
}

/* Nobody will read the answer. */
static void conn_lose(conn *c)
{
    uv_mutex_lock(&c->h->lock);
    if (!atomic_exchange(&c->gone, true))
        tell(c);
    uv_mutex_unlock(&c->h->lock);
}

/* Closes at once. */
static void conn_drop(conn *c)
{
    if (c->closed)
        return;
    c->closed = true;
    if (c->state == BUSY)
        conn_lose(c);
    uv_close(&c->sock.handle, on_closed);
    uv_close((uv_handle_t *)&c->timer, on_closed);
}

static void arm(conn *c, int64_t ms)
{
    uv_timer_start(&c->timer, on_timer, (uint64_t)HX_MAX(ms, 1), 0);
}

static void on_shutdown(uv_shutdown_t *s, int status)
{
    conn *c = s->data;

    if (status != 0)
        conn_drop(c);
}

/* Sends what TLS still has to say, if the socket takes it at once. */
static void say_goodbye(conn *c)
{
    hx_sb b = { 0 };

    hx_tls_take(c->tls, &b);
    if (b.n > 0) {
        const uv_buf_t buf = uv_buf_init(b.p, (unsigned)b.n);

        uv_try_write(&c->sock.stream, &buf, 1);
    }
    hx_sb_free(&b);
}

/* Closes gently: a close() with unread bytes in the socket would be a reset, and the
 * client might never see our answer. */
static void conn_linger(conn *c)
{
    c->state = LINGER;
    c->shutdown.data = c;
    if (c->tls != NULL) {
        hx_tls_end(c->tls);
        say_goodbye(c);
    }
    if (c->eof || uv_shutdown(&c->shutdown, &c->sock.stream, on_shutdown) != 0)
        conn_drop(c);
    else
        arm(c, LINGER_MS);
}

/* ---- writing ---------------------------------------------------------- */

/* What the loop looks at once it is woken. Caller holds the lock, so that the loop cannot
 * free c first. */
static void link_ready(conn *c)
{
    if (c->ready)
        return;
    c->ready = true;
    c->next_ready = c->h->ready;
    c->h->ready = c;
}

/* Appends to the out-queue. Caller holds the lock. */
static void queue(conn *c, hx_str bytes)
{
    const size_t n = c->out.n;

    hx_sb_add(&c->out, bytes.p, bytes.n);
    c->behind += c->out.n - n;
    c->broken |= c->out.bad;
}

/* One piece of an event stream. Caller holds the lock. */
static void queue_piece(conn *c, hx_str bytes)
{
    char size[24];
    const int n = snprintf(size, sizeof(size), "%zx\r\n", bytes.n);

    if (c->minor > 0)
        queue(c, (hx_str) { size, (size_t)n });
    queue(c, bytes);
    if (c->minor > 0)
        queue(c, HX_STR("\r\n"));
}

/* Queues a whole answer and gives the exchange back to the loop: c may be gone
 * afterwards. A long one is handed over without a second copy. */
static void answer(conn *c, hx_http_head *head, hx_str body)
{
    hx_http *h = c->h;
    hx_sb b = { 0 };

    if (head->status >= 400)
        hx_count(HX_C_http_errors_total, 1);
    head->cors = h->cors;
    head->minor = c->minor;
    head->keep_alive = c->keep && !atomic_load(&h->stopping);
    head->n_body = body.n;
    hx_http_write_head(&b, head);
    if (!c->head_only && hx_http_has_body(head->status))
        hx_sb_add(&b, body.p, body.n);
    uv_mutex_lock(&h->lock);
    if (c->out.n == 0) {
        const hx_sb empty = c->out;

        c->out = b;
        c->behind += b.n;
        c->broken |= b.bad;
        b = empty;
    } else {
        queue(c, (hx_str) { b.p, b.n });
        c->broken |= b.bad;
    }
    c->ended = true;
    link_ready(c);
    uv_async_send(&h->wake);
    uv_mutex_unlock(&h->lock);
    hx_sb_free(&b);
}

/* All is written and the exchange is over: the connection waits for the next one. */
static void finish(conn *c)
{
    hx_http *h = c->h;

    release_request(c);
    hx_sb_free(&c->wire);
    c->n_sent = 0;
    uv_mutex_lock(&h->lock);
    hx_sb_free(&c->out);
    c->behind = 0;
    c->begun = c->ended = c->broken = c->full = false;
    c->news_fn = NULL;
    uv_mutex_unlock(&h->lock);
    c->state = IDLE;
    c->streams = false;
    if (c->closed)
        return;
    if (c->keep && !atomic_load(&h->stopping))
        arm(c, h->opt.idle_ms);
    else
        conn_linger(c);
}

static void count_sent(conn *c, size_t n)
{
    c->n_sent += n;
    c->moved_ms = uv_now(&c->h->loop);
    uv_mutex_lock(&c->h->lock);
    c->behind -= n;
    if (c->full && c->behind <= c->h->opt.max_queue_bytes) {
        c->full = false;
        tell(c);
    }
    uv_mutex_unlock(&c->h->lock);
}

/* Puts wire's bytes as TLS in their place, with what the handshake has to say. */
static bool encrypt(conn *c)
{
    hx_sb plain = c->wire, coded = { 0 };
    const bool ok = hx_tls_write(c->tls, (hx_str) { plain.p, plain.n }) == 0;

    hx_tls_take(c->tls, &coded);
    c->wire = coded;
    uv_mutex_lock(&c->h->lock);
    c->behind += coded.n - plain.n;
    uv_mutex_unlock(&c->h->lock);
    hx_sb_free(&plain);
    return ok && !coded.bad;
}

/* Moves out to wire, when that is empty. Returns whether there is something to write;
 * *over: nothing more will come. The two buffers change roles, so neither is allocated
 * anew. */
static bool refill(conn *c, bool *over)
{
    const hx_sb written = c->wire;
    bool broken;

    uv_mutex_lock(&c->h->lock);
    c->wire = c->out;
    c->out = written;
    c->out.n = 0;
    broken = c->broken;
    c->streams = c->begun;
    *over = c->ended;
    uv_mutex_unlock(&c->h->lock);
    c->n_sent = 0;
    if (c->tls != NULL && !encrypt(c))
        broken = true;
    if (c->wire.n > 0)
        c->moved_ms = uv_now(&c->h->loop);
    if (broken)
        conn_drop(c);
    return c->wire.n > 0;
}

/* Writes what there is, as far as the socket takes it; the rest when it takes more. */
static void write_out(conn *c)
{
    bool over = false;

    while (!c->writing && (c->n_sent < c->wire.n || refill(c, &over))) {
        const size_t left = c->wire.n - c->n_sent;
        uv_buf_t buf = uv_buf_init(c->wire.p + c->n_sent,
                                   (unsigned)HX_MIN(left, (size_t)WRITE_BYTES));
        int n;

        if (c->closed) {
            c->n_sent = c->wire.n;
            continue;
        }
        n = uv_try_write(&c->sock.stream, &buf, 1);
        if (n > 0) {
            count_sent(c, (size_t)n);
            continue;
        }
        buf.len = HX_MIN(buf.len, SLICE_BYTES);
        c->write.data = c;
        if ((n < 0 && n != UV_EAGAIN) ||
            uv_write(&c->write, &c->sock.stream, &buf, 1, on_written) != 0)
            conn_drop(c);
        else
            c->writing = true;
    }
    if (c->state == BUSY && over && !c->writing)
        finish(c);
    else if (c->state == BUSY && !c->closed && (c->writing || c->streams) &&
             !uv_is_active((uv_handle_t *)&c->timer))
        arm(c, HX_MIN(c->h->opt.keepalive_ms, c->h->opt.stall_ms / 4));
}

/* ---- reading ---------------------------------------------------------- */

static void set_exchange(conn *c)
{
    const hx_http_reader *in = c->in;

    c->x = (hx_exchange) { .method = in->method,
                           .path = in->path,
                           .query = in->query,
                           .body = { in->body.p, in->body.n },
                           .conn = c };
}

/* The loop's own answer, after which the connection is closed. */
static void respond(conn *c, int status, const char *why)
{
    hx_http_head head = { .status = status, .type = "application/json" };
    const hx_http_opt *opt = &c->h->opt;
    hx_sb body = { 0 };

    c->state = BUSY;
    c->keep = false;
    if (opt->refuse != NULL && c->in != NULL && c->in->path.n > 0) {
        set_exchange(c);
        opt->refuse(c->h->ud, &c->x, status, hx_http_code(status), why);
    } else {
        hx_http_write_error(&body, status, why);
        answer(c, &head, (hx_str) { body.p, body.n });
    }
    hx_sb_free(&body);
    write_out(c);
}

static void preflight(conn *c)
{
    const hx_str wanted = hx_http_read_header(c->in, "access-control-request-headers");
    hx_sb headers = { 0 };

    hx_http_write_preflight(&headers, c->h->cors != NULL, wanted);
    answer(c, &(hx_http_head) { .status = 204, .headers = headers.p }, HX_STR(""));
    hx_sb_free(&headers);
}

/* A whole request is there. Its answer may be complete when the handler returns. */
static void dispatch(conn *c)
{
    const hx_http_reader *in = c->in;

    hx_count(HX_C_http_requests_total, 1);
    uv_timer_stop(&c->timer);
    c->state = BUSY;
    c->minor = in->minor;
    c->head_only = in->head_only;
    c->keep = in->keep_alive;
    atomic_store(&c->gone, c->eof);
    set_exchange(c);
    if (hx_str_is(in->method, "OPTIONS"))
        preflight(c);
    else
        c->h->fn(c->h->ud, &c->x);
    write_out(c);
}

/* Whether the body of the request, whose head is there, shall be read. */
static bool is_admitted(conn *c)
{
    const hx_http *h = c->h;

    set_exchange(c);
    return h->opt.admit == NULL || hx_str_is(c->x.method, "OPTIONS") ||
           h->opt.admit(h->ud, &c->x);
}

/* Acts on what the reader has found. */
static void examine(conn *c)
{
    hx_http *h = c->h;

    h->body_bytes += c->in->body.cap - c->body_bytes;
    c->body_bytes = c->in->body.cap;
    if (c->in->state == HX_READ_BAD) {
        respond(c, c->in->status, c->in->why);
    } else if (h->body_bytes / BODIES > h->opt.max_body_bytes) {
        respond(c, 503, "too many request bodies at once; try again later");
    } else if (c->in->state == HX_READ_DONE) {
        dispatch(c);
    } else if (c->in->state == HX_READ_BODY && !c->in_body) {
        c->in_body = true;
        if (!is_admitted(c)) {
            respond(c, 401, "API key: missing or wrong; send Authorization: Bearer KEY");
            return;
        }
        arm(c, h->opt.body_ms);
        if (c->in->expect) {
            uv_mutex_lock(&h->lock);
            queue(c, HX_STR("HTTP/1.1 100 Continue\r\n\r\n"));
            uv_mutex_unlock(&h->lock);
            write_out(c);
        }
    }
}

/* Reads requests from p until one is in work; returns how many bytes it took. */
static size_t take(conn *c, const char *p, size_t n)
{
    size_t i = 0;

    while (i < n && !c->closed && (c->state == IDLE || c->state == READING)) {
        if (c->state == IDLE) {
            c->state = READING;
            c->in_body = false;
            c->minor = 1;
            c->head_only = false;
            arm(c, c->h->opt.head_ms);
            c->in = hx_http_read_open(&c->h->opt);
        }
        if (c->in == NULL) {
            respond(c, 503, "no memory for the request");
        } else {
            i += hx_http_read_feed(c->in, p + i, n - i);
            examine(c);
        }
    }
    return i;
}

static void on_alloc(uv_handle_t *handle, size_t wish, uv_buf_t *buf)
{
    const conn *c = handle->data;

    (void)wish;
    *buf = uv_buf_init(c->h->buf, sizeof(c->h->buf));
}

/* Plain bytes from the client. */
static void receive(conn *c, const char *p, size_t n)
{
    size_t taken = 0;

    if (c->ahead.n == 0)
        taken = take(c, p, n);
    if (c->state != BUSY || c->closed)
        return;
    hx_sb_add(&c->ahead, p + taken, n - taken);
    if (c->ahead.bad)
        conn_drop(c);
    c->paused = !c->closed && c->ahead.n - c->n_ahead > AHEAD_BYTES;
    if (c->paused)
        uv_read_stop(&c->sock.stream);
}

/* From the handshake on a client has the time of a request's head; then it may idle. */
static void receive_tls(conn *c, const char *p, size_t n)
{
    hx_http *h = c->h;
    const bool was_ready = hx_tls_ready(c->tls);
    int rc;

    h->plain.n = 0;
    rc = hx_tls_read(c->tls, (hx_str) { p, n }, &h->plain);
    if (rc == HX_EFORMAT) {
        hx_tls_free(c->tls);
        c->tls = NULL;
        respond(c, 400, "this port speaks TLS; ask with https://");
        return;
    }
    if (rc != 0) {
        say_goodbye(c);
        conn_drop(c);
        return;
    }
    if (!was_ready && hx_tls_ready(c->tls) && c->state == IDLE)
        arm(c, h->opt.idle_ms);
    if (h->plain.n > 0)
        receive(c, h->plain.p, h->plain.n);
    if (!c->closed)
        write_out(c);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    conn *c = stream->data;

    if (n == UV_EOF && c->state == BUSY) {
        c->eof = true; /* maybe half closed: the answer still goes out */
        conn_lose(c);
    } else if (n < 0) {
        conn_drop(c);
    }
    if (n > 0 && c->state == LINGER && uv_now(&c->h->loop) - c->moved_ms < LINGER_ALL_MS)
        arm(c, LINGER_MS);
    if (n <= 0 || c->state == LINGER)
        return;
    if (c->tls != NULL)
        receive_tls(c, buf->base, (size_t)n);
    else
        receive(c, buf->base, (size_t)n);
}

/* Goes on with what was read ahead. */
static void resume(conn *c)
{
    if (c->n_ahead < c->ahead.n)
        c->n_ahead += take(c, c->ahead.p + c->n_ahead, c->ahead.n - c->n_ahead);
    if (c->n_ahead == c->ahead.n || c->state == LINGER) {
        hx_sb_free(&c->ahead);
        c->n_ahead = 0;
    }
    if (c->eof && (c->state == IDLE || c->state == READING))
        conn_drop(c);
    if (c->paused && !c->closed && c->ahead.n - c->n_ahead <= AHEAD_BYTES) {
        c->paused = false;
        uv_read_start(&c->sock.stream, on_alloc, on_read);
    }
}

/* After news from a worker or from the socket. */
static void service(conn *c)
{
    write_out(c);
    if (!conn_reap(c))
        resume(c);
}

static void on_written(uv_write_t *w, int status)
{
    conn *c = w->data;

    c->writing = false;
    if (status < 0)
        conn_drop(c);
    else
        count_sent(c, HX_MIN(c->wire.n - c->n_sent, SLICE_BYTES));
    service(c);
}

/* ---- timers ----------------------------------------------------------- */

/* Whether the client has taken something since the last call. The socket's queue shows
 * that long before the socket takes more from us: it may hold megabytes. */
static bool takes(conn *c)
{
    const int before = c->n_queued;
    int fd;

    return uv_fileno(&c->sock.handle, &fd) == 0 &&
           ioctl(fd, SIOCOUTQ, &c->n_queued) == 0 && c->n_queued != before;
}

/* During an answer: looks for a client that takes nothing, and for a silent stream. */
static void watch(conn *c)
{
    const bool stuck = c->n_sent < c->wire.n;
    const int64_t limit = stuck ? c->h->opt.stall_ms : c->h->opt.keepalive_ms;
    const uint64_t now = uv_now(&c->h->loop);
    int64_t waited;

    if (!stuck && !c->streams)
        return;
    if (stuck && takes(c))
        c->moved_ms = now;
    waited = (int64_t)(now - c->moved_ms);
    if (waited >= limit && stuck) {
        conn_drop(c);
        return;
    }
    if (waited >= limit) {
        uv_mutex_lock(&c->h->lock);
        if (!c->ended)
            queue_piece(c, c->keepalive);
        uv_mutex_unlock(&c->h->lock);
        waited = 0;
    }
    arm(c, HX_MIN(limit - waited, c->h->opt.stall_ms / 4));
    write_out(c);
}

static void on_timer(uv_timer_t *t)
{
    conn *c = t->data;

    switch (c->state) {
    case IDLE:
    case LINGER:
        conn_drop(c);
        break;
    case READING:
        respond(c, 408, "the request did not arrive in time");
        break;
    case BUSY:
        watch(c);
    }
}

/* ---- connections come, the server stops ------------------------------- */

static void sock_init(hx_http *h, sock *s)
{
    if (h->local)
        uv_pipe_init(&h->loop, &s->pipe, 0);
    else
        uv_tcp_init(&h->loop, &s->tcp); /* cannot fail: makes no socket yet */
}

static conn *conn_open(hx_http *h)
{
    conn *c = hx_new(conn, 1);

    if (c == NULL)
        return NULL;
    c->h = h;
    c->minor = 1;
    if (h->tls != NULL && (c->tls = hx_tls_accept(h->tls)) == NULL) {
        hx_free(c);
        return NULL;
    }
    sock_init(h, &c->sock);
    uv_timer_init(&h->loop, &c->timer);
    c->sock.handle.data = c->timer.data = c;
    c->n_handle = 2;
    c->next = h->conns;
    if (c->next != NULL)
        c->next->prev = c;
    h->conns = c;
    h->n_open++;
    hx_count(HX_C_http_connections, 1);
    return c;
}

static void on_connect(uv_stream_t *listener, int status);

static void on_spare_closed(uv_handle_t *handle)
{
    hx_http *h = handle->data;

    h->spare_busy = false;
    if (h->waiting)
        on_connect(&h->listener.stream, 0);
}

/* Takes a client and closes it at once. While spare is closing, libuv keeps the next
 * client and takes no more. */
static void refuse(hx_http *h)
{
    h->waiting = h->spare_busy;
    if (h->spare_busy)
        return;
    h->spare_busy = true;
    sock_init(h, &h->spare);
    h->spare.handle.data = h;
    uv_accept(&h->listener.stream, &h->spare.stream);
    uv_close(&h->spare.handle, on_spare_closed);
}

static void on_connect(uv_stream_t *listener, int status)
{
    hx_http *h = listener->data;
    conn *c = NULL;

    if (status != 0 || uv_is_closing((uv_handle_t *)listener))
        return;
    if (h->n_open < h->opt.max_connections + (h->tls != NULL ? 0 : SPARE_PLACES))
        c = conn_open(h);
    if (c == NULL) {
        refuse(h);
        return;
    }
    h->waiting = false;
    if (uv_accept(listener, &c->sock.stream) != 0 ||
        uv_read_start(&c->sock.stream, on_alloc, on_read) != 0) {
        conn_drop(c);
        return;
    }
    if (!h->local) {
        uv_tcp_nodelay(&c->sock.tcp, 1);
        uv_tcp_keepalive(&c->sock.tcp, 1, 60);
    }
    if (h->n_open > h->opt.max_connections)
        respond(c, 503, "too many connections; try again later");
    else
        arm(c, c->tls != NULL ? h->opt.head_ms : h->opt.idle_ms);
}

static void drop_all(hx_http *h)
{
    for (conn *c = h->conns; c != NULL; c = c->next)
        conn_drop(c);
}

/* At first answers that still run are told, so that their ends reach the clients. */
static void on_drained(uv_timer_t *t)
{
    hx_http *h = t->data;

    if (atomic_exchange(&h->over, true)) {
        drop_all(h);
        return;
    }
    uv_mutex_lock(&h->lock);
    for (conn *c = h->conns; c != NULL; c = c->next)
        tell(c);
    uv_mutex_unlock(&h->lock);
    uv_timer_start(t, on_drained, FAREWELL_MS, 0);
}

static void begin_drain(hx_http *h, int64_t ms)
{
    if (!uv_is_closing(&h->listener.handle))
        uv_close(&h->listener.handle, NULL);
    for (conn *c = h->conns; c != NULL; c = c->next) {
        if (c->state == IDLE)
            conn_drop(c);
        else if (c->state == READING && !c->closed)
            respond(c, 503, "the server is stopping");
    }
    uv_timer_start(&h->drain, on_drained, (uint64_t)ms, 0);
    if (h->n_open == 0)
        uv_stop(&h->loop);
}

/* Takes the whole list at once, so that busy workers cannot keep the loop here. */
static void on_wake(uv_async_t *async)
{
    hx_http *h = async->data;
    const int64_t stop_ms = atomic_exchange(&h->stop_ms, -1);
    conn *c, *next;

    if (stop_ms >= 0) {
        begin_drain(h, stop_ms);
        if (h->opt.on_stop != NULL)
            h->opt.on_stop(h->ud);
    }
    uv_mutex_lock(&h->lock);
    c = h->ready;
    h->ready = NULL;
    uv_mutex_unlock(&h->lock);
    for (; c != NULL; c = next) {
        uv_mutex_lock(&h->lock);
        next = c->next_ready;
        c->ready = false;
        uv_mutex_unlock(&h->lock);
        service(c);
    }
}

/* ---- for handlers, one thread at a time ------------------------------- */

hx_str hx_http_header(const hx_exchange *x, const char *name)
{
    const conn *c = x->conn;

    return hx_http_read_header(c->in, name);
}

bool hx_http_gone(const hx_exchange *x)
{
    conn *c = x->conn;

    return atomic_load(&c->gone);
}

bool hx_http_over(const hx_exchange *x)
{
    const conn *c = x->conn;

    return atomic_load(&c->h->over);
}

void hx_http_on_news(hx_exchange *x, void (*fn)(void *ud), void *ud)
{
    conn *c = x->conn;

    uv_mutex_lock(&c->h->lock);
    c->news_fn = fn;
    c->news_ud = ud;
    if (atomic_load(&c->gone))
        tell(c);
    uv_mutex_unlock(&c->h->lock);
}

void hx_http_reply(hx_exchange *x, int status, const char *type, const char *headers,
                   hx_str body)
{
    hx_http_head head = {
        .status = status, .type = type, .headers = headers, .id = x->request_id
    };

    answer(x->conn, &head, body);
}

void hx_http_begin_stream(hx_exchange *x, const char *type, hx_str keepalive)
{
    conn *c = x->conn;
    hx_http_head head = {
        .status = 200,
        .type = type,
        .headers = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n",
        .cors = c->h->cors,
        .id = x->request_id,
        .minor = c->minor,
        .stream = true,
    };
    hx_sb b = { 0 };

    if (c->begun) {
        uv_mutex_lock(&c->h->lock);
        c->keepalive = keepalive;
        uv_mutex_unlock(&c->h->lock);
        return;
    }
    /* On HTTP/1.0 the end of the connection is the end of the stream. */
    c->keep = c->keep && c->minor > 0 && !atomic_load(&c->h->stopping);
    head.keep_alive = c->keep;
    hx_http_write_head(&b, &head);
    uv_mutex_lock(&c->h->lock);
    queue(c, (hx_str) { b.p, b.n });
    c->broken |= b.bad;
    c->begun = !c->head_only;
    c->keepalive = keepalive;
    link_ready(c);
    uv_mutex_unlock(&c->h->lock);
    hx_sb_free(&b);
}

hx_http_state hx_http_send(hx_exchange *x, hx_str bytes)
{
    conn *c = x->conn;
    hx_http *h = c->h;
    hx_http_state state = HX_HTTP_GONE;

    uv_mutex_lock(&h->lock);
    if (c->begun && !c->broken && !atomic_load(&c->gone)) {
        if (bytes.n > 0) {
            queue_piece(c, bytes);
            link_ready(c);
        }
        c->full = c->behind > h->opt.max_queue_bytes;
        state = c->broken ? HX_HTTP_GONE : c->full ? HX_HTTP_FULL : HX_HTTP_OPEN;
    }
    uv_mutex_unlock(&h->lock);
    return state;
}

void hx_http_flush(hx_http *h)
{
    bool due;

    uv_mutex_lock(&h->lock);
    due = h->ready != NULL;
    uv_mutex_unlock(&h->lock);
    if (due)
        uv_async_send(&h->wake);
}

void hx_http_end(hx_exchange *x)
{
    conn *c = x->conn;
    hx_http *h = c->h;

    uv_mutex_lock(&h->lock);
    if (c->begun && c->minor > 0)
        queue(c, HX_STR("0\r\n\r\n"));
    if (!c->begun && !c->head_only)
        c->broken = true; /* nothing was said: the client shall not wait */
    c->ended = true;
    link_ready(c);
    uv_async_send(&h->wake);
    uv_mutex_unlock(&h->lock);
}

/* ---- the server ------------------------------------------------------- */

static void set_defaults(hx_http_opt *o)
{
#define DEFAULT(field, value)                                                            \
    if (o->field <= 0)                                                                   \
    o->field = (value)
    o->host = o->host != NULL ? o->host : "127.0.0.1";
    DEFAULT(max_head_bytes, 32u << 10);
    DEFAULT(max_body_bytes, 32u << 20);
    DEFAULT(max_queue_bytes, 1u << 20);
    DEFAULT(max_connections, 4096);
    DEFAULT(head_ms, 10000);
    DEFAULT(body_ms, 60000);
    DEFAULT(idle_ms, 75000);
    DEFAULT(keepalive_ms, 10000);
    DEFAULT(stall_ms, 60000);
#undef DEFAULT
}

/* Shells allow 1,024 open files where the system would allow more, and who comes when none
 * is left cannot even be told why. */
static void fit_connections(hx_http *h)
{
    const rlim_t want = (rlim_t)h->opt.max_connections + SPARE_PLACES + FILES_KEPT;
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= want)
        return;
    files.rlim_cur = HX_MIN(want, files.rlim_max);
    setrlimit(RLIMIT_NOFILE, &files);
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= want)
        return;
    h->opt.max_connections = files.rlim_cur > 2 * (SPARE_PLACES + FILES_KEPT)
                                 ? (int)files.rlim_cur - SPARE_PLACES - FILES_KEPT
                                 : HX_MAX(1, (int)files.rlim_cur / 2);
    hx_log(HX_LOG_WARN,
           "%llu open files are allowed: at most %d connections; raise "
           "ulimit -n",
           (unsigned long long)files.rlim_cur, h->opt.max_connections);
}

/* An address, with or without the brackets of a URL, or "localhost". */
static int parse_address(const hx_http_opt *o, struct sockaddr_storage *out, hx_err *err)
{
    const char *host = strcmp(o->host, "localhost") == 0 ? "127.0.0.1" : o->host;
    const size_t n = strlen(host);
    char inner[64];

    if (o->port < 0 || o->port > 65535)
        return hx_fail(err, HX_EARG, "port %d: expected 0 to 65535", o->port);
    if (uv_ip4_addr(host, o->port, (struct sockaddr_in *)out) == 0)
        return 0;
    if (n > 2 && n < sizeof(inner) && host[0] == '[' && host[n - 1] == ']') {
        snprintf(inner, sizeof(inner), "%.*s", (int)n - 2, host + 1);
        host = inner;
    }
    if (uv_ip6_addr(host, o->port, (struct sockaddr_in6 *)out) == 0)
        return 0;
    return hx_fail(err, HX_EARG,
                   "host \"%.100s\": expected an IPv4 or IPv6 address or \"localhost\"",
                   o->host);
}

static int copy_cors(hx_http *h, const char *origin, hx_err *err)
{
    const size_t n = origin != NULL ? strlen(origin) : 1;

    h->opt.cors = NULL;
    if (origin != NULL && strcmp(origin, "off") == 0)
        return 0;
    for (size_t i = 0; origin != NULL && i < n; i++)
        if (origin[i] <= ' ' || origin[i] > '~')
            return hx_fail(err, HX_EARG, "cors: expected one origin, \"*\" or \"off\"");
    h->cors = hx_alloc(n + 1);
    if (h->cors == NULL)
        return hx_fail(err, HX_ENOMEM, "http: no memory for the allowed origin");
    memcpy(h->cors, origin != NULL ? origin : "*", n);
    return 0;
}

static int bind_address(hx_http *h, hx_err *err)
{
    struct sockaddr_storage addr = { 0 };
    int n = sizeof(addr), rc;

    if ((rc = parse_address(&h->opt, &addr, err)) != 0)
        return rc;
    rc = uv_tcp_bind(&h->listener.tcp, (struct sockaddr *)&addr, 0);
    if (rc == 0)
        rc = uv_listen(&h->listener.stream, 1024, on_connect);
    if (rc == 0)
        rc = uv_tcp_getsockname(&h->listener.tcp, (struct sockaddr *)&addr, &n);
    if (rc != 0)
        return hx_fail(
            err, HX_EIO, "host %s, port %d: %s%s", h->opt.host, h->opt.port,
            uv_strerror(rc),
            rc == UV_EADDRINUSE ? "; stop the other program or choose another port" : "");
    h->port =
        ntohs(addr.ss_family == AF_INET ? ((struct sockaddr_in *)&addr)->sin_port
                                        : ((struct sockaddr_in6 *)&addr)->sin6_port);
    return 0;
}

/* A socket that a program left behind when it ended has nobody who listens. */
static void remove_stale(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    struct stat st;
    int fd;

    if (strlen(path) >= sizeof(a.sun_path) || lstat(path, &st) != 0 ||
        !S_ISSOCK(st.st_mode) ||
        (fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0)
        return;
    memcpy(a.sun_path, path, strlen(path));
    if (connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0 && errno == ECONNREFUSED)
        unlink(path);
    close(fd);
}

static int bind_path(hx_http *h, hx_err *err)
{
    const char *path = h->opt.unix_path;
    int rc;

    if (*path == '\0' || strlen(path) >= sizeof(((struct sockaddr_un *)0)->sun_path))
        return hx_fail(err, HX_EARG,
                       "unix socket \"%.40s\": expected a path of 1..%zu bytes", path,
                       sizeof(((struct sockaddr_un *)0)->sun_path) - 1);
    remove_stale(path);
    rc = uv_pipe_bind(&h->listener.pipe, path);
    if (rc == UV_EACCES && errno == ENOENT) /* libuv takes one for the other */
        rc = UV_ENOENT;
    if (rc == 0)
        rc = uv_listen(&h->listener.stream, 1024, on_connect);
    if (rc != 0)
        return hx_fail(err, HX_EIO, "unix socket %.100s: %s%s", path, uv_strerror(rc),
                       rc == UV_EADDRINUSE ? "; stop the other program or choose another "
                                             "path"
                                           : "");
    return 0;
}

int hx_http_open(hx_http **out, const hx_http_opt *opt, hx_http_fn *fn, void *ud,
                 hx_err *err)
{
    hx_http *h = hx_new(hx_http, 1);
    int rc;

    *out = NULL;
    if (h == NULL)
        return hx_fail(err, HX_ENOMEM, "http: no memory for the server");
    h->opt = *opt;
    set_defaults(&h->opt);
    fit_connections(h);
    h->fn = fn;
    h->ud = ud;
    atomic_store(&h->stop_ms, -1);
    if ((rc = uv_mutex_init(&h->lock)) == 0 && (rc = uv_loop_init(&h->loop)) != 0)
        uv_mutex_destroy(&h->lock);
    if (rc != 0) {
        hx_free(h);
        return hx_fail(err, HX_EIO, "http: event loop: %s", uv_strerror(rc));
    }
    uv_timer_init(&h->loop, &h->drain);
    h->local = opt->unix_path != NULL;
    sock_init(h, &h->listener);
    h->listener.handle.data = h->drain.data = h->wake.data = h;
    if ((rc = uv_async_init(&h->loop, &h->wake, on_wake)) != 0) {
        rc = hx_fail(err, HX_EIO, "http: event loop: %s", uv_strerror(rc));
        goto fail;
    }
    if ((opt->tls_cert != NULL || opt->tls_key != NULL) &&
        (rc = hx_tls_open(&h->tls, opt->tls_cert, opt->tls_key, err)) != 0)
        goto fail;
    if ((rc = copy_cors(h, opt->cors, err)) != 0 ||
        (rc = h->local ? bind_path(h, err) : bind_address(h, err)) != 0)
        goto fail;
    h->opt.host = h->opt.unix_path = h->opt.tls_cert = h->opt.tls_key = NULL;
    *out = h;
    return 0;
fail:
    hx_http_close(h);
    return rc;
}

int hx_http_port(const hx_http *h)
{
    return h->port;
}

/* libuv writes without MSG_NOSIGNAL, so SIGPIPE is kept from this thread, whatever the
 * program does about it. */
int hx_http_run(hx_http *h, hx_err *err)
{
    static const struct timespec at_once = { 0 };
    sigset_t pipe, before;

    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    if (pthread_sigmask(SIG_BLOCK, &pipe, &before) != 0)
        return hx_fail(err, HX_EIO, "http: cannot block SIGPIPE");
    uv_run(&h->loop, UV_RUN_DEFAULT);
    while (!sigismember(&before, SIGPIPE) &&
           sigtimedwait(&pipe, NULL, &at_once) == SIGPIPE)
        ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return 0;
}

void hx_http_stop(hx_http *h, int32_t drain_ms)
{
    atomic_store(&h->stopping, true);
    atomic_store(&h->stop_ms, HX_MAX(drain_ms, 0));
    uv_async_send(&h->wake);
}

static void close_handle(uv_handle_t *handle, void *ud)
{
    (void)ud;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

void hx_http_close(hx_http *h)
{
    if (h == NULL)
        return;
    on_wake(&h->wake);
    drop_all(h);
    uv_walk(&h->loop, close_handle, NULL);
    while (uv_run(&h->loop, UV_RUN_DEFAULT) != 0)
        ;
    while (h->conns != NULL)
        conn_free(h->conns);
    uv_loop_close(&h->loop);
    uv_mutex_destroy(&h->lock);
    hx_tls_close(h->tls);
    hx_sb_free(&h->plain);
    hx_free(h->cors);
    hx_free(h);
}
