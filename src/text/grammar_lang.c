/* grammar_lang.c - questions about regular languages of characters, and restrictions of
 * them: expressions made of sets alone, as hx_regex_parse() makes them.
 *
 * Called by the schema front end. A restriction runs the expression's NFA beside a small
 * counter or trie and writes the pairs down as rules that go to each other. It must
 * refuse what grows beyond the limit of states rather than answer approximately. */
#include "text/grammar_ir.h"

static bool in_set(const hx_ir *ir, hx_ref set, uint32_t cp)
{
    const hx_ir_node *v = &ir->node.p[set];

    for (uint32_t i = 0; i < v->b; i++)
        if (ir->range.p[v->a + i].lo <= cp && cp <= ir->range.p[v->a + i].hi)
            return true;
    return false;
}

static bool sets_meet(const hx_ir *ir, hx_ref a, hx_ref b)
{
    const hx_ir_node *x = &ir->node.p[a], *y = &ir->node.p[b];
    uint32_t i = 0, j = 0;

    while (i < x->b && j < y->b) {
        const hx_range *p = &ir->range.p[x->a + i], *q = &ir->range.p[y->a + j];

        if (p->lo <= q->hi && q->lo <= p->hi)
            return true;
        if (p->hi < q->hi)
            i++;
        else
            j++;
    }
    return false;
}

/* ---- does it match --------------------------------------------------- */

typedef struct {
    uint32_t *state, *mark, n, turn;
} state_set;

/* Adds s and what it reaches without a character. */
static void reach(const hx_nfa *nfa, state_set *set, uint32_t s)
{
    uint32_t done = set->n;

    if (set->mark[s] == set->turn)
        return;
    set->mark[s] = set->turn;
    set->state[set->n++] = s;
    for (; done < set->n; done++)
        for (uint32_t e = nfa->state.p[set->state[done]]; e != 0;
             e = nfa->edge.p[e].next) {
            const hx_nfa_edge *edge = &nfa->edge.p[e];

            if (edge->kind == HX_E_EPS && set->mark[edge->to] != set->turn) {
                set->mark[edge->to] = set->turn;
                set->state[set->n++] = edge->to;
            }
        }
}

bool hx_lang_matches(hx_ir *ir, hx_ref e, hx_str text)
{
    hx_u32s mem = { 0 };
    hx_nfa nfa;
    bool yes = false;

    hx_nfa_init(&nfa, ir, true);
    if (hx_nfa_build(&nfa, e) == 0 && HX_PUSH(ir, mem, 3 * nfa.state.n)) {
        state_set now = { mem.p, mem.p + nfa.state.n, 0, 1 };
        uint32_t *const from = mem.p + 2 * (size_t)nfa.state.n;

        reach(&nfa, &now, nfa.start);
        for (size_t i = 0; i < text.n && hx_ir_work(ir, now.n);) {
            uint32_t cp = 0;
            const uint32_t n_from = now.n;
            const int len = hx_utf8_next(text.p + i, text.n - i, &cp);

            hx_assert(len > 0);
            i += (size_t)len;
            memcpy(from, now.state, n_from * sizeof(*from));
            now.n = 0;
            now.turn++;
            for (uint32_t k = 0; k < n_from; k++)
                for (uint32_t d = nfa.state.p[from[k]]; d != 0; d = nfa.edge.p[d].next)
                    if (nfa.edge.p[d].kind == HX_E_SET && in_set(ir, nfa.edge.p[d].a, cp))
                        reach(&nfa, &now, nfa.edge.p[d].to);
        }
        for (uint32_t k = 0; k < now.n; k++)
            yes |= now.state[k] == nfa.final;
    }
    HX_DROP(ir, mem);
    hx_nfa_free(&nfa);
    return yes;
}

/* ---- do two meet ----------------------------------------------------- */

typedef struct {
    uint32_t a, b;
} pair;
typedef HX_VEC(pair) pairs;
typedef struct {
    hx_ir *ir;
    hx_nfa a, b;
    hx_u8s met; /* [a.state.n][b.state.n] */
    pairs todo;
} meeting;

static void meet(meeting *m, uint32_t a, uint32_t b)
{
    uint8_t *met = &m->met.p[(size_t)a * m->b.state.n + b];

    if (*met != 0 || !hx_ir_work(m->ir, 1) || !HX_PUSH(m->ir, m->todo, 1))
        return;
    *met = 1;
    m->todo.p[m->todo.n - 1] = (pair) { a, b };
}

static void meet_next(meeting *m, pair at)
{
    for (uint32_t x = m->a.state.p[at.a]; x != 0; x = m->a.edge.p[x].next) {
        const hx_nfa_edge *e = &m->a.edge.p[x];

        if (e->kind == HX_E_EPS) {
            meet(m, e->to, at.b);
            continue;
        }
        for (uint32_t y = m->b.state.p[at.b]; y != 0; y = m->b.edge.p[y].next)
            if (m->b.edge.p[y].kind == HX_E_SET && hx_ir_work(m->ir, 1) &&
                sets_meet(m->ir, e->a, m->b.edge.p[y].a))
                meet(m, e->to, m->b.edge.p[y].to);
    }
    for (uint32_t y = m->b.state.p[at.b]; y != 0; y = m->b.edge.p[y].next)
        if (m->b.edge.p[y].kind == HX_E_EPS)
            meet(m, at.a, m->b.edge.p[y].to);
}

