/* store_test.c - where an expert runs is never visible: logits of the demo model through
 * the expert store, with each lane forced and mixed, with slots for none to most of the
 * experts, cold and warm, alone and beside others, equal those of the model without a store
 * bit for bit; so do rows of random experts of the real shapes, on every instruction set. A
 * lane that does not answer is an error, and the next request is fine. And what the store
 * counts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <unistd.h>

#include "dev/cpu.h"
#include "dev/lane.c"
#include "engine/engine.h"
#include "hoist.h"

#define MODEL "models/demo-exl3"
#define LARGE                                                                            \
    "synthetic:glm-5.3-flash,layers=6,experts=96" /* the real shapes, for a GPU */

enum { N_NEW = 24, N_STREAM = 3, N_TOP = 8 };

static const char *const prompts[N_STREAM] = {
    "[gMASK]<sop><|user|>What is the capital of ", "The sheep went over", "1 2 3 4 5 6"
};

typedef struct {
    int32_t token[N_NEW];
    float logprob[N_NEW];
    hx_choice top[N_NEW][N_TOP];
} answer;

static hx_expert_use used; /* by the answer read last */

static void read_answer(hx_stream *s, answer *out)
{
    hx_event ev = { 0 };
    int n = 0;

    while (ev.kind != HX_EV_DONE) {
        assert_int_equal(hx_next(s, &ev, 60000), 1);
        if (ev.kind == HX_EV_ERROR)
            fail_msg("%s", ev.err.msg);
        for (int i = 0; i < ev.n_tokens && n < N_NEW; i++, n++) {
            out->token[n] = ev.tokens[i];
            out->logprob[n] = ev.logprob[i];
            memcpy(out->top[n], ev.top + i * N_TOP, sizeof out->top[n]);
        }
    }
    assert_int_equal(n, N_NEW);
    used = ev.experts;
    hx_stream_free(s);
}

static const char *model = MODEL;

static hx_stream *ask_for(hx_engine *e, int which, int64_t n_new)
{
    int32_t ids[64];
    hx_stream *s;
    hx_err err;
    const hx_str text = { prompts[which], strlen(prompts[which]) };
    int64_t n = strcmp(model, MODEL) == 0 ? hx_tokenize(e, text, true, ids, 64) : 0;

    for (; n < 4; n++) /* has no tokenizer */
        ids[n] = (int32_t)(1000 + 777 * which + 31 * n);
    const hx_request r = { .tokens = ids,
                           .n_tokens = n,
                           .max_new = n_new,
                           .temperature = 0.8f,
                           .seed = 11,
                           .ignore_eos = true,
                           .want_logprobs = true,
                           .n_top = N_TOP };

    if (hx_submit(e, &r, &s, &err) != 0)
        fail_msg("%s", err.msg);
    return s;
}

static hx_stream *ask(hx_engine *e, int which)
{
    return ask_for(e, which, N_NEW);
}

/* Two rounds: each prompt by itself, then all at once. */
static void answers(hx_engine *e, answer *out)
{
    hx_stream *s[N_STREAM];

    memset(out, 0, 2 * N_STREAM * sizeof *out);
    for (int i = 0; i < N_STREAM; i++)
        read_answer(ask(e, i), &out[i]);
    for (int i = 0; i < N_STREAM; i++)
        s[i] = ask(e, i);
    for (int i = 0; i < N_STREAM; i++)
        read_answer(s[i], &out[N_STREAM + i]);
}

static bool gpu;        /* else the CPU, with an arena that stands for GPU memory */
static uint64_t beside; /* of its memory, taken before any expert */

static const char *device(void)
{
    return gpu ? "cuda" : "cpu";
}

static hx_engine *open_with(const hx_options *opt)
{
    hx_options o = *opt;
    hx_engine *e;
    hx_err err;

    o.device = device();
    if (o.vram_bytes != 0)
        o.vram_bytes += beside;
    if (gpu)
        o.cpu_isa = NULL;
    o.model_dir = model;
    o.prefix =
        HX_PREFIX_OFF; /* a GPU's decode and prefill states differ in the last bits */
    o.ctx_tokens = 1024;
    o.cache_bytes = 1 << 30; /* the same beside few slots and many */
    if (o.n_threads == 0 && !gpu)
        o.n_threads = 2;
    if (hx_open(&e, &o, &err) != 0)
        fail_msg("%s", err.msg);
    if (opt->vram_bytes != 0) /* as where the device works on its own */
        e->run_ahead = true;
    return e;
}

