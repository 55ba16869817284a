/* base_test.c - memory, bytes, text, files, log, random numbers, machine limits, worker
 * pool, counters. Includes base.c to reach the Philox words and the cgroup readers. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <ctype.h>
#include <stdio.h>
#include <sys/wait.h>

#include "base/base.c"

/* ---- errors, log ----------------------------------------------------- */

static void test_errors(void **state)
{
    hx_err err = { 0 };
    char longer[400];

    (void)state;
    assert_string_equal(hx_strerror(0), "no error");
    assert_string_equal(hx_strerror(HX_ELIMIT), "limit exceeded");
    assert_string_equal(hx_strerror(-99), "unknown error");
    assert_int_equal(hx_fail(&err, HX_EIO, "%s: %d", "x", 3), HX_EIO);
    assert_int_equal(err.code, HX_EIO);
    assert_string_equal(err.msg, "x: 3");
    assert_int_equal(hx_fail(NULL, HX_EARG, "x"), HX_EARG);
    /* Whatever the offset, a cut message ends with a whole character. */
    for (size_t shift = 0; shift < 4; shift++) {
        size_t n = 0;

        while (n < shift)
            longer[n++] = '.';
        for (; n + 5 < sizeof(longer); n += 4)
            memcpy(longer + n, "\xf0\x9f\x98\x80", 4);
        longer[n] = '\0';
        hx_fail(&err, HX_EARG, "%s", longer);
        n = strlen(err.msg);
        assert_true(n > 251 && n < 256);
        assert_true(hx_utf8_ok(err.msg, n));
    }
}

typedef struct {
    int level, n;
    char line[1100];
} heard;

static void hear(void *ud, int level, const char *line)
{
    heard *h = ud;

    h->level = level;
    h->n++;
    snprintf(h->line, sizeof(h->line), "%s", line);
}

static void test_log(void **state)
{
    heard h = { 0 };

    (void)state;
    hx_log(HX_LOG_ERROR, "to nobody");
    hx_on_log(hear, &h);
    hx_log(HX_LOG_WARN, "%d of %s", 3, "x");
    assert_int_equal(h.level, HX_LOG_WARN);
    assert_string_equal(h.line, "3 of x");
    hx_on_log(NULL, NULL);
    hx_log(HX_LOG_WARN, "to nobody");
    assert_int_equal(h.n, 1);
}

static void write_line(void *ud, int level, const char *line)
{
    const int fd = *(int *)ud;

    if (level == HX_LOG_ERROR && write(fd, line, strlen(line)) < 0)
        _exit(1);
}

static void break_noalloc(void)
{
    hx_noalloc_begin("inside a step");
    hx_free(hx_alloc(1));
}

static void break_assert(void)
{
    hx_assert(1 + 1 == 3);
}

/* Runs fn in a child: it must trap, and its last line must say why. */
static void expect_panic(void (*fn)(void), const char *says)
{
    char text[512] = "";
    int fd[2], status;
    pid_t child;

    assert_int_equal(pipe(fd), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGILL, SIG_DFL);
        signal(SIGTRAP, SIG_DFL);
        hx_on_log(write_line, &fd[1]);
        fn();
        _exit(0);
    }
    close(fd[1]);
    assert_true(read(fd[0], text, sizeof(text) - 1) > 0);
    close(fd[0]);
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status) &&
                (WTERMSIG(status) == SIGILL || WTERMSIG(status) == SIGTRAP));
    assert_non_null(strstr(text, says));
}

static void test_panic(void **state)
{
    (void)state;
    expect_panic(break_noalloc, "inside a step");
    expect_panic(break_assert, "1 + 1 == 3");
    hx_noalloc_begin("outer");
    hx_noalloc_begin("inner");
    hx_noalloc_end();
    hx_noalloc_end();
    hx_free(hx_alloc(1));
}

/* ---- memory ---------------------------------------------------------- */

static void test_alloc(void **state)
{
    const int64_t live = hx_test_live_allocs();
    unsigned char *p, *q;
    size_t n;

    (void)state;
    for (size_t bytes = 0; bytes < 5000; bytes = bytes * 3 + 1) {
        p = hx_alloc(bytes);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t i = 0; i < bytes; i++)
            assert_int_equal(p[i], 0);
        hx_free(p);
    }
    assert_null(hx_alloc(SIZE_MAX));
    assert_null(hx_calloc(SIZE_MAX / 2, 3));
    assert_null(hx_new(int64_t, SIZE_MAX / 8 + 1));
    assert_false(hx_mul(SIZE_MAX, 2, &n));
    assert_true(hx_mul(SIZE_MAX, 1, &n) && n == SIZE_MAX);
    assert_true(hx_mul(0, SIZE_MAX, &n) && n == 0);
    hx_free(NULL);

    p = hx_realloc(NULL, 3);
    memcpy(p, "ab", 3);
    assert_int_equal(hx_test_live_allocs(), live + 1);
    hx_test_fail_at(1);
    assert_null(hx_realloc(p, 100));
    assert_string_equal(p, "ab");
    q = hx_realloc(p, 100000);
    assert_string_equal(q, "ab");
    q = hx_realloc(q, 0);
    assert_non_null(q);
    assert_int_equal(hx_test_live_allocs(), live + 1);
    hx_free(q);
    assert_int_equal(hx_test_live_allocs(), live);
}

