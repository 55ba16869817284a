/* pull_net.c - HTTP and HTTPS for `hoist pull`, by libcurl. Called by pull.c on its threads.
 *
 * libcurl is loaded when a download is asked for, not linked: a server that never downloads
 * needs none of it, and the portable program cannot carry a TLS stack with the certificates and
 * proxies of the machine it will run on. Its numbers below are libcurl's stable ABI;
 * pull_test.c compares them with its header. Proxies come from the environment, as for every
 * program that uses libcurl. */
#include <dlfcn.h>
#include <stdlib.h>
#include <strings.h>

#include "cli/pull.h"

enum {
    CURL_OPT_WRITEDATA = 10001,
    CURL_OPT_URL = 10002,
    CURL_OPT_RANGE = 10007,
    CURL_OPT_ERRORBUFFER = 10010,
    CURL_OPT_USERAGENT = 10018,
    CURL_OPT_HTTPHEADER = 10023,
    CURL_OPT_HEADERDATA = 10029,
    CURL_OPT_XFERINFODATA = 10057,
    CURL_OPT_WRITEFUNCTION = 20011,
    CURL_OPT_HEADERFUNCTION = 20079,
    CURL_OPT_XFERINFOFUNCTION = 20219,
    CURL_OPT_LOW_SPEED_LIMIT = 19,
    CURL_OPT_LOW_SPEED_TIME = 20,
    CURL_OPT_NOPROGRESS = 43,
    CURL_OPT_FOLLOWLOCATION = 52,
    CURL_OPT_MAXREDIRS = 68,
    CURL_OPT_CONNECTTIMEOUT = 78,
    CURL_OPT_NOSIGNAL = 99,
    CURL_OPT_PROTOCOLS = 181,
    CURL_OPT_REDIR_PROTOCOLS = 182,
    CURL_INFO_RESPONSE_CODE = 0x200002,
    CURL_INFO_RETRY_AFTER = 0x600039,
    CURL_PROTO_HTTP = 1,
    CURL_PROTO_HTTPS = 2,
    CURL_ERROR_BYTES = 256
};

struct curl_slist;

struct pull_net {
    void *lib;
    int (*global_init)(long flags);
    void *(*easy_init)(void);
    void (*easy_cleanup)(void *);
    void (*easy_reset)(void *);
    int (*easy_setopt)(void *, int, ...);
    int (*easy_perform)(void *);
    int (*easy_getinfo)(void *, int, ...);
    const char *(*easy_strerror)(int);
    struct curl_slist *(*slist_append)(struct curl_slist *, const char *);
    void (*slist_free_all)(struct curl_slist *);
    struct curl_slist *headers; /* the token, or NULL */
    char endpoint[512];         /* who it is for */
    long protocols;
};

static int load(pull_net *n, hx_err *err)
{
    static const char *const names[] = { "libcurl.so.4", "libcurl-gnutls.so.4" };
    const struct {
        const char *name;
        void *at;
    } symbols[] = { { "curl_global_init", &n->global_init },
                    { "curl_easy_init", &n->easy_init },
                    { "curl_easy_cleanup", &n->easy_cleanup },
                    { "curl_easy_reset", &n->easy_reset },
                    { "curl_easy_setopt", &n->easy_setopt },
                    { "curl_easy_perform", &n->easy_perform },
                    { "curl_easy_getinfo", &n->easy_getinfo },
                    { "curl_easy_strerror", &n->easy_strerror },
                    { "curl_slist_append", &n->slist_append },
                    { "curl_slist_free_all", &n->slist_free_all } };

    for (size_t i = 0; n->lib == NULL && i < HX_LEN(names); i++)
        n->lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (n->lib == NULL)
        return hx_fail(
            err, HX_EUNSUP,
            "pull: libcurl.so.4 is not on this machine; install it (Debian and "
            "Ubuntu: apt-get install libcurl4)");
    for (size_t i = 0; i < HX_LEN(symbols); i++) {
        void *p = dlsym(n->lib, symbols[i].name);

        if (p == NULL)
            return hx_fail(err, HX_EUNSUP,
                           "pull: this libcurl lacks %s; a newer one is needed",
                           symbols[i].name);
        memcpy(symbols[i].at, &p, sizeof p);
    }
    return 0;
}

