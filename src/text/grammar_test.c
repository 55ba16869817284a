/* Tests of constrained decoding: grammar.c and grammar_regex, grammar_ebnf,
 * grammar_schema, grammar_value, grammar_ir, grammar_nfa, grammar_lang, grammar_dfa,
 * grammar_match and grammar_mask.
 *
 * Independent judges: documents written by hand and python3-jsonschema (schemas), PCRE2
 * (regular expressions), hx_grammar_accept() token by token (masks). All random choices
 * come from fixed seeds. The argument "bench" (and a tokenizer.json)
 * prints figures instead. */
/* clang-format off */      /* for the tables */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "text/grammar_ir.h"
#include "text/text.h"

#define DATA "tests/data/grammar/"

static uint64_t seed = 1, drawn;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(hx_rng_at(seed, drawn++) % n);
}

/* Small numbers more often. */
static uint32_t skewed(uint32_t n)
{
    return below(1 + below(1 + below(n)));
}

/* Of this process: other work on the machine counts less. */
static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* ---- vocabularies ---------------------------------------------------- */

typedef struct {
    hx_arena arena;
    hx_str *bytes;
    bool   *special;
    int32_t n, cap;
    hx_tok *tok;
    hx_vocab *v;
} words;

static words demo, big;

static int32_t add_word(words *w, const char *p, size_t n)
{
    if (w->n == w->cap)
        return -1;
    w->bytes[w->n] = (hx_str) { hx_arena_dup(&w->arena, p, n), n };
    assert_non_null(w->bytes[w->n].p);
    return w->n++;
}

static void words_open(words *w, int32_t cap)
{
    *w = (words) { .cap = cap };
    hx_arena_init(&w->arena, 256 << 20);
    w->bytes = hx_new(hx_str, cap);
    w->special = hx_new(bool, cap);
}

static void words_done(words *w, int32_t n_vocab, int32_t end)
{
    const hx_vocab_opt opt = { .bytes = w->bytes, .special = w->special, .n_token = w->n,
                               .n_vocab = n_vocab, .end = &end, .n_end = 1 };
    hx_err err = { 0 };

    if (hx_vocab_open(&w->v, &opt, &err) != 0)
        fail_msg("%s", err.msg);
}

/* The bundled model's tokens. */
static void demo_open(void)
{
    hx_err err = { 0 };
    char *text;
    size_t n;

    assert_int_equal(hx_file_read("models/demo-exl3/tokenizer.json", 1 << 24, &text, &n, &err), 0);
    words_open(&demo, 1 << 16);
    assert_int_equal(hx_tok_open(&demo.tok, (hx_str) { text, n }, "demo", &err), 0);
    hx_free(text);
    for (int32_t id = 0; id < hx_tok_count(demo.tok); id++) {
        demo.bytes[id] = hx_tok_bytes(demo.tok, id);
        demo.special[id] = demo.bytes[id].n > 0 && hx_tok_find(demo.tok, demo.bytes[id]) == id;
        demo.n = id + 1;
    }
    words_done(&demo, demo.n + 60, hx_tok_find(demo.tok, HX_STR("<|endoftext|>")));
}

static int word_cmp(const void *a, const void *b)
{
    const hx_str *x = a, *y = b;
    const int c = memcmp(x->p, y->p, HX_MIN(x->n, y->n));

    return c != 0 ? c : x->n < y->n ? -1 : x->n > y->n;
}

static size_t put_syllables(char *out, int n)
{
    static const char *const onset[] = { "b", "br", "c", "ch", "d", "f", "g", "gr", "h", "j",
        "k", "l", "m", "n", "p", "pr", "qu", "r", "s", "sh", "st", "t", "th", "tr", "v", "w",
        "z", "" };
    static const char *const vowel[] = { "a", "e", "i", "o", "u", "ea", "ou", "ai", "y" };
    static const char *const coda[] = { "", "", "n", "r", "s", "t", "l", "ng", "ck", "ment",
        "tion", "ed", "er", "ing", "ly" };
    size_t at = 0;

    while (n-- > 0)
        at += (size_t)snprintf(out + at, 24, "%s%s%s", onset[skewed(HX_LEN(onset))],
                               vowel[skewed(HX_LEN(vowel))], coda[skewed(HX_LEN(coda))]);
    return at;
}

/* One candidate token in the mixture that vocabularies of this size have: words in four
 * spellings, Chinese, other scripts, code, punctuation, numbers, blanks. */
static size_t candidate(char *out)
{
    static const char *const marks[] = { "\"", "\",", "\":", "\": \"", "\",\n", "{\"", "}", "},",
        "}\n", "[", "[]", "],", "(", ")", "();", ");\n", "->", "::", "==", "=\"", "/>", "</",
        "\\", "\\n", "\\u00", "\\\"", "'", "',", "('", "//", "/*", "...", "!", "?", "--", "+=",
        "<|", "|>", "#", "$", "%", "&", "*", ":", ";", "~", "\t", "\n", "\n\n", "\r\n", "\"}\n",
        "\"]", "{}", "{{", ".\"", ",\"" };
    char word[200];
    const uint32_t kind = below(100);
    size_t n = 0;

    if (kind < 55) {
        n = put_syllables(word, 1 + (int)below(3));
        if (kind < 10 || kind >= 50)
            word[0] = (char)(word[0] >= 'a' && word[0] <= 'z' ? word[0] - 32 : word[0]);
        for (size_t i = 0; kind >= 50 && i < n; i++)
            word[i] = (char)(word[i] >= 'a' && word[i] <= 'z' ? word[i] - 32 : word[i]);
        return (size_t)snprintf(out, 200, "%s%.*s", kind < 35 ? " " : "", (int)n, word);
    }
    if (kind < 78) {
        for (uint32_t k = 1 + below(4); k > 0; k--)
            n += (size_t)hx_utf8_put(0x4e00 + skewed(5200), out + n);
        return n;
    }
    if (kind < 86) {
        static const uint32_t from[] = { 0x410, 0x3b1, 0xe0, 0x621, 0xac00, 0x3041, 0x905, 0x1f600 };
        const uint32_t base = from[below(HX_LEN(from))];

        for (uint32_t k = 1 + below(6); k > 0; k--)
            n += (size_t)hx_utf8_put(base + below(base == 0xac00 ? 800 : 40), out + n);
        return n - (below(10) == 0 && n > 1);       /* some are cut inside a character */
    }
    if (kind < 94) {
        n = (size_t)snprintf(out, 100, "%s", below(3) == 0 ? " " : "");
        for (uint32_t k = 1 + below(3); k > 0; k--)
            n += (size_t)snprintf(out + n, 20, "%s", marks[skewed(HX_LEN(marks))]);
        return n;
    }
    if (kind < 98) {
        word[put_syllables(word, 1 + (int)below(2))] = '\0';
        return (size_t)snprintf(out, 200, below(2) == 0 ? "%s%s" : "%s_%s", word,
                                marks[skewed(HX_LEN(marks))]);
    }
    if (kind < 99)
        return (size_t)snprintf(out, 20, "%u", below(1000));
    memset(out, below(4) == 0 ? '\n' : ' ', 1 + below(100));
    return 1 + below(100);
}

/* 154,880 ids as GLM-5.3 has: all bytes, then different candidates, sorted out of a larger
 * number of them; the last ids are special or unused. */
static void big_open(void)
{
    enum { TEXT = 154820, ALL = 154856, ROWS = 154880, TRIES = 1200000 };
    hx_str *c = hx_new(hx_str, TRIES);
    size_t n = 0, kept = 0;
    char buf[512];

    seed = 7;
    words_open(&big, ALL);
    assert_non_null(c);
    for (int b = 0; b < 256; b++)
        add_word(&big, (char[]) { (char)b }, 1);
    for (; n < TRIES; n++) {
        const size_t len = candidate(buf);

        c[n] = (hx_str) { hx_arena_dup(&big.arena, buf, len), len };
    }
    qsort(c, n, sizeof(*c), word_cmp);
    for (size_t i = 0; i < n; i++)
        if (c[i].n > 1 && (kept == 0 || word_cmp(&c[kept - 1], &c[i]) != 0))
            c[kept++] = c[i];
    if (kept < TEXT - 256)
        fail_msg("only %zu different candidates", kept);
    for (size_t i = 0; big.n < TEXT; i++) {
        /* An even sample of the sorted list. */
        const hx_str w = c[i * kept / (TEXT - 256)];

        add_word(&big, w.p, w.n);
    }
    while (big.n < ALL) {
        const int len = snprintf(buf, sizeof(buf), "<|special_%d|>", big.n);

        big.special[add_word(&big, buf, (size_t)len)] = true;
    }
    hx_free(c);
    words_done(&big, ROWS, ALL - 1);
}

static void words_close(words *w)
{
    hx_vocab_close(w->v);
    hx_tok_close(w->tok);
    hx_free(w->bytes);
    hx_free(w->special);
    hx_arena_reset(&w->arena);
}

static int setup(void **state)
{
    (void)state;
    demo_open();
    big_open();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    words_close(&demo);
    words_close(&big);
    return 0;
}

/* ---- helpers --------------------------------------------------------- */

static hx_grammar *must_open(const hx_vocab *v, hx_grammar_kind kind, hx_str source,
                             const hx_grammar_opt *opt)
{
    hx_grammar *g;
    hx_err err = { 0 };

    if (hx_grammar_open(&g, v, kind, source, opt, &err) != 0)
        fail_msg("%.*s: %s", (int)HX_MIN(source.n, 300), source.p, err.msg);
    return g;
}

