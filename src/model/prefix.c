/* prefix.c - the prefix tree: keeps pages and states of finished and running sequences,
 * finds what a prompt can go on from, gives memory back by value.
 *
 * Called by the engine thread (reuse.c) and, as the cache's reclaim, from cache.c. Knows
 * ids and phases, never requests; reads and writes no file (park.c does). */
#include <stdlib.h>

#include "model/model.h"

#define SPARE_BYTES (1u << 20) /* smaller states are soon touched */

/* ---- host copies ------------------------------------------------------ */

static hx_blob *fill_in(hx_blob *b, hx_spare *spare, size_t n, _Atomic int64_t *total)
{
    if (b == NULL)
        return NULL;
    atomic_init(&b->ref, 1);
    b->total = total;
    b->spare = spare;
    b->n = n;
    if (total != NULL)
        atomic_fetch_add(total, (int64_t)n);
    return b;
}

hx_blob *hx_blob_new(size_t n, _Atomic int64_t *total)
{
    hx_blob *b = n <= SIZE_MAX / 2 ? hx_realloc(NULL, sizeof *b + n) : NULL;

    return fill_in(b, NULL, n, total);
}

hx_blob *hx_prefix_new_state(hx_prefix_tree *t, size_t n)
{
    hx_blob *b = t->spare != NULL ? hx_spare_take(t->spare, n) : NULL;

    return b != NULL ? fill_in(b, t->spare, n, &t->host) : hx_blob_new(n, &t->host);
}

hx_blob *hx_blob_ref(hx_blob *b)
{
    atomic_fetch_add(&b->ref, 1);
    return b;
}

void hx_blob_unref(hx_blob *b)
{
    if (b == NULL || atomic_fetch_sub(&b->ref, 1) > 1)
        return;
    if (b->total != NULL)
        atomic_fetch_sub(b->total, (int64_t)b->n);
    if (b->spare != NULL)
        hx_spare_give(b->spare, b);
    else
        hx_free(b);
}

/* ---- nodes ------------------------------------------------------------ */

static bool is_held(const hx_prefix_tree *t, const hx_node *n)
{
    return n->page >= 0 && t->cache->hold[n->page] > 0;
}

static int64_t redundant_bytes(const hx_prefix_tree *t, const hx_node *n)
{
    return n->page >= 0 && n->host != NULL ? (int64_t)t->cache->page_bytes : 0;
}

/* Takes the caller's reference to page (-1: none). */
static void set_page(hx_prefix_tree *t, hx_node *n, int32_t page)
{
    t->redundant -= redundant_bytes(t, n);
    if (n->page >= 0)
        hx_cache_page_unref(t->cache, n->page);
    n->page = page;
    t->redundant += redundant_bytes(t, n);
}

/* Takes the caller's reference to the blob. */
static void set_host(hx_prefix_tree *t, hx_node *n, hx_blob *b)
{
    t->redundant -= redundant_bytes(t, n);
    hx_blob_unref(n->host);
    n->host = b;
    t->redundant += redundant_bytes(t, n);
}

/* Takes the caller's reference to the state. */
static void set_state(hx_node *n, hx_blob *state)
{
    const int32_t add = (state != NULL) - (n->snap->state != NULL);

    hx_blob_unref(n->snap->state);
    n->snap->state = state;
    for (hx_node *a = n; add != 0 && a != NULL; a = a->parent)
        a->warm += add;
}

static uint64_t path_of(uint64_t before, const int32_t *token, int32_t n)
{
    uint64_t h = before;

    for (int32_t i = 0; i < n; i++)
        h = hx_rng_at(h, (uint64_t)(uint32_t)token[i]);
    return h;
}

/* Every node once, parents first. */
static hx_node *node_after(const hx_prefix_tree *t, hx_node *n)
{
    if (n->child != NULL)
        return n->child;
    while (n != &t->root && n->next == NULL)
        n = n->parent;
    return n == &t->root ? NULL : n->next;
}

static hx_node **bucket_of(const hx_prefix_tree *t, uint64_t path)
{
    return &t->bucket[path % (uint64_t)t->n_scratch];
}

static void enter(hx_prefix_tree *t, hx_node *n)
{
    hx_node **b = bucket_of(t, n->path);

    n->same = *b;
    *b = n;
}

