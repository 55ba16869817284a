/* bench_serve.c - hoist bench serve: mixes of clients over HTTP, against a server that it
 * starts in this process or one that runs elsewhere. Called by tools.c.
 *
 * Clients are threads with plain sockets; they speak HTTP/1.0, whose streams are not
 * chunked, and keep when each piece of an answer came. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/bench.h"
#include "serve/serve.h"

#define CLIENTS_MAX 64
#define PIECES_MAX  65536

typedef struct {
    char host[256], port[8], model[256], key[160];
    int64_t ctx;
    hx_server *server; /* ours, or NULL */
    hx_engine *engine;
    pthread_t thread;
    uint64_t seed;
    int n_crowd;
    bench_report *out;
} bench;

/* One request and what came of it. */
typedef struct {
    bench *b;
    hx_sb body;
    int64_t cancel_us;  /* closes so long after the start; 0: reads to the end */
    int32_t slow_us;    /* pause before every read */
    atomic_bool *until; /* closes once this is set; may be NULL */
    int64_t start_us, first_us, end_us;
    int64_t *at; /* [n_at] when pieces came */
    int64_t n_at;
    int64_t n_prompt, n_cached, n_answer;
    hx_sb text; /* of the answer */
    bool cut, failed;
    char why[160];
} client;

/* ---- sockets ------------------------------------------------------------- */

