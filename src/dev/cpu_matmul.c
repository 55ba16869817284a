/* cpu_matmul.c - matmul, head_matmul and moe of the CPU backend: the canonical arithmetic
 * of canon.h for every weight format. Called through the table in cpu.c; the inner loops
 * are here in plain C and in cpu_x86.c for AVX2 and AVX-512. Memory is the device's
 * scratch, nothing is allocated. Which worker computes what must never change a bit.
 *
 * A product runs in two phases: rows are prepared (EXL3: scaled, rotated, quantised;
 * plain: padded to whole blocks, or used where they lie), then bands of 128 outputs are
 * computed, each by one worker: block of 128 inputs by block, the weights of 16 outputs
 * are decoded once for up to 64 rows. */
#include <sched.h>
#include <stdatomic.h>

#include "dev/cpu_matmul.h"

#include "dev/fmt_exl3.h"
#include "dev/fmt_fp8.h"

enum {
    BLOCK = HX_MM_BLOCK,
    COLS = HX_MM_COLS,
    WIDE = HX_MM_WIDE,
    BAND = 128,  /* outputs that a worker computes together: a rotation */
    ROWS = 64,   /* that share one decoding of the weights */
    BATCH = 512, /* rows that are prepared together, at most */
    FEW = 2,     /* rows for which widening first does not pay */
    ALIGN = 64,
    PANELS = BAND / COLS
};

/* Where preparing more rows at once would not pay for its memory. */
#define AREA_MAX_BYTES ((size_t)48 << 20)

/* Products of weight and activation that a worker takes at least at a time: some 4 us. */
#define GRAIN_MACS (1 << 15)

/* ---- kernels in plain C ---------------------------------------------- */

/* Place of input i of a block among its activations. */
static int stream_slot(int i)
{
    return (i & ~15) + 4 * ((i & 7) >> 1) + (i & 1) + 2 * (i >> 3 & 1);
}

static void scalar_quantize(const float *x, const void *suh, bool mul1, hx_mm_exl3 *out)
{
    float v[BLOCK];
    int16_t a[BLOCK];

    for (int i = 0; i < BLOCK; i++)
        v[i] = x[i] * hx_f16_at(suh, i);
    hx_canon_rotate(v);
    out->sum = hx_canon_quantize(v, a, &out->q);
    for (int i = 0; i < BLOCK; i++) {
        const int to = stream_slot(i);
        int hi, lo;

        if (mul1) {
            out->a[0][to] = a[i];
            continue;
        }
        hx_canon_planes(a[i], &hi, &lo);
        out->a[0][to] = (int16_t)hi;
        out->a[1][to] = (int16_t)lo;
    }
}

static void scalar_decode(const uint8_t *tile, size_t row_bytes, int k2,
                          hx_codebook codebook, int16_t *w)
{
    for (int t = 0; t < 8; t++, tile += row_bytes, w += 256)
        for (int p = 0; p < 256; p++) {
            const uint32_t s = hx_exl3_state(tile, k2, p);
            const int v =
                codebook == HX_CB_MUL1 ? hx_exl3_byte_sum(s) : hx_exl3_int(s, codebook);

            w[16 * hx_exl3_col(p) + stream_slot(hx_exl3_row(p))] = (int16_t)v;
        }
}

/* Column c of the block times a; unsigned, for byte sums may pass 2^31 on the way. */
static uint32_t scalar_dot(const int16_t *w, int c, const int16_t *a)
{
    uint32_t sum = 0;

    for (int t = 0; t < 8; t++)
        for (int i = 0; i < 16; i++)
            sum += (uint32_t)(w[256 * t + 16 * c + i] * a[16 * t + i]);
    return sum;
}

static void scalar_sum_exl3(const hx_mm_sum *s)
{
    for (int r = 0; r < s->n_row; r++) {
        const hx_mm_exl3 *x = (const void *)(s->x + (size_t)r * s->x_step);

        for (int c = 0; c < COLS; c++) {
            const uint32_t sum = scalar_dot(s->w, c, x->a[0]);
            const float t =
                s->mul1 ? hx_canon_term_mul1((int32_t)(sum - 512u * (uint32_t)x->sum),
                                             x->sum, x->q)
                        : hx_canon_term_half((int32_t)sum,
                                             (int32_t)scalar_dot(s->w, c, x->a[1]), x->q);

            hx_canon_tree_add(s->tree + (size_t)r * s->tree_step + c, COLS, s->block, t);
        }
    }
}

static void scalar_rotate(float *y, const void *svh)
{
    hx_canon_rotate(y);
    for (int i = 0; i < BAND; i++)
        y[i] *= hx_f16_at(svh, i);
}

static void scalar_widen(float *out, const void *in, hx_fmt fmt, float scale, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = fmt == HX_FMT_F32    ? hx_f32_at(in, i)
                 : fmt == HX_FMT_F16  ? hx_f16_at(in, i)
                 : fmt == HX_FMT_BF16 ? hx_bf16_at(in, i)
                                      : hx_fp8_at(in, i) * scale;
}

static void scalar_sum_plain(const hx_mm_sum *s)
{
    const float *w = s->w;

    for (int r = 0; r < s->n_row; r++)
        for (int c = 0; c < COLS; c++)
            hx_canon_tree_add(s->tree + (size_t)r * s->tree_step + c, COLS, s->block,
                              hx_canon_dot(w + c * BLOCK,
                                           (const void *)(s->x + (size_t)r * s->x_step)));
}