/* By its path: of a node, or of the root, thousands may go on. */
static hx_node *child_like(const hx_prefix_tree *t, const hx_node *n,
                           const int32_t *token, int32_t n_token, uint64_t decoded)
{
    const uint64_t path = path_of(n->path, token, n_token);
    hx_node *c = t->n_scratch > 0 ? *bucket_of(t, path) : NULL;

    while (c != NULL &&
           (c->parent != n || c->n_token != n_token || c->decoded != decoded ||
            memcmp(c->token, token, (size_t)n_token * sizeof *token) != 0))
        c = c->same;
    return c;
}

/* The scratch of reclaiming always has room for every node, and there are as many buckets. */
static bool scratch_for(hx_prefix_tree *t, int64_t n)
{
    const int64_t cap = HX_MAX(n, 2 * t->n_scratch);
    hx_node **p;

    if (n <= t->n_scratch)
        return true;
    if ((p = hx_realloc(t->scratch, (size_t)cap * sizeof(hx_node *))) == NULL)
        return false;
    t->scratch = p;
    if ((p = hx_new(hx_node *, cap)) == NULL)
        return false;
    hx_free(t->bucket);
    t->bucket = p;
    t->n_scratch = cap;
    for (hx_node *a = t->root.child; a != NULL; a = node_after(t, a))
        enter(t, a);
    return true;
}

static hx_node *node_new(hx_prefix_tree *t, hx_node *parent, const int32_t *token,
                         int32_t n_token, uint64_t decoded)
{
    hx_node *n = scratch_for(t, t->stat.nodes + 1) ? hx_new(hx_node, 1) : NULL;

    if (n == NULL)
        return NULL;
    memcpy(n->token, token, (size_t)n_token * sizeof *token);
    n->parent = parent;
    n->next = parent->child;
    parent->child = n;
    n->end = parent->end + n_token;
    n->n_token = n_token;
    n->decoded = decoded;
    n->pure = parent->pure && decoded == 0;
    n->path = path_of(parent->path, token, n_token);
    n->page = -1;
    n->at = -1;
    enter(t, n);
    t->stat.nodes++;
    return n;
}

static void node_free(hx_prefix_tree *t, hx_node *n)
{
    hx_node **link = &n->parent->child;

    hx_assert(n->child == NULL && n->snap == NULL && n->busy == 0);
    while (*link != n)
        link = &(*link)->next;
    *link = n->next;
    for (link = bucket_of(t, n->path); *link != n;)
        link = &(*link)->same;
    *link = n->same;
    if (!t->quiet) {
        t->ghost[n->path % HX_GHOST] = n->path;
        t->stat.evicted++;
        hx_count(HX_C_pages_evicted_total, 1);
    }
    if (n->at >= 0)
        t->scratch[n->at] = NULL;
    set_page(t, n, -1);
    set_host(t, n, NULL);
    hx_free(n);
    t->stat.nodes--;
}

/* A branch that leads to no snapshot is of no use. */
static void prune(hx_prefix_tree *t, hx_node *n)
{
    while (n != &t->root && n->child == NULL && n->snap == NULL && n->busy == 0) {
        hx_node *up = n->parent;

        node_free(t, n);
        n = up;
    }
}

static hx_snap *snap_new(hx_prefix_tree *t, hx_node *n)
{
    hx_snap *s = hx_new(hx_snap, 1);

    if (s == NULL)
        return NULL;
    s->next = t->snap;
    if (t->snap != NULL)
        t->snap->snap->prev = n;
    t->snap = n;
    t->stat.snaps++;
    return n->snap = s;
}

/* The file of n is no more: what it covered may be in another one. */
static void forget_file(hx_prefix_tree *t, hx_node *n)
{
    hx_node *next;

    n->snap->on_disk = false;
    t->stat.snaps_disk--;
    for (hx_node *s = t->snap; s != NULL; s = s->snap->next) {
        if (!s->snap->on_disk)
            continue;
        for (hx_node *a = s; a != &t->root && a->end > s->snap->from; a = a->parent)
            if (a->file == n)
                a->file = s;
    }
    for (hx_node *a = n; a != &t->root; a = next) {
        next = a->parent;
        if (a->file == n)
            a->file = NULL;
    }
}

/* Takes the snapshot off its node; the node stays. True when a file went with it, whose
 * pages may now be nowhere. */
