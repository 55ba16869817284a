/* jinja_val.c - the values of templates: strings with marks, containers, iteration, and
 * what Python does with any value: str(), repr(), json.dumps, ==, <, in, sorted.
 *
 * Called by the other jinja files. Never looks at the syntax tree; never changes a value
 * that somebody can already see, except namespaces and the position of generators. */
#include <math.h>
#include <stdio.h>
#include <utf8proc.h>

#include "text/jinja_ast.h"

/* ---- the machine's services ------------------------------------------ */

int hx_jvm_fail(hx_jvm *vm, int code, const char *fmt, ...)
{
    char text[200];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    /* A message may end inside a character when it was cut. */
    size_t n = strlen(text);
    while (n > 0 && !hx_utf8_ok(text, n))
        text[--n] = 0;
    return hx_fail(vm->err, code, "%s:%d: %s", vm->name, vm->line, text);
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

int hx_jvm_work(hx_jvm *vm, size_t units)
{
    if (units > (size_t)vm->max_steps || vm->steps > vm->max_steps - (int64_t)units)
        return hx_jvm_fail(vm, HX_ELIMIT, "template takes more than %lld steps",
                           (long long)vm->max_steps);
    vm->steps += (int64_t)units;
    return 0;
}

int hx_jvm_enter(hx_jvm *vm)
{
    if (vm->depth >= HX_J_DEPTH_MAX)
        return hx_jvm_fail(vm, HX_ELIMIT, "nested over %d deep", HX_J_DEPTH_MAX);
    vm->depth++;
    return 0;
}

/* ---- buffers --------------------------------------------------------- */

static bool buf_reserve(hx_jbuf *b, size_t n)
{
    if (b->rc != 0)
        return false;
    if (n > SIZE_MAX / 4 - b->n || (b->max != 0 && n > b->max - HX_MIN(b->n, b->max))) {
        b->rc = hx_jvm_fail(b->vm, HX_ELIMIT, "text of more than %zu bytes",
                            b->max ? b->max : SIZE_MAX / 4);
        return false;
    }
    if (n <= b->cap - b->n)
        return true;
    const size_t cap = b->cap == 0 ? n : HX_MAX(2 * b->cap, b->n + n);
    char *p = hx_jvm_alloc(b->vm, cap, 1);
    uint8_t *mark = p != NULL && b->mark != NULL ? hx_jvm_alloc(b->vm, cap, 1) : NULL;
    if (p == NULL || (b->mark != NULL && mark == NULL)) {
        b->rc = HX_ENOMEM;
        return false;
    }
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
    if (n == 0 || !buf_reserve(b, n))
        return;
    memcpy(b->p + b->n, p, n);
    if (b->mark == NULL && b->n == 0 && mark == NULL) {
        b->user = user;
    } else if (b->mark == NULL && (mark != NULL || user != b->user)) {
        if ((b->mark = hx_jvm_alloc(b->vm, b->cap, 1)) == NULL) {
            b->rc = HX_ENOMEM;
            return;
        }
        memset(b->mark, b->user, b->n);
    }
    if (b->mark != NULL && mark != NULL)
        memcpy(b->mark + b->n, mark, n);
    else if (b->mark != NULL)
        memset(b->mark + b->n, user, n);
    b->n += n;
}

void hx_jbuf_lit(hx_jbuf *b, const char *s)
{
    hx_jbuf_add(b, s, strlen(s), NULL, false);
}

void hx_jbuf_pad(hx_jbuf *b, char c, size_t n)
{
    char block[64];

    memset(block, c, sizeof block);
    for (; n > 0 && b->rc == 0; n -= HX_MIN(n, sizeof block))
        hx_jbuf_add(b, block, HX_MIN(n, sizeof block), NULL, false);
}

void hx_jbuf_sub(hx_jbuf *b, const hx_jstr *s, size_t off, size_t n)
{
    hx_jbuf_add(b, s->p + off, n, s->mark ? s->mark + off : NULL, s->user);
}

void hx_jbuf_put(hx_jbuf *b, const hx_jstr *s)
{
    hx_jbuf_sub(b, s, 0, s->n);
}

void hx_jbuf_cp(hx_jbuf *b, uint32_t cp, const hx_jstr *s, size_t off)
{
    char text[4];

    hx_jbuf_add(b, text, (size_t)hx_utf8_put(cp, text), NULL,
                s->mark ? s->mark[off] : s->user);
}

static size_t count_points(const char *p, size_t n)
{
    size_t k = 0;

    for (size_t i = 0; i < n; i++)
        k += ((uint8_t)p[i] & 0xc0) != 0x80;
    return k;
}

static int str_make(hx_jvm *vm, const hx_jstr *like, hx_jval *out)
{
    hx_jstr *s = hx_jvm_alloc(vm, 1, sizeof *s);

    if (s == NULL)
        return HX_ENOMEM;
    *s = *like;
    *out = (hx_jval) { .t = HX_J_STR, .u.s = s };
    return 0;
}

int hx_jbuf_done_safe(hx_jbuf *b, bool safe, hx_jval *out)
{
    const hx_jstr s = { .p = b->n ? b->p : "",
                        .n = b->n,
                        .len = count_points(b->p, b->n),
                        .mark = b->mark,
                        .user = b->user,
                        .safe = safe };

    return b->rc != 0 ? b->rc : str_make(b->vm, &s, out);
}

int hx_jbuf_done(hx_jbuf *b, hx_jval *out)
{
    return hx_jbuf_done_safe(b, false, out);
}

/* ---- strings --------------------------------------------------------- */

int hx_jstr_new(hx_jvm *vm, const char *p, size_t n, bool user, hx_jval *out)
{
    return str_make(
        vm, &(hx_jstr) { .p = p, .n = n, .len = count_points(p, n), .user = user }, out);
}

int hx_jstr_copy(hx_jvm *vm, const char *p, size_t n, hx_jval *out)
{
    char *q = hx_jvm_alloc(vm, n + 1, 1);

    if (q == NULL)
        return HX_ENOMEM;
    memcpy(q, p, n);
    return hx_jstr_new(vm, q, n, false, out);
}

int hx_jstr_sub(hx_jvm *vm, const hx_jstr *s, size_t off, size_t n, hx_jval *out)
{
    hx_jstr sub = *s;

    sub.p += off;
    sub.n = n;
    sub.len = s->len == s->n ? n : count_points(sub.p, n);
    sub.mark = s->mark ? s->mark + off : NULL;
    sub.tail = NULL;
    return str_make(vm, &sub, out);
}

/* Templates build long texts by adding to a variable. The buffer behind such a text keeps
 * spare room, and the next addition goes there if nobody else has used it: the sum of all
 * copies stays linear. Shorter strings that share the buffer never see what follows. */
int hx_jstr_cat(hx_jvm *vm, const hx_jstr *a, const hx_jstr *b, hx_jval *out)
{
    hx_jbuf *t = a->tail;

    if (t == NULL || t->p != a->p || t->n != a->n) {
        if ((t = hx_jvm_alloc(vm, 1, sizeof *t)) == NULL)
            return HX_ENOMEM;
        t->vm = vm;
        if (!buf_reserve(t, a->n + b->n))
            return t->rc;
        hx_jbuf_put(t, a);
    }
    hx_jbuf_put(t, b);
    if (t->rc != 0)
        return t->rc;
    return str_make(vm,
                    &(hx_jstr) { .p = t->n ? t->p : "",
                                 .n = t->n,
                                 .len = a->len + b->len,
                                 .mark = t->mark,
                                 .user = t->user,
                                 .tail = t },
                    out);
}

int hx_jstr_safe(hx_jvm *vm, const hx_jstr *s, hx_jval *out)
{
    hx_jstr copy = *s;

    copy.safe = true;
    return str_make(vm, &copy, out);
}

int hx_jstr_escape(hx_jvm *vm, const hx_jstr *s, hx_jval *out)
{
    static const struct {
        char c;
        const char *text;
    } HTML[] = {
        { '&', "&amp;" },  { '<', "&lt;" },  { '>', "&gt;" },
        { '\'', "&#39;" }, { '"', "&#34;" },
    };
    hx_jbuf b = { .vm = vm };

    if (s->safe) {
        *out = (hx_jval) { .t = HX_J_STR, .u.s = s };
        return 0;
    }
    for (size_t i = 0; i < s->n; i++) {
        size_t k = 0;
        while (k < HX_LEN(HTML) && HTML[k].c != s->p[i])
            k++;
        if (k == HX_LEN(HTML))
            hx_jbuf_sub(&b, s, i, 1);
        else
            hx_jbuf_add(&b, HTML[k].text, strlen(HTML[k].text), NULL,
                        s->mark ? s->mark[i] : s->user);
    }
    return hx_jbuf_done_safe(&b, true, out);
}

bool hx_jstr_eq(const hx_jstr *a, const hx_jstr *b)
{
    return a->n == b->n && memcmp(a->p, b->p, a->n) == 0;
}

bool hx_jstr_is(const hx_jstr *a, const char *b)
{
    return a->n == strlen(b) && memcmp(a->p, b, a->n) == 0;
}

/* By code point, which is the order of UTF-8 bytes. */
int hx_jstr_order(const hx_jstr *a, const hx_jstr *b)
{
    const int c = memcmp(a->p, b->p, HX_MIN(a->n, b->n));

    return c != 0 ? c : (a->n > b->n) - (a->n < b->n);
}

int hx_jstr_seek(hx_jvm *vm, const hx_jstr *s, size_t i, size_t *off)
{
    if (s->len == s->n || i >= s->len) {
        *off = i >= s->len ? s->n : i;
        return 0;
    }
    size_t at = 0;
    while (i > 0) {
        at++;
        i -= at == s->n || ((uint8_t)s->p[at] & 0xc0) != 0x80;
    }
    *off = at;
    return hx_jvm_work(vm, at / 64);
}

size_t hx_jstr_find(const hx_jstr *s, const hx_jstr *sub, size_t from, size_t to,
                    bool rev)
{
    if (to > s->n || from > to || sub->n > to - from)
        return SIZE_MAX;
    if (!rev) {
        const char *at =
            sub->n ? memmem(s->p + from, to - from, sub->p, sub->n) : s->p + from;
        return at ? (size_t)(at - s->p) : SIZE_MAX;
    }
    for (size_t at = to - sub->n;; at--) {
        if (memcmp(s->p + at, sub->p, sub->n) == 0)
            return at;
        if (at == from)
            return SIZE_MAX;
    }
}

uint32_t hx_jstr_cp(const hx_jstr *s, size_t off, size_t *n)
{
    uint32_t cp = 0xfffd;
    const int k = hx_utf8_next(s->p + off, s->n - off, &cp);

    *n = k > 0 ? (size_t)k : 1;
    return cp;
}

/* str.isspace() of Python. */
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
        [HX_J_ABSENT] = "missing",   [HX_J_UNDEF] = "Undefined",
        [HX_J_NONE] = "NoneType",    [HX_J_BOOL] = "bool",
        [HX_J_INT] = "int",          [HX_J_FLOAT] = "float",
        [HX_J_BIG] = "int",          [HX_J_STR] = "str",
        [HX_J_LIST] = "list",        [HX_J_TUPLE] = "tuple",
        [HX_J_DICT] = "dict",        [HX_J_RANGE] = "range",
        [HX_J_VIEW] = "dict_items",  [HX_J_GEN] = "generator",
        [HX_J_SPACE] = "Namespace",  [HX_J_MACRO] = "Macro",
        [HX_J_FUNC] = "function",    [HX_J_METHOD] = "builtin_function_or_method",
        [HX_J_LOOP] = "LoopContext",
    };
    static const char *const VIEW[] = { "dict_items", "dict_keys", "dict_values" };

    return v.t == HX_J_VIEW ? VIEW[v.why] : NAME[v.t];
}

