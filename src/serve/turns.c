/* turns.c - a conversation of another dialect as a request for chat completions: that
 * shape is the neutral one, so whatever chat completions can do, every dialect can.
 *
 * Called by dialects on a worker, which check their own fields first: what is wrong here
 * is reported in the names of chat completions and renamed. Never reads a dialect's
 * messages by itself. */
#include "serve/serve.h"

#include <stdio.h>

#define BODY_DEPTH 160 /* a request may nest 128 deep; tools get two levels more */

void hx_turns_open(hx_turns *t, hx_call *c)
{
    *t = (hx_turns) { .c = c };
    hx_sb_str(&t->b, "{\"messages\":[");
}

void hx_turns_free(hx_turns *t)
{
    hx_sb_free(&t->b);
    hx_sb_free(&t->reasoning);
    hx_sb_free(&t->content);
    hx_sb_free(&t->calls);
}

int hx_turns_refuse(hx_turns *t, const char *field, const hx_json *found,
                    hx_json_type wanted, const char *expected)
{
    char param[192];

    snprintf(param, sizeof param, "%s%s", t->at, field);
    return hx_params_refuse(t->c, param, found, wanted, expected);
}

int hx_turns_bad(hx_turns *t, const char *field, const char *why)
{
    char param[192];

    snprintf(param, sizeof param, "%s%s", t->at, field);
    return hx_server_problem(t->c, 400, param, "invalid_value", "%s: %s", param, why);
}

static void put_sb(hx_turns *t, const char *name, hx_sb *text)
{
    hx_sb_printf(&t->b, ",\"%s\":", name);
    hx_json_put_str(&t->b, (hx_str) { text->p, text->n });
    t->b.bad = t->b.bad || text->bad;
    text->n = 0;
}

static void begin(hx_turns *t, const char *role)
{
    hx_sb_printf(&t->b, "%s{\"role\":\"%s\"", t->n++ > 0 ? "," : "", role);
}

/* Ends the assistant's turn. */
static void flush(hx_turns *t)
{
    if (!t->open)
        return;
    t->b.bad = t->b.bad || t->reasoning.bad || t->calls.bad;
    begin(t, "assistant");
    put_sb(t, "content", &t->content);
    if (t->reasoning.n > 0)
        put_sb(t, "reasoning_content", &t->reasoning);
    if (t->calls.n > 0) {
        hx_sb_str(&t->b, ",\"tool_calls\":[");
        hx_sb_add(&t->b, t->calls.p, t->calls.n);
        hx_sb_char(&t->b, ']');
        t->calls.n = 0;
    }
    hx_sb_char(&t->b, '}');
    t->open = false;
}

void hx_turns_say(hx_turns *t, const char *role, hx_str text)
{
    flush(t);
    begin(t, role);
    hx_sb_str(&t->b, ",\"content\":");
    hx_json_put_str(&t->b, text);
    hx_sb_char(&t->b, '}');
}

void hx_turns_result(hx_turns *t, hx_str id, const hx_json *parts, hx_str text)
{
    flush(t);
    begin(t, "tool");
    if (id.p != NULL) {
        hx_sb_str(&t->b, ",\"tool_call_id\":");
        hx_json_put_str(&t->b, id);
    }
    hx_sb_str(&t->b, ",\"content\":");
    if (parts != NULL)
        hx_json_write(&t->b, parts);
    else
        hx_json_put_str(&t->b, text);
    hx_sb_char(&t->b, '}');
}

void hx_turns_assistant(hx_turns *t, hx_str text)
{
    t->open = true;
    hx_sb_add(&t->content, text.p, text.n);
}

void hx_turns_reasoning(hx_turns *t, hx_str text)
{
    t->open = true;
    hx_sb_add(&t->reasoning, text.p, text.n);
}

void hx_turns_call(hx_turns *t, hx_str id, hx_str name, hx_str args)
{
    hx_sb *b = &t->calls;

    t->open = true;
    hx_sb_str(b, b->n > 0 ? ",{\"type\":\"function\"" : "{\"type\":\"function\"");
    if (id.p != NULL) {
        hx_sb_str(b, ",\"id\":");
        hx_json_put_str(b, id);
    }
    hx_sb_str(b, ",\"function\":{\"name\":");
    hx_json_put_str(b, name);
    hx_sb_str(b, ",\"arguments\":");
    hx_json_put_str(b, args);
    hx_sb_str(b, "}}");
}

void hx_turns_end(hx_turns *t)
{
    flush(t);
    hx_sb_char(&t->b, ']');
}

void hx_turns_put(hx_turns *t, const char *name, const hx_json *value)
{
    if (value == NULL)
        return;
    hx_sb_printf(&t->b, ",\"%s\":", name);
    hx_json_write(&t->b, value);
}

void hx_turns_rest(hx_turns *t, const char *const *own)
{
    const hx_json *body = t->c->body;

    for (size_t i = 0; i < hx_json_len(body); i++) {
        hx_str key;
        const hx_json *value = hx_json_member(body, i, &key);
        size_t k = 0;

        while (own[k] != NULL && !hx_str_is(key, own[k]))
            k++;
        if (own[k] != NULL)
            continue;
        hx_sb_char(&t->b, ',');
        hx_json_put_str(&t->b, key);
        hx_sb_char(&t->b, ':');
        hx_json_write(&t->b, value);
    }
}

/* ---- the request --------------------------------------------------------- */

/* Replaces a name that text begins with. */
static bool rename_head(char *text, size_t cap, const hx_rename *names)
{
    for (; names->from != NULL; names++) {
        const size_t n = strlen(names->from);
        char rest[320];

        if (strncmp(text, names->from, n) != 0 || strchr(".[:", text[n]) == NULL)
            continue; /* strchr finds the final NUL too */
        snprintf(rest, sizeof rest, "%s", text + n);
        snprintf(text, cap, "%s%s", names->to, rest);
        return true;
    }
    return false;
}

int hx_turns_rename(hx_call *c, const hx_rename *names, int rc)
{
    if (rc != 0 && rename_head(c->problem.param, sizeof c->problem.param, names))
        rename_head(c->problem.msg, sizeof c->problem.msg, names);
    return rc;
}

int hx_turns_use(hx_turns *t, hx_generate *g, const hx_rename *names)
{
    hx_call *c = t->c;
    hx_json *body = c->body;
    hx_err err = { 0 };
    int rc;

    hx_sb_char(&t->b, '}');
    if (t->b.bad)
        return hx_server_problem(c, 413, NULL, "request_too_large",
                                 "request: %zu bytes of conversation are too many",
                                 t->b.n);
    rc = hx_json_parse(&c->also, (hx_str) { t->b.p, t->b.n }, BODY_DEPTH, &err);
    if (rc != 0)
        return hx_server_problem_err(c, rc, NULL, &err);
    c->body = c->also;
    if ((rc = hx_params_sampling(c, g)) == 0)
        rc = hx_openai_vars(c, g);
    c->body = body;
    for (; names->from != NULL && g->grammar_param != NULL; names++)
        if (strcmp(names->from, g->grammar_param) == 0)
            g->grammar_param = names->to;
    return rc;
}
