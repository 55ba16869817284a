/* jinja_text.c - Python's str: case mapping, strip, split, find, replace and the table of
 * string methods.
 *
 * Called by jinja_call.c. Works on code points and keeps the marks of every byte it
 * passes on; a text it changes letter by letter keeps the mark of the letter. */
#include <utf8proc.h>

#include "text/jinja_ast.h"

/* ---- arguments ------------------------------------------------------- */

int hx_jtext_want(hx_jvm *vm, hx_jval v, const char *what, const hx_jstr **out)
{
    static const hx_jstr EMPTY = { .p = "" };

    *out = &EMPTY;
    if (v.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, v);
    if (v.t != HX_J_STR)
        return hx_jvm_fail(vm, HX_EFORMAT, "%s is a %s, expected a string", what,
                           hx_jval_type(v));
    *out = v.u.s;
    return 0;
}

int hx_jtext_want_int(hx_jvm *vm, hx_jval v, const char *what, int64_t dflt, int64_t *out)
{
    *out = dflt;
    if (v.t == HX_J_ABSENT)
        return 0;
    if (v.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, v);
    if (!hx_jval_is_int(v))
        return hx_jvm_fail(vm, v.t == HX_J_BIG ? HX_EUNSUP : HX_EFORMAT,
                           "%s is a %s, expected an integer", what, hx_jval_type(v));
    *out = hx_jval_as_int(v);
    return 0;
}

/* Methods of "safe" text escape their arguments in ways nobody relies on. */
static int refuse_safe(hx_jvm *vm, const hx_jstr *s, const char *what)
{
    return s->safe ? hx_jvm_fail(vm, HX_EUNSUP, "%s on text marked safe", what) : 0;
}

/* ---- case ------------------------------------------------------------ */

/* Code points whose upper case is more than one (SpecialCasing.txt of Unicode 14, without
 * U+1F80..1FAF, which follow a rule). Sorted. */
static const uint16_t SPECIAL[][4] = {
    { 0x00df, 0x53, 0x53 },          { 0x0149, 0x2bc, 0x4e },
    { 0x01f0, 0x4a, 0x30c },         { 0x0390, 0x399, 0x308, 0x301 },
    { 0x03b0, 0x3a5, 0x308, 0x301 }, { 0x0587, 0x535, 0x552 },
    { 0x1e96, 0x48, 0x331 },         { 0x1e97, 0x54, 0x308 },
    { 0x1e98, 0x57, 0x30a },         { 0x1e99, 0x59, 0x30a },
    { 0x1e9a, 0x41, 0x2be },         { 0x1f50, 0x3a5, 0x313 },
    { 0x1f52, 0x3a5, 0x313, 0x300 }, { 0x1f54, 0x3a5, 0x313, 0x301 },
    { 0x1f56, 0x3a5, 0x313, 0x342 }, { 0x1fb2, 0x1fba, 0x399 },
    { 0x1fb3, 0x391, 0x399 },        { 0x1fb4, 0x386, 0x399 },
    { 0x1fb6, 0x391, 0x342 },        { 0x1fb7, 0x391, 0x342, 0x399 },
    { 0x1fbc, 0x391, 0x399 },        { 0x1fc2, 0x1fca, 0x399 },
    { 0x1fc3, 0x397, 0x399 },        { 0x1fc4, 0x389, 0x399 },
    { 0x1fc6, 0x397, 0x342 },        { 0x1fc7, 0x397, 0x342, 0x399 },
    { 0x1fcc, 0x397, 0x399 },        { 0x1fd2, 0x399, 0x308, 0x300 },
    { 0x1fd3, 0x399, 0x308, 0x301 }, { 0x1fd6, 0x399, 0x342 },
    { 0x1fd7, 0x399, 0x308, 0x342 }, { 0x1fe2, 0x3a5, 0x308, 0x300 },
    { 0x1fe3, 0x3a5, 0x308, 0x301 }, { 0x1fe4, 0x3a1, 0x313 },
    { 0x1fe6, 0x3a5, 0x342 },        { 0x1fe7, 0x3a5, 0x308, 0x342 },
    { 0x1ff2, 0x1ffa, 0x399 },       { 0x1ff3, 0x3a9, 0x399 },
    { 0x1ff4, 0x38f, 0x399 },        { 0x1ff6, 0x3a9, 0x342 },
    { 0x1ff7, 0x3a9, 0x342, 0x399 }, { 0x1ffc, 0x3a9, 0x399 },
    { 0xfb00, 0x46, 0x46 },          { 0xfb01, 0x46, 0x49 },
    { 0xfb02, 0x46, 0x4c },          { 0xfb03, 0x46, 0x46, 0x49 },
    { 0xfb04, 0x46, 0x46, 0x4c },    { 0xfb05, 0x53, 0x54 },
    { 0xfb06, 0x53, 0x54 },          { 0xfb13, 0x544, 0x546 },
    { 0xfb14, 0x544, 0x535 },        { 0xfb15, 0x544, 0x53b },
    { 0xfb16, 0x54e, 0x546 },        { 0xfb17, 0x544, 0x53d },
};

