/* token_test.c - tests of token.c. Compares with vectors of the Hugging Face tokenizers
 * library, with a plain BPE written here from the definition, with Unicode's tables and
 * with utf8proc and PCRE2. tests/tokenizers_npm.mjs compares far more, where npm's
 * packages are installed. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "text/token.c"

#define DEMO "models/demo-exl3/tokenizer.json"

/* ---- help ------------------------------------------------------------ */

static uint64_t rng_at;

static size_t below(size_t n)
{
    return (size_t)(hx_rng_at(7, rng_at++) % n);
}

static hx_tok *open_file(const char *path)
{
    hx_file f;
    hx_tok *t = NULL;
    hx_err err;

    if (hx_file_map(&f, path, &err) != 0 ||
        hx_tok_open(&t, (hx_str) { (const char *)f.p, f.n }, path, &err) != 0)
        fail_msg("%s", err.msg);
    hx_file_unmap(&f);
    return t;
}

static hx_json *parse_file(const char *path)
{
    hx_file f;
    hx_json *j = NULL;
    hx_err err;

    if (hx_file_map(&f, path, &err) != 0 ||
        hx_json_parse(&j, (hx_str) { (const char *)f.p, f.n }, 0, &err) != 0)
        fail_msg("%s", err.msg);
    hx_file_unmap(&f);
    return j;
}

/* A byte's character in tokenizer.json, by GPT-2's own recipe: the printable bytes first,
 * then U+0100 and on for the others as they come. */
