/* ops_args_test.c - what hx_op_* refuses, and how devices open. The operations' results
 * are ops_test.c's. */
#include "dev/ops.c"

#include "dev/ops_case.h"

static hx_dev *device;

/* ---- arguments ------------------------------------------------------- */

/* Every buffer of every operation one byte too short, and every output missing. */
static void test_short_buffers(void **state)
{
    (void)state;
    for (const op_row *op = op_rows; op < op_rows + HX_LEN(op_rows); op++) {
        trial *t = new_trial(op, op->vectors, 1, 0);
        hx_err err = { 0 };

        for (tbuf *b = t->buf; b < t->buf + t->n_buf; b++) {
            /* the device's copy of a page table is for devices with memory of their own */
            if (b->size_at == NULL || b->n == 0 || strstr(b->name, ".table") != NULL)
                continue;
            --*b->size_at;
            if (op->call(device, t->args, &err) != HX_EARG ||
                strstr(err.msg, b->name) == NULL)
                fail_msg("%s: %s one byte short: \"%s\"", op->name, b->name, err.msg);
            ++*b->size_at;
            if (b->role == IN) /* some may be left out */
                continue;
            *b->at = NULL;
            if (op->call(device, t->args, &err) != HX_EARG)
                fail_msg("%s: %s missing: \"%s\"", op->name, b->name, err.msg);
            *b->at = b->p;
        }
        assert_int_equal(op->call(NULL, t->args, &err), HX_EARG);
        assert_int_equal(op->call(device, NULL, &err), HX_EARG);
        check_ok(op->name, op->call(device, t->args, &err), &err);
        free_trial(t);
    }
}

/* The first vector's arguments after an edit are refused with a sentence that holds word.
 */
