/* cache.c - sequence memory: pages of latents and pooled index keys for MLA layers,
 * recurrent state for KDA layers, who owns which, and copies of both in host memory.
 *
 * All memory is taken at open; a slot is one sequence, a page 64 of its positions in
 * every MLA layer at once. Called by the engine thread only. Never looks at tokens:
 * which sequences share a page is the prefix tree's business (prefix.c). */
#include "dev/fmt_page.h"
#include "model/model.h"

/* Pooled keys are a ninth of what bf16 latents are beside FP8 ones, and errors of FP8
 * would change which positions are picked. */
static hx_cache_fmt pool_fmt(hx_cache_fmt fmt)
{
    return fmt == HX_CACHE_FP8 ? HX_CACHE_BF16 : fmt;
}

static uint64_t page_latent_bytes(const hx_desc *d, hx_cache_fmt fmt)
{
    return (uint64_t)hx_page_bytes(fmt, HX_PAGE, d->latent);
}

static uint64_t page_pool_bytes(const hx_desc *d, hx_cache_fmt fmt)
{
    return (uint64_t)hx_page_bytes(pool_fmt(fmt), HX_PAGE / d->pool_n, d->index_width);
}

/* Bytes per slot of the four KDA buffers and of the index ring, in f32. */
static uint64_t kda_state_bytes(const hx_desc *d)
{
    return 4 * (uint64_t)(d->kda_heads * d->kda_width * d->kda_width);
}

static uint64_t kda_pend_bytes(const hx_desc *d)
{
    return 4 * HX_PEND_MAX * (uint64_t)(d->kda_heads * (3 * d->kda_width + 1));
}

static uint64_t conv_row_bytes(const hx_desc *d)
{
    return 4 * 3 * (uint64_t)(d->kda_heads * d->kda_width);
}

static uint64_t ring_bytes(const hx_desc *d)
{
    return 4 * HX_RING * 2 * (uint64_t)d->index_width;
}

uint64_t hx_cache_page_bytes(const hx_desc *d, hx_cache_fmt fmt)
{
    uint64_t sum = 0;

    for (int64_t l = 0; l < d->n_layer; l++)
        if (d->mixer[l] == HX_MIX_MLA)
            sum += page_latent_bytes(d, fmt) + page_pool_bytes(d, fmt);
    return sum;
}

uint64_t hx_cache_slot_bytes(const hx_desc *d)
{
    uint64_t sum = 0;

    for (int64_t l = 0; l < d->n_layer; l++) {
        if (d->mixer[l] == HX_MIX_MLA)
            sum += ring_bytes(d);
        else
            sum += kda_state_bytes(d) + kda_pend_bytes(d) +
                   (uint64_t)(d->conv_taps - 1 + HX_PEND_MAX) * conv_row_bytes(d);
    }
    return sum;
}

static hx_pages pages_of(const hx_cache *c, hx_buf data, hx_cache_fmt fmt, int64_t width)
{
    return (hx_pages) { .data = data,
                        .fmt = fmt,
                        .n_page = c->n_page,
                        .width = width,
                        .table = c->table,
                        .max_page = c->max_page,
                        .table_dev = c->table_dev };
}

static int open_layer(hx_cache *c, const hx_desc *d, hx_layer_mem *m, hx_mixer mixer,
                      hx_cache_fmt fmt, hx_err *err)
{
    const uint64_t q = (uint64_t)c->n_slot, p = (uint64_t)c->n_page;
    hx_buf data;
    int rc;

    if (mixer == HX_MIX_MLA) {
        if ((rc = hx_dev_alloc(c->dev, &data, p * page_latent_bytes(d, fmt), err)) != 0)
            return rc;
        m->latent = pages_of(c, data, fmt, d->latent);
        if ((rc = hx_dev_alloc(c->dev, &data, p * page_pool_bytes(d, fmt), err)) != 0)
            return rc;
        m->pool = pages_of(c, data, pool_fmt(fmt), d->index_width);
        return hx_dev_alloc(c->dev, &m->ring, q * ring_bytes(d), err);
    }
    if ((rc = hx_dev_alloc(c->dev, &m->kda_state, q * kda_state_bytes(d), err)) != 0 ||
        (rc = hx_dev_alloc(c->dev, &m->kda_pend, q * kda_pend_bytes(d), err)) != 0 ||
        (rc = hx_dev_alloc(c->dev, &m->conv_state,
                           q * (uint64_t)(d->conv_taps - 1) * conv_row_bytes(d), err)) !=
            0)
        return rc;
    return hx_dev_alloc(c->dev, &m->conv_pend, q * HX_PEND_MAX * conv_row_bytes(d), err);
}

