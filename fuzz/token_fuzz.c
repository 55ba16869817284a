/* token_fuzz.c - hx_tok_open() on any bytes up to the first NUL; what opens encodes the
 * rest, with and without added tokens and marks. */
#include "text/text.h"

static void encode(const hx_tok *t, hx_str text, const hx_tok_opt *opt)
{
    hx_ids ids = { 0 };

    if (hx_tok_encode(t, text, opt, &ids, NULL) != 0)
        hx_assert(ids.n == 0);
    for (int64_t i = 0; i < ids.n; i++) {
        hx_assert(hx_tok_bytes(t, ids.p[i]).p != NULL);
        /* Every byte of the text is marked when there are marks. */
        hx_assert(opt->user == NULL || !hx_tok_is_special(t, ids.p[i]));
    }
    hx_ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t marked[64] = { [0 ... 63] = 1 };
    const char *p = (const char *)data;
    const size_t n = strnlen(p, size);
    const hx_str text = { p + n, HX_MIN(size - n, sizeof(marked)) };
    hx_utf8_stream s = { 0 };
    hx_sb out = { 0 };
    hx_tok *t;

    hx_utf8_feed(&s, text, &out);
    hx_utf8_end(&s, &out);
    hx_assert(hx_utf8_ok(out.p, out.n));
    if (hx_tok_open(&t, (hx_str) { p, n }, "fuzz", NULL) == 0) {
        const hx_str whole = { out.p, HX_MIN(out.n, sizeof(marked)) };

        encode(t, whole, &(hx_tok_opt) { .special = true });
        encode(t, whole, &(hx_tok_opt) { .special = true, .user = marked });
        encode(t, whole, &(hx_tok_opt) { .max_ids = 3 });
    }
    hx_tok_close(t);
    hx_sb_free(&out);
    return 0;
}
