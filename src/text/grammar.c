/* grammar.c - the public calls of constrained decoding, and the front ends that take no
 * parser: JSON mode, choices, pieces.
 *
 * Called by whoever serves requests: hx_grammar_open() on the thread of the request, all
 * else on the thread that samples. A source is compiled or refused; nothing of it is
 * dropped silently. */
#include "text/grammar_ir.h"

static const hx_str none = { NULL, 0 };

/* ---- front ends ------------------------------------------------------ */

static hx_ref choice_parse(hx_ir *ir, hx_str source)
{
    hx_json *list = NULL;
    hx_refs way = { 0 };
    hx_ref e;

    if (source.n > ir->opt.source_bytes)
        hx_ir_over(ir, "source_bytes");
    else
        ir->rc = hx_json_parse(&list, source, 2, ir->err);
    if (ir->rc == 0 && (hx_json_kind(list) != HX_JSON_ARRAY || hx_json_len(list) == 0))
        hx_ir_fail(ir, HX_EFORMAT, "choices: expected an array of strings, found %s",
                   hx_json_kind_name(list));
    for (size_t i = 0; ir->rc == 0 && i < hx_json_len(list); i++) {
        const hx_str s = hx_json_str(hx_json_at(list, i));

        if (s.p == NULL)
            hx_ir_fail(ir, HX_EFORMAT, "choices: element %zu is no string", i);
        else if (HX_PUSH(ir, way, 1))
            way.p[way.n - 1] = hx_ir_lit(ir, s.p, s.n);
    }
    e = hx_ir_alt(ir, way.p, way.n);
    HX_DROP(ir, way);
    hx_json_free(list);
    return e;
}

static hx_ref parse(hx_ir *ir, hx_grammar_kind kind, hx_str source, hx_str at)
{
    switch (kind) {
    case HX_GRAMMAR_JSON:
        return hx_json_object(ir);
    case HX_GRAMMAR_JSON_SCHEMA:
        return hx_schema_parse(ir, source, at);
    case HX_GRAMMAR_REGEX:
        return hx_regex_parse(ir, source, false, false);
    case HX_GRAMMAR_EBNF:
        return hx_ebnf_parse(ir, source);
    case HX_GRAMMAR_CHOICE:
        return choice_parse(ir, source);
    case HX_GRAMMAR_TOOLS:
        return hx_tools_parse(ir, source);
    case HX_GRAMMAR_NONE:
        break;
    }
    hx_ir_fail(ir, HX_EARG, "grammar: kind %d", (int)kind);
    return HX_NONE;
}

hx_ref hx_grammar_parse(hx_ir *ir, hx_grammar_kind kind, hx_str source)
{
    return parse(ir, kind, source, none);
}

/* ---- pieces ---------------------------------------------------------- */

static hx_ref all_text(hx_ir *ir)
{
    return hx_ir_rep(ir, hx_ir_set(ir, &(hx_range) { 0, 0x10ffff }, 1, false), 0,
                     HX_IR_NO_END, HX_REP_EXPAND);
}

/* How many characters of the literal are matched after c, when k were (Knuth, Morris and
 * Pratt's automaton; fail[k] is the longest border of the first k). */
static uint32_t advance(const uint32_t *lit, const uint32_t *border, uint32_t k,
                        uint32_t c)
{
    while (lit[k] != c && k > 0)
        k = border[k];
    return k + (lit[k] == c);
}

