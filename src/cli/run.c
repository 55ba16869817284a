/* run.c - the commands that run a model once or serve it: serve, run, logits. Uses
 * hoist.h and serve.h only, as any other program would. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "serve/serve.h"

#define PROMPT_MAX (64 << 20) /* bytes of a prompt, far beyond any context */
#define SHOW_FROM  2048       /* tokens of a prompt whose reading is shown */

/* ---- serve ------------------------------------------------------------ */

typedef struct {
    const hx_cli *c;
    hx_server *server;
    hx_engine *engine;
    _Atomic bool opening; /* the engine is on its way */
    _Atomic bool opened;  /* it is there */
    _Atomic bool stop;    /* ends a download */
    int rc;
} loader;

static void on_load(void *server, uint64_t done, uint64_t total)
{
    hx_server_set_loading(server, done, total);
}

/* A line per request, and what is worth a warning. */
static void log_line(void *ud, int level, const char *line)
{
    char when[32];
    const time_t now = time(NULL);
    struct tm tm;

    (void)ud;
    if (level > HX_LOG_INFO)
        return;
    localtime_r(&now, &tm);
    strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &tm);
    fprintf(stderr, "%s %s%s\n", when,
            level == HX_LOG_ERROR  ? "error: "
            : level == HX_LOG_WARN ? "warning: "
                                   : "",
            line);
}

/* serve --pull: fills the folder unless a model is there already. */
static int fill_folder(loader *l)
{
    const hx_pull p = { .repo = l->c->pull,
                        .dir = l->c->model,
                        .files = l->c->files,
                        .fn = on_load,
                        .ud = l->server,
                        .stop = &l->stop };
    hx_err err = { 0 };

    if (cli_pull_is_done(l->c->model)) {
        printf("%s: a model is there, nothing is downloaded\n", l->c->model);
        return 0;
    }
    if (!cli_pull_may_fill(l->c->model)) {
        fprintf(stderr,
                "hoist: %s: holds other files and no model; --pull fills an empty or new "
                "folder\n",
                l->c->model);
        return 1;
    }
    printf("downloading %s to %s\n", l->c->pull, l->c->model);
    fflush(stdout);
    return cli_pull(&p, &err) != 0 ? cli_fail(&err) : 0;
}

/* Loads while the server already answers /health with 503. */
static void *load(void *ud)
{
    loader *l = ud;
    int64_t start;
    const char *host = l->c->host != NULL ? l->c->host : "127.0.0.1";
    hx_info info;

    if (l->c->pull != NULL && (l->rc = fill_folder(l)) != 0) {
        hx_server_stop(l->server);
        return NULL;
    }
    start = hx_now_us();
    atomic_store(&l->opening, true);
    l->rc = cli_open_engine(&l->engine, l->c, on_load, l->server);
    atomic_store(&l->opening, false);
    if (l->rc != 0) {
        hx_server_stop(l->server);
        return NULL;
    }
    hx_get_info(l->engine, &info);
    hx_server_set_engine(l->server, l->engine);
    atomic_store(&l->opened, true);
    printf("loaded in %.2f s: %s, context %lld, %d streams, %s\n",
           (double)(hx_now_us() - start) / 1e6, info.name, (long long)info.ctx_tokens,
           info.max_streams, info.device);
    if (l->c->unix_path != NULL)
        printf("serving on unix:%s\n", l->c->unix_path);
    else
        printf(strchr(host, ':') != NULL && host[0] != '[' ? "serving on %s://[%s]:%d\n"
                                                           : "serving on %s://%s:%d\n",
               l->c->tls_cert != NULL ? "https" : "http", host,
               hx_server_port(l->server));
    fflush(stdout);
    return NULL;
}

/* Those that end the server; SIGHUP does when its terminal goes, but not under nohup. */
static sigset_t stop_signals(void)
{
    struct sigaction hup;
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN)
        sigaddset(&set, SIGHUP);
    return set;
}

