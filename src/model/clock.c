/* clock.c - see clock.h. */
#include "model/clock.h"

#define REACH      16 /* slots that the hand looks at for one newcomer */
#define TOUCH_MEAN 12 /* picks of an average item between two halvings */

int hx_clock_open(hx_clock *c, int64_t n_item, int32_t n_slot, hx_err *err)
{
    *c = (hx_clock) { .n_item = n_item, .n_slot = n_slot };
    c->heat = hx_new(uint8_t, n_item);
    c->slot = hx_new(int32_t, n_item);
    c->tenant = hx_new(int32_t, HX_MAX(n_slot, 1));
    if (c->heat == NULL || c->slot == NULL || c->tenant == NULL) {
        hx_clock_close(c);
        return hx_fail(err, HX_ENOMEM, "expert cache: no memory for %lld experts",
                       (long long)n_item);
    }
    for (int64_t i = 0; i < n_item; i++)
        c->slot[i] = -1;
    for (int32_t i = 0; i < n_slot; i++)
        c->tenant[i] = -1;
    return 0;
}

void hx_clock_close(hx_clock *c)
{
    hx_free(c->heat);
    hx_free(c->slot);
    hx_free(c->tenant);
    *c = (hx_clock) { 0 };
}

void hx_clock_touch(hx_clock *c, int64_t item)
{
    if (c->heat[item] < UINT8_MAX)
        c->heat[item]++;
    if (++c->touches < TOUCH_MEAN * c->n_item)
        return;
    c->touches = 0;
    for (int64_t i = 0; i < c->n_item; i++)
        c->heat[i] /= 2;
}

int32_t hx_clock_find(hx_clock *c, int64_t item)
{
    const int32_t reach = HX_MIN(REACH, c->n_slot);
    int32_t best = -1;
    int coldest = c->heat[item] - 1; /* a clear difference, not a tie */

    if (c->heat[item] < 2) /* the second pick admits */
        coldest = -1;
    for (int32_t i = 0; i < reach; i++) {
        const int32_t at = c->hand;

        c->hand = (c->hand + 1) % c->n_slot;
        if (c->tenant[at] < 0)
            return at;
        if (c->heat[c->tenant[at]] < coldest) {
            coldest = c->heat[c->tenant[at]];
            best = at;
        }
    }
    return best;
}

int64_t hx_clock_put(hx_clock *c, int64_t item, int32_t slot)
{
    const int64_t was = c->tenant[slot];

    if (was >= 0)
        c->slot[was] = -1;
    c->tenant[slot] = (int32_t)item;
    c->slot[item] = slot;
    return was;
}

void hx_clock_clear(hx_clock *c, int32_t slot)
{
    if (c->tenant[slot] >= 0)
        c->slot[c->tenant[slot]] = -1;
    c->tenant[slot] = -1;
}
