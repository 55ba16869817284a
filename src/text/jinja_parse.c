/* jinja_parse.c - template source to syntax tree: tokens, then recursive descent.
 *
 * Called by hx_jinja_open() only. Owns the rules of white space (trim_blocks,
 * lstrip_blocks, the signs), of precedence and of what belongs to the subset; whatever
 * does not is refused here where it can be known. Never evaluates anything.
 *
 * The first error sticks in vm.rc and moves the parser to the last token; nodes are never
 * NULL, so only loops have to look. */
#include <stdlib.h>

#include "text/jinja_ast.h"

/* ---- tokens ---------------------------------------------------------- */

typedef enum { T_DATA, T_NAME, T_STRING, T_NUMBER, T_SIGN, T_EOF } tkind;

typedef struct {
    tkind kind;
    int line;
    const char *p; /* spelling; STRING: its value; DATA: the text */
    size_t n;
    hx_jval val;
} token;

typedef struct {
    hx_jvm vm; /* memory, name, line, error; nothing of it runs */
    hx_jinja *t;
    const char *src;
    size_t n, pos, counted; /* newlines before counted are in vm.line */
    token *tok;
    size_t n_tok, cap_tok, at;
    token end;                /* stands for tokens there is no memory for */
    char open[HX_J_NEST_MAX]; /* brackets not yet closed, as what closes them */
    int n_open;
    int nest;       /* of statements and expressions */
    int n_for;      /* loops around this place that break may leave */
    bool in_for;    /* loops at all, across macros */
    hx_jnode spare; /* stands for nodes there is no memory for */
} parser;

#define FAIL(p, ...)                                                                     \
    (hx_jvm_fail(&(p)->vm, __VA_ARGS__), (void)((p)->at = (p)->n_tok - ((p)->n_tok > 0)))

static bool ok(const parser *p)
{
    return p->vm.rc == 0;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c);
}

static bool looking_at(const parser *p, size_t pos, const char *s)
{
    const size_t n = strlen(s);

    return p->n - pos >= n && memcmp(p->src + pos, s, n) == 0;
}

static size_t skip_space(const parser *p, size_t pos)
{
    uint32_t cp;
    int n;

    while (pos < p->n && (n = hx_utf8_next(p->src + pos, p->n - pos, &cp)) > 0 &&
           hx_jinja_is_space(cp))
        pos += (size_t)n;
    return pos;
}

