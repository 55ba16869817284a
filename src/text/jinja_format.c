/* jinja_format.c - Python's three ways to format: "%" on strings, str.format, strftime.
 *
 * Called by jinja.c, jinja_text.c and jinja_call.c. Directives outside the common ones
 * are refused by name. No format string ever reaches the C library. */
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "text/jinja_ast.h"

/* ---- numbers --------------------------------------------------------- */

/* A field: what stands between width and the digits. */
typedef struct {
    char fill[4];
    size_t n_fill;
    char align;          /* < > = ^, 0: the type's own */
    char sign;           /* + space, 0: only minus */
    char group;          /* , _ or 0 */
    bool alt;            /* 0x in front */
    int64_t width, prec; /* prec -1: not given */
    char type;           /* d x X o b f F e E g G % c s, 0: none */
} field;

enum { WIDTH_MAX = 10000, PREC_MAX = 300, TEXT_MAX = 1024 };

/* value in base, most significant digit first, at the end of buf. */
static const char *int_digits(uint64_t value, unsigned base, bool upper, char buf[72])
{
    const char *set = upper ? "0123456789ABCDEF" : "0123456789abcdef";
    char *p = buf + 71;

    *p = 0;
    do {
        *--p = set[value % base];
        value /= base;
    } while (value > 0);
    return p;
}

static void real_digits(double d, const field *f, char *to, size_t cap)
{
    const int prec = f->prec < 0 ? 6 : (int)f->prec;

    switch (f->type) {
    case 'e':
        snprintf(to, cap, "%.*e", prec, d);
        break;
    case 'E':
        snprintf(to, cap, "%.*E", prec, d);
        break;
    case 'g':
        snprintf(to, cap, "%.*g", prec, d);
        break;
    case 'G':
        snprintf(to, cap, "%.*G", prec, d);
        break;
    case 'F':
        snprintf(to, cap, "%.*F", prec, d);
        break;
    default:
        snprintf(to, cap, "%.*f", prec, d);
        break;
    }
}

/* digits with separators between groups of three before the point. */
static void put_grouped(hx_jbuf *b, const char *digits, char sep)
{
    const size_t whole = strspn(digits, "0123456789");

    for (size_t i = 0; i < whole; i++) {
        hx_jbuf_add(b, digits + i, 1, NULL, false);
        if (sep != 0 && (whole - i) % 3 == 1 && i + 1 < whole)
            hx_jbuf_add(b, &sep, 1, NULL, false);
    }
    hx_jbuf_lit(b, digits + whole);
}

static void put_fill(hx_jbuf *b, const field *f, size_t n)
{
    if (f->n_fill <= 1)
        hx_jbuf_pad(b, f->n_fill ? f->fill[0] : ' ', n);
    for (; f->n_fill > 1 && n > 0 && b->rc == 0; n--)
        hx_jbuf_add(b, f->fill, f->n_fill, NULL, false);
}

/* Pads head (sign, prefix) and body to the width. */
static void put_field(hx_jbuf *b, const field *f, const char *head, const hx_jstr *body,
                      char align)
{
    const size_t n = strlen(head) + body->len;
    const size_t pad = f->width > 0 && (size_t)f->width > n ? (size_t)f->width - n : 0;
    const size_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0;

    put_fill(b, f, left);
    hx_jbuf_lit(b, head);
    if (align == '=')
        put_fill(b, f, pad);
    hx_jbuf_put(b, body);
    if (align == '<' || align == '^')
        put_fill(b, f, pad - left);
}

static int format_number(hx_jvm *vm, hx_jbuf *b, const field *f, hx_jval v)
{
    char text[TEXT_MAX], buf[72], head[4] = { 0 };
    hx_jbuf digits = { .vm = vm };
    bool negative;
    hx_jval body;
    int rc;

    if (f->type == 'd' || f->type == 'x' || f->type == 'X' || f->type == 'o' ||
        f->type == 'b') {
        const int64_t i = hx_jval_as_int(v);
        const unsigned base = f->type == 'd'   ? 10
                              : f->type == 'o' ? 8
                              : f->type == 'b' ? 2
                                               : 16;
        negative = i < 0;
        const char *s = int_digits(negative ? 0 - (uint64_t)i : (uint64_t)i, base,
                                   f->type == 'X', buf);
        if (f->prec > (int64_t)strlen(s))
            hx_jbuf_pad(&digits, '0', (size_t)f->prec - strlen(s));
        put_grouped(&digits, s, f->group);
    } else {
        const double d = hx_jval_as_double(v) * (f->type == '%' ? 100 : 1);
        negative = signbit(d) && !isnan(d);
        real_digits(fabs(d), f, text, sizeof text);
        put_grouped(&digits, text, f->group);
        if (f->type == '%')
            hx_jbuf_lit(&digits, "%");
    }
    if (negative || f->sign != 0)
        head[0] = negative ? '-' : f->sign;
    if (f->alt && f->type != 'd' && strchr("xXob", f->type) != NULL) {
        head[strlen(head)] = '0';
        head[strlen(head)] = f->type;
    }
    if ((rc = hx_jbuf_done(&digits, &body)) != 0)
        return rc;
    put_field(b, f, head, body.u.s, f->align ? f->align : '>');
    return b->rc;
}

