/* Tests of grammars.c: who shares, what stays, and streams of one grammar side by side
 * with requests that compile. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>

#include "engine/engine.h"

static hx_grammar *take(hx_grammars *all, const char *source)
{
    hx_grammar *g;
    hx_err err = { 0 };

    if (hx_grammars_take(all, NULL, HX_GRAMMAR_REGEX, hx_str_c(source), &g, &err) != 0)
        fail_msg("%s", err.msg);
    return g;
}

static void test_shared(void **state)
{
    hx_grammars *all;
    hx_grammar *g, *h;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_grammars_open(&all, &err), 0);
    g = take(all, "a+");
    assert_ptr_equal(take(all, "a+"), g);
    assert_ptr_not_equal(take(all, "a*"), g);
    /* The same text as something else is something else. */
    assert_int_equal(
        hx_grammars_take(all, NULL, HX_GRAMMAR_CHOICE, HX_STR("[\"a\"]"), &h, &err), 0);
    assert_int_equal(
        hx_grammars_take(all, NULL, HX_GRAMMAR_JSON_SCHEMA, HX_STR("[\"a\"]"), &h, &err),
        HX_EFORMAT);
    assert_int_equal(hx_grammars_take(all, NULL, HX_GRAMMAR_REGEX, HX_STR("("), &h, &err),
                     HX_EFORMAT);
    /* Used twice, dropped once, it stays however many come after it. */
    hx_grammars_drop(all, g);
    for (int i = 0; i < 40; i++) {
        char source[16];

        snprintf(source, sizeof source, "b{%d}", i + 1);
        hx_grammars_drop(all, take(all, source));
    }
    assert_ptr_equal(take(all, "a+"), g);
    hx_grammars_drop(all, NULL);
    hx_grammars_close(all);
    hx_grammars_close(NULL);
    assert_int_equal(hx_test_live_allocs(), 0);
}

/* The latest idle ones are found again, older ones are gone. */
static void test_idle(void **state)
{
    hx_grammars *all;
    int64_t live[12];

    (void)state;
    assert_int_equal(hx_grammars_open(&all, NULL), 0);
    for (int i = 0; i < 12; i++) {
        char source[16];

        snprintf(source, sizeof source, "c{%d}", i + 1);
        hx_grammars_drop(all, take(all, source));
        live[i] = (int64_t)hx_test_live_allocs();
    }
    assert_true(live[7] > live[6]);
    assert_int_equal(live[11], live[8]);
    hx_grammars_close(all);
}

enum { THREADS = 4, EACH = 6 };

static void *ask(void *ud)
{
    static const char *const sources[] = { "([a-c]{2}-){3}x", "[0-9]{4}",
                                           "(yes|no|maybe)!" };
    hx_engine *e = ud;
    const int32_t prompt[] = { 100, 101 };

    for (int i = 0; i < EACH; i++) {
        const hx_request r = { .tokens = prompt,
                               .n_tokens = 2,
                               .max_new = 40,
                               .temperature = 1,
                               .seed = (uint64_t)i,
                               .grammar_kind = HX_GRAMMAR_REGEX,
                               .grammar = hx_str_c(sources[i % 3]) };
        hx_grammar *g;
        hx_matcher m;
        hx_stream *s;
        hx_event ev;
        hx_sb text = { 0 };

        if (hx_submit(e, &r, &s, NULL) != 0)
            return NULL;
        while (hx_next(s, &ev, -1) == 1 && ev.kind == HX_EV_TOKENS)
            hx_sb_add(&text, ev.bytes.p, ev.bytes.n);
        hx_stream_free(s);
        if (hx_grammar_open(&g, NULL, r.grammar_kind, r.grammar, NULL, NULL) != 0)
            return NULL;
        hx_grammar_start(g, &m);
        const bool fits = hx_grammar_accept_bytes(&m, (hx_str) { text.p, text.n }) == 0 &&
                          hx_grammar_done(&m) != HX_GRAMMAR_OPEN;
        hx_grammar_close(g);
        hx_sb_free(&text);
        if (!fits || ev.stop != HX_STOP_EOS)
            return NULL;
    }
    return e;
}

static void test_side_by_side(void **state)
{
    pthread_t thread[THREADS];
    hx_engine *e;
    hx_err err = { 0 };
    void *ok;

    (void)state;
    if (hx_open(&e, &(hx_options) { .model_dir = "models/demo-exl3", .max_streams = 4 },
                &err) != 0)
        fail_msg("%s", err.msg);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, ask, e);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], &ok);
        assert_ptr_equal(ok, e);
    }
    hx_close(e);
}

/* A lazy grammar holds from its first id to its end, again and again; one that waits for
 * the end of reasoning keeps the answer from ending before; reasoning ends in time. */
