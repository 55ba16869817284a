/* http_write.c - composes heads of HTTP responses, and the answers that need no handler:
 * errors of the transport and preflights. Called by http.c from any thread; pure
 * functions from values to bytes. */
#include "serve/http.h"

#include <time.h>

static const struct {
    int status;
    const char *reason, *code;
} statuses[] = {
    { 200, "OK", NULL },
    { 204, "No Content", NULL },
    { 400, "Bad Request", "bad_request" },
    { 401, "Unauthorized", "invalid_api_key" },
    { 403, "Forbidden", "forbidden" },
    { 404, "Not Found", "not_found" },
    { 405, "Method Not Allowed", "method_not_allowed" },
    { 408, "Request Timeout", "request_timeout" },
    { 409, "Conflict", "conflict" },
    { 413, "Content Too Large", "request_too_large" },
    { 414, "URI Too Long", "uri_too_long" },
    { 415, "Unsupported Media Type", "unsupported_media_type" },
    { 417, "Expectation Failed", "expectation_failed" },
    { 422, "Unprocessable Content", "unprocessable" },
    { 429, "Too Many Requests", "rate_limit_exceeded" },
    { 431, "Request Header Fields Too Large", "headers_too_large" },
    { 499, "Client Closed Request", "client_closed_request" },
    { 500, "Internal Server Error", "internal_error" },
    { 501, "Not Implemented", "not_implemented" },
    { 503, "Service Unavailable", "service_unavailable" },
    { 504, "Gateway Timeout", "timeout" },
    { 505, "HTTP Version Not Supported", "http_version_not_supported" },
};

static size_t find_status(int status)
{
    size_t i = 0;

    while (i < HX_LEN(statuses) && statuses[i].status != status)
        i++;
    return i;
}

const char *hx_http_code(int status)
{
    const size_t i = find_status(status);

    return i < HX_LEN(statuses) ? statuses[i].code : "error";
}

bool hx_http_has_body(int status)
{
    return status >= 200 && status != 204 && status != 304;
}

/* IMF-fixdate (RFC 9110, 5.6.7); strftime() would follow the locale. */
static void write_date(hx_sb *b)
{
    static const char days[] = "SunMonTueWedThuFriSat";
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    const time_t now = time(NULL);
    struct tm t;

    if (gmtime_r(&now, &t) != NULL)
        hx_sb_printf(b, "Date: %.3s, %02d %.3s %04d %02d:%02d:%02d GMT\r\n",
                     days + 3 * t.tm_wday, t.tm_mday, months + 3 * t.tm_mon,
                     1900 + t.tm_year, t.tm_hour, t.tm_min, t.tm_sec);
}

void hx_http_write_head(hx_sb *b, const hx_http_head *h)
{
    const size_t i = find_status(h->status);
    const bool body = hx_http_has_body(h->status);

    hx_sb_printf(b, "HTTP/1.1 %d %s\r\n", h->status,
                 i < HX_LEN(statuses) ? statuses[i].reason : "Status");
    write_date(b);
    if (h->type != NULL && body)
        hx_sb_printf(b, "Content-Type: %s\r\n", h->type);
    if (!h->stream && body)
        hx_sb_printf(b, "Content-Length: %zu\r\n", h->n_body);
    if (h->stream && h->minor > 0)
        hx_sb_str(b, "Transfer-Encoding: chunked\r\n");
    if (!h->keep_alive)
        hx_sb_str(b, "Connection: close\r\n");
    else if (h->minor == 0)
        hx_sb_str(b, "Connection: keep-alive\r\n");
    if (h->cors != NULL)
        hx_sb_printf(b, "Access-Control-Allow-Origin: %s\r\n", h->cors);
    if (h->cors != NULL && strcmp(h->cors, "*") != 0)
        hx_sb_str(b, "Vary: Origin\r\n");
    /* As each of two families of clients looks for it. */
    if (h->id != NULL && *h->id != '\0')
        hx_sb_printf(b, "request-id: %s\r\nx-request-id: %s\r\n", h->id, h->id);
    if (h->headers != NULL)
        hx_sb_str(b, h->headers);
    hx_sb_str(b, "\r\n");
}

void hx_http_write_error(hx_sb *b, int status, const char *why)
{
    hx_sb_str(b, "{\"error\":{\"message\":");
    hx_json_put_str(b, hx_str_c(why));
    hx_sb_printf(b, ",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}",
                 status == 401  ? "authentication_error"
                 : status < 500 ? "invalid_request_error"
                                : "server_error",
                 hx_http_code(status));
}

/* Clients name their own headers (anthropic-*, x-stainless-*), for which there is no
 * wildcard: what is asked for is echoed. Two hours is the longest that Chromium keeps the
 * answer. */
void hx_http_write_preflight(hx_sb *b, bool cors, hx_str wanted)
{
    static const char methods[] = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

    hx_sb_printf(b, "Allow: %s\r\n", methods);
    if (!cors)
        return;
    if (wanted.n == 0 || wanted.n > 2048)
        wanted = HX_STR("authorization, content-type, x-api-key, anthropic-version, "
                        "anthropic-beta");
    hx_sb_printf(b,
                 "Access-Control-Allow-Methods: %s\r\n"
                 "Access-Control-Allow-Headers: %.*s\r\n"
                 "Access-Control-Max-Age: 7200\r\n",
                 methods, (int)wanted.n, wanted.p);
}
