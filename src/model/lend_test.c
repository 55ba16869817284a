/* lend_test.c - slots lent to long prompts, on the CPU with an arena that stands for GPU
 * memory: the same bits with and without, decode goes on beside, a cancel in the middle of a
 * chunk gives back, everybody who had to leave comes back, no slot is lost. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"
#include "lend.c"

/* Where the slots are, and a model for it that needs no file there. */
static const char *device = "cpu", *model = "models/demo-exl3";
static bool gpu;
static int32_t n_all = 80; /* its experts */
static uint64_t beside;    /* of a GPU's memory, taken before any expert */

enum {
    N_ROW = 1000, /* of the long prompt */
    N_OUT = 100,  /* its last rows, whose logits are compared */
    MOST = 256,   /* layers times experts of a model */
    CLOCK_US = 1000
};

static int32_t prompt[N_ROW];

static void open_part(hx_engine **e, int64_t slots)
{
    static size_t record;
    hx_options o = { .model_dir = model,
                     .device = device,
                     .ctx_tokens = 2048,
                     .n_threads = 2,
                     .max_streams = 4,
                     .cache_bytes = 1 << 30, /* the same beside few slots and many */
                     .prefix = HX_PREFIX_OFF,
                     .no_canary = true, /* its prompt would have slots lent */
                     .expert_us = { 1, 10, 12, 4, 5 } };
    hx_err err;

    if (record == 0) {
        hx_model *m;

        assert_int_equal(hx_model_open(&m, model, NULL, NULL, &err), 0);
        const uint64_t all = hx_store_bytes(m, &record);

        assert_int_equal(all / record, n_all);
        hx_model_close(m);
    }
    if (slots > 0)
        o.vram_bytes = beside + (uint64_t)slots * record;
    if (hx_open(e, &o, &err) != 0)
        fail_msg("%s", err.msg);
    if (gpu && slots == 0) {
        hx_info info;

        hx_get_info(*e, &info);
        beside = info.device_bytes;
    }
    for (int i = 0; i < N_ROW; i++)
        prompt[i] = (int32_t)(hx_rng_at(3, (uint64_t)i) % 4000);
}

static void logits_of(hx_engine *e, float *out)
{
    const hx_score_args a = {
        .tokens = prompt, .n_tokens = N_ROW, .from = N_ROW - N_OUT, .logits = out
    };
    hx_err err;

    if (hx_score(e, &a, &err) != 0)
        fail_msg("%s", err.msg);
}

static hx_stream *ask(hx_engine *e, int64_t n, int64_t n_new)
{
    const hx_request r = {
        .tokens = prompt, .n_tokens = n, .max_new = n_new, .ignore_eos = true
    };
    hx_stream *s;
    hx_err err;

    if (hx_submit(e, &r, &s, &err) != 0)
        fail_msg("%s", err.msg);
    return s;
}

/* Reads n tokens of an answer, or more where they came together. */
static int read_some(hx_stream *s, int32_t *token, int n, hx_event *ev)
{
    int have = 0;

    while (have < n && hx_next(s, ev, 60000) == 1 && ev->kind != HX_EV_DONE) {
        if (ev->kind == HX_EV_ERROR)
            fail_msg("%s", ev->err.msg);
        for (int i = 0; i < ev->n_tokens; i++)
            token[have++] = ev->tokens[i];
    }
    return have;
}

/* Every slot has one tenant at most, who knows it; nobody waits to come back; nothing is lent
 * and the graph has its own memory. */
static void expect_whole(const hx_engine *e)
{
    const hx_store *s = e->model->store;
    int32_t there = 0;

    assert_int_equal(s->clock.n_slot, s->n_all_slot);
    assert_int_equal(s->lend->next, s->n_all_slot);
    for (int32_t i = 0; i < s->n_all_slot; i++)
        if (s->clock.tenant[i] >= 0) {
            assert_int_equal(s->clock.slot[s->clock.tenant[i]], i);
            there++;
        }
    for (int64_t i = 0; i < s->clock.n_item; i++)
        there -= s->clock.slot[i] >= 0;
    assert_int_equal(there, 0);
    assert_true(hx_graph_room(e->prefill, HX_PREFILL_ROWS) == 0);
}

/* How often a prompt of N_ROW rows takes the experts of a layer there: once for each chunk
 * where all of them have room, else once for each window of rows. */