static void scalar_sum_columns(const hx_mm_sum *s, int n_in)
{
    const float *w = s->w;

    for (int r = 0; r < s->n_row; r++) {
        const float *x = (const void *)(s->x + (size_t)r * s->x_step);

        for (int c = 0; c < WIDE; c++) {
            float t = 0;

            for (int i = 0; i < n_in; i++)
                t = fmaf(w[i * WIDE + c], x[i], t);
            hx_canon_tree_add(s->tree + (size_t)r * s->tree_step + c, WIDE, s->block, t);
        }
    }
}

static void scalar_act(float *h, const float *g, const float *u, float limit)
{
    for (int i = 0; i < BAND; i++)
        h[i] = hx_canon_act(g[i], u[i], limit);
}

const hx_mm_kernels hx_mm_scalar = {
    .quantize = scalar_quantize,
    .decode = scalar_decode,
    .sum_exl3 = scalar_sum_exl3,
    .rotate = scalar_rotate,
    .widen = scalar_widen,
    .sum_plain = scalar_sum_plain,
    .sum_columns = scalar_sum_columns,
    .act = scalar_act,
};

static const hx_mm_kernels *kernels(const hx_dev *d)
{
#if defined(__x86_64__)
    if (d->level == HX_ISA_AVX512)
        return &hx_mm_avx512;
    if (d->level == HX_ISA_AVX2)
        return &hx_mm_avx2;
#endif
    (void)d;
    return &hx_mm_scalar;
}

/* ---- scratch --------------------------------------------------------- */

/* A worker's own memory. trees: f32 [ROWS][levels][COLS]; behind them a row of the widest
 * matrix. */
typedef struct {
    union {
        int16_t exl3[8 * 16 * 16];
        float plain[COLS * BLOCK];
        float columns[BLOCK * WIDE];
    } w;
    float y[2][ROWS * BAND];
    float trees[];
} worker;

/* What the phases of one call share. */
typedef struct {
    const hx_mm_kernels *k;
    uint8_t *workers, *free;
    size_t worker_bytes, free_bytes;
} memory;

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t n_block(int64_t k)
{
    return ceil_div(k, BLOCK);
}

/* Subtrees that can be open at once when n terms join. */
static int tree_levels(int64_t n)
{
    int levels = 1;

    while (n >> levels > 0)
        levels++;
    return levels;
}

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t worker_bytes(int64_t max_k)
{
    const int64_t blocks = n_block(max_k);

    return align_up(sizeof(worker) +
                    sizeof(float) *
                        (size_t)(ROWS * COLS * tree_levels(blocks) + blocks * BLOCK));
}

/* Prepared rows: gate, up and down of a pair, or one matrix. */
static size_t row_bytes(int64_t blocks)
{
    return (size_t)blocks * HX_MM_EXL3_BYTES;
}

/* Experts: bytes of a batch for each of its pairs, which at most make a group each. */
static size_t pair_bytes(int64_t d, int64_t f)
{
    return 2 * row_bytes(n_block(d)) + row_bytes(n_block(f)) +
           sizeof(float) * (size_t)(BAND * (2 * n_block(f) + n_block(d))) +
           sizeof(int32_t) * (size_t)(2 + n_block(f) + n_block(d));
}

size_t hx_cpu_matmul_scratch_bytes(const hx_dev_limits *l, int n_thread)
{
    const int64_t max_k = HX_MAX(HX_MAX(l->max_k, l->max_n), 1);
    const int64_t active = HX_MAX(l->max_active, 0);
    const size_t pairs = (size_t)(HX_MAX(l->max_rows, 1) * HX_MAX(active, 1));
    const size_t per_row =
        active > 0 ? pair_bytes(max_k, max_k) : row_bytes(n_block(max_k));
    const size_t area =
        HX_MAX(HX_MIN(HX_MIN(pairs, BATCH) * per_row, AREA_MAX_BYTES), per_row);
    const size_t lists =
        4 * (pairs + (size_t)HX_MAX(l->max_expert, 0) + 1) + BATCH * 16 + 4 * ALIGN;

    return (size_t)n_thread * worker_bytes(max_k) + area + lists + ALIGN;
}

static worker *worker_at(const memory *s, int i)
{
    return (worker *)(void *)(s->workers + (size_t)i * s->worker_bytes);
}

/* Takes n bytes; NULL when the scratch is too small. */
static void *take(memory *s, size_t n)
{
    uint8_t *p = s->free;

    n = align_up(n);
    if (n > s->free_bytes)
        return NULL;
    s->free += n;
    s->free_bytes -= n;
    return p;
}

static int no_scratch(const hx_dev *d, const char *op, hx_err *err)
{
    return hx_fail(err, HX_ENOMEM,
                   "%s: %zu bytes of scratch are too few; open the device with larger "
                   "limits",
                   op, d->scratch_bytes);
}

static int memory_open(memory *s, const hx_dev *d, int64_t max_k, const char *op,
                       hx_err *err)
{
    const size_t skip = (ALIGN - (uintptr_t)d->scratch % ALIGN) % ALIGN;

    *s = (memory) { .k = kernels(d), .worker_bytes = worker_bytes(max_k) };
    if (d->scratch_bytes < skip)
        return no_scratch(d, op, err);
    s->free = (uint8_t *)d->scratch + skip;
    s->free_bytes = d->scratch_bytes - skip;
    s->workers = take(s, s->worker_bytes * (size_t)hx_pool_size(d->pool));
    return s->workers != NULL ? 0 : no_scratch(d, op, err);
}

