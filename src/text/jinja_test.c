/* jinja_test.c - the template interpreter (jinja, jinja_parse, jinja_val) against
 * jinja2's own output (renders.json and units.json, made by tests/make_jinja_vectors.py),
 * the published renders of GLM-5.3-Flash, and tables of errors, limits and marks. */
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "text/text.h"

#define DATA "tests/data/jinja/"

static const hx_jinja_opt AT = { .now_s = 1767596889 }; /* 2026-01-05 07:08:09 */

static char *read_all(const char *path, size_t *n)
{
    hx_err err = { 0 };
    char *p = NULL;

    if (hx_file_read(path, (size_t)1 << 26, &p, n, &err) != 0)
        fail_msg("%s", err.msg);
    return p;
}

static hx_json *read_json(const char *path)
{
    hx_err err = { 0 };
    hx_json *j = NULL;
    size_t n;
    char *p = read_all(path, &n);

    if (hx_json_parse(&j, (hx_str) { p, n }, 0, &err) != 0)
        fail_msg("%s: %s", path, err.msg);
    hx_free(p);
    return j;
}

static hx_jinja *open_file(const char *path, hx_err *err)
{
    hx_jinja *t;
    size_t n;
    char *p = read_all(path, &n);

    hx_jinja_open(&t, (hx_str) { p, n }, path, err);
    hx_free(p);
    return t;
}

/* Compiles and runs; both sinks are made empty first. */
static int run_text(hx_str source, const hx_json *vars, const hx_jinja_opt *opt,
                    hx_sb *text, hx_sb *user, hx_err *err)
{
    hx_jinja *t;
    int rc = hx_jinja_open(&t, source, "t", err);

    text->n = 0;
    if (user != NULL)
        user->n = 0;
    if (rc == 0)
        rc = hx_jinja_run(t, vars, opt, text, user, err);
    hx_jinja_close(t);
    return rc;
}

static bool same(const hx_sb *b, hx_str want)
{
    return b->n == want.n && (b->n == 0 || memcmp(b->p, want.p, b->n) == 0);
}

/* ---- published renders ----------------------------------------------- */

/* {"messages": …, "tools": …, and the members of kwargs} */
static hx_json *case_vars(const hx_json *c)
{
    const hx_json *kwargs = hx_json_get(c, "kwargs");
    hx_sb b = { 0 };
    hx_json *vars = NULL;
    hx_err err = { 0 };
    hx_str key;

    hx_sb_str(&b, "{\"messages\":");
    hx_json_write(&b, hx_json_get(c, "messages"));
    hx_sb_str(&b, ",\"tools\":");
    hx_json_write(&b, hx_json_get(c, "tools"));
    for (size_t i = 0; i < hx_json_len(kwargs); i++) {
        const hx_json *v = hx_json_member(kwargs, i, &key);
        hx_sb_char(&b, ',');
        hx_json_put_str(&b, key);
        hx_sb_char(&b, ':');
        hx_json_write(&b, v);
    }
    hx_sb_char(&b, '}');
    assert_false(b.bad);
    if (hx_json_parse(&vars, (hx_str) { b.p, b.n }, 0, &err) != 0)
        fail_msg("%s", err.msg);
    hx_sb_free(&b);
    return vars;
}

static size_t check_cases(const char *template, const hx_json *cases, const char *other)
{
    hx_err err = { 0 };
    hx_jinja *t = open_file(template, &err);
    hx_sb text = { 0 };

    if (t == NULL)
        fail_msg("%s", err.msg);
    for (size_t i = 0; i < hx_json_len(cases); i++) {
        const hx_json *c = hx_json_at(cases, i);
        hx_json *vars = case_vars(c);
        const hx_str want =
            hx_json_str(hx_json_get(c, hx_json_has(c, other) ? other : "prompt"));
        text.n = 0;
        if (hx_jinja_run(t, vars, &AT, &text, NULL, &err) != 0)
            fail_msg("%s: %s", hx_json_str(hx_json_get(c, "name")).p, err.msg);
        if (!same(&text, want))
            fail_msg("%s:\n%.*s\nexpected:\n%.*s", hx_json_str(hx_json_get(c, "name")).p,
                     (int)text.n, text.p, (int)want.n, want.p);
        hx_json_free(vars);
    }
    hx_sb_free(&text);
    hx_jinja_close(t);
    return hx_json_len(cases);
}