static void measure_beside(const hx_options *opt)
{
    hx_options all = *opt;
    hx_info info;

    all.vram_bytes = 0;
    hx_engine *e = open_with(&all);
    hx_get_info(e, &info);
    hx_close(e);
    beside = gpu ? info.device_bytes : 0;
}

typedef struct {
    const char *name;
    hx_options opt;
    hx_side only; /* that runs what is not resident; HERE: both do where costs are given,
                   * either where they are measured */
} way;

/* Scrapers read the same numbers. */
static void check_metrics(hx_engine *e)
{
    static char text[1 << 20];
    hx_experts x, after;

    do { /* the last step may just be over */
        hx_get_experts(e, &x);
        assert_in_range(hx_metrics(e, text, sizeof text - 1), 1000, sizeof text - 1);
        hx_get_experts(e, &after);
    } while (memcmp(&x, &after, sizeof x) != 0);
    const struct {
        const char *name;
        uint64_t v;
    } want[] = {
        { "link_bytes", (uint64_t)x.link * x.expert_bytes },
        { "lane_bytes", (uint64_t)x.lane * x.expert_bytes },
        { "push_bytes", x.push_bytes },
        { "wait_us", (uint64_t)x.wait_us },
    };
    for (size_t i = 0; i < HX_LEN(want); i++) {
        char line[100];

        snprintf(line, sizeof line, "\nhoist_experts_%s_total %llu\n", want[i].name,
                 (unsigned long long)want[i].v);
        if (strstr(text, line) == NULL)
            fail_msg("no line \"%s\"", line + 1);
    }
}

/* One way's answers against those wanted. */
static void try_way(const way *w, const answer want[2 * N_STREAM])
{
    answer got[2 * N_STREAM];
    hx_engine *e = open_with(&w->opt);
    const bool given = w->opt.expert_us[0] > 0;
    hx_experts x;

    answers(e, got);
    hx_get_experts(e, &x);
    /* Of the last request: no more than of all, something, and no waiting without a lane. */
    assert_true(used.here <= x.here && used.link <= x.link && used.lane <= x.lane &&
                used.ahead <= x.ahead && used.wait_us <= x.wait_us);
    assert_true(used.here + used.link + used.lane + used.ahead >= N_NEW - 1);
    assert_true(used.wait_us == 0 || x.lane > 0);
    check_metrics(e);
    hx_close(e);
    print_message("           %-31s %3d of %d slots, steps %lld: %lld here, %lld link, "
                  "%lld lane, %lld ahead, %lld moved in\n",
                  w->name, x.n_slot, x.n_expert, (long long)x.steps, (long long)x.here,
                  (long long)x.link, (long long)x.lane, (long long)x.ahead,
                  (long long)x.pushed);
    if (memcmp(want, got, sizeof got) != 0)
        fail_msg("%s: another answer", w->name);
    assert_true(x.steps >= 3 * (N_NEW - 1) + N_NEW - 1);
    assert_true(x.here + x.link + x.lane + x.ahead <= x.picks);
    assert_true(x.ahead <= x.predicted_right && x.predicted_right <= x.predicted);
    assert_true((x.predicted > 0) == (x.n_slot >= 3 * HX_AHEAD_SLOTS));
    assert_true((x.ahead > 0) == (x.predicted > 0));
    assert_true(!given || w->only == HX_SIDE_LINK || x.lane > 0);
    assert_true(!given || w->only == HX_SIDE_LANE || x.link > 0);
    assert_true(w->only != HX_SIDE_LINK || x.lane == 0);
    assert_true(w->only != HX_SIDE_LANE || x.link == 0);
    assert_true((x.n_slot > 0) == (x.here > 0));
    assert_true((x.host_gbs > 0) == (!given && gpu && x.n_slot > 1));
    assert_true((x.copy_gbs > 0) == (x.host_gbs > 0));
    /* a row more is never free; where it seemed to be, plans for several streams gave the
     * lane too much (many CPUs take a few microseconds for the demo's experts, which the clock
     * may not tell from nothing) */
    assert_true(given || w->only == HX_SIDE_LINK ||
                (x.us[2] > 0 && (x.us[3] > 0 || x.expert_bytes < 1 << 20)));
}

