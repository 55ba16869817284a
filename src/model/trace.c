/* trace.c - see trace.h. Pure but for the file it writes: no device, no model. */
#include "model/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "model/clock.h"

const char *hx_trace_policy_name(hx_trace_policy p)
{
    static const char *const names[] = {
#define X(name, text) text,
        HX_TRACE_POLICIES(X)
#undef X
    };

    return names[p];
}

/* ---- writing --------------------------------------------------------------- */

int hx_trace_begin(FILE **out, const char *path, const hx_trace_shape *s, hx_err *err)
{
    hx_sb b = { 0 };
    int rc = 0;

    *out = NULL;
    hx_sb_printf(&b,
                 "{\"hoist_trace\":1,\"n_layer\":%" PRId64 ",\"n_expert\":%" PRId64
                 ",\"n_active\":%" PRId64 ",\"moe\":[",
                 s->n_layer, s->n_expert, s->n_active);
    for (int64_t i = 0; i < s->n_moe; i++)
        hx_sb_printf(&b, i > 0 ? ",%d" : "%d", s->moe[i]);
    hx_sb_str(&b, "]}\n");
    if (b.bad)
        rc = hx_fail(err, HX_ENOMEM, "trace: no memory");
    else if ((*out = fopen(path, "we")) == NULL || fwrite(b.p, 1, b.n, *out) != b.n)
        rc = hx_fail(err, HX_EIO, "trace %s: %s", path, strerror(errno));
    hx_sb_free(&b);
    return rc;
}

static bool put_u16(FILE *f, int64_t v)
{
    const uint16_t x = (uint16_t)HX_MIN(v, UINT16_MAX);

    return putc(x & 255, f) != EOF && putc(x >> 8, f) != EOF;
}

int hx_trace_step(FILE *f, const hx_trace_shape *s, const int32_t *log, int64_t stride,
                  int64_t rows, hx_err *err)
{
    bool good = put_u16(f, rows);

    for (int64_t i = 0; good && i < s->n_moe; i++)
        for (int64_t k = 0; good && k < rows * s->n_active; k++)
            good = put_u16(f, log[s->moe[i] * stride + k] & 0xFFFFFF);
    return good ? 0 : hx_fail(err, HX_EIO, "trace: %s", strerror(errno));
}

/* ---- reading ------------------------------------------------------------------ */

static int64_t u16_at(hx_str s, size_t i)
{
    return (uint8_t)s.p[i] | (int64_t)(uint8_t)s.p[i + 1] << 8;
}

static int read_shape(hx_trace_shape *s, hx_str line, hx_err *err)
{
    hx_json *j = NULL;
    hx_err why = { 0 };

    if (hx_json_parse(&j, line, 0, &why) != 0 ||
        hx_json_int(hx_json_get(j, "hoist_trace"), 0) != 1) {
        hx_json_free(j);
        return hx_fail(err, HX_EFORMAT,
                       "trace: no \"hoist_trace\":1 in its first line; bench and serve "
                       "write one with --trace");
    }
    const hx_json *moe = hx_json_get(j, "moe");
    bool good;

    s->n_layer = hx_json_int(hx_json_get(j, "n_layer"), 0);
    s->n_expert = hx_json_int(hx_json_get(j, "n_expert"), 0);
    s->n_active = hx_json_int(hx_json_get(j, "n_active"), 0);
    s->n_moe = (int64_t)hx_json_len(moe);
    good = s->n_layer >= 1 && s->n_layer <= 4096 && s->n_expert >= 1 &&
           s->n_expert <= 4096 && s->n_active >= 1 && s->n_active <= s->n_expert &&
           s->n_moe >= 1 && s->n_moe <= s->n_layer;
    if (good && (s->moe = hx_new(int32_t, s->n_moe)) == NULL) {
        hx_json_free(j);
        return hx_fail(err, HX_ENOMEM, "trace: no memory");
    }
    for (int64_t i = 0; good && i < s->n_moe; i++) {
        const int64_t l = hx_json_int(hx_json_at(moe, (size_t)i), -1);

        good = l >= (i > 0 ? s->moe[i - 1] + 1 : 0) && l < s->n_layer;
        s->moe[i] = (int32_t)l;
    }
    hx_json_free(j);
    return good ? 0
                : hx_fail(err, HX_EFORMAT,
                          "trace: its first line does not describe a model: expected "
                          "n_layer, n_expert, n_active and moe, layers in order");
}

/* Appends what is distinct in a layer of a step. seen[id] is the last layer-step that had
 * id, counted from 1. */
