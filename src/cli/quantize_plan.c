/* quantize_plan.c - what a conversion makes of a checkpoint: which matrices are quantised
 * (the scope of the full EXL3 releases), at how many bits, and where each tensor lies in
 * the output. Called by quantize.c; opens no file and runs no model. Source: exl3.md 2,
 * 10.7. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "cli/quantize.h"
#include "dev/exl3_encode.h"
#include "dev/fmt_exl3.h"

#define TRUNK "model.language_model.layers."

const char *qz_class_name(int class)
{
    static const char *const names[QZ_N_CLASS] = {
#define X(id, text) text,
        QZ_CLASSES(X)
#undef X
    };
    return names[class];
}

/* The suffix is of a tensor that holds the marker. */
static const struct {
    const char *name, *suffix;
    uint32_t marker;
} codebooks[HX_N_CB] = { { "3inst", NULL, 0 },
                         { "mcg", ".mcg", HX_EXL3_MCG },
                         { "mul1", ".mul1", HX_EXL3_MUL1 } };

const char *qz_codebook_name(hx_codebook cb)
{
    return codebooks[cb].name;
}

uint32_t qz_codebook_marker(hx_codebook cb)
{
    return codebooks[cb].marker;
}

bool qz_ends_with(const char *s, const char *tail)
{
    const size_t n = strlen(s), m = strlen(tail);

    return n >= m && memcmp(s + n - m, tail, m) == 0;
}

/* ---- which matrices -------------------------------------------------------- */

/* Names inside a layer. q, k and v of a KDA layer become one matrix, as in the releases.
 */
typedef struct {
    const char *name; /* after "layers.N." or "experts.N." */
    int32_t class, hess;
    size_t at;
} rule;

#define IN_LAYER(m)  offsetof(hx_layer, m)
#define IN_EXPERT(m) offsetof(hx_expert, m)
static const rule layer_rules[] = {
    { "self_attn.qkv_proj", QZ_ATTN, QZ_H_ATTN, IN_LAYER(kda.qkv[0]) },
    { "self_attn.q_proj", QZ_ATTN, QZ_H_ATTN, IN_LAYER(kda.qkv[0]) },
    { "self_attn.o_proj", QZ_ATTN, QZ_H_O, IN_LAYER(kda.o) },
    { "self_attn.q_a_proj", QZ_ATTN, QZ_H_ATTN, IN_LAYER(mla.q_a) },
    { "self_attn.q_b_proj", QZ_ATTN, QZ_H_QUERY, IN_LAYER(mla.q_b) },
    { "self_attn.kv_a_proj_with_mqa", QZ_ATTN, QZ_H_ATTN, IN_LAYER(mla.kv_a) },
    { "self_attn.indexer.wq_b", QZ_ATTN, QZ_H_QUERY, IN_LAYER(mla.index_q) },
    { "mlp.gate_proj", QZ_DENSE, QZ_H_MLP, IN_LAYER(dense.gate) },
    { "mlp.up_proj", QZ_DENSE, QZ_H_MLP, IN_LAYER(dense.up) },
    { "mlp.down_proj", QZ_DENSE, QZ_H_DOWN, IN_LAYER(dense.down) },
    { "mlp.shared_experts.gate_proj", QZ_SHARED, QZ_H_MLP, IN_LAYER(dense.gate) },
    { "mlp.shared_experts.up_proj", QZ_SHARED, QZ_H_MLP, IN_LAYER(dense.up) },
    { "mlp.shared_experts.down_proj", QZ_SHARED, QZ_H_DOWN, IN_LAYER(dense.down) },
    { "eh_proj", QZ_ATTN, QZ_H_NONE, 0 },
};
/* These go with q_proj. */
static const rule fused_rules[] = {
    { "self_attn.k_proj", QZ_ATTN, QZ_H_ATTN, 0 },
    { "self_attn.v_proj", QZ_ATTN, QZ_H_ATTN, 0 },
};
static const rule expert_rules[] = {
    { "gate_proj", QZ_ROUTED, QZ_H_MLP, IN_EXPERT(gate) },
    { "up_proj", QZ_ROUTED, QZ_H_MLP, IN_EXPERT(up) },
    { "down_proj", QZ_ROUTED, QZ_H_EXPERT, IN_EXPERT(down) },
};

