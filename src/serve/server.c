/* server.c - the server: table of routes, who may use them, the workers that begin
 * answers, and the small routes themselves (health, models, metrics, tokenize,
 * detokenize; stats.c has the state of the engine).
 *
 * run.c opens and runs it. route_request() runs on the loop thread and must never block or
 * parse a body, and asks the engine for its figures only; all else begins on a worker.
 * Generations go on in generate.c, so a worker has each call for a short while only, but
 * for slow calls. */
#include "serve/serve.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/random.h>
#include <time.h>

#define SPARE_WORKERS   8          /* beside one per CPU */
#define STACK_BYTES     (1u << 20) /* templates and JSON recurse */
#define IDLE_US         10000000   /* a worker without work ends */
#define ARENA_MAX_BYTES (256u << 20)
#define JSON            "application/json"

typedef struct route route;

typedef struct {
    hx_call *first, *last;
    int64_t n;
} call_queue;

struct hx_server {
    hx_http *http;
    hx_pump *pump;
    hx_responses *responses;
    hx_keys *keys;     /* NULL: open */
    char *served_name; /* NULL: none */
    bool official_tokens, log_prompts;
    int32_t drain_ms;
    int64_t created_s, open_us, ready_us;
    uint64_t seed;
    atomic_ullong n_random;
    atomic_ullong load_done, load_total,
        load_first;          /* bytes; the first ones were there */
    _Atomic int64_t load_us; /* since when it is loaded */
    atomic_bool draining;

    /* Written once by hx_server_set_engine(), before ready; so is ready_us. */
    hx_engine *engine;
    hx_info info;
    atomic_bool ready;

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t work;  /* calls came, or closing */
    pthread_cond_t gone;  /* n_worker fell to 0 */
    call_queue calls, slow;
    call_queue held; /* streams that wait for the model */
    int32_t n_worker, n_idle, max_worker;
    int32_t n_slow; /* workers with a slow call, at most half of all */
    bool closing;
};

struct route {
    const char *method, *path; /* without /v1; a final slash: a name follows */
    hx_route_fn *run;
    hx_problem_fn *problem;     /* NULL: as OpenAI shapes errors */
    bool no_body;               /* a POST whose body, if any, is not read */
    bool admin;                 /* needs the admin key where there is one */
    bool open;                  /* needs no key */
    bool early;                 /* works without an engine, on the loop thread */
    const hx_stream_form *form; /* a streamed request waits for the engine, begun */
};

/* ---- problems and answers --------------------------------------------- */

int hx_server_problem(hx_call *c, int status, const char *param, const char *code,
                      const char *fmt, ...)
{
    hx_problem *p = &c->problem;
    va_list ap;

    if (p->status != 0)
        return HX_EARG;
    p->status = status;
    p->code = code;
    snprintf(p->param, sizeof p->param, "%s", param != NULL ? param : "");
    va_start(ap, fmt);
    vsnprintf(p->msg, sizeof p->msg, fmt, ap);
    va_end(ap);
    return HX_EARG;
}

int hx_server_problem_err(hx_call *c, int rc, const char *param, const hx_err *err)
{
    static const struct {
        int rc, status;
        const char *code;
    } map[] = {
        { HX_EARG, 400, "invalid_value" },        { HX_EFORMAT, 400, "invalid_value" },
        { HX_EUNSUP, 400, "unsupported_value" },  { HX_ELIMIT, 400, "limit_exceeded" },
        { HX_ENOMEM, 503, "out_of_memory" },      { HX_ECANCEL, 503, "shutting_down" },
        { HX_EBUSY, 429, "rate_limit_exceeded" }, { HX_EDEVICE, 503, "engine_fault" },
        { HX_ELOST, 503, "device_lost" },
    };

    for (size_t i = 0; i < HX_LEN(map); i++)
        if (map[i].rc == rc)
            return hx_server_problem(c, map[i].status, param, map[i].code, "%s",
                                     err->msg);
    return hx_server_problem(c, 500, param, "engine_error", "%s", err->msg);
}

int hx_server_no_memory(hx_call *c)
{
    return hx_server_problem(c, 503, NULL, "out_of_memory", "request: no memory");
}

int hx_server_untokenized(hx_call *c, const char *param, int rc)
{
    hx_err err = { 0 };

    hx_fail(&err, rc, "%s: %s", param, hx_strerror(rc));
    return hx_server_problem_err(c, rc, param, &err);
}

int hx_server_too_large(hx_call *c, const char *param)
{
    return hx_server_problem(c, 413, param, "request_too_large",
                             "%s: too large for the memory of a request", param);
}

void hx_server_write_problem(hx_sb *b, const hx_problem *p)
{
    const char *type = p->status == 401   ? "authentication_error"
                       : p->status == 429 ? "rate_limit_error"
                       : p->status >= 500 ? "server_error"
                                          : "invalid_request_error";

    hx_sb_str(b, "{\"error\":{\"message\":");
    hx_json_put_str(b, hx_str_c(p->msg));
    hx_sb_printf(b, ",\"type\":\"%s\",\"param\":", type);
    if (p->param[0] != '\0')
        hx_json_put_str(b, hx_str_c(p->param));
    else
        hx_sb_str(b, "null");
    if (p->code != NULL)
        hx_sb_printf(b, ",\"code\":\"%s\"", p->code);
    else
        hx_sb_str(b, ",\"code\":null");
    if (p->n_ctx > 0)
        hx_sb_printf(b, ",\"n_prompt_tokens\":%lld,\"n_ctx\":%lld",
                     (long long)p->n_prompt, (long long)p->n_ctx);
    hx_sb_str(b, "}}");
}

