/* park.h - kept states and pages as files of a folder.
 *
 * Part of model.h, which includes it. One file holds what lies between two snapshots of the
 * prefix tree: ids, phases, pages, and the state at its end; its name is the SHA-256 of its
 * head, which holds the checksums of the rest and the name of the file before it.
 *
 *   head    256 bytes: magic "HOISTPRK", u32 version, u32 flags (1: hidden row), identity
 *           [32], name of the file before [32], i64 from, i64 n, u32 pend, u32 0, u64
 *           page_bytes, u64 n_page, u64 state_bytes, zeros
 *           u64 decoded [n_page]; i32 id [n - from]; u128 XXH3 of each page and of the
 *           state
 *   pages   [n_page][page_bytes]
 *   state   [state_bytes]
 *
 * All little-endian. A file appears under its name only when all of it is on disk. The
 * process that has the folder's lock writes and deletes; others read until that ends.
 * Thread: the engine's; the files are read and written by a thread of park.c. */
#ifndef HX_PARK_H
#define HX_PARK_H

#include "model/prefix.h"

typedef struct hx_park hx_park;

/* What touches the disk; tests put failing ones here. */
typedef struct {
    int64_t (*read)(int fd, void *p, size_t n, int64_t at);
    int64_t (*write)(int fd, const void *p, size_t n);
    int (*sync)(int fd);
    int (*rename)(int dir, const char *from, const char *to);
    int (*lock)(int fd);
} hx_park_sys;

typedef struct {
    const char *dir; /* made when it is not there */
    uint64_t disk_bytes, day_bytes;
    uint8_t identity[32]; /* of model, build and formats: only such files are read */
    size_t page_bytes;
    void (*wake)(void *ud); /* called on the thread when there is something to poll */
    void *wake_ud;
    const hx_park_sys *sys; /* NULL: the system's */
} hx_park_opt;

typedef struct {
    hx_park_name name, parent; /* parent: zeros when from is 0 */
    int64_t from, n;           /* positions */
    int32_t pend;
    bool has_hidden;
    const int32_t *token;    /* [n - from] */
    const uint64_t *decoded; /* [ceil((n - from) / 64)] */
    uint64_t state_bytes;
    int64_t age_us; /* since it was last used */
} hx_park_head;

/* Everything that a kept state depends on: config, weights (sizes and samples of every
 * file), this program, and text for the rest. Errors: HX_EIO, HX_ENOMEM. */
int hx_park_identify(uint8_t out[32], const char *model_dir, const char *text,
                     hx_err *err);

/* Looks through the folder: corrupt files of ours and leftovers go, others are left alone;
 * one log line says how many. Errors: HX_EIO, HX_ENOMEM. */
int hx_park_open(hx_park **out, const hx_park_opt *opt, hx_err *err);
void hx_park_close(hx_park *p); /* ends what is queued first. NULL is fine */
/* False: another process writes there, or this one may not; do not write. What is deleted is
 * only forgotten then. */
bool hx_park_is_ours(const hx_park *p);

/* What a look found, those before others first; until hx_park_found_end(). */
int64_t hx_park_n_found(const hx_park *p);
const hx_park_head *hx_park_found(const hx_park *p, int64_t i); /* NULL: no more */
/* Its i, or below 0: there is no such file, or it is there and cannot be used now. */
enum { HX_PARK_NONE = -1, HX_PARK_UNUSED = -2 };
int64_t hx_park_find(const hx_park *p, const hx_park_name *name);
void hx_park_found_end(hx_park *p);
/* Of no use to this run, but it stays: the first to go when room is needed. */
void hx_park_disown(hx_park *p, const hx_park_name *name);

/* A look comes by itself when another process has written, or no longer does. */
typedef enum { HX_PARK_WRITE, HX_PARK_READ, HX_PARK_LOOK } hx_park_kind;

typedef struct {
    hx_park_kind kind;
    int rc; /* of a read, HX_EFORMAT: the file is corrupt or gone */
    void *ud;
    hx_park_name name;
    /* of a read: the caller takes the references */
    hx_blob **page; /* [n_page], freed with hx_free() */
    int64_t n_page;
    hx_blob *state;
    hx_err err;
} hx_park_done;

/* Will a file of so many bytes fit the cap and today's budget? */
bool hx_park_fits_day(hx_park *p, uint64_t bytes);
bool hx_park_fits_disk(const hx_park *p, uint64_t bytes);
/* Deletes the oldest file of another model or build, or of no use; false: there is none. */
bool hx_park_drop_foreign(hx_park *p);
uint64_t hx_park_bytes(const hx_park *p); /* on disk now */
uint64_t hx_park_file_bytes(const hx_park *p, const hx_park_head *h);

/* Queues a file: head but for its name, blobs of the pages and of the state, whose
 * references are taken. False: no memory; they are taken then too. */
bool hx_park_write(hx_park *p, const hx_park_head *h, hx_blob *const *page,
                   hx_blob *state, void *ud);
/* Queues reading; state: that too, not only the pages. total: counts the blobs. */
bool hx_park_read(hx_park *p, const hx_park_name *name, bool state,
                  _Atomic int64_t *total, void *ud);
void hx_park_touch(hx_park *p, const hx_park_name *name); /* it was used now */
void hx_park_delete(hx_park *p, const hx_park_name *name);
/* A finished write or read, or a look. wait: until there is one, if any is queued. */
bool hx_park_poll(hx_park *p, hx_park_done *out, bool wait);

#endif