static int64_t passes(const hx_engine *e)
{
    const struct hx_lend *l = e->model->store->lend;
    const int64_t most = e->costs.n_block;
    int64_t n = 0;

    for (int64_t left = N_ROW, rows; left > 0; left -= rows) {
        const int64_t blocks = (left + HX_PAGE - 1) / HX_PAGE,
                      chunks = (blocks + most - 1) / most;

        rows = HX_MIN((blocks + chunks - 1) / chunks * HX_PAGE, left);
        n += l->n_stage >= l->n_part || !hx_dev_is_host(e->dev)
                 ? 1
                 : (rows + HX_PREFILL_ROWS - 1) / HX_PREFILL_ROWS;
    }
    return n;
}

/* Each pass has brought all experts that live in no slot, and nothing twice. */
static void expect_bytes(hx_engine *e, uint64_t bytes)
{
    const hx_store *s = e->model->store;
    int64_t away = n_all;

    assert_true(hx_lend_is_on(s));
    for (int32_t i = 0; i < s->clock.n_slot; i++)
        away -= s->clock.tenant[i] >= 0;
    assert_int_equal(bytes, (uint64_t)(passes(e) * away) * s->record_bytes);
}

/* Layers come in so many parts, and chunks are as long as that leaves memory for. */
static void cut(hx_engine *e, int64_t n_part, int64_t n_place)
{
    hx_costs *c = &e->costs;

    hx_store_cut(e->model->store, n_part, n_place);
    while (hx_graph_room(e->prefill, c->n_block * HX_PAGE) >
           hx_store_lendable(e->model->store, n_part, n_place))
        c->n_block--;
}

/* Chunks of 256 rows and of more, experts in place or brought, whole layers or parts of
 * them: the same logits. */
static void test_same_bits(void **state)
{
    const struct {
        int64_t slots, n_part, n_place; /* 0: as is best */
        bool lent, longer;
    } ways[] = {
        { 2, 0, 0, false, false },           { n_all / 20, 0, 0, true, false },
        { n_all * 3 / 4, 0, 0, true, true }, { n_all - 8, 1, 2, true, true },
        { n_all - 1, 2, 3, true, true },     { n_all - 1, 3, 2, true, true },
        { n_all - 1, 8, 9, true, true },
    };
    float *want, *got;
    hx_engine *e;
    hx_info info;

    (void)state;
    open_part(&e, 0);
    hx_get_info(e, &info);
    want = hx_new(float, N_OUT *(int64_t)info.n_vocab);
    got = hx_new(float, N_OUT *(int64_t)info.n_vocab);
    logits_of(e, want);
    hx_close(e);
    for (size_t i = 0; i < HX_LEN(ways); i++) {
        open_part(&e, ways[i].slots);
        hx_store *s = e->model->store;

        assert_non_null(s);
        if (ways[i].n_part > 0)
            cut(e, ways[i].n_part, ways[i].n_place);
        print_message(
            "           %2lld slots: chunks of %lld rows, %lld places for %lld experts\n",
            (long long)ways[i].slots, (long long)e->costs.n_block * HX_PAGE,
            (long long)(s->lend != NULL ? s->lend->n_stage : 0),
            (long long)(s->lend != NULL ? s->lend->n_in_part : 0));
        assert_int_equal(s->lend != NULL, ways[i].lent);
        const bool longer = e->costs.n_block * HX_PAGE > HX_PREFILL_ROWS;
        if (!gpu)
            assert_int_equal(longer, ways[i].longer);
        else /* its windows take less: a few slots may do */
            assert_true(longer || !ways[i].longer);
        for (int round = 0; round < 2; round++) {
            const uint64_t before = s->stats.stage_bytes;

            logits_of(e, got);
            assert_memory_equal(want, got, (size_t)info.n_vocab * N_OUT * sizeof(float));
            if (s->lend != NULL)
                expect_bytes(e, s->stats.stage_bytes - before);
        }
        hx_close(e);
    }
    hx_free(want);
    hx_free(got);
}

/* Costs that make the scheduler take the longest chunk beside decode, one layer a slice. */
static void pretend_costs(hx_engine *e)
{
    for (int64_t i = 0; i < e->costs.n_layer * e->costs.n_block; i++)
        e->costs.layer[i] = CLOCK_US;
    for (int i = 1; i <= HX_SPAN_MAX; i++)
        e->costs.step[i] = e->costs.alone[i] = CLOCK_US;
}