static bool matches(hx_grammar *g, hx_str text)
{
    hx_matcher m;

    hx_grammar_start(g, &m);
    return hx_grammar_accept_bytes(&m, text) == 0 && hx_grammar_done(&m) != HX_GRAMMAR_OPEN;
}

static bool has_bit(const uint32_t *mask, int32_t id)
{
    return (mask[id / 32] >> (id % 32) & 1) != 0;
}

/* Compares a mask with what accept() says of each id. */
static void check_mask(const words *w, const hx_matcher *m, const char *what)
{
    uint32_t mask[154880 / 32 + 1];
    hx_matcher a = *m, b;
    hx_err err = { 0 };

    if (hx_grammar_mask(&a, mask, &err) != 0)
        fail_msg("%s: %s", what, err.msg);
    for (int32_t id = 0; id < w->n; id++) {
        int rc;

        /* Copying a matcher costs more than refusing most tokens. */
        b = *m;
        rc = hx_grammar_accept(&b, id);
        if ((rc == 0) != has_bit(mask, id))
            fail_msg("%s: token %d \"%.*s\": mask %d, accept %d", what, id,
                     (int)w->bytes[id].n, w->bytes[id].p, has_bit(mask, id), rc);
    }
    for (int32_t id = w->n; id < w->v->n_vocab; id++)
        if (has_bit(mask, id))
            fail_msg("%s: bit of no token %d", what, id);
}

/* ---- schemas --------------------------------------------------------- */

typedef struct { char *text; size_t n; hx_json **line; size_t n_line; } lines;

static void lines_open(lines *l)
{
    hx_err err = { 0 };
    size_t at = 0;

    *l = (lines) { 0 };
    assert_int_equal(hx_file_read(DATA "schemas.jsonl", 1 << 24, &l->text, &l->n, &err), 0);
    l->line = hx_new(hx_json *, 1000);
    while (at < l->n) {
        const char *end = memchr(l->text + at, '\n', l->n - at);
        const size_t len = (size_t)(end - (l->text + at));

        if (hx_json_parse(&l->line[l->n_line++], (hx_str) { l->text + at, len }, 0, &err) != 0)
            fail_msg("line %zu: %s", l->n_line, err.msg);
        at += len + 1;
    }
}

static void lines_close(lines *l)
{
    for (size_t i = 0; i < l->n_line; i++)
        hx_json_free(l->line[i]);
    hx_free(l->line);
    hx_free(l->text);
}

static hx_grammar *schema_open(const lines *l, size_t i, const hx_vocab *v)
{
    hx_sb b = { 0 };
    hx_grammar *g;
    hx_err err = { 0 };

    hx_json_write(&b, hx_json_get(l->line[i], "schema"));
    if (hx_grammar_open(&g, v, HX_GRAMMAR_JSON_SCHEMA, (hx_str) { b.p, b.n }, NULL, &err) != 0)
        fail_msg("%s: %s", hx_json_str(hx_json_get(l->line[i], "name")).p, err.msg);
    hx_sb_free(&b);
    return g;
}

static int count_wrong(hx_grammar *g, const hx_json *line, const char *list, bool want, int *n)
{
    const hx_json *docs = hx_json_get(line, list);
    int wrong = 0;

    for (size_t k = 0; k < hx_json_len(docs); k++)
        for (int spaced = 0; spaced < 2; spaced++) {
            hx_sb b = { 0 };

            if (spaced)
                hx_json_write_python(&b, hx_json_at(docs, k), false, 0);
            else
                hx_json_write(&b, hx_json_at(docs, k));
            ++*n;
            if (matches(g, (hx_str) { b.p, b.n }) != want) {
                wrong++;
                print_message("%s: %s %s\n", hx_json_str(hx_json_get(line, "name")).p,
                              want ? "refused" : "accepted", b.p);
            }
            hx_sb_free(&b);
        }
    return wrong;
}

static void test_schema_documents(void **state)
{
    lines l;
    int wrong = 0, n = 0;

    (void)state;
    lines_open(&l);
    for (size_t i = 0; i < l.n_line; i++) {
        hx_grammar *g = schema_open(&l, i, NULL);

        wrong += count_wrong(g, l.line[i], "valid", true, &n);
        wrong += count_wrong(g, l.line[i], "invalid", false, &n);
        wrong += count_wrong(g, l.line[i], "grammar_invalid", false, &n);
        hx_grammar_close(g);
    }
    print_message("%zu schemas, %d documents\n", l.n_line, n);
    lines_close(&l);
    assert_int_equal(wrong, 0);
}

/* ---- refused --------------------------------------------------------- */

typedef struct { hx_grammar_kind kind; const char *source; int code; const char *says; } refusal;

static const refusal refusals[] = {
    { HX_GRAMMAR_JSON_SCHEMA, "{\"not\":{}}", HX_EUNSUP, "not" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"if\":{},\"then\":{}}", HX_EUNSUP, "if" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"array\",\"uniqueItems\":true}", HX_EUNSUP, "uniqueItems" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"contains\":{}}", HX_EUNSUP, "contains" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"dependentRequired\":{}}", HX_EUNSUP, "dependentRequired" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"unevaluatedProperties\":{\"type\":\"string\"}}", HX_EUNSUP, "unevaluatedProperties" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"http://x.y/z\"}", HX_EUNSUP, "http://x.y/z" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"#anchor\"}", HX_EUNSUP, "#anchor" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"#/$defs/no\"}", HX_EFORMAT, "#/$defs/no" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"#\"}", HX_EFORMAT, "back to itself" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"allOf\":[{\"$ref\":\"#\"}]}", HX_EFORMAT, "back to itself" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"$defs\":{\"a\":{\"$ref\":\"#/$defs/b\"},\"b\":{\"$ref\":\"#/$defs/a\"}},\"$ref\":\"#/$defs/a\"}", HX_EFORMAT, "back to itself" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"anyOf\":[{\"$ref\":\"#\"},{\"type\":\"string\"}]}", HX_EFORMAT, "back to itself" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"$defs\":{\"a\":{\"anyOf\":[{\"$ref\":\"#/$defs/b\"}]},\"b\":{\"anyOf\":[{\"$ref\":\"#/$defs/a\"}]}},\"$ref\":\"#/$defs/a\"}", HX_EFORMAT, "back to itself" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"object\",\"properties\":{\"n\":{\"$ref\":\"#\"}},\"required\":[\"n\"]}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"string\",\"minLength\":3,\"maxLength\":2}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"integer\",\"exclusiveMinimum\":3,\"exclusiveMaximum\":4}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"string\",\"pattern\":\"^a{5}$\",\"maxLength\":4}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"enum\":[]}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"string\",\"const\":1}", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "false", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"strnig\"}", HX_EFORMAT, "strnig" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":3}", HX_EFORMAT, "type" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":[3]}", HX_EFORMAT, "type" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"properties\":[]}", HX_EFORMAT, "properties" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"properties\":{\"a\":3}}", HX_EFORMAT, "integer" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"pattern\":3}", HX_EFORMAT, "pattern" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"minItems\":-1}", HX_EFORMAT, "minItems" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"minItems\":1.5}", HX_EFORMAT, "minItems" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"required\":[1]}", HX_EFORMAT, "required" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"required\":null}", HX_EFORMAT, "\"required\": found null, expected boolean or array" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"exclusiveMinimum\":\"a\"}", HX_EFORMAT, "expected boolean or number" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"multipleOf\":0}", HX_EFORMAT, "multipleOf" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"number\",\"multipleOf\":0.3}", HX_EUNSUP, "multipleOf" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"integer\",\"multipleOf\":12345}", HX_EUNSUP, "multipleOf" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"allOf\":[{\"pattern\":\"a\"},{\"pattern\":\"b\"}]}", HX_EUNSUP, "pattern" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"patternProperties\":{\"a\":{}},\"additionalProperties\":true}", HX_EUNSUP, "patternProperties" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"patternProperties\":{\"a\":{},\"b\":{}},\"additionalProperties\":false}", HX_EUNSUP, "overlap" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"object\",\"additionalProperties\":{},\"minProperties\":2}", HX_EUNSUP, "minProperties" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"pattern\":\"(?=x)\"}", HX_EUNSUP, "look-around" },
    { HX_GRAMMAR_JSON_SCHEMA, "{\"pattern\":\"(\"}", HX_EFORMAT, "regex" },
    { HX_GRAMMAR_JSON_SCHEMA, "{", HX_EFORMAT, "JSON" },
    { HX_GRAMMAR_JSON_SCHEMA, "3", HX_EFORMAT, "integer" },
    { HX_GRAMMAR_JSON_SCHEMA, "", HX_EFORMAT, "JSON" },
    { HX_GRAMMAR_REGEX, "a(b", HX_EFORMAT, "byte 3" },
    { HX_GRAMMAR_REGEX, "ab)", HX_EFORMAT, "byte 2" },
    { HX_GRAMMAR_REGEX, "*a", HX_EFORMAT, "repeat" },
    { HX_GRAMMAR_REGEX, "a**", HX_EFORMAT, "repeat" },
    { HX_GRAMMAR_REGEX, "a++", HX_EUNSUP, "possessive" },
    { HX_GRAMMAR_REGEX, "[a-", HX_EFORMAT, "]" },
    { HX_GRAMMAR_REGEX, "[z-a]", HX_EFORMAT, "order" },
    { HX_GRAMMAR_REGEX, "[]", HX_EUNSUP, "empty class" },
    { HX_GRAMMAR_REGEX, "[[:alpha:]]", HX_EUNSUP, "POSIX" },
    { HX_GRAMMAR_REGEX, "(a)\\1", HX_EUNSUP, "back-references" },
    { HX_GRAMMAR_REGEX, "\\bx", HX_EUNSUP, "\\b" },
    { HX_GRAMMAR_REGEX, "\\p{L}", HX_EUNSUP, "\\p" },
    { HX_GRAMMAR_REGEX, "(?!a)b", HX_EUNSUP, "look-around" },
    { HX_GRAMMAR_REGEX, "(?<=a)b", HX_EUNSUP, "look-around" },
    { HX_GRAMMAR_REGEX, "(?i)a", HX_EUNSUP, "flags" },
    { HX_GRAMMAR_REGEX, "a^b", HX_EUNSUP, "^" },
    { HX_GRAMMAR_REGEX, "a$b", HX_EUNSUP, "$" },
    { HX_GRAMMAR_REGEX, "(^a|b)c", HX_EUNSUP, "some branches" },
    { HX_GRAMMAR_REGEX, "a{3,2}", HX_EFORMAT, "order" },
    { HX_GRAMMAR_REGEX, "\\", HX_EFORMAT, "end" },
    { HX_GRAMMAR_REGEX, "\\y", HX_EFORMAT, "escape" },
    { HX_GRAMMAR_REGEX, "\\xZZ", HX_EFORMAT, "hexadecimal" },
    { HX_GRAMMAR_REGEX, "\\uD83Dx", HX_EFORMAT, "surrogate" },
    { HX_GRAMMAR_REGEX, "\xff", HX_EFORMAT, "UTF-8" },
    { HX_GRAMMAR_EBNF, "rot ::= \"a\"", HX_EFORMAT, "root" },
    { HX_GRAMMAR_EBNF, "root ::= x", HX_EFORMAT, "\"x\" is not defined" },
    { HX_GRAMMAR_EBNF, "root ::= root \"a\" | \"b\"", HX_EFORMAT, "begin with itself" },
    { HX_GRAMMAR_EBNF, "root ::= a\na ::= b? a \"x\" | \"y\"\nb ::= \"z\"", HX_EFORMAT, "\"a\" can begin with itself" },
    { HX_GRAMMAR_EBNF, "root ::= \"a\" root", HX_EFORMAT, "nothing can match" },
    { HX_GRAMMAR_EBNF, "root ::= \"a\"\nroot ::= \"b\"", HX_EFORMAT, "twice" },
    { HX_GRAMMAR_EBNF, "root ::= \"a", HX_EFORMAT, "line 1" },
    { HX_GRAMMAR_EBNF, "\n\nroot ::= )", HX_EFORMAT, "line 3" },
    { HX_GRAMMAR_EBNF, "root = \"a\"", HX_EFORMAT, "::=" },
    { HX_GRAMMAR_EBNF, "root ::= [a", HX_EFORMAT, "class" },
    { HX_GRAMMAR_EBNF, "root ::= (\"a\"", HX_EFORMAT, "(" },
    { HX_GRAMMAR_EBNF, "root ::= \"a\"{3,2}", HX_EFORMAT, "order" },
    { HX_GRAMMAR_EBNF, "root ::= \"\\q\"", HX_EFORMAT, "escape" },
    { HX_GRAMMAR_EBNF, "", HX_EFORMAT, "root" },
    { HX_GRAMMAR_CHOICE, "[]", HX_EFORMAT, "choices" },
    { HX_GRAMMAR_CHOICE, "[1]", HX_EFORMAT, "element 0" },
    { HX_GRAMMAR_CHOICE, "{}", HX_EFORMAT, "array" },
    { HX_GRAMMAR_NONE, "", HX_EARG, "kind" },
};

