/* sched_test.c - what sched_pick.c decides, on a simulated clock: machines whose layers
 * and decode steps cost what a case says, streams that decode beside prompts of some
 * length. Measured: the rate that streams keep, their gaps, how long newcomers take. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/engine.h"

#include <cmocka.h>

#define N_LAYER 12
#define N_BLOCK 4

/* A machine: microseconds of a decode step, and of a layer by blocks. */
typedef struct {
    const char *name;
    double step, per_row;    /* a decode step: step + per_row * rows */
    double layer, per_block; /* a layer: layer + per_block * blocks */
    double heavy;            /* every fourth layer costs so many times that */
    double noise;            /* each time by up to this part more */
    double hiccup;           /* one in 50 times by so much longer */
    double cold;             /* a step after a slice of a prompt by this part longer */
} machine;

static const machine machines[] = {
    { .name = "two cores",
      .step = 1000,
      .per_row = 600,
      .layer = 100,
      .per_block = 2000,
      .heavy = 1.5 },
    { .name = "noisy",
      .step = 1000,
      .per_row = 600,
      .layer = 100,
      .per_block = 1800,
      .heavy = 1.5,
      .noise = 0.3,
      .hiccup = 2 },
    { .name = "slow layers",
      .step = 1500,
      .per_row = 10,
      .layer = 500,
      .per_block = 9000,
      .heavy = 1 },
    { .name = "fast GPU",
      .step = 15000,
      .per_row = 1000,
      .layer = 300,
      .per_block = 40,
      .heavy = 2 },
    { .name = "links, few",
      .step = 20000,
      .per_row = 500,
      .layer = 30000,
      .per_block = 500,
      .heavy = 1.2 },
    { .name = "links",
      .step = 60000,
      .per_row = 5000,
      .layer = 30000,
      .per_block = 500,
      .heavy = 1.2 },
    { .name = "cold caches",
      .step = 1000,
      .per_row = 600,
      .layer = 100,
      .per_block = 2000,
      .heavy = 1.5,
      .cold = 0.15 },
};

typedef struct {
    int64_t left; /* tokens of a prompt */
    hx_pick_prompt key;
    double came_us, done_us;
} newcomer;

typedef struct {
    const machine *m;
    uint64_t rng;
    double now_us;
    hx_costs costs;
    hx_pick_state s;
    float layer[N_LAYER * N_BLOCK];
    int32_t n_stream;
    newcomer *in;
    int64_t n_in, chunk; /* chunk: whose is under way, -1: nobody's */
    uint64_t turn;
    double gap[200000], last_us;
    int64_t n_gap;
} sim;

static double cost(sim *x, double us)
{
    const double u = hx_rng_unit(7, x->rng++), v = hx_rng_unit(8, x->rng);

    us *= 1 + x->m->noise * u;
    return x->m->hiccup > 0 && v < 0.02 ? us * (1 + x->m->hiccup) : us;
}

static void sim_open(sim *x, const machine *m, int32_t n_stream, float share)
{
    *x = (sim) { .m = m, .n_stream = n_stream, .chunk = -1 };
    x->costs = (hx_costs) { .layer = x->layer, .n_layer = N_LAYER, .n_block = N_BLOCK };
    x->s.share = share;
}

static void do_decode(sim *x)
{
    const double warm = x->m->step + x->m->per_row * x->s.n_decode,
                 us = cost(x, x->s.sliced ? warm * (1 + x->m->cold) : warm);

    x->now_us += us;
    hx_sched_pick_decoded(&x->costs, &x->s, x->s.n_decode, (float)us);
    if (x->last_us > 0 && x->n_gap < (int64_t)HX_LEN(x->gap))
        x->gap[x->n_gap++] = x->now_us - x->last_us;
    x->last_us = x->now_us;
}

static int64_t blocks_of(int64_t tokens)
{
    return (tokens + 63) / 64;
}

