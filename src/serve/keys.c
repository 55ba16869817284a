/* keys.c - API keys: who may use the server, under which name the log knows them.
 *
 * server.c opens them once and asks for every request, on the loop thread. The time that
 * asking takes depends on the number of keys and on lengths, never on how much of a key
 * was right. Keys are never written anywhere. */
#include "serve/serve.h"

#include <stdio.h>

#define KEYS_MAX       256
#define KEY_MAX_BYTES  512 /* what is compared with all keys, before anybody is let in */
#define NAME_MAX_BYTES 32

typedef struct {
    char name[NAME_MAX_BYTES + 1];
    hx_str key;
    bool admin;
} entry;

struct hx_keys {
    entry entry[KEYS_MAX];
    size_t n, n_user;
    char *text; /* that the keys point into */
    char *admin;
};

static bool is_name(char b)
{
    return (b >= '0' && b <= '9') || (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z') ||
           b == '-' || b == '_' || b == '.';
}

/* Length of NAME of NAME=KEY, or 0. A key may itself be base64 that ends in "=". */
static size_t name_length(hx_str line)
{
    size_t n = 0, rest;

    while (n < line.n && n <= NAME_MAX_BYTES && is_name(line.p[n]))
        n++;
    if (n == 0 || n > NAME_MAX_BYTES || n == line.n || line.p[n] != '=')
        return 0;
    for (rest = n; rest < line.n && line.p[rest] == '='; rest++)
        ;
    return rest < line.n ? n : 0;
}

static int add(hx_keys *k, hx_str line, bool admin, hx_err *err)
{
    const size_t n = admin ? 0 : name_length(line);
    entry *e = &k->entry[k->n];

    if (k->n == KEYS_MAX)
        return hx_fail(err, HX_ELIMIT, "API keys: more than %d", KEYS_MAX);
    e->key = n > 0 ? (hx_str) { line.p + n + 1, line.n - n - 1 } : line;
    e->admin = admin;
    if (e->key.n > KEY_MAX_BYTES)
        return hx_fail(err, HX_EARG, "API key %zu: %zu bytes, at most %d", k->n + 1,
                       e->key.n, KEY_MAX_BYTES);
    for (size_t i = 0; i < e->key.n; i++)
        if (e->key.p[i] <= ' ' || e->key.p[i] > '~')
            return hx_fail(err, HX_EARG,
                           "API key %zu: expected printable ASCII without spaces",
                           k->n + 1);
    if (n > 0)
        snprintf(e->name, sizeof e->name, "%.*s", (int)n, line.p);
    else if (admin)
        snprintf(e->name, sizeof e->name, "admin");
    else
        snprintf(e->name, sizeof e->name, "key %zu", k->n_user + 1);
    k->n++;
    k->n_user += !admin;
    return 0;
}

static char *copy(const char *s)
{
    const size_t n = strlen(s) + 1;
    char *p = hx_alloc(n);

    if (p != NULL)
        memcpy(p, s, n);
    return p;
}

static int add_lines(hx_keys *k, hx_err *err)
{
    int rc;

    for (char *p = k->text, *next; p != NULL; p = next) {
        char *end = p + strcspn(p, "\r\n");

        next = *end != '\0' ? end + 1 : NULL;
        while (p < end && (*p == ' ' || *p == '\t'))
            p++;
        while (end > p && (end[-1] == ' ' || end[-1] == '\t'))
            end--;
        if (p < end && *p != '#' &&
            (rc = add(k, (hx_str) { p, (size_t)(end - p) }, false, err)) != 0)
            return rc;
    }
    return k->n_user > 0 ? 0
                         : hx_fail(err, HX_EARG,
                                   "API key: empty; leave the option out for an open "
                                   "server");
}

int hx_keys_open(hx_keys **out, const char *lines, const char *admin, hx_err *err)
{
    hx_keys *k;
    int rc = 0;

    *out = NULL;
    if (lines == NULL && admin == NULL)
        return 0;
    if ((k = hx_new(hx_keys, 1)) == NULL ||
        (lines != NULL && (k->text = copy(lines)) == NULL) ||
        (admin != NULL && (k->admin = copy(admin)) == NULL))
        rc = hx_fail(err, HX_ENOMEM, "API keys: no memory");
    else if (admin != NULL && *admin == '\0')
        rc = hx_fail(err, HX_EARG, "admin key: empty");
    else if (lines != NULL)
        rc = add_lines(k, err);
    if (rc == 0 && admin != NULL)
        rc = add(k, hx_str_c(k->admin), true, err);
    if (rc != 0) {
        hx_keys_close(k);
        return rc;
    }
    *out = k;
    return 0;
}

void hx_keys_close(hx_keys *k)
{
    if (k == NULL)
        return;
    hx_free(k->text);
    hx_free(k->admin);
    hx_free(k);
}

static bool same(hx_str key, hx_str given)
{
    size_t diff = key.n ^ given.n;

    for (size_t i = 0; i < given.n; i++)
        diff |= (size_t)((unsigned char)given.p[i] ^ (unsigned char)key.p[i % key.n]);
    return diff == 0;
}

hx_access hx_keys_check(const hx_keys *k, hx_str given, bool admin, const char **name)
{
    const entry *found = NULL;

    *name = NULL;
    if (k == NULL)
        return HX_ACCESS_YES;
    for (size_t i = 0; i < k->n && given.n <= KEY_MAX_BYTES; i++)
        if (same(k->entry[i].key, given))
            found = &k->entry[i];
    if (found != NULL)
        *name = found->name;
    if (found == NULL)
        return k->n_user == 0 && !admin ? HX_ACCESS_YES : HX_ACCESS_UNKNOWN;
    return !admin || found->admin || k->admin == NULL ? HX_ACCESS_YES
                                                      : HX_ACCESS_NOT_ADMIN;
}