/* ---- one product ----------------------------------------------------- */

/* Rows of inputs for one matrix, cut into blocks. */
typedef struct {
    const uint8_t *p;
    size_t row_step, block_step; /* bytes */
    int n_row;                   /* at most ROWS */
} rows_view;

/* Outputs first … first + n - 1 of m (plain formats: rows of W; EXL3: 0 … m->n - 1). */
typedef struct {
    const hx_mat *m;
    int64_t first, n;
} outputs;

static bool is_exl3(const hx_mat *m)
{
    return m->fmt == HX_FMT_EXL3;
}

static bool is_mul1(const hx_mat *m)
{
    return is_exl3(m) && m->codebook == HX_CB_MUL1;
}

static size_t block_bytes(const hx_mat *m)
{
    return !is_exl3(m)  ? HX_MM_PLAIN_BYTES
           : is_mul1(m) ? HX_MM_MUL1_BYTES
                        : HX_MM_EXL3_BYTES;
}

static outputs all_outputs(const hx_mat *m)
{
    return (outputs) { m, 0, m->n };
}

/* Prepares block b of a row; x: its inputs, which past m->k need not be there. */
static void prepare(const hx_mm_kernels *k, const hx_mat *m, const float *x, int64_t b,
                    void *out)
{
    const size_t n = (size_t)HX_MIN(m->k - b * BLOCK, BLOCK);
    float padded[BLOCK];

    if (!is_exl3(m)) {
        memcpy(out, x, n * sizeof(float));
        memset((float *)out + n, 0, (BLOCK - n) * sizeof(float));
        return;
    }
    if (n < BLOCK) {
        memcpy(padded, x, n * sizeof(float));
        memset(padded + n, 0, (BLOCK - n) * sizeof(float));
        x = padded;
    }
    k->quantize(x, (const uint8_t *)m->suh + 2 * b * BLOCK, is_mul1(m), out);
}

/* Columns k0 … k0 + n - 1 of row r of a plain matrix. */
static void widen(const hx_mm_kernels *k, const hx_mat *m, int64_t r, int64_t k0, int n,
                  float *out)
{
    static const uint8_t bytes[HX_N_FMT] = {
        [HX_FMT_F32] = 4, [HX_FMT_F16] = 2, [HX_FMT_BF16] = 2, [HX_FMT_FP8] = 1
    };
    const uint8_t *w = (const uint8_t *)m->w + (r * m->k + k0) * bytes[m->fmt];

    if (m->fmt != HX_FMT_FP8) {
        k->widen(out, w, m->fmt, 1.0f, n);
        return;
    }
    for (int i = 0, part; i < n; i += part) { /* columns that share a scale */
        part = (int)HX_MIN(n - i, m->block_k - (k0 + i) % m->block_k);
        k->widen(out + i, w + i, m->fmt, hx_fp8_scale(m, r, k0 + i), part);
    }
}

/* Asks for the tiles that follow those at tile by one block of inputs. Inlined: gcc drops
 * calls of a function that does nothing else. */
static inline __attribute__((always_inline)) void
prefetch_block(const uint8_t *tile, size_t tile_row, int bytes)
{
    for (int t = 8; t < 16; t++)
        for (int i = 0; i < bytes; i += 64)
            __builtin_prefetch(tile + (size_t)t * tile_row + i);
}

/* Adds block b of outputs c … c + 15 to the trees; last: no other follows. */
static void add_exl3(const hx_mm_kernels *k, const hx_mat *m, int64_t c, int64_t b,
                     bool last, worker *w, hx_mm_sum *s)
{
    const uint8_t *tile = hx_exl3_tile_at(m, 8 * b, c / COLS);
    const int bytes = hx_exl3_tile_bytes(m->k2);
    const size_t tile_row = (size_t)(m->n_pad / 16) * (size_t)bytes;

    if (s->mul1 && s->n_row == 1 && k->one_mul1 != NULL) {
        k->one_mul1(s, tile, tile_row, m->k2, last ? 0 : 8 * tile_row);
        return;
    }
    if (!last)
        prefetch_block(tile, tile_row, bytes);
    k->decode(tile, tile_row, m->k2, m->codebook, w->w.exl3);
    k->sum_exl3(s);
}

static void add_plain(const hx_mm_kernels *k, const outputs *o, int64_t c, int64_t b,
                      worker *w, hx_mm_sum *s)
{
    const int n = (int)HX_MIN(o->m->k - b * BLOCK, BLOCK);

    if (k->sum_bf16 != NULL && o->m->fmt == HX_FMT_BF16 && s->n_row <= FEW &&
        n == BLOCK && c + COLS <= o->n) {
        s->w = (const uint8_t *)o->m->w + 2 * ((o->first + c) * o->m->k + b * BLOCK);
        k->sum_bf16(s, 2 * (size_t)o->m->k);
        return;
    }
    for (int64_t i = 0; i < COLS; i++) {
        float *to = w->w.plain + i * BLOCK;
        const int used = c + i < o->n ? n : 0;

        if (used > 0)
            widen(k, o->m, o->first + c + i, b * BLOCK, used, to);
        memset(to + used, 0, (size_t)(BLOCK - used) * sizeof(float));
    }
    k->sum_plain(s);
}

