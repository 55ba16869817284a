/* hoist.h - load a mixture-of-experts model and generate text with it.
 *
 *   hx_engine   a loaded model on its devices. Safe to use from any thread.
 *   hx_stream   one submitted request. Used by one thread at a time, except
 *               hx_cancel(), hx_force() and hx_end_thinking(), which any
 *               thread may call.
 *
 * Functions that can fail return 0 or a negative HX_E code and, when they take
 * an hx_err, a sentence a user can act on. Strings are UTF-8 with a length;
 * they need no final NUL. Nothing here exits, prints or installs handlers. */
#ifndef HOIST_H
#define HOIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HX_VERSION "0.1.0"

/* ---- errors ---------------------------------------------------------- */

#define HX_ERRORS(X)                                                                     \
    X(EARG, -1, "invalid argument")                                                      \
    X(EFORMAT, -2, "malformed input")                                                    \
    X(EIO, -3, "input/output error")                                                     \
    X(ENOMEM, -4, "memory budget exceeded")                                              \
    X(EDEVICE, -5, "device failure")                                                     \
    X(ELIMIT, -6, "limit exceeded")                                                      \
    X(EUNSUP, -7, "not supported")                                                       \
    X(ECANCEL, -8, "cancelled")                                                          \
    X(EBUSY, -9, "busy")                                                                 \
    X(ELOST, -10, "device lost: only a new process can go on")

enum {
    HX_OK = 0,
#define X(name, value, text) HX_##name = value,
    HX_ERRORS(X)
#undef X
};

typedef struct {
    int code;      /* HX_OK or one of HX_E* */
    char msg[256]; /* "" when code is HX_OK */
} hx_err;

const char *hx_strerror(int code);

/* ---- engine ---------------------------------------------------------- */

typedef struct hx_engine hx_engine;
typedef struct hx_stream hx_stream;

typedef struct {
    const char *p;
    size_t n;
} hx_str; /* borrowed bytes */

typedef enum { HX_KV_BF16, HX_KV_F32, HX_KV_FP8 } hx_kv;

/* Which kept states a prompt may go on from: any; only those that prefill built, so that
 * answers never depend on what was served before; none. */
typedef enum { HX_PREFIX_REUSE, HX_PREFIX_STRICT, HX_PREFIX_OFF } hx_prefix;

/* Loading progress; done and total in bytes. Called on the thread of hx_open(). */
typedef void hx_load_fn(void *ud, uint64_t done, uint64_t total);

/* A zeroed struct with model_dir set is a good start. Strings are copied. */
typedef struct {
    const char *model_dir; /* folder with config.json, or "synthetic:NAME[,layers=N]" */
    const char *device;  /* "cpu"; "cuda", "cuda:1"; "ref": scalar double reference, slow;
                          * NULL: cuda where there is a GPU and code for one, else cpu */
    const char *cpu_isa; /* NULL: the best there is; "avx512", "avx2", "scalar" */
    const char *cpus;    /* NULL: all allowed; or a list like "0-7,16" */
    int32_t n_threads;   /* 0: one for each of cpus, or of those allowed */
    int64_t ctx_tokens;  /* longest sequence; 0 takes the model's, within the budget */
    int32_t max_streams; /* sequences decoded together, 1..64; 0 is 8, or as many as
                          * sequence memory has room for */
    int64_t max_queue;   /* requests waiting for a place; 0 is 256 */
    uint64_t cache_bytes; /* sequence memory; 0 takes what max_streams need, at most a
                           * quarter of the memory this process may use (half of what
                           * weights leave, if that is less), or of what weights leave of
                           * a GPU's (more for ctx_tokens) */
    hx_kv kv;             /* how latents are kept */

    /* a GPU beside host memory */
    const char *mode; /* NULL or "auto": every lane; "gpu-only": no expert on the CPU */
    uint64_t vram_bytes; /* GPU memory to use; 0: what is free. On the device cpu: an
                          * arena that stands for it, to see what a GPU would do */
    uint64_t ram_bytes;  /* host memory that experts may take; 0: what is left */
    float expert_us[5];  /* instead of measured costs, where the first is not 0: an expert
                          * in GPU memory, over the link, on the CPU, there each row more
                          * (0 us on the CPU: none there), and the post to it */

    /* kept prefixes */
    hx_prefix prefix;
    uint64_t park_ram_bytes;  /* states of idle conversations; 0: an eighth of the memory
                               * this process may use, at most half of what weights leave
                               * and 16 GiB */
    const char *park_dir;     /* NULL: none go to disk */
    uint64_t park_disk_bytes; /* most that park_dir holds; 0: 32 GiB */
    uint64_t park_day_bytes;  /* most written to it on a day (UTC); 0: eight times that */

    /* how decoding and reading prompts share the machine */
    float decode_share; /* 0..1 of its rate that a running answer keeps beside a prompt
                         * being read; 0: 0.5 */
    bool no_canary;     /* no check of a known answer at start and when idle */
    int64_t canary_ms;  /* between such checks of an idle engine; 0: 5 minutes */
    int64_t stall_ms;   /* work without progress for so long, and twice the longest pause
                         * seen, is a fault; 0: 10 s */
    int32_t client_streams; /* of one hx_request.client decoded together; 0: no limit */
    int64_t client_queue;   /* of one client waiting; 0: no limit */
    const char *dump_dir; /* NULL, or where ids and settings of broken answers are kept */
    const char *record;   /* NULL, or a file that gets a line per answer, for replays */
    const char *trace;    /* NULL, or a file that gets what routers pick in decode steps
                           * (model/trace.h); only where a GPU cannot hold all experts */
    int64_t verify_ms; /* weights in host memory are compared with their checksums in the
                        * background, a pass so long after the last began; 0: never */

    hx_load_fn *on_load; /* may be NULL */
    void *on_load_ud;
} hx_options;

