/* jinja_parse.c - template source to syntax tree: tokens, then recursive descent.
 *
 * Called by hx_jinja_open() only. Owns the rules of white space (trim_blocks,
 * lstrip_blocks, the signs), of precedence and of what belongs to the subset; whatever
 * does not is refused here where it can be known. Never evaluates anything. */
#include <stdlib.h>

#include "text/jinja_ast.h"

/* ---- tokens ---------------------------------------------------------- */

typedef enum {
    T_EOF,
    T_DATA,
    T_PRINT,
    T_PRINT_END,
    T_BLOCK,
    T_BLOCK_END,
    T_NAME,
    T_STRING,
    T_INT,
    T_FLOAT,
    T_ADD,
    T_SUB,
    T_MUL,
    T_DIV,
    T_FLOORDIV,
    T_MOD,
    T_POW,
    T_TILDE,
    T_EQ,
    T_NE,
    T_LT,
    T_LE,
    T_GT,
    T_GE,
    T_ASSIGN,
    T_DOT,
    T_COLON,
    T_PIPE,
    T_COMMA,
    T_SEMICOLON,
    T_LPAREN,
    T_RPAREN,
    T_LBRACKET,
    T_RBRACKET,
    T_LBRACE,
    T_RBRACE
} tkind;

typedef struct {
    tkind kind;
    int line;
    const char *p; /* spelling; STRING: its value; DATA: the text */
    size_t n;
    int64_t i;
    double d;
} token;

/* Longest first. */
static const struct {
    const char *text;
    tkind kind;
} OPERATORS[] = {
    { "//", T_FLOORDIV }, { "**", T_POW },      { "==", T_EQ },    { "!=", T_NE },
    { ">=", T_GE },       { "<=", T_LE },       { "+", T_ADD },    { "-", T_SUB },
    { "/", T_DIV },       { "*", T_MUL },       { "%", T_MOD },    { "~", T_TILDE },
    { "[", T_LBRACKET },  { "]", T_RBRACKET },  { "(", T_LPAREN }, { ")", T_RPAREN },
    { "{", T_LBRACE },    { "}", T_RBRACE },    { ">", T_GT },     { "<", T_LT },
    { "=", T_ASSIGN },    { ".", T_DOT },       { ":", T_COLON },  { "|", T_PIPE },
    { ",", T_COMMA },     { ";", T_SEMICOLON },
};

typedef struct {
    hx_jvm vm; /* memory, name, line, error; nothing of it runs */
    hx_jinja *t;
    const char *src;
    size_t n, pos, counted; /* newlines before counted are in vm.line */
    token *tok;
    size_t n_tok, cap_tok, at;
    tkind open[HX_J_NEST_MAX]; /* brackets not yet closed, as what closes them */
    int n_open;
    int nest;          /* of statements and expressions */
    int n_for;         /* loops around this place that break may leave */
    bool in_for;       /* loops at all, across macros */
    bool soft;         /* inside if: unknown filters fail only when reached */
    hx_jnode *macro;   /* innermost macro being parsed; outer ones by c */
    hx_jnode *unknown; /* filters and tests without a name, linked by c */
} parser;

#define FAIL(p, ...) hx_jvm_fail(&(p)->vm, __VA_ARGS__)

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           (c >= '0' && c <= '9');
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool looking_at(const parser *p, size_t pos, const char *s)
{
    const size_t n = strlen(s);

    return p->n - pos >= n && memcmp(p->src + pos, s, n) == 0;
}

static size_t skip_space(const parser *p, size_t pos)
{
    uint32_t cp;

    while (pos < p->n) {
        const int n = hx_utf8_next(p->src + pos, p->n - pos, &cp);
        if (n < 1 || !hx_jinja_is_space(cp))
            break;
        pos += (size_t)n;
    }
    return pos;
}

/* Drops white space from the end of src[from..to). */
static size_t strip_end(const parser *p, size_t from, size_t to)
{
    while (to > from) {
        uint32_t cp;
        size_t at = to - 1;
        while (at > from && ((uint8_t)p->src[at] & 0xc0) == 0x80)
            at--;
        if (hx_utf8_next(p->src + at, to - at, &cp) < 1 || !hx_jinja_is_space(cp))
            break;
        to = at;
    }
    return to;
}

static void count_lines(parser *p, size_t upto)
{
    for (; p->counted < upto; p->counted++)
        p->vm.line += p->src[p->counted] == '\n';
}

static int emit(parser *p, tkind kind, const char *s, size_t n, token **out)
{
    if (p->n_tok == p->cap_tok) {
        const size_t cap = p->cap_tok ? 2 * p->cap_tok : 256;
        token *t = hx_jvm_alloc(&p->vm, cap, sizeof *t);
        if (t == NULL)
            return HX_ENOMEM;
        if (p->n_tok)
            memcpy(t, p->tok, p->n_tok * sizeof *t);
        p->tok = t;
        p->cap_tok = cap;
    }
    token *t = &p->tok[p->n_tok++];
    *t = (token) { .kind = kind, .line = p->vm.line, .p = s, .n = n };
    if (out != NULL)
        *out = t;
    return 0;
}

/* Text before a tag that begins at `at`. sign is that of the tag; print tags keep the
 * indentation in front of them. */
static int emit_text(parser *p, size_t from, size_t at, char sign, bool print)
{
    size_t to = at;

    if (sign == '-') {
        to = strip_end(p, from, at);
    } else if (sign != '+' && !print) {
        size_t line = at;
        while (line > from && p->src[line - 1] != '\n')
            line--;
        const bool at_start = line > from || from == 0 || p->src[from - 1] == '\n';
        if (at_start && skip_space(p, line) >= at)
            to = line;
    }
    if (to > from) {
        count_lines(p, from);
        return emit(p, T_DATA, p->src + from, to - from, NULL);
    }
    return 0;
}

/* The end of a tag at pos: `mark` with an optional sign. Returns what follows, trimmed,
 * or 0. */
static size_t tag_end(const parser *p, size_t pos, const char *mark, bool trim)
{
    const char sign = p->src[pos];

    if ((sign == '-' || (sign == '+' && trim)) && looking_at(p, pos + 1, mark))
        return sign == '-' ? skip_space(p, pos + 3) : pos + 3;
    if (!looking_at(p, pos, mark))
        return 0;
    pos += 2;
    return trim && pos < p->n && p->src[pos] == '\n' ? pos + 1 : pos;
}

static int lex_comment(parser *p, size_t begin)
{
    p->pos = begin;
    if (begin == p->n) /* jinja2 does not mind */
        return 0;
    for (size_t i = begin; i + 1 < p->n; i++) {
        const size_t after = tag_end(p, i, "#}", true);
        if (after != 0) {
            p->pos = after;
            return 0;
        }
    }
    return FAIL(p, HX_EFORMAT, "comment is never closed; expected \"#}\"");
}

/* Behind "{%" and its sign: position behind "word %}" if that is what stands there. */
static size_t lex_word_tag(const parser *p, size_t pos, const char *word, bool trim)
{
    pos = skip_space(p, pos);
    if (!looking_at(p, pos, word))
        return 0;
    pos = skip_space(p, pos + strlen(word));
    return pos < p->n ? tag_end(p, pos, "%}", trim) : 0;
}

