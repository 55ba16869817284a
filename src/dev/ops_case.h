/* ops_case.h - what the tests of the operations share: a call with its arguments and
 * guarded buffers, and the table of cases. Included by ops_test.c and ops_args_test.c
 * only; it has static definitions that each of them uses in full.
 *
 * A case is the argument struct itself with shapes filled in; fill_<op>() adds the
 * buffers. An operation without fill, cases or vectors does not compile. */
#ifndef HX_OPS_CASE_H
#define HX_OPS_CASE_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>

#include "dev/cpu.h"
#include "dev/fmt_exl3.h"

enum {
    GUARD = 1024, /* sentinel bytes on either side of a buffer */
    MAX_BUF = 1024,
    ARGS_BYTES = 512,
};

static const uint32_t POISON = 0x7FE5A5A5; /* a NaN that no arithmetic makes */

/* In a case: this optional buffer is left out; that one is there; this matrix has a bias. */
#define ABSENT                                                                           \
    {                                                                                    \
        NULL, 1                                                                          \
    }
#define GIVEN                                                                            \
    {                                                                                    \
        NULL, 2                                                                          \
    }
#define BIAS ((const void *)1)

/* ---- one call: arguments and their buffers --------------------------- */

typedef enum {
    IN,    /* must not change */
    OUT,   /* must be written everywhere */
    PART,  /* may be written in part; the rest must stay */
    STATE, /* read and written */
    WORK,  /* contents afterwards mean nothing */
} role;

typedef enum { T_F32, T_I32, T_CHOICE, T_U16, T_BF16, T_U8 } type;

static const size_t type_bytes[] = { 4, 4, 4, 2, 2, 1 };

typedef struct {
    const char *name;
    role role;
    type type;
    char *mem, *p;   /* with guards; the data */
    int64_t n, row;  /* elements, and how many a row of the call has (0: shared) */
    void **at;       /* where the arguments point to it */
    size_t *size_at; /* its hx_buf.n; NULL: weights */
    uint64_t sum;    /* of an IN buffer */
} tbuf;

struct op_row;

typedef struct {
    const struct op_row *op;
    tbuf buf[MAX_BUF];
    int n_buf;
    uint64_t seed;
    int skew;             /* bytes that weights lie off alignment */
    hx_arena arena;       /* matrices, experts: host structs of the arguments */
    const void **host_at; /* a host array that has one element per row, or NULL */
    size_t host_bytes;
    _Alignas(16) char args[ARGS_BYTES];
} trial;

typedef struct {
    double nmse;    /* of floats; ids are always exact */
    double exl3;    /* when a case has EXL3 matrices (0: as nmse) */
    double tensor;  /* of prefill rows where tensor cores take them (0: as the others) */
    bool same_bits; /* on every instruction set of a backend */
    bool canonical; /* and on every backend but ref */
    bool whole;     /* rows of a call are decided together, not each by itself */
    const char *why;
} bound;

typedef struct op_row {
    const char *name;
    const bound *bound;
    const void *cases, *vectors;
    size_t n_case, n_vector, args_bytes, rows_at;
    bool spans; /* rows are hx_rows, not int64_t */
    void (*fill)(trial *, void *);
    int (*call)(hx_dev *, const void *, hx_err *);
} op_row;

static size_t data_bytes(const tbuf *b)
{
    return (size_t)b->n * type_bytes[b->type];
}

static uint64_t checksum(const char *p, size_t n)
{
    uint64_t sum = n, word = 0;

    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&word, p, 8);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
        sum ^= sum >> 29;
    }
    word = 0;
    memcpy(&word, p, n);
    return (sum ^ word) * 0x9E3779B97F4A7C15u;
}

static uint64_t next_bits(uint64_t *s)
{
    uint64_t z = *s += 0x9E3779B97F4A7C15u;

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* About normal, deviation 1, at most 3.5. */
static float next_normal(uint64_t *s)
{
    const uint64_t z = next_bits(s);
    const int64_t sum =
        (int64_t)((z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48));

    return (float)(sum - 131070) / 37837.0f;
}

static void randomize(tbuf *b, uint64_t seed)
{
    const size_t size = type_bytes[b->type];

    for (int64_t i = 0; i < b->n; i++) {
        const float v = next_normal(&seed);
        const uint16_t half = hx_bf16_from(v);
        const uint64_t bits = next_bits(&seed) >> 33; /* ids are not negative */

        memcpy(b->p + (size_t)i * size,
               b->type == T_F32    ? (const void *)&v
               : b->type == T_BF16 ? (const void *)&half
                                   : &bits,
               size);
    }
}

static void *add(trial *t, const char *name, role r, type ty, int64_t n, int64_t row,
                 void **at, size_t *size_at)
{
    tbuf *b = &t->buf[t->n_buf];

    assert_true(t->n_buf++ < MAX_BUF);
    *b = (tbuf) { .name = name,
                  .role = r,
                  .type = ty,
                  .n = n,
                  .row = row,
                  .at = at,
                  .size_at = size_at };
    const int skew = size_at == NULL ? t->skew : 0;
    b->mem = hx_alloc(2 * GUARD + data_bytes(b) + 64);
    assert_non_null(b->mem);
    memset(b->mem, 0x5C, 2 * GUARD + data_bytes(b) + 64);
    b->p = b->mem + GUARD + skew;
    if (r == IN || r == STATE)
        randomize(b, hx_rng_at(t->seed, (uint64_t)t->n_buf));
    else
        for (int64_t i = 0; i < b->n; i++)
            memcpy(b->p + 4 * i, &POISON, 4);
    *at = b->p;
    if (size_at != NULL)
        *size_at = data_bytes(b);
    return b->p;
}

/* rows of row elements each. */
static void *row_buf(trial *t, hx_buf *b, const char *name, role r, type ty, int64_t rows,
                     int64_t row)
{
    return add(t, name, r, ty, rows * row, row, &b->p, &b->n);
}

/* The same of floats that are read; up: what is in them afterwards means nothing. */
static float *used_buf(trial *t, hx_buf *b, const char *name, bool up, int64_t rows,
                       int64_t row)
{
    float *p = row_buf(t, b, name, IN, T_F32, rows, row);

    if (up)
        t->buf[t->n_buf - 1].role = WORK;
    return p;
}

/* rows of dim floats, ld apart; nothing is written in between. */
static void *ld_buf(trial *t, hx_buf *b, const char *name, role r, int64_t rows,
                    int64_t dim, int64_t ld)
{
    return add(t, name, r == OUT && ld != dim ? PART : r, T_F32,
               HX_MAX((rows - 1) * ld + dim, 0), ld, &b->p, &b->n);
}

/* Shared by all rows; not made when the case says ABSENT. */
static float *one_buf(trial *t, hx_buf *b, const char *name, role r, int64_t n)
{
    if (b->n == 1) {
        *b = (hx_buf) { NULL, 0 };
        return NULL;
    }
    return add(t, name, r, T_F32, n, 0, &b->p, &b->n);
}

static void scale_by(float *p, int64_t n, float by)
{
    for (int64_t i = 0; i < n; i++)
        p[i] *= by;
}

/* Finite halves of magnitude 2^-3 .. 2, or both down powers of two less. */
static void tame_halves(char *p, int64_t n, int down)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t v;

        memcpy(&v, p + 2 * i, 2);
        v = (uint16_t)((v & 0x83FF) | (12 - down + (v >> 10 & 3)) << 10);
        memcpy(p + 2 * i, &v, 2);
    }
}

static const char *joined(trial *t, const char *a, const char *b)
{
    const size_t n = strlen(a) + strlen(b) + 2;
    char *s = hx_arena_alloc(&t->arena, n);

    assert_non_null(s);
    snprintf(s, n, "%s.%s", a, b);
    return s;
}

static char *weight_buf(trial *t, const char *name, const char *part, type ty, int64_t n,
                        const void **at)
{
    return add(t, joined(t, name, part), IN, ty, n, 0, (void **)(uintptr_t)at, NULL);
}

/* The matrix that *m describes, with random weights; outputs of about the inputs' size.
 */
