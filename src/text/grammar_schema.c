/* grammar_schema.c - JSON schema (draft 2020-12, with what older drafts and OpenAPI write
 * differently) as IR.
 *
 * Called by grammar.c. A view is a list of schemas that one value must satisfy together:
 * "allOf" and "$ref" only lengthen the list, and each keyword is read across all of it,
 * so nothing is ever merged. Equal views are one rule, which makes recursive references
 * recursive rules.
 *
 *   exact     type, enum, const, properties, required, additionalProperties, items,
 *             prefixItems, min/maxItems, min/maxLength, pattern, minimum, maximum and
 *             their exclusive forms, min/maxProperties, allOf, anyOf, $ref, nullable
 *   near      oneOf is read as anyOf. Formats as in grammar_value.c; pattern goes before
 *             format; formats not known there are ignored. Numbers in a range have no
 *             exponent. enum and const have one spelling. Members come in the order of
 *             the schema. Without "additionalProperties" an object that has "properties"
 *             takes no others, and a tuple no further elements
 *             (hx_grammar_opt.open_objects)
 *   partly    patternProperties: where no two patterns meet and no other undeclared
 *             members are allowed; multipleOf: up to 100, or powers of ten below 1;
 *             propertyNames: pattern and lengths; one pattern for a string, not two
 *   refused   not, if, contains, uniqueItems, dependencies of any kind, references out of
 *             the document: with HX_EUNSUP, never ignored
 *
 * Anything else is an annotation. What no document satisfies is an error.
 *
 * The arguments of a call may also be tagged pairs: the same schemas, but strings stand
 * there bare, and what is JSON is told from text by how reply.c reads it. */
#include <stdio.h>

#include "text/grammar_ir.h"
#include "text/text.h"

enum { ANYOF_DONE = 1, ONEOF_DONE = 2 };

typedef struct {
    const hx_json *node;
    uintptr_t done;
} part;
typedef struct {
    uint32_t at, n, rule, next;
} view;
/* An anyOf or oneOf of a view. */
typedef struct {
    uint32_t part;
    uintptr_t done;
    const hx_json *branches;
} choice;
/* A member of an object; rule 0: it must not be there. */
typedef struct {
    hx_str key;
    uint32_t rule;
    bool required;
} prop;
typedef struct {
    hx_ref key;
    uint32_t rule;
} pattern;
typedef HX_VEC(part) parts;
typedef HX_VEC(view) views;
typedef HX_VEC(prop) prop_list;
typedef HX_VEC(pattern) pattern_list;
typedef HX_VEC(const hx_json *) nodes;
typedef HX_VEC(hx_str) strs;

enum {
    T_NULL = 1,
    T_BOOL = 2,
    T_INT = 4,
    T_NUM = 8,
    T_STR = 16,
    T_ARR = 32,
    T_OBJ = 64,
    T_ALL = 127
};
/* clang-format off */
static const struct { const char *name; unsigned bits; } type_names[] = {
    { "null", T_NULL },   { "boolean", T_BOOL }, { "integer", T_INT },
    { "number", T_INT | T_NUM }, { "string", T_STR }, { "array", T_ARR }, { "object", T_OBJ },
};
/* clang-format on */

enum { SLOTS = 4096 };

/* How strings are written: quoted and escaped; bare, where nothing else is read; bare, where
 * JSON would be read as such. */
typedef enum { AS_JSON, AS_TEXT, AS_CLEAR_TEXT } spelling;

typedef struct {
    hx_ir *ir;
    const hx_json *root;
    parts part;     /* of all views */
    views view;     /* [0] is not used; in the order of making */
    hx_u32s slot;   /* hash table of views: chains */
    parts now;      /* the view being collected */
    bool none;      /* no value can satisfy it */
    nodes path;     /* schemas on their way into the view */
    prop_list prop; /* of the object at hand */
    pattern_list pattern;
} schema;

static int fail(schema *s, int code, const char *what, hx_str name)
{
    return hx_ir_fail(s->ir, code, "schema: %s \"%.*s\"", what, (int)HX_MIN(name.n, 100),
                      name.p != NULL ? name.p : "");
}

static int unsupported(schema *s, const char *what)
{
    return hx_ir_fail(s->ir, HX_EUNSUP, "schema: %s is not supported", what);
}

/* ---- keywords -------------------------------------------------------- */

static bool always(const hx_json *v)
{
    (void)v;
    return true;
}

static bool is_set(const hx_json *v)
{
    return hx_json_bool(v, true);
}

static bool is_schema(const hx_json *v)
{
    return hx_json_kind(v) != HX_JSON_BOOL;
}

/* Refused when the test says so of the keyword's value. */
/* clang-format off */
static const struct { const char *name; bool (*refuse)(const hx_json *v); } refused[] = {
    { "not", always },               { "if", always },
    { "contains", always },          { "uniqueItems", is_set },
    { "dependentRequired", always }, { "dependentSchemas", always },
    { "dependencies", always },      { "unevaluatedProperties", is_schema },
    { "unevaluatedItems", is_schema }, { "$dynamicRef", always },
    { "$recursiveRef", always },
};
/* clang-format on */

/* What each keyword's value must be; others are not looked at. */
/* clang-format off */
static const struct { const char *name; unsigned types; } shapes[] = {
    { "type", T_STR | T_ARR },       { "enum", T_ARR },
    { "properties", T_OBJ },         { "patternProperties", T_OBJ },
    { "required", T_ARR | T_BOOL },  { "prefixItems", T_ARR },
    { "items", T_OBJ | T_ARR | T_BOOL }, { "minItems", T_INT },
    { "maxItems", T_INT },           { "minLength", T_INT },
    { "maxLength", T_INT },          { "minProperties", T_INT },
    { "maxProperties", T_INT },      { "pattern", T_STR },
    { "format", T_STR },             { "minimum", T_NUM },
    { "maximum", T_NUM },            { "exclusiveMinimum", T_NUM | T_BOOL },
    { "exclusiveMaximum", T_NUM | T_BOOL }, { "multipleOf", T_NUM },
    { "anyOf", T_ARR },              { "oneOf", T_ARR },
    { "allOf", T_ARR },              { "$ref", T_STR },
    { "nullable", T_BOOL },          { "propertyNames", T_OBJ | T_BOOL },
};
/* clang-format on */

/* Numbers that are whole count as integers, and all as numbers. */
static unsigned type_of(const hx_json *v)
{
    switch (hx_json_kind(v)) {
    case HX_JSON_NULL:
        return T_NULL;
    case HX_JSON_BOOL:
        return T_BOOL;
    case HX_JSON_INT:
        return T_INT | T_NUM;
    case HX_JSON_DOUBLE:
        return hx_json_int(v, 0) == 0 && hx_json_int(v, 1) == 1 ? T_NUM : T_INT | T_NUM;
    case HX_JSON_STRING:
        return T_STR;
    case HX_JSON_ARRAY:
        return T_ARR;
    case HX_JSON_OBJECT:
        return T_OBJ;
    }
    return 0;
}

static void wrong_type(schema *s, const char *name, const hx_json *found, unsigned types)
{
    char expected[64] = "";

    for (size_t i = 0; i < HX_LEN(type_names); i++)
        if ((type_names[i].bits & types) == type_names[i].bits ||
            (type_names[i].bits & types) == T_NUM)
            snprintf(expected + strlen(expected), sizeof expected - strlen(expected),
                     "%s%s", expected[0] != '\0' ? " or " : "", type_names[i].name);
    hx_ir_fail(s->ir, HX_EFORMAT, "schema: \"%s\": found %s, expected %s", name,
               hx_json_kind_name(found), expected);
}

