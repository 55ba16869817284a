/* sched.c - the engine thread: takes requests in, reads prompts in slices, decodes all
 * running streams together, hands tokens out.
 *
 * A step is one slice of a prefill chunk or one decode step of every stream that has a
 * token to feed, as sched_pick.c says; cancels are seen between slices. Never knows the
 * model's layers (graph.c walks them) and never waits for a reader. */
#include <math.h>

#include "engine/engine.h"

#define RING_HIGH   240 /* tokens: what a stop text holds back must still fit the ring */
#define STALL_US    (60 * 1000000LL) /* a reader that takes nothing for so long is dropped */
#define PROGRESS_US 100000           /* between two progress events of a stream */
#define MARGIN      256 /* tokens of answer that a request gets memory for when it starts */

/* ---- the end of a stream ---------------------------------------------- */

static void forget(hx_stream **list, int64_t *n, const hx_stream *s)
{
    for (int64_t i = 0; i < *n; i++)
        if (list[i] == s) {
            memmove(&list[i], &list[i + 1], (size_t)(*n - i - 1) * sizeof *list);
            --*n;
            return;
        }
}

/* Figures of an answer that has ended by itself. */
static void observe_end(const hx_stream *s, hx_stop stop)
{
    const hx_times *t = &s->times;
    const double made_s = (double)(t->done_us - t->first_us) / 1e6;

    hx_count(stop == HX_STOP_LENGTH ? HX_C_requests_length_total
                                    : HX_C_requests_stop_total,
             1);
    if (s->score != NULL || t->first_us == 0)
        return;
    hx_observe(HX_H_e2e_request_latency_seconds,
               (double)(t->done_us - t->queued_us) / 1e6);
    hx_observe(HX_H_request_queue_time_seconds,
               (double)(t->started_us - t->queued_us) / 1e6);
    hx_observe(HX_H_request_prefill_time_seconds,
               (double)(t->first_us - t->started_us) / 1e6);
    hx_observe(HX_H_request_decode_time_seconds, made_s);
    hx_observe(HX_H_request_prompt_tokens, (double)s->n_prompt);
    hx_observe(HX_H_request_generation_tokens, (double)s->generated);
    hx_observe(HX_H_request_inference_time_seconds,
               (double)(t->done_us - t->started_us) / 1e6);
    hx_observe(HX_H_request_params_max_tokens, (double)s->max_new);
    if (s->generated > 1)
        hx_observe(HX_H_request_time_per_output_token_seconds,
                   made_s / (double)(s->generated - 1));
}

/* Takes the stream from the list it is in and its reservation from the sum. Under lock. */
static void leave(hx_stream *s)
{
    hx_engine *e = s->engine;
    int64_t n_run = e->n_run;

    forget(e->run, &n_run, s);
    forget(e->wait, &e->n_wait, s);
    e->n_run = (int32_t)n_run;
    e->pages_reserved -= s->pages;
    s->pages = 0;
    if (s->state == HX_SEQ_QUEUED)
        e->n_waiting--;
    else
        e->n_running--;
}

/* The chunk under way is done, or given up: what it was lent may go back. */
static void chunk_close(hx_engine *e)
{
    e->chunk = NULL;
    hx_graph_move(e->prefill, (hx_buf) { 0 }, 0);
}

/* Its sequence memory goes back; whole: others may go on from it. */
static void drop_slot(hx_stream *s, bool whole)
{
    hx_engine *e = s->engine;

    hx_reuse_end(e, s, whole && e->chunk != s);
    if (e->chunk == s)
        chunk_close(e);
}

/* No flight has a row of the stream any more. One that was launched has folded the row
 * before its own into the state; its own is not taken. */
static void retract(hx_stream *s)
{
    hx_engine *e = s->engine;

    for (int32_t i = 0; i < e->n_flight; i++)
        for (int32_t r = 0; r < e->flight[i].n; r++)
            if (e->flight[i].row[r] == s) {
                e->flight[i].row[r] = NULL;
                e->cache->slot[s->slot].pend = 0;
            }
}

/* The stream's last event; its memory goes back, and itself when its owner has let go. */
static void end_stream(hx_stream *s, hx_stop stop, int32_t stop_index, const hx_err *err)
{
    hx_engine *e = s->engine;
    bool freed;

    if (err != NULL && err->code == HX_ELOST)
        hx_health_lost(e, err);
    retract(s);
    drop_slot(s, err == NULL);
    pthread_mutex_lock(&e->lock);
    leave(s);
    s->state = HX_SEQ_ENDED;
    s->times.done_us = hx_now_us();
    if (s->times.started_us != 0 && stop != HX_STOP_CANCEL) {
        const double us = (double)(s->times.done_us - s->times.started_us);

        e->service_us += (e->service_us == 0 ? 1 : 0.2) * (us - e->service_us);
    }
    if (!s->lost) {
        s->end = (hx_event) { .kind = err != NULL ? HX_EV_ERROR : HX_EV_DONE,
                              .stop = stop,
                              .stop_index = stop_index };
        if (err != NULL)
            s->end.err = *err;
    }
    if (err != NULL)
        hx_count(HX_C_requests_failed_total, 1);
    else if (stop == HX_STOP_CANCEL)
        hx_count(HX_C_requests_cancelled_total, 1);
    else
        observe_end(s, stop);
    s->ended = true;
    if ((*s->all_at = s->all_next) != NULL)
        s->all_next->all_at = s->all_at;
    freed = s->freed;
    if (!freed)
        hx_engine_wake_reader(s);
    pthread_mutex_unlock(&e->lock);
    if (freed)
        hx_engine_stream_destroy(s);
}

/* ---- tokens out -------------------------------------------------------- */

bool hx_sched_ring_high(const hx_stream *s)
{
    return s->n_ring >= RING_HIGH || s->n_ring_bytes >= HX_RING_BYTES_HIGH;
}

/* Under lock. bytes: what of the token's text is shown. */
static void ring_put(hx_stream *s, const hx_out_token *t, const char *bytes)
{
    hx_assert(s->n_ring < HX_RING_TOKENS &&
              s->n_ring_bytes + (size_t)t->n_bytes <= s->ring_bytes_cap);
    s->ring[s->n_ring++] = *t;
    if (t->n_bytes > 0)
        memcpy(s->ring_bytes + s->n_ring_bytes, bytes, (size_t)t->n_bytes);
    s->n_ring_bytes += (size_t)t->n_bytes;
}

