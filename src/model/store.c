/* store.c - the expert store: records in host memory, slots in device memory, the lane,
 * and what moves between them. See store.h. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "dev/lane.h"
#include "model/model.h"
#include "model/store.h"

#define PART_ALIGN 256
#define PARTS      9 /* of a record: w, suh (or scale), svh (or bias) of three matrices */
#define PIN_BYTES  ((size_t)1 << 30)

/* A push on its way: the tenant is announced once it has arrived. */
struct hx_move {
    int64_t item;
    int32_t slot;
    uint64_t ticket;
};

struct hx_moved {
    const char *from, *to;
};

/* ---- records -------------------------------------------------------------- */

typedef struct {
    const void *from[PARTS];
    size_t at[PARTS], bytes[PARTS], total;
} record;

static size_t trellis_bytes(const hx_mat *m)
{
    static const size_t elem[HX_N_FMT] = {
        [HX_FMT_F32] = 4, [HX_FMT_F16] = 2, [HX_FMT_BF16] = 2, [HX_FMT_FP8] = 1
    };

    return m->fmt == HX_FMT_EXL3 ? (size_t)(m->n_pad * m->k_pad) / 16 * (size_t)m->k2
                                 : (size_t)(m->n * m->k) * elem[m->fmt];
}

/* Where the parts of an expert lie in its record. */
static record record_of(const hx_expert *e)
{
    const hx_mat *mat[3] = { &e->gate, &e->up, &e->down };
    record r = { 0 };

