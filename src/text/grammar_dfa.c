/* grammar_dfa.c - rules as deterministic automata, and what must be known of them before
 * anything is matched: which states can still reach an end and with how many open rules,
 * which rules match the empty text, and that none begins with itself.
 *
 * Called by hx_grammar_open(). Determinism is per rule (Rabin and Scott's subsets); calls
 * of other rules are edges like any other. After this no edge leads where no end can be
 * reached, so a matcher never walks into a dead end. */
#include "text/grammar_ir.h"

#include <stdlib.h>

typedef struct {
    uint32_t at, n, hash, state;
} subset; /* [at, at + n) of pool */
typedef HX_VEC(subset) subsets;

typedef struct {
    hx_dfa *d;
    hx_ir *ir;
    hx_nfa nfa;
    hx_u32s pool; /* NFA states of all subsets */
    subsets set;  /* of the rule at hand */
    hx_u32s slot; /* hash table of set index + 1 */
    hx_u32s mark; /* [NFA state] turn */
    hx_u32s stack;
    hx_u32s to;    /* targets of the edge at hand */
    hx_u32s edge;  /* byte edges of the subset at hand */
    hx_u64s other; /* its other edges: is it a token, what, edge */
    hx_u8s called; /* [rule] */
    hx_u32s rules; /* called, to be built */
    uint32_t turn;
} builder;

/* ---- subsets --------------------------------------------------------- */

