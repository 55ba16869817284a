/* jinja.c - runs chat templates: the public calls, scopes, statements and expressions.
 *
 * Called by the engine (hx_render) and by tests. A compiled template is read-only and may
 * run on many threads at once; everything a run makes lives in its own machine. Never
 * guesses: what the subset does not define is an error with the template's name and line.
 */
#include <math.h>

#include "text/jinja_ast.h"

typedef enum { GO_ON, FLOW_BREAK, FLOW_CONTINUE } flow;

static hx_jval eval(hx_jvm *vm, const hx_jnode *n);
static flow exec_body(hx_jvm *vm, const hx_jnode *n);

/* ---- scopes ---------------------------------------------------------- */

static void frame_push(hx_jvm *vm, hx_jframe *up)
{
    hx_jframe *f = hx_jvm_alloc(vm, 1, sizeof *f);

    if (f == NULL)
        return;
    f->up = up;
    vm->frame = f;
}

static void set_name(hx_jvm *vm, uint32_t sym, hx_jval v)
{
    hx_jframe *f = vm->frame;
    size_t i = 0;

    if (f == NULL) {
        vm->root[sym] = v;
        return;
    }
    while (i < f->n && f->slot[i].sym != sym)
        i++;
    hx_jslot *s = hx_jvm_grow(vm, f->slot, i, &f->cap, sizeof *s);
    if (s == NULL)
        return;
    f->slot = s;
    f->slot[i] = (hx_jslot) { sym, v };
    f->n = HX_MAX(f->n, i + 1);
}

static hx_jval get_name(hx_jvm *vm, uint32_t sym)
{
    static const char *const REFUSED[] = { "cycler", "joiner", "lipsum" };
    const hx_str name = vm->t->sym[sym];
    hx_jval v = vm->root[sym];
    const hx_jframe *f = vm->frame;
    size_t i = 0;

    for (; f != NULL; f = f->up) {
        for (i = 0; i < f->n && f->slot[i].sym != sym;)
            i++;
        if (i < f->n)
            break;
    }
    if (f != NULL)
        v = f->slot[i].v;
    if (v.t != HX_J_ABSENT)
        return v;
    for (size_t k = 0; k < HX_LEN(REFUSED); k++) {
        if (hx_str_is(name, REFUSED[k]))
            return hx_jvm_fail(vm, HX_EUNSUP, "function \"%s\"", REFUSED[k]);
    }
    v = hx_jstr_new(vm, name.p, name.n, false);
    v.t = HX_J_UNDEF;
    return v;
}

/* Assigns to a name, a member of a namespace, or unpacks into a tuple of targets. */
static void assign(hx_jvm *vm, const hx_jnode *target, hx_jval v)
{
    size_t i = 0;

    if (target->kind == HX_N_NAME) {
        set_name(vm, target->sym, v);
    } else if (target->kind == HX_N_NS_TARGET) {
        const hx_jval space = get_name(vm, target->sym);
        if (space.t == HX_J_SPACE)
            hx_jdict_put(space.u.m, target->val, v);
        else
            hx_jvm_fail(vm, HX_EFORMAT,
                        "cannot assign attribute on non-namespace object");
    } else {
        const hx_jlist *q = hx_jval_seq(vm, v);
        if (q->n != target->n)
            hx_jvm_fail(vm, HX_EFORMAT, "cannot unpack %zu values to %u names", q->n,
                        target->n);
        for (const hx_jnode *t = target->a; t != NULL && i < q->n; t = t->next)
            assign(vm, t, q->v[i++]);
    }
}

/* ---- attributes, items, slices --------------------------------------- */

/* The next item that passes the loop's own test, or ABSENT. */
static hx_jval loop_pull(hx_jvm *vm, hx_jloop *l)
{
    hx_jframe *outer = vm->frame;
    const int line = vm->line;

    while (l->at < l->q->n && hx_jvm_work(vm, 1)) {
        const hx_jval v = l->q->v[l->at++];
        bool pass = true;
        if (l->test != NULL) {
            frame_push(vm, l->scope);
            assign(vm, l->def->a, v);
            pass = hx_jval_truthy(eval(vm, l->test));
            vm->frame = outer;
            vm->line = line;
        }
        if (pass)
            return v;
    }
    return (hx_jval) { .t = HX_J_ABSENT };
}

static hx_jval loop_peek(hx_jvm *vm, hx_jloop *l)
{
    if (l->peek.t == HX_J_ABSENT)
        l->peek = loop_pull(vm, l);
    return l->peek;
}