bool hx_jval_truthy(hx_jval v)
{
    switch ((hx_jtype)v.t) {
    case HX_J_ABSENT:
    case HX_J_UNDEF:
    case HX_J_NONE:
        return false;
    case HX_J_BOOL:
        return v.u.b;
    case HX_J_INT:
        return v.u.i != 0;
    case HX_J_FLOAT:
        return v.u.d != 0;
    case HX_J_STR:
        return v.u.s->n > 0;
    case HX_J_LIST:
    case HX_J_TUPLE:
    case HX_J_VIEW:
        return v.u.q->n > 0;
    case HX_J_DICT:
        return v.u.m->n > 0;
    case HX_J_RANGE:
        return v.u.r->n > 0;
    default:
        return true;
    }
}

bool hx_jval_is_int(hx_jval v)
{
    return v.t == HX_J_INT || v.t == HX_J_BOOL;
}

bool hx_jval_is_num(hx_jval v)
{
    return hx_jval_is_int(v) || v.t == HX_J_FLOAT;
}

int64_t hx_jval_as_int(hx_jval v)
{
    return v.t == HX_J_BOOL ? v.u.b : v.u.i;
}

double hx_jval_as_double(hx_jval v)
{
    return v.t == HX_J_FLOAT ? v.u.d : (double)hx_jval_as_int(v);
}

