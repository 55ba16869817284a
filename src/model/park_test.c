/* park_test.c - files of kept states: what was written is read back, what was not written
 * whole is never believed, whatever the disk does and whenever the process dies. */
#include "park.c" /* before cmocka, whose mocks take common names */

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cmocka.h>

#define PAGE_BYTES 5000
#define STATE      777

static char folder[] = "/tmp/hoist-park-XXXXXX";

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder + sizeof folder - 7, "XXXXXX");
    return mkdtemp(folder) == NULL;
}

static int empty_folder(void)
{
    DIR *d = opendir(folder);
    struct dirent *f;
    char path[PATH_BYTES];
    int n = 0;

    while (d != NULL && (f = readdir(d)) != NULL)
        if (f->d_name[0] != '.') {
            snprintf(path, sizeof path, "%s/%.200s", folder, f->d_name);
            unlink(path);
            n++;
        }
    closedir(d);
    return n;
}

/* What a folder's first user meets: neither files nor a lock. */
static void clear_folder(void)
{
    char path[PATH_BYTES];

    empty_folder();
    snprintf(path, sizeof path, "%s/" LOCK_FILE, folder);
    unlink(path);
}

static int remove_folder(void **state)
{
    (void)state;
    clear_folder();
    return rmdir(folder);
}

static void path_of(const hx_park_name *name, char out[PATH_BYTES])
{
    char file[FILE_BYTES];

    file_of(name, SUFFIX, file);
    snprintf(out, PATH_BYTES, "%s/%s", folder, file);
}

static hx_park *open_with(uint8_t identity, uint64_t disk, uint64_t day,
                          const hx_park_sys *sys)
{
    hx_park_opt opt = { .dir = folder,
                        .disk_bytes = disk,
                        .day_bytes = day,
                        .page_bytes = PAGE_BYTES,
                        .sys = sys };
    hx_park *p;
    hx_err err = { 0 };

    opt.identity[0] = identity;
    if (hx_park_open(&p, &opt, &err) != 0)
        fail_msg("%s", err.msg);
    return p;
}

static hx_park *open_plain(void)
{
    return open_with(1, 1u << 30, 1u << 30, NULL);
}

/* Content that follows from a seed. */
static hx_blob *blob_of(uint64_t seed, size_t n)
{
    hx_blob *b = hx_blob_new(n, NULL);

    for (size_t i = 0; i < n; i++)
        b->p[i] = (uint8_t)hx_rng_at(seed, i);
    return b;
}

static void queue_file(hx_park *p, uint64_t seed, int64_t from, int64_t n,
                       const hx_park_name *parent)
{
    int32_t token[512];
    uint64_t decoded[8];
    hx_blob *page[8];
    hx_park_head h = {
        .from = from, .n = n, .pend = 1, .token = token, .decoded = decoded
    };

    if (parent != NULL)
        h.parent = *parent;
    for (int64_t i = 0; i < n - from; i++)
        token[i] = (int32_t)(seed * 1000 + (uint64_t)(from + i));
    for (int64_t i = 0; i < pages_in(from, n); i++) {
        decoded[i] = seed + (uint64_t)i;
        page[i] = blob_of(seed * 100 + (uint64_t)i, PAGE_BYTES);
    }
    assert_true(hx_park_write(p, &h, page, blob_of(seed, STATE), NULL));
}

/* The answer to what was queued; a look may come before it. */
static void poll_answer(hx_park *p, hx_park_done *d)
{
    do
        assert_true(hx_park_poll(p, d, true));
    while (d->kind == HX_PARK_LOOK);
}

static int write_one(hx_park *p, uint64_t seed, int64_t from, int64_t n,
                     const hx_park_name *parent, hx_park_name *name)
{
    hx_park_done d;

    queue_file(p, seed, from, n, parent);
    poll_answer(p, &d);
    assert_int_equal(d.kind, HX_PARK_WRITE);
    if (name != NULL)
        *name = d.name;
    return d.rc;
}

