/* turns_test.c - turns and blocks when memory runs out: nothing is dropped silently and
 * nothing leaks. What they make is tested in dialect_test.c. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "turns.c"

static void talk(hx_turns *t)
{
    hx_turns_say(t, "system", HX_STR("s"));
    hx_turns_reasoning(t, HX_STR("r"));
    hx_turns_assistant(t, HX_STR("a"));
    hx_turns_call(t, HX_STR("1"), HX_STR("f"), HX_STR("{}"));
    hx_turns_call(t, (hx_str) { NULL, 0 }, HX_STR("g"), HX_STR(""));
    hx_turns_result(t, HX_STR("1"), NULL, HX_STR("o"));
    hx_turns_reasoning(t, HX_STR("q"));
    hx_turns_end(t);
}

static void test_turns(void **state)
{
    hx_turns t;

    (void)state;
    hx_turns_open(&t, NULL);
    talk(&t);
    assert_string_equal(
        t.b.p,
        "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"assistant\","
        "\"content\":\"a\",\"reasoning_content\":\"r\",\"tool_calls\":[{\"type\":"
        "\"function\",\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}},{"
        "\"type\":\"function\",\"function\":{\"name\":\"g\",\"arguments\":\"\"}}]},{"
        "\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"o\"},{\"role\":"
        "\"assistant\",\"content\":\"\",\"reasoning_content\":\"q\"}]");
    hx_turns_free(&t);
    for (int64_t k = 1;; k++) {
        hx_test_fail_at(k);
        hx_turns_open(&t, NULL);
        talk(&t);
        const bool hit = hx_test_fail_at(0) >= k;

        assert_int_equal(t.b.bad, hit);
        hx_turns_free(&t);
        if (!hit)
            break;
        assert_in_range(k, 1, 100);
    }
    assert_int_equal(hx_test_live_allocs(), 0);
}

static void test_rename(void **state)
{
    static const hx_rename names[] = { { "messages", "input" },
                                       { "max_tokens", "max_output_tokens" },
                                       { NULL, NULL } };
    static const char *const cases[][2] = {
        { "messages", "input" },
        { "messages[3].content", "input[3].content" },
        { "max_tokens: 0", "max_output_tokens: 0" },
        { "messages_x", "messages_x" },
        { "message", "message" },
        { "", "" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        char text[64];

        snprintf(text, sizeof text, "%s", cases[i][0]);
        rename_head(text, sizeof text, names);
        assert_string_equal(text, cases[i][1]);
    }
}

/* ---- blocks ---------------------------------------------------------------- */

typedef struct {
    int n_open, n_piece, n_close;
} seen;

static void on_open(void *ud, int32_t i)
{
    seen *s = ud;

    assert_int_equal(i, s->n_open++);
    assert_int_equal(s->n_close, i);
}

static void on_piece(void *ud, int32_t i, hx_str text)
{
    seen *s = ud;

    assert_int_equal(i, s->n_open - 1);
    assert_true(text.n > 0);
    s->n_piece++;
}

static void on_close(void *ud, int32_t i)
{
    seen *s = ud;

    assert_int_equal(i, s->n_close++);
}

static void answer(hx_blocks *b, const hx_blocks_sink *sink)
{
    static const struct {
        hx_reply_kind kind;
        const char *text;
    } events[] = {
        { HX_REPLY_REASONING, "r" }, { HX_REPLY_REASONING, "s" },
        { HX_REPLY_CONTENT, "c" },   { HX_REPLY_CALL, "f" },
        { HX_REPLY_ARGS, "{" },      { HX_REPLY_ARGS, "}" },
        { HX_REPLY_CALL_END, "" },   { HX_REPLY_CALL, "g" },
        { HX_REPLY_CALL_END, "" },   { HX_REPLY_CONTENT, "d" },
    };

    for (size_t i = 0; i < HX_LEN(events); i++)
        hx_blocks_take(b,
                       &(hx_reply_event) { .kind = events[i].kind,
                                           .text = hx_str_c(events[i].text) },
                       sink);
    hx_blocks_end(b, sink);
}

static void test_blocks(void **state)
{
    seen s = { 0 };
    const hx_blocks_sink sink = { on_open, on_piece, on_close, &s };
    hx_blocks b = { 0 };

    (void)state;
    answer(&b, &sink);
    assert_int_equal(b.n, 5);
    assert_int_equal(s.n_close, 5);
    assert_int_equal(s.n_piece, 6);
    assert_string_equal(b.block[0].text.p, "rs");
    assert_string_equal(b.block[2].name.p, "f");
    assert_string_equal(b.block[2].text.p, "{}");
    assert_int_equal(b.block[3].text.n, 0);
    hx_blocks_free(&b);
    for (int64_t k = 1;; k++) {
        s = (seen) { 0 };
        hx_test_fail_at(k);
        answer(&b, &sink);
        const bool hit = hx_test_fail_at(0) >= k;

        assert_int_equal(b.bad, hit);
        hx_blocks_free(&b);
        if (!hit)
            break;
        assert_in_range(k, 1, 100);
    }
    assert_int_equal(hx_test_live_allocs(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_rename),
        cmocka_unit_test(test_blocks),
    };

    return cmocka_run_group_tests_name("turns", tests, NULL, NULL);
}