static uint32_t gpt2_char(int b)
{
    uint32_t next = 256;

    for (int i = 0; i < 256; i++) {
        const bool printable =
            (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || (i >= 174 && i <= 255);

        if (i == b)
            return printable ? (uint32_t)b : next;
        next += !printable;
    }
    return 0;
}

static void put_spelled(hx_sb *b, const char *s, size_t n)
{
    char utf8[4];

    for (size_t i = 0; i < n; i++)
        hx_sb_add(b, utf8, (size_t)hx_utf8_put(gpt2_char((uint8_t)s[i]), utf8));
}

/* What differs from a plain tokenizer of 256 bytes, whose ids are the bytes. */
typedef struct {
    const char *vocab;  /* more members: "\"ab\": 256" */
    const char *merges; /* elements */
    const char *added;  /* elements */
    const char *model;  /* members before vocab */
    const char *normalizer, *pre, *decoder;
    int drop; /* this byte has no token, where not 0 */
} doc;

#define SPLIT(re)                                                                        \
    "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" re                               \
    "\"}, \"behavior\": \"Isolated\","                                                   \
    " \"invert\": false}"
#define BYTE_LEVEL                                                                       \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}"
#define SEQUENCE(list)      "{\"type\": \"Sequence\", \"pretokenizers\": [" list "]}"
#define RAW(id, text)       ADD(id, text, ", \"normalized\": false")
#define ADD(id, text, more) "{\"id\": " #id ", \"content\": \"" text "\"" more "}"

static const char * or (const char *s, const char *dflt)
{
    return s != NULL ? s : dflt;
}

static void write_doc(hx_sb *b, const doc *d)
{
    hx_sb key = { 0 };

    hx_sb_printf(b,
                 "{\"added_tokens\": [%s], \"normalizer\": %s, \"pre_tokenizer\": %s, ",
                 or (d->added, ""), or (d->normalizer, "null"), or (d->pre, BYTE_LEVEL));
    hx_sb_printf(b, "\"decoder\": %s, \"model\": {%s\"type\": \"BPE\", \"vocab\": {",
                 or (d->decoder, "null"), or (d->model, ""));
    for (int i = 0; i < 256; i++) {
        const char c = (char)i;

        if (d->drop != 0 && i == d->drop)
            continue;
        key.n = 0;
        put_spelled(&key, &c, 1);
        hx_json_put_str(b, (hx_str) { key.p, key.n });
        hx_sb_printf(b, ": %d%s", i, i < 255 ? ", " : "");
    }
    hx_sb_printf(b, "%s%s}, \"merges\": [%s]}}", d->vocab != NULL ? ", " : "",
                 or (d->vocab, ""), or (d->merges, ""));
    assert_false(b->bad);
    hx_sb_free(&key);
}

static int open_doc(hx_tok **t, const doc *d, hx_err *err)
{
    hx_sb b = { 0 };

    write_doc(&b, d);
    const int rc = hx_tok_open(t, (hx_str) { b.p, b.n }, "t.json", err);
    hx_sb_free(&b);
    return rc;
}

static hx_tok *must_open(const doc *d)
{
    hx_tok *t;
    hx_err err;

    if (open_doc(&t, d, &err) != 0)
        fail_msg("%s", err.msg);
    return t;
}

static void check_ids(const hx_tok *t, hx_str text, const hx_tok_opt *opt,
                      const int32_t *want, int64_t n)
{
    hx_ids ids = { 0 };
    hx_err err;

    if (hx_tok_encode(t, text, opt, &ids, &err) != 0)
        fail_msg("\"%.*s\": %s", shown(text), text.p, err.msg);
    for (int64_t i = 0; i < HX_MIN(n, ids.n); i++)
        if (ids.p[i] != want[i])
            fail_msg("\"%.*s\": id %lld is %d, expected %d", shown(text), text.p,
                     (long long)i, ids.p[i], want[i]);
    if (ids.n != n)
        fail_msg("\"%.*s\": %lld ids, expected %lld", shown(text), text.p,
                 (long long)ids.n, (long long)n);
    hx_ids_free(&ids);
}

#define IDS(t, text, opt, ...)                                                           \
    check_ids(t, HX_STR(text), opt, (const int32_t[]) { __VA_ARGS__ },                   \
              sizeof((const int32_t[]) { __VA_ARGS__ }) / sizeof(int32_t))

/* Ids to text, the way a stream does it. */
static void decode(const hx_tok *t, const int32_t *ids, int64_t n, bool skip, hx_sb *out)
{
    hx_utf8_stream s = { 0 };

    for (int64_t i = 0; i < n; i++)
        if (!skip || !hx_tok_is_special(t, ids[i]))
            hx_utf8_feed(&s, hx_tok_bytes(t, ids[i]), out);
    hx_utf8_end(&s, out);
}

/* ---- vectors --------------------------------------------------------- */

static void check_decoded(const hx_tok *t, const hx_ids *ids, bool skip,
                          const hx_json *want)
{
    hx_sb b = { 0 };

    if (hx_json_kind(want) != HX_JSON_STRING)
        return;
    decode(t, ids->p, ids->n, skip, &b);
    assert_int_equal(b.n, hx_json_str(want).n);
    if (b.n > 0)
        assert_memory_equal(b.p, hx_json_str(want).p, b.n);
    hx_sb_free(&b);
}

static void run_vectors(const hx_tok *t, const hx_json *list)
{
    assert_true(hx_json_len(list) >= 20);
    for (size_t i = 0; i < hx_json_len(list); i++) {
        const hx_json *j = hx_json_at(list, i), *want = hx_json_get(j, "ids");
        hx_ids ids = { 0 };

        assert_int_equal(hx_json_kind(want), HX_JSON_ARRAY);
        for (size_t k = 0; k < hx_json_len(want); k++) {
            const int32_t id = (int32_t)hx_json_int(hx_json_at(want, k), -1);

            assert_int_equal(hx_ids_add(&ids, &id, 1, NULL), 0);
        }
        if (!hx_json_bool(hx_json_get(j, "ids_only"), false))
            check_ids(t, hx_json_str(hx_json_get(j, "text")), NULL, ids.p, ids.n);
        check_decoded(t, &ids, false, hx_json_get(j, "decoded"));
        check_decoded(t, &ids, true, hx_json_get(j, "decoded_skip_special"));
        hx_ids_free(&ids);
    }
}

static void test_demo_vectors(void **state)
{
    hx_tok *t = open_file(DEMO);
    hx_json *j = parse_file("tests/data/token/demo_vectors.json");

    (void)state;
    run_vectors(t, j);
    assert_int_equal(hx_tok_count(t), 4068);
    assert_int_equal(hx_tok_find(t, HX_STR("<|user|>")), 4039);
    assert_int_equal(hx_tok_find(t, HX_STR("the")), -1);
    assert_true(hx_tok_is_special(t, 4039));
    assert_false(hx_tok_is_special(t, hx_tok_find(t, HX_STR("<think>"))));
    assert_null(hx_tok_bytes(t, 4068).p);
    assert_null(hx_tok_bytes(t, -1).p);
    hx_json_free(j);
    hx_tok_close(t);
}

static void test_glm_vectors(void **state)
{
    static const char *const paths[] = { "tests/data/token/glm/tokenizer.json",
                                         "../shared/glm/tokenizer.json" };
    const char *vectors = "../shared/spec/data/tokenizer_vectors.json";

    (void)state;
    for (size_t i = 0; i < HX_LEN(paths); i++) {
        if (!hx_file_exists(paths[i]) || !hx_file_exists(vectors))
            continue;
        hx_tok *t = open_file(paths[i]);
        hx_json *j = parse_file(vectors);

        run_vectors(t, hx_json_get(j, "cases"));
        hx_json_free(j);
        hx_tok_close(t);
        return;
    }
    print_message("SKIP glm_vectors: no tokenizer.json of the released model in "
                  "tests/data/token/glm or ../shared/glm, or no vectors in ../shared\n");
    skip();
}

/* The demo's ids 0 to 255 are the bytes in GPT-2's order. */
static void test_alphabet(void **state)
{
    hx_tok *t = open_file(DEMO);
    int32_t id = 0;

    (void)state;
    for (int other = 0; other < 2; other++)
        for (int b = 0; b < 256; b++)
            if ((gpt2_char(b) >= 256) == (other == 1)) {
                const hx_str s = hx_tok_bytes(t, id++);

                assert_int_equal(s.n, 1);
                assert_int_equal((uint8_t)s.p[0], b);
            }
    assert_int_equal(id, 256);
    for (uint32_t cp = 0; cp < 0x200; cp++) {
        const int b = byte_of(cp);

        assert_true(b < 0 || gpt2_char(b) == cp);
    }
    for (int b = 0; b < 256; b++)
        assert_int_equal(byte_of(gpt2_char(b)), b);
    hx_tok_close(t);
}

/* ---- refusals -------------------------------------------------------- */

static const struct {
    doc d;
    int code;
    const char *say;
} refusals[] = {
    { { .model = "\"byte_fallback\": true, " }, HX_EUNSUP, "model.byte_fallback" },
    { { .model = "\"dropout\": 0.1, " }, HX_EUNSUP, "model.dropout" },
    { { .model = "\"end_of_word_suffix\": \"</w>\", " },
      HX_EUNSUP,
      "end_of_word_suffix" },
    { { .model = "\"continuing_subword_prefix\": \"##\", " },
      HX_EUNSUP,
      "subword_prefix" },
    { { .normalizer = "{\"type\": \"NFKC\"}" }, HX_EUNSUP, "normalizer \"NFKC\"" },
    { { .normalizer = "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"},"
                      " {\"type\": \"Lowercase\"}]}" },
      HX_EUNSUP,
      "\"Lowercase\"" },
    { { .normalizer = "7" }, HX_EUNSUP, "normalizer" },
    { { .pre = "null" }, HX_EUNSUP, "no pre_tokenizer" },
    { { .pre = "{\"type\": \"Metaspace\"}" }, HX_EUNSUP, "\"Metaspace\"" },
    { { .pre = SEQUENCE("") }, HX_EUNSUP, "without ByteLevel" },
    { { .pre = SEQUENCE(SPLIT("a")) }, HX_EUNSUP, "without ByteLevel" },
    { { .pre = SEQUENCE(BYTE_LEVEL ", " SPLIT("a")) }, HX_EUNSUP, "after ByteLevel" },
    { { .pre = SEQUENCE("{\"type\": \"Split\", \"pattern\": {\"String\": \"a\"},"
                        " \"behavior\": \"Isolated\"}") },
      HX_EUNSUP,
      "not a Regex" },
    { { .pre = SEQUENCE("{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\"},"
                        " \"behavior\": \"Removed\"}") },
      HX_EUNSUP,
      "\"Removed\"" },
    { { .pre =
            SEQUENCE("{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\"}, \"invert\":"
                     " true, \"behavior\": \"Isolated\"}") },
      HX_EUNSUP,
      "invert" },
    { { .pre = SEQUENCE(SPLIT("(a")) }, HX_EFORMAT, "regex" },
    { { .pre = SEQUENCE(SPLIT("\\\\p{Nonsense}")) }, HX_EFORMAT, "regex" },
    { { .pre = SEQUENCE(SPLIT("a{2,1}")) }, HX_EFORMAT, "regex" },
    { { .decoder = "{\"type\": \"WordPiece\"}" }, HX_EUNSUP, "decoder \"WordPiece\"" },
    { { .drop = 'q' }, HX_EUNSUP, "byte 0x71" },
    { { .vocab = "\"ab\": 97" }, HX_EFORMAT, "id 97" },
    { { .vocab = "\"ab\": -1" }, HX_EFORMAT, "\"ab\": id is integer -1" },
    { { .vocab = "\"ab\": 4194304" }, HX_EFORMAT, "4194304" },
    { { .vocab = "\"ab\": 99999999999999999999" }, HX_EFORMAT, "\"ab\"" },
    { { .vocab = "\"ab\": 256.5" }, HX_EFORMAT, "\"ab\"" },
    { { .vocab = "\"ab\": \"256\"" }, HX_EFORMAT, "string" },
    { { .merges = "\"a b\"" }, HX_EFORMAT, "merges[0]" },
    { { .vocab = "\"ab\": 256", .merges = "\"a b\", \"ab d\"" },
      HX_EFORMAT,
      "merges[1]" },
    { { .vocab = "\"ab\": 256", .merges = "\"a b\", \"abc d\"" }, HX_EFORMAT, "\"abc\"" },
    { { .vocab = "\"ab\": 256", .merges = "\"a b\", [\"a\", \"xyzzy\"]" },
      HX_EFORMAT,
      "\"xyzzy\"" },
    { { .vocab = "\"ab\": 256", .merges = "\"a b\", \"a b\"" }, HX_EFORMAT, "merges[0]" },
    { { .vocab = "\"ab\": 256", .merges = "\"ab\"" }, HX_EFORMAT, "expected" },
    { { .vocab = "\"ab\": 256", .merges = "\"a b \"" }, HX_EFORMAT, "expected" },
    { { .vocab = "\"ab\": 256", .merges = "[\"a\", \"b\", \"\"]" },
      HX_EFORMAT,
      "expected" },
    { { .vocab = "\"ab\": 256", .merges = "[\"a\", 7]" }, HX_EFORMAT, "expected" },
    { { .vocab = "\"ab\": 256", .merges = "{}" }, HX_EFORMAT, "expected" },
    { { .added = ADD(97, "<x>", "") }, HX_EFORMAT, "id 97" },
    { { .added = ADD(256, "a", "") }, HX_EFORMAT, "id 256" },
    { { .added = ADD(256, "<x>", "") ", " ADD(256, "<y>", "") }, HX_EFORMAT, "id 256" },
    { { .added = ADD(256, "<x>", "") ", " ADD(257, "<x>", "") }, HX_EFORMAT, "\"<x>\"" },
    { { .added = ADD(233, "\u00e9", "") }, HX_EFORMAT, "id 233" },
    { { .added = ADD(4194304, "<x>", "") }, HX_EFORMAT, "4194304" },
    { { .added = ADD(256, "", "") }, HX_EFORMAT, "added_tokens[0]" },
    { { .added = "{\"id\": 256}" }, HX_EFORMAT, "added_tokens[0]" },
    { { .added = "[]" }, HX_EFORMAT, "id is null" },
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < HX_LEN(refusals); i++) {
        hx_tok *t;
        hx_err err = { 0 };
        const int rc = open_doc(&t, &refusals[i].d, &err);

        if (rc != refusals[i].code || strstr(err.msg, refusals[i].say) == NULL)
            fail_msg("row %zu: %d \"%s\", expected %d \"%s\"", i, rc, err.msg,
                     refusals[i].code, refusals[i].say);
        assert_int_equal(strncmp(err.msg, "t.json: ", 8), 0);
        assert_null(t);
    }
    hx_tok *t = must_open(&(doc) { 0 }); /* what the rows differ from is fine */
    hx_tok_close(t);
}

