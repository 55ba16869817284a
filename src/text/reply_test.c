/* Tests of reply.c: recorded streams, cut in every way, against messages written by hand
 * (tests/data/reply), and Python's own reading of literals. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>

#include "reply.c"

#define DATA "tests/data/reply/"
enum { CALL_MAX = 16, PIECE_MAX = 128, FIRST_ID = 1000 };

/* ---- what comes out -------------------------------------------------- */

typedef struct {
    hx_sb reasoning, content;
    struct {
        hx_sb name, args;
        bool ended, cut;
    } call[CALL_MAX];
    int n_call, n_event;
    bool ending;     /* hx_reply_end() was called */
    char wrong[200]; /* the first broken promise */
} message;

static void wrong(message *m, const char *what)
{
    if (m->wrong[0] == '\0')
        snprintf(m->wrong, sizeof(m->wrong), "%s (event %d)", what, m->n_event);
}

static void collect(void *ud, const hx_reply_event *ev)
{
    message *m = ud;
    const bool open = m->n_call > 0 && !m->call[m->n_call - 1].ended;

    m->n_event++;
    if (!hx_utf8_ok(ev->text.p, ev->text.n))
        wrong(m, "event is no UTF-8");
    if ((ev->text.n == 0) != (ev->kind == HX_REPLY_CALL_END))
        wrong(m, "empty text, or text at the end of a call");
    if (open != (ev->kind == HX_REPLY_ARGS || ev->kind == HX_REPLY_CALL_END))
        wrong(m, "event inside or outside of a call");
    if (ev->kind == HX_REPLY_CALL) {
        if (m->n_call == CALL_MAX)
            return;
        hx_sb_add(&m->call[m->n_call++].name, ev->text.p, ev->text.n);
    }
    if (ev->kind == HX_REPLY_REASONING || ev->kind == HX_REPLY_CONTENT) {
        hx_sb_add(ev->kind == HX_REPLY_CONTENT ? &m->content : &m->reasoning, ev->text.p,
                  ev->text.n);
        if (ev->call != -1)
            wrong(m, "text with a call's index");
        return;
    }
    if (ev->call != m->n_call - 1)
        wrong(m, "wrong index");
    if (ev->kind == HX_REPLY_ARGS)
        hx_sb_add(&m->call[ev->call].args, ev->text.p, ev->text.n);
    if (ev->kind == HX_REPLY_CALL_END) {
        m->call[ev->call].ended = true;
        m->call[ev->call].cut = m->ending;
    }
}

static void message_free(message *m)
{
    hx_sb_free(&m->reasoning);
    hx_sb_free(&m->content);
    for (int i = 0; i < CALL_MAX; i++) {
        hx_sb_free(&m->call[i].name);
        hx_sb_free(&m->call[i].args);
    }
}

/* ---- comparing ------------------------------------------------------- */

static bool json_equal(const hx_json *a, const hx_json *b)
{
    const hx_json_type kind = hx_json_kind(a);
    hx_str key;

    if (kind != hx_json_kind(b) || hx_json_len(a) != hx_json_len(b))
        return false;
    switch (kind) {
    case HX_JSON_NULL:
        return true;
    case HX_JSON_BOOL:
        return hx_json_bool(a, false) == hx_json_bool(b, false);
    case HX_JSON_INT:
    case HX_JSON_DOUBLE:
        return hx_json_num(a, 0) == hx_json_num(b, 1);
    case HX_JSON_STRING:
        return hx_str_eq(hx_json_str(a), hx_json_str(b));
    case HX_JSON_ARRAY:
        for (size_t i = 0; i < hx_json_len(a); i++)
            if (!json_equal(hx_json_at(a, i), hx_json_at(b, i)))
                return false;
        return true;
    case HX_JSON_OBJECT:
        for (size_t i = 0; i < hx_json_len(a); i++) {
            const hx_json *v = hx_json_member(a, i, &key);

            if (!hx_json_has(b, key.p) || !json_equal(v, hx_json_get(b, key.p)))
                return false;
        }
        return true;
    }
    return false;
}

static bool same_text(const hx_sb *got, const hx_json *want)
{
    const hx_str w = hx_json_str(want);

    return got->n == w.n && (w.n == 0 || memcmp(got->p, w.p, w.n) == 0);
}

