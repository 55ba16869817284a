/* prompts.c - raw prompts of a request: text or token ids, one or a list, and text to be
 * filled in the middle.
 *
 * Called by the dialects that take raw prompts, on a worker. Reads the body; everything
 * it makes lies in the call's arena. Never renders a chat. */
#include "serve/serve.h"

#include <stdio.h>

/* Byte-level tokens have at least one byte each, so there are no more ids than bytes, unless
 * NFC makes the text longer: then once more. Past the context the count alone is needed. */
int hx_prompts_tokenize(hx_call *c, const char *param, hx_str text, hx_prompt *out)
{
    int64_t cap = HX_MIN((int64_t)text.n, c->info->ctx_tokens), had;

    do {
        int32_t *id = hx_arena_alloc(&c->arena, (size_t)HX_MAX(cap, 1) * sizeof *id);

        if (id == NULL)
            return hx_server_too_large(c, param);
        out->id = id;
        out->n = hx_tokenize(c->engine, text, true, id, cap);
        if (out->n < 0)
            return hx_server_untokenized(c, param, (int)out->n);
        had = cap;
        cap = HX_MIN(out->n, c->info->ctx_tokens);
    } while (cap > had);
    return 0;
}

static int decode_ids(hx_call *c, const char *param, const hx_prompt *p, hx_str *out)
{
    const int64_t n = hx_detokenize(c->engine, p->id, p->n, NULL, 0);
    char *text = n >= 0 ? hx_arena_alloc(&c->arena, (size_t)n + 1) : NULL;

    if (text == NULL || hx_detokenize(c->engine, p->id, p->n, text, n) < 0)
        return hx_server_too_large(c, param);
    *out = (hx_str) { text, (size_t)n };
    return 0;
}

static const char *expected(int kinds)
{
    return kinds == HX_PROMPT_TEXT  ? "a string or a list of strings"
           : kinds == HX_PROMPT_IDS ? "a list of token ids or a list of such lists"
                                    : "a string, a list of strings, a list of token ids "
                                      "or a list of such lists";
}

static int read_one(hx_call *c, const char *param, const hx_json *j, int kinds,
                    bool decode, hx_prompts *out)
{
    hx_prompt *p = &out->prompt[out->n];
    hx_str *text = &out->text[out->n];
    int rc;

    if (!(hx_json_kind(j) == HX_JSON_STRING && (kinds & HX_PROMPT_TEXT) != 0) &&
        !(hx_json_kind(j) == HX_JSON_ARRAY && (kinds & HX_PROMPT_IDS) != 0))
        return hx_server_problem(c, 400, param, "invalid_type",
                                 "%s: found %s, expected %s", param, hx_json_kind_name(j),
                                 expected(kinds));
    if (hx_json_kind(j) == HX_JSON_STRING) {
        *text = hx_json_str(j);
        rc = hx_prompts_tokenize(c, param, *text, p);
    } else if ((rc = hx_params_ids(c, j, param, &p->id, &p->n)) == 0 && decode) {
        rc = decode_ids(c, param, p, text);
    }
    if (rc == 0 && p->n == 0)
        return hx_server_problem(c, 400, param, "invalid_value",
                                 "%s: empty; at least one token is needed", param);
    out->n += rc == 0;
    return rc;
}

int hx_prompts_read(hx_call *c, const char *name, int kinds, bool decode, hx_prompts *out)
{
    const hx_json *j = hx_params_get(c->body, name), *first = hx_json_at(j, 0);
    const bool list =
        hx_json_kind(j) == HX_JSON_ARRAY &&
        (hx_json_kind(first) == HX_JSON_STRING || hx_json_kind(first) == HX_JSON_ARRAY);
    const size_t n = list ? hx_json_len(j) : 1;
    char param[96];
    int rc;

    *out = (hx_prompts) { .list = list };
    snprintf(param, sizeof param, "%s", name);
    if (j == NULL)
        return hx_server_problem(c, 400, name, "missing_required_parameter",
                                 "%s: missing; expected %s", name, expected(kinds));
    if (n > HX_PROMPTS_MAX)
        return hx_server_problem(c, 400, name, "invalid_value",
                                 "%s: %zu prompts, at most %d", name, n, HX_PROMPTS_MAX);
    out->prompt = hx_arena_alloc(&c->arena, n * sizeof *out->prompt);
    out->text = hx_arena_alloc(&c->arena, n * sizeof *out->text);
    if (out->prompt == NULL || out->text == NULL)
        return hx_server_too_large(c, name);
    for (size_t i = 0; i < n; i++) {
        if (list)
            snprintf(param, sizeof param, "%s[%zu]", name, i);
        if ((rc = read_one(c, param, list ? hx_json_at(j, i) : j, kinds, decode, out)) !=
            0)
            return rc;
    }
    return 0;
}

/* The order that GLM's code models were trained on: prefix, suffix, middle. */
int hx_prompts_infill(hx_call *c, const char *param, hx_str before, hx_str after,
                      hx_prompt *out)
{
    static const char *const names[] = { "<|code_prefix|>", "<|code_suffix|>",
                                         "<|code_middle|>" };
    const hx_str text[] = { before, after };
    int32_t marker[HX_LEN(names)], *id;
    hx_prompt part[HX_LEN(text)];
    int64_t n = 0;
    int rc;

    for (size_t i = 0; i < HX_LEN(names); i++)
        if ((marker[i] = hx_token_id(c->engine, hx_str_c(names[i]))) < 0)
            return hx_server_problem(c, 400, param, "unsupported_value",
                                     "%s: this model's vocabulary has no token %s to "
                                     "fill in the middle with",
                                     param, names[i]);
    for (size_t i = 0; i < HX_LEN(text); i++)
        if ((rc = hx_prompts_tokenize(c, param, text[i], &part[i])) != 0)
            return rc;
    out->n = part[0].n + part[1].n + (int64_t)HX_LEN(names);
    if (out->n >= c->info->ctx_tokens) {
        out->id = part[0].id; /* never read: hx_gen_check() refuses it by its length */
        return 0;
    }
    if ((id = hx_arena_alloc(&c->arena, (size_t)out->n * sizeof *id)) == NULL)
        return hx_server_too_large(c, param);
    out->id = id;
    for (size_t i = 0; i < HX_LEN(text); i++) {
        id[n++] = marker[i];
        memcpy(id + n, part[i].id, (size_t)part[i].n * sizeof *id);
        n += part[i].n;
    }
    id[n] = marker[HX_LEN(text)];
    return 0;
}