static char sign_at(const parser *p, size_t pos)
{
    return pos < p->n && (p->src[pos] == '-' || p->src[pos] == '+') ? p->src[pos] : 0;
}

static int lex_raw(parser *p, size_t from)
{
    p->pos = from;
    if (from == p->n)
        return 0;
    for (size_t i = from; i + 1 < p->n; i++) {
        if (!looking_at(p, i, "{%"))
            continue;
        const char sign = sign_at(p, i + 2);
        const size_t after = lex_word_tag(p, i + 2 + (sign != 0), "endraw", true);
        if (after != 0) {
            const int rc = emit_text(p, from, i, sign, false);
            p->pos = after;
            return rc;
        }
    }
    return FAIL(p, HX_EFORMAT, "raw block is never closed; expected \"{%% endraw %%}\"");
}

static int hex_digits(const char *s, size_t n, size_t want, uint32_t *out)
{
    *out = 0;
    if (n < want)
        return -1;
    for (size_t i = 0; i < want; i++) {
        const char c = s[i];
        const int v = is_digit(c)              ? c - '0'
                      : (c >= 'a' && c <= 'f') ? c - 'a' + 10
                      : (c >= 'A' && c <= 'F') ? c - 'A' + 10
                                               : -1;
        if (v < 0)
            return -1;
        *out = *out * 16 + (uint32_t)v;
    }
    return 0;
}

/* One escape of a string literal: s[0..n) stands behind the backslash. Returns how many
 * bytes of s it takes, or an error. */
static int lex_escape(parser *p, const char *s, size_t n, char *to, size_t *n_to)
{
    static const char FROM[] = "\\'\"abfnrtv", INTO[] = "\\'\"\a\b\f\n\r\t\v";
    const char *known = memchr(FROM, s[0], sizeof FROM - 1);
    uint32_t cp = 0;
    int used = 1;

    if (known != NULL) {
        to[(*n_to)++] = INTO[known - FROM];
        return 1;
    }
    if (s[0] == '\n')
        return 1;
    if (s[0] >= '0' && s[0] <= '7') {
        for (used = 0; used < 3 && (size_t)used < n && s[used] >= '0' && s[used] <= '7';
             used++)
            cp = cp * 8 + (uint32_t)(s[used] - '0');
    } else if (s[0] == 'x' || s[0] == 'u' || s[0] == 'U') {
        const size_t want = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : 8;
        if (hex_digits(s + 1, n - 1, want, &cp) != 0)
            return FAIL(p, HX_EFORMAT, "\\%c in a string needs %zu hex digits", s[0],
                        want);
        if (cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
            return FAIL(p, HX_EUNSUP, "\\%c%x in a string is no character", s[0], cp);
        used = 1 + (int)want;
    } else if (s[0] == 'N' || (uint8_t)s[0] >= 0x80) {
        return FAIL(p, HX_EUNSUP, "escape \"\\%s\" in a string",
                    s[0] == 'N' ? "N" : "(not ASCII)");
    } else {
        to[(*n_to)++] = '\\'; /* unknown escapes stay as they are */
        to[(*n_to)++] = s[0];
        return 1;
    }
    *n_to += (size_t)hx_utf8_put(cp, to + *n_to);
    return used;
}

static int lex_string(parser *p)
{
    const char quote = p->src[p->pos];
    size_t end = p->pos + 1;

    while (end < p->n && p->src[end] != quote)
        end += p->src[end] == '\\' ? 2 : 1;
    if (end >= p->n)
        return FAIL(p, HX_EFORMAT, "string is never closed; expected %c", quote);
    const char *s = p->src + p->pos + 1;
    const size_t n = end - p->pos - 1;
    /* No escape makes its text longer than twice its spelling. */
    char *to = hx_jvm_alloc(&p->vm, n + 4, 2);
    size_t n_to = 0;
    if (to == NULL)
        return HX_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        if (s[i] != '\\') {
            to[n_to++] = s[i];
            continue;
        }
        const int used = lex_escape(p, s + i + 1, n - i - 1, to, &n_to);
        if (used < 0)
            return used;
        i += (size_t)used;
    }
    const int rc = emit(p, T_STRING, to, n_to, NULL);
    p->pos = end + 1;
    return rc;
}

/* Digits with single underscores between them, copied without. */
static size_t digits(const parser *p, size_t pos, char *to, size_t *n, size_t cap)
{
    while (pos < p->n &&
           (is_digit(p->src[pos]) ||
            (p->src[pos] == '_' && pos + 1 < p->n && is_digit(p->src[pos + 1])))) {
        if (p->src[pos] != '_' && *n < cap)
            to[(*n)++] = p->src[pos];
        pos++;
    }
    return pos;
}

static int lex_based(parser *p, int base)
{
    uint64_t v = 0;
    size_t pos = p->pos + 2, seen = 0;
    token *t;
    int rc;

    for (; pos < p->n; pos++) {
        uint32_t d;
        if (p->src[pos] == '_')
            continue;
        if (hex_digits(p->src + pos, 1, 1, &d) != 0 || d >= (uint32_t)base)
            break;
        if (v > (INT64_MAX - d) / (uint64_t)base)
            return FAIL(p, HX_EUNSUP, "integer over 64 bits");
        v = v * (uint64_t)base + d;
        seen++;
    }
    if (seen == 0)
        return FAIL(p, HX_EFORMAT, "number without digits");
    if ((rc = emit(p, T_INT, p->src + p->pos, pos - p->pos, &t)) != 0)
        return rc;
    t->i = (int64_t)v;
    p->pos = pos;
    return 0;
}

static int lex_number(parser *p)
{
    char text[64];
    size_t n = 0, pos = p->pos;
    const size_t cap = sizeof text - 1;
    const char next = pos + 1 < p->n ? (char)(p->src[pos + 1] | 0x20) : 0;
    bool real = false;
    token *t;
    int rc;

    if (p->src[pos] == '0' && (next == 'x' || next == 'o' || next == 'b'))
        return lex_based(p, next == 'x' ? 16 : next == 'o' ? 8 : 2);
    pos = digits(p, pos, text, &n, cap);
    /* "m.content.0.type": digits behind a dot are an index, never the start of a float.
     */
    if (p->pos == 0 || p->src[p->pos - 1] != '.') {
        if (pos + 1 < p->n && p->src[pos] == '.' && is_digit(p->src[pos + 1])) {
            real = true;
            if (n < cap)
                text[n++] = '.';
            pos = digits(p, pos + 1, text, &n, cap);
        }
        size_t e = pos;
        if (e < p->n && (p->src[e] | 0x20) == 'e') {
            e++;
            const char sign = sign_at(p, e);
            if (e + (sign != 0) < p->n && is_digit(p->src[e + (sign != 0)])) {
                real = true;
                if (n + 1 < cap) {
                    text[n++] = 'e';
                    text[n++] = sign ? sign : '+';
                }
                pos = digits(p, e + (sign != 0), text, &n, cap);
            }
        }
    }
    if (n >= cap)
        return FAIL(p, HX_EUNSUP, "number of more than %zu characters", cap);
    text[n] = 0;
    if (!real && text[0] == '0' && strspn(text, "0") != n)
        return FAIL(p, HX_EFORMAT, "number %s starts with 0", text);
    if ((rc = emit(p, real ? T_FLOAT : T_INT, p->src + p->pos, pos - p->pos, &t)) != 0)
        return rc;
    for (size_t i = 0; !real && i < n; i++) {
        if (__builtin_mul_overflow(t->i, 10, &t->i) ||
            __builtin_add_overflow(t->i, text[i] - '0', &t->i))
            return FAIL(p, HX_EUNSUP, "integer %s is over 64 bits", text);
    }
    t->d = real ? strtod(text, NULL) : 0;
    p->pos = pos;
    return 0;
}