static void check_refused(const refusal *r)
{
    hx_grammar *g;
    hx_err err = { 0 };
    const int rc = hx_grammar_open(&g, NULL, r->kind, hx_str_c(r->source), NULL, &err);

    if (rc != r->code || err.code != r->code || strstr(err.msg, r->says) == NULL)
        fail_msg("%.200s: %d \"%s\", expected %d and \"%s\"", r->source, rc, err.msg, r->code,
                 r->says);
    assert_null(g);
}

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < HX_LEN(refusals); i++)
        check_refused(&refusals[i]);
}

/* ---- limits ---------------------------------------------------------- */

static char *repeat2(const char *head, const char *s, size_t n, const char *mid, const char *t,
                     const char *tail)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, head);
    for (size_t i = 0; i < n; i++)
        hx_sb_str(&b, s);
    hx_sb_str(&b, mid);
    for (size_t i = 0; i < n; i++)
        hx_sb_str(&b, t);
    hx_sb_str(&b, tail);
    assert_false(b.bad);
    return b.p;
}

static char *repeat(const char *head, const char *s, size_t n, const char *tail)
{
    return repeat2(head, s, n, "", "", tail);
}

static void check_limit(hx_grammar_kind kind, char *source, const char *limit)
{
    hx_grammar *g;
    hx_err err = { 0 };
    const double start = now_us();
    const int rc = hx_grammar_open(&g, NULL, kind, hx_str_c(source), NULL, &err);
    const double ms = (now_us() - start) / 1000;

    print_message("  %6.1f ms  %.60s: %s\n", ms, source, err.msg);
    if (rc != HX_ELIMIT || strstr(err.msg, limit) == NULL)
        fail_msg("%.80s: %d \"%s\", expected %s", source, rc, err.msg, limit);
    assert_null(g);
    /* The promise is 100 ms; this leaves room for sanitizers and busy machines. */
    assert_true(ms < 2000);
    hx_free(source);
}

static void test_limits(void **state)
{
    const hx_grammar_kind re = HX_GRAMMAR_REGEX, schema = HX_GRAMMAR_JSON_SCHEMA;
    const hx_grammar_kind ebnf = HX_GRAMMAR_EBNF;
    hx_sb many = { 0 };

    (void)state;
    check_limit(re, repeat("", "(", 60000, ""), "nesting");
    check_limit(re, repeat2("", "(", 60000, "", ")", ""), "nesting");
    check_limit(re, repeat("a{1,1000000}", "", 0, ""), "repeat");
    check_limit(re, repeat("a{100000}", "", 0, ""), "states");
    check_limit(re, repeat("((a{100}){100}){100}", "", 0, ""), "states");
    check_limit(re, repeat("((((a{30}){30}){30}){30}){30}", "", 0, ""), "states");
    check_limit(re, repeat("(a|b)*a", "(a|b)", 40, ""), "s)");
    check_limit(re, repeat("", "(x+x+)+", 3000, "y"), "s)");
    check_limit(re, repeat("", ".*a.*b", 2000, ""), "s)");
    check_limit(re, repeat2("", "(.*|", 100, "", ")*", ".{1000}"), "s)");
    check_limit(re, repeat2("", "a?", 30000, "", "a", ""), "s)");
    check_limit(re, repeat("", "a", 1 << 21, ""), "source_bytes");
    check_limit(schema, repeat("", "[", 60000, ""), "nesting");
    check_limit(schema, repeat("{\"a\":\"", "x", 10 << 20, "\"}"), "source_bytes");
    check_limit(schema, repeat2("", "{\"items\":", 200, "{}", "}", ""), "nesting");
    check_limit(schema, repeat("{\"pattern\":\"", "(", 60000, "\"}"), "nesting");
    check_limit(schema, repeat("{\"pattern\":\"^[a-z]{0,100}$\",\"maxLength\":90000", "", 0,
                               ",\"minLength\":70}"), "states");
    check_limit(schema, repeat("{\"allOf\":[", "{\"anyOf\":[{\"minimum\":1},{\"maximum\":9}]},",
                               40, "{}]}"), "s)");
    check_limit(schema, repeat("{\"type\":\"object\",\"maxProperties\":60000,\"properties\":{",
                               "\"a\":{},", 3, "\"b\":{}},\"additionalProperties\":{}}"), "rules");
    check_limit(ebnf, repeat("root ::= ", "(", 60000, ""), "nesting");
    check_limit(ebnf, repeat("root ::= \"a\"{1,1000000}", "", 0, ""), "repeat");
    check_limit(ebnf, repeat("root ::= (\"a\"|\"b\")*\"a\"", "(\"a\"|\"b\")", 40, ""), "s)");
    check_limit(HX_GRAMMAR_CHOICE, repeat("[\"", "x", 100000, "\"]"), "states");

    hx_sb_str(&many, "root ::= a0\n");
    for (int i = 0; i < 200; i++)
        hx_sb_printf(&many, "a%d ::= \"x\" a%d \"y\"\n", i, i + 1);
    hx_sb_str(&many, "a200 ::= \"z\"\n");
    check_limit(ebnf, many.p, "depth");
    many = (hx_sb) { 0 };
    hx_sb_str(&many, "root::=");
    for (int i = 0; i < 70000; i++)
        hx_sb_printf(&many, " %d", i);
    check_limit(ebnf, many.p, "rules");
}

