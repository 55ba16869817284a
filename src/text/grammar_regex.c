/* grammar_regex.c - regular expressions as ECMA-262 writes them, without flags.
 *
 * Called by grammar.c and the schema front end. Greedy, lazy and capturing make no
 * difference to what a text may be, so they are read and forgotten. What is not regular
 * or looks around is refused (HX_EUNSUP). "^" and "$" are taken at the ends of the whole
 * or of all branches of a group that is at that end. */
#include "text/grammar_ir.h"

typedef struct {
    hx_ir *ir;
    hx_scan in;
    uint32_t depth;
    bool json;
    hx_ranges set; /* of the class being read */
} parser;

/* A piece of expression and whether it is tied to the begin and the end of the text. */
typedef struct {
    hx_ref e;
    bool begin, end;
} part;

static const hx_range digits[] = { { '0', '9' } };
static const hx_range words[] = {
    { '0', '9' }, { 'A', 'Z' }, { '_', '_' }, { 'a', 'z' }
};
/* ECMA-262 WhiteSpace and LineTerminator. */
static const hx_range spaces[] = {
    { 9, 13 },          { ' ', ' ' },       { 0xa0, 0xa0 },     { 0x1680, 0x1680 },
    { 0x2000, 0x200a }, { 0x2028, 0x2029 }, { 0x202f, 0x202f }, { 0x205f, 0x205f },
    { 0x3000, 0x3000 }, { 0xfeff, 0xfeff },
};
static const hx_range lines[] = { { 10, 10 }, { 13, 13 }, { 0x2028, 0x2029 } };

static int fail(parser *s, int code, const char *what)
{
    return hx_ir_fail(s->ir, code, "regex: byte %zu: %s", s->in.i, what);
}

static int peek(const parser *s, size_t ahead)
{
    return hx_scan_peek(&s->in, ahead);
}

static bool eat(parser *s, const char *lit)
{
    return hx_scan_eat(&s->in, lit);
}

/* ---- classes --------------------------------------------------------- */

static void add_ranges(parser *s, const hx_range *r, size_t n, bool invert)
{
    hx_range out[HX_LEN(spaces) + 1];
    const uint32_t at = s->set.n;

    if (invert) {
        n = hx_range_invert(r, n, out);
        r = out;
    }
    if (HX_PUSH(s->ir, s->set, (uint32_t)n))
        memcpy(s->set.p + at, r, n * sizeof(*r));
}

/* \d \w \s and their opposites; false: c is none of them. */
static bool add_shorthand(parser *s, int c)
{
    switch (c) {
    case 'd':
    case 'D':
        add_ranges(s, digits, HX_LEN(digits), c == 'D');
        return true;
    case 'w':
    case 'W':
        add_ranges(s, words, HX_LEN(words), c == 'W');
        return true;
    case 's':
    case 'S':
        add_ranges(s, spaces, HX_LEN(spaces), c == 'S');
        return true;
    default:
        return false;
    }
}

/* n hexadecimal digits, or with n 0 any number of them up to "}". */
static uint32_t read_hex(parser *s, int n)
{
    uint32_t v = 0;
    int got = 0;

    for (int d; (n == 0 || got < n) && (d = hx_hex_digit(peek(s, 0))) >= 0;
         s->in.i++, got++)
        v = v > 0x10ffff ? v : v * 16 + (uint32_t)d;
    if (got == 0 || (n > 0 && got != n) || (n == 0 && !eat(s, "}")) || v > 0x10ffff) {
        fail(s, HX_EFORMAT, "bad hexadecimal escape");
        return 0;
    }
    return v;
}

/* What a backslash before one character means; s->in.i is behind the backslash. */
static uint32_t read_escape(parser *s, bool in_class)
{
    static const char letter[] = "tnvfr", value[] = "\t\n\v\f\r";
    const int c = peek(s, 0);
    const char *at = c > 0 ? strchr(letter, c) : NULL;
    uint32_t v;

    if (c < 0 || c >= 0x80) {
        fail(s, HX_EFORMAT, c < 0 ? "\"\\\" at the end" : "unknown escape");
        return 0;
    }
    s->in.i++;
    if (at != NULL)
        return (uint8_t)value[at - letter];
    if (c == 'b' && in_class)
        return '\b';
    if (c == '0' && !(peek(s, 0) >= '0' && peek(s, 0) <= '9'))
        return 0;
    if (c == 'x')
        return eat(s, "{") ? read_hex(s, 0) : read_hex(s, 2);
    if (c == 'u') {
        if (eat(s, "{"))
            return read_hex(s, 0);
        v = read_hex(s, 4);
        if (v >= 0xd800 && v < 0xdc00 && eat(s, "\\u"))
            v = 0x10000 + ((v - 0xd800) << 10) + (read_hex(s, 4) - 0xdc00);
        if ((v >= 0xd800 && v < 0xe000) || v > 0x10ffff)
            fail(s, HX_EFORMAT, "half a surrogate pair");
        return v;
    }
    if (c == 'c' && ((peek(s, 0) | 0x20) >= 'a' && (peek(s, 0) | 0x20) <= 'z'))
        return (uint32_t)(s->in.p[s->in.i++] & 31);
    s->in.i--;
    if (c == 'b' || c == 'B' || c == 'p' || c == 'P' || c == 'k' ||
        (c >= '0' && c <= '9'))
        fail(s, HX_EUNSUP, "\\b, \\B, \\p, \\k and back-references are not supported");
    else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
        fail(s, HX_EFORMAT, "unknown escape");
    s->in.i++;
    return (uint32_t)c;
}

