/* trace_test.c - replay against naive caches on small traces: the optimum against every way
 * to fill the cache, LRU against a list; the file against what was put there; and a running
 * model's trace against what its store counted. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <unistd.h>

#include "hoist.h"
#include "model/trace.h"

enum { E = 7, A = 2, LAYERS = 3, STEPS = 14, ALL = 2 * E };

/* ---- small traces --------------------------------------------------------- */

/* Layers 0 and 2 have experts. Made without trace.c: the format as trace.h says it. */
static hx_trace *drawn(uint64_t seed, int rows, int32_t ids[STEPS][2][8])
{
    hx_sb b = { 0 };
    hx_trace *t;
    hx_err err;
    uint64_t draw = 0;

    hx_sb_str(&b, "{\"hoist_trace\":1,\"n_layer\":3,\"n_expert\":7,\"n_active\":2,"
                  "\"moe\":[0,2]}\n");
    for (int s = 0; s < STEPS; s++) {
        hx_sb_add(&b, (const char[2]) { (char)rows, 0 }, 2);
        for (int l = 0; l < 2; l++)
            for (int k = 0; k < rows * A; k++) {
                /* squared: some experts are picked more often */
                const double u = hx_rng_unit(seed, draw++);
                const int id = (int)(u * u * E);

                ids[s][l][k] = id;
                hx_sb_add(&b, (const char[2]) { (char)id, 0 }, 2);
            }
    }
    if (hx_trace_parse(&t, (hx_str) { b.p, b.n }, &err) != 0)
        fail_msg("%s", err.msg);
    hx_sb_free(&b);
    return t;
}

/* A step's items as bits: layer 0 below, layer 2 above. */
static unsigned set_of(int32_t ids[2][8], int rows)
{
    unsigned s = 0;

    for (int l = 0; l < 2; l++)
        for (int k = 0; k < rows * A; k++)
            s |= 1u << (l * E + ids[l][k]);
    return s;
}

/* The first slots go to layers in turn. */
static unsigned first_set(int n_slot)
{
    unsigned c = 0;

    for (int i = 0; i < n_slot; i++)
        c |= 1u << (i % 2 * E + i / 2);
    return c;
}

/* Most hits of any cache that may keep any n_slot of what it has and what it reads: tries
 * every set. */
static int64_t most_hits(const unsigned *set, int n_slot)
{
    static int best[1 << ALL], next[1 << ALL];

    memset(best, -1, sizeof best);
    best[first_set(n_slot)] = 0;
    for (int s = 0; s < STEPS; s++) {
        memset(next, -1, sizeof next);
        for (unsigned c = 0; c < 1u << ALL; c++) {
            if (best[c] < 0)
                continue;
            const unsigned all = c | set[s];
            const int got = best[c] + __builtin_popcount(c & set[s]);

            for (unsigned to = all;; to = (to - 1) & all) { /* every part of it */
                if (__builtin_popcount(to) <= n_slot)
                    next[to] = HX_MAX(next[to], got);
                if (to == 0)
                    break;
            }
        }
        memcpy(best, next, sizeof best);
    }
    int most = 0;
    for (unsigned c = 0; c < 1u << ALL; c++)
        most = HX_MAX(most, best[c]);
    return most;
}

/* A list, last used first. */
static int64_t lru_hits(int32_t ids[STEPS][2][8], int rows, int n_slot)
{
    int list[64], n = 0;
    int64_t hits = 0;

    for (int i = 0; i < ALL; i++)
        if (first_set(n_slot) >> i & 1)
            list[n++] = i;
    for (int s = 0; s < STEPS; s++) {
        unsigned done = 0;
        int had = 0;

        for (int i = 0; i < n; i++)
            had |= 1 << list[i];
        for (int l = 0; l < 2; l++)
            for (int k = 0; k < rows * A; k++) {
                const int item = l * E + ids[s][l][k];
                int at = 0;

                if (done >> item & 1)
                    continue;
                done |= 1u << item;
                hits += had >> item & 1;
                while (at < n && list[at] != item)
                    at++;
                n += at == n;
                memmove(list + 1, list, (size_t)at * sizeof *list);
                list[0] = item;
            }
        n = HX_MIN(n, n_slot);
    }
    return hits;
}

