/* dev.h - devices, buffers, weight formats and the operations that models are made of.
 *
 * Shape letters: R rows (tokens in the call), D model width, S residual streams, H heads,
 * K key width, V value width, Z latent rank, I index width, P tokens per pool, E experts,
 * A active experts, F expert width, N vocabulary, Q slots (sequences that own state).
 *
 * Every operation is declared once here, defined in double by ref.c, made fast by cpu*.c
 * (and cuda*.cu), and tested by ops_test.c. Arguments are checked once, in ops.c. Arrays
 * are row-major; "f32 [R, D]" gives type and shape. A matrix W[n, k] maps x[k] to W x[n].
 * An operation reads and writes only what its comment names, outputs never alias inputs
 * unless said so, and a row's result never depends on other rows (numerics contract). */
#ifndef HX_DEV_H
#define HX_DEV_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- buffers --------------------------------------------------------- */

typedef struct {
    void *p;
    size_t n;
} hx_buf; /* memory of a device; n in bytes */

/* ---- weight formats -------------------------------------------------- */

/* X(NAME, text, bits of one weight as stored without scales; 0: per matrix).
 * Each has its header fmt_*.h: layout, decode, and how it is stored. */
#define HX_FORMATS(X)                                                                    \
    X(F32, "f32", 32)                                                                    \
    X(F16, "f16", 16)                                                                    \
    X(BF16, "bf16", 16)                                                                  \
    X(FP8, "fp8_e4m3", 8)                                                                \
    X(EXL3, "exl3", 0)

typedef enum {
#define X(name, text, bits) HX_FMT_##name,
    HX_FORMATS(X)
#undef X
        HX_N_FMT
} hx_fmt;

typedef enum { HX_CB_3INST, HX_CB_MCG, HX_CB_MUL1, HX_N_CB } hx_codebook;

/* A weight matrix W[n, k], y = W x (+ bias). Pointers are borrowed (a mapped file or the
 * expert arena) and may have any alignment. */
typedef struct {
    hx_fmt fmt;
    int64_t n, k; /* outputs, inputs of the model */
    const void
        *w; /* plain formats: [n, k]; EXL3: trellis [k_pad/16, n_pad/16, 8 k2] u16 */
    const void *scale; /* FP8: f32 [ceil(n / block_n), ceil(k / block_k)] */
    int32_t block_n, block_k;
    const void *suh, *svh; /* EXL3: f16 [k_pad], [n_pad] */
    const void *bias;      /* f16 [n] or NULL */
    int64_t n_pad, k_pad;  /* EXL3: n, k rounded up to 128 */
    int32_t k2;            /* EXL3: twice the bits per weight, 2..16 */
    hx_codebook codebook;
} hx_mat;

/* One routed expert: down(act(gate x) * up x). */
typedef struct {
    hx_mat gate, up, down;
} hx_expert;

const char *hx_fmt_name(hx_fmt f);
size_t hx_mat_bytes(const hx_mat *m); /* as stored, scales and bias too */
/* One row of W as f32 [k], exact: codebook values, scales and rotations in double,
 * rounded once. Slow for EXL3 (decodes a whole 128-column block); for tests and for
 * expanding small matrices. */
int hx_mat_expand(const hx_mat *m, float *out /* [n, k] */, hx_err *err);

/* ---- rows of a call -------------------------------------------------- */

/* One sequence's rows in a call. Rows of a span are neighbours; spans are in row order.
 */
typedef struct {
    int32_t slot;        /* whose state, 0..Q-1 */
    int32_t row0, n_row; /* rows row0 .. row0 + n_row - 1 */
    int32_t pos0;        /* position of the first of them in its sequence */
    int32_t commit;      /* how many pending rows of the slot to fold into its state first
                          * (see kda_step); the others are dropped */
} hx_span;

typedef struct {
    const hx_span *span; /* [n_span] host memory */
    int32_t n_span;
    int64_t n_row; /* R */
    hx_buf dev;    /* the same spans in device memory; p NULL: not there, and a device
                    * that needs them takes them with the call */
} hx_rows;

#define HX_PEND_MAX 8  /* rows a slot can hold pending: one token and its drafts */
#define HX_PAGE     64 /* positions in a page of sequence memory; the prefill grid */
#define HX_RING     16 /* raw index keys kept per slot: P - 1 tail tokens + HX_PEND_MAX */