static int lex_operator(parser *p)
{
    for (size_t i = 0; i < HX_LEN(OPERATORS); i++) {
        const tkind k = OPERATORS[i].kind;
        if (!looking_at(p, p->pos, OPERATORS[i].text))
            continue;
        if (k == T_LPAREN || k == T_LBRACKET || k == T_LBRACE) {
            if (p->n_open == HX_J_NEST_MAX)
                return FAIL(p, HX_ELIMIT, "brackets nested over %d deep", HX_J_NEST_MAX);
            p->open[p->n_open++] = k + 1;
        } else if (k == T_RPAREN || k == T_RBRACKET || k == T_RBRACE) {
            if (p->n_open == 0 || p->open[--p->n_open] != k)
                return FAIL(p, HX_EFORMAT, "unexpected \"%s\"", OPERATORS[i].text);
        }
        const size_t n = strlen(OPERATORS[i].text);
        p->pos += n;
        return emit(p, k, p->src + p->pos - n, n, NULL);
    }
    const char c = p->src[p->pos];
    if ((uint8_t)c >= 0x80)
        return FAIL(p, HX_EUNSUP, "name or sign that is not ASCII, inside a tag");
    return FAIL(p, HX_EFORMAT, "unexpected character \"%c\" in a tag", c);
}

/* The inside of a tag, up to and with its end. */
static int lex_tag(parser *p, bool print)
{
    int rc = 0;

    p->n_open = 0;
    while (rc == 0) {
        p->pos = skip_space(p, p->pos);
        count_lines(p, HX_MIN(p->pos, p->n));
        if (p->pos >= p->n)
            return FAIL(p, HX_EFORMAT, "template ends inside a tag");
        const size_t end =
            p->n_open ? 0 : tag_end(p, p->pos, print ? "}}" : "%}", !print);
        if (end != 0) {
            rc = emit(p, print ? T_PRINT_END : T_BLOCK_END, p->src + p->pos, 2, NULL);
            p->pos = end;
            return rc;
        }
        const char c = p->src[p->pos];
        if (c == '"' || c == '\'') {
            rc = lex_string(p);
        } else if (is_digit(c)) {
            rc = lex_number(p);
        } else if (is_word(c)) {
            size_t e = p->pos;
            while (e < p->n && is_word(p->src[e]))
                e++;
            rc = emit(p, T_NAME, p->src + p->pos, e - p->pos, NULL);
            p->pos = e;
        } else {
            rc = lex_operator(p);
        }
    }
    return rc;
}

static int lex(parser *p)
{
    int rc = 0;

    while (rc == 0 && p->pos < p->n) {
        size_t at = p->pos;
        while (at < p->n && !(p->src[at] == '{' && at + 1 < p->n &&
                              memchr("%{#", p->src[at + 1], 3) != NULL))
            at++;
        if (at == p->n) {
            count_lines(p, p->pos);
            rc = emit(p, T_DATA, p->src + p->pos, at - p->pos, NULL);
            p->pos = at;
            break;
        }
        const char kind = p->src[at + 1];
        const char sign = sign_at(p, at + 2);
        const size_t inside = at + 2 + (sign != 0);
        if ((rc = emit_text(p, p->pos, at, sign, kind == '{')) != 0)
            break;
        count_lines(p, at);
        p->pos = inside;
        const size_t raw = kind == '%' ? lex_word_tag(p, inside, "raw", false) : 0;
        if (kind == '#') {
            rc = lex_comment(p, inside);
        } else if (raw != 0) {
            rc = lex_raw(p, raw);
        } else {
            rc = emit(p, kind == '{' ? T_PRINT : T_BLOCK, p->src + at, 2, NULL);
            if (rc == 0)
                rc = lex_tag(p, kind == '{');
        }
    }
    count_lines(p, p->n);
    return rc != 0 ? rc : emit(p, T_EOF, "end of template", 15, NULL);
}

/* ---- looking at tokens ----------------------------------------------- */

static const token *cur(const parser *p)
{
    return &p->tok[p->at];
}

static const token *ahead(const parser *p)
{
    return &p->tok[p->at + (p->at + 1 < p->n_tok)];
}

static void advance(parser *p)
{
    p->at += p->at + 1 < p->n_tok;
    p->vm.line = cur(p)->line;
}

static bool is(const parser *p, tkind kind)
{
    return cur(p)->kind == kind;
}

static bool token_is(const token *t, const char *word)
{
    return t->kind == T_NAME && t->n == strlen(word) && memcmp(t->p, word, t->n) == 0;
}

static bool is_name(const parser *p, const char *word)
{
    return token_is(cur(p), word);
}

static bool skip_name(parser *p, const char *word)
{
    const bool yes = is_name(p, word);

    if (yes)
        advance(p);
    return yes;
}

static bool skip(parser *p, tkind kind)
{
    const bool yes = is(p, kind);

    if (yes)
        advance(p);
    return yes;
}

static int unexpected(parser *p, const char *want)
{
    const token *t = cur(p);

    p->vm.line = t->line;
    return FAIL(p, HX_EFORMAT, "found \"%.*s\", expected %s", (int)HX_MIN(t->n, 40), t->p,
                want);
}

static int expect(parser *p, tkind kind, const char *want)
{
    if (!is(p, kind))
        return unexpected(p, want);
    advance(p);
    return 0;
}

/* ---- building nodes -------------------------------------------------- */

static int node_new(parser *p, hx_jkind kind, hx_jnode **out)
{
    hx_jnode *n = hx_jvm_alloc(&p->vm, 1, sizeof *n);

    *out = n;
    if (n == NULL)
        return HX_ENOMEM;
    n->kind = (uint8_t)kind;
    n->line = cur(p)->line;
    n->depth = 1;
    return 0;
}

/* Running the tree recurses as deep as the tree is. */
static int node_depth(parser *p, hx_jnode *n)
{
    const hx_jnode *kid[] = { n->a, n->b, n->c, n->body, n->els };

    for (size_t i = 0; i < HX_LEN(kid); i++) {
        for (const hx_jnode *k = kid[i]; k != NULL; k = k->next)
            n->depth = (uint16_t)HX_MAX(n->depth, k->depth + 1);
    }
    if (n->depth > HX_J_DEPTH_MAX / 2)
        return FAIL(p, HX_ELIMIT, "construct of more than %d steps in depth",
                    HX_J_DEPTH_MAX / 2);
    return 0;
}

static int enter(parser *p)
{
    if (++p->nest > HX_J_NEST_MAX)
        return FAIL(p, HX_ELIMIT, "nested over %d deep", HX_J_NEST_MAX);
    return 0;
}

