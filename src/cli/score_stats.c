/* score_stats.c - numbers of `hoist score`: divergences of two distributions, means and
 * quantiles of many positions with bootstrap intervals. Called by score.c; knows no engine
 * and prints nothing.
 *
 * Positions of one text depend on each other, so an interval draws whole documents anew,
 * or, where there are fewer than MIN_DOCS of them, blocks of BLOCK positions. */
#include <math.h>
#include <stdlib.h>

#include "cli/score.h"

enum { MIN_DOCS = 8, BLOCK = 64 };

/* ---- one row ------------------------------------------------------------ */

double score_lse(const float *logit, int64_t n, int32_t *best)
{
    double sum = 0;
    int64_t at = 0;

    for (int64_t i = 1; i < n; i++)
        if (logit[i] > logit[at])
            at = i;
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)logit[i] - (double)logit[at]);
    if (best != NULL)
        *best = (int32_t)at;
    return (double)logit[at] + log(sum);
}

double score_kl(const float *p, double lse_p, const float *q, double lse_q, int64_t n)
{
    double kl = 0;

    for (int64_t i = 0; i < n; i++) {
        const double a = (double)p[i] - lse_p;

        kl += exp(a) * (a - ((double)q[i] - lse_q));
    }
    return HX_MAX(kl, 0.0); /* rounding */
}

double score_kl_top(const double *p, const double *q, int k)
{
    double np = 0, nq = 0, kl = 0;

    /* The published scorer's floor for an id that the other side does not give. */
    for (int i = 0; i < k; i++) {
        np += exp(p[i]);
        nq += HX_MAX(exp(q[i]), 1e-30);
    }
    for (int i = 0; i < k; i++) {
        const double a = exp(p[i]) / np, b = HX_MAX(exp(q[i]), 1e-30) / nq;

        if (a > 0)
            kl += a * log(a / b);
    }
    return kl;
}

/* ---- many positions ------------------------------------------------------ */

void score_add(score_series *s, score_point p)
{
    if (s->n == s->cap && !s->bad) {
        const int64_t cap = HX_MAX(1024, s->cap * 2);
        score_point *q = hx_realloc(s->p, (size_t)cap * sizeof *q);

        s->bad = q == NULL;
        if (q != NULL) {
            s->p = q;
            s->cap = cap;
        }
    }
    if (!s->bad)
        s->p[s->n++] = p;
}

/* Sums over one unit. */
typedef struct {
    double kl, nll;
    int64_t n, n_kl, n_nll, same;
} unit;

typedef struct {
    float kl;
    int32_t unit;
} ranked;

