/* bench_compare.c - `hoist bench compare A B`: ratios of two results, with intervals, and what
 * makes them incomparable. Called by bench.c. Reads JSON that bench wrote; measures nothing. */
#include <math.h>

#include "cli/bench.h"

/* Two-sided 95 % points of Student's t. */
static double t95(double df)
{
    static const double t[] = { 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                                2.262,  2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
                                2.110,  2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                                2.060,  2.056, 2.052, 2.048, 2.045, 2.042 };

    if (!(df >= 1))
        return t[0];
    /* rounded down: the wider one */
    return df < 30 ? t[(int)df - 1] : 1.96 + 2.5 / df;
}

typedef struct {
    int n;
    double mean, var; /* of logarithms; var of the mean */
} logs;

static bool logs_of(const hx_json *figure, logs *out)
{
    const hx_json *all = hx_json_get(figure, "all");

    *out = (logs) { .n = (int)hx_json_len(all) };
    for (int i = 0; i < out->n; i++) {
        const double v = hx_json_num(hx_json_at(all, (size_t)i), -1);

        if (!(v > 0))
            return false;
        out->mean += log(v) / out->n;
    }
    for (int i = 0; i < out->n; i++) {
        const double d = log(hx_json_num(hx_json_at(all, (size_t)i), 1)) - out->mean;

        if (out->n > 1)
            out->var += d * d / (out->n - 1) / out->n;
    }
    return out->n > 0;
}

/* Ratio of geometric means, b over a, by Welch's interval on logarithms: speeds vary by
 * factors. False: no interval (one run of either). */
static bool ratio_of(const logs *a, const logs *b, double out[3])
{
    const double d = b->mean - a->mean, v = a->var + b->var;
    double df;

    out[0] = exp(d);
    out[1] = out[2] = NAN;
    if (a->n < 2 || b->n < 2)
        return false;
    df = v > 0 ? v * v / (a->var * a->var / (a->n - 1) + b->var * b->var / (b->n - 1))
               : 30;
    out[1] = exp(d - t95(df) * sqrt(v));
    out[2] = exp(d + t95(df) * sqrt(v));
    return true;
}

static const hx_json *path_of(const hx_json *j, const char *a, const char *b)
{
    return hx_json_get(hx_json_get(j, a), b);
}

static bool same_json(const hx_json *a, const hx_json *b)
{
    hx_sb x = { 0 }, y = { 0 };
    bool same;

    hx_json_write(&x, a);
    hx_json_write(&y, b);
    same = !x.bad && !y.bad && x.n == y.n && (x.n == 0 || memcmp(x.p, y.p, x.n) == 0);
    hx_sb_free(&x);
    hx_sb_free(&y);
    return same;
}

/* Names what differs: a ratio is only worth what the two have in common. */
static void print_differences(const hx_json *a, const hx_json *b)
{
    static const struct {
        const char *a, *b, *text;
    } facts[] = { { "protocol", "name", "protocols" },
                  { "protocol", "prompts_sha256", "prompts" },
                  { "model", "name", "models" },
                  { "model", "weight_bytes", "sizes of the weights" },
                  { "model", "device", "devices" },
                  { "model", "kv", "formats of attention memory" },
                  { "machine", "cpu", "processors" },
                  { "machine", "cpus", "numbers of CPUs" },
                  { "gpu", "name", "GPUs" },
                  { "gpu", "driver", "drivers" },
                  { "build", "binary_sha256", "builds" } };

    for (size_t i = 0; i < HX_LEN(facts); i++)
        if (!same_json(path_of(a, facts[i].a, facts[i].b),
                       path_of(b, facts[i].a, facts[i].b)))
            printf("different %s\n", facts[i].text);
}

static int read_result(const char *path, hx_json **out, hx_err *err)
{
    int rc = hx_json_read(out, path, 64u << 20, err);

    if (rc == 0 && hx_json_kind(hx_json_get(*out, "figures")) != HX_JSON_OBJECT)
        rc = hx_fail(err, HX_EFORMAT, "%s: no result of hoist bench --json", path);
    return rc;
}

static int compare(const hx_json *a, const hx_json *b, hx_sb *out)
{
    const hx_json *fa = hx_json_get(a, "figures"), *fb = hx_json_get(b, "figures");
    int n = 0;

    for (size_t i = 0; i < hx_json_len(fa); i++) {
        hx_str name;
        char key[256];
        const hx_json *x = hx_json_member(fa, i, &name), *y;
        double r[3];
        logs la, lb;

        snprintf(key, sizeof key, "%.*s", (int)HX_MIN(name.n, 255), name.p);
        if ((y = hx_json_get(fb, key)) == NULL || !logs_of(x, &la) || !logs_of(y, &lb))
            continue;
        printf("%-40s %10.4g -> %-10.4g %6.3fx", key, exp(la.mean), exp(lb.mean),
               exp(lb.mean - la.mean));
        hx_sb_str(out, n++ > 0 ? "," : "");
        hx_json_put_str(out, name);
        hx_sb_printf(out, ":{\"a\":%.6g,\"b\":%.6g,", exp(la.mean), exp(lb.mean));
        if (ratio_of(&la, &lb, r)) {
            printf("  (95 %%: %.3f to %.3f)%s", r[1], r[2],
                   r[1] <= 1 && 1 <= r[2] ? "  no difference shown" : "");
            hx_sb_printf(out, "\"ratio\":%.6g,\"lo\":%.6g,\"hi\":%.6g}", r[0], r[1],
                         r[2]);
        } else {
            hx_sb_printf(out, "\"ratio\":%.6g,\"lo\":null,\"hi\":null}", r[0]);
        }
        putchar('\n');
    }
    return n;
}

int bench_compare(const hx_cli *c)
{
    hx_json *a = NULL, *b = NULL;
    hx_sb out = { 0 };
    hx_err err = { 0 };
    int rc;

    if (c->n_more < 1) {
        fprintf(stderr, "hoist: bench compare needs two files: A.json B.json\n");
        return 2;
    }
    hx_sb_str(&out, "{\"ratios_b_over_a\":{");
    if ((rc = read_result(c->model, &a, &err)) == 0 &&
        (rc = read_result(c->more[0], &b, &err)) == 0) {
        print_differences(a, b);
        if (compare(a, b, &out) == 0)
            rc = hx_fail(&err, HX_EARG, "%s and %s have no figure in common", c->model,
                         c->more[0]);
    }
    hx_sb_str(&out, "}}\n");
    if (rc == 0 && c->json != NULL)
        rc = cli_write(c->json, &out, &err);
    hx_sb_free(&out);
    hx_json_free(a);
    hx_json_free(b);
    return rc != 0 ? cli_fail(&err) : 0;
}
