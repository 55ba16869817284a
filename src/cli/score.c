/* score.c - `hoist score`: what a model's numbers are worth. Reads token lists from panels or
 * texts, runs each once through every model named, and compares distributions position by
 * position: with a panel's 20 most likely ids, with a reference model, and the decode path
 * with the prefill path of the same model. Uses hoist.h only.
 *
 * The panel protocol is the published one (docs/QUALITY.md): KL over the panel's 20 ids, both
 * sides renormalised over them. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "cli/score.h"

#define MAX_MODELS 8
#define TOP        20

/* Costs that leave misses of a GPU's cache of experts one way only. */
static const struct {
    const char *name, *expert_us;
} lanes[] = { { "decode_link_against_prefill", "1,1,0,0,0" },
              { "decode_lane_against_prefill", "1,1000000,1,0,0" } };

typedef struct {
    int32_t *id;         /* [n] */
    int64_t n, from;     /* logits rows from .. n - 1 are scored */
    const hx_json *item; /* of the panel, or NULL */
} doc;

/* One model under test, or the reference. */
typedef struct {
    const char *name;
    hx_engine *e;
    hx_info info;
    float *logit;                       /* [rows of the longest document, N] */
    score_series ref;                   /* against the reference; only nll without one */
    score_series panel;                 /* against the panel */
    score_series decode;                /* decode path against its own prefill */
    score_series decode_ref;            /* decode path against the reference's prefill */
    score_series forced[HX_LEN(lanes)]; /* as decode, with one lane forced */
    hx_experts ran[HX_LEN(lanes)];      /* where experts were, then */
    hx_sb per_prompt;                   /* JSON rows of the panel's prompts */
    hx_sb greedy, needle;
    int64_t n_greedy, n_equal;
    double worst_margin; /* where greedy answers part */
} subject;

typedef struct {
    const hx_cli *c;
    subject s[MAX_MODELS], ref;
    int n;
    bool has_ref;
    hx_json *panel;
    doc *doc;
    int64_t n_doc, cap_doc, max_rows;
    hx_pool *pool;
    hx_sb out_panel;
    uint64_t seed;
} job;

/* ---- models ------------------------------------------------------------- */

/* Applies "kv=f32,isa=scalar" to c; the strings live in text, which is cut up. */
static int apply_settings(hx_cli *c, char *text, hx_err *err)
{
    const struct {
        const char *name;
        const char **at;
    } strings[] = { { "kv", &c->kv },
                    { "isa", &c->isa },
                    { "device", &c->device },
                    { "cpus", &c->cpus } };
    char *save = NULL;

    for (char *w = strtok_r(text, ",", &save); w != NULL;
         w = strtok_r(NULL, ",", &save)) {
        char *value = strchr(w, '=');
        bool known = false;

        if (value != NULL)
            *value++ = '\0';
        for (size_t i = 0; value != NULL && i < HX_LEN(strings); i++)
            if (strcmp(w, strings[i].name) == 0) {
                *strings[i].at = value;
                known = true;
            }
        if (value != NULL && strcmp(w, "threads") == 0) {
            c->threads = strtol(value, NULL, 10);
            known = c->threads > 0;
        }
        if (!known)
            return hx_fail(err, HX_EARG,
                           "--with: \"%.40s\", expected kv=, isa=, device=, cpus= or "
                           "threads= and a value",
                           w);
    }
    return 0;
}

static int open_subject(subject *s, const hx_cli *c, const char *model, const char *with)
{
    hx_cli one = *c;
    hx_err err = { 0 };
    char text[256] = "";
    int rc;

    one.model = model;
    one.streams = 1;
    if (with != NULL && strlen(with) >= sizeof text)
        hx_fail(&err, HX_EARG, "--with: longer than %zu bytes", sizeof text - 1);
    else if (with != NULL)
        memcpy(text, with, strlen(with) + 1);
    if (err.code != 0 || apply_settings(&one, text, &err) != 0)
        return cli_fail(&err);
    if ((rc = cli_open_engine(&s->e, &one, NULL, NULL)) != 0)
        return rc;
    hx_get_info(s->e, &s->info);
    s->name = model;
    return 0;
}

static int open_all(job *j)
{
    const hx_cli *c = j->c;
    int rc;

    j->has_ref = c->against != NULL || c->with != NULL;
    for (int i = -1; i < c->n_more; i++) {
        if ((rc = open_subject(&j->s[j->n], c, i < 0 ? c->model : c->more[i], NULL)) != 0)
            return rc;
        j->n++;
    }
    if (j->has_ref &&
        (rc = open_subject(&j->ref, c, c->against != NULL ? c->against : c->model,
                           c->with)) != 0)
        return rc;
    for (int i = 0; i < j->n; i++)
        if (j->s[i].info.n_vocab != (j->has_ref ? j->ref : j->s[0]).info.n_vocab) {
            hx_err err = { 0 };

            hx_fail(&err, HX_EARG,
                    "%s: vocabulary of %d, the reference has %d; only models "
                    "of one vocabulary can be compared",
                    j->s[i].name, j->s[i].info.n_vocab,
                    (j->has_ref ? j->ref : j->s[0]).info.n_vocab);
            return cli_fail(&err);
        }
    return 0;
}