static bool snap_free(hx_prefix_tree *t, hx_node *n)
{
    hx_snap *s = n->snap;
    const bool file = s->on_disk;

    while (s->pin > 0)
        hx_prefix_unpin(t, n);
    if (file) {
        if (t->gone != NULL)
            t->gone(t->gone_ud, n);
        forget_file(t, n);
    }
    set_state(n, NULL);
    if (s->prev != NULL)
        s->prev->snap->next = s->next;
    else
        t->snap = s->next;
    if (s->next != NULL)
        s->next->snap->prev = s->prev;
    n->snap = NULL;
    hx_free(s);
    t->stat.snaps--;
    return file;
}

/* n and all below it. */
static void drop_branch(hx_prefix_tree *t, hx_node *top)
{
    hx_node *n = top, *up;

    hx_assert(top != &t->root && top->busy == 0);
    up = top->parent;
    for (;;) {
        while (n->child != NULL)
            n = n->child;
        hx_node *parent = n->parent;
        const bool last = n == top;

        if (n->snap != NULL)
            snap_free(t, n);
        node_free(t, n);
        if (last)
            break;
        n = parent;
    }
    prune(t, up);
}

/* Branches of which a page is nowhere any more. Busy ones are their users' to end. */
static void drop_broken(hx_prefix_tree *t)
{
    hx_node *n = t->root.child;

    while (n != NULL) {
        if (n->page < 0 && n->host == NULL && n->file == NULL && n->busy == 0) {
            drop_branch(t, n);
            n = t->root.child; /* rare; a page that is lost costs another walk */
        } else {
            n = node_after(t, n);
        }
    }
}

void hx_prefix_remove(hx_prefix_tree *t, hx_node *n)
{
    hx_prefix_busy(n, 1);
    if (n->snap != NULL && snap_free(t, n))
        drop_broken(t);
    hx_prefix_busy(n, -1);
    prune(t, n);
}

void hx_prefix_lost_file(hx_prefix_tree *t, hx_node *n)
{
    forget_file(t, n);
    if (n->snap->state == NULL && n->busy == 0)
        hx_prefix_remove(t, n);
    drop_broken(t);
}

void hx_prefix_busy(hx_node *n, int32_t add)
{
    for (; n != NULL; n = n->parent) {
        n->busy += add;
        hx_assert(n->busy >= 0);
    }
}

void hx_prefix_pin(hx_prefix_tree *t, hx_node *n)
{
    for (hx_node *a = n; a != &t->root; a = a->parent) {
        hx_assert(a->page >= 0);
        hx_cache_page_hold(t->cache, a->page);
        t->pinned_pages++;
    }
    n->snap->pin++;
}

void hx_prefix_unpin(hx_prefix_tree *t, hx_node *n)
{
    for (hx_node *a = n; a != &t->root; a = a->parent) {
        hx_cache_page_unhold(t->cache, a->page);
        t->pinned_pages--;
    }
    n->snap->pin--;
}

/* ---- host memory ------------------------------------------------------- */

static hx_node *snap_above(const hx_prefix_tree *t, const hx_node *n)
{
    hx_node *a = n->parent;

    while (a != &t->root && a->snap == NULL)
        a = a->parent;
    return a == &t->root ? NULL : a;
}

/* Recency times the cost to have it again: tokens to compute per second since it was used;
 * reading a file costs about an eighth. */
static double value_of(const hx_prefix_tree *t, const hx_node *n, int64_t now)
{
    const hx_node *up = snap_above(t, n);
    const double age = (double)(now - n->snap->used_us) * 1e-6 + 1,
                 cost = (double)(n->end - (up != NULL ? up->end : 0));

    return cost / age / (n->snap->on_disk ? 8 : 1);
}

/* Does a branch that goes through n to one end have two states in memory behind n? It can be
 * gone on with, and its end edited, without n. */
static bool is_spare(const hx_node *n)
{
    int32_t behind = 0;

    while (n->child != NULL && n->child->next == NULL && behind < 2) {
        n = n->child;
        behind += n->snap != NULL && n->snap->state != NULL;
    }
    return behind == 2;
}

/* What is given up first: of states that their branches can spare, if there are any, the one
 * of least value, else of all. So a branch is never lost for another's third state, however
 * long ago it was used, and hx_cache_fit() is true. */