/* All turns there will be: what is left has to be tested now. */
static int64_t loop_len(hx_jvm *vm, hx_jloop *l)
{
    hx_jlist rest = { .vm = vm };
    hx_jval v;

    if (l->test != NULL) {
        while ((v = loop_pull(vm, l)).t != HX_J_ABSENT && vm->rc == 0)
            hx_jlist_add(&rest, v);
        l->q = hx_jval_seq(vm, hx_jlist_done(&rest, HX_J_LIST));
        l->at = 0;
        l->test = NULL;
    }
    return l->index0 + 1 + (l->peek.t != HX_J_ABSENT) + (int64_t)(l->q->n - l->at);
}

static hx_jval loop_attr(hx_jvm *vm, hx_jloop *l, const hx_jstr *name)
{
    hx_jval v;

    if (hx_jstr_is(name, "index0"))
        return hx_jint(l->index0);
    if (hx_jstr_is(name, "index"))
        return hx_jint(l->index0 + 1);
    if (hx_jstr_is(name, "first"))
        return hx_jbool(l->index0 == 0);
    if (hx_jstr_is(name, "last"))
        return hx_jbool(loop_peek(vm, l).t == HX_J_ABSENT);
    if (hx_jstr_is(name, "length"))
        return hx_jint(loop_len(vm, l));
    if (hx_jstr_is(name, "revindex"))
        return hx_jint(loop_len(vm, l) - l->index0);
    if (hx_jstr_is(name, "revindex0"))
        return hx_jint(loop_len(vm, l) - l->index0 - 1);
    if (!hx_jstr_is(name, "previtem") && !hx_jstr_is(name, "nextitem"))
        return hx_jvm_fail(vm, HX_EUNSUP, "loop.%.*s", (int)HX_MIN(name->n, 60), name->p);
    v = name->p[0] == 'n' ? loop_peek(vm, l) : l->prev;
    return v.t != HX_J_ABSENT ? v : hx_jval_hint(vm, "there is no such item");
}

static hx_jval get_attr(hx_jvm *vm, hx_jval obj, const hx_jstr *name)
{
    const hx_jval *at;
    hx_jval v;

    if (obj.t == HX_J_UNDEF)
        return hx_jval_misused(vm, obj);
    if (obj.t == HX_J_LOOP)
        return loop_attr(vm, obj.u.loop, name);
    if (hx_jcall_method(vm, obj, name, &v))
        return v;
    if ((obj.t == HX_J_SPACE || obj.t == HX_J_DICT) &&
        (at = hx_jdict_find(vm, obj.u.q, hx_jtext(name))) != NULL)
        return *at;
    return (hx_jval) { .t = HX_J_UNDEF, .of = obj.t, .u.s = name };
}

static hx_jval eval_attr(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval obj = eval(vm, n->a);

    vm->line = n->line;
    return get_attr(vm, obj, n->val.u.s);
}

hx_jval hx_jinja_item(hx_jvm *vm, hx_jval obj, hx_jval key)
{
    const hx_jval *at;

    if (obj.t == HX_J_UNDEF)
        return hx_jval_misused(vm, obj);
    if (obj.t == HX_J_VIEW)
        return hx_jvm_fail(vm, HX_EUNSUP, "items of a %s", hx_jval_type(obj));
    if (obj.t == HX_J_DICT && key.t < HX_J_LIST &&
        (at = hx_jdict_find(vm, obj.u.q, key)) != NULL)
        return *at;
    if (key.t == HX_J_STR)
        return get_attr(vm, obj, key.u.s);
    if (hx_jval_is_int(key) &&
        (obj.t == HX_J_STR || obj.t == HX_J_LIST || obj.t == HX_J_TUPLE)) {
        const int64_t n = (int64_t)hx_jval_len(vm, obj);
        const int64_t k = key.u.i, i = k < 0 ? k + n : k;
        if (i >= 0 && i < n && obj.t != HX_J_STR)
            return obj.u.q->v[i];
        if (i >= 0 && i < n) {
            const size_t off = hx_jstr_seek(vm, obj.u.s, (size_t)i);
            return hx_jstr_sub(vm, obj.u.s, off, hx_jstr_len(obj.u.s, off));
        }
    }
    if (key.t == HX_J_INT)
        return hx_jval_hint(vm, "%s object has no element %lld", hx_jval_type(obj),
                            (long long)key.u.i);
    return hx_jval_hint(vm, "%s object has no such element", hx_jval_type(obj));
}

