/* http_fuzz.c - any bytes of a connection, read whole and cut small: the same requests,
 * the same verdict; what is taken is sound, and answers that echo it stay one head and
 * one JSON object.
 *
 * The first byte is how small the cuts are. */
#include "serve/http.h"

static const hx_http_opt limits = { .max_head_bytes = 600, .max_body_bytes = 300 };

static size_t feed(hx_http_reader *r, const char *p, size_t n, size_t cut)
{
    size_t i = 0;

    while (i < n && (r->state == HX_READ_HEAD || r->state == HX_READ_BODY)) {
        const size_t k = hx_http_read_feed(r, p + i, HX_MIN(cut, n - i));

        hx_assert(k > 0 && k <= HX_MIN(cut, n - i));
        i += k;
    }
    return i;
}

static void check_answers(const hx_http_reader *r)
{
    hx_str wanted = { NULL, 0 };
    hx_sb b = { 0 };
    hx_json *j;

    if (r->state == HX_READ_DONE)
        wanted = hx_http_read_header(r, "access-control-request-headers");
    hx_http_write_preflight(&b, true, wanted);
    for (size_t i = 0; i < b.n; i++)
        hx_assert((b.p[i] == '\n') == (i > 0 && b.p[i - 1] == '\r'));
    b.n = 0;
    hx_http_write_error(&b, r->state == HX_READ_BAD ? r->status : 400, r->why);
    hx_assert(hx_json_parse(&j, (hx_str) { b.p, b.n }, 0, NULL) == 0);
    hx_json_free(j);
    hx_sb_free(&b);
}

static void check_request(const hx_http_reader *r)
{
    hx_assert(r->path.n > 0 && r->path.p[0] == '/' && hx_utf8_ok(r->path.p, r->path.n));
    hx_assert(memchr(r->path.p, '\n', r->path.n) == NULL);
    hx_assert(r->path.n == 1 || r->path.p[r->path.n - 1] != '/');
    hx_assert(r->body.n <= limits.max_body_bytes && r->head.n <= limits.max_head_bytes);
    hx_assert(r->minor == 0 || hx_http_read_header(r, "host").p != NULL);
    hx_assert(hx_http_read_header(r, "transfer-encoding").p == NULL ||
              hx_http_read_header(r, "content-length").p == NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *p = (const char *)data + 1;
    hx_read_state last = HX_READ_DONE;

    for (size_t n = size > 0 ? size - 1 : 0, k; n > 0 && last == HX_READ_DONE;
         p += k, n -= k) {
        hx_http_reader *a = hx_http_read_open(&limits), *b = hx_http_read_open(&limits);

        k = feed(a, p, n, SIZE_MAX);
        hx_assert(feed(b, p, n, 1 + data[0] % 16u) == k || a->state == HX_READ_BAD);
        hx_assert(a->state == b->state && a->status == b->status);
        hx_assert(a->state == HX_READ_BAD ||
                  hx_str_eq((hx_str) { a->body.p, a->body.n },
                            (hx_str) { b->body.p, b->body.n }));
        hx_assert(a->state != HX_READ_DONE ||
                  (hx_str_eq(a->path, b->path) && hx_str_eq(a->query, b->query)));
        if (a->state == HX_READ_DONE)
            check_request(a);
        if (a->state == HX_READ_DONE || a->state == HX_READ_BAD)
            check_answers(a);
        last = a->state;
        hx_http_read_close(a);
        hx_http_read_close(b);
    }
    return 0;
}