static int format_text(hx_jvm *vm, hx_jbuf *b, const field *f, const hx_jstr *s,
                       char align)
{
    hx_jval part = { .t = HX_J_STR, .u.s = s };
    size_t to;
    int rc;

    if (f->prec >= 0 && (size_t)f->prec < s->len) {
        if ((rc = hx_jstr_seek(vm, s, (size_t)f->prec, &to)) != 0 ||
            (rc = hx_jstr_sub(vm, s, 0, to, &part)) != 0)
            return rc;
    }
    put_field(b, f, "", part.u.s, align);
    return b->rc;
}

/* Reads digits at *i; -1 where there are none. */
static int read_count(hx_jvm *vm, const hx_jstr *s, size_t *i, int64_t max, int64_t *out)
{
    *out = -1;
    for (; *i < s->n && s->p[*i] >= '0' && s->p[*i] <= '9'; ++*i) {
        *out = (*out < 0 ? 0 : *out) * 10 + (s->p[*i] - '0');
        if (*out > max)
            return hx_jvm_fail(vm, HX_ELIMIT, "format: a width or precision over %lld",
                               (long long)max);
    }
    return 0;
}

/* ---- "%" ------------------------------------------------------------- */

typedef struct {
    hx_jval arg;
    size_t used; /* of the tuple; 1 for a single value */
    bool by_name;
} percent;

static int percent_next(hx_jvm *vm, percent *p, hx_jval *out)
{
    const size_t n = p->arg.t == HX_J_TUPLE ? p->arg.u.q->n : 1;

    if (p->used >= n)
        return hx_jvm_fail(vm, HX_EFORMAT, "not enough arguments for format string");
    *out = p->arg.t == HX_J_TUPLE ? p->arg.u.q->v[p->used] : p->arg;
    p->used++;
    return 0;
}

static int percent_count(hx_jvm *vm, const hx_jstr *fmt, size_t *i, percent *p,
                         int64_t max, int64_t *out)
{
    hx_jval v;
    int rc;

    if (*i >= fmt->n || fmt->p[*i] != '*')
        return read_count(vm, fmt, i, max, out);
    ++*i;
    if ((rc = percent_next(vm, p, &v)) != 0 ||
        (rc = hx_jtext_want_int(vm, v, "format: \"*\"", 0, out)) != 0)
        return rc;
    if (*out < 0 || *out > max)
        return hx_jvm_fail(vm, HX_EUNSUP, "format: a width or precision of %lld",
                           (long long)*out);
    return 0;
}

static int percent_value(hx_jvm *vm, hx_jbuf *b, field *f, hx_jval v)
{
    const char align = f->align == '<' ? '<' : '>';
    const hx_jstr *s;
    int rc;

    if (f->type == 's' || f->type == 'r') {
        if ((rc = f->type == 'r' ? hx_jval_repr_str(vm, v, &s)
                                 : hx_jval_str(vm, v, &s)) != 0)
            return rc;
        f->n_fill = 0;
        return format_text(vm, b, f, s, align);
    }
    if (v.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, v);
    if (v.t == HX_J_BIG)
        return hx_jvm_fail(vm, HX_EUNSUP, "formatting integers over 64 bits");
    if (f->type == 'c') {
        if (v.t != HX_J_STR || v.u.s->len != 1)
            return hx_jvm_fail(vm, HX_EUNSUP, "%%c with anything but one character");
        f->n_fill = 0;
        return format_text(vm, b, f, v.u.s, align);
    }
    if (f->type == 'i' || f->type == 'u')
        f->type = 'd';
    if (!hx_jval_is_num(v) || (v.t == HX_J_FLOAT && strchr("xXo", f->type) != NULL))
        return hx_jvm_fail(vm, HX_EFORMAT, "%%%c format: a number is required, not %s",
                           f->type, hx_jval_type(v));
    if (v.t == HX_J_FLOAT && f->type == 'd') {
        if (!(fabs(v.u.d) < 9e18))
            return hx_jvm_fail(vm, HX_EUNSUP, "%%d format of a number over 64 bits");
        v = hx_jint((int64_t)v.u.d);
    }
    return format_number(vm, b, f, v);
}