typedef struct {
    const char *name, *arch;  /* borrowed from the engine */
    const char *reply_format; /* how replies mark reasoning and tool calls; see text.h */
    int64_t ctx_tokens, ctx_trained_tokens;
    int32_t n_vocab; /* rows of the output matrix */
    int32_t n_token; /* ids that name a token; ids above are never sampled */
    int32_t n_layer, n_expert, n_expert_active;
    int32_t width; /* of a hidden state; see hx_score_args */
    int32_t max_streams;
    int64_t max_queue;
    const int32_t *eos; /* [n_eos] ids that end an answer */
    int32_t n_eos;
    float temperature, top_p; /* the model's own defaults */
    int32_t top_k;            /* 0 is all */
    uint64_t n_param, weight_bytes, cache_bytes, work_bytes;
    int64_t chunk_tokens;  /* of a prompt that are read at once, at most */
    uint64_t token_bytes;  /* of sequence memory that a token of context takes */
    uint64_t device_bytes; /* of the device's memory, routed experts left out */
    uint64_t park_ram_bytes, park_disk_bytes; /* budgets of what is kept; 0: nothing is */
    const char *device;                       /* "cpu (avx2, 2 threads)" */
} hx_info;

/* Opens a model. Errors: HX_EARG, HX_EFORMAT (names file and tensor), HX_EIO,
 * HX_ENOMEM (with the arithmetic), HX_EUNSUP. On failure *out is NULL. */
int hx_open(hx_engine **out, const hx_options *opt, hx_err *err);
void hx_close(hx_engine *e); /* NULL is fine; all its streams must have been freed */
void hx_get_info(const hx_engine *e, hx_info *out);

/* ---- text ------------------------------------------------------------ */

/* Both write at most cap items and return how many the full answer has, so a
 * caller may ask with cap 0 first. Negative is an HX_E code. special: spelled-out
 * added tokens become ids. Models without a tokenizer answer HX_EUNSUP. */
int64_t hx_tokenize(hx_engine *e, hx_str text, bool special, int32_t *out, int64_t cap);
int64_t hx_detokenize(hx_engine *e, const int32_t *tok, int64_t n, char *out,
                      int64_t cap);

/* The bytes of one token, borrowed from the engine; {NULL, 0} where the id has none.
 * *special, when not NULL, tells whether plain decoding drops it. */
hx_str hx_token_bytes(const hx_engine *e, int32_t id, bool *special);

/* The id of the added token spelled text, or -1. */
int32_t hx_token_id(const hx_engine *e, hx_str text);

typedef struct {
    bool official; /* text of a message that spells a special token becomes that token, as
                    * the official implementation does; default: it stays text */
} hx_render_opt;

/* Renders the model's chat template over a JSON object {"messages": [...],
 * "tools": [...], "add_generation_prompt": true, ...} to token ids. *out
 * ([*n_out]) is freed with hx_free(). opt may be NULL. text, when not NULL, gets
 * the rendered text, also freed with hx_free().
 * Errors: HX_EFORMAT (not JSON; the template's own complaint), HX_ELIMIT, HX_EUNSUP. */