static int symbol(parser *p, const char *s, size_t n, uint32_t *out)
{
    hx_jinja *t = p->t;

    for (uint32_t i = 0; i < t->n_sym; i++) {
        if (t->sym[i].n == n && memcmp(t->sym[i].p, s, n) == 0) {
            *out = i;
            return 0;
        }
    }
    if (t->n_sym == 4096)
        return FAIL(p, HX_ELIMIT, "more than 4096 different names");
    if (t->n_sym == t->cap_sym) {
        const uint32_t cap = t->cap_sym ? 2 * t->cap_sym : 64;
        hx_str *sym = hx_jvm_alloc(&p->vm, cap, sizeof *sym);
        if (sym == NULL)
            return HX_ENOMEM;
        if (t->n_sym)
            memcpy(sym, t->sym, t->n_sym * sizeof *sym);
        t->sym = sym;
        t->cap_sym = cap;
    }
    t->sym[t->n_sym] = (hx_str) { s, n };
    *out = t->n_sym++;
    return 0;
}

static int name_node(parser *p, hx_jkind kind, const token *t, hx_jnode **out)
{
    const int rc = node_new(p, kind, out);

    return rc != 0 ? rc : symbol(p, t->p, t->n, &(*out)->sym);
}

static int parse_expr(parser *p, bool cond, hx_jnode **out);
static int parse_tuple(parser *p, bool cond, bool parens, hx_jnode **out);
static int parse_unary(parser *p, bool filters, hx_jnode **out);
static int parse_body(parser *p, const char *const *ends, hx_jnode **out);

/* ---- expressions ----------------------------------------------------- */

/* Names with a meaning of their own that the subset leaves out. */
static int check_name(parser *p, const token *t)
{
    static const char *const REFUSED[] = { "self", "super", "varargs", "kwargs" };

    for (size_t i = 0; i < HX_LEN(REFUSED); i++) {
        if (token_is(t, REFUSED[i]))
            return FAIL(p, HX_EUNSUP, "the special name \"%s\"", REFUSED[i]);
    }
    if (token_is(t, "caller")) {
        for (hx_jnode *m = p->macro; m != NULL; m = m->c)
            m->flag = true;
    }
    return 0;
}

static int parse_name(parser *p, hx_jnode **out)
{
    static const struct {
        const char *text;
        int value;
    } CONST[] = {
        { "true", 1 },  { "True", 1 },  { "false", 0 },
        { "False", 0 }, { "none", -1 }, { "None", -1 },
    };
    const token *t = cur(p);
    int rc;

    for (size_t i = 0; i < HX_LEN(CONST); i++) {
        if (!token_is(t, CONST[i].text))
            continue;
        if ((rc = node_new(p, HX_N_CONST, out)) != 0)
            return rc;
        (*out)->val = CONST[i].value < 0 ? hx_jnone() : hx_jbool(CONST[i].value == 1);
        advance(p);
        return 0;
    }
    if ((rc = check_name(p, t)) != 0 || (rc = name_node(p, HX_N_NAME, t, out)) != 0)
        return rc;
    advance(p);
    return 0;
}

static int parse_string(parser *p, hx_jnode **out)
{
    const token *t = cur(p);
    size_t n = 0, k = p->at;
    int rc = node_new(p, HX_N_CONST, out);
    char *s;

    for (; rc == 0 && p->tok[k].kind == T_STRING; k++)
        n += p->tok[k].n;
    if (rc != 0)
        return rc;
    if (k == p->at + 1) {
        rc = hx_jstr_new(&p->vm, t->p, t->n, false, &(*out)->val);
    } else {
        if ((s = hx_jvm_alloc(&p->vm, n + 1, 1)) == NULL)
            return HX_ENOMEM;
        n = 0;
        for (size_t i = p->at; i < k; n += p->tok[i++].n)
            memcpy(s + n, p->tok[i].p, p->tok[i].n);
        rc = hx_jstr_new(&p->vm, s, n, false, &(*out)->val);
    }
    while (is(p, T_STRING))
        advance(p);
    return rc;
}

/* Items up to close, which is not consumed; dict: "key: value" pairs. */
static int parse_items(parser *p, tkind close, hx_jnode *n)
{
    const bool dict = n->kind == HX_N_DICT;
    hx_jnode **link = &n->a;
    int rc = 0;

    while (rc == 0 && !is(p, close)) {
        if (n->n > 0 && (rc = expect(p, T_COMMA, "a comma")) != 0)
            break;
        if (is(p, close))
            break;
        if ((rc = parse_expr(p, true, link)) != 0)
            break;
        link = &(*link)->next;
        n->n++;
        if (dict) {
            if ((rc = expect(p, T_COLON, "\":\"")) != 0 ||
                (rc = parse_expr(p, true, link)) != 0)
                break;
            link = &(*link)->next;
        }
    }
    return rc != 0 ? rc : node_depth(p, n);
}

static int parse_primary(parser *p, hx_jnode **out)
{
    const token *t = cur(p);
    int rc;

    if ((rc = enter(p)) != 0)
        return rc;
    switch (t->kind) {
    case T_NAME:
        rc = parse_name(p, out);
        break;
    case T_STRING:
        rc = parse_string(p, out);
        break;
    case T_INT:
    case T_FLOAT:
        if ((rc = node_new(p, HX_N_CONST, out)) == 0)
            (*out)->val = t->kind == T_INT ? hx_jint(t->i) : hx_jfloat(t->d);
        advance(p);
        break;
    case T_LPAREN:
        advance(p);
        if ((rc = parse_tuple(p, true, true, out)) == 0)
            rc = expect(p, T_RPAREN, "\")\"");
        break;
    case T_LBRACKET:
    case T_LBRACE:
        if ((rc = node_new(p, t->kind == T_LBRACE ? HX_N_DICT : HX_N_LIST, out)) != 0)
            break;
        advance(p);
        if ((rc = parse_items(p, t->kind + 1, *out)) == 0)
            advance(p);
        break;
    default:
        rc = unexpected(p, "an expression");
    }
    p->nest--;
    return rc;
}

/* Wraps *out, which becomes the child a. */
static int wrap(parser *p, hx_jkind kind, hx_jnode **out)
{
    hx_jnode *n;
    const int rc = node_new(p, kind, &n);

    if (rc != 0)
        return rc;
    n->a = *out;
    *out = n;
    return 0;
}

static int parse_args(parser *p, hx_jnode **link)
{
    bool first = true, keywords = false;
    int rc;

    if ((rc = expect(p, T_LPAREN, "\"(\"")) != 0)
        return rc;
    while (!is(p, T_RPAREN)) {
        if (!first && (rc = expect(p, T_COMMA, "a comma")) != 0)
            return rc;
        first = false;
        if (is(p, T_RPAREN))
            break;
        if (is(p, T_MUL) || is(p, T_POW))
            return FAIL(p, HX_EUNSUP, "\"*\" and \"**\" arguments");
        if (is(p, T_NAME) && ahead(p)->kind == T_ASSIGN) {
            const token *t = cur(p);
            keywords = true;
            if ((rc = node_new(p, HX_N_KEYWORD, link)) != 0 ||
                (rc = hx_jstr_new(&p->vm, t->p, t->n, false, &(*link)->val)) != 0)
                return rc;
            advance(p);
            advance(p);
            if ((rc = parse_expr(p, true, &(*link)->a)) != 0 ||
                (rc = node_depth(p, *link)) != 0)
                return rc;
        } else if (keywords) {
            return unexpected(p, "a keyword argument");
        } else if ((rc = parse_expr(p, true, link)) != 0) {
            return rc;
        }
        link = &(*link)->next;
    }
    advance(p);
    return 0;
}

