/* jinja_call.c - everything a template can call by name: filters, tests, methods of
 * lists, dicts and loops, global functions. One row of a table each.
 *
 * Called by jinja.c (run) and jinja_parse.c (names are resolved when a template is
 * opened). What jinja2 knows and this does not is in the tables too, so that it is
 * refused by name. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "text/jinja_ast.h"

#define CALL(name) static int name(hx_jvm *vm, const hx_jcall *c, hx_jval *out)

enum { RANGE_MAX = 100000 }; /* longest range, as in the sandbox of jinja2 */

static const char REFUSED[] = "is outside the subset";

static bool given(hx_jval v)
{
    return v.t != HX_J_ABSENT;
}

/* ---- binding arguments ----------------------------------------------- */

/* Position of name in params, -1 if it is not there. *n counts all of them. */
static int find_param(const char *params, const hx_jstr *name, int *n)
{
    int found = -1;

    *n = 0;
    for (const char *p = params; *p != 0; ++*n) {
        const size_t len = strcspn(p, " ?");
        if (name != NULL && name->n == len && memcmp(p, name->p, len) == 0)
            found = *n;
        p += strcspn(p, " ");
        p += *p == ' ';
    }
    return found;
}

static int bind(hx_jvm *vm, const hx_jbuiltin *fn, const hx_jargs *args, hx_jcall *c)
{
    int n, k = 0;

    find_param(fn->params, NULL, &n);
    hx_assert(n <= HX_J_ARGS_MAX);
    if (args->n > (size_t)n)
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "%s takes at most %d arguments, %zu were given", fn->name, n,
                           args->n);
    for (size_t i = 0; i < args->n; i++)
        c->a[i] = args->v[i];
    for (size_t i = 0; i < args->n_key; i++) {
        const hx_jstr *key = args->key[i];
        const int at = find_param(fn->params, key, &n);
        if (at < 0 || given(c->a[at]))
            return hx_jvm_fail(vm, HX_EFORMAT, "%s: %s argument '%.*s'", fn->name,
                               at < 0 ? "unexpected" : "second", (int)HX_MIN(key->n, 60),
                               key->p);
        c->a[at] = args->v[args->n + i];
    }
    for (const char *p = fn->params; *p != 0; k++) {
        const size_t len = strcspn(p, " ?");
        if (!given(c->a[k]) && p[len] != '?')
            return hx_jvm_fail(vm, HX_EFORMAT, "%s: argument '%.*s' is missing", fn->name,
                               (int)len, p);
        p += strcspn(p, " ");
        p += *p == ' ';
    }
    return 0;
}

int hx_jcall_run(hx_jvm *vm, const hx_jbuiltin *fn, hx_jval self, const hx_jargs *args,
                 hx_jval *out)
{
    hx_jcall c = { .self = self, .raw = args, .arg = fn->arg };
    int rc;

    if (fn->fn == NULL)
        return hx_jvm_fail(vm, HX_EUNSUP, "%s %s", fn->name, fn->params);
    if (strcmp(fn->params, "*") != 0 && (rc = bind(vm, fn, args, &c)) != 0)
        return rc;
    if ((rc = hx_jvm_enter(vm)) != 0)
        return rc;
    rc = fn->fn(vm, &c, out);
    vm->depth--;
    return rc;
}

static const hx_jbuiltin *find(const hx_jbuiltin *table, const char *name, size_t n)
{
    for (; table->name != NULL; table++) {
        if (strlen(table->name) == n && memcmp(table->name, name, n) == 0)
            return table;
    }
    return NULL;
}

/* ---- helpers --------------------------------------------------------- */

static hx_jval str_val(const hx_jstr *s)
{
    return (hx_jval) { .t = HX_J_STR, .u.s = s };
}

static int undef_self(hx_jvm *vm, const hx_jcall *c)
{
    return c->self.t == HX_J_UNDEF ? hx_jval_undef_error(vm, c->self) : 0;
}

/* An attribute path: "a.b.0" by dots, digits as indices; a number; nothing. */
static int make_path(hx_jvm *vm, const hx_jstr *s, hx_jval attr, const hx_jseq **out)
{
    hx_jseq *q = hx_jvm_alloc(vm, 1, sizeof *q);
    size_t n = 1, at = 0;
    hx_jval *part;
    int rc;

    if (q == NULL)
        return HX_ENOMEM;
    *out = q;
    if (s == NULL && (!given(attr) || attr.t == HX_J_NONE))
        return 0;
    for (size_t i = 0; s != NULL && i < s->n; i++)
        n += s->p[i] == '.';
    if ((part = hx_jvm_alloc(vm, n, sizeof *part)) == NULL)
        return HX_ENOMEM;
    *q = (hx_jseq) { part, n };
    part[0] = attr;
    for (size_t k = 0; s != NULL && k < n; k++) {
        const char *dot = memchr(s->p + at, '.', s->n - at);
        const size_t end = dot ? (size_t)(dot - s->p) : s->n;
        if ((rc = hx_jstr_sub(vm, s, at, end - at, &part[k])) != 0)
            return rc;
        int64_t index = 0;
        size_t d = at;
        for (; d < end && s->p[d] >= '0' && s->p[d] <= '9' && index < INT32_MAX; d++)
            index = index * 10 + (s->p[d] - '0');
        if (d == end && end > at)
            part[k] = hx_jint(index);
        at = end + 1;
    }
    return 0;
}

static int path_of(hx_jvm *vm, hx_jval attr, const hx_jseq **out)
{
    return make_path(vm, attr.t == HX_J_STR ? attr.u.s : NULL, attr, out);
}

static int follow(hx_jvm *vm, const hx_jseq *path, hx_jval dflt, hx_jval item,
                  hx_jval *out)
{
    int rc;

    for (size_t i = 0; i < path->n; i++) {
        if ((rc = hx_jinja_item(vm, item, path->v[i], &item)) != 0)
            return rc;
        if (item.t == HX_J_UNDEF && given(dflt) && dflt.t != HX_J_NONE)
            item = dflt;
    }
    *out = item;
    return 0;
}

static int ignore_case(hx_jvm *vm, bool sensitive, hx_jval *v)
{
    return sensitive || v->t != HX_J_STR ? 0 : hx_jtext_case(vm, v->u.s, HX_J_LOWER, v);
}

/* ---- filters over texts ---------------------------------------------- */

CALL(f_case)
{
    const hx_jstr *s;
    const int rc = hx_jval_str(vm, c->self, &s);

    return rc != 0 ? rc : hx_jtext_case(vm, s, (hx_jcase)c->arg, out);
}

CALL(f_trim)
{
    const hx_jstr *s, *set = NULL;
    int rc;

    if ((rc = hx_jval_str(vm, c->self, &s)) != 0)
        return rc;
    if (given(c->a[0]) && c->a[0].t != HX_J_NONE &&
        (rc = hx_jtext_want(vm, c->a[0], "trim: chars", &set)) != 0)
        return rc;
    return hx_jtext_strip(vm, s, set, true, true, out);
}

CALL(f_replace)
{
    const hx_jstr *s, *old, *new;
    int64_t count;
    int rc;

    if ((rc = hx_jval_str(vm, c->self, &s)) != 0 ||
        (rc = hx_jval_str(vm, c->a[0], &old)) != 0 ||
        (rc = hx_jval_str(vm, c->a[1], &new)) != 0)
        return rc;
    count = -1;
    if (c->a[2].t != HX_J_NONE &&
        (rc = hx_jtext_want_int(vm, c->a[2], "replace: count", -1, &count)) != 0)
        return rc;
    return hx_jtext_replace(vm, s, old, new, count, out);
}

