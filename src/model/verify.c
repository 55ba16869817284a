/* verify.c - is a checkpoint what its format demands, and do the kernels of this machine read it
 * right? Every EXL3 matrix in it against the format's rules (docs/EXL3.md), and drawn rows against
 * a decoder that follows the definition in double. Called by inspect. Changes nothing. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "dev/fmt_exl3.h"
#include "model/model.h"

/* The part of name before suffix, or false. */
static bool cut(const char *name, const char *suffix, char key[1024])
{
    const size_t n = strlen(name), k = strlen(suffix);

    if (n <= k || n >= 1024 || strcmp(name + n - k, suffix) != 0)
        return false;
    memcpy(key, name, n - k);
    key[n - k] = '\0';
    return true;
}

/* ---- rules --------------------------------------------------------------- */

/* A companion without its trellis would be ignored in silence. */
static int check_companion(const hx_weights *w, const hx_tensor *t, hx_err *err)
{
    static const char *const suffix[] = { ".suh", ".svh", ".mcg", ".mul1" };
    char key[1024], name[1100];

    for (size_t i = 0; i < HX_LEN(suffix); i++) {
        if (!cut(t->name, suffix[i], key))
            continue;
        snprintf(name, sizeof name, "%s.trellis", key);
        if (hx_weights_find(w, name) == NULL)
            return hx_fail(err, HX_EFORMAT, "%s: %.120s: no trellis beside it",
                           hx_weights_file(w, t), t->name);
    }
    return 0;
}

/* The matrix of a trellis by itself: its own shape says what n and k are. */
static int bind(hx_weights *w, const hx_tensor *t, const char *key, hx_mat *m,
                hx_err *err)
{
    if (t->n_dim != 3 || t->dim[0] % 8 != 0 || t->dim[1] % 8 != 0)
        return hx_fail(
            err, HX_EFORMAT,
            "%s: %.120s: expected three dimensions, the first two of them multiples "
            "of 8 (128 channels)",
            hx_weights_file(w, t), t->name);
    return hx_weights_mat(
        w, &(hx_mat_want) { .key = key, .n = 16 * t->dim[1], .k = 16 * t->dim[0] }, m,
        err);
}

/* Which experts of which projection: "…layers.3.mlp.experts." and "gate_proj". */
typedef struct {
    char layer[200], proj[32];
    int32_t k2;
    bool mixed;
} group;

typedef struct {
    group *g;
    int64_t n, cap;
} groups;

static int count_rate(groups *all, const char *key, int32_t k2)
{
    const char *at = strstr(key, ".experts."), *dot = strrchr(key, '.');
    group *g = NULL;

    if (at == NULL || dot == NULL || (size_t)(at - key) >= sizeof g->layer ||
        strlen(dot + 1) >= sizeof g->proj)
        return 0;
    /* Tensors come in the order of the file: the group is mostly one of the last few. */
    for (int64_t i = all->n - 1; i >= 0 && g == NULL; i--)
        if (strncmp(all->g[i].layer, key, (size_t)(at - key)) == 0 &&
            all->g[i].layer[at - key] == '\0' && strcmp(all->g[i].proj, dot + 1) == 0)
            g = &all->g[i];
    if (g != NULL) {
        g->mixed |= g->k2 != k2;
        return 0;
    }
    if (all->n == all->cap) {
        const int64_t cap = HX_MAX(64, 2 * all->cap);

        if ((g = hx_realloc(all->g, (size_t)cap * sizeof *g)) == NULL)
            return HX_ENOMEM;
        all->g = g;
        all->cap = cap;
    }
    g = &all->g[all->n++];
    *g = (group) { .k2 = k2 };
    memcpy(g->layer, key, (size_t)(at - key));
    memcpy(g->proj, dot + 1, strlen(dot + 1));
    return 0;
}

int hx_verify_rules(hx_weights *w, hx_verify_report *r, hx_err *err)
{
    groups all = { 0 };
    char key[1024];
    int rc = 0;

    for (int64_t i = 0; rc == 0 && i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        hx_mat m;

        if ((rc = check_companion(w, t, err)) != 0 || !cut(t->name, ".trellis", key))
            continue;
        if ((rc = bind(w, t, key, &m, err)) == 0 &&
            (rc = count_rate(&all, key, m.k2)) != 0)
            hx_fail(err, rc, "verify: no memory");
        r->n_exl3++;
    }
    for (int64_t i = 0; i < all.n; i++)
        r->n_mixed += all.g[i].mixed;
    hx_free(all.g);
    return rc;
}

/* ---- rows ------------------------------------------------------------------ */

static double half_at(const void *p, int64_t i)
{
    return (double)hx_f16_to(hx_u16_at(p, i));
}

/* Sum over the 128 rotated outputs of n's block, then the rotation of each 128 inputs:
 * W[n, k] = suh[k] svh[n] sum over k' n' of P[k, k'] What[k', n'] P[n', n]. */
