/* grammar_ir.h - what the files of constrained decoding share. Private to
 * src/text/grammar*.c.
 *
 * grammar.c         the public calls; JSON mode, choices
 * grammar_regex.c   regular expressions -> IR
 * grammar_ebnf.c    GBNF -> IR
 * grammar_schema.c  JSON schema -> IR
 * grammar_value.c   ... its strings, numbers and enumerated values
 * grammar_tools.c   calls of tools -> IR
 * grammar_ir.c      the IR's builder: expressions over code points and bytes, rules
 * grammar_nfa.c     IR -> NFA
 * grammar_lang.c    questions about regular languages, and restrictions of them
 * grammar_dfa.c     NFA -> one automaton per rule, and its analysis
 * grammar_match.c   the matcher: states of the pushdown automaton, met and remembered
 * grammar_mask.c    vocabulary tries and token masks
 *
 * The way of a source: a front end builds expressions; each rule that is called becomes a
 * deterministic automaton over bytes whose edges may also call rules (recursive
 * transition networks, Woods 1970). A matcher follows all ways at once: a set of items,
 * each a state and a stack, the stacks shared like those of Tomita's parser (1985). These
 * sets are remembered with their transitions, so that in the long run a byte costs one
 * look-up. */
/* clang-format off */      /* fields and their comments are aligned by hand */
#ifndef HX_GRAMMAR_IR_H
#define HX_GRAMMAR_IR_H

#include "text/grammar.h"

#define HX_IR_NO_END UINT32_MAX      /* bound of a repetition without one */

/* ---- IR -------------------------------------------------------------- */

/* A growable array; p by hx_ir_grow(). */
#define HX_VEC(T) struct { T *p; uint32_t n, cap; }
/* Appends count zeroed elements; false: out of memory, and the error is set. */
#define HX_PUSH(ir, v, count)                                                            \
    ((v).p = hx_ir_grow(ir, (v).p, &(v).n, &(v).cap, sizeof(*(v).p), count),             \
     (ir)->rc == 0)

/* Appends one element; not after an error. */
#define HX_ADD(ir, v, ...)                                                               \
    do {                                                                                 \
        if (HX_PUSH(ir, v, 1))                                                           \
            (v).p[(v).n - 1] = (__VA_ARGS__);                                            \
    } while (0)

typedef HX_VEC(uint8_t) hx_u8s;
typedef HX_VEC(uint32_t) hx_u32s;
typedef HX_VEC(uint64_t) hx_u64s;

/* Frees a growable array. */
#define HX_DROP(ir, v) ((ir)->bytes -= (v).cap * sizeof(*(v).p), hx_free((v).p))

/* An expression, by its index. */
typedef uint32_t hx_ref;
typedef HX_VEC(hx_ref) hx_refs;
#define HX_NONE  ((hx_ref)0)         /* matches nothing */
#define HX_EMPTY ((hx_ref)1)         /* matches the empty text */

typedef enum {
    HX_IR_NONE, HX_IR_EMPTY,
    HX_IR_LIT,                       /* bytes [a, a + b) */
    HX_IR_SET,                       /* one of the code points in ranges [a, a + b) */
    HX_IR_SEQ, HX_IR_ALT,            /* children [a, a + b) */
    HX_IR_REP,                       /* child a, b to c times, expanded in place */
    HX_IR_CALL,                      /* rule a, on the stack */
    HX_IR_GOTO,                      /* rule a, in place: only as the last of everything, so
                                      * that a set of such rules is a regular language */
    HX_IR_TOKEN                      /* token id a */
} hx_ir_kind;

typedef struct { uint32_t lo, hi; } hx_range;
typedef HX_VEC(hx_range) hx_ranges;

typedef struct {
    uint8_t  kind;
    bool     json;                   /* SET: spelled as in a JSON string */
    uint32_t a, b, c;
    uint32_t size;                   /* NFA states it takes, about; saturates */
} hx_ir_node;

/* A counted rule matches rule `child` min to max times. One in any order matches the max
 * rules from `child` on, each at most once and in whatever order; bits of min tell which
 * must come; with `again` the last of them may come any number of times. Others match
 * body. */
