/* quantize_out.c - the files of a conversion: shards with every tensor at its final place
 * from the start, a journal of what is there, the configs at the end. Called by
 * quantize.c. A matrix counts only once its bytes and then its journal line are on the
 * disk, so a kill at any moment loses no more than the one in work. config.json comes
 * last: an unfinished folder is no model. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/quantize.h"
#include "dev/exl3_encode.h"
#include "dev/fmt_exl3.h"
#include "dev/fmt_fp8.h"

#define WORK         ".quantize"
#define JOURNAL_MAX  (1u << 30)
#define CONFIG_MAX   (64u << 20)
#define FORMAT_MAKER "1.4.1" /* version of the reference whose layout this is */

/* ---- small things ------------------------------------------------------------ */

static int io_error(hx_err *err, const char *name)
{
    return hx_fail(err, HX_EIO, "%s: %s", name, strerror(errno));
}

static int join(char out[2200], const char *dir, const char *name, hx_err *err)
{
    const int n = snprintf(out, 2200, "%s/%s", dir, name);

    return n > 0 && n < 2200
               ? 0
               : hx_fail(err, HX_EARG, "%.200s…: the path is too long", dir);
}

int qz_write_at(int fd, const void *p, size_t n, uint64_t at, const char *name,
                hx_err *err)
{
    for (const char *from = p; n > 0;) {
        const ssize_t done = pwrite(fd, from, n, (off_t)at);

        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return io_error(err, name);
        from += done;
        at += (uint64_t)done;
        n -= (size_t)done;
    }
    return 0;
}

int qz_read_at(int fd, void *p, size_t n, uint64_t at, const char *name, hx_err *err)
{
    for (char *to = p; n > 0;) {
        const ssize_t done = pread(fd, to, n, (off_t)at);

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return io_error(err, name);
        if (done == 0)
            return hx_fail(err, HX_EIO, "%s: shorter than it was", name);
        to += done;
        at += (uint64_t)done;
        n -= (size_t)done;
    }
    return 0;
}

int qz_write_file(const char *path, const void *p, size_t n, hx_err *err)
{
    char part[2400];
    int fd, rc;

    snprintf(part, sizeof part, "%s.part", path);
    if ((fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) < 0)
        return io_error(err, part);
    rc = qz_write_at(fd, p, n, 0, path, err);
    if (rc == 0 && fsync(fd) != 0)
        rc = io_error(err, path);
    close(fd);
    if (rc == 0 && rename(part, path) != 0)
        rc = io_error(err, path);
    return rc;
}

int qz_out_save(const qz_out *o, const char *name, hx_sb *b, hx_err *err)
{
    char path[2200];
    int rc = join(path, o->dir, name, err);

    if (rc == 0)
        rc = b->bad ? hx_fail(err, HX_ENOMEM, "%s: no memory", name)
                    : qz_write_file(path, b->p, b->n, err);
    hx_sb_free(b);
    return rc;
}

/* ---- folder and journal -------------------------------------------------------- */

static int check_empty(const char *dir, hx_err *err)
{
    DIR *d = opendir(dir);
    const struct dirent *e;
    bool empty = true;

    if (d == NULL)
        return io_error(err, dir);
    while ((e = readdir(d)) != NULL)
        empty = empty && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0);
    closedir(d);
    return empty ? 0
                 : hx_fail(err, HX_EARG,
                           "%s: is not empty and holds no unfinished conversion; name "
                           "another folder",
                           dir);
}

/* The journal's first line says with which settings it was begun. A last line without its
 * end was being written when the program died: it is cut off. */
static int read_journal(qz_out *o, const char *path, const char *settings, char **text,
                        hx_err *err)
{
    size_t n, len = strlen(settings);
    int rc = hx_file_read(path, JOURNAL_MAX, text, &n, err);

    if (rc != 0)
        return rc;
    while (n > 0 && (*text)[n - 1] != '\n')
        n--;
    (*text)[n] = '\0';
    if (n < len || memcmp(*text, settings, len) != 0)
        rc = hx_fail(err, HX_EARG,
                     "%s: this conversion was begun with other settings or another "
                     "source (%.*s); give the same ones, or another folder",
                     o->dir, (int)strcspn(*text, "\n"), *text);
    else if ((o->journal = open(path, O_WRONLY | O_CLOEXEC)) < 0 ||
             ftruncate(o->journal, (off_t)n) != 0 || lseek(o->journal, 0, SEEK_END) < 0)
        rc = io_error(err, path);
    if (rc != 0) {
        hx_free(*text);
        *text = NULL;
    }
    return rc;
}

