/* engine.h - what the engine's files share: streams, the inbox, scheduler and sampler
 * state.
 *
 * One thread, the engine's, owns everything mutable about generation. Other threads reach
 * it through the inbox (submit, cancel) and read each stream's ring; engine.lock guards
 * both and nothing is computed under it. */
#ifndef HX_ENGINE_H
#define HX_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "hoist.h"
#include "model/model.h"
#include "text/text.h"

#define HX_RING_TOKENS     512  /* tokens that fit the ring of a stream */
#define HX_RING_BYTES_HIGH 8192 /* of text there: such a reader pauses its stream */
#define HX_TOKEN_BYTES     512  /* of one token; longer ones are refused at open */
#define HX_SCORE_ROWS      16   /* logits rows computed together when scoring */
#define HX_TOP_MAX         20   /* alternatives of a token that are reported */
#define HX_STOP_MAX        16   /* stop texts of a request */
#define HX_STOP_BYTES      256  /* of one stop text */
#define HX_PREFILL_ROWS    256 /* of a prefill chunk: whole blocks of the 64-token grid */
#define HX_CUT_MAX         48  /* states kept on the way through one prompt ... */
#define HX_SNAP_MAX        8   /* ... and inside one chunk of it */

/* ---- what runs next (sched_pick.c) ------------------------------------ */

/* What steps have cost, in microseconds; 0 where not seen. Moving averages. */
typedef struct {
    float step[HX_SPAN_MAX + 1];  /* a decode step, by rows */
    float alone[HX_SPAN_MAX + 1]; /* the same, while no prompt was being read */
    float *layer; /* [n_layer, n_block] a layer of a chunk, by layer and blocks - 1 */
    int64_t n_layer, n_block;
} hx_costs;

/* What there is to do, and how prefill and decode stand with each other. */
typedef struct {
    int32_t n_decode; /* streams that can take a token now */
    bool prefill;     /* a prompt waits to be read, or is in between layers */
    int64_t layer;    /* of the chunk under way that comes next */
    int64_t blocks;   /* of that chunk; 0: none is under way */
    int64_t left;     /* blocks of the prompt whose chunk would begin */
    float share;      /* see hx_options.decode_share */
    float credit_us;  /* what prefill may take now; below 0: it took more than its part */
    bool sliced;      /* since the last decode step a part of a prompt was read */
} hx_pick_state;

typedef enum { HX_PICK_NOTHING, HX_PICK_DECODE, HX_PICK_PREFILL } hx_pick_kind;

typedef struct {
    hx_pick_kind kind;
    int64_t blocks, layers; /* PREFILL: of the chunk; how many layers now */
} hx_pick;

/* One of several prompts to be read. */
typedef struct {
    int32_t priority;
    uint64_t turn; /* when it had its last chunk, or came */
} hx_pick_prompt;

hx_pick hx_sched_pick_next(const hx_costs *c, const hx_pick_state *s);
/* The prompt that gets the next chunk: highest priority, then longest without one. */
int64_t hx_sched_pick_prompt(const hx_pick_prompt *p, int64_t n);
/* A decode step or a slice was done: costs and credit follow. */
void hx_sched_pick_decoded(hx_costs *c, hx_pick_state *s, int32_t rows, float us);
void hx_sched_pick_read(hx_costs *c, hx_pick_state *s, int64_t layer, int64_t blocks,
                        bool full, float us);

/* ---- the device and its memory (engine_memory.c) ---------------------- */

typedef struct {
    uint64_t budget_bytes, slot_bytes, page_bytes;
    int64_t ctx_tokens; /* that must fit; 0: as many as do */
    bool fewer;         /* streams than are named, if that is better */
} hx_cache_want;

/* Sequence memory for info->max_streams streams, or for fewer where it may, so that their
 * states take half of the budget at most, or that one has the context that must fit. Sets
 * max_streams and ctx_tokens. Returns pages; 0: not enough. */
