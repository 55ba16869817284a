/* Tests of grammar_tools.c, and of parts in any order: which calls a grammar takes, token
 * by token, on a vocabulary of bytes and markers. That arguments keep to hundreds of
 * schemas is tests/schemas.mjs's, with another judge. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "text/text.h"

enum { FIRST_MARK = 256, N_MARK = 7, END = FIRST_MARK + N_MARK, N_ID };

static const char *const marks[N_MARK] = { "<tool_call>", "</tool_call>", "<arg_key>",
                                           "</arg_key>",  "<arg_value>",  "</arg_value>",
                                           "<|user|>" };
static char byte[256];
static hx_str token[N_ID];

static hx_vocab *vocabulary(bool with_marks)
{
    static bool special[N_ID];
    const int32_t end = END;
    hx_vocab *v;

    for (int32_t i = 0; i < N_ID; i++) {
        if (i < FIRST_MARK)
            byte[i] = (char)i;
        token[i] = i < FIRST_MARK ? (hx_str) { &byte[i], 1 }
                   : i == END     ? HX_STR("<|end|>")
                                  : hx_str_c(marks[i - FIRST_MARK]);
        special[i] = i >= FIRST_MARK && (with_marks || i == END);
    }
    assert_int_equal(hx_vocab_open(&v,
                                   &(hx_vocab_opt) { .bytes = token,
                                                     .special = special,
                                                     .n_token = N_ID,
                                                     .n_vocab = N_ID,
                                                     .end = &end,
                                                     .n_end = 1 },
                                   NULL),
                     0);
    return v;
}

/* Takes text, markers as their tokens; at each place the mask must be what is accepted.
 * -1: refused, else hx_grammar_done(). */
static int feed(hx_grammar *g, const char *text)
{
    hx_matcher m, copy;
    uint32_t mask[N_ID / 32 + 1];

    hx_grammar_start(g, &m);
    while (*text != '\0') {
        int32_t id = (uint8_t)*text;
        size_t n = 1;

        for (int32_t i = 0; i < N_MARK; i++)
            if (strncmp(text, marks[i], strlen(marks[i])) == 0) {
                id = FIRST_MARK + i;
                n = strlen(marks[i]);
            }
        assert_int_equal(hx_grammar_mask(&m, mask, NULL), 0);
        for (int32_t i = 0; i < N_ID; i++) {
            copy = m;
            assert_int_equal(hx_grammar_accept(&copy, i) == 0,
                             mask[i / 32] >> (i % 32) & 1);
        }
        copy = m;
        if (hx_grammar_accept(&m, id) != 0)
            return -1;
        m = copy; /* a draft that was wrong, and again */
        assert_int_equal(hx_grammar_accept(&m, id), 0);
        text += n;
    }
    return (int)hx_grammar_done(&m);
}

