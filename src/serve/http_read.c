/* http_read.c - turns the bytes of one connection into one HTTP/1 request, strictly.
 *
 * Two readers share the work. scan() sees every byte of the head first: it owns its shape
 * and its limits, so that whatever is ambiguous (bare LF, folded lines, "Host : x") never
 * gets further. llhttp then owns the meaning: target, Content-Length against
 * Transfer-Encoding, chunks, keep-alive. Debian compiles it in its loose mode, hence
 * frame() for chunked bodies. After the first fault nothing more is read: the connection
 * has to be closed.
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

/* After CR LF. An empty line ends the head, but for those before a request line (RFC
 * 9112, 2.2). Returns true at the end of the head. */
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
            bad(r, 400,
                "folded header line, or a header name with a character not allowed");
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
static bool next_header(const hx_http_reader *r, size_t *line, hx_str *name,
                        hx_str *value)
{
    const char *p = r->head.p, *end = p + r->head.n - 2, *eol, *colon;

    p = (const char *)memchr(p + *line, '\n', r->head.n - *line) + 1;
    if (p >= end)
        return false;
    eol = memchr(p, '\r', (size_t)(end - p));
    colon = memchr(p, ':', (size_t)(eol - p));
    *name = (hx_str) { p, (size_t)(colon - p) };
    *value = trim((hx_str) { colon + 1, (size_t)(eol - colon) - 1 });
    *line = (size_t)(p - r->head.p);
    return true;
}

hx_str hx_http_read_header(const hx_http_reader *r, const char *name)
{
    hx_str key, value;

    for (size_t line = 0; next_header(r, &line, &key, &value);)
        if (is_word(key, name))
            return value;
    return (hx_str) { NULL, 0 };
}

/* Percent-decodes in place. Control characters and what is not UTF-8 are refused: they
 * would end up in logs and messages. */
