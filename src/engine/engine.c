/* engine.c - defines hoist.h: opening a model, text, submitting and reading streams;
 * engine_memory.c opens its device, engine_figures.c has what can be observed, reuse.c what
 * is asked of kept prefixes.
 *
 * Everything here runs on callers' threads; generation itself is sched.c on the engine
 * thread. Talks to it through the inbox and each stream's ring, under engine->lock. */
#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "engine/engine.h"

#define TEXT_FILE_MAX (256u << 20)

/* ---- checking ------------------------------------------------ */

void hx_engine_nudge(hx_engine *e)
{
    atomic_store(&e->nudge, true);
    pthread_cond_signal(&e->wake);
}

/* name: value must lie in min..max; NaN does not. */
static int check_range(double v, double min, double max, const char *name, hx_err *err)
{
    if (v >= min && v <= max)
        return 0;
    return hx_fail(err, HX_EARG, "%s: %g, expected %.10g..%.10g", name, v, min, max);
}

/* ---- open ------------------------------------------------------------- */

static int read_text(const char *dir, const char *name, char **out, size_t *n,
                     hx_err *err)
{
    char path[4096];

    *out = NULL;
    *n = 0;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", dir, name) >= sizeof path)
        return hx_fail(err, HX_EARG, "model folder: name too long");
    return hx_file_exists(path) ? hx_file_read(path, TEXT_FILE_MAX, out, n, err) : 0;
}

static int read_json(const char *dir, const char *name, hx_json **out, hx_err *err)
{
    hx_err why = { 0 };
    char *text;
    size_t n;
    int rc;

    *out = NULL;
    if ((rc = read_text(dir, name, &text, &n, err)) != 0 || text == NULL)
        return rc;
    if ((rc = hx_json_parse(out, (hx_str) { text, n }, 0, &why)) != 0)
        hx_fail(err, rc, "%s: %.200s", name, why.msg);
    hx_free(text);
    return rc;
}

static int open_tokenizer(hx_engine *e, const char *dir, hx_err *err)
{
    char *text;
    size_t n;
    int rc;

    if ((rc = read_text(dir, "tokenizer.json", &text, &n, err)) != 0 || text == NULL)
        return rc;
    rc = hx_tok_open(&e->tok, (hx_str) { text, n }, "tokenizer.json", err);
    hx_free(text);
    if (rc != 0)
        return rc;
    e->info.n_token = hx_tok_count(e->tok);
    if (e->info.n_token > e->info.n_vocab)
        return hx_fail(err, HX_EFORMAT,
                       "tokenizer.json: %d ids, but the output matrix has %d rows",
                       e->info.n_token, e->info.n_vocab);
    for (int32_t i = 0; i < e->info.n_token; i++)
        if (hx_tok_bytes(e->tok, i).n > HX_TOKEN_BYTES)
            return hx_fail(
                err, HX_ELIMIT,
                "tokenizer.json: token %d has %zu bytes, at most %d are supported", i,
                hx_tok_bytes(e->tok, i).n, HX_TOKEN_BYTES);
    return 0;
}

/* What grammars choose from. Added tokens are never taken for their bytes: an answer cannot
 * spell <think> or a tool call inside a string. */
static int open_vocab(hx_engine *e, hx_err *err)
{
    const int32_t n = e->info.n_token;
    hx_str *bytes = hx_new(hx_str, n);
    bool *special = hx_new(bool, n);
    int rc = HX_ENOMEM;

    if (e->tok == NULL)
        rc = 0;
    else if (bytes == NULL || special == NULL)
        hx_fail(err, rc, "grammar vocabulary: no memory for %d tokens", n);
    else {
        for (int32_t i = 0; i < n; i++) {
            bytes[i] = hx_tok_bytes(e->tok, i);
            special[i] = bytes[i].n > 0 && hx_tok_find(e->tok, bytes[i]) == i;
        }
        const hx_vocab_opt opt = { .bytes = bytes,
                                   .special = special,
                                   .n_token = n,
                                   .n_vocab = e->info.n_vocab,
                                   .end = e->eos,
                                   .n_end = e->info.n_eos };
        rc = hx_vocab_open(&e->vocab, &opt, err);
    }
    hx_free(bytes);
    hx_free(special);
    return rc;
}

/* chat_template.jinja, else chat_template of tokenizer_config.json, else none. */
static int open_template(hx_engine *e, const char *dir, hx_err *err)
{
    const char *name = "chat_template.jinja";
    hx_json *config = NULL;
    hx_str source;
    char *text;
    size_t n;
    int rc;

    if ((rc = read_text(dir, name, &text, &n, err)) != 0)
        return rc;
    source = (hx_str) { text, n };
    if (text == NULL) {
        if ((rc = read_json(dir, "tokenizer_config.json", &config, err)) != 0)
            return rc;
        source = hx_json_str(hx_json_get(config, "chat_template"));
        name = "tokenizer_config.json: chat_template";
    }
    if (source.p != NULL)
        rc = hx_jinja_open(&e->chat, source, name, err);
    hx_json_free(config);
    hx_free(text);
    return rc;
}