/* All ways against a model whose experts are all where they are computed with. */
static void try_ways(const way *w, size_t n)
{
    answer want[2 * N_STREAM];
    hx_engine *e;

    measure_beside(&(hx_options) { 0 });
    e = open_with(&(hx_options) { 0 });
    answers(e, want);
    hx_close(e);
    for (int i = 0; i < N_STREAM; i++)
        assert_memory_equal(&want[i], &want[N_STREAM + i], sizeof *want);
    for (size_t i = 0; i < n; i++)
        try_way(&w[i], want);
}

static void test_tiers(void **state)
{
    static const way ways[] = {
        { "no slot, all over the link",
          { .vram_bytes = 1, .expert_us = { 1, 1, 0, 0, 0 } },
          HX_SIDE_LINK },
        { "no slot, all on the lane",
          { .vram_bytes = 1, .expert_us = { 1, 1e6f, 1, 0, 0 } },
          HX_SIDE_LANE },
        { "no slot, shared out",
          { .vram_bytes = 1, .expert_us = { 1, 10, 10, 1, 0 } },
          HX_SIDE_HERE },
        { "some slots, shared out",
          { .vram_bytes = 400000, .expert_us = { 1, 10, 12, 4, 5 } },
          HX_SIDE_HERE },
        { "some slots, gpu-only",
          { .vram_bytes = 400000, .mode = "gpu-only" },
          HX_SIDE_LINK },
        { "some slots, measured", { .vram_bytes = 400000 }, HX_SIDE_HERE },
        { "most slots, all on the lane",
          { .vram_bytes = 1000000, .expert_us = { 1, 1e6f, 1, 0, 0 } },
          HX_SIDE_LANE },
        { "most slots, shared out",
          { .vram_bytes = 1000000, .expert_us = { 1, 10, 12, 4, 5 } },
          HX_SIDE_HERE },
        { "most slots, gpu-only",
          { .vram_bytes = 1000000, .mode = "gpu-only" },
          HX_SIDE_LINK },
        { "scalar, lane too",
          { .vram_bytes = 400000, .cpu_isa = "scalar", .expert_us = { 1, 10, 10, 1, 0 } },
          HX_SIDE_HERE },
    };

    (void)state;
    try_ways(ways, HX_LEN(ways));
}

/* The same where experts take long enough for a fetch to be at work when plan comes, and
 * beside it lane and reads in place. */
static void test_large(void **state)
{
    enum { VRAM = 600 << 20 };
    static const way ways[] = {
        { "measured", { .vram_bytes = VRAM }, HX_SIDE_HERE },
        { "gpu-only", { .vram_bytes = VRAM, .mode = "gpu-only" }, HX_SIDE_LINK },
        { "all on the lane",
          { .vram_bytes = VRAM, .expert_us = { 1, 1e6f, 1, 0, 0 } },
          HX_SIDE_LANE },
    };

    (void)state;
    model = LARGE;
    try_ways(ways, HX_LEN(ways));
    model = MODEL;
}

/* Resident bytes of the checkpoint's mapping. */
static size_t mapped_bytes(void)
{
    FILE *f = fopen("/proc/self/smaps", "r");
    char line[512];
    size_t kb = 0, n;
    bool in = false;

    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        if (strchr(line, '-') != NULL && strchr(line, '-') < line + 17)
            in = strstr(line, MODEL "/model.safetensors") != NULL;
        if (in && sscanf(line, "Rss: %zu", &n) == 1)
            kb += n;
    }
    fclose(f);
    return kb << 10;
}

/* There is one copy of an expert: the checkpoint's is given back (here but for pages that it
 * shares with what lies beside it, for these matrices are of a few pages). */
static void test_one_copy(void **state)
{
    hx_engine *e;
    hx_experts x;

    (void)state;
    if (gpu) /* which would have all of them */
        return;
    e = open_with(&(hx_options) { 0 });
    const size_t before = mapped_bytes();
    hx_close(e);
    e = open_with(&(hx_options) { .vram_bytes = 1, .mode = "gpu-only" });
    hx_get_experts(e, &x);
    const size_t after = mapped_bytes(), moved = (size_t)x.n_expert * x.expert_bytes;
    hx_close(e);
    print_message("           %zu KB of the file in memory, with a copy of %zu KB of it "
                  "%zu\n",
                  before >> 10, moved >> 10, after >> 10);
    assert_true(before > moved);
    assert_true(after < before - moved / 2);
}

