/* cli.h - what the files of the command line share: parsed options and the commands. */
#ifndef HX_CLI_H
#define HX_CLI_H

#include <stdio.h>

#include "base/base.h"
#include "text/text.h"

/* Values of all options; which a command takes is a column of the table in main.c. */
typedef struct {
    const char *model;
    const char *what; /* bench ops|decode|prefill */
    const char *prompt, *ids, *out, *positions, *json;
    const char *host, *api_key, *served_name, *cors, *device, *isa, *cpus, *kv;
    int64_t port, ctx, threads, streams, queue, n, seed;
    uint64_t cache;
    double temp;
    double bits, head_bits; /* quantize */
    const char *codebook, *calib;
    int64_t calib_rows, calib_cols;
    bool half_rates, resume;
    bool has_temp, has_seed, raw, tensors, verify, official, help;
} hx_cli;

/* An engine with loading progress on stderr, and to also where that is not NULL. Prints
 * its own error. */
int cli_open_engine(hx_engine **out, const hx_cli *c, hx_load_fn *also, void *ud);
int cli_fail(const hx_err *err);          /* "hoist: sentence" on stderr; exit status 1 */
void cli_bytes(char out[32], uint64_t n); /* "1.5 GiB" */

/* Parses the answer to a prompt that ends in the id last; freed with hx_reply_close(). */
int cli_reply_open(hx_reply **out, hx_engine *e, int32_t last, hx_err *err);
/* Hands an event's tokens to the parser and what comes of them to sink. */
int cli_reply_feed(hx_reply *r, const hx_event *ev, hx_reply_sink *sink, void *ud,
                   hx_err *err);

int cmd_serve(const hx_cli *c);
int cmd_run(const hx_cli *c);
int cmd_chat(const hx_cli *c);
int cmd_logits(const hx_cli *c);
int cmd_inspect(const hx_cli *c);
int cmd_bench(const hx_cli *c);
int cmd_quantize(const hx_cli *c);

#endif
