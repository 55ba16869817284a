/* tools.c - inspect and bench. inspect and bench ops open the box (model, dev); the other
 * benches use hoist.h only. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

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
    printf("large matrices:");
    for (int f = 0; f < HX_N_FMT; f++)
        for (int k2 = 0; k2 <= 16; k2++)
            if (count[f][k2] > 0 && k2 > 0)
                printf(" %lld %s at %g bits,", (long long)count[f][k2],
                       hx_fmt_name((hx_fmt)f), k2 / 2.0);
            else if (count[f][k2] > 0)
                printf(" %lld %s,", (long long)count[f][k2], hx_fmt_name((hx_fmt)f));
    printf("\b \n");
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

/* Opening has checked every structural rule; this reads every byte. */
static int verify(const hx_weights *w, hx_err *err)
{
    for (int64_t i = 0; i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        const uint64_t bad = count_bad(t);

        if (bad != 0)
            return hx_fail(err, HX_EFORMAT,
                           "%s: %.120s: %llu numbers are not finite; the file is damaged",
                           hx_weights_file(w, t), t->name, (unsigned long long)bad);
    }
    printf("verified: structure of all tensors, all plain numbers finite\n");
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
    printf("trained context: %lld tokens; per token of context %.1f KB (bf16), per "
           "sequence %.1f MB\n",
           (long long)d->ctx_trained,
           (double)hx_cache_page_bytes(d, HX_CACHE_BF16) / HX_PAGE / 1e3,
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
            rc = verify(m->weights, &err);
    }
    hx_model_close(m);
    return rc != 0 ? cli_fail(&err) : 0;
}

/* ---- figures ------------------------------------------------------------ */

/* Collects figures as lines for people and members of one JSON object. */
typedef struct {
    hx_sb json;
} report;

static void figure(report *r, const char *name, double v, const char *unit)
{
    printf("%-44s %12.4g %s\n", name, v, unit);
    hx_sb_str(&r->json, r->json.n == 0 ? "{" : ",");
    hx_json_put_str(&r->json, hx_str_c(name));
    hx_sb_printf(&r->json, ":{\"value\":%.6g,\"unit\":\"%s\"}", v, unit);
}

static int write_report(report *r, const char *path)
{
    FILE *f;
    int rc = 0;

    hx_sb_str(&r->json, r->json.n == 0 ? "{}\n" : "}\n");
    if (path != NULL &&
        ((f = fopen(path, "w")) == NULL ||
         fwrite(r->json.p, 1, r->json.n, f) != r->json.n || fclose(f) != 0)) {
        fprintf(stderr, "hoist: %s: %s\n", path, strerror(errno));
        rc = 1;
    }
    hx_sb_free(&r->json);
    return rc;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 != 0 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* ---- bench decode, prefill ---------------------------------------------- */

/* Seeded ids that are plain text tokens: an endless supply of fresh prompts. */
static void random_ids(const hx_info *info, uint64_t seed, int32_t *ids, int64_t n)
{
    const uint64_t top = (uint64_t)HX_MAX(info->n_token * 9 / 10, 1);

    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)(hx_rng_at(seed, (uint64_t)i) % top);
}

/* Runs streams requests of n_prompt random ids and n_new tokens to their end. Times in
 * seconds: to the last first token, and from there to the last token. */
static int run_streams(hx_engine *e, const hx_info *info, uint64_t seed, int streams,
                       int64_t n_prompt, int64_t n_new, double *first_s, double *rest_s,
                       hx_err *err)
{
    int32_t *ids = hx_new(int32_t, n_prompt);
    hx_stream *s[64] = { 0 };
    int64_t start = hx_now_us(), first = 0, last = 0;
    int rc = ids == NULL ? hx_fail(err, HX_ENOMEM, "bench: no memory") : 0;

    for (int i = 0; rc == 0 && i < streams; i++) {
        const hx_request r = { .tokens = ids,
                               .n_tokens = n_prompt,
                               .max_new = n_new,
                               .ignore_eos = true,
                               .temperature = 1,
                               .seed = seed + (uint64_t)i };

        random_ids(info, seed * 64 + (uint64_t)i, ids, n_prompt);
        rc = hx_submit(e, &r, &s[i], err);
    }
    for (int i = 0; i < streams && s[i] != NULL; i++) {
        hx_event ev = { 0 };

        while (rc == 0 && ev.kind != HX_EV_DONE) {
            hx_next(s[i], &ev, -1);
            if (ev.kind == HX_EV_ERROR) {
                *err = ev.err;
                rc = ev.err.code;
            }
        }
        first = HX_MAX(first, ev.times.first_us);
        last = HX_MAX(last, ev.times.done_us);
        hx_stream_free(s[i]);
    }
    *first_s = (double)(first - start) / 1e6;
    *rest_s = (double)(last - first) / 1e6;
    hx_free(ids);
    return rc;
}