int hx_render(hx_engine *e, hx_str json, const hx_render_opt *opt, int32_t **out,
              int64_t *n_out, char **text, hx_err *err);

/* ---- generation ------------------------------------------------------ */

typedef struct {
    int32_t token;
    float bias;
} hx_bias;

/* Encoded media of a prompt. tokens holds one placeholder id for each, in order. */
typedef enum { HX_MEDIA_IMAGE, HX_MEDIA_VIDEO } hx_media_kind;

typedef struct {
    hx_media_kind kind;
    hx_str bytes; /* PNG, JPEG, WebP; MP4 */
} hx_media;

/* What an answer may be: text/grammar.h says what each kind reads. */
typedef enum {
    HX_GRAMMAR_NONE,
    HX_GRAMMAR_JSON,        /* any JSON object */
    HX_GRAMMAR_JSON_SCHEMA, /* a document of this schema */
    HX_GRAMMAR_REGEX,       /* all of it matches */
    HX_GRAMMAR_EBNF,        /* GBNF rules, from "root" on */
    HX_GRAMMAR_CHOICE,      /* one of a JSON list of strings */
    HX_GRAMMAR_TOOLS        /* calls of tools, as the model marks them up */
} hx_grammar_kind;

/* Zero means off unless said otherwise. All arrays are copied by hx_submit(). */
typedef struct {
    const int32_t *tokens; /* [n_tokens] the prompt, at least one */
    int64_t n_tokens;
    int64_t max_new;    /* 0: up to the end of the context */
    int64_t min_new;    /* no end id is sampled before */
    float temperature;  /* 0 is greedy */
    float top_p, min_p; /* 0 or 1: off */
    int32_t top_k;
    float repeat_penalty;                      /* 0 or 1: off; over prompt and answer */
    float presence_penalty, frequency_penalty; /* over the answer */
    uint64_t seed;       /* same seed, same tokens, whatever else is served */
    bool want_logprobs;  /* log-probability of each chosen token */
    int32_t n_top;       /* 0..20 alternatives beside it */
    const hx_bias *bias; /* [n_bias] added to logits; -100 and below bans */
    int32_t n_bias;
    const hx_str *stop; /* [n_stop] texts that end the answer; never shown */
    int32_t n_stop;
    const int32_t *stop_ids; /* [n_stop_ids] beside the model's end ids */
    int32_t n_stop_ids;
    bool ignore_eos;     /* end ids are neither sampled nor stop */
    int32_t priority;    /* larger runs first */
    uint64_t client;     /* whose limits count; 0: nobody's */
    int64_t deadline_ms; /* from submit; 0 is none; then HX_ELIMIT */
    bool progress;       /* HX_EV_PROGRESS events while waiting and reading */
    bool pin;      /* the state after this prompt is kept until hx_unpin() or the end */
    bool no_store; /* nothing of this request is kept for later ones */
    const hx_media *media; /* [n_media]; HX_EUNSUP where the model sees none */
    int32_t n_media;
    hx_grammar_kind grammar_kind; /* the answer keeps to grammar ... */
    hx_str grammar;
    int32_t grammar_after; /* ... from after this id on ("</think>"); 0: from the start */
    int32_t grammar_at;    /* ... or from this id on, which is part of it ("<tool_call>");
                            * 0: none */
    bool grammar_lazy;     /* only from grammar_at on, whenever it comes */
    bool grammar_again;    /* lazy: what follows a complete grammar is free again */
    int32_t think_end; /* the answer begins with reasoning, which this id ends; 0: with
                            * none */
    int64_t think_max; /* tokens of reasoning before think_end is forced; 0: no bound */
    const int32_t *forced; /* [n_forced] the answer begins with these, whatever would be
                            * sampled; an end id among them does not end it */
    int64_t n_forced;
} hx_request;

typedef enum { HX_EV_PROGRESS, HX_EV_TOKENS, HX_EV_DONE, HX_EV_ERROR } hx_event_kind;
typedef enum {
    HX_STOP_NONE,
    HX_STOP_EOS,
    HX_STOP_TEXT,
    HX_STOP_LENGTH,
    HX_STOP_CANCEL
} hx_stop;

typedef struct {
    int32_t token;
    float logprob;
} hx_choice;

/* Why not more of a prompt was taken from what earlier requests left; hx_event.miss_pos
 * says from which token on. */
