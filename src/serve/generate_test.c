/* Tests of generate.c and toolset.c over real sockets, with tests/fake_engine.c in place of
 * a model: what a request asks of the engine (grammars, budgets), reasoning that a client
 * ends, loops, and that an answer's cuts change no dialect's reading of it. What a grammar
 * does to a model is tested with one: tests/openai.mjs, calls_test. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "../../tests/fake_server.c"

#define F     "{\"type\":\"function\",\"function\":{\"name\":\"f\"}}"
#define G     "{\"type\":\"function\",\"function\":{\"name\":\"g\",\"strict\":true}}"
#define TOOLS ",\"tools\":[" F "," G "]"

/* ---- what the engine is asked --------------------------------------------- */

static void test_tool_choice(void **state)
{
    static const struct {
        const char *more, *has; /* has: in what the engine got */
        const char *param;      /* or the field that is refused */
    } cases[] = {
        { TOOLS,
          "kind=6 after=257 at=258 lazy=1 again=1 think=257/0 bias=0 {\"format\":\"glm\","
          "\"choice\":\"auto\",\"parallel\":true,\"tools\":[{\"name\":\"f\"},{\"name\":"
          "\"g\",\"strict\":true}]}",
          NULL },
        { TOOLS ",\"parallel_tool_calls\":false", "lazy=1 again=0 ", NULL },
        { TOOLS ",\"tool_choice\":\"required\"", "lazy=0 again=1 ", NULL },
        { TOOLS ",\"tool_choice\":\"required\"",
          "\"choice\":\"required\",\"parallel\":true", NULL },
        { TOOLS ",\"tool_choice\":\"any\",\"parallel_tool_calls\":false",
          "\"choice\":\"required\",\"parallel\":false", NULL },
        { TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}",
          "\"parallel\":false,\"tools\":[{\"name\":\"g\",\"strict\":true}]}", NULL },
        { TOOLS ",\"tool_choice\":{\"type\":\"function\",\"name\":\"f\"}",
          "\"choice\":\"required\",\"parallel\":false,\"tools\":[{\"name\":\"f\"}]}",
          NULL },
        { TOOLS
          ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":"
          "\"required\",\"tools\":[" F "]}}",
          "\"choice\":\"required\",\"parallel\":true,\"tools\":[{\"name\":\"f\"}]}",
          NULL },
        { TOOLS
          ",\"tool_choice\":{\"type\":\"allowed_tools\",\"mode\":\"auto\",\"tools\":[{"
          "\"type\":\"function\",\"name\":\"g\"}]}",
          "\"choice\":\"auto\",\"parallel\":true,\"tools\":[{\"name\":\"g\"", NULL },
        { TOOLS ",\"tool_choice\":\"none\"",
          "kind=0 after=257 at=0 lazy=0 again=0 "
          "think=257/0 bias=1",
          NULL },
        { TOOLS
          ",\"tool_choice\":\"auto\",\"response_format\":{\"type\":\"json_object\"}",
          "lazy=0 again=1 think=257/0 bias=0 {\"format\":\"glm\",\"choice\":\"auto\","
          "\"parallel\":true,\"content\":{\"kind\":1,\"source\":\"\"}",
          NULL },
        { TOOLS
          ",\"tool_choice\":\"required\",\"response_format\":{\"type\":\"json_object\"}",
          "\"parallel\":true,\"tools\"", NULL },
        { ",\"guided_regex\":\"a+\"",
          "kind=3 after=257 at=0 lazy=0 again=0 think=257/0 bias=0 a+", NULL },
        { ",\"tools\":[]", "kind=0", NULL },
        { ",\"structured_outputs\":{\"regex\":\"b+\"}",
          "kind=3 after=257 at=0 lazy=0 again=0 think=257/0 bias=0 b+", NULL },
        { ",\"structured_outputs\":{\"choice\":[\"x\"]}", "bias=0 [\"x\"]", NULL },
        { ",\"structured_outputs\":{\"json_object\":true}", "kind=1", NULL },
        { ",\"response_format\":{\"type\":\"json_object\"}", "kind=1", NULL },
        { ",\"response_format\":{\"type\":\"json_object\",\"schema\":{\"type\":\"null\"}"
          "}",
          "bias=0 {\"type\":\"null\"}", NULL },
        { ",\"response_format\":{\"type\":\"json_schema\",\"schema\":{\"type\":\"null\"}"
          "}",
          "bias=0 {\"type\":\"null\"}", NULL },
        { ",\"response_format\":{\"type\":\"json_object\",\"schema\":7}", NULL,
          "response_format.json_schema.schema" },
        { ",\"grammar\":\"root ::= \\\"a\\\"\"", "kind=4", NULL },
        { ",\"json_schema\":{\"type\":\"null\"}", "bias=0 {\"type\":\"null\"}", NULL },
        { ",\"ebnf\":\"root ::= \\\"a\\\"\",\"regex\":\"a\"", NULL, "ebnf" },
        { ",\"tool_choice\":\"required\"", NULL, "tool_choice" },
        { TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"h\"}}",
          NULL, "tool_choice" },
        { TOOLS ",\"tool_choice\":{\"type\":\"function\"}", NULL, "tool_choice" },
        { TOOLS
          ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":"
          "\"required\",\"tools\":[{\"name\":\"h\"}]}}",
          NULL, "tool_choice" },
        { TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\"}", NULL,
          "tool_choice.allowed_tools.tools" },
        { TOOLS ",\"tool_choice\":7", NULL, "tool_choice" },
        { TOOLS ",\"parallel_tool_calls\":\"no\"", NULL, "parallel_tool_calls" },
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r = chat(f, "[[</think>|$grammar| |$source]]", cases[i].more);

        if (cases[i].param != NULL ? r->status != 400
                                   : strstr(str_at(r->json, "choices.0.message.content"),
                                            cases[i].has) == NULL)
            fail_msg("%s: %s", cases[i].more, TEXT(r->body));
        if (cases[i].param != NULL)
            assert_str(r->json, "error.param", cases[i].param);
        done(r);
    }
    stop(f);
}

