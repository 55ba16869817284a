/* api_misc.c - routes that answer at once or after one forward pass, and belong to no
 * dialect of answers: embeddings, the chat template, properties, the API's description.
 *
 * Called by server.c on a worker. Never generates. */
#include "serve/serve.h"

#include <math.h>
#include <stdio.h>

#include "openapi_json.h"

#define HIDDEN_MAX_BYTES (128u << 20) /* hidden states of one input */

static int reply(hx_call *c, hx_sb *b)
{
    hx_server_reply_json(c, b);
    hx_sb_free(b);
    return 0;
}

/* ---- embeddings --------------------------------------------------------- */

typedef struct embedding embedding;
struct embedding {
    hx_prompts inputs;
    void (*put)(hx_sb *b, const hx_call *c, const embedding *e); /* the answer */
    bool base64;
    float *vector; /* [inputs.n, width] */
    hx_str model;
};

/* The mean over all positions of the state after the last norm, of length 1. Sums in
 * double: the order of a long input's additions must not show. */
static void pool(const float *hidden, int64_t n, int64_t width, float *out)
{
    double length = 0;

    for (int64_t i = 0; i < width; i++) {
        double sum = 0;

        for (int64_t r = 0; r < n; r++)
            sum += (double)hidden[r * width + i];
        out[i] = (float)(sum / (double)n);
        length += (double)out[i] * (double)out[i];
    }
    length = sqrt(length);
    for (int64_t i = 0; length > 0 && i < width; i++)
        out[i] = (float)((double)out[i] / length);
}

static int embed(hx_call *c, embedding *e, int32_t i)
{
    const hx_prompt *p = &e->inputs.prompt[i];
    const int64_t width = c->info->width;
    hx_score_args a = { .tokens = p->id, .n_tokens = p->n };
    hx_err err = { 0 };
    int rc;

    a.hidden = hx_calloc((size_t)(p->n * width), sizeof *a.hidden);
    if (a.hidden == NULL)
        return hx_server_problem(c, 503, "input", "out_of_memory",
                                 "input: no memory for the states of %lld tokens",
                                 (long long)p->n);
    if ((rc = hx_score(c->engine, &a, &err)) == 0)
        pool(a.hidden, p->n, width, e->vector + i * width);
    else
        hx_server_problem_err(c, rc, "input", &err);
    hx_free(a.hidden);
    return rc != 0 ? HX_EARG : 0;
}

static void put_base64(hx_sb *b, const unsigned char *p, size_t n)
{
    static const char digits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    for (size_t i = 0; i < n; i += 3) {
        const size_t left = HX_MIN(n - i, 3u);
        const uint32_t v = (uint32_t)p[i] << 16 |
                           (left > 1 ? (uint32_t)p[i + 1] << 8 : 0) |
                           (left > 2 ? (uint32_t)p[i + 2] : 0);
        const char quad[4] = { digits[v >> 18], digits[v >> 12 & 63],
                               left > 1 ? digits[v >> 6 & 63] : '=',
                               left > 2 ? digits[v & 63] : '=' };

        hx_sb_add(b, quad, sizeof quad);
    }
}

/* base64: little-endian floats, as all machines that this runs on have them. */
static void put_vector(hx_sb *b, const embedding *e, const float *v, int64_t width)
{
    if (e->base64) {
        hx_sb_char(b, '"');
        put_base64(b, (const unsigned char *)v, (size_t)width * sizeof *v);
        hx_sb_char(b, '"');
        return;
    }
    hx_sb_char(b, '[');
    for (int64_t i = 0; i < width; i++)
        hx_sb_printf(b, i > 0 ? ",%.9g" : "%.9g", (double)v[i]);
    hx_sb_char(b, ']');
}

