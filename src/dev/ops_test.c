/* ops_test.c - what every operation computes, on every backend.
 *
 * One table: random inputs from fixed seeds, ref against each backend, instruction set
 * and thread count, with poisoned outputs and guarded buffers. One set of vectors that do
 * not come from this program (tests/data/ops). Then what the operations promise about
 * each other. `ops_test --bench [OP]` times the cases of the same table, `ops_test
 * PATTERN` runs the tests whose names match; `--gpu` before either: only what is needed
 * to judge a GPU. */
#include "dev/ops_case.h"

enum { BIG_BYTES = 4 << 20 }; /* cases that move more run once on a device */

/* ---- running and comparing ------------------------------------------- */

/* A device under test. */
typedef struct {
    char name[80];
    hx_dev *dev;
} lane;

enum { MAX_LANE = 3 + 2 * HX_N_ISA };
static struct {
    lane lane[MAX_LANE];
    int n;
} lanes;

/* ---- device memory --------------------------------------------------- */

/* The buffers of a trial on a device with memory of its own, guards and all. */
static struct {
    hx_dev *dev;
    hx_buf mem;
    size_t at[MAX_BUF], n[MAX_BUF]; /* of each buffer: guard, data, guard */
    void *host[MAX_BUF];            /* what the arguments pointed to */
} image;

static hx_rows *rows_of(trial *t)
{
    return (hx_rows *)(void *)(t->args + t->op->rows_at);
}

static void copied(int rc, const hx_err *err)
{
    if (rc != 0)
        fail_msg("copy: %s", err->msg);
}

/* Memory for n bytes on d; what was there is gone. */
static void image_room(hx_dev *d, size_t n)
{
    hx_err err = { 0 };

    if (image.dev == d && image.mem.n >= n)
        return;
    if (image.dev != NULL)
        hx_dev_free(image.dev, &image.mem);
    image.dev = d;
    copied(hx_dev_alloc(d, &image.mem, n + n / 2, &err), &err);
}

/* Where on the device the host pointer p of an argument lies: in buffer k, or in another
 * one when a test lets two of them share memory. */
static void *image_of(const trial *t, int k, const char *p)
{
    for (int i = -1; i < t->n_buf; i++) {
        const int j = i < 0 ? k : i;
        const tbuf *b = &t->buf[j];

        if (p >= b->p && p <= b->p + data_bytes(b))
            return (char *)image.mem.p + image.at[j] + GUARD + (p - b->p);
    }
    fail_msg("%s: a pointer of %s lies in no buffer", t->op->name, t->buf[k].name);
    return NULL;
}

/* Copies all buffers to the device and points the arguments there. Weights are aligned
 * there. Half the trials have their spans on the device, too. */
static void image_put(hx_dev *d, trial *t)
{
    hx_err err = { 0 };
    size_t n = 0;

    for (int i = 0; i < t->n_buf; i++) {
        const tbuf *b = &t->buf[i];

        image.at[i] = n;
        image.n[i] = (size_t)(b->mem + 2 * GUARD + data_bytes(b) + 64 - (b->p - GUARD));
        n += (image.n[i] + 255) / 256 * 256;
    }
    const size_t spans = t->op->spans ? (size_t)rows_of(t)->n_span * sizeof(hx_span) : 0;
    image_room(d, n + spans);
    for (int i = 0; i < t->n_buf; i++) {
        const tbuf *b = &t->buf[i];

        copied(hx_dev_put(d, hx_buf_at(image.mem, image.at[i]), b->p - GUARD, image.n[i],
                          &err),
               &err);
        image.host[i] = *b->at;
        if (*b->at != NULL)
            *b->at = image_of(t, i, *b->at);
    }
    if (spans > 0 && t->seed % 2 != 0) {
        rows_of(t)->dev = hx_buf_at(image.mem, n);
        copied(hx_dev_put(d, rows_of(t)->dev, rows_of(t)->span, spans, &err), &err);
    }
}

static void image_get(hx_dev *d, trial *t)
{
    hx_err err = { 0 };

    for (int i = 0; i < t->n_buf; i++) {
        const tbuf *b = &t->buf[i];

        copied(hx_dev_get(d, b->p - GUARD, hx_buf_at(image.mem, image.at[i]), image.n[i],
                          &err),
               &err);
        *b->at = image.host[i];
    }
    if (t->op->spans)
        rows_of(t)->dev = (hx_buf) { NULL, 0 };
}

/* A device of its own leaves a negative id where a row has none to choose. */
static int unchosen(const trial *t, hx_err *err)
{
    const hx_sample_args *a = (const void *)t->args;

    for (int64_t r = 0; r < a->rows && strcmp(t->op->name, "sample") == 0; r++)
        if (((const int32_t *)a->id.p)[r] < 0)
            return hx_fail(err, HX_EARG, "sample: row %lld: no id", (long long)r);
    return 0;
}

/* The call, with all buffers where the device can see them. */
static int call_op(hx_dev *d, trial *t, hx_err *err)
{
    if (hx_dev_is_host(d))
        return t->op->call(d, t->args, err);
    image_put(d, t);
    const int rc = t->op->call(d, t->args, err);
    image_get(d, t);
    return rc != 0 ? rc : unchosen(t, err);
}

static size_t trial_bytes(const trial *t)
{
    size_t n = 0;

    for (int i = 0; i < t->n_buf; i++)
        n += t->buf[i].role == WORK ? 0 : data_bytes(&t->buf[i]);
    return n;
}

static bool is_float(const tbuf *b, int64_t i)
{
    return b->type == T_F32 || b->type == T_BF16 || (b->type == T_CHOICE && i % 2 != 0);
}

static double value_at(const tbuf *b, int64_t i)
{
    switch (b->type) {
    case T_F32:
        return ((const float *)b->p)[i];
    case T_CHOICE:
        return i % 2 != 0 ? (double)((const float *)b->p)[i] : ((const int32_t *)b->p)[i];
    case T_I32:
        return ((const int32_t *)b->p)[i];
    case T_BF16:
        return hx_bf16_to(((const uint16_t *)b->p)[i]);
    case T_U16:
        return ((const uint16_t *)b->p)[i];
    default:
        return ((const uint8_t *)b->p)[i];
    }
}

static bool is_poison(const tbuf *b, int64_t i)
{
    return (b->role == OUT || b->role == PART) && memcmp(b->p + 4 * i, &POISON, 4) == 0;
}

