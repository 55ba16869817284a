/* grammar_tools.c - calls of tools, as a model marks them up, as IR.
 *
 * Called by grammar.c. The source is a JSON object:
 *
 *   format    a row of the table in reply.c: which markup
 *   tools     the tools that may be called, as in a request: {"type": "function",
 *             "function": {"name", "parameters", "strict"}}, or the function itself
 *   choice    "auto": one call, from its opening marker on, for grammars that begin there;
 *             "required": calls and nothing else
 *   parallel  false: one call only
 *   content   {"kind": a hx_grammar_kind, "source": text}: an answer may also be this,
 *             without a call
 *
 * A name is one of those offered. Arguments keep to the schema of their tool; a schema
 * that cannot be kept to is an error where the tool is strict, and leaves its arguments
 * free elsewhere. Markers are single tokens of the vocabulary and are allowed exactly
 * where the markup has them. Line breaks around tags are optional: revisions of a format
 * differ in them, and the parser takes both. Never reads a reply: that is reply.c's. */
#include "text/grammar_ir.h"
#include "text/text.h"

typedef struct {
    hx_ir *ir;
    const hx_reply_format *format;
    hx_ref call, call_end;
    hx_ref brk; /* an optional line break */
    hx_schema_tags tags;
} tools;

/* The token of a marker, also in grammars that other text could not spell. */
static hx_ref marker(tools *t, hx_reply_mark m)
{
    const char *text = hx_reply_marker(t->format, m);
    const hx_vocab *v = t->ir->vocab;

    for (int32_t id = 0; v != NULL && text != NULL && id < v->n_token; id++)
        if (v->kind[id] == HX_TOKEN_SPECIAL && hx_str_is(v->bytes[id], text))
            return hx_ir_token(t->ir, id);
    hx_ir_fail(t->ir, HX_EUNSUP,
               "tools: the vocabulary has no token %s, so calls cannot be constrained",
               text != NULL ? text : "that opens a call");
    return HX_NONE;
}

static void find_markers(tools *t)
{
    t->brk = hx_ir_opt(t->ir, hx_ir_str(t->ir, "\n"));
    t->call = marker(t, HX_MARK_CALL);
    t->call_end = marker(t, HX_MARK_CALL_END);
    if (hx_reply_marker(t->format, HX_MARK_KEY) == NULL)
        return;
    t->tags = (hx_schema_tags) {
        .key = marker(t, HX_MARK_KEY),
        .key_end = HX_SEQ(t->ir, marker(t, HX_MARK_KEY_END), t->brk),
        .value = marker(t, HX_MARK_VALUE),
        .value_end = HX_SEQ(t->ir, marker(t, HX_MARK_VALUE_END), t->brk),
    };
}

static hx_ref arguments(const tools *t, const hx_json *schema)
{
    return t->tags.key != HX_NONE ? hx_schema_pairs(t->ir, schema, &t->tags)
           : schema == NULL       ? hx_json_object(t->ir)
                                  : hx_schema_value(t->ir, schema);
}

/* The arguments that the tool takes; free where its schema is not to be had. */
static hx_ref arguments_of(const tools *t, const hx_json *function, hx_json *any,
                           hx_json *none)
{
    const hx_json *schema = hx_json_get(function, "parameters");
    const bool must = hx_json_bool(hx_json_get(function, "strict"), false);
    hx_err err = { 0 }, *const theirs = t->ir->err;
    hx_ref e;

    if (hx_json_kind(schema) != HX_JSON_OBJECT && hx_json_kind(schema) != HX_JSON_BOOL)
        schema = none;
    if (t->ir->no_schemas && !must)
        return arguments(t, any);
    t->ir->err = &err;
    e = arguments(t, schema);
    t->ir->err = theirs;
    if (!must && (t->ir->rc == HX_EUNSUP || t->ir->rc == HX_EFORMAT)) {
        t->ir->rc = 0;
        return arguments(t, any);
    }
    if (t->ir->rc != 0 && theirs != NULL) {
        const hx_str name = hx_json_str(hx_json_get(function, "name"));

        hx_fail(theirs, t->ir->rc, "tool \"%.*s\": %.150s", (int)HX_MIN(name.n, 64),
                name.p, err.msg);
    }
    return e;
}