int hx_jval_hint(hx_jvm *vm, const char *text, hx_jval *out)
{
    const int rc = hx_jstr_copy(vm, text, strlen(text), out);

    out->t = HX_J_UNDEF;
    out->why = HX_J_HINT;
    return rc;
}

int hx_jval_undef_error(hx_jvm *vm, hx_jval v)
{
    const char *of = v.of == HX_J_NONE ? "None" : hx_jval_type((hx_jval) { .t = v.of });
    const char *object = v.of == HX_J_NONE ? "" : " object";
    const int n = v.why == HX_J_NO_ITEM ? 0 : (int)HX_MIN(v.u.s->n, 120);

    switch ((hx_jwhy)v.why) {
    case HX_J_NO_NAME:
        return hx_jvm_fail(vm, HX_EFORMAT, "'%.*s' is undefined", n, v.u.s->p);
    case HX_J_NO_ATTR:
        return hx_jvm_fail(vm, HX_EFORMAT, "'%s%s' has no attribute '%.*s'", of, object,
                           n, v.u.s->p);
    case HX_J_NO_ITEM:
        return hx_jvm_fail(vm, HX_EFORMAT, "%s%s has no element %lld", of, object,
                           (long long)v.u.i);
    case HX_J_HINT:
        break;
    }
    return hx_jvm_fail(vm, HX_EFORMAT, "%.*s", n, v.u.s->p);
}

int hx_jval_list(hx_jvm *vm, hx_jtype t, size_t n, hx_jval **items, hx_jval *out)
{
    hx_jseq *q = hx_jvm_alloc(vm, 1, sizeof *q);
    hx_jval *v = q ? hx_jvm_alloc(vm, n, sizeof *v) : NULL;

    if (v == NULL)
        return HX_ENOMEM;
    *q = (hx_jseq) { v, n };
    *items = v;
    *out = (hx_jval) { .t = (uint8_t)t, .u.q = q };
    return 0;
}

hx_jval hx_jrange_at(const hx_jrange *r, size_t i)
{
    return hx_jint(r->start + (int64_t)i * r->step);
}

int hx_jval_len(hx_jvm *vm, hx_jval v, size_t *n)
{
    int64_t k;
    int rc;

    switch ((hx_jtype)v.t) {
    case HX_J_UNDEF:
        *n = 0;
        return 0;
    case HX_J_STR:
        *n = v.u.s->len;
        return 0;
    case HX_J_LIST:
    case HX_J_TUPLE:
    case HX_J_VIEW:
        *n = v.u.q->n;
        return 0;
    case HX_J_DICT:
        *n = v.u.m->n;
        return 0;
    case HX_J_RANGE:
        *n = v.u.r->n;
        return 0;
    case HX_J_LOOP:
        rc = hx_jloop_len(vm, v.u.loop, &k);
        *n = (size_t)k;
        return rc;
    default:
        return hx_jvm_fail(vm, HX_EFORMAT, "object of type '%s' has no len()",
                           hx_jval_type(v));
    }
}

/* ---- dicts ----------------------------------------------------------- */

enum { DICT_LINEAR = 12 }; /* up to here a scan is as fast as a search */

int hx_jdict_new(hx_jvm *vm, size_t cap, hx_jdict **out)
{
    hx_jdict *d = hx_jvm_alloc(vm, 1, sizeof *d);

    if (d == NULL || (d->e = hx_jvm_alloc(vm, cap, sizeof *d->e)) == NULL)
        return HX_ENOMEM;
    d->cap = cap;
    *out = d;
    return 0;
}

static bool is_flat(hx_jval k)
{
    return k.t != HX_J_LIST && k.t != HX_J_TUPLE && k.t != HX_J_DICT && k.t != HX_J_VIEW;
}

/* Tuples inside tuples are left out: looking through them may take exponential time. */
bool hx_jdict_hashable(hx_jval k)
{
    bool ok = k.t == HX_J_TUPLE || is_flat(k);

    for (size_t i = 0; k.t == HX_J_TUPLE && i < k.u.q->n && ok; i++)
        ok = is_flat(k.u.q->v[i]);
    return ok;
}

/* Makes d->order unless a key is no string. 1: there is an order. */
static int dict_index(hx_jvm *vm, hx_jdict *d)
{
    hx_jval *key;
    int rc;

    if (d->n_order == d->n)
        return 1;
    for (size_t i = 0; i < d->n; i++) {
        if (d->e[i].k.t != HX_J_STR)
            return 0;
    }
    if ((key = hx_jvm_alloc(vm, d->n, sizeof *key)) == NULL ||
        (d->order = hx_jvm_alloc(vm, d->n, sizeof *d->order)) == NULL)
        return HX_ENOMEM;
    for (size_t i = 0; i < d->n; i++)
        key[i] = d->e[i].k;
    if ((rc = hx_jval_sort(vm, key, d->n, false, d->order)) != 0)
        return rc;
    d->n_order = d->n;
    return 1;
}

