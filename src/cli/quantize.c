/* quantize.c - the command quantize: BF16, F16, F32 or FP8 safetensors to EXL3. Checks,
 * resume, the order of things, progress; the parts are in quantize_*.c. Opens the box
 * (model, dev). The output depends on source, settings and calibration alone, not on the
 * machine, the threads, or how often it was killed and resumed. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cli/quantize.h"
#include "dev/exl3_encode.h"

#define WEIGH_TOKENS 2048 /* of the calibration, for the allocation of bits */
#define SHARD_BYTES  ((uint64_t)8192 << 20)

/* How well a unit came out; kept in the journal. */
typedef struct {
    double proxy, mse;
} score;

typedef struct {
    const hx_cli *c;
    hx_model *model;
    qz_plan plan;
    qz_out out;
    qz_text text;
    qz_calib *calib; /* NULL: none */
    hx_dev *dev;     /* its own, or ours */
    hx_pool *pool;
    score *score;       /* [n_unit] */
    int64_t pass;       /* last one done, or -1 */
    int64_t n_resumed;  /* units done by earlier runs; -1: there was none */
    bool copied;        /* plain tensors are in place */
    float *hessian;     /* of layer and input below */
    int64_t hess_layer; /* … */
    int32_t hess;
    int64_t start_us, shown_us;
    double weights, done, done_before; /* all, done, and done by earlier runs */
    bool person;
} job;

/* ---- settings -------------------------------------------------------------- */

static uint64_t mix(uint64_t h, const void *p, size_t n)
{
    for (const uint8_t *b = p; n > 0; n--)
        h = (h ^ *b++) * 0x100000001b3u; /* FNV-1a */
    return h;
}

#define MIX_START 0xcbf29ce484222325u

static const char *device_of(const job *j)
{
    return j->c->device != NULL ? j->c->device : hx_dev_default();
}

/* One line that is equal exactly where the output would be. A GPU encodes with the same
 * bits as the host, but what calibration sees there differs in the last digits. */
static void describe(const job *j, char line[512])
{
    const qz_plan_opt *o = &j->plan.opt;
    const hx_weights *w = j->model->weights;
    uint64_t source = MIX_START, text = MIX_START;

    for (int64_t i = 0; i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);

        source = mix(source, t->name, strlen(t->name));
        source = mix(source, &t->bytes, sizeof t->bytes);
        source = mix(source, t->p, HX_MIN(t->bytes, 64));
    }
    text = mix(text, j->text.id, (size_t)j->text.n_id * sizeof *j->text.id);
    snprintf(
        line, 512,
        "quantize 1 bits %g head %g codebook %d half-rates %d calibration %016" PRIx64
        " %" PRId64 " x %" PRId64 "%s source %016" PRIx64 "\n",
        o->bits, o->head_k2 / 2.0, (int)o->codebook, o->half_rates, text, j->text.n_row,
        j->text.cols,
        j->text.n_row > 0 && strncmp(device_of(j), "cuda", 4) == 0 ? " on a GPU" : "",
        source);
}

static int read_options(const hx_cli *c, qz_plan_opt *o, hx_err *err)
{
    const char *wanted = c->codebook != NULL ? c->codebook : "mul1";

    *o = (qz_plan_opt) { .bits = c->bits,
                         .head_k2 = (int32_t)lrint(2 * c->head_bits),
                         .codebook = HX_N_CB,
                         .half_rates = c->half_rates,
                         .shard_bytes = SHARD_BYTES };
    if (c->bits == 0)
        return hx_fail(err, HX_EARG, "quantize needs --bits, the average per weight");
    for (hx_codebook cb = 0; cb < HX_N_CB; cb++)
        if (strcmp(wanted, qz_codebook_name(cb)) == 0)
            o->codebook = cb;
    if (o->codebook == HX_N_CB)
        return hx_fail(err, HX_EARG, "--codebook %.40s: there are mul1, mcg and 3inst",
                       wanted);
    if (c->half_rates && o->codebook != HX_CB_MUL1)
        return hx_fail(err, HX_EARG, "--half-rates: only codebook mul1 has them");
    if (o->head_k2 != 2 * c->head_bits || !hx_trellis_takes(o->codebook, o->head_k2))
        return hx_fail(err, HX_EARG, "--head-bits %g: codebook %s has no such rate",
                       c->head_bits, wanted);
    if (c->calib == NULL)
        return hx_fail(
            err, HX_EARG,
            "quantize needs --calib FILE, a text like what the model will "
            "read and write (2 MB of it fill 250 rows of 2048 tokens, and 200 "
            "KB do much of the work); --calib none does without, at some loss");
    return 0;
}

