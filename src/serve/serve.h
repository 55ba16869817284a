/* serve.h - the HTTP server: what main.c needs of it, and what its files share.
 *
 * Sees hoist.h, text and base; never tensors. One libuv loop thread owns sockets,
 * parsing, timers and writes; a small pool of request workers parses, renders, tokenizes
 * and submits; one pump thread takes the tokens of all running answers and makes their
 * text. */
#ifndef HX_SERVE_H
#define HX_SERVE_H

#include "base/base.h"
#include "text/text.h"

typedef struct hx_server hx_server;
typedef struct hx_pump hx_pump;
typedef struct hx_responses hx_responses;

/* Zero is a good default everywhere. Strings are copied. */
typedef struct {
    const char *host;               /* NULL: "127.0.0.1" */
    int32_t port;                   /* 0 picks a free one */
    const char *unix_path;          /* a unix socket instead of host and port */
    const char *tls_cert, *tls_key; /* PEM files; NULL: no TLS */
    const char *api_key; /* NULL: open; else lines KEY or NAME=KEY, one of which is needed
                          * everywhere but for /health and preflights */
    const char *admin_key;   /* NULL: every key may do all; else the one that may do what
                            * concerns the server itself */
    const char *served_name; /* NULL: the model's */
    const char *cors;        /* allowed origin; NULL: "*"; "off": none */
    bool official_tokens;    /* see hx_render_opt */
    bool log_prompts;        /* bodies of requests go to the log */
    size_t max_body_bytes;   /* 0: 32 MiB */
    int32_t max_connections; /* 0: 4096 */
    int32_t drain_ms;     /* running requests may go on so long after a stop; 0: 30,000 */
    int32_t keepalive_ms; /* see hx_http_opt */
} hx_server_opt;

/* Binds and listens; /health answers 503 until an engine is set. Errors: HX_EARG, HX_EIO
 * (address in use: says which), HX_ENOMEM. */
int hx_server_open(hx_server **out, const hx_server_opt *opt, hx_err *err);
int hx_server_port(const hx_server *s);
/* The model is there. Any thread, once. Borrowed; must outlive the server. */
void hx_server_set_engine(hx_server *s, hx_engine *e);
/* Loading progress for /health and waiting requests; any thread. */
void hx_server_set_loading(hx_server *s, uint64_t done_bytes, uint64_t total_bytes);
/* Serves until hx_server_stop(); then drains. 0, or HX_EIO. */
int hx_server_run(hx_server *s, hx_err *err);
/* Any thread, signal handlers too. Once more: running answers end now. */
void hx_server_stop(hx_server *s);
void hx_server_close(hx_server *s);

/* ---- http.c: sockets to requests, responses to sockets ------------------ */

struct hx_exchange;

/* Limits; 0 takes the default in brackets. */
typedef struct {
    const char *host;               /* ["127.0.0.1"] */
    int32_t port;                   /* 0 picks a free one */
    const char *unix_path;          /* a unix socket instead of host and port */
    const char *tls_cert, *tls_key; /* PEM files; NULL: no TLS */
    const char *cors;               /* allowed origin ["*"]; "off": no CORS headers */
    size_t max_head_bytes;          /* [32 KiB] else 431 */
    size_t max_body_bytes;          /* [32 MiB] else 413, before it is read */
    size_t max_queue_bytes;         /* [1 MiB] written but not taken by the client */
    int32_t max_connections;        /* [4096] else 503 and close */
    int32_t head_ms, body_ms;       /* [10 s, 60 s] to arrive, else 408 */
    int32_t idle_ms;                /* [75 s] between requests of a connection */
    int32_t keepalive_ms; /* [10 s] silence on a begun stream before a comment is sent */
    /* Loop thread, before a body that is still to come: false answers 401 at once, so that
     * strangers cannot make the server read. NULL: all bodies are read. */
    bool (*admit)(void *ud, const struct hx_exchange *x);
    /* Loop thread: answers with hx_http_reply() a request that is refused before it is all
     * there, as clients of its path want it. NULL, or no path: as OpenAI does. */
    void (*refuse)(void *ud, struct hx_exchange *x, int status, const char *code,
                   const char *why);
    void (*on_stop)(void *ud); /* loop thread, after hx_http_stop(); may be NULL */
    int32_t stall_ms; /* [60 s] without taking a byte of what waits, then closed */
} hx_http_opt;

