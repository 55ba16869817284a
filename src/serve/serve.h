/* serve.h - the HTTP server: what main.c needs of it, and what its files share.
 *
 * Sees hoist.h, text and base; never tensors. One libuv loop thread owns sockets, parsing,
 * timers and writes; a small pool of request workers runs templates, tokenizers and reply
 * parsers; tokens come from hx_next(). */
#ifndef HX_SERVE_H
#define HX_SERVE_H

#include "base/base.h"
#include "text/text.h"

typedef struct hx_server hx_server;

/* Zero is a good default everywhere. Strings are copied. */
typedef struct {
    const char *host;            /* NULL: "127.0.0.1" */
    int32_t     port;            /* 0 picks a free one */
    const char *api_key;         /* NULL: open; else needed everywhere but /health and preflights */
    const char *served_name;     /* NULL: the model's */
    const char *cors;            /* allowed origin; NULL: "*"; "off": none */
    bool        official_tokens; /* see hx_render_opt */
    size_t      max_body_bytes;  /* 0: 32 MiB */
    int32_t     max_connections; /* 0: 4096 */
    int32_t     drain_ms;        /* running requests may go on so long after a stop; 0: 30,000 */
} hx_server_opt;

/* Binds and listens; /health answers 503 until an engine is set. Errors: HX_EARG, HX_EIO
 * (address in use: says which), HX_ENOMEM. */
int  hx_server_open(hx_server **out, const hx_server_opt *opt, hx_err *err);
int  hx_server_port(const hx_server *s);
/* The model is there. Any thread, once. Borrowed; must outlive the server. */
void hx_server_set_engine(hx_server *s, hx_engine *e);
/* Loading progress for /health and waiting requests; any thread. */
void hx_server_set_loading(hx_server *s, uint64_t done_bytes, uint64_t total_bytes);
/* Serves until hx_server_stop(); then drains. 0, or HX_EIO. */
int  hx_server_run(hx_server *s, hx_err *err);
void hx_server_stop(hx_server *s);               /* any thread, signal handlers too */
void hx_server_close(hx_server *s);

/* ---- http.c: sockets to requests, responses to sockets ------------------ */

/* Limits; 0 takes the default in brackets. */
typedef struct {
    const char *host;                /* ["127.0.0.1"] */
    int32_t     port;                /* 0 picks a free one */
    const char *cors;                /* allowed origin ["*"]; "off": no CORS headers */
    size_t      max_head_bytes;      /* [32 KiB] else 431 */
    size_t      max_body_bytes;      /* [32 MiB] else 413, before it is read */
    size_t      max_queue_bytes;     /* [1 MiB] written but not taken by the client */
    int32_t     max_connections;     /* [4096] else 503 and close */
    int32_t     head_ms, body_ms;    /* [10 s, 60 s] to arrive, else 408 */
    int32_t     idle_ms;             /* [75 s] between requests of a connection */
    int32_t     keepalive_ms;        /* [10 s] silence on a begun stream before a comment is sent */
} hx_http_opt;

typedef struct hx_http hx_http;

/* One request and its response. Owned by http.c; a handler may use it on any one thread
 * until it calls hx_http_end(), also when the client has gone. */
typedef struct hx_exchange {
    hx_str method, path, query;      /* path: percent-decoded, without a trailing slash; "/" for the root */
    hx_str body;
    void  *conn;                     /* http.c's */
} hx_exchange;

/* Called on the loop thread once a whole request is there; must not block: hand it to a
 * worker. Preflights (OPTIONS) are answered by http.c and never arrive. */
typedef void hx_http_fn(void *ud, hx_exchange *x);

int  hx_http_open(hx_http **out, const hx_http_opt *opt, hx_http_fn *fn, void *ud, hx_err *err);
int  hx_http_port(const hx_http *h);
int  hx_http_run(hx_http *h, hx_err *err);       /* the loop; returns after hx_http_stop() */
/* Any thread, signal handlers too: takes no new connections or requests, lets responses in
 * progress finish for at most drain_ms, then closes what is left and lets the loop return. */
void hx_http_stop(hx_http *h, int32_t drain_ms);
void hx_http_close(hx_http *h);

/* A header's value; name in lower case; {NULL, 0} when absent. */
hx_str hx_http_header(const hx_exchange *x, const char *name);

/* The client closed or half-closed; whoever computes for it should stop. Cheap, any thread. */
bool hx_http_gone(const hx_exchange *x);
/* fn(ud) once, on the loop thread, when that happens (at once if it has); NULL takes it back. It
 * may only wake somebody. */
void hx_http_on_gone(hx_exchange *x, void (*fn)(void *ud), void *ud);

/* A whole response. type: content type; headers: extra lines "a: b\r\n…" or NULL. Ends the exchange. */
void hx_http_reply(hx_exchange *x, int status, const char *type, const char *headers, hx_str body);

/* An event stream: headers go out at once; send appends bytes (one or more whole events) and waits
 * while the client is more than max_queue_bytes behind; false when it has gone or did not take
 * anything for 60 s. In silence comments (": keepalive") go out by themselves. */
void hx_http_begin_events(hx_exchange *x);
bool hx_http_send(hx_exchange *x, hx_str bytes);
void hx_http_end(hx_exchange *x);                /* ends an event stream */

/* ---- server.c: routes and the one generate path -------------------------- */

struct hx_server;

/* A neutral request: every dialect is parsed to it. Arrays live in the exchange's arena. */
typedef struct {
    hx_request   sampling;           /* tokens and n_tokens set by the generate path */
    bool         chat;               /* messages through the template, else raw prompts */
    hx_json     *body;               /* parsed request, borrowed */
    hx_str       template_vars;      /* JSON object for hx_render(), chat only */
    const hx_json *tools;            /* or NULL */
    bool         tools_off, reasoning_off, skip_special;
    const int32_t *const *prompt;    /* [n_prompt] raw prompts as ids */
    const int64_t *prompt_tokens;
    int32_t      n_prompt, n;        /* prompts, answers of each */
    bool         stream, usage, echo;
    hx_str       model;              /* as the client called it */
} hx_generate;

/* What a dialect gets while an answer is made; index counts answers over all prompts. */
typedef enum {
    HX_GEN_START,        /* the prompt is in; before the first token */
    HX_GEN_REPLY,        /* a piece of a chat answer: reply */
    HX_GEN_TEXT,         /* a piece of a raw answer: text; with token, logprob, top of what it covers */
    HX_GEN_END,          /* the answer is complete: stop, counts, n_call */
    HX_GEN_ERROR         /* err; nothing follows for any index */
} hx_gen_kind;

typedef struct {
    hx_gen_kind  kind;
    int32_t      index;
    const hx_reply_event *reply;
    hx_str       text;
    const hx_event *tokens;          /* the engine's event behind this piece, or NULL */
    hx_stop      stop;
    int32_t      n_call;
    int64_t      prompt_tokens, cached_tokens, answer_tokens, reasoning_tokens;
    hx_err       err;
} hx_gen_event;

#endif