static void reply_problem(hx_call *c, const char *headers)
{
    const hx_problem *p = &c->problem;
    hx_sb b = { 0 };

    (c->put_problem != NULL ? c->put_problem : hx_server_write_problem)(&b, p);
    hx_http_reply(c->x, p->status, JSON, headers, (hx_str) { b.p, b.bad ? 0 : b.n });
    hx_sb_free(&b);
}

/* When to come again, 2 to 600 seconds: what one more request would wait by now, or what
 * is left of loading at the rate so far. */
static const char *retry_after(const hx_server *s, char out[40])
{
    const uint64_t done = atomic_load(&s->load_done), all = atomic_load(&s->load_total),
                   first = atomic_load(&s->load_first);
    hx_status st = { 0 };

    if (atomic_load(&s->ready))
        hx_get_status(s->engine, &st);
    else if (done > first)
        st.wait_ms = (int64_t)HX_MIN((double)(hx_now_us() - atomic_load(&s->load_us)) /
                                         1e3 * (double)(all - HX_MIN(done, all)) /
                                         (double)(done - first),
                                     1e6);
    snprintf(out, 40, "Retry-After: %lld\r\n",
             (long long)HX_MIN(HX_MAX((st.wait_ms + 999) / 1000, 2), 600));
    return out;
}

static void end_stream(hx_call *c, hx_sb *last)
{
    if (!last->bad)
        hx_http_send(c->x, (hx_str) { last->p, last->n });
    hx_http_end(c->x);
    hx_sb_free(last);
}

void hx_server_reply_problem(hx_call *c)
{
    char later[40];

    if (c->problem.status == 0)
        hx_server_problem(c, 500, NULL, "internal_error",
                          "request: failed without a reason");
    c->status = c->problem.status;
    if (c->begun) {
        hx_sb out = { 0 };

        c->form->problem(c, &out);
        end_stream(c, &out);
        return;
    }
    reply_problem(c, c->status == 429 || c->status == 503 ? retry_after(c->server, later)
                                                          : NULL);
}

void hx_server_reply_json(hx_call *c, const hx_sb *json)
{
    if (json->bad) {
        hx_server_problem(c, 503, NULL, "out_of_memory",
                          "answer: no memory for its text");
        hx_server_reply_problem(c);
        return;
    }
    hx_assert(!c->begun);
    c->status = 200;
    hx_http_reply(c->x, 200, JSON, NULL, (hx_str) { json->p, json->n });
}

void hx_server_begin_stream(hx_call *c, hx_str idle)
{
    c->status = 200;
    c->begun = true;
    hx_http_begin_stream(c->x, c->form->type, idle.n > 0 ? idle : c->form->idle);
}

/* Nobody reads what is said to who has gone; 499 is for the log. */
int hx_server_end(hx_call *c, int rc, hx_str last, void (*whole)(void *ud), void *ud)
{
    if (rc == HX_ECANCEL)
        c->status = 499;
    if (rc != 0 && rc != HX_ECANCEL)
        return rc;
    if (c->begun) {
        if (rc == 0)
            hx_http_send(c->x, last);
        hx_http_end(c->x);
    } else if (rc == 0) {
        whole(ud);
    } else {
        hx_http_reply(c->x, 499, NULL, NULL, (hx_str) { NULL, 0 });
    }
    return 0;
}

uint64_t hx_server_random(hx_server *s)
{
    return hx_rng_at(s->seed, atomic_fetch_add(&s->n_random, 1));
}

void hx_server_new_id(hx_server *s, const char *prefix, char out[40])
{
    snprintf(out, 40, "%.15s%016llx%08llx", prefix,
             (unsigned long long)hx_server_random(s),
             (unsigned long long)hx_server_random(s) & 0xffffffff);
}

bool hx_server_official_tokens(const hx_server *s)
{
    return s->official_tokens;
}

hx_pump *hx_server_pump(const hx_server *s)
{
    return s->pump;
}

hx_responses *hx_server_responses(const hx_server *s)
{
    return s->responses;
}

hx_str hx_server_model_name(const hx_server *s)
{
    return hx_str_c(s->served_name != NULL ? s->served_name : s->info.name);
}

int64_t hx_server_created_s(const hx_server *s)
{
    return s->created_s;
}

double hx_server_load_s(const hx_server *s)
{
    return (double)(s->ready_us - s->open_us) / 1e6;
}

/* ---- routes that need no worker ---------------------------------------- */

/* Whether answers can be had; with what /health says. */
static bool write_health(const hx_server *s, hx_sb *b)
{
    const uint64_t done = atomic_load(&s->load_done), total = atomic_load(&s->load_total);
    bool healthy = false;

    if (atomic_load(&s->draining))
        hx_sb_str(b, "{\"status\":\"draining\"}");
    else if (atomic_load(&s->ready))
        hx_stats_write_health(b, s->engine, &healthy);
    else
        hx_sb_printf(b, "{\"status\":\"loading\",\"progress\":%.2f}",
                     total > 0 ? (double)HX_MIN(done, total) / (double)total : 0.0);
    return healthy;
}