/* Python's slice.indices(); returns how many items there are. */
static size_t resolve_slice(hx_jvm *vm, const hx_jval part[3], int64_t n, int64_t v[3])
{
    bool given[3];

    v[0] = v[1] = 0, v[2] = 1;
    for (int k = 0; k < 3; k++) {
        given[k] = part[k].t != HX_J_NONE;
        if (given[k] && !hx_jval_is_int(part[k]))
            hx_jvm_fail(vm, HX_EFORMAT, "slice indices must be integers or None, not %s",
                        hx_jval_type(part[k]));
        else if (given[k])
            v[k] = part[k].u.i;
    }
    if (v[2] == 0)
        hx_jvm_fail(vm, HX_EFORMAT, "slice step cannot be zero");
    if (vm->rc != 0)
        return 0;
    const bool back = v[2] < 0;
    v[2] = HX_MAX(v[2], -INT64_MAX);
    for (int k = 0; k < 2; k++) {
        if (!given[k])
            v[k] = (k == 0) == back ? n - (k == 0) : (back ? -1 : 0);
        else if (v[k] < 0)
            v[k] = HX_MAX(v[k] + n, back ? -1 : 0);
        else
            v[k] = HX_MIN(v[k], back ? n - 1 : n);
    }
    const int64_t way = back ? v[0] - v[1] : v[1] - v[0];
    return way > 0 ? (size_t)((way - 1) / (back ? -v[2] : v[2]) + 1) : 0;
}

static hx_jval eval_slice(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jnode *bound[] = { n->b, n->c, n->els };
    const hx_jval obj = eval(vm, n->a);
    hx_jval part[3];
    int64_t v[3];
    hx_jbuf b = { .vm = vm };
    hx_jlist l = { .vm = vm };

    for (int k = 0; k < 3; k++)
        part[k] = bound[k] ? eval(vm, bound[k]) : hx_jnone();
    if (obj.t == HX_J_UNDEF)
        return hx_jval_misused(vm, obj);
    if (obj.t != HX_J_STR && obj.t != HX_J_LIST && obj.t != HX_J_TUPLE)
        return hx_jvm_fail(vm, obj.t == HX_J_VIEW ? HX_EUNSUP : HX_EFORMAT,
                           "'%s' object cannot be sliced", hx_jval_type(obj));
    size_t k = resolve_slice(vm, part, (int64_t)hx_jval_len(vm, obj), v);
    if (obj.t == HX_J_STR && (v[2] == 1 || k == 0)) {
        const size_t from = hx_jstr_seek(vm, obj.u.s, k ? (size_t)v[0] : 0);
        const size_t to = hx_jstr_seek(vm, obj.u.s, k ? (size_t)v[0] + k : 0);
        return hx_jstr_sub(vm, obj.u.s, from, to - from);
    }
    const hx_jlist *q = hx_jval_seq(vm, obj);
    for (int64_t i = v[0]; k > 0 && hx_jvm_work(vm, 1); k--, i += k ? v[2] : 0) {
        if (obj.t == HX_J_STR)
            hx_jbuf_put(&b, q->v[i].u.s);
        else
            hx_jlist_add(&l, q->v[i]);
    }
    return obj.t == HX_J_STR ? hx_jbuf_done(&b, obj.u.s->safe) : hx_jlist_done(&l, obj.t);
}

/* ---- operators ------------------------------------------------------- */

static const char *const SIGN[] = { "+", "-", "*", "/", "//", "%", "~" };

static hx_jval int_op(hx_jvm *vm, hx_jop op, __int128 a, __int128 b)
{
    __int128 whole = b != 0 ? a / b : 0, rem = a - whole * b;

    if (op == HX_OP_DIV)
        return hx_jfloat((double)a / (double)b);
    if (rem != 0 && (rem < 0) != (b < 0)) {
        rem += b;
        whole -= 1;
    }
    const __int128 result[] = {
        [HX_OP_ADD] = a + b, [HX_OP_SUB] = a - b,      [HX_OP_MUL] = a * b,
        [HX_OP_DIV] = 0,     [HX_OP_FLOORDIV] = whole, [HX_OP_MOD] = rem
    };
    if (result[op] > INT64_MAX || result[op] < INT64_MIN)
        return hx_jvm_fail(vm, HX_EUNSUP, "the result of \"%s\" is over 64 bits",
                           SIGN[op]);
    return hx_jint((int64_t)result[op]);
}