typedef struct {
    hx_ref   body;
    bool     counted, any_order, again;
    uint32_t child, min, max;
    hx_str   name;                   /* for messages; {NULL, 0}: none */
} hx_ir_rule;

typedef struct {
    hx_grammar_opt opt;              /* with the defaults filled in */
    const hx_vocab *vocab;           /* or NULL: nothing has a token id */
    bool     no_schemas;             /* tools: but for strict ones arguments are free */
    hx_err  *err;
    int      rc;                     /* sticky */
    uint64_t steps;
    size_t   bytes;                  /* of all arrays */
    HX_VEC(hx_ir_node) node;
    hx_refs   list;
    hx_ranges range;
    HX_VEC(char) text;
    HX_VEC(hx_ir_rule) rule;
    /* Rules of JSON, 0: not made yet. A character of a string; any string, any but ""; any
     * value. */
    uint32_t text_rule, string_rule, word_rule, value_rule, object_rule, array_rule;
} hx_ir;

void hx_ir_init(hx_ir *ir, const hx_grammar_opt *opt, hx_err *err);
void hx_ir_free(hx_ir *ir);

/* The first error stays; returns ir->rc. */
int  hx_ir_fail(hx_ir *ir, int code, const char *fmt, ...) HX_PRINTF(3, 4);
/* "more than 65536 states (limit states)". */
int  hx_ir_over(hx_ir *ir, const char *limit);
/* Counts work; false: too much, or an earlier error. */
bool hx_ir_work(hx_ir *ir, uint64_t n);
void *hx_ir_grow(hx_ir *ir, void *p, uint32_t *n, uint32_t *cap, size_t size, uint32_t count);

/* After an error these return HX_NONE. */
hx_ref hx_ir_lit(hx_ir *ir, const char *p, size_t n);
hx_ref hx_ir_str(hx_ir *ir, const char *s);
/* Sorts and merges r in place; surrogates are left out. */
hx_ref hx_ir_set(hx_ir *ir, hx_range *r, size_t n, bool json);
hx_ref hx_ir_char(hx_ir *ir, uint32_t cp, bool json);
hx_ref hx_ir_seq(hx_ir *ir, const hx_ref *child, size_t n);
hx_ref hx_ir_alt(hx_ir *ir, const hx_ref *child, size_t n);
#define HX_SEQ(ir, ...)                                                                  \
    hx_ir_seq(ir, (hx_ref[]){ __VA_ARGS__ }, sizeof((hx_ref[]){ __VA_ARGS__ }) / sizeof(hx_ref))
#define HX_ALT(ir, ...)                                                                  \
    hx_ir_alt(ir, (hx_ref[]){ __VA_ARGS__ }, sizeof((hx_ref[]){ __VA_ARGS__ }) / sizeof(hx_ref))
/* How a repetition is kept: written out, so that the result is regular; counted while
 * matching; or as its size suggests. */
typedef enum { HX_REP_EXPAND, HX_REP_COUNT, HX_REP_AUTO } hx_rep_how;
hx_ref hx_ir_rep(hx_ir *ir, hx_ref child, uint32_t min, uint32_t max, hx_rep_how how);
hx_ref hx_ir_opt(hx_ir *ir, hx_ref child);
hx_ref hx_ir_call(hx_ir *ir, uint32_t rule);
hx_ref hx_ir_goto(hx_ir *ir, uint32_t rule);
hx_ref hx_ir_token(hx_ir *ir, int32_t id);
enum { HX_ANY_ORDER_MAX = 31 };
/* The n children in any order; bits of must tell which have to come. again, unless
 * HX_NONE, may come any number of times between them. */
hx_ref hx_ir_any_order(hx_ir *ir, const hx_ref *child, uint32_t n, uint32_t must,
                       hx_ref again);
uint32_t hx_ir_rule_new(hx_ir *ir, hx_str name);          /* body: HX_NONE until set */
uint32_t hx_ir_rule_of(hx_ir *ir, hx_ref body);           /* without a name */