/* Guards and inputs are as they were, outputs are written and hold no NaN. */
static void check_clean(const char *label, const trial *t)
{
    for (const tbuf *b = t->buf; b < t->buf + t->n_buf; b++) {
        const char *end = b->p + data_bytes(b),
                   *last = b->mem + 2 * GUARD + data_bytes(b) + 64;

        for (const char *p = b->mem; p < last; p++)
            if ((p < b->p || p >= end) && *p != 0x5C)
                fail_msg("%s: wrote outside %s, byte %td of %zu", label, b->name,
                         p - b->p, data_bytes(b));
        if (b->role == IN && checksum(b->p, data_bytes(b)) != b->sum)
            fail_msg("%s: changed its input %s", label, b->name);
        for (int64_t i = 0;
             i < b->n && (b->role == OUT || b->role == PART || b->role == STATE); i++)
            if (b->role == OUT && is_poison(b, i))
                fail_msg("%s: left %s[%lld] unwritten", label, b->name, (long long)i);
            else if (!is_poison(b, i) && is_float(b, i) && isnan(value_at(b, i)))
                fail_msg("%s: %s[%lld] is not a number", label, b->name, (long long)i);
    }
}

/* Outputs and states of the two calls have the same bits. */
static void check_same(const char *label, const char *what, const trial *a,
                       const trial *b)
{
    for (int k = 0; k < a->n_buf; k++) {
        const tbuf *x = &a->buf[k], *y = &b->buf[k];
        const size_t size = type_bytes[x->type];

        if (x->role == WORK || x->role == IN || memcmp(x->p, y->p, data_bytes(x)) == 0)
            continue;
        for (int64_t i = 0; i < x->n; i++)
            if (memcmp(x->p + (size_t)i * size, y->p + (size_t)i * size, size) != 0)
                fail_msg("%s: other bits %s: %s[%lld] is %.9g, not %.9g", label, what,
                         x->name, (long long)i, value_at(y, i), value_at(x, i));
    }
}

/* got against want, element by element; want(ud, i) is NaN where nothing must be written.
 */
static double check_near(const char *label, const tbuf *got,
                         double (*want)(const void *, int64_t), const void *ud,
                         double nmse)
{
    double err = 0, power = 0, worst = -1;
    int64_t at = 0;

    for (int64_t i = 0; i < got->n; i++) {
        const double w = want(ud, i), g = value_at(got, i);

        if (isnan(w) != is_poison(got, i))
            fail_msg("%s: %s[%lld] must be %s", label, got->name, (long long)i,
                     isnan(w) ? "left alone" : "written");
        if (isnan(w) || w == g) /* equal infinities, too */
            continue;
        if (!is_float(got, i) || !isfinite(w) || !isfinite(g))
            fail_msg("%s: %s[%lld] is %.9g, expected %.9g", label, got->name,
                     (long long)i, g, w);
        err += (g - w) * (g - w);
        if (fabs(g - w) > worst) {
            worst = fabs(g - w);
            at = i;
        }
    }
    for (int64_t i = 0; i < got->n; i++) {
        const double w = want(ud, i);

        power += is_float(got, i) && isfinite(w) ? w * w : 0;
    }
    if (err > nmse * power)
        fail_msg("%s: %s: normalised mean square error %.3g, at most %.3g; worst [%lld] "
                 "is %.9g, "
                 "expected %.9g",
                 label, got->name, err / power, nmse, (long long)at, value_at(got, at),
                 want(ud, at));
    return power > 0 ? err / power : 0;
}

static double want_buf(const void *ud, int64_t i)
{
    return is_poison(ud, i) ? NAN : value_at(ud, i);
}

/* Whether the rows are prefill rows that tensor cores may take. */
static bool prefills(const trial *t)
{
    const void *a = t->args;

    return strcmp(t->op->name, "matmul") == 0 ? ((const hx_matmul_args *)a)->prefill
           : strcmp(t->op->name, "head_matmul") == 0
               ? ((const hx_head_matmul_args *)a)->prefill
           : strcmp(t->op->name, "mla_attend") == 0
               ? ((const hx_mla_attend_args *)a)->prefill
           : strcmp(t->op->name, "moe") == 0 ? ((const hx_moe_args *)a)->prefill
                                             : strcmp(t->op->name, "kda_chunk") == 0;
}

static double bound_of(const trial *t, const hx_dev *d)
{
    if (strcmp(d->ops->name, "cuda") == 0 && prefills(t))
        return t->op->bound->tensor;
    for (int i = 0; i < t->n_buf; i++)
        if (strstr(t->buf[i].name, ".suh") != NULL)
            return t->op->bound->exl3;
    return t->op->bound->nmse;
}

/* All outputs of got against those of ref; returns the largest error. */
static double check_against(const char *label, const trial *ref, const trial *got,
                            double nmse)
{
    double worst = 0;

    for (int k = 0; k < got->n_buf; k++)
        if (got->buf[k].role != IN && got->buf[k].role != WORK)
            worst = HX_MAX(worst,
                           check_near(label, &got->buf[k], want_buf, &ref->buf[k], nmse));
    return worst;
}

static int64_t n_row(trial *t)
{
    return t->op->spans ? rows_of(t)->n_row
                        : *(int64_t *)(void *)(t->args + t->op->rows_at);
}

/* Calls the operation on rows r0 .. r0 + n - 1 alone, or on one span that lies there. */
static int run_rows(hx_dev *d, trial *t, int64_t r0, int64_t n, const hx_span *span,
                    hx_err *err)
{
    char saved[ARGS_BYTES];
    hx_span one;

    memcpy(saved, t->args, sizeof(saved));
    for (const tbuf *b = t->buf; b < t->buf + t->n_buf; b++)
        if (b->at != NULL && b->row > 0) {
            const size_t skip =
                HX_MIN((size_t)(r0 * b->row) * type_bytes[b->type], data_bytes(b));

            *b->at = b->p + skip;
            *b->size_at = data_bytes(b) - skip;
        }
    if (t->host_at != NULL)
        *t->host_at = (const char *)*t->host_at + (size_t)r0 * t->host_bytes;
    if (span != NULL) {
        one = *span;
        one.row0 = 0;
        *rows_of(t) = (hx_rows) { .span = &one, .n_span = 1, .n_row = n };
    } else {
        *(int64_t *)(void *)(t->args + t->op->rows_at) = n;
    }
    const int rc = call_op(d, t, err);
    for (const tbuf *b = t->buf; b < t->buf + t->n_buf; b++)
        if (b->at != NULL && b->row > 0) { /* not all of them lie in args */
            *b->at = b->p;
            *b->size_at = data_bytes(b);
        }
    memcpy(t->args, saved, sizeof(saved));
    return rc;
}