/* Wishes that cannot be met are refused with both numbers. */
static void test_refusals(void **state)
{
    const struct {
        hx_options opt;
        int code;
        const char *words;
    } bad[] = {
        { { .vram_bytes = 1, .ram_bytes = 1000 }, HX_ENOMEM, "raise --ram" },
        { { .vram_bytes = 1, .mode = "cpu" }, HX_EARG, "auto and gpu-only" },
        { { .mode = "gpu-only" }, HX_EARG, "has no GPU" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        hx_options o = bad[i].opt;
        hx_engine *e;
        hx_err err;

        o.model_dir = MODEL;
        o.device = "cpu";
        o.ctx_tokens = 256;
        assert_int_equal(hx_open(&e, &o, &err), bad[i].code);
        assert_non_null(strstr(err.msg, bad[i].words));
    }
}

/* ---- the lane by itself -------------------------------------------------- */

/* n bytes on the device, as from has them. */
static hx_buf on(hx_dev *dev, const void *from, size_t n)
{
    hx_buf b;
    hx_err err;

    if (hx_dev_alloc(dev, &b, n, &err) != 0 || hx_dev_put(dev, b, from, n, &err) != 0)
        fail_msg("%s", err.msg);
    return b;
}

static int32_t value_of(hx_dev *dev, hx_buf b)
{
    int32_t v = 0;
    hx_err err;

    assert_int_equal(hx_dev_get(dev, &v, b, sizeof v, &err), 0);
    return v;
}

/* A job that is not answered in time is an error, so is the next one, and the one after
 * them, which is, is fine. */
static void test_deadline(void **state)
{
    enum { D = 512, F = 512, E = 2 };
    hx_dev_opt opt_dev = { .name = "cpu",
                           .n_threads = 1,
                           .limits = { .max_rows = 1,
                                       .max_k = D,
                                       .max_n = D,
                                       .max_active = 1,
                                       .max_expert = E } };
    float *w = hx_new(float, D *F);
    const float x[D] = { 1 }, none[D] = { 0 }, one = 1;
    const hx_mat m = { .fmt = HX_FMT_F32, .n = F, .k = D, .w = w };
    const hx_expert layer[E] = { { m, m, m }, { m, m, m } }, *layers[] = { layer };
    const int32_t id = 1, resident[E] = { -1, -1 };
    hx_lane_opt opt = { .expert = layers,
                        .n_layer = 1,
                        .n_expert = E,
                        .active = 1,
                        .max_rows = 1,
                        .dim = D };
    hx_lane *lane;
    hx_dev *dev;
    hx_err err;

    (void)state;
    assert_int_equal(hx_dev_open(&opt.cpu, &opt_dev, &err), 0);
    opt_dev.name = device();
    assert_int_equal(hx_dev_open(&dev, &opt_dev, &err), 0);
    opt.dev = dev;
    assert_int_equal(hx_lane_open(&lane, &opt, &err), 0);
    const hx_plan_args plan = { .here = on(dev, &id, sizeof id),
                                .there = on(dev, &id, sizeof id),
                                .log = on(dev, &id, sizeof id),
                                .id = on(dev, &id, sizeof id),
                                .x = on(dev, x, sizeof x),
                                .resident = on(dev, resident, sizeof resident),
                                .lane = lane,
                                .rows = 1,
                                .active = 1,
                                .n_expert = E,
                                .dim = D,
                                .rates = { 1, 1e6f, 1, 0, 0 } };
    const hx_combine_args combine = { .y = on(dev, none, sizeof none),
                                      .base = on(dev, none, sizeof none),
                                      .part = on(dev, none, sizeof none),
                                      .weight = on(dev, &one, sizeof one),
                                      .there = plan.there,
                                      .lane = lane,
                                      .rows = 1,
                                      .active = 1,
                                      .dim = D };

    for (int job = 0; job < 4; job++) {
        const bool late = job < 2;

        lane->deadline_us = late ? 1 : 5000000;
        if (job == 2)
            hx_lane_awake(lane);
        assert_int_equal(hx_op_plan(dev, &plan, &err), 0);
        assert_int_equal(value_of(dev, plan.here), -1);
        assert_int_equal(value_of(dev, plan.there), 1);
        assert_int_equal(value_of(dev, plan.log), 1 | HX_SIDE_LANE << 24);
        assert_int_equal(hx_op_combine(dev, &combine, &err), 0);
        assert_int_equal(value_of(dev, combine.y), 0);
        assert_int_equal(hx_lane_late(lane, &err), late ? HX_EDEVICE : 0);
        if (late)
            assert_non_null(strstr(err.msg, "no answer within"));
        assert_int_equal(hx_lane_late(lane, &err), 0);
    }
    hx_buf all[] = {
        plan.here,     plan.there, plan.log,     plan.id,      plan.x,
        plan.resident, combine.y,  combine.base, combine.part, combine.weight
    };
    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_dev_free(dev, &all[i]);
    hx_lane_close(lane);
    hx_dev_close(dev);
    hx_free(w);
}

/* ---- a lane in trouble ------------------------------------------------------ */

enum { DEADLINE_MS = 1000 };

/* What a job with two rows meets next. */
static struct {
    _Atomic int what;
    _Atomic bool held, changed; /* a job's picks, by the next one */
    hx_dev_ops ops;
    int (*moe)(hx_dev *d, const hx_moe_args *a, hx_err *err);
} trouble;

enum { NO_TROUBLE, LATE, HELD, BROKEN };

static int troubled_moe(hx_dev *d, const hx_moe_args *a, hx_err *err)
{
    const int what = a->rows == 2 ? atomic_exchange(&trouble.what, NO_TROUBLE) : 0;
    int32_t id[64];

    if (a->id.n <= sizeof id)
        memcpy(id, a->id.p, a->id.n);
    if (what == LATE)
        usleep(1250 * DEADLINE_MS);
    while (what == HELD && atomic_load(&trouble.held))
        usleep(1000);
    if (a->id.n > sizeof id || memcmp(id, a->id.p, a->id.n) != 0)
        atomic_store(&trouble.changed, true);
    return what == BROKEN ? hx_fail(err, HX_EDEVICE, "out of order")
                          : trouble.moe(d, a, err);
}

static void expect_error(hx_stream *s, const char *words)
{
    hx_event ev = { 0 };

    while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR)
        assert_int_equal(hx_next(s, &ev, 60000), 1);
    assert_int_equal(ev.kind, HX_EV_ERROR);
    assert_int_equal(ev.err.code, HX_EDEVICE);
    if (strstr(ev.err.msg, words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", ev.err.msg, words);
    hx_stream_free(s);
}

/* A lane that answers late, or not, or has failed, ends those of that step with an error;
 * who waits meanwhile has the answer that he always has. */
static void test_trouble(void **state)
{
    static const struct {
        int what;
        const char *words;
    } cases[] = {
        { LATE,
          "cpu lane: no answer within 1.0 s; the CPUs are busy with something else: "
          "give it fewer with --threads, or use --mode gpu-only" },
        { HELD, "cpu lane: no answer within 1.0 s" },
        { BROKEN, "cpu lane: out of order" },
    };
    const hx_options opt = { .vram_bytes = 1,
                             .max_streams = 2,
                             .no_canary = true,
                             .expert_us = { 1, 1e6f, 1, 0, 0 } };
    answer want, got;
    hx_engine *e;

    (void)state;
    measure_beside(&opt);
    e = open_with(&opt);
    hx_lane *lane = e->model->store->lane;
    lane->deadline_us = 1000 * DEADLINE_MS; /* before a step is recorded */
    read_answer(ask(e, 2), &want);
    trouble.ops = *lane->host->cpu->ops;
    trouble.moe = trouble.ops.moe;
    trouble.ops.moe = troubled_moe;
    lane->host->cpu->ops = &trouble.ops;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        atomic_store(&trouble.held, true);
        atomic_store(&trouble.what, cases[i].what);
        hx_stream *a = ask_for(e, 0, 900), *b = ask_for(e, 1, 900), *next = ask(e, 2);

        expect_error(a, cases[i].words);
        expect_error(b, cases[i].words);
        assert_int_equal(atomic_load(&trouble.what), NO_TROUBLE);
        atomic_store(&trouble.held, false);
        read_answer(next, &got);
        assert_memory_equal(&got, &want, sizeof want);
    }
    assert_false(atomic_load(&trouble.changed));
    hx_close(e);
}

/* ---- random experts of the real shapes ---------------------------------------- */

enum { R_DIM = 4096, R_WIDTH = 2048, R_EXPERT = 6, R_ACTIVE = 3, R_ROWS = 16 };

/* One layer of them, and rows with their picks. */
typedef struct {
    hx_model m;
    hx_layer layer;
    hx_expert expert[R_EXPERT];
    uint8_t *bytes;
    float x[R_ROWS][R_DIM], weight[R_ROWS][R_ACTIVE], want[R_ROWS][R_DIM];
    int32_t id[R_ROWS][R_ACTIVE];
} experts;

/* Random signs of numbers of size v, in half precision. */
static void *random_signs(uint8_t *p, int64_t n, uint16_t v, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        const uint16_t half = (uint16_t)(v | (hx_rng_at(seed, (uint64_t)i) & 0x8000));

        memcpy(p + 2 * i, &half, sizeof half);
    }
    return p;
}

