/* http.h - what the HTTP files share: http_read.c (bytes to a request), http_write.c
 * (heads and error bodies of responses), http_tls.c (TLS on memory) and http.c (sockets,
 * timers, queues). Others use the http.c section of serve.h. None but http.c touches a
 * socket or another thread. */
#ifndef HX_SERVE_HTTP_H
#define HX_SERVE_HTTP_H

#include <llhttp.h>

#include "serve/serve.h"

/* ---- http_read.c ------------------------------------------------------ */

#define HX_HTTP_MAX_LINE    8192 /* bytes of a request line, else 414 */
#define HX_HTTP_MAX_HEADERS 100  /* header lines of a request, else 431 */
#define HX_HTTP_MAX_FRAME   1024 /* bytes between the data of two chunks, else 400 */

typedef enum {
    HX_READ_HEAD,
    HX_READ_BODY, /* wants more bytes */
    HX_READ_DONE, /* a whole request is there */
    HX_READ_BAD   /* answer with status and why, then close */
} hx_read_state;

/* One request. The owner reads, http_read.c writes. Strings point into head or body. */
typedef struct {
    hx_read_state state;
    hx_str method, path, query; /* as in hx_exchange; HEAD is "GET" and head_only */
    bool head_only, keep_alive;
    bool expect; /* waits for "100 Continue" once the head is read */
    int minor;   /* of HTTP/1.x */
    int status;  /* when BAD: the answer's */
    char why[120];
    hx_sb head, body;

    const hx_http_opt *opt; /* limits, borrowed */
    llhttp_t parser;
    int at;  /* where in the head the next byte is */
    bool cr; /* the last byte was CR */
    bool complete, chunked, in_data;
    char last; /* framing byte, chunked only */
    size_t n_head, n_header, n_frame;
    const char *cursor; /* what frame() looks at next */
} hx_http_reader;

/* opt has no zero limits. NULL: no memory. Freed with hx_http_read_close(). */
hx_http_reader *hx_http_read_open(const hx_http_opt *opt);
void hx_http_read_close(hx_http_reader *r);
/* Takes bytes up to the end of the request; returns how many. After DONE and BAD: 0. */
size_t hx_http_read_feed(hx_http_reader *r, const char *p, size_t n);
/* When DONE: the value of the first header called name (lower case); {NULL, 0} when
 * absent. */
hx_str hx_http_read_header(const hx_http_reader *r, const char *name);

/* ---- http_write.c ----------------------------------------------------- */

typedef struct {
    int status;
    const char *type;    /* content type or NULL */
    const char *headers; /* extra lines "a: b\r\n…" or NULL */
    const char *id;      /* of the request, or "" */
    const char *cors;    /* allowed origin, or NULL for no CORS headers */
    int minor;           /* of the request */
    bool keep_alive;
    bool stream; /* no length: chunked, or up to the end on HTTP/1.0 */
    size_t n_body;
} hx_http_head;

void hx_http_write_head(hx_sb *b, const hx_http_head *h);
const char *hx_http_code(int status); /* what clients see as error.code */
/* The JSON object of an error that the transport itself found, and the whole answer. */
void hx_http_write_error(hx_sb *b, int status, const char *why);
/* The extra headers of the answer to a preflight; wanted: the headers it asks for. */
void hx_http_write_preflight(hx_sb *b, bool cors, hx_str wanted);
bool hx_http_has_body(int status);

/* ---- http_tls.c -------------------------------------------------------- */

typedef struct hx_tls hx_tls;           /* certificate and key */
typedef struct hx_tls_conn hx_tls_conn; /* one connection */

/* Both files are PEM; cert may be a chain. Errors: HX_EARG (which file, why), HX_ENOMEM,
 * HX_EUNSUP (a build without TLS). */
int hx_tls_open(hx_tls **out, const char *cert, const char *key, hx_err *err);
void hx_tls_close(hx_tls *t);
hx_tls_conn *hx_tls_accept(hx_tls *t); /* NULL: no memory */
void hx_tls_free(hx_tls_conn *c);
bool hx_tls_ready(const hx_tls_conn *c); /* the handshake is over */
/* Takes what came from the socket, appends what it says. HX_EFORMAT: it is plain HTTP;
 * HX_EIO: it is no TLS, or broken; what hx_tls_take() gives may still be sent. */
int hx_tls_read(hx_tls_conn *c, hx_str bytes, hx_sb *plain);
int hx_tls_write(hx_tls_conn *c, hx_str plain); /* once ready */
void hx_tls_take(hx_tls_conn *c, hx_sb *out);   /* appends what is to be sent */
void hx_tls_end(hx_tls_conn *c);                /* says goodbye */

#endif