/* Reads a file and compares all of it. Returns the read's code. */
static int check_file(hx_park *p, const hx_park_name *name, uint64_t seed, int64_t n_page)
{
    hx_park_done d;

    assert_true(hx_park_read(p, name, true, NULL, NULL));
    poll_answer(p, &d);
    if (d.rc != 0)
        return d.rc;
    assert_int_equal(d.n_page, n_page);
    for (int64_t i = 0; i < n_page; i++) {
        hx_blob *want = blob_of(seed * 100 + (uint64_t)i, PAGE_BYTES);

        assert_memory_equal(d.page[i]->p, want->p, PAGE_BYTES);
        hx_blob_unref(want);
        hx_blob_unref(d.page[i]);
    }
    hx_blob *want = blob_of(seed, STATE);
    assert_int_equal(d.state->n, STATE);
    assert_memory_equal(d.state->p, want->p, STATE);
    hx_blob_unref(want);
    hx_blob_unref(d.state);
    hx_free(d.page);
    return 0;
}

static int64_t count_found(const hx_park *p)
{
    int64_t n = 0;

    while (hx_park_found(p, n) != NULL)
        n++;
    return n;
}

static void test_round_trip(void **state)
{
    hx_park *p = open_plain();
    hx_park_name a, b;
    char path[PATH_BYTES];
    uint8_t *raw, sum[32];
    size_t n;

    (void)state;
    assert_int_equal(write_one(p, 1, 0, 192, NULL, &a), 0);
    assert_int_equal(write_one(p, 2, 192, 300, &a, &b), 0);
    assert_int_equal(check_file(p, &a, 1, 3), 0);
    assert_int_equal(check_file(p, &b, 2, 2), 0);
    hx_park_close(p);
    p = open_plain(); /* a new run */
    assert_int_equal(count_found(p), 2);
    const hx_park_head *x = hx_park_found(p, 0), *y = hx_park_found(p, 1);
    assert_true(x->from == 0 && x->n == 192 && y->from == 192 && y->n == 300);
    assert_memory_equal(y->parent.b, x->name.b, 32);
    assert_memory_equal(x->name.b, a.b, 32);
    assert_int_equal(x->token[5], 1005);
    assert_int_equal(y->token[107], 2000 + 192 + 107);
    assert_true(y->decoded[1] == 3 && y->pend == 1 && y->state_bytes == STATE);
    hx_park_found_end(p);
    assert_int_equal(check_file(p, &b, 2, 2), 0);
    /* The name is the digest of the head, as the format says. */
    path_of(&a, path);
    assert_int_equal(hx_file_read(path, 1u << 20, (char **)&raw, &n, NULL), 0);
    assert_int_equal(n, 256 + 3 * 8 + 192 * 4 + 4 * 16 + 3 * PAGE_BYTES + STATE);
    assert_true(sha256(raw, 256 + 3 * 8 + 192 * 4 + 4 * 16, sum));
    assert_memory_equal(sum, a.b, 32);
    hx_free(raw);
    hx_park_delete(p, &a);
    assert_int_equal(check_file(p, &a, 1, 3), HX_EFORMAT);
    hx_park_close(p);
    empty_folder();
}

/* One byte changed anywhere, or the file cut anywhere: found out at the next open or at
 * reading, and the file is gone; its neighbours are not. */