static void test_small(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 8; seed++)
        for (int rows = 1; rows <= 2; rows++) {
            int32_t ids[STEPS][2][8];
            unsigned set[STEPS];
            hx_trace *t = drawn(seed, rows, ids);
            int64_t items = 0;

            for (int s = 0; s < STEPS; s++) {
                set[s] = set_of(ids[s], rows);
                items += __builtin_popcount(set[s]);
            }
            for (int n_slot = 1; n_slot <= 5; n_slot += 2) {
                hx_trace_result r, clock;
                hx_err err;

                assert_int_equal(hx_trace_replay(t, HX_TRACE_BELADY, n_slot, 0, &r, &err),
                                 0);
                assert_int_equal(r.items, items);
                assert_int_equal(r.hits, most_hits(set, n_slot));
                assert_int_equal(
                    hx_trace_replay(t, HX_TRACE_CLOCK, n_slot, 0, &clock, &err), 0);
                assert_true(clock.hits <= r.hits);
                assert_int_equal(hx_trace_replay(t, HX_TRACE_LRU, n_slot, 0, &r, &err),
                                 0);
                assert_int_equal(r.hits, lru_hits(ids, rows, n_slot));
            }
            hx_trace_close(t);
        }
}

/* Two items in turn, and a third now and then; room for one: who knows the future keeps one
 * of the two, LRU never has what comes. By hand. */
static void test_by_hand(void **state)
{
    const char head[] = "{\"hoist_trace\":1,\"n_layer\":1,\"n_expert\":3,\"n_active\":1,"
                        "\"moe\":[0]}\n";
    char bytes[256];
    hx_trace_result r;
    hx_trace *t;
    hx_err err;
    size_t n = sizeof head - 1;

    (void)state;
    memcpy(bytes, head, n);
    for (const char *p = "\1\2\1\2\1\2"; *p != '\0'; p++) {
        memcpy(bytes + n, (const char[4]) { 1, 0, *p, 0 }, 4);
        n += 4;
    }
    assert_int_equal(hx_trace_parse(&t, (hx_str) { bytes, n - 1 }, &err), 0);
    assert_int_equal(t->n_step, 5); /* the last was cut off */
    hx_trace_close(t);
    assert_int_equal(hx_trace_parse(&t, (hx_str) { bytes, n }, &err), 0);
    assert_int_equal(hx_trace_replay(t, HX_TRACE_LRU, 1, 0, &r, &err), 0);
    assert_int_equal(r.hits, 0);
    assert_int_equal(r.moves, 6);
    assert_int_equal(hx_trace_replay(t, HX_TRACE_BELADY, 1, 0, &r, &err), 0);
    assert_int_equal(r.hits, 2); /* 1 . 1 . 1 */
    assert_int_equal(r.moves, 1);
    assert_int_equal(hx_trace_replay(t, HX_TRACE_FIXED, 1, 3, &r, &err), 0);
    assert_int_equal(r.items, 3);
    assert_true(hx_trace_replay(t, HX_TRACE_LRU, 4, 0, &r, &err) == HX_EARG);
    assert_true(hx_trace_replay(t, HX_TRACE_LRU, 1, 6, &r, &err) == HX_EARG);
    hx_trace_close(t);
}