#define REPEATS 5

/* Where experts ran in steps of a measured run, beside the least time that their misses
 * need at the measured costs, all lanes busy all the time. */
static void figure_lanes(report *out, const hx_experts *a, const hx_experts *b,
                         const char *what, double seconds)
{
    const double steps = (double)(b->steps - a->steps);
    const struct {
        const char *name;
        double v;
        const char *unit;
    } rows[] = {
        { "cost in GPU memory", b->us[0], "us" },
        { "cost over the link", b->us[1], "us" },
        { "cost on the CPU", b->us[2], "us" },
        { "cost on the CPU, each row more", b->us[3], "us" },
        { "cost of a post", b->us[4], "us" },
        { "distinct experts",
          (double)(b->here + b->link + b->lane - a->here - a->link - a->lane) / steps,
          "a step" },
        { "in GPU memory", (double)(b->here - a->here) / steps, "a step" },
        { "over the link", (double)(b->link - a->link) / steps, "a step" },
        { "on the CPU", (double)(b->lane - a->lane) / steps, "a step" },
        { "GPU waits for the CPU", (double)(b->wait_us - a->wait_us) / steps / 1e3,
          "ms a step" },
        { "CPU on experts", (double)(b->lane_us - a->lane_us) / steps / 1e3,
          "ms a step" },
        { "moved in", (double)(b->pushed - a->pushed) / steps, "a step" },
        { "link, read in place",
          (double)(b->link - a->link) * (double)b->expert_bytes / seconds / 1e9, "GB/s" },
        { "step", seconds / steps * 1e3, "ms" },
        { "step, misses at measured costs",
          ((double)(b->link + b->lane - a->link - a->lane) / steps) /
              (1 / b->us[1] + (b->us[2] > 0 ? 1 / b->us[2] : 0)) / 1e3,
          "ms" },
    };

    for (size_t i = 0; steps > 0 && i < HX_LEN(rows); i++) {
        char name[96];

        snprintf(name, sizeof name, "%s: %s", what, rows[i].name);
        figure(out, name, rows[i].v, rows[i].unit);
    }
}

static int bench_decode(hx_engine *e, const hx_cli *c, report *out, hx_err *err)
{
    static const int streams[] = { 1, 2, 4, 8 };
    const int64_t n_new = c->n != 0 ? c->n : 128;
    const uint64_t seed = c->has_seed ? (uint64_t)c->seed : 1;
    hx_info info;
    int rc;

    hx_get_info(e, &info);
    for (size_t i = 0; i < HX_LEN(streams) && streams[i] <= info.max_streams; i++) {
        double rate[REPEATS], first, rest;
        hx_experts before, after;
        char name[64];

        for (int k = -1; k < REPEATS; k++) { /* the first run warms up */
            hx_get_experts(e, &before);
            if ((rc = run_streams(e, &info, seed + (uint64_t)k, streams[i], 32, n_new,
                                  &first, &rest, err)) != 0)
                return rc;
            if (k >= 0)
                rate[k] = (double)(streams[i] * (n_new - 1)) / rest;
        }
        snprintf(name, sizeof name, "decode, %d stream%s", streams[i],
                 streams[i] > 1 ? "s" : "");
        figure(out, name, median(rate, REPEATS), "tok/s");
        snprintf(name, sizeof name, "decode, %d stream%s, spread", streams[i],
                 streams[i] > 1 ? "s" : "");
        figure(out, name, (rate[REPEATS - 1] - rate[0]) / median(rate, REPEATS) * 100,
               "%");
        hx_get_experts(e, &after);
        snprintf(name, sizeof name, "%d stream%s", streams[i], streams[i] > 1 ? "s" : "");
        if (after.n_slot > 0)
            figure_lanes(out, &before, &after, name, rest);
    }
    return 0;
}

static int bench_prefill(hx_engine *e, const hx_cli *c, report *out, hx_err *err)
{
    static const int64_t lengths[] = { 20, 100, 512, 2048, 8192 };
    const uint64_t seed = c->has_seed ? (uint64_t)c->seed : 1;
    hx_info info;
    int rc;

    hx_get_info(e, &info);
    for (size_t i = 0; i < HX_LEN(lengths) && lengths[i] < info.ctx_tokens; i++) {
        double rate[REPEATS], first, rest;
        char name[64];

        for (int k = -1; k < REPEATS; k++) {
            if ((rc = run_streams(e, &info, seed + 1000 + (uint64_t)k, 1, lengths[i], 1,
                                  &first, &rest, err)) != 0)
                return rc;
            if (k >= 0)
                rate[k] = (double)lengths[i] / first;
        }
        snprintf(name, sizeof name, "prefill, %lld tokens", (long long)lengths[i]);
        figure(out, name, median(rate, REPEATS), "tok/s");
        snprintf(name, sizeof name, "time to first token, %lld tokens",
                 (long long)lengths[i]);
        figure(out, name, (double)lengths[i] / median(rate, REPEATS) * 1e3, "ms");
    }
    return 0;
}