static bool check_node(schema *s, const hx_json *node)
{
    for (size_t i = 0; i < HX_LEN(refused); i++)
        if (hx_json_has(node, refused[i].name) &&
            refused[i].refuse(hx_json_get(node, refused[i].name))) {
            fail(s, HX_EUNSUP, "not supported is", hx_str_c(refused[i].name));
            return false;
        }
    for (size_t i = 0; i < HX_LEN(shapes); i++)
        if (hx_json_has(node, shapes[i].name) &&
            (type_of(hx_json_get(node, shapes[i].name)) & shapes[i].types) == 0) {
            wrong_type(s, shapes[i].name, hx_json_get(node, shapes[i].name),
                       shapes[i].types);
            return false;
        }
    return true;
}

/* ---- references ------------------------------------------------------ */

/* One step of a JSON pointer, decoded to out; its length in the pointer. */
static size_t pointer_step(hx_str ptr, hx_sb *out)
{
    size_t i = 0;

    out->n = 0;
    for (; i < ptr.n && ptr.p[i] != '/'; i++) {
        char c = ptr.p[i];

        if (c == '%' && i + 2 < ptr.n && hx_hex_digit(ptr.p[i + 1]) >= 0 &&
            hx_hex_digit(ptr.p[i + 2]) >= 0) {
            c = (char)(hx_hex_digit(ptr.p[i + 1]) * 16 + hx_hex_digit(ptr.p[i + 2]));
            i += 2;
        }
        if (c == '~' && i + 1 < ptr.n && (ptr.p[i + 1] == '0' || ptr.p[i + 1] == '1'))
            c = ptr.p[++i] == '0' ? '~' : '/';
        hx_sb_char(out, c);
    }
    return i;
}

static const hx_json *child_at(const hx_json *node, const char *step)
{
    uint64_t i = 0;
    const char *p = step;

    if (hx_json_kind(node) != HX_JSON_ARRAY)
        return hx_json_get(node, step);
    for (; *p >= '0' && *p <= '9' && i < UINT32_MAX; p++)
        i = i * 10 + (uint64_t)(*p - '0');
    return p > step && *p == '\0' ? hx_json_at(node, i) : NULL;
}

static const hx_json *resolve(schema *s, hx_str ref)
{
    const hx_json *node = s->root;
    hx_str rest = ref;
    hx_sb step = { 0 };

    if (ref.n == 0 || ref.p[0] != '#' || (ref.n > 1 && ref.p[1] != '/')) {
        fail(s, HX_EUNSUP, "only references like #/$defs/name are supported, not", ref);
        return NULL;
    }
    for (rest.p++, rest.n--; rest.n > 0 && node != NULL && hx_ir_work(s->ir, 1);) {
        rest.p++;
        rest.n--;
        const size_t n = pointer_step(rest, &step);

        rest.p += n;
        rest.n -= n;
        hx_sb_char(&step, '\0');
        node = step.bad ? NULL : child_at(node, step.p);
    }
    if (step.bad)
        hx_ir_fail(s->ir, HX_ENOMEM, "schema: no memory for a reference");
    else if (node == NULL)
        fail(s, HX_EFORMAT, "nothing at the reference", ref);
    hx_sb_free(&step);
    return s->ir->rc == 0 ? node : NULL;
}

/* ---- views ----------------------------------------------------------- */

static void begin_view(schema *s)
{
    s->now.n = 0;
    s->none = false;
}

static bool is_plain_ref(const hx_json *node)
{
    return hx_json_len(node) == 1 && hx_json_has(node, "$ref");
}

/* Whether node is in the view already. It must not be on its way into it, nor in it with
 * its branches being tried: then it refers to itself. */
static bool is_known(schema *s, const hx_json *node)
{
    bool known = false, loop = false;

    for (uint32_t i = 0; i < s->path.n; i++)
        loop |= s->path.p[i] == node;
    for (uint32_t i = 0; i < s->now.n; i++)
        if (s->now.p[i].node == node) {
            known = true;
            loop |= s->now.p[i].done != 0;
        }
    if (loop)
        hx_ir_fail(s->ir, HX_EFORMAT,
                   "schema: a $ref leads back to itself without going "
                   "into a member or an element");
    return known || loop;
}

/* Adds one more schema to the view, with all that it refers to. */
static void add_schema(schema *s, const hx_json *node)
{
    const hx_json *all, *to;

    if (s->ir->rc != 0)
        return;
    if (hx_json_kind(node) == HX_JSON_BOOL) {
        s->none |= !hx_json_bool(node, true);
        return;
    }
    if (hx_json_kind(node) != HX_JSON_OBJECT) {
        fail(s, HX_EFORMAT, "expected an object or a boolean, found",
             hx_str_c(hx_json_kind_name(node)));
        return;
    }
    if (hx_json_len(node) == 0 || is_known(s, node))
        return;
    if (s->path.n >= s->ir->opt.nesting)
        hx_ir_over(s->ir, "nesting");
    if (!hx_ir_work(s->ir, 50 + s->now.n) || !check_node(s, node) ||
        !HX_PUSH(s->ir, s->path, 1))
        return;
    s->path.p[s->path.n - 1] = node;
    if (!is_plain_ref(node))
        HX_ADD(s->ir, s->now, (part) { node, 0 });
    if (hx_json_has(node, "$ref") &&
        (to = resolve(s, hx_json_str(hx_json_get(node, "$ref")))) != NULL)
        add_schema(s, to);
    all = hx_json_get(node, "allOf");
    for (size_t i = 0; i < hx_json_len(all) && s->ir->rc == 0; i++)
        add_schema(s, hx_json_at(all, i));
    s->path.n--;
}

/* The rule of the view collected; 0: no value can satisfy it, or an error. */
static uint32_t end_view(schema *s)
{
    const uint32_t n = s->now.n;
    uint64_t hash = n;

    if (s->ir->rc != 0 || s->none)
        return 0;
    for (uint32_t i = 0; i < n; i++)
        hash =
            (hash ^ (uintptr_t)s->now.p[i].node ^ s->now.p[i].done) * 0x9e3779b97f4a7c15u;
    uint32_t *const head = &s->slot.p[hash >> 40 & (SLOTS - 1)];

    for (uint32_t v = *head; v != 0 && hx_ir_work(s->ir, 1); v = s->view.p[v].next)
        if (s->view.p[v].n == n && (n == 0 || memcmp(s->part.p + s->view.p[v].at,
                                                     s->now.p, n * sizeof(part)) == 0))
            return s->view.p[v].rule;
    if (!HX_PUSH(s->ir, s->view, 1) || !HX_PUSH(s->ir, s->part, n))
        return 0;
    view *const v = &s->view.p[s->view.n - 1];

    *v = (view) { .at = s->part.n - n, .n = n, .next = *head };
    v->rule = hx_ir_rule_new(s->ir, (hx_str) { NULL, 0 });
    if (n > 0)
        memcpy(s->part.p + v->at, s->now.p, n * sizeof(part));
    *head = s->view.n - 1;
    return v->rule;
}

static const hx_json *node_at(const schema *s, const view *v, uint32_t i)
{
    return s->part.p[v->at + i].node;
}

static hx_ref call(schema *s, uint32_t rule)
{
    return rule == 0 ? HX_NONE : hx_ir_call(s->ir, rule);
}

/* Whether some schema of the view has one of the keywords. */
static bool has_any(const schema *s, const view *v, const char *const *names)
{
    for (uint32_t i = 0; i < v->n; i++)
        for (const char *const *name = names; *name != NULL; name++)
            if (hx_json_has(node_at(s, v, i), *name))
                return true;
    return false;
}

/* Largest of a lower bound, smallest of an upper one. */
static uint32_t fold_bound(schema *s, const view *v, const char *name, bool lower)
{
    uint32_t out = lower ? 0 : HX_IR_NO_END;

    for (uint32_t i = 0; i < v->n; i++) {
        int64_t b;

        if (!hx_json_has(node_at(s, v, i), name))
            continue;
        b = hx_json_int(hx_json_get(node_at(s, v, i), name), 0);
        if (b < 0)
            fail(s, HX_EFORMAT, "negative", hx_str_c(name));
        b = HX_MIN(HX_MAX(b, 0), INT32_MAX);
        out = lower ? HX_MAX(out, (uint32_t)b) : HX_MIN(out, (uint32_t)b);
    }
    /* So large a maximum is none: it spares the counting. */
    return !lower && out == INT32_MAX ? HX_IR_NO_END : out;
}