typedef struct hx_http hx_http;

/* One request and its response. Owned by http.c; a handler may use it, on one thread at a
 * time, until it calls hx_http_reply() or hx_http_end(), also when the client has gone.
 */
typedef struct hx_exchange {
    hx_str method;      /* HEAD arrives as "GET" */
    hx_str path, query; /* path: percent-decoded, no trailing slash; "/" is the root */
    hx_str body;
    void *conn;          /* http.c's */
    char request_id[40]; /* the handler's; "" or sent along with the answer */
} hx_exchange;

/* Called on the loop thread once a whole request is there; must not block: hand it to a
 * worker. Preflights (OPTIONS) are answered by http.c and never arrive. */
typedef void hx_http_fn(void *ud, hx_exchange *x);

int hx_http_open(hx_http **out, const hx_http_opt *opt, hx_http_fn *fn, void *ud,
                 hx_err *err);
int hx_http_port(const hx_http *h);
int hx_http_run(hx_http *h, hx_err *err); /* the loop; returns after hx_http_stop() */
/* Any thread, signal handlers too: takes no new connections or requests, lets responses
 * in progress finish for at most drain_ms, then closes what is left and lets the loop
 * return. */
void hx_http_stop(hx_http *h, int32_t drain_ms);
/* After hx_http_run() has returned and every exchange has ended. NULL is fine. */
void hx_http_close(hx_http *h);

/* A header's value; name in lower case; {NULL, 0} when absent. */
hx_str hx_http_header(const hx_exchange *x, const char *name);

/* The client closed or half-closed; whoever computes for it should stop. Cheap, any
 * thread. */
bool hx_http_gone(const hx_exchange *x);
/* After hx_http_stop(): the time of answers is over; whoever gives one ends it, with a
 * word to the client, within a second. Cheap, any thread. */
bool hx_http_over(const hx_exchange *x);
/* fn(ud), on the loop thread, when that happens (at once if it has) and when a client
 * whose queue was full has caught up; NULL takes it back: fn does not run after that. It
 * may only wake somebody, and no lock that it takes may be held in a call of hx_http_*,
 * for it runs under a lock of http.c. */
void hx_http_on_news(hx_exchange *x, void (*fn)(void *ud), void *ud);

/* A whole response. type: content type; headers: extra lines "a: b\r\n…" or NULL. Ends
 * the exchange. */
void hx_http_reply(hx_exchange *x, int status, const char *type, const char *headers,
                   hx_str body);

/* An event stream. send appends bytes (one or more whole events, or none: only asks) and
 * never waits: FULL, when the client is more than max_queue_bytes behind, has taken them
 * too, but wants no more until hx_http_on_news() says so; GONE: the client left, or took
 * nothing for stall_ms. What begin and send said goes out with the next flush, one for
 * many streams, or with the end. */
typedef enum { HX_HTTP_OPEN, HX_HTTP_FULL, HX_HTTP_GONE } hx_http_state;
/* keepalive is what goes out in silence, borrowed until the end; of a stream that has begun
 * only that changes. */
void hx_http_begin_stream(hx_exchange *x, const char *type, hx_str keepalive);
hx_http_state hx_http_send(hx_exchange *x, hx_str bytes);
void hx_http_flush(hx_http *h);   /* any thread */
void hx_http_end(hx_exchange *x); /* ends an event stream */

/* ---- keys.c: who may use the server -------------------------------------- */

typedef struct hx_keys hx_keys;
typedef enum { HX_ACCESS_YES, HX_ACCESS_UNKNOWN, HX_ACCESS_NOT_ADMIN } hx_access;

/* lines: see hx_server_opt.api_key; lines that begin with # do not count. Both NULL: *out
 * is NULL, which lets everyone in. Errors: HX_EARG, HX_ELIMIT, HX_ENOMEM. */
int hx_keys_open(hx_keys **out, const char *lines, const char *admin, hx_err *err);
void hx_keys_close(hx_keys *k);
/* given: what the client sent, {NULL, 0}: nothing. *name, borrowed: whose key it is, or
 * NULL. */
