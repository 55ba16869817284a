/* synth.c - synthetic models: random weights of the real shapes and rates, made in
 * memory, for measuring speed without a checkpoint. Router biases give each expert the
 * share of picks that was measured on the real model. Called by model.c.
 *
 * Rates are those of the 3.05-bit EXL3 release: routed experts K = 3, dense MLPs K = 5,
 * other large linears K = 6, the rest BF16. Every bit pattern is a valid trellis, so the
 * weights are plain random bits, N(0, 1) after decoding; scales bring each matrix to
 * gain 1. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "glm_5_3_flash_json.h"
#include "model/model.h"
#include "routing_json.h"

#define FILL_BYTES    (1u << 20) /* filled by one worker at a time */
#define FILL_SHOW     1024       /* of these between two words of progress */
#define ROUTED_TOKENS 9250.0     /* behind the counts of routing.json */
#define N_DENSE       3          /* layers of the real model before those with experts */

typedef enum { FILL_BITS, FILL_BF16, FILL_SIGNS } fill_kind;

/* Bytes to fill, each region by its rule. value: fp16 or bf16 bits of the magnitude. */
typedef struct {
    uint8_t *p;
    size_t bytes;
    fill_kind kind;
    uint16_t value;
} region;

typedef struct {
    hx_model *m;
    uint8_t *base; /* NULL while sizes are added up */
    size_t at;
    region *region;
    int64_t n_region;
    uint64_t seed;
    bool no_memory;
    hx_err *err;
} synth;

/* ---- carving memory ---------------------------------------------------- */

static uint8_t *carve(synth *s, size_t bytes, fill_kind kind, uint16_t value)
{
    uint8_t *p = s->base != NULL ? s->base + s->at : NULL;

    if (s->base != NULL)
        s->region[s->n_region] = (region) { p, bytes, kind, value };
    s->n_region++;
    s->at += (bytes + 255) / 256 * 256;
    return p;
}

/* fp16 and bf16 bits of a power-of-two-rounded magnitude are enough: gain 1 to within
 * sqrt 2. */
static uint16_t half_pow2(double v)
{
    return (uint16_t)((uint32_t)(lrint(log2(v)) + 15) << 10);
}

static uint16_t bf16_pow2(double v)
{
    return (uint16_t)((uint32_t)(lrint(log2(v)) + 127) << 7);
}

static hx_mat exl3(synth *s, int64_t n, int64_t k, int32_t bits)
{
    hx_mat m = { .fmt = HX_FMT_EXL3,
                 .n = n,
                 .k = k,
                 .n_pad = (n + 127) / 128 * 128,
                 .k_pad = (k + 127) / 128 * 128,
                 .k2 = 2 * bits,
                 .codebook = HX_CB_MUL1 };

    m.w = carve(s, (size_t)m.n_pad * (size_t)m.k_pad / 8 * (size_t)bits, FILL_BITS, 0);
    m.suh = carve(s, (size_t)m.k_pad * 2, FILL_SIGNS, half_pow2(1));
    m.svh = carve(s, (size_t)m.n_pad * 2, FILL_SIGNS, half_pow2(1 / sqrt((double)k)));
    return m;
}

static hx_mat bf16(synth *s, int64_t n, int64_t k)
{
    hx_mat m = { .fmt = HX_FMT_BF16, .n = n, .k = k };

    m.w = carve(s, (size_t)n * (size_t)k * 2, FILL_BF16, bf16_pow2(1 / sqrt((double)k)));
    return m;
}

/* Small vectors come from the model's arena, on the second pass only. */
static hx_buf constant(synth *s, int64_t n, float v)
{
    const size_t bytes = (size_t)n * sizeof(float);
    float *p = s->base != NULL ? hx_arena_alloc(&s->m->arena, bytes) : NULL;

    s->no_memory |= s->base != NULL && p == NULL;
    for (int64_t i = 0; p != NULL && i < n; i++)
        p[i] = v;
    return (hx_buf) { p, bytes };
}

/* ---- layers ------------------------------------------------------------ */

static hx_hc make_hc(synth *s)
{
    const hx_desc *d = &s->m->desc;
    const int64_t maps = d->streams * (2 + d->streams);
    hx_hc hc = { .fn = bf16(s, maps, d->streams * d->width) };

    hc.base = constant(s, maps, 0);
    hc.scale = constant(s, 3, 1);
    return hc;
}

static hx_expert make_mlp(synth *s, int64_t width, int32_t bits)
{
    const int64_t d = s->m->desc.width;

    return (hx_expert) { exl3(s, width, d, bits), exl3(s, width, d, bits),
                         exl3(s, d, width, bits) };
}

