/* json.c - JSON text to a tree and back: json-c behind limits, and two writers.
 *
 * Requests, templates, config.json and safetensors headers go through here. A parsed
 * tree is read-only, so threads may share it: nothing here may call the json-c functions
 * that cache text inside a node (json_object_get_string of a number, to_json_string). An
 * hx_json is a json_object under another name; JSON null is NULL, as it is in json-c. */
#include "base/base.h"

#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <json-c/json_object.h>
#include <json-c/json_tokener.h>
#include <json-c/linkhash.h>
#include <json-c/printbuf.h>

#define DEFAULT_DEPTH 64
/* Members of smaller objects are found by walking the list. */
#define INDEX_MIN 17

/* Fed to json-c after an integer beyond 64 bits, which it would refuse: so it becomes a
 * double that keeps its text. index_tree() cuts it off again; from then on a double whose
 * text has no '.', 'e' or 'E' is such an integer. Writers of JSON do not spell exponents
 * this way; a document that does gets the same value back. */
#define BIG_INT_MARK "E-00"

static json_object *jc(const hx_json *j)
{
    return (json_object *)(uintptr_t)j;
}

static const hx_json *hx(const json_object *o)
{
    return (const hx_json *)o;
}

/* A double that stands for an integer beyond 64 bits. */
static bool is_big_int(const hx_json *j)
{
    return strpbrk(json_object_get_userdata(jc(j)), ".eE") == NULL;
}

/* ---- words ----------------------------------------------------------- */

/* The state of a walk over the text that checks strings, numbers, literals and nesting
 * and leaves the order of tokens to json-c. json-c 0.16 alone, though strict, takes NaN,
 * "01", control characters in strings and bytes that are no UTF-8. */
typedef struct {
    const char *p;
    size_t n, i;
    int depth, max_depth;
    const char *bad; /* what is wrong at i */
    int64_t n_null;  /* as a word of the text */
} scanner;

static int at(const scanner *s, size_t i)
{
    return i < s->n ? (unsigned char)s->p[i] : -1;
}

static bool is_digit(int c)
{
    return c >= '0' && c <= '9';
}

static bool scan_fail(scanner *s, size_t i, const char *what)
{
    s->i = i;
    s->bad = what;
    return false;
}

static bool scan_escape(scanner *s, size_t *i, bool *has_nul)
{
    const int c = at(s, *i + 1);
    int unit = 0;

    if (c != 'u') {
        if (c <= 0 || strchr("\"\\/bfnrt", c) == NULL)
            return scan_fail(s, *i, "unknown escape");
        *i += 2;
        return true;
    }
    for (size_t k = 2; k < 6; k++) {
        const int digit = hx_hex_digit(at(s, *i + k));

        if (digit < 0)
            return scan_fail(s, *i, "\\u needs four hexadecimal digits");
        unit = unit * 16 + digit;
    }
    *has_nul |= unit == 0;
    *i += 6;
    return true;
}

