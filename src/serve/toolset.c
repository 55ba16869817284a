/* toolset.c - tools of a request: what keeps the model to calls that they allow, and whether
 * two spellings of an answer mean the same. Called by generate.c, so that all dialects
 * have it. Never parses a reply by itself: that is reply.c's. */
#include "serve/serve.h"

static const hx_json *function_of(const hx_json *tool)
{
    const hx_str type = hx_json_str(hx_params_get(tool, "type"));
    const hx_json *f =
        hx_json_has(tool, "function") ? hx_json_get(tool, "function") : tool;

    return (type.p == NULL || hx_str_is(type, "function")) &&
                   hx_json_str(hx_json_get(f, "name")).n > 0
               ? f
               : NULL;
}

/* Whether the entries name the tool. */
static bool is_named(const hx_json *entries, hx_str name)
{
    bool found = false;

    for (size_t i = 0; i < hx_json_len(entries); i++) {
        const hx_json *f = function_of(hx_json_at(entries, i));

        found |= hx_str_eq(hx_json_str(hx_json_get(f, "name")), name);
    }
    return found;
}

static bool is_offered(const hx_generate *g, const hx_json *function)
{
    const hx_str name = hx_json_str(hx_json_get(function, "name"));

    return (g->tool_choice != HX_TOOLS_NAMED || hx_str_eq(name, g->tool_name)) &&
           (g->allowed == NULL || is_named(g->allowed, name));
}

/* ---- constraint ---------------------------------------------------------- */

static const char *choice_name(hx_tool_choice c)
{
    return c == HX_TOOLS_AUTO ? "auto" : "required";
}

/* Writes the functions that may be called; *strict: some want their schema kept. */
static size_t put_functions(const hx_generate *g, hx_sb *b, bool *strict)
{
    size_t n = 0;

    *strict = false;
    for (size_t i = 0; i < hx_json_len(g->tools); i++) {
        const hx_json *f = function_of(hx_json_at(g->tools, i));

        if (f == NULL || !is_offered(g, f))
            continue;
        hx_sb_str(b, n++ > 0 ? "," : "");
        hx_json_write(b, f);
        *strict |= hx_json_bool(hx_json_get(f, "strict"), false);
    }
    return n;
}

/* What text/grammar_tools.c reads. */
static size_t put_spec(const hx_call *c, const hx_generate *g, hx_sb *b, bool *strict)
{
    const hx_request *r = &g->sampling;
    size_t n;

    hx_sb_str(b, "{\"format\":");
    hx_json_put_str(b, hx_str_c(c->info->reply_format));
    hx_sb_printf(b, ",\"choice\":\"%s\",\"parallel\":%s", choice_name(g->tool_choice),
                 g->one_call || g->tool_choice == HX_TOOLS_NAMED ? "false" : "true");
    if (r->grammar_kind != HX_GRAMMAR_NONE && g->tool_choice == HX_TOOLS_AUTO) {
        hx_sb_printf(b, ",\"content\":{\"kind\":%d,\"source\":", (int)r->grammar_kind);
        hx_json_put_str(b, r->grammar);
        hx_sb_char(b, '}');
    }
    hx_sb_str(b, ",\"tools\":[");
    n = put_functions(g, b, strict);
    hx_sb_str(b, "]}");
    return n;
}

/* The marker that opens a call is never sampled. */
static int ban_calls(hx_call *c, hx_generate *g, int32_t opener)
{
    hx_request *r = &g->sampling;
    hx_bias *bias = hx_arena_alloc(&c->arena, (size_t)(r->n_bias + 1) * sizeof *bias);

    if (bias == NULL)
        return hx_server_no_memory(c);
    if (r->n_bias > 0)
        memcpy(bias, r->bias, (size_t)r->n_bias * sizeof *bias);
    bias[r->n_bias++] = (hx_bias) { opener, -100 };
    r->bias = bias;
    return 0;
}

