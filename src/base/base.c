/* base.c - what the operating system and libc give, behind base.h: memory, bytes and
 * text, files, log, clock, random numbers, the machine's size, the worker pool,
 * counters, test hooks.
 *
 * Every layer calls it. It is the only file that calls malloc, that starts compute
 * threads and that keeps mutable globals (all of them in `g` or thread-local). It must
 * never print, exit, install a handler or read an environment variable. */
#include "base/base.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CACHE_LINE 64
#define HUGE_PAGE  ((size_t)2 << 20)

/* Upper bounds of all histograms: milliseconds to a quarter of an hour, and token counts. */
static const double bucket_bound[] = {
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15,
    0.2,   0.3,   0.5,   0.75,  1,      1.5,  2,     3,    5,    7.5,  10,    20,  40,
    80,    160,   320,   640,   1000,   2e3,  5e3,   1e4,  2e4,  5e4,  1e5,   2e5, 1e6
};
#define HISTOGRAM_BUCKETS HX_LEN(bucket_bound)

static struct {
    _Atomic int64_t live; /* allocations and mappings not yet freed */
    _Atomic int64_t seen; /* allocations and reads since hx_test_fail_at() */
    _Atomic int64_t fail_at;
    _Atomic int64_t counter[HX_N_COUNTER];
    struct {
        _Atomic int64_t n[HISTOGRAM_BUCKETS + 1]; /* the last: above all bounds */
        _Atomic int64_t sum_micro;
    } histogram[HX_N_HISTOGRAM];
    _Atomic bool has_log;      /* spares formatting when nobody listens */
    pthread_rwlock_t log_lock; /* guards log_fn, log_ud; held while log_fn runs */
    void (*log_fn)(void *ud, int level, const char *line);
    void *log_ud;
} g = { .log_lock = PTHREAD_RWLOCK_INITIALIZER };

static _Thread_local struct {
    const char *what;
    int depth;
} noalloc;

/* ---- errors ---------------------------------------------------------- */

const char *hx_strerror(int code)
{
    switch (code) {
    case HX_OK:
        return "no error";
#define X(name, value, text)                                                             \
    case value:                                                                          \
        return text;
        HX_ERRORS(X)
#undef X
    }
    return "unknown error";
}

/* vsnprintf that never ends in the middle of a character: what does not fit is cut, and
 * messages reach JSON answers, where half a character would become U+FFFD. */
static void format_line(char *, size_t, const char *, va_list) HX_PRINTF(3, 0);

static void format_line(char *out, size_t cap, const char *fmt, va_list ap)
{
    const int len = vsnprintf(out, cap, fmt, ap);

    if (len < 0)
        out[0] = '\0';
    if (len < 0 || (size_t)len < cap)
        return;
    for (size_t back = 1; back <= 3 && back < cap; back++) {
        char *p = out + cap - 1 - back;
        uint32_t cp;

        if (hx_utf8_next(p, back, &cp) == -1)
            *p = '\0';
    }
}

int hx_fail(hx_err *err, int code, const char *fmt, ...)
{
    va_list ap;

    if (err == NULL)
        return code;
    err->code = code;
    va_start(ap, fmt);
    format_line(err->msg, sizeof(err->msg), fmt, ap);
    va_end(ap);
    return code;
}

void hx_panic(const char *file, int line, const char *what)
{
    hx_log(HX_LOG_ERROR, "panic: %s:%d: %s", file, line, what);
    __builtin_trap();
}

/* ---- test hooks ------------------------------------------------------ */

int64_t hx_test_fail_at(int64_t k)
{
    int64_t seen;

    atomic_store(&g.fail_at, 0);
    seen = atomic_exchange(&g.seen, 0);
    atomic_store(&g.fail_at, k);
    return seen;
}

int64_t hx_test_live_allocs(void)
{
    return atomic_load(&g.live);
}

/* seen passes each value once, so the k-th fails once. */
static bool hook_fails(void)
{
    const int64_t k = atomic_fetch_add_explicit(&g.seen, 1, memory_order_relaxed) + 1;

    return k == atomic_load_explicit(&g.fail_at, memory_order_relaxed);
}

static bool alloc_fails(void)
{
    if (noalloc.depth > 0)
        hx_panic(__FILE__, __LINE__, noalloc.what);
    return hook_fails();
}

static void count_live(int64_t add)
{
    atomic_fetch_add_explicit(&g.live, add, memory_order_relaxed);
}

void hx_noalloc_begin(const char *what)
{
    if (noalloc.depth++ == 0)
        noalloc.what = what;
}

void hx_noalloc_end(void)
{
    hx_assert(noalloc.depth > 0);
    noalloc.depth--;
}

/* ---- memory ---------------------------------------------------------- */

void *hx_alloc(size_t bytes)
{
    void *p = NULL;

    if (alloc_fails() || bytes > PTRDIFF_MAX)
        return NULL;
    if (posix_memalign(&p, CACHE_LINE, bytes > 0 ? bytes : 1) != 0)
        return NULL;
    count_live(1);
    return memset(p, 0, bytes);
}

void *hx_realloc(void *p, size_t bytes)
{
    void *q;

    if (alloc_fails() || bytes > PTRDIFF_MAX)
        return NULL;
    q = realloc(p, bytes > 0 ? bytes : 1);
    if (q != NULL && p == NULL)
        count_live(1);
    return q;
}

void *hx_calloc(size_t n, size_t size)
{
    size_t bytes;

    return hx_mul(n, size, &bytes) ? hx_alloc(bytes) : NULL;
}

void hx_free(void *p)
{
    if (p == NULL)
        return;
    free(p);
    count_live(-1);
}

bool hx_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static size_t page_round(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (bytes + page - 1) / page * page;
}

