/* model_test.c - the model against recorded outputs of the official implementation
 * (glm_tiny, the BF16 demo) and of the float64 reference on de-quantised weights (the
 * EXL3 demos). */
#include "../../tests/golden.h"
#include "model/model.h"

#define MAX_ROWS 64
#define CTX      2560

/* The fast device under test: model_test [DEVICE]. */
static const char *fast = "cpu";

/* A model with everything it needs to run, at most MAX_ROWS rows a call. */
typedef struct {
    hx_model *m;
    hx_dev *dev;
    hx_cache *cache;
    hx_graph *g;
    hx_tap_fn *tap;
    void *tap_ud;
    hx_phase phase; /* of the call */
    int64_t first, layer;
    struct {
        const char *what;
        int64_t next; /* position of its next row in this layer */
    } seen[16];
    int64_t at; /* position of the first row that the tap is shown */
    bool put;   /* set by the tap: its data, changed, goes back to the device */
} rig;

static void rig_open(rig *r, const char *dir, const char *device, const char *isa,
                     hx_cache_fmt fmt)
{
    hx_err err = { 0 };

    memset(r, 0, sizeof *r);
    if (hx_model_open(&r->m, dir, NULL, NULL, &err) != 0)
        fail_msg("%s", err.msg);
    const hx_dev_opt opt = { .name = strcmp(device, "cpu") == 0 ? fast : device,
                             .isa = isa,
                             .n_threads = 2,
                             .limits = hx_model_limits(&r->m->desc, MAX_ROWS, CTX) };
    if (hx_dev_open(&r->dev, &opt, &err) != 0 ||
        hx_model_place(r->m, r->dev, HX_PLACE_DENSE, &err) != 0 ||
        hx_model_place(r->m, r->dev, HX_PLACE_ROUTED, &err) != 0 ||
        hx_cache_open(&r->cache, &r->m->desc, r->dev, 4, CTX, 4 * CTX / HX_PAGE, fmt,
                      &err) != 0 ||
        hx_graph_open(&r->g, r->m, r->dev, r->cache, MAX_ROWS, MAX_ROWS, CTX, &err) != 0)
        fail_msg("%s", err.msg);
}

static void rig_close(rig *r)
{
    hx_graph_close(r->g);
    hx_cache_close(r->cache);
    hx_model_close(r->m);
    hx_dev_close(r->dev);
}

/* Rows ids[0..n) of slot from its present end on, in calls of at most step rows; logits
 * of all rows. */
static void run(rig *r, int32_t slot, hx_phase phase, const int32_t *ids, int64_t n,
                int64_t step, float *logits)
{
    const int64_t v = r->m->desc.n_vocab;
    hx_slot *s = &r->cache->slot[slot];
    hx_err err = { 0 };

    for (int64_t i = 0; i < n; i += step) {
        const int64_t rows = HX_MIN(step, n - i);
        const hx_span span = { .slot = slot,
                               .n_row = (int32_t)rows,
                               .pos0 = (int32_t)s->n_pos,
                               .commit = s->pend };
        const hx_batch b = { .phase = phase,
                             .id = ids + i,
                             .rows = { .span = &span, .n_span = 1, .n_row = rows } };

        r->first = s->n_pos;
        r->layer = -1;
        r->phase = phase;
        if (r->tap == NULL) /* which may allocate; the graph must not */
            hx_noalloc_begin("a call of the graph");
        if (hx_cache_grow(r->cache, slot, s->n_pos + rows, &err) != 0 ||
            hx_graph_begin(r->g, &b, &err) != 0 ||
            hx_graph_layers(r->g, 0, r->m->desc.n_layer, &err) != 0 ||
            hx_graph_out(r->g, 0, rows, &err) != 0)
            fail_msg("%s", err.msg);
        if (r->tap == NULL)
            hx_noalloc_end();
        s->n_pos += rows;
        s->pend = phase == HX_PHASE_DECODE ? (int32_t)rows : 0;
        if (logits != NULL && hx_dev_get(r->dev, logits + i * v, hx_graph_logits(r->g),
                                         (size_t)(rows * v) * sizeof(float), &err) != 0)
            fail_msg("%s", err.msg);
    }
}

/* The same in a slot of its own. */
static void run_fresh(rig *r, hx_phase phase, const int32_t *ids, int64_t n, int64_t step,
                      float *logits)
{
    const int32_t slot = hx_cache_take(r->cache);

    assert_true(slot >= 0);
    run(r, slot, phase, ids, n, step, logits);
    hx_cache_drop(r->cache, slot);
}