static int constrain(hx_call *c, hx_generate *g, int32_t opener)
{
    hx_request *r = &g->sampling;
    const bool with_content = r->grammar_kind != HX_GRAMMAR_NONE;
    hx_sb b = { 0 };
    bool strict;
    char *spec;

    const size_t n = put_spec(c, g, &b, &strict), len = b.n;
    spec = b.bad ? NULL : hx_arena_dup(&c->arena, b.p, b.n);
    hx_sb_free(&b);
    if (spec == NULL)
        return hx_server_problem(c, 413, "tools", "request_too_large",
                                 "tools: no memory for so many");
    if (n == 0 && g->tool_choice == HX_TOOLS_NAMED)
        return hx_server_problem(c, 400, "tool_choice", "invalid_value",
                                 "tool_choice: no tool is called \"%.*s\"",
                                 (int)HX_MIN(g->tool_name.n, 100u), g->tool_name.p);
    if (n == 0)
        return g->tool_choice == HX_TOOLS_AUTO
                   ? 0
                   : hx_server_problem(c, 400, "tool_choice", "invalid_value",
                                       "tool_choice: none of the tools may be called");
    r->grammar = (hx_str) { spec, len };
    r->grammar_kind = HX_GRAMMAR_TOOLS;
    r->grammar_at = opener;
    r->grammar_lazy = g->tool_choice == HX_TOOLS_AUTO && !with_content;
    r->grammar_again = !g->one_call;
    g->grammar_param = "tools";
    g->grammar_optional = r->grammar_lazy && !strict;
    return 0;
}

bool hx_toolset_has(const hx_json *tools, hx_str name)
{
    for (size_t i = 0; i < hx_json_len(tools); i++)
        if (hx_str_eq(hx_json_str(hx_json_get(hx_json_at(tools, i), "name")), name))
            return true;
    return false;
}

int hx_toolset_constrain(hx_call *c, hx_generate *g)
{
    const bool must =
        g->tool_choice == HX_TOOLS_REQUIRED || g->tool_choice == HX_TOOLS_NAMED;
    const hx_reply_format *format = hx_reply_find(c->info->reply_format);
    const char *open = format != NULL ? hx_reply_marker(format, HX_MARK_CALL) : NULL;
    const int32_t opener = open != NULL ? hx_token_id(c->engine, hx_str_c(open)) : -1;

    if (must && hx_json_len(g->tools) == 0)
        return hx_server_problem(c, 400, "tool_choice", "invalid_value",
                                 "tool_choice: there are no tools to call");
    if (g->tool_choice == HX_TOOLS_NONE)
        return opener < 0 ? 0 : ban_calls(c, g, opener);
    if (g->tools == NULL)
        return 0;
    if (opener < 0)
        return !must ? 0
                     : hx_server_problem(c, 400, "tool_choice", "unsupported_value",
                                         "tool_choice: this model has no token that "
                                         "opens a call; use \"auto\" or \"none\"");
    return constrain(c, g, opener);
}

/* ---- meaning ------------------------------------------------------------- */

#define CALLS_MAX 64

/* What an answer says. */
typedef struct {
    hx_sb reasoning, content;
    hx_sb name[CALLS_MAX], args[CALLS_MAX];
    int32_t n_call;
} saying;

