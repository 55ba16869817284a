/* prefix.h - the prefix tree: which token sequences have pages and states in memory, and
 * in which.
 *
 * Part of model.h, which includes it. A node is one page of 64 tokens (a last one may have
 * fewer), found by comparing ids and, for each, the phase that built it: two equal keys
 * on equal paths have the same bits (numerics contract 3), so pages are shared freely. A
 * node may carry a snapshot, the recurrent state right after its last token; sequences go
 * on from snapshots only, so a branch without one is cut off. Content lies on the device,
 * in host memory, on disk, or several of these.
 *
 * Thread: the engine's, but for hx_blob_unref(). */
#ifndef HX_PREFIX_H
#define HX_PREFIX_H

#include "dev/dev.h"

struct hx_cache;

/* ---- host copies ------------------------------------------------------ */

/* Bytes that never change once made, shared by the tree and the thread that writes them. */
typedef struct {
    _Atomic int32_t ref;
    _Atomic int64_t *total; /* what counts them all, or NULL */
    struct hx_spare *spare; /* where its memory goes, or NULL */
    size_t n;
    uint8_t p[];
} hx_blob;

hx_blob *hx_blob_new(size_t n, _Atomic int64_t *total); /* not zeroed; NULL: no memory */
hx_blob *hx_blob_ref(hx_blob *b);
void hx_blob_unref(hx_blob *b); /* NULL is fine. Thread: any */

/* spare.c: memory for blobs of at most bytes, touched ahead. Close it after the last of them.
 * Thread: any. */
typedef struct hx_spare hx_spare;
int hx_spare_open(hx_spare **out, size_t bytes, hx_err *err);
void hx_spare_close(hx_spare *s);
hx_blob *hx_spare_take(hx_spare *s, size_t n); /* not filled in; NULL: none is ready */
void hx_spare_give(hx_spare *s, hx_blob *b);

/* ---- nodes ------------------------------------------------------------ */

typedef struct hx_node hx_node;

typedef struct {
    uint8_t b[32];
} hx_park_name; /* SHA-256 that names a file of park.c */

/* State after the node's last token, and what it takes to go on from it. */
typedef struct {
    hx_blob *state;  /* hx_cache_state_bytes(pend), then [hidden_bytes]; NULL: on disk */
    int32_t pend;    /* rows of the state that are pending */
    bool has_hidden; /* the last row after the last norm follows: logits can be had */
    bool hidden;     /* of a sequence that is only parked: matches nobody else's prompt */
    bool no_file;    /* too large, or a page is only in a file of another branch */
    bool reading;    /* from its file */
    bool on_disk;    /* under name; covers the nodes whose file is this one */
    int32_t pin;     /* times pinned by requests */
    int64_t used_us;
    hx_park_name name;
    int64_t from;         /* first position that the file covers */
    hx_node *prev, *next; /* all nodes with a snapshot */
} hx_snap;

struct hx_node {
    hx_node *parent, *child, *next; /* next: of the same parent */
    hx_node *same;                  /* next in its bucket */
    int64_t end;                    /* positions up to and with this node */
    int32_t token[HX_PAGE];
    int32_t n_token;
    uint64_t decoded; /* bit i: token i's row was a decode row, else prefill */
    bool pure;        /* no decode row from position 0 on */
    uint64_t path;    /* hash of the tokens from position 0 on, for ghosts */
    int32_t warm;     /* snapshots in host memory here and below */
    int32_t page;     /* on the device; -1: not there */
    hx_blob *host;    /* copy in host memory, or NULL */
    hx_node *file;    /* the snapshot whose file holds it, or NULL */
    int32_t busy;     /* somebody works with it: it stays, with what it has */
    int32_t at;       /* scratch of reclaiming */
    int64_t used_us;  /* never older than a child's */
    hx_snap *snap;    /* or NULL */
};

typedef struct {
    int64_t nodes, snaps, snaps_disk;  /* now */
    int64_t parked, restored, evicted; /* pages to host memory, back, given up; ever */
} hx_prefix_stat;

typedef struct {
    struct hx_cache *cache;
    hx_node root;         /* no tokens, end 0 */
    hx_node *snap;        /* list */
    _Atomic int64_t host; /* bytes of all blobs */
    int64_t host_max;
    int64_t redundant; /* bytes of host copies whose page is on the device too */
    int64_t pinned_pages;
    size_t hidden_bytes;
    hx_spare *spare;   /* memory of states, or NULL */
    uint64_t *ghost;   /* [HX_GHOST] paths that were given up, by their low bits */
    hx_node **scratch; /* [n_scratch] */
    hx_node **bucket;  /* [n_scratch] nodes by their path */
    int64_t n_scratch;
    bool quiet; /* no ghosts, not counted as evicted */
    hx_prefix_stat stat;
    /* A snapshot that is on disk leaves the tree. */
    void (*gone)(void *ud, hx_node *n);
    void *gone_ud;
} hx_prefix_tree;

#define HX_GHOST 8192

/* ---- the tree --------------------------------------------------------- */

