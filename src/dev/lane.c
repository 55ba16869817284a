/* lane.c - the CPU lane: a thread that waits for jobs in the mailbox, has the experts
 * computed by a CPU device of its own, and answers there; and the host's side of posting
 * and taking. Never touches what belongs to the engine thread but the mailbox. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "dev/lane.h"

/* Workers of the lane spin from one layer's job to the next. */
#define SPIN_US     4000
#define DEADLINE_US 2000000
#define PATIENCE    20 /* times as long as the largest job takes when all is quiet */

/* The lane's own side. */
struct hx_lane_host {
    hx_dev *dev, *cpu;
    hx_buf shared;
    const hx_expert **expert; /* [n_layer] */
    int32_t *id;              /* [max_pick] of the job */
    int64_t n_layer, n_expert;
    float limit;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic int awake; /* > 0: poll */
    _Atomic bool stop;
    _Atomic int64_t busy_us;
    uint32_t late, failed; /* of the box, as last seen by hx_lane_late() */
    hx_err err;            /* why a job failed, under lock */
};

static uint32_t load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void store(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

/* ---- the lane's thread ---------------------------------------------------- */

static int32_t load_i32(const int32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

/* Once a job has been given up the next may be posted over it: its numbers are read once, and
 * what comes of rows that changed meanwhile is nobody's. */
static int run_job(const hx_lane *l, hx_err *err)
{
    const struct hx_lane_host *h = l->host;
    const int64_t rows = load_i32(&l->box->rows), active = load_i32(&l->box->active),
                  layer = load_i32(&l->box->layer);

    if (layer < 0 || layer >= h->n_layer || h->expert[layer] == NULL || rows < 1 ||
        rows > l->max_rows || active < 1 || rows * active > l->max_pick)
        return hx_fail(err, HX_EDEVICE,
                       "cpu lane: the device posted layer %lld with %lld rows",
                       (long long)layer, (long long)rows);
    const size_t picks = (size_t)(rows * active), row = (size_t)l->dim * sizeof(float);
    for (size_t i = 0; i < picks; i++)
        h->id[i] = load_i32(&l->id[i]);
    const hx_moe_args a = { .y = { l->y, picks * row },
                            .x = { l->x, (size_t)rows * row },
                            .id = { h->id, picks * sizeof(int32_t) },
                            .expert = h->expert[layer],
                            .n_expert = h->n_expert,
                            .rows = rows,
                            .active = active,
                            .limit = h->limit };

    return hx_op_moe(h->cpu, &a, err);
}

/* Polls for a job after number `last`. Lets others have the CPU now and then: where the
 * machine is small, the one who would post may be waiting for it. */
static bool wait_job(hx_lane *l, uint32_t last)
{
    struct hx_lane_host *h = l->host;

    for (uint32_t i = 1; !atomic_load(&h->stop); i++) {
        if (load(&l->box->posted) != last)
            return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (i % 64 != 0)
            continue;
        if (i % 4096 == 0)
            sched_yield();
        if (atomic_load(&h->awake) > 0)
            continue;
        pthread_mutex_lock(&h->lock);
        while (atomic_load(&h->awake) == 0 && !atomic_load(&h->stop))
            pthread_cond_wait(&h->wake, &h->lock);
        pthread_mutex_unlock(&h->lock);
    }
    return false;
}

static void *lane_run(void *ud)
{
    hx_lane *l = ud;
    struct hx_lane_host *h = l->host;
    uint32_t last = 0;

    while (wait_job(l, last)) {
        const int64_t start = hx_now_us();
        hx_err err = { 0 };

        last = load(&l->box->posted);
        if (run_job(l, &err) != 0) {
            pthread_mutex_lock(&h->lock);
            h->err = err;
            pthread_mutex_unlock(&h->lock);
            store(&l->box->failed, l->box->failed + 1);
        }
        const int64_t us = hx_now_us() - start;

        __atomic_store_n(&l->box->answer, (uint64_t)us << 32 | last, __ATOMIC_RELEASE);
        atomic_fetch_add(&h->busy_us, us);
    }
    return NULL;
}

/* ---- open and close --------------------------------------------------------- */

static size_t part(size_t *at, size_t bytes)
{
    const size_t here = *at;

    *at += (bytes + 255) / 256 * 256;
    return here;
}

/* The mailbox and what goes through it. */
static int open_memory(hx_lane *l, hx_dev *dev, hx_err *err)
{
    const size_t rows = (size_t)l->max_rows, picks = (size_t)l->max_pick,
                 dim = (size_t)l->dim;
    size_t at = 0;
    const size_t box = part(&at, sizeof(hx_lane_box)), id = part(&at, picks * 4),
                 x = part(&at, rows * dim * 4), y = part(&at, picks * dim * 4);
    int rc;

    if ((rc = hx_dev_shared(dev, &l->host->shared, at, err)) != 0 ||
        (rc = hx_dev_alloc(dev, &l->sent, sizeof(hx_lane_sent), err)) != 0)
        return rc;
    char *p = l->host->shared.p;
    l->box = (hx_lane_box *)(void *)(p + box);
    l->id = (int32_t *)(void *)(p + id);
    l->x = (float *)(void *)(p + x);
    l->y = (float *)(void *)(p + y);
    return 0;
}

int hx_lane_open(hx_lane **out, const hx_lane_opt *opt, hx_err *err)
{
    hx_lane *l = hx_new(hx_lane, 1);
    struct hx_lane_host *h = hx_new(struct hx_lane_host, 1);
    int rc;

    *out = NULL;
    if (l == NULL || h == NULL ||
        (h->expert = hx_new(const hx_expert *, opt->n_layer)) == NULL ||
        (h->id = hx_new(int32_t, opt->max_rows * opt->active)) == NULL) {
        if (h != NULL)
            hx_free(h->expert);
        hx_free(h);
        hx_free(l);
        hx_dev_close(opt->cpu);
        return hx_fail(err, HX_ENOMEM, "cpu lane: no memory");
    }
    l->host = h;
    l->max_rows = opt->max_rows;
    l->max_pick = opt->max_rows * opt->active;
    l->dim = opt->dim;
    l->deadline_us = opt->deadline_us > 0 ? opt->deadline_us : DEADLINE_US;
    h->dev = opt->dev;
    h->cpu = opt->cpu;
    memcpy(h->expert, opt->expert, (size_t)opt->n_layer * sizeof *h->expert);
    h->n_layer = opt->n_layer;
    h->n_expert = opt->n_expert;
    h->limit = opt->limit;
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->wake, NULL);
    hx_pool_set_spin(h->cpu->pool, SPIN_US);
    if ((rc = open_memory(l, opt->dev, err)) != 0)
        goto fail;
    if (pthread_create(&h->thread, NULL, lane_run, l) != 0) {
        rc = hx_fail(err, HX_ENOMEM, "cpu lane: the system refuses another thread");
        goto fail;
    }
    h->started = true;
    *out = l;
    return 0;
fail:
    hx_lane_close(l);
    return rc;
}

void hx_lane_close(hx_lane *l)
{
    if (l == NULL)
        return;
    struct hx_lane_host *h = l->host;

    if (h->started) {
        pthread_mutex_lock(&h->lock);
        atomic_store(&h->stop, true);
        pthread_cond_broadcast(&h->wake);
        pthread_mutex_unlock(&h->lock);
        pthread_join(h->thread, NULL);
    }
    hx_dev_free(h->dev, &l->sent);
    hx_dev_unshared(h->dev, &h->shared);
    hx_dev_close(h->cpu);
    pthread_cond_destroy(&h->wake);
    pthread_mutex_destroy(&h->lock);
    hx_free(h->expert);
    hx_free(h->id);
    hx_free(h);
    hx_free(l);
}

void hx_lane_expect(hx_lane *l, double expert_us)
{
    l->deadline_us =
        HX_MAX(l->deadline_us, (int64_t)(PATIENCE * (double)l->max_pick * expert_us));
}

void hx_lane_awake(hx_lane *l)
{
    struct hx_lane_host *h = l->host;

    if (atomic_fetch_add(&h->awake, 1) > 0)
        return;
    pthread_mutex_lock(&h->lock);
    pthread_cond_broadcast(&h->wake);
    pthread_mutex_unlock(&h->lock);
}

void hx_lane_rest(hx_lane *l)
{
    atomic_fetch_sub(&l->host->awake, 1);
}

int hx_lane_late(hx_lane *l, hx_err *err)
{
    struct hx_lane_host *h = l->host;
    const uint32_t late = load(&l->box->late), failed = load(&l->box->failed);
    const bool was_late = late != h->late, was_failed = failed != h->failed;
    int rc = 0;

    h->late = late;
    h->failed = failed;
    if (was_late &&
        (rc = hx_dev_put(h->dev, hx_buf_at(l->sent, offsetof(hx_lane_sent, known)), &late,
                         sizeof late, err)) != 0)
        return rc;
    if (was_failed) {
        pthread_mutex_lock(&h->lock);
        rc = hx_fail(err, HX_EDEVICE, "cpu lane: %.200s", h->err.msg);
        pthread_mutex_unlock(&h->lock);
    } else if (was_late)
        rc = hx_fail(err, HX_EDEVICE,
                     "cpu lane: no answer within %.1f s; the CPUs are busy with "
                     "something else: give it fewer with --threads, or use --mode "
                     "gpu-only",
                     (double)l->deadline_us / 1e6);
    return rc;
}

static int64_t us_of(const uint64_t *ns)
{
    return (int64_t)(__atomic_load_n(ns, __ATOMIC_RELAXED) / 1000);
}

void hx_lane_report(const hx_lane *l, hx_experts *out)
{
    const hx_lane_sent *t = &l->box->told;

    out->wait_us = us_of(&t->wait_ns);
    out->post_us = us_of(&t->post_ns);
    out->busy_us = us_of(&t->busy_ns);
    out->lane_us = atomic_load(&l->host->busy_us);
    out->jobs = load(&t->jobs);
    out->awaited = load(&t->awaited);
}

int hx_lane_time(hx_lane *l, int32_t layer, const int32_t *id, int64_t n, int64_t rows,
                 double *us, hx_err *err)
{
    l->box->layer = layer;
    l->box->rows = (int32_t)rows;
    l->box->active = (int32_t)n;
    for (int64_t i = 0; i < rows * n; i++)
        l->id[i] = id[i % n];
    const int64_t start = hx_now_us();
    const int rc = run_job(l, err);

    *us = (double)(hx_now_us() - start);
    return rc;
}

/* ---- posting and taking, where the device is the host ------------------------ */

typedef struct {
    int32_t rows, id;
} miss;

static int by_cost(const void *a, const void *b)
{
    const miss *x = a, *y = b;

    return hx_plan_before(x->rows, x->id, y->rows, y->id) ? -1 : 1;
}

/* Picked experts of the fetch for this layer stay here; all of it has come already. */
static void keep_fetched(const hx_plan_args *a, uint8_t *side, const int32_t *count)
{
    hx_ahead_state *s = a->ahead->state.p;
    const hx_ahead_list *l = &s->list[a->layer & 1];
    const int32_t *resident = a->resident.p;

    for (int k = 0; k < HX_AHEAD_SLOTS; k++)
        hx_plan_restore(s, k);
    s->list[(a->layer + 1) & 1] = (hx_ahead_list) { 0 };
    for (int k = 0; a->fetched && k < l->n; k++) {
        const int32_t e = l->id[k];
        const bool wanted = count[e] > 0 && resident[e] < 0;

        s->count.named++;
        s->count.picked += wanted;
        s->count.used += wanted;
        s->count.pieces += l->part[k];
        s->count.vain += wanted ? 0 : l->part[k];
        if (!wanted)
            continue;
        side[e] = HX_SIDE_AHEAD;
        hx_plan_keep(s, a->ahead, (hx_lease *)a->at.p + e, k);
    }
    *(hx_ahead_counts *)a->ahead->told.p = s->count;
}

/* Marks in side[E] where each picked expert goes; returns whether the lane has work. */
static bool choose_sides(const hx_plan_args *a, uint8_t *side, int32_t *count)
{
    const int32_t *id = a->id.p, *resident = a->resident.p;
    miss missing[HX_PLAN_MAX_PICK];
    int32_t rows[HX_PLAN_MAX_PICK];
    hx_plan_seen *const seen = a->learn ? &((hx_lane_sent *)a->lane->sent.p)->seen : NULL;
    int n = 0, n_here = 0;

    for (int64_t p = 0; p < a->rows * a->active; p++)
        count[id[p]]++;
    for (int32_t e = 0; e < a->n_expert; e++)
        side[e] = resident[e] >= 0 ? HX_SIDE_HERE : HX_SIDE_LINK;
    if (a->ahead != NULL)
        keep_fetched(a, side, count);
    for (int32_t e = 0; e < a->n_expert; e++) {
        n_here += count[e] > 0 && side[e] != HX_SIDE_LINK;
        if (count[e] > 0 && side[e] == HX_SIDE_LINK)
            missing[n++] = (miss) { count[e], e };
    }
    qsort(missing, (size_t)n, sizeof *missing, by_cost);
    for (int i = 0; i < n; i++)
        rows[i] = missing[i].rows;
    const int take = hx_plan_lane(&a->rates, rows, n, n_here, 0, seen);
    for (int i = 0; i < take; i++)
        side[missing[i].id] = HX_SIDE_LANE;
    return take > 0;
}

int hx_lane_plan(hx_dev *d, const hx_plan_args *a, hx_err *err)
{
    const size_t picks = (size_t)(a->rows * a->active);
    const int32_t *id = a->id.p;
    int32_t *here = a->here.p, *there = a->there.p, *log = a->log.p;
    uint8_t side[HX_PLAN_MAX_EXPERT];
    int32_t count[HX_PLAN_MAX_EXPERT] = { 0 };
    const uint64_t begin = 1000 * (uint64_t)hx_now_us();
    const bool post = choose_sides(a, side, count);

    (void)d, (void)err;
    for (size_t p = 0; p < picks; p++) {
        const bool lane = side[id[p]] == HX_SIDE_LANE;

        here[p] = lane ? -1 : id[p];
        there[p] = lane ? id[p] : -1;
        log[p] = id[p] | (int32_t)side[id[p]] << 24;
    }
    if (a->lane == NULL)
        return 0;
    hx_lane_sent *sent = a->lane->sent.p;
    sent->begin_ns = begin;
    sent->out = post;
    if (!post)
        return 0;
    hx_lane_box *box = a->lane->box;
    box->layer = a->layer;
    box->rows = (int32_t)a->rows;
    box->active = (int32_t)a->active;
    memcpy(a->lane->id, there, picks * sizeof *there);
    memcpy(a->lane->x, a->x.p, (size_t)(a->rows * a->dim) * sizeof(float));
    sent->ns = 1000 * (uint64_t)hx_now_us();
    store(&box->posted, ++sent->jobs);
    return 0;
}

void hx_lane_take(const hx_combine_args *a)
{
    const hx_lane *l = a->lane;
    hx_lane_sent *sent = l->sent.p;
    const int32_t *there = a->there.p;
    const size_t row = (size_t)a->dim * sizeof(float);
    const int64_t start = hx_now_us();
    uint64_t answer;
    uint32_t i = 1;

    if (!sent->out || sent->late != sent->known)
        return;
    for (; (uint32_t)(answer = __atomic_load_n(&l->box->answer, __ATOMIC_ACQUIRE)) !=
           sent->jobs;
         i++) {
        if (i % 256 != 0)
            continue;
        sched_yield();
        if (hx_now_us() - start > l->deadline_us) {
            store(&l->box->late, ++sent->late);
            return;
        }
    }
    const uint64_t now = 1000 * (uint64_t)hx_now_us();
    sent->wait_ns += now - 1000 * (uint64_t)start;
    hx_plan_learn(&sent->seen,
                  i > 1 ? (float)(now - sent->ns) / 1e3f : (float)(answer >> 32),
                  (float)(1000 * (uint64_t)start - sent->ns) / 1e3f);
    if (i > 1) {
        sent->awaited++;
        sent->post_ns += hx_lane_post_ns(now - sent->ns, answer);
    }
    sent->busy_ns += now - sent->begin_ns;
    l->box->told = *sent;
    for (int64_t p = 0; p < a->rows * a->active; p++)
        if (there[p] >= 0)
            memcpy((char *)a->part.p + (size_t)p * row, l->y + p * a->dim, row);
}

void hx_lane_fetch(const hx_fetch_args *a)
{
    const int n = (int)HX_MIN(a->rows * a->active, HX_PLAN_MAX_PICK);
    hx_ahead_state *s = a->to->state.p;
    hx_ahead_list *l = &s->list[a->layer & 1];
    const hx_lease *at = a->at.p;
    int32_t pick[HX_PLAN_MAX_PICK];

    for (int i = 0; i < n; i++)
        pick[i] = hx_plan_predicted(a->id.p, a->resident.p, at, (int)a->rows,
                                    (int)a->active, i);
    l->n = hx_plan_fetch(pick, n, l->id);
    for (int k = 0; k < l->n; k++) {
        memcpy((char *)a->to->slots.p + (size_t)k * a->to->record_bytes,
               at[l->id[k]].gate.trellis, a->to->record_bytes);
        l->part[k] = hx_plan_pieces(a->to->record_bytes);
    }
}
