/* park.c - kept states and pages as files: format, looking through the folder, the thread
 * that reads and writes them.
 *
 * Called by reuse_disk.c on the engine thread; the index of files is that thread's, a job is
 * the worker's from being queued until it is polled. Of the processes that use a folder one
 * has its lock, which ends with the process: that one writes and deletes, so that what it
 * counts is true. The others read, look again when the folder has changed, and follow it.
 * Never trusts a byte it reads: sizes are checked against the file, content against
 * checksums, the head against its name. */
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
#define SUFFIX_TEMP  ".part"       /* while it is written */
#define LOCK_FILE    ".hoist-lock" /* holds the day and the bytes written on it */
#define FILE_BYTES   128           /* of a name in the folder */
#define PATH_BYTES   4096
#define SUM_BYTES    16
#define DAY_S        86400
#define LOOK_US      1000000 /* between two looks of one that only reads */
#define LOOK_PART    20 /* looking through the folder takes at most one part of so many */
#define SAMPLES      16 /* blocks of a weight file that identify it */
#define SAMPLE_BYTES 4096

static const char magic[8] = { 'H', 'O', 'I', 'S', 'T', 'P', 'R', 'K' };

/* ---- jobs and index ---------------------------------------------------- */

typedef struct {
    hx_park_name name;
    uint64_t bytes;
    int64_t used_s; /* of the wall clock */
    int64_t found;  /* its place among those */
    bool foreign;   /* of another model or build, or it could not be read */
    bool gone;      /* no file any more */
} entry;

typedef struct {
    hx_park_head head;
    char *raw; /* the head's bytes; token and decoded point into it */
} found;

/* The folder as it was when it was looked through. */
typedef struct {
    entry *file; /* [n_file], by name; n_gone of them are gone, less than half */
    int64_t n_file, n_gone, cap_file;
    found *found; /* [n_found], by from */
    int64_t n_found;
    uint64_t bytes; /* of all files */
    bool ours;      /* nobody else writes there */
} listing;

/* Up to the look they are polled. */
typedef enum { JOB_WRITE, JOB_READ, JOB_LOOK, JOB_TOUCH, JOB_DELETE } job_kind;

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
    listing list; /* of a look */
    uint64_t bytes;
    void *ud;
    int rc;
    hx_err err;
} job;

struct hx_park {
    char dir[PATH_BYTES];
    hx_park_opt opt;
    hx_park_sys sys;

    /* the engine thread's */
    listing list;
    uint64_t queued_bytes;
    int64_t in_flight; /* writes and reads not yet polled */

    pthread_t thread;
    bool started;
    /* the thread's */
    int dir_fd, lock_fd;
    bool held, told;         /* the lock; that it is not was logged */
    struct timespec changed; /* the folder's time when it was looked through */
    int64_t look_us;         /* not before, while the lock is not held */

    pthread_mutex_t lock;
    pthread_cond_t work, ready;
    /* under lock */
    job *todo, *todo_last, *done, *done_last;
    int64_t day; /* since 1970 */
    uint64_t day_bytes;
    bool closing;
};

static int64_t now_s(void)
{
    return (int64_t)time(NULL);
}

static void file_of(const hx_park_name *name, const char *suffix, char out[FILE_BYTES])
{
    for (int i = 0; i < 32; i++)
        snprintf(out + 2 * i, 3, "%02x", name->b[i]);
    snprintf(out + 64, FILE_BYTES - 64, "%s", suffix);
}

static void list_free(listing *l)
{
    for (int64_t i = 0; i < l->n_found; i++)
        hx_free(l->found[i].raw);
    hx_free(l->found);
    hx_free(l->file);
}

static void job_free(job *j)
{
    for (int64_t i = 0; j->page != NULL && i < j->n_page; i++)
        hx_blob_unref(j->page[i]);
    hx_blob_unref(j->state);
    hx_free(j->page);
    hx_free(j->token);
    hx_free(j->decoded);
    list_free(&j->list);
    hx_free(j);
}

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

