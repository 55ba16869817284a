/* Tests of calls.c with the demo model: the next turn's prompt begins with the ids of the
 * prompt and the answer before, whatever the client made of the call in between, and only
 * where it means the same. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "serve/serve.h"

#define TOOL                                                                             \
    "{\"name\":\"search\",\"parameters\":{\"type\":\"object\",\"properties\":{"          \
    "\"query\":{\"type\":\"string\"},\"limit\":{\"type\":\"integer\",\"minimum\":1,"     \
    "\"maximum\":99},\"deep\":{\"type\":\"array\",\"items\":{\"type\":\"number\"},"      \
    "\"minItems\":1,\"maxItems\":3}},\"required\":[\"query\",\"limit\",\"deep\"]}}"
#define TOOLS "[{\"type\":\"function\",\"function\":" TOOL "}]"

static hx_engine *engine;
static hx_info info;
static hx_json *tools;

static int32_t find(void *ud, hx_str text)
{
    return hx_token_id(ud, text);
}

static hx_reply_opt reading(void)
{
    return (hx_reply_opt) { .format = hx_reply_find(info.reply_format),
                            .find = find,
                            .ud = engine,
                            .tools = tools,
                            .in_reasoning = true };
}

static bool same(void *ud, hx_prompt given, hx_prompt was)
{
    const hx_reply_opt opt = reading();

    return hx_toolset_same(ud, &opt, given, was);
}

static int open_all(void **state)
{
    hx_err err = { 0 };

    (void)state;
    if (hx_open(&engine,
                &(hx_options) { .model_dir = "models/demo-exl3", .max_streams = 1 },
                &err) != 0)
        fail_msg("%s", err.msg);
    hx_get_info(engine, &info);
    return hx_json_parse(&tools, HX_STR(TOOLS), 0, NULL);
}

static int close_all(void **state)
{
    (void)state;
    hx_json_free(tools);
    hx_close(engine);
    return 0;
}

/* Messages after the first, beginning with a comma. */
static void render(const char *more, hx_ids *out)
{
    hx_sb vars = { 0 };
    hx_err err = { 0 };

    hx_sb_printf(
        &vars,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Find it.\"}%s],\"tools\":"
        "%s,\"add_generation_prompt\":true}",
        more, TOOLS);
    if (hx_render(engine, (hx_str) { vars.p, vars.n }, NULL, &out->p, &out->n, NULL,
                  &err) != 0)
        fail_msg("%s: %s", vars.p, err.msg);
    out->cap = out->n;
    hx_sb_free(&vars);
}

/* An answer that calls the tool, sampled hot: its tokens are not what the tokenizer would
 * make of their text. */
static void answer(const hx_ids *prompt, uint64_t seed, hx_ids *out)
{
    const int32_t close = hx_token_id(engine, HX_STR("</think>"));
    const hx_request r = {
        .tokens = prompt->p,
        .n_tokens = prompt->n,
        .max_new = 600,
        .temperature = 1.5f,
        .seed = seed,
        .grammar_kind = HX_GRAMMAR_TOOLS,
        .grammar =
            HX_STR("{\"format\":\"glm\",\"choice\":\"required\",\"parallel\":false,"
                   "\"tools\":" TOOLS "}"),
        .grammar_after = close,
        .think_end = close,
        .think_max = 12,
    };
    hx_stream *s;
    hx_event ev;
    hx_err err = { 0 };

    if (hx_submit(engine, &r, &s, &err) != 0)
        fail_msg("%s", err.msg);
    while (hx_next(s, &ev, -1) == 1 && ev.kind == HX_EV_TOKENS)
        hx_ids_add(out, ev.tokens, ev.n_tokens, NULL);
    assert_int_equal(ev.kind, HX_EV_DONE);
    assert_int_equal(ev.stop, HX_STOP_EOS);
    hx_stream_free(s);
}

typedef struct {
    hx_sb reasoning, name, args;
} said;

static void take(void *ud, const hx_reply_event *ev)
{
    said *s = ud;
    hx_sb *to = ev->kind == HX_REPLY_REASONING ? &s->reasoning
                : ev->kind == HX_REPLY_CALL    ? &s->name
                                               : &s->args;

    hx_sb_add(to, ev->text.p, ev->text.n);
}