/* The call in pieces: span by span, or as 1, 2 and the other rows. */
static void run_in_pieces(const char *label, hx_dev *d, trial *t)
{
    const int64_t n = n_row(t);
    hx_err err = { 0 };

    if (t->op->spans) {
        const hx_rows r = *rows_of(t);

        for (int32_t i = 0; i < r.n_span; i++)
            check_ok(label,
                     run_rows(d, t, r.span[i].row0, r.span[i].n_row, &r.span[i], &err),
                     &err);
        return;
    }
    for (int64_t r0 = 0, k = 1; r0 < n; r0 += k, k = r0 == 1 ? 2 : n)
        check_ok(label, run_rows(d, t, r0, HX_MIN(k, n - r0), NULL, &err), &err);
}

static trial *run_case(const char *label, hx_dev *d, const op_row *op, size_t i,
                       bool pieces)
{
    const void *args = (const char *)op->cases + i * op->args_bytes;
    trial *t = new_trial(op, args, 100 + i, i % 2 != 0 ? 1 : 0);
    hx_err err = { 0 };

    if (pieces)
        run_in_pieces(label, d, t);
    else
        check_ok(label, call_op(d, t, &err), &err);
    check_clean(label, t);
    return t;
}

static bool is_ref(const lane *l)
{
    return strcmp(l->dev->ops->name, "ref") == 0;
}

/* Case i on one device: twice, and in pieces. */
static trial *run_thrice(const char *label, const lane *l, const op_row *op, size_t i)
{
    trial *a = run_case(label, l->dev, op, i, false);

    if (trial_bytes(a) > BIG_BYTES || (is_ref(l) && l != &lanes.lane[0]))
        return a;
    for (int pieces = 0; pieces < (op->bound->whole ? 1 : 2); pieces++) {
        trial *b = run_case(label, l->dev, op, i, pieces != 0);

        check_same(label, pieces != 0 ? "row by row" : "when run again", a, b);
        free_trial(b);
    }
    return a;
}

static bool same_backend(const lane *a, const lane *b)
{
    return strcmp(a->dev->ops->name, b->dev->ops->name) == 0;
}

/* One operation: all cases on all devices. Lane 0 is ref. */
static void test_op(void **state)
{
    const op_row *op = *state;
    double worst = 0;

    assert_true(op->n_case > 0 && op->n_vector > 0);
    for (size_t i = 0; i < op->n_case; i++) {
        trial *made[MAX_LANE] = { NULL };

        for (int l = 0; l < lanes.n; l++) {
            const lane *at = &lanes.lane[l];
            char label[160];

            snprintf(label, sizeof(label), "%s case %zu, %s", op->name, i, at->name);
            made[l] = run_thrice(label, at, op, i);
            if (l > 0 && !same_backend(at, &lanes.lane[0]))
                worst = HX_MAX(worst, check_against(label, made[0], made[l],
                                                    bound_of(made[l], at->dev)));
            for (int k = 0; k < l; k++) {
                const lane *of = &lanes.lane[k];

                const bool same =
                    same_backend(of, at)
                        ? op->bound->same_bits || of->dev->level == at->dev->level
                        : op->bound->canonical && !is_ref(of) && !prefills(made[l]);

                if (same) {
                    char than[100];

                    snprintf(than, sizeof(than), "than on %s", of->name);
                    check_same(label, than, made[k], made[l]);
                }
            }
        }
        for (int l = 0; l < lanes.n; l++)
            free_trial(made[l]);
    }
    print_message("           %-14s %2zu cases, largest error %.2g of %.2g (%s)\n",
                  op->name, op->n_case, worst, HX_MAX(op->bound->nmse, op->bound->exl3),
                  op->bound->why);
}

/* ---- vectors --------------------------------------------------------- */

static void put_json(const char *label, tbuf *b, const hx_json *j)
{
    if ((int64_t)hx_json_len(j) != b->n)
        fail_msg("%s: %s has %zu values, the case needs %lld", label, b->name,
                 hx_json_len(j), (long long)b->n);
    for (int64_t i = 0; i < b->n; i++) {
        const double v = hx_json_num(hx_json_at(j, (size_t)i), NAN);

        switch (b->type) {
        case T_F32:
        case T_CHOICE: {
            const float f = (float)v;

            memcpy(b->p + 4 * i, &f, 4);
            break;
        }
        case T_I32:
            ((int32_t *)b->p)[i] = (int32_t)v;
            break;
        case T_U8:
            ((uint8_t *)b->p)[i] = (uint8_t)v;
            break;
        default: {
            const uint16_t u = (uint16_t)v;

            memcpy(b->p + 2 * i, &u, 2);
        }
        }
    }
    b->sum = checksum(b->p, data_bytes(b));
}

/* Expected values of one buffer; bf16 ones are stored as bits. */
typedef struct {
    const hx_json *j;
    type ty;
} wanted;

static double want_json(const void *ud, int64_t i)
{
    const wanted *w = ud;
    const double v = hx_json_num(hx_json_at(w->j, (size_t)i), NAN);

    return w->ty == T_BF16 ? hx_bf16_to((uint16_t)v) : v;
}

static void run_vector(const lane *l, const op_row *op, size_t i, const hx_json *data)
{
    trial *t = new_trial(op, (const char *)op->vectors + i * op->args_bytes, i, 0);
    hx_err err = { 0 };
    char label[160], after[64];
    int checked = 0;

    snprintf(label, sizeof(label), "%s vector %zu, %s", op->name, i, l->name);
    for (tbuf *b = t->buf; b < t->buf + t->n_buf; b++) {
        const hx_json *j = hx_json_get(data, b->name);

        snprintf(after, sizeof(after), "%s>", b->name);
        if (j == NULL && (b->role == IN || b->role == STATE))
            fail_msg("%s: no values for %s", label, b->name);
        if (b->role == IN || b->role == STATE || hx_json_has(data, after))
            put_json(label, b, j);
    }
    check_ok(label, call_op(l->dev, t, &err), &err);
    for (tbuf *b = t->buf; b < t->buf + t->n_buf; b++) {
        const bool ref = strcmp(l->dev->ops->name, "ref") == 0;
        wanted w = { hx_json_get(data, b->name), b->type };

        snprintf(after, sizeof(after), "%s>", b->name);
        if (hx_json_has(data, after))
            w.j = hx_json_get(data, after);
        else if (b->role != OUT && b->role != PART)
            continue;
        if (w.j == NULL || (int64_t)hx_json_len(w.j) != b->n)
            fail_msg("%s: expected %zu values of %s, it has %lld", label,
                     hx_json_len(w.j), b->name, (long long)b->n);
        /* the decimals have nine digits; f32 storage alone costs 1e-15 */
        check_near(label, b, want_json, &w,
                   ref ? 1e-13 : HX_MAX(bound_of(t, l->dev), 1e-13));
        checked++;
    }
    assert_true(checked > 0);
    free_trial(t);
}