void *hx_map(size_t bytes, bool huge)
{
    const int prot = PROT_READ | PROT_WRITE;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t len, lead;
    char *p, *start;

    if (alloc_fails() || bytes == 0 || bytes > PTRDIFF_MAX - 2 * HUGE_PAGE)
        return NULL;
    /* Huge pages need an aligned start: map one more and give the edges back. */
    len = page_round(bytes);
    lead = huge && len >= HUGE_PAGE ? HUGE_PAGE : 0;
    p = mmap(NULL, len + lead, prot, flags, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    count_live(1);
    if (lead == 0)
        return p;
    start = p + (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE);
    munmap(p, (size_t)(start - p));
    if (start < p + lead)
        munmap(start + len, (size_t)(p + lead - start));
    madvise(start, len, MADV_HUGEPAGE); /* a wish: kernels without it say EINVAL */
    return start;
}

void hx_unmap(void *p, size_t bytes)
{
    if (p == NULL)
        return;
    munmap(p, page_round(bytes));
    count_live(-1);
}

void hx_map_drop(const void *p, size_t bytes, bool evict)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE),
                    from = ((uintptr_t)p + page - 1) / page * page,
                    to = ((uintptr_t)p + bytes) / page * page;

    if (to <= from)
        return;
    if (evict) /* a wish: only a file's owner may */
        madvise((void *)from, to - from, MADV_PAGEOUT);
    madvise((void *)from, to - from, MADV_DONTNEED);
}

/* ---- arena ----------------------------------------------------------- */

#define ARENA_CHUNK_MIN 4096u
#define ARENA_CHUNK_MAX (1u << 20)

struct hx_chunk {
    struct hx_chunk *next;
    size_t used, size; /* of data */
    _Alignas(16) unsigned char data[];
};

void hx_arena_init(hx_arena *a, size_t cap_bytes)
{
    *a = (hx_arena) { .cap_bytes = cap_bytes };
}

void *hx_arena_alloc(hx_arena *a, size_t bytes)
{
    const size_t want = (HX_MAX(bytes, 1u) + 15) / 16 * 16;
    struct hx_chunk *c = a->head;
    void *p;

    if (bytes > PTRDIFF_MAX - ARENA_CHUNK_MAX ||
        (a->cap_bytes > 0 && want > a->cap_bytes - a->used_bytes))
        return NULL;
    if (c == NULL || c->size - c->used < want) {
        /* Chunks double with what is in use, so few are made and little is wasted. */
        size_t size = HX_MIN(HX_MAX(a->used_bytes, ARENA_CHUNK_MIN), ARENA_CHUNK_MAX);

        size = HX_MAX(size, want);
        if ((c = hx_alloc(sizeof(*c) + size)) == NULL)
            return NULL;
        c->size = size;
        c->next = a->head;
        a->head = c;
    }
    p = c->data + c->used;
    c->used += want;
    a->used_bytes += want;
    return p;
}

char *hx_arena_dup(hx_arena *a, const void *p, size_t n)
{
    char *copy = n < PTRDIFF_MAX ? hx_arena_alloc(a, n + 1) : NULL;

    if (copy != NULL && n > 0)
        memcpy(copy, p, n);
    return copy;
}

void hx_arena_reset(hx_arena *a)
{
    for (struct hx_chunk *c = a->head, *next; c != NULL; c = next) {
        next = c->next;
        hx_free(c);
    }
    a->head = NULL;
    a->used_bytes = 0;
}

/* ---- growable bytes -------------------------------------------------- */

/* Room for n more bytes and the final NUL. */
static bool sb_reserve(hx_sb *b, size_t n)
{
    const size_t bound = b->max > 0 ? b->max : PTRDIFF_MAX - 1;
    size_t cap;
    char *p;

    if (b->bad)
        return false;
    if (b->n > bound || n > bound - b->n)
        goto fail;
    if (b->n + n < b->cap)
        return true;
    cap = HX_MIN(HX_MAX(b->cap * 2, 64u), bound + 1);
    cap = HX_MAX(cap, b->n + n + 1);
    if ((p = hx_realloc(b->p, cap)) == NULL)
        goto fail;
    b->p = p;
    b->cap = cap;
    return true;
fail:
    b->bad = true;
    return false;
}

void hx_sb_add(hx_sb *b, const void *p, size_t n)
{
    if (!sb_reserve(b, n))
        return;
    if (n > 0)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = '\0';
}

void hx_sb_str(hx_sb *b, const char *s)
{
    if (s != NULL)
        hx_sb_add(b, s, strlen(s));
}

void hx_sb_char(hx_sb *b, char c)
{
    hx_sb_add(b, &c, 1);
}

void hx_sb_printf(hx_sb *b, const char *fmt, ...)
{
    va_list ap, again;
    int len;

    va_start(ap, fmt);
    va_copy(again, ap);
    len = vsnprintf(NULL, 0, fmt, ap);
    if (len < 0) {
        b->bad = true;
    } else if (sb_reserve(b, (size_t)len)) {
        vsnprintf(b->p + b->n, (size_t)len + 1, fmt, again);
        b->n += (size_t)len;
    }
    va_end(again);
    va_end(ap);
}

void hx_sb_free(hx_sb *b)
{
    hx_free(b->p);
    *b = (hx_sb) { .max = b->max };
}

/* ---- strings --------------------------------------------------------- */

hx_str hx_str_c(const char *s)
{
    return (hx_str) { s, s != NULL ? strlen(s) : 0 };
}