void hx_verify_row(const hx_mat *m, int64_t n, double *out)
{
    const double p = 1 / sqrt(128.0);
    float tile[256];

    for (int64_t k = 0; k < m->k_pad; k++)
        out[k] = 0;
    for (int64_t tk = 0; tk < m->k_pad / 16; tk++)
        for (int64_t j = 0; j < 8; j++) {
            hx_exl3_tile(m, tk, n / 128 * 8 + j, tile);
            for (int i = 0; i < 256; i++) {
                const int64_t to = 16 * j + i % 16; /* output inside the block */
                const int odd = __builtin_popcountll((uint64_t)(to & n & 127)) & 1;

                out[16 * tk + i / 16] += (odd ? -p : p) * (double)tile[i];
            }
        }
    for (int64_t b = 0; b < m->k_pad; b += 128) {
        double in[128];

        memcpy(in, out + b, sizeof in);
        for (int64_t k = 0; k < 128; k++) {
            double sum = 0;

            for (int64_t i = 0; i < 128; i++)
                sum += (__builtin_popcountll((uint64_t)(i & k)) & 1) ? -in[i] : in[i];
            out[b + k] = sum * p * half_at(m->suh, b + k) * half_at(m->svh, n);
        }
    }
}

/* The kernels' own error is 2.2e-4 of a product's size in the mean (mul1, its affine value); a
 * sum of thousands of such errors is normal, and 25 deviations are a fault. */
#define ROW_BOUND 5.5e-3

static int check_product(hx_dev *d, const hx_mat *m, const char *key, uint64_t seed,
                         hx_verify_report *r, hx_err *err)
{
    double *row = hx_new(double, m->k_pad);
    hx_buf x = { 0 }, y = { 0 };
    int rc;

    if (row == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "verify: no memory for a row");
        goto fail;
    }
    if ((rc = hx_dev_alloc(d, &x, (size_t)m->k * sizeof(float), err)) != 0 ||
        (rc = hx_dev_alloc(d, &y, (size_t)m->n * sizeof(float), err)) != 0)
        goto fail;
    for (int64_t k = 0; k < m->k; k++)
        ((float *)x.p)[k] = (float)hx_rng_normal(seed, (uint64_t)k);
    const hx_matmul_args a = {
        .y = y, .x = x, .w = m, .rows = 1, .ldx = m->k, .ldy = m->n
    };

    if ((rc = hx_op_matmul(d, &a, err)) != 0)
        goto fail;
    for (uint64_t i = 0; i < 2; i++) {
        const int64_t n = (int64_t)(hx_rng_at(seed + 1, i) % (uint64_t)m->n);
        double want = m->bias != NULL ? half_at(m->bias, n) : 0, size = 0, e;

        hx_verify_row(m, n, row);
        for (int64_t k = 0; k < m->k; k++) {
            want += row[k] * (double)((float *)x.p)[k];
            size += row[k] * row[k];
        }
        e = fabs((double)((float *)y.p)[n] - want) / HX_MAX(sqrt(size), 1e-30);
        r->worst = HX_MAX(r->worst, e);
        r->n_row++;
        if (!(e <= ROW_BOUND) && size > 0) {
            rc = hx_fail(err, HX_EDEVICE,
                         "%.120s: row %" PRId64
                         ": %s gives %g, the definition %g (error %.2g of "
                         "its size, at most %g): this machine computes it wrongly",
                         key, n, d->text, (double)((float *)y.p)[n], want, e, ROW_BOUND);
            goto fail;
        }
    }
fail:
    hx_free(row);
    hx_dev_free(d, &x);
    hx_dev_free(d, &y);
    return rc;
}

int hx_verify_rows(hx_weights *w, int64_t n_mat, uint64_t seed, hx_verify_report *r,
                   hx_err *err)
{
    const int64_t n = hx_weights_count(w), want = HX_MIN(n_mat, r->n_exl3);
    int64_t seen = 0;
    char key[1024];
    int rc = 0;

    /* Each trellis is drawn with the chance that leaves want of them in all. */
    for (int64_t i = 0; rc == 0 && i < n; i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        hx_dev *d = NULL;
        hx_mat m;

        if (!cut(t->name, ".trellis", key))
            continue;
        seen++;
        if ((double)(want - r->n_drawn) <=
            hx_rng_unit(seed, (uint64_t)i) * (double)(r->n_exl3 - seen + 1))
            continue;
        if ((rc = bind(w, t, key, &m, err)) != 0)
            break;
        const hx_dev_opt opt = { .name = "cpu",
                                 .n_threads = 1,
                                 .limits = { .max_rows = 1,
                                             .max_k = m.k_pad,
                                             .max_n = m.n_pad,
                                             .max_active = 1,
                                             .max_expert = 1,
                                             .max_heads = 1,
                                             .max_ctx = 1 } };

        if ((rc = hx_dev_open(&d, &opt, err)) == 0)
            rc = check_product(d, &m, key, seed + (uint64_t)i, r, err);
        r->n_drawn++;
        hx_dev_close(d);
    }
    return rc;
}
