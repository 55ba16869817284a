/* reuse_test.c - kept prefixes on the demo model: every way to go on from them gives the
 * bits of an engine that keeps nothing, and computes only what is new; preemption, pins,
 * forgetting, cancels; memory and pages come back. */
#include "../../tests/golden.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/engine.h"

#define DEMO     "models/demo-exl3"
#define N_MAX    8192
#define PATIENCE 6000 /* looks, 10 ms apart */
#define DISK_IDLE_US                                                                     \
    5000000 /* IDLE_US of reuse_disk.c: what was idle so long is written */

static const char *device = "cpu";

static hx_engine *open_with(const hx_options *more)
{
    hx_options opt = more != NULL ? *more : (hx_options) { 0 };
    hx_engine *e;
    hx_err err = { 0 };

    opt.model_dir = DEMO;
    if (opt.ctx_tokens == 0)
        opt.ctx_tokens = 4096;
    opt.n_threads = 2;
    opt.device = device;
    if (hx_open(&e, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    return e;
}

typedef struct {
    int32_t token[512];
    float logprob[512];
    int32_t n;
    hx_event end;
} answer;

static void read_all(hx_stream *s, answer *a)
{
    a->n = 0;
    do {
        assert_int_equal(hx_next(s, &a->end, 120000), 1);
        for (int32_t i = 0; i < a->end.n_tokens; i++) {
            a->token[a->n] = a->end.tokens[i];
            a->logprob[a->n++] = a->end.logprob[i];
        }
    } while (a->end.kind != HX_EV_DONE && a->end.kind != HX_EV_ERROR);
    if (a->end.kind == HX_EV_ERROR)
        fail_msg("%s", a->end.err.msg);
}

static hx_stream *submit(hx_engine *e, const hx_request *r)
{
    hx_stream *s;
    hx_err err = { 0 };

    if (hx_submit(e, r, &s, &err) != 0)
        fail_msg("%s", err.msg);
    return s;
}

static void ask(hx_engine *e, const int32_t *token, int64_t n, int64_t max_new, answer *a)
{
    hx_stream *s = submit(e, &(hx_request) { .tokens = token,
                                             .n_tokens = n,
                                             .max_new = max_new,
                                             .ignore_eos = true,
                                             .temperature = 1,
                                             .seed = 5,
                                             .want_logprobs = true });

    read_all(s, a);
    hx_stream_free(s);
}

static void assert_same(const answer *a, const answer *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->token, b->token, (size_t)a->n * sizeof(int32_t));
    assert_memory_equal(a->logprob, b->logprob, (size_t)a->n * sizeof(float));
}

/* Random text with a message every so many tokens. */
static void make_text(const hx_engine *e, int32_t *token, int64_t n, uint64_t seed)
{
    const int32_t user = hx_token_id(e, HX_STR("<|user|>")),
                  assistant = hx_token_id(e, HX_STR("<|assistant|>"));

    assert_true(user > 0 && assistant > 0);
    for (int64_t i = 0; i < n; i++)
        token[i] = (int32_t)(hx_rng_at(seed, (uint64_t)i) % 4000);
    for (int64_t i = 150, k = 0; i < n; i += 130, k++)
        token[i] = k % 2 == 0 ? user : assistant;
}

/* A growing conversation, resent, edited, branched: the same bits as without anything
 * kept, and the tokens that need no computing are the ones that can be had. */
static void conversation(hx_prefix mode)
{
    const hx_options with = { .prefix = mode, .max_streams = 2, .ctx_tokens = 2048 },
                     without = { .prefix = HX_PREFIX_OFF,
                                 .max_streams = 2,
                                 .ctx_tokens = 2048 };
    hx_engine *e = open_with(&with), *cold = open_with(&without);
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1), *b = hx_new(answer, 1);
    int64_t n = 380, before = 0;

    make_text(e, t, N_MAX, 11);
    for (int turn = 0; turn < 4; turn++) {
        ask(e, t, n, 33, a);
        ask(cold, t, n, 33, b);
        assert_same(a, b);
        assert_int_equal(b->end.cached, 0);
        assert_int_equal(b->end.miss, HX_MISS_OFF);
        if (turn > 0 && mode == HX_PREFIX_REUSE)
            assert_int_equal(a->end.cached, before);
        if (turn > 0 && mode == HX_PREFIX_STRICT) /* the grid point of the last prompt */
            assert_int_equal(a->end.cached, (n - 33 - 57) / 64 * 64);
        ask(e, t, n, 33, a); /* the same once more */
        assert_same(a, b);
        assert_int_equal(a->end.cached, n);
        assert_int_equal(a->end.miss, HX_MISS_NONE);
        t[n - 20] ^= 1; /* the last message edited */
        ask(e, t, n, 33, a);
        ask(cold, t, n, 33, b);
        assert_same(a, b);
        assert_true(a->end.cached >= n - 20 - 64 - 130 && a->end.cached < n - 20);
        assert_int_equal(a->end.miss, HX_MISS_DIFFERS);
        assert_int_equal(a->end.miss_pos, n - 20);
        before = n + 32; /* all that was computed: the last token was not */
        memcpy(t + n, a->token, 33 * sizeof *t);
        n += 33 + 57;
    }
    t[3] ^= 1;
    ask(e, t, n, 5, a);
    assert_int_equal(a->end.cached, 0);
    assert_int_equal(a->end.miss_pos, 3);
    hx_close(e);
    hx_close(cold);
    hx_free(t);
    hx_free(a);
    hx_free(b);
}