#define WEATHER                                                                          \
    "{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":{"         \
    "\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"},\"days\":{"      \
    "\"type\":\"integer\",\"minimum\":1,\"maximum\":9},\"units\":{\"type\":\"string\","  \
    "\"enum\":[\"C\",\"F\"]}},\"required\":[\"city\",\"days\"]}}}"
#define TIME        "{\"name\":\"time\"}"
#define PAIR(k, v)  "<arg_key>" k "</arg_key><arg_value>" v "</arg_value>"
#define CALL(inner) "<tool_call>" inner "</tool_call>"

static void test_calls(void **state)
{
    static const struct {
        const char *spec, *text;
        int want;
    } cases[] = {
#define MUST                                                                             \
    "{\"format\":\"glm\",\"choice\":\"required\",\"tools\":[" WEATHER "," TIME "]}"
#define ONE                                                                              \
    "{\"format\":\"glm\",\"choice\":\"required\",\"parallel\":false,\"tools\":[" TIME "]}"
#define AUTO "{\"format\":\"glm\",\"choice\":\"auto\",\"tools\":[" TIME "]}"
#define DOC                                                                              \
    "{\"format\":\"glm\",\"choice\":\"auto\",\"content\":{\"kind\":5,\"source\":"        \
    "\"[\\\"yes\\\"]\"},\"tools\":[" TIME "]}"
        { MUST, CALL("time"), HX_GRAMMAR_MAY_END },
        { MUST, CALL("time") "\n" CALL("time"), HX_GRAMMAR_MAY_END },
        { MUST, CALL("weather" PAIR("city", "Rome") PAIR("days", "3")),
          HX_GRAMMAR_MAY_END },
        { MUST, CALL("weather" PAIR("days", "3") PAIR("city", "")), HX_GRAMMAR_MAY_END },
        { MUST,
          CALL("weather\n" PAIR("days", "3") "\n" PAIR("units", "C")
                   PAIR("city", "1 < 2 </tool>")),
          HX_GRAMMAR_MAY_END },
        { MUST, CALL("weather" PAIR("city", "Rome")), -1 },
        { MUST, CALL("weather" PAIR("city", "Rome") PAIR("city", "Bonn")), -1 },
        { MUST, CALL("weather" PAIR("city", "Rome") PAIR("days", "10")), -1 },
        { MUST, CALL("weather" PAIR("city", "Rome") PAIR("days", "\"3\"")), -1 },
        { MUST, CALL("weather" PAIR("city", "R") PAIR("units", "K")), -1 },
        { MUST, CALL("weather" PAIR("town", "Rome")), -1 },
        { MUST, CALL("weath"), -1 },
        { MUST, CALL("time" PAIR("a", "b")), -1 },
        { MUST, "Hello", -1 },
        { MUST, "<tool_call>weather<arg_key>city</arg_key><arg_value>a<|user|>", -1 },
        { MUST, "<tool_call>weather<arg_key>city</arg_key><arg_value>a<tool_call>", -1 },
        { ONE, CALL("time"), HX_GRAMMAR_MUST_END },
        { ONE, CALL("time") CALL("time"), -1 },
        { AUTO, CALL("time"), HX_GRAMMAR_MUST_END },
        { DOC, CALL("time"), HX_GRAMMAR_MAY_END },
        { DOC, "yes", HX_GRAMMAR_MUST_END },
        { DOC, "no", -1 },
    };
    hx_vocab *v = vocabulary(true);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        hx_grammar *g;
        hx_err err = { 0 };

        if (hx_grammar_open(&g, v, HX_GRAMMAR_TOOLS, hx_str_c(cases[i].spec), NULL,
                            &err) != 0)
            fail_msg("%s: %s", cases[i].spec, err.msg);
        if (feed(g, cases[i].text) != cases[i].want)
            fail_msg("%s: %d, expected %d", cases[i].text, feed(g, cases[i].text),
                     cases[i].want);
        hx_grammar_close(g);
    }
    hx_vocab_close(v);
}

/* Schemas that cannot be kept to: an error of strict tools, freedom of others. */
static void test_schemas_we_lack(void **state)
{
    static const struct {
        const char *tool;
        int rc;
        const char *has;
    } cases[] = {
        { "{\"name\":\"f\",\"parameters\":{\"not\":{}}}", 0, NULL },
        { "{\"name\":\"f\",\"parameters\":{\"type\":\"array\"}}", 0, NULL },
        { "{\"name\":\"f\",\"parameters\":{\"anyOf\":[{},{}]}}", 0, NULL },
        { "{\"name\":\"f\",\"parameters\":{\"$ref\":\"#/nowhere\"}}", 0, NULL },
        { "{\"name\":\"f\",\"parameters\":{\"properties\":{\"a\":{\"pattern\":\"(((\"}}}"
          "}",
          0, NULL },
        { "{\"name\":\"f\",\"parameters\":{\"properties\":{\"a\":{\"type\":\"array\","
          "\"items\":{\"pattern\":\"^((a{1,999}){1,999}){1,999}$\"}}}}}",
          0, NULL },
        { "{\"name\":\"f\",\"strict\":true,\"parameters\":{\"not\":{}}}", HX_EUNSUP,
          "tool \"f\": schema" },
        { "{\"name\":\"f\",\"strict\":true,\"parameters\":{\"properties\":{\"a\":{"
          "\"pattern\":\"^((a{1,999}){1,999}){1,999}$\"}}}}",
          HX_ELIMIT, "tool \"f\": " },
        { "{\"parameters\":{}}", HX_EFORMAT, "no name" },
    };
    hx_vocab *v = vocabulary(true);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        hx_grammar *g = NULL;
        hx_err err = { 0 };
        hx_sb spec = { 0 };

        hx_sb_printf(&spec, "{\"format\":\"glm\",\"choice\":\"auto\",\"tools\":[%s]}",
                     cases[i].tool);
        if (hx_grammar_open(&g, v, HX_GRAMMAR_TOOLS, (hx_str) { spec.p, spec.n }, NULL,
                            &err) != cases[i].rc ||
            (cases[i].has != NULL && strstr(err.msg, cases[i].has) == NULL))
            fail_msg("%s: %s", cases[i].tool, err.msg);
        if (cases[i].rc == 0)
            assert_int_equal(
                feed(g, CALL("f" PAIR("x", "1") PAIR("y_2", "a b") PAIR("x", ""))),
                HX_GRAMMAR_MUST_END);
        hx_grammar_close(g);
        hx_sb_free(&spec);
    }
    hx_vocab_close(v);
}