static void test_fail_at(void **state)
{
    (void)state;
    hx_test_fail_at(3);
    for (int i = 1; i <= 6; i++) {
        void *p = i % 2 != 0 ? hx_alloc(8) : hx_realloc(NULL, 8);

        assert_int_equal(p == NULL, i == 3);
        hx_free(p);
    }
    assert_int_equal(hx_test_fail_at(0), 6);
    assert_int_equal(hx_test_fail_at(0), 0);
}

static void test_map(void **state)
{
    static const size_t sizes[] = { 1, 4096, 5000, 2 << 20, (2 << 20) + 1, 7 << 20 };
    const int64_t live = hx_test_live_allocs();

    (void)state;
    for (size_t i = 0; i < 2 * HX_LEN(sizes); i++) {
        const size_t bytes = sizes[i / 2];
        unsigned char *p = hx_map(bytes, i % 2 != 0);

        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 4096, 0);
        if (i % 2 != 0 && bytes >= 2 << 20)
            assert_int_equal((uintptr_t)p % (2 << 20), 0);
        for (size_t k = 0; k < bytes; k += 511)
            assert_int_equal(p[k]++, 0);
        p[bytes - 1] = 1;
        assert_int_equal(hx_test_live_allocs(), live + 1);
        hx_unmap(p, bytes);
    }
    assert_int_equal(hx_test_live_allocs(), live);
    assert_null(hx_map(0, false));
    assert_null(hx_map(SIZE_MAX, true));
    hx_unmap(NULL, 1);
}

static void test_arena(void **state)
{
    const int64_t live = hx_test_live_allocs();
    hx_arena a;
    unsigned char *p[300];

    (void)state;
    hx_arena_init(&a, 1 << 20);
    for (size_t i = 0; i < HX_LEN(p); i++) {
        p[i] = hx_arena_alloc(&a, i * 7);
        assert_non_null(p[i]);
        assert_int_equal((uintptr_t)p[i] % 16, 0);
        for (size_t k = 0; k < i * 7; k++)
            assert_int_equal(p[i][k], 0);
        memset(p[i], (int)i, i * 7);
    }
    for (size_t i = 0; i < HX_LEN(p); i++) /* nobody wrote over a neighbour */
        for (size_t k = 0; k < i * 7; k++)
            assert_int_equal(p[i][k], i & 255);
    assert_string_equal(hx_arena_dup(&a, "hello", 3), "hel");
    assert_string_equal(hx_arena_dup(&a, NULL, 0), "");
    assert_true(a.used_bytes >= 300 * 299 / 2 * 7 && a.used_bytes <= a.cap_bytes);
    assert_null(hx_arena_alloc(&a, 1 << 20));
    assert_null(hx_arena_alloc(&a, SIZE_MAX));
    assert_null(hx_arena_dup(&a, "", SIZE_MAX));
    assert_non_null(hx_arena_alloc(&a, (1 << 20) - a.used_bytes));
    assert_null(hx_arena_alloc(&a, 1));
    hx_arena_reset(&a);
    assert_int_equal(a.used_bytes, 0);
    assert_int_equal(hx_test_live_allocs(), live);
    hx_test_fail_at(1);
    assert_null(hx_arena_alloc(&a, 1));
    assert_non_null(hx_arena_alloc(&a, 1));
    hx_arena_reset(&a);
}

static void test_sb(void **state)
{
    const int64_t live = hx_test_live_allocs();
    hx_sb b = { 0 }, small = { .max = 5 };
    char want[20000];
    size_t n = 0;

    (void)state;
    for (int i = 0; i < 1000; i++) {
        n += (size_t)snprintf(want + n, sizeof(want) - n, "%d-x", i);
        hx_sb_printf(&b, "%d-", i);
        hx_sb_char(&b, 'x');
        assert_int_equal(b.n, n);
        assert_string_equal(b.p, want);
    }
    hx_test_fail_at(1);
    for (n = b.n; !b.bad; n = b.bad ? n : b.n)
        hx_sb_str(&b, "0123456789");
    assert_int_equal(b.n, n);
    hx_sb_str(&b, "later"); /* no hole in the middle */
    assert_int_equal(b.n, n);
    assert_int_equal(strlen(b.p), n);
    hx_sb_free(&b);
    assert_null(b.p);
    assert_false(b.bad);
    hx_test_fail_at(0);

    hx_sb_add(&small, "ab", 2);
    hx_sb_printf(&small, "%s", "cde");
    assert_false(small.bad);
    assert_string_equal(small.p, "abcde");
    hx_sb_char(&small, 'f');
    assert_true(small.bad);
    assert_string_equal(small.p, "abcde");
    hx_sb_free(&small);
    assert_int_equal(small.max, 5);
    hx_sb_add(&b, NULL, 0);
    hx_sb_str(&b, NULL);
    hx_sb_printf(&b, "%s", "");
    assert_false(b.bad);
    assert_int_equal(b.n, 0);
    hx_sb_free(&b);
    assert_int_equal(hx_test_live_allocs(), live);
}