static hx_node *least_valued(const hx_prefix_tree *t)
{
    const int64_t now = hx_now_us();
    hx_node *best = NULL;
    double best_value = 0;
    bool best_spare = false;

    for (hx_node *n = t->snap; n != NULL; n = n->snap->next) {
        if (n->busy > 0 || n->snap->pin > 0 || is_held(t, n) ||
            (n->snap->state == NULL &&
             (n->host == NULL || n->warm > 0 || n->file == NULL)))
            continue;
        const bool spare = is_spare(n);
        const double v = value_of(t, n, now);

        if (best == NULL || spare > best_spare ||
            (spare == best_spare && v < best_value)) {
            best = n;
            best_value = v;
            best_spare = spare;
        }
    }
    return best;
}

/* What of n and above only it needed in host memory; its file keeps it. */
static void cool(hx_prefix_tree *t, hx_node *n)
{
    set_state(n, NULL);
    for (hx_node *a = n; a != &t->root && a->warm == 0; a = a->parent)
        if (a->file != NULL && a->busy == 0)
            set_host(t, a, NULL);
}

static void drop_redundant(hx_prefix_tree *t, int64_t bytes)
{
    for (hx_node *n = t->root.child; n != NULL && bytes > 0; n = node_after(t, n))
        if (n->page >= 0 && n->host != NULL && n->busy == 0) {
            bytes -= (int64_t)n->host->n;
            set_host(t, n, NULL);
        }
}

bool hx_prefix_room(hx_prefix_tree *t, uint64_t bytes)
{
    if (bytes > (uint64_t)t->host_max)
        return false;
    for (;;) {
        const int64_t over = atomic_load(&t->host) + (int64_t)bytes - t->host_max;
        hx_node *n;

        if (over <= 0)
            return true;
        if (t->redundant > 0) {
            drop_redundant(t, over);
            if (atomic_load(&t->host) + (int64_t)bytes <= t->host_max)
                return true;
        }
        if ((n = least_valued(t)) == NULL)
            return false;
        if (n->snap->on_disk)
            cool(t, n);
        else
            hx_prefix_remove(t, n);
    }
}

/* Copies n's page to host memory. */
static bool park_page(hx_prefix_tree *t, hx_node *n)
{
    hx_blob *b = NULL;

    n->busy++;
    if (hx_prefix_room(t, t->cache->page_bytes) || n->busy > 1)
        b = hx_blob_new(t->cache->page_bytes, &t->host);
    n->busy--;
    if (b == NULL || hx_cache_page_get(t->cache, n->page, b->p, NULL) != 0) {
        hx_blob_unref(b);
        return false;
    }
    set_host(t, n, b);
    t->stat.parked++;
    hx_count(HX_C_pages_parked_total, 1);
    return true;
}

int64_t hx_prefix_to_host(hx_prefix_tree *t, hx_node *n, const hx_node *from, int64_t max)
{
    int64_t missing = 0;

    for (hx_node *a = n; a != &t->root && a != from; a = a->parent) {
        if (a->page < 0 || a->host != NULL || a->file != NULL)
            continue;
        if (max > 0) {
            if (!park_page(t, a))
                return HX_ENOMEM;
            max--;
        } else {
            missing++;
        }
    }
    return missing;
}

/* ---- device pages ------------------------------------------------------ */

/* Longest unused first; of one path, from its end. */
static int by_age(const void *x, const void *y)
{
    const hx_node *a = *(hx_node *const *)x, *b = *(hx_node *const *)y;

    if (a->used_us != b->used_us)
        return a->used_us < b->used_us ? -1 : 1;
    return (a->end < b->end) - (a->end > b->end);
}

void hx_prefix_reclaim(hx_prefix_tree *t, int32_t n)
{
    const int32_t want = t->cache->n_free + n;
    int32_t have = 0;

    for (hx_node *a = t->root.child; a != NULL; a = node_after(t, a))
        if (a->page >= 0 && !is_held(t, a))
            t->scratch[have++] = a;
    if (have == 0)
        return;
    qsort(t->scratch, (size_t)have, sizeof(hx_node *), by_age);
    for (int32_t i = 0; i < have; i++)
        t->scratch[i]->at = i;
    for (int32_t i = 0; i < have && t->cache->n_free < want; i++) {
        hx_node *a = t->scratch[i];

        if (a == NULL)
            continue;
        /* A busy one is about to be used: its file will not do. */
        if (a->host == NULL && (a->file == NULL || a->busy > 0) && !park_page(t, a)) {
            if (a->busy == 0)
                drop_branch(t, a);
            continue;
        }
        set_page(t, a, -1);
    }
    for (int32_t i = 0; i < have; i++)
        if (t->scratch[i] != NULL)
            t->scratch[i]->at = -1;
}