CALL(f_string)
{
    const hx_jstr *s;
    const int rc = hx_jval_str(vm, c->self, &s);

    *out = str_val(s);
    return rc;
}

CALL(f_safe)
{
    const hx_jstr *s;
    const int rc = hx_jval_str(vm, c->self, &s);

    return rc != 0 ? rc : hx_jstr_safe(vm, s, out);
}

CALL(f_escape)
{
    const hx_jstr *s;
    const int rc = hx_jval_str(vm, c->self, &s);

    return rc != 0 ? rc : hx_jstr_escape(vm, s, out);
}

/* The lines are those of the text with one more line end, so a final one is kept. */
CALL(f_indent)
{
    static const hx_jstr LINE_END = { .p = "\n", .n = 1, .len = 1 };
    hx_jbuf b = { .vm = vm };
    const hx_jstr *s, *by = c->a[0].t == HX_J_STR ? c->a[0].u.s : NULL;
    const bool first = hx_jval_truthy(c->a[1]), blank = hx_jval_truthy(c->a[2]);
    int64_t width = 4;
    size_t after = 0;
    hx_jval lines;
    int rc;

    if ((rc = hx_jtext_want(vm, c->self, "indent: the value", &s)) != 0 ||
        (by == NULL &&
         (rc = hx_jtext_want_int(vm, c->a[0], "indent: width", 4, &width)) != 0) ||
        (rc = hx_jstr_cat(vm, s, &LINE_END, &lines)) != 0)
        return rc;
    for (size_t from = 0; from < lines.u.s->n && b.rc == 0; from = after) {
        const size_t end = hx_jtext_line(lines.u.s, from, &after);
        if (from > 0)
            hx_jbuf_lit(&b, "\n");
        if ((from == 0 ? first : blank || end > from) && by != NULL)
            hx_jbuf_put(&b, by);
        else if (from == 0 ? first : blank || end > from)
            hx_jbuf_pad(&b, ' ', width > 0 ? (size_t)width : 0);
        hx_jbuf_sub(&b, lines.u.s, from, end - from);
    }
    return hx_jbuf_done_safe(&b, s->safe, out);
}

CALL(f_format)
{
    hx_jval arg, *item;
    const hx_jstr *s;
    hx_jdict *d;
    int rc;

    if ((rc = hx_jval_str(vm, c->self, &s)) != 0)
        return rc;
    if (c->raw->n > 0 && c->raw->n_key > 0)
        return hx_jvm_fail(
            vm, HX_EFORMAT,
            "format: can't handle positional and keyword arguments at the same time");
    if (c->raw->n_key == 0) {
        if ((rc = hx_jval_list(vm, HX_J_TUPLE, c->raw->n, &item, &arg)) != 0)
            return rc;
        for (size_t i = 0; i < c->raw->n; i++)
            item[i] = c->raw->v[i];
    } else {
        if ((rc = hx_jdict_new(vm, c->raw->n_key, &d)) != 0)
            return rc;
        for (size_t i = 0; i < c->raw->n_key; i++) {
            if ((rc = hx_jdict_put(vm, d, str_val(c->raw->key[i]), c->raw->v[i])) != 0)
                return rc;
        }
        arg = (hx_jval) { .t = HX_J_DICT, .u.m = d };
    }
    return hx_jformat_percent(vm, s, arg, out);
}

/* ---- json ------------------------------------------------------------ */

static int json_indent(hx_jvm *vm, hx_jval v, const hx_jstr **out)
{
    hx_jbuf b = { .vm = vm };
    int64_t width;
    int rc;

    *out = v.t == HX_J_STR ? v.u.s : NULL;
    if (!given(v) || v.t == HX_J_NONE || v.t == HX_J_STR)
        return 0;
    if ((rc = hx_jtext_want_int(vm, v, "tojson: indent", 0, &width)) != 0)
        return rc;
    if (width > 1000)
        return hx_jvm_fail(vm, HX_EUNSUP, "tojson: indent of %lld", (long long)width);
    hx_jbuf_pad(&b, ' ', width > 0 ? (size_t)width : 0);
    if ((rc = hx_jbuf_done(&b, &v)) != 0)
        return rc;
    *out = v.u.s;
    return 0;
}

CALL(f_tojson)
{
    static const hx_jstr COMMA_SPACE = { .p = ", ", .n = 2, .len = 2 };
    static const hx_jstr COMMA = { .p = ",", .n = 1, .len = 1 };
    static const hx_jstr COLON = { .p = ": ", .n = 2, .len = 2 };
    hx_jdump o = { .ascii = hx_jval_truthy(c->a[0]), .sort = hx_jval_truthy(c->a[3]) };
    hx_jbuf b = { .vm = vm };
    const hx_jval sep = c->a[2];
    int rc;

    if ((rc = json_indent(vm, c->a[1], &o.indent)) != 0)
        return rc;
    o.item = o.indent == NULL ? &COMMA_SPACE : &COMMA;
    o.key = &COLON;
    if (given(sep) && sep.t != HX_J_NONE) {
        if ((sep.t != HX_J_TUPLE && sep.t != HX_J_LIST) || sep.u.q->n != 2)
            return hx_jvm_fail(vm, HX_EFORMAT, "tojson: separators must be two strings");
        if ((rc = hx_jtext_want(vm, sep.u.q->v[0], "tojson: separator", &o.item)) != 0 ||
            (rc = hx_jtext_want(vm, sep.u.q->v[1], "tojson: separator", &o.key)) != 0)
            return rc;
    }
    if ((rc = hx_jval_dump(vm, &b, &o, c->self, 0)) != 0)
        return rc;
    return hx_jbuf_done(&b, out);
}

/* ---- numbers --------------------------------------------------------- */

/* What int() and float() see of a text: no white space around it, no single underscores
 * between characters of `around`. 1: copied to `to`; 0: they raise ValueError. */
static int number_text(hx_jvm *vm, const hx_jstr *s, const char *around, char *to,
                       size_t cap)
{
    size_t from = 0, end = s->n, n = 0, len;

    for (size_t i = 0; i < s->n; i += len) {
        const uint32_t cp = hx_jstr_cp(s, i, &len);
        if (cp > 0x7f && utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_ND)
            return hx_jvm_fail(vm, HX_EUNSUP, "numbers with digits that are not 0 to 9");
    }
    while (from < end && hx_jinja_is_space((uint8_t)s->p[from]))
        from++;
    while (end > from && hx_jinja_is_space((uint8_t)s->p[end - 1]))
        end--;
    for (size_t i = from; i < end; i++) {
        const bool inside = i > from && i + 1 < end &&
                            strchr(around, s->p[i - 1]) != NULL &&
                            strchr(around, s->p[i + 1]) != NULL;
        if (s->p[i] == 0 || n + 1 >= cap || (s->p[i] == '_' && !inside))
            return 0;
        if (s->p[i] != '_')
            to[n++] = s->p[i];
    }
    to[n] = 0;
    return n > 0;
}

static int parse_float(hx_jvm *vm, const hx_jstr *s, double *out)
{
    char text[128], *end;
    const int rc = number_text(vm, s, "0123456789", text, sizeof text);

    if (rc != 1 || strpbrk(text, "xX(") != NULL)
        return HX_MIN(rc, 0);
    *out = strtod(text, &end);
    return *end == 0;
}