int pull_net_open(pull_net **out, const char *endpoint, const char *token, hx_err *err)
{
    pull_net *n = hx_new(pull_net, 1);
    char line[1024];
    int rc;

    *out = NULL;
    if (n == NULL)
        return hx_fail(err, HX_ENOMEM, "pull: no memory");
    if ((rc = load(n, err)) != 0)
        goto fail;
    if (n->global_init(3 /* everything */) != 0) {
        rc = hx_fail(err, HX_EUNSUP, "pull: libcurl does not start");
        goto fail;
    }
    snprintf(n->endpoint, sizeof n->endpoint, "%s", endpoint);
    /* What began encrypted stays so, whatever a redirect says. */
    n->protocols = strncasecmp(endpoint, "https:", 6) == 0
                       ? CURL_PROTO_HTTPS
                       : CURL_PROTO_HTTP | CURL_PROTO_HTTPS;
    if (token != NULL && *token != '\0') {
        const int len = snprintf(line, sizeof line, "Authorization: Bearer %s", token);

        if (len >= (int)sizeof line || strpbrk(token, "\r\n") != NULL) {
            rc = hx_fail(err, HX_EARG, "HF_TOKEN: not a token");
            goto fail;
        }
        if ((n->headers = n->slist_append(NULL, line)) == NULL) {
            rc = hx_fail(err, HX_ENOMEM, "pull: no memory");
            goto fail;
        }
    }
    *out = n;
    return 0;
fail:
    pull_net_close(n);
    return rc;
}

void pull_net_close(pull_net *n)
{
    if (n == NULL)
        return;
    if (n->headers != NULL)
        n->slist_free_all(n->headers);
    /* The library stays loaded: TLS libraries register exit handlers. */
    hx_free(n);
}

void *pull_net_connection(pull_net *n)
{
    return n->easy_init();
}

void pull_net_disconnect(pull_net *n, void *connection)
{
    if (connection != NULL)
        n->easy_cleanup(connection);
}

/* ---- one request -------------------------------------------------------- */

typedef struct {
    pull_net *n;
    void *h;
    pull_request *r;
} transfer;

/* The value of header name in line, or NULL; without the line's end. */
static const char *value_of(const char *line, size_t n, const char *name, char *out,
                            size_t cap)
{
    const size_t len = strlen(name);

    if (n <= len || strncasecmp(line, name, len) != 0 || line[len] != ':')
        return NULL;
    line += len + 1;
    n -= len + 1;
    while (n > 0 && (*line == ' ' || *line == '\t')) {
        line++;
        n--;
    }
    while (n > 0 && (line[n - 1] == '\r' || line[n - 1] == '\n' || line[n - 1] == ' '))
        n--;
    snprintf(out, cap, "%.*s", (int)HX_MIN(n, cap - 1), line);
    return out;
}

/* Link: <URL>; rel="next", … */
static void read_link(const char *v, char *next, size_t cap)
{
    for (const char *open = strchr(v, '<'); open != NULL; open = strchr(open + 1, '<')) {
        const char *close = strchr(open, '>'), *rel = close, *end = close;

        if (close == NULL)
            return;
        end = strchr(close, '<');
        rel = strstr(close, "rel=\"next\"");
        if (rel != NULL && (end == NULL || rel < end) && (size_t)(close - open) < cap) {
            snprintf(next, cap, "%.*s", (int)(close - open - 1), open + 1);
            return;
        }
    }
}

static size_t on_header(char *p, size_t size, size_t n, void *ud)
{
    transfer *t = ud;
    char v[2048];

    n *= size;
    /* Every answer on the way, redirects too, starts afresh. */
    if (n > 5 && memcmp(p, "HTTP/", 5) == 0) {
        t->r->range_from = t->r->range_total = -1;
        t->r->next[0] = '\0';
    } else if (value_of(p, n, "content-range", v, sizeof v) != NULL) {
        long long from, to, total;

        if (sscanf(v, "bytes %lld-%lld/%lld", &from, &to, &total) == 3) {
            t->r->range_from = from;
            t->r->range_total = total;
        }
    } else if (value_of(p, n, "link", v, sizeof v) != NULL) {
        read_link(v, t->r->next, sizeof t->r->next);
    }
    return n;
}

