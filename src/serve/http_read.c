/* http_read.c - turns the bytes of one connection into one HTTP/1 request, strictly.
 *
 * Two readers share the work. scan() sees every byte of the head first: it owns its shape and
 * its limits, so that whatever is ambiguous (bare LF, folded lines, "Host : x") never gets
 * further. llhttp then owns the meaning: target, Content-Length against Transfer-Encoding,
 * chunks, keep-alive. Debian compiles it in its loose mode, hence frame() for chunked bodies.
 * After the first fault nothing more is read: the connection has to be closed.
 *
 * Called by http.c on the loop thread and by the fuzzer; never touches a socket. */
#include "serve/http.h"

#include <stdio.h>
#include <strings.h>

enum { AT_START, AT_LINE, AT_NAME_0, AT_NAME, AT_VALUE };

static void bad(hx_http_reader *r, int status, const char *fmt, ...) HX_PRINTF(3, 4);

static void bad(hx_http_reader *r, int status, const char *fmt, ...)
{
    va_list ap;

    if (r->state == HX_READ_BAD)
        return;
    r->state = HX_READ_BAD;
    r->status = status;
    va_start(ap, fmt);
    vsnprintf(r->why, sizeof(r->why), fmt, ap);
    va_end(ap);
}

/* ---- the head's shape ------------------------------------------------- */

