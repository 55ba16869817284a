/* grammar_ir.c - the builder of grammar expressions: nodes, rules, limits.
 *
 * Called by the front ends. Errors stick: after one every call returns HX_NONE at once,
 * so a front end looks at ir->rc where it loops and at the end. It must never grow beyond
 * the limits of the request it serves. */
#include "text/grammar_ir.h"

#include <stdio.h>
#include <stdlib.h>

/* Copies of a repetition up to this many NFA states are written out; more are counted
 * while matching. */
enum { EXPAND_MAX = 64 };

static const struct {
    const char *name, *text;
    uint32_t dflt;
    size_t at;
} limits[] = {
#define X(name, dflt, text) { #name, text, dflt, offsetof(hx_grammar_opt, name) },
    HX_GRAMMAR_LIMITS(X)
#undef X
};

static uint32_t *limit_of(hx_grammar_opt *opt, size_t i)
{
    return (uint32_t *)(void *)((char *)opt + limits[i].at);
}

void hx_ir_init(hx_ir *ir, const hx_grammar_opt *opt, hx_err *err)
{
    *ir = (hx_ir) { .err = err };
    if (opt != NULL)
        ir->opt = *opt;
    for (size_t i = 0; i < HX_LEN(limits); i++) {
        uint32_t *v = limit_of(&ir->opt, i);

        *v = *v == 0 ? limits[i].dflt : *v;
    }
    /* What a matcher's fixed arrays and a trie's depth hold. */
    ir->opt.depth = HX_MIN(ir->opt.depth, HX_MATCHER_FRAMES - 1);
    if (HX_PUSH(ir, ir->node, 2))
        ir->node.p[HX_EMPTY].kind = HX_IR_EMPTY;
    (void)HX_PUSH(ir, ir->rule, 1); /* so that rule 0 can mean none */
}

void hx_ir_free(hx_ir *ir)
{
    hx_free(ir->node.p);
    hx_free(ir->list.p);
    hx_free(ir->range.p);
    hx_free(ir->text.p);
    hx_free(ir->rule.p);
}

int hx_ir_fail(hx_ir *ir, int code, const char *fmt, ...)
{
    char msg[sizeof(ir->err->msg)];
    va_list ap;

    if (ir->rc != 0)
        return ir->rc;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    return ir->rc = hx_fail(ir->err, code, "%s", msg);
}

int hx_ir_over(hx_ir *ir, const char *limit)
{
    for (size_t i = 0; i < HX_LEN(limits); i++)
        if (strcmp(limits[i].name, limit) == 0)
            hx_ir_fail(ir, HX_ELIMIT, "grammar: more than %u %s (limit %s)",
                       *limit_of(&ir->opt, i), limits[i].text, limit);
    return ir->rc;
}

bool hx_ir_work(hx_ir *ir, uint64_t n)
{
    ir->steps += n;
    if (ir->steps > ir->opt.steps)
        hx_ir_over(ir, "steps");
    return ir->rc == 0;
}

void *hx_ir_grow(hx_ir *ir, void *p, uint32_t *n, uint32_t *cap, size_t size,
                 uint32_t count)
{
    if (ir->rc != 0)
        return p;
    if (count > *cap - *n) {
        const size_t want = HX_MAX((size_t)*n + count, 2 * (size_t)*cap + 16);
        void *grown;

        ir->bytes += (want - *cap) * size;
        if (ir->bytes > ir->opt.memory_bytes || want > UINT32_MAX) {
            hx_ir_over(ir, "memory_bytes");
            return p;
        }
        if ((grown = hx_realloc(p, want * size)) == NULL) {
            hx_ir_fail(ir, HX_ENOMEM, "grammar: no memory for %zu bytes", want * size);
            return p;
        }
        p = grown;
        *cap = (uint32_t)want;
    }
    if (count > 0)
        memset((char *)p + *n * size, 0, count * size);
    *n += count;
    return p;
}

/* ---- sources --------------------------------------------------------- */

bool hx_scan_eat(hx_scan *s, const char *lit)
{
    const size_t n = strlen(lit);

    if (s->n - s->i < n || memcmp(s->p + s->i, lit, n) != 0)
        return false;
    s->i += n;
    return true;
}

bool hx_scan_number(hx_scan *s, uint32_t *out)
{
    const size_t first = s->i;
    uint64_t v = 0;

    for (int c; (c = hx_scan_peek(s, 0)) >= '0' && c <= '9'; s->i++)
        v = HX_MIN(v * 10 + (uint64_t)(c - '0'), HX_IR_NO_END - 1);
    *out = (uint32_t)v;
    return s->i > first;
}

void hx_ir_check_repeat(hx_ir *ir, uint32_t min, uint32_t max)
{
    if (min > ir->opt.repeat || (max != HX_IR_NO_END && max > ir->opt.repeat))
        hx_ir_over(ir, "repeat");
}

/* ---- expressions ----------------------------------------------------- */