/* ---- reasoning ------------------------------------------------------------- */

static void test_budget(void **state)
{
    static const struct {
        const char *more, *reasoning;
        int max; /* what the engine was told; 0: nothing */
    } cases[] = {
        { "", "a b c d e f g h", 0 },
        { ",\"thinking_budget\":3", "a b c", 3 },
        { ",\"thinking_token_budget\":2", "a b", 2 },
        { ",\"thinking_budget_tokens\":2", "a b", 2 },
        { ",\"reasoning_budget\":2", "a b", 2 },
        { ",\"max_thinking_tokens\":2", "a b", 2 },
        { ",\"reasoning\":{\"max_tokens\":2,\"effort\":\"high\"}", "a b", 2 },
        { ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":2}", "a b", 2 },
        { ",\"chat_template_kwargs\":{\"thinking_budget\":2}", "a b", 2 },
        { ",\"thinking_budget\":-1", "a b c d e f g h", 0 },
        /* A quarter of max_tokens stays for the answer. */
        { ",\"thinking_budget\":100,\"max_tokens\":8", "a b c d e f", 6 },
        { ",\"thinking_budget\":4,\"max_tokens\":8", "a b c d", 4 },
        { ",\"thinking_budget\":4,\"max_completion_tokens\":4", "a b c", 3 },
    };
    static const char *const off[] = {
        ",\"thinking_budget\":0",
        ",\"thinking\":false",
        ",\"reasoning\":false",
        ",\"reasoning\":{\"enabled\":false}",
        ",\"reasoning\":{\"effort\":\"none\"}",
        ",\"chat_template_kwargs\":{\"thinking\":false}",
        ",\"reasoning\":{\"max_tokens\":0}",
    };
    fixture *f = start(NULL, 4, 16, 4096);

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        response *r =
            chat(f, "[[a| b| c| d| e| f| g| h|</think>|$grammar]]", cases[i].more);
        char want[40];

        if (strcmp(str_at(r->json, "choices.0.message.reasoning_content"),
                   cases[i].reasoning) != 0)
            fail_msg("%s: %s", cases[i].more, TEXT(r->body));
        assert_num(r->json, "usage.completion_tokens_details.reasoning_tokens",
                   (int64_t)(strlen(cases[i].reasoning) + 1) / 2 + 1);
        snprintf(want, sizeof want, "think=257/%d ", cases[i].max);
        if (strcmp(str_at(r->json, "choices.0.finish_reason"), "stop") == 0)
            assert_non_null(strstr(str_at(r->json, "choices.0.message.content"), want));
        done(r);
    }
    for (size_t i = 0; i < HX_LEN(off); i++) {
        response *r = chat(f, "[[Hi| |$grammar]]", off[i]);

        assert_string_equal(str_at(r->json, "choices.0.message.content"),
                            "Hi kind=0 after=0 at=0 lazy=0 again=0 think=0/0 bias=0");
        done(r);
    }
    response *r = chat(f, "x", ",\"thinking_budget\":\"much\"");
    assert_int_equal(r->status, 400);
    assert_str(r->json, "error.param", "thinking_budget");
    done(r);
    stop(f);
}