static hx_jpair *dict_search(const hx_jdict *d, const hx_jstr *k)
{
    size_t lo = 0, hi = d->n;

    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        hx_jpair *e = &d->e[d->order[mid]];
        const int c = hx_jstr_order(e->k.u.s, k);
        if (c == 0)
            return e;
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

/* 1: *e is the entry; 0: none. */
static int dict_find(hx_jvm *vm, hx_jdict *d, hx_jval k, hx_jpair **e)
{
    int rc;

    if (k.t == HX_J_STR && d->n > DICT_LINEAR && (rc = dict_index(vm, d)) != 0) {
        *e = rc < 0 ? NULL : dict_search(d, k.u.s);
        return rc < 0 ? rc : *e != NULL;
    }
    for (size_t i = 0; i < d->n; i++) {
        bool same = false;
        if (k.t == HX_J_STR)
            same = d->e[i].k.t == HX_J_STR && hx_jstr_eq(d->e[i].k.u.s, k.u.s);
        else if ((rc = hx_jval_equal(vm, d->e[i].k, k, &same)) != 0)
            return rc;
        if (same) {
            *e = &d->e[i];
            return 1;
        }
    }
    *e = NULL;
    return d->n > DICT_LINEAR ? hx_jvm_work(vm, d->n) : 0;
}

int hx_jdict_get(hx_jvm *vm, hx_jdict *d, hx_jval k, hx_jval *out)
{
    hx_jpair *e;
    const int rc = dict_find(vm, d, k, &e);

    if (rc == 1)
        *out = e->v;
    return rc;
}

int hx_jdict_put(hx_jvm *vm, hx_jdict *d, hx_jval k, hx_jval v)
{
    hx_jpair *e;
    int rc;

    if (!hx_jdict_hashable(k))
        return hx_jvm_fail(vm, HX_EFORMAT, "unhashable type: '%s'", hx_jval_type(k));
    /* A scan, not the index: that one would be rebuilt after each addition. */
    for (size_t i = 0; i < d->n; i++) {
        bool same;
        if ((rc = hx_jval_equal(vm, d->e[i].k, k, &same)) != 0)
            return rc;
        if (same) {
            d->e[i].v = v;
            return 0;
        }
    }
    if (d->n == d->cap) {
        const size_t cap = d->cap ? 2 * d->cap : 4;
        if ((e = hx_jvm_alloc(vm, cap, sizeof *e)) == NULL)
            return HX_ENOMEM;
        memcpy(e, d->e, d->n * sizeof *e);
        d->e = e;
        d->cap = cap;
    }
    d->e[d->n++] = (hx_jpair) { k, v };
    return hx_jvm_work(vm, d->n / 16);
}

static int json_number(hx_jvm *vm, const hx_json *j, hx_jval *out)
{
    hx_sb b = { 0 };
    int rc = 0;

    if (hx_json_kind(j) == HX_JSON_INT && hx_json_int(j, 0) == hx_json_int(j, 1)) {
        *out = hx_jint(hx_json_int(j, 0));
        return 0;
    }
    *out = hx_jfloat(hx_json_num(j, 0));
    if (hx_json_kind(j) == HX_JSON_DOUBLE && fabs(out->u.d) < 1e15)
        return 0;
    /* Integers past 64 bits come as doubles that remember their digits. */
    hx_json_write_python(&b, j, false, 0);
    if (b.bad)
        rc = hx_jvm_fail(vm, HX_ENOMEM, "no memory for a number");
    else if (strspn(b.p, "-0123456789") == b.n) {
        rc = hx_jstr_copy(vm, b.p, b.n, out);
        out->t = HX_J_BIG;
    }
    hx_sb_free(&b);
    return rc;
}

int hx_jval_from_json(hx_jvm *vm, const hx_json *j, hx_jval *out)
{
    const size_t n = hx_json_len(j);
    hx_jval *item;
    hx_jdict *d;
    hx_str s;
    int rc = 0;

    switch (hx_json_kind(j)) {
    case HX_JSON_NULL:
        *out = hx_jnone();
        return 0;
    case HX_JSON_BOOL:
        *out = hx_jbool(hx_json_bool(j, false));
        return 0;
    case HX_JSON_INT:
    case HX_JSON_DOUBLE:
        return json_number(vm, j, out);
    case HX_JSON_STRING:
        s = hx_json_str(j);
        return hx_jstr_new(vm, s.p, s.n, vm->track, out);
    case HX_JSON_ARRAY:
        if ((rc = hx_jvm_enter(vm)) != 0 ||
            (rc = hx_jval_list(vm, HX_J_LIST, n, &item, out)) != 0)
            return rc;
        for (size_t i = 0; i < n && rc == 0; i++)
            rc = hx_jval_from_json(vm, hx_json_at(j, i), &item[i]);
        vm->depth--;
        return rc;
    case HX_JSON_OBJECT:
        if ((rc = hx_jvm_enter(vm)) != 0 || (rc = hx_jdict_new(vm, n, &d)) != 0)
            return rc;
        for (size_t i = 0; i < n && rc == 0; i++) {
            const hx_json *v = hx_json_member(j, i, &s);
            if ((rc = hx_jstr_new(vm, s.p, s.n, vm->track, &d->e[i].k)) == 0)
                rc = hx_jval_from_json(vm, v, &d->e[i].v);
        }
        d->n = n;
        *out = (hx_jval) { .t = HX_J_DICT, .u.m = d };
        vm->depth--;
        return rc;
    }
    return 0;
}

/* ---- iteration ------------------------------------------------------- */

int hx_jiter_init(hx_jvm *vm, hx_jiter *it, hx_jval v)
{
    *it = (hx_jiter) { .src = v };
    switch ((hx_jtype)v.t) {
    case HX_J_UNDEF:
    case HX_J_STR:
    case HX_J_LIST:
    case HX_J_TUPLE:
    case HX_J_DICT:
    case HX_J_RANGE:
    case HX_J_VIEW:
    case HX_J_GEN:
        return 0;
    case HX_J_LOOP:
        return hx_jvm_fail(vm, HX_EUNSUP, "iterating over \"loop\"");
    default:
        return hx_jvm_fail(vm, HX_EFORMAT, "'%s' object is not iterable",
                           hx_jval_type(v));
    }
}

int hx_jiter_next(hx_jvm *vm, hx_jiter *it, hx_jval *out)
{
    const hx_jval v = it->src;
    hx_jstr plain;
    size_t n;
    int rc;

    if ((rc = hx_jvm_work(vm, 1)) != 0)
        return rc;
    switch ((hx_jtype)v.t) {
    case HX_J_STR:
        if (it->i == v.u.s->n)
            return 0;
        plain = *v.u.s;
        plain.safe = false;
        hx_jstr_cp(&plain, it->i, &n);
        if ((rc = hx_jstr_sub(vm, &plain, it->i, n, out)) != 0)
            return rc;
        it->i += n;
        return 1;
    case HX_J_LIST:
    case HX_J_TUPLE:
    case HX_J_VIEW:
        if (it->i == v.u.q->n)
            return 0;
        *out = v.u.q->v[it->i++];
        return 1;
    case HX_J_DICT:
        if (it->i == v.u.m->n)
            return 0;
        *out = v.u.m->e[it->i++].k;
        return 1;
    case HX_J_RANGE:
        if (it->i == v.u.r->n)
            return 0;
        *out = hx_jrange_at(v.u.r, it->i++);
        return 1;
    case HX_J_GEN:
        if ((rc = hx_jvm_enter(vm)) != 0)
            return rc;
        rc = v.u.g->next(vm, v.u.g, out);
        vm->depth--;
        return rc;
    default:
        return 0;
    }
}

int hx_jiter_list(hx_jvm *vm, hx_jval v, const hx_jseq **out)
{
    hx_jseq *q;
    hx_jiter it;
    hx_jval x, *items = NULL;
    size_t n = 0, cap = 0;
    int rc;

    if (v.t == HX_J_LIST || v.t == HX_J_TUPLE || v.t == HX_J_VIEW) {
        *out = v.u.q;
        return hx_jvm_work(vm, v.u.q->n);
    }
    if ((rc = hx_jiter_init(vm, &it, v)) != 0)
        return rc;
    while ((rc = hx_jiter_next(vm, &it, &x)) == 1) {
        if (n == cap) {
            hx_jval *more = hx_jvm_alloc(vm, cap ? 2 * cap : 8, sizeof x);
            if (more == NULL)
                return HX_ENOMEM;
            if (n > 0)
                memcpy(more, items, n * sizeof x);
            cap = cap ? 2 * cap : 8;
            items = more;
        }
        items[n++] = x;
    }
    if (rc < 0)
        return rc;
    if ((q = hx_jvm_alloc(vm, 1, sizeof *q)) == NULL)
        return HX_ENOMEM;
    *q = (hx_jseq) { items, n };
    *out = q;
    return 0;
}

/* ---- str() and repr() ------------------------------------------------ */

static void put_number(hx_jbuf *b, hx_jval v)
{
    char text[32];
    hx_sb sb = { 0 };

    if (v.t == HX_J_INT) {
        snprintf(text, sizeof text, "%lld", (long long)v.u.i);
        hx_jbuf_lit(b, text);
    } else if (!isfinite(v.u.d)) {
        hx_jbuf_lit(b, isnan(v.u.d) ? "nan" : v.u.d < 0 ? "-inf" : "inf");
    } else {
        hx_json_put_double(&sb, v.u.d);
        if (sb.bad)
            b->rc = hx_jvm_fail(b->vm, HX_ENOMEM, "no memory for a number");
        else
            hx_jbuf_lit(b, sb.p);
        hx_sb_free(&sb);
    }
}

/* str.isprintable() of one code point. */
static bool is_printable(uint32_t cp)
{
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return cp == ' ';
    default:
        return true;
    }
}