static void close_subject(subject *s)
{
    score_series *const all[] = { &s->ref, &s->panel, &s->decode, &s->decode_ref };

    hx_close(s->e);
    hx_free(s->logit);
    for (size_t i = 0; i < HX_LEN(all); i++)
        hx_free(all[i]->p);
    for (size_t i = 0; i < HX_LEN(lanes); i++)
        hx_free(s->forced[i].p);
    hx_sb_free(&s->per_prompt);
    hx_sb_free(&s->greedy);
    hx_sb_free(&s->needle);
}

static void close_all(job *j)
{
    for (int i = 0; i < MAX_MODELS; i++)
        close_subject(&j->s[i]);
    close_subject(&j->ref);
    for (int64_t i = 0; i < j->n_doc; i++)
        hx_free(j->doc[i].id);
    hx_free(j->doc);
    hx_json_free(j->panel);
    hx_pool_close(j->pool);
    hx_sb_free(&j->out_panel);
}

/* ---- documents ----------------------------------------------------------- */

static doc *add_doc(job *j, int64_t n, int64_t from, hx_err *err)
{
    doc *d;

    if (j->n_doc == j->cap_doc) {
        const int64_t cap = HX_MAX(16, 2 * j->cap_doc);

        if ((d = hx_realloc(j->doc, (size_t)cap * sizeof *d)) == NULL)
            goto fail;
        j->doc = d;
        j->cap_doc = cap;
    }
    d = &j->doc[j->n_doc];
    *d = (doc) { .id = hx_new(int32_t, n), .n = n, .from = from };
    if (d->id == NULL)
        goto fail;
    j->n_doc++;
    j->max_rows = HX_MAX(j->max_rows, n - from);
    return d;
fail:
    hx_fail(err, HX_ENOMEM, "score: no memory for a document of %lld tokens",
            (long long)n);
    return NULL;
}

static int panel_item(job *j, size_t i, hx_err *err)
{
    const hx_json *item = hx_json_at(j->panel, i), *ids = hx_json_get(item, "tokens"),
                  *top = hx_json_get(item, "top20_ids"),
                  *lp = hx_json_get(item, "top20_lp");
    const int64_t n = (int64_t)hx_json_len(ids),
                  p = hx_json_int(hx_json_get(item, "prompt_len"), -1),
                  rows = (int64_t)hx_json_len(top);
    doc *d;

    if (n < 1 || p < 1 || p > n)
        return hx_fail(err, HX_EFORMAT, "%s: item %zu: prompt_len %lld of %lld tokens",
                       j->c->panel, i, (long long)p, (long long)n);
    /* An excerpt may hold fewer rows than the completion has tokens. */
    if (rows < 1 || rows > n - p + 1 || (int64_t)hx_json_len(lp) != rows)
        return hx_fail(err, HX_EFORMAT,
                       "%s: item %zu: %lld rows of ids and %zu of log-probabilities for "
                       "%lld positions",
                       j->c->panel, i, (long long)rows, hx_json_len(lp),
                       (long long)(n - p + 1));
    for (int64_t r = 0; r < rows; r++)
        if (hx_json_len(hx_json_at(top, (size_t)r)) < 1 ||
            hx_json_len(hx_json_at(top, (size_t)r)) > TOP ||
            hx_json_len(hx_json_at(top, (size_t)r)) !=
                hx_json_len(hx_json_at(lp, (size_t)r)))
            return hx_fail(err, HX_EFORMAT,
                           "%s: item %zu: row %lld has not 1..20 ids and as "
                           "many log-probabilities",
                           j->c->panel, i, (long long)r);
    if ((d = add_doc(j, n, p - 1, err)) == NULL)
        return HX_ENOMEM;
    d->item = item;
    for (int64_t k = 0; k < n; k++)
        d->id[k] = (int32_t)hx_json_int(hx_json_at(ids, (size_t)k), -1);
    return 0;
}

static int read_panel(job *j, hx_err *err)
{
    int rc = hx_json_read(&j->panel, j->c->panel, (size_t)1 << 30, err);

    if (rc == 0 &&
        (hx_json_kind(j->panel) != HX_JSON_ARRAY || hx_json_len(j->panel) == 0))
        rc = hx_fail(err, HX_EFORMAT, "%s: expected a list of panel items", j->c->panel);
    for (size_t i = 0; rc == 0 && i < hx_json_len(j->panel); i++)
        rc = panel_item(j, i, err);
    return rc;
}

