/* health_test.c - the engine on the demo model when something goes wrong or runs short: a
 * stall, logits that are no numbers, logits that do not change, a model that changed its
 * mind, memory that runs out, limits of a client, what the record holds. A tap of the
 * graph plays the fault. */
#include "../../tests/demo.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/engine.h"

static hx_engine *open_demo(const hx_options *more)
{
    hx_options opt = *more;
    hx_engine *e;
    hx_err err = { 0 };

    opt.model_dir = DEMO;
    opt.device = device;
    opt.kv = HX_KV_F32;
    opt.n_threads = 1;
    if (opt.ctx_tokens == 0)
        opt.ctx_tokens = 2048;
    if (hx_open(&e, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    return e;
}

static const char *fault_of(hx_engine *e)
{
    hx_status st;

    hx_get_status(e, &st);
    return st.fault != NULL ? st.fault : "";
}

static void wait_fault(hx_engine *e, const char *want, int64_t limit_ms)
{
    const int64_t start = hx_now_us();

    while (strcmp(fault_of(e), want) != 0) {
        if (hx_now_us() - start > limit_ms * 1000)
            fail_msg("fault is \"%s\" after %lld ms, expected \"%s\"", fault_of(e),
                     (long long)limit_ms, want);
        usleep(2000);
    }
}

/* What the tap does to a decode step. */
static struct {
    _Atomic int sleep_ms, spoil, freeze; /* spoil, freeze: so many steps, -1: all */
    int64_t last_layer;
    size_t floats; /* of a row */
} fault;

static bool is_due(_Atomic int *n)
{
    const int now = atomic_load(n);

    if (now > 0)
        atomic_fetch_sub(n, 1);
    return now != 0;
}

static void on_tap(void *ud, int64_t layer, const char *what, hx_buf data, int64_t rows)
{
    float *x = data.p;
    const int ms = atomic_exchange(&fault.sleep_ms, 0);

    (void)ud;
    if (ms > 0)
        usleep((useconds_t)ms * 1000);
    if (strcmp(what, "streams") != 0 || layer != fault.last_layer)
        return;
    if (is_due(&fault.spoil))
        x[0] = NAN;
    if (is_due(&fault.freeze))
        for (size_t i = 0; i < fault.floats * (size_t)rows; i++)
            x[i] = (float)(i % fault.floats % 7) - 3;
}

static void tap(hx_engine *e)
{
    const hx_desc *d = &e->model->desc;

    fault.last_layer = d->n_layer - 1;
    fault.floats = (size_t)(d->streams * d->width);
    hx_graph_tap(e->decode, on_tap, NULL);
}

/* ---- progress ------------------------------------------------------------- */

static void test_stall(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .stall_ms = 1000, .no_canary = true });
    const hx_request r = { HELLO, .max_new = 1500, .ignore_eos = true };
    answer *a = hx_new(answer, 1);
    hx_stream *s;
    hx_event ev;
    hx_err err = { 0 };

    (void)state;
    ask(e, &(hx_request) { HELLO, .max_new = 3 }, a);
    tap(e);
    s = submit(e, &r);
    while (hx_next(s, &ev, 10000) == 1 && ev.kind != HX_EV_TOKENS)
        continue;
    atomic_store(&fault.sleep_ms, 6000);
    const int64_t start = hx_now_us();
    hx_stream *more;
    wait_fault(e, "stalled", 5500);
    /* The reader has its error while the engine thread still hangs. */
    read_all(s, a);
    assert_true(hx_now_us() - start < 5900000);
    assert_int_equal(a->end.kind, HX_EV_ERROR);
    assert_int_equal(a->end.err.code, HX_EDEVICE);
    assert_non_null(strstr(a->end.err.msg, "no progress"));
    assert_int_equal(hx_submit(e, &r, &more, &err), HX_EDEVICE);
    assert_non_null(strstr(err.msg, "no progress"));
    assert_int_equal(hx_forget(e, &err), HX_EDEVICE);
    assert_int_equal(hx_unpin(e, r.tokens, r.n_tokens, &err), HX_EDEVICE);
    assert_true(hx_now_us() - start < 5900000);
    wait_fault(e, "", 60000);
    hx_stream_free(s);
    ask(e, &(hx_request) { HELLO, .max_new = 5 }, a);
    assert_int_equal(a->n, 5);
    hx_free(a);
    hx_close(e);
}