static int64_t ids_of(const hx_json *list, int32_t **out)
{
    const int64_t n = (int64_t)hx_json_len(list);

    *out = hx_new(int32_t, n + 1);
    for (int64_t i = 0; i < n; i++)
        (*out)[i] = (int32_t)hx_json_int(hx_json_at(list, (size_t)i), -1);
    return n;
}

/* Position of the first of the next rows of `what`. Rows that attend all positions do not
 * select, but for decode rows of a GPU, which are all alike. */
static int64_t tap_position(rig *r, int64_t layer, const char *what, int64_t rows)
{
    const hx_desc *d = &r->m->desc;
    const bool selects = strcmp(what, "pick") == 0 || strcmp(what, "index_score") == 0;
    int i = 0;

    if (layer != r->layer)
        memset(r->seen, 0, sizeof r->seen);
    r->layer = layer;
    while (r->seen[i].what != NULL && strcmp(r->seen[i].what, what) != 0)
        i++;
    assert_true(i < 15);
    if (r->seen[i].what == NULL)
        r->seen[i].next =
            selects && !(r->phase == HX_PHASE_DECODE && !hx_dev_is_host(r->dev))
                ? HX_MAX(r->first, (d->index_topk + 1) * d->pool_n - 1)
                : r->first;
    r->seen[i].what = what;
    r->seen[i].next += rows;
    return r->seen[i].next - rows;
}

/* Hands taps on in host memory. */
static void on_tap(void *ud, int64_t layer, const char *what, hx_buf data, int64_t rows)
{
    rig *r = ud;
    hx_buf copy = { hx_alloc(data.n), data.n };
    hx_err err = { 0 };

    if (copy.p == NULL || hx_dev_get(r->dev, copy.p, data, data.n, &err) != 0)
        fail_msg("%s", err.msg);
    r->put = false;
    r->at = tap_position(r, layer, what, rows);
    r->tap(r->tap_ud, layer, what, copy, rows);
    if (r->put && hx_dev_put(r->dev, data, copy.p, data.n, &err) != 0)
        fail_msg("%s", err.msg);
    hx_free(copy.p);
}

static void rig_tap(rig *r, hx_tap_fn *fn, void *ud)
{
    r->tap = fn;
    r->tap_ud = ud;
    hx_graph_tap(r->g, on_tap, r);
}

/* A GPU's prefill multiplies operands of 11 bits (halves, tf32; architecture.md 3): what has
 * a bound of f32 is asked of decode rows there, which have the CPU's arithmetic. How far
 * prefill is from these, agree_case says. */
static void run_within(rig *r, double bound, const int32_t *ids, int64_t n, float *logits)
{
    const bool decode = !hx_dev_is_host(r->dev) && bound < 1e-3;

    run_fresh(r, decode ? HX_PHASE_DECODE : HX_PHASE_PREFILL, ids, n,
              decode ? 3 : MAX_ROWS, logits);
}

static double worst_row(const float *a, const float *b, int64_t rows, int64_t n)
{
    double worst = 0;

    for (int64_t r = 0; r < rows; r++)
        worst = fmax(worst, golden_rel(a + r * n, b + r * n, n));
    return worst;
}

/* ---- glm_tiny: every intermediate of every layer ------------------------ */

#define TINY "tests/data/glm_tiny"

typedef struct {
    const rig *r;
    const golden_file *f;
    const char *run;
    int64_t n; /* rows of the run */
    struct {
        char name[96];
        double off, size; /* sums of squares over the rows so far */
    } sum[64];
    int n_sum, flips;
} tiny_tap;

static void on_tiny(void *ud, int64_t layer, const char *what, hx_buf data, int64_t rows)
{
    tiny_tap *t = ud;
    char name[96];
    int64_t n;
    const float *want;

    snprintf(name, sizeof name, "%s.%lld.%s", t->run, (long long)layer,
             strcmp(what, "router_id") == 0 ? "router_ids" : what);
    if ((want = golden_f32(t->f, name, &n)) == NULL)
        return;
    assert_true(n % t->n == 0);
    want += t->r->at * (n / t->n);
    n = rows * (n / t->n);
    if (strcmp(what, "router_id") == 0) {
        for (int64_t i = 0; i < n; i++)
            t->flips += (float)((const int32_t *)data.p)[i] != want[i];
        return;
    }
    int k = 0;
    while (k < t->n_sum && strcmp(t->sum[k].name, name) != 0)
        k++;
    assert_true(k < 64);
    t->n_sum = HX_MAX(t->n_sum, k + 1);
    memcpy(t->sum[k].name, name, sizeof name);
    for (int64_t i = 0; i < n; i++) {
        const double off = (double)((const float *)data.p)[i] - want[i];

        t->sum[k].off += off * off;
        t->sum[k].size += (double)want[i] * want[i];
    }
}