/* One directive; *i stands behind the "%". */
static int percent_one(hx_jvm *vm, hx_jbuf *b, const hx_jstr *fmt, size_t *i, percent *p)
{
    field f = { .prec = -1 };
    hx_jval v, key;
    bool named = false;
    int rc;

    if (*i < fmt->n && fmt->p[*i] == '(') {
        const char *end = memchr(fmt->p + *i, ')', fmt->n - *i);
        if (end == NULL)
            return hx_jvm_fail(vm, HX_EFORMAT, "incomplete format key");
        if (p->arg.t != HX_J_DICT)
            return hx_jvm_fail(vm, HX_EFORMAT, "format requires a mapping");
        const size_t from = *i + 1, to = (size_t)(end - fmt->p);
        if ((rc = hx_jstr_sub(vm, fmt, from, to - from, &key)) != 0 ||
            (rc = hx_jdict_get(vm, p->arg.u.m, key, &v)) < 0)
            return rc;
        if (rc == 0)
            return hx_jvm_fail(vm, HX_EFORMAT, "format: no key '%.*s'",
                               (int)HX_MIN(to - from, 60), fmt->p + from);
        *i = to + 1;
        named = p->by_name = true;
    }
    for (; *i < fmt->n && memchr("-+ 0#", fmt->p[*i], 5) != NULL; ++*i) {
        switch (fmt->p[*i]) {
        case '-':
            f.align = '<';
            break;
        case '+':
            f.sign = '+';
            break;
        case ' ':
            f.sign = f.sign ? f.sign : ' ';
            break;
        case '0':
            f.fill[0] = '0';
            f.n_fill = 1;
            break;
        default:
            f.alt = true;
        }
    }
    if ((rc = percent_count(vm, fmt, i, p, WIDTH_MAX, &f.width)) != 0)
        return rc;
    if (*i < fmt->n && fmt->p[*i] == '.') {
        ++*i;
        if ((rc = percent_count(vm, fmt, i, p, PREC_MAX, &f.prec)) != 0)
            return rc;
        f.prec = HX_MAX(f.prec, 0);
    }
    while (*i < fmt->n && memchr("hlL", fmt->p[*i], 3) != NULL)
        ++*i;
    if (*i >= fmt->n)
        return hx_jvm_fail(vm, HX_EFORMAT, "incomplete format");
    f.type = fmt->p[(*i)++];
    if (f.type == '%') {
        hx_jbuf_sub(b, fmt, *i - 1, 1);
        return b->rc;
    }
    if (memchr("srdiuxXofFeEgGc", f.type, 15) == NULL)
        return hx_jvm_fail(vm, f.type == 'a' ? HX_EUNSUP : HX_EFORMAT,
                           "format character at position %zu is not supported", *i - 1);
    if (!named && (rc = percent_next(vm, p, &v)) != 0)
        return rc;
    if (f.align == '<')
        f.n_fill = 0;
    else if (f.n_fill > 0)
        f.align = '=';
    return percent_value(vm, b, &f, v);
}

int hx_jformat_percent(hx_jvm *vm, const hx_jstr *fmt, hx_jval arg, hx_jval *out)
{
    percent p = { .arg = arg };
    hx_jbuf b = { .vm = vm };
    int rc = 0;

    if (fmt->safe)
        return hx_jvm_fail(vm, HX_EUNSUP, "\"%%\" on text marked safe");
    for (size_t i = 0; i < fmt->n && rc == 0;) {
        const char *hit = memchr(fmt->p + i, '%', fmt->n - i);
        const size_t end = hit ? (size_t)(hit - fmt->p) : fmt->n;
        hx_jbuf_sub(&b, fmt, i, end - i);
        i = end + 1;
        if (hit != NULL)
            rc = percent_one(vm, &b, fmt, &i, &p);
    }
    if (rc != 0)
        return rc;
    const size_t n = arg.t == HX_J_TUPLE ? arg.u.q->n : 1;
    /* Whatever can be subscripted may stay unused, as it might be a mapping. */
    const bool lenient = arg.t == HX_J_DICT || arg.t == HX_J_LIST ||
                         arg.t == HX_J_RANGE || arg.t == HX_J_UNDEF;
    if (p.used < n && !p.by_name && !lenient)
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "not all arguments converted during string formatting");
    return hx_jbuf_done(&b, out);
}