static void put_openai(hx_sb *b, const hx_call *c, const embedding *e)
{
    const int64_t width = c->info->width;

    hx_sb_str(b, "{\"object\":\"list\",\"data\":[");
    for (int32_t i = 0; i < e->inputs.n; i++) {
        hx_sb_printf(b, "%s{\"object\":\"embedding\",\"index\":%d,\"embedding\":",
                     i > 0 ? "," : "", i);
        put_vector(b, e, e->vector + i * width, width);
        hx_sb_char(b, '}');
    }
    hx_sb_str(b, "],\"model\":");
    hx_json_put_str(b, e->model);
    hx_sb_printf(b, ",\"usage\":{\"prompt_tokens\":%lld,\"total_tokens\":%lld}}",
                 (long long)c->n_prompt, (long long)c->n_prompt);
}

static void put_ollama(hx_sb *b, const hx_call *c, const embedding *e)
{
    const int64_t width = c->info->width;

    hx_sb_str(b, "{\"model\":");
    hx_json_put_str(b, e->model);
    hx_sb_str(b, ",\"embeddings\":[");
    for (int32_t i = 0; i < e->inputs.n; i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_vector(b, e, e->vector + i * width, width);
    }
    hx_sb_printf(b,
                 "],\"total_duration\":%lld,\"load_duration\":0,\"prompt_eval_count\":"
                 "%lld}",
                 (long long)(hx_now_us() - c->start_us) * 1000, (long long)c->n_prompt);
}

static void put_ollama_one(hx_sb *b, const hx_call *c, const embedding *e)
{
    hx_sb_str(b, "{\"embedding\":");
    put_vector(b, e, e->vector, c->info->width);
    hx_sb_char(b, '}');
}

static int embed_all(hx_call *c)
{
    embedding *e = c->state;
    hx_sb b = { 0 };
    int rc;

    for (int32_t i = 0; i < e->inputs.n; i++) {
        if (hx_http_gone(c->x))
            return hx_server_end(c, HX_ECANCEL, HX_STR(""), NULL, NULL);
        if ((rc = embed(c, e, i)) != 0)
            return rc;
    }
    e->put(&b, c, e);
    return reply(c, &b);
}

static int check_embedding(hx_call *c, const char *param, const embedding *e)
{
    const hx_generate as_prompts = { .prompt = e->inputs.prompt,
                                     .n_prompt = e->inputs.n,
                                     .n = 1 };
    const int64_t width = c->info->width;
    const int64_t most = (int64_t)(HIDDEN_MAX_BYTES / sizeof(float)) / HX_MAX(width, 1);
    int rc;

    if (width < 1)
        return hx_server_problem(c, 400, "model", "unsupported_value",
                                 "model: this one gives no hidden states");
    if ((rc = hx_gen_check(c, &as_prompts)) != 0) {
        snprintf(c->problem.param, sizeof c->problem.param, "%s", param);
        return rc;
    }
    for (int32_t i = 0; i < e->inputs.n; i++) {
        c->n_prompt += e->inputs.prompt[i].n;
        if (e->inputs.prompt[i].n > most)
            return hx_server_problem(c, 400, param, "invalid_value",
                                     "%s[%d]: %lld tokens, at most %lld", param, i,
                                     (long long)e->inputs.prompt[i].n, (long long)most);
    }
    return 0;
}

static int open_embedding(hx_call *c, embedding **out)
{
    *out = hx_arena_alloc(&c->arena, sizeof **out);
    if (*out == NULL)
        return hx_server_no_memory(c);
    (*out)->model = hx_server_model_name(c->server);
    return hx_params_str(c, c->body, "model", &(*out)->model);
}

/* param: the field that holds what is to be embedded. */
static int begin_embedding(hx_call *c, const char *param, int kinds, embedding *e)
{
    int64_t wanted = c->info->width;
    int rc;

    if ((rc = hx_params_int(c, c->body, "dimensions", 1, INT32_MAX, &wanted)) != 0)
        return rc;
    if (wanted != c->info->width)
        return hx_server_problem(c, 400, "dimensions", "unsupported_value",
                                 "dimensions: this model's vectors have %d numbers and "
                                 "cannot be shortened",
                                 c->info->width);
    if ((rc = hx_prompts_read(c, param, kinds, false, &e->inputs)) != 0 ||
        (rc = check_embedding(c, param, e)) != 0)
        return rc;
    e->vector = hx_arena_alloc(&c->arena, (size_t)e->inputs.n * (size_t)c->info->width *
                                              sizeof *e->vector);
    if (e->vector == NULL)
        return hx_server_no_memory(c);
    c->state = e;
    return hx_server_defer(c, embed_all, false);
}

