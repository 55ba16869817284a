/* cpu_sample.c - the CPU operations that rank: the pools of top-k selection and the ids
 * of a sampled row. Called through hx_cpu_ops once ops.c has checked the arguments.
 *
 * Nothing is sorted as a whole. Entries stand in falling order of value, equal ones by
 * lower index; every question (the k best, the smallest set with some mass, the one that
 * a draw meets) is a beginning of that order, found by bisection over the values. */
#include <math.h>

#include "dev/cpu_kern.h"

enum {
    FEW = 8,     /* entries that are sorted by insertion */
    NEAR = 2048, /* candidates that are worth a copy of their own */
    MAX_TOP = 20 /* ops.c: same bound */
};

/* How many entries x >= lo there are, and their weight. key numbers the floats in order.
 */
typedef struct {
    int32_t key;
    int64_t count;
    double mass;
} level;

/* n entries with values x and weights p (NULL: only counted). Whatever is asked lies
 * below hi, which no entry reaches, and not below lo. */
typedef struct {
    const hx_kern *v;
    const float *x, *p;
    int64_t n;
    level lo, hi;
} field;

/* A beginning of the order: entry `last` and all before it. */
typedef struct {
    int64_t last, count;
    double mass;
} prefix;

static int32_t key_of(float x)
{
    int32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits < 0 ? bits ^ INT32_MAX : bits;
}