static int dial(const bench *b, int slow)
{
    const struct addrinfo want = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM };
    struct addrinfo *a = NULL;
    int fd = -1, one = 1, small = 2048;

    if (getaddrinfo(b->host, b->port, &want, &a) != 0)
        return -1;
    if ((fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0) {
        const struct timeval patience = { .tv_sec = 120 };

        if (slow > 0)
            setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(a);
    return fd;
}

static bool send_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        const ssize_t k = send(fd, p, n, MSG_NOSIGNAL);

        if (k <= 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

static bool send_request(const bench *b, int fd, const char *method, const char *path,
                         hx_str body)
{
    hx_sb head = { 0 };
    bool ok;

    hx_sb_printf(&head,
                 "%s %s HTTP/1.0\r\nHost: %s\r\n%s%s%sContent-Type: application/json\r\n"
                 "Content-Length: %zu\r\n\r\n",
                 method, path, b->host, b->key[0] != '\0' ? "Authorization: Bearer " : "",
                 b->key, b->key[0] != '\0' ? "\r\n" : "", body.n);
    ok = !head.bad && send_all(fd, head.p, head.n) && send_all(fd, body.p, body.n);
    hx_sb_free(&head);
    return ok;
}

/* A small request; the parsed body of its answer, or NULL. */
static hx_json *fetch(const bench *b, const char *path)
{
    const int fd = dial(b, 0);
    hx_json *j = NULL;
    hx_sb in = { 0 };
    char buf[4096], *end;
    ssize_t n;

    if (fd < 0)
        return NULL;
    if (send_request(b, fd, "GET", path, (hx_str) { "", 0 }))
        while ((n = recv(fd, buf, sizeof buf, 0)) > 0)
            hx_sb_add(&in, buf, (size_t)n);
    close(fd);
    if (in.p != NULL && (end = strstr(in.p, "\r\n\r\n")) != NULL)
        hx_json_parse(&j, hx_str_c(end + 4), 0, NULL);
    hx_sb_free(&in);
    return j;
}

/* ---- one streamed answer --------------------------------------------------- */

static void give_up(client *c, const char *why, size_t n)
{
    c->failed = true;
    snprintf(c->why, sizeof c->why, "%.*s", (int)HX_MIN(n, sizeof c->why - 1), why);
}

static void take_usage(client *c, const hx_json *usage)
{
    c->n_prompt = hx_json_int(hx_json_get(usage, "prompt_tokens"), c->n_prompt);
    c->n_answer = hx_json_int(hx_json_get(usage, "completion_tokens"), c->n_answer);
    c->n_cached = hx_json_int(
        hx_json_get(hx_json_get(usage, "prompt_tokens_details"), "cached_tokens"),
        c->n_cached);
}

static void take_line(client *c, hx_str line, int64_t now)
{
    hx_json *j = NULL;
    const hx_json *delta;
    hx_str text;

    if (line.n < 6 || memcmp(line.p, "data: ", 6) != 0 || line.p[6] != '{')
        return;
    line = (hx_str) { line.p + 6, line.n - 6 };
    if (hx_json_parse(&j, line, 0, NULL) != 0 || hx_json_has(j, "error")) {
        give_up(c, line.p, line.n);
        hx_json_free(j);
        return;
    }
    delta = hx_json_get(hx_json_at(hx_json_get(j, "choices"), 0), "delta");
    text = hx_json_str(hx_json_get(delta, "content"));
    if (text.n == 0)
        text = hx_json_str(hx_json_get(delta, "reasoning_content"));
    if (text.n > 0) {
        if (c->first_us == 0)
            c->first_us = now;
        if (c->n_at < PIECES_MAX)
            c->at[c->n_at++] = now;
        hx_sb_add(&c->text, text.p, text.n);
    }
    if (hx_json_kind(hx_json_get(j, "usage")) == HX_JSON_OBJECT)
        take_usage(c, hx_json_get(j, "usage"));
    hx_json_free(j);
}

/* Takes whole lines from in; head: the first are the answer's. */
static void take_lines(client *c, hx_sb *in, bool *head)
{
    const int64_t now = hx_now_us();
    size_t from = 0;
    char *end;

    if (*head) {
        if ((end = strstr(in->p, "\r\n\r\n")) == NULL)
            return;
        if (strncmp(in->p, "HTTP/1.", 7) != 0 || strncmp(in->p + 8, " 200", 4) != 0)
            give_up(c, end + 4, strlen(end + 4));
        *head = false;
        from = (size_t)(end + 4 - in->p);
    }
    while (!c->failed && (end = memchr(in->p + from, '\n', in->n - from)) != NULL) {
        take_line(c, (hx_str) { in->p + from, (size_t)(end - in->p) - from }, now);
        from = (size_t)(end + 1 - in->p);
    }
    memmove(in->p, in->p + from, in->n - from);
    in->n -= from;
    in->p[in->n] = '\0';
}

static bool is_over(const client *c)
{
    return (c->cancel_us != 0 && hx_now_us() - c->start_us >= c->cancel_us) ||
           (c->until != NULL && atomic_load(c->until));
}

static void *run_client(void *ud)
{
    client *c = ud;
    const int fd = dial(c->b, c->slow_us);
    const struct timeval tick = { .tv_usec = 5000 };
    char buf[16384];
    bool head = true;
    hx_sb in = { 0 };

    c->start_us = hx_now_us();
    if (fd < 0 || !send_request(c->b, fd, "POST", "/v1/chat/completions",
                                (hx_str) { c->body.p, c->body.n }))
        give_up(c, "cannot connect", 14);
    if (c->cancel_us != 0 || c->until != NULL)
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tick, sizeof tick);
    while (!c->failed && !(c->cut = is_over(c))) {
        ssize_t n;

        if (c->slow_us > 0)
            usleep((useconds_t)c->slow_us);
        n = recv(fd, buf, c->slow_us > 0 ? 256 : sizeof buf, 0);
        if (n < 0 && errno == EAGAIN && (c->cancel_us != 0 || c->until != NULL))
            continue;
        if (n < 0)
            give_up(c, "nothing came for 120 s", 22);
        if (n <= 0)
            break;
        hx_sb_add(&in, buf, (size_t)n);
        if (in.bad)
            give_up(c, "no memory", 9);
        else
            take_lines(c, &in, &head);
    }
    c->end_us = hx_now_us();
    if (fd >= 0)
        close(fd);
    hx_sb_free(&in);
    return NULL;
}

/* ---- requests -------------------------------------------------------------- */

static void put_words(hx_sb *b, uint64_t seed, int64_t n)
{
    static const char *const word[] = {
        "the",  "river", "stone", "holds", "a",     "light", "over",   "small", "town",
        "and",  "every", "road",  "turns", "to",    "sea",   "where",  "old",   "ships",
        "wait", "for",   "wind",  "while", "birds", "count", "silver", "fish",  "in",
        "rain", "near",  "green", "hills", "of",    "winter"
    };

    for (int64_t i = 0; i < n; i++)
        hx_sb_printf(b, "%s ", word[hx_rng_at(seed, (uint64_t)i) % HX_LEN(word)]);
}

static void put_message(hx_sb *b, const char *role, hx_str text)
{
    hx_sb_printf(b, "%s{\"role\":\"%s\",\"content\":", b->n > 0 ? "," : "", role);
    hx_json_put_str(b, text);
    hx_sb_char(b, '}');
}

static void put_said(hx_sb *b, const char *role, uint64_t seed, int64_t n_word)
{
    hx_sb text = { 0 };

    put_words(&text, seed, n_word);
    put_message(b, role, (hx_str) { text.p, text.n });
    hx_sb_free(&text);
}

static void client_open(client *c, bench *b, const hx_sb *messages, int64_t n_new)
{
    *c = (client) { .b = b, .at = hx_new(int64_t, PIECES_MAX) };
    hx_sb_printf(
        &c->body,
        "{\"model\":\"%s\",\"stream\":true,\"stream_options\":{\"include_usage\":"
        "true},\"ignore_eos\":true,\"temperature\":1,\"seed\":%llu,"
        "\"max_tokens\":%lld,\"messages\":[",
        b->model, (unsigned long long)(b->seed++ & 0xffffff), (long long)n_new);
    hx_sb_add(&c->body, messages->p, messages->n);
    hx_sb_str(&c->body, "]}");
    if (c->at == NULL || c->body.bad)
        give_up(c, "no memory", 9);
}

static void client_close(client *c)
{
    hx_free(c->at);
    hx_sb_free(&c->body);
    hx_sb_free(&c->text);
}

static void run_clients(client *c, int n)
{
    pthread_t t[CLIENTS_MAX];
    int made = 0;

    while (made < n && pthread_create(&t[made], NULL, run_client, &c[made]) == 0)
        made++;
    for (int i = made; i < n; i++)
        give_up(&c[i], "no thread", 9);
    for (int i = 0; i < made; i++)
        pthread_join(t[i], NULL);
}

/* ---- figures ---------------------------------------------------------------- */

/* A growing list of measurements. */
typedef struct {
    double *v;
    int64_t n, cap;
} sample;

static void add(sample *s, double v)
{
    if (s->n == s->cap) {
        const int64_t cap = HX_MAX(2 * s->cap, 256);
        double *grown = hx_realloc(s->v, (size_t)cap * sizeof *grown);

        if (grown == NULL)
            return;
        s->v = grown;
        s->cap = cap;
    }
    s->v[s->n++] = v;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double quantile(sample *s, double q)
{
    if (s->n == 0)
        return 0;
    qsort(s->v, (size_t)s->n, sizeof *s->v, by_value);
    return s->v[HX_MIN((int64_t)(q * (double)s->n), s->n - 1)];
}

static void put(const bench *b, const char *mix, const char *what, double v,
                const char *unit)
{
    char name[96];

    snprintf(name, sizeof name, "%s: %s", mix, what);
    bench_one(b->out, name, unit, v);
}

static void put_spread(const bench *b, const char *mix, const char *what, sample *s)
{
    char name[64];

    snprintf(name, sizeof name, "%s p50", what);
    put(b, mix, name, quantile(s, 0.5), "ms");
    snprintf(name, sizeof name, "%s p99", what);
    put(b, mix, name, quantile(s, 0.99), "ms");
}

/* Gaps of c between two moments; returns the pieces per second in that time. */
static double take_gaps(const client *c, int64_t from_us, int64_t to_us, sample *gaps)
{
    int64_t n = 0;

    for (int64_t i = 1; i < c->n_at; i++)
        if (c->at[i - 1] >= from_us && c->at[i] <= to_us) {
            n++;
            if (gaps != NULL)
                add(gaps, (double)(c->at[i] - c->at[i - 1]) / 1e3);
        }
    return to_us > from_us ? (double)n * 1e6 / (double)(to_us - from_us) : 0;
}

static double ttft_ms(const client *c)
{
    return c->first_us != 0 ? (double)(c->first_us - c->start_us) / 1e3 : 0;
}

/* Errors of a mix; says the first one. */
static int count_failed(const bench *b, const char *mix, const client *c, int n)
{
    int failed = 0;

    for (int i = 0; i < n; i++)
        if (c[i].failed && failed++ == 0)
            fprintf(stderr, "%s: %s\n", mix, c[i].why);
    if (failed > 0)
        put(b, mix, "failed", failed, "requests");
    return failed;
}

/* ---- mixes ------------------------------------------------------------------- */

/* Conversations that grow: each turn sends all of it again. */
static int mix_agents(bench *b)
{
    enum { N = 4, TURNS = 5 };
    const int64_t n_word = HX_MIN(1200, b->ctx / 8);
    sample first = { 0 }, ttft = { 0 };
    int64_t prompt = 0, cached = 0, answer = 0;
    const int64_t start = hx_now_us();
    hx_sb said[N] = { 0 };
    client c[N];
    int failed = 0;

    for (int k = 0; k < N; k++)
        put_said(&said[k], "system", b->seed + 100 + (uint64_t)k, n_word);
    for (int turn = 0; turn < TURNS && failed == 0; turn++) {
        for (int k = 0; k < N; k++) {
            put_said(&said[k], "user", b->seed++, 40);
            client_open(&c[k], b, &said[k], 40);
        }
        run_clients(c, N);
        failed += count_failed(b, "agents", c, N);
        for (int k = 0; k < N; k++) {
            add(turn == 0 ? &first : &ttft, ttft_ms(&c[k]));
            prompt += turn > 0 ? c[k].n_prompt : 0;
            cached += turn > 0 ? c[k].n_cached : 0;
            answer += c[k].n_answer;
            put_message(&said[k], "assistant", (hx_str) { c[k].text.p, c[k].text.n });
            client_close(&c[k]);
        }
    }
    put_spread(b, "agents", "TTFT of first turns", &first);
    put_spread(b, "agents", "TTFT of later turns", &ttft);
    put(b, "agents", "prompt tokens reused",
        100.0 * (double)cached / (double)HX_MAX(prompt, 1), "%");
    put(b, "agents", "throughput", (double)answer * 1e6 / (double)(hx_now_us() - start),
        "tok/s");
    for (int k = 0; k < N; k++)
        hx_sb_free(&said[k]);
    hx_free(first.v);
    hx_free(ttft.v);
    return failed;
}

/* Many questions under one long system prompt, four at a time. */
static int mix_shared(bench *b)
{
    enum { N = 4, ROUNDS = 3 };
    const uint64_t system = b->seed + 1000;
    int64_t prompt = 0, cached = 0;
    sample ttft = { 0 };
    client c[N];
    int failed = 0;

    for (int r = 0; r < ROUNDS && failed == 0; r++) {
        for (int k = 0; k < N; k++) {
            hx_sb said = { 0 };

            put_said(&said, "system", system, HX_MIN(2000, b->ctx / 6));
            put_said(&said, "user", b->seed++, 20);
            client_open(&c[k], b, &said, 16);
            hx_sb_free(&said);
        }
        run_clients(c, N);
        failed += count_failed(b, "shared prefix", c, N);
        for (int k = 0; k < N; k++) {
            if (r > 0) {
                add(&ttft, ttft_ms(&c[k]));
                prompt += c[k].n_prompt;
                cached += c[k].n_cached;
            }
            client_close(&c[k]);
        }
    }
    put_spread(b, "shared prefix", "TTFT", &ttft);
    put(b, "shared prefix", "prompt tokens reused",
        100.0 * (double)cached / (double)HX_MAX(prompt, 1), "%");
    hx_free(ttft.v);
    return failed;
}

static void open_long(client *c, bench *b, uint64_t seed)
{
    hx_sb said = { 0 };

    /* These words are about one token each. */
    put_said(&said, "user", seed, HX_MIN(30000, b->ctx * 8 / 10));
    client_open(c, b, &said, 4);
    hx_sb_free(&said);
}

/* What the three streams had without and with the newcomer, and what it had. */
typedef struct {
    sample rate, kept, gap50, gap99, ratio, alone, beside, times, even;
    int64_t n_prompt;
} beside_figures;

/* A long prompt alone; then three streams, and after a while another one. */
static int run_beside(bench *b, beside_figures *f)
{
    enum { N = 3 };
    client c[N], alone, late;
    pthread_t t[N];
    atomic_bool done = false;
    sample gaps = { 0 };
    double rate0 = 0, rate1 = 0, least = 1e9, most = 0;
    int64_t from;

    open_long(&alone, b, b->seed + 7);
    run_clients(&alone, 1);
    for (int k = 0; k < N; k++) {
        hx_sb said = { 0 };

        put_said(&said, "user", b->seed++, 30);
        client_open(&c[k], b, &said, b->ctx / 2);
        c[k].until = &done;
        hx_sb_free(&said);
        if (pthread_create(&t[k], NULL, run_client, &c[k]) != 0)
            return 1;
    }
    open_long(&late, b, b->seed + 8);
    usleep(1000000);
    from = hx_now_us();
    usleep(2000000);
    run_clients(&late, 1);
    atomic_store(&done, true);
    for (int k = 0; k < N; k++) {
        pthread_join(t[k], NULL);
        rate0 += take_gaps(&c[k], from, late.start_us, NULL);
        const double r = take_gaps(&c[k], late.start_us, late.first_us, &gaps);
        rate1 += r;
        least = HX_MIN(least, r);
        most = HX_MAX(most, r);
    }
    const double p50 = HX_MAX(quantile(&gaps, 0.5), 1e-9), p99 = quantile(&gaps, 0.99);
    f->n_prompt = late.n_prompt;
    add(&f->rate, rate0);
    add(&f->kept, 100 * rate1 / HX_MAX(rate0, 1e-9));
    add(&f->gap50, p50);
    add(&f->gap99, p99);
    add(&f->ratio, p99 / p50);
    add(&f->even, least / HX_MAX(most, 1e-9));
    add(&f->alone, ttft_ms(&alone));
    add(&f->beside, ttft_ms(&late));
    add(&f->times, ttft_ms(&late) / HX_MAX(ttft_ms(&alone), 1e-9));
    const int failed = count_failed(b, "long beside streams", c, N) +
                       count_failed(b, "long beside streams", &late, 1) +
                       count_failed(b, "long beside streams", &alone, 1);
    for (int k = 0; k < N; k++)
        client_close(&c[k]);
    client_close(&alone);
    client_close(&late);
    hx_free(gaps.v);
    return failed;
}

/* Each round has its own "alone": the machine's mood changes from minute to minute. */
static int mix_beside(bench *b)
{
    enum { ROUNDS = 3 };
    beside_figures f = { 0 };
    const struct {
        const char *name, *unit;
        sample *v;
    } rows[] = {
        { "rate of three streams before", "tok/s", &f.rate },
        { "rate they keep", "%", &f.kept },
        { "gap p50 beside", "ms", &f.gap50 },
        { "gap p99 beside", "ms", &f.gap99 },
        { "gap p99 / p50 beside", "x", &f.ratio },
        { "evenness, slowest / fastest stream", "x", &f.even },
        { "TTFT alone", "ms", &f.alone },
        { "TTFT beside", "ms", &f.beside },
        { "TTFT beside / alone", "x", &f.times },
    };
    int failed = 0;

    for (int k = 0; k < ROUNDS && failed == 0; k++, b->seed += 100)
        failed = run_beside(b, &f);
    put(b, "long beside streams", "prompt", (double)f.n_prompt, "tokens");
    for (size_t i = 0; i < HX_LEN(rows); i++) {
        char name[96];

        snprintf(name, sizeof name, "long beside streams: %s", rows[i].name);
        if (rows[i].v->n > 0)
            bench_figure(b->out, name, rows[i].unit, rows[i].v->v, (int)rows[i].v->n);
        hx_free(rows[i].v->v);
    }
    return failed;
}

static int64_t n_working(const bench *b)
{
    hx_json *j = fetch(b, "/slots");
    const int64_t n = j != NULL ? (int64_t)hx_json_len(j) : -1;

    hx_json_free(j);
    return n;
}

/* Clients that leave at random moments; nothing of them may stay. */
static int mix_cancels(bench *b)
{
    enum { N = 16, ROUNDS = 4 };
    client c[N];
    int64_t gone, failed = 0;

    for (int r = 0; r < ROUNDS; r++) {
        for (int k = 0; k < N; k++) {
            hx_sb said = { 0 };

            put_said(&said, "user", b->seed++, 20 + (k % 4) * b->ctx / 16);
            client_open(&c[k], b, &said, 1000);
            c[k].cancel_us = 1000 + (int64_t)(hx_rng_at(b->seed, 3) % 400000);
            hx_sb_free(&said);
        }
        run_clients(c, N);
        failed += count_failed(b, "cancels", c, N);
        for (int k = 0; k < N; k++)
            client_close(&c[k]);
    }
    gone = hx_now_us();
    while (n_working(b) != 0 && hx_now_us() - gone < 10000000)
        usleep(2000);
    put(b, "cancels", "idle after the last", (double)(hx_now_us() - gone) / 1e3, "ms");
    put(b, "cancels", "requests left", (double)n_working(b), "");
    return (int)failed;
}

/* Rate of three streams alone, then beside one who reads slowly. */
static int mix_slow(bench *b)
{
    enum { N = 4 };
    double rate[2] = { 0 };
    client c[N];
    int failed = 0;

    for (int way = 0; way < 2; way++) {
        const int n = way == 0 ? N - 1 : N;

        for (int k = 0; k < n; k++) {
            hx_sb said = { 0 };

            put_said(&said, "user", b->seed++, 30);
            client_open(&c[k], b, &said, 400);
            c[k].slow_us = k == N - 1 ? 20000 : 0;
            c[k].cancel_us = k == N - 1 ? 3000000 : 0;
            hx_sb_free(&said);
        }
        run_clients(c, n);
        failed += count_failed(b, "slow reader", c, n);
        for (int k = 0; k < N - 1; k++)
            rate[way] += take_gaps(&c[k], c[k].first_us, c[k].end_us, NULL);
        for (int k = 0; k < n; k++)
            client_close(&c[k]);
    }
    put(b, "slow reader", "rate the others keep", 100 * rate[1] / HX_MAX(rate[0], 1e-9),
        "%");
    return failed;
}

static int mix_crowd(bench *b)
{
    const int n = b->n_crowd;
    sample ttft = { 0 }, gaps = { 0 };
    client *c = hx_new(client, n);
    int64_t tokens = 0, first = INT64_MAX, last = 0;
    double least = 1e9, most = 0;
    char mix[32];
    int failed;

    if (c == NULL)
        return 1;
    snprintf(mix, sizeof mix, "%d streams", n);
    for (int k = 0; k < n; k++) {
        hx_sb said = { 0 };

        put_said(&said, "user", b->seed++, 100);
        client_open(&c[k], b, &said, 100);
        hx_sb_free(&said);
    }
    run_clients(c, n);
    failed = count_failed(b, mix, c, n);
    for (int k = 0; k < n; k++) {
        const double r = take_gaps(&c[k], c[k].first_us, c[k].end_us, &gaps);

        add(&ttft, ttft_ms(&c[k]));
        tokens += c[k].n_answer;
        first = HX_MIN(first, c[k].start_us);
        last = HX_MAX(last, c[k].end_us);
        least = HX_MIN(least, r);
        most = HX_MAX(most, r);
        client_close(&c[k]);
    }
    put_spread(b, mix, "TTFT", &ttft);
    put_spread(b, mix, "gap", &gaps);
    put(b, mix, "throughput", (double)tokens * 1e6 / (double)(last - first), "tok/s");
    put(b, mix, "evenness, slowest / fastest stream", least / HX_MAX(most, 1e-9), "x");
    hx_free(ttft.v);
    hx_free(gaps.v);
    hx_free(c);
    return failed;
}

/* run NULL: bench_follow.c's, which need no server. */
static const struct {
    const char *name;
    int (*run)(bench *b);
} mixes[] = {
    { "follow", NULL },       { "newcomer", NULL },     { "agents", mix_agents },
    { "shared", mix_shared }, { "beside", mix_beside }, { "cancels", mix_cancels },
    { "slow", mix_slow },     { "crowd", mix_crowd },
};

/* names: like "beside,crowd"; NULL: all. */
static bool is_named(const char *mix, const char *names)
{
    const size_t n = strlen(mix);

    for (const char *p = names; p != NULL && *p != 0;) {
        const size_t len = strcspn(p, ",");

        if (len == n && memcmp(p, mix, n) == 0)
            return true;
        p += len + (p[len] == ',');
    }
    return names == NULL;
}

/* Whether each of the names is that of a mix, and *server: one of them needs the server. */
static bool know_all(const char *names, bool *server)
{
    size_t n_named = 0, n = 1;

    *server = false;
    for (size_t i = 0; i < HX_LEN(mixes); i++)
        if (is_named(mixes[i].name, names)) {
            *server = *server || mixes[i].run != NULL;
            n_named++;
        }
    for (const char *p = names; p != NULL && (p = strchr(p, ',')) != NULL; p++)
        n++;
    return names == NULL || n_named == n;
}

/* Returns how many requests failed. */
static int run_mixes(bench *b, const char *names)
{
    int failed = 0;

    for (size_t i = 0; i < HX_LEN(mixes); i++)
        if (mixes[i].run != NULL && is_named(mixes[i].name, names))
            failed += mixes[i].run(b);
    return failed;
}

/* ---- the server ---------------------------------------------------------------- */

static void *run_server(void *ud)
{
    bench *b = ud;
    hx_err err = { 0 };

    if (hx_server_run(b->server, &err) != 0)
        cli_fail(&err);
    return NULL;
}

static int start_server(bench *b, const hx_cli *c)
{
    hx_err err = { 0 };
    int rc;

    if ((rc = cli_open_engine(&b->engine, c, NULL, NULL)) != 0)
        return rc;
    if (hx_server_open(&b->server, &(hx_server_opt) { .port = 0 }, &err) != 0)
        return cli_fail(&err);
    hx_server_set_engine(b->server, b->engine);
    snprintf(b->host, sizeof b->host, "127.0.0.1");
    snprintf(b->port, sizeof b->port, "%d", hx_server_port(b->server));
    if (pthread_create(&b->thread, NULL, run_server, b) != 0) {
        hx_server_close(b->server);
        b->server = NULL;
        fprintf(stderr, "hoist: the system refuses another thread\n");
        return 1;
    }
    return 0;
}

static void stop_server(bench *b)
{
    if (b->server != NULL) {
        hx_server_stop(b->server);
        pthread_join(b->thread, NULL);
        hx_server_close(b->server);
    }
    hx_close(b->engine);
}

/* http://host:port, and nothing after it that counts. */
static int read_url(bench *b, const char *url)
{
    const char *host = url + strlen("http://"), *colon = strchr(host, ':');
    const size_t n = strcspn(host, ":/");

    snprintf(b->host, sizeof b->host, "%.*s", (int)n, host);
    snprintf(b->port, sizeof b->port, "%.*s",
             colon != NULL ? (int)strcspn(colon + 1, "/") : 2,
             colon != NULL ? colon + 1 : "80");
    return 0;
}

static int find_model(bench *b)
{
    hx_json *j = fetch(b, "/v1/models");
    const hx_json *m = hx_json_at(hx_json_get(j, "data"), 0);
    const hx_str id = hx_json_str(hx_json_get(m, "id"));

    snprintf(b->model, sizeof b->model, "%.*s", (int)id.n, id.n > 0 ? id.p : "");
    b->ctx = hx_json_int(hx_json_get(m, "max_model_len"), 8192);
    hx_json_free(j);
    if (id.n > 0)
        return 0;
    fprintf(stderr, "hoist: %s:%s: no answer from /v1/models\n", b->host, b->port);
    return 1;
}

int bench_serve(const hx_cli *c, bench_report *out)
{
    const bool remote = strncmp(c->model, "http://", 7) == 0;
    bench b = { .seed = c->has_seed ? (uint64_t)c->seed : 1, .out = out };
    hx_cli more = *c;
    const bool turns = !remote && is_named("follow", c->mixes),
               newcomer = !remote && is_named("newcomer", c->mixes);
    bool server;
    int rc, failed = 0;

    if (!know_all(c->mixes, &server)) {
        fprintf(stderr,
                "hoist: bench serve: --mixes is \"%s\", expected names of `hoist bench "
                "--help`, each once, with commas between\n",
                c->mixes);
        return 2;
    }
    if ((turns || newcomer) && (rc = bench_follow(c, turns, newcomer, out)) != 0)
        return rc;
    if (!server)
        return 0;
    if (c->api_keys.n > 0)
        snprintf(b.key, sizeof b.key, "%s", c->api_keys.p[0]);
    if (more.streams == 0)
        more.streams = 16;
    b.n_crowd = (int)HX_MIN(more.streams, CLIENTS_MAX);
    rc = remote ? read_url(&b, c->model) : start_server(&b, &more);
    if (rc == 0 && (rc = find_model(&b)) == 0) {
        printf("%s at %s:%s, context %lld\n", b.model, b.host, b.port, (long long)b.ctx);
        failed = run_mixes(&b, c->mixes);
    }
    stop_server(&b);
    return rc != 0 ? rc : failed > 0;
}