static void test_glm_renders(void **state)
{
    hx_json *glm = read_json(DATA "glm5_next_vectors.json");
    hx_json *demo = read_json(DATA "demo_vectors.json");
    const hx_json *cases = hx_json_get(glm, "cases");

    (void)state;
    assert_int_equal(check_cases(DATA "glm5_next.jinja", cases, "prompt"), 33);
    assert_int_equal(
        check_cases(DATA "glm5_next_20260827.jinja", cases, "prompt_20260827"), 33);
    assert_int_equal(check_cases(DATA "glm5_next.jinja", demo, "prompt"), 36);
    hx_json_free(glm);
    hx_json_free(demo);
}

/* ---- other models' templates ----------------------------------------- */

typedef struct {
    int agree, raise, refused, differ;
} tally;

/* want: the text, or a list of one where jinja2 raises: the template's own complaint or
 * "". */
static void compare(const char *what, hx_str name, int rc, const hx_err *err,
                    const hx_sb *text, const hx_json *want, tally *n)
{
    const bool raises = hx_json_kind(want) != HX_JSON_STRING;
    const hx_str w = hx_json_str(raises ? hx_json_at(want, 0) : want);
    const bool said = memmem(err->msg, strlen(err->msg), w.p, HX_MIN(w.n, 150)) != NULL;

    if (raises && rc < 0 && (w.n == 0 || (rc == HX_EFORMAT && said))) {
        n->raise++;
    } else if (!raises && rc == 0 && same(text, w)) {
        n->agree++;
    } else if (!raises && rc == HX_EUNSUP) {
        n->refused++;
    } else {
        n->differ++;
        print_error("%s %.*s: %s\n got %.*s\nwant %.*s%s\n", what, (int)name.n, name.p,
                    rc != 0 ? err->msg : "", (int)HX_MIN(text->n, 600),
                    text->p ? text->p : "", (int)HX_MIN(w.n, 600), w.p,
                    raises ? " (error)" : "");
    }
}

static void test_templates(void **state)
{
    hx_json *all = read_json(DATA "renders.json");
    const hx_json *renders = hx_json_get(all, "renders"),
                  *texts = hx_json_get(all, "texts");
    const hx_json *conversations = hx_json_get(all, "conversations");
    tally n = { 0 };
    hx_sb text = { 0 };
    hx_str file, name;
    char path[256];

    (void)state;
    assert_int_equal(hx_json_len(renders), 55);
    for (size_t i = 0; i < hx_json_len(renders); i++) {
        const hx_json *row = hx_json_member(renders, i, &file);
        hx_err err = { 0 };
        snprintf(path, sizeof path, DATA "templates/%.*s", (int)file.n, file.p);
        hx_jinja *t = open_file(path, &err);
        for (size_t k = 0; k < hx_json_len(row); k++) {
            const hx_json *at = hx_json_member(row, k, &name);
            const hx_json *vars = hx_json_member(conversations, k, NULL);
            const hx_json *want = hx_json_at(texts, (size_t)hx_json_int(at, -1));
            int rc = err.code;
            text.n = 0;
            if (t != NULL)
                rc = hx_jinja_run(t, vars, &AT, &text, NULL, &err);
            compare(path, name, rc, &err, &text, want, &n);
        }
        hx_jinja_close(t);
    }
    print_message(
        "55 templates x %zu conversations: %d texts agree, %d raise here as there, "
        "%d refused, %d differ\n",
        hx_json_len(conversations), n.agree, n.raise, n.refused, n.differ);
    assert_int_equal(n.differ + n.refused, 0);
    assert_true(n.agree > 550);
    hx_sb_free(&text);
    hx_json_free(all);
}

static void test_units(void **state)
{
    hx_json *all = read_json(DATA "units.json");
    const hx_json *rows = hx_json_get(all, "rows"), *vars = hx_json_get(all, "vars");
    tally n = { 0 };
    hx_sb text = { 0 };

    (void)state;
    for (size_t i = 0; i < hx_json_len(rows); i++) {
        const hx_json *row = hx_json_at(rows, i);
        const hx_str source = hx_json_str(hx_json_at(row, 0));
        hx_err err = { 0 };
        const int rc = run_text(source, vars, &AT, &text, NULL, &err);
        compare("unit", source, rc, &err, &text, hx_json_at(row, 1), &n);
    }
    print_message(
        "%zu units: %d texts agree, %d raise here as there, %d refused, %d differ\n",
        hx_json_len(rows), n.agree, n.raise, n.refused, n.differ);
    assert_int_equal(n.differ, 0);
    /* Repeated lists, "%" on text. */
    assert_true(n.refused <= 12);
    hx_sb_free(&text);
    hx_json_free(all);
}