static void tiny_case(const char *device, const char *isa, const char *which)
{
    hx_json *ref = golden_json(TINY "/ref.json");
    golden_file f = golden_open(TINY "/trace.safetensors");
    const bool longer = strcmp(which, "long") == 0;
    rig r;
    tiny_tap tap = { .r = &r, .f = &f, .run = which };
    float *logits = hx_new(float, 64 * 64);
    int32_t *ids;
    int64_t n_want, n;

    rig_open(&r, TINY, device, isa, HX_CACHE_F32);
    rig_tap(&r, on_tiny, &tap);
    tap.n = n = ids_of(hx_json_get(ref, longer ? "long_ids" : "full_ids"), &ids);
    run_within(&r, 1e-5, ids, n, logits);
    char name[32];
    snprintf(name, sizeof name, "%s.logits", which);
    const float *want = golden_f32(&f, name, &n_want);
    assert_non_null(want);
    assert_int_equal(n_want, n * 64);
    const double rel = worst_row(logits, want, n, 64);
    double worst = 0;
    for (int k = 0; k < tap.n_sum; k++)
        worst = fmax(worst, sqrt(tap.sum[k].off / tap.sum[k].size));
    printf("glm_tiny %s on %s: logits %.2g, intermediates %.2g (%d compared), %d router "
           "flips\n",
           which, r.dev->text, rel, worst, tap.n_sum, tap.flips);
    /* The CPU's f32 is 1.0e-5 from double in the worst row, double 7.5e-6 from the trace: f32
     * sums in another order may come out as far off as both. */
    assert_true(rel <= (hx_dev_is_host(r.dev) ? 1e-5 : 2e-5));
    assert_true(worst <= 1e-5);
    assert_int_equal(tap.flips, 0);
    assert_true(tap.n_sum >= 5 * 4);
    const hx_json *best = hx_json_get(ref, longer ? "long_tf_argmax" : "tf_argmax");
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(golden_argmax(logits + i * 64, 64),
                         hx_json_int(hx_json_at(best, (size_t)i), -1));
    rig_close(&r);
    hx_free(ids);
    hx_free(logits);
    golden_close(&f);
    hx_json_free(ref);
}

static void test_tiny_ref(void **state)
{
    (void)state;
    tiny_case("ref", NULL, "full");
    tiny_case("ref", NULL, "long");
}

static void test_tiny_cpu(void **state)
{
    (void)state;
    tiny_case("cpu", NULL, "full");
    tiny_case("cpu", NULL, "long");
    if (strcmp(fast, "cpu") == 0)
        tiny_case("cpu", "scalar", "long");
}

/* ---- decode and prefill ---------------------------------------------------- */

/* What is chosen by scores: experts, and pools to attend. What decode rows chose is recorded,
 * and prefill rows are made to choose the same: so a near tie that falls the other way is
 * judged where it falls, and all that follows is compared in every row. */
typedef struct {
    int64_t k, width; /* chosen of a row, of at most so many */
    int32_t *id;      /* [n_layer, n, k] */
    float *weight;    /* the same */
    float *score;     /* [n_layer, n, width] */
    float *now;       /* [n, width] prefill's, in its present layer */
    bool *other;      /* [n] chose otherwise there */
    int64_t rows, others;
    double error;  /* worst of a score */
    double regret; /* worst of what other choices lost, by decode's scores */
} choice;

typedef struct {
    rig *r;
    int64_t n; /* positions */
    choice router, index;
} choices;

static void choice_open(choice *c, int64_t n_layer, int64_t n, int64_t k, int64_t width)
{
    *c = (choice) { .k = k, .width = width };
    c->id = hx_new(int32_t, n_layer * n * k);
    c->weight = hx_new(float, n_layer *n *k);
    c->score = hx_new(float, n_layer *n *width);
    c->now = hx_new(float, n *width);
    c->other = hx_new(bool, n);
}

static void choice_close(choice *c)
{
    hx_free(c->id);
    hx_free(c->weight);
    hx_free(c->score);
    hx_free(c->now);
    hx_free(c->other);
}

