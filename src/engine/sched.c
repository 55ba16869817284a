/* sched.c - the engine thread: takes requests in, reads prompts in slices, decodes all
 * running streams together, hands tokens out.
 *
 * A step is one slice of a prefill chunk, then one decode step of every stream that has a
 * token to feed; cancels are seen between slices. Never knows the model's layers (graph.c
 * walks them) and never waits for a reader. */
#include <math.h>
#include <time.h>

#include "engine/engine.h"

/* ---- the end of a stream ---------------------------------------------- */

static void wake_reader(hx_stream *s)
{
    pthread_cond_broadcast(&s->cond);
    if (s->ready != NULL)
        s->ready(s->ready_ud);
}

static void forget(hx_stream **list, int64_t *n, const hx_stream *s)
{
    for (int64_t i = 0; i < *n; i++)
        if (list[i] == s) {
            memmove(&list[i], &list[i + 1], (size_t)(*n - i - 1) * sizeof *list);
            --*n;
            return;
        }
}

/* The stream's last event; its memory goes back, and itself when its owner has let go. */
static void end_stream(hx_stream *s, hx_stop stop, int32_t stop_index, const hx_err *err)
{
    hx_engine *e = s->engine;
    int64_t n_run = e->n_run;
    bool freed;

    if (s->slot >= 0)
        hx_cache_drop(e->cache, s->slot);
    if (e->chunk == s)
        e->chunk = NULL;
    forget(e->run, &n_run, s);
    forget(e->wait, &e->n_wait, s);
    e->n_run = (int32_t)n_run;
    if (err != NULL)
        hx_count(HX_C_requests_failed_total, 1);
    else if (stop == HX_STOP_CANCEL)
        hx_count(HX_C_requests_cancelled_total, 1);
    pthread_mutex_lock(&e->lock);
    e->pages_reserved -= s->pages;
    if (s->state == HX_SEQ_QUEUED)
        e->n_waiting--;
    else
        e->n_running--;
    s->state = HX_SEQ_ENDED;
    s->times.done_us = hx_now_us();
    s->end = (hx_event) { .kind = err != NULL ? HX_EV_ERROR : HX_EV_DONE,
                          .stop = stop,
                          .stop_index = stop_index };
    if (err != NULL)
        s->end.err = *err;
    s->ended = true;
    freed = s->freed;
    if (!freed)
        wake_reader(s);
    pthread_mutex_unlock(&e->lock);
    if (freed)
        hx_engine_stream_destroy(s);
}

/* ---- tokens out -------------------------------------------------------- */

static bool ring_high(const hx_stream *s)
{
    return s->n_ring >= HX_RING_HIGH || s->n_ring_bytes >= HX_RING_BYTES_HIGH;
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
        wake_reader(s);
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
        wake_reader(s);
        pthread_mutex_unlock(&s->engine->lock);
        return -1;
    }
    /* A special token is no text: nothing matches across it. */
    if (special || bytes.n == 0) {
        show_held(s, s->stopper.n_held, false);
        pthread_mutex_lock(&s->engine->lock);
        ring_put(s, t, bytes.p);
        wake_reader(s);
        pthread_mutex_unlock(&s->engine->lock);
        return -1;
    }
    s->pend[s->n_pend++] = *t;
    which = hx_sample_stop(&s->stopper, bytes, &n_sure);
    show_held(s, n_sure, which >= 0);
    return which;
}

static int32_t end_id_index(const hx_stream *s, int32_t id)
{
    for (int32_t i = 0; i < s->n_ban; i++)
        if (s->ban[i] == id)
            return i;
    return -1;
}

/* The next forced token instead of id, if there is one. */
static int32_t forced_or(hx_stream *s, int32_t id)
{
    pthread_mutex_lock(&s->engine->lock);
    if (s->generated < s->req.n_forced)
        id = s->req.forced[s->generated];
    else if (s->force_at < s->n_force)
        id = s->force[s->force_at++];
    s->generated++;
    if (s->times.first_us == 0)
        s->times.first_us = hx_now_us();
    pthread_mutex_unlock(&s->engine->lock);
    return id;
}

/* The stream's next token was chosen: keeps it, shows it, ends the stream if it was the
 * last. Returns false when the stream is gone. */