static int answer_health(hx_server *s, hx_exchange *x)
{
    hx_sb b = { 0 };
    const bool healthy = write_health(s, &b);

    hx_http_reply(x, healthy ? 200 : 503, JSON, healthy ? NULL : "Retry-After: 2\r\n",
                  (hx_str) { b.p, b.bad ? 0 : b.n });
    hx_sb_free(&b);
    return healthy ? 200 : 503;
}

static void answer_root(hx_exchange *x)
{
    hx_http_reply(
        x, 200, "text/plain; charset=utf-8", NULL,
        HX_STR("Hoist " HX_VERSION ". OpenAI API under /v1, state at /health.\n"));
}

/* ---- small routes ------------------------------------------------------ */

hx_str hx_server_query(const hx_call *c, const char *name)
{
    const size_t n = strlen(name);
    hx_str q = c->x->query;

    while (q.n > 0) {
        const char *amp = memchr(q.p, '&', q.n);
        const size_t len = amp != NULL ? (size_t)(amp - q.p) : q.n;

        if (len > n && memcmp(q.p, name, n) == 0 && q.p[n] == '=')
            return (hx_str) { q.p + n + 1, len - n - 1 };
        q.p += HX_MIN(len + 1, q.n);
        q.n -= HX_MIN(len + 1, q.n);
    }
    return (hx_str) { NULL, 0 };
}

/* OpenAI's fields and Anthropic's. */
static void write_model(hx_sb *b, const hx_server *s)
{
    const hx_info *i = &s->info;
    const time_t made = (time_t)s->created_s;
    struct tm utc;
    char at[32];
    const bool calls = i->reply_format != NULL && strcmp(i->reply_format, "plain") != 0;

    hx_sb_str(b, "{\"id\":");
    hx_json_put_str(b, hx_server_model_name(s));
    hx_sb_printf(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"hoist\"",
                 (long long)s->created_s);
    strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&made, &utc));
    hx_sb_printf(b, ",\"type\":\"model\",\"created_at\":\"%s\",\"display_name\":", at);
    hx_json_put_str(b, hx_server_model_name(s));
    hx_sb_printf(b, ",\"max_model_len\":%lld,\"context_length\":%lld",
                 (long long)i->ctx_tokens, (long long)i->ctx_tokens);
    hx_sb_str(b, ",\"architecture\":{\"name\":");
    hx_json_put_str(b, hx_str_c(i->arch));
    hx_sb_str(b, ",\"input_modalities\":[\"text\"],\"output_modalities\":[\"text\"]}");
    hx_sb_printf(
        b,
        ",\"meta\":{\"n_ctx_train\":%lld,\"n_vocab\":%d,\"n_params\":%llu,\"size\":%llu}",
        (long long)i->ctx_trained_tokens, i->n_vocab, (unsigned long long)i->n_param,
        (unsigned long long)i->weight_bytes);
    hx_sb_printf(
        b,
        ",\"capabilities\":{\"tools\":%s,\"parallel_tool_calls\":%s,\"reasoning\":%s,"
        "\"images\":false,\"prompt_cache_key\":false}}",
        calls ? "true" : "false", calls ? "true" : "false", calls ? "true" : "false");
}

/* Codex says its version, and an error whenever a list of its own is missing. */
static int models(hx_call *c)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"object\":\"list\",\"data\":[");
    write_model(&b, c->server);
    hx_sb_str(&b, "],\"has_more\":false,\"first_id\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b, ",\"last_id\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b,
              hx_server_query(c, "client_version").p != NULL ? ",\"models\":[]}" : "}");
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}

static int model(hx_call *c)
{
    const hx_str path = c->x->path;
    const char *slash = memmem(path.p, path.n, "models/", 7);
    const hx_str name = { slash + 7, (size_t)(path.p + path.n - slash - 7) };
    hx_sb b = { 0 };

    if (!hx_str_eq(name, hx_server_model_name(c->server)))
        return hx_server_problem(
            c, 404, "model", "model_not_found",
            "model: no \"%.*s\" here; /v1/models lists what there is",
            (int)HX_MIN(name.n, 80u), name.p);
    write_model(&b, c->server);
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}

static int metrics(hx_call *c)
{
    /* A counter may gain a digit between the two calls. */
    const int64_t cap = hx_metrics(c->engine, NULL, 0) + 1024;
    char *text = cap > 0 ? hx_arena_alloc(&c->arena, (size_t)cap) : NULL;
    const int64_t n = text != NULL ? hx_metrics(c->engine, text, cap) : HX_ENOMEM;

    if (n < 0)
        return hx_server_problem(c, 503, NULL, "out_of_memory", "metrics: no memory");
    c->status = 200;
    hx_http_reply(c->x, 200, "text/plain; version=0.0.4; charset=utf-8", NULL,
                  (hx_str) { text, (size_t)HX_MIN(n, cap) });
    return 0;
}

static int write_tokens(hx_call *c, const int32_t *id, int64_t n)
{
    hx_sb b = { 0 };

    hx_sb_str(&b, "{\"tokens\":[");
    for (int64_t i = 0; i < n; i++)
        hx_sb_printf(&b, i > 0 ? ",%d" : "%d", id[i]);
    hx_sb_printf(&b, "],\"count\":%lld,\"max_model_len\":%lld}", (long long)n,
                 (long long)c->info->ctx_tokens);
    c->n_prompt = n;
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}

