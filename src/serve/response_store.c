/* response_store.c - answers of /v1/responses kept in memory, so that a client can read
 * one again, cancel it, delete it, or go on from it.
 *
 * api_responses.c writes from workers and the pump and reads from workers; all state is
 * under one lock. Holds JSON text and never looks into it. Bounded in number and bytes:
 * the least recently used go first. */
#include "serve/serve.h"

#include <pthread.h>

#define CANCEL_US 2000000 /* a cancelled answer ends within a step */

typedef struct {
    size_t at, n, id_at, id_n; /* in text */
} span;

/* Later responses hold earlier ones, whether those can still be found or not. */
typedef struct response {
    struct response *parent;
    int64_t n_ref;
    uint64_t used; /* when; larger is later */
    hx_sb text;
    span *item; /* [n_item] input, then output */
    size_t n_input, n_item;
    span id, head, tail; /* the object: head, output, tail; in text */
    hx_gen *gen;         /* while it runs */
    size_t bytes;        /* counted */
} response;

struct hx_responses {
    pthread_mutex_t lock; /* guards all */
    pthread_cond_t ended; /* a response has */
    response **list;      /* [n] that can be found */
    size_t n, cap;
    size_t bytes, max_bytes;
    size_t max;
    uint64_t clock;
};

/* ---- one response --------------------------------------------------------- */

static span add(response *r, hx_str s)
{
    const span at = { .at = r->text.n, .n = s.n };

    hx_sb_add(&r->text, s.p, s.n);
    return at;
}

static hx_str get(const response *r, span s)
{
    return (hx_str) { r->text.p + s.at, s.n };
}

static bool add_items(response *r, const hx_item *item, size_t n)
{
    span *grown = hx_realloc(r->item, (r->n_item + n + 1) * sizeof *grown);

    if (grown == NULL)
        return false;
    r->item = grown;
    for (size_t i = 0; i < n; i++) {
        const span id = add(r, item[i].id);
        span *s = &r->item[r->n_item++];

        *s = add(r, item[i].json);
        s->id_at = id.at;
        s->id_n = id.n;
    }
    return !r->text.bad;
}

static hx_str item_id(const response *r, size_t i)
{
    return (hx_str) { r->text.p + r->item[i].id_at, r->item[i].id_n };
}

/* Separated by commas from what stands in out already. */
static void copy_items(const response *r, size_t from, size_t to, hx_sb *out)
{
    for (size_t i = from; i < to; i++) {
        const hx_str json = get(r, r->item[i]);

        if (out->n > 0)
            hx_sb_char(out, ',');
        hx_sb_add(out, json.p, json.n);
    }
}

static void free_response(response *r)
{
    hx_sb_free(&r->text);
    hx_free(r->item);
    hx_free(r);
}

static void release(hx_responses *s, response *r)
{
    while (r != NULL && --r->n_ref == 0) {
        response *parent = r->parent;

        s->bytes -= r->bytes;
        free_response(r);
        r = parent;
    }
}

static void count(hx_responses *s, response *r)
{
    s->bytes -= r->bytes;
    r->bytes = sizeof *r + r->text.cap + r->n_item * sizeof *r->item;
    s->bytes += r->bytes;
}

/* ---- those that can be found ---------------------------------------------- */

static response *find(hx_responses *s, hx_str id, size_t *at)
{
    for (size_t i = 0; i < s->n; i++)
        if (hx_str_eq(id, get(s->list[i], s->list[i]->id))) {
            if (at != NULL)
                *at = i;
            s->list[i]->used = ++s->clock;
            return s->list[i];
        }
    return NULL;
}

static void forget(hx_responses *s, size_t at)
{
    response *r = s->list[at];

    s->list[at] = s->list[--s->n];
    release(s, r);
}

/* False: all that are left still run. */
static bool forget_oldest(hx_responses *s)
{
    size_t at = s->n;

    for (size_t i = 0; i < s->n; i++)
        if (s->list[i]->gen == NULL &&
            (at == s->n || s->list[i]->used < s->list[at]->used))
            at = i;
    if (at < s->n)
        forget(s, at);
    return at < s->n || s->n == 0;
}

static void trim(hx_responses *s)
{
    while ((s->n > s->max || s->bytes > s->max_bytes) && s->n > 0)
        if (!forget_oldest(s))
            return;
}

