/* health.c - whether answers can be had and trusted: the watchdog over the engine
 * thread's progress, the canary (a known answer), what scrub.c finds, logits that stopped to
 * change, and what is written for later: dumps of broken answers and the record of all.
 *
 * The engine thread beats, runs canaries and watches logits; the watchdog's own thread
 * only reads the beat and, when it stops, gives running requests their error. Neither ever
 * writes text of a prompt. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"

#define CANARY_IDS   8 /* of its prompt */
#define CANARY_STEPS 8
#define RETRY_US     1000000  /* a canary that found no room or was in the way */
#define RECHECK_US   10000000 /* after one that failed */
#define DUMP_MAX     100      /* files of one process */

/* ---- life --------------------------------------------------------------- */

/* Ids are as good as text: only for their owner. Nothing that failed is kept for later. */
static FILE *open_private(const char *path, int how)
{
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | how, 0600);
    FILE *f = fd >= 0 ? fdopen(fd, how == O_APPEND ? "a+" : "w+") : NULL;

    if (f != NULL)
        setvbuf(f, NULL, _IONBF, 0);
    else if (fd >= 0)
        close(fd);
    return f;
}

int hx_health_open(hx_engine *e, const hx_options *opt, hx_err *err)
{
    hx_health *h = &e->health;
    const size_t n = opt->dump_dir != NULL ? strlen(opt->dump_dir) + 1 : 0;

    h->stall_us = (opt->stall_ms != 0 ? opt->stall_ms : 10000) * 1000;
    if (!opt->no_canary)
        h->canary_us = (opt->canary_ms != 0 ? opt->canary_ms : 300000) * 1000;
    if (n > 0) {
        if (access(opt->dump_dir, W_OK | X_OK) != 0)
            return hx_fail(err, HX_EIO, "dump folder %s: %s", opt->dump_dir,
                           strerror(errno));
        if ((h->dump_dir = hx_alloc(n)) == NULL)
            return hx_fail(err, HX_ENOMEM, "engine: no memory");
        memcpy(h->dump_dir, opt->dump_dir, n);
    }
    if (opt->record != NULL && (h->record = open_private(opt->record, O_APPEND)) == NULL)
        return hx_fail(err, HX_EIO, "record %s: %s", opt->record, strerror(errno));
    return 0;
}

/* Errors for those who run; who waits may still be served, but by a lost device. Under
 * lock. */
static void lose_running(hx_engine *e, int code, const char *why)
{
    for (hx_stream *s = e->all; s != NULL; s = s->all_next) {
        if (s->ended || s->lost || (s->state == HX_SEQ_QUEUED && code != HX_ELOST))
            continue;
        s->end = (hx_event) { .kind = HX_EV_ERROR };
        hx_fail(&s->end.err, code, "engine: %s", why);
        s->lost = s->cancelled = true;
        hx_engine_wake_reader(s);
    }
}

static int64_t limit_us(const hx_health *h)
{
    return HX_MAX(h->stall_us, 2 * atomic_load(&h->worst_us));
}

/* Under lock. */
static void watch_beat(hx_engine *e)
{
    hx_health *h = &e->health;
    const int64_t still = hx_now_us() - atomic_load(&h->beat_us), limit = limit_us(h);

    if (!atomic_load(&h->working) || still <= limit) {
        if (atomic_exchange(&h->stalled, false))
            hx_log(HX_LOG_WARN, "the engine makes progress again");
        return;
    }
    if (atomic_exchange(&h->stalled, true))
        return;
    snprintf(h->stall_text, sizeof h->stall_text,
             "no progress for %.1f s although there is work", (double)still / 1e6);
    hx_count(HX_C_stalls_total, 1);
    hx_log(HX_LOG_ERROR, "engine: %s", h->stall_text);
    lose_running(e, HX_EDEVICE, h->stall_text);
}

/* Where the watchdog itself could not look, all of the process stood still (Ctrl-Z, a paused
 * machine): that is no fault of the engine, whose time begins again. */