static void test_not_a_tokenizer(void **state)
{
    static const struct {
        const char *json;
        int code;
        const char *say;
    } rows[] = {
        { "", HX_EFORMAT, "" },
        { "{", HX_EFORMAT, "" },
        { "[]", HX_EFORMAT, "array" },
        { "{}", HX_EFORMAT, "model" },
        { "{\"model\": {\"type\": \"Unigram\"}}", HX_EUNSUP, "\"Unigram\"" },
        { "{\"model\": {\"type\": \"BPE\"}, \"pre_tokenizer\": " BYTE_LEVEL "}",
          HX_EFORMAT, "model.vocab" },
        { "{\"model\": {\"type\": \"BPE\", \"vocab\": {}}, \"pre_tokenizer\": " BYTE_LEVEL
          ", \"added_tokens\": {}}",
          HX_EFORMAT, "added_tokens" },
    };
    hx_sb deep = { 0 };
    hx_file f;
    hx_tok *t;
    hx_err err;

    (void)state;
    for (size_t i = 0; i < HX_LEN(rows); i++) {
        assert_int_equal(hx_tok_open(&t, hx_str_c(rows[i].json), "t", &err),
                         rows[i].code);
        assert_int_equal(strncmp(err.msg, "t: ", 3), 0);
        assert_non_null(strstr(err.msg, rows[i].say));
    }
    for (int i = 0; i < 100000; i++)
        hx_sb_str(&deep, "{\"normalizer\":");
    assert_int_equal(hx_tok_open(&t, (hx_str) { deep.p, deep.n }, "t", &err), HX_EFORMAT);
    hx_sb_free(&deep);

    assert_int_equal(hx_file_map(&f, "tests/data/token/stories260k.json", &err), 0);
    assert_int_equal(
        hx_tok_open(&t, (hx_str) { (const char *)f.p, f.n }, "stories", &err), HX_EUNSUP);
    assert_string_equal(err.msg,
                        "stories: model.byte_fallback is set: only byte-level BPE "
                        "without it is supported");
    hx_file_unmap(&f);
}

