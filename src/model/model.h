/* model.h - a model as data and as mathematics: description, layers, sequence memory,
 * graph.
 *
 * Knows tensors and positions; knows neither requests nor text.
 *
 * Shape letters, here and in every comment below:
 *   R rows (tokens in a call)   D model width    S residual streams (mHC)
 *   H heads                     K key width      V value width
 *   Z latent rank               I index width    C cached positions
 *   P tokens per pool           E experts        A active experts
 *   F expert width              N vocabulary     Q slots (sequences with state) */
#ifndef HX_MODEL_H
#define HX_MODEL_H

#include "dev/dev.h"
#include "model/park.h"
#include "model/prefix.h"
#include "model/store.h"
#include "model/weights.h"

/* ---- description ----------------------------------------------------- */

typedef enum { HX_MIX_KDA, HX_MIX_MLA } hx_mixer;
typedef enum { HX_FFN_DENSE, HX_FFN_MOE } hx_ffn;

#define HX_LAYER_MAX 512
#define HX_SPAN_MAX  64 /* sequences in one call */

/* What config.json says, checked. Widths in elements. */
typedef struct {
    const char *arch;         /* "glm5_next" */
    const char *reply_format; /* a row of reply.c */
    int64_t n_layer, width, n_vocab, ctx_trained;
    bool unlimited_ctx; /* no positional encoding: ctx_trained is advice */
    float norm_eps;
    /* mHC */
    int64_t streams;
    int32_t hc_iters;
    float hc_eps;
    /* KDA */
    int64_t kda_heads, kda_width, conv_taps;
    float gate_bound;
    /* MLA and its indexer */
    int64_t mla_heads, k_width, v_width, q_rank, latent;
    int64_t index_heads, index_width, index_topk /* pools */, pool_n;
    /* feed-forward */
    int64_t dense_width, expert_width, shared_width, n_expert, n_active;
    float route_factor, swiglu_limit;
    /* FP8 grids */
    int32_t fp8_block_n, fp8_block_k;
    uint8_t mixer[HX_LAYER_MAX]; /* [n_layer] hx_mixer */
    uint8_t ffn[HX_LAYER_MAX];   /* [n_layer] hx_ffn */
    int32_t eos[16], n_eos;
} hx_desc;

/* ---- layers ---------------------------------------------------------- */

typedef struct {
    hx_mat fn;
    hx_buf base, scale;
} hx_hc; /* fn.w NULL: plain residual */

typedef struct {
    hx_mat qkv[3]; /* n_qkv 1: fused rows q, k, v; 3: each by itself */
    int32_t n_qkv;
    hx_mat f_a, f_b, b, g_a, g_b, o;
    hx_buf conv; /* f32 [3 H K, taps], rows q, k, v */
    hx_buf a_log, dt_bias, o_norm;
} hx_kda;

typedef struct {
    hx_mat q_a, q_b, kv_a, kv_b, o;
    hx_buf q_norm, kv_norm;
    hx_mat index_q, index_k, index_weight, index_gate;
    hx_buf index_norm_w, index_norm_b, ape;
} hx_mla;

typedef struct {
    hx_mixer mixer;
    hx_ffn ffn;
    hx_hc hc_attn, hc_ffn;
    hx_buf norm_attn, norm_ffn; /* f32 [D] */
    hx_kda kda;
    hx_mla mla;
    hx_expert dense; /* dense MLP, or the shared expert of a MoE layer */
    hx_mat router;
    hx_buf router_bias;
    hx_expert *expert; /* [E] */
} hx_layer;

typedef struct hx_model {
    hx_desc desc;
    hx_mat embed, head;
    hx_buf norm;         /* f32 [D] */
    hx_layer *layer;     /* [n_layer] */
    hx_weights *weights; /* NULL for a synthetic model */
    hx_arena arena;      /* layers, experts, converted vectors */
    void *synth;         /* synthetic weights [synth_bytes] */
    size_t synth_bytes;
    float *share; /* synthetic: [n_layer, E] shares of picks, summed up to 1, from which
                   * decode rows draw theirs; NULL: the router decides */
    uint64_t n_param, weight_bytes;
    hx_dev *dev;         /* where placed lies; NULL: weights are read where they are */
    hx_buf placed[2];    /* weights on the device, by hx_place */
    hx_buf embed_shared; /* the embedding, in host memory that it reads */
    hx_store *store;     /* of the routed experts, or NULL; closed with the model */
} hx_model;