static hx_ref node(hx_ir *ir, hx_ir_node v)
{
    if (ir->node.n >= ir->opt.nodes)
        hx_ir_over(ir, "nodes");
    if (!hx_ir_work(ir, 1) || !HX_PUSH(ir, ir->node, 1))
        return HX_NONE;
    ir->node.p[ir->node.n - 1] = v;
    return ir->node.n - 1;
}

static uint32_t size_of(const hx_ir *ir, hx_ref r)
{
    return ir->node.p[r].size;
}

static uint32_t size_add(uint32_t a, uint32_t b)
{
    return a > UINT32_MAX - b ? UINT32_MAX : a + b;
}

hx_ref hx_ir_lit(hx_ir *ir, const char *p, size_t n)
{
    const uint32_t at = ir->text.n;

    if (n == 0)
        return HX_EMPTY;
    if (n > UINT32_MAX / 2 || !HX_PUSH(ir, ir->text, (uint32_t)n))
        return HX_NONE;
    memcpy(ir->text.p + at, p, n);
    return node(ir,
                (hx_ir_node) {
                    .kind = HX_IR_LIT, .a = at, .b = (uint32_t)n, .size = (uint32_t)n });
}

hx_ref hx_ir_str(hx_ir *ir, const char *s)
{
    return hx_ir_lit(ir, s, strlen(s));
}

static int by_lo(const void *a, const void *b)
{
    const uint32_t x = ((const hx_range *)a)->lo, y = ((const hx_range *)b)->lo;

    return x < y ? -1 : x > y;
}

size_t hx_range_norm(hx_range *r, size_t n)
{
    size_t out = 0;

    if (n > 1)
        qsort(r, n, sizeof(*r), by_lo);
    for (size_t i = 0; i < n; i++) {
        if (r[i].hi < r[i].lo)
            continue;
        if (out > 0 && r[i].lo <= r[out - 1].hi + 1)
            r[out - 1].hi = HX_MAX(r[out - 1].hi, r[i].hi);
        else
            r[out++] = r[i];
    }
    return out;
}

size_t hx_range_invert(const hx_range *r, size_t n, hx_range *out)
{
    uint32_t lo = 0;
    size_t n_out = 0;

    for (size_t i = 0; i < n; i++) {
        if (r[i].lo > lo)
            out[n_out++] = (hx_range) { lo, r[i].lo - 1 };
        lo = r[i].hi + 1;
    }
    if (lo <= 0x10ffff)
        out[n_out++] = (hx_range) { lo, 0x10ffff };
    return n_out;
}

hx_ref hx_ir_set(hx_ir *ir, hx_range *r, size_t n, bool json)
{
    const uint32_t at = ir->range.n;
    uint32_t used = 0;

    n = hx_range_norm(r, n);
    /* One range may lie on both sides of the surrogates. */
    if (!hx_ir_work(ir, n) || !HX_PUSH(ir, ir->range, (uint32_t)n + 1))
        return HX_NONE;
    for (size_t i = 0; i < n; i++) {
        const hx_range part[2] = { { r[i].lo, HX_MIN(r[i].hi, 0xd7ff) },
                                   { HX_MAX(r[i].lo, 0xe000),
                                     HX_MIN(r[i].hi, 0x10ffff) } };

        for (int k = 0; k < 2; k++)
            if (part[k].lo <= part[k].hi)
                ir->range.p[at + used++] = part[k];
    }
    ir->range.n = at + used;
    if (used == 0)
        return HX_NONE;
    return node(ir,
                (hx_ir_node) { .kind = HX_IR_SET,
                               .json = json,
                               .a = at,
                               .b = used,
                               .size = ir->range.p[ir->range.n - 1].hi < 0x80 ? 1 : 8 });
}

hx_ref hx_ir_class(hx_ir *ir, hx_ranges *set, bool invert, bool json)
{
    const uint32_t n = (uint32_t)hx_range_norm(set->p, set->n);

    if (!invert)
        return hx_ir_set(ir, set->p, n, json);
    if (!HX_PUSH(ir, *set, n + 1 + set->n))
        return HX_NONE;
    return hx_ir_set(ir, set->p + n, hx_range_invert(set->p, n, set->p + n), json);
}

hx_ref hx_ir_char(hx_ir *ir, uint32_t cp, bool json)
{
    return hx_ir_set(ir, &(hx_range) { cp, cp }, 1, json);
}

/* A list of children; flattens nothing, leaves out those that change nothing. */
static hx_ref list(hx_ir *ir, hx_ir_kind kind, const hx_ref *child, size_t n,
                   hx_ref neutral)
{
    const uint32_t at = ir->list.n;
    uint32_t used = 0, size = kind == HX_IR_ALT;

    if (n > UINT32_MAX / 2 || !hx_ir_work(ir, n) || !HX_PUSH(ir, ir->list, (uint32_t)n))
        return HX_NONE;
    for (size_t i = 0; i < n; i++) {
        if (kind == HX_IR_SEQ && child[i] == HX_NONE)
            return HX_NONE;
        if (child[i] == neutral)
            continue;
        ir->list.p[at + used++] = child[i];
        size = size_add(size, size_of(ir, child[i]));
    }
    ir->list.n = at + used;
    if (used == 0)
        return neutral;
    if (used == 1)
        return ir->list.p[at];
    return node(ir,
                (hx_ir_node) { .kind = (uint8_t)kind, .a = at, .b = used, .size = size });
}