static int tokenize_chat(hx_call *c)
{
    hx_generate g = { .chat = true };
    const hx_render_opt opt = { .official = c->server->official_tokens };
    hx_err err = { 0 };
    int32_t *id;
    int64_t n;
    int rc;

    if ((rc = hx_openai_vars(c, &g)) != 0)
        return rc;
    if ((rc = hx_render(c->engine, g.vars, &opt, &id, &n, NULL, &err)) != 0)
        return hx_server_problem_err(c, rc, "messages", &err);
    rc = write_tokens(c, id, n);
    hx_free(id);
    return rc;
}

static int tokenize(hx_call *c)
{
    static const char *const names[] = { "content", "prompt", "text" };
    bool special = true;
    hx_str text = { 0 };
    int32_t *id = NULL;
    int64_t n;
    int rc;

    if (hx_params_get(c->body, "messages") != NULL)
        return tokenize_chat(c);
    for (size_t i = HX_LEN(names); i-- > 0;) /* the first wins */
        if ((rc = hx_params_str(c, c->body, names[i], &text)) != 0)
            return rc;
    if (text.p == NULL)
        return hx_server_problem(c, 400, "content", "missing_required_parameter",
                                 "content: missing; a string to tokenize, or messages");
    if ((rc = hx_params_bool(c, c->body, "parse_special", &special)) != 0)
        return rc;
    n = hx_tokenize(c->engine, text, special, NULL, 0);
    if (n >= 0 &&
        (id = hx_arena_alloc(&c->arena, (size_t)HX_MAX(n, 1) * sizeof *id)) == NULL)
        return hx_server_problem(c, 413, "content", "request_too_large",
                                 "content: %zu bytes are too many to tokenize at once",
                                 text.n);
    if (n >= 0)
        n = hx_tokenize(c->engine, text, special, id, n);
    return n < 0 ? hx_server_untokenized(c, "content", (int)n) : write_tokens(c, id, n);
}

static int detokenize(hx_call *c)
{
    const hx_json *list = hx_params_get(c->body, "tokens");
    hx_utf8_stream utf8 = { 0 };
    hx_sb text = { 0 }, b = { 0 };
    const int32_t *id;
    int64_t n;
    int rc;

    if (list == NULL)
        return hx_server_problem(c, 400, "tokens", "missing_required_parameter",
                                 "tokens: missing; a list of token ids");
    if ((rc = hx_params_ids(c, list, "tokens", &id, &n)) != 0)
        return rc;
    for (int64_t i = 0; i < n; i++)
        hx_utf8_feed(&utf8, hx_token_bytes(c->engine, id[i], NULL), &text);
    hx_utf8_end(&utf8, &text);
    hx_sb_str(&b, "{\"content\":");
    hx_json_put_str(&b, (hx_str) { text.p, text.n });
    hx_sb_str(&b, ",\"prompt\":");
    hx_json_put_str(&b, (hx_str) { text.p, text.n });
    hx_sb_char(&b, '}');
    b.bad = b.bad || text.bad;
    c->n_answer = n;
    hx_server_reply_json(c, &b);
    hx_sb_free(&text);
    hx_sb_free(&b);
    return 0;
}

/* ---- routing ----------------------------------------------------------- */

#define OLLAMA .problem = hx_ollama_write_problem
static const route routes[] = {
    { .method = "GET", .path = "/", .early = true },
    { .method = "GET", .path = "/health", .open = true, .early = true },
    { .method = "GET", .path = "/models", .run = models },
    { .method = "GET", .path = "/models/", .run = model },
    { .method = "GET", .path = "/metrics", .run = metrics, .admin = true },
    { .method = "GET", .path = "/slots", .run = hx_stats_slots, .admin = true },
    { .method = "GET", .path = "/stats", .run = hx_stats_all, .admin = true },
    { .method = "POST",
      .path = "/chat/completions",
      .run = hx_openai_chat,
      .form = &hx_openai_stream },
    { .method = "POST",
      .path = "/chat/completions/",
      .run = hx_openai_act,
      .no_body = true },
    { .method = "POST",
      .path = "/completions",
      .run = hx_completions,
      .form = &hx_openai_stream },
    { .method = "POST",
      .path = "/responses",
      .run = hx_responses_create,
      .form = &hx_responses_stream },
    { .method = "POST", .path = "/responses/input_tokens", .run = hx_responses_count },
    { .method = "GET", .path = "/responses/", .run = hx_responses_retrieve },
    { .method = "DELETE", .path = "/responses/", .run = hx_responses_delete },
    { .method = "POST", .path = "/responses/", .run = hx_responses_act, .no_body = true },
    { .method = "POST",
      .path = "/messages",
      .run = hx_anthropic_messages,
      .form = &hx_anthropic_stream,
      .problem = hx_anthropic_write_problem },
    { .method = "POST",
      .path = "/messages/count_tokens",
      .run = hx_anthropic_count,
      .problem = hx_anthropic_write_problem },
    { .method = "POST", .path = "/tokenize", .run = tokenize },
    { .method = "POST", .path = "/detokenize", .run = detokenize },
    { .method = "POST", .path = "/apply-template", .run = hx_misc_apply_template },
    { .method = "POST", .path = "/embeddings", .run = hx_embeddings },
    { .method = "GET", .path = "/props", .run = hx_misc_props },
    { .method = "GET", .path = "/openapi.json", .run = hx_misc_openapi },
    { .method = "POST",
      .path = "/generate",
      .run = hx_sglang_generate,
      .form = &hx_openai_stream },
    { .method = "GET", .path = "/model_info", .run = hx_sglang_model_info },
    { .method = "GET", .path = "/get_model_info", .run = hx_sglang_model_info },
    { .method = "GET", .path = "/server_info", .run = hx_sglang_server_info },
    { .method = "GET", .path = "/get_server_info", .run = hx_sglang_server_info },
    { .method = "GET",
      .path = "/flush_cache",
      .run = hx_sglang_flush_cache,
      .admin = true },
    { .method = "POST",
      .path = "/flush_cache",
      .run = hx_sglang_flush_cache,
      .admin = true,
      .no_body = true },
    { .method = "POST",
      .path = "/api/chat",
      .run = hx_ollama_chat,
      .form = &hx_ollama_chat_stream,
      OLLAMA },
    { .method = "POST",
      .path = "/api/generate",
      .run = hx_ollama_generate,
      .form = &hx_ollama_generate_stream,
      OLLAMA },
    { .method = "POST", .path = "/api/embed", .run = hx_embeddings_ollama, OLLAMA },
    { .method = "POST",
      .path = "/api/embeddings",
      .run = hx_embeddings_ollama_one,
      OLLAMA },
    { .method = "POST", .path = "/api/show", .run = hx_ollama_show, OLLAMA },
    { .method = "GET", .path = "/api/tags", .run = hx_ollama_tags, OLLAMA },
    { .method = "GET", .path = "/api/ps", .run = hx_ollama_ps, OLLAMA },
    { .method = "GET", .path = "/api/version", .run = hx_ollama_version, OLLAMA },
};