/* ---- choices --------------------------------------------------------- */

/* The anyOf or oneOf that is to be resolved next; false: there is none. */
static bool next_choice(const schema *s, const view *v, choice *c)
{
    static const struct {
        const char *name;
        uintptr_t done;
    } words[] = { { "anyOf", ANYOF_DONE }, { "oneOf", ONEOF_DONE } };

    for (c->part = 0; c->part < v->n; c->part++) {
        const part p = s->part.p[v->at + c->part];

        for (size_t w = 0; w < HX_LEN(words); w++) {
            c->branches = hx_json_get(p.node, words[w].name);
            c->done = words[w].done;
            if ((p.done & c->done) == 0 && hx_json_has(p.node, words[w].name))
                return true;
        }
    }
    return false;
}

/* The rule of a branch beside all other parts; 0: no value can satisfy it. */
static uint32_t branch_rule(schema *s, const view *v, const choice *c, size_t branch)
{
    begin_view(s);
    if (!HX_PUSH(s->ir, s->now, v->n))
        return 0;
    memcpy(s->now.p, s->part.p + v->at, v->n * sizeof(part));
    s->now.p[c->part].done |= c->done;
    add_schema(s, hx_json_at(c->branches, branch));
    return end_view(s);
}

static hx_ref emit_choice(schema *s, const view *v, const choice *c)
{
    hx_refs way = { 0 };
    hx_ref e;

    for (size_t b = 0; b < hx_json_len(c->branches) && s->ir->rc == 0; b++) {
        e = call(s, branch_rule(s, v, c, b));
        HX_ADD(s->ir, way, e);
    }
    e = hx_ir_alt(s->ir, way.p, way.n);
    HX_DROP(s->ir, way);
    return e;
}

/* ---- bare text -------------------------------------------------------- */

static hx_ref any_char(hx_ir *ir)
{
    return hx_ir_set(ir, &(hx_range) { 1, 0x10ffff }, 1, false);
}

/* Whether no reader takes the text for a value of JSON or Python. */
static bool is_clear(hx_str text)
{
    static const char *const words[] = {
        "true", "false", "null", "True", "False", "None"
    };
    const uint8_t c = text.n > 0 ? (uint8_t)text.p[0] : 0;

    for (size_t i = 0; i < HX_LEN(words); i++)
        if (text.n >= strlen(words[i]) && memcmp(text.p, words[i], strlen(words[i])) == 0)
            return false;
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c >= 0x80;
}

/* ---- types and enumerated values ------------------------------------- */

static unsigned type_bits(schema *s, hx_str name)
{
    for (size_t i = 0; i < HX_LEN(type_names); i++)
        if (hx_str_is(name, type_names[i].name))
            return type_names[i].bits;
    fail(s, HX_EFORMAT, "unknown type", name);
    return 0;
}

static unsigned types_of(schema *s, const view *v)
{
    unsigned bits = T_ALL;

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *type = hx_json_get(node_at(s, v, i), "type");
        unsigned here = 0;

        if (type == NULL)
            continue;
        if (hx_json_kind(type) == HX_JSON_STRING)
            here = type_bits(s, hx_json_str(type));
        for (size_t k = 0; hx_json_kind(type) == HX_JSON_ARRAY && k < hx_json_len(type);
             k++)
            here |= type_bits(s, hx_json_str(hx_json_at(type, k)));
        if (hx_json_bool(hx_json_get(node_at(s, v, i), "nullable"), false))
            here |= T_NULL;
        bits &= here;
    }
    return bits;
}

static bool json_equal(schema *s, const hx_json *a, const hx_json *b)
{
    const hx_json_type kind = hx_json_kind(a);
    const unsigned both = type_of(a) & type_of(b);

    if (both == 0 || !hx_ir_work(s->ir, 3))
        return false;
    if (kind == HX_JSON_INT && hx_json_kind(b) == HX_JSON_INT)
        return hx_json_int(a, 0) == hx_json_int(b, 0);
    if ((both & T_NUM) != 0) {
        hx_decimal x, y;

        return hx_decimal_read(s->ir, &x, a) && hx_decimal_read(s->ir, &y, b) &&
               hx_decimal_cmp(&x, &y) == 0;
    }
    if (kind == HX_JSON_BOOL)
        return hx_json_bool(a, false) == hx_json_bool(b, false);
    if (kind == HX_JSON_STRING)
        return hx_str_eq(hx_json_str(a), hx_json_str(b));
    if (hx_json_len(a) != hx_json_len(b))
        return false;
    for (size_t i = 0; i < hx_json_len(a); i++) {
        hx_str key = { NULL, 0 };
        const hx_json *x =
            kind == HX_JSON_OBJECT ? hx_json_member(a, i, &key) : hx_json_at(a, i);

        if (kind == HX_JSON_OBJECT && !hx_json_has(b, key.p))
            return false;
        if (!json_equal(
                s, x, kind == HX_JSON_OBJECT ? hx_json_get(b, key.p) : hx_json_at(b, i)))
            return false;
    }
    return true;
}

static bool is_listed(schema *s, const hx_json *node, const hx_json *value)
{
    const hx_json *list = hx_json_get(node, "enum");

    if (hx_json_has(node, "const") && !json_equal(s, hx_json_get(node, "const"), value))
        return false;
    if (!hx_json_has(node, "enum"))
        return true;
    for (size_t i = 0; i < hx_json_len(list) && hx_ir_work(s->ir, 1); i++)
        if (json_equal(s, hx_json_at(list, i), value))
            return true;
    return false;
}

static bool number_bounds(schema *s, const view *v, hx_decimal *lo, hx_decimal *hi,
                          bool *has_lo, bool *has_hi);
static const char *const array_words[] = {
    "items",           "prefixItems",      "minItems", "maxItems",
    "additionalItems", "unevaluatedItems", NULL
};
static const char *const object_words[] = { "properties",
                                            "required",
                                            "additionalProperties",
                                            "patternProperties",
                                            "minProperties",
                                            "maxProperties",
                                            "propertyNames",
                                            "unevaluatedProperties",
                                            NULL };

static bool number_fits(schema *s, const view *v, const hx_json *value)
{
    static const char *const multiple[] = { "multipleOf", NULL };
    hx_decimal lo, hi, x;
    bool has_lo, has_hi;

    if (has_any(s, v, multiple))
        unsupported(s, "multipleOf beside enum or const");
    if (!number_bounds(s, v, &lo, &hi, &has_lo, &has_hi) ||
        !hx_decimal_read(s->ir, &x, value))
        return false;
    const int below = has_lo ? hx_decimal_cmp(&x, &lo) : 1;
    const int above = has_hi ? hx_decimal_cmp(&x, &hi) : -1;

    return (below > 0 || (below == 0 && !lo.strict)) &&
           (above < 0 || (above == 0 && !hi.strict));
}

static bool string_fits(schema *s, const view *v, hx_str text)
{
    uint32_t n = 0;

    for (size_t i = 0; i < text.n; i++)
        n += ((uint8_t)text.p[i] & 0xc0) != 0x80;
    if (n < fold_bound(s, v, "minLength", true) ||
        n > fold_bound(s, v, "maxLength", false))
        return false;
    for (uint32_t i = 0; i < v->n; i++) {
        const hx_str re = hx_json_str(hx_json_get(node_at(s, v, i), "pattern"));

        if (re.p != NULL &&
            !hx_lang_matches(s->ir, hx_regex_parse(s->ir, re, true, true), text))
            return false;
    }
    return true;
}