bool hx_str_eq(hx_str a, hx_str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

bool hx_str_is(hx_str a, const char *b)
{
    return hx_str_eq(a, hx_str_c(b));
}

int hx_hex_digit(int c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 'a' - 'A';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Well-formed sequences by first byte: length n, and the range of the second byte, which
 * keeps out overlong forms, surrogates and what lies past U+10FFFF. Unicode 15, table
 * 3-7. */
static const struct {
    unsigned char first, last, n, lo, hi;
} utf8_lead[] = {
    { 0x00, 0x7f, 1, 0x80, 0xbf }, { 0xe1, 0xec, 3, 0x80, 0xbf },
    { 0xc2, 0xdf, 2, 0x80, 0xbf }, { 0xee, 0xef, 3, 0x80, 0xbf },
    { 0xe0, 0xe0, 3, 0xa0, 0xbf }, { 0xf0, 0xf0, 4, 0x90, 0xbf },
    { 0xed, 0xed, 3, 0x80, 0x9f }, { 0xf1, 0xf3, 4, 0x80, 0xbf },
    { 0xf4, 0xf4, 4, 0x80, 0x8f },
};

/* How many bytes at s[0..n) begin a well-formed sequence, and in *need how long that
 * sequence is. 0 when s[0] begins none. */
static size_t utf8_prefix(const unsigned char *s, size_t n, size_t *need)
{
    size_t k = 0, got = 1;

    *need = 0;
    if (n == 0)
        return 0;
    while (k < HX_LEN(utf8_lead) &&
           (s[0] < utf8_lead[k].first || s[0] > utf8_lead[k].last))
        k++;
    if (k == HX_LEN(utf8_lead))
        return 0;
    *need = utf8_lead[k].n;
    if (got < *need && got < n && s[1] >= utf8_lead[k].lo && s[1] <= utf8_lead[k].hi)
        for (got = 2; got < *need && got < n && (s[got] & 0xc0) == 0x80;)
            got++;
    return got;
}

int hx_utf8_next(const char *p, size_t n, uint32_t *cp)
{
    static const unsigned char lead_bits[] = { 0, 0x7f, 0x1f, 0x0f, 0x07 };
    const unsigned char *s = (const unsigned char *)p;
    size_t need;
    const size_t got = utf8_prefix(s, n, &need);
    uint32_t c;

    if (n == 0)
        return -1;
    if (got == 0 || got < need)
        return got > 0 && got == n ? -1 : 0;
    c = s[0] & (uint32_t)lead_bits[need];
    for (size_t i = 1; i < need; i++)
        c = c << 6 | (s[i] & 0x3fu);
    *cp = c;
    return (int)need;
}

size_t hx_utf8_bad(const char *p, size_t n)
{
    size_t need;
    const size_t got = utf8_prefix((const unsigned char *)p, n, &need);

    if (n == 0 || (got > 0 && got == need))
        return 0;
    return HX_MAX(got, 1u);
}

int hx_utf8_put(uint32_t cp, char out[4])
{
    if (cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
        cp = 0xfffd;
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

bool hx_utf8_ok(const char *p, size_t n)
{
    size_t i = 0;

    while (i < n) {
        uint32_t cp;
        uint64_t word;
        int len;

        /* Eight ASCII bytes at a time: most text is. */
        if (n - i >= 8 && (memcpy(&word, p + i, 8), (word & 0x8080808080808080u) == 0)) {
            i += 8;
            continue;
        }
        if ((len = hx_utf8_next(p + i, n - i, &cp)) <= 0)
            return false;
        i += (size_t)len;
    }
    return true;
}

static const struct {
    char name[4];
    uint64_t bytes;
} size_units[] = {
    { "", 1 },
    { "b", 1 },
    { "k", 1ull << 10 },
    { "kib", 1ull << 10 },
    { "kb", 1000ull },
    { "m", 1ull << 20 },
    { "mib", 1ull << 20 },
    { "mb", 1000000ull },
    { "g", 1ull << 30 },
    { "gib", 1ull << 30 },
    { "gb", 1000000000ull },
    { "t", 1ull << 40 },
    { "tib", 1ull << 40 },
    { "tb", 1000000000000ull },
};

/* The unit's bytes, 0 when s is none. Case does not matter. */
static uint64_t size_unit(const char *s)
{
    for (size_t u = 0; u < HX_LEN(size_units); u++) {
        const char *name = size_units[u].name;
        size_t i = 0;

        while (i < sizeof(size_units[u].name) && s[i] != '\0' &&
               tolower((unsigned char)s[i]) == name[i])
            i++;
        if (s[i] == '\0' && (i == sizeof(size_units[u].name) || name[i] == '\0'))
            return size_units[u].bytes;
    }
    return 0;
}

int hx_parse_size(const char *s, uint64_t *out, hx_err *err)
{
    const char *p = s != NULL ? s : "";
    uint64_t whole = 0, unit, bytes;
    double part = 0, scale = 0.1;
    bool over = false, digits = false;

    for (; isdigit((unsigned char)*p); p++, digits = true) {
        over |= __builtin_mul_overflow(whole, 10u, &whole);
        over |= __builtin_add_overflow(whole, (uint64_t)(*p - '0'), &whole);
    }
    if (digits && *p == '.')
        for (p++; isdigit((unsigned char)*p); p++, scale /= 10)
            part += scale * (*p - '0');
    while (*p == ' ')
        p++;
    unit = size_unit(p);
    if (!digits || unit == 0)
        return hx_fail(err, HX_EARG,
                       "size \"%s\": expected a number and a unit, like "
                       "24GiB, 900MB, 64k or 4096",
                       s != NULL ? s : "");
    if (*p == '\0' && whole < 1024 && (whole > 0 || part > 0))
        return hx_fail(err, HX_EARG,
                       "size \"%s\": so few bytes? expected a unit, like %sGiB, or B", s,
                       s);
    over |= __builtin_mul_overflow(whole, unit, &bytes);
    over |= __builtin_add_overflow(bytes, (uint64_t)(part * (double)unit + 0.5), &bytes);
    if (over)
        return hx_fail(err, HX_EARG, "size \"%s\": more than 16 EiB", s);
    *out = bytes;
    return 0;
}

/* ---- files ----------------------------------------------------------- */

/* Opens a file to read; *size gets its size. Directories are refused here because
 * reading one gives a message that explains nothing. */
static int open_file(const char *path, int *fd, uint64_t *size, hx_err *err)
{
    struct stat st;

    if (hook_fails()) {
        errno = EIO;
        return hx_fail(err, HX_EIO, "%s: %m", path);
    }
    /* Not blocking: a FIFO would wait for its other end before it can be refused. */
    if ((*fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) < 0)
        return hx_fail(err, HX_EIO, "%s: %m", path);
    if (fstat(*fd, &st) != 0) {
        hx_fail(err, HX_EIO, "%s: %m", path);
        goto fail;
    }
    if (!S_ISREG(st.st_mode)) {
        hx_fail(err, HX_EIO, "%s: is %s, expected a file", path,
                S_ISDIR(st.st_mode) ? "a folder" : "no regular file");
        goto fail;
    }
    *size = (uint64_t)st.st_size;
    return 0;
fail:
    close(*fd);
    return HX_EIO;
}

int hx_file_map(hx_file *out, const char *path, hx_err *err)
{
    uint64_t size = 0;
    int rc, fd = -1;
    void *p;

    *out = (hx_file) { NULL, 0 };
    if ((rc = open_file(path, &fd, &size, err)) != 0)
        return rc;
    if (size == 0) {
        rc = hx_fail(err, HX_EFORMAT, "%s: empty file", path);
        goto fail;
    }
    p = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
        rc = hx_fail(err, HX_EIO, "%s: cannot map %" PRIu64 " bytes: %m", path, size);
        goto fail;
    }
    count_live(1);
    *out = (hx_file) { p, (size_t)size };
fail:
    close(fd);
    return rc;
}

void hx_file_unmap(hx_file *f)
{
    if (f == NULL || f->p == NULL)
        return;
    munmap((void *)(uintptr_t)f->p, f->n);
    count_live(-1);
    *f = (hx_file) { NULL, 0 };
}

/* read() that goes on after signals. */
static ssize_t read_some(int fd, char *p, size_t n)
{
    ssize_t got;

    do
        got = read(fd, p, n);
    while (got < 0 && errno == EINTR);
    return got;
}

int hx_file_read(const char *path, size_t max, char **out, size_t *n, hx_err *err)
{
    hx_sb b = { 0 };
    uint64_t size = 0;
    ssize_t got;
    int rc, fd = -1;

    *out = NULL;
    *n = 0;
    if ((rc = open_file(path, &fd, &size, err)) != 0)
        return rc;
    /* The size is only a hint: /proc says 0, and files grow. */
    for (size_t want = HX_MIN((size_t)size, max) + 1;; want = 65536) {
        if (b.n > max) {
            rc = hx_fail(err, HX_ELIMIT, "%s: more than %zu bytes", path, max);
            goto fail;
        }
        want = HX_MIN(want, max - b.n + 1);
        if (!sb_reserve(&b, want)) {
            rc = hx_fail(err, HX_ENOMEM, "%s: no memory for %zu bytes", path, b.n + want);
            goto fail;
        }
        errno = EIO;
        if ((got = hook_fails() ? -1 : read_some(fd, b.p + b.n, want)) < 0) {
            rc = hx_fail(err, HX_EIO, "%s: %m", path);
            goto fail;
        }
        b.n += (size_t)got;
        b.p[b.n] = '\0';
        if (got == 0)
            break;
    }
    *out = b.p;
    *n = b.n;
    close(fd);
    return 0;
fail:
    close(fd);
    hx_sb_free(&b);
    return rc;
}

bool hx_file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* ---- log, clock ------------------------------------------------------ */

/* When it returns, no line is under way in the function set before; so fn must not call
 * hx_on_log() itself. */
void hx_on_log(void (*fn)(void *ud, int level, const char *line), void *ud)
{
    pthread_rwlock_wrlock(&g.log_lock);
    g.log_fn = fn;
    g.log_ud = ud;
    atomic_store(&g.has_log, fn != NULL);
    pthread_rwlock_unlock(&g.log_lock);
}

void hx_log(int level, const char *fmt, ...)
{
    char line[1024];
    va_list ap;

    if (!atomic_load_explicit(&g.has_log, memory_order_relaxed))
        return;
    va_start(ap, fmt);
    format_line(line, sizeof(line), fmt, ap);
    va_end(ap);
    pthread_rwlock_rdlock(&g.log_lock);
    if (g.log_fn != NULL)
        g.log_fn(g.log_ud, level, line);
    pthread_rwlock_unlock(&g.log_lock);
}

int64_t hx_now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void hx_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t clock;

    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(c, &clock);
    pthread_condattr_destroy(&clock);
}

bool hx_cond_until(pthread_cond_t *c, pthread_mutex_t *lock, int64_t us)
{
    const struct timespec until = { .tv_sec = us / 1000000,
                                    .tv_nsec = us % 1000000 * 1000 };

    return pthread_cond_timedwait(c, lock, &until) == 0;
}

/* ---- random ---------------------------------------------------------- */

typedef struct {
    uint64_t a, b;
} u64_pair;

/* Philox2x64-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
 * Passes BigCrush, needs no state, and neighbouring seeds are as unrelated as
 * neighbouring counters, which adding seed and counter would not give. */
static u64_pair philox(u64_pair c, uint64_t key)
{
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 m = (unsigned __int128)c.a * 0xd2b74407b1ce6e93u;

        c = (u64_pair) { (uint64_t)(m >> 64) ^ key ^ c.b, (uint64_t)m };
        key += 0x9e3779b97f4a7c15u;
    }
    return c;
}

static double unit_of(uint64_t bits)
{
    return (double)(bits >> 11) * 0x1p-53;
}

uint64_t hx_rng_at(uint64_t seed, uint64_t counter)
{
    return philox((u64_pair) { counter, 0 }, seed).a;
}

double hx_rng_unit(uint64_t seed, uint64_t counter)
{
    return unit_of(hx_rng_at(seed, counter));
}

/* Box & Muller 1958; the radius takes (0, 1] so that log() stays finite. */
double hx_rng_normal(uint64_t seed, uint64_t counter)
{
    const u64_pair r = philox((u64_pair) { counter, 0 }, seed);

    return sqrt(-2 * log(unit_of(r.a) + 0x1p-53)) * cos(2 * M_PI * unit_of(r.b));
}

/* ---- this machine ---------------------------------------------------- */

/* Where the two generations of control groups keep one limit. */
typedef struct {
    const char *controller; /* "" is version 2 */
    const char *mount, *limit, *usage, *cache[2];
} cgroup_files;

static const cgroup_files cgroup_memory[] = {
    { "",
      "/sys/fs/cgroup",
      "memory.max",
      "memory.current",
      { "inactive_file", "active_file" } },
    { "memory",
      "/sys/fs/cgroup/memory",
      "memory.limit_in_bytes",
      "memory.usage_in_bytes",
      { "total_inactive_file", "total_active_file" } },
};
static const cgroup_files cgroup_cpu[] = {
    { "", "/sys/fs/cgroup", "cpu.max", NULL, { NULL } },
    { "cpu", "/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us", { NULL } },
};

/* A small text file of the kernel, NUL-terminated. */
static bool read_text(const char *path, char *buf, size_t cap)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    ssize_t got = 0;

    buf[0] = '\0';
    if (fd < 0)
        return false;
    while (n < cap - 1 && (got = read_some(fd, buf + n, cap - 1 - n)) > 0)
        n += (size_t)got;
    close(fd);
    buf[n] = '\0';
    return got >= 0;
}

