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
    int32_t     stall_ms;            /* [60 s] without taking a byte of what waits, then closed */
} hx_http_opt;

typedef struct hx_http hx_http;

/* One request and its response. Owned by http.c; a handler may use it on any one thread
 * until it calls hx_http_end(), also when the client has gone. */
typedef struct hx_exchange {
    hx_str method;                   /* HEAD arrives as "GET" */
    hx_str path, query;              /* path: percent-decoded, no trailing slash; "/" is the root */
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
/* After hx_http_run() has returned and every exchange has ended. NULL is fine. */
void hx_http_close(hx_http *h);

/* A header's value; name in lower case; {NULL, 0} when absent. */
hx_str hx_http_header(const hx_exchange *x, const char *name);

/* The client closed or half-closed; whoever computes for it should stop. Cheap, any thread. */
bool hx_http_gone(const hx_exchange *x);
/* fn(ud) once, on the loop thread, when that happens (at once if it has); NULL takes it back: fn
 * does not run after that. It may only wake somebody, and no lock that it takes may be held in a
 * call of hx_http_*, for it runs under a lock of http.c. */
void hx_http_on_gone(hx_exchange *x, void (*fn)(void *ud), void *ud);

/* A whole response. type: content type; headers: extra lines "a: b\r\n…" or NULL. Ends the exchange. */
void hx_http_reply(hx_exchange *x, int status, const char *type, const char *headers, hx_str body);

/* An event stream: headers go out at once; send appends bytes (one or more whole events) and waits
 * while the client is more than max_queue_bytes behind; false when it has gone or did not take
 * anything for 60 s. In silence comments (": keepalive") go out by themselves. */
void hx_http_begin_events(hx_exchange *x);
bool hx_http_send(hx_exchange *x, hx_str bytes);
void hx_http_end(hx_exchange *x);                /* ends an event stream */

/* ---- server.c: routes, workers, what every route needs ------------------- */

/* A request that fails before its answer has begun: a status and an error body. */
typedef struct {
    int     status;              /* 0: none */
    char    param[96];           /* the field at fault, or "" */
    const char *code;            /* machine-readable, or NULL */
    char    msg[320];
    int64_t n_prompt, n_ctx;     /* context overflow only */
} hx_problem;

/* One request on its worker; everything in it ends with the answer. */
typedef struct {
    hx_server     *server;
    hx_engine     *engine;
    const hx_info *info;
    hx_exchange   *x;
    hx_arena       arena;        /* capped */
    hx_json       *body;         /* the parsed request, or NULL */
    hx_problem     problem;
    int            status;       /* of the answer, for the log */
    int64_t        n_prompt, n_answer;     /* tokens, for the log */
} hx_call;

/* Notes the first problem of a call; returns HX_EARG. param and code may be NULL. */
int  hx_server_problem(hx_call *c, int status, const char *param, const char *code,
                       const char *fmt, ...) HX_PRINTF(5, 6);
/* The same from an engine's or parser's error. */
int  hx_server_problem_err(hx_call *c, int rc, const char *param, const hx_err *err);
/* {"error": {…}} as OpenAI shapes it; status < 0: none known, an error of ours. */
void hx_server_write_problem(hx_sb *b, const hx_problem *p);
/* Whole answers; each ends the exchange. */
void hx_server_reply_problem(hx_call *c);
void hx_server_reply_json(hx_call *c, const hx_sb *json);
/* Unique for this server and unguessable: prefix and 24 hex digits. */
void hx_server_new_id(hx_server *s, const char *prefix, char out[40]);
uint64_t hx_server_random(hx_server *s);
bool hx_server_official_tokens(const hx_server *s);
hx_str hx_server_model_name(const hx_server *s);

/* ---- params.c: typed fields of a request -------------------------------- */

/* A member of the body; NULL when absent or null. */
const hx_json *hx_params_get(const hx_json *obj, const char *name);
/* These set *out where the field is there; else leave it. A wrong type or a value out of
 * range is a problem that names the field. */
int hx_params_bool(hx_call *c, const hx_json *obj, const char *name, bool *out);
int hx_params_int(hx_call *c, const hx_json *obj, const char *name, int64_t min, int64_t max,
                  int64_t *out);
int hx_params_str(hx_call *c, const hx_json *obj, const char *name, hx_str *out);
/* A list of token ids, in the call's arena; param names it in problems. */
int hx_params_ids(hx_call *c, const hx_json *list, const char *param, const int32_t **out,
                  int64_t *n);

/* ---- generate.c: the one path from a neutral request to answers --------- */

typedef struct { const int32_t *id; int64_t n; } hx_prompt;

/* A neutral request: every dialect is parsed to it. Arrays live in the call's arena. */
typedef struct {
    hx_request   sampling;       /* tokens and n_tokens are set by generate.c */
    bool         chat;           /* vars through the template, else raw prompts */
    hx_str       vars;           /* chat: JSON object for hx_render() */
    const hx_json *tools;        /* chat: tools in force, or NULL */
    bool         no_thinking;    /* chat: an opened <think> is closed at once */
    const hx_prompt *prompt;     /* [n_prompt] raw prompts; chat: the rendered one, later */
    int32_t      n_prompt, n;    /* prompts, answers of each */
    bool         keep_special;   /* special tokens are shown */
    bool         stream, usage, echo;
    hx_str       model;          /* as the client called it */
} hx_generate;

/* What a dialect gets while answers are made; index counts answers over all prompts. */
typedef enum {
    HX_GEN_TOKEN,        /* only with log-probabilities: token, bytes, logprob, top, offset */
    HX_GEN_REPLY,        /* a piece of a chat answer: reply */
    HX_GEN_TEXT,         /* a piece of a raw answer: text; follows the tokens it covers */
    HX_GEN_END           /* the answer is complete: stop, n_call and the counts */
} hx_gen_kind;

typedef struct {
    hx_gen_kind  kind;
    int32_t      index;
    const hx_reply_event *reply;
    hx_str       text;           /* whole characters */
    int32_t      token;
    hx_str       bytes;          /* of the token */
    float        logprob;
    const hx_choice *top;        /* [sampling.n_top] */
    int64_t      offset;         /* characters of the raw answer before the token */
    hx_stop      stop;
    int32_t      n_call;
    int64_t      n_prompt, n_cached, n_answer, n_reasoning;     /* tokens */
    hx_times     times;
} hx_gen_event;

typedef struct hx_gen hx_gen;
/* Appends to out, which generate.c sends when the exchange is a stream. */
typedef void hx_gen_fn(void *ud, const hx_gen_event *ev, hx_sb *out);

/* Reads the sampling fields that all dialects of OpenAI's family share. */
int  hx_params_sampling(hx_call *c, hx_generate *g);

/* Whether the prompts are few and short enough; hx_gen_open() does this by itself. */
int  hx_gen_check(hx_call *c, const hx_generate *g);
/* Renders, tokenizes and submits; afterwards the request can only fail in the engine. */
int  hx_gen_open(hx_gen **out, hx_call *c, const hx_generate *g);
const hx_prompt *hx_gen_prompt(const hx_gen *g, int32_t i);
/* Hands everything to fn until all answers have ended. begun: an event stream is open and
 * takes what fn writes. HX_ECANCEL: the client has gone. Others: c->problem is set. */
int  hx_gen_run(hx_gen *g, bool begun, hx_gen_fn *fn, void *ud);
void hx_gen_close(hx_gen *g);                    /* cancels what still runs */

/* ---- dialects: api_openai.c, api_completions.c --------------------------- */

typedef int hx_route_fn(hx_call *c);             /* 0, or a problem not yet answered */
int hx_openai_chat(hx_call *c);
int hx_completions(hx_call *c);
/* Shared by both: usage and timings of the answers so far, the chosen tokens' texts. */
typedef struct {
    int64_t n_prompt, n_cached, n_answer, n_reasoning;
    hx_times times;              /* of the answer that ended last */
} hx_openai_sum;
void hx_openai_add(hx_openai_sum *s, const hx_gen_event *ev, bool new_prompt);
void hx_openai_write_usage(hx_sb *b, const hx_openai_sum *s);
void hx_openai_write_timings(hx_sb *b, const hx_openai_sum *s);
/* Ends an event stream: last, then [DONE] or the call's problem. */
void hx_openai_end_stream(hx_call *c, int rc, hx_sb *last);
/* Ends an exchange nobody waits for; returns 0. */
int  hx_openai_end_gone(hx_call *c);
/* The messages, tools and switches of a chat request as the template's variables. */
int  hx_openai_vars(hx_call *c, hx_generate *g);
#define HX_FINGERPRINT "hoist-" HX_VERSION

#endif