static uint32_t lower_of(uint32_t cp)
{
    return (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp);
}

static utf8proc_category_t category(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp);
}

static bool is_cased(uint32_t cp)
{
    const utf8proc_category_t c = category(cp);

    return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL ||
           c == UTF8PROC_CATEGORY_LT;
}

/* What case rules look through: marks, modifiers, and punctuation inside words. */
static bool is_case_ignorable(uint32_t cp)
{
    static const uint16_t INSIDE[] = { '\'',   '.',    ':',    0xb7,  0x387,
                                       0x2018, 0x2019, 0x2024, 0x2027 };

    for (size_t i = 0; i < HX_LEN(INSIDE); i++) {
        if (INSIDE[i] == cp)
            return true;
    }
    switch (category(cp)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
        return true;
    default:
        return false;
    }
}

/* Capital sigma at off ends a word: a letter before it, none behind. */
static bool is_final_sigma(const hx_jstr *s, size_t off)
{
    size_t at = off, n;
    uint32_t cp = 0;
    bool before = false;

    while (at > 0) {
        do
            at--;
        while (at > 0 && ((uint8_t)s->p[at] & 0xc0) == 0x80);
        cp = hx_jstr_cp(s, at, &n);
        if (!is_case_ignorable(cp)) {
            before = is_cased(cp);
            break;
        }
    }
    for (at = off + 2; before && at < s->n; at += n) {
        cp = hx_jstr_cp(s, at, &n);
        if (!is_case_ignorable(cp))
            return !is_cased(cp);
    }
    return before;
}

static void put_upper(hx_jbuf *b, const hx_jstr *s, size_t off, uint32_t cp)
{
    if (cp >= 0x1f80 && cp <= 0x1faf) {
        static const uint16_t BASE[] = { 0x1f08, 0x1f28, 0x1f68 };
        hx_jbuf_cp(b, BASE[(cp - 0x1f80) >> 4] + (cp & 7), s, off);
        hx_jbuf_cp(b, 0x399, s, off);
        return;
    }
    for (size_t i = 0; cp >= 0xdf && i < HX_LEN(SPECIAL) && SPECIAL[i][0] <= cp; i++) {
        if (SPECIAL[i][0] != cp)
            continue;
        for (size_t k = 1; k < 4 && SPECIAL[i][k] != 0; k++)
            hx_jbuf_cp(b, SPECIAL[i][k], s, off);
        return;
    }
    hx_jbuf_cp(b, (uint32_t)utf8proc_toupper((utf8proc_int32_t)cp), s, off);
}

static void put_title(hx_jbuf *b, const hx_jstr *s, size_t off, uint32_t cp)
{
    const uint32_t simple = (uint32_t)utf8proc_totitle((utf8proc_int32_t)cp);

    for (size_t i = 0; category(simple) != UTF8PROC_CATEGORY_LT && i < HX_LEN(SPECIAL) &&
                       SPECIAL[i][0] <= cp;
         i++) {
        if (SPECIAL[i][0] != cp)
            continue;
        hx_jbuf_cp(b, SPECIAL[i][1], s, off);
        for (size_t k = 2; k < 4 && SPECIAL[i][k] != 0; k++)
            hx_jbuf_cp(b,
                       SPECIAL[i][k] == 0x399    ? 0x345
                       : is_cased(SPECIAL[i][1]) ? lower_of(SPECIAL[i][k])
                                                 : SPECIAL[i][k],
                       s, off);
        return;
    }
    hx_jbuf_cp(b, simple, s, off);
}

