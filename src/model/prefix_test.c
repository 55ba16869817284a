/* prefix_test.c - the prefix tree against a naive list of everything ever kept: what is
 * found is the best there is, what is attached has the content it must have, memory is
 * given back to the byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "model/model.h"

#define CTX    1024
#define N_SLOT 4

/* A small model's shapes: one KDA layer, one MLA layer. */
static const hx_desc desc = { .n_layer = 2,
                              .kda_heads = 1,
                              .kda_width = 4,
                              .conv_taps = 4,
                              .latent = 4,
                              .index_width = 4,
                              .pool_n = 4,
                              .mixer = { HX_MIX_KDA, HX_MIX_MLA } };

typedef struct {
    hx_dev *dev;
    hx_cache *cache;
    hx_prefix_tree *tree;
} rig;

static void rig_open(rig *r, int32_t n_page, uint64_t host_max)
{
    const hx_dev_opt opt = { .name = "cpu",
                             .n_threads = 1,
                             .limits = { 1, 1, 1, 1, 1, 1, 1 } };
    hx_err err = { 0 };

    if (hx_dev_open(&r->dev, &opt, &err) != 0 ||
        hx_cache_open(&r->cache, &desc, r->dev, N_SLOT, CTX, n_page, HX_CACHE_F32,
                      &err) != 0 ||
        hx_prefix_open(&r->tree, r->cache, host_max, 16, &err) != 0)
        fail_msg("%s", err.msg);
}

static void rig_close(rig *r)
{
    hx_prefix_close(r->tree);
    for (int32_t p = 0; p < r->cache->n_page; p++)
        assert_int_equal(r->cache->ref[p], 0);
    assert_int_equal(r->cache->n_free, r->cache->n_page);
    assert_int_equal(r->cache->n_held, 0);
    hx_cache_close(r->cache);
    hx_dev_close(r->dev);
}

/* ---- a made-up model: content follows from ids and phases ---------------- */

typedef struct {
    int32_t token[CTX];
    uint64_t decoded[CTX / HX_PAGE];
    int64_t n;
} text;

static uint64_t digest(const text *x, int64_t n)
{
    uint64_t h = 7;

    for (int64_t i = 0; i < n; i++)
        h = hx_rng_at(h,
                      (uint64_t)x->token[i] * 2 + (x->decoded[i / 64] >> (i % 64) & 1));
    return h;
}

static float *latent_at(const rig *r, int32_t slot, int64_t pos)
{
    const hx_pages *p = &r->cache->mem[1].latent;
    const int32_t page = r->cache->table[slot * r->cache->max_page + pos / HX_PAGE];

    return (float *)p->data.p + (page * HX_PAGE + pos % HX_PAGE) * p->width;
}

static uint64_t *state_at(const rig *r, int32_t slot)
{
    return (uint64_t *)(void *)((char *)r->cache->mem[0].kda_state.p +
                                (size_t)slot * r->cache->kda_bytes);
}

/* Computes positions from .. to of x in the slot. */
static int compute(const rig *r, int32_t slot, const text *x, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i++) {
        if (hx_cache_grow(r->cache, slot, i + 1, NULL) != 0)
            return -1;
        *latent_at(r, slot, i) = (float)(digest(x, i + 1) % 1000003);
    }
    *state_at(r, slot) = digest(x, to);
    r->cache->slot[slot].n_pos = to;
    r->cache->slot[slot].pend =
        (int32_t)(x->decoded[(to - 1) / HX_PAGE] >> ((to - 1) % HX_PAGE) & 1);
    return 0;
}

static void check_slot(const rig *r, int32_t slot, const text *x, int64_t n)
{
    assert_int_equal(r->cache->slot[slot].n_pos, n);
    assert_int_equal(*state_at(r, slot), digest(x, n));
    for (int64_t i = 0; i < n; i++)
        assert_true(*latent_at(r, slot, i) == (float)(digest(x, i + 1) % 1000003));
}

/* ---- the naive model ------------------------------------------------------ */

typedef struct {
    text x;
    int64_t n;
    bool has_hidden, pure;
} kept;

static bool is_usable(const kept *k, const text *q, bool strict)
{
    if (k->n > q->n || (strict && !k->pure) ||
        memcmp(k->x.token, q->token, (size_t)k->n * sizeof(int32_t)) != 0)
        return false;
    if (k->n == q->n)
        return k->has_hidden;
    return k->n % 64 == 0 ||
           (k->x.decoded[(k->n - 1) / 64] >> ((k->n - 1) % 64) & 1) != 0;
}