/* Shows the held tokens that end within the first n_sure held bytes; cut: the one that
 * straddles the border too, shortened. */
static void show_held(hx_stream *s, size_t n_sure, bool cut)
{
    size_t at = 0;
    int32_t n = 0;

    if (s->n_pend == 0)
        return;
    pthread_mutex_lock(&s->engine->lock);
    while (n < s->n_pend && at + (size_t)s->pend[n].n_bytes <= n_sure) {
        ring_put(s, &s->pend[n], s->stopper.held + at);
        at += (size_t)s->pend[n++].n_bytes;
    }
    if (cut && n < s->n_pend && at < n_sure) {
        s->pend[n].n_bytes = (int32_t)(n_sure - at);
        ring_put(s, &s->pend[n++], s->stopper.held + at);
        at = n_sure;
    }
    if (n > 0)
        hx_engine_wake_reader(s);
    pthread_mutex_unlock(&s->engine->lock);
    s->n_pend -= n;
    memmove(s->pend, s->pend + n, (size_t)s->n_pend * sizeof *s->pend);
    hx_sample_release(&s->stopper, at);
}

/* One more token of the answer. Returns the stop text it completes, or -1. */
static int32_t show_token(hx_stream *s, hx_out_token *t)
{
    const hx_tok *tok = s->engine->tok;
    const bool special = tok != NULL && hx_tok_is_special(tok, t->token);
    const hx_str bytes = tok != NULL ? hx_tok_bytes(tok, t->token) : (hx_str) { NULL, 0 };
    size_t n_sure;
    int32_t which;

    t->n_bytes = (int32_t)bytes.n;
    if (s->stopper.n_stop == 0) {
        pthread_mutex_lock(&s->engine->lock);
        ring_put(s, t, bytes.p);
        hx_engine_wake_reader(s);
        pthread_mutex_unlock(&s->engine->lock);
        return -1;
    }
    /* A special token is no text: nothing matches across it. */
    if (special || bytes.n == 0) {
        show_held(s, s->stopper.n_held, false);
        pthread_mutex_lock(&s->engine->lock);
        ring_put(s, t, bytes.p);
        hx_engine_wake_reader(s);
        pthread_mutex_unlock(&s->engine->lock);
        return -1;
    }
    s->pend[s->n_pend++] = *t;
    which = hx_sample_stop(&s->stopper, bytes, &n_sure);
    show_held(s, n_sure, which >= 0);
    return which;
}

/* The next forced token instead of id, if there is one. Under lock. */
static int32_t forced_or(hx_stream *s, int32_t id)
{
    if (s->generated < s->req.n_forced)
        return s->req.forced[s->generated];
    return s->force_at < s->n_force ? s->force[s->force_at++] : id;
}

/* One more token of the answer. Under lock. */
static void count_token(hx_stream *s)
{
    const int64_t now = hx_now_us();

    s->generated++;
    if (s->times.first_us == 0) {
        s->times.first_us = now;
        hx_observe(HX_H_time_to_first_token_seconds,
                   (double)(now - s->times.queued_us) / 1e6);
    } else {
        const double gap_s = (double)(now - s->last_us) / 1e6;

        hx_observe(HX_H_inter_token_latency_seconds, gap_s);
        hx_observe(HX_H_time_per_output_token_seconds, gap_s);
    }
    s->last_us = now;
}

/* The stream's next token was chosen: keeps it, shows it, ends the stream if it was the
 * last. Returns false when the stream is gone. */
static bool accept_token(hx_stream *s, hx_out_token *t)
{
    hx_err err = { 0 };
    const int32_t chosen = t->token;
    int32_t which;

    pthread_mutex_lock(&s->engine->lock);
    t->token = forced_or(s, t->token);
    count_token(s);
    pthread_mutex_unlock(&s->engine->lock);
    t->token = hx_sample_settle(s, t->token);
    if (t->token != chosen)
        retract(s); /* the step ahead goes on from the other one */
    hx_count(HX_C_generation_tokens_total, 1);
    hx_sample_seen(&s->hist, t->token, true);
    s->token[s->n_token++] = t->token;
    if (!s->req.ignore_eos && s->generated > s->req.n_forced &&
        hx_sample_is_end(s, t->token)) {
        show_held(s, s->stopper.n_held, false);
        end_stream(s, HX_STOP_EOS, t->token, NULL);
        return false;
    }
    if (hx_sample_follow(s, t->token, &err) != 0) {
        end_stream(s, HX_STOP_NONE, -1, &err);
        return false;
    }
    which = show_token(s, t);
    if (which >= 0) {
        end_stream(s, HX_STOP_TEXT, which, NULL);
        return false;
    }
    if (s->n_token - s->n_prompt >= s->max_new) {
        show_held(s, s->stopper.n_held, false);
        end_stream(s, HX_STOP_LENGTH, -1, NULL);
        return false;
    }
    return true;
}

/* ---- sampling ---------------------------------------------------------- */

static int sample_rows(hx_engine *e, hx_buf logits, int32_t first, int32_t n, hx_err *err)
{
    const size_t row = (size_t)e->info.n_vocab * sizeof(float), at = (size_t)first;
    const hx_sample_args a = {
        .id = hx_buf_at(e->out_id, at * sizeof(int32_t)),
        .logprob = hx_buf_at(e->out_logprob, at * sizeof(float)),
        .top = hx_buf_at(e->out_top, at * HX_TOP_MAX * sizeof(hx_choice)),
        .logits = hx_buf_at(logits, at * row),
        .scratch = e->out_scratch,
        .row = e->row + first,
        .rows = n,
        .n_vocab = e->info.n_vocab,
        .n_token = e->info.n_token,
    };

    return hx_op_sample(e->dev, &a, err);
}

/* Chooses for row r by itself. An error only where no negative id says what is wrong. */
static int sample_alone(hx_engine *e, hx_buf logits, int32_t r, hx_err *err)
{
    const hx_buf to = hx_buf_at(e->out_id, (size_t)r * sizeof(int32_t));
    hx_err why = { 0 };
    int32_t id = 0;
    int rc = hx_dev_put(e->dev, to, &id, sizeof id, err), rc_row;

    if (rc != 0)
        return rc;
    rc_row = sample_rows(e, logits, r, 1, &why);
    if ((rc = hx_dev_get(e->dev, &id, to, sizeof id, err)) != 0 || rc_row == 0 || id < 0)
        return rc;
    *err = why;
    return rc_row;
}

