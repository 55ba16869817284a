/* generate.c - the one path from a neutral request to answers: prompts to ids, ids to
 * streams, events of all streams to pieces of text, reasoning and tool calls.
 *
 * A dialect opens and starts a generation on its worker; from then on the pump, one
 * thread for all of them, serves it until it ends. Never builds JSON, never knows a
 * dialect, never waits for a client. */
#include "serve/serve.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#define ANSWERS_MAX 256
#define GATHER_NS   100000  /* a step's tokens come in this time */
#define COMMENT_US  2000000 /* between two comments on a stream that waits */
#define EVENT_US    8000000 /* between two events there */

typedef struct {
    hx_gen *gen;
    int32_t index, prompt;
    hx_stream *stream;
    hx_reply *reply;     /* chat */
    hx_utf8_stream utf8; /* raw */
    int64_t n_char;      /* raw: characters handed out */
    bool reasoning;
    int64_t n_reasoning, n_token;
    hx_ids said;   /* with tools: what was sampled */
    hx_loop *loop; /* NULL: not looked for */
    int32_t loop_tokens, loop_times;
    bool done;
    atomic_bool ready; /* hx_next() may have something */
} answer;

struct hx_gen {
    hx_call *call;
    hx_generate req;
    hx_ids rendered;          /* chat: by hx_render(), with earlier calls as sampled */
    char id[40];              /* "": none */
    int32_t think, think_end; /* ids, or -1 */
    answer *answer;           /* [n_answer] */
    int32_t n_answer, n_live;
    hx_gen_sink sink;
    hx_http_state client; /* as the last flush() found it */
    const answer *now;    /* whose reply pieces arrive */
    int64_t comment_us;   /* when the last comment was written, or it began */
    hx_sb out, text;      /* for the client; scratch */

    hx_pump *pump;
    hx_gen *live_next, **live_at; /* in pump->live */
    hx_gen *next;                 /* in pump->ready */
    atomic_bool queued;           /* in pump->ready, or about to be */
    bool ended;                   /* frees itself when it is not queued */
    int rc;                       /* of the end, for the call */
};

/* The stack takes a generation when its stream or its client has news. The pump takes the
 * whole stack at once; news is posted whenever it stops being empty. */
struct hx_pump {
    hx_http *http;
    pthread_t thread;
    _Atomic(hx_gen *) ready;
    sem_t news;
    atomic_int n_gen; /* started and not yet freed */
    atomic_bool closing;
    hx_calls *calls;

    pthread_mutex_t lock; /* guards live */
    hx_gen *live;         /* those whose streams may still be used */
};

/* ---- open --------------------------------------------------------------- */

static int32_t find_token(void *ud, hx_str text)
{
    return hx_token_id(ud, text);
}

/* How an answer after this prompt is read. */
static hx_reply_opt reply_opt(const hx_gen *g, hx_prompt p)
{
    const hx_call *c = g->call;
    const hx_reply_format *format = hx_reply_find(c->info->reply_format);

    return (hx_reply_opt) {
        .format = format != NULL ? format : hx_reply_find("plain"),
        .find = find_token,
        .ud = c->engine,
        .tools = g->req.tools,
        .in_reasoning = p.n > 0 && g->think >= 0 && p.id[p.n - 1] == g->think,
        .tools_off = g->req.tools == NULL || g->req.tool_choice == HX_TOOLS_NONE,
    };
}

/* A turn before is read like an answer to what came before it. */
static bool same_turn(void *ud, hx_prompt given, hx_prompt was)
{
    const hx_gen *g = ud;
    hx_reply_opt opt = reply_opt(g, (hx_prompt) { given.id - 1, 1 });

    opt.tools_off = false;
    return hx_toolset_same(g->call->engine, &opt, given, was);
}

/* The chat's ids, earlier calls as they were sampled; what that adds, reasoning that the
 * client left out, must not make the prompt too long. */
static int render_ids(hx_gen *g, hx_err *err)
{
    hx_call *c = g->call;
    const hx_render_opt opt = { .official = hx_server_official_tokens(c->server) };
    const hx_calls_opt replay = { .info = c->info, .same = same_turn, .ud = g };
    hx_ids *ids = &g->rendered;
    int rc = hx_render(c->engine, g->req.vars, &opt, &ids->p, &ids->n, NULL, err);

    ids->cap = ids->n;
    if (rc != 0 || g->req.tools == NULL || g->req.rendered_anew)
        return rc;
    rc = hx_calls_replay(hx_server_pump(c->server)->calls, &replay, ids, err);
    if (rc != 0 || ids->n < c->info->ctx_tokens)
        return rc;
    hx_ids_free(ids);
    *ids = (hx_ids) { 0 };
    g->req.rendered_anew = true;
    return render_ids(g, err);
}