static void weights(trial *t, const char *name, hx_mat *m)
{
    const float size = 3.0f / sqrtf((float)m->k);
    const int64_t n = m->n * m->k;

    if (m->bias != NULL)
        tame_halves(weight_buf(t, name, "bias", T_U16, m->n, &m->bias), m->n, 0);
    if (m->fmt == HX_FMT_EXL3) {
        m->n_pad = (m->n + 127) / 128 * 128;
        m->k_pad = (m->k + 127) / 128 * 128;
        weight_buf(t, name, "w", T_U16, m->n_pad * m->k_pad / 32 * m->k2, &m->w);
        tame_halves(weight_buf(t, name, "suh", T_U16, m->k_pad, &m->suh), m->k_pad,
                    HX_MAX(0, -ilogbf(size)));
        tame_halves(weight_buf(t, name, "svh", T_U16, m->n_pad, &m->svh), m->n_pad, 0);
        return;
    }
    char *w = weight_buf(t, name, "w",
                         m->fmt == HX_FMT_F32   ? T_F32
                         : m->fmt == HX_FMT_FP8 ? T_U8
                                                : T_U16,
                         n, &m->w);
    uint64_t seed = t->seed + (uint64_t)t->n_buf;
    for (int64_t i = 0; i < n; i++) {
        const float v = next_normal(&seed) * size;
        const uint16_t half = m->fmt == HX_FMT_F16 ? hx_f16_from(v) : hx_bf16_from(v);

        if (m->fmt == HX_FMT_F32)
            memcpy(w + 4 * i, &v, 4);
        else if (m->fmt != HX_FMT_FP8)
            memcpy(w + 2 * i, &half, 2);
        else if ((w[i] & 0x7F) == 0x7F) /* NaN */
            w[i] = 0;
    }
    if (m->fmt != HX_FMT_FP8)
        return;
    m->block_n = m->block_n > 0 ? m->block_n : 128;
    m->block_k = m->block_k > 0 ? m->block_k : 128;
    const int64_t n_scale =
        (m->n + m->block_n - 1) / m->block_n * ((m->k + m->block_k - 1) / m->block_k);
    char *scale = weight_buf(t, name, "scale", T_F32, n_scale, &m->scale);
    for (int64_t i = 0; i < n_scale; i++) {
        const float v = size / 100 * (1 + (float)(i % 7));

        memcpy(scale + 4 * i, &v, 4);
    }
}

static const hx_mat *weights_of(trial *t, const char *name, const hx_mat *like)
{
    hx_mat *m = hx_arena_alloc(&t->arena, sizeof(*m));

    assert_non_null(m);
    *m = *like;
    weights(t, name, m);
    return m;
}

static int64_t n_slot(const hx_rows *r)
{
    int64_t n = 1;

    for (int32_t i = 0; i < r->n_span; i++)
        n = HX_MAX(n, r->span[i].slot + 1);
    return n;
}

/* One past the last position of a slot that any span reaches. */
static int64_t slot_end(const hx_rows *r, int64_t slot)
{
    int64_t end = 0;

    for (int32_t i = 0; i < r->n_span; i++)
        if (r->span[i].slot == slot)
            end = HX_MAX(end, (int64_t)r->span[i].pos0 + r->span[i].n_row);
    return end;
}

/* Pools that the last row of any span sees. */
static int64_t n_pool(const hx_rows *r, int64_t positions)
{
    int64_t end = 0;

    for (int64_t q = 0; q < n_slot(r); q++)
        end = HX_MAX(end, slot_end(r, q));
    return end / positions;
}

/* Pages for all positions of the spans, in falling order of page number and with gaps
 * between sequences, items of unit positions each. */
static void paged(trial *t, const char *name, hx_pages *g, const hx_rows *r, int64_t unit,
                  role ro)
{
    const int64_t slots_n = n_slot(r);
    int64_t used = 0;

    g->max_page = 1;
    for (int64_t q = 0; q < slots_n; q++) {
        const int64_t n = (slot_end(r, q) + HX_PAGE - 1) / HX_PAGE;

        used += n;
        g->max_page = HX_MAX(g->max_page, n + 1);
    }
    g->n_page = used + 1;
    static const type types[] = {
        [HX_CACHE_BF16] = T_BF16, [HX_CACHE_F32] = T_F32, [HX_CACHE_FP8] = T_U8
    };
    const int64_t values = HX_PAGE / unit * g->width,
                  each = values + (g->fmt == HX_CACHE_FP8 ? HX_PAGE / unit : 0);
    uint8_t *bytes = row_buf(t, &g->data, name, ro, types[g->fmt], g->n_page * each, 1);
    t->buf[t->n_buf - 1].row = 0;
    for (int64_t i = 0; g->fmt == HX_CACHE_FP8 && i < g->n_page * each; i++)
        if (i % each >= values)
            bytes[i] = 118 + bytes[i] % 3;  /* 2^-9, 2^-8, 2^-7 */
        else if ((bytes[i] & 0x7F) == 0x7F) /* NaN */
            bytes[i] = 0x33;
    int32_t *table = add(t, joined(t, name, "table"), IN, T_I32, slots_n * g->max_page, 0,
                         &g->table_dev.p, &g->table_dev.n);
    g->table = table;
    for (int64_t q = 0, next = used; q < slots_n; q++)
        for (int64_t p = 0; p < g->max_page; p++)
            table[q * g->max_page + p] =
                p * HX_PAGE < slot_end(r, q) ? (int32_t)next-- : -1;
}

/* ---- buffers of each operation --------------------------------------- */

static void fill_embed(trial *t, hx_embed_args *a)
{
    a->table = weights_of(t, "table", a->table);
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows, a->streams * a->table->k);
    int32_t *id = row_buf(t, &a->id, "id", IN, T_I32, a->rows, 1);
    for (int64_t i = 0; i < a->rows; i++)
        id[i] = i == 0 ? (int32_t)a->table->n - 1 : (int32_t)(id[i] % a->table->n);
}

static void fill_rmsnorm(trial *t, hx_rmsnorm_args *a)
{
    ld_buf(t, &a->x, "x", IN, a->rows, a->dim, a->ldx);
    ld_buf(t, &a->y, "y", OUT, a->rows, a->dim, a->ldy);
    one_buf(t, &a->w, "w", IN, a->dim);
}

static void fill_layernorm(trial *t, hx_layernorm_args *a)
{
    float *x = ld_buf(t, &a->x, "x", IN, a->rows, a->dim, a->ldx);

    for (int64_t i = 0; i < (a->rows - 1) * a->ldx + a->dim; i++)
        x[i] += 2; /* a mean that matters */
    ld_buf(t, &a->y, "y", OUT, a->rows, a->dim, a->ldy);
    one_buf(t, &a->w, "w", IN, a->dim);
    one_buf(t, &a->b, "b", IN, a->dim);
}

static void fill_matmul(trial *t, hx_matmul_args *a)
{
    a->w = weights_of(t, "w", a->w);
    ld_buf(t, &a->x, "x", IN, a->rows, a->w->k, a->ldx = HX_MAX(a->ldx, a->w->k));
    ld_buf(t, &a->y, "y", OUT, a->rows, a->w->n, a->ldy = HX_MAX(a->ldy, a->w->n));
    if (a->beside == NULL)
        return;
    hx_matmul_args *beside = hx_arena_alloc(&t->arena, sizeof(*beside));

    assert_non_null(beside);
    *beside = *a->beside;
    beside->rows = a->rows;
    a->beside = beside;
    fill_matmul(t, beside);
}

static void fill_head_matmul(trial *t, hx_head_matmul_args *a)
{
    a->w = weights_of(t, "w", a->w);
    row_buf(t, &a->x, "x", IN, T_F32, a->rows,
            a->heads * (a->transposed ? a->n : a->w->k));
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows,
            a->heads * (a->transposed ? a->w->k : a->n));
}

static void fill_swiglu(trial *t, hx_swiglu_args *a)
{
    scale_by(row_buf(t, &a->gate, "gate", IN, T_F32, a->rows, a->dim), a->rows * a->dim,
             6);
    scale_by(row_buf(t, &a->up, "up", IN, T_F32, a->rows, a->dim), a->rows * a->dim, 6);
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows, a->dim);
}

static void fill_hc_mix(trial *t, hx_hc_mix_args *a)
{
    const int64_t s = a->streams_n;
    const bool merge = a->y.n != 0, norm = a->w.n != 0;

    row_buf(t, &a->streams, "streams", merge ? STATE : IN, T_F32, a->rows, s * a->dim);
    row_buf(t, &a->x, "x", OUT, T_F32, a->rows, a->dim);
    row_buf(t, &a->post, "post", merge ? STATE : OUT, T_F32, a->rows, s);
    row_buf(t, &a->comb, "comb", merge ? STATE : OUT, T_F32, a->rows, s * s);
    if (merge)
        row_buf(t, &a->y, "y", IN, T_F32, a->rows, a->dim);
    if (norm)
        one_buf(t, &a->w, "w", IN, a->dim);
    if (a->fn == NULL)
        return;
    a->fn = weights_of(t, "fn", a->fn);
    one_buf(t, &a->base, "base", IN, s * (2 + s));
    one_buf(t, &a->scale, "scale", IN, 3);
}

static void fill_hc_merge(trial *t, hx_hc_merge_args *a)
{
    const int64_t s = a->streams_n;

    row_buf(t, &a->streams, "streams", STATE, T_F32, a->rows, s * a->dim);
    row_buf(t, &a->y, "y", IN, T_F32, a->rows, a->dim);
    row_buf(t, &a->post, "post", IN, T_F32, a->rows, s);
    row_buf(t, &a->comb, "comb", IN, T_F32, a->rows, s * s);
}

static void fill_hc_mean(trial *t, hx_hc_mean_args *a)
{
    row_buf(t, &a->streams, "streams", IN, T_F32, a->rows, a->streams_n * a->dim);
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows, a->dim);
}