static void reclaim(void *ud, int32_t n)
{
    hx_prefix_reclaim(ud, n);
}

int32_t hx_prefix_held(const hx_prefix_tree *t, const hx_node *n)
{
    int32_t held = 0;

    for (; n != &t->root; n = n->parent)
        held += n->n_token == HX_PAGE && is_held(t, n);
    return held;
}

bool hx_prefix_on_disk(const hx_node *n)
{
    if (n->snap->state == NULL)
        return true;
    for (; n->parent != NULL; n = n->parent)
        if (n->page < 0 && n->host == NULL)
            return true;
    return false;
}

/* The node's content in a page of the tree's own. */
static int restore_page(hx_prefix_tree *t, hx_node *n, hx_err *err)
{
    const int32_t page = hx_cache_page_take(t->cache);
    int rc;

    if (page < 0)
        return hx_fail(err, HX_ENOMEM, "sequence memory: no page for a kept prefix");
    if ((rc = hx_cache_page_put(t->cache, page, n->host->p, err)) != 0) {
        hx_cache_page_unref(t->cache, page);
        return rc;
    }
    set_page(t, n, page);
    t->stat.restored++;
    hx_count(HX_C_pages_restored_total, 1);
    return 0;
}

/* A page of the slot's own with the content of a node that is not full. */
static int copy_tail(hx_prefix_tree *t, const hx_node *n, int32_t slot, hx_err *err)
{
    hx_cache *c = t->cache;
    int rc;

    if ((rc = hx_cache_grow(c, slot, n->end, err)) != 0)
        return rc;
    const int32_t page = c->table[(int64_t)slot * c->max_page + n->end / HX_PAGE];

    return n->page >= 0 ? hx_cache_page_copy(c, n->page, page, err)
                        : hx_cache_page_put(c, page, n->host->p, err);
}

/* From the end on; each is held as soon as it is there, so that making room for the next
 * takes none of them. page [n->end / 64] gets the full ones. */
static int hold_path(hx_prefix_tree *t, hx_node *n, int32_t *page, hx_err *err)
{
    for (hx_node *a = n; a != &t->root; a = a->parent) {
        int rc;

        if (a->n_token < HX_PAGE)
            continue;
        if (a->page < 0 && (rc = restore_page(t, a, err)) != 0)
            return rc;
        hx_cache_page_hold(t->cache, a->page);
        page[a->end / HX_PAGE - 1] = a->page;
    }
    return 0;
}

static int attach_pages(hx_prefix_tree *t, hx_node *n, int32_t slot, hx_err *err)
{
    const int32_t full = (int32_t)(n->end / HX_PAGE);
    int32_t *page = hx_new(int32_t, full + 1);
    int rc;

    if (page == NULL)
        return hx_fail(err, HX_ENOMEM, "prefix tree: no memory for a list of %d pages",
                       full);
    for (int32_t i = 0; i < full; i++)
        page[i] = -1;
    if ((rc = hold_path(t, n, page, err)) == 0)
        rc = hx_cache_share(t->cache, slot, page, full, err);
    for (int32_t i = 0; i < full; i++)
        if (page[i] >= 0)
            hx_cache_page_unhold(t->cache, page[i]);
    hx_free(page);
    return rc == 0 && n->n_token < HX_PAGE ? copy_tail(t, n, slot, err) : rc;
}

int hx_prefix_attach(hx_prefix_tree *t, hx_node *n, int32_t slot, int64_t now,
                     hx_err *err)
{
    int rc;

    hx_assert(n->snap != NULL && n->snap->state != NULL);
    hx_prefix_busy(n, 1);
    if ((rc = attach_pages(t, n, slot, err)) == 0)
        rc = hx_cache_state_put(t->cache, slot, n->snap->state->p, n->snap->pend, err);
    hx_prefix_busy(n, -1);
    if (rc != 0) {
        hx_cache_clear(t->cache, slot);
        return rc;
    }
    t->cache->slot[slot].n_pos = n->end;
    n->snap->used_us = now;
    n->snap->no_file = false;
    for (hx_node *a = n; a != NULL; a = a->parent)
        a->used_us = now;
    return 0;
}

