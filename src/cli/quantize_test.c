/* quantize_test.c - the parts of quantize that need no conversion: bits per group, layout,
 * shrinkage of Hessians against its definition, calibration files, journal. Whole
 * conversions are in suite_quantize.sh. */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/quantize_calib.c"

#define TINY "tests/data/glm_tiny"

static char folder[64];

static const char *path_of(const char *name)
{
    static char path[160];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put_file(const char *name, const char *text)
{
    assert_int_equal(qz_write_file(path_of(name), text, strlen(text), NULL), 0);
}

static qz_plan_opt options(double bits)
{
    return (qz_plan_opt) {
        .bits = bits, .head_k2 = 12, .codebook = HX_CB_MUL1, .shard_bytes = 1 << 20
    };
}

static void open_plan(qz_plan *p, hx_model **m, const qz_plan_opt *o)
{
    hx_err err;

    if (hx_model_open_mapped(m, TINY, &err) != 0 || qz_plan_open(p, *m, o, &err) != 0)
        fail_msg("%s", err.msg);
}

/* ---- bits ---------------------------------------------------------------- */

static double average(const qz_plan *p)
{
    double bits = 0, n = 0;

    for (int64_t i = 0; i < p->n_unit; i++)
        if (p->unit[i].layer >= 0) {
            const double size = (double)p->unit[i].n * (double)p->unit[i].k;

            bits += size * p->unit[i].k2 / 2;
            n += size;
        }
    return bits / n;
}

static void rates_meet_the_budget(void **state)
{
    static const double wanted[] = { 2, 2.5, 3, 3.5, 4.25, 5, 6.1, 8 };

    (void)state;
    for (size_t i = 0; i < HX_LEN(wanted); i++)
        for (int half = 0; half < 2; half++) {
            qz_plan_opt o = options(wanted[i]);
            hx_model *m;
            qz_plan p;

            o.half_rates = half == 1;
            open_plan(&p, &m, &o);
            assert_int_equal(qz_plan_rates(&p, NULL), 0);
            assert_true(fabs(average(&p) - p.bits) < 1e-9);
            assert_true(p.bits <= wanted[i] + 1e-9 && p.bits > wanted[i] - 0.5);
            for (int64_t u = 0; u < p.n_unit; u++) {
                const int32_t k2 = p.unit[u].k2;

                assert_true(k2 % 2 == 0 || half == 1);
                if (p.unit[u].layer < 0)
                    assert_int_equal(k2, 12);
                for (int64_t v = 0; v < u; v++) /* one rate per group */
                    if (p.unit[v].layer == p.unit[u].layer &&
                        p.unit[v].class == p.unit[u].class)
                        assert_int_equal(p.unit[v].k2, k2);
            }
            qz_plan_close(&p);
            hx_model_close(m);
        }
}

/* What adds more to the streams gets more bits. */
static void rates_follow_weights(void **state)
{
    const qz_plan_opt o = options(4);
    hx_model *m;
    qz_plan p;

    (void)state;
    open_plan(&p, &m, &o);
    for (int64_t l = 0; l < m->desc.n_layer; l++)
        p.weight[l][QZ_ATTN] = l == 3 ? 100 : 0.01;
    assert_int_equal(qz_plan_rates(&p, NULL), 0);
    for (int64_t l = 0; l < m->desc.n_layer; l++)
        if (l != 3)
            assert_true(p.rate[3][QZ_ATTN] >= p.rate[l][QZ_ATTN] + 6);
    qz_plan_close(&p);
    hx_model_close(m);
}

/* Tensors lie in their files without hole or overlap, layers whole in one. */
static void layout(void **state)
{
    qz_plan_opt o = options(4);
    hx_model *m;
    qz_plan p;
    int32_t file_of[16];

    (void)state;
    o.shard_bytes = 100000;
    open_plan(&p, &m, &o);
    assert_int_equal(qz_plan_rates(&p, NULL), 0);
    uint64_t bytes = qz_plan_bytes(&p);

    assert_int_equal(qz_plan_layout(&p, NULL), 0);
    assert_true(p.n_file > 2 && !p.has_mtp);
    memset(file_of, -1, sizeof file_of);
    for (int32_t f = 0; f < p.n_file; f++) {
        uint8_t *seen = hx_calloc(p.file[f].bytes, 1);

        bytes -= p.file[f].bytes;
        assert_int_equal(p.file[f].head.n % 64, 0);
        for (int64_t i = 0; i < p.n_tensor; i++) {
            const qz_tensor *t = &p.tensor[i];

            if (t->file != f)
                continue;
            for (uint64_t b = t->offset; b < t->offset + t->bytes; b++)
                assert_int_equal(seen[b]++, 0);
            int32_t *known = &file_of[t->layer + 1];

            assert_true(*known < 0 || *known == f);
            *known = f;
        }
        assert_null(memchr(seen, 0, p.file[f].bytes));
        hx_free(seen);
    }
    assert_int_equal(bytes, 0); /* all that was announced, and no more */
    qz_plan_close(&p);
    hx_model_close(m);
}

static void plan_without_memory(void **state)
{
    const qz_plan_opt o = options(4);
    hx_model *m;
    int rc = HX_ENOMEM;

    (void)state;
    assert_int_equal(hx_model_open_mapped(&m, TINY, NULL), 0);
    const int64_t before = hx_test_live_allocs();

    for (int64_t k = 1; rc == HX_ENOMEM; k++) {
        hx_err err = { 0 };
        qz_plan p;

        hx_test_fail_at(k);
        if ((rc = qz_plan_open(&p, m, &o, &err)) == 0) {
            if ((rc = qz_plan_rates(&p, &err)) == 0)
                rc = qz_plan_layout(&p, &err);
            qz_plan_close(&p);
        }
        hx_test_fail_at(0);
        assert_true(rc == 0 || err.msg[0] != '\0');
        assert_int_equal(hx_test_live_allocs(), before);
    }
    assert_int_equal(rc, 0);
    hx_model_close(m);
}

/* Tensors of layers and experts that config.json does not have. */
static void more_than_config_says(void **state)
{
    const qz_plan_opt o = options(4);
    hx_model *m;
    hx_err err;
    qz_plan p;

    (void)state;
    assert_int_equal(hx_model_open_mapped(&m, TINY, NULL), 0);
    m->desc.n_expert--;
    assert_int_equal(qz_plan_open(&p, m, &o, &err), HX_EFORMAT);
    assert_non_null(strstr(err.msg, "no such expert"));
    m->desc.n_expert++;
    m->desc.n_layer -= 3;
    assert_int_equal(qz_plan_open(&p, m, &o, &err), 0);
    assert_int_equal(qz_plan_rates(&p, &err), 0);
    for (int64_t i = 0; i < p.n_unit; i++)
        assert_in_range(p.unit[i].k2, 2, 16);
    m->desc.n_layer += 3;
    qz_plan_close(&p);
    hx_model_close(m);
}

/* ---- Hessians ------------------------------------------------------------- */

/* The shrinkage by its definition, row by row in double, for few and for many rows. */
static void shrinkage(void **state)
{
    enum { K = 128, REAL = 20 };
    static const int rows[] = { 1, 5, 40, 4000 };
    static float x[4000][REAL], got[K * K];
    double before = 1;

    (void)state;
    for (int r = 0; r < 4000; r++)
        for (int i = 0; i < REAL; i++) /* correlated, with uneven channels */
            x[r][i] = (float)((1 + i % 4) * hx_rng_normal(1, (uint64_t)(r * 32 + i)) +
                              2 * hx_rng_normal(2, (uint64_t)r));
    for (size_t c = 0; c < HX_LEN(rows); c++) {
        const int n = rows[c];
        gram g = { .k = REAL, .k_pad = K, .rows = n };
        double s[REAL][REAL] = { { 0 } }, mu = 0, b2 = 0, d2 = 0;

        memset(got, 0, sizeof got);
        for (int r = 0; r < n; r++) {
            double norm = 0;

            for (int i = 0; i < REAL; i++)
                norm += (double)x[r][i] * x[r][i];
            g.fourth += norm * norm;
            for (int i = 0; i < REAL; i++)
                for (int j = 0; j < REAL; j++) {
                    s[i][j] += (double)x[r][i] * x[r][j] / n;
                    if (j >= i)
                        got[i * K + j] += x[r][i] * x[r][j];
                }
        }
        for (int i = 0; i < REAL; i++)
            mu += s[i][i] / REAL;
        for (int i = 0; i < REAL; i++)
            for (int j = 0; j < REAL; j++)
                d2 += (s[i][j] - mu * (i == j)) * (s[i][j] - mu * (i == j));
        for (int r = 0; r < n; r++)
            for (int i = 0; i < REAL; i++)
                for (int j = 0; j < REAL; j++) {
                    const double e = (double)x[r][i] * x[r][j] - s[i][j];

                    b2 += e * e / n / n;
                }
        const double part = n == 1 ? 0 : fmin(b2 / d2, 1);

        shrink(&g, got);
        for (int i = 0; i < K; i++)
            for (int j = 0; j < K; j++) {
                const double want = i >= REAL || j >= REAL
                                        ? 0
                                        : (1 - part) * s[i][j] + part * mu * (i == j);

                assert_true(fabs((double)got[i * K + j] - want) < 2e-3 * mu);
            }
        if (n > 1)
            assert_true(part < before && part > 0);
        if (n > 1)
            before = part;
    }
    assert_true(before < 0.02); /* many rows speak for themselves */
}

/* ---- files ----------------------------------------------------------------- */

static void calibration_files(void **state)
{
    hx_err err;
    qz_text t;

    (void)state;
    put_file("rows.json", "[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"
                          "[16,15,14,13,12,11,10,9,8,7,6,5,4,3,2,1]]");
    assert_int_equal(qz_text_read(&t, path_of("rows.json"), TINY, 10, 2048, 64, &err), 0);
    assert_true(t.n_row == 2 && t.cols == 16 && t.id[0] == 1 && t.id[31] == 1);
    qz_text_free(&t);
    assert_int_equal(qz_text_read(&t, path_of("rows.json"), TINY, 1, 2048, 64, &err), 0);
    assert_true(t.n_row == 1 && t.n_id == 16);
    qz_text_free(&t);
    assert_int_equal(qz_text_read(&t, path_of("rows.json"), TINY, 10, 2048, 16, &err),
                     HX_EFORMAT);
    assert_non_null(strstr(err.msg, "id 16, expected 0..15"));
    put_file("uneven.json", "[[1,2,3],[1],[2]]");
    assert_int_equal(qz_text_read(&t, path_of("uneven.json"), TINY, 10, 2048, 64, &err),
                     HX_EFORMAT);
    put_file("longer.json", "[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"
                            "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18]]");
    assert_int_equal(qz_text_read(&t, path_of("longer.json"), TINY, 10, 2048, 64, &err),
                     HX_EFORMAT);
    assert_non_null(strstr(err.msg, "row 1 has 18 ids, expected 16"));
    put_file("short.txt", "too short");
    assert_int_equal(
        qz_text_read(&t, path_of("short.txt"), "models/demo-exl3", 10, 2048, 4096, &err),
        HX_EFORMAT);
    assert_non_null(strstr(err.msg, "fewer than 16 tokens"));
    assert_int_equal(qz_text_read(&t, path_of("none"), TINY, 10, 2048, 64, &err), HX_EIO);
    put_file("long.txt", "In the beginning God created the heaven and the earth. And the "
                         "earth was without form, and void; and darkness was upon it.");
    assert_int_equal(
        qz_text_read(&t, path_of("long.txt"), "models/demo-exl3", 10, 18, 4096, &err), 0);
    assert_true(t.n_row >= 1 && t.cols == 18 && t.id[0] == 925);
    qz_text_free(&t);
}

/* The file that weighing leaves for a while is as large as the disk was asked for. */
static void room_to_weigh(void **state)
{
    const hx_dev_opt opt = { .name = "cpu", .n_threads = 1 };
    variants v = { .rows = 2 };
    hx_model *m;
    qz_calib *c;
    qz_text t;
    struct stat st;
    hx_err err;

    (void)state;
    put_file("rows.json", "[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"
                          "[16,15,14,13,12,11,10,9,8,7,6,5,4,3,2,1]]");
    assert_int_equal(hx_model_open_mapped(&m, TINY, &err), 0);
    assert_int_equal(
        qz_text_read(&t, path_of("rows.json"), TINY, 10, 16, m->desc.n_vocab, &err), 0);
    if (qz_calib_open(&c, m, &t, folder, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    float *clean = hx_new(float, OUT_ROWS * m->desc.n_vocab);

    v.fd = open(path_of("variants"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(run_variants(c, &v, clean, &err), 0);
    assert_int_equal(fstat(v.fd, &st), 0);
    assert_int_equal(st.st_size, qz_calib_weigh_bytes(m, &t, 2));
    close(v.fd);
    hx_free(clean);
    qz_calib_close(c);
    qz_text_free(&t);
    hx_model_close(m);
}

static void journal(void **state)
{
    char out[128], *text;
    hx_err err;
    qz_out o;
    int fd;

    (void)state;
    snprintf(out, sizeof out, "%s/out", folder);
    assert_int_equal(qz_out_open(&o, out, "settings 1\n", false, &text, &err), 0);
    assert_null(text);
    assert_int_equal(qz_out_note(&o, &err, "unit %d", 7), 0);
    qz_out_close(&o);
    /* Killed while it wrote a line. */
    fd = open(path_of("out/.quantize/journal"), O_WRONLY | O_APPEND);
    assert_int_equal(write(fd, "unit 8", 6), 6);
    close(fd);
    assert_int_equal(qz_out_open(&o, out, "settings 1\n", false, &text, &err), HX_EARG);
    assert_non_null(strstr(err.msg, "--resume"));
    assert_int_equal(qz_out_open(&o, out, "settings 2\n", true, &text, &err), HX_EARG);
    assert_non_null(strstr(err.msg, "other settings"));
    assert_int_equal(qz_out_open(&o, out, "settings 1\n", true, &text, &err), 0);
    assert_string_equal(text, "settings 1\nunit 7\n");
    hx_free(text);
    assert_int_equal(qz_out_note(&o, &err, "unit 9"), 0);
    qz_out_close(&o);
    assert_int_equal(qz_out_open(&o, out, "settings 1\n", true, &text, &err), 0);
    assert_string_equal(text, "settings 1\nunit 7\nunit 9\n");
    hx_free(text);
    qz_out_close(&o);
    snprintf(out, sizeof out, "%s", folder);
    assert_int_equal(qz_out_open(&o, out, "settings 1\n", false, &text, &err), HX_EARG);
    assert_non_null(strstr(err.msg, "not empty"));
}

static int set_up(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/hoist-quantize-XXXXXX");
    return mkdtemp(folder) == NULL;
}

static int tear_down(void **state)
{
    char command[128];

    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_meet_the_budget),
        cmocka_unit_test(rates_follow_weights),
        cmocka_unit_test(layout),
        cmocka_unit_test(plan_without_memory),
        cmocka_unit_test(more_than_config_says),
        cmocka_unit_test(shrinkage),
        cmocka_unit_test(calibration_files),
        cmocka_unit_test(room_to_weigh),
        cmocka_unit_test(journal),
    };

    return cmocka_run_group_tests_name("quantize", tests, set_up, tear_down);
}