/* Opens a checkpoint folder, or "synthetic:NAME[,layers=N][,experts=N][,seed=S]".
 * Errors: HX_EIO, HX_EFORMAT, HX_EUNSUP, HX_ENOMEM; the sentence names file and tensor.
 */
int hx_model_open(hx_model **out, const char *dir, hx_load_fn *on_load, void *ud,
                  hx_err *err);
/* A folder as well, but its files are only mapped and read as they are used. */
int hx_model_open_mapped(hx_model **out, const char *dir, hx_err *err);
void hx_model_close(hx_model *m);
bool hx_model_is_synthetic(const char *dir);
/* Moves weights to a device with memory of its own and points the model there; nothing
 * for others. The model must be closed before the device. Errors: HX_ENOMEM (both
 * numbers). */
typedef enum { HX_PLACE_DENSE, HX_PLACE_ROUTED } hx_place; /* all but, and the experts */
int hx_model_place(hx_model *m, hx_dev *dev, hx_place what, hx_err *err);
/* Bytes that placing takes. */
int hx_model_place_bytes(hx_model *m, hx_place what, uint64_t *bytes, hx_err *err);

/* Gives back the memory of weights that have been copied; for those of a synthetic model
 * there is no way back. Converted ones stay. evict: as in hx_map_drop(). */
void hx_model_drop(const hx_model *m, const void *p, size_t bytes, bool evict);

/* Copies one layer (n_layer: what is outside of them) to *out and points the model there;
 * the caller keeps the pointers that were, and frees *out, on failure too. */
int hx_model_place_layer(hx_model *m, hx_dev *dev, int64_t layer, hx_buf *out,
                         hx_err *err);

/* Sizes that a device must reckon with for calls of up to max_rows rows. */
hx_dev_limits hx_model_limits(const hx_desc *d, int64_t max_rows, int64_t max_ctx);

/* One family: recognises its config, fills the description, binds tensors by name. */
typedef struct {
    const char *model_type;
    int (*config)(hx_desc *d, const hx_json *config, const char *file, hx_err *err);
    int (*bind)(hx_model *m, hx_err *err);
} hx_arch;

#define HX_ARCHS(X) X(glm5_next)
#define X(name)     extern const hx_arch hx_arch_##name;
HX_ARCHS(X)
#undef X

/* Random weights of the shapes that m->desc asks for, at the real model's rates
 * (synth.c). gigabyte-sized: reports through on_load. */
int hx_synth_open(hx_model **out, const char *spec, hx_load_fn *on_load, void *ud,
                  hx_err *err);

/* ---- sequence memory ------------------------------------------------- */

/* State of one layer, for all slots. KDA layers own the first group, MLA layers the
 * second. */
typedef struct {
    hx_buf kda_state, kda_pend, conv_state, conv_pend;
    hx_pages latent, pool;
    hx_buf ring;
    size_t state_at, kda_bytes, conv_bytes; /* in a kept state without pending rows, where
                                             * a slot's kda_state and conv_state lie */
} hx_layer_mem;

/* A prefill call of one span leaves the slot's state after its first row rows in host
 * memory, [hx_cache_state_bytes(0)]: between two blocks of the grid, without a chunk that
 * ends there. Rings are not part of it: at a multiple of 64 no pool is half made. */
typedef struct {
    int32_t row; /* 0 < row < rows of the call */
    uint8_t *state;
} hx_snap_at;

typedef struct {
    int64_t n_pos; /* positions computed, pending rows included */
    int32_t pend;  /* the last so many are pending (see kda_step) */
    int32_t n_page;
    bool used;
} hx_slot;

/* A page belongs to everyone who counts in ref: slots whose table names it, and the prefix
 * tree. Positions are only ever appended, so sharers read what lies below their own end; a
 * sequence that appends to a page it did not begin itself takes a copy first. */
typedef struct hx_cache {
    hx_dev *dev;
    hx_layer_mem *mem; /* [n_layer] */
    int64_t n_layer;
    hx_slot *slot; /* [n_slot] */
    int32_t n_slot, n_page, max_page;
    int32_t *table;     /* [n_slot, max_page] page of each 64 positions, -1: none */
    hx_buf table_dev;   /* the same on the device */
    int32_t *free_page; /* stack */
    int32_t n_free;
    int32_t *ref;   /* [n_page] owners; 0: free */
    int32_t *hold;  /* [n_page] of these, slots and pins: it must stay where it is */
    int32_t n_held; /* pages with hold > 0; all others can be had */
    /* Asked when no page is free; makes at least one so by giving up pages that nobody
     * holds. NULL: there are none. */
    void (*reclaim)(void *ud, int32_t n);
    void *reclaim_ud;
    void *bounce; /* [page_bytes] */
    uint64_t bytes, page_bytes;
    uint64_t kda_bytes, kda_row_bytes, conv_bytes, conv_row_bytes, ring_bytes;
} hx_cache;