/* How latents and pooled index keys are kept. Values as in hx_kv. */
typedef enum { HX_CACHE_BF16, HX_CACHE_F32, HX_CACHE_FP8 } hx_cache_fmt;

/* Paged memory of one layer: position c of slot q lies in page table[q * max_page + c /
 * 64] at row c % 64 (latents), and pool p in page (p * P) / 64 at row p % (64 / P).
 * fmt_page.h: how items lie in a page. Pooled keys are f32 or bf16. */
typedef struct {
    hx_buf data; /* [n_page] of [64, width] or [64 / P, width] */
    hx_cache_fmt fmt;
    int64_t n_page, width;
    const int32_t *table; /* [Q, max_page] host memory; -1: no page */
    int64_t max_page;
    hx_buf table_dev; /* the same in device memory; unused where that is the host's */
} hx_pages;

/* ---- operations ------------------------------------------------------ */

/* clang-format off */
#define HX_OPS(X)                                                                        \
    X(embed) X(rmsnorm) X(layernorm) X(matmul) X(head_matmul) X(swiglu)                  \
    X(hc_mix) X(hc_merge) X(hc_mean) X(conv_short) X(kda_gate) X(kda_step) X(kda_chunk)  \
    X(kda_out) X(latent_append) X(index_append) X(index_score) X(topk) X(mla_attend)     \
    X(router) X(plan) X(moe) X(combine) X(sample)
/* clang-format on */

/* y[r, s, :] = table[id[r], :] for every stream s
 * y f32 [R, S, D]; id i32 [R]; table: plain format, n = N, k = D
 * errors HX_EARG: an id outside 0..N-1 */
typedef struct {
    hx_buf y, id;
    const hx_mat *table;
    int64_t rows, streams;
} hx_embed_args;

/* y[r,:] = x[r,:] / sqrt(mean(x[r,:]^2) + eps) * w
 * x, y f32, rows ldx, ldy apart (>= dim; y may be x); w f32 [dim] or p NULL (all ones)
 * source Zhang & Sennrich 2019, eq. 4; glm5_next.md 2 */
typedef struct {
    hx_buf y, x, w;
    int64_t rows, dim, ldx, ldy;
    float eps;
} hx_rmsnorm_args;

/* y = (x - mean) / sqrt(var + eps) * w + b, biased variance; as rmsnorm otherwise
 * source glm5_next.md 6 (index keys) */
typedef struct {
    hx_buf y, x, w, b;
    int64_t rows, dim, ldx, ldy;
    float eps;
} hx_layernorm_args;

/* y[r, 0..n) = W x[r, 0..k) (+ bias)
 * x f32, rows ldx apart; y f32, rows ldy apart; any format.
 * The arithmetic of decode rows is canonical (canon.h, one text for host and device): the
 * same bits on every backend and instruction set, but for ref, which is plain double.
 * prefill: a device may round inputs and weights to f16 and sum in f32 instead; a row still
 * has the same bits in a call of any number of rows.
 * beside: a product with as many rows (its own number does not count) that neither reads y
 * nor writes x, which a device may do at the same time; or NULL. */
typedef struct hx_matmul_args {
    hx_buf y, x;
    const hx_mat *w;
    int64_t rows, ldx, ldy;
    bool prefill;
    const struct hx_matmul_args *beside;
} hx_matmul_args;

/* Per head h, with W_h = rows h * stride + first … + n - 1 of W (plain formats, k columns):
 *   transposed = 0:  y[r, h, 0..n) = W_h x[r, h, 0..k)       (values from latents)
 *   transposed = 1:  y[r, h, 0..k) = W_h^T x[r, h, 0..n)     (absorbed queries)
 *
 * y, x    f32 [R, H, .] dense
 * source  glm5_next.md 5, absorbed form */
typedef struct {
    hx_buf y, x;
    const hx_mat *w;
    int64_t rows, heads, n, stride, first;
    bool transposed, prefill; /* prefill: as in matmul */
} hx_head_matmul_args;

/* y = silu(min(gate, limit)) * clamp(up, -limit, limit); limit 0: no clamp
 * y, gate, up f32 [R, dim]; y may be gate. source glm5_next.md 7 */
typedef struct {
    hx_buf y, gate, up;
    int64_t rows, dim;
    float limit;
} hx_swiglu_args;