size_t hx_range_norm(hx_range *r, size_t n);              /* sorted, disjoint, not touching */
/* out [n + 1]: all other code points. r is normal. */
size_t hx_range_invert(const hx_range *r, size_t n, hx_range *out);

/* ---- front ends ------------------------------------------------------ */

/* A source in UTF-8 and a place in it. */
typedef struct { const char *p; size_t n, i; } hx_scan;

/* The byte so far ahead, -1 past the end. */
static inline int hx_scan_peek(const hx_scan *s, size_t ahead)
{
    return s->i + ahead < s->n ? (uint8_t)s->p[s->i + ahead] : -1;
}

bool hx_scan_eat(hx_scan *s, const char *lit);            /* true: it stood here and is read */
bool hx_scan_number(hx_scan *s, uint32_t *out);           /* decimal; at most HX_IR_NO_END - 1 */
/* The set of a class, which is used up; invert: of all other characters. */
hx_ref hx_ir_class(hx_ir *ir, hx_ranges *set, bool invert, bool json);
/* Both bounds of a quantifier are within the limit, or the error is set. */
void hx_ir_check_repeat(hx_ir *ir, uint32_t min, uint32_t max);

/* json: the text is the inside of a JSON string. search: the expression may match
 * anywhere in the text unless anchored, as "pattern" of JSON schema does. */
hx_ref hx_regex_parse(hx_ir *ir, hx_str source, bool json, bool search);
hx_ref hx_ebnf_parse(hx_ir *ir, hx_str source);
hx_ref hx_schema_parse(hx_ir *ir, hx_str source);
hx_ref hx_schema_value(hx_ir *ir, const hx_json *root);
/* What stands before and behind the names and values of arguments. */
typedef struct { hx_ref key, key_end, value, value_end; } hx_schema_tags;
/* The members of an object of the schema as tagged pairs, in any order. */
hx_ref hx_schema_pairs(hx_ir *ir, const hx_json *root, const hx_schema_tags *t);
/* Looks for what would make parsing itself slow: depth, and elements by the hundred
 * thousand. false: the error is set. */
bool hx_schema_is_small(hx_ir *ir, hx_str text);
/* A source of any kind (grammar.c). */
hx_ref hx_grammar_parse(hx_ir *ir, hx_grammar_kind kind, hx_str source);
/* Calls of tools: grammar_tools.c says what the source holds. */
hx_ref hx_tools_parse(hx_ir *ir, hx_str source);

/* Expressions of JSON, shared by the front ends. */
hx_ref hx_json_any(hx_ir *ir);                            /* any value */
hx_ref hx_json_object(hx_ir *ir);                         /* any object */
hx_ref hx_json_array(hx_ir *ir);                          /* any array */
hx_ref hx_json_string(hx_ir *ir, uint32_t min, uint32_t max);   /* with its quotes */
hx_ref hx_json_name(hx_ir *ir, hx_str name);              /* as in a string, unquoted */
hx_ref hx_json_comma(hx_ir *ir);                          /* and what may follow it */
hx_ref hx_json_colon(hx_ir *ir);
hx_ref hx_json_literal(hx_ir *ir, const hx_json *v);      /* this very value */
hx_ref hx_json_number(hx_ir *ir);
hx_ref hx_json_integer(hx_ir *ir);

/* A decimal number: sign and value 0.d1d2d3... * 10^exp, d1 and the last digit not 0. As a
 * bound it may be strict. */
typedef struct { char digit[40]; int n, exp; bool negative, strict; } hx_decimal;
/* false: over 40 digits, or no memory. */
bool hx_decimal_read(hx_ir *ir, hx_decimal *d, const hx_json *number);
int  hx_decimal_cmp(const hx_decimal *a, const hx_decimal *b);
/* Numbers between two bounds, either may be NULL, with at most frac digits behind the
 * point; with frac 0 only multiples of mod, from 1 to 100. */
hx_ref hx_json_range(hx_ir *ir, const hx_decimal *lo, const hx_decimal *hi, int frac,
                     uint32_t mod);
/* The regular expression of a format, or NULL. */
const char *hx_json_format(hx_str name);