/* ---- finding ----------------------------------------------------------- */

static bool usable(const hx_node *n, const hx_prefix_query *q)
{
    if (n->snap == NULL || n->snap->hidden || (q->strict && !n->pure))
        return false;
    if (n->end == q->n)
        return n->snap->has_hidden;
    return n->n_token == HX_PAGE || (n->decoded >> (n->n_token - 1) & 1) != 0;
}

typedef struct {
    const hx_prefix_query *q;
    hx_prefix_match *out;
    const hx_node *deepest; /* full node whose tokens all agree */
    bool differs;           /* something kept has another token at known */
} finding;

static void note_child(finding *f, const hx_node *c, int64_t agree, int64_t rest)
{
    const int64_t known = c->end - c->n_token + agree;
    const bool differs = agree < HX_MIN(rest, c->n_token);

    if (known > f->out->known) {
        f->out->known = known;
        f->differs = differs;
    } else if (known == f->out->known) {
        f->differs |= differs;
    }
}

/* All paths that agree with the prompt: several where the same tokens were built in
 * different phases. */
static void find_below(finding *f, const hx_node *n)
{
    const hx_prefix_query *q = f->q;

    while (n != NULL) {
        const int64_t rest = q->n - n->end;
        const hx_node *down = NULL;

        for (hx_node *c = n->child; c != NULL; c = c->next) {
            const int64_t most = HX_MIN(rest, c->n_token);
            int64_t agree = 0;

            while (agree < most && c->token[agree] == q->token[n->end + agree])
                agree++;
            note_child(f, c, agree, rest);
            if (agree < c->n_token)
                continue;
            if (usable(c, q) &&
                (c->end > f->out->n || (c->end == f->out->n && c->pure))) {
                f->out->node = c;
                f->out->n = c->end;
            }
            if (c->n_token < HX_PAGE)
                continue;
            if (f->deepest == NULL || c->end > f->deepest->end)
                f->deepest = c;
            if (down == NULL)
                down = c;
            else
                find_below(f, c);
        }
        n = down;
    }
}

/* Was the page after the deepest that agrees given up? */
static bool was_given_up(const hx_prefix_tree *t, const finding *f)
{
    const hx_node *deepest = f->deepest != NULL ? f->deepest : &t->root;
    uint64_t path;

    if (f->q->n - deepest->end < HX_PAGE)
        return false;
    path = path_of(deepest->path, f->q->token + deepest->end, HX_PAGE);
    return t->ghost[path % HX_GHOST] == path;
}

hx_prefix_match hx_prefix_find(hx_prefix_tree *t, const hx_prefix_query *q)
{
    /* States so far back that their lack, not the difference, is what costs. */
    const int64_t far = 1024;
    hx_prefix_match m = { 0 };
    finding f = { .q = q, .out = &m };

    find_below(&f, &t->root);
    if (m.n == q->n)
        m.miss = HX_MISS_NONE;
    else if (m.known < q->n && was_given_up(t, &f))
        m.miss = HX_MISS_EVICTED;
    else if (m.known - m.n > far || m.known == q->n)
        m.miss = HX_MISS_NO_STATE;
    else
        m.miss = f.differs && m.known > 0 ? HX_MISS_DIFFERS : HX_MISS_NEW;
    return m;
}

/* ---- keeping ----------------------------------------------------------- */

/* The path of what the slot has, made where it is missing. NULL: no memory. */
static hx_node *path_for(hx_prefix_tree *t, const hx_prefix_have *h, int64_t now)
{
    const hx_cache *c = t->cache;
    const int32_t *table = c->table + (int64_t)h->slot * c->max_page;
    hx_node *n = &t->root;

    for (int64_t at = 0; at < h->n; at += HX_PAGE) {
        const int32_t n_token = (int32_t)HX_MIN(HX_PAGE, h->n - at);
        const uint64_t mask =
                           n_token == HX_PAGE ? UINT64_MAX : (UINT64_C(1) << n_token) - 1,
                       decoded = h->decoded[at / HX_PAGE] & mask;
        hx_node *next = child_like(t, n, h->token + at, n_token, decoded);

        if (next == NULL &&
            (next = node_new(t, n, h->token + at, n_token, decoded)) == NULL) {
            prune(t, n);
            return NULL;
        }
        if (next->page < 0) {
            hx_cache_page_ref(t->cache, table[at / HX_PAGE]);
            set_page(t, next, table[at / HX_PAGE]);
        }
        next->used_us = now;
        n = next;
    }
    return n;
}