/* Bytes of one page over all layers, and of one slot's recurrent state. */
uint64_t hx_cache_page_bytes(const hx_desc *d, hx_cache_fmt fmt);
uint64_t hx_cache_slot_bytes(const hx_desc *d);

/* All memory is taken here. Errors: HX_EARG, HX_ENOMEM. Thread: the engine's. */
int hx_cache_open(hx_cache **out, const hx_desc *d, hx_dev *dev, int32_t n_slot,
                  int64_t ctx_tokens, int32_t n_page, hx_cache_fmt fmt, hx_err *err);
void hx_cache_close(hx_cache *c);
/* A free slot with nothing in it, or -1. */
int32_t hx_cache_take(hx_cache *c);
void hx_cache_clear(hx_cache *c, int32_t slot); /* its pages go back, the slot stays */
void hx_cache_drop(hx_cache *c, int32_t slot);  /* the slot too */
/* Makes room for positions 0 .. n_pos - 1. Errors: HX_ENOMEM when no page is free. */
int hx_cache_grow(hx_cache *c, int32_t slot, int64_t n_pos, hx_err *err);

/* A page with ref 1, or -1. */
int32_t hx_cache_page_take(hx_cache *c);
void hx_cache_page_ref(hx_cache *c, int32_t page);
void hx_cache_page_unref(hx_cache *c, int32_t page);
void hx_cache_page_hold(hx_cache *c, int32_t page);
void hx_cache_page_unhold(hx_cache *c, int32_t page);
/* Appends n pages to the slot's table, each one more ref and hold. */
int hx_cache_share(hx_cache *c, int32_t slot, const int32_t *page, int32_t n,
                   hx_err *err);
/* A page's content in all layers, [page_bytes] of host memory. */
int hx_cache_page_get(hx_cache *c, int32_t page, void *out, hx_err *err);
int hx_cache_page_put(hx_cache *c, int32_t page, const void *in, hx_err *err);
int hx_cache_page_copy(hx_cache *c, int32_t from, int32_t to, hx_err *err);
/* A slot's recurrent state with its pending rows, in host memory. */
uint64_t hx_cache_state_bytes(const hx_cache *c, int32_t pend);
/* Zeroes what a hx_snap_at does not fill. */
void hx_cache_state_blank(const hx_cache *c, uint8_t *state);
int hx_cache_state_get(hx_cache *c, int32_t slot, void *out, hx_err *err);
int hx_cache_state_put(hx_cache *c, int32_t slot, const void *in, int32_t pend,
                       hx_err *err);

/* ---- graph ----------------------------------------------------------- */

/* Decode rows keep the recurrent state behind them (pending), so drafts can be taken
 * back; prefill rows move it on. The arithmetic of a row depends on this alone, never
 * on its neighbours (numerics contract). */
typedef enum { HX_PHASE_PREFILL, HX_PHASE_DECODE } hx_phase;

typedef struct {
    hx_phase phase;
    const int32_t *id;      /* [rows.n_row] */
    hx_buf ids;             /* the same in device memory; then id is not looked at */
    hx_rows rows;           /* spans; row numbers start at 0 */
    const hx_snap_at *snap; /* [n_snap] by row; borrowed as the rest */
    int32_t n_snap;
    const uint64_t *draw; /* [n_span], or NULL for all the same: decode picks of a
                           * synthetic model are drawn by it and the position */
} hx_batch;

typedef struct hx_graph hx_graph;

/* Called after each layer with the streams f32 [R, S, D] (device memory), and for the
 * steps inside it, window by window in row order: "attn_out", "mlp_in", "mlp_out" f32
 * [rows, D], "router_score" [rows, E], "router_id", "router_w" [rows, A], and for rows that
 * select, "index_score" f32 [rows, pools or more], "pick" i32 [rows, index_topk] pools. What
 * it writes to data is what the model goes on with. */