/* ---- errors ---------------------------------------------------------- */

static hx_json *parse(const char *text)
{
    hx_err err = { 0 };
    hx_json *j = NULL;

    if (hx_json_parse(&j, hx_str_c(text), 0, &err) != 0)
        fail_msg("%s", err.msg);
    return j;
}

static const struct {
    const char *source;
    int code;
    const char *msg;
} error_rows[] = {
    /* the line is that of the construct */
    { "a\nb\n{{ 1 / 0 }}", HX_EFORMAT, "t:3: division by zero" },
    { "{{ 1 +\n\n 'a' }}", HX_EFORMAT,
      "t:1: unsupported operand types for +: 'int' and 'str'" },
    { "\n{% if 1 %}\n{{ x.y }}\n{% endif %}", HX_EFORMAT, "t:3: 'x' is undefined" },
    { "{% macro m(a) %}\n{{ a.b.c }}\n{% endmacro %}\n{{ m({}) }}", HX_EFORMAT,
      "t:2: 'dict object' has no attribute 'b'" },
    { "\n{{ raise_exception('no ' ~ 'way') }}", HX_EFORMAT, "t:2: no way" },
    { "{# a\nb #}\n{{ [][0] + 1 }}", HX_EFORMAT, "t:3: list object has no element 0" },
    { "{%- if 1 %}\n\n{% endif %}{{ 5() }}", HX_EFORMAT,
      "t:3: 'int' object is not callable" },
    { "x\n{% for a in 5 %}{% endfor %}", HX_EFORMAT,
      "t:2: 'int' object is not iterable" },
    { "{{ [].append(1) }}", HX_EUNSUP, "t:1: the method \"append\" of a list" },
    { "\n\n{{ 'a' ", HX_EFORMAT, "t:3: template ends inside a tag" },
    { "{{ 1 }\n}", HX_EFORMAT, "t:1: unexpected \"}\"" },
    { "{% if 1 %}\n", HX_EFORMAT, "t:1: template ends; expected \"{% endif %}\"" },
    { "\n{% endfor %}", HX_EFORMAT, "t:2: unknown or misplaced tag \"endfor\"" },
    { "{% frob %}", HX_EFORMAT, "t:1: unknown or misplaced tag \"frob\"" },
    { "\n{{ 'abc }}", HX_EFORMAT, "t:2: string is never closed; expected '" },
    { "\n{# abc", HX_EFORMAT, "t:2: comment is never closed; expected \"#}\"" },
    { "{% break %}", HX_EFORMAT, "t:1: \"break\" outside a loop" },
    { "{{ '\xff' }}", HX_EFORMAT, "t:1: template is not UTF-8" },
    /* known, but not here: by name, when the template is opened */
    { "{% extends 'a' %}", HX_EUNSUP, "t:1: the tag \"extends\"" },
    { "{% block a %}{% endblock %}", HX_EUNSUP, "t:1: the tag \"block\"" },
    { "{% include 'a' %}", HX_EUNSUP, "t:1: the tag \"include\"" },
    { "{% import 'a' as b %}", HX_EUNSUP, "t:1: the tag \"import\"" },
    { "{% from 'a' import b %}", HX_EUNSUP, "t:1: the tag \"from\"" },
    { "{% autoescape true %}{% endautoescape %}", HX_EUNSUP,
      "t:1: the tag \"autoescape\"" },
    { "{% do x %}", HX_EUNSUP, "t:1: the tag \"do\"" },
    { "{% print x %}", HX_EUNSUP, "t:1: the tag \"print\"" },
    { "\n{% for a in b recursive %}{% endfor %}", HX_EUNSUP, "t:2: recursive loops" },
    { "{% raw %}x{% endraw %}", HX_EUNSUP, "t:1: the tag \"raw\"" },
    { "{% call m() %}{% endcall %}", HX_EUNSUP, "t:1: the tag \"call\"" },
    { "{% with a = 1 %}{% endwith %}", HX_EUNSUP, "t:1: the tag \"with\"" },
    { "{% macro m() %}{{ varargs }}{% endmacro %}", HX_EUNSUP,
      "t:1: the special name \"varargs\"" },
    { "{% macro m() %}{{ kwargs }}{% endmacro %}", HX_EUNSUP,
      "t:1: the special name \"kwargs\"" },
    { "{{ self.x }}", HX_EUNSUP, "t:1: the special name \"self\"" },
    { "{{ f(*a) }}", HX_EUNSUP, "t:1: \"*\" and \"**\" arguments" },
    { "{{ f(**a) }}", HX_EUNSUP, "t:1: \"*\" and \"**\" arguments" },
    { "{{ 9223372036854775808 }}", HX_EUNSUP,
      "t:1: integer 9223372036854775808 is over 64 bits" },
    { "{{ größe }}", HX_EUNSUP, "t:1: name or sign that is not ASCII, inside a tag" },
    { "{{ 2 ** 3 }}", HX_EUNSUP, "t:1: the operator \"**\"" },
    { "{{ x[1, 2] }}", HX_EUNSUP, "t:1: more than one index in [ ]" },
    { "{{ 0x10 }}", HX_EUNSUP, "t:1: number \"0x\"" },
    { "{{ '\\101' }}", HX_EUNSUP, "t:1: escape \"\\1\" in a string" },
    { "{{ '\\N{DASH}' }}", HX_EUNSUP, "t:1: escape \"\\N\" in a string" },
    { "{{ '\\ud800' }}", HX_EUNSUP, "t:1: \\ud800 in a string is no character" },
    /* the same, seen only while running */
    { "{% if 1 %}\n{{ 's'|from_json }}{% endif %}", HX_EUNSUP,
      "t:2: filter \"from_json\" is not known" },
    { "\n{{ x|groupby('a') }}", HX_EUNSUP, "t:2: filter \"groupby\" is not known" },
    { "{{ x is frob }}", HX_EUNSUP, "t:1: test \"frob\" is not known" },
    { "{{ [1]|map('frob')|list }}", HX_EUNSUP, "t:1: filter \"frob\" is not known" },
    { "{{ cycler(1) }}", HX_EUNSUP, "t:1: function \"cycler\"" },
    { "{{ joiner() }}", HX_EUNSUP, "t:1: function \"joiner\"" },
    { "{{ 'a'.encode() }}", HX_EUNSUP, "t:1: the method \"encode\" of a str" },
    { "{{ 'a'.upper }}", HX_EUNSUP, "t:1: the text of a method" },
    { "{{ 'a'|map('upper') }}", HX_EUNSUP, "t:1: the text of a view" },
    { "{{ {'a': 1}.items() }}", HX_EUNSUP, "t:1: the text of a view" },
    { "{{ range(3)[0] }}", HX_EUNSUP, "t:1: items of a view" },
    { "{{ [1] * 2 }}", HX_EUNSUP, "t:1: repeating a list" },
    { "{{ {(1, 2): 3} }}", HX_EUNSUP, "t:1: unhashable type: 'tuple'" },
    { "{% for x in [1] %}{{ loop.cycle('a') }}{% endfor %}", HX_EUNSUP,
      "t:1: loop.cycle" },
    { "{{ 9223372036854775807 + 1 }}", HX_EUNSUP,
      "t:1: the result of \"+\" is over 64 bits" },
    { "{{ '99999999999999999999'|int }}", HX_EUNSUP,
      "t:1: integer 99999999999999999999 is over 64 bits" },
    { "{{ '%s' % 1 }}", HX_EUNSUP, "t:1: formatting with \"%\"" },
    { "{{ '{a.b}'.format(a=1) }}", HX_EUNSUP, "t:1: format: field {a.b}" },
    { "{{ '{:>5}'.format(1) }}", HX_EUNSUP, "t:1: format: field {:>5}" },
    { "{{ 'aaa'.rsplit('aa') }}", HX_EUNSUP, "t:1: rsplit at separators that overlap" },
    { "{{ 1.5|round(1, 'ceil') }}", HX_EUNSUP,
      "t:1: round() with other arguments than \"precision?\"" },
    { "{{ strftime_now('%c') }}", HX_EUNSUP, "t:1: strftime_now: directive \"%c\"" },
    { "{{ ('a'|safe).replace('a', 'b') }}", HX_EUNSUP,
      "t:1: replace on text marked safe" },
    { "{{ loop }}{% for x in [1] %}{{ loop([]) }}{% endfor %}", HX_EUNSUP,
      "t:1: recursive loops" },
};