static void test_vectors(void **state)
{
    const op_row *op = *state;
    hx_json *file = NULL;
    hx_err err = { 0 };
    char path[128], *text = NULL;
    size_t n = 0;

    snprintf(path, sizeof(path), "tests/data/ops/%s.json", op->name);
    check_ok(path, hx_file_read(path, 1 << 20, &text, &n, &err), &err);
    check_ok(path, hx_json_parse(&file, (hx_str) { text, n }, 0, &err), &err);
    assert_int_equal(hx_json_len(file), op->n_vector);
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < op->n_vector; i++)
            run_vector(&lanes.lane[l], op, i, hx_json_at(file, i));
    hx_json_free(file);
    hx_free(text);
}

/* ---- promises between calls ------------------------------------------ */

static void run_span(const char *label, const lane *l, trial *t, int64_t row0, hx_span s)
{
    hx_err err = { 0 };

    check_ok(label, run_rows(l->dev, t, row0, s.n_row, &s, &err), &err);
}

/* R rows at once, of which keep are folded later, against keep calls of one row: the same
 * outputs and, once folded, the same state. first rows were pending before. */
static void check_serial(const lane *l, const op_row *op, const void *args, int32_t first,
                         int32_t keep, const char *out)
{
    trial *a = new_trial(op, args, 5, 0), *b = new_trial(op, args, 5, 0);
    const int32_t slot = 1, n = (int32_t)n_row(a), pos = 70;
    char label[160];

    snprintf(label, sizeof(label), "%s, %d pending, %d of %d rows kept, %s", op->name,
             first, keep, n, l->name);
    run_span(label, l, a, 0, (hx_span) { slot, 0, n, pos, first });
    run_span(label, l, a, 0, (hx_span) { slot, 0, 0, pos + keep, keep });
    for (int32_t i = 0; i < keep; i++)
        run_span(label, l, b, i, (hx_span) { slot, 0, 1, pos + i, i == 0 ? first : 1 });
    run_span(label, l, b, 0, (hx_span) { slot, 0, 0, pos + keep, keep > 0 ? 1 : first });

    const tbuf *y = buf_named(a, out);
    if (memcmp(y->p, data_of(b, out), (size_t)(keep * y->row) * 4) != 0)
        fail_msg("%s: other outputs than serial calls", label);
    if (memcmp(data_of(a, "state"), data_of(b, "state"),
               data_bytes(buf_named(a, "state"))) != 0)
        fail_msg("%s: another state than after serial calls", label);
    free_trial(a);
    free_trial(b);
}

static void test_serial(void **state)
{
    const hx_kda_step_args step[] = {
        { .heads = 3, .width = 21, .rows = SPANS(8, { 1, 0, 8, 70, 0 }) },
        { .heads = 2, .width = 128, .rows = SPANS(4, { 1, 0, 4, 70, 0 }) },
    };
    const hx_conv_short_args conv[] = {
        { .channels = 37, .taps = 4, .hold = true, .rows = SPANS(8, { 1, 0, 8, 70, 0 }) },
        { .channels = 70, .taps = 8, .hold = true, .rows = SPANS(5, { 1, 0, 5, 70, 0 }) },
    };

    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < 2; i++)
            for (int32_t keep = 0; keep <= (i == 0 ? 8 : 4); keep++)
                for (int32_t first = 0; first <= 8; first += 4) {
                    check_serial(&lanes.lane[l], op_named("kda_step"), &step[i], first,
                                 keep, "o");
                    check_serial(&lanes.lane[l], op_named("conv_short"), &conv[i], first,
                                 keep, "y");
                }
}

/* Prefill of rows is the same as holding them and folding all. */
static void test_conv_hold(void **state)
{
    const hx_conv_short_args hold = {
        .channels = 37, .taps = 4, .hold = true, .rows = SPANS(6, { 0, 0, 6, 9, 0 })
    };
    hx_conv_short_args move = hold;

    (void)state;
    move.hold = false;
    for (int l = 0; l < lanes.n; l++) {
        trial *a = new_trial(op_named("conv_short"), &hold, 5, 0);
        trial *b = new_trial(op_named("conv_short"), &move, 5, 0);

        run_span("hold", &lanes.lane[l], a, 0, (hx_span) { 0, 0, 6, 9, 3 });
        run_span("fold", &lanes.lane[l], a, 0, (hx_span) { 0, 0, 0, 15, 6 });
        run_span("move", &lanes.lane[l], b, 0, (hx_span) { 0, 0, 6, 9, 3 });
        assert_memory_equal(data_of(a, "y"), data_of(b, "y"),
                            data_bytes(buf_named(a, "y")));
        assert_memory_equal(data_of(a, "state"), data_of(b, "state"),
                            data_bytes(buf_named(a, "state")));
        free_trial(a);
        free_trial(b);
    }
}

/* f32 storage in ref; f32 arithmetic in cpu; tensor cores in cuda. */
static double near_bound(const lane *l)
{
    return is_ref(l)                                ? 1e-14
           : strcmp(l->dev->ops->name, "cuda") == 0 ? op_named("kda_chunk")->bound->tensor
                                                    : 1e-12;
}