static void fill_conv_short(trial *t, hx_conv_short_args *a)
{
    const int64_t q = n_slot(&a->rows);

    row_buf(t, &a->u, "u", IN, T_F32, a->rows.n_row, a->channels);
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows.n_row, a->channels);
    one_buf(t, &a->w, "w", IN, a->channels * a->taps);
    one_buf(t, &a->state, "state", STATE, q * (a->taps - 1) * a->channels);
    one_buf(t, &a->pend, "pend", STATE, q * HX_PEND_MAX * a->channels);
}

static void fill_kda_gate(trial *t, hx_kda_gate_args *a)
{
    row_buf(t, &a->f, "f", IN, T_F32, a->rows, a->heads * a->width);
    row_buf(t, &a->b, "b", IN, T_F32, a->rows, a->heads);
    row_buf(t, &a->g, "g", OUT, T_F32, a->rows, a->heads * a->width);
    row_buf(t, &a->beta, "beta", OUT, T_F32, a->rows, a->heads);
    one_buf(t, &a->a_log, "a_log", IN, a->heads);
    one_buf(t, &a->dt_bias, "dt_bias", IN, a->heads * a->width);
}

/* Log-decays: most near 0, so that the state remembers; one channel in four about -5, so
 * that 64 rows sum to -320, far beyond what exp can undo in f32. Steps of 0 .. 1. */
static void tame_gates(float *g, int64_t n_g, float *beta, int64_t n_beta)
{
    for (int64_t i = 0; i < n_g; i++)
        g[i] = i % 4 == 3 ? -5 + 0.1f * fabsf(g[i]) : -0.03f * g[i] * g[i] * g[i] * g[i];
    for (int64_t i = 0; i < n_beta; i++)
        beta[i] = fabsf(beta[i]) / 3.6f;
}

static void fill_kda_step(trial *t, hx_kda_step_args *a)
{
    const int64_t q = n_slot(&a->rows), r = a->rows.n_row, w = a->width,
                  hw = a->heads * w;

    a->ld = HX_MAX(a->ld, hw);
    ld_buf(t, &a->q, "q", IN, r, hw, a->ld);
    ld_buf(t, &a->k, "k", IN, r, hw, a->ld);
    ld_buf(t, &a->v, "v", IN, r, hw, a->ld);
    const bool raw = a->a_log.n != 0;
    float *g = used_buf(t, &a->g, "g", raw, r, hw);
    float *beta = used_buf(t, &a->beta, "beta", raw, r, a->heads);
    if (raw) {
        one_buf(t, &a->a_log, "a_log", IN, a->heads);
        one_buf(t, &a->dt_bias, "dt_bias", IN, hw);
    } else {
        tame_gates(g, r * hw, beta, r * a->heads);
    }
    row_buf(t, &a->o, "o", OUT, T_F32, r, hw);
    one_buf(t, &a->state, "state", STATE, q * hw * w);
    float *rec =
        one_buf(t, &a->pend, "pend", STATE, q * HX_PEND_MAX * a->heads * (3 * w + 1));
    for (int64_t i = 0; i < q * HX_PEND_MAX * a->heads; i++, rec += 3 * w + 1) {
        scale_by(rec, w, 1 / sqrtf((float)w));
        tame_gates(rec + 2 * w, w, rec + 3 * w, 1);
    }
}

static void fill_kda_chunk(trial *t, hx_kda_chunk_args *a)
{
    fill_kda_step(t, a);
}

static void fill_kda_out(trial *t, hx_kda_out_args *a)
{
    row_buf(t, &a->o, "o", IN, T_F32, a->rows, a->heads * a->width);
    row_buf(t, &a->z, "z", IN, T_F32, a->rows, a->heads * a->width);
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows, a->heads * a->width);
    one_buf(t, &a->w, "w", IN, a->width);
}

static void fill_latent_append(trial *t, hx_latent_append_args *a)
{
    a->ldc = HX_MAX(a->ldc, a->cache.width);
    ld_buf(t, &a->c, "c", IN, a->rows.n_row, a->cache.width, a->ldc);
    paged(t, "cache", &a->cache, &a->rows, 1, STATE);
}

static void fill_index_append(trial *t, hx_index_append_args *a)
{
    const int64_t w = a->pool.width;

    row_buf(t, &a->key, "key", IN, T_F32, a->rows.n_row, w);
    row_buf(t, &a->gate, "gate", IN, T_F32, a->rows.n_row, w);
    one_buf(t, &a->ape, "ape", IN, a->pool_n * w);
    one_buf(t, &a->ring, "ring", STATE, n_slot(&a->rows) * HX_RING * 2 * w);
    paged(t, "pool", &a->pool, &a->rows, a->pool_n, STATE);
}

static void fill_index_score(trial *t, hx_index_score_args *a)
{
    const int64_t most = n_pool(&a->rows, a->pool_n);

    a->ld_score = HX_MAX(a->ld_score, most);
    row_buf(t, &a->q, "q", IN, T_F32, a->rows.n_row, a->heads * a->pool.width);
    row_buf(t, &a->w, "w", IN, T_F32, a->rows.n_row, a->heads);
    ld_buf(t, &a->score, "score", PART, a->rows.n_row, most, a->ld_score);
    paged(t, "pool", &a->pool, &a->rows, a->pool_n, IN);
}

static void fill_topk(trial *t, hx_topk_args *a)
{
    const int64_t most = n_pool(&a->rows, a->pool_n);

    a->ld_score = HX_MAX(a->ld_score, most);
    ld_buf(t, &a->score, "score", IN, a->rows.n_row, most, a->ld_score);
    row_buf(t, &a->pick, "pick", PART, T_I32, a->rows.n_row, a->k);
    row_buf(t, &a->n_pick, "n_pick", OUT, T_I32, a->rows.n_row, 1);
}

static void fill_mla_attend(trial *t, hx_mla_attend_args *a)
{
    const int64_t r = a->rows.n_row, hz = a->heads * a->cache.width;

    row_buf(t, &a->q, "q", IN, T_F32, r, hz);
    row_buf(t, &a->z, "z", OUT, T_F32, r, hz);
    paged(t, "cache", &a->cache, &a->rows, 1, IN);
    if (a->k_pick == 0)
        return;
    int32_t *pick = row_buf(t, &a->pick, "pick", IN, T_I32, r, a->k_pick);
    int32_t *n_pick = row_buf(t, &a->n_pick, "n_pick", IN, T_I32, r, 1);
    for (const hx_span *s = a->rows.span; s < a->rows.span + a->rows.n_span; s++)
        for (int64_t i = s->row0; i < s->row0 + s->n_row; i++) {
            const int64_t seen = (s->pos0 + i - s->row0 + 1) / a->pool_n,
                          n = HX_MIN(a->k_pick, seen);

            n_pick[i] = (int32_t)n;
            for (int64_t p = 0; p < n; p++)
                pick[i * a->k_pick + p] = (int32_t)(p * seen / n);
        }
}

static void fill_router(trial *t, hx_router_args *a)
{
    a->w = weights_of(t, "w", a->w);
    row_buf(t, &a->x, "x", IN, T_F32, a->rows, a->w->k);
    scale_by(one_buf(t, &a->bias, "bias", IN, a->w->n), a->w->n, 0.1f);
    row_buf(t, &a->score, "score", OUT, T_F32, a->rows, a->w->n);
    row_buf(t, &a->id, "id", OUT, T_I32, a->rows, a->active);
    row_buf(t, &a->weight, "weight", OUT, T_F32, a->rows, a->active);
}

/* All experts look like the case's one. Ids repeat over the rows but not in a row; each
 * seventh pick is left out. */
static void fill_moe(trial *t, hx_moe_args *a)
{
    static const char *const digits[] = {
        "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"
    };
    const hx_expert *like = a->expert;
    hx_expert *x = hx_arena_alloc(&t->arena, (size_t)a->n_expert * sizeof(*x));

    assert_true(x != NULL && (size_t)a->n_expert <= HX_LEN(digits));
    for (int64_t e = 0; e < a->n_expert; e++) {
        x[e] = *like;
        weights(t, joined(t, digits[e], "gate"), &x[e].gate);
        weights(t, joined(t, digits[e], "up"), &x[e].up);
        weights(t, joined(t, digits[e], "down"), &x[e].down);
    }
    a->expert = x;
    row_buf(t, &a->x, "x", IN, T_F32, a->rows, like->gate.k);
    row_buf(t, &a->y, "y", PART, T_F32, a->rows, a->active * like->gate.k);
    int32_t *id = row_buf(t, &a->id, "id", IN, T_I32, a->rows, a->active);
    for (int64_t i = 0; i < a->rows * a->active; i++)
        id[i] = i % 7 == 6 ? -1
                           : (int32_t)((i / a->active * 2 + i % a->active) % a->n_expert);
}