/* Place k of the automaton: one way per character of the literal, one for all others. */
static hx_ref until_place(hx_ir *ir, const uint32_t *lit, const uint32_t *border,
                          uint32_t n, uint32_t k, uint32_t first)
{
    hx_ranges set = { 0 };
    hx_ref all = HX_NONE;
    uint32_t n_set, n_out;

    if (!HX_PUSH(ir, set, 2 * n + 1))
        return HX_NONE;
    for (uint32_t i = 0; i < n; i++) {
        bool seen = false;
        const uint32_t to = advance(lit, border, k, lit[i]);

        for (uint32_t j = 0; j < i; j++)
            seen |= lit[j] == lit[i];
        set.p[i] = (hx_range) { lit[i], lit[i] };
        if (!seen && hx_ir_work(ir, i))
            all = HX_ALT(ir, all,
                         HX_SEQ(ir, hx_ir_char(ir, lit[i], false),
                                to == n ? HX_EMPTY : hx_ir_goto(ir, first + to)));
    }
    n_set = (uint32_t)hx_range_norm(set.p, n);
    n_out = (uint32_t)hx_range_invert(set.p, n_set, set.p + n_set);
    all = HX_ALT(
        ir, all,
        HX_SEQ(ir, hx_ir_set(ir, set.p + n_set, n_out, false), hx_ir_goto(ir, first)));
    HX_DROP(ir, set);
    return all;
}

/* Any text up to and with the first occurrence of text. */
static hx_ref until(hx_ir *ir, hx_str text)
{
    hx_u32s lit = { 0 };
    hx_u32s border = { 0 };
    uint32_t n = 0, first = ir->rule.n;

    if (text.n == 0 || text.n > 256 || !hx_utf8_ok(text.p, text.n)) {
        hx_ir_fail(ir, HX_EARG,
                   "pieces: \"until\" takes 1 to 256 bytes of UTF-8, not %zu", text.n);
        return HX_NONE;
    }
    if (HX_PUSH(ir, lit, (uint32_t)text.n) && HX_PUSH(ir, border, (uint32_t)text.n + 1)) {
        for (size_t i = 0; i < text.n;)
            i += (size_t)hx_utf8_next(text.p + i, text.n - i, &lit.p[n++]);
        for (uint32_t k = 1; k < n; k++)
            border.p[k + 1] = advance(lit.p, border.p, border.p[k], lit.p[k]);
        for (uint32_t k = 0; k < n; k++)
            hx_ir_rule_new(ir, none);
        for (uint32_t k = 0; k < n && ir->rc == 0; k++) {
            const hx_ref body = until_place(ir, lit.p, border.p, n, k, first);

            if (ir->rc == 0)
                ir->rule.p[first + k].body = body;
        }
    }
    HX_DROP(ir, lit);
    HX_DROP(ir, border);
    return hx_ir_goto(ir, first);
}

static hx_ref piece_parse(hx_ir *ir, const hx_piece *p, uint32_t depth);

static hx_ref children(hx_ir *ir, const hx_piece *p, uint32_t depth)
{
    hx_refs way = { 0 };
    hx_ref e = HX_NONE;

    if (HX_PUSH(ir, way, (uint32_t)HX_MIN(p->n_child, UINT32_MAX - 1))) {
        for (uint32_t i = 0; i < way.n && ir->rc == 0; i++)
            way.p[i] = piece_parse(ir, &p->child[i], depth + 1);
        e = p->kind == HX_PIECE_ALT ? hx_ir_alt(ir, way.p, way.n)
                                    : hx_ir_seq(ir, way.p, way.n);
    }
    HX_DROP(ir, way);
    return e;
}

static hx_ref piece_parse(hx_ir *ir, const hx_piece *p, uint32_t depth)
{
    if (depth > ir->opt.nesting)
        hx_ir_over(ir, "nesting");
    if (ir->rc != 0)
        return HX_NONE;
    switch (p->kind) {
    case HX_PIECE_BYTES:
        return hx_ir_lit(ir, p->text.p, p->text.n);
    case HX_PIECE_TOKEN:
        if (p->token >= 0)
            return hx_ir_token(ir, p->token);
        break;
    case HX_PIECE_GRAMMAR:
        return parse(ir, p->grammar, p->text, p->at);
    case HX_PIECE_ANY:
        return all_text(ir);
    case HX_PIECE_UNTIL:
        return until(ir, p->text);
    case HX_PIECE_SEQ:
    case HX_PIECE_ALT:
        return children(ir, p, depth);
    case HX_PIECE_REPEAT:
        if (p->min >= 0 && (p->max == -1 || p->max >= p->min))
            return hx_ir_rep(ir, children(ir, p, depth), (uint32_t)p->min,
                             p->max < 0 ? HX_IR_NO_END : (uint32_t)p->max, HX_REP_AUTO);
        break;
    }
    hx_ir_fail(ir, HX_EARG, "pieces: kind %d with token %d, %d to %d times", (int)p->kind,
               p->token, p->min, p->max);
    return HX_NONE;
}