static void test_corrupt(void **state)
{
    (void)state;
    for (uint64_t k = 0; k < 120; k++) {
        hx_park *p = open_plain();
        hx_park_name a, b;
        char path[PATH_BYTES];
        struct stat st;
        bool gone;

        assert_int_equal(write_one(p, 1, 0, 128, NULL, &a), 0);
        assert_int_equal(write_one(p, 2, 0, 70, NULL, &b), 0);
        path_of(&a, path);
        hx_park_close(p);
        const int fd = open(path, O_RDWR);
        assert_int_equal(fstat(fd, &st), 0);
        if (k % 3 == 0) {
            assert_int_equal(
                ftruncate(fd, (off_t)(hx_rng_at(k, 1) % (uint64_t)st.st_size)), 0);
        } else {
            /* Heads are a small part of a file: half the changes go there. */
            const off_t at =
                (off_t)(hx_rng_at(k, 2) % (k % 3 == 1 ? 800 : (uint64_t)st.st_size));
            uint8_t c;

            assert_int_equal(pread(fd, &c, 1, at), 1);
            c ^= (uint8_t)(1 << k % 8);
            assert_int_equal(pwrite(fd, &c, 1, at), 1);
        }
        close(fd);
        p = open_plain();
        /* Identity and version are read first: such a file is another build's. */
        gone = count_found(p) == 1;
        if (!gone) {
            assert_int_equal(count_found(p), 2);
            assert_int_equal(check_file(p, &a, 1, 2), HX_EFORMAT);
            assert_false(hx_file_exists(path));
        } else if (hx_file_exists(path)) {
            assert_true(hx_park_drop_foreign(p));
        }
        assert_int_equal(check_file(p, &b, 2, 2), 0);
        assert_false(hx_file_exists(path)); /* what was queued before is done */
        hx_park_close(p);
        empty_folder();
    }
}

/* Files that are not ours stay, and what only has such a name; those of another model are
 * skipped, and go first when room is needed; leftovers go. */
static void test_other_files(void **state)
{
    static const char hex[] =
        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    char left[FILE_BYTES];
    const char *const names[] = { "notes.txt", "abc.park", left, "abc.part", hex };
    char path[PATH_BYTES], to[PATH_BYTES];
    hx_park_name a, pipe = { "p" }, link = { "l" }, dir = { "d" };
    hx_park *p;
    int fd = -1;

    (void)state;
    snprintf(left, sizeof left, "%s.part", hex);
    for (size_t i = 0; i < HX_LEN(names); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        fd = open(path, O_WRONLY | O_CREAT, 0600);
        assert_int_equal(write(fd, "hello", 5), 5);
        close(fd);
    }
    p = open_with(2, 1u << 30, 1u << 30, NULL);
    assert_int_equal(write_one(p, 1, 0, 64, NULL, &a), 0);
    hx_park_close(p);
    /* A pipe that nobody writes to, a link to a good file, a folder. */
    path_of(&pipe, path);
    assert_int_equal(mkfifo(path, 0600), 0);
    path_of(&a, to);
    path_of(&link, path);
    assert_int_equal(symlink(to, path), 0);
    path_of(&dir, path);
    assert_int_equal(mkdir(path, 0700), 0);
    alarm(30);
    p = open_plain();
    alarm(0);
    assert_int_equal(count_found(p), 0);
    assert_int_equal(check_file(p, &link, 1, 1), HX_EIO);
    assert_int_equal(rmdir(path), 0);
    assert_true(hx_park_bytes(p) > PAGE_BYTES);
    assert_true(hx_park_drop_foreign(p));
    assert_false(hx_park_drop_foreign(p));
    assert_int_equal(hx_park_bytes(p), 0);
    hx_park_close(p);
    for (size_t i = 0; i < HX_LEN(names); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        assert_int_equal(hx_file_exists(path), i != 2);
    }
    assert_int_equal(empty_folder(), 6);
}

/* ---- a disk that fails ------------------------------------------------------ */

static int64_t fail_in; /* calls until one fails; negative: none */

static bool fails(void)
{
    return fail_in >= 0 && fail_in-- == 0;
}

static int64_t bad_read(int fd, void *p, size_t n, int64_t at)
{
    if (fails()) {
        errno = EIO;
        return -1;
    }
    return pread(fd, p, n > 1000 ? n / 2 : n, at); /* always short */
}

static int64_t bad_write(int fd, const void *p, size_t n)
{
    if (fails()) {
        errno = ENOSPC;
        return -1;
    }
    return write(fd, p, n > 1000 ? n / 2 : n); /* always short */
}

static int bad_sync(int fd)
{
    (void)fd;
    if (fails()) {
        errno = EIO;
        return -1;
    }
    return 0;
}