int qz_out_open(qz_out *o, const char *dir, const char *settings, bool resume,
                char **text, hx_err *err)
{
    char path[2200];
    int rc;

    *o = (qz_out) { .journal = -1 };
    *text = NULL;
    if (snprintf(o->dir, sizeof o->dir, "%s", dir) >= (int)sizeof o->dir)
        return hx_fail(err, HX_EARG, "%.200s…: the path is too long", dir);
    snprintf(o->work, sizeof o->work, "%s/" WORK, dir);
    snprintf(path, sizeof path, "%s/journal", o->work);
    if (hx_file_exists(path)) {
        if (!resume)
            return hx_fail(err, HX_EARG,
                           "%s: holds an unfinished conversion; --resume goes on with it",
                           dir);
        return read_journal(o, path, settings, text, err);
    }
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        return io_error(err, dir);
    if ((rc = check_empty(dir, err)) != 0)
        return rc;
    if (mkdir(o->work, 0777) != 0)
        return io_error(err, o->work);
    if ((rc = qz_write_file(path, settings, strlen(settings), err)) != 0)
        return rc;
    if ((o->journal = open(path, O_WRONLY | O_APPEND | O_CLOEXEC)) < 0)
        return io_error(err, path);
    return 0;
}

void qz_out_close(qz_out *o)
{
    if (o->journal >= 0)
        close(o->journal);
    o->journal = -1;
}

int qz_out_note(qz_out *o, hx_err *err, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(line, sizeof line - 1, fmt, ap);
    va_end(ap);
    if (n < 0 || n >= (int)sizeof line - 1)
        return hx_fail(err, HX_ELIMIT, "%s: a note of %d bytes", o->work, n);
    line[n++] = '\n';
    if (write(o->journal, line, (size_t)n) != n || fdatasync(o->journal) != 0)
        return io_error(err, o->work);
    return 0;
}

/* ---- shards -------------------------------------------------------------------- */

int qz_out_files(qz_out *o, qz_plan *p, hx_err *err)
{
    int rc;

    for (int32_t i = 0; i < p->n_file; i++) {
        qz_file *f = &p->file[i];
        char path[2200];

        if ((rc = join(path, o->dir, f->name, err)) != 0)
            return rc;
        if ((f->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666)) < 0 ||
            ftruncate(f->fd, (off_t)(f->head.n + f->bytes)) != 0)
            return io_error(err, path);
        if ((rc = qz_write_at(f->fd, f->head.p, f->head.n, 0, f->name, err)) != 0)
            return rc;
    }
    return 0;
}

static uint64_t place_of(const qz_plan *p, const qz_tensor *t)
{
    return p->file[t->file].head.n + t->offset;
}

/* An FP8 tensor with its scales as BF16. */
static int copy_fp8(const qz_plan *p, const qz_tensor *t, hx_err *err)
{
    const hx_desc *d = &p->model->desc;
    const hx_mat m = { .fmt = HX_FMT_FP8,
                       .n = t->dim[0],
                       .k = t->dim[1],
                       .w = t->src[0]->p,
                       .scale = t->scale->p,
                       .block_n = d->fp8_block_n,
                       .block_k = d->fp8_block_k };
    const uint64_t grid = (uint64_t)((m.n + m.block_n - 1) / m.block_n) *
                          (uint64_t)((m.k + m.block_k - 1) / m.block_k);
    uint16_t *row;
    int rc = 0;

    if (t->scale->dtype != HX_DT_F32 || t->scale->bytes != grid * 4)
        return hx_fail(err, HX_EFORMAT, "%.120s: expected F32 scales of %d x %d blocks",
                       t->scale->name, m.block_n, m.block_k);
    if ((row = hx_new(uint16_t, m.k)) == NULL)
        return hx_fail(err, HX_ENOMEM, "%.120s: no memory for a row", t->name);
    for (int64_t i = 0; rc == 0 && i < m.n; i++) {
        for (int64_t j = 0; j < m.k; j++)
            row[j] = hx_bf16_from(hx_fp8_at(m.w, i * m.k + j) * hx_fp8_scale(&m, i, j));
        rc = qz_write_at(p->file[t->file].fd, row, (size_t)m.k * 2,
                         place_of(p, t) + (uint64_t)(i * m.k) * 2, t->name, err);
    }
    hx_free(row);
    return rc;
}

