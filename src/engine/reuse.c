/* reuse.c - between requests and the prefix tree: what a new prompt goes on from, where
 * prefill must stop to leave a state, what a finished stream leaves, moving running
 * streams aside.
 *
 * Called by sched.c at admission, around chunks and at the end of streams, on the engine
 * thread; hx_unpin(), hx_forget() and hx_cache_fit() are hoist.h's and any thread's. Knows
 * neither layers nor readers. */
#include <stdlib.h>

#include "engine/engine.h"

#define PIN_SHARE 2       /* pins may keep this part of the pages from running requests */
#define LOOK_US   1000000 /* how often a call that waits looks whether the engine hangs */

/* A call of another thread, on its stack. */
typedef struct hx_asked {
    struct hx_asked *next;
    const int32_t *token; /* unpin; NULL: forget */
    int64_t n, answer;
    bool done;
} asked;

/* ---- open ------------------------------------------------------------- */

/* Messages begin at the ids that the chat template marks roles with. They are found in the
 * prompt itself, so that every API has them, plain completions included, and nothing must
 * be passed along; users cannot spell them (hx_render), and a false one costs a state. */
static void find_roles(hx_reuse *r, const hx_engine *e)
{
    static const char *const spelled[] = { "<|system|>", "<|user|>", "<|assistant|>",
                                           "<|observation|>" };

    for (size_t i = 0; e->tok != NULL && i < HX_LEN(spelled); i++) {
        const int32_t id = hx_tok_find(e->tok, hx_str_c(spelled[i]));

        if (id >= 0)
            r->role[r->n_role++] = id;
    }
}

/* Weights are in host memory, too, unless a GPU has them all; without one, sequence memory
 * is. */
static uint64_t default_ram_bytes(const hx_engine *e)
{
    const uint64_t all = hx_sys_mem_bytes(),
                   weights = hx_dev_is_host(e->dev) || e->model->store != NULL
                                 ? e->model->weight_bytes
                                 : 0,
                   taken = weights + (hx_dev_is_host(e->dev) ? e->cache->bytes : 0),
                   left = all > taken ? (all - taken) / 2 : 0;

    return HX_MAX(HX_MIN(HX_MIN(all / 8, left), UINT64_C(16) << 30), all / 64);
}

int hx_reuse_open(hx_engine *e, const hx_options *opt, hx_err *err)
{
    hx_reuse *r = e->reuse = hx_new(hx_reuse, 1);
    int rc;

    if (r == NULL)
        return hx_fail(err, HX_ENOMEM, "kept prefixes: no memory");
    hx_cond_init(&r->answered);
    r->mode = opt->prefix;
    r->ram_bytes = opt->park_ram_bytes != 0 ? opt->park_ram_bytes : default_ram_bytes(e);
    e->info.park_ram_bytes = r->mode != HX_PREFIX_OFF ? r->ram_bytes : 0;
    find_roles(r, e);
    if ((rc = hx_prefix_open(&r->tree, e->cache, r->ram_bytes,
                             (size_t)e->model->desc.width * sizeof(float), err)) != 0 ||
        opt->park_dir == NULL || opt->prefix == HX_PREFIX_OFF)
        return rc;
    return hx_reuse_disk_open(e, opt, err);
}

static void drop_snaps(hx_reuse *r)
{
    for (int32_t i = 0; i < r->n_snap; i++)
        hx_blob_unref(r->snap_blob[i]);
    r->n_snap = 0;
}

void hx_reuse_close(hx_engine *e)
{
    hx_reuse *r = e->reuse;

    if (r == NULL)
        return;
    drop_snaps(r);
    hx_reuse_disk_close(e);
    hx_prefix_close(r->tree);
    pthread_cond_destroy(&r->answered);
    hx_free(r);
    e->reuse = NULL;
}

/* ---- where prefill leaves states --------------------------------------- */

