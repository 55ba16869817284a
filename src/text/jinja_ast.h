/* jinja_ast.h - what the files of the template interpreter share: values, the syntax
 * tree, and the machine that runs it. Private to src/text/jinja*.c.
 *
 * jinja_parse.c  source -> tree, all errors of form
 * jinja.c        the public calls, scopes, statements, expressions
 * jinja_val.c    strings with marks, containers, str(), repr(), JSON, comparison
 * jinja_text.c   Python's str: case, strip, split, and the table of its methods
 * jinja_call.c   filters, tests, other methods and global functions: one table each
 * jinja_format.c "%" formatting, str.format and strftime
 *
 * Meaning follows jinja2 3.1 on Python 3.11 as HuggingFace sets it up (immutable sandbox,
 * trim_blocks, lstrip_blocks, loop controls). Values never change once made, except
 * namespaces, so they are shared freely and cannot form cycles except through those.
 * All memory of a run comes from one capped arena and goes at its end. */
#ifndef HX_JINJA_AST_H
#define HX_JINJA_AST_H

#include "text/text.h"

#define HX_J_SOURCE_MAX ((size_t)4 << 20)  /* bytes of a template */
#define HX_J_MEM_MAX    ((size_t)32 << 20) /* bytes of a tree; of values in one run … */
#define HX_J_MEM_OUT    8                  /* … and as many more per byte of output */
#define HX_J_DEPTH_MAX  600                /* nesting of running constructs, of data */
#define HX_J_NEST_MAX   300                /* nesting in the source, per construct */
#define HX_J_MACRO_MAX  100                /* macros inside macros, running */
#define HX_J_ARGS_MAX   5                  /* named parameters of a builtin */

typedef struct hx_jvm hx_jvm;
typedef struct hx_jval hx_jval;
typedef struct hx_jnode hx_jnode;
typedef struct hx_jbuiltin hx_jbuiltin;

/* ---- values ---------------------------------------------------------- */

typedef enum {
    HX_J_ABSENT, /* no value at all: an argument not given, a slot not set */
    HX_J_UNDEF,
    HX_J_NONE,
    HX_J_BOOL,
    HX_J_INT,
    HX_J_FLOAT,
    HX_J_BIG, /* an integer over 64 bits from vars: carried, not calculated with */
    HX_J_STR,
    HX_J_LIST,
    HX_J_TUPLE,
    HX_J_DICT,
    HX_J_RANGE,
    HX_J_VIEW,
    HX_J_GEN,
    HX_J_SPACE,
    HX_J_MACRO,
    HX_J_FUNC,
    HX_J_METHOD,
    HX_J_LOOP
} hx_jtype;

/* Why a value is undefined; decides the sentence when it is used. */
typedef enum { HX_J_NO_NAME, HX_J_NO_ATTR, HX_J_NO_ITEM, HX_J_HINT } hx_jwhy;
typedef enum { HX_J_ITEMS, HX_J_KEYS, HX_J_VALUES } hx_jview;

/* UTF-8 text. A uniform string needs no marks. */
typedef struct {
    const char *p;
    size_t n, len;        /* bytes, code points */
    const uint8_t *mark;  /* [n] nonzero: from vars; NULL: all bytes are `user` */
    struct hx_jbuf *tail; /* buffer whose contents this is, or NULL */
    bool user;
    bool safe; /* went through `safe` or `escape`: "+" escapes its partner */
} hx_jstr;

typedef struct {
    const hx_jval *v;
    size_t n;
} hx_jseq;
typedef struct {
    int64_t start, step;
    size_t n;
    int64_t stop;
} hx_jrange;

struct hx_jval {
    uint8_t t;   /* hx_jtype */
    uint8_t why; /* UNDEF: hx_jwhy; VIEW: hx_jview */
    uint8_t of;  /* UNDEF: hx_jtype that lacks it */
    union {
        bool b;
        int64_t i; /* also UNDEF with NO_ITEM */
        double d;
        const hx_jstr *s;   /* also BIG; UNDEF: the name, or the sentence (HINT) */
        const hx_jseq *q;   /* LIST, TUPLE, VIEW */
        struct hx_jdict *m; /* DICT, SPACE */
        const hx_jrange *r;
        struct hx_jgen *g;
        const struct hx_jmacro *mac;
        const hx_jbuiltin *fn;
        const struct hx_jmethod *met;
        struct hx_jloop *loop;
    } u;
};