static int add_eos(hx_engine *e, int64_t id, const char *file, hx_err *err)
{
    if (id < 0 || id >= e->info.n_vocab)
        return hx_fail(err, HX_EFORMAT, "%s: eos_token_id %lld: expected an id below %d",
                       file, (long long)id, e->info.n_vocab);
    for (int32_t i = 0; i < e->info.n_eos; i++)
        if (e->eos[i] == id)
            return 0;
    if (e->info.n_eos == (int32_t)HX_LEN(e->eos))
        return hx_fail(err, HX_ELIMIT, "%s: more than %zu end ids", file, HX_LEN(e->eos));
    e->eos[e->info.n_eos++] = (int32_t)id;
    return 0;
}

/* Sampling defaults and end ids; those of the config count where the file names none. */
static int read_generation(hx_engine *e, const char *dir, hx_err *err)
{
    const hx_desc *d = &e->model->desc;
    hx_json *g = NULL;
    const hx_json *eos;
    int rc = read_json(dir, "generation_config.json", &g, err);

    e->info.temperature = (float)hx_json_num(hx_json_get(g, "temperature"), 1.0);
    e->info.top_p = (float)hx_json_num(hx_json_get(g, "top_p"), 1.0);
    e->info.top_k = (int32_t)hx_json_int(hx_json_get(g, "top_k"), 0);
    eos = hx_json_get(g, "eos_token_id");
    if (rc == 0 && hx_json_kind(eos) == HX_JSON_INT)
        rc = add_eos(e, hx_json_int(eos, -1), "generation_config.json", err);
    for (size_t i = 0;
         rc == 0 && hx_json_kind(eos) == HX_JSON_ARRAY && i < hx_json_len(eos); i++)
        rc = add_eos(e, hx_json_int(hx_json_at(eos, i), -1), "generation_config.json",
                     err);
    for (int32_t i = 0; rc == 0 && e->info.n_eos == 0 && i < d->n_eos; i++)
        rc = add_eos(e, d->eos[i], "config.json", err);
    hx_json_free(g);
    return rc;
}

static void describe(hx_engine *e, const char *dir)
{
    const hx_desc *d = &e->model->desc;
    size_t n = strlen(dir);

    while (n > 1 && dir[n - 1] == '/')
        n--;
    const char *base = memrchr(dir, '/', n);
    base = base != NULL ? base + 1 : dir;
    snprintf(e->name, sizeof e->name, "%.*s", (int)(dir + n - base), base);
    snprintf(e->arch, sizeof e->arch, "%s", d->arch);
    e->info.name = e->name;
    e->info.arch = e->arch;
    e->info.reply_format = d->reply_format;
    e->info.ctx_trained_tokens = d->ctx_trained;
    e->info.n_vocab = e->info.n_token = (int32_t)d->n_vocab;
    e->info.n_layer = (int32_t)d->n_layer;
    e->info.n_expert = (int32_t)d->n_expert;
    e->info.n_expert_active = (int32_t)d->n_active;
    e->info.width = (int32_t)d->width;
    e->info.eos = e->eos;
    e->info.n_param = e->model->n_param;
    e->info.weight_bytes = e->model->weight_bytes;
}