static void compare(message *m, const hx_json *want, int32_t n_call)
{
    const hx_json *calls = hx_json_get(want, "calls");

    if (!same_text(&m->reasoning, hx_json_get(want, "reasoning")))
        wrong(m, "reasoning differs");
    if (!same_text(&m->content, hx_json_get(want, "content")))
        wrong(m, "content differs");
    if ((size_t)m->n_call != hx_json_len(calls) || n_call != m->n_call) {
        wrong(m, "number of calls differs");
        return;
    }
    for (int i = 0; i < m->n_call; i++) {
        const hx_json *c = hx_json_at(calls, (size_t)i), *text = hx_json_get(c, "text");
        const bool cut = hx_json_bool(hx_json_get(c, "cut"), false);
        const hx_str got = { m->call[i].args.p, m->call[i].args.n };
        hx_json *args;

        if (!same_text(&m->call[i].name, hx_json_get(c, "name")))
            wrong(m, "name differs");
        if (!m->call[i].ended || m->call[i].cut != cut)
            wrong(m, "call not ended, or at another place");
        if (text != NULL && !same_text(&m->call[i].args, text))
            wrong(m, "text of the arguments differs");
        if (hx_json_parse(&args, got, 0, NULL) != 0)
            wrong(m, "arguments are no JSON");
        else if (!json_equal(args, hx_json_get(c, "arguments")))
            wrong(m, "arguments differ");
        hx_json_free(args);
    }
}

static void report(const message *m, const hx_json *want, const char *how)
{
    hx_sb b = { 0 };

    hx_json_write(&b, want);
    print_error("%s: %s\n  want %.3000s\n  reasoning %.900s\n  content %.900s\n", how,
                m->wrong, b.p, m->reasoning.p, m->content.p);
    for (int i = 0; i < m->n_call; i++)
        print_error("  call %s %.900s\n", m->call[i].name.p, m->call[i].args.p);
    hx_sb_free(&b);
}

/* ---- what goes in ---------------------------------------------------- */

typedef struct {
    hx_str bytes;
    int32_t id;
} piece;

typedef struct {
    const hx_json *want;
    const hx_json *tools;
    const hx_reply_format *format;
    piece piece[PIECE_MAX]; /* id: FIRST_ID + marker, or -1 */
    int n_piece;
    hx_sb bytes; /* all of them */
} transcript;

/* The marker numbers m of the set bits have an id, FIRST_ID + m. */
typedef struct {
    const hx_reply_format *format;
    unsigned known;
} vocab;

static int marker_of(const hx_reply_format *f, hx_str text)
{
    for (int m = 0; m < N_MARKER; m++)
        if (f->text[m] != NULL && hx_str_is(text, f->text[m]))
            return m;
    return -1;
}

static int32_t find_id(void *ud, hx_str text)
{
    const vocab *v = ud;
    const int m = marker_of(v->format, text);

    return m >= 0 && (v->known >> m & 1) != 0 ? FIRST_ID + m : -1;
}

static void unhex(hx_sb *b, hx_str hex)
{
    unsigned byte;

    for (size_t i = 0; i + 1 < hex.n; i += 2) {
        assert_int_equal(sscanf(hex.p + i, "%2x", &byte), 1);
        hx_sb_char(b, (char)byte);
    }
}

static void load(transcript *t, const hx_json *want, const hx_json *tools,
                 const char *format)
{
    const hx_json *stream = hx_json_get(want, "stream");
    size_t at = 0;

    *t = (transcript) { .want = want, .format = hx_reply_find(format) };
    t->tools = hx_json_bool(hx_json_get(want, "tools"), true) ? tools : NULL;
    t->n_piece = (int)hx_json_len(stream);
    assert_true(t->n_piece > 0 && t->n_piece <= PIECE_MAX && t->format != NULL);
    for (int i = 0; i < t->n_piece; i++) {
        const hx_json *p = hx_json_at(stream, (size_t)i);
        const hx_str s = hx_json_str(p);
        const int m = s.p != NULL ? marker_of(t->format, s) : -1;
        const size_t before = t->bytes.n;

        if (s.p != NULL)
            hx_sb_add(&t->bytes, s.p, s.n);
        else
            unhex(&t->bytes, hx_json_str(hx_json_get(p, "hex")));
        t->piece[i].bytes.n = t->bytes.n - before;
        t->piece[i].id = m >= 0 ? FIRST_ID + m : -1;
    }
    for (int i = 0; i < t->n_piece; at += t->piece[i++].bytes.n)
        t->piece[i].bytes.p = t->bytes.p + at;
}

