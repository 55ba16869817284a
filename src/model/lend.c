/* lend.c - slots of the expert store lent to long prompts: places that take layers' experts
 * in turn and ahead, two for whole layers, or where slots are few some for parts of them; and
 * workspace before these. See store.h.
 *
 * The device's one list of operations keeps all apart: who was in a slot is announced gone
 * before the slot is written, pushes begin after the operations before them, and operations
 * that work in lent slots after the pushes that were on their way there. Who changes to
 * another slot does so between two of them, too. */
#include <sched.h>

#include "model/model.h"
#include "model/store.h"

/* A place for a part of a layer's experts. */
struct hx_stage {
    int64_t part;  /* which: layer * n_part + its number there; -1: none */
    int64_t begun; /* experts before this one are there or on their way */
    uint64_t ticket;
    hx_buf at;     /* hx_lease [E] on the device; those of other parts mean nothing */
    hx_lease *row; /* [E] the same, locked host memory */
    hx_buf shared;
    int32_t slot0; /* first of its slots */
};

struct hx_lend {
    struct hx_stage stage[HX_LEND_PARTS + 1]; /* [n_stage] */
    int64_t n_stage;
    int64_t n_part, n_in_part; /* of a layer; experts in each, but maybe the last */
    int64_t at;                /* the part that is worked with next; -1: not known */
    hx_buf told; /* i32 [n_layer, TOLD_ROWS, A] locked host memory: picks of a prompt */
    int64_t *n_told; /* [n_layer] how many */
    int32_t next;    /* slots from here on may have nobody yet */
    bool keep;
};

#define TOLD_ROWS 256 /* the last of a call */

static int64_t next_moe(const hx_store *s, int64_t layer)
{
    while (++layer < s->n_layer && s->model->layer[layer].ffn != HX_FFN_MOE)
        ;
    return layer < s->n_layer ? layer : -1;
}

/* ---- lending ------------------------------------------------------------------------- */

bool hx_lend_is_on(const hx_store *s)
{
    return s->clock.n_slot < s->n_all_slot;
}

static int64_t in_part(const hx_store *s, int64_t n_part)
{
    return (s->n_expert + n_part - 1) / n_part;
}

/* Decode keeps an eighth of its slots. */
uint64_t hx_store_lendable(const hx_store *s, int64_t n_part, int64_t n_place)
{
    const int64_t n = s->n_all_slot - s->n_all_slot / 8 - n_place * in_part(s, n_part);

    return s->lend != NULL && n > 0 ? (uint64_t)n * s->record_bytes : 0;
}

void hx_store_cut(hx_store *s, int64_t n_part, int64_t n_place)
{
    struct hx_lend *l = s->lend;

    hx_assert(hx_store_lendable(s, n_part, n_place) > 0 && !hx_lend_is_on(s));
    l->n_in_part = in_part(s, n_part);
    l->n_part = (s->n_expert + l->n_in_part - 1) / l->n_in_part;
    l->n_stage = HX_MIN(n_place, l->n_part + 1);
    for (int64_t i = 0; i < l->n_stage; i++)
        l->stage[i].slot0 = s->n_all_slot - (int32_t)((l->n_stage - i) * l->n_in_part);
}

static void forget_parts(struct hx_lend *l)
{
    for (size_t i = 0; i < HX_LEN(l->stage); i++)
        l->stage[i].part = -1;
}

/* How often an expert must have been picked to be among the n picked most that live in
 * slots; 0: those are all. */
static int heat_of_most(const hx_clock *c, int64_t n)
{
    int64_t with[UINT8_MAX + 1] = { 0 };
    int heat = UINT8_MAX;

    for (int32_t i = 0; i < c->n_slot; i++)
        if (c->tenant[i] >= 0)
            with[c->heat[c->tenant[i]]]++;
    while (heat > 0 && (n -= with[heat]) > 0)
        heat--;
    return heat;
}

/* Those in slots from first on with such a heat or more change to slots before, while there
 * are tenants below another heat who leave. */
static int change(hx_store *s, int32_t first, int heat, int below, hx_err *err)
{
    hx_clock *c = &s->clock;
    int32_t to = 0;
    int rc;

    for (int32_t i = first; i < c->n_slot; i++) {
        const int32_t item = c->tenant[i];

        if (item < 0 || c->heat[item] < heat || hx_store_is_coming(s, i))
            continue;
        while (to < first && (hx_store_is_coming(s, to) ||
                              (c->tenant[to] >= 0 && c->heat[c->tenant[to]] >= below)))
            to++;
        if (to == first)
            break;
        if (c->tenant[to] >= 0 &&
            (rc = hx_store_announce(s, c->tenant[to], -1, err)) != 0)
            return rc;
        hx_clock_clear(c, i);
        hx_clock_put(c, item, to);
        if ((rc = hx_dev_copy(s->dev, hx_store_slot(s, to), hx_store_slot(s, i),
                              s->record_bytes, err)) != 0 ||
            (rc = hx_store_announce(s, item, to, err)) != 0)
            return rc;
    }
    return 0;
}