static void test_conversation(void **state)
{
    (void)state;
    conversation(HX_PREFIX_REUSE);
}

static void test_conversation_strict(void **state)
{
    (void)state;
    conversation(HX_PREFIX_STRICT);
}

/* Other conversations in between take the pages: they move to host memory and back. */
static void test_parked_in_ram(void **state)
{
    hx_engine *e = open_with(&(hx_options) {
                  .max_streams = 1, .ctx_tokens = 1024, .park_ram_bytes = 200u << 20 }),
              *cold = open_with(&(hx_options) {
                  .max_streams = 1, .ctx_tokens = 1024, .prefix = HX_PREFIX_OFF });
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1), *b = hx_new(answer, 1);
    const int64_t restored = hx_counted(HX_C_pages_restored_total);

    (void)state;
    for (int round = 0; round < 3; round++)
        for (uint64_t k = 0; k < 3; k++) { /* three of 400 tokens, memory for one */
            make_text(e, t, 1000, 100 + k);
            const int64_t n = 400 + 20 * round;
            ask(e, t, n, 20, a);
            ask(cold, t, n, 20, b);
            assert_same(a, b);
            if (round > 0)
                assert_true(a->end.cached >= 384);
        }
    assert_true(hx_counted(HX_C_pages_restored_total) > restored + 20);
    hx_close(e);
    hx_close(cold);
    hx_free(t);
    hx_free(a);
    hx_free(b);
}

/* Several requests with one system prompt at once: the first reads it, the others wait for
 * their turn to read and find it there. */
static void test_shared_prompt(void **state)
{
    hx_engine *e = open_with(&(hx_options) { .max_streams = 4 });
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1);
    hx_stream *s[4];

    (void)state;
    make_text(e, t, N_MAX, 3);
    for (int64_t i = 0; i < 700; i++)
        t[i] = (int32_t)(hx_rng_at(9, (uint64_t)i) % 4000);
    t[700] = hx_token_id(e, HX_STR("<|user|>"));
    for (int i = 0; i < 4; i++) {
        t[710] = i;
        s[i] = submit(
            e, &(hx_request) {
                   .tokens = t, .n_tokens = 800, .max_new = 5, .want_logprobs = true });
    }
    for (int i = 0; i < 4; i++) {
        read_all(s[i], a);
        assert_int_equal(a->end.cached, i == 0 ? 0 : 640);
        hx_stream_free(s[i]);
    }
    hx_close(e);
    hx_free(t);
    hx_free(a);
}

/* no_store leaves nothing; a pin stays while others take all memory, until it is let go;
 * forgetting forgets. */
static void test_store_pin_forget(void **state)
{
    hx_engine *e = open_with(&(hx_options) {
        .max_streams = 1, .ctx_tokens = 2048, .park_ram_bytes = 12u << 20 });
    int32_t *t = hx_new(int32_t, N_MAX), *u = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1);
    hx_err err = { 0 };
    hx_status st;
    hx_request r = { .tokens = t,
                     .n_tokens = 600,
                     .max_new = 5,
                     .no_store = true,
                     .want_logprobs = true };
    hx_stream *s;

    (void)state;
    make_text(e, t, N_MAX, 1);
    for (int i = 0; i < 2; i++) {
        s = submit(e, &r);
        read_all(s, a);
        assert_int_equal(a->end.cached, 0);
        hx_stream_free(s);
    }
    hx_get_status(e, &st);
    assert_int_equal(st.states, 0);
    assert_int_equal(st.ram_bytes, 0);
    assert_int_equal(st.pages_kept, 0);
    assert_int_equal(hx_unpin(e, t, 600, &err), HX_EARG);
    r.no_store = false;
    r.pin = true;
    s = submit(e, &r);
    read_all(s, a);
    hx_stream_free(s);
    for (uint64_t k = 0; k < 4; k++) {
        make_text(e, u, 1400, 50 + k);
        ask(e, u, 1300, 3, a);
    }
    ask(e, t, 600, 5, a);
    assert_int_equal(a->end.cached, 600);
    assert_int_equal(hx_unpin(e, t, 600, &err), 0);
    assert_int_equal(hx_unpin(e, t, 600, &err), HX_EARG);
    for (uint64_t k = 0; k < 4; k++) {
        make_text(e, u, 1400, 70 + k);
        ask(e, u, 1300, 3, a);
    }
    ask(e, t, 600, 5, a);
    assert_true(a->end.cached < 600);
    assert_int_equal(a->end.miss, HX_MISS_EVICTED);
    assert_true(hx_forget(e, NULL) > 0);
    hx_get_status(e, &st);
    ask(e, t, 600, 5, a);
    assert_int_equal(a->end.cached, 0);
    assert_int_equal(a->end.miss, HX_MISS_NEW);
    assert_int_equal(hx_forget(e, NULL) > 0, 1);
    ask(e, t, 10, 1, a); /* figures are those of the last step */
    hx_forget(e, NULL);
    hx_get_status(e, &st);
    assert_int_equal(st.states, 0);
    assert_int_equal(st.pages_kept, 0);
    hx_close(e);
    hx_free(t);
    hx_free(u);
    hx_free(a);
}