/* ---- strings --------------------------------------------------------- */

static void test_str(void **state)
{
    (void)state;
    assert_true(hx_str_eq(HX_STR("a\0b"), (hx_str) { "a\0b", 3 }));
    assert_false(hx_str_eq(HX_STR("a\0b"), HX_STR("a\0c")));
    assert_true(hx_str_is(HX_STR("abc"), "abc"));
    assert_false(hx_str_is(HX_STR("abc"), "ab"));
    assert_null(hx_str_c(NULL).p);
    assert_true(hx_str_eq(hx_str_c(NULL), hx_str_c("")));
}

/* The definition: the scalar values, each by its shortest form (Unicode 15, D92). */
static int encode(uint32_t cp, unsigned char *s)
{
    const int n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;

    for (int i = n - 1; i > 0; i--, cp >>= 6)
        s[i] = (unsigned char)(0x80 + cp % 64);
    s[0] = (unsigned char)(n == 1 ? cp : (0xf00u >> n & 0xffu) + cp);
    return n;
}

static void test_utf8_scalars(void **state)
{
    (void)state;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        unsigned char s[4];
        char put[4];
        const int n = encode(cp, s);
        uint32_t got = 0;
        bool ok = true;

        if (cp >= 0xd800 && cp < 0xe000) {
            assert_int_equal(hx_utf8_next((char *)s, 4, &got), 0);
            continue;
        }
        ok = ok && hx_utf8_next((char *)s, (size_t)n, &got) == n && got == cp;
        ok = ok && hx_utf8_put(cp, put) == n && memcmp(put, s, (size_t)n) == 0;
        ok = ok && hx_utf8_bad((char *)s, (size_t)n) == 0;
        for (int cut = 0; cut < n; cut++)
            ok = ok && hx_utf8_next((char *)s, (size_t)cut, &got) == -1;
        if (!ok)
            fail_msg("U+%04X", cp);
    }
    assert_int_equal(hx_utf8_put(0xdfff, (char[4]) { 0 }), 3);
}

/* Whatever decodes must be what its scalar encodes to: together with the test above, the
 * decoder takes the definition's forms and no other. All 2^24 starts, two tails. */
static void test_utf8_others(void **state)
{
    static const unsigned char tails[] = { 0x80, 0xc0 };

    (void)state;
    for (uint32_t w = 0; w < 1u << 25; w++) {
        const unsigned char s[4] = { (unsigned char)(w >> 16), (unsigned char)(w >> 8),
                                     (unsigned char)w, tails[w >> 24] };
        unsigned char again[4];
        uint32_t cp;
        const int n = hx_utf8_next((const char *)s, 4, &cp);

        if (n != 0 && (n < 0 || cp > 0x10ffff || encode(cp, again) != n ||
                       memcmp(again, s, (size_t)n) != 0))
            fail_msg("%02x %02x %02x %02x", s[0], s[1], s[2], s[3]);
    }
}

/* The examples of the Unicode standard, tables 3-8 to 3-11; '?' is U+FFFD. */
static void test_utf8_bad(void **state)
{
    static const struct {
        const char *bytes, *want;
    } tables[] = {
        { "\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", "????????A" },
        { "\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", "????????A" },
        { "\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", "?????A??B" },
        { "\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", "????A" },
    };

    (void)state;
    for (size_t t = 0; t < HX_LEN(tables); t++) {
        const char *p = tables[t].bytes;
        char out[16];
        size_t n = 0;

        assert_false(hx_utf8_ok(p, strlen(p)));
        while (*p != '\0') {
            const size_t bad = hx_utf8_bad(p, strlen(p));

            out[n++] = bad > 0 ? '?' : *p;
            p += bad > 0 ? bad : 1;
        }
        out[n] = '\0';
        assert_string_equal(out, tables[t].want);
    }
    assert_true(hx_utf8_ok("0123456789abcd\xc3\xa9"
                           "0123456\xf0\x9f\x98\x80",
                           27));
    assert_false(hx_utf8_ok("0123456789abcd\xc3", 15));
    assert_true(hx_utf8_ok(NULL, 0));
}