static bool is_space(int c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool scan_string(scanner *s)
{
    size_t i = s->i + 1;
    bool has_nul = false;

    for (int c = at(s, i); c != '"'; c = at(s, i)) {
        uint32_t cp;
        int len;

        if (c < 0)
            return scan_fail(s, s->i, "string without an end");
        if (c < 0x20)
            return scan_fail(s, i, "control character in a string");
        if (c == '\\') {
            if (!scan_escape(s, &i, &has_nul))
                return false;
        } else if (c < 0x80) {
            i++;
        } else {
            if ((len = hx_utf8_next(s->p + i, s->n - i, &cp)) <= 0)
                return scan_fail(s, i, "not UTF-8");
            i += (size_t)len;
        }
    }
    s->i = ++i;
    /* Keys of json-c are C strings: this one would become another. */
    while (has_nul && is_space(at(s, i)))
        i++;
    return !has_nul || at(s, i) != ':' ||
           scan_fail(s, i, "key with a NUL character before this");
}

static size_t skip_digits(const scanner *s, size_t i)
{
    while (is_digit(at(s, i)))
        i++;
    return i;
}

/* *big: an integer that 64 bits do not hold. */
static bool scan_number(scanner *s, bool *big)
{
    const size_t digits = s->i + (at(s, s->i) == '-');
    size_t i = skip_digits(s, digits), after;
    bool whole = true;

    if (i == digits || (at(s, digits) == '0' && i > digits + 1))
        return scan_fail(s, s->i, "malformed number");
    *big = false;
    if (i - digits >= 19) {
        const char *limit =
            digits > s->i ? "9223372036854775808" : "18446744073709551615";
        const size_t n = strlen(limit);

        *big = i - digits > n || (i - digits == n && memcmp(s->p + digits, limit, n) > 0);
    }
    if (at(s, i) == '.') {
        whole = false;
        after = skip_digits(s, i + 1);
        if (after == i + 1)
            return scan_fail(s, s->i, "malformed number");
        i = after;
    }
    if (at(s, i) == 'e' || at(s, i) == 'E') {
        whole = false;
        i += at(s, i + 1) == '-' || at(s, i + 1) == '+' ? 2 : 1;
        after = skip_digits(s, i);
        if (after == i)
            return scan_fail(s, s->i, "malformed number");
        i = after;
    }
    *big = *big && whole;
    s->i = i;
    return true;
}

static bool scan_literal(scanner *s)
{
    static const char *const literals[] = { "true", "false", "null" };

    for (size_t k = 0; k < HX_LEN(literals); k++) {
        const size_t n = strlen(literals[k]);

        if (n <= s->n - s->i && memcmp(s->p + s->i, literals[k], n) == 0) {
            s->i += n;
            s->n_null += *literals[k] == 'n';
            return true;
        }
    }
    return scan_fail(s, s->i, "unexpected character");
}

/* Checks up to the end of the text or, with *big set, the end of the next integer that
 * 64 bits do not hold. */
static bool scan_words(scanner *s, bool *big)
{
    bool ok = true;

    *big = false;
    while (ok && !*big && s->i < s->n) {
        const int c = at(s, s->i);

        if (c == '"') {
            ok = scan_string(s);
        } else if (c == '-' || is_digit(c)) {
            ok = scan_number(s, big);
        } else if (is_space(c) || c == ',' || c == ':') {
            s->i++;
        } else if (c == '[' || c == '{') {
            if (++s->depth > s->max_depth)
                return scan_fail(s, s->i, "nested too deep");
            s->i++;
        } else if (c == ']' || c == '}') {
            s->depth--;
            s->i++;
        } else {
            ok = scan_literal(s);
        }
    }
    return ok;
}

/* ---- tree ------------------------------------------------------------ */

static void free_index(json_object *o, void *index)
{
    (void)o;
    hx_free(index);
}

/* Hangs an array of its members on a large object, so that hx_json_member() need not
 * walk and the tree stays read-only. */
static int index_object(json_object *o, hx_err *err)
{
    const size_t n = (size_t)json_object_object_length(o);
    const struct lh_entry *e, **index;
    size_t i = 0, bytes;

    if (n < INDEX_MIN)
        return 0;
    if (!hx_mul(n, sizeof(struct lh_entry *), &bytes) ||
        (index = hx_realloc(NULL, bytes)) == NULL)
        return hx_fail(err, HX_ENOMEM, "JSON: no memory for an object of %zu members", n);
    for (e = lh_table_head(json_object_get_object(o)); e != NULL; e = lh_entry_next(e))
        index[i++] = e;
    json_object_set_userdata(o, index, free_index);
    return 0;
}

static int check_double(json_object *o, hx_err *err)
{
    char *text = json_object_get_userdata(o);
    char *mark = text != NULL ? strstr(text, BIG_INT_MARK) : NULL;

    if (text == NULL)
        return hx_fail(err, HX_ENOMEM, "JSON: no memory for the text of a number");
    /* The shortest integer that got the mark has 19 digits. */
    if (mark != NULL && mark[strlen(BIG_INT_MARK)] == '\0' && mark - text >= 19 &&
        memchr(text, '.', (size_t)(mark - text)) == NULL)
        *mark = '\0';
    if (!isfinite(json_object_get_double(o)))
        return hx_fail(err, HX_EFORMAT,
                       "JSON: number %.40s%s: beyond the range of a double", text,
                       strlen(text) > 40 ? "…" : "");
    return 0;
}

/* Recursion is bounded by max_depth. *n_null: of the tree. */
static int index_tree(json_object *o, int64_t *n_null, hx_err *err)
{
    const struct lh_entry *e;
    int rc = 0;

    switch (json_object_get_type(o)) {
    case json_type_double:
        return check_double(o, err);
    case json_type_array:
        for (size_t i = 0; i < json_object_array_length(o) && rc == 0; i++)
            rc = index_tree(json_object_array_get_idx(o, i), n_null, err);
        return rc;
    case json_type_object:
        for (e = lh_table_head(json_object_get_object(o)); e != NULL && rc == 0;
             e = lh_entry_next(e))
            rc = index_tree(lh_entry_v(e), n_null, err);
        return rc != 0 ? rc : index_object(o, err);
    default:
        *n_null += o == NULL;
        return 0;
    }
}

static int no_memory(const scanner *s, hx_err *err)
{
    return hx_fail(err, HX_ENOMEM, "JSON: no memory for a text of %zu bytes", s->n);
}

/* Hands text to json-c piece by piece; a piece ends where the mark goes in. */
static int feed(json_tokener *tok, scanner *s, json_object **root, hx_err *err)
{
    enum json_tokener_error state = json_tokener_continue;
    size_t from = 0;

    do {
        bool big;

        if (!scan_words(s, &big))
            return hx_fail(err, HX_EFORMAT, "JSON: byte %zu: %s", s->i, s->bad);
        if (s->i > from)
            *root = json_tokener_parse_ex(tok, s->p + from, (int)(s->i - from));
        state = json_tokener_get_error(tok);
        if (state == json_tokener_continue && big) {
            json_tokener_parse_ex(tok, BIG_INT_MARK, (int)strlen(BIG_INT_MARK));
            state = json_tokener_get_error(tok);
        }
        if (state == json_tokener_success && *root == NULL && s->p[s->n - 1] != 'l')
            return no_memory(s, err);
        if (state == json_tokener_success && s->i < s->n)
            state = json_tokener_error_parse_unexpected;
        if (state != json_tokener_continue && state != json_tokener_success) {
            from += json_tokener_get_parse_end(tok);
            return hx_fail(err, HX_EFORMAT, "JSON: byte %zu: %s", HX_MIN(from, s->n),
                           json_tokener_error_desc(state));
        }
        from = s->i;
    } while (s->i < s->n);
    if (state == json_tokener_continue) { /* a number ends where the text does */
        *root = json_tokener_parse_ex(tok, "", 1);
        state = json_tokener_get_error(tok);
    }
    if (state != json_tokener_success)
        return hx_fail(err, HX_EFORMAT, "JSON: byte %zu: unexpected end", s->n);
    return 0;
}

int hx_json_parse(hx_json **out, hx_str text, int max_depth, hx_err *err)
{
    scanner s = { .p = text.p,
                  .n = text.n,
                  .max_depth = max_depth > 0 ? max_depth : DEFAULT_DEPTH };
    json_tokener *tok = NULL;
    json_object *root = NULL;
    int64_t n_null = 0;
    int rc;

    *out = NULL;
    while (s.n > 0 && is_space(at(&s, s.n - 1)))
        s.n--;
    if (s.n == 0)
        return hx_fail(err, HX_EFORMAT, "JSON: byte 0: no value, only white space");
    if (s.n > INT32_MAX)
        return hx_fail(err, HX_ELIMIT, "JSON: %zu bytes, at most %d", s.n, INT32_MAX);
    /* json-c counts a value inside the innermost array as one level more. */
    if ((tok = json_tokener_new_ex(s.max_depth + 1)) == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "JSON: no memory for %d levels", s.max_depth);
        goto fail;
    }
    json_tokener_set_flags(tok, JSON_TOKENER_STRICT);
    /* json-c has no code for "out of memory": without room for a string it cuts it, without
     * room for a value it goes on with null. So there is room for the longest string. */
    if (printbuf_memset(tok->pb, 0, 0, (int)HX_MIN(s.n + 32, (size_t)INT32_MAX - 8)) <
        0) {
        rc = no_memory(&s, err);
        goto fail;
    }
    printbuf_reset(tok->pb);
    if ((rc = feed(tok, &s, &root, err)) != 0 ||
        (rc = index_tree(root, &n_null, err)) != 0)
        goto fail;
    if (n_null > s.n_null) {
        rc = no_memory(&s, err);
        goto fail;
    }
    json_tokener_free(tok);
    *out = (hx_json *)root;
    return 0;
fail:
    json_object_put(root);
    if (tok != NULL)
        json_tokener_free(tok);
    return rc;
}