static int sys_rename(int dir, const char *from, const char *to)
{
    return renameat(dir, from, dir, to);
}

static int sys_lock(int fd)
{
    return flock(fd, LOCK_EX | LOCK_NB);
}

static const hx_park_sys plain = { sys_read, sys_write, fsync, sys_rename, sys_lock };

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

/* ---- the folder --------------------------------------------------------- */

static void close_folder(hx_park *p)
{
    if (p->lock_fd >= 0)
        close(p->lock_fd);
    if (p->dir_fd >= 0)
        close(p->dir_fd);
    p->lock_fd = p->dir_fd = -1;
    p->held = false;
}

/* What the day's writes are, as the one that had the lock before left it. */
static void read_day(hx_park *p)
{
    char text[64] = { 0 };
    long long day = 0;
    unsigned long long bytes = 0;

    if (pread(p->lock_fd, text, sizeof text - 1, 0) > 0)
        sscanf(text, "%lld %llu", &day, &bytes);
    pthread_mutex_lock(&p->lock);
    p->day = day;
    p->day_bytes = bytes;
    pthread_mutex_unlock(&p->lock);
}

/* Before anything is written: what is killed or fails on its way has worn the disk too. */
static bool count_day(hx_park *p, uint64_t bytes)
{
    const int64_t day = now_s() / DAY_S;
    char text[64];
    int n;

    pthread_mutex_lock(&p->lock);
    p->day_bytes = bytes + (p->day == day ? p->day_bytes : 0);
    p->day = day;
    n = snprintf(text, sizeof text, "%20lld %20llu\n", (long long)day,
                 (unsigned long long)p->day_bytes);
    pthread_mutex_unlock(&p->lock);
    return pwrite(p->lock_fd, text, (size_t)n, 0) == n;
}

/* Opens the folder, makes it where it is not, and tries to be the one that writes there.
 * Where the file system has no locks it writes without, or nothing would ever be parked. */
