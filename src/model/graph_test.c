/* graph_test.c - a prompt's rows have the same bits however it is cut into calls: 1, 20, 512
 * and 8,192 rows and odd numbers of them, in windows or whole, with experts in place, in
 * slots, or brought layer by layer, and with any number of rows for each expert. Compared are
 * logits and all of a sequence's memory. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "model/model.h"

static const char *device = "cpu", *model = "models/demo-exl3";

enum { TAIL = 512, N_POINT = 4, WINDOW = 256 };

static bool on_gpu(void)
{
    return strcmp(device, "cpu") != 0;
}

/* ---- a model, and a sequence in it ------------------------------------------- */

/* How experts are picked: as the model does, or one by every row and three by none. */
typedef enum { PICK_OWN, PICK_SKEWED } picking;

typedef struct {
    hx_model *m;
    hx_dev *dev;
    hx_cache *cache;
    hx_graph *g;
    hx_buf area;    /* workspace of calls that are longer than a window */
    float *bias;    /* [n_layer, E] */
    int64_t *taken; /* [E] picks of the first layer with experts; NULL: not counted */
    int64_t end, window; /* rows of the sequence; of what the graph takes at once */
    int32_t slot;
} rig;

static void skew(rig *r)
{
    const int64_t n = r->m->desc.n_expert;

    r->bias = hx_new(float, r->m->desc.n_layer *n);
    for (int64_t l = 0; l < r->m->desc.n_layer; l++) {
        hx_buf *b = &r->m->layer[l].router_bias;
        float *to = r->bias + l * n;

        if (b->p == NULL)
            continue;
        memcpy(to, b->p, (size_t)n * sizeof *to);
        to[0] += 10; /* scores lie between 0 and 1 */
        for (int i = 1; i <= 3; i++)
            to[i] -= 10;
        b->p = to;
    }
}

/* Slots for so many of n experts; 0: every expert lies where it is computed with. */
static void open_experts(rig *r, int64_t part, int64_t of)
{
    size_t record;
    const uint64_t bytes = hx_store_bytes(r->m, &record), all = bytes / record;
    const hx_store_opt opt = { .mode = HX_MODE_GPU_ONLY,
                               .slot_bytes = all * (uint64_t)part / (uint64_t)of * record,
                               .max_rows = 1,
                               .rates = { .here_us = 1, .link_us = 1 } };
    hx_err err = { 0 };

    if ((part == 0 ? hx_model_place(r->m, r->dev, HX_PLACE_ROUTED, &err)
                   : hx_store_open(&r->m->store, r->m, r->dev, &opt, &err)) != 0)
        fail_msg("%s", err.msg);
}

/* window: 0 for calls that are not cut. */
static void rig_open(rig *r, int64_t end, int64_t window, int32_t n_threads, picking how)
{
    hx_err err = { 0 };

    *r = (rig) { .end = end, .window = window > 0 ? window : end };
    if (hx_model_open(&r->m, model, NULL, NULL, &err) != 0)
        fail_msg("%s", err.msg);
    if (how == PICK_SKEWED)
        skew(r);
    const hx_dev_opt opt = { .name = device,
                             .n_threads = n_threads,
                             .limits = hx_model_limits(
                                 &r->m->desc, on_gpu() ? WINDOW : r->window, end) };
    if (hx_dev_open(&r->dev, &opt, &err) != 0 ||
        hx_model_place(r->m, r->dev, HX_PLACE_DENSE, &err) != 0 ||
        hx_cache_open(&r->cache, &r->m->desc, r->dev, 1, end,
                      (int32_t)((end + HX_PAGE - 1) / HX_PAGE), HX_CACHE_BF16,
                      &err) != 0 ||
        hx_graph_open(&r->g, r->m, r->dev, r->cache, r->window, 1, end, &err) != 0 ||
        hx_dev_alloc(r->dev, &r->area, HX_MAX(hx_graph_room(r->g, end), 64), &err) != 0)
        fail_msg("%s", err.msg);
}