bool hx_lang_disjoint(hx_ir *ir, hx_ref e, hx_ref f)
{
    meeting m = { .ir = ir };
    bool apart = true;

    hx_nfa_init(&m.a, ir, true);
    hx_nfa_init(&m.b, ir, true);
    if (hx_nfa_build(&m.a, e) == 0 && hx_nfa_build(&m.b, f) == 0) {
        const uint64_t n = (uint64_t)m.a.state.n * m.b.state.n;

        if (n > 16 * (uint64_t)ir->opt.states)
            hx_ir_over(ir, "states");
        if (HX_PUSH(ir, m.met, (uint32_t)n))
            meet(&m, m.a.start, m.b.start);
        while (m.todo.n > 0 && ir->rc == 0 && apart) {
            const pair at = m.todo.p[--m.todo.n];

            apart = at.a != m.a.final || at.b != m.b.final;
            meet_next(&m, at);
        }
    }
    HX_DROP(ir, m.met);
    HX_DROP(ir, m.todo);
    hx_nfa_free(&m.a);
    hx_nfa_free(&m.b);
    return apart;
}

/* ---- restrictions ---------------------------------------------------- */

/* An automaton of words: node 0 is the root; off, one past the last, is where a text that
 * is no beginning of a word goes. */
typedef struct {
    uint32_t cp, child, sibling;
    bool word;
} letter;
typedef HX_VEC(letter) letters;

/* Pairs (state of the NFA, state of a filter of n_filter states) as rules. */
typedef struct {
    hx_ir *ir;
    hx_nfa nfa;
    uint32_t n_filter;
    hx_u32s rule; /* [state][filter], 0: not made */
    pairs todo;
    hx_refs way;       /* of the pair at hand */
    uint32_t min, max; /* filter: characters so far, at most the larger
                        * finite bound */
    letters trie;      /* filter, when there are words */
    hx_ranges range;   /* scratch */
} product;

static hx_ref go_pair(product *p, uint32_t state, uint32_t filter)
{
    uint32_t *rule = &p->rule.p[(size_t)state * p->n_filter + filter];

    if (*rule == 0) {
        if (!HX_PUSH(p->ir, p->todo, 1))
            return HX_NONE;
        p->todo.p[p->todo.n - 1] = (pair) { state, filter };
        *rule = hx_ir_rule_new(p->ir, (hx_str) { NULL, 0 });
    }
    return hx_ir_goto(p->ir, *rule);
}

static void add_way(product *p, hx_ref way)
{
    HX_ADD(p->ir, p->way, way);
}

static void step_length(product *p, const hx_nfa_edge *e, uint32_t n)
{
    if (n < p->max)
        add_way(p,
                HX_SEQ(p->ir, e->a, go_pair(p, e->to, HX_MIN(n + 1, p->n_filter - 1))));
}

/* Letters that go on in the trie, then all others of the set. */
static void step_words(product *p, const hx_nfa_edge *e, uint32_t at)
{
    hx_ir *ir = p->ir;
    const uint32_t off = p->trie.n;
    const hx_ir_node set = ir->node.p[e->a];
    uint32_t n = 0, n_out;

    p->range.n = 0;
    if (at == off) {
        add_way(p, HX_SEQ(ir, e->a, go_pair(p, e->to, off)));
        return;
    }
    for (uint32_t t = p->trie.p[at].child; t != 0; t = p->trie.p[t].sibling) {
        const uint32_t cp = p->trie.p[t].cp;

        if (in_set(ir, e->a, cp))
            add_way(p, HX_SEQ(ir, hx_ir_char(ir, cp, set.json), go_pair(p, e->to, t)));
        if (HX_PUSH(ir, p->range, 1))
            p->range.p[n++] = (hx_range) { cp, cp };
    }
    /* All others: outside of (letters or outside of the set). */
    if (!HX_PUSH(ir, p->range, 4 * (n + set.b) + 8))
        return;
    n += (uint32_t)hx_range_invert(ir->range.p + set.a, set.b, p->range.p + n);
    n = (uint32_t)hx_range_norm(p->range.p, n);
    n_out = (uint32_t)hx_range_invert(p->range.p, n, p->range.p + n);
    add_way(p, HX_SEQ(ir, hx_ir_set(ir, p->range.p + n, n_out, set.json),
                      go_pair(p, e->to, off)));
}

static bool may_end(const product *p, uint32_t filter)
{
    if (p->trie.n > 0)
        return filter == p->trie.n || !p->trie.p[filter].word;
    return filter >= p->min;
}