static void put_escape(hx_jbuf *b, const hx_jstr *s, size_t off, const char *text)
{
    hx_jbuf_add(b, text, strlen(text), NULL, s->mark ? s->mark[off] : s->user);
}

static void repr_str(hx_jbuf *b, const hx_jstr *s)
{
    const bool single =
        memchr(s->p, '\'', s->n) != NULL && memchr(s->p, '"', s->n) == NULL;
    const char quote[2] = { single ? '"' : '\'', 0 };
    char text[16];
    size_t n;

    hx_jbuf_lit(b, s->safe ? "Markup(" : "");
    hx_jbuf_lit(b, quote);
    for (size_t i = 0; i < s->n && b->rc == 0; i += n) {
        const uint32_t cp = hx_jstr_cp(s, i, &n);
        if (cp == (uint32_t)quote[0] || cp == '\\')
            snprintf(text, sizeof text, "\\%c", (int)cp);
        else if (cp == '\n' || cp == '\r' || cp == '\t')
            snprintf(text, sizeof text, "\\%c",
                     cp == '\n'   ? 'n'
                     : cp == '\r' ? 'r'
                                  : 't');
        else if (is_printable(cp))
            text[0] = 0;
        else if (cp < 0x100)
            snprintf(text, sizeof text, "\\x%02x", cp);
        else if (cp < 0x10000)
            snprintf(text, sizeof text, "\\u%04x", cp);
        else
            snprintf(text, sizeof text, "\\U%08x", cp);
        if (text[0] != 0)
            put_escape(b, s, i, text);
        else
            hx_jbuf_sub(b, s, i, n);
    }
    hx_jbuf_lit(b, quote);
    hx_jbuf_lit(b, s->safe ? ")" : "");
}

static int repr_items(hx_jvm *vm, hx_jbuf *b, const hx_jseq *q)
{
    int rc = 0;

    for (size_t i = 0; i < q->n && rc == 0; i++) {
        hx_jbuf_lit(b, i ? ", " : "");
        rc = hx_jval_repr(vm, b, q->v[i]);
    }
    return rc;
}

static int repr_dict(hx_jvm *vm, hx_jbuf *b, const hx_jdict *d)
{
    int rc = 0;

    hx_jbuf_lit(b, "{");
    for (size_t i = 0; i < d->n && rc == 0; i++) {
        hx_jbuf_lit(b, i ? ", " : "");
        if ((rc = hx_jval_repr(vm, b, d->e[i].k)) != 0)
            break;
        hx_jbuf_lit(b, ": ");
        rc = hx_jval_repr(vm, b, d->e[i].v);
    }
    hx_jbuf_lit(b, "}");
    return rc;
}