/* Has the next tokens of the flight's first n_new rows chosen, whose logits are rows 0 …,
 * and brought. A row that cannot be sampled ends its own stream only. */
static int choose(hx_engine *e, hx_flight *f, hx_buf logits, hx_err *err)
{
    const int32_t n = f->n_new;
    const size_t row = (size_t)e->info.n_vocab * sizeof(float),
                 print = (size_t)HX_MIN(HX_PRINT_FLOATS, e->info.n_vocab) * sizeof(float);
    const bool ahead = f != e->flight;
    bool each = false, logprobs = false, top = false;
    hx_err row_err;
    int rc = 0;

    /* A grammar that allows nothing leaves an empty mask, which its row is refused for. */
    for (int32_t r = 0; r < n; r++) {
        each |= hx_sample_row_of(f->row[r], ahead, &e->row[r], &row_err) != 0;
        logprobs |= f->row[r]->req.want_logprobs;
        top |= f->row[r]->req.n_top > 0;
    }
    each = each || sample_rows(e, logits, 0, n, &row_err) != 0;
    for (int32_t r = 0; r < n && each; r++)
        if (sample_alone(e, logits, r, &row_err) != 0)
            end_stream(f->row[r], HX_STOP_NONE, -1, &row_err);
    if ((rc = hx_dev_bring(e->dev, f->to->id, e->out_id, (size_t)n * sizeof(int32_t),
                           err)) != 0 ||
        (logprobs && (rc = hx_dev_bring(e->dev, f->to->logprob, e->out_logprob,
                                        (size_t)n * sizeof(float), err)) != 0) ||
        (top && (rc = hx_dev_bring(e->dev, f->to->top, e->out_top,
                                   (size_t)n * sizeof *f->to->top, err)) != 0))
        return rc;
    for (int32_t r = 0; r < n && rc == 0; r++)
        rc = hx_dev_bring(e->dev, f->to->print[r], hx_buf_at(logits, (size_t)r * row),
                          print, err);
    return rc;
}

/* Row r's choice. */
static int take_choice(const hx_flight *f, int32_t r, hx_out_token *t, hx_err *err)
{
    const hx_landing *l = f->to;

    *t = (hx_out_token) { .token = l->id[r] };
    if (t->token == -1)
        return hx_fail(
            err, HX_EDEVICE,
            "sampling: the logits hold a value that is no number; the answer is "
            "broken and ends here");
    if (t->token < 0)
        return hx_fail(err, HX_EARG, "sampling: every token is banned");
    if (f->row[r]->req.want_logprobs)
        t->logprob = l->logprob[r];
    memcpy(t->top, l->top[r], (size_t)f->row[r]->req.n_top * sizeof *t->top);
    return 0;
}

/* The tokens of a flight that has landed. */
static void hand_out(const hx_flight *f)
{
    for (int32_t r = 0; r < f->n_new; r++) {
        hx_stream *s = f->row[r];
        hx_out_token t;
        hx_err err = { 0 };
        int rc;

        if (s == NULL)
            continue;
        if ((rc = take_choice(f, r, &t, &err)) == 0 &&
            (rc = hx_health_watch(s, f->to->print[r], &err)) == 0) {
            accept_token(s, &t);
            continue;
        }
        if (rc == HX_EDEVICE)
            hx_health_suspect(s, &err);
        end_stream(s, HX_STOP_NONE, -1, &err);
    }
}

/* ---- decode ------------------------------------------------------------ */

static bool can_decode(hx_stream *s)
{
    bool high;

    if (s->state != HX_SEQ_DECODE)
        return false;
    pthread_mutex_lock(&s->engine->lock);
    high = hx_sched_ring_high(s);
    pthread_mutex_unlock(&s->engine->lock);
    if (!high)
        s->stalled_us = 0;
    else if (s->stalled_us == 0)
        s->stalled_us = hx_now_us();
    return !high;
}

static int32_t pages_of(int64_t n_pos)
{
    return (int32_t)((n_pos + HX_PAGE - 1) / HX_PAGE);
}

/* Lower priority, or the same and come later. */
static bool ranks_below(const hx_stream *a, const hx_stream *b)
{
    return a->req.priority < b->req.priority ||
           (a->req.priority == b->req.priority && a->order > b->order);
}

static void put_in_order(hx_engine *e, hx_stream *s)
{
    int64_t at = e->n_wait++;

    while (at > 0 && ranks_below(e->wait[at - 1], s)) {
        e->wait[at] = e->wait[at - 1];
        at--;
    }
    e->wait[at] = s;
}

/* Sends a running stream back to the queue. Nothing of its answer is lost or changes: its
 * state is parked; where there is no room for that, or its chunk is between layers, its
 * prompt is read again and its tokens are fed again as the decode rows they were. */
static void preempt(hx_engine *e, hx_stream *s)
{
    retract(s);
    if (e->chunk == s || !hx_reuse_park(e, s)) {
        drop_slot(s, false);
        s->n_done = 0;
        s->planned = false;
        hx_count(HX_C_preemptions_total, 1);
    }
    pthread_mutex_lock(&e->lock);
    leave(s);
    s->state = HX_SEQ_QUEUED;
    e->n_waiting++;
    e->preempted++;
    put_in_order(e, s);
    pthread_mutex_unlock(&e->lock);
}

/* Who gives way first. */
static hx_stream *last_in_rank(const hx_engine *e)
{
    hx_stream *last = NULL;

    for (int32_t i = 0; i < e->n_run; i++)
        if (last == NULL || ranks_below(e->run[i], last))
            last = e->run[i];
    return last;
}

/* Reserves pages up to n_pos, from who ranks below s if need be. false: s itself ranks
 * last and waits, with all it has, until one of the others ends. A stream that runs alone
 * always finds room: memory holds at least one context. */
