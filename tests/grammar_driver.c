/* grammar_driver.c - random walks over masks, for schemas.mjs, which judges them with
 * another implementation of JSON schema.
 *
 * Reads lines {"name", "schema" or "tools", "walks", "accept": [texts]} and writes lines
 * {"name", "error"} or {"name", "docs": [what was walked], "accepted": [true …]}. Of tools
 * a document is what the reply parser makes of the answer: [{"name", "arguments"} …]. The
 * vocabulary is single bytes, a few longer texts, the markers and an end. */
#include <stdio.h>
#include <stdlib.h>

#include "text/text.h"

enum { STEPS_HURRY = 60, STEPS_MAX = 6000, N_WORD = 10, N_MARK = 6 };
enum { FIRST_WORD = 256, FIRST_MARK = FIRST_WORD + N_WORD, END = FIRST_MARK + N_MARK };
enum { N_ID = END + 1 };

static const char *const words[N_WORD] = { "true", "\":", "\",", "the ", " of",
                                           "1",    "é",   "中",  "a\"",  "},{" };
static const char *const marks[N_MARK] = {
    "<tool_call>", "</tool_call>", "<arg_key>",
    "</arg_key>",  "<arg_value>",  "</arg_value>"
};
static char byte[256];
static hx_str token[N_ID];
static uint64_t drawn;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(hx_rng_at(20261129, drawn++) % n);
}

static int32_t find(void *ud, hx_str text)
{
    (void)ud;
    for (int32_t i = 0; i < N_MARK; i++)
        if (hx_str_is(text, marks[i]))
            return FIRST_MARK + i;
    return -1;
}

static hx_vocab *vocabulary(void)
{
    static bool special[N_ID];
    const int32_t end = END;
    hx_vocab *v = NULL;

    for (int32_t i = 0; i < N_ID; i++) {
        if (i < FIRST_WORD) {
            byte[i] = (char)i;
            token[i] = (hx_str) { &byte[i], 1 };
        } else if (i < FIRST_MARK) {
            token[i] = hx_str_c(words[i - FIRST_WORD]);
        } else {
            token[i] = i == END ? HX_STR("<|end|>") : hx_str_c(marks[i - FIRST_MARK]);
            special[i] = true;
        }
    }
    hx_vocab_open(&v,
                  &(hx_vocab_opt) { .bytes = token,
                                    .special = special,
                                    .n_token = N_ID,
                                    .n_vocab = N_ID,
                                    .end = &end,
                                    .n_end = 1 },
                  NULL);
    return v;
}

/* How gladly a token is taken: plain text above odd bytes; in a hurry what closes. */
static uint32_t weight(int32_t id, bool hurry)
{
    static const char closing[] = "}]\",:.";

    if (hurry && (id == END || id == FIRST_MARK + 1 || id == FIRST_MARK + 5))
        return 1000000;
    if (hurry && id < 128 && strchr(closing, id) != NULL && id != 0)
        return 20000 / (uint32_t)(1 + (strchr(closing, id) - closing));
    return id >= ' ' && id < 127 ? 20 : id >= FIRST_WORD ? 40 : 1;
}

static int32_t pick(const uint32_t *mask, bool hurry)
{
    uint64_t all = 0, at;
    int32_t id = -1;

    for (int32_t i = 0; i < N_ID; i++)
        all += (mask[i / 32] >> (i % 32) & 1) != 0 ? weight(i, hurry) : 0;
    if (all == 0)
        return -1;
    at = (uint64_t)below(1u << 30) * all >> 30;
    for (int32_t i = 0; i < N_ID && id < 0; i++) {
        const uint64_t w = (mask[i / 32] >> (i % 32) & 1) != 0 ? weight(i, hurry) : 0;

        if (at < w)
            id = i;
        at -= HX_MIN(at, w);
    }
    return id;
}

/* One answer's ids; false: it did not end. */
static bool walk(hx_grammar *g, hx_ids *ids)
{
    static uint32_t mask[N_ID / 32 + 1];
    const int hurry = (int)below(STEPS_HURRY);
    hx_matcher m;
    hx_err err;

    ids->n = 0;
    hx_grammar_start(g, &m);
    for (int step = 0; step < STEPS_MAX; step++) {
        if (hx_grammar_mask(&m, mask, &err) != 0) {
            fprintf(stderr, "mask: %s\n", err.msg);
            return false;
        }
        const int32_t id = pick(mask, step > hurry);

        if (hx_grammar_accept(&m, id) != 0) {
            fprintf(stderr, "a token of the mask is not accepted: %d\n", id);
            return false;
        }
        if (id == END)
            return true;
        hx_ids_add(ids, &id, 1, NULL);
    }
    return false;
}

/* ---- calls --------------------------------------------------------------- */

