/* arch_glm5_next.c - the family of GLM-5.3-Flash: reads and checks config.json, binds
 * tensors by name. Source: glm5_next.md 1, 16.1 and appendix A. Called by model.c only.
 *
 * Names are the release's; EXL3 checkpoints keep them, but may hold a KDA layer's q, k, v
 * as one qkv_proj and its three convolutions as one conv1d. Each linear decides for
 * itself whether it is quantised (weights.c). */
#include <stdio.h>

#include "model/model.h"

#define TRUNK "model.language_model."

/* ---- config.json ----------------------------------------------------- */

/* Integers of text_config that the description takes. */
typedef struct {
    const char *key;
    size_t offset;          /* int64_t in hx_desc */
    int64_t min, max, dflt; /* dflt 0: must be present */
} int_field;

#define INT(key, member, min, max, dflt)                                                 \
    {                                                                                    \
        key, offsetof(hx_desc, member), min, max, dflt                                   \
    }
static const int_field int_fields[] = {
    INT("num_hidden_layers", n_layer, 1, HX_LAYER_MAX, 0),
    INT("hidden_size", width, 1, 1 << 16, 0),
    INT("vocab_size", n_vocab, 1, 1 << 24, 0),
    INT("max_position_embeddings", ctx_trained, 1, 1 << 28, 1048576),
    INT("hc_mult", streams, 1, 8, 0),
    INT("num_attention_heads", mla_heads, 1, 1024, 0),
    INT("qk_nope_head_dim", k_width, 1, 4096, 0),
    INT("v_head_dim", v_width, 1, 4096, 0),
    INT("q_lora_rank", q_rank, 1, 1 << 16, 0),
    INT("kv_lora_rank", latent, 1, 1 << 16, 0),
    INT("index_n_heads", index_heads, 1, 1024, 0),
    INT("index_head_dim", index_width, 1, 4096, 0),
    INT("index_topk", index_topk, 1, 1 << 24, 0),
    INT("index_kpool", pool_n, 1, 8, 0),
    INT("intermediate_size", dense_width, 1, 1 << 20, 0),
    INT("moe_intermediate_size", expert_width, 1, 1 << 20, 0),
    INT("n_routed_experts", n_expert, 1, 1 << 16, 0),
    INT("num_experts_per_tok", n_active, 1, 64, 0),
};

/* Settings this code implements in one way only: another value would change the result.
 */
typedef struct {
    const char *key, *value;
} fixed_field;
static const fixed_field fixed_fields[] = {
    { "n_group", "1" },
    { "topk_group", "1" },
    { "scoring_func", "\"sigmoid\"" },
    { "topk_method", "\"noaux_tc\"" },
    { "norm_topk_prob", "true" },
    { "mhc", "true" },
    { "hidden_act", "\"silu\"" },
    { "attention_bias", "false" },
    { "qk_rope_head_dim", "0" },
    { "index_kpool_compress", "true" },
    { "index_kpool_always_select_tail", "true" },
    { "mla_use_nope", "true" },
    { "moe_router_dtype", "\"float32\"" },
};

/* Read elsewhere in this file, or without influence on the result of inference. */
static const char *const other_fields[] = {
    "model_type",
    "dtype",
    "torch_dtype",
    "hc_eps",
    "hc_sinkhorn_iters",
    "rms_norm_eps",
    "routed_scaling_factor",
    "swiglu_limit",
    "linear_attn_config",
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "first_k_dense_replace",
    "n_shared_experts",
    "num_key_value_heads",
    "qk_head_dim",
    "head_dim",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "router_aux_loss_coef",
    "output_router_logits",
    "index_share_for_mtp_iteration",
    "indexer_rope_interleave",
    "num_nextn_predict_layers",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "max_window_layers",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
};

static bool is_known(hx_str key)
{
    for (size_t i = 0; i < HX_LEN(int_fields); i++)
        if (hx_str_is(key, int_fields[i].key))
            return true;
    for (size_t i = 0; i < HX_LEN(fixed_fields); i++)
        if (hx_str_is(key, fixed_fields[i].key))
            return true;
    for (size_t i = 0; i < HX_LEN(other_fields); i++)
        if (hx_str_is(key, other_fields[i]))
            return true;
    return false;
}