static bool list(hx_responses *s, response *r)
{
    if (s->n == s->cap) {
        const size_t cap = s->cap > 0 ? 2 * s->cap : 64;
        response **grown = hx_realloc(s->list, cap * sizeof *grown);

        if (grown == NULL)
            return false;
        s->list = grown;
        s->cap = cap;
    }
    s->list[s->n++] = r;
    return true;
}

/* ---- the store ------------------------------------------------------------- */

int hx_response_store_open(hx_responses **out, hx_err *err)
{
    hx_responses *s = hx_new(hx_responses, 1);

    *out = s;
    if (s == NULL)
        return hx_fail(err, HX_ENOMEM, "server: no memory");
    pthread_mutex_init(&s->lock, NULL);
    hx_cond_init(&s->ended);
    s->max = HX_RESPONSES_MAX;
    s->max_bytes = HX_RESPONSES_MAX_BYTES;
    return 0;
}

void hx_response_store_close(hx_responses *s)
{
    if (s == NULL)
        return;
    while (s->n > 0)
        forget(s, 0);
    hx_assert(s->bytes == 0);
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->lock);
    hx_free(s->list);
    hx_free(s);
}

static response *make(hx_str id, const hx_item *input, size_t n, hx_str body)
{
    response *r = hx_new(response, 1);

    if (r == NULL)
        return NULL;
    r->n_ref = 1;
    r->id = add(r, id);
    r->head = add(r, body);
    if (!add_items(r, input, n)) {
        free_response(r);
        return NULL;
    }
    r->n_input = n;
    return r;
}

