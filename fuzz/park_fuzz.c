/* park_fuzz.c - any bytes as the file of a kept state: the scan takes it for what it is, never
 * reads past it, and what it believes is consistent. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    char dir[] = "/tmp/hoist-park-fuzz-XXXXXX", path[128], name[65] = { 0 };
    const hx_park_head *h;
    hx_park *p;

    /* The first 32 bytes are the name. */
    if (size < 32 || mkdtemp(dir) == NULL)
        return 0;
    for (int i = 0; i < 32; i++) {
        name[2 * i] = digits[data[i] >> 4];
        name[2 * i + 1] = digits[data[i] & 15];
    }
    snprintf(path, sizeof path, "%s/%s.park", dir, name);
    const int fd = open(path, O_WRONLY | O_CREAT, 0600);
    hx_assert(fd >= 0 && write(fd, data + 32, size - 32) == (ssize_t)(size - 32));
    close(fd);
    const hx_park_opt opt = {
        .dir = dir, .disk_bytes = 1 << 20, .day_bytes = 1 << 20, .page_bytes = 64
    };
    hx_assert(hx_park_open(&p, &opt, NULL) == 0);
    for (int64_t i = 0; (h = hx_park_found(p, i)) != NULL; i++) {
        int64_t sum = 0;

        for (int64_t k = 0; k < h->n - h->from; k++)
            sum += h->token[k];
        hx_assert(h->from < h->n && h->pend <= HX_PEND_MAX && sum != INT64_MIN);
    }
    hx_park_close(p);
    unlink(path);
    rmdir(dir);
    return 0;
}
