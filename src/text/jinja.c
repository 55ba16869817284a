/* jinja.c - runs chat templates: the public calls, scopes, statements and expressions.
 *
 * Called by the engine (hx_render) and by tests. A compiled template is read-only and may
 * run on many threads at once; everything a run makes lives in its own machine. Never
 * guesses: what the subset does not define is an error with the template's name and line.
 */
#include <math.h>
#include <stdio.h>

#include "text/jinja_ast.h"

enum { FLOW_BREAK = 1, FLOW_CONTINUE = 2 }; /* positive results of statements */

static int eval(hx_jvm *vm, const hx_jnode *n, hx_jval *out);
static int exec_body(hx_jvm *vm, const hx_jnode *n);

/* ---- scopes ---------------------------------------------------------- */

static int frame_push(hx_jvm *vm, hx_jframe *up)
{
    hx_jframe *f = hx_jvm_alloc(vm, 1, sizeof *f);

    if (f == NULL)
        return HX_ENOMEM;
    f->up = up;
    vm->frame = f;
    return 0;
}

/* From now on a macro may look into this scope and those around it. */
static void frame_capture(hx_jvm *vm)
{
    for (hx_jframe *f = vm->frame; f != NULL && !f->captured; f = f->up)
        f->captured = true;
}

static int set_in(hx_jvm *vm, hx_jframe *f, uint32_t sym, hx_jval v)
{
    if (f == NULL) {
        vm->root[sym] = v;
        return 0;
    }
    for (uint32_t i = 0; i < f->n; i++) {
        if (f->slot[i].sym == sym) {
            f->slot[i].v = v;
            return 0;
        }
    }
    if (f->n == f->cap) {
        const uint32_t cap = f->cap ? 2 * f->cap : 4;
        hx_jslot *s = hx_jvm_alloc(vm, cap, sizeof *s);
        if (s == NULL)
            return HX_ENOMEM;
        if (f->n > 0)
            memcpy(s, f->slot, f->n * sizeof *s);
        f->slot = s;
        f->cap = cap;
    }
    f->slot[f->n++] = (hx_jslot) { sym, v };
    return 0;
}

static int undef_name(hx_jvm *vm, uint32_t sym, hx_jval *out)
{
    const hx_str name = vm->t->sym[sym];
    const int rc = hx_jstr_new(vm, name.p, name.n, false, out);

    out->t = HX_J_UNDEF;
    out->why = HX_J_NO_NAME;
    return rc;
}

static int get_name(hx_jvm *vm, uint32_t sym, hx_jval *out)
{
    *out = vm->root[sym];
    for (const hx_jframe *f = vm->frame; f != NULL; f = f->up) {
        for (uint32_t i = 0; i < f->n; i++) {
            if (f->slot[i].sym == sym) {
                *out = f->slot[i].v;
                return out->t != HX_J_ABSENT ? 0 : undef_name(vm, sym, out);
            }
        }
    }
    return out->t != HX_J_ABSENT ? 0 : undef_name(vm, sym, out);
}

/* Assigns to a name or unpacks into a tuple of targets. */
static int assign(hx_jvm *vm, const hx_jnode *target, hx_jval v)
{
    hx_jiter it;
    hx_jval x;
    uint32_t got = 0;
    int rc;

    if (target->kind == HX_N_NAME)
        return set_in(vm, vm->frame, target->sym, v);
    if (hx_jiter_init(vm, &it, v) != 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "cannot unpack non-iterable %s object",
                           hx_jval_type(v));
    for (const hx_jnode *t = target->a; t != NULL; t = t->next, got++) {
        if ((rc = hx_jiter_next(vm, &it, &x)) < 0)
            return rc;
        if (rc == 0)
            return hx_jvm_fail(vm, HX_EFORMAT,
                               "not enough values to unpack (expected %u, got %u)",
                               target->n, got);
        if ((rc = assign(vm, t, x)) != 0)
            return rc;
    }
    if ((rc = hx_jiter_next(vm, &it, &x)) == 1)
        return hx_jvm_fail(vm, HX_EFORMAT, "too many values to unpack (expected %u)",
                           target->n);
    return rc;
}

/* ---- attributes and items -------------------------------------------- */

static hx_jval missing_attr(hx_jval obj, const hx_jstr *name)
{
    return (hx_jval) { .t = HX_J_UNDEF, .why = HX_J_NO_ATTR, .of = obj.t, .u.s = name };
}

static int loop_item(hx_jvm *vm, hx_jloop *l, bool next, hx_jval *out)
{
    int rc;

    if (next && (rc = hx_jloop_peek(vm, l)) != 0)
        return rc;
    *out = next ? l->peek : l->prev;
    if (out->t != HX_J_ABSENT)
        return 0;
    return hx_jval_hint(vm, next ? "there is no next item" : "there is no previous item",
                        out);
}

/* 1: found. */
static int loop_attr(hx_jvm *vm, hx_jloop *l, const hx_jstr *name, hx_jval *out)
{
    int64_t n = 0;
    int rc;

    if (hx_jstr_is(name, "index0"))
        *out = hx_jint(l->index0);
    else if (hx_jstr_is(name, "index"))
        *out = hx_jint(l->index0 + 1);
    else if (hx_jstr_is(name, "first"))
        *out = hx_jbool(l->index0 == 0);
    else if (hx_jstr_is(name, "depth"))
        *out = hx_jint(1);
    else if (hx_jstr_is(name, "depth0"))
        *out = hx_jint(0);
    else if (hx_jstr_is(name, "previtem") || hx_jstr_is(name, "nextitem"))
        return (rc = loop_item(vm, l, name->p[0] == 'n', out)) != 0 ? rc : 1;
    else if (hx_jstr_is(name, "last")) {
        if ((rc = hx_jloop_peek(vm, l)) != 0)
            return rc;
        *out = hx_jbool(l->peek.t == HX_J_ABSENT);
    } else if (hx_jstr_is(name, "length") || hx_jstr_is(name, "revindex") ||
               hx_jstr_is(name, "revindex0")) {
        if ((rc = hx_jloop_len(vm, l, &n)) != 0)
            return rc;
        *out = hx_jint(name->p[0] == 'l' ? n : n - l->index0 - (name->n > 8));
    } else
        return 0;
    return 1;
}