/* ---- str.format ------------------------------------------------------ */

/* [[fill]align][sign][#][0][width][group][.precision][type], all of s. */
static int parse_spec(hx_jvm *vm, const hx_jstr *s, field *f)
{
    size_t i = 0, n = 0;
    int rc;

    if (s->n > 0)
        hx_jstr_cp(s, 0, &n);
    if (n > 0 && n < s->n && memchr("<>=^", s->p[n], 4) != NULL) {
        memcpy(f->fill, s->p, n);
        f->n_fill = n;
        f->align = s->p[n];
        i = n + 1;
    } else if (n > 0 && memchr("<>=^", s->p[0], 4) != NULL) {
        f->align = s->p[i++];
    }
    if (i < s->n && memchr("+- ", s->p[i], 3) != NULL) {
        f->sign = s->p[i] == '-' ? 0 : s->p[i];
        i++;
    }
    if (i < s->n && s->p[i] == '#') {
        f->alt = true;
        i++;
    }
    if (i < s->n && s->p[i] == '0') {
        if (f->n_fill == 0) {
            f->fill[0] = '0';
            f->n_fill = 1;
        }
        f->align = f->align ? f->align : '=';
        i++;
    }
    if ((rc = read_count(vm, s, &i, WIDTH_MAX, &f->width)) != 0)
        return rc;
    if (i < s->n && (s->p[i] == ',' || s->p[i] == '_'))
        f->group = s->p[i++];
    if (i < s->n && s->p[i] == '.') {
        i++;
        if ((rc = read_count(vm, s, &i, PREC_MAX, &f->prec)) != 0)
            return rc;
        if (f->prec < 0)
            return hx_jvm_fail(vm, HX_EFORMAT, "format: precision is missing");
    }
    if (i < s->n)
        f->type = s->p[i++];
    if (i < s->n || (f->type != 0 && memchr("dxXobfFeEgG%s", f->type, 13) == NULL))
        return hx_jvm_fail(vm, HX_EUNSUP, "format specifier \"%.*s\"",
                           (int)HX_MIN(s->n, 60), s->p);
    return 0;
}

static int braces_value(hx_jvm *vm, hx_jbuf *b, const hx_jstr *spec, hx_jval v)
{
    field f = { .prec = -1 };
    const hx_jstr *s;
    int rc;

    if ((rc = parse_spec(vm, spec, &f)) != 0)
        return rc;
    if (spec->n == 0 || v.t == HX_J_STR) {
        if (((f.type != 0 && f.type != 's') || f.sign || f.alt || f.group ||
             f.align == '='))
            return hx_jvm_fail(vm, HX_EFORMAT,
                               "format specifier \"%.*s\" does not fit a %s",
                               (int)HX_MIN(spec->n, 60), spec->p, hx_jval_type(v));
        if ((rc = hx_jval_str(vm, v, &s)) != 0)
            return rc;
        return format_text(vm, b, &f, s, f.align ? f.align : '<');
    }
    if (v.t == HX_J_UNDEF || !hx_jval_is_num(v))
        return hx_jvm_fail(vm, v.t == HX_J_BIG ? HX_EUNSUP : HX_EFORMAT,
                           "unsupported format string passed to %s.__format__",
                           hx_jval_type(v));
    if (v.t == HX_J_FLOAT && f.type == 0)
        return hx_jvm_fail(vm, HX_EUNSUP,
                           "format of a float without \"f\", \"e\", \"g\" or \"%%\"");
    if (f.type == 0)
        f.type = 'd';
    const bool whole = strchr("dxXob", f.type) != NULL;
    if (f.type == 's' || (whole && (v.t == HX_J_FLOAT || f.prec >= 0)))
        return hx_jvm_fail(vm, HX_EFORMAT, "format specifier \"%.*s\" does not fit a %s",
                           (int)HX_MIN(spec->n, 60), spec->p, hx_jval_type(v));
    if (f.group && (f.n_fill > 0 || strchr("xXob", f.type) != NULL))
        return hx_jvm_fail(vm, HX_EUNSUP, "format specifier \"%.*s\"",
                           (int)HX_MIN(spec->n, 60), spec->p);
    return format_number(vm, b, &f, v);
}