/* obj[...]: an index, or start:stop:step. */
static int parse_subscript(parser *p, hx_jnode **out)
{
    hx_jnode *s, **part[3];
    int rc, k = 0;

    advance(p);
    if ((rc = wrap(p, HX_N_ITEM, out)) != 0 || (rc = node_new(p, HX_N_SLICE3, &s)) != 0)
        return rc;
    part[0] = &s->a, part[1] = &s->b, part[2] = &s->c;
    while (!is(p, T_RBRACKET)) {
        if (is(p, T_COMMA))
            return FAIL(p, HX_EUNSUP, "more than one index in [ ]");
        if (is(p, T_COLON) && k < 2) {
            advance(p);
            (*out)->kind = HX_N_SLICE;
            k++;
        } else if (is(p, T_COLON) || *part[k] != NULL) {
            return unexpected(p, "\"]\"");
        } else if ((rc = parse_expr(p, true, part[k])) != 0) {
            return rc;
        }
    }
    advance(p);
    if ((*out)->kind == HX_N_ITEM && s->a == NULL)
        return FAIL(p, HX_EUNSUP, "empty [ ]");
    if ((rc = node_depth(p, s)) != 0)
        return rc;
    (*out)->b = (*out)->kind == HX_N_SLICE ? s : s->a;
    return node_depth(p, *out);
}

static int parse_call(parser *p, hx_jnode **out)
{
    int rc = wrap(p, HX_N_CALL, out);

    if (rc != 0 || (rc = parse_args(p, &(*out)->b)) != 0)
        return rc;
    const hx_jnode *f = (*out)->a;
    if (f->kind == HX_N_NAME) {
        const hx_jbuiltin *fn = hx_jcall_global(p->t->sym[f->sym]);
        if (fn != NULL && fn->fn == NULL)
            return FAIL(p, HX_EUNSUP, "function \"%s\": %s", fn->name, fn->params);
    }
    return node_depth(p, *out);
}

static int parse_postfix(parser *p, hx_jnode **out)
{
    int rc = 0;

    while (rc == 0) {
        if (is(p, T_LBRACKET)) {
            rc = parse_subscript(p, out);
        } else if (is(p, T_LPAREN)) {
            rc = parse_call(p, out);
        } else if (is(p, T_DOT)) {
            advance(p);
            const token *t = cur(p);
            if (t->kind == T_NAME) {
                if ((rc = wrap(p, HX_N_ATTR, out)) == 0)
                    rc = hx_jstr_new(&p->vm, t->p, t->n, false, &(*out)->val);
            } else if (t->kind == T_INT) {
                if ((rc = wrap(p, HX_N_ITEM, out)) == 0 &&
                    (rc = node_new(p, HX_N_CONST, &(*out)->b)) == 0)
                    (*out)->b->val = hx_jint(t->i);
            } else {
                rc = unexpected(p, "a name or number after \".\"");
            }
            if (rc == 0) {
                advance(p);
                rc = node_depth(p, *out);
            }
        } else {
            break;
        }
    }
    return rc;
}

/* Filters and tests are found by name here. jinja2 lets unknown ones stand in the
 * branches of an if; whether a conditional expression is around is known only later: see
 * lenient(). c, no child here, links the unknown ones. */
static int resolve(parser *p, hx_jnode *n, const token *t, bool test)
{
    const hx_str name = { t->p, t->n };
    const int rc = hx_jstr_new(&p->vm, t->p, t->n, false, &n->val);

    n->fn = test ? hx_jcall_test(name) : hx_jcall_filter(name);
    if (n->fn == NULL) {
        n->flag = p->soft;
        n->c = p->unknown;
        p->unknown = n;
    }
    return rc;
}

static void lenient(parser *p, const hx_jnode *upto)
{
    for (hx_jnode *n = p->unknown; n != upto; n = n->c)
        n->flag = true;
}

static int check_unknown(parser *p)
{
    for (hx_jnode *n = p->unknown; n != NULL;) {
        hx_jnode *next = n->c;
        n->c = NULL;
        if (!n->flag) {
            p->vm.line = n->line;
            return FAIL(p, HX_EUNSUP, "%s \"%.*s\" is not known",
                        n->kind == HX_N_TEST ? "test" : "filter",
                        (int)HX_MIN(n->val.u.s->n, 60), n->val.u.s->p);
        }
        n = next;
    }
    return 0;
}

/* Behind the "|". */
static int parse_filter(parser *p, hx_jnode **out)
{
    const token *t = cur(p);
    int rc;

    if (t->kind != T_NAME)
        return unexpected(p, "the name of a filter");
    if ((rc = wrap(p, HX_N_FILTER, out)) != 0)
        return rc;
    advance(p);
    if (is(p, T_LPAREN) && (rc = parse_args(p, &(*out)->b)) != 0)
        return rc;
    if ((rc = node_depth(p, *out)) != 0)
        return rc;
    return resolve(p, *out, t, false);
}

/* Behind "is". */
static int parse_test(parser *p, hx_jnode **out)
{
    const bool negated = skip_name(p, "not");
    const token *t = cur(p);
    int rc;

    if (t->kind != T_NAME)
        return unexpected(p, "the name of a test");
    if ((rc = wrap(p, HX_N_TEST, out)) != 0)
        return rc;
    advance(p);
    const tkind k = cur(p)->kind;
    if (is_name(p, "is"))
        return unexpected(p, "no second test");
    if (k == T_LPAREN)
        rc = parse_args(p, &(*out)->b);
    else if (k == T_STRING || k == T_INT || k == T_FLOAT || k == T_LBRACKET ||
             k == T_LBRACE ||
             (k == T_NAME && !is_name(p, "else") && !is_name(p, "or") &&
              !is_name(p, "and")))
        if ((rc = parse_primary(p, &(*out)->b)) == 0)
            rc = parse_postfix(p, &(*out)->b);
    if (rc != 0 || (rc = node_depth(p, *out)) != 0)
        return rc;
    rc = resolve(p, *out, t, true);
    if (rc == 0 && negated && (rc = wrap(p, HX_N_NOT, out)) == 0)
        rc = node_depth(p, *out);
    return rc;
}

static int parse_unary(parser *p, bool filters, hx_jnode **out)
{
    int rc;

    if ((rc = enter(p)) != 0)
        return rc;
    if (is(p, T_SUB) || is(p, T_ADD)) {
        if ((rc = node_new(p, is(p, T_SUB) ? HX_N_NEG : HX_N_POS, out)) != 0)
            return rc;
        advance(p);
        if ((rc = parse_unary(p, false, &(*out)->a)) == 0)
            rc = node_depth(p, *out);
    } else {
        rc = parse_primary(p, out);
    }
    if (rc == 0)
        rc = parse_postfix(p, out);
    while (rc == 0 && filters) {
        if (skip(p, T_PIPE))
            rc = parse_filter(p, out);
        else if (skip_name(p, "is"))
            rc = parse_test(p, out);
        else if (is(p, T_LPAREN))
            rc = parse_call(p, out);
        else
            break;
    }
    p->nest--;
    return rc;
}

