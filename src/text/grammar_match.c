/* grammar_match.c - the states of the pushdown automaton: made on demand, remembered with
 * their transitions, forgotten together when the cache is full.
 *
 * Called by grammar_mask.c and by whoever drives a matcher. A state is a set of items in
 * canonical order; equal sets get one id, so a transition is computed once. A matcher
 * keeps its state in full beside the id, which makes it independent of the cache. After
 * hx_grammar_cache_open() nothing here allocates. */
#include "text/grammar_ir.h"

enum {
    MASKS_MAX = 1024,
    /* What one path of HX_TOKEN_BYTES_MAX transitions can take must always fit. */
    CFG_MIN = 2 * HX_TOKEN_BYTES_MAX,
    ITEM_MIN = CFG_MIN * HX_MATCHER_ITEMS,
    FRAME_MIN = CFG_MIN * HX_MATCHER_FRAMES
};

/* ---- memory ---------------------------------------------------------- */

static uint32_t power_above(uint32_t n)
{
    uint32_t p = 16;

    while (p < n)
        p *= 2;
    return p;
}

/* Hands out the mapping piece by piece; with base NULL it only adds up. */
static void *take(char *base, size_t *at, size_t n, size_t size)
{
    void *p = base == NULL ? NULL : base + *at;

    *at += (n * size + 63) & ~(size_t)63;
    return p;
}

static size_t lay_out(hx_grammar *g, char *base)
{
    const size_t words = g->vocab == NULL ? 0 : g->vocab->n_word;
    size_t at = 0;

    g->frame = take(base, &at, g->cap_frame, sizeof(*g->frame));
    g->item = take(base, &at, g->cap_item, sizeof(*g->item));
    g->cfg = take(base, &at, g->cap_cfg, sizeof(*g->cfg));
    g->next = take(base, &at, (size_t)g->cap_cfg * g->n_class, sizeof(*g->next));
    g->frame_slot =
        take(base, &at, power_above(2 * g->cap_frame), sizeof(*g->frame_slot));
    g->cfg_slot = take(base, &at, power_above(2 * g->cap_cfg), sizeof(*g->cfg_slot));
    g->mask = take(base, &at, g->n_mask * words, sizeof(*g->mask));
    g->mask_owner = take(base, &at, g->n_mask, sizeof(*g->mask_owner));
    g->seen = take(base, &at, HX_SEEN_SLOTS, sizeof(*g->seen));
    g->todo = take(base, &at, HX_SEEN_MAX, sizeof(*g->todo));
    g->out = take(base, &at, HX_SEEN_MAX, sizeof(*g->out));
    g->spare = take(base, &at, 1, sizeof(*g->spare));
    return at;
}

static void reset(hx_grammar *g)
{
    g->epoch++;
    g->n_frame = 1;
    g->n_item = 0;
    g->n_cfg = HX_CFG_FIRST;
    g->next_mask = 0;
}

static void forget(hx_grammar *g)
{
    memset(g->frame_slot, 0, power_above(2 * g->cap_frame) * sizeof(*g->frame_slot));
    memset(g->cfg_slot, 0, power_above(2 * g->cap_cfg) * sizeof(*g->cfg_slot));
    memset(g->mask_owner, 0, g->n_mask * sizeof(*g->mask_owner));
    reset(g);
}

int hx_grammar_cache_open(hx_grammar *g, hx_err *err)
{
    const size_t words = g->vocab == NULL ? 0 : g->vocab->n_word;
    const size_t half = g->opt.cache_bytes / 2;
    /* With 8 items and 2 frames to a state, as JSON mostly has fewer. */
    const size_t per_cfg = g->n_class * sizeof(*g->next) + sizeof(*g->cfg) + 16 +
                           8 * sizeof(*g->item) + 2 * (sizeof(*g->frame) + 16);

    g->cap_cfg = (uint32_t)HX_MAX(half / per_cfg, CFG_MIN);
    /* Address space, not memory: pages come when they are touched. */
    g->cap_item = HX_MAX(8 * g->cap_cfg, ITEM_MIN);
    g->cap_frame = HX_MAX(2 * g->cap_cfg, FRAME_MIN);
    if (words > 0)
        g->n_mask = (uint32_t)HX_MIN(HX_MAX(half / (words * 4), 4), MASKS_MAX);
    g->map_bytes = lay_out(g, NULL);
    if ((g->map = hx_map(g->map_bytes, false)) == NULL)
        return hx_fail(err, HX_ENOMEM, "grammar: no memory for a cache of %zu bytes",
                       g->map_bytes);
    lay_out(g, g->map);
    reset(g); /* the mapping is all zero */
    return 0;
}

