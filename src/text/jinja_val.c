/* jinja_val.c - the values of templates and what Python does with any of them (str, repr,
 * json.dumps, ==, <, in, sorted), and the one table of filters, tests, methods and
 * global functions.
 *
 * Called by the other jinja files. Never looks at the syntax tree; never changes a value
 * that somebody can already see, except namespaces. No format string of a template ever
 * reaches the C library. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <utf8proc.h>

#include "text/jinja_ast.h"

static const hx_jstr EMPTY_TEXT = { .p = "" };
static const hx_jlist EMPTY_SEQ = { 0 }; /* in place of what failed; stays empty */

/* ---- the machine's services ------------------------------------------ */

hx_jval hx_jvm_fail(hx_jvm *vm, int code, const char *fmt, ...)
{
    char text[200];
    va_list ap;

    if (vm->rc != 0)
        return hx_jnone();
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    /* A message may end inside a character when it was cut. */
    size_t n = strlen(text);
    while (n > 0 && !hx_utf8_ok(text, n))
        text[--n] = 0;
    vm->rc = hx_fail(vm->err, code, "%s:%d: %s", vm->name, vm->line, text);
    return hx_jnone();
}

void *hx_jvm_alloc(hx_jvm *vm, size_t n, size_t size)
{
    size_t bytes;
    void *p = hx_mul(n, size, &bytes) ? hx_arena_alloc(vm->mem, bytes) : NULL;

    if (p == NULL)
        hx_jvm_fail(vm, HX_ENOMEM,
                    "no memory for %zu more items of %zu bytes; templates get %zu MiB", n,
                    size, vm->mem->cap_bytes >> 20);
    return p;
}

void *hx_jvm_grow(hx_jvm *vm, void *p, size_t n, size_t *cap, size_t size)
{
    if (n < *cap)
        return p;
    void *more = hx_jvm_alloc(vm, n ? 2 * n : 4, size);
    if (more != NULL && n > 0)
        memcpy(more, p, n * size);
    *cap = more != NULL ? (n ? 2 * n : 4) : *cap;
    return more;
}

bool hx_jvm_work(hx_jvm *vm, size_t units)
{
    if (units > (size_t)vm->max_steps || vm->steps > vm->max_steps - (int64_t)units)
        hx_jvm_fail(vm, HX_ELIMIT, "template takes more than %lld steps",
                    (long long)vm->max_steps);
    else
        vm->steps += (int64_t)units;
    return vm->rc == 0;
}

bool hx_jvm_enter(hx_jvm *vm)
{
    if (vm->depth >= HX_J_DEPTH_MAX)
        hx_jvm_fail(vm, HX_ELIMIT, "nested over %d deep", HX_J_DEPTH_MAX);
    vm->depth += vm->rc == 0;
    return vm->rc == 0;
}

/* ---- buffers --------------------------------------------------------- */

bool hx_jbuf_reserve(hx_jbuf *b, size_t n)
{
    if (b->max != 0 && n > b->max - HX_MIN(b->n, b->max))
        hx_jvm_fail(b->vm, HX_ELIMIT, "text of more than %zu bytes", b->max);
    if (b->vm->rc != 0 || n <= b->cap - b->n)
        return b->vm->rc == 0;
    const size_t cap = n > SIZE_MAX / 4 ? n : HX_MAX(2 * b->cap, b->n + n);
    char *p = hx_jvm_alloc(b->vm, cap, 1);
    uint8_t *mark = b->mark ? hx_jvm_alloc(b->vm, cap, 1) : NULL;
    if (b->vm->rc != 0)
        return false;
    if (b->n > 0)
        memcpy(p, b->p, b->n);
    if (b->n > 0 && mark != NULL)
        memcpy(mark, b->mark, b->n);
    b->p = p;
    b->mark = mark;
    b->cap = cap;
    return true;
}

void hx_jbuf_add(hx_jbuf *b, const char *p, size_t n, const uint8_t *mark, bool user)
{
    if (n == 0 || !hx_jbuf_reserve(b, n))
        return;
    memcpy(b->p + b->n, p, n);
    if (b->mark == NULL && b->n == 0 && mark == NULL) {
        b->user = user;
    } else if (b->mark == NULL && (mark != NULL || user != b->user)) {
        if ((b->mark = hx_jvm_alloc(b->vm, b->cap, 1)) == NULL)
            return;
        memset(b->mark, b->user, b->n);
    }
    if (b->mark != NULL && mark != NULL)
        memcpy(b->mark + b->n, mark, n);
    else if (b->mark != NULL)
        memset(b->mark + b->n, user, n);
    b->n += n;
}

static void put_lit(hx_jbuf *b, const char *s)
{
    hx_jbuf_add(b, s, strlen(s), NULL, false);
}

static void put_sub(hx_jbuf *b, const hx_jstr *s, size_t off, size_t n)
{
    hx_jbuf_add(b, s->p + off, n, s->mark ? s->mark + off : NULL, s->user);
}

void hx_jbuf_put(hx_jbuf *b, const hx_jstr *s)
{
    put_sub(b, s, 0, s->n);
}

/* Other text in the place of the byte off of s, with its mark. */
static void put_for(hx_jbuf *b, const hx_jstr *s, size_t off, const char *p, size_t n)
{
    hx_jbuf_add(b, p, n, NULL, s->mark ? s->mark[off] : s->user);
}

static void put_cp(hx_jbuf *b, const hx_jstr *s, size_t off, int32_t cp)
{
    char text[4];

    put_for(b, s, off, text, (size_t)hx_utf8_put((uint32_t)cp, text));
}

static hx_jval str_make(hx_jvm *vm, hx_jstr like)
{
    hx_jstr *s = hx_jvm_alloc(vm, 1, sizeof *s);

    if (s == NULL)
        return hx_jtext(&EMPTY_TEXT);
    *s = like;
    return hx_jtext(s);
}

hx_jval hx_jbuf_done(hx_jbuf *b, bool safe)
{
    return str_make(b->vm, (hx_jstr) { .p = b->n ? b->p : "",
                                       .n = b->n,
                                       .mark = b->mark,
                                       .user = b->user,
                                       .safe = safe });
}

/* ---- strings --------------------------------------------------------- */

hx_jval hx_jstr_new(hx_jvm *vm, const char *p, size_t n, bool user)
{
    return str_make(vm, (hx_jstr) { .p = p, .n = n, .user = user });
}

hx_jval hx_jstr_sub(hx_jvm *vm, const hx_jstr *s, size_t off, size_t n)
{
    return str_make(vm, (hx_jstr) { .p = s->p + off,
                                    .n = n,
                                    .mark = s->mark ? s->mark + off : NULL,
                                    .user = s->user,
                                    .safe = s->safe });
}

/* Templates build long texts by adding to a variable. The buffer behind such a text keeps
 * spare room, and the next addition goes there if nobody else has used it: the sum of all
 * copies stays linear. Shorter strings that share the buffer never see what follows. */
hx_jval hx_jstr_cat(hx_jvm *vm, const hx_jstr *a, const hx_jstr *b, bool safe)
{
    hx_jbuf *t = a->tail;

    if (t == NULL || t->p != a->p || t->n != a->n) {
        if ((t = hx_jvm_alloc(vm, 1, sizeof *t)) == NULL)
            return hx_jtext(a);
        t->vm = vm;
        hx_jbuf_reserve(t, a->n + b->n);
        hx_jbuf_put(t, a);
    }
    hx_jbuf_put(t, b);
    return str_make(vm, (hx_jstr) { .p = t->n ? t->p : "",
                                    .n = t->n,
                                    .mark = t->mark,
                                    .user = t->user,
                                    .tail = t,
                                    .safe = safe });
}

hx_jval hx_jstr_escape(hx_jvm *vm, const hx_jstr *s)
{
    static const char FROM[] = "&<>'\"";
    static const char *const INTO[] = { "&amp;", "&lt;", "&gt;", "&#39;", "&#34;" };
    hx_jbuf b = { .vm = vm };

    if (s->safe)
        return hx_jtext(s);
    for (size_t i = 0; i < s->n; i++) {
        const char *at = memchr(FROM, s->p[i], sizeof FROM - 1);
        if (at == NULL)
            put_sub(&b, s, i, 1);
        else
            put_for(&b, s, i, INTO[at - FROM], strlen(INTO[at - FROM]));
    }
    return hx_jbuf_done(&b, true);
}

static bool same_text(const hx_jstr *a, const hx_jstr *b)
{
    return a->n == b->n && memcmp(a->p, b->p, a->n) == 0;
}

bool hx_jstr_is(const hx_jstr *a, const char *b)
{
    return a->n == strlen(b) && memcmp(a->p, b, a->n) == 0;
}

size_t hx_jstr_before(const char *p, size_t at)
{
    do
        at--;
    while (at > 0 && ((uint8_t)p[at] & 0xc0) == 0x80);
    return at;
}

static int32_t cp_at(const hx_jstr *s, size_t off, size_t *n)
{
    uint32_t cp = 0xfffd;
    const int k = hx_utf8_next(s->p + off, s->n - off, &cp);

    *n = k > 0 ? (size_t)k : 1;
    return (int32_t)cp;
}