/* A ten times nested pattern in a value, and other sources near the limits that must work. */
static void test_large_sources(void **state)
{
    static const struct { hx_grammar_kind kind; const char *source; } sources[] = {
        { HX_GRAMMAR_REGEX, "^.{1,1000}$" },
        { HX_GRAMMAR_REGEX, "(((((((((([a-z]{1,3})?){1,3}x)*){1,2}y)*)*)*)*)*)*" },
        { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"string\",\"maxLength\":1000000}" },
        { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"array\",\"minItems\":1000,\"maxItems\":100000}" },
        { HX_GRAMMAR_JSON_SCHEMA, "{\"pattern\":\"^[a-z]+([.-][a-z]+)*$\",\"maxLength\":253}" },
        { HX_GRAMMAR_EBNF, "root ::= (\"a\" | \"b\"){5,50000}" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(sources); i++) {
        const double start = now_us();
        hx_grammar *g = must_open(NULL, sources[i].kind, hx_str_c(sources[i].source), NULL);

        print_message("  %6.1f ms  %s\n", (now_us() - start) / 1000, sources[i].source);
        hx_grammar_close(g);
    }
}

/* ---- random walks ---------------------------------------------------- */

/* Bytes that end the rule of each state soonest, so that a walk can be brought to an end. */
typedef struct { const hx_grammar *g; uint64_t *end; } ways;

enum { FAR = 1 << 30 };

static uint64_t end_of(const ways *w, uint32_t state)
{
    const hx_dfa *d = &w->g->dfa;
    const hx_dfa_state *s = &d->state.p[state];
    uint64_t best = s->final ? 0 : FAR;

    if (s->rule != HX_IR_NO_END) {
        const hx_dfa_rule *r = &d->rule.p[s->rule];

        return HX_MIN((uint64_t)FAR, r->min * w->end[d->rule.p[r->child].start]);
    }
    for (uint32_t i = 0; i < s->n_byte; i++)
        best = HX_MIN(best, 1 + w->end[d->byte.p[s->byte + i].to]);
    for (uint32_t i = 0; i < s->n_token; i++)
        best = HX_MIN(best, 1 + w->end[d->token.p[s->token + i].to]);
    for (uint32_t i = 0; i < s->n_call; i++) {
        const hx_call_edge *c = &d->call.p[s->call + i];

        best = HX_MIN(best, w->end[d->rule.p[c->rule].start] + w->end[c->ret]);
    }
    return best;
}

static void ways_open(ways *w, const hx_grammar *g)
{
    bool again = true;

    *w = (ways) { g, hx_new(uint64_t, g->dfa.state.n) };
    assert_non_null(w->end);
    for (uint32_t i = 0; i < g->dfa.state.n; i++)
        w->end[i] = FAR;
    while (again) {
        again = false;
        for (uint32_t i = g->dfa.state.n; i > 0; i--) {
            const uint64_t e = end_of(w, i - 1);

            again |= e < w->end[i - 1];
            w->end[i - 1] = e;
        }
    }
}

/* The fewest bytes to the end of all. */
static uint64_t to_end(const ways *w, const hx_matcher *m)
{
    const hx_dfa *d = &w->g->dfa;
    uint64_t below_frame[HX_MATCHER_FRAMES + 1] = { 0 }, best = m->complete ? 0 : FAR;

    for (uint32_t k = 0; k < m->n_frame; k++) {
        const uint32_t rule = d->state.p[m->frame[k].ret].rule;
        uint64_t here = w->end[m->frame[k].ret];

        if (rule != HX_IR_NO_END) {
            const uint32_t min = d->rule.p[rule].min, c = m->frame[k].count;

            here = (min > c ? min - c : 0) * w->end[d->rule.p[d->rule.p[rule].child].start];
        }
        below_frame[k + 1] = here + below_frame[m->frame[k].parent];
    }
    for (uint32_t i = 0; i < m->n_item; i++)
        best = HX_MIN(best, w->end[m->item[i].state] + below_frame[m->item[i].frame]);
    return best;
}

/* Picks an allowed id: any in the beginning, later the byte that leads to the end. */
static int32_t pick(const words *w, const hx_matcher *m, const uint32_t *mask, const ways *hurry)
{
    const int32_t n = w->v->n_vocab, end = w->v->end[0];
    int32_t best = -1;
    uint64_t least = UINT64_MAX;

    if (has_bit(mask, end) && (hurry != NULL || below(4) == 0))
        return end;
    for (int32_t id = 0; hurry != NULL && id < w->n; id++) {
        hx_matcher next;

        if (w->bytes[id].n != 1 || !has_bit(mask, id))
            continue;
        next = *m;
        assert_int_equal(hx_grammar_accept(&next, id), 0);
        if (to_end(hurry, &next) < least) {
            least = to_end(hurry, &next);
            best = id;
        }
    }
    if (best >= 0)
        return best;
    const int32_t from = (int32_t)below((uint32_t)n);

    for (int32_t k = 0; k < n; k++)
        if (has_bit(mask, (from + k) % n))
            return (from + k) % n;
    return -1;
}

/* Makes a text by the masks; false: it did not come to an end in 3,000 tokens. */
static bool random_text(const words *w, hx_grammar *g, int budget, hx_sb *out)
{
    uint32_t mask[154880 / 32 + 1];
    bool ended = false;
    hx_matcher m;
    hx_err err = { 0 };
    ways w2;

    ways_open(&w2, g);
    hx_grammar_start(g, &m);
    for (int step = 0; step < 3000 && !ended; step++) {
        int32_t id;

        hx_noalloc_begin("a step of a matcher");
        if (hx_grammar_mask(&m, mask, &err) != 0)
            fail_msg("after \"%.*s\": %s", (int)out->n, out->p, err.msg);
        id = pick(w, &m, mask, step >= budget ? &w2 : NULL);
        assert_true(id >= 0);
        assert_int_equal(hx_grammar_accept(&m, id), 0);
        hx_noalloc_end();
        ended = id == w->v->end[0];
        if (ended)
            break;
        hx_sb_add(out, w->bytes[id].p, w->bytes[id].n);
    }
    hx_free(w2.end);
    return ended;
}

static int run_python(const char *path)
{
    char line[200];

    snprintf(line, sizeof(line), "/usr/bin/python3 tests/make_grammar_vectors.py %s%s",
             path != NULL ? "--check " : "", path != NULL ? path : "");
    return system(line);
}

static bool have_validator(const char *name)
{
    if (system("/usr/bin/python3 -c 'import jsonschema' 2>/dev/null") == 0)
        return true;
    printf("SKIP %s: no python3-jsonschema\n", name);
    return false;
}

static void test_schema_data(void **state)
{
    (void)state;
    if (!have_validator("grammar data"))
        skip();
    assert_int_equal(run_python(NULL), 0);
}

static void test_schema_walks(void **state)
{
    char path[] = "/tmp/hoist-grammar-XXXXXX";
    const int fd = mkstemp(path);
    FILE *f = fdopen(fd, "w");
    lines l;
    int unfinished = 0, rc;

    (void)state;
    assert_non_null(f);
    lines_open(&l);
    seed = 11;
    for (size_t i = 0; i < l.n_line; i++)
        for (int k = 0; k < 6; k++) {
            const words *w = k < 5 ? &demo : &big;
            hx_grammar *g = schema_open(&l, i, w->v);
            hx_sb doc = { 0 }, line = { 0 };

            if (random_text(w, g, k == 0 ? 0 : 10 * k, &doc)) {
                hx_sb_printf(&line, "{\"schema\":%zu,\"doc\":", i);
                hx_json_put_str(&line, (hx_str) { doc.p, doc.n });
                fprintf(f, "%s}\n", line.p);
            } else {
                unfinished++;
                print_message("unfinished: schema %zu: %.80s\n", i, doc.p);
            }
            hx_sb_free(&doc);
            hx_sb_free(&line);
            hx_grammar_close(g);
        }
    lines_close(&l);
    assert_int_equal(fclose(f), 0);
    rc = have_validator("grammar walks") ? run_python(path) : -1;
    unlink(path);
    assert_int_equal(unfinished, 0);
    if (rc == -1)
        skip();
    assert_int_equal(rc, 0);
}

/* ---- masks, copies, forgetting --------------------------------------- */

static void test_masks_exact(void **state)
{
    lines l;

    (void)state;
    lines_open(&l);
    seed = 13;
    for (size_t i = 0; i < l.n_line; i++) {
        const words *w = i % 12 == 0 ? &big : &demo;
        const char *name = hx_json_str(hx_json_get(l.line[i], "name")).p;
        hx_grammar *g = schema_open(&l, i, w->v);
        uint32_t mask[154880 / 32 + 1];
        hx_matcher m;
        int checks = 0;

        hx_grammar_start(g, &m);
        for (int step = 0; step < 40 && checks < (w == &big ? 2 : 4); step++) {
            if (below(4) == 0) {
                check_mask(w, &m, name);
                checks++;
            }
            assert_int_equal(hx_grammar_mask(&m, mask, NULL), 0);
            const int32_t id = pick(w, &m, mask, NULL);

            if (id == w->v->end[0])
                break;
            assert_int_equal(hx_grammar_accept(&m, id), 0);
        }
        hx_grammar_close(g);
    }
    lines_close(&l);
}

static void test_copies(void **state)
{
    enum { STEPS = 30 };
    static hx_matcher at[STEPS + 1];
    static uint32_t mask[STEPS + 1][4200 / 32 + 1], again[4200 / 32 + 1];
    int32_t id[STEPS];
    lines l;

    (void)state;
    lines_open(&l);
    seed = 17;
    for (size_t i = 0; i < l.n_line; i += 5) {
        hx_grammar *g = schema_open(&l, i, demo.v);
        int n = 0;

        hx_grammar_start(g, &at[0]);
        for (; n < STEPS; n++) {
            assert_int_equal(hx_grammar_mask(&at[n], mask[n], NULL), 0);
            id[n] = pick(&demo, &at[n], mask[n], NULL);
            at[n + 1] = at[n];
            assert_int_equal(hx_grammar_accept(&at[n + 1], id[n]), 0);
            if (id[n] == demo.v->end[0])
                break;
        }
        /* Back to any place, in any order, also after the cache forgot all. */
        for (int k = 0; k < 60; k++) {
            const int to = (int)below((uint32_t)n);
            hx_matcher m = at[to];

            if (k == 30)
                hx_grammar_cache_renew(g, hx_grammar_cache_config(&m));
            assert_int_equal(hx_grammar_mask(&m, again, NULL), 0);
            assert_memory_equal(again, mask[to], demo.v->n_word * 4);
            assert_int_equal(hx_grammar_accept(&m, id[to]), 0);
            assert_int_equal(hx_grammar_done(&m), hx_grammar_done(&at[to + 1]));
        }
        hx_grammar_close(g);
    }
    lines_close(&l);
}

/* The cache changes nothing: with hardly any, masks are the same. */
static void test_small_cache(void **state)
{
    static const char *const sources[] = {
        "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}}",
        "{\"type\":\"string\",\"maxLength\":300}",
        "{\"type\":\"array\",\"items\":{\"type\":\"string\",\"pattern\":\"^\\\\w{1,400}( \\\\w{1,60})*$\"}}",
        "{}",
    };
    const hx_grammar_opt tiny = { .cache_bytes = 1 };
    uint32_t a[154880 / 32 + 1], b[154880 / 32 + 1];

    (void)state;
    seed = 19;
    for (size_t i = 0; i < HX_LEN(sources); i++) {
        const hx_str source = hx_str_c(sources[i]);
        hx_grammar *g = must_open(big.v, HX_GRAMMAR_JSON_SCHEMA, source, NULL);
        hx_grammar *h = must_open(big.v, HX_GRAMMAR_JSON_SCHEMA, source, &tiny);
        hx_matcher m, k;

        hx_grammar_start(g, &m);
        hx_grammar_start(h, &k);
        for (int step = 0; step < 150; step++) {
            assert_int_equal(hx_grammar_mask(&m, a, NULL), 0);
            assert_int_equal(hx_grammar_mask(&k, b, NULL), 0);
            assert_memory_equal(a, b, big.v->n_word * 4);
            const int32_t id = pick(&big, &m, a, NULL);

            if (id == big.v->end[0])
                break;
            assert_int_equal(hx_grammar_accept(&m, id), 0);
            assert_int_equal(hx_grammar_accept(&k, id), 0);
        }
        hx_grammar_close(g);
        hx_grammar_close(h);
    }
}

/* ---- regular expressions --------------------------------------------- */

static pcre2_code *pcre_open(hx_str re)
{
    const uint32_t options = PCRE2_UTF | PCRE2_ANCHORED | PCRE2_ENDANCHORED |
                             PCRE2_DOLLAR_ENDONLY | PCRE2_ALT_BSUX;
    int code;
    PCRE2_SIZE at;
    pcre2_code *c =
        pcre2_compile((PCRE2_SPTR)re.p, re.n, options, &code, &at, NULL);

    if (c == NULL)
        fail_msg("PCRE2 refuses %.*s at %zu: %d", (int)re.n, re.p, at, code);
    return c;
}

/* 1, 0, or -1 where PCRE2 gave up. */
static int pcre_matches(pcre2_code *c, hx_str text)
{
    pcre2_match_data *d = pcre2_match_data_create_from_pattern(c, NULL);
    const int rc = pcre2_match(c, (PCRE2_SPTR)text.p, text.n, 0, 0, d, NULL);

    pcre2_match_data_free(d);
    return rc >= 0 ? 1 : rc == PCRE2_ERROR_NOMATCH ? 0 : -1;
}

static void random_regex(hx_sb *b, int depth)
{
    static const char *const atoms[] = { "a", "b", "c", "[ab]", "[^a]", "[a-c0-9]", "\\d", "\\w",
        "\\W", ".", "é", "[é-ü]", "x", "\\.", "\\\\", "[\\w.]", "[^\\d\\s]", "0", "-", "\\u00e9",
        "\\x62", "[\\x61-\\x63]", "ab", "abc", "\\n", "[-a]", "[a\\-c]", "☃", "[^☃]", "𝄞", "\\s",
        "\\S", "\\D", "\\t", "/", "\\/" };
    static const char *const times[] = { "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?",
        "??", "{0}", "{1}" };
    const uint32_t n = 1 + below(3);

    for (uint32_t i = 0; i < n; i++) {
        if (depth > 0 && below(3) == 0) {
            hx_sb_str(b, below(2) == 0 ? "(" : "(?:");
            random_regex(b, depth - 1);
            hx_sb_str(b, ")");
        } else {
            const char *atom = atoms[below(HX_LEN(atoms))];

            hx_sb_str(b, atom);
        }
        if (below(3) == 0)
            hx_sb_str(b, times[below(HX_LEN(times))]);
    }
    if (below(4) == 0) {
        hx_sb_char(b, '|');
        if (below(5) > 0)
            random_regex(b, depth - 1);
    }
}

static void random_string(hx_sb *b)
{
    static const char *const chars[] = { "a", "b", "c", "ab", "0", "1", "x", "é", "ü", "☃", "𝄞", ".",
        "\\", "-", "_", "Z", "\n", "\t", " ", "/", "abc", "" };

    for (uint32_t k = below(8); k > 0; k--)
        hx_sb_str(b, chars[below(HX_LEN(chars))]);
}

/* Changes a character of an accepted text. */
static void mutate(hx_sb *b)
{
    hx_sb out = { 0 };
    const size_t n = b->n;
    const uint32_t cut = below((uint32_t)n + 1), how = below(3);

    hx_sb_add(&out, b->p, cut);
    if (how < 2)
        random_string(&out);
    if (how > 0 && cut < n)
        hx_sb_add(&out, b->p + cut, n - cut);
    hx_sb_free(b);
    *b = out;
}

static void check_regex(hx_str re, int n, int *n_text, int *n_yes)
{
    hx_grammar *g = must_open(demo.v, HX_GRAMMAR_REGEX, re, NULL);
    pcre2_code *c = pcre_open(re);

    for (int k = 0; k < n; k++) {
        hx_sb text = { 0 };
        bool ours;
        int theirs;

        if (k % 2 == 0)
            random_text(&demo, g, (int)below(8), &text);
        else
            random_string(&text);
        if (k % 4 == 2)
            mutate(&text);
        if (hx_utf8_ok(text.p, text.n)) {
            ours = matches(g, (hx_str) { text.n > 0 ? text.p : "", text.n });
            theirs = pcre_matches(c, (hx_str) { text.n > 0 ? text.p : "", text.n });
            /* White space beyond ASCII is that of ECMA-262, and "." takes no line ends. */
            bool odd = false;

            for (size_t i = 0; i < text.n;) {
                uint32_t cp;

                i += (size_t)hx_utf8_next(text.p + i, text.n - i, &cp);
                odd |= cp == '\r' || cp == 0xa0 || cp == 0x1680 || (cp >= 0x2000 && cp < 0x2060) ||
                       cp == 0x3000 || cp == 0xfeff;
            }
            if (!odd && theirs >= 0 && ours != theirs)
                fail_msg("%.*s: \"%.*s\": ours %d, PCRE2 %d", (int)re.n, re.p, (int)text.n,
                         text.p, ours, theirs);
            ++*n_text;
            *n_yes += ours;
        }
        hx_sb_free(&text);
    }
    pcre2_code_free(c);
    hx_grammar_close(g);
}

static void test_regex(void **state)
{
    static const char *const fixed[] = {
        "", "a", "abc", "a|b|c", "(a|b)*c", "^abc$", "^(a|b)+$", "(^a|^b)c", "x(y$|z$)", "a{3}",
        "a{2,4}b", "(ab){2,}", "[a-z]+@[a-z]+\\.(com|org)", "\\d{3}-\\d{4}", "[^\\n]*",
        "(?:foo|bar)+?baz", "(?<year>\\d{4})-(?<m>\\d\\d)", "[\\]\\[]+", "[-+]?\\d+(\\.\\d+)?",
        "a{,3}", "a{", "a{x}", "}", "[{}]", "\\u0041\\x42", "[\\u00e0-\\u00ff]+",
        "(((a)))", "(|a)(b|)", "()", "(a*)*", "(a*)+b", "(a?){3,5}", "((a|b)?c)*d", "[\\s\\S]{2}",
        "[^\\W_]+", "\\$\\^\\(\\)\\[\\]\\{\\}\\|\\?\\*\\+\\.", "é+", "[^é]", "☃{2}", "𝄞|\\t",
        "\\cA?b", "\\0?z", "[\\b]?c", "a.c", ".*foo.*bar", "(0|[1-9]\\d*)(\\.\\d+)?([eE][+-]?\\d+)?",
    };
    int n_text = 0, n_yes = 0, n_re = 0;

    (void)state;
    seed = 23;
    for (size_t i = 0; i < HX_LEN(fixed); i++, n_re++)
        check_regex(hx_str_c(fixed[i]), 60, &n_text, &n_yes);
    for (int i = 0; i < 600; i++, n_re++) {
        hx_sb re = { 0 };

        random_regex(&re, 3);
        check_regex((hx_str) { re.p, re.n }, 24, &n_text, &n_yes);
        hx_sb_free(&re);
    }
    print_message("%d expressions, %d texts, %d accepted\n", n_re, n_text, n_yes);
    assert_true(n_text > 10000 && n_yes > n_text / 5 && n_yes < n_text * 4 / 5);
}

/* What ECMA-262 says and PCRE2 does not. */
static void test_regex_ecma(void **state)
{
    static const struct { const char *re, *yes, *no; } cases[] = {
        { "\\s", "\xc2\xa0", "\xc2\xa1" },       { "\\S", "\xc2\xa1", "\xc2\xa0" },
        { "\\s", "\xef\xbb\xbf", "x" },          { ".", "x", "\r" },
        { ".", "\xc2\x85", "\xe2\x80\xa8" },     { "\\w", "_", "\xc3\xa9" },
        { "\\ud83d\\ude00", "\xf0\x9f\x98\x80", "x" },
        { "\\u{1f600}", "\xf0\x9f\x98\x80", "x" },
        { "[\\d-x]", "-", "e" },                { "a{,3}", "a{,3}", "aa" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        hx_grammar *g = must_open(NULL, HX_GRAMMAR_REGEX, hx_str_c(cases[i].re), NULL);

        assert_true(matches(g, hx_str_c(cases[i].yes)));
        assert_false(matches(g, hx_str_c(cases[i].no)));
        hx_grammar_close(g);
    }
}

/* ---- rules, choices, tokens ------------------------------------------ */

typedef struct { const char *source; const char *yes[6], *no[6]; } ebnf_case;

static const ebnf_case ebnf_cases[] = {
    { "root ::= \"yes\" | \"no\"", { "yes", "no" }, { "", "y", "yesno" } },
    { "root ::= expr\nexpr ::= term ((\"+\" | \"-\") term)*\nterm ::= num | \"(\" expr \")\"\n"
      "num ::= [0-9]+",
      { "1", "1+2-3", "((1)+2)", "10-(2+3)" }, { "", "1+", "(1", "a", "1)" } },
    { "# a comment\nroot ::= item (\", \" item)* # more\nitem ::= [a-z]{2,4} | \"\\\"\" [^\"]* \"\\\"\"\n",
      { "ab", "ab, cdef", "\"x y\", ab", "\"\"" }, { "a", "abcde", "ab,cd", "\"x" } },
    { "root ::= \"a\" (\n  \"b\" |\n  \"c\"\n)? \"d\"", { "ad", "abd", "acd" }, { "abcd", "a" } },
    { "root ::= [^\\x00-\\x1F\\x7F]+", { "é x", "abc" }, { "", "a\n", "\x7f" } },
    { "root ::= \"\\u00e9\" \"\\U0001F600\" \"\\x41\" \"\\t\"", { "\xc3\xa9\xf0\x9f\x98\x80" "A\t" }, { "e" } },
    { "root ::= list\nlist ::= \"x\" list | \"\"", { "", "x", "xxxxxxxx" }, { "y", "xy" } },
    { "root ::= \"(\" root \")\" | \"\"", { "", "()", "((()))" }, { "(", ")", "(()" } },
    { "root ::= a a\na ::= b*\nb ::= \"\" | \"x\"", { "", "x", "xxxx" }, { "y" } },
    { "root ::= (\"a\"? \"b\"?){3}", { "", "ab", "bab", "ababab" }, { "abababa", "bbbb" } },
    { "root ::= (ws \"x\" ws){100,120}\nws ::= [ ]*", { NULL }, { "x x x" } },
    { "root ::= (\"ab\"){40,}", { "abababababababababababababababababababababababababababababababababababababababab" }, { "ababab" } },
    { "root::=\"a\"|\n\"b\"\n\n\nroot-2 ::= root\n", { "a", "b" }, { "ab" } },
    { "root ::= .{2}", { "ab", "\n\xc3\xa9" }, { "a", "abc" } },
    { "root ::= object\nvalue ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n"
      "object ::= \"{\" ws ( string \":\" ws value (\",\" ws string \":\" ws value)* )? \"}\" ws\n"
      "array ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\n"
      "string ::= \"\\\"\" ( [^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}) )* \"\\\"\" ws\n"
      "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws\n"
      "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n",
      { "{}", "{ \"a\":\n  [1, 2.5e3, true]}", "{\"\\u00e9\": {\"b\": null}} " }, { "", "[]", "{\"a\"}", "{\"a\": 01}" } },
};

static void test_ebnf(void **state)
{
    (void)state;
    seed = 29;
    for (size_t i = 0; i < HX_LEN(ebnf_cases); i++) {
        const ebnf_case *c = &ebnf_cases[i];
        hx_grammar *g = must_open(demo.v, HX_GRAMMAR_EBNF, hx_str_c(c->source), NULL);

        for (size_t k = 0; k < HX_LEN(c->yes) && c->yes[k] != NULL; k++)
            if (!matches(g, hx_str_c(c->yes[k])))
                fail_msg("%s: refused %s", c->source, c->yes[k]);
        for (size_t k = 0; k < HX_LEN(c->no) && c->no[k] != NULL; k++)
            if (matches(g, hx_str_c(c->no[k])))
                fail_msg("%s: accepted %s", c->source, c->no[k]);
        for (int k = 0; k < 3; k++) {
            hx_sb text = { 0 };

            if (random_text(&demo, g, 10, &text))
                assert_true(matches(g, (hx_str) { text.n > 0 ? text.p : "", text.n }));
            hx_sb_free(&text);
        }
        hx_grammar_close(g);
    }
}

/* Turns are counted, also around something that may be empty. */
static void test_counting(void **state)
{
    hx_grammar *g = must_open(NULL, HX_GRAMMAR_EBNF, HX_STR("root ::= x{70,75} \".\"\nx ::= \"ab\" | \"a\"\n"), NULL);
    hx_grammar *h = must_open(NULL, HX_GRAMMAR_EBNF, HX_STR("root ::= (x x){0,75} \".\"\nx ::= \"ab\" | \"\"\n"), NULL);

    (void)state;
    for (size_t n = 0; n < 160; n++) {
        char *a = repeat("", "a", n, "."), *ab = repeat("", "ab", n, ".");

        assert_int_equal(matches(g, hx_str_c(a)), n >= 70 && n <= 75);
        assert_int_equal(matches(g, hx_str_c(ab)), n >= 70 && n <= 75);
        assert_int_equal(matches(h, hx_str_c(ab)), n <= 150);
        hx_free(a);
        hx_free(ab);
    }
    hx_grammar_close(g);
    hx_grammar_close(h);
}

/* Where counts differ from way to way: 2^60 states if it were made deterministic. */
static void test_counting_ambiguous(void **state)
{
    hx_grammar *g = must_open(demo.v, HX_GRAMMAR_EBNF,
                              HX_STR("root ::= (\"a\"|\"b\")* \"a\" (\"a\"|\"b\"){60}"), NULL);
    char text[500];
    hx_matcher m;

    (void)state;
    seed = 41;
    hx_grammar_start(g, &m);
    for (size_t n = 0; n < sizeof(text); n++) {
        text[n] = (char)('a' + below(2));
        assert_int_equal(hx_grammar_accept_bytes(&m, (hx_str) { text + n, 1 }), 0);
        assert_int_equal(hx_grammar_done(&m) != HX_GRAMMAR_OPEN, n >= 60 && text[n - 60] == 'a');
    }
    check_mask(&demo, &m, "many counts");
    hx_grammar_close(g);
}

static void test_choice(void **state)
{
    hx_grammar *g = must_open(demo.v, HX_GRAMMAR_CHOICE,
                              HX_STR("[\"red\",\"green\",\"greenish\",\"\\u00fc\\n\"]"), NULL);
    hx_matcher m;

    (void)state;
    assert_true(matches(g, HX_STR("red")) && matches(g, HX_STR("green")) &&
                matches(g, HX_STR("greenish")) && matches(g, HX_STR("ü\n")));
    assert_false(matches(g, HX_STR("greeni")) || matches(g, HX_STR("")) ||
                 matches(g, HX_STR("redgreen")));
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("g")), 0);
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("reen")), 0);
    assert_int_equal(hx_grammar_done(&m), HX_GRAMMAR_MAY_END);
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("x")), HX_EFORMAT);
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("ish")), 0);
    assert_int_equal(hx_grammar_done(&m), HX_GRAMMAR_MUST_END);
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("x")), HX_EFORMAT);
    check_mask(&demo, &m, "choice at its end");
    hx_grammar_close(g);
}