/* A process that was stopped, and goes on, has lost nothing and learned nothing of itself. */
static void test_stopped(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .stall_ms = 2000, .no_canary = true });
    answer *a = hx_new(answer, 1);
    const pid_t us = getpid();
    hx_stream *s;
    hx_event ev;
    pid_t other;

    (void)state;
    s = submit(e, &(hx_request) { HELLO, .max_new = 500, .ignore_eos = true });
    while (hx_next(s, &ev, 10000) == 1 && ev.kind != HX_EV_TOKENS)
        continue;
    if ((other = fork()) == 0) {
        kill(us, SIGSTOP);
        sleep(6);
        kill(us, SIGCONT);
        _exit(0);
    }
    assert_true(other > 0);
    read_all(s, a);
    assert_int_equal(waitpid(other, NULL, 0), other);
    assert_int_equal(a->end.kind, HX_EV_DONE);
    assert_true(atomic_load(&e->health.worst_us) < 5000000);
    hx_stream_free(s);
    hx_free(a);
    hx_close(e);
}

static void sleep_at_end(void *ud, int64_t layer, const char *what, hx_buf data,
                         int64_t rows)
{
    const hx_engine *e = ud;

    (void)data, (void)rows;
    if (layer == e->model->desc.n_layer - 1 && strcmp(what, "streams") == 0)
        usleep(3000000);
}

/* A call that was given up no longer writes where its caller was. */
static void test_stalled_score(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .stall_ms = 500, .no_canary = true });
    float logprob[HX_LEN(hello)], twice[HX_LEN(hello)];
    const hx_score_args a = { HELLO, .logprob = logprob };
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_score(e, &a, &err), 0);
    assert_true(logprob[0] < 0);
    hx_graph_tap(e->prefill, sleep_at_end, e);
    assert_int_equal(hx_score(e, &a, &err), HX_EDEVICE);
    memset(logprob, 1, sizeof logprob);
    memset(twice, 1, sizeof twice);
    wait_fault(e, "", 60000);
    hx_close(e);
    assert_memory_equal(logprob, twice, sizeof twice);
}

/* ---- a lost device ------------------------------------------------------------ */

static int lose_embed(hx_dev *d, const hx_embed_args *a, hx_err *err)
{
    (void)d, (void)a;
    return hx_fail(err, HX_ELOST, "embed: the GPU is lost");
}

/* Who runs, who is being read and who waits have their error, and nobody is taken any more.
 * On a GPU it is really lost: the embedding lies nowhere. */