typedef void hx_tap_fn(void *ud, int64_t layer, const char *what, hx_buf data,
                       int64_t rows);

#define HX_MOE_ROWS 8192 /* that a GPU takes through experts at once: some 200 for each */

/* Workspace for calls of up to max_rows rows and max_out logits rows. */
int hx_graph_open(hx_graph **out, hx_model *m, hx_dev *dev, hx_cache *c, int64_t max_rows,
                  int64_t max_out, int64_t max_ctx, hx_err *err);
void hx_graph_close(hx_graph *g);
uint64_t hx_graph_bytes(const hx_graph *g);
/* Bytes of the device that calls of up to rows rows, of one span, need beside what was taken
 * at open; from move on these are mem's, until it is called with p NULL. */
uint64_t hx_graph_room(const hx_graph *g, int64_t rows);
void hx_graph_move(hx_graph *g, hx_buf mem, int64_t rows);
void hx_graph_tap(hx_graph *g, hx_tap_fn *fn, void *ud);

/* One call is begin, then layers [l0, l1) in order in any number of slices, then any
 * number of out, each of which leaves logits f32 [n, N] and the hidden rows after the
 * last norm f32 [n, D] of rows row0 .. row0 + n - 1. The batch is borrowed until the next
 * begin. Nothing here allocates. */
int hx_graph_begin(hx_graph *g, const hx_batch *b, hx_err *err);
/* As begin, but goes on before layer next with streams f32 [R, S, D] that the caller has
 * put there. */
int hx_graph_resume(hx_graph *g, const hx_batch *b, int64_t next, hx_err *err);
hx_buf hx_graph_streams(const hx_graph *g);
int hx_graph_layers(hx_graph *g, int64_t l0, int64_t l1, hx_err *err);
int hx_graph_out(hx_graph *g, int64_t row0, int64_t n, hx_err *err);
/* All of that for a decode batch with the logits of all rows; on a device that can, as one
 * recorded list of operations for each number of rows. */
int hx_graph_step(hx_graph *g, const hx_batch *b, hx_err *err);
/* Logits of one kept row hidden f32 [D] in host memory; same bits as when it was made. */
int hx_graph_head(hx_graph *g, const float *hidden, hx_err *err);
hx_buf hx_graph_logits(const hx_graph *g);
hx_buf hx_graph_hidden(const hx_graph *g);

/* ---- sub-layers (layers.c), used by graph.c -------------------------- */

/* Everything a sub-layer needs for a window of a call's rows; buffers are the graph's
 * workspace. */
typedef struct {
    hx_dev *dev;
    const hx_desc *d;
    hx_phase phase;
    bool uniform; /* the same list of operations at any length, as a replayed
                   * graph needs: every row goes through the selection */
    hx_rows rows;
    int64_t all_rows;  /* of the call */
    bool last;         /* no window of it comes after this one */
    uint8_t *keep;     /* the slot's state after these rows goes there; NULL: nowhere */
    hx_buf x;          /* f32 [R, D] input, normalised */
    hx_buf y;          /* f32 [R, D] output */
    hx_buf post, comb; /* f32 [R, S], [R, S, S] between hc_mix and hc_merge */
    hx_buf a, b, c, e; /* scratch rows */
    hx_buf g, small;   /* f32 [R, H K], f32 [R, narrow] */
    hx_buf part;       /* f32 [R, A, D] outputs of experts */
    hx_buf route_id, route_w, route_score;
    hx_store *store; /* NULL: experts are read where the model says */
    hx_buf drawn; /* i32 [2, n_layer, R, A] picks, and such as are predicted for a layer,
                   * instead of the router's; p NULL: none */
    hx_buf score; /* indexer: f32, as many rows as fit */
    hx_buf pick, n_pick; /* i32 [R, k], [R] */
    int64_t ld_score;    /* of a whole context */
    hx_tap_fn *tap;
    void *tap_ud;
    int64_t layer;
} hx_layer_call;

int hx_layers_kda(const hx_layer_call *c, const hx_kda *w, hx_layer_mem *mem,
                  hx_err *err);
int hx_layers_mla(const hx_layer_call *c, const hx_mla *w, hx_layer_mem *mem,
                  hx_err *err);
int hx_layers_dense(const hx_layer_call *c, const hx_expert *w, hx_buf y, hx_err *err);
int hx_layers_moe(const hx_layer_call *c, const hx_layer *w, hx_err *err);

#endif