/* Without its device a process is of no use: it ends, and whoever started it may start
 * another. Requests have their errors by then. */
static bool is_lost(loader *l)
{
    hx_status st = { 0 };

    if (atomic_load(&l->opened))
        hx_get_status(l->engine, &st);
    if (st.fault == NULL || strcmp(st.fault, "device") != 0)
        return false;
    fprintf(stderr, "hoist: %s\n", st.fault_text);
    l->rc = 1;
    return true;
}

/* The thread that waits for these signals; the others have them blocked. The first lets
 * answers go on for a while, the second does not. */
static void *wait_signal(void *ud)
{
    const struct timespec often = { .tv_nsec = 200000000 };
    const sigset_t set = stop_signals();
    loader *l = ud;
    bool lost = false;

    while (!atomic_load(&l->stop))
        if (sigtimedwait(&set, NULL, &often) > 0 ? !atomic_load(&l->stop)
                                                 : !lost && (lost = is_lost(l)))
            hx_server_stop(l->server);
    return NULL;
}

/* Keys of the command line and of the file, one a line; NULL where none was asked for. */
static int read_keys(const hx_cli *c, hx_sb *out, hx_err *err)
{
    char *text = NULL;
    size_t n = 0;
    int rc;

    for (int32_t i = 0; i < c->api_keys.n; i++) {
        hx_sb_str(out, c->api_keys.p[i]);
        hx_sb_char(out, '\n');
    }
    if (c->api_key_file != NULL) {
        if ((rc = hx_file_read(c->api_key_file, 1 << 20, &text, &n, err)) != 0)
            return rc;
        hx_sb_add(out, text, n);
        hx_sb_char(out, '\n');
        hx_free(text);
    }
    return out->bad ? hx_fail(err, HX_ENOMEM, "API keys: no memory") : 0;
}

int cmd_serve(const hx_cli *c)
{
    hx_server_opt opt = { .host = c->host,
                          .port = (int32_t)c->port,
                          .unix_path = c->unix_path,
                          .tls_cert = c->tls_cert,
                          .tls_key = c->tls_key,
                          .admin_key = c->admin_key,
                          .served_name = c->served_name,
                          .cors = c->cors,
                          .official_tokens = c->official,
                          .log_prompts = c->log_prompts };
    loader l = { .c = c };
    pthread_t load_thread, signal_thread;
    hx_err err = { 0 };
    hx_sb keys = { 0 };
    const sigset_t set = stop_signals();
    int rc;

    if (read_keys(c, &keys, &err) != 0)
        return cli_fail(&err);
    opt.api_key = keys.p;
    if (!c->quiet)
        hx_on_log(log_line, NULL);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    rc = hx_server_open(&l.server, &opt, &err);
    hx_sb_free(&keys);
    if (rc != 0)
        return cli_fail(&err);
    if (pthread_create(&signal_thread, NULL, wait_signal, &l) != 0 ||
        pthread_create(&load_thread, NULL, load, &l) != 0) {
        fprintf(stderr, "hoist: the system refuses another thread\n");
        return 1;
    }
    rc = hx_server_run(l.server, &err);
    atomic_store(&l.stop, true);
    if (atomic_load(&l.opening)) { /* cannot be called off; nothing is lost with it */
        fflush(stdout);
        _exit(rc != 0 ? cli_fail(&err) : 0);
    }
    pthread_join(load_thread, NULL);
    pthread_kill(signal_thread, SIGTERM);
    pthread_join(signal_thread, NULL);
    hx_server_close(l.server);
    hx_close(l.engine);
    return rc != 0 ? cli_fail(&err) : l.rc;
}

/* ---- run -------------------------------------------------------------- */