int64_t hx_engine_memory_fit(hx_info *info, const hx_cache_want *w);
/* Opens the device and all that lies in its memory. Errors: HX_EARG, HX_ENOMEM, HX_EUNSUP,
 * HX_EDEVICE, HX_EIO; what was opened stays for hx_close(). */
int hx_engine_memory_open(hx_engine *e, const hx_options *opt, hx_err *err);

/* ---- sampling state (sample.c) ---------------------------------------- */

/* Ids seen so far with their counts; only kept when a penalty asks for it. */
typedef struct {
    int32_t *id, *count; /* [n] */
    int32_t *at;         /* [n_vocab] index + 1 of an id, 0: not seen */
    int32_t n;
    bool on;
} hx_history;

/* Finds stop texts in the bytes of the answer and tells how much of them is certain. */
typedef struct {
    hx_str stop[HX_STOP_MAX];
    int32_t n_stop;
    char *held; /* [cap] bytes not yet certain */
    size_t n_held, cap;
} hx_stopper;

/* ---- streams ---------------------------------------------------------- */

#define HX_PRINT_FLOATS 16 /* logits of a row that stand for it */
#define HX_PRINT_CYCLE  4
#define HX_PRINT_SAME   24 /* steps without anything new that end a stream */

/* Whether a stream's logits still change (health.c). */
typedef struct {
    float print[HX_PRINT_CYCLE][HX_PRINT_FLOATS]; /* of the last steps */
    int32_t n, n_same; /* steps seen; the last so many had the logits of one before */
} hx_watch;

typedef enum { HX_SEQ_QUEUED, HX_SEQ_PREFILL, HX_SEQ_DECODE, HX_SEQ_ENDED } hx_seq_state;

typedef struct {
    int32_t token;
    float logprob;
    int32_t n_bytes; /* of its text; fewer than the token has when a stop text cut it */
    hx_choice top[HX_TOP_MAX];
} hx_out_token;

struct hx_stream {
    hx_engine *engine;
    hx_request req; /* arrays live in arena */
    hx_arena arena;
    /* Of hx_score(), in arena, else NULL; what it points to is the caller's. */
    const hx_score_args *score;
    bool left; /* the caller is gone with that; under engine->score_lock */

    /* the engine thread's */
    hx_seq_state state;
    hx_stream *next; /* in the inbox */
    int32_t slot;    /* -1: none */
    int32_t pages;   /* reserved; under lock beside */
    bool in_step;    /* takes part in the next decode step */
    uint64_t turn;   /* of the prompt's last chunk */
    int64_t told_us; /* of the last progress event */
    hx_watch watch;
    int32_t *token; /* [n_token, cap = n_tokens + max_new] prompt and answer */
    int64_t n_token, n_prompt, n_done; /* n_done: of token, computed */
    int64_t max_new;
    uint64_t order; /* of arrival; under lock beside */
    hx_history hist;
    hx_stopper stopper;
    hx_grammar *grammar; /* NULL: none; shared */
    hx_matcher *matcher;
    uint32_t *mask;                       /* [ceil(N / 32)] */
    bool grammar_on;                      /* the answer keeps to it now */
    bool thinking;                        /* think_end has not come yet */
    _Atomic bool end_thinking;            /* it shall be the next; any thread */
    hx_out_token pend[HX_STOP_BYTES + 8]; /* tokens held back for a stop text */
    int32_t n_pend;
    int32_t ban[64 + HX_STOP_MAX], n_ban; /* end ids */
    int64_t stalled_us;                   /* since when the ring is full; 0: it is not */
    uint64_t *decoded;                    /* bit c % 64 of [c / 64]: a decode row built
                                           * position c */
    hx_node *parked;                      /* preempted: where its state is */
    int64_t cut[HX_CUT_MAX];              /* positions where prefill leaves a state */
    int32_t n_cut;
    bool planned;    /* cut is filled: prefill has begun */
    float *last_row; /* [D] of the prompt, after the last norm: of what was kept, or to
                      * be kept with the state that is due */
    bool state_due;  /* the prompt has been read; its state is not kept yet */