static void wait_token(hx_stream *s, answer *a)
{
    a->n = 0;
    do {
        assert_int_equal(hx_next(s, &a->end, 60000), 1);
        for (int32_t i = 0; i < a->end.n_tokens; i++) {
            a->token[a->n] = a->end.tokens[i];
            a->logprob[a->n++] = a->end.logprob[i];
        }
    } while (a->n == 0);
}

/* Requests of higher priority take the slots of running ones, in decode and in prefill;
 * these go on later with the same bits. */
static void preempt(hx_prefix mode, bool no_store)
{
    hx_engine *e = open_with(
                  &(hx_options) { .max_streams = 2, .ctx_tokens = 2048, .prefix = mode }),
              *cold = open_with(&(hx_options) {
                  .max_streams = 2, .ctx_tokens = 2048, .prefix = HX_PREFIX_OFF });
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1), *b = hx_new(answer, 1), *c = hx_new(answer, 1);
    const int64_t parked = hx_counted(HX_C_preemptions_total);
    hx_request r = { .tokens = t,
                     .n_tokens = 300,
                     .max_new = 300,
                     .ignore_eos = true,
                     .temperature = 1,
                     .seed = 3,
                     .want_logprobs = true,
                     .no_store = no_store };
    hx_stream *low[2], *high[3];
    hx_status st;

    make_text(e, t, N_MAX, 21);
    hx_stream *s = submit(cold, &r);
    read_all(s, b);
    hx_stream_free(s);
    low[0] = submit(e, &r);
    wait_token(low[0], a);
    r.tokens = t + 500; /* begins to read 900 tokens */
    r.n_tokens = 900;
    r.max_new = 20;
    s = submit(cold, &r);
    read_all(s, c);
    hx_stream_free(s);
    low[1] = submit(e, &r);
    for (int i = 0; i < 3; i++) {
        high[i] = submit(e, &(hx_request) { .tokens = t + 1000 + 100 * i,
                                            .n_tokens = 90,
                                            .max_new = 30,
                                            .priority = 1,
                                            .ignore_eos = true,
                                            .want_logprobs = true });
        usleep(30000);
    }
    answer *h = hx_new(answer, 1);
    for (int i = 0; i < 3; i++) {
        read_all(high[i], h);
        hx_stream_free(high[i]);
    }
    hx_free(h);
    answer *rest = hx_new(answer, 1);
    read_all(low[0], rest);
    memcpy(a->token + a->n, rest->token, (size_t)rest->n * sizeof(int32_t));
    memcpy(a->logprob + a->n, rest->logprob, (size_t)rest->n * sizeof(float));
    a->n += rest->n;
    assert_same(a, b);
    read_all(low[1], rest);
    assert_same(rest, c);
    assert_true(hx_counted(HX_C_preemptions_total) > parked);
    hx_stream_free(low[0]);
    hx_stream_free(low[1]);
    hx_free(rest);
    hx_forget(e, NULL);
    hx_get_status(e, &st);
    assert_int_equal(st.states, 0);
    assert_int_equal(st.pages_kept, 0);
    assert_int_equal(st.ram_bytes, 0);
    hx_close(e);
    hx_close(cold);
    hx_free(t);
    hx_free(a);
    hx_free(b);
    hx_free(c);
}

static void test_preempt(void **state)
{
    (void)state;
    preempt(HX_PREFIX_REUSE, false);
    preempt(HX_PREFIX_REUSE, true);
    preempt(HX_PREFIX_OFF, false);
}

/* A preempted stream that is cancelled leaves nothing behind. */
static void test_cancel_parked(void **state)
{
    hx_engine *e = open_with(
        &(hx_options) { .max_streams = 1, .ctx_tokens = 1024, .prefix = HX_PREFIX_OFF });
    int32_t t[200] = { 0 };
    answer *a = hx_new(answer, 1);
    hx_status st;

    (void)state;
    make_text(e, t, 200, 4);
    hx_stream *low = submit(
        e, &(hx_request) {
               .tokens = t, .n_tokens = 100, .ignore_eos = true, .want_logprobs = true });
    wait_token(low, a);
    hx_stream *high = submit(e, &(hx_request) { .tokens = t + 50,
                                                .n_tokens = 100,
                                                .max_new = 60,
                                                .ignore_eos = true,
                                                .priority = 2,
                                                .want_logprobs = true });
    wait_token(high, a);
    hx_get_status(e, &st);
    assert_int_equal(st.running, 1);
    assert_int_equal(st.waiting, 1);
    hx_cancel(low);
    read_all(low, a);
    assert_int_equal(a->end.stop, HX_STOP_CANCEL);
    read_all(high, a);
    hx_stream_free(low);
    hx_stream_free(high);
    hx_forget(e, NULL);
    hx_get_status(e, &st);
    assert_int_equal(st.states, 0);
    assert_int_equal(st.ram_bytes, 0);
    hx_close(e);
    hx_free(a);
}

/* ---- a thousand cancels ---------------------------------------------------- */

typedef struct {
    hx_engine *e;
    uint64_t seed;
    int bad;
} crowd;