void hx_grammar_cache_close(hx_grammar *g)
{
    if (g->map != NULL)
        hx_unmap(g->map, g->map_bytes);
}

/* ---- frames ---------------------------------------------------------- */

static uint32_t hash3(uint32_t a, uint32_t b, uint32_t c)
{
    uint64_t h = (uint64_t)a << 32 | b;

    h = (h ^ (uint64_t)c << 17) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32);
}

/* The id of a frame; 0: the cache is full. */
static uint32_t frame_of(hx_grammar *g, uint32_t ret, uint32_t count, uint32_t parent)
{
    const uint32_t mask = power_above(2 * g->cap_frame) - 1;
    uint32_t i = hash3(ret, count, parent) & mask;

    for (; g->frame_slot[i] != 0; i = (i + 1) & mask) {
        const hx_frame *f = &g->frame[g->frame_slot[i]];

        if (f->ret == ret && f->count == count && f->parent == parent)
            return g->frame_slot[i];
    }
    if (g->n_frame == g->cap_frame)
        return 0;
    g->frame[g->n_frame] = (hx_frame) {
        .ret = ret,
        .count = count,
        .parent = parent,
        .depth = (uint16_t)(parent == 0 ? 1 : g->frame[parent].depth + 1),
    };
    return g->frame_slot[i] = g->n_frame++;
}

static uint32_t depth_of(const hx_grammar *g, uint32_t frame)
{
    return frame == 0 ? 0 : g->frame[frame].depth;
}

/* ---- closure --------------------------------------------------------- */

static void begin(hx_grammar *g)
{
    if (++g->mark == 0) {
        memset(g->seen, 0, HX_SEEN_SLOTS * sizeof(*g->seen));
        g->mark = 1;
    }
    g->n_seen = g->n_todo = g->n_out = 0;
    g->complete = g->overflow = false;
}

/* Whether this arrival is new. At a counted rule whose minimum is reached, fewer turns
 * done can do all that more can, so it is new only with fewer than ever. */
static bool is_new(hx_grammar *g, uint32_t state, uint32_t frame, uint32_t count,
                   bool open)
{
    const uint64_t key = (uint64_t)state << 32 | frame;
    const uint32_t fixed = open ? UINT32_MAX : count;
    uint32_t i = hash3(state, frame, fixed) & (HX_SEEN_SLOTS - 1);

    for (; g->seen[i].mark == g->mark; i = (i + 1) & (HX_SEEN_SLOTS - 1)) {
        hx_seen *s = &g->seen[i];

        if (s->key != key || s->open != open || (!open && s->count != count))
            continue;
        if (!open || count >= s->count)
            return false;
        s->count = count;
        return true;
    }
    if (g->n_seen == HX_SEEN_MAX) {
        g->overflow = true;
        return false;
    }
    g->n_seen++;
    g->seen[i] = (hx_seen) { key, g->mark, count, open };
    return true;
}

static void arrive(hx_grammar *g, uint32_t state, uint32_t frame, uint32_t count)
{
    const hx_dfa_state *s = &g->dfa.state.p[state];
    uint32_t need = s->need;
    bool open = false;

    if (s->rule != HX_IR_NO_END && g->dfa.rule.p[s->rule].counted) {
        const hx_dfa_rule *r = &g->dfa.rule.p[s->rule];

        if (count >= r->min) {
            need = 0;
            open = true;
        } else {
            need = g->dfa.state.p[g->dfa.rule.p[r->child].start].need + 1u;
        }
        /* Without an end all counts from the minimum on are one. */
        count = r->max == HX_IR_NO_END ? HX_MIN(count, r->min) : count;
    }
    if (depth_of(g, frame) + need > g->opt.depth || !is_new(g, state, frame, count, open))
        return;
    if (g->n_todo == HX_SEEN_MAX)
        g->overflow = true;
    else
        g->todo[g->n_todo++] = (hx_arrival) { state, frame, count };
}

/* Leaves the rule of this frame. */
static void leave(hx_grammar *g, uint32_t frame)
{
    if (frame == 0)
        g->complete = true;
    else
        arrive(g, g->frame[frame].ret, g->frame[frame].parent, g->frame[frame].count);
}