static hx_ref product_run(product *p, hx_ref e)
{
    hx_ir *ir = p->ir;
    hx_ref start = HX_NONE;
    uint64_t n;

    hx_nfa_init(&p->nfa, ir, true);
    if (hx_nfa_build(&p->nfa, e) != 0)
        goto done;
    n = (uint64_t)p->nfa.state.n * p->n_filter;
    if (n > 4 * (uint64_t)ir->opt.states)
        hx_ir_over(ir, "states");
    if (!HX_PUSH(ir, p->rule, (uint32_t)n))
        goto done;
    start = go_pair(p, p->nfa.start, 0);
    while (p->todo.n > 0 && ir->rc == 0) {
        const pair at = p->todo.p[--p->todo.n];
        const uint32_t rule = p->rule.p[(size_t)at.a * p->n_filter + at.b];

        p->way.n = 0;
        if (at.a == p->nfa.final && may_end(p, at.b))
            add_way(p, HX_EMPTY);
        for (uint32_t x = p->nfa.state.p[at.a]; x != 0; x = p->nfa.edge.p[x].next) {
            const hx_nfa_edge edge = p->nfa.edge.p[x];

            if (edge.kind == HX_E_EPS)
                add_way(p, go_pair(p, edge.to, at.b));
            else if (p->trie.n > 0)
                step_words(p, &edge, at.b);
            else
                step_length(p, &edge, at.b);
        }
        const hx_ref body = hx_ir_alt(ir, p->way.p, p->way.n);
        if (ir->rc == 0)
            ir->rule.p[rule].body = body;
    }
done:
    hx_nfa_free(&p->nfa);
    HX_DROP(ir, p->rule);
    HX_DROP(ir, p->todo);
    HX_DROP(ir, p->way);
    HX_DROP(ir, p->trie);
    HX_DROP(ir, p->range);
    return ir->rc == 0 ? start : HX_NONE;
}

/* Fewest and most characters of e. */
static void length_of(const hx_ir *ir, hx_ref e, uint64_t *min, uint64_t *max)
{
    const hx_ir_node *v = &ir->node.p[e];
    uint64_t lo, hi;

    *min = *max = v->kind == HX_IR_SET;
    if (v->kind == HX_IR_SEQ || v->kind == HX_IR_ALT) {
        for (uint32_t i = 0; i < v->b; i++) {
            length_of(ir, ir->list.p[v->a + i], &lo, &hi);
            if (v->kind == HX_IR_SEQ) {
                *min += lo;
                *max += hi;
            } else {
                *min = i == 0 ? lo : HX_MIN(*min, lo);
                *max = HX_MAX(*max, hi);
            }
        }
    } else if (v->kind == HX_IR_REP) {
        length_of(ir, v->a, &lo, &hi);
        *min = lo * v->b;
        *max = v->c == HX_IR_NO_END && hi > 0 ? HX_IR_NO_END : hi * v->c;
    }
    *min = HX_MIN(*min, HX_IR_NO_END);
    *max = HX_MIN(*max, HX_IR_NO_END);
}

hx_ref hx_lang_length(hx_ir *ir, hx_ref e, uint32_t min, uint32_t max)
{
    product p = { .ir = ir, .min = min, .max = max };
    uint64_t lo, hi;

    if (ir->rc != 0)
        return HX_NONE;
    length_of(ir, e, &lo, &hi);
    if (lo >= min && hi <= max)
        return e;
    if (lo > max || hi < min)
        return HX_NONE;
    if ((uint64_t)HX_MAX(max == HX_IR_NO_END ? min : max, min) + 1 > ir->opt.states) {
        hx_ir_over(ir, "states");
        return HX_NONE;
    }
    p.n_filter = (max == HX_IR_NO_END ? min : max) + 1;
    return product_run(&p, e);
}

static bool add_word(product *p, hx_str word)
{
    uint32_t at = 0;

    for (size_t i = 0; i < word.n;) {
        uint32_t cp = 0, t;
        const int len = hx_utf8_next(word.p + i, word.n - i, &cp);

        hx_assert(len > 0);
        i += (size_t)len;
        for (t = p->trie.p[at].child; t != 0 && p->trie.p[t].cp != cp;)
            t = p->trie.p[t].sibling;
        if (t == 0) {
            if (!hx_ir_work(p->ir, 1) || !HX_PUSH(p->ir, p->trie, 1))
                return false;
            t = p->trie.n - 1;
            p->trie.p[t] = (letter) { .cp = cp, .sibling = p->trie.p[at].child };
            p->trie.p[at].child = t;
        }
        at = t;
    }
    return p->trie.p[at].word = true;
}

hx_ref hx_lang_without(hx_ir *ir, hx_ref e, const hx_str *words, size_t n)
{
    product p = { .ir = ir };

    if (n == 0 || ir->rc != 0)
        return ir->rc == 0 ? e : HX_NONE;
    if (HX_PUSH(ir, p.trie, 1))
        for (size_t i = 0; i < n && add_word(&p, words[i]); i++)
            ;
    p.n_filter = p.trie.n + 1;
    return product_run(&p, e);
}