/* Slots before first get those picked most of all tenants. */
static int keep_hottest(hx_store *s, int32_t first, hx_err *err)
{
    const int heat = heat_of_most(&s->clock, first);
    int rc;

    if ((rc = change(s, first, heat + 1, heat, err)) != 0 ||
        (rc = change(s, first, heat + 1, heat + 1, err)) != 0)
        return rc;
    return change(s, first, heat, heat, err);
}

/* Slots from first on lose their tenants. Nobody may be evicted while slots are lent: a layer
 * on its way may count on any resident. */
static int lend_from(hx_store *s, int32_t first, hx_err *err)
{
    struct hx_lend *l = s->lend;
    uint64_t pushes;
    int rc;

    if (first >= s->clock.n_slot)
        return 0;
    if ((rc = keep_hottest(s, first, err)) != 0)
        return rc;
    for (int32_t i = first; i < s->clock.n_slot; i++) {
        const int32_t item = s->clock.tenant[i];

        hx_clock_clear(&s->clock, i);
        if (item >= 0 && (rc = hx_store_announce(s, item, -1, err)) != 0)
            return rc;
    }
    s->clock.n_slot = first;
    s->clock.hand = 0;
    hx_store_drop_moves(s, first);
    forget_parts(l);
    if ((rc = hx_dev_push_mark(s->dev, &pushes, err)) != 0)
        return rc;
    return hx_dev_await_push(s->dev, pushes, err);
}

void hx_store_keep_lent(hx_store *s, bool keep)
{
    if (s->lend != NULL)
        s->lend->keep = keep;
}

/* The last rows' picks of a call go to the host. Those of a synthetic model's prompt are its
 * random router's and say nothing of what is drawn for decode. */
static int tell_picks(hx_store *s, int64_t layer, const hx_moe_args *moe, hx_err *err)
{
    struct hx_lend *l = s->lend;
    const int64_t n = HX_MIN(moe->rows, TOLD_ROWS) * s->n_active,
                  first = moe->rows * s->n_active - n;
    const size_t row = TOLD_ROWS * (size_t)s->n_active * sizeof(int32_t);

    if (s->model->share != NULL)
        return 0;
    l->n_told[layer] = n;
    return hx_dev_bring(s->dev, (char *)l->told.p + (size_t)layer * row,
                        hx_buf_at(moe->id, (size_t)first * sizeof(int32_t)),
                        (size_t)n * sizeof(int32_t), err);
}

/* What the prompt picked counts for who lives in the slots that it gives back. */
static void count_told(hx_store *s)
{
    struct hx_lend *l = s->lend;
    const int32_t *id = l->told.p;

    for (int64_t i = 0; i < s->n_layer; i++, id += TOLD_ROWS * s->n_active) {
        for (int64_t p = 0; p < l->n_told[i]; p++)
            if (id[p] >= 0 && id[p] < s->n_expert) /* they may just be coming */
                hx_clock_touch(&s->clock, i * s->n_expert + id[p]);
        l->n_told[i] = 0;
    }
}

/* The expert picked most of those that have no slot; -1: all have one. */
static int64_t hottest(const hx_store *s)
{
    const hx_clock *c = &s->clock;
    int64_t best = -1;

    for (int64_t i = 0; i < c->n_item; i++)
        if (s->home[i] != NULL && c->slot[i] < 0 &&
            (best < 0 || c->heat[i] > c->heat[best]))
            best = i;
    return best;
}

int hx_lend_end(hx_store *s, hx_err *err)
{
    struct hx_lend *l = s->lend;
    int64_t item;
    int rc;

    if (l == NULL || (hx_lend_is_on(s) && l->keep))
        return 0;
    if (hx_lend_is_on(s)) {
        forget_parts(l);
        l->at = -1;
        l->next = s->clock.n_slot;
        s->clock.n_slot = s->n_all_slot;
        count_told(s);
        if ((rc = hx_dev_hold_push(s->dev, err)) != 0)
            return rc;
    }
    for (; l->next < s->n_all_slot && s->n_move < HX_MOVE_MAX; l->next++)
        if (s->clock.tenant[l->next] < 0 && (item = hottest(s)) >= 0 &&
            (rc = hx_store_move_in(s, item, l->next, err)) != 0)
            return rc;
    return 0;
}

/* ---- a layer's experts ----------------------------------------------------------------- */

static int64_t layer_of(const hx_store *s, int64_t part)
{
    return part / s->lend->n_part;
}