static void read_answer(const hx_ids *ids, said *s)
{
    const hx_reply_opt opt = reading();
    hx_reply *r;

    assert_int_equal(hx_reply_open(&r, &opt, NULL), 0);
    for (int64_t i = 0; i < ids->n; i++)
        hx_reply_feed(r, ids->p[i], hx_token_bytes(engine, ids->p[i], NULL), take, s,
                      NULL);
    hx_reply_end(r, take, s, NULL, NULL);
    hx_reply_close(r);
}

/* The turn as a client sends it back: with or without the reasoning, other arguments when
 * not NULL. */
static void write_turn(hx_sb *b, const said *s, bool reasoning, const char *args)
{
    hx_sb_str(b, ",{\"role\":\"assistant\",\"content\":null");
    if (reasoning) {
        hx_sb_str(b, ",\"reasoning_content\":");
        hx_json_put_str(b, (hx_str) { s->reasoning.p, s->reasoning.n });
    }
    hx_sb_printf(
        b,
        ",\"tool_calls\":[{\"id\":\"x\",\"type\":\"function\",\"function\":{"
        "\"name\":\"%s\",\"arguments\":%s}}]},{\"role\":\"tool\",\"tool_call_id\":"
        "\"x\",\"content\":\"none\"}",
        s->name.p, args != NULL ? args : s->args.p);
}

static bool begins_with(const hx_ids *all, int64_t at, const hx_ids *part)
{
    return all->n > at + part->n &&
           memcmp(all->p + at, part->p, (size_t)part->n * sizeof *part->p) == 0;
}

static void test_turns(void **state)
{
    const hx_calls_opt opt = { .info = &info, .same = same, .ud = engine };
    hx_ids first = { 0 }, plain = { 0 };
    int n_split = 0;
    hx_calls *m;

    (void)state;
    assert_int_equal(hx_calls_open(&m, NULL), 0);
    render("", &first);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        hx_ids a = { 0 }, b = { 0 }, second = { 0 }, third = { 0 };
        said one = { 0 }, two = { 0 };
        hx_sb history = { 0 };

        answer(&first, seed, &a);
        hx_calls_keep(m, (hx_prompt) { first.p, first.n }, (hx_prompt) { a.p, a.n });
        read_answer(&a, &one);
        assert_true(one.reasoning.n > 0);

        /* Without its reasoning, as most clients send it. */
        write_turn(&history, &one, false, NULL);
        render(history.p, &plain);
        render(history.p, &second);
        assert_int_equal(hx_calls_replay(m, &opt, &second, NULL), 0);
        assert_true(begins_with(&second, 0, &first));
        assert_true(begins_with(&second, first.n, &a));
        n_split += !begins_with(&plain, first.n, &a);
        assert_int_equal(second.p[first.n + a.n],
                         hx_token_id(engine, HX_STR("<|observation|>")));

        /* Two turns back, with the reasoning of the second. */
        answer(&second, seed + 100, &b);
        hx_calls_keep(m, (hx_prompt) { second.p, second.n }, (hx_prompt) { b.p, b.n });
        read_answer(&b, &two);
        write_turn(&history, &two, true, NULL);
        render(history.p, &third);
        assert_int_equal(hx_calls_replay(m, &opt, &third, NULL), 0);
        assert_true(begins_with(&third, 0, &second));
        assert_true(begins_with(&third, second.n, &b));
        hx_sb_free(&history);
        hx_ids_free(&plain);
        hx_ids_free(&a);
        hx_ids_free(&b);
        hx_ids_free(&second);
        hx_ids_free(&third);
        for (int i = 0; i < 2; i++) {
            said *s = i == 0 ? &one : &two;

            hx_sb_free(&s->reasoning);
            hx_sb_free(&s->name);
            hx_sb_free(&s->args);
        }
    }
    assert_int_equal(n_split, 4); /* the test would say nothing where both agree */
    hx_ids_free(&first);
    hx_calls_close(m);
}