/* What Python's getattr() finds. 1: found, 0: nothing. */
static int own_attr(hx_jvm *vm, hx_jval obj, const hx_jstr *name, hx_jval *out)
{
    int rc;

    if (obj.t == HX_J_LOOP && (rc = loop_attr(vm, obj.u.loop, name, out)) != 0)
        return rc;
    if (obj.t == HX_J_SPACE)
        return hx_jdict_get(vm, obj.u.m, (hx_jval) { .t = HX_J_STR, .u.s = name }, out);
    if (obj.t == HX_J_MACRO && hx_jstr_is(name, "name")) {
        *out = obj.u.mac->def->val.t == HX_J_STR ? obj.u.mac->def->val : hx_jnone();
        return 1;
    }
    return hx_jcall_method(vm, obj, name, out);
}

int hx_jinja_attr(hx_jvm *vm, hx_jval obj, const hx_jstr *name, hx_jval *out)
{
    int rc;

    if (obj.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, obj);
    if ((rc = own_attr(vm, obj, name, out)) != 0)
        return rc < 0 ? rc : 0;
    if (obj.t == HX_J_DICT &&
        (rc = hx_jdict_get(vm, obj.u.m, (hx_jval) { .t = HX_J_STR, .u.s = name }, out)) !=
            0)
        return rc < 0 ? rc : 0;
    *out = missing_attr(obj, name);
    return 0;
}

/* The i-th element, counted from the end if negative. 1: there is one. */
static int index_item(hx_jvm *vm, hx_jval obj, int64_t i, hx_jval *out)
{
    size_t n, off, len;
    int rc;

    if ((rc = hx_jval_len(vm, obj, &n)) != 0)
        return rc;
    if (i < 0)
        i += (int64_t)n;
    if (i < 0 || (size_t)i >= n)
        return 0;
    if (obj.t == HX_J_RANGE) {
        *out = hx_jrange_at(obj.u.r, (size_t)i);
    } else if (obj.t != HX_J_STR) {
        *out = obj.u.q->v[i];
    } else {
        if ((rc = hx_jstr_seek(vm, obj.u.s, (size_t)i, &off)) != 0)
            return rc;
        hx_jstr_cp(obj.u.s, off, &len);
        if ((rc = hx_jstr_sub(vm, obj.u.s, off, len, out)) != 0)
            return rc;
    }
    return 1;
}

int hx_jinja_item(hx_jvm *vm, hx_jval obj, hx_jval key, hx_jval *out)
{
    const bool seq = obj.t == HX_J_LIST || obj.t == HX_J_TUPLE || obj.t == HX_J_STR ||
                     obj.t == HX_J_RANGE;
    int rc = 0;

    if (obj.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, obj);
    if (obj.t == HX_J_DICT && hx_jdict_hashable(key))
        rc = hx_jdict_get(vm, obj.u.m, key, out);
    else if (seq && hx_jval_is_int(key))
        rc = index_item(vm, obj, hx_jval_as_int(key), out);
    if (rc == 0 && key.t == HX_J_STR)
        rc = own_attr(vm, obj, key.u.s, out);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    if (key.t == HX_J_STR) {
        *out = missing_attr(obj, key.u.s);
    } else if (key.t == HX_J_INT) {
        *out = (hx_jval) {
            .t = HX_J_UNDEF, .why = HX_J_NO_ITEM, .of = obj.t, .u.i = key.u.i
        };
    } else {
        rc = hx_jval_hint(vm, "no element with that key", out);
    }
    return rc;
}

typedef struct {
    int64_t start, stop, step;
    size_t n;
} span;

/* Python's slice.indices(). ABSENT and None are "not given". */
static int resolve_slice(hx_jvm *vm, const hx_jval part[3], size_t len, span *s)
{
    const int64_t n = (int64_t)len;
    int64_t v[3] = { 0, 0, 1 };
    bool given[3];

    for (int k = 0; k < 3; k++) {
        given[k] = part[k].t != HX_J_ABSENT && part[k].t != HX_J_NONE;
        if (given[k] && !hx_jval_is_int(part[k]))
            return hx_jvm_fail(vm, HX_EFORMAT,
                               "slice indices must be integers or None, not %s",
                               hx_jval_type(part[k]));
        if (given[k])
            v[k] = hx_jval_as_int(part[k]);
    }
    if (v[2] == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "slice step cannot be zero");
    const bool back = v[2] < 0;
    if (v[2] < -INT64_MAX)
        v[2] = -INT64_MAX;
    for (int k = 0; k < 2; k++) {
        if (!given[k])
            v[k] = (k == 0) == back ? n - (k == 0) : (back ? -1 : 0);
        else if (v[k] < 0)
            v[k] = HX_MAX(v[k] + n, back ? -1 : 0);
        else
            v[k] = HX_MIN(v[k], back ? n - 1 : n);
    }
    const int64_t way = back ? v[0] - v[1] : v[1] - v[0];
    const int64_t stride = back ? -v[2] : v[2];
    *s = (span) { v[0], v[1], v[2], way > 0 ? (size_t)((way - 1) / stride + 1) : 0 };
    return 0;
}

static int slice_str(hx_jvm *vm, const hx_jstr *s, span sp, hx_jval *out)
{
    size_t from, to, *at, k = 0;
    hx_jbuf b = { .vm = vm };
    int rc;

    if (sp.step == 1 || sp.n == 0) {
        if ((rc = hx_jstr_seek(vm, s, sp.n ? (size_t)sp.start : 0, &from)) != 0 ||
            (rc = hx_jstr_seek(vm, s, sp.n ? (size_t)sp.start + sp.n : 0, &to)) != 0)
            return rc;
        return hx_jstr_sub(vm, s, from, to - from, out);
    }
    if ((at = hx_jvm_alloc(vm, s->len + 1, sizeof *at)) == NULL)
        return HX_ENOMEM;
    for (size_t i = 0; i < s->n; i++) {
        if (((uint8_t)s->p[i] & 0xc0) != 0x80)
            at[k++] = i;
    }
    at[k] = s->n;
    for (size_t i = 0; i < sp.n && b.rc == 0; i++) {
        const size_t c = (size_t)(sp.start + (int64_t)i * sp.step);
        hx_jbuf_sub(&b, s, at[c], at[c + 1] - at[c]);
    }
    return hx_jbuf_done_safe(&b, s->safe, out);
}