/* GBNF can name a token too, also one that has bytes of its own. */
static void test_ebnf_tokens(void **state)
{
    char source[200];
    hx_grammar *g;
    hx_matcher m;
    int32_t plain = -1;

    (void)state;
    for (int32_t id = 0; id < demo.n && plain < 0; id++)
        if (demo.v->kind[id] == HX_TOKEN_TEXT && hx_str_is(demo.bytes[id], "the"))
            plain = id;
    assert_true(plain >= 0);
    snprintf(source, sizeof(source), "root ::= <[%d]> \"!\" | \"the\" \"?\" | <[%d]>", plain,
             demo.v->end[0]);
    g = must_open(demo.v, HX_GRAMMAR_EBNF, hx_str_c(source), NULL);
    hx_grammar_start(g, &m);
    check_mask(&demo, &m, "named token");
    assert_int_equal(hx_grammar_accept(&m, plain), 0);
    check_mask(&demo, &m, "after a named token");
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("!")), 0);
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_accept(&m, plain), 0);
    assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("?")), 0);
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_accept(&m, demo.v->end[0]), 0);
    assert_int_equal(hx_grammar_done(&m), HX_GRAMMAR_MUST_END);
    assert_int_equal(hx_grammar_accept(&m, demo.v->end[0]), 0); /* the end itself */
    assert_int_equal(hx_grammar_accept(&m, demo.v->end[0]), HX_EFORMAT);
    hx_grammar_close(g);
}