static int open_rest(hx_engine *e, const hx_options *opt, hx_err *err)
{
    const int32_t n = e->info.max_streams;
    int rc;

    if ((rc = hx_model_open(&e->model, opt->model_dir, opt->on_load, opt->on_load_ud,
                            err)) != 0)
        return rc;
    describe(e, opt->model_dir);
    if ((rc = hx_grammars_open(&e->grammars, err)) != 0)
        return rc;
    if (!hx_model_is_synthetic(opt->model_dir) &&
        ((rc = open_tokenizer(e, opt->model_dir, err)) != 0 ||
         (rc = open_template(e, opt->model_dir, err)) != 0 ||
         (rc = read_generation(e, opt->model_dir, err)) != 0 ||
         (rc = open_vocab(e, err)) != 0))
        return rc;
    if ((rc = hx_engine_memory_open(e, opt, err)) != 0)
        return rc;
    e->wait = hx_new(hx_stream *, e->info.max_queue + n);
    e->prompt = hx_new(hx_pick_prompt, n);
    e->costs.n_layer = e->model->desc.n_layer;
    e->costs.n_block = e->prefill_rows / HX_PAGE;
    e->costs.layer = hx_new(float, e->costs.n_layer * e->costs.n_block);
    e->pick.share = opt->decode_share > 0 ? opt->decode_share : 0.5f;
    e->client_streams = opt->client_streams;
    e->client_queue = opt->client_queue;
    e->run = hx_new(hx_stream *, n);
    e->row = hx_new(hx_sample_row, n);
    e->span = hx_new(hx_span, n);
    e->id = hx_new(int32_t, n);
    e->draw = hx_new(uint64_t, n);
    e->score_logit = hx_new(float, HX_SCORE_ROWS *(int64_t)e->info.n_vocab);
    e->score_hidden = hx_new(float, HX_SCORE_ROWS * e->model->desc.width);
    if (!e->wait || !e->prompt || !e->costs.layer || !e->run || !e->row || !e->span ||
        !e->draw || !e->id || !e->score_logit || !e->score_hidden)
        return hx_fail(err, HX_ENOMEM, "engine: no memory for its tables");
    if ((rc = hx_reuse_open(e, opt, err)) != 0 || (rc = hx_health_open(e, opt, err)) != 0)
        return rc;
    if (pthread_create(&e->thread, NULL, hx_sched_run, e) != 0)
        return hx_fail(err, HX_EIO, "engine: the system refuses another thread");
    e->started = true;
    hx_health_start(e);
    rc = hx_health_wait_known(e, err);
    return rc != 0 ? rc : hx_scrub_start(e, opt, err);
}

static int check_options(const hx_options *o, hx_err *err)
{
    const struct {
        const char *name;
        double v, max;
    } all[] = {
        { "decode_share", o->decode_share, 1 },
        { "max_streams", o->max_streams, HX_SPAN_MAX },
        { "ctx_tokens", (double)o->ctx_tokens, INT32_MAX },
        { "max_queue", (double)o->max_queue, 1 << 20 },
        { "n_threads", o->n_threads, INT32_MAX },
        { "kv", o->kv, HX_KV_FP8 },
        { "client_streams", o->client_streams, INT32_MAX },
        { "client_queue", (double)o->client_queue, 1e12 },
        { "stall_ms", (double)o->stall_ms, 1e12 },
        { "canary_ms", (double)o->canary_ms, 1e12 },
        { "verify_ms", (double)o->verify_ms, 1e12 },
    };
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < HX_LEN(all); i++)
        rc = check_range(all[i].v, 0, all[i].max, all[i].name, err);
    return rc;
}

int hx_open(hx_engine **out, const hx_options *opt, hx_err *err)
{
    hx_engine *e;
    int rc;

    *out = NULL;
    if ((rc = check_options(opt, err)) != 0)
        return rc;
    if ((e = hx_new(hx_engine, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "engine: no memory");
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->score_lock, NULL);
    hx_cond_init(&e->wake);
    hx_cond_init(&e->health.quit);
    hx_cond_init(&e->scrub.quit);
    pthread_mutex_init(&e->health.record_lock, NULL);
    e->info.max_streams = opt->max_streams != 0 ? opt->max_streams : 8;
    e->info.max_queue = opt->max_queue != 0 ? opt->max_queue : 256;
    if ((rc = open_rest(e, opt, err)) != 0) {
        hx_close(e);
        return rc;
    }
    *out = e;
    return 0;
}

void hx_close(hx_engine *e)
{
    if (e == NULL)
        return;
    if (e->started) {
        pthread_mutex_lock(&e->lock);
        e->closing = true;
        hx_engine_nudge(e);
        pthread_mutex_unlock(&e->lock);
        pthread_join(e->thread, NULL);
    }
    hx_scrub_close(e);
    hx_health_close(e);
    hx_reuse_close(e);
    hx_graph_close(e->decode);
    hx_graph_close(e->prefill);
    hx_cache_close(e->cache);
    if (e->dev != NULL) {
        hx_dev_unshared(e->dev, &e->landed[0]);
        hx_dev_unshared(e->dev, &e->landed[1]);
        hx_dev_free(e->dev, &e->out_id);
        hx_dev_free(e->dev, &e->out_logprob);
        hx_dev_free(e->dev, &e->out_top);
        hx_dev_free(e->dev, &e->out_scratch);
    }
    hx_model_close(e->model);
    hx_dev_close(e->dev);
    hx_grammars_close(e->grammars);
    hx_vocab_close(e->vocab);
    hx_jinja_close(e->chat);
    hx_tok_close(e->tok);
    hx_free(e->wait);
    hx_free(e->prompt);
    hx_free(e->costs.layer);
    hx_free(e->run);
    hx_free(e->row);
    hx_free(e->span);
    hx_free(e->draw);
    hx_free(e->id);
    hx_free(e->score_logit);
    hx_free(e->score_hidden);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->score_lock);
    pthread_mutex_destroy(&e->lock);
    hx_free(e);
}