static int bench_engine(const hx_cli *c, report *out)
{
    const bool both = c->what == NULL;
    hx_engine *e;
    hx_err err = { 0 };
    hx_info info;
    const int64_t start = hx_now_us();
    int rc;

    if ((rc = cli_open_engine(&e, c, NULL, NULL)) != 0)
        return rc;
    hx_get_info(e, &info);
    printf("%s on %s\n", info.name, info.device);
    figure(out, "ready after", (double)(hx_now_us() - start) / 1e6, "s");
    if (both || strcmp(c->what, "decode") == 0)
        rc = bench_decode(e, c, out, &err);
    if (rc == 0 && (both || strcmp(c->what, "prefill") == 0))
        rc = bench_prefill(e, c, out, &err);
    figure(out, "resident memory", (double)hx_sys_rss_bytes() / 1e6, "MB");
    figure(out, "weights", (double)info.weight_bytes / 1e6, "MB");
    figure(out, "sequence memory", (double)info.cache_bytes / 1e6, "MB");
    figure(out, "workspace", (double)info.work_bytes / 1e6, "MB");
    hx_close(e);
    return rc != 0 ? cli_fail(&err) : 0;
}

/* ---- bench ops ----------------------------------------------------------- */

static double copy_rate(void)
{
    const size_t n = (size_t)256 << 20;
    char *a = hx_map(n, true), *b = hx_map(n, true);
    double best = 0;

    for (int k = 0; a != NULL && b != NULL && k < 6; k++) {
        const int64_t start = hx_now_us();

        memset(a, k, 4096);
        memcpy(b, a, n);
        best =
            HX_MAX(best, 2.0 * (double)n / (double)HX_MAX(hx_now_us() - start, 1) / 1e3);
    }
    hx_unmap(a, n);
    hx_unmap(b, n);
    return best;
}

/* One-thread matmul over a set of matrices larger than the caches, one shape and rate. */
typedef struct {
    int64_t n, k;
    int32_t k2;
    hx_codebook cb;
    int64_t rows;
} mat_case;

static int time_matmul(hx_dev *d, const mat_case *mc, uint8_t *mem, size_t mem_bytes,
                       double *g_weights, hx_err *err)
{
    const size_t trellis = (size_t)(mc->n * mc->k) / 16 * (size_t)mc->k2;
    const size_t one = trellis + 2 * (size_t)(mc->n + mc->k);
    const int64_t sets = (int64_t)HX_MAX(mem_bytes / one, 1);
    hx_buf x, y;
    double best = 0;
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
        best = HX_MAX(best, (double)(sets * mc->n * mc->k) /
                                (double)(hx_now_us() - start) / 1e3);
    }
    *g_weights = best;
    hx_dev_free(d, &x);
    hx_dev_free(d, &y);
    return rc;
}

static int bench_ops(const hx_cli *c, report *out)
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
        figure(out, "memory copy, one thread", copy_rate(), "GB/s");
    }
    for (size_t i = 0; rc == 0 && i < HX_LEN(rates); i++)
        for (size_t j = 0; rc == 0 && j < HX_LEN(rows); j++) {
            const mat_case mc = { 2048, 4096, rates[i], HX_CB_MUL1, rows[j] };
            double g = 0;
            char name[64];

            if ((rc = time_matmul(d, &mc, mem, rows[j] > 4 ? mem_bytes / 8 : mem_bytes,
                                  &g, &err)) != 0)
                break;
            snprintf(name, sizeof name, "EXL3 K=%g mul1, %lld row%s", rates[i] / 2.0,
                     (long long)rows[j], rows[j] > 1 ? "s" : "");
            figure(out, name, g, "G weights/s");
        }
    hx_dev_close(d);
    hx_unmap(mem, mem_bytes);
    return rc != 0 ? cli_fail(&err) : 0;
}

static void put_figure(void *ud, const char *name, double v, const char *unit)
{
    figure(ud, name, v, unit);
}

int cmd_bench(const hx_cli *c)
{
    report out = { 0 };
    const char *what = c->what != NULL ? c->what : "";
    const int rc = strcmp(what, "ops") == 0     ? bench_ops(c, &out)
                   : strcmp(what, "serve") == 0 ? cli_bench_serve(c, put_figure, &out)
                                                : bench_engine(c, &out);
    const int wrc = write_report(&out, rc == 0 ? c->json : NULL);

    return rc != 0 ? rc : wrc;
}