/* Whether a value that from lists satisfies the rest of the view. */
static bool value_fits(schema *s, const view *v, unsigned types, const hx_json *from,
                       const hx_json *value)
{
    const unsigned type = type_of(value);

    for (uint32_t i = 0; i < v->n; i++)
        if ((node_at(s, v, i) != from || hx_json_has(from, "const")) &&
            !is_listed(s, node_at(s, v, i), value))
            return false;
    if ((type & types) == 0 ||
        ((type & T_INT) == 0 && (type & T_NUM) != 0 && (types & T_NUM) == 0))
        return false;
    if ((type & T_NUM) != 0)
        return number_fits(s, v, value);
    if (type == T_STR)
        return string_fits(s, v, hx_json_str(value));
    if ((type == T_ARR && has_any(s, v, array_words)) ||
        (type == T_OBJ && has_any(s, v, object_words)))
        unsupported(s, "enum or const of arrays or objects beside keywords for them");
    return true;
}

/* A JSON value where JSON stands, the bare characters of a string where text does. */
static hx_ref spell(schema *s, const hx_json *value, spelling how)
{
    const hx_str text = hx_json_str(value);

    if (how == AS_JSON)
        return hx_json_literal(s->ir, value);
    if (hx_json_kind(value) != HX_JSON_STRING ||
        (how == AS_CLEAR_TEXT && !is_clear(text)))
        return HX_NONE;
    return hx_ir_lit(s->ir, text.p, text.n);
}

/* false: nothing is listed. */
static bool emit_listed(schema *s, const view *v, spelling how, hx_ref *e)
{
    const unsigned types = types_of(s, v);
    hx_refs way = { 0 };
    const hx_json *node = NULL, *list;
    bool one;

    for (uint32_t i = 0; i < v->n && node == NULL; i++)
        if (hx_json_has(node_at(s, v, i), "const") ||
            hx_json_has(node_at(s, v, i), "enum"))
            node = node_at(s, v, i);
    if (node == NULL)
        return false;
    one = hx_json_has(node, "const");
    list = hx_json_get(node, one ? "const" : "enum");
    for (size_t i = 0; i < (one ? 1 : hx_json_len(list)) && s->ir->rc == 0; i++) {
        const hx_json *value = one ? list : hx_json_at(list, i);

        if (value_fits(s, v, types, node, value) && HX_PUSH(s->ir, way, 1)) {
            const hx_ref lit = spell(s, value, how);

            way.p[way.n - 1] = lit;
        }
    }
    *e = hx_ir_alt(s->ir, way.p, way.n);
    HX_DROP(s->ir, way);
    return true;
}

/* ---- numbers --------------------------------------------------------- */

static void tighten(hx_decimal *best, bool *has, hx_decimal d, bool lower)
{
    const int c = *has ? hx_decimal_cmp(&d, best) : 0;

    if (!*has || (lower ? c > 0 : c < 0) || (c == 0 && d.strict))
        *best = d;
    *has = true;
}

/* One bound of one schema. Older drafts have the exclusive form as a boolean. */
static bool read_bound(schema *s, const hx_json *node, const char *name,
                       const char *strict, bool lower, hx_decimal *best, bool *has)
{
    const hx_json *x = hx_json_get(node, strict);
    const bool flag = hx_json_kind(x) == HX_JSON_BOOL;
    const hx_json *both[] = { hx_json_get(node, name), flag ? NULL : x };

    for (int i = 0; i < 2; i++) {
        hx_decimal d;

        if (both[i] == NULL)
            continue;
        if (!hx_decimal_read(s->ir, &d, both[i])) {
            unsupported(s, "a bound of more than 40 digits");
            return false;
        }
        d.strict = i == 1 || (flag && hx_json_bool(x, false));
        /* The bounds of a double, say, bound nothing that is written here. */
        if (d.exp > 39 && d.negative == lower)
            continue;
        tighten(best, has, d, lower);
    }
    return true;
}

static bool number_bounds(schema *s, const view *v, hx_decimal *lo, hx_decimal *hi,
                          bool *has_lo, bool *has_hi)
{
    *has_lo = *has_hi = false;
    *lo = *hi = (hx_decimal) { 0 };
    for (uint32_t i = 0; i < v->n; i++)
        if (!read_bound(s, node_at(s, v, i), "minimum", "exclusiveMinimum", true, lo,
                        has_lo) ||
            !read_bound(s, node_at(s, v, i), "maximum", "exclusiveMaximum", false, hi,
                        has_hi))
            return false;
    return true;
}

/* The one multipleOf of the view: *mod for whole ones, *frac for powers of ten below 1.
 */
static bool read_multiple(schema *s, const view *v, uint32_t *mod, int *frac)
{
    const hx_json *of = NULL;
    hx_decimal d;
    int64_t whole;

    *mod = 0;
    *frac = -1;
    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *here = hx_json_get(node_at(s, v, i), "multipleOf");

        if (here != NULL && of != NULL && !json_equal(s, here, of))
            unsupported(s, "more than one multipleOf for a number");
        of = here != NULL ? here : of;
    }
    if (of == NULL)
        return true;
    if (!hx_decimal_read(s->ir, &d, of) || d.negative || d.n == 0)
        return fail(s, HX_EFORMAT, "not positive:", HX_STR("multipleOf")), false;
    whole = hx_json_int(of, 0);
    if (whole >= 1 && whole <= 100)
        *mod = (uint32_t)whole;
    else if (d.n == 1 && d.digit[0] == '1' && d.exp <= 0 && d.exp > -15)
        *frac = 1 - d.exp;
    else
        unsupported(s,
                    "a multipleOf that is neither at most 100 nor 0.1, 0.01 and so on");
    return true;
}

static hx_ref emit_number(schema *s, const view *v, bool integer)
{
    hx_decimal lo, hi;
    bool has_lo, has_hi;
    uint32_t mod;
    int frac;

    if (!number_bounds(s, v, &lo, &hi, &has_lo, &has_hi) ||
        !read_multiple(s, v, &mod, &frac))
        return HX_NONE;
    integer |= mod > 0;
    if (!has_lo && !has_hi && mod <= 1 && (integer || frac < 0))
        return integer ? hx_json_integer(s->ir) : hx_json_number(s->ir);
    return hx_json_range(s->ir, has_lo ? &lo : NULL, has_hi ? &hi : NULL,
                         integer    ? 0
                         : frac > 0 ? frac
                                    : 15,
                         HX_MAX(mod, 1));
}

/* ---- strings --------------------------------------------------------- */

static hx_ref emit_string(schema *s, const view *v, spelling how)
{
    const bool json = how == AS_JSON;
    const uint32_t min = fold_bound(s, v, "minLength", true);
    const uint32_t max = fold_bound(s, v, "maxLength", false);
    hx_str re = { NULL, 0 };
    const char *format = NULL;
    hx_ref e;

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_str here = hx_json_str(hx_json_get(node_at(s, v, i), "pattern"));
        const hx_str name = hx_json_str(hx_json_get(node_at(s, v, i), "format"));

        if (here.p != NULL && re.p != NULL && !hx_str_eq(re, here))
            unsupported(s, "more than one pattern for a string");
        re = here.p != NULL ? here : re;
        format = name.p != NULL && format == NULL ? hx_json_format(name) : format;
    }
    if (min > max)
        return HX_NONE;
    if (re.p == NULL && format == NULL)
        return json ? hx_json_string(s->ir, min, max)
                    : hx_ir_rep(s->ir, any_char(s->ir), min, max,
                                max == HX_IR_NO_END ? HX_REP_EXPAND : HX_REP_AUTO);
    e = re.p != NULL ? hx_regex_parse(s->ir, re, json, true)
                     : hx_regex_parse(s->ir, hx_str_c(format), json, false);
    e = hx_lang_length(s->ir, e, min, max);
    if (!json)
        return e;
    return HX_SEQ(s->ir, hx_ir_str(s->ir, "\""), e, hx_ir_str(s->ir, "\""));
}