static int bad_rename(int dir, const char *from, const char *to)
{
    if (fails()) {
        errno = EIO;
        return -1;
    }
    return renameat(dir, from, dir, to);
}

static const hx_park_sys bad_sys = { bad_read, bad_write, bad_sync, bad_rename,
                                     sys_lock };

/* Short writes lose nothing; whichever call fails, the write says so and leaves no file. */
static void test_failing_disk(void **state)
{
    hx_park *p = open_with(1, 1u << 30, 1u << 30, &bad_sys);
    hx_park_name a;
    int64_t k = 0;

    (void)state;
    for (;; k++) {
        fail_in = k;
        const int rc = write_one(p, 3, 0, 128, NULL, &a);
        if (fail_in >= 0)
            break; /* nothing failed any more */
        assert_int_equal(rc, HX_EIO);
        assert_int_equal(empty_folder(), 0);
        assert_int_equal(hx_park_bytes(p), 0);
    }
    fail_in = -1;
    printf("%lld calls, each failed once\n", (long long)k);
    assert_true(k > 10);
    /* Nor does it take the same content that lies there already. */
    fail_in = 0;
    assert_int_equal(write_one(p, 3, 0, 128, NULL, &a), HX_EIO);
    fail_in = -1;
    assert_int_equal(check_file(p, &a, 3, 2), 0);
    hx_park_close(p);
    empty_folder();
}

static int no_sync_of_folders(int fd)
{
    struct stat st;

    errno = EINVAL;
    return fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? -1 : 0;
}

static int lock_error;

static int bad_lock(int fd)
{
    (void)fd;
    errno = lock_error;
    return -1;
}

/* File systems that cannot sync a folder, or have no locks, can hold files all the same; a
 * call that was interrupted says nothing about locks. */
static void test_poor_file_system(void **state)
{
    hx_park_sys poor = plain;
    hx_park_name a;

    (void)state;
    poor.sync = no_sync_of_folders;
    poor.lock = bad_lock;
    for (int i = 0; i < 2; i++) {
        lock_error = i == 0 ? ENOLCK : EINTR;
        hx_park *p = open_with(1, 1u << 30, 1u << 30, &poor);
        assert_int_equal(hx_park_is_ours(p), i == 0);
        assert_int_equal(write_one(p, 3, 0, 128, NULL, &a), i == 0 ? 0 : HX_EIO);
        assert_int_equal(empty_folder(), i == 0);
        hx_park_close(p);
    }
}

static int64_t files_left(void)
{
    DIR *d = opendir(folder);
    struct dirent *f;
    int64_t n = 0;

    while ((f = readdir(d)) != NULL)
        n += f->d_name[0] != '.';
    closedir(d);
    return n;
}

/* Whichever read fails, at open or later, the file stays for the next run; here it is given
 * up first when room is needed, until it is written again. */