/* ---- NFA ------------------------------------------------------------- */

typedef enum { HX_E_EPS, HX_E_BYTE, HX_E_SET, HX_E_CALL, HX_E_TOKEN } hx_edge_kind;

/* to: a state. a: SET the node, CALL the rule, TOKEN the id. next: another edge of the same
 * state, 0: none. */
typedef struct { uint32_t to, next, a; uint8_t kind, lo, hi; } hx_nfa_edge;
typedef struct { uint64_t key; uint32_t state; } hx_nfa_memo;

typedef struct {
    hx_ir *ir;
    bool   chars;                    /* edges are sets of code points, not bytes */
    uint32_t start, final;
    hx_u32s state;                   /* its first edge, 0: none */
    HX_VEC(hx_nfa_edge) edge;        /* [0] is not used */
    HX_VEC(hx_nfa_memo) memo;        /* hash table; state 0: free */
    uint32_t n_memo;
    hx_u32s todo;                    /* rules gone to: rule, continuation, state */
} hx_nfa;

void hx_nfa_init(hx_nfa *nfa, hx_ir *ir, bool chars);
void hx_nfa_free(hx_nfa *nfa);
int  hx_nfa_build(hx_nfa *nfa, hx_ref root);     /* replaces what was built before */

/* Questions about expressions made of sets alone (hx_regex_parse()). */
bool hx_lang_matches(hx_ir *ir, hx_ref e, hx_str text);
bool hx_lang_disjoint(hx_ir *ir, hx_ref e, hx_ref f);
/* The texts of e that have min to max characters. */
hx_ref hx_lang_length(hx_ir *ir, hx_ref e, uint32_t min, uint32_t max);
/* The texts of e that are none of words[n]. */
hx_ref hx_lang_without(hx_ir *ir, hx_ref e, const hx_str *words, size_t n);

/* ---- automaton ------------------------------------------------------- */

#define HX_NEVER UINT16_MAX          /* no end is reached from here */
enum { HX_ROOM_MAX = 24 };

typedef struct { uint32_t to; uint8_t lo, hi; } hx_byte_edge;
typedef struct { uint32_t rule, ret; bool tail; } hx_call_edge;    /* tail: ret only ends */
typedef struct { int32_t id; uint32_t to; } hx_token_edge;

typedef struct {
    uint32_t byte, n_byte, call, n_call, token, n_token;
    uint32_t rule;                   /* counted or in any order: the rule, else
                                      * HX_IR_NO_END */
    uint16_t need;                   /* frames that the shortest way to the end takes */
    bool     final;
    uint8_t  room;                   /* so many characters of plain text (grammar_dfa.c)
                                      * can be taken, whatever they are; HX_ROOM_MAX: or
                                      * more */
    bool     no_text;                /* none can be taken */
} hx_dfa_state;

typedef struct {
    uint32_t start;
    bool     nullable, counted, any_order, again;
    uint32_t child, min, max;        /* counted or in any order: as in the IR */
} hx_dfa_rule;

typedef struct {
    HX_VEC(hx_dfa_state)  state;
    HX_VEC(hx_byte_edge)  byte;
    HX_VEC(hx_call_edge)  call;
    HX_VEC(hx_token_edge) token;
    HX_VEC(hx_dfa_rule)   rule;      /* by the rule's index in the IR */
    uint32_t root;                   /* rule */
    uint32_t text_state;             /* start of the text rule; HX_IR_NO_END: none */
} hx_dfa;

int  hx_dfa_build(hx_dfa *d, hx_ir *ir, uint32_t root);
void hx_dfa_free(hx_dfa *d);

/* ---- vocabulary ------------------------------------------------------ */

enum { HX_TOKEN_BYTES_MAX = 512 };

/* Nodes in depth-first order; a subtree is [i, skip). */
typedef struct { uint32_t skip; int32_t token; uint16_t depth; uint8_t byte, twins; } hx_trie_node;
typedef struct { hx_trie_node *p; uint32_t n; } hx_trie;