static void test_chunk_is_step(void **state)
{
    const hx_kda_step_args args[] = {
        { .heads = 2, .width = 24, .rows = SPANS(150, { 0, 0, 150, 0, 0 }) },
        { .heads = 2, .width = 128, .rows = SPANS(130, { 0, 0, 130, 0, 0 }) },
    };

    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < HX_LEN(args); i++) {
            const lane *at = &lanes.lane[l];
            trial *a = new_trial(op_named("kda_chunk"), &args[i], 3, 0);
            trial *b = new_trial(op_named("kda_step"), &args[i], 3, 0);
            trial *c = new_trial(op_named("kda_chunk"), &args[i], 3, 0);
            const int32_t n = (int32_t)n_row(a);
            int32_t held = 0;

            run_span(at->name, at, a, 0, (hx_span) { 0, 0, n, 0, 0 });
            for (int32_t r = 0; r < n; r += held) {
                const int32_t k = HX_MIN(1 + r % 8, n - r);

                run_span(at->name, at, b, r, (hx_span) { 0, 0, k, r, held });
                held = k;
            }
            run_span(at->name, at, b, 0, (hx_span) { 0, 0, 0, n, held });
            for (int32_t r = 0; r < n; r += 64)
                run_span(at->name, at, c, r, (hx_span) { 0, 0, HX_MIN(64, n - r), r, 0 });
            check_near(at->name, buf_named(a, "o"), want_buf, buf_named(b, "o"),
                       near_bound(at));
            check_near(at->name, buf_named(a, "state"), want_buf, buf_named(b, "state"),
                       near_bound(at));
            check_same(at->name, "in blocks of 64 rows", a, c);
            free_trial(a);
            free_trial(b);
            free_trial(c);
        }
}

/* Rejected drafts leave no trace in pooled keys. */
static void test_index_goes_back(void **state)
{
    const hx_index_append_args args = { .pool_n = 4,
                                        .pool = PAGES(BF16, 33),
                                        .rows = SPANS(10, { 0, 0, 10, 58, 0 }) };

    (void)state;
    for (int l = 0; l < lanes.n; l++) {
        const lane *at = &lanes.lane[l];
        trial *a = new_trial(op_named("index_append"), &args, 3, 0);
        trial *b = new_trial(op_named("index_append"), &args, 3, 0);

        run_span(at->name, at, a, 0,
                 (hx_span) { 0, 0, 6, 60, 0 }); /* 62 .. 65 are rejected */
        run_span(at->name, at, b, 0, (hx_span) { 0, 0, 2, 60, 0 });
        run_span(at->name, at, a, 6, (hx_span) { 0, 0, 4, 62, 0 });
        run_span(at->name, at, b, 6, (hx_span) { 0, 0, 4, 62, 0 });
        check_same(at->name, "after rejected rows", a, b);
        free_trial(a);
        free_trial(b);
    }
}

/* Positions in pages 0 and 1 land where the table says, nowhere else. */
static void test_page_boundary(void **state)
{
    const hx_latent_append_args args = { .cache = PAGES(F32, 3),
                                         .rows = SPANS(3, { 0, 0, 3, 63, 0 }) };

    (void)state;
    for (int l = 0; l < lanes.n; l++) {
        trial *t = new_trial(op_named("latent_append"), &args, 3, 0);
        trial *before = new_trial(op_named("latent_append"), &args, 3, 0);
        const int32_t *table = data_of(t, "cache.table");
        float *pages_now = data_of(t, "cache"), *expect = data_of(before, "cache");
        hx_err err = { 0 };

        check_ok("append", call_op(lanes.lane[l].dev, t, &err), &err);
        for (int i = 0; i < 3; i++)
            memcpy(expect + (table[(63 + i) / 64] * 64 + (63 + i) % 64) * 3,
                   (float *)data_of(t, "c") + 3 * i, 12);
        assert_int_not_equal(table[0], table[1]);
        assert_memory_equal(pages_now, expect, data_bytes(buf_named(t, "cache")));
        free_trial(t);
        free_trial(before);
    }
}

static void test_sparse_is_dense(void **state)
{
    const hx_mla_attend_args dense_args = { .heads = 3,
                                            .cache = PAGES(BF16, 40),
                                            .scale = 0.3f,
                                            .pool_n = 4,
                                            .rows = SPANS(75, { 1, 0, 70, 0, 0 },
                                                          { 0, 70, 5, 190, 0 }) };
    hx_mla_attend_args sparse_args = dense_args;

    (void)state;
    sparse_args.k_pick = 60;
    for (int l = 0; l < lanes.n; l++) {
        const lane *at = &lanes.lane[l];
        trial *a = new_trial(op_named("mla_attend"), &dense_args, 3, 0);
        trial *b = new_trial(op_named("mla_attend"), &sparse_args, 3, 0);
        hx_err err = { 0 };

        check_ok("dense", call_op(at->dev, a, &err), &err);
        check_ok("sparse", call_op(at->dev, b, &err), &err);
        if (memcmp(data_of(a, "z"), data_of(b, "z"), data_bytes(buf_named(a, "z"))) != 0)
            fail_msg("%s: all pools picked is not the same as dense attention", at->name);
        free_trial(a);
        free_trial(b);
    }
}

static void test_topk_ties(void **state)
{
    static const struct {
        float score[8];
        int32_t pick[3];
    } at[] = {
        { { 0 }, { 0, 1, 2 } },
        { { 0, 0, 1, 0, 0, 0, 0, 1 }, { 0, 2, 7 } },
        { { 1, 2, 2, 2, 2, 1, 1, 3 }, { 1, 2, 7 } },
        { { -1, -2, -1, -3, -1, -1, 0, -0.0f }, { 0, 6, 7 } },
        { { 5, 4, 3, 2, 1, 0, -1, -2 }, { 0, 1, 2 } },
        { { 0, 1, 2, 3, 4, 5, 6, 7 }, { 5, 6, 7 } },
    };
    const hx_topk_args args = { .k = 3,
                                .pool_n = 4,
                                .rows = SPANS(1, { 0, 0, 1, 33, 0 }) };

    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < HX_LEN(at); i++) {
            trial *t = new_trial(op_named("topk"), &args, 1, 0);
            hx_err err = { 0 };

            memcpy(data_of(t, "score"), at[i].score, sizeof(at[i].score));
            check_ok("topk", call_op(lanes.lane[l].dev, t, &err), &err);
            assert_int_equal(*(int32_t *)data_of(t, "n_pick"), 3);
            for (int k = 0; k < 3; k++)
                assert_int_equal(((int32_t *)data_of(t, "pick"))[k], at[i].pick[k]);
            free_trial(t);
        }
}

static void test_router_ties(void **state)
{
    const hx_router_args args = {
        .rows = 1, .active = 4, .factor = 1, .w = MAT(F32, 37, 9)
    };
    static const int32_t expect[] = { 3, 30, 0, 1 };

    (void)state;
    for (int l = 0; l < lanes.n; l++) {
        trial *t = new_trial(op_named("router"), &args, 1, 0);
        float *bias = data_of(t, "bias");
        hx_err err = { 0 };

        memset(data_of(t, "w.w"), 0, 37 * 9 * 4);
        for (int i = 0; i < 37; i++)
            bias[i] = i == 3 || i == 30 ? 1 : 0.25f;
        check_ok("router", call_op(lanes.lane[l].dev, t, &err), &err);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(((int32_t *)data_of(t, "id"))[i], expect[i]);
            assert_true(fabsf(((float *)data_of(t, "weight"))[i] - 0.25f) < 1e-6f);
        }
        free_trial(t);
    }
}