int hx_response_store_begin(hx_responses *s, hx_str id, hx_str parent,
                            const hx_item *input, size_t n, hx_str body, hx_gen *gen)
{
    response *r = make(id, input, n, body), *up;
    int rc = 0;

    if (r == NULL)
        return HX_ENOMEM;
    r->gen = gen;
    pthread_mutex_lock(&s->lock);
    up = parent.p != NULL ? find(s, parent, NULL) : NULL;
    if (parent.p != NULL && up == NULL)
        rc = HX_EARG;
    else if (!list(s, r))
        rc = HX_ENOMEM;
    if (rc == 0) {
        r->parent = up;
        if (up != NULL)
            up->n_ref++;
        r->used = ++s->clock;
        count(s, r);
        trim(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (rc != 0)
        free_response(r);
    return rc;
}

void hx_response_store_finish(hx_responses *s, hx_str id, const hx_item *output, size_t n,
                              hx_str head, hx_str tail)
{
    response *r;
    size_t at;

    pthread_mutex_lock(&s->lock);
    if ((r = find(s, id, &at)) != NULL) {
        r->gen = NULL;
        r->head = add(r, head);
        r->tail = add(r, tail);
        if (add_items(r, output, n)) {
            count(s, r);
            trim(s);
        } else {
            forget(s, at);
        }
    }
    pthread_cond_broadcast(&s->ended);
    pthread_mutex_unlock(&s->lock);
}

int hx_response_store_cancel(hx_responses *s, hx_str id)
{
    const int64_t until = hx_now_us() + CANCEL_US;
    response *r;

    pthread_mutex_lock(&s->lock);
    r = find(s, id, NULL);
    if (r != NULL && r->gen != NULL)
        hx_gen_cancel(r->gen);
    while (r != NULL && r->gen != NULL && hx_cond_until(&s->ended, &s->lock, until))
        r = find(s, id, NULL);
    pthread_mutex_unlock(&s->lock);
    return r != NULL ? 0 : HX_EARG;
}

/* One that runs ends as if it were cancelled. */
int hx_response_store_remove(hx_responses *s, hx_str id)
{
    response *r;
    size_t at;

    pthread_mutex_lock(&s->lock);
    if ((r = find(s, id, &at)) != NULL) {
        if (r->gen != NULL)
            hx_gen_cancel(r->gen);
        forget(s, at);
    }
    pthread_mutex_unlock(&s->lock);
    return r != NULL ? 0 : HX_EARG;
}

int hx_response_store_read(hx_responses *s, hx_str id, hx_sb *out)
{
    hx_sb output = { 0 };
    const response *r;

    pthread_mutex_lock(&s->lock);
    if ((r = find(s, id, NULL)) != NULL) {
        const hx_str head = get(r, r->head), tail = get(r, r->tail);

        copy_items(r, r->n_input, r->n_item, &output);
        hx_sb_add(out, head.p, head.n);
        hx_sb_add(out, output.p, output.n);
        hx_sb_add(out, tail.p, tail.n);
        out->bad = out->bad || output.bad;
    }
    pthread_mutex_unlock(&s->lock);
    hx_sb_free(&output);
    return r != NULL ? 0 : HX_EARG;
}

/* The chain up to r, oldest first; freed with hx_free(). */
static const response **chain(const response *r, size_t *n)
{
    const response **list, *at;

    *n = 0;
    for (at = r; at != NULL; at = at->parent)
        ++*n;
    if ((list = hx_calloc(*n, sizeof *list)) == NULL)
        return NULL;
    for (size_t i = *n; i-- > 0; r = r->parent)
        list[i] = r;
    return list;
}

int hx_response_store_history(hx_responses *s, hx_str id, hx_sb *out)
{
    const response **list = NULL, *r;
    size_t n = 0;
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    if ((r = find(s, id, NULL)) == NULL)
        rc = HX_EARG;
    else if (r->gen != NULL)
        rc = HX_EBUSY;
    else if ((list = chain(r, &n)) == NULL)
        rc = HX_ENOMEM;
    for (size_t i = 0; rc == 0 && i < n; i++)
        copy_items(list[i], 0, list[i]->n_item, out);
    pthread_mutex_unlock(&s->lock);
    hx_free(list);
    return rc;
}

int hx_response_store_item(hx_responses *s, hx_str id, hx_sb *out)
{
    int rc = HX_EARG;

    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n && rc != 0; i++)
        for (size_t j = 0; j < s->list[i]->n_item && rc != 0; j++)
            if (hx_str_eq(id, item_id(s->list[i], j))) {
                copy_items(s->list[i], j, j + 1, out);
                rc = 0;
            }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* ---- pages of input -------------------------------------------------------- */

typedef struct {
    const hx_item_page *page;
    hx_sb data;
    hx_str first, last; /* ids */
    int64_t n;
    bool past, more; /* after was met; there is one too many */
} lister;

static void list_item(lister *l, const response *r, size_t i)
{
    const hx_str id = item_id(r, i);

    if (!l->past) {
        l->past = hx_str_eq(id, l->page->after);
    } else if (l->n == l->page->limit) {
        l->more = true;
    } else {
        copy_items(r, i, i + 1, &l->data);
        l->first = l->n == 0 ? id : l->first;
        l->last = id;
        l->n++;
    }
}

/* Output of earlier responses is input of this one. */
static void list_chain(lister *l, const response **list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const size_t k = l->page->newest_first ? n - 1 - i : i;
        const size_t m = k == n - 1 ? list[k]->n_input : list[k]->n_item;

        for (size_t j = 0; j < m; j++)
            list_item(l, list[k], l->page->newest_first ? m - 1 - j : j);
    }
}

static void put_id(hx_sb *out, const char *name, hx_str id)
{
    hx_sb_printf(out, ",\"%s\":", name);
    if (id.p != NULL)
        hx_json_put_str(out, id);
    else
        hx_sb_str(out, "null");
}

int hx_response_store_inputs(hx_responses *s, hx_str id, const hx_item_page *page,
                             hx_sb *out)
{
    lister l = { .page = page, .past = page->after.p == NULL };
    const response **list = NULL, *r;
    size_t n = 0;
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    if ((r = find(s, id, NULL)) == NULL)
        rc = HX_EARG;
    else if ((list = chain(r, &n)) == NULL)
        rc = HX_ENOMEM;
    if (rc == 0) {
        list_chain(&l, list, n);
        hx_sb_str(out, "{\"object\":\"list\",\"data\":[");
        hx_sb_add(out, l.data.p, l.data.n);
        hx_sb_char(out, ']');
        put_id(out, "first_id", l.first);
        put_id(out, "last_id", l.last);
        hx_sb_printf(out, ",\"has_more\":%s}", l.more ? "true" : "false");
        out->bad = out->bad || l.data.bad;
        rc = l.past ? 0 : HX_EFORMAT;
    }
    pthread_mutex_unlock(&s->lock);
    hx_sb_free(&l.data);
    hx_free(list);
    return rc;
}