void hx_get_info(const hx_engine *e, hx_info *out)
{
    *out = e->info;
}

/* ---- text ------------------------------------------------------------- */

int64_t hx_tokenize(hx_engine *e, hx_str text, bool special, int32_t *out, int64_t cap)
{
    const hx_tok_opt opt = { .special = special };
    hx_ids ids = { 0 };
    int64_t n;
    int rc;

    if (e->tok == NULL)
        return HX_EUNSUP;
    if ((rc = hx_tok_encode(e->tok, text, &opt, &ids, NULL)) != 0) {
        hx_ids_free(&ids);
        return rc;
    }
    n = ids.n;
    if (HX_MIN(n, cap) > 0)
        memcpy(out, ids.p, (size_t)HX_MIN(n, cap) * sizeof *out);
    hx_ids_free(&ids);
    return n;
}

int64_t hx_detokenize(hx_engine *e, const int32_t *tok, int64_t n, char *out, int64_t cap)
{
    hx_utf8_stream utf8 = { 0 };
    hx_sb text = { 0 };
    int64_t len;

    if (e->tok == NULL)
        return HX_EUNSUP;
    for (int64_t i = 0; i < n; i++) {
        if (tok[i] < 0 || tok[i] >= e->info.n_vocab) {
            hx_sb_free(&text);
            return HX_EARG;
        }
        hx_utf8_feed(&utf8, hx_tok_bytes(e->tok, tok[i]), &text);
    }
    hx_utf8_end(&utf8, &text);
    len = text.bad ? HX_ENOMEM : (int64_t)text.n;
    if (HX_MIN(len, cap) > 0)
        memcpy(out, text.p, (size_t)HX_MIN(len, cap));
    hx_sb_free(&text);
    return len;
}

hx_str hx_token_bytes(const hx_engine *e, int32_t id, bool *special)
{
    if (special != NULL)
        *special = e->tok != NULL && hx_tok_is_special(e->tok, id);
    return e->tok != NULL ? hx_tok_bytes(e->tok, id) : (hx_str) { NULL, 0 };
}

int32_t hx_token_id(const hx_engine *e, hx_str text)
{
    return e->tok != NULL ? hx_tok_find(e->tok, text) : -1;
}

int hx_render(hx_engine *e, hx_str json, const hx_render_opt *opt, int32_t **out,
              int64_t *n_out, char **text_out, hx_err *err)
{
    hx_json *vars = NULL;
    hx_sb text = { 0 }, user = { 0 };
    hx_ids ids = { 0 };
    int rc;

    *out = NULL;
    *n_out = 0;
    if (e->chat == NULL || e->tok == NULL)
        return hx_fail(err, HX_EUNSUP, "model %s: its folder holds no %s", e->name,
                       e->tok == NULL ? "tokenizer.json; only token ids can be read"
                                      : "chat_template.jinja; send a raw prompt instead");
    if ((rc = hx_json_parse(&vars, json, 128, err)) != 0)
        return rc;
    const hx_jinja_opt jopt = { .now_s = (int64_t)time(NULL) };
    if ((rc = hx_jinja_run(e->chat, vars, &jopt, &text, &user, err)) != 0)
        goto done;
    const hx_tok_opt topt = { .special = true,
                              .user = opt != NULL && opt->official
                                          ? NULL
                                          : (const uint8_t *)user.p };
    if (text.n > 0)
        rc = hx_tok_encode(e->tok, (hx_str) { text.p, text.n }, &topt, &ids, err);
    if (rc == 0) {
        *out = ids.p;
        *n_out = ids.n;
        ids = (hx_ids) { 0 };
        if (text_out != NULL) {
            *text_out = text.p;
            text = (hx_sb) { 0 };
        }
    }
done:
    hx_json_free(vars);
    hx_sb_free(&text);
    hx_sb_free(&user);
    hx_ids_free(&ids);
    return rc;
}

/* ---- submit ----------------------------------------------------------- */

static int check_ids(const hx_engine *e, const int32_t *id, int64_t n, const char *what,
                     hx_err *err)
{
    for (int64_t i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= e->info.n_vocab)
            return hx_fail(err, HX_EARG, "%s[%lld]: id %d, expected 0..%d", what,
                           (long long)i, id[i], e->info.n_vocab - 1);
    return 0;
}

