/* cuda_pages.h - sequence memory as kernels see it: pages, and the positions that a row
 * attends. Included by cuda_attn.cu and cuda_mla.cu. */
#ifndef HX_CUDA_PAGES_H
#define HX_CUDA_PAGES_H

#include "dev/cuda_dev.h"
#include "dev/fmt_page.h"

typedef struct {
    void *data;
    const int32_t *table; /* [Q, max_page] */
    int64_t max_page;
    int width, f32, fp8;
} page_args;

static int pages_of(page_args *out, const hx_pages *g, const char *op, hx_err *err)
{
    if (g->table_dev.p == NULL && g->max_page > 0)
        return hx_fail(err, HX_EARG, "%s: the page table is not on the device", op);
    if (g->width > INT16_MAX)
        return hx_fail(err, HX_EUNSUP, "%s: pages of width %lld, cuda takes up to %d", op,
                       (long long)g->width, INT16_MAX);
    *out = page_args {
        g->data.p,     (const int32_t *)g->table_dev.p, g->max_page,
        (int)g->width, g->fmt == HX_CACHE_F32,          g->fmt == HX_CACHE_FP8
    };
    return 0;
}

/* Where item i of a slot begins, in values of the page memory; per items in a page. */
HX_DEVICE int64_t page_item(const page_args &g, int slot, int i, int per)
{
    const int64_t page = g.table[slot * g.max_page + i / per];

    return page * per * (g.width + g.fp8) + i % per * g.width;
}

/* Where the scale byte of a latent of FP8 lies, that is item i of its slot and begins at
 * item. */
HX_DEVICE int64_t page_scale(const page_args &g, int64_t item, int i)
{
    return item + (HX_PAGE - i % HX_PAGE) * (int64_t)g.width + i % HX_PAGE;
}

/* What mla_attend was given of picks. */
typedef struct {
    const int32_t *pick, *n_pick; /* pick NULL: all positions */
    int64_t k_pick;
    int pool_n;
} pick_args;

static inline pick_args picks_of(const hx_mla_attend_args *a)
{
    return pick_args { (const int32_t *)a->pick.p, (const int32_t *)a->n_pick.p,
                       a->k_pick, (int)a->pool_n };
}

/* The positions that a row attends, in ascending order: pool_n of each pick, then the
 * tail. */
struct position_list {
    const int32_t *pick; /* NULL: all */
    int slot, pool_n, n_picked, seen, tail0, n;
};

HX_DEVICE position_list positions_of(const pick_args &a, const hx_cuda_spans &spans,
                                     int64_t row)
{
    const hx_span s = hx_span_of_row(spans, row);
    const int len = s.n_row == 0 ? 0 : s.pos0 + (int)(row - s.row0) + 1;
    position_list l = { NULL, s.slot, 1, 0, 0, 0, len };

    if (a.pick != NULL) {
        l.pool_n = a.pool_n;
        l.seen = len / a.pool_n;
        l.pick = a.pick + row * a.k_pick;
        /* what lies on the device is checked here, not in ops.c */
        if (len > 0)
            l.n_picked = max(0, min(a.n_pick[row], (int)min(a.k_pick, (int64_t)l.seen)));
        l.n_picked *= a.pool_n;
        l.tail0 = l.seen * a.pool_n;
        l.n = l.n_picked + len - l.tail0;
    }
    return l;
}

HX_DEVICE int position_at(const position_list &l, int i)
{
    if (l.pick == NULL)
        return i;
    if (i < l.n_picked)
        return max(0, min(l.pick[i / l.pool_n], l.seen - 1)) * l.pool_n + i % l.pool_n;
    return l.tail0 + (i - l.n_picked);
}

#endif