static bool make_room(hx_engine *e, hx_stream *s, int64_t n_pos)
{
    while (s->pages < pages_of(n_pos)) {
        hx_stream *last = last_in_rank(e);

        if (hx_reuse_pages_left(e) <= 0) {
            if (last == s)
                return false;
            preempt(e, last);
            continue;
        }
        pthread_mutex_lock(&e->lock);
        s->pages++;
        e->pages_reserved++;
        pthread_mutex_unlock(&e->lock);
    }
    return true;
}

/* Marks the streams that take part in the next decode step; returns how many. */
static int32_t gather(hx_engine *e)
{
    int32_t n = 0;

    for (int32_t i = 0; i < e->n_run; i++)
        e->run[i]->in_step = can_decode(e->run[i]);
    for (int32_t i = 0; i < e->n_run; i++) {
        hx_stream *s = e->run[i];

        s->in_step = s->in_step && make_room(e, s, s->n_done + 1);
        while (e->run[i] != s)
            i--;
    }
    for (int32_t i = 0; i < e->n_run; i++)
        n += e->run[i]->in_step;
    return n;
}

/* Row r of a flight. ahead: the row before is still in the air. */
static void add_row(hx_engine *e, hx_flight *f, hx_stream *s, bool ahead)
{
    const int32_t r = f->n++;

    f->row[r] = s;
    if (!ahead)
        e->id[r] = s->token[s->n_done];
    e->span[r] = (hx_span) { .slot = s->slot,
                             .row0 = r,
                             .n_row = 1,
                             .pos0 = (int32_t)s->n_done + ahead,
                             .commit = ahead ? 1 : e->cache->slot[s->slot].pend };
    e->draw[r] = hx_rng_at(s->req.seed, (uint64_t)s->token[0] << 32 |
                                            (uint32_t)s->token[s->n_prompt - 1]);
}

/* The rows of the streams that gather() marked: first those whose next token is to be
 * chosen, then those that feed again what they had. */
static void add_rows(hx_engine *e, hx_flight *f)
{
    hx_err err = { 0 };

    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < e->n_run; i++) {
            hx_stream *s = e->run[i];

            if (!s->in_step || (pass == 0) != (s->n_done + 1 == s->n_token))
                continue;
            if (hx_cache_grow(e->cache, s->slot, s->n_done + 1, &err) == 0) {
                add_row(e, f, s, false);
            } else {
                end_stream(s, HX_STOP_NONE, -1, &err);
                i--;
            }
        }
        if (pass == 0)
            f->n_new = f->n;
    }
}

/* Whether the step after the one in the air can be launched already: the same rows, each
 * fed the token that the device has just chosen. If one must wait for the host all do, for
 * two steps of a part each would read the weights twice. */
static bool add_rows_ahead(hx_engine *e, hx_flight *f)
{
    const hx_flight *last = e->flight;
    hx_err err;

    if (!e->run_ahead || e->n_flight != 1 || last->rc != 0 || last->n != last->n_new ||
        last->n != e->n_run || e->n_wait > 0 || atomic_load(&e->nudge))
        return false;
    for (int32_t r = 0; r < last->n; r++) {
        hx_stream *s = last->row[r];

        if (s == NULL || !s->in_step || !hx_sample_is_free(s) ||
            s->n_token + 1 - s->n_prompt >= s->max_new ||
            s->pages < pages_of(s->n_done + 2) ||
            hx_cache_grow(e->cache, s->slot, s->n_done + 2, &err) != 0)
            return false;
    }
    for (int32_t r = 0; r < last->n; r++)
        add_row(e, f, last->row[r], true);
    f->n_new = f->n;
    return true;
}

static int start_decode(hx_engine *e, const hx_batch *b, hx_err *err)
{
    hx_store *s = e->model->store;
    int rc;

    if (s != NULL)
        hx_store_begin(s);
    rc = hx_graph_step(e->decode, b, err);
    return rc == 0 && s != NULL ? hx_store_sent(s, err) : rc;
}

/* When a lane has missed its deadline nothing of the step may be used. */
static int end_decode(hx_engine *e, int rc, uint64_t ticket, int64_t rows, hx_err *err)
{
    hx_store *s = e->model->store;
    hx_err late = { 0 };
    int rc_end;

    if (rc == 0)
        rc = hx_dev_reach(e->dev, ticket, err);
    if (s == NULL || (rc_end = hx_store_end(s, rc == 0 ? rows : 0, &late)) == 0)
        return rc;
    if (rc == 0)
        *err = late;
    return rc != 0 ? rc : rc_end;
}

int hx_sched_decode(hx_engine *e, const hx_batch *b, hx_err *err)
{
    uint64_t ticket = 0;
    int rc = start_decode(e, b, err);

    if (rc == 0)
        rc = hx_dev_mark(e->dev, &ticket, err);
    return end_decode(e, rc, ticket, b->rows.n_row, err);
}

/* A decode step begins: of all rows that are ready, or ahead of the one in the air. */
static bool launch(hx_engine *e, bool ahead)
{
    hx_flight *f = &e->flight[e->n_flight];

    *f = (hx_flight) { .to = e->landed[e->n_launched % 2].p };
    if (ahead && !add_rows_ahead(e, f))
        return false;
    if (!ahead) {
        hx_reuse_settle(e);
        add_rows(e, f);
    }
    if (f->n == 0)
        return false;
    e->n_launched++;
    e->n_flight++;
    const hx_batch batch = { .phase = HX_PHASE_DECODE,
                             .id = e->id,
                             .ids = ahead ? e->out_id : (hx_buf) { 0 },
                             .rows = { .span = e->span, .n_span = f->n, .n_row = f->n },
                             .draw = e->draw };

    f->rc = start_decode(e, &batch, &f->err);
    if (f->rc == 0 && f->n_new > 0)
        f->rc = choose(e, f, hx_graph_logits(e->decode), &f->err);
    if (f->rc == 0)
        f->rc = hx_dev_mark(e->dev, &f->ticket, &f->err);
    return true;
}

/* Microseconds since the last slice or step ended, or the engine found work: all that
 * streams wait for belongs to one of these. */
static float lap(hx_engine *e)
{
    const int64_t now = hx_now_us(), us = now - e->lap_us;

    e->lap_us = now;
    return (float)us;
}

/* What the store has counted so far, less was. */
static hx_expert_use experts_since(const hx_engine *e, const hx_expert_use *was)
{
    hx_experts x = { 0 };

    if (e->model->store != NULL)
        hx_store_report(e->model->store, &x);
    return (hx_expert_use) { x.here - was->here, x.link - was->link, x.lane - was->lane,
                             x.ahead - was->ahead, x.wait_us - was->wait_us };
}

