/* grammar_nfa.c - expressions as nondeterministic automata, over bytes for matching or
 * over sets of code points for questions about regular languages.
 *
 * Called by grammar_dfa.c, the regex and the schema front end. An expression is built
 * backwards: build(e, k) gives the state that matches e and then goes on in state k, and
 * is remembered by (e, k), so that shared expressions stay shared. It must never recurse
 * deeper than expressions nest in the source. */
#include "text/grammar_ir.h"

void hx_nfa_init(hx_nfa *nfa, hx_ir *ir, bool chars)
{
    *nfa = (hx_nfa) { .ir = ir, .chars = chars };
}

void hx_nfa_free(hx_nfa *nfa)
{
    HX_DROP(nfa->ir, nfa->state);
    HX_DROP(nfa->ir, nfa->edge);
    HX_DROP(nfa->ir, nfa->memo);
    HX_DROP(nfa->ir, nfa->todo);
}

/* State 0 has no edges: what matches nothing leads there. */
static uint32_t new_state(hx_nfa *nfa)
{
    if (nfa->state.n >= nfa->ir->opt.states)
        hx_ir_over(nfa->ir, "states");
    if (!hx_ir_work(nfa->ir, 1) || !HX_PUSH(nfa->ir, nfa->state, 1))
        return 0;
    return nfa->state.n - 1;
}

static void add_edge(hx_nfa *nfa, uint32_t from, hx_nfa_edge e)
{
    if (e.to == 0 || from == 0 || !hx_ir_work(nfa->ir, 1) ||
        !HX_PUSH(nfa->ir, nfa->edge, 1))
        return;
    e.next = nfa->state.p[from];
    nfa->edge.p[nfa->edge.n - 1] = e;
    nfa->state.p[from] = nfa->edge.n - 1;
}

static void add_eps(hx_nfa *nfa, uint32_t from, uint32_t to)
{
    add_edge(nfa, from, (hx_nfa_edge) { .kind = HX_E_EPS, .to = to });
}

static void add_bytes(hx_nfa *nfa, uint32_t from, uint8_t lo, uint8_t hi, uint32_t to)
{
    add_edge(nfa, from,
             (hx_nfa_edge) { .kind = HX_E_BYTE, .lo = lo, .hi = hi, .to = to });
}

/* ---- memo ------------------------------------------------------------ */

static uint32_t slot_of(const hx_nfa *nfa, uint64_t key)
{
    const uint32_t mask = nfa->memo.n - 1;
    uint32_t i = (uint32_t)(key * 0x9e3779b97f4a7c15u >> 33) & mask;

    while (nfa->memo.p[i].state != 0 && nfa->memo.p[i].key != key)
        i = (i + 1) & mask;
    return i;
}

/* Doubles the table, which is never more than half full. */
static bool memo_room(hx_nfa *nfa)
{
    hx_nfa old = *nfa;

    if (2 * nfa->n_memo < nfa->memo.n)
        return true;
    nfa->memo.p = NULL;
    nfa->memo.n = nfa->memo.cap = 0;
    if (!HX_PUSH(nfa->ir, nfa->memo, HX_MAX(64, 2 * old.memo.n))) {
        nfa->memo = old.memo;
        return false;
    }
    for (uint32_t i = 0; i < old.memo.n; i++)
        if (old.memo.p[i].state != 0)
            nfa->memo.p[slot_of(nfa, old.memo.p[i].key)] = old.memo.p[i];
    HX_DROP(nfa->ir, old.memo);
    return true;
}

static void remember(hx_nfa *nfa, uint64_t key, uint32_t state)
{
    if (state == 0 || !memo_room(nfa))
        return;
    hx_nfa_memo *m = &nfa->memo.p[slot_of(nfa, key)];

    nfa->n_memo += m->state == 0;
    *m = (hx_nfa_memo) { key, state };
}

static uint32_t recall(const hx_nfa *nfa, uint64_t key)
{
    return nfa->memo.n == 0 ? 0 : nfa->memo.p[slot_of(nfa, key)].state;
}

/* Keys beside (expression, continuation): byte range before a continuation. */
static uint64_t byte_key(uint8_t lo, uint8_t hi, uint32_t k)
{
    return (uint64_t)(0xff000000u | (uint32_t)lo << 8 | hi) << 32 | k;
}

/* ---- sets ------------------------------------------------------------ */

/* The state before byte range [lo, hi] and k: shared, so that all sets with the same
 * continuation share the tails of their characters. */