/* A field nobody here knows may mean another model, unless it is switched off. */
static int check_unknown(const hx_json *t, const char *file, hx_err *err)
{
    for (size_t i = 0; i < hx_json_len(t); i++) {
        hx_str key;
        const hx_json *v = hx_json_member(t, i, &key);
        const hx_json_type kind = hx_json_kind(v);
        const bool off =
            kind == HX_JSON_NULL || (kind == HX_JSON_BOOL && !hx_json_bool(v, true));

        if (!off && !is_known(key))
            return hx_fail(err, HX_EUNSUP,
                           "%s: text_config.%.*s is unknown here and may change the "
                           "result; remove it if it does not",
                           file, (int)HX_MIN(key.n, 80), key.p);
    }
    return 0;
}

static int read_ints(hx_desc *d, const hx_json *t, const char *file, hx_err *err)
{
    for (size_t i = 0; i < HX_LEN(int_fields); i++) {
        const int_field *f = &int_fields[i];
        const hx_json *v = hx_json_get(t, f->key);
        const int64_t n = hx_json_int(v, v == NULL ? f->dflt : INT64_MIN);

        if (n < f->min || n > f->max)
            return hx_fail(err, HX_EFORMAT,
                           "%s: text_config.%s: %s, expected an integer in %lld..%lld",
                           file, f->key, v == NULL ? "missing" : hx_json_kind_name(v),
                           (long long)f->min, (long long)f->max);
        memcpy((char *)d + f->offset, &n, sizeof n);
    }
    return 0;
}

/* A member that may be absent or null, but is nothing else than wanted. */
static int read_optional(const hx_json *t, const char *key, hx_json_type wanted,
                         const char *file, const hx_json **out, hx_err *err)
{
    static const char *const names[] = {
        [HX_JSON_INT] = "an integer", [HX_JSON_ARRAY] = "a list"
    };
    const hx_json *v = hx_json_get(t, key);

    *out = hx_json_kind(v) == HX_JSON_NULL ? NULL : v;
    if (*out != NULL && hx_json_kind(v) != wanted)
        return hx_fail(err, HX_EFORMAT, "%s: %s: %s, expected %s", file, key,
                       hx_json_kind_name(v), names[wanted]);
    return 0;
}

static int check_fixed(const hx_json *t, const char *file, hx_err *err)
{
    for (size_t i = 0; i < HX_LEN(fixed_fields); i++) {
        const fixed_field *f = &fixed_fields[i];
        const hx_json *v = hx_json_get(t, f->key);
        hx_sb b = { .max = 200 };
        bool same;

        if (v == NULL)
            continue;
        hx_json_write(&b, v);
        same = b.p != NULL && strcmp(b.p, f->value) == 0;
        if (!same)
            hx_fail(err, HX_EUNSUP,
                    "%s: text_config.%s is %s, this program implements %s", file, f->key,
                    b.p != NULL ? b.p : "?", f->value);
        hx_sb_free(&b);
        if (!same)
            return HX_EUNSUP;
    }
    return 0;
}

static int read_float(const hx_json *t, const char *file, const char *key, double min,
                      double max, double dflt, float *out, hx_err *err)
{
    const hx_json *v = hx_json_get(t, key);
    const double x = hx_json_num(v, dflt);
    const hx_json_type kind = hx_json_kind(v);

    if ((v != NULL && kind != HX_JSON_DOUBLE && kind != HX_JSON_INT) ||
        !(x >= min && x <= max))
        return hx_fail(err, HX_EFORMAT, "%s: %s: expected a number in %g..%g", file, key,
                       min, max);
    *out = (float)x;
    return 0;
}

