/* grammar_ebnf.c - GBNF, the rule notation of llama.cpp, as IR.
 *
 * Called by grammar.c. Read are rules "name ::= alternatives" with literals, classes,
 * ".", groups, "*", "+", "?", "{m,n}", comments, and tokens by id as <[123]>. A rule ends
 * with its line unless inside parentheses or behind "|". Left recursion is refused later,
 * by the analysis of the automaton. */
#include "text/grammar_ir.h"

typedef struct {
    uint32_t rule, next;
    bool defined;
} name;
typedef HX_VEC(name) names;

typedef struct {
    hx_ir *ir;
    hx_scan in;
    uint32_t depth;
    names name;    /* [0] is not used */
    hx_u32s slot;  /* hash table of names: chains */
    hx_ranges set; /* of the class being read */
} parser;

enum { SLOTS = 4096 };

static int fail(parser *s, const char *what)
{
    int line = 1;

    for (size_t i = 0; i < s->in.i && i < s->in.n; i++)
        line += s->in.p[i] == '\n';
    return hx_ir_fail(s->ir, HX_EFORMAT, "grammar: line %d: %s", line, what);
}

static int peek(const parser *s, size_t ahead)
{
    return hx_scan_peek(&s->in, ahead);
}

static bool eat(parser *s, const char *lit)
{
    return hx_scan_eat(&s->in, lit);
}

static void skip_space(parser *s, bool lines)
{
    for (int c; (c = peek(s, 0)) >= 0; s->in.i++) {
        if (c == '#') {
            while (peek(s, 0) >= 0 && peek(s, 0) != '\n' && peek(s, 0) != '\r')
                s->in.i++;
            s->in.i--;
        } else if (c != ' ' && c != '\t' && !(lines && (c == '\n' || c == '\r'))) {
            return;
        }
    }
}

static bool is_word(int c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           c == '-' || c == '_';
}

/* ---- names ----------------------------------------------------------- */

static hx_str read_name(parser *s)
{
    hx_str w = { s->in.p + s->in.i, 0 };

    while (is_word(peek(s, 0))) {
        s->in.i++;
        w.n++;
    }
    if (w.n == 0)
        fail(s, "expected a rule's name");
    return w;
}

/* The entry of a name, made when it is new; NULL after an error. */
static name *name_of(parser *s, hx_str w)
{
    uint32_t hash = 2166136261u;

    for (size_t i = 0; i < w.n; i++)
        hash = (hash ^ (uint8_t)w.p[i]) * 16777619u;
    uint32_t *const head = &s->slot.p[hash % SLOTS];

    for (uint32_t k = *head; k != 0; k = s->name.p[k].next)
        if (!hx_ir_work(s->ir, 1))
            return NULL;
        else if (hx_str_eq(s->ir->rule.p[s->name.p[k].rule].name, w))
            return &s->name.p[k];
    if (!HX_PUSH(s->ir, s->name, 1))
        return NULL;
    name *const new_name = &s->name.p[s->name.n - 1];

    new_name->rule = hx_ir_rule_new(s->ir, w);
    new_name->next = *head;
    *head = s->name.n - 1;
    return s->ir->rc == 0 ? new_name : NULL;
}

/* ---- characters ------------------------------------------------------ */

/* n hexadecimal digits. */
static uint32_t read_hex(parser *s, int n)
{
    uint32_t v = 0;

    for (int i = 0; i < n; i++) {
        const int digit = hx_hex_digit(peek(s, 0));

        v = digit >= 0 ? v * 16 + (uint32_t)digit : UINT32_MAX;
        if (v > 0x10ffff)
            break;
        s->in.i++;
    }
    if (v <= 0x10ffff && (v < 0xd800 || v >= 0xe000))
        return v;
    fail(s, "an escape that is no character");
    return 0;
}