static int check_request(const hx_engine *e, const hx_request *r, hx_err *err)
{
    int rc;

    if (r->n_tokens < 1)
        return hx_fail(err, HX_EARG, "prompt: empty; at least one token is needed");
    if (r->n_media > 0)
        return hx_fail(err, HX_EUNSUP,
                       "media: %d of them, but model %s reads text only; leave them out",
                       r->n_media, e->name);
    if (r->n_tokens >= e->info.ctx_tokens)
        return hx_fail(err, HX_ELIMIT,
                       "prompt: %lld tokens do not fit the context of %lld tokens (one "
                       "is needed for the answer)",
                       (long long)r->n_tokens, (long long)e->info.ctx_tokens);
    if ((rc = check_ids(e, r->tokens, r->n_tokens, "prompt", err)) != 0 ||
        (rc = check_ids(e, r->stop_ids, r->n_stop_ids, "stop_token_ids", err)) != 0 ||
        (rc = check_ids(e, &r->think_end, 1, "think_end", err)) != 0 ||
        (rc = check_range(r->temperature, 0, 100, "temperature", err)) != 0 ||
        (rc = check_range(r->top_p, 0, 1, "top_p", err)) != 0 ||
        (rc = check_range(r->min_p, 0, 1, "min_p", err)) != 0 ||
        (rc = check_range(r->top_k, 0, INT32_MAX, "top_k", err)) != 0 ||
        (rc = check_range(r->repeat_penalty, 0, 100, "repetition_penalty", err)) != 0 ||
        (rc = check_range(r->presence_penalty, -100, 100, "presence_penalty", err)) !=
            0 ||
        (rc = check_range(r->frequency_penalty, -100, 100, "frequency_penalty", err)) !=
            0 ||
        (rc = check_range(r->n_top, 0, HX_TOP_MAX, "top_logprobs", err)) != 0 ||
        (rc = check_range(r->n_bias, 0, 4096, "logit_bias entries", err)) != 0 ||
        (rc = check_range(r->n_stop, 0, HX_STOP_MAX, "stop texts", err)) != 0 ||
        (rc = check_range(r->n_stop_ids, 0, HX_STOP_MAX, "stop_token_ids", err)) != 0 ||
        (rc = check_range((double)r->max_new, 0, 1e12, "max_tokens", err)) != 0 ||
        (rc = check_range((double)r->min_new, 0, 1e12, "min_tokens", err)) != 0 ||
        (rc = check_range((double)r->deadline_ms, 0, 1e12, "deadline", err)) != 0 ||
        (rc = check_range((double)r->n_forced, 0, 200000, "forced tokens", err)) != 0 ||
        (rc = check_ids(e, r->forced, r->n_forced, "forced tokens", err)) != 0)
        return rc;
    for (int32_t i = 0; i < r->n_bias; i++)
        if ((rc = check_ids(e, &r->bias[i].token, 1, "logit_bias", err)) != 0 ||
            (rc = check_range(r->bias[i].bias, -1e6, 1e6, "logit_bias value", err)) != 0)
            return rc;
    for (int32_t i = 0; i < r->n_stop; i++)
        if (r->stop[i].n < 1 || r->stop[i].n > HX_STOP_BYTES)
            return hx_fail(err, HX_EARG, "stop[%d]: %zu bytes, expected 1..%d", i,
                           r->stop[i].n, HX_STOP_BYTES);
    return 0;
}

static void *dup_array(hx_arena *a, const void *p, size_t n, size_t size)
{
    void *q = n != 0 ? hx_arena_alloc(a, n * size) : NULL;

    if (q != NULL)
        memcpy(q, p, n * size);
    return q;
}

/* Copies the request's arrays; false when memory is short. */
static bool copy_request(hx_stream *s, const hx_request *r)
{
    hx_str *stop;

    s->req = *r;
    s->req.tokens = NULL; /* in s->token */
    s->req.bias = dup_array(&s->arena, r->bias, (size_t)r->n_bias, sizeof *r->bias);
    s->req.stop_ids =
        dup_array(&s->arena, r->stop_ids, (size_t)r->n_stop_ids, sizeof *r->stop_ids);
    s->req.forced =
        dup_array(&s->arena, r->forced, (size_t)r->n_forced, sizeof *r->forced);
    s->req.stop = stop =
        dup_array(&s->arena, r->stop, (size_t)r->n_stop, sizeof *r->stop);
    for (int32_t i = 0; stop != NULL && i < r->n_stop; i++)
        if ((stop[i].p = hx_arena_dup(&s->arena, r->stop[i].p, r->stop[i].n)) == NULL)
            return false;
    return (r->n_bias == 0 || s->req.bias != NULL) && (r->n_stop == 0 || stop != NULL) &&
           (r->n_stop_ids == 0 || s->req.stop_ids != NULL) &&
           (r->n_forced == 0 || s->req.forced != NULL);
}