static void add_experts(hx_stream *s, const hx_expert_use *u)
{
    pthread_mutex_lock(&s->engine->lock);
    s->experts.here += u->here;
    s->experts.link += u->link;
    s->experts.lane += u->lane;
    s->experts.ahead += u->ahead;
    s->experts.wait_us += u->wait_us;
    pthread_mutex_unlock(&s->engine->lock);
}

static void land(hx_engine *e)
{
    hx_flight *const oldest = e->flight;
    const hx_expert_use before = experts_since(e, &(hx_expert_use) { 0 });
    const int rc = end_decode(e, oldest->rc, oldest->ticket, oldest->n, &oldest->err);
    const hx_expert_use use = experts_since(e, &before);
    const hx_flight f = *oldest;
    float us;

    e->flight[0] = e->flight[1];
    e->n_flight--;
    for (int32_t r = 0; r < f.n; r++) {
        hx_stream *s = f.row[r];

        if (s == NULL)
            continue;
        if (rc != 0) {
            end_stream(s, HX_STOP_NONE, -1, &f.err);
            continue;
        }
        e->cache->slot[s->slot].n_pos = ++s->n_done;
        e->cache->slot[s->slot].pend = 1;
        hx_reuse_decoded(s);
        add_experts(s, &use);
    }
    if (rc != 0)
        return;
    hand_out(&f);
    us = lap(e);
    hx_sched_pick_decoded(&e->costs, &e->pick, f.n, us);
    pthread_mutex_lock(&e->lock);
    e->decode_rate +=
        (e->decode_rate == 0 ? 1 : 0.05) * (f.n * 1e6 / HX_MAX(us, 1) - e->decode_rate);
    pthread_mutex_unlock(&e->lock);
}

void hx_sched_land(hx_engine *e)
{
    while (e->n_flight > 0)
        land(e);
}

/* One token of every stream that is ready. */
static void decode_step(hx_engine *e)
{
    if (e->n_flight == 0 && !launch(e, false))
        return;
    launch(e, true);
    land(e);
}

/* ---- scoring ----------------------------------------------------------- */

/* The n_top most likely ids, most likely first, equal ones by lower id. */
static void best_of(const float *logit, int64_t n, double lse, hx_choice *top,
                    int32_t n_top)
{
    int32_t have = 0;

    for (int64_t i = 0; i < n; i++) {
        int32_t at = have;

        if (have == n_top && (n_top == 0 || !(logit[i] > top[n_top - 1].logprob)))
            continue;
        while (at > 0 && logit[i] > top[at - 1].logprob)
            at--;
        have = HX_MIN(have + 1, n_top);
        memmove(&top[at + 1], &top[at], (size_t)(have - 1 - at) * sizeof *top);
        top[at] = (hx_choice) { (int32_t)i, logit[i] };
    }
    for (int32_t i = 0; i < have; i++)
        top[i].logprob = (float)(top[i].logprob - lse);
}

static void score_row(const hx_stream *s, int64_t pos, const float *logit,
                      const float *hidden)
{
    const hx_score_args *a = s->score;
    const int64_t n = s->engine->info.n_vocab, d = s->engine->model->desc.width,
                  at = pos - a->from;
    double max = -INFINITY, sum = 0, lse;

    for (int64_t i = 0; i < n; i++)
        max = HX_MAX(max, (double)logit[i]);
    for (int64_t i = 0; i < n; i++)
        sum += exp(logit[i] - max);
    lse = max + log(sum);
    if (a->logits != NULL)
        memcpy(a->logits + at * n, logit, (size_t)n * sizeof *logit);
    if (a->hidden != NULL)
        memcpy(a->hidden + at * d, hidden, (size_t)d * sizeof *hidden);
    if (a->logprob != NULL)
        a->logprob[at] =
            pos + 1 < s->n_prompt ? (float)(logit[s->token[pos + 1]] - lse) : 0;
    if (a->top != NULL)
        best_of(logit, n, lse, a->top + at * a->n_top, a->n_top);
    for (int32_t i = 0; a->id_logprob != NULL && i < a->n_ids; i++)
        a->id_logprob[at * a->n_ids + i] = (float)(logit[a->ids[i]] - lse);
}

/* Rows of the chunk just computed that the call asked for. */
static int score_chunk(hx_stream *s, hx_err *err)
{
    hx_engine *e = s->engine;
    const int64_t first = s->n_done, last = first + e->chunk_rows;
    int rc;

    for (int64_t p = HX_MAX(first, s->score->from); p < last; p += HX_SCORE_ROWS) {
        const int64_t n = HX_MIN(HX_SCORE_ROWS, last - p);
        const size_t rows = (size_t)n * sizeof(float);
        float *logit = e->score_logit, *hidden = e->score_hidden;

        if ((rc = hx_graph_out(e->prefill, p - first, n, err)) != 0 ||
            (rc = hx_dev_get(e->dev, logit, hx_graph_logits(e->prefill),
                             rows * (size_t)e->info.n_vocab, err)) != 0 ||
            (rc = hx_dev_get(e->dev, hidden, hx_graph_hidden(e->prefill),
                             rows * (size_t)e->model->desc.width, err)) != 0)
            return rc;
        pthread_mutex_lock(&e->score_lock);
        for (int64_t i = 0; i < n && !s->left; i++)
            score_row(s, p + i, logit + i * e->info.n_vocab,
                      hidden + i * e->model->desc.width);
        pthread_mutex_unlock(&e->score_lock);
    }
    return 0;
}

/* ---- prefill ----------------------------------------------------------- */

/* Another prompt is being read that begins like that of s, which has not begun, and has not
 * come to where they part: s waits, to go on from there. */
static bool is_being_read(const hx_engine *e, const hx_stream *s)
{
    if (s->planned || s->score != NULL || e->reuse->mode == HX_PREFIX_OFF)
        return false;
    for (int32_t i = 0; i < e->n_run; i++) {
        const hx_stream *r = e->run[i];
        const int64_t n = HX_MAX(r->n_done + 1, HX_PAGE);

        if (r->state == HX_SEQ_PREFILL && r->planned && r->score == NULL &&
            !r->req.no_store && r->req.priority >= s->req.priority &&
            n <= HX_MIN(r->n_prompt, s->n_prompt) &&
            memcmp(r->token, s->token, (size_t)n * sizeof *s->token) == 0)
            return true;
    }
    return false;
}