static void rig_close(rig *r)
{
    hx_graph_close(r->g);
    hx_cache_close(r->cache);
    hx_dev_free(r->dev, &r->area);
    hx_model_close(r->m);
    hx_dev_close(r->dev);
    hx_free(r->bias);
    hx_free(r->taken);
}

static size_t state_bytes(const rig *r, int64_t n_pos)
{
    return (size_t)(hx_cache_state_bytes(r->cache, 0) +
                    (uint64_t)((n_pos + HX_PAGE - 1) / HX_PAGE) * r->cache->page_bytes);
}

/* Moves all that is kept of the sequence to or from host memory. */
static void state_move(rig *r, uint8_t *p, bool in)
{
    hx_cache *c = r->cache;
    const int32_t *page = c->table + (int64_t)r->slot * c->max_page;
    hx_err err = { 0 };
    int rc = in ? hx_cache_state_put(c, r->slot, p, 0, &err)
                : hx_cache_state_get(c, r->slot, p, &err);

    p += hx_cache_state_bytes(c, 0);
    for (int64_t i = 0; i * HX_PAGE < c->slot[r->slot].n_pos && rc == 0;
         i++, p += c->page_bytes)
        rc = in ? hx_cache_page_put(c, page[i], p, &err)
                : hx_cache_page_get(c, page[i], p, &err);
    if (rc != 0)
        fail_msg("%s", err.msg);
}

/* A sequence whose memory holds nothing of the one before. */
static void start(rig *r)
{
    hx_err err = { 0 };

    r->slot = hx_cache_take(r->cache);
    assert_int_equal(r->slot, 0);
    assert_int_equal(hx_cache_grow(r->cache, r->slot, r->end, &err), 0);
    r->cache->slot[r->slot].n_pos = r->end;
    uint8_t *none = hx_calloc(state_bytes(r, r->end), 1);
    assert_non_null(none);
    state_move(r, none, true);
    r->cache->slot[r->slot].n_pos = 0;
    hx_free(none);
}

/* ---- what must be the same ----------------------------------------------------- */

/* After so many rows: the last one's logits, and the sequence's memory. Whoever comes there
 * first says what is expected. */
typedef struct {
    int64_t rows;
    float *logits;
    uint8_t *state;
} point;

static void points_open(point p[N_POINT], int64_t base)
{
    const int64_t rows[N_POINT] = { base, base + 1, base + 20, base + TAIL };

    for (int i = 0; i < N_POINT; i++)
        p[i] = (point) { .rows = rows[i] };
}

static void points_close(point p[N_POINT])
{
    for (int i = 0; i < N_POINT; i++) {
        hx_free(p[i].logits);
        hx_free(p[i].state);
    }
}

static void same_logits(rig *r, const char *name, point *p, int64_t row)
{
    const size_t bytes = (size_t)r->m->desc.n_vocab * sizeof(float);
    float *got = hx_alloc(bytes);
    hx_err err = { 0 };

    if (hx_graph_out(r->g, row, 1, &err) != 0 ||
        hx_dev_get(r->dev, got, hx_graph_logits(r->g), bytes, &err) != 0)
        fail_msg("%s", err.msg);
    if (p->logits == NULL) {
        p->logits = got;
        return;
    }
    if (memcmp(p->logits, got, bytes) != 0)
        fail_msg("%s: row %lld has other logits", name, (long long)p->rows);
    hx_free(got);
}

