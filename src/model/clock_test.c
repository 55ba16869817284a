/* clock_test.c - the expert cache against a naive model of itself and against what is
 * known of the routing it serves: measured shares, the best that a fixed set can do, and
 * what hindsight could (Belady). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>

#include "model/clock.h"

/* ---- tables agree with each other, whatever happens ---------------------- */

static void check_tables(const hx_clock *c)
{
    for (int64_t i = 0; i < c->n_item; i++)
        assert_true(c->slot[i] < 0 || c->tenant[c->slot[i]] == i);
    for (int32_t s = 0; s < c->n_slot; s++)
        assert_true(c->tenant[s] < 0 || c->slot[c->tenant[s]] == s);
}

static void test_tables(void **state)
{
    hx_clock c;
    hx_err err;

    (void)state;
    assert_int_equal(hx_clock_open(&c, 40, 7, &err), 0);
    for (uint64_t i = 0; i < 20000; i++) {
        const int64_t item = (int64_t)(hx_rng_at(3, i) % 40);
        int32_t slot;

        hx_clock_touch(&c, item);
        if (c.slot[item] < 0 && (slot = hx_clock_find(&c, item)) >= 0) {
            const int64_t was = c.tenant[slot];

            assert_true(was < 0 || c.heat[was] < c.heat[item]);
            assert_int_equal(hx_clock_put(&c, item, slot), was);
        }
        if (i % 97 == 0)
            hx_clock_clear(&c, (int32_t)(i % 7));
        if (i % 50 == 0)
            check_tables(&c);
    }
    hx_clock_close(&c);
}

/* A first pick never throws anybody out; a free place is taken at once. */
static void test_frugal(void **state)
{
    hx_clock c;
    hx_err err;

    (void)state;
    assert_int_equal(hx_clock_open(&c, 10, 2, &err), 0);
    for (int64_t i = 0; i < 2; i++) {
        hx_clock_touch(&c, i);
        const int32_t slot = hx_clock_find(&c, i);
        assert_true(slot >= 0);
        hx_clock_put(&c, i, slot);
    }
    hx_clock_touch(&c, 5);
    assert_int_equal(hx_clock_find(&c, 5), -1);
    hx_clock_touch(&c, 5);
    assert_int_equal(hx_clock_find(&c, 5), -1); /* twice against once is no clear lead */
    hx_clock_touch(&c, 5);
    assert_true(hx_clock_find(&c, 5) >= 0);
    hx_clock_close(&c);
}

/* ---- recorded shares -------------------------------------------------------- */

enum { LAYERS = 42, EXPERTS = 288, ACTIVE = 8, SLOTS = 1376, STEPS = 1500, WARM = 700 };

static double share[LAYERS][EXPERTS];

static void read_shares(void)
{
    hx_json *j = NULL;
    hx_err err;
    char *text;
    size_t n;

    assert_int_equal(
        hx_file_read("models/synthetic/routing.json", 1 << 24, &text, &n, &err), 0);
    assert_int_equal(hx_json_parse(&j, (hx_str) { text, n }, 0, &err), 0);
    for (size_t l = 0; l < LAYERS; l++)
        for (size_t e = 0; e < EXPERTS; e++)
            share[l][e] = HX_MAX(hx_json_num(hx_json_at(hx_json_at(j, l), e), 0.5), 0.5);
    hx_json_free(j);
    hx_free(text);
}

/* One step's picks: ACTIVE distinct experts of each layer by their shares. */
static void draw(uint64_t step, int32_t *picks)
{
    for (int l = 0; l < LAYERS; l++) {
        bool taken[EXPERTS] = { false };
        double all = 0;

        for (int e = 0; e < EXPERTS; e++)
            all += share[l][e];
        for (int a = 0; a < ACTIVE; a++) {
            double x =
                hx_rng_unit(7, step * LAYERS * ACTIVE + (uint64_t)(l * ACTIVE + a)) * all;
            int e = 0;

            while (taken[e] || (x -= share[l][e]) > 0)
                e = e + 1 < EXPERTS ? e + 1 : 0;
            taken[e] = true;
            all -= share[l][e];
            picks[l * ACTIVE + a] = l * EXPERTS + e;
        }
    }
}

static int by_count(const void *a, const void *b)
{
    return *(const int *)b - *(const int *)a;
}

/* With hindsight over the measured steps only: the SLOTS items picked most often. */
static double best_fixed(const int32_t *picks)
{
    static int count[LAYERS * EXPERTS];
    const int n = LAYERS * ACTIVE;
    double sum = 0;

    for (int i = WARM * n; i < STEPS * n; i++)
        count[picks[i]]++;
    qsort(count, LAYERS * EXPERTS, sizeof *count, by_count);
    for (int i = 0; i < SLOTS; i++)
        sum += count[i];
    return sum / ((STEPS - WARM) * n);
}

static void test_shares(void **state)
{
    const int n = LAYERS * ACTIVE;
    int32_t *picks = malloc(sizeof *picks * STEPS * LAYERS * ACTIVE);
    int64_t hits = 0, moves = 0;
    hx_clock c;
    hx_err err;

    (void)state;
    assert_non_null(picks);
    read_shares();
    for (int s = 0; s < STEPS; s++)
        draw((uint64_t)s, picks + s * n);
    assert_int_equal(hx_clock_open(&c, LAYERS * EXPERTS, SLOTS, &err), 0);
    for (int s = 0; s < STEPS; s++) {
        int moved = 0;

        for (int i = 0; i < n; i++) {
            const int32_t item = picks[s * n + i];

            hits += s >= WARM && c.slot[item] >= 0;
            hx_clock_touch(&c, item);
        }
        for (int i = 0; i < n && moved < 4; i++) {
            const int32_t item = picks[s * n + i];
            const int32_t slot = c.slot[item] < 0 ? hx_clock_find(&c, item) : -1;

            if (slot < 0)
                continue;
            moved += c.tenant[slot] >= 0;
            hx_clock_put(&c, item, slot);
        }
        moves += s >= WARM ? moved : 0;
    }
    const double rate = (double)hits / ((STEPS - WARM) * n), best = best_fixed(picks);
    print_message(
        "           hits %.3f, a fixed set with hindsight %.3f, %.1f moves a step\n",
        rate, best, (double)moves / (STEPS - WARM));
    assert_true(rate > 0.8 * best && rate < best + 0.05);
    hx_clock_close(&c);
    free(picks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_frugal),
        cmocka_unit_test(test_shares),
    };

    return cmocka_run_group_tests_name("clock", tests, NULL, NULL);
}