static hx_jval float_op(hx_jop op, double a, double b)
{
    double rem = fmod(a, b), whole = (a - rem) / b;

    if (rem != 0 && (rem < 0) != (b < 0)) {
        rem += b;
        whole -= 1;
    }
    const double result[] = {
        [HX_OP_ADD] = a + b,
        [HX_OP_SUB] = a - b,
        [HX_OP_MUL] = a * b,
        [HX_OP_DIV] = a / b,
        [HX_OP_FLOORDIV] = whole != 0 ? round(whole) : copysign(0, a / b),
        [HX_OP_MOD] = rem != 0 ? rem : copysign(0, b),
    };
    return hx_jfloat(result[op]);
}

static hx_jval add_text(hx_jvm *vm, const hx_jstr *a, const hx_jstr *b)
{
    if (a->safe == b->safe)
        return hx_jstr_cat(vm, a, b, a->safe);
    return hx_jstr_cat(vm, hx_jstr_escape(vm, a).u.s, hx_jstr_escape(vm, b).u.s, true);
}

static hx_jval repeat(hx_jvm *vm, const hx_jstr *s, int64_t times)
{
    hx_jbuf b = { .vm = vm };
    size_t total;

    if (times > 0 && !hx_mul(s->n, (size_t)times, &total))
        return hx_jvm_fail(vm, HX_ENOMEM, "no memory for %lld times a text of %zu bytes",
                           (long long)times, s->n);
    if (times > 0 && hx_jbuf_reserve(&b, total) && s->n > 0)
        for (; times > 0 && hx_jvm_work(vm, 1 + s->n / 64); times--)
            hx_jbuf_put(&b, s);
    return hx_jbuf_done(&b, s->safe);
}

static hx_jval add_lists(hx_jvm *vm, hx_jval a, hx_jval b)
{
    hx_jlist l = { .vm = vm };

    hx_jvm_work(vm, (a.u.q->n + b.u.q->n) / 8);
    for (size_t i = 0; i < a.u.q->n && vm->rc == 0; i++)
        hx_jlist_add(&l, a.u.q->v[i]);
    for (size_t i = 0; i < b.u.q->n && vm->rc == 0; i++)
        hx_jlist_add(&l, b.u.q->v[i]);
    return hx_jlist_done(&l, a.t);
}

hx_jval hx_jinja_binary(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b)
{
    if (op == HX_OP_CAT)
        return hx_jstr_cat(vm, hx_jval_str(vm, a), hx_jval_str(vm, b), false);
    if (op == HX_OP_MOD && a.t == HX_J_STR)
        return hx_jvm_fail(vm, HX_EUNSUP, "formatting with \"%%\"");
    if (a.t == HX_J_UNDEF || b.t == HX_J_UNDEF)
        return hx_jval_misused(vm, a.t == HX_J_UNDEF ? a : b);
    if (hx_jval_is_num(a) && hx_jval_is_num(b)) {
        if (op >= HX_OP_DIV && op <= HX_OP_MOD && hx_jval_as_double(b) == 0)
            return hx_jvm_fail(vm, HX_EFORMAT, "division by zero");
        if (hx_jval_is_int(a) && hx_jval_is_int(b))
            return int_op(vm, op, a.u.i, b.u.i);
        return float_op(op, hx_jval_as_double(a), hx_jval_as_double(b));
    }
    if (op == HX_OP_ADD && a.t == HX_J_STR && b.t == HX_J_STR)
        return add_text(vm, a.u.s, b.u.s);
    if (op == HX_OP_ADD && a.t == b.t && (a.t == HX_J_LIST || a.t == HX_J_TUPLE))
        return add_lists(vm, a, b);
    if (op == HX_OP_MUL && a.t == HX_J_STR && hx_jval_is_int(b))
        return repeat(vm, a.u.s, b.u.i);
    if (op == HX_OP_MUL && b.t == HX_J_STR && hx_jval_is_int(a))
        return repeat(vm, b.u.s, a.u.i);
    if (op == HX_OP_MUL && hx_jval_is_int(a.t == HX_J_LIST || a.t == HX_J_TUPLE ? b : a))
        return hx_jvm_fail(vm, HX_EUNSUP, "repeating a list");
    return hx_jvm_fail(vm, a.t == HX_J_BIG || b.t == HX_J_BIG ? HX_EUNSUP : HX_EFORMAT,
                       "unsupported operand types for %s: '%s' and '%s'", SIGN[op],
                       hx_jval_type(a), hx_jval_type(b));
}

/* BIN, ITEM. */
static hx_jval eval_two(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval a = eval(vm, n->a), b = eval(vm, n->b);

    vm->line = n->line;
    return n->kind == HX_N_BIN ? hx_jinja_binary(vm, (hx_jop)n->op, a, b)
                               : hx_jinja_item(vm, a, b);
}