static bool holds(const int32_t *id, int64_t n, int32_t x)
{
    for (int64_t i = 0; i < n; i++)
        if (id[i] == x)
            return true;
    return false;
}

/* Prefill's choice id of a row against decode's, want, by n scores; unit: what errors are
 * relative to. A choice among scores that are off by e can lose 2 e and no more. */
static bool choose(choice *c, int32_t *id, const int32_t *want, const float *now,
                   const float *score, const float *bias, int64_t n, double unit)
{
    double best = -INFINITY, worst = INFINITY, error = 0;

    for (int64_t i = 0; i < n; i++)
        error = fmax(error, fabs((double)now[i] - score[i]) / unit);
    for (int64_t i = 0; i < c->k; i++) {
        if (!holds(id, c->k, want[i]))
            best = fmax(best, (double)score[want[i]] + bias[want[i]]);
        if (!holds(want, c->k, id[i]))
            worst = fmin(worst, (double)score[id[i]] + bias[id[i]]);
    }
    c->rows++;
    c->error = fmax(c->error, error);
    if (best == -INFINITY)
        return false;
    c->others++;
    c->regret = fmax(c->regret, (best - worst) / unit);
    assert_true((best - worst) / unit <= 2 * error + 1e-6);
    memcpy(id, want, (size_t)c->k * sizeof *id);
    return true;
}

static bool choose_experts(choices *c, int64_t layer, int64_t pos, int32_t *id)
{
    choice *x = &c->router;
    const int64_t row = layer * c->n + pos;
    float *bias = hx_new(float, x->width);
    hx_err err = { 0 };

    if (hx_dev_get(c->r->dev, bias, c->r->m->layer[layer].router_bias,
                   (size_t)x->width * sizeof *bias, &err) != 0)
        fail_msg("%s", err.msg);
    const bool other = choose(x, id, x->id + row * x->k, x->now + pos * x->width,
                              x->score + row * x->width, bias, x->width, 1);
    hx_free(bias);
    return other;
}

static bool choose_pools(choices *c, int64_t layer, int64_t pos, int32_t *id)
{
    choice *x = &c->index;
    const int64_t row = layer * c->n + pos, n = (pos + 1) / c->r->m->desc.pool_n;
    const float *score = x->score + row * x->width;
    float *none = hx_new(float, x->width);
    double unit = 1e-30;

    for (int64_t i = 0; i < n; i++)
        unit = fmax(unit, fabs((double)score[i]));
    const bool other =
        choose(x, id, x->id + row * x->k, x->now + pos * x->width, score, none, n, unit);
    hx_free(none);
    return other;
}

/* Records rows of decode; makes those of prefill choose the same. */
static void on_choice(void *ud, int64_t layer, const char *what, hx_buf data,
                      int64_t rows)
{
    choices *c = ud;
    const bool router = strncmp(what, "router", 6) == 0, pick = strcmp(what, "pick") == 0;
    const bool id = pick || strcmp(what, "router_id") == 0,
               weight = strcmp(what, "router_w") == 0;
    choice *x = router ? &c->router : &c->index;
    const int64_t ld = (int64_t)(data.n / sizeof(float)) / rows;

    if (!router && !pick && strcmp(what, "index_score") != 0)
        return;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t pos = c->r->at + i, row = layer * c->n + pos;
        const size_t bytes =
            (size_t)HX_MIN(ld, id || weight ? x->k : x->width) * sizeof(float);
        float *at = (float *)data.p + i * ld;

        if (c->r->phase == HX_PHASE_DECODE)
            memcpy(id       ? (void *)(x->id + row * x->k)
                   : weight ? x->weight + row * x->k
                            : x->score + row * x->width,
                   at, bytes);
        else if (id)
            x->other[pos] = pick ? choose_pools(c, layer, pos, (int32_t *)at)
                                 : choose_experts(c, layer, pos, (int32_t *)at);
        else if (!weight)
            memcpy(x->now + pos * x->width, at, bytes);
        else if (x->other[pos])
            memcpy(at, x->weight + row * x->k, bytes);
        c->r->put |= (id || weight) && x->other[pos];
    }
}

