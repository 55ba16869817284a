/* tools.c - inspect and bench ops: the commands that open the box (model, dev). */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "cli/bench.h"
#include "cli/cli.h"
#include "model/model.h"

/* ---- inspect ------------------------------------------------------------ */

typedef struct {
    const char *name;
    uint64_t n_param, bytes, tensors;
} component;

/* Which component a tensor belongs to, by its name. */
static const char *component_of(const char *name)
{
    static const struct {
        const char *part, *component;
    } rules[] = {
        { ".visual.", "vision tower" },
        { "mlp.experts.", "routed experts" },
        { "shared_experts.", "shared experts" },
        { ".mlp.gate.", "routers" },
        { ".mlp.", "dense MLPs" },
        { ".indexer.", "indexers" },
        { ".self_attn.", "attention" },
        { ".hc_", "hyper-connections" },
        { "embed_tokens", "embedding" },
        { "lm_head", "output matrix" },
    };

    for (size_t i = 0; i < HX_LEN(rules); i++)
        if (strstr(name, rules[i].part) != NULL)
            return rules[i].component;
    return "norms and the rest";
}

static void print_tensor(const hx_weights *w, const hx_tensor *t)
{
    char bytes[32];

    cli_bytes(bytes, t->bytes);
    printf("%-10s %-9s [", bytes, hx_dtype_name(t->dtype));
    for (int32_t i = 0; i < t->n_dim; i++)
        printf("%s%lld", i > 0 ? ", " : "", (long long)t->dim[i]);
    printf("] %s (%s)\n", t->name, hx_weights_file(w, t));
}

static void print_components(const hx_weights *w)
{
    component c[16] = { 0 };
    size_t n = 0;

    for (int64_t i = 0; i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        const char *name = component_of(t->name);
        size_t at = 0;

        while (at < n && strcmp(c[at].name, name) != 0)
            at++;
        if (at == n)
            c[n++].name = name;
        c[at].bytes += t->bytes;
        c[at].tensors++;
    }
    for (size_t i = 0; i < n; i++) {
        char bytes[32];

        cli_bytes(bytes, c[i].bytes);
        printf("  %-20s %8llu tensors %12s\n", c[i].name,
               (unsigned long long)c[i].tensors, bytes);
    }
}

/* How many matrices are stored in which format and rate. */
static void count_mat(int64_t count[HX_N_FMT][17], const hx_mat *m)
{
    if (m->w != NULL)
        count[m->fmt][m->fmt == HX_FMT_EXL3 ? m->k2 : 0]++;
}

static void print_formats(const hx_model *m)
{
    int64_t count[HX_N_FMT][17] = { 0 };

    count_mat(count, &m->embed);
    count_mat(count, &m->head);
    for (int64_t l = 0; l < m->desc.n_layer; l++) {
        const hx_layer *w = &m->layer[l];
        const hx_mat *all[] = { &w->kda.qkv[0],  &w->kda.qkv[1], &w->kda.qkv[2],
                                &w->kda.o,       &w->mla.q_a,    &w->mla.q_b,
                                &w->mla.kv_a,    &w->mla.kv_b,   &w->mla.o,
                                &w->mla.index_q, &w->dense.gate, &w->dense.up,
                                &w->dense.down };

        for (size_t i = 0; i < HX_LEN(all); i++)
            count_mat(count, all[i]);
        for (int64_t e = 0; w->expert != NULL && e < m->desc.n_expert; e++) {
            count_mat(count, &w->expert[e].gate);
            count_mat(count, &w->expert[e].up);
            count_mat(count, &w->expert[e].down);
        }
    }
    const char *comma = "";

    printf("large matrices:");
    for (int f = 0; f < HX_N_FMT; f++)
        for (int k2 = 0; k2 <= 16; k2++) {
            if (count[f][k2] == 0)
                continue;
            printf("%s %lld %s", comma, (long long)count[f][k2], hx_fmt_name((hx_fmt)f));
            if (k2 > 0)
                printf(" at %g bits", k2 / 2.0);
            comma = ",";
        }
    putchar('\n');
}

/* Numbers in a plain float tensor that are not finite: nothing a model can work with. */
static uint64_t count_bad(const hx_tensor *t)
{
    uint64_t bad = 0;

    for (uint64_t i = 0; t->dtype == HX_DT_F32 && i + 4 <= t->bytes; i += 4) {
        uint32_t v;

        memcpy(&v, t->p + i, 4);
        bad += (v & 0x7f800000u) == 0x7f800000u;
    }
    for (uint64_t i = 0;
         (t->dtype == HX_DT_BF16 || t->dtype == HX_DT_F16) && i + 2 <= t->bytes; i += 2) {
        const uint16_t mask = t->dtype == HX_DT_BF16 ? 0x7f80 : 0x7c00;
        uint16_t v;

        memcpy(&v, t->p + i, 2);
        bad += (v & mask) == mask;
    }
    for (uint64_t i = 0; t->dtype == HX_DT_F8_E4M3 && i < t->bytes; i++)
        bad += (t->p[i] & 0x7f) == 0x7f;
    return bad;
}