/* mHC: collapses S streams to the layer's input and makes the maps for hc_merge.
 *   y there: hc_merge of y with post and comb, those of the sub-layer before, comes first
 *   f    = flatten(streams[r]); m = fn (f / sqrt(mean f^2 + norm_eps))
 *   pre  = sigmoid(m[0..S) * scale[0] + base) + eps
 *   post = 2 sigmoid(m[S..2S) * scale[1] + base)
 *   comb = Sinkhorn(softmax_j(m[2S..) * scale[2] + base) + eps): iters column and
 *          iters - 1 row normalisations, columns first; every divisor + eps
 *   x[r] = sum_s pre[s] streams[r, s]; w there: rmsnorm of that with w and norm_eps
 *
 * x        f32 [R, D]
 * post     f32 [R, S]; read before, if y is there
 * comb     f32 [R, S, S], row = source stream; the same
 * streams  f32 [R, S, D], S <= 8; written, if y is there
 * y, w     f32 [R, D], [D]; or p NULL
 * fn       plain format, n = S (2 + S), k = S D; NULL with S = 1: x = streams,
 *          post = comb = 1
 * base     f32 [S (2 + S)]; scale f32 [3]
 * source   glm5_next.md 3 */
typedef struct {
    hx_buf x, post, comb, streams, base, scale;
    const hx_mat *fn;
    int64_t rows, streams_n, dim;
    float norm_eps, eps;
    int32_t iters;
    hx_buf y, w;
} hx_hc_mix_args;

/* streams[r, j] = post[r, j] y[r] + sum_i comb[r, i, j] streams[r, i], in place
 * y f32 [R, D]. source glm5_next.md 3 (mind the transpose) */
typedef struct {
    hx_buf streams, y, post, comb;
    int64_t rows, streams_n, dim;
} hx_hc_merge_args;

/* y[r] = mean over streams; y f32 [R, D], streams f32 [R, S, D] */
typedef struct {
    hx_buf y, streams;
    int64_t rows, streams_n, dim;
} hx_hc_mean_args;

/* Causal depthwise convolution over time, then SiLU; u before the sequence is 0:
 *   y[t, c] = silu(sum_{j < taps} w[c, j] u[t - taps + 1 + j, c])
 * First each span folds its first commit pending rows into the state. hold: the new rows
 * become the slot's pending rows and the state stays (decode); else the state moves on past
 * them (prefill). A span with n_row 0 only folds; one with pos0 = 0 starts from zeros.
 *
 * y, u    f32 [R, C]
 * w       f32 [C, taps], taps <= 8
 * state   f32 [Q, taps - 1, C]: the last raw inputs, oldest first
 * pend    f32 [Q, HX_PEND_MAX, C]
 * errors  HX_EARG: hold with n_row > HX_PEND_MAX; commit > 0 at pos0 = 0
 * source  glm5_next.md 4, step 2 */
typedef struct {
    hx_buf y, u, w, state, pend;
    hx_rows rows;
    int64_t channels, taps;
    bool hold;
} hx_conv_short_args;

/* g[r, h, d] = bound * sigmoid(exp(a_log[h]) * (f[r, h, d] + dt_bias[h, d]))
 * beta = sigmoid(b)
 *
 * g, f     f32 [R, H, K]; g may be f
 * beta, b  f32 [R, H]; beta may be b
 * a_log    f32 [H]; dt_bias f32 [H, K]; bound < 0
 * source   glm5_next.md 4, steps 3 and 4 */
typedef struct {
    hx_buf g, beta, f, b, a_log, dt_bias;
    int64_t rows, heads, width;
    float bound;
} hx_kda_gate_args;

/* Gated delta rule, one row after the other (decode). Per span and head, K = V = width:
 *   fold the slot's first commit pending rows into S; then for each new row, on a copy,
 *   q' = q / sqrt(sum q^2 + 1e-6) * width^-0.5, k' = k / sqrt(sum k^2 + 1e-6)
 *   S = diag(exp g) S;  u = S^T k';  S += k' (beta (v - u))^T;  o = S^T q'
 * The state keeps only what was folded; the new rows become the slot's pending rows, so
 * R rows give the bits of R serial steps and rejected drafts cost nothing.
 *   a_log there: kda_gate of g and beta with a_log, dt_bias and bound comes first
 *
 * o        f32 [R, H, V]
 * q, k, v  f32, row r head h at r * ld + h * width (slices of the convolution's output)
 * g        f32 [R, H, K]; beta f32 [R, H]; with a_log they mean nothing afterwards
 * state    f32 [Q, H, K, V]
 * pend     f32 [Q, HX_PEND_MAX, H, 3 width + 1]: k', v, g, beta
 * a_log, dt_bias  as in kda_gate; or p NULL
 * errors   HX_EARG: n_row > HX_PEND_MAX (0 only folds); commit > 0 at pos0 = 0, which
 *          starts from zeros
 * source   glm5_next.md 4, steps 5 and 6 */