#define REFUSED(op, word, ...)                                                           \
    do {                                                                                 \
        trial *t_ = new_trial(op_named(#op), vectors_##op, 1, 0);                        \
        hx_##op##_args *a = (void *)t_->args;                                            \
        hx_err err_ = { 0 };                                                             \
        __VA_ARGS__;                                                                     \
        const int rc_ = hx_op_##op(device, a, &err_);                                    \
        if (rc_ != HX_EARG || strstr(err_.msg, word) == NULL ||                          \
            strncmp(err_.msg, #op ":", sizeof(#op)) != 0)                                \
            fail_msg("%s: %s: %d \"%s\"", #op, #__VA_ARGS__, rc_, err_.msg);             \
        free_trial(t_);                                                                  \
    } while (0)
#define REFUSED_SPAN(op, word, ...)                                                      \
    REFUSED(op, word, hx_span s[8];                                                      \
            memcpy(s, a->rows.span, (size_t)a->rows.n_span * sizeof(*s));                \
            a->rows.span = s; __VA_ARGS__)
#define REFUSED_MAT(op, field, word, ...)                                                \
    REFUSED(op, word, hx_mat m = *a->field; a->field = &m; __VA_ARGS__)

static void test_refuses_shapes(void **state)
{
    (void)state;
    REFUSED(embed, "id[0] is 5", ((int32_t *)a->id.p)[0] = 5);
    REFUSED(embed, "id[1] is -1", ((int32_t *)a->id.p)[1] = -1);
    REFUSED(embed, "streams", a->streams = 0);
    REFUSED(embed, "table", a->table = NULL);
    REFUSED_MAT(embed, table, "exl3", m.fmt = HX_FMT_EXL3);
    REFUSED(rmsnorm, "dim", a->dim = 0);
    REFUSED(rmsnorm, "apart", a->ldx = 4);
    REFUSED(rmsnorm, "too large", a->rows = INT64_MAX / 2);
    REFUSED(rmsnorm, "negative", a->rows = -1);
    REFUSED(rmsnorm, "eps", a->eps = -1);
    REFUSED(rmsnorm, "aligned", a->x.p = (char *)a->x.p + 1);
    REFUSED(layernorm, "eps", a->eps = NAN);
    REFUSED(matmul, "missing", a->w = NULL);
    REFUSED(matmul, "apart", a->ldy = 2);
    REFUSED_MAT(matmul, w, "unknown", m.fmt = HX_N_FMT);
    REFUSED_MAT(matmul, w, "scales", m.fmt = HX_FMT_FP8);
    REFUSED_MAT(matmul, w, "suh", m.fmt = HX_FMT_EXL3);
    REFUSED_MAT(matmul, w, "[0, 6]", m.n = 0);
    REFUSED_MAT(matmul, w, "[3, 4611686018427387904]", m.k = (int64_t)1 << 62);
    REFUSED(head_matmul, "fit", a->heads = 3);
    REFUSED(head_matmul, "first", a->first = 9);
    REFUSED(head_matmul, "stride", a->stride = 0);
    REFUSED(swiglu, "limit", a->limit = -1);
    REFUSED(swiglu, "large", a->dim = INT64_MAX);
    REFUSED(hc_mix, "streams", a->streams_n = 9);
    REFUSED(hc_mix, "iters", a->iters = 0);
    REFUSED(hc_mix, "fn", a->fn = NULL);
    REFUSED_MAT(hc_mix, fn, "expected [24, 12]", m.n = 23);
    REFUSED(hc_merge, "streams", a->streams_n = 0);
    REFUSED(kda_gate, "bound", a->bound = 0);
    REFUSED(kda_out, "width", a->width = 0);
    REFUSED(router, "active", a->active = 7);
    REFUSED(moe, "id[0] is 3", ((int32_t *)a->id.p)[0] = 3);
    REFUSED(moe, "active", a->active = 4);
    REFUSED(moe, "end of experts", a->end = 2);
    REFUSED(moe, "first expert", a->prefill = true, a->end = 2, a->first = 3);
    REFUSED(moe, "expected [4, 3]", ((hx_expert *)(uintptr_t)a->expert)[2].down.n = 5);
    REFUSED(combine, "dim", a->dim = 0);
    REFUSED(sample, "n_token", a->n_token = 13);
    REFUSED(sample, "temperature", hx_sample_row s[3] = { { .temperature = -1 } };
            a->row = s);
    REFUSED(sample, "n_top", hx_sample_row s[3] = { { .n_top = 21 } }; a->row = s);
    REFUSED(sample, "ban[0] is 12",
            hx_sample_row s[3] = { { .n_ban = 1, .ban = (const int32_t[]) { 12 } } };
            a->row = s);
    REFUSED(
        sample, "bias",
        hx_sample_row s[3] = { { .n_bias = 1, .bias = (const hx_bias[]) { { -1, 0 } } } };
        a->row = s);
}

static void test_refuses_spans(void **state)
{
    (void)state;
    REFUSED(conv_short, "taps", a->taps = 9);
    REFUSED_SPAN(conv_short, "9 rows", s[1].n_row = 9);
    REFUSED_SPAN(conv_short, "pending rows to fold at position 0", s[1].commit = 1);
    REFUSED_SPAN(conv_short, "share slot 2", s[1].slot = 2);
    REFUSED_SPAN(conv_short, "slot -1", s[0].slot = -1);
    REFUSED_SPAN(conv_short, "state", s[0].slot = 3);
    REFUSED_SPAN(conv_short, "state", s[0].slot = INT32_MAX);
    REFUSED_SPAN(kda_step, "rows from 2 on", s[1].row0 = 2);
    REFUSED_SPAN(kda_step, "9 pending", s[0].commit = 9);
    REFUSED_SPAN(kda_step, "pending rows to fold", s[0].commit = -1);
    REFUSED_SPAN(kda_step, "position -1", s[0].pos0 = -1);
    REFUSED(kda_step, "rows from", a->rows.n_row = 3);
    REFUSED(kda_step, "spans", a->rows.span = NULL);
    REFUSED(kda_step, "apart", a->ld = 7);
    REFUSED(kda_chunk, "width", a->width = 0);
    REFUSED_SPAN(kda_chunk, "position", s[0].pos0 = INT32_MAX - 5);
    REFUSED_SPAN(latent_append, "no page", s[0].pos0 = 191);
    REFUSED_SPAN(latent_append, "no page", s[1].pos0 = 64);
    REFUSED(latent_append, "table", a->cache.table = NULL);
    REFUSED(latent_append, "format", a->cache.fmt = (hx_cache_fmt)3);
    REFUSED(index_append, "fp8", a->pool.fmt = HX_CACHE_FP8);
    REFUSED(index_score, "fp8", a->pool.fmt = HX_CACHE_FP8);
    REFUSED(latent_append, "entry 3 of 3", a->cache.n_page = 3;
            memset((void *)(uintptr_t)a->cache.table, 3, 1));
    REFUSED(index_append, "pool", a->pool_n = 3);
    REFUSED(index_append, "pool", a->pool_n = 16);
    REFUSED_SPAN(index_append, "no page", s[0].pos0 = 190);
    REFUSED(index_score, "apart", a->ld_score = 17);
    REFUSED_SPAN(index_score, "no page", s[1].pos0 = 120);
    REFUSED(topk, "k is 0", a->k = 0);
    REFUSED(mla_attend, "heads", a->heads = 0);
    REFUSED_SPAN(mla_attend, "no page", s[1].pos0 = 64);
}

static void test_refuses_picks(void **state)
{
    static const struct {
        int32_t n, first, last;
        const char *word;
    } at[] = {
        { 4, 0, 1, "picks 4 pools" },
        { -1, 0, 1, "picks -1" },
        { 2, -1, 3, "pools -1 to" },
        { 3, 0, 16, "to 16 of 16 visible" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(at); i++) {
        trial *t = new_trial(op_named("mla_attend"), &vectors_mla_attend[1], 1, 0);
        int32_t *pick = data_of(t, "pick");
        hx_err err = { 0 };

        *(int32_t *)data_of(t, "n_pick") = at[i].n;
        pick[0] = at[i].first;
        pick[HX_MIN(HX_MAX(at[i].n, 1), 3) - 1] = at[i].last;
        pick[0] = at[i].first;
        assert_int_equal(t->op->call(device, t->args, &err), HX_EARG);
        if (strstr(err.msg, at[i].word) == NULL)
            fail_msg("%s", err.msg);
        free_trial(t);
    }
}

/* ---- devices --------------------------------------------------------- */

static void test_open(void **state)
{
    static const struct {
        const char *name, *isa, *word;
    } at[] = {
        { "tpu", NULL, "cpu, ref" },
        { "cpu", "sse9", "sse9" },
        { "ref", "avx2", "double" },
        { "cpu", "", "unknown" },
    };
    hx_dev *d = (hx_dev *)&at;
    hx_err err = { 0 };
    hx_dev_ops holes = hx_ref_ops;

    (void)state;
    for (size_t i = 0; i < HX_LEN(at); i++) {
        const hx_dev_opt opt = {
            .name = at[i].name, .isa = at[i].isa, .n_threads = 1, .limits = test_limits
        };

        assert_int_equal(hx_dev_open(&d, &opt, &err), HX_EARG);
        assert_null(d);
        if (strstr(err.msg, at[i].word) == NULL)
            fail_msg("%s", err.msg);
    }
    assert_null(lacking(&hx_ref_ops));
    assert_null(lacking(&hx_cpu_ops));
    holes.topk = NULL;
    assert_string_equal(lacking(&holes), "topk");
    for (int i = 0; i < HX_N_ISA; i++) {
        const hx_dev_opt opt = { .isa = isa_names[i],
                                 .n_threads = 1,
                                 .limits = test_limits };
        const int rc = hx_dev_open(&d, &opt, &err);

        assert_int_equal(rc, hx_cpu_has((hx_isa)i) ? 0 : HX_EARG);
        if (rc == 0) {
            assert_string_equal(d->isa, isa_names[i]);
            assert_non_null(strstr(d->text, "1 thread)"));
        } else {
            assert_non_null(strstr(err.msg, "lacks"));
        }
        hx_dev_close(d);
    }
    hx_dev_close(NULL);
}

static void test_memory(void **state)
{
    static const size_t sizes[] = { 0, 1, 4096, (size_t)3 << 20 };
    hx_dev *d = device;
    hx_err err = { 0 };
    hx_buf b;

    (void)state;
    for (size_t i = 0; i < HX_LEN(sizes); i++) {
        const int64_t live = hx_test_live_allocs();

        assert_int_equal(hx_dev_alloc(d, &b, sizes[i], &err), 0);
        assert_int_equal(b.n, sizes[i]);
        for (size_t k = 0; k < b.n; k++)
            assert_int_equal(((char *)b.p)[k], 0);
        hx_dev_free(d, &b);
        assert_null(b.p);
        hx_dev_free(d, &b);
        assert_int_equal(hx_test_live_allocs(), live);
        if (sizes[i] == 0)
            continue;
        hx_test_fail_at(1);
        assert_int_equal(hx_dev_alloc(d, &b, sizes[i], &err), HX_ENOMEM);
        hx_test_fail_at(0);
        assert_null(b.p);
    }
}

/* Opening with the k-th allocation failing: an error each time, and nothing stays. */
static void test_open_out_of_memory(void **state)
{
    static const char *const names[] = { "ref", "cpu" };

    (void)state;
    for (size_t i = 0; i < HX_LEN(names); i++) {
        const hx_dev_opt opt = { .name = names[i],
                                 .n_threads = 2,
                                 .limits = test_limits };
        const int64_t live = hx_test_live_allocs();
        int rc = -1;

        for (int k = 1; k < 100 && rc != 0; k++) {
            hx_err err = { 0 };
            hx_dev *d;

            hx_test_fail_at(k);
            rc = hx_dev_open(&d, &opt, &err);
            hx_test_fail_at(0);
            assert_true(rc == 0 || (rc == HX_ENOMEM && d == NULL && err.msg[0] != 0));
            hx_dev_close(d);
            assert_int_equal(hx_test_live_allocs(), live);
        }
        assert_int_equal(rc, 0);
    }
}

static int open_device(void **state)
{
    const hx_dev_opt opt = { .name = "ref", .n_threads = 1, .limits = test_limits };
    hx_err err;

    (void)state;
    return hx_dev_open(&device, &opt, &err);
}

static int close_device(void **state)
{
    (void)state;
    hx_dev_close(device);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_buffers),
        cmocka_unit_test(test_refuses_shapes),
        cmocka_unit_test(test_refuses_spans),
        cmocka_unit_test(test_refuses_picks),
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_open_out_of_memory),
    };

    return cmocka_run_group_tests_name("ops_args", tests, open_device, close_device);
}