static void *crowd_run(void *ud)
{
    crowd *c = ud;
    int32_t t[512];
    hx_event ev;
    hx_err err;

    for (uint64_t i = 0; i < 170; i++) {
        const uint64_t x = hx_rng_at(c->seed, i);
        const int64_t n = 20 + (int64_t)((x >> 20) % 480);
        hx_stream *s;

        for (int64_t k = 0; k < n; k++) /* prompts that share beginnings */
            t[k] =
                (int32_t)(hx_rng_at(k < n * (int64_t)(x % 4) / 4 ? 1 : x, (uint64_t)k) %
                          3000);
        const hx_request r = { .tokens = t,
                               .n_tokens = n,
                               .max_new = 1 + (int64_t)(x % 30),
                               .temperature = 1,
                               .seed = x,
                               .priority = (int32_t)(x >> 50) % 3,
                               .no_store = (x >> 54) % 5 == 0,
                               .pin = (x >> 57) % 50 == 0 };
        if (hx_submit(c->e, &r, &s, &err) != 0) {
            c->bad++;
            continue;
        }
        usleep((useconds_t)((x >> 30) % 40000));
        hx_cancel(s);
        do {
            if (hx_next(s, &ev, 30000) != 1)
                c->bad++;
        } while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR);
        c->bad += ev.kind == HX_EV_ERROR;
        hx_stream_free(s);
    }
    return NULL;
}

