/* ahead.c - experts that come before they are picked: the router of the next layer, on the
 * input of this one, names them, and they are fetched to a few slots of their own until that
 * layer's plan sees which were right (hx_dev_fetch, op plan). Only time depends on it, never
 * an answer. Called by store.c, and by layers.c in decode. */
#include "model/model.h"
#include "model/store.h"

/* With fewer slots for residents than so many times those for fetches, residents need
 * them more. */
#define RESIDENTS 3

int hx_ahead_open(hx_store *s, int64_t max_rows, hx_err *err)
{
    const size_t picks = (size_t)(max_rows * s->n_active) * sizeof(float);
    hx_ahead *to = &s->ahead.to;
    const struct {
        hx_buf *b;
        size_t bytes;
    } want[] = {
        { &to->slots, HX_AHEAD_SLOTS * s->record_bytes },
        { &to->state, sizeof(hx_ahead_state) },
        { &s->ahead.id, picks },
        { &s->ahead.w, picks },
        { &s->ahead.score, (size_t)(max_rows * s->n_expert) * sizeof(float) },
    };
    const hx_ahead_state none = { 0 };
    int rc;

    if (s->n_all_slot < (1 + RESIDENTS) * HX_AHEAD_SLOTS ||
        s->n_all_slot == s->n_moe * s->n_expert)
        return 0;
    s->n_all_slot -= HX_AHEAD_SLOTS;
    for (size_t i = 0; i < HX_LEN(want); i++)
        if ((rc = hx_dev_alloc(s->dev, want[i].b, want[i].bytes, err)) != 0)
            return rc;
    to->record_bytes = s->record_bytes;
    if ((rc = hx_dev_shared(s->dev, &s->ahead.shared, sizeof(hx_ahead_counts), err)) != 0)
        return rc;
    to->told = s->ahead.shared;
    return hx_dev_put(s->dev, to->state, &none, sizeof none, err);
}

void hx_ahead_close(hx_store *s)
{
    hx_dev_free(s->dev, &s->ahead.to.slots);
    hx_dev_free(s->dev, &s->ahead.to.state);
    hx_dev_free(s->dev, &s->ahead.id);
    hx_dev_free(s->dev, &s->ahead.w);
    hx_dev_free(s->dev, &s->ahead.score);
    hx_dev_unshared(s->dev, &s->ahead.shared);
}

void hx_ahead_report(const hx_store *s, hx_experts *out)
{
    const hx_ahead_counts *c = s->ahead.to.told.p;

    if (c == NULL)
        return;
    out->predicted = c->named;
    out->predicted_right = c->picked;
    out->fetch_bytes = (uint64_t)c->pieces * HX_AHEAD_PIECE;
    out->vain_bytes = (uint64_t)c->vain * HX_AHEAD_PIECE;
}

bool hx_ahead_after(const hx_store *s, int64_t layer)
{
    return s->ahead.to.slots.p != NULL && layer + 1 < s->n_layer &&
           s->model->layer[layer + 1].ffn == HX_FFN_MOE;
}

int hx_ahead_end(hx_store *s, int64_t layer, hx_err *err)
{
    return s->ahead.layer == layer ? hx_dev_fetched(s->dev, err) : 0;
}

int hx_ahead_fetch(hx_store *s, int64_t layer, int64_t rows, hx_buf id, hx_err *err)
{
    const size_t row = (size_t)((layer + 1) * s->n_expert);
    const hx_fetch_args a = { .id = id,
                              .resident = hx_buf_at(s->resident, row * sizeof(int32_t)),
                              .at = hx_buf_at(s->at, row * sizeof(hx_lease)),
                              .to = &s->ahead.to,
                              .rows = rows,
                              .active = s->n_active,
                              .n_expert = s->n_expert,
                              .layer = (int32_t)layer + 1 };
    const int rc = hx_dev_fetch(s->dev, &a, err);

    s->ahead.layer = rc == 0 ? layer + 1 : -1;
    return rc;
}