static float float_of(int32_t key)
{
    const int32_t bits = key < 0 ? key ^ INT32_MAX : key;
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

static level level_at(const field *f, float lo)
{
    level l = { .key = key_of(lo) };

    l.count = f->v->tally(f->x, f->p, lo, f->n, &l.mass);
    return l;
}

/* All entries but NaN, the largest of which is best. */
static field field_of(const hx_kern *v, const float *x, const float *p, int64_t n,
                      float best)
{
    field f = { .v = v, .x = x, .p = p, .n = n };

    f.hi.key =
        key_of(best == 0 ? 0.0f : best) + 1; /* above both zeros, which are equal */
    f.lo = level_at(&f, -INFINITY);
    return f;
}

static bool before(const field *f, int64_t a, int64_t b)
{
    return f->x[a] > f->x[b] || (f->x[a] == f->x[b] && a < b);
}

/* Finds the entries lo <= x <= hi, at most cap, in order; returns how many. */
static int64_t collect(const field *f, float lo, float hi, int64_t *out, int64_t cap)
{
    int64_t n = 0;

    for (int64_t i = 0; n < cap; i++) {
        int64_t at = n;

        i += f->v->find(f->x + i, f->n - i, lo, hi);
        if (i == f->n)
            break;
        for (; at > 0 && before(f, i, out[at - 1]); at--)
            out[at] = out[at - 1];
        out[at] = i;
        n++;
    }
    return n;
}

/* The largest float below that of a key. */
static float under(int32_t key)
{
    return float_of(key == 0 ? -2 : key - 1); /* key -1 is the other zero */
}

/* A key strictly between two levels. In turn: where the wanted part of what lies between
 * should end if values were evenly spread, the middle of the values, the middle of the
 * keys; the last bounds the number of turns, whatever the values. */
static int32_t between(const level *lo, const level *hi, double part, int turn)
{
    const double a = (double)float_of(lo->key), b = (double)float_of(hi->key);
    const int32_t key = key_of((float)(b - (b - a) * (turn % 3 == 0 ? part : 0.5)));

    if (turn % 3 == 2 || !isfinite(a) || !isfinite(b))
        return (int32_t)(((int64_t)lo->key + hi->key) >> 1);
    return HX_MIN(HX_MAX(key, lo->key + 1), hi->key - 1);
}

/* The shortest beginning that has count entries, or more weight than mass (INFINITY: not
 * asked); else all there is. */
static prefix find_prefix(const field *f, int64_t count, double mass)
{
    const bool weigh = f->p != NULL && mass < INFINITY;
    level lo = f->lo, hi = f->hi;
    int64_t near[FEW];

    for (int turn = 0; lo.count - hi.count > FEW && lo.key + 1 < hi.key; turn++) {
        const double part =
            weigh ? (mass - hi.mass) / (lo.mass - hi.mass)
                  : (double)(count - hi.count) / (double)(lo.count - hi.count);
        const level mid = level_at(f, float_of(between(&lo, &hi, part, turn)));

        if (mid.count >= count || (weigh && mid.mass > mass))
            lo = mid;
        else
            hi = mid;
    }
    prefix r = { .last = -1, .count = hi.count, .mass = hi.mass };
    const bool many =
        lo.count - hi.count > FEW; /* all of one value: their order is known */
    const int64_t n =
        many ? f->n : collect(f, float_of(lo.key), under(hi.key), near, FEW);
    for (int64_t i = 0;
         i < n && (r.last < 0 || !(r.count >= count || (weigh && r.mass > mass))); i++) {
        const int64_t at = many ? i : near[i];

        if (many && f->x[at] != float_of(lo.key))
            continue;
        r.last = at;
        r.count++;
        r.mass += f->p != NULL ? (double)f->p[at] : 0;
    }
    return r;
}

/* ---- selection of pools ---------------------------------------------- */

/* Writes the indices of the k best scores, ascending. NaN counts as the lowest. */
static void pick_best(const hx_kern *v, const float *score, int64_t n, int64_t k,
                      int32_t *pick)
{
    bool nan;
    const field f = field_of(v, score, NULL, n, v->peak(score, n, &nan));
    int64_t nan_left = HX_MAX(k - f.lo.count, 0), last = -1;

    if (k < f.lo.count && k > 0)
        last = find_prefix(&f, k, INFINITY).last;
    const float lo = last < 0 ? -INFINITY : score[last];
    for (int64_t i = 0, got = 0; got < k; i++) {
        if (nan_left == 0)
            i += v->find(score + i, n - i, lo, INFINITY);
        if (last >= 0 ? i == last || before(&f, i, last)
                      : score[i] >= lo || nan_left-- > 0)
            pick[got++] = (int32_t)i;
    }
}

static void topk_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_topk_args *a = c->args;

    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        const hx_cpu_rows b = hx_cpu_find_block(&a->rows, 1, i);
        const int64_t row = b.span->row0 + b.t0,
                      n = (b.span->pos0 + b.t0 + 1) / a->pool_n;
        const int64_t k = HX_MIN(a->k, n);

        ((int32_t *)a->n_pick.p)[row] = (int32_t)k;
        pick_best(c->v, (const float *)a->score.p + row * a->ld_score, n, k,
                  (int32_t *)a->pick.p + row * a->k);
    }
}

int hx_cpu_topk(hx_dev *d, const hx_topk_args *a, hx_err *err)
{
    (void)err;
    return hx_cpu_run(d, topk_part, a, hx_cpu_count_blocks(&a->rows, 1),
                      8 * a->ld_score + 8192);
}

/* ---- sampling -------------------------------------------------------- */

/* What is known of one row. Candidates are the entries that lie near the best, copied
 * with their ids, when these suffice. */
typedef struct {
    const hx_sample_row *s;
    field all;     /* ids 0 .. n_token - 1 */
    float *own;    /* [n_vocab] of scratch: adjusted logits */
    float *weight; /* [n_vocab] of scratch: exp((x - best) / temperature) */
    float best;
    double total; /* of the weights */
    float near_x[NEAR], near_p[NEAR];
    int32_t near_id[NEAR];
} sampling;

static void ban_by_mask(float *x, const uint32_t *mask, int64_t n)
{
    for (int64_t i = 0; i < n; i += 32) {
        const uint32_t ok = mask[i / 32];

        for (int64_t j = 0; j < HX_MIN(32, n - i) && ok != UINT32_MAX; j++)
            if ((ok >> j & 1) == 0)
                x[i + j] = -INFINITY;
    }
}