/* A third of the experts is here; ids differ in a row and repeat over the rows. */
static void fill_plan(trial *t, hx_plan_args *a)
{
    int32_t *id = row_buf(t, &a->id, "id", IN, T_I32, a->rows, a->active);
    int32_t *resident =
        add(t, "resident", IN, T_I32, a->n_expert, 0, &a->resident.p, &a->resident.n);

    for (int64_t i = 0; i < a->rows * a->active; i++)
        id[i] = (int32_t)((i / a->active * 3 + i % a->active) % a->n_expert);
    for (int64_t e = 0; e < a->n_expert; e++)
        resident[e] = e % 3 == 1 ? (int32_t)e : -1;
    row_buf(t, &a->x, "x", IN, T_F32, a->rows, a->dim);
    row_buf(t, &a->here, "here", OUT, T_I32, a->rows, a->active);
    row_buf(t, &a->there, "there", OUT, T_I32, a->rows, a->active);
    row_buf(t, &a->log, "log", OUT, T_I32, a->rows, a->active);
}

static void fill_combine(trial *t, hx_combine_args *a)
{
    row_buf(t, &a->base, "base", IN, T_F32, a->rows, a->dim);
    row_buf(t, &a->part, "part", IN, T_F32, a->rows, a->active * a->dim);
    row_buf(t, &a->weight, "weight", IN, T_F32, a->rows, a->active);
    row_buf(t, &a->y, "y", OUT, T_F32, a->rows, a->dim);
}

static void fill_sample(trial *t, hx_sample_args *a)
{
    float *l = row_buf(t, &a->logits, "logits", IN, T_F32, a->rows, a->n_vocab);

    scale_by(l, a->rows * a->n_vocab, 3);
    row_buf(t, &a->id, "id", OUT, T_I32, a->rows, 1);
    row_buf(t, &a->logprob, "logprob", PART, T_F32, a->rows, 1);
    row_buf(t, &a->top, "top", PART, T_CHOICE, a->rows, 40);
    row_buf(t, &a->scratch, "scratch", WORK, T_F32, a->rows, 2 * a->n_vocab);
    t->host_at = (const void **)&a->row;
    t->host_bytes = sizeof(hx_sample_row);
}

/* ---- the cases ------------------------------------------------------- */

#define OP_CASES(op, ...)                                                                \
    static const bound bound_##op = { __VA_ARGS__ };                                     \
    static const hx_##op##_args cases_##op[] =
#define VECTORS(op) static const hx_##op##_args vectors_##op[] =

#define MAT(FMT, N, K, ...)                                                              \
    &(const hx_mat)                                                                      \
    {                                                                                    \
        .fmt = HX_FMT_##FMT, .n = N, .k = K, __VA_ARGS__                                 \
    }