static int64_t first_of(const hx_store *s, int64_t part)
{
    return part % s->lend->n_part * s->lend->n_in_part;
}

static int64_t end_of(const hx_store *s, int64_t part)
{
    return HX_MIN(first_of(s, part) + s->lend->n_in_part, s->n_expert);
}

/* Starts bringing a part to its place: the experts before end that are not on their way
 * yet. Runs of neighbours go as one push. */
static int stage_experts(hx_store *s, struct hx_stage *h, int64_t end, hx_err *err)
{
    const int64_t item0 = layer_of(s, h->part) * s->n_expert;
    const int32_t slot0 = h->slot0 - (int32_t)first_of(s, h->part); /* of expert 0 */
    int64_t run = 0; /* experts before h->begun that wait to go together */
    int rc;

    for (; h->begun <= end; h->begun++) {
        const int64_t e = h->begun;
        const int32_t slot = e == end ? 0 : s->clock.slot[item0 + e];
        const uint8_t *home = e == end ? NULL : s->home[item0 + e];

        if (run > 0 &&
            (e == end || slot >= 0 || home != s->home[item0 + e - 1] + s->record_bytes)) {
            const hx_buf to = hx_store_slot(s, slot0 + (int32_t)(e - run));
            const size_t bytes = (size_t)run * s->record_bytes;

            s->stats.stage_bytes += bytes;
            if ((rc = hx_store_push(s, to, s->home[item0 + e - run], bytes, err)) != 0)
                return rc;
            run = 0;
        }
        if (e == end)
            break;
        h->row[e] = hx_store_lease(s, item0 + e, slot >= 0 ? slot : slot0 + (int32_t)e);
        run += slot < 0;
    }
    if (end < end_of(s, h->part))
        return 0;
    if ((rc = hx_dev_push(s->dev, h->at, h->row, h->at.n, err)) != 0)
        return rc;
    return hx_dev_push_mark(s->dev, &h->ticket, err);
}

static int stage_rest(hx_store *s, struct hx_stage *h, hx_err *err)
{
    return h->part < 0 || h->begun == end_of(s, h->part)
               ? 0
               : stage_experts(s, h, end_of(s, h->part), err);
}

/* A part gets a place, after all operations so far. */
static int stage_part(hx_store *s, struct hx_stage *h, int64_t part, int64_t end,
                      hx_err *err)
{
    const int rc = hx_dev_hold_push(s->dev, err);

    if (rc != 0)
        return rc;
    while (h->ticket != 0 && !hx_dev_pushed(s->dev, h->ticket))
        sched_yield(); /* its table is still being read */
    h->part = part;
    h->begun = first_of(s, part);
    return stage_experts(s, h, end, err);
}

static struct hx_stage *place_of(struct hx_lend *l, int64_t part)
{
    for (int64_t i = 0; i < l->n_stage; i++)
        if (l->stage[i].part == part)
            return &l->stage[i];
    return NULL;
}

/* Parts in the order in which they are worked with, and of the last one the experts before
 * end. */
typedef struct {
    int64_t part[HX_LEND_PARTS + 1], n, end;
} parts;

/* Those that have no place yet get that of a part which is not among them. There is one: they
 * are as many as places at most. */
static int stage_all(hx_store *s, const parts *p, hx_err *err)
{
    struct hx_lend *l = s->lend;
    int rc = 0;

    for (int64_t i = 0; rc == 0 && i < p->n; i++) {
        struct hx_stage *h = place_of(l, p->part[i]);

        for (int64_t k = 0; h == NULL; k++) {
            int64_t of = 0;

            while (of < p->n && p->part[of] != l->stage[k].part)
                of++;
            if (of < p->n)
                continue;
            h = &l->stage[k];
            rc = stage_part(s, h, p->part[i],
                            i == p->n - 1 ? p->end : end_of(s, p->part[i]), err);
        }
        if (rc == 0 && (i < p->n - 1 || p->end == end_of(s, p->part[i])))
            rc = stage_rest(s, h, err);
    }
    return rc;
}

int hx_store_stage(hx_store *s, hx_err *err)
{
    const struct hx_lend *l = s->lend;
    parts p = { .n = 0 };

    if (l == NULL || l->at < 0)
        return 0;
    do
        p.part[p.n] = l->at + p.n;
    while (++p.n < l->n_stage && (l->at + p.n) % l->n_part != 0);
    p.end = end_of(s, p.part[p.n - 1]);
    return stage_all(s, &p, err);
}