/* Binary operators, loosest level first. */
static const struct {
    tkind kind;
    hx_jop op;
    int level;
} BINARY[] = {
    { T_ADD, HX_OP_ADD, 0 }, { T_SUB, HX_OP_SUB, 0 }, { T_TILDE, HX_OP_CAT, 1 },
    { T_MUL, HX_OP_MUL, 2 }, { T_DIV, HX_OP_DIV, 2 }, { T_FLOORDIV, HX_OP_FLOORDIV, 2 },
    { T_MOD, HX_OP_MOD, 2 }, { T_POW, HX_OP_POW, 3 },
};

static int parse_binary(parser *p, int level, hx_jnode **out)
{
    int rc = level < 3 ? parse_binary(p, level + 1, out) : parse_unary(p, true, out);

    while (rc == 0) {
        size_t i = 0;
        while (i < HX_LEN(BINARY) && !(BINARY[i].level == level && is(p, BINARY[i].kind)))
            i++;
        if (i == HX_LEN(BINARY) || (rc = wrap(p, HX_N_BIN, out)) != 0)
            break;
        (*out)->op = (uint8_t)BINARY[i].op;
        advance(p);
        rc = level < 3 ? parse_binary(p, level + 1, &(*out)->b)
                       : parse_unary(p, true, &(*out)->b);
        if (rc == 0)
            rc = node_depth(p, *out);
    }
    return rc;
}

static bool compare_op(parser *p, hx_jop *op)
{
    static const struct {
        tkind kind;
        hx_jop op;
    } COMPARE[] = {
        { T_EQ, HX_OP_EQ }, { T_NE, HX_OP_NE }, { T_LT, HX_OP_LT },
        { T_LE, HX_OP_LE }, { T_GT, HX_OP_GT }, { T_GE, HX_OP_GE },
    };

    for (size_t i = 0; i < HX_LEN(COMPARE); i++) {
        *op = COMPARE[i].op;
        if (skip(p, COMPARE[i].kind))
            return true;
    }
    *op = HX_OP_IN;
    if (skip_name(p, "in"))
        return true;
    *op = HX_OP_NOT_IN;
    if (!is_name(p, "not") || !token_is(ahead(p), "in"))
        return false;
    advance(p);
    advance(p);
    return true;
}

static int parse_compare(parser *p, hx_jnode **out)
{
    int rc = parse_binary(p, 0, out);
    hx_jnode **link = NULL;
    hx_jop op;

    while (rc == 0 && compare_op(p, &op)) {
        if (link == NULL) {
            if ((rc = wrap(p, HX_N_COMPARE, out)) != 0)
                break;
            link = &(*out)->b;
        }
        if ((rc = node_new(p, HX_N_OPERAND, link)) != 0)
            break;
        (*link)->op = (uint8_t)op;
        if ((rc = parse_binary(p, 0, &(*link)->a)) != 0 ||
            (rc = node_depth(p, *link)) != 0)
            break;
        link = &(*link)->next;
    }
    return rc != 0 || link == NULL ? rc : node_depth(p, *out);
}

static int parse_not(parser *p, hx_jnode **out)
{
    int rc;

    if (!is_name(p, "not"))
        return parse_compare(p, out);
    if ((rc = enter(p)) != 0 || (rc = node_new(p, HX_N_NOT, out)) != 0)
        return rc;
    advance(p);
    if ((rc = parse_not(p, &(*out)->a)) == 0)
        rc = node_depth(p, *out);
    p->nest--;
    return rc;
}

static int parse_and(parser *p, hx_jnode **out)
{
    int rc = parse_not(p, out);

    while (rc == 0 && skip_name(p, "and")) {
        if ((rc = wrap(p, HX_N_AND, out)) == 0 && (rc = parse_not(p, &(*out)->b)) == 0)
            rc = node_depth(p, *out);
    }
    return rc;
}

static int parse_or(parser *p, hx_jnode **out)
{
    int rc = parse_and(p, out);

    while (rc == 0 && skip_name(p, "or")) {
        if ((rc = wrap(p, HX_N_OR, out)) == 0 && (rc = parse_and(p, &(*out)->b)) == 0)
            rc = node_depth(p, *out);
    }
    return rc;
}

static int parse_expr(parser *p, bool cond, hx_jnode **out)
{
    const hx_jnode *upto = p->unknown;
    int rc;

    *out = NULL;
    if ((rc = enter(p)) != 0)
        return rc;
    rc = parse_or(p, out);
    while (rc == 0 && cond && skip_name(p, "if")) {
        if ((rc = wrap(p, HX_N_COND, out)) != 0 || (rc = parse_or(p, &(*out)->b)) != 0)
            break;
        if (skip_name(p, "else"))
            rc = parse_expr(p, true, &(*out)->c);
        if (rc == 0)
            rc = node_depth(p, *out);
        lenient(p, upto);
    }
    p->nest--;
    return rc;
}

/* One expression, or several with commas: a tuple. */
static int parse_tuple(parser *p, bool cond, bool parens, hx_jnode **out)
{
    hx_jnode *t, **link;
    bool comma = false;
    int rc;

    *out = NULL;
    if ((rc = node_new(p, HX_N_TUPLE, &t)) != 0)
        return rc;
    link = &t->a;
    for (;;) {
        if (is(p, T_PRINT_END) || is(p, T_BLOCK_END) || is(p, T_RPAREN))
            break;
        if ((rc = parse_expr(p, cond, link)) != 0)
            return rc;
        link = &(*link)->next;
        t->n++;
        if (!is(p, T_COMMA))
            break;
        comma = true;
        advance(p);
    }
    if (!comma && t->n == 1) {
        *out = t->a;
        return 0;
    }
    if (!comma && !parens)
        return unexpected(p, "an expression");
    *out = t;
    return node_depth(p, t);
}

/* ---- statements ------------------------------------------------------ */

static int parse_target_name(parser *p, hx_jnode **out)
{
    static const char *const CONST[] = {
        "true", "True", "false", "False", "none", "None"
    };
    const token *t = cur(p);
    int rc;

    if (t->kind != T_NAME)
        return unexpected(p, "a name to assign to");
    for (size_t i = 0; i < HX_LEN(CONST); i++) {
        if (token_is(t, CONST[i]))
            return unexpected(p, "a name to assign to");
    }
    if (p->in_for && token_is(t, "loop"))
        return FAIL(p, HX_EFORMAT, "\"loop\" cannot be assigned inside a for block");
    if ((rc = name_node(p, HX_N_NAME, t, out)) == 0)
        advance(p);
    return rc;
}

/* Names, or tuples of targets, up to a token that cannot go on. */
static int parse_target(parser *p, bool parens, hx_jnode **out)
{
    hx_jnode *t, **link;
    bool comma = false;
    int rc;

    if ((rc = enter(p)) != 0 || (rc = node_new(p, HX_N_TUPLE, &t)) != 0)
        return rc;
    link = &t->a;
    for (;;) {
        if (parens ? is(p, T_RPAREN) : is_name(p, "in") || is(p, T_ASSIGN))
            break;
        if (skip(p, T_LPAREN)) {
            if ((rc = parse_target(p, true, link)) == 0)
                rc = expect(p, T_RPAREN, "\")\"");
        } else {
            rc = parse_target_name(p, link);
        }
        if (rc != 0)
            return rc;
        link = &(*link)->next;
        t->n++;
        if (!skip(p, T_COMMA))
            break;
        comma = true;
    }
    if (t->n == 0)
        return unexpected(p, "a name to assign to");
    p->nest--;
    *out = comma ? t : t->a;
    return comma ? node_depth(p, t) : 0;
}