static void take(void *ud, const hx_reply_event *ev)
{
    saying *s = ud;
    const bool fits = ev->call >= 0 && ev->call < CALLS_MAX;

    switch (ev->kind) {
    case HX_REPLY_REASONING:
        hx_sb_add(&s->reasoning, ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CONTENT:
        hx_sb_add(&s->content, ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CALL:
        s->n_call = ev->call + 1;
        if (fits)
            hx_sb_add(&s->name[ev->call], ev->text.p, ev->text.n);
        break;
    case HX_REPLY_ARGS:
        if (fits)
            hx_sb_add(&s->args[ev->call], ev->text.p, ev->text.n);
        break;
    case HX_REPLY_CALL_END:
        break;
    }
}

static bool read_saying(saying *s, hx_engine *e, const hx_reply_opt *opt, hx_prompt ids)
{
    hx_reply *reply;
    hx_err err;
    int rc = hx_reply_open(&reply, opt, &err);

    for (int64_t i = 0; i < ids.n && rc == 0; i++)
        rc = hx_reply_feed(reply, ids.id[i], hx_token_bytes(e, ids.id[i], NULL), take, s,
                           &err);
    if (rc == 0)
        rc = hx_reply_end(reply, take, s, NULL, &err);
    hx_reply_close(reply);
    return rc == 0 && s->n_call <= CALLS_MAX;
}

static void drop_saying(saying *s)
{
    hx_sb_free(&s->reasoning);
    hx_sb_free(&s->content);
    for (int32_t i = 0; i < CALLS_MAX; i++) {
        hx_sb_free(&s->name[i]);
        hx_sb_free(&s->args[i]);
    }
}

static hx_str strip(const hx_sb *b)
{
    hx_str s = { b->p, b->n };

    for (; s.n > 0 && (s.p[0] == ' ' || (s.p[0] >= '\t' && s.p[0] <= '\r')); s.p++)
        s.n--;
    while (s.n > 0 &&
           (s.p[s.n - 1] == ' ' || (s.p[s.n - 1] >= '\t' && s.p[s.n - 1] <= '\r')))
        s.n--;
    return s;
}

/* Equal values; members may stand in another order. */
static bool same_json(const hx_json *a, const hx_json *b)
{
    const hx_json_type k = hx_json_kind(a), l = hx_json_kind(b);
    const bool number = k == HX_JSON_INT || k == HX_JSON_DOUBLE;
    bool same = true;

    if (number && (l == HX_JSON_INT || l == HX_JSON_DOUBLE))
        return k == HX_JSON_INT && l == k ? hx_json_int(a, 0) == hx_json_int(b, 1)
                                          : hx_json_num(a, 0) == hx_json_num(b, 1);
    if (k != l)
        return false;
    if (k == HX_JSON_BOOL)
        return hx_json_bool(a, false) == hx_json_bool(b, false);
    if (k == HX_JSON_STRING)
        return hx_str_eq(hx_json_str(a), hx_json_str(b));
    if (hx_json_len(a) != hx_json_len(b))
        return false;
    for (size_t i = 0; i < hx_json_len(a) && same; i++) {
        hx_str key = { NULL, 0 };
        const hx_json *x =
            k == HX_JSON_ARRAY ? hx_json_at(a, i) : hx_json_member(a, i, &key);

        same =
            (k == HX_JSON_ARRAY || hx_json_has(b, key.p)) &&
            same_json(x, k == HX_JSON_ARRAY ? hx_json_at(b, i) : hx_json_get(b, key.p));
    }
    return same;
}

static bool same_args(const hx_sb *a, const hx_sb *b)
{
    hx_json *x = NULL, *y = NULL;
    const bool same = hx_json_parse(&x, (hx_str) { a->p, a->n }, 0, NULL) == 0 &&
                      hx_json_parse(&y, (hx_str) { b->p, b->n }, 0, NULL) == 0 &&
                      same_json(x, y);

    hx_json_free(x);
    hx_json_free(y);
    return same;
}

bool hx_toolset_same(hx_engine *e, const hx_reply_opt *opt, hx_prompt given,
                     hx_prompt was)
{
    saying *s = hx_new(saying, 2);
    bool same = s != NULL && read_saying(&s[0], e, opt, given) &&
                read_saying(&s[1], e, opt, was) && s[0].n_call == s[1].n_call &&
                hx_str_eq(strip(&s[0].content), strip(&s[1].content)) &&
                (strip(&s[0].reasoning).n == 0 ||
                 hx_str_eq(strip(&s[0].reasoning), strip(&s[1].reasoning)));

    for (int32_t i = 0; same && i < s[0].n_call; i++)
        same = hx_str_eq(strip(&s[0].name[i]), strip(&s[1].name[i])) &&
               same_args(&s[0].args[i], &s[1].args[i]);
    for (int32_t i = 0; s != NULL && i < 2; i++)
        drop_saying(&s[i]);
    hx_free(s);
    return same;
}
