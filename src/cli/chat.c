/* chat.c - the terminal chat: history, folded reasoning, Ctrl-C stops an answer. Uses
 * hoist.h and the reply parser only. */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/cli.h"

#define TEXT_MAX_BYTES (1u << 20)
#define TTY_LINE_BYTES 4095 /* a terminal drops what a line has beyond */
#define PASTE_MS       30   /* what comes sooner after a line was not typed */

/* Set by SIGINT while an answer runs; the one thing a handler may touch. */
static volatile sig_atomic_t interrupted;

typedef struct {
    hx_engine *e;
    hx_info info;
    const hx_cli *c;
    hx_sb history; /* JSON objects of messages, comma-separated */
    bool person;   /* colours and the prompt sign */
    bool show_reasoning;
    int effort; /* index of efforts[] */
    /* the answer being shown */
    hx_sb content, reasoning;
    bool in_reasoning;
} chat;

static const char *const efforts[] = { "low", "high", "max" };

static void on_int(int sig)
{
    (void)sig;
    interrupted = 1;
}

static const char *dim(const chat *t, bool on)
{
    return !t->person ? "" : on ? "\033[2m" : "\033[0m";
}

/* ---- showing an answer ------------------------------------------------- */

static void show_reasoning(chat *t, hx_str text)
{
    if (!t->in_reasoning) {
        t->in_reasoning = true;
        printf("%s%s", dim(t, true), t->show_reasoning ? "" : "(thinking");
    }
    hx_sb_add(&t->reasoning, text.p, text.n);
    if (t->show_reasoning)
        fwrite(text.p, 1, text.n, stdout);
}

static void end_reasoning(chat *t)
{
    if (!t->in_reasoning)
        return;
    t->in_reasoning = false;
    if (t->show_reasoning)
        printf("%s\n", dim(t, false));
    else
        printf(", %zu characters; /think shows it)%s\n", t->reasoning.n, dim(t, false));
}

static void on_reply(void *ud, const hx_reply_event *ev)
{
    chat *t = ud;

    if (ev->kind == HX_REPLY_REASONING) {
        show_reasoning(t, ev->text);
        return;
    }
    end_reasoning(t);
    if (ev->kind == HX_REPLY_CONTENT) {
        hx_sb_add(&t->content, ev->text.p, ev->text.n);
        fwrite(ev->text.p, 1, ev->text.n, stdout);
    } else if (ev->kind == HX_REPLY_CALL) {
        printf("[call %.*s ", (int)ev->text.n, ev->text.p);
    } else if (ev->kind == HX_REPLY_ARGS) {
        fwrite(ev->text.p, 1, ev->text.n, stdout);
    } else {
        printf("]\n");
    }
}

/* ---- one turn ----------------------------------------------------------- */

static int render(chat *t, int32_t **ids, int64_t *n, hx_err *err)
{
    const hx_render_opt opt = { .official = t->c->official };
    hx_sb json = { 0 };
    int rc;

    hx_sb_printf(
        &json,
        "{\"messages\":[%s],\"add_generation_prompt\":true,\"reasoning_effort\":\"%s\"}",
        t->history.p != NULL ? t->history.p : "", efforts[t->effort]);
    rc = json.bad ? hx_fail(err, HX_ENOMEM, "chat: no memory")
                  : hx_render(t->e, (hx_str) { json.p, json.n }, &opt, ids, n, NULL, err);
    hx_sb_free(&json);
    return rc;
}

static void add_message(chat *t, const char *role, hx_str content, hx_str reasoning)
{
    hx_sb *h = &t->history;

    if (h->n > 0)
        hx_sb_char(h, ',');
    hx_sb_printf(h, "{\"role\":\"%s\",\"content\":", role);
    hx_json_put_str(h, content);
    if (reasoning.n > 0) {
        hx_sb_str(h, ",\"reasoning_content\":");
        hx_json_put_str(h, reasoning);
    }
    hx_sb_char(h, '}');
}

static int answer(chat *t, const int32_t *ids, int64_t n, hx_err *err)
{
    const hx_request r = {
        .tokens = ids,
        .n_tokens = n,
        .max_new = t->c->n,
        .progress = true,
        .temperature = t->c->has_temp ? (float)t->c->temp : t->info.temperature,
        .top_p = t->info.top_p,
        .top_k = t->info.top_k,
        .seed = t->c->has_seed ? (uint64_t)t->c->seed : (uint64_t)hx_now_us()
    };
    hx_reply *reply = NULL;
    hx_stream *s = NULL;
    hx_event ev = { 0 };
    int rc;

    if ((rc = cli_reply_open(&reply, t->e, ids, n, err)) != 0 ||
        (rc = hx_submit(t->e, &r, &s, err)) != 0) {
        hx_reply_close(reply);
        return rc;
    }
    t->content.n = t->reasoning.n = 0;
    interrupted = 0;
    do {
        if (interrupted || ferror(stdout))
            hx_cancel(s);
        if (hx_next(s, &ev, 100) != 1)
            continue;
        if (ev.kind == HX_EV_PROGRESS)
            cli_show_reading(&ev);
        else if (ev.kind == HX_EV_TOKENS)
            cli_reply_feed(reply, &ev, on_reply, t, err);
        fflush(stdout);
    } while (ev.kind != HX_EV_DONE && ev.kind != HX_EV_ERROR);
    cli_show_reading(&ev); /* Ctrl-C while it was read */
    hx_reply_end(reply, on_reply, t, NULL, err);
    end_reasoning(t);
    printf("%s\n", ev.stop == HX_STOP_CANCEL   ? " (stopped)"
                   : ev.stop == HX_STOP_LENGTH ? " (length)"
                                               : "");
    if (ev.kind == HX_EV_ERROR) {
        *err = ev.err;
        rc = ev.err.code;
    }
    hx_stream_free(s);
    hx_reply_close(reply);
    return rc;
}

