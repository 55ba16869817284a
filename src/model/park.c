/* park.c - kept states and pages as files: format, scan at open, the thread that reads and
 * writes them.
 *
 * Called by reuse.c on the engine thread; the index of files is that thread's, a job is the
 * worker's from being queued until it is polled. Never trusts a byte it reads: sizes are
 * checked against the file, content against checksums, the head against its name. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "model/model.h"

#define FIXED_BYTES  256
#define VERSION      1
#define HEAD_MAX     (1u << 30) /* of ids, phases and sums: far beyond any context */
#define SUFFIX       ".park"
#define TEMP_PREFIX  "writing-"
#define PATH_BYTES   4096
#define SUM_BYTES    16
#define DAY_HOURS    24
#define SAMPLES      16 /* blocks of a weight file that identify it */
#define SAMPLE_BYTES 4096

static const char magic[8] = { 'H', 'O', 'I', 'S', 'T', 'P', 'R', 'K' };

/* ---- jobs and index ---------------------------------------------------- */

typedef enum { JOB_WRITE, JOB_READ, JOB_TOUCH, JOB_DELETE } job_kind;

typedef struct job {
    struct job *next;
    job_kind kind;
    hx_park_name name;
    hx_park_head head; /* of a write; token and decoded are the job's */
    int32_t *token;
    uint64_t *decoded;
    hx_blob **page;
    hx_blob *state;
    int64_t n_page;
    bool want_state;
    _Atomic int64_t *total;
    uint64_t bytes;
    void *ud;
    int rc;
    hx_err err;
} job;

typedef struct {
    hx_park_name name;
    uint64_t bytes;
    int64_t used_s; /* of the wall clock */
    bool foreign;   /* of another model or build, or it could not be read */
} entry;

typedef struct {
    hx_park_head head;
    char *raw; /* the head's bytes; token and decoded point into it */
} found;

struct hx_park {
    char dir[PATH_BYTES - 128];
    hx_park_opt opt;
    hx_park_sys sys;
    int dir_fd;

    /* the engine thread's */
    entry *file; /* [n_file] */
    int64_t n_file, cap_file;
    uint64_t bytes, queued_bytes;
    uint64_t hour[DAY_HOURS + 1]; /* bytes written in each hour, by hour % 25 */
    int64_t hour_now;
    found *found; /* [n_found] */
    int64_t n_found;
    int64_t in_flight; /* writes and reads not yet polled */

    pthread_t thread;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t work, ready;
    /* under lock */
    job *todo, *todo_last, *done, *done_last;
    bool closing;
};

static int64_t now_s(void)
{
    return (int64_t)time(NULL);
}

static void hex_of(const hx_park_name *name, char out[65])
{
    for (int i = 0; i < 32; i++)
        snprintf(out + 2 * i, 3, "%02x", name->b[i]);
}

static void path_of(const hx_park *p, const hx_park_name *name, char out[PATH_BYTES])
{
    char hex[65];

    hex_of(name, hex);
    snprintf(out, PATH_BYTES, "%s/%s%s", p->dir, hex, SUFFIX);
}

static void job_free(job *j)
{
    for (int64_t i = 0; j->page != NULL && i < j->n_page; i++)
        hx_blob_unref(j->page[i]);
    hx_blob_unref(j->state);
    hx_free(j->page);
    hx_free(j->token);
    hx_free(j->decoded);
    hx_free(j);
}

/* ---- format ------------------------------------------------------------ */

static void put_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static void put_u64(uint8_t *p, uint64_t v)
{
    put_u32(p, (uint32_t)v);
    put_u32(p + 4, (uint32_t)(v >> 32));
}

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
           (uint32_t)p[3] << 24;
}

static uint64_t get_u64(const uint8_t *p)
{
    return get_u32(p) | (uint64_t)get_u32(p + 4) << 32;
}

static int64_t pages_in(int64_t from, int64_t n)
{
    return (n - from + HX_PAGE - 1) / HX_PAGE;
}

static size_t head_bytes(int64_t from, int64_t n)
{
    const size_t pages = (size_t)pages_in(from, n);

    return FIXED_BYTES + (size_t)(n - from) * sizeof(int32_t) + pages * sizeof(uint64_t) +
           (pages + 1) * SUM_BYTES;
}