typedef enum {
    HX_MISS_NONE,     /* all of it was */
    HX_MISS_NEW,      /* nothing kept goes on from there: a new prompt, or a new turn */
    HX_MISS_DIFFERS,  /* what is kept has another token there */
    HX_MISS_EVICTED,  /* it was kept, but memory was short */
    HX_MISS_NO_STATE, /* pages are known further on, no state to go on from is */
    HX_MISS_OFF       /* prefix off, or a request that does not ask */
} hx_miss;

const char *hx_miss_name(hx_miss m); /* "new", "differs", "evicted", "no state", "off" */

/* Times are microseconds of hx_now_us(); 0 where not reached. */
typedef struct {
    int64_t queued_us, started_us, first_us, done_us;
} hx_times;

/* Experts of a request's decode steps, those of others in the same steps among them, as in
 * hx_experts; zeros where none can be missing. */
typedef struct {
    int64_t here, link, lane, ahead;
    int64_t wait_us;
} hx_expert_use;

/* Pointers are valid until the next call on the stream. */
typedef struct {
    hx_event_kind kind;
    const int32_t *tokens; /* [n_tokens] generated since the last event; end ids are
                            * not among them */
    int32_t n_tokens;
    hx_str bytes;         /* their bytes: whole tokens that are certain not to be part
                           * of a stop text, but for the last before one, which is cut */
    const int32_t *end;   /* [n_tokens] where each token's bytes end in bytes */
    const float *logprob; /* [n_tokens], or NULL */
    const hx_choice *top; /* [n_tokens][n_top], or NULL */
    hx_stop stop;         /* when DONE */
    int32_t stop_index;   /* which stop text, or the end id; else -1 */
    int64_t prompt, cached, generated; /* tokens, so far */
    int64_t prefilled;                 /* of prompt */
    int64_t queue;                     /* requests ahead of this one; 0 when it runs */
    int64_t eta_ms;   /* to the first token, from measured rates; -1: not known */
    int64_t miss_pos; /* first token that could not be had, by miss */
    hx_miss miss;
    hx_times times;
    hx_expert_use experts;
    hx_err err; /* when ERROR */
} hx_event;

/* Errors: HX_EARG (the sentence names the field), HX_ELIMIT (prompt too long:
 * both numbers), HX_EBUSY (queue full). Thread: any. */
int hx_submit(hx_engine *e, const hx_request *req, hx_stream **out, hx_err *err);

/* Waits up to timeout_ms (-1: for ever). 1: *ev is filled; 0: nothing came.
 * After DONE or ERROR it returns the same event again. */
int hx_next(hx_stream *s, hx_event *ev, int timeout_ms);

/* Calls fn(ud), mostly from the engine thread, whenever hx_next() would return 1; fn may
 * only wake somebody and must not call hx_ functions. For servers that wait on many
 * streams at once. */
void hx_on_ready(hx_stream *s, void (*fn)(void *ud), void *ud);

/* The next n sampled tokens are replaced by these (to close reasoning, say). */
int hx_force(hx_stream *s, const int32_t *tokens, int32_t n, hx_err *err);

/* Ends reasoning: the next token is think_end, unless reasoning is over. Any thread. */
void hx_end_thinking(hx_stream *s);

void hx_cancel(hx_stream *s);
void hx_stream_free(hx_stream *s); /* cancels if still running */

/* ---- scoring --------------------------------------------------------- */

/* One forward pass over tokens[n]; rows are positions from .. n-1. Any output may
 * be NULL. Waits its turn like a request does. Errors as hx_submit(). */
typedef struct {
    const int32_t *tokens;
    int64_t n_tokens, from;
    float *logits;      /* [n - from, n_vocab] */
    float *logprob;     /* [n - from] log p(tokens[i+1] | tokens[..i]); last is 0 */
    hx_choice *top;     /* [n - from, n_top] most likely next tokens */
    int32_t n_top;      /* 0..20 */
    const int32_t *ids; /* [n_ids] log-probabilities asked for */
    int32_t n_ids;
    float *id_logprob; /* [n - from, n_ids] */
    float *hidden;     /* [n - from, width] after the last norm */
} hx_score_args;

int hx_score(hx_engine *e, const hx_score_args *a, hx_err *err);

/* ---- kept prefixes ---------------------------------------------------- */

/* Lets go of what a request with pin kept: its prompt. Errors: HX_EARG: there is none;
 * HX_EDEVICE: the engine makes no progress. */
int hx_unpin(hx_engine *e, const int32_t *tokens, int64_t n, hx_err *err);

