/* pull.h - what the files of `hoist pull` share: one HTTP request (pull_net.c), files on disk
 * with their parts (pull_file.c). */
#ifndef HX_PULL_H
#define HX_PULL_H

#include <pthread.h>

#include "cli/cli.h"

/* ---- requests (pull_net.c) -------------------------------------------- */

typedef struct pull_net pull_net;

/* Loads libcurl. token may be NULL; it goes to the host of endpoint only. Errors: HX_EUNSUP
 * (no libcurl; how to get it). Thread: before any other starts. */
int pull_net_open(pull_net **out, const char *endpoint, const char *token, hx_err *err);
void pull_net_close(pull_net *n);

/* One GET. Bytes of a good answer go to sink, which may end it by returning false. */
typedef struct {
    const char *url;
    int64_t from, to; /* bytes asked for, to inclusive; from -1: all */
    bool (*sink)(void *ud, const void *p, size_t n);
    void *ud;
    const _Atomic bool *stop;

    /* answers */
    long status;        /* 0: none came */
    int64_t range_from; /* of Content-Range; -1: none */
    int64_t range_total;
    int64_t retry_after; /* seconds; 0: not said */
    bool ignored_range;  /* bytes from the start though a range was asked for */
    bool sink_ended;
    char next[1024]; /* Link: rel="next"; "" */
    char why[256];   /* what went wrong on the way; "" */
} pull_request;

/* Each thread has a connection of its own. */
void *pull_net_connection(pull_net *n); /* NULL: no memory */
void pull_net_disconnect(pull_net *n, void *connection);
/* True when a 2xx answer was received to its end or sink ended it. */
bool pull_net_get(pull_net *n, void *connection, pull_request *r);

/* ---- files (pull_file.c) ---------------------------------------------- */

#define PULL_PART_BYTES (64u << 20)

/* A file being filled: NAME.partial with its bytes and NAME.partial.map with how many bytes of
 * each part are there, so that a later run goes on. Guarded by the caller's lock, but for
 * pull_file_put() and pull_file_check(). */
typedef struct {
    char *name; /* below the folder, '/' between its parts */
    uint64_t size;
    char hash[65]; /* hex: SHA-256, or with 40 digits git's SHA-1 of a blob */
    int fd, map_fd;
    int64_t n_part;
    uint64_t *done; /* [n_part] bytes of each part, from its start */
    bool *busy;     /* [n_part] somebody fetches it */
    bool there;     /* NAME itself is there with this size: only to be checked */
    bool whole;     /* the server knows no ranges: one part, from the start each time */
    bool checking, finished;
    int damaged; /* times its hash was wrong */
    int32_t era; /* rises when the parts are laid out anew */
} pull_file;

uint64_t pull_file_part_len(const pull_file *f, int64_t part);
uint64_t pull_file_have(const pull_file *f); /* bytes on disk */
/* Looks what is there of f in dir. Errors: HX_ENOMEM, HX_EIO. */
int pull_file_look(pull_file *f, const char *dir, hx_err *err);
/* Opens the partial file for writing, once. Errors: HX_EIO. */
int pull_file_begin(pull_file *f, const char *dir, hx_err *err);
/* Bytes to their place. Errors: HX_EIO (disk full: says so). */
int pull_file_put(const pull_file *f, uint64_t at, const void *p, size_t n, hx_err *err);
void pull_file_note(const pull_file *f, int64_t part); /* done[part] to the map */
/* Starts anew; whole: as one part. */
int pull_file_restart(pull_file *f, bool whole, hx_err *err);
/* Reads NAME, or its partial file, and compares hashes. 1 same, 0 other, negative: HX_EIO. */
int pull_file_check(const pull_file *f, const char *dir, const _Atomic bool *stop,
                    char got[65], hx_err *err);
/* The partial file becomes NAME. */
int pull_file_finish(pull_file *f, const char *dir, hx_err *err);
void pull_file_close(pull_file *f);

#endif
