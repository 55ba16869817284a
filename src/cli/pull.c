/* pull.c - `hoist pull`: a model of a Hugging Face hub into a folder. Reads the list of files
 * with sizes and hashes at one commit, checks the room on disk, fetches parts on several
 * connections, goes on where an earlier run stopped, and checks every hash before a file gets
 * its name. Called by main.c and, for `serve --pull`, by run.c.
 *
 * A model folder never holds a file of that name that is not whole and right. Faults of the
 * network are tried again, with pauses that grow and with the server's own Retry-After; after
 * MAX_FAULTS in a row without a byte of progress they are an error. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "cli/pull.h"

#define N_CONNECTION 8
#define MAX_FAULTS   8
#define MAX_FILES    100000
#define MAX_PAGES    1000        /* of its list of files */
#define GLOB_BYTES   2048        /* of --files */
#define LIST_BYTES   (64u << 20) /* of one answer of the hub */
#define RESUME_BYTES 65536      /* a connection that brought so much is resumed at once */
#define NOTE_BYTES   (1u << 20) /* how often progress goes to disk */
#define SPARE_BYTES  (64u << 20) /* left free on the disk */
#define LOCK_NAME    ".hoist-pull.lock"
#define SHOW_US      100000 /* between two words of progress */

typedef struct {
    const hx_pull *p;
    char repo[256], rev[256], commit[64], endpoint[512];
    pull_net *net;
    pull_file *file;
    int64_t n_file, cap_file;
    uint64_t total;
    int lock_fd;

    pthread_mutex_t lock; /* file, have, n_finished, err, n_worker */
    pthread_cond_t wake;
    uint64_t have;
    int64_t n_finished;
    int n_worker;
    hx_err err; /* the first; all stop */
    _Atomic bool stop;
} puller;

/* ---- waiting --------------------------------------------------------------- */

static bool stopped(puller *q)
{
    if (q->p->stop != NULL && atomic_load(q->p->stop))
        atomic_store(&q->stop, true);
    return atomic_load(&q->stop);
}

static void pause_ms(puller *q, int64_t ms)
{
    for (; ms > 0 && !stopped(q); ms -= 50)
        nanosleep(&(struct timespec) { .tv_nsec = 50 * 1000000 }, NULL);
}

/* What is to be done about a request that failed: wait and try again (0), or an error. faults
 * counts those in a row without progress. */
static int after_fault(puller *q, const char *what, const pull_request *r, int *faults,
                       hx_err *err)
{
    int64_t wait_ms = 500LL << HX_MIN(*faults, 7);
    const char *why = r->why[0] != '\0'      ? r->why
                      : r->status / 100 == 2 ? "it ended too early"
                                             : "refused";

    if (stopped(q))
        return hx_fail(err, HX_ECANCEL, "pull: stopped; what has come is kept");
    if (r->status == 401 || r->status == 403 || r->status == 404)
        return hx_fail(
            err, HX_EIO, "%s: the hub answers %ld: %s", what, r->status,
            r->status == 404
                ? "no such model, revision or file (or it is private: set HF_TOKEN)"
                : "no access; set HF_TOKEN to a token that may read it, and accept "
                  "the model's terms on its page");
    ++*faults;
    if (r->status == 416 && *faults >= 3)
        return hx_fail(err, HX_EIO,
                       "%s: the server has fewer bytes than its list says (answer 416)",
                       what);
    if (*faults >= MAX_FAULTS)
        return hx_fail(
            err, HX_EIO,
            "%s: %d tries without progress, the last: %s (answer %ld); what has "
            "come is kept, run pull again",
            what, *faults, why, r->status);
    if (r->retry_after > 0)
        wait_ms = HX_MIN(r->retry_after, 600) * 1000;
    hx_log(r->retry_after > 5 || *faults > 2 ? HX_LOG_WARN : HX_LOG_INFO,
           "%s: %s (answer %ld); again in %.1f s", what, why, r->status,
           (double)wait_ms / 1e3);
    pause_ms(q, wait_ms);
    return 0;
}

/* ---- the list --------------------------------------------------------------- */