/* host_max: bytes of snapshots and parked pages. Becomes the cache's reclaim. The cache
 * must outlive it. */
int hx_prefix_open(hx_prefix_tree **out, struct hx_cache *c, uint64_t host_max,
                   size_t hidden_bytes, hx_err *err);
void hx_prefix_close(hx_prefix_tree *t);
/* Memory for a state of n bytes, counted; NULL: none. */
hx_blob *hx_prefix_new_state(hx_prefix_tree *t, size_t n);

typedef struct {
    const int32_t *token;
    int64_t n;
    bool strict; /* only states that prefill built */
} hx_prefix_query;

typedef struct {
    hx_node *node; /* go on from its snapshot; NULL: from the start */
    int64_t n;     /* tokens that saves */
    int64_t known; /* tokens that agree with something kept */
    hx_miss miss;  /* why n is not more */
} hx_prefix_match;

/* The deepest snapshot that the prompt can go on from: at least one token before its end,
 * or at its end with the hidden row. A state inside a page that prefill built is used for
 * its very prompt only: the grid of 64 would shift. */
hx_prefix_match hx_prefix_find(hx_prefix_tree *t, const hx_prefix_query *q);

/* Pages on the way to n that running sequences hold already. */
int32_t hx_prefix_held(const hx_prefix_tree *t, const hx_node *n);
/* Does anything of n lie on disk only? */
bool hx_prefix_on_disk(const hx_node *n);

/* Gives an empty slot the pages and the state of n. now: hx_now_us(). Errors: HX_ENOMEM,
 * HX_EDEVICE; the slot is empty again. */
int hx_prefix_attach(hx_prefix_tree *t, hx_node *n, int32_t slot, int64_t now,
                     hx_err *err);

/* What a slot has computed. */
typedef struct {
    int32_t slot;
    const int32_t *token;    /* [n] */
    const uint64_t *decoded; /* [ceil(n / 64)] bit c % 64 of [c / 64]: position c */
    int64_t n;
    const float *hidden; /* the last row, or NULL */
    hx_blob *state;      /* at n, when the slot has gone on since; its reference is taken.
                          * No row is pending, hidden is NULL. NULL: the slot's */
    bool only_parked;    /* see hx_snap.hidden */
} hx_prefix_have;

/* Keeps the pages and the state of a slot. NULL: no room; nothing has changed then. */
hx_node *hx_prefix_store(hx_prefix_tree *t, const hx_prefix_have *h, int64_t now);

/* Thins the snapshots on the way to n: of those at distance d before it, the gaps grow
 * with d. Those that are pinned, busy or where branches part stay. */
void hx_prefix_thin(hx_prefix_tree *t, hx_node *n);

/* Copies the device pages of n's path that have neither host copy nor file to host memory, at
 * most max of them. Returns how many are still missing, or HX_ENOMEM when the budget is
 * full. from: only nodes above this one's end; NULL: all. */
int64_t hx_prefix_to_host(hx_prefix_tree *t, hx_node *n, const hx_node *from,
                          int64_t max);

void hx_prefix_busy(hx_node *n, int32_t add);      /* n and all on its way */
void hx_prefix_pin(hx_prefix_tree *t, hx_node *n); /* pages must be on the device */
void hx_prefix_unpin(hx_prefix_tree *t, hx_node *n);

/* Removes n's snapshot and what was kept for it alone. */
void hx_prefix_remove(hx_prefix_tree *t, hx_node *n);
/* n's file is no more: snapshots that cannot be read without it go. */
void hx_prefix_lost_file(hx_prefix_tree *t, hx_node *n);
/* n's file is there; it covers the positions from parent's end on (NULL: from 0). */
void hx_prefix_has_file(hx_prefix_tree *t, hx_node *n, hx_node *parent,
                        const hx_park_name *name);
/* The pages [n_page] of n's file, and its state or NULL, are in memory; takes the
 * references. */
void hx_prefix_fill(hx_prefix_tree *t, hx_node *n, hx_blob *const *page, int64_t n_page,
                    hx_blob *state);
/* All snapshots that nobody holds, pinned ones included. */
void hx_prefix_forget(hx_prefix_tree *t);
/* Makes room for so many bytes of blobs. */
bool hx_prefix_room(hx_prefix_tree *t, uint64_t bytes);
/* Gives up device pages until n more are free, or none is left. */
void hx_prefix_reclaim(hx_prefix_tree *t, int32_t n);

typedef struct {
    hx_node *parent;         /* NULL: the root */
    const int32_t *token;    /* [n - parent->end] */
    const uint64_t *decoded; /* one word for each page of them */
    int64_t n;
    int32_t pend;
    bool has_hidden;
    hx_park_name name;
} hx_prefix_disk;

/* Adds a snapshot that is on disk with what its file covers: tokens parent->end .. n.
 * Returns NULL when memory is short. */
hx_node *hx_prefix_add_disk(hx_prefix_tree *t, const hx_prefix_disk *d, int64_t used_us);

#endif