static void test_failing_reads(void **state)
{
    hx_park *p = open_plain();
    hx_park_name a;
    int64_t n_open = 0, n_read = 0;

    (void)state;
    assert_int_equal(write_one(p, 3, 0, 128, NULL, &a), 0);
    hx_park_close(p);
    for (bool failed = true; failed; n_open++) {
        fail_in = n_open;
        p = open_with(1, 1u << 30, 1u << 30, &bad_sys);
        failed = fail_in < 0;
        assert_int_equal(count_found(p), failed ? 0 : 1);
        hx_park_close(p);
        assert_int_equal(files_left(), 1);
    }
    for (bool failed = true; failed; n_read++) {
        fail_in = -1;
        p = open_with(1, 1u << 30, 1u << 30, &bad_sys);
        fail_in = n_read;
        const int rc = check_file(p, &a, 3, 2);
        failed = fail_in < 0;
        assert_int_equal(rc, failed ? HX_EIO : 0);
        assert_int_equal(files_left(), 1);
        fail_in = -1;
        assert_int_equal(check_file(p, &a, 3, 2), 0); /* the disk has recovered */
        if (failed && n_read % 2 == 0) {
            assert_true(hx_park_drop_foreign(p));
            assert_int_equal(hx_park_bytes(p), 0);
        }
        if (failed)
            assert_int_equal(write_one(p, 3, 0, 128, NULL, &a), 0);
        assert_false(hx_park_drop_foreign(p));
        hx_park_close(p);
    }
    printf("%lld reads at open, %lld later, each failed once\n", (long long)n_open - 1,
           (long long)n_read - 1);
    assert_true(n_open > 2 && n_read > 6);
    /* Memory that runs out while a file is read is no fault of the file either. */
    p = open_plain();
    for (int64_t k = 1, made = 1; made >= k; k++) {
        hx_park_done d;

        hx_test_fail_at(k);
        if (hx_park_read(p, &a, true, NULL, NULL)) {
            assert_true(hx_park_poll(p, &d, true));
            assert_true(d.rc == 0 || d.rc == HX_ENOMEM || d.rc == HX_EIO);
            for (int64_t i = 0; i < d.n_page; i++)
                hx_blob_unref(d.page[i]);
            hx_free(d.page);
            hx_blob_unref(d.state);
        }
        made = hx_test_fail_at(0);
        assert_int_equal(files_left(), 1);
    }
    assert_int_equal(check_file(p, &a, 3, 2), 0);
    hx_park_close(p);
    empty_folder();
}

static void test_budgets(void **state)
{
    hx_park *p = open_with(1, 30000, 50000, NULL);
    const hx_park_head h = { .n = 128, .state_bytes = STATE };
    const uint64_t bytes = hx_park_file_bytes(p, &h);
    hx_park_name a;

    (void)state;
    hx_park_close(p);
    clear_folder();
    p = open_with(1, 30000, 50000, NULL);
    assert_true(bytes > 2 * PAGE_BYTES && bytes < 2 * PAGE_BYTES + 3000);
    for (int i = 0; i < 4; i++) { /* written and deleted: the day counts all of them */
        assert_true(hx_park_fits_day(p, bytes));
        assert_true(hx_park_fits_disk(p, bytes));
        assert_int_equal(write_one(p, (uint64_t)i + 1, 0, 128, NULL, &a), 0);
        assert_int_equal(hx_park_bytes(p), bytes);
        assert_true(hx_park_fits_disk(p, bytes));
        assert_false(hx_park_fits_disk(p, 2 * bytes));
        if (i < 3)
            hx_park_delete(p, &a);
    }
    assert_false(hx_park_fits_day(p, bytes));
    hx_park_close(p);
    p = open_with(1, 30000, 50000, NULL);
    assert_false(hx_park_fits_day(p, bytes)); /* and so does the next run */
    assert_true(hx_park_fits_day(p, 50000 - 4 * bytes));
    hx_park_close(p);
    /* Another day, whichever way the clock went, and a file of nonsense begin anew. */
    for (int i = 0; i < 3; i++) {
        char path[PATH_BYTES];

        snprintf(path, sizeof path, "%s/" LOCK_FILE, folder);
        FILE *f = fopen(path, "w");
        fprintf(f, i == 2 ? "what" : "%lld 49999\n",
                (long long)time(NULL) / 86400 + (i == 0 ? -1 : 1));
        fclose(f);
        p = open_with(1, 30000, 50000, NULL);
        assert_true(hx_park_fits_day(p, 50000));
        assert_false(hx_park_fits_day(p, 50001));
        hx_park_close(p);
    }
    empty_folder();
}

/* ---- kill -9 ---------------------------------------------------------------- */

/* Writes files and tells of each that is there for good, until it is killed. */
static void write_for_ever(int out)
{
    hx_park *p = open_plain();

    for (uint64_t seed = 1;; seed++) {
        hx_park_name name;

        if (write_one(p, seed, 0, 64 + (int64_t)(seed % 200), NULL, &name) != 0 ||
            write(out, &seed, sizeof seed) != sizeof seed ||
            write(out, &name, sizeof name) != sizeof name)
            _exit(1);
    }
}