static void test_begins(void **state)
{
    hx_engine *e;
    hx_err err = { 0 };

    (void)state;
    if (hx_open(&e, &(hx_options) { .model_dir = "models/demo-exl3", .max_streams = 1 },
                &err) != 0)
        fail_msg("%s", err.msg);
    const int32_t prompt[] = { 100, 101 }, call = hx_token_id(e, HX_STR("<tool_call>"));
    const int32_t close = hx_token_id(e, HX_STR("</think>")),
                  end = hx_token_id(e, HX_STR("</tool_call>"));
    const hx_bias bias[] = { { call, 100 } };

    for (int lazy = 0; lazy < 2; lazy++) {
        const hx_request r = {
            .tokens = prompt,
            .n_tokens = 2,
            .max_new = 60,
            .bias = bias,
            .n_bias = lazy,
            .grammar_kind = HX_GRAMMAR_TOOLS,
            .grammar =
                HX_STR("{\"format\":\"glm\",\"choice\":\"auto\",\"tools\":[{\"name\":"
                       "\"now\"},{\"name\":\"then\"}]}"),
            .grammar_after = lazy ? 0 : close,
            .grammar_at = call,
            .grammar_lazy = lazy,
            .grammar_again = lazy,
            .think_end = lazy ? 0 : close,
            .think_max = 5,
        };
        int32_t n_call = 0, n_end = 0, n_close = 0, n = 0;
        hx_stream *s;
        hx_event ev;

        if (hx_submit(e, &r, &s, &err) != 0)
            fail_msg("%s", err.msg);
        while (hx_next(s, &ev, -1) == 1 && ev.kind == HX_EV_TOKENS)
            for (int32_t i = 0; i < ev.n_tokens; i++, n++) {
                n_call += ev.tokens[i] == call;
                n_end += ev.tokens[i] == end;
                n_close += ev.tokens[i] == close;
                if (!lazy && n == 5)
                    assert_int_equal(ev.tokens[i], close);
                if (!lazy && n == 6)
                    assert_int_equal(ev.tokens[i], call);
            }
        assert_int_equal(ev.kind, HX_EV_DONE);
        if (lazy) {
            assert_true(n_call > 3 && n_end >= n_call - 1 && n_close == 0);
            assert_int_equal(ev.stop, HX_STOP_LENGTH);
        } else {
            assert_true(n_call == 1 && n_end == 1 && n_close == 1);
            assert_int_equal(ev.stop, HX_STOP_EOS);
        }
        hx_stream_free(s);
    }
    hx_close(e);
}

/* Who would rather end than think on ends its reasoning, and keeps to the grammar. */
static void test_ends_early(void **state)
{
    hx_engine *e;
    hx_err err = { 0 };
    hx_info info;
    hx_bias bias[32];
    hx_stream *s;
    hx_event ev;
    hx_sb text = { 0 };

    (void)state;
    if (hx_open(&e, &(hx_options) { .model_dir = "models/demo-exl3", .max_streams = 1 },
                &err) != 0)
        fail_msg("%s", err.msg);
    hx_get_info(e, &info);
    const int32_t prompt[] = { 100, 101 }, close = hx_token_id(e, HX_STR("</think>"));
    for (int32_t i = 0; i < info.n_eos; i++)
        bias[i] = (hx_bias) { info.eos[i], 100 };
    const hx_request r = { .tokens = prompt,
                           .n_tokens = 2,
                           .max_new = 60,
                           .bias = bias,
                           .n_bias = info.n_eos,
                           .grammar_kind = HX_GRAMMAR_REGEX,
                           .grammar = HX_STR("[a-f]{6}"),
                           .grammar_after = close,
                           .think_end = close };

    if (hx_submit(e, &r, &s, &err) != 0)
        fail_msg("%s", err.msg);
    while (hx_next(s, &ev, -1) == 1 && ev.kind == HX_EV_TOKENS)
        hx_sb_add(&text, ev.bytes.p, ev.bytes.n);
    assert_int_equal(ev.stop, HX_STOP_EOS);
    assert_int_equal(text.n, strlen("</think>") + 6);
    assert_int_equal(strncmp(text.p, "</think>", 8), 0);
    assert_int_equal(strspn(text.p + 8, "abcdef"), 6);
    hx_sb_free(&text);
    hx_stream_free(s);
    hx_close(e);
}

/* An argument is a pattern of the tests to run. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared),       cmocka_unit_test(test_idle),
        cmocka_unit_test(test_side_by_side), cmocka_unit_test(test_begins),
        cmocka_unit_test(test_ends_early),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("grammars", tests, NULL, NULL);
}
