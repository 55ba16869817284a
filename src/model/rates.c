/* rates.c - what an expert costs on each way, and the ceilings of memory, measured when the
 * store opens. Called by store.c; changes nothing but the store's rates. */
#include <stdatomic.h>

#include "dev/lane.h"
#include "model/model.h"
#include "model/store.h"

#define TRIES      5 /* of a measurement; the best counts */
#define COPY_BYTES ((size_t)1 << 30)
#define READ_PARTS 16 /* of a record, for as many CPUs */
#define BESIDE     64 /* experts that the device reads while the CPUs read */

/* Memory for calls that only take time. */
typedef struct {
    hx_buf x, y, base, id;
    int64_t layer; /* one with experts */
} trial;

static int wait_device(hx_store *s, hx_err *err)
{
    return hx_dev_get(s->dev, &(int32_t) { 0 }, s->resident, sizeof(int32_t), err);
}

/* The n experts of the trial's layer that here names, at one row. */
static hx_moe_args moe_of(const hx_store *s, const trial *t, int64_t n)
{
    return (hx_moe_args) { .y = t->y,
                           .x = t->x,
                           .id = s->here,
                           .at = hx_store_row(s, s->at, t->layer, sizeof(hx_lease)),
                           .expert = s->model->layer[t->layer].expert,
                           .n_expert = s->n_expert,
                           .rows = 1,
                           .active = n,
                           .limit = s->model->desc.swiglu_limit };
}

/* The device on n experts of the trial's layer at one row, in microseconds. */
static int time_device(hx_store *s, const trial *t, const int32_t *id, int64_t n,
                       double *us, hx_err *err)
{
    const hx_moe_args a = moe_of(s, t, n);
    int rc = hx_dev_put(s->dev, s->here, id, (size_t)n * sizeof *id, err);

    *us = 1e12;
    for (int i = 0; i < TRIES && rc == 0; i++) {
        if ((rc = wait_device(s, err)) != 0)
            break;
        const int64_t start = hx_now_us();

        if ((rc = hx_op_moe(s->dev, &a, err)) == 0 && (rc = wait_device(s, err)) == 0)
            *us = HX_MIN(*us, (double)(hx_now_us() - start));
    }
    return rc;
}

/* Microseconds that posting a job and seeing its answer take beside the lane's own time. */
static int time_post(hx_store *s, const trial *t, int32_t id, float *us, hx_err *err)
{
    const hx_rates kept = s->rates;
    hx_moe_args moe = { 0 };
    hx_combine_args c = { .y = t->base,
                          .base = t->base,
                          .part = t->y,
                          .weight = s->there,
                          .rows = 1,
                          .active = s->n_active,
                          .dim = s->model->desc.width };
    int32_t same[HX_PLAN_MAX_PICK];
    int rc;

    for (int64_t i = 0; i < s->n_active; i++)
        same[i] = id;
    rc = hx_dev_put(s->dev, t->id, same, (size_t)s->n_active * sizeof *same, err);
    s->rates = (hx_rates) { .link_us = 1e6f, .lane_us = 1 };
    *us = 1e6f;
    hx_store_begin(s);
    for (int i = 0; i < TRIES && rc == 0; i++) {
        hx_experts before = { 0 }, after = { 0 };

        hx_lane_report(s->lane, &before);
        if ((rc = hx_store_plan(s, t->layer, 1, t->id, t->x, &moe, &c, err)) == 0 &&
            (rc = hx_op_combine(s->dev, &c, err)) == 0)
            rc = wait_device(s, err);
        hx_lane_report(s->lane, &after);
        if (after.awaited > before.awaited)
            *us = HX_MIN(*us, (float)(after.post_us - before.post_us));
    }
    hx_lane_rest(s->lane);
    s->rates = kept;
    if (*us > 1e5f) /* answers were there at once */
        *us = 0;
    return rc != 0 ? rc : hx_lane_late(s->lane, err);
}

/* n experts of the trial's layer that are (or are not) resident; fewer where there are. */
static int64_t some(const hx_store *s, const trial *t, bool resident, int32_t *id,
                    int64_t n)
{
    int64_t have = 0;

    for (int32_t e = 0; e < s->n_expert && have < n; e++)
        if ((s->clock.slot[t->layer * s->n_expert + e] >= 0) == resident)
            id[have++] = e;
    return have;
}