static void test_lost(void **state)
{
    const hx_request r = { HELLO, .max_new = 1500, .ignore_eos = true };
    hx_engine *e = open_demo(&(hx_options) { .max_streams = 2 });
    const hx_dev_ops *ops = e->dev->ops;
    hx_dev_ops broken = *ops;
    float logprob[HX_LEN(hello)];
    answer *a = hx_new(answer, 1);
    hx_stream *s[3];
    hx_event ev;
    hx_err err = { 0 };

    (void)state;
    s[0] = submit(e, &r);
    while (hx_next(s[0], &ev, 10000) == 1 && ev.kind != HX_EV_TOKENS)
        continue;
    broken.embed = lose_embed;
    if (hx_dev_is_host(e->dev))
        e->dev->ops = &broken;
    else
        e->model->embed.w = (const void *)(uintptr_t)4096;
    for (int i = 1; i < 3; i++)
        s[i] =
            hx_submit(e, &r, &s[i], &err) == 0 ? s[i] : NULL; /* or it was seen already */
    for (int i = 0; i < 3; i++) {
        if (s[i] == NULL)
            continue;
        read_all(s[i], a);
        assert_int_equal(a->end.kind, HX_EV_ERROR);
        assert_int_equal(a->end.err.code, HX_ELOST);
        assert_non_null(strstr(a->end.err.msg, "the GPU is lost"));
        hx_stream_free(s[i]);
    }
    wait_fault(e, "device", 5000);
    assert_int_equal(hx_submit(e, &r, &s[0], &err), HX_ELOST);
    assert_int_equal(hx_score(e, &(hx_score_args) { HELLO, .logprob = logprob }, &err),
                     HX_ELOST);
    e->dev->ops = ops;
    usleep(100000);
    assert_string_equal(fault_of(e), "device"); /* for good */
    hx_free(a);
    hx_close(e);
}

/* ---- broken answers --------------------------------------------------------- */

static void expect_broken(hx_engine *e, const hx_request *r, const char *why,
                          int32_t most)
{
    answer *a = hx_new(answer, 1);

    ask(e, r, a);
    assert_int_equal(a->end.kind, HX_EV_ERROR);
    if (strstr(a->end.err.msg, why) == NULL)
        fail_msg("%s", a->end.err.msg);
    assert_true(a->n <= most);
    hx_free(a);
}

static void wait_canaries(int64_t n)
{
    const int64_t start = hx_now_us();

    while (hx_counted(HX_C_canaries_total) < n && hx_now_us() - start < 60000000)
        usleep(2000);
    assert_int_equal(hx_counted(HX_C_canaries_total), n);
}

/* A fault of one request: it ends, the canary clears the model, others go on. */
static void test_broken_once(void **state)
{
    char dir[] = "/tmp/hoist-health-XXXXXX", path[300];
    const hx_options opt = { .dump_dir = mkdtemp(dir) };
    const hx_request r = { HELLO, .max_new = 200, .ignore_eos = true };
    const int64_t canaries = hx_counted(HX_C_canaries_total);
    answer *a = hx_new(answer, 1);
    hx_engine *e = open_demo(&opt);
    const struct dirent *f;
    int n_dump = 0;
    DIR *d;

    (void)state;
    ask(e, &(hx_request) { HELLO, .max_new = 3 }, a);
    assert_int_equal(hx_counted(HX_C_canaries_total), canaries + 1);
    tap(e);
    atomic_store(&fault.spoil, 1);
    expect_broken(e, &r, "no number", 1);
    wait_canaries(canaries + 2);
    atomic_store(&fault.freeze, 1 + HX_PRINT_SAME); /* none is left for the canary */
    expect_broken(e, &r, "have not changed", 32);
    wait_canaries(canaries + 3);
    ask(e, &(hx_request) { HELLO, .max_new = 5 }, a);
    assert_int_equal(a->n, 5);
    assert_string_equal(fault_of(e), "");
    hx_close(e);
    assert_non_null(d = opendir(dir));
    while ((f = readdir(d)) != NULL) {
        char *text;
        size_t n;
        hx_json *j;

        if (f->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", dir, f->d_name);
        assert_int_equal(hx_file_read(path, 1 << 20, &text, &n, NULL), 0);
        assert_int_equal(hx_json_parse(&j, (hx_str) { text, n }, 0, NULL), 0);
        assert_int_equal(hx_json_len(hx_json_get(j, "prompt")), HX_LEN(hello));
        assert_true(hx_json_has(j, "error"));
        hx_json_free(j);
        hx_free(text);
        unlink(path);
        n_dump++;
    }
    closedir(d);
    rmdir(dir);
    assert_int_equal(n_dump, 2);
    hx_free(a);
}

/* A model that stays broken: the canary says so, nothing more is taken. */
static void test_broken_model(void **state)
{
    const hx_request r = { HELLO, .max_new = 200, .ignore_eos = true };
    hx_engine *e = open_demo(&(hx_options) { 0 });
    answer *a = hx_new(answer, 1);
    hx_stream *s;
    hx_err err = { 0 };

    (void)state;
    ask(e, &(hx_request) { HELLO, .max_new = 3 }, a);
    tap(e);
    /* Wrong but finite: the canary's sum tells. */
    atomic_store(&fault.freeze, -1);
    expect_broken(e, &r, "have not changed", 32);
    wait_fault(e, "canary", 20000);
    assert_int_equal(hx_submit(e, &r, &s, &err), HX_EDEVICE);
    assert_non_null(strstr(err.msg, "canary"));
    atomic_store(&fault.freeze, 0);
    hx_free(a);
    hx_close(e);
}

/* When idle, again and again; a request that comes meanwhile is served. */
static void test_canary_repeats(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .canary_ms = 20 });
    const int64_t before = hx_counted(HX_C_canaries_total),
                  failed = hx_counted(HX_C_canaries_failed_total);
    const int64_t start = hx_now_us();
    answer *a = hx_new(answer, 1);

    (void)state;
    while (hx_counted(HX_C_canaries_total) < before + 3 &&
           hx_now_us() - start < 30000000) {
        ask(e, &(hx_request) { HELLO, .max_new = 2 }, a);
        assert_int_equal(a->n, 2);
        usleep(50000);
    }
    assert_true(hx_counted(HX_C_canaries_total) >= before + 3);
    assert_int_equal(hx_counted(HX_C_canaries_failed_total), failed);
    assert_string_equal(fault_of(e), "");
    hx_free(a);
    hx_close(e);
}