/* The number after the line start `key`; dflt when there is none. */
static uint64_t text_field(const char *text, const char *key, uint64_t dflt)
{
    const size_t n = strlen(key);

    for (const char *p = text; p != NULL && *p != '\0';) {
        if (strncmp(p, key, n) == 0 && (p[n] == ' ' || p[n] == ':'))
            return strtoull(p + n + 1, NULL, 10);
        p = strchr(p, '\n');
        p = p != NULL ? p + 1 : NULL;
    }
    return dflt;
}

/* A file of the group at `dir`; false when it is missing. */
static bool cgroup_read(const char *dir, const char *name, char *buf, size_t cap)
{
    char path[4096];
    const int len = snprintf(path, sizeof(path), "%s/%s", dir, name);

    return len > 0 && (size_t)len < sizeof(path) && read_text(path, buf, cap);
}

/* The path of our group for one controller out of /proc/self/cgroup, whose lines are
 * "id:controller,controller:path". */
static bool cgroup_path(const char *text, const char *controller, hx_str *out)
{
    for (const char *line = text; *line != '\0';) {
        const char *end = strchrnul(line, '\n');
        const char *name = memchr(line, ':', (size_t)(end - line));
        const char *path =
            name != NULL ? memchr(name + 1, ':', (size_t)(end - name - 1)) : NULL;

        for (const char *p = name; path != NULL && p < path;) {
            const char *stop = p + 1 + strcspn(p + 1, ",:");

            if (hx_str_is((hx_str) { p + 1, (size_t)(stop - p - 1) }, controller)) {
                *out = (hx_str) { path + 1, (size_t)(end - path - 1) };
                return true;
            }
            p = stop;
        }
        line = *end != '\0' ? end + 1 : end;
    }
    return false;
}