static bool path_matches(const char *pattern, hx_str path)
{
    const size_t n = strlen(pattern);

    if (n > 1 && pattern[n - 1] == '/')
        return path.n > n && memcmp(path.p, pattern, n) == 0;
    return hx_str_is(path, pattern);
}

static hx_str without_v1(hx_str path)
{
    if (path.n == 3 && memcmp(path.p, "/v1", 3) == 0)
        return HX_STR("/");
    if (path.n > 3 && memcmp(path.p, "/v1/", 4) == 0)
        return (hx_str) { path.p + 3, path.n - 3 };
    return path;
}

/* "GET, DELETE" */
static void list_methods(hx_str path, char out[40])
{
    size_t n = 0;

    path = without_v1(path);
    out[0] = '\0';
    for (size_t i = 0; i < HX_LEN(routes); i++)
        if (path_matches(routes[i].path, path) && strstr(out, routes[i].method) == NULL)
            n += (size_t)snprintf(out + n, 40 - n, "%s%s", n > 0 ? ", " : "",
                                  routes[i].method);
}

/* The path's row for the method; else one of its rows for another; else NULL. */
static const route *find_route(hx_str method, hx_str path)
{
    const route *other = NULL;

    path = without_v1(path);
    for (size_t i = 0; i < HX_LEN(routes); i++) {
        if (!path_matches(routes[i].path, path))
            continue;
        if (hx_str_is(method, routes[i].method))
            return &routes[i];
        if (other == NULL)
            other = &routes[i];
    }
    return other;
}

static hx_str given_key(const hx_exchange *x)
{
    hx_str key = hx_http_header(x, "authorization");

    if (key.n <= 7 || strncasecmp(key.p, "bearer ", 7) != 0)
        return hx_http_header(x, "x-api-key");
    key.p += 7;
    key.n -= 7;
    while (key.n > 0 && *key.p == ' ')
        key.p++, key.n--;
    return key;
}

/* Unknown paths are told only to who has a key. */
static int check_key(hx_server *s, const route *r, hx_call *c)
{
    if (s->keys == NULL || (r != NULL && r->open))
        return 0;
    switch (hx_keys_check(s->keys, given_key(c->x), r != NULL && r->admin, &c->key)) {
    case HX_ACCESS_UNKNOWN:
        return hx_server_problem(
            c, 401, NULL, "invalid_api_key",
            "API key: missing or wrong; send Authorization: Bearer KEY");
    case HX_ACCESS_NOT_ADMIN:
        return hx_server_problem(c, 403, NULL, "forbidden",
                                 "API key: this path takes the admin key only");
    case HX_ACCESS_YES:
        break;
    }
    return 0;
}

uint64_t hx_server_client(const hx_call *c)
{
    const hx_str key = given_key(c->x);
    uint64_t h = c->server->seed | 1;

    for (size_t i = 0; i < key.n; i++)
        h = hx_rng_at(h, (unsigned char)key.p[i]);
    return key.n > 0 ? h | 1 : 0;
}

static void log_call(const hx_call *c)
{
    const size_t n = strlen(c->path);
    const bool quiet = n >= 7 && strcmp(c->path + n - 7, "/health") == 0;

    const char *comma = c->key != NULL ? ", " : "", *key = c->key != NULL ? c->key : "";
    const hx_times *t = &c->times;
    const double made_s = (double)(t->done_us - t->first_us) / 1e6;

    if (t->first_us == 0 || t->started_us == 0) {
        hx_log(quiet ? HX_LOG_DEBUG : HX_LOG_INFO,
               "%s %s %d, %lld + %lld tokens, %.1f ms%s%s", c->method, c->path, c->status,
               (long long)c->n_prompt, (long long)c->n_answer,
               (double)(hx_now_us() - c->start_us) / 1e3, comma, key);
        return;
    }
    hx_log(HX_LOG_INFO,
           "%s %s %d, %lld (%lld cached) + %lld tokens, %.1f ms: queue %.1f, first token "
           "after %.1f, then %.1f tok/s%s%s",
           c->method, c->path, c->status, (long long)c->n_prompt, (long long)c->n_cached,
           (long long)c->n_answer, (double)(hx_now_us() - c->start_us) / 1e3,
           (double)(t->started_us - t->queued_us) / 1e3,
           (double)(t->first_us - t->started_us) / 1e3,
           made_s > 0 ? (double)(c->n_answer - 1) / made_s : 0, comma, key);
}