/* A routed expert is its three products with swiglu in between. */
static void test_moe_is_matmul(void **state)
{
    const hx_moe_args like[] = {
        { .rows = 3,
          .active = 2,
          .n_expert = 3,
          .expert = EXPERT(BF16, 67, 40),
          .limit = 2 },
        { .rows = 3,
          .active = 2,
          .n_expert = 3,
          .limit = 10,
          .expert = EXPERT(EXL3, 200, 140, .k2 = 6, .codebook = HX_CB_MCG) },
    };

    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < HX_LEN(like); i++) {
            hx_dev *d = lanes.lane[l].dev;
            if (!hx_dev_is_host(d)) /* its bits are the CPU's: see the table */
                continue;
            trial *t = new_trial(op_named("moe"), &like[i], 2, 0);
            const hx_moe_args *a = (const void *)t->args;
            float g[140], u[140];
            const hx_buf gb = { g, sizeof(g) }, ub = { u, sizeof(u) };
            hx_err err = { 0 };

            check_ok("moe", t->op->call(d, a, &err), &err);
            for (int64_t p = 0; p < a->rows * a->active; p++) {
                const int32_t id = ((int32_t *)a->id.p)[p];

                if (id < 0)
                    continue;
                const hx_expert *x = &a->expert[id];
                const int64_t dim = x->gate.k, f = x->gate.n;
                float *y = (float *)a->y.p + p * dim, expect[200], err2 = 0, power = 0;
                const hx_buf in = hx_buf_at(a->x, (size_t)(p / a->active * dim) * 4);
                const hx_matmul_args gate = { .y = gb,
                                              .x = in,
                                              .w = &x->gate,
                                              .rows = 1,
                                              .ldx = dim,
                                              .ldy = f },
                                     up = { .y = ub,
                                            .x = in,
                                            .w = &x->up,
                                            .rows = 1,
                                            .ldx = dim,
                                            .ldy = f };
                const hx_swiglu_args act = { gb, gb, ub, 1, f, a->limit };
                const hx_matmul_args down = { .y = { expect, sizeof(expect) },
                                              .x = gb,
                                              .w = &x->down,
                                              .rows = 1,
                                              .ldx = f,
                                              .ldy = dim };

                assert_int_equal(hx_op_matmul(d, &gate, &err), 0);
                assert_int_equal(hx_op_matmul(d, &up, &err), 0);
                assert_int_equal(hx_op_swiglu(d, &act, &err), 0);
                assert_int_equal(hx_op_matmul(d, &down, &err), 0);
                for (int64_t c = 0; c < dim; c++) {
                    err2 += (y[c] - expect[c]) * (y[c] - expect[c]);
                    power += expect[c] * expect[c];
                }
                /* what lies between is f32 here and may be kept finer there */
                if (!(err2 <= 1e-9f * power))
                    fail_msg("%s: expert %d: error %g", lanes.lane[l].name, id,
                             (double)(err2 / power));
            }
            free_trial(t);
        }
}

/* y may be x: the same bits in place. */
static void test_in_place(void **state)
{
    static const struct {
        const char *op, *out, *in;
    } at[] = {
        { "rmsnorm", "y", "x" },     { "layernorm", "y", "x" },
        { "swiglu", "y", "gate" },   { "kda_gate", "g", "f" },
        { "kda_gate", "beta", "b" }, { "kda_out", "y", "o" },
        { "combine", "y", "base" },
    };

    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < HX_LEN(at); i++) {
            const op_row *op = op_named(at[i].op);
            const size_t last = op->n_case - 1;
            trial *a =
                new_trial(op, (const char *)op->cases + last * op->args_bytes, 4, 0);
            trial *b =
                new_trial(op, (const char *)op->cases + last * op->args_bytes, 4, 0);
            tbuf *out = buf_named(b, at[i].out), *in = buf_named(b, at[i].in);
            hx_err err = { 0 };

            *out->at = in->p;
            check_ok(at[i].op, call_op(lanes.lane[l].dev, a, &err), &err);
            check_ok(at[i].op, call_op(lanes.lane[l].dev, b, &err), &err);
            if (memcmp(in->p, data_of(a, at[i].out), data_bytes(out)) != 0)
                fail_msg("%s, %s: other bits in place", at[i].op, lanes.lane[l].name);
            free_trial(a);
            free_trial(b);
        }
}

/* ---- sampling -------------------------------------------------------- */

enum { N_DRAW = 4000, DRAWS = 500 /* of a call */ };

/* How often each of 6 ids comes, with logits log(1, 8, 2, 4, 2, 0.5) (and a padding id).
 */
static void count_draws(hx_dev *d, const hx_sample_row *like, int count[7])
{
    static const float weight[7] = { 1, 8, 2, 4, 2, 0.5f, 100 };
    static hx_sample_row row[DRAWS];
    const hx_sample_args args = { .row = row, .rows = DRAWS, .n_vocab = 7, .n_token = 6 };
    trial *t = new_trial(op_named("sample"), &args, 1, 0);
    float *logits = data_of(t, "logits");
    hx_err err = { 0 };

    for (int i = 0; i < 7 * DRAWS; i++)
        logits[i] = logf(weight[i % 7]);
    memset(count, 0, 7 * sizeof(*count));
    for (int i = 0; i < N_DRAW; i += DRAWS) {
        for (int r = 0; r < DRAWS; r++) {
            row[r] = *like;
            row[r].counter = (uint64_t)(i + r);
        }
        check_ok("sample", call_op(d, t, &err), &err);
        for (int r = 0; r < DRAWS; r++) {
            const int32_t id = ((int32_t *)data_of(t, "id"))[r];

            assert_in_range(id, 0, 6);
            count[id]++;
        }
    }
    free_trial(t);
}