/* From the name to before the closing marker. */
static hx_ref one_tool(const tools *t, const hx_json *tool, hx_json *any, hx_json *none)
{
    const hx_json *function =
        hx_json_has(tool, "function") ? hx_json_get(tool, "function") : tool;
    const hx_str name = hx_json_str(hx_json_get(function, "name"));
    hx_ir *ir = t->ir;
    hx_ref args;

    if (name.n == 0) {
        hx_ir_fail(ir, HX_EFORMAT, "tools: one has no name");
        return HX_NONE;
    }
    args = arguments_of(t, function, any, none);
    if (t->tags.key != HX_NONE)
        return HX_SEQ(ir, hx_ir_lit(ir, name.p, name.n), t->brk, args);
    return HX_SEQ(ir, t->brk, hx_ir_str(ir, "{\"name\""), hx_json_colon(ir),
                  hx_ir_str(ir, "\""), hx_json_name(ir, name), hx_ir_str(ir, "\""),
                  hx_json_comma(ir), hx_ir_str(ir, "\"arguments\""), hx_json_colon(ir),
                  args, hx_ir_str(ir, "}"), t->brk);
}

static hx_ref one_call(const tools *t, const hx_json *list, hx_json *any, hx_json *none)
{
    hx_refs way = { 0 };
    hx_ref e = HX_NONE;

    for (size_t i = 0; i < hx_json_len(list) && t->ir->rc == 0; i++) {
        const hx_ref tool = one_tool(t, hx_json_at(list, i), any, none);

        HX_ADD(t->ir, way, tool);
    }
    if (t->ir->rc == 0)
        e = hx_ir_alt(t->ir, way.p, way.n);
    HX_DROP(t->ir, way);
    return HX_SEQ(t->ir, t->call, e, t->call_end);
}

static hx_ref answer(const tools *t, const hx_json *spec)
{
    const bool is_auto = hx_str_is(hx_json_str(hx_json_get(spec, "choice")), "auto");
    const hx_json *list = hx_json_get(spec, "tools");
    const hx_json *content = hx_json_get(spec, "content");
    hx_json *any = NULL, *none = NULL;
    hx_ir *ir = t->ir;
    hx_ref call, e;

    if (hx_json_kind(list) != HX_JSON_ARRAY || hx_json_len(list) == 0) {
        hx_ir_fail(ir, HX_EFORMAT, "tools: there is none to call");
        return HX_NONE;
    }
    if ((ir->rc = hx_json_parse(&any, HX_STR("{}"), 2, ir->err)) != 0 ||
        (ir->rc = hx_json_parse(&none, HX_STR("{\"type\":\"object\",\"properties\":{}}"),
                                4, ir->err)) != 0)
        call = HX_NONE;
    else
        call = one_call(t, list, any, none);
    hx_json_free(any);
    hx_json_free(none);
    if (ir->rc != 0 || (is_auto && content == NULL))
        return call;
    /* Kept once however many calls there are. */
    e = call = hx_ir_call(ir, hx_ir_rule_of(ir, call));
    if (hx_json_bool(hx_json_get(spec, "parallel"), true))
        e = HX_SEQ(
            ir, call,
            hx_ir_rep(ir, HX_SEQ(ir, t->brk, call), 0, HX_IR_NO_END, HX_REP_EXPAND));
    if (content == NULL)
        return e;
    return HX_ALT(ir, e,
                  hx_grammar_parse(
                      ir, (hx_grammar_kind)hx_json_int(hx_json_get(content, "kind"), 0),
                      hx_json_str(hx_json_get(content, "source"))));
}

hx_ref hx_tools_parse(hx_ir *ir, hx_str source)
{
    hx_json *spec = NULL;
    tools t = { .ir = ir };
    hx_ref e = HX_NONE;

    if (ir->rc != 0 || !hx_schema_is_small(ir, source))
        return HX_NONE;
    if ((ir->rc = hx_json_parse(&spec, source, (int)ir->opt.nesting + 1, ir->err)) != 0)
        return HX_NONE;
    t.format = hx_reply_find(hx_json_str(hx_json_get(spec, "format")).p);
    if (t.format == NULL)
        hx_ir_fail(ir, HX_EUNSUP, "tools: no markup for calls is known of this model");
    else
        find_markers(&t);
    if (ir->rc == 0)
        e = answer(&t, spec);
    hx_json_free(spec);
    return e;
}