static hx_blob *state_of(hx_prefix_tree *t, const hx_prefix_have *h)
{
    hx_cache *c = t->cache;

    if (h->state != NULL)
        return hx_blob_ref(h->state);
    const uint64_t n = hx_cache_state_bytes(c, c->slot[h->slot].pend);
    const size_t more = h->hidden != NULL ? t->hidden_bytes : 0;
    hx_blob *b = hx_prefix_room(t, n + more) ? hx_prefix_new_state(t, n + more) : NULL;

    if (b == NULL || hx_cache_state_get(c, h->slot, b->p, NULL) != 0) {
        hx_blob_unref(b);
        return NULL;
    }
    if (more > 0)
        memcpy(b->p + n, h->hidden, more);
    return b;
}

static hx_node *store(hx_prefix_tree *t, const hx_prefix_have *h, int64_t now)
{
    hx_node *n = path_for(t, h, now);
    hx_snap *s;
    hx_blob *state;

    if (n == NULL)
        return NULL;
    s = n->snap;
    if (s != NULL && (s->has_hidden || h->hidden == NULL)) { /* in memory or on disk */
        s->used_us = now;
        s->hidden &= h->only_parked;
        return n;
    }
    hx_prefix_busy(n, 1);
    state = state_of(t, h);
    hx_prefix_busy(n, -1);
    if (state == NULL || (s == NULL && (s = snap_new(t, n)) == NULL)) {
        hx_blob_unref(state);
        prune(t, n);
        return NULL;
    }
    /* A file that lacks the hidden row is of less use than the state now at hand. */
    if (s->on_disk && h->hidden != NULL && !s->has_hidden) {
        if (t->gone != NULL)
            t->gone(t->gone_ud, n);
        forget_file(t, n);
    }
    s->hidden =
        s->state == NULL && !s->on_disk ? h->only_parked : s->hidden && h->only_parked;
    set_state(n, state);
    s->pend = h->state != NULL ? 0 : t->cache->slot[h->slot].pend;
    s->has_hidden = h->hidden != NULL;
    s->used_us = now;
    return n;
}

hx_node *hx_prefix_store(hx_prefix_tree *t, const hx_prefix_have *h, int64_t now)
{
    hx_node *n = store(t, h, now);

    hx_blob_unref(h->state);
    return n;
}

void hx_prefix_thin(hx_prefix_tree *t, hx_node *n)
{
    int64_t kept = 0;
    hx_node *up;

    for (hx_node *c = snap_above(t, n); c != NULL; c = up) {
        up = snap_above(t, c);
        const bool parts = c->child != NULL && c->child->next != NULL,
                   needed = parts || c->busy > 0 || c->snap->pin > 0 ||
                            c->snap->on_disk || c->snap->hidden;

        if (up != NULL && kept >= HX_PAGE && n->end - up->end <= 2 * kept && !needed)
            snap_free(t, c);
        else
            kept = n->end - c->end;
    }
}

void hx_prefix_has_file(hx_prefix_tree *t, hx_node *n, hx_node *parent,
                        const hx_park_name *name)
{
    hx_snap *s = n->snap;

    s->on_disk = true;
    s->name = *name;
    s->from = parent != NULL ? parent->end : 0;
    t->stat.snaps_disk++;
    for (hx_node *a = n; a != &t->root && a->end > s->from; a = a->parent)
        a->file = n;
}

void hx_prefix_fill(hx_prefix_tree *t, hx_node *n, hx_blob *const *page, int64_t n_page,
                    hx_blob *state)
{
    const int64_t from = n->snap->from;

    for (hx_node *a = n; a != &t->root && a->end > from; a = a->parent) {
        const int64_t i = (a->end - 1 - from) / HX_PAGE;

        if (a->page < 0 && a->host == NULL && i < n_page)
            set_host(t, a, hx_blob_ref(page[i]));
    }
    for (int64_t i = 0; i < n_page; i++)
        hx_blob_unref(page[i]);
    if (n->snap->state == NULL && state != NULL)
        set_state(n, state);
    else
        hx_blob_unref(state);
}