/* ---- edges ----------------------------------------------------------- */

/* Deep input stops at the limit, where what is open can still be closed. */
static void test_depth(void **state)
{
    hx_grammar *g = must_open(demo.v, HX_GRAMMAR_JSON_SCHEMA, HX_STR("{}"), NULL);
    uint32_t mask[4200 / 32 + 1];
    hx_matcher m;
    int open = 0, rc;

    (void)state;
    hx_grammar_start(g, &m);
    while ((rc = hx_grammar_accept_bytes(&m, HX_STR("["))) == 0)
        open++;
    assert_int_equal(rc, HX_EFORMAT);
    assert_true(open >= 64 && open < HX_MATCHER_FRAMES);
    check_mask(&demo, &m, "deepest array");
    assert_int_equal(hx_grammar_mask(&m, mask, NULL), 0);
    while (open-- > 0)
        assert_int_equal(hx_grammar_accept_bytes(&m, HX_STR("]")), 0);
    assert_int_equal(hx_grammar_done(&m), HX_GRAMMAR_MUST_END);
    hx_grammar_close(g);
}

static void test_strings_are_utf8(void **state)
{
    static const char *const bad[] = { "\"\xff", "\"\xc0\x80", "\"\xed\xa0\x80", "\"\xf4\x90\x80\x80",
        "\"\xe2\x82\"", "\"\n", "\"\x01", "\"\\x", "\"\\u12g", "\"\\ud800\"", "\"\\ud800\\u0041",
        "\"\\udc00" };
    static const char *const good[] = { "\"\xf4\x8f\xbf\xbf\"", "\"\x7f\"", "\"\\ud83d\\ude00\"",
        "\"\\/\\b\\f\\n\\r\\t\\\"\\\\\"", "\"\\u0000\"", "\"\\uFFFF\\uD7ff\\uE000\"" };
    hx_grammar *g = must_open(NULL, HX_GRAMMAR_JSON_SCHEMA, HX_STR("{\"type\":\"string\"}"), NULL);
    hx_grammar *h = must_open(NULL, HX_GRAMMAR_JSON_SCHEMA,
                              HX_STR("{\"type\":\"string\",\"maxLength\":9}"), NULL);
    hx_matcher m;

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        hx_grammar_start(g, &m);
        assert_int_equal(hx_grammar_accept_bytes(&m, hx_str_c(bad[i])), HX_EFORMAT);
        hx_grammar_start(h, &m);
        assert_int_equal(hx_grammar_accept_bytes(&m, hx_str_c(bad[i])), HX_EFORMAT);
    }
    for (size_t i = 0; i < HX_LEN(good); i++)
        assert_true(matches(g, hx_str_c(good[i])) && matches(h, hx_str_c(good[i])));
    hx_grammar_close(g);
    hx_grammar_close(h);
}

