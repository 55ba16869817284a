/* fake_engine.c - an engine for tests of the server: hoist.h without a model. Included by
 * the test, which opens it with fake_open(). Does what the prompt's text says:
 *
 *   [[a|b|c]]                      answers with the tokens a, b, c, then the end
 *   [[{delay=5,prefill=100}a|b]]   ms per token, ms before the first
 *   [[{repeat=50}a|b]]             the list 50 times
 *   [[{error=2}a|b|c]]             fails after 2 tokens
 *   [[{score=100}a]]               scoring it takes 100 ms
 *
 * The last [[…]] of the prompt counts; without one the answer is "ok". $seed, $params,
 * $grammar and $source as a token show what was submitted, $prompt the prompt's text; $mega
 * is a MiB of m. Ids: 0..255 bytes, then the markers, then pieces as they come. One thread
 * serves all streams in turn, as the real engine's does, in steps: streams of one pace have
 * their tokens together; and it pauses who does not take them.
 */
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "base/base.h"

#define FAKE_PIECES 4096
#define FAKE_FIRST  512 /* id of the first piece */
#define FAKE_TOKENS 65536
#define FAKE_SLOTS  512
#define FAKE_MEGA   (1 << 20)
#define FAKE_RING   240            /* tokens not yet taken that pause a stream */
#define FAKE_LONGER "\xe0\xa5\x98" /* U+0958: NFC makes six bytes of its three */

static const struct {
    const char *text;
    bool special;
} fake_marker[] = {
    { "<think>", false },      { "</think>", false },     { "<tool_call>", false },
    { "</tool_call>", false }, { "<arg_key>", false },    { "</arg_key>", false },
    { "<arg_value>", false },  { "</arg_value>", false }, { "<user>", true },
    { "<image>", true },
};

struct hx_stream {
    hx_engine *e;
    hx_request req;
    hx_str stop[16];
    char stop_text[16][64];
    int64_t n_prompt, cap;
    int32_t *token, *end, *ev_end; /* [cap] */
    float *logprob;
    hx_choice *top;
    char *text;
    int32_t n_token, n_out, n_taken, error_after;
    int64_t delay_us, prefill_us, due_us;
    bool running, cancelled, ended, failed, late, end_thinking, told;
    int32_t place; /* in the queue */
    hx_stop stop_why;
    int32_t stop_at; /* TEXT: which */
    hx_times times;
    void (*ready)(void *);
    void *ready_ud;
};

struct hx_engine {
    hx_info info;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* for the engine's thread */
    bool news;           /* came while it was at work */
    pthread_t thread;
    bool closing;
    hx_stream *slot[FAKE_SLOTS];
    int32_t n_running, n_waiting;
    const char *fault; /* what hx_get_status() says */
    int64_t wait_ms;
    atomic_int n_scoring, max_scoring; /* calls of hx_score() at once */
    atomic_int n_pin, n_unpin;         /* requests with pin, calls of hx_unpin() */
    char *piece[FAKE_PIECES];
    _Atomic int32_t n_piece; /* those below it are there to read without the lock */
    char bytes[256];
    int32_t eos;
};

/* ---- text --------------------------------------------------------------- */

hx_str hx_token_bytes(const hx_engine *e, int32_t id, bool *special)
{
    const int32_t m = id - 256;

    if (special != NULL)
        *special = m >= 0 && m < (int32_t)HX_LEN(fake_marker) && fake_marker[m].special;
    if (id >= 0 && id < 256)
        return (hx_str) { &e->bytes[id], 1 };
    if (m >= 0 && m < (int32_t)HX_LEN(fake_marker))
        return hx_str_c(fake_marker[m].text);
    if (id >= FAKE_FIRST && id < FAKE_FIRST + e->n_piece)
        return hx_str_c(e->piece[id - FAKE_FIRST]);
    return (hx_str) { NULL, 0 };
}

