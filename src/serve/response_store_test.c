/* response_store_test.c - what is kept, for how long, and who holds whom. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "response_store.c"

static hx_responses *open_store(void)
{
    hx_responses *s;

    assert_int_equal(hx_response_store_open(&s, NULL), 0);
    return s;
}

static hx_item item(const char *id, const char *json)
{
    return (hx_item) { hx_str_c(id), hx_str_c(json) };
}

/* One whole response: one item in, one out. */
static int keep(hx_responses *s, const char *id, const char *parent, const char *in,
                const char *out)
{
    char in_id[40], out_id[40];

    snprintf(in_id, sizeof in_id, "in_%s", id);
    snprintf(out_id, sizeof out_id, "out_%s", id);
    const hx_item input = item(in_id, in), output = item(out_id, out);
    const int rc = hx_response_store_begin(s, hx_str_c(id), hx_str_c(parent), &input, 1,
                                           HX_STR("{running}"), NULL);
    if (rc == 0)
        hx_response_store_finish(s, hx_str_c(id), &output, 1, HX_STR("<"), HX_STR(">"));
    return rc;
}

static int get_text(int (*fn)(hx_responses *, hx_str, hx_sb *), hx_responses *s,
                    const char *id, char out[200])
{
    hx_sb b = { 0 };
    const int rc = fn(s, hx_str_c(id), &b);

    snprintf(out, 200, "%s", b.p != NULL ? b.p : "");
    hx_sb_free(&b);
    return rc;
}

#define assert_text(fn, s, id, want)                                                     \
    do {                                                                                 \
        char got_[200];                                                                  \
        assert_int_equal(get_text(fn, s, id, got_), 0);                                  \
        assert_string_equal(got_, want);                                                 \
    } while (0)
#define assert_none(fn, s, id)                                                           \
    do {                                                                                 \
        char got_[200];                                                                  \
        assert_int_equal(get_text(fn, s, id, got_), HX_EARG);                            \
    } while (0)

static void test_read(void **state)
{
    hx_responses *s = open_store();
    const hx_item in = item("i", "1");
    char got[200];

    (void)state;
    assert_none(hx_response_store_read, s, "a");
    /* gen only says that it runs; nobody cancels it here */
    assert_int_equal(hx_response_store_begin(s, HX_STR("a"), (hx_str) { NULL, 0 }, &in, 1,
                                             HX_STR("{running}"), (hx_gen *)&in),
                     0);
    assert_text(hx_response_store_read, s, "a", "{running}");
    assert_int_equal(get_text(hx_response_store_history, s, "a", got), HX_EBUSY);
    hx_response_store_finish(s, HX_STR("a"),
                             (hx_item[]) { item("o", "2"), item("p", "3") }, 2,
                             HX_STR("["), HX_STR("]"));
    assert_text(hx_response_store_read, s, "a", "[2,3]");
    assert_text(hx_response_store_history, s, "a", "1,2,3");
    assert_text(hx_response_store_item, s, "i", "1");
    assert_text(hx_response_store_item, s, "p", "3");
    assert_none(hx_response_store_item, s, "q");
    assert_int_equal(hx_response_store_cancel(s, HX_STR("a")), 0);
    assert_int_equal(hx_response_store_remove(s, HX_STR("a")), 0);
    assert_int_equal(hx_response_store_remove(s, HX_STR("a")), HX_EARG);
    assert_none(hx_response_store_read, s, "a");
    hx_response_store_finish(s, HX_STR("a"), NULL, 0, HX_STR("["), HX_STR("]"));
    hx_response_store_close(s);
}

static void test_chain(void **state)
{
    hx_responses *s = open_store();

    (void)state;
    assert_int_equal(keep(s, "a", NULL, "1", "2"), 0);
    assert_int_equal(keep(s, "b", "a", "3", "4"), 0);
    assert_int_equal(keep(s, "c", "b", "5", "6"), 0);
    assert_int_equal(keep(s, "d", "none", "7", "8"), HX_EARG);
    assert_text(hx_response_store_history, s, "c", "1,2,3,4,5,6");
    assert_text(hx_response_store_history, s, "b", "1,2,3,4");
    /* who goes on from it keeps it, though it can no longer be found */
    hx_response_store_remove(s, HX_STR("a"));
    hx_response_store_remove(s, HX_STR("b"));
    assert_none(hx_response_store_read, s, "b");
    assert_text(hx_response_store_history, s, "c", "1,2,3,4,5,6");
    assert_text(hx_response_store_read, s, "c", "<6>");
    assert_true(s->bytes > 0);
    hx_response_store_remove(s, HX_STR("c"));
    assert_int_equal(s->bytes, 0);
    hx_response_store_close(s);
}