/* 1: a number, 0: none. */
static int parse_int(hx_jvm *vm, const hx_jstr *s, int64_t base, int64_t *out)
{
    char text[128], *p = text, *end;
    uint64_t v = 0;
    bool negative = false;
    const int rc = number_text(
        vm, s,
        base == 10 ? "0123456789"
                   : "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
        text, sizeof text);

    if (rc != 1)
        return rc;
    if (*p == '+' || *p == '-')
        negative = *p++ == '-';
    const char mark = p[0] == '0' ? (char)(p[1] | 0x20) : 0;
    const int64_t own = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (own != 0 && (base == own || base == 0)) {
        base = own;
        p += 2;
    }
    base = base == 0 ? 10 : base;
    for (end = p; *end != 0; end++) {
        const char c = (char)(*end | 0x20);
        const int64_t d = *end >= '0' && *end <= '9' ? *end - '0'
                          : c >= 'a' && c <= 'z'     ? c - 'a' + 10
                                                     : 99;
        if (d >= base)
            return 0;
        if (v > (INT64_MAX - (uint64_t)d) / (uint64_t)base)
            return hx_jvm_fail(vm, HX_EUNSUP, "int: \"%s\" is over 64 bits", text);
        v = v * (uint64_t)base + (uint64_t)d;
    }
    *out = negative ? -(int64_t)v : (int64_t)v;
    return end > p;
}

static int float_to_int(hx_jvm *vm, double d, hx_jval dflt, hx_jval *out)
{
    if (isinf(d))
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "int: cannot convert float infinity to integer");
    if (fabs(d) >= 9.2e18)
        return hx_jvm_fail(vm, HX_EUNSUP, "int: %g is over 64 bits", d);
    *out = isnan(d) ? dflt : hx_jint((int64_t)d);
    return 0;
}

CALL(f_int)
{
    const hx_jval v = c->self, dflt = given(c->a[0]) ? c->a[0] : hx_jint(0);
    int64_t base, i = 0;
    double d = 0;
    int rc;

    if ((rc = undef_self(vm, c)) != 0 ||
        (rc = hx_jtext_want_int(vm, c->a[1], "int: base", 10, &base)) != 0)
        return rc;
    if (base < 0 || base == 1 || base > 36)
        return hx_jvm_fail(vm, HX_EUNSUP, "int: base %lld", (long long)base);
    *out = dflt;
    if (hx_jval_is_int(v))
        *out = hx_jint(hx_jval_as_int(v));
    else if (v.t == HX_J_BIG)
        *out = v;
    else if (v.t == HX_J_FLOAT)
        return float_to_int(vm, v.u.d, dflt, out);
    else if (v.t == HX_J_STR) {
        if ((rc = parse_int(vm, v.u.s, base, &i)) < 0)
            return rc;
        if (rc == 1)
            *out = hx_jint(i);
        else if ((rc = parse_float(vm, v.u.s, &d)) == 1)
            return float_to_int(vm, d, dflt, out);
        return HX_MIN(rc, 0);
    }
    return 0;
}

CALL(f_float)
{
    const hx_jval v = c->self;
    double d = 0;
    int rc;

    if ((rc = undef_self(vm, c)) != 0)
        return rc;
    *out = given(c->a[0]) ? c->a[0] : hx_jfloat(0);
    if (hx_jval_is_num(v))
        *out = hx_jfloat(hx_jval_as_double(v));
    else if ((v.t == HX_J_STR || v.t == HX_J_BIG) &&
             (rc = parse_float(vm, v.u.s, &d)) == 1)
        *out = hx_jfloat(d);
    return HX_MIN(rc, 0);
}

CALL(f_abs)
{
    int rc;

    if ((rc = undef_self(vm, c)) != 0)
        return rc;
    if (!hx_jval_is_num(c->self))
        return hx_jvm_fail(vm, c->self.t == HX_J_BIG ? HX_EUNSUP : HX_EFORMAT,
                           "abs: bad operand type '%s'", hx_jval_type(c->self));
    if (c->self.t == HX_J_FLOAT)
        *out = hx_jfloat(fabs(c->self.u.d));
    else if (hx_jval_as_int(c->self) < 0)
        return hx_jinja_binary(vm, HX_OP_SUB, hx_jint(0), c->self, out);
    else
        *out = hx_jint(hx_jval_as_int(c->self));
    return 0;
}

/* round() of Python is exact: it rounds the decimal expansion, ties to even, as printf
 * does. */
static double round_digits(double d, int64_t prec)
{
    char text[640];

    if (!isfinite(d) || prec > 300)
        return d;
    if (prec < 0) {
        const double p = pow(10, (double)HX_MIN(-prec, 400));
        return p > 1e308 ? copysign(0, d) : nearbyint(d / p) * p;
    }
    snprintf(text, sizeof text, "%.*f", (int)prec, d);
    return strtod(text, NULL);
}

CALL(f_round)
{
    const hx_jstr *method = NULL;
    const hx_jval v = c->self;
    int64_t prec;
    int rc;

    if ((rc = undef_self(vm, c)) != 0 ||
        (rc = hx_jtext_want_int(vm, c->a[0], "round: precision", 0, &prec)) != 0 ||
        (given(c->a[1]) &&
         (rc = hx_jtext_want(vm, c->a[1], "round: method", &method)) != 0))
        return rc;
    const bool up = method != NULL && hx_jstr_is(method, "ceil");
    const bool down = method != NULL && hx_jstr_is(method, "floor");
    if (method != NULL && !up && !down && !hx_jstr_is(method, "common"))
        return hx_jvm_fail(vm, HX_EFORMAT, "round: method must be common, ceil or floor");
    if (!hx_jval_is_num(v))
        return hx_jvm_fail(vm, v.t == HX_J_BIG ? HX_EUNSUP : HX_EFORMAT,
                           "round: '%s' is no number", hx_jval_type(v));
    if (!up && !down) {
        if (v.t != HX_J_FLOAT && prec < 0)
            return hx_jvm_fail(vm, HX_EUNSUP, "round: negative precision for integers");
        *out = v.t == HX_J_FLOAT ? hx_jfloat(round_digits(v.u.d, prec))
                                 : hx_jint(hx_jval_as_int(v));
        return 0;
    }
    const double p = pow(10, (double)prec), d = hx_jval_as_double(v) * p;
    if (!isfinite(d) || fabs(d) > 9e15)
        return hx_jvm_fail(vm, HX_EUNSUP, "round: ceil and floor of numbers over 9e15");
    *out = hx_jfloat((up ? ceil(d) : floor(d)) / p);
    return 0;
}

/* ---- sequences ------------------------------------------------------- */

CALL(f_length)
{
    size_t n = 0;
    const int rc = hx_jval_len(vm, c->self, &n);

    *out = hx_jint((int64_t)n);
    return rc;
}

CALL(f_default)
{
    const bool boolean = hx_jval_truthy(c->a[1]);
    const bool use = c->self.t == HX_J_UNDEF || (boolean && !hx_jval_truthy(c->self));

    *out = c->self;
    if (!use)
        return 0;
    *out = c->a[0];
    return given(*out) ? 0 : hx_jstr_new(vm, "", 0, false, out);
}

CALL(f_first)
{
    hx_jiter it;
    int rc;

    if ((rc = hx_jiter_init(vm, &it, c->self)) != 0 ||
        (rc = hx_jiter_next(vm, &it, out)) < 0)
        return rc;
    return rc == 1 ? 0 : hx_jval_hint(vm, "No first item, sequence was empty.", out);
}

CALL(f_last)
{
    const hx_jseq *q;
    int rc;

    if (c->self.t == HX_J_GEN)
        return hx_jvm_fail(vm, HX_EFORMAT, "last: 'generator' object is not reversible");
    if (c->self.t == HX_J_STR && c->self.u.s->n > 0)
        return hx_jinja_item(vm, c->self, hx_jint(-1), out);
    if ((rc = hx_jiter_list(vm, c->self, &q)) != 0)
        return rc;
    if (q->n == 0)
        return hx_jval_hint(vm, "No last item, sequence was empty.", out);
    *out = q->v[q->n - 1];
    return 0;
}