/* ---- resume ------------------------------------------------------------------ */

/* Lines of the journal: "copied", "pass LAYER", "unit INDEX PROXY MSE". */
static int read_lines(job *j, char *text, hx_err *err)
{
    char *line = text != NULL ? strchr(text, '\n') : NULL;

    for (line = line != NULL ? line + 1 : NULL; line != NULL && *line != '\0';) {
        char *end = strchr(line, '\n');
        long long i;
        double proxy, mse;

        *end = '\0';
        if (strcmp(line, "copied") == 0) {
            j->copied = true;
        } else if (sscanf(line, "pass %lld", &i) == 1) {
            j->pass = i;
        } else if (sscanf(line, "unit %lld %lf %lf", &i, &proxy, &mse) == 3 && i >= 0 &&
                   i < j->plan.n_unit) {
            j->plan.unit[i].done = true;
            j->score[i] = (score) { proxy, mse };
        } else {
            return hx_fail(err, HX_EFORMAT, "%s: journal: \"%.60s\" means nothing here",
                           j->out.dir, line);
        }
        line = end + 1;
    }
    for (int64_t i = 0; i < j->plan.n_unit; i++) {
        const double n = (double)j->plan.unit[i].n * (double)j->plan.unit[i].k;

        j->weights += n;
        if (j->plan.unit[i].done)
            j->done += n;
        j->n_resumed += text != NULL && j->plan.unit[i].done;
    }
    j->n_resumed += text != NULL;
    j->done_before = j->done;
    return 0;
}

static int64_t weigh_rows(const job *j)
{
    return HX_MAX(WEIGH_TOKENS / j->text.cols, 1);
}

/* What errors in the classes of each layer do to the answers: measured once, then read
 * back, so that a resumed conversion has the same rates. */
static int weigh(job *j, hx_err *err)
{
    const size_t n = (size_t)(j->model->desc.n_layer + 1) * sizeof *j->plan.weight;
    char path[2200], *raw;
    size_t got;
    int rc;

    if (j->calib == NULL)
        return 0;
    snprintf(path, sizeof path, "%s/weights", j->out.work);
    if (hx_file_exists(path)) {
        if ((rc = hx_file_read(path, n, &raw, &got, err)) != 0)
            return rc;
        if (got == n)
            memcpy(j->plan.weight, raw, n);
        hx_free(raw);
        return got == n ? 0 : hx_fail(err, HX_EFORMAT, "%s: has another size", path);
    }
    rc = qz_calib_weigh(j->calib, j->plan.weight, weigh_rows(j), err);
    return rc != 0 ? rc : qz_write_file(path, j->plan.weight, n, err);
}

/* Before anything large is written or long measured: the rates that equal weights give are
 * near enough. What weighing writes is gone when the output begins. */
static int check_disk(const job *j, hx_err *err)
{
    uint64_t need = qz_plan_bytes(&j->plan);
    struct statvfs fs;
    char a[32], b[32];

    if (j->text.n_row > 0)
        need = HX_MAX(need + qz_calib_bytes(j->model, &j->text),
                      qz_calib_weigh_bytes(j->model, &j->text, weigh_rows(j)));
    if (statvfs(j->out.dir, &fs) != 0)
        return hx_fail(err, HX_EIO, "%s: %s", j->out.dir, strerror(errno));
    const uint64_t have = (uint64_t)fs.f_bavail * fs.f_frsize;

    cli_bytes(a, need);
    cli_bytes(b, have);
    return need <= have ? 0
                        : hx_fail(err, HX_EIO,
                                  "%s: the conversion needs %s there, only %s are free",
                                  j->out.dir, a, b);
}