/* The argument a field names: nothing (the next one), a number, or a keyword. */
typedef struct {
    int64_t next;
    bool numbered;
} cursor;

static int braces_arg(hx_jvm *vm, const hx_jstr *name, const hx_jargs *args, cursor *at,
                      hx_jval *out)
{
    int64_t k;
    size_t i = 0;
    int rc;

    if (memchr(name->p, '.', name->n) != NULL || memchr(name->p, '[', name->n) != NULL)
        return hx_jvm_fail(vm, HX_EUNSUP, "format fields with attributes");
    if ((rc = read_count(vm, name, &i, 1000, &k)) != 0)
        return rc;
    at->numbered |= k >= 0 && i == name->n;
    if (name->n == 0)
        k = at->next++;
    if (at->numbered && at->next > 0)
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "format: fields both with and without numbers");
    if (i == name->n && k >= 0) {
        if ((size_t)k >= args->n)
            return hx_jvm_fail(vm, HX_EFORMAT, "format: no argument %lld", (long long)k);
        *out = args->v[k];
        return 0;
    }
    for (size_t j = 0; j < args->n_key; j++) {
        if (hx_jstr_eq(args->key[j], name)) {
            *out = args->v[args->n + j];
            return 0;
        }
    }
    return hx_jvm_fail(vm, HX_EFORMAT, "format: no argument '%.*s'",
                       (int)HX_MIN(name->n, 60), name->p);
}

/* One replacement field, fmt[from..to) without its braces. */
static int braces_one(hx_jvm *vm, hx_jbuf *b, const hx_jstr *fmt, size_t from, size_t to,
                      const hx_jargs *args, cursor *at)
{
    const char *colon = memchr(fmt->p + from, ':', to - from);
    const size_t head = colon ? (size_t)(colon - fmt->p) : to;
    const char *bang = memchr(fmt->p + from, '!', head - from);
    const size_t name_end = bang ? (size_t)(bang - fmt->p) : head;
    hx_jval name, spec, v;
    const hx_jstr *s;
    int rc;

    if ((rc = hx_jstr_sub(vm, fmt, from, name_end - from, &name)) != 0 ||
        (rc = hx_jstr_sub(vm, fmt, HX_MIN(head + 1, to), to - HX_MIN(head + 1, to),
                          &spec)) != 0 ||
        (rc = braces_arg(vm, name.u.s, args, at, &v)) != 0)
        return rc;
    if (memchr(spec.u.s->p, '{', spec.u.s->n) != NULL)
        return hx_jvm_fail(vm, HX_EUNSUP, "format fields inside format fields");
    if (bang != NULL) {
        if (head - name_end != 2 || (bang[1] != 's' && bang[1] != 'r'))
            return hx_jvm_fail(vm, HX_EUNSUP, "format conversions but !s and !r");
        if ((rc = bang[1] == 'r' ? hx_jval_repr_str(vm, v, &s)
                                 : hx_jval_str(vm, v, &s)) != 0)
            return rc;
        v = (hx_jval) { .t = HX_J_STR, .u.s = s };
    }
    return braces_value(vm, b, spec.u.s, v);
}

int hx_jformat_braces(hx_jvm *vm, const hx_jstr *fmt, const hx_jargs *args, hx_jval *out)
{
    hx_jbuf b = { .vm = vm };
    cursor at = { 0 };
    int rc = 0;

    for (size_t i = 0; i < fmt->n && rc == 0; i++) {
        const char c = fmt->p[i];
        if (c != '{' && c != '}') {
            hx_jbuf_sub(&b, fmt, i, 1);
            continue;
        }
        if (i + 1 < fmt->n && fmt->p[i + 1] == c) {
            hx_jbuf_sub(&b, fmt, i++, 1);
            continue;
        }
        if (c == '}')
            return hx_jvm_fail(vm, HX_EFORMAT, "format: single '}'");
        const char *end = memchr(fmt->p + i, '}', fmt->n - i);
        if (end == NULL)
            return hx_jvm_fail(vm, HX_EFORMAT, "format: single '{'");
        rc = braces_one(vm, &b, fmt, i + 1, (size_t)(end - fmt->p), args, &at);
        i = (size_t)(end - fmt->p);
    }
    return rc != 0 ? rc : hx_jbuf_done(&b, out);
}

/* ---- strftime -------------------------------------------------------- */