int hx_json_read(hx_json **out, const char *path, size_t max, hx_err *err)
{
    hx_err why = { 0 };
    char *text;
    size_t n;
    int rc;

    *out = NULL;
    if ((rc = hx_file_read(path, max, &text, &n, err)) != 0)
        return rc;
    if ((rc = hx_json_parse(out, (hx_str) { text, n }, 0, &why)) != 0)
        hx_fail(err, rc, "%s: %.200s", path, why.msg);
    hx_free(text);
    return rc;
}

void hx_json_free(hx_json *j)
{
    json_object_put(jc(j));
}

/* ---- reading --------------------------------------------------------- */

hx_json_type hx_json_kind(const hx_json *j)
{
    static const hx_json_type kinds[] = {
        [json_type_null] = HX_JSON_NULL,     [json_type_boolean] = HX_JSON_BOOL,
        [json_type_int] = HX_JSON_INT,       [json_type_double] = HX_JSON_DOUBLE,
        [json_type_string] = HX_JSON_STRING, [json_type_array] = HX_JSON_ARRAY,
        [json_type_object] = HX_JSON_OBJECT,
    };

    return kinds[json_object_get_type(jc(j))];
}

const char *hx_json_kind_name(const hx_json *j)
{
    static const char *const names[] = {
        [HX_JSON_NULL] = "null",     [HX_JSON_BOOL] = "boolean",
        [HX_JSON_INT] = "integer",   [HX_JSON_DOUBLE] = "number",
        [HX_JSON_STRING] = "string", [HX_JSON_ARRAY] = "array",
        [HX_JSON_OBJECT] = "object",
    };

    return names[hx_json_kind(j)];
}