int hx_embeddings(hx_call *c)
{
    hx_str format = HX_STR("float");
    embedding *e;
    int rc;

    if ((rc = open_embedding(c, &e)) != 0 ||
        (rc = hx_params_str(c, c->body, "encoding_format", &format)) != 0)
        return rc;
    e->base64 = hx_str_is(format, "base64");
    if (!e->base64 && !hx_str_is(format, "float"))
        return hx_server_problem(c, 400, "encoding_format", "invalid_value",
                                 "encoding_format: expected \"float\" or \"base64\"");
    e->put = put_openai;
    return begin_embedding(c, "input", HX_PROMPT_TEXT | HX_PROMPT_IDS, e);
}

int hx_embeddings_ollama(hx_call *c)
{
    embedding *e;
    const int rc = open_embedding(c, &e);

    if (rc != 0)
        return rc;
    e->put = put_ollama;
    return begin_embedding(c, "input", HX_PROMPT_TEXT, e);
}

int hx_embeddings_ollama_one(hx_call *c)
{
    hx_str prompt;
    embedding *e;
    int rc;

    if ((rc = open_embedding(c, &e)) != 0 ||
        (rc = hx_params_str(c, c->body, "prompt", &prompt)) != 0)
        return rc;
    e->put = put_ollama_one;
    return begin_embedding(c, "prompt", HX_PROMPT_TEXT, e);
}

/* ---- the chat template, properties --------------------------------------- */

int hx_misc_apply_template(hx_call *c)
{
    hx_generate g = { .chat = true };
    const hx_render_opt opt = { .official = hx_server_official_tokens(c->server) };
    hx_err err = { 0 };
    hx_sb b = { 0 };
    int32_t *id;
    char *text;
    int64_t n;
    int rc;

    if ((rc = hx_openai_vars(c, &g)) != 0)
        return rc;
    if ((rc = hx_render(c->engine, g.vars, &opt, &id, &n, &text, &err)) != 0)
        return hx_server_problem_err(c, rc, "messages", &err);
    const hx_str prompt = hx_str_c(text);
    /* As generate.c does to the ids. */
    const bool close = g.no_thinking && prompt.n >= 7 &&
                       memcmp(prompt.p + prompt.n - 7, "<think>", 7) == 0;
    hx_sb all = { 0 };
    hx_sb_add(&all, prompt.p, prompt.n);
    if (close)
        hx_sb_str(&all, "</think>");
    hx_sb_str(&b, "{\"prompt\":");
    hx_json_put_str(&b, (hx_str) { all.p, all.n });
    hx_sb_char(&b, '}');
    b.bad = b.bad || all.bad;
    hx_sb_free(&all);
    hx_free(text);
    hx_free(id);
    c->n_prompt = n;
    return reply(c, &b);
}

int hx_misc_props(hx_call *c)
{
    const hx_info *i = c->info;
    hx_sb b = { 0 };

    hx_sb_printf(&b,
                 "{\"default_generation_settings\":{\"n_ctx\":%lld,\"params\":{"
                 "\"temperature\":%.6g,\"top_p\":%.6g,\"top_k\":%d}},\"total_slots\":%d,"
                 "\"model_alias\":",
                 (long long)i->ctx_tokens, (double)i->temperature, (double)i->top_p,
                 i->top_k, i->max_streams);
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b, ",\"model_path\":");
    hx_json_put_str(&b, hx_str_c(i->name));
    hx_sb_str(&b, ",\"modalities\":{\"vision\":false,\"audio\":false},"
                  "\"build_info\":\"hoist-" HX_VERSION "\",\"is_sleeping\":false}");
    return reply(c, &b);
}

int hx_misc_openapi(hx_call *c)
{
    c->status = 200;
    hx_http_reply(c->x, 200, "application/json", NULL,
                  (hx_str) { (const char *)openapi_json, sizeof openapi_json });
    return 0;
}