typedef struct {
    hx_jval k, v;
} hx_jpair;

/* Insertion order. order: positions sorted by key bytes, made at the first look-up in a
 * large dict all of whose keys are strings: no hash that a stranger could attack. */
typedef struct hx_jdict {
    hx_jpair *e;
    size_t n, cap;
    uint32_t *order;
    size_t n_order;
} hx_jdict;

/* i counts elements; bytes for strings. */
typedef struct {
    hx_jval src;
    size_t i;
} hx_jiter;

/* A lazy, single-pass sequence, as Python's generators are. */
typedef struct hx_jgen {
    int (*next)(hx_jvm *vm, struct hx_jgen *g, hx_jval *out); /* 1, 0: end, or an error */
    hx_jiter it;
    bool begun;
    void *state;
} hx_jgen;

typedef struct hx_jmethod {
    hx_jval self;
    const hx_jbuiltin *fn;
} hx_jmethod;

/* ---- syntax tree ----------------------------------------------------- */

typedef enum {
    /* expressions              a, b, c */
    HX_N_CONST, /*  val */
    HX_N_NAME,  /*  sym; as a macro parameter a is its default */
    HX_N_BODY,  /*  what a block filter or block set captured */
    HX_N_LIST,
    HX_N_TUPLE, /*  a: items, linked by next; n of them */
    HX_N_DICT,  /*  a: key, value, key, value …; n pairs */
    HX_N_NOT,
    HX_N_NEG,
    HX_N_POS,
    HX_N_AND,
    HX_N_OR,
    HX_N_BIN,     /*  op */
    HX_N_COMPARE, /*  a: first operand; b: list of OPERAND */
    HX_N_OPERAND, /*  op, a */
    HX_N_COND,    /*  a if b else c */
    HX_N_ATTR,    /*  a . val */
    HX_N_ITEM,    /*  a [ b ] */
    HX_N_SLICE,   /*  a [ b ], b a SLICE3 */
    HX_N_SLICE3,  /*  a:b:c, any may be NULL */
    HX_N_CALL,    /*  a ( b ), b: list of arguments, KEYWORD last */
    HX_N_KEYWORD, /*  val = a */
    HX_N_FILTER,  /*  a | fn ( b ); fn NULL: val names it, unknown */
    HX_N_TEST,    /*  a is fn ( b ) */
    /* statements */
    HX_N_TEXT,         /*  val */
    HX_N_PRINT,        /*  a */
    HX_N_IF,           /*  a: test; body; els */
    HX_N_FOR,          /*  a: target; b: iterated; c: test; body; els */
    HX_N_SET,          /*  a: target; b: value */
    HX_N_SET_BLOCK,    /*  a: target; b: filters around BODY; body */
    HX_N_NS_TARGET,    /*  sym . val */
    HX_N_MACRO,        /*  sym; val: name; a: parameters, n of them; flag: caller */
    HX_N_CALL_BLOCK,   /*  as MACRO without a name; b: the call */
    HX_N_FILTER_BLOCK, /*  a: filters around BODY; body */
    HX_N_WITH,         /*  a: targets; b: values; body */
    HX_N_SCOPE,        /*  body */
    HX_N_BREAK,
    HX_N_CONTINUE
} hx_jkind;

typedef enum {
    HX_OP_ADD,
    HX_OP_SUB,
    HX_OP_MUL,
    HX_OP_DIV,
    HX_OP_FLOORDIV,
    HX_OP_MOD,
    HX_OP_POW,
    HX_OP_CAT,
    HX_OP_EQ,
    HX_OP_NE,
    HX_OP_LT,
    HX_OP_LE,
    HX_OP_GT,
    HX_OP_GE,
    HX_OP_IN,
    HX_OP_NOT_IN
} hx_jop;