static void put_event(void *ud, const hx_reply_event *ev)
{
    hx_sb *b = ud;

    if (ev->kind == HX_REPLY_CALL) {
        hx_sb_printf(b, "%s{\"name\":", ev->call > 0 ? "," : "");
        hx_json_put_str(b, ev->text);
        hx_sb_str(b, ",\"arguments\":");
    } else if (ev->kind == HX_REPLY_ARGS) {
        hx_sb_add(b, ev->text.p, ev->text.n);
    } else if (ev->kind == HX_REPLY_CALL_END) {
        hx_sb_char(b, '}');
    } else {
        hx_sb_str(b, "TEXT"); /* no JSON: there must be none */
    }
}

static void put_calls(hx_sb *b, const hx_ids *ids, const hx_json *tools)
{
    const hx_reply_opt opt = { .format = hx_reply_find("glm"),
                               .find = find,
                               .tools = tools };
    hx_reply *r = NULL;

    hx_reply_open(&r, &opt, NULL);
    hx_sb_char(b, '[');
    for (int64_t i = 0; i < ids->n; i++)
        hx_reply_feed(r, ids->p[i], token[ids->p[i]], put_event, b, NULL);
    hx_reply_end(r, put_event, b, NULL, NULL);
    hx_sb_char(b, ']');
    hx_reply_close(r);
}

static void put_text(hx_sb *b, const hx_ids *ids)
{
    for (int64_t i = 0; i < ids->n; i++)
        hx_sb_add(b, token[ids->p[i]].p, token[ids->p[i]].n);
}

/* Byte by byte, but for markers where there are some. */
static bool accepts(hx_grammar *g, hx_str text, bool marked)
{
    hx_matcher m;
    bool ok = true;

    hx_grammar_start(g, &m);
    while (text.n > 0 && ok) {
        int32_t id = (uint8_t)text.p[0];
        size_t n = 1;

        for (int32_t i = 0; marked && i < N_MARK; i++)
            if (text.n >= strlen(marks[i]) &&
                memcmp(text.p, marks[i], strlen(marks[i])) == 0) {
                id = FIRST_MARK + i;
                n = strlen(marks[i]);
            }
        ok = hx_grammar_accept(&m, id) == 0;
        text.p += n;
        text.n -= n;
    }
    return ok && hx_grammar_done(&m) != HX_GRAMMAR_OPEN;
}

/* ---- lines --------------------------------------------------------------- */

static void answer(const hx_vocab *v, const hx_json *line, hx_sb *out)
{
    const hx_json *tools = hx_json_get(line, "tools"),
                  *accept = hx_json_get(line, "accept");
    const hx_json *schema = hx_json_get(line, tools != NULL ? "spec" : "schema");
    hx_sb source = { 0 };
    hx_grammar *g = NULL;
    hx_ids ids = { 0 };
    hx_err err = { 0 };

    hx_sb_str(out, "{\"name\":");
    hx_json_put_str(out, hx_json_str(hx_json_get(line, "name")));
    hx_json_write(&source, schema);
    if (hx_grammar_open(&g, v, tools != NULL ? HX_GRAMMAR_TOOLS : HX_GRAMMAR_JSON_SCHEMA,
                        (hx_str) { source.p, source.n }, NULL, &err) != 0) {
        hx_sb_str(out, ",\"error\":");
        hx_json_put_str(out, hx_str_c(err.msg));
    } else {
        hx_sb_str(out, ",\"docs\":[");
        for (int64_t i = 0; i < hx_json_int(hx_json_get(line, "walks"), 1); i++) {
            hx_sb doc = { 0 };

            if (!walk(g, &ids))
                hx_sb_str(&doc, "UNFINISHED ");
            if (tools != NULL && doc.n == 0)
                put_calls(&doc, &ids, tools);
            else
                put_text(&doc, &ids);
            hx_sb_str(out, i > 0 ? "," : "");
            hx_json_put_str(out, (hx_str) { doc.p, doc.n });
            hx_sb_free(&doc);
        }
        hx_sb_str(out, "],\"accepted\":[");
        for (size_t i = 0; i < hx_json_len(accept); i++)
            hx_sb_printf(out, "%s%s", i > 0 ? "," : "",
                         accepts(g, hx_json_str(hx_json_at(accept, i)), tools != NULL)
                             ? "true"
                             : "false");
        hx_sb_char(out, ']');
    }
    hx_sb_str(out, "}\n");
    hx_grammar_close(g);
    hx_ids_free(&ids);
    hx_sb_free(&source);
}

int main(void)
{
    hx_vocab *v = vocabulary();
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;

    while (v != NULL && (n = getline(&line, &cap, stdin)) > 0) {
        hx_json *j = NULL;
        hx_sb out = { 0 };
        hx_err err;

        if (hx_json_parse(&j, (hx_str) { line, (size_t)n }, 200, &err) != 0) {
            fprintf(stderr, "%s\n", err.msg);
            exit(1);
        }
        answer(v, j, &out);
        fwrite(out.p, 1, out.n, stdout);
        hx_sb_free(&out);
        hx_json_free(j);
    }
    free(line);
    hx_vocab_close(v);
    return v != NULL ? 0 : 1;
}