/* What means other things to Oniguruma than to PCRE2, or nothing, is refused. */
static void test_regex_refusals(void **state)
{
    static const char *const bad[] = {
        "\\b",          "\\A",           "\\h",      "\\R",     "\\1",          "\\k<a>",
        "\\Qa\\E",      "[[:alpha:]]",   "[a&&b]",   "[]a]",    "[^]a]",        "[a",
        "[a-\\s]",      "[\\W]",         "(?i)a",    "(?m:a)",  "(?<n>a)",      "(*ANY)a",
        "(?#a)",        "a{,3}",         "a{2}?",    "a{1,2}+", "a{",           "\\x80",
        "\\x{1234567}", "\\u12",         "\\p{L",    "\\pL",    "(?i:\\p{Lu})", "(?i:ss)",
        "(?i:a\u00df)", "(?i:[\u00e9])", "(?i:xST)", "a\\",     "\\x",
    };
    static const char *const good[] = {
        "(?i:'s|'t)|ss", "(?i:(a|b)c)ss", "[-a]",       "[a\\-z]", "[\\s-]",
        "[\\s-x]",       "a{2,3}?",       "\\x{1F600}", "\\u00e9", "[\\x41-\\x5a]",
        "\\.",           "[\\[\\]&]",     "(?<!a)b",    "\\p{^L}",
    };
    hx_tok *t;
    hx_err err;

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad) + HX_LEN(good); i++) {
        const char *re = i < HX_LEN(bad) ? bad[i] : good[i - HX_LEN(bad)];
        hx_sb pre = { 0 };

        hx_sb_str(&pre,
                  "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", "
                  "\"behavior\": \"Isolated\", \"pattern\": {\"Regex\": ");
        hx_json_put_str(&pre, hx_str_c(re));
        hx_sb_str(&pre, "}}, " BYTE_LEVEL "]}");
        const int rc = open_doc(&t, &(doc) { .pre = pre.p }, &err);
        if (rc != (i < HX_LEN(bad) ? HX_EUNSUP : 0))
            fail_msg("%s: %d %s", re, rc, rc == 0 ? "" : err.msg);
        hx_tok_close(t);
        hx_sb_free(&pre);
    }
}

/* ---- merging --------------------------------------------------------- */

/* BPE as the definition says: look for the pair of lowest rank, leftmost, merge, repeat.
 * bound[i]: a symbol starts at byte i. */
static void plain_bpe(const hx_json *merges, hx_str s, bool *bound)
{
    hx_sb left = { 0 }, right = { 0 };

    for (size_t i = 0; i <= s.n; i++)
        bound[i] = true;
    for (;;) {
        size_t best = SIZE_MAX, at = 0;

        for (size_t a = 0, b, c; a < s.n; a = b) {
            for (b = a + 1; !bound[b]; b++)
                ;
            if (b == s.n)
                break;
            for (c = b + 1; !bound[c]; c++)
                ;
            left.n = right.n = 0;
            put_spelled(&left, s.p + a, b - a);
            put_spelled(&right, s.p + b, c - b);
            for (size_t m = 0; m < HX_MIN(best, hx_json_len(merges)); m++) {
                const hx_json *j = hx_json_at(merges, m);

                if (hx_str_eq(hx_json_str(hx_json_at(j, 0)),
                              (hx_str) { left.p, left.n }) &&
                    hx_str_eq(hx_json_str(hx_json_at(j, 1)),
                              (hx_str) { right.p, right.n })) {
                    best = m;
                    at = b;
                }
            }
        }
        if (best == SIZE_MAX)
            break;
        bound[at] = false;
    }
    hx_sb_free(&left);
    hx_sb_free(&right);
}

static void check_bpe(hx_tok *t, const hx_json *merges, hx_str s)
{
    bool bound[256];
    hx_ids ids = { 0 };
    hx_err err;
    size_t at = 0;

    plain_bpe(merges, s, bound);
    assert_int_equal(hx_tok_encode(t, s, NULL, &ids, &err), 0);
    for (int64_t i = 0; i < ids.n; i++) {
        const hx_str got = hx_tok_bytes(t, ids.p[i]);

        assert_true(bound[at] && at + got.n <= s.n && bound[at + got.n]);
        assert_memory_equal(s.p + at, got.p, got.n);
        for (size_t k = 1; k < got.n; k++)
            assert_false(bound[at + k]);
        at += got.n;
    }
    assert_int_equal(at, s.n);
    hx_ids_free(&ids);
}

/* Pieces of one to many levels of the tree, of letters that merge a lot. */
static void test_merges(void **state)
{
    static const char *const letters[] = { "the and of", "aeinorst", "  \t\n", "=-*#",
                                           "eeet" };
    hx_json *j = parse_file(DEMO);
    hx_tok *t = open_file(DEMO);

    (void)state;
    t->ignore_merges = false;
    for (size_t k = 0; k < t->n_step; k++)
        pcre2_code_free(t->step[k].re);
    t->n_step = 0; /* texts are pieces */
    for (size_t n = 1; n < 200; n += 1 + n / 4)
        for (size_t k = 0; k < HX_LEN(letters); k++) {
            char s[200];

            for (size_t i = 0; i < n; i++)
                s[i] = letters[k][below(strlen(letters[k]))];
            check_bpe(t, hx_json_get(hx_json_get(j, "model"), "merges"),
                      (hx_str) { s, n });
        }
    hx_tok_close(t);
    hx_json_free(j);
}