const hx_json *hx_json_get(const hx_json *obj, const char *key)
{
    json_object *value = NULL;

    if (hx_json_kind(obj) == HX_JSON_OBJECT)
        json_object_object_get_ex(jc(obj), key, &value);
    return hx(value);
}

bool hx_json_has(const hx_json *obj, const char *key)
{
    return hx_json_kind(obj) == HX_JSON_OBJECT &&
           json_object_object_get_ex(jc(obj), key, NULL);
}

size_t hx_json_len(const hx_json *j)
{
    const hx_json_type kind = hx_json_kind(j);

    if (kind == HX_JSON_ARRAY)
        return json_object_array_length(jc(j));
    return kind == HX_JSON_OBJECT ? (size_t)json_object_object_length(jc(j)) : 0;
}

const hx_json *hx_json_at(const hx_json *arr, size_t i)
{
    if (hx_json_kind(arr) != HX_JSON_ARRAY)
        return NULL;
    return hx(json_object_array_get_idx(jc(arr), i));
}

const hx_json *hx_json_member(const hx_json *obj, size_t i, hx_str *key)
{
    const struct lh_entry *e = NULL, **index;

    if (hx_json_kind(obj) == HX_JSON_OBJECT && i < hx_json_len(obj)) {
        if ((index = json_object_get_userdata(jc(obj))) != NULL)
            e = index[i];
        else
            for (e = lh_table_head(json_object_get_object(jc(obj))); i > 0; i--)
                e = lh_entry_next(e);
    }
    if (key != NULL)
        *key = hx_str_c(e != NULL ? lh_entry_k(e) : NULL);
    return e != NULL ? hx(lh_entry_v(e)) : NULL;
}

hx_str hx_json_str(const hx_json *j)
{
    if (hx_json_kind(j) != HX_JSON_STRING)
        return (hx_str) { NULL, 0 };
    return (hx_str) { json_object_get_string(jc(j)),
                      (size_t)json_object_get_string_len(jc(j)) };
}