/* The ring and what events point to; all the memory a stream will ever need. */
static bool alloc_stream(hx_stream *s, int64_t n_top)
{
    s->ring_bytes_cap = HX_RING_BYTES_HIGH + 2 * HX_TOKEN_BYTES + HX_STOP_BYTES;
    s->ring = hx_new(hx_out_token, HX_RING_TOKENS);
    s->ring_bytes = hx_new(char, s->ring_bytes_cap);
    s->ev_token = hx_new(int32_t, HX_RING_TOKENS);
    s->ev_end = hx_new(int32_t, HX_RING_TOKENS);
    s->ev_logprob = hx_new(float, HX_RING_TOKENS);
    s->ev_bytes = hx_new(char, s->ring_bytes_cap);
    if (n_top > 0 &&
        (s->ev_top = hx_new(hx_choice, (size_t)(HX_RING_TOKENS * n_top))) == NULL)
        return false;
    s->token = hx_new(int32_t, s->n_prompt + s->max_new);
    s->decoded = hx_new(uint64_t, (s->n_prompt + s->max_new) / HX_PAGE + 1);
    return s->decoded && s->ring && s->ring_bytes && s->ev_token && s->ev_end &&
           s->ev_logprob && s->ev_bytes && s->token;
}

void hx_engine_wake_reader(hx_stream *s)
{
    pthread_cond_broadcast(&s->cond);
    if (s->ready != NULL)
        s->ready(s->ready_ud);
}

void hx_engine_stream_destroy(hx_stream *s)
{
    if (s == NULL)
        return;
    hx_health_record(s);
    hx_sample_close(s);
    hx_free(s->ring);
    hx_free(s->ring_bytes);
    hx_free(s->ev_token);
    hx_free(s->ev_end);
    hx_free(s->ev_logprob);
    hx_free(s->ev_bytes);
    hx_free(s->ev_top);
    hx_free(s->token);
    hx_free(s->decoded);
    hx_free(s->last_row);
    hx_arena_reset(&s->arena);
    pthread_cond_destroy(&s->cond);
    hx_free(s);
}

static void set_bans(hx_stream *s)
{
    const hx_engine *e = s->engine;

    for (int32_t i = 0; i < e->info.n_eos; i++)
        s->ban[s->n_ban++] = e->eos[i];
    for (int32_t i = 0; i < s->req.n_stop_ids; i++)
        s->ban[s->n_ban++] = s->req.stop_ids[i];
}

/* The caller's text is compiled by now; only records still want it. */
static void keep_grammar(hx_stream *s)
{
    const hx_health *h = &s->engine->health;
    hx_str *g = &s->req.grammar;

    g->p = (h->record != NULL || h->dump_dir != NULL) && g->n > 0
               ? hx_arena_dup(&s->arena, g->p, g->n)
               : NULL;
    if (g->p == NULL)
        g->n = 0;
}

static int stream_new(hx_engine *e, const hx_request *r, hx_stream **out, hx_err *err)
{
    const int64_t room = e->info.ctx_tokens - r->n_tokens;
    hx_stream *s = hx_new(hx_stream, 1);
    int rc = 0;

    *out = NULL;
    if (s == NULL)
        return hx_fail(err, HX_ENOMEM, "request: no memory");
    hx_cond_init(&s->cond);
    hx_arena_init(&s->arena, 1u << 20);
    s->engine = e;
    s->slot = -1;
    s->n_prompt = s->n_token = r->n_tokens;
    s->max_new = r->max_new == 0 ? room : HX_MIN(r->max_new, room);
    if (!alloc_stream(s, r->n_top) || !copy_request(s, r))
        rc = hx_fail(err, HX_ENOMEM, "request: no memory for %lld tokens",
                     (long long)r->n_tokens);
    else
        rc = hx_sample_open(s, err);
    keep_grammar(s);
    if (rc != 0) {
        hx_engine_stream_destroy(s);
        return rc;
    }
    memcpy(s->token, r->tokens, (size_t)r->n_tokens * sizeof *s->token);
    set_bans(s);
    for (int64_t i = 0; i < r->n_tokens; i++)
        hx_sample_seen(&s->hist, s->token[i], false);
    s->times.queued_us = hx_now_us();
    *out = s;
    return 0;
}

static int64_t n_waiting_of(const hx_engine *e, uint64_t client)
{
    int64_t n = 0;

    for (const hx_stream *s = e->all; s != NULL; s = s->all_next)
        n += s->req.client == client && s->state == HX_SEQ_QUEUED;
    return n;
}

