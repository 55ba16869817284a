/* weights.c - owns mapped checkpoints: safetensors headers, the name table, and the rules
 * by which tensors become matrices and vectors.
 *
 * Called by model.c and arch_*.c while a model is opened, and by inspect. Everything read
 * here was written by strangers: no length, offset, name or shape is used unchecked. It
 * must never copy weights that can be used where they lie, and never look at config.json.
 *
 * A safetensors file: u64 length of the header (little endian), the header (JSON:
 * {"NAME": {"dtype": …, "shape": […], "data_offsets": [begin, end]}, …, "__metadata__":
 * …}), then the data, which the tensors cover without hole or overlap. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "dev/fmt_exl3.h"
#include "model/weights.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "safetensors data is little endian");

#define JSON_MAX   100000000u /* bytes of a header (the format's limit) or an index */
#define JSON_DEPTH 16         /* of metadata; the rest has a fixed shape */
#define FILES_MAX  1024
#define COUNT_MAX  (1 << 24) /* tensors */
#define INDEX_NAME "model.safetensors.index.json"
#define ONE_NAME   "model.safetensors"
#define MTP_NAME   "mtp.safetensors"

/* So that a message shows file, tensor and complaint within hx_err. */
#define CLIP "%.100s"

typedef struct {
    hx_file map;
    const char *name;
} shard;

typedef struct {
    uint32_t tag, next;
} slot; /* of the name table; tensor next - 1, 0: free */

struct hx_weights {
    hx_arena arena; /* names, converted values */
    shard file[FILES_MAX];
    int32_t n_file;
    hx_tensor *tensor; /* [n] */
    int64_t n, cap;
    slot *slot; /* [mask + 1], a power of two, at most half full */
    size_t mask;
    uint64_t seed; /* differs per open: a file cannot be made to collide */
    uint64_t bytes;
    char root[PATH_MAX];  /* real path of the folder, with a final '/' */
    char blobs[PATH_MAX]; /* second place that links may lead to, or "" */
};

static const struct {
    const char *name;
    uint8_t bytes;
} dtypes[HX_N_DTYPE] = {
#define X(name, bytes) { #name, bytes },
    HX_DTYPES(X)
#undef X
};

const char *hx_dtype_name(hx_dtype d)
{
    return (size_t)d < HX_N_DTYPE ? dtypes[d].name : "?";
}

static int no_memory(hx_err *err, const char *what)
{
    return hx_fail(err, HX_ENOMEM, "checkpoint: no memory for %s", what);
}

/* ---- JSON of a known shape ------------------------------------------- */

/* Headers and index of a large checkpoint are 37 MB of two fixed shapes. They are read in
 * place: trees of 148,608 tensors and their index took 0.75 s (json-c, Zen 3), this 0.17
 * s with all checks. Whatever has another shape (escaped strings, metadata) goes through
 * hx_json. */
typedef struct {
    const char *begin, *p, *end;
    const char *file; /* for messages */
    hx_arena *arena;  /* takes strings that had escapes */
    hx_err *err;
} reader;

static int syntax(const reader *r, const char *expected)
{
    return hx_fail(r->err, HX_EFORMAT, CLIP ": byte %zu of the JSON text: expected %s",
                   r->file, (size_t)(r->p - r->begin), expected);
}