static void test_pages(void **state)
{
    static const struct {
        hx_item_page page;
        const char *want;
    } cases[] = {
        { { .limit = 20 },
          "{\"object\":\"list\",\"data\":[1,2,3],\"first_id\":\"in_a\",\"last_id\":\"in_"
          "b\",\"has_more\":false}" },
        { { .limit = 2, .newest_first = true },
          "{\"object\":\"list\",\"data\":[3,2],\"first_id\":\"in_b\",\"last_id\":\"out_"
          "a\","
          "\"has_more\":true}" },
        { { .limit = 2, .newest_first = true, .after = { "out_a", 5 } },
          "{\"object\":\"list\",\"data\":[1],\"first_id\":\"in_a\",\"last_id\":\"in_a\","
          "\"has_more\":false}" },
        { { .limit = 1, .after = { "in_b", 4 } },
          "{\"object\":\"list\",\"data\":[],\"first_id\":null,\"last_id\":null,\"has_"
          "more\":"
          "false}" },
    };
    hx_responses *s = open_store();

    (void)state;
    keep(s, "a", NULL, "1", "2");
    keep(s, "b", "a", "3", "4");
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        hx_sb b = { 0 };

        assert_int_equal(hx_response_store_inputs(s, HX_STR("b"), &cases[i].page, &b), 0);
        assert_string_equal(b.p, cases[i].want);
        hx_sb_free(&b);
    }
    hx_response_store_close(s);
}

static void test_oldest_go_first(void **state)
{
    hx_responses *s = open_store();
    char id[16];

    (void)state;
    s->max = 3;
    keep(s, "a", NULL, "1", "2");
    keep(s, "b", NULL, "1", "2");
    keep(s, "c", NULL, "1", "2");
    assert_text(hx_response_store_read, s, "a", "<2>"); /* used: b is the oldest now */
    keep(s, "d", NULL, "1", "2");
    assert_none(hx_response_store_read, s, "b");
    assert_text(hx_response_store_read, s, "a", "<2>");
    assert_int_equal(s->n, 3);

    s->max = 1000;
    s->max_bytes = 20 * s->bytes / 3;
    for (int i = 0; i < 200; i++) {
        snprintf(id, sizeof id, "x%d", i);
        keep(s, id, i % 2 == 0 ? NULL : "x0", "1", "2");
        assert_true(s->bytes <= s->max_bytes);
    }
    assert_in_range(s->n, 10, 25);
    hx_response_store_close(s);
}

/* Those that run stay: their clients wait for them. */
static void test_running_stay(void **state)
{
    hx_responses *s = open_store();
    const hx_item in = item("i", "1");
    char id[16];

    (void)state;
    s->max = 1;
    for (int i = 0; i < 4; i++) {
        snprintf(id, sizeof id, "r%d", i);
        assert_int_equal(hx_response_store_begin(s, hx_str_c(id), (hx_str) { NULL, 0 },
                                                 &in, 1, HX_STR("{}"), (hx_gen *)&in),
                         0);
    }
    assert_int_equal(s->n, 4);
    for (int i = 0; i < 4; i++) {
        snprintf(id, sizeof id, "r%d", i);
        hx_response_store_finish(s, hx_str_c(id), &in, 1, HX_STR("<"), HX_STR(">"));
    }
    assert_int_equal(s->n, 1);
    assert_text(hx_response_store_read, s, "r3", "<1>");
    hx_response_store_close(s);
}

static void test_no_memory(void **state)
{
    hx_responses *s = open_store();

    (void)state;
    keep(s, "a", NULL, "1", "2");
    for (int64_t k = 1;; k++) {
        hx_test_fail_at(k);
        const int rc = keep(s, "b", "a", "3", "4");
        const bool hit = hx_test_fail_at(0) >= k;

        assert_true(rc == 0 || rc == HX_ENOMEM);
        assert_text(hx_response_store_history, s, "a", "1,2");
        hx_response_store_remove(s, HX_STR("b"));
        if (!hit)
            break;
    }
    hx_response_store_close(s);
    assert_int_equal(hx_test_live_allocs(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read),         cmocka_unit_test(test_chain),
        cmocka_unit_test(test_pages),        cmocka_unit_test(test_oldest_go_first),
        cmocka_unit_test(test_running_stay), cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests_name("response_store", tests, NULL, NULL);
}