size_t hx_jstr_len(const hx_jstr *s, size_t off)
{
    size_t n;

    cp_at(s, off, &n);
    return n;
}

static size_t count_points(const char *p, size_t n)
{
    size_t k = 0;

    for (size_t i = 0; i < n; i++)
        k += ((uint8_t)p[i] & 0xc0) != 0x80;
    return k;
}

size_t hx_jstr_seek(hx_jvm *vm, const hx_jstr *s, size_t i)
{
    size_t at = 0;

    for (; at < s->n; at++) {
        if (((uint8_t)s->p[at] & 0xc0) != 0x80 && i-- == 0)
            break;
    }
    hx_jvm_work(vm, at / 64);
    return at;
}

/* The first place of sub at or behind from, or SIZE_MAX. */
static size_t find(const hx_jstr *s, const hx_jstr *sub, size_t from)
{
    const char *at =
        sub->n ? memmem(s->p + from, s->n - from, sub->p, sub->n) : s->p + from;

    return at ? (size_t)(at - s->p) : SIZE_MAX;
}

bool hx_jinja_is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1c && cp <= 0x20) || cp == 0x85 ||
           cp == 0xa0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 ||
           cp == 0x2029 || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

/* ---- small things about values --------------------------------------- */

const char *hx_jval_type(hx_jval v)
{
    static const char *const NAME[] = {
        "missing",   "Undefined", "NoneType", "bool",   "int",  "float",
        "int",       "str",       "list",     "tuple",  "dict", "view",
        "namespace", "macro",     "function", "method", "loop",
    };

    return NAME[v.t];
}

bool hx_jval_truthy(hx_jval v)
{
    if (v.t <= HX_J_NONE)
        return false;
    if (v.t == HX_J_BOOL || v.t == HX_J_INT)
        return v.u.i != 0;
    if (v.t == HX_J_FLOAT)
        return v.u.d != 0;
    if (v.t == HX_J_STR)
        return v.u.s->n > 0;
    return v.t > HX_J_VIEW || v.t == HX_J_BIG || v.flag || v.u.q->n > 0;
}

bool hx_jval_is_int(hx_jval v)
{
    return v.t == HX_J_INT || v.t == HX_J_BOOL;
}

bool hx_jval_is_num(hx_jval v)
{
    return hx_jval_is_int(v) || v.t == HX_J_FLOAT;
}

double hx_jval_as_double(hx_jval v)
{
    return v.t == HX_J_FLOAT ? v.u.d : (double)v.u.i;
}

hx_jval hx_jval_hint(hx_jvm *vm, const char *fmt, ...)
{
    char text[200];
    va_list ap;
    hx_jbuf b = { .vm = vm };

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    put_lit(&b, text);
    hx_jval v = hx_jbuf_done(&b, false);
    v.t = HX_J_UNDEF;
    v.flag = true;
    return v;
}

hx_jval hx_jval_misused(hx_jvm *vm, hx_jval v)
{
    const int n = (int)HX_MIN(v.u.s->n, 120);

    if (v.flag)
        return hx_jvm_fail(vm, HX_EFORMAT, "%.*s", n, v.u.s->p);
    if (v.of == HX_J_ABSENT)
        return hx_jvm_fail(vm, HX_EFORMAT, "'%.*s' is undefined", n, v.u.s->p);
    return hx_jvm_fail(vm, HX_EFORMAT, "'%s object' has no attribute '%.*s'",
                       hx_jval_type((hx_jval) { .t = v.of }), n, v.u.s->p);
}

void hx_jlist_add(hx_jlist *l, hx_jval v)
{
    hx_jval *more = hx_jvm_grow(l->vm, l->v, l->n, &l->cap, sizeof v);

    if (more == NULL)
        return;
    l->v = more;
    l->v[l->n++] = v;
}

hx_jval hx_jlist_done(hx_jlist *l, hx_jtype t)
{
    hx_jlist *q = hx_jvm_alloc(l->vm, 1, sizeof *q);

    if (q != NULL)
        *q = *l;
    return (hx_jval) { .t = (uint8_t)t, .u.q = q != NULL ? q : &EMPTY_SEQ };
}

static hx_jval generator(hx_jlist *l)
{
    hx_jval v = hx_jlist_done(l, HX_J_VIEW);

    v.flag = true;
    return v;
}

size_t hx_jval_len(hx_jvm *vm, hx_jval v)
{
    if (v.t == HX_J_VIEW && v.flag)
        hx_jvm_fail(vm, HX_EFORMAT, "a generator has no length");
    if (v.t == HX_J_STR)
        return count_points(v.u.s->p, v.u.s->n);
    return hx_jval_seq(vm, v)->n;
}

const hx_jlist *hx_jval_seq(hx_jvm *vm, hx_jval v)
{
    hx_jlist l = { .vm = vm };

    if (v.t == HX_J_LIST || v.t == HX_J_TUPLE || v.t == HX_J_VIEW)
        return v.u.q;
    if (v.t == HX_J_STR) {
        hx_jstr plain = *v.u.s;
        plain.safe = false;
        for (size_t i = 0, n; i < plain.n && hx_jvm_work(vm, 1); i += n) {
            n = hx_jstr_len(&plain, i);
            hx_jlist_add(&l, hx_jstr_sub(vm, &plain, i, n));
        }
    } else if (v.t == HX_J_DICT) {
        for (size_t i = 0; i < v.u.q->n && vm->rc == 0; i += 2)
            hx_jlist_add(&l, v.u.q->v[i]);
    } else if (v.t != HX_J_UNDEF) {
        hx_jvm_fail(vm, HX_EFORMAT, "'%s' object is not iterable", hx_jval_type(v));
    }
    return vm->rc ? &EMPTY_SEQ : hx_jlist_done(&l, HX_J_LIST).u.q;
}

/* ---- dicts and JSON -------------------------------------------------- */

hx_jval *hx_jdict_find(hx_jvm *vm, const hx_jlist *d, hx_jval k)
{
    if (k.t >= HX_J_LIST)
        hx_jvm_fail(vm, k.t == HX_J_LIST || k.t == HX_J_DICT ? HX_EFORMAT : HX_EUNSUP,
                    "unhashable type: '%s'", hx_jval_type(k));
    hx_jvm_work(vm, d->n / 32);
    for (size_t i = 0; i < d->n && vm->rc == 0; i += 2) {
        if (hx_jval_compare(vm, HX_OP_EQ, d->v[i], k))
            return &d->v[i + 1];
    }
    return NULL;
}

void hx_jdict_put(hx_jlist *d, hx_jval k, hx_jval v)
{
    hx_jval *old = hx_jdict_find(d->vm, d, k);

    if (old != NULL)
        *old = v;
    if (old != NULL || d->vm->rc != 0)
        return;
    hx_jlist_add(d, k);
    hx_jlist_add(d, v);
    d->n -= d->n % 2; /* no key without its value */
}

static hx_jval json_number(hx_jvm *vm, const hx_json *j)
{
    hx_jval v = hx_jfloat(hx_json_num(j, 0));
    hx_sb b = { 0 };

    if (hx_json_kind(j) == HX_JSON_INT && hx_json_int(j, 0) == hx_json_int(j, 1))
        return hx_jint(hx_json_int(j, 0));
    if (hx_json_kind(j) == HX_JSON_DOUBLE && fabs(v.u.d) < 1e15)
        return v;
    /* Integers past 64 bits come as doubles that remember their digits. */
    hx_json_write_python(&b, j, false, 0);
    if (b.bad) {
        hx_jvm_fail(vm, HX_ENOMEM, "no memory for a number");
    } else if (strspn(b.p, "-0123456789") == b.n) {
        hx_jbuf digits = { .vm = vm };
        put_lit(&digits, b.p);
        v = hx_jbuf_done(&digits, false);
        v.t = HX_J_BIG;
    }
    hx_sb_free(&b);
    return v;
}

hx_jval hx_jval_from_json(hx_jvm *vm, const hx_json *j)
{
    const hx_str s = hx_json_str(j);
    hx_jlist l = { .vm = vm };
    hx_jval v = hx_jnone();

    if (!hx_jvm_enter(vm))
        return v;
    switch (hx_json_kind(j)) {
    case HX_JSON_NULL:
        break;
    case HX_JSON_BOOL:
        v = hx_jbool(hx_json_bool(j, false));
        break;
    case HX_JSON_INT:
    case HX_JSON_DOUBLE:
        v = json_number(vm, j);
        break;
    case HX_JSON_STRING:
        v = hx_jstr_new(vm, s.p, s.n, vm->track);
        break;
    case HX_JSON_ARRAY:
        for (size_t i = 0; i < hx_json_len(j) && vm->rc == 0; i++)
            hx_jlist_add(&l, hx_jval_from_json(vm, hx_json_at(j, i)));
        v = hx_jlist_done(&l, HX_J_LIST);
        break;
    case HX_JSON_OBJECT:
        for (size_t i = 0; i < hx_json_len(j) && vm->rc == 0; i++) {
            hx_str key;
            const hx_json *m = hx_json_member(j, i, &key);
            hx_jlist_add(&l, hx_jstr_new(vm, key.p, key.n, vm->track));
            hx_jlist_add(&l, hx_jval_from_json(vm, m));
        }
        l.n -= l.n % 2;
        v = hx_jlist_done(&l, HX_J_DICT);
        break;
    }
    vm->depth--;
    return v;
}