static const rule *find_rule(const rule *r, size_t n, const char *name, size_t len)
{
    for (size_t i = 0; i < n; i++)
        if (strlen(r[i].name) == len && memcmp(r[i].name, name, len) == 0)
            return &r[i];
    return NULL;
}

/* The number at *s, which moves past it and the dot behind; -1: none. */
static int64_t take_number(const char **s)
{
    char *end;
    const long long v = strtoll(*s, &end, 10);

    if (end == *s || *end != '.' || v < 0 || v > 1 << 20)
        return -1;
    *s = end + 1;
    return v;
}

static const char *put(qz_plan *p, const char *a, size_t n, const char *b)
{
    char name[512];
    const int len = snprintf(name, sizeof name, "%.*s%s", (int)n, a, b);

    return len > 0 && (size_t)len < sizeof name
               ? hx_arena_dup(&p->arena, name, (size_t)len)
               : NULL;
}

static int no_memory(hx_err *err)
{
    return hx_fail(err, HX_ENOMEM, "quantize: no memory for the plan");
}

/* Room for one more than n: list, or what it has become; NULL: none, and list stays. */
static void *grow(void *list, int64_t n, int64_t *cap, size_t size)
{
    const int64_t more = HX_MAX(256, 2 * n);

    if (n < *cap)
        return list;
    if ((list = hx_realloc(list, (size_t)more * size)) != NULL)
        *cap = more;
    return list;
}

static qz_unit *add_unit(qz_plan *p)
{
    qz_unit *list = grow(p->unit, p->n_unit, &p->cap_unit, sizeof *list);

    if (list == NULL)
        return NULL;
    p->unit = list;
    p->unit[p->n_unit] = (qz_unit) { .expert = -1, .hess = QZ_H_NONE };
    return &p->unit[p->n_unit++];
}

static qz_tensor *add_tensor(qz_plan *p)
{
    qz_tensor *list = grow(p->tensor, p->n_tensor, &p->cap_tensor, sizeof *list);

    if (list == NULL)
        return NULL;
    p->tensor = list;
    p->tensor[p->n_tensor] = (qz_tensor) { .layer = QZ_LAYER_HEAD };
    return &p->tensor[p->n_tensor++];
}

/* Where a name stands: its layer (QZ_LAYER_HEAD outside the trunk) and the rest. */
static int64_t layer_of(const char *name, const char **rest)
{
    *rest = name + strlen(TRUNK);
    if (strncmp(name, TRUNK, strlen(TRUNK)) != 0)
        return QZ_LAYER_HEAD;
    return take_number(rest);
}

/* The unit that a source tensor KEY.weight begins, if it is to be quantised. 1: it is (or
 * belongs to one already there), 0: no. */