static const char *const DAYS[] = { "Sunday",   "Monday", "Tuesday", "Wednesday",
                                    "Thursday", "Friday", "Saturday" };
static const char *const MONTHS[] = { "January",   "February", "March",    "April",
                                      "May",       "June",     "July",     "August",
                                      "September", "October",  "November", "December" };

/* Directives that are a number: width 2 or more pads with zeros ("%e": a space). */
static bool time_number(char c, const struct tm *t, int *value, int *width)
{
    *width = c == 'j' ? 3 : c == 'Y' ? 4 : c == 'f' ? 6 : c == 'u' || c == 'w' ? 1 : 2;
    switch (c) {
    case 'd':
    case 'e':
        *value = t->tm_mday;
        return true;
    case 'm':
        *value = t->tm_mon + 1;
        return true;
    case 'y':
        *value = t->tm_year % 100;
        return true;
    case 'Y':
        *value = t->tm_year + 1900;
        return true;
    case 'H':
        *value = t->tm_hour;
        return true;
    case 'I':
        *value = (t->tm_hour + 11) % 12 + 1;
        return true;
    case 'M':
        *value = t->tm_min;
        return true;
    case 'S':
        *value = t->tm_sec;
        return true;
    case 'f':
        *value = 0;
        return true;
    case 'j':
        *value = t->tm_yday + 1;
        return true;
    case 'u':
        *value = t->tm_wday ? t->tm_wday : 7;
        return true;
    case 'w':
        *value = t->tm_wday;
        return true;
    default:
        return false;
    }
}

/* Directives that stand for others. */
static const char *time_alias(char c)
{
    switch (c) {
    case 'F':
        return "%Y-%m-%d";
    case 'T':
        return "%H:%M:%S";
    case 'R':
        return "%H:%M";
    case 'D':
        return "%m/%d/%y";
    case 'n':
        return "\n";
    case 't':
        return "\t";
    case 'Z': /* a time without a zone, as Python's datetime.now() */
    case 'z':
        return "";
    default:
        return NULL;
    }
}

static int put_time(hx_jvm *vm, hx_jbuf *b, const char *fmt, size_t n, const struct tm *t)
{
    char text[16];
    int value, width, rc = 0;

    for (size_t i = 0; i < n && rc == 0; i++) {
        if (fmt[i] != '%') {
            hx_jbuf_add(b, fmt + i, 1, NULL, false);
            continue;
        }
        const bool bare = i + 1 < n && fmt[i + 1] == '-';
        i += bare ? 2 : 1;
        const char c = i < n ? fmt[i] : 0;
        const char *alias = time_alias(c);
        if (time_number(c, t, &value, &width)) {
            snprintf(text, sizeof text, c == 'e' ? "%*d" : "%0*d", bare ? 1 : width,
                     value);
            hx_jbuf_lit(b, text);
        } else if (c == 'a' || c == 'A') {
            const char *day = DAYS[t->tm_wday];
            hx_jbuf_add(b, day, c == 'a' ? 3 : strlen(day), NULL, false);
        } else if (c == 'b' || c == 'B' || c == 'h') {
            const char *month = MONTHS[t->tm_mon];
            hx_jbuf_add(b, month, c == 'B' ? strlen(month) : 3, NULL, false);
        } else if (c == 'p') {
            hx_jbuf_lit(b, t->tm_hour < 12 ? "AM" : "PM");
        } else if (c == '%') {
            hx_jbuf_lit(b, "%");
        } else if (alias != NULL) {
            rc = put_time(vm, b, alias, strlen(alias), t);
        } else {
            rc = hx_jvm_fail(vm, HX_EUNSUP, "strftime_now: directive \"%%%.1s\"",
                             i < n ? fmt + i : "");
        }
    }
    return rc != 0 ? rc : b->rc;
}

int hx_jformat_time(hx_jvm *vm, const hx_jstr *fmt, hx_jval *out)
{
    const time_t now = (time_t)vm->now_s;
    hx_jbuf b = { .vm = vm };
    struct tm t;
    int rc;

    if (gmtime_r(&now, &t) == NULL || t.tm_year + 1900 < 0 || t.tm_year > 8099)
        return hx_jvm_fail(vm, HX_EARG, "strftime_now: the time %lld is out of range",
                           (long long)vm->now_s);
    if ((rc = put_time(vm, &b, fmt->p, fmt->n, &t)) != 0)
        return rc;
    return hx_jbuf_done(&b, out);
}