/* Ranges hold numbers up to 2^40, see make_range(); nothing here overflows. */
static int slice_range(hx_jvm *vm, const hx_jrange *from, span sp, hx_jval *out)
{
    hx_jrange *r = hx_jvm_alloc(vm, 1, sizeof *r);

    if (r == NULL)
        return HX_ENOMEM;
    if (sp.step > 1 << 20 || sp.step < -(1 << 20))
        return hx_jvm_fail(vm, HX_EUNSUP, "a slice of a range with step %lld",
                           (long long)sp.step);
    *r = (hx_jrange) { .start = from->start + sp.start * from->step,
                       .step = from->step * sp.step,
                       .stop = from->start + sp.stop * from->step,
                       .n = sp.n };
    *out = (hx_jval) { .t = HX_J_RANGE, .u.r = r };
    return 0;
}

static int slice(hx_jvm *vm, hx_jval obj, const hx_jval part[3], hx_jval *out)
{
    hx_jval *item;
    size_t len;
    span sp;
    int rc;

    if (obj.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, obj);
    if (obj.t != HX_J_STR && obj.t != HX_J_LIST && obj.t != HX_J_TUPLE &&
        obj.t != HX_J_RANGE)
        return hx_jvm_fail(vm, HX_EFORMAT, "'%s' object cannot be sliced",
                           hx_jval_type(obj));
    if ((rc = hx_jval_len(vm, obj, &len)) != 0 ||
        (rc = resolve_slice(vm, part, len, &sp)) != 0 ||
        (rc = hx_jvm_work(vm, sp.n / 8)) != 0)
        return rc;
    if (obj.t == HX_J_STR)
        return slice_str(vm, obj.u.s, sp, out);
    if (obj.t == HX_J_RANGE)
        return slice_range(vm, obj.u.r, sp, out);
    if ((rc = hx_jval_list(vm, obj.t, sp.n, &item, out)) != 0)
        return rc;
    for (size_t i = 0; i < sp.n; i++)
        item[i] = obj.u.q->v[sp.start + (int64_t)i * sp.step];
    return 0;
}

/* ---- operators ------------------------------------------------------- */

static const char *const SIGN[] = {
    [HX_OP_ADD] = "+",       [HX_OP_SUB] = "-", [HX_OP_MUL] = "*",  [HX_OP_DIV] = "/",
    [HX_OP_FLOORDIV] = "//", [HX_OP_MOD] = "%", [HX_OP_POW] = "**",
};

static int int_power(int64_t base, int64_t n, int64_t *out)
{
    int64_t r = 1;

    if (base == 0 || base == 1 || base == -1)
        r = n == 0 ? 1 : base == -1 && n % 2 == 0 ? 1 : base;
    else
        for (; n > 0; n--) {
            if (__builtin_mul_overflow(r, base, &r))
                return -1;
        }
    *out = r;
    return 0;
}

static int int_op(hx_jvm *vm, hx_jop op, int64_t a, int64_t b, hx_jval *out)
{
    bool over = false;
    int64_t r = 0;

    if ((op == HX_OP_DIV || op == HX_OP_FLOORDIV || op == HX_OP_MOD) && b == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "division by zero");
    switch (op) {
    case HX_OP_ADD:
        over = __builtin_add_overflow(a, b, &r);
        break;
    case HX_OP_SUB:
        over = __builtin_sub_overflow(a, b, &r);
        break;
    case HX_OP_MUL:
        over = __builtin_mul_overflow(a, b, &r);
        break;
    case HX_OP_DIV:
        *out = hx_jfloat((double)a / (double)b);
        return 0;
    case HX_OP_FLOORDIV:
        over = a == INT64_MIN && b == -1;
        r = over ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
        break;
    case HX_OP_MOD:
        r = b == -1 ? 0 : a % b;
        r += r != 0 && (r < 0) != (b < 0) ? b : 0;
        break;
    default:
        if (b < 0) {
            if (a == 0)
                return hx_jvm_fail(vm, HX_EFORMAT,
                                   "0 cannot be raised to a negative power");
            *out = hx_jfloat(pow((double)a, (double)b));
            return 0;
        }
        over = int_power(a, b, &r) != 0;
    }
    if (over)
        return hx_jvm_fail(vm, HX_EUNSUP, "the result of \"%s\" is over 64 bits",
                           SIGN[op]);
    *out = hx_jint(r);
    return 0;
}

static int float_op(hx_jvm *vm, hx_jop op, double a, double b, hx_jval *out)
{
    double mod;

    if ((op == HX_OP_DIV || op == HX_OP_FLOORDIV || op == HX_OP_MOD) && b == 0)
        return hx_jvm_fail(vm, HX_EFORMAT, "float division by zero");
    switch (op) {
    case HX_OP_ADD:
        *out = hx_jfloat(a + b);
        return 0;
    case HX_OP_SUB:
        *out = hx_jfloat(a - b);
        return 0;
    case HX_OP_MUL:
        *out = hx_jfloat(a * b);
        return 0;
    case HX_OP_DIV:
        *out = hx_jfloat(a / b);
        return 0;
    case HX_OP_FLOORDIV:
    case HX_OP_MOD:
        mod = fmod(a, b);
        if (mod == 0)
            mod = copysign(0, b);
        else if ((mod < 0) != (b < 0))
            mod += b;
        if (op == HX_OP_FLOORDIV) {
            const double q = (a - mod) / b, down = floor(q);
            mod = q == 0 ? copysign(0, a / b) : down + (q - down > 0.5);
        }
        *out = hx_jfloat(mod);
        return 0;
    default:
        *out = hx_jfloat(pow(a, b));
        if (a == 0 && b < 0)
            return hx_jvm_fail(vm, HX_EFORMAT,
                               "0.0 cannot be raised to a negative power");
        if (isnan(out->u.d) && !isnan(a) && !isnan(b))
            return hx_jvm_fail(vm, HX_EUNSUP, "a power that is a complex number");
        if (isinf(out->u.d) && isfinite(a) && isfinite(b))
            return hx_jvm_fail(vm, HX_EFORMAT, "numerical result out of range");
        return 0;
    }
}

static int repeat(hx_jvm *vm, hx_jval v, int64_t times, hx_jval *out)
{
    const size_t n = times > 0 ? (size_t)times : 0;
    size_t total, part = v.t == HX_J_STR ? v.u.s->n : v.u.q->n;
    hx_jbuf b = { .vm = vm };
    hx_jval *item;
    int rc;

    if (!hx_mul(n, part, &total))
        return hx_jvm_fail(vm, HX_ENOMEM, "no memory for %zu copies", n);
    if (v.t == HX_J_STR) {
        for (size_t i = 0; i < n && part > 0 && b.rc == 0; i++)
            hx_jbuf_put(&b, v.u.s);
        return hx_jbuf_done_safe(&b, v.u.s->safe, out);
    }
    if ((rc = hx_jval_list(vm, v.t, total, &item, out)) != 0)
        return rc;
    for (size_t i = 0; i < total; i++)
        item[i] = v.u.q->v[i % part];
    return 0;
}