uint64_t hx_park_file_bytes(const hx_park *p, const hx_park_head *h)
{
    return head_bytes(h->from, h->n) +
           (uint64_t)pages_in(h->from, h->n) * p->opt.page_bytes + h->state_bytes;
}

static bool sha256(const void *p, size_t n, uint8_t out[32])
{
    return EVP_Digest(p, n, out, NULL, EVP_sha256(), NULL) == 1;
}

static void put_sum(uint8_t *at, const hx_blob *b)
{
    const XXH128_hash_t h = XXH3_128bits(b->p, b->n);

    put_u64(at, h.low64);
    put_u64(at + 8, h.high64);
}

static bool sum_is(const uint8_t *at, const hx_blob *b)
{
    uint8_t sum[SUM_BYTES];

    put_sum(sum, b);
    return memcmp(sum, at, SUM_BYTES) == 0;
}

/* The job's head as bytes, hx_free()d by the caller. Host order is the file's: every
 * machine this runs on is little-endian. */
static uint8_t *head_of(const hx_park *p, const job *j)
{
    const hx_park_head *h = &j->head;
    const size_t n = head_bytes(h->from, h->n), n_token = (size_t)(h->n - h->from);
    uint8_t *b = hx_alloc(n), *at;

    if (b == NULL)
        return NULL;
    memcpy(b, magic, sizeof magic);
    put_u32(b + 8, VERSION);
    put_u32(b + 12, h->has_hidden);
    memcpy(b + 16, p->opt.identity, 32);
    memcpy(b + 48, h->parent.b, 32);
    put_u64(b + 80, (uint64_t)h->from);
    put_u64(b + 88, (uint64_t)h->n);
    put_u32(b + 96, (uint32_t)h->pend);
    put_u64(b + 104, p->opt.page_bytes);
    put_u64(b + 112, (uint64_t)j->n_page);
    put_u64(b + 120, h->state_bytes);
    at = b + FIXED_BYTES;
    memcpy(at, j->decoded, (size_t)j->n_page * sizeof(uint64_t));
    at += (size_t)j->n_page * sizeof(uint64_t);
    memcpy(at, j->token, n_token * sizeof(int32_t));
    at += n_token * sizeof(int32_t);
    for (int64_t i = 0; i < j->n_page; i++, at += SUM_BYTES)
        put_sum(at, j->page[i]);
    put_sum(at, j->state);
    return b;
}

static int64_t sys_read(int fd, void *p, size_t n, int64_t at)
{
    return pread(fd, p, n, at);
}

static int64_t sys_write(int fd, const void *p, size_t n)
{
    return write(fd, p, n);
}

static const hx_park_sys plain = { sys_read, sys_write, fsync, rename };

/* OTHER: no file of ours, or one that cannot be read now, which proves nothing. */
typedef enum { FILE_OURS, FILE_FOREIGN, FILE_CORRUPT, FILE_OTHER } file_kind;

/* HX_EIO: the disk or the system refuses; HX_EFORMAT: the file ends before. */
static int read_at(const hx_park_sys *sys, int fd, void *out, size_t n, int64_t at)
{
    char *to = out;

    while (n > 0) {
        const int64_t got = sys->read(fd, to, n, at);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? HX_EIO : HX_EFORMAT;
        to += got;
        at += got;
        n -= (size_t)got;
    }
    return 0;
}

/* Are the numbers of a fixed part possible, and right for a file of so many bytes? */
static bool sane(const hx_park *p, const uint8_t *b, int64_t file_bytes, hx_park_head *h)
{
    const uint64_t from = get_u64(b + 80), n = get_u64(b + 88);

    if (n > INT32_MAX || from >= n || from % HX_PAGE != 0 ||
        get_u32(b + 96) > HX_PEND_MAX || get_u64(b + 104) != p->opt.page_bytes ||
        get_u64(b + 120) > INT64_MAX / 4)
        return false;
    *h = (hx_park_head) { .from = (int64_t)from,
                          .n = (int64_t)n,
                          .pend = (int32_t)get_u32(b + 96),
                          .has_hidden = (get_u32(b + 12) & 1) != 0,
                          .state_bytes = get_u64(b + 120) };
    memcpy(h->parent.b, b + 48, 32);
    return get_u64(b + 112) == (uint64_t)pages_in(h->from, h->n) &&
           head_bytes(h->from, h->n) <= HEAD_MAX &&
           hx_park_file_bytes(p, h) == (uint64_t)file_bytes;
}

