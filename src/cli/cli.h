/* cli.h - what the files of the command line share: parsed options and the commands. */
#ifndef HX_CLI_H
#define HX_CLI_H

#include <stdio.h>

#include "base/base.h"
#include "text/text.h"

/* An option that may be there several times. */
typedef struct {
    const char *p[256];
    int32_t n;
} cli_list;

/* Values of all options; which a command takes is a column of the table in main.c. */
typedef struct {
    const char *model;
    const char *what;    /* bench ops|decode|prefill|serve|compare|trace */
    const char *more[8]; /* [n_more] further words: models, a folder, a file */
    int32_t n_more;
    const char *panel, *text, *against, *with, *needle, *plot, *write_panel, *lead;
    const char *protocol, *tokens, *files, *pull;
    int64_t window, greedy;
    const char *prompt, *ids, *out, *positions, *json;
    const char *host, *served_name, *cors, *device, *isa, *cpus, *kv;
    cli_list api_keys;
    const char *api_key_file, *admin_key, *unix_path, *tls_cert, *tls_key, *url, *home;
    const char *dump_dir, *record, *replay, *mixes, *trace, *slots;
    double decode_share;
    bool has_share, no_canary, quiet, log_prompts, verify_memory;
    int64_t key_streams, key_queue;
    int64_t port, ctx, threads, streams, queue, n, seed;
    uint64_t cache, vram, ram, park_ram, park_disk;
    const char *mode, *expert_us, *prefix, *park_dir;
    double temp;
    double bits, head_bits; /* quantize */
    const char *codebook, *calib;
    int64_t calib_rows, calib_cols;
    bool half_rates, resume;
    bool has_temp, has_seed, raw, tensors, verify, official, write, help, decode;
} hx_cli;

/* An engine with loading progress on stderr, and to also where that is not NULL. Prints
 * its own error. */
int cli_open_engine(hx_engine **out, const hx_cli *c, hx_load_fn *also, void *ud);
int cli_fail(const hx_err *err); /* "hoist: sentence" on stderr; exit status 1 */
int cli_write(const char *path, const hx_sb *b, hx_err *err); /* the whole file */
/* Before hours of work whose result goes there. 0; else it printed why. NULL is fine. */
int cli_try_write(const char *path);
void cli_bytes(char out[32], uint64_t n); /* "1.5 GiB" */
/* A line on stderr over the one before, cut to the terminal; " " clears it. Nothing where
 * nobody watches. */
void cli_progress(const char *fmt, ...) HX_PRINTF(1, 2);
/* How far a long prompt is: of each progress, and of the event that ends the stream. */
void cli_show_reading(const hx_event *ev);

/* Parses the answer to the prompt ids [n]; freed with hx_reply_close(). */
int cli_reply_open(hx_reply **out, hx_engine *e, const int32_t *ids, int64_t n,
                   hx_err *err);
/* Hands an event's tokens to the parser and what comes of them to sink. */
int cli_reply_feed(hx_reply *r, const hx_event *ev, hx_reply_sink *sink, void *ud,
                   hx_err *err);

/* The ids of one user message in the model's template, ready for the answer; closed: its
 * reasoning is closed at once. *ids is freed with hx_free(). */
int cli_chat_ids(hx_engine *e, const char *text, bool closed, int32_t **ids, int64_t *n,
                 hx_err *err);

/* What a decode step takes at least: the experts that are missing, by the best split of link
 * and CPU lane and by what host memory gives to both; and what is in GPU memory, by the rate
 * of copies. bound.c */
typedef struct {
    double lanes_ms, host_ms, gpu_ms;
    double ms;         /* in all: the longer of the first two, and the third */
    double link, lane; /* experts of that split */
    double gpu_mb;
    const char *limit;
} cli_bound;

/* here, missing: experts of a step. A cost or rate that is 0 was not measured or is not
 * there. */
cli_bound cli_step_bound(const hx_experts *x, double here, double missing);

int cmd_serve(const hx_cli *c);
int cmd_run(const hx_cli *c);
int cmd_chat(const hx_cli *c);
int cmd_logits(const hx_cli *c);
int cmd_inspect(const hx_cli *c);
int cmd_plan(const hx_cli *c);
int cmd_bench(const hx_cli *c);
int cmd_connect(const hx_cli *c);

/* replay.c: run --replay. */
int cli_replay(hx_engine *e, const hx_cli *c);
int cmd_quantize(const hx_cli *c);
int cmd_score(const hx_cli *c);
int cmd_pull(const hx_cli *c);

/* Fills the folder dir with the files of repo ("OWNER/NAME[@REV]") that match one of the
 * comma-separated patterns (NULL: all), going on where an earlier call stopped. fn may be
 * NULL; *stop, when it becomes true, ends it with HX_ECANCEL. pull.c */
typedef struct {
    const char *repo, *dir, *files;
    hx_load_fn *fn;
    void *ud;
    _Atomic bool *stop;
} hx_pull;

int cli_pull(const hx_pull *p, hx_err *err);
bool cli_pull_is_done(
    const char *dir); /* a model is there, and no download was cut off */
bool cli_pull_may_fill(const char *dir); /* absent, empty, or a pull was at work there */

#endif