static void test_beside(void **state)
{
    enum { N_NEW = 120 };
    int32_t want[2][N_NEW], got[2][N_NEW], was[MOST];
    hx_stream *s[2];
    hx_event ev[2] = { { 0 } };
    hx_experts before, after;
    hx_engine *e;
    int first, n, back = 0, lived = 0;

    (void)state;
    open_part(&e, 0); /* by themselves, without a store */
    for (int i = 0; i < 2; i++) {
        s[i] = ask(e, i == 0 ? 20 : N_ROW, N_NEW);
        assert_int_equal(read_some(s[i], want[i], N_NEW, &ev[i]), N_NEW);
        hx_stream_free(s[i]);
    }
    hx_close(e);

    open_part(&e, n_all - 1);
    pretend_costs(e);
    const int32_t n_slot = e->model->store->n_all_slot;
    memcpy(was, e->model->store->clock.tenant, (size_t)n_slot * sizeof *was);
    s[0] = ask(e, 20, N_NEW);
    first = read_some(s[0], got[0], 8, &ev[0]);
    hx_get_experts(e, &before);
    s[1] = ask(e, N_ROW, N_NEW);
    n = read_some(s[1], got[1], 1, &ev[1]);
    hx_get_experts(e, &after);
    print_message("           %lld decode steps beside the prompt\n",
                  (long long)(after.steps - before.steps));
    /* Three chunks of 8 layers, at first each a slice. */
    assert_true(after.stage_bytes > 0 && after.steps - before.steps >= 6);
    assert_int_equal(first + read_some(s[0], got[0] + first, N_NEW - first, &ev[0]),
                     N_NEW);
    assert_int_equal(n + read_some(s[1], got[1] + n, N_NEW - n, &ev[1]), N_NEW);
    assert_memory_equal(want, got, sizeof want);
    for (int i = 0; i < 2; i++)
        while (ev[i].kind != HX_EV_DONE)
            assert_int_equal(hx_next(s[i], &ev[i], 60000), 1);
    expect_whole(e);
    for (int32_t i = 0; i < n_slot; i++) {
        lived += was[i] >= 0;
        back += was[i] >= 0 && e->model->store->clock.slot[was[i]] >= 0;
    }
    print_message("           %d of %d who lived in slots before live there again\n",
                  back, lived);
    assert_true(back >= lived - (n_all - n_slot)); /* newcomers push out no more */
    for (int i = 0; i < 2; i++)
        hx_stream_free(s[i]);
    hx_close(e);
}

/* Who is picked most keeps living in a slot when others are lent, his record with him. */
static void test_hottest(void **state)
{
    const int32_t n_slot = n_all / 2, first = n_slot - 2 * n_all / 5;
    int32_t at[MOST], token[30];
    hx_event ev = { 0 };
    hx_err err = { 0 };
    hx_engine *e;

    (void)state;
    open_part(&e, n_slot + HX_AHEAD_SLOTS);
    hx_stream *s = ask(e, 20, 30); /* whoever was on the way at first is there */
    assert_int_equal(read_some(s, token, 30, &ev), 30);
    while (ev.kind != HX_EV_DONE)
        assert_int_equal(hx_next(s, &ev, 60000), 1);
    hx_stream_free(s);
    hx_store *st = e->model->store;
    hx_clock *c = &st->clock;
    assert_true(c->n_item <= MOST);
    uint8_t *record = hx_new(uint8_t, (int64_t)st->record_bytes);
    int stay = 0, room = 0, back = 0;

    assert_int_equal(c->n_slot, n_slot);
    assert_true(first >= 4);
    for (int32_t i = 0; i < n_slot; i++) {
        assert_true(c->tenant[i] >= 0); /* every third of both kinds, the last of all */
        c->heat[c->tenant[i]] = i == n_slot - 1 ? 200
                                : i % 3 == 0    ? 100
                                                : (uint8_t)(i % 5);
    }
    for (int32_t i = 0; i < n_slot; i++) { /* who is coming neither moves nor makes way */
        stay += c->heat[c->tenant[i]] >= 100 && !hx_store_is_coming(st, i);
        room += i < first && !hx_store_is_coming(st, i);
    }
    stay = HX_MIN(stay, room);
    assert_int_equal(lend_from(st, first, &err), 0);
    assert_int_equal(c->n_slot, first);
    assert_int_equal(
        hx_dev_get(st->dev, at, st->resident, sizeof *at * (size_t)c->n_item, &err), 0);
    for (int64_t i = 0; i < c->n_item; i++) {
        assert_true(c->slot[i] < first);
        if (c->slot[i] >= 0 && hx_store_is_coming(st, c->slot[i]))
            continue;
        assert_int_equal(at[i], c->slot[i]);
        if (c->slot[i] < 0)
            continue;
        assert_int_equal(c->tenant[c->slot[i]], i);
        back += c->heat[i] >= 100;
        assert_int_equal(hx_dev_get(st->dev, record, hx_store_slot(st, c->slot[i]),
                                    st->record_bytes, &err),
                         0);
        assert_memory_equal(record, st->home[i], st->record_bytes);
    }
    print_message("           %d of those picked most live in %d slots\n", back, first);
    assert_int_equal(back, stay);
    hx_free(record);
    hx_close(e);
}