static int by_position(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static bool is_role(const hx_reuse *r, int32_t id)
{
    for (int32_t i = 0; i < r->n_role; i++)
        if (r->role[i] == id)
            return true;
    return false;
}

static void add_cut(hx_stream *s, int64_t at)
{
    at -= at % HX_PAGE;
    if (at > s->n_done && at < s->n_prompt && s->n_cut < HX_CUT_MAX)
        s->cut[s->n_cut++] = at;
}

/* States are dear (147 MB of the full model), and a chunk that ends early reads experts
 * once more. So: where the first two messages end (a shared system prompt); of the other
 * borders the last three (regenerate, edit the last message), then ever fewer with the
 * distance from the end; the grid point before the end; where another prompt went its own
 * way; and, for prompts whose reading is broken off, every doubling. */
static void plan_cuts(const hx_reuse *r, hx_stream *s, int64_t known)
{
    const int64_t n = s->n_prompt;
    int64_t last = -1, gap = 0;
    int32_t n_first = 0, n_last = 0, kept = 0;

    s->n_cut = 0;
    s->planned = true;
    for (int64_t i = 1; i < n && n_first < 2; i++)
        if (is_role(r, s->token[i]) && i >= HX_PAGE) {
            add_cut(s, i);
            n_first++;
        }
    for (int64_t i = n - 1; i > s->n_done; i--) {
        const int64_t at = i - i % HX_PAGE;

        if (!is_role(r, s->token[i]) || at == last || (n_last >= 3 && n - at < gap))
            continue;
        add_cut(s, at);
        last = at;
        n_last++;
        gap = 2 * (n - at);
    }
    for (int64_t at = 4096; at < n; at *= 2)
        add_cut(s, at);
    if (known - s->n_done >= 4 * HX_PAGE)
        add_cut(s, known);
    add_cut(s, n);
    qsort(s->cut, (size_t)s->n_cut, sizeof *s->cut, by_position);
    for (int32_t i = 0; i < s->n_cut; i++)
        if (kept == 0 || s->cut[kept - 1] != s->cut[i])
            s->cut[kept++] = s->cut[i];
    s->n_cut = kept;
}

int64_t hx_reuse_rows(const hx_stream *s, int64_t max)
{
    int64_t end = s->n_done + max;

    if (end >= s->n_prompt)
        end = s->n_prompt;
    else
        end -= end % HX_PAGE;
    return end - s->n_done;
}

/* ---- what a prompt goes on from ---------------------------------------- */

static bool asks(const hx_engine *e, const hx_stream *s)
{
    return e->reuse->mode != HX_PREFIX_OFF && s->score == NULL;
}

static bool leaves(const hx_engine *e, const hx_stream *s)
{
    return asks(e, s) && !s->req.no_store;
}

static hx_prefix_match find(hx_engine *e, const hx_stream *s)
{
    const hx_prefix_query q = { .token = s->token,
                                .n = s->n_prompt,
                                .strict = e->reuse->mode == HX_PREFIX_STRICT };

    return asks(e, s) ? hx_prefix_find(e->reuse->tree, &q)
                      : (hx_prefix_match) { .miss = HX_MISS_OFF };
}

int64_t hx_reuse_pages_left(const hx_engine *e)
{
    int64_t left = e->cache->n_page - e->cache->n_held;

    for (int32_t i = 0; i < e->n_run; i++)
        left -= e->run[i]->pages - e->cache->slot[e->run[i]->slot].n_page;
    return left;
}

/* Are there n_pages, those of n among them? */
static bool has_pages(const hx_engine *e, int32_t n_pages, const hx_node *n)
{
    const int32_t held = n != NULL ? hx_prefix_held(e->reuse->tree, n) : 0;

    return n_pages - held <= hx_reuse_pages_left(e);
}

/* Pins must not keep a request waiting when nothing else does. */
static void release_pins(hx_engine *e)
{
    hx_prefix_tree *t = e->reuse->tree;

    hx_log(HX_LOG_WARN, "pinned prefixes: %lld pages released, a request needs them",
           (long long)t->pinned_pages);
    for (hx_node *n = t->snap; n != NULL; n = n->snap->next)
        while (n->snap->pin > 0)
            hx_prefix_unpin(t, n);
}

static void set_cached(hx_stream *s, int64_t cached, hx_miss miss, int64_t miss_pos)
{
    pthread_mutex_lock(&s->engine->lock);
    s->cached = s->prefilled = cached;
    s->miss = miss;
    s->miss_pos = miss_pos;
    pthread_mutex_unlock(&s->engine->lock);
}

/* The phases of the positions that n's path holds. */
static void take_phases(hx_stream *s, const hx_node *n)
{
    for (; n->parent != NULL; n = n->parent)
        s->decoded[(n->end - 1) / HX_PAGE] = n->decoded;
}

static size_t row_bytes(const hx_engine *e)
{
    return (size_t)e->model->desc.width * sizeof(float);
}

static bool has_last_row(const hx_engine *e, hx_stream *s)
{
    if (s->last_row == NULL)
        s->last_row = hx_alloc(row_bytes(e));
    return s->last_row != NULL;
}

/* Keeps n's hidden row with s: n may go before it is used. */
static bool take_last_row(const hx_engine *e, hx_stream *s, const hx_node *n)
{
    if (!has_last_row(e, s))
        return false;
    memcpy(s->last_row, n->snap->state->p + hx_cache_state_bytes(e->cache, n->snap->pend),
           row_bytes(e));
    return true;
}

/* Fills s's empty slot from m; without it, or when that fails, s begins at 0. */
static void go_on_from(hx_engine *e, hx_stream *s, const hx_prefix_match *m)
{
    hx_err err = { 0 };

    s->n_done = 0;
    if (m->node != NULL && (m->n < s->n_prompt || take_last_row(e, s, m->node))) {
        if (hx_prefix_attach(e->reuse->tree, m->node, s->slot, hx_now_us(), &err) == 0) {
            s->n_done = m->n;
            take_phases(s, m->node);
            hx_reuse_disk_used(e, m->node);
        } else {
            hx_log(HX_LOG_WARN, "kept prefix of %lld tokens not used: %s",
                   (long long)m->n, err.msg);
        }
    }
    set_cached(s, s->n_done, m->miss, m->miss == HX_MISS_NONE ? m->n : m->known);
}

/* The state that was moved aside is in a slot again, or is wanted no more. */
static void unpark(hx_engine *e, hx_stream *s)
{
    hx_prefix_tree *t = e->reuse->tree;
    hx_node *n = s->parked;

    s->parked = NULL;
    hx_prefix_busy(n, -1);
    if (n->snap->hidden) {
        t->quiet = true;
        hx_prefix_remove(t, n);
        t->quiet = false;
    }
}

static bool admit_parked(hx_engine *e, hx_stream *s, int32_t n_pages)
{
    hx_prefix_tree *t = e->reuse->tree;
    hx_node *n = s->parked;

    if (!has_pages(e, n_pages, n) || (s->slot = hx_cache_take(e->cache)) < 0)
        return false;
    if (hx_prefix_attach(t, n, s->slot, hx_now_us(), NULL) != 0) {
        hx_cache_drop(e->cache, s->slot);
        s->slot = -1;
        return false;
    }
    unpark(e, s);
    return true;
}

hx_admit hx_reuse_admit(hx_engine *e, hx_stream *s, int32_t n_pages)
{
    hx_prefix_match m;

    if (s->parked != NULL)
        return admit_parked(e, s, n_pages) ? HX_ADMIT_YES : HX_ADMIT_NO;
    m = find(e, s);
    if (!has_pages(e, n_pages, m.node) && e->n_run == 0 && e->reuse->n_reading == 0 &&
        e->reuse->tree->pinned_pages > 0)
        release_pins(e);
    if (!has_pages(e, n_pages, m.node))
        return HX_ADMIT_NO;
    if (m.node != NULL && hx_prefix_on_disk(m.node)) {
        if (hx_reuse_disk_load(e, m.node) || e->reuse->n_reading > 0)
            return HX_ADMIT_READING; /* or others are, which have the memory now */
        m.node = NULL;               /* no memory for it: from the start, then */
    }
    if ((s->slot = hx_cache_take(e->cache)) < 0)
        return HX_ADMIT_NO;
    go_on_from(e, s, &m);
    return HX_ADMIT_YES;
}

void hx_reuse_begin(hx_engine *e, hx_stream *s)
{
    hx_prefix_match m;

    if (s->planned)
        return;
    m = find(e, s);
    if (m.n > s->n_done && !hx_prefix_on_disk(m.node)) {
        hx_cache_clear(e->cache, s->slot);
        go_on_from(e, s, &m);
    }
    if (leaves(e, s))
        plan_cuts(e->reuse, s, m.known);
    s->planned = true;
    if (asks(e, s)) {
        hx_count(HX_C_prefix_queries_total, s->n_prompt);
        hx_count(HX_C_prefix_hits_total, s->cached);
        if (s->miss == HX_MISS_NONE)
            hx_log(HX_LOG_INFO, "prompt of %lld tokens: all kept",
                   (long long)s->n_prompt);
        else
            hx_log(HX_LOG_INFO, "prompt of %lld tokens: %lld kept; %s at %lld",
                   (long long)s->n_prompt, (long long)s->cached, hx_miss_name(s->miss),
                   (long long)s->miss_pos);
    }
}

int hx_reuse_logits(hx_engine *e, hx_stream *s, hx_err *err)
{
    return hx_graph_head(e->prefill, s->last_row, err);
}

/* Figures for other threads. */
static void publish(hx_engine *e)
{
    hx_reuse *r = e->reuse;
    const hx_cache *c = e->cache;

    atomic_store(&r->pages_kept, c->n_page - c->n_free - c->n_held);
    atomic_store(&r->states, r->tree->stat.snaps);
    atomic_store(&r->ram, atomic_load(&r->tree->host));
    atomic_store(&r->disk, r->park != NULL ? (int64_t)hx_park_bytes(r->park) : 0);
}

/* ---- what streams leave ------------------------------------------------- */

static hx_node *keep(hx_engine *e, hx_stream *s, const float *hidden, bool only_parked)
{
    const hx_prefix_have h = { .slot = s->slot,
                               .token = s->token,
                               .decoded = s->decoded,
                               .n = s->n_done,
                               .hidden = hidden,
                               .only_parked = only_parked };

    return hx_prefix_store(e->reuse->tree, &h, hx_now_us());
}

static void pin(hx_engine *e, hx_node *n)
{
    hx_prefix_tree *t = e->reuse->tree;
    const int64_t pages = (n->end + HX_PAGE - 1) / HX_PAGE;

    if ((t->pinned_pages + pages) * PIN_SHARE > e->cache->n_page)
        hx_log(
            HX_LOG_WARN,
            "prefix of %lld tokens not pinned: %lld of %d pages are, at most half can be",
            (long long)n->end, (long long)t->pinned_pages, e->cache->n_page);
    else
        hx_prefix_pin(t, n);
}

void hx_reuse_chunk_begin(hx_engine *e, hx_stream *s, hx_batch *b)
{
    const uint64_t bytes = hx_cache_state_bytes(e->cache, 0);
    hx_reuse *r = e->reuse;

    drop_snaps(r); /* of a chunk that failed */
    hx_assert(b->rows.n_span == 1);
    for (int32_t i = 0; i < s->n_cut && r->n_snap < HX_SNAP_MAX; i++) {
        const int64_t row = s->cut[i] - s->n_done;
        hx_blob *blob;

        if (row <= 0 || row >= b->rows.n_row)
            continue;
        if (!hx_prefix_room(r->tree, bytes) ||
            (blob = hx_prefix_new_state(r->tree, bytes)) == NULL)
            break;
        hx_cache_state_blank(e->cache, blob->p);
        r->snap_blob[r->n_snap] = blob;
        r->snap[r->n_snap++] = (hx_snap_at) { .row = (int32_t)row, .state = blob->p };
    }
    b->snap = r->snap;
    b->n_snap = r->n_snap;
}

/* States kept inside the chunk that has just ended at n_done. */
static void keep_snaps(hx_engine *e, hx_stream *s)
{
    hx_reuse *r = e->reuse;
    const int64_t first = s->n_done - e->chunk_rows;

    for (int32_t i = 0; i < r->n_snap; i++) {
        const hx_prefix_have h = { .slot = s->slot,
                                   .token = s->token,
                                   .decoded = s->decoded,
                                   .n = first + r->snap[i].row,
                                   .state = r->snap_blob[i] };

        hx_prefix_store(r->tree, &h, hx_now_us());
    }
    r->n_snap = 0;
}

void hx_reuse_chunk_end(hx_engine *e, hx_stream *s)
{
    if (!leaves(e, s))
        return;
    keep_snaps(e, s);
    if (s->n_done == s->n_prompt) {
        s->state_due = has_last_row(e, s) &&
                       hx_dev_get(e->dev, s->last_row, hx_graph_hidden(e->prefill),
                                  row_bytes(e), NULL) == 0;
        return;
    }
    for (int32_t i = 0; i < s->n_cut; i++)
        if (s->cut[i] == s->n_done)
            keep(e, s, NULL, false);
}

/* The state at the prompt's end, which the slot still has. */
static void settle(hx_engine *e, hx_stream *s)
{
    hx_node *n;

    if (!s->state_due)
        return;
    s->state_due = false;
    hx_assert(s->n_done == s->n_prompt);
    n = keep(e, s, s->last_row, false);
    if (n != NULL && s->req.pin)
        pin(e, n);
}

void hx_reuse_settle(hx_engine *e)
{
    for (int32_t i = 0; i < e->n_run; i++)
        settle(e, e->run[i]);
}

void hx_reuse_decoded(hx_stream *s)
{
    const int64_t at = s->n_done - 1;

    s->decoded[at / HX_PAGE] |= UINT64_C(1) << (at % HX_PAGE);
}

void hx_reuse_end(hx_engine *e, hx_stream *s, bool whole)
{
    hx_prefix_tree *t = e->reuse->tree;
    hx_node *n = NULL;

    if (s->parked != NULL)
        unpark(e, s);
    if (s->slot < 0)
        return;
    if (e->chunk == s)
        drop_snaps(e->reuse);
    if (whole)
        settle(e, s);
    if (whole && leaves(e, s) && s->n_done > s->cached)
        n = keep(e, s, NULL, false);
    hx_cache_drop(e->cache, s->slot);
    s->slot = -1;
    if (n != NULL)
        hx_prefix_thin(t, n);
    publish(e);
}

bool hx_reuse_park(hx_engine *e, hx_stream *s)
{
    hx_prefix_tree *t = e->reuse->tree;
    hx_node *n;

    settle(e, s);
    if (s->n_token == s->n_prompt && s->n_done == s->cached) { /* nothing to lose */
        s->n_done = 0;
        s->planned = false;
    } else {
        if ((n = keep(e, s, NULL, !leaves(e, s))) == NULL)
            return false;
        hx_prefix_busy(n, 1);
        if (n->snap->state == NULL || hx_prefix_to_host(t, n, NULL, INT64_MAX) != 0) {
            hx_prefix_busy(n, -1);
            if (n->snap->hidden)
                hx_prefix_remove(t, n);
            return false;
        }
        s->parked = n;
    }
    hx_cache_drop(e->cache, s->slot);
    s->slot = -1;
    hx_count(HX_C_preemptions_total, 1);
    return true;
}

/* ---- other threads ------------------------------------------------------ */

static bool path_is(const hx_node *n, const int32_t *token)
{
    for (; n->parent != NULL; n = n->parent)
        if (memcmp(n->token, token + (n->end - n->n_token),
                   (size_t)n->n_token * sizeof *token) != 0)
            return false;
    return true;
}

static int64_t answer(hx_engine *e, const asked *a)
{
    hx_prefix_tree *t = e->reuse->tree;
    const int64_t had = t->stat.snaps;
    int64_t n_pin = 0;

    if (a->token == NULL) {
        hx_prefix_forget(t);
        hx_reuse_disk_forget(e);
        return had - t->stat.snaps;
    }
    for (hx_node *n = t->snap; n != NULL; n = n->snap->next)
        if (n->end == a->n && n->snap->pin > 0 && path_is(n, a->token)) {
            hx_prefix_unpin(t, n);
            n_pin++;
        }
    return n_pin;
}

/* Under lock: a is nobody's any more. False where the engine thread has it. */
static bool take_back(hx_reuse *r, const asked *a)
{
    for (asked **at = &r->first; *at != NULL; at = &(*at)->next)
        if (*at == a) {
            *at = a->next;
            return true;
        }
    return false;
}

/* Has the engine thread answer a, unless it hangs. */
static int ask(hx_engine *e, asked *a, hx_err *err)
{
    hx_reuse *r = e->reuse;
    int rc = 0;

    pthread_mutex_lock(&e->lock);
    a->next = r->first;
    r->first = a;
    hx_engine_nudge(e);
    while (!a->done && rc == 0) {
        hx_cond_until(&r->answered, &e->lock, hx_now_us() + LOOK_US);
        if (!a->done && atomic_load(&e->health.stalled) && take_back(r, a))
            rc = hx_fail(err, HX_EDEVICE, "engine: %s", hx_health_fault(e, NULL));
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

int hx_unpin(hx_engine *e, const int32_t *tokens, int64_t n, hx_err *err)
{
    asked a = { .token = tokens, .n = n };
    const int rc = ask(e, &a, err);

    return rc != 0 || a.answer > 0
               ? rc
               : hx_fail(err, HX_EARG, "no pinned prefix of these %lld tokens",
                         (long long)n);
}

int64_t hx_forget(hx_engine *e, hx_err *err)
{
    asked a = { .n = 0 };
    const int rc = ask(e, &a, err);

    return rc != 0 ? rc : a.answer;
}

void hx_reuse_tick(hx_engine *e)
{
    hx_reuse *r = e->reuse;
    asked *a;

    pthread_mutex_lock(&e->lock);
    a = r->first;
    r->first = NULL;
    pthread_mutex_unlock(&e->lock);
    while (a != NULL) {
        asked *next = a->next;

        a->answer = answer(e, a);
        publish(e);
        pthread_mutex_lock(&e->lock);
        a->done = true;
        pthread_cond_broadcast(&r->answered);
        pthread_mutex_unlock(&e->lock);
        a = next;
    }
    hx_reuse_disk_tick(e);
    publish(e);
}

int64_t hx_reuse_due_us(const hx_engine *e)
{
    return e->reuse->first != NULL ? 0 : hx_reuse_disk_due_us(e);
}

void hx_reuse_status(const hx_engine *e, hx_status *out)
{
    const hx_reuse *r = e->reuse;

    out->pages_kept = atomic_load(&r->pages_kept);
    out->states = atomic_load(&r->states);
    out->ram_bytes = (uint64_t)atomic_load(&r->ram);
    out->disk_bytes = (uint64_t)atomic_load(&r->disk);
}

/* Each is counted with two states: where it ends, and one before, to fall back to; a third
 * never costs another its second. Beside these there is room for what one prompt makes at a
 * time. */
hx_fit hx_cache_fit(hx_engine *e, int64_t n_tokens)
{
    const hx_info *i = &e->info;
    const uint64_t pages = (uint64_t)(HX_MAX(n_tokens, 1) + HX_PAGE - 1) / HX_PAGE,
                   state = hx_cache_state_bytes(e->cache, 1) + row_bytes(e),
                   chunk = (uint64_t)i->chunk_tokens / HX_PAGE,
                   making = HX_MIN(HX_MIN(chunk, pages), HX_SNAP_MAX) + 1,
                   all = pages * e->cache->page_bytes + 2 * state,
                   ram = i->park_ram_bytes - HX_MIN(i->park_ram_bytes, making * state),
                   here = HX_MIN((uint64_t)e->cache->n_page / pages, ram / (2 * state));

    return (hx_fit) { .here = (int64_t)here,
                      .in_ram = (int64_t)((ram - here * 2 * state) / all),
                      .on_disk = (int64_t)(i->park_disk_bytes / all) };
}

const char *hx_miss_name(hx_miss m)
{
    static const char *const name[] = { "none",    "new",      "differs",
                                        "evicted", "no state", "off" };

    return (size_t)m < HX_LEN(name) ? name[m] : "unknown";
}
