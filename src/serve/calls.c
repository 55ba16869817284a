/* calls.c - what answers that called tools were sampled as, so that a later request, which
 * repeats them as its client has kept them, goes on from the very same tokens: what is
 * cached of them fits, and the model sees again what it thought.
 *
 * A turn is found by the ids before it, so ids of calls, which clients change or lose, do
 * not matter; it is put back only where the client's version of it means the same. Kept
 * in memory alone, the latest turns up to a bound. Called by generate.c, on any thread. */
#include "serve/serve.h"

#include <pthread.h>
#include <sys/random.h>

enum {
    TURNS_MAX = 1024,
    IDS_MAX = 2 << 20 /* of all turns: 8 MiB */
};

typedef struct {
    uint64_t hash; /* of the n_before ids before it */
    int64_t n_before, n;
    int32_t *id; /* [n] */
} turn;

struct hx_calls {
    pthread_mutex_t lock; /* guards the rest */
    turn turn[TURNS_MAX]; /* [n] a ring; the oldest at first */
    int32_t first, n;
    int64_t n_id;
    uint64_t seed;
};

int hx_calls_open(hx_calls **out, hx_err *err)
{
    if ((*out = hx_new(hx_calls, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "server: no memory");
    pthread_mutex_init(&(*out)->lock, NULL);
    if (getrandom(&(*out)->seed, sizeof(*out)->seed, 0) < 0)
        (*out)->seed = (uint64_t)hx_now_us();
    return 0;
}

void hx_calls_close(hx_calls *m)
{
    if (m == NULL)
        return;
    for (int32_t i = 0; i < TURNS_MAX; i++)
        hx_free(m->turn[i].id);
    pthread_mutex_destroy(&m->lock);
    hx_free(m);
}

/* Seeded, so that nobody can make prompts that meet somebody else's. */
static uint64_t hash_more(uint64_t h, const int32_t *id, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        h = (h ^ (uint32_t)id[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static void forget_oldest(hx_calls *m)
{
    turn *t = &m->turn[m->first];

    m->n_id -= t->n;
    hx_free(t->id);
    *t = (turn) { 0 };
    m->first = (m->first + 1) % TURNS_MAX;
    m->n--;
}

void hx_calls_keep(hx_calls *m, hx_prompt before, hx_prompt answer)
{
    turn t = { hash_more(m->seed, before.id, before.n), before.n, answer.n, NULL };

    /* Without memory the turn is rendered anew later. */
    if (answer.n < 1 || answer.n > IDS_MAX || (t.id = hx_new(int32_t, answer.n)) == NULL)
        return;
    memcpy(t.id, answer.id, (size_t)answer.n * sizeof *t.id);
    pthread_mutex_lock(&m->lock);
    while (m->n > 0 && (m->n == TURNS_MAX || m->n_id + t.n > IDS_MAX))
        forget_oldest(m);
    m->turn[(m->first + m->n++) % TURNS_MAX] = t;
    m->n_id += t.n;
    pthread_mutex_unlock(&m->lock);
}

/* The smallest number of ids above `above` that a turn has before it, or -1. */
static int64_t next_before(hx_calls *m, int64_t above)
{
    int64_t best = -1;

    pthread_mutex_lock(&m->lock);
    for (int32_t i = 0; i < m->n; i++) {
        const int64_t n = m->turn[(m->first + i) % TURNS_MAX].n_before;

        if (n > above && (best < 0 || n < best))
            best = n;
    }
    pthread_mutex_unlock(&m->lock);
    return best;
}

/* Copies the skip-th latest turn after these ids to out; false: there is none. */
static bool find_turn(hx_calls *m, uint64_t hash, int64_t n_before, int32_t skip,
                      hx_ids *out, hx_err *err)
{
    bool found = false;

    out->n = 0;
    pthread_mutex_lock(&m->lock);
    for (int32_t i = m->n - 1; i >= 0 && !found; i--) {
        const turn *t = &m->turn[(m->first + i) % TURNS_MAX];

        if (t->hash == hash && t->n_before == n_before && skip-- == 0)
            found = hx_ids_add(out, t->id, t->n, err) == 0;
    }
    pthread_mutex_unlock(&m->lock);
    return found;
}

static int64_t find_end(const hx_info *info, const hx_ids *v, int64_t from)
{
    for (int64_t i = from; i < v->n; i++)
        for (int32_t k = 0; k < info->n_eos; k++)
            if (v->p[i] == info->eos[k])
                return i;
    return -1;
}

/* Puts turn in the place of [from, to). */
static int splice(hx_ids *v, int64_t from, int64_t to, const hx_ids *turn_ids,
                  hx_err *err)
{
    hx_ids rest = { 0 };
    int rc = hx_ids_add(&rest, v->p + to, v->n - to, err);

    v->n = rc == 0 ? from : v->n;
    if (rc == 0 && (rc = hx_ids_add(v, turn_ids->p, turn_ids->n, err)) == 0)
        rc = hx_ids_add(v, rest.p, rest.n, err);
    hx_ids_free(&rest);
    return rc;
}

int hx_calls_replay(hx_calls *m, const hx_calls_opt *opt, hx_ids *ids, hx_err *err)
{
    uint64_t hash = m->seed;
    hx_ids was = { 0 };
    int64_t at = 0, before, end;
    int rc = 0;

    while (rc == 0 && (before = next_before(m, at)) > 0 && before < ids->n) {
        hash = hash_more(hash, ids->p + at, before - at);
        at = before;
        end = find_end(opt->info, ids, at);
        for (int32_t i = 0; end >= 0 && find_turn(m, hash, at, i, &was, err); i++)
            if (opt->same(opt->ud, (hx_prompt) { ids->p + at, end - at },
                          (hx_prompt) { was.p, was.n })) {
                rc = splice(ids, at, end, &was, err);
                break;
            }
    }
    hx_ids_free(&was);
    return rc;
}