/* ---- str(), repr(), json.dumps --------------------------------------- */

typedef struct {
    hx_jvm *vm;
    hx_jbuf b;
    bool json, ascii, sort;
    const hx_jstr *indent;     /* NULL: one line */
    const hx_jstr *item, *key; /* separators */
} writer;

static void put_value(writer *w, hx_jval v, size_t level);

static void put_number(writer *w, hx_jval v)
{
    const double d = v.u.d;
    char text[32];
    hx_sb sb = { 0 };

    if (v.t == HX_J_INT) {
        snprintf(text, sizeof text, "%lld", (long long)v.u.i);
        put_lit(&w->b, text);
    } else if (!isfinite(d)) {
        put_lit(&w->b, !isnan(d) && d < 0 ? "-" : "");
        put_lit(&w->b,
                isnan(d) ? (w->json ? "NaN" : "nan") : (w->json ? "Infinity" : "inf"));
    } else {
        hx_json_put_double(&sb, d);
        if (sb.bad)
            hx_jvm_fail(w->vm, HX_ENOMEM, "no memory for a number");
        else
            put_lit(&w->b, sb.p);
        hx_sb_free(&sb);
    }
}

static void put_quoted(writer *w, const hx_jstr *s)
{
    static const char FROM[] = "\\\n\r\t\f\b", INTO[] = "\\nrtfb";
    const bool dq =
        w->json || (memchr(s->p, '\'', s->n) != NULL && memchr(s->p, '"', s->n) == NULL);
    const char *quote = dq ? "\"" : "'";
    const size_t n_known = w->json ? 6 : 4; /* repr() knows neither \f nor \b */
    char text[16];
    size_t n;

    put_lit(&w->b, s->safe && !w->json ? "Markup(" : "");
    put_lit(&w->b, quote);
    for (size_t i = 0; i < s->n && w->vm->rc == 0; i += n) {
        const int32_t cp = cp_at(s, i, &n);
        const utf8proc_category_t kind =
            utf8proc_category(cp); /* ZS and on: unprintable */
        const char *known = cp < 0x80 ? memchr(FROM, cp, n_known) : NULL;
        const bool plain = w->json ? cp >= 0x20 && (cp <= 0x7e || !w->ascii)
                                   : cp == ' ' || (kind != UTF8PROC_CATEGORY_CN &&
                                                   kind < UTF8PROC_CATEGORY_ZS);
        text[0] = 0;
        if (known != NULL || cp == quote[0])
            snprintf(text, sizeof text, "\\%c", known ? INTO[known - FROM] : quote[0]);
        else if (!plain && w->json && cp >= 0x10000)
            snprintf(text, sizeof text, "\\u%04x\\u%04x",
                     0xd800 + (unsigned)((cp - 0x10000) >> 10),
                     0xdc00 + (unsigned)((cp - 0x10000) & 0x3ff));
        else if (!plain && !w->json && (cp < 0x100 || cp >= 0x10000))
            snprintf(text, sizeof text, cp < 0x100 ? "\\x%02x" : "\\U%08x", (unsigned)cp);
        else if (!plain)
            snprintf(text, sizeof text, "\\u%04x", (unsigned)cp);
        if (text[0] != 0)
            put_for(&w->b, s, i, text, strlen(text));
        else
            put_sub(&w->b, s, i, n);
    }
    put_lit(&w->b, quote);
    put_lit(&w->b, s->safe && !w->json ? ")" : "");
}

static void put_break(writer *w, size_t level)
{
    if (w->indent == NULL)
        return;
    put_lit(&w->b, "\n");
    for (size_t i = 0; i < level && w->vm->rc == 0; i++)
        hx_jbuf_put(&w->b, w->indent);
}

/* Positions of key sorted, stable; NULL: an error. n log n whatever the input. */
static uint32_t *sorted(hx_jvm *vm, const hx_jval *key, size_t n, bool reverse)
{
    uint32_t *from = hx_jvm_alloc(vm, n, sizeof *from);
    uint32_t *to = hx_jvm_alloc(vm, n, sizeof *to);

    if (vm->rc != 0 || !hx_jvm_work(vm, n > UINT32_MAX ? SIZE_MAX : n))
        return NULL;
    for (size_t i = 0; i < n; i++)
        from[i] = (uint32_t)i;
    for (size_t width = 1; width < n && hx_jvm_work(vm, n); width *= 2) {
        for (size_t lo = 0; lo < n; lo += 2 * width) {
            const size_t mid = HX_MIN(lo + width, n), hi = HX_MIN(lo + 2 * width, n);
            size_t a = lo, b = mid;
            for (size_t k = lo; k < hi; k++) {
                bool take_b = b < hi;
                if (a < mid && b < hi)
                    take_b = hx_jval_compare(vm, reverse ? HX_OP_GT : HX_OP_LT,
                                             key[from[b]], key[from[a]]);
                to[k] = take_b ? from[b++] : from[a++];
            }
        }
        uint32_t *swap = from;
        from = to;
        to = swap;
    }
    return vm->rc ? NULL : from;
}

static void put_dict(writer *w, hx_jval dict, size_t level)
{
    const hx_jlist *d = dict.u.q, *keys = w->sort ? hx_jval_seq(w->vm, dict) : NULL;
    const uint32_t *at = keys ? sorted(w->vm, keys->v, keys->n, false) : NULL;

    put_lit(&w->b, "{");
    for (size_t i = 0; i < d->n / 2 && w->vm->rc == 0; i++) {
        const hx_jval *e = &d->v[2 * (at ? at[i] : i)];
        const char *quote = w->json && e->t != HX_J_STR ? "\"" : "";
        if (i > 0)
            hx_jbuf_put(&w->b, w->item);
        put_break(w, level + 1);
        put_lit(&w->b, quote);
        put_value(w, e[0], 0);
        put_lit(&w->b, quote);
        hx_jbuf_put(&w->b, w->key);
        put_value(w, e[1], level + 1);
    }
    if (d->n > 0)
        put_break(w, level);
    put_lit(&w->b, "}");
}

static void put_items(writer *w, hx_jval v, size_t level)
{
    const hx_jlist *q = v.u.q;
    const bool tuple = v.t == HX_J_TUPLE && !w->json;

    put_lit(&w->b, tuple ? "(" : "[");
    for (size_t i = 0; i < q->n && w->vm->rc == 0; i++) {
        if (i > 0)
            hx_jbuf_put(&w->b, w->item);
        put_break(w, level + 1);
        put_value(w, q->v[i], level + 1);
    }
    if (q->n > 0)
        put_break(w, level);
    put_lit(&w->b, !tuple ? "]" : q->n == 1 ? ",)" : ")");
}

static void put_value(writer *w, hx_jval v, size_t level)
{
    if (!hx_jvm_enter(w->vm))
        return;
    switch ((hx_jtype)v.t) {
    case HX_J_NONE:
        put_lit(&w->b, w->json ? "null" : "None");
        break;
    case HX_J_BOOL:
        put_lit(&w->b, w->json ? (v.u.i ? "true" : "false") : (v.u.i ? "True" : "False"));
        break;
    case HX_J_INT:
    case HX_J_FLOAT:
        put_number(w, v);
        break;
    case HX_J_BIG:
        hx_jbuf_put(&w->b, v.u.s);
        break;
    case HX_J_STR:
        put_quoted(w, v.u.s);
        break;
    case HX_J_LIST:
    case HX_J_TUPLE:
        put_items(w, v, level);
        break;
    case HX_J_DICT:
        put_dict(w, v, level);
        break;
    case HX_J_UNDEF:
        if (!w->json) {
            put_lit(&w->b, "Undefined");
            break;
        }
        /* fall through */
    default:
        if (w->json)
            hx_jvm_fail(w->vm, HX_EFORMAT, "tojson: a value of type %s", hx_jval_type(v));
        else
            hx_jvm_fail(w->vm, HX_EUNSUP, "the text of a %s", hx_jval_type(v));
    }
    w->vm->depth--;
}

static const hx_jstr COMMA = { .p = ", ", .n = 2 }, COMMA_BREAK = { .p = ",", .n = 1 },
                     COLON = { .p = ": ", .n = 2 };

const hx_jstr *hx_jval_str(hx_jvm *vm, hx_jval v)
{
    writer w = { .vm = vm, .b.vm = vm, .item = &COMMA, .key = &COLON };

    if (v.t == HX_J_STR)
        return v.u.s;
    if (v.t == HX_J_UNDEF)
        return &EMPTY_TEXT;
    put_value(&w, v, 0);
    return hx_jbuf_done(&w.b, false).u.s;
}

/* Python would calculate with big integers and compare views. */
static int refusal(hx_jval v)
{
    return v.t == HX_J_BIG || v.t == HX_J_VIEW ? HX_EUNSUP : HX_EFORMAT;
}

/* ---- comparison ------------------------------------------------------ */

/* How a stands to b: -1, 0, 1, or 2 where neither holds. eq: only whether they are equal
 * matters, which is no error between any types. */