/* All of a text's ids; freed with hx_free(). */
static int text_ids(const job *j, hx_str text, const char *name, int32_t **ids,
                    int64_t *n, hx_err *err)
{
    hx_engine *e = j->s[0].e;

    *n = hx_tokenize(e, text, true, NULL, 0);
    if (*n >= 0 && (*ids = hx_new(int32_t, *n + 1)) == NULL)
        *n = HX_ENOMEM;
    if (*n >= 0)
        *n = hx_tokenize(e, text, true, *ids, *n);
    return *n >= 0 ? 0
                   : hx_fail(err, (int)*n, "%s: cannot be tokenized (%s)", name,
                             hx_strerror((int)*n));
}

/* Cuts one text in windows. The rest at the end counts when it fills at least a quarter. */
static int read_text(job *j, const char *path, hx_err *err)
{
    const int64_t window = j->c->window != 0 ? j->c->window : 512;
    char *text = NULL;
    size_t bytes = 0;
    int32_t *ids = NULL, *lead = NULL;
    int64_t n = 0, n_lead = 0;
    int rc;

    if ((rc = hx_file_read(path, (size_t)1 << 30, &text, &bytes, err)) != 0 ||
        (rc = text_ids(j, hx_str_c(j->c->lead), "--lead", &lead, &n_lead, err)) != 0 ||
        (rc = text_ids(j, (hx_str) { text, bytes }, path, &ids, &n, err)) != 0)
        goto fail;
    if (window <= n_lead + 1) {
        rc = hx_fail(err, HX_EARG,
                     "--window: %lld leaves no room behind --lead's %lld tokens",
                     (long long)window, (long long)n_lead);
        goto fail;
    }
    for (int64_t at = 0, step = window - n_lead; at < n; at += step) {
        const int64_t len = HX_MIN(step, n - at);
        doc *d;

        if (len < 2 || (len < step / 4 && at > 0))
            break;
        if ((d = add_doc(j, n_lead + len, HX_MAX(n_lead - 1, 0), err)) == NULL) {
            rc = HX_ENOMEM;
            break;
        }
        memcpy(d->id, lead, (size_t)n_lead * sizeof *lead);
        memcpy(d->id + n_lead, ids + at, (size_t)len * sizeof *ids);
    }
fail:
    hx_free(text);
    hx_free(ids);
    hx_free(lead);
    return rc;
}

static int read_texts(job *j, hx_err *err)
{
    char list[4096], *save = NULL;
    int rc = 0;

    if (strlen(j->c->text) >= sizeof list)
        return hx_fail(err, HX_EARG, "--text: longer than %zu bytes", sizeof list - 1);
    memcpy(list, j->c->text, strlen(j->c->text) + 1);
    for (char *w = strtok_r(list, ",", &save); rc == 0 && w != NULL;
         w = strtok_r(NULL, ",", &save))
        rc = read_text(j, w, err);
    if (rc == 0 && j->n_doc == 0)
        rc = hx_fail(err, HX_EARG, "%s: too short to score", j->c->text);
    return rc;
}

/* ---- one document --------------------------------------------------------- */

/* What the pool needs to compare the rows of one document. */
typedef struct {
    const subject *s, *ref;
    const doc *d;
    score_point *point; /* [rows] */
} compare;

static void compare_rows(void *ud, int64_t begin, int64_t end, int worker)
{
    const compare *c = ud;
    const int64_t nv = c->s->info.n_vocab;

    (void)worker;
    for (int64_t r = begin; r < end; r++) {
        const float *q = c->s->logit + r * nv;
        const int64_t pos = c->d->from + r;
        int32_t best, best_ref;
        const double lse = score_lse(q, nv, &best);
        score_point p = { .kl = NAN, .nll = NAN, .pos = (int32_t)pos };

        if (pos + 1 < c->d->n)
            p.nll = (float)(lse - (double)q[c->d->id[pos + 1]]);
        if (c->ref != NULL) {
            const float *l = c->ref->logit + r * nv;

            const double lse_ref = score_lse(l, nv, &best_ref);

            p.kl = (float)score_kl(l, lse_ref, q, lse, nv);
            p.same = best == best_ref;
        }
        c->point[r] = p;
    }
}