/* The running stream whose prompt is read next, or NULL. */
static hx_stream *next_prefill(const hx_engine *e)
{
    hx_stream *of[HX_SPAN_MAX];
    int64_t n = 0, best;

    for (int32_t i = 0; i < e->n_run; i++) {
        hx_stream *s = e->run[i];

        if (s->state != HX_SEQ_PREFILL || is_being_read(e, s))
            continue;
        e->prompt[n] = (hx_pick_prompt) { s->req.priority, s->turn };
        of[n++] = s;
    }
    best = hx_sched_pick_prompt(e->prompt, n);
    return best >= 0 ? of[best] : NULL;
}

static int chunk_begin(hx_engine *e, hx_stream *s, int64_t blocks, hx_err *err)
{
    const int64_t n = hx_reuse_rows(s, blocks * HX_PAGE);
    const uint64_t room = hx_graph_room(e->prefill, n);
    hx_slot *slot = &e->cache->slot[s->slot];
    hx_buf lent = { 0 };
    int rc;

    if ((rc = hx_cache_grow(e->cache, s->slot, s->n_done + n, err)) != 0 ||
        (room > 0 && (rc = hx_store_lend(e->model->store, room, &lent, err)) != 0))
        return rc;
    hx_graph_move(e->prefill, lent, n);
    e->chunk = s;
    e->chunk_layer = 0;
    e->chunk_rows = n;
    e->chunk_us = 0;
    s->turn = ++e->next_turn;
    e->chunk_span = (hx_span) { .slot = s->slot,
                                .row0 = 0,
                                .n_row = (int32_t)n,
                                .pos0 = (int32_t)s->n_done,
                                .commit = slot->pend };
    e->chunk_batch =
        (hx_batch) { .phase = HX_PHASE_PREFILL,
                     .id = s->token + s->n_done,
                     .rows = { .span = &e->chunk_span, .n_span = 1, .n_row = n } };
    slot->pend = 0;
    hx_reuse_chunk_begin(e, s, &e->chunk_batch);
    return hx_graph_begin(e->prefill, &e->chunk_batch, err);
}

/* A reader who wants progress is told, but not too often. Under lock. */
static void tell_progress(hx_stream *s, bool last)
{
    const int64_t now = hx_now_us();

    if (!s->req.progress || (!last && now - s->told_us < PROGRESS_US))
        return;
    s->told_us = now;
    s->progress = true;
    hx_engine_wake_reader(s);
}

static void count_read(hx_engine *e, hx_stream *s, int64_t n)
{
    hx_observe(HX_H_iteration_tokens_total, (double)n);
    pthread_mutex_lock(&e->lock);
    if (s->n_done > s->prefilled) {
        hx_count(HX_C_prompt_tokens_total, HX_MIN(n, s->n_done - s->prefilled));
        s->prefilled = s->n_done;
    }
    if (e->chunk_us > 0)
        e->prefill_rate += (e->prefill_rate == 0 ? 1 : 0.1) *
                           ((double)n * 1e6 / e->chunk_us - e->prefill_rate);
    tell_progress(s, s->n_done == s->n_prompt);
    pthread_mutex_unlock(&e->lock);
}

/* The prompt's last row lands like a step of one row that is not computed. */
static void first_token(hx_engine *e, hx_stream *s)
{
    hx_flight *f = e->flight;

    hx_assert(e->n_flight == 0);
    *f = (hx_flight) {
        .row = { s }, .n = 1, .n_new = 1, .to = e->landed[e->n_launched++ % 2].p
    };
    e->n_flight = 1;
    if ((f->rc = choose(e, f, hx_graph_logits(e->prefill), &f->err)) == 0 &&
        (f->rc = hx_dev_mark(e->dev, &f->ticket, &f->err)) == 0)
        f->rc = hx_dev_reach(e->dev, f->ticket, &f->err);
    e->n_flight = 0;
    if (f->rc == 0)
        hand_out(f);
    else if (f->row[0] != NULL)
        end_stream(s, HX_STOP_NONE, -1, &f->err);
}

/* The logits of the prompt's last row are there. */
static void prompt_is_read(hx_engine *e, hx_stream *s)
{
    pthread_mutex_lock(&e->lock);
    s->state = HX_SEQ_DECODE;
    pthread_mutex_unlock(&e->lock);
    if (s->n_token == s->n_prompt) /* else preempted before: its next token is known */
        first_token(e, s);
}

/* All layers of the chunk are done. */
static int chunk_end(hx_engine *e, hx_stream *s, hx_err *err)
{
    const int64_t n = e->chunk_rows;
    int rc;

    e->chunk = NULL; /* it is whole */
    if (s->score != NULL && (rc = score_chunk(s, err)) != 0)
        return rc;
    s->n_done += n;
    e->cache->slot[s->slot].n_pos = s->n_done;
    count_read(e, s, n);
    if (s->n_done < s->n_prompt) {
        hx_reuse_chunk_end(e, s);
        return 0;
    }
    if (s->score != NULL) {
        end_stream(s, HX_STOP_LENGTH, -1, NULL);
        return 0;
    }
    if ((rc = hx_graph_out(e->prefill, n - 1, 1, err)) != 0)
        return rc;
    hx_reuse_chunk_end(e, s);
    prompt_is_read(e, s);
    return 0;
}

/* All of the prompt was kept: its logits come from the kept last row. */
static int first_of_kept(hx_engine *e, hx_stream *s, hx_err *err)
{
    const int rc = hx_reuse_logits(e, s, err);

    if (rc == 0)
        prompt_is_read(e, s);
    return rc;
}

/* One layer, with what it took. A device that works on its own is waited for where the
 * clock is needed: while decode waits too, at a chunk's end, and of chunks alone in the first
 * of a length and one of eight. */