/* s as part of a URL's path. */
static void put_escaped(hx_sb *b, const char *s, bool keep_slash)
{
    for (; *s != '\0'; s++) {
        const unsigned char c = (unsigned char)*s;

        if ((c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') ||
            strchr("-._~", c) != NULL || (c == '/' && keep_slash))
            hx_sb_char(b, (char)c);
        else
            hx_sb_printf(b, "%%%02X", c);
    }
}

static bool to_text(void *ud, const void *p, size_t n)
{
    hx_sb_add(ud, p, n);
    return !((hx_sb *)ud)->bad;
}

/* GETs a JSON document. next gets the address of the following page or "". */
static int get_json(puller *q, void *connection, const char *url, hx_json **out,
                    char next[1024], hx_err *err)
{
    hx_sb text = { .max = LIST_BYTES };
    pull_request r = {
        .url = url, .from = -1, .sink = to_text, .ud = &text, .stop = &q->stop
    };
    int faults = 0, rc = 0;

    *out = NULL;
    while (rc == 0 && *out == NULL) {
        hx_err bad = { 0 };

        text.n = 0;
        if (pull_net_get(q->net, connection, &r) && !text.bad) {
            if (hx_json_parse(out, (hx_str) { text.p, text.n }, 0, &bad) != 0)
                rc = hx_fail(
                    err, HX_EIO,
                    "%s: the hub's answer is no JSON; does a proxy or a login page "
                    "stand between?",
                    q->repo);
            break;
        }
        if (text.bad)
            rc = hx_fail(err, HX_ENOMEM, "%s: a list of over %u MB", q->repo,
                         LIST_BYTES >> 20);
        else
            rc = after_fault(q, q->repo, &r, &faults, err);
    }
    memcpy(next, r.next, sizeof r.next);
    hx_sb_free(&text);
    return rc;
}

/* A name that stays below the folder. */
static bool safe_name(hx_str s)
{
    if (s.n == 0 || s.n > 1024 || s.p[0] == '/' || s.p[s.n - 1] == '/')
        return false;
    for (size_t i = 0; i < s.n; i++) {
        if ((unsigned char)s.p[i] < 0x20 || s.p[i] == 0x7f || s.p[i] == '\\')
            return false;
        /* no empty part, and none that begins with a dot: "..", and files of git */
        if ((i == 0 || s.p[i - 1] == '/') && (s.p[i] == '.' || s.p[i] == '/'))
            return false;
    }
    return hx_utf8_ok(s.p, s.n);
}

static bool is_hex(hx_str s)
{
    for (size_t i = 0; i < s.n; i++)
        if (!((s.p[i] >= '0' && s.p[i] <= '9') || (s.p[i] >= 'a' && s.p[i] <= 'f')))
            return false;
    return true;
}

static bool wanted(const char *patterns, const char *name)
{
    char list[GLOB_BYTES], *save = NULL;

    if (patterns == NULL)
        return true;
    snprintf(list, sizeof list, "%s", patterns);
    for (char *w = strtok_r(list, ",", &save); w != NULL; w = strtok_r(NULL, ",", &save))
        if (fnmatch(w, name, 0) == 0)
            return true;
    return false;
}

static int add_file(puller *q, const hx_json *entry, hx_err *err)
{
    const hx_json *lfs = hx_json_get(entry, "lfs");
    const hx_str name = hx_json_str(hx_json_get(entry, "path")),
                 oid = hx_json_str(hx_json_get(lfs != NULL ? lfs : entry, "oid"));
    const int64_t size = hx_json_int(hx_json_get(lfs != NULL ? lfs : entry, "size"), -1);
    pull_file *f;

    if (!hx_str_is(hx_json_str(hx_json_get(entry, "type")), "file") ||
        (name.n > 0 && name.p[0] == '.'))
        return 0;
    if (!safe_name(name))
        return hx_fail(err, HX_EFORMAT,
                       "%s: a file named \"%.*s\", which is not safe to write", q->repo,
                       (int)HX_MIN(name.n, 80), name.p != NULL ? name.p : "");
    if (size < 0 || oid.n != (lfs != NULL ? 64u : 40u) || !is_hex(oid))
        return hx_fail(err, HX_EFORMAT, "%s: %.*s: the list gives no size and hash",
                       q->repo, (int)name.n, name.p);
    if (q->n_file == q->cap_file) {
        const int64_t cap = HX_MAX(64, 2 * q->cap_file);

        if (cap > MAX_FILES || (f = hx_realloc(q->file, (size_t)cap * sizeof *f)) == NULL)
            return hx_fail(err, HX_ELIMIT, "%s: over %lld files", q->repo,
                           (long long)q->n_file);
        q->file = f;
        q->cap_file = cap;
    }
    f = &q->file[q->n_file];
    *f = (pull_file) { .size = (uint64_t)size, .fd = -1, .map_fd = -1 };
    if ((f->name = hx_alloc(name.n + 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "%s: no memory for its list", q->repo);
    memcpy(f->name, name.p, name.n);
    memcpy(f->hash, oid.p, oid.n);
    if (!wanted(q->p->files, f->name)) {
        hx_free(f->name);
        return 0;
    }
    q->total += f->size;
    q->n_file++;
    return 0;
}

/* One commit for everything, so that a branch that moves meanwhile mixes nothing. */
static int find_commit(puller *q, void *connection, hx_err *err)
{
    hx_sb url = { 0 };
    hx_json *j = NULL;
    hx_str sha;
    char next[1024];
    int rc;

    hx_sb_printf(&url, "%s/api/models/%s/revision/", q->endpoint, q->repo);
    put_escaped(&url, q->rev, false);
    rc = url.bad ? hx_fail(err, HX_ENOMEM, "pull: no memory")
                 : get_json(q, connection, url.p, &j, next, err);
    sha = hx_json_str(hx_json_get(j, "sha"));
    if (rc == 0 && (sha.n < 7 || sha.n >= sizeof q->commit || !is_hex(sha)))
        rc = hx_fail(err, HX_EFORMAT, "%s: the hub names no commit for revision %.80s",
                     q->repo, q->rev);
    if (rc == 0)
        memcpy(q->commit, sha.p, sha.n);
    hx_json_free(j);
    hx_sb_free(&url);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const pull_file *)a)->name, ((const pull_file *)b)->name);
}