static void test_merge_order(void **state)
{
    /* "bc" ranks before "ab"; "abc" is reached only through "ab" + "c". */
    hx_tok *t = must_open(&(doc) { .vocab = "\"ab\": 300, \"bc\": 301, \"abc\": 302",
                                   .merges = "\"b c\", [\"a\", \"b\"], \"ab c\"" });
    hx_tok *whole = must_open(&(doc) { .vocab = "\"ab\": 300, \"bc\": 301, \"abc\": 302",
                                       .merges = "\"b c\", \"a b\", \"ab c\"",
                                       .model = "\"ignore_merges\": true, " });

    (void)state;
    IDS(t, "abc", NULL, 'a', 301);
    IDS(t, "abab", NULL, 300, 300);
    IDS(whole, "abc", NULL, 302);
    IDS(whole, "abcb", NULL, 'a', 301, 'b');
    assert_int_equal(hx_tok_count(t), 303);
    assert_null(hx_tok_bytes(t, 299).p);
    hx_tok_close(t);
    hx_tok_close(whole);
}

/* ---- steps ----------------------------------------------------------- */

#define ALL_MERGES                                                                       \
    .vocab = "\"ab\": 256, \"\u0120a\": 257, \"  \": 258",                               \
    .merges = "\"a b\", \"\u0120 a\""

static void test_steps(void **state)
{
    hx_tok *t =
        must_open(&(doc) { ALL_MERGES, .pre = SEQUENCE(SPLIT("b") ", " BYTE_LEVEL) });
    hx_tok *prefix = must_open(
        &(doc) { ALL_MERGES, .pre = "{\"type\": \"ByteLevel\", \"use_regex\": false}" });
    hx_tok *gpt2 = must_open(&(doc) { ALL_MERGES, .pre = "{\"type\": \"ByteLevel\"}" });
    hx_tok *empty =
        must_open(&(doc) { ALL_MERGES, .pre = SEQUENCE(SPLIT("(?=b)") ", " BYTE_LEVEL) });

    (void)state;
    IDS(t, "ab ab", NULL, 'a', 'b', 257, 'b');
    IDS(prefix, "ac", NULL, 257, 'c');
    IDS(prefix, " ac", NULL, 257, 'c');
    IDS(prefix, "\na", NULL, ' ', '\n', 'a');
    IDS(gpt2, "b ac!ab", NULL, ' ', 'b', 257, 'c', '!', 256);
    IDS(empty, "abab", NULL, 'a', 'b', 'a', 'b');
    /* A key outside the alphabet decodes to itself and is never reached. */
    assert_true(hx_str_eq(hx_tok_bytes(t, 258), HX_STR("  ")));
    IDS(t, "  ", NULL, ' ', ' ');
    check_ids(t, HX_STR(""), NULL, NULL, 0);
    hx_tok_close(t);
    hx_tok_close(prefix);
    hx_tok_close(gpt2);
    hx_tok_close(empty);
}

static void test_exploding_regex(void **state)
{
    hx_tok *t = must_open(&(doc) { .pre = SEQUENCE(SPLIT("(?:a+)+$") ", " BYTE_LEVEL) });
    hx_ids ids = { 0 };
    char s[64];
    hx_err err;

    (void)state;
    memset(s, 'a', sizeof(s));
    s[63] = 'b';
    assert_int_equal(hx_ids_add(&ids, &(int32_t) { 7 }, 1, &err), 0);
    assert_int_equal(hx_tok_encode(t, (hx_str) { s, 64 }, NULL, &ids, &err), HX_ELIMIT);
    assert_int_equal(ids.n, 1);
    hx_ids_free(&ids);
    hx_tok_close(t);
}

/* ---- added tokens ---------------------------------------------------- */

static void test_added(void **state)
{
    hx_tok *t = must_open(&(doc) {
        .added = ADD(300, "<a>", ", \"special\": true") ", " RAW(301, "<a") ", " RAW(
            302, "<a><b>") ", " RAW(303, "\u4e2d") ", " ADD(304, "<b><", "") });
    const hx_tok_opt off = { 0 };

    (void)state;
    IDS(t, "<a><a<a><b><<a\u4e2d", NULL, 300, 301, 302, '<', 301, 303);
    IDS(t, "<a><b><", NULL, 302, '<');
    IDS(t, "a<b><", NULL, 'a', 304);
    IDS(t, "<a>", &off, '<', 'a', '>');
    assert_int_equal(hx_tok_find(t, HX_STR("<a>")), 300);
    assert_int_equal(hx_tok_find(t, HX_STR("<a><")), -1);
    assert_true(hx_tok_is_special(t, 300));
    assert_false(hx_tok_is_special(t, 301));
    assert_true(hx_str_eq(hx_tok_bytes(t, 303), HX_STR("\u4e2d")));
    hx_tok_close(t);
}

static void test_added_flags(void **state)
{
    hx_tok *t = must_open(
        &(doc) { .added = ADD(300, "<l>", ", \"lstrip\": true") ", " ADD(
                     301, "<r>",
                     ", \"rstrip\": true") ", " ADD(302, "<b>",
                                                    ", \"lstrip\": true, \"rstrip\": "
                                                    "true") ", " ADD(303, "me",
                                                                     ", \"single_word\": "
                                                                     "true") });

    (void)state;
    IDS(t, "x \n<l> x\u3000<r>\u00a0\tx", NULL, 'x', 300, ' ', 'x', 0xe3, 0x80, 0x80, 301,
        'x');
    IDS(t, " <b> <b> \u200b", NULL, 302, 302, 0xe2, 0x80, 0x8b);
    IDS(t, "<r> <l>", NULL, 301, 300);
    IDS(t, "me me. me1 _me (me)", NULL, 303, ' ', 303, '.', ' ', 'm', 'e', '1', ' ', '_',
        'm', 'e', ' ', '(', 303, ')');
    IDS(t, "me\u0301 \u00e9me", NULL, 'm', 'e', 0xcc, 0x81, ' ', 0xc3, 0xa9, 'm', 'e');
    hx_tok_close(t);
}