/* Penalties, bias, mask and bans, on a copy. */
static void adjust(sampling *w, const float *logits)
{
    const hx_sample_row *s = w->s;
    const int64_t n = w->all.n;
    float *x = w->own;

    memcpy(x, logits, (size_t)n * sizeof(*x));
    for (int32_t i = 0; i < s->n_hist; i++) {
        const int32_t id = s->hist_id[i];

        if (id >= n)
            continue;
        if (s->repeat > 0)
            x[id] = x[id] > 0 ? x[id] / s->repeat : x[id] * s->repeat;
        if (s->hist_count[i] > 0)
            x[id] -= s->frequency * (float)s->hist_count[i] + s->presence;
    }
    for (int32_t i = 0; i < s->n_bias; i++)
        if (s->bias[i].token < n)
            x[s->bias[i].token] += s->bias[i].bias <= -100 ? -INFINITY : s->bias[i].bias;
    if (s->mask != NULL)
        ban_by_mask(x, s->mask, n);
    for (int32_t i = 0; i < s->n_ban; i++)
        if (s->ban[i] < n)
            x[s->ban[i]] = -INFINITY;
    w->all.x = x;
}

/* Whether the entries of a level hold everything that the row's filters and the draw u
 * may keep. */
static bool suffices(const sampling *w, const level *l, double u)
{
    const hx_sample_row *s = w->s;

    if (s->top_k > 0)
        return l->count >= s->top_k;
    if (s->top_p > 0 && s->top_p < 1)
        return l->mass > (double)s->top_p * w->total;
    if (s->min_p > 0)
        return (double)(float_of(l->key) - w->best) <=
               log((double)s->min_p) * (double)s->temperature;
    return l->mass > u * w->total;
}

/* What to draw from with u; *id maps entries to ids, NULL: they are ids. */
static field candidates(sampling *w, double u, const int32_t **id)
{
    static const float reach[] = { 4, 12, 24 }; /* nats below the best */
    field f = w->all;

    *id = NULL;
    for (size_t i = 0; i < HX_LEN(reach); i++) {
        const level l = level_at(&f, w->best - reach[i] * w->s->temperature);
        const float lo = float_of(l.key);

        if (suffices(w, &l, u))
            f.lo = l;
        if (f.lo.key != l.key || l.count > NEAR)
            continue;
        for (int64_t k = 0, at = 0; k < l.count; k++, at++) {
            at += f.v->find(f.x + at, f.n - at, lo, INFINITY);
            w->near_x[k] = f.x[at];
            w->near_p[k] = f.p[at];
            w->near_id[k] = (int32_t)at;
        }
        *id = w->near_id;
        f.x = w->near_x;
        f.p = w->near_p;
        f.n = l.count;
        break;
    }
    return f;
}

static double just_below(double x)
{
    return nextafter(x, -INFINITY);
}

static int32_t draw(sampling *w)
{
    const hx_sample_row *s = w->s;
    const double u = hx_rng_unit(s->seed, s->counter);
    const int32_t *id;
    const field f = candidates(w, u, &id);
    prefix kept = { .count = f.lo.count, .mass = w->total };

    if (s->top_k > 0)
        kept = find_prefix(&f, s->top_k, INFINITY);
    if (s->top_p > 0 && s->top_p < 1)
        kept = find_prefix(&f, kept.count, just_below((double)s->top_p * kept.mass));
    if (s->min_p > 0) {
        prefix likely;

        likely.count = f.v->tally(
            f.x, f.p,
            (float)((double)w->best + log((double)s->min_p) * (double)s->temperature),
            f.n, &likely.mass);
        if (likely.count <= kept.count)
            kept = likely;
    }
    const prefix met = find_prefix(&f, HX_MAX(kept.count, 1), u * kept.mass);
    return id != NULL ? id[met.last] : (int32_t)met.last;
}