    /* under engine->lock */
    hx_out_token *ring; /* [HX_RING_TOKENS] */
    char *ring_bytes;   /* [ring_bytes_cap] text of the tokens in the ring */
    size_t n_ring_bytes, ring_bytes_cap;
    int32_t n_ring;
    hx_event end; /* kind DONE or ERROR once ended */
    bool ended, cancelled, freed, progress;
    bool lost; /* end holds an error although the engine thread has not let go yet */
    hx_stream *all_next, **all_at; /* in engine->all */
    int64_t last_us;               /* of the last token */
    int32_t force[64], n_force, force_at;
    int64_t prefilled, generated, queue, cached, miss_pos;
    hx_miss miss;
    hx_times times;
    hx_expert_use experts;
    void (*ready)(void *ud);
    void *ready_ud;
    pthread_cond_t cond;

    /* the reader's: what the last event points to */
    int32_t *ev_token, *ev_end;
    float *ev_logprob;
    hx_choice *ev_top;
    char *ev_bytes;
};

/* ---- steps on their way ---------------------------------------------- */

/* What a decode step leaves for the host: shared memory. */
typedef struct {
    int32_t id[HX_SPAN_MAX];
    float logprob[HX_SPAN_MAX];
    hx_choice top[HX_SPAN_MAX][HX_TOP_MAX];
    float print[HX_SPAN_MAX][HX_PRINT_FLOATS];
} hx_landing;

/* A decode step between its launch and the reading of its tokens. What streams and slots
 * say of themselves changes when it has landed. */
typedef struct {
    hx_stream *row[HX_SPAN_MAX]; /* NULL: that one has ended; the row is nobody's */
    int32_t n, n_new;            /* rows; the first so many choose a token */
    hx_landing *to;
    uint64_t ticket;
    int rc; /* of the launch */
    hx_err err;
} hx_flight;

/* ---- engine ----------------------------------------------------------- */

typedef struct hx_grammars hx_grammars;
/* health.c's. What the watchdog reads is atomic; texts are under engine->lock. */
typedef struct {
    pthread_t thread;
    pthread_cond_t quit; /* with engine->lock: closing, or known */
    bool started;
    _Atomic int64_t beat_us;  /* of the last progress */
    _Atomic int64_t worst_us; /* longest time between two while there was work */
    _Atomic bool working, stalled, broken, corrupt, lost;
    char stall_text[160], broken_text[256], corrupt_text[256], lost_text[256];
    int64_t stall_us, canary_us; /* limits; canary_us 0: no canary */
    int64_t next_us, overdue_us; /* when the next canary may, must run */
    uint64_t sum;                /* of the known answer; 0: not yet known */
    bool known;                  /* under lock: the first canary has run */
    bool suspect;                /* the next canary is due at once, whoever waits */
    char *dump_dir;
    int32_t n_dump;
    pthread_mutex_t record_lock; /* guards these two */
    void *record;                /* FILE, or NULL */
    int64_t n_unrecorded;        /* answers, since writing has failed */
} hx_health;

/* scrub.c's: the thread that compares weights with their checksums owns it. */
typedef struct {
    pthread_t thread;
    pthread_cond_t quit; /* with engine->lock: closing */
    bool started, make;  /* make: the next pass makes the checksums */
    int64_t every_us;
    hx_sums *sums;
    char *dir;
    size_t piece;     /* bytes since the last pause ... */
    int64_t piece_us; /* ... which ended then */
} hx_scrub;