/* tchar of RFC 9110, 5.6.2. */
static bool is_token(unsigned char b)
{
    return (b >= '0' && b <= '9') || (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z') ||
           (b != '\0' && strchr("!#$%&'*+-.^_`|~", b) != NULL);
}

/* After CR LF. An empty line ends the head, but for those before a request line (RFC 9112, 2.2).
 * Returns true at the end of the head. */
static bool scan_line_end(hx_http_reader *r)
{
    if (r->at == AT_NAME_0)
        return true;
    if (r->at == AT_VALUE && ++r->n_header > HX_HTTP_MAX_HEADERS)
        bad(r, 431, "more than %d headers", HX_HTTP_MAX_HEADERS);
    if (r->at != AT_START)
        r->at = AT_NAME_0;
    return false;
}

/* Takes one byte of the head; true at its end. */
static bool scan_byte(hx_http_reader *r, unsigned char b)
{
    if (++r->n_head > r->opt->max_head_bytes && r->at != AT_LINE)
        bad(r, 431, "request head of more than %zu bytes", r->opt->max_head_bytes);
    if (r->at == AT_LINE &&
        r->n_head > HX_MIN((size_t)HX_HTTP_MAX_LINE, r->opt->max_head_bytes))
        bad(r, 414, "request line of more than %zu bytes",
            HX_MIN((size_t)HX_HTTP_MAX_LINE, r->opt->max_head_bytes));
    if (r->cr != (b == '\n')) {
        bad(r, 400, "CR or LF alone in the request head");
    } else if (r->cr) {
        r->cr = false;
        return scan_line_end(r);
    } else if (b == '\r') {
        r->cr = true;
        if (r->at == AT_NAME)
            bad(r, 400, "header line without a colon");
    } else if ((b < ' ' && b != '\t') || b == 0x7f) {
        bad(r, 400, "control character in the request head");
    } else if (r->at == AT_START || r->at == AT_LINE) {
        r->at = AT_LINE;
        if (b == '\t' || b > 0x7f)
            bad(r, 400, "request line with a character that has to be percent-encoded");
    } else if (r->at != AT_VALUE) {
        if (b == ':' && r->at == AT_NAME)
            r->at = AT_VALUE;
        else if (is_token(b))
            r->at = AT_NAME;
        else
            bad(r, 400, "folded header line, or a header name with a character not allowed");
    }
    return false;
}

/* ---- the head's meaning ----------------------------------------------- */

static hx_str trim(hx_str s)
{
    while (s.n > 0 && (s.p[0] == ' ' || s.p[0] == '\t'))
        s.p++, s.n--;
    while (s.n > 0 && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t'))
        s.n--;
    return s;
}

static bool is_word(hx_str s, const char *word)
{
    return s.n == strlen(word) && strncasecmp(s.p, word, s.n) == 0;
}

/* Steps through the header lines, whose shape is known to be good. *line starts at 0. */
static bool next_header(const hx_http_reader *r, size_t *line, hx_str *name, hx_str *value)
{
    const char *p = r->head.p, *end = p + r->head.n - 2, *eol, *colon;

    p = (const char *)memchr(p + *line, '\n', r->head.n - *line) + 1;
    if (p >= end)
        return false;
    eol = memchr(p, '\r', (size_t)(end - p));
    colon = memchr(p, ':', (size_t)(eol - p));
    *name = (hx_str){ p, (size_t)(colon - p) };
    *value = trim((hx_str){ colon + 1, (size_t)(eol - colon) - 1 });
    *line = (size_t)(p - r->head.p);
    return true;
}

hx_str hx_http_read_header(const hx_http_reader *r, const char *name)
{
    hx_str key, value;

    for (size_t line = 0; next_header(r, &line, &key, &value);)
        if (is_word(key, name))
            return value;
    return (hx_str){ NULL, 0 };
}

static int hex(char c)
{
    const char *digits = "0123456789abcdef", *d = c != '\0' ? strchr(digits, c | 0x20) : NULL;

    return d != NULL && (c >= 'A' || c <= '9') ? (int)(d - digits) : -1;
}

/* Percent-decodes in place. Control characters and what is not UTF-8 are refused: they would
 * end up in logs and messages. */
static bool decode_path(char *p, size_t *n)
{
    size_t to = 0;

    for (size_t i = 0; i < *n; i++, to++) {
        if (p[i] == '%') {
            const int hi = i + 2 < *n ? hex(p[i + 1]) : -1;
            const int lo = i + 2 < *n ? hex(p[i + 2]) : -1;

            if (hi < 0 || lo < 0)
                return false;
            p[to] = (char)(hi * 16 + lo);
            i += 2;
        } else {
            p[to] = p[i];
        }
        if ((unsigned char)p[to] < ' ' || p[to] == 0x7f)
            return false;
    }
    *n = to;
    return hx_utf8_ok(p, to);
}

/* Splits the target (RFC 9112, 3.2: origin form, absolute form, or "*" of OPTIONS). */
static void read_target(hx_http_reader *r, char *p, size_t n)
{
    char *mark, *end = p + n;

    r->path = HX_STR("/");
    if (n == 1 && p[0] == '*' && hx_str_is(r->method, "OPTIONS"))
        return;
    if (n > 7 && strncasecmp(p, "http://", 7) == 0) {
        for (p += 7; p < end && *p != '/' && *p != '?'; p++)
            ;
    } else if (p[0] != '/') {
        bad(r, 400, "request target has to start with \"/\"");
        return;
    }
    if (memchr(p, '#', (size_t)(end - p)) != NULL) {
        bad(r, 400, "request target with a fragment");
        return;
    }
    if ((mark = memchr(p, '?', (size_t)(end - p))) != NULL) {
        r->query = (hx_str){ mark + 1, (size_t)(end - mark) - 1 };
        end = mark;
    }
    n = (size_t)(end - p);
    if (!decode_path(p, &n)) {
        bad(r, 400, "request path is not percent-encoded UTF-8");
        return;
    }
    while (n > 0 && p[n - 1] == '/')
        n--;
    if (n > 0)
        r->path = (hx_str){ p, n };
}

/* method SP target SP version. */
static void read_line(hx_http_reader *r)
{
    static const char *const methods[] = { "GET",   "HEAD",   "POST",   "PUT",
                                           "PATCH", "DELETE", "OPTIONS" };
    const size_t n = (size_t)((char *)memchr(r->head.p, '\r', r->head.n) - r->head.p);
    const char *end = r->head.p + n, *sp = memchr(r->head.p, ' ', n), *version;

    version = memrchr(r->head.p, ' ', n);
    if (sp == NULL || sp == r->head.p || version <= sp + 1 || sp[1] == ' ') {
        bad(r, 400, "request line is not \"METHOD /path HTTP/1.1\"");
        return;
    }
    version++;
    if (end - version != 8 || memcmp(version, "HTTP/1.", 7) != 0 ||
        (version[7] != '0' && version[7] != '1')) {
        bad(r, strncmp(version, "HTTP/", 5) == 0 ? 505 : 400,
            "only HTTP/1.1 and HTTP/1.0 are spoken here");
        return;
    }
    r->minor = version[7] - '0';
    r->method = (hx_str){ r->head.p, (size_t)(sp - r->head.p) };
    for (size_t i = 0; i < HX_LEN(methods) && r->status == 0; i++)
        if (hx_str_is(r->method, methods[i]))
            r->method = hx_str_c(methods[i]), r->status = 200;
    if (r->status == 0) {
        bad(r, 501, "method %.*s is not known here", (int)HX_MIN(r->method.n, 20u),
            r->method.p);
        return;
    }
    r->status = 0;
    if (hx_str_is(r->method, "HEAD")) {
        r->head_only = true;
        r->method = HX_STR("GET");
    }
}