static int repr_rest(hx_jvm *vm, hx_jbuf *b, hx_jval v)
{
    const struct hx_jnode *def;
    char text[96];
    int64_t n;
    int rc;

    switch ((hx_jtype)v.t) {
    case HX_J_RANGE:
        snprintf(text, sizeof text,
                 v.u.r->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
                 (long long)v.u.r->start, (long long)v.u.r->stop, (long long)v.u.r->step);
        hx_jbuf_lit(b, text);
        return b->rc;
    case HX_J_SPACE:
        hx_jbuf_lit(b, "<Namespace ");
        rc = repr_dict(vm, b, v.u.m);
        hx_jbuf_lit(b, ">");
        return rc;
    case HX_J_MACRO:
        def = v.u.mac->def;
        hx_jbuf_lit(b, "<Macro ");
        if (def->val.t == HX_J_STR)
            repr_str(b, def->val.u.s);
        else
            hx_jbuf_lit(b, "anonymous");
        hx_jbuf_lit(b, ">");
        return b->rc;
    case HX_J_LOOP:
        if ((rc = hx_jloop_len(vm, v.u.loop, &n)) != 0)
            return rc;
        snprintf(text, sizeof text, "<LoopContext %lld/%lld>",
                 (long long)v.u.loop->index0 + 1, (long long)n);
        hx_jbuf_lit(b, text);
        return b->rc;
    default:
        return hx_jvm_fail(vm, HX_EUNSUP, "the text of a %s, which is an address",
                           hx_jval_type(v));
    }
}

int hx_jval_repr(hx_jvm *vm, hx_jbuf *b, hx_jval v)
{
    int rc;

    if ((rc = hx_jvm_enter(vm)) != 0)
        return rc;
    switch ((hx_jtype)v.t) {
    case HX_J_ABSENT:
    case HX_J_UNDEF:
        hx_jbuf_lit(b, "Undefined");
        break;
    case HX_J_NONE:
        hx_jbuf_lit(b, "None");
        break;
    case HX_J_BOOL:
        hx_jbuf_lit(b, v.u.b ? "True" : "False");
        break;
    case HX_J_INT:
    case HX_J_FLOAT:
        put_number(b, v);
        break;
    case HX_J_BIG:
        hx_jbuf_put(b, v.u.s);
        break;
    case HX_J_STR:
        repr_str(b, v.u.s);
        break;
    case HX_J_LIST:
        hx_jbuf_lit(b, "[");
        rc = repr_items(vm, b, v.u.q);
        hx_jbuf_lit(b, "]");
        break;
    case HX_J_TUPLE:
        hx_jbuf_lit(b, "(");
        rc = repr_items(vm, b, v.u.q);
        hx_jbuf_lit(b, v.u.q->n == 1 ? ",)" : ")");
        break;
    case HX_J_VIEW:
        hx_jbuf_lit(b, hx_jval_type(v));
        hx_jbuf_lit(b, "([");
        rc = repr_items(vm, b, v.u.q);
        hx_jbuf_lit(b, "])");
        break;
    case HX_J_DICT:
        rc = repr_dict(vm, b, v.u.m);
        break;
    default:
        rc = repr_rest(vm, b, v);
    }
    vm->depth--;
    return rc != 0 ? rc : b->rc;
}

int hx_jval_repr_str(hx_jvm *vm, hx_jval v, const hx_jstr **out)
{
    hx_jbuf b = { .vm = vm };
    hx_jval s = { .u.s = NULL };
    int rc = hx_jval_repr(vm, &b, v);

    if (rc == 0)
        rc = hx_jbuf_done(&b, &s);
    *out = s.u.s;
    return rc;
}

int hx_jval_str(hx_jvm *vm, hx_jval v, const hx_jstr **out)
{
    static const hx_jstr EMPTY = { .p = "" };

    *out = v.t == HX_J_STR ? v.u.s : &EMPTY;
    return v.t == HX_J_STR || v.t == HX_J_UNDEF ? 0 : hx_jval_repr_str(vm, v, out);
}

/* ---- json.dumps ------------------------------------------------------ */

static void dump_str(hx_jbuf *b, const hx_jstr *s, bool ascii)
{
    static const char FROM[] = "\"\\\n\r\t\f\b", INTO[] = "\"\\nrtfb";
    char text[16];
    size_t n;

    hx_jbuf_lit(b, "\"");
    for (size_t i = 0; i < s->n && b->rc == 0; i += n) {
        const uint32_t cp = hx_jstr_cp(s, i, &n);
        const char *known =
            cp < 0x80 && cp ? memchr(FROM, (int)cp, sizeof FROM - 1) : NULL;
        if (known != NULL)
            snprintf(text, sizeof text, "\\%c", INTO[known - FROM]);
        else if (cp >= 0x10000 && ascii)
            snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
                     0xdc00 + ((cp - 0x10000) & 0x3ff));
        else if (cp < 0x20 || (cp > 0x7e && ascii))
            snprintf(text, sizeof text, "\\u%04x", cp);
        else
            text[0] = 0;
        if (text[0] != 0)
            put_escape(b, s, i, text);
        else
            hx_jbuf_sub(b, s, i, n);
    }
    hx_jbuf_lit(b, "\"");
}

static void dump_break(hx_jbuf *b, const hx_jdump *o, size_t level)
{
    if (o->indent == NULL)
        return;
    hx_jbuf_lit(b, "\n");
    for (size_t i = 0; i < level && b->rc == 0; i++)
        hx_jbuf_put(b, o->indent);
}

static void dump_number(hx_jbuf *b, hx_jval v)
{
    if (v.t == HX_J_FLOAT && !isfinite(v.u.d))
        hx_jbuf_lit(b, isnan(v.u.d) ? "NaN" : v.u.d < 0 ? "-Infinity" : "Infinity");
    else
        put_number(b, v);
}

static int dump_key(hx_jvm *vm, hx_jbuf *b, const hx_jdump *o, hx_jval k)
{
    switch ((hx_jtype)k.t) {
    case HX_J_STR:
        dump_str(b, k.u.s, o->ascii);
        return b->rc;
    case HX_J_NONE:
    case HX_J_BOOL:
    case HX_J_INT:
    case HX_J_FLOAT:
    case HX_J_BIG:
        hx_jbuf_lit(b, "\"");
        hx_jval_dump(vm, b, o, k, 0);
        hx_jbuf_lit(b, "\"");
        return b->rc;
    default:
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "tojson: keys must be str, int, float, bool or None, not %s",
                           hx_jval_type(k));
    }
}