/* ---- progress ------------------------------------------------------------------ */

static void show(job *j, const char *what, bool always)
{
    const int64_t now = hx_now_us();
    const double s = (double)(now - j->start_us) / 1e6,
                 rate = (j->done - j->done_before) / HX_MAX(s, 1e-3),
                 left = rate > 0 ? (j->weights - j->done) / rate : 0;

    if (!always && now - j->shown_us < (j->person ? 200000 : 30000000))
        return;
    j->shown_us = now;
    fprintf(stderr, "%s%-34.34s %5.1f %%  %8.3f M weights/s  %d:%02d:%02d left%s",
            j->person ? "\r" : "", what, 100 * j->done / HX_MAX(j->weights, 1),
            rate / 1e6, (int)(left / 3600), (int)(left / 60) % 60, (int)left % 60,
            j->person ? " " : "\n");
}

static hx_pool *pool_of(const job *j)
{
    return j->pool != NULL ? j->pool : j->dev->pool;
}

/* ---- matrices -------------------------------------------------------------------- */

typedef struct {
    const hx_mat *m;
    float *out;
    int64_t rows; /* of a part, the blocks of scales whole */
} expansion;

/* Part p of a plain matrix. */
static void expand_part(void *ud, int64_t begin, int64_t end, int worker)
{
    static const size_t elem[HX_N_FMT] = {
        [HX_FMT_F32] = 4, [HX_FMT_F16] = 2, [HX_FMT_BF16] = 2, [HX_FMT_FP8] = 1
    };
    const expansion *x = ud;
    const hx_mat *m = x->m;

    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const int64_t at = p * x->rows;
        hx_mat part = *m;

        part.n = HX_MIN(x->rows, m->n - at);
        part.w = (const char *)m->w + (size_t)(at * m->k) * elem[m->fmt];
        if (m->fmt == HX_FMT_FP8)
            part.scale = (const float *)m->scale +
                         at / m->block_n * ((m->k + m->block_k - 1) / m->block_k);
        hx_mat_expand(&part, x->out + at * m->k, NULL); /* fails for EXL3 only */
    }
}

static int read_unit(job *j, const qz_unit *u, float *w, hx_err *err)
{
    const hx_desc *d = &j->model->desc;
    int64_t at = 0;

    for (int32_t i = 0; i < u->n_src; i++) {
        const hx_mat_want want = { .key = u->src[i],
                                   .n = u->n / u->n_src,
                                   .k = u->k,
                                   .block_n = d->fp8_block_n,
                                   .block_k = d->fp8_block_k };
        hx_mat m;
        int rc;

        if ((rc = hx_weights_mat(j->model->weights, &want, &m, err)) != 0)
            return rc;
        expansion x = { &m, w + at, m.fmt == HX_FMT_FP8 ? m.block_n : 128 };

        hx_pool_run(pool_of(j), (m.n + x.rows - 1) / x.rows, 1, expand_part, &x);
        at += m.n * m.k;
    }
    return 0;
}

/* Matrices with the same input stand together, so its Hessian is read once. */
static int need_hessian(job *j, const qz_unit *u, hx_err *err)
{
    const int64_t layer = u->layer < 0 ? j->model->desc.n_layer : u->layer;
    const int32_t hess = u->layer < 0 ? QZ_H_ATTN : u->hess;

    if (j->calib != NULL && layer == j->hess_layer && hess == j->hess)
        return 0;
    hx_free(j->hessian);
    j->hessian = NULL;
    j->hess_layer = layer;
    j->hess = hess;
    return j->calib != NULL && hess >= 0
               ? qz_calib_hessian(j->calib, layer, hess, &j->hessian, err)
               : 0;
}