static void test_errors(void **state)
{
    hx_sb text = { 0 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(error_rows); i++) {
        hx_err err = { 0 };
        const int rc =
            run_text(hx_str_c(error_rows[i].source), NULL, NULL, &text, NULL, &err);
        if (rc != error_rows[i].code || strcmp(err.msg, error_rows[i].msg) != 0 ||
            text.n != 0)
            fail_msg("%s: %d %s; expected %d %s", error_rows[i].source, rc, err.msg,
                     error_rows[i].code, error_rows[i].msg);
        assert_int_equal(err.code, rc);
    }
    hx_sb_free(&text);
}

static void test_vars_must_be_object(void **state)
{
    hx_json *list = parse("[1]");
    hx_sb text = { 0 };
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(run_text(HX_STR("x"), list, NULL, &text, NULL, &err), HX_EARG);
    assert_int_equal(run_text(HX_STR("x{{ y }}"), NULL, NULL, &text, NULL, &err), 0);
    assert_true(same(&text, HX_STR("x")));
    hx_json_free(list);
    hx_sb_free(&text);
}

/* ---- limits ---------------------------------------------------------- */

static hx_str repeated(hx_sb *b, const char *before, const char *part, int n,
                       const char *after)
{
    b->n = 0;
    hx_sb_str(b, before);
    for (int i = 0; i < n; i++)
        hx_sb_str(b, part);
    hx_sb_str(b, after);
    assert_false(b->bad);
    return (hx_str) { b->p, b->n };
}

