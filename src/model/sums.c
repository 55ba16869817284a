/* sums.c - checksums of a checkpoint's tensors, kept beside it in hoist-checksums.json. Called by
 * inspect and the quantizer, and by whoever wants to know whether weights in memory are still
 * what was loaded. Never changes a checkpoint.
 *
 * The file says of each tensor its type, shape and XXH3-128, so that a damaged header is found as
 * well as a damaged byte. It has one line a tensor, in order of names. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "model/model.h"

typedef struct {
    char *name;     /* in the arena */
    char form[160]; /* "BF16 [256, 128]" */
    hx_sum sum;
} entry;

struct hx_sums {
    entry *e; /* [n] by name */
    int64_t n;
    hx_arena arena;
};

hx_sum hx_sums_of(const void *p, size_t n)
{
    const XXH128_hash_t h = XXH3_128bits(p, n);

    return (hx_sum) { h.low64, h.high64 };
}

bool hx_sums_of_slowly(const void *p, size_t n, size_t piece, hx_sums_pause_fn *pause,
                       void *ud, hx_sum *out)
{
    XXH3_state_t state;
    XXH128_hash_t h;
    size_t at = 0;

    XXH3_128bits_reset(&state);
    do {
        const size_t now = HX_MIN(piece, n - at);

        XXH3_128bits_update(&state, (const char *)p + at, now);
        at += now;
        if (!pause(ud, now))
            return false;
    } while (at < n);
    h = XXH3_128bits_digest(&state);
    *out = (hx_sum) { h.low64, h.high64 };
    return true;
}

int64_t hx_sums_count(const hx_sums *s)
{
    return s->n;
}