/* NEG, POS. */
static hx_jval eval_sign(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval v = eval(vm, n->a);
    const hx_jval zero = v.t == HX_J_FLOAT ? hx_jfloat(-0.0) : hx_jint(0);

    if (v.t != HX_J_UNDEF && !hx_jval_is_num(v))
        return hx_jvm_fail(vm, HX_EFORMAT, "bad operand type for unary sign: '%s'",
                           hx_jval_type(v));
    return hx_jinja_binary(vm, n->kind == HX_N_NEG ? HX_OP_SUB : HX_OP_ADD, zero, v);
}

static hx_jval eval_compare(hx_jvm *vm, const hx_jnode *n)
{
    hx_jval left = eval(vm, n->a);
    bool yes = true;

    for (const hx_jnode *o = n->b; o != NULL && yes && vm->rc == 0; o = o->next) {
        const hx_jval right = eval(vm, o->a);
        vm->line = n->line;
        yes = hx_jval_compare(vm, (hx_jop)o->op, left, right);
        left = right;
    }
    return hx_jbool(yes);
}

/* NOT, AND, OR. */
static hx_jval eval_logic(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval v = eval(vm, n->a);

    if (n->kind == HX_N_NOT)
        return hx_jbool(!hx_jval_truthy(v));
    return hx_jval_truthy(v) == (n->kind == HX_N_AND) ? eval(vm, n->b) : v;
}

static hx_jval eval_cond(hx_jvm *vm, const hx_jnode *n)
{
    if (hx_jval_truthy(eval(vm, n->b)))
        return eval(vm, n->a);
    if (n->c != NULL)
        return eval(vm, n->c);
    return hx_jval_hint(vm,
                        "the inline if on line %d evaluated to false and no else "
                        "section was defined",
                        n->line);
}

/* LIST, TUPLE, DICT. */
static hx_jval eval_items(hx_jvm *vm, const hx_jnode *n)
{
    hx_jlist l = { .vm = vm };

    for (const hx_jnode *k = n->a; k != NULL && vm->rc == 0; k = k->next) {
        const hx_jval v = eval(vm, k);
        if (n->kind != HX_N_DICT)
            hx_jlist_add(&l, v);
        else
            hx_jdict_put(&l, v, eval(vm, k = k->next));
    }
    return hx_jlist_done(&l, n->kind == HX_N_LIST    ? HX_J_LIST
                             : n->kind == HX_N_TUPLE ? HX_J_TUPLE
                                                     : HX_J_DICT);
}

/* ---- calls ----------------------------------------------------------- */

static hx_jargs eval_args(hx_jvm *vm, const hx_jnode *list)
{
    hx_jargs args = { .pos.vm = vm, .named.vm = vm };

    for (const hx_jnode *a = list; a != NULL && vm->rc == 0; a = a->next) {
        if (a->kind == HX_N_KEYWORD)
            hx_jdict_put(&args.named, a->val, eval(vm, a->a));
        else
            hx_jlist_add(&args.pos, eval(vm, a));
    }
    return args;
}

/* Runs body, its output going to a text. */
static hx_jval capture(hx_jvm *vm, const hx_jnode *body)
{
    hx_jbuf b = { .vm = vm }, *outer = vm->out;

    vm->out = &b;
    exec_body(vm, body);
    vm->out = outer;
    return hx_jbuf_done(&b, false);
}

/* Binds arguments to the parameters of a macro in its new scope; defaults see those in
 * front of them. */
static void bind_macro(hx_jvm *vm, const hx_jnode *def, const hx_jargs *args)
{
    const hx_jstr *name = def->val.u.s;
    size_t i = 0, used = 0;

    for (const hx_jnode *p = def->a; p != NULL; p = p->next, i++) {
        const hx_jval *at =
            i < args->pos.n ? &args->pos.v[i] : hx_jdict_find(vm, &args->named, p->val);
        used += i >= args->pos.n && at != NULL;
        set_name(vm, p->sym, at ? *at : (hx_jval) { .t = HX_J_ABSENT });
    }
    if (args->pos.n > def->n || 2 * used < args->named.n)
        hx_jvm_fail(vm, HX_EFORMAT, "macro '%.*s' takes no such argument",
                    (int)HX_MIN(name->n, 60), name->p);
    for (const hx_jnode *p = def->a; p != NULL && vm->rc == 0; p = p->next) {
        for (i = 0; vm->frame->slot[i].sym != p->sym;)
            i++;
        if (vm->frame->slot[i].v.t != HX_J_ABSENT)
            continue;
        set_name(vm, p->sym,
                 p->a ? eval(vm, p->a)
                      : hx_jval_hint(vm, "parameter '%.*s' was not provided",
                                     (int)HX_MIN(p->val.u.s->n, 100), p->val.u.s->p));
    }
}