static int take_folder(hx_park *p, hx_err *err)
{
    int why = 0;

    close_folder(p);
    if ((mkdir(p->dir, 0700) != 0 && errno != EEXIST) ||
        (p->dir_fd = open(p->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
        return hx_fail(err, HX_EIO, "park: %.200s: %s", p->dir, strerror(errno));
    p->lock_fd =
        openat(p->dir_fd, LOCK_FILE, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (p->lock_fd < 0 || p->sys.lock(p->lock_fd) != 0)
        why = errno;
    p->held = p->lock_fd >= 0 && why != EWOULDBLOCK && why != EINTR;
    if (p->held)
        read_day(p);
    if (p->held && why != 0)
        hx_log(HX_LOG_WARN, "park: %.200s: no lock (%s): no other server may use it",
               p->dir, strerror(why));
    else if (p->held && p->told)
        hx_log(HX_LOG_INFO, "park: %.200s: this process writes there now", p->dir);
    else if (!p->held && !p->told)
        hx_log(HX_LOG_WARN, "park: %.200s: %s; what is there is read, nothing is added%s",
               p->dir,
               why == EWOULDBLOCK ? "another process writes there" : strerror(why),
               why == EWOULDBLOCK ? " until that ends: one folder for each server" : "");
    p->told = !p->held;
    return 0;
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

/* Some file systems have no sync of folders. */
static bool sync_dir(const hx_park *p)
{
    return p->sys.sync(p->dir_fd) == 0 || errno == EINVAL;
}

static int run_write(hx_park *p, job *j)
{
    char temp[FILE_BYTES], file[FILE_BYTES];
    uint8_t *head = head_of(p, j);
    bool made = false, named = false;
    struct stat st;
    int fd = -1, rc = 0;

    if (head == NULL || !sha256(head, head_bytes(j->head.from, j->head.n), j->name.b)) {
        rc = hx_fail(&j->err, HX_ENOMEM, "park: no memory for a head");
        goto done;
    }
    if (p->held && (fstat(p->lock_fd, &st) != 0 || st.st_nlink == 0))
        p->held = false;
    if (!p->held) {
        rc = hx_fail(&j->err, HX_EIO,
                     "park: %.200s: was removed or emptied; it is begun anew", p->dir);
        goto done;
    }
    file_of(&j->name, SUFFIX, file);
    file_of(&j->name, SUFFIX_TEMP, temp);
    made = count_day(p, j->bytes) &&
           (fd = openat(p->dir_fd, temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                        0600)) >= 0;
    named = made && write_content(p, fd, j, head) &&
            p->sys.rename(p->dir_fd, temp, file) == 0;
    if (!named || !sync_dir(p))
        rc = hx_fail(&j->err, HX_EIO, "park: %.200s/%s: %s", p->dir, temp,
                     strerror(errno));
done:
    if (fd >= 0)
        close(fd);
    if (rc != 0 && made)
        unlinkat(p->dir_fd, named ? file : temp, 0); /* named, but not known to last */
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
    char file[FILE_BYTES];
    hx_park_head h;
    uint8_t *raw = NULL;
    int fd, rc;

    file_of(&j->name, SUFFIX, file);
    if ((fd = openat(p->dir_fd, file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) < 0)
        return hx_fail(&j->err, errno == ENOENT ? HX_EFORMAT : HX_EIO,
                       "park: %.200s/%s: %s", p->dir, file, strerror(errno));
    const file_kind kind = read_head(p, fd, &j->name, &h, &raw);
    rc = kind == FILE_OURS    ? read_content(p, fd, j, &h)
         : kind == FILE_OTHER ? HX_EIO
                              : HX_EFORMAT;
    close(fd);
    hx_free(raw);
    if (rc == HX_EFORMAT && p->held)
        unlinkat(p->dir_fd, file, 0);
    if (rc != 0)
        hx_fail(&j->err, rc, "park: %.200s/%s: %s", p->dir, file,
                rc == HX_EFORMAT ? "corrupt, not used"
                : rc == HX_EIO   ? "cannot be read now (the disk refuses); it stays"
                                 : "cannot be read now (no memory); it stays");
    return rc;
}

static void run_job(hx_park *p, job *j)
{
    char file[FILE_BYTES];

    file_of(&j->name, SUFFIX, file);
    switch (j->kind) {
    case JOB_WRITE:
        j->rc = run_write(p, j);
        break;
    case JOB_READ:
        j->rc = run_read(p, j);
        break;
    case JOB_TOUCH:
        utimensat(p->dir_fd, file, NULL, AT_SYMLINK_NOFOLLOW);
        break;
    case JOB_DELETE:
        if (unlinkat(p->dir_fd, file, 0) != 0 && errno != ENOENT)
            hx_log(HX_LOG_WARN, "park: %.200s/%s: cannot be deleted: %s", p->dir, file,
                   strerror(errno));
        break;
    case JOB_LOOK: /* the thread makes those itself */
        break;
    }
}

/* ---- scan --------------------------------------------------------------- */

/* Where name stands or would stand in the index. */
static int64_t place_of(const listing *l, const hx_park_name *name)
{
    int64_t lo = 0, hi = l->n_file;

    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;

        if (memcmp(l->file[mid].name.b, name->b, sizeof name->b) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool is_named(const entry *e, const hx_park_name *name)
{
    return memcmp(e->name.b, name->b, sizeof name->b) == 0;
}

static entry *entry_of(const listing *l, const hx_park_name *name)
{
    const int64_t i = place_of(l, name);

    return i < l->n_file && !l->file[i].gone && is_named(&l->file[i], name) ? &l->file[i]
                                                                            : NULL;
}

static bool insert_entry(listing *l, int64_t at, const entry *e)
{
    if (at < l->n_file && is_named(&l->file[at], &e->name)) { /* it was gone */
        l->file[at] = *e;
        l->n_gone--;
        l->bytes += e->bytes;
        return true;
    }
    if (l->n_file == l->cap_file) {
        const int64_t cap = HX_MAX(64, 2 * l->cap_file);
        entry *more = hx_realloc(l->file, (size_t)cap * sizeof *more);

        if (more == NULL)
            return false;
        l->file = more;
        l->cap_file = cap;
    }
    memmove(l->file + at + 1, l->file + at, (size_t)(l->n_file - at) * sizeof *e);
    l->file[at] = *e;
    l->n_file++;
    l->bytes += e->bytes;
    return true;
}

/* The name in 64 hex digits and a suffix. */
static bool name_from(const char *file, const char *suffix, hx_park_name *out)
{
    static const char digit[] = "0123456789abcdef";

    if (strlen(file) < 64 || strcmp(file + 64, suffix) != 0)
        return false;
    for (int i = 0; i < 32; i++) {
        const char *hi = strchr(digit, file[2 * i]), *lo = strchr(digit, file[2 * i + 1]);

        if (hi == NULL || lo == NULL || *hi == '\0' || *lo == '\0')
            return false;
        out->b[i] = (uint8_t)((hi - digit) << 4 | (lo - digit));
    }
    return true;
}

static bool add_found(listing *l, const hx_park_head *h, uint8_t *raw)
{
    /* Grows by doubling: the capacity is the next power of two. */
    if ((l->n_found & (l->n_found - 1)) == 0) {
        found *more =
            hx_realloc(l->found, (size_t)HX_MAX(1, 2 * l->n_found) * sizeof *more);

        if (more == NULL)
            return false;
        l->found = more;
    }
    l->found[l->n_found++] = (found) { *h, (char *)raw };
    return true;
}

typedef struct {
    int64_t corrupt, foreign;
} scan_count;

/* Only files are opened: a pipe of that name would never answer. */
static int scan_file(const hx_park *p, const char *file, listing *l, scan_count *count,
                     hx_err *err)
{
    hx_park_head h = { 0 };
    uint8_t *raw = NULL;
    entry e = { 0 };
    file_kind kind = FILE_OTHER;
    struct stat st;
    int fd;

    if (p->held && name_from(file, SUFFIX_TEMP, &e.name))
        unlinkat(p->dir_fd, file, 0); /* of one that was killed */
    if (!name_from(file, SUFFIX, &e.name) ||
        fstatat(p->dir_fd, file, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode))
        return 0;
    if ((fd = openat(p->dir_fd, file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) >= 0) {
        kind = read_head(p, fd, &e.name, &h, &raw);
        close(fd);
    }
    if (kind == FILE_CORRUPT) {
        count->corrupt++;
        if (p->held)
            unlinkat(p->dir_fd, file, 0);
        return 0;
    }
    e.foreign = kind != FILE_OURS;
    count->foreign += e.foreign;
    e.bytes = (uint64_t)st.st_size;
    e.used_s = st.st_mtime;
    h.age_us = HX_MAX(0, now_s() - e.used_s) * 1000000;
    if (insert_entry(l, l->n_file, &e) && (e.foreign || add_found(l, &h, raw)))
        return 0;
    hx_free(raw);
    return hx_fail(err, HX_ENOMEM, "park: no memory for the files of %.200s", p->dir);
}

static int by_name(const void *a, const void *b)
{
    return memcmp(((const entry *)a)->name.b, ((const entry *)b)->name.b,
                  sizeof(hx_park_name));
}

static int by_from(const void *a, const void *b)
{
    const hx_park_head *x = &((const found *)a)->head, *y = &((const found *)b)->head;

    return (x->from > y->from) - (x->from < y->from);
}

static int scan(const hx_park *p, listing *l, hx_err *err)
{
    const int fd = openat(p->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    scan_count count = { 0 };
    struct dirent *f;
    int rc = 0;

    if (d == NULL) {
        rc = hx_fail(err, HX_EIO, "park: %.200s: %s", p->dir, strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    while (rc == 0 && (f = readdir(d)) != NULL)
        rc = scan_file(p, f->d_name, l, &count, err);
    closedir(d);
    if (p->held && (count.corrupt > 0 || count.foreign > 0))
        hx_log(
            HX_LOG_WARN,
            "park: %.200s: %lld corrupt files deleted, %lld of other models or builds, "
            "or unreadable, skipped",
            p->dir, (long long)count.corrupt, (long long)count.foreign);
    if (l->n_file > 0)
        qsort(l->file, (size_t)l->n_file, sizeof *l->file, by_name);
    if (l->n_found > 0)
        qsort(l->found, (size_t)l->n_found, sizeof *l->found, by_from);
    for (int64_t i = 0; i < l->n_found; i++)
        entry_of(l, &l->found[i].head.name)->found = i;
    l->ours = p->held;
    return rc;
}

/* The folder as it is now. NULL: as it was, or it cannot be told. */
static job *look(hx_park *p)
{
    const int64_t start = hx_now_us();
    job *j = NULL;
    struct stat st;

    if (take_folder(p, NULL) == 0 && fstat(p->dir_fd, &st) == 0 &&
        (p->held || memcmp(&st.st_mtim, &p->changed, sizeof p->changed) != 0) &&
        (j = job_new(JOB_LOOK, NULL)) != NULL && scan(p, &j->list, NULL) != 0) {
        job_free(j);
        j = NULL;
    }
    if (j != NULL)
        p->changed = st.st_mtim;
    else
        p->held = false; /* until somebody is told of it, with what is there */
    p->look_us = hx_now_us() + HX_MAX(LOOK_US, LOOK_PART * (hx_now_us() - start));
    return j;
}

/* Under lock: the next job, which may be a look; NULL: it is the end. */
static job *next_job(hx_park *p)
{
    job *j;

    while ((j = p->todo) == NULL && !p->closing) {
        if (p->held) {
            pthread_cond_wait(&p->work, &p->lock);
        } else if (!hx_cond_until(&p->work, &p->lock, p->look_us)) {
            pthread_mutex_unlock(&p->lock);
            j = look(p);
            pthread_mutex_lock(&p->lock);
            if (j != NULL)
                return j;
        }
    }
    if (j != NULL && (p->todo = j->next) == NULL)
        p->todo_last = NULL;
    return j;
}

static void *park_run(void *ud)
{
    hx_park *p = ud;
    job *j;

    pthread_mutex_lock(&p->lock);
    while ((j = next_job(p)) != NULL) {
        pthread_mutex_unlock(&p->lock);
        run_job(p, j);
        const bool answer = j->kind <= JOB_LOOK;
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

/* Those that are gone leave together, so that forgetting many takes no longer for each. */
static void drop_entry(hx_park *p, entry *e)
{
    listing *l = &p->list;
    int64_t n = 0;

    l->bytes -= e->bytes;
    hx_count(HX_C_park_disk_bytes, -(int64_t)e->bytes);
    e->gone = true;
    if (2 * ++l->n_gone < l->n_file)
        return;
    for (int64_t i = 0; i < l->n_file; i++)
        if (!l->file[i].gone)
            l->file[n++] = l->file[i];
    l->n_file = n;
    l->n_gone = 0;
}

bool hx_park_is_ours(const hx_park *p)
{
    return p->list.ours;
}

uint64_t hx_park_bytes(const hx_park *p)
{
    return p->list.bytes;
}

bool hx_park_fits_disk(const hx_park *p, uint64_t bytes)
{
    return p->list.bytes + p->queued_bytes + bytes <= p->opt.disk_bytes;
}

bool hx_park_fits_day(hx_park *p, uint64_t bytes)
{
    uint64_t sum = p->queued_bytes + bytes;

    pthread_mutex_lock(&p->lock);
    sum += p->day == now_s() / DAY_S ? p->day_bytes : 0;
    pthread_mutex_unlock(&p->lock);
    return sum <= p->opt.day_bytes;
}

bool hx_park_drop_foreign(hx_park *p)
{
    const entry *old = NULL;
    hx_park_name name;

    for (const entry *e = p->list.file; e < p->list.file + p->list.n_file; e++)
        if (e->foreign && !e->gone && (old == NULL || e->used_s < old->used_s))
            old = e;
    if (old == NULL)
        return false;
    name = old->name; /* the entry goes */
    hx_park_delete(p, &name);
    return true;
}

void hx_park_disown(hx_park *p, const hx_park_name *name)
{
    entry *e = entry_of(&p->list, name);

    if (e != NULL)
        e->foreign = true;
}

/* ---- calls -------------------------------------------------------------- */

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
    entry *e = entry_of(&p->list, name);

    if (e != NULL)
        e->used_s = now_s();
    if (j != NULL)
        queue(p, j);
}

void hx_park_delete(hx_park *p, const hx_park_name *name)
{
    job *j = p->list.ours ? job_new(JOB_DELETE, name) : NULL;
    entry *e = entry_of(&p->list, name);

    if (e != NULL)
        drop_entry(p, e);
    if (j != NULL)
        queue(p, j);
}

static void account_write(hx_park *p, const job *j)
{
    const entry e = {
        .name = j->name, .bytes = j->bytes, .used_s = now_s(), .found = -1
    };
    entry *old = entry_of(&p->list, &j->name);

    p->queued_bytes -= j->bytes;
    if (j->rc != 0)
        return;
    hx_count(HX_C_park_written_bytes_total, (int64_t)j->bytes);
    if (old != NULL)
        *old = e;
    else if (insert_entry(&p->list, place_of(&p->list, &j->name), &e))
        hx_count(HX_C_park_disk_bytes, (int64_t)j->bytes);
}

/* A finished job enters the index. */
static void account(hx_park *p, job *j)
{
    const listing old = p->list;
    entry *e;

    if (j->kind == JOB_LOOK) {
        hx_count(HX_C_park_disk_bytes, (int64_t)(j->list.bytes - old.bytes));
        p->list = j->list;
        j->list = old;
        return;
    }
    p->in_flight--;
    if (j->kind == JOB_WRITE)
        account_write(p, j);
    else if (j->rc == HX_EFORMAT && (e = entry_of(&p->list, &j->name)) != NULL)
        drop_entry(p, e);
    else if (j->rc != 0) /* nobody here knows it any more; the next run may */
        hx_park_disown(p, &j->name);
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
    *out = (hx_park_done) { .kind = (hx_park_kind)j->kind,
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

/* ---- what was found ------------------------------------------------------ */

const hx_park_head *hx_park_found(const hx_park *p, int64_t i)
{
    return i < p->list.n_found ? &p->list.found[i].head : NULL;
}

int64_t hx_park_n_found(const hx_park *p)
{
    return p->list.n_found;
}

int64_t hx_park_find(const hx_park *p, const hx_park_name *name)
{
    const entry *e = entry_of(&p->list, name);

    return e == NULL ? HX_PARK_NONE : e->foreign ? HX_PARK_UNUSED : e->found;
}

void hx_park_found_end(hx_park *p)
{
    for (int64_t i = 0; i < p->list.n_found; i++)
        hx_free(p->list.found[i].raw);
    hx_free(p->list.found);
    p->list.found = NULL;
    p->list.n_found = 0;
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
    hx_cond_init(&p->work);
    hx_cond_init(&p->ready);
    p->opt = *opt;
    p->sys = opt->sys != NULL ? *opt->sys : plain;
    p->dir_fd = p->lock_fd = -1;
    if ((size_t)snprintf(p->dir, sizeof p->dir, "%s", opt->dir) >= sizeof p->dir) {
        rc = hx_fail(err, HX_EARG, "park: folder name too long");
        goto fail;
    }
    if ((rc = take_folder(p, err)) != 0 || (rc = scan(p, &p->list, err)) != 0)
        goto fail;
    hx_count(HX_C_park_disk_bytes, (int64_t)p->list.bytes);
    p->look_us = hx_now_us() + LOOK_US;
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
    hx_count(HX_C_park_disk_bytes, -(int64_t)p->list.bytes);
    list_free(&p->list);
    close_folder(p);
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
