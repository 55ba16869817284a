/* grammars.c - the compiled grammars of an engine: requests with the same source share
 * one, with the masks that it has found so far; the latest that nobody uses stay.
 *
 * Taken and dropped on any thread. A grammar's automaton is the engine thread's: matchers
 * may only be started and moved there. Never compiles under its lock, so a slow source
 * makes nobody else wait. */
#include "engine/engine.h"

enum { IDLE_MAX = 8 }; /* each may hold up to 16 MiB of states and masks */

typedef struct entry entry;
struct entry {
    entry *next; /* the one that was used before */
    hx_grammar *grammar;
    hx_grammar_kind kind;
    hx_str source;
    int32_t refs;
};

struct hx_grammars {
    pthread_mutex_t lock; /* guards the list and all refs */
    entry *first;         /* used last */
};

static void entry_free(entry *x)
{
    if (x == NULL)
        return;
    hx_grammar_close(x->grammar);
    hx_free((void *)(uintptr_t)x->source.p);
    hx_free(x);
}

int hx_grammars_open(hx_grammars **out, hx_err *err)
{
    if ((*out = hx_new(hx_grammars, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "engine: no memory");
    pthread_mutex_init(&(*out)->lock, NULL);
    return 0;
}

void hx_grammars_close(hx_grammars *all)
{
    if (all == NULL)
        return;
    for (entry *x = all->first, *next; x != NULL; x = next) {
        next = x->next;
        entry_free(x);
    }
    pthread_mutex_destroy(&all->lock);
    hx_free(all);
}

/* The grammar of this source with one more user, now the first; NULL: there is none. */
static hx_grammar *find(hx_grammars *all, hx_grammar_kind kind, hx_str source)
{
    for (entry **at = &all->first; *at != NULL; at = &(*at)->next) {
        entry *x = *at;

        if (x->kind != kind || !hx_str_eq(x->source, source))
            continue;
        *at = x->next;
        x->next = all->first;
        all->first = x;
        x->refs++;
        return x->grammar;
    }
    return NULL;
}

/* Takes those out of the list that have been idle longest; they are freed outside of the
 * lock. */
static entry *take_surplus(hx_grammars *all)
{
    entry *surplus = NULL;
    int32_t n_idle = 0;

    for (entry **at = &all->first; *at != NULL;) {
        entry *x = *at;

        if (x->refs > 0 || n_idle++ < IDLE_MAX) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        x->next = surplus;
        surplus = x;
    }
    return surplus;
}

static int compile(entry **out, const hx_vocab *v, hx_grammar_kind kind, hx_str source,
                   hx_err *err)
{
    entry *x = hx_new(entry, 1);
    char *copy = hx_alloc(source.n + 1);
    int rc = 0;

    *out = NULL;
    if (x == NULL || copy == NULL) {
        hx_free(copy);
        rc = hx_fail(err, HX_ENOMEM, "request: no memory for its grammar");
        goto fail;
    }
    if (source.n > 0)
        memcpy(copy, source.p, source.n);
    x->kind = kind;
    x->source = (hx_str) { copy, source.n };
    x->refs = 1;
    if ((rc = hx_grammar_open(&x->grammar, v, kind, source, NULL, err)) != 0)
        goto fail;
    *out = x;
    return 0;
fail:
    entry_free(x);
    return rc;
}

int hx_grammars_take(hx_grammars *all, const hx_vocab *v, hx_grammar_kind kind,
                     hx_str source, hx_grammar **out, hx_err *err)
{
    entry *mine;
    int rc;

    pthread_mutex_lock(&all->lock);
    *out = find(all, kind, source);
    pthread_mutex_unlock(&all->lock);
    if (*out != NULL)
        return 0;
    if ((rc = compile(&mine, v, kind, source, err)) != 0)
        return rc;
    pthread_mutex_lock(&all->lock);
    if ((*out = find(all, kind, source)) == NULL) {
        *out = mine->grammar;
        mine->next = all->first;
        all->first = mine;
        mine = NULL;
    }
    pthread_mutex_unlock(&all->lock);
    entry_free(mine); /* somebody else was faster */
    return 0;
}

void hx_grammars_drop(hx_grammars *all, hx_grammar *g)
{
    entry *surplus, *next;

    if (g == NULL)
        return;
    pthread_mutex_lock(&all->lock);
    for (entry *x = all->first; x != NULL; x = x->next)
        x->refs -= x->grammar == g;
    surplus = take_surplus(all);
    pthread_mutex_unlock(&all->lock);
    for (; surplus != NULL; surplus = next) {
        next = surplus->next;
        entry_free(surplus);
    }
}
