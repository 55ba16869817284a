/* jinja_ast.h - what the files of the template interpreter share: values, the syntax
 * tree, and the machine that runs it. Private to src/text/jinja*.c.
 *
 * jinja_parse.c  source -> tree, all errors of form
 * jinja.c        the public calls, scopes, statements, expressions
 * jinja_val.c    values, and the table of filters, tests, methods and functions
 *
 * Meaning follows jinja2 3.1 on Python 3.11 as HuggingFace sets it up (immutable sandbox,
 * trim_blocks, lstrip_blocks, loop controls); letters change case one for one, but for
 * "ß". Values never change once made, except namespaces, so they are shared freely.
 * All memory of a run comes from one capped arena and goes at its end.
 *
 * The first error sticks in vm->rc; from then on everything is a harmless step towards
 * the end, so only loops and dereferences look at it. */
#ifndef HX_JINJA_AST_H
#define HX_JINJA_AST_H

#include "text/text.h"

#define HX_J_SOURCE_MAX ((size_t)4 << 20)  /* bytes of a template */
#define HX_J_MEM_MAX    ((size_t)32 << 20) /* bytes of a tree; of values in one run … */
#define HX_J_MEM_OUT    8                  /* … and as many more per byte of output */
#define HX_J_DEPTH_MAX  600                /* nesting of running constructs, of data */
#define HX_J_NEST_MAX   300                /* nesting in the source */
#define HX_J_MACRO_MAX  100                /* macros inside macros, running */
#define HX_J_ARGS_MAX   4                  /* named parameters of a builtin */
#define HX_J_SYM_MAX    4096               /* different names in a template */
#define HX_J_STEPS      50000000           /* hx_jinja_opt, where it does not say */
#define HX_J_OUT        ((size_t)64 << 20) /* … */

typedef struct hx_jvm hx_jvm;
typedef struct hx_jval hx_jval;
typedef struct hx_jnode hx_jnode;
typedef struct hx_jbuiltin hx_jbuiltin;

/* ---- values ---------------------------------------------------------- */

typedef enum {
    HX_J_ABSENT, /* no value at all: an argument not given, a name not set */
    HX_J_UNDEF,
    HX_J_NONE,
    HX_J_BOOL,
    HX_J_INT,
    HX_J_FLOAT,
    HX_J_BIG, /* an integer over 64 bits from vars: printed, not calculated with */
    HX_J_STR,
    HX_J_LIST,
    HX_J_TUPLE,
    HX_J_DICT,
    HX_J_VIEW, /* dict.items(), range(), generators: to iterate over, no more */
    HX_J_SPACE,
    HX_J_MACRO,
    HX_J_FUNC,
    HX_J_METHOD,
    HX_J_LOOP
} hx_jtype;

/* UTF-8 text. */
typedef struct {
    const char *p;
    size_t n;
    const uint8_t *mark;  /* [n] nonzero: from vars; NULL: all bytes are `user` */
    struct hx_jbuf *tail; /* buffer whose contents this is, or NULL */
    bool user;
    bool safe; /* went through `safe` or `escape`: "+" escapes its partner */
} hx_jstr;

/* A dict has its keys and values by turns, in the order of insertion. */
typedef struct {
    hx_jvm *vm; /* where it grows */
    hx_jval *v;
    size_t n, cap;
} hx_jlist;

struct hx_jval {
    uint8_t t;  /* hx_jtype */
    uint8_t of; /* UNDEF: hx_jtype that lacks s; ABSENT: s is a name that is not set */
    bool flag;  /* UNDEF: s is the whole complaint; VIEW: a generator, true and without
                 * length even when empty */
    union {
        int64_t i; /* INT, BOOL */
        double d;
        const hx_jstr *s;  /* STR, BIG, UNDEF */
        const hx_jlist *q; /* LIST, TUPLE, VIEW, DICT */
        hx_jlist *m;       /* SPACE: as a dict */
        const struct hx_jmacro *mac;
        const hx_jbuiltin *fn;
        const struct hx_jmethod *met;
        struct hx_jloop *loop;
    } u;
};

typedef struct hx_jmethod {
    hx_jval self;
    const hx_jbuiltin *fn;
} hx_jmethod;

/* ---- syntax tree ----------------------------------------------------- */