CALL(f_list)
{
    hx_jseq *copy = hx_jvm_alloc(vm, 1, sizeof *copy);
    const hx_jseq *q;
    int rc;

    if (copy == NULL)
        return HX_ENOMEM;
    if ((rc = hx_jiter_list(vm, c->self, &q)) != 0)
        return rc;
    *copy = *q;
    *out = (hx_jval) { .t = HX_J_LIST, .u.q = copy };
    return 0;
}

CALL(f_join)
{
    hx_jbuf b = { .vm = vm };
    const hx_jstr *sep = NULL, *s;
    const hx_jseq *path;
    hx_jiter it;
    hx_jval x;
    int rc;

    if ((given(c->a[0]) && (rc = hx_jval_str(vm, c->a[0], &sep)) != 0) ||
        (rc = path_of(vm, c->a[1], &path)) != 0 ||
        (rc = hx_jiter_init(vm, &it, c->self)) != 0)
        return rc;
    for (size_t i = 0; (rc = hx_jiter_next(vm, &it, &x)) == 1; i++) {
        if ((rc = follow(vm, path, (hx_jval) { .t = HX_J_ABSENT }, x, &x)) != 0 ||
            (rc = hx_jval_str(vm, x, &s)) != 0)
            return rc;
        if (i > 0 && sep != NULL)
            hx_jbuf_put(&b, sep);
        hx_jbuf_put(&b, s);
    }
    return rc < 0 ? rc : hx_jbuf_done(&b, out);
}

/* Keys to sort by: "a,b" gives lists of two. */
static int sort_keys(hx_jvm *vm, const hx_jseq *q, hx_jval attr, bool sensitive,
                     hx_jval *key)
{
    const hx_jstr *s = attr.t == HX_J_STR ? attr.u.s : NULL;
    const hx_jseq *path[16];
    size_t n = 0, at = 0;
    hx_jval *part;
    int rc;

    do {
        hx_jval one = attr;
        size_t end = 0;
        if (s != NULL) {
            const char *comma = memchr(s->p + at, ',', s->n - at);
            end = comma ? (size_t)(comma - s->p) : s->n;
            if ((rc = hx_jstr_sub(vm, s, at, end - at, &one)) != 0)
                return rc;
        }
        if (n == HX_LEN(path))
            return hx_jvm_fail(vm, HX_EUNSUP, "sort: more than %zu attributes",
                               HX_LEN(path));
        if ((rc = path_of(vm, one, &path[n++])) != 0)
            return rc;
        at = end + 1;
    } while (s != NULL && at <= s->n);
    for (size_t i = 0; i < q->n; i++) {
        if ((rc = hx_jval_list(vm, HX_J_LIST, n, &part, &key[i])) != 0)
            return rc;
        for (size_t k = 0; k < n; k++) {
            if ((rc = follow(vm, path[k], (hx_jval) { .t = HX_J_ABSENT }, q->v[i],
                             &part[k])) != 0 ||
                (rc = ignore_case(vm, sensitive, &part[k])) != 0)
                return rc;
        }
    }
    return 0;
}

/* Items of q in the order of key. */
static int sorted(hx_jvm *vm, const hx_jseq *q, const hx_jval *key, bool reverse,
                  hx_jval *out)
{
    uint32_t *order = hx_jvm_alloc(vm, q->n, sizeof *order);
    hx_jval *item;
    int rc;

    if (order == NULL)
        return HX_ENOMEM;
    if ((rc = hx_jval_sort(vm, key, q->n, reverse, order)) != 0 ||
        (rc = hx_jval_list(vm, HX_J_LIST, q->n, &item, out)) != 0)
        return rc;
    for (size_t i = 0; i < q->n; i++)
        item[i] = q->v[order[i]];
    return 0;
}

CALL(f_sort)
{
    const hx_jseq *q;
    hx_jval *key;
    int rc;

    if ((rc = hx_jiter_list(vm, c->self, &q)) != 0)
        return rc;
    if ((key = hx_jvm_alloc(vm, q->n, sizeof *key)) == NULL)
        return HX_ENOMEM;
    if ((rc = sort_keys(vm, q, c->a[2], hx_jval_truthy(c->a[1]), key)) != 0)
        return rc;
    return sorted(vm, q, key, hx_jval_truthy(c->a[0]), out);
}

/* (key, value) of every entry. */
static int dict_pairs(hx_jvm *vm, const hx_jdict *d, hx_jtype t, hx_jval *out)
{
    hx_jval *item, *pair;
    int rc = hx_jval_list(vm, t, d->n, &item, out);

    for (size_t i = 0; i < d->n && rc == 0; i++) {
        if ((rc = hx_jval_list(vm, HX_J_TUPLE, 2, &pair, &item[i])) != 0)
            break;
        pair[0] = d->e[i].k;
        pair[1] = d->e[i].v;
    }
    return rc;
}

CALL(f_dictsort)
{
    const hx_jstr *by = NULL;
    hx_jval pairs, *key;
    int rc;

    if ((rc = undef_self(vm, c)) != 0 ||
        (given(c->a[1]) && (rc = hx_jtext_want(vm, c->a[1], "dictsort: by", &by)) != 0))
        return rc;
    if (by != NULL && !hx_jstr_is(by, "key") && !hx_jstr_is(by, "value"))
        return hx_jvm_fail(vm, HX_EFORMAT, "dictsort: by must be \"key\" or \"value\"");
    if (c->self.t != HX_J_DICT)
        return hx_jvm_fail(vm, HX_EFORMAT, "dictsort: '%s' is no dict",
                           hx_jval_type(c->self));
    if ((rc = dict_pairs(vm, c->self.u.m, HX_J_LIST, &pairs)) != 0)
        return rc;
    if ((key = hx_jvm_alloc(vm, pairs.u.q->n, sizeof *key)) == NULL)
        return HX_ENOMEM;
    for (size_t i = 0; i < pairs.u.q->n; i++) {
        key[i] = pairs.u.q->v[i].u.q->v[by != NULL && hx_jstr_is(by, "value")];
        if ((rc = ignore_case(vm, hx_jval_truthy(c->a[0]), &key[i])) != 0)
            return rc;
    }
    return sorted(vm, pairs.u.q, key, hx_jval_truthy(c->a[2]), out);
}

/* min and max; arg: the comparison that a better item passes. */
CALL(f_extreme)
{
    hx_jval key, best = { .t = HX_J_ABSENT };
    const bool sensitive = hx_jval_truthy(c->a[0]);
    const hx_jseq *path;
    hx_jiter it;
    hx_jval x;
    int rc;

    if ((rc = path_of(vm, c->a[1], &path)) != 0 ||
        (rc = hx_jiter_init(vm, &it, c->self)) != 0)
        return rc;
    while ((rc = hx_jiter_next(vm, &it, &x)) == 1) {
        bool better = !given(best);
        if ((rc = follow(vm, path, (hx_jval) { .t = HX_J_ABSENT }, x, &key)) != 0 ||
            (rc = ignore_case(vm, sensitive, &key)) != 0 ||
            (given(best) &&
             (rc = hx_jval_compare(vm, (hx_jop)c->arg, key, best, &better)) != 0))
            return rc;
        if (better) {
            best = key;
            *out = x;
        }
    }
    if (rc < 0 || given(best))
        return rc;
    return hx_jval_hint(vm, "No aggregated item, sequence was empty.", out);
}

