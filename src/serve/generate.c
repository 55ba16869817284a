/* generate.c - the one path from a neutral request to answers: prompts to ids, ids to
 * streams, events of all streams to pieces of text, reasoning and tool calls.
 *
 * Called by the dialects on a worker, which waits here for all its streams and for the
 * client at once. Never builds JSON and never knows a dialect. */
#include "serve/serve.h"

#include <pthread.h>

#define ANSWERS_MAX 256

typedef struct {
    int32_t index, prompt;
    hx_stream *stream;
    hx_reply *reply;     /* chat */
    hx_utf8_stream utf8; /* raw */
    int64_t n_char;      /* raw: characters handed out */
    bool reasoning;
    int64_t n_reasoning;
    bool done;
} answer;

struct hx_gen {
    hx_call *call;
    hx_generate req;
    hx_prompt rendered;       /* chat: by hx_render() */
    int32_t think, think_end; /* ids, or -1 */
    answer *answer;           /* [n_answer] */
    int32_t n_answer;
    hx_gen_fn *fn;
    void *ud;
    const answer *now; /* whose reply pieces arrive */
    hx_sb out, text;   /* for the client; scratch */

    /* Wakes the worker; woken and gone under lock. Engine and loop thread call wake(). */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool woken, gone;
};

/* Signals after the unlock, or the worker would wake only to wait for the lock; g lives
 * on, for the callers hold the lock under which hx_on_ready() and hx_http_on_gone() take
 * these back. */
static void wake(void *ud)
{
    hx_gen *g = ud;
    bool slept;

    pthread_mutex_lock(&g->lock);
    slept = !g->woken;
    g->woken = true;
    pthread_mutex_unlock(&g->lock);
    if (slept)
        pthread_cond_signal(&g->cond);
}

static void wake_gone(void *ud)
{
    hx_gen *g = ud;

    pthread_mutex_lock(&g->lock);
    g->gone = true;
    pthread_mutex_unlock(&g->lock);
    wake(g);
}

/* Waits for news; false when the client has gone. */
static bool wait_news(hx_gen *g)
{
    bool gone;

    pthread_mutex_lock(&g->lock);
    while (!g->woken)
        pthread_cond_wait(&g->cond, &g->lock);
    g->woken = false;
    gone = g->gone;
    pthread_mutex_unlock(&g->lock);
    return !gone;
}

/* ---- open --------------------------------------------------------------- */

/* The chat's ids. The template always opens <think>; who wants none gets it closed again,
 * as the template itself writes an answer without reasoning. */
static int render(hx_gen *g)
{
    const hx_render_opt opt = { .official = hx_server_official_tokens(g->call->server) };
    hx_err err = { 0 };
    int32_t *id;
    int64_t n;
    int rc = hx_render(g->call->engine, g->req.vars, &opt, &id, &n, NULL, &err);

    if (rc != 0)
        return hx_server_problem_err(g->call, rc, "messages", &err);
    g->rendered = (hx_prompt) { id, n };
    if (g->req.no_thinking && g->think_end >= 0 && n > 0 && id[n - 1] == g->think) {
        if ((id = hx_arena_alloc(&g->call->arena, (size_t)(n + 1) * sizeof *id)) == NULL)
            return hx_server_problem(g->call, 413, "messages", "request_too_large",
                                     "messages: no memory for %lld tokens", (long long)n);
        memcpy(id, g->rendered.id, (size_t)n * sizeof *id);
        id[n] = g->think_end;
        hx_free((void *)(uintptr_t)g->rendered.id);
        g->rendered = (hx_prompt) { 0 };
        n++;
    }
    hx_prompt *p = hx_arena_alloc(&g->call->arena, sizeof *p);
    if (p == NULL)
        return hx_server_problem(g->call, 503, NULL, "out_of_memory",
                                 "request: no memory");
    *p = (hx_prompt) { id, n };
    g->req.prompt = p;
    g->req.n_prompt = 1;
    return 0;
}