/* The first bytes of a stream, with the id of its answer. */
static void read_id(int fd, char *id, size_t cap)
{
    char buf[4096];
    size_t n = 0;
    char *at;

    do {
        const ssize_t got = recv(fd, buf + n, sizeof buf - 1 - n, 0);

        assert_true(got > 0);
        n += (size_t)got;
        buf[n] = '\0';
    } while ((at = strstr(buf, "\"id\":\"")) == NULL || strchr(at + 6, '"') == NULL);
    snprintf(id, cap, "%.*s", (int)strcspn(at + 6, "\""), at + 6);
}

static void test_end_thinking(void **state)
{
    fixture *f = start(NULL, 4, 16, 4096);
    const int fd = dial(f->port);
    char id[64], path[128];
    hx_sb all = { 0 };
    char buf[4096];
    ssize_t n;

    (void)state;
    send_request(
        fd, "POST", "/v1/chat/completions", NULL,
        "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":"
        "\"[[{delay=20,repeat=1}a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|"
        "a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|a|"
        "LATE|</think>|the| answer]]\"}]}");
    read_id(fd, id, sizeof id);
    snprintf(path, sizeof path, "/v1/chat/completions/%s/end_thinking", id);
    response *r = request(f, "POST", path, NULL);
    assert_int_equal(r->status, 200);
    assert_str(r->json, "id", id);
    done(r);
    while ((n = recv(fd, buf, sizeof buf, 0)) > 0)
        hx_sb_add(&all, buf, (size_t)n);
    close(fd);
    assert_non_null(strstr(all.p, "the"));
    assert_non_null(strstr(all.p, "[DONE]"));
    assert_null(strstr(all.p, "LATE"));
    hx_sb_free(&all);
    for (int i = 0; i < 3; i++) {
        static const char *const bad[] = { "/v1/chat/completions/chatcmpl-0/end_thinking",
                                           "/v1/chat/completions/x/cancel",
                                           "/v1/chat/completions/end_thinking" };

        r = request(f, "POST", i > 0 ? bad[i] : path, NULL);
        assert_int_equal(r->status, 404);
        done(r);
    }
    stop(f);
}

/* ---- loops ------------------------------------------------------------------ */