static int try_unit(qz_plan *p, const hx_tensor *t, hx_err *err)
{
    const hx_desc *d = &p->model->desc;
    const size_t stem = strlen(t->name) - strlen(".weight");
    const char *rest;
    const int64_t layer = layer_of(t->name, &rest);
    int64_t expert = -1;
    const rule *r = NULL;
    qz_unit *u;

    if (!qz_ends_with(t->name, ".weight") || t->n_dim != 2)
        return 0;
    if (layer == QZ_LAYER_HEAD && strcmp(t->name, "lm_head.weight") != 0)
        return 0;
    if (layer > QZ_LAYER_HEAD) {
        const size_t len = (size_t)(t->name + stem - rest);

        if (strncmp(rest, "mlp.experts.", 12) == 0) {
            const char *in = rest + 12;

            expert = take_number(&in);
            r = find_rule(expert_rules, HX_LEN(expert_rules), in,
                          (size_t)(t->name + stem - in));
        } else if (find_rule(fused_rules, HX_LEN(fused_rules), rest, len) != NULL) {
            return 1;
        } else {
            r = find_rule(layer_rules, HX_LEN(layer_rules), rest, len);
        }
        if (r == NULL)
            return 0;
        if (r->class == QZ_ROUTED &&
            (expert < 0 || expert >= d->n_expert ||
             (layer < d->n_layer && d->ffn[layer] != HX_FFN_MOE)))
            return hx_fail(err, HX_EFORMAT,
                           "checkpoint: %.120s: config.json has no such expert", t->name);
    }
    if ((u = add_unit(p)) == NULL)
        return no_memory(err);
    u->layer = (int32_t)layer;
    u->n = t->dim[0];
    u->k = t->dim[1];
    u->n_src = 1;
    u->key = u->src[0] = put(p, t->name, stem, "");
    if (r != NULL) {
        u->class = r->class;
        u->expert = (int32_t)expert;
        u->hess = layer >= d->n_layer ? QZ_H_NONE
                                      : r->hess + (r->hess == QZ_H_EXPERT) * u->expert;
        u->at = r->at;
        if (r->at == IN_LAYER(kda.o) && layer < d->n_layer &&
            d->mixer[layer] == HX_MIX_MLA && expert < 0)
            u->at = IN_LAYER(mla.o);
    }
    if (r != NULL && strcmp(r->name, "self_attn.q_proj") == 0) {
        const size_t base = stem - strlen("q_proj");

        u->key = put(p, t->name, base, "qkv_proj");
        u->src[1] = put(p, t->name, base, "k_proj");
        u->src[2] = put(p, t->name, base, "v_proj");
        u->n_src = 3;
        u->n *= 3;
    }
    for (int i = 0; i < u->n_src; i++)
        if (u->key == NULL || u->src[i] == NULL)
            return no_memory(err);
    return 1;
}

/* ---- what is copied --------------------------------------------------------- */

/* The three convolutions of a KDA layer become one, as its q, k, v do. 1: done, or part of
 * what was. */
static int try_conv(qz_plan *p, const hx_tensor *t, hx_err *err)
{
    static const char *const names[3] = { "q_conv1d.weight", "k_conv1d.weight",
                                          "v_conv1d.weight" };
    const char *rest;
    const int64_t layer = layer_of(t->name, &rest);
    qz_tensor *o;

    if (layer == QZ_LAYER_HEAD ||
        (!qz_ends_with(t->name, names[0]) && !qz_ends_with(t->name, names[1]) &&
         !qz_ends_with(t->name, names[2])))
        return 0;
    if (!qz_ends_with(t->name, names[0]))
        return 1;
    const size_t base = strlen(t->name) - strlen(names[0]);

    if ((o = add_tensor(p)) == NULL)
        return no_memory(err);
    o->name = put(p, t->name, base, "conv1d.weight");
    o->dtype = t->dtype;
    o->n_dim = t->n_dim;
    memcpy(o->dim, t->dim, sizeof o->dim);
    o->layer = (int32_t)layer;
    o->dim[0] = 0;
    for (int i = 0; i < 3; i++) {
        const char *name = put(p, t->name, base, names[i]);
        const hx_tensor *s =
            name != NULL ? hx_weights_find(p->model->weights, name) : NULL;

        if (s == NULL || s->dtype != t->dtype || s->n_dim != t->n_dim)
            return hx_fail(err, HX_EFORMAT,
                           "checkpoint: %.120s is missing or unlike the other two",
                           name != NULL ? name : "?");
        o->src[i] = s;
        o->bytes += s->bytes;
        o->dim[0] += s->dim[0];
    }
    return o->name != NULL ? 1 : no_memory(err);
}

static int add_copy(qz_plan *p, const hx_tensor *t, hx_err *err)
{
    const char *rest;
    qz_tensor *o;

    if (qz_ends_with(t->name, ".weight_scale_inv"))
        return 0;
    if ((o = add_tensor(p)) == NULL)
        return no_memory(err);
    o->name = t->name;
    o->dtype = t->dtype;
    o->n_dim = t->n_dim;
    memcpy(o->dim, t->dim, sizeof o->dim);
    o->bytes = t->bytes;
    o->src[0] = t;
    o->layer = (int32_t)layer_of(t->name, &rest);
    if (t->dtype == HX_DT_F8_E4M3) {
        const char *name = put(p, t->name, strlen(t->name), "_scale_inv");

        if (name == NULL)
            return no_memory(err);
        if (t->n_dim != 2 ||
            (o->scale = hx_weights_find(p->model->weights, name)) == NULL)
            return hx_fail(err, HX_EFORMAT, "%s: %.120s: F8_E4M3 without its _scale_inv",
                           hx_weights_file(p->model->weights, t), t->name);
        o->dtype = HX_DT_BF16;
        o->bytes *= 2;
    }
    return 0;
}