static void test_normalized(void **state)
{
    hx_tok *t = must_open(&(doc) {
        .normalizer = "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}",
        .added = ADD(300, "e\u0323", ", \"normalized\": true") ", " ADD(
            301, "n\u0303", ", \"normalized\": false") ", " ADD(302, "<x>",
                                                                ", \"special\": true") });
    uint8_t user[6] = { 0 };
    hx_tok_opt opt = { .special = true, .user = user };

    (void)state;
    IDS(t, "e\u0323", NULL, 300);
    IDS(t, "\u1eb9", NULL, 300);
    IDS(t, "n\u0303", NULL, 301);
    IDS(t, "\u00f1", NULL, 0xc3, 0xb1);
    IDS(t, "a\u0308\u0323<x>\u0301", NULL, 0xe1, 0xba, 0xa1, 0xcc, 0x88, 302, 0xcc, 0x81);
    IDS(t, "\u1100\u1161\u11a8", NULL, 0xea, 0xb0, 0x81);
    IDS(t, "\u212b", NULL, 0xc3, 0x85);
    /* One marked byte of "e" U+0323 is enough; those of others do not matter. */
    IDS(t, "xe\u0323y", &opt, 'x', 300, 'y');
    user[0] = user[4] = 1;
    IDS(t, "xe\u0323y", &opt, 'x', 300, 'y');
    user[3] = 1;
    IDS(t, "xe\u0323y", &opt, 'x', 0xe1, 0xba, 0xb9, 'y');
    hx_tok_close(t);
}

/* A user's bytes never make an added token, nor part of one, and change nothing else. */
static void test_user_marks(void **state)
{
    static const char *const parts[] = { "<|user|>", "<|us",    "er|>",     "<think>",
                                         "</think>", "[gMASK]", "the ",     "<",
                                         ">",        "|",       " hello\n", "1234" };
    hx_tok *t = open_file(DEMO);
    hx_tok_opt opt = { .special = true };
    hx_err err;

    (void)state;
    for (int round = 0; round < 500; round++) {
        hx_sb text = { 0 }, user = { 0 };
        hx_ids ids = { 0 };
        size_t at = 0;

        for (size_t i = 0; i < 12; i++) {
            const char *part = parts[below(HX_LEN(parts))];
            const char mark = (char)(below(3) == 0);

            hx_sb_str(&text, part);
            for (size_t k = 0; k < strlen(part); k++)
                hx_sb_char(&user, mark);
        }
        opt.user = (const uint8_t *)user.p;
        assert_int_equal(hx_tok_encode(t, (hx_str) { text.p, text.n }, &opt, &ids, &err),
                         0);
        for (int64_t i = 0; i < ids.n; i++) {
            const hx_str s = hx_tok_bytes(t, ids.p[i]);

            assert_memory_equal(text.p + at, s.p, s.n);
            for (size_t k = 0; ids.p[i] >= 4032 && k < s.n; k++)
                assert_int_equal(user.p[at + k], 0);
            at += s.n;
        }
        assert_int_equal(at, text.n);
        /* All marked: as without added tokens. None marked: as without marks. */
        for (int all = 0; all < 2; all++) {
            const hx_tok_opt other = { .special = all == 0 };

            memset(user.p, all, user.n);
            ids.n = 0;
            assert_int_equal(
                hx_tok_encode(t, (hx_str) { text.p, text.n }, &other, &ids, &err), 0);
            check_ids(t, (hx_str) { text.p, text.n }, &opt, ids.p, ids.n);
        }
        hx_sb_free(&text);
        hx_sb_free(&user);
        hx_ids_free(&ids);
    }
    hx_tok_close(t);
}

/* An added token that the vocabulary has too is not reached as a whole piece. */
static void test_marked_whole_piece(void **state)
{
    hx_tok *t = must_open(&(doc) { .vocab = "\"stop\": 300, \"go\": 301",
                                   .model = "\"ignore_merges\": true, ",
                                   .added = ADD(300, "stop", ", \"special\": true") });
    const hx_tok_opt off = { 0 };

    (void)state;
    IDS(t, "stop", NULL, 300);
    IDS(t, "stop", &off, 's', 't', 'o', 'p');
    IDS(t, "go", &off, 301);
    hx_tok_close(t);
}

/* ---- limits ---------------------------------------------------------- */

static void test_limits(void **state)
{
    static const struct {
        const char *text;
        const char *say;
    } bad[] = {
        { "ab\xff", "byte 2" },        { "\xc3", "byte 0" },
        { "a\xed\xa0\x80", "byte 1" }, { "\xc0\x80", "byte 0" },
        { "abc\xe2\x82", "byte 3" },   { "\xf4\x90\x80\x80", "byte 0" },
    };
    hx_tok *t = open_file(DEMO);
    hx_tok_opt opt = { .special = true, .max_ids = 4 };
    hx_ids ids = { 0 };
    hx_err err;

    (void)state;
    assert_int_equal(hx_tok_encode(t, HX_STR("Hello, world!"), &opt, &ids, &err), 0);
    assert_int_equal(ids.n, 4);
    opt.max_ids = 3;
    assert_int_equal(hx_tok_encode(t, HX_STR("Hello, world!"), &opt, &ids, &err),
                     HX_ELIMIT);
    assert_int_equal(ids.n, 4);
    /* The bound is for what is added, not for the list. */
    opt.max_ids = 4;
    assert_int_equal(hx_tok_encode(t, HX_STR("Hello, world!"), &opt, &ids, &err), 0);
    assert_int_equal(ids.n, 8);
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        assert_int_equal(hx_tok_encode(t, hx_str_c(bad[i].text), NULL, &ids, &err),
                         HX_EFORMAT);
        assert_non_null(strstr(err.msg, bad[i].say));
    }
    assert_int_equal(ids.n, 8);
    hx_ids_free(&ids);
    assert_int_equal(hx_ids_add(&ids, NULL, -1, &err), HX_EARG);
    hx_tok_close(t);
}

/* Texts of 1 MB on which a quadratic step would take minutes. They take well under a
 * second each; 20 s is for a busy machine with sanitizers. */