/* Those that the prompt picked most have the slots that it gives back. */
static void test_prompts_own(void **state)
{
    const int32_t n_slot = n_all / 2;
    int32_t token[4];
    hx_event ev = { 0 };
    hx_engine *e;

    (void)state;
    open_part(&e, n_slot + HX_AHEAD_SLOTS);
    hx_stream *s = ask(e, N_ROW, 4);
    assert_int_equal(read_some(s, token, 4, &ev), 4);
    while (ev.kind != HX_EV_DONE)
        assert_int_equal(hx_next(s, &ev, 60000), 1);
    expect_whole(e);
    const hx_clock *c = &e->model->store->clock;
    const struct hx_lend *l = e->model->store->lend;
    const int32_t lent = (int32_t)(l->n_stage * l->n_in_part);
    int hot = 0, coldest = 255;

    assert_int_equal(c->n_slot, n_slot);
    for (int32_t i = 0; i < lent; i++)
        coldest = HX_MIN(coldest, c->heat[c->tenant[n_slot - lent + i]]);
    for (int64_t i = 0; i < c->n_item; i++)
        hot = c->slot[i] < 0 ? HX_MAX(hot, c->heat[i]) : hot;
    print_message(
        "           picked at least %d times in lent slots, at most %d outside\n",
        coldest, hot);
    assert_true(coldest > 3 && coldest >= hot - 3); /* the picks of three steps */
    hx_stream_free(s);
    hx_close(e);
}

/* Cancelled before, in the middle of, and after chunks. */
static void test_cancel(void **state)
{
    int32_t want[20], got[20];
    hx_event ev = { 0 };
    hx_engine *e;
    hx_stream *s;

    (void)state;
    open_part(&e, n_all - 1);
    s = ask(e, 20, 20);
    assert_int_equal(read_some(s, want, 20, &ev), 20);
    hx_stream_free(s);
    for (int i = 0; i < 12; i++) {
        const int64_t until = hx_now_us() + 15000 * i;

        s = ask(e, N_ROW, 20);
        while (hx_now_us() < until)
            hx_next(s, &ev, 1);
        hx_cancel(s);
        while (ev.kind != HX_EV_DONE)
            assert_int_equal(hx_next(s, &ev, 60000), 1);
        hx_stream_free(s);
        ev = (hx_event) { 0 };
        s = ask(e, 20, 20);
        assert_int_equal(read_some(s, got, 20, &ev), 20);
        assert_memory_equal(want, got, sizeof want);
        while (ev.kind != HX_EV_DONE)
            assert_int_equal(hx_next(s, &ev, 60000), 1);
        hx_stream_free(s);
        ev = (hx_event) { 0 };
        expect_whole(e);
    }
    hx_close(e);
}

/* --gpu: the same on a GPU; a synthetic model's decode picks are drawn, its prompts' are
 * not, so nothing is compared beside others there. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_beside),
        cmocka_unit_test(test_hottest),   cmocka_unit_test(test_prompts_own),
        cmocka_unit_test(test_cancel),
    };
    const struct CMUnitTest real[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_hottest),
        cmocka_unit_test(test_cancel),
    };

    if (argc < 2 || strcmp(argv[1], "--gpu") != 0)
        return cmocka_run_group_tests_name("lend", tests, NULL, NULL);
    gpu = true;
    device = "cuda";
    model = "synthetic:glm-5.3-flash,layers=8,experts=32";
    n_all = 160;
    return cmocka_run_group_tests_name("lend", real, NULL, NULL);
}