static int compare_doc(const job *j, subject *s, int64_t i, hx_err *err)
{
    const doc *d = &j->doc[i];
    const int64_t rows = d->n - d->from;
    compare c = { s, j->has_ref && s != &j->ref ? &j->ref : NULL, d,
                  hx_new(score_point, rows) };

    if (c.point == NULL)
        return hx_fail(err, HX_ENOMEM, "score: no memory for %lld rows", (long long)rows);
    hx_pool_run(j->pool, rows, 8, compare_rows, &c);
    for (int64_t r = 0; r < rows; r++) {
        c.point[r].doc = (int32_t)i;
        score_add(&s->ref, c.point[r]);
    }
    hx_free(c.point);
    return 0;
}

/* The published panel protocol: rows of 20 reference ids, best first. */
static void compare_panel(subject *s, int64_t i, const doc *d)
{
    const hx_json *top = hx_json_get(d->item, "top20_ids"),
                  *lp = hx_json_get(d->item, "top20_lp");
    const int64_t nv = s->info.n_vocab, rows = (int64_t)hx_json_len(top);
    int64_t same = 0, greedy = 0;
    double sum = 0;

    for (int64_t r = 0; r < rows; r++) {
        const hx_json *ids = hx_json_at(top, (size_t)r), *row = hx_json_at(lp, (size_t)r);
        const float *logit = s->logit + r * nv;
        const int k = (int)hx_json_len(ids);
        double p[TOP], q[TOP];
        int32_t best;
        const double lse = score_lse(logit, nv, &best);
        score_point point = { .nll = NAN,
                              .doc = (int32_t)i,
                              .pos = (int32_t)(d->from + r) };

        for (int t = 0; t < k; t++) {
            const int64_t id = hx_json_int(hx_json_at(ids, (size_t)t), -1);

            p[t] = hx_json_num(hx_json_at(row, (size_t)t), -INFINITY);
            q[t] = id >= 0 && id < nv ? (double)logit[id] - lse : -INFINITY;
        }
        point.kl = (float)score_kl_top(p, q, k);
        point.same = best == (int32_t)hx_json_int(hx_json_at(ids, 0), -1);
        if (d->from + r + 1 < d->n) {
            point.nll = (float)(lse - (double)logit[d->id[d->from + r + 1]]);
            greedy += best == d->id[d->from + r + 1];
        }
        same += point.same;
        sum += (double)point.kl;
        score_add(&s->panel, point);
    }
    hx_sb_printf(&s->per_prompt,
                 "%s{\"i\":%lld,\"positions\":%lld,\"top1\":%.6f,\"kl\":%.8g,"
                 "\"greedy_match\":%.6f}",
                 s->per_prompt.n > 0 ? "," : "", (long long)i, (long long)rows,
                 (double)same / (double)rows, sum / (double)rows,
                 rows > 1 ? (double)greedy / (double)HX_MIN(rows, d->n - d->from - 1)
                          : 1);
}

/* Decode rows of one document: row 0 of the answer still comes from prefill. */
static void compare_decode(score_series *to, const subject *prefill, int64_t i,
                           const doc *d, int64_t r, const hx_choice *top)
{
    const int64_t nv = prefill->info.n_vocab;
    const float *logit = prefill->logit + r * nv;
    double p[TOP], q[TOP];
    int32_t best;
    const double lse = score_lse(logit, nv, &best);

    for (int t = 0; t < TOP; t++) {
        const bool there = top[t].token >= 0;

        p[t] = there ? (double)logit[top[t].token] - lse : -INFINITY;
        q[t] = there ? (double)top[t].logprob : -INFINITY;
    }
    score_add(to, (score_point) { .kl = (float)score_kl_top(p, q, TOP),
                                  .nll = NAN,
                                  .doc = (int32_t)i,
                                  .pos = (int32_t)(d->from + r),
                                  .same = best == top[0].token });
}

/* Feeds the same tokens one by one: the prompt up to the first scored row, then every
 * further token forced, so that nothing but decode steps made the state. to: against the
 * model's own prefill; to_ref, where it is not NULL, against the reference's. */
static int decode_doc(const job *j, subject *s, int64_t i, score_series *to,
                      score_series *to_ref, hx_err *err)
{
    const doc *d = &j->doc[i];
    const hx_request r = { .tokens = d->id,
                           .n_tokens = d->from + 1,
                           .max_new = d->n - d->from - 1,
                           .forced = d->id + d->from + 1,
                           .n_forced = d->n - d->from - 1,
                           .n_top = TOP };
    hx_stream *stream;
    hx_event ev = { 0 };
    int64_t row = 0;
    int rc;

    if (r.max_new < 2)
        return 0;
    if ((rc = hx_submit(s->e, &r, &stream, err)) != 0)
        return rc;
    while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR) {
        hx_next(stream, &ev, -1);
        for (int32_t k = 0; ev.kind == HX_EV_TOKENS && k < ev.n_tokens; k++, row++) {
            if (row == 0)
                continue;
            compare_decode(to, s, i, d, row, ev.top + k * TOP);
            if (to_ref != NULL)
                compare_decode(to_ref, &j->ref, i, d, row, ev.top + k * TOP);
        }
    }
    if (ev.kind == HX_EV_ERROR) {
        rc = ev.err.code;
        *err = ev.err;
    }
    hx_stream_free(stream);
    return rc;
}