int32_t hx_token_id(const hx_engine *e, hx_str text)
{
    (void)e;
    for (size_t i = 0; i < HX_LEN(fake_marker); i++)
        if (hx_str_is(text, fake_marker[i].text))
            return 256 + (int32_t)i;
    return -1;
}

static int32_t fake_intern(hx_engine *e, hx_str s)
{
    const int32_t marker = hx_token_id(e, s);

    if (marker >= 0)
        return marker;
    if (s.n == 1)
        return (unsigned char)s.p[0];
    for (int32_t i = 0; i < e->n_piece; i++)
        if (hx_str_is(s, e->piece[i]))
            return FAKE_FIRST + i;
    hx_assert(e->n_piece < FAKE_PIECES);
    char *copy = hx_alloc(s.n + 1);
    memcpy(copy, s.p, s.n);
    e->piece[e->n_piece] = copy;
    return FAKE_FIRST + atomic_fetch_add(&e->n_piece, 1);
}

int64_t hx_tokenize(hx_engine *e, hx_str text, bool special, int32_t *out, int64_t cap)
{
    int64_t n = 0;

    (void)e;
    for (size_t i = 0; i < text.n;) {
        int32_t id = (unsigned char)text.p[i];
        size_t len = 1, times = 1;

        if (hx_str_eq((hx_str) { text.p + i, HX_MIN(text.n - i, sizeof FAKE_LONGER - 1) },
                      HX_STR(FAKE_LONGER))) {
            len = sizeof FAKE_LONGER - 1;
            times = 2 * len;
        }

        for (size_t m = 0; special && m < HX_LEN(fake_marker); m++) {
            const size_t k = strlen(fake_marker[m].text);

            if (text.n - i >= k && memcmp(text.p + i, fake_marker[m].text, k) == 0) {
                id = 256 + (int32_t)m;
                len = k;
            }
        }
        for (; times > 0; times--, n++)
            if (n < cap)
                out[n] = id;
        i += len;
    }
    return n;
}

int64_t hx_detokenize(hx_engine *e, const int32_t *tok, int64_t n, char *out, int64_t cap)
{
    int64_t len = 0;

    for (int64_t i = 0; i < n; i++) {
        const hx_str s = hx_token_bytes(e, tok[i], NULL);

        for (size_t j = 0; j < s.n; j++, len++)
            if (len < cap)
                out[len] = s.p[j];
    }
    return len;
}

/* [tools=2][effort=low]system:text;user:text;…<think> */
int hx_render(hx_engine *e, hx_str json, const hx_render_opt *opt, int32_t **out,
              int64_t *n_out, char **text_out, hx_err *err)
{
    hx_json *vars = NULL;
    hx_sb b = { 0 };
    int rc;

    *out = NULL;
    *n_out = 0;
    if ((rc = hx_json_parse(&vars, json, 128, err)) != 0)
        return rc;
    if (hx_json_has(vars, "tools"))
        hx_sb_printf(&b, "[tools=%zu]", hx_json_len(hx_json_get(vars, "tools")));
    if (hx_json_has(vars, "reasoning_effort"))
        hx_sb_printf(&b, "[effort=%s]",
                     hx_json_str(hx_json_get(vars, "reasoning_effort")).p);
    if (hx_json_has(vars, "extra"))
        hx_sb_printf(&b, "[extra=%d]", (int)hx_json_int(hx_json_get(vars, "extra"), 0));
    if (opt != NULL && opt->official)
        hx_sb_str(&b, "[official]");
    const hx_json *messages = hx_json_get(vars, "messages");
    for (size_t i = 0; i < hx_json_len(messages); i++) {
        const hx_json *m = hx_json_at(messages, i), *calls = hx_json_get(m, "tool_calls");
        const hx_str content = hx_json_str(hx_json_get(m, "content"));

        if (hx_str_is(content, "raise!")) {
            hx_json_free(vars);
            hx_sb_free(&b);
            return hx_fail(err, HX_EFORMAT, "template: raised");
        }
        hx_sb_printf(&b, "%s:", hx_json_str(hx_json_get(m, "role")).p);
        if (hx_json_has(m, "reasoning_content"))
            hx_sb_printf(&b, "(%s)", hx_json_str(hx_json_get(m, "reasoning_content")).p);
        hx_sb_add(&b, content.p, content.n);
        for (size_t j = 0; j < hx_json_len(calls); j++) {
            hx_sb_str(&b, "!");
            hx_json_write(&b, hx_json_get(hx_json_at(calls, j), "function"));
        }
        hx_sb_char(&b, ';');
    }
    if (hx_json_bool(hx_json_get(vars, "add_generation_prompt"), false))
        hx_sb_str(&b, "<think>");
    hx_json_free(vars);
    const int64_t n = hx_tokenize(e, (hx_str) { b.p, b.n }, true, NULL, 0);
    *out = hx_new(int32_t, n + 1);
    *n_out = hx_tokenize(e, (hx_str) { b.p, b.n }, true, *out, n);
    if (text_out != NULL) {
        *text_out = hx_alloc(b.n + 1);
        memcpy(*text_out, b.p, b.n);
    }
    hx_sb_free(&b);
    return 0;
}