/* For http.c, before it reads a body. */
static bool admit(void *ud, const hx_exchange *x)
{
    hx_server *s = ud;
    hx_call c = { .server = s, .x = (hx_exchange *)(uintptr_t)x };

    return check_key(s, find_route(x->method, x->path), &c) == 0;
}

static int loading(hx_call *c)
{
    return hx_server_problem(
        c, 503, NULL, "model_loading",
        atomic_load(&c->server->draining)
            ? "the server stops before the model is loaded"
            : "the model is being loaded; /health shows how far it is");
}

/* Notes why a request cannot be handed to a worker; 0 when it can. */
static int refuse(hx_server *s, const hx_exchange *x, const route *r, hx_call *c)
{
    char methods[40];

    if (check_key(s, r, c) != 0)
        return HX_EARG;
    if (r == NULL)
        return hx_server_problem(c, 404, NULL, "not_found", "no such path: %.*s",
                                 (int)HX_MIN(x->path.n, 100u), x->path.p);
    if (!hx_str_is(x->method, r->method)) {
        list_methods(x->path, methods);
        return hx_server_problem(c, 405, NULL, "method_not_allowed", "%.*s takes %s only",
                                 (int)HX_MIN(x->path.n, 100u), x->path.p, methods);
    }
    if (!r->early && r->form == NULL && !atomic_load(&s->ready))
        return loading(c);
    if (atomic_load(&s->draining) && !r->early)
        return hx_server_problem(c, 503, NULL, "shutting_down",
                                 "the server is shutting down");
    return 0;
}

static bool enqueue(hx_server *s, const hx_call *call);

/* Answers what the loop thread itself answers. */
static void answer_early(hx_call *c, const route *r)
{
    c->status = 200;
    if (r->open)
        c->status = answer_health(c->server, c->x);
    else
        answer_root(c->x);
    log_call(c);
}

static bool is_below(hx_str path, const char *folder)
{
    const size_t n = strlen(folder);

    return path.n > n && memcmp(path.p, folder, n) == 0;
}

/* The call of an exchange, with the shape of its errors. */
static void init_call(hx_call *c, hx_server *s, hx_exchange *x, const route *r)
{
    *c = (hx_call) { .server = s, .x = x, .start_us = hx_now_us() };
    snprintf(c->method, sizeof c->method, "%.*s", (int)HX_MIN(x->method.n, 15u),
             x->method.p);
    snprintf(c->path, sizeof c->path, "%.*s", (int)HX_MIN(x->path.n, 199u), x->path.p);
    hx_server_new_id(s, "req_", x->request_id);
    if (r != NULL)
        c->put_problem = r->problem;
    else if (is_below(x->path, "/api/"))
        c->put_problem = hx_ollama_write_problem;
    else if (is_below(x->path, "/v1/messages/") || is_below(x->path, "/messages/"))
        c->put_problem = hx_anthropic_write_problem;
}

/* Logs and says why a request goes no further; loop thread. */
static void turn_away(hx_call *c)
{
    char methods[40], allow[80];

    c->status = c->problem.status;
    log_call(c);
    if (c->status == 405) {
        list_methods(c->x->path, methods);
        snprintf(allow, sizeof allow, "Allow: %s%s, OPTIONS\r\n", methods,
                 strstr(methods, "GET") != NULL ? ", HEAD" : "");
        reply_problem(c, allow);
    } else if (c->status == 401) {
        reply_problem(c, "WWW-Authenticate: Bearer\r\n");
    } else {
        hx_server_reply_problem(c);
    }
}

/* For http.c. A stranger hears of the key alone. */
static void refuse_early(void *ud, hx_exchange *x, int status, const char *code,
                         const char *why)
{
    const route *r = find_route(x->method, x->path);
    hx_call c;

    init_call(&c, ud, x, r);
    if (check_key(ud, r, &c) == 0)
        hx_server_problem(&c, status, NULL, code, "%s", why);
    turn_away(&c);
}

/* The handler of http.c; loop thread. */
static void route_request(void *ud, hx_exchange *x)
{
    hx_server *s = ud;
    const route *r = find_route(x->method, x->path);
    hx_call c;

    init_call(&c, s, x, r);
    if (refuse(s, x, r, &c) == 0) {
        if (r->early) {
            answer_early(&c, r);
            return;
        }
        c.run = r->run;
        c.no_body = r->no_body || r->method[0] != 'P';
        c.form = r->form;
        if (enqueue(s, &c))
            return;
        hx_server_problem(&c, 503, NULL, "out_of_memory", "server: no worker is free");
    }
    turn_away(&c);
}

/* ---- workers ----------------------------------------------------------- */

static void put(call_queue *q, hx_call *c)
{
    c->next = NULL;
    if (q->last != NULL)
        q->last->next = c;
    else
        q->first = c;
    q->last = c;
    q->n++;
}