/* ---- panels out ------------------------------------------------------------ */

static void put_text(job *j, const char *name, const int32_t *id, int64_t n)
{
    const int64_t bytes = hx_detokenize(j->s[0].e, id, n, NULL, 0);
    char *text = bytes > 0 ? hx_alloc((size_t)bytes) : NULL;

    if (text != NULL)
        hx_detokenize(j->s[0].e, id, n, text, bytes);
    hx_sb_printf(&j->out_panel, "\"%s\":", name);
    hx_json_put_str(&j->out_panel, (hx_str) { text, text != NULL ? (size_t)bytes : 0 });
    hx_free(text);
}

/* The k most likely ids of a row, best first, equal ones by lower id. */
static void best_ids(const float *logit, int64_t n, int32_t *id)
{
    int have = 0;

    for (int64_t i = 0; i < n; i++) {
        int at = have;

        if (have == TOP && !(logit[i] > logit[id[TOP - 1]]))
            continue;
        while (at > 0 && logit[i] > logit[id[at - 1]])
            at--;
        have = HX_MIN(have + 1, TOP);
        memmove(&id[at + 1], &id[at], (size_t)(have - 1 - at) * sizeof *id);
        id[at] = (int32_t)i;
    }
}

static void write_panel_doc(job *j, const doc *d)
{
    const subject *s = &j->s[0];
    const int64_t nv = s->info.n_vocab, rows = d->n - d->from;
    hx_sb *b = &j->out_panel;
    int32_t id[TOP];

    hx_sb_str(b, b->n == 0 ? "[{" : ",\n{");
    put_text(j, "prompt", d->id, d->from + 1);
    hx_sb_printf(b, ",\"prompt_len\":%lld,\"tokens\":[", (long long)d->from + 1);
    for (int64_t i = 0; i < d->n; i++)
        hx_sb_printf(b, "%s%d", i > 0 ? "," : "", d->id[i]);
    hx_sb_str(b, "],");
    put_text(j, "completion", d->id + d->from + 1, d->n - d->from - 1);
    for (int what = 0; what < 2; what++) {
        hx_sb_str(b, what == 0 ? ",\"top20_ids\":[" : ",\"top20_lp\":[");
        for (int64_t r = 0; r < rows; r++) {
            const float *logit = s->logit + r * nv;
            const double lse = score_lse(logit, nv, NULL);

            best_ids(logit, nv, id);
            hx_sb_str(b, r > 0 ? ",[" : "[");
            for (int t = 0; t < TOP; t++) {
                hx_sb_str(b, t > 0 ? "," : "");
                if (what == 0)
                    hx_sb_printf(b, "%d", id[t]);
                else
                    hx_sb_printf(b, "%.7f", (double)logit[id[t]] - lse);
            }
            hx_sb_char(b, ']');
        }
        hx_sb_char(b, ']');
    }
    hx_sb_char(b, '}');
}

/* ---- greedy ------------------------------------------------------------------ */

enum { TEXT_PROMPT = 32 }; /* tokens of a window that a greedy continuation begins with */

static int greedy_doc(job *j, subject *s, const doc *d, hx_err *err)
{
    const int64_t n = j->c->greedy, n_prompt = d->item != NULL
                                                   ? d->from + 1
                                                   : HX_MIN(d->from + TEXT_PROMPT, d->n);
    int32_t *a = hx_new(int32_t, 2 * n), *b = a + n;
    float *margin = hx_new(float, 2 * n);
    int64_t na = 0, nb = 0, same = 0;
    int rc =
        a == NULL || margin == NULL ? hx_fail(err, HX_ENOMEM, "greedy: no memory") : 0;
    const score_greedy_args want = { d->id, n_prompt, n, a, margin },
                            got = { d->id, n_prompt, n, b, margin + n };

    if (rc == 0 && (rc = score_greedy(j->ref.e, &want, &na, err)) == 0)
        rc = score_greedy(s->e, &got, &nb, err);
    while (rc == 0 && same < na && same < nb && a[same] == b[same])
        same++;
    if (rc == 0) {
        const bool equal = same == na && na == nb;

        s->n_greedy++;
        s->n_equal += equal;
        if (!equal && same < na)
            s->worst_margin = HX_MAX(s->worst_margin, (double)margin[same]);

        hx_sb_printf(&s->greedy, "%s{\"tokens\":%lld,\"equal\":%s,\"first_divergence\":",
                     s->greedy.n > 0 ? "," : "", (long long)na, equal ? "true" : "false");
        if (equal)
            hx_sb_str(&s->greedy, "null,\"margin_nats\":null}");
        else
            hx_sb_printf(&s->greedy, "%lld,\"margin_nats\":%.5g}", (long long)same,
                         same < na ? (double)margin[same] : 0.0);
    }
    hx_free(a);
    hx_free(margin);
    return rc;
}