static hx_jval call_macro(hx_jvm *vm, const hx_jmacro *m, const hx_jargs *args)
{
    hx_jframe *outer = vm->frame;
    const int line = vm->line;
    hx_jval v = hx_jnone();

    if (vm->n_macro == HX_J_MACRO_MAX)
        return hx_jvm_fail(vm, HX_ELIMIT, "macros call each other over %d deep",
                           HX_J_MACRO_MAX);
    vm->n_macro++;
    frame_push(vm, m->scope);
    if (vm->rc == 0)
        bind_macro(vm, m->def, args);
    if (vm->rc == 0)
        v = capture(vm, m->def->body);
    vm->line = line;
    vm->frame = outer;
    vm->n_macro--;
    return v;
}

static hx_jval eval_call(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval f = eval(vm, n->a);
    const hx_jargs args = eval_args(vm, n->b);

    if (vm->rc != 0)
        return f;
    vm->line = n->line;
    if (!hx_jvm_work(vm, 1))
        return f;
    switch (f.t) {
    case HX_J_MACRO:
        return call_macro(vm, f.u.mac, &args);
    case HX_J_FUNC:
        return hx_jcall_run(vm, f.u.fn, 0, hx_jnone(), &args);
    case HX_J_METHOD:
        return hx_jcall_run(vm, f.u.met->fn, 0, f.u.met->self, &args);
    case HX_J_UNDEF: /* also what the sandbox hides because it changes its object */
        if (f.of >= HX_J_STR && f.of <= HX_J_DICT && !f.flag)
            return hx_jvm_fail(vm, HX_EUNSUP, "the method \"%.*s\" of a %s",
                               (int)HX_MIN(f.u.s->n, 60), f.u.s->p,
                               hx_jval_type((hx_jval) { .t = f.of }));
        return hx_jval_misused(vm, f);
    case HX_J_LOOP:
        return hx_jvm_fail(vm, HX_EUNSUP, "recursive loops");
    default:
        return hx_jvm_fail(vm, HX_EFORMAT, "'%s' object is not callable",
                           hx_jval_type(f));
    }
}

/* FILTER, TEST. */
static hx_jval eval_filter(hx_jvm *vm, const hx_jnode *n)
{
    const bool test = n->kind == HX_N_TEST;

    if (n->fn == NULL)
        return hx_jvm_fail(vm, HX_EUNSUP, "%s \"%.*s\" is not known",
                           test ? "test" : "filter", (int)HX_MIN(n->val.u.s->n, 60),
                           n->val.u.s->p);
    const hx_jval self = eval(vm, n->a);
    const hx_jargs args = eval_args(vm, n->b);
    if (vm->rc != 0)
        return self;
    vm->line = n->line;
    if (!hx_jvm_work(vm, 1))
        return self;
    return hx_jcall_run(vm, n->fn, test ? HX_J_TEST : HX_J_FILTER, self, &args);
}

static hx_jval eval(hx_jvm *vm, const hx_jnode *n)
{
    static hx_jval (*const EVAL[HX_N_COUNT])(hx_jvm *, const hx_jnode *) = {
        [HX_N_LIST] = eval_items,      [HX_N_TUPLE] = eval_items,
        [HX_N_DICT] = eval_items,      [HX_N_NOT] = eval_logic,
        [HX_N_AND] = eval_logic,       [HX_N_OR] = eval_logic,
        [HX_N_NEG] = eval_sign,        [HX_N_POS] = eval_sign,
        [HX_N_BIN] = eval_two,         [HX_N_ITEM] = eval_two,
        [HX_N_COND] = eval_cond,       [HX_N_ATTR] = eval_attr,
        [HX_N_SLICE] = eval_slice,     [HX_N_CALL] = eval_call,
        [HX_N_FILTER] = eval_filter,   [HX_N_TEST] = eval_filter,
        [HX_N_COMPARE] = eval_compare,
    };
    hx_jval v;

    if (n->kind == HX_N_CONST || n->kind == HX_N_BODY)
        return n->kind == HX_N_CONST ? n->val : vm->body;
    if (n->kind == HX_N_NAME)
        return vm->line = n->line, get_name(vm, n->sym);
    if (!hx_jvm_enter(vm))
        return hx_jnone();
    vm->line = n->line;
    v = EVAL[n->kind](vm, n);
    vm->depth--;
    return v;
}