static int convert(job *j, int64_t i, hx_err *err)
{
    qz_unit *u = &j->plan.unit[i];
    const int64_t n = HX_EXL3_PAD(u->n), k = HX_EXL3_PAD(u->k);
    float *w = hx_new(float, u->n * u->k);
    hx_exl3_out out = { .trellis = hx_calloc((size_t)(n * k / 256), (size_t)(16 * u->k2)),
                        .suh = hx_new(uint16_t, k),
                        .svh = hx_new(uint16_t, n) };
    hx_err why = { 0 };
    int rc;

    if (w == NULL || out.trellis == NULL || out.suh == NULL || out.svh == NULL) {
        rc = hx_fail(err, HX_ENOMEM,
                     "%.120s: no memory for %" PRId64 " x %" PRId64 " weights", u->key,
                     u->n, u->k);
        goto fail;
    }
    if ((rc = read_unit(j, u, w, err)) != 0 || (rc = need_hessian(j, u, err)) != 0)
        goto fail;
    const hx_exl3_job e = { .w = w,
                            .h = j->hessian,
                            .n = u->n,
                            .k = u->k,
                            .codebook = j->plan.opt.codebook,
                            .k2 = u->k2,
                            .seed = mix(MIX_START, u->key, strlen(u->key)),
                            .dev = j->dev };

    if ((rc = hx_exl3_encode(&e, pool_of(j), &out, &why)) != 0) {
        hx_fail(err, rc, "%.120s: %.120s", u->key, why.msg);
        goto fail;
    }
    if ((rc = qz_out_unit(&j->plan, u, out.trellis, out.suh, out.svh, err)) != 0 ||
        (rc = qz_out_note(&j->out, err, "unit %" PRId64 " %.17g %.17g", i, out.proxy,
                          out.mse)) != 0)
        goto fail;
    j->score[i] = (score) { out.proxy, out.mse };
    u->done = true;
    j->done += (double)u->n * (double)u->k;
fail:
    hx_free(w);
    hx_free(out.trellis);
    hx_free(out.suh);
    hx_free(out.svh);
    return rc;
}

/* All units of a layer that are not done (QZ_LAYER_HEAD: lm_head). */
static int convert_layer(job *j, int64_t layer, hx_err *err)
{
    const hx_desc *d = &j->model->desc;
    bool any = false;
    char what[64];

    if (layer == QZ_LAYER_HEAD)
        snprintf(what, sizeof what, "output matrix");
    else if (layer >= d->n_layer)
        snprintf(what, sizeof what, "MTP block");
    else
        snprintf(what, sizeof what, "layer %lld of %lld", (long long)layer + 1,
                 (long long)d->n_layer);
    for (int32_t h = QZ_H_NONE; h < QZ_H_EXPERT + (int32_t)d->n_expert; h++)
        for (int64_t i = 0; i < j->plan.n_unit; i++) {
            const qz_unit *u = &j->plan.unit[i];
            int rc;

            if (u->done || u->hess != h ||
                (layer < d->n_layer ? u->layer != layer : u->layer < layer))
                continue;
            if ((rc = convert(j, i, err)) != 0)
                return rc;
            any = true;
            show(j, what, false);
        }
    if (any && !j->person)
        show(j, what, true);
    return 0;
}

/* ---- layers ------------------------------------------------------------------------ */

/* Points the model's layer at its quantised matrices; mem [n_unit] takes what holds
 * them. */
static int use_quantised(job *j, int64_t layer, void **mem, hx_err *err)
{
    hx_layer *l = &j->model->layer[layer];
    int rc;

    for (int64_t i = 0; i < j->plan.n_unit; i++) {
        const qz_unit *u = &j->plan.unit[i];

        if (u->layer != layer)
            continue;
        char *base = u->expert >= 0 ? (char *)&l->expert[u->expert] : (char *)l;

        if ((rc = qz_out_load(&j->plan, u, (hx_mat *)(void *)(base + u->at), &mem[i],
                              err)) != 0)
            return rc;
        if (base + u->at == (char *)&l->kda.qkv[0])
            l->kda.n_qkv = 1;
    }
    return 0;
}

/* The rows through the layer before, and this one's Hessians. */
static int pass(job *j, int64_t layer, hx_err *err)
{
    void **mem;
    int rc = 0;

    if (layer <= j->pass)
        return 0;
    if ((mem = hx_new(void *, j->plan.n_unit)) == NULL)
        return hx_fail(err, HX_ENOMEM, "quantize: no memory");
    if (layer > 0)
        rc = use_quantised(j, layer - 1, mem, err);
    if (rc == 0 && (rc = qz_calib_pass(j->calib, layer, err)) == 0)
        rc = qz_out_note(&j->out, err, "pass %lld", (long long)layer);
    for (int64_t i = 0; i < j->plan.n_unit; i++)
        hx_free(mem[i]);
    hx_free(mem);
    return rc;
}