/* Drops white space from the end of src[from..to). */
static size_t strip_end(const parser *p, size_t from, size_t to)
{
    while (to > from) {
        uint32_t cp;
        const size_t at = hx_jstr_before(p->src, to);
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

static token *emit(parser *p, tkind kind, const char *s, size_t n)
{
    token *t = hx_jvm_grow(&p->vm, p->tok, p->n_tok, &p->cap_tok, sizeof *t);

    if (t == NULL)
        return &p->end;
    p->tok = t;
    t += p->n_tok++;
    *t = (token) { .kind = kind, .line = p->vm.line, .p = s, .n = n };
    return t;
}

/* Text before a tag that begins at `at`. sign is that of the tag; print tags keep the
 * indentation in front of them. */
static void emit_text(parser *p, size_t from, size_t at, char sign, bool print)
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
    count_lines(p, from);
    if (to > from)
        emit(p, T_DATA, p->src + from, to - from);
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

static void lex_comment(parser *p)
{
    for (size_t i = p->pos; i + 1 < p->n; i++) {
        const size_t after = tag_end(p, i, "#}", true);
        if (after != 0) {
            p->pos = after;
            return;
        }
    }
    FAIL(p, HX_EFORMAT, "comment is never closed; expected \"#}\"");
}

/* One escape of a string literal: s[0..n) stands behind the backslash. Returns how many
 * bytes of s it takes. */
static size_t lex_escape(parser *p, const char *s, size_t n, char *to, size_t *n_to)
{
    static const char FROM[] = "\\'\"abfnrtv", INTO[] = "\\'\"\a\b\f\n\r\t\v";
    const char *known = memchr(FROM, s[0], sizeof FROM - 1);
    const size_t want = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : s[0] == 'U' ? 8 : 0;
    char hex[9] = { 0 };

    if (known != NULL) {
        to[(*n_to)++] = INTO[known - FROM];
        return 1;
    }
    if (want > 0) {
        memcpy(hex, s + 1, HX_MIN(want, n - 1));
        const unsigned long cp = strtoul(hex, NULL, 16);
        if (strspn(hex, "0123456789abcdefABCDEF") != want)
            FAIL(p, HX_EFORMAT, "\\%c in a string needs %zu hex digits", s[0], want);
        else if (cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
            FAIL(p, HX_EUNSUP, "\\%c%lx in a string is no character", s[0], cp);
        else
            *n_to += (size_t)hx_utf8_put((uint32_t)cp, to + *n_to);
        return want + 1;
    }
    if (s[0] == 'N' || s[0] == '\n' || is_digit(s[0]))
        FAIL(p, HX_EUNSUP, "escape \"\\%c\" in a string", s[0] == '\n' ? ' ' : s[0]);
    to[(*n_to)++] = '\\'; /* unknown escapes stay as they are */
    return 0;
}

static void lex_string(parser *p)
{
    const char quote = p->src[p->pos];
    size_t end = p->pos + 1, n_to = 0;

    while (end < p->n && p->src[end] != quote)
        end += p->src[end] == '\\' ? 2 : 1;
    if (end >= p->n) {
        FAIL(p, HX_EFORMAT, "string is never closed; expected %c", quote);
        return;
    }
    const char *s = p->src + p->pos + 1;
    const size_t n = end - p->pos - 1;
    char *to = hx_jvm_alloc(&p->vm, n + 1, 1); /* no escape is longer than its spelling */
    for (size_t i = 0; i < n && ok(p);) {
        if (s[i] == '\\')
            i += 1 + lex_escape(p, s + i + 1, n - i - 1, to, &n_to);
        else
            to[n_to++] = s[i++];
    }
    emit(p, T_STRING, to, n_to);
    p->pos = end + 1;
}

static void lex_number(parser *p)
{
    const char *from = p->src + p->pos, *end = from + strspn(from, "0123456789");
    /* "m.content.0.type": digits behind a dot are an index, never part of a float. */
    const bool index = p->pos > 0 && from[-1] == '.';
    const char *e = end + 1 + (end[0] != 0 && (end[1] == '-' || end[1] == '+'));
    char *after = NULL;
    hx_jval v = hx_jint(0);

    if (!index && ((end[0] == '.' && is_digit(end[1])) ||
                   ((end[0] | 0x20) == 'e' && is_digit(*e)))) {
        v = hx_jfloat(strtod(from, &after));
        end = after;
    }
    for (const char *c = from; v.t == HX_J_INT && c < end; c++) {
        if (__builtin_mul_overflow(v.u.i, 10, &v.u.i) ||
            __builtin_add_overflow(v.u.i, *c - '0', &v.u.i))
            FAIL(p, HX_EUNSUP, "integer %.*s is over 64 bits",
                 (int)HX_MIN(end - from, 40), from);
    }
    if (is_word(*end))
        FAIL(p, HX_EUNSUP, "number \"%.*s%c\"", (int)HX_MIN(end - from, 40), from, *end);
    emit(p, T_NUMBER, from, (size_t)(end - from))->val = v;
    p->pos += (size_t)(end - from);
}

static void lex_sign(parser *p)
{
    static const char *const LONG[] = { "//", "**", "==", "!=", ">=", "<=" };
    static const char OPEN[] = "([{", CLOSE[] = ")]}", OTHER[] = "+-/*%~><=.:|,";
    const char c = p->src[p->pos];
    const char *open = memchr(OPEN, c, 3), *close = memchr(CLOSE, c, 3);
    size_t i = 0;

    while (i < HX_LEN(LONG) && !looking_at(p, p->pos, LONG[i]))
        i++;
    if ((uint8_t)c >= 0x80)
        FAIL(p, HX_EUNSUP, "name or sign that is not ASCII, inside a tag");
    else if (i == HX_LEN(LONG) && !open && !close && !memchr(OTHER, c, sizeof OTHER - 1))
        FAIL(p, HX_EFORMAT, "unexpected character \"%c\" in a tag", c);
    else if (open && p->n_open == HX_J_NEST_MAX)
        FAIL(p, HX_ELIMIT, "brackets nested over %d deep", HX_J_NEST_MAX);
    else if (open)
        p->open[p->n_open++] = CLOSE[open - OPEN];
    else if (close && (p->n_open == 0 || p->open[--p->n_open] != c))
        FAIL(p, HX_EFORMAT, "unexpected \"%c\"", c);
    const size_t n = i < HX_LEN(LONG) ? 2 : 1;
    emit(p, T_SIGN, p->src + p->pos, n);
    p->pos += n;
}

/* The inside of a tag, up to and with its end. */
static void lex_tag(parser *p, bool print)
{
    p->n_open = 0;
    while (ok(p)) {
        p->pos = skip_space(p, p->pos);
        count_lines(p, p->pos);
        if (p->pos >= p->n) {
            FAIL(p, HX_EFORMAT, "template ends inside a tag");
            return;
        }
        const char *mark = print ? "}}" : "%}";
        const size_t end = p->n_open ? 0 : tag_end(p, p->pos, mark, !print);
        if (end != 0) {
            emit(p, T_SIGN, mark, 2);
            p->pos = end;
            return;
        }
        const char c = p->src[p->pos];
        if (c == '"' || c == '\'') {
            lex_string(p);
        } else if (is_digit(c)) {
            lex_number(p);
        } else if (is_word(c)) {
            size_t e = p->pos;
            while (e < p->n && is_word(p->src[e]))
                e++;
            emit(p, T_NAME, p->src + p->pos, e - p->pos);
            p->pos = e;
        } else {
            lex_sign(p);
        }
    }
}

static void lex(parser *p)
{
    while (ok(p) && p->pos < p->n) {
        size_t at = p->pos;
        while (at < p->n && !(p->src[at] == '{' && at + 1 < p->n &&
                              memchr("%{#", p->src[at + 1], 3) != NULL))
            at++;
        if (at == p->n) {
            count_lines(p, p->pos);
            emit(p, T_DATA, p->src + p->pos, at - p->pos);
            break;
        }
        const char kind = p->src[at + 1], next = at + 2 < p->n ? p->src[at + 2] : 0;
        const char sign = next == '-' || next == '+' ? next : 0;
        emit_text(p, p->pos, at, sign, kind == '{');
        count_lines(p, at);
        p->pos = at + 2 + (sign != 0);
        if (kind == '#') {
            lex_comment(p);
        } else {
            emit(p, T_SIGN, p->src + at, 2);
            lex_tag(p, kind == '{');
        }
    }
    if (ok(p))
        count_lines(p, p->n);
    emit(p, T_EOF, "end of template", 15);
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

static const token *advance(parser *p)
{
    const token *t = cur(p);

    p->at += p->at + 1 < p->n_tok;
    p->vm.line = cur(p)->line;
    return t;
}

/* A name or sign with that spelling. */
static bool token_is(const token *t, const char *word)
{
    return (t->kind == T_NAME || t->kind == T_SIGN) && t->n == strlen(word) &&
           memcmp(t->p, word, t->n) == 0;
}

/* Which of words, which NULL ends; -1: none. */
static int token_among(const token *t, const char *const *words)
{
    for (int i = 0; words[i] != NULL; i++) {
        if (token_is(t, words[i]))
            return i;
    }
    return -1;
}

static bool is(const parser *p, const char *word)
{
    return token_is(cur(p), word);
}

static bool is_a(const parser *p, tkind kind)
{
    return cur(p)->kind == kind;
}

static bool skip(parser *p, const char *word)
{
    const bool yes = is(p, word);

    if (yes)
        advance(p);
    return yes;
}

static void unexpected(parser *p, const char *want)
{
    const token *t = cur(p);

    p->vm.line = t->line;
    FAIL(p, HX_EFORMAT, "found \"%.*s\", expected %s", (int)HX_MIN(t->n, 40), t->p, want);
}

static void expect(parser *p, const char *word)
{
    if (!skip(p, word))
        unexpected(p, word);
}

static const token *expect_name(parser *p, const char *what)
{
    if (!is_a(p, T_NAME))
        unexpected(p, what);
    return advance(p);
}

/* ---- building nodes -------------------------------------------------- */

static hx_jnode *node_new(parser *p, hx_jkind kind)
{
    hx_jnode *n = hx_jvm_alloc(&p->vm, 1, sizeof *n);

    if (n == NULL)
        n = &p->spare;
    n->kind = (uint8_t)kind;
    n->line = cur(p)->line;
    return n;
}

static hx_jnode *wrap(parser *p, hx_jkind kind, hx_jnode *a)
{
    hx_jnode *n = node_new(p, kind);

    n->a = a;
    return n;
}

static hx_jval text_of(parser *p, const token *t)
{
    return hx_jstr_new(&p->vm, t->p, t->n, false);
}

/* False: too deep. Pairs with p->nest--, also then. */
static bool enter(parser *p)
{
    if (++p->nest > HX_J_NEST_MAX)
        FAIL(p, HX_ELIMIT, "nested over %d deep", HX_J_NEST_MAX);
    return ok(p);
}

static uint32_t symbol(parser *p, const char *s, size_t n)
{
    hx_jinja *t = p->t;

    for (uint32_t i = 0; i < t->n_sym; i++) {
        if (t->sym[i].n == n && memcmp(t->sym[i].p, s, n) == 0)
            return i;
    }
    if (t->n_sym == HX_J_SYM_MAX) {
        FAIL(p, HX_ELIMIT, "more than %d different names", HX_J_SYM_MAX);
        return 0;
    }
    hx_str *sym = hx_jvm_grow(&p->vm, t->sym, t->n_sym, &t->cap_sym, sizeof *sym);
    if (sym == NULL)
        return 0;
    t->sym = sym;
    t->sym[t->n_sym] = (hx_str) { s, n };
    return t->n_sym++;
}

static hx_jnode *name_node(parser *p, hx_jkind kind, const token *t)
{
    hx_jnode *n = node_new(p, kind);

    n->sym = symbol(p, t->p, t->n);
    return n;
}

static hx_jnode *parse_expr(parser *p);
static hx_jnode *parse_unary(parser *p, bool filters);
static hx_jnode *parse_body(parser *p, const char *const *ends);

/* ---- expressions ----------------------------------------------------- */

/* Items with commas between them, up to close, which goes too. Returns how many. */
static uint32_t parse_list(parser *p, const char *close, hx_jnode *(*item)(parser *p),
                           hx_jnode **link)
{
    uint32_t n = 0;

    for (advance(p); ok(p) && !is(p, close); n++) {
        *link = item(p);
        while (*link != NULL && ok(p))
            link = &(*link)->next;
        if (!is(p, close))
            expect(p, ",");
    }
    advance(p);
    return n;
}

/* Several of item with commas are a tuple, one is itself; none only where parens are. */
static hx_jnode *parse_tuple(parser *p, hx_jnode *(*item)(parser *p), bool parens)
{
    hx_jnode *t = node_new(p, HX_N_TUPLE), **link = &t->a;
    bool comma = false;

    while (ok(p) && !is(p, "}}") && !is(p, "%}") && !is(p, ")") && !is(p, "in") &&
           !is(p, "=")) {
        *link = item(p);
        link = &(*link)->next;
        t->n++;
        if (!(comma = skip(p, ",")))
            break;
    }
    if (t->n == 0 && !parens)
        unexpected(p, "an expression");
    return t->n == 1 && !comma ? t->a : t;
}

static hx_jnode *parse_pair(parser *p)
{
    hx_jnode *n = parse_expr(p);

    expect(p, ":");
    n->next = parse_expr(p);
    return n;
}

static hx_jnode *parse_arg(parser *p)
{
    if (is(p, "*") || is(p, "**"))
        FAIL(p, HX_EUNSUP, "\"*\" and \"**\" arguments");
    if (!is_a(p, T_NAME) || !token_is(ahead(p), "="))
        return parse_expr(p);
    hx_jnode *n = node_new(p, HX_N_KEYWORD);
    n->val = text_of(p, advance(p));
    advance(p);
    n->a = parse_expr(p);
    return n;
}

static hx_jnode *parse_args(parser *p)
{
    hx_jnode *first = NULL;
    bool keyword = false;

    parse_list(p, ")", parse_arg, &first);
    for (const hx_jnode *n = first; n != NULL && ok(p); n = n->next) {
        if (keyword && n->kind != HX_N_KEYWORD)
            FAIL(p, HX_EFORMAT, "argument without a name after one with a name");
        keyword = n->kind == HX_N_KEYWORD;
    }
    return first;
}

static const char *const CONSTANTS[] = { "none", "None", "false", "False",
                                         "true", "True", NULL };

static hx_jnode *parse_name(parser *p)
{
    static const char *const REFUSED[] = { "self",    "super",  "caller",
                                           "varargs", "kwargs", NULL };
    const token *t = cur(p);
    const int i = token_among(t, CONSTANTS);
    hx_jnode *n = name_node(p, i < 0 ? HX_N_NAME : HX_N_CONST, t);

    n->val = i < 2 ? hx_jnone() : hx_jbool(i >= 4);
    if (token_among(t, REFUSED) >= 0)
        FAIL(p, HX_EUNSUP, "the special name \"%.*s\"", (int)t->n, t->p);
    advance(p);
    return n;
}

static hx_jnode *parse_string(parser *p)
{
    hx_jnode *n = node_new(p, HX_N_CONST);
    hx_jbuf b = { .vm = &p->vm };

    while (is_a(p, T_STRING)) {
        const token *t = advance(p);
        hx_jbuf_add(&b, t->p, t->n, NULL, false);
    }
    n->val = hx_jbuf_done(&b, false);
    return n;
}

static hx_jnode *parse_primary(parser *p)
{
    const token *t = cur(p);
    hx_jnode *n = node_new(p, HX_N_CONST);

    if (t->kind == T_NAME)
        return parse_name(p);
    if (t->kind == T_STRING)
        return parse_string(p);
    if (t->kind == T_NUMBER) {
        n->val = t->val;
        advance(p);
    } else if (skip(p, "(")) {
        n = parse_tuple(p, parse_expr, true);
        expect(p, ")");
    } else if (token_is(t, "[")) {
        n->kind = HX_N_LIST;
        parse_list(p, "]", parse_expr, &n->a);
    } else if (token_is(t, "{")) {
        n->kind = HX_N_DICT;
        parse_list(p, "}", parse_pair, &n->a);
    } else {
        unexpected(p, "an expression");
    }
    return n;
}

/* obj[...]: an index, or start:stop:step. */
static hx_jnode *parse_subscript(parser *p, hx_jnode *obj)
{
    hx_jnode *n = wrap(p, HX_N_ITEM, obj), **part[] = { &n->b, &n->c, &n->els };
    size_t k = 0;

    advance(p);
    while (ok(p) && !is(p, "]")) {
        if (is(p, ","))
            FAIL(p, HX_EUNSUP, "more than one index in [ ]");
        if (k + 1 < HX_LEN(part) && skip(p, ":")) {
            n->kind = HX_N_SLICE;
            k++;
        } else if (is(p, ":") || *part[k] != NULL) {
            unexpected(p, "\"]\"");
        } else {
            *part[k] = parse_expr(p);
        }
    }
    if (n->kind == HX_N_ITEM && n->b == NULL)
        unexpected(p, "an index");
    advance(p);
    return n;
}

static hx_jnode *parse_postfix(parser *p, hx_jnode *n)
{
    while (ok(p)) {
        if (is(p, "[")) {
            n = parse_subscript(p, n);
        } else if (is(p, "(")) {
            n = wrap(p, HX_N_CALL, n);
            n->b = parse_args(p);
        } else if (is(p, ".")) {
            n = wrap(p, HX_N_ATTR, n);
            advance(p);
            n->kind = is_a(p, T_NUMBER) ? HX_N_ITEM : HX_N_ATTR;
            if (is_a(p, T_NUMBER))
                n->b = parse_primary(p);
            else
                n->val = text_of(p, expect_name(p, "a name or number after \".\""));
        } else {
            break;
        }
    }
    return n;
}

/* Behind the "|". Unknown names fail when they are reached: templates ask for filters of
 * other programs in branches that are not taken. */
static hx_jnode *parse_filter(parser *p, hx_jnode *a)
{
    hx_jnode *n = wrap(p, HX_N_FILTER, a);
    const token *t = expect_name(p, "the name of a filter");

    n->val = text_of(p, t);
    n->fn = hx_jcall_find((hx_str) { t->p, t->n }, HX_J_FILTER);
    if (is(p, "("))
        n->b = parse_args(p);
    return n;
}

/* Behind "is". */
static hx_jnode *parse_test(parser *p, hx_jnode *a)
{
    static const char *const NO_ARG[] = { "else", "or", "and", "is", "if", NULL };
    const bool negated = skip(p, "not");
    hx_jnode *n = wrap(p, HX_N_TEST, a);
    const token *t = expect_name(p, "the name of a test");

    n->val = text_of(p, t);
    n->fn = hx_jcall_find((hx_str) { t->p, t->n }, HX_J_TEST);
    if (is(p, "is"))
        unexpected(p, "no second test");
    if (is(p, "("))
        n->b = parse_args(p);
    else if (is_a(p, T_STRING) || is_a(p, T_NUMBER) || is(p, "[") || is(p, "{") ||
             (is_a(p, T_NAME) && token_among(cur(p), NO_ARG) < 0))
        n->b = parse_postfix(p, parse_primary(p));
    return negated ? wrap(p, HX_N_NOT, n) : n;
}

static hx_jnode *parse_unary(parser *p, bool filters)
{
    hx_jnode *n = &p->spare;

    if (!enter(p)) {
        p->nest--;
        return n;
    }
    if (is(p, "-") || is(p, "+")) {
        n = node_new(p, is(p, "-") ? HX_N_NEG : HX_N_POS);
        advance(p);
        n->a = parse_unary(p, false);
    } else {
        n = parse_primary(p);
    }
    n = parse_postfix(p, n);
    while (filters && ok(p) && (is(p, "|") || is(p, "is")))
        n = skip(p, "|") ? parse_filter(p, n) : (advance(p), parse_test(p, n));
    p->nest--;
    return n;
}

/* Binary operators, loosest level first. Comparisons chain. */
enum { LEVEL_NOT = 2, LEVEL_COMPARE, LEVEL_LAST = 6 };
static const struct {
    const char *text;
    uint8_t level, kind, op;
} BINARY[] = {
    { "or", 0, HX_N_OR, 0 },
    { "and", 1, HX_N_AND, 0 },
    { "==", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_EQ },
    { "!=", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_NE },
    { "<=", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_LE },
    { ">=", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_GE },
    { "<", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_LT },
    { ">", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_GT },
    { "in", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_IN },
    { "not", LEVEL_COMPARE, HX_N_COMPARE, HX_OP_NOT_IN },
    { "+", 4, HX_N_BIN, HX_OP_ADD },
    { "-", 4, HX_N_BIN, HX_OP_SUB },
    { "~", 5, HX_N_BIN, HX_OP_CAT },
    { "*", LEVEL_LAST, HX_N_BIN, HX_OP_MUL },
    { "/", LEVEL_LAST, HX_N_BIN, HX_OP_DIV },
    { "//", LEVEL_LAST, HX_N_BIN, HX_OP_FLOORDIV },
    { "%", LEVEL_LAST, HX_N_BIN, HX_OP_MOD },
};

/* Index of the operator of that level that stands here, or the number of them. */
static size_t binary_here(const parser *p, int level)
{
    const token *t = cur(p);
    size_t i = 0;

    while (i < HX_LEN(BINARY) &&
           !(BINARY[i].level == level && token_is(t, BINARY[i].text) &&
             (BINARY[i].op != HX_OP_NOT_IN || token_is(ahead(p), "in"))))
        i++;
    return i;
}

static hx_jnode *parse_binary(parser *p, int level)
{
    hx_jnode *n, **link = NULL;
    size_t i;

    if (level == LEVEL_NOT && is(p, "not")) {
        n = node_new(p, HX_N_NOT);
        advance(p);
        if (enter(p))
            n->a = parse_binary(p, LEVEL_NOT);
        p->nest--;
        return n;
    }
    if (level > LEVEL_LAST)
        return parse_unary(p, true);
    n = parse_binary(p, level + 1);
    while (ok(p) && (i = binary_here(p, level)) < HX_LEN(BINARY)) {
        hx_jnode *operand = NULL;
        if (link == NULL || level != LEVEL_COMPARE) {
            n = wrap(p, (hx_jkind)BINARY[i].kind, n);
            n->op = BINARY[i].op;
            link = &n->b;
        }
        if (BINARY[i].op == HX_OP_NOT_IN)
            advance(p);
        advance(p);
        operand = parse_binary(p, level + 1);
        if (level == LEVEL_COMPARE) {
            operand = wrap(p, HX_N_OPERAND, operand);
            operand->op = BINARY[i].op;
        }
        *link = operand;
        link = &operand->next;
    }
    if (is(p, "**"))
        FAIL(p, HX_EUNSUP, "the operator \"**\"");
    return n;
}

/* An expression without the inline if. */
static hx_jnode *parse_or(parser *p)
{
    return parse_binary(p, 0);
}

static hx_jnode *parse_expr(parser *p)
{
    hx_jnode *n = &p->spare;

    if (enter(p))
        n = parse_or(p);
    while (ok(p) && skip(p, "if")) {
        n = wrap(p, HX_N_COND, n);
        n->b = parse_or(p);
        if (skip(p, "else"))
            n->c = parse_expr(p);
    }
    p->nest--;
    return n;
}

/* ---- statements ------------------------------------------------------ */

static hx_jnode *parse_target_name(parser *p)
{
    const token *t = cur(p);

    if (t->kind != T_NAME || token_among(t, CONSTANTS) >= 0)
        unexpected(p, "a name to assign to");
    else if (p->in_for && token_is(t, "loop"))
        FAIL(p, HX_EFORMAT, "\"loop\" cannot be assigned inside a for block");
    hx_jnode *n = name_node(p, HX_N_NAME, t);
    n->val = text_of(p, t);
    advance(p);
    return n;
}

/* A name, or a tuple of targets in parentheses. */
static hx_jnode *parse_target(parser *p)
{
    hx_jnode *n = &p->spare;

    if (!is(p, "("))
        return parse_target_name(p);
    advance(p);
    if (enter(p))
        n = parse_tuple(p, parse_target, false);
    p->nest--;
    expect(p, ")");
    return n;
}

/* The rest of a tag, then statements up to one of ends (not consumed). */
static hx_jnode *parse_block(parser *p, const char *const *ends)
{
    skip(p, ":");
    expect(p, "%}");
    return parse_body(p, ends);
}

/* The parsers of tags start behind the word of the tag and end in front of the "%}" of
 * the closing tag. */

static void parse_if(parser *p, hx_jnode *n)
{
    static const char *const ENDS[] = { "elif", "else", "endif", NULL };

    for (;;) {
        n->a = parse_tuple(p, parse_or, false);
        n->body = parse_block(p, ENDS);
        if (!ok(p) || !is(p, "elif"))
            break;
        n = n->els = node_new(p, HX_N_IF);
        advance(p);
    }
    if (skip(p, "else"))
        n->els = parse_block(p, ENDS + 2);
    advance(p);
}

static void parse_for(parser *p, hx_jnode *n)
{
    static const char *const ENDS[] = { "else", "endfor", NULL };
    const bool in_for = p->in_for;

    p->in_for = true;
    n->a = parse_tuple(p, parse_target, false);
    if (!skip(p, "in"))
        unexpected(p, "\"in\"");
    n->b = parse_tuple(p, parse_or, false);
    if (skip(p, "if"))
        n->c = parse_expr(p);
    if (is(p, "recursive"))
        FAIL(p, HX_EUNSUP, "recursive loops");
    p->n_for++;
    n->body = parse_block(p, ENDS);
    p->n_for--;
    if (skip(p, "else"))
        n->els = parse_block(p, ENDS + 1);
    p->in_for = in_for;
    advance(p);
}

/* A body with a scope of its own, up to the tag `end`; break does not reach through. */
static void parse_closed(parser *p, const char *end, hx_jnode *n)
{
    const char *const ends[] = { end, NULL };
    const int n_for = p->n_for;

    p->n_for = 0;
    n->body = parse_block(p, ends);
    p->n_for = n_for;
    advance(p);
}

static void parse_set(parser *p, hx_jnode *n)
{
    if (is_a(p, T_NAME) && token_is(ahead(p), ".")) {
        n->a = name_node(p, HX_N_NS_TARGET, advance(p));
        advance(p);
        n->a->val = text_of(p, expect_name(p, "a name after \".\""));
    } else {
        n->a = parse_tuple(p, parse_target, false);
    }
    if (skip(p, "=")) {
        n->b = parse_tuple(p, parse_expr, false);
        return;
    }
    n->b = node_new(p, HX_N_BODY);
    while (skip(p, "|"))
        n->b = parse_filter(p, n->b);
    n->op = 1;
    parse_closed(p, "endset", n);
}

static hx_jnode *parse_param(parser *p)
{
    hx_jnode *n = parse_target_name(p);

    if (skip(p, "="))
        n->a = parse_expr(p);
    return n;
}

static void parse_macro(parser *p, hx_jnode *n)
{
    const hx_jnode *name = parse_target_name(p);

    n->sym = name->sym;
    n->val = name->val;
    if (!is(p, "("))
        unexpected(p, "\"(\"");
    n->n = parse_list(p, ")", parse_param, &n->a);
    for (const hx_jnode *k = n->a; k != NULL && ok(p); k = k->next) {
        if (k->a != NULL && k->next != NULL && k->next->a == NULL)
            FAIL(p, HX_EFORMAT, "parameter without default after one with a default");
    }
    parse_closed(p, "endmacro", n);
}

static void parse_filter_block(parser *p, hx_jnode *n)
{
    n->b = node_new(p, HX_N_BODY);
    do
        n->b = parse_filter(p, n->b);
    while (skip(p, "|"));
    parse_closed(p, "endfilter", n);
}

/* The block of HuggingFace only marks its text: a filter block without filters. */
static void parse_generation(parser *p, hx_jnode *n)
{
    n->b = node_new(p, HX_N_BODY);
    parse_closed(p, "endgeneration", n);
}

static void parse_leave(parser *p, hx_jnode *n)
{
    if (p->n_for == 0)
        FAIL(p, HX_EFORMAT, "\"%s\" outside a loop",
             n->kind == HX_N_BREAK ? "break" : "continue");
}

static const struct {
    const char *word;
    hx_jkind kind;
    void (*parse)(parser *p, hx_jnode *n);
} TAGS[] = {
    { "if", HX_N_IF, parse_if },
    { "for", HX_N_FOR, parse_for },
    { "set", HX_N_SET, parse_set },
    { "macro", HX_N_MACRO, parse_macro },
    { "filter", HX_N_FILTER_BLOCK, parse_filter_block },
    { "generation", HX_N_FILTER_BLOCK, parse_generation },
    { "break", HX_N_BREAK, parse_leave },
    { "continue", HX_N_CONTINUE, parse_leave },
};

static const char *const REFUSED_TAGS[] = {
    "extends", "block",      "include", "import", "from",  "call",  "with",
    "raw",     "autoescape", "print",   "do",     "trans", "debug", NULL,
};

static hx_jnode *parse_statement(parser *p)
{
    const token *t = cur(p);
    hx_jnode *n = &p->spare;
    size_t i = 0;

    while (i < HX_LEN(TAGS) && !is(p, TAGS[i].word))
        i++;
    if (i < HX_LEN(TAGS)) {
        n = node_new(p, TAGS[i].kind);
        advance(p);
        TAGS[i].parse(p, n);
        expect(p, "%}");
    } else if (t->kind != T_NAME) {
        unexpected(p, "the name of a tag");
    } else if (token_among(t, REFUSED_TAGS) >= 0) {
        FAIL(p, HX_EUNSUP, "the tag \"%.*s\"", (int)t->n, t->p);
    } else {
        FAIL(p, HX_EFORMAT, "unknown or misplaced tag \"%.*s\"", (int)HX_MIN(t->n, 40),
             t->p);
    }
    return n;
}

/* Statements up to one of ends, which becomes the current token; NULL: up to the end. */
static hx_jnode *parse_body(parser *p, const char *const *ends)
{
    hx_jnode *first = NULL, **link = &first;

    enter(p);
    while (ok(p) && !is_a(p, T_EOF)) {
        if (is_a(p, T_DATA)) {
            *link = wrap(p, HX_N_PRINT, node_new(p, HX_N_CONST));
            (*link)->a->val = text_of(p, advance(p));
        } else if (is(p, "{{")) {
            *link = node_new(p, HX_N_PRINT);
            advance(p);
            (*link)->a = parse_tuple(p, parse_expr, false);
            expect(p, "}}");
        } else {
            advance(p);
            if (ends != NULL && token_among(cur(p), ends) >= 0)
                break;
            *link = parse_statement(p);
        }
        link = &(*link)->next;
    }
    p->nest--;
    if (ends != NULL && is_a(p, T_EOF) && ok(p)) {
        while (ends[1] != NULL)
            ends++;
        FAIL(p, HX_EFORMAT, "template ends; expected \"{%% %s %%}\"", *ends);
    }
    return first;
}

/* Line ends become "\n"; one at the very end goes. */
static void normalise(parser *p, hx_str source)
{
    char *s = hx_jvm_alloc(&p->vm, source.n + 1, 1);
    size_t n = 0;

    for (size_t i = 0; s != NULL && i < source.n; i++) {
        s[n++] = source.p[i] == '\r' ? '\n' : source.p[i];
        i += source.p[i] == '\r' && i + 1 < source.n && source.p[i + 1] == '\n';
    }
    p->n = n - (n > 0 && s[n - 1] == '\n');
    p->src = s;
}

int hx_jinja_parse(hx_jinja *t, hx_str source, hx_err *err)
{
    parser p = { .vm = { .mem = &t->mem, .err = err, .name = t->name, .line = 1 },
                 .t = t };

    if (source.n > HX_J_SOURCE_MAX)
        FAIL(&p, HX_ELIMIT, "template has %zu bytes, at most %zu are read", source.n,
             HX_J_SOURCE_MAX);
    else if (!hx_utf8_ok(source.p, source.n))
        FAIL(&p, HX_EFORMAT, "template is not UTF-8");
    else
        normalise(&p, source);
    if (ok(&p))
        lex(&p);
    if (ok(&p)) {
        const uint32_t loop = symbol(&p, "loop", 4);
        hx_assert(!ok(&p) || loop == HX_J_SYM_LOOP);
        p.vm.line = p.tok[0].line;
        t->body = parse_body(&p, NULL);
    }
    return p.vm.rc;
}
