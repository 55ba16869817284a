/* clock.h - which experts have a place in device memory: a CLOCK over slots whose hand
 * looks at how often experts were picked. Pure: arrays in, decisions out; no device, no
 * time. Used by store.c and, over recorded picks, by bench. */
#ifndef HX_CLOCK_H
#define HX_CLOCK_H

#include "base/base.h"

/* What a decode step may change: newcomers once all slots are taken, for a push takes link
 * time from the experts that are read in place; and experts looked at for it. */
#define HX_CLOCK_MOVES 16
#define HX_CLOCK_LOOKS 64

typedef struct {
    int64_t n_item;
    int32_t n_slot;  /* in use; may be lowered for a while and raised again */
    uint8_t *heat;   /* [n_item] picks, halved now and then */
    int32_t *slot;   /* [n_item] -1: none */
    int32_t *tenant; /* [n_slot] item, -1: free */
    int32_t hand;
    int64_t touches; /* since heat was halved */
} hx_clock;

int hx_clock_open(hx_clock *c, int64_t n_item, int32_t n_slot, hx_err *err);
void hx_clock_close(hx_clock *c);
/* The item was picked. */
void hx_clock_touch(hx_clock *c, int64_t item);
/* A slot for an item that has none: a free one; else that of a tenant picked clearly less
 * often, if the hand finds one nearby; else -1. Changes the hand only. */
int32_t hx_clock_find(hx_clock *c, int64_t item);
/* item moves into the slot; who was there has none any more (-1: none was). Returns him. */
int64_t hx_clock_put(hx_clock *c, int64_t item, int32_t slot);
/* The slot is free again. */
void hx_clock_clear(hx_clock *c, int32_t slot);

#endif
