/* model.c - opens a model: recognises its family, lets it read the config and bind
 * tensors. Called by the engine and by inspect. Knows no tensor names. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "model/model.h"

#define CONFIG_MAX_BYTES (64u << 20)

static const hx_arch *const archs[] = {
#define X(name) &hx_arch_##name,
    HX_ARCHS(X)
#undef X
};

bool hx_model_is_synthetic(const char *dir)
{
    return strncmp(dir, "synthetic:", 10) == 0;
}

/* ---- every weight --------------------------------------------------------- */

/* Called for each matrix and each vector of a model. Either may be NULL. */
typedef struct {
    int (*mat)(void *ud, hx_mat *w, hx_err *err);
    int (*vec)(void *ud, hx_buf *v, hx_err *err);
    void *ud;
    enum { ALL, DENSE, ROUTED } what; /* routed experts or what is not one */
} visitor;

static int visit_mats(const visitor *v, hx_mat *const *all, size_t n, hx_err *err)
{
    for (size_t i = 0; i < n; i++) {
        const int rc = all[i]->w != NULL ? v->mat(v->ud, all[i], err) : 0;

        if (rc != 0)
            return rc;
    }
    return 0;
}

static int visit_expert(const visitor *v, hx_expert *e, hx_err *err)
{
    hx_mat *const all[] = { &e->gate, &e->up, &e->down };

    return visit_mats(v, all, HX_LEN(all), err);
}

static int visit_layer(const visitor *v, hx_layer *w, int64_t n_expert, hx_err *err)
{
    hx_mat *const mats[] = { &w->hc_attn.fn,
                             &w->hc_ffn.fn,
                             &w->kda.qkv[0],
                             &w->kda.qkv[1],
                             &w->kda.qkv[2],
                             &w->kda.f_a,
                             &w->kda.f_b,
                             &w->kda.b,
                             &w->kda.g_a,
                             &w->kda.g_b,
                             &w->kda.o,
                             &w->mla.q_a,
                             &w->mla.q_b,
                             &w->mla.kv_a,
                             &w->mla.kv_b,
                             &w->mla.o,
                             &w->mla.index_q,
                             &w->mla.index_k,
                             &w->mla.index_weight,
                             &w->mla.index_gate,
                             &w->router };
    hx_buf *const vecs[] = { &w->hc_attn.base,     &w->hc_attn.scale,    &w->hc_ffn.base,
                             &w->hc_ffn.scale,     &w->norm_attn,        &w->norm_ffn,
                             &w->kda.conv,         &w->kda.a_log,        &w->kda.dt_bias,
                             &w->kda.o_norm,       &w->mla.q_norm,       &w->mla.kv_norm,
                             &w->mla.index_norm_w, &w->mla.index_norm_b, &w->mla.ape,
                             &w->router_bias };
    int rc = 0;

    for (int64_t e = 0; rc == 0 && v->what != DENSE && w->expert != NULL && e < n_expert;
         e++)
        rc = visit_expert(v, &w->expert[e], err);
    if (rc != 0 || v->what == ROUTED ||
        (rc = visit_mats(v, mats, HX_LEN(mats), err)) != 0)
        return rc;
    rc = visit_expert(v, &w->dense, err);
    for (size_t i = 0; rc == 0 && v->vec != NULL && i < HX_LEN(vecs); i++)
        if (vecs[i]->p != NULL)
            rc = v->vec(v->ud, vecs[i], err);
    return rc;
}

/* What stands outside the layers. */
static int visit_ends(hx_model *m, const visitor *v, hx_err *err)
{
    hx_mat *const ends[] = { &m->embed, &m->head };
    const int rc = visit_mats(v, ends, HX_LEN(ends), err);

    return rc != 0 || v->vec == NULL ? rc : v->vec(v->ud, &m->norm, err);
}

static int visit(hx_model *m, const visitor *v, hx_err *err)
{
    int rc = v->what == ROUTED ? 0 : visit_ends(m, v, err);

    for (int64_t l = 0; rc == 0 && l < m->desc.n_layer; l++)
        rc = visit_layer(v, &m->layer[l], m->desc.n_expert, err);
    return rc;
}

/* Parameters and bytes of all matrices (vectors are noise beside them). */
static int add_mat(void *ud, hx_mat *w, hx_err *err)
{
    hx_model *m = ud;

    (void)err;
    m->n_param += (uint64_t)w->n * (uint64_t)w->k;
    m->weight_bytes += hx_mat_bytes(w);
    return 0;
}

/* ---- placing on a device ---------------------------------------------------- */

#define PLACE_ALIGN 256

/* Copies to placed, or only adds up when dev is NULL. */
typedef struct {
    hx_dev *dev;
    const hx_model *from; /* its host memory is given back; NULL: is kept */
    hx_buf placed;
    size_t at;
    bool host;           /* placed is host memory */
    const hx_mat *apart; /* not this one */
} placer;

void hx_model_drop(const hx_model *m, const void *p, size_t bytes, bool evict)
{
    const uintptr_t at = (uintptr_t)p - (uintptr_t)m->synth;

    if (m->weights != NULL ? hx_weights_holds(m->weights, p) : at < m->synth_bytes)
        hx_map_drop(p, bytes, evict);
}