struct hx_jnode {
    uint8_t kind, op; /* hx_jkind, hx_jop */
    bool flag;
    uint16_t depth; /* of the tree below, itself included */
    int line;
    uint32_t sym, n;
    hx_jnode *a, *b, *c, *body, *els, *next;
    hx_jval val;
    const hx_jbuiltin *fn;
};

/* Symbols that the interpreter itself sets. */
enum { HX_J_SYM_LOOP, HX_J_SYM_CALLER };

struct hx_jinja {
    hx_arena mem;
    char *name;
    hx_jnode *body;
    hx_str *sym; /* [n_sym] names; ids are indices */
    uint32_t n_sym, cap_sym;
};

/* ---- the machine ----------------------------------------------------- */

typedef struct {
    uint32_t sym;
    hx_jval v;
} hx_jslot;

typedef struct hx_jframe {
    struct hx_jframe *up;
    hx_jslot *slot;
    uint32_t n, cap;
    bool captured; /* a macro refers to it: must not be reused */
} hx_jframe;

/* The machine that parses has only memory, name, line and error. */
struct hx_jvm {
    const hx_jinja *t;
    hx_arena *mem;
    hx_err *err;
    const char *name;
    int line, depth, n_macro;
    int64_t steps, max_steps, now_s;
    bool track;       /* somebody asked for marks */
    hx_jval *root;    /* [n_sym] variables of the outermost scope */
    hx_jframe *frame; /* innermost scope, NULL at the top */
    struct hx_jbuf *out;
    hx_jval body; /* what BODY stands for */
};

typedef struct hx_jmacro {
    const hx_jnode *def;
    hx_jframe *scope;
} hx_jmacro;

typedef struct hx_jloop {
    hx_jiter it;
    const hx_jnode *def;
    hx_jframe *scope;
    hx_jval prev, cur, peek, changed;
    int64_t index0, n; /* n -1: not known yet */
    bool ended;
    bool tested; /* what it still holds has passed the test already */
} hx_jloop;

typedef struct {
    const hx_jval *v; /* [n], then [n_key] values of keywords */
    size_t n, n_key;
    const hx_jstr **key;
} hx_jargs;

typedef struct {
    hx_jval self;
    hx_jval a[HX_J_ARGS_MAX]; /* bound to the names of the builtin; ABSENT if not given */
    const hx_jargs *raw;
    int arg; /* of the builtin */
} hx_jcall;

/* params: names in order, "?" after optional ones; "*": the function reads raw itself. fn
 * NULL: known and refused, params says why. */
struct hx_jbuiltin {
    const char *name;
    int (*fn)(hx_jvm *vm, const hx_jcall *c, hx_jval *out);
    const char *params;
    int arg; /* tells functions apart that share fn */
};

/* "name:line: …" in vm->err. */
int hx_jvm_fail(hx_jvm *vm, int code, const char *fmt, ...) HX_PRINTF(3, 4);
void *hx_jvm_alloc(hx_jvm *vm, size_t n, size_t size); /* NULL: vm->err is filled */
int hx_jvm_work(hx_jvm *vm, size_t units);             /* counts steps */
int hx_jvm_enter(hx_jvm *vm);                          /* pairs with vm->depth-- */

/* Source to tree: fills t->body and the symbols. */
int hx_jinja_parse(hx_jinja *t, hx_str source, hx_err *err);

/* ---- jinja_val.c ----------------------------------------------------- */

/* Growable text in the arena; a failure stays in rc and is reported by hx_jbuf_done(). */
typedef struct hx_jbuf {
    hx_jvm *vm;
    char *p;
    uint8_t *mark;
    size_t n, cap, max; /* max 0: no bound */
    bool user;
    int rc;
} hx_jbuf;