hx_ref hx_ir_seq(hx_ir *ir, const hx_ref *child, size_t n)
{
    return list(ir, HX_IR_SEQ, child, n, HX_EMPTY);
}

hx_ref hx_ir_alt(hx_ir *ir, const hx_ref *child, size_t n)
{
    return list(ir, HX_IR_ALT, child, n, HX_NONE);
}

hx_ref hx_ir_opt(hx_ir *ir, hx_ref child)
{
    return HX_ALT(ir, child, HX_EMPTY);
}

hx_ref hx_ir_call(hx_ir *ir, uint32_t rule)
{
    return node(ir, (hx_ir_node) { .kind = HX_IR_CALL, .a = rule, .size = 1 });
}

hx_ref hx_ir_goto(hx_ir *ir, uint32_t rule)
{
    return node(ir, (hx_ir_node) { .kind = HX_IR_GOTO, .a = rule, .size = 1 });
}

hx_ref hx_ir_token(hx_ir *ir, int32_t id)
{
    return node(ir, (hx_ir_node) { .kind = HX_IR_TOKEN, .a = (uint32_t)id, .size = 1 });
}

uint32_t hx_ir_rule_new(hx_ir *ir, hx_str name)
{
    if (ir->rule.n >= ir->opt.rules)
        hx_ir_over(ir, "rules");
    if (!hx_ir_work(ir, 1) || !HX_PUSH(ir, ir->rule, 1))
        return 0;
    ir->rule.p[ir->rule.n - 1].name = name;
    return ir->rule.n - 1;
}

/* Counting at run time: one rule for the child, one that calls it again and again. */
static hx_ref counted(hx_ir *ir, hx_ref child, uint32_t min, uint32_t max)
{
    const bool is_call = ir->node.p[child].kind == HX_IR_CALL;
    const uint32_t body = is_call ? ir->node.p[child].a : hx_ir_rule_of(ir, child);
    const uint32_t turns = hx_ir_rule_of(ir, HX_NONE);

    if (ir->rc != 0)
        return HX_NONE;
    ir->rule.p[turns].counted = true;
    ir->rule.p[turns].child = body;
    ir->rule.p[turns].min = min;
    ir->rule.p[turns].max = max;
    return hx_ir_call(ir, turns);
}

uint32_t hx_ir_rule_of(hx_ir *ir, hx_ref body)
{
    const uint32_t rule = hx_ir_rule_new(ir, (hx_str) { NULL, 0 });

    if (ir->rc == 0)
        ir->rule.p[rule].body = body;
    return rule;
}

hx_ref hx_ir_any_order(hx_ir *ir, const hx_ref *child, uint32_t n, uint32_t must,
                       hx_ref again)
{
    const uint32_t first = ir->rule.n, all = n + (again != HX_NONE);
    uint32_t turns;

    if (ir->rc == 0 && n > HX_ANY_ORDER_MAX)
        hx_ir_fail(ir, HX_EARG, "grammar: %u parts in any order, at most %d", n,
                   HX_ANY_ORDER_MAX);
    for (uint32_t i = 0; i < all && ir->rc == 0; i++)
        hx_ir_rule_of(ir, i < n ? child[i] : again);
    turns = hx_ir_rule_of(ir, HX_NONE);
    if (ir->rc != 0)
        return HX_NONE;
    ir->rule.p[turns].any_order = true;
    ir->rule.p[turns].again = again != HX_NONE;
    ir->rule.p[turns].child = first;
    ir->rule.p[turns].min = must;
    ir->rule.p[turns].max = all;
    return hx_ir_call(ir, turns);
}

hx_ref hx_ir_rep(hx_ir *ir, hx_ref child, uint32_t min, uint32_t max, hx_rep_how how)
{
    const uint64_t copies = max == HX_IR_NO_END ? (uint64_t)min + 1 : max;
    uint64_t size;

    if (ir->rc != 0)
        return HX_NONE;
    size = copies * ((uint64_t)size_of(ir, child) + 1);
    if (max == 0 || child == HX_EMPTY)
        return HX_EMPTY;
    if (child == HX_NONE)
        return min == 0 ? HX_EMPTY : HX_NONE;
    if (min == 1 && max == 1)
        return child;
    if (how == HX_REP_COUNT || (how == HX_REP_AUTO && size > EXPAND_MAX && copies > 1))
        return counted(ir, child, min, max);
    if (size > ir->opt.states) {
        hx_ir_over(ir, "states");
        return HX_NONE;
    }
    return node(
        ir,
        (hx_ir_node) {
            .kind = HX_IR_REP, .a = child, .b = min, .c = max, .size = (uint32_t)size });
}