static void *run_watchdog(void *ud)
{
    hx_engine *e = ud;
    const int64_t every_us = HX_MIN(e->health.stall_us / 5, 500000);

    pthread_mutex_lock(&e->lock);
    while (!e->closing) {
        const int64_t began = hx_now_us();

        hx_cond_until(&e->health.quit, &e->lock, began + every_us);
        if (hx_now_us() - began > 3 * every_us)
            atomic_store(&e->health.beat_us, hx_now_us());
        watch_beat(e);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

void hx_health_start(hx_engine *e)
{
    e->health.started = pthread_create(&e->health.thread, NULL, run_watchdog, e) == 0;
    if (!e->health.started)
        hx_log(HX_LOG_WARN,
               "no thread for the watchdog: a stalled engine goes unnoticed");
}

void hx_health_close(hx_engine *e)
{
    hx_health *h = &e->health;

    if (h->started) {
        pthread_mutex_lock(&e->lock);
        pthread_cond_signal(&h->quit);
        pthread_mutex_unlock(&e->lock);
        pthread_join(h->thread, NULL);
    }
    pthread_cond_destroy(&h->quit);
    pthread_mutex_destroy(&h->record_lock);
    if (h->record != NULL)
        fclose(h->record);
    hx_free(h->dump_dir);
}

/* ---- progress ----------------------------------------------------------- */

/* Long steps are expected from now on: the first ones read weights from disk, say. */
static void learn_pause(hx_health *h, int64_t us)
{
    if (us > atomic_load(&h->worst_us))
        atomic_store(&h->worst_us, us);
}

/* A pause that is too long and was not told of is one of the whole process. */
void hx_health_beat(hx_engine *e)
{
    hx_health *h = &e->health;
    const int64_t now = hx_now_us(), took = now - atomic_load(&h->beat_us);

    if (atomic_load(&h->working) && (took <= limit_us(h) || atomic_load(&h->stalled)))
        learn_pause(h, took);
    atomic_store(&h->beat_us, now);
}

void hx_health_work(hx_engine *e, bool work)
{
    atomic_store(&e->health.beat_us, hx_now_us());
    atomic_store(&e->health.working, work);
}

const char *hx_health_fault(const hx_engine *e, const char **name)
{
    const hx_health *h = &e->health;
    const struct {
        bool on;
        const char *name, *text;
    } fault[] = { { atomic_load(&h->lost), "device", h->lost_text },
                  { atomic_load(&h->stalled), "stalled", h->stall_text },
                  { atomic_load(&h->corrupt), "memory", h->corrupt_text },
                  { atomic_load(&h->broken), "canary", h->broken_text },
                  { true, NULL, NULL } };
    int i = 0;

    while (!fault[i].on)
        i++;
    if (name != NULL)
        *name = fault[i].name;
    return fault[i].text;
}

void hx_health_lost(hx_engine *e, const hx_err *err)
{
    hx_health *h = &e->health;

    pthread_mutex_lock(&e->lock);
    if (!atomic_load(&h->lost)) {
        snprintf(h->lost_text, sizeof h->lost_text, "%s", err->msg);
        hx_log(HX_LOG_ERROR, "engine: %s", h->lost_text);
        atomic_store(&h->lost, true);
        lose_running(e, HX_ELOST, h->lost_text);
    }
    pthread_mutex_unlock(&e->lock);
}

void hx_health_corrupt(hx_engine *e, const hx_err *err)
{
    hx_health *h = &e->health;

    hx_count(HX_C_memory_faults_total, 1);
    pthread_mutex_lock(&e->lock);
    snprintf(h->corrupt_text, sizeof h->corrupt_text,
             "weights in memory: %.180s; restart to load them anew", err->msg);
    lose_running(e, HX_EDEVICE, h->corrupt_text);
    atomic_store(&h->corrupt, true);
    pthread_mutex_unlock(&e->lock);
    hx_log(HX_LOG_ERROR, "%s", h->corrupt_text);
}

/* ---- the canary --------------------------------------------------------- */

/* Takes row 0 of g's logits: its bits into the sum, the most likely id. */
static int take_row(hx_engine *e, const hx_graph *g, uint64_t *sum, int32_t *best,
                    hx_err *err)
{
    const size_t n = (size_t)e->info.n_vocab;
    const float *logit = e->score_logit;
    const int rc =
        hx_dev_get(e->dev, e->score_logit, hx_graph_logits(g), n * sizeof *logit, err);
    uint32_t bits;

    if (rc != 0)
        return rc;
    *best = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(logit[i]))
            return hx_fail(err, HX_EDEVICE,
                           "canary: the known prompt gives a logit that is no number");
        memcpy(&bits, &logit[i], sizeof bits);
        *sum = (*sum ^ bits) * 0x9e3779b97f4a7c15ULL;
        *sum ^= *sum >> 29;
        if (i < (size_t)e->info.n_token && logit[i] > logit[*best])
            *best = (int32_t)i;
    }
    return 0;
}