/* ---- arrays ---------------------------------------------------------- */

/* "items" as an array is what "prefixItems" was called before 2020. */
static const hx_json *prefix_of(const hx_json *node)
{
    const hx_json *items = hx_json_get(node, "items");

    return hx_json_kind(items) == HX_JSON_ARRAY ? items
                                                : hx_json_get(node, "prefixItems");
}

static const hx_json *rest_of(const hx_json *node)
{
    const bool old = hx_json_kind(hx_json_get(node, "items")) == HX_JSON_ARRAY;

    return hx_json_get(node, old ? "additionalItems" : "items");
}

/* The rule of element i; SIZE_MAX: of one behind all tuples. */
static uint32_t element_rule(schema *s, const view *v, size_t i)
{
    begin_view(s);
    for (uint32_t k = 0; k < v->n; k++) {
        const hx_json *node = node_at(s, v, k), *prefix = prefix_of(node);
        const bool closed = !s->ir->opt.open_objects && prefix != NULL;

        if (i < hx_json_len(prefix))
            add_schema(s, hx_json_at(prefix, i));
        else if (rest_of(node) != NULL)
            add_schema(s, rest_of(node));
        else if (closed || !hx_json_bool(hx_json_get(node, "unevaluatedItems"), true))
            s->none = true;
    }
    return end_view(s);
}

static hx_ref emit_array(schema *s, const view *v)
{
    const uint32_t min = fold_bound(s, v, "minItems", true);
    const uint32_t max = fold_bound(s, v, "maxItems", false);
    const hx_ref comma = hx_json_comma(s->ir);
    size_t n_tuple = 0;
    hx_ref rest;

    for (uint32_t i = 0; i < v->n; i++)
        n_tuple = HX_MAX(n_tuple, hx_json_len(prefix_of(node_at(s, v, i))));
    n_tuple = HX_MIN(n_tuple, max);
    if (min > max)
        return HX_NONE;
    /* From the back: rest is what may follow when i elements are there. */
    rest = HX_EMPTY;
    if (n_tuple < max) {
        const hx_ref one = call(s, element_rule(s, v, SIZE_MAX));
        const uint32_t more = (uint32_t)n_tuple, least = min > more ? min - more : 0;
        const uint32_t most = max == HX_IR_NO_END ? max : max - more;

        if (n_tuple > 0)
            rest = hx_ir_rep(s->ir, HX_SEQ(s->ir, comma, one), least, most, HX_REP_AUTO);
        else
            rest = HX_SEQ(s->ir, one,
                          hx_ir_rep(s->ir, HX_SEQ(s->ir, comma, one),
                                    least > 0 ? least - 1 : 0,
                                    most == HX_IR_NO_END ? most : most - 1, HX_REP_AUTO));
        if (n_tuple == 0 && min == 0)
            rest = hx_ir_opt(s->ir, rest);
    }
    for (size_t i = n_tuple; i > 0 && s->ir->rc == 0; i--) {
        rest = HX_SEQ(s->ir, i > 1 ? comma : HX_EMPTY, call(s, element_rule(s, v, i - 1)),
                      rest);
        if (i - 1 >= min)
            rest = hx_ir_opt(s->ir, rest);
    }
    return HX_SEQ(s->ir, hx_ir_str(s->ir, "["), rest, hx_ir_str(s->ir, "]"));
}

/* ---- objects: which members ------------------------------------------ */

static const hx_json *declared(const hx_json *node, hx_str key)
{
    return hx_json_get(hx_json_get(node, "properties"), key.p);
}

static hx_ref parse_pattern(schema *s, hx_str re)
{
    return hx_regex_parse(s->ir, re, true, true);
}

static bool name_fits(schema *s, const view *v, hx_str key)
{
    bool fits = true;

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *names = hx_json_get(node_at(s, v, i), "propertyNames");

        if (names == NULL || !HX_PUSH(s->ir, s->part, 1))
            continue;
        s->part.p[s->part.n - 1].node = names;
        fits &= hx_json_bool(names, true) &&
                string_fits(s, &(view) { .at = s->part.n - 1, .n = 1 }, key);
        s->part.n--;
    }
    return fits;
}

/* The view of the member named key. */
static uint32_t member_rule(schema *s, const view *v, hx_str key)
{
    begin_view(s);
    for (uint32_t i = 0; i < v->n && s->ir->rc == 0; i++) {
        const hx_json *node = node_at(s, v, i), *here = declared(node, key);
        const hx_json *patterns = hx_json_get(node, "patternProperties");
        bool known = here != NULL;

        if (known)
            add_schema(s, here);
        for (size_t k = 0; k < hx_json_len(patterns) && s->ir->rc == 0; k++) {
            hx_str re;
            const hx_json *value = hx_json_member(patterns, k, &re);

            if (!hx_lang_matches(s->ir, parse_pattern(s, re), key))
                continue;
            known = true;
            add_schema(s, value);
        }
        if (!known && hx_json_has(node, "additionalProperties"))
            add_schema(s, hx_json_get(node, "additionalProperties"));
    }
    return end_view(s);
}

static void add_prop(schema *s, const view *v, hx_str key)
{
    const uint32_t rule = name_fits(s, v, key) ? member_rule(s, v, key) : 0;

    HX_ADD(s->ir, s->prop, (prop) { key, rule, false });
}

/* Marks or adds; names are looked for from where the last one was, since "required"
 * mostly has the order of "properties". */
static void require(schema *s, const view *v, hx_str key)
{
    for (uint32_t k = 0; k < s->prop.n && hx_ir_work(s->ir, 1); k++)
        if (hx_str_eq(s->prop.p[k].key, key)) {
            s->prop.p[k].required = true;
            return;
        }
    add_prop(s, v, key);
    if (s->ir->rc == 0)
        s->prop.p[s->prop.n - 1].required = true;
}

/* Fills s->prop: the declared members, then those that are only required. */
static void collect_props(schema *s, const view *v)
{
    s->prop.n = 0;
    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *props = hx_json_get(node_at(s, v, i), "properties");

        for (size_t k = 0; k < hx_json_len(props) && s->ir->rc == 0; k++) {
            hx_str key;
            bool seen = false;

            hx_json_member(props, k, &key);
            for (uint32_t j = 0; j < i; j++)
                seen |= declared(node_at(s, v, j), key) != NULL;
            if (!seen)
                add_prop(s, v, key);
        }
    }
    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *names = hx_json_get(node_at(s, v, i), "required");

        /* Older drafts have "required": true inside of a member. */
        for (size_t k = 0; hx_json_kind(names) == HX_JSON_ARRAY &&
                           k < hx_json_len(names) && s->ir->rc == 0;
             k++) {
            const hx_str key = hx_json_str(hx_json_at(names, k));

            if (key.p == NULL)
                fail(s, HX_EFORMAT, "not a list of names:", HX_STR("required"));
            else
                require(s, v, key);
        }
    }
}

/* Whether members that no schema declares are allowed. */
static bool is_open(const schema *s, const view *v)
{
    bool lists = false, says = false;

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *node = node_at(s, v, i);

        if (!hx_json_bool(hx_json_get(node, "additionalProperties"), true) ||
            !hx_json_bool(hx_json_get(node, "unevaluatedProperties"), true))
            return false;
        lists |= hx_json_len(hx_json_get(node, "properties")) > 0 ||
                 hx_json_len(hx_json_get(node, "patternProperties")) > 0;
        says |= hx_json_has(node, "additionalProperties") ||
                hx_json_has(node, "unevaluatedProperties");
    }
    return says || !lists || s->ir->opt.open_objects;
}

/* Those texts of e that are no name of a declared member. */
static hx_ref undeclared(schema *s, hx_ref e)
{
    strs names = { 0 };

    for (uint32_t k = 0; k < s->prop.n; k++)
        HX_ADD(s->ir, names, s->prop.p[k].key);
    e = hx_lang_without(s->ir, e, names.p, names.n);
    HX_DROP(s->ir, names);
    return e;
}