static void test_spaces(void **state)
{
    hx_grammar *g = must_open(NULL, HX_GRAMMAR_JSON, HX_STR(""), NULL);

    (void)state;
    assert_true(matches(g, HX_STR("{\"a\":[1,2],\"b\":{}}")));
    assert_true(matches(g, HX_STR("{\"a\": [1, 2], \"b\": {}}")));
    assert_false(matches(g, HX_STR("{\"a\":  1}")) || matches(g, HX_STR("{ }")) ||
                 matches(g, HX_STR(" {}")) || matches(g, HX_STR("{} ")) ||
                 matches(g, HX_STR("{\"a\" :1}")) || matches(g, HX_STR("{\"a\":1 ,\"b\":2}")) ||
                 matches(g, HX_STR("{\n}")) || matches(g, HX_STR("[]")));
    hx_grammar_close(g);
}

static void test_open_objects(void **state)
{
    const hx_grammar_opt open = { .open_objects = true };
    const hx_str source = HX_STR("{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},"
                                 "\"t\":{\"prefixItems\":[{}]}}}");
    hx_grammar *g = must_open(NULL, HX_GRAMMAR_JSON_SCHEMA, source, NULL);
    hx_grammar *h = must_open(NULL, HX_GRAMMAR_JSON_SCHEMA, source, &open);

    (void)state;
    assert_false(matches(g, HX_STR("{\"a\":1,\"x\":2}")));
    assert_true(matches(h, HX_STR("{\"a\":1,\"x\":2}")));
    assert_false(matches(h, HX_STR("{\"a\":\"s\"}")));
    assert_false(matches(g, HX_STR("{\"t\":[1,2]}")));
    assert_true(matches(h, HX_STR("{\"t\":[1,2]}")));
    hx_grammar_close(g);
    hx_grammar_close(h);
}

static void test_bad_arguments(void **state)
{
    hx_grammar *g = must_open(NULL, HX_GRAMMAR_REGEX, HX_STR("a"), NULL);
    const hx_str one[] = { { "a", 1 }, { NULL, 0 } };
    const int32_t end = 5;
    const hx_vocab_opt wrong[] = { { .bytes = one, .n_token = 0, .n_vocab = 1 },
                                   { .bytes = one, .n_token = 2, .n_vocab = 1 },
                                   { .bytes = one, .n_token = 2, .n_vocab = 2, .end = &end, .n_end = 1 } };
    uint32_t mask[1];
    hx_matcher m;
    hx_vocab *v;

    (void)state;
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_mask(&m, mask, NULL), HX_EARG);
    assert_int_equal(hx_grammar_accept(&m, 0), HX_EARG);
    hx_grammar_close(g);
    hx_grammar_close(NULL);
    hx_vocab_close(NULL);
    for (size_t i = 0; i < HX_LEN(wrong); i++)
        assert_int_equal(hx_vocab_open(&v, &wrong[i], NULL), HX_EARG);
    g = must_open(demo.v, HX_GRAMMAR_REGEX, HX_STR("a"), NULL);
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_accept(&m, -1), HX_EARG);
    assert_int_equal(hx_grammar_accept(&m, demo.n), HX_EARG);
    assert_int_equal(hx_grammar_accept_bytes(&m, (hx_str) { NULL, 0 }), 0);
    hx_grammar_close(g);
}

/* A vocabulary that cannot spell what is due leaves nothing to choose. */
static void test_no_token_fits(void **state)
{
    const hx_str bytes[] = { { "x", 1 }, { "", 0 }, { "x", 1 }, { "xy", 2 } };
    const int32_t end = 1;
    const hx_vocab_opt opt = { .bytes = bytes, .n_token = 4, .n_vocab = 40, .end = &end, .n_end = 1 };
    hx_vocab *v;
    hx_grammar *g;
    hx_matcher m;
    uint32_t mask[2];
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_vocab_open(&v, &opt, &err), 0);
    g = must_open(v, HX_GRAMMAR_REGEX, HX_STR("x(yz)?"), NULL);
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_mask(&m, mask, &err), 0);
    assert_int_equal(mask[0], 1 | 4 | 8);       /* both spellings of x, and xy */
    assert_int_equal(mask[1], 0);
    assert_int_equal(hx_grammar_accept(&m, 2), 0);
    assert_int_equal(hx_grammar_mask(&m, mask, &err), 0);
    assert_int_equal(mask[0], 2);
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_accept(&m, 3), 0);
    assert_int_equal(hx_grammar_mask(&m, mask, &err), HX_ELIMIT);
    assert_int_equal(mask[0], 0);
    hx_grammar_close(g);
    hx_vocab_close(v);
}

/* Every letter is on the stack, so that no two tokens lead to the same state. */
static char *remembering(void)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "root ::= \"\"");
    for (int c = 'a'; c <= 'z'; c++)
        hx_sb_printf(&b, " | \"%c\" root \"%c\" | \" %c\" root", c, c - 32, c);
    return b.p;
}

static void test_mask_steps(void **state)
{
    const hx_grammar_opt few = { .mask_steps = 1000 };
    char *source = remembering();
    hx_grammar *g = must_open(big.v, HX_GRAMMAR_EBNF, hx_str_c(source), &few);
    uint32_t mask[154880 / 32];
    hx_matcher m;
    hx_err err = { 0 };

    (void)state;
    hx_grammar_start(g, &m);
    assert_int_equal(hx_grammar_mask(&m, mask, &err), HX_ELIMIT);
    assert_non_null(strstr(err.msg, "mask_steps"));
    hx_grammar_close(g);
    /* With the default it works, though the cache overflows many times. */
    g = must_open(big.v, HX_GRAMMAR_EBNF, hx_str_c(source), NULL);
    hx_grammar_start(g, &m);
    const double t = now_us();

    assert_int_equal(hx_grammar_mask(&m, mask, &err), 0);
    print_message("  %.1f ms for a mask without any state met twice\n", (now_us() - t) / 1000);
    check_mask(&big, &m, "remembering");
    hx_grammar_close(g);
    hx_free(source);
}

static void test_ambiguous(void **state)
{
    /* Each "a" may be in any number of open rules: 2^n ways, all kept apart by the stack. */
    hx_grammar *g = must_open(demo.v, HX_GRAMMAR_EBNF,
                              HX_STR("root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"a\" t\n"
                                     "t ::= \"a\" s \"b\" | \"a\" t \"c\" | \"a\"\n"), NULL);
    uint32_t mask[4200 / 32 + 1];
    hx_matcher m;
    int rc = 0, n = 0;

    (void)state;
    hx_grammar_start(g, &m);
    for (; n < 400 && rc == 0; n++) {
        rc = hx_grammar_accept_bytes(&m, HX_STR("a"));
        if (rc == 0 && n < 5)
            check_mask(&demo, &m, "ambiguous");
    }
    assert_int_equal(rc, HX_EFORMAT);
    assert_int_equal(hx_grammar_mask(&m, mask, NULL), 0);
    hx_grammar_close(g);
}