static int64_t best_of(const kept *list, int32_t n, const text *q, bool strict)
{
    int64_t best = 0;

    for (int32_t i = 0; i < n; i++)
        if (is_usable(&list[i], q, strict))
            best = HX_MAX(best, list[i].n);
    return best;
}

/* A text that agrees with an earlier one up to a random place. */
static void make_text(text *x, const kept *list, int32_t n, uint64_t *seed)
{
    const uint64_t a = hx_rng_at(*seed, 0), b = hx_rng_at(*seed, 1);
    int64_t keep = 0;

    ++*seed;
    memset(x, 0, sizeof *x);
    if (n > 0 && a % 8 != 0) {
        const kept *k = &list[(a >> 8) % (uint64_t)n];

        *x = k->x;
        keep = (a >> 40) % 3 == 0 ? (int64_t)(b % (uint64_t)(k->n + 1)) : k->n;
    }
    x->n = HX_MIN(CTX - 1, keep + 1 + (int64_t)((b >> 20) % 200));
    for (int64_t i = keep; i < x->n; i++)
        x->token[i] = (int32_t)(hx_rng_at(*seed, (uint64_t)i) % 3);
    for (int64_t i = 0; i < CTX; i++)
        if (i >= x->n)
            x->token[i] = 0;
}

static void clear_decoded(text *x, int64_t from)
{
    for (int64_t i = from; i < CTX; i++)
        x->decoded[i / 64] &= ~(UINT64_C(1) << (i % 64));
}

/* Takes the phases of the node's path for the part of x it covers. */
static void phases_of(text *x, const hx_node *n)
{
    clear_decoded(x, 0);
    for (; n != NULL && n->n_token > 0; n = n->parent)
        x->decoded[(n->end - 1) / HX_PAGE] = n->decoded;
}

/* ---- files, in memory -------------------------------------------------------- */

#define N_FILE 4000

typedef struct {
    hx_blob *page[CTX / HX_PAGE], *state;
    int64_t n_page;
    bool lost;
} fake_file;

static fake_file files[N_FILE];
static int64_t n_file, n_loads;

static int64_t file_of(const hx_node *n)
{
    int64_t i;

    memcpy(&i, n->snap->name.b, sizeof i);
    assert_false(files[i].lost);
    return i;
}

/* Writes the first unwritten snapshot of a random one's path, if its pages are in memory. */
static void write_some(rig *r, uint64_t seed)
{
    const hx_node *root = &r->tree->root;
    hx_node *n = r->tree->snap, *from = NULL, *top = NULL;
    fake_file *f = &files[n_file];

    for (uint64_t skip = seed % 7; n != NULL && skip > 0; skip--)
        n = n->snap->next;
    for (; n != NULL && n != root; n = n->parent)
        if (n->snap != NULL && n->snap->state != NULL && !n->snap->on_disk)
            top = n;
    if (top == NULL || n_file == N_FILE)
        return;
    for (hx_node *a = top->parent; a != root && from == NULL; a = a->parent)
        if (a->snap != NULL && a->snap->on_disk)
            from = a;
    for (hx_node *a = top; a != root && a != from; a = a->parent)
        if (a->page < 0 && a->host == NULL)
            return;
    for (hx_node *a = top; a != root && a != from; a = a->parent) {
        const int64_t at = (a->end - 1 - (from != NULL ? from->end : 0)) / HX_PAGE;
        hx_blob *b = f->page[at] = hx_blob_new(r->cache->page_bytes, NULL);

        f->n_page = HX_MAX(f->n_page, at + 1);
        if (a->host != NULL)
            memcpy(b->p, a->host->p, b->n);
        else
            assert_int_equal(hx_cache_page_get(r->cache, a->page, b->p, NULL), 0);
    }
    f->state = hx_blob_new(top->snap->state->n, NULL);
    memcpy(f->state->p, top->snap->state->p, f->state->n);
    hx_park_name name = { { 0 } };
    memcpy(name.b, &n_file, sizeof n_file);
    n_file++;
    hx_prefix_has_file(r->tree, top, from, &name);
}

static void lose_some(rig *r, uint64_t seed)
{
    hx_node *n = r->tree->snap;

    for (uint64_t skip = seed % 5; n != NULL && (skip > 0 || !n->snap->on_disk);
         n = n->snap->next)
        skip -= skip > 0;
    if (n == NULL)
        return;
    files[file_of(n)].lost = true;
    hx_prefix_lost_file(r->tree, n);
}