static bool enter(hx_grammar *g, uint32_t rule, uint32_t ret, uint32_t count,
                  uint32_t frame)
{
    const uint32_t start = g->dfa.rule.p[rule].start;
    uint32_t inner;

    /* A frame that cannot hold is not made: it would only fill the cache. */
    if (depth_of(g, frame) + 1 + g->dfa.state.p[start].need > g->opt.depth)
        return true;
    if ((inner = frame_of(g, ret, count, frame)) == 0)
        return false;
    arrive(g, start, inner, 0);
    return true;
}

/* At a rule in any order: count has a bit for each part that has come. */
static bool follow_any_order(hx_grammar *g, const hx_dfa_rule *r, hx_arrival a)
{
    if ((a.count & r->min) == r->min)
        leave(g, a.frame);
    for (uint32_t i = 0; i < r->max; i++) {
        const uint32_t bit = r->again && i == r->max - 1 ? 0 : 1u << i;

        if ((a.count & bit) == 0 &&
            !enter(g, r->child + i, a.state, a.count | bit, a.frame))
            return false;
    }
    return true;
}

/* Follows an arrival without taking a byte; false: the cache is full. */
static bool follow(hx_grammar *g, hx_arrival a)
{
    const hx_dfa_state *s = &g->dfa.state.p[a.state];

    if (s->rule != HX_IR_NO_END) {
        const hx_dfa_rule *r = &g->dfa.rule.p[s->rule];

        if (r->any_order)
            return follow_any_order(g, r, a);
        if (a.count >= r->min)
            leave(g, a.frame);
        return a.count == r->max || enter(g, r->child, a.state, a.count + 1, a.frame);
    }
    if (s->n_byte + s->n_token > 0)
        g->out[g->n_out++] = (hx_item) { a.state, a.frame };
    if (s->final)
        leave(g, a.frame);
    for (uint32_t i = 0; i < s->n_call; i++) {
        const hx_call_edge *c = &g->dfa.call.p[s->call + i];

        if (c->tail)
            arrive(g, g->dfa.rule.p[c->rule].start, a.frame, 0);
        else if (!enter(g, c->rule, c->ret, 0, a.frame))
            return false;
    }
    return true;
}

/* How many frames a matcher needs for these items. */
static uint32_t frames_below(hx_grammar *g, const hx_item *item, uint32_t n)
{
    uint32_t frames = 0;

    if (++g->frame_mark == 0) {
        for (uint32_t i = 0; i < g->n_frame; i++)
            g->frame[i].mark = 0;
        g->frame_mark = 1;
    }
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t f = item[i].frame; f != 0; f = g->frame[f].parent) {
            if (g->frame[f].mark == g->frame_mark)
                break;
            g->frame[f].mark = g->frame_mark;
            frames++;
        }
    return frames;
}

static bool is_before(hx_item a, hx_item b)
{
    return a.state != b.state ? a.state < b.state : a.frame < b.frame;
}

/* Shell's sort: there are mostly two items and at most a few hundred, and qsort() of that
 * many calls malloc. */