/* ---- the script ---------------------------------------------------------- */

static int64_t fake_option(hx_str options, const char *name, int64_t dflt)
{
    const char *at = memmem(options.p, options.n, name, strlen(name));
    long long v;

    return at != NULL && sscanf(at + strlen(name), "%lld", &v) == 1 ? v : dflt;
}

static void fake_add(hx_stream *s, hx_sb *text, hx_str piece)
{
    static char mega[FAKE_MEGA];
    char buf[200];

    if (hx_str_is(piece, "$seed")) {
        snprintf(buf, sizeof buf, "seed=%llu", (unsigned long long)s->req.seed);
        piece = hx_str_c(buf);
    } else if (hx_str_is(piece, "$params")) {
        snprintf(buf, sizeof buf,
                 "t=%.2f p=%.2f k=%d m=%.2f r=%.2f pp=%.2f fp=%.2f max=%lld min=%lld "
                 "eos=%d bias=%d ids=%d",
                 (double)s->req.temperature, (double)s->req.top_p, s->req.top_k,
                 (double)s->req.min_p, (double)s->req.repeat_penalty,
                 (double)s->req.presence_penalty, (double)s->req.frequency_penalty,
                 (long long)s->req.max_new, (long long)s->req.min_new, s->req.ignore_eos,
                 s->req.n_bias, s->req.n_stop_ids);
        piece = hx_str_c(buf);
    } else if (hx_str_is(piece, "$grammar")) {
        snprintf(buf, sizeof buf,
                 "kind=%d after=%d at=%d lazy=%d again=%d think=%d/%lld bias=%d",
                 (int)s->req.grammar_kind, s->req.grammar_after, s->req.grammar_at,
                 s->req.grammar_lazy, s->req.grammar_again, s->req.think_end,
                 (long long)s->req.think_max, s->req.n_bias);
        piece = hx_str_c(buf);
    } else if (hx_str_is(piece, "$source")) {
        piece = s->req.grammar;
    } else if (hx_str_is(piece, "$mega")) {
        piece = (hx_str) { mega, FAKE_MEGA };
        memset(mega, 'm', FAKE_MEGA);
    }
    if (s->n_token == s->cap || piece.n == 0)
        return;
    hx_sb_add(text, piece.p, piece.n);
    s->token[s->n_token] = fake_intern(s->e, piece);
    s->end[s->n_token++] = (int32_t)text->n;
}