/* A format with a JSON object, one without calls, a vocabulary without markers. */
static void test_formats(void **state)
{
    hx_vocab *v = vocabulary(true), *bare = vocabulary(false);
    hx_err err = { 0 };
    hx_grammar *g;

    (void)state;
    assert_int_equal(hx_grammar_open(&g, v, HX_GRAMMAR_TOOLS,
                                     HX_STR("{\"format\":\"hermes\",\"choice\":\"auto\","
                                            "\"tools\":[" WEATHER "," TIME "]}"),
                                     NULL, &err),
                     0);
    assert_int_equal(
        feed(g, CALL("\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", "
                     "\"days\": 3}}\n")),
        HX_GRAMMAR_MUST_END);
    assert_int_equal(feed(g, CALL("{\"name\":\"time\",\"arguments\":{\"a\":[]}}")),
                     HX_GRAMMAR_MUST_END);
    assert_int_equal(feed(g, "<tool_call>{\"name\":\"when"), -1);
    hx_grammar_close(g);
    assert_int_equal(hx_grammar_open(&g, v, HX_GRAMMAR_TOOLS,
                                     HX_STR("{\"format\":\"plain\",\"choice\":\"auto\","
                                            "\"tools\":[" TIME "]}"),
                                     NULL, &err),
                     HX_EUNSUP);
    assert_int_equal(
        hx_grammar_open(&g, bare, HX_GRAMMAR_TOOLS, HX_STR(MUST), NULL, &err), HX_EUNSUP);
    assert_int_equal(
        hx_grammar_open(&g, NULL, HX_GRAMMAR_TOOLS, HX_STR(MUST), NULL, &err), HX_EUNSUP);
    assert_int_equal(hx_grammar_open(&g, v, HX_GRAMMAR_TOOLS,
                                     HX_STR("{\"format\":\"glm\",\"tools\":[]}"), NULL,
                                     &err),
                     HX_EFORMAT);
    hx_vocab_close(v);
    hx_vocab_close(bare);
}

/* 31 arguments in any order, 40 in the schema's. */
static void test_many_arguments(void **state)
{
    hx_vocab *v = vocabulary(true);

    (void)state;
    for (int n = 31; n <= 40; n += 9) {
        hx_sb spec = { 0 }, up = { 0 }, down = { 0 };
        hx_grammar *g;
        hx_err err = { 0 };

        hx_sb_str(&spec,
                  "{\"format\":\"glm\",\"choice\":\"auto\",\"tools\":[{\"name\":\"f\","
                  "\"parameters\":{\"required\":[\"p0\",\"p30\"],\"properties\":{");
        for (int i = 0; i < n; i++)
            hx_sb_printf(&spec, "%s\"p%d\":{\"type\":\"boolean\"}", i > 0 ? "," : "", i);
        hx_sb_str(&spec, "}}}]}");
        hx_sb_str(&up, "<tool_call>f");
        hx_sb_str(&down, "<tool_call>f");
        for (int i = 0; i < n; i++) {
            hx_sb_printf(&up, PAIR("p%d", "true"), i);
            hx_sb_printf(&down, PAIR("p%d", "true"), n - 1 - i);
        }
        hx_sb_str(&up, "</tool_call>");
        hx_sb_str(&down, "</tool_call>");
        if (hx_grammar_open(&g, v, HX_GRAMMAR_TOOLS, (hx_str) { spec.p, spec.n }, NULL,
                            &err) != 0)
            fail_msg("%s", err.msg);
        assert_int_equal(feed(g, up.p), HX_GRAMMAR_MUST_END);
        assert_int_equal(feed(g, down.p), n == 31 ? (int)HX_GRAMMAR_MUST_END : -1);
        assert_int_equal(feed(g, CALL("f" PAIR("p0", "true"))), -1);
        hx_grammar_close(g);
        hx_sb_free(&spec);
        hx_sb_free(&up);
        hx_sb_free(&down);
    }
    hx_vocab_close(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_schemas_we_lack),
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_many_arguments),
    };

    return cmocka_run_group_tests_name("grammar_tools", tests, NULL, NULL);
}