static int by_key(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static int by_value(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

/* States that matter: the end, and those with an edge that is not empty. */
static bool matters(const builder *b, uint32_t s)
{
    if (s == b->nfa.final)
        return true;
    for (uint32_t e = b->nfa.state.p[s]; e != 0; e = b->nfa.edge.p[e].next)
        if (b->nfa.edge.p[e].kind != HX_E_EPS)
            return true;
    return false;
}

static bool visit(builder *b, uint32_t s)
{
    if (b->mark.p[s] == b->turn)
        return true;
    b->mark.p[s] = b->turn;
    HX_ADD(b->ir, b->stack, s);
    return b->ir->rc == 0;
}

/* Appends the closure of b->to to the pool. */
static bool close_over(builder *b)
{
    b->turn++;
    b->stack.n = 0;
    while (b->to.n > 0)
        if (!visit(b, b->to.p[--b->to.n]))
            return false;
    for (uint32_t i = 0; i < b->stack.n; i++) {
        const uint32_t s = b->stack.p[i];

        for (uint32_t e = b->nfa.state.p[s]; e != 0; e = b->nfa.edge.p[e].next)
            if (b->nfa.edge.p[e].kind == HX_E_EPS && !visit(b, b->nfa.edge.p[e].to))
                return false;
        if (matters(b, s))
            HX_ADD(b->ir, b->pool, s);
    }
    return hx_ir_work(b->ir, b->stack.n);
}

static bool slots_grow(builder *b)
{
    const uint32_t n = HX_MAX(64, 2 * b->slot.n);

    if (2 * b->set.n < b->slot.n)
        return true;
    b->slot.n = 0;
    if (!HX_PUSH(b->ir, b->slot, n))
        return false;
    memset(b->slot.p, 0, n * sizeof(*b->slot.p));
    for (uint32_t k = 0; k < b->set.n; k++) {
        uint32_t i = b->set.p[k].hash & (n - 1);

        while (b->slot.p[i] != 0)
            i = (i + 1) & (n - 1);
        b->slot.p[i] = k + 1;
    }
    return true;
}

/* The automaton's state for the closure of b->to, whose list becomes empty. */
static uint32_t state_of(builder *b)
{
    const uint32_t at = b->pool.n;
    uint32_t n, hash = 2166136261u, i;

    if (!slots_grow(b) || !close_over(b))
        return 0;
    n = b->pool.n - at;
    hx_ir_work(b->ir, n);
    if (n > 1)
        qsort(b->pool.p + at, n, sizeof(*b->pool.p), by_value);
    for (i = at; i < at + n; i++)
        hash = (hash ^ b->pool.p[i]) * 16777619u;
    hash ^= hash >> 15;
    for (i = hash & (b->slot.n - 1); b->slot.p[i] != 0; i = (i + 1) & (b->slot.n - 1)) {
        const subset *s = &b->set.p[b->slot.p[i] - 1];

        if (s->hash == hash && s->n == n &&
            memcmp(b->pool.p + s->at, b->pool.p + at, n * sizeof(*b->pool.p)) == 0) {
            b->pool.n = at;
            return s->state;
        }
    }
    if (b->d->state.n >= b->ir->opt.states)
        hx_ir_over(b->ir, "states");
    if (!HX_PUSH(b->ir, b->set, 1) || !HX_PUSH(b->ir, b->d->state, 1))
        return 0;
    b->slot.p[i] = b->set.n;
    b->d->state.p[b->d->state.n - 1].rule = HX_IR_NO_END;
    b->set.p[b->set.n - 1] = (subset) { at, n, hash, b->d->state.n - 1 };
    return b->d->state.n - 1;
}

static bool add_to(builder *b, uint32_t nfa_state)
{
    HX_ADD(b->ir, b->to, nfa_state);
    return b->ir->rc == 0;
}

/* ---- edges ----------------------------------------------------------- */

/* Byte edges [0, n) of b->edge: cuts 0..255 wherever one begins or ends. */
static void byte_edges(builder *b, uint32_t n, uint32_t state)
{
    uint32_t head[256] = { 0 }, n_wide = 0; /* single bytes: chains by edge index + 1 */
    bool cut[257] = { false };
    const uint32_t chain = b->edge.n; /* next of edge i at chain + i */

    if (n == 0 || !HX_PUSH(b->ir, b->edge, 2 * n))
        return;
    uint32_t *const wide = b->edge.p + chain + n, *const next = b->edge.p + chain;

    for (uint32_t i = 0; i < n; i++) {
        const hx_nfa_edge *e = &b->nfa.edge.p[b->edge.p[i]];

        cut[e->lo] = cut[e->hi + 1] = true;
        if (e->lo == e->hi) {
            next[i] = head[e->lo];
            head[e->lo] = i + 1;
        } else {
            wide[n_wide++] = b->edge.p[i];
        }
    }
    for (uint32_t lo = 0, hi; lo < 256; lo = hi + 1) {
        for (hi = lo; hi < 255 && !cut[hi + 1];)
            hi++;
        for (uint32_t i = head[lo]; i != 0 && hi == lo; i = next[i - 1])
            add_to(b, b->nfa.edge.p[b->edge.p[i - 1]].to);
        for (uint32_t i = 0; i < n_wide; i++) {
            const hx_nfa_edge *e = &b->nfa.edge.p[wide[i]];

            if (e->lo <= lo && hi <= e->hi)
                add_to(b, e->to);
        }
        if (!hx_ir_work(b->ir, n_wide) || b->to.n == 0)
            continue;
        const uint32_t to = state_of(b);
        hx_dfa_state *s = &b->d->state.p[state];
        hx_byte_edge *last = s->n_byte == 0 ? NULL : &b->d->byte.p[b->d->byte.n - 1];

        if (last != NULL && last->to == to && last->hi + 1u == lo) {
            last->hi = (uint8_t)hi;
        } else if (HX_PUSH(b->ir, b->d->byte, 1)) {
            b->d->byte.p[b->d->byte.n - 1] =
                (hx_byte_edge) { to, (uint8_t)lo, (uint8_t)hi };
            s->n_byte++;
        }
    }
}

static void call_rule(builder *b, uint32_t rule)
{
    if (b->called.p[rule] != 0 || !HX_PUSH(b->ir, b->rules, 1))
        return;
    b->called.p[rule] = 1;
    b->rules.p[b->rules.n - 1] = rule;
}

/* Calls and tokens, sorted by what they call or take: the same lead to one state. */
static void other_edges(builder *b, uint32_t state)
{
    if (b->other.n > 1)
        qsort(b->other.p, b->other.n, sizeof(*b->other.p), by_key);
    for (uint32_t i = 0; i < b->other.n && b->ir->rc == 0;) {
        const uint64_t key = b->other.p[i] >> 32;
        const hx_nfa_edge first = b->nfa.edge.p[(uint32_t)b->other.p[i]];

        for (; i < b->other.n && b->other.p[i] >> 32 == key; i++)
            add_to(b, b->nfa.edge.p[(uint32_t)b->other.p[i]].to);
        const uint32_t ret = state_of(b);
        hx_dfa_state *s = &b->d->state.p[state];

        if (first.kind == HX_E_CALL && HX_PUSH(b->ir, b->d->call, 1)) {
            b->d->call.p[b->d->call.n - 1] = (hx_call_edge) { first.a, ret, false };
            s->n_call++;
            call_rule(b, first.a);
        }
        if (first.kind == HX_E_TOKEN && HX_PUSH(b->ir, b->d->token, 1)) {
            b->d->token.p[b->d->token.n - 1] = (hx_token_edge) { (int32_t)first.a, ret };
            s->n_token++;
        }
    }
}

/* Sorts the edges of an NFA state into b->edge (bytes) and b->other. */
static bool collect(builder *b, uint32_t nfa_state)
{
    for (uint32_t e = b->nfa.state.p[nfa_state]; e != 0; e = b->nfa.edge.p[e].next) {
        const hx_nfa_edge *edge = &b->nfa.edge.p[e];

        if (edge->kind == HX_E_BYTE)
            HX_ADD(b->ir, b->edge, e);
        else if (edge->kind != HX_E_EPS)
            HX_ADD(b->ir, b->other,
                   (uint64_t)(edge->kind == HX_E_TOKEN) << 63 | (uint64_t)edge->a << 32 |
                       e);
    }
    return b->ir->rc == 0;
}

static void expand(builder *b, subset set)
{
    hx_dfa *d = b->d;
    hx_dfa_state *s = &d->state.p[set.state];

    s->byte = d->byte.n;
    s->call = d->call.n;
    s->token = d->token.n;
    b->edge.n = b->other.n = 0;
    for (uint32_t i = set.at; i < set.at + set.n; i++) {
        s->final |= b->pool.p[i] == b->nfa.final;
        if (!collect(b, b->pool.p[i]))
            return;
    }
    if (!hx_ir_work(b->ir, b->edge.n + b->other.n))
        return;
    other_edges(b, set.state);
    byte_edges(b, b->edge.n, set.state);
}

static void build_rule(builder *b, uint32_t rule)
{
    hx_dfa *d = b->d;
    const hx_ir_rule r = b->ir->rule.p[rule];

    if (r.counted || r.any_order) {
        if (!HX_PUSH(b->ir, d->state, 1))
            return;
        d->state.p[d->state.n - 1].rule = rule;
        d->rule.p[rule] = (hx_dfa_rule) { .start = d->state.n - 1,
                                          .counted = r.counted,
                                          .any_order = r.any_order,
                                          .again = r.again,
                                          .child = r.child,
                                          .min = r.min,
                                          .max = r.max };
        for (uint32_t i = 0; i < (r.counted ? 1 : r.max); i++)
            call_rule(b, r.child + i);
        return;
    }
    if (hx_nfa_build(&b->nfa, r.body) != 0)
        return;
    b->pool.n = b->set.n = b->to.n = b->mark.n = b->turn = 0;
    if (b->slot.n > 0)
        memset(b->slot.p, 0, b->slot.n * sizeof(*b->slot.p));
    if (!HX_PUSH(b->ir, b->mark, b->nfa.state.n) || !add_to(b, b->nfa.start))
        return;
    d->rule.p[rule].start = state_of(b);
    for (uint32_t k = 0; k < b->set.n && b->ir->rc == 0; k++)
        expand(b, b->set.p[k]);
}

/* ---- analysis -------------------------------------------------------- */

static uint32_t need_of_call(const hx_dfa *d, uint32_t rule)
{
    return d->state.p[d->rule.p[rule].start].need;
}

/* Those that a rule of turns still takes, where nothing has been done of it. */
static uint32_t need_of_turns(const hx_dfa *d, const hx_dfa_rule *r)
{
    uint32_t most = 0;

    if (r->counted)
        return r->min == 0 ? 0 : HX_MIN(need_of_call(d, r->child) + 1, HX_NEVER);
    for (uint32_t i = 0; i < r->max; i++)
        if ((r->min >> i & 1) != 0)
            most = HX_MAX(most, need_of_call(d, r->child + i) + 1);
    return HX_MIN(most, HX_NEVER);
}

/* The frames that the cheapest way from a state to its rule's end opens. */
static uint32_t need_of(const hx_dfa *d, const hx_dfa_state *s)
{
    uint32_t best = s->final ? 0 : HX_NEVER;

    if (s->rule != HX_IR_NO_END)
        return need_of_turns(d, &d->rule.p[s->rule]);
    for (uint32_t i = 0; i < s->n_byte; i++)
        best = HX_MIN(best, d->state.p[d->byte.p[s->byte + i].to].need);
    for (uint32_t i = 0; i < s->n_token; i++)
        best = HX_MIN(best, d->state.p[d->token.p[s->token + i].to].need);
    for (uint32_t i = 0; i < s->n_call; i++) {
        const hx_call_edge *c = &d->call.p[s->call + i];
        const uint32_t inside = need_of_call(d, c->rule) + 1;

        best = HX_MIN(best, HX_MAX(inside, d->state.p[c->ret].need));
    }
    return best;
}

/* Least fixed point: needs only fall from sweep to sweep. Backwards, since states mostly
 * lead to later ones. */
static void find_needs(hx_dfa *d, hx_ir *ir)
{
    bool again = true;

    for (uint32_t i = 0; i < d->state.n; i++)
        d->state.p[i].need = HX_NEVER;
    while (again && hx_ir_work(ir, d->state.n / 4)) {
        again = false;
        for (uint32_t i = d->state.n; i > 0; i--) {
            hx_dfa_state *s = &d->state.p[i - 1];
            const uint32_t need = s->need == 0 ? 0 : need_of(d, s);

            again |= need < s->need;
            s->need = (uint16_t)need;
        }
    }
}

static bool is_live(const hx_dfa *d, uint32_t state)
{
    return d->state.p[state].need != HX_NEVER;
}

/* Drops the edges that lead nowhere and marks the tail calls. */
static void prune(hx_dfa *d)
{
    for (uint32_t i = 0; i < d->state.n; i++) {
        hx_dfa_state *s = &d->state.p[i];
        uint32_t n = 0;

        for (uint32_t k = 0; k < s->n_byte; k++)
            if (is_live(d, d->byte.p[s->byte + k].to))
                d->byte.p[s->byte + n++] = d->byte.p[s->byte + k];
        s->n_byte = n;
        n = 0;
        for (uint32_t k = 0; k < s->n_token; k++)
            if (is_live(d, d->token.p[s->token + k].to))
                d->token.p[s->token + n++] = d->token.p[s->token + k];
        s->n_token = n;
        n = 0;
        for (uint32_t k = 0; k < s->n_call; k++) {
            const hx_call_edge c = d->call.p[s->call + k];

            if (is_live(d, c.ret) && is_live(d, d->rule.p[c.rule].start))
                d->call.p[s->call + n++] = c;
        }
        s->n_call = n;
    }
    for (uint32_t i = 0; i < d->state.n; i++) {
        hx_dfa_state *s = &d->state.p[i];

        for (uint32_t k = 0; k < s->n_call; k++) {
            hx_call_edge *c = &d->call.p[s->call + k];
            const hx_dfa_state *ret = &d->state.p[c->ret];

            c->tail = ret->final && ret->n_byte + ret->n_call + ret->n_token == 0;
        }
        s->no_text = true;
        for (uint32_t k = 0; k < s->n_byte; k++) {
            const hx_byte_edge *e = &d->byte.p[s->byte + k];
            const bool one = e->lo == e->hi;

            s->no_text &= e->hi < 0x20 || (one && (e->lo == '"' || e->lo == '\\'));
        }
    }
}

/* Plain text: UTF-8 without controls, DEL, quote, backslash and the separators U+2028 and
 * U+2029, which "." of a regex does not take. */
static const struct {
    uint8_t n, lo[4], hi[4];
} plain[] = {
    { 1, { 0x20 }, { 0x21 } },
    { 1, { 0x23 }, { 0x5b } },
    { 1, { 0x5d }, { 0x7e } },
    { 2, { 0xc2, 0x80 }, { 0xdf, 0xbf } },
    { 3, { 0xe0, 0xa0, 0x80 }, { 0xe0, 0xbf, 0xbf } },
    { 3, { 0xe1, 0x80, 0x80 }, { 0xe1, 0xbf, 0xbf } },
    { 3, { 0xe2, 0x80, 0x80 }, { 0xe2, 0x80, 0xa7 } },
    { 3, { 0xe2, 0x80, 0xaa }, { 0xe2, 0x80, 0xbf } },
    { 3, { 0xe2, 0x81, 0x80 }, { 0xe2, 0xbf, 0xbf } },
    { 3, { 0xe3, 0x80, 0x80 }, { 0xec, 0xbf, 0xbf } },
    { 3, { 0xed, 0x80, 0x80 }, { 0xed, 0x9f, 0xbf } },
    { 3, { 0xee, 0x80, 0x80 }, { 0xef, 0xbf, 0xbf } },
    { 4, { 0xf0, 0x90, 0x80, 0x80 }, { 0xf0, 0xbf, 0xbf, 0xbf } },
    { 4, { 0xf1, 0x80, 0x80, 0x80 }, { 0xf3, 0xbf, 0xbf, 0xbf } },
    { 4, { 0xf4, 0x80, 0x80, 0x80 }, { 0xf4, 0x8f, 0xbf, 0xbf } },
};

typedef struct {
    hx_dfa *d;
    hx_ir *ir;
    hx_u32s next;  /* states behind one character of plain text */
    hx_u32s first; /* [state] begin of its list in next; the end is the
                    * begin of the next one's */
} texter;

/* Collects the states behind bytes k and on of the characters plain[i]; false: not all of
 * these characters can be taken. */
static bool take_plain(texter *t, uint32_t state, size_t i, int k)
{
    const hx_dfa_state *s = &t->d->state.p[state];
    uint32_t due = plain[i].lo[k];

    for (uint32_t e = 0; e < s->n_byte && due <= plain[i].hi[k]; e++) {
        const hx_byte_edge edge = t->d->byte.p[s->byte + e];

        if (edge.hi < due)
            continue;
        if (edge.lo > due || !hx_ir_work(t->ir, 1))
            return false;
        due = edge.hi + 1u;
        if (k + 1 < plain[i].n) {
            if (!take_plain(t, edge.to, i, k + 1))
                return false;
        } else if (t->next.n == t->first.p[state] ||
                   t->next.p[t->next.n - 1] != edge.to) {
            if (!HX_PUSH(t->ir, t->next, 1))
                return false;
            t->next.p[t->next.n - 1] = edge.to;
        }
    }
    return due > plain[i].hi[k];
}

/* Fills in room: greatest fixed point, from no limit downwards. */
static void find_rooms(hx_dfa *d, hx_ir *ir)
{
    texter t = { .d = d, .ir = ir };
    bool again = true;

    if (HX_PUSH(ir, t.first, d->state.n + 1))
        for (uint32_t s = 0; s < d->state.n; s++) {
            bool all = d->state.p[s].n_byte > 0;

            t.first.p[s] = t.next.n;
            for (size_t i = 0; i < HX_LEN(plain) && all; i++)
                all = take_plain(&t, s, i, 0);
            d->state.p[s].room = all ? HX_ROOM_MAX : 0;
            t.next.n = all ? t.next.n : t.first.p[s];
            t.first.p[s + 1] = t.next.n;
        }
    while (again && hx_ir_work(ir, t.next.n / 4)) {
        again = false;
        for (uint32_t s = d->state.n; s > 0; s--) {
            uint32_t room = d->state.p[s - 1].room;

            for (uint32_t i = t.first.p[s - 1]; i < t.first.p[s]; i++)
                room = HX_MIN(room, d->state.p[t.next.p[i]].room + 1u);
            again |= room < d->state.p[s - 1].room;
            d->state.p[s - 1].room = (uint8_t)room;
        }
    }
    HX_DROP(ir, t.next);
    HX_DROP(ir, t.first);
}

typedef struct {
    hx_dfa *d;
    hx_ir *ir;
    hx_u32s mark; /* [state] rule + 1 of the last walk that saw it */
    hx_u32s stack;
    hx_u32s color; /* [rule] 0 new, 1 open, 2 done */
    hx_u32s path;  /* of rules and where their lists in left end */
    hx_u32s left;  /* rules that open ones can begin with */
} walker;

/* The states that a rule is in before its first byte. Collects the rules called there in
 * w->left; true: the end is among the states. */
static bool walk_start(walker *w, uint32_t rule, uint32_t turn, bool collect)
{
    hx_dfa *d = w->d;
    const hx_dfa_rule *r = &d->rule.p[rule];
    bool final = false;

    if (r->counted || r->any_order) {
        for (uint32_t i = 0; collect && i < (r->counted ? 1 : r->max); i++)
            HX_ADD(w->ir, w->left, r->child + i);
        return r->min == 0 || (r->counted && d->rule.p[r->child].nullable);
    }
    w->stack.n = 0;
    if (!HX_PUSH(w->ir, w->stack, 1))
        return false;
    w->stack.p[0] = r->start;
    w->mark.p[r->start] = turn;
    while (w->stack.n > 0 && hx_ir_work(w->ir, 1)) {
        const hx_dfa_state *s = &d->state.p[w->stack.p[--w->stack.n]];

        final |= s->final;
        for (uint32_t i = 0; i < s->n_call; i++) {
            const hx_call_edge *c = &d->call.p[s->call + i];

            if (collect)
                HX_ADD(w->ir, w->left, c->rule);
            if (d->rule.p[c->rule].nullable && w->mark.p[c->ret] != turn &&
                HX_PUSH(w->ir, w->stack, 1)) {
                w->mark.p[c->ret] = turn;
                w->stack.p[w->stack.n - 1] = c->ret;
            }
        }
    }
    return final;
}

static void find_nullable(walker *w, const uint32_t *rules, uint32_t n)
{
    uint32_t turn = 0;
    bool again = true;

    while (again && w->ir->rc == 0) {
        again = false;
        for (uint32_t i = n; i > 0; i--) {
            hx_dfa_rule *r = &w->d->rule.p[rules[i - 1]];

            if (!r->nullable && walk_start(w, rules[i - 1], ++turn, false))
                again = r->nullable = true;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        hx_dfa_rule *r = &w->d->rule.p[rules[i]];

        /* Empty turns count as turns, so any number of them can be had. */
        if (r->counted && w->d->rule.p[r->child].nullable)
            r->min = 0;
    }
    memset(w->mark.p, 0, w->mark.n * sizeof(*w->mark.p));
}

static void left_recursion(walker *w, uint32_t rule)
{
    const hx_str name = w->ir->rule.p[rule].name;

    if (name.p != NULL)
        hx_ir_fail(w->ir, HX_EFORMAT,
                   "grammar: \"%.*s\" can begin with itself; put something before it",
                   (int)HX_MIN(name.n, 100), name.p);
    else
        hx_ir_fail(w->ir, HX_EFORMAT,
                   "grammar: a rule can begin with itself (a $ref that "
                   "leads back, or left recursion)");
}

/* Opens a rule: its callees at the start go to the end of left. */
static void open_rule(walker *w, uint32_t rule)
{
    const uint32_t at = w->left.n;

    if (!HX_PUSH(w->ir, w->path, 2))
        return;
    w->path.p[w->path.n - 2] = rule;
    w->path.p[w->path.n - 1] = at;
    w->color.p[rule] = 1;
    walk_start(w, rule, rule + 1, true);
}

/* Depth first over "can begin with". */
static void find_left_recursion(walker *w, uint32_t root)
{
    open_rule(w, root);
    while (w->path.n > 0 && w->ir->rc == 0) {
        const uint32_t rule = w->path.p[w->path.n - 2], at = w->path.p[w->path.n - 1];

        if (w->left.n == at) {
            w->color.p[rule] = 2;
            w->path.n -= 2;
            continue;
        }
        const uint32_t next = w->left.p[--w->left.n];

        if (w->color.p[next] == 1)
            left_recursion(w, next);
        else if (w->color.p[next] == 0)
            open_rule(w, next);
    }
}

static void analyse(hx_dfa *d, hx_ir *ir, const uint32_t *rules, uint32_t n)
{
    walker w = { .d = d, .ir = ir };
    uint32_t need;

    find_needs(d, ir);
    prune(d);
    find_rooms(d, ir);
    if (ir->rc != 0)
        return;
    need = need_of_call(d, d->root);
    if (need == HX_NEVER)
        hx_ir_fail(ir, HX_EFORMAT, "grammar: nothing can match it");
    else if (need >= ir->opt.depth)
        hx_ir_over(ir, "depth");
    if (HX_PUSH(ir, w.mark, d->state.n) && HX_PUSH(ir, w.color, d->rule.n)) {
        find_nullable(&w, rules, n);
        /* Every rule that a matcher can be in is called from one of these. */
        for (uint32_t i = 0; i < n && ir->rc == 0; i++)
            if (w.color.p[rules[i]] == 0 && is_live(d, d->rule.p[rules[i]].start))
                find_left_recursion(&w, rules[i]);
    }
    HX_DROP(ir, w.mark);
    HX_DROP(ir, w.stack);
    HX_DROP(ir, w.color);
    HX_DROP(ir, w.path);
    HX_DROP(ir, w.left);
}

int hx_dfa_build(hx_dfa *d, hx_ir *ir, uint32_t root)
{
    builder b = { .d = d, .ir = ir };

    *d = (hx_dfa) { .root = root, .text_state = HX_IR_NO_END };
    hx_nfa_init(&b.nfa, ir, false);
    if (HX_PUSH(ir, d->rule, ir->rule.n) && HX_PUSH(ir, b.called, ir->rule.n)) {
        call_rule(&b, root);
        for (uint32_t i = 0; i < b.rules.n && ir->rc == 0; i++)
            build_rule(&b, b.rules.p[i]);
        if (ir->rc == 0)
            analyse(d, ir, b.rules.p, b.rules.n);
        if (ir->text_rule != 0 && b.called.p[ir->text_rule] != 0)
            d->text_state = d->rule.p[ir->text_rule].start;
    }
    hx_nfa_free(&b.nfa);
    HX_DROP(ir, b.pool);
    HX_DROP(ir, b.set);
    HX_DROP(ir, b.slot);
    HX_DROP(ir, b.mark);
    HX_DROP(ir, b.stack);
    HX_DROP(ir, b.to);
    HX_DROP(ir, b.edge);
    HX_DROP(ir, b.other);
    HX_DROP(ir, b.called);
    HX_DROP(ir, b.rules);
    return ir->rc;
}

void hx_dfa_free(hx_dfa *d)
{
    hx_free(d->state.p);
    hx_free(d->byte.p);
    hx_free(d->call.p);
    hx_free(d->token.p);
    hx_free(d->rule.p);
}
