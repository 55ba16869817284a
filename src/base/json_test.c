/* json_test.c - parsing and writing JSON. The judge is Python's json module: what it
 * refuses we refuse, and what it prints hx_json_write_python() prints. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <locale.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "base/json.c"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED true
#endif
#endif
#ifndef SANITIZED
#define SANITIZED false
#endif

static hx_json *parse(const char *text)
{
    hx_json *j;
    hx_err err = { 0 };

    if (hx_json_parse(&j, hx_str_c(text), 0, &err) != 0)
        fail_msg("%s: %s", text, err.msg);
    return j;
}

/* ---- against Python -------------------------------------------------- */

enum { MAX_FIELD = 5 };

typedef struct {
    char *p; /* one line, decoded in place */
    hx_str field[MAX_FIELD];
    int n;
} test_case;

static int nibble(char c)
{
    return c <= '9' ? c - '0' : c - 'a' + 10;
}

/* "T 5b5d -" gives the fields "T", "[]", "". */
static void split(test_case *c, char *line)
{
    c->n = 0;
    for (char *p = line; *p != '\0' && *p != '\n' && c->n < MAX_FIELD; c->n++) {
        const size_t len = strcspn(p, " \n");
        size_t n = 0;

        if (c->n == 0)
            n = len;
        else if (*p != '-')
            for (; n < len / 2; n++)
                p[n] = (char)(nibble(p[2 * n]) << 4 | nibble(p[2 * n + 1]));
        c->field[c->n] = (hx_str) { p, n };
        p += len;
        p += *p == ' ';
    }
}

static void expect(const test_case *c, const hx_sb *got, int field)
{
    assert_false(got->bad);
    if (!hx_str_eq((hx_str) { got->p, got->n }, c->field[field]))
        fail_msg("%.*s\n got %.*s\nwant %.*s", (int)c->field[1].n, c->field[1].p,
                 (int)got->n, got->p, (int)c->field[field].n, c->field[field].p);
}

static void check_text(const test_case *c)
{
    static const struct {
        bool ascii;
        int indent;
    } style[] = { { true, 0 }, { false, 0 }, { false, 2 } };
    hx_json *j, *again;
    hx_err err = { 0 };
    hx_sb b = { 0 }, twice = { 0 };

    if (hx_json_parse(&j, c->field[1], 0, &err) != 0)
        fail_msg("%.*s: %s", (int)c->field[1].n, c->field[1].p, err.msg);
    for (int i = 0; i < 3; i++) {
        hx_json_write_python(&b, j, style[i].ascii, style[i].indent);
        expect(c, &b, 2 + i);
        hx_sb_free(&b);
    }
    hx_json_write(&b, j);
    assert_int_equal(hx_json_parse(&again, (hx_str) { b.p, b.n }, 0, NULL), 0);
    hx_json_write_python(&twice, again, true, 0);
    expect(c, &twice, 2);
    hx_sb_free(&b);
    hx_sb_free(&twice);
    hx_json_free(again);
    hx_json_free(j);
}

static void check_refused(const test_case *c)
{
    hx_json *j;
    hx_err err = { 0 };

    if (hx_json_parse(&j, c->field[1], 0, &err) != HX_EFORMAT || j != NULL)
        fail_msg("taken, Python refuses: %.*s", (int)c->field[1].n, c->field[1].p);
    assert_int_equal(err.code, HX_EFORMAT);
    assert_true(hx_utf8_ok(err.msg, strlen(err.msg)));
}

static void check_repr(const test_case *c)
{
    hx_sb b = { 0 };
    uint64_t bits = 0;
    double v;

    for (size_t i = 0; i < 8; i++)
        bits = bits << 8 | (unsigned char)c->field[1].p[i];
    memcpy(&v, &bits, 8);
    hx_json_put_double(&b, v);
    expect(c, &b, 2);
    hx_sb_free(&b);
}

static void check_string(const test_case *c)
{
    hx_sb b = { 0 };

    put_str_python(&b, c->field[1], true);
    expect(c, &b, 2);
    hx_sb_free(&b);
    hx_json_put_str(&b, c->field[1]);
    expect(c, &b, 3);
    hx_sb_free(&b);
}