int qz_out_copy(const qz_plan *p, hx_err *err)
{
    int rc;

    for (int64_t i = 0; i < p->n_tensor; i++) {
        const qz_tensor *t = &p->tensor[i];
        uint64_t at = place_of(p, t);

        if (t->scale != NULL && (rc = copy_fp8(p, t, err)) != 0)
            return rc;
        for (int s = 0; s < 3 && t->src[s] != NULL && t->scale == NULL; s++) {
            if ((rc = qz_write_at(p->file[t->file].fd, t->src[s]->p, t->src[s]->bytes, at,
                                  t->name, err)) != 0)
                return rc;
            at += t->src[s]->bytes;
        }
    }
    for (int32_t f = 0; f < p->n_file; f++)
        if (fdatasync(p->file[f].fd) != 0)
            return io_error(err, p->file[f].name);
    return 0;
}

int qz_out_unit(qz_plan *p, const qz_unit *u, const uint16_t *trellis,
                const uint16_t *suh, const uint16_t *svh, hx_err *err)
{
    const uint32_t marker = qz_codebook_marker(p->opt.codebook);
    const void *const part[4] = { trellis, suh, svh, &marker };
    const qz_tensor *t = &p->tensor[u->tensor];
    const qz_file *f = &p->file[t->file];
    int rc;

    for (int i = 0; i < (marker != 0 ? 4 : 3); i++)
        if ((rc = qz_write_at(f->fd, part[i], t[i].bytes, place_of(p, &t[i]), f->name,
                              err)) != 0)
            return rc;
    return fdatasync(f->fd) == 0 ? 0 : io_error(err, f->name);
}

int qz_out_load(qz_plan *p, const qz_unit *u, hx_mat *m, void **mem, hx_err *err)
{
    const qz_tensor *t = &p->tensor[u->tensor];
    const qz_file *f = &p->file[t->file];
    char *at;
    int rc = 0;

    /* 64 bytes of each part and the rest of the last stay free: kernels may read ahead. */
    if ((at = *mem = hx_alloc(t[0].bytes + t[1].bytes + t[2].bytes + 256)) == NULL)
        return hx_fail(err, HX_ENOMEM, "%.120s: no memory to read it back", u->key);
    *m = (hx_mat) { .fmt = HX_FMT_EXL3,
                    .n = u->n,
                    .k = u->k,
                    .n_pad = HX_EXL3_PAD(u->n),
                    .k_pad = HX_EXL3_PAD(u->k),
                    .k2 = u->k2,
                    .codebook = p->opt.codebook };
    const void **const to[3] = { &m->w, &m->suh, &m->svh };

    for (int i = 0; rc == 0 && i < 3; i++) {
        rc = qz_read_at(f->fd, at, t[i].bytes, place_of(p, &t[i]), f->name, err);
        *to[i] = at;
        at += (t[i].bytes + 63) / 64 * 64;
    }
    return rc;
}

/* ---- the end --------------------------------------------------------------------- */

/* Members of the quantization_config, without the braces. */
static void put_config(hx_sb *b, const qz_plan *p, const qz_text *text,
                       const hx_json *before)
{
    hx_sb_printf(b,
                 "\"quant_method\": \"exl3\", \"version\": \"" FORMAT_MAKER
                 "\", \"bits\": %.4g, \"head_bits\": %g, \"calibration\": {\"rows\": "
                 "%lld, \"cols\": %lld}, \"out_scales\": \"always\", \"codebook\": "
                 "\"%s\", \"quantized_by\": \"hoist " HX_VERSION "\"",
                 p->bits, p->opt.head_k2 / 2.0, (long long)text->n_row,
                 (long long)text->cols, qz_codebook_name(p->opt.codebook));
    if (before != NULL) {
        hx_sb_str(b, ", \"original_quantization_config\": ");
        hx_json_write(b, before);
    }
}

static int write_config(const qz_out *o, const qz_plan *p, const hx_json *config,
                        const qz_text *text, hx_err *err)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{");
    for (size_t i = 0; i < hx_json_len(config); i++) {
        hx_str key;
        const hx_json *v = hx_json_member(config, i, &key);

        if (hx_str_is(key, "quantization_config"))
            continue;
        hx_sb_str(&b, "\n    ");
        hx_json_put_str(&b, key);
        hx_sb_str(&b, ": ");
        hx_json_write_python(&b, v, false, 4);
        hx_sb_str(&b, ",");
    }
    hx_sb_str(&b, "\n    \"quantization_config\": {");
    put_config(&b, p, text, hx_json_get(config, "quantization_config"));
    hx_sb_str(&b, "}\n}\n");
    return qz_out_save(o, "config.json", &b, err);
}

