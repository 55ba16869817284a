/* token.c - byte-level BPE tokenizers read from tokenizer.json, and incremental UTF-8.
 *
 * Called by the engine (prompts, replies), the reply parser (marker ids) and the command
 * line. A tokenizer is read-only once open: every thread encodes with its own `enc`. It
 * must never approximate: what it cannot encode exactly as the file says is refused by
 * name when the file is opened.
 *
 * The steps of encoding: added tokens are cut out of the raw text; the rest is
 * normalised; added tokens marked "normalized" are cut out of that; regexes split what is
 * left into pieces; each piece is merged from its bytes, lowest rank first. No step takes
 * more than n log n, whatever the text; a piece of n bytes takes 17 n bytes of memory.
 *
 * Not read, because they never change ids or bytes here: post_processor (a template that
 * would add a BOS does so only when asked; we never ask: chat templates spell it out),
 * truncation, padding. */
#include "text/text.h"

#include <stdio.h>
#include <stdlib.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#define MAX_ID          (1 << 22) /* 16 times the largest vocabulary known */
#define MAX_MERGES      (1 << 24)
#define MAX_ADDED_BYTES 4096 /* of one added token */
#define MAX_STEPS       16
#define MAX_TEXT_BYTES  ((size_t)1 << 28) /* NFC may triple it; positions are int32_t */
#define NO_RANK         INT32_MAX         /* this pair does not merge */

enum { SPECIAL = 1, ADDED = 2 };

typedef struct {
    const char *p;
    uint32_t n, flags;
} token; /* p NULL: no such id */
typedef struct {
    uint32_t hash;
    int32_t id;
} word_slot; /* id -1: free */
typedef struct {
    int32_t left, right, rank;
} pair_slot; /* rank NO_RANK: free */

/* An added token. text is what is searched for: its content, normalised where the file
 * says so. */
typedef struct {
    hx_str text;
    int32_t id;
    bool lstrip, rstrip, single_word;
} added;

/* Added tokens in byte order; first[b]: one of them starts with b. */
typedef struct {
    added *v;
    size_t n;
    bool first[256];
} added_set;

/* One pre-tokenizer: puts a space before a piece that has none (prefix), then splits it
 * where re matches (re NULL: not at all). */
typedef struct {
    pcre2_code *re;
    bool prefix;
} step;

struct hx_tok {
    token *tok; /* [n_tok] */
    int32_t n_tok;
    uint32_t longest; /* bytes of the longest token */
    hx_arena arena;   /* bytes of all tokens */
    word_slot *word;  /* [1 << word_bits], by the token's bytes */
    pair_slot *pair;  /* [1 << pair_bits] */
    int word_bits, pair_bits;
    int32_t *merged; /* by rank: the id that the merge makes */
    int32_t byte_id[256];
    bool ignore_merges; /* a piece that is a token as a whole is not merged */
    bool nfc;
    added_set set[2]; /* searched in raw text, in normalised text */
    step step[MAX_STEPS];
    size_t n_step;
    pcre2_general_context *gc;
};

/* ---- id lists -------------------------------------------------------- */

int hx_ids_add(hx_ids *v, const int32_t *p, int64_t n, hx_err *err)
{
    if (n <= 0)
        return n == 0 ? 0
                      : hx_fail(err, HX_EARG, "id list: %lld ids to add", (long long)n);
    if (n > v->cap - v->n) {
        const int64_t cap = HX_MAX(HX_MAX(v->n + n, 2 * v->cap), 64);
        size_t bytes;
        int32_t *grown = NULL;

        if (hx_mul((size_t)cap, sizeof(*grown), &bytes))
            grown = hx_realloc(v->p, bytes);
        if (grown == NULL)
            return hx_fail(err, HX_ENOMEM, "id list: no memory for %lld ids",
                           (long long)cap);
        v->p = grown;
        v->cap = cap;
    }
    memcpy(v->p + v->n, p, (size_t)n * sizeof(*p));
    v->n += n;
    return 0;
}

void hx_ids_free(hx_ids *v)
{
    hx_free(v->p);
    *v = (hx_ids) { 0 };
}

/* ---- the byte alphabet ----------------------------------------------- */

/* tokenizer.json spells bytes as characters (GPT-2, encoder.py): printable Latin-1 stands
 * for itself, the other 68 bytes for U+0100 on, in order. -1: stands for no byte. */
static int byte_of(uint32_t cp)
{
    if ((cp >= '!' && cp <= '~') || (cp >= 0xa1 && cp <= 0xff && cp != 0xad))
        return (int)cp;
    if (cp < 0x100)
        return -1;
    if (cp <= 0x100 + 0x20)
        return (int)cp - 0x100;
    if (cp <= 0x121 + 0xa0 - 0x7f)
        return (int)cp - 0x121 + 0x7f;
    return cp == 0x143 ? 0xad : -1;
}

/* Writes the bytes that s spells to out, at most s.n; -1: a character stands for none.
 * s is UTF-8 (the JSON parser saw to it), and the alphabet ends before U+0800. */
static int64_t spelled(hx_str s, char *out)
{
    int64_t n = 0;

    for (size_t i = 0; i < s.n; i++) {
        uint32_t cp = (uint8_t)s.p[i];

        if (cp >= 0xe0)
            return -1;
        if (cp >= 0x80)
            cp = (cp & 0x1f) << 6 | ((uint8_t)s.p[++i] & 0x3f);
        const int b = byte_of(cp);
        if (b < 0)
            return -1;
        out[n++] = (char)b;
    }
    return n;
}

/* ---- hash tables ----------------------------------------------------- */

/* Bits of a table that n entries fill to 2/3 at most. */
static int table_bits(size_t n)
{
    int bits = 4;

    while (((size_t)1 << bits) < n + n / 2)
        bits++;
    return bits;
}

/* Eight bytes at a time. The keys of the table are the model's, so nobody gains by text
 * that collides: a miss costs one look at a chain no longer than the file made it. */