static void test_kill(void **state)
{
    int64_t told = 0, kills = 0;
    uint64_t most_us = 20000; /* on a slow machine longer: most should have told of one */

    (void)state;
    for (uint64_t k = 0; k < 100; k++) {
        struct {
            uint64_t seed;
            hx_park_name name;
        } file[4096];
        int fd[2], n = 0, status;

        assert_int_equal(pipe(fd), 0);
        const pid_t child = fork();
        if (child == 0) {
            close(fd[0]);
            write_for_ever(fd[1]);
        }
        close(fd[1]);
        usleep((useconds_t)(1000 + hx_rng_at(k, 0) % most_us));
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        kills += WIFSIGNALED(status);
        while (n < 4096 && read(fd[0], &file[n].seed, 8) == 8 &&
               read(fd[0], &file[n].name, 32) == 32)
            n++;
        close(fd[0]);
        hx_park *p = open_plain();
        /* All that was told of is there and whole; nothing else is found that is not. */
        for (int i = 0; i < n; i++)
            assert_int_equal(check_file(p, &file[i].name, file[i].seed,
                                        pages_in(0, 64 + (int64_t)(file[i].seed % 200))),
                             0);
        for (int64_t i = 0; hx_park_found(p, i) != NULL; i++) {
            hx_park_done d;

            assert_true(hx_park_read(p, &hx_park_found(p, i)->name, true, NULL, NULL));
            assert_true(hx_park_poll(p, &d, true));
            assert_int_equal(d.rc, 0);
            for (int64_t j = 0; j < d.n_page; j++)
                hx_blob_unref(d.page[j]);
            hx_free(d.page);
            hx_blob_unref(d.state);
        }
        told += n;
        if (told < kills && most_us < 400000)
            most_us += most_us / 4;
        hx_park_close(p);
        empty_folder();
    }
    printf("%lld kills, %lld files were told of\n", (long long)kills, (long long)told);
    assert_int_equal(kills, 100);
    assert_true(told > 50);
}

/* ---- several processes ------------------------------------------------------- */

/* Until a look comes. */
static void wait_look(hx_park *p)
{
    hx_park_done d;

    for (int i = 0; i < 2000; i++) {
        if (hx_park_poll(p, &d, false)) {
            assert_int_equal(d.kind, HX_PARK_LOOK);
            return;
        }
        usleep(10000);
    }
    fail_msg("no look came");
}

static void put_file(const char *name, const char *text)
{
    char path[PATH_BYTES];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
}

/* While another process has the folder, one sees what that writes and deletes, and changes
 * nothing; once it is killed, the folder is this one's, what the day has had included. */
static void test_second(void **state)
{
    const hx_park_name broken = { "b" };
    char c, name[FILE_BYTES];
    hx_park_name a;
    int down[2], up[2], status;

    (void)state;
    clear_folder();
    assert_true(pipe(down) == 0 && pipe(up) == 0);
    const pid_t child = fork();
    if (child == 0) {
        hx_park *p = open_with(1, 60000, 100000, NULL);
        hx_park_name own;

        for (uint64_t seed = 1;; seed++) { /* a file, and then the next instead */
            if (write_one(p, seed, 0, 128, NULL, &own) != 0 ||
                write(up[1], &own, sizeof own) != sizeof own || read(down[0], &c, 1) != 1)
                _exit(1);
            hx_park_delete(p, &own);
        }
    }
    assert_int_equal(read(up[0], &a, sizeof a), sizeof a);
    hx_park *p = open_with(1, 60000, 100000, NULL);
    assert_false(hx_park_is_ours(p));
    for (uint64_t seed = 1; seed < 4; seed++) {
        assert_int_equal(count_found(p), 1);
        assert_int_equal(hx_park_find(p, &a), 0);
        assert_int_equal(check_file(p, &a, seed, 2), 0);
        assert_int_equal(write(down[1], "", 1), 1);
        assert_int_equal(read(up[0], &a, sizeof a), sizeof a);
        do /* it may come between deleting and writing */
            wait_look(p);
        while (count_found(p) == 0 || hx_park_find(p, &a) < 0);
    }
    hx_park_delete(p, &a);
    assert_int_equal(write_one(p, 9, 0, 128, NULL, NULL), HX_EIO);
    file_of(&broken, SUFFIX_TEMP, name);
    put_file(name, "x");
    file_of(&broken, SUFFIX, name);
    put_file(name, "x");
    usleep(2 * LOOK_US);
    wait_look(p);
    assert_false(hx_park_is_ours(p));
    assert_int_equal(files_left(), 3);
    assert_int_equal(count_found(p), 1);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
    while (!hx_park_is_ours(p))
        wait_look(p);
    assert_int_equal(files_left(), 1);
    assert_int_equal(check_file(p, &a, 4, 2), 0);
    const uint64_t bytes = hx_park_bytes(p);
    assert_true(bytes > 2 * PAGE_BYTES);
    assert_true(hx_park_fits_day(p, 100000 - 4 * bytes));
    assert_false(hx_park_fits_day(p, 100001 - 4 * bytes));
    assert_int_equal(write_one(p, 9, 0, 128, NULL, NULL), 0);
    hx_park_delete(p, &a);
    hx_park_close(p);
    assert_int_equal(files_left(), 1);
    for (int i = 0; i < 2; i++) {
        close(down[i]);
        close(up[i]);
    }
    clear_folder();
}