static void do_prefill(sim *x, const hx_pick *p)
{
    const double one = x->m->layer + x->m->per_block * (double)p->blocks;

    x->in[x->chunk].key.turn = ++x->turn;
    x->s.blocks = p->blocks;
    for (int64_t i = 0; i < p->layers; i++) {
        const double us = cost(x, x->s.layer % 4 == 3 ? one * x->m->heavy : one);

        x->now_us += us;
        hx_sched_pick_read(&x->costs, &x->s, x->s.layer++, p->blocks, true, (float)us);
    }
    if (x->s.layer < N_LAYER)
        return;
    x->in[x->chunk].left -= 64 * p->blocks;
    if (x->in[x->chunk].left <= 0)
        x->in[x->chunk].done_us = x->now_us;
    x->chunk = -1;
    x->s.layer = x->s.blocks = 0;
}

/* One decision. Returns false when there is nothing to do. */
static bool sim_step(sim *x)
{
    hx_pick_prompt key[64];
    int64_t who[64], n = 0;
    hx_pick p;

    for (int64_t i = 0; i < x->n_in; i++)
        if (x->in[i].left > 0 && x->in[i].came_us <= x->now_us) {
            key[n] = x->in[i].key;
            who[n++] = i;
        }
    if (x->chunk < 0 && n > 0)
        x->chunk = who[hx_sched_pick_prompt(key, n)];
    x->s.prefill = x->chunk >= 0;
    x->s.n_decode = x->n_stream;
    x->s.left = x->chunk >= 0 ? blocks_of(x->in[x->chunk].left) : 0;
    p = hx_sched_pick_next(&x->costs, &x->s);
    if (p.kind == HX_PICK_DECODE)
        do_decode(x);
    else if (p.kind == HX_PICK_PREFILL)
        do_prefill(x, &p);
    return p.kind != HX_PICK_NOTHING;
}

static void sim_until_read(sim *x)
{
    bool left = true;

    while (left) {
        assert_true(sim_step(x));
        left = false;
        for (int64_t i = 0; i < x->n_in; i++)
            left = left || x->in[i].left > 0;
    }
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double quantile(double *v, int64_t n, double q)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[HX_MIN((int64_t)(q * (double)n), n - 1)];
}

/* What reading n tokens takes alone. */
static double alone_us(const machine *m, int64_t n)
{
    newcomer in = { .left = n };
    sim *x = hx_new(sim, 1);
    double us;

    sim_open(x, m, 0, 0.5f);
    x->in = &in;
    x->n_in = 1;
    sim_until_read(x);
    us = x->now_us;
    hx_free(x);
    return us;
}

/* ---- a newcomer beside three streams --------------------------------------- */

static void beside(const machine *m, float share)
{
    sim *x = hx_new(sim, 1);
    newcomer in = { .left = 30000 };
    double rate_alone, rate, took, p50, p99;
    newcomer before = { .left = 1024 };
    const double slow = share < 0.4f ? 1.0 / 0.6 : 1.0 / (1.0 - (double)share);

    /* Costs are known from a prompt that was read alone. */
    sim_open(x, m, 0, share);
    x->in = &before;
    x->n_in = 1;
    sim_until_read(x);
    x->n_stream = 3;
    x->n_in = 0;
    rate_alone = -x->now_us;
    for (int i = 0; i < 200; i++)
        sim_step(x);
    rate_alone = (double)x->n_gap / (rate_alone + x->now_us);
    x->n_gap = 0;
    in.came_us = x->now_us;
    x->in = &in;
    x->n_in = 1;
    sim_until_read(x);
    took = in.done_us - in.came_us;
    rate = (double)x->n_gap / took;
    p50 = quantile(x->gap, x->n_gap, 0.5);
    p99 = quantile(x->gap, x->n_gap, 0.99);
    printf("%-12s share %.2f: keeps %.2f, gap p99/p50 %.2f, newcomer %.2fx\n", m->name,
           (double)share, rate / rate_alone, p99 / p50, took / alone_us(m, 30000));
    /* The floor, within what a hiccup costs. */
    assert_true(rate >= rate_alone * (double)share * 0.97);
    /* And not much more than the floor: newcomers get the rest. */
    assert_true(took <= slow * alone_us(m, 30000) * 1.25 + 50 * p99);
    if (share == 0.5f && m->layer + m->per_block < 1.4 * (m->step + 3 * m->per_row)) {
        assert_true(p99 < 3 * p50);
        assert_true(took <= 2.5 * alone_us(m, 30000));
    }
    hx_free(x);
}