/* One name per layer, of two; for other names see who. */
static int read_kinds(uint8_t *out, int64_t n, const hx_json *list, const char *file,
                      const char *key, const char *const names[2], hx_err *err)
{
    if (hx_json_kind(list) != HX_JSON_ARRAY || hx_json_len(list) != (size_t)n)
        return hx_fail(err, HX_EFORMAT,
                       "%s: text_config.%s: expected a list of %lld names", file, key,
                       (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const hx_str s = hx_json_str(hx_json_at(list, (size_t)i));

        if (hx_str_is(s, names[0]))
            out[i] = 0;
        else if (hx_str_is(s, names[1]))
            out[i] = 1;
        else
            return hx_fail(
                err, HX_EUNSUP,
                "%s: text_config.%s[%lld]: \"%.*s\", expected \"%s\" or \"%s\"", file,
                key, (long long)i, (int)HX_MIN(s.n, 60), s.p ? s.p : "", names[0],
                names[1]);
    }
    return 0;
}

static int read_layers(hx_desc *d, const hx_json *t, const char *file, hx_err *err)
{
    static const char *const mixers[2] = { "linear_attention",
                                           "deepseek_sparse_attention" };
    static const char *const ffns[2] = { "dense", "sparse" };
    const hx_json *index, *kinds = hx_json_get(t, "mlp_layer_types"), *first;
    int rc;

    if ((rc = read_optional(t, "indexer_types", HX_JSON_ARRAY, file, &index, err)) != 0 ||
        (rc = read_optional(t, "first_k_dense_replace", HX_JSON_INT, file, &first,
                            err)) != 0)
        return rc;
    const int64_t dense = hx_json_int(first, -1);

    if ((rc = read_kinds(d->mixer, d->n_layer, hx_json_get(t, "layer_types"), file,
                         "layer_types", mixers, err)) != 0)
        return rc;
    if (kinds != NULL) {
        if ((rc = read_kinds(d->ffn, d->n_layer, kinds, file, "mlp_layer_types", ffns,
                             err)) != 0)
            return rc;
    } else if (dense < 0) {
        return hx_fail(
            err, HX_EFORMAT,
            "%s: text_config has neither mlp_layer_types nor first_k_dense_replace",
            file);
    }
    for (int64_t l = 0; l < d->n_layer; l++) {
        const hx_ffn want = l < dense ? HX_FFN_DENSE : HX_FFN_MOE;

        if (kinds == NULL)
            d->ffn[l] = (uint8_t)want;
        else if (dense >= 0 && d->ffn[l] != want)
            return hx_fail(
                err, HX_EFORMAT,
                "%s: mlp_layer_types[%lld] disagrees with first_k_dense_replace %lld",
                file, (long long)l, (long long)dense);
    }
    for (size_t i = 0; i < hx_json_len(index); i++)
        if (!hx_str_is(hx_json_str(hx_json_at(index, i)), "full"))
            return hx_fail(err, HX_EUNSUP,
                           "%s: text_config.indexer_types[%zu] is not \"full\"", file, i);
    return 0;
}

static int read_kda(hx_desc *d, const hx_json *t, const char *file, hx_err *err)
{
    const hx_json *k = hx_json_get(t, "linear_attn_config");
    const hx_json *list;
    const int rc = read_optional(k, "kda_layers", HX_JSON_ARRAY, file, &list, err);

    if (rc != 0)
        return rc;
    d->kda_heads = hx_json_int(hx_json_get(k, "num_heads"), 0);
    d->kda_width = hx_json_int(hx_json_get(k, "head_dim"), 0);
    d->conv_taps = hx_json_int(hx_json_get(k, "short_conv_kernel_size"), 0);
    if (d->kda_heads < 1 || d->kda_heads > 1024 || d->kda_width < 1 ||
        d->kda_width > 512 || d->conv_taps < 2 || d->conv_taps > 8)
        return hx_fail(err, HX_EFORMAT,
                       "%s: linear_attn_config: num_heads %lld, head_dim %lld, "
                       "short_conv_kernel_size %lld; expected 1..1024, 1..512, 2..8",
                       file, (long long)d->kda_heads, (long long)d->kda_width,
                       (long long)d->conv_taps);
    if (hx_json_kind(hx_json_get(k, "gate_lower_bound")) == HX_JSON_NULL)
        return hx_fail(err, HX_EUNSUP,
                       "%s: linear_attn_config.gate_lower_bound is absent; only the "
                       "bounded gate is implemented",
                       file);
    for (size_t i = 0; i < hx_json_len(list); i++) {
        const int64_t l = hx_json_int(hx_json_at(list, i), -1);

        if (l < 0 || l >= d->n_layer || d->mixer[l] != HX_MIX_KDA)
            return hx_fail(err, HX_EFORMAT,
                           "%s: linear_attn_config.kda_layers names layer %lld, "
                           "layer_types does not",
                           file, (long long)l);
    }
    return read_float(k, file, "gate_lower_bound", -64, -1e-6, 0, &d->gate_bound, err);
}

static int read_floats(hx_desc *d, const hx_json *t, const char *file, hx_err *err)
{
    float iters;
    int rc;

    if ((rc = read_float(t, file, "rms_norm_eps", 1e-12, 1, -1, &d->norm_eps, err)) !=
            0 ||
        (rc = read_float(t, file, "hc_eps", 0, 1, -1, &d->hc_eps, err)) != 0 ||
        (rc = read_float(t, file, "hc_sinkhorn_iters", 1, 1000, -1, &iters, err)) != 0 ||
        (rc = read_float(t, file, "routed_scaling_factor", 0, 1e6, -1, &d->route_factor,
                         err)) != 0)
        return rc;
    d->hc_iters = (int32_t)iters;
    return read_float(t, file, "swiglu_limit", 0, 1e6, -1, &d->swiglu_limit, err);
}

/* Relations between fields, and the end ids. */
static int read_rest(hx_desc *d, const hx_json *config, const hx_json *t,
                     const char *file, hx_err *err)
{
    const hx_json *eos = hx_json_get(t, "eos_token_id"), *one, *block, *found[3];
    const hx_json *q = hx_json_get(config, "quantization_config");
    int rc;

    if ((rc = read_optional(q, "weight_block_size", HX_JSON_ARRAY, file, &block, err)) !=
            0 ||
        (rc = read_optional(t, "n_shared_experts", HX_JSON_INT, file, &found[0], err)) !=
            0 ||
        (rc = read_optional(t, "num_key_value_heads", HX_JSON_INT, file, &found[1],
                            err)) != 0 ||
        (rc = read_optional(t, "qk_head_dim", HX_JSON_INT, file, &found[2], err)) != 0)
        return rc;
    one = hx_json_kind(eos) == HX_JSON_INT ? eos : NULL;
    if (one == NULL &&
        (rc = read_optional(t, "eos_token_id", HX_JSON_ARRAY, file, &eos, err)) != 0)
        return rc;
    const int64_t shared = hx_json_int(found[0], 1),
                  qk = hx_json_int(found[2], d->k_width),
                  kv_heads = hx_json_int(found[1], d->mla_heads);

    if (d->n_active > d->n_expert || kv_heads != d->mla_heads || qk != d->k_width ||
        shared < 1 || shared > 64 || d->index_topk % d->pool_n != 0 ||
        HX_PAGE % d->pool_n != 0)
        return hx_fail(
            err, HX_EUNSUP,
            "%s: num_experts_per_tok %lld of %lld, num_key_value_heads %lld of %lld, "
            "qk_head_dim %lld of %lld, n_shared_experts %lld, index_topk and %d by "
            "index_kpool %lld: not a combination this program implements",
            file, (long long)d->n_active, (long long)d->n_expert, (long long)kv_heads,
            (long long)d->mla_heads, (long long)qk, (long long)d->k_width,
            (long long)shared, HX_PAGE, (long long)d->pool_n);
    d->shared_width = shared * d->expert_width;
    d->index_topk /= d->pool_n;
    for (size_t i = 0; i < (one != NULL ? 1 : hx_json_len(eos)); i++) {
        const int64_t id = hx_json_int(one != NULL ? one : hx_json_at(eos, i), -1);

        if (id < 0 || id >= d->n_vocab || d->n_eos == (int32_t)HX_LEN(d->eos))
            return hx_fail(err, HX_EFORMAT,
                           "%s: eos_token_id %lld: expected up to %zu ids below %lld",
                           file, (long long)id, HX_LEN(d->eos), (long long)d->n_vocab);
        d->eos[d->n_eos++] = (int32_t)id;
    }
    const int64_t rows = hx_json_int(hx_json_at(block, 0), 128),
                  cols = hx_json_int(hx_json_at(block, 1), 128);
    if (rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX)
        return hx_fail(
            err, HX_EFORMAT,
            "%s: quantization_config.weight_block_size: [%lld, %lld], expected "
            "two numbers from 1 on",
            file, (long long)rows, (long long)cols);
    d->fp8_block_n = (int32_t)rows;
    d->fp8_block_k = (int32_t)cols;
    return 0;
}

static int glm_config(hx_desc *d, const hx_json *config, const char *file, hx_err *err)
{
    const hx_json *t = hx_json_get(config, "text_config");
    int rc;

    if (hx_json_kind(t) != HX_JSON_OBJECT)
        return hx_fail(err, HX_EFORMAT, "%s: text_config is %s, expected an object", file,
                       hx_json_kind_name(t));
    d->arch = "glm5_next";
    d->reply_format = "glm";
    d->unlimited_ctx = true;
    if ((rc = read_ints(d, t, file, err)) != 0 || (rc = check_fixed(t, file, err)) != 0 ||
        (rc = check_unknown(t, file, err)) != 0 ||
        (rc = read_layers(d, t, file, err)) != 0 ||
        (rc = read_kda(d, t, file, err)) != 0 || (rc = read_floats(d, t, file, err)) != 0)
        return rc;
    return read_rest(d, config, t, file, err);
}

/* ---- tensors --------------------------------------------------------- */

/* Binds names under one prefix. */
typedef struct {
    hx_model *m;
    char prefix[128];
    hx_err *err;
} binder;

static int mat(const binder *b, const char *name, int64_t n, int64_t k, hx_mat *out)
{
    char key[256];
    const hx_desc *d = &b->m->desc;

    snprintf(key, sizeof key, "%s%s", b->prefix, name);
    const hx_mat_want want = {
        .key = key, .n = n, .k = k, .block_n = d->fp8_block_n, .block_k = d->fp8_block_k
    };
    return hx_weights_mat(b->m->weights, &want, out, b->err);
}

static int vec(const binder *b, const char *name, int64_t dim0, int64_t dim1, hx_buf *out)
{
    char key[256];

    snprintf(key, sizeof key, "%s%s", b->prefix, name);
    const hx_vec_want want = { .name = key, .dim = { dim0, dim1 } };
    return hx_weights_vec(b->m->weights, &want, out, b->err);
}

static int bind_hc(const binder *b, const char *site, hx_hc *hc)
{
    const int64_t s = b->m->desc.streams, maps = s * (2 + s);
    char name[64];
    int rc;

    snprintf(name, sizeof name, "hc_%s_fn", site);
    if ((rc = mat(b, name, maps, s * b->m->desc.width, &hc->fn)) != 0)
        return rc;
    snprintf(name, sizeof name, "hc_%s_base", site);
    if ((rc = vec(b, name, maps, 0, &hc->base)) != 0)
        return rc;
    snprintf(name, sizeof name, "hc_%s_scale", site);
    return vec(b, name, 3, 0, &hc->scale);
}

/* The convolutions of q, k, v as one f32 [3 H K, taps], stored as one tensor or three. */
static int bind_conv(const binder *b, hx_buf *out)
{
    static const char *const names[3] = { "q_conv1d", "k_conv1d", "v_conv1d" };
    const hx_desc *d = &b->m->desc;
    const int64_t hk = d->kda_heads * d->kda_width;
    const size_t part = (size_t)(hk * d->conv_taps);
    char key[256];
    float *w = hx_arena_alloc(&b->m->arena, 3 * part * sizeof(float));

    if (w == NULL)
        return hx_fail(b->err, HX_ENOMEM, "%sconv1d: no memory", b->prefix);
    *out = (hx_buf) { w, 3 * part * sizeof(float) };
    snprintf(key, sizeof key, "%sconv1d.weight", b->prefix);
    if (hx_weights_find(b->m->weights, key) != NULL) {
        const hx_vec_want want = { .name = key, .dim = { 3 * hk, 1, d->conv_taps } };

        return hx_weights_copy(b->m->weights, &want, w, b->err);
    }
    for (int i = 0; i < 3; i++) {
        snprintf(key, sizeof key, "%s%s.weight", b->prefix, names[i]);
        const hx_vec_want want = { .name = key, .dim = { hk, 1, d->conv_taps } };
        const int rc =
            hx_weights_copy(b->m->weights, &want, w + (size_t)i * part, b->err);

        if (rc != 0)
            return rc;
    }
    return 0;
}

static int bind_kda(const binder *b, hx_kda *w)
{
    const hx_desc *d = &b->m->desc;
    const int64_t h = d->kda_heads, k = d->kda_width, hk = h * k;
    char fused[256];
    int rc;

    snprintf(fused, sizeof fused, "%sqkv_proj", b->prefix);
    w->n_qkv = hx_weights_has(b->m->weights, fused) ? 1 : 3;
    if (w->n_qkv == 1)
        rc = mat(b, "qkv_proj", 3 * hk, d->width, &w->qkv[0]);
    else if ((rc = mat(b, "q_proj", hk, d->width, &w->qkv[0])) == 0 &&
             (rc = mat(b, "k_proj", hk, d->width, &w->qkv[1])) == 0)
        rc = mat(b, "v_proj", hk, d->width, &w->qkv[2]);
    if (rc != 0 || (rc = bind_conv(b, &w->conv)) != 0 ||
        (rc = mat(b, "f_a_proj", k, d->width, &w->f_a)) != 0 ||
        (rc = mat(b, "f_b_proj", hk, k, &w->f_b)) != 0 ||
        (rc = mat(b, "g_a_proj", k, d->width, &w->g_a)) != 0 ||
        (rc = mat(b, "g_b_proj", hk, k, &w->g_b)) != 0 ||
        (rc = mat(b, "b_proj", h, d->width, &w->b)) != 0 ||
        (rc = mat(b, "o_proj", d->width, hk, &w->o)) != 0 ||
        (rc = vec(b, "A_log", h, 0, &w->a_log)) != 0 ||
        (rc = vec(b, "dt_bias", hk, 0, &w->dt_bias)) != 0)
        return rc;
    return vec(b, "o_norm.weight", k, 0, &w->o_norm);
}

/* The absorbed form takes kv_b apart by heads, which a rotated format does not allow. */
static int bind_kv_b(const binder *b, hx_mat *out)
{
    const hx_desc *d = &b->m->desc;
    const int64_t n = d->mla_heads * (d->k_width + d->v_width);
    hx_mat raw;
    float *w;
    int rc;

    if ((rc = mat(b, "kv_b_proj", n, d->latent, &raw)) != 0)
        return rc;
    *out = raw;
    if (raw.fmt != HX_FMT_EXL3)
        return 0;
    if ((w = hx_arena_alloc(&b->m->arena, (size_t)(n * d->latent) * sizeof(float))) ==
        NULL)
        return hx_fail(b->err, HX_ENOMEM, "%skv_b_proj: no memory to expand it",
                       b->prefix);
    *out = (hx_mat) { .fmt = HX_FMT_F32, .n = n, .k = d->latent, .w = w };
    return hx_mat_expand(&raw, w, b->err);
}

static int bind_mla(const binder *b, hx_mla *w)
{
    const hx_desc *d = &b->m->desc;
    const int64_t i = d->index_width;
    int rc;

    if ((rc = mat(b, "q_a_proj", d->q_rank, d->width, &w->q_a)) != 0 ||
        (rc = mat(b, "q_b_proj", d->mla_heads * d->k_width, d->q_rank, &w->q_b)) != 0 ||
        (rc = mat(b, "kv_a_proj_with_mqa", d->latent, d->width, &w->kv_a)) != 0 ||
        (rc = bind_kv_b(b, &w->kv_b)) != 0 ||
        (rc = mat(b, "o_proj", d->width, d->mla_heads * d->v_width, &w->o)) != 0 ||
        (rc = vec(b, "q_a_layernorm.weight", d->q_rank, 0, &w->q_norm)) != 0 ||
        (rc = vec(b, "kv_a_layernorm.weight", d->latent, 0, &w->kv_norm)) != 0 ||
        (rc = mat(b, "indexer.wq_b", d->index_heads * i, d->q_rank, &w->index_q)) != 0 ||
        (rc = mat(b, "indexer.wk", i, d->width, &w->index_k)) != 0 ||
        (rc = mat(b, "indexer.weights_proj", d->index_heads, d->width,
                  &w->index_weight)) != 0 ||
        (rc = mat(b, "indexer.index_kpool_compress_gate", i, d->width, &w->index_gate)) !=
            0 ||
        (rc = vec(b, "indexer.k_norm.weight", i, 0, &w->index_norm_w)) != 0 ||
        (rc = vec(b, "indexer.k_norm.bias", i, 0, &w->index_norm_b)) != 0)
        return rc;
    return vec(b, "indexer.index_kpool_compress_ape", d->pool_n, i, &w->ape);
}

/* gate, up and down of one MLP; prefix ends in "mlp.", "…shared_experts." or
 * "…experts.N." */
static int bind_mlp(const binder *b, int64_t width, hx_expert *e)
{
    const int64_t d = b->m->desc.width;
    int rc;

    if ((rc = mat(b, "gate_proj", width, d, &e->gate)) != 0 ||
        (rc = mat(b, "up_proj", width, d, &e->up)) != 0)
        return rc;
    return mat(b, "down_proj", d, width, &e->down);
}

static int bind_moe(binder *b, int64_t l, hx_layer *w)
{
    hx_model *m = b->m;
    const hx_desc *d = &m->desc;
    int rc;

    if ((rc = mat(b, "gate", d->n_expert, d->width, &w->router)) != 0 ||
        (rc = vec(b, "gate.e_score_correction_bias", d->n_expert, 0, &w->router_bias)) !=
            0)
        return rc;
    if (w->router.fmt == HX_FMT_EXL3)
        return hx_fail(b->err, HX_EUNSUP, "%sgate: a quantised router is not supported",
                       b->prefix);
    w->expert = hx_arena_alloc(&m->arena, (size_t)d->n_expert * sizeof *w->expert);
    if (w->expert == NULL)
        return hx_fail(b->err, HX_ENOMEM, "layer %lld: no memory for %lld experts",
                       (long long)l, (long long)d->n_expert);
    for (int64_t e = 0; e < d->n_expert; e++) {
        snprintf(b->prefix, sizeof b->prefix, TRUNK "layers.%lld.mlp.experts.%lld.",
                 (long long)l, (long long)e);
        if ((rc = bind_mlp(b, d->expert_width, &w->expert[e])) != 0)
            return rc;
    }
    snprintf(b->prefix, sizeof b->prefix, TRUNK "layers.%lld.mlp.shared_experts.",
             (long long)l);
    return bind_mlp(b, d->shared_width, &w->dense);
}

static int bind_layer(binder *b, int64_t l, hx_layer *w)
{
    const hx_desc *d = &b->m->desc;
    int rc;

    w->mixer = (hx_mixer)d->mixer[l];
    w->ffn = (hx_ffn)d->ffn[l];
    snprintf(b->prefix, sizeof b->prefix, TRUNK "layers.%lld.", (long long)l);
    if ((rc = bind_hc(b, "attn", &w->hc_attn)) != 0 ||
        (rc = bind_hc(b, "ffn", &w->hc_ffn)) != 0 ||
        (rc = vec(b, "input_layernorm.weight", d->width, 0, &w->norm_attn)) != 0 ||
        (rc = vec(b, "post_attention_layernorm.weight", d->width, 0, &w->norm_ffn)) != 0)
        return rc;
    snprintf(b->prefix, sizeof b->prefix, TRUNK "layers.%lld.self_attn.", (long long)l);
    rc = w->mixer == HX_MIX_KDA ? bind_kda(b, &w->kda) : bind_mla(b, &w->mla);
    if (rc != 0)
        return rc;
    snprintf(b->prefix, sizeof b->prefix, TRUNK "layers.%lld.mlp.", (long long)l);
    return w->ffn == HX_FFN_DENSE ? bind_mlp(b, d->dense_width, &w->dense)
                                  : bind_moe(b, l, w);
}

static int glm_bind(hx_model *m, hx_err *err)
{
    binder b = { .m = m, .prefix = TRUNK, .err = err };
    const hx_desc *d = &m->desc;
    int rc;

    if ((rc = mat(&b, "embed_tokens", d->n_vocab, d->width, &m->embed)) != 0 ||
        (rc = vec(&b, "norm.weight", d->width, 0, &m->norm)) != 0)
        return rc;
    if (m->embed.fmt == HX_FMT_EXL3)
        return hx_fail(err, HX_EUNSUP,
                       TRUNK "embed_tokens: a quantised embedding is not supported");
    for (int64_t l = 0; l < d->n_layer; l++)
        if ((rc = bind_layer(&b, l, &m->layer[l])) != 0)
            return rc;
    b.prefix[0] = '\0';
    return mat(&b, "lm_head", d->n_vocab, d->width, &m->head);
}

const hx_arch hx_arch_glm5_next = { "glm5_next", glm_config, glm_bind };