typedef enum {
    /* expressions              a, b, c */
    HX_N_CONST, /*  val */
    HX_N_NAME,  /*  sym; as a macro parameter val is its name, a its default */
    HX_N_BODY,  /*  what a block filter or block set captured */
    HX_N_LIST,
    HX_N_TUPLE, /*  a: items, linked by next; n of them */
    HX_N_DICT,  /*  a: key, value, key, value … */
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
    HX_N_SLICE,   /*  a [ b : c : els ], any but a may be NULL */
    HX_N_CALL,    /*  a ( b ), b: list of arguments, KEYWORD last */
    HX_N_KEYWORD, /*  val = a */
    HX_N_FILTER,  /*  a | fn ( b ); fn NULL: val names it, unknown */
    HX_N_TEST,    /*  a is fn ( b ) */
    /* statements */
    HX_N_PRINT,        /*  a */
    HX_N_IF,           /*  a: test; body; els */
    HX_N_FOR,          /*  a: target; b: iterated; c: test; body; els */
    HX_N_SET,          /*  a: target; b: value; op 1: b filters around BODY; body */
    HX_N_NS_TARGET,    /*  sym . val */
    HX_N_MACRO,        /*  sym; val: name; a: parameters, n of them; body */
    HX_N_FILTER_BLOCK, /*  b: filters around BODY; body */
    HX_N_BREAK,
    HX_N_CONTINUE,
    HX_N_COUNT
} hx_jkind;

typedef enum {
    HX_OP_ADD,
    HX_OP_SUB,
    HX_OP_MUL,
    HX_OP_DIV,
    HX_OP_FLOORDIV,
    HX_OP_MOD,
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
    int line;
    uint32_t sym, n;
    hx_jnode *a, *b, *c, *body, *els, *next;
    hx_jval val;
    const hx_jbuiltin *fn;
};

enum { HX_J_SYM_LOOP }; /* the symbol that the interpreter itself sets */

struct hx_jinja {
    hx_arena mem;
    char *name;
    hx_jnode *body;
    hx_str *sym; /* [n_sym] names; ids are indices */
    uint32_t n_sym;
    size_t cap_sym;
};

/* ---- the machine ----------------------------------------------------- */

typedef struct {
    uint32_t sym;
    hx_jval v;
} hx_jslot;

typedef struct hx_jframe {
    struct hx_jframe *up;
    hx_jslot *slot;
    size_t n, cap;
    bool captured; /* a macro refers to it: must not be reused */
} hx_jframe;

/* The machine that parses has only memory, name, line and error. */
struct hx_jvm {
    const hx_jinja *t;
    hx_arena *mem;
    hx_err *err;
    int rc; /* of the first error */
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
    const hx_jlist *q; /* what is iterated, at: the next of it to look at */
    size_t at;
    const hx_jnode *def, *test;
    hx_jframe *scope;
    hx_jval prev, cur, peek;
    int64_t index0;
} hx_jloop;

/* Fills vm->err with "name:line: …"; returns None, for callers that return a value. */
hx_jval hx_jvm_fail(hx_jvm *vm, int code, const char *fmt, ...) HX_PRINTF(3, 4);
void *hx_jvm_alloc(hx_jvm *vm, size_t n, size_t size); /* zeroed; NULL: vm->rc is set */
/* Room for item n of p[*cap]: p or a copy; NULL: vm->rc is set. */
void *hx_jvm_grow(hx_jvm *vm, void *p, size_t n, size_t *cap, size_t size);
bool hx_jvm_work(hx_jvm *vm, size_t units); /* counts steps; false: over */
bool hx_jvm_enter(hx_jvm *vm);              /* true: pairs with vm->depth-- */

/* Source to tree: fills t->body and the symbols. */
int hx_jinja_parse(hx_jinja *t, hx_str source, hx_err *err);

hx_jval hx_jinja_item(hx_jvm *vm, hx_jval obj, hx_jval key); /* obj[key] */
hx_jval hx_jinja_binary(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b);

/* ---- jinja_val.c: text ----------------------------------------------- */

/* Growable text in the arena. */
typedef struct hx_jbuf {
    hx_jvm *vm;
    char *p;
    uint8_t *mark;
    size_t n, cap, max; /* max 0: no bound */
    bool user;
} hx_jbuf;

bool hx_jbuf_reserve(hx_jbuf *b, size_t n);
void hx_jbuf_add(hx_jbuf *b, const char *p, size_t n, const uint8_t *mark, bool user);
void hx_jbuf_put(hx_jbuf *b, const hx_jstr *s);
hx_jval hx_jbuf_done(hx_jbuf *b, bool safe);