/* Time of one more expert: that of n less that of one. */
static int time_each(hx_store *s, const trial *t, bool resident, float *us, hx_err *err)
{
    int32_t id[64];
    const int64_t n = some(s, t, resident, id, HX_MIN(s->n_active, 64));
    double one, all;
    int rc;

    if (n < 2)
        return 0;
    if ((rc = time_device(s, t, id, 1, &one, err)) != 0 ||
        (rc = time_device(s, t, id, n, &all, err)) != 0)
        return rc;
    *us = (float)HX_MAX((all - one) / (double)(n - 1), 0.1);
    return 0;
}

/* Missing experts for the lane, taken in turn: their weights are to come from memory each
 * time, not from a cache. */
typedef struct {
    int32_t id[32 * TRIES];
    int64_t n, next;
} missing;

/* The lane on n of them; the shortest time so far stays in *us. */
static int time_job(hx_store *s, const trial *t, missing *m, int64_t n, int64_t rows,
                    double *us, hx_err *err)
{
    int32_t id[64];
    double once = 0;

    for (int64_t k = 0; k < n; k++)
        id[k] = m->id[m->next++ % m->n];
    const int rc = hx_lane_time(s->lane, (int32_t)t->layer, id, n, rows, &once, err);
    *us = HX_MIN(*us, once);
    return rc;
}

/* One expert alone takes longer than one more does: that goes to the post. What is compared
 * is measured in turn, so that a machine that is busy for a while slows all of it, and rows
 * are many, so that what they cost stands out: 8 take 2.4 times as long as one (SPR). */
static int time_lane(hx_store *s, const trial *t, hx_err *err)
{
    hx_rates *r = &s->rates;
    const int64_t rows = HX_MIN(8, s->max_pick / s->n_active);
    double one = 1e12, all = 1e12, more = 1e12;
    missing m = { 0 };
    int rc;

    m.n = some(s, t, false, m.id, HX_LEN(m.id));
    const int64_t n = HX_MIN(m.n, HX_MIN(s->n_active, 64));
    if (s->lane == NULL || n < 2)
        return 0;
    rc = time_post(s, t, m.id[0], &r->post_us, err);
    for (int i = 0; i < TRIES && rc == 0; i++)
        if ((rc = time_job(s, t, &m, 1, 1, &one, err)) != 0 ||
            (rc = time_job(s, t, &m, n, 1, &all, err)) != 0 ||
            (rc = time_job(s, t, &m, n, rows, &more, err)) != 0)
            break;
    if (rc != 0)
        return rc;
    r->lane_us = (float)HX_MAX((all - one) / (double)(n - 1), 0.1);
    r->row_us = (float)(HX_MAX(more - all, 0) / (double)(n * HX_MAX(rows - 1, 1)));
    r->post_us += (float)HX_MAX(one - (double)r->lane_us, 0);
    hx_lane_expect(s->lane, (double)r->lane_us);
    s->learn = true;
    return 0;
}

/* ---- ceilings ---------------------------------------------------------------- */

int hx_rates_copies(hx_store *s, hx_err *err)
{
    const size_t bytes = HX_MIN(s->slots.n / 2 / 256 * 256, COPY_BYTES);
    int rc = 0;

    if (hx_dev_is_host(s->dev) || s->n_all_slot < 2)
        return 0;
    for (int i = 0; i < TRIES && rc == 0; i++) {
        if ((rc = wait_device(s, err)) != 0)
            break;
        const int64_t start = hx_now_us();

        if ((rc = hx_dev_copy(s->dev, hx_buf_at(s->slots, bytes), s->slots, bytes,
                              err)) == 0 &&
            (rc = wait_device(s, err)) == 0)
            s->copy_gbs = HX_MAX(s->copy_gbs, 2e-3 * (double)bytes /
                                                  (double)HX_MAX(hx_now_us() - start, 1));
    }
    return rc;
}

/* Records of a layer, read and added up. */
typedef struct {
    const hx_store *s;
    int64_t layer, first; /* record */
    _Atomic uint64_t sum; /* so that reading is not optimised away */
} reading;

