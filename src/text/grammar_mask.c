/* grammar_mask.c - the vocabulary as tries, and which of its tokens a matcher may take.
 *
 * Called once per model (vocabulary) and once per generated token (masks). A mask is
 * found by walking the trie of all tokens and the automaton together, leaving a subtree
 * where the automaton dies; states that were met before have theirs ready. Inside JSON
 * strings, where nearly everything is allowed, the tokens of plain text come from ready
 * masks and only the rest is walked. Must agree with hx_grammar_accept() for each id. */
#include "text/grammar_ir.h"

#include <stdlib.h>

/* ---- vocabulary ------------------------------------------------------ */

typedef struct {
    hx_str s;
    int32_t id;
} word;

static int by_bytes(const void *a, const void *b)
{
    const word *x = a, *y = b;
    const int c = memcmp(x->s.p, y->s.p, HX_MIN(x->s.n, y->s.n));

    if (c != 0 || x->s.n != y->s.n)
        return c != 0 ? c : x->s.n < y->s.n ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static size_t shared(hx_str a, hx_str b)
{
    size_t n = 0;

    while (n < a.n && n < b.n && a.p[n] == b.p[n])
        n++;
    return n;
}

/* Builds a trie from sorted words. twin gets the chains of ids with the same bytes. */
static int trie_open(hx_trie *t, const word *w, size_t n, int32_t *twin, hx_err *err)
{
    uint32_t path[HX_TOKEN_BYTES_MAX + 1];
    size_t n_node = 1, depth = 0;
    hx_str last = { "", 0 };

    for (size_t i = 0; i < n; last = w[i++].s)
        n_node += w[i].s.n - shared(last, w[i].s);
    if (n_node > UINT32_MAX || (t->p = hx_new(hx_trie_node, n_node)) == NULL)
        return hx_fail(err, HX_ENOMEM, "vocabulary: no memory for %zu trie nodes",
                       n_node);
    last = (hx_str) { "", 0 };
    t->n = 0;
    for (size_t i = 0; i < n; last = w[i++].s) {
        const size_t keep = shared(last, w[i].s);

        if (i > 0 && keep == w[i].s.n && keep == last.n) {
            twin[w[i - 1].id] = w[i].id;
            t->p[path[depth]].twins = 1;
            continue;
        }
        for (; depth > keep; depth--)
            t->p[path[depth]].skip = t->n;
        while (depth < w[i].s.n) {
            const uint8_t byte = (uint8_t)w[i].s.p[depth++];

            path[depth] = t->n;
            t->p[t->n++] =
                (hx_trie_node) { .token = -1, .depth = (uint16_t)depth, .byte = byte };
        }
        t->p[path[depth]].token = w[i].id;
    }
    for (; depth > 0; depth--)
        t->p[path[depth]].skip = t->n;
    return 0;
}

/* Characters of plain text (grammar_dfa.c); 0: it is not, or it is long. */
static uint32_t plain_chars(hx_str s)
{
    uint32_t n = 0, cp;

    for (size_t i = 0; i < s.n; n++) {
        const int len = hx_utf8_next(s.p + i, s.n - i, &cp);

        if (len <= 0 || cp < 0x20 || cp == 0x7f || cp == '"' || cp == '\\' ||
            cp == 0x2028 || cp == 0x2029)
            return 0;
        i += (size_t)len;
    }
    return n <= HX_ROOM_MAX ? n : 0;
}

static void set_bit(uint32_t *mask, int32_t id)
{
    mask[id >> 5] |= 1u << (id & 31);
}

static int plain_masks(hx_vocab *v, const word *w, const uint32_t *chars, size_t n,
                       hx_err *err)
{
    const size_t all = (HX_ROOM_MAX + 1) * (size_t)v->n_word;

    if ((v->plain = hx_new(uint32_t, all)) == NULL)
        return hx_fail(err, HX_ENOMEM, "vocabulary: no memory for %zu bytes of masks",
                       4 * all);
    for (size_t i = 0; i < n; i++)
        if (chars[i] > 0)
            set_bit(v->plain + chars[i] * (size_t)v->n_word, w[i].id);
    for (size_t i = v->n_word; i < all; i++)
        v->plain[i] |= v->plain[i - v->n_word];
    return 0;
}

/* The words and their tries. */
static int fill(hx_vocab *v, word *w, uint32_t *chars, hx_err *err)
{
    size_t n = 0, n_rest = 0;
    int rc;

    for (int32_t id = 0; id < v->n_token; id++) {
        v->twin[id] = -1;
        if (v->kind[id] == HX_TOKEN_TEXT)
            w[n++] = (word) { v->bytes[id], id };
    }
    qsort(w, n, sizeof(*w), by_bytes);
    for (size_t i = 0; i < n; i++)
        chars[i] = plain_chars(w[i].s);
    if ((rc = trie_open(&v->all, w, n, v->twin, err)) != 0 ||
        (rc = plain_masks(v, w, chars, n, err)) != 0)
        return rc;
    for (size_t i = 0; i < n; i++)
        if (chars[i] == 0)
            w[n_rest++] = w[i];
    return trie_open(&v->rest, w, n_rest, v->twin, err);
}

int hx_vocab_open(hx_vocab **out, const hx_vocab_opt *opt, hx_err *err)
{
    const int32_t n = opt->n_token;
    hx_vocab *v = NULL;
    word *w = NULL;
    uint32_t *chars = NULL;
    int rc = HX_ENOMEM;

    *out = NULL;
    if (n < 1 || opt->n_vocab < n || opt->n_end < 0)
        return hx_fail(err, HX_EARG, "vocabulary: %d tokens of %d ids, %d end ids", n,
                       opt->n_vocab, opt->n_end);
    if ((v = hx_new(hx_vocab, 1)) == NULL || (v->bytes = hx_new(hx_str, n)) == NULL ||
        (v->kind = hx_new(uint8_t, n)) == NULL ||
        (v->twin = hx_new(int32_t, n)) == NULL ||
        (v->end = hx_new(int32_t, opt->n_end + 1)) == NULL ||
        (w = hx_new(word, n)) == NULL || (chars = hx_new(uint32_t, n)) == NULL) {
        hx_fail(err, HX_ENOMEM, "vocabulary: no memory for %d tokens", n);
        goto fail;
    }
    v->n_token = n;
    v->n_vocab = opt->n_vocab;
    v->n_word = ((uint32_t)opt->n_vocab + 31) / 32;
    memcpy(v->bytes, opt->bytes, (size_t)n * sizeof(*v->bytes));
    for (int32_t id = 0; id < n; id++) {
        v->kind[id] = v->bytes[id].n > 0 && v->bytes[id].n <= HX_TOKEN_BYTES_MAX
                          ? HX_TOKEN_TEXT
                          : HX_TOKEN_NONE;
        if (opt->special != NULL && opt->special[id])
            v->kind[id] = HX_TOKEN_SPECIAL;
    }
    for (int32_t i = 0; i < opt->n_end; i++) {
        if (opt->end[i] < 0 || opt->end[i] >= n) {
            rc = hx_fail(err, HX_EARG, "vocabulary: end id %d of %d tokens", opt->end[i],
                         n);
            goto fail;
        }
        v->end[v->n_end++] = opt->end[i];
        v->kind[opt->end[i]] = HX_TOKEN_END;
    }
    if ((rc = fill(v, w, chars, err)) != 0)
        goto fail;
    hx_free(w);
    hx_free(chars);
    *out = v;
    return 0;
fail:
    hx_free(w);
    hx_free(chars);
    hx_vocab_close(v);
    return rc;
}

void hx_vocab_close(hx_vocab *v)
{
    if (v == NULL)
        return;
    hx_free(v->bytes);
    hx_free(v->kind);
    hx_free(v->twin);
    hx_free(v->end);
    hx_free(v->all.p);
    hx_free(v->rest.p);
    hx_free(v->plain);
    hx_free(v);
}

/* ---- masks ----------------------------------------------------------- */

/* The length up to which the ready masks tell all of plain text, 0: not at all. What is
 * longer is in the trie `rest`. */
static uint32_t text_room(const hx_grammar *g, uint32_t cfg)
{
    const hx_config *c = &g->cfg[cfg];
    const hx_item *item = g->item + c->item;
    uint32_t room = 0;
    bool only = true;

    for (uint32_t i = 0; i < c->n_item; i++) {
        const hx_dfa_state *s = &g->dfa.state.p[item[i].state];
        const hx_frame *f = &g->frame[item[i].frame];
        const uint32_t rule =
            item[i].frame == 0 ? HX_IR_NO_END : g->dfa.state.p[f->ret].rule;

        room = HX_MAX(room, s->room);
        if (item[i].state != g->dfa.text_state || rule == HX_IR_NO_END ||
            !g->dfa.rule.p[rule].counted) {
            only &= s->no_text;
            continue;
        }
        /* A counted string; the count includes the character that the item is at. */
        room = HX_MAX(room, HX_MIN(g->dfa.rule.p[rule].max - f->count + 1, HX_ROOM_MAX));
    }
    return room == HX_ROOM_MAX || only ? room : 0;
}

typedef struct {
    hx_grammar *g;
    const hx_trie *trie;
    uint32_t start;                      /* state at the root */
    uint32_t at[HX_TOKEN_BYTES_MAX + 1]; /* states along the path */
    uint8_t byte[HX_TOKEN_BYTES_MAX + 1];
} walk;

/* The cache is full amid a walk: forgets all but the path. */
static bool retrace(walk *w, uint32_t depth)
{
    w->at[0] = w->start = hx_grammar_cache_renew(w->g, w->start);
    for (uint32_t d = 1; d < depth; d++) {
        w->at[d] = hx_grammar_cache_next(w->g, w->at[d - 1], w->byte[d]);
        if (w->at[d] < HX_CFG_FIRST)
            return false;
    }
    return true;
}

static void allow(const hx_vocab *v, const hx_trie_node *node, uint32_t *mask)
{
    set_bit(mask, node->token);
    if (node->twins)
        for (int32_t id = v->twin[node->token]; id >= 0; id = v->twin[id])
            set_bit(mask, id);
}

/* false: too much work. */
static bool walk_trie(walk *w, uint32_t *mask)
{
    hx_grammar *g = w->g;
    const hx_trie_node *node = w->trie->p;
    const uint32_t n = w->trie->n;

    w->at[0] = w->start;
    for (uint32_t i = 0; i < n;) {
        const hx_trie_node *t = &node[i];
        uint32_t to = hx_grammar_cache_next(g, w->at[t->depth - 1], t->byte);

        if (to == HX_CFG_FULL) {
            if (!retrace(w, t->depth))
                return false;
            to = hx_grammar_cache_next(g, w->at[t->depth - 1], t->byte);
        }
        /* Remembered transitions are not counted: they cost next to nothing. */
        if (to == HX_CFG_FULL || g->work > g->opt.mask_steps)
            return false;
        if (to == HX_CFG_DEAD) {
            i = t->skip;
            continue;
        }
        w->at[t->depth] = to;
        w->byte[t->depth] = t->byte;
        if (t->token >= 0)
            allow(g->vocab, t, mask);
        i++;
    }
    return true;
}

static bool compute(hx_grammar *g, uint32_t *cfg, uint32_t *mask)
{
    const hx_vocab *v = g->vocab;
    const hx_config c = g->cfg[*cfg];
    const uint32_t room = text_room(g, *cfg);
    walk w = { .g = g, .trie = room > 0 ? &v->rest : &v->all, .start = *cfg };

    if (room > 0)
        memcpy(mask, v->plain + room * (size_t)v->n_word, v->n_word * sizeof(*mask));
    else
        memset(mask, 0, v->n_word * sizeof(*mask));
    for (int32_t i = 0; c.complete && i < v->n_end; i++)
        set_bit(mask, v->end[i]);
    for (uint32_t i = 0; g->has_tokens && i < c.n_item; i++) {
        const hx_dfa_state *s = &g->dfa.state.p[g->item[c.item + i].state];

        for (uint32_t k = 0; k < s->n_token; k++) {
            const int32_t id = g->dfa.token.p[s->token + k].id;

            if (id < v->n_token &&
                hx_grammar_cache_token(g, *cfg, HX_CFG_DEAD, id) != HX_CFG_DEAD)
                set_bit(mask, id);
        }
    }
    g->work = 0;
    if (!walk_trie(&w, mask))
        return false;
    *cfg = w.start;
    return true;
}

/* Keeps a mask in the place of the oldest. */
static void keep(hx_grammar *g, uint32_t cfg, const uint32_t *mask)
{
    const uint32_t slot = g->next_mask, owner = g->mask_owner[slot];

    if (owner != 0)
        g->cfg[owner].mask = 0;
    g->mask_owner[slot] = cfg;
    g->cfg[cfg].mask = slot + 1;
    g->next_mask = (slot + 1) % g->n_mask;
    memcpy(g->mask + slot * (size_t)g->vocab->n_word, mask,
           g->vocab->n_word * sizeof(*mask));
}

static int no_mask(const hx_grammar *g, uint32_t *mask, const char *why, hx_err *err)
{
    memset(mask, 0, g->vocab->n_word * sizeof(*mask));
    return hx_fail(err, HX_ELIMIT, "grammar: %s", why);
}

int hx_grammar_mask(hx_matcher *m, uint32_t *mask, hx_err *err)
{
    hx_grammar *g = m->g;
    const hx_vocab *v = g->vocab;
    uint32_t cfg, any = 0;

    if (v == NULL)
        return hx_fail(err, HX_EARG, "grammar: a mask needs a vocabulary");
    if (m->ended || (m->n_item == 0 && !m->complete))
        return no_mask(g, mask, m->ended ? "the answer has ended" : "too ambiguous", err);
    cfg = hx_grammar_cache_config(m);
    if (g->cfg[cfg].mask != 0) {
        memcpy(mask, g->mask + (g->cfg[cfg].mask - 1) * (size_t)v->n_word,
               v->n_word * sizeof(*mask));
        return 0;
    }
    if (!compute(g, &cfg, mask))
        return no_mask(g, mask, "a mask takes too many steps (limit mask_steps)", err);
    m->config = cfg;
    m->epoch = g->epoch;
    for (uint32_t i = 0; i < v->n_word; i++)
        any |= mask[i];
    if (any == 0)
        return no_mask(g, mask, "no token can follow", err);
    keep(g, cfg, mask);
    return 0;
}