static hx_call *get(call_queue *q)
{
    hx_call *c = q->first;

    if (c == NULL)
        return NULL;
    q->first = c->next;
    if (q->first == NULL)
        q->last = NULL;
    q->n--;
    return c;
}

static int parse_body(hx_call *c)
{
    const hx_str coding = hx_http_header(c->x, "content-encoding");
    hx_err err = { 0 };
    int rc;

    if (coding.n > 0 && !hx_str_is(coding, "identity"))
        return hx_server_problem(
            c, 415, NULL, "unsupported_media_type",
            "Content-Encoding: \"%.*s\" is not read here; send the body as it is",
            (int)HX_MIN(coding.n, 40u), coding.p);
    rc = hx_json_parse(&c->body, c->x->body, 128, &err);
    if (rc != 0)
        return hx_server_problem(c, rc == HX_ENOMEM ? 503 : 400, NULL, "invalid_json",
                                 "request body: %s", err.msg);
    if (hx_json_kind(c->body) != HX_JSON_OBJECT)
        return hx_server_problem(c, 400, NULL, "invalid_json",
                                 "request body: found %s, expected an object",
                                 hx_json_kind_name(c->body));
    return 0;
}

void hx_server_finish(hx_call *c, int rc)
{
    if (rc != 0)
        hx_server_reply_problem(c);
    log_call(c);
    hx_json_free(c->body);
    hx_json_free(c->also);
    hx_arena_reset(&c->arena);
    hx_free(c);
}

/* The model is not there yet. Who streams waits for it, with its headers and keepalives
 * on the way. HX_LATER, a problem, or 0: it just came. */
static int hold(hx_call *c)
{
    hx_server *s = c->server;
    bool held;

    if (c->form == NULL ||
        !hx_json_bool(hx_params_get(c->body, "stream"), c->form->usual))
        return loading(c);
    hx_server_begin_stream(c, (hx_str) { NULL, 0 });
    hx_http_flush(s->http);
    pthread_mutex_lock(&s->lock);
    held = !atomic_load(&s->ready) && !atomic_load(&s->draining);
    if (held)
        put(&s->held, c);
    pthread_mutex_unlock(&s->lock);
    return held ? HX_LATER : atomic_load(&s->ready) ? 0 : loading(c);
}

/* The server stops before the model has come. */
static void end_held(void *ud)
{
    hx_server *s = ud;
    hx_call *c, *next;

    pthread_mutex_lock(&s->lock);
    c = s->held.first;
    s->held = (call_queue) { 0 };
    pthread_mutex_unlock(&s->lock);
    for (; c != NULL; c = next) {
        next = c->next;
        hx_server_finish(c, loading(c));
    }
}

static void serve(hx_call *c)
{
    hx_server *s = c->server;
    const bool parsed = c->body != NULL || c->no_body;
    int rc = parsed ? 0 : parse_body(c);

    if (!parsed && s->log_prompts)
        hx_log(HX_LOG_INFO, "%s: %.*s", c->path, (int)HX_MIN(c->x->body.n, 100000u),
               c->x->body.p);
    if (rc == 0 && !atomic_load(&s->ready))
        rc = hold(c);
    if (rc == 0) {
        c->engine = s->engine;
        c->info = &s->info;
        rc = c->run(c);
    }
    if (rc != HX_LATER)
        hx_server_finish(c, rc);
}

/* Slow calls first: they come from workers that are on their way here, or wait for one of
 * their own to end; so nobody need be woken for them. Under lock. */
static hx_call *next_call(hx_server *s)
{
    hx_call *c = s->n_slow < s->max_worker / 2 ? get(&s->slow) : NULL;

    return c != NULL ? c : get(&s->calls);
}

/* The next call, or NULL when this worker should end. Under lock. */
static hx_call *await_call(hx_server *s)
{
    const int64_t until = hx_now_us() + IDLE_US;
    hx_call *c;
    bool more = true;

    s->n_idle++;
    while ((c = next_call(s)) == NULL && !s->closing && more)
        more = hx_cond_until(&s->work, &s->lock, until);
    s->n_idle--;
    return c;
}