CALL(f_sum)
{
    const hx_jseq *path;
    hx_jiter it;
    hx_jval x;
    int rc;

    *out = given(c->a[1]) ? c->a[1] : hx_jint(0);
    if (out->t == HX_J_STR)
        return hx_jvm_fail(vm, HX_EFORMAT, "sum: strings cannot be summed, use join");
    if ((rc = path_of(vm, c->a[0], &path)) != 0 ||
        (rc = hx_jiter_init(vm, &it, c->self)) != 0)
        return rc;
    while ((rc = hx_jiter_next(vm, &it, &x)) == 1) {
        if ((rc = follow(vm, path, (hx_jval) { .t = HX_J_ABSENT }, x, &x)) != 0 ||
            (rc = hx_jinja_binary(vm, HX_OP_ADD, *out, x, out)) != 0)
            return rc;
    }
    return rc;
}

/* ---- generators ------------------------------------------------------ */

static int gen_new(hx_jvm *vm, int (*next)(hx_jvm *vm, hx_jgen *g, hx_jval *out),
                   hx_jval src, void *state, hx_jval *out)
{
    hx_jgen *g = hx_jvm_alloc(vm, 1, sizeof *g);

    if (g == NULL)
        return HX_ENOMEM;
    *g = (hx_jgen) { .next = next, .it = { .src = src }, .state = state };
    *out = (hx_jval) { .t = HX_J_GEN, .u.g = g };
    return 0;
}

/* Of a list that is there already. */
static int next_plain(hx_jvm *vm, hx_jgen *g, hx_jval *out)
{
    return hx_jiter_next(vm, &g->it, out);
}

CALL(f_items)
{
    hx_jval pairs = c->self;
    int rc;

    if (c->self.t == HX_J_DICT) {
        if ((rc = dict_pairs(vm, c->self.u.m, HX_J_LIST, &pairs)) != 0)
            return rc;
    } else if (c->self.t != HX_J_UNDEF) {
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "items: can only get item pairs from a mapping");
    }
    return gen_new(vm, next_plain, pairs, NULL, out);
}

CALL(f_reverse)
{
    const hx_jseq *q;
    hx_jval *item, back;
    int rc;

    if (c->self.t == HX_J_STR) {
        hx_jbuf b = { .vm = vm };
        const hx_jstr *s = c->self.u.s;
        for (size_t end = s->n, at = s->n; at > 0; end = at) {
            do
                at--;
            while (at > 0 && ((uint8_t)s->p[at] & 0xc0) == 0x80);
            hx_jbuf_sub(&b, s, at, end - at);
        }
        return hx_jbuf_done_safe(&b, s->safe, out);
    }
    if ((rc = hx_jiter_list(vm, c->self, &q)) != 0 ||
        (rc = hx_jval_list(vm, HX_J_LIST, q->n, &item, &back)) != 0)
        return rc;
    for (size_t i = 0; i < q->n; i++)
        item[i] = q->v[q->n - 1 - i];
    /* A generator has no reversed(): jinja2 then answers with a list. */
    if (c->self.t == HX_J_GEN) {
        *out = back;
        return 0;
    }
    return gen_new(vm, next_plain, back, NULL, out);
}

/* map, select, reject, selectattr, rejectattr: a path into each item, then a filter or a
 * test, which decides (keep) or is the result. */
typedef struct {
    hx_jargs args; /* of the call; those of fn are inside */
    const hx_jseq *path;
    const hx_jbuiltin *fn;
    hx_jval dflt;
    bool map, by_attr, negate;
} mapper;

static int mapper_fn(hx_jvm *vm, mapper *m)
{
    const bool named = m->args.n > 0;
    const hx_jstr *name;
    int rc;

    if (!named)
        return m->map ? hx_jvm_fail(vm, HX_EFORMAT, "map requires a filter argument") : 0;
    if ((rc = hx_jtext_want(vm, m->args.v[0], m->map ? "map: filter" : "select: test",
                            &name)) != 0)
        return rc;
    const hx_str n = { name->p, name->n };
    m->fn = m->map ? hx_jcall_filter(n) : hx_jcall_test(n);
    if (m->fn == NULL)
        return hx_jvm_fail(vm, HX_EUNSUP, "%s \"%.*s\" is not known",
                           m->map ? "filter" : "test", (int)HX_MIN(name->n, 60), name->p);
    m->args.v++;
    m->args.n--;
    return 0;
}

/* map(attribute=…, default=…) */
static int mapper_attribute(hx_jvm *vm, mapper *m)
{
    hx_jval attr = { .t = HX_J_ABSENT };

    for (size_t k = 0; k < m->args.n_key; k++) {
        if (hx_jstr_is(m->args.key[k], "attribute"))
            attr = m->args.v[k];
        else if (hx_jstr_is(m->args.key[k], "default"))
            m->dflt = m->args.v[k];
        else
            return hx_jvm_fail(vm, HX_EFORMAT, "map: unexpected keyword argument '%.*s'",
                               (int)HX_MIN(m->args.key[k]->n, 60), m->args.key[k]->p);
    }
    return path_of(vm, attr, &m->path);
}

/* Arguments are looked at when the first item is asked for, as in jinja2. */
static int mapper_begin(hx_jvm *vm, hx_jgen *g)
{
    mapper *m = g->state;
    const hx_jval src = g->it.src;
    bool attribute = false;
    int rc;

    g->begun = true;
    if (!hx_jval_truthy(src)) {
        g->it.src = (hx_jval) { .t = HX_J_UNDEF };
        return 0;
    }
    for (size_t k = 0; m->map && m->args.n == 0 && k < m->args.n_key; k++)
        attribute |= hx_jstr_is(m->args.key[k], "attribute");
    if (attribute) {
        rc = mapper_attribute(vm, m);
    } else if (m->by_attr) {
        if (m->args.n == 0)
            return hx_jvm_fail(vm, HX_EFORMAT, "missing parameter for attribute name");
        rc = path_of(vm, m->args.v[0], &m->path);
        m->args.v++;
        m->args.n--;
        if (rc == 0)
            rc = mapper_fn(vm, m);
    } else {
        rc = mapper_fn(vm, m);
    }
    return rc != 0 ? rc : hx_jiter_init(vm, &g->it, src);
}

static int mapper_next(hx_jvm *vm, hx_jgen *g, hx_jval *out)
{
    static const hx_jseq NO_PATH = { NULL, 0 };
    mapper *m = g->state;
    hx_jval x, y;
    int rc;

    if (!g->begun && (rc = mapper_begin(vm, g)) != 0)
        return rc;
    while ((rc = hx_jiter_next(vm, &g->it, &x)) == 1) {
        if ((rc = follow(vm, m->path ? m->path : &NO_PATH, m->dflt, x, &y)) != 0 ||
            (m->fn != NULL && (rc = hx_jcall_run(vm, m->fn, y, &m->args, &y)) != 0))
            return rc;
        if (m->map || hx_jval_truthy(y) != m->negate) {
            *out = m->map ? y : x;
            return 1;
        }
    }
    return rc;
}

enum { MAP = 1, BY_ATTR = 2, NEGATE = 4 };

CALL(f_mapper)
{
    mapper *m = hx_jvm_alloc(vm, 1, sizeof *m);

    if (m == NULL)
        return HX_ENOMEM;
    m->map = c->arg & MAP;
    m->by_attr = c->arg & BY_ATTR;
    m->negate = c->arg & NEGATE;
    m->args = *c->raw;
    return gen_new(vm, mapper_next, c->self, m, out);
}

/* seen holds what came so far; a linear search, counted as work. */
typedef struct {
    const hx_jseq *path;
    hx_jval *seen;
    size_t n, cap;
    bool sensitive;
} uniq;