/* Calls fn for our group and every group around it: limits hold all the way up, and a
 * container may show its group at the mount itself instead of at the path. root is ""
 * but for tests. */
static void cgroup_walk(const char *root, const cgroup_files *f,
                        void (*fn)(void *ud, const char *dir, const cgroup_files *f),
                        void *ud)
{
    char text[8192], path[4096], dir[4096];
    hx_str group;
    size_t base;
    int len;

    len = snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    if (len < 0 || (size_t)len >= sizeof(path) || !read_text(path, text, sizeof(text)) ||
        !cgroup_path(text, f->controller, &group))
        return;
    len = snprintf(dir, sizeof(dir), "%s%s%.*s", root, f->mount, (int)group.n, group.p);
    if (len < 0 || (size_t)len >= sizeof(dir))
        return;
    base = strlen(root) + strlen(f->mount);
    for (;;) {
        char *slash;

        fn(ud, dir, f);
        slash = strrchr(dir + base, '/');
        if (slash == NULL)
            return;
        *slash = '\0';
    }
}

typedef struct {
    uint64_t limit, left;
} mem_limits;

static void lower_memory(void *ud, const char *dir, const cgroup_files *f)
{
    mem_limits *m = ud;
    char text[16384];
    uint64_t limit, usage = 0, cache;

    /* "max" and a missing file are no limit. */
    if (!cgroup_read(dir, f->limit, text, sizeof(text)) ||
        !isdigit((unsigned char)text[0]))
        return;
    limit = strtoull(text, NULL, 10);
    if (cgroup_read(dir, f->usage, text, sizeof(text)))
        usage = strtoull(text, NULL, 10);
    /* Files in memory, the checkpoint just read among them, are charged to us but go when
     * we ask for more. */
    cgroup_read(dir, "memory.stat", text, sizeof(text));
    cache = text_field(text, f->cache[0], 0) + text_field(text, f->cache[1], 0);
    usage -= HX_MIN(usage, cache);
    m->limit = HX_MIN(m->limit, limit);
    m->left = HX_MIN(m->left, limit - HX_MIN(limit, usage));
}