/* Writes the demo to dir with the first value of its last norm spoilt. */
static void spoil_model(const char *dir)
{
    static const char *const name[] = { "config.json", "model.safetensors" };
    char path[600], *text, *at, *end;
    uint64_t head, from;
    size_t n;
    FILE *f;

    for (size_t i = 0; i < HX_LEN(name); i++) {
        snprintf(path, sizeof path, DEMO "/%s", name[i]);
        assert_int_equal(hx_file_read(path, 256u << 20, &text, &n, NULL), 0);
        if (i == 1) {
            memcpy(&head, text, sizeof head);
            at = memmem(text + 8, head, "language_model.norm.weight\"", 27);
            assert_non_null(at);
            at = strstr(at, "\"data_offsets\":[");
            assert_non_null(at);
            from = strtoull(at + 16, &end, 10);
            memset(text + 8 + head + from, 0x7f, 4); /* NaN in f16, bf16 and f32 */
        }
        snprintf(path, sizeof path, "%s/%s", dir, name[i]);
        assert_non_null(f = fopen(path, "wb"));
        assert_int_equal(fwrite(text, 1, n, f), n);
        fclose(f);
        hx_free(text);
    }
}

/* Bad from the start: the model does not open, and says why, unless that is wanted. */
static void test_bad_from_start(void **state)
{
    char dir[] = "/tmp/hoist-spoilt-XXXXXX", path[600];
    hx_options opt = { .model_dir = mkdtemp(dir), .ctx_tokens = 256, .n_threads = 1 };
    answer *a = hx_new(answer, 1);
    hx_engine *e;
    hx_err err = { 0 };

    (void)state;
    spoil_model(dir);
    assert_int_equal(hx_open(&e, &opt, &err), HX_EDEVICE);
    assert_null(e);
    assert_non_null(strstr(err.msg, "no number"));
    assert_non_null(strstr(err.msg, "--no-canary"));
    opt.no_canary = true;
    assert_int_equal(hx_open(&e, &opt, &err), 0);
    ask(e, &(hx_request) { HELLO, .max_new = 5 }, a);
    assert_int_equal(a->end.kind, HX_EV_ERROR);
    assert_non_null(strstr(a->end.err.msg, "no number"));
    hx_close(e);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", dir,
                 i == 0 ? "config.json" : "model.safetensors");
        unlink(path);
    }
    rmdir(dir);
    hx_free(a);
}

