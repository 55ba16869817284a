/* grammar_fuzz.c - any source compiles or is refused with a sentence; what compiled gives
 * masks that agree with accept(), and going back leads to the same place.
 *
 * The first byte chooses the kind, the second one how the walk goes; the rest is the
 * source. Limits are lowered so that runs are short. */
#include "text/grammar.h"

static const char *const words[] = {
    "\"",          "{",          "}",           "[",
    "]",           ",",          ":",           " ",
    "{\"",         "\":",        "\": ",        "\",",
    "a",           "b",          "ab",          "x",
    "foo",         "0",          "1",           "-",
    "12",          ".",          "e",           "true",
    "null",        "\\",         "\\n",         "u",
    "\xc3",        "\xa9",       "\xc3\xa9",    "\xe2\x98\x83",
    "hello world", "\n",         "z",           "}]",
    "\"}",         "<s>",        "<tool_call>", "</tool_call>",
    "<arg_key>",   "</arg_key>", "<arg_value>", "</arg_value>",
    "</s>",
};
enum { N = HX_LEN(words), SPECIAL = N - 8, END = N - 1, STEPS = 24 };

static void walk(hx_grammar *g, uint32_t how)
{
    hx_matcher m, back, one;
    uint32_t mask[2], again[2];

    hx_grammar_start(g, &m);
    for (int step = 0; step < STEPS; step++) {
        int32_t id = -1, n = 0;

        back = m;
        if (hx_grammar_mask(&m, mask, NULL) != 0)
            return;
        how = how * 1664525u + 1013904223u;
        for (int32_t k = 0; k < N; k++) {
            const bool allowed = (mask[k / 32] >> (k % 32) & 1) != 0;

            one = m;
            hx_assert((hx_grammar_accept(&one, k) == 0) == allowed);
            if (allowed && (how >> 8) % (uint32_t)++n == 0)
                id = k;
        }
        hx_assert(id >= 0 && hx_grammar_mask(&back, again, NULL) == 0);
        hx_assert(memcmp(mask, again, sizeof(mask)) == 0);
        hx_assert(hx_grammar_accept(&m, id) == 0);
        if (id == END && hx_grammar_done(&m) == HX_GRAMMAR_MUST_END)
            return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const hx_grammar_opt opt = { .steps = 300000,
                                 .mask_steps = 100000,
                                 .cache_bytes = 1 << 18,
                                 .open_objects = size > 1 && (data[1] & 1) != 0 };
    hx_str bytes[N];
    bool special[N] = { false };
    const int32_t end = END;
    hx_vocab *v;
    hx_grammar *g;
    hx_err err = { 0 };

    if (size < 2)
        return 0;
    for (int32_t i = 0; i < N; i++)
        bytes[i] = hx_str_c(words[i]);
    for (int32_t i = SPECIAL; i < END; i++)
        special[i] = true;
    const hx_vocab_opt vocab = { bytes, special, N, N, &end, 1 };
    const hx_grammar_kind kind =
        data[0] >= 128 ? HX_GRAMMAR_TOOLS
                       : (hx_grammar_kind)(HX_GRAMMAR_JSON_SCHEMA + data[0] % 4);

    hx_assert(hx_vocab_open(&v, &vocab, NULL) == 0);
    if (hx_grammar_open(&g, v, kind, (hx_str) { (const char *)data + 2, size - 2 }, &opt,
                        &err) == 0)
        walk(g, data[1]);
    else
        hx_assert(g == NULL && err.msg[0] != '\0');
    hx_grammar_close(g);
    hx_vocab_close(v);
    return 0;
}