static const char *torch_name(hx_dtype d)
{
    static const char *const names[HX_N_DTYPE] = { [HX_DT_BOOL] = "bool",
                                                   [HX_DT_U8] = "uint8",
                                                   [HX_DT_I8] = "int8",
                                                   [HX_DT_F8_E4M3] = "float8_e4m3fn",
                                                   [HX_DT_F8_E5M2] = "float8_e5m2",
                                                   [HX_DT_U16] = "uint16",
                                                   [HX_DT_I16] = "int16",
                                                   [HX_DT_F16] = "float16",
                                                   [HX_DT_BF16] = "bfloat16",
                                                   [HX_DT_U32] = "uint32",
                                                   [HX_DT_I32] = "int32",
                                                   [HX_DT_F32] = "float32",
                                                   [HX_DT_U64] = "uint64",
                                                   [HX_DT_I64] = "int64",
                                                   [HX_DT_F64] = "float64" };

    return names[d];
}

static void put_stored(hx_sb *b, const qz_tensor *t)
{
    hx_json_put_str(b, hx_str_c(t->name));
    hx_sb_str(b, ": {\"shape\": [");
    for (int32_t d = 0; d < t->n_dim; d++)
        hx_sb_printf(b, "%s%lld", d > 0 ? ", " : "", (long long)t->dim[d]);
    hx_sb_printf(b, "], \"n_bytes\": %llu, \"dtype\": \"torch.%s\"}",
                 (unsigned long long)t->bytes, torch_name(t->dtype));
}

static size_t module_length(const char *name)
{
    const char *dot = strrchr(name, '.');

    return dot != NULL ? (size_t)(dot - name) : strlen(name);
}

static int by_module(const void *a, const void *b)
{
    const char *x = (*(const qz_tensor *const *)a)->name,
               *y = (*(const qz_tensor *const *)b)->name;
    const size_t m = module_length(x), n = module_length(y);
    const int order = memcmp(x, y, HX_MIN(m, n));

    return order != 0 ? order : m != n ? (m < n ? -1 : 1) : strcmp(x, y);
}

/* Tensors that are copied, under the names of their modules. */
static void put_plain_modules(hx_sb *b, const qz_plan *p)
{
    const qz_tensor **list = hx_new(const qz_tensor *, HX_MAX(p->n_tensor, 1));
    const char *open = NULL;
    int64_t n = 0;

    if (list == NULL) {
        b->bad = true;
        return;
    }
    for (int64_t i = 0; i < p->n_tensor; i++)
        if (p->tensor[i].src[0] != NULL)
            list[n++] = &p->tensor[i];
    qsort(list, (size_t)n, sizeof *list, by_module);
    for (int64_t i = 0; i < n; i++) {
        const char *name = list[i]->name;
        const size_t len = module_length(name);

        if (open != NULL && module_length(open) == len && memcmp(open, name, len) == 0) {
            hx_sb_str(b, ", ");
        } else {
            hx_sb_str(b, open != NULL ? "}},\n" : ",\n");
            hx_json_put_str(b, (hx_str) { name, len });
            hx_sb_str(b, ": {\"stored_tensors\": {");
        }
        put_stored(b, list[i]);
        open = name;
    }
    hx_sb_str(b, open != NULL ? "}}" : "");
    hx_free(list);
}

/* tensor_storage: quantised modules with their rate, then the others. */
static int write_storage(const qz_out *o, const qz_plan *p, const hx_json *config,
                         const qz_text *text, hx_err *err)
{
    const uint32_t mark = qz_codebook_marker(p->opt.codebook);
    hx_sb b = { 0 };

    hx_sb_str(&b, "{");
    put_config(&b, p, text, hx_json_get(config, "quantization_config"));
    hx_sb_str(&b, ", \"tensor_storage\": {");
    for (int64_t i = 0; i < p->n_unit; i++) {
        const qz_unit *u = &p->unit[i];

        hx_sb_str(&b, i > 0 ? ",\n" : "\n");
        hx_json_put_str(&b, hx_str_c(u->key));
        hx_sb_str(&b, ": {\"stored_tensors\": {");
        for (int j = 0; j < (mark != 0 ? 4 : 3); j++) {
            hx_sb_str(&b, j > 0 ? ", " : "");
            put_stored(&b, &p->tensor[u->tensor + j]);
        }
        hx_sb_printf(&b, "}, \"quant_format\": \"exl3\", \"bits_per_weight\": %g",
                     u->k2 / 2.0);
        if (mark != 0)
            hx_sb_printf(&b, ", \"%s_multiplier\": %u", qz_codebook_name(p->opt.codebook),
                         mark);
        hx_sb_str(&b, "}");
    }
    put_plain_modules(&b, p);
    hx_sb_str(&b, "}}\n");
    return qz_out_save(o, "quantization_config.json", &b, err);
}