static void test_loop_guard(void **state)
{
    static const struct {
        const char *script;
        int period; /* 0: no loop */
    } cases[] = {
        { "[[{repeat=400}</think>]]", 1 },
        { "[[{repeat=300}</think>|again| and| and]]", 4 },
        { "[[{repeat=60}</think>|again| and| and]]", 0 },
    };
    fixture *f = start(NULL, 4, 16, 8192);

    (void)state;
    for (size_t i = 0; i < 2 * HX_LEN(cases); i++) {
        const bool streamed = i % 2 != 0;
        const int period = cases[i / 2].period;
        response *off = chat(f, cases[i / 2].script, streamed ? ",\"stream\":true" : "");
        response *r = chat(f, cases[i / 2].script,
                           streamed ? ",\"loop_guard\":true,\"stream\":true"
                                    : ",\"loop_guard\":true");
        char want[64];

        snprintf(want, sizeof want,
                 "\"finish_reason\":\"stop\",\"hoist\":{\"loop\":{\"tokens\":%d,",
                 period);
        assert_null(strstr(off->body.p, "\"hoist\""));
        assert_int_equal(strstr(r->body.p, want) != NULL, period > 0);
        if (period > 0)
            assert_true(r->body.n < off->body.n || period == 1);
        done(off);
        done(r);
    }
    stop(f);
}

/* What every dialect takes, at its own place. */
static void test_everywhere(void **state)
{
#define SAID "[[{repeat=300}</think>|again| and| and]]"
#define CHAT "\"messages\":[{\"role\":\"user\",\"content\":\"" SAID "\"}]"
    static const struct {
        const char *path, *before, *after; /* the field goes between them */
    } ways[] = {
        { "/v1/chat/completions", "{" CHAT, "}" },
        { "/v1/completions", "{\"max_tokens\":2000,\"prompt\":\"" SAID "\"", "}" },
        { "/v1/responses", "{\"input\":\"" SAID "\"", "}" },
        { "/v1/messages", "{\"max_tokens\":2000," CHAT, "}" },
        { "/generate",
          "{\"text\":\"" SAID "\",\"sampling_params\":{\"max_new_tokens\":2000", "}}" },
        { "/api/chat", "{\"stream\":false," CHAT ",\"options\":{\"top_k\":0", "}}" },
        { "/api/generate",
          "{\"stream\":false,\"prompt\":\"" SAID "\",\"options\":{\"top_k\":0", "}}" },
    };
    static const char *const field[] = { "", ",\"loop_guard\":true", ",\"pin\":true",
                                         ",\"pin\":false",
                                         ",\"priority\":7,\"deadline_ms\":60000" };
    fixture *f = start(NULL, 4, 16, 8192);

    (void)state;
    for (int i = 0; i < (int)HX_LEN(ways); i++) {
        size_t bytes[HX_LEN(field)];

        for (size_t k = 0; k < HX_LEN(field); k++) {
            char body[400];

            snprintf(body, sizeof body, "%s%s%s", ways[i].before, field[k],
                     ways[i].after);
            response *r = post(f, ways[i].path, body);
            if (r->status != 200)
                fail_msg("%s: %s", body, r->body.p);
            bytes[k] = r->body.n;
            done(r);
        }
        assert_true(bytes[1] < bytes[0] * 3 / 4 && bytes[2] > bytes[0] * 3 / 4);
        assert_int_equal(f->engine->n_pin, i + 1);
        assert_int_equal(f->engine->n_unpin, i + 1);
    }
    stop(f);
}

static void test_loop(void **state)
{
    (void)state;
    for (int32_t period = 1; period <= 513; period += 64) {
        hx_loop *l = hx_loop_open();
        int32_t found = 0, times = 0;
        int64_t n = 0;

        /* 1,000 that do not repeat, then the loop. */
        for (; n < 1000; n++)
            assert_false(hx_loop_feed(l, (int32_t)(hx_rng_at(7, (uint64_t)n) % 50000),
                                      &found, &times));
        for (n = 0; n < 4000 && !hx_loop_feed(l, (int32_t)(n % period), &found, &times);
             n++)
            ;
        assert_int_equal(found, period <= 512 ? period : 0);
        if (found > 0)
            assert_in_range(n + 1, 256, HX_MAX(257 + period, 4 * period));
        hx_loop_close(l);
    }
}

/* ---- cuts ------------------------------------------------------------------- */

/* Answers with what is hard to cut: characters of several bytes, quotes, text that looks
 * like markers. Markers are tokens of their own. */