/* -p, or for "-" what comes on standard input. 0, or what the command returns. */
static int read_prompt(const hx_cli *c, hx_sb *text)
{
    const bool piped = strcmp(c->prompt, "-") == 0;
    const char *from = piped ? "standard input" : "-p";
    char part[65536];
    size_t n;

    if (!piped)
        hx_sb_str(text, c->prompt);
    while (piped && text->n <= PROMPT_MAX && (n = fread(part, 1, sizeof part, stdin)) > 0)
        hx_sb_add(text, part, n);
    if (piped && ferror(stdin))
        fprintf(stderr, "hoist: %s: %s\n", from, strerror(errno));
    else if (text->bad)
        fprintf(stderr, "hoist: %s: no memory\n", from);
    else if (text->n == 0)
        fprintf(stderr, "hoist: %s: empty, expected a prompt\n", from);
    else if (text->n > PROMPT_MAX)
        fprintf(stderr, "hoist: %s: more than %d MiB\n", from, PROMPT_MAX >> 20);
    else if (!hx_utf8_ok(text->p, text->n))
        fprintf(stderr, "hoist: %s: is not UTF-8\n", from);
    else
        return 0;
    return 2;
}

/* The prompt's ids: the text as it is, or as one user message in the chat template. */
static int prompt_ids(hx_engine *e, const hx_cli *c, hx_str text, int32_t **ids,
                      int64_t *n)
{
    const hx_render_opt opt = { .official = c->official };
    hx_err err = { 0 };
    hx_sb json = { 0 };
    int rc;

    if (c->raw) {
        *n = hx_tokenize(e, text, true, NULL, 0);
        if (*n >= 0 && (*ids = hx_new(int32_t, HX_MAX(*n, 1))) == NULL)
            *n = HX_ENOMEM;
        if (*n >= 0)
            *n = hx_tokenize(e, text, true, *ids, *n);
        if (*n >= 0)
            return 0;
        hx_fail(&err, (int)*n, "prompt: cannot be tokenized (%s)", hx_strerror((int)*n));
        return cli_fail(&err);
    }
    hx_sb_str(&json, "{\"messages\":[{\"role\":\"user\",\"content\":");
    hx_json_put_str(&json, text);
    hx_sb_str(&json, "}],\"add_generation_prompt\":true}");
    rc = json.bad ? hx_fail(&err, HX_ENOMEM, "prompt: no memory")
                  : hx_render(e, (hx_str) { json.p, json.n }, &opt, ids, n, NULL, &err);
    hx_sb_free(&json);
    return rc != 0 ? cli_fail(&err) : 0;
}

/* A raw answer: all its text but special tokens. */
static void print_raw(const hx_engine *e, const hx_event *ev, hx_utf8_stream *utf8)
{
    hx_sb out = { 0 };
    int32_t from = 0;

    for (int32_t i = 0; i < ev->n_tokens; i++) {
        bool special;

        hx_token_bytes(e, ev->tokens[i], &special);
        if (!special)
            hx_utf8_feed(
                utf8, (hx_str) { ev->bytes.p + from, (size_t)(ev->end[i] - from) }, &out);
        from = ev->end[i];
    }
    fwrite(out.p != NULL ? out.p : "", 1, out.n, stdout);
    fflush(stdout);
    hx_sb_free(&out);
}

/* A chat answer: content on standard output, reasoning on standard error, calls as text.
 * ud: was the last piece reasoning? */
static void print_reply(void *ud, const hx_reply_event *ev)
{
    FILE *f = ev->kind == HX_REPLY_REASONING ? stderr : stdout;
    bool *reasoning = ud;

    if (*reasoning && f == stdout)
        fputc('\n', stderr);
    *reasoning = f == stderr;
    if (ev->kind == HX_REPLY_CALL_END)
        fputs(")\n", f);
    else
        fprintf(f, "%.*s%s", (int)ev->text.n, ev->text.p,
                ev->kind == HX_REPLY_CALL ? "(" : "");
    fflush(f);
}