static int order(hx_jvm *vm, hx_jval a, hx_jval b, bool eq)
{
    const hx_jval *at;
    int c = 0;

    if (hx_jval_is_int(a) && hx_jval_is_int(b)) {
        const int64_t x = a.u.i, y = b.u.i;
        return (x > y) - (x < y);
    }
    if (hx_jval_is_num(a) && hx_jval_is_num(b)) {
        const double x = hx_jval_as_double(a), y = hx_jval_as_double(b);
        return isnan(x) || isnan(y) ? 2 : (x > y) - (x < y);
    }
    if (a.t == HX_J_STR && b.t == HX_J_STR) { /* by code point: the order of bytes */
        const size_t n = HX_MIN(a.u.s->n, b.u.s->n);
        if (eq && a.u.s->n != b.u.s->n)
            return 2;
        hx_jvm_work(vm, n / 256);
        c = memcmp(a.u.s->p, b.u.s->p, n);
        return c ? (c > 0) - (c < 0) : (a.u.s->n > n) - (b.u.s->n > n);
    }
    if (a.t == b.t && (a.t == HX_J_LIST || a.t == HX_J_TUPLE)) {
        const hx_jlist *x = a.u.q, *y = b.u.q;
        size_t i = 0;
        if (x == y || !hx_jvm_enter(vm))
            return 0;
        while (i < x->n && i < y->n && c == 0 && hx_jvm_work(vm, 1)) {
            c = order(vm, x->v[i], y->v[i], true);
            i += c == 0;
        }
        if (c != 0 && !eq)
            c = order(vm, x->v[i], y->v[i], false);
        vm->depth--;
        return c ? c : (x->n > y->n) - (x->n < y->n);
    }
    if (eq && a.t == b.t && a.t == HX_J_DICT && a.u.q != b.u.q) {
        c = a.u.q->n == b.u.q->n ? 0 : 2;
        if (!hx_jvm_enter(vm))
            return 2;
        for (size_t i = 0; i < a.u.q->n && c == 0 && hx_jvm_work(vm, 1); i += 2)
            c = (at = hx_jdict_find(vm, b.u.q, a.u.q->v[i])) != NULL
                    ? order(vm, a.u.q->v[i + 1], *at, true)
                    : 2;
        vm->depth--;
        return c;
    }
    if (eq && a.t == b.t && (a.t == HX_J_VIEW || a.t == HX_J_METHOD))
        hx_jvm_fail(vm, HX_EUNSUP, "comparing two values of type %s", hx_jval_type(a));
    if (eq && a.t == HX_J_BIG && b.t == HX_J_BIG)
        return same_text(a.u.s, b.u.s) ? 0 : 2;
    if (eq) /* identity */
        return a.t == b.t && (a.t <= HX_J_NONE || a.u.q == b.u.q) ? 0 : 2;
    if (a.t == HX_J_UNDEF || b.t == HX_J_UNDEF)
        hx_jval_misused(vm, a.t == HX_J_UNDEF ? a : b);
    hx_jvm_fail(vm, refusal(a.t == HX_J_BIG ? a : b),
                "no order between instances of '%s' and '%s'", hx_jval_type(a),
                hx_jval_type(b));
    return 2;
}

static bool equal(hx_jvm *vm, hx_jval a, hx_jval b)
{
    return order(vm, a, b, true) == 0;
}

static bool contains(hx_jvm *vm, hx_jval in, hx_jval v)
{
    bool yes = false;

    if (in.t == HX_J_DICT)
        return hx_jdict_find(vm, in.u.q, v) != NULL;
    if (in.t == HX_J_STR && v.t == HX_J_STR)
        return hx_jvm_work(vm, in.u.s->n / 64) && find(in.u.s, v.u.s, 0) != SIZE_MAX;
    if (in.t == HX_J_STR)
        hx_jvm_fail(vm, HX_EFORMAT, "'in <string>' requires a string, not %s",
                    hx_jval_type(v));
    const hx_jlist *q = hx_jval_seq(vm, in);
    for (size_t i = 0; i < q->n && !yes && hx_jvm_work(vm, 1); i++)
        yes = equal(vm, q->v[i], v);
    return yes;
}

bool hx_jval_compare(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b)
{
    if (op == HX_OP_EQ || op == HX_OP_NE)
        return equal(vm, a, b) == (op == HX_OP_EQ);
    if (op == HX_OP_IN || op == HX_OP_NOT_IN)
        return contains(vm, b, a) == (op == HX_OP_IN);
    const int c = order(vm, a, b, false);
    return op == HX_OP_LT   ? c == -1
           : op == HX_OP_LE ? c <= 0
           : op == HX_OP_GT ? c == 1
                            : c == 0 || c == 1;
}

/* ---- arguments of builtins ------------------------------------------- */

static const hx_jstr *want_text(hx_jvm *vm, hx_jval v)
{
    if (v.t == HX_J_STR)
        return v.u.s;
    if (v.t == HX_J_UNDEF)
        hx_jval_misused(vm, v);
    hx_jvm_fail(vm, HX_EFORMAT, "found a %s, expected a string", hx_jval_type(v));
    return &EMPTY_TEXT;
}

static int64_t want_int(hx_jvm *vm, hx_jval v, int64_t dflt)
{
    if (v.t == HX_J_ABSENT)
        return dflt;
    if (hx_jval_is_int(v))
        return v.u.i;
    hx_jvm_fail(vm, refusal(v), "found a %s, expected an integer", hx_jval_type(v));
    return dflt;
}

static bool given(hx_jval v)
{
    return v.t != HX_J_ABSENT && v.t != HX_J_NONE;
}

/* The value of attr ("a.b.0", or an index) of item; ABSENT: item itself. Where dflt is
 * given it stands for what is undefined. */
static hx_jval follow(hx_jvm *vm, hx_jval item, hx_jval attr, hx_jval dflt)
{
    if (!given(attr))
        return item;
    if (attr.t != HX_J_STR)
        return hx_jinja_item(vm, item, hx_jint(want_int(vm, attr, 0)));
    for (size_t at = 0, end; at <= attr.u.s->n && vm->rc == 0; at = end + 1) {
        int64_t i = 0;
        bool digits = true;
        for (end = at; end < attr.u.s->n && attr.u.s->p[end] != '.'; end++) {
            digits &= attr.u.s->p[end] >= '0' && attr.u.s->p[end] <= '9' && end - at < 9;
            i = digits ? 10 * i + attr.u.s->p[end] - '0' : 0;
        }
        item = hx_jinja_item(
            vm, item,
            digits && end > at ? hx_jint(i) : hx_jstr_sub(vm, attr.u.s, at, end - at));
        if (item.t == HX_J_UNDEF && given(dflt))
            item = dflt;
    }
    return item;
}

/* ---- builtins: text -------------------------------------------------- */

enum { UPPER, LOWER, CAPITALIZE, TITLE, LEFT = 1, RIGHT = 2 };

static hx_jval f_case(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s;
    const int to = c->arg;
    hx_jbuf b = { .vm = vm };
    bool first = to != LOWER;
    size_t n;

    for (size_t i = 0; i < s->n && vm->rc == 0; i += n) {
        const int32_t cp = cp_at(s, i, &n);
        if (cp == 0xdf && first)
            put_for(&b, s, i, to == UPPER ? "SS" : "Ss", 2);
        else if (first)
            put_cp(&b, s, i, to == UPPER ? utf8proc_toupper(cp) : utf8proc_totitle(cp));
        else
            put_cp(&b, s, i, utf8proc_tolower(cp));
        /* Words of the filter end at white space and brackets, of the method at any sign
         * that is no letter. */
        if (to == TITLE && c->filter)
            first = hx_jinja_is_space((uint32_t)cp) ||
                    (cp < 0x80 && cp > 0 && strchr("-({[<", cp) != NULL);
        else
            first = to == UPPER ||
                    (to == TITLE && utf8proc_category(cp) != UTF8PROC_CATEGORY_LU &&
                     utf8proc_category(cp) != UTF8PROC_CATEGORY_LL &&
                     utf8proc_category(cp) != UTF8PROC_CATEGORY_LT);
    }
    return hx_jbuf_done(&b, s->safe);
}

static bool in_set(const hx_jstr *s, size_t off, const hx_jstr *set)
{
    size_t n;
    const int32_t cp = cp_at(s, off, &n);

    if (set == NULL)
        return hx_jinja_is_space((uint32_t)cp);
    return memmem(set->p, set->n, s->p + off, n) != NULL;
}

static hx_jval f_strip(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s, *set = given(c->a[0]) ? want_text(vm, c->a[0]) : NULL;
    size_t from = 0, to = s->n;

    while ((c->arg & LEFT) && from < to && in_set(s, from, set))
        from += hx_jstr_len(s, from);
    while ((c->arg & RIGHT) && to > from && in_set(s, hx_jstr_before(s->p, to), set))
        to = hx_jstr_before(s->p, to);
    return hx_jstr_sub(vm, s, from, to - from);
}