/* Reads and checks the head of an open file. *raw (hx_free) holds what *h points to. */
static file_kind read_head(const hx_park *p, int fd, const hx_park_name *name,
                           hx_park_head *h, uint8_t **raw)
{
    uint8_t fixed[FIXED_BYTES], sum[32];
    struct stat st;
    size_t n;
    int rc;

    *raw = NULL;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        (rc = read_at(&p->sys, fd, fixed, sizeof fixed, 0)) == HX_EIO)
        return FILE_OTHER;
    if (rc != 0 || memcmp(fixed, magic, sizeof magic) != 0)
        return FILE_CORRUPT;
    if (get_u32(fixed + 8) != VERSION || memcmp(fixed + 16, p->opt.identity, 32) != 0)
        return FILE_FOREIGN;
    if (!sane(p, fixed, st.st_size, h))
        return FILE_CORRUPT;
    n = head_bytes(h->from, h->n);
    if ((*raw = hx_alloc(n)) == NULL)
        return FILE_OTHER;
    if ((rc = read_at(&p->sys, fd, *raw, n, 0)) != 0 || !sha256(*raw, n, sum) ||
        memcmp(sum, name->b, 32) != 0) {
        hx_free(*raw);
        *raw = NULL;
        return rc == HX_EIO ? FILE_OTHER : FILE_CORRUPT;
    }
    h->name = *name;
    h->decoded = (const uint64_t *)(const void *)(*raw + FIXED_BYTES);
    h->token = (const int32_t *)(const void *)(h->decoded + pages_in(h->from, h->n));
    return FILE_OURS;
}

/* ---- the thread -------------------------------------------------------- */

static bool write_all(const hx_park *p, int fd, const void *from, size_t n)
{
    const char *at = from;

    while (n > 0) {
        const int64_t put = p->sys.write(fd, at, n);

        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return false;
        at += put;
        n -= (size_t)put;
    }
    return true;
}

static bool write_content(const hx_park *p, int fd, const job *j, const uint8_t *head)
{
    if (!write_all(p, fd, head, head_bytes(j->head.from, j->head.n)))
        return false;
    for (int64_t i = 0; i < j->n_page; i++)
        if (!write_all(p, fd, j->page[i]->p, j->page[i]->n))
            return false;
    return write_all(p, fd, j->state->p, j->state->n) && p->sys.sync(fd) == 0;
}

/* The temporary is locked while it is written: an unlocked one is a leftover. */
static int run_write(const hx_park *p, job *j)
{
    char temp[PATH_BYTES], path[PATH_BYTES];
    uint8_t *head = head_of(p, j);
    int fd = -1, rc = 0;
    bool made = false;

    if (head == NULL || !sha256(head, head_bytes(j->head.from, j->head.n), j->name.b)) {
        rc = hx_fail(&j->err, HX_ENOMEM, "park: no memory for a head");
        goto done;
    }
    path_of(p, &j->name, path);
    snprintf(temp, sizeof temp, "%s/%s%lld-%llx", p->dir, TEMP_PREFIX,
             (long long)getpid(), (unsigned long long)get_u64(j->name.b));
    fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    made = fd >= 0;
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 || !write_content(p, fd, j, head) ||
        p->sys.rename(temp, path) != 0 || p->sys.sync(p->dir_fd) != 0)
        rc = hx_fail(&j->err, HX_EIO, "park: %.200s: %s", temp, strerror(errno));
done:
    if (fd >= 0)
        close(fd);
    if (rc != 0 && made) {
        unlink(temp);
        unlink(path); /* renamed, but not known to last */
    }
    hx_free(head);
    return rc;
}