static void print_figures(const hx_event *ev)
{
    static const char *const why[] = { "", "end token", "stop text", "length",
                                       "cancelled" };
    const double read_s = (double)(ev->times.first_us - ev->times.started_us) / 1e6;
    const double made_s = (double)(ev->times.done_us - ev->times.first_us) / 1e6;

    fprintf(stderr,
            "prompt %lld tokens in %.3f s (%.0f tok/s), answer %lld tokens in %.3f s "
            "(%.1f tok/s), %s\n",
            (long long)ev->prompt, read_s, (double)ev->prompt / HX_MAX(read_s, 1e-6),
            (long long)ev->generated, made_s,
            (double)(ev->generated - 1) / HX_MAX(made_s, 1e-6), why[ev->stop]);
}

void cli_show_reading(const hx_event *ev)
{
    if (ev->prompt <= SHOW_FROM || ev->generated > 0)
        return;
    if (ev->kind == HX_EV_PROGRESS && ev->prefilled < ev->prompt)
        cli_progress("reading prompt: %lld of %lld tokens", (long long)ev->prefilled,
                     (long long)ev->prompt);
    else
        cli_progress(" ");
}

static int generate(hx_engine *e, const hx_cli *c, const int32_t *ids, int64_t n)
{
    hx_info info;
    hx_utf8_stream utf8 = { 0 };
    hx_reply *reply = NULL;
    bool reasoning = false;
    hx_stream *s;
    hx_event ev;
    hx_err err = { 0 };

    hx_get_info(e, &info);
    const hx_request r = { .tokens = ids,
                           .n_tokens = n,
                           .max_new = c->n,
                           .temperature = c->has_temp ? (float)c->temp : info.temperature,
                           .top_p = info.top_p,
                           .top_k = info.top_k,
                           .progress = true,
                           .seed =
                               c->has_seed ? (uint64_t)c->seed : (uint64_t)hx_now_us() };

    if (!c->raw && cli_reply_open(&reply, e, ids, n, &err) != 0)
        return cli_fail(&err);
    if (hx_submit(e, &r, &s, &err) != 0) {
        hx_reply_close(reply);
        return cli_fail(&err);
    }
    do {
        hx_next(s, &ev, -1);
        if (ev.kind == HX_EV_PROGRESS)
            cli_show_reading(&ev);
        else if (ev.kind == HX_EV_TOKENS && c->raw)
            print_raw(e, &ev, &utf8);
        else if (ev.kind == HX_EV_TOKENS)
            cli_reply_feed(reply, &ev, print_reply, &reasoning, &err);
        if (ferror(stdout))
            hx_cancel(s); /* nobody reads on: `| head` */
    } while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR);
    cli_show_reading(&ev);
    if (reply != NULL)
        hx_reply_end(reply, print_reply, &reasoning, NULL, &err);
    if (ev.kind == HX_EV_DONE) {
        if (reasoning)
            fputc('\n', stderr);
        putchar('\n');
        fflush(stdout);
        print_figures(&ev);
    } else {
        err = ev.err;
    }
    hx_reply_close(reply);
    hx_stream_free(s);
    return err.code != 0 ? cli_fail(&err) : 0;
}

int cmd_run(const hx_cli *c)
{
    hx_cli one = *c;
    hx_engine *e = NULL;
    hx_sb text = { 0 };
    int32_t *ids = NULL;
    int64_t n = 0;
    int rc;

    one.streams = 1;
    if (c->prompt == NULL && c->replay == NULL) {
        fprintf(stderr, "hoist: run needs a prompt: -p TEXT\n");
        return 2;
    }
    if ((c->prompt != NULL && (rc = read_prompt(c, &text)) != 0) ||
        (rc = cli_open_engine(&e, &one, NULL, NULL)) != 0)
        goto done;
    if (c->replay != NULL)
        rc = cli_replay(e, c);
    else if ((rc = prompt_ids(e, c, (hx_str) { text.p, text.n }, &ids, &n)) == 0)
        rc = generate(e, c, ids, n);
done:
    hx_free(ids);
    hx_close(e);
    hx_sb_free(&text);
    return rc;
}