static int place(placer *p, const void **w, size_t bytes, hx_err *err)
{
    hx_buf to;
    int rc;

    if (*w == NULL || bytes == 0)
        return 0;
    if (p->dev != NULL) {
        to = hx_buf_at(p->placed, p->at);
        if (p->host)
            memcpy(to.p, *w, bytes);
        else if ((rc = hx_dev_put(p->dev, to, *w, bytes, err)) != 0)
            return rc;
        if (p->from != NULL)
            hx_model_drop(p->from, *w, bytes, false);
        *w = to.p;
    }
    p->at += (bytes + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
    return 0;
}

static int place_mat(void *ud, hx_mat *w, hx_err *err)
{
    static const size_t elem[HX_N_FMT] = {
        [HX_FMT_F32] = 4, [HX_FMT_F16] = 2, [HX_FMT_BF16] = 2, [HX_FMT_FP8] = 1
    };
    const bool exl3 = w->fmt == HX_FMT_EXL3, fp8 = w->fmt == HX_FMT_FP8;
    const size_t grid = fp8 ? (size_t)((w->n + w->block_n - 1) / w->block_n) *
                                  (size_t)((w->k + w->block_k - 1) / w->block_k)
                            : 0;
    const size_t bytes = exl3 ? (size_t)(w->n_pad * w->k_pad) / 16 * (size_t)w->k2
                              : (size_t)(w->n * w->k) * elem[w->fmt];
    int rc;

    if (w == ((const placer *)ud)->apart)
        return 0;
    if ((rc = place(ud, &w->w, bytes, err)) != 0 ||
        (rc = place(ud, &w->scale, grid * sizeof(float), err)) != 0 ||
        (rc = place(ud, &w->suh, exl3 ? (size_t)w->k_pad * 2 : 0, err)) != 0 ||
        (rc = place(ud, &w->svh, exl3 ? (size_t)w->n_pad * 2 : 0, err)) != 0)
        return rc;
    return place(ud, &w->bias, (size_t)w->n * 2, err);
}

static int place_vec(void *ud, hx_buf *v, hx_err *err)
{
    const void *p = v->p;
    const int rc = place(ud, &p, v->n, err);

    memcpy(&v->p, &p, sizeof p);
    return rc;
}

int hx_model_place_bytes(hx_model *m, hx_place what, uint64_t *bytes, hx_err *err)
{
    placer p = { .apart = &m->embed };
    const visitor v = { place_mat, place_vec, &p,
                        what == HX_PLACE_ROUTED ? ROUTED : DENSE };
    const int rc = visit(m, &v, err);

    *bytes = p.at;
    return rc;
}

/* A row needs 8 KB of the 1.3 GB that the embedding of GLM-5.3-Flash has, as much as 134
 * experts: the device reads it in host memory. */
static int place_embed(hx_model *m, hx_dev *dev, hx_err *err)
{
    placer p = { 0 };
    int rc = place_mat(&p, &m->embed, err);

    if (rc == 0)
        rc = hx_dev_shared(dev, &m->embed_shared, p.at, err);
    p = (placer) { .dev = dev, .from = m, .placed = m->embed_shared, .host = true };
    return rc != 0 ? rc : place_mat(&p, &m->embed, err);
}

int hx_model_place(hx_model *m, hx_dev *dev, hx_place what, hx_err *err)
{
    hx_buf *placed = &m->placed[what];
    placer p = { .dev = dev, .from = m, .apart = &m->embed };
    const visitor v = { place_mat, place_vec, &p,
                        what == HX_PLACE_ROUTED ? ROUTED : DENSE };
    uint64_t bytes;
    int rc;

    if (hx_dev_is_host(dev))
        return 0;
    if ((rc = hx_model_place_bytes(m, what, &bytes, err)) != 0 ||
        (rc = hx_dev_alloc(dev, placed, bytes, err)) != 0)
        return rc;
    m->dev = dev;
    if (what == HX_PLACE_DENSE && (rc = place_embed(m, dev, err)) != 0)
        return rc;
    p.placed = *placed;
    return visit(m, &v, err);
}

int hx_model_place_layer(hx_model *m, hx_dev *dev, int64_t layer, hx_buf *out,
                         hx_err *err)
{
    placer p = { 0 };
    const visitor v = { place_mat, place_vec, &p, ALL };

    *out = (hx_buf) { NULL, 0 };
    for (int i = 0; i < 2; i++) {
        int rc = layer == m->desc.n_layer
                     ? visit_ends(m, &v, err)
                     : visit_layer(&v, &m->layer[layer], m->desc.n_expert, err);

        if (rc == 0 && i == 0)
            rc = hx_dev_alloc(dev, out, p.at, err);
        if (rc != 0)
            return rc;
        p = (placer) { .dev = dev, .placed = *out };
    }
    return 0;
}

/* ---- opening ------------------------------------------------------------------ */

static const hx_arch *find_arch(const hx_json *config, const char *file, hx_err *err)
{
    const hx_str type = hx_json_str(hx_json_get(config, "model_type"));

    for (size_t i = 0; i < HX_LEN(archs); i++)
        if (hx_str_is(type, archs[i]->model_type))
            return archs[i];
    hx_fail(err, HX_EUNSUP,
            "%s: model_type \"%.*s\" is not supported; this program runs glm5_next "
            "(GLM-5.3-Flash)",
            file, (int)HX_MIN(type.n, 60), type.p != NULL ? type.p : "");
    return NULL;
}

static int read_config(hx_model *m, const char *dir, const hx_arch **arch, hx_err *err)
{
    char path[4096];
    hx_json *config = NULL;
    int rc;

    if ((size_t)snprintf(path, sizeof path, "%s/config.json", dir) >= sizeof path)
        return hx_fail(err, HX_EARG, "model folder: name longer than %zu bytes",
                       sizeof path);
    if (access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return hx_fail(err, HX_EIO,
                       "%s: %s; a model is a folder with config.json, tokenizer.json and "
                       "safetensors files (hoist pull REPO DIR downloads one)",
                       dir,
                       access(dir, F_OK) != 0 ? "no such folder"
                       : errno == ENOTDIR     ? "is a file"
                                              : "holds no config.json");
    if ((rc = hx_json_read(&config, path, CONFIG_MAX_BYTES, err)) == 0) {
        *arch = find_arch(config, "config.json", err);
        rc = *arch == NULL ? HX_EUNSUP
                           : (*arch)->config(&m->desc, config, "config.json", err);
    }
    hx_json_free(config);
    return rc;
}

static int open_folder(hx_model *m, const char *dir, bool read, hx_load_fn *on_load,
                       void *ud, hx_err *err)
{
    const hx_arch *arch = NULL;
    int rc;

    if ((rc = read_config(m, dir, &arch, err)) != 0 ||
        (rc = hx_weights_open(&m->weights, dir, err)) != 0)
        return rc;
    m->layer = hx_arena_alloc(&m->arena, (size_t)m->desc.n_layer * sizeof *m->layer);
    if (m->layer == NULL)
        return hx_fail(err, HX_ENOMEM, "model: no memory for %lld layers",
                       (long long)m->desc.n_layer);
    /* Read in first: binding looks at a page of every matrix, which from a cold disk in
     * random order would take longer than reading all of it in a row. */
    if (read && (rc = hx_weights_advise(m->weights, on_load, ud, err)) != 0)
        return rc;
    return arch->bind(m, err);
}

static int open_any(hx_model **out, const char *dir, bool read, hx_load_fn *on_load,
                    void *ud, hx_err *err)
{
    hx_model *m;
    int rc;

    *out = NULL;
    if (dir == NULL || dir[0] == '\0')
        return hx_fail(err, HX_EARG, "no model named; give a folder with config.json");
    if (hx_model_is_synthetic(dir))
        rc = hx_synth_open(&m, dir, on_load, ud, err);
    else if ((m = hx_new(hx_model, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "model: no memory");
    else {
        hx_arena_init(&m->arena, (size_t)1 << 36);
        if ((rc = open_folder(m, dir, read, on_load, ud, err)) != 0)
            hx_model_close(m);
    }
    if (rc != 0)
        return rc;
    visit(m, &(visitor) { add_mat, NULL, m, ALL }, err);
    *out = m;
    return 0;
}

int hx_model_open(hx_model **out, const char *dir, hx_load_fn *on_load, void *ud,
                  hx_err *err)
{
    return open_any(out, dir, true, on_load, ud, err);
}

int hx_model_open_mapped(hx_model **out, const char *dir, hx_err *err)
{
    return open_any(out, dir, false, NULL, NULL, err);
}

void hx_model_close(hx_model *m)
{
    if (m == NULL)
        return;
    hx_store_close(m->store);
    for (size_t i = 0; m->dev != NULL && i < HX_LEN(m->placed); i++)
        hx_dev_free(m->dev, &m->placed[i]);
    if (m->dev != NULL)
        hx_dev_unshared(m->dev, &m->embed_shared);
    hx_weights_close(m->weights);
    hx_unmap(m->synth, m->synth_bytes);
    hx_arena_reset(&m->arena);
    hx_free(m);
}

hx_dev_limits hx_model_limits(const hx_desc *d, int64_t max_rows, int64_t max_ctx)
{
    const int64_t wide[] = { d->width * d->streams,
                             3 * d->kda_heads * d->kda_width,
                             d->mla_heads *
                                 HX_MAX(HX_MAX(d->k_width, d->v_width), d->latent),
                             d->dense_width,
                             d->shared_width,
                             d->expert_width,
                             d->q_rank };
    hx_dev_limits l = { .max_rows = max_rows,
                        .max_active = d->n_active,
                        .max_expert = d->n_expert,
                        .max_heads =
                            HX_MAX(HX_MAX(d->kda_heads, d->mla_heads), d->index_heads),
                        .max_ctx = max_ctx };

    for (size_t i = 0; i < HX_LEN(wide); i++)
        l.max_k = HX_MAX(l.max_k, wide[i]);
    l.max_n = HX_MAX(l.max_k, d->n_vocab);
    return l;
}