/* ---- memory that runs out ----------------------------------------------------- */

/* What has come of s meanwhile. Returns 1 when it ends with that. */
static int read_some(hx_stream *s, answer *a)
{
    const bool ended = a->end.kind == HX_EV_DONE || a->end.kind == HX_EV_ERROR;

    if (ended || hx_next(s, &a->end, 5) != 1)
        return 0;
    if (a->end.kind == HX_EV_TOKENS)
        collect(&a->end, a);
    return a->end.kind == HX_EV_DONE || a->end.kind == HX_EV_ERROR;
}

/* Four answers that do not fit together: nobody fails, and each is what it is alone. */
static void test_preemption(void **state)
{
    enum { N = 4, NEW = 400 };
    hx_engine *e = open_demo(&(hx_options) { .ctx_tokens = 512, .max_streams = 1 });
    const hx_desc *d = &e->model->desc;
    const uint64_t page = hx_cache_page_bytes(d, HX_CACHE_F32),
                   slot = hx_cache_slot_bytes(d);
    answer *alone = hx_new(answer, N), *a = hx_new(answer, N);
    hx_request r[N];
    hx_stream *s[N];
    hx_status st;

    (void)state;
    for (int i = 0; i < N; i++) {
        r[i] = (hx_request) { HELLO,
                              .max_new = NEW,
                              .ignore_eos = true,
                              .temperature = 1,
                              .seed = (uint64_t)i,
                              .priority = i == 3 ? 1 : 0 };
        ask(e, &r[i], &alone[i]);
    }
    hx_close(e);
    e = open_demo(&(hx_options) {
        .ctx_tokens = 512, .max_streams = N, .cache_bytes = N * slot + 12 * page });
    hx_get_status(e, &st);
    assert_true(st.pages >= 8 && st.pages < N * NEW / 64);
    for (int i = 0; i < N; i++)
        s[i] = submit(e, &r[i]);
    for (int left = N; left > 0;)
        for (int i = 0; i < N; i++)
            left -= read_some(s[i], &a[i]);
    for (int i = 0; i < N; i++) {
        assert_int_equal(a[i].end.kind, HX_EV_DONE);
        assert_int_equal(a[i].end.generated, NEW);
        assert_int_equal(a[i].n, NEW);
        assert_memory_equal(a[i].token, alone[i].token, NEW * sizeof(int32_t));
        hx_stream_free(s[i]);
    }
    hx_get_status(e, &st);
    printf("%lld pages, %lld preemptions\n", (long long)st.pages,
           (long long)st.preempted);
    assert_true(st.preempted > 0);
    assert_int_equal(st.pages_used, 0);
    assert_int_equal(e->cache->n_held, 0); /* kept prefixes may have the others */
    hx_free(alone);
    hx_free(a);
    hx_close(e);
}

/* Many who ask for the whole context fit as long as they do not use it. */
static void test_reserves_what_is_used(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .ctx_tokens = 1024, .max_streams = 1 });
    const uint64_t page = hx_cache_page_bytes(&e->model->desc, HX_CACHE_F32),
                   slot = hx_cache_slot_bytes(&e->model->desc);
    hx_stream *s[3];
    hx_status st;
    hx_event ev;

    (void)state;
    hx_close(e);
    e = open_demo(&(hx_options) {
        .ctx_tokens = 1024, .max_streams = 3, .cache_bytes = 3 * slot + 20 * page });
    for (int i = 0; i < 3; i++)
        s[i] = submit(e, &(hx_request) { HELLO, .ignore_eos = true });
    for (int i = 0; i < 3; i++)
        while (hx_next(s[i], &ev, 10000) == 1 && ev.kind != HX_EV_TOKENS)
            continue;
    hx_get_status(e, &st);
    assert_int_equal(st.running, 3);
    for (int i = 0; i < 3; i++)
        hx_stream_free(s[i]);
    hx_close(e);
}

