/* store.h - the expert store: routed experts once in host memory, the often picked ones
 * also in slots of device memory; who runs which (op plan); what moves when.
 *
 * Decode: hx_store_plan() per layer, hx_store_end() per step. Prefill: hx_store_lend() per
 * chunk, hx_store_prefill() per layer. Everything is called by the engine thread. */
#ifndef HX_STORE_H
#define HX_STORE_H

#include "dev/dev.h"
#include "model/clock.h"
#include "model/trace.h"

struct hx_model;

typedef enum { HX_MODE_AUTO, HX_MODE_GPU_ONLY } hx_store_mode;

typedef struct {
    hx_store_mode mode;
    uint64_t slot_bytes;    /* device memory for slots */
    uint64_t ram_bytes;     /* most host memory that experts may take; 0: what is left */
    int64_t max_rows;       /* decode rows in a step */
    const char *isa, *cpus; /* of the CPU lane, as in hx_dev_opt */
    int32_t n_threads;      /* of it; 0: one for each CPU */
    hx_rates rates;         /* here_us > 0: these, instead of measured ones */
    const char *trace;      /* NULL, or a file that gets what is picked; see trace.h */
} hx_store_opt;

typedef struct hx_store {
    struct hx_model *model;
    hx_dev *dev;
    int64_t n_layer, n_expert, n_active, max_pick;
    int32_t n_moe;        /* layers with experts */
    size_t record_bytes;  /* of one expert */
    uint64_t rest_bytes;  /* what a step reads beside experts */
    const uint8_t **home; /* [n_layer, E] its record in host memory; NULL: dense layer */
    void *arena;          /* the records, where the checkpoint does not hold them so */
    size_t arena_bytes;
    struct hx_moved *moved; /* [n_moved] parts that were copied there, by where from */
    int64_t n_moved;
    void **pin; /* [n_pin] locked ranges */
    int n_pin;
    hx_lane *lane; /* NULL: none */
    hx_rates rates;
    bool learn;                /* rates were measured: plan corrects them */
    double host_gbs, copy_gbs; /* host memory, device and CPUs reading; device copies */
    hx_clock clock;            /* items: layer * E + expert */
    hx_buf slots;              /* [n_slot] records in device memory */
    hx_buf resident, at;       /* i32, hx_lease [n_layer, E] */
    hx_buf here, there;        /* i32 [max_pick] */
    hx_buf log;                /* i32 [n_layer, max_pick] */
    hx_buf told[2]; /* the same on the host, of the steps that may be on their way */
    int64_t n_sent, n_ended; /* steps, in told by turns */
    struct hx_move *move;    /* [HX_MOVE_MAX] pushes on their way */
    int n_move;
    int32_t n_all_slot;   /* slots when none are lent */
    struct hx_lend *lend; /* lend.c; NULL: too few slots, or one for each expert */
    struct {
        hx_ahead to; /* slots.p NULL: none are fetched */
        hx_buf shared;
        hx_buf id, w, score; /* of the router that predicts, as in hx_router_args */
        int64_t layer;       /* for which a fetch is under way; -1: none */
    } ahead;
    hx_experts stats;
    FILE *trace; /* NULL: none */
    hx_trace_shape trace_shape;
} hx_store;

/* Takes over the routed experts of a model whose other weights lie on dev already; locks
 * host memory, fills the slots, measures rates. Errors: HX_ENOMEM (with the arithmetic),
 * HX_EUNSUP, HX_EIO (of the trace). */
int hx_store_open(hx_store **out, struct hx_model *m, hx_dev *dev,
                  const hx_store_opt *opt, hx_err *err);
void hx_store_close(hx_store *s); /* NULL is fine; before the model and the device */
/* Where what the checkpoint has at from was copied to; NULL: it was not. Any thread. */
const void *hx_store_where(const hx_store *s, const void *from);
/* Bytes that all routed experts take as records, and one of them. */
uint64_t hx_store_bytes(const struct hx_model *m, size_t *record_bytes);

/* Fills what a decode call of moe and combine need beside their own: runs op plan. */
int hx_store_plan(hx_store *s, int64_t layer, int64_t rows, hx_buf id, hx_buf x,
                  hx_moe_args *moe, hx_combine_args *combine, hx_err *err);
/* Around a decode step: the lane polls in between. Sent: all of it has been launched. End
 * counts, admits, moves; a mark after sent must have been reached. Two steps may be between
 * begin and end, in order. HX_EDEVICE when the lane was late. */
void hx_store_begin(hx_store *s);
int hx_store_sent(hx_store *s, hx_err *err);
int hx_store_end(hx_store *s, int64_t rows, hx_err *err);
void hx_store_report(const hx_store *s, hx_experts *out);