/* Decode one by one, decode several rows a step, prefill in pieces. */
static void agree_case(const char *dir, const int32_t *ids, int64_t n, const char *device,
                       hx_cache_fmt fmt, double bound)
{
    rig r;
    choices c = { .r = &r, .n = n };

    rig_open(&r, dir, device, NULL, fmt);
    const hx_desc *d = &r.m->desc;
    const int64_t v = d->n_vocab;
    float *serial = hx_new(float, n *v), *other = hx_new(float, n *v);
    choice_open(&c.router, d->n_layer, n, d->n_active, d->n_expert);
    choice_open(&c.index, d->n_layer, n, d->index_topk, n / d->pool_n + 1);
    rig_tap(&r, on_choice, &c);
    run_fresh(&r, HX_PHASE_DECODE, ids, n, 1, serial);
    run_fresh(&r, HX_PHASE_PREFILL, ids, n, MAX_ROWS, other);
    hx_graph_tap(r.g, NULL, NULL);
    if (hx_dev_is_host(r.dev))
        bound = 2e-5;
    printf(
        "%s on %s, latents %d: prefill against decode %.2g, bound %.2g; router: scores "
        "%.2g, %lld of %lld rows chose otherwise (lost %.2g); index: %.2g, %lld of %lld "
        "(%.2g)\n",
        dir, r.dev->text, (int)fmt, worst_row(other, serial, n, v), bound, c.router.error,
        (long long)c.router.others, (long long)c.router.rows, c.router.regret,
        c.index.error, (long long)c.index.others, (long long)c.index.rows,
        c.index.regret);
    assert_true(c.router.rows > 0 && c.index.rows > 0);
    assert_true(worst_row(other, serial, n, v) <= bound);
    assert_true(c.router.error <= bound);
    assert_true(c.index.error <=
                4 * bound); /* terms of both signs; in f32 it is 4, too */
    /* Rows of one decode step have the bits of serial steps. */
    run_fresh(&r, HX_PHASE_DECODE, ids, n, 3, other);
    assert_memory_equal(other, serial, (size_t)(n * v) * sizeof(float));
    rig_close(&r);
    choice_close(&c.router);
    choice_close(&c.index);
    hx_free(serial);
    hx_free(other);
}

static void test_tiny_agree(void **state)
{
    hx_json *ref = golden_json(TINY "/ref.json");
    int32_t *ids;
    const int64_t n = ids_of(hx_json_get(ref, "long_ids"), &ids);

    (void)state;
    /* f32 arithmetic is 1e-5 from double in this model (2^-24 an operation): halves are
     * rounded at 2^-11, 8e-2. Only operands are, not sums: half of it. Measured: 1.8e-2. */
    for (int fmt = HX_CACHE_BF16; fmt <= HX_CACHE_FP8; fmt++) {
        agree_case(TINY, ids, n, "cpu", (hx_cache_fmt)fmt, 4e-2);
        agree_case(TINY, ids, n, "ref", (hx_cache_fmt)fmt, 0);
    }
    hx_free(ids);
    hx_json_free(ref);
}

/* ---- demos ---------------------------------------------------------------- */

typedef struct {
    const char *dir, *ref; /* model; folder with its reference outputs */
    const char *device;
    double bound;    /* relative error of a row of logits */
    double margin;   /* top-1 must agree where the reference's margin is larger */
    int64_t longest; /* prompts up to so many tokens */
} demo_case;

static void demo_prompt(rig *r, const demo_case *c, const hx_json *p, double *worst)
{
    const int64_t v = r->m->desc.n_vocab;
    const hx_str name = hx_json_str(hx_json_get(p, "name"));
    char path[512];
    int32_t *ids;
    const int64_t n = ids_of(hx_json_get(p, "ids"), &ids);

    snprintf(path, sizeof path, "%s/%.*s.logits.npy", c->ref, (int)name.n, name.p);
    if (n <= c->longest && !hx_str_is(name, "image")) {
        golden g = golden_npy(path);
        float *logits = hx_new(float, n *v);

        assert_int_equal(g.dim[1], v);
        run_within(r, c->bound, ids, n, logits);
        const double rel = worst_row(logits + (n - g.dim[0]) * v, g.p, g.dim[0], v);
        const hx_json *best = hx_json_get(p, "argmax"),
                      *margin = hx_json_get(p, "margin");
        int64_t flips = 0, sure = 0;

        for (int64_t i = 0; best != NULL && i < n; i++)
            if (hx_json_num(hx_json_at(margin, (size_t)i), 0) > c->margin) {
                sure++;
                flips += golden_argmax(logits + i * v, v) !=
                         hx_json_int(hx_json_at(best, (size_t)i), -1);
            }
        printf(
            "%.*s (%lld tokens) on %s: worst row %.2g, %lld of %lld sure top-1 differ\n",
            (int)name.n, name.p, (long long)n, r->dev->text, rel, (long long)flips,
            (long long)sure);
        assert_int_equal(flips, 0);
        *worst = fmax(*worst, rel);
        hx_free(logits);
        golden_free(&g);
    }
    hx_free(ids);
}