static uint32_t read_char(parser *s)
{
    static const char letter[] = "trn\\\"[]", value[] = "\t\r\n\\\"[]";
    uint32_t cp = 0;

    if (!eat(s, "\\")) {
        const int len = hx_utf8_next(s->in.p + s->in.i, s->in.n - s->in.i, &cp);

        if (len <= 0)
            fail(s, "unexpected end");
        else
            s->in.i += (size_t)len;
        return cp;
    }
    const int c = peek(s, 0);
    const char *at = c > 0 ? strchr(letter, c) : NULL;

    s->in.i += c >= 0;
    if (at != NULL)
        return (uint8_t)value[at - letter];
    if (c == 'x' || c == 'u' || c == 'U')
        return read_hex(s, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    fail(s, "unknown escape");
    return 0;
}

static hx_ref read_literal(parser *s)
{
    hx_sb text = { 0 };
    hx_ref e;

    while (s->ir->rc == 0 && !eat(s, "\"")) {
        char utf8[4];

        if (peek(s, 0) < 0 || peek(s, 0) == '\n')
            fail(s, "literal without its second quote");
        else
            hx_sb_add(&text, utf8, (size_t)hx_utf8_put(read_char(s), utf8));
    }
    if (text.bad)
        hx_ir_fail(s->ir, HX_ENOMEM, "grammar: no memory for a literal");
    e = hx_ir_lit(s->ir, text.p, text.n);
    hx_sb_free(&text);
    return e;
}

static hx_ref read_class(parser *s)
{
    const bool invert = eat(s, "^");

    s->set.n = 0;
    while (s->ir->rc == 0 && !eat(s, "]")) {
        uint32_t lo, hi;

        if (peek(s, 0) < 0) {
            fail(s, "class without \"]\"");
            break;
        }
        lo = hi = read_char(s);
        if (peek(s, 0) == '-' && peek(s, 1) >= 0 && peek(s, 1) != ']') {
            s->in.i++;
            hi = read_char(s);
        }
        if (hi < lo)
            fail(s, "range out of order");
        HX_ADD(s->ir, s->set, (hx_range) { lo, hi });
    }
    return hx_ir_class(s->ir, &s->set, invert, false);
}

/* ---- rules ----------------------------------------------------------- */

static void read_braces(parser *s, uint32_t *min, uint32_t *max)
{
    skip_space(s, true);
    *min = 0;
    if (!hx_scan_number(&s->in, min) && peek(s, 0) != ',')
        fail(s, "expected a number");
    *max = *min;
    skip_space(s, true);
    if (eat(s, ",")) {
        skip_space(s, true);
        if (!hx_scan_number(&s->in, max))
            *max = HX_IR_NO_END;
        skip_space(s, true);
    }
    if (!eat(s, "}"))
        fail(s, "\"{\" without \"}\"");
    hx_ir_check_repeat(s->ir, *min, *max);
    if (*min > *max)
        fail(s, "bounds out of order");
}

/* Applies all quantifiers that follow. */
static hx_ref quantify(parser *s, hx_ref e)
{
    while (s->ir->rc == 0) {
        uint32_t min = 0, max = HX_IR_NO_END;

        if (eat(s, "+"))
            min = 1;
        else if (eat(s, "?"))
            max = 1;
        else if (eat(s, "{"))
            read_braces(s, &min, &max);
        else if (!eat(s, "*"))
            break;
        e = hx_ir_rep(s->ir, e, min, max, HX_REP_AUTO);
    }
    return e;
}

static hx_ref read_token(parser *s)
{
    uint32_t id = 0;

    if (!eat(s, "[") || !hx_scan_number(&s->in, &id) || !eat(s, "]>") || id > INT32_MAX)
        fail(s, "expected a token as <[id]>");
    return hx_ir_token(s->ir, (int32_t)id);
}

static hx_ref read_alternatives(parser *s, bool nested);

/* false: no element begins here. */
static bool read_element(parser *s, hx_ref *e)
{
    const name *w;

    if (eat(s, "\"")) {
        *e = read_literal(s);
    } else if (eat(s, "[")) {
        *e = read_class(s);
    } else if (eat(s, ".")) {
        *e = hx_ir_set(s->ir, &(hx_range) { 0, 0x10ffff }, 1, false);
    } else if (eat(s, "<")) {
        *e = read_token(s);
    } else if (eat(s, "(")) {
        skip_space(s, true);
        *e = read_alternatives(s, true);
        if (!eat(s, ")"))
            fail(s, "\"(\" without \")\"");
    } else if (is_word(peek(s, 0))) {
        w = name_of(s, read_name(s));
        *e = w == NULL ? HX_NONE : hx_ir_call(s->ir, w->rule);
    } else {
        return false;
    }
    return true;
}

static hx_ref read_sequence(parser *s, bool nested)
{
    hx_refs list = { 0 };
    hx_ref e = HX_NONE;

    while (s->ir->rc == 0 && read_element(s, &e)) {
        e = quantify(s, e);
        skip_space(s, nested);
        /* A quantifier may also stand apart. */
        e = quantify(s, e);
        skip_space(s, nested);
        HX_ADD(s->ir, list, e);
    }
    e = hx_ir_seq(s->ir, list.p, list.n);
    HX_DROP(s->ir, list);
    return e;
}

static hx_ref read_alternatives(parser *s, bool nested)
{
    hx_refs list = { 0 };
    hx_ref e;

    if (++s->depth > s->ir->opt.nesting)
        hx_ir_over(s->ir, "nesting");
    do {
        skip_space(s, true);
        e = read_sequence(s, nested);
        HX_ADD(s->ir, list, e);
    } while (s->ir->rc == 0 && eat(s, "|"));
    s->depth--;
    e = hx_ir_alt(s->ir, list.p, list.n);
    HX_DROP(s->ir, list);
    return e;
}

static void read_rule(parser *s)
{
    const hx_str w = read_name(s);
    name *n;
    hx_ref body;

    skip_space(s, false);
    if (!eat(s, "::="))
        fail(s, "expected \"::=\" behind a rule's name");
    if (s->ir->rc != 0 || (n = name_of(s, w)) == NULL)
        return;
    if (n->defined)
        hx_ir_fail(s->ir, HX_EFORMAT, "grammar: rule \"%.*s\" is defined twice",
                   (int)HX_MIN(w.n, 100), w.p);
    n->defined = true;
    const uint32_t rule = n->rule;
    skip_space(s, true);
    body = read_alternatives(s, false);
    if (s->ir->rc == 0 && peek(s, 0) >= 0 && peek(s, 0) != '\n' && peek(s, 0) != '\r')
        fail(s, "expected the end of the rule");
    if (s->ir->rc == 0)
        s->ir->rule.p[rule].body = body;
    skip_space(s, true);
}

hx_ref hx_ebnf_parse(hx_ir *ir, hx_str source)
{
    parser s = { .ir = ir, .in = { source.p, source.n, 0 } };
    hx_ref root = HX_NONE;

    if (source.n > ir->opt.source_bytes)
        hx_ir_over(ir, "source_bytes");
    else if (!hx_utf8_ok(source.p, source.n))
        hx_ir_fail(ir, HX_EFORMAT, "grammar: not UTF-8");
    if (HX_PUSH(ir, s.name, 1) && HX_PUSH(ir, s.slot, SLOTS)) {
        skip_space(&s, true);
        while (ir->rc == 0 && s.in.i < s.in.n)
            read_rule(&s);
        const name *w = ir->rc == 0 ? name_of(&s, HX_STR("root")) : NULL;

        root = w == NULL ? HX_NONE : hx_ir_call(ir, w->rule);
        for (uint32_t k = 1; k < s.name.n && ir->rc == 0; k++) {
            const hx_str n = ir->rule.p[s.name.p[k].rule].name;

            if (!s.name.p[k].defined)
                hx_ir_fail(ir, HX_EFORMAT, "grammar: rule \"%.*s\" is not defined",
                           (int)HX_MIN(n.n, 100), n.p);
        }
    }
    HX_DROP(ir, s.name);
    HX_DROP(ir, s.slot);
    HX_DROP(ir, s.set);
    return ir->rc == 0 ? root : HX_NONE;
}