typedef struct {
    hx_buf o, q, k, v, g, beta, state, pend;
    hx_rows rows;
    int64_t heads, width, ld;
    hx_buf a_log, dt_bias;
    float bound;
} hx_kda_step_args;

/* The same recurrence over many rows (prefill): folds pending rows, then the state moves on
 * past all rows. A back end may take the rows in chunks of up to 64 cut at multiples of 64 of
 * the position (equal in real arithmetic; the result must not depend on other cuts), as
 * ref does, or run the recurrence, as cpu does. Arguments as kda_step, any n_row.
 *
 * source  glm5_next.md 4, chunked form */
typedef hx_kda_step_args hx_kda_chunk_args;

/* y = w * o / sqrt(mean_head(o^2) + eps) * sigmoid(z)
 * y, o, z f32 [R, H, V] (y may be o); w f32 [V]. source glm5_next.md 4, step 7 */
typedef struct {
    hx_buf y, o, z, w;
    int64_t rows, heads, width;
    float eps;
} hx_kda_out_args;

/* Stores c[r] (f32, rows ldc apart) at its position. source glm5_next.md 5, cache */
typedef struct {
    hx_buf c;
    int64_t ldc;
    hx_pages cache;
    hx_rows rows;
} hx_latent_append_args;

/* Records raw index keys and makes the pooled key of every pool that becomes complete:
 *   a[s, c] = softmax_s(gate[4p + s, c] + ape[s, c])
 *   P_p[c]  = sum_s a[s, c] key[4p + s, c]
 *
 * key, gate  f32 [R, I]
 * ape        f32 [P, I], P <= 8 and a divisor of 64
 * ring       f32 [Q, HX_RING, 2, I]: key and gate of position c at c % HX_RING, kept so that
 *            decode can go back
 * pool       pages, f32 or bf16
 * source     glm5_next.md 6 */
typedef struct {
    hx_buf key, gate, ape, ring;
    hx_pages pool;
    hx_rows rows;
    int64_t pool_n;
} hx_index_append_args;

/* score[r, p] = sum_h w[r, h] w_scale * max(0, (q[r, h] . P_p) * scale) over the pools that
 * row r sees: (p + 1) * pool_n - 1 <= its position
 *
 * score   f32 [R, ld_score]; entries past the last visible pool are not written
 * q       f32 [R, H, I]; w f32 [R, H]
 * source  glm5_next.md 6 */
typedef struct {
    hx_buf score, q, w;
    hx_pages pool;
    hx_rows rows;
    int64_t heads, pool_n, ld_score;
    float scale, w_scale;
} hx_index_score_args;

/* The k best of the first (position + 1) / pool_n scores of each row: higher first, equal
 * ones by lower index; written in ascending index order.
 *
 * pick    i32 [R, k]; n_pick i32 [R] = min(k, visible)
 * score   f32 [R, ld_score] */
typedef struct {
    hx_buf pick, n_pick, score;
    hx_rows rows;
    int64_t k, pool_n, ld_score;
} hx_topk_args;

/* Attention over latents, all heads alike: z[r, h] = sum_c p_c cache[c] with
 * p = softmax(scale q[r, h] . cache[c]), over c in ascending order:
 *   pick.p NULL: all c <= position
 *   else the pool_n tokens of each picked pool, and the tail, the last
 *   (position + 1) mod pool_n tokens
 *
 * z, q    f32 [R, H, Z]
 * pick    i32 [R, k_pick]; n_pick i32 [R]
 * source  glm5_next.md 5, 6 */
typedef struct {
    hx_buf z, q, pick, n_pick;
    hx_pages cache;
    hx_rows rows;
    int64_t heads, k_pick, pool_n;
    float scale;
    bool prefill; /* as in matmul: queries and weights p as f16 */
} hx_mla_attend_args;

/* Sigmoid router: sc = sigmoid(W x); the A largest of sc + bias in falling order, equal
 * ones by lower id; weight = sc / (sum of picked sc + 1e-20) * factor
 *
 * id      i32 [R, A]; weight f32 [R, A]
 * x       f32 [R, D]; w: plain format, n = E; bias f32 [E]
 * score   f32 [R, E] scratch; holds sc afterwards
 * source  glm5_next.md 7 */