typedef struct {
    hx_reply *reply;
    message m;
} session;

static void start(session *s, const transcript *t, vocab *v)
{
    const hx_json *w = t->want;
    const hx_reply_opt opt = {
        .format = t->format,
        .tools = t->tools,
        .find = v != NULL ? find_id : NULL,
        .ud = v,
        .in_reasoning = hx_str_is(hx_json_str(hx_json_get(w, "start")), "reasoning"),
        .reasoning_off = hx_json_bool(hx_json_get(w, "reasoning_off"), false),
        .tools_off = hx_json_bool(hx_json_get(w, "tools_off"), false),
    };

    memset(s, 0, sizeof(*s));
    assert_int_equal(hx_reply_open(&s->reply, &opt, NULL), 0);
}

static void feed(session *s, int32_t id, const char *p, size_t n)
{
    const hx_str bytes = { p, n };

    assert_int_equal(hx_reply_feed(s->reply, id, bytes, collect, &s->m, NULL), 0);
}

static void stop(session *s, const transcript *t, const char *how)
{
    int32_t n_call = -1;

    s->m.ending = true;
    assert_int_equal(hx_reply_end(s->reply, collect, &s->m, &n_call, NULL), 0);
    hx_reply_close(s->reply);
    compare(&s->m, t->want, n_call);
    if (s->m.wrong[0] != '\0') {
        report(&s->m, t->want, how);
        fail();
    }
    message_free(&s->m);
}

/* 1 to max bytes at a time, max 0: all of them. */
static size_t portion(uint64_t seed, uint64_t k, size_t max, size_t n)
{
    return max == 0 ? n : HX_MIN(n, 1 + (size_t)(hx_rng_at(seed, k) % max));
}

/* Bytes without ids. v: markers have ids all the same. */
static void by_bytes(const transcript *t, vocab *v, uint64_t seed, size_t max,
                     const char *how)
{
    session s;

    start(&s, t, v);
    for (size_t i = 0, n, k = 0; i < t->bytes.n; i += n) {
        n = portion(seed, k++, max, t->bytes.n - i);
        feed(&s, -1, t->bytes.p + i, n);
    }
    stop(&s, t, how);
}

/* Tokens with ids: markers known to the vocabulary whole, all else in portions. */
static void by_tokens(const transcript *t, unsigned known, uint64_t seed, size_t max,
                      const char *how)
{
    vocab v = { t->format, known };
    uint64_t k = 0;
    session s;

    start(&s, t, &v);
    for (int p = 0; p < t->n_piece; p++) {
        const hx_str b = t->piece[p].bytes;
        const int32_t id = t->piece[p].id;

        if (id >= 0 && (known >> (id - FIRST_ID) & 1) != 0) {
            feed(&s, id, b.p, b.n);
            continue;
        }
        for (size_t i = 0, n; i < b.n; i += n) {
            n = portion(seed, k++, max, b.n - i);
            feed(&s, 1, b.p + i, n);
        }
    }
    stop(&s, t, how);
}

static void cut_everywhere(const transcript *t)
{
    const unsigned all = (1u << N_MARKER) - 1;
    vocab v = { t->format, all };

    by_tokens(t, all, 0, 0, "token by token");
    by_tokens(t, all, 0, 1, "byte by byte between markers");
    for (uint64_t seed = 0; seed < 40; seed++)
        by_tokens(t, all, seed, 1 + seed % 11, "bursts between markers");
    if (hx_json_bool(hx_json_get(t->want, "ids_only"), false))
        return;
    by_bytes(t, NULL, 0, 0, "one piece");
    by_bytes(t, NULL, 0, 1, "byte by byte");
    by_bytes(t, &v, 0, 1, "byte by byte, markers have ids");
    for (uint64_t seed = 0; seed < 60; seed++) {
        by_bytes(t, seed % 2 != 0 ? &v : NULL, seed, 1 + seed % 29, "bursts");
        by_tokens(t, (unsigned)hx_rng_at(1, seed) & all, seed, seed % 7, "some have ids");
    }
    for (size_t i = 1; i < t->bytes.n; i++) {
        session s;

        start(&s, t, NULL);
        feed(&s, -1, t->bytes.p, i);
        feed(&s, -1, t->bytes.p + i, t->bytes.n - i);
        stop(&s, t, "two pieces");
    }
}