static void *work(void *ud)
{
    hx_server *s = ud;
    hx_call *c;

    pthread_mutex_lock(&s->lock);
    while ((c = await_call(s)) != NULL) {
        const bool slow = c->slow;

        s->n_slow += slow;
        pthread_mutex_unlock(&s->lock);
        serve(c);
        pthread_mutex_lock(&s->lock);
        s->n_slow -= slow;
    }
    if (--s->n_worker == 0)
        pthread_cond_broadcast(&s->gone);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static bool start_worker(hx_server *s)
{
    pthread_attr_t attr;
    pthread_t thread;
    bool ok;

    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    ok = pthread_create(&thread, &attr, work, s) == 0;
    pthread_attr_destroy(&attr);
    s->n_worker += ok;
    return ok;
}

/* False when nobody will ever take the call, which is copied. */
static bool enqueue(hx_server *s, const hx_call *call)
{
    hx_call *c = hx_new(hx_call, 1);
    bool ok = true;

    if (c == NULL)
        return false;
    *c = *call;
    hx_arena_init(&c->arena, ARENA_MAX_BYTES);
    pthread_mutex_lock(&s->lock);
    if (s->n_idle <= s->calls.n && s->n_worker < s->max_worker && !start_worker(s))
        ok = s->n_worker > 0;
    if (ok) {
        put(&s->calls, c);
        pthread_cond_signal(&s->work);
    }
    pthread_mutex_unlock(&s->lock);
    if (!ok)
        hx_free(c);
    return ok;
}

int hx_server_defer(hx_call *c, hx_route_fn *run, bool stream)
{
    hx_server *s = c->server;
    bool ok;

    pthread_mutex_lock(&s->lock);
    ok = s->slow.n < s->info.max_queue;
    if (ok) {
        if (stream)
            hx_server_begin_stream(c, (hx_str) { NULL, 0 });
        c->run = run;
        c->slow = true;
        put(&s->slow, c);
    }
    pthread_mutex_unlock(&s->lock);
    if (ok) {
        hx_http_flush(s->http);
        return HX_LATER;
    }
    return hx_server_problem(c, 429, NULL, "rate_limit_exceeded",
                             "queue: all %lld places are taken; try again later",
                             (long long)s->info.max_queue);
}

/* ---- life -------------------------------------------------------------- */

static char *dup_str(const char *s)
{
    const size_t n = s != NULL ? strlen(s) + 1 : 0;
    char *copy = n > 0 ? hx_alloc(n) : NULL;

    if (copy != NULL)
        memcpy(copy, s, n);
    return copy;
}

int hx_server_open(hx_server **out, const hx_server_opt *opt, hx_err *err)
{
    const hx_http_opt http = { .host = opt->host,
                               .port = opt->port,
                               .unix_path = opt->unix_path,
                               .tls_cert = opt->tls_cert,
                               .tls_key = opt->tls_key,
                               .cors = opt->cors,
                               .admit = admit,
                               .refuse = refuse_early,
                               .on_stop = end_held,
                               .max_body_bytes = opt->max_body_bytes,
                               .max_connections = opt->max_connections,
                               .keepalive_ms = opt->keepalive_ms };
    hx_server *s = hx_new(hx_server, 1);
    int rc;

    *out = NULL;
    if (s == NULL)
        return hx_fail(err, HX_ENOMEM, "server: no memory");
    pthread_mutex_init(&s->lock, NULL);
    hx_cond_init(&s->work);
    hx_cond_init(&s->gone);
    s->official_tokens = opt->official_tokens;
    s->log_prompts = opt->log_prompts;
    s->drain_ms = opt->drain_ms > 0 ? opt->drain_ms : 30000;
    s->max_worker = SPARE_WORKERS + hx_sys_n_cpu();
    s->created_s = (int64_t)time(NULL);
    s->open_us = hx_now_us();
    if (getrandom(&s->seed, sizeof s->seed, 0) != (ssize_t)sizeof s->seed)
        s->seed = (uint64_t)hx_now_us();
    s->served_name = dup_str(opt->served_name);
    if (opt->served_name != NULL && s->served_name == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "server: no memory");
        goto fail;
    }
    if ((rc = hx_keys_open(&s->keys, opt->api_key, opt->admin_key, err)) != 0 ||
        (rc = hx_http_open(&s->http, &http, route_request, s, err)) != 0 ||
        (rc = hx_gen_open_pump(&s->pump, s->http, err)) != 0 ||
        (rc = hx_response_store_open(&s->responses, err)) != 0)
        goto fail;
    *out = s;
    return 0;
fail:
    hx_server_close(s);
    return rc;
}

int hx_server_port(const hx_server *s)
{
    return hx_http_port(s->http);
}

void hx_server_set_engine(hx_server *s, hx_engine *e)
{
    s->engine = e;
    hx_get_info(e, &s->info);
    pthread_mutex_lock(&s->lock);
    s->ready_us = hx_now_us();
    atomic_store(&s->ready, true);
    for (hx_call *c; (c = get(&s->held)) != NULL;) {
        put(&s->calls, c);
        if (s->n_worker < s->max_worker && s->calls.n > s->n_idle)
            start_worker(s);
    }
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
}

void hx_server_set_loading(hx_server *s, uint64_t done_bytes, uint64_t total_bytes)
{
    if (total_bytes != atomic_load(&s->load_total) ||
        done_bytes <
            atomic_load(&s->load_done)) { /* something else, as after a download */
        atomic_store(&s->load_us, hx_now_us());
        atomic_store(&s->load_first, done_bytes);
    }
    atomic_store(&s->load_total, total_bytes);
    atomic_store(&s->load_done, done_bytes);
}

/* Once the loop has returned no request comes any more, and clients are gone for those
 * who still compute: they end by themselves. */
int hx_server_run(hx_server *s, hx_err *err)
{
    const int rc = hx_http_run(s->http, err);

    end_held(s);
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->work);
    while (s->n_worker > 0)
        pthread_cond_wait(&s->gone, &s->lock);
    pthread_mutex_unlock(&s->lock);
    hx_gen_close_pump(s->pump);
    s->pump = NULL;
    return rc;
}

void hx_server_stop(hx_server *s)
{
    hx_http_stop(s->http, atomic_exchange(&s->draining, true) ? 0 : s->drain_ms);
}

void hx_server_close(hx_server *s)
{
    if (s == NULL)
        return;
    hx_assert(s->n_worker == 0 && s->calls.n + s->slow.n == 0);
    hx_gen_close_pump(s->pump);
    hx_response_store_close(s->responses);
    hx_http_close(s->http);
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->gone);
    pthread_mutex_destroy(&s->lock);
    hx_keys_close(s->keys);
    hx_free(s->served_name);
    hx_free(s);
}
