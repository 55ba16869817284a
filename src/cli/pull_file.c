/* pull_file.c - files that `hoist pull` fills: their parts, what an earlier run left, hashes.
 * Called by pull.c. Knows no network. */
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/pull.h"

#define MAP_MAGIC "hoistmap"

/* The head of a map file; the counters of all parts follow. */
typedef struct {
    char magic[8];
    uint64_t size, part_bytes, n_part;
    char hash[64];
} map_head;

static int path_of(char path[4096], const char *dir, const char *name, const char *suffix,
                   hx_err *err)
{
    if (snprintf(path, 4096, "%s/%s%s", dir, name, suffix) >= 4096)
        return hx_fail(err, HX_EARG, "%s: name too long", name);
    return 0;
}

uint64_t pull_file_part_len(const pull_file *f, int64_t part)
{
    if (f->whole)
        return f->size;
    return HX_MIN(PULL_PART_BYTES, f->size - (uint64_t)part * PULL_PART_BYTES);
}

uint64_t pull_file_have(const pull_file *f)
{
    uint64_t n = 0;

    if (f->there || f->finished)
        return f->size;
    for (int64_t i = 0; i < f->n_part; i++)
        n += f->done[i];
    return n;
}

/* Counters of an earlier run, where they are of this very file. */
static void read_map(pull_file *f, const char *path)
{
    map_head h;
    const size_t bytes = (size_t)f->n_part * sizeof *f->done;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool good = fd >= 0 && read(fd, &h, sizeof h) == (ssize_t)sizeof h &&
                memcmp(h.magic, MAP_MAGIC, 8) == 0 && h.size == f->size &&
                h.part_bytes == PULL_PART_BYTES && h.n_part == (uint64_t)f->n_part &&
                memcmp(h.hash, f->hash, sizeof h.hash) == 0 &&
                read(fd, f->done, bytes) == (ssize_t)bytes;

    for (int64_t i = 0; good && i < f->n_part; i++)
        good = f->done[i] <= pull_file_part_len(f, i);
    if (!good)
        memset(f->done, 0, bytes);
    if (fd >= 0)
        close(fd);
}

int pull_file_look(pull_file *f, const char *dir, hx_err *err)
{
    char path[4096];
    struct stat st;
    int rc;

    f->fd = f->map_fd = -1;
    f->n_part =
        (int64_t)HX_MAX((f->size + PULL_PART_BYTES - 1) / PULL_PART_BYTES, (uint64_t)1);
    f->done = hx_new(uint64_t, f->n_part);
    f->busy = hx_new(bool, f->n_part);
    if (f->done == NULL || f->busy == NULL)
        return hx_fail(err, HX_ENOMEM, "%s: no memory", f->name);
    if ((rc = path_of(path, dir, f->name, "", err)) != 0)
        return rc;
    f->there =
        stat(path, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size == f->size;
    if (f->there || (rc = path_of(path, dir, f->name, ".partial", err)) != 0)
        return rc;
    if (stat(path, &st) == 0 && (uint64_t)st.st_size == f->size &&
        (rc = path_of(path, dir, f->name, ".partial.map", err)) == 0)
        read_map(f, path);
    return rc;
}

/* Folders above dir/name. */
static int make_folders(const char *dir, const char *name, hx_err *err)
{
    char path[4096];

    for (const char *slash = strchr(name, '/'); slash != NULL;
         slash = strchr(slash + 1, '/')) {
        snprintf(path, sizeof path, "%s/%.*s", dir, (int)(slash - name), name);
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    }
    return 0;
}

static bool write_map(const pull_file *f)
{
    map_head h = { .size = f->size,
                   .part_bytes = PULL_PART_BYTES,
                   .n_part = (uint64_t)f->n_part };
    const size_t bytes = (size_t)f->n_part * sizeof *f->done;

    memcpy(h.magic, MAP_MAGIC, sizeof h.magic);
    memcpy(h.hash, f->hash, sizeof h.hash);
    return pwrite(f->map_fd, &h, sizeof h, 0) == (ssize_t)sizeof h &&
           pwrite(f->map_fd, f->done, bytes, sizeof h) == (ssize_t)bytes;
}

int pull_file_begin(pull_file *f, const char *dir, hx_err *err)
{
    char path[4096], map[4096];
    int rc;

    if (f->fd >= 0)
        return 0;
    if ((rc = make_folders(dir, f->name, err)) != 0 ||
        (rc = path_of(path, dir, f->name, ".partial", err)) != 0 ||
        (rc = path_of(map, dir, f->name, ".partial.map", err)) != 0)
        return rc;
    if ((f->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666)) < 0 ||
        ftruncate(f->fd, (off_t)f->size) != 0)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    if ((f->map_fd = open(map, O_RDWR | O_CREAT | O_CLOEXEC, 0666)) < 0 || !write_map(f))
        return hx_fail(err, HX_EIO, "%s: %s", map, strerror(errno));
    return 0;
}