/* Every bit pattern is a valid trellis. */
static hx_mat random_mat(uint8_t **at, int64_t n, int64_t k, int32_t k2, hx_codebook cb)
{
    static uint64_t seed;
    const size_t bytes = (size_t)(n * k) / 16 * (size_t)k2;
    uint8_t *w = *at;

    seed++;
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t v = hx_rng_at(seed, i);

        memcpy(w + i, &v, sizeof v);
    }
    *at += bytes + 2 * (size_t)(k + n);
    return (hx_mat) { .fmt = HX_FMT_EXL3,
                      .n = n,
                      .k = k,
                      .n_pad = n,
                      .k_pad = k,
                      .k2 = k2,
                      .codebook = cb,
                      .w = w,
                      .suh = random_signs(w + bytes, k, 0x3C00, seed + 1000), /* 1 */
                      .svh = random_signs(w + bytes + 2 * k, n, 0x2400,       /* 2^-6 */
                                          seed + 2000) };
}

/* What the row gives alone, on the best instruction set that this CPU has. */
static void alone(const experts *r, int i, float want[R_DIM])
{
    const hx_dev_opt opt = { .name = "cpu",
                             .n_threads = 2,
                             .limits = { .max_rows = 1,
                                         .max_k = R_DIM,
                                         .max_n = R_DIM,
                                         .max_active = R_ACTIVE,
                                         .max_expert = R_EXPERT } };
    float part[R_ACTIVE][R_DIM];
    const hx_moe_args moe = { .y = { part, sizeof part },
                              .x = { (void *)(uintptr_t)r->x[i], sizeof r->x[i] },
                              .id = { (void *)(uintptr_t)r->id[i], sizeof r->id[i] },
                              .expert = r->expert,
                              .n_expert = R_EXPERT,
                              .rows = 1,
                              .active = R_ACTIVE,
                              .limit = 10 };
    hx_dev *dev;
    hx_err err;

    assert_int_equal(hx_dev_open(&dev, &opt, &err), 0);
    assert_int_equal(hx_op_moe(dev, &moe, &err), 0);
    for (int d = 0; d < R_DIM; d++) {
        want[d] = 0;
        for (int a = 0; a < R_ACTIVE; a++)
            want[d] = fmaf(r->weight[i][a], part[a][d], want[d]);
    }
    hx_dev_close(dev);
}