typedef struct {
    hx_buf id, weight, x, bias, score;
    const hx_mat *w;
    int64_t rows, active;
    float factor;
} hx_router_args;

/* Where a device reads an expert now: addresses as in hx_mat. EXL3: trellis, suh, svh;
 * plain formats: w, scale, bias. */
typedef struct {
    const void *trellis, *suh, *svh;
} hx_lease_mat;

typedef struct {
    hx_lease_mat gate, up, down;
} hx_lease;

/* What experts cost, in microseconds; measured at start (model/store.c). */
typedef struct {
    float here_us; /* the device: one whose weights it holds */
    float link_us; /* the device: one read from host memory */
    float lane_us,
        row_us;    /* the CPU lane: one at one row, and each row more; 0: no lane */
    float post_us; /* the lane: from the post to its first expert, and back */
} hx_rates;

typedef struct hx_lane
    hx_lane; /* dev/lane.h: experts computed on the CPU beside a device */

/* Experts on their way to the device before their layer has picked any: hx_dev_fetch() and
 * hx_op_plan pass this to each other in device memory. What a fetch writes is cleared by
 * the plan before it, so fetches of neighbouring layers take turns with two. */
enum {
    HX_AHEAD_SLOTS = 4,
    HX_AHEAD_PIECE = 32768, /* bytes between two looks at stop */
    HX_AHEAD_STOP = 1u << 30
};

typedef struct {
    uint32_t stop; /* plan: HX_AHEAD_STOP, and 1 << k for an item that is still wanted */
    int32_t n, id[HX_AHEAD_SLOTS]; /* items, in the order in which they come */
    const void
        *from[HX_AHEAD_SLOTS]; /* their records; plan may change the table meanwhile */
    uint32_t part[HX_AHEAD_SLOTS]; /* pieces that are there */
    uint32_t made;                 /* 1: what is above is there */
} hx_ahead_list;

typedef struct {
    int64_t named, picked; /* items of all fetches; those that were picked then */
    int64_t used;          /* of these, computed with from where they had been put */
    int64_t pieces, vain;  /* copied when the layer picked; of these for nothing */
} hx_ahead_counts;

typedef struct {
    hx_ahead_list list[2]; /* by layer & 1 */
    hx_ahead_counts count;
    /* Table entries that plan changed, or NULL; the next one sets them right. */
    hx_lease *entry[HX_AHEAD_SLOTS], was[HX_AHEAD_SLOTS];
    const void *now[HX_AHEAD_SLOTS];
} hx_ahead_state;

typedef struct {
    hx_buf slots; /* HX_AHEAD_SLOTS records */
    hx_buf state; /* hx_ahead_state; zero at first */
    hx_buf told;  /* hx_ahead_counts that the host sees */
    size_t record_bytes;
} hx_ahead;

/* Splits a layer's picks between this device and the CPU lane and posts the lane's job.
 * Experts with resident[e] >= 0 stay here; of the distinct others the lane takes those with
 * the fewest rows, equal ones by lower id, as long as that makes the longer of both sides
 * shorter (plan.h). Where an expert is computed never changes a bit of it.
 *
 * here      i32 [R, A] = id, or -1 where the lane has the pick
 * there     i32 [R, A] = id, or -1 where it stays
 * log       i32 [R, A] id + side << 24, side an hx_side
 * id        i32 [R, A]; x f32 [R, D], read only when a job is posted
 * resident  i32 [E]
 * lane      NULL: there is nobody to post to
 * learn     rates are corrected by how long both sides take in fact (plan.h)
 * ahead     or NULL. Stops the fetch for this layer but for picked experts that have begun
 *           to come; these stay here, and their entries in at are set to where they come
 *           to until the next plan. fetched: there is such a fetch
 * at        hx_lease [E], with ahead only
 * errors    HX_EARG: more rows or another width than the lane was opened for */
typedef enum { HX_SIDE_HERE, HX_SIDE_LINK, HX_SIDE_LANE, HX_SIDE_AHEAD } hx_side;

typedef struct {
    hx_buf here, there, log, id, x, resident, at;
    hx_lane *lane;
    const hx_ahead *ahead;
    bool fetched, learn;
    int64_t rows, active, n_expert, dim;
    int32_t layer;
    hx_rates rates;
} hx_plan_args;