static size_t on_body(char *p, size_t size, size_t n, void *ud)
{
    transfer *t = ud;
    pull_request *r = t->r;

    n *= size;
    t->n->easy_getinfo(t->h, CURL_INFO_RESPONSE_CODE, &r->status);
    if (r->status < 200 || r->status > 299)
        return n; /* an error page: read and dropped */
    if (r->from >= 0 && r->status != 206) {
        r->ignored_range = true;
        return 0;
    }
    if (r->from >= 0 && r->range_from != r->from) {
        snprintf(r->why, sizeof r->why, "asked for bytes from %lld, got from %lld",
                 (long long)r->from, (long long)r->range_from);
        return 0;
    }
    if (!r->sink(r->ud, p, n)) {
        r->sink_ended = true;
        return 0;
    }
    return n;
}

static int on_progress(void *ud, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const transfer *t = ud;

    (void)a, (void)b, (void)c, (void)d;
    return t->r->stop != NULL && atomic_load(t->r->stop);
}

static void set_up(pull_net *n, void *h, transfer *t, char *range, char *why)
{
    const size_t len = strlen(n->endpoint);

    n->easy_reset(h); /* keeps the connection */
    n->easy_setopt(h, CURL_OPT_URL, t->r->url);
    n->easy_setopt(h, CURL_OPT_NOSIGNAL, 1L);
    n->easy_setopt(h, CURL_OPT_USERAGENT, "hoist/" HX_VERSION);
    n->easy_setopt(h, CURL_OPT_PROTOCOLS, n->protocols);
    n->easy_setopt(h, CURL_OPT_REDIR_PROTOCOLS, n->protocols);
    n->easy_setopt(h, CURL_OPT_FOLLOWLOCATION, 1L);
    n->easy_setopt(h, CURL_OPT_MAXREDIRS, 10L);
    n->easy_setopt(h, CURL_OPT_CONNECTTIMEOUT, 20L);
    /* Slower than 1 KB/s for 30 s is dead. */
    n->easy_setopt(h, CURL_OPT_LOW_SPEED_LIMIT, 1000L);
    n->easy_setopt(h, CURL_OPT_LOW_SPEED_TIME, 30L);
    n->easy_setopt(h, CURL_OPT_ERRORBUFFER, why);
    /* libcurl keeps it from hosts that a redirect leads to; a list's next page may name
     * another, too. */
    if (strncmp(t->r->url, n->endpoint, len) == 0 && t->r->url[len] == '/')
        n->easy_setopt(h, CURL_OPT_HTTPHEADER, n->headers);
    n->easy_setopt(h, CURL_OPT_HEADERFUNCTION, on_header);
    n->easy_setopt(h, CURL_OPT_HEADERDATA, t);
    n->easy_setopt(h, CURL_OPT_WRITEFUNCTION, on_body);
    n->easy_setopt(h, CURL_OPT_WRITEDATA, t);
    n->easy_setopt(h, CURL_OPT_NOPROGRESS, 0L);
    n->easy_setopt(h, CURL_OPT_XFERINFOFUNCTION, on_progress);
    n->easy_setopt(h, CURL_OPT_XFERINFODATA, t);
    if (t->r->from >= 0) {
        snprintf(range, 64, "%lld-%lld", (long long)t->r->from, (long long)t->r->to);
        n->easy_setopt(h, CURL_OPT_RANGE, range);
    }
}

bool pull_net_get(pull_net *n, void *connection, pull_request *r)
{
    transfer t = { n, connection, r };
    char range[64], why[CURL_ERROR_BYTES] = "";
    int rc;

    r->status = 0;
    r->retry_after = 0;
    r->range_from = r->range_total = -1;
    r->ignored_range = r->sink_ended = false;
    r->next[0] = r->why[0] = '\0';
    set_up(n, connection, &t, range, why);
    rc = n->easy_perform(connection);
    n->easy_getinfo(connection, CURL_INFO_RESPONSE_CODE, &r->status);
    n->easy_getinfo(connection, CURL_INFO_RETRY_AFTER, &r->retry_after);
    if (rc != 0 && r->why[0] == '\0')
        snprintf(r->why, sizeof r->why, "%s",
                 why[0] != '\0' ? why : n->easy_strerror(rc));
    return (rc == 0 || r->sink_ended) && r->status >= 200 && r->status <= 299;
}