static void test_hostile(void **state)
{
    static const char *const units[] = {
        "a",
        " ",
        "=",
        "\u4e00",
        " \n",
        "\r",
        "'",
        "1",
        "<|",
        "<|user",
        "<|user|> ",
        "ab",
        "\u0301\u0323",
        "\u0323\u0301e",
        "\u1100",
        "\U0001d160",
        " x",
        "the",
        "\u3000\n",
        "A",
        "'s",
    };
    hx_tok *demo = open_file(DEMO), *nfc_tok = open_file(DEMO);

    (void)state;
    nfc_tok->nfc = true;
    for (size_t i = 0; i < HX_LEN(units); i++) {
        hx_sb text = { 0 };
        hx_ids ids = { 0 };
        hx_err err;
        const int64_t start = hx_now_us();

        while (text.n < 1000000)
            hx_sb_str(&text, units[i]);
        hx_sb_char(&text, 'x');
        if (hx_tok_encode(i % 2 == 0 ? nfc_tok : demo, (hx_str) { text.p, text.n }, NULL,
                          &ids, &err) != 0)
            fail_msg("%s: %s", units[i], err.msg);
        assert_true(hx_now_us() - start < 20000000);
        hx_ids_free(&ids);
        hx_sb_free(&text);
    }
    hx_tok_close(demo);
    hx_tok_close(nfc_tok);
}

/* ---- Unicode --------------------------------------------------------- */

static bool pcre_has(const pcre2_code *re, uint32_t cp)
{
    char utf8[4];
    const size_t n = (size_t)hx_utf8_put(cp, utf8);
    pcre2_match_data *md = pcre2_match_data_create(1, NULL);
    const int rc = pcre2_match(re, (PCRE2_SPTR)utf8, n, 0, 0, md, NULL);

    pcre2_match_data_free(md);
    return rc > 0;
}

static pcre2_code *pcre(const char *re)
{
    int code;
    PCRE2_SIZE at;
    pcre2_code *c = pcre2_compile((PCRE2_SPTR)re, strlen(re), PCRE2_UTF | PCRE2_UCP,
                                  &code, &at, NULL);

    assert_non_null(c);
    return c;
}

static void test_classes(void **state)
{
    pcre2_code *space = pcre("\\p{White_Space}"), *none = pcre("\\p{Cn}");
    pcre2_code *word = pcre("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]");

    (void)state;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xd800 && cp < 0xe000)
            continue;
        if (is_space(cp) != pcre_has(space, cp))
            fail_msg("U+%04X: space", cp);
        /* The two libraries may be of different Unicode versions. */
        if (is_word(cp) != pcre_has(word, cp) && !pcre_has(none, cp))
            fail_msg("U+%04X: word", cp);
    }
    pcre2_code_free(space);
    pcre2_code_free(none);
    pcre2_code_free(word);
}

/* A stable character is a starter, is its own NFC, and is the second of no composition:
 * no character decomposes to something that has it after the first. */