static int run_rows(hx_engine *e, hx_graph *g, hx_phase phase, int32_t slot,
                    const int32_t *id, int32_t n, hx_err *err)
{
    hx_slot *q = &e->cache->slot[slot];
    const hx_span span = {
        .slot = slot, .row0 = 0, .n_row = n, .pos0 = (int32_t)q->n_pos, .commit = q->pend
    };
    const hx_batch batch = { .phase = phase,
                             .id = id,
                             .rows = { .span = &span, .n_span = 1, .n_row = n } };
    const int64_t start = hx_now_us();
    int rc;

    if ((rc = hx_cache_grow(e->cache, slot, q->n_pos + n, err)) != 0)
        return rc;
    if (phase == HX_PHASE_DECODE)
        rc = hx_sched_decode(e, &batch, err);
    else if ((rc = hx_graph_begin(g, &batch, err)) == 0 &&
             (rc = hx_graph_layers(g, 0, e->model->desc.n_layer, err)) == 0)
        rc = hx_graph_out(g, n - 1, 1, err);
    if (rc != 0)
        return rc;
    q->n_pos += n;
    q->pend = phase == HX_PHASE_DECODE ? 1 : 0;
    learn_pause(&e->health, hx_now_us() - start);
    hx_health_beat(e);
    return 0;
}

/* Greedy tokens after a fixed prompt: the sum of all their logits. give_way: HX_EBUSY when
 * a request comes. */
static int known_answer(hx_engine *e, int32_t slot, bool give_way, uint64_t *sum,
                        hx_err *err)
{
    int32_t id[CANARY_IDS], next;
    int rc;

    for (int32_t i = 0; i < CANARY_IDS; i++)
        id[i] = (int32_t)((11 + (int64_t)i * 7919) % e->info.n_token);
    *sum = 1;
    if ((rc = run_rows(e, e->prefill, HX_PHASE_PREFILL, slot, id, CANARY_IDS, err)) !=
            0 ||
        (rc = take_row(e, e->prefill, sum, &next, err)) != 0)
        return rc;
    for (int k = 1; k < CANARY_STEPS; k++) {
        if (give_way && atomic_load(&e->nudge))
            return HX_EBUSY;
        if ((rc = run_rows(e, e->decode, HX_PHASE_DECODE, slot, &next, 1, err)) != 0 ||
            (rc = take_row(e, e->decode, sum, &next, err)) != 0)
            return rc;
    }
    return 0;
}

static void judge(hx_engine *e, int rc, uint64_t sum, const hx_err *err)
{
    hx_health *h = &e->health;
    const char *why =
        rc != 0 ? err->msg
        : h->sum != 0 && sum != h->sum
            ? "canary: a known prompt no longer gives the logits that it gave"
            : NULL;

    hx_count(HX_C_canaries_total, 1);
    if (rc == HX_ELOST)
        hx_health_lost(e, err);
    if (why != NULL) {
        hx_count(HX_C_canaries_failed_total, 1);
        hx_log(HX_LOG_ERROR, "%s", why);
        pthread_mutex_lock(&e->lock);
        snprintf(h->broken_text, sizeof h->broken_text, "%s", why);
        lose_running(e, HX_EDEVICE, h->broken_text);
        atomic_store(&h->broken, true);
        pthread_mutex_unlock(&e->lock);
        return;
    }
    if (h->sum == 0)
        h->sum = sum;
    if (atomic_exchange(&h->broken, false))
        hx_log(HX_LOG_WARN, "canary: the known prompt gives its logits again");
}

void hx_health_canary(hx_engine *e, bool idle)
{
    hx_health *h = &e->health;
    const int64_t now = hx_now_us();
    /* Who was never idle for so long is checked between two steps, whoever waits. */
    const bool late = now >= h->overdue_us,
               due = h->suspect || (now >= h->next_us && (idle || late));
    hx_err err = { 0 };
    uint64_t sum;
    int32_t slot;
    int rc;

    if (h->canary_us != 0 && due)
        hx_sched_land(e);
    if (h->canary_us == 0 || !due || e->chunk != NULL ||
        e->pages_reserved + 1 > e->cache->n_page ||
        (slot = hx_cache_take(e->cache)) < 0) {
        if (due && h->next_us <= now)
            h->next_us = now + RETRY_US;
        return;
    }
    rc = known_answer(e, slot, h->known && !h->suspect && !late, &sum, &err);
    hx_cache_drop(e->cache, slot);
    if (rc != HX_EBUSY) {
        judge(e, rc, sum, &err);
        h->overdue_us = now + 2 * h->canary_us;
    }
    if (!h->known) {
        pthread_mutex_lock(&e->lock);
        h->known = true;
        pthread_cond_broadcast(&h->quit);
        pthread_mutex_unlock(&e->lock);
    }
    h->suspect = false;
    h->next_us = hx_now_us() + (rc == HX_EBUSY            ? RETRY_US
                                : atomic_load(&h->broken) ? RECHECK_US
                                                          : h->canary_us);
}