static void turn(chat *t, hx_str text)
{
    const size_t before = t->history.n;
    int32_t *ids = NULL;
    int64_t n = 0;
    hx_err err = { 0 };

    add_message(t, "user", text, (hx_str) { NULL, 0 });
    if (render(t, &ids, &n, &err) != 0 || answer(t, ids, n, &err) != 0) {
        fprintf(stderr, "hoist: %s%s\n", err.msg,
                err.code == HX_ELIMIT && before > 0 ? "; /new starts over" : "");
        t->history.n = before;
        if (t->history.p != NULL)
            t->history.p[before] = '\0';
    } else {
        add_message(t, "assistant", (hx_str) { t->content.p, t->content.n },
                    (hx_str) { t->reasoning.p, t->reasoning.n });
    }
    hx_free(ids);
}

/* ---- commands ----------------------------------------------------------- */

/* Returns false for /quit. */
static bool command(chat *t, const char *line)
{
    if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0)
        return false;
    if (strcmp(line, "/new") == 0) {
        hx_sb_free(&t->history);
        printf("new conversation\n");
    } else if (strcmp(line, "/think") == 0) {
        t->show_reasoning = !t->show_reasoning;
        if (t->show_reasoning && t->reasoning.n > 0)
            printf("%s%.*s%s\n", dim(t, true), (int)t->reasoning.n, t->reasoning.p,
                   dim(t, false));
        printf("reasoning is %s\n", t->show_reasoning ? "shown" : "folded");
    } else if (strncmp(line, "/effort ", 8) == 0) {
        size_t i = 0;

        while (i < HX_LEN(efforts) && strcmp(line + 8, efforts[i]) != 0)
            i++;
        if (i < HX_LEN(efforts))
            t->effort = (int)i;
        else
            printf("/effort: \"%.40s\", expected low, high or max\n", line + 8);
        printf("reasoning effort is %s\n", efforts[t->effort]);
    } else {
        printf("/new starts over, /think shows or folds reasoning, /effort low|high|max, "
               "/quit; "
               "Ctrl-C stops an answer\n");
    }
    return true;
}

/* ---- reading ------------------------------------------------------------ */

static bool is_waiting(void)
{
    struct pollfd in = { .fd = 0, .events = POLLIN };

    return poll(&in, 1, PASTE_MS) > 0;
}

/* A line, or what was pasted: lines that come at once, and the one that a person ends after
 * them. False at the end of the input; *bad: it cannot be used, and was told. */
static bool read_text(const chat *t, hx_sb *text, bool *bad)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    bool pasted = false, last, cut = false;

    text->n = 0;
    do {
        last = pasted && !is_waiting();
        if (last) {
            printf("%s (several lines; Enter sends them) %s", dim(t, true),
                   dim(t, false));
            fflush(stdout);
        }
        if ((n = getline(&line, &cap, stdin)) < 0)
            break;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            n--;
        cut = cut || (t->person && n >= TTY_LINE_BYTES);
        if (pasted && n > 0)
            hx_sb_char(text, '\n');
        hx_sb_add(text, line, (size_t)n);
        pasted = pasted || (t->person && is_waiting());
    } while (pasted && !last);
    free(line);
    *bad = cut || text->bad || text->n > TEXT_MAX_BYTES || !hx_utf8_ok(text->p, text->n);
    if (*bad && n >= 0)
        fprintf(stderr,
                cut ? "hoist: the terminal keeps %d bytes of a line; break it, or "
                      "use hoist run MODEL -p TEXT\n"
                    : "hoist: that is not UTF-8 or longer than 1 MiB\n",
                TTY_LINE_BYTES);
    return n >= 0;
}

static void loop(chat *t)
{
    hx_sb text = { 0 };
    bool bad;

    while (!ferror(stdout)) {
        if (t->person) {
            printf("> ");
            fflush(stdout);
        }
        interrupted = 0;
        if (!read_text(t, &text, &bad)) {
            if (t->person)
                putchar('\n');
            if (!interrupted || !t->person)
                break;
            clearerr(stdin); /* Ctrl-C at the prompt */
            printf("(Ctrl-D or /quit leaves)\n");
        } else if (bad || text.n == 0) {
            continue;
        } else if (text.p[0] != '/' || memchr(text.p, '\n', text.n) != NULL) {
            turn(t, (hx_str) { text.p, text.n });
        } else if (!command(t, text.p)) {
            break;
        }
    }
    hx_sb_free(&text);
}

int cmd_chat(const hx_cli *c)
{
    struct sigaction act = { .sa_handler = on_int };
    chat t = { .c = c,
               .effort = 2 /* max, the template's own default */,
               .person = isatty(0) == 1 && isatty(1) == 1 };
    hx_cli one = *c;
    int rc;

    one.streams = 1;
    if ((rc = cli_open_engine(&t.e, &one, NULL, NULL)) != 0)
        return rc;
    hx_get_info(t.e, &t.info);
    if (t.person)
        printf("%s, context %lld tokens. /help lists commands.\n", t.info.name,
               (long long)t.info.ctx_tokens);
    sigaction(SIGINT, &act, NULL); /* no SA_RESTART: reading a line gives up */
    loop(&t);
    hx_sb_free(&t.history);
    hx_sb_free(&t.content);
    hx_sb_free(&t.reasoning);
    hx_close(t.e);
    return 0;
}