int pull_file_put(const pull_file *f, uint64_t at, const void *p, size_t n, hx_err *err)
{
    while (n > 0) {
        const ssize_t put = pwrite(f->fd, p, n, (off_t)at);

        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return hx_fail(err, HX_EIO, "%s: %s; what has come is kept, run pull again",
                           f->name, put < 0 ? strerror(errno) : "nothing written");
        p = (const char *)p + put;
        at += (uint64_t)put;
        n -= (size_t)put;
    }
    return 0;
}

/* Lost in a crash it only costs bytes that come again, so a failure is no error. */
void pull_file_note(const pull_file *f, int64_t part)
{
    const off_t at = (off_t)(sizeof(map_head) + (size_t)part * sizeof *f->done);

    if (!f->whole && pwrite(f->map_fd, &f->done[part], sizeof *f->done, at) < 0)
        hx_log(HX_LOG_DEBUG, "%s: map: %m", f->name);
}

int pull_file_restart(pull_file *f, bool whole, hx_err *err)
{
    memset(f->done, 0, (size_t)f->n_part * sizeof *f->done);
    memset(f->busy, 0, (size_t)f->n_part * sizeof *f->busy);
    f->there = f->checking = false;
    f->era++;
    if (f->map_fd >= 0 && !write_map(f))
        return hx_fail(err, HX_EIO, "%s: its map: %s", f->name, strerror(errno));
    f->whole |= whole;
    if (whole)
        f->n_part = 1;
    return 0;
}

/* ---- hashes ---------------------------------------------------------------- */

static int hash_file(int fd, const pull_file *f, const _Atomic bool *stop, char hex[65],
                     hx_err *err)
{
    const bool git = strlen(f->hash) == 40;
    const size_t cap = 1u << 20;
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    uint8_t *buf = hx_alloc(cap), md[EVP_MAX_MD_SIZE];
    unsigned n_md = 0;
    char head[64];
    ssize_t got = 1;
    bool good = ctx != NULL && buf != NULL &&
                EVP_DigestInit_ex(ctx, git ? EVP_sha1() : EVP_sha256(), NULL) == 1;

    if (good && git) { /* a git object is hashed with its kind and size before it */
        const int n =
            snprintf(head, sizeof head, "blob %llu", (unsigned long long)f->size);

        good = EVP_DigestUpdate(ctx, head, (size_t)n + 1) == 1;
    }
    for (off_t at = 0; good && got > 0 && !(stop != NULL && atomic_load(stop)); at += got)
        if ((got = pread(fd, buf, cap, at)) > 0)
            good = EVP_DigestUpdate(ctx, buf, (size_t)got) == 1;
    good = good && EVP_DigestFinal_ex(ctx, md, &n_md) == 1;
    for (unsigned i = 0; good && i < n_md && i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", md[i]);
    EVP_MD_CTX_free(ctx);
    hx_free(buf);
    if (got < 0)
        return hx_fail(err, HX_EIO, "%s: %s", f->name, strerror(errno));
    if (stop != NULL && atomic_load(stop))
        return hx_fail(err, HX_ECANCEL, "pull: stopped");
    return good ? 0 : hx_fail(err, HX_ENOMEM, "%s: no memory to hash it", f->name);
}

int pull_file_check(const pull_file *f, const char *dir, const _Atomic bool *stop,
                    char got[65], hx_err *err)
{
    char path[4096];
    int fd, rc;

    got[0] = '\0';
    if ((rc = path_of(path, dir, f->name, f->there ? "" : ".partial", err)) != 0)
        return rc;
    if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    rc = hash_file(fd, f, stop, got, err);
    close(fd);
    return rc != 0 ? rc : strcmp(got, f->hash) == 0;
}

int pull_file_finish(pull_file *f, const char *dir, hx_err *err)
{
    char from[4096], to[4096];
    int rc = 0;

    if (!f->there) {
        if ((rc = path_of(from, dir, f->name, ".partial", err)) != 0 ||
            (rc = path_of(to, dir, f->name, "", err)) != 0)
            return rc;
        if (fsync(f->fd) != 0 || rename(from, to) != 0)
            return hx_fail(err, HX_EIO, "%s: %s", to, strerror(errno));
        if ((rc = path_of(from, dir, f->name, ".partial.map", err)) != 0)
            return rc;
        unlink(from);
    }
    pull_file_close(f);
    return 0;
}

void pull_file_close(pull_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    if (f->map_fd >= 0)
        close(f->map_fd);
    f->fd = f->map_fd = -1;
}