static void put_lower(hx_jbuf *b, const hx_jstr *s, size_t off, uint32_t cp)
{
    if (cp == 0x3a3 && is_final_sigma(s, off))
        hx_jbuf_cp(b, 0x3c2, s, off);
    else
        hx_jbuf_cp(b, lower_of(cp), s, off);
    if (cp == 0x130)
        hx_jbuf_cp(b, 0x307, s, off);
}

/* Where the title filter starts a new word: behind these and white space. */
static bool starts_word(uint32_t cp)
{
    return hx_jinja_is_space(cp) ||
           (cp < 0x80 && cp != 0 && strchr("-({[<", (int)cp) != NULL);
}

int hx_jtext_case(hx_jvm *vm, const hx_jstr *s, hx_jcase to, hx_jval *out)
{
    hx_jbuf b = { .vm = vm };
    bool first = true, cased = false;
    size_t n;
    int rc;

    if (to == HX_J_TITLE && (rc = refuse_safe(vm, s, "title")) != 0)
        return rc;
    for (size_t i = 0; i < s->n && b.rc == 0; i += n) {
        const uint32_t cp = hx_jstr_cp(s, i, &n);
        if (to == HX_J_UPPER || (to == HX_J_TITLE && first))
            put_upper(&b, s, i, cp);
        else if ((to == HX_J_CAPITALIZE && first) || (to == HX_J_STR_TITLE && !cased))
            put_title(&b, s, i, cp);
        else
            put_lower(&b, s, i, cp);
        first = to == HX_J_TITLE && starts_word(cp);
        cased = is_cased(cp);
    }
    return hx_jbuf_done_safe(&b, s->safe, out);
}

/* str.isupper(), str.islower(): a letter of that case, none of another. Letters only: the
 * 366 modifier letters, Roman numerals and circled letters that Unicode also calls cased
 * count as caseless here. */
bool hx_jtext_all_case(const hx_jstr *s, bool upper)
{
    bool seen = false;
    size_t n;

    for (size_t i = 0; i < s->n; i += n) {
        const uint32_t cp = hx_jstr_cp(s, i, &n);
        if (!is_cased(cp))
            continue;
        if (category(cp) != (upper ? UTF8PROC_CATEGORY_LU : UTF8PROC_CATEGORY_LL))
            return false;
        seen = true;
    }
    return seen;
}

/* ---- strip, replace, lines ------------------------------------------- */

static bool in_set(uint32_t cp, const hx_jstr *set)
{
    size_t n;

    if (set == NULL)
        return hx_jinja_is_space(cp);
    for (size_t i = 0; i < set->n; i += n) {
        if (hx_jstr_cp(set, i, &n) == cp)
            return true;
    }
    return false;
}

static size_t point_before(const hx_jstr *s, size_t at)
{
    do
        at--;
    while (at > 0 && ((uint8_t)s->p[at] & 0xc0) == 0x80);
    return at;
}

/* chars: the set to remove, NULL for white space. */
int hx_jtext_strip(hx_jvm *vm, const hx_jstr *s, const hx_jstr *chars, bool left,
                   bool right, hx_jval *out)
{
    size_t from = 0, to = s->n, n;
    int rc;

    if (chars != NULL && (rc = refuse_safe(vm, s, "strip")) != 0)
        return rc;
    while (left && from < to && in_set(hx_jstr_cp(s, from, &n), chars))
        from += n;
    while (right && to > from) {
        const size_t at = point_before(s, to);
        if (!in_set(hx_jstr_cp(s, at, &n), chars))
            break;
        to = at;
    }
    return hx_jstr_sub(vm, s, from, to - from, out);
}

int hx_jtext_replace(hx_jvm *vm, const hx_jstr *s, const hx_jstr *old, const hx_jstr *new,
                     int64_t count, hx_jval *out)
{
    hx_jbuf b = { .vm = vm };
    size_t at = 0, n;
    int rc;

    if ((rc = hx_jvm_work(vm, s->n / 64)) != 0)
        return rc;
    while (count != 0 && b.rc == 0) {
        const size_t hit = hx_jstr_find(s, old, at, s->n, false);
        if (hit == SIZE_MAX)
            break;
        hx_jbuf_sub(&b, s, at, hit - at);
        hx_jbuf_put(&b, new);
        at = hit + old->n;
        count -= count > 0;
        if (old->n > 0)
            continue;
        /* An empty text stands before every character and at the end. */
        if (at == s->n)
            break;
        hx_jstr_cp(s, at, &n);
        hx_jbuf_sub(&b, s, at, n);
        at += n;
    }
    hx_jbuf_sub(&b, s, at, s->n - at);
    return hx_jbuf_done(&b, out);
}