static void demo_logits(const demo_case *c)
{
    char path[512];
    double worst = 0;
    rig r;

    snprintf(path, sizeof path, "%s/prompts.json", c->ref);
    hx_json *list = golden_json(path);
    rig_open(&r, c->dir, c->device, NULL, HX_CACHE_F32);
    for (size_t i = 0; i < hx_json_len(list); i++)
        demo_prompt(&r, c, hx_json_at(list, i), &worst);
    printf("%s on %s: worst %.3g, bound %.3g\n", c->dir, r.dev->text, worst, c->bound);
    assert_true(worst <= c->bound);
    rig_close(&r);
    hx_json_free(list);
}

/* Greedy continuations; where the reference's own margin is below unsure a step may
 * differ, and the comparison of that prompt ends there. */
static void demo_greedy(const char *dir, const char *ref, const char *device,
                        double unsure)
{
    char path[512];
    int64_t same = 0;
    rig r;

    snprintf(path, sizeof path, "%s/prompts.json", ref);
    hx_json *list = golden_json(path);
    rig_open(&r, dir, device, NULL, HX_CACHE_F32);
    const int64_t v = r.m->desc.n_vocab;
    for (size_t i = 0; i < hx_json_len(list); i++) {
        const hx_json *p = hx_json_at(list, i), *margin = hx_json_get(p, "greedy_margin");
        const hx_str name = hx_json_str(hx_json_get(p, "name"));
        int32_t *ids, *want;
        const int64_t n = ids_of(hx_json_get(p, "ids"), &ids);
        const int64_t n_want = ids_of(hx_json_get(p, "greedy_ids"), &want);
        float *logits = hx_new(float, n *v);
        const int32_t slot = hx_cache_take(r.cache);

        if (n_want > 0 && n < 600 && !hx_str_is(name, "image")) {
            run(&r, slot, HX_PHASE_PREFILL, ids, n, MAX_ROWS, logits);
            memmove(logits, logits + (n - 1) * v, (size_t)v * sizeof(float));
            for (int64_t k = 0; k < n_want; k++) {
                const int32_t got = (int32_t)golden_argmax(logits, v);
                const double m = hx_json_num(hx_json_at(margin, (size_t)k), 0);

                if (got != want[k] && m < unsure) {
                    printf(
                        "%.*s: step %lld differs, the reference's margin there is %g\n",
                        (int)name.n, name.p, (long long)k, m);
                    break;
                }
                if (got != want[k])
                    fail_msg("%.*s: step %lld: token %d, expected %d (margin %g)",
                             (int)name.n, name.p, (long long)k, got, want[k], m);
                same++;
                run(&r, slot, HX_PHASE_DECODE, &got, 1, 1, logits);
            }
        }
        hx_cache_drop(r.cache, slot);
        hx_free(logits);
        hx_free(ids);
        hx_free(want);
    }
    printf("%s on %s: %lld greedy tokens as the reference\n", dir, r.dev->text,
           (long long)same);
    assert_true(same > 200);
    rig_close(&r);
    hx_json_free(list);
}

#define DEMO  "../shared/models/demo"
#define EXL3  "models/demo-exl3"
#define MIXED "../shared/models/demo-exl3-mixed"

static void test_demo_bf16(void **state)
{
    (void)state;
    GOLDEN_NEED(DEMO "/model.safetensors");
    demo_logits(&(demo_case) { DEMO, DEMO "/reference", "cpu", 1e-5, 0, 4000 });
}

static void test_demo_bf16_greedy(void **state)
{
    (void)state;
    GOLDEN_NEED(DEMO "/model.safetensors");
    demo_greedy(DEMO, DEMO "/reference", "cpu", 1e-3);
}

static void test_exl3_ref(void **state)
{
    (void)state;
    demo_logits(&(demo_case) { EXL3, EXL3 "/reference", "ref", 1e-5, 0.05, 40 });
}

static void test_exl3_cpu(void **state)
{
    (void)state;
    demo_logits(&(demo_case) { EXL3, EXL3 "/reference", "cpu", 5e-3, 0.05, 4000 });
}