/* y[r, a] = down_e(silu(min(gate_e x[r], limit)) * clamp(up_e x[r])), e = id[r, a]. Where an
 * expert runs and how many rows it gets does not change a bit. prefill: as in matmul.
 *
 * y       f32 [R, A, D]; x f32 [R, D]
 * id      i32 [R, A]; entries < 0 leave y[r, a] as it is
 * expert  host array [E]; only those that are picked are looked at
 * at      hx_lease [E] in device memory, instead of the addresses in expert; or p NULL
 * end     0, or with prefill: picks of experts outside first … end - 1 leave y as it is
 * source  glm5_next.md 7; exl3.md 9.1 */
typedef struct {
    hx_buf y, x, id, at;
    const hx_expert *expert;
    int64_t n_expert, rows, active, first, end;
    float limit;
    bool prefill;
} hx_moe_args;

/* y[r] = base[r] + weight[r, 0] part[r, 0] + weight[r, 1] part[r, 1] + …, one fused
 * multiply-add after the other in the order of the picks
 *
 * y, base  f32 [R, D]; y may be base
 * part     f32 [R, A, D]; weight f32 [R, A]
 * there    i32 [R, A], or p NULL: picks >= 0 are taken from the lane, which is waited for
 * lane     the one that plan posted to. When it misses its deadline what is in y means
 *          nothing: hx_lane_late() then tells */
typedef struct {
    hx_buf y, base, part, weight, there;
    hx_lane *lane;
    int64_t rows, active, dim;
} hx_combine_args;

/* How one row is sampled. Pointers are host memory. */
typedef struct {
    float temperature;  /* 0: greedy */
    float top_p, min_p; /* 0 or 1: off */
    int32_t top_k;      /* 0: off */
    float repeat, presence, frequency;
    const int32_t *hist_id;    /* [n_hist] distinct ids seen so far */
    const int32_t *hist_count; /* [n_hist] times in the answer (0: prompt only) */
    int32_t n_hist;
    const hx_bias *bias;
    int32_t n_bias;
    const uint32_t *mask; /* [ceil(N / 32)] bit 1: allowed; or NULL */
    const int32_t *ban;
    int32_t n_ban;          /* ids not allowed now (end ids before min_new) */
    uint64_t seed, counter; /* the draw is hx_rng_unit(seed, counter) */
    int32_t n_top;          /* 0..20 */
    bool want_logprob;
} hx_sample_row;

/* Chooses one id per row, ids >= n_token never. In this order: repetition penalty (positive
 * logits divided, negative multiplied) over hist; frequency times count and presence over ids
 * with count > 0; bias (-100 and below bans); mask and bans. logprob and top are the
 * log-softmax of that, before temperature. Then temperature, top-k, top-p (smallest set with
 * mass >= top_p of what top-k left), min-p (of the best), and a draw by inverse cumulative sum
 * over the kept ids in falling order of probability, equal ones by lower id. Greedy: the
 * largest, lower id first.
 *
 * id       i32 [R]; logprob f32 [R]; top hx_choice [R, 20], {-1, -inf} past the allowed ids
 * logits   f32 [R, N]; scratch f32 [R, 2 N]
 * errors   HX_EARG: a row whose every id is banned or whose logits hold NaN (the sentence
 *          says which row); a device that cannot tell before the host reads leaves id -1
 *          (no number) or -2 (all banned) */
typedef struct {
    hx_buf id, logprob, top, logits, scratch;
    const hx_sample_row *row;
    int64_t rows, n_vocab, n_token;
} hx_sample_args;

enum {
#define X(op) HX_OP_##op,
    HX_OPS(X)
#undef X
        HX_N_OP
};

/* ---- devices --------------------------------------------------------- */

typedef struct hx_dev hx_dev;

/* A recorded list of operations. */
typedef struct hx_dev_graph hx_dev_graph;

/* See hx_dev_fetch(). */
typedef struct {
    hx_buf id, resident, at; /* i32 [R, A]; i32, hx_lease [E] of the layer */
    const hx_ahead *to;
    int64_t rows, active, n_expert;
    int32_t layer;
} hx_fetch_args;