static void test_sample_draws(void **state)
{
    static const int32_t ban[] = { 1 };
    static const uint32_t mask[] = { 0x2D };
    const struct {
        hx_sample_row row;
        float expect[7];
    } at[] = {
        { { .temperature = 1 }, { 1, 8, 2, 4, 2, 0.5f } },
        { { .temperature = 2 }, { 1, 2.828f, 1.414f, 2, 1.414f, 0.7071f } },
        { { .temperature = 0.5f }, { 1, 64, 4, 16, 4, 0.25f } },
        { { .temperature = 1, .top_k = 3 }, { 0, 8, 2, 4 } }, /* a tie: the lower id */
        { { .temperature = 1, .top_k = 100 }, { 1, 8, 2, 4, 2, 0.5f } },
        { { .temperature = 1, .top_p = 0.4f }, { 0, 8 } },
        { { .temperature = 1, .top_p = 0.5f }, { 0, 8, 0, 4 } }, /* 8/17.5 < 0.5 */
        { { .temperature = 1, .top_p = 0.75f }, { 0, 8, 2, 4 } },
        { { .temperature = 1, .top_p = 1 }, { 1, 8, 2, 4, 2, 0.5f } },
        { { .temperature = 1, .min_p = 0.2f }, { 0, 8, 2, 4, 2 } },
        { { .temperature = 1, .min_p = 1 }, { 0, 8 } },
        { { .temperature = 1, .top_k = 3, .top_p = 0.6f },
          { 0, 8, 0, 4 } }, /* 8/14 < 0.6: of what top_k left */
        { { .temperature = 1, .top_p = 0.9f, .min_p = 0.3f }, { 0, 8, 0, 4 } },
        { { .temperature = 1, .ban = ban, .n_ban = 1 }, { 1, 0, 2, 4, 2, 0.5f } },
        { { .temperature = 1, .mask = mask }, { 1, 0, 2, 4, 0, 0.5f } },
    };

    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (size_t i = 0; i < HX_LEN(at); i++) {
            hx_sample_row row = at[i].row;
            int count[7];
            float mass = 0;

            row.seed = 1234 + i;
            count_draws(lanes.lane[l].dev, &row, count);
            for (int k = 0; k < 7; k++)
                mass += at[i].expect[k];
            for (int k = 0; k < 7; k++) {
                const double p = at[i].expect[k] / mass, sd = sqrt(N_DRAW * p * (1 - p));

                if (fabs(count[k] - N_DRAW * p) > 4 * sd || (p == 0 && count[k] > 0))
                    fail_msg(
                        "%s: setting %zu: id %d came %d times, expected %.0f +- %.0f",
                        lanes.lane[l].name, i, k, count[k], N_DRAW * p, sd);
            }
        }
}

static void test_sample_refuses(void **state)
{
    const hx_sample_row rows[2] = { { 0 }, { .mask = (const uint32_t[]) { 0 } } };
    hx_sample_args args = { .rows = 2, .n_vocab = 9, .n_token = 8, .row = rows };

    (void)state;
    for (int l = 0; l < lanes.n; l++) {
        hx_dev *d = lanes.lane[l].dev;
        trial *t = new_trial(op_named("sample"), &args, 1, 0);
        hx_err err = { 0 };

        assert_int_equal(call_op(d, t, &err), HX_EARG);
        assert_non_null(strstr(err.msg, "row 1"));
        ((hx_sample_args *)(void *)t->args)->rows = 1;
        assert_int_equal(call_op(d, t, &err), 0);
        ((float *)data_of(t, "logits"))[8] = NAN; /* no token: does not matter */
        assert_int_equal(call_op(d, t, &err), 0);
        ((float *)data_of(t, "logits"))[7] = NAN;
        assert_int_equal(call_op(d, t, &err), HX_EARG);
        assert_non_null(strstr(err.msg, "row 0"));
        free_trial(t);
    }
}

/* ---- and the rest ---------------------------------------------------- */

/* Rows outside every span are nobody's: they stay. */
static void test_rows_between_spans(void **state)
{
    const hx_kda_step_args args = {
        .heads = 1, .width = 5, .rows = SPANS(6, { 0, 1, 2, 3, 0 }, { 1, 4, 1, 3, 0 })
    };

    (void)state;
    for (int l = 0; l < lanes.n; l++) {
        trial *t = new_trial(op_named("kda_step"), &args, 1, 0);
        hx_err err = { 0 };

        check_ok("kda_step", call_op(lanes.lane[l].dev, t, &err), &err);
        for (int64_t i = 0; i < 30; i++)
            assert_int_equal(is_poison(buf_named(t, "o"), i),
                             i / 5 == 0 || i / 5 == 3 || i / 5 == 5);
        free_trial(t);
    }
}

/* No operation allocates, and all work in the scratch that the limits ask for. */
static void test_no_allocation(void **state)
{
    (void)state;
    for (int l = 0; l < lanes.n; l++)
        for (const op_row *op = op_rows; op < op_rows + HX_LEN(op_rows); op++) {
            trial *t = new_trial(op, op->vectors, 1, 0);
            hx_err err = { 0 };

            hx_noalloc_begin(op->name);
            const int rc = call_op(lanes.lane[l].dev, t, &err);
            hx_noalloc_end();
            check_ok(op->name, rc, &err);
            free_trial(t);
        }
}

/* ---- devices --------------------------------------------------------- */

static int open_lane(const hx_dev_opt *opt)
{
    lane *l = &lanes.lane[lanes.n];
    hx_err err = { 0 };
    const int rc = hx_dev_open(&l->dev, opt, &err);

    if (rc == HX_EUNSUP) {
        print_message("           %s: not tested\n", err.msg);
        return 0;
    }
    if (rc != 0) {
        print_error("%s\n", err.msg);
        return -1;
    }
    snprintf(l->name, sizeof(l->name), "%s", l->dev->text);
    lanes.n++;
    return 0;
}

static bool gpu_only; /* --gpu */

/* Lane 0: ref with one thread. Then ref with two, and cpu with every instruction set this
 * machine has, with one and two, and cuda. With --gpu: ref, cpu and cuda, as fast as they
 * are. */
static int open_lanes(void **state)
{
    static const char *const names[HX_N_ISA] = { "scalar", "avx2", "avx512" };
    hx_dev_opt opt = { .name = "ref", .limits = test_limits };

    (void)state;
    if (gpu_only) {
        if (open_lane(&opt) != 0)
            return -1;
        opt.name = "cpu";
        if (open_lane(&opt) != 0)
            return -1;
    }
    for (int isa = -1; isa < HX_N_ISA && !gpu_only; isa++)
        for (int n = 1; n <= 2; n++) {
            if (isa >= 0 && !hx_cpu_has((hx_isa)isa)) {
                if (n == 1)
                    print_message("           this CPU lacks %s: not tested\n",
                                  names[isa]);
                continue;
            }
            opt.name = isa < 0 ? "ref" : "cpu";
            opt.isa = isa < 0 ? NULL : names[isa];
            opt.n_threads = n;
            if (open_lane(&opt) != 0)
                return -1;
        }
    opt.name = "cuda";
    opt.isa = NULL;
    return open_lane(&opt);
}