static int read_blob(const hx_park *p, int fd, size_t n, int64_t at, const uint8_t *sum,
                     _Atomic int64_t *total, hx_blob **out)
{
    hx_blob *b = *out = hx_blob_new(n, total);
    const int rc = b != NULL ? read_at(&p->sys, fd, b->p, n, at) : HX_ENOMEM;

    return rc != 0 ? rc : sum_is(sum, b) ? 0 : HX_EFORMAT;
}

static int read_content(const hx_park *p, int fd, job *j, const hx_park_head *h)
{
    const uint8_t *sum;
    int64_t at = (int64_t)head_bytes(h->from, h->n);
    int rc = 0;

    j->n_page = pages_in(h->from, h->n);
    sum = (const uint8_t *)(const void *)(h->token + (h->n - h->from));
    if ((j->page = hx_new(hx_blob *, j->n_page)) == NULL)
        return HX_ENOMEM;
    for (int64_t i = 0; i < j->n_page; i++, sum += SUM_BYTES) {
        if ((rc = read_blob(p, fd, p->opt.page_bytes, at, sum, j->total, &j->page[i])) !=
            0)
            return rc;
        at += (int64_t)p->opt.page_bytes;
    }
    if (j->want_state)
        rc = read_blob(p, fd, (size_t)h->state_bytes, at, sum, j->total, &j->state);
    return rc;
}

static int run_read(const hx_park *p, job *j)
{
    char path[PATH_BYTES];
    hx_park_head h;
    uint8_t *raw = NULL;
    int fd, rc;

    path_of(p, &j->name, path);
    if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return hx_fail(&j->err, errno == ENOENT ? HX_EFORMAT : HX_EIO, "park: %.200s: %s",
                       path, strerror(errno));
    const file_kind kind = read_head(p, fd, &j->name, &h, &raw);
    rc = kind == FILE_OURS    ? read_content(p, fd, j, &h)
         : kind == FILE_OTHER ? HX_EIO
                              : HX_EFORMAT;
    close(fd);
    hx_free(raw);
    if (rc == HX_EFORMAT) {
        unlink(path);
        hx_fail(&j->err, rc, "park: %.200s: corrupt, deleted", path);
    } else if (rc != 0) {
        hx_fail(&j->err, rc, "park: %.200s: cannot be read now (%s); it stays", path,
                rc == HX_EIO ? "the disk refuses" : "no memory");
    }
    return rc;
}

static void run_job(const hx_park *p, job *j)
{
    char path[PATH_BYTES];

    path_of(p, &j->name, path);
    switch (j->kind) {
    case JOB_WRITE:
        j->rc = run_write(p, j);
        break;
    case JOB_READ:
        j->rc = run_read(p, j);
        break;
    case JOB_TOUCH:
        utimensat(AT_FDCWD, path, NULL, 0);
        break;
    case JOB_DELETE:
        unlink(path);
        break;
    }
}