/* str.splitlines(): length of the line end at off, 0 if there is none. */
static size_t line_end(const hx_jstr *s, size_t off)
{
    size_t n;
    const uint32_t cp = hx_jstr_cp(s, off, &n);

    if (cp == '\r' && off + 1 < s->n && s->p[off + 1] == '\n')
        return 2;
    if ((cp >= 10 && cp <= 13) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 ||
        cp == 0x2028 || cp == 0x2029)
        return n;
    return 0;
}

size_t hx_jtext_line(const hx_jstr *s, size_t from, size_t *after)
{
    size_t at = from, n, e = 0;

    while (at < s->n && (e = line_end(s, at)) == 0) {
        hx_jstr_cp(s, at, &n);
        at += n;
    }
    *after = at + e;
    return at;
}

/* ---- a list of parts ------------------------------------------------- */

typedef struct {
    hx_jval *v;
    size_t n, cap;
} parts;

static int part_add(hx_jvm *vm, parts *l, const hx_jstr *s, size_t from, size_t to)
{
    int rc;

    if (l->n == l->cap) {
        const size_t cap = l->cap ? 2 * l->cap : 4;
        hx_jval *v = hx_jvm_alloc(vm, cap, sizeof *v);
        if (v == NULL)
            return HX_ENOMEM;
        if (l->n > 0)
            memcpy(v, l->v, l->n * sizeof *v);
        l->v = v;
        l->cap = cap;
    }
    if ((rc = hx_jvm_work(vm, 1)) != 0)
        return rc;
    return hx_jstr_sub(vm, s, from, to - from, &l->v[l->n++]);
}

static int parts_done(hx_jvm *vm, const parts *l, bool reverse, hx_jval *out)
{
    hx_jval *item;
    const int rc = hx_jval_list(vm, HX_J_LIST, l->n, &item, out);

    for (size_t i = 0; i < l->n && rc == 0; i++)
        item[i] = l->v[reverse ? l->n - 1 - i : i];
    return rc;
}

static int split_space(hx_jvm *vm, const hx_jstr *s, int64_t max, bool rev, hx_jval *out)
{
    parts l = { 0 };
    size_t from = 0, to = s->n, n;
    int rc = 0;

    while (rc == 0) {
        /* Drop white space at the end that is being eaten. */
        while (!rev && from < to && hx_jinja_is_space(hx_jstr_cp(s, from, &n)))
            from += n;
        while (rev && to > from &&
               hx_jinja_is_space(hx_jstr_cp(s, point_before(s, to), &n)))
            to = point_before(s, to);
        if (from == to)
            break;
        if (max == 0) {
            rc = part_add(vm, &l, s, from, to);
            break;
        }
        size_t a = from, z = to;
        if (rev) {
            for (a = to;
                 a > from && !hx_jinja_is_space(hx_jstr_cp(s, point_before(s, a), &n));)
                a = point_before(s, a);
            to = a;
        } else {
            for (z = from; z < to && !hx_jinja_is_space(hx_jstr_cp(s, z, &n)); z += n)
                continue;
            from = z;
        }
        rc = part_add(vm, &l, s, a, z);
        max -= max > 0;
    }
    return rc != 0 ? rc : parts_done(vm, &l, rev, out);
}

static int split_by(hx_jvm *vm, const hx_jstr *s, const hx_jstr *sep, int64_t max,
                    bool rev, hx_jval *out)
{
    parts l = { 0 };
    size_t from = 0, to = s->n;
    int rc = hx_jvm_work(vm, s->n / 64);

    if (sep->n == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "split: empty separator");
    while (rc == 0 && max != 0) {
        const size_t hit = hx_jstr_find(s, sep, from, to, rev);
        if (hit == SIZE_MAX)
            break;
        rc = rev ? part_add(vm, &l, s, hit + sep->n, to) : part_add(vm, &l, s, from, hit);
        if (rev)
            to = hit;
        else
            from = hit + sep->n;
        max -= max > 0;
    }
    if (rc != 0 || (rc = part_add(vm, &l, s, from, to)) != 0)
        return rc;
    return parts_done(vm, &l, rev, out);
}

/* ---- methods --------------------------------------------------------- */

#define METHOD(name) static int name(hx_jvm *vm, const hx_jcall *c, hx_jval *out)