hx_access hx_keys_check(const hx_keys *k, hx_str given, bool admin, const char **name);

/* ---- server.c: routes, workers, what every route needs ------------------- */

/* A request that fails before its answer has begun: a status and an error body. */
typedef struct {
    int status;       /* 0: none */
    char param[96];   /* the field at fault, or "" */
    const char *code; /* machine-readable, or NULL */
    char msg[320];
    int64_t n_prompt, n_ctx; /* context overflow only */
} hx_problem;

/* Writes the body of an error. */
typedef void hx_problem_fn(hx_sb *b, const hx_problem *p);

typedef struct hx_call hx_call;
/* 0: answered; HX_LATER: somebody else goes on with the call, which must not be touched
 * any more; else a problem not yet answered. */
typedef int hx_route_fn(hx_call *c);
#define HX_LATER 1

/* How the streams of a dialect look. */
typedef struct {
    const char *type; /* content type */
    hx_str idle;      /* what goes out in silence */
    /* Appends the call's problem as the last event. */
    void (*problem)(const hx_call *c, hx_sb *out);
    bool usual; /* streams unless the request says otherwise */
} hx_stream_form;

/* One request. First on a worker, later perhaps on the pump, never on two threads at
 * once; everything in it ends with hx_server_finish(). */
struct hx_call {
    hx_server *server;
    hx_engine *engine;
    const hx_info *info;
    hx_exchange *x;
    hx_arena arena; /* capped */
    hx_json *body;  /* the parsed request, or NULL */
    hx_json *also;  /* what a dialect made of it; freed with it */
    void *state;    /* the route's, between two parts of it */
    hx_problem problem;
    hx_problem_fn *put_problem; /* how the dialect shapes errors; NULL: as OpenAI does */

    hx_call *next;              /* in a queue of server.c */
    hx_route_fn *run;           /* what a worker does next */
    bool slow;                  /* run may take long */
    bool no_body;               /* the request's is not parsed */
    const hx_stream_form *form; /* NULL: run never answers with an event stream */
    bool begun; /* it has: by run, or before it, while the model was loaded */

    /* For the log; the exchange ends before it is written. */
    const char *key; /* the name of the client's key, or NULL */
    char method[16], path[200];
    int64_t start_us;
    int status;                 /* of the answer */
    int64_t n_prompt, n_answer; /* tokens */
    int64_t n_cached;
    hx_times times; /* of the answer that ended last */
};

/* Notes the first problem of a call; returns HX_EARG. param and code may be NULL. */
int hx_server_problem(hx_call *c, int status, const char *param, const char *code,
                      const char *fmt, ...) HX_PRINTF(5, 6);
/* The same from an engine's or parser's error. */
int hx_server_problem_err(hx_call *c, int rc, const char *param, const hx_err *err);
/* The same of what hx_tokenize() answered for the text in param. */
int hx_server_untokenized(hx_call *c, const char *param, int rc);
int hx_server_no_memory(hx_call *c);                    /* 503 */
int hx_server_too_large(hx_call *c, const char *param); /* 413: param does not fit */
/* {"error": {…}} as OpenAI shapes it; status < 0: none known, an error of ours. */
void hx_server_write_problem(hx_sb *b, const hx_problem *p);
/* Whole answers; each ends the exchange. gone: nobody reads it; 499 is for the log. */
void hx_server_reply_problem(hx_call *c);
void hx_server_reply_json(hx_call *c, const hx_sb *json);
/* Begins the stream of c's form, or goes on with it; idle: {NULL, 0}: the form's. */
void hx_server_begin_stream(hx_call *c, hx_str idle);
/* For hx_gen_sink.end: ends a begun stream, with last where rc is 0, and a call whose
 * client has gone; else, where rc is 0, whole(ud) answers. Returns what a route does. */
int hx_server_end(hx_call *c, int rc, hx_str last, void (*whole)(void *ud), void *ud);
/* Lets a worker go on with run(c), one of few at once: for what may take long without the
 * pump. stream: the answer is one, which begins now. HX_LATER, or a problem (429: too many
 * wait). */