static experts *make_random(int32_t k2, hx_codebook cb)
{
    experts *r = hx_calloc(1, sizeof *r);
    uint8_t *at;

    assert_non_null(r);
    r->m.desc = (hx_desc) { .n_layer = 1,
                            .width = R_DIM,
                            .expert_width = R_WIDTH,
                            .n_expert = R_EXPERT,
                            .n_active = R_ACTIVE,
                            .swiglu_limit = 10 };
    r->m.layer = &r->layer;
    r->layer = (hx_layer) { .ffn = HX_FFN_MOE, .expert = r->expert };
    r->bytes = at =
        hx_alloc((size_t)(3 * R_EXPERT) *
                 ((size_t)R_DIM * R_WIDTH / 16 * (size_t)k2 + 2 * (R_DIM + R_WIDTH)));
    assert_non_null(at);
    for (int e = 0; e < R_EXPERT; e++) {
        r->expert[e].gate = random_mat(&at, R_WIDTH, R_DIM, k2, cb);
        r->expert[e].up = random_mat(&at, R_WIDTH, R_DIM, k2, cb);
        r->expert[e].down = random_mat(&at, R_DIM, R_WIDTH, k2, cb);
    }
    for (int i = 0; i < R_ROWS; i++) {
        for (int d = 0; d < R_DIM; d++)
            r->x[i][d] = (float)hx_rng_normal(7, (uint64_t)(i * R_DIM + d));
        for (int a = 0; a < R_ACTIVE; a++) { /* the first has every row */
            r->id[i][a] = a == 0 ? 0 : 1 + (i + 2 * a) % (R_EXPERT - 1);
            r->weight[i][a] = 0.3f + 0.1f * (float)a;
        }
    }
    for (int i = 0; i < R_ROWS; i++)
        alone(r, i, r->want[i]);
    return r;
}

