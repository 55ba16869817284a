/* trace.h - what routers picked, as a file, and what a cache would have made of it: written
 * by the store, one record a decode step; read and replayed by `hoist bench trace`.
 *
 * The file: one line of JSON, {"hoist_trace":1,"n_layer":L,"n_expert":E,"n_active":A,
 * "moe":[..]} (moe: the layers that have experts), then u16 numbers, little-endian: for
 * each step its rows R, then ids [moe layers][R][A]. An id of E or more is none. */
#ifndef HX_TRACE_H
#define HX_TRACE_H

#include <stdio.h>

#include "base/base.h"

typedef struct {
    int64_t n_layer, n_expert, n_active;
    int64_t n_moe;
    int32_t *moe; /* [n_moe] layers, ascending */
} hx_trace_shape;

/* Opens a file (its owner closes it, on failure too); appends a step to it. Ids are read
 * from log[layer * stride + row * A + a], their low 24 bits. Errors: HX_EIO, HX_ENOMEM. */
int hx_trace_begin(FILE **out, const char *path, const hx_trace_shape *s, hx_err *err);
int hx_trace_step(FILE *f, const hx_trace_shape *s, const int32_t *log, int64_t stride,
                  int64_t rows, hx_err *err);

/* A trace as a cache sees it: the distinct experts of each step, item = layer * E + id, in
 * the order of layers and picks. */
typedef struct {
    hx_trace_shape shape;
    int64_t n_step, n_pick; /* n_pick: before any is shared */
    int64_t *begin;         /* [n_step + 1] where a step's items are */
    int32_t *item;          /* [begin[n_step]] */
} hx_trace;

/* *out is freed with hx_trace_close(). Errors: HX_EFORMAT, HX_ENOMEM. */
int hx_trace_parse(hx_trace **out, hx_str bytes, hx_err *err);
void hx_trace_close(hx_trace *t); /* NULL is fine */

/* CLOCK is what the store does (clock.c, its limit of newcomers a step included). The others
 * may move any number of experts between two steps, but only such as were just read:
 * LRU keeps the last used; FIXED those with most uses in the measured steps; BELADY, with
 * bypass, those that are used again soonest: no cache that moves what it reads can have
 * more hits. */
#define HX_TRACE_POLICIES(X)                                                             \
    X(CLOCK, "CLOCK") X(LRU, "LRU") X(FIXED, "fixed set") X(BELADY, "optimum")
typedef enum {
#define X(name, text) HX_TRACE_##name,
    HX_TRACE_POLICIES(X)
#undef X
        HX_N_TRACE_POLICY
} hx_trace_policy;

const char *hx_trace_policy_name(hx_trace_policy p);

/* Of the steps from from on, the earlier ones warm up. Starts as the store does. */
typedef struct {
    int64_t items, hits, moves; /* items: distinct experts of the steps */
} hx_trace_result;

/* Errors: HX_EARG: slots or from out of range; HX_ENOMEM. */
int hx_trace_replay(const hx_trace *t, hx_trace_policy p, int32_t n_slot, int64_t from,
                    hx_trace_result *out, hx_err *err);

#endif