/* ---- the tests ------------------------------------------------------- */

static hx_json *read_json(const char *path)
{
    hx_json *j;
    char *p;
    size_t n;
    hx_err err;

    assert_int_equal(hx_file_read(path, 1 << 22, &p, &n, &err), 0);
    if (hx_json_parse(&j, (hx_str) { p, n }, 200, &err) != 0)
        fail_msg("%s: %s", path, err.msg);
    hx_free(p);
    return j;
}

/* Returns how many transcripts there are. */
static size_t for_each(const char *format, void (*fn)(const transcript *t))
{
    hx_json *tools = read_json(DATA "tools.json"), *all;
    transcript t;
    char path[64];
    size_t n;

    snprintf(path, sizeof(path), DATA "%s.json", format);
    all = read_json(path);
    n = hx_json_len(all);
    for (size_t i = 0; i < n; i++) {
        load(&t, hx_json_at(all, i), tools, format);
        fn(&t);
        hx_sb_free(&t.bytes);
    }
    hx_json_free(all);
    hx_json_free(tools);
    return n;
}

static void glm(void **state_)
{
    (void)state_;
    assert_true(for_each("glm", cut_everywhere) >= 58);
}

static void hermes(void **state_)
{
    (void)state_;
    assert_true(for_each("hermes", cut_everywhere) >= 6);
}

static void plain(void **state_)
{
    (void)state_;
    assert_true(for_each("plain", cut_everywhere) >= 2);
}

/* Values without a type, against json.loads() and ast.literal_eval(). */
static void literals(void **state_)
{
    static const char *const around[] = { "<tool_call>f<arg_key>k</arg_key><arg_value>",
                                          "</arg_value></tool_call>" };
    const hx_reply_opt opt = { .format = hx_reply_find("glm") };
    hx_json *all = read_json(DATA "literals.json"), *args;
    hx_str got;

    (void)state_;
    assert_true(hx_json_len(all) > 250);
    for (size_t i = 0; i < hx_json_len(all); i++) {
        const hx_json *pair = hx_json_at(all, i), *want = hx_json_at(pair, 1);
        const hx_str text = hx_json_str(hx_json_at(pair, 0));
        session s = { 0 };

        assert_int_equal(hx_reply_open(&s.reply, &opt, NULL), 0);
        feed(&s, -1, around[0], strlen(around[0]));
        feed(&s, -1, text.p, text.n);
        feed(&s, -1, around[1], strlen(around[1]));
        assert_int_equal(hx_reply_end(s.reply, collect, &s.m, NULL, NULL), 0);
        hx_reply_close(s.reply);
        assert_string_equal(s.m.wrong, "");
        got = (hx_str) { s.m.call[0].args.p, s.m.call[0].args.n };
        if (hx_json_parse(&args, got, 0, NULL) != 0 ||
            !json_equal(hx_json_get(args, "k"), want))
            fail_msg("%s read as %s", text.p, got.p);
        hx_json_free(args);
        message_free(&s.m);
    }
    hx_json_free(all);
}

/* Nothing that is certain waits: kind and text of all events so far, in one line. */
static void append_event(void *ud, const hx_reply_event *ev)
{
    static const char kinds[] = { 'R', 'C', 'N', 'A', 'E' };

    hx_sb_printf(ud, "%c(%.*s)", kinds[ev->kind], (int)ev->text.n, ev->text.p);
}

static void feed_one(hx_reply *r, int32_t id, const char *text, hx_sb *got)
{
    got->n = 0;
    hx_sb_str(got, "");
    assert_int_equal(hx_reply_feed(r, id, hx_str_c(text), append_event, got, NULL), 0);
}