static void make_kda(synth *s, hx_kda *w)
{
    const hx_desc *d = &s->m->desc;
    const int64_t h = d->kda_heads, k = d->kda_width, hk = h * k;

    w->n_qkv = 1;
    w->qkv[0] = exl3(s, 3 * hk, d->width, 6);
    w->f_a = bf16(s, k, d->width);
    w->f_b = bf16(s, hk, k);
    w->g_a = bf16(s, k, d->width);
    w->g_b = bf16(s, hk, k);
    w->b = bf16(s, h, d->width);
    w->o = exl3(s, d->width, hk, 6);
    w->conv = constant(s, 3 * hk * d->conv_taps, 0.5f);
    w->a_log = constant(s, h, 0);
    w->dt_bias = constant(s, hk, -3);
    w->o_norm = constant(s, k, 1);
}

static void make_mla(synth *s, hx_mla *w)
{
    const hx_desc *d = &s->m->desc;
    const int64_t i = d->index_width;

    w->q_a = exl3(s, d->q_rank, d->width, 6);
    w->q_b = exl3(s, d->mla_heads * d->k_width, d->q_rank, 6);
    w->kv_a = exl3(s, d->latent, d->width, 6);
    w->kv_b = bf16(s, d->mla_heads * (d->k_width + d->v_width), d->latent);
    w->o = exl3(s, d->width, d->mla_heads * d->v_width, 6);
    w->index_q = exl3(s, d->index_heads * i, d->q_rank, 6);
    w->index_k = bf16(s, i, d->width);
    w->index_weight = bf16(s, d->index_heads, d->width);
    w->index_gate = bf16(s, i, d->width);
    w->q_norm = constant(s, d->q_rank, 1);
    w->kv_norm = constant(s, d->latent, 1);
    w->index_norm_w = constant(s, i, 1);
    w->index_norm_b = constant(s, i, 0);
    w->ape = constant(s, d->pool_n * i, 0);
}

