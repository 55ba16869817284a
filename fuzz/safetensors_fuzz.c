/* safetensors_fuzz.c - a checkpoint from a stranger: a whole safetensors file, or (first
 * byte
 * '@') an index beside a good one. Whatever opens is bound as matrices and vectors too.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "model/weights.h"

static char dir[] = "/tmp/hoist-fuzz-XXXXXX";

static void remove_folder(void)
{
    static const char *const names[] = { "model.safetensors",
                                         "model.safetensors.index.json" };
    char path[128];

    for (size_t i = 0; i < HX_LEN(names); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        unlink(path);
    }
    rmdir(dir);
}

static void put(const char *name, const void *p, size_t n)
{
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if ((fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600)) < 0 ||
        write(fd, p, n) != (ssize_t)n)
        __builtin_trap();
    close(fd);
}

static void bind(hx_weights *w, const hx_tensor *t)
{
    hx_vec_want vec = { .name = t->name };
    hx_mat_want mat = { t->name, t->dim[0], t->dim[1], 4, 4 };
    char key[256];
    hx_err err;
    hx_mat m;
    hx_buf buf;

    memcpy(vec.dim, t->dim, sizeof(vec.dim));
    (void)hx_weights_vec(w, &vec, &buf, &err);
    (void)hx_weights_mat(w, &mat, &m, &err);
    if (snprintf(key, sizeof(key), "%s", t->name) >= (int)sizeof(key) ||
        strrchr(key, '.') == NULL)
        return;
    *strrchr(key, '.') = '\0';
    mat.key = key;
    (void)hx_weights_mat(w, &mat, &m, &err);
    mat.n = 128; /* the matrix of the seed with every EXL3 part */
    mat.k = 128;
    (void)hx_weights_mat(w, &mat, &m, &err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char good[] = "\x3f\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[4],"
                               "\"data_offsets\":[0,4]}}          1234";
    const bool index = size > 0 && data[0] == '@';
    hx_weights *w;
    hx_err err;

    if (dir[sizeof(dir) - 2] == 'X') {
        if (mkdtemp(dir) == NULL || atexit(remove_folder) != 0)
            __builtin_trap();
    }
    put("model.safetensors", index ? (const void *)good : data,
        index ? sizeof(good) - 1 : size);
    if (index) {
        put("model.safetensors.index.json", data + 1, size - 1);
    } else {
        char path[128];

        snprintf(path, sizeof(path), "%s/model.safetensors.index.json", dir);
        unlink(path);
    }
    if (hx_weights_open(&w, dir, &err) == 0)
        for (int64_t i = 0; i < hx_weights_count(w); i++)
            bind(w, hx_weights_at(w, i));
    hx_weights_close(w);
    return 0;
}