static void test_exl3_greedy(void **state)
{
    (void)state;
    demo_greedy(EXL3, EXL3 "/reference", "cpu", 0.05);
}

static void test_mixed(void **state)
{
    (void)state;
    GOLDEN_NEED(MIXED "/model.safetensors");
    demo_logits(&(demo_case) { MIXED, MIXED "/reference", "ref", 1e-5, 0.05, 40 });
    demo_logits(&(demo_case) { MIXED, MIXED "/reference", "cpu", 5e-3, 0.05, 4000 });
}

static void test_demo_agree(void **state)
{
    hx_json *list = golden_json(EXL3 "/reference/prompts.json");
    int32_t *ids;

    (void)state;
    for (size_t i = 0; i < hx_json_len(list); i++)
        if (hx_str_is(hx_json_str(hx_json_get(hx_json_at(list, i), "name")),
                      "tool_call")) {
            const int64_t n = ids_of(hx_json_get(hx_json_at(list, i), "ids"), &ids);

            for (int fmt = HX_CACHE_BF16; fmt <= HX_CACHE_FP8; fmt++)
                agree_case(EXL3, ids, n, "cpu", (hx_cache_fmt)fmt, 5e-3);
            hx_free(ids);
        }
    hx_json_free(list);
}

/* Rows whose n picks are not the same set (the reference lists them by weight, the
 * operation by biased score). */
static int64_t other_sets(const int32_t *got, const int32_t *want, int64_t rows,
                          int64_t n)
{
    int64_t other = 0;

    for (int64_t r = 0; r < rows; r++) {
        int64_t found = 0;

        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++)
                found += got[r * n + i] == want[r * n + j];
        other += found != n;
    }
    return other;
}

/* Streams, routing and selections of the official implementation inside the BF16 demo. */
typedef struct {
    const rig *r;
    golden streams, ids, picks;
    double worst;
    int64_t flips, n_pick_rows;
} demo_tap;

static void on_demo(void *ud, int64_t layer, const char *what, hx_buf data, int64_t rows)
{
    demo_tap *t = ud;

    if (strcmp(what, "streams") == 0 && t->streams.p != NULL) {
        const int64_t row = t->streams.dim[2] * t->streams.dim[3];
        const float *want =
            (const float *)t->streams.p + (layer * t->streams.dim[1] + t->r->at) * row;

        t->worst = fmax(t->worst, worst_row(data.p, want, rows, row));
    }
    if (strcmp(what, "router_id") == 0 && t->ids.p != NULL && t->streams.p != NULL) {
        const int32_t *want = (const int32_t *)t->ids.p +
                              ((layer - 3) * t->ids.dim[1] + t->r->at) * t->ids.dim[2];

        t->flips += other_sets(data.p, want, rows, t->ids.dim[2]);
    }
}

static void demo_inside(const char *name, bool routing)
{
    rig r;
    demo_tap t = { .r = &r };
    char path[256];
    int32_t *ids = NULL;
    int64_t n = 0;

    snprintf(path, sizeof path, DEMO "/reference/%s.hidden.npy", name);
    t.streams = golden_npy(path);
    snprintf(path, sizeof path, DEMO "/reference/%s.router_ids.npy", name);
    if (routing)
        t.ids = golden_npy(path);
    hx_json *list = golden_json(DEMO "/reference/prompts.json");
    for (size_t i = 0; i < hx_json_len(list); i++)
        if (hx_str_is(hx_json_str(hx_json_get(hx_json_at(list, i), "name")), name))
            n = ids_of(hx_json_get(hx_json_at(list, i), "ids"), &ids);
    rig_open(&r, DEMO, "cpu", NULL, HX_CACHE_F32);
    rig_tap(&r, on_demo, &t);
    run_within(&r, 1e-5, ids, n, NULL);
    assert_int_equal(n, t.streams.dim[1]);
    printf("%s: streams %.2g, %lld router flips\n", name, t.worst, (long long)t.flips);
    assert_true(t.worst > 0 && t.worst <= 1e-5);
    assert_int_equal(t.flips, 0);
    rig_close(&r);
    golden_free(&t.streams);
    golden_free(&t.ids);
    hx_json_free(list);
    hx_free(ids);
}

static void test_demo_inside(void **state)
{
    (void)state;
    GOLDEN_NEED(DEMO "/model.safetensors");
    demo_inside("add_think", true);
    demo_inside("raw_story", false);
}

