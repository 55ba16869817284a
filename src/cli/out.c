/* out.c - what commands write: errors, whole files, sizes for people, a line of progress.
 * Called by every command. */
#include <errno.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/cli.h"

int cli_fail(const hx_err *err)
{
    fprintf(stderr, "hoist: %s\n", err->msg);
    return 1;
}

int cli_write(const char *path, const hx_sb *b, hx_err *err)
{
    FILE *f;
    bool good;

    if (b->bad)
        return hx_fail(err, HX_ENOMEM, "%s: no memory for what goes there", path);
    if ((f = fopen(path, "w")) == NULL)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    good = fwrite(b->p, 1, b->n, f) == b->n;
    good = fclose(f) == 0 && good;
    return good ? 0 : hx_fail(err, HX_EIO, "%s: write failed: %s", path, strerror(errno));
}

int cli_try_write(const char *path)
{
    FILE *f = path != NULL ? fopen(path, "a") : NULL;

    if (path != NULL && f == NULL) {
        fprintf(stderr, "hoist: %s: %s\n", path, strerror(errno));
        return 1;
    }
    if (f != NULL)
        fclose(f);
    return 0;
}

void cli_bytes(char out[32], uint64_t n)
{
    static const char *const unit[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    double v = (double)n;
    size_t u = 0;

    while (v >= 1024 && u + 1 < HX_LEN(unit)) {
        v /= 1024;
        u++;
    }
    snprintf(out, 32, u == 0 ? "%.0f %s" : "%.1f %s", v, unit[u]);
}

void cli_progress(const char *fmt, ...)
{
    struct winsize size = { 0 };
    char line[128];
    int width = 79;
    va_list ap;

    if (isatty(2) != 1)
        return;
    if (ioctl(2, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        width = HX_MIN(width, size.ws_col - 1);
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\r%-*.*s\r", width, width, line);
}