static void read_records(void *ud, int64_t begin, int64_t end, int worker)
{
    reading *j = ud;
    uint64_t sum[4] = { 0 };

    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        const int64_t part = i % READ_PARTS,
                      e = (j->first + i / READ_PARTS) % j->s->n_expert;
        const size_t n = j->s->record_bytes / READ_PARTS / sizeof *sum;
        const uint64_t *p =
            (const uint64_t *)(const void *)j->s->home[j->layer * j->s->n_expert + e] +
            (size_t)part * n;

        for (size_t w = 0; w + 4 <= n; w += 4)
            for (int k = 0; k < 4; k++)
                sum[k] += p[w + (size_t)k];
    }
    atomic_fetch_add(&j->sum, sum[0] + sum[1] + sum[2] + sum[3]);
}

/* Host memory when the device reads experts in place and all CPUs read others: for how many
 * of these it takes as long is found by trying. */
static int time_host(hx_store *s, hx_pool *pool, const trial *t, hx_err *err)
{
    int32_t id[64];
    const int64_t n = some(s, t, false, id, HX_MIN(s->n_active, 64));
    const hx_moe_args a = moe_of(s, t, n);
    reading j = { .s = s, .layer = t->layer };
    int64_t mine = BESIDE;
    int rc = 0;

    if (hx_dev_is_host(s->dev) || n < 2)
        return 0;
    rc = hx_dev_put(s->dev, s->here, id, (size_t)n * sizeof *id, err);
    for (int i = 0; i < TRIES && rc == 0; i++) {
        if ((rc = wait_device(s, err)) != 0)
            break;
        const int64_t start = hx_now_us();
        int64_t theirs = 0;

        for (; theirs < BESIDE && rc == 0; theirs += n)
            rc = hx_op_moe(s->dev, &a, err);
        hx_pool_run(pool, mine * READ_PARTS, 1, read_records, &j);
        const int64_t cpu = HX_MAX(hx_now_us() - start, 1);
        if (rc != 0 || (rc = wait_device(s, err)) != 0)
            break;
        const int64_t us = HX_MAX(hx_now_us() - start, 1);
        s->host_gbs = HX_MAX(s->host_gbs,
                             1e-3 * (double)((mine + theirs) * (int64_t)s->record_bytes) /
                                 (double)us);
        j.first += mine; /* what a cache still has is not read again soon */
        mine = HX_MIN(HX_MAX(mine * us / cpu, 1), 16 * BESIDE);
    }
    return rc;
}

int hx_rates_measure(hx_store *s, hx_pool *pool, hx_err *err)
{
    const size_t row = (size_t)s->model->desc.width * sizeof(float);
    trial t = { .layer = -1 };
    int rc;

    for (int64_t l = s->n_layer; l-- > 0;)
        t.layer = s->model->layer[l].ffn == HX_FFN_MOE ? l : t.layer;
    if (t.layer < 0)
        return 0;
    if ((rc = hx_dev_alloc(s->dev, &t.x, row, err)) == 0 &&
        (rc = hx_dev_alloc(s->dev, &t.base, row, err)) == 0 &&
        (rc = hx_dev_alloc(s->dev, &t.id, (size_t)s->n_active * sizeof(int32_t), err)) ==
            0 &&
        (rc = hx_dev_alloc(s->dev, &t.y, (size_t)HX_MAX(s->n_active, 64) * row, err)) ==
            0 &&
        (rc = time_each(s, &t, true, &s->rates.here_us, err)) == 0 &&
        (rc = time_each(s, &t, false, &s->rates.link_us, err)) == 0 &&
        (rc = time_lane(s, &t, err)) == 0)
        rc = time_host(s, pool, &t, err);
    hx_dev_free(s->dev, &t.x);
    hx_dev_free(s->dev, &t.base);
    hx_dev_free(s->dev, &t.y);
    hx_dev_free(s->dev, &t.id);
    hx_log(HX_LOG_INFO,
           "experts: %d of %lld in device memory; one costs %.0f us there, %.0f over the "
           "link, %.0f + %.0f a row on the CPU, %.0f to post",
           s->n_all_slot, (long long)(s->n_moe * s->n_expert), (double)s->rates.here_us,
           (double)s->rates.link_us, (double)s->rates.lane_us, (double)s->rates.row_us,
           (double)s->rates.post_us);
    return rc;
}