/* ---- ahead.c: experts of the next layer ----------------------------------------------- */

/* Experts of the next layer, fetched while the link is idle: after moe of a decode
 * layer, when all that is read in place has been read. */
int hx_ahead_open(hx_store *s, int64_t max_rows, hx_err *err);
void hx_ahead_close(hx_store *s);
void hx_ahead_report(const hx_store *s, hx_experts *out);
/* Whether layer + 1 is predicted in layer. */
bool hx_ahead_after(const hx_store *s, int64_t layer);
/* After moe of a decode layer: the fetch for it is over. */
int hx_ahead_end(hx_store *s, int64_t layer, hx_err *err);
/* id i32 [R, A]: picks of layer + 1 as predicted. */
int hx_ahead_fetch(hx_store *s, int64_t layer, int64_t rows, hx_buf id, hx_err *err);

/* ---- lend.c: slots lent to long prompts ------------------------------------------------ */

/* The last slots are lent while a prompt is read: places for a layer's experts, two for whole
 * layers or some for parts of them, and before these workspace. Once decode steps find that
 * no prompt wants them any more, those picked most move in, the prompt's own picks counted. */

#define HX_LEND_PARTS 16 /* most of a layer: 170 MB each of GLM-5.3-Flash */

/* A call for prefill rows, and a window of it. */
typedef struct {
    int64_t layer, rows; /* all rows of the call */
    bool last;           /* no window of it comes after this one */
} hx_store_call;

/* Bytes that can be lent beside n_place places for parts of layers, n_part each. */
uint64_t hx_store_lendable(const hx_store *s, int64_t n_part, int64_t n_place);
/* From now on layers come so, or in fewer parts if there are not as many experts. Something
 * must be lendable then and nothing lent now. */
void hx_store_cut(hx_store *s, int64_t n_part, int64_t n_place);
/* The same memory again, or more of it, where some is lent already: what lay in it is lost.
 * Operations from here on have it until hx_store_keep_lent(s, false). */
int hx_store_lend(hx_store *s, uint64_t bytes, hx_buf *out, hx_err *err);
/* Whether what is lent stays so at the end of the decode steps to come. */
void hx_store_keep_lent(hx_store *s, bool keep);
/* Before moe of a window of prefill rows: long calls have the layer's experts brought to
 * device memory one layer ahead. Fills moe->at, and in long calls first and end: from end on
 * experts are still to come, by another call of this and of moe, unless it is n_expert. */
int hx_store_prefill(hx_store *s, const hx_store_call *c, hx_moe_args *moe, hx_err *err);
/* Half of a layer at most is brought while the layer before computes, the rest from this call
 * on, as far as it has places: before the layer, and after the decode steps between the two,
 * which need the link. */
int hx_store_stage(hx_store *s, hx_err *err);

/* ---- rates.c: costs, measured at open ---------------------------------------------------- */

/* What the slots' memory copies, reads and writes counted; before anything lies there. */
int hx_rates_copies(hx_store *s, hx_err *err);
/* All else, while the lane has nothing to do. pool: threads for all CPUs. */
int hx_rates_measure(hx_store *s, hx_pool *pool, hx_err *err);

/* ---- what store.c and lend.c share ------------------------------------------------------ */

#define HX_MOVE_MAX HX_CLOCK_LOOKS /* pushes on their way */

int hx_lend_open(hx_store *s, uint64_t n_expert, hx_err *err);
void hx_lend_close(hx_store *s);
bool hx_lend_is_on(const hx_store *s);
/* At the end of a decode step. */
int hx_lend_end(hx_store *s, hx_err *err);

hx_buf hx_store_slot(const hx_store *s, int32_t slot);
/* A layer's part of a table [n_layer, E]. */
hx_buf hx_store_row(const hx_store *s, hx_buf table, int64_t layer, size_t item);
/* Addresses of an item in a slot, or with slot -1 in host memory. */
hx_lease hx_store_lease(const hx_store *s, int64_t item, int32_t slot);
/* Tells the device where an item lies from now on. */
int hx_store_announce(hx_store *s, int64_t item, int32_t slot, hx_err *err);
/* Records to device memory. */
int hx_store_push(hx_store *s, hx_buf to, const uint8_t *from, size_t bytes, hx_err *err);
/* Starts moving an item into a slot; who was there is read from host memory from now on.
 * No operation that reads the slot may be on its way. */
int hx_store_move_in(hx_store *s, int64_t item, int32_t slot, hx_err *err);
/* Whether the slot's tenant is on the way there. */
bool hx_store_is_coming(const hx_store *s, int32_t slot);
/* Who is on the way to a slot from first on will not be announced. */
void hx_store_drop_moves(hx_store *s, int32_t first);

#endif
