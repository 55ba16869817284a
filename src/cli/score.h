/* score.h - what the files of `hoist score` share: scored positions and their statistics
 * (score_stats.c), plots (score_plot.c), needle and greedy probes (score_probe.c). */
#ifndef HX_SCORE_H
#define HX_SCORE_H

#include "cli/cli.h"

/* ---- statistics ------------------------------------------------------- */

/* One position whose next token two parties predicted. NAN where there is no number. */
typedef struct {
    float kl;    /* nats, reference from scored */
    float nll;   /* -log p(the token that follows) */
    int32_t doc; /* document: prompt or window */
    int32_t pos; /* position in it */
    bool same;   /* both have the same most likely token */
} score_point;

typedef struct {
    score_point *p;
    int64_t n, cap;
    bool bad; /* an append failed for want of memory */
} score_series;

void score_add(score_series *s, score_point p);

/* lo, hi: 95 % bootstrap interval; NAN where there are too few units. */
typedef struct {
    double value, lo, hi;
} score_stat;

typedef struct {
    int64_t n, n_kl, n_nll;
    score_stat kl, kl_p99, top1, perplexity;
    double kl_max;
    int64_t n_unit;     /* what was drawn anew, whole: documents, or blocks of one */
    int64_t unit_block; /* 0: documents; else positions of a block */
} score_summary;

#define SCORE_RESAMPLES 1000

/* Errors: HX_ENOMEM. */
int score_summarize(score_summary *out, const score_series *s, uint64_t seed,
                    hx_err *err);

/* Mean divergence of the positions from .. to of their documents. */
typedef struct {
    int32_t from, to;
    int64_t n;
    double kl;
} score_bin;

#define SCORE_BINS 28
int score_bins(score_bin out[SCORE_BINS], const score_series *s); /* how many */

/* Log of the sum of exponentials, and the first most likely id. */
double score_lse(const float *logit, int64_t n, int32_t *best);
/* KL(p || q) of two rows of logits and their score_lse(). */
double score_kl(const float *p, double lse_p, const float *q, double lse_q, int64_t n);
/* KL(p || q) over the k given ids, both renormalised over them; p and q are logits or
 * log-probabilities of the ids, -INFINITY where one gave none. */
double score_kl_top(const double *p, const double *q, int k);

void score_json_num(hx_sb *b, double v); /* null for NAN */
void score_json_stat(hx_sb *b, const char *name, const score_stat *s);

/* ---- plots ------------------------------------------------------------ */

typedef struct {
    const char *name;
    uint64_t bytes;
    const score_series *series;
    score_stat kl;
} score_line;

/* Divergence by position, a line a model; with several models also by their size. */
int score_plot(const char *path, const score_line *line, int n, hx_err *err);

/* ---- probes ----------------------------------------------------------- */

/* n_new greedy tokens after the prompt; out [n_new]; margin [n_new] between the two most
 * likely, in nats. *n_out: fewer where the answer ended. */
typedef struct {
    const int32_t *prompt;
    int64_t n_prompt, n_new;
    int32_t *out;
    float *margin;
} score_greedy_args;

int score_greedy(hx_engine *e, const score_greedy_args *a, int64_t *n_out, hx_err *err);

/* A code hidden in filler of about each of the lengths ("1000,8000") at five depths, then
 * asked for. Appends a JSON array to b and prints a line a length. */
int score_needle(hx_engine *e, const char *lengths, uint64_t seed, hx_sb *b, hx_err *err);

#endif