int hx_server_defer(hx_call *c, hx_route_fn *run, bool stream);
/* Answers what rc says is not yet answered, logs and frees the call. */
void hx_server_finish(hx_call *c, int rc);
/* Unique for this server and unguessable: prefix and 24 hex digits. */
void hx_server_new_id(hx_server *s, const char *prefix, char out[40]);
uint64_t hx_server_random(hx_server *s);
/* Whose limits a call counts for: the key that it came with; 0: none. */
uint64_t hx_server_client(const hx_call *c);
bool hx_server_official_tokens(const hx_server *s);
hx_pump *hx_server_pump(const hx_server *s);
hx_str hx_server_model_name(const hx_server *s);
/* The value of a field of the query, as it is; p NULL: it is not there. */
hx_str hx_server_query(const hx_call *c, const char *name);
int64_t hx_server_created_s(const hx_server *s);
hx_responses *hx_server_responses(const hx_server *s);
double hx_server_load_s(const hx_server *s); /* from opening to the engine's coming */

/* ---- stats.c: what the server is doing ----------------------------------- */

void hx_stats_write_health(hx_sb *b, hx_engine *e, bool *healthy);
int hx_stats_slots(hx_call *c); /* GET /slots */
int hx_stats_all(hx_call *c);   /* GET /stats */

/* ---- generate.c: the one path from a neutral request to answers --------- */

typedef struct {
    const int32_t *id;
    int64_t n;
} hx_prompt;

/* Whether an answer calls tools: as the model likes, at least one, or the one called
 * tool_name. Zero is AUTO, so that a dialect which says nothing gets the usual. */
typedef enum {
    HX_TOOLS_AUTO,
    HX_TOOLS_NONE,
    HX_TOOLS_REQUIRED,
    HX_TOOLS_NAMED
} hx_tool_choice;

/* A neutral request: every dialect is parsed to it. Arrays live in the call's arena. */
typedef struct {
    hx_request sampling;       /* tokens and n_tokens are set by generate.c */
    const char *grammar_param; /* the field that asked for sampling.grammar */
    bool grammar_optional;     /* without it the request is answered all the same */
    bool chat;                 /* vars through the template, else raw prompts */
    hx_str vars;               /* chat: JSON object for hx_render() */
    const hx_json *tools;      /* chat: tools in force, or NULL */
    hx_tool_choice tool_choice;
    const hx_json *allowed; /* entries that name the only tools to call, or NULL: all */
    hx_str tool_name;       /* NAMED: which */
    bool one_call;          /* parallel_tool_calls: false */
    bool rendered_anew; /* chat: earlier calls as the client gives them, not as sampled */
    bool loop_guard;    /* an answer that only repeats itself is ended */
    bool unpin;         /* what an earlier request pinned of this prompt is let go */
    bool no_thinking;   /* chat: an opened <think> is closed at once */
    int64_t think_budget;    /* chat: tokens of reasoning at most; 0 and -1: no bound */
    const hx_prompt *prompt; /* [n_prompt] raw prompts; chat: the rendered one, later */
    int32_t n_prompt, n;     /* prompts, answers of each */
    bool keep_special;       /* special tokens are shown */
    bool every_token;        /* raw: each token is an event, and its text, if empty */
    bool stream, usage, echo;
    bool progress; /* stream: the sink's progress, else comments tell */
    hx_str model;  /* as the client called it */
} hx_generate;

/* What a dialect gets while answers are made; index counts answers over all prompts. */
typedef enum {
    HX_GEN_TOKEN, /* only with log-probabilities or every_token: token, bytes, logprob,
                   * top, offset */
    HX_GEN_REPLY, /* a piece of a chat answer: reply */
    HX_GEN_TEXT,  /* a piece of a raw answer: text; follows the tokens it covers */
    HX_GEN_END    /* the answer is complete: stop, n_call and the counts */
} hx_gen_kind;

typedef struct {
    hx_gen_kind kind;
    int32_t index;
    const hx_reply_event *reply;
    hx_str text; /* whole characters */
    int32_t token;
    hx_str bytes; /* of the token */
    float logprob;
    const hx_choice *top; /* [sampling.n_top] */
    int64_t offset;       /* characters of the raw answer before the token */
    hx_stop stop;
    int32_t loop_tokens; /* END by the loop guard: so many were repeated; else 0 */
    int32_t loop_times;
    int32_t stop_index; /* as in hx_event */
    int32_t n_call;
    int64_t n_prompt, n_cached, n_answer, n_reasoning; /* tokens */
    hx_miss miss; /* why not more of the prompt was cached, from miss_pos on */
    int64_t miss_pos;
    hx_times times;
    hx_expert_use experts;
} hx_gen_event;