static int add_lists(hx_jvm *vm, hx_jval a, hx_jval b, hx_jval *out)
{
    const size_t n = a.u.q->n, m = b.u.q->n;
    hx_jval *item;
    int rc;

    if ((rc = hx_jvm_work(vm, (n + m) / 16)) != 0 ||
        (rc = hx_jval_list(vm, a.t, n + m, &item, out)) != 0)
        return rc;
    if (n > 0)
        memcpy(item, a.u.q->v, n * sizeof *item);
    if (m > 0)
        memcpy(item + n, b.u.q->v, m * sizeof *item);
    return 0;
}

/* "+" on a text that went through `safe` or `escape` escapes the other side, even though
 * autoescape is off: that is what HuggingFace's setup renders. */
static int add_strings(hx_jvm *vm, hx_jval a, hx_jval b, hx_jval *out)
{
    const bool safe = a.u.s->safe || b.u.s->safe;
    int rc;

    if (safe && ((rc = hx_jstr_escape(vm, a.u.s, &a)) != 0 ||
                 (rc = hx_jstr_escape(vm, b.u.s, &b)) != 0))
        return rc;
    if ((rc = hx_jstr_cat(vm, a.u.s, b.u.s, out)) != 0 || !safe)
        return rc;
    return hx_jstr_safe(vm, out->u.s, out);
}

int hx_jinja_binary(hx_jvm *vm, hx_jop op, hx_jval a, hx_jval b, hx_jval *out)
{
    const hx_jstr *s, *t;
    int rc;

    if (op == HX_OP_CAT) {
        if ((rc = hx_jval_str(vm, a, &s)) != 0 || (rc = hx_jval_str(vm, b, &t)) != 0)
            return rc;
        return hx_jstr_cat(vm, s, t, out);
    }
    if (op == HX_OP_MOD && a.t == HX_J_STR)
        return hx_jformat_percent(vm, a.u.s, b, out);
    if (a.t == HX_J_UNDEF || b.t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, a.t == HX_J_UNDEF ? a : b);
    if (hx_jval_is_int(a) && hx_jval_is_int(b))
        return int_op(vm, op, hx_jval_as_int(a), hx_jval_as_int(b), out);
    if (hx_jval_is_num(a) && hx_jval_is_num(b))
        return float_op(vm, op, hx_jval_as_double(a), hx_jval_as_double(b), out);
    if (a.t == HX_J_BIG || b.t == HX_J_BIG)
        return hx_jvm_fail(vm, HX_EUNSUP, "calculating with integers over 64 bits");
    if (op == HX_OP_ADD && a.t == HX_J_STR && b.t == HX_J_STR)
        return add_strings(vm, a, b, out);
    if (op == HX_OP_ADD && a.t == b.t && (a.t == HX_J_LIST || a.t == HX_J_TUPLE))
        return add_lists(vm, a, b, out);
    if (op == HX_OP_MUL) {
        const hx_jval v = hx_jval_is_int(a) ? b : a, k = hx_jval_is_int(a) ? a : b;
        if (hx_jval_is_int(k) &&
            (v.t == HX_J_STR || v.t == HX_J_LIST || v.t == HX_J_TUPLE))
            return repeat(vm, v, hx_jval_as_int(k), out);
    }
    if (a.t == HX_J_VIEW || b.t == HX_J_VIEW)
        return hx_jvm_fail(vm, HX_EUNSUP, "\"%s\" with a %s", SIGN[op],
                           hx_jval_type(a.t == HX_J_VIEW ? a : b));
    return hx_jvm_fail(vm, HX_EFORMAT, "unsupported operand types for %s: '%s' and '%s'",
                       SIGN[op], hx_jval_type(a), hx_jval_type(b));
}

static int eval_sign(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    const int rc = eval(vm, n->a, out);

    vm->line = n->line;
    if (rc != 0)
        return rc;
    if (out->t == HX_J_UNDEF)
        return hx_jval_undef_error(vm, *out);
    if (!hx_jval_is_num(*out))
        return hx_jvm_fail(vm, out->t == HX_J_BIG ? HX_EUNSUP : HX_EFORMAT,
                           "bad operand type for unary %s: '%s'",
                           n->kind == HX_N_NEG ? "-" : "+", hx_jval_type(*out));
    if (out->t == HX_J_FLOAT)
        *out = hx_jfloat(n->kind == HX_N_NEG ? -out->u.d : out->u.d);
    else if (n->kind == HX_N_POS)
        *out = hx_jint(hx_jval_as_int(*out));
    else
        return int_op(vm, HX_OP_SUB, 0, hx_jval_as_int(*out), out);
    return 0;
}

static int eval_compare(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jval left, right;
    bool yes = true;
    int rc = eval(vm, n->a, &left);

    for (const hx_jnode *o = n->b; o != NULL && yes && rc == 0; o = o->next) {
        if ((rc = eval(vm, o->a, &right)) != 0)
            break;
        vm->line = n->line;
        rc = hx_jval_compare(vm, (hx_jop)o->op, left, right, &yes);
        left = right;
    }
    *out = hx_jbool(yes);
    return rc;
}

/* ---- calls ----------------------------------------------------------- */

/* Evaluates the arguments of a call. caller, when not ABSENT, is one more keyword. */
static int eval_args(hx_jvm *vm, const hx_jnode *list, hx_jval caller, hx_jargs *args)
{
    static const hx_jstr CALLER = { .p = "caller", .n = 6, .len = 6 };
    size_t n = 0, k = 0;
    hx_jval *v;
    int rc;

    for (const hx_jnode *a = list; a != NULL; a = a->next)
        n++;
    *args = (hx_jargs) { 0 };
    if (n == 0 && caller.t == HX_J_ABSENT)
        return 0;
    if ((v = hx_jvm_alloc(vm, n + 1, sizeof *v)) == NULL ||
        (args->key = hx_jvm_alloc(vm, n + 1, sizeof *args->key)) == NULL)
        return HX_ENOMEM;
    args->v = v;
    for (const hx_jnode *a = list; a != NULL; a = a->next, k++) {
        if (a->kind == HX_N_KEYWORD)
            args->key[args->n_key++] = a->val.u.s;
        else
            args->n++;
        if ((rc = eval(vm, a->kind == HX_N_KEYWORD ? a->a : a, &v[k])) != 0)
            return rc;
    }
    if (caller.t != HX_J_ABSENT) {
        args->key[args->n_key++] = &CALLER;
        v[k] = caller;
    }
    return 0;
}