/* The rule of members that no schema declares. */
static uint32_t additional_rule(schema *s, const view *v)
{
    begin_view(s);
    for (uint32_t i = 0; i < v->n && s->ir->rc == 0; i++)
        if (hx_json_has(node_at(s, v, i), "additionalProperties"))
            add_schema(s, hx_json_get(node_at(s, v, i), "additionalProperties"));
    return end_view(s);
}

/* Any key but the declared ones, within "propertyNames". Without escapes, so that it
 * cannot spell a declared one in another way. */
static hx_ref other_key(schema *s, const view *v)
{
    hx_range plain[] = { { ' ', '!' }, { '#', '[' }, { ']', 0x10ffff } };
    hx_ref e = hx_ir_rep(s->ir, hx_ir_set(s->ir, plain, HX_LEN(plain), false), 0,
                         HX_IR_NO_END, HX_REP_EXPAND);
    const hx_json *names = NULL;
    uint32_t min = 0, max = HX_IR_NO_END;

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *here = hx_json_get(node_at(s, v, i), "propertyNames");

        if (hx_json_kind(here) != HX_JSON_OBJECT)
            continue;
        if (names != NULL || hx_json_has(here, "enum") || hx_json_has(here, "$ref") ||
            hx_json_has(here, "anyOf") || hx_json_has(here, "allOf") ||
            hx_json_has(here, "oneOf") || hx_json_has(here, "const"))
            unsupported(s, "propertyNames with more than a pattern and lengths");
        names = here;
    }
    if (names != NULL && check_node(s, names)) {
        min = (uint32_t)HX_MIN(HX_MAX(hx_json_int(hx_json_get(names, "minLength"), 0), 0),
                               INT32_MAX);
        max = (uint32_t)HX_MIN(
            HX_MAX(hx_json_int(hx_json_get(names, "maxLength"), INT32_MAX), 0),
            INT32_MAX);
        if (hx_json_has(names, "pattern"))
            e = parse_pattern(s, hx_json_str(hx_json_get(names, "pattern")));
    }
    if (max == INT32_MAX)
        max = HX_IR_NO_END;
    if (min == 0 && max == HX_IR_NO_END)
        return undeclared(s, e);
    if (s->prop.n > 0)
        unsupported(s, "propertyNames with lengths beside properties");
    return hx_lang_length(s->ir, e, min, max);
}

static void add_pattern(schema *s, hx_ref key, uint32_t rule)
{
    if (rule != 0)
        HX_ADD(s->ir, s->pattern, (pattern) { key, rule });
}

/* Members by pattern: with no others, and no two patterns for one name. */
static void collect_patterns(schema *s, const view *v)
{
    hx_refs seen = { 0 };

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *patterns = hx_json_get(node_at(s, v, i), "patternProperties");

        for (size_t k = 0; k < hx_json_len(patterns) && s->ir->rc == 0; k++) {
            hx_str re;
            const hx_json *value = hx_json_member(patterns, k, &re);
            const hx_ref e = parse_pattern(s, re);

            for (uint32_t j = 0; j < seen.n && s->ir->rc == 0; j++)
                if (!hx_lang_disjoint(s->ir, seen.p[j], e))
                    unsupported(s, "patternProperties whose patterns overlap");
            HX_ADD(s->ir, seen, e);
            begin_view(s);
            add_schema(s, value);
            add_pattern(s, undeclared(s, e), end_view(s));
        }
    }
    HX_DROP(s->ir, seen);
}

/* Fills s->pattern: the kinds of members that are not in s->prop. */
static void collect_others(schema *s, const view *v)
{
    static const char *const patterns[] = { "patternProperties", NULL };
    static const char *const names[] = { "propertyNames", NULL };

    s->pattern.n = 0;
    if (has_any(s, v, patterns)) {
        if (v->n > 1 || is_open(s, v) || has_any(s, v, names))
            unsupported(
                s, "patternProperties beside allOf, propertyNames or additional members");
        collect_patterns(s, v);
        return;
    }
    if (!is_open(s, v))
        return;
    const hx_ref key = other_key(s, v);

    add_pattern(s, key, additional_rule(s, v));
}

/* ---- objects: in which order ----------------------------------------- */

/* The rules of an object are places in it: behind an opening quote, with i of s->prop
 * gone by (the last place, n_prop, is for other members) and count members written.
 * Counts beyond what bounds ask for are one. The comma and the quote are before the
 * place, so that all keys that may follow make one trie. */
typedef struct {
    uint32_t first; /* rule of place (0, 0) */
    uint32_t n_count, min, max;
    bool closable; /* no member that is still ahead is required */
} places;

static uint32_t place(const places *o, uint32_t i, uint32_t count)
{
    return o->first + i * o->n_count + HX_MIN(count, o->n_count - 1);
}

/* Behind a value, or the opening brace with count 0: the end, or the next place. */
static hx_ref after_value(schema *s, const places *o, uint32_t i, uint32_t count)
{
    hx_ir *ir = s->ir;
    const hx_ref comma = count > 0 ? hx_json_comma(ir) : HX_EMPTY;
    const hx_ref next =
        HX_SEQ(ir, comma, hx_ir_str(ir, "\""), hx_ir_goto(ir, place(o, i, count)));

    return HX_ALT(ir, o->closable && count >= o->min ? hx_ir_str(ir, "}") : HX_NONE,
                  count < o->max ? next : HX_NONE);
}

/* A member behind its quote; a declared key is spelled in one way, without its quote. */
static hx_ref member(hx_ir *ir, hx_ref key, uint32_t rule, hx_ref then)
{
    return HX_SEQ(ir, key, hx_ir_str(ir, "\""), hx_json_colon(ir), hx_ir_call(ir, rule),
                  then);
}

/* The members that may be written at place (i, count). */
static hx_ref members_at(schema *s, const places *o, uint32_t i, uint32_t count)
{
    hx_ir *ir = s->ir;
    const hx_ref then = after_value(s, o, HX_MIN(i + 1, s->prop.n), count + 1);
    hx_ref all = HX_NONE;

    if (i < s->prop.n && s->prop.p[i].rule != 0)
        all = member(ir, hx_json_name(ir, s->prop.p[i].key), s->prop.p[i].rule, then);
    for (uint32_t k = 0; i == s->prop.n && k < s->pattern.n; k++)
        all =
            HX_ALT(ir, all, member(ir, s->pattern.p[k].key, s->pattern.p[k].rule, then));
    return all;
}

static bool plan_places(schema *s, const view *v, places *o)
{
    uint32_t n_required = 0;

    *o = (places) { .min = fold_bound(s, v, "minProperties", true),
                    .max = fold_bound(s, v, "maxProperties", false),
                    .closable = true };
    for (uint32_t k = 0; k < s->prop.n; k++)
        n_required += s->prop.p[k].required;
    if (o->min > o->max || n_required > o->max)
        return false;
    /* Bounds that hold anyway. */
    if (o->min <= n_required)
        o->min = 0;
    if (s->pattern.n == 0 && o->max >= s->prop.n)
        o->max = HX_IR_NO_END;
    /* Other names may repeat, which a reader counts once. */
    if (s->pattern.n > 0 && o->min > 1)
        unsupported(s, "minProperties above 1 where undeclared members are allowed");
    o->n_count = 1 + HX_MAX(o->max == HX_IR_NO_END ? o->min : o->max, 1);
    if ((uint64_t)o->n_count * (s->prop.n + 1) > s->ir->opt.rules)
        hx_ir_over(s->ir, "rules");
    o->first = s->ir->rule.n;
    for (uint32_t i = 0; s->ir->rc == 0 && i < o->n_count * (s->prop.n + 1); i++)
        hx_ir_rule_new(s->ir, (hx_str) { NULL, 0 });
    return s->ir->rc == 0;
}