static uint32_t hash_bytes(hx_str s)
{
    uint64_t h = s.n, v;

    for (size_t i = 0; i < s.n; i += sizeof(v)) {
        v = 0;
        memcpy(&v, s.p + i, HX_MIN(sizeof(v), s.n - i));
        h = (h ^ v) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return (uint32_t)h;
}

/* The slot of these bytes: theirs, or the free one where they belong. */
static word_slot *word_slot_of(const hx_tok *t, hx_str s, uint32_t *hash)
{
    const uint32_t mask = (1u << t->word_bits) - 1;

    *hash = hash_bytes(s);
    for (uint32_t i = *hash & mask;; i = (i + 1) & mask) {
        word_slot *w = &t->word[i];

        if (w->id < 0)
            return w;
        if (w->hash == *hash && t->tok[w->id].n == s.n &&
            memcmp(t->tok[w->id].p, s.p, s.n) == 0)
            return w;
    }
}

static int32_t word_find(const hx_tok *t, hx_str s)
{
    uint32_t hash;

    return word_slot_of(t, s, &hash)->id;
}

static pair_slot *pair_slot_of(const hx_tok *t, int32_t left, int32_t right)
{
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    const uint64_t mask = ((uint64_t)1 << t->pair_bits) - 1;

    /* Fibonacci hashing: the high bits of the product depend on all of the key. */
    uint64_t i = (key * 0x9e3779b97f4a7c15u) >> (64 - t->pair_bits);

    while (t->pair[i].rank != NO_RANK &&
           (t->pair[i].left != left || t->pair[i].right != right))
        i = (i + 1) & mask;
    return &t->pair[i];
}

/* ---- Unicode --------------------------------------------------------- */

typedef struct {
    uint32_t lo, hi;
} range;

static bool in_ranges(const range *r, size_t n, uint32_t cp)
{
    for (size_t i = 0; i < n && cp >= r[i].lo; i++)
        if (cp <= r[i].hi)
            return true;
    return false;
}

/* White_Space */
static const range spaces[] = {
    { 0x09, 0x0d },     { 0x20, 0x20 },     { 0x85, 0x85 },     { 0xa0, 0xa0 },
    { 0x1680, 0x1680 }, { 0x2000, 0x200a }, { 0x2028, 0x2029 }, { 0x202f, 0x202f },
    { 0x205f, 0x205f }, { 0x3000, 0x3000 },
};

static bool is_space(uint32_t cp)
{
    return in_ranges(spaces, HX_LEN(spaces), cp);
}

/* UTS 18 "word": Alphabetic, marks, decimal digits, connectors, joiners. Letters that are
 * category So (circled Latin) come from PropList, Other_Alphabetic. */
static bool is_word(uint32_t cp)
{
    static const range circled[] = {
        { 0x200c, 0x200d },   { 0x24b6, 0x24e9 },   { 0x1f130, 0x1f149 },
        { 0x1f150, 0x1f169 }, { 0x1f170, 0x1f189 },
    };
    const uint32_t categories = 1u << UTF8PROC_CATEGORY_LU | 1u << UTF8PROC_CATEGORY_LL |
                                1u << UTF8PROC_CATEGORY_LT | 1u << UTF8PROC_CATEGORY_LM |
                                1u << UTF8PROC_CATEGORY_LO | 1u << UTF8PROC_CATEGORY_MN |
                                1u << UTF8PROC_CATEGORY_MC | 1u << UTF8PROC_CATEGORY_ME |
                                1u << UTF8PROC_CATEGORY_ND | 1u << UTF8PROC_CATEGORY_NL |
                                1u << UTF8PROC_CATEGORY_PC;

    return (categories >> utf8proc_category((utf8proc_int32_t)cp) & 1) != 0 ||
           in_ranges(circled, HX_LEN(circled), cp);
}

/* The character that starts at s.p[at] or, back, that ends there. at is a boundary. */
static uint32_t char_at(hx_str s, size_t at, bool back, size_t *n_bytes)
{
    uint32_t cp = 0;
    size_t from = at;

    if (back)
        do
            from--;
        while (((uint8_t)s.p[from] & 0xc0) == 0x80);
    *n_bytes = (size_t)hx_utf8_next(s.p + from, s.n - from, &cp);
    return cp;
}

/* Code points that are starters, that NFC leaves alone and that never join the character
 * before them: the common scripts, so that most text is passed through. */
static const range stable[] = {
    { 0x0000, 0x02ff },                     /* Latin, phonetic */
    { 0x0388, 0x0482 },                     /* Greek, Cyrillic */
    { 0x048a, 0x0590 },                     /* Cyrillic, Armenian */
    { 0x05be, 0x05be }, { 0x05d0, 0x060f }, /* Hebrew, Arabic */
    { 0x061b, 0x064a }, { 0x0660, 0x066f },   { 0x0671, 0x06d5 },
    { 0x0904, 0x0928 }, { 0x092a, 0x0930 },                       /* Devanagari */
    { 0x0e01, 0x0e37 }, { 0x0e3f, 0x0e47 },                       /* Thai */
    { 0x1e00, 0x1eff },                                           /* Latin, Vietnamese */
    { 0x2010, 0x2027 }, { 0x2030, 0x205e },                       /* punctuation */
    { 0x20a0, 0x20cf }, { 0x2190, 0x2328 },   { 0x232b, 0x2adb }, /* symbols */
    { 0x3001, 0x3029 }, { 0x3041, 0x3096 },   { 0x309d, 0x30ff }, /* kana */
    { 0x4e00, 0x9fff }, { 0xac00, 0xd7a3 },                       /* Han, Hangul */
    { 0xff00, 0xffef }, { 0x1f000, 0x1faff },                     /* full width, emoji */
};

/* Scratch of normalisation; freed by its owner. */
typedef struct {
    hx_sb text, user; /* result, and its marks */
    int32_t *cp;      /* [cap]: code points, and room to sort them */
    size_t cap;
} nfc_buf;

static void nfc_free(nfc_buf *b)
{
    hx_sb_free(&b->text);
    hx_sb_free(&b->user);
    hx_free(b->cp);
}

static int ccc_of(int32_t cp)
{
    return utf8proc_get_property(cp)->combining_class;
}

/* Canonical order: a stable sort by combining class of each run of non-starters. Counts
 * instead of exchanges, since a run of marks may be as long as the text. room: [n]. */
static void sort_marks(int32_t *cp, size_t n, int32_t *room)
{
    for (size_t i = 0, end; i < n; i = end + 1) {
        int last = 0, ccc;
        bool sorted = true;

        for (end = i; end < n; end++, last = ccc) {
            ccc = ccc_of(cp[end]);
            if (ccc == 0)
                break;
            sorted &= ccc >= last;
        }
        if (sorted)
            continue;
        size_t at[257] = { 0 };
        for (size_t k = i; k < end; k++)
            at[ccc_of(cp[k]) + 1]++;
        for (size_t c = 1; c < HX_LEN(at); c++)
            at[c] += at[c - 1];
        for (size_t k = i; k < end; k++)
            room[at[ccc_of(cp[k])]++] = cp[k];
        memcpy(cp + i, room, (end - i) * sizeof(*cp));
    }
}

/* Appends the NFC of s to b->text. When it differs from s and any byte of s is marked,
 * all of it is: an added token can then not be made of a user's bytes. */
static int nfc_chunk(nfc_buf *b, hx_str s, const uint8_t *user, hx_err *err)
{
    const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    /* A character makes 4 at most, and only the first may have less than 2 bytes. */
    const size_t room = 2 * s.n + 4;
    const size_t before = b->text.n;
    size_t n = 0, len;
    char utf8[4];

    if (b->cap < 2 * room) {
        int32_t *grown = hx_realloc(b->cp, 2 * room * sizeof(*grown));

        if (grown == NULL)
            return hx_fail(err, HX_ENOMEM, "normalisation: no memory for %zu bytes", s.n);
        b->cp = grown;
        b->cap = 2 * room;
    }
    for (size_t i = 0; i < s.n; i += len) {
        const int32_t cp = (int32_t)char_at(s, i, false, &len);
        const utf8proc_ssize_t got =
            utf8proc_decompose_char(cp, b->cp + n, (utf8proc_ssize_t)(room - n),
                                    options | UTF8PROC_DECOMPOSE, NULL);
        hx_assert(got > 0 && (size_t)got <= room - n);
        n += (size_t)got;
    }
    sort_marks(b->cp, n, b->cp + room);
    n = (size_t)utf8proc_normalize_utf32(b->cp, (utf8proc_ssize_t)n, options);
    for (size_t i = 0; i < n; i++)
        hx_sb_add(&b->text, utf8, (size_t)hx_utf8_put((uint32_t)b->cp[i], utf8));
    if (user == NULL || b->text.bad)
        return 0;
    if (hx_str_eq((hx_str) { b->text.p + before, b->text.n - before }, s)) {
        hx_sb_add(&b->user, user, s.n);
        return 0;
    }
    bool any = false;
    for (size_t i = 0; i < s.n; i++)
        any |= user[i] != 0;
    for (size_t i = before; i < b->text.n; i++)
        hx_sb_char(&b->user, any);
    return 0;
}

/* Skips stable characters from at on. *last: where the last of them starts, or at. */
static size_t skip_stable(hx_str s, size_t at, size_t *last)
{
    *last = at;
    while (at < s.n) {
        uint32_t cp = (uint8_t)s.p[at];
        size_t n = 1;

        if (cp >= 0x80)
            cp = char_at(s, at, false, &n);
        if (!in_ranges(stable, HX_LEN(stable), cp))
            break;
        *last = at;
        at += n;
    }
    return at;
}

/* Makes *s and *user their NFC: as they are, or in b. Stable characters are copied; only
 * chunks from the stable character before an unstable one to the next are worked on. */
static int nfc(nfc_buf *b, hx_str *s, const uint8_t **user, hx_err *err)
{
    size_t done = 0, last, at = skip_stable(*s, 0, &last);
    int rc;

    if (at == s->n)
        return 0;
    b->text.n = b->user.n = 0;
    while (done < s->n) {
        const size_t from = at == s->n ? at : last;
        size_t end = at, n;

        hx_sb_add(&b->text, s->p + done, from - done);
        if (*user != NULL)
            hx_sb_add(&b->user, *user + done, from - done);
        for (; end < s->n; end += n)
            if (in_ranges(stable, HX_LEN(stable), char_at(*s, end, false, &n)))
                break;
        if (from < end && (rc = nfc_chunk(b, (hx_str) { s->p + from, end - from },
                                          *user == NULL ? NULL : *user + from, err)) != 0)
            return rc;
        done = end;
        at = skip_stable(*s, done, &last);
    }
    if (b->text.bad || b->user.bad)
        return hx_fail(err, HX_ENOMEM, "normalisation: no memory for %zu bytes", s->n);
    *s = (hx_str) { b->text.p, b->text.n };
    if (*user != NULL)
        *user = (const uint8_t *)b->user.p;
    return 0;
}

/* ---- loading --------------------------------------------------------- */

typedef struct {
    hx_tok *t;
    const char *name;
    hx_err *err;
    nfc_buf nfc; /* scratch, like spell */
    char *spell; /* [2 * longest_key] */
    size_t longest_key;
} loader;

HX_PRINTF(3, 4)
static int load_fail(const loader *l, int code, const char *fmt, ...)
{
    char msg[sizeof(l->err->msg)];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    return hx_fail(l->err, code, "%s: %s", l->name, msg);
}

static int bad_kind(const loader *l, const char *where, const hx_json *j,
                    const char *expected)
{
    return load_fail(l, HX_EFORMAT, "%s: %s, expected %s", where, hx_json_kind_name(j),
                     expected);
}

/* For the "%.*s" of messages: enough to recognise a string by. */
static int shown(hx_str s)
{
    return (int)HX_MIN(s.n, 40);
}

/* The "type" of a part of the file, or "". */
static hx_str type_of(const hx_json *j)
{
    const hx_str type = hx_json_str(hx_json_get(j, "type"));

    return type.p == NULL ? HX_STR("") : type;
}

/* ---- regular expressions --------------------------------------------- */

/* Patterns are written for Oniguruma (Ruby syntax). What means the same to PCRE2 with UTF
 * and UCP is copied, what differs is spelled out, everything else is refused: a wrong
 * split would go unnoticed. */
typedef struct {
    hx_str re;
    size_t at; /* next byte of re */
    hx_sb *out;
    int depth, caseless; /* open groups; how many there were at (?i:, or 0 */
    const char *why;     /* set by whoever refuses */
} translation;

/* Escapes: what they are outside and inside of brackets; NULL is refused there. PCRE2's
 * \s has U+180E besides White_Space; its \w has no marks and other numbers than Nd. The
 * binary properties need PCRE2 10.40. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
static const struct {
    char c;
    const char *out, *in;
} escapes[] = {
    { 's', "\\p{White_Space}", "\\p{White_Space}" },
    { 'S', "\\P{White_Space}", "\\P{White_Space}" },
    { 'w', "[" WORD "]", WORD },
    { 'W', "[^" WORD "]", NULL },
    { 'd', "\\d", "\\d" },
    { 'D', "\\D", "\\D" },
    { 't', "\\t", "\\t" },
    { 'n', "\\n", "\\n" },
    { 'r', "\\r", "\\r" },
    { 'f', "\\f", "\\f" },
    { 'v', "\\x{b}", "\\x{b}" },
    { 'a', "\\a", "\\a" },
    { 'e', "\\e", "\\e" },
};

static bool refuse(translation *x, const char *why)
{
    x->why = why;
    return false;
}

/* The k-th byte from here, 0 past the end. */
static char peek(const translation *x, size_t k)
{
    return k < x->re.n - x->at ? x->re.p[x->at + k] : '\0';
}

static void copy(translation *x, size_t n)
{
    n = HX_MIN(n, x->re.n - x->at);
    hx_sb_add(x->out, x->re.p + x->at, n);
    x->at += n;
}

static bool is_one_of(char c, const char *set)
{
    return c != '\0' && strchr(set, c) != NULL;
}

static size_t n_digits(const translation *x, size_t k, const char *digits)
{
    size_t n = 0;

    while (is_one_of(peek(x, k + n), digits))
        n++;
    return n;
}

static const char dec[] = "0123456789", hex[] = "0123456789abcdefABCDEF";

/* \x41 (below 80: above, it would be a byte), \x{1f600}, \u00e9. */
static bool translate_code(translation *x)
{
    const bool u = peek(x, 1) == 'u', brace = !u && peek(x, 2) == '{';
    const size_t from = brace ? 3 : 2, n = n_digits(x, from, hex);

    if (brace) {
        if (n < 1 || n > 6 || peek(x, from + n) != '}')
            return refuse(x, "a bad \\x{…}");
        copy(x, from + n + 1);
        return true;
    }
    if (u ? n < 4 : n < 2 || peek(x, 2) >= '8')
        return refuse(x, u ? "a bad \\u" : "\\x that is not \\x00 to \\x7f");
    hx_sb_str(x->out, "\\x{");
    hx_sb_add(x->out, x->re.p + x->at + 2, u ? 4 : 2);
    hx_sb_char(x->out, '}');
    x->at += u ? 6 : 4;
    return true;
}

/* \p{L}, \P{Han}, \p{^L}. Whether the name is known is for PCRE2 to say. */
static bool translate_property(translation *x)
{
    size_t n = 3;

    if (x->caseless > 0)
        return refuse(x, "\\p inside (?i:");
    if (peek(x, 2) != '{')
        return refuse(x, "\\p without braces");
    while (peek(x, n) != '}' && peek(x, n) != '\0')
        n++;
    if (peek(x, n) == '\0')
        return refuse(x, "\\p{ without }");
    copy(x, n + 1);
    return true;
}

static bool translate_escape(translation *x, bool in_class)
{
    const char c = peek(x, 1);

    for (size_t i = 0; i < HX_LEN(escapes); i++) {
        if (c != escapes[i].c)
            continue;
        if (in_class && escapes[i].in == NULL)
            return refuse(x, "\\W inside brackets");
        hx_sb_str(x->out, in_class ? escapes[i].in : escapes[i].out);
        x->at += 2;
        /* A set is no end of a range: the hyphen after it stands for itself. */
        if (in_class && is_one_of(c, "sSwdD") && peek(x, 0) == '-') {
            hx_sb_str(x->out, "\\-");
            x->at++;
        }
        return true;
    }
    if (c == 'p' || c == 'P')
        return translate_property(x);
    if (c == 'x' || c == 'u')
        return translate_code(x);
    if (c == '\0' || (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z'))
        return refuse(x, "an escape other than \\s \\S \\w \\W \\d \\D \\p \\P \\x \\u "
                         "\\t \\n \\r \\f \\v \\a \\e or a punctuation mark");
    copy(x, 2);
    return true;
}

/* Copies a character that stands for itself. Oniguruma lets one letter match several
 * inside (?i: (U+00DF and "ss", U+FB06 and "st"), PCRE2 does not. */
static bool translate_literal(translation *x)
{
    static const char *const joined[] = { "ss", "st", "ff", "fi", "fl" };

    for (size_t i = 0; i < HX_LEN(joined) && x->caseless > 0; i++)
        if ((peek(x, 0) & 0x80) != 0 ||
            ((peek(x, 0) | 0x20) == joined[i][0] && (peek(x, 1) | 0x20) == joined[i][1]))
            return refuse(x, "letters inside (?i: that have ligatures or are not ASCII");
    copy(x, 1);
    return true;
}

static bool translate_class(translation *x)
{
    copy(x, peek(x, 1) == '^' ? 2 : 1);
    if (peek(x, 0) == ']')
        return refuse(x, "empty brackets");
    if (peek(x, 0) == '-')
        copy(x, 1);
    while (x->at < x->re.n) {
        const char c = peek(x, 0);

        if (c == ']') {
            copy(x, 1);
            return true;
        }
        if (c == '[')
            return refuse(x, "brackets inside brackets");
        if (c == '&' && peek(x, 1) == '&')
            return refuse(x, "an intersection (&&)");
        if (c == '-' && peek(x, 1) == '\\' && is_one_of(peek(x, 2), "sSwWdDpP"))
            return refuse(x, "a range that ends in a set");
        if (c == '\\' ? !translate_escape(x, true) : !translate_literal(x))
            return false;
    }
    return refuse(x, "a [ without ]");
}

static bool translate_group(translation *x)
{
    static const char *const opening[] = { "(?:",  "(?i:", "(?=", "(?!",
                                           "(?<=", "(?<!", "(?>" };

    x->depth++;
    if (peek(x, 1) != '?' && peek(x, 1) != '*') {
        copy(x, 1);
        return true;
    }
    if (peek(x, 2) == 'i' && x->caseless == 0)
        x->caseless = x->depth;
    for (size_t i = 0; i < HX_LEN(opening); i++) {
        const size_t n = strlen(opening[i]);

        if (n <= x->re.n - x->at && memcmp(x->re.p + x->at, opening[i], n) == 0) {
            copy(x, n);
            return true;
        }
    }
    return refuse(x, "a group other than ( (?: (?i: (?= (?! (?<= (?<! (?>");
}

/* {2}, {2,}, {2,3}: also lazy, but {2}? and {2,3}+ mean other things to Oniguruma. */
static bool translate_interval(translation *x)
{
    const size_t n = n_digits(x, 1, dec);
    const bool comma = peek(x, 1 + n) == ',';
    const size_t end = 1 + n + (comma ? 1 + n_digits(x, 2 + n, dec) : 0);

    if (n == 0 || peek(x, end) != '}')
        return refuse(x, "a { that opens no interval");
    if (peek(x, end + 1) == '+' || (!comma && peek(x, end + 1) == '?'))
        return refuse(x, "an interval followed by + or {n} by ?");
    copy(x, end + 1);
    return true;
}

static bool translate_close(translation *x)
{
    if (x->depth == x->caseless)
        x->caseless = 0;
    x->depth--;
    copy(x, 1);
    return true;
}

static bool translate(translation *x)
{
    bool ok = true;

    while (ok && x->at < x->re.n) {
        switch (peek(x, 0)) {
        case '\\':
            ok = translate_escape(x, false);
            break;
        case '[':
            ok = translate_class(x);
            break;
        case '(':
            ok = translate_group(x);
            break;
        case ')':
            ok = translate_close(x);
            break;
        case '{':
            ok = translate_interval(x);
            break;
        default:
            ok = translate_literal(x);
            break;
        }
    }
    return ok;
}

static void *pcre_alloc(size_t n, void *ud)
{
    (void)ud;
    return hx_alloc(n);
}

static void pcre_free(void *p, void *ud)
{
    (void)ud;
    hx_free(p);
}

/* Compiles a translated pattern. re is the one to show. */
static int compile(const loader *l, pcre2_code **out, const hx_sb *pattern, hx_str re)
{
    const uint32_t options =
        PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    const PCRE2_SPTR p = (PCRE2_SPTR)(pattern->p == NULL ? "" : pattern->p);
    pcre2_compile_context *cc = pcre2_compile_context_create(l->t->gc);
    PCRE2_UCHAR why[96];
    PCRE2_SIZE at;
    int code;

    if (cc == NULL || pattern->bad) {
        pcre2_compile_context_free(cc);
        return load_fail(l, HX_ENOMEM, "no memory for a regex of %zu bytes", re.n);
    }
    pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
    *out = pcre2_compile(p, pattern->n, options, &code, &at, cc);
    pcre2_compile_context_free(cc);
    if (*out == NULL) {
        const bool no_memory = code == PCRE2_ERROR_HEAP_FAILED;

        pcre2_get_error_message(code, why, sizeof(why));
        return load_fail(l, no_memory ? HX_ENOMEM : HX_EFORMAT,
                         "pre_tokenizer: regex: %s: %.*s", (const char *)why, shown(re),
                         re.p);
    }
    /* Where no executable memory is to be had, the interpreter gives the same matches. */
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
    return 0;
}

/* Adds a step that splits at re. */
static int add_regex(const loader *l, hx_str re, bool prefix)
{
    hx_sb out = { .max = (size_t)1 << 20 };
    translation x = { .re = re, .out = &out };
    pcre2_code *code = NULL;
    int rc;

    if (translate(&x))
        rc = compile(l, &code, &out, re);
    else
        rc = load_fail(l, HX_EUNSUP, "pre_tokenizer: regex has %s at byte %zu: %.*s",
                       x.why, x.at, shown(re), re.p);
    hx_sb_free(&out);
    if (rc == 0)
        l->t->step[l->t->n_step++] = (step) { code, prefix };
    return rc;
}

/* ---- opening --------------------------------------------------------- */

/* Checks that a member is absent, null, false, 0 or "". */
static int refuse_set(const loader *l, const hx_json *model, const char *key)
{
    const hx_json *j = hx_json_get(model, key);

    if (hx_json_kind(j) == HX_JSON_NULL || hx_json_num(j, 1) == 0 ||
        (hx_json_kind(j) == HX_JSON_STRING && hx_json_str(j).n == 0) ||
        (hx_json_kind(j) == HX_JSON_BOOL && !hx_json_bool(j, true)))
        return 0;
    return load_fail(l, HX_EUNSUP,
                     "model.%s is set: only byte-level BPE without it is supported", key);
}

static int check_model(const loader *l, const hx_json *model)
{
    static const char *const never[] = { "byte_fallback", "dropout", "end_of_word_suffix",
                                         "continuing_subword_prefix" };
    const hx_str type = type_of(model);
    int rc;

    if (hx_json_kind(model) != HX_JSON_OBJECT)
        return bad_kind(l, "model", model, "object");
    if (type.n > 0 && !hx_str_is(type, "BPE"))
        return load_fail(l, HX_EUNSUP,
                         "model type \"%.*s\": only byte-level BPE is supported",
                         shown(type), type.p);
    for (size_t i = 0; i < HX_LEN(never); i++)
        if ((rc = refuse_set(l, model, never[i])) != 0)
            return rc;
    l->t->ignore_merges = hx_json_bool(hx_json_get(model, "ignore_merges"), false);
    return 0;
}

/* The id of a vocabulary entry or an added token, or a negative error. */
static int32_t read_id(const loader *l, const hx_json *j, hx_str of)
{
    const int64_t id = hx_json_int(j, -1);

    if (hx_json_kind(j) != HX_JSON_INT || id < 0 || id >= MAX_ID)
        return load_fail(l, HX_EFORMAT, "token \"%.*s\": id is %s %lld, expected 0 to %d",
                         shown(of), of.p, hx_json_kind_name(j), (long long)id,
                         MAX_ID - 1);
    return (int32_t)id;
}

/* Makes room for all ids of vocabulary and added tokens. */
static int size_tables(loader *l, const hx_json *vocab, const hx_json *added_list)
{
    hx_tok *t = l->t;
    const size_t n_vocab = hx_json_len(vocab), n_added = hx_json_len(added_list);
    hx_str key;

    for (size_t i = 0; i < n_vocab; i++) {
        const int32_t id = read_id(l, hx_json_member(vocab, i, &key), key);

        if (id < 0)
            return id;
        t->n_tok = HX_MAX(t->n_tok, id + 1);
        l->longest_key = HX_MAX(l->longest_key, key.n);
    }
    for (size_t i = 0; i < n_added; i++) {
        const hx_json *j = hx_json_at(added_list, i);
        const hx_str content = hx_json_str(hx_json_get(j, "content"));
        const int32_t id = read_id(l, hx_json_get(j, "id"), content);

        if (id < 0)
            return id;
        if (content.n == 0 || content.n > MAX_ADDED_BYTES)
            return load_fail(
                l, HX_EFORMAT,
                "added_tokens[%zu]: content of %zu bytes, expected a string of 1 to %d",
                i, content.n, MAX_ADDED_BYTES);
        t->n_tok = HX_MAX(t->n_tok, id + 1);
        l->longest_key = HX_MAX(l->longest_key, content.n);
    }
    t->word_bits = table_bits(n_vocab);
    t->tok = hx_new(token, t->n_tok);
    t->word = hx_new(word_slot, (size_t)1 << t->word_bits);
    l->spell = hx_alloc(2 * l->longest_key + 1);
    if (t->tok == NULL || t->word == NULL || l->spell == NULL)
        return load_fail(l, HX_ENOMEM, "no memory for %zu tokens", n_vocab);
    for (size_t i = 0; i < (size_t)1 << t->word_bits; i++)
        t->word[i].id = -1;
    return 0;
}

static int duplicate_id(const loader *l, int32_t id, hx_str key)
{
    return load_fail(l, HX_EFORMAT,
                     "id %d: \"%.*s\" and another token, expected one token of one id",
                     id, shown(key), key.p);
}

static int load_vocab(loader *l, const hx_json *vocab)
{
    hx_tok *t = l->t;
    hx_str key;

    for (size_t i = 0; i < hx_json_len(vocab); i++) {
        const int32_t id = (int32_t)hx_json_int(hx_json_member(vocab, i, &key), -1);
        const int64_t n = spelled(key, l->spell);
        /* A key outside the alphabet names a token that no text reaches; it decodes to
         * its own characters. */
        const hx_str bytes = n < 0 ? key : (hx_str) { l->spell, (size_t)n };
        token *k = &t->tok[id];

        if (k->p != NULL)
            return duplicate_id(l, id, key);
        k->p = hx_arena_dup(&t->arena, bytes.p, bytes.n);
        k->n = (uint32_t)bytes.n;
        t->longest = HX_MAX(t->longest, k->n);
        if (k->p == NULL)
            return load_fail(l, HX_ENOMEM, "no memory for the vocabulary");
        if (n <= 0)
            continue;
        uint32_t hash;
        word_slot *w = word_slot_of(t, bytes, &hash);
        if (w->id >= 0)
            return load_fail(l, HX_EFORMAT, "token \"%.*s\": listed with ids %d and %d",
                             shown(key), key.p, w->id, id);
        *w = (word_slot) { hash, id };
    }
    for (int b = 0; b < 256; b++) {
        const char c = (char)b;

        t->byte_id[b] = word_find(t, (hx_str) { &c, 1 });
        if (t->byte_id[b] < 0)
            return load_fail(l, HX_EUNSUP,
                             "no token for the byte 0x%02x: only byte-level BPE, with "
                             "all 256 bytes, is supported",
                             (unsigned)b);
    }
    return 0;
}

/* The two sides of a merge: ["a", "b"] or "a b". */
static bool merge_sides(const hx_json *j, hx_str *a, hx_str *b)
{
    const hx_str s = hx_json_str(j);

    if (hx_json_kind(j) == HX_JSON_ARRAY && hx_json_len(j) == 2) {
        *a = hx_json_str(hx_json_at(j, 0));
        *b = hx_json_str(hx_json_at(j, 1));
        return a->n > 0 && b->n > 0;
    }
    const char *space = s.p == NULL ? NULL : memchr(s.p, ' ', s.n);
    if (space == NULL)
        return false;
    *a = (hx_str) { s.p, (size_t)(space - s.p) };
    *b = (hx_str) { space + 1, s.n - a->n - 1 };
    return a->n > 0 && b->n > 0 && memchr(b->p, ' ', b->n) == NULL;
}

static int unknown_side(const loader *l, size_t rank, hx_str side, const char *what)
{
    return load_fail(l, HX_EFORMAT,
                     "model.merges[%zu]: %s \"%.*s\" is not in the vocabulary", rank,
                     what, shown(side), side.p);
}

static int load_merge(loader *l, const hx_json *j, size_t rank)
{
    hx_tok *t = l->t;
    hx_str a, b;

    if (!merge_sides(j, &a, &b))
        return load_fail(l, HX_EFORMAT,
                         "model.merges[%zu]: expected [\"a\", \"b\"] or \"a b\"", rank);
    const int64_t na = a.n > l->longest_key ? -1 : spelled(a, l->spell);
    const int32_t left = na < 0 ? -1 : word_find(t, (hx_str) { l->spell, (size_t)na });
    if (left < 0)
        return unknown_side(l, rank, a, "token");
    const int64_t nb = b.n > l->longest_key ? -1 : spelled(b, l->spell + na);
    const int32_t right =
        nb < 0 ? -1 : word_find(t, (hx_str) { l->spell + na, (size_t)nb });
    if (right < 0)
        return unknown_side(l, rank, b, "token");
    const int32_t whole = word_find(t, (hx_str) { l->spell, (size_t)(na + nb) });
    if (whole < 0)
        return unknown_side(l, rank, b, "the result that ends in");
    pair_slot *s = pair_slot_of(t, left, right);
    if (s->rank != NO_RANK)
        return load_fail(l, HX_EFORMAT, "model.merges[%zu]: the same as merges[%d]", rank,
                         s->rank);
    *s = (pair_slot) { left, right, (int32_t)rank };
    t->merged[rank] = whole;
    return 0;
}

static int load_merges(loader *l, const hx_json *merges)
{
    hx_tok *t = l->t;
    const size_t n = hx_json_len(merges);
    int rc;

    if (hx_json_kind(merges) != HX_JSON_ARRAY || n > MAX_MERGES)
        return bad_kind(l, "model.merges", merges, "array of 16777216 at most");
    t->pair_bits = table_bits(n);
    t->pair = hx_new(pair_slot, (size_t)1 << t->pair_bits);
    t->merged = hx_new(int32_t, n + 1);
    if (t->pair == NULL || t->merged == NULL)
        return load_fail(l, HX_ENOMEM, "no memory for %zu merges", n);
    for (size_t i = 0; i < (size_t)1 << t->pair_bits; i++)
        t->pair[i].rank = NO_RANK;
    for (size_t i = 0; i < n; i++)
        if ((rc = load_merge(l, hx_json_at(merges, i), i)) != 0)
            return rc;
    return 0;
}

/* Reads one added token into *a; *late: it is searched for in normalised text. */
static int load_added_token(loader *l, const hx_json *j, added *a, bool *late)
{
    hx_tok *t = l->t;
    hx_str content = hx_json_str(hx_json_get(j, "content"));
    const bool special = hx_json_bool(hx_json_get(j, "special"), false);
    const uint8_t *unmarked = NULL;
    int rc;

    *late = hx_json_bool(hx_json_get(j, "normalized"), !special);
    *a = (added) { .id = (int32_t)hx_json_int(hx_json_get(j, "id"), -1),
                   .lstrip = hx_json_bool(hx_json_get(j, "lstrip"), false),
                   .rstrip = hx_json_bool(hx_json_get(j, "rstrip"), false),
                   .single_word = hx_json_bool(hx_json_get(j, "single_word"), false) };

    /* An added token may be in the vocabulary too: by the same id and spelling. */
    token *k = &t->tok[a->id];
    const int64_t n = spelled(content, l->spell);
    const int32_t known = n < 0 ? -1 : word_find(t, (hx_str) { l->spell, (size_t)n });
    if ((known >= 0 && known != a->id) || (k->flags & ADDED) != 0 ||
        (k->p != NULL && !hx_str_eq((hx_str) { k->p, k->n }, content)))
        return duplicate_id(l, a->id, content);
    k->p = hx_arena_dup(&t->arena, content.p, content.n);
    k->n = (uint32_t)content.n;
    k->flags = special ? ADDED | SPECIAL : ADDED;
    if (*late && t->nfc && (rc = nfc(&l->nfc, &content, &unmarked, l->err)) != 0)
        return rc;
    a->text = (hx_str) { hx_arena_dup(&t->arena, content.p, content.n), content.n };
    if (k->p == NULL || a->text.p == NULL)
        return load_fail(l, HX_ENOMEM, "no memory for added tokens");
    return 0;
}

static int by_bytes(const void *pa, const void *pb)
{
    const hx_str a = ((const added *)pa)->text, b = ((const added *)pb)->text;
    const int c = memcmp(a.p, b.p, HX_MIN(a.n, b.n));

    return c != 0 ? c : (a.n > b.n) - (a.n < b.n);
}

static int load_added(loader *l, const hx_json *list)
{
    hx_tok *t = l->t;
    const size_t n = hx_json_len(list);
    int rc;

    for (int s = 0; s < 2; s++)
        if ((t->set[s].v = hx_new(added, n + 1)) == NULL)
            return load_fail(l, HX_ENOMEM, "no memory for added tokens");
    for (size_t i = 0; i < n; i++) {
        added a;
        bool late;

        if ((rc = load_added_token(l, hx_json_at(list, i), &a, &late)) != 0)
            return rc;
        added_set *s = &t->set[late];
        s->v[s->n++] = a;
        s->first[(uint8_t)a.text.p[0]] = true;
    }
    for (int k = 0; k < 2; k++) {
        const added_set *s = &t->set[k];

        qsort(s->v, s->n, sizeof(*s->v), by_bytes);
        for (size_t i = 1; i < s->n; i++)
            if (hx_str_eq(s->v[i - 1].text, s->v[i].text))
                return load_fail(
                    l, HX_EFORMAT, "added token \"%.*s\": listed with ids %d and %d",
                    shown(s->v[i].text), s->v[i].text.p, s->v[i - 1].id, s->v[i].id);
    }
    return 0;
}

static int load_normalizer(loader *l, const hx_json *j)
{
    const hx_str type = type_of(j);
    const hx_json *list = hx_json_get(j, "normalizers");
    int rc;

    if (hx_json_kind(j) == HX_JSON_NULL)
        return 0;
    if (hx_str_is(type, "NFC")) {
        l->t->nfc = true;
        return 0;
    }
    if (!hx_str_is(type, "Sequence"))
        return load_fail(l, HX_EUNSUP, "normalizer \"%.*s\": only NFC is supported",
                         shown(type), type.p);
    for (size_t i = 0; i < hx_json_len(list); i++)
        if ((rc = load_normalizer(l, hx_json_at(list, i))) != 0)
            return rc;
    return 0;
}

static int load_split(loader *l, const hx_json *j)
{
    const hx_json *pattern = hx_json_get(j, "pattern");
    const hx_str re = hx_json_str(hx_json_get(pattern, "Regex"));
    const hx_str behavior = hx_json_str(hx_json_get(j, "behavior"));

    if (re.p == NULL)
        return load_fail(l, HX_EUNSUP, "pre_tokenizer Split: pattern is not a Regex");
    if (!hx_str_is(behavior, "Isolated") || hx_json_bool(hx_json_get(j, "invert"), false))
        return load_fail(l, HX_EUNSUP,
                         "pre_tokenizer Split: behavior \"%.*s\", only \"Isolated\" "
                         "without invert is supported",
                         shown(behavior), behavior.p == NULL ? "" : behavior.p);
    return add_regex(l, re, false);
}

/* GPT-2's pattern (encoder.py), which ByteLevel uses unless told not to. */
static const char byte_level_regex[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static int load_byte_level(loader *l, const hx_json *j)
{
    const bool prefix = hx_json_bool(hx_json_get(j, "add_prefix_space"), true);

    if (hx_json_bool(hx_json_get(j, "use_regex"), true))
        return add_regex(l, HX_STR(byte_level_regex), prefix);
    if (prefix)
        l->t->step[l->t->n_step++].prefix = true;
    return 0;
}

/* *done: ByteLevel was met. It must be the last, since it leaves no text to split. */
static int load_pre_tokenizer(loader *l, const hx_json *j, bool *done)
{
    const hx_str type = type_of(j);
    const hx_json *list = hx_json_get(j, "pretokenizers");
    int rc;

    if (hx_str_is(type, "Sequence")) {
        for (size_t i = 0; i < hx_json_len(list); i++)
            if ((rc = load_pre_tokenizer(l, hx_json_at(list, i), done)) != 0)
                return rc;
        return 0;
    }
    if (*done)
        return load_fail(l, HX_EUNSUP, "pre_tokenizer \"%.*s\" after ByteLevel",
                         shown(type), type.p);
    if (l->t->n_step == MAX_STEPS)
        return load_fail(l, HX_EUNSUP, "pre_tokenizer: more than %d steps", MAX_STEPS);
    if (hx_str_is(type, "Split"))
        return load_split(l, j);
    if (hx_str_is(type, "ByteLevel")) {
        *done = true;
        return load_byte_level(l, j);
    }
    return load_fail(
        l, HX_EUNSUP,
        "pre_tokenizer \"%.*s\": only Sequence, Split and ByteLevel are supported",
        shown(type), type.p);
}

static int load_steps(loader *l, const hx_json *root)
{
    const hx_str decoder = type_of(hx_json_get(root, "decoder"));
    const hx_json *pre = hx_json_get(root, "pre_tokenizer");
    bool byte_level = false;
    int rc;

    if ((rc = load_normalizer(l, hx_json_get(root, "normalizer"))) != 0)
        return rc;
    if (hx_json_kind(pre) == HX_JSON_NULL)
        return load_fail(l, HX_EUNSUP,
                         "no pre_tokenizer: only byte-level BPE is supported");
    if ((rc = load_pre_tokenizer(l, pre, &byte_level)) != 0)
        return rc;
    if (!byte_level)
        return load_fail(
            l, HX_EUNSUP,
            "pre_tokenizer without ByteLevel: only byte-level BPE is supported");
    if (decoder.n > 0 && !hx_str_is(decoder, "ByteLevel"))
        return load_fail(l, HX_EUNSUP, "decoder \"%.*s\": only ByteLevel is supported",
                         shown(decoder), decoder.p);
    return 0;
}

static int load(loader *l, const hx_json *root)
{
    const hx_json *model = hx_json_get(root, "model");
    const hx_json *vocab = hx_json_get(model, "vocab");
    const hx_json *list = hx_json_get(root, "added_tokens");
    int rc;

    if (hx_json_kind(root) != HX_JSON_OBJECT)
        return bad_kind(l, "tokenizer", root, "object");
    if ((rc = check_model(l, model)) != 0 || (rc = load_steps(l, root)) != 0)
        return rc;
    if (hx_json_kind(vocab) != HX_JSON_OBJECT || hx_json_len(vocab) > MAX_ID)
        return bad_kind(l, "model.vocab", vocab, "object with 4194304 members at most");
    if (hx_json_kind(list) != HX_JSON_NULL && hx_json_kind(list) != HX_JSON_ARRAY)
        return bad_kind(l, "added_tokens", list, "array");
    if ((rc = size_tables(l, vocab, list)) != 0 || (rc = load_vocab(l, vocab)) != 0 ||
        (rc = load_merges(l, hx_json_get(model, "merges"))) != 0)
        return rc;
    return load_added(l, list);
}

int hx_tok_open(hx_tok **out, hx_str json, const char *name, hx_err *err)
{
    hx_tok *t = hx_new(hx_tok, 1);
    loader l = { .t = t, .name = name, .err = err };
    hx_json *root = NULL;
    hx_err parse = { 0 };
    int rc;

    *out = NULL;
    if (t != NULL) {
        hx_arena_init(&t->arena, SIZE_MAX);
        t->gc = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
    }
    if (t == NULL || t->gc == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "%s: no memory for a tokenizer", name);
        goto fail;
    }
    if ((rc = hx_json_parse(&root, json, 0, &parse)) != 0) {
        load_fail(&l, rc, "%s", parse.msg);
        goto fail;
    }
    if ((rc = load(&l, root)) != 0)
        goto fail;
    *out = t;
    t = NULL;
fail:
    hx_json_free(root);
    hx_free(l.spell);
    nfc_free(&l.nfc);
    hx_tok_close(t);
    return rc;
}

void hx_tok_close(hx_tok *t)
{
    if (t == NULL)
        return;
    for (size_t i = 0; i < t->n_step; i++)
        pcre2_code_free(t->step[i].re);
    pcre2_general_context_free(t->gc);
    hx_free(t->set[0].v);
    hx_free(t->set[1].v);
    hx_free(t->tok);
    hx_free(t->word);
    hx_free(t->pair);
    hx_free(t->merged);
    hx_arena_reset(&t->arena);
    hx_free(t);
}

/* ---- queries --------------------------------------------------------- */

int32_t hx_tok_count(const hx_tok *t)
{
    return t->n_tok;
}

hx_str hx_tok_bytes(const hx_tok *t, int32_t id)
{
    if (id < 0 || id >= t->n_tok)
        return (hx_str) { NULL, 0 };
    return (hx_str) { t->tok[id].p, t->tok[id].n };
}

bool hx_tok_is_special(const hx_tok *t, int32_t id)
{
    return id >= 0 && id < t->n_tok && (t->tok[id].flags & SPECIAL) != 0;
}

int32_t hx_tok_find(const hx_tok *t, hx_str text)
{
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < t->set[k].n; i++)
            if (hx_str_eq(hx_tok_bytes(t, t->set[k].v[i].id), text))
                return t->set[k].v[i].id;
    return -1;
}

/* ---- merging --------------------------------------------------------- */

/* A symbol of a piece, kept at the index of its first byte: a token and its neighbours
 * (-1: none). */
typedef struct {
    int32_t id, prev, next;
} symbol;

/* The ranks of a piece's merges as a tree of minima. level[0][i] is the rank of merging
 * symbol i with its next (NO_RANK: none, or the symbol is gone), level[k + 1][i] the
 * lowest of level[k][FAN * i ...]. Merges of one rank go from left to right, so most of
 * this happens in a few cache lines: 10 MB of one letter took 2.7 s with a binary heap,
 * 0.8 s with this (Llama 3 merges, Zen 3, 2025). */
#define FAN        8
#define MAX_LEVELS 10 /* FAN^10 is above 3 * MAX_TEXT_BYTES */

typedef struct {
    int32_t *level[MAX_LEVELS]; /* into room; each a multiple of FAN long */
    int n_level;
    int32_t *room;
    size_t cap;
} ranks;

/* What one call of hx_tok_encode() needs. */
typedef struct {
    const hx_tok *t;
    bool special;
    hx_ids *out;
    int64_t left; /* ids that may still be added */
    symbol *sym;  /* [cap_sym] */
    size_t cap_sym;
    ranks ranks;
    hx_sb prefixed; /* a piece with its space */
    nfc_buf nfc;
    pcre2_match_data *md;
    pcre2_match_context *mc;
    hx_err *err;
} enc;

static int too_many(const enc *e)
{
    return hx_fail(e->err, HX_ELIMIT, "text has more tokens than allowed");
}

static int emit(enc *e, int32_t id)
{
    if (e->left-- == 0)
        return too_many(e);
    if (e->out->n == e->out->cap)
        return hx_ids_add(e->out, &id, 1, e->err);
    e->out->p[e->out->n++] = id;
    return 0;
}

static int reserve(void **p, size_t *cap, size_t n, size_t size, hx_err *err)
{
    size_t bytes;
    void *grown = NULL;

    if (n <= *cap)
        return 0;
    n = HX_MAX(n, *cap * 2);
    if (hx_mul(n, size, &bytes))
        grown = hx_realloc(*p, bytes);
    if (grown == NULL)
        return hx_fail(err, HX_ENOMEM, "tokenizer: no memory for %zu items of %zu bytes",
                       n, size);
    *p = grown;
    *cap = n;
    return 0;
}

static int32_t lowest(const int32_t v[FAN])
{
    int32_t min = v[0];

    for (int i = 1; i < FAN; i++)
        min = HX_MIN(min, v[i]);
    return min;
}

/* Lays out the levels for n symbols. What is not yet set has no rank. */
static int ranks_init(ranks *r, size_t n, hx_err *err)
{
    size_t at[MAX_LEVELS + 1] = { 0 };
    int rc, k = 0;

    do {
        hx_assert(k < MAX_LEVELS);
        n = (n + FAN - 1) / FAN;
        at[k + 1] = at[k] + n * FAN;
        k++;
    } while (n > 1);
    if ((rc = reserve((void **)&r->room, &r->cap, at[k], sizeof(*r->room), err)) != 0)
        return rc;
    for (size_t i = 0; i < at[k]; i++)
        r->room[i] = NO_RANK;
    for (r->n_level = 0; r->n_level < k; r->n_level++)
        r->level[r->n_level] = r->room + at[r->n_level];
    return 0;
}

/* Makes the levels above from level 0. */
static void ranks_build(ranks *r)
{
    for (int k = 1; k < r->n_level; k++)
        for (const int32_t *v = r->level[k - 1]; v < r->level[k]; v += FAN)
            r->level[k][(v - r->level[k - 1]) / FAN] = lowest(v);
}

static void ranks_set(ranks *r, int32_t i, int32_t rank)
{
    r->level[0][i] = rank;
    for (int k = 1; k < r->n_level; k++) {
        i /= FAN;
        const int32_t min = lowest(r->level[k - 1] + (size_t)i * FAN);
        if (r->level[k][i] == min)
            return;
        r->level[k][i] = min;
    }
}

/* The leftmost of the symbols of lowest rank, or -1: nothing merges. */
static int32_t ranks_first(const ranks *r)
{
    const int32_t min = lowest(r->level[r->n_level - 1]);
    int32_t at = 0;

    if (min == NO_RANK)
        return -1;
    for (int k = r->n_level - 1; k >= 0; k--)
        for (at *= FAN; r->level[k][at] != min;)
            at++;
    return at;
}

static int32_t rank_at(const enc *e, int32_t i)
{
    const symbol *s = &e->sym[i];

    return s->next < 0 ? NO_RANK : pair_slot_of(e->t, s->id, e->sym[s->next].id)->rank;
}

/* Encodes one piece. */
static int merge(enc *e, hx_str s)
{
    const hx_tok *t = e->t;
    const int32_t n = (int32_t)s.n;
    ranks *r = &e->ranks;
    int rc;

    if (t->ignore_merges && s.n <= t->longest) {
        const int32_t id = word_find(t, s);

        if (id >= 0 && (t->tok[id].flags & ADDED) == 0)
            return emit(e, id);
    }
    if ((int64_t)(s.n / t->longest) > e->left)
        return too_many(e);
    rc = reserve((void **)&e->sym, &e->cap_sym, s.n, sizeof(*e->sym), e->err);
    if (rc != 0 || (rc = ranks_init(r, s.n, e->err)) != 0)
        return rc;
    for (int32_t i = 0; i < n; i++)
        e->sym[i] = (symbol) { t->byte_id[(uint8_t)s.p[i]], i - 1, i + 1 };
    e->sym[n - 1].next = -1;
    for (int32_t i = 0; i < n; i++)
        r->level[0][i] = rank_at(e, i);
    ranks_build(r);
    for (int32_t i; (i = ranks_first(r)) >= 0;) {
        symbol *a = &e->sym[i];

        a->id = t->merged[r->level[0][i]];
        ranks_set(r, a->next, NO_RANK);
        a->next = e->sym[a->next].next;
        ranks_set(r, i, rank_at(e, i));
        if (a->next >= 0)
            e->sym[a->next].prev = i;
        if (a->prev >= 0)
            ranks_set(r, a->prev, rank_at(e, a->prev));
    }
    for (int32_t i = 0; i >= 0; i = e->sym[i].next)
        if ((rc = emit(e, e->sym[i].id)) != 0)
            return rc;
    return 0;
}

/* ---- splitting ------------------------------------------------------- */

/* 1: re matches s at or after from (where, e->md says); 0: nowhere; or an error. */
static int find(enc *e, const pcre2_code *re, hx_str s, size_t from)
{
    const PCRE2_SPTR p = (PCRE2_SPTR)s.p;
    const uint32_t options = PCRE2_NO_UTF_CHECK;
    int rc = pcre2_match(re, p, s.n, from, options, e->md, e->mc);

    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(re, p, s.n, from, options | PCRE2_NO_JIT, e->md, e->mc);
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    if (rc == PCRE2_ERROR_NOMEMORY)
        return hx_fail(e->err, HX_ENOMEM, "tokenizer: no memory for a regex match");
    if (rc < 0)
        return hx_fail(e->err, HX_ELIMIT,
                       "tokenizer: the pre_tokenizer's regex takes too "
                       "many steps on this text (PCRE2 error %d)",
                       rc);
    return 1;
}

static int add_space(enc *e, hx_str *s)
{
    if (s->p[0] == ' ')
        return 0;
    e->prefixed.n = 0;
    hx_sb_char(&e->prefixed, ' ');
    hx_sb_add(&e->prefixed, s->p, s->n);
    if (e->prefixed.bad)
        return hx_fail(e->err, HX_ENOMEM, "tokenizer: no memory for a piece of %zu bytes",
                       s->n);
    *s = (hx_str) { e->prefixed.p, e->prefixed.n };
    return 0;
}

/* Splits s (maybe empty: dropped) by the steps from k on, and encodes the pieces. What
 * lies between matches is a piece as well. */
static int split(enc *e, size_t k, hx_str s)
{
    const step *st = &e->t->step[k];
    const PCRE2_SIZE *match = pcre2_get_ovector_pointer(e->md);
    size_t done = 0, from = 0, n;
    int rc;

    if (s.n == 0)
        return 0;
    if (k == e->t->n_step)
        return merge(e, s);
    if (st->prefix && (rc = add_space(e, &s)) != 0)
        return rc;
    while (st->re != NULL && from < s.n && (rc = find(e, st->re, s, from)) != 0) {
        const size_t begin = match[0], end = match[1];

        if (rc < 0 ||
            (rc = split(e, k + 1, (hx_str) { s.p + done, begin - done })) != 0 ||
            (rc = split(e, k + 1, (hx_str) { s.p + begin, end - begin })) != 0)
            return rc;
        done = from = end;
        if (begin == end && end < s.n) {
            char_at(s, end, false, &n);
            from += n;
        }
    }
    return split(e, k + 1, (hx_str) { s.p + done, s.n - done });
}

/* ---- added tokens ---------------------------------------------------- */

/* The first of v[lo, hi), which share d bytes, whose next byte is c or above. */
static size_t lower(const added *v, size_t lo, size_t hi, size_t d, int c)
{
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;

        if (v[mid].text.n > d && (uint8_t)v[mid].text.p[d] >= c)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* The longest added token that s starts with, made of unmarked bytes; or NULL. */
static const added *longest_added(const added_set *set, hx_str s, const uint8_t *user)
{
    const added *best = NULL;
    size_t lo = 0, hi = set->n;

    for (size_t d = 0; d < s.n && (user == NULL || user[d] == 0); d++) {
        const int c = (uint8_t)s.p[d];

        lo = lower(set->v, lo, hi, d, c);
        hi = lower(set->v, lo, hi, d, c + 1);
        if (lo == hi)
            break;
        if (set->v[lo].text.n == d + 1)
            best = &set->v[lo];
    }
    return best;
}

/* Moves *begin back to floor at most and *end on over white space, as the token asks.
 * False: it asks to be a word by itself, and is not. */
static bool fits(const added *a, hx_str s, size_t floor, size_t *begin, size_t *end)
{
    size_t n;

    if (a->single_word && ((*begin > 0 && is_word(char_at(s, *begin, true, &n))) ||
                           (*end < s.n && is_word(char_at(s, *end, false, &n)))))
        return false;
    while (a->lstrip && *begin > floor && is_space(char_at(s, *begin, true, &n)))
        *begin -= n;
    /* What an earlier token took (floor) is white space: no need to walk it again. */
    if (a->rstrip)
        *end = HX_MAX(*end, floor);
    while (a->rstrip && *end < s.n && is_space(char_at(s, *end, false, &n)))
        *end += n;
    return true;
}

static int cut(enc *e, int pass, hx_str s, const uint8_t *user);

/* What lies between added tokens: on to the next pass, and at last to the steps. */
static int between(enc *e, int pass, hx_str s, const uint8_t *user)
{
    int rc;

    if (s.n == 0)
        return 0;
    if (pass == 1)
        return split(e, 0, s);
    if (e->t->nfc && (rc = nfc(&e->nfc, &s, &user, e->err)) != 0)
        return rc;
    return cut(e, 1, s, user);
}

/* Cuts the added tokens of this pass out of s, leftmost and longest first. user: the
 * marks of s, or NULL. */
static int cut(enc *e, int pass, hx_str s, const uint8_t *user)
{
    const added_set *set = &e->t->set[pass];
    size_t done = 0, at = 0;
    int rc;

    while (e->special && at < s.n) {
        const added *a = NULL;

        if (set->first[(uint8_t)s.p[at]])
            a = longest_added(set, (hx_str) { s.p + at, s.n - at },
                              user == NULL ? NULL : user + at);
        if (a == NULL) {
            at++;
            continue;
        }
        size_t begin = at, end = at += a->text.n;
        if (!fits(a, s, done, &begin, &end))
            continue;
        if (begin > done && (rc = between(e, pass, (hx_str) { s.p + done, begin - done },
                                          user == NULL ? NULL : user + done)) != 0)
            return rc;
        if ((rc = emit(e, a->id)) != 0)
            return rc;
        done = end;
    }
    return between(e, pass, (hx_str) { s.p + done, s.n - done },
                   user == NULL ? NULL : user + done);
}

/* ---- encoding -------------------------------------------------------- */

static int check_text(hx_str text, hx_err *err)
{
    uint32_t cp;
    int n;

    if (text.n > MAX_TEXT_BYTES)
        return hx_fail(err, HX_ELIMIT, "text of %zu bytes, at most %zu can be tokenized",
                       text.n, MAX_TEXT_BYTES);
    if (hx_utf8_ok(text.p, text.n))
        return 0;
    for (size_t i = 0;; i += (size_t)n)
        if ((n = hx_utf8_next(text.p + i, text.n - i, &cp)) <= 0)
            return hx_fail(err, HX_EFORMAT, "text is not UTF-8 at byte %zu", i);
}

int hx_tok_encode(const hx_tok *t, hx_str text, const hx_tok_opt *opt, hx_ids *out,
                  hx_err *err)
{
    static const hx_tok_opt none = { .special = true };
    const int64_t before = out->n;
    enc e = { .t = t, .out = out, .err = err };
    int rc;

    opt = opt == NULL ? &none : opt;
    e.special = opt->special;
    e.left = opt->max_ids > 0 ? opt->max_ids : INT64_MAX;
    if ((rc = check_text(text, err)) != 0)
        return rc;
    e.md = pcre2_match_data_create(1, t->gc);
    e.mc = pcre2_match_context_create(t->gc);
    if (e.md == NULL || e.mc == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "tokenizer: no memory for a regex match");
        goto fail;
    }
    /* A sane regex takes a few steps per byte; one that explodes must end in an error. */
    pcre2_set_match_limit(e.mc, 100000 + (uint32_t)text.n * 8);
    pcre2_set_heap_limit(e.mc, (256 << 20) / 1024);
    rc = cut(&e, 0, text, opt->user);
fail:
    pcre2_match_data_free(e.md);
    pcre2_match_context_free(e.mc);
    hx_free(e.sym);
    hx_free(e.ranks.room);
    hx_sb_free(&e.prefixed);
    nfc_free(&e.nfc);
    if (rc != 0)
        out->n = before;
    return rc;
}

/* ---- incremental UTF-8 ----------------------------------------------- */

static const char replacement[] = "\xef\xbf\xbd";

void hx_utf8_feed(hx_utf8_stream *s, hx_str bytes, hx_sb *out)
{
    uint32_t cp;

    for (size_t i = 0; i < bytes.n;) {
        s->held[s->n_held++] = bytes.p[i++];
        const int len = hx_utf8_next(s->held, (size_t)s->n_held, &cp);

        if (len < 0)
            continue;
        if (len > 0) {
            hx_sb_add(out, s->held, (size_t)s->n_held);
        } else {
            hx_sb_str(out, replacement);
            /* The byte that broke a beginning may itself begin something. */
            if (s->n_held > 1)
                i--;
        }
        s->n_held = 0;
    }
}

void hx_utf8_end(hx_utf8_stream *s, hx_sb *out)
{
    if (s->n_held > 0)
        hx_sb_str(out, replacement);
    s->n_held = 0;
}