int qz_plan_open(qz_plan *p, hx_model *m, const qz_plan_opt *opt, hx_err *err)
{
    const hx_weights *w = m->weights;
    const size_t n_group = (size_t)m->desc.n_layer + 1;
    int rc = 0;

    *p = (qz_plan) { .model = m, .opt = *opt };
    hx_arena_init(&p->arena, (size_t)1 << 32);
    for (int64_t i = 0; rc == 0 && i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);

        if (qz_ends_with(t->name, ".trellis"))
            rc = hx_fail(err, HX_EUNSUP,
                         "%s: %.120s: this checkpoint is EXL3 already; quantise the "
                         "original instead",
                         hx_weights_file(w, t), t->name);
        else if ((rc = try_unit(p, t, err)) == 0 && (rc = try_conv(p, t, err)) == 0)
            rc = add_copy(p, t, err);
        if (rc > 0)
            rc = 0;
    }
    p->weight = hx_calloc(n_group, sizeof *p->weight);
    p->rate = hx_calloc(n_group, sizeof *p->rate);
    if (rc == 0 && (p->weight == NULL || p->rate == NULL))
        rc = no_memory(err);
    for (size_t l = 0; rc == 0 && l < n_group; l++)
        for (int c = 0; c < QZ_N_CLASS; c++)
            p->weight[l][c] = 1;
    if (rc == 0 && p->n_unit == 0)
        rc = hx_fail(err, HX_EUNSUP,
                     "quantize: no matrix of this checkpoint is of a "
                     "kind that is quantised");
    if (rc != 0)
        qz_plan_close(p);
    return rc;
}

void qz_plan_close(qz_plan *p)
{
    for (int32_t i = 0; p->file != NULL && i < p->n_file; i++)
        hx_sb_free(&p->file[i].head);
    hx_free(p->file);
    hx_free(p->unit);
    hx_free(p->tensor);
    hx_free(p->weight);
    hx_free(p->rate);
    hx_arena_reset(&p->arena);
    *p = (qz_plan) { .model = NULL };
}

/* ---- bits ------------------------------------------------------------------- */

/* Error of the search per rate, for normal values of variance 1 (exl3.md 10.5, MUL1). */
static const double distortion[17] = { 1,      1,      .273,   .138,   .0678,  .0342,
                                       .0173,  .00877, .00440, .00221, .00111, .00057,
                                       2.9e-4, 1.5e-4, 8e-5,   4e-5,   2e-5 };

/* The next rate above k2 (0: the lowest), or 0. */
static int32_t raise_rate(const qz_plan *p, int32_t k2)
{
    for (int32_t r = k2 + 1; r <= 16; r++)
        if (r >= 2 && (r % 2 == 0 || p->opt.half_rates) &&
            hx_trellis_takes(p->opt.codebook, r))
            return r;
    return 0;
}

/* Starts all groups one bit below the average, rounded down, and raises the one that gains
 * most per bit, until none fits. The gain is the fall in error times the group's weight,
 * which was measured with small errors: hence the start not at the lowest rate. */