/* A file that two fetchings write at once would be neither's. */
static int check_names(puller *q, hx_err *err)
{
    if (q->n_file > 1)
        qsort(q->file, (size_t)q->n_file, sizeof *q->file, by_name);
    for (int64_t i = 1; i < q->n_file; i++)
        if (strcmp(q->file[i - 1].name, q->file[i].name) == 0)
            return hx_fail(err, HX_EFORMAT, "%s: the hub lists %.80s twice", q->repo,
                           q->file[i].name);
    return 0;
}

static int read_list(puller *q, hx_err *err)
{
    void *connection = pull_net_connection(q->net);
    char url[2048], next[1024];
    int rc = connection == NULL ? hx_fail(err, HX_ENOMEM, "pull: no memory")
                                : find_commit(q, connection, err);

    snprintf(url, sizeof url, "%s/api/models/%s/tree/%s?recursive=true", q->endpoint,
             q->repo, q->commit);
    for (int n = 0; rc == 0 && url[0] != '\0'; n++) {
        hx_json *page;

        if (n == MAX_PAGES)
            rc = hx_fail(err, HX_ELIMIT, "%s: the hub's list of files is over %d pages",
                         q->repo, MAX_PAGES);
        else
            rc = get_json(q, connection, url, &page, next, err);
        if (rc != 0)
            break;
        if (hx_json_kind(page) != HX_JSON_ARRAY)
            rc = hx_fail(err, HX_EFORMAT, "%s: the hub's list of files is no list",
                         q->repo);
        for (size_t i = 0; rc == 0 && i < hx_json_len(page); i++)
            rc = add_file(q, hx_json_at(page, i), err);
        hx_json_free(page);
        snprintf(url, sizeof url, "%s", next);
    }
    pull_net_disconnect(q->net, connection);
    if (rc == 0)
        rc = check_names(q, err);
    if (rc == 0 && q->n_file == 0)
        rc = hx_fail(err, HX_EARG, "%s@%s: no files%s", q->repo, q->rev,
                     q->p->files != NULL ? " that --files names" : "");
    return rc;
}

/* ---- the disk ----------------------------------------------------------------- */