/* Whether one more may wait. Under lock. */
static int check_queue(const hx_engine *e, const hx_stream *s, hx_err *err)
{
    const uint64_t client = s->req.client;
    const char *fault;

    if (e->closing)
        return hx_fail(err, HX_ECANCEL, "engine: shutting down");
    if ((fault = hx_health_fault(e, NULL)) != NULL)
        return hx_fail(err, atomic_load(&e->health.lost) ? HX_ELOST : HX_EDEVICE,
                       "engine: %s", fault);
    if (e->n_waiting >= e->info.max_queue)
        return hx_fail(err, HX_EBUSY, "queue: all %lld places are taken; try again later",
                       (long long)e->info.max_queue);
    if (client != 0 && e->client_queue != 0 && n_waiting_of(e, client) >= e->client_queue)
        return hx_fail(err, HX_EBUSY,
                       "queue: %lld requests of this key wait already; try again later",
                       (long long)e->client_queue);
    return 0;
}

static int enqueue(hx_stream *s, hx_err *err)
{
    hx_engine *e = s->engine;
    int rc;

    pthread_mutex_lock(&e->lock);
    if ((rc = check_queue(e, s, err)) == 0) {
        if (e->inbox_last != NULL)
            e->inbox_last->next = s;
        else
            e->inbox = s;
        e->inbox_last = s;
        s->all_next = e->all;
        s->all_at = &e->all;
        if (e->all != NULL)
            e->all->all_at = &s->all_next;
        e->all = s;
        s->order = e->next_order++;
        s->queue = e->n_waiting++;
        hx_engine_nudge(e);
    }
    pthread_mutex_unlock(&e->lock);
    if (rc == 0)
        hx_count(HX_C_requests_total, 1);
    return rc;
}

int hx_submit(hx_engine *e, const hx_request *req, hx_stream **out, hx_err *err)
{
    hx_stream *s;
    int rc;

    *out = NULL;
    if ((rc = check_request(e, req, err)) != 0 || (rc = stream_new(e, req, &s, err)) != 0)
        return rc;
    if ((rc = enqueue(s, err)) != 0) {
        hx_engine_stream_destroy(s);
        return rc;
    }
    *out = s;
    return 0;
}

/* ---- read ------------------------------------------------------------- */

/* Milliseconds to the first token, or -1. */
static int64_t eta_ms(const hx_stream *s)
{
    const hx_engine *e = s->engine;
    const double read = (double)(s->prefilled - s->cached),
                 left = (double)(s->n_prompt - s->prefilled),
                 took = (double)(hx_now_us() - s->times.started_us);
    const double wait = s->state == HX_SEQ_QUEUED ? hx_sched_wait_us(e, s->queue + 1) : 0;

    if (s->times.first_us != 0)
        return 0;
    if (s->state == HX_SEQ_PREFILL && read > 0)
        return (int64_t)(took / read * left / 1e3);
    return e->prefill_rate > 0 ? (int64_t)(wait / 1e3 + left * 1e3 / e->prefill_rate)
                               : -1;
}

static void fill_common(const hx_stream *s, hx_event *ev)
{
    ev->prompt = s->n_prompt;
    ev->cached = s->cached;
    ev->miss = s->miss;
    ev->miss_pos = s->miss_pos;
    ev->generated = s->generated;
    ev->prefilled = s->prefilled;
    ev->queue = s->queue;
    ev->times = s->times;
    ev->experts = s->experts;
    ev->stop_index = -1;
}

/* Moves the ring to the event's arrays. Under lock. */
static void take_tokens(hx_stream *s, hx_event *ev)
{
    const int32_t n_top = s->req.n_top;
    int32_t end = 0;

    for (int32_t i = 0; i < s->n_ring; i++) {
        const hx_out_token *t = &s->ring[i];

        s->ev_token[i] = t->token;
        s->ev_logprob[i] = t->logprob;
        s->ev_end[i] = end += t->n_bytes;
        if (n_top > 0)
            memcpy(&s->ev_top[i * n_top], t->top, (size_t)n_top * sizeof *t->top);
    }
    memcpy(s->ev_bytes, s->ring_bytes, s->n_ring_bytes);
    ev->kind = HX_EV_TOKENS;
    ev->tokens = s->ev_token;
    ev->n_tokens = s->n_ring;
    ev->bytes = (hx_str) { s->ev_bytes, s->n_ring_bytes };
    ev->end = s->ev_end;
    ev->logprob = s->req.want_logprobs ? s->ev_logprob : NULL;
    ev->top = n_top > 0 ? s->ev_top : NULL;
    s->n_ring = 0;
    s->n_ring_bytes = 0;
}