static void test_stable(void **state)
{
    (void)state;
    for (int32_t cp = 0; cp < 0x110000; cp++) {
        int32_t parts[8];
        const utf8proc_ssize_t n = utf8proc_decompose_char(
            cp, parts, 8, UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, NULL);

        if (cp >= 0xd800 && cp < 0xe000)
            continue;
        assert_true(n >= 1 && n <= 4);
        for (utf8proc_ssize_t i = 1; i < n; i++)
            if (in_ranges(stable, HX_LEN(stable), (uint32_t)parts[i]))
                fail_msg("U+%04X is part of U+%04X", (unsigned)parts[i], (unsigned)cp);
        if (!in_ranges(stable, HX_LEN(stable), (uint32_t)cp))
            continue;
        const utf8proc_ssize_t k =
            utf8proc_normalize_utf32(parts, n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
        if (k != 1 || parts[0] != cp || ccc_of(cp) != 0)
            fail_msg("U+%04X", (unsigned)cp);
    }
}

/* Against utf8proc's own NFC of the whole text. */
static void test_nfc(void **state)
{
    static const range from[] = {
        { 0x41, 0x7a },     { 0xc0, 0x17f },    { 0x300, 0x362 },   { 0x391, 0x3c9 },
        { 0x5b0, 0x5ea },   { 0x915, 0x94d },   { 0x9be, 0x9d7 },   { 0x1100, 0x1112 },
        { 0x1161, 0x1175 }, { 0x11a8, 0x11c2 }, { 0x1e00, 0x1fff }, { 0x2126, 0x212b },
        { 0x3042, 0x30ff }, { 0xac00, 0xd7a3 }, { 0xf900, 0xfaff }, { 0x1d15e, 0x1d1c8 },
    };
    nfc_buf b = { 0 };

    (void)state;
    for (int round = 0; round < 20000; round++) {
        hx_sb text = { 0 };
        char utf8[4];

        for (size_t n = 1 + below(12); n > 0; n--) {
            const range r = from[below(3) == 0 ? 2 : below(HX_LEN(from))];

            hx_sb_add(&text, utf8,
                      (size_t)hx_utf8_put(r.lo + (uint32_t)below(r.hi - r.lo + 1), utf8));
        }
        hx_str s = { text.p, text.n };
        const uint8_t *user = NULL;
        char *want = (char *)utf8proc_NFC((const utf8proc_uint8_t *)text.p);
        assert_int_equal(nfc(&b, &s, &user, NULL), 0);
        if (!hx_str_is(s, want))
            fail_msg("\"%s\": \"%.*s\", expected \"%s\"", text.p, (int)s.n, s.p, want);
        free(want);
        hx_sb_free(&text);
    }
    nfc_free(&b);
}

/* ---- incremental UTF-8 ----------------------------------------------- */

#define BAD "\xef\xbf\xbd"

/* Every way to cut the bytes in three gives the same text. The invalid ones are those of
 * the Unicode Standard 15.0, tables 3-8 to 3-11. */
static void test_utf8_stream(void **state)
{
    static const struct {
        const char *in, *out;
    } rows[] = {
        { "", "" },
        { "abc", "abc" },
        { "\u00e9\u4e2d\U0001f600x", "\u00e9\u4e2d\U0001f600x" },
        { "\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64",
          "a" BAD BAD BAD "b" BAD "c" BAD BAD "d" },
        { "\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", BAD BAD BAD BAD BAD BAD BAD BAD "A" },
        { "\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", BAD BAD BAD BAD BAD BAD BAD BAD "A" },
        { "\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", BAD BAD BAD BAD BAD "A" BAD BAD "B" },
        { "\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", BAD BAD BAD BAD "A" },
        { "x\xf0\x9f\x98", "x" BAD },
        { "x\xe4\xb8", "x" BAD },
        { "\xf0\x9f\xf0\x9f\x98\x80", BAD "\U0001f600" },
    };

    (void)state;
    for (size_t r = 0; r < HX_LEN(rows); r++) {
        const hx_str in = hx_str_c(rows[r].in);

        for (size_t a = 0; a <= in.n; a++)
            for (size_t b = a; b <= in.n; b++) {
                hx_utf8_stream s = { 0 };
                hx_sb out = { 0 };

                hx_utf8_feed(&s, (hx_str) { in.p, a }, &out);
                hx_utf8_feed(&s, (hx_str) { in.p + a, b - a }, &out);
                hx_utf8_feed(&s, (hx_str) { in.p + b, in.n - b }, &out);
                hx_utf8_end(&s, &out);
                if (!hx_str_is((hx_str) { out.p == NULL ? "" : out.p, out.n },
                               rows[r].out))
                    fail_msg("row %zu cut at %zu and %zu", r, a, b);
                hx_sb_free(&out);
            }
    }
}

/* Each step hands out whole characters only, and as many as are there. */
static void test_utf8_whole(void **state)
{
    const hx_str in = HX_STR("a\u00e9\u4e2d\U0001f600");
    hx_utf8_stream s = { 0 };
    hx_sb out = { 0 };

    (void)state;
    for (size_t i = 0; i < in.n; i++) {
        hx_utf8_feed(&s, (hx_str) { in.p + i, 1 }, &out);
        assert_true(hx_utf8_ok(out.p, out.n));
        assert_int_equal(out.n + (size_t)s.n_held, i + 1);
        assert_true(i + 1 == in.n || s.n_held < 4);
    }
    assert_int_equal(out.n, in.n);
    hx_sb_free(&out);
}

/* ---- failures and threads -------------------------------------------- */

#define FAIL_TEXT                                                                        \
    "caf\u00e9 e\u0323 <x> 12345 abcabcabcabcabcabcabcabcabcabcabcabc \u0301"

static int open_and_encode(hx_str json, hx_ids *ids)
{
    hx_tok *t;
    int rc = hx_tok_open(&t, json, "t.json", NULL);

    if (rc == 0)
        rc = hx_tok_encode(t, HX_STR(FAIL_TEXT), NULL, ids, NULL);
    hx_tok_close(t);
    return rc;
}

/* With the k-th allocation failing, for every k: an error and nothing lost; or, where it
 * was PCRE2's compiler to machine code, which is not needed, the same ids. */
static void test_no_memory(void **state)
{
    hx_sb b = { 0 };
    hx_ids want = { 0 }, ids = { 0 };
    int64_t failed = 0;

    (void)state;
    write_doc(&b,
              &(doc) { .vocab = "\"ab\": 256",
                       .merges = "\"a b\"",
                       .normalizer = "{\"type\": \"NFC\"}",
                       .pre = SEQUENCE(SPLIT("\\\\p{N}+") ", {\"type\": \"ByteLevel\"}"),
                       .added = RAW(300, "<x>") ", " ADD(301, "e\u0323", "") });
    hx_test_fail_at(0);
    assert_int_equal(open_and_encode((hx_str) { b.p, b.n }, &want), 0);
    const int64_t n = hx_test_fail_at(0), live = hx_test_live_allocs();
    for (int64_t k = 1; k <= n; k++) {
        hx_test_fail_at(k);
        const int rc = open_and_encode((hx_str) { b.p, b.n }, &ids);
        hx_test_fail_at(0);
        if (rc == 0) {
            assert_int_equal(ids.n, want.n);
            assert_memory_equal(ids.p, want.p, (size_t)ids.n * sizeof(*ids.p));
        } else {
            assert_int_equal(rc, HX_ENOMEM);
            assert_int_equal(ids.n, 0);
            failed++;
        }
        hx_ids_free(&ids);
        assert_int_equal(hx_test_live_allocs(), live);
    }
    assert_true(failed > 20);
    hx_ids_free(&want);
    hx_sb_free(&b);
}

static void *encode_thread(void *tok)
{
    hx_ids ids = { 0 };
    uint64_t sum = 0;

    for (int i = 0; i < 50; i++) {
        ids.n = 0;
        if (hx_tok_encode(tok, HX_STR("Once upon a time <|user|> 123 \u00e9\n\n  x"),
                          NULL, &ids, NULL) != 0)
            return NULL;
        for (int64_t k = 0; k < ids.n; k++)
            sum = sum * 31 + (uint64_t)ids.p[k];
    }
    hx_ids_free(&ids);
    return (void *)(uintptr_t)(sum | 1);
}

static void test_threads(void **state)
{
    hx_tok *t = open_file(DEMO);
    pthread_t thread[4];
    void *got, *want = encode_thread(t);

    (void)state;
    assert_non_null(want);
    for (size_t i = 0; i < HX_LEN(thread); i++)
        assert_int_equal(pthread_create(&thread[i], NULL, encode_thread, t), 0);
    for (size_t i = 0; i < HX_LEN(thread); i++) {
        pthread_join(thread[i], &got);
        assert_ptr_equal(got, want);
    }
    hx_tok_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demo_vectors),
        cmocka_unit_test(test_glm_vectors),
        cmocka_unit_test(test_alphabet),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_not_a_tokenizer),
        cmocka_unit_test(test_regex_refusals),
        cmocka_unit_test(test_merges),
        cmocka_unit_test(test_merge_order),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_exploding_regex),
        cmocka_unit_test(test_added),
        cmocka_unit_test(test_added_flags),
        cmocka_unit_test(test_normalized),
        cmocka_unit_test(test_user_marks),
        cmocka_unit_test(test_marked_whole_piece),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_stable),
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_utf8_stream),
        cmocka_unit_test(test_utf8_whole),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_threads),
    };

    return cmocka_run_group_tests_name("token", tests, NULL, NULL);
}