/* What a device with memory of its own can do; see the functions below. */
typedef struct hx_dev_link {
    int (*memory)(hx_dev *, uint64_t *free_bytes, uint64_t *total, hx_err *);
    int (*pin)(hx_dev *, void *p, size_t bytes, hx_err *);
    void (*unpin)(hx_dev *, void *p);
    int (*shared)(hx_dev *, hx_buf *out, size_t bytes, hx_err *);
    void (*unshared)(hx_dev *, hx_buf *);
    int (*push)(hx_dev *, hx_buf to, const void *from, size_t bytes, hx_err *);
    int (*push_mark)(hx_dev *, uint64_t *ticket, hx_err *);
    bool (*pushed)(hx_dev *, uint64_t ticket);
    int (*await_push)(hx_dev *, uint64_t ticket, hx_err *);
    int (*hold_push)(hx_dev *, hx_err *);
    int (*bring)(hx_dev *, void *to, hx_buf from, size_t bytes, hx_err *);
    int (*copy)(hx_dev *, hx_buf to, hx_buf from, size_t bytes, hx_err *);
    int (*mark)(hx_dev *, uint64_t *ticket, hx_err *);
    int (*reach)(hx_dev *, uint64_t ticket, hx_err *);
    int (*fetch)(hx_dev *, const hx_fetch_args *, hx_err *);
    int (*fetched)(hx_dev *, hx_err *);
    int (*side)(hx_dev *, bool side, hx_err *);
    int (*join)(hx_dev *, hx_err *);
    int (*record)(hx_dev *, hx_err *);
    int (*record_end)(hx_dev *, hx_dev_graph **, hx_err *);
    int (*replay)(hx_dev *, hx_dev_graph *, hx_err *);
    void (*graph_free)(hx_dev_graph *);
    const struct hx_enc_ops *encode; /* the EXL3 encoder's (enc_ops.h); NULL: none */
} hx_dev_link;

typedef struct {
    const char *name; /* "cpu", "ref", "cuda" */
    /* Memory of its own; all NULL where device memory is host memory. put and get are
     * ordered with the operations; get waits for them. */
    int (*alloc)(hx_dev *, hx_buf *out, size_t bytes, hx_err *);
    void (*free)(hx_dev *, hx_buf *);
    int (*put)(hx_dev *, hx_buf to, const void *from, size_t bytes, hx_err *);
    int (*get)(hx_dev *, void *to, hx_buf from, size_t bytes, hx_err *);
    const struct hx_dev_link *link; /* beside host memory; NULL where they are one */
#define X(op) int (*op)(hx_dev *, const hx_##op##_args *, hx_err *);
    HX_OPS(X)
#undef X
} hx_dev_ops;

struct hx_dev {
    const hx_dev_ops *ops;
    const char *isa; /* "avx512", "avx2", "scalar", "double" */
    hx_pool *pool;   /* owned */
    void *scratch;   /* [scratch_bytes] of the backend; fixed at open */
    size_t scratch_bytes;
    int level;           /* hx_isa of the cpu backend */
    void *own;           /* the cuda backend's state */
    uint64_t used_bytes; /* of the device's memory, by this program's buffers */
    char text[64];       /* "cpu (avx2, 2 threads)" */
    hx_op_time *times; /* [HX_N_OP + 1] filled while not NULL: an operation of each kind,
                          * and what came before it: copies that it waits for */
};

/* What the largest call will need; sizes the scratch so that no operation allocates. */
typedef struct {
    int64_t max_rows, max_k, max_n, max_active, max_expert, max_heads, max_ctx;
} hx_dev_limits;

typedef struct {
    const char *name, *isa, *cpus; /* as in hx_options; NULL: hx_dev_default(), … */
    int32_t n_threads;
    hx_dev_limits limits;
} hx_dev_opt;

/* Errors: HX_EARG (unknown name or isa, this CPU lacks it), HX_ENOMEM, HX_EUNSUP (which
 * operation the device lacks). */
int hx_dev_open(hx_dev **out, const hx_dev_opt *opt, hx_err *err);
/* What a name left out stands for: cuda where there is a GPU and code for one, else cpu. */
const char *hx_dev_default(void);
void hx_dev_close(hx_dev *d);

/* Zeroed memory on the device, and copies to and from it. is_host: buffers are plain
 * memory. */
int hx_dev_alloc(hx_dev *d, hx_buf *out, size_t bytes, hx_err *err);
void hx_dev_free(hx_dev *d, hx_buf *b);
int hx_dev_put(hx_dev *d, hx_buf to, const void *from, size_t bytes, hx_err *err);
int hx_dev_get(hx_dev *d, void *to, hx_buf from, size_t bytes, hx_err *err);
bool hx_dev_is_host(const hx_dev *d);