/* Log-softmax of the chosen id and of the n_top best. */
static void report(const sampling *w, const hx_sample_args *a, int64_t r, int32_t id)
{
    const hx_sample_row *s = w->s;
    const hx_kern *v = w->all.v;
    const float *x = w->all.x;
    int64_t top[MAX_TOP], n = 0;

    if (!s->want_logprob && s->n_top == 0)
        return;
    const double mass =
        s->temperature == 1 ? w->total : v->weigh(NULL, x, w->best, 1, w->all.n);
    const double norm = (double)w->best + log(mass);
    if (s->want_logprob)
        ((float *)a->logprob.p)[r] = (float)((double)x[id] - norm);
    if (s->n_top > 0) {
        field f = field_of(v, x, NULL, w->all.n, w->best);
        const level likely = level_at(&f, w->best - 16);

        if (likely.count >= s->n_top)
            f.lo = likely;
        const prefix p = find_prefix(&f, s->n_top, INFINITY);

        /* All above the last, then that one and its equals of lower index. */
        n = collect(&f, nextafterf(x[p.last], INFINITY), INFINITY, top, p.count);
        for (int64_t i = 0; n < p.count; i++) {
            i += v->find(x + i, f.n - i, x[p.last], x[p.last]);
            top[n++] = i;
        }
    }
    for (int32_t i = 0; i < s->n_top; i++) {
        const bool real = i < n && x[top[i]] > -INFINITY;

        ((hx_choice *)a->top.p)[MAX_TOP * r + i] =
            real ? (hx_choice) { (int32_t)top[i], (float)((double)x[top[i]] - norm) }
                 : (hx_choice) { -1, -INFINITY };
    }
}

enum { BAD_LOGIT = -1, ALL_BANNED = -2 };

/* The chosen id, or BAD_LOGIT or ALL_BANNED. */
static int32_t choose(sampling *w, const hx_sample_args *a, int64_t r)
{
    const hx_sample_row *s = w->s;
    const hx_kern *v = w->all.v;
    bool nan;

    w->best = v->peak(w->all.x, w->all.n, &nan);
    if (nan)
        return BAD_LOGIT;
    if (s->n_hist > 0 || s->n_bias > 0 || s->mask != NULL || s->n_ban > 0) {
        adjust(w, w->all.x);
        w->best = v->peak(w->all.x, w->all.n, &nan);
    }
    if (nan || w->best == INFINITY)
        return BAD_LOGIT;
    if (w->best == -INFINITY)
        return ALL_BANNED;
    int32_t id = (int32_t)v->find(w->all.x, w->all.n, w->best, w->best);
    if (s->temperature > 0) {
        w->total = v->weigh(w->weight, w->all.x, w->best,
                            fminf(1 / s->temperature, 1e30f), w->all.n);
        w->all = field_of(v, w->all.x, w->weight, w->all.n, w->best);
        w->all.lo.mass = w->total;
        id = draw(w);
    }
    report(w, a, r, id);
    return id;
}

static void sample_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const hx_cpu_call *c = ud;
    const hx_sample_args *a = c->args;
    sampling *w = hx_cpu_work(c->dev, worker);

    for (int64_t r = begin; r < end; r++) {
        w->s = &a->row[r];
        w->own = (float *)a->scratch.p + r * 2 * a->n_vocab;
        w->weight = w->own + a->n_vocab;
        w->all = (field) { .v = c->v,
                           .x = (const float *)a->logits.p + r * a->n_vocab,
                           .n = a->n_token };
        ((int32_t *)a->id.p)[r] = choose(w, a, r);
    }
}

int hx_cpu_sample(hx_dev *d, const hx_sample_args *a, hx_err *err)
{
    const int32_t *id = a->id.p;

    hx_cpu_run(d, sample_part, a, a->rows, 8 * a->n_vocab);
    for (int64_t r = 0; r < a->rows; r++)
        if (id[r] < 0)
            return hx_fail(err, HX_EARG, "sample: row %lld: %s", (long long)r,
                           id[r] == ALL_BANNED ? "every id is banned"
                                               : "a logit is infinite or not a number");
    return 0;
}