static void load_file(rig *r, hx_node *n, bool state)
{
    const fake_file *f = &files[file_of(n)];
    hx_blob *page[CTX / HX_PAGE], *copy = NULL;

    for (int64_t i = 0; i < f->n_page; i++) {
        page[i] = hx_blob_new(f->page[i]->n, &r->tree->host);
        memcpy(page[i]->p, f->page[i]->p, f->page[i]->n);
    }
    if (state) {
        copy = hx_blob_new(f->state->n, &r->tree->host);
        memcpy(copy->p, f->state->p, f->state->n);
    }
    hx_prefix_fill(r->tree, n, page, f->n_page, copy);
    n_loads++;
}

/* All of n into memory; false: no room. */
static bool load(rig *r, hx_node *n)
{
    hx_prefix_busy(n, 1);
    const bool ok =
        hx_prefix_room(r->tree, (uint64_t)(n->end / 64 + 1) * r->cache->page_bytes +
                                    hx_cache_state_bytes(r->cache, 1));
    if (ok && n->snap->state == NULL)
        load_file(r, n, true);
    for (hx_node *a = n; ok && a->parent != NULL; a = a->parent)
        if (a->page < 0 && a->host == NULL) {
            assert_non_null(a->file);
            load_file(r, a->file, false);
        }
    hx_prefix_busy(n, -1);
    return ok;
}

/* One request: find, attach, compute the rest, keep some states on the way. Returns how
 * many were found. */
static int64_t serve(rig *r, text *x, bool strict, kept *list, int32_t *n_list,
                     uint64_t seed)
{
    static const float hidden[4] = { 1, 2, 3, 4 };
    const hx_prefix_query q = { x->token, x->n, strict };
    hx_prefix_match m = hx_prefix_find(r->tree, &q);
    const int32_t slot = hx_cache_take(r->cache);
    const int64_t answer = HX_MIN(CTX - x->n, (int64_t)(hx_rng_at(seed, 2) % 80));
    int64_t at = m.n;
    hx_err err = { 0 };

    assert_true(slot >= 0);
    if (m.node != NULL && hx_prefix_on_disk(m.node) && !load(r, m.node)) {
        m.node = NULL;
        at = m.n = 0;
    }
    phases_of(x, m.node);
    if (m.node != NULL) {
        if (hx_prefix_attach(r->tree, m.node, slot, hx_now_us(), &err) != 0)
            fail_msg("%s", err.msg);
        check_slot(r, slot, x, m.n);
    }
    for (int part = 0; part < 3; part++) {
        const int64_t to = part == 0 ? x->n / 64 * 64 : part == 1 ? x->n : x->n + answer;

        if (to < at || to == 0 || (part == 2 && answer == 0))
            continue;
        if (part == 2)
            for (int64_t i = at; i < to; i++) {
                x->decoded[i / 64] |= UINT64_C(1) << (i % 64);
                x->token[i] = (int32_t)(hx_rng_at(seed, (uint64_t)i) % 3);
            }
        assert_int_equal(compute(r, slot, x, at, to), 0);
        at = to;
        const hx_prefix_have h = { .slot = slot,
                                   .token = x->token,
                                   .decoded = x->decoded,
                                   .n = to,
                                   .hidden = part == 1 ? hidden : NULL };
        if (hx_rng_at(seed, 3 + (uint64_t)part) % 4 == 0 ||
            hx_prefix_store(r->tree, &h, hx_now_us()) == NULL || list == NULL)
            continue;
        kept *k = &list[(*n_list)++];
        *k = (kept) { .x = *x, .n = to, .has_hidden = part == 1, .pure = true };
        for (int64_t i = 0; i < to; i++)
            k->pure &= (x->decoded[i / 64] >> (i % 64) & 1) == 0;
    }
    hx_cache_drop(r->cache, slot);
    return m.n;
}

/* With room for everything the tree finds exactly what the list says. */
static void test_finds_the_best(void **state)
{
    kept *list = hx_new(kept, 2000);
    int32_t n = 0;
    uint64_t seed = 1;
    int64_t hits = 0;
    text x;
    rig r;

    (void)state;
    rig_open(&r, 20000, 1u << 30);
    for (int i = 0; i < 500; i++) {
        const bool strict = i % 3 == 0;

        make_text(&x, list, n, &seed);
        const int64_t want = best_of(list, n, &x, strict),
                      got = serve(&r, &x, strict, list, &n, seed + 1000000);
        assert_int_equal(got, want);
        hits += got > 0;
    }
    printf("%d states kept, %lld of 500 found something\n", n, (long long)hits);
    assert_true(hits > 250);
    hx_prefix_forget(r.tree);
    assert_int_equal(r.tree->stat.nodes, 0);
    assert_int_equal(r.tree->host, 0);
    rig_close(&r);
    hx_free(list);
}