/* Drops every kept prefix, pinned and on disk too, but for what running requests use.
 * Returns how many states went, or HX_EDEVICE: the engine makes no progress. */
int64_t hx_forget(hx_engine *e, hx_err *err);

/* How many conversations of n_tokens can be kept so that each goes on without reading most
 * of itself again: with their pages in sequence memory, in host memory beside those, and on
 * disk. */
typedef struct {
    int64_t here, in_ram, on_disk;
} hx_fit;

hx_fit hx_cache_fit(hx_engine *e, int64_t n_tokens);

/* ---- observation ----------------------------------------------------- */

typedef struct {
    int64_t running, waiting;  /* requests now */
    int64_t pages, pages_used; /* sequence memory, 64-token pages */
    int64_t pages_kept;        /* of pages: only for later requests, given up on demand */
    int64_t states;            /* kept states, those on disk too */
    uint64_t ram_bytes, disk_bytes; /* of states and parked pages */
    int64_t steps;                  /* engine steps so far: moves while it works */
    int64_t preempted; /* times that a running request gave its memory back */
    int64_t wait_ms;   /* that one more request would wait, from measured times */
    double prefill_rate, decode_rate; /* tokens per second of work on them; 0: unknown */
    /* NULL, or why answers cannot be had or trusted: "stalled", "memory", "canary", or for
     * good: "device" */
    const char *fault;
    char fault_text[256]; /* a sentence, while fault is set */
} hx_status;

void hx_get_status(hx_engine *e, hx_status *out);

/* Routed experts beside a GPU that cannot hold them all; zeros elsewhere. Counts are
 * distinct experts of a layer and step, in decode steps; bytes follow from them. */
typedef struct {
    int32_t n_slot, n_expert; /* places in GPU memory; experts of all layers */
    uint64_t expert_bytes;    /* of one */
    double us[5];             /* costs, as hx_options.expert_us */
    int64_t steps, picks;     /* picks: before any is shared */
    int64_t here, link, lane; /* read in GPU memory, over the link, computed on the CPU */
    int64_t pushed, evicted;
    int64_t wait_us, lane_us; /* the GPU waiting for the CPU's experts; the CPU on them */
    uint64_t push_bytes, stage_bytes; /* copied for decode, and for prompts */
    int64_t ahead; /* computed where they had been fetched to before they were picked */
    int64_t predicted, predicted_right; /* missing ones that fetches named; picked then */
    uint64_t fetch_bytes, vain_bytes;   /* of fetches when their layer picked; no use */
    int64_t jobs, awaited, post_us; /* posted to the CPU; answers the GPU waited for, and
                                     * how long after posting less the CPU's own time */
    int64_t busy_us;                /* of layers with posts, from picks to answers */
    /* Ceilings, measured at open: host memory while GPU and CPUs read it, the GPU's when it
     * copies (both ways count); 0: not measured. */
    double host_gbs, copy_gbs;
    uint64_t rest_bytes; /* that every step reads in GPU memory beside experts */
} hx_experts;

void hx_get_experts(hx_engine *e, hx_experts *out);

/* What a device's operations take, by kind. While this is on (switched while no request
 * runs, which sets it to zero) each is waited for, before and after: decode steps are as slow
 * as that. */
#define HX_OP_TIMES 32
typedef struct {
    const char *name; /* NULL: no such operation has run */
    int64_t calls;
    double us;
} hx_op_time;

void hx_profile(hx_engine *e, bool on);
/* Call when the requests have ended. */
void hx_get_profile(hx_engine *e, hx_op_time out[HX_OP_TIMES]);

typedef enum { HX_AT_QUEUE, HX_AT_PREFILL, HX_AT_DECODE } hx_stage;

/* A request that waits or runs; ids tell them apart, queue is as in hx_event. */
typedef struct {
    uint64_t id, client;
    hx_stage stage;
    int32_t priority;
    int64_t prompt, cached, prefilled, generated, max_new, queue;
    hx_times times;
} hx_stream_info;

/* Writes at most cap of them and returns how many there are. */
int64_t hx_get_streams(hx_engine *e, hx_stream_info *out, int64_t cap);
int64_t hx_metrics(hx_engine *e, char *out, int64_t cap); /* Prometheus text */
void hx_on_log(void (*fn)(void *ud, int level, const char *line), void *ud);
int64_t hx_now_us(void); /* monotonic */
void hx_free(void *p);

#ifdef __cplusplus
}
#endif
#endif
