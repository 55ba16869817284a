/* verify_test.c - rows decoded by definition against published vectors; rules and rows of the demo;
 * checksums. Damaged files are tests/suite_verify.sh. */
#include "../../tests/golden.h"

#include <sys/stat.h>
#include <unistd.h>

#include "dev/fmt_plain.h"
#include "model/model.h"

#define DEMO    "models/demo-exl3"
#define VECTORS "tests/data/exl3/exl3_vectors/"

static const char *at(const hx_json *c, const char *bytes, const char *name)
{
    return bytes +
           hx_json_int(hx_json_get(hx_json_get(hx_json_get(c, "arrays"), name), "offset"),
                       0);
}

/* x times the decoded rows is the recorded float64 product, for every rate and codebook. */
static void test_rows(void **state)
{
    hx_json *man = golden_json(VECTORS "manifest.json");
    const hx_json *cases = hx_json_get(man, "cases");
    double row[512];

    (void)state;
    assert_true(hx_json_len(cases) >= 10);
    for (size_t i = 0; i < hx_json_len(cases); i++) {
        const hx_json *c = hx_json_at(cases, i);
        const hx_str cb = hx_json_str(hx_json_get(c, "codebook"));
        const int64_t k = hx_json_int(hx_json_get(c, "k"), 0),
                      n = hx_json_int(hx_json_get(c, "n"), 0);
        char path[256], *b;
        size_t bytes;
        hx_err err = { 0 };
        double err2 = 0, sum2 = 0;

        snprintf(path, sizeof path, VECTORS "%s", hx_json_str(hx_json_get(c, "file")).p);
        assert_int_equal(hx_file_read(path, 1 << 20, &b, &bytes, &err), 0);
        const hx_mat m = {
            .fmt = HX_FMT_EXL3,
            .n = n,
            .k = k,
            .n_pad = n,
            .k_pad = k,
            .k2 = (int32_t)hx_json_int(hx_json_get(c, "words_per_tile"), 0) / 8,
            .codebook = hx_str_is(cb, "mul1")  ? HX_CB_MUL1
                        : hx_str_is(cb, "mcg") ? HX_CB_MCG
                                               : HX_CB_3INST,
            .w = at(c, b, "trellis"),
            .suh = at(c, b, "suh"),
            .svh = at(c, b, "svh")
        };

        for (int64_t o = 0; o < n; o++) {
            hx_verify_row(&m, o, row);
            for (int64_t r = 0; r < 3; r++) {
                double y = 0;
                float want;

                memcpy(&want, at(c, b, "y") + 4 * (r * n + o), 4);
                for (int64_t j = 0; j < k; j++) {
                    uint16_t h;

                    memcpy(&h, at(c, b, "x") + 2 * (r * k + j), 2);
                    y += row[j] * (double)hx_f16_to(h);
                }
                err2 += (y - (double)want) * (y - (double)want);
                sum2 += (double)want * (double)want;
            }
        }
        if (!(sqrt(err2 / sum2) < 1e-6)) /* the record is rounded to f32 */
            fail_msg("case %zu: relative error %g", i, sqrt(err2 / sum2));
        hx_free(b);
    }
    hx_json_free(man);
}

static void test_demo(void **state)
{
    hx_verify_report r = { 0 };
    hx_weights *w;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_weights_open(&w, DEMO, &err), 0);
    assert_int_equal(hx_verify_rules(w, &r, &err), 0);
    assert_true(r.n_exl3 > 300); /* the MTP block's too */
    assert_int_equal(r.n_mixed, 0);
    assert_int_equal(hx_verify_rows(w, 5, 3, &r, &err), 0);
    assert_int_equal(r.n_drawn, 5);
    assert_int_equal(r.n_row, 10);
    assert_true(r.worst > 1e-7 && r.worst < 2e-3);
    hx_weights_close(w);
}

/* Published: XXH3_128bits of nothing. */
static void test_sum(void **state)
{
    const hx_sum s = hx_sums_of("", 0);

    (void)state;
    assert_true(s.hi == 0x99aa06d3014798d8 && s.lo == 0x6001c324468d497f);
}

static void count_bad(void *ud, const char *name, const char *why)
{
    char *last = ud;

    snprintf(last, 256, "%s %s", name, why);
}

/* Write, read, compare; a changed byte anywhere is that tensor's. */
static void test_sums(void **state)
{
    char dir[] = "/tmp/hoist-sums-XXXXXX", path[256], last[256] = "";
    hx_sums *made, *back;
    hx_weights *w;
    hx_err err = { 0 };

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(hx_weights_open(&w, DEMO, &err), 0);
    assert_int_equal(hx_sums_make(&made, w, NULL, NULL, NULL, &err), 0);
    assert_int_equal(hx_sums_read(&back, dir, &err), HX_EIO); /* none there yet */
    assert_int_equal(hx_sums_write(made, dir, &err), 0);
    assert_int_equal(hx_sums_read(&back, dir, &err), 0);
    assert_int_equal(hx_sums_count(back), hx_weights_count(w));
    assert_int_equal(hx_sums_compare(back, made, count_bad, last), 0);
    for (int64_t i = 0; i < hx_weights_count(w); i += 97) {
        const hx_tensor *t = hx_weights_at(w, i);
        uint8_t *copy = hx_alloc(t->bytes);
        const uint64_t bit = hx_rng_at(1, (uint64_t)i) % (8 * t->bytes);

        memcpy(copy, t->p, t->bytes);
        assert_int_equal(hx_sums_check(back, t, hx_sums_of(copy, t->bytes), &err), 0);
        copy[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_int_equal(hx_sums_check(back, t, hx_sums_of(copy, t->bytes), &err),
                         HX_EFORMAT);
        assert_non_null(strstr(err.msg, t->name));
        hx_free(copy);
    }
    hx_sums_close(made);
    hx_sums_close(back);
    hx_weights_close(w);
    /* Another model's checksums: every tensor of one is gone, or has none. */
    if (hx_file_exists("../shared/models/demo-exl3-mixed/config.json")) {
        assert_int_equal(hx_weights_open(&w, "../shared/models/demo-exl3-mixed", &err),
                         0);
        assert_int_equal(hx_sums_make(&made, w, NULL, NULL, NULL, &err), 0);
        assert_int_equal(hx_sums_read(&back, dir, &err), 0);
        assert_true(hx_sums_compare(back, made, count_bad, last) > 500);
        hx_sums_close(made);
        hx_sums_close(back);
        hx_weights_close(w);
    }
    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    unlink(path);
    rmdir(dir);
}

static void test_sums_bad_files(void **state)
{
    static const char *const bad[] = {
        "", "{}", "{\"tensors\":[]}", "{\"tensors\":{\"a\":{\"form\":\"F16 [1]\"}}}",
        "{\"tensors\":{\"a\":{\"form\":\"F16 "
        "[1]\",\"xxh3_128\":\"zz000000000000000000000000000000\"}}}"
    };
    char dir[] = "/tmp/hoist-sums-XXXXXX", path[256];
    hx_sums *s;
    hx_err err = { 0 };

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        FILE *f = fopen(path, "w");

        fputs(bad[i], f);
        fclose(f);
        if (hx_sums_read(&s, dir, &err) != HX_EFORMAT || s != NULL)
            fail_msg("%s: read", bad[i]);
    }
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_demo),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_sums_bad_files),
    };

    return cmocka_run_group_tests_name("verify", tests, NULL, NULL);
}