static int uniq_is_new(hx_jvm *vm, uniq *u, hx_jval key)
{
    bool same = false;
    int rc;

    if (!hx_jdict_hashable(key))
        return hx_jvm_fail(vm, HX_EFORMAT, "unique: unhashable type: '%s'",
                           hx_jval_type(key));
    for (size_t i = 0; i < u->n && !same; i++) {
        if ((rc = hx_jval_equal(vm, u->seen[i], key, &same)) != 0)
            return rc;
    }
    if ((rc = hx_jvm_work(vm, u->n / 16)) != 0 || same)
        return rc;
    if (u->n == u->cap) {
        const size_t cap = u->cap ? 2 * u->cap : 8;
        hx_jval *more = hx_jvm_alloc(vm, cap, sizeof *more);
        if (more == NULL)
            return HX_ENOMEM;
        if (u->n > 0)
            memcpy(more, u->seen, u->n * sizeof *more);
        u->seen = more;
        u->cap = cap;
    }
    u->seen[u->n++] = key;
    return 1;
}

static int uniq_next(hx_jvm *vm, hx_jgen *g, hx_jval *out)
{
    uniq *u = g->state;
    hx_jval key;
    int rc;

    if (!g->begun && (rc = hx_jiter_init(vm, &g->it, g->it.src)) != 0)
        return rc;
    g->begun = true;
    while ((rc = hx_jiter_next(vm, &g->it, out)) == 1) {
        if ((rc = follow(vm, u->path, (hx_jval) { .t = HX_J_ABSENT }, *out, &key)) != 0 ||
            (rc = ignore_case(vm, u->sensitive, &key)) != 0 ||
            (rc = uniq_is_new(vm, u, key)) != 0)
            return rc;
    }
    return rc;
}

CALL(f_unique)
{
    uniq *u = hx_jvm_alloc(vm, 1, sizeof *u);
    int rc;

    if (u == NULL)
        return HX_ENOMEM;
    u->sensitive = hx_jval_truthy(c->a[0]);
    if ((rc = path_of(vm, c->a[1], &u->path)) != 0)
        return rc;
    return gen_new(vm, uniq_next, c->self, u, out);
}

/* n items of q from `from`, then fill. */
static int chunk(hx_jvm *vm, const hx_jseq *q, size_t from, size_t n, size_t n_fill,
                 hx_jval fill, hx_jval *out)
{
    hx_jval *item;
    const int rc = hx_jval_list(vm, HX_J_LIST, n + n_fill, &item, out);

    for (size_t i = 0; i < n + n_fill && rc == 0; i++)
        item[i] = i < n ? q->v[from + i] : fill;
    return rc;
}

/* batch (arg 1): rows of n; slice: n columns. Both fill what is missing if asked to. */
CALL(f_chunks)
{
    const bool rows = c->arg == 1;
    const bool fill = given(c->a[1]) && c->a[1].t != HX_J_NONE;
    hx_jval list, *item;
    const hx_jseq *q;
    size_t at = 0;
    int64_t n;
    int rc;

    if ((rc = hx_jtext_want_int(vm, c->a[0], rows ? "batch" : "slice", 0, &n)) != 0 ||
        (rc = hx_jiter_list(vm, c->self, &q)) != 0)
        return rc;
    if (n < 1 || n > RANGE_MAX)
        return hx_jvm_fail(vm, HX_EUNSUP, "%s by %lld", rows ? "batch" : "slice",
                           (long long)n);
    const size_t k = (size_t)n, count = rows ? (q->n + k - 1) / k : k;
    if ((rc = hx_jval_list(vm, HX_J_LIST, count, &item, &list)) != 0)
        return rc;
    for (size_t i = 0; i < count && rc == 0; i++) {
        const size_t len = rows ? HX_MIN(k, q->n - at) : q->n / k + (i < q->n % k);
        const size_t pad = !fill ? 0 : rows ? k - len : (size_t)(i >= q->n % k);
        rc = chunk(vm, q, at, len, pad, c->a[1], &item[i]);
        at += len;
    }
    return rc != 0 ? rc : gen_new(vm, next_plain, list, NULL, out);
}

static const hx_jbuiltin FILTERS[] = {
    { "abs", f_abs, "", 0 },
    { "batch", f_chunks, "linecount fill_with?", 1 },
    { "capitalize", f_case, "", HX_J_CAPITALIZE },
    { "count", f_length, "", 0 },
    { "d", f_default, "default_value? boolean?", 0 },
    { "default", f_default, "default_value? boolean?", 0 },
    { "dictsort", f_dictsort, "case_sensitive? by? reverse?", 0 },
    { "e", f_escape, "", 0 },
    { "escape", f_escape, "", 0 },
    { "first", f_first, "", 0 },
    { "float", f_float, "default?", 0 },
    { "format", f_format, "*", 0 },
    { "indent", f_indent, "width? first? blank?", 0 },
    { "int", f_int, "default? base?", 0 },
    { "items", f_items, "", 0 },
    { "join", f_join, "d? attribute?", 0 },
    { "last", f_last, "", 0 },
    { "length", f_length, "", 0 },
    { "list", f_list, "", 0 },
    { "lower", f_case, "", HX_J_LOWER },
    { "map", f_mapper, "*", MAP },
    { "max", f_extreme, "case_sensitive? attribute?", HX_OP_GT },
    { "min", f_extreme, "case_sensitive? attribute?", HX_OP_LT },
    { "reject", f_mapper, "*", NEGATE },
    { "rejectattr", f_mapper, "*", BY_ATTR | NEGATE },
    { "replace", f_replace, "old new count?", 0 },
    { "reverse", f_reverse, "", 0 },
    { "round", f_round, "precision? method?", 0 },
    { "safe", f_safe, "", 0 },
    { "select", f_mapper, "*", 0 },
    { "selectattr", f_mapper, "*", BY_ATTR },
    { "slice", f_chunks, "slices fill_with?", 0 },
    { "sort", f_sort, "reverse? case_sensitive? attribute?", 0 },
    { "string", f_string, "", 0 },
    { "sum", f_sum, "attribute? start?", 0 },
    { "title", f_case, "", HX_J_TITLE },
    { "tojson", f_tojson, "ensure_ascii? indent? separators? sort_keys?", 0 },
    { "trim", f_trim, "chars?", 0 },
    { "unique", f_unique, "case_sensitive? attribute?", 0 },
    { "upper", f_case, "", HX_J_UPPER },
    { NULL, NULL, NULL, 0 },
};

/* ---- tests ----------------------------------------------------------- */

static int yes(hx_jval *out, bool b)
{
    *out = hx_jbool(b);
    return 0;
}

/* Sets of types; arg of the tests that only look at the type. */
#define IS(t) (1 << HX_J_##t)
enum {
    ANY_INT = IS(INT) | IS(BIG),
    ANY_NUMBER = IS(BOOL) | IS(FLOAT) | ANY_INT,
    /* what has a length and can be subscripted; undefined pretends to */
    SEQUENCE = IS(UNDEF) | IS(STR) | IS(LIST) | IS(TUPLE) | IS(DICT) | IS(RANGE),
    ITERABLE = SEQUENCE | IS(VIEW) | IS(GEN) | IS(LOOP),
    CALLABLE = IS(UNDEF) | IS(MACRO) | IS(FUNC) | IS(METHOD) | IS(LOOP)
};

CALL(t_type)
{
    (void)vm;
    return yes(out, (unsigned)c->arg >> c->self.t & 1);
}

CALL(t_bool)
{
    (void)vm;
    return yes(out, c->self.t == HX_J_BOOL && c->self.u.b == (c->arg == 1));
}

CALL(t_escaped)
{
    (void)vm;
    return yes(out, c->self.t == HX_J_STR && c->self.u.s->safe);
}