static int look_at_disk(puller *q, hx_err *err)
{
    struct statvfs fs;
    char need_text[32], free_text[32];
    uint64_t need = 0, room;
    int rc = 0;

    for (int64_t i = 0; rc == 0 && i < q->n_file; i++) {
        rc = pull_file_look(&q->file[i], q->p->dir, err);
        need += q->file[i].size - pull_file_have(&q->file[i]);
    }
    if (rc != 0)
        return rc;
    q->have = q->total - need;
    if (statvfs(q->p->dir, &fs) != 0)
        return hx_fail(err, HX_EIO, "%s: %s", q->p->dir, strerror(errno));
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    cli_bytes(need_text, need + SPARE_BYTES);
    cli_bytes(free_text, room);
    if (need > 0 && room < need + SPARE_BYTES)
        return hx_fail(
            err, HX_ELIMIT,
            "%s: %s needs %s more (with 64 MiB to spare), the disk has %s free; "
            "make room or choose fewer files with --files",
            q->p->dir, q->repo, need_text, free_text);
    return 0;
}

static int lock_folder(puller *q, hx_err *err)
{
    char path[4096];

    if (mkdir(q->p->dir, 0777) != 0 && errno != EEXIST)
        return hx_fail(err, HX_EIO, "%s: %s", q->p->dir, strerror(errno));
    snprintf(path, sizeof path, "%s/" LOCK_NAME, q->p->dir);
    if ((q->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666)) < 0)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    if (flock(q->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return hx_fail(err, HX_EBUSY, "%s: another pull is at work there", q->p->dir);
    return 0;
}

/* ---- parts --------------------------------------------------------------------- */

/* A part on its way. */
typedef struct {
    puller *q;
    pull_file *f;
    int64_t part;
    int32_t era;
    bool whole;              /* of f, in this era */
    uint64_t at, len, noted; /* of the part: bytes there, all, when last noted on disk */
    hx_err err;
} fetching;

static bool to_disk(void *ud, const void *p, size_t n)
{
    fetching *t = ud;
    const uint64_t start = t->whole ? 0 : (uint64_t)t->part * PULL_PART_BYTES;
    bool current;

    n = (size_t)HX_MIN((uint64_t)n, t->len - t->at); /* a server may send too much */
    if (pull_file_put(t->f, start + t->at, p, n, &t->err) != 0)
        return false;
    pthread_mutex_lock(&t->q->lock);
    current = t->f->era == t->era;
    if (current) {
        t->at += n;
        t->f->done[t->part] = t->at;
        t->q->have += n;
        if (t->at - t->noted >= NOTE_BYTES || t->at == t->len) {
            pull_file_note(t->f, t->part);
            t->noted = t->at;
        }
    }
    pthread_mutex_unlock(&t->q->lock);
    return current && t->at < t->len;
}

/* The server has no ranges: everything of this file from its start, by one. */
static int no_ranges(fetching *t, hx_err *err)
{
    puller *q = t->q;
    int rc = 0;

    pthread_mutex_lock(&q->lock);
    if (t->f->era == t->era) {
        q->have -= pull_file_have(t->f);
        rc = pull_file_restart(t->f, true, err);
        t->f->busy[0] = true;
        t->era = t->f->era;
        t->whole = true;
        t->part = 0;
        t->at = t->noted = 0;
        t->len = t->f->size;
    }
    pthread_mutex_unlock(&q->lock);
    return rc;
}

/* Are the file's parts still those that t was given? */
static bool is_current(const fetching *t)
{
    bool same;

    pthread_mutex_lock(&t->q->lock);
    same = t->f->era == t->era;
    pthread_mutex_unlock(&t->q->lock);
    return same;
}

static int fetch_part(fetching *t, void *connection, const char *url, hx_err *err)
{
    puller *q = t->q;
    int faults = 0, rc = 0;

    while (rc == 0 && t->at < t->len && is_current(t)) {
        const int64_t start = t->whole ? 0 : t->part * (int64_t)PULL_PART_BYTES;
        const uint64_t before = t->at;
        pull_request r = { .url = url,
                           .from = start + (int64_t)t->at,
                           .to = start + (int64_t)t->len - 1,
                           .sink = to_disk,
                           .ud = t,
                           .stop = &q->stop };

        if (t->whole) { /* can only begin again */
            r.from = -1;
            pthread_mutex_lock(&q->lock);
            q->have -= t->at;
            t->at = t->f->done[0] = 0;
            pthread_mutex_unlock(&q->lock);
        }
        pull_net_get(q->net, connection, &r);
        if (t->err.code != 0) {
            *err = t->err;
            return t->err.code;
        }
        if (t->at == t->len || !is_current(t))
            break;
        if (r.ignored_range) {
            rc = no_ranges(t, err);
            continue;
        }
        if (!t->whole && t->at > before)
            faults = 0;
        if (!t->whole && t->at - before >= RESUME_BYTES && r.status == 206 && !stopped(q))
            continue;
        rc = after_fault(q, t->f->name, &r, &faults, err);
    }
    return rc;
}

/* ---- workers --------------------------------------------------------------------- */

typedef enum { NOTHING, WAIT, FETCH, CHECK } job_kind;

/* The next thing to do, in the order of the list. Under lock. */
static job_kind next_job(puller *q, fetching *t)
{
    job_kind kind = NOTHING;

    for (int64_t i = 0; i < q->n_file; i++) {
        pull_file *f = &q->file[i];
        bool complete = true;

        if (f->finished)
            continue;
        kind = WAIT;
        if (f->checking)
            continue;
        *t = (fetching) { .q = q, .f = f, .era = f->era, .whole = f->whole };
        for (int64_t k = 0; !f->there && k < f->n_part; k++) {
            t->len = pull_file_part_len(f, k);
            t->at = t->noted = f->done[k];
            t->part = k;
            complete = complete && t->at == t->len;
            if (t->at < t->len && !f->busy[k])
                return FETCH;
        }
        if (complete)
            return CHECK;
    }
    return kind;
}

static int do_fetch(puller *q, fetching *t, void *connection, hx_err *err)
{
    hx_sb url = { 0 };
    int rc;

    hx_sb_printf(&url, "%s/%s/resolve/%s/", q->endpoint, q->repo, q->commit);
    put_escaped(&url, t->f->name, true);
    rc = url.bad ? hx_fail(err, HX_ENOMEM, "pull: no memory")
                 : fetch_part(t, connection, url.p, err);
    hx_sb_free(&url);
    pthread_mutex_lock(&q->lock);
    if (t->f->era == t->era)
        t->f->busy[t->part] = false;
    pthread_mutex_unlock(&q->lock);
    return rc;
}

/* All bytes are there: right ones become the file, others are fetched again, once. */
static int do_check(puller *q, pull_file *f, hx_err *err)
{
    char got[65];
    const bool was_there = f->there;
    int rc = pull_file_check(f, q->p->dir, &q->stop, got, err);
    const bool right = rc == 1;

    if (right)
        rc = pull_file_finish(f, q->p->dir, err);
    pthread_mutex_lock(&q->lock);
    if (right) {
        f->finished = rc == 0;
        q->n_finished += rc == 0;
    } else if (rc == 0 && !was_there && ++f->damaged >= 2) {
        rc = hx_fail(err, HX_EFORMAT,
                     "%s: hash %s, expected %s, twice; the server or the disk damages it",
                     f->name, got, f->hash);
    } else if (rc == 0) {
        hx_log(HX_LOG_WARN, "%s: %s; fetching it again", f->name,
               was_there ? "another version is there" : "damaged on its way");
        q->have -= f->size;
        if ((rc = pull_file_begin(f, q->p->dir, err)) == 0)
            rc = pull_file_restart(f, f->whole, err);
    }
    f->checking = false;
    pthread_mutex_unlock(&q->lock);
    return rc;
}

static int do_job(puller *q, job_kind kind, fetching *t, void *connection, hx_err *err)
{
    int rc = 0;

    if (!t->f->there) {
        pthread_mutex_lock(&q->lock);
        rc = pull_file_begin(t->f, q->p->dir, err);
        pthread_mutex_unlock(&q->lock);
    }
    if (rc != 0)
        return rc;
    return kind == FETCH ? do_fetch(q, t, connection, err) : do_check(q, t->f, err);
}

static void *work(void *ud)
{
    puller *q = ud;
    void *connection = pull_net_connection(q->net);
    hx_err err = { 0 };
    fetching t;

    pthread_mutex_lock(&q->lock);
    if (connection == NULL)
        hx_fail(&err, HX_ENOMEM, "pull: no memory for a connection");
    while (err.code == 0 && !atomic_load(&q->stop)) {
        const job_kind kind = next_job(q, &t);

        if (kind == NOTHING)
            break;
        if (kind == WAIT) {
            pthread_cond_wait(&q->wake, &q->lock);
            continue;
        }
        if (kind == FETCH)
            t.f->busy[t.part] = true;
        else
            t.f->checking = true;
        pthread_mutex_unlock(&q->lock);
        do_job(q, kind, &t, connection, &err);
        pthread_mutex_lock(&q->lock);
        pthread_cond_broadcast(&q->wake);
    }
    if (err.code != 0 && q->err.code == 0)
        q->err = err;
    if (err.code != 0)
        atomic_store(&q->stop, true);
    q->n_worker--;
    pthread_cond_broadcast(&q->wake);
    pthread_mutex_unlock(&q->lock);
    pull_net_disconnect(q->net, connection);
    return NULL;
}

/* Starts the workers and shows progress until the last is done. */
static int fetch_all(puller *q, hx_err *err)
{
    pthread_t thread[N_CONNECTION];
    int n = 0;

    pthread_mutex_lock(&q->lock);
    while (n < N_CONNECTION && pthread_create(&thread[n], NULL, work, q) == 0)
        n++;
    q->n_worker = n;
    while (q->n_worker > 0) {
        const uint64_t have = q->have;

        pthread_mutex_unlock(&q->lock);
        stopped(q);
        if (q->p->fn != NULL)
            q->p->fn(q->p->ud, have, q->total);
        pthread_mutex_lock(&q->lock);
        if (stopped(q)) /* who waits for a part must see it */
            pthread_cond_broadcast(&q->wake);
        hx_cond_until(&q->wake, &q->lock, hx_now_us() + SHOW_US);
    }
    pthread_mutex_unlock(&q->lock);
    for (int i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    if (n == 0)
        return hx_fail(err, HX_ENOMEM, "pull: the system refuses another thread");
    if (q->err.code != 0) {
        *err = q->err;
        return q->err.code;
    }
    if (q->n_finished < q->n_file)
        return hx_fail(err, HX_ECANCEL, "pull: stopped; what has come is kept");
    if (q->p->fn != NULL)
        q->p->fn(q->p->ud, q->total, q->total);
    return 0;
}

/* ---- all of it -------------------------------------------------------------------- */

/* hoist-source.json: where this folder came from, and that it is complete. */
static int write_source(const puller *q, hx_err *err)
{
    char path[4096];
    hx_sb b = { 0 };
    int rc;

    hx_sb_str(&b, "{\"repo\":");
    hx_json_put_str(&b, hx_str_c(q->repo));
    hx_sb_str(&b, ",\"revision\":");
    hx_json_put_str(&b, hx_str_c(q->rev));
    hx_sb_printf(&b, ",\"commit\":\"%s\",\"files\":[", q->commit);
    for (int64_t i = 0; i < q->n_file; i++) {
        hx_sb_str(&b, i > 0 ? ",\n{\"name\":" : "\n{\"name\":");
        hx_json_put_str(&b, hx_str_c(q->file[i].name));
        hx_sb_printf(
            &b, ",\"size\":%llu,\"%s\":\"%s\"}", (unsigned long long)q->file[i].size,
            strlen(q->file[i].hash) == 64 ? "sha256" : "git_sha1", q->file[i].hash);
    }
    hx_sb_str(&b, "]}\n");
    snprintf(path, sizeof path, "%s/hoist-source.json", q->p->dir);
    rc = cli_write(path, &b, err);
    hx_sb_free(&b);
    snprintf(path, sizeof path, "%s/" LOCK_NAME, q->p->dir);
    if (rc == 0)
        unlink(path);
    return rc;
}

/* "OWNER/NAME[@REV]" and where the hub is. */
static int read_names(puller *q, const char *endpoint, hx_err *err)
{
    const char *at = strchr(q->p->repo, '@'), *rev = at != NULL ? at + 1 : "main";
    const size_t n = at != NULL ? (size_t)(at - q->p->repo) : strlen(q->p->repo);
    int slashes = 0;
    bool good =
        n > 2 && n < sizeof q->repo && strlen(rev) < sizeof q->rev && *rev != '\0';

    for (size_t i = 0; good && i < n; i++) {
        const char c = q->p->repo[i];

        slashes += c == '/';
        good = c == '/' || c == '-' || c == '_' || c == '.' || (c >= '0' && c <= '9') ||
               ((c | 32) >= 'a' && (c | 32) <= 'z');
    }
    if (!good || slashes != 1 || q->p->repo[0] == '/' || q->p->repo[n - 1] == '/')
        return hx_fail(err, HX_EARG,
                       "\"%.80s\": expected OWNER/NAME or OWNER/NAME@REVISION",
                       q->p->repo);
    if (q->p->files != NULL && strlen(q->p->files) >= GLOB_BYTES)
        return hx_fail(err, HX_ELIMIT, "--files: over %d characters", GLOB_BYTES - 1);
    memcpy(q->repo, q->p->repo, n);
    memcpy(q->rev, rev, strlen(rev));
    if (endpoint == NULL || *endpoint == '\0')
        endpoint = "https://huggingface.co";
    snprintf(q->endpoint, sizeof q->endpoint, "%s", endpoint);
    if (q->endpoint[strlen(q->endpoint) - 1] == '/')
        q->endpoint[strlen(q->endpoint) - 1] = '\0';
    return 0;
}

bool cli_pull_is_done(const char *dir)
{
    char config[4096], lock[4096];

    snprintf(config, sizeof config, "%s/config.json", dir);
    snprintf(lock, sizeof lock, "%s/" LOCK_NAME, dir);
    return hx_file_exists(config) && !hx_file_exists(lock);
}

bool cli_pull_may_fill(const char *dir)
{
    char lock[4096];
    DIR *d = opendir(dir);
    const struct dirent *f;
    bool empty = true;

    snprintf(lock, sizeof lock, "%s/" LOCK_NAME, dir);
    while (d != NULL && empty && (f = readdir(d)) != NULL)
        empty = f->d_name[0] == '.' || strcmp(f->d_name, "lost+found") == 0;
    if (d != NULL)
        closedir(d);
    return empty || hx_file_exists(lock);
}

int cli_pull(const hx_pull *p, hx_err *err)
{
    puller q = { .p = p, .lock_fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER };
    int rc;

    hx_cond_init(&q.wake);
    if ((rc = read_names(&q, getenv("HF_ENDPOINT"), err)) == 0 &&
        (rc = pull_net_open(&q.net, q.endpoint, getenv("HF_TOKEN"), err)) == 0 &&
        (rc = lock_folder(&q, err)) == 0 && (rc = read_list(&q, err)) == 0 &&
        (rc = look_at_disk(&q, err)) == 0 && (rc = fetch_all(&q, err)) == 0)
        rc = write_source(&q, err);
    for (int64_t i = 0; i < q.n_file; i++) {
        pull_file_close(&q.file[i]);
        hx_free(q.file[i].name);
        hx_free(q.file[i].done);
        hx_free(q.file[i].busy);
    }
    hx_free(q.file);
    if (q.lock_fd >= 0)
        close(q.lock_fd);
    pull_net_close(q.net);
    return rc;
}

/* ---- the command -------------------------------------------------------------------- */

typedef struct {
    int64_t start_us, last_us;
    uint64_t first;
    bool begun;
} view;

static void show(void *ud, uint64_t done, uint64_t total)
{
    view *v = ud;
    const int64_t now = hx_now_us();
    char a[32], b[32], rate[32];

    if (!v->begun) {
        *v = (view) { .start_us = now, .first = done, .begun = true };
        cli_bytes(a, total - done);
        cli_bytes(b, total);
        fprintf(stderr, "%s of %s to fetch\n", a, b);
    }
    if (now - v->last_us < 200000 && done < total)
        return;
    v->last_us = now;
    const double s = (double)(now - v->start_us) / 1e6,
                 per_s = done > v->first ? (double)(done - v->first) / HX_MAX(s, 0.1) : 0;
    cli_bytes(a, done);
    cli_bytes(b, total);
    cli_bytes(rate, (uint64_t)per_s);
    if (done == total)
        cli_progress(" ");
    else
        cli_progress("%s of %s, %s/s, %.0f s to go", a, b, rate,
                     per_s > 0 ? (double)(total - done) / per_s : 0.0);
}

int cmd_pull(const hx_cli *c)
{
    view v = { 0 };
    const hx_pull p = {
        .repo = c->model, .dir = c->more[0], .files = c->files, .fn = show, .ud = &v
    };
    hx_err err = { 0 };

    if (c->n_more < 1) {
        fprintf(stderr, "hoist: pull needs REPO[@REV] DIR\n");
        return 2;
    }
    if (cli_pull(&p, &err) != 0)
        return cli_fail(&err);
    printf("%s: complete, every hash checked\n", p.dir);
    return 0;
}