/* Reasoning ends with the token at `from`: what is left of it is taken out. */
static void fake_end_thinking(hx_stream *s, int32_t from, char *text)
{
    const int32_t base = from > 0 ? s->end[from - 1] : 0;
    int32_t to = from, cut;

    while (to < s->n_token && s->token[to] != s->req.think_end)
        to++;
    if (to == from || to == s->n_token)
        return;
    cut = s->end[to - 1] - base;
    memmove(text + base, text + base + cut,
            (size_t)(s->end[s->n_token - 1] - base - cut));
    for (int32_t i = to; i < s->n_token; i++) {
        s->token[from + i - to] = s->token[i];
        s->end[from + i - to] = s->end[i] - cut;
    }
    s->n_token -= to - from;
}

static void fake_cut_at_stop(hx_stream *s, hx_sb *text)
{
    size_t cut = SIZE_MAX;

    for (int32_t i = 0; i < s->req.n_stop; i++) {
        const char *at =
            text->n > 0 ? memmem(text->p, text->n, s->stop[i].p, s->stop[i].n) : NULL;

        if (at != NULL && (size_t)(at - text->p) < cut) {
            cut = (size_t)(at - text->p);
            s->stop_at = i;
        }
    }
    if (cut == SIZE_MAX)
        return;
    int32_t n = 0;
    while (n < s->n_token && s->end[n] <= (int32_t)cut)
        n++;
    if (n < s->n_token && (n > 0 ? s->end[n - 1] : 0) < (int32_t)cut)
        s->end[n++] = (int32_t)cut;
    s->n_token = n;
    s->stop_why = HX_STOP_TEXT;
}

static void fake_script(hx_stream *s, hx_str prompt, int64_t room)
{
    hx_str script = HX_STR("ok"), options = { "", 0 };
    const char *p = prompt.p, *end = prompt.p + prompt.n, *open, *close;
    hx_sb text = { 0 };

    while ((open = memmem(p, (size_t)(end - p), "[[", 2)) != NULL &&
           (close = memmem(open, (size_t)(end - open), "]]", 2)) != NULL) {
        script = (hx_str) { open + 2, (size_t)(close - open - 2) };
        p = close;
    }
    if (script.n > 0 && script.p[0] == '{' && memchr(script.p, '}', script.n) != NULL) {
        const char *brace = memchr(script.p, '}', script.n);

        options = (hx_str) { script.p, (size_t)(brace - script.p) };
        script.n -= (size_t)(brace + 1 - script.p);
        script.p = brace + 1;
    }
    s->delay_us = fake_option(options, "delay=", 0) * 1000;
    s->prefill_us = fake_option(options, "prefill=", 0) * 1000;
    s->error_after = (int32_t)fake_option(options, "error=", -1);
    s->stop_why = HX_STOP_EOS;
    const int64_t repeat = fake_option(options, "repeat=", 1);
    s->cap = HX_MIN(FAKE_TOKENS, repeat * ((int64_t)script.n + 1));
    s->token = hx_new(int32_t, s->cap);
    s->end = hx_new(int32_t, s->cap);
    s->ev_end = hx_new(int32_t, s->cap);
    for (int64_t i = 0; i < repeat; i++)
        for (hx_str rest = script; rest.n > 0;) {
            const char *bar = memchr(rest.p, '|', rest.n);
            const size_t n = bar != NULL ? (size_t)(bar - rest.p) : rest.n;

            if (n > 1 && rest.p[0] == '\\' && rest.p[1] == 'x') { /* \xE2: one byte */
                unsigned v = 0;
                sscanf(rest.p + 2, "%2x", &v);
                fake_add(s, &text, (hx_str) { &s->e->bytes[v & 255], 1 });
            } else if (n == 7 && memcmp(rest.p, "$prompt", 7) == 0) {
                fake_add(s, &text, prompt);
            } else if (n > 1 || (bar != rest.p && n > 0)) {
                fake_add(s, &text, (hx_str) { rest.p, n });
            }
            rest.p += HX_MIN(n + 1, rest.n);
            rest.n -= HX_MIN(n + 1, rest.n);
        }
    if (s->req.think_max > 0 && s->req.think_max < s->n_token)
        fake_end_thinking(s, (int32_t)s->req.think_max, text.p);
    fake_cut_at_stop(s, &text);
    if (s->req.max_new > 0)
        room = HX_MIN(room, s->req.max_new);
    if (s->n_token > room) {
        s->n_token = (int32_t)room;
        s->stop_why = HX_STOP_LENGTH;
    }
    s->text = text.p;
}