void hx_jbuf_add(hx_jbuf *b, const char *p, size_t n, const uint8_t *mark, bool user);
void hx_jbuf_lit(hx_jbuf *b, const char *s);
void hx_jbuf_pad(hx_jbuf *b, char c, size_t n);
void hx_jbuf_sub(hx_jbuf *b, const hx_jstr *s, size_t off, size_t n);
void hx_jbuf_put(hx_jbuf *b, const hx_jstr *s);
/* One code point with the mark of byte off of s. */
void hx_jbuf_cp(hx_jbuf *b, uint32_t cp, const hx_jstr *s, size_t off);
int hx_jbuf_done(hx_jbuf *b, hx_jval *out);
int hx_jbuf_done_safe(hx_jbuf *b, bool safe, hx_jval *out);

int hx_jstr_new(hx_jvm *vm, const char *p, size_t n, bool user, hx_jval *out);
int hx_jstr_copy(hx_jvm *vm, const char *p, size_t n, hx_jval *out);
int hx_jstr_sub(hx_jvm *vm, const hx_jstr *s, size_t off, size_t n, hx_jval *out);
int hx_jstr_cat(hx_jvm *vm, const hx_jstr *a, const hx_jstr *b, hx_jval *out);
int hx_jstr_safe(hx_jvm *vm, const hx_jstr *s, hx_jval *out);
int hx_jstr_escape(hx_jvm *vm, const hx_jstr *s, hx_jval *out);
bool hx_jstr_eq(const hx_jstr *a, const hx_jstr *b);
bool hx_jstr_is(const hx_jstr *a, const char *b);
int hx_jstr_order(const hx_jstr *a, const hx_jstr *b);
/* Byte position of code point i (at most len). */
int hx_jstr_seek(hx_jvm *vm, const hx_jstr *s, size_t i, size_t *off);
/* First (last: rev) place of sub in [from, to), or SIZE_MAX. */
size_t hx_jstr_find(const hx_jstr *s, const hx_jstr *sub, size_t from, size_t to,
                    bool rev);
uint32_t hx_jstr_cp(const hx_jstr *s, size_t off, size_t *n);
bool hx_jinja_is_space(uint32_t cp);

static inline hx_jval hx_jnone(void)
{
    return (hx_jval) { .t = HX_J_NONE };
}
static inline hx_jval hx_jbool(bool b)
{
    return (hx_jval) { .t = HX_J_BOOL, .u.b = b };
}
static inline hx_jval hx_jint(int64_t i)
{
    return (hx_jval) { .t = HX_J_INT, .u.i = i };
}
static inline hx_jval hx_jfloat(double d)
{
    return (hx_jval) { .t = HX_J_FLOAT, .u.d = d };
}

const char *hx_jval_type(hx_jval v); /* Python's name of its type */
bool hx_jval_truthy(hx_jval v);
bool hx_jval_is_num(hx_jval v); /* bool, int, float */
bool hx_jval_is_int(hx_jval v); /* bool, int */
int64_t hx_jval_as_int(hx_jval v);
double hx_jval_as_double(hx_jval v);
int hx_jval_hint(hx_jvm *vm, const char *text,
                 hx_jval *out);                 /* undefined with that text */
int hx_jval_undef_error(hx_jvm *vm, hx_jval v); /* the error of using it */
int hx_jval_list(hx_jvm *vm, hx_jtype t, size_t n, hx_jval **items, hx_jval *out);
int hx_jval_str(hx_jvm *vm, hx_jval v, const hx_jstr **out); /* str() */
int hx_jval_repr_str(hx_jvm *vm, hx_jval v, const hx_jstr **out);
int hx_jval_repr(hx_jvm *vm, hx_jbuf *b, hx_jval v);
int hx_jval_len(hx_jvm *vm, hx_jval v, size_t *n);
int hx_jval_equal(hx_jvm *vm, hx_jval a, hx_jval b, bool *out);
int hx_jval_compare(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b, bool *out);
int hx_jval_contains(hx_jvm *vm, hx_jval in, hx_jval v, bool *out);
int hx_jval_from_json(hx_jvm *vm, const hx_json *j, hx_jval *out);
/* order[n] becomes positions of key sorted, stable. */
int hx_jval_sort(hx_jvm *vm, const hx_jval *key, size_t n, bool reverse, uint32_t *order);
hx_jval hx_jrange_at(const hx_jrange *r, size_t i);