static void test_cancels(void **state)
{
    hx_engine *e = open_with(&(hx_options) {
        .max_streams = 3, .ctx_tokens = 1024, .park_ram_bytes = 60u << 20 });
    pthread_t t[6];
    crowd c[6];
    hx_status st;

    (void)state;
    for (int i = 0; i < 6; i++) {
        c[i] = (crowd) { e, (uint64_t)i + 1, 0 };
        assert_int_equal(pthread_create(&t[i], NULL, crowd_run, &c[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(t[i], NULL);
        assert_int_equal(c[i].bad, 0);
    }
    hx_get_status(e, &st);
    printf("1020 cancels: %lld states, %lld pages kept, %.1f MB, %lld preemptions\n",
           (long long)st.states, (long long)st.pages_kept, (double)st.ram_bytes / 1e6,
           (long long)hx_counted(HX_C_preemptions_total));
    assert_int_equal(st.pages_used, 0);
    assert_int_equal(st.running + st.waiting, 0);
    hx_forget(e, NULL);
    hx_get_status(e, &st);
    assert_int_equal(st.states, 0);
    assert_int_equal(st.ram_bytes, 0);
    assert_int_equal(e->cache->n_free, e->cache->n_page);
    assert_int_equal(e->cache->n_held, 0);
    for (int32_t i = 0; i < e->cache->n_slot; i++)
        assert_false(e->cache->slot[i].used);
    hx_close(e);
}

/* ---- disk -------------------------------------------------------------------- */

static char folder[32];

static int64_t files_in_folder(bool remove_them)
{
    char path[512];
    DIR *d = opendir(folder);
    struct dirent *f;
    int64_t n = 0;

    while (d != NULL && (f = readdir(d)) != NULL)
        if (f->d_name[0] != '.') {
            n++;
            snprintf(path, sizeof path, "%s/%.200s", folder, f->d_name);
            if (remove_them)
                unlink(path);
        }
    closedir(d);
    return n;
}

static void remove_folder(const char *dir)
{
    char path[512];

    snprintf(path, sizeof path, "%s/.hoist-lock", dir);
    unlink(path);
    assert_int_equal(rmdir(dir), 0);
}

/* A conversation goes on after a restart with the same bits, at its answer's end, at the
 * end of its prompt, and before its last message; then corrupt files cost time only. */
static void restart_case(hx_kv kv, hx_kv other)
{
    const hx_options disk = {
        .ctx_tokens = 2048, .max_streams = 2, .park_dir = folder, .kv = kv
    };
    hx_engine *e,
        *cold = open_with(&(hx_options) {
            .ctx_tokens = 2048, .max_streams = 2, .prefix = HX_PREFIX_OFF, .kv = kv });
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1), *b = hx_new(answer, 1);
    int64_t n = 1000;
    char path[512];
    hx_status st;

    snprintf(folder, sizeof folder, "/tmp/hoist-reuse-XXXXXX");
    assert_non_null(mkdtemp(folder));
    make_text(cold, t, N_MAX, 77);
    for (int run = 0; run < 4; run++) {
        e = open_with(&disk);
        if (run > 0) {
            hx_get_status(e, &st);
            ask(e, t, n - 33 - 57, 33, a); /* the last prompt again */
            assert_int_equal(a->end.cached, n - 33 - 57);
            assert_same(a, b);
        }
        ask(e, t, n, 33, a);
        assert_int_equal(a->end.cached, run == 0 ? 0 : n - 57 - 1);
        ask(cold, t, n, 33, b);
        assert_same(a, b);
        hx_close(e);
        memcpy(t + n, a->token, 33 * sizeof *t);
        n += 33 + 57;
    }
    assert_true(files_in_folder(false) > 6);
    /* Latents of another format are not taken. */
    hx_options of_other = disk;
    of_other.kv = other;
    e = open_with(&of_other);
    assert_int_equal(e->reuse->tree->stat.snaps, 0);
    hx_close(e);
    e = open_with(&disk);
    assert_true(e->reuse->tree->stat.snaps > 0);
    hx_close(e);
    /* Every file damaged somewhere: found out at open or when read. */
    DIR *d = opendir(folder);
    struct dirent *f;
    uint64_t k = 0;
    while ((f = readdir(d)) != NULL)
        if (f->d_name[0] != '.') {
            snprintf(path, sizeof path, "%s/%.200s", folder, f->d_name);
            FILE *file = fopen(path, "r+");
            fseek(file, 0, SEEK_END);
            fseek(file, (long)(hx_rng_at(9, k++) % (uint64_t)ftell(file)), SEEK_SET);
            const int c = fgetc(file);
            fseek(file, -1, SEEK_CUR);
            fputc(c ^ 1, file);
            fclose(file);
        }
    closedir(d);
    e = open_with(&disk);
    ask(e, t, n - 33 - 57, 33, a);
    assert_int_equal(a->end.cached, 0);
    assert_same(a, b);
    hx_forget(e, NULL);
    hx_close(e);
    assert_int_equal(files_in_folder(true), 0);
    remove_folder(folder);
    hx_close(cold);
    hx_free(t);
    hx_free(a);
    hx_free(b);
}

static void test_restart(void **state)
{
    (void)state;
    restart_case(HX_KV_BF16, HX_KV_FP8);
    restart_case(HX_KV_FP8, HX_KV_BF16);
}

/* A request whose state lies on a disk that does not answer waits for it; others go on, but
 * leave a place for it. When the disk fails it begins anew, with the same answer. */
static void test_slow_disk(void **state)
{
    const hx_options disk = { .ctx_tokens = 2048, .max_streams = 2, .park_dir = folder };
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1), *b = hx_new(answer, 1);
    char path[64][128];
    int fd[64], n = 0;
    struct dirent *f;
    hx_status st;

    (void)state;
    snprintf(folder, sizeof folder, "/tmp/hoist-reuse-XXXXXX");
    assert_non_null(mkdtemp(folder));
    hx_engine *e = open_with(&disk);
    make_text(e, t, N_MAX, 78);
    ask(e, t, 1000, 8, b);
    hx_close(e);
    e = open_with(&disk);
    DIR *d = opendir(folder);
    while ((f = readdir(d)) != NULL && n < 64)
        if (f->d_name[0] != '.')
            snprintf(path[n++], sizeof *path, "%.30s/%.90s", folder, f->d_name);
    closedir(d);
    assert_in_range(n, 1, 63);
    for (int i = 0; i < n; i++) { /* pipes that nobody writes to */
        assert_int_equal(unlink(path[i]), 0);
        assert_int_equal(mkfifo(path[i], 0600), 0);
    }
    const hx_request r = { .tokens = t,
                           .n_tokens = 1000,
                           .max_new = 8,
                           .ignore_eos = true,
                           .temperature = 1,
                           .seed = 5,
                           .want_logprobs = true };
    hx_request other = { .tokens = t + 500,
                         .n_tokens = 300,
                         .max_new = 500,
                         .ignore_eos = true,
                         .no_store = true,
                         .want_logprobs = true };
    hx_stream *slow = submit(e, &r);
    ask(e, t + 700, 200, 8, a);
    hx_stream *beside = submit(e, &other);
    wait_token(beside, a);
    hx_stream *third = submit(e, &other);
    for (int i = 0; i < 3; i++) {
        wait_token(beside, a);
        hx_get_status(e, &st);
        assert_int_equal(st.running, 1);
        assert_int_equal(st.waiting, 2);
    }
    for (int i = 0; i < n; i++)
        assert_true((fd[i] = open(path[i], O_RDWR)) >= 0);
    read_all(slow, a);
    assert_same(a, b);
    hx_cancel(beside);
    hx_cancel(third);
    read_all(beside, a);
    read_all(third, a);
    hx_stream_free(slow);
    hx_stream_free(beside);
    hx_stream_free(third);
    hx_close(e);
    for (int i = 0; i < n; i++)
        close(fd[i]);
    files_in_folder(true);
    remove_folder(folder);
    hx_free(t);
    hx_free(a);
    hx_free(b);
}

static uint64_t bytes_in_folder(const char *dir)
{
    char path[512];
    struct stat st;
    struct dirent *f;
    uint64_t sum = 0;
    DIR *d = opendir(dir);

    while (d != NULL && (f = readdir(d)) != NULL) {
        snprintf(path, sizeof path, "%s/%.200s", dir, f->d_name);
        if (f->d_name[0] != '.' && stat(path, &st) == 0)
            sum += (uint64_t)st.st_size;
    }
    closedir(d);
    return sum;
}

/* Two servers on one folder, as when one is replaced: what the first leaves as it ends, the
 * second finds and goes on from, though it has the beginning in memory; it writes then. */
static void test_takeover(void **state)
{
    const hx_options disk = { .ctx_tokens = 2048, .max_streams = 2, .park_dir = folder };
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1), *b = hx_new(answer, 1);
    int64_t n_files;
    hx_status st;

    (void)state;
    snprintf(folder, sizeof folder, "/tmp/hoist-reuse-XXXXXX");
    assert_non_null(mkdtemp(folder));
    hx_engine *first = open_with(&disk), *second = open_with(&disk);
    const int64_t start = hx_now_us();
    make_text(first, t, N_MAX, 79);
    ask(first, t, 1000, 8, b);
    ask(second, t, 500, 8, a);
    assert_int_equal(a->end.cached, 0);
    hx_close(second); /* writes nothing: the folder is the first one's, when it is idle */
    assert_true(files_in_folder(false) == 0 || hx_now_us() - start > DISK_IDLE_US);
    second = open_with(&disk);
    ask(second, t, 500, 8, a);
    hx_close(first);
    n_files = files_in_folder(false);
    assert_true(n_files > 2);
    for (int i = 0; i < PATIENCE; i++) {
        hx_get_status(second, &st);
        if (st.disk_bytes == bytes_in_folder(folder))
            break;
        usleep(10000);
    }
    assert_int_equal(st.disk_bytes, bytes_in_folder(folder));
    ask(second, t, 1000, 8, a);
    assert_int_equal(a->end.cached, 1000);
    assert_same(a, b);
    ask(second, t + 500, 400, 8, a);
    for (int i = 0; i < PATIENCE && files_in_folder(false) == n_files; i++)
        usleep(10000); /* until it is idle */
    assert_true(files_in_folder(false) > n_files);
    ask(second, t + 1500, 300, 8, a);
    n_files = files_in_folder(false);
    hx_close(second); /* leaves what is new, as its owner */
    assert_true(files_in_folder(false) > n_files);
    second = open_with(&disk);
    ask(second, t, 1000, 8, a);
    assert_int_equal(a->end.cached, 1000);
    assert_same(a, b);
    hx_close(second);
    files_in_folder(true);
    remove_folder(folder);
    hx_free(t);
    hx_free(a);
    hx_free(b);
}