static void test_limits(void **state)
{
    static const struct {
        const char *source;
        hx_jinja_opt opt;
        int code;
    } ROW[] = {
        { "{% for i in range(1000) %}0123456789{% endfor %}", { .max_bytes = 10000 }, 0 },
        { "{% for i in range(1000) %}0123456789{% endfor %}",
          { .max_bytes = 9999 },
          HX_ELIMIT },
        /* the call and a thousand turns */
        { "{% for i in range(1000) %}{% endfor %}", { .max_steps = 1001 }, 0 },
        { "{% for i in range(1000) %}{% endfor %}", { .max_steps = 1000 }, HX_ELIMIT },
        { "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor "
          "%}",
          { .max_steps = 1000000 },
          HX_ELIMIT },
        { "{% for i in range(1000000000) %}{% endfor %}",
          { .max_steps = 10 },
          HX_EFORMAT },
        { "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
          { .max_steps = 1000000 },
          HX_ELIMIT },
        { "{% macro m(n) %}{{ m(n - 1) if n }}{% endmacro %}{{ m(40) }}",
          { .max_steps = 0 },
          0 },
        { "{{ 'x' * 4000000000 }}", { .max_bytes = 1 << 20 }, HX_ENOMEM },
        { "{{ 'x' * 9223372036854775807 }}", { .max_bytes = 1 << 20 }, HX_ENOMEM },
        { "{{ 'x'|indent(9999999999, true) }}", { .max_steps = 1000000 }, HX_ELIMIT },
        { "{{ [1]|tojson(indent=9999999999) }}", { .max_steps = 1000000 }, HX_ELIMIT },
        { "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x "
          "%}"
          "{% endfor %}",
          { .max_bytes = 1 << 20 },
          HX_ENOMEM },
        { "{% set n = namespace() %}{% set n.n = [n] %}{{ n.n }}",
          { .max_steps = 1000000 },
          HX_EUNSUP },
        { "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] "
          "%}"
          "{% endfor %}{{ n.l == n.l }}",
          { .max_steps = 0 },
          0 },
        /* two equal trees of 2^99 leaves that share nothing but their own halves */
        { "{% set n = namespace(l=[], m=[]) %}{% for i in range(99) %}"
          "{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}{% endfor %}{{ n.l == n.m "
          "}}",
          { .max_steps = 1000000 },
          HX_ELIMIT },
        { "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] "
          "%}"
          "{% endfor %}{{ n.l }}",
          { .max_bytes = 1 << 20 },
          HX_ENOMEM },
        { "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] "
          "%}"
          "{% endfor %}{{ n.l|tojson }}",
          { .max_bytes = 1 << 20 },
          HX_ENOMEM },
    };
    hx_err err = { 0 };
    hx_sb text = { 0 }, src = { 0 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(ROW); i++) {
        const int rc =
            run_text(hx_str_c(ROW[i].source), NULL, &ROW[i].opt, &text, NULL, &err);
        if (rc != ROW[i].code)
            fail_msg("%s: %d %s", ROW[i].source, rc, rc != 0 ? err.msg : "");
    }
#define RUN(...) run_text(repeated(&src, __VA_ARGS__), NULL, NULL, &text, NULL, &err)
    assert_int_equal(RUN("{{ ", "(", 50, "1 }}"), HX_EFORMAT);
    assert_int_equal(RUN("{{ ", "(", 5000, "1 }}"), HX_ELIMIT);
    assert_int_equal(RUN("{{ ", "not ", 5000, "1 }}"), HX_ELIMIT);
    assert_int_equal(RUN("{{ ", "- ", 5000, "1 }}"), HX_ELIMIT);
    assert_int_equal(RUN("{{ 1", "+ 1", 200, " }}"), 0);
    assert_true(same(&text, HX_STR("201")));
    assert_int_equal(RUN("{{ 1", "+ 1", 5000, " }}"), HX_ELIMIT);
    assert_int_equal(RUN("{{ x", "|string", 5000, " }}"), HX_ELIMIT);
    assert_int_equal(RUN("{{ x", ".a", 5000, " }}"), HX_ELIMIT);
    assert_int_equal(RUN("", "{% if 1 %}", 5000, ""), HX_ELIMIT);
    assert_int_equal(RUN("", "{% for x in y %}", 5000, ""), HX_ELIMIT);
    assert_int_equal(RUN("{% if 0 %}", "{% elif 0 %}", 5000, "{% else %}z{% endif %}"),
                     0);
    assert_true(same(&text, HX_STR("z")));
    assert_int_equal(RUN("{% set ", "(", 5000, "a) = 1 %}"), HX_ELIMIT);
    hx_sb_free(&text);
    hx_sb_free(&src);
}