int hx_store_lend(hx_store *s, uint64_t bytes, hx_buf *out, hx_err *err)
{
    struct hx_lend *l = s->lend;
    const int32_t first =
        l->stage[0].slot0 - (int32_t)((bytes + s->record_bytes - 1) / s->record_bytes);
    int rc;

    hx_assert(bytes <= hx_store_lendable(s, l->n_part, l->n_stage));
    *out = hx_store_slot(s, first);
    out->n = bytes;
    l->keep = true;
    if ((rc = lend_from(s, first, err)) != 0)
        return rc;
    l->at = next_moe(s, -1) * l->n_part;
    return hx_store_stage(s, err); /* layers before it run meanwhile */
}

/* What is worked with after a part of the layer or of the next one; -1: not known. */
static int64_t part_after(const hx_store *s, const hx_store_call *c, int64_t part)
{
    const int64_t n = s->lend->n_part, layer = next_moe(s, c->layer);

    if ((part + 1) % n != 0)
        return part + 1;
    if (part / n != c->layer)
        return -1;
    if (n > 1 && !c->last)
        return c->layer * n;
    return layer >= 0 ? layer * n : -1;
}

/* A part, and what has a place beside it: of the next layer half at most. */
static parts parts_from(const hx_store *s, const hx_store_call *c, int64_t part)
{
    const struct hx_lend *l = s->lend;
    parts p = { .n = 0 };
    int64_t w = part, ahead = 0;

    do {
        p.part[p.n++] = w;
        w = part_after(s, c, w);
        ahead += w >= 0 && layer_of(s, w) != c->layer;
    } while (p.n < l->n_stage && w >= 0 && w != part &&
             ahead <= HX_MAX(l->n_part / 2, 1));
    w = p.part[p.n - 1];
    p.end = l->n_part == 1 && p.n > 1 ? s->n_expert / 2 : end_of(s, w);
    return p;
}

int hx_store_prefill(hx_store *s, const hx_store_call *c, hx_moe_args *moe, hx_err *err)
{
    struct hx_lend *l = s->lend;
    int64_t part;
    parts p;
    int rc;

    moe->at = hx_store_row(s, s->at, c->layer, sizeof(hx_lease));
    /* With two picks for each expert, most are needed: all come. */
    if (l == NULL || c->rows * s->n_active < 2 * s->n_expert)
        return 0;
    part = c->layer * l->n_part + moe->end / l->n_in_part;
    p = parts_from(s, c, part);
    if ((rc = lend_from(s, l->stage[0].slot0, err)) != 0 ||
        (rc = stage_all(s, &p, err)) != 0 ||
        (moe->end == 0 && (rc = tell_picks(s, c->layer, moe, err)) != 0))
        return rc;
    l->at = part_after(s, c, part);
    moe->at = place_of(l, part)->at;
    moe->first = first_of(s, part);
    moe->end = end_of(s, part);
    return hx_dev_await_push(s->dev, place_of(l, part)->ticket, err);
}

/* ---- open and close --------------------------------------------------------------------- */

int hx_lend_open(hx_store *s, uint64_t n_expert, hx_err *err)
{
    const size_t bytes = (size_t)s->n_expert * sizeof(hx_lease);
    struct hx_lend *l;
    int64_t n_part = 1;
    int rc;

    if ((uint64_t)s->n_all_slot == n_expert)
        return 0;
    s->lend = l = hx_new(struct hx_lend, 1);
    if (l == NULL || (l->n_told = hx_new(int64_t, s->n_layer)) == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: no memory");
    if (hx_store_lendable(s, n_part, 2) == 0)
        n_part = HX_LEND_PARTS;
    if (hx_store_lendable(s, n_part, 2) == 0) { /* too few slots */
        hx_lend_close(s);
        return 0;
    }
    hx_store_cut(s, n_part, 2);
    l->at = -1;
    l->next = s->n_all_slot;
    if ((rc = hx_dev_shared(
             s->dev, &l->told,
             (size_t)(s->n_layer * TOLD_ROWS * s->n_active) * sizeof(int32_t), err)) != 0)
        return rc;
    for (size_t i = 0; i < HX_LEN(l->stage); i++) {
        struct hx_stage *h = &l->stage[i];

        h->part = -1;
        if ((rc = hx_dev_alloc(s->dev, &h->at, bytes, err)) != 0 ||
            (rc = hx_dev_shared(s->dev, &h->shared, bytes, err)) != 0)
            return rc;
        h->row = h->shared.p;
    }
    return 0;
}

void hx_lend_close(hx_store *s)
{
    struct hx_lend *l = s->lend;

    for (size_t i = 0; l != NULL && i < HX_LEN(l->stage); i++) {
        hx_dev_free(s->dev, &l->stage[i].at);
        hx_dev_unshared(s->dev, &l->stage[i].shared);
    }
    if (l != NULL) {
        hx_dev_unshared(s->dev, &l->told);
        hx_free(l->n_told);
    }
    hx_free(l);
    s->lend = NULL;
}
