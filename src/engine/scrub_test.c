/* scrub_test.c - a bit that flips in the weights of a running engine, in the arena or in a
 * mapped file, is found and named, ends running answers and refuses new ones; checksums that
 * were not there are made, and are those that another path makes. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/engine.h"

#define DEMO "models/demo-exl3"

static hx_engine *open_model(const char *dir, uint64_t vram_bytes)
{
    const hx_options opt = { .model_dir = dir,
                             .vram_bytes = vram_bytes,
                             .ctx_tokens = 4096,
                             .n_threads = 1,
                             .no_canary = true,
                             .verify_ms = 1 };
    hx_engine *e;
    hx_err err;

    if (hx_open(&e, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    return e;
}

static hx_stream *ask(hx_engine *e, hx_err *err)
{
    static const int32_t ids[] = { 50, 60, 70 };
    const hx_request r = {
        .tokens = ids, .n_tokens = 3, .max_new = 4000, .ignore_eos = true
    };
    hx_stream *s = NULL;

    hx_submit(e, &r, &s, err);
    return s;
}

/* Passes over all weights until now that found nothing. */
static void wait_passes(int64_t n)
{
    const int64_t from = hx_counted(HX_C_memory_passes_total), start = hx_now_us();

    while (hx_counted(HX_C_memory_passes_total) < from + n) {
        if (hx_now_us() - start > 60000000)
            fail_msg("no pass in a minute");
        usleep(1000);
    }
}

/* The fault comes, names the tensor, and ends the answer s. */
static void expect_fault(hx_engine *e, hx_stream *s, const char *tensor)
{
    const int64_t start = hx_now_us();
    hx_event ev = { 0 };
    hx_status st = { 0 };
    hx_err err = { 0 };

    while (ev.kind != HX_EV_ERROR && ev.kind != HX_EV_DONE &&
           hx_now_us() - start < 60000000)
        hx_next(s, &ev, 1000);
    assert_int_equal(ev.kind, HX_EV_ERROR);
    assert_int_equal(ev.err.code, HX_EDEVICE);
    assert_non_null(strstr(ev.err.msg, tensor));
    hx_get_status(e, &st);
    assert_non_null(st.fault);
    assert_string_equal(st.fault, "memory");
    assert_non_null(strstr(st.fault_text, tensor));
    assert_null(ask(e, &err));
    assert_int_equal(err.code, HX_EDEVICE);
    hx_stream_free(s);
}

/* Experts were copied to an arena: what is checked lies there. */
static void test_arena(void **state)
{
    const int64_t faults = hx_counted(HX_C_memory_faults_total);
    hx_engine *e = open_model(DEMO, 400000);
    hx_store *store = e->model->store;
    hx_err err = { 0 };

    (void)state;
    assert_non_null(store->arena);
    wait_passes(2);
    hx_stream *s = ask(e, &err);
    assert_non_null(s);
    /* layer 4, expert 3; its record begins with gate_proj's trellis */
    uint8_t *home = (uint8_t *)(uintptr_t)store->home[4 * store->n_expert + 3];
    assert_true(home >= (uint8_t *)store->arena &&
                home < (uint8_t *)store->arena + store->arena_bytes);
    home[1000] ^= 16;
    expect_fault(e, s, "layers.4.mlp.experts.3.gate_proj.trellis");
    assert_int_equal(hx_counted(HX_C_memory_faults_total), faults + 1);
    hx_close(e);
}

static void copy_file(const char *from, const char *to)
{
    char *p;
    size_t n;
    hx_err err;
    FILE *f;

    if (hx_file_read(from, 1 << 28, &p, &n, &err) != 0)
        fail_msg("%s", err.msg);
    f = fopen(to, "w");
    assert_true(f != NULL && fwrite(p, 1, n, f) == n && fclose(f) == 0);
    hx_free(p);
}

static bool same_file(const char *a, const char *b)
{
    char *p = NULL, *q = NULL;
    size_t n = 0, m = 0;
    hx_err err;
    bool same;

    if (hx_file_read(a, 1 << 28, &p, &n, &err) != 0 ||
        hx_file_read(b, 1 << 28, &q, &m, &err) != 0)
        fail_msg("%s", err.msg);
    same = n == m && memcmp(p, q, n) == 0;
    hx_free(p);
    hx_free(q);
    return same;
}

/* Weights used where their file is mapped; no checksums at first. */
static void test_mapped(void **state)
{
    static const char *const files[] = { "config.json", "model.safetensors",
                                         "model.safetensors.index.json",
                                         "mtp.safetensors" };
    char dir[] = "/tmp/hoist-scrub-XXXXXX", path[256], from[256];
    hx_err err = { 0 };
    hx_engine *e;
    uint8_t byte;

    (void)state;
    assert_non_null(mkdtemp(dir));
    for (size_t i = 0; i < HX_LEN(files); i++) {
        snprintf(from, sizeof from, DEMO "/%s", files[i]);
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        copy_file(from, path);
    }
    e = open_model(dir, 0);
    wait_passes(2);
    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    assert_true(same_file(path, DEMO "/" HX_SUMS_FILE)); /* inspect --verify made that */
    hx_stream *s = ask(e, &err);
    assert_non_null(s);
    const hx_tensor *t =
        hx_weights_find(e->model->weights, "model.language_model.norm.weight");
    assert_non_null(t);
    snprintf(path, sizeof path, "%s/%s", dir, hx_weights_file(e->model->weights, t));
    /* Where in the file: what follows is found by its bytes. */
    char *all;
    size_t n;
    assert_int_equal(hx_file_read(path, 1 << 28, &all, &n, &err), 0);
    const char *at = memmem(all, n, t->p, t->bytes);
    assert_non_null(at);
    const int fd = open(path, O_WRONLY);
    byte = (uint8_t)(at[5] ^ 1);
    assert_int_equal(pwrite(fd, &byte, 1, at - all + 5), 1);
    close(fd);
    hx_free(all);
    expect_fault(e, s, "model.language_model.norm.weight");
    hx_close(e);
    for (size_t i = 0; i < HX_LEN(files); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_mapped),
    };

    return cmocka_run_group_tests_name("scrub", tests, NULL, NULL);
}