static mem_limits memory_limits(const char *root)
{
    const uint64_t physical =
        (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    mem_limits m = { physical, physical };
    char text[8192], path[4096];
    const int len = snprintf(path, sizeof(path), "%s/proc/meminfo", root);

    if (len > 0 && (size_t)len < sizeof(path) && read_text(path, text, sizeof(text))) {
        m.limit = text_field(text, "MemTotal", physical / 1024) * 1024;
        m.left = text_field(text, "MemAvailable", m.limit / 1024) * 1024;
    }
    for (size_t i = 0; i < HX_LEN(cgroup_memory); i++)
        cgroup_walk(root, &cgroup_memory[i], lower_memory, &m);
    return m;
}

uint64_t hx_sys_mem_bytes(void)
{
    return memory_limits("").limit;
}

uint64_t hx_sys_mem_free_bytes(void)
{
    return memory_limits("").left;
}

uint64_t hx_sys_rss_bytes(void)
{
    char text[256];
    unsigned long long total, resident;

    if (!read_text("/proc/self/statm", text, sizeof(text)) ||
        sscanf(text, "%llu %llu", &total, &resident) != 2)
        return 0;
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Version 2 has "quota period" in one file, version 1 in two; no quota is "max" or -1. */
static void lower_cpus(void *ud, const char *dir, const cgroup_files *f)
{
    int *n_cpu = ud;
    char text[256];
    int64_t quota, period = 0;
    char *end;

    if (!cgroup_read(dir, f->limit, text, sizeof(text)))
        return;
    quota = strtoll(text, &end, 10);
    if (f->usage == NULL)
        period = strtoll(end, NULL, 10);
    else if (cgroup_read(dir, f->usage, text, sizeof(text)))
        period = strtoll(text, NULL, 10);
    if (quota > 0 && period > 0)
        *n_cpu = (int)HX_MIN(*n_cpu, (quota - 1) / period + 1);
}

static int cpu_limit(const char *root, int n_cpu)
{
    for (size_t i = 0; i < HX_LEN(cgroup_cpu); i++)
        cgroup_walk(root, &cgroup_cpu[i], lower_cpus, &n_cpu);
    return HX_MAX(n_cpu, 1);
}

#define MAX_CPU 8192

typedef union {
    cpu_set_t set; /* has room for 1,024 only */
    unsigned char bytes[MAX_CPU / 8];
} cpu_mask;

int hx_sys_n_cpu(void)
{
    cpu_mask mask;
    int n = 1;

    if (sched_getaffinity(0, sizeof(mask), &mask.set) == 0)
        n = CPU_COUNT_S(sizeof(mask), &mask.set);
    return cpu_limit("", n);
}

/* ---- worker pool ----------------------------------------------------- */

#define MAX_THREAD 1024
/* Long enough to bridge the caller's serial work between two runs of a decode step
 * (about 5 us), short enough that an idle engine costs nothing. */
#define SPIN_US 50
/* Longer than those gaps, so that a worker in a step keeps its CPU. With one of two CPUs
 * taken by another process, yielding brought the 99th percentile of a run of 2 parts of
 * 2 us from 70 us to 4 us (Zen 3, virtual machine, 2026). */
#define YIELD_US 10
/* Parts per thread: a thread that lost its CPU for a moment holds up a quarter of its
 * share, not all of it. */
#define PARTS_PER_THREAD 4
#define TICKET_STOP      UINT64_MAX

typedef struct {
    hx_pool *pool;
    pthread_t thread;
    int id; /* 1..n-1; 0 is whoever calls hx_pool_run() */
} pool_worker;

/* A run is published as `ticket` = run number << 32 | parts not yet taken. Who counts it
 * down by compare-and-swap owns one part. The other fields of the job change only while
 * no part is open, so an owner may read them; a worker that comes late finds either no
 * part or one of the present run, never a stale one. The caller waits for parts, not for
 * workers: one that sleeps or lost its CPU delays nothing. */
struct hx_pool {
    int n;
    _Atomic int64_t spin_us;
    pool_worker *worker; /* [n - 1] */
    int *cpu;            /* [MAX_CPU] those to take in turn, or NULL */
    int n_cpu;           /* … how many */
    bool pinned;         /* the caller: */
    pthread_t caller;
    cpu_mask caller_mask; /* as it was before */

    hx_pool_fn *fn;
    void *ud;
    int64_t part_items, n_longer; /* the first n_longer parts have one item more */
    uint32_t n_part, run;

    _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
    _Alignas(CACHE_LINE) _Atomic uint32_t open; /* parts not yet finished */
    _Alignas(CACHE_LINE) _Atomic int n_asleep;  /* workers in wake */
    _Atomic bool caller_asleep;
    pthread_mutex_t lock; /* held to sleep and to wake; guards nothing else */
    pthread_cond_t wake, done;
};

static void relax_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins until ready() or the time is over. After YIELD_US it lets others have the CPU:
 * where the machine is shared, the one it waits for may be queued behind it. */
static bool pool_spin(hx_pool *p, bool (*ready)(hx_pool *p))
{
    int64_t begin, spent;

    if (ready(p))
        return true;
    if (p->spin_us == 0)
        return false;
    begin = hx_now_us();
    do {
        for (int i = 0; i < 16; i++) {
            relax_cpu();
            if (ready(p))
                return true;
        }
        spent = hx_now_us() - begin;
        if (spent >= YIELD_US)
            sched_yield();
    } while (spent < p->spin_us);
    return false;
}

/* Also true for TICKET_STOP. */
static bool has_parts(hx_pool *p)
{
    return (uint32_t)atomic_load(&p->ticket) != 0;
}

static bool all_done(hx_pool *p)
{
    return atomic_load(&p->open) == 0;
}

/* Takes and runs parts until there are none. They are reported all at once: until then
 * the run stays open, so the ticket cannot turn into another run's in between. */
static void pool_work(hx_pool *p, int worker)
{
    uint64_t t = atomic_load(&p->ticket);
    uint32_t n_done = 0;

    while ((uint32_t)t != 0 && t != TICKET_STOP) {
        int64_t i, begin, end;

        if (!atomic_compare_exchange_weak(&p->ticket, &t, t - 1))
            continue;
        i = (int64_t)p->n_part - (int64_t)(uint32_t)t;
        begin = i * p->part_items + HX_MIN(i, p->n_longer);
        end = begin + p->part_items + (i < p->n_longer);
        p->fn(p->ud, begin, end, worker);
        n_done++;
        t = atomic_load(&p->ticket);
    }
    if (n_done == 0 || atomic_fetch_sub(&p->open, n_done) != n_done)
        return;
    if (atomic_load(&p->caller_asleep)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_signal(&p->done);
        pthread_mutex_unlock(&p->lock);
    }
}

static void *pool_main(void *arg)
{
    const pool_worker *w = arg;
    hx_pool *p = w->pool;

    while (atomic_load(&p->ticket) != TICKET_STOP) {
        if (!pool_spin(p, has_parts)) {
            pthread_mutex_lock(&p->lock);
            atomic_fetch_add(&p->n_asleep, 1);
            while (!has_parts(p))
                pthread_cond_wait(&p->wake, &p->lock);
            atomic_fetch_sub(&p->n_asleep, 1);
            pthread_mutex_unlock(&p->lock);
        }
        pool_work(p, w->id);
    }
    return NULL;
}

/* The sequentially consistent order of "publish, then look who sleeps" here and "say I
 * sleep, then look for work" there makes sure one side sees the other. */
static void pool_publish(hx_pool *p, uint64_t ticket)
{
    atomic_exchange(&p->ticket, ticket);
    if (atomic_load(&p->n_asleep) == 0)
        return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static int pin_thread(pthread_t thread, int cpu)
{
    cpu_mask mask;

    CPU_ZERO_S(sizeof(mask), &mask.set);
    CPU_SET_S((size_t)cpu, sizeof(mask), &mask.set);
    return pthread_setaffinity_np(thread, sizeof(mask), &mask.set);
}

/* The caller is known only when it calls. hx_pool_close() undoes this if it can, as
 * threads that the caller makes later would share its one CPU. */
static void pin_caller(hx_pool *p)
{
    p->pinned = true;
    p->caller = pthread_self();
    pthread_getaffinity_np(p->caller, sizeof(p->caller_mask), &p->caller_mask.set);
    pin_thread(p->caller, p->cpu[0]);
}

void hx_pool_run(hx_pool *p, int64_t n, int64_t grain, hx_pool_fn *fn, void *ud)
{
    int64_t n_part;

    if (n <= 0)
        return;
    if (p != NULL && p->cpu != NULL && !p->pinned)
        pin_caller(p);
    n_part =
        p != NULL && p->n > 1 ? HX_MIN(n / HX_MAX(grain, 1), p->n * PARTS_PER_THREAD) : 1;
    if (n_part <= 1) {
        fn(ud, 0, n, 0);
        return;
    }
    hx_assert(all_done(p));
    p->fn = fn;
    p->ud = ud;
    p->n_part = (uint32_t)n_part;
    p->part_items = n / n_part;
    p->n_longer = n % n_part;
    atomic_store_explicit(&p->open, p->n_part, memory_order_relaxed);
    pool_publish(p, (uint64_t)(++p->run) << 32 | p->n_part);
    pool_work(p, 0);
    if (pool_spin(p, all_done))
        return;
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->caller_asleep, true);
    while (!all_done(p))
        pthread_cond_wait(&p->done, &p->lock);
    atomic_store(&p->caller_asleep, false);
    pthread_mutex_unlock(&p->lock);
}

/* "0-3,8" to numbers; out has room for cap. Returns how many, 0 when it is no list. */
static int parse_cpus(const char *s, int *out, int cap)
{
    int n = 0;

    for (;;) {
        long first, last;
        char *end;

        if (!isdigit((unsigned char)*s))
            return 0;
        first = last = strtol(s, &end, 10);
        if (*end == '-') {
            if (!isdigit((unsigned char)end[1]))
                return 0;
            last = strtol(end + 1, &end, 10);
        }
        if (last < first || last >= MAX_CPU)
            return 0;
        for (; first <= last && n < cap; first++)
            out[n++] = (int)first;
        if (*end == '\0')
            return n;
        if (*end != ',')
            return 0;
        s = end + 1;
    }
}

static int pool_read_cpus(hx_pool *p, const char *cpus, hx_err *err)
{
    cpu_mask may = { 0 };

    if ((p->cpu = hx_new(int, MAX_CPU)) == NULL)
        return hx_fail(err, HX_ENOMEM, "worker pool: no memory for a list of CPUs");
    p->n_cpu = parse_cpus(cpus, p->cpu, MAX_CPU);
    if (p->n_cpu == 0)
        return hx_fail(err, HX_EARG, "cpus \"%s\": expected a list like 0-3,8", cpus);
    sched_getaffinity(0, sizeof(may), &may.set);
    for (int i = 0; i < p->n_cpu; i++)
        if (!CPU_ISSET_S((size_t)p->cpu[i], sizeof(may), &may.set))
            return hx_fail(err, HX_EARG, "cpus \"%s\": this process may not use CPU %d",
                           cpus, p->cpu[i]);
    return 0;
}

/* With fewer CPUs than threads they go round. */
static int cpu_of(const hx_pool *p, int id)
{
    return p->cpu[id % p->n_cpu];
}

static int pool_start(hx_pool *p, int id, hx_err *err)
{
    pool_worker *w = &p->worker[id - 1];
    char name[24]; /* Linux takes 15: ids have up to 4 digits */
    int rc;

    *w = (pool_worker) { .pool = p, .id = id };
    if ((rc = pthread_create(&w->thread, NULL, pool_main, w)) != 0) {
        w->id = 0;
        errno = rc;
        return hx_fail(err, HX_ENOMEM, "worker pool: thread %d of %d: %m", id, p->n);
    }
    snprintf(name, sizeof(name), "hoist-cpu-%d", id);
    pthread_setname_np(w->thread, name);
    if (p->cpu != NULL && (rc = pin_thread(w->thread, cpu_of(p, id))) != 0) {
        errno = rc;
        return hx_fail(err, HX_EARG, "worker pool: cannot use CPU %d: %m", cpu_of(p, id));
    }
    return 0;
}

int hx_pool_open(hx_pool **out, int n_threads, const char *cpus, hx_err *err)
{
    int n_cpu = hx_sys_n_cpu(), rc = 0;
    sigset_t all, before;
    hx_pool *p = NULL;

    *out = NULL;
    if (n_threads < 0 || n_threads > MAX_THREAD)
        return hx_fail(err, HX_EARG, "worker pool: %d threads, expected 1 to %d",
                       n_threads, MAX_THREAD);
    if ((p = hx_new(hx_pool, 1)) == NULL)
        return hx_fail(err, HX_ENOMEM, "worker pool: no memory");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    if (cpus != NULL) {
        if ((rc = pool_read_cpus(p, cpus, err)) != 0)
            goto fail;
        n_cpu = HX_MIN(n_cpu, p->n_cpu);
    }
    p->n = n_threads > 0 ? n_threads : HX_MIN(n_cpu, MAX_THREAD);
    if ((p->worker = hx_new(pool_worker, p->n)) == NULL) {
        rc = hx_fail(err, HX_ENOMEM, "worker pool: no memory for %d threads", p->n);
        goto fail;
    }
    /* Threads without a CPU of their own would spin in the way of those that work. */
    p->spin_us = p->n <= n_cpu ? SPIN_US : 0;
    /* Signals are for the threads of the program, which expects them there; a fault is for
     * the thread that makes it. */
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int id = 1; id < p->n && rc == 0; id++)
        rc = pool_start(p, id, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        goto fail;
    *out = p;
    return 0;
fail:
    hx_pool_close(p);
    return rc;
}

void hx_pool_close(hx_pool *p)
{
    if (p == NULL)
        return;
    pool_publish(p, TICKET_STOP);
    for (int id = 1; p->worker != NULL && id < p->n; id++)
        if (p->worker[id - 1].id == id)
            pthread_join(p->worker[id - 1].thread, NULL);
    if (p->pinned && pthread_equal(p->caller, pthread_self()))
        pthread_setaffinity_np(p->caller, sizeof(p->caller_mask), &p->caller_mask.set);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    hx_free(p->cpu);
    hx_free(p->worker);
    hx_free(p);
}

void hx_pool_set_spin(hx_pool *p, int64_t spin_us)
{
    if (p != NULL && p->spin_us > 0)
        p->spin_us = spin_us;
}

int hx_pool_size(const hx_pool *p)
{
    return p != NULL ? p->n : 1;
}

/* ---- counters -------------------------------------------------------- */

void hx_count(hx_counter c, int64_t add)
{
    atomic_fetch_add_explicit(&g.counter[c], add, memory_order_relaxed);
}

int64_t hx_counted(hx_counter c)
{
    return atomic_load_explicit(&g.counter[c], memory_order_relaxed);
}

void hx_counters_write(hx_sb *b)
{
#define X(name, type, help)                                                              \
    hx_sb_printf(b,                                                                      \
                 "# HELP hoist_" #name " " help "\n# TYPE hoist_" #name " " type         \
                 "\nhoist_" #name " %" PRId64 "\n",                                      \
                 hx_counted(HX_C_##name));
    HX_COUNTERS(X)
#undef X
}

/* ---- histograms ------------------------------------------------------ */

void hx_observe(hx_histogram h, double v)
{
    size_t i = 0;

    while (i < HISTOGRAM_BUCKETS && v > bucket_bound[i])
        i++;
    atomic_fetch_add_explicit(&g.histogram[h].n[i], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&g.histogram[h].sum_micro, (int64_t)(v * 1e6),
                              memory_order_relaxed);
}

static void write_histogram(hx_sb *b, hx_histogram h, const char *name, const char *help,
                            const char *labels)
{
    const char *comma = *labels != '\0' ? "," : "";
    int64_t n = 0;

    hx_sb_printf(b, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
    for (size_t i = 0; i <= HISTOGRAM_BUCKETS; i++) {
        n += atomic_load_explicit(&g.histogram[h].n[i], memory_order_relaxed);
        if (i < HISTOGRAM_BUCKETS)
            hx_sb_printf(b, "%s_bucket{%s%sle=\"%g\"} %" PRId64 "\n", name, labels, comma,
                         bucket_bound[i], n);
    }
    hx_sb_printf(b, "%s_bucket{%s%sle=\"+Inf\"} %" PRId64 "\n", name, labels, comma, n);
    hx_sb_printf(
        b, "%s_sum{%s} %.6f\n%s_count{%s} %" PRId64 "\n", name, labels,
        (double)atomic_load_explicit(&g.histogram[h].sum_micro, memory_order_relaxed) /
            1e6,
        name, labels, n);
}

void hx_histograms_write(hx_sb *b, const char *prefix, const char *labels)
{
    static const struct {
        const char *name, *help;
    } all[] = {
#define X(name, help) { #name, help },
        HX_HISTOGRAMS(X)
#undef X
    };

    for (size_t i = 0; i < HX_LEN(all); i++) {
        char name[96];

        snprintf(name, sizeof name, "%s%s", prefix, all[i].name);
        write_histogram(b, (hx_histogram)i, name, all[i].help, labels);
    }
}