hx_node *hx_prefix_add_disk(hx_prefix_tree *t, const hx_prefix_disk *d, int64_t used_us)
{
    hx_node *n = d->parent != NULL ? d->parent : &t->root;
    const int64_t from = n->end;
    hx_snap *s;

    for (int64_t at = from; at < d->n; at += HX_PAGE) {
        const int32_t n_token = (int32_t)HX_MIN(HX_PAGE, d->n - at);
        const int32_t *token = d->token + (at - from);
        const uint64_t decoded = d->decoded[(at - from) / HX_PAGE];
        hx_node *next = child_like(t, n, token, n_token, decoded);

        if (next == NULL && (next = node_new(t, n, token, n_token, decoded)) == NULL) {
            prune(t, n);
            return NULL;
        }
        next->used_us = HX_MAX(next->used_us, used_us);
        n = next;
    }
    s = n->snap;
    if (n == &t->root || from % HX_PAGE != 0 ||
        (s != NULL ? s->on_disk || s->hidden || s->pend != d->pend ||
                         s->has_hidden != d->has_hidden
                   : (s = snap_new(t, n)) == NULL)) {
        prune(t, n);
        return NULL;
    }
    s->pend = d->pend;
    s->has_hidden = d->has_hidden;
    s->used_us = HX_MAX(s->used_us, used_us);
    hx_prefix_has_file(t, n, d->parent, &d->name);
    for (hx_node *a = n; a != NULL; a = a->parent)
        a->used_us = HX_MAX(a->used_us, used_us);
    return n;
}

/* ---- the whole --------------------------------------------------------- */

void hx_prefix_forget(hx_prefix_tree *t)
{
    hx_node *next;

    t->quiet = true;
    for (hx_node *n = t->snap; n != NULL; n = n->snap->next)
        if (n->snap->on_disk) {
            if (t->gone != NULL)
                t->gone(t->gone_ud, n);
            n->snap->on_disk = false;
        }
    t->stat.snaps_disk = 0;
    for (hx_node *n = &t->root; n != NULL; n = node_after(t, n))
        n->file = NULL;
    for (hx_node *n = t->snap; n != NULL; n = next) {
        next = n->snap->next;
        if (n->busy > 0)
            continue;
        snap_free(t, n);
        prune(t, n);
    }
    drop_broken(t);
    t->quiet = false;
    memset(t->ghost, 0, HX_GHOST * sizeof *t->ghost);
}

int hx_prefix_open(hx_prefix_tree **out, struct hx_cache *c, uint64_t host_max,
                   size_t hidden_bytes, hx_err *err)
{
    hx_prefix_tree *t = hx_new(hx_prefix_tree, 1);

    *out = NULL;
    if (t == NULL || (t->ghost = hx_new(uint64_t, HX_GHOST)) == NULL) {
        hx_free(t);
        return hx_fail(err, HX_ENOMEM, "prefix tree: no memory");
    }
    const size_t state = (size_t)hx_cache_state_bytes(c, 1) + hidden_bytes;
    const int rc = state >= SPARE_BYTES ? hx_spare_open(&t->spare, state, err) : 0;
    if (rc != 0) {
        hx_free(t->ghost);
        hx_free(t);
        return rc;
    }
    t->cache = c;
    t->host_max = (int64_t)HX_MIN(host_max, (uint64_t)INT64_MAX / 2);
    t->hidden_bytes = hidden_bytes;
    t->root.pure = true;
    t->root.page = -1;
    t->root.at = -1;
    c->reclaim = reclaim;
    c->reclaim_ud = t;
    *out = t;
    return 0;
}

void hx_prefix_close(hx_prefix_tree *t)
{
    if (t == NULL)
        return;
    t->quiet = true;
    t->gone = NULL;
    t->root.busy = 0;
    for (hx_node *n = t->root.child; n != NULL; n = node_after(t, n))
        n->busy = 0;
    hx_prefix_forget(t);
    while (t->root.child != NULL)
        drop_branch(t, t->root.child);
    t->cache->reclaim = NULL;
    hx_spare_close(t->spare);
    hx_free(t->scratch);
    hx_free(t->bucket);
    hx_free(t->ghost);
    hx_free(t);
}
