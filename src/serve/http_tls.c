/* http_tls.c - TLS for http.c: bytes of the socket in and out, plain bytes out and in.
 * OpenSSL 3 works on memory here and never sees a socket. Without its headers at build
 * time (HX_TLS unset) opening says so.
 *
 * Called by http.c on the loop thread only. */
#include "serve/http.h"

#ifdef HX_TLS

#include <openssl/err.h>
#include <openssl/ssl.h>

#define PIECE_BYTES 16384 /* of a record */

struct hx_tls {
    SSL_CTX *ctx;
};

struct hx_tls_conn {
    SSL *ssl;
    BIO *in, *out; /* ssl's */
};

/* The innermost reason, which names the file's fault. */
static int fail_with(hx_err *err, const char *what, const char *path)
{
    const unsigned long e = ERR_peek_error(); /* the first says most */
    const char *why =
        ERR_SYSTEM_ERROR(e) ? strerror(ERR_GET_REASON(e)) : ERR_reason_error_string(e);

    ERR_clear_error();
    return hx_fail(err, HX_EARG, "TLS: %s %.120s: %.80s", what, path,
                   why != NULL ? why : "cannot be used");
}

/* The one protocol that is spoken here; who offers only others is answered in it, too. */
static int choose_protocol(SSL *ssl, const unsigned char **out, unsigned char *n,
                           const unsigned char *in, unsigned int n_in, void *ud)
{
    static const unsigned char http[] = "\x08http/1.1";

    (void)ssl, (void)ud;
    if (SSL_select_next_proto((unsigned char **)(uintptr_t)out, n, http, sizeof http - 1,
                              in, n_in) != OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_NOACK;
    return SSL_TLSEXT_ERR_OK;
}

int hx_tls_open(hx_tls **out, const char *cert, const char *key, hx_err *err)
{
    hx_tls *t;
    int rc = 0;

    *out = NULL;
    if (cert == NULL || key == NULL)
        return hx_fail(err, HX_EARG,
                       "TLS: needs a certificate and its key: --tls-cert and --tls-key");
    if ((t = hx_new(hx_tls, 1)) == NULL ||
        (t->ctx = SSL_CTX_new(TLS_server_method())) == NULL) {
        hx_tls_close(t);
        return hx_fail(err, HX_ENOMEM, "TLS: no memory");
    }
    SSL_CTX_set_min_proto_version(t->ctx, TLS1_2_VERSION);
    SSL_CTX_set_options(t->ctx, SSL_OP_NO_RENEGOTIATION |
                                    SSL_OP_CIPHER_SERVER_PREFERENCE |
                                    SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_mode(t->ctx, SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_alpn_select_cb(t->ctx, choose_protocol, NULL);
    ERR_clear_error();
    if (SSL_CTX_use_certificate_chain_file(t->ctx, cert) != 1)
        rc = fail_with(err, "certificate", cert);
    else if (SSL_CTX_use_PrivateKey_file(t->ctx, key, SSL_FILETYPE_PEM) != 1)
        rc = fail_with(err, "key", key);
    else if (SSL_CTX_check_private_key(t->ctx) != 1)
        rc = fail_with(err, "the certificate's key is another than", key);
    if (rc != 0) {
        hx_tls_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

void hx_tls_close(hx_tls *t)
{
    if (t == NULL)
        return;
    SSL_CTX_free(t->ctx);
    hx_free(t);
}

hx_tls_conn *hx_tls_accept(hx_tls *t)
{
    hx_tls_conn *c = hx_new(hx_tls_conn, 1);

    if (c == NULL)
        return NULL;
    c->ssl = SSL_new(t->ctx);
    c->in = BIO_new(BIO_s_mem());
    c->out = BIO_new(BIO_s_mem());
    if (c->ssl == NULL || c->in == NULL || c->out == NULL) {
        BIO_free(c->in);
        BIO_free(c->out);
        SSL_free(c->ssl);
        hx_free(c);
        return NULL;
    }
    SSL_set_bio(c->ssl, c->in, c->out);
    SSL_set_accept_state(c->ssl);
    return c;
}

void hx_tls_free(hx_tls_conn *c)
{
    if (c == NULL)
        return;
    SSL_free(c->ssl);
    hx_free(c);
}

bool hx_tls_ready(const hx_tls_conn *c)
{
    return SSL_is_init_finished(c->ssl);
}

int hx_tls_read(hx_tls_conn *c, hx_str bytes, hx_sb *plain)
{
    char piece[PIECE_BYTES];
    int n, why;
    bool is_http;

    ERR_clear_error();
    if (BIO_write(c->in, bytes.p, (int)bytes.n) != (int)bytes.n)
        return HX_ENOMEM;
    while ((n = SSL_read(c->ssl, piece, sizeof piece)) > 0)
        hx_sb_add(plain, piece, (size_t)n);
    why = SSL_get_error(c->ssl, n);
    is_http = ERR_GET_REASON(ERR_peek_error()) == SSL_R_HTTP_REQUEST;
    ERR_clear_error();
    if (plain->bad)
        return HX_ENOMEM;
    if (is_http)
        return HX_EFORMAT;
    return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_ZERO_RETURN ? 0 : HX_EIO;
}

int hx_tls_write(hx_tls_conn *c, hx_str plain)
{
    size_t n;

    ERR_clear_error();
    if (plain.n > 0 &&
        (SSL_write_ex(c->ssl, plain.p, plain.n, &n) != 1 || n != plain.n)) {
        ERR_clear_error();
        return HX_EIO;
    }
    return 0;
}

void hx_tls_take(hx_tls_conn *c, hx_sb *out)
{
    char *p;
    const long n = BIO_get_mem_data(c->out, &p);

    hx_sb_add(out, p, (size_t)HX_MAX(n, 0));
    (void)BIO_reset(c->out);
}

void hx_tls_end(hx_tls_conn *c)
{
    if (SSL_is_init_finished(c->ssl))
        SSL_shutdown(c->ssl);
    ERR_clear_error();
}

#else

int hx_tls_open(hx_tls **out, const char *cert, const char *key, hx_err *err)
{
    (void)cert, (void)key;
    *out = NULL;
    return hx_fail(err, HX_EUNSUP,
                   "TLS: this build has none; install libssl-dev and build again, or put "
                   "a proxy in front");
}

void hx_tls_close(hx_tls *t)
{
    hx_assert(t == NULL);
}

/* Never reached: no hx_tls exists. */
hx_tls_conn *hx_tls_accept(hx_tls *t)
{
    hx_assert(t == NULL);
    return NULL;
}

void hx_tls_free(hx_tls_conn *c)
{
    hx_assert(c == NULL);
}

bool hx_tls_ready(const hx_tls_conn *c)
{
    return c != NULL;
}

int hx_tls_read(hx_tls_conn *c, hx_str bytes, hx_sb *plain)
{
    (void)c, (void)bytes, (void)plain;
    return HX_EUNSUP;
}

int hx_tls_write(hx_tls_conn *c, hx_str plain)
{
    (void)c, (void)plain;
    return HX_EUNSUP;
}

void hx_tls_take(hx_tls_conn *c, hx_sb *out)
{
    (void)c, (void)out;
}

void hx_tls_end(hx_tls_conn *c)
{
    (void)c;
}

#endif