static int dump_dict(hx_jvm *vm, hx_jbuf *b, const hx_jdump *o, const hx_jdict *d,
                     size_t level)
{
    uint32_t *order = NULL;
    int rc = 0;

    if (o->sort && d->n > 1) {
        hx_jval *key = hx_jvm_alloc(vm, d->n, sizeof *key);
        if (key == NULL || (order = hx_jvm_alloc(vm, d->n, sizeof *order)) == NULL)
            return HX_ENOMEM;
        for (size_t i = 0; i < d->n; i++)
            key[i] = d->e[i].k;
        if ((rc = hx_jval_sort(vm, key, d->n, false, order)) != 0)
            return rc;
    }
    hx_jbuf_lit(b, "{");
    for (size_t i = 0; i < d->n && rc == 0; i++) {
        const hx_jpair *e = &d->e[order ? order[i] : i];
        if (i > 0)
            hx_jbuf_put(b, o->item);
        dump_break(b, o, level + 1);
        if ((rc = dump_key(vm, b, o, e->k)) != 0)
            break;
        hx_jbuf_put(b, o->key);
        rc = hx_jval_dump(vm, b, o, e->v, level + 1);
    }
    if (d->n > 0)
        dump_break(b, o, level);
    hx_jbuf_lit(b, "}");
    return rc;
}

static int dump_list(hx_jvm *vm, hx_jbuf *b, const hx_jdump *o, const hx_jseq *q,
                     size_t level)
{
    int rc = 0;

    hx_jbuf_lit(b, "[");
    for (size_t i = 0; i < q->n && rc == 0; i++) {
        if (i > 0)
            hx_jbuf_put(b, o->item);
        dump_break(b, o, level + 1);
        rc = hx_jval_dump(vm, b, o, q->v[i], level + 1);
    }
    if (q->n > 0)
        dump_break(b, o, level);
    hx_jbuf_lit(b, "]");
    return rc;
}

int hx_jval_dump(hx_jvm *vm, hx_jbuf *b, const hx_jdump *o, hx_jval v, size_t level)
{
    int rc;

    if ((rc = hx_jvm_enter(vm)) != 0)
        return rc;
    switch ((hx_jtype)v.t) {
    case HX_J_NONE:
        hx_jbuf_lit(b, "null");
        break;
    case HX_J_BOOL:
        hx_jbuf_lit(b, v.u.b ? "true" : "false");
        break;
    case HX_J_INT:
    case HX_J_FLOAT:
        dump_number(b, v);
        break;
    case HX_J_BIG:
        hx_jbuf_put(b, v.u.s);
        break;
    case HX_J_STR:
        dump_str(b, v.u.s, o->ascii);
        break;
    case HX_J_LIST:
    case HX_J_TUPLE:
        rc = dump_list(vm, b, o, v.u.q, level);
        break;
    case HX_J_DICT:
        rc = dump_dict(vm, b, o, v.u.m, level);
        break;
    default:
        rc = hx_jvm_fail(vm, HX_EFORMAT,
                         "tojson: object of type %s is not JSON serializable",
                         hx_jval_type(v));
    }
    vm->depth--;
    return rc != 0 ? rc : b->rc;
}

/* ---- comparison ------------------------------------------------------ */

/* <0, 0, >0, or 2 when a NaN is involved. long double holds any int64 exactly (64-bit
 * mantissa on x86, more elsewhere). */
static int order_numbers(hx_jval a, hx_jval b)
{
    const long double x = a.t == HX_J_FLOAT ? a.u.d : (long double)hx_jval_as_int(a);
    const long double y = b.t == HX_J_FLOAT ? b.u.d : (long double)hx_jval_as_int(b);

    return isnan(x) || isnan(y) ? 2 : (x > y) - (x < y);
}

static int equal_dicts(hx_jvm *vm, hx_jdict *a, hx_jdict *b, bool *out)
{
    hx_jval v;
    int rc = 0;

    *out = a->n == b->n;
    for (size_t i = 0; i < a->n && *out; i++) {
        if ((rc = hx_jdict_get(vm, b, a->e[i].k, &v)) < 0)
            return rc;
        *out = rc == 1;
        if (*out && (rc = hx_jval_equal(vm, a->e[i].v, v, out)) != 0)
            return rc;
    }
    return hx_jvm_work(vm, 1 + a->n / 8);
}

static int equal_items(hx_jvm *vm, const hx_jseq *a, const hx_jseq *b, bool *out)
{
    int rc = 0;

    *out = a->n == b->n;
    for (size_t i = 0; i < a->n && *out && rc == 0; i++)
        rc = hx_jval_equal(vm, a->v[i], b->v[i], out);
    return rc != 0 ? rc : hx_jvm_work(vm, 1 + a->n / 8);
}

int hx_jval_equal(hx_jvm *vm, hx_jval a, hx_jval b, bool *out)
{
    int rc = 0;

    *out = false;
    if (hx_jval_is_num(a) && hx_jval_is_num(b)) {
        *out = order_numbers(a, b) == 0;
        return 0;
    }
    if (a.t != b.t)
        return 0;
    switch ((hx_jtype)a.t) {
    case HX_J_ABSENT:
    case HX_J_UNDEF:
    case HX_J_NONE:
        *out = true;
        return 0;
    case HX_J_STR:
    case HX_J_BIG:
        *out = hx_jstr_eq(a.u.s, b.u.s);
        return hx_jvm_work(vm, a.u.s->n == b.u.s->n ? a.u.s->n / 256 : 0);
    case HX_J_LIST:
    case HX_J_TUPLE:
    case HX_J_DICT:
        *out = a.u.q == b.u.q;
        if (*out || (rc = hx_jvm_enter(vm)) != 0)
            return rc;
        rc = a.t == HX_J_DICT ? equal_dicts(vm, a.u.m, b.u.m, out)
                              : equal_items(vm, a.u.q, b.u.q, out);
        vm->depth--;
        return rc;
    case HX_J_RANGE:
        *out = a.u.r->n == b.u.r->n && (a.u.r->n == 0 || a.u.r->start == b.u.r->start) &&
               (a.u.r->n < 2 || a.u.r->step == b.u.r->step);
        return 0;
    case HX_J_VIEW:
    case HX_J_METHOD:
        return hx_jvm_fail(vm, HX_EUNSUP, "comparing two values of type %s",
                           hx_jval_type(a));
    default:
        *out = a.u.q == b.u.q; /* identity */
        return 0;
    }
}