static void set_sizes(hx_cache *c, const hx_desc *d, hx_cache_fmt fmt)
{
    c->page_bytes = hx_cache_page_bytes(d, fmt);
    c->bytes = (uint64_t)c->n_page * c->page_bytes +
               (uint64_t)c->n_slot * hx_cache_slot_bytes(d);
    c->kda_bytes = kda_state_bytes(d);
    c->kda_row_bytes = kda_pend_bytes(d) / HX_PEND_MAX;
    c->conv_row_bytes = conv_row_bytes(d);
    c->conv_bytes = (uint64_t)(d->conv_taps - 1) * c->conv_row_bytes;
    c->ring_bytes = ring_bytes(d);
}

static void place_states(hx_cache *c)
{
    size_t at = 0;

    for (int64_t l = 0; l < c->n_layer; l++) {
        hx_layer_mem *m = &c->mem[l];

        m->state_at = at;
        m->kda_bytes = c->kda_bytes;
        m->conv_bytes = c->conv_bytes;
        at += m->kda_state.p == NULL ? c->ring_bytes : c->kda_bytes + c->conv_bytes;
    }
}

int hx_cache_open(hx_cache **out, const hx_desc *d, hx_dev *dev, int32_t n_slot,
                  int64_t ctx_tokens, int32_t n_page, hx_cache_fmt fmt, hx_err *err)
{
    const int64_t max_page = (ctx_tokens + HX_PAGE - 1) / HX_PAGE;
    hx_cache *c;
    int rc;

    *out = NULL;
    if (n_slot < 1 || n_page < 1 || max_page < 1 || max_page > INT32_MAX)
        return hx_fail(err, HX_EARG,
                       "sequence memory: %d slots, %d pages, %lld tokens of context; "
                       "each must be at least 1",
                       n_slot, n_page, (long long)ctx_tokens);
    if ((c = hx_new(hx_cache, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "sequence memory: no memory");
    c->dev = dev;
    c->n_layer = d->n_layer;
    c->n_slot = n_slot;
    c->n_page = n_page;
    c->max_page = (int32_t)max_page;
    set_sizes(c, d, fmt);
    c->mem = hx_new(hx_layer_mem, d->n_layer);
    c->slot = hx_new(hx_slot, n_slot);
    c->table = hx_new(int32_t, (size_t)n_slot * (size_t)max_page);
    c->free_page = hx_new(int32_t, n_page);
    c->ref = hx_new(int32_t, n_page);
    c->hold = hx_new(int32_t, n_page);
    c->bounce = hx_alloc(HX_MAX(c->page_bytes, 1));
    if (!c->mem || !c->slot || !c->table || !c->free_page || !c->ref || !c->hold ||
        !c->bounce) {
        rc = hx_fail(err, HX_ENOMEM, "sequence memory: no memory for its tables");
        goto fail;
    }
    for (int64_t i = 0; i < n_slot * max_page; i++)
        c->table[i] = -1;
    for (int32_t i = 0; i < n_page; i++)
        c->free_page[i] = n_page - 1 - i; /* page 0 is taken first */
    c->n_free = n_page;
    if ((rc = hx_dev_alloc(dev, &c->table_dev,
                           (size_t)(n_slot * max_page) * sizeof *c->table, err)) != 0 ||
        (rc = hx_dev_put(dev, c->table_dev, c->table, c->table_dev.n, err)) != 0)
        goto fail;
    for (int64_t l = 0; l < d->n_layer; l++)
        if ((rc = open_layer(c, d, &c->mem[l], (hx_mixer)d->mixer[l], fmt, err)) != 0)
            goto fail;
    place_states(c);
    *out = c;
    return 0;
fail:
    hx_cache_close(c);
    return rc;
}

void hx_cache_close(hx_cache *c)
{
    if (c == NULL)
        return;
    for (int64_t l = 0; c->mem != NULL && l < c->n_layer; l++) {
        hx_layer_mem *m = &c->mem[l];
        hx_buf *all[] = { &m->kda_state,   &m->kda_pend,  &m->conv_state, &m->conv_pend,
                          &m->latent.data, &m->pool.data, &m->ring };

        for (size_t i = 0; i < HX_LEN(all); i++)
            hx_dev_free(c->dev, all[i]);
    }
    hx_dev_free(c->dev, &c->table_dev);
    hx_free(c->mem);
    hx_free(c->slot);
    hx_free(c->table);
    hx_free(c->free_page);
    hx_free(c->ref);
    hx_free(c->hold);
    hx_free(c->bounce);
    hx_free(c);
}

int32_t hx_cache_take(hx_cache *c)
{
    for (int32_t s = 0; s < c->n_slot; s++)
        if (!c->slot[s].used) {
            c->slot[s] = (hx_slot) { .used = true };
            return s;
        }
    return -1;
}

/* Asked for at once: choosing them costs a walk over the tree. */
#define RECLAIM_PAGES 16

/* ---- pages ------------------------------------------------------------ */

int32_t hx_cache_page_take(hx_cache *c)
{
    int32_t page;

    if (c->n_free == 0 && c->reclaim != NULL)
        c->reclaim(c->reclaim_ud, RECLAIM_PAGES);
    if (c->n_free == 0)
        return -1;
    page = c->free_page[--c->n_free];
    hx_assert(c->ref[page] == 0 && c->hold[page] == 0);
    c->ref[page] = 1;
    return page;
}

void hx_cache_page_ref(hx_cache *c, int32_t page)
{
    hx_assert(c->ref[page] > 0);
    c->ref[page]++;
}

void hx_cache_page_unref(hx_cache *c, int32_t page)
{
    hx_assert(c->ref[page] > 0);
    if (--c->ref[page] > 0)
        return;
    hx_assert(c->hold[page] == 0);
    c->free_page[c->n_free++] = page;
}

void hx_cache_page_hold(hx_cache *c, int32_t page)
{
    c->n_held += c->hold[page]++ == 0;
}

void hx_cache_page_unhold(hx_cache *c, int32_t page)
{
    hx_assert(c->hold[page] > 0);
    c->n_held -= --c->hold[page] == 0;
}

void hx_cache_clear(hx_cache *c, int32_t slot)
{
    hx_slot *s = &c->slot[slot];
    int32_t *table = c->table + (int64_t)slot * c->max_page;

    for (int32_t i = 0; i < s->n_page; i++) {
        hx_cache_page_unhold(c, table[i]);
        hx_cache_page_unref(c, table[i]);
        table[i] = -1;
    }
    *s = (hx_slot) { .used = true };
}

void hx_cache_drop(hx_cache *c, int32_t slot)
{
    hx_cache_clear(c, slot);
    c->slot[slot].used = false;
}

/* Tells the device which pages the slot has from index had on. */
static int put_table(hx_cache *c, int32_t slot, int32_t had, hx_err *err)
{
    const int64_t row = (int64_t)slot * c->max_page;
    const int32_t n = c->slot[slot].n_page - had;

    if (n == 0)
        return 0;
    return hx_dev_put(c->dev,
                      hx_buf_at(c->table_dev, (size_t)(row + had) * sizeof *c->table),
                      c->table + row + had, (size_t)n * sizeof *c->table, err);
}

int hx_cache_share(hx_cache *c, int32_t slot, const int32_t *page, int32_t n, hx_err *err)
{
    hx_slot *s = &c->slot[slot];
    const int32_t had = s->n_page;

    hx_assert(had + n <= c->max_page);
    for (int32_t i = 0; i < n; i++) {
        hx_cache_page_ref(c, page[i]);
        hx_cache_page_hold(c, page[i]);
        c->table[(int64_t)slot * c->max_page + s->n_page++] = page[i];
    }
    return put_table(c, slot, had, err);
}

int hx_cache_grow(hx_cache *c, int32_t slot, int64_t n_pos, hx_err *err)
{
    hx_slot *s = &c->slot[slot];
    const int64_t want = (n_pos + HX_PAGE - 1) / HX_PAGE,
                  row = (int64_t)slot * c->max_page;
    const int32_t had = s->n_page;

    if (want > c->max_page)
        return hx_fail(err, HX_ELIMIT, "sequence of %lld tokens: the context holds %lld",
                       (long long)n_pos, (long long)c->max_page * HX_PAGE);
    while (s->n_page < want) {
        const int32_t page = hx_cache_page_take(c);

        if (page < 0)
            return hx_fail(err, HX_ENOMEM,
                           "sequence memory: all %d pages of %d tokens are in use",
                           c->n_page, HX_PAGE);
        hx_cache_page_hold(c, page);
        c->table[row + s->n_page++] = page;
    }
    return put_table(c, slot, had, err);
}

/* ---- copies in host memory -------------------------------------------- */

/* One page's bytes of one plane (latents or pooled keys of a layer). */
static hx_buf page_part(const hx_cache *c, const hx_pages *p, int32_t page)
{
    const size_t n = p->data.n / (size_t)c->n_page;

    return (hx_buf) { (char *)p->data.p + (size_t)page * n, n };
}

/* Moves a page's planes to or from host memory, layer by layer. */
static int page_move(hx_cache *c, int32_t page, char *host, bool in, hx_err *err)
{
    for (int64_t l = 0; l < c->n_layer; l++) {
        const hx_pages *plane[2] = { &c->mem[l].latent, &c->mem[l].pool };

        for (int i = 0; i < 2 && plane[i]->data.p != NULL; i++) {
            const hx_buf b = page_part(c, plane[i], page);
            const int rc = in ? hx_dev_put(c->dev, b, host, b.n, err)
                              : hx_dev_get(c->dev, host, b, b.n, err);

            if (rc != 0)
                return rc;
            host += b.n;
        }
    }
    return 0;
}

int hx_cache_page_get(hx_cache *c, int32_t page, void *out, hx_err *err)
{
    return page_move(c, page, out, false, err);
}

int hx_cache_page_put(hx_cache *c, int32_t page, const void *in, hx_err *err)
{
    /* page_move only reads from host memory on the way in. */
    return page_move(c, page, (char *)(uintptr_t)in, true, err);
}

int hx_cache_page_copy(hx_cache *c, int32_t from, int32_t to, hx_err *err)
{
    const int rc = page_move(c, from, c->bounce, false, err);

    return rc != 0 ? rc : page_move(c, to, c->bounce, true, err);
}

uint64_t hx_cache_state_bytes(const hx_cache *c, int32_t pend)
{
    uint64_t sum = 0;

    for (int64_t l = 0; l < c->n_layer; l++)
        sum += c->mem[l].kda_state.p == NULL
                   ? c->ring_bytes
                   : c->kda_bytes + c->conv_bytes +
                         (uint64_t)pend * (c->kda_row_bytes + c->conv_row_bytes);
    return sum;
}

void hx_cache_state_blank(const hx_cache *c, uint8_t *state)
{
    for (int64_t l = 0; l < c->n_layer; l++)
        if (c->mem[l].kda_state.p == NULL)
            memset(state + c->mem[l].state_at, 0, c->ring_bytes);
}

static int state_move(hx_cache *c, int32_t slot, char *host, int32_t pend, bool in,
                      hx_err *err)
{
    const size_t q = (size_t)slot;

    for (int64_t l = 0; l < c->n_layer; l++) {
        const hx_layer_mem *m = &c->mem[l];
        const struct {
            hx_buf all;
            size_t per_slot, n;
        } part[] = {
            { m->ring, c->ring_bytes, c->ring_bytes },
            { m->kda_state, c->kda_bytes, c->kda_bytes },
            { m->conv_state, c->conv_bytes, c->conv_bytes },
            { m->kda_pend, HX_PEND_MAX * c->kda_row_bytes,
              (size_t)pend * c->kda_row_bytes },
            { m->conv_pend, HX_PEND_MAX * c->conv_row_bytes,
              (size_t)pend * c->conv_row_bytes },
        };

        for (size_t i = 0; i < HX_LEN(part); i++) {
            if (part[i].all.p == NULL || part[i].n == 0)
                continue;
            const hx_buf b = hx_buf_at(part[i].all, q * part[i].per_slot);
            const int rc = in ? hx_dev_put(c->dev, b, host, part[i].n, err)
                              : hx_dev_get(c->dev, host, b, part[i].n, err);

            if (rc != 0)
                return rc;
            host += part[i].n;
        }
    }
    return 0;
}

int hx_cache_state_get(hx_cache *c, int32_t slot, void *out, hx_err *err)
{
    return state_move(c, slot, out, c->slot[slot].pend, false, err);
}

int hx_cache_state_put(hx_cache *c, int32_t slot, const void *in, int32_t pend,
                       hx_err *err)
{
    const int rc = state_move(c, slot, (char *)(uintptr_t)in, pend, true, err);

    if (rc == 0)
        c->slot[slot].pend = pend;
    return rc;
}
