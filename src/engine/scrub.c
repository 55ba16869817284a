/* scrub.c - the scrubber: a thread that reads the weights in host memory again and again and
 * compares them with the checksums beside the model, so that a flipped bit is found while
 * serving. Started by engine.c where it is asked for; says what it finds to health.c. Never
 * writes to weights.
 *
 * Without checksums beside the model the first pass makes them, of memory as it is then, and
 * keeps them there where the folder can be written. What was converted while loading (small
 * vectors) and what lies in GPU memory is not read. */
#include <stdio.h>

#include "engine/engine.h"

#define PIECE ((size_t)1 << 20) /* 0.1 ms of a core */
/* Pause after a piece, in times that it took: a hundredth of a core beside work, a tenth
 * without (459 MB/s on a busy Zen 3, measured; 115 GB in 4 minutes). */
#define PAUSE_WORKING 99
#define PAUSE_IDLE    9
#define PAUSE_MAX_US  1000000

/* Until then, or the end of the engine. True: go on. */
static bool sleep_until(hx_engine *e, int64_t us)
{
    pthread_mutex_lock(&e->lock);
    while (!e->closing && hx_now_us() < us)
        hx_cond_until(&e->scrub.quit, &e->lock, us);
    const bool go_on = !e->closing;
    pthread_mutex_unlock(&e->lock);
    return go_on;
}

static bool pause_after(void *ud, size_t bytes)
{
    hx_engine *e = ud;
    hx_scrub *s = &e->scrub;
    const int64_t now = hx_now_us(),
                  times = atomic_load(&e->health.working) ? PAUSE_WORKING : PAUSE_IDLE;
    bool go_on;

    hx_count(HX_C_memory_verified_bytes_total, (int64_t)bytes);
    if ((s->piece += bytes) < PIECE)
        return true;
    s->piece = 0;
    go_on = sleep_until(e, now + HX_MIN((now - s->piece_us) * times, PAUSE_MAX_US));
    s->piece_us = hx_now_us();
    return go_on;
}

/* Where a tensor's bytes are that answers come of; NULL: not in host memory. all: those of
 * the file, then. */
static const void *place_of(const hx_engine *e, const hx_tensor *t, bool all)
{
    const hx_store *store = e->model->store;
    const void *moved = store != NULL ? hx_store_where(store, t->p) : NULL;

    if (moved != NULL)
        return moved;
    return all || hx_dev_is_host(e->dev) || store->n_moved == 0 ? t->p : NULL;
}

/* False: the engine ends, or a fault was found. */
static bool run_pass(hx_engine *e, bool make)
{
    const hx_weights *w = e->model->weights;
    hx_scrub *s = &e->scrub;
    hx_err err = { 0 };

    s->piece_us = hx_now_us();
    for (int64_t i = 0; i < hx_weights_count(w); i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        const void *p = place_of(e, t, make);
        hx_sum sum;

        if (p == NULL)
            continue;
        if (!hx_sums_of_slowly(p, t->bytes, PIECE, pause_after, e, &sum))
            return false;
        if (make) {
            hx_sums_put(s->sums, t, sum);
        } else if (hx_sums_check(s->sums, t, sum, &err) != 0) {
            hx_health_corrupt(e, &err);
            return false;
        }
    }
    hx_count(HX_C_memory_passes_total, 1);
    if (make && hx_sums_write(s->sums, s->dir, &err) != 0)
        hx_log(HX_LOG_WARN, "checksums of the weights are in memory only: %s", err.msg);
    return true;
}

static void *run_scrub(void *ud)
{
    hx_engine *e = ud;

    for (;;) {
        const int64_t start = hx_now_us();

        if (!run_pass(e, e->scrub.make) || !sleep_until(e, start + e->scrub.every_us))
            return NULL;
        e->scrub.make = false;
    }
}

int hx_scrub_start(hx_engine *e, const hx_options *opt, hx_err *err)
{
    hx_scrub *s = &e->scrub;
    char path[4096];
    int rc;

    if (opt->verify_ms == 0)
        return 0;
    if (e->model->weights == NULL)
        return hx_fail(err, HX_EARG, "verify memory: a synthetic model has no checksums");
    if (!hx_dev_is_host(e->dev) && e->model->store == NULL)
        return hx_fail(err, HX_EARG,
                       "verify memory: all weights are in GPU memory; there are none in "
                       "host memory");
    if ((size_t)snprintf(path, sizeof path, "%s/" HX_SUMS_FILE, opt->model_dir) >=
        sizeof path)
        return hx_fail(err, HX_EARG, "model folder: name too long");
    if ((s->dir = hx_alloc(strlen(opt->model_dir) + 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "verify memory: no memory for a name");
    memcpy(s->dir, opt->model_dir, strlen(opt->model_dir) + 1);
    s->every_us = opt->verify_ms * 1000;
    s->make = !hx_file_exists(path);
    rc = s->make ? hx_sums_empty(&s->sums, e->model->weights, err)
                 : hx_sums_read(&s->sums, s->dir, err);
    if (rc == 0 && !(s->started = pthread_create(&s->thread, NULL, run_scrub, e) == 0))
        rc = hx_fail(err, HX_EIO, "engine: the system refuses another thread");
    return rc;
}

void hx_scrub_close(hx_engine *e)
{
    hx_scrub *s = &e->scrub;

    if (s->started) {
        pthread_mutex_lock(&e->lock);
        pthread_cond_signal(&s->quit);
        pthread_mutex_unlock(&e->lock);
        pthread_join(s->thread, NULL);
    }
    pthread_cond_destroy(&s->quit);
    hx_sums_close(s->sums);
    hx_free(s->dir);
}