int hx_gen_check(hx_call *c, const hx_generate *g)
{
    const int64_t ctx = c->info->ctx_tokens;

    if (g->n_prompt > ANSWERS_MAX / g->n)
        return hx_server_problem(
            c, 400, "prompt", "invalid_value",
            "prompt: %d prompts with %d answers each, at most %d answers", g->n_prompt,
            g->n, ANSWERS_MAX);
    for (int32_t i = 0; i < g->n_prompt; i++) {
        const int64_t n = g->prompt[i].n;

        if (n < ctx)
            continue;
        c->problem.n_prompt = n;
        c->problem.n_ctx = ctx;
        return hx_server_problem(
            c, 400, g->chat ? "messages" : "prompt", "context_length_exceeded",
            "the prompt has %lld tokens, the context %lld (one of them for "
            "the answer); shorten it",
            (long long)n, (long long)ctx);
    }
    return 0;
}

static int32_t find_token(void *ud, hx_str text)
{
    return hx_token_id(ud, text);
}

static int open_reply(hx_gen *g, answer *a)
{
    hx_call *c = g->call;
    const hx_prompt *p = &g->req.prompt[a->prompt];
    const hx_reply_format *format = hx_reply_find(c->info->reply_format);
    hx_err err = { 0 };
    int rc;

    a->reasoning = p->n > 0 && g->think >= 0 && p->id[p->n - 1] == g->think;
    const hx_reply_opt opt = { .format = format != NULL ? format : hx_reply_find("plain"),
                               .find = find_token,
                               .ud = c->engine,
                               .tools = g->req.tools,
                               .in_reasoning = a->reasoning,
                               .tools_off = g->req.tools == NULL };

    rc = hx_reply_open(&a->reply, &opt, &err);
    return rc != 0 ? hx_server_problem_err(c, rc, NULL, &err) : 0;
}

static int submit(hx_gen *g, answer *a)
{
    hx_request r = g->req.sampling;
    hx_err err = { 0 };
    int rc;

    r.tokens = g->req.prompt[a->prompt].id;
    r.n_tokens = g->req.prompt[a->prompt].n;
    r.seed += (uint64_t)(a->index % g->req.n);
    if ((rc = hx_submit(g->call->engine, &r, &a->stream, &err)) == 0)
        return 0;
    return hx_server_problem_err(g->call, rc, NULL, &err);
}

static int open_answers(hx_gen *g)
{
    const hx_generate *q = &g->req;
    int rc;

    for (int32_t i = 0; i < q->n_prompt; i++)
        g->call->n_prompt += q->prompt[i].n;
    g->n_answer = q->n_prompt * q->n;
    if ((g->answer = hx_arena_alloc(&g->call->arena,
                                    (size_t)g->n_answer * sizeof *g->answer)) == NULL)
        return hx_server_problem(g->call, 503, NULL, "out_of_memory",
                                 "request: no memory");
    for (int32_t i = 0; i < g->n_answer; i++) {
        g->answer[i].index = i;
        g->answer[i].prompt = i / q->n;
        if ((q->chat && (rc = open_reply(g, &g->answer[i])) != 0) ||
            (rc = submit(g, &g->answer[i])) != 0)
            return rc;
    }
    return 0;
}