static void skip_space(reader *r)
{
    while (r->p < r->end &&
           (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t'))
        r->p++;
}

static bool take(reader *r, char c)
{
    skip_space(r);
    if (r->p == r->end || *r->p != c)
        return false;
    r->p++;
    return true;
}

/* Replaces *s, the inside of a string with escapes, by what it means. */
static int unescape(reader *r, hx_str *s)
{
    hx_json *j = NULL;
    char *copy;
    int rc = hx_json_parse(&j, (hx_str) { s->p - 1, s->n + 2 }, 1, r->err);

    if (rc == HX_EFORMAT)
        return syntax(r, "valid escapes in the string before");
    if (rc != 0)
        return rc;
    *s = hx_json_str(j);
    copy = hx_arena_dup(r->arena, s->p, s->n);
    s->p = copy;
    hx_json_free(j);
    return copy != NULL ? 0 : no_memory(r->err, "a name");
}

/* *out is a part of the text, or lies in the arena. */
static int read_string(reader *r, hx_str *out)
{
    const char *start;
    bool ascii = true, escaped = false;

    if (!take(r, '"'))
        return syntax(r, "a string");
    for (start = r->p; r->p < r->end && *r->p != '"'; r->p++) {
        if ((uint8_t)*r->p < 0x20)
            return syntax(r, "no bare control character");
        ascii = ascii && (uint8_t)*r->p < 0x80;
        if (*r->p == '\\') {
            escaped = true;
            if (++r->p == r->end)
                break;
        }
    }
    if (r->p == r->end)
        return syntax(r, "the end of a string");
    *out = (hx_str) { start, (size_t)(r->p - start) };
    r->p++;
    if (!ascii && !hx_utf8_ok(out->p, out->n))
        return syntax(r, "UTF-8 in the string before");
    return escaped ? unescape(r, out) : 0;
}

static int read_u64(reader *r, uint64_t *out)
{
    const char *start;
    uint64_t v = 0;

    skip_space(r);
    for (start = r->p; r->p < r->end && *r->p >= '0' && *r->p <= '9'; r->p++) {
        const uint64_t digit = (uint64_t)(*r->p - '0');

        if (v > (UINT64_MAX - digit) / 10)
            return syntax(r, "a number below 2^64");
        v = v * 10 + digit;
    }
    if (r->p == start || (*start == '0' && r->p - start > 1))
        return syntax(r, "a whole number, 0 or larger");
    *out = v;
    return 0;
}

/* Before item i (from 0) of an object or array: 1 at the item, 0 past the end, negative
 * on errors. */
static int next_item(reader *r, int64_t i, char open, char close)
{
    if (i == 0 && !take(r, open))
        return syntax(r, open == '{' ? "{" : "[");
    if (take(r, close))
        return 0;
    if (i > 0 && !take(r, ','))
        return syntax(r, close == '}' ? "',' or }" : "',' or ]");
    return 1;
}

/* The same for members: 1 with the key, and the reader before its value. */
static int next_member(reader *r, int64_t i, hx_str *key)
{
    int rc = next_item(r, i, '{', '}');

    if (rc <= 0)
        return rc;
    if ((rc = read_string(r, key)) != 0)
        return rc;
    return take(r, ':') ? 1 : syntax(r, ":");
}

static int read_numbers(reader *r, uint64_t *out, int32_t max, int32_t *n)
{
    int rc;

    for (*n = 0;; ++*n) {
        if ((rc = next_item(r, *n, '[', ']')) <= 0)
            return rc;
        if (*n == max)
            return syntax(r, "fewer numbers in this list");
        if ((rc = read_u64(r, &out[*n])) != 0)
            return rc;
    }
}

/* Any value that a member of an object may have, checked by hx_json. */
static int skip_value(reader *r)
{
    const char *start = r->p;
    hx_json *j = NULL;
    hx_str text;
    bool quoted = false;
    int64_t depth = 0;
    int rc;

    for (; r->p < r->end; r->p++) {
        const char c = *r->p;

        if (c == '"')
            quoted = !quoted;
        else if (quoted)
            r->p += c == '\\' && r->p + 1 < r->end;
        else if (c == '{' || c == '[')
            depth++;
        else if (depth == 0 && (c == ',' || c == '}'))
            break;
        else if (c == '}' || c == ']')
            depth--;
    }
    text = (hx_str) { start, (size_t)(r->p - start) };
    rc = hx_json_parse(&j, text, JSON_DEPTH, r->err);
    hx_json_free(j);
    if (rc == HX_EFORMAT) {
        r->p = start;
        return syntax(r, "a valid value, nested less than 16 deep");
    }
    return rc;
}

static int read_end(reader *r)
{
    skip_space(r);
    return r->p == r->end ? 0 : syntax(r, "nothing after the closing }");
}

/* ---- headers --------------------------------------------------------- */

static bool printable(hx_str s)
{
    for (size_t i = 0; i < s.n; i++)
        if ((uint8_t)s.p[i] < 0x20 || s.p[i] == 0x7f)
            return false;
    return true;
}

static const char *shape_text(char buf[192], const int64_t *dim, int32_t n_dim)
{
    size_t n = 1;

    memcpy(buf, "[", 2);
    for (int32_t i = 0; i < n_dim && n < 192; i++)
        n += (size_t)snprintf(buf + n, 192 - n, "%s%" PRId64, i > 0 ? ", " : "", dim[i]);
    if (n < 191)
        memcpy(buf + n, "]", 2);
    return buf;
}

static int read_dtype(reader *r, hx_tensor *t)
{
    hx_str s;
    int rc = read_string(r, &s);

    if (rc != 0)
        return rc;
    for (int d = 0; d < HX_N_DTYPE; d++)
        if (hx_str_is(s, dtypes[d].name)) {
            t->dtype = (hx_dtype)d;
            return 0;
        }
    return hx_fail(r->err, HX_EUNSUP, CLIP ": " CLIP ": dtype \"%.*s\" is not known",
                   r->file, t->name, s.n <= 20 && printable(s) ? (int)s.n : 0, s.p);
}

static int read_shape(reader *r, hx_tensor *t)
{
    uint64_t v[HX_DIM_MAX];
    int rc = read_numbers(r, v, HX_DIM_MAX, &t->n_dim);

    for (int32_t i = 0; rc == 0 && i < t->n_dim; i++) {
        if (v[i] > INT64_MAX)
            return syntax(r, "dimensions below 2^63");
        t->dim[i] = (int64_t)v[i];
    }
    return rc;
}

/* {"dtype": …, "shape": …, "data_offsets": …}, each once, in any order. */
static int read_info(reader *r, hx_tensor *t, uint64_t range[2])
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    const char *members = "dtype, shape and data_offsets, each once";
    int seen = 0, what, rc;
    int32_t n = 0;
    hx_str key;

    for (int64_t i = 0;; i++) {
        if ((rc = next_member(r, i, &key)) < 0)
            return rc;
        if (rc == 0)
            return seen == (DTYPE | SHAPE | OFFSETS) ? 0 : syntax(r, members);
        what = hx_str_is(key, "dtype")          ? DTYPE
               : hx_str_is(key, "shape")        ? SHAPE
               : hx_str_is(key, "data_offsets") ? OFFSETS
                                                : 0;
        if (what == 0 || (seen & what) != 0)
            return syntax(r, members);
        seen |= what;
        rc = what == DTYPE   ? read_dtype(r, t)
             : what == SHAPE ? read_shape(r, t)
                             : read_numbers(r, range, 2, &n);
        if (rc != 0)
            return rc;
        if (what == OFFSETS && n != 2)
            return syntax(r, "two data_offsets");
    }
}

/* Places t within data[size]. */
static int place(hx_tensor *t, const uint64_t range[2], hx_file data, reader *r)
{
    size_t bytes = dtypes[t->dtype].bytes;
    bool fits = true, empty = false;
    char shape[192];

    for (int32_t i = 0; i < t->n_dim; i++)
        empty = empty || t->dim[i] == 0;
    for (int32_t i = 0; i < t->n_dim && !empty; i++)
        fits = fits && hx_mul(bytes, (size_t)t->dim[i], &bytes);
    if (empty)
        bytes = 0;
    if (range[0] > range[1] || !fits || range[1] - range[0] != bytes)
        return hx_fail(r->err, HX_EFORMAT,
                       CLIP ": " CLIP ": data_offsets %" PRIu64 " to %" PRIu64
                            " do not fit %s %s",
                       r->file, t->name, range[0], range[1], hx_dtype_name(t->dtype),
                       shape_text(shape, t->dim, t->n_dim));
    if (range[1] > data.n)
        return hx_fail(r->err, HX_EFORMAT,
                       CLIP ": " CLIP ": ends at byte %" PRIu64
                            " of the data, the file has %zu; "
                            "is it cut short? Download it again",
                       r->file, t->name, range[1], data.n);
    t->p = data.p + range[0];
    t->bytes = bytes;
    return 0;
}

static int add_tensor(hx_weights *w, hx_str name, int32_t file, hx_tensor **out,
                      hx_err *err)
{
    const char *copy;

    if (!printable(name))
        return hx_fail(err, HX_EFORMAT, CLIP ": a tensor name holds control characters",
                       w->file[file].name);
    if (w->n == COUNT_MAX)
        return hx_fail(err, HX_ELIMIT, "checkpoint: more than %d tensors", COUNT_MAX);
    if (w->n == w->cap) {
        const int64_t cap = HX_MAX(2 * w->cap, 1024);
        hx_tensor *t = hx_realloc(w->tensor, (size_t)cap * sizeof(*t));

        if (t == NULL)
            return no_memory(err, "the list of tensors");
        w->tensor = t;
        w->cap = cap;
    }
    if ((copy = hx_arena_dup(&w->arena, name.p, name.n)) == NULL)
        return no_memory(err, "a name");
    *out = &w->tensor[w->n++];
    **out = (hx_tensor) { .name = copy, .file = file };
    return 0;
}

static int by_place(const void *pa, const void *pb)
{
    const hx_tensor *a = pa, *b = pb;

    if (a->p != b->p)
        return (uintptr_t)a->p < (uintptr_t)b->p ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

/* Tensors first.. of one file are put in order and must cover its data. */
static int check_cover(hx_weights *w, int64_t first, hx_file data, reader *r)
{
    const int64_t n = w->n - first;
    hx_tensor *t = n > 0 ? w->tensor + first : NULL;
    uint64_t end = 0;
    int64_t i;

    for (i = 1; i < n && by_place(&t[i - 1], &t[i]) <= 0; i++)
        ;
    if (i < n)
        qsort(t, (size_t)n, sizeof(*t), by_place);
    for (i = 0; i < n; i++) {
        const uint64_t begin = (uint64_t)(t[i].p - data.p);

        if (begin != end)
            return hx_fail(r->err, HX_EFORMAT,
                           CLIP ": " CLIP ": starts at byte %" PRIu64
                                " of the data, expected %" PRIu64 ": %s",
                           r->file, t[i].name, begin, end,
                           begin < end ? "tensors overlap" : "a hole between tensors");
        end += t[i].bytes;
    }
    w->bytes += end;
    if (end != data.n)
        return hx_fail(r->err, HX_EFORMAT,
                       CLIP ": %zu bytes of data, but tensors end at %" PRIu64, r->file,
                       data.n, end);
    return 0;
}

static int read_header(hx_weights *w, int32_t file, hx_err *err)
{
    const hx_file map = w->file[file].map;
    const int64_t first = w->n;
    reader r = { .file = w->file[file].name, .arena = &w->arena, .err = err };
    uint64_t len = 0, range[2];
    hx_file data;
    hx_tensor *t = NULL;
    hx_str name;
    int rc;

    if (map.n >= sizeof(len))
        memcpy(&len, map.p, sizeof(len));
    if (map.n < sizeof(len) || len < 2 || len > JSON_MAX || len > map.n - sizeof(len) ||
        map.p[sizeof(len)] != '{')
        return hx_fail(err, HX_EFORMAT,
                       CLIP ": no safetensors header in this file of %zu bytes "
                            "(cut short, or a pointer to the real file?)",
                       r.file, map.n);
    r.begin = r.p = (const char *)map.p + sizeof(len);
    r.end = r.begin + len;
    data = (hx_file) { map.p + sizeof(len) + len, map.n - sizeof(len) - (size_t)len };
    for (int64_t i = 0;; i++) {
        if ((rc = next_member(&r, i, &name)) < 0)
            return rc;
        if (rc == 0)
            break;
        if (hx_str_is(name, "__metadata__")) {
            if ((rc = skip_value(&r)) != 0)
                return rc;
            continue;
        }
        if ((rc = add_tensor(w, name, file, &t, err)) != 0 ||
            (rc = read_info(&r, t, range)) != 0 || (rc = place(t, range, data, &r)) != 0)
            return rc;
    }
    if ((rc = read_end(&r)) != 0)
        return rc;
    return check_cover(w, first, data, &r);
}

/* ---- files ----------------------------------------------------------- */

/* Where links may lead: the folder itself, and for a snapshot of the Hugging Face cache
 * (MODEL/snapshots/REVISION, made of links into MODEL/blobs) those blobs. */
static int set_root(hx_weights *w, const char *dir, hx_err *err)
{
    const char *snapshots = "/snapshots";
    const size_t n_snapshots = 10;
    char *slash;
    size_t n;

    if (dir == NULL || realpath(dir, w->root) == NULL)
        return hx_fail(err, HX_EIO, "%s: cannot open the model folder: %m",
                       dir != NULL ? dir : "");
    n = strlen(w->root);
    if (n + 8 > sizeof(w->root))
        return hx_fail(err, HX_EARG, "model folder: path too long");
    slash = strrchr(w->root, '/');
    if ((size_t)(slash - w->root) > n_snapshots &&
        memcmp(slash - n_snapshots, snapshots, n_snapshots) == 0)
        snprintf(w->blobs, sizeof(w->blobs), "%.*s/blobs/",
                 (int)(slash - n_snapshots - w->root), w->root);
    if (w->root[n - 1] != '/')
        memcpy(w->root + n, "/", 2);
    return 0;
}

static bool below(const char *path, const char *folder)
{
    const size_t n = strlen(folder);

    return n > 0 && strncmp(path, folder, n) == 0;
}

/* The path of file name, which the caller knows to be a plain name. */
static int resolve(const hx_weights *w, const char *name, char path[PATH_MAX],
                   hx_err *err)
{
    char link[PATH_MAX];

    if (snprintf(link, sizeof(link), "%s%s", w->root, name) >= (int)sizeof(link))
        return hx_fail(err, HX_EARG, CLIP ": path too long", name);
    if (realpath(link, path) == NULL)
        return hx_fail(err, HX_EIO, CLIP ": cannot open this file of the checkpoint: %m",
                       name);
    if (!below(path, w->root) && !below(path, w->blobs))
        return hx_fail(err, HX_EFORMAT,
                       CLIP
                       ": a link that leads out of the model folder; put the file itself "
                       "there",
                       name);
    return 0;
}

static bool in_folder(const hx_weights *w, const char *name)
{
    char path[PATH_MAX];

    return snprintf(path, sizeof(path), "%s%s", w->root, name) < (int)sizeof(path) &&
           hx_file_exists(path);
}

static int map_in_folder(const hx_weights *w, const char *name, hx_file *out, hx_err *err)
{
    char path[PATH_MAX];
    int rc = resolve(w, name, path, err);

    return rc != 0 ? rc : hx_file_map(out, path, err);
}

/* The number of the file called name, which is added when new. */
static int file_number(hx_weights *w, hx_str name, int32_t *out, hx_err *err)
{
    const char *copy;

    for (int32_t i = w->n_file; i-- > 0;) /* neighbours in the index share a file */
        if (hx_str_is(name, w->file[i].name)) {
            *out = i;
            return 0;
        }
    if (name.n == 0 || name.n > NAME_MAX || name.p[0] == '.' || !printable(name) ||
        memchr(name.p, '/', name.n) != NULL)
        return hx_fail(err, HX_EFORMAT,
                       INDEX_NAME ": shard \"%.*s\": expected a plain file name",
                       printable(name) ? (int)HX_MIN(name.n, 100) : 0, name.p);
    if (w->n_file == FILES_MAX)
        return hx_fail(err, HX_ELIMIT, INDEX_NAME ": more than %d files", FILES_MAX);
    if ((copy = hx_arena_dup(&w->arena, name.p, name.n)) == NULL)
        return no_memory(err, "a name");
    *out = w->n_file;
    w->file[w->n_file++].name = copy;
    return 0;
}

/* ---- index ----------------------------------------------------------- */

typedef struct {
    hx_str name; /* lies in the text, or in the arena */
    int32_t file;
} listed;

typedef struct {
    hx_file text;
    listed *item; /* [n] */
    int64_t n, cap;
} listing;

static void listing_free(listing *l)
{
    hx_file_unmap(&l->text);
    hx_free(l->item);
}

static int listing_add(listing *l, hx_str name, int32_t file, hx_err *err)
{
    if (l->n == COUNT_MAX)
        return hx_fail(err, HX_ELIMIT, INDEX_NAME ": more than %d tensors", COUNT_MAX);
    if (l->n == l->cap) {
        const int64_t cap = HX_MAX(2 * l->cap, 1024);
        listed *item = hx_realloc(l->item, (size_t)cap * sizeof(*item));

        if (item == NULL)
            return no_memory(err, INDEX_NAME);
        l->item = item;
        l->cap = cap;
    }
    l->item[l->n++] = (listed) { name, file };
    return 0;
}

/* {"NAME": "FILE", …} */
static int read_weight_map(hx_weights *w, listing *l, reader *r)
{
    hx_str name, file;
    int32_t number;
    int rc;

    for (int64_t i = 0;; i++) {
        if ((rc = next_member(r, i, &name)) <= 0)
            return rc;
        if ((rc = read_string(r, &file)) != 0 ||
            (rc = file_number(w, file, &number, r->err)) != 0 ||
            (rc = listing_add(l, name, number, r->err)) != 0)
            return rc;
    }
}

/* {"metadata": …, "weight_map": {…}} */
static int read_index(hx_weights *w, listing *l, hx_err *err)
{
    reader r = { .file = INDEX_NAME, .arena = &w->arena, .err = err };
    bool found = false;
    hx_str key;
    int rc;

    if ((rc = map_in_folder(w, INDEX_NAME, &l->text, err)) != 0)
        return rc;
    if (l->text.n > JSON_MAX)
        return hx_fail(err, HX_ELIMIT, INDEX_NAME ": %zu bytes, at most %u", l->text.n,
                       JSON_MAX);
    r.begin = r.p = (const char *)l->text.p;
    r.end = r.begin + l->text.n;
    for (int64_t i = 0;; i++) {
        if ((rc = next_member(&r, i, &key)) < 0)
            return rc;
        if (rc == 0)
            break;
        if (hx_str_is(key, "weight_map")) {
            if (found)
                return syntax(&r, "one weight_map");
            found = true;
            rc = read_weight_map(w, l, &r);
        } else {
            rc = skip_value(&r);
        }
        if (rc != 0)
            return rc;
    }
    if ((rc = read_end(&r)) != 0)
        return rc;
    return found && l->n > 0 ? 0 : hx_fail(err, HX_EFORMAT, INDEX_NAME ": no weight_map");
}

/* What the index promises must be there. */
static int check_index(const hx_weights *w, const listing *l, hx_err *err)
{
    for (int64_t i = 0; i < l->n; i++) {
        const hx_str name = l->item[i].name;
        const char *file = w->file[l->item[i].file].name;
        char text[1024];
        const hx_tensor *t;

        if (name.n >= sizeof(text) || !printable(name))
            return hx_fail(err, HX_EFORMAT,
                           INDEX_NAME ": entry %" PRId64 ": not a tensor name", i);
        memcpy(text, name.p, name.n);
        text[name.n] = '\0';
        t = hx_weights_find(w, text);
        if (t == NULL || t->file != l->item[i].file)
            return hx_fail(err, HX_EFORMAT, INDEX_NAME ": " CLIP ": not in " CLIP, text,
                           file);
    }
    return 0;
}

/* Which files make the checkpoint. */
static int list_files(hx_weights *w, listing *l, hx_err *err)
{
    int32_t number;
    int rc;

    if (in_folder(w, INDEX_NAME))
        rc = read_index(w, l, err);
    else if (in_folder(w, ONE_NAME))
        rc = file_number(w, HX_STR(ONE_NAME), &number, err);
    else
        rc = hx_fail(err, HX_EIO,
                     "%.150s: neither " ONE_NAME " nor " INDEX_NAME " in this folder",
                     w->root);
    if (rc == 0 && in_folder(w, MTP_NAME))
        rc = file_number(w, HX_STR(MTP_NAME), &number, err);
    return rc;
}

/* ---- names ----------------------------------------------------------- */

/* FNV-1a, folded. */
static uint32_t name_hash(uint64_t seed, const char *name)
{
    uint64_t h = 0xcbf29ce484222325u ^ seed;

    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * 0x100000001b3u;
    return (uint32_t)(h ^ h >> 32);
}

/* The slot that holds name, or the free one where it belongs. */
static slot *find_slot(const hx_weights *w, const char *name, uint32_t tag)
{
    for (size_t i = tag;; i++) {
        slot *s = &w->slot[i & w->mask];

        if (s->next == 0 ||
            (s->tag == tag && strcmp(w->tensor[s->next - 1].name, name) == 0))
            return s;
    }
}

static int build_names(hx_weights *w, hx_err *err)
{
    size_t n_slot = 16;

    while (n_slot < 2 * (size_t)w->n)
        n_slot *= 2;
    if ((w->slot = hx_new(slot, n_slot)) == NULL)
        return no_memory(err, "the name table");
    w->mask = n_slot - 1;
    w->seed = hx_rng_at((uint64_t)hx_now_us(), (uintptr_t)w);
    for (int64_t i = 0; i < w->n; i++) {
        const hx_tensor *t = &w->tensor[i];
        const uint32_t tag = name_hash(w->seed, t->name);
        slot *s = find_slot(w, t->name, tag);

        if (s->next != 0)
            return hx_fail(err, HX_EFORMAT,
                           CLIP ": " CLIP ": occurs twice; also in %.60s",
                           hx_weights_file(w, t), t->name,
                           hx_weights_file(w, &w->tensor[s->next - 1]));
        *s = (slot) { tag, (uint32_t)i + 1 };
    }
    return 0;
}

const hx_tensor *hx_weights_find(const hx_weights *w, const char *name)
{
    const slot *s = find_slot(w, name, name_hash(w->seed, name));

    return s->next != 0 ? &w->tensor[s->next - 1] : NULL;
}

int64_t hx_weights_count(const hx_weights *w)
{
    return w->n;
}

const hx_tensor *hx_weights_at(const hx_weights *w, int64_t i)
{
    hx_assert(i >= 0 && i < w->n);
    return &w->tensor[i];
}

uint64_t hx_weights_bytes(const hx_weights *w)
{
    return w->bytes;
}

const char *hx_weights_file(const hx_weights *w, const hx_tensor *t)
{
    return w->file[t->file].name;
}

bool hx_weights_holds(const hx_weights *w, const void *p)
{
    const uint8_t *b = p;
    int32_t i = 0;

    while (i < w->n_file &&
           !(b >= w->file[i].map.p && b < w->file[i].map.p + w->file[i].map.n))
        i++;
    return i < w->n_file;
}

/* ---- open, close, read in -------------------------------------------- */

int hx_weights_open(hx_weights **out, const char *dir, hx_err *err)
{
    hx_weights *w = hx_new(hx_weights, 1);
    listing l = { 0 };
    int rc;

    *out = NULL;
    if (w == NULL) {
        rc = no_memory(err, "its description");
        goto fail;
    }
    hx_arena_init(&w->arena, 0);
    if ((rc = set_root(w, dir, err)) != 0 || (rc = list_files(w, &l, err)) != 0)
        goto fail;
    for (int32_t i = 0; i < w->n_file; i++)
        if ((rc = map_in_folder(w, w->file[i].name, &w->file[i].map, err)) != 0 ||
            (rc = read_header(w, i, err)) != 0)
            goto fail;
    if ((rc = build_names(w, err)) != 0 || (rc = check_index(w, &l, err)) != 0)
        goto fail;
    listing_free(&l);
    *out = w;
    return 0;
fail:
    listing_free(&l);
    hx_weights_close(w);
    return rc;
}

void hx_weights_close(hx_weights *w)
{
    if (w == NULL)
        return;
    for (int32_t i = 0; i < w->n_file; i++)
        hx_file_unmap(&w->file[i].map);
    hx_free(w->tensor);
    hx_free(w->slot);
    hx_arena_reset(&w->arena);
    hx_free(w);
}

/* Brings n bytes at p (on a page boundary) into memory. Populating reports what touching
 * would answer with SIGBUS; kernels before 5.14 lack it. */
static bool read_in(const uint8_t *p, size_t n)
{
    uint8_t sum = 0;

    if (madvise((void *)(uintptr_t)p, n, MADV_POPULATE_READ) == 0)
        return true;
    if (errno != EINVAL)
        return false;
    for (size_t i = 0; i < n; i += 4096)
        sum ^= *(const volatile uint8_t *)(p + i);
    (void)sum;
    return true;
}

int hx_weights_advise(hx_weights *w, hx_load_fn *fn, void *ud, hx_err *err)
{
    const size_t step = (size_t)64 << 20;
    uint64_t done = 0, total = 0;

    for (int32_t i = 0; i < w->n_file; i++)
        total += w->file[i].map.n;
    for (int32_t i = 0; i < w->n_file; i++) {
        const hx_file map = w->file[i].map;

        for (size_t at = 0; at < map.n; at += step) {
            const size_t n = HX_MIN(step, map.n - at);
            const size_t ahead = HX_MIN(step, map.n - at - n);

            /* The disk works on the next part while this one is waited for. */
            if (ahead > 0)
                (void)madvise((void *)(uintptr_t)(map.p + at + n), ahead, MADV_WILLNEED);
            if (!read_in(map.p + at, n))
                return hx_fail(err, HX_EIO,
                               CLIP ": cannot read bytes %zu to %zu: disk error, or "
                                    "the file became shorter",
                               w->file[i].name, at, at + n);
            done += n;
            if (fn != NULL)
                fn(ud, done, total);
        }
    }
    return 0;
}

/* ---- values ---------------------------------------------------------- */

/* Element i of a tensor in F32, F16 or BF16. */
static float element(const hx_tensor *t, int64_t i)
{
    uint32_t word = 0;

    memcpy(&word, t->p + i * dtypes[t->dtype].bytes, dtypes[t->dtype].bytes);
    if (t->dtype == HX_DT_F16)
        return hx_f16_to((uint16_t)word);
    return hx_float_of(t->dtype == HX_DT_BF16 ? word << 16 : word);
}

static int64_t n_element(const hx_tensor *t)
{
    return (int64_t)(t->bytes / dtypes[t->dtype].bytes);
}

/* Errors unless every value of an F32, F16 or BF16 tensor is finite. */
static int check_finite(const hx_weights *w, const hx_tensor *t, hx_err *err)
{
    const uint32_t exponent = t->dtype == HX_DT_F32   ? 0x7f800000
                              : t->dtype == HX_DT_F16 ? 0x7c00
                                                      : 0x7f80;
    const size_t size = dtypes[t->dtype].bytes;
    const int64_t n = n_element(t);

    for (int64_t i = 0; i < n; i++) {
        uint32_t word = 0;

        memcpy(&word, t->p + (size_t)i * size, size);
        if ((word & exponent) == exponent)
            return hx_fail(err, HX_EFORMAT,
                           CLIP ": " CLIP ": value %" PRId64 " is not finite",
                           hx_weights_file(w, t), t->name, i);
    }
    return 0;
}

static bool is_float(const hx_tensor *t)
{
    return t->dtype == HX_DT_F32 || t->dtype == HX_DT_F16 || t->dtype == HX_DT_BF16;
}

static int wrong_dtype(const hx_weights *w, const hx_tensor *t, const char *expected,
                       hx_err *err)
{
    return hx_fail(err, HX_EFORMAT, CLIP ": " CLIP ": dtype %s, expected %s",
                   hx_weights_file(w, t), t->name, hx_dtype_name(t->dtype), expected);
}

static int wrong_shape(const hx_weights *w, const hx_tensor *t, const char *expected,
                       hx_err *err)
{
    char found[192];

    return hx_fail(err, HX_EFORMAT, CLIP ": " CLIP ": shape %s, expected %s",
                   hx_weights_file(w, t), t->name, shape_text(found, t->dim, t->n_dim),
                   expected);
}

static int check_shape(const hx_weights *w, const hx_tensor *t, const int64_t *dim,
                       int32_t n_dim, hx_err *err)
{
    char expected[192];

    if (t->n_dim == n_dim && memcmp(t->dim, dim, (size_t)n_dim * sizeof(*dim)) == 0)
        return 0;
    return wrong_shape(w, t, shape_text(expected, dim, n_dim), err);
}

static int find_vec(const hx_weights *w, const hx_vec_want *want, const hx_tensor **out,
                    hx_err *err)
{
    const hx_tensor *t = *out = hx_weights_find(w, want->name);
    int32_t n_dim = 0;
    int rc;

    if (t == NULL)
        return hx_fail(err, HX_EFORMAT, "checkpoint: tensor " CLIP " is missing",
                       want->name);
    while (n_dim < HX_DIM_MAX && want->dim[n_dim] != 0)
        n_dim++;
    if ((rc = check_shape(w, t, want->dim, n_dim, err)) != 0)
        return rc;
    if (!is_float(t))
        return wrong_dtype(w, t, "F32, F16 or BF16", err);
    return check_finite(w, t, err);
}

static void convert(const hx_tensor *t, float *out)
{
    const int64_t n = n_element(t);

    for (int64_t i = 0; i < n; i++)
        out[i] = element(t, i);
}

int hx_weights_copy(const hx_weights *w, const hx_vec_want *want, float *out, hx_err *err)
{
    const hx_tensor *t;
    int rc = find_vec(w, want, &t, err);

    if (rc == 0)
        convert(t, out);
    return rc;
}

int hx_weights_vec(hx_weights *w, const hx_vec_want *want, hx_buf *out, hx_err *err)
{
    const hx_tensor *t;
    size_t bytes;
    int rc = find_vec(w, want, &t, err);

    *out = (hx_buf) { NULL, 0 };
    if (rc != 0)
        return rc;
    bytes = (size_t)n_element(t) * sizeof(float);
    if ((out->p = hx_arena_alloc(&w->arena, bytes)) == NULL)
        return no_memory(err, t->name);
    out->n = bytes;
    convert(t, out->p);
    return 0;
}

/* ---- matrices -------------------------------------------------------- */

typedef enum { INPUTS, OUTPUTS } side;

static const hx_tensor *part(const hx_weights *w, const char *key, const char *suffix)
{
    char name[1024];

    if (snprintf(name, sizeof(name), "%s%s", key, suffix) >= (int)sizeof(name))
        return NULL;
    return hx_weights_find(w, name);
}

bool hx_weights_has(const hx_weights *w, const char *key)
{
    return part(w, key, ".trellis") != NULL || part(w, key, ".weight") != NULL ||
           part(w, key, "") != NULL;
}

/* KEY.bias has n values, or those of the padded outputs too. */
static int bind_bias(hx_weights *w, const hx_mat_want *want, hx_mat *m, hx_err *err)
{
    const hx_tensor *t = part(w, want->key, ".bias");
    uint16_t *half;
    int rc;

    if (t == NULL)
        return 0;
    if (!is_float(t))
        return wrong_dtype(w, t, "F16, F32 or BF16", err);
    if ((t->n_dim != 1 || t->dim[0] != HX_MAX(m->n_pad, want->n)) &&
        (rc = check_shape(w, t, &want->n, 1, err)) != 0)
        return rc;
    if ((rc = check_finite(w, t, err)) != 0)
        return rc;
    m->bias = t->p;
    if (t->dtype == HX_DT_F16)
        return 0;
    half = hx_arena_alloc(&w->arena, (size_t)t->dim[0] * sizeof(*half));
    if (half == NULL)
        return no_memory(err, t->name);
    for (int64_t i = 0; i < t->dim[0]; i++) {
        half[i] = hx_f16_from(element(t, i));
        if ((half[i] & 0x7c00) == 0x7c00)
            return hx_fail(err, HX_EFORMAT,
                           CLIP ": " CLIP ": value %" PRId64 ", %g, exceeds f16",
                           hx_weights_file(w, t), t->name, i, (double)element(t, i));
    }
    m->bias = half;
    return 0;
}

static int bind_fp8_grid(const hx_weights *w, const hx_mat_want *want,
                         const hx_tensor *weight, hx_mat *m, hx_err *err)
{
    const hx_tensor *t;
    int64_t dim[2];
    char name[1024];
    int rc;

    if (want->block_n < 1 || want->block_k < 1)
        return hx_fail(err, HX_EFORMAT,
                       CLIP ": " CLIP ": F8_E4M3, but config.json has no "
                            "quantization_config.weight_block_size",
                       hx_weights_file(w, weight), weight->name);
    snprintf(name, sizeof(name), "%s_scale_inv", weight->name);
    if ((t = hx_weights_find(w, name)) == NULL)
        return hx_fail(err, HX_EFORMAT, CLIP ": " CLIP ": F8_E4M3 without its _scale_inv",
                       hx_weights_file(w, weight), weight->name);
    dim[0] = want->n / want->block_n + (want->n % want->block_n > 0);
    dim[1] = want->k / want->block_k + (want->k % want->block_k > 0);
    if (t->dtype != HX_DT_F32)
        return wrong_dtype(w, t, "F32", err);
    if ((rc = check_shape(w, t, dim, 2, err)) != 0 || (rc = check_finite(w, t, err)) != 0)
        return rc;
    m->scale = t->p;
    m->block_n = want->block_n;
    m->block_k = want->block_k;
    return 0;
}

static int bind_plain(hx_weights *w, const hx_mat_want *want, const hx_tensor *t,
                      hx_mat *m, hx_err *err)
{
    const int64_t dim[2] = { want->n, want->k };
    int64_t inner = n_element(t);
    int rc;

    if (!is_float(t) && t->dtype != HX_DT_F8_E4M3)
        return wrong_dtype(w, t, "F32, F16, BF16 or F8_E4M3", err);
    m->fmt = t->dtype == HX_DT_F32    ? HX_FMT_F32
             : t->dtype == HX_DT_F16  ? HX_FMT_F16
             : t->dtype == HX_DT_BF16 ? HX_FMT_BF16
                                      : HX_FMT_FP8;
    /* Where dim[0] is right and not 0, the other dimensions multiply to this. */
    inner = t->n_dim > 2 && t->dim[0] == want->n ? inner / want->n : t->dim[1];
    if (t->n_dim < 2 || t->dim[0] != want->n || inner != want->k)
        return check_shape(w, t, dim, 2, err);
    if (m->fmt == HX_FMT_FP8 && (rc = bind_fp8_grid(w, want, t, m, err)) != 0)
        return rc;
    m->w = t->p;
    return 0;
}

/* exl3.md 2.1: the presence of the marker decides; its value must agree. */
static int bind_codebook(const hx_weights *w, const char *key, hx_mat *m, hx_err *err)
{
    static const struct {
        const char *suffix;
        hx_codebook codebook;
        uint32_t value;
    } marker[] = {
        { ".mcg", HX_CB_MCG, HX_EXL3_MCG },
        { ".mul1", HX_CB_MUL1, HX_EXL3_MUL1 },
    };

    m->codebook = HX_CB_3INST;
    for (size_t i = 0; i < HX_LEN(marker); i++) {
        const hx_tensor *t = part(w, key, marker[i].suffix);
        uint32_t value;

        if (t == NULL)
            continue;
        if (m->codebook != HX_CB_3INST)
            return hx_fail(err, HX_EFORMAT,
                           CLIP ": " CLIP ": both mcg and mul1 mark this matrix",
                           hx_weights_file(w, t), t->name);
        if (t->dtype != HX_DT_I32 && t->dtype != HX_DT_U32)
            return wrong_dtype(w, t, "I32", err);
        if (t->bytes != sizeof(value))
            return wrong_shape(w, t, "[]", err);
        memcpy(&value, t->p, sizeof(value));
        if (value != marker[i].value)
            return hx_fail(err, HX_EUNSUP,
                           CLIP ": " CLIP ": multiplier 0x%08" PRIX32
                                ", only 0x%08" PRIX32 " is known",
                           hx_weights_file(w, t), t->name, value, marker[i].value);
        m->codebook = marker[i].codebook;
    }
    return 0;
}

static int bind_trellis(const hx_weights *w, const hx_tensor *t, hx_mat *m, hx_err *err)
{
    const int64_t w8 = t->dim[2] / 8;
    char expected[96];

    if (t->dtype != HX_DT_I16 && t->dtype != HX_DT_U16)
        return wrong_dtype(w, t, "I16", err);
    if (t->n_dim != 3 || t->dim[0] != m->k_pad / 16 || t->dim[1] != m->n_pad / 16) {
        snprintf(expected, sizeof(expected), "[%" PRId64 ", %" PRId64 ", 16 bits]",
                 m->k_pad / 16, m->n_pad / 16);
        return wrong_shape(w, t, expected, err);
    }
    if (t->dim[2] % 8 != 0 || w8 < 2 || w8 > 16 || (w8 % 2 != 0 && w8 > 7))
        return wrong_shape(
            w, t, "16 times 1 to 8 bits, or 1.5, 2.5, 3.5, as last dimension", err);
    if (w8 % 2 != 0 && m->codebook != HX_CB_MUL1)
        return wrong_shape(w, t, "whole bits, as the codebook is not mul1", err);
    m->fmt = HX_FMT_EXL3;
    m->w = t->p;
    m->k2 = (int32_t)w8;
    return 0;
}

/* One value per channel of a side: KEY.suh (f16), or the older KEY.su, where bit i of
 * word j is the sign of channel 16 j + i. */
static int bind_channels(hx_weights *w, const char *key, side at, hx_mat *m, hx_err *err)
{
    const hx_tensor *t = part(w, key, at == INPUTS ? ".suh" : ".svh");
    const int64_t n = at == INPUTS ? m->k_pad : m->n_pad, n_word = n / 16;
    const void **out = at == INPUTS ? &m->suh : &m->svh;
    uint16_t *half;
    int rc;

    if (t != NULL) {
        if (t->dtype != HX_DT_F16)
            return wrong_dtype(w, t, "F16", err);
        *out = t->p;
        rc = check_shape(w, t, &n, 1, err);
        return rc != 0 ? rc : check_finite(w, t, err);
    }
    if ((t = part(w, key, at == INPUTS ? ".su" : ".sv")) == NULL)
        return hx_fail(err, HX_EFORMAT,
                       "checkpoint: " CLIP ".%s is missing beside its trellis", key,
                       at == INPUTS ? "suh" : "svh");
    if (t->dtype != HX_DT_I16 && t->dtype != HX_DT_U16)
        return wrong_dtype(w, t, "I16", err);
    if ((rc = check_shape(w, t, &n_word, 1, err)) != 0)
        return rc;
    if ((half = hx_arena_alloc(&w->arena, (size_t)n * sizeof(*half))) == NULL)
        return no_memory(err, t->name);
    for (int64_t i = 0; i < n; i++)
        half[i] = t->p[i / 8] >> i % 8 & 1 ? 0xbc00 : 0x3c00; /* -1, 1 */
    *out = half;
    return 0;
}

static int bind_exl3(hx_weights *w, const hx_mat_want *want, const hx_tensor *trellis,
                     hx_mat *m, hx_err *err)
{
    int rc;

    m->n_pad = (want->n + 127) / 128 * 128;
    m->k_pad = (want->k + 127) / 128 * 128;
    if (part(w, want->key, ".scale") != NULL)
        return hx_fail(err, HX_EUNSUP,
                       "checkpoint: " CLIP ".scale: too old an EXL3 matrix; "
                       "quantise the model again",
                       want->key);
    if ((rc = bind_codebook(w, want->key, m, err)) != 0 ||
        (rc = bind_trellis(w, trellis, m, err)) != 0 ||
        (rc = bind_channels(w, want->key, INPUTS, m, err)) != 0)
        return rc;
    return bind_channels(w, want->key, OUTPUTS, m, err);
}

int hx_weights_mat(hx_weights *w, const hx_mat_want *want, hx_mat *out, hx_err *err)
{
    const hx_tensor *t;
    int rc;

    *out = (hx_mat) { .n = want->n, .k = want->k };
    if (want->n < 1 || want->k < 1 || want->n > INT32_MAX || want->k > INT32_MAX)
        rc = hx_fail(err, HX_EARG,
                     CLIP ": no matrix of %" PRId64 " outputs and %" PRId64 " inputs",
                     want->key, want->n, want->k);
    else if ((t = part(w, want->key, ".trellis")) != NULL)
        rc = bind_exl3(w, want, t, out, err);
    else if ((t = part(w, want->key, ".weight")) != NULL ||
             (t = part(w, want->key, "")) != NULL)
        rc = bind_plain(w, want, t, out, err);
    else
        rc = hx_fail(err, HX_EFORMAT, "checkpoint: neither " CLIP ".weight nor .trellis",
                     want->key);
    if (rc == 0)
        rc = bind_bias(w, want, out, err);
    if (rc != 0)
        *out = (hx_mat) { .n = 0 };
    return rc;
}