/* Rows of y are BAND floats apart. */
static void close_trees(const float *tree, int levels, int cols, int n_row, uint32_t n,
                        float *y)
{
    for (int r = 0; r < n_row; r++, tree += levels * cols, y += BAND) {
        const float *level = tree;
        bool any = false;

        for (uint32_t bits = n; bits != 0; bits >>= 1, level += cols) {
            if ((bits & 1) == 0)
                continue;
            if (!any)
                memcpy(y, level, (size_t)cols * sizeof(float));
            else
                for (int c = 0; c < cols; c++)
                    y[c] = level[c] + y[c];
            any = true;
        }
    }
}

/* y f32 [n_row][BAND]: what blocks b0 … b1 - 1 of the inputs give for outputs band * BAND …
 * of W x, before a rotation and the bias; what lies past o->n is undefined. Strips of
 * outputs, 16 to a panel, go through these inputs together: all panels of the band for few
 * rows, which streams the weights as they lie in memory; one panel for many, whose trees
 * then stay in cache. */
static void panels(const hx_mm_kernels *k, const outputs *o, const rows_view *x,
                   int64_t band, int64_t b0, int64_t b1, worker *w, float *y)
{
    const hx_mat *m = o->m;
    const int64_t c0 = band * BAND;
    const int levels = tree_levels(b1 - b0), tree_step = levels * COLS;
    const int panel_step = x->n_row * tree_step;
    const int strip = is_exl3(m) ? HX_MAX(HX_MIN(ROWS / x->n_row, PANELS), 1) : 1;
    const int n = is_exl3(m) /* a rotation needs the padded outputs too */
                      ? PANELS
                      : (int)HX_MIN(ceil_div(o->n - c0, COLS), PANELS);

    for (int p0 = 0, end; p0 < n; p0 = end) {
        end = HX_MIN(p0 + strip, n);
        for (int64_t b = b0; b < b1; b++)
            for (int p = p0; p < end; p++) {
                hx_mm_sum s = {
                    .w = &w->w,
                    .x = x->p + (size_t)b * x->block_step,
                    .x_step = x->row_step,
                    .n_row = x->n_row,
                    .mul1 = is_mul1(m),
                    .block = (uint32_t)(b - b0),
                    .tree = w->trees + (p - p0) * panel_step,
                    .tree_step = (size_t)tree_step,
                };

                if (is_exl3(m))
                    add_exl3(k, m, c0 + p * COLS, b, b + 1 == b1, w, &s);
                else
                    add_plain(k, o, c0 + p * COLS, b, w, &s);
            }
        for (int p = p0; p < end; p++)
            close_trees(w->trees + (p - p0) * panel_step, levels, COLS, x->n_row,
                        (uint32_t)(b1 - b0), y + p * COLS);
    }
}

/* What a row's band still needs when all panels are there. */
static void finish(const hx_mm_kernels *k, const outputs *o, int64_t band, float *y)
{
    const hx_mat *m = o->m;
    const int64_t c0 = band * BAND;

    if (is_exl3(m))
        k->rotate(y, (const uint8_t *)m->svh + 2 * c0);
    if (m->bias != NULL)
        for (int64_t i = 0; i < HX_MIN(BAND, o->n - c0); i++)
            y[i] += hx_f16_at(m->bias, o->first + c0 + i);
}

/* y f32 [n_row][BAND] = outputs band * BAND … of W x. */
static void product(const hx_mm_kernels *k, const outputs *o, const rows_view *x,
                    int64_t band, worker *w, float *y)
{
    panels(k, o, x, band, 0, n_block(o->m->k), w, y);
    for (int r = 0; r < x->n_row; r++)
        finish(k, o, band, y + r * BAND);
}

/* Rows of products to y, ldy floats apart. */
static void store(const float *band_y, int n_row, int64_t n, int64_t band, float *y,
                  int64_t ldy)
{
    const size_t bytes = (size_t)HX_MIN(n - band * BAND, BAND) * sizeof(float);

    for (int r = 0; r < n_row; r++)
        memcpy(y + r * ldy + band * BAND, band_y + r * BAND, bytes);
}

/* ---- rows in groups -------------------------------------------------- */

/* Up to ROWS prepared rows that meet the same matrix. Their blocks lie together, block
 * by block, so that a worker reads them in order. */
typedef struct {
    int32_t row0, n; /* among the rows prepared together */
    int32_t expert;
} group;

/* Place of block b of row r of a group, when a row has blocks blocks of bytes each.
 * Groups of other formats may lie beside it, so each begins where the largest blocks
 * would end. */
static uint8_t *block_at(uint8_t *area, const group *g, int64_t blocks, size_t bytes,
                         int64_t b, int64_t r)
{
    return area + (size_t)(g->row0 * blocks) * HX_MM_EXL3_BYTES +
           (size_t)(b * g->n + r) * bytes;
}

static rows_view group_view(uint8_t *area, const group *g, const hx_mat *m)
{
    const size_t bytes = block_bytes(m);

    return (rows_view) { block_at(area, g, n_block(m->k), bytes, 0, 0), bytes,
                         bytes * (size_t)g->n, g->n };
}

static int64_t grain(int64_t macs)
{
    return HX_MAX(ceil_div(GRAIN_MACS, HX_MAX(macs, 1)), 1);
}

/* Groups that n rows make, as equal as can be. */
static int64_t n_group(int64_t n)
{
    return ceil_div(n, ROWS);
}

static group group_of(int64_t n, int64_t i)
{
    const int64_t of = n_group(n), lo = n * i / of;

    return (group) { .row0 = (int32_t)lo, .n = (int32_t)(n * (i + 1) / of - lo) };
}