static void take_layer(hx_trace *t, hx_str ids, int64_t layer, int64_t *seen,
                       int64_t mark, int64_t *n)
{
    const int64_t e = t->shape.n_expert;

    for (size_t k = 0; k + 1 < ids.n; k += 2) {
        const int64_t id = u16_at(ids, k);

        if (id >= e || seen[id] == mark)
            continue;
        seen[id] = mark;
        t->item[(*n)++] = (int32_t)(layer * e + id);
    }
}

static int take_steps(hx_trace *t, hx_str s, hx_err *err)
{
    const hx_trace_shape *h = &t->shape;
    int64_t *seen = hx_new(int64_t, h->n_expert);
    int64_t n = 0, mark = 0;
    size_t at = 0;

    if (seen == NULL)
        return hx_fail(err, HX_ENOMEM, "trace: no memory");
    for (int64_t step = 0; step < t->n_step; step++) {
        const size_t ids = (size_t)(u16_at(s, at) * h->n_active) * 2;

        at += 2;
        for (int64_t i = 0; i < h->n_moe; i++, at += ids)
            take_layer(t, (hx_str) { s.p + at, ids }, h->moe[i], seen, ++mark, &n);
        t->begin[step + 1] = n;
    }
    hx_free(seen);
    return 0;
}

int hx_trace_parse(hx_trace **out, hx_str bytes, hx_err *err)
{
    const char *end = bytes.n > 0 ? memchr(bytes.p, '\n', HX_MIN(bytes.n, 65536)) : NULL;
    const size_t head = end != NULL ? (size_t)(end + 1 - bytes.p) : 0;
    const hx_str s = { bytes.p + head, bytes.n - head };
    hx_trace *t = hx_new(hx_trace, 1);
    size_t at = 0;
    int rc;

    *out = NULL;
    if (t == NULL)
        return hx_fail(err, HX_ENOMEM, "trace: no memory");
    if ((rc = read_shape(&t->shape, (hx_str) { bytes.p, head }, err)) != 0)
        goto fail;
    const size_t row = (size_t)(t->shape.n_moe * t->shape.n_active);

    for (; at + 2 <= s.n; t->n_step++) { /* a last step that was cut off is left out */
        const size_t picks = (size_t)u16_at(s, at) * row;

        if (s.n - at - 2 < 2 * picks)
            break;
        at += 2 + 2 * picks;
        t->n_pick += (int64_t)picks;
    }
    t->begin = hx_new(int64_t, t->n_step + 1);
    t->item = hx_new(int32_t, HX_MAX(t->n_pick, 1));
    if (t->begin == NULL || t->item == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "trace: no memory for %" PRId64 " picks", t->n_pick);
        goto fail;
    }
    if ((rc = take_steps(t, s, err)) != 0)
        goto fail;
    *out = t;
    return 0;
fail:
    hx_trace_close(t);
    return rc;
}

void hx_trace_close(hx_trace *t)
{
    if (t == NULL)
        return;
    hx_free(t->shape.moe);
    hx_free(t->begin);
    hx_free(t->item);
    hx_free(t);
}

/* ---- replay --------------------------------------------------------------------- */

static int64_t n_items(const hx_trace *t)
{
    return t->shape.n_layer * t->shape.n_expert;
}

/* The i-th item to have a slot when the store opens: layers in turn. */
static int64_t warm_item(const hx_trace *t, int64_t i)
{
    const hx_trace_shape *s = &t->shape;

    return s->moe[i % s->n_moe] * s->n_expert + i / s->n_moe;
}

static int replay_clock(const hx_trace *t, int32_t n_slot, int64_t from,
                        hx_trace_result *out, hx_err *err)
{
    const hx_trace_shape *s = &t->shape;
    hx_clock c;
    const int rc = hx_clock_open(&c, n_items(t), n_slot, err);

    if (rc != 0)
        return rc;
    for (int32_t i = 0; i < n_slot; i++)
        hx_clock_put(&c, warm_item(t, i), i);
    for (int64_t step = 0; step < t->n_step; step++) {
        const int64_t b = t->begin[step], n = t->begin[step + 1] - b;
        const int64_t turn = step % s->n_layer * s->n_expert; /* who comes first */
        int64_t first = 0, hits = 0, moves = 0, n_wanted = 0;
        int32_t wanted[HX_CLOCK_LOOKS];

        while (first < n && t->item[b + first] < turn)
            first++;
        for (int64_t i = 0; i < n; i++) {
            const int32_t item = t->item[b + (first + i) % n];

            hits += c.slot[item] >= 0;
            hx_clock_touch(&c, item);
            if (c.slot[item] < 0 && n_wanted < HX_CLOCK_LOOKS)
                wanted[n_wanted++] = item;
        }
        for (int64_t i = 0; i < n_wanted && moves < HX_CLOCK_MOVES; i++) {
            const int32_t slot = hx_clock_find(&c, wanted[i]);

            if (slot >= 0) {
                hx_clock_put(&c, wanted[i], slot);
                moves++;
            }
        }
        if (step >= from) {
            out->hits += hits;
            out->moves += moves;
        }
    }
    hx_clock_close(&c);
    return 0;
}