/* ---- clients, introspection ----------------------------------------------------- */

static void test_client_limits(void **state)
{
    hx_engine *e = open_demo(
        &(hx_options) { .max_streams = 3, .client_streams = 1, .client_queue = 1 });
    const hx_request one = { HELLO, .ignore_eos = true, .client = 1 },
                     two = { HELLO, .max_new = 4, .client = 2 };
    hx_stream_info info[8];
    answer *a = hx_new(answer, 1);
    hx_stream *s[2], *more;
    hx_err err = { 0 };
    hx_event ev;

    (void)state;
    s[0] = submit(e, &one);
    while (hx_next(s[0], &ev, 10000) == 1 && ev.kind != HX_EV_TOKENS)
        continue;
    s[1] = submit(e, &one); /* waits although slots are free */
    assert_int_equal(hx_submit(e, &one, &more, &err), HX_EBUSY);
    assert_non_null(strstr(err.msg, "this key"));
    ask(e, &two, a); /* passes the one that waits */
    assert_int_equal(a->n, 4);
    assert_int_equal(hx_get_streams(e, info, 8), 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(info[i].client, 1);
        assert_int_equal(info[i].prompt, HX_LEN(hello));
        assert_true((info[i].stage == HX_AT_QUEUE) == (info[i].id == 1));
    }
    hx_cancel(s[0]);
    while (hx_next(s[1], &ev, 10000) == 1 && ev.kind != HX_EV_TOKENS)
        continue; /* its turn has come */
    hx_stream_free(s[0]);
    hx_stream_free(s[1]);
    hx_free(a);
    hx_close(e);
}

/* A thousand that leave at random moments, in the queue, the prompt or the answer. */
static void test_cancels(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .max_streams = 4, .no_canary = true });
    int32_t *prompt = hx_new(int32_t, 600);
    hx_stream *s[16] = { 0 };
    hx_status st;
    hx_err err = { 0 };

    (void)state;
    for (int i = 0; i < 600; i++)
        prompt[i] = (int32_t)(hx_rng_at(4, (uint64_t)i) % 4000);
    for (uint64_t i = 0; i < 1000; i++) {
        const uint64_t x = hx_rng_at(6, i);
        hx_stream **at = &s[x % HX_LEN(s)];

        const hx_request r = { .tokens = prompt,
                               .n_tokens = 1 + (int64_t)(x >> 8 & 511),
                               .max_new = 1 + (int64_t)(x >> 20 & 127),
                               .priority = (int32_t)(x >> 30 & 1),
                               .seed = x };

        hx_stream_free(*at);
        while (hx_submit(e, &r, at, &err) == HX_EBUSY)
            usleep(10000);
        usleep((useconds_t)(x >> 40 & 2047));
    }
    for (size_t i = 0; i < HX_LEN(s); i++)
        hx_stream_free(s[i]);
    for (int i = 0; i < 2000; i++) {
        hx_get_status(e, &st);
        if (st.running + st.waiting == 0)
            break;
        usleep(5000);
    }
    assert_int_equal(st.running + st.waiting + st.pages_used, 0);
    assert_int_equal(hx_get_streams(e, NULL, 0), 0);
    assert_int_equal(e->cache->n_held, 0); /* kept prefixes may have the others */
    for (int32_t i = 0; i < e->cache->n_slot; i++)
        assert_false(e->cache->slot[i].used);
    hx_free(prompt);
    hx_close(e);
}