static bool decode_path(char *p, size_t *n)
{
    size_t to = 0;

    for (size_t i = 0; i < *n; i++, to++) {
        if (p[i] == '%') {
            const int hi = i + 2 < *n ? hx_hex_digit(p[i + 1]) : -1;
            const int lo = i + 2 < *n ? hx_hex_digit(p[i + 2]) : -1;

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
        r->query = (hx_str) { mark + 1, (size_t)(end - mark) - 1 };
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
        r->path = (hx_str) { p, n };
}

/* HEAD is served as GET; http.c leaves the body out. */
static void read_method(hx_http_reader *r, hx_str name)
{
    static const char *const methods[] = { "GET",   "HEAD",   "POST",   "PUT",
                                           "PATCH", "DELETE", "OPTIONS" };

    for (size_t i = 0; i < HX_LEN(methods); i++)
        if (hx_str_is(name, methods[i]))
            r->method = hx_str_c(methods[i]);
    if (r->method.n == 0)
        bad(r, 501, "method %.*s is not known here", (int)HX_MIN(name.n, 20u), name.p);
    r->head_only = hx_str_is(r->method, "HEAD");
    if (r->head_only)
        r->method = HX_STR("GET");
}

/* METHOD SP target SP version; *target is what stands between the two spaces. */
static void read_line(hx_http_reader *r, hx_str *target)
{
    const char *line = r->head.p, *end = memchr(line, '\r', r->head.n);
    const char *sp = memchr(line, ' ', (size_t)(end - line));
    const char *sp2 = memrchr(line, ' ', (size_t)(end - line));

    if (sp == NULL || sp == line || sp2 <= sp + 1 ||
        memchr(sp + 1, ' ', (size_t)(sp2 - sp) - 1) != NULL) {
        bad(r, 400, "request line is not \"METHOD /path HTTP/1.1\"");
    } else if (end - sp2 != 9 || memcmp(sp2, " HTTP/1.", 8) != 0 ||
               (sp2[8] != '0' && sp2[8] != '1')) {
        bad(r, strncmp(sp2, " HTTP/", 6) == 0 ? 505 : 400,
            "only HTTP/1.1 and HTTP/1.0 are spoken here");
    } else {
        r->minor = sp2[8] - '0';
        *target = (hx_str) { sp + 1, (size_t)(sp2 - sp) - 1 };
        read_method(r, (hx_str) { line, (size_t)(sp - line) });
    }
}

/* What llhttp leaves to us: Host (RFC 9112, 3.2), an empty Transfer-Encoding, which it
 * passes over, other codings than "chunked", which we could not undo, and Expect. */
static void read_headers(hx_http_reader *r)
{
    hx_str name, value;
    int n_host = 0;

    for (size_t line = 0; next_header(r, &line, &name, &value);) {
        if (is_word(name, "host")) {
            n_host++;
            for (size_t i = 0; i < value.n; i++)
                if (!is_token((unsigned char)value.p[i]) &&
                    strchr(":[]", value.p[i]) == NULL)
                    bad(r, 400, "Host is not a name or an address");
        } else if (is_word(name, "transfer-encoding")) {
            if (r->minor == 0)
                bad(r, 400, "Transfer-Encoding in an HTTP/1.0 request");
            if (!is_word(value, "chunked"))
                bad(r, value.n > 0 ? 501 : 400,
                    "Transfer-Encoding other than \"chunked\" is not understood");
        } else if (is_word(name, "expect") && r->minor > 0) {
            r->expect = is_word(value, "100-continue");
            if (!r->expect)
                bad(r, 417, "Expect other than \"100-continue\" is not understood");
        }
    }
    if (n_host > 1 || (n_host == 0 && r->minor > 0))
        bad(r, 400, n_host == 0 ? "Host header is missing" : "more than one Host header");
}

static int on_headers_complete(llhttp_t *parser)
{
    hx_http_reader *r = parser->data;

    r->chunked = parser->flags & F_CHUNKED;
    if (parser->content_length > r->opt->max_body_bytes) {
        bad(r, 413, "request body of more than %zu bytes", r->opt->max_body_bytes);
        return -1;
    }
    return 0;
}

/* ---- the body --------------------------------------------------------- */

/* Framing of chunks up to end: lines end in CR LF and do not fold, data is followed by CR
 * LF, extensions and trailers stay short. */
static void frame(hx_http_reader *r, const char *end)
{
    for (; r->cursor < end; r->cursor++) {
        const char b = *r->cursor;

        if ((r->in_data && b != '\r') || (r->last == '\r') != (b == '\n') ||
            (r->last == '\n' && (b == ' ' || b == '\t')))
            bad(r, 400, "malformed chunk");
        if (++r->n_frame > HX_HTTP_MAX_FRAME)
            bad(r, 400, "chunk header or trailers of more than %d bytes",
                HX_HTTP_MAX_FRAME);
        r->in_data = false;
        r->last = b;
    }
}

static int on_body(llhttp_t *parser, const char *p, size_t n)
{
    hx_http_reader *r = parser->data;

    if (r->chunked) {
        frame(r, p);
        r->cursor = p + n;
        r->in_data = true;
        r->n_frame = 0;
        r->last = '\0';
    }
    if (n > r->opt->max_body_bytes - r->body.n)
        bad(r, 413, "request body of more than %zu bytes", r->opt->max_body_bytes);
    if (r->state != HX_READ_BAD)
        hx_sb_add(&r->body, p, n);
    if (r->body.bad)
        bad(r, 503, "no memory for the request body");
    return r->state == HX_READ_BAD ? -1 : 0;
}

/* Stopping here, llhttp never comes to an upgrade (h2c, say), which we do not take. */
static int on_message_complete(llhttp_t *parser)
{
    hx_http_reader *r = parser->data;

    r->complete = true;
    r->keep_alive = llhttp_should_keep_alive(parser);
    return HPE_PAUSED;
}

/* Lets llhttp read on; returns how many bytes it took. */
static size_t execute(hx_http_reader *r, const char *p, size_t n)
{
    const llhttp_errno_t e = llhttp_execute(&r->parser, p, n);

    if (e == HPE_PAUSED)
        n = (size_t)(llhttp_get_error_pos(&r->parser) - p);
    else if (e != HPE_OK)
        bad(r, 400, "malformed request: %s", llhttp_get_error_reason(&r->parser));
    return n;
}

static void read_head(hx_http_reader *r)
{
    hx_str target = { NULL, 0 };

    if (r->state == HX_READ_HEAD)
        read_line(r, &target);
    if (r->state == HX_READ_HEAD)
        read_headers(r);
    if (r->state == HX_READ_HEAD)
        execute(r, r->head.p, r->head.n);
    if (target.n > 0 && r->method.n > 0) /* of a refused one, too: its answer's shape */
        read_target(r, r->head.p + (target.p - r->head.p), target.n);
    if (r->state == HX_READ_HEAD)
        r->state = HX_READ_BODY;
    r->last = '\n';
}

/* Takes bytes of the head, which it keeps. Those before the request line are dropped. */
static size_t scan(hx_http_reader *r, const char *p, size_t n)
{
    size_t i = 0, from = 0;
    bool end = false;

    while (i < n && !end && r->state == HX_READ_HEAD) {
        end = scan_byte(r, (unsigned char)p[i++]);
        if (r->at == AT_START)
            from = i;
    }
    hx_sb_add(&r->head, p + from, i - from);
    if (r->head.bad)
        bad(r, 503, "no memory for the request head");
    if (end)
        read_head(r);
    return i;
}

/* ---- for http.c ------------------------------------------------------- */

static const llhttp_settings_t settings = {
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

hx_http_reader *hx_http_read_open(const hx_http_opt *opt)
{
    hx_http_reader *r = hx_new(hx_http_reader, 1);

    if (r == NULL)
        return NULL;
    r->opt = opt;
    llhttp_init(&r->parser, HTTP_REQUEST, &settings);
    r->parser.data = r;
    return r;
}

void hx_http_read_close(hx_http_reader *r)
{
    if (r == NULL)
        return;
    hx_sb_free(&r->head);
    hx_sb_free(&r->body);
    hx_free(r);
}

size_t hx_http_read_feed(hx_http_reader *r, const char *p, size_t n)
{
    size_t i = 0;

    if (r->state == HX_READ_HEAD)
        i = scan(r, p, n);
    if (r->state == HX_READ_BODY && !r->complete && i < n) {
        r->cursor = p + i;
        i += execute(r, p + i, n - i);
        if (r->chunked)
            frame(r, p + i);
    }
    if (r->state == HX_READ_BODY && r->complete) {
        r->state = HX_READ_DONE;
        r->expect = false;
    }
    return i;
}