static void *park_run(void *ud)
{
    hx_park *p = ud;
    job *j;

    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->todo == NULL && !p->closing)
            pthread_cond_wait(&p->work, &p->lock);
        if ((j = p->todo) == NULL)
            break;
        p->todo = j->next;
        if (p->todo == NULL)
            p->todo_last = NULL;
        pthread_mutex_unlock(&p->lock);
        run_job(p, j);
        const bool answer = j->kind == JOB_WRITE || j->kind == JOB_READ;
        if (!answer)
            job_free(j);
        pthread_mutex_lock(&p->lock);
        if (answer) {
            j->next = NULL;
            if (p->done_last != NULL)
                p->done_last->next = j;
            else
                p->done = j;
            p->done_last = j;
            pthread_cond_signal(&p->ready);
            if (p->opt.wake != NULL)
                p->opt.wake(p->opt.wake_ud);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void queue(hx_park *p, job *j)
{
    p->in_flight += j->kind == JOB_WRITE || j->kind == JOB_READ;
    pthread_mutex_lock(&p->lock);
    if (p->todo_last != NULL)
        p->todo_last->next = j;
    else
        p->todo = j;
    p->todo_last = j;
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
}

/* ---- index ------------------------------------------------------------- */

static entry *entry_of(hx_park *p, const hx_park_name *name)
{
    for (int64_t i = 0; i < p->n_file; i++)
        if (memcmp(p->file[i].name.b, name->b, 32) == 0)
            return &p->file[i];
    return NULL;
}

static bool add_entry(hx_park *p, const entry *e)
{
    entry *old = entry_of(p, &e->name);

    if (old != NULL) {
        old->foreign = e->foreign;
        return true;
    }
    if (p->n_file == p->cap_file) {
        const int64_t cap = HX_MAX(64, 2 * p->cap_file);
        entry *more = hx_realloc(p->file, (size_t)cap * sizeof *more);

        if (more == NULL)
            return false;
        p->file = more;
        p->cap_file = cap;
    }
    p->file[p->n_file++] = *e;
    p->bytes += e->bytes;
    hx_count(HX_C_park_disk_bytes, (int64_t)e->bytes);
    return true;
}

static void drop_entry(hx_park *p, entry *e)
{
    p->bytes -= e->bytes;
    hx_count(HX_C_park_disk_bytes, -(int64_t)e->bytes);
    *e = p->file[--p->n_file];
}

uint64_t hx_park_bytes(const hx_park *p)
{
    return p->bytes;
}

bool hx_park_fits_disk(const hx_park *p, uint64_t bytes)
{
    return p->bytes + p->queued_bytes + bytes <= p->opt.disk_bytes;
}

/* Bytes written in hour h (of the epoch) count for 24 hours. */
static void count_written(hx_park *p, int64_t h, uint64_t bytes)
{
    if (h > p->hour_now - DAY_HOURS && h <= p->hour_now)
        p->hour[h % (DAY_HOURS + 1)] += bytes;
}

static void move_hour(hx_park *p)
{
    const int64_t h = now_s() / 3600;

    for (; p->hour_now < h; p->hour_now++) {
        if (h - p->hour_now > DAY_HOURS + 1) {
            p->hour_now = h - DAY_HOURS - 2;
            continue;
        }
        p->hour[(p->hour_now + 1) % (DAY_HOURS + 1)] = 0;
    }
}

bool hx_park_fits_day(const hx_park *p, uint64_t bytes)
{
    const int64_t h = now_s() / 3600;
    uint64_t sum = p->queued_bytes;

    for (int64_t i = HX_MAX(0, h - DAY_HOURS); i <= HX_MIN(h, p->hour_now); i++)
        sum += p->hour[i % (DAY_HOURS + 1)];
    return sum + bytes <= p->opt.day_bytes;
}

bool hx_park_drop_foreign(hx_park *p)
{
    entry *old = NULL;
    char path[PATH_BYTES];

    for (int64_t i = 0; i < p->n_file; i++)
        if (p->file[i].foreign && (old == NULL || p->file[i].used_s < old->used_s))
            old = &p->file[i];
    if (old == NULL)
        return false;
    path_of(p, &old->name, path);
    unlink(path);
    drop_entry(p, old);
    return true;
}

/* ---- calls -------------------------------------------------------------- */

static job *job_new(job_kind kind, const hx_park_name *name)
{
    job *j = hx_new(job, 1);

    if (j != NULL) {
        j->kind = kind;
        if (name != NULL)
            j->name = *name;
    }
    return j;
}

bool hx_park_write(hx_park *p, const hx_park_head *h, hx_blob *const *page,
                   hx_blob *state, void *ud)
{
    const int64_t n_page = pages_in(h->from, h->n);
    const size_t n_token = (size_t)(h->n - h->from);
    job *j = job_new(JOB_WRITE, NULL);

    if (j != NULL) {
        j->token = hx_new(int32_t, n_token);
        j->decoded = hx_new(uint64_t, n_page);
        j->page = hx_new(hx_blob *, n_page);
    }
    if (j == NULL || j->token == NULL || j->decoded == NULL || j->page == NULL) {
        for (int64_t i = 0; i < n_page; i++)
            hx_blob_unref(page[i]);
        hx_blob_unref(state);
        if (j != NULL)
            job_free(j);
        return false;
    }
    j->head = *h;
    j->head.state_bytes = state->n;
    j->n_page = n_page;
    j->state = state;
    j->ud = ud;
    memcpy(j->token, h->token, n_token * sizeof *h->token);
    memcpy(j->decoded, h->decoded, (size_t)n_page * sizeof *h->decoded);
    memcpy(j->page, page, (size_t)n_page * sizeof(hx_blob *));
    j->bytes = hx_park_file_bytes(p, &j->head);
    p->queued_bytes += j->bytes;
    queue(p, j);
    return true;
}

bool hx_park_read(hx_park *p, const hx_park_name *name, bool state,
                  _Atomic int64_t *total, void *ud)
{
    job *j = job_new(JOB_READ, name);

    if (j == NULL)
        return false;
    j->want_state = state;
    j->total = total;
    j->ud = ud;
    queue(p, j);
    return true;
}

void hx_park_touch(hx_park *p, const hx_park_name *name)
{
    job *j = job_new(JOB_TOUCH, name);
    entry *e = entry_of(p, name);

    if (e != NULL)
        e->used_s = now_s();
    if (j != NULL)
        queue(p, j);
}

void hx_park_delete(hx_park *p, const hx_park_name *name)
{
    job *j = job_new(JOB_DELETE, name);
    entry *e = entry_of(p, name);

    if (e != NULL)
        drop_entry(p, e);
    if (j != NULL)
        queue(p, j);
}

/* A finished job enters the index. */
static void account(hx_park *p, const job *j)
{
    entry e = { .name = j->name, .bytes = j->bytes, .used_s = now_s() };
    entry *old;

    p->in_flight--;
    if (j->kind == JOB_WRITE) {
        p->queued_bytes -= j->bytes;
        move_hour(p);
        count_written(p, p->hour_now, j->bytes); /* a failed one has worn the disk too */
        if (j->rc == 0) {
            hx_count(HX_C_park_written_bytes_total, (int64_t)j->bytes);
            add_entry(p, &e);
        }
    } else if (j->rc != 0 && (old = entry_of(p, &j->name)) != NULL) {
        if (j->rc == HX_EFORMAT)
            drop_entry(p, old);
        else
            old->foreign = true; /* nobody here knows it any more; the next run may */
    }
}

bool hx_park_poll(hx_park *p, hx_park_done *out, bool wait)
{
    job *j;

    pthread_mutex_lock(&p->lock);
    while (wait && p->in_flight > 0 && p->done == NULL)
        pthread_cond_wait(&p->ready, &p->lock);
    if ((j = p->done) != NULL && (p->done = j->next) == NULL)
        p->done_last = NULL;
    pthread_mutex_unlock(&p->lock);
    if (j == NULL)
        return false;
    account(p, j);
    *out = (hx_park_done) { .kind = j->kind == JOB_WRITE ? HX_PARK_WRITE : HX_PARK_READ,
                            .rc = j->rc,
                            .ud = j->ud,
                            .name = j->name,
                            .err = j->err };
    if (j->kind == JOB_READ && j->rc == 0) {
        out->page = j->page;
        out->n_page = j->n_page;
        out->state = j->state;
        j->page = NULL;
        j->state = NULL;
    }
    job_free(j);
    return true;
}

/* ---- scan --------------------------------------------------------------- */

/* The name in "<64 hex>.park". */
static bool name_from(const char *file, hx_park_name *out)
{
    static const char digit[] = "0123456789abcdef";

    if (strlen(file) != 64 + sizeof SUFFIX - 1 || strcmp(file + 64, SUFFIX) != 0)
        return false;
    for (int i = 0; i < 32; i++) {
        const char *hi = strchr(digit, file[2 * i]), *lo = strchr(digit, file[2 * i + 1]);

        if (hi == NULL || lo == NULL || *hi == '\0' || *lo == '\0')
            return false;
        out->b[i] = (uint8_t)((hi - digit) << 4 | (lo - digit));
    }
    return true;
}

static void drop_leftover(const char *path)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);

    if (fd < 0)
        return;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlink(path);
    close(fd);
}