/* Little room: pages move to host memory and back, states are given up; what is found is
 * still right, and everything comes back in the end. */
static void test_little_room(void **state)
{
    static const uint64_t rooms[] = { 0, 5000, 40000, 400000 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(rooms); i++) {
        kept *list = hx_new(kept, 2000);
        int32_t n = 0;
        uint64_t seed = 100 * (i + 1);
        int64_t hits = 0;
        text x;
        rig r;

        rig_open(&r, CTX / HX_PAGE + 6, rooms[i]);
        for (int k = 0; k < 500; k++) {
            make_text(&x, list, n, &seed);
            const int64_t most = best_of(list, n, &x, false);
            const int64_t got = serve(&r, &x, false, list, &n, seed + 1000000);
            assert_true(got <= most);
            assert_true(r.tree->host <= r.tree->host_max);
            hits += got > 0;
        }
        printf("%llu bytes: %lld of 500 found something, %lld pages parked, %lld back\n",
               (unsigned long long)rooms[i], (long long)hits,
               (long long)r.tree->stat.parked, (long long)r.tree->stat.restored);
        assert_true(rooms[i] != 400000 || r.tree->stat.restored > 50);
        rig_close(&r);
        hx_free(list);
    }
}

/* The same with files that come and go. */
static void test_files(void **state)
{
    (void)state;
    for (uint64_t round = 0; round < 3; round++) {
        kept *list = hx_new(kept, 3000);
        int32_t n = 0;
        uint64_t seed = 7000 * (round + 1);
        int64_t hits = 0;
        text x;
        rig r;

        rig_open(&r, CTX / HX_PAGE + 6, 60000 + 40000 * round);
        for (int k = 0; k < 600; k++) {
            const uint64_t dice = hx_rng_at(seed, 77);

            make_text(&x, list, n, &seed);
            const int64_t most = best_of(list, n, &x, false);
            const int64_t got = serve(&r, &x, false, list, &n, seed + 1000000);
            assert_true(got <= most);
            hits += got > 0;
            for (uint64_t i = dice % 4; i > 0; i--)
                write_some(&r, dice >> (8 * i));
            if ((dice >> 40) % 8 == 0)
                lose_some(&r, dice >> 44);
            if (k == 400)
                hx_prefix_forget(r.tree);
        }
        printf("%lld of 600 found something, %lld files, %lld read; %lld states, %lld on "
               "disk\n",
               (long long)hits, (long long)n_file, (long long)n_loads,
               (long long)r.tree->stat.snaps, (long long)r.tree->stat.snaps_disk);
        assert_true(n_loads > 20);
        rig_close(&r);
        for (int64_t i = 0; i < n_file; i++) {
            for (int64_t j = 0; j < files[i].n_page; j++)
                hx_blob_unref(files[i].page[j]);
            hx_blob_unref(files[i].state);
        }
        memset(files, 0, sizeof files);
        n_file = n_loads = 0;
        hx_free(list);
    }
}

/* What running sequences, pins and busy branches need stays; the rest goes. */
static void test_leases(void **state)
{
    text x = { .n = 300 }, y = { .n = 300 };
    hx_node *nx, *ny;
    rig r;

    (void)state;
    rig_open(&r, 16, 20000);
    for (int i = 0; i < 300; i++) {
        x.token[i] = 1;
        y.token[i] = 2;
    }
    const int32_t a = hx_cache_take(r.cache), b = hx_cache_take(r.cache);
    assert_int_equal(compute(&r, a, &x, 0, 300), 0);
    assert_int_equal(compute(&r, b, &y, 0, 300), 0);
    nx = hx_prefix_store(
        r.tree,
        &(hx_prefix_have) { .slot = a, .token = x.token, .decoded = x.decoded, .n = 256 },
        1);
    ny = hx_prefix_store(
        r.tree,
        &(hx_prefix_have) { .slot = b, .token = y.token, .decoded = y.decoded, .n = 256 },
        2);
    assert_non_null(nx);
    assert_non_null(ny);
    assert_int_equal(hx_prefix_held(r.tree, nx), 4);
    hx_prefix_reclaim(r.tree, 16); /* all are held by slots */
    assert_int_equal(r.cache->n_free, 6);
    hx_cache_drop(r.cache, b);
    assert_int_equal(hx_prefix_held(r.tree, ny), 0);
    hx_prefix_pin(r.tree, ny);
    hx_prefix_reclaim(r.tree, 16);
    assert_int_equal(r.cache->n_free, 7); /* the page of positions 256 .. 299 came back */
    assert_false(hx_prefix_room(r.tree, 20000));
    assert_non_null(ny->snap); /* pinned: no room is made of it */
    assert_non_null(nx->snap); /* its pages are a running sequence's */
    hx_prefix_unpin(r.tree, ny);
    hx_prefix_busy(ny, 1);
    assert_false(hx_prefix_room(r.tree, 20000));
    assert_non_null(ny->snap);
    hx_prefix_busy(ny, -1);
    hx_prefix_reclaim(r.tree, 16);
    assert_int_equal(r.cache->n_free, 11);
    assert_true(ny->page < 0 && ny->host != NULL);
    assert_false(hx_prefix_room(r.tree, 20000));
    assert_int_equal(r.tree->stat.snaps, 1);
    /* y was given up, and the tree says so; x differs from its first token on. */
    const hx_prefix_match m =
        hx_prefix_find(r.tree, &(hx_prefix_query) { y.token, 300, 0 });
    assert_int_equal(m.miss, HX_MISS_EVICTED);
    hx_cache_drop(r.cache, a);
    rig_close(&r);
}