static void test_progress(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .max_streams = 1 });
    int32_t *prompt = hx_new(int32_t, 900);
    hx_stream *s, *later;
    hx_event ev;
    int64_t seen = 0, last = 0;

    (void)state;
    for (int i = 0; i < 900; i++)
        prompt[i] = (int32_t)(hx_rng_at(3, (uint64_t)i) % 4000);
    const hx_request r = { .tokens = prompt,
                           .n_tokens = 900,
                           .max_new = 2,
                           .ignore_eos = true,
                           .progress = true };
    s = submit(e, &r);
    later = submit(e, &r);
    while (hx_next(s, &ev, 9000) == 1 && ev.kind == HX_EV_PROGRESS) {
        assert_int_equal(ev.prompt, 900);
        assert_true(ev.prefilled >= last && ev.prefilled <= 900);
        assert_int_equal(ev.queue, 0);
        last = ev.prefilled;
        seen++;
    }
    assert_true(seen >= 2);
    hx_stream_free(s);
    while (hx_next(later, &ev, 9000) == 1 && ev.kind != HX_EV_DONE)
        assert_int_not_equal(ev.kind, HX_EV_ERROR);
    hx_stream_free(later);
    hx_free(prompt);
    hx_close(e);
}

/* Who waits is told the place at once, and again when one before it leaves. */
static void test_places(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .max_streams = 1 });
    const hx_request hog = { HELLO, .max_new = 30000, .ignore_eos = true },
                     r = { HELLO, .max_new = 2, .progress = true };
    hx_stream *runs = submit(e, &hog), *first = submit(e, &r), *second = submit(e, &r);
    hx_event ev;

    (void)state;
    assert_int_equal(hx_next(second, &ev, 9000), 1);
    assert_int_equal(ev.kind, HX_EV_PROGRESS);
    assert_int_equal(ev.queue, 1);
    assert_int_equal(ev.times.started_us, 0);
    hx_stream_free(first);
    assert_int_equal(hx_next(second, &ev, 9000), 1);
    assert_int_equal(ev.kind, HX_EV_PROGRESS);
    assert_int_equal(ev.queue, 0);
    assert_int_equal(ev.times.started_us, 0);
    hx_stream_free(second);
    hx_stream_free(runs);
    hx_close(e);
}

/* The names are those of vLLM's own loggers (vllm/v1/metrics/loggers.py, 2025). */
static void test_metrics(void **state)
{
    hx_engine *e = open_demo(&(hx_options) { .no_canary = true });
    answer *a = hx_new(answer, 1);
    char *text = hx_alloc(1 << 20);
    static const char *const want[] = {
        "vllm:num_requests_running{model_name=\"demo-exl3\"} 0",
        "vllm:request_success_total{model_name=\"demo-exl3\",finished_reason=\"length\"}",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"demo-exl3\",le=\"+Inf\"}",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:kv_cache_usage_perc",
        "# TYPE vllm:prompt_tokens_total counter",
        "vllm:num_requests_waiting{",
        "vllm:num_preemptions_total{",
        "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{",
        "vllm:request_queue_time_seconds_sum{",
        "vllm:request_prefill_time_seconds_sum{",
        "vllm:request_decode_time_seconds_sum{",
        "vllm:request_inference_time_seconds_sum{",
        "vllm:request_prompt_tokens_bucket{",
        "vllm:request_generation_tokens_bucket{",
        "vllm:request_params_max_tokens_bucket{",
        "vllm:request_time_per_output_token_seconds_bucket{",
        "vllm:iteration_tokens_total_bucket{",
        "vllm:prompt_tokens_total{model_name=\"demo-exl3\"} 12345678\n", /* to the last */
        "hoist_healthy 1",
    };

    (void)state;
    ask(e, &(hx_request) { HELLO, .max_new = 5, .ignore_eos = true }, a);
    hx_count(HX_C_prompt_tokens_total, 12345678 - hx_counted(HX_C_prompt_tokens_total));
    assert_in_range(hx_metrics(e, text, 1 << 20), 1000, 1 << 20);
    for (size_t i = 0; i < HX_LEN(want); i++)
        if (strstr(text, want[i]) == NULL)
            fail_msg("no %s", want[i]);
    hx_free(text);
    hx_free(a);
    hx_close(e);
}

