/* tok_driver.c - encodes a file with a tokenizer.json; writes its ids and their bytes.
 *
 * Started by tokenizers_npm.mjs, which compares with another tokenizer, and by hand for
 * speed. IDS gets little-endian int32, BYTES the tokens' bytes; stderr gets times. */
#include <stdio.h>

#include "text/text.h"

static int save(const char *path, const void *p, size_t n, hx_err *err)
{
    FILE *f = fopen(path, "wb");
    bool ok = f != NULL && fwrite(p, 1, n, f) == n;

    if (f != NULL && fclose(f) != 0)
        ok = false;
    return ok ? 0 : hx_fail(err, HX_EIO, "%s: cannot write", path);
}

static int encode(const hx_tok *t, hx_str text, char **out, hx_err *err)
{
    const int64_t start = hx_now_us();
    hx_ids ids = { 0 };
    hx_sb bytes = { 0 };
    int rc = hx_tok_encode(t, text, NULL, &ids, err);

    if (rc == 0) {
        const double us = (double)HX_MAX(hx_now_us() - start, 1);

        fprintf(stderr, "encode: %zu bytes, %lld ids, %.1f ms, %.1f MB/s\n", text.n,
                (long long)ids.n, us / 1e3, (double)text.n / us);
        for (int64_t i = 0; i < ids.n; i++) {
            const hx_str s = hx_tok_bytes(t, ids.p[i]);

            hx_sb_add(&bytes, s.p, s.n);
        }
        if (out[0] != NULL)
            rc = save(out[0], ids.p, (size_t)ids.n * sizeof(*ids.p), err);
        if (rc == 0 && out[0] != NULL && out[1] != NULL)
            rc = save(out[1], bytes.p, bytes.n, err);
    }
    hx_ids_free(&ids);
    hx_sb_free(&bytes);
    return rc;
}

int main(int argc, char **argv)
{
    hx_file json = { 0 };
    hx_tok *t = NULL;
    char *text = NULL;
    size_t n = 0;
    hx_err err = { 0 };
    int rc;

    if (argc < 3) {
        fprintf(stderr, "usage: %s TOKENIZER TEXT [IDS [BYTES]]\n", argv[0]);
        return 2;
    }
    const int64_t start = hx_now_us();
    if ((rc = hx_file_map(&json, argv[1], &err)) != 0 ||
        (rc = hx_tok_open(&t, (hx_str) { (const char *)json.p, json.n }, argv[1],
                          &err)) != 0)
        goto fail;
    fprintf(stderr, "load: %.1f ms, %d ids\n", (double)(hx_now_us() - start) / 1e3,
            hx_tok_count(t));
    if ((rc = hx_file_read(argv[2], (size_t)1 << 30, &text, &n, &err)) == 0)
        rc = encode(t, (hx_str) { text, n }, argv + 3, &err);
fail:
    if (rc != 0)
        fprintf(stderr, "%s\n", err.msg);
    hx_free(text);
    hx_tok_close(t);
    hx_file_unmap(&json);
    return rc == 0 ? 0 : 1;
}