/* The rest of a tag, then statements up to one of ends (not consumed). A body that has
 * its own scope makes unknown filters an error again, as jinja2 does. */
static int parse_block(parser *p, const char *const *ends, bool scope, hx_jnode **out)
{
    const bool soft = p->soft;
    int rc;

    skip(p, T_COLON);
    if ((rc = expect(p, T_BLOCK_END, "the end of the tag")) != 0)
        return rc;
    if (scope)
        p->soft = false;
    rc = parse_body(p, ends, out);
    p->soft = soft;
    return rc;
}

static int parse_if(parser *p, hx_jnode **out)
{
    static const char *const ENDS[] = { "elif", "else", "endif", NULL };
    static const char *const LAST[] = { "endif", NULL };
    const bool soft = p->soft;
    hx_jnode *first = NULL, **link = out;
    int rc = 0;

    p->soft = true;
    do {
        if ((rc = node_new(p, HX_N_IF, link)) != 0)
            return rc;
        first = first ? first : *link;
        advance(p);
        if ((rc = parse_tuple(p, false, false, &(*link)->a)) != 0 ||
            (rc = parse_block(p, ENDS, false, &(*link)->body)) != 0 ||
            (rc = node_depth(p, *link)) != 0)
            return rc;
        first->depth = HX_MAX(first->depth, (*link)->depth);
        link = &(*link)->els;
    } while (is_name(p, "elif"));
    if (skip_name(p, "else")) {
        if ((rc = parse_block(p, LAST, false, link)) != 0)
            return rc;
        for (const hx_jnode *n = *link; n != NULL; n = n->next)
            first->depth = (uint16_t)HX_MAX(first->depth, n->depth + 1);
    }
    p->soft = soft;
    advance(p);
    return 0;
}

static int parse_for(parser *p, hx_jnode *n)
{
    static const char *const ENDS[] = { "else", "endfor", NULL };
    static const char *const LAST[] = { "endfor", NULL };
    const bool in_for = p->in_for;
    int rc;

    p->in_for = true;
    if ((rc = parse_target(p, false, &n->a)) != 0)
        return rc;
    if (!skip_name(p, "in"))
        return unexpected(p, "\"in\"");
    if ((rc = parse_tuple(p, false, false, &n->b)) != 0)
        return rc;
    if (skip_name(p, "if") && (rc = parse_expr(p, true, &n->c)) != 0)
        return rc;
    if (is_name(p, "recursive"))
        return FAIL(p, HX_EUNSUP, "recursive loops");
    p->n_for++;
    rc = parse_block(p, ENDS, true, &n->body);
    p->n_for--;
    if (rc == 0 && skip_name(p, "else"))
        rc = parse_block(p, LAST, true, &n->els);
    p->in_for = in_for;
    if (rc == 0)
        advance(p);
    return rc;
}

/* Filters of a block: applied to BODY. */
static int parse_block_filters(parser *p, hx_jnode **out)
{
    int rc = node_new(p, HX_N_BODY, out);

    while (rc == 0 && skip(p, T_PIPE))
        rc = parse_filter(p, out);
    return rc;
}

static int parse_set(parser *p, hx_jnode *n)
{
    static const char *const ENDS[] = { "endset", NULL };
    int rc;

    if (is(p, T_NAME) && ahead(p)->kind == T_DOT) {
        if ((rc = name_node(p, HX_N_NS_TARGET, cur(p), &n->a)) != 0)
            return rc;
        advance(p);
        advance(p);
        const token *t = cur(p);
        if (t->kind != T_NAME)
            return unexpected(p, "a name after \".\"");
        if ((rc = hx_jstr_new(&p->vm, t->p, t->n, false, &n->a->val)) != 0)
            return rc;
        advance(p);
    } else if ((rc = parse_target(p, false, &n->a)) != 0) {
        return rc;
    }
    if (skip(p, T_ASSIGN))
        return parse_tuple(p, true, false, &n->b);
    n->kind = HX_N_SET_BLOCK;
    if ((rc = parse_block_filters(p, &n->b)) != 0 ||
        (rc = parse_block(p, ENDS, true, &n->body)) != 0)
        return rc;
    advance(p);
    return 0;
}

static int parse_params(parser *p, hx_jnode *n)
{
    hx_jnode **link = &n->a;
    bool defaults = false;
    int rc;

    if ((rc = expect(p, T_LPAREN, "\"(\"")) != 0)
        return rc;
    while (!is(p, T_RPAREN)) {
        if (n->n > 0 && (rc = expect(p, T_COMMA, "a comma")) != 0)
            return rc;
        const token *t = cur(p);
        if (t->kind != T_NAME)
            return unexpected(p, "the name of a parameter");
        if (token_is(t, "caller") || token_is(t, "varargs") || token_is(t, "kwargs"))
            return FAIL(p, HX_EUNSUP, "a parameter named \"%.*s\"", (int)t->n, t->p);
        if ((rc = name_node(p, HX_N_NAME, t, link)) != 0 ||
            (rc = hx_jstr_new(&p->vm, t->p, t->n, false, &(*link)->val)) != 0)
            return rc;
        advance(p);
        if (skip(p, T_ASSIGN)) {
            defaults = true;
            if ((rc = parse_expr(p, true, &(*link)->a)) != 0)
                return rc;
        } else if (defaults) {
            return FAIL(p, HX_EFORMAT,
                        "parameter without default after one with a default");
        }
        link = &(*link)->next;
        n->n++;
    }
    advance(p);
    return 0;
}

/* The body of a macro, call or generation block: break does not reach through it. */
static int parse_macro_body(parser *p, const char *end, hx_jnode *n)
{
    const char *const ends[] = { end, NULL };
    const int n_for = p->n_for;
    int rc;

    p->n_for = 0;
    n->c = p->macro;
    p->macro = n;
    rc = parse_block(p, ends, true, &n->body);
    p->macro = n->c;
    n->c = NULL;
    p->n_for = n_for;
    if (rc == 0)
        advance(p);
    return rc;
}

static int parse_macro(parser *p, hx_jnode *n)
{
    const token *t = cur(p);
    hx_jnode *name;
    int rc;

    if ((rc = parse_target_name(p, &name)) != 0 ||
        (rc = hx_jstr_new(&p->vm, t->p, t->n, false, &n->val)) != 0)
        return rc;
    n->sym = name->sym;
    if ((rc = parse_params(p, n)) != 0)
        return rc;
    return parse_macro_body(p, "endmacro", n);
}

static int parse_call_block(parser *p, hx_jnode *n)
{
    int rc;

    if (is(p, T_LPAREN) && (rc = parse_params(p, n)) != 0)
        return rc;
    if ((rc = parse_expr(p, true, &n->b)) != 0)
        return rc;
    if (n->b->kind != HX_N_CALL)
        return FAIL(p, HX_EFORMAT, "call block: expected the call of a macro");
    return parse_macro_body(p, "endcall", n);
}