/* How far a prompt is, for who asked with return_progress. */
typedef struct {
    int32_t index;
    int64_t n_prompt, n_cached, n_prefilled; /* tokens */
    int64_t queue, eta_ms;                   /* eta_ms -1: not known */
    hx_times times;
} hx_gen_progress;

/* What a dialect does with the answers; both are called by the pump and must not take
 * long. */
typedef struct {
    /* Appends to out, which generate.c sends when the exchange is a stream. */
    void (*event)(void *ud, const hx_gen_event *ev, hx_sb *out);
    /* Once, when no event will come any more: ends the exchange and frees what is in ud.
     * rc 0: all answers are complete; HX_ECANCEL: the client has gone; else c->problem is
     * set. Returns what a route does. */
    int (*end)(void *ud, int rc);
    void (*progress)(void *ud, const hx_gen_progress *p, hx_sb *out); /* NULL: comments */
    void *ud;    /* in the call's arena */
    bool stream; /* an event stream has begun and takes what event() writes */
    /* An event that goes out now and then while nothing else does, or {NULL, 0}: comments
     * tell how far the answer is. Borrowed until the end. */
    hx_str waiting;
} hx_gen_sink;

typedef struct hx_gen hx_gen;

/* Whether the prompts are few and short enough; hx_gen_open() does this by itself. */
int hx_gen_check(hx_call *c, const hx_generate *g);
/* Renders, tokenizes and submits; afterwards the request can only fail in the engine.
 * Lives in the call's arena; ends with hx_gen_start() or hx_gen_close(). */
int hx_gen_open(hx_gen **out, hx_call *c, const hx_generate *g);
/* The pump takes over the call and finishes it. Returns HX_LATER. */
int hx_gen_start(hx_gen *g, const hx_gen_sink *sink);
/* Instead of both, where no token is wanted: all answers end at once. Returns what
 * sink->end() does. */
int hx_gen_none(hx_call *c, const hx_generate *g, const hx_gen_sink *sink);
void hx_gen_close(hx_gen *g); /* cancels what still runs */
/* Ends the answers of a started one where they are. Any thread, but not once sink.end()
 * is called. */
void hx_gen_cancel(hx_gen *g);
/* Tokens of the prompt that hx_gen_open() would submit for a chat. */
int hx_gen_count_prompt(hx_call *c, const hx_generate *g, int64_t *n);
int64_t hx_gen_count_chars(hx_str utf8);
/* Before hx_gen_start(): the name that hx_gen_end_thinking() finds it by; copied. */
void hx_gen_set_id(hx_gen *g, const char *id);
/* Ends the reasoning of a running generation; false: there is none of that id. Any
 * thread. */
bool hx_gen_end_thinking(hx_pump *p, hx_str id);

/* One thread that serves all generations; none ever waits for its client. */
int hx_gen_open_pump(hx_pump **out, hx_http *http, hx_err *err);
/* Waits until all have ended; none may be started any more. NULL is fine. */
void hx_gen_close_pump(hx_pump *p);

/* ---- params.c: typed fields of a request, how to sample ---------------- */

/* A member of the body; NULL when absent or null. */
const hx_json *hx_params_get(const hx_json *obj, const char *name);
/* Notes a 400 and returns its error: "PARAM: found F, expected E", with the code for a
 * missing field, one of another type than wanted, or another value. */
int hx_params_refuse(hx_call *c, const char *param, const hx_json *found,
                     hx_json_type wanted, const char *expected);
/* These set *out where the field is there; else leave it. A wrong type or a value out of
 * range is a problem that names the field. */
int hx_params_bool(hx_call *c, const hx_json *obj, const char *name, bool *out);
int hx_params_int(hx_call *c, const hx_json *obj, const char *name, int64_t min,
                  int64_t max, int64_t *out);
int hx_params_str(hx_call *c, const hx_json *obj, const char *name, hx_str *out);
int hx_params_num(hx_call *c, const hx_json *obj, const char *name, double min,
                  double max, double *out);