static int chunk_step(hx_engine *e, bool share, hx_err *err)
{
    const int64_t start = hx_now_us(), l = e->chunk_layer,
                  blocks = pages_of(e->chunk_rows);
    const bool host = hx_dev_is_host(e->dev),
               measure = share || e->next_turn % 8 == 0 ||
                         e->costs.layer[l * e->costs.n_block + blocks - 1] == 0;
    int32_t any;
    int rc = 0;

    if (e->model->store != NULL)
        rc = hx_store_stage(e->model->store, err);
    if (rc != 0 || (rc = hx_graph_layers(e->prefill, l, l + 1, err)) != 0 ||
        (!host && (measure || l + 1 == e->model->desc.n_layer) &&
         (rc = hx_dev_get(e->dev, &any, e->out_id, sizeof any, err)) != 0))
        return rc;
    const double us = (double)(hx_now_us() - start);
    e->chunk_us += us;
    e->chunk_layer++;
    hx_health_beat(e);
    if (host || measure)
        hx_sched_pick_read(&e->costs, &e->pick, l, blocks, e->chunk_rows % HX_PAGE == 0,
                           (float)us);
    return 0;
}

/* Layers of one prompt's chunk, up to what was picked or until the inbox has something. */
static void prefill_slice(hx_engine *e, hx_stream *s, const hx_pick *pick)
{
    const double before_us = e->chunk != NULL ? e->chunk_us : 0;
    double layers_us = 0;
    hx_err err = { 0 };
    int rc = 0;

    if (e->chunk == NULL)
        hx_reuse_begin(e, s);
    if (e->chunk == NULL && s->n_done == s->n_prompt) {
        rc = first_of_kept(e, s, &err);
    } else {
        if (e->chunk == NULL)
            rc = chunk_begin(e, s, pick->blocks, &err);
        for (int64_t i = 0; rc == 0 && i < pick->layers; i++) {
            rc = chunk_step(e, e->pick.n_decode > 0, &err);
            if (atomic_load(&e->nudge))
                break;
        }
        if (e->chunk != NULL)
            layers_us = e->chunk_us - before_us;
        if (rc == 0 && e->chunk_layer == e->model->desc.n_layer) {
            rc = chunk_end(e, s, &err);
            chunk_close(e);
        }
    }
    const float us = lap(e);
    if (e->pick.n_decode > 0) /* layers are charged already, with what they should take */
        e->pick.credit_us -= us - (float)layers_us;
    if (rc != 0)
        end_stream(s, HX_STOP_NONE, -1, &err);
}

/* ---- requests in ------------------------------------------------------- */

/* Takes the inbox. Returns false when the engine is closing. */
static bool take_inbox(hx_engine *e)
{
    hx_stream *s;
    bool closing;

    atomic_store(&e->nudge, false);
    pthread_mutex_lock(&e->lock);
    s = e->inbox;
    e->inbox = e->inbox_last = NULL;
    closing = e->closing;
    pthread_mutex_unlock(&e->lock);
    while (s != NULL) {
        hx_stream *next = s->next;

        s->next = NULL;
        put_in_order(e, s);
        s = next;
    }
    return !closing;
}

static bool is_cancelled(hx_stream *s)
{
    bool yes;

    pthread_mutex_lock(&s->engine->lock);
    yes = s->cancelled;
    pthread_mutex_unlock(&s->engine->lock);
    return yes;
}

/* Ends s if it was cancelled, ran out of time or has a reader that reads nothing. */
static bool reap_one(hx_stream *s, int64_t now)
{
    hx_err err = { 0 };

    if (is_cancelled(s)) {
        end_stream(s, HX_STOP_CANCEL, -1, NULL);
    } else if (s->req.deadline_ms != 0 &&
               now - s->times.queued_us > s->req.deadline_ms * 1000) {
        hx_fail(&err, HX_ELIMIT, "deadline: %lld ms have passed %s",
                (long long)s->req.deadline_ms,
                s->state == HX_SEQ_QUEUED ? "in the queue"
                                          : "before the answer was complete");
        end_stream(s, HX_STOP_NONE, -1, &err);
    } else if (s->stalled_us != 0 && now - s->stalled_us > STALL_US) {
        hx_fail(&err, HX_ELIMIT, "reader: took no token for %lld s", STALL_US / 1000000);
        end_stream(s, HX_STOP_NONE, -1, &err);
    } else {
        return false;
    }
    return true;
}

static void reap(hx_engine *e)
{
    const int64_t now = hx_now_us();

    for (int64_t i = 0; i < e->n_wait;)
        i += !reap_one(e->wait[i], now);
    for (int32_t i = 0; i < e->n_run;)
        i += !reap_one(e->run[i], now);
}

/* ---- admission --------------------------------------------------------- */

double hx_sched_wait_us(const hx_engine *e, int64_t n)
{
    const double service = e->service_us > 0 ? e->service_us : 2e6;

    return n <= 0 ? 0 : (double)n * service / e->info.max_streams;
}

static int32_t n_running_of(const hx_engine *e, uint64_t client)
{
    int32_t n = 0;

    for (int32_t i = 0; i < e->n_run; i++)
        n += e->run[i]->req.client == client;
    return n;
}

/* The first in the queue from *at on whose client may have one more, or NULL. */
static hx_stream *next_waiting(const hx_engine *e, int64_t *at)
{
    for (; *at < e->n_wait; ++*at) {
        const uint64_t client = e->wait[*at]->req.client;

        if (client == 0 || e->client_streams == 0 ||
            n_running_of(e, client) < e->client_streams)
            return e->wait[*at];
    }
    return NULL;
}

/* What stays free for streams whose states are being read: others go on meanwhile, but none
 * of these has to wait for them. */
typedef struct {
    int32_t slots, pages;
} kept_free;

/* A slot, and pages for the prompt and the beginning of the answer; the rest comes as it
 * grows. Others grow too: a page each stays free for them, and what they may grow while a
 * preempted stream feeds its tokens again, or it would be preempted before it is through. */