/* ---- logits ----------------------------------------------------------- */

static int read_ids(const char *path, int32_t **ids, int64_t *n, hx_err *err)
{
    hx_json *j;
    int rc = hx_json_read(&j, path, 64u << 20, err);

    if (rc == 0 && (hx_json_kind(j) != HX_JSON_ARRAY || hx_json_len(j) == 0))
        rc = hx_fail(err, HX_EFORMAT, "%s: expected a list of token ids", path);
    if (rc == 0) {
        *n = (int64_t)hx_json_len(j);
        if ((*ids = hx_new(int32_t, *n)) == NULL)
            rc = hx_fail(err, HX_ENOMEM, "%s: no memory for %lld ids", path,
                         (long long)*n);
    }
    for (int64_t i = 0; rc == 0 && i < *n; i++) {
        const int64_t id = hx_json_int(hx_json_at(j, (size_t)i), -1);

        if (id < 0 || id > INT32_MAX)
            rc = hx_fail(err, HX_EFORMAT, "%s: element %lld is no token id", path,
                         (long long)i);
        else
            (*ids)[i] = (int32_t)id;
    }
    hx_json_free(j);
    return rc;
}

static int first_position(const char *positions, int64_t n, int64_t *from, hx_err *err)
{
    long long last;
    char end;

    *from = 0;
    if (positions == NULL || strcmp(positions, "all") == 0)
        return 0;
    if (sscanf(positions, "last:%lld%c", &last, &end) != 1 || last < 1)
        return hx_fail(err, HX_EARG, "--positions: \"%.40s\", expected all or last:N",
                       positions);
    *from = HX_MAX(0, n - last);
    return 0;
}

static int write_floats(const char *path, const float *p, size_t n, hx_err *err)
{
    FILE *f = fopen(path, "wb");
    bool good;

    if (f == NULL)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    good = fwrite(p, sizeof *p, n, f) == n;
    good = fclose(f) == 0 && good;
    return good ? 0 : hx_fail(err, HX_EIO, "%s: write failed: %s", path, strerror(errno));
}

int cmd_logits(const hx_cli *c)
{
    hx_cli one = *c;
    hx_engine *e = NULL;
    int32_t *ids = NULL;
    int64_t n = 0, from = 0;
    float *logits = NULL;
    hx_info info;
    hx_err err = { 0 };
    int rc;

    if (c->ids == NULL || c->out == NULL) {
        fprintf(stderr, "hoist: logits needs --ids FILE and --out FILE\n");
        return 2;
    }
    one.streams = 1;
    if ((rc = read_ids(c->ids, &ids, &n, &err)) != 0 ||
        (rc = first_position(c->positions, n, &from, &err)) != 0) {
        hx_free(ids);
        return cli_fail(&err);
    }
    if ((rc = cli_open_engine(&e, &one, NULL, NULL)) != 0) {
        hx_free(ids);
        return rc;
    }
    hx_get_info(e, &info);
    const size_t count = (size_t)(n - from) * (size_t)info.n_vocab;
    if ((logits = hx_new(float, count)) == NULL)
        rc = hx_fail(&err, HX_ENOMEM, "logits: no memory for %lld rows of %d",
                     (long long)(n - from), info.n_vocab);
    const hx_score_args a = {
        .tokens = ids, .n_tokens = n, .from = from, .logits = logits
    };
    if (rc == 0 && (rc = hx_score(e, &a, &err)) == 0)
        rc = write_floats(c->out, logits, count, &err);
    if (rc == 0)
        fprintf(stderr, "wrote %lld rows of %d logits to %s\n", (long long)(n - from),
                info.n_vocab, c->out);
    hx_free(logits);
    hx_free(ids);
    hx_close(e);
    return rc != 0 ? cli_fail(&err) : 0;
}