/* Binds arguments to the parameters of a macro in the new scope vm->frame. */
static int bind_macro(hx_jvm *vm, const hx_jnode *def, const hx_jargs *args)
{
    uint64_t used = 0;
    hx_jval caller = { .t = HX_J_ABSENT };
    size_t i = 0;
    int rc = 0;
    static const hx_jstr ANONYMOUS = { .p = "caller", .n = 6, .len = 6 };
    const hx_jstr *name = def->val.t == HX_J_STR ? def->val.u.s : &ANONYMOUS;
    const int n_name = (int)HX_MIN(name->n, 60);

    if (args->n_key > 64)
        return hx_jvm_fail(vm, HX_EUNSUP,
                           "a macro call with more than 64 keyword arguments");
    for (const hx_jnode *p = def->a; p != NULL && rc == 0; p = p->next, i++) {
        hx_jval v = { .t = HX_J_ABSENT };
        if (i < args->n) {
            v = args->v[i];
        } else {
            for (size_t k = 0; k < args->n_key; k++) {
                if (hx_jstr_eq(args->key[k], p->val.u.s)) {
                    v = args->v[args->n + k];
                    used |= (uint64_t)1 << k;
                }
            }
        }
        rc = set_in(vm, vm->frame, p->sym, v);
    }
    for (size_t k = 0; k < args->n_key && rc == 0; k++) {
        if (used >> k & 1)
            continue;
        if (!def->flag || !hx_jstr_is(args->key[k], "caller"))
            return hx_jvm_fail(
                vm, HX_EFORMAT, "macro '%.*s' takes no keyword argument '%.*s'", n_name,
                name->p, (int)HX_MIN(args->key[k]->n, 60), args->key[k]->p);
        caller = args->v[args->n + k];
    }
    if (rc == 0 && args->n > def->n)
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "macro '%.*s' takes not more than %u argument(s)", n_name,
                           name->p, def->n);
    if (rc != 0 || !def->flag)
        return rc;
    if (caller.t == HX_J_ABSENT &&
        (rc = hx_jval_hint(vm, "No caller defined", &caller)) != 0)
        return rc;
    return set_in(vm, vm->frame, HX_J_SYM_CALLER, caller);
}

/* Runs body with its output going to a text of its own. */
static int capture(hx_jvm *vm, const hx_jnode *body, hx_jval *out)
{
    hx_jbuf b = { .vm = vm }, *outer = vm->out;
    int rc;

    vm->out = &b;
    rc = exec_body(vm, body);
    vm->out = outer;
    return rc != 0 ? rc : hx_jbuf_done(&b, out);
}

static int call_macro(hx_jvm *vm, const hx_jmacro *m, const hx_jargs *args, hx_jval *out)
{
    hx_jframe *outer = vm->frame;
    const int line = vm->line;
    char text[160];
    int rc;

    if (vm->n_macro == HX_J_MACRO_MAX)
        return hx_jvm_fail(vm, HX_ELIMIT, "macros call each other over %d deep",
                           HX_J_MACRO_MAX);
    vm->n_macro++;
    if ((rc = frame_push(vm, m->scope)) != 0 || (rc = bind_macro(vm, m->def, args)) != 0)
        goto fail;
    for (const hx_jnode *p = m->def->a; p != NULL; p = p->next) {
        hx_jval v = { .t = HX_J_ABSENT };
        for (uint32_t i = 0; i < vm->frame->n; i++) {
            if (vm->frame->slot[i].sym == p->sym)
                v = vm->frame->slot[i].v;
        }
        if (v.t != HX_J_ABSENT)
            continue;
        if (p->a != NULL) {
            rc = eval(vm, p->a, &v);
        } else {
            const int n = (int)HX_MIN(p->val.u.s->n, 100);
            snprintf(text, sizeof text, "parameter '%.*s' was not provided", n,
                     p->val.u.s->p);
            rc = hx_jval_hint(vm, text, &v);
        }
        if (rc != 0 || (rc = set_in(vm, vm->frame, p->sym, v)) != 0)
            goto fail;
    }
    rc = capture(vm, m->def->body, out);
    vm->line = rc == 0 ? line : vm->line;
fail:
    vm->frame = outer;
    vm->n_macro--;
    return rc;
}

static int call_value(hx_jvm *vm, hx_jval f, const hx_jargs *args, hx_jval *out)
{
    switch ((hx_jtype)f.t) {
    case HX_J_MACRO:
        return call_macro(vm, f.u.mac, args, out);
    case HX_J_FUNC:
        return hx_jcall_run(vm, f.u.fn, hx_jnone(), args, out);
    case HX_J_METHOD:
        return hx_jcall_run(vm, f.u.met->fn, f.u.met->self, args, out);
    case HX_J_UNDEF:
        return hx_jval_undef_error(vm, f);
    case HX_J_LOOP:
        return hx_jvm_fail(vm, HX_EUNSUP, "recursive loops");
    default:
        return hx_jvm_fail(vm, HX_EFORMAT, "'%s' object is not callable",
                           hx_jval_type(f));
    }
}

static int eval_call(hx_jvm *vm, const hx_jnode *n, hx_jval caller, hx_jval *out)
{
    hx_jargs args;
    hx_jval f;
    int rc;

    if ((rc = eval(vm, n->a, &f)) != 0 || (rc = eval_args(vm, n->b, caller, &args)) != 0)
        return rc;
    vm->line = n->line;
    if ((rc = hx_jvm_work(vm, 1)) != 0)
        return rc;
    return call_value(vm, f, &args, out);
}

