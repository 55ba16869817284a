/* model.c - opens a model: recognises its family, lets it read the config and bind tensors.
 * Called by the engine and by inspect. Knows no tensor names. */
#include <stdio.h>

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

static void add_mat(hx_model *m, const hx_mat *w)
{
    if (w->w == NULL)
        return;
    m->n_param += (uint64_t)w->n * (uint64_t)w->k;
    m->weight_bytes += hx_mat_bytes(w);
}

static void add_expert(hx_model *m, const hx_expert *e)
{
    add_mat(m, &e->gate);
    add_mat(m, &e->up);
    add_mat(m, &e->down);
}

/* Parameters and bytes of all matrices (vectors are noise beside them). */
static void add_up(hx_model *m)
{
    add_mat(m, &m->embed);
    add_mat(m, &m->head);
    for (int64_t l = 0; l < m->desc.n_layer; l++) {
        const hx_layer *w = &m->layer[l];
        const hx_mat *all[] = { &w->hc_attn.fn, &w->hc_ffn.fn, &w->kda.qkv[0], &w->kda.qkv[1],
                                &w->kda.qkv[2], &w->kda.f_a, &w->kda.f_b, &w->kda.b, &w->kda.g_a,
                                &w->kda.g_b, &w->kda.o, &w->mla.q_a, &w->mla.q_b, &w->mla.kv_a,
                                &w->mla.kv_b, &w->mla.o, &w->mla.index_q, &w->mla.index_k,
                                &w->mla.index_weight, &w->mla.index_gate, &w->router };

        for (size_t i = 0; i < HX_LEN(all); i++)
            add_mat(m, all[i]);
        add_expert(m, &w->dense);
        for (int64_t e = 0; w->expert != NULL && e < m->desc.n_expert; e++)
            add_expert(m, &w->expert[e]);
    }
}

static const hx_arch *find_arch(const hx_json *config, const char *file, hx_err *err)
{
    const hx_str type = hx_json_str(hx_json_get(config, "model_type"));

    for (size_t i = 0; i < HX_LEN(archs); i++)
        if (hx_str_is(type, archs[i]->model_type))
            return archs[i];
    hx_fail(err, HX_EUNSUP, "%s: model_type \"%.*s\" is not supported; this program runs glm5_next (GLM-5.3-Flash)",
            file, (int)HX_MIN(type.n, 60), type.p != NULL ? type.p : "");
    return NULL;
}

static int read_config(hx_model *m, const char *dir, const hx_arch **arch, hx_err *err)
{
    char path[4096], *text = NULL;
    size_t n = 0;
    hx_json *config = NULL;
    int rc;

    if ((size_t)snprintf(path, sizeof path, "%s/config.json", dir) >= sizeof path)
        return hx_fail(err, HX_EARG, "model folder: name longer than %zu bytes", sizeof path);
    if ((rc = hx_file_read(path, CONFIG_MAX_BYTES, &text, &n, err)) != 0)
        return rc;
    if ((rc = hx_json_parse(&config, (hx_str){ text, n }, 0, err)) == 0) {
        *arch = find_arch(config, "config.json", err);
        rc = *arch == NULL ? HX_EUNSUP : (*arch)->config(&m->desc, config, "config.json", err);
    }
    hx_json_free(config);
    hx_free(text);
    return rc;
}

static int open_folder(hx_model *m, const char *dir, hx_load_fn *on_load, void *ud, hx_err *err)
{
    const hx_arch *arch = NULL;
    int rc;

    if ((rc = read_config(m, dir, &arch, err)) != 0 ||
        (rc = hx_weights_open(&m->weights, dir, err)) != 0)
        return rc;
    m->layer = hx_arena_alloc(&m->arena, (size_t)m->desc.n_layer * sizeof *m->layer);
    if (m->layer == NULL)
        return hx_fail(err, HX_ENOMEM, "model: no memory for %lld layers", (long long)m->desc.n_layer);
    /* Read in first: binding looks at a page of every matrix, which from a cold disk in random
     * order would take longer than reading all of it in a row. */
    if ((rc = hx_weights_advise(m->weights, on_load, ud, err)) != 0)
        return rc;
    return arch->bind(m, err);
}

int hx_model_open(hx_model **out, const char *dir, hx_load_fn *on_load, void *ud, hx_err *err)
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
        if ((rc = open_folder(m, dir, on_load, ud, err)) != 0)
            hx_model_close(m);
    }
    if (rc != 0)
        return rc;
    add_up(m);
    *out = m;
    return 0;
}

void hx_model_close(hx_model *m)
{
    if (m == NULL)
        return;
    hx_weights_close(m->weights);
    hx_unmap(m->synth, m->synth_bytes);
    hx_arena_reset(&m->arena);
    hx_free(m);
}

hx_dev_limits hx_model_limits(const hx_desc *d, int64_t max_rows, int64_t max_ctx)
{
    const int64_t wide[] = { d->width * d->streams, 3 * d->kda_heads * d->kda_width,
                             d->mla_heads * HX_MAX(HX_MAX(d->k_width, d->v_width), d->latent),
                             d->dense_width, d->shared_width, d->expert_width, d->q_rank };
    hx_dev_limits l = { .max_rows = max_rows, .max_active = d->n_active, .max_expert = d->n_expert,
                        .max_heads = HX_MAX(HX_MAX(d->kda_heads, d->mla_heads), d->index_heads),
                        .max_ctx = max_ctx };

    for (size_t i = 0; i < HX_LEN(wide); i++)
        l.max_k = HX_MAX(l.max_k, wide[i]);
    l.max_n = HX_MAX(l.max_k, d->n_vocab);
    return l;
}