static const hx_jstr *self_of(const hx_jcall *c)
{
    return c->self.u.s;
}

enum { LEFT = 1, RIGHT = 2 };

/* strip, lstrip, rstrip: arg is the sides. */
METHOD(m_strip)
{
    const hx_jstr *set = NULL;
    int rc;

    if (c->a[0].t != HX_J_ABSENT && c->a[0].t != HX_J_NONE &&
        (rc = hx_jtext_want(vm, c->a[0], "strip", &set)) != 0)
        return rc;
    return hx_jtext_strip(vm, self_of(c), set, c->arg & LEFT, c->arg & RIGHT, out);
}

METHOD(m_case)
{
    return hx_jtext_case(vm, self_of(c), (hx_jcase)c->arg, out);
}

/* split; rsplit has arg 1. */
METHOD(m_split)
{
    const hx_jstr *sep;
    int64_t max;
    int rc;

    if ((rc = hx_jtext_want_int(vm, c->a[1], "maxsplit", -1, &max)) != 0)
        return rc;
    if (c->a[0].t == HX_J_ABSENT || c->a[0].t == HX_J_NONE)
        return split_space(vm, self_of(c), max, c->arg == 1, out);
    if ((rc = hx_jtext_want(vm, c->a[0], "separator", &sep)) != 0)
        return rc;
    return split_by(vm, self_of(c), sep, max, c->arg == 1, out);
}

METHOD(m_splitlines)
{
    const hx_jstr *s = self_of(c);
    const bool keep = hx_jval_truthy(c->a[0]);
    parts l = { 0 };
    size_t after = 0;
    int rc = 0;

    for (size_t from = 0; from < s->n && rc == 0; from = after) {
        const size_t end = hx_jtext_line(s, from, &after);
        rc = part_add(vm, &l, s, from, keep ? after : end);
    }
    return rc != 0 ? rc : parts_done(vm, &l, false, out);
}

/* partition; rpartition has arg 1. */
METHOD(m_partition)
{
    const bool rev = c->arg == 1;
    const hx_jstr *s = self_of(c), *sep;
    hx_jval *item;
    int rc;

    if ((rc = hx_jtext_want(vm, c->a[0], "separator", &sep)) != 0 ||
        (rc = refuse_safe(vm, s, "partition")) != 0)
        return rc;
    if (sep->n == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "partition: empty separator");
    size_t hit = hx_jstr_find(s, sep, 0, s->n, rev), end;
    end = hit == SIZE_MAX ? hit = rev ? 0 : s->n : hit + sep->n;
    if ((rc = hx_jval_list(vm, HX_J_TUPLE, 3, &item, out)) != 0 ||
        (rc = hx_jstr_sub(vm, s, 0, hit, &item[0])) != 0 ||
        (rc = hx_jstr_sub(vm, s, hit, end - hit, &item[1])) != 0)
        return rc;
    return hx_jstr_sub(vm, s, end, s->n - end, &item[2]);
}

/* Bytes [from, to) that optional arguments start and end leave. False: nothing can match.
 */
static int window(hx_jvm *vm, const hx_jcall *c, size_t *from, size_t *to, bool *any)
{
    const hx_jstr *s = self_of(c);
    const int64_t n = (int64_t)s->len;
    int64_t v[2] = { 0, n };
    int rc;

    for (int k = 0; k < 2; k++) {
        if (c->a[k + 1].t != HX_J_NONE &&
            (rc = hx_jtext_want_int(vm, c->a[k + 1], "position", v[k], &v[k])) != 0)
            return rc;
        if (v[k] < 0)
            v[k] = HX_MAX(v[k] + n, 0);
    }
    *any = v[0] <= n && v[0] <= v[1];
    if (!*any)
        return 0;
    rc = hx_jstr_seek(vm, s, (size_t)v[0], from);
    return rc != 0 ? rc : hx_jstr_seek(vm, s, (size_t)HX_MIN(v[1], n), to);
}

enum { FROM_RIGHT = 1, MUST = 2 };