#define EXL3(N, K, K2, CB, ...)                                                          \
    MAT(EXL3, N, K, .k2 = K2, .codebook = HX_CB_##CB, __VA_ARGS__)
#define EXPERT(FMT, D, F, ...)                                                           \
    &(const hx_expert)                                                                   \
    {                                                                                    \
        .gate = { .fmt = HX_FMT_##FMT, .n = F, .k = D, __VA_ARGS__ },                    \
        .up = { .fmt = HX_FMT_##FMT, .n = F, .k = D, __VA_ARGS__ }, .down = {            \
            .fmt = HX_FMT_##FMT,                                                         \
            .n = D,                                                                      \
            .k = F,                                                                      \
            __VA_ARGS__                                                                  \
        }                                                                                \
    }
/* R rows; spans { slot, row0, n_row, pos0, commit } */
#define SPANS(R, ...)                                                                    \
    {                                                                                    \
        .n_row = R, .span = (const hx_span[]) { __VA_ARGS__ },                           \
        .n_span = sizeof((const hx_span[]) { __VA_ARGS__ }) / sizeof(hx_span)            \
    }
#define PAGES(FMT, W)                                                                    \
    {                                                                                    \
        .fmt = HX_CACHE_##FMT, .width = W                                                \
    }

OP_CASES(embed, .nmse = 0, .same_bits = true, .canonical = true,
         .why = "one value, at most one rounding") {
    { .rows = 1, .streams = 1, .table = MAT(F32, 1, 1) },
    { .rows = 5, .streams = 4, .table = MAT(BF16, 37, 129) },
    { .rows = 3, .streams = 2, .table = MAT(F16, 9, 17) },
    { .rows = 3, .streams = 1, .table = MAT(FP8, 9, 130) },
    { .rows = 7, .streams = 4, .table = MAT(BF16, 300, 256) },
    { .rows = 64, .streams = 4, .table = MAT(BF16, 200, 4096) },
};
VECTORS(embed) { { .rows = 3, .streams = 2, .table = MAT(BF16, 5, 4) } };

OP_CASES(rmsnorm, .nmse = 1e-13, .why = "f32 sums and one division") {
    { .rows = 1, .dim = 1, .ldx = 1, .ldy = 1, .eps = 1e-6f },
    { .rows = 3, .dim = 129, .ldx = 130, .ldy = 131, .eps = 1e-5f },
    { .rows = 5, .dim = 256, .ldx = 256, .ldy = 256, .eps = 1e-5f, .w = ABSENT },
    { .rows = 1, .dim = 4096, .ldx = 4096, .ldy = 4096, .eps = 1e-5f },
    { .rows = 64, .dim = 4096, .ldx = 4096, .ldy = 4096, .eps = 1e-5f },
};
VECTORS(rmsnorm) {
    { .rows = 2, .dim = 5, .ldx = 5, .ldy = 5, .eps = 1e-5f },
    { .rows = 2, .dim = 5, .ldx = 5, .ldy = 5, .eps = 1e-5f, .w = ABSENT },
};

OP_CASES(layernorm, .nmse = 1e-13, .why = "f32 sums; the mean is twice the deviation") {
    { .rows = 1, .dim = 2, .ldx = 2, .ldy = 2, .eps = 1e-6f },
    { .rows = 3,
      .dim = 131,
      .ldx = 140,
      .ldy = 133,
      .eps = 1e-6f,
      .w = ABSENT,
      .b = ABSENT },
    { .rows = 1, .dim = 128, .ldx = 128, .ldy = 128, .eps = 1e-6f },
    { .rows = 70, .dim = 128, .ldx = 128, .ldy = 128, .eps = 1e-6f },
};
VECTORS(layernorm) { { .rows = 2, .dim = 5, .ldx = 5, .ldy = 5, .eps = 1e-6f } };

OP_CASES(
    matmul, .nmse = 1e-12, .exl3 = 1e-7, .tensor = 5e-7, .same_bits = true,
    .canonical = true,
    .why = "f32 FMAs in a tree; EXL3: 16-bit activations (7e-10) and, for MUL1, weights "
           "that are not rounded to fp16 (4e-8)") {
    { .rows = 2,
      .w = EXL3(256, 640, 12, MUL1),
      .beside = &(const hx_matmul_args) { .w = EXL3(256, 640, 12, MUL1) } },
    { .rows = 6,
      .w = EXL3(256, 640, 6, MCG),
      .beside = &(const hx_matmul_args) { .w = EXL3(256, 640, 6, MCG) } },
    { .rows = 1,
      .w = MAT(BF16, 128, 4096),
      .beside =
          &(const hx_matmul_args) {
              .w = MAT(BF16, 64, 4096),
              .beside = &(const hx_matmul_args) { .w = MAT(BF16, 130, 4096) } } },
    { .rows = 3,
      .w = MAT(F16, 70, 200),
      .beside =
          &(const hx_matmul_args) {
              .w = MAT(F16, 9, 200),
              .beside = &(const hx_matmul_args) { .w = MAT(F32, 9, 136) } } },
    { .rows = 1, .w = MAT(F32, 1, 1) },
    { .rows = 3, .w = MAT(F32, 130, 129, .bias = BIAS), .ldx = 140, .ldy = 135 },
    { .rows = 5, .w = MAT(F16, 67, 300) },
    { .rows = 2, .w = MAT(BF16, 33, 1023, .bias = BIAS) },
    { .rows = 7, .w = MAT(BF16, 256, 256) },
    { .rows = 3, .w = MAT(FP8, 70, 200, .block_n = 32, .block_k = 48) },
    { .rows = 2, .w = MAT(FP8, 257, 513) },
    { .rows = 1, .w = EXL3(128, 128, 4, MUL1) },
    { .rows = 3, .w = EXL3(130, 200, 3, MUL1, .bias = BIAS), .ldx = 211, .ldy = 150 },
    { .rows = 2, .w = EXL3(128, 384, 2, MUL1) },
    { .rows = 2, .w = EXL3(256, 128, 5, MUL1) },
    { .rows = 5, .w = EXL3(256, 640, 6, MUL1) },
    { .rows = 2, .w = EXL3(128, 256, 7, MUL1) },
    { .rows = 4, .w = EXL3(256, 256, 8, MUL1) },
    { .rows = 17, .w = EXL3(256, 256, 8, MCG) },
    { .rows = 9, .w = EXL3(384, 256, 10, MUL1) },
    { .rows = 33, .w = EXL3(768, 256, 12, MUL1) },
    { .rows = 2, .w = EXL3(128, 128, 14, MUL1) },
    { .rows = 2, .w = EXL3(128, 256, 16, MUL1) },
    { .rows = 2, .w = EXL3(128, 256, 2, MCG) },
    { .rows = 3, .w = EXL3(256, 256, 4, MCG) },
    { .rows = 2, .w = EXL3(128, 256, 6, MCG, .bias = BIAS) },
    { .rows = 1, .w = EXL3(128, 384, 10, MCG) },
    { .rows = 1, .w = EXL3(128, 128, 12, MCG) },
    { .rows = 2, .w = EXL3(128, 128, 14, MCG) },
    { .rows = 2, .w = EXL3(128, 128, 16, MCG) },
    { .rows = 2, .w = EXL3(128, 256, 4, 3INST) },
    { .rows = 3, .w = EXL3(130, 250, 6, 3INST) },
    { .rows = 2, .w = EXL3(256, 128, 8, 3INST) },
    { .rows = 2, .w = EXL3(128, 128, 16, 3INST) },
    { .rows = 1, .w = EXL3(2048, 4096, 8, MUL1) },
    { .rows = 1, .w = EXL3(4096, 2048, 6, MUL1) },
    { .rows = 8, .w = EXL3(2048, 4096, 8, MCG) },
    { .rows = 1, .w = MAT(FP8, 1536, 4096) },
    { .rows = 64, .w = MAT(BF16, 288, 4096) },
    { .rows = 70, .w = EXL3(512, 4096, 12, MUL1) },
    { .rows = 3,
      .w = MAT(F32, 130, 129, .bias = BIAS),
      .ldx = 140,
      .ldy = 135,
      .prefill = true },
    { .rows = 7, .w = MAT(BF16, 256, 256), .prefill = true },
    { .rows = 2, .w = MAT(FP8, 257, 513), .prefill = true },
    { .rows = 70, .w = EXL3(130, 200, 6, MUL1, .bias = BIAS), .prefill = true },
    { .rows = 9, .w = EXL3(384, 256, 8, MCG), .prefill = true },
    { .rows = 300, .w = EXL3(128, 256, 7, MUL1), .prefill = true },
};
VECTORS(matmul) {
    { .rows = 2, .w = MAT(F32, 3, 6) },
    { .rows = 2, .w = MAT(F16, 3, 6, .bias = BIAS) },
    { .rows = 2, .w = MAT(BF16, 3, 6) },
    { .rows = 2, .w = MAT(FP8, 5, 6, .block_n = 2, .block_k = 4) },
    { .rows = 2, .w = EXL3(128, 128, 3, MUL1) },
    { .rows = 2, .w = EXL3(70, 100, 4, MCG, .bias = BIAS) },
    { .rows = 2, .w = EXL3(100, 128, 2, 3INST) },
};

OP_CASES(head_matmul, .nmse = 1e-12, .tensor = 5e-7, .same_bits = true, .canonical = true,
         .why = "f32 FMAs in a tree") {
    { .rows = 70,
      .heads = 3,
      .n = 40,
      .stride = 90,
      .first = 11,
      .w = MAT(BF16, 270, 72),
      .transposed = true,
      .prefill = true },
    { .rows = 5,
      .heads = 3,
      .n = 40,
      .stride = 90,
      .first = 11,
      .w = MAT(F32, 270, 72),
      .prefill = true },
    { .rows = 1, .heads = 1, .n = 1, .stride = 1, .w = MAT(F32, 1, 1) },
    { .rows = 3, .heads = 3, .n = 5, .stride = 11, .first = 2, .w = MAT(BF16, 30, 67) },
    { .rows = 3,
      .heads = 3,
      .n = 5,
      .stride = 11,
      .first = 2,
      .w = MAT(BF16, 30, 67),
      .transposed = true },
    { .rows = 2,
      .heads = 2,
      .n = 130,
      .stride = 140,
      .first = 4,
      .w = MAT(F16, 280, 150),
      .transposed = true },
    { .rows = 2,
      .heads = 2,
      .n = 64,
      .stride = 64,
      .w = MAT(FP8, 128, 256, .block_n = 64, .block_k = 64) },
    { .rows = 5,
      .heads = 2,
      .n = 256,
      .stride = 512,
      .w = MAT(BF16, 1024, 512),
      .transposed = true },
    { .rows = 5,
      .heads = 2,
      .n = 256,
      .stride = 512,
      .first = 256,
      .w = MAT(BF16, 1024, 512) },
    { .rows = 1,
      .heads = 16,
      .n = 256,
      .stride = 512,
      .w = MAT(BF16, 8192, 512),
      .transposed = true },
    { .rows = 1,
      .heads = 16,
      .n = 256,
      .stride = 512,
      .first = 256,
      .w = MAT(BF16, 8192, 512) },
};
VECTORS(head_matmul) {
    { .rows = 2, .heads = 2, .n = 3, .stride = 5, .first = 2, .w = MAT(BF16, 11, 4) },
    { .rows = 2,
      .heads = 2,
      .n = 3,
      .stride = 5,
      .first = 2,
      .w = MAT(BF16, 11, 4),
      .transposed = true },
};

OP_CASES(swiglu, .nmse = 1e-13, .why = "an exp of 2^-22 and one division") {
    { .rows = 1, .dim = 1, .limit = 10 },
    { .rows = 3, .dim = 131, .limit = 10 },
    { .rows = 3, .dim = 67, .limit = 0 },
    { .rows = 64, .dim = 2048, .limit = 10 },
};
VECTORS(swiglu) { { .rows = 2, .dim = 7, .limit = 10 },
                  { .rows = 2, .dim = 7, .limit = 0 } };

#define HC .norm_eps = 1e-5f, .eps = 1e-6f, .iters = 20
OP_CASES(hc_mix, .nmse = 1e-12,
         .why = "f32 dot products of S D terms through sigmoid and exp") {
    { .rows = 2, .streams_n = 1, .dim = 5 },
    { .rows = 3, .streams_n = 4, .dim = 33, .fn = MAT(F32, 24, 132), HC },
    { .rows = 2, .streams_n = 3, .dim = 20, .fn = MAT(BF16, 15, 60), HC },
    { .rows = 7, .streams_n = 4, .dim = 256, .fn = MAT(BF16, 24, 1024), HC },
    { .rows = 1, .streams_n = 4, .dim = 4096, .fn = MAT(BF16, 24, 16384), HC },
    { .rows = 19, .streams_n = 4, .dim = 4096, .fn = MAT(BF16, 24, 16384), HC },
    { .rows = 2, .streams_n = 1, .dim = 5, .norm_eps = 1e-5f, .y = GIVEN, .w = GIVEN },
    { .rows = 2, .streams_n = 3, .dim = 20, .fn = MAT(BF16, 15, 60), HC, .w = GIVEN },
    { .rows = 5, .streams_n = 8, .dim = 131, .fn = MAT(F16, 80, 1048), HC, .y = GIVEN },
    { .rows = 1,
      .streams_n = 4,
      .dim = 4096,
      .fn = MAT(BF16, 24, 16384),
      HC,
      .y = GIVEN,
      .w = GIVEN },
    { .rows = 6,
      .streams_n = 4,
      .dim = 2504,
      .fn = MAT(FP8, 24, 10016, .block_n = 128, .block_k = 128),
      HC,
      .y = GIVEN,
      .w = GIVEN },
};
VECTORS(hc_mix) {
    { .rows = 2, .streams_n = 4, .dim = 3, .fn = MAT(BF16, 24, 12), HC },
    { .rows = 2, .streams_n = 2, .dim = 5, .fn = MAT(BF16, 8, 10), HC },
};

OP_CASES(hc_merge, .nmse = 1e-13, .why = "S + 1 f32 terms") {
    { .rows = 1, .streams_n = 1, .dim = 1 },
    { .rows = 3, .streams_n = 4, .dim = 131 },
    { .rows = 2, .streams_n = 3, .dim = 17 },
    { .rows = 33, .streams_n = 4, .dim = 4096 },
};
VECTORS(hc_merge) { { .rows = 2, .streams_n = 4, .dim = 3 } };

OP_CASES(hc_mean, .nmse = 1e-13, .why = "S f32 terms") {
    { .rows = 1, .streams_n = 1, .dim = 1 },
    { .rows = 3, .streams_n = 4, .dim = 131 },
    { .rows = 33, .streams_n = 4, .dim = 4096 },
};
VECTORS(hc_mean) { { .rows = 2, .streams_n = 4, .dim = 3 } };

OP_CASES(conv_short, .nmse = 1e-13, .why = "a few f32 terms and an exp of 2^-22") {
    { .channels = 1, .taps = 4, .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .channels = 5, .taps = 4, .rows = SPANS(1, { 0, 0, 1, 3, 1 }), .hold = true },
    { .channels = 131,
      .taps = 4,
      .hold = true,
      .rows = SPANS(8, { 3, 0, 2, 9, 2 }, { 1, 2, 5, 77, 8 }, { 0, 7, 0, 40, 3 },
                    { 2, 7, 1, 0, 0 }) },
    { .channels = 131,
      .taps = 4,
      .rows = SPANS(37, { 3, 0, 30, 64, 2 }, { 1, 30, 7, 0, 0 }) },
    { .channels = 19,
      .taps = 8,
      .hold = true,
      .rows = SPANS(9, { 0, 0, 8, 5, 1 }, { 1, 8, 1, 1, 1 }) },
    { .channels = 19, .taps = 2, .rows = SPANS(3, { 0, 0, 1, 8, 1 }, { 1, 1, 2, 1, 1 }) },
    { .channels = 7, .taps = 1, .rows = SPANS(2, { 0, 0, 2, 8, 1 }) },
    { .channels = 24576, .taps = 4, .hold = true, .rows = SPANS(4, { 0, 0, 4, 100, 3 }) },
    { .channels = 24576, .taps = 4, .rows = SPANS(64, { 0, 0, 64, 128, 0 }) },
};
VECTORS(conv_short) {
    { .channels = 3,
      .taps = 4,
      .hold = true,
      .rows = SPANS(5, { 2, 0, 2, 7, 2 }, { 0, 2, 3, 0, 0 }, { 1, 5, 0, 9, 1 }) },
    { .channels = 3, .taps = 4, .rows = SPANS(7, { 2, 0, 2, 7, 1 }, { 0, 2, 5, 0, 0 }) },
};

OP_CASES(kda_gate, .nmse = 1e-13, .why = "two exps of 2^-22, one inside the other") {
    { .rows = 1, .heads = 1, .width = 1, .bound = -5 },
    { .rows = 3, .heads = 5, .width = 33, .bound = -5 },
    { .rows = 17, .heads = 64, .width = 128, .bound = -5 },
};
VECTORS(kda_gate) { { .rows = 2, .heads = 2, .width = 3, .bound = -5 } };

OP_CASES(kda_step, .nmse = 1e-12,
         .why = "f32 state and sums over the width, up to 8 rows deep") {
    { .heads = 1, .width = 1, .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .heads = 3,
      .width = 17,
      .ld = 60,
      .rows = SPANS(9, { 2, 0, 3, 9, 2 }, { 0, 3, 5, 88, 8 }, { 1, 8, 0, 40, 3 },
                    { 3, 8, 1, 0, 0 }) },
    { .heads = 2, .width = 40, .rows = SPANS(8, { 0, 0, 8, 64, 0 }) },
    { .heads = 4,
      .width = 128,
      .ld = 1536,
      .rows = SPANS(6, { 1, 0, 4, 300, 4 }, { 0, 4, 1, 7, 1 }, { 2, 5, 1, 0, 0 }) },
    { .heads = 64, .width = 128, .ld = 24576, .rows = SPANS(1, { 0, 0, 1, 1000, 1 }) },
    { .heads = 64, .width = 128, .ld = 24576, .rows = SPANS(4, { 0, 0, 4, 1000, 4 }) },
    { .heads = 3,
      .width = 17,
      .a_log = GIVEN,
      .bound = -5,
      .rows = SPANS(9, { 2, 0, 3, 9, 2 }, { 0, 3, 5, 88, 8 }, { 1, 8, 1, 0, 0 }) },
    { .heads = 64,
      .width = 128,
      .ld = 24576,
      .a_log = GIVEN,
      .bound = -5,
      .rows = SPANS(3, { 1, 0, 1, 1000, 1 }, { 0, 1, 2, 70, 8 }) },
};
VECTORS(kda_step) {
    { .heads = 2,
      .width = 4,
      .rows = SPANS(4, { 1, 0, 3, 9, 2 }, { 2, 3, 1, 0, 0 }, { 0, 4, 0, 5, 1 }) },
};

OP_CASES(kda_chunk, .nmse = 1e-12, .tensor = 1e-10,
         .why = "f32 products of products inside a block of 64 rows; on tensor cores 22 "
                "bits a factor, and differences of log decays that sum up to 320") {
    { .heads = 1, .width = 1, .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .heads = 3,
      .width = 17,
      .ld = 60,
      .rows = SPANS(44, { 2, 0, 37, 50, 2 }, { 0, 37, 7, 0, 0 }) },
    { .heads = 2, .width = 40, .rows = SPANS(200, { 0, 0, 200, 0, 0 }) },
    { .heads = 4,
      .width = 128,
      .ld = 1536,
      .rows = SPANS(130, { 1, 0, 100, 64, 0 }, { 0, 100, 30, 130, 8 }) },
    { .heads = 16, .width = 128, .ld = 24576, .rows = SPANS(64, { 0, 0, 64, 1024, 0 }) },
    { .heads = 3,
      .width = 40,
      .a_log = GIVEN,
      .bound = -5,
      .rows = SPANS(70, { 1, 0, 69, 3, 2 }, { 0, 69, 1, 130, 0 }) },
};
VECTORS(kda_chunk) {
    { .heads = 1,
      .width = 3,
      .rows = SPANS(39, { 1, 0, 30, 50, 1 }, { 0, 30, 9, 0, 0 }) },
};

OP_CASES(kda_out, .nmse = 1e-13, .why = "f32 sums, an exp of 2^-22") {
    { .rows = 1, .heads = 1, .width = 1, .eps = 1e-5f },
    { .rows = 3, .heads = 5, .width = 33, .eps = 1e-5f },
    { .rows = 17, .heads = 64, .width = 128, .eps = 1e-5f },
};
VECTORS(kda_out) { { .rows = 2, .heads = 2, .width = 5, .eps = 1e-5f } };

OP_CASES(latent_append, .nmse = 0, .same_bits = true, .why = "a copy, at most rounded") {
    { .cache = PAGES(BF16, 1), .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .cache = PAGES(BF16, 67),
      .ldc = 70,
      .rows = SPANS(75, { 2, 0, 5, 62, 0 }, { 0, 5, 70, 0, 0 }) },
    { .cache = PAGES(F32, 67),
      .rows = SPANS(75, { 2, 0, 5, 62, 0 }, { 0, 5, 70, 0, 0 }) },
    { .cache = PAGES(BF16, 512), .rows = SPANS(4, { 0, 0, 4, 2047, 0 }) },
    { .cache = PAGES(FP8, 1), .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .cache = PAGES(FP8, 67),
      .ldc = 70,
      .rows = SPANS(75, { 2, 0, 5, 62, 0 }, { 0, 5, 70, 0, 0 }) },
    { .cache = PAGES(FP8, 512), .rows = SPANS(4, { 0, 0, 4, 2047, 0 }) },
};
VECTORS(latent_append) {
    { .cache = PAGES(BF16, 2), .rows = SPANS(5, { 1, 0, 3, 62, 0 }, { 0, 3, 2, 0, 0 }) },
    { .cache = PAGES(F32, 2), .rows = SPANS(5, { 1, 0, 3, 62, 0 }, { 0, 3, 2, 0, 0 }) },
    { .cache = PAGES(FP8, 6), .rows = SPANS(5, { 1, 0, 3, 62, 0 }, { 0, 3, 2, 0, 0 }) },
};

OP_CASES(index_append, .nmse = 1e-8,
         .why = "f32 softmax; a key that lies half way may round to "
                "the other bf16 neighbour (f32 keys: see the vectors)") {
    { .pool_n = 4, .pool = PAGES(F32, 1), .rows = SPANS(1, { 0, 0, 1, 3, 0 }) },
    { .pool_n = 4,
      .pool = PAGES(F32, 67),
      .rows = SPANS(47, { 2, 0, 7, 58, 0 }, { 0, 7, 40, 0, 0 }) },
    { .pool_n = 8,
      .pool = PAGES(F32, 19),
      .rows = SPANS(20, { 1, 0, 8, 60, 0 }, { 0, 8, 12, 5, 0 }) },
    { .pool_n = 1, .pool = PAGES(BF16, 19), .rows = SPANS(3, { 0, 0, 3, 63, 0 }) },
    { .pool_n = 4, .pool = PAGES(BF16, 128), .rows = SPANS(64, { 0, 0, 64, 128, 0 }) },
};
VECTORS(index_append) {
    { .pool_n = 4,
      .pool = PAGES(BF16, 2),
      .rows = SPANS(10, { 1, 0, 7, 58, 0 }, { 0, 7, 3, 2, 0 }) },
    { .pool_n = 4,
      .pool = PAGES(F32, 2),
      .rows = SPANS(10, { 1, 0, 7, 58, 0 }, { 0, 7, 3, 2, 0 }) },
};

OP_CASES(index_score, .nmse = 1e-12,
         .why = "f32 dot products; weights of both signs cancel") {
    { .heads = 1,
      .pool_n = 4,
      .pool = PAGES(F32, 1),
      .scale = 1,
      .w_scale = 1,
      .rows = SPANS(1, { 0, 0, 1, 3, 0 }) },
    { .heads = 3,
      .pool_n = 4,
      .pool = PAGES(F32, 67),
      .scale = 0.1f,
      .w_scale = 0.5f,
      .ld_score = 50,
      .rows = SPANS(7, { 2, 0, 4, 126, 0 }, { 0, 4, 3, 0, 0 }) },
    { .heads = 4,
      .pool_n = 8,
      .pool = PAGES(BF16, 128),
      .scale = 0.09f,
      .w_scale = 0.5f,
      .rows = SPANS(20, { 1, 0, 15, 200, 0 }, { 0, 15, 5, 64, 0 }) },
    { .heads = 32,
      .pool_n = 4,
      .pool = PAGES(BF16, 128),
      .scale = 0.0884f,
      .w_scale = 0.1768f,
      .rows = SPANS(2, { 0, 0, 2, 8190, 0 }) },
};
VECTORS(index_score) {
    { .heads = 2,
      .pool_n = 4,
      .pool = PAGES(F32, 3),
      .scale = 0.5f,
      .w_scale = 0.25f,
      .rows = SPANS(5, { 1, 0, 2, 70, 0 }, { 0, 2, 3, 1, 0 }) },
};

OP_CASES(topk, .nmse = 0, .same_bits = true, .why = "no arithmetic") {
    { .k = 1, .pool_n = 1, .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .k = 5,
      .pool_n = 4,
      .rows = SPANS(20, { 0, 0, 4, 0, 0 }, { 1, 4, 9, 17, 0 }, { 0, 13, 7, 200, 0 }) },
    { .k = 128, .pool_n = 4, .rows = SPANS(3, { 0, 0, 3, 2000, 0 }), .ld_score = 600 },
    { .k = 512, .pool_n = 4, .rows = SPANS(2, { 0, 0, 2, 65535, 0 }) },
};
VECTORS(topk) { { .k = 5, .pool_n = 2, .rows = SPANS(4, { 0, 0, 4, 18, 0 }) } };

OP_CASES(mla_attend, .nmse = 1e-12, .tensor = 1e-6,
         .why = "f32 dot products through exp, f32 sums over positions; on tensor cores "
                "halves") {
    { .heads = 1,
      .cache = PAGES(F32, 1),
      .scale = 1,
      .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .heads = 3,
      .cache = PAGES(F32, 67),
      .scale = 0.2f,
      .rows = SPANS(70, { 1, 0, 66, 0, 0 }, { 0, 66, 4, 126, 0 }) },
    { .heads = 3,
      .cache = PAGES(BF16, 67),
      .scale = 0.2f,
      .k_pick = 6,
      .pool_n = 4,
      .rows = SPANS(14, { 1, 0, 7, 0, 0 }, { 0, 7, 7, 126, 0 }) },
    { .heads = 2,
      .cache = PAGES(BF16, 512),
      .scale = 0.0625f,
      .rows = SPANS(5, { 0, 0, 5, 511, 0 }) },
    { .heads = 64,
      .cache = PAGES(BF16, 512),
      .scale = 0.0625f,
      .rows = SPANS(1, { 0, 0, 1, 700, 0 }) },
    { .heads = 64,
      .cache = PAGES(BF16, 512),
      .scale = 0.0625f,
      .k_pick = 128,
      .pool_n = 4,
      .rows = SPANS(1, { 0, 0, 1, 3001, 0 }) },
    { .heads = 64,
      .cache = PAGES(BF16, 512),
      .scale = 0.0625f,
      .k_pick = 128,
      .pool_n = 4,
      .prefill = true,
      .rows = SPANS(3, { 0, 0, 3, 3001, 0 }) },
    { .heads = 3,
      .cache = PAGES(BF16, 72),
      .scale = 0.2f,
      .prefill = true,
      .rows = SPANS(70, { 1, 0, 66, 0, 0 }, { 0, 66, 4, 126, 0 }) },
    { .heads = 3,
      .cache = PAGES(F32, 67),
      .scale = 0.2f,
      .prefill = true,
      .rows = SPANS(10, { 1, 0, 6, 0, 0 }, { 0, 6, 4, 126, 0 }) },
    { .heads = 1,
      .cache = PAGES(FP8, 1),
      .scale = 1,
      .rows = SPANS(1, { 0, 0, 1, 0, 0 }) },
    { .heads = 3,
      .cache = PAGES(FP8, 67),
      .scale = 0.2f,
      .k_pick = 6,
      .pool_n = 4,
      .rows = SPANS(14, { 1, 0, 7, 0, 0 }, { 0, 7, 7, 126, 0 }) },
    { .heads = 17,
      .cache = PAGES(FP8, 80),
      .scale = 0.2f,
      .rows = SPANS(70, { 1, 0, 66, 0, 0 }, { 0, 66, 4, 126, 0 }) },
    { .heads = 64,
      .cache = PAGES(FP8, 512),
      .scale = 0.0625f,
      .rows = SPANS(2, { 0, 0, 2, 700, 0 }) },
    { .heads = 2,
      .cache = PAGES(FP8, 64),
      .scale = 0.0625f,
      .rows = SPANS(1, { 0, 0, 1, 9000, 0 }) },
    { .heads = 64,
      .cache = PAGES(FP8, 512),
      .scale = 0.0625f,
      .k_pick = 512,
      .pool_n = 4,
      .rows = SPANS(2, { 0, 0, 2, 32766, 0 }) },
    { .heads = 64,
      .cache = PAGES(BF16, 512),
      .scale = 0.0625f,
      .k_pick = 512,
      .pool_n = 4,
      .rows = SPANS(2, { 0, 0, 2, 32766, 0 }) },
    { .heads = 64,
      .cache = PAGES(FP8, 512),
      .scale = 0.0625f,
      .k_pick = 128,
      .pool_n = 4,
      .prefill = true,
      .rows = SPANS(3, { 0, 0, 3, 3001, 0 }) },
    { .heads = 3,
      .cache = PAGES(FP8, 80),
      .scale = 0.2f,
      .prefill = true,
      .rows = SPANS(70, { 1, 0, 66, 0, 0 }, { 0, 66, 4, 126, 0 }) },
};
VECTORS(mla_attend) {
    { .heads = 2,
      .cache = PAGES(F32, 3),
      .scale = 0.7f,
      .rows = SPANS(3, { 1, 0, 2, 66, 0 }, { 0, 2, 1, 0, 0 }) },
    { .heads = 2,
      .cache = PAGES(BF16, 3),
      .scale = 0.7f,
      .k_pick = 3,
      .pool_n = 4,
      .rows = SPANS(3, { 1, 0, 2, 66, 0 }, { 0, 2, 1, 0, 0 }) },
    { .heads = 2,
      .cache = PAGES(FP8, 3),
      .scale = 0.7f,
      .k_pick = 3,
      .pool_n = 4,
      .rows = SPANS(3, { 1, 0, 2, 66, 0 }, { 0, 2, 1, 0, 0 }) },
};

OP_CASES(router, .nmse = 1e-13,
         .why = "f32 dot products through a sigmoid; picks must agree") {
    { .rows = 1, .active = 1, .factor = 1, .w = MAT(F32, 1, 1) },
    { .rows = 7, .active = 3, .factor = 2.5f, .w = MAT(BF16, 19, 131) },
    { .rows = 5, .active = 4, .factor = 2.5f, .w = MAT(BF16, 16, 256) },
    { .rows = 9, .active = 8, .factor = 2.5f, .w = MAT(BF16, 288, 4096) },
};
VECTORS(router) { { .rows = 3, .active = 3, .factor = 2.5f, .w = MAT(BF16, 6, 5) } };

OP_CASES(moe, .nmse = 1e-12, .exl3 = 4e-7, .tensor = 1e-6, .same_bits = true,
         .canonical = true, .why = "three products (see matmul) and swiglu") {
    { .rows = 1, .active = 1, .n_expert = 1, .expert = EXPERT(F32, 1, 1), .limit = 10 },
    { .rows = 4,
      .active = 2,
      .n_expert = 3,
      .expert = EXPERT(BF16, 67, 130),
      .limit = 2 },
    { .rows = 3, .active = 2, .n_expert = 3, .expert = EXPERT(FP8, 130, 67), .limit = 0 },
    { .rows = 3, .active = 2, .n_expert = 4, .expert = EXPERT(F16, 33, 20), .limit = 10 },
    { .rows = 3,
      .active = 3,
      .n_expert = 5,
      .expert = EXPERT(EXL3, 200, 140, .k2 = 3, .codebook = HX_CB_MUL1),
      .limit = 10 },
    { .rows = 11,
      .active = 4,
      .n_expert = 9,
      .expert = EXPERT(EXL3, 256, 128, .k2 = 8, .codebook = HX_CB_MUL1),
      .limit = 10 },
    { .rows = 5,
      .active = 4,
      .n_expert = 9,
      .expert = EXPERT(EXL3, 256, 128, .k2 = 6, .codebook = HX_CB_MCG),
      .limit = 10 },
    { .rows = 70,
      .active = 4,
      .n_expert = 9,
      .expert = EXPERT(EXL3, 256, 128, .k2 = 6, .codebook = HX_CB_MUL1),
      .limit = 10,
      .prefill = true },
    { .rows = 70,
      .active = 4,
      .n_expert = 9,
      .first = 2,
      .end = 7,
      .expert = EXPERT(EXL3, 256, 128, .k2 = 6, .codebook = HX_CB_MUL1),
      .limit = 10,
      .prefill = true },
    { .rows = 5,
      .active = 3,
      .n_expert = 4,
      .first = 3,
      .end = 4,
      .expert = EXPERT(BF16, 33, 20),
      .limit = 10,
      .prefill = true },
    { .rows = 2,
      .active = 2,
      .n_expert = 4,
      .expert = EXPERT(EXL3, 256, 128, .k2 = 4, .codebook = HX_CB_3INST),
      .limit = 10 },
    { .rows = 1,
      .active = 1,
      .n_expert = 1,
      .expert = EXPERT(EXL3, 4096, 2048, .k2 = 6, .codebook = HX_CB_MUL1),
      .limit = 10 },
    { .rows = 3,
      .active = 1,
      .n_expert = 1,
      .expert = EXPERT(EXL3, 4096, 2048, .k2 = 8, .codebook = HX_CB_MCG),
      .limit = 10 },
};
VECTORS(moe) {
    { .rows = 3, .active = 2, .n_expert = 3, .expert = EXPERT(BF16, 4, 3), .limit = 2.5f }
};

OP_CASES(plan, .nmse = 0, .same_bits = true, .canonical = true, .whole = true,
         .why = "a decision over counts") {
    { .rows = 1, .active = 1, .n_expert = 1, .dim = 1 },
    { .rows = 2,
      .active = 8,
      .n_expert = 20,
      .dim = 33,
      .rates = { 2, 190, 240, 60, 20 } },
    { .rows = 1,
      .active = 8,
      .n_expert = 288,
      .dim = 64,
      .rates = { 2, 190, 240, 60, 20 } },
    { .rows = 8,
      .active = 8,
      .n_expert = 288,
      .dim = 8,
      .rates = { 2, 190, 240, 60, 20 } },
    { .rows = 16, .active = 8, .n_expert = 24, .dim = 8, .rates = { 0, 100, 1, 5, 0 } },
    { .rows = 16, .active = 8, .n_expert = 24, .dim = 8, .rates = { 9, 1, 100, 5, 0 } },
};
VECTORS(plan) {
    { .rows = 1, .active = 4, .n_expert = 9, .dim = 2, .rates = { 2, 190, 240, 60, 20 } },
    { .rows = 5, .active = 4, .n_expert = 9, .dim = 2, .rates = { 2, 190, 240, 60, 20 } },
    { .rows = 5, .active = 4, .n_expert = 9, .dim = 2, .rates = { 2, 190, 0, 60, 20 } },
    { .rows = 6, .active = 3, .n_expert = 30, .dim = 2, .rates = { 8, 10, 4, 2, 1 } },
};

OP_CASES(combine, .nmse = 1e-13, .same_bits = true, .canonical = true,
         .why = "A f32 FMAs") {
    { .rows = 1, .active = 1, .dim = 1 },
    { .rows = 3, .active = 4, .dim = 131 },
    { .rows = 9, .active = 8, .dim = 4096 },
};
VECTORS(combine) { { .rows = 2, .active = 3, .dim = 5 } };

/* Ids 0 .. 5 of 12 are allowed by the first mask; the second bans id 6. */
static const hx_sample_row plain_rows[] = {
    { .want_logprob = true, .n_top = 20 },
    { .temperature = 1, .seed = 7, .counter = 1, .want_logprob = true },
    { .temperature = 0.7f,
      .top_k = 5,
      .top_p = 0.8f,
      .seed = 7,
      .counter = 2,
      .n_top = 3 },
    { .temperature = 1.3f, .top_p = 0.9f, .min_p = 0.05f, .seed = 9, .counter = 3 },
    { .temperature = 1,
      .min_p = 0.2f,
      .seed = 9,
      .counter = 4,
      .want_logprob = true,
      .repeat = 1.2f,
      .presence = 0.5f,
      .frequency = 0.3f,
      .n_hist = 3,
      .hist_id = (const int32_t[]) { 1, 0, 2 },
      .hist_count = (const int32_t[]) { 0, 2, 1 } },
    { .temperature = 1e-4f,
      .seed = 1,
      .n_ban = 1,
      .ban = (const int32_t[]) { 0 },
      .n_bias = 2,
      .bias = (const hx_bias[]) { { 2, 4 }, { 1, -100 } },
      .want_logprob = true,
      .n_top = 1 },
};
OP_CASES(sample, .nmse = 1e-12, .why = "f32 log-softmax; ids must agree") {
    { .rows = 1,
      .n_vocab = 1,
      .n_token = 1,
      .row = (const hx_sample_row[]) { { .want_logprob = true } } },
    { .rows = 6, .n_vocab = 37, .n_token = 33, .row = plain_rows },
    { .rows = 6, .n_vocab = 4096, .n_token = 4067, .row = plain_rows },
    { .rows = 2, .n_vocab = 154880, .n_token = 154856, .row = plain_rows },
    { .rows = 1,
      .n_vocab = 40,
      .n_token = 38,
      .row = (const hx_sample_row[]) { { .mask = (const uint32_t[]) { 0x3F, 0x1 },
                                         .temperature = 1,
                                         .seed = 3,
                                         .want_logprob = true,
                                         .n_top = 5 } } },
};
VECTORS(sample) {
    { .rows = 3,
      .n_vocab = 12,
      .n_token = 10,
      .row = (const hx_sample_row[]) { { .want_logprob = true,
                                         .n_top = 3,
                                         .repeat = 1.3f,
                                         .frequency = 0.2f,
                                         .presence = 0.4f,
                                         .n_hist = 3,
                                         .hist_id = (const int32_t[]) { 2, 5, 8 },
                                         .hist_count = (const int32_t[]) { 3, 1, 0 },
                                         .n_bias = 2,
                                         .bias = (const hx_bias[]) { { 1, 2.5f },
                                                                     { 3, -100 } },
                                         .mask = (const uint32_t[]) { 0x3BF },
                                         .n_ban = 1,
                                         .ban = (const int32_t[]) { 9 } },
                                       { .want_logprob = true, .n_top = 3 },
                                       { .want_logprob = true, .n_top = 3 } } },
};

#define X(op)                                                                            \
    static void any_fill_##op(trial *t, void *a)                                         \
    {                                                                                    \
        fill_##op(t, a);                                                                 \
    }                                                                                    \
    static int any_call_##op(hx_dev *d, const void *a, hx_err *err)                      \
    {                                                                                    \
        return hx_op_##op(d, a, err);                                                    \
    }
HX_OPS(X)
#undef X

static const op_row op_rows[] = {
#define X(op)                                                                            \
    { .name = #op,                                                                       \
      .bound = &bound_##op,                                                              \
      .cases = cases_##op,                                                               \
      .vectors = vectors_##op,                                                           \
      .n_case = HX_LEN(cases_##op),                                                      \
      .n_vector = HX_LEN(vectors_##op),                                                  \
      .args_bytes = sizeof(hx_##op##_args),                                              \
      .rows_at = offsetof(hx_##op##_args, rows),                                         \
      .spans = _Generic(((hx_##op##_args *)0)->rows, hx_rows                             \
                        : true, int64_t                                                  \
                        : false),                                                        \
      .fill = any_fill_##op,                                                             \
      .call = any_call_##op },
    HX_OPS(X)
#undef X
};

static const op_row *op_named(const char *name)
{
    for (size_t i = 0; i < HX_LEN(op_rows); i++)
        if (strcmp(op_rows[i].name, name) == 0)
            return &op_rows[i];
    fail_msg("no operation %s", name);
    return NULL;
}

/* ---- trials -------------------------------------------------------- */

static trial *new_trial(const op_row *op, const void *args, uint64_t seed, int skew)
{
    trial *t = hx_new(trial, 1);

    assert_true(t != NULL && op->args_bytes <= sizeof(t->args));
    t->op = op;
    t->seed = seed;
    t->skew = skew;
    hx_arena_init(&t->arena, 64 << 20);
    memcpy(t->args, args, op->args_bytes);
    op->fill(t, t->args);
    for (tbuf *b = t->buf; b < t->buf + t->n_buf; b++)
        b->sum = checksum(b->p, data_bytes(b));
    return t;
}

static void free_trial(trial *t)
{
    for (int i = 0; t != NULL && i < t->n_buf; i++)
        hx_free(t->buf[i].mem);
    if (t != NULL)
        hx_arena_reset(&t->arena);
    hx_free(t);
}

static tbuf *buf_named(trial *t, const char *name)
{
    for (int i = 0; i < t->n_buf; i++)
        if (strcmp(t->buf[i].name, name) == 0)
            return &t->buf[i];
    return NULL;
}

static void *data_of(trial *t, const char *name)
{
    tbuf *b = buf_named(t, name);

    assert_non_null(b);
    return b->p;
}

static void check_ok(const char *label, int rc, const hx_err *err)
{
    if (rc != 0)
        fail_msg("%s: error %d: %s", label, rc, err->msg);
}

static const hx_dev_limits test_limits = { .max_rows = 256,
                                           .max_k = 16384,
                                           .max_n = 160000,
                                           .max_active = 8,
                                           .max_expert = 2048,
                                           .max_heads = 64,
                                           .max_ctx = 70000 };

#endif