typedef struct {
    bool ascii, sort;
    const hx_jstr *indent;     /* NULL: one line */
    const hx_jstr *item, *key; /* separators */
} hx_jdump;
int hx_jval_dump(hx_jvm *vm, hx_jbuf *b, const hx_jdump *o, hx_jval v, size_t level);

int hx_jdict_new(hx_jvm *vm, size_t cap, hx_jdict **out);
bool hx_jdict_hashable(hx_jval k);
int hx_jdict_get(hx_jvm *vm, hx_jdict *d, hx_jval k, hx_jval *out); /* 1 found, 0 not */
int hx_jdict_put(hx_jvm *vm, hx_jdict *d, hx_jval k, hx_jval v);

int hx_jiter_init(hx_jvm *vm, hx_jiter *it, hx_jval v);
int hx_jiter_next(hx_jvm *vm, hx_jiter *it, hx_jval *out); /* 1, 0: end, or an error */
/* All of v as a list. */
int hx_jiter_list(hx_jvm *vm, hx_jval v, const hx_jseq **out);

/* ---- jinja.c --------------------------------------------------------- */

int hx_jinja_attr(hx_jvm *vm, hx_jval obj, const hx_jstr *name,
                  hx_jval *out);                                       /* obj.name */
int hx_jinja_item(hx_jvm *vm, hx_jval obj, hx_jval key, hx_jval *out); /* obj[key] */
int hx_jinja_binary(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b, hx_jval *out);
int hx_jloop_peek(hx_jvm *vm, hx_jloop *l); /* fills l->peek unless ended */
int hx_jloop_len(hx_jvm *vm, hx_jloop *l, int64_t *n);

/* ---- jinja_text.c ---------------------------------------------------- */

typedef enum {
    HX_J_UPPER,
    HX_J_LOWER,
    HX_J_CAPITALIZE,
    HX_J_TITLE,    /* the filter: words end at white space and brackets */
    HX_J_STR_TITLE /* the method: words are runs of letters */
} hx_jcase;

extern const hx_jbuiltin hx_jtext_methods[]; /* ends with a NULL name */
int hx_jtext_want(hx_jvm *vm, hx_jval v, const char *what, const hx_jstr **out);
int hx_jtext_want_int(hx_jvm *vm, hx_jval v, const char *what, int64_t dflt,
                      int64_t *out);
int hx_jtext_case(hx_jvm *vm, const hx_jstr *s, hx_jcase to, hx_jval *out);
bool hx_jtext_all_case(const hx_jstr *s, bool upper);
int hx_jtext_strip(hx_jvm *vm, const hx_jstr *s, const hx_jstr *chars, bool left,
                   bool right, hx_jval *out);
int hx_jtext_replace(hx_jvm *vm, const hx_jstr *s, const hx_jstr *old, const hx_jstr *new,
                     int64_t count, hx_jval *out); /* count -1: all */
/* End of the line that starts at from; *after is where the next one starts. */
size_t hx_jtext_line(const hx_jstr *s, size_t from, size_t *after);

/* ---- jinja_call.c ---------------------------------------------------- */

const hx_jbuiltin *hx_jcall_filter(hx_str name); /* NULL: no such filter */
const hx_jbuiltin *hx_jcall_test(hx_str name);
const hx_jbuiltin *hx_jcall_global(hx_str name);
/* out: METHOD, or undefined where the sandbox refuses; 0 when the type has none such. */
int hx_jcall_method(hx_jvm *vm, hx_jval obj, const hx_jstr *name, hx_jval *out);
int hx_jcall_run(hx_jvm *vm, const hx_jbuiltin *fn, hx_jval self, const hx_jargs *args,
                 hx_jval *out);

/* ---- jinja_format.c -------------------------------------------------- */

int hx_jformat_percent(hx_jvm *vm, const hx_jstr *fmt, hx_jval arg, hx_jval *out);
int hx_jformat_braces(hx_jvm *vm, const hx_jstr *fmt, const hx_jargs *args, hx_jval *out);
int hx_jformat_time(hx_jvm *vm, const hx_jstr *fmt, hx_jval *out);

#endif