#define CAP 60000u
#define DAY 3000000u

/* Writes as long as the budgets allow, giving up any others; tells what it wrote. */
static void compete(int out, uint64_t seed)
{
    hx_park *p = open_with(1, CAP, DAY, NULL);
    const hx_park_head h = { .n = 128, .state_bytes = STATE };
    const uint64_t bytes = hx_park_file_bytes(p, &h);
    hx_park_done d;

    for (;; seed++) {
        while (hx_park_poll(p, &d, false))
            continue;
        if (!hx_park_is_ours(p) || !hx_park_fits_day(p, bytes)) {
            usleep(1000);
            continue;
        }
        while (!hx_park_fits_disk(p, bytes)) {
            const hx_park_name name = p->list.file[seed % (uint64_t)p->list.n_file].name;

            hx_park_delete(p, &name);
        }
        if (write_one(p, seed, 0, 128, NULL, NULL) != 0 ||
            write(out, &bytes, sizeof bytes) != sizeof bytes)
            _exit(1);
    }
}

static uint64_t bytes_there(void)
{
    DIR *d = opendir(folder);
    struct dirent *f;
    struct stat st;
    uint64_t sum = 0;

    while ((f = readdir(d)) != NULL)
        if (fstatat(dirfd(d), f->d_name, &st, 0) == 0 && S_ISREG(st.st_mode))
            sum += (uint64_t)st.st_size;
    closedir(d);
    return sum;
}

/* Three processes on one folder, killed and begun anew at random moments: together they keep
 * to its size and to the day's writes. */
static void test_compete(void **state)
{
    pid_t child[3] = { 0 };
    uint64_t told = 0, most = 0, bytes;
    int fd[2], n_told = 0, status;

    (void)state;
    clear_folder();
    assert_int_equal(pipe(fd), 0);
    fcntl(fd[0], F_SETFL, O_NONBLOCK);
    for (uint64_t k = 0; k < 60; k++) {
        const size_t i = (size_t)(hx_rng_at(k, 7) % 3);

        if (child[i] != 0) {
            kill(child[i], SIGKILL);
            waitpid(child[i], &status, 0);
            assert_true(WIFSIGNALED(status));
        }
        if ((child[i] = fork()) == 0)
            compete(fd[1], 1000000 * k);
        for (int j = 0; j < 50; j++) {
            most = HX_MAX(most, bytes_there());
            usleep(1000);
        }
        while (read(fd[0], &bytes, sizeof bytes) == sizeof bytes) {
            told += bytes;
            n_told++;
        }
    }
    for (size_t i = 0; i < 3; i++) {
        kill(child[i], SIGKILL);
        waitpid(child[i], &status, 0);
    }
    close(fd[0]);
    close(fd[1]);
    printf("%d files, %llu bytes written, at most %llu there\n", n_told,
           (unsigned long long)told, (unsigned long long)most);
    assert_true(n_told > 20);
    assert_true(told <= DAY);
    /* The lock's own bytes are not counted. A killed one's leftover goes when the next one
     * has the lock, before that writes. */
    assert_true(most > CAP / 2 && most <= CAP + 100);
    clear_folder();
}