/* Sparse selection: which positions each query of recall_400 attends, layers 3 and 7. A
 * row whose recorded margin is a near-tie may differ. */
static void on_pick(void *ud, int64_t layer, const char *what, hx_buf data, int64_t rows)
{
    demo_tap *t = ud;
    const int which = layer == 7;
    const int64_t n_pool = 32, width = t->picks.dim[2], n_row = t->picks.dim[1];

    if (strcmp(what, "pick") != 0)
        return;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t pos = t->r->at + i;
        if (pos < 131) /* attends all */
            continue;
        const int16_t *want = (const int16_t *)t->picks.p + (which * n_row + pos) * width;
        const float margin = ((const float *)t->ids.p)[which * n_row + pos];
        int64_t found = 0;

        for (int64_t k = 0; k < n_pool; k++)
            for (int64_t j = 0; j < width; j++)
                found += want[j] == ((const int32_t *)data.p)[i * n_pool + k] * 4;
        t->n_pick_rows++;
        if (found != n_pool) {
            printf("layer %lld position %lld: selection differs, margin %g\n",
                   (long long)layer, (long long)pos, (double)margin);
            assert_true(margin < 3e-6f);
        }
    }
}

static void test_demo_selection(void **state)
{
    rig r;
    demo_tap t = { .r = &r };
    hx_json *list;
    int32_t *ids = NULL;
    int64_t n = 0;

    (void)state;
    GOLDEN_NEED(DEMO "/model.safetensors");
    t.picks = golden_npy(DEMO "/reference/recall_400.dsa_indices.npy");
    t.ids = golden_npy(DEMO "/reference/recall_400.dsa_margin.npy");
    list = golden_json(DEMO "/reference/prompts.json");
    for (size_t i = 0; i < hx_json_len(list); i++)
        if (hx_str_is(hx_json_str(hx_json_get(hx_json_at(list, i), "name")),
                      "recall_400"))
            n = ids_of(hx_json_get(hx_json_at(list, i), "ids"), &ids);
    rig_open(&r, DEMO, "cpu", NULL, HX_CACHE_F32);
    rig_tap(&r, on_pick, &t);
    run_within(&r, 1e-5, ids, n, NULL);
    assert_int_equal(t.n_pick_rows, 2 * (n - 131));
    rig_close(&r);
    golden_free(&t.picks);
    golden_free(&t.ids);
    hx_json_free(list);
    hx_free(ids);
}

/* ---- synthetic ------------------------------------------------------------- */

/* ud: what was done before, and how often it was told. */
static void on_fill(void *ud, uint64_t done, uint64_t total)
{
    uint64_t *seen = ud;

    assert_true(done > seen[0] && done <= total && total > 0);
    seen[0] = done;
    seen[1]++;
    seen[2] = total;
}

static void test_synthetic(void **state)
{
    uint64_t seen[3] = { 0 };

    hx_err err = { 0 };
    hx_model *m;

    (void)state;
    assert_int_equal(hx_model_open(&m, "synthetic:glm-5.3-flash,layers=4,experts=16",
                                   on_fill, seen, &err),
                     0);
    assert_true(seen[1] > 1 && seen[0] == seen[2]);
    assert_int_equal(m->desc.n_layer, 4);
    assert_int_equal(m->layer[3].expert[15].down.k2, 6);
    /* Hot experts of the measured table have a larger bias. */
    const float *b = m->layer[3].router_bias.p;
    assert_true(b[0] > b[1]); /* 263 and 181 picks */
    hx_model_close(m);
    assert_int_equal(hx_model_open(&m, "synthetic:llama", NULL, NULL, &err), HX_EUNSUP);
    assert_int_equal(
        hx_model_open(&m, "synthetic:glm-5.3-flash,layers=x", NULL, NULL, &err), HX_EARG);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiny_ref),         cmocka_unit_test(test_tiny_cpu),
        cmocka_unit_test(test_tiny_agree),       cmocka_unit_test(test_exl3_ref),
        cmocka_unit_test(test_exl3_cpu),         cmocka_unit_test(test_exl3_greedy),
        cmocka_unit_test(test_demo_agree),       cmocka_unit_test(test_demo_bf16),
        cmocka_unit_test(test_demo_bf16_greedy), cmocka_unit_test(test_demo_inside),
        cmocka_unit_test(test_demo_selection),   cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_synthetic),
    };

    if (argc > 1)
        fast = argv[1];
    return cmocka_run_group_tests_name("model", tests, NULL, NULL);
}