/* ---- statements ------------------------------------------------------ */

static flow exec_print(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval v = eval(vm, n->a);

    vm->line = n->line;
    hx_jbuf_put(vm->out, hx_jval_str(vm, v));
    return GO_ON;
}

static flow exec_if(hx_jvm *vm, const hx_jnode *n)
{
    while (!hx_jval_truthy(eval(vm, n->a))) {
        if (n->els == NULL || n->els->kind != HX_N_IF || n->els->next != NULL)
            return exec_body(vm, n->els);
        n = n->els;
    }
    return exec_body(vm, n->body);
}

static flow exec_for(hx_jvm *vm, const hx_jnode *n)
{
    hx_jframe *outer = vm->frame;
    hx_jloop *l = hx_jvm_alloc(vm, 1, sizeof *l);
    const hx_jval src = eval(vm, n->b);
    bool finished = false;
    flow f = GO_ON;

    if (vm->rc != 0)
        return GO_ON;
    vm->line = n->line;
    *l = (hx_jloop) {
        .q = hx_jval_seq(vm, src), .def = n, .test = n->c, .scope = outer, .index0 = -1
    };
    while (f != FLOW_BREAK && vm->rc == 0) {
        const hx_jval v = loop_peek(vm, l);
        if (v.t == HX_J_ABSENT || vm->rc != 0)
            break;
        if (vm->frame == outer || vm->frame->captured)
            frame_push(vm, outer);
        if (vm->rc != 0)
            break;
        l->index0++;
        l->prev = l->cur;
        l->cur = v;
        l->peek.t = HX_J_ABSENT;
        vm->frame->n = 0;
        assign(vm, n->a, v);
        set_name(vm, HX_J_SYM_LOOP, (hx_jval) { .t = HX_J_LOOP, .u.loop = l });
        f = exec_body(vm, n->body);
        /* jinja2 runs the else block unless a turn got to the end of the body. */
        finished |= f == GO_ON;
        vm->line = n->line;
    }
    vm->frame = outer;
    if (finished || n->els == NULL)
        return GO_ON;
    frame_push(vm, outer);
    f = exec_body(vm, n->els);
    vm->frame = outer;
    return f;
}

/* Captures a body in a scope of its own, then runs filters (an expression over BODY). */
static hx_jval filtered(hx_jvm *vm, const hx_jnode *n)
{
    hx_jframe *outer = vm->frame;
    const hx_jval saved = vm->body;

    frame_push(vm, outer);
    vm->body = capture(vm, n->body);
    const hx_jval v = eval(vm, n->b);
    vm->body = saved;
    vm->frame = outer;
    vm->line = n->line;
    return v;
}

static flow exec_set(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jval v = n->op ? filtered(vm, n) : eval(vm, n->b);

    vm->line = n->line;
    assign(vm, n->a, v);
    return GO_ON;
}

static flow exec_filter_block(hx_jvm *vm, const hx_jnode *n)
{
    hx_jbuf_put(vm->out, hx_jval_str(vm, filtered(vm, n)));
    return GO_ON;
}

static flow exec_macro(hx_jvm *vm, const hx_jnode *n)
{
    hx_jmacro *m = hx_jvm_alloc(vm, 1, sizeof *m);

    if (m == NULL)
        return GO_ON;
    *m = (hx_jmacro) { n, vm->frame };
    for (hx_jframe *f = vm->frame; f != NULL && !f->captured; f = f->up)
        f->captured = true;
    set_name(vm, n->sym, (hx_jval) { .t = HX_J_MACRO, .u.mac = m });
    return GO_ON;
}

static flow exec_leave(hx_jvm *vm, const hx_jnode *n)
{
    (void)vm;
    return n->kind == HX_N_BREAK ? FLOW_BREAK : FLOW_CONTINUE;
}

static flow exec_body(hx_jvm *vm, const hx_jnode *n)
{
    static flow (*const EXEC[HX_N_COUNT])(hx_jvm *, const hx_jnode *) = {
        [HX_N_PRINT] = exec_print, [HX_N_IF] = exec_if,
        [HX_N_FOR] = exec_for,     [HX_N_SET] = exec_set,
        [HX_N_MACRO] = exec_macro, [HX_N_FILTER_BLOCK] = exec_filter_block,
        [HX_N_BREAK] = exec_leave, [HX_N_CONTINUE] = exec_leave,
    };
    flow f = GO_ON;

    if (n == NULL || !hx_jvm_enter(vm))
        return GO_ON;
    for (; n != NULL && f == GO_ON && vm->rc == 0; n = n->next) {
        vm->line = n->line;
        f = EXEC[n->kind](vm, n);
    }
    vm->depth--;
    return f;
}

