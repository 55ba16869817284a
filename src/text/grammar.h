/* grammar.h - constrained decoding: which tokens may come next. Part of text.h.
 *
 * A grammar is compiled from a JSON schema, a regular expression, GBNF rules, a list of
 * choices or a list of tools. It holds a byte-level pushdown automaton and a bounded
 * cache of the states met so far with their masks. A matcher is a place in it: a plain
 * value of fixed size, so going back is assigning an older copy. Nothing allocates after
 * hx_grammar_open().
 *
 * Threads: a vocabulary is shared freely; a grammar and its matchers belong to one thread
 * at a time. */
/* clang-format off */      /* fields and their comments are aligned by hand */
#ifndef HX_GRAMMAR_H
#define HX_GRAMMAR_H

#include "base/base.h"

/* ---- vocabulary ------------------------------------------------------ */

typedef struct hx_vocab hx_vocab;

typedef struct {
    const hx_str  *bytes;    /* [n_token] of each id, {NULL, 0} where it has none. The array
                              * is copied, the bytes must outlive the vocabulary */
    const bool    *special;  /* [n_token] ids never taken for their bytes, only where a
                              * grammar names them: added tokens. NULL: none */
    int32_t        n_token;
    int32_t        n_vocab;  /* bits of a mask, at least n_token; the rest is never set */
    const int32_t *end;      /* [n_end] ids that end an answer: allowed exactly where the
                              * grammar is complete */
    int32_t        n_end;
} hx_vocab_opt;

/* Tokens of more than 512 bytes are never allowed. Errors: HX_EARG, HX_ENOMEM. */
int  hx_vocab_open(hx_vocab **out, const hx_vocab_opt *opt, hx_err *err);
void hx_vocab_close(hx_vocab *v);

/* ---- limits ---------------------------------------------------------- */

/* X(name, default, what is counted). Beyond one: HX_ELIMIT, and the sentence has its name.
 * The defaults keep hx_grammar_open() under 100 ms and a mask under 100 ms for any source
 * (Zen 3, 2.5 GHz). */
#define HX_GRAMMAR_LIMITS(X)                                                             \
    X(source_bytes, 1 << 19, "bytes of source")                                          \
    X(nesting, 128, "levels of nesting in the source")                                   \
    X(repeat, 100000, "as the bound of a quantifier")                                    \
    X(rules, 1 << 16, "rules")                                                           \
    X(nodes, 1 << 17, "nodes of the parsed source")                                      \
    X(states, 1 << 16, "states")                                                         \
    X(steps, 1500000, "steps of compiling")                                              \
    X(memory_bytes, 64 << 20, "bytes of memory to compile in")                           \
    X(cache_bytes, 16 << 20, "bytes of cached states and masks")                         \
    X(depth, HX_MATCHER_FRAMES / 2, "open rules while matching")                         \
    X(mask_steps, 2000000, "steps for one mask")

typedef struct {
#define X(name, dflt, text) uint32_t name;    /* 0: the default */
    HX_GRAMMAR_LIMITS(X)
#undef X
    bool open_objects;       /* JSON schema: objects with "properties" but neither
                              * "additionalProperties" nor "unevaluatedProperties" take
                              * undeclared members, and tuples undeclared elements, as the
                              * standard says; default: they do not, as in strict function
                              * calling */
} hx_grammar_opt;

/* ---- grammar --------------------------------------------------------- */

typedef struct hx_grammar hx_grammar;

/* JSON is written compactly or with one space after "," and ":"; objects have their
 * members in the order of the schema.
 *   JSON         any object; source is not read
 *   JSON_SCHEMA  docs in grammar_schema.c say which keywords are exact, near or refused
 *   REGEX        ECMA-262 without flags, look-around, back-references, \b and \p; matches
 *                the whole text
 *   EBNF         GBNF as llama.cpp reads it; begins at the rule "root"
 *   CHOICE       a JSON array of strings
 *   TOOLS        calls of tools in a model's own markup; docs in grammar_tools.c
 * The kinds are hx_grammar_kind of hoist.h. */

/* Compiles. v may be NULL: then only bytes can be matched; it must outlive the grammar.
 * opt may be NULL. Errors: HX_EFORMAT (with the place), HX_EUNSUP (which construct),
 * HX_ELIMIT (which limit), HX_ENOMEM. Freed with hx_grammar_close(). */
int  hx_grammar_open(hx_grammar **out, const hx_vocab *v, hx_grammar_kind kind,
                     hx_str source, const hx_grammar_opt *opt, hx_err *err);
void hx_grammar_close(hx_grammar *g);

/* ---- matcher --------------------------------------------------------- */

enum { HX_MATCHER_ITEMS = 512, HX_MATCHER_FRAMES = 256 };

/* Copy it freely; look at nothing inside. An item is a state of the automaton above a
 * stack of frames; stacks share their lower frames. */
typedef struct {
    hx_grammar *g;
    uint32_t    epoch, config;   /* where the grammar's cache has this state */
    uint16_t    n_item, n_frame;
    bool        complete, ended;
    struct { uint32_t state, frame; } item[HX_MATCHER_ITEMS];
    struct { uint32_t ret, count, parent; } frame[HX_MATCHER_FRAMES];
} hx_matcher;

void hx_grammar_start(hx_grammar *g, hx_matcher *m);

/* 0: taken. HX_EFORMAT: not allowed here, or it needs more open rules than "depth"; m is as
 * it was. An end id is taken where the grammar is complete; nothing is after it. */
int hx_grammar_accept(hx_matcher *m, int32_t id);
int hx_grammar_accept_bytes(hx_matcher *m, hx_str bytes);

/* mask[(n_vocab + 31) / 32]: bit id % 32 of word id / 32 tells whether the id may come
 * next. HX_ELIMIT: more than mask_steps, or nothing may come (mask is then all zero).
 * HX_EARG: the grammar was opened without a vocabulary. */
int hx_grammar_mask(hx_matcher *m, uint32_t *mask, hx_err *err);

typedef enum {
    HX_GRAMMAR_OPEN,             /* more must come */
    HX_GRAMMAR_MAY_END,
    HX_GRAMMAR_MUST_END          /* complete, and nothing can follow but an end id */
} hx_grammar_state;
hx_grammar_state hx_grammar_done(const hx_matcher *m);

#endif
