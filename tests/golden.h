/* golden.h - reads reference data in tests: .npy, safetensors, JSON; compares.
 * Header-only, for x_test.c files; a missing file fails the test that asked for it. */
#ifndef HX_TESTS_GOLDEN_H
#define HX_TESTS_GOLDEN_H

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "base/base.h"

/* Data of an array file; freed with golden_free(). */
typedef struct {
    char *raw;
    const void *p;
    int64_t dim[8];
    int n_dim;
    char type[8];
} golden;

static inline void golden_free(golden *g)
{
    hx_free(g->raw);
    *g = (golden) { 0 };
}

static inline hx_json *golden_json(const char *path)
{
    char *text;
    size_t n;
    hx_json *j;
    hx_err err = { 0 };

    if (hx_file_read(path, 256u << 20, &text, &n, &err) != 0 ||
        hx_json_parse(&j, (hx_str) { text, n }, 0, &err) != 0) {
        fail_msg("%s: %s", path, err.msg);
        return NULL;
    }
    hx_free(text);
    return j;
}

/* NumPy's .npy, version 1, C order: type "<f4", "<i4", "<i2". */
static inline golden golden_npy(const char *path)
{
    golden g = { 0 };
    size_t n;
    hx_err err = { 0 };
    const char *s;

    if (hx_file_read(path, 256u << 20, &g.raw, &n, &err) != 0)
        fail_msg("%s", err.msg);
    const size_t head = (uint8_t)g.raw[8] | (size_t)(uint8_t)g.raw[9] << 8;
    assert_true(n > 10 + head && memcmp(g.raw, "\x93NUMPY", 6) == 0);
    g.p = g.raw + 10 + head;
    s = memmem(g.raw + 10, head, "'descr': '", 10);
    assert_non_null(s);
    memcpy(g.type, s + 10, 3);
    s = memmem(g.raw + 10, head, "'shape': (", 10);
    assert_non_null(s);
    for (s += 10; *s != ')';) {
        char *end;
        g.dim[g.n_dim++] = strtoll(s, &end, 10);
        s = end;
        while (*s == ',' || *s == ' ')
            s++;
    }
    return g;
}

/* One float32 tensor of a safetensors file. */
typedef struct {
    char *raw;
    hx_json *head;
    const char *data;
} golden_file;

static inline golden_file golden_open(const char *path)
{
    golden_file f = { 0 };
    size_t n;
    uint64_t head;
    hx_err err = { 0 };

    if (hx_file_read(path, 256u << 20, &f.raw, &n, &err) != 0)
        fail_msg("%s", err.msg);
    memcpy(&head, f.raw, 8);
    if (hx_json_parse(&f.head, (hx_str) { f.raw + 8, head }, 0, &err) != 0)
        fail_msg("%s: %s", path, err.msg);
    f.data = f.raw + 8 + head;
    return f;
}

static inline const float *golden_f32(const golden_file *f, const char *name,
                                      int64_t *count)
{
    const hx_json *t = hx_json_get(f->head, name), *off = hx_json_get(t, "data_offsets");

    if (t == NULL)
        return NULL;
    assert_true(hx_str_is(hx_json_str(hx_json_get(t, "dtype")), "F32"));
    const int64_t a = hx_json_int(hx_json_at(off, 0), -1),
                  b = hx_json_int(hx_json_at(off, 1), -1);
    *count = (b - a) / 4;
    return (const float *)(const void *)(f->data + a);
}

static inline void golden_close(golden_file *f)
{
    hx_json_free(f->head);
    hx_free(f->raw);
}

/* ||a - b|| / ||b|| */
static inline double golden_rel(const float *a, const float *b, int64_t n)
{
    double d = 0, s = 0;

    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        s += (double)b[i] * b[i];
    }
    return isfinite(d) ? sqrt(d / (s > 0 ? s : 1)) : INFINITY;
}

static inline int64_t golden_argmax(const float *v, int64_t n)
{
    int64_t best = 0;

    for (int64_t i = 1; i < n; i++)
        if (v[i] > v[best])
            best = i;
    return best;
}

#define GOLDEN_NEED(path)                                                                \
    do {                                                                                 \
        if (!hx_file_exists(path)) {                                                     \
            printf("SKIP %s: %s not beside the checkout\n", __func__, path);             \
            skip();                                                                      \
        }                                                                                \
    } while (0)

#endif