static int eval_filter(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jargs args;
    hx_jval self;
    int rc;

    if (n->fn == NULL) {
        vm->line = n->line;
        return hx_jvm_fail(vm, HX_EUNSUP, "%s \"%.*s\" is not known",
                           n->kind == HX_N_TEST ? "test" : "filter",
                           (int)HX_MIN(n->val.u.s->n, 60), n->val.u.s->p);
    }
    if ((rc = eval(vm, n->a, &self)) != 0 ||
        (rc = eval_args(vm, n->b, (hx_jval) { .t = HX_J_ABSENT }, &args)) != 0)
        return rc;
    vm->line = n->line;
    if ((rc = hx_jvm_work(vm, 1)) != 0)
        return rc;
    return hx_jcall_run(vm, n->fn, self, &args, out);
}

/* ---- expressions ----------------------------------------------------- */

static int eval_items(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jval *item;
    int rc =
        hx_jval_list(vm, n->kind == HX_N_LIST ? HX_J_LIST : HX_J_TUPLE, n->n, &item, out);

    for (const hx_jnode *i = n->a; i != NULL && rc == 0; i = i->next)
        rc = eval(vm, i, item++);
    return rc;
}

static int eval_dict(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jval k, v;
    hx_jdict *d;
    int rc = hx_jdict_new(vm, n->n, &d);

    for (const hx_jnode *i = n->a; i != NULL && rc == 0; i = i->next->next) {
        if ((rc = eval(vm, i, &k)) == 0 && (rc = eval(vm, i->next, &v)) == 0)
            rc = hx_jdict_put(vm, d, k, v);
    }
    *out = (hx_jval) { .t = HX_J_DICT, .u.m = d };
    return rc;
}

static int eval_slice(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    const hx_jnode *part[3] = { n->b->a, n->b->b, n->b->c };
    hx_jval obj, v[3] = { { .t = HX_J_ABSENT } };
    int rc = eval(vm, n->a, &obj);

    for (int k = 0; k < 3 && rc == 0; k++) {
        if (part[k] != NULL)
            rc = eval(vm, part[k], &v[k]);
    }
    vm->line = n->line;
    return rc != 0 ? rc : slice(vm, obj, v, out);
}

static int eval_cond(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jval test;
    char text[120];
    int rc = eval(vm, n->b, &test);

    if (rc != 0)
        return rc;
    if (hx_jval_truthy(test))
        return eval(vm, n->a, out);
    if (n->c != NULL)
        return eval(vm, n->c, out);
    snprintf(
        text, sizeof text,
        "the inline if-expression on line %d evaluated to false and no else section was "
        "defined.",
        n->line);
    return hx_jval_hint(vm, text, out);
}

static int eval_two(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jval a, b;
    int rc;

    if ((rc = eval(vm, n->a, &a)) != 0 || (rc = eval(vm, n->b, &b)) != 0)
        return rc;
    vm->line = n->line;
    return n->kind == HX_N_BIN ? hx_jinja_binary(vm, (hx_jop)n->op, a, b, out)
                               : hx_jinja_item(vm, a, b, out);
}

static int eval_logic(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    const int rc = eval(vm, n->a, out);

    if (rc != 0)
        return rc;
    if (n->kind == HX_N_NOT)
        *out = hx_jbool(!hx_jval_truthy(*out));
    else if (hx_jval_truthy(*out) == (n->kind == HX_N_AND))
        return eval(vm, n->b, out);
    return 0;
}

static int eval_attr(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jval obj;
    const int rc = eval(vm, n->a, &obj);

    vm->line = n->line;
    return rc != 0 ? rc : hx_jinja_attr(vm, obj, n->val.u.s, out);
}

static int eval_node(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    switch ((hx_jkind)n->kind) {
    case HX_N_CONST:
        *out = n->val;
        return 0;
    case HX_N_NAME:
        return get_name(vm, n->sym, out);
    case HX_N_BODY:
        *out = vm->body;
        return 0;
    case HX_N_LIST:
    case HX_N_TUPLE:
        return eval_items(vm, n, out);
    case HX_N_DICT:
        return eval_dict(vm, n, out);
    case HX_N_NOT:
    case HX_N_AND:
    case HX_N_OR:
        return eval_logic(vm, n, out);
    case HX_N_NEG:
    case HX_N_POS:
        return eval_sign(vm, n, out);
    case HX_N_BIN:
    case HX_N_ITEM:
        return eval_two(vm, n, out);
    case HX_N_COMPARE:
        return eval_compare(vm, n, out);
    case HX_N_COND:
        return eval_cond(vm, n, out);
    case HX_N_ATTR:
        return eval_attr(vm, n, out);
    case HX_N_SLICE:
        return eval_slice(vm, n, out);
    case HX_N_CALL:
        return eval_call(vm, n, (hx_jval) { .t = HX_J_ABSENT }, out);
    case HX_N_FILTER:
    case HX_N_TEST:
        return eval_filter(vm, n, out);
    default:
        hx_panic(__FILE__, __LINE__, "statement where an expression belongs");
        return HX_EARG;
    }
}

static int eval(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    int rc;

    vm->line = n->line;
    if (n->kind == HX_N_CONST) {
        *out = n->val;
        return 0;
    }
    if ((rc = hx_jvm_enter(vm)) != 0)
        return rc;
    rc = eval_node(vm, n, out);
    vm->depth--;
    return rc;
}

/* ---- loops ----------------------------------------------------------- */

/* The next item that passes the loop's own test. 1, 0: end, or an error. */
static int loop_pull(hx_jvm *vm, hx_jloop *l, hx_jval *out)
{
    hx_jframe *outer = vm->frame;
    const int line = vm->line;
    hx_jval ok;
    int rc;

    while ((rc = hx_jiter_next(vm, &l->it, out)) == 1 && l->def->c != NULL &&
           !l->tested) {
        if ((rc = frame_push(vm, l->scope)) == 0 &&
            (rc = assign(vm, l->def->a, *out)) == 0)
            rc = eval(vm, l->def->c, &ok);
        vm->frame = outer;
        if (rc != 0)
            return rc;
        vm->line = line;
        if (hx_jval_truthy(ok))
            return 1;
    }
    return rc;
}

int hx_jloop_peek(hx_jvm *vm, hx_jloop *l)
{
    if (l->peek.t != HX_J_ABSENT || l->ended)
        return 0;
    const int rc = loop_pull(vm, l, &l->peek);
    if (rc == 0) {
        l->ended = true;
        l->peek = (hx_jval) { .t = HX_J_ABSENT };
    }
    return rc < 0 ? rc : 0;
}

/* Of a loop with a test or over a generator, everything that is left has to be looked at.
 */
