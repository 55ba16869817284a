/* sample.c - what a stream needs to choose its next token and to know when to stop: the
 * history behind penalties, bans before min_new, grammars, stop texts. The choice itself is the
 * operation hx_op_sample. Called by the engine thread. */
#include "engine/engine.h"

/* Compiles the request's grammar, on the caller's thread and within its limits. */
static int open_grammar(hx_stream *s, hx_err *err)
{
    const hx_engine *e = s->engine;
    const hx_request *r = &s->req;
    int rc;

    if (r->grammar_kind == HX_GRAMMAR_NONE)
        return 0;
    if (e->vocab == NULL)
        return hx_fail(err, HX_EUNSUP, "grammar: model %s has no tokenizer", e->name);
    if ((rc = hx_grammars_take(e->grammars, e->vocab, r->grammar_kind, r->grammar,
                               &s->grammar, err)) != 0)
        return rc;
    s->matcher = hx_new(hx_matcher, 1);
    s->mask = hx_new(uint32_t, (e->info.n_vocab + 31) / 32);
    if (s->matcher == NULL || s->mask == NULL)
        return hx_fail(err, HX_ENOMEM, "request: no memory for its grammar");
    s->grammar_on = r->grammar_after == 0 && !r->grammar_lazy;
    /* Such an answer ends where its grammar does, and not before it begins. */
    s->req.ignore_eos = r->ignore_eos && r->grammar_lazy;
    return 0;
}

int hx_sample_open(hx_stream *s, hx_err *err)
{
    const hx_request *r = &s->req;
    const size_t n_vocab = (size_t)s->engine->info.n_vocab;
    hx_history *h = &s->hist;
    int rc;

    s->thinking = r->think_end != 0;
    if ((rc = open_grammar(s, err)) != 0)
        return rc;
    s->stopper.n_stop = r->n_stop;
    for (int32_t i = 0; i < r->n_stop; i++)
        s->stopper.stop[i] = r->stop[i];
    if (r->n_stop > 0) {
        s->stopper.cap = HX_STOP_BYTES + HX_TOKEN_BYTES;
        if ((s->stopper.held = hx_new(char, s->stopper.cap)) == NULL)
            goto no_memory;
    }
    h->on = (r->repeat_penalty != 0 && r->repeat_penalty != 1) ||
            r->presence_penalty != 0 || r->frequency_penalty != 0;
    if (!h->on)
        return 0;
    h->id = hx_new(int32_t, n_vocab);
    h->count = hx_new(int32_t, n_vocab);
    h->at = hx_new(int32_t, n_vocab);
    if (h->id != NULL && h->count != NULL && h->at != NULL)
        return 0;
no_memory:
    return hx_fail(err, HX_ENOMEM, "request: no memory for its sampling state");
}

void hx_sample_close(hx_stream *s)
{
    hx_grammars_drop(s->engine->grammars, s->grammar);
    hx_free(s->matcher);
    hx_free(s->mask);
    hx_free(s->stopper.held);
    hx_free(s->hist.id);
    hx_free(s->hist.count);
    hx_free(s->hist.at);
}

void hx_sample_seen(hx_history *h, int32_t id, bool answer)
{
    if (!h->on)
        return;
    if (h->at[id] == 0) {
        h->id[h->n] = id;
        h->count[h->n] = 0;
        h->at[id] = ++h->n;
    }
    if (answer)
        h->count[h->at[id] - 1]++;
}

/* Matchers of one grammar share its states, so they begin on the engine thread only. */
static void start(hx_stream *s)
{
    if (s->matcher->g == NULL)
        hx_grammar_start(s->grammar, s->matcher);
}

/* An answer that must keep to a grammar cannot end before that has begun. */
static bool awaits_grammar(const hx_stream *s)
{
    return s->grammar != NULL && !s->grammar_on && !s->req.grammar_lazy;
}

bool hx_sample_is_free(const hx_stream *s)
{
    return s->grammar == NULL && !s->hist.on && s->generated >= s->req.n_forced;
}