/* divisibleby; odd and even by 2, arg being what remains. */
CALL(t_remainder)
{
    bool same;
    hx_jval r;
    int rc;

    if ((rc = hx_jinja_binary(vm, HX_OP_MOD, c->self,
                              given(c->a[0]) ? c->a[0] : hx_jint(2), &r)) != 0 ||
        (rc = hx_jval_equal(vm, r, hx_jint(c->arg), &same)) != 0)
        return rc;
    return yes(out, same);
}

CALL(t_case)
{
    const hx_jstr *s;
    const int rc = hx_jval_str(vm, c->self, &s);

    return rc != 0 ? rc : yes(out, hx_jtext_all_case(s, c->arg == HX_J_UPPER));
}

CALL(t_compare)
{
    bool b = false;
    const int rc = hx_jval_compare(vm, (hx_jop)c->arg, c->self, c->a[0], &b);

    *out = hx_jbool(b);
    return rc;
}

/* The same object. Whether two equal numbers or texts are one object is Python's secret.
 */
CALL(t_sameas)
{
    const hx_jval a = c->self, b = c->a[0];

    if (a.t != b.t)
        return yes(out, false);
    switch ((hx_jtype)a.t) {
    case HX_J_NONE:
        return yes(out, true);
    case HX_J_BOOL:
        return yes(out, a.u.b == b.u.b);
    case HX_J_LIST:
    case HX_J_DICT:
    case HX_J_SPACE:
    case HX_J_MACRO:
        return yes(out, a.u.q == b.u.q);
    default:
        return hx_jvm_fail(vm, HX_EUNSUP, "sameas with two values of type %s",
                           hx_jval_type(a));
    }
}

static const hx_jbuiltin TESTS[] = {
    { "defined", t_type, "", ~IS(UNDEF) },
    { "undefined", t_type, "", IS(UNDEF) },
    { "none", t_type, "", IS(NONE) },
    { "boolean", t_type, "", IS(BOOL) },
    { "integer", t_type, "", ANY_INT },
    { "float", t_type, "", IS(FLOAT) },
    { "number", t_type, "", ANY_NUMBER },
    { "string", t_type, "", IS(STR) },
    { "mapping", t_type, "", IS(DICT) },
    { "sequence", t_type, "", SEQUENCE },
    { "iterable", t_type, "", ITERABLE },
    { "callable", t_type, "", CALLABLE },
    { "true", t_bool, "", 1 },
    { "false", t_bool, "", 0 },
    { "escaped", t_escaped, "", 0 },
    { "lower", t_case, "", HX_J_LOWER },
    { "upper", t_case, "", HX_J_UPPER },
    { "odd", t_remainder, "", 1 },
    { "even", t_remainder, "", 0 },
    { "divisibleby", t_remainder, "num", 0 },
    { "sameas", t_sameas, "other", 0 },
    { "in", t_compare, "seq", HX_OP_IN },
    { "==", t_compare, "other", HX_OP_EQ },
    { "eq", t_compare, "other", HX_OP_EQ },
    { "equalto", t_compare, "other", HX_OP_EQ },
    { "!=", t_compare, "other", HX_OP_NE },
    { "ne", t_compare, "other", HX_OP_NE },
    { ">", t_compare, "other", HX_OP_GT },
    { "gt", t_compare, "other", HX_OP_GT },
    { "greaterthan", t_compare, "other", HX_OP_GT },
    { ">=", t_compare, "other", HX_OP_GE },
    { "ge", t_compare, "other", HX_OP_GE },
    { "<", t_compare, "other", HX_OP_LT },
    { "lt", t_compare, "other", HX_OP_LT },
    { "lessthan", t_compare, "other", HX_OP_LT },
    { "<=", t_compare, "other", HX_OP_LE },
    { "le", t_compare, "other", HX_OP_LE },
    { NULL, NULL, NULL, 0 },
};

/* ---- methods --------------------------------------------------------- */

CALL(m_items)
{
    const int rc = dict_pairs(vm, c->self.u.m, HX_J_VIEW, out);

    out->why = HX_J_ITEMS;
    return rc;
}

/* keys() and values(): arg. */
CALL(m_half)
{
    const hx_jdict *d = c->self.u.m;
    hx_jval *item;
    const int rc = hx_jval_list(vm, HX_J_VIEW, d->n, &item, out);

    out->why = (uint8_t)c->arg;
    for (size_t i = 0; i < d->n && rc == 0; i++)
        item[i] = c->arg == HX_J_KEYS ? d->e[i].k : d->e[i].v;
    return rc;
}

CALL(m_get)
{
    int rc;

    if (!hx_jdict_hashable(c->a[0]))
        return hx_jvm_fail(vm, HX_EFORMAT, "unhashable type: '%s'",
                           hx_jval_type(c->a[0]));
    *out = given(c->a[1]) ? c->a[1] : hx_jnone();
    rc = hx_jdict_get(vm, c->self.u.m, c->a[0], out);
    return rc < 0 ? rc : 0;
}

/* Values never change, so a copy is the value. */
CALL(m_copy)
{
    (void)vm;
    *out = c->self;
    return 0;
}

/* count (arg 1) and index of lists. */
CALL(m_find)
{
    const hx_jseq *q = c->self.u.q;
    int64_t at = -1, n = 0;
    int rc;

    for (size_t i = 0; i < q->n && (c->arg == 1 || at < 0); i++) {
        bool same;
        if ((rc = hx_jval_equal(vm, q->v[i], c->a[0], &same)) != 0)
            return rc;
        n += same;
        at = same && at < 0 ? (int64_t)i : at;
    }
    if (c->arg == 0 && at < 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "index: value is not in the list");
    *out = hx_jint(c->arg == 1 ? n : at);
    return hx_jvm_work(vm, q->n / 16);
}

CALL(m_cycle)
{
    const hx_jargs *a = c->raw;

    if (a->n_key > 0 || a->n == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "cycle: no items for cycling given");
    *out = a->v[(size_t)c->self.u.loop->index0 % a->n];
    return 0;
}

CALL(m_changed)
{
    hx_jloop *l = c->self.u.loop;
    hx_jval now, *item;
    bool same = false;
    int rc;

    if ((rc = hx_jval_list(vm, HX_J_TUPLE, c->raw->n, &item, &now)) != 0)
        return rc;
    for (size_t i = 0; i < c->raw->n; i++)
        item[i] = c->raw->v[i];
    if (given(l->changed) && (rc = hx_jval_equal(vm, l->changed, now, &same)) != 0)
        return rc;
    l->changed = now;
    return yes(out, !same);
}

static const hx_jbuiltin DICT_METHODS[] = {
    { "items", m_items, "", 0 },
    { "keys", m_half, "", HX_J_KEYS },
    { "values", m_half, "", HX_J_VALUES },
    { "get", m_get, "key default?", 0 },
    { "copy", m_copy, "", 0 },
    { NULL, NULL, NULL, 0 },
};

static const hx_jbuiltin LIST_METHODS[] = {
    { "copy", m_copy, "", 0 },
    { "count", m_find, "value", 1 }, /* tuples start here */
    { "index", m_find, "value", 0 },
    { NULL, NULL, NULL, 0 },
};

static const hx_jbuiltin LOOP_METHODS[] = {
    { "cycle", m_cycle, "*", 0 },
    { "changed", m_changed, "*", 0 },
    { NULL, NULL, NULL, 0 },
};

/* Per type: methods; attributes that the sandbox takes away because they change the
 * value; attributes that Python has and this does not. */