struct hx_engine {
    hx_info info;
    char name[256], arch[64];
    int32_t eos[32];
    hx_model *model;
    hx_dev *dev;
    hx_cache *cache;
    hx_graph *decode, *prefill;
    int64_t prefill_rows; /* of a chunk, at most */
    hx_tok *tok;          /* NULL: the folder has no tokenizer */
    hx_jinja *chat;       /* NULL: no template */
    hx_vocab *vocab;      /* of tok, for grammars */
    hx_grammars *grammars;

    pthread_mutex_t lock;
    pthread_mutex_t score_lock; /* held while rows go to the caller of hx_score() */
    pthread_cond_t wake;
    pthread_t thread;
    bool started;
    _Atomic bool nudge; /* inbox or a cancel flag has something new */
    hx_health health;
    hx_scrub scrub;

    /* under lock */
    hx_stream *inbox, *inbox_last;
    hx_stream *all; /* submitted and not ended */
    int64_t n_waiting, n_running;
    int64_t client_queue; /* does not change */
    bool closing;
    hx_experts experts; /* of the store, as of the last step */
    int64_t steps, preempted;
    uint64_t next_order;
    double service_us;                /* from a start to its end; 0: not known */
    double prefill_rate, decode_rate; /* tokens/s */

    /* the engine thread's */
    int32_t client_streams;
    hx_stream **wait; /* [max_queue + max_streams] by priority, then arrival; those that
                       * were preempted too */
    int64_t n_wait;
    hx_stream **run; /* [max_streams] */
    int32_t n_run;
    int32_t pages_reserved;
    hx_stream *chunk; /* whose prefill chunk is between layers */
    int64_t chunk_layer, chunk_rows;
    double chunk_us;
    hx_costs costs;
    hx_pick_state pick;
    hx_pick_prompt *prompt; /* [max_streams] */
    uint64_t next_turn;
    hx_batch chunk_batch;
    hx_span chunk_span;
    hx_sample_row *row; /* [max_streams] */
    hx_span *span;      /* [max_streams] */
    int32_t *id;        /* [max_streams] */
    uint64_t *draw;     /* [max_streams] as in hx_batch */
    hx_buf out_id, out_logprob, out_top, out_scratch;
    hx_flight flight[2]; /* decode steps that have been launched, oldest first */
    int32_t n_flight;
    bool run_ahead;   /* the next step is launched before the last one's tokens are read:
                      * where the device works on its own */
    hx_buf landed[2]; /* hx_landing, of flights in turn */
    uint64_t n_launched;
    int64_t lap_us;                    /* when what was last charged ended */
    float *score_logit, *score_hidden; /* [HX_SCORE_ROWS, N], [HX_SCORE_ROWS, D] */
    struct hx_reuse *reuse;
    hx_op_time times[HX_OP_TIMES]; /* hx_dev.times */
    _Atomic bool profile;
};

void *hx_sched_run(void *engine); /* sched.c: the engine thread */
/* The layers of a decode step, and the logits of all its rows; no flight may be on. */
int hx_sched_decode(hx_engine *e, const hx_batch *b, hx_err *err);
/* Waits for decode steps that have been launched and hands their tokens out. */
void hx_sched_land(hx_engine *e);
/* What n more requests would wait, in microseconds. Under lock. */
double hx_sched_wait_us(const hx_engine *e, int64_t n);
/* The reader is so far behind that the stream pauses. Under lock. */
bool hx_sched_ring_high(const hx_stream *s);
void hx_engine_stream_destroy(hx_stream *s); /* engine.c */
void hx_engine_wake_reader(hx_stream *s);    /* under lock */
/* The engine thread looks at what is new. Under lock. */
void hx_engine_nudge(hx_engine *e);

