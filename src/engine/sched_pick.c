/* sched_pick.c - what the engine does next: a decode step, or how many layers of how long
 * a piece of a prompt. Pure functions over measured costs and a small state, called by
 * sched.c; they know no stream, no clock and no memory.
 *
 * Decode earns credit for prefill: after each step, what the step may take at its floor
 * (its time without prompts / share) less what it took. Prefill runs when its next layer
 * fits the credit. So a running stream keeps share of its rate however long a layer
 * takes; where layers are long, several decode steps lie between two of them. */
#include "engine/engine.h"

#define WEIGHT 0.2f /* of a new measurement */
/* What decode takes alone is not what it takes while a newcomer's request is taken apart
 * beside it, so it rises slowly. Beside a prompt, a faster step shows that it is too high;
 * a step right after another one, whose caches are its own, is one alone. */
#define WEIGHT_UP   0.02f
#define WEIGHT_DOWN 0.05f
#define UP_MOST     1.25f /* a hiccup says little */
/* Prefill gets some credit also where decode became much slower by itself since it was
 * alone, as sequences grew. Not sooner: steps between slices of a prompt are slower anyway,
 * for they find the caches taken, and that is what the share has to make up for. */
#define DRIFT 0.5f
/* A hiccup of the machine is nobody's debt: a measurement counts up to so many times what
 * was expected. */
#define OUTLIER 2.0f
/* The longest slice, in decode steps: the gap with one is then at most 2.5 times the gap
 * without, so that whichever of them is the median, p99 stays below three times that. */
#define SLICE     1.5f
#define HARDLY    1.25f
#define SHARE_MAX 0.95f

static void learn(float *at, float us, float weight)
{
    *at = *at == 0 ? us : *at + weight * (us - *at);
}

/* A decode step of rows, from the nearest number of rows seen; 0: none was. */
static float expect(const float *by_rows, int32_t rows)
{
    for (int32_t d = 0; d <= HX_SPAN_MAX; d++) {
        if (rows - d >= 1 && by_rows[rows - d] > 0)
            return by_rows[rows - d];
        if (rows + d <= HX_SPAN_MAX && by_rows[rows + d] > 0)
            return by_rows[rows + d];
    }
    return 0;
}

/* A layer of a chunk: between two lengths seen, or in proportion to the only one; 0: none
 * was. */
static float expect_layer(const hx_costs *c, int64_t layer, int64_t blocks)
{
    const float *by_blocks = c->layer + layer * c->n_block;
    int64_t less = blocks, more = blocks;

    while (less >= 1 && by_blocks[less - 1] == 0)
        less--;
    while (more <= c->n_block && by_blocks[more - 1] == 0)
        more++;
    if (less < 1 && more > c->n_block)
        return 0;
    if (less < 1)
        return by_blocks[more - 1] * (float)blocks / (float)more;
    if (less == blocks || more > c->n_block)
        return by_blocks[less - 1] * (float)blocks / (float)less;
    return by_blocks[less - 1] + (by_blocks[more - 1] - by_blocks[less - 1]) *
                                     (float)(blocks - less) / (float)(more - less);
}

/* The longest chunk whose cost is known. */
static int64_t longest_seen(const hx_costs *c)
{
    int64_t b = c->n_block;

    while (b > 0 && c->layer[b - 1] == 0)
        b--;
    return b;
}

static float longest_layer(const hx_costs *c, int64_t blocks)
{
    float most = 0;

    for (int64_t l = 0; l < c->n_layer; l++)
        most = HX_MAX(most, expect_layer(c, l, blocks));
    return most;
}

static bool each_within(const hx_costs *c, int64_t blocks, float most)
{
    for (int64_t l = 0; l < c->n_layer; l++)
        if (expect_layer(c, l, blocks) > most)
            return false;
    return true;
}

/* The longest chunk that none of its layers makes wait too long. Where one block does so
 * already, because weights come over a link, say, more of them may hardly cost more: chunks
 * get longer until that is known. */