/* A text that grows turn by turn costs what it is long, not its square: 20,000 additions
 * to a text of 2 MB would copy 20 GB otherwise, and the arena holds half of one. */
static void test_growing_text(void **state)
{
    hx_json *vars = parse("{\"s\": \"01234567890123456789012345678901234567890123456789"
                          "01234567890123456789012345678901234567890123456789\"}");
    hx_sb text = { 0 }, user = { 0 };
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(
        run_text(HX_STR("{% set n = namespace(x='') %}{% for i in range(20000) %}"
                        "{% set n.x = n.x + s ~ '\\n' %}{% endfor %}{{ n.x }}"),
                 vars, NULL, &text, &user, &err),
        0);
    assert_int_equal(text.n, 20000 * 101);
    assert_int_equal(user.n, text.n);
    for (size_t i = 0; i < text.n; i++)
        assert_int_equal(user.p[i], text.p[i] != '\n');
    hx_json_free(vars);
    hx_sb_free(&text);
    hx_sb_free(&user);
}

/* ---- marks ----------------------------------------------------------- */

static void test_marks(void **state)
{
    static const char VARS[] = "{\"n\": \"xy\", \"l\": [\"p\", \"q\"], \"d\": {\"k\": "
                               "\"v\\n\", \"m\": 1}, \"w\": \" é \", \"i\": 5}";
    static const struct {
        const char *source, *text, *marks;
    } ROW[] = {
        { "A{{ n }}B", "AxyB", "0110" },
        { "{{ n }}", "xy", "11" },
        { "plain", "plain", "00000" },
        { "{{ n|upper }}{{ 'a'|upper }}", "XYA", "110" },
        { "{{ w|trim }}|{{ w.strip()|title }}", "é|É", "11011" },
        { "{{ n[1:] ~ n[0] }}{{ n[::-1] }}", "yxyx", "1111" },
        { "{{ 'a' + n + 'b' }}", "axyb", "0110" },
        { "{{ n|replace('x', '<u>') }}", "<u>y", "0001" },
        { "{{ 'x-x'|replace('x', n) }}", "xy-xy", "11011" },
        { "{{ '-'.join(l) }}{{ l|join('+') }}", "p-qp+q", "101101" },
        { "{{ l|join(n) }}", "pxyq", "1111" },
        { "{{ d|tojson }}", "{\"k\": \"v\\n\", \"m\": 1}", "00100001110000100000" },
        { "{{ n|tojson }}", "\"xy\"", "0110" },
        { "{{ l }}", "['p', 'q']", "0010000100" },
        { "{{ '{}<{}>'.format(n, 'z') }}", "xy<z>", "11000" },
        { "{{ 'a,b'.rsplit(',', 1)[0] }}{{ n.rsplit('x', 1)[1] }}", "ay", "01" },
        { "{{ n|indent('+', true) }}{{ n[0]|safe + '<' }}", "+xyx&lt;", "01110000" },
        { "{{ n.splitlines()[0] }}{{ n|reverse }}{{ n|list }}", "xyyx['x', 'y']",
          "11110010000100" },
        { "{{ n|length }}{{ n == 'xy' }}{{ i }}", "2True5", "000000" },
        { "{{ n * 2 }}{{ 'a' * 2 }}", "xyxyaa", "111100" },
        { "{% set b %}<{{ n }}>{% endset %}{{ b }}{{ b[1:3] }}", "<xy>xy", "011011" },
        { "{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(n) }}{{ m('c')|upper }}",
          "[xy][C]", "0110000" },
        { "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "k=v\n;m=1;",
          "101101000" },
        { "{% for c in n %}{{ c }},{% endfor %}", "x,y,", "1010" },
        { "{{ 'a,b'.split(',')[0] }}{{ n.split('x')[1] }}", "ay", "01" },
        { "{% filter upper %}a{{ n }}{% endfilter %}", "AXY", "011" },
        { "{{ ('<'|e) ~ (n|e) }}", "&lt;xy", "000011" },
        { "{{ (l|map('upper')|list)[1] }}{{ l|sort(reverse=true)|first }}{{ l|last }}",
          "Qqq", "111" },
        { "{{ n|indent(2, true) }}", "  xy", "0011" },
        { "{{ n if n == 'xy' else 'zz' }}{{ 'xy' if n == 'xy' }}", "xyxy", "1100" },
        { "{% set x = 'a' %}{% set y = x + n %}{% set z = y + 'b' %}{{ y }}{{ z }}{{ y "
          "}}",
          "axyaxybaxy", "0110110011" },
        { "{{ dict(k=n).k }}{{ {n: 1}|list|first }}{{ namespace(a=n).a }}", "xyxyxy",
          "111111" },
    };
    hx_json *vars = parse(VARS);
    hx_sb text = { 0 }, user = { 0 };
    hx_err err = { 0 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(ROW); i++) {
        if (run_text(hx_str_c(ROW[i].source), vars, NULL, &text, &user, &err) != 0)
            fail_msg("%s: %s", ROW[i].source, err.msg);
        for (size_t k = 0; k < user.n; k++)
            user.p[k] = (char)(user.p[k] + '0');
        if (!same(&text, hx_str_c(ROW[i].text)) || !same(&user, hx_str_c(ROW[i].marks)))
            fail_msg("%s:\n%.*s\n%.*s; expected\n%s\n%s", ROW[i].source, (int)text.n,
                     text.p, (int)user.n, user.p, ROW[i].text, ROW[i].marks);
    }
    hx_json_free(vars);
    hx_sb_free(&text);
    hx_sb_free(&user);
}