static group group_with(int64_t n, int64_t row)
{
    return group_of(n, ((row + 1) * n_group(n) - 1) / n);
}

/* ---- matmul ---------------------------------------------------------- */

typedef struct {
    memory mem;
    const hx_mat *m;
    const float *x;
    float *y;
    int64_t ldx, ldy, rows; /* of this batch */
    uint8_t *area;          /* prepared rows; NULL: plain rows that need no padding */
} matmul;

static void matmul_prepare(void *ud, int64_t begin, int64_t end, int worker_i)
{
    const matmul *c = ud;
    const int64_t blocks = n_block(c->m->k);

    (void)worker_i;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = i / blocks, b = i % blocks;
        const group g = group_with(c->rows, row);

        prepare(c->mem.k, c->m, c->x + row * c->ldx + b * BLOCK, b,
                block_at(c->area, &g, blocks, block_bytes(c->m), b, row - g.row0));
    }
}

static void matmul_bands(void *ud, int64_t begin, int64_t end, int worker_i)
{
    const matmul *c = ud;
    const outputs o = all_outputs(c->m);
    const int64_t bands = ceil_div(c->m->n, BAND);
    worker *w = worker_at(&c->mem, worker_i);

    for (int64_t i = begin; i < end; i++) {
        const group g = group_of(c->rows, i / bands);
        const rows_view v =
            c->area != NULL
                ? group_view(c->area, &g, c->m)
                : (rows_view) { (const uint8_t *)(c->x + g.row0 * c->ldx),
                                (size_t)c->ldx * sizeof(float), HX_MM_PLAIN_BYTES, g.n };

        product(c->mem.k, &o, &v, i % bands, w, w->y[0]);
        store(w->y[0], g.n, c->m->n, i % bands, c->y + g.row0 * c->ldy, c->ldy);
    }
}

int hx_cpu_matmul(hx_dev *d, const hx_matmul_args *a, hx_err *err)
{
    const hx_mat *m = a->w;
    const int64_t blocks = n_block(m->k);
    const bool direct = !is_exl3(m) && m->k % BLOCK == 0;
    matmul c = { .m = m, .ldx = a->ldx, .ldy = a->ldy };
    int64_t batch = BATCH;
    int rc = memory_open(&c.mem, d, m->k, "matmul", err);

    if (rc != 0)
        return rc;
    if (!direct) {
        batch = HX_MIN((int64_t)(c.mem.free_bytes / row_bytes(blocks)), BATCH);
        c.area = c.mem.free;
    }
    if (batch < 1)
        return no_scratch(d, "matmul", err);
    for (int64_t r = 0; r < a->rows; r += batch) {
        c.rows = HX_MIN(a->rows - r, batch);
        c.x = (const float *)a->x.p + r * a->ldx;
        c.y = (float *)a->y.p + r * a->ldy;
        if (!direct)
            hx_pool_run(d->pool, c.rows * blocks, 32, matmul_prepare, &c);
        hx_pool_run(d->pool, n_group(c.rows) * ceil_div(m->n, BAND),
                    grain(HX_MIN(c.rows, ROWS) * BAND * m->k), matmul_bands, &c);
    }
    if (a->beside == NULL)
        return 0;
    hx_matmul_args beside = *a->beside;
    beside.rows = a->rows;
    return hx_cpu_matmul(d, &beside, err);
}

/* ---- head_matmul ----------------------------------------------------- */

typedef struct {
    memory mem;
    const hx_head_matmul_args *a;
} head_matmul;

/* Rows r0 … of head h, at most ROWS; one, copied, when rows need padding. */
static rows_view head_rows(const head_matmul *c, int64_t h, int64_t r0, worker *w)
{
    const hx_head_matmul_args *a = c->a;
    const int64_t k = a->w->k, blocks = n_block(k), ld = a->heads * k;
    const float *x = (const float *)a->x.p + r0 * ld + h * k;
    float *copy = w->trees + ROWS * COLS * tree_levels(blocks);

    if (k % BLOCK == 0)
        return (rows_view) { (const uint8_t *)x, (size_t)ld * sizeof(float),
                             HX_MM_PLAIN_BYTES, (int)HX_MIN(a->rows - r0, ROWS) };
    for (int64_t b = 0; b < blocks; b++)
        prepare(c->mem.k, a->w, x + b * BLOCK, b, copy + b * BLOCK);
    return (rows_view) { (const uint8_t *)copy, 0, HX_MM_PLAIN_BYTES, 1 };
}

static void head_bands(void *ud, int64_t begin, int64_t end, int worker_i)
{
    const head_matmul *c = ud;
    const hx_head_matmul_args *a = c->a;
    const int64_t bands = ceil_div(a->n, BAND), ld = a->heads * a->n;
    worker *w = worker_at(&c->mem, worker_i);
    rows_view v;

    for (int64_t i = begin; i < end; i++) {
        const int64_t h = i / bands;
        const outputs o = { a->w, h * a->stride + a->first, a->n };

        for (int64_t r = 0; r < a->rows; r += v.n_row) {
            v = head_rows(c, h, r, w);
            product(c->mem.k, &o, &v, i % bands, w, w->y[0]);
            store(w->y[0], v.n_row, a->n, i % bands, (float *)a->y.p + r * ld + h * a->n,
                  ld);
        }
    }
}