static void same_state(rig *r, const char *name, point *p)
{
    const size_t n = state_bytes(r, p->rows), own = hx_cache_state_bytes(r->cache, 0);
    uint8_t *got = hx_alloc(n);
    size_t i = 0;

    state_move(r, got, false);
    if (p->state == NULL) {
        p->state = got;
        return;
    }
    while (i < n && got[i] == p->state[i])
        i++;
    if (i < own)
        fail_msg("%s: after %lld rows byte %zu of recurrent states and rings differs",
                 name, (long long)p->rows, i);
    if (i < n)
        fail_msg("%s: after %lld rows byte %zu of page %zu differs", name,
                 (long long)p->rows, (i - own) % r->cache->page_bytes,
                 (size_t)((i - own) / r->cache->page_bytes));
    hx_free(got);
}

static void count_picks(void *ud, int64_t layer, const char *what, hx_buf data,
                        int64_t rows)
{
    rig *r = ud;
    const int64_t n = rows * r->m->desc.n_active;
    int32_t *id = hx_new(int32_t, n);
    hx_err err;

    if (layer == 3 && strcmp(what, "router_id") == 0) {
        assert_int_equal(hx_dev_get(r->dev, id, data, (size_t)n * sizeof *id, &err), 0);
        for (int64_t i = 0; i < n; i++)
            r->taken[id[i]]++;
    }
    hx_free(id);
}

/* The next n rows as one call, compared where a point lies in it. */
static void call(rig *r, const char *name, int64_t n, point p[N_POINT])
{
    hx_slot *s = &r->cache->slot[r->slot];
    int32_t *id = hx_new(int32_t, n);
    const hx_span span = { .slot = r->slot,
                           .n_row = (int32_t)n,
                           .pos0 = (int32_t)s->n_pos };
    const hx_batch b = { .phase = HX_PHASE_PREFILL,
                         .id = id,
                         .rows = { .span = &span, .n_span = 1, .n_row = n } };
    hx_err err = { 0 };

    for (int64_t i = 0; i < n; i++)
        id[i] = (int32_t)(hx_rng_at(3, (uint64_t)(s->n_pos + i)) % 4000);
    hx_graph_move(r->g, n > r->window ? r->area : (hx_buf) { 0 }, n);
    if (hx_graph_begin(r->g, &b, &err) != 0 ||
        hx_graph_layers(r->g, 0, r->m->desc.n_layer, &err) != 0)
        fail_msg("%s: %s", name, err.msg);
    const int64_t first = s->n_pos;
    s->n_pos += n;
    for (int i = 0; i < N_POINT; i++)
        if (p[i].rows > first && p[i].rows <= s->n_pos) {
            same_logits(r, name, &p[i], p[i].rows - 1 - first);
            if (p[i].rows == s->n_pos)
                same_state(r, name, &p[i]);
        }
    hx_free(id);
}

/* ---- ways to cut it ------------------------------------------------------------- */

enum { TO_BASE = -1 }; /* rows up to the first point */

/* Calls begin on the grid of 64 rows, as the chunks of a GPU's KDA need it and the scheduler
 * keeps it, or anywhere. */
typedef struct {
    const char *name;
    int64_t rows[10]; /* of the calls; the last again and again */
    bool anywhere;
    int once; /* where it is tried if not everywhere; above 1: short prompts need it not */
} way;

/* Calls of 1 and of 20 rows from here, and back: on the grid, short calls are last ones. */
static void try_ends(rig *r, const char *name, point p[N_POINT])
{
    hx_slot *s = &r->cache->slot[r->slot];
    const int64_t at = s->n_pos;
    uint8_t *kept = hx_alloc(state_bytes(r, at));

    state_move(r, kept, false);
    for (int64_t n = 1; n <= 20; n += 19) {
        call(r, name, n, p);
        s->n_pos = at;
        state_move(r, kept, true);
    }
    hx_free(kept);
}