hx_jval hx_jstr_new(hx_jvm *vm, const char *p, size_t n, bool user); /* borrows p */
hx_jval hx_jstr_sub(hx_jvm *vm, const hx_jstr *s, size_t off, size_t n);
hx_jval hx_jstr_cat(hx_jvm *vm, const hx_jstr *a, const hx_jstr *b, bool safe);
hx_jval hx_jstr_escape(hx_jvm *vm, const hx_jstr *s);
bool hx_jstr_is(const hx_jstr *a, const char *b);
size_t hx_jstr_seek(hx_jvm *vm, const hx_jstr *s, size_t i); /* byte of code point i */
size_t hx_jstr_len(const hx_jstr *s, size_t off);            /* bytes of the one at off */
/* Where the code point that ends at at begins. */
size_t hx_jstr_before(const char *p, size_t at);
bool hx_jinja_is_space(uint32_t cp); /* str.isspace() */

/* ---- jinja_val.c: values --------------------------------------------- */

static inline hx_jval hx_jnone(void)
{
    return (hx_jval) { .t = HX_J_NONE };
}
static inline hx_jval hx_jbool(bool b)
{
    return (hx_jval) { .t = HX_J_BOOL, .u.i = b };
}
static inline hx_jval hx_jint(int64_t i)
{
    return (hx_jval) { .t = HX_J_INT, .u.i = i };
}
static inline hx_jval hx_jfloat(double d)
{
    return (hx_jval) { .t = HX_J_FLOAT, .u.d = d };
}
static inline hx_jval hx_jtext(const hx_jstr *s)
{
    return (hx_jval) { .t = HX_J_STR, .u.s = s };
}

void hx_jlist_add(hx_jlist *l, hx_jval v);
hx_jval hx_jlist_done(hx_jlist *l, hx_jtype t);
/* The value of key k in a dict; NULL: it has none. */
hx_jval *hx_jdict_find(hx_jvm *vm, const hx_jlist *d, hx_jval k);
void hx_jdict_put(hx_jlist *d, hx_jval k, hx_jval v);

const char *hx_jval_type(hx_jval v); /* Python's name of its type */
bool hx_jval_truthy(hx_jval v);
bool hx_jval_is_num(hx_jval v); /* bool, int, float */
bool hx_jval_is_int(hx_jval v); /* bool, int */
double hx_jval_as_double(hx_jval v);
hx_jval hx_jval_hint(hx_jvm *vm, const char *fmt, ...) HX_PRINTF(2, 3); /* undefined */
hx_jval hx_jval_misused(hx_jvm *vm, hx_jval undef); /* the error of using it */
const hx_jstr *hx_jval_str(hx_jvm *vm, hx_jval v);  /* str(); never NULL */
size_t hx_jval_len(hx_jvm *vm, hx_jval v);
const hx_jlist *hx_jval_seq(hx_jvm *vm, hx_jval v); /* all it iterates over; never NULL */
bool hx_jval_compare(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b);
hx_jval hx_jval_from_json(hx_jvm *vm, const hx_json *j);

/* ---- jinja_val.c: builtins ------------------------------------------- */

typedef struct {
    hx_jlist pos, named; /* named as a dict */
} hx_jargs;

typedef struct {
    hx_jval self;
    hx_jval a[HX_J_ARGS_MAX]; /* bound to the names of the builtin; ABSENT if not given */
    const hx_jargs *raw;
    bool filter; /* self came through "|" */
    int arg;     /* of the builtin */
} hx_jcall;

/* What a builtin may be called as. */
enum {
    HX_J_FILTER = 1,
    HX_J_TEST = 2,
    HX_J_GLOBAL = 4,
    HX_J_OF_STR = 8,
    HX_J_OF_DICT = 16,
    HX_J_AS_TEXT = 32, /* self is turned into text first */
    HX_J_ON_SAFE = 64  /* a method that has its plain meaning on safe text too */
};

struct hx_jbuiltin {
    const char *name; /* and others it goes by */
    hx_jval (*fn)(hx_jvm *vm, const hx_jcall *c);
    const char *params; /* in order, "?" after optional ones; "*": fn reads raw itself */
    uint8_t as;
    int arg; /* tells functions apart that share fn */
};

const hx_jbuiltin *hx_jcall_find(hx_str name, unsigned as); /* NULL: no such */
/* as: FILTER, TEST or 0. */
hx_jval hx_jcall_run(hx_jvm *vm, const hx_jbuiltin *fn, unsigned as, hx_jval self,
                     const hx_jargs *args);
/* true: *out is a METHOD. */
bool hx_jcall_method(hx_jvm *vm, hx_jval obj, const hx_jstr *name, hx_jval *out);

#endif