int hx_gen_open(hx_gen **out, hx_call *c, const hx_generate *req)
{
    hx_gen *g = hx_arena_alloc(&c->arena, sizeof *g);
    int rc;

    *out = NULL;
    if (g == NULL)
        return hx_server_problem(c, 503, NULL, "out_of_memory", "request: no memory");
    g->call = c;
    g->req = *req;
    g->think = hx_token_id(c->engine, HX_STR("<think>"));
    g->think_end = hx_token_id(c->engine, HX_STR("</think>"));
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->cond, NULL);
    if ((req->chat && (rc = render(g)) != 0) || (rc = hx_gen_check(c, &g->req)) != 0 ||
        (rc = open_answers(g)) != 0) {
        hx_gen_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

const hx_prompt *hx_gen_prompt(const hx_gen *g, int32_t i)
{
    return &g->req.prompt[i];
}

void hx_gen_close(hx_gen *g)
{
    if (g == NULL)
        return;
    for (int32_t i = 0; g->answer != NULL && i < g->n_answer; i++) {
        hx_stream_free(g->answer[i].stream);
        hx_reply_close(g->answer[i].reply);
    }
    hx_free((void *)(uintptr_t)g->rendered.id);
    hx_sb_free(&g->out);
    hx_sb_free(&g->text);
    pthread_cond_destroy(&g->cond);
    pthread_mutex_destroy(&g->lock);
}

/* ---- events to pieces --------------------------------------------------- */

static void hand_reply(void *ud, const hx_reply_event *ev)
{
    hx_gen *g = ud;
    answer *a = &g->answer[g->now->index];

    a->reasoning = ev->kind == HX_REPLY_REASONING;
    g->fn(g->ud, &(hx_gen_event) { .kind = HX_GEN_REPLY, .index = a->index, .reply = ev },
          &g->out);
}

static int64_t count_chars(hx_str s)
{
    int64_t n = 0;

    for (size_t i = 0; i < s.n; i++)
        n += (s.p[i] & 0xc0) != 0x80;
    return n;
}

/* Log-probabilities of a chat are those of its content: what reasons or only marks has
 * none. */
static bool is_shown(const hx_gen *g, const answer *a, int32_t token, hx_str bytes)
{
    return a->reply == NULL || (!a->reasoning && token != g->think_end && bytes.n > 0);
}

static int take_token(hx_gen *g, answer *a, const hx_event *ev, int32_t i, hx_err *err)
{
    const int32_t from = i > 0 ? ev->end[i - 1] : 0, n_top = g->req.sampling.n_top;
    hx_str bytes = { ev->bytes.p + from, (size_t)(ev->end[i] - from) };
    bool special;

    hx_token_bytes(g->call->engine, ev->tokens[i], &special);
    if (special && !g->req.keep_special)
        bytes.n = 0;
    if (a->reply != NULL && ev->tokens[i] == g->think)
        a->reasoning = true;
    if (ev->logprob != NULL && is_shown(g, a, ev->tokens[i], bytes))
        g->fn(g->ud,
              &(hx_gen_event) {
                  .kind = HX_GEN_TOKEN,
                  .index = a->index,
                  .token = ev->tokens[i],
                  .bytes = bytes,
                  .logprob = ev->logprob[i],
                  .top = ev->top != NULL ? ev->top + (size_t)i * (size_t)n_top : NULL,
                  .offset = a->n_char },
              &g->out);
    if (a->reply == NULL) {
        const size_t before = g->text.n;

        hx_utf8_feed(&a->utf8, bytes, &g->text);
        a->n_char += count_chars((hx_str) { g->text.p + before, g->text.n - before });
        return 0;
    }
    const bool was = a->reasoning;
    const int rc = hx_reply_feed(a->reply, ev->tokens[i], bytes, hand_reply, g, err);
    if (ev->tokens[i] == g->think_end)
        a->reasoning = false;
    a->n_reasoning += was && (a->reasoning || ev->tokens[i] == g->think_end);
    return rc;
}

static void hand_text(hx_gen *g, const answer *a)
{
    if (g->text.n > 0)
        g->fn(g->ud,
              &(hx_gen_event) { .kind = HX_GEN_TEXT,
                                .index = a->index,
                                .text = { g->text.p, g->text.n } },
              &g->out);
    g->text.n = 0;
}

static int take_tokens(hx_gen *g, answer *a, const hx_event *ev, hx_err *err)
{
    int rc = 0;

    g->now = a;
    for (int32_t i = 0; rc == 0 && i < ev->n_tokens; i++)
        rc = take_token(g, a, ev, i, err);
    hand_text(g, a);
    return rc;
}

static int take_end(hx_gen *g, answer *a, const hx_event *ev, hx_err *err)
{
    int32_t n_call = 0;
    int rc = 0;

    g->now = a;
    if (a->reply != NULL)
        rc = hx_reply_end(a->reply, hand_reply, g, &n_call, err);
    else
        hx_utf8_end(&a->utf8, &g->text);
    hand_text(g, a);
    a->done = true;
    g->call->n_answer += ev->generated;
    g->fn(g->ud,
          &(hx_gen_event) { .kind = HX_GEN_END,
                            .index = a->index,
                            .stop = ev->stop,
                            .n_call = n_call,
                            .n_prompt = ev->prompt,
                            .n_cached = ev->cached,
                            .n_answer = ev->generated,
                            .n_reasoning = a->n_reasoning,
                            .times = ev->times },
          &g->out);
    return rc;
}

static int take_event(hx_gen *g, answer *a, const hx_event *ev, hx_err *err)
{
    switch (ev->kind) {
    case HX_EV_TOKENS:
        return take_tokens(g, a, ev, err);
    case HX_EV_DONE:
        return take_end(g, a, ev, err);
    case HX_EV_ERROR:
        *err = ev->err;
        return ev->err.code != 0 ? ev->err.code : HX_EDEVICE;
    default:
        return 0;
    }
}

/* ---- run ---------------------------------------------------------------- */

static bool flush(hx_gen *g, bool begun)
{
    const bool ok = !begun || g->out.n == 0 ||
                    hx_http_send(g->call->x, (hx_str) { g->out.p, g->out.n });

    g->out.n = 0;
    return ok;
}

/* Takes what every stream has now; *live gets the answers that go on. */
static int take_ready(hx_gen *g, bool begun, int32_t *live, hx_err *err)
{
    *live = 0;
    for (int32_t i = 0; i < g->n_answer; i++) {
        answer *a = &g->answer[i];
        hx_event ev;
        int rc = 0;

        while (rc == 0 && !a->done && hx_next(a->stream, &ev, 0) == 1) {
            if ((rc = take_event(g, a, &ev, err)) == 0 && (g->out.bad || g->text.bad))
                rc = hx_fail(err, HX_ENOMEM, "answer: no memory for its text");
            if (rc == 0 && !flush(g, begun))
                rc = hx_fail(err, HX_ECANCEL, "client: gone");
        }
        if (rc != 0)
            return rc;
        *live += !a->done;
    }
    return 0;
}

int hx_gen_run(hx_gen *g, bool begun, hx_gen_fn *fn, void *ud)
{
    hx_err err = { 0 };
    int32_t live = g->n_answer;
    int rc = 0;

    g->fn = fn;
    g->ud = ud;
    hx_http_on_gone(g->call->x, wake_gone, g);
    for (int32_t i = 0; i < g->n_answer; i++)
        hx_on_ready(g->answer[i].stream, wake, g);
    while ((rc = take_ready(g, begun, &live, &err)) == 0 && live > 0)
        if (!wait_news(g)) {
            rc = HX_ECANCEL;
            break;
        }
    hx_http_on_gone(g->call->x, NULL, NULL);
    for (int32_t i = 0; i < g->n_answer; i++) {
        hx_on_ready(g->answer[i].stream, NULL, NULL);
        if (!g->answer[i].done)
            hx_cancel(g->answer[i].stream);
    }
    if (rc == 0)
        return 0;
    if (rc == HX_ECANCEL && hx_http_gone(g->call->x))
        return HX_ECANCEL;
    hx_server_problem(g->call, rc == HX_ENOMEM || rc == HX_ECANCEL ? 503 : 500, NULL,
                      "engine_error", "%s", err.msg);
    return rc;
}