/* ---- public calls ---------------------------------------------------- */

int hx_jinja_open(hx_jinja **out, hx_str source, const char *name, hx_err *err)
{
    hx_jinja *t = hx_new(hx_jinja, 1);
    int rc;

    *out = NULL;
    if (t == NULL)
        return hx_fail(err, HX_ENOMEM, "%s: no memory for a template", name);
    hx_arena_init(&t->mem, HX_J_MEM_MAX);
    if ((t->name = hx_arena_dup(&t->mem, name, strlen(name))) == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "%s: no memory for a template", name);
        goto fail;
    }
    if ((rc = hx_jinja_parse(t, source, err)) != 0)
        goto fail;
    *out = t;
    return 0;
fail:
    hx_jinja_close(t);
    return rc;
}

void hx_jinja_close(hx_jinja *t)
{
    if (t == NULL)
        return;
    hx_arena_reset(&t->mem);
    hx_free(t);
}

/* Only variables that the template names are converted. */
static void load_vars(hx_jvm *vm, const hx_json *vars)
{
    const hx_jinja *t = vm->t;
    hx_str key;

    if ((vm->root = hx_jvm_alloc(vm, t->n_sym, sizeof *vm->root)) == NULL)
        return;
    for (uint32_t s = 0; s < t->n_sym; s++) {
        const hx_jbuiltin *fn = hx_jcall_find(t->sym[s], HX_J_GLOBAL);
        if (fn != NULL)
            vm->root[s] = (hx_jval) { .t = HX_J_FUNC, .u.fn = fn };
    }
    for (size_t i = 0; i < hx_json_len(vars); i++) {
        const hx_json *v = hx_json_member(vars, i, &key);
        for (uint32_t s = 0; s < t->n_sym; s++) {
            if (hx_str_eq(t->sym[s], key))
                vm->root[s] = hx_jval_from_json(vm, v);
        }
    }
}

int hx_jinja_run(const hx_jinja *t, const hx_json *vars, const hx_jinja_opt *opt,
                 hx_sb *text, hx_sb *user, hx_err *err)
{
    static const hx_jinja_opt NONE = { 0 };
    const hx_jinja_opt *o = opt != NULL ? opt : &NONE;
    const size_t n0 = text->n, u0 = user != NULL ? user->n : 0;
    hx_arena mem;
    hx_jvm vm = { .t = t,
                  .mem = &mem,
                  .err = err,
                  .name = t->name,
                  .line = 1,
                  .max_steps = o->max_steps > 0 ? o->max_steps : HX_J_STEPS,
                  .now_s = o->now_s,
                  .track = user != NULL };
    hx_jbuf b = { .vm = &vm, .max = o->max_bytes > 0 ? o->max_bytes : HX_J_OUT };
    size_t cap;

    if (hx_json_kind(vars) != HX_JSON_OBJECT && vars != NULL)
        return hx_fail(err, HX_EARG, "%s: variables are a JSON %s, expected an object",
                       t->name, hx_json_kind_name(vars));
    if (!hx_mul(b.max, HX_J_MEM_OUT, &cap) || cap > SIZE_MAX - HX_J_MEM_MAX)
        return hx_fail(err, HX_EARG, "%s: output bound of %zu bytes is too large",
                       t->name, b.max);
    hx_arena_init(&mem, HX_J_MEM_MAX + cap);
    vm.out = &b;
    load_vars(&vm, vars);
    if (vm.rc == 0)
        exec_body(&vm, t->body);
    if (vm.rc == 0) {
        hx_sb_add(text, b.p, b.n);
        if (user != NULL && b.mark != NULL)
            hx_sb_add(user, (const char *)b.mark, b.n);
        for (size_t i = 0; user != NULL && b.mark == NULL && i < b.n; i++)
            hx_sb_char(user, (char)b.user);
        if (text->bad || (user != NULL && user->bad))
            vm.rc = hx_fail(err, HX_ENOMEM, "%s: no memory for %zu bytes of output",
                            t->name, b.n);
    }
    if (vm.rc != 0) {
        text->n = n0;
        if (user != NULL)
            user->n = u0;
    }
    hx_arena_reset(&mem);
    return vm.rc;
}
