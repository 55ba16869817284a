/* reuse_disk.c - between the prefix tree and files: writes states that have been idle for a
 * while, reads those that a prompt goes on from, keeps to the budgets.
 *
 * Called by reuse.c on the engine thread, which only copies pages and polls; park.c's
 * thread touches the disk. What is written stays in memory until that is needed. */
#include <stdio.h>

#include "engine/engine.h"

#define IDLE_US      5000000  /* a conversation unused for so long is written */
#define LOOK_US      200000   /* how often it is looked for such */
#define RETRY_US     60000000 /* when a budget was used up */
#define TICK_PAGES   32       /* copied per step beside running streams */
#define DISK_DEFAULT (UINT64_C(32) << 30)
#define DAY_TIMES    8 /* the day's budget, in folder sizes */

/* A file being read: into its own snapshot, for the sake of target. */
typedef struct {
    hx_node *file, *target;
} reading;

static void on_gone(void *ud, hx_node *n)
{
    hx_engine *e = ud;

    hx_park_delete(e->reuse->park, &n->snap->name);
}

static void on_ready(void *ud)
{
    hx_engine *e = ud;

    pthread_mutex_lock(&e->lock); /* or it falls asleep between its look and its wait */
    atomic_store(&e->reuse->disk_ready, true);
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

/* ---- budgets ----------------------------------------------------------- */

/* Deletes files until bytes more fit: those of other models or builds, then those unused
 * longest. No other needs these: a node is as recently used as what goes on from it. */
static bool make_disk_room(hx_engine *e, uint64_t bytes, int64_t newer_than_us)
{
    hx_reuse *r = e->reuse;

    while (!hx_park_fits_disk(r->park, bytes)) {
        hx_node *old = NULL;

        if (hx_park_drop_foreign(r->park))
            continue;
        for (hx_node *n = r->tree->snap; n != NULL; n = n->snap->next)
            if (n->snap->on_disk && n->busy == 0 && n->used_us < newer_than_us &&
                (old == NULL || n->used_us < old->used_us ||
                 (n->used_us == old->used_us && n->end > old->end)))
                old = n;
        if (old == NULL)
            return false;
        hx_park_delete(r->park, &old->snap->name);
        hx_prefix_lost_file(r->tree, old);
    }
    return true;
}

/* ---- writing ----------------------------------------------------------- */

static bool is_unwritten(const hx_node *n)
{
    return n->snap != NULL && n->snap->state != NULL && !n->snap->on_disk &&
           !n->snap->hidden && !n->snap->no_file && n->busy == 0;
}

static hx_node *file_above(const hx_node *n)
{
    for (hx_node *a = n->parent; a != NULL; a = a->parent)
        if (a->snap != NULL && a->snap->on_disk)
            return a;
    return NULL;
}

/* The last used of those idle long enough; of its path the first that is not written. */
static hx_node *next_to_write(const hx_reuse *r, int64_t idle_us)
{
    const int64_t now = hx_now_us();
    hx_node *best = NULL;

    for (hx_node *n = r->tree->snap; n != NULL; n = n->snap->next)
        if (is_unwritten(n) && now - n->snap->used_us >= idle_us &&
            (best == NULL || n->snap->used_us > best->snap->used_us))
            best = n;
    for (hx_node *a = best; a != NULL; a = a->parent)
        if (is_unwritten(a))
            best = a;
    return best;
}

static void end_write(hx_reuse *r)
{
    if (r->write.node != NULL)
        hx_prefix_busy(r->write.node, -1);
    if (r->write.from != NULL)
        hx_prefix_busy(r->write.from, -1);
    for (int64_t i = 0; r->write.page != NULL && i < r->write.n_page; i++)
        hx_blob_unref(r->write.page[i]);
    hx_free(r->write.page);
    memset(&r->write, 0, sizeof r->write);
}

/* Are all pages that the file after from's would hold in memory? Else they are in a file of
 * another branch only. */
static bool has_pages(const hx_node *n, const hx_node *from)
{
    for (; n->parent != NULL && n != from; n = n->parent)
        if (n->page < 0 && n->host == NULL)
            return false;
    return true;
}

static void head_of(const hx_reuse *r, const hx_node *n, hx_park_head *h)
{
    const hx_node *from = r->write.from;

    *h = (hx_park_head) { .from = from != NULL ? from->end : 0,
                          .n = n->end,
                          .pend = n->snap->pend,
                          .has_hidden = n->snap->has_hidden,
                          .state_bytes = n->snap->state->n };
    if (from != NULL)
        h->parent = from->snap->name;
}

/* Chooses a snapshot; nothing is copied yet. False: for now there is none. */
static bool begin_write(hx_engine *e, int64_t idle_us)
{
    hx_reuse *r = e->reuse;
    hx_node *n = next_to_write(r, idle_us);
    hx_park_head h;
    uint64_t bytes, limit;

    if (n == NULL) {
        r->retry_us = hx_now_us() + LOOK_US;
        return false;
    }
    r->write.from = file_above(n);
    head_of(r, n, &h);
    bytes = hx_park_file_bytes(r->park, &h);
    r->write.n_page = (h.n - h.from + HX_PAGE - 1) / HX_PAGE;
    /* The copies lie in memory until they are written; half the budget bounds them. */
    limit = HX_MIN(r->ram_bytes / 2, e->info.park_disk_bytes);
    if (bytes > limit || !has_pages(n, r->write.from)) {
        if (bytes > limit)
            hx_log(HX_LOG_INFO,
                   "park: %lld tokens are not written: %llu bytes, but half of "
                   "--park-ram, or --park-disk, is %llu",
                   (long long)n->end, (unsigned long long)bytes,
                   (unsigned long long)limit);
        n->snap->no_file = true;
        memset(&r->write, 0, sizeof r->write);
        return true;
    }
    if (!hx_park_fits_day(r->park, bytes) ||
        !make_disk_room(e, bytes, n->snap->used_us) ||
        (r->write.page = hx_new(hx_blob *, r->write.n_page)) == NULL) {
        hx_log(HX_LOG_INFO,
               "park: %llu bytes are not written now: the folder is full of newer "
               "ones, or the day's writes are used up",
               (unsigned long long)bytes);
        memset(&r->write, 0, sizeof r->write);
        r->retry_us = hx_now_us() + RETRY_US;
        return false;
    }
    r->write.node = n;
    hx_prefix_busy(n, 1);
    if (r->write.from != NULL)
        hx_prefix_busy(r->write.from, 1);
    return true;
}

/* A copy of the node's page, wherever it is in memory. NULL: no memory for it. */
static hx_blob *page_of(hx_engine *e, const hx_node *n)
{
    hx_blob *b;

    if (n->host != NULL)
        return hx_blob_ref(n->host);
    if (n->page < 0 || (b = hx_blob_new(e->cache->page_bytes, NULL)) == NULL)
        return NULL;
    if (hx_cache_page_get(e->cache, n->page, b->p, NULL) != 0) {
        hx_blob_unref(b);
        return NULL;
    }
    return b;
}

/* The file's ids and phases, from its nodes. */
static bool queue_write(hx_engine *e)
{
    hx_reuse *r = e->reuse;
    hx_node *n = r->write.node;
    hx_park_head h;
    int32_t *token;
    uint64_t *decoded;
    bool ok = false;

    head_of(r, n, &h);
    r->write.has_hidden = h.has_hidden;
    token = hx_new(int32_t, h.n - h.from);
    decoded = hx_new(uint64_t, r->write.n_page);
    if (token != NULL && decoded != NULL) {
        for (const hx_node *a = n; a->parent != NULL && a->end > h.from; a = a->parent) {
            const int64_t at = a->end - a->n_token - h.from;

            memcpy(token + at, a->token, (size_t)a->n_token * sizeof *token);
            decoded[at / HX_PAGE] = a->decoded;
        }
        h.token = token;
        h.decoded = decoded;
        ok = hx_park_write(r->park, &h, r->write.page, hx_blob_ref(n->snap->state), n);
        memset(r->write.page, 0, (size_t)r->write.n_page * sizeof(hx_blob *));
    }
    hx_free(token);
    hx_free(decoded);
    return ok;
}

/* Copies some more pages; queues the file when all are there. */
static void go_on_writing(hx_engine *e, int64_t max)
{
    hx_reuse *r = e->reuse;
    const int64_t from = r->write.from != NULL ? r->write.from->end : 0;

    for (const hx_node *a = r->write.node; a->parent != NULL && a->end > from && max > 0;
         a = a->parent) {
        hx_blob **page = &r->write.page[(a->end - 1 - from) / HX_PAGE];

        if (*page != NULL)
            continue;
        if ((*page = page_of(e, a)) == NULL) {
            r->write.node->snap->no_file = true;
            end_write(r);
            return;
        }
        r->write.n_have++;
        max--;
    }
    if (r->write.n_have < r->write.n_page)
        return;
    if (queue_write(e))
        r->write.queued = true;
    else
        end_write(r);
}

static void written(hx_engine *e, const hx_park_done *d)
{
    hx_reuse *r = e->reuse;
    hx_node *n = r->write.node;
    const bool unwanted = r->write.unwanted;

    if (d->rc != 0) {
        hx_log(HX_LOG_WARN, "%s", d->err.msg);
        r->retry_us = hx_now_us() + RETRY_US;
    } else if (unwanted || n->snap->on_disk ||
               n->snap->has_hidden != r->write.has_hidden) { /* replaced meanwhile */
        hx_park_delete(r->park, &d->name);
    } else {
        hx_prefix_has_file(r->tree, n, r->write.from, &d->name);
    }
    end_write(r);
    if (unwanted && n->busy == 0)
        hx_prefix_remove(r->tree, n);
}

/* ---- reading ----------------------------------------------------------- */

static bool begin_read(hx_engine *e, hx_node *file, hx_node *target)
{
    hx_reuse *r = e->reuse;
    const bool state = file == target && file->snap->state == NULL;
    reading *job;

    if (file->snap->reading)
        return true;
    if ((job = hx_new(reading, 1)) == NULL ||
        !hx_park_read(r->park, &file->snap->name, state, &r->tree->host, job)) {
        hx_free(job);
        return false;
    }
    *job = (reading) { file, target };
    file->snap->reading = true;
    r->n_reading++;
    hx_prefix_busy(file, 1);
    hx_prefix_busy(target, 1);
    return true;
}

/* Bytes of n that are not in memory; *begun: all of them are being read. */
static uint64_t missing_bytes(const hx_engine *e, const hx_node *n, bool *begun)
{
    uint64_t bytes = 0;

    *begun = true;
    for (const hx_node *a = n; a->parent != NULL; a = a->parent)
        if (a->page < 0 && a->host == NULL) {
            bytes += e->cache->page_bytes;
            *begun = *begun && a->file != NULL && a->file->snap->reading;
        }
    if (n->snap->state == NULL) {
        bytes +=
            hx_cache_state_bytes(e->cache, n->snap->pend) + e->reuse->tree->hidden_bytes;
        *begun = *begun && n->snap->reading;
    }
    return bytes;
}

bool hx_reuse_disk_load(hx_engine *e, hx_node *n)
{
    hx_reuse *r = e->reuse;
    bool begun, ok;
    const uint64_t bytes = missing_bytes(e, n, &begun);

    if (begun)
        return true;
    hx_prefix_busy(n, 1);
    ok = hx_prefix_room(r->tree, bytes);
    if (ok && n->snap->state == NULL)
        ok = begin_read(e, n, n);
    for (hx_node *a = n; ok && a->parent != NULL; a = a->parent)
        if (a->page < 0 && a->host == NULL)
            ok = a->file != NULL && begin_read(e, a->file, n);
    hx_prefix_busy(n, -1);
    return ok;
}

static void was_read(hx_engine *e, hx_park_done *d)
{
    hx_reuse *r = e->reuse;
    reading *job = d->ud;
    hx_node *file = job->file;

    r->n_reading--;
    file->snap->reading = false;
    if (d->rc == 0 && file->snap->on_disk) {
        hx_prefix_fill(r->tree, file, d->page, d->n_page, d->state);
    } else if (d->rc == 0) { /* forgotten meanwhile */
        for (int64_t i = 0; i < d->n_page; i++)
            hx_blob_unref(d->page[i]);
        hx_blob_unref(d->state);
    }
    hx_free(d->page);
    hx_prefix_busy(job->target, -1);
    hx_prefix_busy(file, -1);
    hx_free(job);
    if (d->rc != 0)
        hx_log(HX_LOG_WARN, "%s", d->err.msg);
    if (d->rc != 0 && file->snap->on_disk) {
        hx_prefix_lost_file(r->tree, file);
    } else if (!file->snap->on_disk && file->snap->state == NULL && file->busy == 0) {
        hx_prefix_remove(r->tree, file);
    }
}

/* ---- what lies in the folder ---------------------------------------------- */

/* Files that another process has deleted. */
static void lose_gone(hx_reuse *r)
{
    hx_node *n = r->tree->snap;

    while (n != NULL)
        if (n->snap->on_disk && hx_park_find(r->park, &n->snap->name) < 0) {
            hx_prefix_lost_file(r->tree, n); /* others may go with it */
            n = r->tree->snap;
        } else {
            n = n->snap->next;
        }
}

/* node [hx_park_n_found()]: those in the tree. NULL: the file is of no use. */
static hx_node *add_found(hx_engine *e, const hx_park_head *h, hx_node *const *node)
{
    const hx_reuse *r = e->reuse;
    const int64_t i = h->from > 0 ? hx_park_find(r->park, &h->parent) : -1;
    const hx_prefix_disk d = { .parent = i >= 0 ? node[i] : NULL,
                               .token = h->token,
                               .decoded = h->decoded,
                               .n = h->n,
                               .pend = h->pend,
                               .has_hidden = h->has_hidden,
                               .name = h->name };
    const uint64_t state = hx_cache_state_bytes(e->cache, h->pend) +
                           (h->has_hidden ? (uint64_t)r->tree->hidden_bytes : 0);

    if (h->state_bytes != state ||
        (h->from > 0 && (d.parent == NULL || d.parent->end != h->from)))
        return NULL;
    return hx_prefix_add_disk(r->tree, &d, hx_now_us() - h->age_us);
}

/* The tree's files become those of the folder. Those whose beginning is not there are of no
 * use; where it is there, but cannot be read now, the next run may. */
static void take_found(hx_engine *e)
{
    hx_reuse *r = e->reuse;
    hx_node **node = hx_new(hx_node *, hx_park_n_found(r->park) + 1);
    const hx_park_head *h;
    int64_t n_used = 0, n_useless = 0;

    lose_gone(r);
    for (hx_node *n = r->tree->snap; node != NULL && n != NULL; n = n->snap->next)
        if (n->snap->on_disk)
            node[hx_park_find(r->park, &n->snap->name)] = n;
    for (int64_t i = 0; node != NULL && (h = hx_park_found(r->park, i)) != NULL; i++) {
        if (node[i] != NULL || hx_park_find(r->park, &h->name) != i)
            continue;
        if ((node[i] = add_found(e, h, node)) != NULL) {
            n_used++;
            continue;
        }
        n_useless++;
        if (h->from > 0 && hx_park_find(r->park, &h->parent) == HX_PARK_UNUSED)
            hx_park_disown(r->park, &h->name);
        else
            hx_park_delete(r->park, &h->name);
    }
    hx_free(node);
    hx_park_found_end(r->park);
    if (n_used + n_useless > 0)
        hx_log(HX_LOG_INFO, "park: %lld kept states found, %lld without their beginning",
               (long long)n_used, (long long)n_useless);
    if (hx_park_is_ours(r->park))
        make_disk_room(e, 0, INT64_MAX);
}

/* ---- the engine thread's calls ------------------------------------------ */

static void poll_all(hx_engine *e, bool wait)
{
    hx_park_done d;

    atomic_store(&e->reuse->disk_ready, false);
    while (hx_park_poll(e->reuse->park, &d, wait)) {
        if (d.kind == HX_PARK_WRITE)
            written(e, &d);
        else if (d.kind == HX_PARK_READ)
            was_read(e, &d);
        else
            take_found(e);
        wait = false;
    }
}

static void tick(hx_engine *e, int64_t idle_us, int64_t max_pages)
{
    hx_reuse *r = e->reuse;

    while (r->write.node == NULL && hx_park_is_ours(r->park) &&
           hx_now_us() >= r->retry_us && begin_write(e, idle_us))
        ;
    if (r->write.node != NULL && !r->write.queued)
        go_on_writing(e, max_pages);
}

void hx_reuse_disk_tick(hx_engine *e)
{
    if (e->reuse->park == NULL)
        return;
    if (atomic_load(&e->reuse->disk_ready))
        poll_all(e, false);
    tick(e, IDLE_US, e->n_run > 0 ? TICK_PAGES : INT64_MAX);
}

int64_t hx_reuse_disk_due_us(const hx_engine *e)
{
    const hx_reuse *r = e->reuse;
    int64_t due = INT64_MAX;

    if (r->park == NULL)
        return INT64_MAX;
    if (atomic_load(&r->disk_ready) || (r->write.node != NULL && !r->write.queued))
        return 0;
    if (r->write.node != NULL)
        return hx_now_us() + RETRY_US; /* its end wakes */
    for (const hx_node *n = r->tree->snap; n != NULL && hx_park_is_ours(r->park);
         n = n->snap->next)
        if (is_unwritten(n))
            due = HX_MIN(due, n->snap->used_us + IDLE_US);
    return due == INT64_MAX ? due : HX_MAX(due, r->retry_us);
}

void hx_reuse_disk_forget(hx_engine *e)
{
    e->reuse->write.unwanted = e->reuse->write.node != NULL;
}

void hx_reuse_disk_used(hx_engine *e, const hx_node *n)
{
    if (e->reuse->park != NULL && n->snap->on_disk)
        hx_park_touch(e->reuse->park, &n->snap->name);
}

/* ---- open and close ------------------------------------------------------ */

int hx_reuse_disk_open(hx_engine *e, const hx_options *opt, hx_err *err)
{
    hx_reuse *r = e->reuse;
    hx_park_opt p = { .dir = opt->park_dir,
                      .disk_bytes = opt->park_disk_bytes,
                      .day_bytes = opt->park_day_bytes,
                      .page_bytes = e->cache->page_bytes,
                      .wake = on_ready,
                      .wake_ud = e };
    char text[256];
    int rc;

    if (p.disk_bytes == 0)
        p.disk_bytes = DISK_DEFAULT;
    if (p.day_bytes == 0)
        p.day_bytes = DAY_TIMES * p.disk_bytes;
    e->info.park_disk_bytes = p.disk_bytes;
    snprintf(text, sizeof text, "%s %s kv %d page %llu state %llu", HX_VERSION,
             e->dev->ops->name, (int)opt->kv, (unsigned long long)p.page_bytes,
             (unsigned long long)hx_cache_state_bytes(e->cache, HX_PEND_MAX));
    if ((rc = hx_park_identify(p.identity, opt->model_dir, text, err)) != 0 ||
        (rc = hx_park_open(&r->park, &p, err)) != 0)
        return rc;
    r->tree->gone = on_gone;
    r->tree->gone_ud = e;
    take_found(e);
    return 0;
}

void hx_reuse_disk_close(hx_engine *e)
{
    hx_reuse *r = e->reuse;

    if (r == NULL || r->park == NULL)
        return;
    r->retry_us = 0;
    for (;;) {
        const bool reads = r->n_reading > 0;

        tick(e, 0, INT64_MAX);
        if (r->write.node == NULL && !reads)
            break;
        poll_all(e, r->write.queued || reads);
    }
    hx_park_close(r->park);
    r->park = NULL;
    r->tree->gone = NULL;
}