/* In the conversation "marks" the messages and tools hold Cyrillic letters that no
 * template writes, and none of the signs that special tokens are made of: whatever a
 * template does with them, the letters must come out marked and the signs must not. */
static void test_marks_of_templates(void **state)
{
    hx_json *all = read_json(DATA "renders.json");
    const hx_json *renders = hx_json_get(all, "renders");
    const hx_json *vars = hx_json_get(hx_json_get(all, "conversations"), "marks");
    hx_sb text = { 0 }, user = { 0 }, again = { 0 };
    size_t letters = 0, signs = 0;
    char path[256];
    hx_str file;

    (void)state;
    for (size_t i = 0; i < hx_json_len(renders); i++) {
        hx_json_member(renders, i, &file);
        hx_err err = { 0 };
        snprintf(path, sizeof path, DATA "templates/%.*s", (int)file.n, file.p);
        hx_jinja *t = open_file(path, &err);
        text.n = user.n = again.n = 0;
        if (t != NULL && hx_jinja_run(t, vars, &AT, &text, &user, &err) == 0) {
            assert_int_equal(text.n, user.n);
            assert_int_equal(hx_jinja_run(t, vars, &AT, &again, NULL, &err), 0);
            assert_true(same(&again, (hx_str) { text.p, text.n }));
            for (size_t k = 0; k < text.n; k++) {
                if ((uint8_t)text.p[k] == 0xd0 && k + 1 < text.n &&
                    memchr("\x96\xae\xa9\xad", text.p[k + 1], 4) != NULL) {
                    assert_int_equal(user.p[k], 1);
                    assert_int_equal(user.p[k + 1], 1);
                    letters++;
                } else if (strchr("<>|[]{}", text.p[k]) != NULL && text.p[k] != 0) {
                    assert_int_equal(user.p[k], 0);
                    signs++;
                }
            }
        }
        hx_jinja_close(t);
    }
    assert_true(letters > 500 && signs > 2000);
    hx_sb_free(&text);
    hx_sb_free(&user);
    hx_sb_free(&again);
    hx_json_free(all);
}