static const char *const recorded[] = {
    "I think \xe2\x82\xac<b>.|</think>|Caf\xc3\xa9 \"q\" \\ \xf0\x9f\x99\x82 </thin k> "
    "done.",
    "Hm.|</think>|Wait.|<tool_call>|write|<arg_key>|path|</arg_key>|<arg_value>|a/"
    "\"b\".txt|"
    "</arg_value>|<arg_key>|text|</arg_key>|<arg_value>|line 1\n\xe4\xb8\xad <x> "
    "</arg_valu e>|"
    "</arg_value>|<arg_key>|n|</arg_key>|<arg_value>| [1, {\"k\": \"\xc3\xa9\"}] "
    "|</arg_value>|"
    "</tool_call>|\n|<tool_call>|now|</tool_call>",
    "open|<tool_call>|write|<arg_key>|path|</arg_key>|<arg_value>|x|</"
    "arg_value>|<arg_key>|n|"
    "</arg_key>|<arg_value>|{'a': True}|</arg_value>|</tool_call>",
};

static const struct {
    const char *path, *body; /* of a streamed request; %s: the script */
} dialects[] = {
#define WRITE                                                                            \
    "{\"name\":\"write\",\"parameters\":{\"type\":\"object\",\"properties\":{\"path\":{" \
    "\"type\":\"string\"},\"text\":{\"type\":\"string\"},\"n\":{\"type\":[\"array\","    \
    "\"object\"]}}}}"
    { "/v1/chat/completions",
      "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":%s}],\"tools\":[{"
      "\"type\":\"function\",\"function\":" WRITE "}]}" },
    { "/v1/completions", "{\"stream\":true,\"prompt\":%s}" },
    { "/v1/responses",
      "{\"stream\":true,\"input\":[{\"role\":\"user\",\"content\":%s}],\"tools\":[{"
      "\"type\":\"function\",\"name\":\"write\",\"parameters\":{\"type\":\"object\","
      "\"properties\":{\"path\":{\"type\":\"string\"},\"text\":{\"type\":\"string\"}}}}]"
      "}" },
    { "/v1/messages",
      "{\"stream\":true,\"max_tokens\":1000,\"messages\":[{\"role\":\"user\",\"content\":"
      "%s}],"
      "\"tools\":[{\"name\":\"write\",\"input_schema\":{\"type\":\"object\","
      "\"properties\":{"
      "\"path\":{\"type\":\"string\"},\"text\":{\"type\":\"string\"}}}}]}" },
    { "/api/chat",
      "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":%s}],\"tools\":[{"
      "\"type\":\"function\",\"function\":" WRITE "}]}" },
    { "/generate", "{\"stream\":true,\"text\":%s}" },
};