static const struct {
    int types;
    const hx_jbuiltin *methods;
    const char *unsafe, *refused;
} ATTRIBUTES[] = {
    { IS(STR), hx_jtext_methods, "",
      "casefold center encode expandtabs format_map isascii isidentifier isnumeric "
      "isprintable "
      "istitle ljust maketrans rjust swapcase translate zfill" },
    { IS(DICT), DICT_METHODS, "clear pop popitem setdefault update", "fromkeys" },
    { IS(LIST), LIST_METHODS, "append clear extend insert pop remove reverse sort", "" },
    { IS(TUPLE), LIST_METHODS + 1, "", "" },
    { IS(LOOP), LOOP_METHODS, "", "" },
    { ANY_NUMBER, NULL, "",
      "as_integer_ratio bit_count bit_length conjugate denominator from_bytes fromhex "
      "hex imag "
      "is_integer numerator real to_bytes" },
    { IS(RANGE), NULL, "", "count index start step stop" },
    { IS(VIEW), NULL, "", "isdisjoint mapping" },
    { IS(GEN), NULL, "", "close gi_code gi_frame gi_running gi_yieldfrom send throw" },
    { IS(MACRO), NULL, "",
      "arguments caller catch_kwargs catch_varargs explicit_caller" },
};

int hx_jcall_method(hx_jvm *vm, hx_jval obj, const hx_jstr *name, hx_jval *out)
{
    const char *type = hx_jval_type(obj);
    char text[120];
    size_t i = 0;
    int rc, n;

    while (i < HX_LEN(ATTRIBUTES) && !(ATTRIBUTES[i].types >> obj.t & 1))
        i++;
    if (i == HX_LEN(ATTRIBUTES))
        return 0;
    if (find_param(ATTRIBUTES[i].unsafe, name, &n) >= 0) {
        snprintf(text, sizeof text, "access to attribute '%.*s' of '%s' object is unsafe",
                 (int)name->n, name->p, type);
        rc = hx_jval_hint(vm, text, out);
        return rc != 0 ? rc : 1;
    }
    if (find_param(ATTRIBUTES[i].refused, name, &n) >= 0)
        return hx_jvm_fail(vm, HX_EUNSUP, "%s.%.*s is outside the subset", type,
                           (int)name->n, name->p);
    const hx_jbuiltin *fn =
        ATTRIBUTES[i].methods ? find(ATTRIBUTES[i].methods, name->p, name->n) : NULL;
    if (fn == NULL)
        return 0;
    hx_jmethod *m = hx_jvm_alloc(vm, 1, sizeof *m);
    if (m == NULL)
        return HX_ENOMEM;
    *m = (hx_jmethod) { obj, fn };
    *out = (hx_jval) { .t = HX_J_METHOD, .u.met = m };
    return 1;
}

/* ---- global functions ------------------------------------------------ */

/* range(stop), range(start, stop), range(start, stop, step). Numbers up to 2^40 leave
 * room for slices of slices without overflow. */
CALL(g_range)
{
    const hx_jargs *a = c->raw;
    const int64_t limit = (int64_t)1 << 40;
    int64_t v[3] = { 0, 0, 1 };
    hx_jrange *r;
    int rc;

    if (a->n < 1 || a->n > 3 || a->n_key > 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "range expects 1 to 3 arguments");
    for (size_t i = 0; i < a->n; i++) {
        int64_t *to = &v[a->n == 1 ? 1 : i];
        if ((rc = hx_jtext_want_int(vm, a->v[i], "range: argument", 0, to)) != 0)
            return rc;
        if (*to > limit || *to < -limit)
            return hx_jvm_fail(vm, HX_EUNSUP, "range: numbers over 2^40");
    }
    if (v[2] == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "range: step must not be zero");
    const int64_t way = v[2] > 0 ? v[1] - v[0] : v[0] - v[1];
    const int64_t stride = v[2] > 0 ? v[2] : -v[2];
    const int64_t n = way > 0 ? (way - 1) / stride + 1 : 0;
    if (n > RANGE_MAX)
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "range of %lld numbers, at most %d are allowed", (long long)n,
                           RANGE_MAX);
    if ((r = hx_jvm_alloc(vm, 1, sizeof *r)) == NULL)
        return HX_ENOMEM;
    *r = (hx_jrange) { .start = v[0], .stop = v[1], .step = v[2], .n = (size_t)n };
    *out = (hx_jval) { .t = HX_J_RANGE, .u.r = r };
    return 0;
}

/* dict(mapping or pairs, name=value, …) */
static int make_dict(hx_jvm *vm, const hx_jargs *a, const char *what, hx_jdict **out)
{
    const hx_jseq *q, *pair;
    int rc;

    if (a->n > 1)
        return hx_jvm_fail(vm, HX_EFORMAT, "%s expected at most 1 argument, got %zu",
                           what, a->n);
    if (a->n == 1 && a->v[0].t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, a->v[0]);
    if ((rc = hx_jdict_new(vm, a->n_key + 1, out)) != 0)
        return rc;
    if (a->n == 1 && a->v[0].t == HX_J_DICT) {
        const hx_jdict *d = a->v[0].u.m;
        if ((rc = hx_jdict_new(vm, d->n + a->n_key, out)) != 0)
            return rc;
        if (d->n > 0)
            memcpy((*out)->e, d->e, d->n * sizeof *d->e);
        (*out)->n = d->n;
    } else if (a->n == 1) {
        if ((rc = hx_jiter_list(vm, a->v[0], &q)) != 0)
            return rc;
        for (size_t i = 0; i < q->n; i++) {
            if ((rc = hx_jiter_list(vm, q->v[i], &pair)) != 0)
                return rc;
            if (pair->n != 2)
                return hx_jvm_fail(vm, HX_EFORMAT,
                                   "%s: element %zu has length %zu; 2 is required", what,
                                   i, pair->n);
            if ((rc = hx_jdict_put(vm, *out, pair->v[0], pair->v[1])) != 0)
                return rc;
        }
    }
    for (size_t k = 0; k < a->n_key; k++) {
        if ((rc = hx_jdict_put(vm, *out, str_val(a->key[k]), a->v[a->n + k])) != 0)
            return rc;
    }
    return 0;
}

CALL(g_dict)
{
    *out = (hx_jval) { .t = HX_J_DICT };
    return make_dict(vm, c->raw, "dict", &out->u.m);
}

CALL(g_namespace)
{
    *out = (hx_jval) { .t = HX_J_SPACE };
    return make_dict(vm, c->raw, "namespace", &out->u.m);
}

CALL(g_raise_exception)
{
    const hx_jstr *s;
    const int rc = hx_jval_str(vm, c->a[0], &s);

    (void)out;
    return rc != 0 ? rc
                   : hx_jvm_fail(vm, HX_EFORMAT, "%.*s", (int)HX_MIN(s->n, 190), s->p);
}

CALL(g_strftime_now)
{
    const hx_jstr *s;
    const int rc = hx_jtext_want(vm, c->a[0], "strftime_now: format", &s);

    return rc != 0 ? rc : hx_jformat_time(vm, s, out);
}

static const hx_jbuiltin GLOBALS[] = {
    { "range", g_range, "*", 0 },
    { "dict", g_dict, "*", 0 },
    { "namespace", g_namespace, "*", 0 },
    { "raise_exception", g_raise_exception, "message", 0 },
    { "strftime_now", g_strftime_now, "format", 0 },
    { "lipsum", NULL, REFUSED, 0 },
    { "cycler", NULL, REFUSED, 0 },
    { "joiner", NULL, REFUSED, 0 },
    { NULL, NULL, NULL, 0 },
};

const hx_jbuiltin *hx_jcall_filter(hx_str name)
{
    return find(FILTERS, name.p, name.n);
}

const hx_jbuiltin *hx_jcall_test(hx_str name)
{
    return find(TESTS, name.p, name.n);
}

const hx_jbuiltin *hx_jcall_global(hx_str name)
{
    return find(GLOBALS, name.p, name.n);
}