/* Integers past INT64_MAX give dflt, like everything else that is no int64. */
int64_t hx_json_int(const hx_json *j, int64_t dflt)
{
    double d;

    switch (hx_json_kind(j)) {
    case HX_JSON_INT:
        if (json_object_get_uint64(jc(j)) > INT64_MAX)
            return dflt;
        return json_object_get_int64(jc(j));
    case HX_JSON_DOUBLE:
        d = json_object_get_double(jc(j));
        if (is_big_int(j) || d < -0x1p63 || d >= 0x1p63 || d != (double)(int64_t)d)
            return dflt;
        return (int64_t)d;
    default:
        return dflt;
    }
}

double hx_json_num(const hx_json *j, double dflt)
{
    switch (hx_json_kind(j)) {
    case HX_JSON_INT:
        if (json_object_get_uint64(jc(j)) > INT64_MAX)
            return (double)json_object_get_uint64(jc(j));
        return (double)json_object_get_int64(jc(j));
    case HX_JSON_DOUBLE:
        return json_object_get_double(jc(j));
    default:
        return dflt;
    }
}

bool hx_json_bool(const hx_json *j, bool dflt)
{
    return hx_json_kind(j) == HX_JSON_BOOL ? json_object_get_boolean(jc(j)) != 0 : dflt;
}

/* ---- writing --------------------------------------------------------- */

/* The digits d.ddd…e±x of the shortest decimal that reads back as v (finite, not 0).
 * 15 digits always survive a double, so a shorter one is theirs without zeros; subnormals
 * keep fewer and are tried from one digit up. Below a power of two the doubles are half
 * as far apart: there the shortest can be the neighbour above the nearest decimal. */
static void shortest_digits(double v, char *text, size_t cap)
{
    const double a = fabs(v);
    int e;
    const bool power = frexp(a, &e) == 0.5;

    for (int n = a < 0x1p-1022 ? 1 : 15; n <= 17; n++) {
        snprintf(text, cap, "%.*e", n - 1, a);
        if (n == 17 || strtod(text, NULL) == a)
            return;
        if (power && n > 1 && text[n] < '9') {
            text[n]++;
            if (strtod(text, NULL) == a)
                return;
        }
    }
}

void hx_json_put_double(hx_sb *b, double v)
{
    char text[40], digits[20];
    int n = 0, point;
    const char *p = text;

    if (!isfinite(v)) {
        hx_sb_str(b, "null");
        return;
    }
    if (signbit(v))
        hx_sb_char(b, '-');
    if (v == 0) {
        hx_sb_str(b, "0.0");
        return;
    }
    shortest_digits(v, text, sizeof(text));
    for (; *p != 'e'; p++) /* whatever the locale's decimal point is */
        if (is_digit(*p))
            digits[n++] = *p;
    while (n > 1 && digits[n - 1] == '0')
        n--;
    point = 1 + (int)strtol(p + 1, NULL, 10); /* digits before the point */
    if (point > 16 || point < -3) {
        hx_sb_add(b, digits, 1);
        if (n > 1)
            hx_sb_char(b, '.');
        hx_sb_add(b, digits + 1, (size_t)n - 1);
        hx_sb_printf(b, "e%c%02d", point > 0 ? '+' : '-', abs(point - 1));
    } else if (point <= 0) {
        hx_sb_printf(b, "0.%.*s%.*s", -point, "000", n, digits);
    } else if (point < n) {
        hx_sb_printf(b, "%.*s.%.*s", point, digits, n - point, digits + point);
    } else {
        hx_sb_printf(b, "%.*s%.*s.0", n, digits, point - n, "0000000000000000");
    }
}

/* Writes the code point as one or two \u escapes. */
static void put_escape(hx_sb *b, uint32_t cp)
{
    if (cp < 0x10000) {
        hx_sb_printf(b, "\\u%04x", cp);
        return;
    }
    cp -= 0x10000;
    hx_sb_printf(b, "\\u%04x\\u%04x", 0xd800 + (cp >> 10), 0xdc00 + (cp & 0x3ff));
}