static bool accept_token(hx_stream *s, hx_out_token *t)
{
    hx_err err = { 0 };
    int32_t which;

    t->token = forced_or(s, t->token);
    hx_count(HX_C_generation_tokens_total, 1);
    hx_sample_seen(&s->hist, t->token, true);
    s->token[s->n_token++] = t->token;
    if (!s->req.ignore_eos && s->generated > s->req.n_forced &&
        end_id_index(s, t->token) >= 0) {
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

/* Row r's choice, from the device. */
static int take_choice(hx_engine *e, int32_t r, const hx_stream *s, hx_out_token *t,
                       hx_err *err)
{
    const size_t at = (size_t)r;
    int rc;

    memset(t, 0, sizeof *t);
    if ((rc = hx_dev_get(e->dev, &t->token, hx_buf_at(e->out_id, at * sizeof t->token),
                         sizeof t->token, err)) != 0)
        return rc;
    if (t->token < 0)
        return hx_fail(err, HX_EARG, "sampling: %s",
                       t->token == -1 ? "the logits hold a value that is no number"
                                      : "every token is banned");
    if (s->req.want_logprobs &&
        (rc = hx_dev_get(e->dev, &t->logprob,
                         hx_buf_at(e->out_logprob, at * sizeof t->logprob),
                         sizeof t->logprob, err)) != 0)
        return rc;
    return s->req.n_top == 0
               ? 0
               : hx_dev_get(e->dev, t->top, hx_buf_at(e->out_top, at * sizeof t->top),
                            (size_t)s->req.n_top * sizeof *t->top, err);
}

/* Chooses the next token of n streams whose logits are rows 0..n-1. A row that cannot be
 * sampled (NaN, everything banned) ends its own stream only. */
static void choose(hx_engine *e, hx_buf logits, hx_stream **stream, int32_t n)
{
    hx_out_token t;
    hx_err err = { 0 };
    bool each = false;

    /* A grammar that allows nothing leaves an empty mask, which its row is refused for. */
    for (int32_t r = 0; r < n; r++)
        each |= hx_sample_row_of(stream[r], &e->row[r], &err) != 0;
    each = each || sample_rows(e, logits, 0, n, &err) != 0;
    for (int32_t r = 0; r < n; r++) {
        if ((each && sample_rows(e, logits, r, 1, &err) != 0) ||
            take_choice(e, r, stream[r], &t, &err) != 0)
            end_stream(stream[r], HX_STOP_NONE, -1, &err);
        else
            accept_token(stream[r], &t);
    }
}

/* ---- decode ------------------------------------------------------------ */

static bool can_decode(hx_stream *s)
{
    bool high;

    if (s->state != HX_SEQ_DECODE)
        return false;
    pthread_mutex_lock(&s->engine->lock);
    high = ring_high(s);
    pthread_mutex_unlock(&s->engine->lock);
    if (!high)
        s->stalled_us = 0;
    else if (s->stalled_us == 0)
        s->stalled_us = hx_now_us();
    return !high;
}

/* One token of every stream that has one to feed. Returns how many there were. */
static int32_t decode_step(hx_engine *e)
{
    const int64_t n_layer = e->model->desc.n_layer;
    hx_err err = { 0 };
    int32_t n = 0;
    int rc;

    for (int32_t i = 0; i < e->n_run; i++) {
        hx_stream *s = e->run[i];
        hx_slot *slot = &e->cache->slot[s->slot];

        if (!can_decode(s))
            continue;
        if (hx_cache_grow(e->cache, s->slot, s->n_done + 1, &err) != 0) {
            end_stream(s, HX_STOP_NONE, -1, &err);
            i--;
            continue;
        }
        e->row_of[n] = s;
        e->id[n] = s->token[s->n_done];
        e->span[n] = (hx_span) { .slot = s->slot,
                                 .row0 = n,
                                 .n_row = 1,
                                 .pos0 = (int32_t)s->n_done,
                                 .commit = slot->pend };
        n++;
    }
    if (n == 0)
        return 0;
    const hx_batch batch = { .phase = HX_PHASE_DECODE,
                             .id = e->id,
                             .rows = { .span = e->span, .n_span = n, .n_row = n } };

    if ((rc = hx_graph_begin(e->decode, &batch, &err)) != 0 ||
        (rc = hx_graph_layers(e->decode, 0, n_layer, &err)) != 0 ||
        (rc = hx_graph_out(e->decode, 0, n, &err)) != 0) {
        for (int32_t r = 0; r < n; r++)
            end_stream(e->row_of[r], HX_STOP_NONE, -1, &err);
        return n;
    }
    for (int32_t r = 0; r < n; r++) {
        hx_stream *s = e->row_of[r];
        hx_slot *slot = &e->cache->slot[s->slot];

        slot->n_pos = ++s->n_done;
        slot->pend = 1;
    }
    choose(e, hx_graph_logits(e->decode), e->row_of, n);
    return n;
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
            pos + 1 < a->n_tokens ? (float)(logit[a->tokens[pos + 1]] - lse) : 0;
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
        for (int64_t i = 0; i < n; i++)
            score_row(s, p + i, logit + i * e->info.n_vocab,
                      hidden + i * e->model->desc.width);
    }
    return 0;
}

/* ---- prefill ----------------------------------------------------------- */

/* The running stream whose prompt is read next: highest priority, then first come. */
static hx_stream *next_prefill(const hx_engine *e)
{
    hx_stream *best = NULL;

    for (int32_t i = 0; i < e->n_run; i++) {
        hx_stream *s = e->run[i];

        if (s->state == HX_SEQ_PREFILL &&
            (best == NULL || s->req.priority > best->req.priority ||
             (s->req.priority == best->req.priority && s->order < best->order)))
            best = s;
    }
    return best;
}

static int chunk_begin(hx_engine *e, hx_stream *s, hx_err *err)
{
    const int64_t n = HX_MIN(HX_PREFILL_ROWS, s->n_prompt - s->n_done);
    hx_slot *slot = &e->cache->slot[s->slot];
    int rc;

    if ((rc = hx_cache_grow(e->cache, s->slot, s->n_done + n, err)) != 0)
        return rc;
    e->chunk = s;
    e->chunk_layer = 0;
    e->chunk_rows = n;
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
    return hx_graph_begin(e->prefill, &e->chunk_batch, err);
}

/* All layers of the chunk are done. */
static int chunk_end(hx_engine *e, hx_stream *s, hx_err *err)
{
    const int64_t n = e->chunk_rows;
    int rc;

    e->chunk = NULL;
    if (s->score != NULL && (rc = score_chunk(s, err)) != 0)
        return rc;
    s->n_done += n;
    e->cache->slot[s->slot].n_pos = s->n_done;
    hx_count(HX_C_prompt_tokens_total, n);
    pthread_mutex_lock(&e->lock);
    s->prefilled = s->n_done;
    if (s->req.progress) {
        s->progress = true;
        wake_reader(s);
    }
    pthread_mutex_unlock(&e->lock);
    if (s->n_done < s->n_prompt)
        return 0;
    if (s->score != NULL) {
        end_stream(s, HX_STOP_LENGTH, -1, NULL);
        return 0;
    }
    if ((rc = hx_graph_out(e->prefill, n - 1, 1, err)) != 0)
        return rc;
    s->state = HX_SEQ_DECODE;
    choose(e, hx_graph_logits(e->prefill), &s, 1);
    return 0;
}

static bool any_decoding(const hx_engine *e)
{
    for (int32_t i = 0; i < e->n_run; i++)
        if (e->run[i]->state == HX_SEQ_DECODE)
            return true;
    return false;
}

/* Layers of one prompt's chunk: until it is complete, until decode rows had to wait for
 * HX_SLICE_US, or until the inbox has something. */
static void prefill_slice(hx_engine *e)
{
    hx_stream *s = e->chunk != NULL ? e->chunk : next_prefill(e);
    const int64_t start = hx_now_us();
    const bool share = any_decoding(e);
    hx_err err = { 0 };
    int rc = 0;

    if (s == NULL)
        return;
    if (e->chunk == NULL)
        rc = chunk_begin(e, s, &err);
    while (rc == 0 && e->chunk_layer < e->model->desc.n_layer) {
        rc = hx_graph_layers(e->prefill, e->chunk_layer, e->chunk_layer + 1, &err);
        e->chunk_layer++;
        if (atomic_load(&e->nudge) || (share && hx_now_us() - start >= HX_SLICE_US))
            break;
    }
    if (rc == 0 && e->chunk_layer == e->model->desc.n_layer)
        rc = chunk_end(e, s, &err);
    if (rc != 0)
        end_stream(s, HX_STOP_NONE, -1, &err);
}

/* ---- requests in ------------------------------------------------------- */

static void put_in_order(hx_engine *e, hx_stream *s)
{
    int64_t at = e->n_wait++;

    while (at > 0 && e->wait[at - 1]->req.priority < s->req.priority) {
        e->wait[at] = e->wait[at - 1];
        at--;
    }
    e->wait[at] = s;
}

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
        s->order = e->next_order++;
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
        hx_fail(&err, HX_ELIMIT, "deadline: %lld ms have passed",
                (long long)s->req.deadline_ms);
        end_stream(s, HX_STOP_NONE, -1, &err);
    } else if (s->stalled_us != 0 && now - s->stalled_us > HX_STALL_US) {
        hx_fail(&err, HX_ELIMIT, "reader: took no token for %lld s",
                HX_STALL_US / 1000000);
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

/* Gives waiting requests their slot and pages, for their whole length at once: a request
 * that runs never has to stop for want of memory. */
static void admit(hx_engine *e)
{
    bool moved = false;

    while (e->n_wait > 0 && e->n_run < e->info.max_streams) {
        hx_stream *s = e->wait[0];
        const int64_t need = (s->n_prompt + s->max_new + HX_PAGE - 1) / HX_PAGE;

        if (e->pages_reserved + need > e->cache->n_page ||
            (s->slot = hx_cache_take(e->cache)) < 0)
            break;
        forget(e->wait, &e->n_wait, s);
        e->run[e->n_run++] = s;
        s->pages = (int32_t)need;
        s->state = HX_SEQ_PREFILL;
        pthread_mutex_lock(&e->lock);
        e->pages_reserved += s->pages;
        e->n_waiting--;
        e->n_running++;
        s->queue = 0;
        s->times.started_us = hx_now_us();
        pthread_mutex_unlock(&e->lock);
        moved = true;
    }
    if (!moved)
        return;
    pthread_mutex_lock(&e->lock);
    for (int64_t i = 0; i < e->n_wait; i++) {
        e->wait[i]->queue = i;
        if (e->wait[i]->req.progress) {
            e->wait[i]->progress = true;
            wake_reader(e->wait[i]);
        }
    }
    pthread_mutex_unlock(&e->lock);
}

/* ---- the loop ---------------------------------------------------------- */

/* Sleeps until there is something to do; when every stream waits for its reader, a
 * moment. */
static void wait_for_work(hx_engine *e, bool idle)
{
    struct timespec until;

    pthread_mutex_lock(&e->lock);
    if (e->n_run == 0 && e->n_wait == 0) {
        while (e->inbox == NULL && !e->closing)
            pthread_cond_wait(&e->wake, &e->lock);
    } else if (idle && e->inbox == NULL && !e->closing) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20 * 1000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&e->wake, &e->lock, &until);
    }
    pthread_mutex_unlock(&e->lock);
}

void *hx_sched_run(void *arg)
{
    hx_engine *e = arg;
    bool idle = false;

    for (;;) {
        int64_t start;

        wait_for_work(e, idle);
        if (!take_inbox(e))
            break;
        start = hx_now_us();
        reap(e);
        admit(e);
        idle = next_prefill(e) == NULL;
        prefill_slice(e);
        idle = decode_step(e) == 0 && idle;
        hx_count(HX_C_steps_total, 1);
        hx_count(HX_C_step_busy_us_total, hx_now_us() - start);
        pthread_mutex_lock(&e->lock);
        e->steps++;
        pthread_mutex_unlock(&e->lock);
    }
    while (e->n_run > 0)
        end_stream(e->run[0], HX_STOP_CANCEL, -1, NULL);
    while (e->n_wait > 0)
        end_stream(e->wait[0], HX_STOP_CANCEL, -1, NULL);
    return NULL;
}