int hx_jloop_len(hx_jvm *vm, hx_jloop *l, int64_t *n)
{
    hx_jval v, *item;
    size_t k = 0, cap = 0;
    int rc = 0;

    if (l->n < 0) {
        for (item = NULL; (rc = loop_pull(vm, l, &v)) == 1; item[k++] = v) {
            if (k < cap)
                continue;
            cap = cap ? 2 * cap : 8;
            hx_jval *more = hx_jvm_alloc(vm, cap, sizeof v);
            if (more == NULL)
                return HX_ENOMEM;
            if (k > 0)
                memcpy(more, item, k * sizeof v);
            item = more;
        }
        if (rc < 0)
            return rc;
        hx_jseq *q = hx_jvm_alloc(vm, 1, sizeof *q);
        if (q == NULL)
            return HX_ENOMEM;
        *q = (hx_jseq) { item, k };
        l->it = (hx_jiter) { .src = { .t = HX_J_LIST, .u.q = q } };
        l->tested = true;
        l->n = l->index0 + 1 + (l->peek.t != HX_J_ABSENT) + (int64_t)k;
    }
    *n = l->n;
    return 0;
}

/* 1: l->cur is the next item. */
static int loop_advance(hx_jvm *vm, hx_jloop *l)
{
    hx_jval next = l->peek;
    int rc;

    if (next.t == HX_J_ABSENT) {
        if (l->ended)
            return 0;
        if ((rc = loop_pull(vm, l, &next)) != 1)
            return rc;
    }
    l->peek = (hx_jval) { .t = HX_J_ABSENT };
    l->index0++;
    l->prev = l->cur;
    l->cur = next;
    return 1;
}

static int exec_for(hx_jvm *vm, const hx_jnode *n)
{
    hx_jframe *outer = vm->frame;
    hx_jloop *l = hx_jvm_alloc(vm, 1, sizeof *l);
    bool finished = false;
    hx_jval src;
    size_t len;
    int rc;

    if (l == NULL)
        return HX_ENOMEM;
    if ((rc = eval(vm, n->b, &src)) != 0)
        return rc;
    vm->line = n->line;
    if ((rc = hx_jiter_init(vm, &l->it, src)) != 0)
        return rc;
    const hx_jval self = { .t = HX_J_LOOP, .u.loop = l };
    l->def = n;
    l->scope = outer;
    l->index0 = l->n = -1;
    if (n->c == NULL && src.t != HX_J_GEN) {
        if ((rc = hx_jval_len(vm, src, &len)) != 0)
            return rc;
        l->n = (int64_t)len;
    }
    while ((rc = loop_advance(vm, l)) == 1) {
        if (vm->frame == outer || vm->frame->captured) {
            if ((rc = frame_push(vm, outer)) != 0)
                break;
        }
        vm->frame->n = 0;
        if ((rc = assign(vm, n->a, l->cur)) != 0 ||
            (rc = set_in(vm, vm->frame, HX_J_SYM_LOOP, self)) != 0)
            break;
        rc = exec_body(vm, n->body);
        /* jinja2 runs the else block unless a turn got to the end of the body. */
        finished |= rc == 0;
        if (rc < 0 || rc == FLOW_BREAK)
            break;
        vm->line = n->line;
    }
    vm->frame = outer;
    if (rc < 0)
        return rc;
    if (!finished && n->els != NULL) {
        if ((rc = frame_push(vm, outer)) != 0)
            return rc;
        rc = exec_body(vm, n->els);
        vm->frame = outer;
        return rc;
    }
    return 0;
}

/* ---- statements ------------------------------------------------------ */

static int exec_print(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jstr *s;
    hx_jval v;
    int rc;

    if ((rc = eval(vm, n->a, &v)) != 0)
        return rc;
    vm->line = n->line;
    if ((rc = hx_jval_str(vm, v, &s)) != 0)
        return rc;
    hx_jbuf_put(vm->out, s);
    return vm->out->rc;
}

static int exec_if(hx_jvm *vm, const hx_jnode *n)
{
    hx_jval test;
    int rc;

    for (;;) {
        if ((rc = eval(vm, n->a, &test)) != 0)
            return rc;
        if (hx_jval_truthy(test))
            return exec_body(vm, n->body);
        if (n->els == NULL || n->els->kind != HX_N_IF || n->els->next != NULL)
            return exec_body(vm, n->els);
        n = n->els;
    }
}

static int set_target(hx_jvm *vm, const hx_jnode *t, hx_jval v)
{
    hx_jval space;
    int rc;

    if (t->kind != HX_N_NS_TARGET)
        return assign(vm, t, v);
    if ((rc = get_name(vm, t->sym, &space)) != 0)
        return rc;
    if (space.t != HX_J_SPACE)
        return hx_jvm_fail(vm, HX_EFORMAT,
                           "cannot assign attribute on non-namespace object");
    return hx_jdict_put(vm, space.u.m, t->val, v);
}

/* Captures body in a scope of its own, then runs filters (an expression over BODY). */
static int filtered(hx_jvm *vm, const hx_jnode *body, const hx_jnode *filters,
                    hx_jval *out)
{
    hx_jframe *outer = vm->frame;
    const hx_jval saved = vm->body;
    hx_jval text;
    int rc;

    if ((rc = frame_push(vm, outer)) != 0)
        return rc;
    rc = capture(vm, body, &text);
    if (rc == 0) {
        vm->body = text;
        rc = eval(vm, filters, out);
        vm->body = saved;
    }
    vm->frame = outer;
    return rc;
}

static int exec_set(hx_jvm *vm, const hx_jnode *n)
{
    hx_jval v;
    const int rc =
        n->kind == HX_N_SET ? eval(vm, n->b, &v) : filtered(vm, n->body, n->b, &v);

    vm->line = rc == 0 ? n->line : vm->line;
    return rc != 0 ? rc : set_target(vm, n->a, v);
}

static int exec_filter_block(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jstr *s;
    hx_jval v;
    int rc;

    if ((rc = filtered(vm, n->body, n->a, &v)) != 0 || (rc = hx_jval_str(vm, v, &s)) != 0)
        return rc;
    hx_jbuf_put(vm->out, s);
    return vm->out->rc;
}

static int make_macro(hx_jvm *vm, const hx_jnode *n, hx_jval *out)
{
    hx_jmacro *m = hx_jvm_alloc(vm, 1, sizeof *m);

    if (m == NULL)
        return HX_ENOMEM;
    *m = (hx_jmacro) { n, vm->frame };
    frame_capture(vm);
    *out = (hx_jval) { .t = HX_J_MACRO, .u.mac = m };
    return 0;
}

