/* demo.h - the demo model through hoist.h, for tests of the engine: a request, and all that its
 * stream said. Header-only; the test opens the engine as it needs it. */
#ifndef HX_TESTS_DEMO_H
#define HX_TESTS_DEMO_H

#include "golden.h"

#define DEMO "models/demo-exl3"

static const char *device = "cpu";

/* TEST [PATTERN [DEVICE]] */
static inline void demo_args(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    device = argc > 2 ? argv[2] : device;
}

static const int32_t hello[] = { 4034, 4036, 4038, 436, 438,  25,
                                 584,  4039, 1718, 0,   4040, 4053 };
#define HELLO .tokens = hello, .n_tokens = HX_LEN(hello)

/* Everything a stream said, for comparisons. */
typedef struct {
    int32_t token[4096];
    float logprob[4096];
    int32_t n;
    char text[65536];
    size_t n_text;
    hx_event end;
} answer;

static inline void collect(const hx_event *ev, answer *a)
{
    assert_true(a->n + ev->n_tokens <= 4096 && a->n_text + ev->bytes.n < sizeof a->text);
    memcpy(a->token + a->n, ev->tokens, (size_t)ev->n_tokens * sizeof *ev->tokens);
    for (int32_t i = 0; i < ev->n_tokens; i++)
        a->logprob[a->n + i] = ev->logprob != NULL ? ev->logprob[i] : 0;
    if (ev->n_tokens > 0)
        assert_int_equal(ev->end[ev->n_tokens - 1], ev->bytes.n);
    a->n += ev->n_tokens;
    memcpy(a->text + a->n_text, ev->bytes.p, ev->bytes.n);
    a->n_text += ev->bytes.n;
    a->text[a->n_text] = '\0';
}

static inline void read_all(hx_stream *s, answer *a)
{
    a->n = 0;
    a->n_text = 0;
    do {
        assert_int_equal(hx_next(s, &a->end, 60000), 1);
        if (a->end.kind == HX_EV_TOKENS)
            collect(&a->end, a);
    } while (a->end.kind != HX_EV_DONE && a->end.kind != HX_EV_ERROR);
}

static inline hx_stream *submit(hx_engine *e, const hx_request *r)
{
    hx_stream *s;
    hx_err err = { 0 };

    if (hx_submit(e, r, &s, &err) != 0)
        fail_msg("%s", err.msg);
    return s;
}

static inline void ask(hx_engine *e, const hx_request *r, answer *a)
{
    hx_stream *s = submit(e, r);

    read_all(s, a);
    hx_stream_free(s);
}

#endif