void hx_sums_close(hx_sums *s)
{
    if (s == NULL)
        return;
    hx_free(s->e);
    hx_arena_reset(&s->arena);
    hx_free(s);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static entry *find(const hx_sums *s, const char *name)
{
    int64_t lo = 0, hi = s->n;

    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        const int c = strcmp(name, s->e[mid].name);

        if (c == 0)
            return &s->e[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

static void form_of(const hx_tensor *t, char out[160])
{
    int n = snprintf(out, 160, "%s [", hx_dtype_name(t->dtype));

    for (int32_t i = 0; i < t->n_dim && n < 140; i++)
        n += snprintf(out + n, (size_t)(160 - n), "%s%" PRId64, i > 0 ? ", " : "",
                      t->dim[i]);
    snprintf(out + n, (size_t)(160 - n), "]");
}

static int new_sums(hx_sums **out, int64_t n, hx_err *err)
{
    hx_sums *s = hx_new(hx_sums, 1);

    *out = NULL;
    if (s == NULL || (s->e = hx_new(entry, HX_MAX(n, 1))) == NULL) {
        hx_sums_close(s);
        return hx_fail(err, HX_ENOMEM, "checksums: no memory for %" PRId64 " tensors", n);
    }
    hx_arena_init(&s->arena, (size_t)1 << 30);
    s->n = n;
    *out = s;
    return 0;
}

/* ---- making ------------------------------------------------------------ */

int hx_sums_empty(hx_sums **out, const hx_weights *w, hx_err *err)
{
    const int64_t n = hx_weights_count(w);
    int rc;

    if ((rc = new_sums(out, n, err)) != 0)
        return rc;
    for (int64_t i = 0; i < n; i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        entry *e = &(*out)->e[i];

        if ((e->name = hx_arena_dup(&(*out)->arena, t->name, strlen(t->name))) == NULL) {
            hx_sums_close(*out);
            *out = NULL;
            return hx_fail(err, HX_ENOMEM, "checksums: no memory for names");
        }
        form_of(t, e->form);
    }
    qsort((*out)->e, (size_t)n, sizeof(entry), by_name);
    return 0;
}

void hx_sums_put(hx_sums *s, const hx_tensor *t, hx_sum sum)
{
    find(s, t->name)->sum = sum;
}

typedef struct {
    const hx_weights *w;
    hx_sums *s;
    hx_load_fn *fn;
    void *ud;
    _Atomic uint64_t done;
} maker;

static void make_range(void *ud, int64_t begin, int64_t end, int worker)
{
    maker *m = ud;

    for (int64_t i = begin; i < end; i++) {
        const hx_tensor *t = hx_weights_at(m->w, i);

        hx_sums_put(m->s, t, hx_sums_of(t->p, t->bytes));
        atomic_fetch_add(&m->done, t->bytes);
        if (worker == 0 && m->fn != NULL) /* the caller's thread */
            m->fn(m->ud, atomic_load(&m->done), hx_weights_bytes(m->w));
    }
}

int hx_sums_make(hx_sums **out, const hx_weights *w, hx_pool *pool, hx_load_fn *fn,
                 void *ud, hx_err *err)
{
    maker m = { .w = w, .fn = fn, .ud = ud };
    const int rc = hx_sums_empty(&m.s, w, err);

    *out = m.s;
    if (rc == 0)
        hx_pool_run(pool, hx_weights_count(w), 1, make_range, &m);
    return rc;
}

/* ---- the file ------------------------------------------------------------ */

static int read_entry(entry *e, hx_arena *a, const hx_json *j, hx_str name, hx_err *err)
{
    const hx_str sum = hx_json_str(hx_json_get(j, "xxh3_128")),
                 form = hx_json_str(hx_json_get(j, "form"));
    char text[40];

    if (sum.n != 32 || form.n == 0 || form.n >= sizeof e->form)
        return hx_fail(err, HX_EFORMAT, HX_SUMS_FILE ": %.*s: expected form and xxh3_128",
                       (int)HX_MIN(name.n, 120), name.p);
    snprintf(text, sizeof text, "%.32s", sum.p);
    if (sscanf(text, "%16" SCNx64 "%16" SCNx64, &e->sum.hi, &e->sum.lo) != 2)
        return hx_fail(err, HX_EFORMAT, HX_SUMS_FILE ": %.*s: \"%s\" is no checksum",
                       (int)HX_MIN(name.n, 120), name.p, text);
    memcpy(e->form, form.p, form.n);
    if ((e->name = hx_arena_dup(a, name.p, name.n)) == NULL)
        return hx_fail(err, HX_ENOMEM, "checksums: no memory for names");
    return 0;
}

int hx_sums_read(hx_sums **out, const char *dir, hx_err *err)
{
    char path[4096];
    hx_json *j = NULL;
    hx_sums *s = NULL;
    int rc;

    *out = NULL;
    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    if ((rc = hx_json_read(&j, path, (size_t)1 << 30, err)) != 0)
        goto fail;
    const hx_json *t = hx_json_get(j, "tensors");

    if (hx_json_kind(t) != HX_JSON_OBJECT) {
        rc = hx_fail(err, HX_EFORMAT, HX_SUMS_FILE ": no \"tensors\"");
        goto fail;
    }
    if ((rc = new_sums(&s, (int64_t)hx_json_len(t), err)) != 0)
        goto fail;
    for (size_t i = 0; rc == 0 && i < hx_json_len(t); i++) {
        hx_str name;
        const hx_json *v = hx_json_member(t, i, &name);

        rc = read_entry(&s->e[i], &s->arena, v, name, err);
    }
    if (rc != 0)
        goto fail;
    qsort(s->e, (size_t)s->n, sizeof *s->e, by_name);
    *out = s;
    s = NULL;
fail:
    hx_sums_close(s);
    hx_json_free(j);
    return rc;
}

int hx_sums_write(const hx_sums *s, const char *dir, hx_err *err)
{
    char path[4096], part[4200];
    hx_sb b = { 0 };
    FILE *f = NULL;
    int rc = 0;

    hx_sb_str(&b, "{\"made_by\":\"hoist " HX_VERSION "\",\"tensors\":{");
    for (int64_t i = 0; i < s->n; i++) {
        hx_sb_str(&b, i > 0 ? ",\n" : "\n");
        hx_json_put_str(&b, hx_str_c(s->e[i].name));
        hx_sb_printf(&b,
                     ":{\"form\":\"%s\",\"xxh3_128\":\"%016" PRIx64 "%016" PRIx64 "\"}",
                     s->e[i].form, s->e[i].sum.hi, s->e[i].sum.lo);
    }
    hx_sb_str(&b, "}}\n");
    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    snprintf(part, sizeof part, "%s.part", path);
    if (b.bad)
        rc = hx_fail(err, HX_ENOMEM, "%s: no memory", path);
    else if ((f = fopen(part, "w")) == NULL || fwrite(b.p, 1, b.n, f) != b.n)
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    if (f != NULL && fclose(f) != 0 && rc == 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    if (rc == 0 && rename(part, path) != 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    if (rc != 0 && f != NULL)
        unlink(part);
    hx_sb_free(&b);
    return rc;
}

/* ---- comparing -------------------------------------------------------------- */

int hx_sums_check(const hx_sums *s, const hx_tensor *t, hx_sum sum, hx_err *err)
{
    const entry *e = find(s, t->name);
    char form[160];

    if (e == NULL)
        return hx_fail(err, HX_EFORMAT, "%.120s: no checksum of it in " HX_SUMS_FILE,
                       t->name);
    form_of(t, form);
    if (strcmp(form, e->form) != 0)
        return hx_fail(err, HX_EFORMAT, "%.120s: %s, was %s", t->name, form, e->form);
    if (sum.lo != e->sum.lo || sum.hi != e->sum.hi)
        return hx_fail(err, HX_EFORMAT,
                       "%.120s: its bytes have changed since its checksum was made",
                       t->name);
    return 0;
}

int64_t hx_sums_compare(const hx_sums *want, const hx_sums *have, hx_sums_bad_fn *bad,
                        void *ud)
{
    int64_t n = 0, i = 0, k = 0;

    while (i < want->n || k < have->n) {
        const entry *a = i < want->n ? &want->e[i] : NULL,
                    *b = k < have->n ? &have->e[k] : NULL;
        const int c = a == NULL ? 1 : b == NULL ? -1 : strcmp(a->name, b->name);
        const char *why = NULL;

        if (c < 0)
            why = "is gone";
        else if (c > 0)
            why = "has no checksum";
        else if (strcmp(a->form, b->form) != 0)
            why = "has another type or shape";
        else if (a->sum.lo != b->sum.lo || a->sum.hi != b->sum.hi)
            why = "has other bytes";
        if (why != NULL) {
            n++;
            bad(ud, c <= 0 ? a->name : b->name, why);
        }
        i += c <= 0;
        k += c >= 0;
    }
    return n;
}