static bool take_event(hx_stream *s, hx_event *ev)
{
    *ev = (hx_event) { 0 };
    fill_common(s, ev);
    if (s->n_ring > 0) {
        const bool was_high = hx_sched_ring_high(s);

        take_tokens(s, ev);
        if (was_high)
            pthread_cond_signal(&s->engine->wake);
        return true;
    }
    if (s->ended || s->lost) {
        ev->kind = s->end.kind;
        ev->stop = s->end.stop;
        ev->stop_index = s->end.stop_index;
        ev->err = s->end.err;
        return true;
    }
    if (s->progress) {
        s->progress = false;
        ev->kind = HX_EV_PROGRESS;
        ev->eta_ms = eta_ms(s);
        return true;
    }
    return false;
}

int hx_next(hx_stream *s, hx_event *ev, int timeout_ms)
{
    hx_engine *e = s->engine;
    const int64_t until = hx_now_us() + (int64_t)timeout_ms * 1000;
    bool got, more = timeout_ms != 0;

    pthread_mutex_lock(&e->lock);
    while (!(got = take_event(s, ev)) && more) {
        if (timeout_ms < 0)
            pthread_cond_wait(&s->cond, &e->lock);
        else
            more = hx_cond_until(&s->cond, &e->lock, until);
    }
    pthread_mutex_unlock(&e->lock);
    return got;
}

void hx_on_ready(hx_stream *s, void (*fn)(void *ud), void *ud)
{
    pthread_mutex_lock(&s->engine->lock);
    s->ready = fn;
    s->ready_ud = ud;
    if (fn != NULL && (s->n_ring > 0 || s->ended || s->lost || s->progress))
        fn(ud);
    pthread_mutex_unlock(&s->engine->lock);
}

int hx_force(hx_stream *s, const int32_t *tokens, int32_t n, hx_err *err)
{
    int rc;

    if (n < 1 || n > (int32_t)HX_LEN(s->force))
        return hx_fail(err, HX_EARG, "forced tokens: %d, expected 1..%zu", n,
                       HX_LEN(s->force));
    if ((rc = check_ids(s->engine, tokens, n, "forced tokens", err)) != 0)
        return rc;
    pthread_mutex_lock(&s->engine->lock);
    memcpy(s->force, tokens, (size_t)n * sizeof *tokens);
    s->n_force = n;
    s->force_at = 0;
    pthread_mutex_unlock(&s->engine->lock);
    return 0;
}

void hx_end_thinking(hx_stream *s)
{
    atomic_store(&s->end_thinking, true);
}

void hx_cancel(hx_stream *s)
{
    pthread_mutex_lock(&s->engine->lock);
    s->cancelled = true;
    hx_engine_nudge(s->engine);
    pthread_mutex_unlock(&s->engine->lock);
}

void hx_stream_free(hx_stream *s)
{
    bool ended;

    if (s == NULL)
        return;
    pthread_mutex_lock(&s->engine->lock);
    s->cancelled = s->freed = true;
    s->ready = NULL;
    ended = s->ended;
    if (!ended)
        hx_engine_nudge(s->engine);
    pthread_mutex_unlock(&s->engine->lock);
    if (ended)
        hx_engine_stream_destroy(s);
}

/* ---- scoring ---------------------------------------------------------- */

int hx_score(hx_engine *e, const hx_score_args *a, hx_err *err)
{
    const hx_request r = { .tokens = a->tokens, .n_tokens = a->n_tokens, .max_new = 1 };
    hx_stream *s;
    hx_event ev;
    int rc;

    if (a->from < 0 || a->from >= a->n_tokens || a->n_top < 0 || a->n_top > HX_TOP_MAX)
        return hx_fail(err, HX_EARG,
                       "score: from position %lld of %lld, %d alternatives (0..%d)",
                       (long long)a->from, (long long)a->n_tokens, a->n_top, HX_TOP_MAX);
    if ((rc = check_request(e, &r, err)) != 0 ||
        (rc = check_ids(e, a->ids, a->n_ids, "ids", err)) != 0 ||
        (rc = stream_new(e, &r, &s, err)) != 0)
        return rc;
    if ((s->score = dup_array(&s->arena, a, 1, sizeof *a)) == NULL)
        rc = hx_fail(err, HX_ENOMEM, "request: no memory");
    else
        rc = enqueue(s, err);
    if (rc != 0) {
        hx_engine_stream_destroy(s);
        return rc;
    }
    hx_next(s, &ev, -1);
    /* It may be lost while the engine thread still computes. */
    pthread_mutex_lock(&e->score_lock);
    s->left = true;
    pthread_mutex_unlock(&e->score_lock);
    if (ev.kind == HX_EV_ERROR) {
        rc = ev.err.code;
        if (err != NULL)
            *err = ev.err;
    }
    hx_stream_free(s);
    return rc;
}