static hx_ref emit_object(schema *s, const view *v)
{
    hx_ir *ir = s->ir;
    places o;

    collect_props(s, v);
    collect_others(s, v);
    if (ir->rc != 0 || !plan_places(s, v, &o))
        return HX_NONE;
    for (uint32_t i = s->prop.n; i != HX_IR_NO_END && ir->rc == 0; i--) {
        const bool required = i < s->prop.n && s->prop.p[i].required;
        hx_ref here = HX_NONE;

        for (uint32_t c = o.n_count; c-- > 0 && ir->rc == 0;) {
            const bool last = i == s->prop.n || required;

            /* The two largest counts lead to the same place. */
            if (c + 2 != o.n_count)
                here = members_at(s, &o, i, c);
            const hx_ref skip = last ? HX_NONE : hx_ir_goto(ir, place(&o, i + 1, c));
            const hx_ref body = HX_ALT(ir, here, skip);

            if (ir->rc == 0)
                ir->rule.p[place(&o, i, c)].body = body;
        }
        o.closable &= !required;
    }
    return HX_SEQ(ir, hx_ir_str(ir, "{"), after_value(s, &o, 0, 0));
}

/* ---- values ---------------------------------------------------------- */

static hx_ref emit_types(schema *s, const view *v)
{
    hx_ir *ir = s->ir;
    const unsigned types = types_of(s, v);
    hx_ref e[6] = { HX_NONE };

    if ((types & T_OBJ) != 0)
        e[0] = has_any(s, v, object_words) ? emit_object(s, v) : hx_json_object(ir);
    if ((types & T_ARR) != 0)
        e[1] = has_any(s, v, array_words) ? emit_array(s, v) : hx_json_array(ir);
    if ((types & T_STR) != 0)
        e[2] = emit_string(s, v, AS_JSON);
    if ((types & (T_INT | T_NUM)) != 0)
        e[3] = emit_number(s, v, (types & T_NUM) == 0);
    if ((types & T_BOOL) != 0)
        e[4] = HX_ALT(ir, hx_ir_str(ir, "true"), hx_ir_str(ir, "false"));
    if ((types & T_NULL) != 0)
        e[5] = hx_ir_str(ir, "null");
    return hx_ir_alt(ir, e, HX_LEN(e));
}

static hx_ref emit_view(schema *s, const view *v)
{
    choice c;
    hx_ref e;

    if (v->n == 0)
        return hx_json_any(s->ir);
    if (!hx_ir_work(s->ir, 100 * (uint64_t)v->n))
        return HX_NONE;
    if (next_choice(s, v, &c))
        return emit_choice(s, v, &c);
    return emit_listed(s, v, AS_JSON, &e) ? e : emit_types(s, v);
}

bool hx_schema_is_small(hx_ir *ir, hx_str text)
{
    uint32_t depth = 0, elements = 0;
    bool in_string = false;

    if (text.n > ir->opt.source_bytes)
        hx_ir_over(ir, "source_bytes");
    for (size_t i = 0; i < text.n && ir->rc == 0; i++) {
        const char c = text.p[i];

        if (in_string && c == '\\')
            i++;
        else if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == '{' || c == '['))
            depth++;
        else if (!in_string && (c == '}' || c == ']'))
            depth -= depth > 0;
        else if (!in_string && c == ',')
            elements++;
        if (depth > ir->opt.nesting)
            hx_ir_over(ir, "nesting");
        else if (elements > ir->opt.nodes / 4)
            hx_ir_over(ir, "nodes");
    }
    return ir->rc == 0;
}

/* Runs make() on an open schema, then fills in the rules of all views. */
static hx_ref with_schema(hx_ir *ir, const hx_json *root,
                          hx_ref (*make)(schema *s, const void *ud), const void *ud)
{
    schema s = { .ir = ir, .root = root };
    hx_ref e = HX_NONE;

    if (HX_PUSH(ir, s.slot, SLOTS) && HX_PUSH(ir, s.view, 1)) {
        e = make(&s, ud);
        for (uint32_t i = 1; i < s.view.n && ir->rc == 0; i++) {
            const view v = s.view.p[i];
            const hx_ref body = emit_view(&s, &v);

            if (ir->rc == 0)
                ir->rule.p[v.rule].body = body;
        }
    }
    HX_DROP(ir, s.part);
    HX_DROP(ir, s.view);
    HX_DROP(ir, s.slot);
    HX_DROP(ir, s.now);
    HX_DROP(ir, s.path);
    HX_DROP(ir, s.prop);
    HX_DROP(ir, s.pattern);
    return ir->rc == 0 ? e : HX_NONE;
}

static uint32_t rule_of_schema(schema *s, const hx_json *node)
{
    begin_view(s);
    if (s->ir->rc == 0)
        add_schema(s, node);
    return end_view(s);
}

static hx_ref make_value(schema *s, const void *ud)
{
    (void)ud;
    return call(s, rule_of_schema(s, s->root));
}

hx_ref hx_schema_value(hx_ir *ir, const hx_json *root)
{
    return with_schema(ir, root, make_value, NULL);
}

hx_ref hx_schema_parse(hx_ir *ir, hx_str source)
{
    hx_json *root = NULL;
    hx_ref e;

    if (ir->rc != 0 || !hx_schema_is_small(ir, source))
        return HX_NONE;
    if ((ir->rc = hx_json_parse(&root, source, (int)ir->opt.nesting + 1, ir->err)) != 0)
        return HX_NONE;
    e = hx_schema_value(ir, root);
    hx_json_free(root);
    return e;
}

/* ---- arguments as tagged pairs ----------------------------------------- */

static view view_of(const schema *s, uint32_t rule)
{
    uint32_t i = s->view.n - 1;

    while (i > 0 && s->view.p[i].rule != rule)
        i--;
    return s->view.p[i];
}

/* Strings of the rule's view, bare. */
static hx_ref text_of(schema *s, uint32_t rule, spelling how, uint32_t depth)
{
    const view v = view_of(s, rule);
    hx_ref e = HX_NONE;
    choice c;

    if (depth > s->ir->opt.nesting)
        hx_ir_over(s->ir, "nesting");
    if (rule == 0 || s->ir->rc != 0 || !hx_ir_work(s->ir, 100))
        return HX_NONE;
    if (next_choice(s, &v, &c)) {
        for (size_t b = 0; b < hx_json_len(c.branches) && s->ir->rc == 0; b++)
            e = HX_ALT(s->ir, e, text_of(s, branch_rule(s, &v, &c, b), how, depth + 1));
        return e;
    }
    if ((types_of(s, &v) & T_STR) == 0)
        return HX_NONE;
    return emit_listed(s, &v, how, &e) ? e : emit_string(s, &v, how);
}

/* What is known of the values of a view that may be text or JSON: the types that it takes
 * whatever their value, and whether strings are bound in some way. */
typedef struct {
    unsigned loose;
    bool listed, bound; /* bound: by more than a length, or in several ways */
    uint32_t n_string, min, max;
} looseness;

static void find_loose(schema *s, uint32_t rule, looseness *l, uint32_t depth)
{
    static const char *const texts[] = { "pattern", "format", NULL };
    static const char *const numbers[] = { "minimum",          "maximum",
                                           "exclusiveMinimum", "exclusiveMaximum",
                                           "multipleOf",       NULL };
    static const char *const lists[] = { "enum", "const", NULL };
    const view v = view_of(s, rule);
    unsigned types;
    choice c;

    if (depth > s->ir->opt.nesting)
        hx_ir_over(s->ir, "nesting");
    if (rule == 0 || s->ir->rc != 0 || !hx_ir_work(s->ir, 100))
        return;
    if (next_choice(s, &v, &c)) {
        for (size_t b = 0; b < hx_json_len(c.branches) && s->ir->rc == 0; b++)
            find_loose(s, branch_rule(s, &v, &c, b), l, depth + 1);
        return;
    }
    types = types_of(s, &v);
    if (has_any(s, &v, lists)) {
        l->listed |= (types & T_STR) != 0;
        return;
    }
    if ((types & T_STR) != 0) {
        l->min = fold_bound(s, &v, "minLength", true);
        l->max = fold_bound(s, &v, "maxLength", false);
        l->bound |= has_any(s, &v, texts) || l->n_string++ > 0;
    }
    if (has_any(s, &v, numbers))
        types &= ~(unsigned)(T_INT | T_NUM);
    if (has_any(s, &v, array_words))
        types &= ~(unsigned)T_ARR;
    if (has_any(s, &v, object_words))
        types &= ~(unsigned)T_OBJ;
    l->loose |= types;
}