/* health.c */
int hx_health_open(hx_engine *e, const hx_options *opt, hx_err *err);
/* The watchdog; without a thread for it there is none. */
void hx_health_start(hx_engine *e);
/* Returns when the engine thread knows the known answer; an error when there is none. */
int hx_health_wait_known(hx_engine *e, hx_err *err);
void hx_health_close(hx_engine *e);
/* The engine thread made progress. Cheap: between layers too. */
void hx_health_beat(hx_engine *e);
void hx_health_work(hx_engine *e, bool work); /* there is something to do, or nothing */
/* Runs the known answer when it is time or something looked wrong and a slot is free. */
void hx_health_canary(hx_engine *e, bool idle);
int64_t hx_health_due_us(const hx_engine *e); /* until the next; -1: none */
/* Why answers cannot be had or trusted, as a sentence, and in *name as a word; NULL when
 * all is well. Under lock. */
const char *hx_health_fault(const hx_engine *e, const char **name);
/* The device is lost, for good: every request has its error. Any thread. */
void hx_health_lost(hx_engine *e, const hx_err *err);
/* Weights in memory are no longer what they were: for good. Any thread. */
void hx_health_corrupt(hx_engine *e, const hx_err *err);
/* Row r of logits gave the stream's next token. An error when they change no more. */
int hx_health_watch(hx_stream *s, const float *print, hx_err *err);
/* The stream's logits were no numbers, or did not change: says so where asked. */
void hx_health_suspect(hx_stream *s, const hx_err *err);
/* A line for the record, when there is one. The stream has ended and is nobody else's. */
void hx_health_record(const hx_stream *s);

/* scrub.c: weights in host memory against their checksums, where opt asks for it. Errors:
 * HX_EARG: there are none, or a name is too long; HX_EFORMAT, HX_EIO, HX_ENOMEM. */
int hx_scrub_start(hx_engine *e, const hx_options *opt, hx_err *err);
void hx_scrub_close(hx_engine *e);

/* grammars.c: *out stays until it is dropped as often as it was taken. Errors as
 * hx_grammar_open(). Thread: any. */
int hx_grammars_open(hx_grammars **out, hx_err *err);
void hx_grammars_close(hx_grammars *all);
int hx_grammars_take(hx_grammars *all, const hx_vocab *v, hx_grammar_kind kind,
                     hx_str source, hx_grammar **out, hx_err *err);
void hx_grammars_drop(hx_grammars *all, hx_grammar *g);

/* What reuse.c and reuse_disk.c share: kept prefixes. */
typedef struct hx_reuse {
    hx_prefix_tree *tree;
    hx_prefix mode;
    uint64_t ram_bytes;
    int32_t role[8], n_role; /* ids that open a message */

    struct hx_asked *first; /* calls of other threads; under lock */
    pthread_cond_t answered;

    hx_snap_at snap[HX_SNAP_MAX]; /* of the chunk between layers */
    hx_blob *snap_blob[HX_SNAP_MAX];
    int32_t n_snap;

    _Atomic int64_t pages_kept, states, ram, disk; /* for status */

    hx_park *park;           /* NULL: nothing goes to disk */
    _Atomic bool disk_ready; /* something to poll */
    int64_t retry_us;        /* nothing is written before: a budget is used up */
    int32_t n_reading;
    struct {
        hx_node *node, *from; /* NULL: nothing is being written; the file before */
        hx_blob **page;       /* [n_page] */
        int64_t n_page, n_have;
        bool queued, unwanted; /* with the thread; forgotten meanwhile */
        bool has_hidden;       /* the state that is written has its last row */
    } write;
} hx_reuse;

/* reuse_disk.c */
int hx_reuse_disk_open(hx_engine *e, const hx_options *opt, hx_err *err);
void hx_reuse_disk_close(hx_engine *e); /* writes what is not written yet */
void hx_reuse_disk_tick(hx_engine *e);
int64_t hx_reuse_disk_due_us(const hx_engine *e);
void hx_reuse_disk_forget(hx_engine *e);
void hx_reuse_disk_used(hx_engine *e, const hx_node *n);
/* Sees to it that all of n gets into memory. False: it cannot. */
bool hx_reuse_disk_load(hx_engine *e, hx_node *n);