/* What goes on from a file that is there, but is not to be used now, is not thrown away. */
static void test_beginning_of_other(void **state)
{
    const hx_options disk = { .ctx_tokens = 2048, .max_streams = 2, .park_dir = folder };
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1);
    struct dirent *f;
    int64_t n_files = 0;

    (void)state;
    snprintf(folder, sizeof folder, "/tmp/hoist-reuse-XXXXXX");
    assert_non_null(mkdtemp(folder));
    for (int run = 0; run < 3; run++) {
        hx_engine *e = open_with(&disk);

        make_text(e, t, N_MAX, 80);
        if (run != 1) {
            ask(e, t, 1000, 8, a);
            assert_int_equal(a->end.cached, run == 0 ? 0 : 1000);
        } else {
            assert_int_equal(e->reuse->tree->stat.snaps, 0);
        }
        hx_close(e);
        if (run == 0)
            n_files = files_in_folder(false);
        assert_int_equal(files_in_folder(false), n_files);
        /* Those that begin a conversation become another build's, and ours again. */
        DIR *d = opendir(folder);
        while ((f = readdir(d)) != NULL) {
            uint8_t head[256];
            const int fd = openat(dirfd(d), f->d_name, O_RDWR);

            if (pread(fd, head, sizeof head, 0) == sizeof head && head[80] == 0 &&
                head[81] == 0) {
                head[16] ^= 1; /* of its identity */
                assert_int_equal(pwrite(fd, head, sizeof head, 0), sizeof head);
            }
            close(fd);
        }
        closedir(d);
    }
    assert_true(n_files > 2);
    files_in_folder(true);
    remove_folder(folder);
    hx_free(t);
    hx_free(a);
}

static void test_fit(void **state)
{
    hx_engine *e = open_with(&(hx_options) {
        .max_streams = 2, .ctx_tokens = 1024, .park_ram_bytes = 100u << 20 });
    const hx_fit f = hx_cache_fit(e, 1000), g = hx_cache_fit(e, 100);

    (void)state;
    assert_int_equal(f.here, 2);
    assert_true(f.in_ram > 5 && f.in_ram < 100);
    assert_int_equal(f.on_disk, 0);
    assert_int_equal(g.here, 16);
    assert_true(g.here + g.in_ram > f.here + f.in_ram);
    hx_close(e);
}

/* Neither the folder nor what a day writes grows beyond its budget; what was used last is
 * what is there. */
static void test_disk_budgets(void **state)
{
    static const struct {
        uint64_t disk, day, most;
    } ways[] = { { 9u << 20, 1u << 30, 9u << 20 }, { 1u << 30, 7u << 20, 7u << 20 } };
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1);

    (void)state;
    for (size_t w = 0; w < HX_LEN(ways); w++) {
        char dir[] = "/tmp/hoist-reuse-XXXXXX";
        hx_options opt = { .max_streams = 1,
                           .ctx_tokens = 1024,
                           .park_dir = mkdtemp(dir),
                           .park_disk_bytes = ways[w].disk,
                           .park_day_bytes = ways[w].day };
        hx_engine *e;
        hx_status st;

        for (uint64_t run = 0; run < 3; run++) {
            e = open_with(&opt);
            for (uint64_t k = 0; k < 3; k++) {
                make_text(e, t, 400, 500 + 10 * run + k);
                ask(e, t, 400, 8, a);
            }
            hx_close(e); /* writes all that is not written */
            assert_true(bytes_in_folder(dir) > 2u << 20);
            assert_true(bytes_in_folder(dir) <= ways[w].most);
        }
        e = open_with(&opt);
        hx_get_status(e, &st);
        assert_true(st.disk_bytes <= ways[w].most);
        if (w == 0) { /* the day's writes are used up by the first ones */
            make_text(e, t, 400, 522);
            ask(e, t, 400, 8, a);
            assert_true(a->end.cached > 300);
        }
        hx_forget(e, NULL);
        hx_close(e);
        assert_int_equal(bytes_in_folder(dir), 0);
        remove_folder(dir);
    }
    hx_free(t);
    hx_free(a);
}