static void test_beside(void **state)
{
    (void)state;
    for (size_t i = 0; i < HX_LEN(machines); i++) {
        beside(&machines[i], 0.5f);
        beside(&machines[i], 0.8f);
    }
}

/* A share of 1 still lets newcomers in, however slowly. */
static void test_never_starves(void **state)
{
    newcomer in = { .left = 640 };
    sim *x = hx_new(sim, 1);

    (void)state;
    sim_open(x, &machines[0], 8, 1);
    for (int i = 0; i < 20; i++)
        sim_step(x);
    x->in = &in;
    x->n_in = 1;
    sim_until_read(x);
    assert_true(x->n_gap > 100);
    hx_free(x);
}

/* Where a layer is longer than a step, several steps lie between two; no gap holds more
 * than one layer, of one block but for the chunk that tries whether two cost hardly more. */
static void test_long_layers(void **state)
{
    newcomer in = { .left = 2048 };
    sim *x = hx_new(sim, 1);
    const machine *m = &machines[2];

    (void)state;
    sim_open(x, m, 1, 0.5f);
    for (int i = 0; i < 50; i++)
        sim_step(x);
    x->in = &in;
    x->n_in = 1;
    x->n_gap = 0;
    sim_until_read(x);
    int longer = 0;
    for (int64_t i = 0; i < x->n_gap; i++) {
        const double most = m->step + m->per_row + m->layer + m->per_block + 1;

        assert_true(x->gap[i] <= most + m->per_block);
        longer += x->gap[i] > most;
    }
    assert_true(longer <= N_LAYER);
    hx_free(x);
}

/* All weights come over a link for each layer, whatever the rows: nothing is known but that
 * one block is too long, and chunks get long all the same. */
static void test_finds_long(void **state)
{
    enum { LONG = 64 };
    float layer[N_LAYER * LONG] = { 0 };
    hx_costs c = { .layer = layer, .n_layer = N_LAYER, .n_block = LONG };
    hx_pick_state s = { .share = 0.5f, .prefill = true, .n_decode = 1, .left = 1000 };
    int64_t b = 1;
    int chunks = 0;

    (void)state;
    hx_sched_pick_decoded(&c, &s, 1, 20000);
    for (; chunks < 20; chunks++) { /* a layer: 46 ms, and 0.3 a block from the 33rd on */
        s.credit_us = 1e6f;
        b = hx_sched_pick_next(&c, &s).blocks;
        for (int64_t l = 0; l < N_LAYER; l++)
            hx_sched_pick_read(&c, &s, l, b, true,
                               46000 + 300 * (float)HX_MAX(b - 32, 0));
        if (b == LONG)
            break;
    }
    assert_true(b == LONG && chunks <= 8); /* 55.6 ms are hardly more than 46 */
    /* Where blocks cost in proportion, it stays with one. */
    memset(layer, 0, sizeof layer);
    for (chunks = 0; chunks < 5; chunks++) {
        s.credit_us = 1e6f;
        b = hx_sched_pick_next(&c, &s).blocks;
        assert_true(b <= 2 && (chunks < 2 || b == 1));
        for (int64_t l = 0; l < N_LAYER; l++)
            hx_sched_pick_read(&c, &s, l, b, true, 46000 * (float)b);
    }
}

/* ---- several newcomers ------------------------------------------------------ */