/* ---- the pass ------------------------------------------------------------------ */

static int take_memory(job *j, hx_err *err)
{
    for (int i = -(int)j->has_ref; i < j->n; i++) {
        subject *s = i < 0 ? &j->ref : &j->s[i];

        s->logit = hx_new(float, j->max_rows *(int64_t)s->info.n_vocab);
        if (s->logit == NULL)
            return hx_fail(
                err, HX_ENOMEM,
                "score: no memory for %lld rows of %d logits (%.1f GB) a model; "
                "a smaller --window needs less",
                (long long)j->max_rows, s->info.n_vocab,
                4e-9 * (double)j->max_rows * s->info.n_vocab);
    }
    return hx_pool_open(&j->pool, 0, NULL, err);
}

static int forward(subject *s, const doc *d, hx_err *err)
{
    const hx_score_args a = {
        .tokens = d->id, .n_tokens = d->n, .from = d->from, .logits = s->logit
    };

    return hx_score(s->e, &a, err);
}

static int score_doc(job *j, int64_t i, hx_err *err)
{
    const doc *d = &j->doc[i];
    int rc = 0;

    if (j->has_ref && (rc = forward(&j->ref, d, err)) == 0)
        rc = compare_doc(j, &j->ref, i, err);
    for (int k = 0; rc == 0 && k < j->n; k++) {
        subject *s = &j->s[k];

        if ((rc = forward(s, d, err)) != 0 || (rc = compare_doc(j, s, i, err)) != 0)
            break;
        if (d->item != NULL)
            compare_panel(s, i, d);
        if (k == 0 && j->c->write_panel != NULL)
            write_panel_doc(j, d);
        if (j->c->decode)
            rc = decode_doc(j, s, i, &s->decode, j->has_ref ? &s->decode_ref : NULL, err);
        if (rc == 0 && j->c->greedy != 0)
            rc = greedy_doc(j, s, d, err);
    }
    return rc;
}

static int score_all(job *j, hx_err *err)
{
    int rc = j->n_doc > 0 ? take_memory(j, err) : 0;

    for (int64_t i = 0; rc == 0 && i < j->n_doc; i++)
        rc = score_doc(j, i, err);
    for (int k = 0; rc == 0 && j->c->needle != NULL && k < j->n; k++)
        rc = score_needle(j->s[k].e, j->c->needle, j->seed, &j->s[k].needle, err);
    return rc;
}

/* The decode path once more for each lane that a miss of a GPU's cache can take, forced by
 * costs: the engine is opened anew, for two of a large model do not fit. Says its own
 * errors. */
static int force_lanes(job *j, subject *s)
{
    hx_experts x;
    hx_err err = { 0 };
    int rc = 0;

    hx_get_experts(s->e, &x);
    for (size_t k = 0; rc == 0 && x.n_expert > 0 && k < HX_LEN(lanes); k++) {
        hx_cli c = *j->c;

        if (k == 1 && x.us[2] <= 0)
            break; /* gpu-only */
        hx_close(s->e);
        s->e = NULL;
        c.expert_us = lanes[k].expert_us;
        if ((rc = open_subject(s, &c, s->name, NULL)) != 0)
            return rc;
        for (int64_t i = 0; rc == 0 && i < j->n_doc; i++)
            if ((rc = forward(s, &j->doc[i], &err)) == 0)
                rc = decode_doc(j, s, i, &s->forced[k], NULL, &err);
        hx_get_experts(s->e, &s->ran[k]);
    }
    return rc != 0 ? cli_fail(&err) : 0;
}

/* ---- report ---------------------------------------------------------------------- */

static void print_stat(const char *name, const score_stat *s, const char *unit)
{
    if (isnan(s->value))
        return;
    printf("  %-26s %11.6g %s", name, s->value, unit);
    if (!isnan(s->lo))
        printf("  (95 %%: %.4g to %.4g)", s->lo, s->hi);
    putchar('\n');
}