/* A list of token ids, in the call's arena; param names it in problems. */
int hx_params_ids(hx_call *c, const hx_json *list, const char *param, const int32_t **out,
                  int64_t *n);

/* Reads the sampling fields that all dialects of OpenAI's family share. */
int hx_params_sampling(hx_call *c, hx_generate *g);
/* How long the answer may think, by any of the names that clients use for it. */
int hx_params_thinking(hx_call *c, hx_generate *g);

/* The fields that all dialects spell alike, of an object in the body: temperature, top_p,
 * min_p, penalties, stop, stop_token_ids, logit_bias, ignore_eos, skip_special_tokens,
 * loop_guard, pin. */
int hx_params_shared(hx_call *c, const hx_json *obj, hx_generate *g);
/* The answer keeps to a grammar: its source is the JSON of v, or the text of a string. */
int hx_params_grammar(hx_call *c, hx_generate *g, hx_grammar_kind kind, const char *param,
                      const hx_json *v);

/* ---- prompts.c: raw prompts of a request --------------------------------- */

enum { HX_PROMPT_TEXT = 1, HX_PROMPT_IDS = 2 };
#define HX_PROMPTS_MAX 256

typedef struct {
    hx_prompt *prompt; /* [n] none is empty */
    hx_str *text;      /* [n] as given; of ids: {NULL, 0} unless decoded */
    int32_t n;
    bool list; /* given as a list of prompts */
} hx_prompts;

/* The field name of the body, in the call's arena. kinds: what it may hold; decode: ids
 * get their text too. */
int hx_prompts_read(hx_call *c, const char *name, int kinds, bool decode,
                    hx_prompts *out);
/* Ids of text. Past the context the count alone is right. */
int hx_prompts_tokenize(hx_call *c, const char *param, hx_str text, hx_prompt *out);
/* before and after as the model's own markers for filling in the middle want them. */
int hx_prompts_infill(hx_call *c, const char *param, hx_str before, hx_str after,
                      hx_prompt *out);

/* ---- toolset.c: tools of a request ----------------------------------------- */

/* Whether one of the tools has that name. */
bool hx_toolset_has(const hx_json *tools, hx_str name);
/* Sets the grammar that keeps the answer to calls which tools and tool_choice allow, or
 * bans calls. */
int hx_toolset_constrain(hx_call *c, hx_generate *g);
/* Whether a turn as a client gives it back, given, means what was sampled, was; it may
 * lack the reasoning. */
bool hx_toolset_same(hx_engine *e, const hx_reply_opt *opt, hx_prompt given,
                     hx_prompt was);

/* ---- calls.c: what turns with calls were sampled as ----------------------- */

typedef struct hx_calls hx_calls;

typedef struct {
    const hx_info *info; /* whose end ids end a turn */
    bool (*same)(void *ud, hx_prompt given, hx_prompt was);
    void *ud;
} hx_calls_opt;

int hx_calls_open(hx_calls **out, hx_err *err);
void hx_calls_close(hx_calls *m);
/* All of any thread. An answer that came after the ids `before`. */
void hx_calls_keep(hx_calls *m, hx_prompt before, hx_prompt answer);
/* Puts the turns of a rendered prompt back as they were sampled. */
int hx_calls_replay(hx_calls *m, const hx_calls_opt *opt, hx_ids *ids, hx_err *err);

/* ---- loop.c: answers that only repeat themselves -------------------------- */

typedef struct hx_loop hx_loop;
hx_loop *hx_loop_open(void); /* NULL: no memory */
void hx_loop_close(hx_loop *l);
/* One more token. true: what came is the same `period` tokens `times` times over. */
bool hx_loop_feed(hx_loop *l, int32_t id, int32_t *period, int32_t *times);

/* ---- dialects: api_*.c ---------------------------------------------------- */