static void test_python(void **state)
{
    FILE *f = popen("python3 tests/data/json/cases.py 2>/dev/null", "r");
    int n[128] = { 0 };
    size_t cap = 0;
    test_case c = { 0 };

    (void)state;
    assert_non_null(f);
    while (getline(&c.p, &cap, f) > 0) {
        split(&c, c.p);
        n[c.p[0] & 127]++;
        switch (c.p[0]) {
        case 'T':
            check_text(&c);
            break;
        case 'R':
            check_refused(&c);
            break;
        case 'D':
            check_repr(&c);
            break;
        case 'S':
            check_string(&c);
            break;
        default:
            fail_msg("cases.py: line starts with %c", c.p[0]);
        }
    }
    free(c.p);
    if (pclose(f) != 0) {
        print_message("SKIP test_python: python3 is not installed\n");
        skip();
    }
    assert_true(n['T'] > 1500 && n['R'] > 4000 && n['D'] > 40000 && n['S'] == 2000);
}

/* ---- limits ---------------------------------------------------------- */

static void test_errors(void **state)
{
    static const struct {
        const char *text;
        int depth;
        const char *says;
    } bad[] = {
        { "", 0, "byte 0" },
        { " \n", 0, "byte 0" },
        { "[1,]", 0, "byte 3" },
        { "{\"a\":1,}", 0, "byte 7" },
        { "[1 2]", 0, "byte 3" },
        { "{\"a\" 1}", 0, "byte 5" },
        { "{} {}", 0, "byte 3" },
        { "[1]x", 0, "byte 3" },
        { "[[1]", 0, "byte 4: unexpected end" },
        { "[01]", 0, "byte 1: malformed number" },
        { "[1.]", 0, "byte 1: malformed number" },
        { "[\"a\tb\"]", 0, "byte 3: control character" },
        { "[\"a\xff\"]", 0, "byte 3: not UTF-8" },
        { "[\"a\xe4\xb8\"]", 0, "byte 3: not UTF-8" },
        { "[\"\\x\"]", 0, "byte 2: unknown escape" },
        { "[NaN]", 0, "byte 1" },
        { "[1]//x", 0, "byte 3" },
        { "[123456789012345678901 1]", 0, "byte 23" },
        { "[1e999]", 0, "1e999" },
        { "{\"a\\u0000b\" : 1}", 0, "NUL" },
        { "[[[1]]]", 2, "byte 2: nested too deep" },
        { "{\"a\":{\"a\":[]}}", 2, "byte 10: nested too deep" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        hx_err err = { 0 };
        hx_json *j = NULL;

        assert_int_equal(hx_json_parse(&j, hx_str_c(bad[i].text), bad[i].depth, &err),
                         HX_EFORMAT);
        assert_null(j);
        if (strstr(err.msg, bad[i].says) == NULL)
            fail_msg("%s: \"%s\", expected \"%s\"", bad[i].text, err.msg, bad[i].says);
    }
}

/* Every byte as the only one of a string: RFC 8259, section 7. */
static void test_string_bytes(void **state)
{
    (void)state;
    for (int c = 0; c < 256; c++) {
        const char text[3] = { '"', (char)c, '"' };
        const bool good = c >= 0x20 && c < 0x80 && c != '"' && c != '\\';
        hx_json *j;

        assert_int_equal(hx_json_parse(&j, (hx_str) { text, 3 }, 0, NULL),
                         good ? 0 : HX_EFORMAT);
        hx_json_free(j);
    }
}

static void test_depth(void **state)
{
    hx_json *j;

    (void)state;
    for (int limit = 1; limit < 200; limit++) {
        hx_sb b = { 0 };

        for (int i = 0; i < limit; i++)
            hx_sb_str(&b, "[");
        hx_sb_str(&b, "1");
        for (int i = 0; i < limit; i++)
            hx_sb_str(&b, "]");
        assert_int_equal(hx_json_parse(&j, (hx_str) { b.p, b.n }, limit, NULL), 0);
        hx_json_free(j);
        if (limit > 1)
            assert_int_equal(hx_json_parse(&j, (hx_str) { b.p, b.n }, limit - 1, NULL),
                             HX_EFORMAT);
        if (limit == DEFAULT_DEPTH || limit == DEFAULT_DEPTH + 1)
            assert_int_equal(hx_json_parse(&j, (hx_str) { b.p, b.n }, 0, NULL),
                             limit == DEFAULT_DEPTH ? 0 : HX_EFORMAT);
        if (limit == DEFAULT_DEPTH)
            hx_json_free(j);
        hx_sb_free(&b);
    }
}

/* The text is not NUL-terminated and ends where it ends. */
static void test_borrowed(void **state)
{
    static const char digits[] = "12345678901234567890123";
    hx_json *j;

    (void)state;
    for (size_t n = 1; n < sizeof(digits); n++) {
        char *exact = hx_alloc(n); /* so that a sanitizer sees a read past it */

        memcpy(exact, digits, n);
        assert_int_equal(hx_json_parse(&j, (hx_str) { exact, n }, 0, NULL), 0);
        assert_int_equal(hx_json_kind(j), n <= 20 ? HX_JSON_INT : HX_JSON_DOUBLE);
        hx_json_free(j);
        hx_free(exact);
    }
}

/* ---- access ---------------------------------------------------------- */

static void test_access(void **state)
{
    hx_json *j =
        parse("{\"n\":null,\"b\":true,\"i\":-7,\"d\":2.5,\"w\":3e2,\"s\":\"a\\u0000b\","
              "\"a\":[1,[2]],\"u\":18446744073709551615,\"i\":8}");
    hx_str key;

    (void)state;
    assert_int_equal(hx_json_kind(j), HX_JSON_OBJECT);
    assert_int_equal(hx_json_len(j), 8);
    assert_true(hx_json_has(j, "n"));
    assert_false(hx_json_has(j, "x"));
    assert_null(hx_json_get(j, "n"));
    assert_int_equal(hx_json_kind(hx_json_get(j, "n")), HX_JSON_NULL);
    assert_true(hx_json_bool(hx_json_get(j, "b"), false));
    assert_true(hx_json_bool(hx_json_get(j, "i"), true));
    assert_int_equal(hx_json_int(hx_json_get(j, "i"), 0), 8); /* the last one */
    assert_int_equal(hx_json_int(hx_json_get(j, "d"), -1), -1);
    assert_int_equal(hx_json_int(hx_json_get(j, "w"), -1), 300);
    assert_int_equal(hx_json_int(hx_json_get(j, "u"), -1), -1);
    assert_true(hx_json_num(hx_json_get(j, "u"), 0) == 0x1p64);
    assert_true(hx_json_num(hx_json_get(j, "d"), 0) == 2.5);
    assert_true(hx_json_num(hx_json_get(j, "i"), 0) == 8);
    assert_true(hx_json_num(hx_json_get(j, "s"), 9) == 9);
    assert_true(hx_str_eq(hx_json_str(hx_json_get(j, "s")), HX_STR("a\0b")));
    assert_null(hx_json_str(hx_json_get(j, "i")).p);
    assert_int_equal(hx_json_int(hx_json_at(hx_json_at(hx_json_get(j, "a"), 1), 0), 0),
                     2);
    assert_null(hx_json_at(hx_json_get(j, "a"), 2));
    assert_int_equal(hx_json_int(hx_json_member(j, 2, &key), 0), 8);
    assert_true(hx_str_is(key, "i"));
    assert_null(hx_json_member(j, 8, &key));
    assert_null(key.p);
    assert_null(hx_json_get(hx_json_get(j, "a"), "n"));
    assert_null(hx_json_at(j, 0));
    assert_string_equal(hx_json_kind_name(hx_json_get(j, "d")), "number");
    assert_string_equal(hx_json_kind_name(NULL), "null");
    assert_int_equal(hx_json_len(NULL), 0);
    assert_null(hx_json_get(NULL, "a"));
    hx_json_free(j);
    hx_json_free(NULL);
}

static void test_integers(void **state)
{
    static const struct {
        const char *text;
        int64_t value;
        hx_json_type kind;
    } edge[] = {
        { "9223372036854775807", INT64_MAX, HX_JSON_INT },
        { "-9223372036854775808", INT64_MIN, HX_JSON_INT },
        { "9223372036854775808", 42, HX_JSON_INT },
        { "18446744073709551615", 42, HX_JSON_INT },
        { "18446744073709551616", 42, HX_JSON_DOUBLE },
        { "-9223372036854775809", 42, HX_JSON_DOUBLE },
        { "9007199254740993", 9007199254740993, HX_JSON_INT },
        { "9.0e15", 9000000000000000, HX_JSON_DOUBLE },
        { "1e19", 42, HX_JSON_DOUBLE },
        { "-0", 0, HX_JSON_INT },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(edge); i++) {
        hx_json *j = parse(edge[i].text);

        assert_true(hx_json_int(j, 42) == edge[i].value);
        assert_int_equal(hx_json_kind(j), edge[i].kind);
        hx_json_free(j);
    }
}

/* Sizes on both sides of the index, where one member replaces another as well. */
static void test_members(void **state)
{
    (void)state;
    for (int n = 1; n < 2000; n += n < 40 ? 1 : 331) {
        hx_sb b = { 0 };
        hx_json *j;
        hx_str key;
        char want[24];

        for (int i = 0; i < n; i++)
            hx_sb_printf(&b, "%s\"k%d\":%d", i == 0 ? "{\"k0\":-1," : ",", i, i);
        hx_sb_str(&b, "}");
        j = parse(b.p);
        assert_int_equal(hx_json_len(j), n);
        for (int i = 0; i < n; i++) {
            snprintf(want, sizeof(want), "k%d", i);
            assert_int_equal(hx_json_int(hx_json_member(j, (size_t)i, &key), -1), i);
            assert_true(hx_str_is(key, want));
            assert_int_equal(hx_json_int(hx_json_get(j, want), -1), i);
        }
        hx_json_free(j);
        hx_sb_free(&b);
    }
    assert_int_equal(hx_test_live_allocs(), 0);
}

/* ---- writing --------------------------------------------------------- */

static void test_write(void **state)
{
    static const char text[] =
        "{\"a\":[1,2.50,1E2,-0.0,true,null,{}],\"b\\n\":\"\\u00e9\\\"\","
        "\"c\":[],\"d\":12345678901234567890123}";
    static const char want[] =
        "{\"a\":[1,2.50,1E2,-0.0,true,null,{}],\"b\\n\":\"\xc3\xa9\\\"\","
        "\"c\":[],\"d\":12345678901234567890123}";
    hx_json *j = parse(text);
    hx_sb b = { 0 }, small = { .max = 10 };

    (void)state;
    hx_json_write(&b, j);
    assert_string_equal(b.p, want);
    hx_json_write(&small, j);
    assert_true(small.bad && small.n <= 10);
    hx_sb_free(&b);
    hx_sb_free(&small);
    hx_json_free(j);
    hx_json_put_double(&b, INFINITY);
    hx_json_put_double(&b, NAN);
    assert_string_equal(b.p, "nullnull");
    hx_sb_free(&b);
}

/* Chooses a locale with a decimal comma, made for this if none is installed. */
static bool set_comma(void)
{
    char dir[] = "/tmp/hoist-json-XXXXXX", command[128];
    bool ok;

    if (setlocale(LC_NUMERIC, "de_DE.UTF-8") != NULL)
        return true;
    if (mkdtemp(dir) == NULL)
        return false;
    snprintf(command, sizeof(command), "localedef -i de_DE -f UTF-8 %s/x 2>/dev/null",
             dir);
    ok = system(command) == 0 && setenv("LOCPATH", dir, 1) == 0 &&
         setlocale(LC_NUMERIC, "x") != NULL;
    unsetenv("LOCPATH");
    snprintf(command, sizeof(command), "rm -r %s", dir);
    return system(command) == 0 && ok;
}

/* A program around the library may have chosen such a locale. */
static void test_locale(void **state)
{
    char comma[8];
    hx_sb b = { 0 };
    hx_json *j;

    (void)state;
    if (!set_comma()) {
        print_message("SKIP test_locale: no locale with a decimal comma\n");
        skip();
    }
    snprintf(comma, sizeof(comma), "%.1f", 0.5);
    assert_string_equal(comma, "0,5");
    j = parse("[0.5,1e-7]");
    assert_true(hx_json_num(hx_json_at(j, 0), 0) == 0.5);
    hx_json_write_python(&b, j, true, 0);
    setlocale(LC_NUMERIC, "C");
    assert_string_equal(b.p, "[0.5, 1e-07]");
    hx_sb_free(&b);
    hx_json_free(j);
}

static void test_failing_memory(void **state)
{
    hx_sb b = { 0 };
    int64_t n;

    (void)state;
    for (int i = 0; i < 100; i++)
        hx_sb_printf(&b, "%s\"%d\":[%d]", i == 0 ? "{" : ",", i, i);
    hx_sb_str(&b, "}");
    hx_test_fail_at(0);
    hx_json_free(parse(b.p));
    n = hx_test_fail_at(0);
    assert_true(n > 0);
    for (int64_t k = 1; k <= n; k++) {
        hx_json *j;
        hx_err err = { 0 };

        hx_test_fail_at(k);
        assert_int_equal(hx_json_parse(&j, (hx_str) { b.p, b.n }, 0, &err), HX_ENOMEM);
        assert_null(j);
    }
    hx_test_fail_at(0);
    hx_sb_free(&b);
    assert_int_equal(hx_test_live_allocs(), 0);
}

static size_t address_bytes(void)
{
    size_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");

    assert_non_null(f);
    assert_int_equal(fscanf(f, "%zu", &pages), 1);
    fclose(f);
    return pages * 4096;
}

/* Memory that json-c asks for itself: a text is read whole, or is an error. */
static void test_no_memory(void **state)
{
    enum { N = 3000000 };
    struct rlimit all, few;
    hx_sb b = { 0 };
    int64_t n_read = 0, n_not = 0;

    (void)state;
    if (SANITIZED) {
        printf("SKIP json: a sanitizer's memory has no limit\n");
        skip();
    }
    hx_sb_str(&b, "{\"a\":[\"");
    for (size_t i = 0; i < N; i++)
        hx_sb_char(&b, (char)('a' + i % 26));
    hx_sb_str(&b, "\",null]}");
    assert_false(b.bad);
    mallopt(M_MMAP_THRESHOLD, 1 << 17); /* what is freed leaves the process */
    assert_int_equal(getrlimit(RLIMIT_AS, &all), 0);
    for (size_t more = 0; more < 3 * N; more += N / 30) {
        hx_json *j = NULL;
        int rc;

        few = all;
        few.rlim_cur = address_bytes() + more;
        assert_int_equal(setrlimit(RLIMIT_AS, &few), 0);
        rc = hx_json_parse(&j, (hx_str) { b.p, b.n }, 0, NULL);
        assert_int_equal(setrlimit(RLIMIT_AS, &all), 0);
        n_read += rc == 0;
        n_not += rc == HX_ENOMEM;
        if (rc == 0)
            assert_int_equal(hx_json_str(hx_json_at(hx_json_get(j, "a"), 0)).n, N);
        hx_json_free(j);
    }
    hx_sb_free(&b);
    assert_true(n_read > 0 && n_not > 0 && n_read + n_not == 90);
}

/* One tree, many readers: nothing in it may change. Run under a thread sanitizer. */
static void *read_all(void *tree)
{
    hx_sb b = { 0 };
    size_t n;

    hx_json_write(&b, tree);
    hx_json_write_python(&b, tree, true, 1);
    for (size_t i = 0; i < hx_json_len(tree); i++)
        hx_json_int(hx_json_member(tree, i, NULL), 0);
    n = b.n;
    hx_sb_free(&b);
    return (void *)(uintptr_t)n;
}

static void test_threads(void **state)
{
    hx_json *j =
        parse("{\"a\":[1,2.5,\"x\",true],\"b\":{\"c\":18446744073709551616},\"d\":0.1}");
    pthread_t thread[4];
    void *n[4];

    (void)state;
    for (size_t i = 0; i < HX_LEN(thread); i++)
        assert_int_equal(pthread_create(&thread[i], NULL, read_all, j), 0);
    for (size_t i = 0; i < HX_LEN(thread); i++)
        pthread_join(thread[i], &n[i]);
    for (size_t i = 1; i < HX_LEN(thread); i++)
        assert_ptr_equal(n[i], n[0]);
    hx_json_free(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_memory), /* before threads, whose arenas have room */
        cmocka_unit_test(test_python),    cmocka_unit_test(test_errors),
        cmocka_unit_test(test_depth),     cmocka_unit_test(test_borrowed),
        cmocka_unit_test(test_access),    cmocka_unit_test(test_integers),
        cmocka_unit_test(test_members),   cmocka_unit_test(test_write),
        cmocka_unit_test(test_locale),    cmocka_unit_test(test_failing_memory),
        cmocka_unit_test(test_threads),   cmocka_unit_test(test_string_bytes),
    };

    return cmocka_run_group_tests_name("json", tests, NULL, NULL);
}