/* ---- open and close -------------------------------------------------- */

/* Bytes that no edge of the automaton tells apart. */
static void find_classes(hx_grammar *g)
{
    bool cut[257] = { false };
    uint32_t n = 0;

    for (uint32_t i = 0; i < g->dfa.byte.n; i++)
        cut[g->dfa.byte.p[i].lo] = cut[g->dfa.byte.p[i].hi + 1] = true;
    for (uint32_t b = 0; b < 256; b++) {
        n += b > 0 && cut[b];
        g->class_of[b] = (uint8_t)n;
    }
    g->n_class = n + 1;
    g->has_tokens = g->dfa.token.n > 0;
}

static int compile(hx_grammar **out, const hx_vocab *v, hx_ir *ir, hx_ref e)
{
    hx_grammar *g = NULL;
    uint32_t root;

    if (ir->rc != 0)
        return ir->rc;
    if (ir->node.p[e].kind == HX_IR_CALL) {
        root = ir->node.p[e].a;
    } else {
        root = hx_ir_rule_new(ir, none);
        if (ir->rc == 0)
            ir->rule.p[root].body = e;
    }
    if (ir->rc == 0 && (g = hx_new(hx_grammar, 1)) == NULL)
        hx_ir_fail(ir, HX_ENOMEM, "grammar: no memory");
    if (ir->rc != 0)
        goto fail;
    g->vocab = v;
    g->opt = ir->opt;
    if (hx_dfa_build(&g->dfa, ir, root) != 0)
        goto fail;
    find_classes(g);
    if ((ir->rc = hx_grammar_cache_open(g, ir->err)) != 0)
        goto fail;
    *out = g;
    return 0;
fail:
    hx_grammar_close(g);
    return ir->rc;
}

int hx_grammar_open(hx_grammar **out, const hx_vocab *v, hx_grammar_kind kind,
                    hx_str source, const hx_grammar_opt *opt, hx_err *err)
{
    hx_ir ir;
    int rc;

    *out = NULL;
    hx_ir_init(&ir, opt, err);
    ir.vocab = v;
    rc = compile(out, v, &ir, parse(&ir, kind, source, none));
    hx_ir_free(&ir);
    /* Schemas beyond the limits are no reason to refuse tools that a model may not even
     * use: without them calls are still well formed. */
    if (rc != 0 && rc != HX_ENOMEM && kind == HX_GRAMMAR_TOOLS) {
        hx_ir_init(&ir, opt, err);
        ir.vocab = v;
        ir.no_schemas = true;
        rc = compile(out, v, &ir, parse(&ir, kind, source, none));
        hx_ir_free(&ir);
    }
    return rc;
}

int hx_grammar_open_pieces(hx_grammar **out, const hx_vocab *v, const hx_piece *root,
                           const hx_grammar_opt *opt, hx_err *err)
{
    hx_ir ir;
    int rc;

    *out = NULL;
    hx_ir_init(&ir, opt, err);
    rc = compile(out, v, &ir, piece_parse(&ir, root, 0));
    hx_ir_free(&ir);
    return rc;
}

void hx_grammar_close(hx_grammar *g)
{
    if (g == NULL)
        return;
    hx_dfa_free(&g->dfa);
    hx_grammar_cache_close(g);
    hx_free(g);
}