static int put_summary(hx_sb *b, const char *name, const score_series *s, uint64_t seed,
                       hx_err *err)
{
    score_summary sum;
    score_bin bin[SCORE_BINS];
    char unit[48];
    int n, rc;

    if (s->n == 0 && !s->bad)
        return 0;
    if ((rc = score_summarize(&sum, s, seed, err)) != 0)
        return rc;
    printf("%s, %lld positions\n", name, (long long)sum.n);
    print_stat("perplexity", &sum.perplexity, "");
    print_stat("mean divergence", &sum.kl, "nats");
    print_stat("99th percentile", &sum.kl_p99, "nats");
    print_stat("same most likely token", &sum.top1, "");
    hx_sb_str(b, ",");
    hx_json_put_str(b, hx_str_c(name));
    hx_sb_printf(b, ":{\"positions\":%lld,", (long long)sum.n);
    score_json_stat(b, "perplexity", &sum.perplexity);
    hx_sb_char(b, ',');
    score_json_stat(b, "kl_mean", &sum.kl);
    hx_sb_char(b, ',');
    score_json_stat(b, "kl_p99", &sum.kl_p99);
    hx_sb_str(b, ",\"kl_max\":");
    score_json_num(b, sum.kl_max);
    hx_sb_char(b, ',');
    score_json_stat(b, "top1_agreement", &sum.top1);
    snprintf(unit, sizeof unit, sum.unit_block != 0 ? "blocks of %lld" : "documents",
             (long long)sum.unit_block);
    hx_sb_printf(
        b,
        ",\"interval\":{\"level\":0.95,\"method\":\"bootstrap\",\"resamples\":%d,"
        "\"unit\":\"%s\",\"units\":%lld},\"kl_by_position\":[",
        SCORE_RESAMPLES, unit, (long long)sum.n_unit);
    n = score_bins(bin, s);
    for (int i = 0; i < n; i++) {
        hx_sb_printf(b, "%s{\"from\":%d,\"to\":%d,\"positions\":%lld,\"kl_mean\":",
                     i > 0 ? "," : "", bin[i].from, bin[i].to, (long long)bin[i].n);
        score_json_num(b, bin[i].kl);
        hx_sb_char(b, '}');
    }
    hx_sb_str(b, "]}");
    return 0;
}

static int put_subject(hx_sb *b, const job *j, const subject *s, hx_err *err)
{
    int rc;

    printf("%s (%s)\n", s->name, s->info.device);
    hx_sb_str(b, "{\"model\":");
    hx_json_put_str(b, hx_str_c(s->name));
    hx_sb_str(b, ",\"device\":");
    hx_json_put_str(b, hx_str_c(s->info.device));
    hx_sb_printf(b, ",\"weight_bytes\":%llu,\"parameters\":%llu",
                 (unsigned long long)s->info.weight_bytes,
                 (unsigned long long)s->info.n_param);
    /* A panel's summary has the perplexity too. */
    if (((j->has_ref || s->panel.n == 0) &&
         (rc = put_summary(b, j->has_ref ? "against_reference" : "alone", &s->ref,
                           j->seed, err)) != 0) ||
        (rc = put_summary(b, "against_panel", &s->panel, j->seed, err)) != 0 ||
        (rc = put_summary(b, "decode_against_prefill", &s->decode, j->seed, err)) != 0 ||
        (rc = put_summary(b, "decode_against_reference", &s->decode_ref, j->seed, err)) !=
            0)
        return rc;
    for (size_t k = 0; k < HX_LEN(lanes); k++) {
        const hx_experts *x = &s->ran[k];

        if ((rc = put_summary(b, lanes[k].name, &s->forced[k], j->seed, err)) != 0)
            return rc;
        if (s->forced[k].n == 0)
            continue;
        printf(
            "  experts                    %lld in GPU memory, %lld over the link, %lld "
            "on the CPU\n",
            (long long)x->here, (long long)x->link, (long long)x->lane);
        b->n--; /* into that object */
        hx_sb_printf(b, ",\"experts\":{\"here\":%lld,\"link\":%lld,\"lane\":%lld}}",
                     (long long)x->here, (long long)x->link, (long long)x->lane);
    }
    if (s->n_greedy > 0) {
        printf("greedy: %lld of %lld answers equal", (long long)s->n_equal,
               (long long)s->n_greedy);
        if (s->worst_margin > 0)
            printf("; they part at a margin of at most %.3g nats", s->worst_margin);
        putchar('\n');
    }
    if (s->greedy.n > 0)
        hx_sb_printf(b, ",\"greedy\":[%s]", s->greedy.p);
    if (s->needle.n > 0)
        hx_sb_printf(b, ",\"needle\":%s", s->needle.p);
    hx_sb_char(b, '}');
    return s->greedy.bad || s->needle.bad || s->per_prompt.bad
               ? hx_fail(err, HX_ENOMEM, "score: no memory for its report")
               : 0;
}