static uint32_t byte_before(hx_nfa *nfa, uint8_t lo, uint8_t hi, uint32_t k)
{
    const uint64_t key = byte_key(lo, hi, k);
    uint32_t s = recall(nfa, key);

    if (s == 0) {
        s = new_state(nfa);
        add_bytes(nfa, s, lo, hi, k);
        remember(nfa, key, s);
    }
    return s;
}

/* Code points [lo, hi] of one length in UTF-8 whose encodings are a product of byte
 * ranges: splits until that holds (as the utf8-ranges and RE2 compilers do). */
static void add_utf8(hx_nfa *nfa, uint32_t s, uint32_t lo, uint32_t hi, uint32_t k)
{
    static const uint32_t last[] = { 0x7f, 0x7ff, 0xffff };
    char a[4], b[4];
    int n;

    for (size_t i = 0; i < HX_LEN(last); i++)
        if (lo <= last[i] && hi > last[i]) {
            add_utf8(nfa, s, lo, last[i], k);
            lo = last[i] + 1;
        }
    n = hx_utf8_put(hi, b);
    for (int i = 1; i < n; i++) {
        const uint32_t low = (1u << (6 * i)) - 1;

        if ((lo & ~low) == (hi & ~low))
            continue;
        if ((lo & low) != 0) {
            add_utf8(nfa, s, lo, lo | low, k);
            add_utf8(nfa, s, (lo | low) + 1, hi, k);
            return;
        }
        if ((hi & low) != low) {
            add_utf8(nfa, s, lo, (hi & ~low) - 1, k);
            add_utf8(nfa, s, hi & ~low, hi, k);
            return;
        }
    }
    hx_utf8_put(lo, a);
    for (int i = n - 1; i > 0; i--)
        k = byte_before(nfa, (uint8_t)a[i], (uint8_t)b[i], k);
    add_bytes(nfa, s, (uint8_t)a[0], (uint8_t)b[0], k);
}

/* Inside a JSON string: quote, backslash and five controls as two-character escapes, the
 * other controls not at all. */