static hx_jval f_replace(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s;
    const hx_jstr *old = c->filter ? hx_jval_str(vm, c->a[0]) : want_text(vm, c->a[0]);
    const hx_jstr *new = c->filter ? hx_jval_str(vm, c->a[1]) : want_text(vm, c->a[1]);
    int64_t count = given(c->a[2]) ? want_int(vm, c->a[2], -1) : -1;
    hx_jbuf b = { .vm = vm };
    size_t at = 0, hit;

    hx_jvm_work(vm, s->n / 64);
    if (old->n == 0)
        return hx_jvm_fail(vm, HX_EUNSUP, "replacing empty text");
    for (; count != 0 && vm->rc == 0 && (hit = find(s, old, at)) != SIZE_MAX; count--) {
        put_sub(&b, s, at, hit - at);
        hx_jbuf_put(&b, new);
        at = hit + old->n;
    }
    put_sub(&b, s, at, s->n - at);
    return hx_jbuf_done(&b, false);
}

/* split(), and with arg rsplit(): all pieces, then those over the limit become one again.
 */
static hx_jval f_split(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s, *sep = given(c->a[0]) ? want_text(vm, c->a[0]) : NULL;
    const int64_t max = want_int(vm, c->a[1], -1);
    hx_jlist l = { .vm = vm };
    size_t from = 0, to = 0;

    if (sep != NULL && sep->n == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "empty separator");
    for (; hx_jvm_work(vm, 1) && from <= s->n; from = to + (sep ? sep->n : 0)) {
        while (sep == NULL && from < s->n && in_set(s, from, NULL))
            from += hx_jstr_len(s, from);
        if (sep == NULL && from == s->n)
            break;
        to = sep ? HX_MIN(find(s, sep, from), s->n) : from;
        while (sep == NULL && to < s->n && !in_set(s, to, NULL))
            to += hx_jstr_len(s, to);
        /* Where separators overlap, the order of splitting would matter. */
        if (c->arg && sep && to < s->n && find(s, sep, to + 1) < to + sep->n)
            return hx_jvm_fail(vm, HX_EUNSUP, "rsplit at separators that overlap");
        hx_jlist_add(&l, hx_jstr_sub(vm, s, from, to - from));
        if (to == s->n)
            break;
    }
    const size_t keep = max < 0 || (uint64_t)max >= l.n ? l.n : (size_t)max + 1;
    if (keep < l.n && vm->rc == 0) {
        const size_t joined = l.n - keep; /* pieces that disappear */
        const hx_jstr *last = l.v[c->arg ? joined : l.n - 1].u.s;
        const size_t begin = c->arg ? 0 : (size_t)(l.v[keep - 1].u.s->p - s->p);
        const size_t end = c->arg ? (size_t)(last->p - s->p) + last->n : s->n;
        if (c->arg)
            l.v += joined;
        l.v[c->arg ? 0 : keep - 1] = hx_jstr_sub(vm, s, begin, end - begin);
        l.n = keep;
    }
    return hx_jlist_done(&l, HX_J_LIST);
}

static hx_jval f_splitlines(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s;
    hx_jlist l = { .vm = vm };
    size_t from = 0, n;

    for (size_t i = 0; i < s->n && vm->rc == 0; i += n) {
        const int32_t cp = cp_at(s, i, &n);
        if (!((cp >= 10 && cp <= 13) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 ||
              cp == 0x2028 || cp == 0x2029))
            continue;
        n += cp == '\r' && i + 1 < s->n && s->p[i + 1] == '\n';
        hx_jlist_add(&l, hx_jstr_sub(vm, s, from, i - from));
        from = i + n;
    }
    if (from < s->n)
        hx_jlist_add(&l, hx_jstr_sub(vm, s, from, s->n - from));
    return hx_jlist_done(&l, HX_J_LIST);
}

/* An indentation: text, or a number of spaces. */
static const hx_jstr *pad_of(hx_jvm *vm, hx_jval v, int64_t dflt)
{
    hx_jbuf b = { .vm = vm };

    if (v.t == HX_J_STR)
        return v.u.s;
    for (int64_t i = want_int(vm, v, dflt); i > 0 && hx_jvm_work(vm, 1); i--)
        put_lit(&b, " ");
    return hx_jbuf_done(&b, false).u.s;
}

static hx_jval f_indent(hx_jvm *vm, const hx_jcall *c)
{
    static const hx_jstr END = { .p = "\n", .n = 1 };
    const hx_jstr *s = want_text(vm, c->self), *by = pad_of(vm, c->a[0], 4);
    /* jinja2 does the same, so that a line end at the very end counts as a line. */
    const hx_jlist *q =
        f_splitlines(vm, &(hx_jcall) { .self = hx_jstr_cat(vm, s, &END, false) }).u.q;
    const bool first = hx_jval_truthy(c->a[1]), blank = hx_jval_truthy(c->a[2]);
    hx_jbuf b = { .vm = vm };

    for (size_t i = 0; i < q->n && vm->rc == 0; i++) {
        const hx_jstr *line = q->v[i].u.s;
        put_lit(&b, i ? "\n" : "");
        if (i ? blank || line->n > 0 : first)
            hx_jbuf_put(&b, by);
        hx_jbuf_put(&b, line);
    }
    return hx_jbuf_done(&b, s->safe);
}

/* startswith() (arg 0), endswith(): one text, or any of a tuple. */
static hx_jval f_starts(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s;
    const size_t n = c->a[0].t == HX_J_TUPLE ? c->a[0].u.q->n : 1;
    bool yes = false;

    for (size_t i = 0; i < n && !yes; i++) {
        const hx_jstr *part =
            want_text(vm, c->a[0].t == HX_J_TUPLE ? c->a[0].u.q->v[i] : c->a[0]);
        yes = part->n <= s->n &&
              memcmp(s->p + (c->arg ? s->n - part->n : 0), part->p, part->n) == 0;
    }
    return hx_jbool(yes);
}

/* find() (arg 0), count(). */
static hx_jval f_find(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s, *sub = want_text(vm, c->a[0]);
    size_t at = find(s, sub, 0);
    int64_t n = 0;

    hx_jvm_work(vm, s->n / 64);
    if (c->arg == 0)
        return hx_jint(at == SIZE_MAX ? -1 : (int64_t)count_points(s->p, at));
    if (sub->n == 0)
        return hx_jint((int64_t)count_points(s->p, s->n) + 1);
    for (; at != SIZE_MAX; at = find(s, sub, at + sub->n))
        n++;
    return hx_jint(n);
}

/* The filter joins self with an argument, the method an argument with self. */
static hx_jval f_join(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jlist *q = hx_jval_seq(vm, c->filter ? c->self : c->a[0]);
    const hx_jstr *sep = c->filter ? &EMPTY_TEXT : c->self.u.s;
    hx_jbuf b = { .vm = vm };

    if (c->filter && c->a[0].t != HX_J_ABSENT)
        sep = hx_jval_str(vm, c->a[0]);
    for (size_t i = 0; i < q->n && hx_jvm_work(vm, 1); i++) {
        const hx_jval v = follow(vm, q->v[i], c->a[1], hx_jnone());
        hx_jbuf_put(&b, i ? sep : &EMPTY_TEXT);
        hx_jbuf_put(&b, c->filter ? hx_jval_str(vm, v) : want_text(vm, v));
    }
    return hx_jbuf_done(&b, false);
}

/* str.format with {}, {0} and {name}. */
static hx_jval f_format(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = c->self.u.s;
    const hx_jargs *args = c->raw;
    hx_jbuf b = { .vm = vm };
    size_t next = 0;

    for (size_t i = 0; i < s->n && vm->rc == 0; i++) {
        const char ch = s->p[i];
        if (ch != '{' && ch != '}') {
            put_sub(&b, s, i, 1);
            continue;
        }
        if (i + 1 < s->n && s->p[i + 1] == ch) {
            put_sub(&b, s, i++, 1);
            continue;
        }
        const char *end = ch == '{' ? memchr(s->p + i, '}', s->n - i) : NULL;
        if (end == NULL)
            return hx_jvm_fail(vm, HX_EFORMAT, "format: single \"%c\"", ch);
        const hx_jstr name = { .p = s->p + i + 1, .n = (size_t)(end - s->p) - i - 1 };
        const size_t digits = strspn(name.p, "0123456789");
        const hx_jval *v = NULL;
        size_t k = next;
        if (name.n > 0 && digits == name.n && digits < 6 && next == 0)
            k = (size_t)strtoul(name.p, NULL, 10);
        else if (name.n > 0)
            v = hx_jdict_find(vm, &args->named, hx_jtext(&name));
        next += name.n == 0;
        if (k < args->pos.n && digits == name.n)
            v = &args->pos.v[k];
        if (v == NULL)
            return hx_jvm_fail(vm, HX_EUNSUP, "format: field {%.*s}",
                               (int)HX_MIN(name.n, 60), name.p);
        hx_jbuf_put(&b, hx_jval_str(vm, *v));
        i = (size_t)(end - s->p);
    }
    return hx_jbuf_done(&b, false);
}

/* safe (arg 0), escape. */
static hx_jval f_safe(hx_jvm *vm, const hx_jcall *c)
{
    hx_jstr s = *c->self.u.s;

    s.safe = true;
    return c->arg ? hx_jstr_escape(vm, c->self.u.s) : str_make(vm, s);
}