static bool add_found(hx_park *p, const hx_park_head *h, uint8_t *raw)
{
    /* Grows by doubling: the capacity is the next power of two. */
    if ((p->n_found & (p->n_found - 1)) == 0) {
        found *more =
            hx_realloc(p->found, (size_t)HX_MAX(1, 2 * p->n_found) * sizeof *more);

        if (more == NULL)
            return false;
        p->found = more;
    }
    p->found[p->n_found++] = (found) { *h, (char *)raw };
    return true;
}

typedef struct {
    int64_t corrupt, foreign;
} scan_count;

static int scan_file(hx_park *p, const char *file, scan_count *count, hx_err *err)
{
    char path[PATH_BYTES];
    hx_park_head h = { 0 };
    uint8_t *raw;
    struct stat st;
    entry e = { 0 };
    int fd;

    snprintf(path, sizeof path, "%s/%.100s", p->dir, file);
    if (strncmp(file, TEMP_PREFIX, sizeof TEMP_PREFIX - 1) == 0)
        drop_leftover(path);
    if (!name_from(file, &e.name) || (fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return 0;
    const file_kind kind =
        fstat(fd, &st) == 0 ? read_head(p, fd, &e.name, &h, &raw) : FILE_OTHER;
    close(fd);
    if (kind == FILE_OTHER)
        return 0;
    if (kind == FILE_CORRUPT) {
        count->corrupt++;
        unlink(path);
        return 0;
    }
    count->foreign += e.foreign = kind == FILE_FOREIGN;
    e.bytes = (uint64_t)st.st_size;
    e.used_s = st.st_mtime;
    h.age_us = HX_MAX(0, now_s() - e.used_s) * 1000000;
    count_written(p, st.st_mtime / 3600, e.bytes);
    if (add_entry(p, &e) && (kind == FILE_FOREIGN || add_found(p, &h, raw)))
        return 0;
    hx_free(raw);
    return hx_fail(err, HX_ENOMEM, "park: no memory for the files of %.200s", p->dir);
}

static int by_from(const void *a, const void *b)
{
    const hx_park_head *x = &((const found *)a)->head, *y = &((const found *)b)->head;

    return (x->from > y->from) - (x->from < y->from);
}

static int scan(hx_park *p, hx_err *err)
{
    DIR *d = opendir(p->dir);
    scan_count count = { 0 };
    struct dirent *f;
    int rc = 0;

    if (d == NULL)
        return hx_fail(err, HX_EIO, "park: %.200s: %s", p->dir, strerror(errno));
    while (rc == 0 && (f = readdir(d)) != NULL)
        rc = scan_file(p, f->d_name, &count, err);
    closedir(d);
    if (count.corrupt > 0 || count.foreign > 0)
        hx_log(HX_LOG_WARN,
               "park: %.200s: %lld corrupt files deleted, %lld of other models or builds "
               "skipped",
               p->dir, (long long)count.corrupt, (long long)count.foreign);
    if (access(p->dir, W_OK | X_OK) != 0)
        hx_log(HX_LOG_WARN, "park: %.200s: %s; what is there is read, nothing is added",
               p->dir, strerror(errno));
    if (p->n_found > 0)
        qsort(p->found, (size_t)p->n_found, sizeof *p->found, by_from);
    return rc;
}

const hx_park_head *hx_park_found(const hx_park *p, int64_t i)
{
    return i < p->n_found ? &p->found[i].head : NULL;
}

void hx_park_found_end(hx_park *p)
{
    for (int64_t i = 0; i < p->n_found; i++)
        hx_free(p->found[i].raw);
    hx_free(p->found);
    p->found = NULL;
    p->n_found = 0;
}

/* ---- open and close ----------------------------------------------------- */

int hx_park_open(hx_park **out, const hx_park_opt *opt, hx_err *err)
{
    hx_park *p = hx_new(hx_park, 1);
    int rc;

    *out = NULL;
    if (p == NULL)
        return hx_fail(err, HX_ENOMEM, "park: no memory");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->ready, NULL);
    p->opt = *opt;
    p->sys = opt->sys != NULL ? *opt->sys : plain;
    p->hour_now = now_s() / 3600;
    p->dir_fd = -1;
    if ((size_t)snprintf(p->dir, sizeof p->dir, "%s", opt->dir) >= sizeof p->dir) {
        rc = hx_fail(err, HX_EARG, "park: folder name too long");
        goto fail;
    }
    if ((mkdir(p->dir, 0700) != 0 && errno != EEXIST) ||
        (p->dir_fd = open(p->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) {
        rc = hx_fail(err, HX_EIO, "park: %.200s: %s", p->dir, strerror(errno));
        goto fail;
    }
    if ((rc = scan(p, err)) != 0)
        goto fail;
    if (pthread_create(&p->thread, NULL, park_run, p) != 0) {
        rc = hx_fail(err, HX_EIO, "park: the system refuses another thread");
        goto fail;
    }
    p->started = true;
    *out = p;
    return 0;
fail:
    hx_park_close(p);
    return rc;
}

void hx_park_close(hx_park *p)
{
    hx_park_done d;

    if (p == NULL)
        return;
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        p->closing = true;
        pthread_cond_signal(&p->work);
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL);
    }
    while (hx_park_poll(p, &d, false)) {
        for (int64_t i = 0; i < d.n_page; i++)
            hx_blob_unref(d.page[i]);
        hx_free(d.page);
        hx_blob_unref(d.state);
    }
    hx_count(HX_C_park_disk_bytes, -(int64_t)p->bytes);
    hx_park_found_end(p);
    if (p->dir_fd >= 0)
        close(p->dir_fd);
    hx_free(p->file);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->ready);
    hx_free(p);
}