static void test_round_robin(void **state)
{
    newcomer in[5] = { { .left = 30016 },
                       { .left = 30016 },
                       { .left = 30016 },
                       { .left = 128, .key.turn = 1000000 },
                       { .left = 640, .key.priority = 1, .key.turn = 9000000 } };
    sim *x = hx_new(sim, 1);

    (void)state;
    sim_open(x, &machines[0], 2, 0.5f);
    x->in = in;
    x->n_in = 5;
    x->turn = 1000000;
    sim_until_read(x);
    /* The one of higher priority first, whenever it came; the short one within a few
     * chunks; the equal ones end together. */
    assert_true(in[4].done_us < in[3].done_us);
    assert_true(in[3].done_us < in[0].done_us / 10);
    for (int i = 1; i < 3; i++)
        assert_true(fabs(in[i].done_us - in[0].done_us) < in[0].done_us * 0.02);
    hx_free(x);
}

static void test_pick_prompt(void **state)
{
    const hx_pick_prompt p[] = { { 0, 5 }, { 0, 3 }, { 2, 9 }, { 2, 8 }, { 1, 0 } };

    (void)state;
    assert_int_equal(hx_sched_pick_prompt(p, 0), -1);
    assert_int_equal(hx_sched_pick_prompt(p, 2), 1);
    assert_int_equal(hx_sched_pick_prompt(p, 5), 3);
}

/* ---- edges ------------------------------------------------------------------ */

static void test_edges(void **state)
{
    float layer[N_LAYER * N_BLOCK] = { 0 };
    hx_costs c = { .layer = layer, .n_layer = N_LAYER, .n_block = N_BLOCK };
    hx_pick_state s = { .share = 0.5f };
    hx_pick p;

    (void)state;
    assert_int_equal(hx_sched_pick_next(&c, &s).kind, HX_PICK_NOTHING);
    s.n_decode = 1;
    assert_int_equal(hx_sched_pick_next(&c, &s).kind, HX_PICK_DECODE);
    /* Alone: the longest chunk, all layers; what is a little more makes two alike; a short
     * prompt takes what it has. */
    s = (hx_pick_state) { .share = 0.5f, .prefill = true, .left = 3 * N_BLOCK };
    p = hx_sched_pick_next(&c, &s);
    assert_true(p.kind == HX_PICK_PREFILL && p.blocks == N_BLOCK && p.layers == N_LAYER);
    s.left = N_BLOCK + 1;
    assert_int_equal(hx_sched_pick_next(&c, &s).blocks, N_BLOCK / 2 + 1);
    s.left = 2;
    assert_int_equal(hx_sched_pick_next(&c, &s).blocks, 2);
    s.blocks = 3;
    s.layer = 5;
    p = hx_sched_pick_next(&c, &s);
    assert_true(p.blocks == 3 && p.layers == N_LAYER - 5);
    /* Nothing is known: decode first, then one layer of one block. */
    s = (hx_pick_state) { .share = 0.5f, .prefill = true, .left = 9, .n_decode = 2 };
    assert_int_equal(hx_sched_pick_next(&c, &s).kind, HX_PICK_DECODE);
    hx_sched_pick_decoded(&c, &s, 2, 1000);
    p = hx_sched_pick_next(&c, &s);
    assert_true(p.kind == HX_PICK_PREFILL && p.blocks == 1 && p.layers == 1);
    /* A layer ten times as long is paid for by ten steps. */
    hx_sched_pick_read(&c, &s, 0, 1, true, 10000);
    s.blocks = 1;
    s.layer = 1;
    for (int i = 0; i < 9; i++) {
        assert_int_equal(hx_sched_pick_next(&c, &s).kind, HX_PICK_DECODE);
        hx_sched_pick_decoded(&c, &s, 2, 1000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beside),      cmocka_unit_test(test_never_starves),
        cmocka_unit_test(test_long_layers), cmocka_unit_test(test_finds_long),
        cmocka_unit_test(test_round_robin), cmocka_unit_test(test_pick_prompt),
        cmocka_unit_test(test_edges),
    };

    return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