static uint32_t read_char(parser *s)
{
    uint32_t cp = 0;
    const int len = hx_utf8_next(s->in.p + s->in.i, s->in.n - s->in.i, &cp);

    hx_assert(len > 0);
    s->in.i += (size_t)len;
    return cp;
}

/* One end of a range. true: it was a shorthand, already added. */
static bool read_class_atom(parser *s, uint32_t *cp)
{
    if (peek(s, 0) == '[' && peek(s, 1) == ':')
        fail(s, HX_EUNSUP, "POSIX classes are not supported");
    if (!eat(s, "\\")) {
        *cp = read_char(s);
        return false;
    }
    if (add_shorthand(s, peek(s, 0))) {
        s->in.i++;
        return true;
    }
    *cp = read_escape(s, true);
    return false;
}

static hx_ref read_class(parser *s)
{
    const bool invert = eat(s, "^");

    s->set.n = 0;
    if (peek(s, 0) == ']')
        fail(s, HX_EUNSUP, "an empty class");
    while (s->ir->rc == 0 && !eat(s, "]")) {
        uint32_t lo = 0, hi = 0;

        if (s->in.i >= s->in.n) {
            fail(s, HX_EFORMAT, "class without \"]\"");
            break;
        }
        if (read_class_atom(s, &lo))
            continue;
        hi = lo;
        if (peek(s, 0) == '-' && peek(s, 1) >= 0 && peek(s, 1) != ']') {
            s->in.i++;
            if (read_class_atom(s, &hi)) {
                hi = lo;
                add_ranges(s, &(hx_range) { '-', '-' }, 1, false);
            } else if (hi < lo) {
                fail(s, HX_EFORMAT, "range out of order");
            }
        }
        add_ranges(s, &(hx_range) { lo, hi }, 1, false);
    }
    return hx_ir_class(s->ir, &s->set, invert, s->json);
}

static hx_ref shorthand(parser *s, int c)
{
    s->set.n = 0;
    return add_shorthand(s, c) ? hx_ir_set(s->ir, s->set.p, s->set.n, s->json) : HX_NONE;
}

/* ---- quantifiers ----------------------------------------------------- */

/* {n} {n,} {n,m}; anything else is no quantifier, and "{" is a character. */
static bool read_braces(parser *s, uint32_t *min, uint32_t *max)
{
    const size_t from = s->in.i;

    if (eat(s, "{") && hx_scan_number(&s->in, min)) {
        *max = *min;
        if (eat(s, ",") && !hx_scan_number(&s->in, max))
            *max = HX_IR_NO_END;
        if (eat(s, "}"))
            return true;
    }
    s->in.i = from;
    return false;
}

static bool read_quantifier(parser *s, uint32_t *min, uint32_t *max)
{
    const int c = peek(s, 0);

    *min = c == '+';
    *max = c == '?' ? 1 : HX_IR_NO_END;
    if (c == '*' || c == '+' || c == '?')
        s->in.i++;
    else if (!read_braces(s, min, max))
        return false;
    hx_ir_check_repeat(s->ir, *min, *max);
    if (*min > *max)
        fail(s, HX_EFORMAT, "quantifier out of order");
    if (peek(s, 0) == '+')
        fail(s, HX_EUNSUP, "possessive quantifiers are not supported");
    eat(s, "?");
    return true;
}

/* ---- groups ---------------------------------------------------------- */

static part read_alternatives(parser *s, bool search);

static part read_group(parser *s)
{
    part p;

    if (eat(s, "?")) {
        const bool named =
            eat(s, "P<") || (peek(s, 0) == '<' && peek(s, 1) != '=' && peek(s, 1) != '!');

        if (named) {
            while (peek(s, 0) >= 0 && peek(s, 0) != '>')
                s->in.i++;
            if (!eat(s, ">"))
                fail(s, HX_EFORMAT, "group name without \">\"");
        } else if (!eat(s, ":")) {
            fail(s, HX_EUNSUP,
                 "look-around, flags and other \"(?\" groups are not supported");
        }
    }
    p = read_alternatives(s, false);
    if (!eat(s, ")"))
        fail(s, HX_EFORMAT, "\"(\" without \")\"");
    return p;
}