/* ---- identity ------------------------------------------------------------ */

/* Size and samples of a file, or all of it when it is small. */
static bool digest_file(EVP_MD_CTX *md, const char *path, bool all)
{
    uint8_t block[SAMPLE_BYTES];
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    bool ok = fd >= 0 && fstat(fd, &st) == 0;
    const int64_t n = ok ? st.st_size : 0,
                  step = all ? SAMPLE_BYTES : HX_MAX(SAMPLE_BYTES, n / SAMPLES);

    ok = ok && EVP_DigestUpdate(md, &n, sizeof n) == 1;
    for (int64_t at = 0; ok && at < n; at += step) {
        const size_t take = (size_t)HX_MIN(SAMPLE_BYTES, n - at);

        ok = read_at(&plain, fd, block, take, at) == 0 &&
             EVP_DigestUpdate(md, block, take) == 1;
    }
    if (fd >= 0)
        close(fd);
    return ok;
}

static bool is_weights(const char *file)
{
    const size_t n = strlen(file);

    return n > 12 && strcmp(file + n - 12, ".safetensors") == 0;
}

/* Joins a file's own digest to sum; the order of files does not matter. */
static bool join_file(uint8_t sum[32], const char *dir, const char *file, bool all)
{
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    char path[PATH_BYTES];
    uint8_t own[32];
    bool ok = (size_t)snprintf(path, sizeof path, "%s/%s", dir, file) < sizeof path;

    ok = ok && md != NULL && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 &&
         EVP_DigestUpdate(md, file, strlen(file)) == 1 && digest_file(md, path, all) &&
         EVP_DigestFinal_ex(md, own, NULL) == 1;
    for (int i = 0; ok && i < 32; i++)
        sum[i] ^= own[i];
    EVP_MD_CTX_free(md);
    return ok;
}