static int write_index(const qz_out *o, const qz_plan *p, hx_err *err)
{
    hx_sb b = { 0 };
    uint64_t total = 0;

    for (int32_t f = 0; f < p->n_file - p->has_mtp; f++)
        total += p->file[f].bytes;
    hx_sb_printf(&b, "{\"metadata\": {\"total_size\": %llu}, \"weight_map\": {",
                 (unsigned long long)total);
    for (int64_t i = 0, n = 0; i < p->n_tensor; i++) {
        const qz_tensor *t = &p->tensor[i];

        if (p->has_mtp && t->file == p->n_file - 1)
            continue;
        hx_sb_str(&b, n++ > 0 ? ",\n" : "\n");
        hx_json_put_str(&b, hx_str_c(t->name));
        hx_sb_printf(&b, ": \"%s\"", p->file[t->file].name);
    }
    hx_sb_str(&b, "}}\n");
    return qz_out_save(o, "model.safetensors.index.json", &b, err);
}

/* Tokenizer, template, generation config, licence; not what is made anew, or speaks of the
 * source's own files: a folder with those checksums would look damaged. */
static bool is_copied(const char *name)
{
    static const char *const left[] = { "config.json", HX_SUMS_FILE,
                                        "hoist-source.json" };
    bool copied = name[0] != '.' && !qz_ends_with(name, ".safetensors") &&
                  !qz_ends_with(name, ".safetensors.index.json");

    for (size_t i = 0; i < HX_LEN(left); i++)
        copied = copied && strcmp(name, left[i]) != 0;
    return copied;
}

static int copy_rest(const qz_out *o, const char *source, hx_err *err)
{
    DIR *d = opendir(source);
    const struct dirent *e;
    int rc = 0;

    if (d == NULL)
        return io_error(err, source);
    while (rc == 0 && (e = readdir(d)) != NULL) {
        char from[2200], to[2200], *text;
        struct stat st;
        size_t n;

        if (!is_copied(e->d_name))
            continue;
        if ((rc = join(from, source, e->d_name, err)) != 0 ||
            (rc = join(to, o->dir, e->d_name, err)) != 0)
            break;
        if (stat(from, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > CONFIG_MAX)
            continue;
        if (st.st_size == 0)
            rc = qz_write_file(to, "", 0, err);
        else if ((rc = hx_file_read(from, CONFIG_MAX, &text, &n, err)) == 0) {
            rc = qz_write_file(to, text, n, err);
            hx_free(text);
        }
    }
    closedir(d);
    return rc;
}

static void remove_work(const qz_out *o)
{
    DIR *d = opendir(o->work);
    const struct dirent *e;
    char path[2500];

    while (d != NULL && (e = readdir(d)) != NULL)
        if (e->d_name[0] != '.') {
            snprintf(path, sizeof path, "%s/%s", o->work, e->d_name);
            unlink(path);
        }
    if (d != NULL)
        closedir(d);
    rmdir(o->work);
}

int qz_out_finish(qz_out *o, const qz_plan *p, const char *source, const qz_text *text,
                  hx_err *err)
{
    char path[2200];
    hx_json *config = NULL;
    int rc;

    if ((rc = join(path, source, "config.json", err)) == 0 &&
        (rc = hx_json_read(&config, path, CONFIG_MAX, err)) == 0 &&
        (rc = copy_rest(o, source, err)) == 0 && (rc = write_index(o, p, err)) == 0 &&
        (rc = write_storage(o, p, config, text, err)) == 0)
        rc = write_config(o, p, config, text, err);
    hx_json_free(config);
    for (int32_t f = 0; f < p->n_file && rc == 0; f++) {
        if (fsync(p->file[f].fd) != 0)
            rc = io_error(err, p->file[f].name);
        close(p->file[f].fd);
        p->file[f].fd = -1;
    }
    if (rc == 0) {
        qz_out_close(o);
        remove_work(o);
    }
    return rc;
}