static int check_finite(const hx_weights *w, hx_err *err)
{
    for (int64_t i = 0; i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        const uint64_t bad = count_bad(t);

        if (bad != 0)
            return hx_fail(err, HX_EFORMAT,
                           "%s: %.120s: %llu numbers are not finite; the file is damaged",
                           hx_weights_file(w, t), t->name, (unsigned long long)bad);
    }
    return 0;
}

static void print_bad(void *ud, const char *name, const char *why)
{
    int *shown = ud;

    if ((*shown)++ < 20)
        fprintf(stderr, "hoist: %s %s\n", name, why);
}

/* Compares with the checksums beside the checkpoint, or makes them. */
static int verify_sums(const hx_weights *w, const char *dir, hx_err *err)
{
    hx_sums *want = NULL, *have = NULL;
    hx_pool *pool = NULL;
    char path[4096];
    int shown = 0, rc;
    int64_t n;

    snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, dir);
    if ((rc = hx_pool_open(&pool, 0, NULL, err)) != 0 ||
        (rc = hx_sums_make(&have, w, pool, NULL, NULL, err)) != 0)
        goto fail;
    if (!hx_file_exists(path)) {
        hx_err why = { 0 };

        if (hx_sums_write(have, dir, &why) == 0)
            printf("checksums: none were there; made of %lld tensors, in %s\n",
                   (long long)hx_sums_count(have), path);
        else /* a read-only folder is no fault of the checkpoint */
            printf("checksums: none are there and none could be kept: %s\n", why.msg);
        goto fail;
    }
    if ((rc = hx_sums_read(&want, dir, err)) != 0)
        goto fail;
    if ((n = hx_sums_compare(want, have, print_bad, &shown)) != 0)
        rc = hx_fail(
            err, HX_EFORMAT,
            "%s: %lld of %lld tensors differ from " HX_SUMS_FILE
            "; fetch the checkpoint again, or remove that file if it was changed on "
            "purpose",
            dir, (long long)n, (long long)hx_sums_count(want));
    else
        printf("checksums: all %lld tensors are as " HX_SUMS_FILE " says\n",
               (long long)hx_sums_count(want));
fail:
    hx_sums_close(want);
    hx_sums_close(have);
    hx_pool_close(pool);
    return rc;
}

/* Opening has checked what the model uses; this checks and reads everything there is. */
static int verify(hx_weights *w, const hx_cli *c, hx_err *err)
{
    const uint64_t seed = c->has_seed ? (uint64_t)c->seed : (uint64_t)time(NULL);
    hx_verify_report r = { 0 };
    int rc;

    if ((rc = verify_sums(w, c->model, err)) != 0 ||
        (rc = hx_verify_rules(w, &r, err)) != 0 || (rc = check_finite(w, err)) != 0 ||
        (rc = hx_verify_rows(w, 64, seed, &r, err)) != 0)
        return rc;
    printf("rules: %lld EXL3 matrices keep all of them; %lld groups of experts mix "
           "rates; all "
           "plain numbers are finite\n",
           (long long)r.n_exl3, (long long)r.n_mixed);
    if (r.n_row > 0)
        printf("rows: %lld of %lld matrices drawn (--seed %llu) are computed as defined, "
               "error "
               "at most %.1e of a product's size\n",
               (long long)r.n_row, (long long)r.n_drawn, (unsigned long long)seed,
               r.worst);
    printf("verified\n");
    return 0;
}

int cmd_inspect(const hx_cli *c)
{
    hx_err err = { 0 };
    hx_model *m;
    char bytes[32];
    int rc = 0;

    if (hx_model_open(&m, c->model, NULL, NULL, &err) != 0)
        return cli_fail(&err);
    const hx_desc *d = &m->desc;
    cli_bytes(bytes, m->weight_bytes);
    printf("%s: %s, %lld layers, width %lld, vocabulary %lld\n", c->model, d->arch,
           (long long)d->n_layer, (long long)d->width, (long long)d->n_vocab);
    printf("experts: %lld routed (%lld active, width %lld), shared width %lld\n",
           (long long)d->n_expert, (long long)d->n_active, (long long)d->expert_width,
           (long long)d->shared_width);
    printf("trained context: %lld tokens; per token of context %.1f KB (bf16; fp8: "
           "%.1f), per sequence %.1f MB\n",
           (long long)d->ctx_trained,
           (double)hx_cache_page_bytes(d, HX_CACHE_BF16) / HX_PAGE / 1e3,
           (double)hx_cache_page_bytes(d, HX_CACHE_FP8) / HX_PAGE / 1e3,
           (double)hx_cache_slot_bytes(d) / 1e6);
    printf("text model: %.2f M parameters in matrices, %s\n", (double)m->n_param / 1e6,
           bytes);
    print_formats(m);
    if (m->weights != NULL) {
        cli_bytes(bytes, hx_weights_bytes(m->weights));
        printf("checkpoint: %lld tensors, %s\n", (long long)hx_weights_count(m->weights),
               bytes);
        print_components(m->weights);
        for (int64_t i = 0; c->tensors && i < hx_weights_count(m->weights); i++)
            print_tensor(m->weights, hx_weights_at(m->weights, i));
        if (c->verify)
            rc = verify(m->weights, c, &err);
    }
    hx_model_close(m);
    return rc != 0 ? cli_fail(&err) : 0;
}