/* find, rfind, index, rindex: where, in code points. */
METHOD(m_find)
{
    const hx_jstr *s = self_of(c), *sub;
    size_t from, to, hit = SIZE_MAX;
    int64_t at = 0;
    bool any;
    int rc;

    if ((rc = hx_jtext_want(vm, c->a[0], "text to find", &sub)) != 0 ||
        (rc = window(vm, c, &from, &to, &any)) != 0 ||
        (rc = hx_jvm_work(vm, s->n / 64)) != 0)
        return rc;
    if (any)
        hit = hx_jstr_find(s, sub, from, to, c->arg & FROM_RIGHT);
    if (hit == SIZE_MAX && c->arg & MUST)
        return hx_jvm_fail(vm, HX_EFORMAT, "substring not found");
    for (size_t i = 0; hit != SIZE_MAX && i < hit; i++)
        at += ((uint8_t)s->p[i] & 0xc0) != 0x80;
    *out = hx_jint(hit == SIZE_MAX ? -1 : at);
    return 0;
}

METHOD(m_count)
{
    const hx_jstr *s = self_of(c), *sub;
    size_t from, to;
    int64_t n = 0;
    bool any;
    int rc;

    if ((rc = hx_jtext_want(vm, c->a[0], "text to count", &sub)) != 0 ||
        (rc = window(vm, c, &from, &to, &any)) != 0 ||
        (rc = hx_jvm_work(vm, s->n / 64)) != 0)
        return rc;
    if (any && sub->n == 0) {
        n = 1;
        for (size_t i = from; i < to; i++)
            n += ((uint8_t)s->p[i] & 0xc0) != 0x80;
    } else if (any) {
        for (size_t hit; (hit = hx_jstr_find(s, sub, from, to, false)) != SIZE_MAX; n++)
            from = hit + sub->n;
    }
    *out = hx_jint(n);
    return 0;
}

static bool has_affix(const hx_jstr *s, const hx_jstr *x, size_t from, size_t to,
                      bool end)
{
    return x->n <= to - from && memcmp(s->p + (end ? to - x->n : from), x->p, x->n) == 0;
}

/* startswith; endswith has arg 1. */
METHOD(m_affix)
{
    const bool end = c->arg == 1;
    const hx_jval arg = c->a[0];
    const hx_jval *one = arg.t == HX_J_TUPLE ? arg.u.q->v : &arg;
    const size_t n = arg.t == HX_J_TUPLE ? arg.u.q->n : 1;
    size_t from, to;
    const hx_jstr *x;
    bool any, yes = false;
    int rc;

    if ((rc = window(vm, c, &from, &to, &any)) != 0)
        return rc;
    for (size_t i = 0; i < n && !yes; i++) {
        if ((rc = hx_jtext_want(vm, one[i], end ? "suffix" : "prefix", &x)) != 0)
            return rc;
        yes = any && has_affix(self_of(c), x, from, to, end);
    }
    *out = hx_jbool(yes);
    return 0;
}

/* removeprefix; removesuffix has arg 1. */
METHOD(m_remove_affix)
{
    const bool end = c->arg == 1;
    const hx_jstr *s = self_of(c), *x;
    int rc;

    if ((rc = hx_jtext_want(vm, c->a[0], end ? "suffix" : "prefix", &x)) != 0 ||
        (rc = refuse_safe(vm, s, "removing a part")) != 0)
        return rc;
    const size_t cut = has_affix(s, x, 0, s->n, end) ? x->n : 0;
    return hx_jstr_sub(vm, s, end ? 0 : cut, s->n - cut, out);
}

METHOD(m_replace)
{
    const hx_jstr *old, *new;
    int64_t count;
    int rc;

    if ((rc = hx_jtext_want(vm, c->a[0], "old", &old)) != 0 ||
        (rc = hx_jtext_want(vm, c->a[1], "new", &new)) != 0 ||
        (rc = hx_jtext_want_int(vm, c->a[2], "count", -1, &count)) != 0 ||
        (rc = refuse_safe(vm, self_of(c), "replace")) != 0)
        return rc;
    return hx_jtext_replace(vm, self_of(c), old, new, count, out);
}

METHOD(m_join)
{
    hx_jbuf b = { .vm = vm };
    hx_jiter it;
    hx_jval x;
    int rc;

    if ((rc = refuse_safe(vm, self_of(c), "join")) != 0 ||
        (rc = hx_jiter_init(vm, &it, c->a[0])) != 0)
        return rc;
    for (size_t i = 0; (rc = hx_jiter_next(vm, &it, &x)) == 1; i++) {
        if (x.t != HX_J_STR)
            return hx_jvm_fail(vm, HX_EFORMAT,
                               "join: item %zu is a %s, expected a string", i,
                               hx_jval_type(x));
        if (i > 0)
            hx_jbuf_put(&b, self_of(c));
        hx_jbuf_put(&b, x.u.s);
    }
    return rc < 0 ? rc : hx_jbuf_done(&b, out);
}