int hx_sample_row_of(hx_stream *s, bool ahead, hx_sample_row *row, hx_err *err)
{
    const hx_request *r = &s->req;
    const int64_t made = s->n_token - s->n_prompt + ahead;

    *row = (hx_sample_row) {
        .temperature = r->temperature,
        .top_p = r->top_p,
        .min_p = r->min_p,
        .top_k = r->top_k,
        .repeat = r->repeat_penalty,
        .presence = r->presence_penalty,
        .frequency = r->frequency_penalty,
        .hist_id = s->hist.id,
        .hist_count = s->hist.count,
        .n_hist = s->hist.n,
        .bias = r->bias,
        .n_bias = r->n_bias,
        .seed = r->seed,
        .counter = (uint64_t)made,
        .n_top = r->n_top,
        .want_logprob = r->want_logprobs,
    };
    if (r->ignore_eos || made < r->min_new || (awaits_grammar(s) && !s->thinking)) {
        row->ban = s->ban;
        row->n_ban = s->n_ban;
    }
    if (!s->grammar_on)
        return 0;
    start(s);
    /* Where nothing can follow the answer ends, however few tokens it has. */
    if (hx_grammar_done(s->matcher) == HX_GRAMMAR_MUST_END)
        row->n_ban = 0;
    row->mask = s->mask;
    return hx_grammar_mask(s->matcher, s->mask, err);
}

bool hx_sample_is_end(const hx_stream *s, int32_t id)
{
    for (int32_t i = 0; i < s->n_ban; i++)
        if (s->ban[i] == id)
            return true;
    return false;
}

/* A model that would end its answer amid its reasoning has thought enough, where a grammar
 * is to follow. */
int32_t hx_sample_settle(hx_stream *s, int32_t id)
{
    const hx_request *r = &s->req;
    const int64_t made = s->n_token - s->n_prompt;
    const bool calls = r->grammar_at != 0 && id == r->grammar_at;

    if (!s->thinking)
        return id;
    if (!calls &&
        ((r->think_max > 0 && made >= r->think_max) || atomic_load(&s->end_thinking) ||
         (awaits_grammar(s) && hx_sample_is_end(s, id))))
        id = r->think_end;
    s->thinking = id != r->think_end && !calls;
    return id;
}

int hx_sample_follow(hx_stream *s, int32_t id, hx_err *err)
{
    const hx_request *r = &s->req;

    if (s->grammar == NULL)
        return 0;
    if (!s->grammar_on && id == r->grammar_after && !r->grammar_lazy) {
        s->grammar_on = true;
        return 0;
    }
    s->grammar_on |= id == r->grammar_at && r->grammar_at != 0;
    if (!s->grammar_on)
        return 0;
    start(s);
    if (hx_grammar_accept(s->matcher, id) != 0)
        return hx_fail(err, HX_EARG, "grammar: token %d is not allowed here", id);
    if (r->grammar_lazy && r->grammar_again &&
        hx_grammar_done(s->matcher) == HX_GRAMMAR_MUST_END) {
        s->grammar_on = false;
        s->matcher->g = NULL;
    }
    return 0;
}

/* Length of the longest suffix of p[0..n) that begins some stop text. */
static size_t open_suffix(const hx_stopper *st, const char *p, size_t n)
{
    size_t best = 0;

    for (int32_t i = 0; i < st->n_stop; i++) {
        const hx_str t = st->stop[i];

        for (size_t k = HX_MIN(n, t.n - 1); k > best; k--)
            if (memcmp(p + n - k, t.p, k) == 0) {
                best = k;
                break;
            }
    }
    return best;
}

int32_t hx_sample_stop(hx_stopper *st, hx_str bytes, size_t *n_sure)
{
    const char *first = NULL;
    int32_t which = -1;

    /* What is held begins some stop text, so it is shorter than HX_STOP_BYTES. */
    hx_assert(st->n_held + bytes.n <= st->cap);
    memcpy(st->held + st->n_held, bytes.p, bytes.n);
    st->n_held += bytes.n;
    for (int32_t i = 0; i < st->n_stop; i++) {
        const char *at = memmem(st->held, st->n_held, st->stop[i].p, st->stop[i].n);

        if (at != NULL && (first == NULL || at < first)) {
            first = at;
            which = i;
        }
    }
    *n_sure = first != NULL ? (size_t)(first - st->held)
                            : st->n_held - open_suffix(st, st->held, st->n_held);
    return which;
}

void hx_sample_release(hx_stopper *st, size_t n)
{
    hx_assert(n <= st->n_held);
    memmove(st->held, st->held + n, st->n_held - n);
    st->n_held -= n;
}