static int close_lanes(void **state)
{
    (void)state;
    if (image.dev != NULL)
        hx_dev_free(image.dev, &image.mem);
    image.dev = NULL;
    while (lanes.n > 0)
        hx_dev_close(lanes.lane[--lanes.n].dev);
    return 0;
}

/* ---- bench ----------------------------------------------------------- */

typedef struct {
    char *to;
    const char *from;
} copy;

static void copy_part(void *ud, int64_t begin, int64_t end, int worker)
{
    const copy *c = ud;

    (void)worker;
    memcpy(c->to + begin, c->from + begin, (size_t)(end - begin));
}

enum { COPY_BYTES = 64 << 20 };

/* Read and written bytes per second, in GB. */
static double copy_rate(hx_dev *d, copy c)
{
    int64_t best = INT64_MAX;

    for (int i = 0; i < 5; i++) {
        const int64_t start = hx_now_us();

        hx_pool_run(d->pool, COPY_BYTES, 1 << 20, copy_part, &c);
        best = HX_MIN(best, hx_now_us() - start);
    }
    return 2.0 * COPY_BYTES / (double)HX_MAX(best, 1) / 1e3;
}

/* Pushes everything else out of the caches; memset would go past them. */
static void flush_caches(char *p)
{
    for (size_t i = 0; i < COPY_BYTES; i += 64)
        p[i]++;
}

/* Time of case i on a device with memory of its own, launches one after the other and
 * its caches warm, in microseconds. */
static double device_us(hx_dev *d, trial *t)
{
    enum { RUNS = 50 };
    hx_err err = { 0 };
    int64_t start = 0;

    image_put(d, t);
    for (int k = -3; k < RUNS; k++) {
        if (k == 0) {
            copied(hx_dev_get(d, &start, image.mem, sizeof(start), &err), &err);
            start = hx_now_us();
        }
        if (t->op->call(d, t->args, &err) != 0)
            print_error("%s: %s\n", t->op->name, err.msg);
    }
    int64_t word;
    copied(hx_dev_get(d, &word, image.mem, sizeof(word), &err), &err);
    const double us = (double)(hx_now_us() - start) / RUNS;
    image_get(d, t);
    return us;
}

/* Best of some runs of case i with cold caches, in microseconds. */
static double case_us(hx_dev *d, const op_row *op, size_t i, char *flush, double *bytes)
{
    trial *t = new_trial(op, (const char *)op->cases + i * op->args_bytes, 1, 0);
    const int64_t from = hx_now_us();
    int64_t best = INT64_MAX;
    hx_err err = { 0 };

    *bytes = (double)trial_bytes(t);
    if (!hx_dev_is_host(d)) {
        const double us = device_us(d, t);

        free_trial(t);
        return us;
    }
    for (int k = 0; k < 50 && (k < 3 || hx_now_us() - from < 400000); k++) {
        flush_caches(flush);
        const int64_t start = hx_now_us();

        if (op->call(d, t->args, &err) != 0)
            print_error("%s: %s\n", op->name, err.msg);
        best = HX_MIN(best, hx_now_us() - start);
    }
    free_trial(t);
    return (double)HX_MAX(best, 1);
}

static int bench(const char *only)
{
    char *a = hx_map(COPY_BYTES, false), *b = hx_map(COPY_BYTES, false);
    void *none = NULL;

    if (a == NULL || b == NULL || open_lanes(&none) != 0)
        return 1;
    memset(a, 1, COPY_BYTES);
    memset(b, 1, COPY_BYTES);
    for (int l = 0; l < lanes.n; l++) {
        hx_dev *d = lanes.lane[l].dev;
        if (gpu_only && hx_dev_is_host(d))
            continue;
        const double rate = hx_dev_is_host(d) ? copy_rate(d, (copy) { a, b }) : 4000;

        if (is_ref(&lanes.lane[l]) && only == NULL)
            continue;
        print_message("%s, copies %.1f GB/s\n%-14s %4s %12s %8s %6s\n",
                      lanes.lane[l].name, rate, "operation", "case", "us", "GB/s", "%");
        for (const op_row *op = op_rows; op < op_rows + HX_LEN(op_rows); op++)
            for (size_t i = 0;
                 i < op->n_case && (only == NULL || strcmp(only, op->name) == 0); i++) {
                double bytes;
                const double us = case_us(d, op, i, a, &bytes), gbps = bytes / us / 1e3;

                print_message("%-14s %4zu %12.1f %8.2f %6.1f\n", op->name, i, us, gbps,
                              100 * gbps / rate);
            }
    }
    hx_unmap(a, COPY_BYTES);
    hx_unmap(b, COPY_BYTES);
    return close_lanes(&none);
}

int main(int argc, char **argv)
{
#define T(op) { "table " #op, test_op, NULL, NULL, (void *)(uintptr_t)&op_rows[OP_##op] },
#define V(op)                                                                            \
    { "vectors " #op, test_vectors, NULL, NULL, (void *)(uintptr_t)&op_rows[OP_##op] },
    enum {
#define N(op) OP_##op,
        HX_OPS(N)
#undef N
    };
    const struct CMUnitTest tests[] = {
        HX_OPS(V) HX_OPS(T) cmocka_unit_test(test_serial),
        cmocka_unit_test(test_conv_hold),
        cmocka_unit_test(test_chunk_is_step),
        cmocka_unit_test(test_index_goes_back),
        cmocka_unit_test(test_page_boundary),
        cmocka_unit_test(test_sparse_is_dense),
        cmocka_unit_test(test_topk_ties),
        cmocka_unit_test(test_router_ties),
        cmocka_unit_test(test_moe_is_matmul),
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_sample_draws),
        cmocka_unit_test(test_sample_refuses),
        cmocka_unit_test(test_rows_between_spans),
        cmocka_unit_test(test_no_allocation),
    };
#undef T
#undef V

    if (argc > 1 && strcmp(argv[1], "--gpu") == 0) {
        gpu_only = true;
        argc--;
        argv++;
    }
    if (argc > 1 && strcmp(argv[1], "--bench") == 0)
        return bench(argc > 2 ? argv[2] : NULL);
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("ops", tests, open_lanes, close_lanes);
}