/* ---- the record --------------------------------------------------------------- */

static void test_record(void **state)
{
    char path[] = "/tmp/hoist-record-XXXXXX", *text, *line;
    const int fd = mkstemp(path);
    const hx_options opt = { .record = path };
    hx_engine *e = open_demo(&opt);
    const hx_str stop = HX_STR("zzz");
    const hx_bias bias = { 77, -2.5f };
    answer *a = hx_new(answer, 1);
    hx_json *j;
    size_t n;

    (void)state;
    assert_int_equal(write(fd, "torn", 4), 4); /* a server was killed there */
    close(fd);
    ask(e,
        &(hx_request) { HELLO, .max_new = 20, .temperature = 0.7f, .top_p = 0.9f,
                        .seed = 18446744073709551615ULL, .stop = &stop, .n_stop = 1,
                        .bias = &bias, .n_bias = 1, .ignore_eos = true,
                        .grammar_kind = HX_GRAMMAR_REGEX, .grammar = HX_STR("[a-z ]*") },
        a);
    hx_close(e);
    assert_int_equal(hx_file_read(path, 1 << 20, &text, &n, NULL), 0);
    assert_memory_equal(text, "torn\n", 5);
    assert_non_null(line = memchr(text + 5, '\n', n - 5));
    assert_int_equal(line + 1 - text, n);
    assert_int_equal(hx_json_parse(&j, (hx_str) { text + 5, n - 6 }, 0, NULL), 0);
    assert_int_equal(hx_json_len(hx_json_get(j, "answer")), a->n);
    for (int32_t i = 0; i < a->n; i++)
        assert_int_equal(hx_json_int(hx_json_at(hx_json_get(j, "answer"), (size_t)i), -1),
                         a->token[i]);
    assert_true(hx_str_is(hx_json_str(hx_json_get(j, "seed")), "18446744073709551615"));
    assert_true(hx_str_is(hx_json_str(hx_json_get(j, "grammar")), "[a-z ]*"));
    assert_true((float)hx_json_num(hx_json_get(j, "top_p"), 0) == 0.9f);
    assert_int_equal(hx_json_len(hx_json_get(j, "prompt")), HX_LEN(hello));
    hx_json_free(j);
    hx_free(text);
    unlink(path);
    hx_free(a);
}

static void count_lost(void *ud, int level, const char *text)
{
    (void)level;
    *(int *)ud += strstr(text, "record: No space left") != NULL;
}

/* A full disk is told of once, not with every answer. */
static void test_record_full(void **state)
{
    const hx_options opt = { .record = "/dev/full" };
    hx_engine *e = open_demo(&opt);
    answer *a = hx_new(answer, 1);
    int n_lost = 0;

    (void)state;
    hx_on_log(count_lost, &n_lost);
    for (int i = 0; i < 3; i++)
        ask(e, &(hx_request) { HELLO, .max_new = 2 }, a);
    hx_on_log(NULL, NULL);
    hx_close(e);
    hx_free(a);
    assert_int_equal(n_lost, 1);
}

/* health_test [PATTERN [DEVICE]]: those that play a fault need a tap, which only the CPU
 * has; test_lost loses a GPU for its process */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stall),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_stalled_score),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_broken_once),
        cmocka_unit_test(test_broken_model),
        cmocka_unit_test(test_canary_repeats),
        cmocka_unit_test(test_bad_from_start),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_reserves_what_is_used),
        cmocka_unit_test(test_client_limits),
        cmocka_unit_test(test_cancels),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_record),
        cmocka_unit_test(test_record_full),
    };

    demo_args(argc, argv);
    return cmocka_run_group_tests_name("health", tests, NULL, NULL);
}