static void test_parse_size(void **state)
{
    static const struct {
        const char *s;
        uint64_t bytes;
    } good[] = {
        { "0", 0 },
        { "4096", 4096 },
        { "12B", 12 },
        { "64k", 65536 },
        { "64K", 65536 },
        { "64kB", 64000 },
        { "64KiB", 65536 },
        { "1.5G", 1610612736 },
        { "1.5GB", 1500000000 },
        { "900MB", 900000000 },
        { "24GiB", 25769803776 },
        { "24 GiB", 25769803776 },
        { "2TiB", 2199023255552 },
        { "1T", 1099511627776 },
        { "1tb", 1000000000000 },
        { "7m", 7340032 },
        { "0.289kB", 289 },
        { "18446744073709551615", UINT64_MAX },
    };
    static const char *const bad[] = {
        "",
        "x",
        "-1",
        "1x",
        "1.5.2",
        "GiB",
        ".5G",
        "1 G B",
        "18446744073709551616",
        "17179869184G",
        "1kiBB",
        "0x10",
        "1e3",
        "24",
        "0.5",
        "+1",
        " 1",
    };
    uint64_t bytes;

    (void)state;
    for (size_t i = 0; i < HX_LEN(good); i++) {
        assert_int_equal(hx_parse_size(good[i].s, &bytes, NULL), 0);
        assert_int_equal(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        hx_err err = { 0 };

        if (hx_parse_size(bad[i], &bytes, &err) != HX_EARG)
            fail_msg("\"%s\" taken as %" PRIu64, bad[i], bytes);
        assert_non_null(strstr(err.msg, bad[i]));
    }
    assert_int_equal(hx_parse_size(NULL, &bytes, NULL), HX_EARG);
}

/* ---- files ----------------------------------------------------------- */

static void make_file(const char *dir, const char *name, const char *text)
{
    char path[512];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    for (char *p = path + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        mkdir(path, 0700);
        *p = '/';
    }
    f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static int temp_dir(void **state)
{
    static char dir[64];

    snprintf(dir, sizeof(dir), "/tmp/hoist-base-XXXXXX");
    *state = mkdtemp(dir);
    return *state == NULL;
}

static int remove_dir(void **state)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -r %s", (char *)*state);
    return system(command);
}

static void test_files(void **state)
{
    const char *dir = *state;
    const int64_t live = hx_test_live_allocs();
    char path[256], *text;
    hx_err err;
    hx_file f;
    size_t n;

    make_file(dir, "full", "hello\n");
    make_file(dir, "empty", "");
    snprintf(path, sizeof(path), "%s/full", dir);
    assert_true(hx_file_exists(path));
    assert_int_equal(hx_file_map(&f, path, NULL), 0);
    assert_int_equal(f.n, 6);
    assert_memory_equal(f.p, "hello\n", 6);
    hx_file_unmap(&f);
    hx_file_unmap(&f);
    for (size_t max = 0; max < 10; max++) {
        const int rc = hx_file_read(path, max, &text, &n, &err);

        assert_int_equal(rc, max < 6 ? HX_ELIMIT : 0);
        if (rc == 0)
            assert_string_equal(text, "hello\n");
        assert_int_equal(n, rc == 0 ? 6 : 0);
        hx_free(text);
    }
    assert_int_equal(hx_file_read("/proc/self/status", 1 << 20, &text, &n, NULL), 0);
    assert_true(n > 100 && strncmp(text, "Name:", 5) == 0);
    hx_free(text);

    snprintf(path, sizeof(path), "%s/empty", dir);
    assert_int_equal(hx_file_map(&f, path, &err), HX_EFORMAT);
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(hx_file_read(path, 0, &text, &n, NULL), 0);
    assert_string_equal(text, "");
    hx_free(text);
    assert_int_equal(hx_file_map(&f, dir, &err), HX_EIO);
    assert_non_null(strstr(err.msg, "folder"));
    snprintf(path, sizeof(path), "%s/none", dir);
    assert_false(hx_file_exists(path));
    assert_int_equal(hx_file_map(&f, path, &err), HX_EIO);
    assert_non_null(strstr(err.msg, "No such file"));
    assert_int_equal(hx_file_read(path, 9, &text, &n, &err), HX_EIO);
    assert_null(text);
    assert_int_equal(hx_test_live_allocs(), live);
}

static void test_file_failures(void **state)
{
    const int64_t live = hx_test_live_allocs();
    char path[256], *text;
    hx_file f;
    size_t n;
    int64_t k = 0;
    int rc = -1;

    make_file(*state, "file", "hello\n");
    snprintf(path, sizeof(path), "%s/file", (char *)*state);
    hx_test_fail_at(1);
    assert_int_equal(hx_file_map(&f, path, NULL), HX_EIO);
    assert_null(f.p);
    while (rc != 0) {
        hx_test_fail_at(++k);
        rc = hx_file_read(path, 100, &text, &n, NULL);
        assert_true(rc == 0 || rc == HX_EIO || rc == HX_ENOMEM);
        assert_int_equal(rc == 0, text != NULL);
        hx_free(text);
    }
    assert_true(k > 3); /* open, buffer and read failed in turn */
    hx_test_fail_at(0);
    assert_int_equal(hx_test_live_allocs(), live);
}

/* ---- random ---------------------------------------------------------- */

/* Known answers published with the paper (Random123, kat_vectors, philox2x64 10). */
/* A wait ends at its time, at once if that has come, and before it where somebody signals. */
static void *signal_it(void *ud)
{
    pthread_mutex_t *lock = ((void **)ud)[1];

    pthread_mutex_lock(lock);
    pthread_cond_signal(((void **)ud)[0]);
    pthread_mutex_unlock(lock);
    return NULL;
}

static void test_until(void **state)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t c;
    void *both[] = { &c, &lock };
    pthread_t t;

    (void)state;
    hx_cond_init(&c);
    pthread_mutex_lock(&lock);
    const int64_t start = hx_now_us();
    while (hx_cond_until(&c, &lock, start + 20000))
        ;
    assert_true(hx_now_us() >= start + 20000);
    assert_false(hx_cond_until(&c, &lock, start));
    assert_int_equal(pthread_create(&t, NULL, signal_it, both), 0);
    assert_true(hx_cond_until(&c, &lock, start + 60000000));
    pthread_mutex_unlock(&lock);
    pthread_join(t, NULL);
    pthread_cond_destroy(&c);
}