/* A state that no budget has room for is not in the way of those used before it. */
static void test_disk_too_large(void **state)
{
    char dir[] = "/tmp/hoist-reuse-XXXXXX";
    hx_options opt = { .max_streams = 1, .ctx_tokens = 1024, .park_dir = mkdtemp(dir) };
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1);
    uint64_t room;

    (void)state;
    for (int way = 0; way < 2; way++) {
        hx_engine *e = open_with(&opt);

        room = 4 * e->cache->page_bytes + hx_cache_state_bytes(e->cache, HX_PEND_MAX) +
               (64 << 10);
        hx_close(e);
        opt.park_ram_bytes = way == 0 ? 2 * room : 1 << 30;
        opt.park_disk_bytes = way == 0 ? 1 << 30 : room;
        e = open_with(&opt);
        make_text(e, t, 100, 700);
        ask(e, t, 100, 1, a);
        for (int64_t i = 0; i < 900; i++) /* no borders: one file of all */
            t[i] = (int32_t)(hx_rng_at(701, (uint64_t)i) % 4000);
        ask(e, t, 900, 1, a);
        hx_close(e); /* writes what is not written, the last used first */
        e = open_with(&opt);
        make_text(e, t, 100, 700);
        ask(e, t, 100, 1, a);
        assert_true(a->end.cached > 60);
        hx_forget(e, NULL);
        hx_close(e);
    }
    remove_folder(dir);
    hx_free(t);
    hx_free(a);
}

/* A state whose first pages are in another's file only is not worth that file. */
static void test_disk_of_other(void **state)
{
    char dir[] = "/tmp/hoist-reuse-XXXXXX";
    hx_options opt = { .max_streams = 1, .ctx_tokens = 1024, .park_dir = mkdtemp(dir) };
    int32_t *t = hx_new(int32_t, N_MAX), *u = hx_new(int32_t, N_MAX);
    answer *a = hx_new(answer, 1);
    hx_engine *e = open_with(&opt);

    (void)state;
    make_text(e, t, 400, 600);
    ask(e, t, 400, 8, a);
    /* Room for its first file alone, up to its first message. */
    opt.park_disk_bytes =
        2 * e->cache->page_bytes + hx_cache_state_bytes(e->cache, 0) + (64 << 10);
    hx_close(e);
    e = open_with(&opt);
    make_text(e, u, 400, 601);
    memcpy(u, t, 64 * sizeof *t);
    ask(e, u, 400, 8, a); /* another end, and then others take its pages */
    make_text(e, u, 1000, 602);
    hx_stream *s;
    hx_event ev;
    assert_int_equal(
        hx_submit(e,
                  &(hx_request) {
                      .tokens = u, .n_tokens = 1000, .max_new = 1, .no_store = true },
                  &s, NULL),
        0);
    while (hx_next(s, &ev, 60000) == 1 && ev.kind != HX_EV_DONE)
        continue;
    hx_stream_free(s);
    hx_close(e); /* would write it */
    e = open_with(&opt);
    ask(e, t, 400, 8, a);
    assert_int_equal(a->end.cached, 128);
    hx_forget(e, NULL);
    hx_close(e);
    remove_folder(dir);
    hx_free(t);
    hx_free(u);
    hx_free(a);
}

/* Memory that fails now and then, in the engine and in the files' thread: answers that come
 * have the right bits, and in the end nothing is left. */