/* ---- memory, sharing ------------------------------------------------- */

/* Every allocation of opening and running fails once. */
static void test_no_memory(void **state)
{
    hx_json *all = read_json(DATA "renders.json");
    const hx_json *vars = hx_json_get(hx_json_get(all, "conversations"), "two_calls");
    const int64_t live = hx_test_live_allocs();
    size_t n;
    char *source = read_all(DATA "glm5_next.jinja", &n);
    int rc, k = 0;

    (void)state;
    do {
        hx_sb text = { 0 }, user = { 0 };
        hx_err err = { 0 };
        hx_jinja *t = NULL;
        hx_test_fail_at(++k);
        rc = hx_jinja_open(&t, (hx_str) { source, n }, "t", &err);
        if (rc == 0)
            rc = hx_jinja_run(t, vars, NULL, &text, &user, &err);
        hx_test_fail_at(0);
        if (rc != 0) {
            assert_int_equal(rc, HX_ENOMEM);
            assert_int_equal(err.code, rc);
            assert_true(text.n == 0 && user.n == 0);
        }
        hx_jinja_close(t);
        hx_sb_free(&text);
        hx_sb_free(&user);
    } while (rc != 0);
    assert_true(k > 4);
    hx_free(source);
    assert_int_equal(hx_test_live_allocs(), live);
    hx_json_free(all);
}

typedef struct {
    const hx_jinja *t;
    const hx_json *vars;
    hx_str want;
    int bad;
} job;

static void *run_job(void *ud)
{
    job *j = ud;
    hx_err err = { 0 };

    for (int i = 0; i < 50; i++) {
        hx_sb text = { 0 };
        if (hx_jinja_run(j->t, j->vars, &AT, &text, NULL, &err) != 0 ||
            !same(&text, j->want))
            j->bad++;
        hx_sb_free(&text);
    }
    return NULL;
}

static void test_shared_by_threads(void **state)
{
    hx_json *all = read_json(DATA "renders.json");
    const hx_json *row = hx_json_get(hx_json_get(all, "renders"), "Qwen3-Coder.jinja");
    const int64_t at = hx_json_int(hx_json_get(row, "two_calls"), -1);
    hx_err err = { 0 };
    hx_jinja *t = open_file(DATA "templates/Qwen3-Coder.jinja", &err);
    job j[4];
    pthread_t id[4];

    (void)state;
    for (int i = 0; i < 4; i++) {
        j[i] =
            (job) { t, hx_json_get(hx_json_get(all, "conversations"), "two_calls"),
                    hx_json_str(hx_json_at(hx_json_get(all, "texts"), (size_t)at)), 0 };
        assert_int_equal(pthread_create(&id[i], NULL, run_job, &j[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(id[i], NULL);
        assert_int_equal(j[i].bad, 0);
    }
    hx_jinja_close(t);
    hx_json_free(all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_glm_renders),
        cmocka_unit_test(test_templates),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_vars_must_be_object),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_growing_text),
        cmocka_unit_test(test_marks),
        cmocka_unit_test(test_marks_of_templates),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_shared_by_threads),
    };

    return cmocka_run_group_tests_name("jinja", tests, NULL, NULL);
}