static int convert_all(job *j, hx_err *err)
{
    const int64_t n_layer = j->model->desc.n_layer;
    int rc;

    for (int64_t l = 0; l < n_layer; l++)
        if ((j->calib != NULL && (rc = pass(j, l, err)) != 0) ||
            (rc = convert_layer(j, l, err)) != 0)
            return rc;
    if (j->calib != NULL && (rc = pass(j, n_layer, err)) != 0)
        return rc;
    if ((rc = convert_layer(j, QZ_LAYER_HEAD, err)) != 0)
        return rc;
    return j->plan.has_mtp ? convert_layer(j, n_layer, err) : 0;
}

/* ---- the report --------------------------------------------------------------------- */

static int write_report(const job *j, hx_err *err)
{
    hx_sb b = { 0 };

    hx_sb_printf(&b, "{\"bits\": %.4f, \"modules\": {", j->plan.bits);
    for (int64_t i = 0; i < j->plan.n_unit; i++) {
        hx_sb_str(&b, i > 0 ? ",\n" : "\n");
        hx_json_put_str(&b, hx_str_c(j->plan.unit[i].key));
        hx_sb_printf(&b, ": {\"K\": %g, \"rel_mse\": %.5e, \"proxy_err\": %.5e}",
                     j->plan.unit[i].k2 / 2.0, j->score[i].mse, j->score[i].proxy);
    }
    hx_sb_str(&b, "}}\n");
    return qz_out_save(&j->out, "quant_report.json", &b, err);
}

static void print_rates(const job *j)
{
    for (int c = 0; c < QZ_N_CLASS; c++) {
        double bits = 0, n = 0;

        for (int64_t i = 0; i < j->plan.n_unit; i++) {
            const qz_unit *u = &j->plan.unit[i];

            if (u->layer < 0 || u->layer >= j->model->desc.n_layer || u->class != c)
                continue;
            n += (double)u->n * (double)u->k;
            bits += (double)u->n * (double)u->k * u->k2 / 2;
        }
        if (n > 0)
            printf("%s: %.2f bits on average\n", qz_class_name(c), bits / n);
    }
    printf("together %.3f bits, output matrix %g\n", j->plan.bits,
           j->plan.opt.head_k2 / 2.0);
}

/* ---- command -------------------------------------------------------------------------- */

/* The pool is for what stays on the host even beside a GPU. */
static int open_device(job *j, hx_err *err)
{
    const hx_cli *c = j->c;
    const hx_dev_opt opt = { .name = device_of(j),
                             .n_threads = (int)c->threads,
                             .cpus = c->cpus };
    int rc;

    if (j->text.n_row > 0) {
        if ((rc = qz_calib_open(&j->calib, j->model, &j->text, j->out.work, &opt, err)) !=
            0)
            return rc;
        j->dev = qz_calib_dev(j->calib);
    } else if ((rc = hx_dev_open(&j->dev, &opt, err)) != 0) {
        return rc;
    }
    printf("device %s", j->dev->text);
    if (j->text.n_row > 0)
        printf("; calibration: %lld row%s of %lld tokens%s", (long long)j->text.n_row,
               j->text.n_row == 1 ? "" : "s", (long long)j->text.cols,
               j->text.n_row < c->calib_rows ? ", which is all that the text has" : "");
    printf("\n");
    if (j->dev->pool != NULL)
        return 0;
    return hx_pool_open(&j->pool, opt.n_threads, opt.cpus, err);
}

/* Of all that was written, read back. */
static int write_sums(const job *j, hx_err *err)
{
    hx_weights *w = NULL;
    hx_sums *sums = NULL;
    int rc = hx_weights_open(&w, j->out.dir, err);

    if (rc == 0 && (rc = hx_sums_make(&sums, w, pool_of(j), NULL, NULL, err)) == 0)
        rc = hx_sums_write(sums, j->out.dir, err);
    hx_sums_close(sums);
    hx_weights_close(w);
    return rc;
}