struct hx_vocab {
    hx_str  *bytes;                  /* [n_token] */
    uint8_t *kind;                   /* [n_token] HX_TOKEN_* */
    int32_t *twin;                   /* [n_token] next id with the same bytes, or -1 */
    int32_t *end;
    int32_t  n_token, n_vocab, n_end;
    uint32_t n_word;                 /* of a mask */
    hx_trie  all, rest;              /* rest: without those in plain */
    uint32_t *plain;                 /* [HX_ROOM_MAX + 1][n_word] tokens of plain text of at
                                      * most that many characters */
};
enum { HX_TOKEN_NONE, HX_TOKEN_TEXT, HX_TOKEN_SPECIAL, HX_TOKEN_END };

/* ---- matcher --------------------------------------------------------- */

/* Ids of remembered states. */
enum { HX_CFG_UNKNOWN, HX_CFG_DEAD, HX_CFG_FULL, HX_CFG_FIRST };

typedef struct { uint32_t state, frame; } hx_item;
/* Return to state ret with count (its rule's turns so far). frame 0 is the bottom. */
typedef struct { uint32_t ret, count, parent, mark; uint16_t depth, place; } hx_frame;
typedef struct {
    uint32_t hash, item, mask;       /* mask: slot + 1, 0: none */
    uint16_t n_item;
    bool     complete;
} hx_config;
typedef struct { uint64_t key; uint32_t mark, count; bool open; } hx_seen;
typedef struct { uint32_t state, frame, count; } hx_arrival;

enum { HX_SEEN_MAX = 4096, HX_SEEN_SLOTS = 2 * HX_SEEN_MAX };

struct hx_grammar {
    hx_dfa   dfa;
    const hx_vocab *vocab;
    hx_grammar_opt  opt;
    uint32_t n_class;
    uint8_t  class_of[256];          /* bytes that no edge tells apart share a class */
    bool     has_tokens;             /* some edge takes a token */

    /* The cache, one mapping. All of it is forgotten when some part is full. */
    void     *map;
    size_t    map_bytes;
    uint32_t  epoch;
    hx_frame *frame;
    hx_item  *item;
    hx_config *cfg;
    uint32_t *next;                  /* [cfg][n_class] */
    uint32_t *frame_slot, *cfg_slot; /* hash tables */
    uint32_t  n_frame, n_item, n_cfg, cap_frame, cap_item, cap_cfg;
    uint32_t *mask, *mask_owner;     /* [n_mask][n_word], [n_mask] */
    uint32_t  n_mask, next_mask;

    /* Scratch of one transition. */
    hx_seen   *seen;                 /* [HX_SEEN_SLOTS] */
    uint32_t   mark, frame_mark, n_seen;
    uint64_t   work;                 /* arrivals since the mask at hand was begun */
    hx_arrival *todo;                /* [HX_SEEN_MAX] */
    uint32_t   n_todo;
    hx_item   *out;                  /* [HX_SEEN_MAX] */
    uint32_t   n_out;
    bool       complete, overflow;
    hx_matcher *spare;
};

int      hx_grammar_cache_open(hx_grammar *g, hx_err *err);
void     hx_grammar_cache_close(hx_grammar *g);
/* The id of m's state, with half of the cache free. */
uint32_t hx_grammar_cache_config(hx_matcher *m);
/* The state after a byte, HX_CFG_DEAD, or HX_CFG_FULL: it could not be remembered. */
uint32_t hx_grammar_cache_step(hx_grammar *g, uint32_t cfg, uint8_t byte);
/* The state after a token that the grammar names, or after its bytes (by_bytes). */
uint32_t hx_grammar_cache_token(hx_grammar *g, uint32_t cfg, uint32_t by_bytes, int32_t id);
/* Forgets everything but this state; its new id. */
uint32_t hx_grammar_cache_renew(hx_grammar *g, uint32_t cfg);

static inline uint32_t hx_grammar_cache_next(hx_grammar *g, uint32_t cfg, uint8_t byte)
{
    const uint32_t to = g->next[(size_t)cfg * g->n_class + g->class_of[byte]];

    return to != HX_CFG_UNKNOWN ? to : hx_grammar_cache_step(g, cfg, byte);
}

#endif