static hx_admit admit_one(hx_engine *e, hx_stream *s, kept_free *keep)
{
    const int64_t all = s->n_prompt + s->max_new, now = HX_MIN(all, s->n_token + MARGIN);
    const int32_t need = pages_of(now),
                  others = e->n_run * (1 + pages_of(s->n_token - s->n_prompt));
    const hx_admit got = e->n_run + keep->slots >= e->info.max_streams
                             ? HX_ADMIT_NO
                             : hx_reuse_admit(e, s, need + others + keep->pages);

    if (got == HX_ADMIT_READING) {
        keep->slots++;
        keep->pages += need + others;
    }
    if (got != HX_ADMIT_YES)
        return got;
    forget(e->wait, &e->n_wait, s);
    e->run[e->n_run++] = s;
    s->turn = ++e->next_turn;
    pthread_mutex_lock(&e->lock);
    s->state = s->n_done >= s->n_prompt && s->n_token > s->n_prompt ? HX_SEQ_DECODE
                                                                    : HX_SEQ_PREFILL;
    s->pages = need;
    e->pages_reserved += s->pages;
    e->n_waiting--;
    e->n_running++;
    s->queue = 0;
    if (s->times.started_us == 0)
        s->times.started_us = hx_now_us();
    tell_progress(s, true);
    pthread_mutex_unlock(&e->lock);
    return HX_ADMIT_YES;
}

/* The last in rank of the running streams whose priority is below that of s. One in the
 * middle of a chunk has no whole state. */
static hx_stream *victim_for(const hx_engine *e, const hx_stream *s)
{
    hx_stream *low = NULL;

    for (int32_t i = 0; i < e->n_run; i++) {
        hx_stream *r = e->run[i];

        if (r == e->chunk || r->score != NULL || r->req.priority >= s->req.priority)
            continue;
        if (low == NULL || ranks_below(r, low))
            low = r;
    }
    return low;
}

/* Who waits hears where: at first, and when the place changes. */
static void tell_places(hx_engine *e)
{
    for (int64_t i = 0; i < e->n_wait; i++) {
        hx_stream *s = e->wait[i];

        if (s->queue == i && (s->told_us != 0 || !s->req.progress))
            continue;
        pthread_mutex_lock(&e->lock);
        s->queue = i;
        tell_progress(s, true);
        pthread_mutex_unlock(&e->lock);
    }
}

static void admit(hx_engine *e)
{
    kept_free keep = { 0, 0 };
    hx_stream *s, *low;
    int64_t at = 0;

    while ((s = next_waiting(e, &at)) != NULL) {
        const hx_admit got = admit_one(e, s, &keep);

        if (got == HX_ADMIT_READING)
            at++;
        else if (got == HX_ADMIT_NO && (low = victim_for(e, s)) != NULL)
            preempt(e, low);
        else if (got != HX_ADMIT_YES)
            break;
    }
    tell_places(e);
}

/* ---- the loop ---------------------------------------------------------- */

/* Until the next canary or the next look at kept prefixes, whichever is first; -1: none. */
static int64_t next_due_us(hx_engine *e)
{
    int64_t canary = hx_health_due_us(e), kept;

    pthread_mutex_lock(&e->lock);
    kept = hx_reuse_due_us(e);
    pthread_mutex_unlock(&e->lock);
    if (kept == INT64_MAX)
        return canary;
    kept = HX_MAX(kept - hx_now_us(), 0);
    return canary < 0 ? kept : HX_MIN(canary, kept);
}

/* Sleeps until there is something to do, at most until the next canary is due; when every
 * stream waits for its reader, a moment. */
static void wait_for_work(hx_engine *e, bool idle)
{
    const bool empty = e->n_run == 0 && e->n_wait == 0;
    const int64_t most_us = !empty ? (idle ? 20000 : 0) : next_due_us(e);

    if (most_us == 0)
        return;
    const int64_t until = hx_now_us() + most_us;
    pthread_mutex_lock(&e->lock);
    if (empty)
        hx_health_work(e, false);
    while (e->inbox == NULL && !e->closing && hx_reuse_due_us(e) > hx_now_us()) {
        if (most_us < 0)
            pthread_cond_wait(&e->wake, &e->lock);
        else if (!hx_cond_until(&e->wake, &e->lock, until) || !empty)
            break;
    }
    hx_health_work(e, true);
    pthread_mutex_unlock(&e->lock);
}

/* One slice or one decode step. Returns whether there was one to do. */
static bool step(hx_engine *e)
{
    hx_stream *prompt = e->chunk != NULL ? e->chunk : next_prefill(e);
    hx_pick_state *p = &e->pick;
    hx_pick pick;

    p->n_decode = gather(e);
    if (e->n_flight > 0) {
        decode_step(e);
        return true;
    }
    if (prompt != NULL && prompt->state != HX_SEQ_PREFILL) /* preempted by gather() */
        prompt = next_prefill(e);
    p->prefill = prompt != NULL;
    p->layer = e->chunk != NULL ? e->chunk_layer : 0;
    p->blocks = e->chunk != NULL ? pages_of(e->chunk_rows) : 0;
    p->left = prompt != NULL ? pages_of(prompt->n_prompt - prompt->n_done) : 0;
    pick = hx_sched_pick_next(&e->costs, p);
    if (e->model->store != NULL)
        hx_store_keep_lent(e->model->store, p->prefill);
    if (pick.kind == HX_PICK_PREFILL)
        prefill_slice(e, prompt, &pick);
    else if (pick.kind == HX_PICK_DECODE)
        decode_step(e);
    return pick.kind != HX_PICK_NOTHING;
}

void *hx_sched_run(void *arg)
{
    hx_engine *e = arg;
    bool idle = false;

    e->lap_us = hx_now_us();
    for (;;) {
        int64_t start;

        hx_health_canary(e, e->n_run == 0 && e->n_wait == 0);
        wait_for_work(e, idle);
        if (!take_inbox(e))
            break;
        start = hx_now_us();
        if (idle)
            e->lap_us = start;
        e->dev->times = atomic_load(&e->profile) ? e->times : NULL;
        reap(e);
        hx_reuse_tick(e);
        admit(e);
        idle = !step(e);
        hx_health_beat(e);
        hx_count(HX_C_steps_total, 1);
        hx_count(HX_C_step_busy_us_total, hx_now_us() - start);
        pthread_mutex_lock(&e->lock);
        e->steps++;
        if (e->model->store != NULL)
            hx_store_report(e->model->store, &e->experts);
        pthread_mutex_unlock(&e->lock);
    }
    hx_sched_land(e);
    while (e->n_run > 0)
        end_stream(e->run[0], HX_STOP_CANCEL, -1, NULL);
    while (e->n_wait > 0)
        end_stream(e->wait[0], HX_STOP_CANCEL, -1, NULL);
    return NULL;
}