static int prepare(job *j, hx_err *err)
{
    const hx_cli *c = j->c;
    char settings[512], *text = NULL;
    qz_plan_opt opt;
    int rc;

    if ((rc = read_options(c, &opt, err)) != 0)
        return rc;
    if (hx_model_is_synthetic(c->model))
        return hx_fail(err, HX_EUNSUP, "%s: has no files to quantise", c->model);
    if ((rc = hx_model_open_mapped(&j->model, c->model, err)) != 0 ||
        (rc = qz_plan_open(&j->plan, j->model, &opt, err)) != 0)
        return rc;
    if (strcmp(c->calib, "none") != 0 &&
        (rc = qz_text_read(&j->text, c->calib, c->model, c->calib_rows, c->calib_cols,
                           j->model->desc.n_vocab, err)) != 0)
        return rc;
    describe(j, settings);
    if ((rc = qz_out_open(&j->out, c->out, settings, c->resume, &text, err)) != 0)
        return rc;
    if ((j->score = hx_new(score, j->plan.n_unit)) == NULL)
        rc = hx_fail(err, HX_ENOMEM, "quantize: no memory");
    else
        rc = read_lines(j, text, err);
    hx_free(text);
    if (rc != 0 || (rc = qz_plan_rates(&j->plan, err)) != 0 ||
        (!j->copied && (rc = check_disk(j, err)) != 0) ||
        (rc = open_device(j, err)) != 0 || (rc = weigh(j, err)) != 0 ||
        (rc = qz_plan_rates(&j->plan, err)) != 0 ||
        (rc = qz_plan_layout(&j->plan, err)) != 0)
        return rc;
    return qz_out_files(&j->out, &j->plan, err);
}

static int run(job *j, hx_err *err)
{
    int rc;

    print_rates(j);
    if (j->n_resumed >= 0)
        printf("resumed: %lld of %lld matrices are done\n", (long long)j->n_resumed,
               (long long)j->plan.n_unit);
    fflush(stdout);
    j->start_us = hx_now_us();
    if (!j->copied && ((rc = qz_out_copy(&j->plan, err)) != 0 ||
                       (rc = qz_out_note(&j->out, err, "copied")) != 0))
        return rc;
    if ((rc = convert_all(j, err)) != 0 || (rc = write_report(j, err)) != 0)
        return rc;
    rc = qz_out_finish(&j->out, &j->plan, j->c->model, &j->text, err);
    return rc != 0 ? rc : write_sums(j, err);
}

int cmd_quantize(const hx_cli *c)
{
    job j = { .c = c,
              .out = { .journal = -1 },
              .pass = -1,
              .n_resumed = -1,
              .hess_layer = -1,
              .hess = QZ_H_NONE,
              .person = isatty(2) == 1 };
    uint64_t bytes = 0;
    hx_err err = { 0 };
    char text[32];
    int rc;

    if (c->out == NULL) {
        fprintf(stderr, "hoist: quantize needs a folder to write to: quantize IN OUT\n");
        return 2;
    }
    rc = prepare(&j, &err);
    if (rc == 0)
        rc = run(&j, &err);
    for (int32_t f = 0; f < j.plan.n_file; f++)
        bytes += j.plan.file[f].head.n + j.plan.file[f].bytes;
    cli_bytes(text, bytes);
    if (rc == 0)
        printf("%s%s: %lld matrices, %s, %.0f s\n", j.person ? "\n" : "", c->out,
               (long long)j.plan.n_unit, text, (double)(hx_now_us() - j.start_us) / 1e6);
    hx_pool_close(j.pool);
    if (j.calib != NULL)
        qz_calib_close(j.calib);
    else
        hx_dev_close(j.dev);
    qz_out_close(&j.out);
    hx_free(j.hessian);
    hx_free(j.score);
    qz_text_free(&j.text);
    if (j.plan.model != NULL)
        qz_plan_close(&j.plan);
    hx_model_close(j.model);
    return rc != 0 ? cli_fail(&err) : 0;
}