static void sort_items(hx_item *v, uint32_t n)
{
    for (uint32_t gap = n > 16 ? n / 3 : 1; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
        for (uint32_t i = gap; i < n; i++) {
            const hx_item x = v[i];
            uint32_t k = i;

            for (; k >= gap && is_before(x, v[k - gap]); k -= gap)
                v[k] = v[k - gap];
            v[k] = x;
        }
}

/* The id of the state that g->out and g->complete describe. */
static uint32_t config_of(hx_grammar *g)
{
    const uint32_t mask = power_above(2 * g->cap_cfg) - 1, n = g->n_out;
    const size_t bytes = n * sizeof(*g->out);
    uint32_t hash = hash3(n, g->complete, 0), i;

    sort_items(g->out, n);
    for (i = 0; i < n; i++)
        hash = hash3(hash, g->out[i].state, g->out[i].frame);
    for (i = hash & mask; g->cfg_slot[i] != 0; i = (i + 1) & mask) {
        const hx_config *c = &g->cfg[g->cfg_slot[i]];

        if (c->hash == hash && c->n_item == n && c->complete == g->complete &&
            memcmp(g->item + c->item, g->out, bytes) == 0)
            return g->cfg_slot[i];
    }
    if (n > HX_MATCHER_ITEMS || frames_below(g, g->out, n) > HX_MATCHER_FRAMES)
        return HX_CFG_DEAD;
    if (g->n_cfg == g->cap_cfg || n > g->cap_item - g->n_item)
        return HX_CFG_FULL;
    memcpy(g->item + g->n_item, g->out, bytes);
    g->cfg[g->n_cfg] = (hx_config) {
        .hash = hash, .item = g->n_item, .n_item = (uint16_t)n, .complete = g->complete
    };
    memset(g->next + (size_t)g->n_cfg * g->n_class, 0, g->n_class * sizeof(*g->next));
    g->n_item += n;
    return g->cfg_slot[i] = g->n_cfg++;
}

/* Finishes the set that was begun. */
static uint32_t finish(hx_grammar *g)
{
    while (g->n_todo > 0)
        if (!follow(g, g->todo[--g->n_todo]))
            return HX_CFG_FULL;
    g->work += g->n_seen + 1;
    return g->overflow || (g->n_out == 0 && !g->complete) ? HX_CFG_DEAD : config_of(g);
}

/* ---- transitions ----------------------------------------------------- */

static void arrive_by_byte(hx_grammar *g, uint32_t cfg, uint8_t byte)
{
    const hx_config *c = &g->cfg[cfg];

    for (uint32_t i = 0; i < c->n_item; i++) {
        const hx_item item = g->item[c->item + i];
        const hx_dfa_state *s = &g->dfa.state.p[item.state];
        const hx_byte_edge *e = g->dfa.byte.p + s->byte;

        for (uint32_t k = 0; k < s->n_byte && e[k].lo <= byte; k++)
            if (byte <= e[k].hi) {
                arrive(g, e[k].to, item.frame, 0);
                break;
            }
    }
}

uint32_t hx_grammar_cache_step(hx_grammar *g, uint32_t cfg, uint8_t byte)
{
    uint32_t to;

    if (cfg < HX_CFG_FIRST)
        return HX_CFG_DEAD;
    begin(g);
    arrive_by_byte(g, cfg, byte);
    to = finish(g);
    if (to != HX_CFG_FULL)
        g->next[(size_t)cfg * g->n_class + g->class_of[byte]] = to;
    return to;
}

uint32_t hx_grammar_cache_token(hx_grammar *g, uint32_t cfg, uint32_t by_bytes,
                                int32_t id)
{
    const hx_config *c = &g->cfg[cfg];

    begin(g);
    for (uint32_t i = 0; i < c->n_item; i++) {
        const hx_item item = g->item[c->item + i];
        const hx_dfa_state *s = &g->dfa.state.p[item.state];

        for (uint32_t k = 0; k < s->n_token; k++)
            if (g->dfa.token.p[s->token + k].id == id)
                arrive(g, g->dfa.token.p[s->token + k].to, item.frame, 0);
    }
    if (g->n_todo == 0)
        return by_bytes;
    if (by_bytes >= HX_CFG_FIRST) {
        const hx_config *b = &g->cfg[by_bytes];

        for (uint32_t i = 0; i < b->n_item; i++)
            arrive(g, g->item[b->item + i].state, g->item[b->item + i].frame, 0);
        g->complete = b->complete;
    }
    return finish(g);
}

/* ---- matchers -------------------------------------------------------- */

/* Writes a remembered state out in full. */
static void save(hx_matcher *m, uint32_t cfg)
{
    hx_grammar *g = m->g;
    const hx_config *c = &g->cfg[cfg];
    uint32_t n = 0;

    frames_below(g, g->item + c->item, c->n_item);
    /* Parents first: their ids are smaller. m counts frames from 1. */
    for (uint32_t i = 0; i < c->n_item; i++) {
        uint32_t at = n, f = g->item[c->item + i].frame, new_frames = 0;

        for (; f != 0 && g->frame[f].mark == g->frame_mark; f = g->frame[f].parent) {
            g->frame[f].mark = 0;
            new_frames++;
        }
        n += new_frames;
        f = g->item[c->item + i].frame;
        for (uint32_t k = at + new_frames; k > at; k--, f = g->frame[f].parent) {
            m->frame[k - 1].ret = g->frame[f].ret;
            m->frame[k - 1].count = g->frame[f].count;
            m->frame[k - 1].parent = g->frame[f].parent;
            g->frame[f].place = (uint16_t)k;
        }
    }
    for (uint32_t k = 0; k < n; k++)
        if (m->frame[k].parent != 0)
            m->frame[k].parent = g->frame[m->frame[k].parent].place;
    for (uint32_t i = 0; i < c->n_item; i++) {
        const hx_item item = g->item[c->item + i];

        m->item[i].state = item.state;
        m->item[i].frame = item.frame == 0 ? 0 : g->frame[item.frame].place;
    }
    m->n_frame = (uint16_t)n;
    m->n_item = c->n_item;
    m->complete = c->complete;
    m->config = cfg;
    m->epoch = g->epoch;
}

/* The opposite. A matcher's state always fits an empty cache. */
static uint32_t load(const hx_matcher *m)
{
    hx_grammar *g = m->g;
    uint32_t id[HX_MATCHER_FRAMES + 1] = { 0 };

    for (uint32_t k = 0; k < m->n_frame; k++) {
        id[k + 1] =
            frame_of(g, m->frame[k].ret, m->frame[k].count, id[m->frame[k].parent]);
        if (id[k + 1] == 0)
            return HX_CFG_FULL;
    }
    for (uint32_t i = 0; i < m->n_item; i++)
        g->out[i] = (hx_item) { m->item[i].state, id[m->item[i].frame] };
    g->n_out = m->n_item;
    g->complete = m->complete;
    return config_of(g);
}

uint32_t hx_grammar_cache_renew(hx_grammar *g, uint32_t cfg)
{
    g->spare->g = g;
    save(g->spare, cfg);
    forget(g);
    cfg = load(g->spare);
    hx_assert(cfg >= HX_CFG_FIRST);
    return cfg;
}

uint32_t hx_grammar_cache_config(hx_matcher *m)
{
    hx_grammar *g = m->g;

    if (m->epoch != g->epoch) {
        m->config = load(m);
        m->epoch = g->epoch;
    }
    if (m->config == HX_CFG_FULL || g->n_cfg > g->cap_cfg / 2 ||
        g->n_item > g->cap_item / 2 || g->n_frame > g->cap_frame / 2) {
        forget(g);
        m->config = load(m);
        m->epoch = g->epoch;
        hx_assert(m->config >= HX_CFG_FIRST);
    }
    return m->config;
}

void hx_grammar_start(hx_grammar *g, hx_matcher *m)
{
    uint32_t cfg;

    m->g = g;
    m->ended = false;
    if (g->n_cfg > g->cap_cfg / 2)
        forget(g);
    begin(g);
    arrive(g, g->dfa.rule.p[g->dfa.root].start, 0, 0);
    if ((cfg = finish(g)) >= HX_CFG_FIRST) {
        save(m, cfg);
        return;
    }
    /* Too ambiguous to begin: nothing will be allowed, and masks say why. */
    m->n_item = m->n_frame = 0;
    m->complete = false;
    m->epoch = g->epoch - 1;
}

static bool is_stuck(const hx_matcher *m)
{
    return m->ended || (m->n_item == 0 && !m->complete);
}

int hx_grammar_accept_bytes(hx_matcher *m, hx_str bytes)
{
    hx_grammar *g = m->g;
    uint32_t cfg;

    if (is_stuck(m))
        return bytes.n == 0 && !m->ended ? 0 : HX_EFORMAT;
    cfg = hx_grammar_cache_config(m);
    for (size_t i = 0; i < bytes.n && cfg >= HX_CFG_FIRST; i++) {
        uint32_t to = hx_grammar_cache_next(g, cfg, (uint8_t)bytes.p[i]);

        if (to == HX_CFG_FULL)
            to = hx_grammar_cache_next(g, hx_grammar_cache_renew(g, cfg),
                                       (uint8_t)bytes.p[i]);
        cfg = to;
    }
    if (cfg < HX_CFG_FIRST)
        return HX_EFORMAT;
    save(m, cfg);
    return 0;
}

int hx_grammar_accept(hx_matcher *m, int32_t id)
{
    hx_grammar *g = m->g;
    const hx_vocab *v = g->vocab;
    uint32_t cfg, to = HX_CFG_DEAD;

    if (v == NULL || id < 0 || id >= v->n_token)
        return HX_EARG;
    if (is_stuck(m))
        return HX_EFORMAT;
    if (v->kind[id] == HX_TOKEN_END && m->complete) {
        m->ended = true;
        return 0;
    }
    cfg = hx_grammar_cache_config(m);
    if (v->kind[id] == HX_TOKEN_TEXT) {
        to = cfg;
        for (size_t i = 0; i < v->bytes[id].n && to >= HX_CFG_FIRST; i++)
            to = hx_grammar_cache_next(g, to, (uint8_t)v->bytes[id].p[i]);
    }
    if (g->has_tokens && to != HX_CFG_FULL)
        to = hx_grammar_cache_token(g, cfg, to, id);
    if (to < HX_CFG_FIRST)
        return HX_EFORMAT;
    save(m, to);
    return 0;
}

hx_grammar_state hx_grammar_done(const hx_matcher *m)
{
    if (!m->complete)
        return HX_GRAMMAR_OPEN;
    return m->ended || m->n_item == 0 ? HX_GRAMMAR_MUST_END : HX_GRAMMAR_MAY_END;
}
