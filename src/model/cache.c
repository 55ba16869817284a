/* cache.c - sequence memory: pages of latents and pooled index keys for MLA layers,
 * recurrent state for KDA layers, and who owns which.
 *
 * All memory is taken at open; a slot is one sequence, a page 64 of its positions in
 * every MLA layer at once. Called by the engine thread only. Never looks at tokens. */
#include "model/model.h"

static uint64_t cache_elem_bytes(hx_cache_fmt fmt)
{
    return fmt == HX_CACHE_F32 ? 4 : 2;
}

static uint64_t page_latent_bytes(const hx_desc *d, hx_cache_fmt fmt)
{
    return HX_PAGE * (uint64_t)d->latent * cache_elem_bytes(fmt);
}

static uint64_t page_pool_bytes(const hx_desc *d, hx_cache_fmt fmt)
{
    return HX_PAGE / (uint64_t)d->pool_n * (uint64_t)d->index_width *
           cache_elem_bytes(fmt);
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
        m->pool = pages_of(c, data, fmt, d->index_width);
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
    c->bytes = (uint64_t)n_page * hx_cache_page_bytes(d, fmt) +
               (uint64_t)n_slot * hx_cache_slot_bytes(d);
    c->mem = hx_new(hx_layer_mem, d->n_layer);
    c->slot = hx_new(hx_slot, n_slot);
    c->table = hx_new(int32_t, (size_t)n_slot * (size_t)max_page);
    c->free_page = hx_new(int32_t, n_page);
    if (!c->mem || !c->slot || !c->table || !c->free_page) {
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

void hx_cache_drop(hx_cache *c, int32_t slot)
{
    hx_slot *s = &c->slot[slot];
    int32_t *table = c->table + (int64_t)slot * c->max_page;

    for (int32_t i = 0; i < s->n_page; i++) {
        c->free_page[c->n_free++] = table[i];
        table[i] = -1;
    }
    *s = (hx_slot) { 0 };
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
        if (c->n_free == 0)
            return hx_fail(err, HX_ENOMEM,
                           "sequence memory: all %d pages of %d tokens are in use",
                           c->n_page, HX_PAGE);
        c->table[row + s->n_page++] = c->free_page[--c->n_free];
    }
    if (s->n_page == had)
        return 0;
    return hx_dev_put(
        c->dev, hx_buf_at(c->table_dev, (size_t)(row + had) * sizeof *c->table),
        c->table + row + had, (size_t)(s->n_page - had) * sizeof *c->table, err);
}