/* Memory of the device: free now, and in all. Host devices: what this process may use. */
int hx_dev_memory(hx_dev *d, uint64_t *free_bytes, uint64_t *total, hx_err *err);
/* Host memory that operations read in place, at its own address, until it is unpinned.
 * Errors: HX_ENOMEM (the sentence says how to raise the limit), HX_EUNSUP. Any thread. */
int hx_dev_pin(hx_dev *d, void *p, size_t bytes, hx_err *err);
void hx_dev_unpin(hx_dev *d, void *p);
/* Zeroed memory that host and device see at one address. */
int hx_dev_shared(hx_dev *d, hx_buf *out, size_t bytes, hx_err *err);
void hx_dev_unshared(hx_dev *d, hx_buf *b);
/* Copies from pinned host memory beside the operations, in order among themselves. A mark
 * stands for all pushes so far. */
int hx_dev_push(hx_dev *d, hx_buf to, const void *from, size_t bytes, hx_err *err);
int hx_dev_push_mark(hx_dev *d, uint64_t *ticket, hx_err *err);
bool hx_dev_pushed(hx_dev *d, uint64_t ticket); /* never waits */
/* Operations from here on come after those pushes; pushes from here on after all
 * operations so far. */
int hx_dev_await_push(hx_dev *d, uint64_t ticket, hx_err *err);
int hx_dev_hold_push(hx_dev *d, hx_err *err);
/* In order with the operations, without waiting: a copy to shared memory, which is there
 * when a later mark is reached; a copy inside the device; a mark. The latest two marks can
 * be waited for. */
int hx_dev_bring(hx_dev *d, void *to, hx_buf from, size_t bytes, hx_err *err);
int hx_dev_copy(hx_dev *d, hx_buf to, hx_buf from, size_t bytes, hx_err *err);
int hx_dev_mark(hx_dev *d, uint64_t *ticket, hx_err *err);
int hx_dev_reach(hx_dev *d, uint64_t ticket, hx_err *err);
/* Experts that a layer to come will probably pick, id, begin to come to the slots of *to
 * beside the operations, after all so far: of each row the likeliest first, those that are
 * not resident, until that layer's plan stops it. That plan ends when what it kept has
 * come. On a host at once. Errors: HX_EDEVICE. */
int hx_dev_fetch(hx_dev *d, const hx_fetch_args *a, hx_err *err);
/* After that plan: what follows comes after all of the fetch. */
int hx_dev_fetched(hx_dev *d, hx_err *err);
/* side true: operations from here on may run beside those that follow once side is false
 * again, after all that came before; join: what follows comes after both. Calls with few
 * rows only: the side has little scratch. */
int hx_dev_side(hx_dev *d, bool side, hx_err *err);
int hx_dev_join(hx_dev *d, hx_err *err);
/* Between record and record_end operations are noted down, not run; replay runs them all,
 * with the arguments they had. Only where !hx_dev_is_host(). */
int hx_dev_record(hx_dev *d, hx_err *err);
int hx_dev_record_end(hx_dev *d, hx_dev_graph **out, hx_err *err);
int hx_dev_replay(hx_dev *d, hx_dev_graph *g, hx_err *err);
void hx_dev_graph_free(hx_dev *d, hx_dev_graph *g); /* NULL is fine */

/* One checked entry per operation. Thread: the one that owns the device. */
#define X(op) int hx_op_##op(hx_dev *d, const hx_##op##_args *a, hx_err *err);
HX_OPS(X)
#undef X

/* What hc_mix with y and with w does before and after, as calls of their own. */
hx_hc_merge_args hx_hc_mix_merge(const hx_hc_mix_args *a);
hx_rmsnorm_args hx_hc_mix_norm(const hx_hc_mix_args *a);
/* Likewise kda_step and kda_chunk with a_log. */
hx_kda_gate_args hx_kda_step_gate(const hx_kda_step_args *a);

/* Expert e of a call of moe, with the addresses of at where that is there; host devices. */
hx_expert hx_moe_expert(const hx_moe_args *a, int64_t e);
/* The experts of a call of moe: from a->first on, before this one. */
static inline int64_t hx_moe_end(const hx_moe_args *a)
{
    return a->end != 0 ? a->end : a->n_expert;
}

/* n bytes from p on, as a buffer: a view of part of b. */
static inline hx_buf hx_buf_at(hx_buf b, size_t offset_bytes)
{
    hx_assert(offset_bytes <= b.n);
    return (hx_buf) { (char *)b.p + offset_bytes, b.n - offset_bytes };
}

#ifdef __cplusplus
}
#endif
#endif