static hx_jval f_tojson(hx_jvm *vm, const hx_jcall *c)
{
    writer w = { .vm = vm,
                 .b.vm = vm,
                 .json = true,
                 .ascii = hx_jval_truthy(c->a[0]),
                 .sort = hx_jval_truthy(c->a[3]),
                 .item = &COMMA,
                 .key = &COLON };

    if (given(c->a[1])) {
        w.item = &COMMA_BREAK;
        w.indent = pad_of(vm, c->a[1], 0);
    }
    if (given(c->a[2])) {
        const hx_jlist *q = hx_jval_seq(vm, c->a[2]);
        if (q->n != 2)
            return hx_jvm_fail(vm, HX_EFORMAT, "tojson: separators are not a pair");
        w.item = want_text(vm, q->v[0]);
        w.key = want_text(vm, q->v[1]);
    }
    put_value(&w, c->self, 0);
    return hx_jbuf_done(&w.b, false);
}

/* ---- builtins: numbers ----------------------------------------------- */

/* The number that all of s spells, white space around it aside. */
static bool parse_number(hx_jvm *vm, const hx_jstr *s, hx_jval *out)
{
    static const char SPACE[] = " \t\r\n";
    char text[64] = "", *end;

    memcpy(text, s->p, HX_MIN(s->n, sizeof text - 1));
    const char *p = text + strspn(text, SPACE);
    const size_t n = strspn(p, "+-.0123456789eE"), k = strspn(p, "+-0123456789");
    if (n == 0 || p + n + strspn(p + n, SPACE) != text + s->n)
        return false;
    errno = 0;
    *out = n == k ? hx_jint(strtoll(p, &end, 10)) : hx_jfloat(strtod(p, &end));
    if (n == k && errno == ERANGE)
        hx_jvm_fail(vm, HX_EUNSUP, "integer %s is over 64 bits", p);
    return end == p + n;
}

/* int (arg 0), float. */
static hx_jval f_number(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jval dflt = c->a[0].t != HX_J_ABSENT ? c->a[0]
                         : c->arg                 ? hx_jfloat(0)
                                                  : hx_jint(0);
    hx_jval v = c->self;

    if (v.t == HX_J_UNDEF)
        return hx_jval_misused(vm, v);
    if (v.t == HX_J_STR && !parse_number(vm, v.u.s, &v))
        return dflt;
    if (v.t == HX_J_BIG)
        return hx_jvm_fail(vm, HX_EUNSUP, "an integer over 64 bits");
    if (!hx_jval_is_num(v))
        return dflt;
    if (c->arg)
        return hx_jfloat(hx_jval_as_double(v));
    if (v.t != HX_J_FLOAT)
        return hx_jint(v.u.i);
    if (!(fabs(v.u.d) < 9.2e18))
        return hx_jvm_fail(vm, HX_EUNSUP, "a float over 64 bits as an integer");
    return hx_jint((int64_t)v.u.d);
}

static hx_jval f_abs(hx_jvm *vm, const hx_jcall *c)
{
    if (c->self.t == HX_J_FLOAT)
        return hx_jfloat(fabs(c->self.u.d));
    const int64_t i = want_int(vm, c->self, 0);
    return i < 0 ? hx_jinja_binary(vm, HX_OP_SUB, hx_jint(0), hx_jint(i)) : hx_jint(i);
}

static hx_jval f_round(hx_jvm *vm, const hx_jcall *c)
{
    const int64_t digits = want_int(vm, c->a[0], 0);
    char text[400];

    if (!hx_jval_is_num(c->self) || digits < 0 || digits > 20)
        return hx_jvm_fail(vm, digits < 0 ? HX_EUNSUP : refusal(c->self),
                           "rounding a %s to %lld digits", hx_jval_type(c->self),
                           (long long)digits);
    if (hx_jval_is_int(c->self))
        return hx_jint(c->self.u.i);
    snprintf(text, sizeof text, "%.*f", (int)digits, c->self.u.d); /* as Python rounds */
    return hx_jfloat(strtod(text, NULL));
}

/* ---- builtins: sequences --------------------------------------------- */

static hx_jval f_length(hx_jvm *vm, const hx_jcall *c)
{
    return hx_jint((int64_t)hx_jval_len(vm, c->self));
}

static hx_jval f_default(hx_jvm *vm, const hx_jcall *c)
{
    const bool use =
        c->self.t == HX_J_UNDEF || (hx_jval_truthy(c->a[1]) && !hx_jval_truthy(c->self));

    (void)vm;
    if (!use)
        return c->self;
    return c->a[0].t != HX_J_ABSENT ? c->a[0] : hx_jtext(&EMPTY_TEXT);
}

/* first (arg 0), last. */
static hx_jval f_end(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jlist *q = hx_jval_seq(vm, c->self);

    if (q->n == 0)
        return hx_jval_hint(vm, "the sequence was empty");
    return q->v[c->arg ? q->n - 1 : 0];
}

static hx_jval f_list(hx_jvm *vm, const hx_jcall *c)
{
    return (hx_jval) { .t = HX_J_LIST, .u.q = hx_jval_seq(vm, c->self) };
}

static hx_jval f_reverse(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jlist *q = hx_jval_seq(vm, c->self);
    hx_jlist l = { .vm = vm };
    hx_jbuf b = { .vm = vm };

    for (size_t i = q->n; i-- > 0 && hx_jvm_work(vm, 1);) {
        if (c->self.t == HX_J_STR)
            hx_jbuf_put(&b, q->v[i].u.s);
        else
            hx_jlist_add(&l, q->v[i]);
    }
    return c->self.t == HX_J_STR ? hx_jbuf_done(&b, c->self.u.s->safe) : generator(&l);
}

/* What items of q are sorted by: attr of each, without case unless it matters. */
static hx_jval *sort_keys(hx_jvm *vm, const hx_jlist *q, hx_jval attr, bool sensitive)
{
    hx_jval *key = hx_jvm_alloc(vm, q->n, sizeof *key);

    for (size_t i = 0; i < q->n && hx_jvm_work(vm, 1); i++) {
        key[i] = follow(vm, q->v[i], attr, hx_jnone());
        if (key[i].t == HX_J_STR && !sensitive)
            key[i] = f_case(vm, &(hx_jcall) { .self = key[i], .arg = LOWER });
    }
    return key;
}

enum { SORT, UNIQUE, MIN, MAX };

static hx_jval f_sort(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jval sensitive = c->a[c->arg == SORT], attr = c->a[c->arg == SORT ? 2 : 1];
    const hx_jlist *q = hx_jval_seq(vm, c->self);
    hx_jlist l = { .vm = vm };

    if (attr.t == HX_J_STR && memchr(attr.u.s->p, ',', attr.u.s->n) != NULL)
        return hx_jvm_fail(vm, HX_EUNSUP, "sorting by several attributes");
    hx_jval *key = sort_keys(vm, q, attr, hx_jval_truthy(sensitive));
    if (c->arg == SORT) {
        const uint32_t *at = sorted(vm, key, q->n, hx_jval_truthy(c->a[0]));
        for (size_t i = 0; i < q->n && vm->rc == 0; i++)
            hx_jlist_add(&l, q->v[at[i]]);
        return hx_jlist_done(&l, HX_J_LIST);
    }
    for (size_t i = 0; i < q->n && vm->rc == 0; i++) {
        size_t k = 0; /* key[0..l.n) belong to what was taken: all, or the best */
        while (c->arg == UNIQUE && k < l.n && hx_jvm_work(vm, 1) &&
               !equal(vm, key[k], key[i]))
            k++;
        if (k < l.n &&
            (c->arg == UNIQUE ||
             !hx_jval_compare(vm, c->arg == MIN ? HX_OP_LT : HX_OP_GT, key[i], key[0])))
            continue;
        key[k] = key[i];
        if (k < l.n)
            l.v[k] = q->v[i];
        else
            hx_jlist_add(&l, q->v[i]);
    }
    if (c->arg == UNIQUE)
        return generator(&l);
    return l.n ? l.v[0] : hx_jval_hint(vm, "the sequence was empty");
}

static hx_jval f_sum(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jlist *q = hx_jval_seq(vm, c->self);
    hx_jval v = c->a[1].t != HX_J_ABSENT ? c->a[1] : hx_jint(0);

    for (size_t i = 0; i < q->n && hx_jvm_work(vm, 1); i++)
        v = hx_jinja_binary(vm, HX_OP_ADD, v, follow(vm, q->v[i], c->a[0], hx_jnone()));
    return v;
}

enum { MAP = 1, BY_ATTR = 2, NEGATE = 4 };

/* map, select, reject, selectattr, rejectattr: a filter or test named by an argument,
 * with the arguments behind it, for each item. */