/* Who computes: the device, and the lane beside it. */
typedef struct {
    const char *isa, *lane_isa;
    int32_t n_slot;
    int rows[R_ROWS + 1]; /* ended by 0 */
} random_way;

static const hx_rates sides[] = {
    { 1, 1, 0, 0, 0 }, { 1, 1e6f, 1, 0, 0 }, { 1, 10, 10, 1, 0 } /* link, lane, both */
};

#define PATIENT_US 60000000 /* half a second for an expert in plain C, if it is alone */

typedef struct {
    experts *r;
    hx_expert expert[R_EXPERT]; /* where they were */
    hx_dev *dev;
    hx_store *s;
    hx_buf x, id, weight, part, y, base;
} random_rig;

static void random_open(random_rig *g, experts *r, const random_way *w)
{
    static const float none[R_ROWS * R_ACTIVE * R_DIM];
    const hx_dev_opt opt_dev = { .name = device(),
                                 .isa = gpu ? NULL : w->isa,
                                 .n_threads = 2,
                                 .limits = { .max_rows = R_ROWS,
                                             .max_k = R_DIM,
                                             .max_n = R_DIM,
                                             .max_active = R_ACTIVE,
                                             .max_expert = R_EXPERT } };
    size_t record;
    hx_store_bytes(&r->m, &record);
    const hx_store_opt opt = { .slot_bytes = (uint64_t)w->n_slot * record,
                               .max_rows = R_ROWS,
                               .isa = w->lane_isa,
                               .n_threads = 2,
                               .rates = sides[0] };
    hx_err err;

    g->r = r;
    memcpy(g->expert, r->expert, sizeof g->expert);
    if (hx_dev_open(&g->dev, &opt_dev, &err) != 0 ||
        hx_store_open(&g->s, &r->m, g->dev, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    g->s->lane->deadline_us = PATIENT_US;
    g->x = on(g->dev, r->x, sizeof r->x);
    g->id = on(g->dev, r->id, sizeof r->id);
    g->weight = on(g->dev, r->weight, sizeof r->weight);
    g->part = on(g->dev, none, sizeof none);
    g->y = on(g->dev, none, sizeof r->want);
    g->base = on(g->dev, none, sizeof r->want);
}

static void random_close(random_rig *g)
{
    hx_buf *const all[] = { &g->x, &g->id, &g->weight, &g->part, &g->y, &g->base };

    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_dev_free(g->dev, all[i]);
    hx_store_close(g->s);
    hx_dev_close(g->dev);
    memcpy(g->r->expert, g->expert, sizeof g->expert);
}

/* Some rows as a decode step: what its end says, and if it is fine their bits. */
static int try_step(random_rig *g, int row0, int rows, hx_err *err)
{
    const size_t at = (size_t)row0, n = (size_t)rows;
    const hx_buf x = hx_buf_at(g->x, at * sizeof g->r->x[0]),
                 id = { (char *)g->id.p + at * sizeof g->r->id[0],
                        n * sizeof g->r->id[0] };
    hx_moe_args moe = { .y = g->part,
                        .x = x,
                        .expert = g->r->expert,
                        .n_expert = R_EXPERT,
                        .rows = rows,
                        .active = R_ACTIVE,
                        .limit = 10 };
    hx_combine_args combine = { .y = g->y,
                                .base = g->base,
                                .part = g->part,
                                .weight =
                                    hx_buf_at(g->weight, at * sizeof g->r->weight[0]),
                                .rows = rows,
                                .active = R_ACTIVE,
                                .dim = R_DIM };
    float *got = hx_alloc(n * sizeof g->r->want[0]);
    uint64_t ticket;
    int rc;

    hx_store_begin(g->s);
    if (hx_store_plan(g->s, 0, rows, id, x, &moe, &combine, err) != 0 ||
        hx_op_moe(g->dev, &moe, err) != 0 || hx_op_combine(g->dev, &combine, err) != 0 ||
        hx_store_sent(g->s, err) != 0 || hx_dev_mark(g->dev, &ticket, err) != 0 ||
        hx_dev_reach(g->dev, ticket, err) != 0 ||
        hx_dev_get(g->dev, got, g->y, n * sizeof g->r->want[0], err) != 0)
        fail_msg("%s", err->msg);
    rc = hx_store_end(g->s, rows, err);
    for (int i = 0; i < rows && rc == 0; i++)
        if (memcmp(got + i * R_DIM, g->r->want[row0 + i], sizeof g->r->want[0]) != 0)
            fail_msg("row %d of %d: other bits", i, rows);
    hx_free(got);
    return rc;
}

static bool lacks(const char *isa)
{
    return (strcmp(isa, "avx512") == 0 && !hx_cpu_has(HX_ISA_AVX512)) ||
           (strcmp(isa, "avx2") == 0 && !hx_cpu_has(HX_ISA_AVX2));
}

static void try_random(experts *r, const random_way *w)
{
    random_rig g;
    hx_err err;

    if (lacks(w->isa) || lacks(w->lane_isa))
        return;
    random_open(&g, r, w);
    for (int k = 0; w->rows[k] != 0; k++)
        for (size_t i = 0; i < HX_LEN(sides); i++) {
            g.s->rates = sides[i];
            if (try_step(&g, 0, w->rows[k], &err) != 0)
                fail_msg("%s", err.msg);
        }
    const hx_experts *x = &g.s->stats;
    print_message("           K = %.1f, codebook %d, %s beside %s, %d slots: %lld here, "
                  "%lld link, %lld lane\n",
                  r->expert[0].gate.k2 / 2.0, (int)r->expert[0].gate.codebook, g.dev->isa,
                  w->lane_isa, w->n_slot, (long long)x->here, (long long)x->link,
                  (long long)x->lane);
    assert_true(x->link > 0 && x->lane > 0);
    assert_int_equal(x->here > 0, w->n_slot > 0);
    random_close(&g);
}

/* A step that the lane was late for is not counted; the next one is, with its own picks. */
static void count_after_late(experts *r)
{
    random_rig g;
    hx_err err;

    random_open(&g, r, &(random_way) { NULL, NULL, 0, { 0 } });
    g.s->rates = sides[1];
    g.s->lane->deadline_us = 1;
    hx_lane_rest(g.s->lane); /* it sleeps through the step */
    assert_int_equal(try_step(&g, 0, 1, &err), HX_EDEVICE);
    hx_lane_awake(g.s->lane);
    g.s->lane->deadline_us = PATIENT_US;
    assert_int_equal(try_step(&g, 1, 1, &err), 0);
    for (int32_t e = 0; e < R_EXPERT; e++) {
        int picked = 0;

        for (int a = 0; a < R_ACTIVE; a++)
            picked += r->id[1][a] == e;
        assert_int_equal(g.s->clock.heat[e] > 0, picked);
    }
    assert_int_equal(g.s->stats.lane, R_ACTIVE);
    random_close(&g);
}

static void test_random(void **state)
{
    static const struct {
        int k2;
        hx_codebook cb;
    } kinds[] = { { 6, HX_CB_MUL1 }, { 8, HX_CB_MUL1 }, { 12, HX_CB_MUL1 },
                  { 5, HX_CB_MUL1 }, { 7, HX_CB_MUL1 }, { 6, HX_CB_MCG },
                  { 8, HX_CB_3INST } };
    static const random_way ways[] = {
        { "avx512", "avx512", 1, { 1, 5, 16 } }, /* these two of all kinds */
        { "avx2", "avx2", 1, { 1, 5, 16 } },
        { "avx512", "avx512", 2, { 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 } },
        { "avx512", "avx2", 0, { 1, 5, 16 } },
        { "avx2", "avx2", 2, { 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 } },
        { "avx2", "avx2", 0, { 1, 5, 16 } },
        { "scalar", "avx2", 2, { 2 } },
        { "avx2", "scalar", 2, { 1 } },
    };

    (void)state;
    for (size_t k = 0; k < HX_LEN(kinds); k++) {
        experts *r = make_random(kinds[k].k2, kinds[k].cb);

        for (size_t i = 0; i < (k == 0 ? HX_LEN(ways) : 2); i++)
            try_random(r, &ways[i]);
        if (k == 0)
            count_after_late(r);
        hx_free(r->bytes);
        hx_free(r);
    }
}

/* --gpu: where an expert runs is not visible on a GPU either. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiers),    cmocka_unit_test(test_one_copy),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_trouble),  cmocka_unit_test(test_random),
    };

    const struct CMUnitTest large[] = { cmocka_unit_test(test_large) };

    gpu = argc > 1 && strcmp(argv[1], "--gpu") == 0;
    if (argc > 1 && !gpu)
        cmocka_set_test_filter(argv[1]);
    const int bad = cmocka_run_group_tests_name("store", tests, NULL, NULL);
    return !gpu ? bad
                : bad + cmocka_run_group_tests_name("store, large", large, NULL, NULL);
}