/* The members that the published scorer writes, of the first model. */
static int put_protocol(hx_sb *b, const job *j, hx_err *err)
{
    const subject *s = &j->s[0];
    score_summary sum;
    int rc;

    if (s->panel.n == 0)
        return 0;
    if ((rc = score_summarize(&sum, &s->panel, j->seed, err)) != 0)
        return rc;
    hx_sb_printf(b,
                 "\"positions\":%lld,\"top1_agreement\":%.6f,\"mean_kl_top20\":%.8g,"
                 "\"per_prompt\":[%s],",
                 (long long)sum.n, sum.top1.value, sum.kl.value, s->per_prompt.p);
    return 0;
}

static int draw(const job *j, hx_err *err)
{
    score_line line[MAX_MODELS];

    for (int i = 0; i < j->n; i++) {
        const subject *s = &j->s[i];
        const score_series *of = j->has_ref       ? &s->ref
                                 : s->panel.n > 0 ? &s->panel
                                                  : &s->decode;
        score_summary sum;
        const char *slash = strrchr(s->name, '/');
        int rc;

        if (of->n == 0)
            return hx_fail(err, HX_EARG, "--plot: no position was compared");
        if ((rc = score_summarize(&sum, of, j->seed, err)) != 0)
            return rc;
        line[i] = (score_line) { slash != NULL && slash[1] != '\0' ? slash + 1 : s->name,
                                 s->info.weight_bytes, of, sum.kl };
    }
    return score_plot(j->c->plot, line, j->n, err);
}

static int report(job *j, hx_err *err)
{
    hx_sb b = { 0 };
    int rc;

    hx_sb_str(&b, "{\"hoist\":\"" HX_VERSION "\",");
    rc = put_protocol(&b, j, err);
    hx_sb_printf(&b,
                 "\"documents\":%lld,\"window\":%lld,\"reference\":", (long long)j->n_doc,
                 (long long)(j->c->window != 0 ? j->c->window : 512));
    if (j->has_ref)
        hx_json_put_str(&b, hx_str_c(j->ref.name));
    else
        hx_sb_str(&b, "null");
    hx_sb_str(&b, ",\"reference_settings\":");
    if (j->c->with != NULL)
        hx_json_put_str(&b, hx_str_c(j->c->with));
    else
        hx_sb_str(&b, "null");
    if (j->has_ref)
        rc = rc != 0 ? rc : put_summary(&b, "reference_alone", &j->ref.ref, j->seed, err);
    hx_sb_str(&b, ",\"models\":[");
    for (int i = 0; rc == 0 && i < j->n; i++) {
        hx_sb_str(&b, i > 0 ? "," : "");
        rc = put_subject(&b, j, &j->s[i], err);
    }
    hx_sb_str(&b, "]}\n");
    if (rc == 0 && j->c->out != NULL)
        rc = cli_write(j->c->out, &b, err);
    if (rc == 0 && j->c->write_panel != NULL) {
        hx_sb_str(&j->out_panel, "]\n");
        rc = cli_write(j->c->write_panel, &j->out_panel, err);
    }
    if (rc == 0 && j->c->plot != NULL)
        rc = draw(j, err);
    hx_sb_free(&b);
    return rc;
}

int cmd_score(const hx_cli *c)
{
    job j = { .c = c, .seed = c->has_seed ? (uint64_t)c->seed : 1 };
    hx_err err = { 0 };
    int rc;

    if (c->panel == NULL && c->text == NULL && c->needle == NULL) {
        fprintf(stderr, "hoist: score needs --panel FILE, --text FILE or --needle N\n");
        return 2;
    }
    if (c->greedy != 0 && c->against == NULL && c->with == NULL) {
        fprintf(stderr,
                "hoist: --greedy needs a reference: --against MODEL or --with LIST\n");
        return 2;
    }
    if (c->plot != NULL && c->panel == NULL && c->against == NULL && c->with == NULL &&
        !c->decode) {
        fprintf(stderr, "hoist: --plot draws divergence: it needs --panel, --against, "
                        "--with or --decode\n");
        return 2;
    }
    if ((rc = cli_try_write(c->out)) != 0 || (rc = cli_try_write(c->plot)) != 0 ||
        (rc = cli_try_write(c->write_panel)) != 0)
        return rc;
    if ((rc = open_all(&j)) == 0) {
        rc = c->panel != NULL ? read_panel(&j, &err) : 0;
        if (rc == 0 && c->text != NULL)
            rc = read_texts(&j, &err);
        if (rc == 0)
            rc = score_all(&j, &err);
        for (int k = 0; rc == 0 && c->decode && k < j.n; k++)
            if ((rc = force_lanes(&j, &j.s[k])) != 0)
                goto close;
        if (rc == 0)
            rc = report(&j, &err);
        if (rc != 0)
            rc = cli_fail(&err);
    }
close:
    close_all(&j);
    return rc;
}