int qz_plan_rates(qz_plan *p, hx_err *err)
{
    const int64_t n_layer = p->model->desc.n_layer;
    const int32_t least = raise_rate(p, 0),
                  low = HX_MAX(least, 2 * ((int32_t)p->opt.bits - 1));
    double(*size)[QZ_N_CLASS] = hx_calloc((size_t)n_layer, sizeof *size);
    double total = 0, used = 0;

    if (size == NULL)
        return no_memory(err);
    for (int64_t i = 0; i < p->n_unit; i++)
        if (p->unit[i].layer >= 0 && p->unit[i].layer < n_layer)
            size[p->unit[i].layer][p->unit[i].class] +=
                (double)p->unit[i].n * (double)p->unit[i].k;
    for (int64_t l = 0; l < n_layer; l++)
        for (int c = 0; c < QZ_N_CLASS; c++)
            if (size[l][c] > 0) {
                p->rate[l][c] = low;
                total += size[l][c];
                used += size[l][c] * low / 2;
            }
    for (;;) {
        double best = 0;
        int64_t at_l = -1;
        int at_c = 0;

        for (int64_t l = 0; l < n_layer; l++)
            for (int c = 0; c < QZ_N_CLASS; c++) {
                const int32_t now = p->rate[l][c], next = now ? raise_rate(p, now) : 0;
                const double cost = size[l][c] * (next - now) / 2;

                if (next == 0 || used + cost > total * p->opt.bits * (1 + 1e-9))
                    continue;
                const double gain =
                    p->weight[l][c] * (distortion[now] - distortion[next]) / cost;

                if (gain > best) {
                    best = gain;
                    at_l = l;
                    at_c = c;
                }
            }
        if (at_l < 0)
            break;
        const int32_t next = raise_rate(p, p->rate[at_l][at_c]);

        used += size[at_l][at_c] * (next - p->rate[at_l][at_c]) / 2;
        p->rate[at_l][at_c] = next;
    }
    hx_free(size);
    p->bits = total > 0 ? used / total : 0;
    /* The MTP block is outside the budget: each class as in the last layer that has it. */
    for (int c = 0; c < QZ_N_CLASS; c++)
        for (int64_t l = 0; l < n_layer; l++)
            if (p->rate[l][c] != 0)
                p->rate[n_layer][c] = p->rate[l][c];
    for (int64_t i = 0; i < p->n_unit; i++) {
        qz_unit *u = &p->unit[i];

        u->k2 =
            u->layer < 0 ? p->opt.head_k2 : p->rate[HX_MIN(u->layer, n_layer)][u->class];
    }
    if (p->bits > p->opt.bits * (1 + 1e-6) || p->bits < p->opt.bits - 1)
        return hx_fail(err, HX_EARG,
                       "--bits %g: the nearest that these matrices allow is %.3f",
                       p->opt.bits, p->bits);
    return 0;
}

/* ---- layout ------------------------------------------------------------------- */

static uint64_t trellis_bytes(const qz_unit *u)
{
    return (uint64_t)(HX_EXL3_PAD(u->n) * HX_EXL3_PAD(u->k)) / 16 * (uint64_t)u->k2;
}

uint64_t qz_plan_bytes(const qz_plan *p)
{
    const uint64_t marker = codebooks[p->opt.codebook].suffix != NULL ? 4 : 0;
    uint64_t sum = 0;

    for (int64_t i = 0; i < p->n_tensor; i++)
        sum += p->tensor[i].bytes;
    for (int64_t i = 0; i < p->n_unit; i++)
        sum += trellis_bytes(&p->unit[i]) + marker +
               2 * (uint64_t)(HX_EXL3_PAD(p->unit[i].n) + HX_EXL3_PAD(p->unit[i].k));
    return sum;
}

static qz_tensor *add_part(qz_plan *p, const qz_unit *u, const char *suffix,
                           hx_dtype dtype, uint64_t bytes)
{
    qz_tensor *t = add_tensor(p);

    if (t == NULL)
        return NULL;
    t->name = put(p, u->key, strlen(u->key), suffix);
    t->dtype = dtype;
    t->bytes = bytes;
    t->layer = u->layer;
    return t->name != NULL ? t : NULL;
}

static int add_parts(qz_plan *p, qz_unit *u, hx_err *err)
{
    const int64_t n = HX_EXL3_PAD(u->n), k = HX_EXL3_PAD(u->k);
    const char *marker = codebooks[p->opt.codebook].suffix;
    qz_tensor *t;

    u->tensor = p->n_tensor;
    if ((t = add_part(p, u, ".trellis", HX_DT_I16, trellis_bytes(u))) == NULL)
        return no_memory(err);
    t->n_dim = 3;
    t->dim[0] = k / 16;
    t->dim[1] = n / 16;
    t->dim[2] = 8 * u->k2;
    if ((t = add_part(p, u, ".suh", HX_DT_F16, (uint64_t)k * 2)) == NULL)
        return no_memory(err);
    t->n_dim = 1;
    t->dim[0] = k;
    if ((t = add_part(p, u, ".svh", HX_DT_F16, (uint64_t)n * 2)) == NULL)
        return no_memory(err);
    t->n_dim = 1;
    t->dim[0] = n;
    if (marker != NULL && add_part(p, u, marker, HX_DT_I32, 4) == NULL)
        return no_memory(err);
    return 0;
}