/* Strings that grow piece by piece, whatever the dialect calls them. */
static bool is_piece(const char *name)
{
    static const char *const names[] = { "content",  "reasoning_content", "text",
                                         "thinking", "partial_json",      "arguments",
                                         "delta" };

    for (size_t i = 0; i < HX_LEN(names); i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

enum { N_HEAP = 64 };
typedef struct {
    char path[N_HEAP][120];
    hx_sb text[N_HEAP];
    int n;
    bool whole; /* each piece is all of the text so far, as SGLang has it */
} heap;

static void pile(heap *h, const char *path, hx_str text)
{
    int i = 0;

    while (i < h->n && strcmp(h->path[i], path) != 0)
        i++;
    assert_true(i < N_HEAP);
    if (i == h->n)
        snprintf(h->path[h->n++], sizeof h->path[0], "%s", path);
    if (h->whole) {
        assert_true(text.n >= h->text[i].n);
        assert_true(h->text[i].n == 0 || memcmp(text.p, h->text[i].p, h->text[i].n) == 0);
        text.p += h->text[i].n;
        text.n -= h->text[i].n;
    }
    hx_sb_add(&h->text[i], text.p, text.n);
}

/* Adds every such string of a chunk to what has its place; those of a whole message, which
 * some dialects repeat at its end, lie in places of their own. */
static void gather(heap *h, const hx_json *j, const char *path, int depth)
{
    const bool is_array = hx_json_kind(j) == HX_JSON_ARRAY;
    const hx_json *index = hx_json_get(j, "index");

    if (depth > 8)
        return;
    for (size_t i = 0; i < hx_json_len(j); i++) {
        hx_str key = HX_STR("[]");
        const hx_json *v = is_array ? hx_json_at(j, i) : hx_json_member(j, i, &key);
        char at[120];

        snprintf(at, sizeof at, "%.80s.%s%lld", path, key.p,
                 (long long)hx_json_int(index, 0));
        if (hx_json_kind(v) == HX_JSON_STRING && !is_array && is_piece(key.p))
            pile(h, at, hx_json_str(v));
        else
            gather(h, v, at, depth + 1);
    }
}

/* Reads a stream of events or of lines. */
static void collect(heap *h, const response *r)
{
    char *save, *copy = hx_alloc(r->body.n + 1);

    memcpy(copy, r->body.p, r->body.n + 1);
    for (char *line = strtok_r(copy, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        const char *json = strncmp(line, "data: ", 6) == 0 ? line + 6 : line;
        hx_json *chunk = NULL;

        if (*json != '{' || hx_json_parse(&chunk, hx_str_c(json), 0, NULL) != 0)
            continue;
        const hx_str type = hx_json_str(hx_json_get(chunk, "type"));
        gather(h, chunk, type.p != NULL ? type.p : "", 0);
        hx_json_free(chunk);
    }
    hx_free(copy);
}

/* The recorded answer as a script, with one more cut before byte `cut` of it. */
static void write_script(hx_sb *b, const char *answer, size_t cut)
{
    bool in_char = false;

    hx_sb_str(b, "[[");
    for (size_t i = 0; answer[i] != '\0'; i++) {
        const bool tail = ((uint8_t)answer[i] & 0xc0) == 0x80;

        /* A character that is cut is written byte by byte. */
        if (!tail) {
            size_t n = 1;

            while (((uint8_t)answer[i + n] & 0xc0) == 0x80)
                n++;
            if (in_char)
                hx_sb_char(b, '|');
            in_char = cut > i && cut < i + n;
            if (in_char || cut == i)
                hx_sb_char(b, '|');
        }
        if (in_char)
            hx_sb_printf(b, "%s\\x%02X", tail ? "|" : "", (uint8_t)answer[i]);
        else
            hx_sb_char(b, answer[i]);
    }
    hx_sb_str(b, "]]");
}

/* Whether the cut is inside of a marker: those are tokens, and no model cuts them. */
static bool in_marker(const char *answer, size_t cut)
{
    size_t from = cut;

    while (from > 0 && answer[from - 1] != '|')
        from--;
    const size_t n = strcspn(answer + from, "|");
    for (size_t m = 0; m < HX_LEN(fake_marker); m++)
        if (hx_str_is((hx_str) { answer + from, n }, fake_marker[m].text))
            return true;
    return false;
}

static heap *answer_of(const fixture *f, size_t dialect, const char *answer, size_t cut)
{
    hx_sb script = { 0 }, body = { 0 };
    const char *at = strstr(dialects[dialect].body, "%s");
    heap *h = NULL;

    write_script(&script, answer, cut);
    hx_sb_add(&body, dialects[dialect].body, (size_t)(at - dialects[dialect].body));
    hx_json_put_str(&body, (hx_str) { script.p, script.n });
    hx_sb_str(&body, at + 2);
    response *r = post(f, dialects[dialect].path, body.p);
    if (r->status == 200) {
        h = hx_new(heap, 1);
        h->whole = strcmp(dialects[dialect].path, "/generate") == 0;
        collect(h, r);
    } else {
        assert_int_equal(r->status, 404); /* a server without the dialect */
    }
    done(r);
    hx_sb_free(&script);
    hx_sb_free(&body);
    return h;
}

static void drop(heap *h)
{
    for (int i = 0; i < h->n; i++)
        hx_sb_free(&h->text[i]);
    hx_free(h);
}

static void test_cuts(void **state)
{
    int n = 0;

    (void)state;
    for (size_t d = 0; d < HX_LEN(dialects); d++)
        for (size_t a = 0; a < HX_LEN(recorded); a++) {
            fixture *f = start(NULL, 4, 16, 4096);
            heap *whole = answer_of(f, d, recorded[a], SIZE_MAX);

            for (size_t cut = 1; whole != NULL && recorded[a][cut] != '\0'; cut++) {
                if (in_marker(recorded[a], cut))
                    continue;
                heap *h = answer_of(f, d, recorded[a], cut);

                assert_true(whole->n > 0);
                for (int i = 0; i < whole->n; i++)
                    if (h->n != whole->n || strcmp(h->path[i], whole->path[i]) != 0 ||
                        strcmp(TEXT(h->text[i]), TEXT(whole->text[i])) != 0)
                        fail_msg("%s, answer %zu cut at %zu: %s: %s, expected %s",
                                 dialects[d].path, a, cut, h->path[i], TEXT(h->text[i]),
                                 TEXT(whole->text[i]));
                drop(h);
                n++;
            }
            if (whole != NULL)
                drop(whole);
            stop(f);
        }
    printf("%d cuts\n", n);
    assert_true(n > 300);
}

/* An argument of megabytes arrives piece by piece and whole. */
static void test_large(void **state)
{
    enum { N_PIECE = 600, N_MEGA = 3 };
    fixture *f = start(NULL, 4, 16, 8 << 20);
    hx_sb script = { 0 }, want = { 0 };
    char piece[600];

    (void)state;
    memset(piece, 'x', sizeof piece);
    memcpy(piece, "\"\n\\", 3);
    hx_sb_str(&script, "[[</think>|<tool_call>|f|<arg_key>|text|</arg_key>|<arg_value>");
    for (int i = 0; i < N_PIECE; i++) {
        hx_sb_char(&script, '|');
        hx_sb_add(&script, piece, sizeof piece);
        hx_sb_add(&want, piece, sizeof piece);
    }
    for (int i = 0; i < N_MEGA; i++) {
        hx_sb_str(&script, "|$mega");
        for (int k = 0; k < FAKE_MEGA; k++)
            hx_sb_char(&want, 'm');
    }
    hx_sb_str(&script, "|</arg_value>|</tool_call>]]");
#define TEXT_TOOL                                                                        \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{"   \
    "\"type\":\"object\",\"properties\":{\"text\":{\"type\":\"string\"}}}}}]"
    for (int i = 0; i < 2; i++) {
        response *r = chat(f, script.p, i > 0 ? TEXT_TOOL ",\"stream\":true" : TEXT_TOOL);
        stream *s = i > 0 ? read_stream(r) : NULL;
        const char *text =
            i > 0 ? s->calls.p + strlen("|f|")
                  : str_at(r->json, "choices.0.message.tool_calls.0.function."
                                    "arguments");
        hx_json *args;

        assert_int_equal(hx_json_parse(&args, hx_str_c(text), 0, NULL), 0);
        assert_true(hx_str_is(hx_json_str(hx_json_get(args, "text")), want.p));
        if (s != NULL) {
            assert_true(s->n_chunk > N_PIECE / 10);
            free_stream(s);
        }
        hx_json_free(args);
        done(r);
    }
    hx_sb_free(&script);
    hx_sb_free(&want);
    stop(f);
}

static void test_no_leaks(void **state)
{
    (void)state;
    assert_int_equal(hx_test_live_allocs(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tool_choice),  cmocka_unit_test(test_budget),
        cmocka_unit_test(test_end_thinking), cmocka_unit_test(test_loop_guard),
        cmocka_unit_test(test_everywhere),   cmocka_unit_test(test_loop),
        cmocka_unit_test(test_cuts),         cmocka_unit_test(test_large),
        cmocka_unit_test(test_no_leaks),
    };

    return cmocka_run_group_tests_name("generate", tests, NULL, NULL);
}