static int exec_macro(hx_jvm *vm, const hx_jnode *n)
{
    hx_jval m;
    const int rc = make_macro(vm, n, &m);

    return rc != 0 ? rc : set_in(vm, vm->frame, n->sym, m);
}

static int exec_call_block(hx_jvm *vm, const hx_jnode *n)
{
    const hx_jstr *s;
    hx_jval caller, v;
    int rc;

    if ((rc = make_macro(vm, n, &caller)) != 0 ||
        (rc = eval_call(vm, n->b, caller, &v)) != 0 || (rc = hx_jval_str(vm, v, &s)) != 0)
        return rc;
    hx_jbuf_put(vm->out, s);
    return vm->out->rc;
}

/* with, and the generation block of HuggingFace, which only marks its text. */
static int exec_scope(hx_jvm *vm, const hx_jnode *n)
{
    hx_jframe *outer = vm->frame, *inner;
    hx_jval v;
    int rc;

    if ((rc = frame_push(vm, outer)) != 0)
        return rc;
    inner = vm->frame;
    vm->frame = outer; /* values of with see the scope outside */
    for (const hx_jnode *t = n->a, *e = n->b; t != NULL; t = t->next, e = e->next) {
        if ((rc = eval(vm, e, &v)) != 0 || (rc = set_in(vm, inner, t->sym, v)) != 0)
            return rc;
    }
    vm->frame = inner;
    rc = exec_body(vm, n->body);
    vm->frame = outer;
    return rc;
}

static int exec(hx_jvm *vm, const hx_jnode *n)
{
    vm->line = n->line;
    switch ((hx_jkind)n->kind) {
    case HX_N_TEXT:
        hx_jbuf_put(vm->out, n->val.u.s);
        return vm->out->rc;
    case HX_N_PRINT:
        return exec_print(vm, n);
    case HX_N_IF:
        return exec_if(vm, n);
    case HX_N_FOR:
        return exec_for(vm, n);
    case HX_N_SET:
    case HX_N_SET_BLOCK:
        return exec_set(vm, n);
    case HX_N_MACRO:
        return exec_macro(vm, n);
    case HX_N_CALL_BLOCK:
        return exec_call_block(vm, n);
    case HX_N_FILTER_BLOCK:
        return exec_filter_block(vm, n);
    case HX_N_WITH:
    case HX_N_SCOPE:
        return exec_scope(vm, n);
    case HX_N_BREAK:
        return FLOW_BREAK;
    case HX_N_CONTINUE:
        return FLOW_CONTINUE;
    default:
        hx_panic(__FILE__, __LINE__, "expression where a statement belongs");
        return HX_EARG;
    }
}

static int exec_body(hx_jvm *vm, const hx_jnode *n)
{
    int rc = 0;

    if (n == NULL)
        return 0;
    if ((rc = hx_jvm_enter(vm)) != 0)
        return rc;
    for (; n != NULL && rc == 0; n = n->next)
        rc = exec(vm, n);
    vm->depth--;
    return rc;
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
static int load_vars(hx_jvm *vm, const hx_json *vars)
{
    const hx_jinja *t = vm->t;
    hx_str key;
    int rc;

    if ((vm->root = hx_jvm_alloc(vm, t->n_sym, sizeof *vm->root)) == NULL)
        return HX_ENOMEM;
    for (uint32_t s = 0; s < t->n_sym; s++) {
        const hx_jbuiltin *fn = hx_jcall_global(t->sym[s]);
        if (fn != NULL)
            vm->root[s] = (hx_jval) { .t = HX_J_FUNC, .u.fn = fn };
    }
    for (size_t i = 0; i < hx_json_len(vars); i++) {
        const hx_json *v = hx_json_member(vars, i, &key);
        for (uint32_t s = 0; s < t->n_sym; s++) {
            if (hx_str_eq(t->sym[s], key) &&
                (rc = hx_jval_from_json(vm, v, &vm->root[s])) != 0)
                return rc;
        }
    }
    return 0;
}

int hx_jinja_run(const hx_jinja *t, const hx_json *vars, const hx_jinja_opt *opt,
                 hx_sb *text, hx_sb *user, hx_err *err)
{
    const size_t n0 = text->n, u0 = user != NULL ? user->n : 0;
    char block[256];
    size_t cap;
    hx_arena mem;
    hx_jbuf b;
    hx_jvm vm = { .t = t,
                  .mem = &mem,
                  .err = err,
                  .name = t->name,
                  .line = 1,
                  .max_steps =
                      opt != NULL && opt->max_steps > 0 ? opt->max_steps : 50000000,
                  .now_s = opt != NULL ? opt->now_s : 0,
                  .track = user != NULL };
    int rc;

    if (hx_json_kind(vars) != HX_JSON_OBJECT && vars != NULL)
        return hx_fail(err, HX_EARG, "%s: variables are a JSON %s, expected an object",
                       t->name, hx_json_kind_name(vars));
    b = (hx_jbuf) { .vm = &vm,
                    .max = opt != NULL && opt->max_bytes > 0 ? opt->max_bytes
                                                             : (size_t)64 << 20 };
    if (!hx_mul(b.max, HX_J_MEM_OUT, &cap) || cap > SIZE_MAX - HX_J_MEM_MAX)
        return hx_fail(err, HX_EARG, "%s: output bound of %zu bytes is too large",
                       t->name, b.max);
    hx_arena_init(&mem, HX_J_MEM_MAX + cap);
    vm.out = &b;
    if ((rc = load_vars(&vm, vars)) != 0 || (rc = exec_body(&vm, t->body)) != 0)
        goto fail;
    hx_sb_add(text, b.p, b.n);
    if (user != NULL && b.mark != NULL)
        hx_sb_add(user, (const char *)b.mark, b.n);
    memset(block, b.user, sizeof block);
    for (size_t i = 0; user != NULL && b.mark == NULL && i < b.n; i += sizeof block)
        hx_sb_add(user, block, HX_MIN(sizeof block, b.n - i));
    if (text->bad || (user != NULL && user->bad))
        rc = hx_fail(err, HX_ENOMEM, "%s: no memory for %zu bytes of output", t->name,
                     b.n);
fail:
    if (rc != 0) {
        text->n = n0;
        if (user != NULL)
            user->n = u0;
    }
    hx_arena_reset(&mem);
    return rc;
}