int hx_health_wait_known(hx_engine *e, hx_err *err)
{
    hx_health *h = &e->health;
    int rc = 0;

    if (h->canary_us == 0)
        return 0;
    pthread_mutex_lock(&e->lock);
    while (!h->known)
        pthread_cond_wait(&h->quit, &e->lock);
    if (atomic_load(&h->broken))
        rc = hx_fail(
            err, HX_EDEVICE,
            "%.180s; the model or the device is broken (--no-canary opens it anyway)",
            h->broken_text);
    pthread_mutex_unlock(&e->lock);
    return rc;
}

int64_t hx_health_due_us(const hx_engine *e)
{
    return e->health.canary_us == 0 ? -1 : HX_MAX(e->health.next_us - hx_now_us(), 1000);
}

/* ---- logits that do not change ------------------------------------------ */

int hx_health_watch(hx_stream *s, const float *print, hx_err *err)
{
    const size_t n = HX_PRINT_FLOATS * sizeof *print;
    hx_watch *w = &s->watch;
    bool same = false;

    for (int32_t i = 0; i < HX_MIN(w->n, HX_PRINT_CYCLE); i++)
        same |= memcmp(w->print[i], print, n) == 0;
    memcpy(w->print[w->n++ % HX_PRINT_CYCLE], print, n);
    w->n_same = same ? w->n_same + 1 : 0;
    if (w->n_same < HX_PRINT_SAME)
        return 0;
    return hx_fail(err, HX_EDEVICE,
                   "answer: the logits have not changed for %d tokens; the answer is "
                   "broken and ends here",
                   w->n_same);
}

/* ---- dumps and the record ----------------------------------------------- */

static void put_ids(hx_sb *b, const char *name, const int32_t *id, int64_t n)
{
    hx_sb_printf(b, ",\"%s\":[", name);
    for (int64_t i = 0; i < n; i++)
        hx_sb_printf(b, i > 0 ? ",%d" : "%d", id[i]);
    hx_sb_char(b, ']');
}

static uint64_t sum_of(const int32_t *id, int64_t n)
{
    uint64_t h = 0xcbf29ce484222325ULL;

    for (int64_t i = 0; i < n; i++)
        h = (h ^ (uint32_t)id[i]) * 0x100000001b3ULL;
    return h;
}

static void put_settings(hx_sb *b, const hx_request *r, int64_t max_new)
{
    hx_sb_printf(b,
                 ",\"max_new\":%lld,\"min_new\":%lld,\"temperature\":%.9g,\"top_p\":%.9g,"
                 "\"min_p\":%.9g,\"top_k\":%d,\"repeat_penalty\":%.9g,"
                 "\"presence_penalty\":%.9g,\"frequency_penalty\":%.9g,\"seed\":\"%llu\","
                 "\"ignore_eos\":%s",
                 (long long)max_new, (long long)r->min_new, (double)r->temperature,
                 (double)r->top_p, (double)r->min_p, r->top_k, (double)r->repeat_penalty,
                 (double)r->presence_penalty, (double)r->frequency_penalty,
                 (unsigned long long)r->seed, r->ignore_eos ? "true" : "false");
    put_ids(b, "stop_ids", r->stop_ids, r->n_stop_ids);
    hx_sb_str(b, ",\"stop\":[");
    for (int32_t i = 0; i < r->n_stop; i++) {
        hx_sb_str(b, i > 0 ? "," : "");
        hx_json_put_str(b, r->stop[i]);
    }
    hx_sb_str(b, "],\"bias\":[");
    for (int32_t i = 0; i < r->n_bias; i++)
        hx_sb_printf(b, "%s[%d,%.9g]", i > 0 ? "," : "", r->bias[i].token,
                     (double)r->bias[i].bias);
    hx_sb_printf(b,
                 "],\"grammar_kind\":%d,\"grammar_after\":%d,\"grammar_at\":%d,"
                 "\"grammar_lazy\":%s,\"grammar_again\":%s,\"think_end\":%d,"
                 "\"think_max\":%lld",
                 (int)r->grammar_kind, r->grammar_after, r->grammar_at,
                 r->grammar_lazy ? "true" : "false", r->grammar_again ? "true" : "false",
                 r->think_end, (long long)r->think_max);
    put_ids(b, "forced", r->forced, r->n_forced);
    if (r->grammar.n > 0) {
        hx_sb_str(b, ",\"grammar\":");
        hx_json_put_str(b, r->grammar);
    }
}