static void expect_miss(rig *r, const text *x, int64_t n, hx_miss miss, int64_t found,
                        int64_t known)
{
    const hx_prefix_match m =
        hx_prefix_find(r->tree, &(hx_prefix_query) { x->token, n, 0 });

    assert_int_equal(m.miss, miss);
    assert_int_equal(m.n, found);
    assert_int_equal(m.known, known);
}

static void test_why(void **state)
{
    static const float hidden[4];
    text x = { .n = 300 }, y;
    rig r;

    (void)state;
    rig_open(&r, 16, 1 << 20);
    for (int i = 0; i < 400; i++)
        x.token[i] = i;
    expect_miss(&r, &x, 300, HX_MISS_NEW, 0, 0);
    const int32_t a = hx_cache_take(r.cache);
    assert_int_equal(compute(&r, a, &x, 0, 300), 0);
    hx_prefix_have h = { .slot = a, .token = x.token, .decoded = x.decoded, .n = 256 };
    assert_non_null(hx_prefix_store(r.tree, &h, 1));
    h.n = 300;
    h.hidden = hidden;
    assert_non_null(hx_prefix_store(r.tree, &h, 1));
    expect_miss(&r, &x, 300, HX_MISS_NONE, 300, 300);
    expect_miss(&r, &x, 299, HX_MISS_NO_STATE, 256, 299);
    expect_miss(&r, &x, 350, HX_MISS_NEW, 256,
                300); /* the end inside a page is exact only */
    y = x;
    y.token[270] = -5;
    expect_miss(&r, &y, 350, HX_MISS_DIFFERS, 256, 270);
    y.token[3] = -5;
    expect_miss(&r, &y, 350, HX_MISS_DIFFERS, 0, 3);
    y.token[0] = -5;
    expect_miss(&r, &y, 350, HX_MISS_NEW, 0, 0);
    hx_cache_drop(r.cache, a);
    rig_close(&r);
}

/* After any number of turns few states are left, and the nearest one to any distance d
 * before the end lies at most at 2 d (where one was kept at all). */
static void test_thinning(void **state)
{
    text x = { .n = CTX };
    hx_node *n = NULL;
    int32_t left = 0;
    int64_t last = 0;
    rig r;

    (void)state;
    rig_open(&r, 32, 1 << 20);
    for (int i = 0; i < CTX; i++)
        x.token[i] = i;
    const int32_t a = hx_cache_take(r.cache);
    for (int64_t at = 64; at <= CTX; at += 64) {
        assert_int_equal(compute(&r, a, &x, at - 64, at), 0);
        n = hx_prefix_store(
            r.tree,
            &(hx_prefix_have) {
                .slot = a, .token = x.token, .decoded = x.decoded, .n = at },
            at);
        assert_non_null(n);
        hx_prefix_thin(r.tree, n);
    }
    for (const hx_node *c = n; c != NULL; c = c->parent)
        if (c->snap != NULL) {
            const int64_t d = CTX - c->end;

            assert_true(d <= 64 || d <= 4 * last);
            last = d;
            left++;
        }
    printf("%d of 16 states left\n", left);
    assert_true(left <= 8);
    hx_cache_drop(r.cache, a);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_best),
        cmocka_unit_test(test_little_room),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_leases),
        cmocka_unit_test(test_why),
        cmocka_unit_test(test_thinning),
    };

    return cmocka_run_group_tests_name("prefix", tests, NULL, NULL);
}