int hx_openai_chat(hx_call *c);
int hx_openai_act(hx_call *c); /* on a running answer: end_thinking */
int hx_completions(hx_call *c);
int hx_sglang_generate(hx_call *c);
int hx_sglang_model_info(hx_call *c);
int hx_sglang_server_info(hx_call *c);
int hx_sglang_flush_cache(hx_call *c);
int hx_ollama_chat(hx_call *c);
int hx_ollama_generate(hx_call *c);
int hx_ollama_tags(hx_call *c);
int hx_ollama_ps(hx_call *c);
int hx_ollama_show(hx_call *c);
int hx_ollama_version(hx_call *c);
hx_problem_fn hx_ollama_write_problem;
int hx_embeddings(hx_call *c);
int hx_embeddings_ollama(hx_call *c);     /* /api/embed */
int hx_embeddings_ollama_one(hx_call *c); /* /api/embeddings, the older one */
int hx_misc_props(hx_call *c);
int hx_misc_apply_template(hx_call *c);
int hx_misc_openapi(hx_call *c);

/* Shared by both: usage and timings of the answers so far. */
typedef struct {
    int64_t n_prompt, n_cached, n_answer, n_reasoning;
    hx_miss miss; /* of the prompt that came last */
    int64_t miss_pos;
    hx_times times; /* of the answer that ended last */
    hx_expert_use experts;
} hx_openai_sum;
void hx_openai_add(hx_openai_sum *s, const hx_gen_event *ev, bool new_prompt);
void hx_openai_write_timings(hx_sb *b, const hx_openai_sum *s);
/* Appends the log-probabilities of a HX_GEN_TOKEN event to a list "{…},{…}". */
void hx_openai_add_logprob(hx_sb *b, hx_engine *e, const hx_gen_event *ev, int32_t n_top);
/* "prompt_progress":{…} as clients of llama.cpp read it, with eta_ms and queue. */
void hx_openai_write_progress(hx_sb *b, const hx_gen_progress *p);
/* What answers and chunks are wrapped in: {"id":…,"choices":[ and
 * ],"usage":…,"timings":…}. The first makes an id that begins with prefix. */
void hx_openai_write_head(hx_sb *b, hx_call *c, const char *prefix, const char *object,
                          hx_str model);
void hx_openai_write_tail(hx_sb *b, const hx_openai_sum *s);
/* Ends a chunk after its choices; sum: an answer is over with it, else NULL. */
void hx_openai_end_chunk(hx_sb *b, const hx_generate *g, const hx_openai_sum *sum);
/* As hx_server_end(): a stream ends with the sum, where it was asked for, and [DONE]. */
typedef struct {
    hx_sb *head; /* of every chunk, up to its choices; freed */
    const hx_generate *req;
    const hx_openai_sum *sum;
    void (*whole)(void *ud);
    void *ud;
} hx_openai_last;
int hx_openai_end(hx_call *c, int rc, const hx_openai_last *last);
extern const hx_stream_form hx_openai_stream, hx_responses_stream, hx_anthropic_stream,
    hx_ollama_chat_stream, hx_ollama_generate_stream;
/* The messages, tools and switches of a chat request as the template's variables. */
int hx_openai_vars(hx_call *c, hx_generate *g);

int hx_responses_create(hx_call *c);
int hx_responses_count(hx_call *c);
int hx_responses_retrieve(hx_call *c); /* also input_items */
int hx_responses_act(hx_call *c);      /* cancel */
int hx_responses_delete(hx_call *c);
int hx_anthropic_messages(hx_call *c);
int hx_anthropic_count(hx_call *c);
hx_problem_fn hx_anthropic_write_problem;

/* ---- turns.c: a conversation of another dialect as chat completions' ------ */

/* Opened, filled and freed by a dialect. Neighbouring pieces of the assistant become one
 * turn; anything else ends it. */
typedef struct {
    hx_call *c;
    hx_sb b; /* the chat request so far */
    int64_t n;
    hx_sb reasoning, content, calls; /* of the assistant's turn */
    bool open;
    char at[96]; /* what the dialect has in hand: "messages[3].content[0]" */
} hx_turns;

/* A field of chat completions, and what the dialect calls it. */
typedef struct {
    const char *from, *to;
} hx_rename;

void hx_turns_open(hx_turns *t, hx_call *c);
void hx_turns_free(hx_turns *t);
/* Problems with a field of what is in hand; the first as hx_params_refuse(), the second:
 * its value is no good, and why. */
int hx_turns_refuse(hx_turns *t, const char *field, const hx_json *found,
                    hx_json_type wanted, const char *expected);