static bool order_holds(hx_jop op, int c)
{
    return op == HX_OP_LT   ? c < 0
           : op == HX_OP_LE ? c <= 0
           : op == HX_OP_GT ? c > 0
                            : c >= 0;
}

/* Lists: the first pair that differs decides, else the lengths. */
static int compare_items(hx_jvm *vm, hx_jop op, const hx_jseq *a, const hx_jseq *b,
                         bool *out)
{
    int rc;

    for (size_t i = 0; i < a->n && i < b->n; i++) {
        bool same;
        if ((rc = hx_jval_equal(vm, a->v[i], b->v[i], &same)) != 0)
            return rc;
        if (!same)
            return hx_jval_compare(vm, op, a->v[i], b->v[i], out);
    }
    *out = order_holds(op, (a->n > b->n) - (a->n < b->n));
    return 0;
}

int hx_jval_compare(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b, bool *out)
{
    static const char *const SIGN[] = {
        [HX_OP_LT] = "<",
        [HX_OP_LE] = "<=",
        [HX_OP_GT] = ">",
        [HX_OP_GE] = ">=",
    };
    int rc;

    if (op == HX_OP_EQ || op == HX_OP_NE) {
        rc = hx_jval_equal(vm, a, b, out);
        *out = *out == (op == HX_OP_EQ);
        return rc;
    }
    if (op == HX_OP_IN || op == HX_OP_NOT_IN) {
        rc = hx_jval_contains(vm, b, a, out);
        *out = *out == (op == HX_OP_IN);
        return rc;
    }
    if (a.t == HX_J_UNDEF || b.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, a.t == HX_J_UNDEF ? a : b);
    if (hx_jval_is_num(a) && hx_jval_is_num(b)) {
        const int c = order_numbers(a, b);
        *out = c != 2 && order_holds(op, c);
        return 0;
    }
    if (a.t == HX_J_BIG || b.t == HX_J_BIG)
        return hx_jvm_fail(vm, HX_EUNSUP, "comparing integers over 64 bits");
    if (a.t == HX_J_STR && b.t == HX_J_STR) {
        *out = order_holds(op, hx_jstr_order(a.u.s, b.u.s));
        return hx_jvm_work(vm, HX_MIN(a.u.s->n, b.u.s->n) / 256);
    }
    if (a.t == b.t && (a.t == HX_J_LIST || a.t == HX_J_TUPLE)) {
        if ((rc = hx_jvm_enter(vm)) != 0)
            return rc;
        rc = compare_items(vm, op, a.u.q, b.u.q, out);
        vm->depth--;
        return rc;
    }
    /* Views compare as sets. */
    return hx_jvm_fail(vm, a.t == HX_J_VIEW && b.t == HX_J_VIEW ? HX_EUNSUP : HX_EFORMAT,
                       "'%s' not supported between instances of '%s' and '%s'", SIGN[op],
                       hx_jval_type(a), hx_jval_type(b));
}

int hx_jval_contains(hx_jvm *vm, hx_jval in, hx_jval v, bool *out)
{
    hx_jiter it;
    hx_jval x;
    int rc;

    *out = false;
    if (in.t == HX_J_STR) {
        if (v.t != HX_J_STR)
            return hx_jvm_fail(vm, HX_EFORMAT,
                               "'in <string>' requires string as left operand, not %s",
                               hx_jval_type(v));
        *out = hx_jstr_find(in.u.s, v.u.s, 0, in.u.s->n, false) != SIZE_MAX;
        return hx_jvm_work(vm, in.u.s->n / 64);
    }
    if (in.t == HX_J_DICT) {
        if (!hx_jdict_hashable(v))
            return hx_jvm_fail(vm, HX_EFORMAT, "unhashable type: '%s'", hx_jval_type(v));
        rc = hx_jdict_get(vm, in.u.m, v, &x);
        *out = rc == 1;
        return rc < 0 ? rc : 0;
    }
    if (hx_jiter_init(vm, &it, in) != 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "argument of type '%s' is not iterable",
                           hx_jval_type(in));
    while (!*out && (rc = hx_jiter_next(vm, &it, &x)) != 0) {
        if (rc < 0 || (rc = hx_jval_equal(vm, x, v, out)) != 0)
            return rc;
    }
    return 0;
}

/* Merge sort: stable, n log n whatever the input, and comparisons may fail. */
int hx_jval_sort(hx_jvm *vm, const hx_jval *key, size_t n, bool reverse, uint32_t *order)
{
    uint32_t *from = order, *to = hx_jvm_alloc(vm, n, sizeof *to);
    int rc;

    if (to == NULL)
        return HX_ENOMEM;
    if (n > UINT32_MAX)
        return hx_jvm_fail(vm, HX_ELIMIT, "sorting %zu items", n);
    for (size_t i = 0; i < n; i++)
        order[i] = (uint32_t)i;
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t lo = 0; lo < n; lo += 2 * width) {
            const size_t mid = HX_MIN(lo + width, n), hi = HX_MIN(lo + 2 * width, n);
            size_t a = lo, b = mid;
            for (size_t k = lo; k < hi; k++) {
                bool take_b = b < hi;
                if (a < mid && b < hi &&
                    (rc = hx_jval_compare(vm, HX_OP_LT, key[reverse ? from[a] : from[b]],
                                          key[reverse ? from[b] : from[a]], &take_b)) !=
                        0)
                    return rc;
                to[k] = take_b ? from[b++] : from[a++];
            }
        }
        uint32_t *swap = from;
        from = to;
        to = swap;
        if ((rc = hx_jvm_work(vm, n)) != 0)
            return rc;
    }
    if (from != order && n > 0)
        memcpy(order, from, n * sizeof *order);
    return 0;
}