static int by_kl_falling(const void *a, const void *b)
{
    const float x = ((const ranked *)a)->kl, y = ((const ranked *)b)->kl;

    return (x < y) - (x > y);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static int64_t count_docs(const score_series *s)
{
    int64_t n = 0;

    for (int64_t i = 0; i < s->n; i++)
        n += i == 0 || s->p[i].doc != s->p[i - 1].doc;
    return n;
}

/* Adds every point to its unit; points of a document are neighbours. rank may be NULL. */
static int64_t fill_units(const score_series *s, int64_t block, unit *u, ranked *rank)
{
    int64_t at = -1, in = 0, k = 0;

    for (int64_t i = 0; i < s->n; i++, in++) {
        const score_point *p = &s->p[i];

        if (i == 0 || p->doc != s->p[i - 1].doc || (block > 0 && in == block)) {
            at++;
            in = 0;
        }
        u[at].n++;
        u[at].same += p->same;
        if (!isnan(p->kl)) {
            u[at].kl += (double)p->kl;
            u[at].n_kl++;
            rank[k++] = (ranked) { p->kl, (int32_t)at };
        }
        if (!isnan(p->nll)) {
            u[at].nll += (double)p->nll;
            u[at].n_nll++;
        }
    }
    return at + 1;
}

/* kl such that at most 1 % of the weight lies above it. */
static double p99(const ranked *r, int64_t n, const int32_t *weight, int64_t total)
{
    const double above = 0.01 * (double)total;
    int64_t sum = 0;

    for (int64_t i = 0; i < n; i++) {
        sum += weight[r[i].unit];
        if ((double)sum > above)
            return (double)r[i].kl;
    }
    return NAN;
}

typedef struct {
    double kl, kl_p99, top1, perplexity;
} estimate;

static estimate estimate_of(const unit *u, const int32_t *weight, int64_t n_unit,
                            const ranked *rank, int64_t n_rank)
{
    unit t = { 0 };

    for (int64_t i = 0; i < n_unit; i++) {
        t.kl += u[i].kl * weight[i];
        t.nll += u[i].nll * weight[i];
        t.n += u[i].n * weight[i];
        t.n_kl += u[i].n_kl * weight[i];
        t.n_nll += u[i].n_nll * weight[i];
        t.same += u[i].same * weight[i];
    }
    return (estimate) { .kl = t.n_kl > 0 ? t.kl / (double)t.n_kl : NAN,
                        .kl_p99 = p99(rank, n_rank, weight, t.n_kl),
                        .top1 = t.n_kl > 0 ? (double)t.same / (double)t.n : NAN,
                        .perplexity = t.n_nll > 0 ? exp(t.nll / (double)t.n_nll) : NAN };
}

static score_stat interval(double value, double *draw, int64_t n_unit)
{
    score_stat s = { value, NAN, NAN };

    if (n_unit < 2 || isnan(value))
        return s;
    qsort(draw, SCORE_RESAMPLES, sizeof *draw, by_value);
    s.lo = draw[SCORE_RESAMPLES / 40];
    s.hi = draw[SCORE_RESAMPLES - 1 - SCORE_RESAMPLES / 40];
    return s;
}

static void resample(score_summary *out, const unit *u, int32_t *weight,
                     const ranked *rank, double *draw[4], uint64_t seed)
{
    const int64_t n = out->n_unit;
    uint64_t counter = 0;
    estimate e;

    for (int b = 0; b < SCORE_RESAMPLES; b++) {
        memset(weight, 0, (size_t)n * sizeof *weight);
        for (int64_t i = 0; i < n; i++)
            weight[hx_rng_at(seed, counter++) % (uint64_t)n]++;
        e = estimate_of(u, weight, n, rank, out->n_kl);
        draw[0][b] = e.kl;
        draw[1][b] = e.kl_p99;
        draw[2][b] = e.top1;
        draw[3][b] = e.perplexity;
    }
    for (int64_t i = 0; i < n; i++)
        weight[i] = 1;
    e = estimate_of(u, weight, n, rank, out->n_kl);
    out->kl = interval(e.kl, draw[0], n);
    out->kl_p99 = interval(e.kl_p99, draw[1], n);
    out->top1 = interval(e.top1, draw[2], n);
    out->perplexity = interval(e.perplexity, draw[3], n);
}

int score_summarize(score_summary *out, const score_series *s, uint64_t seed, hx_err *err)
{
    const int64_t docs = count_docs(s), max_unit = docs + s->n / BLOCK + 1;
    unit *u = hx_new(unit, max_unit);
    ranked *rank = hx_new(ranked, s->n + 1);
    int32_t *weight = hx_new(int32_t, max_unit);
    double *draw = hx_new(double, 4 * SCORE_RESAMPLES);
    double *each[4] = { draw, draw + SCORE_RESAMPLES, draw + 2 * SCORE_RESAMPLES,
                        draw + 3 * SCORE_RESAMPLES };
    int rc = 0;

    *out = (score_summary) { .n = s->n, .unit_block = docs < MIN_DOCS ? BLOCK : 0 };
    if (s->bad || !u || !rank || !weight || !draw) {
        rc = hx_fail(err, HX_ENOMEM, "score: no memory for %lld positions",
                     (long long)s->n);
        goto fail;
    }
    out->n_unit = fill_units(s, out->unit_block, u, rank);
    for (int64_t i = 0; i < out->n_unit; i++) {
        out->n_kl += u[i].n_kl;
        out->n_nll += u[i].n_nll;
    }
    qsort(rank, (size_t)out->n_kl, sizeof *rank, by_kl_falling);
    out->kl_max = out->n_kl > 0 ? (double)rank[0].kl : NAN;
    resample(out, u, weight, rank, each, seed);
fail:
    hx_free(u);
    hx_free(rank);
    hx_free(weight);
    hx_free(draw);
    return rc;
}

/* Bins double: 0..15, 16..31, 32..63, ... */
int score_bins(score_bin out[SCORE_BINS], const score_series *s)
{
    int n = 0;

    for (int i = 0; i < SCORE_BINS; i++)
        out[i] =
            (score_bin) { .from = i == 0 ? 0 : 8 << i, .to = (int32_t)((16u << i) - 1) };
    for (int64_t i = 0; i < s->n; i++) {
        const score_point *p = &s->p[i];
        int at = 0;

        while (at + 1 < SCORE_BINS && p->pos > out[at].to)
            at++;
        if (isnan(p->kl))
            continue;
        out[at].kl += (double)p->kl;
        out[at].n++;
        n = HX_MAX(n, at + 1);
    }
    for (int i = 0; i < n; i++)
        out[i].kl = out[i].n > 0 ? out[i].kl / (double)out[i].n : NAN;
    return n;
}

/* ---- JSON ---------------------------------------------------------------- */

void score_json_num(hx_sb *b, double v)
{
    if (isfinite(v))
        hx_sb_printf(b, "%.8g", v);
    else
        hx_sb_str(b, "null");
}

void score_json_stat(hx_sb *b, const char *name, const score_stat *s)
{
    hx_sb_printf(b, "\"%s\":{\"value\":", name);
    score_json_num(b, s->value);
    hx_sb_str(b, ",\"lo\":");
    score_json_num(b, s->lo);
    hx_sb_str(b, ",\"hi\":");
    score_json_num(b, s->hi);
    hx_sb_char(b, '}');
}