/* Columns k0 … k0 + WIDE - 1 of head h, all rows. */
static void head_columns(const head_matmul *c, int64_t h, int64_t k0, worker *w)
{
    const hx_head_matmul_args *a = c->a;
    const int64_t k = a->w->k, blocks = n_block(a->n);
    const int64_t ldx = a->heads * a->n, ldy = a->heads * k;
    const int levels = tree_levels(blocks), used = (int)HX_MIN(k - k0, WIDE);
    const float *x = (const float *)a->x.p + h * a->n;
    float *y = (float *)a->y.p + h * k + k0;
    int n_row;

    memset(w->w.columns, 0, sizeof(w->w.columns));
    for (int64_t r = 0; r < a->rows; r += n_row) {
        n_row = (int)HX_MIN(a->rows - r, ROWS * COLS / WIDE);
        for (int64_t b = 0; b < blocks; b++) {
            const int n_in = (int)HX_MIN(a->n - b * BLOCK, BLOCK);
            const hx_mm_sum s = {
                .w = &w->w,
                .x = (const uint8_t *)(x + r * ldx + b * BLOCK),
                .x_step = (size_t)ldx * sizeof(float),
                .n_row = n_row,
                .block = (uint32_t)b,
                .tree = w->trees,
                .tree_step = (size_t)(levels * WIDE),
            };

            for (int i = 0; i < n_in; i++)
                widen(c->mem.k, a->w, h * a->stride + a->first + b * BLOCK + i, k0, used,
                      w->w.columns + i * WIDE);
            c->mem.k->sum_columns(&s, n_in);
        }
        close_trees(w->trees, levels, WIDE, n_row, (uint32_t)blocks, w->y[0]);
        for (int i = 0; i < n_row; i++)
            memcpy(y + (r + i) * ldy, w->y[0] + i * BAND, (size_t)used * sizeof(float));
    }
}

static void head_transposed(void *ud, int64_t begin, int64_t end, int worker_i)
{
    const head_matmul *c = ud;
    const int64_t per_head = ceil_div(c->a->w->k, WIDE);

    for (int64_t i = begin; i < end; i++)
        head_columns(c, i / per_head, i % per_head * WIDE, worker_at(&c->mem, worker_i));
}

int hx_cpu_head_matmul(hx_dev *d, const hx_head_matmul_args *a, hx_err *err)
{
    const int64_t k = a->w->k;
    head_matmul c = { .a = a };
    int rc = memory_open(&c.mem, d, a->transposed ? a->n : k, "head_matmul", err);

    if (rc != 0)
        return rc;
    if (a->transposed)
        hx_pool_run(d->pool, a->heads * ceil_div(k, WIDE), grain(a->rows * WIDE * a->n),
                    head_transposed, &c);
    else
        hx_pool_run(d->pool, a->heads * ceil_div(a->n, BAND), grain(a->rows * BAND * k),
                    head_bands, &c);
    return 0;
}

/* ---- moe ------------------------------------------------------------- */

enum {
    PREPARE = 8, /* blocks of inputs that are prepared together */
    CUTS = 8,    /* units per thread, at least, if bands can be cut so finely */
    MAX_CUTS = 4
};

/* Pairs (row, pick) sorted by expert go through in batches of groups. A batch is one list of
 * units, which workers take in order: blocks of inputs of gate and up; their bands; the
 * bands of down. Few bands are cut by inputs, so that a unit still reads as long pieces of
 * memory as there are. Who brings the last cut of a band joins them and finishes the band
 * (gate and up: activates, and prepares it as inputs of down). Units wait for what they read
 * by counting, so a worker that lost its CPU holds up a few of them; who is waited for took
 * an earlier unit, so somebody is always at work. */
typedef struct {
    memory mem;
    const hx_moe_args *a;
    int32_t *pair; /* [n] r * active + pick, by expert */
    int32_t *end;  /* [n_expert] where an expert's pairs end */
    group *group;  /* of this batch */
    int64_t n_group, n_pair, pair0;
    int64_t room;              /* pairs that mid and out have room for */
    uint8_t *gate, *up, *down; /* prepared rows */
    float *mid;                /* [pairs, cuts, 2, F] gate and up, whole bands */
    float *out;                /* [pairs, cuts, D] */
    /* Done so far: blocks and bands of a group, cuts of a band. */
    _Atomic int32_t *prepared, *ready, *in_cuts, *out_cuts;
    int64_t bands_in, bands_out, blocks;
    int64_t per_pair, cuts; /* units that prepare a pair, that share a matrix's band */
    _Atomic int64_t next;
    int64_t n_unit;
} moe;

static hx_expert expert_of(const moe *c, const group *g)
{
    return hx_moe_expert(c->a, g->expert);
}

/* Gate and up may use the same prepared rows. */
static bool same_input(const hx_expert *e)
{
    return is_exl3(&e->gate) == is_exl3(&e->up) &&
           (!is_exl3(&e->gate) ||
            (e->gate.suh == e->up.suh && is_mul1(&e->gate) == is_mul1(&e->up)));
}

static void await(_Atomic int32_t *count, int64_t until)
{
    for (uint32_t i = 1; atomic_load_explicit(count, memory_order_acquire) < until; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (i % 1024 == 0)
            sched_yield();
    }
}

/* Whether these were the last. */
static bool counted(_Atomic int32_t *count, int64_t n, int64_t all)
{
    return atomic_fetch_add(count, (int32_t)n) + n == all;
}