static bool digest_model(EVP_MD_CTX *md, const char *dir)
{
    DIR *d = opendir(dir);
    uint8_t sum[32] = { 0 };
    bool ok = d != NULL && join_file(sum, dir, "config.json", true);
    struct dirent *f;

    while (ok && (f = readdir(d)) != NULL)
        if (is_weights(f->d_name))
            ok = join_file(sum, dir, f->d_name, false);
    if (d != NULL)
        closedir(d);
    return ok && EVP_DigestUpdate(md, sum, sizeof sum) == 1;
}

int hx_park_identify(uint8_t out[32], const char *model_dir, const char *text,
                     hx_err *err)
{
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    const bool ok =
        md != NULL && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 &&
        EVP_DigestUpdate(md, text, strlen(text)) == 1 &&
        EVP_DigestUpdate(md, model_dir,
                         hx_model_is_synthetic(model_dir) ? strlen(model_dir) : 0) == 1 &&
        (hx_model_is_synthetic(model_dir) || digest_model(md, model_dir)) &&
        digest_file(md, "/proc/self/exe", true) && EVP_DigestFinal_ex(md, out, NULL) == 1;

    EVP_MD_CTX_free(md);
    return ok ? 0
              : hx_fail(err, HX_EIO, "park: %.200s: files of the model cannot be read",
                        model_dir);
}