static void streams_at_once(void **state_)
{
    static const struct {
        const char *in;
        int32_t id;
        const char *out;
    } steps[] = {
        { "Hm", 1, "R(Hm)" },
        { " <thin", 1, "R( <thin)" }, /* ids known: no marker begins here */
        { "</think>", FIRST_ID + THINK_END, "" },
        { "\n", 1, "" }, /* blank so far */
        { "So", 1, "C(\nSo)" },
        { " a <tool", -1, "C( a )" }, /* no id: it may become a marker */
        { "box", -1, "C(<toolbox)" },
        { "<tool", -1, "" },
        { "_call>", 1, "C(<tool_call>)" }, /* spelled by tokens with ids: text */
        { "<tool_call>", FIRST_ID + CALL, "" },
        { "write", 1, "" },
        { "_file", 1, "" },
        { "<arg_key>", FIRST_ID + ARG_KEY, "N(write_file)" },
        { "content", 1, "" },
        { "</arg_key>", FIRST_ID + ARG_KEY_END, "" },
        { "<arg_value>", FIRST_ID + ARG_VALUE, "" },
        { "a\"", 1, "A({\"content\":\"a\\\")" }, /* first token of the value: L09 */
        { "\xf0\x9f", 1, "" },
        { "\x99\x82 <", 1, "A(\xf0\x9f\x99\x82 <)" },
        { "</arg_value>", FIRST_ID + ARG_VALUE_END, "A(\")" },
        { "<arg_key>", FIRST_ID + ARG_KEY, "" },
        { "mode", 1, "" },
        { "</arg_key>", FIRST_ID + ARG_KEY_END, "" },
        { "<arg_value>", FIRST_ID + ARG_VALUE, "" },
        { " 42", 1, "" },
        { "0", 1, "" },
        { "</arg_value>", FIRST_ID + ARG_VALUE_END, "A(,\"mode\":420)" },
        { "</tool_call>", FIRST_ID + CALL_END, "A(})E()" },
        { "</tool_call>", FIRST_ID + CALL_END, "C(</tool_call>)" },
    };
    hx_json *tools = read_json(DATA "tools.json");
    vocab v = { hx_reply_find("glm"), (1u << N_MARKER) - 1 };
    const hx_reply_opt opt = {
        .format = v.format,
        .find = find_id,
        .ud = &v,
        .tools = tools,
        .in_reasoning = true,
    };
    hx_sb got = { 0 };
    hx_reply *r;

    (void)state_;
    assert_int_equal(hx_reply_open(&r, &opt, NULL), 0);
    for (size_t i = 0; i < HX_LEN(steps); i++) {
        feed_one(r, steps[i].id, steps[i].in, &got);
        assert_string_equal(got.p, steps[i].out);
    }
    hx_reply_close(r);
    hx_sb_free(&got);
    hx_json_free(tools);
}

/* Held for a marker without an id, then followed by bytes without one. */
static void ids_and_bytes_mix(void **state_)
{
    vocab v = { hx_reply_find("glm"), 1u << CALL };
    const hx_reply_opt opt = { .format = v.format, .find = find_id, .ud = &v };
    hx_sb got = { 0 };
    hx_reply *r;

    (void)state_;
    assert_int_equal(hx_reply_open(&r, &opt, NULL), 0);
    feed_one(r, 1, "a<t", &got);
    assert_string_equal(got.p, "C(a)");
    feed_one(r, -1, "ool_call>b", &got);
    assert_string_equal(got.p, "C(<tool_call>b)");
    feed_one(r, 1, "<t", &got);
    assert_string_equal(got.p, "");
    feed_one(r, -1, "hink>c", &got);
    assert_string_equal(got.p, "R(c)");
    hx_reply_close(r);
    hx_sb_free(&got);
}

static void formats_are_sound(void **state_)
{
    (void)state_;
    assert_null(hx_reply_find("nobody"));
    assert_null(hx_reply_find(NULL));
    for (size_t f = 0; f < HX_LEN(formats); f++) {
        assert_ptr_equal(hx_reply_find(formats[f].name), &formats[f]);
        for (int a = 0; a < N_MARKER; a++)
            for (int b = 0; b < N_MARKER; b++)
                if (a != b && formats[f].text[a] != NULL && formats[f].text[b] != NULL)
                    assert_null(strstr(formats[f].text[a], formats[f].text[b]));
    }
}

static void count(void *ud, const hx_reply_event *ev)
{
    *(size_t *)ud += ev->text.n;
}