static part read_atom(parser *s)
{
    const int c = peek(s, 0);
    hx_range out[HX_LEN(lines) + 1];

    if (c == '*' || c == '+' || c == '?') {
        fail(s, HX_EFORMAT, "nothing to repeat");
        return (part) { HX_NONE, false, false };
    }
    if (eat(s, "("))
        return read_group(s);
    if (eat(s, "["))
        return (part) { read_class(s), false, false };
    if (eat(s, "."))
        return (part) { hx_ir_set(s->ir, out, hx_range_invert(lines, HX_LEN(lines), out),
                                  s->json),
                        false, false };
    if (eat(s, "\\")) {
        const hx_ref e = shorthand(s, peek(s, 0));

        if (e != HX_NONE) {
            s->in.i++;
            return (part) { e, false, false };
        }
        return (part) { hx_ir_char(s->ir, read_escape(s, false), s->json), false, false };
    }
    return (part) { hx_ir_char(s->ir, read_char(s), s->json), false, false };
}

static part read_sequence(parser *s)
{
    part out = { HX_NONE, false, false };
    hx_refs list = { 0 };

    while (s->ir->rc == 0 && s->in.i < s->in.n && peek(s, 0) != '|' &&
           peek(s, 0) != ')') {
        uint32_t min, max;
        part p;

        if (peek(s, 0) == '^' && list.n > 0) {
            fail(s, HX_EUNSUP, "\"^\" after the begin");
        } else if (eat(s, "^")) {
            out.begin = true;
            continue;
        }
        if (eat(s, "$")) {
            out.end = true;
            continue;
        }
        if (out.end)
            fail(s, HX_EUNSUP, "\"$\" before the end");
        p = read_atom(s);
        if (p.begin && list.n > 0)
            fail(s, HX_EUNSUP, "\"^\" after the begin");
        if (read_quantifier(s, &min, &max)) {
            if (p.begin || p.end)
                fail(s, HX_EUNSUP, "\"^\" or \"$\" in what is repeated");
            p.e = hx_ir_rep(s->ir, p.e, min, max, HX_REP_EXPAND);
        }
        out.begin |= p.begin;
        out.end |= p.end;
        HX_ADD(s->ir, list, p.e);
    }
    out.e = hx_ir_seq(s->ir, list.p, list.n);
    HX_DROP(s->ir, list);
    return out;
}

/* search: the whole expression, which may match anywhere between its anchors. */
static part read_alternatives(parser *s, bool search)
{
    part out = { HX_NONE, false, false };
    hx_refs list = { 0 };
    bool first = true;

    if (++s->depth > s->ir->opt.nesting)
        hx_ir_over(s->ir, "nesting");
    do {
        part p = read_sequence(s);

        if (search) {
            const hx_ref any = hx_ir_rep(
                s->ir, hx_ir_set(s->ir, &(hx_range) { 0, 0x10ffff }, 1, s->json), 0,
                HX_IR_NO_END, HX_REP_EXPAND);

            p.e = HX_SEQ(s->ir, p.begin ? HX_EMPTY : any, p.e, p.end ? HX_EMPTY : any);
        } else if (!first && s->depth > 1 && (p.begin != out.begin || p.end != out.end)) {
            fail(s, HX_EUNSUP, "\"^\" or \"$\" in some branches of a group only");
        }
        out.begin = p.begin;
        out.end = p.end;
        first = false;
        HX_ADD(s->ir, list, p.e);
    } while (s->ir->rc == 0 && eat(s, "|"));
    s->depth--;
    out.e = hx_ir_alt(s->ir, list.p, list.n);
    HX_DROP(s->ir, list);
    return out;
}

hx_ref hx_regex_parse(hx_ir *ir, hx_str source, bool json, bool search)
{
    parser s = { .ir = ir, .in = { source.p, source.n, 0 }, .json = json };
    part p = { HX_NONE, false, false };

    if (source.n > ir->opt.source_bytes)
        hx_ir_over(ir, "source_bytes");
    else if (!hx_utf8_ok(source.p, source.n))
        hx_ir_fail(ir, HX_EFORMAT, "regex: not UTF-8");
    if (ir->rc == 0)
        p = read_alternatives(&s, search);
    if (ir->rc == 0 && s.in.i < s.in.n)
        fail(&s, HX_EFORMAT, "\")\" without \"(\"");
    HX_DROP(ir, s.set);
    return ir->rc == 0 ? p.e : HX_NONE;
}