static int64_t chunk_blocks(const hx_costs *c, const hx_pick_state *s, float step)
{
    const float one = longest_layer(c, 1), slice = step * SLICE,
                most = HX_MAX(slice, one * HARDLY);
    const int64_t all = HX_MIN(c->n_block, s->left);
    int64_t b = one > 0 ? all : 1;

    while (b > 1 && !each_within(c, b, most))
        b -= (b + 15) / 16;
    if (one > slice && b >= longest_seen(c))
        b = HX_MIN(2 * b, all);
    return HX_MAX(b, 1);
}

/* As few chunks as there can be, and these alike: each has its price. */
static int64_t even_blocks(const hx_costs *c, const hx_pick_state *s)
{
    const int64_t chunks = HX_MAX((s->left + c->n_block - 1) / c->n_block, 1);

    return (s->left + chunks - 1) / chunks;
}

static int64_t whole_layers(const hx_costs *c, const hx_pick_state *s, int64_t blocks,
                            float most_us)
{
    float us = 0, one = 0;
    int64_t l = s->layer;

    while (l < c->n_layer && (one = expect_layer(c, l, blocks)) > 0 &&
           (us += one) <= most_us)
        l++;
    return l - s->layer;
}

hx_pick hx_sched_pick_next(const hx_costs *c, const hx_pick_state *s)
{
    const float step = expect(c->step, s->n_decode);
    int64_t blocks, layers;

    if (s->n_decode == 0 && !s->prefill)
        return (hx_pick) { .kind = HX_PICK_NOTHING };
    if (!s->prefill)
        return (hx_pick) { .kind = HX_PICK_DECODE };
    if (s->n_decode == 0)
        return (hx_pick) { HX_PICK_PREFILL, s->blocks > 0 ? s->blocks : even_blocks(c, s),
                           c->n_layer - s->layer };
    if (step == 0 || s->credit_us <= 0) /* nothing is known of decode yet; it is due */
        return (hx_pick) { .kind = HX_PICK_DECODE };
    blocks = s->blocks > 0 ? s->blocks : chunk_blocks(c, s, step);
    layers = whole_layers(c, s, blocks, HX_MIN(s->credit_us, step * SLICE));
    /* A layer longer than any slice may be waits until all of it is paid for. */
    if (layers == 0 && s->credit_us > 0 &&
        s->credit_us >= expect_layer(c, s->layer, blocks))
        layers = 1;
    if (layers == 0)
        return (hx_pick) { .kind = HX_PICK_DECODE };
    return (hx_pick) { HX_PICK_PREFILL, blocks, layers };
}

int64_t hx_sched_pick_prompt(const hx_pick_prompt *p, int64_t n)
{
    int64_t best = -1;

    for (int64_t i = 0; i < n; i++)
        if (best < 0 || p[i].priority > p[best].priority ||
            (p[i].priority == p[best].priority && p[i].turn < p[best].turn))
            best = i;
    return best;
}

void hx_sched_pick_decoded(hx_costs *c, hx_pick_state *s, int32_t rows, float us)
{
    const float before = expect(c->step, rows), share = HX_MIN(s->share, SHARE_MAX);
    const float took = before > 0 ? HX_MIN(us, before * OUTLIER) : us;
    float *alone = &c->alone[rows], floor_us;

    learn(&c->step[rows], took, WEIGHT);
    if (!s->prefill)
        learn(alone, took, took > *alone ? WEIGHT_UP : WEIGHT);
    else if (c->step[rows] < *alone)
        learn(alone, c->step[rows], WEIGHT_DOWN);
    else if (!s->sliced)
        learn(alone, *alone > 0 ? HX_MIN(took, *alone * UP_MOST) : took, WEIGHT_UP);
    s->sliced = false;
    floor_us = HX_MAX(expect(c->alone, rows), c->step[rows] * DRIFT) / share;
    if (!s->prefill)
        s->credit_us = 0;
    s->credit_us += HX_MAX(floor_us - took, took * (1 - SHARE_MAX));
}

void hx_sched_pick_read(hx_costs *c, hx_pick_state *s, int64_t layer, int64_t blocks,
                        bool full, float us)
{
    const float before = expect_layer(c, layer, blocks);
    const float took = before > 0 ? HX_MIN(us, before * OUTLIER) : us;
    float *at = &c->layer[layer * c->n_block + blocks - 1];

    if (full || *at == 0)
        learn(at, took, WEIGHT);
    if (s->n_decode > 0)
        s->credit_us -= took;
    s->sliced = true;
}