/* Text of that length that cannot be read as a value of one of the types, nor, where the
 * length matters, as a quoted string. */
static hx_ref text_but(hx_ir *ir, unsigned types, uint32_t min, uint32_t max)
{
    static const struct {
        unsigned type;
        const char *first; /* characters that such a value may begin with */
    } starts[] = {
        { T_INT | T_NUM, "+-.0123456789" },
        { T_ARR, "[(" },
        { T_OBJ, "{" },
        { T_BOOL, "tfTF" },
        { T_NULL, "nN" },
    };
    hx_range set[40], out[41];
    uint32_t n = 1, n_out;
    const bool counts = min > 0 || max != HX_IR_NO_END;
    hx_ref rest;

    if (min > max)
        return HX_NONE;
    set[0] = (hx_range) { 0, types != 0 ? ' ' : 0 }; /* blanks go before it is read */
    for (size_t i = 0; i < HX_LEN(starts); i++)
        for (const char *c = starts[i].first; (types & starts[i].type) && *c; c++)
            set[n++] = (hx_range) { (uint8_t)*c, (uint8_t)*c };
    if (counts)
        set[n++] = (hx_range) { '"', '"' };
    n = (uint32_t)hx_range_norm(set, n);
    n_out = (uint32_t)hx_range_invert(set, n, out);
    if (max == 0)
        return HX_EMPTY;
    rest = hx_ir_rep(ir, any_char(ir), min > 0 ? min - 1 : 0,
                     max == HX_IR_NO_END ? max : max - 1,
                     max == HX_IR_NO_END ? HX_REP_EXPAND : HX_REP_AUTO);
    rest = HX_SEQ(ir, hx_ir_set(ir, out, n_out, false), rest);
    return min > 0 ? rest : hx_ir_opt(ir, rest);
}

/* What a value of the rule's view looks like, whose text is read as JSON where that gives
 * one of the types: the text itself, JSON, or either where that is no ambiguity. */
static hx_ref tagged_value(schema *s, uint32_t rule, unsigned types)
{
    looseness l = { 0 };
    hx_ref text = HX_NONE;

    if (rule == 0)
        return HX_NONE;
    if (types == HX_TYPE_STRING)
        return text_of(s, rule, AS_TEXT, 0);
    if ((types & (HX_TYPE_STRING | HX_TYPE_ANY)) == 0)
        return call(s, rule);
    types = (types & HX_TYPE_ANY) != 0 ? T_ALL : types & T_ALL;
    find_loose(s, rule, &l, 0);
    if (!l.listed && !l.bound && (l.loose & T_STR) != 0)
        text = text_but(s->ir, types & ~l.loose, l.min, l.max);
    else if (l.listed && !l.bound && (l.loose & T_STR) == 0)
        text = text_of(s, rule, AS_CLEAR_TEXT, 0);
    return HX_ALT(s->ir, call(s, rule), text);
}

static hx_ref pair(schema *s, const hx_schema_tags *t, hx_ref key, hx_ref value)
{
    return HX_SEQ(s->ir, t->key, key, t->key_end, t->value, value, t->value_end);
}

/* The names of arguments that no schema declares: short words. */
static hx_ref other_name(schema *s)
{
    hx_range word[] = {
        { '-', '.' }, { '0', '9' }, { 'A', 'Z' }, { '_', '_' }, { 'a', 'z' }
    };
    const hx_ref e = hx_ir_rep(s->ir, hx_ir_set(s->ir, word, HX_LEN(word), false), 1, 64,
                               HX_REP_EXPAND);

    return undeclared(s, e);
}

/* Pairs of arguments that are not declared; HX_NONE: none are allowed. */
static hx_ref other_pair(schema *s, const view *v, const hx_schema_tags *t)
{
    bool lists = false, says = false;

    for (uint32_t i = 0; i < v->n; i++) {
        const hx_json *more = hx_json_get(node_at(s, v, i), "additionalProperties");

        if (!hx_json_bool(more, true))
            return HX_NONE;
        if (hx_json_len(hx_json_get(node_at(s, v, i), "patternProperties")) > 0)
            unsupported(s, "patternProperties among the arguments of a call");
        lists |= hx_json_has(node_at(s, v, i), "properties");
        says |= more != NULL;
    }
    if (!says && lists)
        return HX_NONE;
    const uint32_t rule = additional_rule(s, v);

    return pair(s, t, other_name(s), tagged_value(s, rule, HX_TYPE_ANY));
}

/* In any order, so that a model may give what it knows first; more than fit one rule of
 * that kind come in the order of the schema. */
static hx_ref all_pairs(schema *s, const hx_ref *one, uint32_t n, hx_ref other)
{
    hx_refs way = { 0 };
    uint32_t must = 0;
    hx_ref e;

    if (n <= HX_ANY_ORDER_MAX) {
        for (uint32_t i = 0; i < n; i++)
            must |= (uint32_t)s->prop.p[i].required << i;
        return hx_ir_any_order(s->ir, one, n, must, other);
    }
    if (!HX_PUSH(s->ir, way, n + 1))
        return HX_NONE;
    for (uint32_t i = 0; i < n; i++)
        way.p[i] = s->prop.p[i].required ? one[i] : hx_ir_opt(s->ir, one[i]);
    way.p[n] = hx_ir_rep(s->ir, other, 0, HX_IR_NO_END, HX_REP_EXPAND);
    e = hx_ir_seq(s->ir, way.p, way.n);
    HX_DROP(s->ir, way);
    return e;
}

static hx_ref make_pairs(schema *s, const void *ud)
{
    const hx_schema_tags *t = ud;
    const uint32_t rule = rule_of_schema(s, s->root);
    const view v = view_of(s, rule);
    hx_refs one = { 0 };
    choice c;
    hx_ref e = HX_NONE;

    if (s->ir->rc != 0)
        return HX_NONE;
    if (rule == 0)
        hx_ir_fail(s->ir, HX_EFORMAT, "schema: no arguments can satisfy it");
    else if ((types_of(s, &v) & T_OBJ) == 0)
        hx_ir_fail(s->ir, HX_EFORMAT,
                   "schema: arguments are an object, not what it says");
    else if (next_choice(s, &v, &c))
        unsupported(s, "a choice between sets of arguments");
    collect_props(s, &v);
    for (uint32_t i = 0; i < s->prop.n && s->ir->rc == 0; i++) {
        const prop p = s->prop.p[i];
        const unsigned types = hx_reply_types(s->root, p.key.p);
        const hx_ref value = tagged_value(s, p.rule, types);

        HX_ADD(s->ir, one,
               value == HX_NONE ? HX_NONE
                                : pair(s, t, hx_ir_lit(s->ir, p.key.p, p.key.n), value));
    }
    if (s->ir->rc == 0)
        e = all_pairs(s, one.p, one.n, other_pair(s, &v, t));
    HX_DROP(s->ir, one);
    return e;
}

hx_ref hx_schema_pairs(hx_ir *ir, const hx_json *root, const hx_schema_tags *t)
{
    return ir->rc != 0 ? HX_NONE : with_schema(ir, root, make_pairs, t);
}