/* The k-th allocation fails, for every k: an error, and nothing is left behind. */
static void test_no_memory(void **state)
{
    static const struct { hx_grammar_kind kind; const char *source; } sources[] = {
        { HX_GRAMMAR_JSON_SCHEMA, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\","
          "\"pattern\":\"^[a-z]+$\",\"maxLength\":5},\"b\":{\"enum\":[1,\"x\",{\"y\":[2]}]},\"c\":{\"$ref\":\"#\"}},"
          "\"additionalProperties\":{\"anyOf\":[{\"type\":\"number\",\"minimum\":0.5},{\"type\":\"array\",\"maxItems\":70}]}}" },
        { HX_GRAMMAR_JSON_SCHEMA, "{\"patternProperties\":{\"^a\":{\"multipleOf\":7},\"^b\":{\"minLength\":5}},\"additionalProperties\":false}" },
        { HX_GRAMMAR_REGEX, "(a|[b-f]{2,3})*\\d+|x" },
        { HX_GRAMMAR_EBNF, "root ::= \"a\" b{3,90} | [x-z]*\nb ::= root | \"q\"" },
        { HX_GRAMMAR_CHOICE, "[\"a\",\"bc\"]" },
        { HX_GRAMMAR_JSON, "" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(sources); i++) {
        const int64_t live = hx_test_live_allocs();
        int rc = HX_ENOMEM;

        for (int64_t k = 1; rc != 0; k++) {
            hx_grammar *g = NULL;
            hx_err err = { 0 };

            hx_test_fail_at(k);
            rc = hx_grammar_open(&g, demo.v, sources[i].kind, hx_str_c(sources[i].source), NULL, &err);
            hx_test_fail_at(0);
            if (rc != 0 && (rc != HX_ENOMEM || err.code != HX_ENOMEM))
                fail_msg("%s, allocation %d: %d %s", sources[i].source, (int)k, rc, err.msg);
            hx_grammar_close(g);
            assert_int_equal(hx_test_live_allocs(), live);
        }
    }
}

static void test_no_memory_vocab(void **state)
{
    const hx_str bytes[] = { { "x", 1 }, { "\"", 1 }, { "xy", 2 } };
    const hx_vocab_opt opt = { .bytes = bytes, .n_token = 3, .n_vocab = 3 };
    const int64_t live = hx_test_live_allocs();
    int rc = HX_ENOMEM;

    (void)state;
    for (int64_t k = 1; rc != 0; k++) {
        hx_vocab *v;

        hx_test_fail_at(k);
        rc = hx_vocab_open(&v, &opt, NULL);
        hx_test_fail_at(0);
        assert_true(rc == 0 || rc == HX_ENOMEM);
        hx_vocab_close(v);
        assert_int_equal(hx_test_live_allocs(), live);
    }
}

/* ---- figures --------------------------------------------------------- */

static int by_double(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

typedef struct { double *us; size_t n, cap; } times;

static void note(times *t, double us)
{
    if (t->n == t->cap) {
        t->cap = 2 * t->cap + 1024;
        t->us = hx_realloc(t->us, t->cap * sizeof(double));
    }
    t->us[t->n++] = us;
}

static void say(const char *what, times *t)
{
    double sum = 0;

    qsort(t->us, t->n, sizeof(double), by_double);
    for (size_t i = 0; i < t->n; i++)
        sum += t->us[i];
    print_message("%-28s n %6zu  median %8.1f  mean %8.1f  p90 %8.1f  p99 %8.1f  max %8.1f us\n",
                  what, t->n, t->us[t->n / 2], sum / (double)t->n, t->us[t->n * 9 / 10],
                  t->us[t->n * 99 / 100], t->us[t->n - 1]);
    hx_free(t->us);
}

static void bench_schemas(const words *w, const char *what)
{
    times open = { 0 }, cold = { 0 }, warm = { 0 }, accept = { 0 };
    static uint32_t mask[154880 / 32 + 1];
    lines l;

    lines_open(&l);
    seed = 31;
    for (size_t i = 0; i < l.n_line; i++) {
        const double t0 = now_us();
        hx_grammar *g = schema_open(&l, i, w->v);

        note(&open, now_us() - t0);
        ways hurry;

        ways_open(&hurry, g);
        for (int k = 0; k < 4; k++) {
            hx_matcher m;

            hx_grammar_start(g, &m);
            for (int step = 0; step < 400; step++) {
                const double t1 = now_us();

                assert_int_equal(hx_grammar_mask(&m, mask, NULL), 0);
                const double t2 = now_us();
                const int32_t id = pick(w, &m, mask, step >= 10 + 10 * k ? &hurry : NULL);
                const double t3 = now_us();

                assert_int_equal(hx_grammar_accept(&m, id), 0);
                note(&accept, now_us() - t3);
                if (t2 - t1 > 1500)
                    print_message("  slow: %s step %d: %.0f us\n", hx_json_str(hx_json_get(l.line[i], "name")).p, step, t2 - t1);
                note(k == 0 ? &cold : &warm, t2 - t1);
                if (id == w->v->end[0])
                    break;
            }
        }
        hx_free(hurry.end);
        hx_grammar_close(g);
    }
    lines_close(&l);
    print_message("%s, %d tokens\n", what, w->n);
    say("  open", &open);
    say("  mask, first document", &cold);
    say("  mask, next three", &warm);
    say("  accept", &accept);
}

static void bench_other(const words *w, hx_grammar_kind kind, const char *source)
{
    static uint32_t mask[154880 / 32 + 1];
    hx_grammar *g = must_open(w->v, kind, hx_str_c(source), NULL);
    times all = { 0 };
    ways hurry;

    ways_open(&hurry, g);
    seed = 37;
    for (int k = 0; k < 5; k++) {
        hx_matcher m;

        hx_grammar_start(g, &m);
        for (int step = 0; step < 60; step++) {
            const double t1 = now_us();

            assert_int_equal(hx_grammar_mask(&m, mask, NULL), 0);
            note(&all, now_us() - t1);
            const int32_t id = pick(w, &m, mask, step >= 40 ? &hurry : NULL);

            assert_int_equal(hx_grammar_accept(&m, id), 0);
            if (id == w->v->end[0])
                break;
        }
    }
    say(source, &all);
    hx_free(hurry.end);
    hx_grammar_close(g);
}

/* The vocabulary of a tokenizer.json, and an end. */
static void file_open(const char *path)
{
    char *p;
    size_t n;
    hx_err err = { 0 };

    if (hx_file_read(path, 1 << 28, &p, &n, &err) != 0)
        fail_msg("%s", err.msg);
    words_open(&big, 154821);
    assert_int_equal(hx_tok_open(&big.tok, (hx_str) { p, n }, path, &err), 0);
    hx_free(p);
    for (int32_t id = 0; id < HX_MIN(hx_tok_count(big.tok), 154820); id++) {
        const hx_str s = hx_tok_bytes(big.tok, id);

        add_word(&big, s.p != NULL ? s.p : "", s.n);
        big.special[id] = s.n > 0 && hx_tok_find(big.tok, s) == id;
    }
    big.special[add_word(&big, "<|end|>", 7)] = true;
}

static int bench(const char *path)
{
    double t0;

    demo_open();
    if (path != NULL)
        file_open(path);
    else
        big_open();
    hx_vocab_close(big.v);
    t0 = now_us();
    words_done(&big, 154880, big.n - 1);
    print_message("vocabulary of %d: %.0f ms, trie %u nodes, rest %u\n", big.n,
                  (now_us() - t0) / 1000, big.v->all.n, big.v->rest.n);
    bench_schemas(&demo, "demo tokenizer");
    bench_schemas(&big, path != NULL ? path : "synthetic vocabulary");
    bench_other(&big, HX_GRAMMAR_REGEX, "\\w{1,64}");
    bench_other(&big, HX_GRAMMAR_REGEX, "[^\\n]{1,200}");
    bench_other(&big, HX_GRAMMAR_REGEX, ".*");
    bench_other(&big, HX_GRAMMAR_REGEX, "(\\w+ )*\\w+\\.");
    bench_other(&big, HX_GRAMMAR_EBNF, ebnf_cases[HX_LEN(ebnf_cases) - 1].source);
    bench_other(&big, HX_GRAMMAR_JSON, "");
    bench_other(&demo, HX_GRAMMAR_TOOLS,
                "{\"format\":\"glm\",\"choice\":\"required\",\"tools\":[{\"name\":\"f\",\"parameters\":{"
                "\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{\"type\":\"integer\"},\"c\":{\"type\":"
                "[\"string\",\"null\"]},\"d\":{\"type\":\"string\",\"maxLength\":60}}}}]}");
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schema_documents),
        cmocka_unit_test(test_schema_data),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_large_sources),
        cmocka_unit_test(test_schema_walks),
        cmocka_unit_test(test_masks_exact),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_small_cache),
        cmocka_unit_test(test_regex),
        cmocka_unit_test(test_regex_ecma),
        cmocka_unit_test(test_ebnf),
        cmocka_unit_test(test_counting),
        cmocka_unit_test(test_counting_ambiguous),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_ebnf_tokens),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_strings_are_utf8),
        cmocka_unit_test(test_spaces),
        cmocka_unit_test(test_open_objects),
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_no_token_fits),
        cmocka_unit_test(test_mask_steps),
        cmocka_unit_test(test_ambiguous),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_no_memory_vocab),
    };

    if (argc > 1 && strcmp(argv[1], "bench") == 0)
        return bench(argc > 2 ? argv[2] : NULL);
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("grammar", tests, setup, teardown);
}