/* One line: all that is needed to run the request again, and what came of it. */
static void put_record(hx_sb *b, const hx_stream *s, const char *finish, const char *why)
{
    const int32_t *answer = s->token + s->n_prompt;
    const int64_t n = s->generated - (s->end.stop == HX_STOP_EOS);

    hx_sb_printf(b, "{\"version\":\"%s\",\"time\":%lld,\"model\":", HX_VERSION,
                 (long long)time(NULL));
    hx_json_put_str(b, hx_str_c(s->engine->name));
    hx_sb_str(b, ",\"device\":");
    hx_json_put_str(b, hx_str_c(s->engine->info.device));
    put_settings(b, &s->req, s->max_new);
    hx_sb_printf(b,
                 ",\"thinking_ended\":%s,\"forced_later\":%s,\"finish\":\"%s\","
                 "\"sum\":\"%016llx\"",
                 atomic_load(&s->end_thinking) ? "true" : "false",
                 s->n_force > 0 ? "true" : "false", finish,
                 (unsigned long long)sum_of(answer, n));
    if (why != NULL) {
        hx_sb_str(b, ",\"error\":");
        hx_json_put_str(b, hx_str_c(why));
    }
    put_ids(b, "prompt", s->token, s->n_prompt);
    put_ids(b, "answer", answer, n);
    hx_sb_str(b, "}\n");
}

static void dump(hx_stream *s, const char *why)
{
    hx_health *h = &s->engine->health;
    hx_sb b = { 0 };
    char path[4096];
    FILE *f;
    bool ok;

    if (h->dump_dir == NULL || h->n_dump >= DUMP_MAX)
        return;
    snprintf(path, sizeof path, "%s/hoist-%d-%d.json", h->dump_dir, (int)getpid(),
             h->n_dump++);
    put_record(&b, s, "broken", why);
    f = b.bad ? NULL : open_private(path, O_TRUNC);
    ok = f != NULL && fwrite(b.p, 1, b.n, f) == b.n;
    if (ok)
        hx_log(HX_LOG_WARN, "ids and settings of the broken answer are in %s", path);
    else
        hx_log(HX_LOG_WARN, "%s: cannot be written: %s", path, strerror(errno));
    if (f != NULL)
        fclose(f);
    hx_sb_free(&b);
}

void hx_health_suspect(hx_stream *s, const hx_err *err)
{
    hx_count(HX_C_degenerate_total, 1);
    hx_log(HX_LOG_WARN, "request %llu: %s", (unsigned long long)s->order, err->msg);
    dump(s, err->msg);
    s->engine->health.suspect = true;
}

/* Does the file end within a line, because a disk was full or a server was killed? */
static bool is_torn(int fd)
{
    const off_t end = lseek(fd, 0, SEEK_END);
    char last;

    return end > 0 && pread(fd, &last, 1, end - 1) == 1 && last != '\n';
}

void hx_health_record(const hx_stream *s)
{
    static const char *const finish[] = { "none", "eos", "text", "length", "cancel" };
    hx_health *h = &s->engine->health;
    hx_sb b = { 0 };
    bool ok;

    if (h->record == NULL || !s->ended || s->score != NULL)
        return;
    put_record(&b, s, s->end.kind == HX_EV_ERROR ? "error" : finish[s->end.stop],
               s->end.kind == HX_EV_ERROR ? s->end.err.msg : NULL);
    pthread_mutex_lock(&h->record_lock);
    ok = !b.bad && (!is_torn(fileno(h->record)) || fputc('\n', h->record) == '\n') &&
         fwrite(b.p, 1, b.n, h->record) == b.n;
    if (!ok && h->n_unrecorded++ == 0)
        hx_log(HX_LOG_WARN, "record: %s; what is answered now is not in it",
               strerror(b.bad ? ENOMEM : errno));
    if (ok && h->n_unrecorded > 0) {
        hx_log(HX_LOG_WARN, "record: written again, %lld answers are missing",
               (long long)h->n_unrecorded);
        h->n_unrecorded = 0;
    }
    pthread_mutex_unlock(&h->record_lock);
    hx_sb_free(&b);
}