static hx_jval f_each(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jlist *q = hx_jval_truthy(c->self) ? hx_jval_seq(vm, c->self) : &EMPTY_SEQ;
    const unsigned as = c->arg & MAP ? HX_J_FILTER : HX_J_TEST;
    hx_jargs rest = *c->raw;
    hx_jval attr = { .t = HX_J_ABSENT }, dflt = attr;
    const hx_jbuiltin *fn = NULL;
    hx_jlist l = { .vm = vm };

    if ((c->arg & MAP) && rest.pos.n == 0) {
        for (size_t k = 0; k < rest.named.n; k += 2)
            *(hx_jstr_is(rest.named.v[k].u.s, "attribute") ? &attr : &dflt) =
                rest.named.v[k + 1];
    }
    if (c->arg & BY_ATTR && rest.pos.n > 0) {
        attr = *rest.pos.v++;
        rest.pos.n--;
    }
    if (rest.pos.n > 0) {
        const hx_jstr *name = want_text(vm, *rest.pos.v++);
        rest.pos.n--;
        if ((fn = hx_jcall_find((hx_str) { name->p, name->n }, as)) == NULL)
            return hx_jvm_fail(vm, HX_EUNSUP, "%s \"%.*s\" is not known",
                               c->arg & MAP ? "filter" : "test", (int)HX_MIN(name->n, 60),
                               name->p);
    }
    if ((c->arg & BY_ATTR || (c->arg & MAP && fn == NULL)) && !given(attr))
        return hx_jvm_fail(vm, HX_EFORMAT, "map or select without an argument");
    for (size_t i = 0; i < q->n && hx_jvm_work(vm, 1); i++) {
        const hx_jval item = follow(vm, q->v[i], attr, dflt);
        const hx_jval v = fn ? hx_jcall_run(vm, fn, as, item, &rest) : item;
        if (c->arg & MAP)
            hx_jlist_add(&l, v);
        else if (hx_jval_truthy(v) == !(c->arg & NEGATE))
            hx_jlist_add(&l, q->v[i]);
    }
    return generator(&l);
}

/* ---- builtins: dicts, functions -------------------------------------- */

enum { KEYS, VALUES, ITEMS };

static hx_jval f_items(hx_jvm *vm, const hx_jcall *c)
{
    hx_jlist l = { .vm = vm };

    if (c->self.t != HX_J_DICT && c->self.t != HX_J_UNDEF)
        return hx_jvm_fail(vm, HX_EFORMAT, "items of a %s", hx_jval_type(c->self));
    for (size_t i = 0; c->self.t == HX_J_DICT && i < c->self.u.q->n && hx_jvm_work(vm, 1);
         i += 2) {
        hx_jlist two = { vm, &c->self.u.q->v[i], 2, 0 };
        hx_jlist_add(&l, c->arg == KEYS     ? two.v[0]
                         : c->arg == VALUES ? two.v[1]
                                            : hx_jlist_done(&two, HX_J_TUPLE));
    }
    return c->filter ? generator(&l) : hx_jlist_done(&l, HX_J_VIEW);
}

static hx_jval f_dictsort(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *by = given(c->a[1]) ? want_text(vm, c->a[1]) : &EMPTY_TEXT;
    const bool value = hx_jstr_is(by, "value");
    hx_jlist l = { .vm = vm };

    if (c->self.t != HX_J_DICT || !(by->n == 0 || value || hx_jstr_is(by, "key")))
        return hx_jvm_fail(vm, HX_EFORMAT, "dictsort of a %s", hx_jval_type(c->self));
    const hx_jlist *q =
        hx_jval_seq(vm, f_items(vm, &(hx_jcall) { .self = c->self, .arg = ITEMS }));
    const hx_jval *key = sort_keys(vm, q, hx_jint(value), hx_jval_truthy(c->a[0]));
    const uint32_t *at = sorted(vm, key, q->n, hx_jval_truthy(c->a[2]));
    for (size_t i = 0; i < q->n && vm->rc == 0; i++)
        hx_jlist_add(&l, q->v[at[i]]);
    return hx_jlist_done(&l, HX_J_LIST);
}

static hx_jval f_get(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jval *v = hx_jdict_find(vm, c->self.u.q, c->a[0]);

    return v ? *v : c->a[1].t != HX_J_ABSENT ? c->a[1] : hx_jnone();
}

static hx_jval f_range(hx_jvm *vm, const hx_jcall *c)
{
    const bool one = c->a[1].t == HX_J_ABSENT;
    const int64_t start = one ? 0 : want_int(vm, c->a[0], 0);
    const int64_t stop = want_int(vm, c->a[one ? 0 : 1], 0),
                  step = want_int(vm, c->a[2], 1);
    hx_jlist l = { .vm = vm };

    if (step == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "range() arg 3 must not be zero");
    for (int64_t i = start; (step > 0 ? i < stop : i > stop) && vm->rc == 0;) {
        if (l.n == 100000) /* the bound of jinja2's sandbox */
            return hx_jvm_fail(vm, HX_EFORMAT, "range too big, at most 100000 items");
        hx_jlist_add(&l, hx_jint(i));
        if (__builtin_add_overflow(i, step, &i))
            break;
    }
    return hx_jlist_done(&l, HX_J_VIEW);
}

/* dict (arg 0), namespace: a dict, then keywords. */
static hx_jval f_dict(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jlist *from = c->raw->pos.n > 0 ? c->raw->pos.v[0].u.q : &EMPTY_SEQ;
    const hx_jlist *named = &c->raw->named;
    hx_jlist d = { .vm = vm };

    if (c->raw->pos.n > 1 || (c->raw->pos.n == 1 && c->raw->pos.v[0].t != HX_J_DICT))
        return hx_jvm_fail(vm, HX_EUNSUP, "%s() of something that is no dict",
                           c->arg ? "namespace" : "dict");
    for (size_t i = 0; i < from->n && hx_jvm_work(vm, 1); i++)
        hx_jlist_add(&d, from->v[i]);
    for (size_t i = 0; i < named->n && vm->rc == 0; i += 2)
        hx_jdict_put(&d, named->v[i], named->v[i + 1]);
    return hx_jlist_done(&d, c->arg ? HX_J_SPACE : HX_J_DICT);
}

static hx_jval f_raise(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jstr *s = hx_jval_str(vm, c->a[0]);

    return hx_jvm_fail(vm, HX_EFORMAT, "%.*s", (int)HX_MIN(s->n, 190), s->p);
}

static hx_jval f_strftime(hx_jvm *vm, const hx_jcall *c)
{
    static const char DAYS[] =
        "Sunday Monday Tuesday Wednesday Thursday Friday Saturday ";
    static const char MONTHS[] = "January February March April May June July August "
                                 "September October November December ";
    static const char NUMBERS[] = "YymdHIMSj";
    const hx_jstr *s = want_text(vm, c->a[0]);
    const time_t now = (time_t)vm->now_s;
    hx_jbuf b = { .vm = vm };
    struct tm t = { 0 };

    gmtime_r(&now, &t);
    const int value[] = { t.tm_year + 1900, t.tm_year % 100, t.tm_mon + 1,
                          t.tm_mday,        t.tm_hour,       (t.tm_hour + 11) % 12 + 1,
                          t.tm_min,         t.tm_sec,        t.tm_yday + 1 };
    for (size_t i = 0; i < s->n && vm->rc == 0; i++) {
        if (s->p[i] != '%') {
            put_sub(&b, s, i, 1);
            continue;
        }
        const bool bare = i + 1 < s->n && s->p[i + 1] == '-';
        i += bare ? 2 : 1;
        const char d = i < s->n ? s->p[i] : ' ';
        const char *number = memchr(NUMBERS, d, sizeof NUMBERS - 1);
        const bool day = d == 'a' || d == 'A';
        char text[16];
        if (number != NULL) {
            const int width = bare ? 1 : d == 'Y' ? 4 : d == 'j' ? 3 : 2;
            snprintf(text, sizeof text, "%0*d", width, value[number - NUMBERS]);
            put_lit(&b, text);
        } else if (day || d == 'b' || d == 'B') {
            const char *name = day ? DAYS : MONTHS;
            for (int k = day ? t.tm_wday : t.tm_mon; k > 0; k--)
                name = strchr(name, ' ') + 1;
            hx_jbuf_add(&b, name, d >= 'a' ? 3 : strcspn(name, " "), NULL, false);
        } else if (d == 'p') {
            put_lit(&b, t.tm_hour < 12 ? "AM" : "PM");
        } else if (d == '%') {
            put_lit(&b, "%");
        } else {
            hx_jvm_fail(vm, HX_EUNSUP, "strftime_now: directive \"%%%c\"", d);
        }
    }
    return hx_jbuf_done(&b, false);
}

/* ---- tests ----------------------------------------------------------- */

#define IS(t)    (1 << HX_J_##t)
#define INTEGER  (IS(BOOL) | IS(INT) | IS(BIG))
#define SEQUENCE (IS(UNDEF) | IS(STR) | IS(LIST) | IS(TUPLE) | IS(DICT))

static hx_jval t_type(hx_jvm *vm, const hx_jcall *c)
{
    (void)vm;
    return hx_jbool(c->arg >> c->self.t & 1);
}

static hx_jval t_bool(hx_jvm *vm, const hx_jcall *c)
{
    (void)vm;
    return hx_jbool(c->self.t == HX_J_BOOL && c->self.u.i == (c->arg != 0));
}

