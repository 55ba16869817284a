/* grammar.c - the public calls of constrained decoding, and the front ends that take no
 * parser: JSON mode, choices.
 *
 * Called by whoever serves requests: hx_grammar_open() on the thread of the request, all
 * else on the thread that samples. A source is compiled or refused; nothing of it is
 * dropped silently. */
#include "text/grammar_ir.h"

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
        else
            HX_ADD(ir, way, hx_ir_lit(ir, s.p, s.n));
    }
    e = hx_ir_alt(ir, way.p, way.n);
    HX_DROP(ir, way);
    hx_json_free(list);
    return e;
}

hx_ref hx_grammar_parse(hx_ir *ir, hx_grammar_kind kind, hx_str source)
{
    switch (kind) {
    case HX_GRAMMAR_JSON:
        return hx_json_object(ir);
    case HX_GRAMMAR_JSON_SCHEMA:
        return hx_schema_parse(ir, source);
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
    root = ir->node.p[e].kind == HX_IR_CALL ? ir->node.p[e].a : hx_ir_rule_of(ir, e);
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
    rc = compile(out, v, &ir, hx_grammar_parse(&ir, kind, source));
    hx_ir_free(&ir);
    /* Schemas beyond the limits are no reason to refuse tools that a model may not even
     * use: without them calls are still well formed. */
    if (rc != 0 && rc != HX_ENOMEM && kind == HX_GRAMMAR_TOOLS) {
        hx_ir_init(&ir, opt, err);
        ir.vocab = v;
        ir.no_schemas = true;
        rc = compile(out, v, &ir, hx_grammar_parse(&ir, kind, source));
        hx_ir_free(&ir);
    }
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