/* ---- generation ---------------------------------------------------------- */

static void fake_wake(hx_engine *e)
{
    e->news = true;
    pthread_cond_signal(&e->wake);
}

static void fake_news(hx_stream *s)
{
    if (s->ready != NULL)
        s->ready(s->ready_ud);
}

/* Those behind it have another place. */
static void fake_leave_queue(hx_stream *s)
{
    hx_engine *e = s->e;

    e->n_waiting--;
    for (int32_t i = 0; i < FAKE_SLOTS; i++) {
        hx_stream *o = e->slot[i];

        if (o == NULL || o->running || o->ended || o->place < s->place || o == s)
            continue;
        o->place--;
        o->told = false;
        fake_news(o);
    }
}

static void fake_end(hx_stream *s, hx_stop why)
{
    if (s->running)
        s->e->n_running--;
    else
        fake_leave_queue(s);
    s->running = false;
    s->ended = true;
    s->stop_why = why;
    s->times.done_us = hx_now_us();
    fake_news(s);
}

static void fake_step(hx_stream *s, int64_t now)
{
    hx_engine *e = s->e;

    if (s->cancelled) {
        fake_end(s, HX_STOP_CANCEL);
    } else if (s->req.deadline_ms != 0 &&
               now - s->times.queued_us > s->req.deadline_ms * 1000) {
        s->failed = s->late = true;
        fake_end(s, HX_STOP_NONE);
    } else if (!s->running && e->n_running < e->info.max_streams) {
        s->running = true;
        e->n_running++;
        fake_leave_queue(s);
        s->times.started_us = now;
        s->due_us = now + s->prefill_us;
    } else if (s->running && now >= s->due_us) {
        if (s->times.first_us == 0)
            s->times.first_us = now;
        if (s->error_after == s->n_out) {
            s->failed = true;
            fake_end(s, HX_STOP_NONE);
        } else if (s->n_out == s->n_token) {
            fake_end(s, s->stop_why);
        } else if (s->n_out - s->n_taken >= FAKE_RING) {
            s->due_us = now + 1000;
        } else {
            if (s->end_thinking)
                fake_end_thinking(s, s->n_out, s->text);
            s->end_thinking = false;
            s->n_out++;
            s->due_us = s->delay_us > 0 ? (now / s->delay_us + 1) * s->delay_us : now;
            fake_news(s);
        }
    }
}

/* One step of every stream; the lock is free in between, as the real engine's is. Returns
 * when the next is due. Under lock. */
static int64_t fake_steps(hx_engine *e, int64_t now)
{
    int64_t due = now + 1000000;

    for (int32_t i = 0; i < FAKE_SLOTS; i++) {
        hx_stream *s = e->slot[i];

        if (s == NULL || s->ended)
            continue;
        fake_step(s, now);
        if (!s->ended && (s->running || e->n_running < e->info.max_streams))
            due = HX_MIN(due, s->running ? s->due_us : now);
        pthread_mutex_unlock(&e->lock);
        pthread_mutex_lock(&e->lock);
    }
    return due;
}