/* The template always opens <think>; who wants none gets it closed again, as the template
 * itself writes an answer without reasoning. */
static int render(hx_gen *g)
{
    hx_call *c = g->call;
    hx_ids *ids = &g->rendered;
    hx_err err = { 0 };
    int rc = render_ids(g, &err);

    if (rc == 0 && g->req.no_thinking && g->think_end >= 0 && ids->n > 0 &&
        ids->p[ids->n - 1] == g->think)
        rc = hx_ids_add(ids, &g->think_end, 1, &err);
    if (rc != 0)
        return hx_server_problem_err(c, rc, "messages", &err);
    hx_prompt *p = hx_arena_alloc(&c->arena, sizeof *p);
    if (p == NULL)
        return hx_server_no_memory(c);
    *p = (hx_prompt) { ids->p, ids->n };
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

static int open_reply(hx_gen *g, answer *a)
{
    const hx_reply_opt opt = reply_opt(g, g->req.prompt[a->prompt]);
    hx_err err = { 0 };
    int rc;

    a->reasoning = opt.in_reasoning;
    rc = hx_reply_open(&a->reply, &opt, &err);
    return rc != 0 ? hx_server_problem_err(g->call, rc, NULL, &err) : 0;
}

/* The budget of reasoning; a part of max_tokens is left for the answer. */
static int64_t think_max(const hx_generate *q)
{
    const int64_t max = q->sampling.max_new;

    if (q->think_budget <= 0)
        return 0;
    return max == 0 ? q->think_budget
                    : HX_MAX(HX_MIN(q->think_budget, max - HX_MAX(max / 4, 1)), 1);
}

static int submit(hx_gen *g, answer *a)
{
    hx_request r = g->req.sampling;
    hx_err err = { 0 }, named = { 0 };
    int rc;

    if (g->req.loop_guard && (a->loop = hx_loop_open()) == NULL)
        return hx_server_no_memory(g->call);
    r.tokens = g->req.prompt[a->prompt].id;
    r.n_tokens = g->req.prompt[a->prompt].n;
    r.seed += (uint64_t)(a->index % g->req.n);
    r.client = hx_server_client(g->call);
    r.progress = g->req.stream;
    r.grammar_after = a->reasoning ? g->think_end : 0;
    r.think_end = a->reasoning ? HX_MAX(g->think_end, 0) : 0;
    r.think_max = think_max(&g->req);
    if (g->req.unpin)
        hx_unpin(g->call->engine, r.tokens, r.n_tokens, NULL);
    rc = hx_submit(g->call->engine, &r, &a->stream, &err);
    if (rc != 0 && rc != HX_EBUSY && rc != HX_ENOMEM && g->req.grammar_optional) {
        r.grammar_kind = HX_GRAMMAR_NONE;
        rc = hx_submit(g->call->engine, &r, &a->stream, &err);
    }
    if (rc == 0)
        return 0;
    const char *param = g->req.grammar_param;
    if (param == NULL || (rc != HX_EFORMAT && rc != HX_EUNSUP && rc != HX_ELIMIT))
        return hx_server_problem_err(g->call, rc, NULL, &err);
    hx_fail(&named, rc, "%s: %s", param, err.msg);
    return hx_server_problem_err(g->call, rc, param, &named);
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
        return hx_server_no_memory(g->call);
    for (int32_t i = 0; i < g->n_answer; i++) {
        g->answer[i].gen = g;
        g->answer[i].index = i;
        g->answer[i].prompt = i / q->n;
        if ((q->chat && (rc = open_reply(g, &g->answer[i])) != 0) ||
            (rc = submit(g, &g->answer[i])) != 0)
            return rc;
    }
    return 0;
}

static int prepare(hx_gen **out, hx_call *c, const hx_generate *req)
{
    hx_gen *g = hx_arena_alloc(&c->arena, sizeof *g);

    *out = g;
    if (g == NULL)
        return hx_server_no_memory(c);
    g->call = c;
    g->req = *req;
    g->think = hx_token_id(c->engine, HX_STR("<think>"));
    g->think_end = hx_token_id(c->engine, HX_STR("</think>"));
    return 0;
}

int hx_gen_count_prompt(hx_call *c, const hx_generate *req, int64_t *n)
{
    hx_gen *g;
    int rc;

    if ((rc = prepare(&g, c, req)) == 0 && (rc = render(g)) == 0)
        *n = g->req.prompt[0].n;
    hx_gen_close(g);
    return rc;
}

int hx_gen_open(hx_gen **out, hx_call *c, const hx_generate *req)
{
    hx_gen *g;
    int rc;

    *out = NULL;
    if ((rc = prepare(&g, c, req)) != 0)
        return rc;
    if ((req->chat &&
         ((rc = hx_toolset_constrain(c, &g->req)) != 0 || (rc = render(g)) != 0)) ||
        (rc = hx_gen_check(c, &g->req)) != 0 || (rc = open_answers(g)) != 0) {
        hx_gen_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void hx_gen_close(hx_gen *g)
{
    if (g == NULL)
        return;
    for (int32_t i = 0; g->answer != NULL && i < g->n_answer; i++) {
        hx_stream_free(g->answer[i].stream);
        hx_reply_close(g->answer[i].reply);
        hx_ids_free(&g->answer[i].said);
        hx_loop_close(g->answer[i].loop);
    }
    hx_ids_free(&g->rendered);
    hx_sb_free(&g->out);
    hx_sb_free(&g->text);
}

void hx_gen_cancel(hx_gen *g)
{
    for (int32_t i = 0; i < g->n_answer; i++)
        hx_cancel(g->answer[i].stream);
}

/* ---- events to pieces --------------------------------------------------- */

static void hand(hx_gen *g, const hx_gen_event *ev)
{
    g->sink.event(g->sink.ud, ev, &g->out);
}

static void hand_reply(void *ud, const hx_reply_event *ev)
{
    hx_gen *g = ud;
    answer *a = &g->answer[g->now->index];

    a->reasoning = ev->kind == HX_REPLY_REASONING;
    hand(g, &(hx_gen_event) { .kind = HX_GEN_REPLY, .index = a->index, .reply = ev });
}

int64_t hx_gen_count_chars(hx_str utf8)
{
    int64_t n = 0;

    for (size_t i = 0; i < utf8.n; i++)
        n += (utf8.p[i] & 0xc0) != 0x80;
    return n;
}

/* What g->text holds, whole characters. */
static void hand_text(hx_gen *g, answer *a)
{
    const hx_str text = { g->text.p, g->text.n };

    g->text.n = 0;
    if (text.n > 0 || g->req.every_token)
        hand(g, &(hx_gen_event) { .kind = HX_GEN_TEXT, .index = a->index, .text = text });
    a->n_char += hx_gen_count_chars(text);
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
    if ((ev->logprob != NULL || g->req.every_token) &&
        is_shown(g, a, ev->tokens[i], bytes))
        hand(g, &(hx_gen_event) {
                    .kind = HX_GEN_TOKEN,
                    .index = a->index,
                    .token = ev->tokens[i],
                    .bytes = bytes,
                    .logprob = ev->logprob != NULL ? ev->logprob[i] : 0,
                    .top = ev->top != NULL ? ev->top + (size_t)i * (size_t)n_top : NULL,
                    .offset = a->n_char });
    a->n_token++;
    if (g->req.chat && g->req.tools != NULL)
        hx_ids_add(&a->said, &ev->tokens[i], 1, NULL); /* without, it is rendered anew */
    if (a->reply == NULL) {
        hx_utf8_feed(&a->utf8, bytes, &g->text);
        hand_text(g, a);
        return 0;
    }
    const bool was = a->reasoning;
    const int rc = hx_reply_feed(a->reply, ev->tokens[i], bytes, hand_reply, g, err);
    if (ev->tokens[i] == g->think_end)
        a->reasoning = false;
    a->n_reasoning += was && (a->reasoning || ev->tokens[i] == g->think_end);
    return rc;
}

/* What still comes of it is dropped. */
static void end_loop(const hx_gen *g, answer *a)
{
    hx_log(HX_LOG_WARN, "%s: answer %d ended: it repeats the same %d tokens (%d times)",
           g->id[0] != '\0' ? g->id : g->call->path, a->index, a->loop_tokens,
           a->loop_times);
    hx_cancel(a->stream);
}

/* A turn with calls that is whole comes back as it is. */
static void keep_calls(hx_gen *g, const answer *a, hx_stop stop, int32_t n_call)
{
    if (n_call > 0 && stop == HX_STOP_EOS && a->said.n == a->n_token &&
        !g->req.sampling.no_store)
        hx_calls_keep(g->pump->calls, g->req.prompt[a->prompt],
                      (hx_prompt) { a->said.p, a->said.n });
}

static int take_tokens(hx_gen *g, answer *a, const hx_event *ev, hx_err *err)
{
    int rc = 0;

    g->now = a;
    for (int32_t i = 0; rc == 0 && i < ev->n_tokens && a->loop_tokens == 0; i++) {
        rc = take_token(g, a, ev, i, err);
        if (a->loop != NULL &&
            hx_loop_feed(a->loop, ev->tokens[i], &a->loop_tokens, &a->loop_times))
            end_loop(g, a);
    }
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
    keep_calls(g, a, ev->stop, n_call);
    a->done = true;
    g->n_live--;
    g->call->n_answer += ev->generated;
    g->call->n_cached += ev->cached;
    g->call->times = ev->times;
    hand(g, &(hx_gen_event) { .kind = HX_GEN_END,
                              .index = a->index,
                              .stop = a->loop_tokens > 0 ? HX_STOP_EOS : ev->stop,
                              .loop_tokens = a->loop_tokens,
                              .loop_times = a->loop_times,
                              .stop_index = ev->stop_index,
                              .n_call = n_call,
                              .n_prompt = ev->prompt,
                              .n_cached = ev->cached,
                              .miss = ev->miss,
                              .miss_pos = ev->miss_pos,
                              .n_answer = ev->generated,
                              .n_reasoning = a->n_reasoning,
                              .times = ev->times,
                              .experts = ev->experts });
    return rc;
}

/* Comments are for people who look, and for proxies: clients skip them. */
static void take_progress(hx_gen *g, const answer *a, const hx_event *ev)
{
    const int64_t now = hx_now_us();

    if (g->req.progress && g->sink.progress != NULL) {
        g->sink.progress(
            g->sink.ud,
            &(hx_gen_progress) { .index = a->index,
                                 .n_prompt = ev->prompt,
                                 .n_cached = ev->cached,
                                 .n_prefilled = HX_MAX(ev->prefilled, ev->cached),
                                 .queue = ev->queue,
                                 .eta_ms = ev->eta_ms,
                                 .times = ev->times },
            &g->out);
        return;
    }
    /* Who queues is told each place, as the engine tells it; the rest comes all the time. */
    const bool often = ev->times.started_us != 0 || g->sink.waiting.n > 0;
    if (often && now - g->comment_us < (g->sink.waiting.n > 0 ? EVENT_US : COMMENT_US))
        return;
    g->comment_us = now;
    if (g->sink.waiting.n > 0) {
        hx_sb_add(&g->out, g->sink.waiting.p, g->sink.waiting.n);
        return;
    }
    if (ev->times.started_us == 0)
        hx_sb_printf(&g->out, ": queue %lld", (long long)ev->queue + 1);
    else
        hx_sb_printf(&g->out, ": prompt %lld/%lld", (long long)ev->prefilled,
                     (long long)ev->prompt);
    if (ev->eta_ms >= 0)
        hx_sb_printf(&g->out, ", %.1f s", (double)ev->eta_ms / 1e3);
    hx_sb_str(&g->out, "\n\n");
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
    case HX_EV_PROGRESS:
        if (g->sink.stream)
            take_progress(g, a, ev);
        return 0;
    default:
        return 0;
    }
}

/* ---- on the pump -------------------------------------------------------- */

static void flush(hx_gen *g)
{
    const hx_str out = { g->out.p, g->out.n };

    g->out.n = 0;
    if (g->sink.stream)
        g->client = hx_http_send(g->call->x, out);
}

/* Takes what the stream of a has, as far as the client keeps up; the rest waits in the
 * engine, which then pauses the stream. */
static int take_answer(hx_gen *g, answer *a, hx_err *err)
{
    hx_event ev;
    int rc;

    while (!a->done && g->client == HX_HTTP_OPEN && hx_next(a->stream, &ev, 0) == 1) {
        if ((rc = take_event(g, a, &ev, err)) != 0)
            return rc;
        if (g->out.bad || g->text.bad)
            return hx_fail(err, HX_ENOMEM, "answer: no memory for its text");
        flush(g);
    }
    if (g->client == HX_HTTP_FULL)
        atomic_store(&a->ready, true);
    return 0;
}

static int take_answers(hx_gen *g, hx_err *err)
{
    int rc = 0;

    if (hx_http_gone(g->call->x))
        g->client = HX_HTTP_GONE;
    else if (g->client == HX_HTTP_FULL)
        flush(g); /* asks whether it still is */
    for (int32_t i = 0; i < g->n_answer && rc == 0 && g->client == HX_HTTP_OPEN; i++)
        if (atomic_exchange(&g->answer[i].ready, false))
            rc = take_answer(g, &g->answer[i], err);
    if (rc == 0 && g->client == HX_HTTP_GONE)
        rc = hx_fail(err, HX_ECANCEL, "client: gone");
    else if (rc == 0 && g->n_live > 0 && hx_http_over(g->call->x))
        rc = hx_fail(err, HX_ECANCEL, "the server is shutting down");
    return rc;
}

static void live_add(hx_gen *g)
{
    hx_pump *p = g->pump;

    pthread_mutex_lock(&p->lock);
    g->live_next = p->live;
    g->live_at = &p->live;
    if (p->live != NULL)
        p->live->live_at = &g->live_next;
    p->live = g;
    pthread_mutex_unlock(&p->lock);
}

static void live_remove(hx_gen *g)
{
    pthread_mutex_lock(&g->pump->lock);
    *g->live_at = g->live_next;
    if (g->live_next != NULL)
        g->live_next->live_at = g->live_at;
    pthread_mutex_unlock(&g->pump->lock);
}

void hx_gen_set_id(hx_gen *g, const char *id)
{
    const size_t n = HX_MIN(strlen(id), sizeof g->id - 1);

    memcpy(g->id, id, n);
    g->id[n] = '\0';
}

bool hx_gen_end_thinking(hx_pump *p, hx_str id)
{
    hx_gen *g;

    pthread_mutex_lock(&p->lock);
    for (g = p->live; g != NULL && !hx_str_is(id, g->id); g = g->live_next)
        ;
    for (int32_t i = 0; g != NULL && i < g->n_answer; i++)
        hx_end_thinking(g->answer[i].stream);
    pthread_mutex_unlock(&p->lock);
    return g != NULL;
}

static bool is_late(const hx_gen *g)
{
    const int64_t ms = g->req.sampling.deadline_ms;

    return ms > 0 && hx_now_us() - g->call->start_us > ms * 1000;
}

/* No callback comes any more; one that came before has left g in the stack at most. */
static void end(hx_gen *g, int rc, const hx_err *err)
{
    hx_call *c = g->call;
    const bool gone = rc != 0 && hx_http_gone(c->x);

    hx_http_on_news(c->x, NULL, NULL);
    live_remove(g);
    for (int32_t i = 0; i < g->n_answer; i++) {
        hx_on_ready(g->answer[i].stream, NULL, NULL);
        if (!g->answer[i].done)
            c->n_answer += g->answer[i].n_token;
    }
    if (!gone && rc == HX_ECANCEL)
        hx_server_problem(c, 503, NULL, "shutting_down", "%s", err->msg);
    else if (!gone && rc == HX_ELIMIT && is_late(g))
        hx_server_problem(c, 504, NULL, "timeout", "%s", err->msg);
    else if (!gone && rc != 0)
        hx_server_problem(c, rc == HX_ENOMEM ? 503 : 500, NULL, "engine_error", "%s",
                          err->msg);
    g->rc = g->sink.end(g->sink.ud, gone ? HX_ECANCEL : rc == 0 ? 0 : HX_EARG);
    hx_gen_close(g);
    g->ended = true;
}

static void advance(hx_gen *g)
{
    hx_err err = { 0 };
    int rc;

    if (!g->ended && ((rc = take_answers(g, &err)) != 0 || g->n_live == 0))
        end(g, rc, &err);
    if (g->ended && !atomic_load(&g->queued)) {
        atomic_fetch_sub(&g->pump->n_gen, 1);
        hx_server_finish(g->call, g->rc); /* g lives in its arena */
    }
}

/* The engine hands out a step's tokens one stream after the other. Who began with the
 * first would be woken for nearly every one and be in the engine's way: 25 -> 20 us of
 * CPU per token at 32 streams without and with the pause (2 cores of a Zen 3, 2026-11).
 */
static void await_news(hx_pump *p)
{
    static const struct timespec gather = { 0, GATHER_NS };

    while (sem_wait(&p->news) != 0 && errno == EINTR)
        ;
    if (atomic_load(&p->n_gen) > 1)
        nanosleep(&gather, NULL);
}

static void *run_pump(void *ud)
{
    hx_pump *p = ud;
    hx_gen *g, *next;

    while (!atomic_load(&p->closing) || atomic_load(&p->n_gen) > 0) {
        await_news(p);
        for (g = atomic_exchange(&p->ready, NULL); g != NULL; g = next) {
            next = g->next;
            atomic_store(&g->queued, false);
            advance(g);
        }
        hx_http_flush(p->http);
    }
    return NULL;
}

/* ---- news for the pump -------------------------------------------------- */

static void push(hx_gen *g)
{
    hx_pump *p = g->pump;
    hx_gen *below = atomic_load(&p->ready);

    do
        g->next = below;
    while (!atomic_compare_exchange_weak(&p->ready, &below, g));
    if (below == NULL) /* g itself may be gone by now */
        sem_post(&p->news);
}

/* The client left, or wants more again. */
static void on_news(void *ud)
{
    hx_gen *g = ud;

    if (!atomic_exchange(&g->queued, true))
        push(g);
}

/* A stream has something. */
static void on_ready(void *ud)
{
    answer *a = ud;

    atomic_store(&a->ready, true);
    on_news(a->gen);
}

/* Counts as queued from the beginning: the pump must not end it before all is set up. */
int hx_gen_start(hx_gen *g, const hx_gen_sink *sink)
{
    g->sink = *sink;
    g->comment_us = hx_now_us();
    g->n_live = g->n_answer;
    g->pump = hx_server_pump(g->call->server);
    atomic_fetch_add(&g->pump->n_gen, 1);
    atomic_store(&g->queued, true);
    live_add(g);
    hx_http_on_news(g->call->x, on_news, g);
    for (int32_t i = 0; i < g->n_answer; i++)
        hx_on_ready(g->answer[i].stream, on_ready, &g->answer[i]);
    push(g);
    return HX_LATER;
}

int hx_gen_none(hx_call *c, const hx_generate *g, const hx_gen_sink *sink)
{
    const int64_t now = hx_now_us();
    hx_sb out = { 0 };

    for (int32_t i = 0; i < g->n_prompt * g->n; i++)
        sink->event(sink->ud,
                    &(hx_gen_event) { .kind = HX_GEN_END,
                                      .index = i,
                                      .stop = HX_STOP_LENGTH,
                                      .stop_index = -1,
                                      .n_prompt = g->prompt[i / g->n].n,
                                      .times = { now, now, now, now } },
                    &out);
    if (sink->stream)
        hx_http_send(c->x, (hx_str) { out.p, out.n });
    hx_sb_free(&out);
    return sink->end(sink->ud, 0);
}

int hx_gen_open_pump(hx_pump **out, hx_http *http, hx_err *err)
{
    hx_pump *p = hx_new(hx_pump, 1);

    *out = NULL;
    if (p == NULL)
        return hx_fail(err, HX_ENOMEM, "server: no memory");
    p->http = http;
    if (hx_calls_open(&p->calls, err) != 0) {
        hx_free(p);
        return HX_ENOMEM;
    }
    sem_init(&p->news, 0, 0);
    pthread_mutex_init(&p->lock, NULL);
    if (pthread_create(&p->thread, NULL, run_pump, p) != 0) {
        sem_destroy(&p->news);
        pthread_mutex_destroy(&p->lock);
        hx_calls_close(p->calls);
        hx_free(p);
        return hx_fail(err, HX_EIO, "server: the system refuses another thread");
    }
    *out = p;
    return 0;
}

void hx_gen_close_pump(hx_pump *p)
{
    if (p == NULL)
        return;
    atomic_store(&p->closing, true);
    sem_post(&p->news);
    pthread_join(p->thread, NULL);
    sem_destroy(&p->news);
    pthread_mutex_destroy(&p->lock);
    hx_calls_close(p->calls);
    hx_free(p);
}