/* A cache that keeps, of what it has and what a step read, the items with the smallest
 * keys. A key is set when its item is read. */
typedef struct {
    int64_t *of_use;  /* [begin[n_step]] the key that a use gives its item */
    int64_t *of_item; /* [n_item] the key now; at first that before any use */
} keys;

static int make_keys(const hx_trace *t, hx_trace_policy p, int64_t from, keys *k,
                     hx_err *err)
{
    const int64_t n = t->begin[t->n_step], n_item = n_items(t);

    k->of_use = hx_new(int64_t, HX_MAX(n, 1));
    k->of_item = hx_new(int64_t, n_item);
    if (k->of_use == NULL || k->of_item == NULL)
        return hx_fail(err, HX_ENOMEM, "trace: no memory for %" PRId64 " uses", n);
    if (p == HX_TRACE_LRU) { /* later in a step is later */
        for (int64_t i = 0; i < n; i++)
            k->of_use[i] = -1 - i;
    } else if (p == HX_TRACE_BELADY) {
        for (int64_t i = 0; i < n_item; i++)
            k->of_item[i] = INT64_MAX;
        for (int64_t step = t->n_step - 1; step >= 0; step--)
            for (int64_t i = t->begin[step]; i < t->begin[step + 1]; i++) {
                k->of_use[i] = k->of_item[t->item[i]];
                k->of_item[t->item[i]] = step;
            }
    } else {
        for (int64_t i = t->begin[from]; i < n; i++)
            k->of_item[t->item[i]]--;
        for (int64_t i = 0; i < n; i++)
            k->of_use[i] = k->of_item[t->item[i]];
    }
    return 0;
}

typedef struct {
    int64_t key;
    int32_t item;
    bool had;
} candidate;

static int by_key(const void *a, const void *b)
{
    const candidate *x = a, *y = b;

    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->had != y->had ? y->had - x->had : x->item - y->item; /* no idle moves */
}

static int replay_keys(const hx_trace *t, hx_trace_policy p, int32_t n_slot, int64_t from,
                       hx_trace_result *out, hx_err *err)
{
    const int64_t most = n_slot + t->shape.n_moe * t->shape.n_expert;
    candidate *c = hx_new(candidate, most);
    bool *in = hx_new(bool, n_items(t));
    keys k = { 0 };
    int rc = c == NULL || in == NULL ? hx_fail(err, HX_ENOMEM, "trace: no memory") : 0;

    if (rc != 0 || (rc = make_keys(t, p, from, &k, err)) != 0)
        goto fail;
    for (int32_t i = 0; i < n_slot; i++) {
        c[i].item = (int32_t)warm_item(t, i);
        in[c[i].item] = true;
    }
    for (int64_t step = 0; step < t->n_step; step++) {
        int64_t n = n_slot, hits = 0, moves = 0;

        for (int64_t i = t->begin[step]; i < t->begin[step + 1]; i++) {
            const int32_t item = t->item[i];

            hits += in[item];
            k.of_item[item] = k.of_use[i];
            if (!in[item])
                c[n++].item = item;
        }
        for (int64_t i = 0; i < n; i++) {
            c[i].had = i < n_slot;
            c[i].key = k.of_item[c[i].item];
        }
        if (n > n_slot)
            qsort(c, (size_t)n, sizeof *c, by_key);
        for (int64_t i = 0; i < n; i++) {
            in[c[i].item] = i < n_slot;
            moves += i < n_slot && !c[i].had;
        }
        if (step >= from) {
            out->hits += hits;
            out->moves += moves;
        }
    }
fail:
    hx_free(k.of_use);
    hx_free(k.of_item);
    hx_free(in);
    hx_free(c);
    return rc;
}

int hx_trace_replay(const hx_trace *t, hx_trace_policy p, int32_t n_slot, int64_t from,
                    hx_trace_result *out, hx_err *err)
{
    const int64_t all = t->shape.n_moe * t->shape.n_expert;

    *out = (hx_trace_result) { 0 };
    if (n_slot < 1 || n_slot > all)
        return hx_fail(err, HX_EARG, "trace: %d slots, expected 1..%" PRId64, n_slot,
                       all);
    if (from < 0 || from >= t->n_step)
        return hx_fail(err, HX_EARG, "trace: %" PRId64 " steps; none to measure",
                       t->n_step);
    out->items = t->begin[t->n_step] - t->begin[from];
    return p == HX_TRACE_CLOCK ? replay_clock(t, n_slot, from, out, err)
                               : replay_keys(t, p, n_slot, from, out, err);
}