/* Files hold whole layers; what belongs to none comes first. */
static int assign_files(qz_plan *p, hx_err *err)
{
    const int64_t n_layer = p->model->desc.n_layer;
    uint64_t *bytes = hx_new(uint64_t, n_layer + 2); /* [layer + 1] */
    int32_t *file = hx_new(int32_t, n_layer + 2);
    int32_t n = 0;

    if (bytes == NULL || file == NULL) {
        hx_free(bytes);
        hx_free(file);
        return no_memory(err);
    }
    for (int64_t i = 0; i < p->n_tensor; i++) {
        p->tensor[i].layer = (int32_t)HX_MIN(p->tensor[i].layer, n_layer);
        bytes[p->tensor[i].layer + 1] += p->tensor[i].bytes;
    }
    for (int64_t l = 0, sum = 0; l <= n_layer; l++) {
        if (sum > 0 && (uint64_t)sum + bytes[l] > p->opt.shard_bytes) {
            n++;
            sum = 0;
        }
        sum += (int64_t)bytes[l];
        file[l] = n;
    }
    p->has_mtp = bytes[n_layer + 1] > 0;
    file[n_layer + 1] = ++n;
    p->n_file = n + p->has_mtp;
    if ((p->file = hx_new(qz_file, p->n_file)) != NULL) {
        for (int64_t i = 0; i < p->n_tensor; i++)
            p->tensor[i].file = file[p->tensor[i].layer + 1];
        for (int32_t f = 0; f < p->n_file; f++) {
            p->file[f].fd = -1;
            if (f == n)
                snprintf(p->file[f].name, sizeof p->file[f].name, "mtp.safetensors");
            else if (n == 1)
                snprintf(p->file[f].name, sizeof p->file[f].name, "model.safetensors");
            else
                snprintf(p->file[f].name, sizeof p->file[f].name,
                         "model-%05d-of-%05d.safetensors", f + 1, n);
        }
    }
    hx_free(bytes);
    hx_free(file);
    return p->file != NULL ? 0 : no_memory(err);
}

/* Large ones first: they keep the others from odd places. */
static void place_tensors(qz_plan *p, bool aligned)
{
    for (int64_t i = 0; i < p->n_tensor; i++) {
        qz_tensor *t = &p->tensor[i];
        qz_file *f = &p->file[t->file];

        if ((t->bytes % 64 == 0) != aligned)
            continue;
        t->offset = f->bytes;
        f->bytes += t->bytes;
        hx_sb_str(&f->head, ",");
        hx_json_put_str(&f->head, hx_str_c(t->name));
        hx_sb_printf(&f->head, ":{\"dtype\":\"%s\",\"shape\":[", hx_dtype_name(t->dtype));
        for (int32_t d = 0; d < t->n_dim; d++)
            hx_sb_printf(&f->head, "%s%" PRId64, d > 0 ? "," : "", t->dim[d]);
        hx_sb_printf(&f->head, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->offset,
                     f->bytes);
    }
}

int qz_plan_layout(qz_plan *p, hx_err *err)
{
    int rc;

    for (int64_t i = 0; i < p->n_unit; i++)
        if ((rc = add_parts(p, &p->unit[i], err)) != 0)
            return rc;
    if ((rc = assign_files(p, err)) != 0)
        return rc;
    for (int32_t f = 0; f < p->n_file; f++)
        hx_sb_printf(&p->file[f].head, "12345678{\"__metadata__\":{\"format\":\"pt\"}");
    place_tensors(p, true);
    place_tensors(p, false);
    for (int32_t f = 0; f < p->n_file; f++) {
        hx_sb *head = &p->file[f].head;
        uint64_t n;

        hx_sb_char(head, '}');
        while (!head->bad && head->n % 64 != 0)
            hx_sb_char(head, ' ');
        if (head->bad)
            return no_memory(err);
        n = head->n - sizeof n;
        memcpy(head->p, &n, sizeof n);
    }
    return 0;
}