/* Blocks PREPARE * part … of both inputs of a pair. */
static void moe_prepare(moe *c, int64_t row, int64_t part)
{
    const int64_t k = c->a->expert[c->group->expert].gate.k, first = part * PREPARE,
                  last = HX_MIN(first + PREPARE, 2 * c->blocks);
    const int64_t x_row = c->pair[c->pair0 + row] / c->a->active;
    const group *g = c->group;

    while (row >= g->row0 + g->n)
        g++;
    const hx_expert e = expert_of(c, g);
    for (int64_t i = first; i < last; i++) {
        const bool is_up = i >= c->blocks;
        const int64_t b = i % c->blocks;
        const hx_mat *m = is_up ? &e.up : &e.gate;

        if (!is_up || !same_input(&e))
            prepare(c->mem.k, m, (const float *)c->a->x.p + x_row * k + b * BLOCK, b,
                    block_at(is_up ? c->up : c->gate, g, c->blocks, block_bytes(m), b,
                             row - g->row0));
    }
    counted(&c->prepared[g - c->group], last - first, 0);
}

/* Blocks of inputs in a cut of n: a power of two, so that each cut is a subtree. */
static int64_t cut_blocks(const moe *c, int64_t n)
{
    int64_t blocks = 1;

    while (blocks * c->cuts < n)
        blocks *= 2;
    return blocks;
}

/* Computes a cut of a matrix's band and puts it where the band comes together: to [row, cut,
 * ld]. */
static void moe_panels(moe *c, const outputs *o, const rows_view *x, int64_t band,
                       int64_t cut, worker *w, float *to, int64_t ld)
{
    const int64_t n = n_block(o->m->k), step = cut_blocks(c, n), b0 = cut * step;

    if (b0 >= n)
        return;
    panels(c->mem.k, o, x, band, b0, HX_MIN(b0 + step, n), w, w->y[0]);
    for (int r = 0; r < x->n_row; r++)
        memcpy(to + (r * c->cuts + cut) * ld + band * BAND, w->y[0] + r * BAND,
               BAND * sizeof(float));
}

/* The cuts of a row's band, ld floats apart, become one, the first. */
static void moe_join(const moe *c, const hx_mat *m, float *y, int64_t ld)
{
    const int64_t blocks = n_block(m->k), n = ceil_div(blocks, cut_blocks(c, blocks));

    for (int64_t step = 1; step < n; step *= 2)
        for (int64_t cut = 0; cut + step < n; cut += 2 * step)
            for (int64_t i = 0; i < BAND; i++)
                y[cut * ld + i] += y[(cut + step) * ld + i];
}

static void moe_gate_up(moe *c, int64_t group_i, int64_t band, int64_t part, worker *w)
{
    const group *g = &c->group[group_i];
    const int64_t f = c->bands_in * BAND, ld = 2 * f;
    const bool is_up = part >= c->cuts;
    const hx_expert e = expert_of(c, g);
    const outputs gate = all_outputs(&e.gate), up = all_outputs(&e.up);
    const rows_view x = is_up && !same_input(&e) ? group_view(c->up, g, up.m)
                                                 : group_view(c->gate, g, gate.m);
    float *y = c->mid + g->row0 * c->cuts * ld;

    await(&c->prepared[group_i], 2 * c->blocks * g->n);
    moe_panels(c, is_up ? &up : &gate, &x, band, part % c->cuts, w, y + is_up * f, ld);
    if (!counted(&c->in_cuts[group_i * c->bands_in + band], 1, 2 * c->cuts))
        return;
    for (int r = 0; r < g->n; r++, y += c->cuts * ld) {
        float *yg = y + band * BAND, *yu = yg + f, h[BAND];

        moe_join(c, &e.gate, yg, ld);
        moe_join(c, &e.up, yu, ld);
        finish(c->mem.k, &gate, band, yg);
        finish(c->mem.k, &up, band, yu);
        c->mem.k->act(h, yg, yu, c->a->limit);
        prepare(c->mem.k, &e.down, h, band,
                block_at(c->down, g, c->bands_in, block_bytes(&e.down), band, r));
    }
    counted(&c->ready[group_i], 1, 0);
}

static void moe_down(moe *c, int64_t group_i, int64_t band, int64_t part, worker *w)
{
    const group *g = &c->group[group_i];
    const int64_t dim = c->a->expert[g->expert].down.n, ld = c->bands_out * BAND;
    const hx_expert e = expert_of(c, g);
    const outputs o = all_outputs(&e.down);
    const rows_view h = group_view(c->down, g, o.m);
    float *y = c->out + g->row0 * c->cuts * ld;

    await(&c->ready[group_i], c->bands_in);
    moe_panels(c, &o, &h, band, part, w, y, ld);
    if (!counted(&c->out_cuts[group_i * c->bands_out + band], 1, c->cuts))
        return;
    for (int r = 0; r < g->n; r++, y += c->cuts * ld) {
        moe_join(c, &e.down, y + band * BAND, ld);
        finish(c->mem.k, &o, band, y + band * BAND);
        store(y + band * BAND, 1, dim, band,
              (float *)c->a->y.p + c->pair[c->pair0 + g->row0 + r] * dim, dim);
    }
}

static void moe_unit(moe *c, int64_t i, worker *w)
{
    const int64_t n_prepare = c->n_pair * c->per_pair, per_in = 2 * c->cuts,
                  n_in = c->n_group * c->bands_in * per_in;

    if (i < n_prepare) {
        moe_prepare(c, i / c->per_pair, i % c->per_pair);
    } else if ((i -= n_prepare) < n_in) {
        const int64_t band = i / per_in;

        moe_gate_up(c, band / c->bands_in, band % c->bands_in, i % per_in, w);
    } else {
        const int64_t band = (i -= n_in) / c->cuts;

        moe_down(c, band / c->bands_out, band % c->bands_out, i % c->cuts, w);
    }
}