static void add_escapes(hx_nfa *nfa, uint32_t s, const hx_range *r, uint32_t n,
                        uint32_t k)
{
    static const char cp[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
    uint32_t escape = 0;

    for (size_t i = 0; cp[i] != '\0'; i++)
        for (uint32_t j = 0; j < n; j++)
            if (r[j].lo <= (uint32_t)cp[i] && (uint32_t)cp[i] <= r[j].hi) {
                if (escape == 0)
                    add_bytes(nfa, s, '\\', '\\', escape = new_state(nfa));
                add_bytes(nfa, escape, (uint8_t)letter[i], (uint8_t)letter[i], k);
            }
}

static uint32_t build_set(hx_nfa *nfa, const hx_ir_node *v, hx_ref r, uint32_t k)
{
    const hx_range *set = nfa->ir->range.p + v->a;
    const uint32_t s = new_state(nfa);

    if (nfa->chars) {
        add_edge(nfa, s, (hx_nfa_edge) { .kind = HX_E_SET, .a = r, .to = k });
        return s;
    }
    for (uint32_t i = 0; i < v->b && nfa->ir->rc == 0; i++) {
        uint32_t lo = set[i].lo;

        if (!v->json) {
            add_utf8(nfa, s, lo, set[i].hi, k);
            continue;
        }
        /* Cut out what JSON escapes. */
        lo = HX_MAX(lo, 0x20);
        for (const char *cut = "\"\\"; *cut != '\0'; cut++)
            if (lo <= (uint32_t)*cut && (uint32_t)*cut <= set[i].hi) {
                if (lo < (uint32_t)*cut)
                    add_utf8(nfa, s, lo, (uint32_t)*cut - 1, k);
                lo = (uint32_t)*cut + 1;
            }
        if (lo <= set[i].hi)
            add_utf8(nfa, s, lo, set[i].hi, k);
    }
    if (v->json)
        add_escapes(nfa, s, set, v->b, k);
    return s;
}

/* ---- expressions ----------------------------------------------------- */

static uint32_t build(hx_nfa *nfa, hx_ref r, uint32_t k);

static uint32_t build_rep(hx_nfa *nfa, const hx_ir_node *v, uint32_t k)
{
    uint32_t s = k;

    if (v->c == HX_IR_NO_END) {
        s = new_state(nfa);
        add_eps(nfa, s, k);
        add_eps(nfa, s, build(nfa, v->a, s));
    }
    for (uint32_t i = v->c == HX_IR_NO_END ? v->b : v->c; i > 0 && nfa->ir->rc == 0;
         i--) {
        const uint32_t turn = build(nfa, v->a, s);

        if (v->c != HX_IR_NO_END && i > v->b) {
            s = new_state(nfa);
            add_eps(nfa, s, k);
            add_eps(nfa, s, turn);
        } else {
            s = turn;
        }
    }
    return s;
}

/* Rules that are gone to may lead to each other: their states are made at once and
 * filled by hx_nfa_build(). */
static uint32_t build_goto(hx_nfa *nfa, uint32_t rule, uint32_t k)
{
    const uint32_t s = new_state(nfa), at = nfa->todo.n;

    if (!HX_PUSH(nfa->ir, nfa->todo, 3))
        return 0;
    nfa->todo.p[at] = rule;
    nfa->todo.p[at + 1] = k;
    nfa->todo.p[at + 2] = s;
    return s;
}

static uint32_t build_lit(hx_nfa *nfa, const hx_ir_node *v, uint32_t k)
{
    for (uint32_t i = v->b; i > 0 && nfa->ir->rc == 0; i--) {
        const uint8_t byte = (uint8_t)nfa->ir->text.p[v->a + i - 1];
        const uint32_t s = new_state(nfa);

        add_bytes(nfa, s, byte, byte, k);
        k = s;
    }
    return k;
}

static uint32_t build_new(hx_nfa *nfa, hx_ref r, uint32_t k)
{
    const hx_ir_node v = nfa->ir->node.p[r];
    uint32_t s;

    switch ((hx_ir_kind)v.kind) {
    case HX_IR_NONE:
        return 0;
    case HX_IR_EMPTY:
        return k;
    case HX_IR_LIT:
        return build_lit(nfa, &v, k);
    case HX_IR_SET:
        return build_set(nfa, &v, r, k);
    case HX_IR_SEQ:
        for (uint32_t i = v.b; i > 0; i--)
            k = build(nfa, nfa->ir->list.p[v.a + i - 1], k);
        return k;
    case HX_IR_ALT:
        s = new_state(nfa);
        for (uint32_t i = v.b; i > 0; i--)
            add_eps(nfa, s, build(nfa, nfa->ir->list.p[v.a + i - 1], k));
        return s;
    case HX_IR_REP:
        return build_rep(nfa, &v, k);
    case HX_IR_GOTO:
        return build_goto(nfa, v.a, k);
    case HX_IR_CALL:
    case HX_IR_TOKEN:
        s = new_state(nfa);
        add_edge(nfa, s,
                 (hx_nfa_edge) { .kind = v.kind == HX_IR_CALL ? HX_E_CALL : HX_E_TOKEN,
                                 .a = v.a,
                                 .to = k });
        return s;
    }
    return 0;
}

static uint32_t build(hx_nfa *nfa, hx_ref r, uint32_t k)
{
    /* All GOTOs of a rule share one node's worth of states. */
    const bool go = nfa->ir->node.p[r].kind == HX_IR_GOTO;
    const uint64_t key =
        (uint64_t)(go ? 0xfe000000u | nfa->ir->node.p[r].a : r) << 32 | k;
    uint32_t s;

    if (nfa->ir->rc != 0 || k == 0)
        return 0;
    if ((s = recall(nfa, key)) != 0)
        return s;
    s = build_new(nfa, r, k);
    remember(nfa, key, s);
    return s;
}

int hx_nfa_build(hx_nfa *nfa, hx_ref root)
{
    nfa->state.n = nfa->edge.n = nfa->todo.n = nfa->n_memo = 0;
    /* What is remembered are states of the automaton before. */
    HX_DROP(nfa->ir, nfa->memo);
    nfa->memo.p = NULL;
    nfa->memo.n = nfa->memo.cap = 0;
    if (!HX_PUSH(nfa->ir, nfa->state, 1) || !HX_PUSH(nfa->ir, nfa->edge, 1))
        return nfa->ir->rc;
    nfa->final = new_state(nfa);
    nfa->start = build(nfa, root, nfa->final);
    while (nfa->todo.n > 0 && nfa->ir->rc == 0) {
        const uint32_t *t = &nfa->todo.p[nfa->todo.n -= 3];
        const uint32_t s = t[2];

        add_eps(nfa, s, build(nfa, nfa->ir->rule.p[t[0]].body, t[1]));
    }
    return nfa->ir->rc;
}