METHOD(m_format)
{
    const int rc = refuse_safe(vm, self_of(c), "format");

    return rc != 0 ? rc : hx_jformat_braces(vm, self_of(c), c->raw, out);
}

static bool is_letter(uint32_t cp)
{
    return category(cp) >= UTF8PROC_CATEGORY_LU && category(cp) <= UTF8PROC_CATEGORY_LO;
}

static bool is_alnum(uint32_t cp)
{
    return is_letter(cp) ||
           (category(cp) >= UTF8PROC_CATEGORY_ND && category(cp) <= UTF8PROC_CATEGORY_NO);
}

static bool is_decimal(uint32_t cp)
{
    return category(cp) == UTF8PROC_CATEGORY_ND;
}

/* isdigit() also takes some of the other numbers: superscripts, circled digits. */
static bool is_other_number(uint32_t cp)
{
    return category(cp) == UTF8PROC_CATEGORY_NO;
}

enum { ALL_SPACE, ALL_LETTERS, ALL_ALNUM, ALL_DECIMAL, ALL_DIGITS };

/* isspace, isalpha, isalnum, isdecimal, isdigit: every character is of the kind arg. */
METHOD(m_all)
{
    static bool (*const IS[])(uint32_t cp) = {
        [ALL_SPACE] = hx_jinja_is_space, [ALL_LETTERS] = is_letter,
        [ALL_ALNUM] = is_alnum,          [ALL_DECIMAL] = is_decimal,
        [ALL_DIGITS] = is_decimal,
    };
    const hx_jstr *s = self_of(c);
    bool all = s->n > 0;
    size_t n;

    for (size_t i = 0; i < s->n && all; i += n) {
        const uint32_t cp = hx_jstr_cp(s, i, &n);
        if (c->arg == ALL_DIGITS && is_other_number(cp))
            return hx_jvm_fail(vm, HX_EUNSUP,
                               "isdigit on numbers that are no decimal digits");
        all = IS[c->arg](cp);
    }
    *out = hx_jbool(all);
    return 0;
}

METHOD(m_all_case)
{
    (void)vm;
    *out = hx_jbool(hx_jtext_all_case(self_of(c), c->arg == HX_J_UPPER));
    return 0;
}

const hx_jbuiltin hx_jtext_methods[] = {
    { "strip", m_strip, "chars?", LEFT | RIGHT },
    { "lstrip", m_strip, "chars?", LEFT },
    { "rstrip", m_strip, "chars?", RIGHT },
    { "split", m_split, "sep? maxsplit?", 0 },
    { "rsplit", m_split, "sep? maxsplit?", 1 },
    { "splitlines", m_splitlines, "keepends?", 0 },
    { "partition", m_partition, "sep", 0 },
    { "rpartition", m_partition, "sep", 1 },
    { "startswith", m_affix, "prefix start? end?", 0 },
    { "endswith", m_affix, "suffix start? end?", 1 },
    { "removeprefix", m_remove_affix, "prefix", 0 },
    { "removesuffix", m_remove_affix, "suffix", 1 },
    { "replace", m_replace, "old new count?", 0 },
    { "upper", m_case, "", HX_J_UPPER },
    { "lower", m_case, "", HX_J_LOWER },
    { "title", m_case, "", HX_J_STR_TITLE },
    { "capitalize", m_case, "", HX_J_CAPITALIZE },
    { "find", m_find, "sub start? end?", 0 },
    { "rfind", m_find, "sub start? end?", FROM_RIGHT },
    { "index", m_find, "sub start? end?", MUST },
    { "rindex", m_find, "sub start? end?", FROM_RIGHT | MUST },
    { "count", m_count, "sub start? end?", 0 },
    { "join", m_join, "iterable", 0 },
    { "format", m_format, "*", 0 },
    { "isupper", m_all_case, "", HX_J_UPPER },
    { "islower", m_all_case, "", HX_J_LOWER },
    { "isspace", m_all, "", ALL_SPACE },
    { "isalpha", m_all, "", ALL_LETTERS },
    { "isalnum", m_all, "", ALL_ALNUM },
    { "isdecimal", m_all, "", ALL_DECIMAL },
    { "isdigit", m_all, "", ALL_DIGITS },
    { NULL, NULL, NULL, 0 },
};