static void test_hex(void **state)
{
    (void)state;
    for (int c = -1; c < 256; c++) {
        const char text[] = { (char)c, '\0' };
        char *end;
        const long v = strtol(text, &end, 16);

        assert_int_equal(hx_hex_digit(c), c > 0 && isxdigit(c) && *end == '\0' ? v : -1);
    }
}

static void test_philox(void **state)
{
    static const struct {
        u64_pair counter;
        uint64_t key;
        u64_pair want;
    } known[] = {
        { { 0, 0 }, 0, { 0xca00a0459843d731, 0x66c24222c9a845b5 } },
        { { UINT64_MAX, UINT64_MAX },
          UINT64_MAX,
          { 0x65b021d60cd8310f, 0x4d02f3222f86df20 } },
        { { 0x243f6a8885a308d3, 0x13198a2e03707344 },
          0xa4093822299f31d0,
          { 0x0a5e742c2997341c, 0xb0f883d38000de5d } },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(known); i++) {
        const u64_pair got = philox(known[i].counter, known[i].key);

        assert_int_equal(got.a, known[i].want.a);
        assert_int_equal(got.b, known[i].want.b);
    }
    assert_int_equal(hx_rng_at(0, 0), 0xca00a0459843d731);
}

/* Bounds are five standard errors of n samples. */
static void test_random(void **state)
{
    enum { N = 1 << 20 };
    double sum = 0, normal = 0, square = 0, fourth = 0;

    (void)state;
    for (uint64_t i = 0; i < N; i++) {
        const double u = hx_rng_unit(7, i), z = hx_rng_normal(i, 7);

        assert_true(u >= 0 && u < 1 && isfinite(z));
        sum += u;
        normal += z;
        square += z * z;
        fourth += z * z * z * z;
    }
    assert_true(fabs(sum / N - 0.5) < 5 * sqrt(1.0 / 12 / N));
    assert_true(fabs(normal / N) < 5 / sqrt(N));
    assert_true(fabs(square / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(fourth / N - 3) < 5 * sqrt(96.0 / N));
}

/* ---- this machine ---------------------------------------------------- */

static void test_machine(void **state)
{
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    const int64_t us = hx_now_us();
    uint64_t before = hx_sys_rss_bytes(), after;
    unsigned char *p = hx_map(64 << 20, false);

    (void)state;
    assert_non_null(p);
    memset(p, 1, 64 << 20);
    after = hx_sys_rss_bytes();
    assert_true(before > 1 << 20 && after > before + (60 << 20));
    hx_unmap(p, 64 << 20);
    assert_true(hx_sys_mem_bytes() > 64 << 20);
    assert_true(hx_sys_mem_free_bytes() <= hx_sys_mem_bytes());
    assert_in_range(hx_sys_n_cpu(), 1, online);
    usleep(2000);
    assert_in_range(hx_now_us() - us, 2000, 60000000);
}

/* Resident bytes of the mapping at p. */
static size_t resident(const void *p, size_t n)
{
    unsigned char page[64];
    size_t k = 0;

    assert_true(n / 4096 <= sizeof page);
    assert_int_equal(mincore((void *)(uintptr_t)p, n, page), 0);
    for (size_t i = 0; i < n / 4096; i++)
        k += page[i] & 1;
    return k * 4096;
}

/* Whole pages go, what lies beside them stays; a file's bytes come back. */
static void test_map_drop(void **state)
{
    enum { N = 16 * 4096 };
    char path[300];
    uint8_t *p = hx_map(N, false);
    hx_file f;
    hx_sb b = { 0 };

    assert_non_null(p);
    memset(p, 7, N);
    assert_int_equal(resident(p, N), N);
    hx_map_drop(p + 1, 2 * 4096, true); /* one whole page */
    assert_int_equal(resident(p, N), N - 4096);
    assert_int_equal(p[4095], 7);
    assert_int_equal(p[4096], 0);
    assert_int_equal(p[2 * 4096], 7);
    hx_map_drop(p + 1, 4095, false); /* none */
    assert_int_equal(p[1], 7);
    hx_map_drop(p, N, true);
    assert_int_equal(resident(p, N), 0);
    hx_unmap(p, N);
    snprintf(path, sizeof path, "%s/f", (const char *)*state);
    for (int i = 0; i < N; i++)
        hx_sb_char(&b, (char)(i % 251));
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    assert_int_equal(fwrite(b.p, 1, b.n, out), N);
    fclose(out);
    assert_int_equal(hx_file_map(&f, path, NULL), 0);
    assert_memory_equal(f.p, b.p, N);
    hx_map_drop(f.p, N, false);
    assert_memory_equal(f.p, b.p, N);
    hx_map_drop(f.p, N, true);
    assert_memory_equal(f.p, b.p, N);
    hx_file_unmap(&f);
    hx_sb_free(&b);
}

/* Trees that look like /proc and /sys/fs/cgroup of containers. */
static void test_cgroup_v2(void **state)
{
    const char *dir = *state;

    make_file(dir, "proc/meminfo",
              "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n");
    make_file(dir, "proc/self/cgroup", "0::/a.slice/b.scope\n");
    make_file(dir, "sys/fs/cgroup/a.slice/b.scope/memory.max", "max\n");
    assert_int_equal(memory_limits(dir).limit, 1000 * 1024);
    assert_int_equal(memory_limits(dir).left, 800 * 1024);
    assert_int_equal(cpu_limit(dir, 8), 8);
    /* A limit of the group around ours holds too; idle page cache counts as free. */
    make_file(dir, "sys/fs/cgroup/a.slice/memory.max", "500000\n");
    make_file(dir, "sys/fs/cgroup/a.slice/memory.current", "400000\n");
    make_file(dir, "sys/fs/cgroup/a.slice/memory.stat",
              "anon 1\ninactive_file 30000\nactive_file 20000\n");
    make_file(dir, "sys/fs/cgroup/a.slice/cpu.max", "250000 100000\n");
    make_file(dir, "sys/fs/cgroup/a.slice/b.scope/cpu.max", "max 100000\n");
    assert_int_equal(memory_limits(dir).limit, 500000);
    assert_int_equal(memory_limits(dir).left, 150000);
    assert_int_equal(cpu_limit(dir, 8), 3);
    assert_int_equal(cpu_limit(dir, 2), 2);
    make_file(dir, "sys/fs/cgroup/cpu.max", "1000 100000\n");
    assert_int_equal(cpu_limit(dir, 8), 1);
}

static void test_cgroup_v1(void **state)
{
    const char *dir = *state;

    /* The path is the host's; inside, the group is at the mount. */
    make_file(dir, "proc/self/cgroup",
              "12:cpuset:/x\n5:cpu,cpuacct:/docker/1\n"
              "4:memory:/docker/1\n0::/\n");
    make_file(dir, "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 800 kB\n");
    make_file(dir, "sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n");
    make_file(dir, "sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n");
    make_file(dir, "sys/fs/cgroup/memory/memory.stat",
              "inactive_file 7\n"
              "total_inactive_file 15000\n"
              "total_active_file 5000\n");
    make_file(dir, "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "200000\n");
    make_file(dir, "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000\n");
    make_file(dir, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    make_file(dir, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_int_equal(memory_limits(dir).limit, 300000);
    assert_int_equal(memory_limits(dir).left, 220000);
    assert_int_equal(cpu_limit(dir, 8), 2);
    make_file(dir, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_int_equal(memory_limits(dir).limit, 1000 * 1024);
}

/* ---- worker pool ----------------------------------------------------- */

typedef struct {
    int32_t *hits; /* [n] how often each item ran */
    int64_t n, grain;
    int n_worker;
    _Atomic int64_t n_call, n_bad;
} pool_job;

static void count_hits(void *ud, int64_t begin, int64_t end, int worker)
{
    pool_job *j = ud;

    atomic_fetch_add(&j->n_call, 1);
    if (begin < 0 || end <= begin || end > j->n || worker < 0 || worker >= j->n_worker ||
        (end - begin < j->grain && j->n_call > 1))
        atomic_fetch_add(&j->n_bad, 1);
    for (int64_t i = begin; i < end; i++)
        j->hits[i]++;
}

static void check_run(hx_pool *p, int64_t n, int64_t grain)
{
    pool_job j = { .n = n, .grain = grain, .n_worker = hx_pool_size(p) };

    j.hits = hx_new(int32_t, n + 1);
    assert_non_null(j.hits);
    hx_pool_run(p, n, grain, count_hits, &j);
    assert_int_equal(j.n_bad, 0);
    assert_true(n <= 0 || j.n_call >= 1);
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(j.hits[i], 1);
    hx_free(j.hits);
}

static void test_pool(void **state)
{
    const int64_t live = hx_test_live_allocs();

    (void)state;
    check_run(NULL, 100, 1);
    for (int threads = 1; threads <= 9; threads++) {
        hx_pool *p;

        assert_int_equal(hx_pool_open(&p, threads, NULL, NULL), 0);
        assert_int_equal(hx_pool_size(p), threads);
        for (int64_t n = 0; n < 200; n += 1 + n / 8)
            for (int64_t grain = 0; grain < 40; grain = 3 * grain + 1)
                check_run(p, n, grain);
        usleep((useconds_t)threads * 100); /* workers asleep, or about to be */
        check_run(p, 1000, 1);
        hx_pool_close(p);
    }
    hx_pool_close(NULL);
    assert_int_equal(hx_pool_size(NULL), 1);
    assert_int_equal(hx_test_live_allocs(), live);
}

static void add_to(void *ud, int64_t begin, int64_t end, int worker)
{
    int64_t *sum = ud;

    (void)worker;
    for (int64_t i = begin; i < end; i++)
        sum[i * 8]++;
}

/* Many short runs with pauses around the spinning time: every part runs before the call
 * returns, or a plain (unsynchronised) sum goes wrong. */
static void test_pool_storm(void **state)
{
    enum { N = 8, RUNS = 20000 };
    int64_t sum[N * 8] = { 0 };
    hx_pool *p;

    (void)state;
    for (int threads = 2; threads <= 6; threads += 2) {
        assert_int_equal(hx_pool_open(&p, threads, NULL, NULL), 0);
        memset(sum, 0, sizeof(sum));
        for (int r = 1; r <= RUNS / threads; r++) {
            hx_pool_run(p, N, 1, add_to, sum);
            for (int i = 0; i < N; i++)
                if (sum[i * 8] != r)
                    fail_msg("run %d item %d: %d", r, i, (int)sum[i * 8]);
            if (r % 64 == 0) {
                const int64_t end = hx_now_us() + SPIN_US - 5 + r % 13;

                while (hx_now_us() < end)
                    continue;
            }
        }
        hx_pool_close(p);
    }
}

/* Workers that take long: the caller falls asleep and must be woken. */
static void add_slowly(void *ud, int64_t begin, int64_t end, int worker)
{
    if (worker != 0)
        usleep(4 * SPIN_US);
    else
        usleep(SPIN_US / 2); /* leaves parts for the others */
    add_to(ud, begin, end, worker);
}

static void test_pool_waits(void **state)
{
    enum { N = 8, RUNS = 100 };
    int64_t sum[N * 8];
    hx_pool *p;

    (void)state;
    alarm(60); /* a lost wake-up would wait for ever */
    for (int threads = 2; threads <= 6; threads += 2) {
        assert_int_equal(hx_pool_open(&p, threads, NULL, NULL), 0);
        memset(sum, 0, sizeof(sum));
        for (int r = 1; r <= RUNS; r++) {
            hx_pool_run(p, N, 1, add_slowly, sum);
            for (int i = 0; i < N; i++)
                assert_int_equal(sum[i * 8], r);
        }
        hx_pool_close(p);
    }
    alarm(0);
}

/* The one CPU this thread may use, -1 when there are more. */
static void note_cpu(void *ud, int64_t begin, int64_t end, int worker)
{
    _Atomic int *cpu = ud;
    cpu_mask mask = { 0 };

    (void)begin, (void)end;
    sched_getaffinity(0, sizeof(mask), &mask.set);
    if (CPU_COUNT_S(sizeof(mask), &mask.set) == 1)
        atomic_store(&cpu[worker], sched_getcpu());
    usleep(1000); /* leaves parts for the others */
}

static void test_pool_pinned(void **state)
{
    cpu_mask before = { 0 }, after = { 0 };
    _Atomic int cpu[2] = { -1, -1 };
    int list[2], n = 0;
    char text[32];
    hx_pool *p;

    (void)state;
    sched_getaffinity(0, sizeof(before), &before.set);
    for (int i = 0; i < MAX_CPU && n < 2; i++)
        if (CPU_ISSET_S((size_t)i, sizeof(before), &before.set))
            list[n++] = i;
    if (n < 2) {
        print_message("SKIP test_pool_pinned: needs 2 CPUs\n");
        skip();
    }
    snprintf(text, sizeof(text), "%d", list[1]);
    assert_int_equal(hx_pool_open(&p, 0, text, NULL), 0);
    assert_int_equal(hx_pool_size(p), 1); /* a thread for each that is named */
    hx_pool_close(p);
    snprintf(text, sizeof(text), "%d,%d", list[1], list[0]);
    assert_int_equal(hx_pool_open(&p, 0, text, NULL), 0);
    assert_int_equal(hx_pool_size(p), 2);
    for (int i = 0; i < 100 && cpu[1] < 0; i++)
        hx_pool_run(p, 8, 1, note_cpu, cpu);
    assert_int_equal(cpu[0], list[1]);
    assert_int_equal(cpu[1], list[0]);
    hx_pool_close(p);
    sched_getaffinity(0, sizeof(after), &after.set);
    assert_memory_equal(&before, &after, sizeof(before));
}

static void test_pool_errors(void **state)
{
    static const char *const bad[] = { "",     "a",   "0-", "-1",    "3-1",
                                       "0,,1", "0 1", "0,", "99999", "8191" };
    const int64_t live = hx_test_live_allocs();
    int list[8], rc = -1;
    hx_pool *p;
    hx_err err;

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        assert_int_equal(hx_pool_open(&p, 2, bad[i], &err), HX_EARG);
        assert_null(p);
        assert_non_null(strstr(err.msg, bad[i]));
    }
    assert_int_equal(hx_pool_open(&p, -1, NULL, &err), HX_EARG);
    assert_int_equal(hx_pool_open(&p, 1, "0-8191", &err),
                     HX_EARG); /* not only the first */
    assert_int_equal(hx_pool_open(&p, MAX_THREAD + 1, NULL, &err), HX_EARG);
    assert_int_equal(parse_cpus("0-3,8,10-11", list, 8), 7);
    assert_memory_equal(list, ((int[]) { 0, 1, 2, 3, 8, 10, 11 }), 7 * sizeof(int));
    assert_int_equal(parse_cpus("0-8191", list, 8), 8);
    for (int64_t k = 1; rc != 0; k++) {
        hx_test_fail_at(k);
        rc = hx_pool_open(&p, 3, NULL, NULL);
        assert_int_equal(rc, k <= 2 ? HX_ENOMEM : 0);
        hx_pool_close(p);
    }
    hx_test_fail_at(0);
    assert_int_equal(hx_test_live_allocs(), live);
}

/* ---- counters -------------------------------------------------------- */

static void test_counters(void **state)
{
    hx_sb b = { 0 };
    int lines = 0;

    (void)state;
    hx_count(HX_C_requests_total, 2);
    hx_count(HX_C_requests_total, 3);
    hx_count(HX_C_http_connections, -1);
    assert_int_equal(hx_counted(HX_C_requests_total), 5);
    hx_counters_write(&b);
    assert_non_null(
        strstr(b.p, "\n# HELP hoist_requests_total Requests taken.\n"
                    "# TYPE hoist_requests_total counter\nhoist_requests_total 5\n"));
    assert_non_null(
        strstr(b.p, "# TYPE hoist_http_connections gauge\nhoist_http_connections -1\n"));
    for (size_t i = 0; i < b.n; i++)
        lines += b.p[i] == '\n';
    assert_int_equal(lines, 3 * HX_N_COUNTER);
    hx_sb_free(&b);
}

#define IN_DIR(test) cmocka_unit_test_setup_teardown(test, temp_dir, remove_dir)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_panic),
        cmocka_unit_test(test_alloc),
        cmocka_unit_test(test_fail_at),
        cmocka_unit_test(test_map),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_sb),
        cmocka_unit_test(test_str),
        cmocka_unit_test(test_utf8_scalars),
        cmocka_unit_test(test_utf8_others),
        cmocka_unit_test(test_utf8_bad),
        cmocka_unit_test(test_parse_size),
        IN_DIR(test_files),
        IN_DIR(test_file_failures),
        cmocka_unit_test(test_until),
        cmocka_unit_test(test_hex),
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_machine),
        IN_DIR(test_map_drop),
        IN_DIR(test_cgroup_v2),
        IN_DIR(test_cgroup_v1),
        cmocka_unit_test(test_pool),
        cmocka_unit_test(test_pool_storm),
        cmocka_unit_test(test_pool_waits),
        cmocka_unit_test(test_pool_pinned),
        cmocka_unit_test(test_pool_errors),
        cmocka_unit_test(test_counters),
    };

    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