/* A folder that is removed while it is used is made anew, and used anew. */
static void test_removed(void **state)
{
    hx_park *p = open_plain();
    hx_park_name a;

    (void)state;
    assert_int_equal(write_one(p, 1, 0, 64, NULL, &a), 0);
    clear_folder();
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(write_one(p, 1, 0, 64, NULL, NULL), HX_EIO);
    wait_look(p);
    assert_true(hx_park_is_ours(p));
    assert_int_equal(hx_park_bytes(p), 0);
    assert_int_equal(write_one(p, 1, 0, 64, NULL, NULL), 0);
    assert_int_equal(check_file(p, &a, 1, 1), 0);
    hx_park_close(p);
    p = open_plain();
    assert_int_equal(count_found(p), 1);
    hx_park_close(p);
    clear_folder();
}

static void test_identity(void **state)
{
    uint8_t a[32], b[32];
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_park_identify(a, "models/demo-exl3", "x", &err), 0);
    assert_int_equal(hx_park_identify(b, "models/demo-exl3", "x", &err), 0);
    assert_memory_equal(a, b, 32);
    assert_int_equal(hx_park_identify(b, "models/demo-exl3", "y", &err), 0);
    assert_memory_not_equal(a, b, 32);
    assert_int_equal(hx_park_identify(b, "synthetic:glm-5.3-flash", "x", &err), 0);
    assert_memory_not_equal(a, b, 32);
    assert_int_equal(hx_park_identify(b, folder, "x", &err), HX_EIO);
}

/* The index of files against a plain list: 500 names come, go and come again at random. */
static void test_index(void **state)
{
    enum { NAMES = 500, TURNS = 20000 };
    uint64_t bytes[NAMES] = { 0 }; /* 0: it is not there */
    hx_park p = { 0 };
    listing *l = &p.list;

    (void)state;
    for (uint64_t turn = 0; turn < TURNS; turn++) {
        const uint64_t r = hx_rng_at(5, turn), i = r % NAMES;
        entry e = { .bytes = 1 + r % 1000 };

        for (size_t b = 0; b < sizeof e.name.b; b++)
            e.name.b[b] = (uint8_t)hx_rng_at(i, b);
        entry *there = entry_of(l, &e.name);

        assert_int_equal(there != NULL ? there->bytes : 0, bytes[i]);
        if (there == NULL)
            assert_true(insert_entry(l, place_of(l, &e.name), &e));
        else
            drop_entry(&p, there);
        bytes[i] = bytes[i] == 0 ? e.bytes : 0;
        if (turn % 100 == 0) {
            uint64_t all = 0;

            for (int64_t k = 0; k < l->n_file; k++)
                assert_true(k == 0 || by_name(&l->file[k - 1], &l->file[k]) < 0);
            for (size_t k = 0; k < NAMES; k++)
                all += bytes[k];
            assert_int_equal(l->bytes, all);
            assert_true(2 * l->n_gone <= l->n_file);
        }
    }
    hx_free(l->file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_corrupt),
        cmocka_unit_test(test_index),
        cmocka_unit_test(test_other_files),
        cmocka_unit_test(test_failing_disk),
        cmocka_unit_test(test_failing_reads),
        cmocka_unit_test(test_poor_file_system),
        cmocka_unit_test(test_budgets),
        cmocka_unit_test(test_kill),
        cmocka_unit_test(test_second),
        cmocka_unit_test(test_compete),
        cmocka_unit_test(test_removed),
        cmocka_unit_test(test_identity),
    };

    return cmocka_run_group_tests_name("park", tests, make_folder, remove_folder);
}