/* odd (arg 1), even, divisibleby. */
static hx_jval t_remainder(hx_jvm *vm, const hx_jcall *c)
{
    const hx_jval by = c->a[0].t == HX_J_ABSENT ? hx_jint(2) : c->a[0];

    if (!hx_jval_is_num(c->self))
        return hx_jvm_fail(vm, refusal(c->self), "the remainder of a %s",
                           hx_jval_type(c->self));
    return hx_jbool(
        equal(vm, hx_jinja_binary(vm, HX_OP_MOD, c->self, by), hx_jint(c->arg)));
}

static hx_jval t_compare(hx_jvm *vm, const hx_jcall *c)
{
    return hx_jbool(hx_jval_compare(vm, (hx_jop)c->arg, c->self, c->a[0]));
}

/* ---- the table ------------------------------------------------------- */

#define F       HX_J_FILTER
#define T       HX_J_TEST
#define G       HX_J_GLOBAL
#define D       HX_J_OF_DICT
#define S       HX_J_OF_STR
#define TEXT    HX_J_AS_TEXT
#define ON_SAFE (HX_J_OF_STR | HX_J_ON_SAFE)

static const hx_jbuiltin BUILTINS[] = {
    { "upper", f_case, "", F | ON_SAFE | TEXT, UPPER },
    { "lower", f_case, "", F | ON_SAFE | TEXT, LOWER },
    { "capitalize", f_case, "", F | ON_SAFE | TEXT, CAPITALIZE },
    { "title", f_case, "", F | ON_SAFE | TEXT, TITLE },
    { "trim", f_strip, "chars?", F | TEXT, LEFT | RIGHT },
    { "strip", f_strip, "chars?", ON_SAFE, LEFT | RIGHT },
    { "lstrip", f_strip, "chars?", ON_SAFE, LEFT },
    { "rstrip", f_strip, "chars?", ON_SAFE, RIGHT },
    { "startswith", f_starts, "prefix", ON_SAFE, 0 },
    { "endswith", f_starts, "suffix", ON_SAFE, 1 },
    { "find", f_find, "sub", ON_SAFE, 0 },
    { "count", f_find, "sub", ON_SAFE, 1 },
    { "replace", f_replace, "old new count?", F | S | TEXT, 0 },
    { "split", f_split, "sep? maxsplit?", S, 0 },
    { "rsplit", f_split, "sep? maxsplit?", S, 1 },
    { "splitlines", f_splitlines, "", S, 0 },
    { "format", f_format, "*", S, 0 },
    { "join", f_join, "d? attribute?", F | S, 0 },
    { "indent", f_indent, "width? first? blank?", F, 0 },
    { "string", f_default, "", F | TEXT, 0 },
    { "safe", f_safe, "", F | TEXT, 0 },
    { "escape e", f_safe, "", F | TEXT, 1 },
    { "tojson", f_tojson, "ensure_ascii? indent? separators? sort_keys?", F, 0 },
    { "int", f_number, "default?", F, 0 },
    { "float", f_number, "default?", F, 1 },
    { "abs", f_abs, "", F, 0 },
    { "round", f_round, "precision?", F, 0 },
    { "length count", f_length, "", F, 0 },
    { "default d", f_default, "default_value? boolean?", F, 0 },
    { "first", f_end, "", F, 0 },
    { "last", f_end, "", F, 1 },
    { "list", f_list, "", F, 0 },
    { "reverse", f_reverse, "", F, 0 },
    { "sort", f_sort, "reverse? case_sensitive? attribute?", F, SORT },
    { "unique", f_sort, "case_sensitive? attribute?", F, UNIQUE },
    { "max", f_sort, "case_sensitive? attribute?", F, MAX },
    { "min", f_sort, "case_sensitive? attribute?", F, MIN },
    { "sum", f_sum, "attribute? start?", F, 0 },
    { "map", f_each, "*", F, MAP },
    { "select", f_each, "*", F, 0 },
    { "reject", f_each, "*", F, NEGATE },
    { "selectattr", f_each, "*", F, BY_ATTR },
    { "rejectattr", f_each, "*", F, BY_ATTR | NEGATE },
    { "items", f_items, "", F | D, ITEMS },
    { "keys", f_items, "", D, KEYS },
    { "values", f_items, "", D, VALUES },
    { "get", f_get, "key default?", D, 0 },
    { "dictsort", f_dictsort, "case_sensitive? by? reverse?", F, 0 },
    { "range", f_range, "start stop? step?", G, 0 },
    { "dict", f_dict, "*", G, 0 },
    { "namespace", f_dict, "*", G, 1 },
    { "raise_exception", f_raise, "message", G, 0 },
    { "strftime_now", f_strftime, "format", G, 0 },
    { "defined", t_type, "", T, ~IS(UNDEF) },
    { "undefined", t_type, "", T, IS(UNDEF) },
    { "none", t_type, "", T, IS(NONE) },
    { "boolean", t_type, "", T, IS(BOOL) },
    { "integer", t_type, "", T, INTEGER & ~IS(BOOL) },
    { "float", t_type, "", T, IS(FLOAT) },
    { "number", t_type, "", T, INTEGER | IS(FLOAT) },
    { "string", t_type, "", T, IS(STR) },
    { "mapping", t_type, "", T, IS(DICT) },
    { "sequence", t_type, "", T, SEQUENCE },
    { "iterable", t_type, "", T, SEQUENCE | IS(VIEW) },
    { "callable", t_type, "", T, IS(UNDEF) | IS(MACRO) | IS(FUNC) | IS(METHOD) },
    { "true", t_bool, "", T, 1 },
    { "false", t_bool, "", T, 0 },
    { "odd", t_remainder, "", T, 1 },
    { "even", t_remainder, "", T, 0 },
    { "divisibleby", t_remainder, "num", T, 0 },
    { "in", t_compare, "seq", T, HX_OP_IN },
    { "eq equalto ==", t_compare, "other", T, HX_OP_EQ },
    { "ne !=", t_compare, "other", T, HX_OP_NE },
    { "gt greaterthan >", t_compare, "other", T, HX_OP_GT },
    { "ge >=", t_compare, "other", T, HX_OP_GE },
    { "lt lessthan <", t_compare, "other", T, HX_OP_LT },
    { "le <=", t_compare, "other", T, HX_OP_LE },
};

/* One of the words. */
static bool among(const char *words, hx_str name)
{
    for (size_t n; *words != 0; words += n + (words[n] == ' ')) {
        n = strcspn(words, " ");
        if (n == name.n && memcmp(words, name.p, n) == 0)
            return true;
    }
    return false;
}

const hx_jbuiltin *hx_jcall_find(hx_str name, unsigned as)
{
    for (size_t i = 0; i < HX_LEN(BUILTINS); i++) {
        if ((BUILTINS[i].as & as) && among(BUILTINS[i].name, name))
            return &BUILTINS[i];
    }
    return NULL;
}

/* Binds arguments to the parameters, as Python does. */
static void bind(hx_jvm *vm, const hx_jbuiltin *fn, const hx_jargs *args, hx_jcall *c)
{
    const char *p = fn->params;
    size_t used = 0, i = 0;

    for (; *p != 0; i++) {
        const hx_jstr name = { .p = p, .n = strcspn(p, "? ") };
        const hx_jval *at = i < args->pos.n
                                ? &args->pos.v[i]
                                : hx_jdict_find(vm, &args->named, hx_jtext(&name));
        used += i >= args->pos.n && at != NULL;
        p += name.n;
        if (at != NULL)
            c->a[i] = *at;
        else if (*p != '?')
            hx_jvm_fail(vm, HX_EFORMAT, "%s() misses its argument \"%.*s\"", fn->name,
                        (int)name.n, name.p);
        p += strspn(p, "? ");
    }
    if (args->pos.n > i || 2 * used < args->named.n)
        hx_jvm_fail(vm, HX_EUNSUP, "%s() with other arguments than \"%s\"", fn->name,
                    fn->params);
}

hx_jval hx_jcall_run(hx_jvm *vm, const hx_jbuiltin *fn, unsigned as, hx_jval self,
                     const hx_jargs *args)
{
    hx_jcall c = { .self = self, .raw = args, .filter = as == F, .arg = fn->arg };

    if (fn->params[0] != '*')
        bind(vm, fn, args, &c);
    if (fn->as & TEXT)
        c.self = hx_jtext(hx_jval_str(vm, self));
    return vm->rc ? hx_jnone() : fn->fn(vm, &c);
}

bool hx_jcall_method(hx_jvm *vm, hx_jval obj, const hx_jstr *name, hx_jval *out)
{
    const hx_jbuiltin *fn =
        hx_jcall_find((hx_str) { name->p, name->n }, obj.t == HX_J_STR    ? S
                                                     : obj.t == HX_J_DICT ? D
                                                                          : 0);
    hx_jmethod *m;

    if (fn == NULL || (m = hx_jvm_alloc(vm, 1, sizeof *m)) == NULL)
        return false;
    if (obj.t == HX_J_STR && obj.u.s->safe && !(fn->as & HX_J_ON_SAFE))
        hx_jvm_fail(vm, HX_EUNSUP, "%s on text marked safe", fn->name);
    *m = (hx_jmethod) { obj, fn };
    *out = (hx_jval) { .t = HX_J_METHOD, .u.met = m };
    return true;
}