/* Inverse of the standard normal distribution function, by bisection. */
static double normal_quantile(double p)
{
    double lo = -10, hi = 10;

    for (int i = 0; i < 60; i++) {
        const double mid = (lo + hi) / 2;

        if (0.5 * erfc(-mid / sqrt(2.0)) < p)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* How often expert e of layer l was picked, half a time at least. More layers and experts
 * than the real ones have the same again. */
static double picks_of(const hx_json *routing, int64_t l, int64_t e)
{
    const size_t at = (size_t)HX_MAX(l - N_DENSE, 0) % hx_json_len(routing);
    const hx_json *row = hx_json_at(routing, at);

    return HX_MAX(hx_json_num(hx_json_at(row, (size_t)e % hx_json_len(row)), 0.5), 0.5);
}

/* Shares of a layer's picks, summed up to 1. */
static void set_share(synth *s, int64_t l, const hx_json *routing)
{
    const hx_desc *d = &s->m->desc;
    float *share = s->m->share + l * d->n_expert;
    double all = 0;

    for (int pass = 0; pass < 2; pass++) {
        double sum = 0;

        for (int64_t e = 0; e < d->n_expert; e++) {
            sum += picks_of(routing, l, e);
            share[e] = (float)(pass == 0 ? 0 : sum / all);
        }
        all = sum;
    }
}

/* With router logits z ~ N(0, 1), expert e is picked when sigmoid(z) + bias exceeds a
 * common threshold; the bias puts that probability at the measured share. */
static void set_router_bias(synth *s, int64_t l, hx_buf bias, const hx_json *routing)
{
    float *b = bias.p;

    for (int64_t e = 0; b != NULL && e < s->m->desc.n_expert; e++) {
        const double share = picks_of(routing, l, e) / ROUTED_TOKENS;

        b[e] = (float)-(1 / (1 + exp(-normal_quantile(1 - share))));
    }
}

static void make_layer(synth *s, int64_t l, hx_layer *w, const hx_json *routing)
{
    const hx_desc *d = &s->m->desc;

    w->mixer = (hx_mixer)d->mixer[l];
    w->ffn = (hx_ffn)d->ffn[l];
    w->hc_attn = make_hc(s);
    w->hc_ffn = make_hc(s);
    w->norm_attn = constant(s, d->width, 1);
    w->norm_ffn = constant(s, d->width, 1);
    if (w->mixer == HX_MIX_KDA)
        make_kda(s, &w->kda);
    else
        make_mla(s, &w->mla);
    if (w->ffn == HX_FFN_DENSE) {
        w->dense = make_mlp(s, d->dense_width, 5);
        return;
    }
    w->dense = make_mlp(s, d->shared_width, 6);
    w->router = bf16(s, d->n_expert, d->width);
    w->router_bias = constant(s, d->n_expert, 0);
    set_router_bias(s, l, w->router_bias, routing);
}

static void make_experts(synth *s, hx_layer *w)
{
    const hx_desc *d = &s->m->desc;

    for (int64_t e = 0; e < d->n_expert; e++) {
        const hx_expert made = make_mlp(s, d->expert_width, 3);

        if (w->expert != NULL)
            w->expert[e] = made;
    }
}

/* Walks the whole model; with base NULL it only adds up sizes. */
static void walk(synth *s, const hx_json *routing)
{
    hx_model *m = s->m;
    const hx_desc *d = &m->desc;

    s->at = 0;
    s->n_region = 0;
    m->embed = bf16(s, d->n_vocab, d->width);
    m->norm = constant(s, d->width, 1);
    for (int64_t l = 0; l < d->n_layer; l++) {
        if (s->base != NULL && d->ffn[l] == HX_FFN_MOE) {
            m->layer[l].expert =
                hx_arena_alloc(&m->arena, (size_t)d->n_expert * sizeof(hx_expert));
            s->no_memory |= m->layer[l].expert == NULL;
        }
        make_layer(s, l, &m->layer[l], routing);
    }
    m->head = exl3(s, d->n_vocab, d->width, 6);
    /* All of them together: what lies between would be locked with them. */
    for (int64_t l = 0; l < d->n_layer; l++)
        if (d->ffn[l] == HX_FFN_MOE)
            make_experts(s, &m->layer[l]);
}

/* ---- filling ----------------------------------------------------------- */

static void fill_piece(const region *r, size_t off, size_t n, uint64_t seed)
{
    uint64_t x = hx_rng_at(seed, off) | 1;

    for (size_t i = 0; i < n; i += 8) {
        const size_t left = HX_MIN(n - i, 8);
        uint64_t v;

        x ^= x << 13; /* xorshift64 */
        x ^= x >> 7;
        x ^= x << 17;
        v = x;
        if (r->kind != FILL_BITS) {
            const uint64_t keep =
                r->kind == FILL_BF16 ? 0x807f807f807f807fULL : 0x8000800080008000ULL;

            v = (v & keep) | 0x0001000100010001ULL * r->value;
        }
        memcpy(r->p + off + i, &v, left);
    }
}

typedef struct {
    const synth *s;
    const size_t *first;
    size_t total, done;
} fill_job;

/* Item i is piece done + i of all regions laid end to end. */
static void fill_range(void *ud, int64_t begin, int64_t end, int worker)
{
    const fill_job *j = ud;
    int64_t r = 0;

    (void)worker;
    for (size_t i = j->done + (size_t)begin; i < j->done + (size_t)end; i++) {
        while (r + 1 < j->s->n_region && j->first[r + 1] <= i)
            r++;
        const region *reg = &j->s->region[r];
        const size_t off = (i - j->first[r]) * FILL_BYTES;

        fill_piece(reg, off, HX_MIN(reg->bytes - off, FILL_BYTES),
                   j->s->seed + (uint64_t)r);
    }
}

static int fill(synth *s, hx_load_fn *on_load, void *ud)
{
    size_t *first = hx_new(size_t, s->n_region + 1);
    hx_pool *pool = NULL;
    fill_job job = { s, first, 0, 0 };
    int rc;

    if (first == NULL)
        return hx_fail(s->err, HX_ENOMEM, "synthetic model: no memory");
    for (int64_t r = 0; r < s->n_region; r++) {
        first[r] = job.total;
        job.total += (s->region[r].bytes + FILL_BYTES - 1) / FILL_BYTES;
    }
    first[s->n_region] = job.total;
    rc = hx_pool_open(&pool, 0, NULL, s->err);
    while (rc == 0 && job.done < job.total) {
        const size_t n = HX_MIN(job.total - job.done, (size_t)FILL_SHOW);

        hx_pool_run(pool, (int64_t)n, 16, fill_range, &job);
        job.done += n;
        if (on_load != NULL)
            on_load(ud, job.done < job.total ? s->at / job.total * job.done : s->at,
                    s->at);
    }
    hx_pool_close(pool);
    hx_free(first);
    return rc;
}

/* ---- opening ----------------------------------------------------------- */

static int embedded(const unsigned char *p, size_t n, hx_json **out, hx_err *err)
{
    return hx_json_parse(out, (hx_str) { (const char *)p, n }, 0, err);
}

/* "synthetic:glm-5.3-flash[,layers=N][,experts=N][,seed=S]" */
static int parse_spec(synth *s, const char *spec, hx_err *err)
{
    static const char name[] = "synthetic:glm-5.3-flash";
    hx_desc *d = &s->m->desc;
    const char *p = spec + sizeof name - 1;

    if (strncmp(spec, name, sizeof name - 1) != 0 || (*p != '\0' && *p != ','))
        return hx_fail(err, HX_EUNSUP,
                       "\"%.80s\": the synthetic model is synthetic:glm-5.3-flash", spec);
    while (*p == ',') {
        const char *key = p + 1, *eq = strchr(key, '=');
        char *end;
        const long long v = eq != NULL ? strtoll(eq + 1, &end, 10) : 0;
        const size_t n = eq != NULL ? (size_t)(eq - key) : 0;

        if (eq == NULL || (*end != ',' && *end != '\0') || v < 0)
            return hx_fail(err, HX_EARG,
                           "\"%.80s\": expected ,layers=N ,experts=N or ,seed=S", spec);
        if (n == 6 && strncmp(key, "layers", n) == 0 && v >= 1 && v <= HX_LAYER_MAX)
            d->n_layer = v;
        else if (n == 7 && strncmp(key, "experts", n) == 0 && v >= d->n_active &&
                 v <= 65536)
            d->n_expert = v;
        else if (n == 4 && strncmp(key, "seed", n) == 0)
            s->seed = (uint64_t)v;
        else
            return hx_fail(err, HX_EARG,
                           "\"%.80s\": layers=1..%d, experts=%lld..65536, seed=0..", spec,
                           HX_LAYER_MAX, (long long)d->n_active);
        p = end;
    }
    return 0;
}

static int build(synth *s, const char *spec, const hx_json *config,
                 const hx_json *routing, hx_load_fn *on_load, void *ud)
{
    hx_model *m = s->m;
    const uint64_t ram = hx_sys_mem_bytes(),
                   most = HX_MIN(ram - ram / 16, hx_sys_mem_free_bytes());
    int rc;

    if ((rc = hx_arch_glm5_next.config(&m->desc, config, "glm-5.3-flash.json", s->err)) !=
            0 ||
        (rc = parse_spec(s, spec, s->err)) != 0)
        return rc;
    for (int64_t l = 0; l < m->desc.n_layer; l++) { /* the real pattern, carried on */
        m->desc.mixer[l] = l % 4 == 3 ? HX_MIX_MLA : HX_MIX_KDA;
        m->desc.ffn[l] = l < N_DENSE ? HX_FFN_DENSE : HX_FFN_MOE;
    }
    m->layer = hx_arena_alloc(&m->arena, (size_t)m->desc.n_layer * sizeof *m->layer);
    if (m->layer == NULL)
        return hx_fail(s->err, HX_ENOMEM, "synthetic model: no memory for its layers");
    walk(s, routing);
    if (s->at > most)
        return hx_fail(
            s->err, HX_ENOMEM,
            "%s: needs %.1f GiB of memory, %.1f of %.1f GiB are available; end "
            "what else uses it, or ask for fewer layers or experts",
            spec, (double)s->at / (1 << 30), (double)most / (1 << 30),
            (double)ram / (1 << 30));
    m->synth_bytes = s->at;
    s->region = hx_new(region, s->n_region);
    if (s->region == NULL || (m->synth = hx_map(s->at, true)) == NULL)
        return hx_fail(s->err, HX_ENOMEM, "%s: the system refuses %.1f GiB of memory",
                       spec, (double)s->at / (1 << 30));
    m->share = hx_arena_alloc(&m->arena, (size_t)(m->desc.n_layer * m->desc.n_expert) *
                                             sizeof(float));
    if (m->share == NULL)
        return hx_fail(s->err, HX_ENOMEM, "%s: no memory for its tables", spec);
    for (int64_t l = 0; l < m->desc.n_layer; l++)
        set_share(s, l, routing);
    s->base = m->synth;
    walk(s, routing);
    if (s->no_memory)
        return hx_fail(s->err, HX_ENOMEM, "%s: no memory for its tables", spec);
    return fill(s, on_load, ud);
}

int hx_synth_open(hx_model **out, const char *spec, hx_load_fn *on_load, void *ud,
                  hx_err *err)
{
    hx_json *config = NULL, *routing = NULL;
    synth s = { .seed = 1, .err = err };
    int rc;

    *out = NULL;
    if ((s.m = hx_new(hx_model, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "synthetic model: no memory");
    hx_arena_init(&s.m->arena, (size_t)1 << 36);
    if ((rc = embedded(glm_5_3_flash_json, sizeof glm_5_3_flash_json, &config, err)) ==
            0 &&
        (rc = embedded(routing_json, sizeof routing_json, &routing, err)) == 0)
        rc = build(&s, spec, config, routing, on_load, ud);
    hx_json_free(config);
    hx_json_free(routing);
    hx_free(s.region);
    if (rc != 0)
        hx_model_close(s.m);
    else
        *out = s.m;
    return rc;
}