/* A name without end stops at 16 MiB; strings, text and large pieces pass through. */
static void memory_is_bounded(void **state_)
{
    const char *const head[] = { "<tool_call>",
                                 "<tool_call>f<arg_key>k</arg_key><arg_value>", "<think>",
                                 "x",
                                 "<tool_call>search<arg_key>q</arg_key><arg_value>" };
    hx_json *tools = read_json(DATA "tools.json");
    const hx_reply_opt opt = { .format = hx_reply_find("glm"), .tools = tools };
    const size_t n = 9 << 20;
    char *big = hx_alloc(n);
    const hx_str nine_mib = { big, n };

    (void)state_;
    memset(big, 'a', n);
    for (size_t i = 0; i < HX_LEN(head); i++) {
        const bool held = i < 2;
        size_t total = 0;
        hx_reply *r;
        hx_err err = { 0 };

        assert_int_equal(hx_reply_open(&r, &opt, NULL), 0);
        assert_int_equal(hx_reply_feed(r, -1, hx_str_c(head[i]), count, &total, NULL), 0);
        total = 0;
        assert_int_equal(hx_reply_feed(r, -1, nine_mib, count, &total, NULL), 0);
        assert_int_equal(hx_reply_feed(r, -1, nine_mib, count, &total, &err),
                         held ? HX_ELIMIT : 0);
        assert_int_equal(err.code, held ? HX_ELIMIT : 0);
        assert_true(held ? total == 0 : total >= 2 * n);
        assert_true(r->held.cap + r->out.cap + r->tmp.cap < 2 << 20);
        assert_int_equal(hx_reply_end(r, count, &total, NULL, NULL), err.code);
        hx_reply_close(r);
    }
    hx_free(big);
    hx_json_free(tools);
}

static void misuse_is_an_error(void **state_)
{
    const hx_reply_opt none = { 0 }, opt = { .format = hx_reply_find("plain") };
    message m = { 0 };
    hx_reply *r;
    hx_err err;

    (void)state_;
    assert_int_equal(hx_reply_open(&r, &none, &err), HX_EARG);
    assert_null(r);
    hx_reply_close(NULL);
    assert_int_equal(hx_reply_open(&r, &opt, &err), 0);
    assert_int_equal(hx_reply_end(r, collect, &m, NULL, &err), 0);
    assert_int_equal(hx_reply_feed(r, 1, HX_STR("a"), collect, &m, &err), HX_EARG);
    assert_int_equal(hx_reply_end(r, collect, &m, NULL, &err), HX_EARG);
    assert_int_equal(m.n_event, 0);
    hx_reply_close(r);
}

/* The k-th allocation fails: an error and no leak. False when there are fewer. */
static bool fails_at(const transcript *t, int64_t k)
{
    const hx_reply_opt opt = { .format = t->format, .tools = t->tools };
    const hx_str bytes = { t->bytes.p, t->bytes.n };
    const int64_t live = hx_test_live_allocs();
    hx_reply *r = NULL;
    size_t total = 0;
    bool failed;
    int rc;

    hx_test_fail_at(k);
    if ((rc = hx_reply_open(&r, &opt, NULL)) == 0)
        rc = hx_reply_feed(r, -1, bytes, count, &total, NULL);
    if (rc == 0)
        rc = hx_reply_end(r, count, &total, NULL, NULL);
    failed = hx_test_fail_at(0) >= k;
    assert_int_equal(rc, failed ? HX_ENOMEM : 0);
    hx_reply_close(r);
    assert_int_equal(hx_test_live_allocs(), live);
    return failed;
}

static void fail_each(const transcript *t)
{
    for (int64_t k = 1; fails_at(t, k); k++)
        assert_true(k < 1000);
}

static void allocations_fail(void **state_)
{
    (void)state_;
    for_each("glm", fail_each);
    for_each("hermes", fail_each);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(glm),
        cmocka_unit_test(hermes),
        cmocka_unit_test(plain),
        cmocka_unit_test(literals),
        cmocka_unit_test(streams_at_once),
        cmocka_unit_test(ids_and_bytes_mix),
        cmocka_unit_test(formats_are_sound),
        cmocka_unit_test(memory_is_bounded),
        cmocka_unit_test(misuse_is_an_error),
        cmocka_unit_test(allocations_fail),
    };

    return cmocka_run_group_tests_name("reply", tests, NULL, NULL);
}