static void read_prompt(rig *r, const way *w, point p[N_POINT])
{
    const int64_t *rows = w->rows, *n_pos, from = hx_now_us();

    start(r);
    for (n_pos = &r->cache->slot[r->slot].n_pos; *n_pos < r->end;) {
        call(r, w->name, HX_MIN(*rows == TO_BASE ? p[0].rows : *rows, r->end - *n_pos),
             p);
        if (!w->anywhere && *n_pos == p[0].rows)
            try_ends(r, w->name, p);
        if (rows + 1 < w->rows + HX_LEN(w->rows) && rows[1] != 0)
            rows++;
    }
    hx_cache_drop(r->cache, r->slot);
    print_message("           %-38s %6.2f s\n", w->name,
                  (double)(hx_now_us() - from) / 1e6);
}

static void read_ways(rig *r, int where, bool once, point p[N_POINT])
{
    static const way ways[] = {
        { "two calls", { TO_BASE, TAIL }, false, 0 },
        { "20, 1, 512, 63 and others, one by one",
          { 20, 1, 512, 63, 7, 2048, 129, 5412, 1 },
          true,
          1 },
        { "512 rows, then 8,192", { 512, 8192 }, false, 2 },
        { "512 rows", { 512 }, false, 3 },
        { "64, 320, 192 and others",
          { 64, 320, 192, 1024, 448, 2560, 128, 3456, TAIL },
          false,
          -1 },
        { "one call", { 8192 + TAIL }, false, -1 },
        { "20 rows", { 20 }, true, -1 },
        { "one by one", { 1 }, true, -1 },
    };

    for (size_t i = 0; i < HX_LEN(ways); i++)
        if (on_gpu() ? !ways[i].anywhere
            : once   ? ways[i].once == where
                     : ways[i].once < 2)
            read_prompt(r, &ways[i], p);
}

/* How many rows an expert of the first layer had. */
static void check_picks(const rig *r, picking how)
{
    int64_t least = INT64_MAX, most = 0;

    for (int64_t e = 0; e < r->m->desc.n_expert; e++) {
        least = HX_MIN(least, r->taken[e]);
        most = HX_MAX(most, r->taken[e]);
    }
    print_message("           %lld to %lld picks of an expert\n", (long long)least,
                  (long long)most);
    assert_true(how == PICK_OWN || (least == 0 && most >= r->end));
}

/* Every way everywhere, or each once: with every expert where it is computed with, calls not
 * cut; then behind slots for some of them. */
static void try_ways(int64_t base, picking how, bool once)
{
    static const struct {
        int part, of;
    } slots[] = { { 0, 1 }, { 1, 40 }, { 1, 4 }, { 7, 8 } }; /* the second lends none, the
                                                              * third parts of layers */
    point p[N_POINT];

    points_open(p, base);
    for (int i = 0; i < (int)HX_LEN(slots); i++) {
        rig r;

        rig_open(&r, base + TAIL, i == 0 ? 0 : WINDOW, once ? 2 : 1, how);
        open_experts(&r, slots[i].part, slots[i].of);
        const hx_store *s = r.m->store;

        print_message("           %d slots\n", s != NULL ? s->n_all_slot : -1);
        r.taken = hx_new(int64_t, r.m->desc.n_expert);
        hx_graph_tap(r.g, count_picks, &r);
        read_ways(&r, i, once, p);
        check_picks(&r, how);
        if (i > 0) {
            assert_int_equal(s->lend != NULL, i > 1);
            assert_int_equal(s->stats.stage_bytes > 0, i > 1);
        }
        rig_close(&r);
    }
    points_close(p);
}

static void test_long(void **state)
{
    (void)state;
    try_ways(8192, PICK_OWN, true);
}

static void test_skewed(void **state)
{
    (void)state;
    try_ways(on_gpu() ? 8192 : 1024, PICK_SKEWED, true);
}

static void test_every(void **state)
{
    (void)state;
    try_ways(256, PICK_OWN, false);
}

/* graph_test [DEVICE [MODEL]] */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_skewed),
        cmocka_unit_test(test_every),
    };

    device = argc > 1 ? argv[1] : device;
    model = argc > 2 ? argv[2] : model;
    return cmocka_run_group_tests_name("graph", tests, NULL, NULL);
}