    for (int i = 0; i < 3; i++) {
        const hx_mat *m = mat[i];
        const bool exl3 = m->fmt == HX_FMT_EXL3;
        const size_t grid = m->fmt == HX_FMT_FP8
                                ? (size_t)((m->n + m->block_n - 1) / m->block_n) *
                                      (size_t)((m->k + m->block_k - 1) / m->block_k) *
                                      sizeof(float)
                                : 0;
        const void *from[3] = { m->w, exl3 ? m->suh : m->scale, exl3 ? m->svh : m->bias };
        const size_t bytes[3] = { trellis_bytes(m), exl3 ? (size_t)m->k_pad * 2 : grid,
                                  exl3              ? (size_t)m->n_pad * 2
                                  : m->bias != NULL ? (size_t)m->n * 2
                                                    : 0 };

        for (int p = 0; p < 3; p++) {
            r.from[3 * i + p] = from[p];
            r.bytes[3 * i + p] = bytes[p];
            r.at[3 * i + p] = r.total;
            r.total += (bytes[p] + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
        }
    }
    return r;
}

/* The addresses of a record's parts when it lies at base. */
static hx_lease lease_at(const record *r, const void *base)
{
    const void *p[PARTS];

    for (int i = 0; i < PARTS; i++)
        p[i] = r->bytes[i] != 0 ? (const char *)base + r->at[i] : NULL;
    return (
        hx_lease) { { p[0], p[1], p[2] }, { p[3], p[4], p[5] }, { p[6], p[7], p[8] } };
}

static bool is_record(const record *r)
{
    for (int i = 0; i < PARTS; i++)
        if (r->bytes[i] != 0 && r->from[i] != (const char *)r->from[0] + r->at[i])
            return false;
    return true;
}

static const hx_expert *expert_at(const hx_model *m, int64_t item)
{
    const hx_layer *l = &m->layer[item / m->desc.n_expert];

    return l->expert != NULL ? &l->expert[item % m->desc.n_expert] : NULL;
}

uint64_t hx_store_bytes(const hx_model *m, size_t *record_bytes)
{
    uint64_t n = 0;

    *record_bytes = 0;
    for (int64_t i = 0; i < m->desc.n_layer * m->desc.n_expert; i++) {
        const hx_expert *e = expert_at(m, i);

        if (e == NULL)
            continue;
        *record_bytes = HX_MAX(*record_bytes, record_of(e).total);
        n++;
    }
    return n * *record_bytes;
}

/* ---- host memory ------------------------------------------------------------ */

typedef struct {
    hx_store *s;
    _Atomic int rc;
    hx_err err;
    const uint8_t *base; /* of all records */
    size_t bytes;
    bool evict; /* checkpoint and records do not fit together: the copied part goes first,
                 * or the system would throw out what is next */
} host_job;

/* Into the arena, and out of where they were; records that begin in the n bytes at from. */
static void copy_records(const host_job *j, const uint8_t *from, size_t n)
{
    const hx_store *s = j->s;

    for (int64_t i = 0; i < s->n_layer * s->n_expert; i++) {
        if (s->home[i] == NULL || s->home[i] < from || s->home[i] >= from + n)
            continue;
        const record r = record_of(expert_at(s->model, i));
        uint8_t *to = (uint8_t *)(uintptr_t)s->home[i];
        for (int p = 0; p < PARTS; p++)
            if (r.bytes[p] != 0) {
                memcpy(to + r.at[p], r.from[p], r.bytes[p]);
                hx_model_drop(s->model, r.from[p], r.bytes[p], j->evict);
            }
    }
}

static int by_from(const void *a, const void *b)
{
    const struct hx_moved *x = a, *y = b;

    return (x->from > y->from) - (x->from < y->from);
}

/* What copy_records() copies, for who asks later. */
static int note_moves(hx_store *s, int64_t n_record, hx_err *err)
{
    s->moved = hx_new(struct hx_moved, n_record * PARTS);
    if (s->moved == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: no memory");
    for (int64_t i = 0; i < s->n_layer * s->n_expert; i++) {
        if (s->home[i] == NULL)
            continue;
        const record r = record_of(expert_at(s->model, i));
        for (int p = 0; p < PARTS; p++)
            if (r.bytes[p] != 0)
                s->moved[s->n_moved++] =
                    (struct hx_moved) { r.from[p], (const char *)s->home[i] + r.at[p] };
    }
    qsort(s->moved, (size_t)s->n_moved, sizeof *s->moved, by_from);
    return 0;
}

const void *hx_store_where(const hx_store *s, const void *from)
{
    const struct hx_moved key = { .from = from },
                          *m = s->n_moved == 0
                                   ? NULL
                                   : bsearch(&key, s->moved, (size_t)s->n_moved,
                                             sizeof key, by_from);

    return m != NULL ? m->to : NULL;
}

static void point_to(hx_expert *e, const hx_lease *at)
{
    hx_mat *mat[3] = { &e->gate, &e->up, &e->down };
    const hx_lease_mat *from[3] = { &at->gate, &at->up, &at->down };

    for (int i = 0; i < 3; i++) {
        mat[i]->w = from[i]->trellis;
        if (mat[i]->fmt == HX_FMT_EXL3) {
            mat[i]->suh = from[i]->suh;
            mat[i]->svh = from[i]->svh;
        } else {
            mat[i]->scale = from[i]->suh;
            mat[i]->bias = from[i]->svh;
        }
    }
}

/* Records where the checkpoint has none: places for them in an arena. any: even if there
 * seems to be no memory for it. */
static int gather(hx_store *s, bool any, hx_err *err)
{
    const int64_t n = s->n_layer * s->n_expert;
    const uint64_t left = hx_sys_mem_free_bytes();
    bool all = true;
    int64_t count = 0;

    for (int64_t i = 0; i < n; i++) {
        const hx_expert *e = expert_at(s->model, i);

        if (e == NULL)
            continue;
        const record r = record_of(e);
        all = all && is_record(&r);
        s->home[i] = r.from[0];
        count++;
    }
    if (all)
        return 0;
    s->arena_bytes = (size_t)count * s->record_bytes;
    if (s->arena_bytes > left && !any)
        return hx_fail(
            err, HX_ENOMEM,
            "host memory: the routed experts need %.1f GiB, %.1f of %.1f GiB are "
            "available; end what else uses it, use a machine with more, or say "
            "--ram %.0fGiB to try anyway",
            (double)s->arena_bytes / (1 << 30), (double)left / (1 << 30),
            (double)hx_sys_mem_bytes() / (1 << 30),
            ceil((double)s->arena_bytes / (1 << 30)));
    if ((s->arena = hx_map(s->arena_bytes, true)) == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: the system refuses %.1f GiB",
                       (double)s->arena_bytes / (1 << 30));
    count = 0;
    for (int64_t i = 0; i < n; i++)
        if (s->home[i] != NULL)
            s->home[i] = (uint8_t *)s->arena + (size_t)count++ * s->record_bytes;
    return note_moves(s, count, err);
}

/* Copies what the arena gets and locks it: while some ranges are locked, others are copied. */
static void fill_ranges(void *ud, int64_t begin, int64_t end, int worker)
{
    host_job *j = ud;
    hx_store *s = j->s;

    (void)worker;
    for (int64_t i = begin; i < end && atomic_load(&j->rc) == 0; i++) {
        const uint8_t *p = j->base + (size_t)i * PIN_BYTES;
        const size_t n = HX_MIN(PIN_BYTES, j->bytes - (size_t)i * PIN_BYTES);
        hx_err err = { 0 };
        int none = 0, rc;

        if (s->arena != NULL)
            copy_records(j, p, n);
        if (hx_dev_is_host(s->dev))
            continue;
        if ((rc = hx_dev_pin(s->dev, (void *)(uintptr_t)p, n, &err)) == 0)
            s->pin[i] = (void *)(uintptr_t)p;
        else if (atomic_compare_exchange_strong(&j->rc, &none, rc))
            j->err = err;
    }
}

/* Fills the arena, if there is one, and points the model there; locks all records. */
static int fill(hx_store *s, hx_pool *pool, hx_err *err)
{
    const hx_weights *w = s->model->weights;
    const uint64_t ram = hx_sys_mem_bytes();
    const uint8_t *low = NULL, *high = NULL;
    int n_locked = 0;

    for (int64_t i = 0; i < s->n_layer * s->n_expert; i++)
        if (s->home[i] != NULL) {
            low = low == NULL || s->home[i] < low ? s->home[i] : low;
            high = HX_MAX(high, s->home[i] + s->record_bytes);
        }
    host_job j = { .s = s };
    j.base = (const uint8_t *)((uintptr_t)low & ~(uintptr_t)4095);
    j.bytes = (size_t)(high - j.base);
    j.evict = w != NULL && hx_weights_bytes(w) + s->arena_bytes > ram - ram / 16;
    const int64_t n = (int64_t)((j.bytes + PIN_BYTES - 1) / PIN_BYTES);
    s->n_pin = hx_dev_is_host(s->dev) ? 0 : (int)n;
    if ((s->pin = hx_new(void *, HX_MAX(s->n_pin, 1))) == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: no memory");
    hx_pool_run(pool, n, 1, fill_ranges, &j);
    for (int i = 0; i < s->n_pin; i++)
        n_locked += s->pin[i] != NULL;
    if (j.rc != 0)
        return hx_fail(err, j.rc, "experts: %d of %.1f GiB are locked; %.200s", n_locked,
                       (double)j.bytes / (1 << 30), j.err.msg);
    for (int64_t i = 0; i < s->n_layer * s->n_expert && s->arena != NULL; i++)
        if (s->home[i] != NULL) {
            hx_expert *e = &s->model->layer[i / s->n_expert].expert[i % s->n_expert];
            const record r = record_of(e);
            const hx_lease at = lease_at(&r, s->home[i]);

            point_to(e, &at);
        }
    return 0;
}

/* ---- tables ------------------------------------------------------------------- */

hx_buf hx_store_slot(const hx_store *s, int32_t slot)
{
    return hx_buf_at(s->slots, (size_t)slot * s->record_bytes);
}

hx_buf hx_store_row(const hx_store *s, hx_buf b, int64_t layer, size_t item)
{
    return (hx_buf) { (char *)b.p + (size_t)(layer * s->n_expert) * item,
                      (size_t)s->n_expert * item };
}

hx_lease hx_store_lease(const hx_store *s, int64_t item, int32_t slot)
{
    const record r = record_of(expert_at(s->model, item));

    return lease_at(&r, slot >= 0 ? hx_store_slot(s, slot).p : s->home[item]);
}

int hx_store_announce(hx_store *s, int64_t item, int32_t slot, hx_err *err)
{
    const hx_lease at = hx_store_lease(s, item, slot);
    const size_t i = (size_t)item;
    int rc;

    if ((rc = hx_dev_put(s->dev, hx_buf_at(s->at, i * sizeof at), &at, sizeof at, err)) !=
        0)
        return rc;
    return hx_dev_put(s->dev, hx_buf_at(s->resident, i * sizeof slot), &slot, sizeof slot,
                      err);
}

/* Nothing is resident yet. */
static int first_tables(hx_store *s, hx_err *err)
{
    const int64_t n = s->n_layer * s->n_expert;
    hx_lease *at = hx_new(hx_lease, n);
    int32_t *none = hx_new(int32_t, n);
    int rc = at == NULL || none == NULL
                 ? hx_fail(err, HX_ENOMEM, "expert store: no memory")
                 : 0;

    for (int64_t i = 0; i < n && rc == 0; i++) {
        none[i] = -1;
        if (s->home[i] == NULL)
            continue;
        at[i] = hx_store_lease(s, i, -1);
    }
    if (rc == 0 && (rc = hx_dev_put(s->dev, s->at, at, (size_t)n * sizeof *at, err)) == 0)
        rc = hx_dev_put(s->dev, s->resident, none, (size_t)n * sizeof *none, err);
    if (rc == 0)
        rc = hx_dev_get(s->dev, none, s->resident, sizeof *none, err); /* at is free */
    hx_free(at);
    hx_free(none);
    return rc;
}

/* ---- moving --------------------------------------------------------------------- */

/* Pushes that have arrived become residents. */
static int settle(hx_store *s, hx_err *err)
{
    while (s->n_move > 0 && hx_dev_pushed(s->dev, s->move[0].ticket)) {
        const struct hx_move m = s->move[0];

        memmove(s->move, s->move + 1, (size_t)--s->n_move * sizeof *s->move);
        if (s->clock.slot[m.item] != m.slot)
            continue; /* somebody else has the slot by now */
        const int rc = hx_store_announce(s, m.item, m.slot, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

bool hx_store_is_coming(const hx_store *s, int32_t slot)
{
    for (int i = 0; i < s->n_move; i++)
        if (s->move[i].slot == slot)
            return true;
    return false;
}

void hx_store_drop_moves(hx_store *s, int32_t first)
{
    int n = 0;

    for (int i = 0; i < s->n_move; i++)
        if (s->move[i].slot < first)
            s->move[n++] = s->move[i];
    s->n_move = n;
}

/* Cut where two locked ranges meet: no copy may cross that. */
int hx_store_push(hx_store *s, hx_buf to, const uint8_t *from, size_t bytes, hx_err *err)
{
    while (bytes > 0) {
        const size_t into =
            s->n_pin > 0 ? (size_t)(from - (const uint8_t *)s->pin[0]) % PIN_BYTES : 0;
        const size_t n = s->n_pin > 0 ? HX_MIN(bytes, PIN_BYTES - into) : bytes;
        const int rc = hx_dev_push(s->dev, to, from, n, err);

        if (rc != 0)
            return rc;
        to = hx_buf_at(to, n);
        from += n;
        bytes -= n;
    }
    return 0;
}

int hx_store_move_in(hx_store *s, int64_t item, int32_t slot, hx_err *err)
{
    const int64_t was = hx_clock_put(&s->clock, item, slot);
    struct hx_move m = { item, slot, 0 };
    int rc;

    s->stats.pushed++;
    hx_count(HX_C_experts_moved_total, 1);
    s->stats.push_bytes += s->record_bytes;
    if (was >= 0) {
        s->stats.evicted++;
        hx_count(HX_C_experts_evicted_total, 1);
        if ((rc = hx_store_announce(s, was, -1, err)) != 0 ||
            (rc = hx_dev_hold_push(s->dev, err)) != 0)
            return rc;
    }
    if ((rc = hx_store_push(s, hx_store_slot(s, slot), s->home[item], s->record_bytes,
                            err)) != 0 ||
        (rc = hx_dev_push_mark(s->dev, &m.ticket, err)) != 0)
        return rc;
    s->move[s->n_move++] = m;
    return 0;
}

/* Slots that nobody has yet are filled layer by layer in turn, so that no layer starts
 * with nothing. */
static int warm(hx_store *s, hx_err *err)
{
    const int64_t moe = s->n_layer, e = s->n_expert;
    int32_t slot = 0;
    int rc;

    for (int64_t i = 0; i < moe * e && slot < s->clock.n_slot; i++) {
        const int64_t item = i % moe * e + i / moe;

        if (s->home[item] == NULL)
            continue;
        if (s->n_move == HX_MOVE_MAX) {
            if ((rc = hx_dev_await_push(s->dev, s->move[0].ticket, err)) != 0 ||
                (rc = hx_dev_get(s->dev, &(int32_t) { 0 }, s->resident, 4, err)) != 0 ||
                (rc = settle(s, err)) != 0)
                return rc;
        }
        if ((rc = hx_store_move_in(s, item, slot++, err)) != 0)
            return rc;
    }
    for (int i = 0; i < s->n_move; i++)
        if ((rc = hx_dev_await_push(s->dev, s->move[i].ticket, err)) != 0)
            return rc;
    if ((rc = hx_dev_get(s->dev, &(int32_t) { 0 }, s->resident, 4, err)) != 0)
        return rc;
    rc = settle(s, err);
    s->stats = (hx_experts) { 0 };
    return rc;
}

/* ---- decode ---------------------------------------------------------------------------- */

int hx_store_plan(hx_store *s, int64_t layer, int64_t rows, hx_buf id, hx_buf x,
                  hx_moe_args *moe, hx_combine_args *combine, hx_err *err)
{
    const size_t log = (size_t)(layer * s->max_pick) * sizeof(int32_t);
    const hx_plan_args a = { .here = s->here,
                             .there = s->there,
                             .log = hx_buf_at(s->log, log),
                             .id = id,
                             .x = x,
                             .resident =
                                 hx_store_row(s, s->resident, layer, sizeof(int32_t)),
                             .lane = s->lane,
                             .ahead = s->ahead.to.slots.p != NULL ? &s->ahead.to : NULL,
                             .fetched = s->ahead.layer == layer,
                             .learn = s->learn && s->lane != NULL,
                             .at = hx_store_row(s, s->at, layer, sizeof(hx_lease)),
                             .rows = rows,
                             .active = s->n_active,
                             .n_expert = s->n_expert,
                             .dim = s->model->desc.width,
                             .layer = (int32_t)layer,
                             .rates = s->rates };

    moe->at = hx_store_row(s, s->at, layer, sizeof(hx_lease));
    moe->id = s->here;
    if (s->lane != NULL) {
        combine->there = s->there;
        combine->lane = s->lane;
    }
    return hx_op_plan(s->dev, &a, err);
}

void hx_store_begin(hx_store *s)
{
    if (s->lane != NULL)
        hx_lane_awake(s->lane);
}

int hx_store_sent(hx_store *s, hx_err *err)
{
    const hx_buf to = s->told[s->n_sent++ % 2];

    return hx_dev_bring(s->dev, to.p, s->log, to.n, err);
}

/* Counts a layer's picks, as plan logged them; each distinct expert once. Wanted gets those
 * that were missing. */
static void count_layer(hx_store *s, int64_t layer, const int32_t *log, int64_t picks,
                        int64_t *wanted, int64_t *n_wanted)
{
    int64_t *const by_side[] = { &s->stats.here, &s->stats.link, &s->stats.lane,
                                 &s->stats.ahead };
    static const hx_counter counter[] = { HX_C_experts_here_total,
                                          HX_C_experts_link_total,
                                          HX_C_experts_lane_total,
                                          HX_C_experts_ahead_total };

    s->stats.picks += picks;
    for (int64_t p = 0; p < picks; p++) {
        const int32_t id = log[p] & 0xFFFFFF, side = log[p] >> 24;
        const int64_t item = layer * s->n_expert + id;
        bool again = false;

        for (int64_t o = 0; o < p && !again; o++)
            again = (log[o] & 0xFFFFFF) == id;
        if (again || id >= s->n_expert || side > HX_SIDE_AHEAD)
            continue;
        ++*by_side[side];
        hx_count(counter[side], 1);
        hx_clock_touch(&s->clock, item);
        if (s->clock.slot[item] < 0 && *n_wanted < HX_MOVE_MAX)
            wanted[(*n_wanted)++] = item;
    }
}

/* ---- the trace --------------------------------------------------------------- */

static int open_trace(hx_store *s, const char *path, hx_err *err)
{
    hx_trace_shape *t = &s->trace_shape;

    if (path == NULL)
        return 0;
    *t = (hx_trace_shape) { s->n_layer, s->n_expert, s->n_active, 0,
                            hx_new(int32_t, s->n_layer) };
    if (t->moe == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: no memory");
    for (int64_t l = 0; l < s->n_layer; l++)
        if (s->model->layer[l].ffn == HX_FFN_MOE)
            t->moe[t->n_moe++] = (int32_t)l;
    return hx_trace_begin(&s->trace, path, t, err);
}

/* A trace that cannot be written ends; the model goes on. */
static void trace_step(hx_store *s, const int32_t *log, int64_t rows)
{
    hx_err err;

    if (s->trace == NULL ||
        hx_trace_step(s->trace, &s->trace_shape, log, s->max_pick, rows, &err) == 0)
        return;
    hx_log(HX_LOG_WARN, "%s; it ends here", err.msg);
    fclose(s->trace);
    s->trace = NULL;
}

/* ---- after a decode step -------------------------------------------------------- */

/* Newcomers of a step: many while slots are free, few afterwards. */
static int admit(hx_store *s, const int64_t *wanted, int64_t n, hx_err *err)
{
    int64_t left = HX_CLOCK_MOVES;

    for (int64_t i = 0; i < n && s->n_move < HX_MOVE_MAX && left > 0; i++) {
        const bool came = s->clock.slot[wanted[i]] >= 0; /* back from a lent slot */
        const int32_t slot =
            s->clock.n_slot > 0 && !came ? hx_clock_find(&s->clock, wanted[i]) : -1;

        if (slot < 0)
            continue;
        left -= s->clock.tenant[slot] >= 0;
        const int rc = hx_store_move_in(s, wanted[i], slot, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

int hx_store_end(hx_store *s, int64_t rows, hx_err *err)
{
    const int32_t *log = s->told[s->n_ended % 2].p; /* [n_layer, max_pick] */
    int64_t wanted[HX_MOVE_MAX], n = 0;
    int rc;

    s->n_ended += s->n_ended < s->n_sent; /* one that failed may not have been sent */
    if (s->lane != NULL)
        hx_lane_rest(s->lane);
    if (s->lane != NULL && (rc = hx_lane_late(s->lane, err)) != 0)
        return rc;
    trace_step(s, log, rows);
    for (int64_t i = 0; i < s->n_layer; i++) { /* each layer is first now and then */
        const int64_t l = (i + s->stats.steps) % s->n_layer;

        if (s->model->layer[l].ffn == HX_FFN_MOE)
            count_layer(s, l, log + l * s->max_pick, rows * s->n_active, wanted, &n);
    }
    s->stats.steps++;
    if ((rc = settle(s, err)) != 0 || (rc = hx_lend_end(s, err)) != 0 || hx_lend_is_on(s))
        return rc;
    return admit(s, wanted, n, err);
}

void hx_store_report(const hx_store *s, hx_experts *out)
{
    const hx_rates *r = &s->rates;

    *out = s->stats;
    out->n_slot = s->n_all_slot;
    out->n_expert = s->n_moe * (int32_t)s->n_expert;
    out->expert_bytes = s->record_bytes;
    if (s->lane != NULL)
        hx_lane_report(s->lane, out);
    hx_ahead_report(s, out);
    out->us[0] = (double)r->here_us;
    out->us[1] = (double)r->link_us;
    out->us[2] = (double)r->lane_us;
    out->us[3] = (double)r->row_us;
    out->us[4] = (double)r->post_us;
    out->host_gbs = s->host_gbs;
    out->copy_gbs = s->copy_gbs;
    out->rest_bytes = s->rest_bytes;
}

/* ---- open and close ------------------------------------------------------------------ */

static int check(const hx_store *s, const hx_store_opt *opt, uint64_t bytes, hx_err *err)
{
    const uint64_t most = opt->ram_bytes != 0 ? opt->ram_bytes : hx_sys_mem_bytes();

    if (bytes > most)
        return hx_fail(
            err, HX_ENOMEM,
            "host memory: the routed experts need %.1f GiB, this process may use "
            "%.1f GiB; raise --ram, or use a machine with more memory",
            (double)bytes / (1 << 30), (double)most / (1 << 30));
    if (s->n_expert > HX_PLAN_MAX_EXPERT)
        return hx_fail(err, HX_EUNSUP, "expert store: %lld experts a layer, at most %d",
                       (long long)s->n_expert, HX_PLAN_MAX_EXPERT);
    return 0;
}

static int open_buffers(hx_store *s, hx_err *err)
{
    const size_t n = (size_t)(s->n_layer * s->n_expert), picks = (size_t)s->max_pick * 4;
    const struct {
        hx_buf *b;
        size_t bytes;
    } want[] = {
        { &s->slots, (size_t)s->n_all_slot * s->record_bytes },
        { &s->resident, n * sizeof(int32_t) },
        { &s->at, n * sizeof(hx_lease) },
        { &s->here, picks },
        { &s->there, picks },
        { &s->log, (size_t)s->n_layer * picks },
    };
    int rc;

    for (size_t i = 0; i < HX_LEN(want); i++)
        if ((rc = hx_dev_alloc(s->dev, want[i].b, HX_MAX(want[i].bytes, 64), err)) != 0)
            return rc;
    for (int i = 0; i < 2; i++)
        if ((rc = hx_dev_shared(s->dev, &s->told[i], (size_t)s->n_layer * picks, err)) !=
            0)
            return rc;
    return 0;
}

static int open_lane(hx_store *s, const hx_store_opt *opt, hx_err *err)
{
    const hx_desc *d = &s->model->desc;
    const hx_expert **layer = hx_new(const hx_expert *, s->n_layer);
    const hx_dev_opt cpu = { .name = "cpu",
                             .isa = opt->isa,
                             .cpus = opt->cpus,
                             .n_threads = opt->n_threads,
                             .limits = { .max_rows = opt->max_rows,
                                         .max_k = HX_MAX(d->width, d->expert_width),
                                         .max_n = HX_MAX(d->width, d->expert_width),
                                         .max_active = d->n_active,
                                         .max_expert = d->n_expert } };
    hx_lane_opt lane = { .dev = s->dev,
                         .expert = layer,
                         .n_layer = s->n_layer,
                         .n_expert = s->n_expert,
                         .active = s->n_active,
                         .max_rows = opt->max_rows,
                         .dim = d->width,
                         .limit = d->swiglu_limit };
    int rc;

    if (layer == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: no memory");
    for (int64_t l = 0; l < s->n_layer; l++)
        layer[l] = s->model->layer[l].expert;
    if ((rc = hx_dev_open(&lane.cpu, &cpu, err)) == 0)
        rc = hx_lane_open(&s->lane, &lane, err);
    hx_free(layer);
    return rc;
}

/* What every step reads beside experts; of the embedding it takes a row. */
static uint64_t rest_bytes(const hx_model *m)
{
    uint64_t bytes = m->weight_bytes - hx_mat_bytes(&m->embed);

    for (int64_t i = 0; i < m->desc.n_layer * m->desc.n_expert; i++) {
        const hx_expert *e = expert_at(m, i);

        if (e != NULL)
            bytes -=
                hx_mat_bytes(&e->gate) + hx_mat_bytes(&e->up) + hx_mat_bytes(&e->down);
    }
    return bytes;
}

int hx_store_open(hx_store **out, hx_model *m, hx_dev *dev, const hx_store_opt *opt,
                  hx_err *err)
{
    const hx_desc *d = &m->desc;
    hx_store *s = hx_new(hx_store, 1);
    const bool measured = !(opt->rates.here_us > 0);
    hx_pool *pool = NULL;
    int rc;

    *out = NULL;
    if (s == NULL)
        return hx_fail(err, HX_ENOMEM, "expert store: no memory");
    s->model = m;
    s->dev = dev;
    s->ahead.layer = -1;
    s->n_layer = d->n_layer;
    s->n_expert = d->n_expert;
    s->n_active = d->n_active;
    s->max_pick = opt->max_rows * d->n_active;
    for (int64_t l = 0; l < d->n_layer; l++)
        s->n_moe += m->layer[l].ffn == HX_FFN_MOE;
    const uint64_t bytes = hx_store_bytes(m, &s->record_bytes);
    const uint64_t all = bytes / HX_MAX(s->record_bytes, 1);
    s->rest_bytes = rest_bytes(m);
    s->n_all_slot = (int32_t)HX_MIN(opt->slot_bytes / HX_MAX(s->record_bytes, 1), all);
    s->home = hx_new(const uint8_t *, d->n_layer * d->n_expert);
    s->move = hx_new(struct hx_move, HX_MOVE_MAX);
    if (s->home == NULL || s->move == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "expert store: no memory");
        goto fail;
    }
    if ((rc = check(s, opt, bytes, err)) != 0 ||
        (rc = hx_ahead_open(s, opt->max_rows, err)) != 0 ||
        (rc = hx_pool_open(&pool, 0, NULL, err)) != 0 ||
        (rc = gather(s, opt->ram_bytes != 0, err)) != 0 ||
        (rc = fill(s, pool, err)) != 0 ||
        (rc = hx_clock_open(&s->clock, d->n_layer * d->n_expert, s->n_all_slot, err)) !=
            0 ||
        (rc = open_buffers(s, err)) != 0 || (rc = hx_lend_open(s, all, err)) != 0 ||
        (rc = first_tables(s, err)) != 0)
        goto fail;
    if (opt->mode == HX_MODE_AUTO && (rc = open_lane(s, opt, err)) != 0)
        goto fail;
    s->rates = opt->rates;
    if ((measured && (rc = hx_rates_copies(s, err)) != 0) || (rc = warm(s, err)) != 0 ||
        (rc = open_trace(s, opt->trace, err)) != 0 ||
        (measured && (rc = hx_rates_measure(s, pool, err)) != 0))
        goto fail;
    hx_pool_close(pool);
    *out = s;
    return 0;
fail:
    hx_pool_close(pool);
    hx_store_close(s);
    return rc;
}

void hx_store_close(hx_store *s)
{
    if (s == NULL)
        return;
    hx_lane_close(s->lane);
    hx_lend_close(s);
    hx_ahead_close(s);
    hx_dev_free(s->dev, &s->slots);
    hx_dev_free(s->dev, &s->resident);
    hx_dev_free(s->dev, &s->at);
    hx_dev_free(s->dev, &s->here);
    hx_dev_free(s->dev, &s->there);
    hx_dev_free(s->dev, &s->log);
    hx_dev_unshared(s->dev, &s->told[0]);
    hx_dev_unshared(s->dev, &s->told[1]);
    for (int i = 0; i < s->n_pin; i++)
        if (s->pin[i] != NULL)
            hx_dev_unpin(s->dev, s->pin[i]);
    hx_unmap(s->arena, s->arena_bytes);
    hx_clock_close(&s->clock);
    if (s->trace != NULL)
        fclose(s->trace);
    hx_free(s->trace_shape.moe);
    hx_free(s->pin);
    hx_free(s->home);
    hx_free(s->moved);
    hx_free(s->move);
    hx_free(s);
}