/* reuse.c: kept prefixes. Engine thread, but for ask and status. */
int hx_reuse_open(hx_engine *e, const hx_options *opt, hx_err *err);
void hx_reuse_close(hx_engine *e);
typedef enum {
    HX_ADMIT_NO,      /* no slot, or too few pages */
    HX_ADMIT_READING, /* later: its state is being read from disk */
    HX_ADMIT_YES
} hx_admit;

/* Gives s a slot, with what is kept of its prompt; n_done says how much. n_pages: to be
 * reserved now, those of what is kept among them. */
hx_admit hx_reuse_admit(hx_engine *e, hx_stream *s, int32_t n_pages);
/* Pages that can still be promised: neither held nor reserved by running streams. */
int64_t hx_reuse_pages_left(const hx_engine *e);
/* Before the first chunk: looks again, because another request may have left more by now.
 * Afterwards n_done may be n_prompt: then there are logits, as after a chunk. */
void hx_reuse_begin(hx_engine *e, hx_stream *s);
int hx_reuse_logits(hx_engine *e, hx_stream *s, hx_err *err);
/* How many of max rows the next chunk may have: it ends on the grid. */
int64_t hx_reuse_rows(const hx_stream *s, int64_t max);
/* The chunk of b begins, s's only: says which states to keep on the way. */
void hx_reuse_chunk_begin(hx_engine *e, hx_stream *s, hx_batch *b);
/* n_done has moved on by a chunk; at the prompt's end, after its logits. */
void hx_reuse_chunk_end(hx_engine *e, hx_stream *s);
/* Before decode rows: keeps the states of prompts just read, whose first token is out. */
void hx_reuse_settle(hx_engine *e);
/* A decode row built the last of n_done. */
void hx_reuse_decoded(hx_stream *s);
/* The stream leaves its slot, or where it is parked; whole: its state may serve others. */
void hx_reuse_end(hx_engine *e, hx_stream *s, bool whole);
/* Moves a running stream's state aside, so that it can be admitted again and go on with the
 * same bits; its slot is gone then. False: no room; it still has all it had. */
bool hx_reuse_park(hx_engine *e, hx_stream *s);
/* Once per step: what other threads ask for, writing to disk. */
void hx_reuse_tick(hx_engine *e);
/* Under lock: hx_now_us() when the next tick is due though there is no other work; 0: now,
 * INT64_MAX: never. */
int64_t hx_reuse_due_us(const hx_engine *e);
void hx_reuse_status(const hx_engine *e, hx_status *out);

/* sample.c */
int hx_sample_open(hx_stream *s, hx_err *err);
void hx_sample_close(hx_stream *s);
void hx_sample_seen(hx_history *h, int32_t id, bool answer);
bool hx_sample_is_end(const hx_stream *s, int32_t id); /* an id that ends the answer */
/* Fills *row for the stream's next token; ahead: for the one after it. */
int hx_sample_row_of(hx_stream *s, bool ahead, hx_sample_row *row, hx_err *err);
/* What is chosen after the next token does not hang on which one that is but through the
 * model. */
bool hx_sample_is_free(const hx_stream *s);
/* What comes instead of the token chosen, id: the end of reasoning, where that is due. */
int32_t hx_sample_settle(hx_stream *s, int32_t id);
/* The stream's next token is id: its grammar moves on, begins or is over. */
int hx_sample_follow(hx_stream *s, int32_t id, hx_err *err);
/* Adds the bytes of one more token. Returns the index of the stop text found, or -1;
 * *n_sure gets how many of all held bytes are certain to be shown (all before the stop
 * text when found). */
int32_t hx_sample_stop(hx_stopper *st, hx_str bytes, size_t *n_sure);
void hx_sample_release(hx_stopper *st, size_t n); /* the first n held bytes were shown */

#endif