static void test_refused(void **state)
{
    static const char *const heads[] = {
        "",
        "{}\n",
        "{\"hoist_trace\":2}\n",
        "{\"hoist_trace\":1,\"n_layer\":3,\"n_expert\":0,\"n_active\":1,\"moe\":[0]}\n",
        "{\"hoist_trace\":1,\"n_layer\":3,\"n_expert\":4,\"n_active\":5,\"moe\":[0]}\n",
        "{\"hoist_trace\":1,\"n_layer\":3,\"n_expert\":4,\"n_active\":1,\"moe\":[2,1]}\n",
        "{\"hoist_trace\":1,\"n_layer\":3,\"n_expert\":4,\"n_active\":1,\"moe\":[3]}\n",
        "{\"hoist_trace\":1,\"n_layer\":3,\"n_expert\":4,\"n_active\":1,\"moe\":[]}\n",
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(heads); i++) {
        hx_trace *t;
        hx_err err;

        assert_int_equal(hx_trace_parse(&t, hx_str_c(heads[i]), &err), HX_EFORMAT);
        assert_null(t);
    }
}

/* ---- a running model -------------------------------------------------------- */

/* Answers of several streams through a store with slots for a third of the experts. */
static void run_model(const char *path, hx_experts *out)
{
    const hx_options opt = { .model_dir = "models/demo-exl3",
                             .device = "cpu",
                             .vram_bytes = 1300000,
                             .ctx_tokens = 512,
                             .n_threads = 2,
                             .max_streams = 3,
                             .expert_us = { 1, 10, 12, 4, 5 },
                             .prefix = HX_PREFIX_OFF,
                             .no_canary = true, /* its prompt would have slots lent */
                             .trace = path };
    hx_engine *e;
    hx_stream *s[3];
    hx_err err;

    *out = (hx_experts) { 0 };
    if (hx_open(&e, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    for (int i = 0; i < 3; i++) {
        const int32_t ids[] = { 50 + i, 60, 70 };
        const hx_request r = { .tokens = ids,
                               .n_tokens = 3,
                               .max_new = 120,
                               .temperature = 1,
                               .seed = (uint64_t)i,
                               .ignore_eos = true };

        assert_int_equal(hx_submit(e, &r, &s[i], &err), 0);
    }
    for (int i = 0; i < 3; i++) {
        hx_event ev = { 0 };

        while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR)
            assert_int_equal(hx_next(s[i], &ev, 60000), 1);
        assert_int_equal(ev.kind, HX_EV_DONE);
        hx_stream_free(s[i]);
    }
    /* Figures of the last step come after its tokens. */
    for (int64_t was = -1; was != out->steps; hx_get_experts(e, out)) {
        was = out->steps;
        usleep(100000);
    }
    hx_close(e);
}

static void test_store(void **state)
{
    char path[] = "/tmp/hoist-trace-XXXXXX", *bytes;
    const int fd = mkstemp(path);
    hx_trace_result r;
    hx_experts x;
    hx_trace *t;
    hx_err err;
    size_t n;

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    run_model(path, &x);
    assert_int_equal(hx_file_read(path, 1 << 24, &bytes, &n, &err), 0);
    if (hx_trace_parse(&t, (hx_str) { bytes, n }, &err) != 0)
        fail_msg("%s", err.msg);
    assert_int_equal(t->n_step, x.steps);
    assert_int_equal(t->n_pick, x.picks);
    assert_int_equal(t->begin[t->n_step], x.here + x.link + x.lane + x.ahead);
    assert_int_equal(t->shape.n_moe * t->shape.n_expert, x.n_expert);
    assert_in_range(x.n_slot, 1, x.n_expert / 2);
    /* The store says a step later that a newcomer has arrived: a hit less for some. */
    assert_int_equal(hx_trace_replay(t, HX_TRACE_CLOCK, x.n_slot, 0, &r, &err), 0);
    print_message("           store: %lld hits, %lld moves; replay: %lld, %lld\n",
                  (long long)x.here, (long long)x.pushed, (long long)r.hits,
                  (long long)r.moves);
    assert_true(llabs(r.moves - x.pushed) <= 1 + x.pushed / 50);
    assert_true(x.pushed > 10 && llabs(r.hits - x.here) <= 2 * x.pushed);
    hx_trace_close(t);
    hx_free(bytes);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_store),
    };

    return cmocka_run_group_tests_name("trace", tests, NULL, NULL);
}