/* ---- bench ops ----------------------------------------------------------- */

/* One-thread matmul over a set of matrices larger than the caches, one shape and rate. */
typedef struct {
    int64_t n, k;
    int32_t k2;
    hx_codebook cb;
    int64_t rows;
} mat_case;

/* g_weights [4]: G weights/s of each repetition. */
static int time_matmul(hx_dev *d, const mat_case *mc, uint8_t *mem, size_t mem_bytes,
                       double *g_weights, hx_err *err)
{
    const size_t trellis = (size_t)(mc->n * mc->k) / 16 * (size_t)mc->k2;
    const size_t one = trellis + 2 * (size_t)(mc->n + mc->k);
    const int64_t sets = (int64_t)HX_MAX(mem_bytes / one, 1);
    hx_buf x, y;
    int rc;

    if ((rc = hx_dev_alloc(d, &x, (size_t)(mc->rows * mc->k) * 4, err)) != 0 ||
        (rc = hx_dev_alloc(d, &y, (size_t)(mc->rows * mc->n) * 4, err)) != 0)
        return rc;
    for (int64_t i = 0; i < mc->rows * mc->k; i++)
        ((float *)x.p)[i] = (float)hx_rng_normal(1, (uint64_t)i);
    for (int rep = 0; rc == 0 && rep < 4; rep++) {
        const int64_t start = hx_now_us();

        for (int64_t i = 0; rc == 0 && i < sets; i++) {
            const uint8_t *p = mem + (size_t)i * one;
            const hx_mat m = { .fmt = HX_FMT_EXL3,
                               .n = mc->n,
                               .k = mc->k,
                               .n_pad = mc->n,
                               .k_pad = mc->k,
                               .k2 = mc->k2,
                               .codebook = mc->cb,
                               .w = p,
                               .suh = p + trellis,
                               .svh = p + trellis + 2 * mc->k };
            const hx_matmul_args a = {
                .y = y, .x = x, .w = &m, .rows = mc->rows, .ldx = mc->k, .ldy = mc->n
            };

            rc = hx_op_matmul(d, &a, err);
        }
        g_weights[rep] =
            (double)(sets * mc->n * mc->k) / (double)(hx_now_us() - start) / 1e3;
    }
    hx_dev_free(d, &x);
    hx_dev_free(d, &y);
    return rc;
}

int bench_ops(const hx_cli *c, bench_report *out)
{
    static const int32_t rates[] = { 4, 6, 8, 10, 12, 16 };
    static const int64_t rows[] = { 1, 4, 64 };
    const hx_dev_opt opt = { .name = c->device,
                             .isa = c->isa,
                             .cpus = c->cpus,
                             .n_threads = c->threads != 0 ? (int32_t)c->threads : 1,
                             .limits = { .max_rows = 64,
                                         .max_k = 4096,
                                         .max_n = 4096,
                                         .max_active = 1,
                                         .max_expert = 1,
                                         .max_heads = 1,
                                         .max_ctx = 1 } };
    const size_t mem_bytes = (size_t)192 << 20;
    uint8_t *mem = hx_map(mem_bytes, true);
    hx_dev *d = NULL;
    hx_err err = { 0 };
    int rc;

    if (mem == NULL)
        rc = hx_fail(&err, HX_ENOMEM, "bench: no memory");
    else
        rc = hx_dev_open(&d, &opt, &err);
    /* Random trellis bits; scales of a sane size everywhere: 0x2c2c is 0.065 in fp16. */
    for (size_t i = 0; rc == 0 && i < mem_bytes; i += 8) {
        const uint64_t v =
            (hx_rng_at(7, i) & 0x03ff03ff03ff03ffULL) | 0x2c002c002c002c00ULL;

        memcpy(mem + i, &v, 8);
    }
    if (rc == 0) {
        printf("%s; EXL3 matrices of 4096 inputs and 2048 outputs, read from memory\n",
               d->text);
    }
    for (size_t i = 0; rc == 0 && i < HX_LEN(rates); i++)
        for (size_t j = 0; rc == 0 && j < HX_LEN(rows); j++) {
            const mat_case mc = { 2048, 4096, rates[i], HX_CB_MUL1, rows[j] };
            double g[4] = { 0 };
            char name[64];

            if ((rc = time_matmul(d, &mc, mem, rows[j] > 4 ? mem_bytes / 8 : mem_bytes, g,
                                  &err)) != 0)
                break;
            snprintf(name, sizeof name, "EXL3 K=%g mul1, %lld row%s", rates[i] / 2.0,
                     (long long)rows[j], rows[j] > 1 ? "s" : "");
            bench_figure(out, name, "G weights/s", g, 4);
        }
    hx_dev_close(d);
    hx_unmap(mem, mem_bytes);
    return rc != 0 ? cli_fail(&err) : 0;
}