int hx_turns_bad(hx_turns *t, const char *field, const char *why);
void hx_turns_say(hx_turns *t, const char *role, hx_str text); /* system or user */
void hx_turns_assistant(hx_turns *t, hx_str text);
void hx_turns_reasoning(hx_turns *t, hx_str text);
void hx_turns_call(hx_turns *t, hx_str id, hx_str name, hx_str args);
/* parts: what only the template understands, or NULL for text. */
void hx_turns_result(hx_turns *t, hx_str id, const hx_json *parts, hx_str text);
void hx_turns_end(hx_turns *t);
/* Members of the request after its messages; hx_turns_put() leaves out NULL; rest: all of
 * the body that own, a list up to NULL, does not name. */
void hx_turns_put(hx_turns *t, const char *name, const hx_json *value);
void hx_turns_rest(hx_turns *t, const char *const *own);
/* Reads the request into g as chat completions would. names ends with a NULL. */
int hx_turns_use(hx_turns *t, hx_generate *g, const hx_rename *names);
/* rc, and if that is a problem, its field by the dialect's name. */
int hx_turns_rename(hx_call *c, const hx_rename *names, int rc);

/* ---- blocks.c: an answer as reasoning, text and calls in turn ------------- */

typedef enum { HX_BLOCK_REASONING, HX_BLOCK_TEXT, HX_BLOCK_CALL } hx_block_kind;

typedef struct {
    hx_block_kind kind;
    char id[40], call_id[40]; /* the dialect's */
    hx_sb name, text;         /* text: a call's arguments, JSON */
    hx_sb logprobs;           /* the dialect's, as are */
    const void *tool;         /* which is called, and */
    size_t n_sent;            /* how much of text is sent */
} hx_block;

typedef struct {
    hx_block *block; /* [n] the last one is open or not */
    int32_t n;
    bool open, bad; /* bad: memory ran out */
} hx_blocks;

typedef struct {
    void (*open)(void *ud, int32_t i);
    void (*piece)(void *ud, int32_t i, hx_str text); /* already in the block's text */
    void (*close)(void *ud, int32_t i);
    void *ud;
} hx_blocks_sink;

void hx_blocks_take(hx_blocks *b, const hx_reply_event *ev, const hx_blocks_sink *sink);
void hx_blocks_end(hx_blocks *b, const hx_blocks_sink *sink);
void hx_blocks_free(hx_blocks *b);

/* ---- response_store.c: answers of /v1/responses kept for later ------------ */

#define HX_RESPONSES_MAX       1024
#define HX_RESPONSES_MAX_BYTES (64u << 20)

typedef struct {
    hx_str id, json;
} hx_item;

/* All thread-safe; what they read is copied to out. Without a response (or item) of that
 * id: HX_EARG. */
int hx_response_store_open(hx_responses **out, hx_err *err);
void hx_response_store_close(hx_responses *s);
/* A response has begun. parent: the id of the one it goes on from, or {NULL, 0}. body:
 * its object as it is now. gen: until finish, what cancel stops. */
int hx_response_store_begin(hx_responses *s, hx_str id, hx_str parent,
                            const hx_item *input, size_t n, hx_str body, hx_gen *gen);
/* Its output and object; the latter is head, the items and tail. */
void hx_response_store_finish(hx_responses *s, hx_str id, const hx_item *output, size_t n,
                              hx_str head, hx_str tail);
/* Returns when it has ended. */
int hx_response_store_cancel(hx_responses *s, hx_str id);
int hx_response_store_remove(hx_responses *s, hx_str id);
int hx_response_store_read(hx_responses *s, hx_str id, hx_sb *out);
/* "{…},{…}": all items of the conversation that ends with this response. HX_EBUSY: it
 * still runs. */
int hx_response_store_history(hx_responses *s, hx_str id, hx_sb *out);
int hx_response_store_item(hx_responses *s, hx_str id, hx_sb *out);
typedef struct {
    int64_t limit;
    bool newest_first;
    hx_str after; /* id of the item before the first, or {NULL, 0} */
} hx_item_page;
/* A list object of the items that a response went on from. HX_EFORMAT: after is none of
 * them. */
int hx_response_store_inputs(hx_responses *s, hx_str id, const hx_item_page *page,
                             hx_sb *out);

#endif