static void moe_units(void *ud, int64_t begin, int64_t end, int worker_i)
{
    moe *c = ud;
    worker *w = worker_at(&c->mem, worker_i);
    int64_t i;

    (void)begin, (void)end; /* one of as many parts as there are threads */
    while ((i = atomic_fetch_add(&c->next, 1)) < c->n_unit)
        moe_unit(c, i, w);
}

/* Counting sort of the picks by expert. Returns how many there are, or an error. */
static int64_t sort_pairs(moe *c, hx_err *err)
{
    const hx_moe_args *a = c->a;
    const int32_t *id = a->id.p;
    const int64_t n = a->rows * a->active;
    int32_t at = 0;

    memset(c->end, 0, (size_t)a->n_expert * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        if (id[i] >= a->n_expert)
            return hx_fail(err, HX_EARG, "moe: id[%lld] is %d, must be below %lld",
                           (long long)i, id[i], (long long)a->n_expert);
        if (id[i] >= a->first && id[i] < hx_moe_end(a))
            c->end[id[i]]++;
    }
    for (int64_t e = 0; e < a->n_expert; e++) { /* counts become beginnings, then ends */
        const int32_t count = c->end[e];

        c->end[e] = at;
        at += count;
    }
    for (int64_t i = 0; i < n; i++)
        if (id[i] >= a->first && id[i] < hx_moe_end(a))
            c->pair[c->end[id[i]]++] = (int32_t)i;
    return at;
}

/* Makes the groups of the next batch, at most max pairs, from pair0 on. expert: where to
 * go on. */
static void next_batch(moe *c, int64_t max, int32_t *expert)
{
    c->n_group = c->n_pair = 0;
    for (; *expert < c->a->n_expert; ++*expert) {
        const int64_t left = c->end[*expert] - c->pair0 - c->n_pair;
        const int64_t n = HX_MIN(left, max - c->n_pair);

        for (int64_t i = 0; i < n_group(n); i++) {
            group g = group_of(n, i);

            g.row0 += (int32_t)c->n_pair;
            g.expert = *expert;
            c->group[c->n_group++] = g;
        }
        c->n_pair += n;
        if (n < left)
            return;
    }
}

static void run_batch(hx_dev *d, moe *c)
{
    const int64_t macs = c->n_pair * BAND * BAND * 3 * c->bands_in * c->bands_out,
                  threads = HX_MAX(HX_MIN(hx_pool_size(d->pool), macs / GRAIN_MACS), 1),
                  bands = c->n_group * (2 * c->bands_in + c->bands_out);
    const size_t n_count = (size_t)(c->n_group * (2 + c->bands_in + c->bands_out));

    c->cuts = 1;
    while (c->cuts < MAX_CUTS && threads > 1 && bands * c->cuts < threads * CUTS &&
           2 * c->cuts * c->n_pair <= c->room)
        c->cuts *= 2;
    c->ready = c->prepared + c->n_group;
    c->in_cuts = c->ready + c->n_group;
    c->out_cuts = c->in_cuts + c->n_group * c->bands_in;
    memset((void *)c->prepared, 0, n_count * sizeof(*c->prepared));
    atomic_store(&c->next, 0);
    c->n_unit = c->n_pair * c->per_pair + bands * c->cuts;
    hx_pool_run(d->pool, threads, 1, moe_units, c);
}

int hx_cpu_moe(hx_dev *d, const hx_moe_args *a, hx_err *err)
{
    const int64_t n = a->rows * a->active;
    const hx_expert *e = a->expert;
    const size_t x_bytes = row_bytes(n_block(e->gate.k));
    const size_t h_bytes = row_bytes(n_block(e->down.k));
    moe c = { .a = a,
              .blocks = n_block(e->gate.k),
              .bands_in = n_block(e->gate.n),
              .bands_out = n_block(e->down.n) };
    int32_t expert = 0;
    int rc = memory_open(&c.mem, d, HX_MAX(e->gate.k, e->down.k), "moe", err);

    if (rc != 0)
        return rc;
    c.pair = take(&c.mem, (size_t)n * sizeof(*c.pair));
    c.end = take(&c.mem, (size_t)a->n_expert * sizeof(*c.end));
    c.group = take(&c.mem, BATCH * sizeof(*c.group));
    const int64_t batch =
        HX_MIN((int64_t)(c.mem.free_bytes / pair_bytes(e->gate.k, e->gate.n)), BATCH);
    if (c.pair == NULL || c.end == NULL || c.group == NULL || batch < 1)
        return n == 0 ? 0 : no_scratch(d, "moe", err);
    c.room = batch;
    c.per_pair = ceil_div(2 * c.blocks, PREPARE);
    c.gate = c.mem.free;
    c.up = c.gate + (size_t)batch * x_bytes;
    c.down = c.up + (size_t)batch * x_bytes;
    c.mid = (float *)(void *)(c.down + (size_t)batch * h_bytes);
    c.out = c.mid + batch * 2 * c.bands_in * BAND;
    c.prepared = (void *)(c.out + batch * c.bands_out * BAND);
    const int64_t n_pair = sort_pairs(&c, err);
    if (n_pair < 0)
        return (int)n_pair;
    for (; c.pair0 < n_pair; c.pair0 += c.n_pair) {
        next_batch(&c, batch, &expert);
        run_batch(d, &c);
    }
    return 0;
}