static int parse_filter_block(parser *p, hx_jnode *n)
{
    static const char *const ENDS[] = { "endfilter", NULL };
    int rc;

    if ((rc = node_new(p, HX_N_BODY, &n->a)) != 0 || (rc = parse_filter(p, &n->a)) != 0)
        return rc;
    while (skip(p, T_PIPE)) {
        if ((rc = parse_filter(p, &n->a)) != 0)
            return rc;
    }
    if ((rc = parse_block(p, ENDS, true, &n->body)) == 0)
        advance(p);
    return rc;
}

static int parse_with(parser *p, hx_jnode *n)
{
    static const char *const ENDS[] = { "endwith", NULL };
    hx_jnode **target = &n->a, **value = &n->b;
    int rc;

    while (!is(p, T_BLOCK_END)) {
        if (n->a != NULL && (rc = expect(p, T_COMMA, "a comma")) != 0)
            return rc;
        if ((rc = parse_target_name(p, target)) != 0 ||
            (rc = expect(p, T_ASSIGN, "\"=\"")) != 0 ||
            (rc = parse_expr(p, true, value)) != 0)
            return rc;
        target = &(*target)->next;
        value = &(*value)->next;
    }
    if ((rc = parse_block(p, ENDS, true, &n->body)) == 0)
        advance(p);
    return rc;
}

static int parse_generation(parser *p, hx_jnode *n)
{
    return parse_macro_body(p, "endgeneration", n);
}

static int parse_leave(parser *p, hx_jnode *n)
{
    if (p->n_for == 0)
        return FAIL(p, HX_EFORMAT, "\"%s\" outside a loop",
                    n->kind == HX_N_BREAK ? "break" : "continue");
    return 0;
}

/* parse reads what follows the word, including the end tag but not its "%}". */
static const struct {
    const char *word;
    hx_jkind kind;
    int (*parse)(parser *p, hx_jnode *n);
} TAGS[] = {
    { "for", HX_N_FOR, parse_for },
    { "set", HX_N_SET, parse_set },
    { "macro", HX_N_MACRO, parse_macro },
    { "call", HX_N_CALL_BLOCK, parse_call_block },
    { "filter", HX_N_FILTER_BLOCK, parse_filter_block },
    { "with", HX_N_WITH, parse_with },
    { "generation", HX_N_SCOPE, parse_generation },
    { "break", HX_N_BREAK, parse_leave },
    { "continue", HX_N_CONTINUE, parse_leave },
};

static const char *const REFUSED_TAGS[] = {
    "extends",    "block", "include", "import", "from",
    "autoescape", "print", "do",      "trans",  "debug",
};

static int parse_statement(parser *p, hx_jnode **out)
{
    const token *t = cur(p);
    int rc;

    if (t->kind != T_NAME)
        return unexpected(p, "the name of a tag");
    if (is_name(p, "if"))
        return parse_if(p, out);
    for (size_t i = 0; i < HX_LEN(TAGS); i++) {
        if (!is_name(p, TAGS[i].word))
            continue;
        if ((rc = node_new(p, TAGS[i].kind, out)) != 0)
            return rc;
        advance(p);
        rc = TAGS[i].parse(p, *out);
        return rc != 0 ? rc : node_depth(p, *out);
    }
    for (size_t i = 0; i < HX_LEN(REFUSED_TAGS); i++) {
        if (is_name(p, REFUSED_TAGS[i]))
            return FAIL(p, HX_EUNSUP, "the tag \"%s\"", REFUSED_TAGS[i]);
    }
    return FAIL(p, HX_EFORMAT, "unknown or misplaced tag \"%.*s\"", (int)HX_MIN(t->n, 40),
                t->p);
}

static bool ends_here(const parser *p, const char *const *ends)
{
    for (; ends != NULL && *ends != NULL; ends++) {
        if (is_name(p, *ends))
            return true;
    }
    return false;
}

/* Statements up to one of ends, which becomes the current token; NULL: up to the end. */
static int parse_body(parser *p, const char *const *ends, hx_jnode **link)
{
    int rc;

    if ((rc = enter(p)) != 0)
        return rc;
    while (!is(p, T_EOF)) {
        const token *t = cur(p);
        if (t->kind == T_DATA) {
            if ((rc = node_new(p, HX_N_TEXT, link)) != 0 ||
                (rc = hx_jstr_new(&p->vm, t->p, t->n, false, &(*link)->val)) != 0)
                return rc;
            advance(p);
        } else if (t->kind == T_PRINT) {
            advance(p);
            if ((rc = node_new(p, HX_N_PRINT, link)) != 0 ||
                (rc = parse_tuple(p, true, false, &(*link)->a)) != 0 ||
                (rc = expect(p, T_PRINT_END, "\"}}\"")) != 0 ||
                (rc = node_depth(p, *link)) != 0)
                return rc;
        } else {
            advance(p);
            if (ends_here(p, ends)) {
                p->nest--;
                return 0;
            }
            if ((rc = parse_statement(p, link)) != 0 ||
                (rc = expect(p, T_BLOCK_END, "the end of the tag")) != 0)
                return rc;
        }
        link = &(*link)->next;
    }
    p->nest--;
    if (ends == NULL)
        return 0;
    while (ends[1] != NULL)
        ends++;
    return FAIL(p, HX_EFORMAT, "template ends; expected \"{%% %s %%}\"", *ends);
}

/* Line ends become "\n"; one at the very end goes. */
static char *normalise(parser *p, hx_str source)
{
    char *s = hx_jvm_alloc(&p->vm, source.n + 1, 1);
    size_t n = 0;

    for (size_t i = 0; s != NULL && i < source.n; i++) {
        if (source.p[i] == '\r') {
            s[n++] = '\n';
            i += i + 1 < source.n && source.p[i + 1] == '\n';
        } else {
            s[n++] = source.p[i];
        }
    }
    if (n > 0 && s[n - 1] == '\n')
        n--;
    p->n = n;
    return s;
}

int hx_jinja_parse(hx_jinja *t, hx_str source, hx_err *err)
{
    parser p = { .vm = { .mem = &t->mem, .err = err, .name = t->name, .line = 1 },
                 .t = t };
    int rc;

    if (source.n > HX_J_SOURCE_MAX)
        return FAIL(&p, HX_ELIMIT, "template has %zu bytes, at most %zu are read",
                    source.n, HX_J_SOURCE_MAX);
    if (!hx_utf8_ok(source.p, source.n))
        return FAIL(&p, HX_EFORMAT, "template is not UTF-8");
    if ((p.src = normalise(&p, source)) == NULL)
        return HX_ENOMEM;
    if ((rc = lex(&p)) != 0)
        return rc;
    static const char *const SYM[] = {
        [HX_J_SYM_LOOP] = "loop", [HX_J_SYM_CALLER] = "caller"
    };
    for (uint32_t i = 0, id; i < HX_LEN(SYM); i++) {
        if ((rc = symbol(&p, SYM[i], strlen(SYM[i]), &id)) != 0)
            return rc;
        hx_assert(id == i);
    }
    p.vm.line = p.tok[0].line;
    if ((rc = parse_body(&p, NULL, &t->body)) != 0)
        return rc;
    return check_unknown(&p);
}