static void test_failing_memory(void **state)
{
    char dir[] = "/tmp/hoist-reuse-XXXXXX";
    hx_engine *e, *cold = open_with(&(hx_options) {
                      .max_streams = 2, .ctx_tokens = 1024, .prefix = HX_PREFIX_OFF });
    int32_t *t = hx_new(int32_t, N_MAX);
    answer *want = hx_new(answer, 4), *a = hx_new(answer, 1);
    int64_t n_bad = 0, n_good = 0;
    hx_status st;

    (void)state;
    assert_non_null(mkdtemp(dir));
    e = open_with(&(hx_options) { .max_streams = 2,
                                  .ctx_tokens = 1024,
                                  .park_ram_bytes = 16u << 20,
                                  .park_dir = dir });
    for (uint64_t k = 0; k < 4; k++) {
        make_text(e, t, 400, 300 + k);
        ask(cold, t, 400, 8, &want[k]);
    }
    for (uint64_t i = 0; i < 240; i++) {
        const uint64_t k = hx_rng_at(12, i) % 4;
        hx_stream *s;
        hx_event ev = { 0 };
        hx_err err;

        make_text(e, t, 400, 300 + k);
        hx_test_fail_at(1 + (int64_t)(hx_rng_at(13, i) % 40));
        const int rc = hx_submit(e,
                                 &(hx_request) { .tokens = t,
                                                 .n_tokens = 400,
                                                 .max_new = 8,
                                                 .ignore_eos = true,
                                                 .temperature = 1,
                                                 .seed = 5,
                                                 .want_logprobs = true },
                                 &s, &err);
        a->n = 0;
        while (rc == 0 && ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR) {
            assert_int_equal(hx_next(s, &ev, 60000), 1);
            for (int32_t j = 0; j < ev.n_tokens; j++) {
                a->token[a->n] = ev.tokens[j];
                a->logprob[a->n++] = ev.logprob[j];
            }
        }
        hx_test_fail_at(0);
        if (rc != 0 || ev.kind == HX_EV_ERROR) {
            assert_int_equal(rc != 0 ? rc : ev.err.code, HX_ENOMEM);
            n_bad++;
        } else {
            assert_same(a, &want[k]);
            n_good++;
        }
        if (rc == 0)
            hx_stream_free(s);
    }
    printf("%lld requests without memory, %lld answers as they should be\n",
           (long long)n_bad, (long long)n_good);
    assert_true(n_bad > 10 && n_good > 10);
    hx_forget(e, NULL);
    hx_get_status(e, &st);
    assert_int_equal(st.states, 0);
    assert_int_equal(st.ram_bytes, 0);
    assert_int_equal(e->cache->n_free, e->cache->n_page);
    hx_close(e);
    hx_close(cold);
    snprintf(folder, sizeof folder, "%s", dir);
    files_in_folder(true);
    remove_folder(dir);
    hx_free(t);
    hx_free(want);
    hx_free(a);
}

/* The figure is true: so many conversations, had one after the other, each so much older than
 * the next, all go on without reading more than half of themselves again. */
static void fit_is_true(int64_t n_prompt, uint64_t ram, int64_t age_us)
{
    enum { ANSWER = 40 };
    hx_engine *e = open_with(
        &(hx_options) { .max_streams = 1, .ctx_tokens = 1024, .park_ram_bytes = ram });
    const hx_fit fit = hx_cache_fit(e, n_prompt + ANSWER);
    const int64_t n = fit.here + fit.in_ram;
    int32_t *t = hx_new(int32_t, N_MAX);
    int32_t *said = hx_new(int32_t, n * ANSWER);
    answer *a = hx_new(answer, 1);
    int64_t least = INT64_MAX;

    assert_true(n >= 5);
    for (int64_t k = 0; k < n; k++) {
        make_text(e, t, n_prompt, 1000 + (uint64_t)k);
        ask(e, t, n_prompt, ANSWER, a);
        memcpy(said + k * ANSWER, a->token, ANSWER * sizeof *said);
        for (hx_node *s = e->reuse->tree->snap; s != NULL; s = s->snap->next)
            s->snap->used_us -= age_us; /* the engine is idle */
    }
    for (int64_t k = 0; k < n; k++) {
        make_text(e, t, n_prompt, 1000 + (uint64_t)k);
        memcpy(t + n_prompt, said + k * ANSWER, ANSWER * sizeof *said);
        hx_stream *s = submit(e, &(hx_request) { .tokens = t,
                                                 .n_tokens = n_prompt + ANSWER,
                                                 .max_new = 1,
                                                 .no_store = true,
                                                 .want_logprobs = true });
        read_all(s, a);
        hx_stream_free(s);
        least = HX_MIN(least, a->end.cached);
    }
    printf("%lld conversations of %lld tokens, each has at least %lld\n", (long long)n,
           (long long)n_prompt + ANSWER, (long long)least);
    assert_true(least * 2 >= n_prompt + ANSWER);
    hx_close(e);
    hx_free(t);
    hx_free(said);
    hx_free(a);
}

static void test_fit_is_true(void **state)
{
    (void)state;
    fit_is_true(560, 40u << 20, 0);
    fit_is_true(210, 30u << 20, 0);
    fit_is_true(900, 100u << 20, 0);
    fit_is_true(560, 40u << 20, INT64_C(3600000000));
    fit_is_true(900, 40u << 20, INT64_C(3600000000));
    fit_is_true(900, 100u << 20, INT64_C(3600000000));
}

/* reuse_test [PATTERN [DEVICE]]: only the tests whose names match. On a device whose decode rows
 * differ from its prefill rows in the last bits, states that decode built differ from a cold
 * prefill: test_conversation and test_restart are for those that have one arithmetic. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conversation),
        cmocka_unit_test(test_conversation_strict),
        cmocka_unit_test(test_parked_in_ram),
        cmocka_unit_test(test_shared_prompt),
        cmocka_unit_test(test_store_pin_forget),
        cmocka_unit_test(test_preempt),
        cmocka_unit_test(test_cancel_parked),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_cancels),
        cmocka_unit_test(test_disk_budgets),
        cmocka_unit_test(test_disk_too_large),
        cmocka_unit_test(test_disk_of_other),
        cmocka_unit_test(test_failing_memory),
        cmocka_unit_test(test_slow_disk),
        cmocka_unit_test(test_takeover),
        cmocka_unit_test(test_beginning_of_other),
        cmocka_unit_test(test_fit),
        cmocka_unit_test(test_fit_is_true),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    device = argc > 2 ? argv[2] : device;
    return cmocka_run_group_tests_name("reuse", tests, NULL, NULL);
}