static void *fake_run(void *ud)
{
    hx_engine *e = ud;

    pthread_mutex_lock(&e->lock);
    while (!e->closing) {
        const int64_t now = hx_now_us();
        e->news = false;
        const int64_t due = fake_steps(e, now);

        if (due > now && !e->news) {
            const struct timespec until = { due / 1000000, due % 1000000 * 1000 };
            pthread_cond_timedwait(&e->wake, &e->lock, &until);
        } else {
            pthread_mutex_unlock(&e->lock);
            sched_yield();
            pthread_mutex_lock(&e->lock);
        }
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

int hx_submit(hx_engine *e, const hx_request *r, hx_stream **out, hx_err *err)
{
    hx_stream *s;
    hx_sb prompt = { 0 };

    *out = NULL;
    if (r->n_tokens < 1)
        return hx_fail(err, HX_EARG, "prompt: empty");
    atomic_fetch_add(&e->n_pin, r->pin);
    pthread_mutex_lock(&e->lock);
    if (e->n_waiting >= e->info.max_queue) {
        pthread_mutex_unlock(&e->lock);
        return hx_fail(err, HX_EBUSY, "queue: all places are taken");
    }
    s = hx_new(hx_stream, 1);
    s->e = e;
    s->req = *r;
    for (int32_t i = 0; i < r->n_stop; i++) {
        snprintf(s->stop_text[i], 64, "%.*s", (int)r->stop[i].n, r->stop[i].p);
        s->stop[i] = hx_str_c(s->stop_text[i]);
    }
    s->n_prompt = r->n_tokens;
    for (int64_t i = 0; i < r->n_tokens; i++) {
        const hx_str b = hx_token_bytes(e, r->tokens[i], NULL);
        hx_sb_add(&prompt, b.p, b.n);
    }
    fake_script(s, (hx_str) { prompt.p, prompt.n }, e->info.ctx_tokens - r->n_tokens);
    hx_sb_free(&prompt);
    if (r->want_logprobs) {
        s->logprob = hx_new(float, s->n_token + 1);
        s->top = hx_new(hx_choice, (s->n_token + 1) * (r->n_top + 1));
        for (int32_t i = 0; i < s->n_token; i++) {
            s->logprob[i] = -0.25f * (float)(i % 4);
            for (int32_t k = 0; k < r->n_top; k++)
                s->top[i * r->n_top + k] =
                    k == 0 ? (hx_choice) { s->token[i], s->logprob[i] }
                           : (hx_choice) { 'A' + k, -1.5f - (float)k };
        }
    }
    s->times.queued_us = hx_now_us();
    s->place = e->n_waiting++;
    int32_t free_slot = 0;
    while (e->slot[free_slot] != NULL)
        hx_assert(++free_slot < FAKE_SLOTS);
    e->slot[free_slot] = s;
    fake_wake(e);
    pthread_mutex_unlock(&e->lock);
    *out = s;
    return 0;
}

/* One that has to wait says each place once. Under lock. */
static bool fake_has_place(const hx_stream *s)
{
    return s->req.progress && !s->running && !s->told &&
           s->e->n_running == s->e->info.max_streams;
}

int hx_next(hx_stream *s, hx_event *ev, int timeout_ms)
{
    int got = 1;

    hx_assert(timeout_ms == 0);
    pthread_mutex_lock(&s->e->lock);
    *ev = (hx_event) {
        .prompt = s->n_prompt, .generated = s->n_out, .times = s->times, .stop_index = -1
    };
    if (s->n_taken < s->n_out) {
        const int32_t from = s->n_taken, base = from > 0 ? s->end[from - 1] : 0;

        ev->kind = HX_EV_TOKENS;
        ev->tokens = s->token + from;
        ev->n_tokens = s->n_out - from;
        for (int32_t i = from; i < s->n_out; i++)
            s->ev_end[i] = s->end[i] - base;
        ev->end = s->ev_end + from;
        ev->bytes = (hx_str) { s->text + base, (size_t)(s->end[s->n_out - 1] - base) };
        ev->logprob = s->logprob != NULL ? s->logprob + from : NULL;
        ev->top =
            s->logprob != NULL && s->req.n_top > 0 ? s->top + from * s->req.n_top : NULL;
        s->n_taken = s->n_out;
    } else if (s->ended) {
        ev->kind = s->failed ? HX_EV_ERROR : HX_EV_DONE;
        ev->stop = s->stop_why;
        ev->stop_index = ev->stop == HX_STOP_TEXT ? s->stop_at : -1;
        if (s->late)
            hx_fail(&ev->err, HX_ELIMIT, "deadline: it has passed");
        else if (s->failed)
            hx_fail(&ev->err, HX_EDEVICE, "device: broke as the script says");
    } else if (fake_has_place(s)) {
        s->told = true;
        ev->kind = HX_EV_PROGRESS;
        ev->queue = s->place;
        ev->eta_ms = -1;
    } else {
        got = 0;
    }
    pthread_mutex_unlock(&s->e->lock);
    return got;
}

void hx_on_ready(hx_stream *s, void (*fn)(void *ud), void *ud)
{
    pthread_mutex_lock(&s->e->lock);
    s->ready = fn;
    s->ready_ud = ud;
    if (fn != NULL && (s->n_taken < s->n_out || s->ended || fake_has_place(s)))
        fn(ud);
    pthread_mutex_unlock(&s->e->lock);
}

void hx_end_thinking(hx_stream *s)
{
    pthread_mutex_lock(&s->e->lock);
    s->end_thinking = true;
    pthread_mutex_unlock(&s->e->lock);
}

void hx_cancel(hx_stream *s)
{
    pthread_mutex_lock(&s->e->lock);
    s->cancelled = true;
    fake_wake(s->e);
    pthread_mutex_unlock(&s->e->lock);
}

void hx_stream_free(hx_stream *s)
{
    if (s == NULL)
        return;
    pthread_mutex_lock(&s->e->lock);
    s->ready = NULL;
    if (!s->ended)
        fake_end(s, HX_STOP_CANCEL);
    for (int32_t i = 0; i < FAKE_SLOTS; i++)
        if (s->e->slot[i] == s)
            s->e->slot[i] = NULL;
    fake_wake(s->e);
    pthread_mutex_unlock(&s->e->lock);
    hx_free(s->token);
    hx_free(s->end);
    hx_free(s->ev_end);
    hx_free(s->logprob);
    hx_free(s->top);
    hx_free(s->text);
    hx_free(s);
}

/* Every token after the first has -1, the first alternative is the token itself. */
void hx_get_experts(hx_engine *e, hx_experts *out)
{
    (void)e;
    *out = (hx_experts) { 0 };
}

int hx_unpin(hx_engine *e, const int32_t *tokens, int64_t n, hx_err *err)
{
    (void)tokens, (void)n, (void)err;
    atomic_fetch_add(&e->n_unpin, 1);
    return 0;
}

int64_t hx_forget(hx_engine *e, hx_err *err)
{
    (void)e, (void)err;
    return 0;
}

const char *hx_miss_name(hx_miss m)
{
    return m == HX_MISS_NONE ? "" : "new";
}

int hx_score(hx_engine *e, const hx_score_args *a, hx_err *err)
{
    hx_sb prompt = { 0 };
    int seen, n;

    pthread_mutex_lock(&e->lock);
    const bool full = e->n_waiting >= e->info.max_queue;
    pthread_mutex_unlock(&e->lock);
    if (full)
        return hx_fail(err, HX_EBUSY, "queue: all places are taken");
    n = atomic_fetch_add(&e->n_scoring, 1) + 1;
    seen = atomic_load(&e->max_scoring);
    while (seen < n && !atomic_compare_exchange_weak(&e->max_scoring, &seen, n))
        ;
    for (int64_t i = 0; i < a->n_tokens; i++) {
        const hx_str b = hx_token_bytes(e, a->tokens[i], NULL);

        hx_sb_add(&prompt, b.p, b.n);
        if (i < a->from)
            continue;
        const int64_t row = i - a->from;
        if (a->logprob != NULL)
            a->logprob[row] = i + 1 < a->n_tokens ? -1.0f : 0;
        for (int32_t k = 0; k < a->n_top; k++)
            a->top[row * a->n_top + k] = (hx_choice) { 'A' + k, -2.0f - (float)k };
        for (int32_t k = 0; k < a->n_ids; k++)
            a->id_logprob[row * a->n_ids + k] = -(float)a->ids[k];
        for (int32_t k = 0; k < e->info.width && a->hidden != NULL; k++)
            a->hidden[row * e->info.width + k] = (float)(a->tokens[i] * (k + 1));
    }
    const int64_t ms = fake_option((hx_str) { prompt.p, prompt.n }, "{score=", 0);
    nanosleep(&(struct timespec) { ms / 1000, ms % 1000 * 1000000 }, NULL);
    hx_sb_free(&prompt);
    atomic_fetch_sub(&e->n_scoring, 1);
    return 0;
}

/* ---- life ---------------------------------------------------------------- */

void hx_get_info(const hx_engine *e, hx_info *out)
{
    *out = e->info;
}

void hx_get_status(hx_engine *e, hx_status *out)
{
    pthread_mutex_lock(&e->lock);
    *out = (hx_status) { .running = e->n_running,
                         .waiting = e->n_waiting,
                         .wait_ms = e->wait_ms,
                         .fault = e->fault };
    snprintf(out->fault_text, sizeof out->fault_text, "as the test says");
    pthread_mutex_unlock(&e->lock);
}

int64_t hx_get_streams(hx_engine *e, hx_stream_info *out, int64_t cap)
{
    int64_t n = 0;

    pthread_mutex_lock(&e->lock);
    for (int32_t i = 0; i < FAKE_SLOTS; i++)
        if (e->slot[i] != NULL && !e->slot[i]->ended && n++ < cap)
            out[n - 1] = (hx_stream_info) {
                .id = (uint64_t)i,
                .client = e->slot[i]->req.client,
                .stage = e->slot[i]->running ? HX_AT_DECODE : HX_AT_QUEUE,
                .prompt = e->slot[i]->n_prompt,
                .generated = e->slot[i]->n_out,
                .times = e->slot[i]->times,
            };
    pthread_mutex_unlock(&e->lock);
    return n;
}

int64_t hx_metrics(hx_engine *e, char *out, int64_t cap)
{
    hx_status st;
    char text[200];
    int64_t n;

    hx_get_status(e, &st);
    n = snprintf(text, sizeof text, "hoist_requests_running %lld\n",
                 (long long)st.running);
    if (HX_MIN(n, cap) > 0)
        memcpy(out, text, (size_t)HX_MIN(n, cap));
    return n;
}

static hx_engine *fake_open(int32_t max_streams, int64_t max_queue, int64_t ctx_tokens)
{
    hx_engine *e = hx_new(hx_engine, 1);
    pthread_condattr_t clock;

    e->eos = 256 + 8;
    for (int i = 0; i < 256; i++)
        e->bytes[i] = (char)i;
    e->info = (hx_info) { .name = "fake",
                          .arch = "fake",
                          .reply_format = "glm",
                          .ctx_tokens = ctx_tokens,
                          .ctx_trained_tokens = 2 * ctx_tokens,
                          .width = 2,
                          .n_vocab = FAKE_FIRST + FAKE_PIECES,
                          .n_token = FAKE_FIRST + FAKE_PIECES,
                          .max_streams = max_streams,
                          .max_queue = max_queue,
                          .eos = &e->eos,
                          .n_eos = 1,
                          .temperature = 0.9f,
                          .top_p = 0.95f,
                          .device = "none" };
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&e->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_create(&e->thread, NULL, fake_run, e);
    return e;
}

static void fake_close(hx_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    fake_wake(e);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    for (int32_t i = 0; i < FAKE_SLOTS; i++)
        hx_assert(e->slot[i] == NULL);
    for (int32_t i = 0; i < e->n_piece; i++)
        hx_free(e->piece[i]);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->lock);
    hx_free(e);
}