/* A turn that the client changed is taken as it is; one it only spells differently is not. */
static void test_changed(void **state)
{
    static const struct {
        const char *args; /* of what was sampled */
        const char *given;
        bool same;
    } cases[] = {
        { "{\"query\":\"a b\",\"limit\":3}", "{\"limit\": 3, \"query\": \"a b\"}", true },
        { "{\"query\":\"a b\",\"limit\":3}", "{\"limit\":4,\"query\":\"a b\"}", false },
        { "{\"query\":\"a b\",\"limit\":3}", "{\"query\":\"a  b\",\"limit\":3}", false },
        { "{\"query\":\"a b\",\"limit\":3}", "{\"query\":\"a b\"}", false },
        { "{\"query\":\"q\",\"deep\":[1.0,2.5e1]}", "{\"query\":\"q\",\"deep\":[1,25]}",
          true },
        { "{\"query\":\"q\",\"deep\":[1,2]}", "{\"query\":\"q\",\"deep\":[2,1]}", false },
        { "{}", "{}", true },
    };
    const hx_calls_opt opt = { .info = &info, .same = same, .ud = engine };
    hx_ids first = { 0 };

    (void)state;
    render("", &first);
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        said s = { 0 };
        hx_sb history = { 0 };
        hx_ids was = { 0 }, given = { 0 };
        hx_calls *m;
        int64_t end;

        assert_int_equal(hx_calls_open(&m, NULL), 0);
        hx_sb_str(&s.name, "search");
        hx_sb_str(&s.reasoning, "I think.");
        write_turn(&history, &s, true, cases[i].args);
        render(history.p, &was);
        for (end = first.n; was.p[end] != hx_token_id(engine, HX_STR("<|observation|>"));
             end++)
            ;
        hx_calls_keep(m, (hx_prompt) { first.p, first.n },
                      (hx_prompt) { was.p + first.n, end - first.n });
        history.n = 0;
        write_turn(&history, &s, false, cases[i].given);
        render(history.p, &given);
        assert_int_equal(hx_calls_replay(m, &opt, &given, NULL), 0);
        if ((given.n == was.n &&
             memcmp(given.p, was.p, (size_t)was.n * sizeof *was.p) == 0) != cases[i].same)
            fail_msg("%s and %s", cases[i].args, cases[i].given);
        hx_sb_free(&s.name);
        hx_sb_free(&s.reasoning);
        hx_sb_free(&history);
        hx_ids_free(&was);
        hx_ids_free(&given);
        hx_calls_close(m);
    }
    hx_ids_free(&first);
}

static bool always(void *ud, hx_prompt given, hx_prompt was)
{
    (void)ud, (void)given, (void)was;
    return true;
}

/* The oldest turns go first: by their number, and by their ids. */
static void test_bounds(void **state)
{
    enum { LONG = 300000, TURNS = 1024 };
    const int32_t eos = info.eos[0];
    const hx_calls_opt opt = { .info = &info, .same = always };
    int32_t *big = hx_new(int32_t, LONG);
    hx_calls *m;

    (void)state;
    assert_int_equal(hx_calls_open(&m, NULL), 0);
    for (int32_t i = 0; i < TURNS + 1; i++) {
        const int32_t before[2] = { 5, i }, turn[2] = { 7, i };

        hx_calls_keep(m, (hx_prompt) { before, 2 }, (hx_prompt) { turn, 2 });
    }
    for (int32_t i = 0; i < TURNS + 2; i++) {
        const int32_t text[5] = { 5, i, 6, eos, 9 };
        hx_ids ids = { 0 };

        hx_ids_add(&ids, text, 5, NULL);
        hx_calls_replay(m, &opt, &ids, NULL);
        assert_int_equal(ids.n, i == 0 || i == TURNS + 1 ? 5 : 6);
        if (ids.n == 6)
            assert_true(ids.p[2] == 7 && ids.p[3] == i && ids.p[4] == eos &&
                        ids.p[5] == 9);
        hx_ids_free(&ids);
    }
    for (int32_t i = 0; i < 10; i++)
        hx_calls_keep(m, (hx_prompt) { &i, 1 }, (hx_prompt) { big, LONG });
    for (int32_t i = 0; i < 10; i++) {
        const int32_t text[3] = { i, 6, eos };
        hx_ids ids = { 0 };

        hx_ids_add(&ids, text, 3, NULL);
        hx_calls_replay(m, &opt, &ids, NULL);
        assert_int_equal(ids.n, i < 4 ? 3 : LONG + 2); /* six fit 2 Mi ids */
        hx_ids_free(&ids);
    }
    hx_calls_close(m);
    hx_free(big);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_changed),
        cmocka_unit_test(test_bounds),
    };

    return cmocka_run_group_tests_name("calls", tests, open_all, close_all);
}