static void put_str_python(hx_sb *b, hx_str s, bool ensure_ascii)
{
    static const char short_escape[128] = {
        ['"'] = '"',  ['\\'] = '\\', ['\n'] = 'n', ['\r'] = 'r',
        ['\t'] = 't', ['\f'] = 'f',  ['\b'] = 'b',
    };
    size_t from = 0, i = 0;

    hx_sb_char(b, '"');
    while (i < s.n) {
        uint32_t cp = 0;
        const int len = hx_utf8_next(s.p + i, s.n - i, &cp);

        if (len == 1 && cp >= 0x20 && short_escape[cp] == 0 &&
            !(ensure_ascii && cp == 0x7f)) {
            i++;
            continue;
        }
        if (len > 1 && !ensure_ascii) {
            i += (size_t)len;
            continue;
        }
        hx_sb_add(b, s.p + from, i - from);
        if (len <= 0)
            hx_sb_str(b, ensure_ascii ? "\\ufffd" : "\xef\xbf\xbd");
        else if (cp < 0x80 && short_escape[cp] != 0)
            hx_sb_add(b, (char[2]) { '\\', short_escape[cp] }, 2);
        else
            put_escape(b, cp);
        i += len > 0 ? (size_t)len : hx_utf8_bad(s.p + i, s.n - i);
        from = i;
    }
    hx_sb_add(b, s.p + from, s.n - from);
    hx_sb_char(b, '"');
}

void hx_json_put_str(hx_sb *b, hx_str s)
{
    put_str_python(b, s, false);
}

typedef struct {
    bool python, ascii;
    int indent; /* spaces a level; 0: all in one line */
} json_style;

static void put_number(hx_sb *b, const json_object *o, bool python)
{
    if (json_object_get_type(o) == json_type_double) {
        if (python && !is_big_int(hx(o)))
            hx_json_put_double(b, json_object_get_double(o));
        else
            hx_sb_str(b, json_object_get_userdata(jc(hx(o))));
    } else if (json_object_get_uint64(o) > INT64_MAX) {
        hx_sb_printf(b, "%" PRIu64, json_object_get_uint64(o));
    } else {
        hx_sb_printf(b, "%" PRId64, json_object_get_int64(o));
    }
}

/* What goes before an item (or the closing bracket) of a container at `depth`. */
static void put_break(hx_sb *b, const json_style *style, int depth, bool first)
{
    if (!first)
        hx_sb_char(b, ',');
    if (style->indent > 0)
        hx_sb_printf(b, "\n%*s", depth * style->indent, "");
    else if (style->python && !first)
        hx_sb_char(b, ' ');
}

/* Recursion is bounded by the depth that the parser allowed. */
static void put_value(hx_sb *b, json_object *o, const json_style *style, int depth)
{
    const char *colon = style->python ? ": " : ":";
    const struct lh_entry *e;
    size_t n;

    switch (json_object_get_type(o)) {
    case json_type_null:
        hx_sb_str(b, "null");
        break;
    case json_type_boolean:
        hx_sb_str(b, json_object_get_boolean(o) ? "true" : "false");
        break;
    case json_type_int:
    case json_type_double:
        put_number(b, o, style->python);
        break;
    case json_type_string:
        put_str_python(b, hx_json_str(hx(o)), style->ascii);
        break;
    case json_type_array:
        n = json_object_array_length(o);
        hx_sb_char(b, '[');
        for (size_t i = 0; i < n; i++) {
            put_break(b, style, depth + 1, i == 0);
            put_value(b, json_object_array_get_idx(o, i), style, depth + 1);
        }
        if (n > 0)
            put_break(b, style, depth, true);
        hx_sb_char(b, ']');
        break;
    case json_type_object:
        hx_sb_char(b, '{');
        for (e = lh_table_head(json_object_get_object(o)); e != NULL;
             e = lh_entry_next(e)) {
            put_break(b, style, depth + 1, lh_entry_prev(e) == NULL);
            put_str_python(b, hx_str_c(lh_entry_k(e)), style->ascii);
            hx_sb_str(b, colon);
            put_value(b, lh_entry_v(e), style, depth + 1);
        }
        if (json_object_object_length(o) > 0)
            put_break(b, style, depth, true);
        hx_sb_char(b, '}');
        break;
    }
}

void hx_json_write(hx_sb *b, const hx_json *j)
{
    put_value(b, jc(j), &(json_style) { 0 }, 0);
}

void hx_json_write_python(hx_sb *b, const hx_json *j, bool ensure_ascii, int indent)
{
    put_value(b, jc(j), &(json_style) { true, ensure_ascii, indent }, 0);
}
