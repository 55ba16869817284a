/* reply_fuzz.c - any stream, cut in two ways, gives the same message, and the arguments
 * of its calls are JSON.
 *
 * The first byte chooses format, options and whether markers have ids; the second one the
 * cuts. Where they have ids, bytes 1 to 8 stand for their tokens. */
#include "text/text.h"

static const char *const markers[] = {
    "<think>",   "</think>",   "<tool_call>", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
};
static const char tools_json[] =
    "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},"
    "\"u\":{\"type\":[\"string\",\"integer\"]},"
    "\"i\":{\"anyOf\":[{\"type\":\"integer\"},{\"$ref\":\"#\"}]}}}}]";

typedef struct {
    hx_sb all, args;
    int kind;
} message;

static bool is_token(uint8_t byte)
{
    return byte >= 1 && byte <= HX_LEN(markers);
}

static int32_t find(void *ud, hx_str text)
{
    for (int32_t i = 0; ud != NULL && i < (int32_t)HX_LEN(markers); i++)
        if (hx_str_is(text, markers[i]))
            return i + 1;
    return -1;
}

static void sink(void *ud, const hx_reply_event *ev)
{
    message *m = ud;
    hx_json *j = NULL;

    hx_assert(hx_utf8_ok(ev->text.p, ev->text.n));
    if ((int)ev->kind != m->kind || ev->kind == HX_REPLY_CALL)
        hx_sb_printf(&m->all, "\n%d %d ", ev->kind, ev->call);
    m->kind = ev->kind;
    hx_sb_add(&m->all, ev->text.p, ev->text.n);
    if (ev->kind == HX_REPLY_CALL)
        m->args.n = 0;
    if (ev->kind == HX_REPLY_ARGS)
        hx_sb_add(&m->args, ev->text.p, ev->text.n);
    if (ev->kind == HX_REPLY_CALL_END) {
        hx_assert(hx_json_parse(&j, (hx_str) { m->args.p, m->args.n }, 0, NULL) == 0);
        hx_json_free(j);
    }
}

/* Feeds tokens of at most cut bytes. */
static void parse(message *m, hx_reply_opt opt, const uint8_t *p, size_t n, size_t cut)
{
    const bool ids = opt.ud != NULL;
    hx_reply *r;

    m->kind = -1;
    hx_assert(hx_reply_open(&r, &opt, NULL) == 0);
    for (size_t i = 0, k; i < n; i += k) {
        hx_str bytes = { (const char *)p + i, 0 };
        int32_t id = ids ? 100 : -1;

        for (k = 0; i + k < n && k < cut && !(ids && is_token(p[i + k])); k++)
            ;
        bytes.n = k;
        if (k == 0) {
            k = 1;
            id = p[i];
            bytes = hx_str_c(markers[p[i] - 1]);
        }
        hx_assert(hx_reply_feed(r, id, bytes, sink, m, NULL) == 0);
    }
    hx_assert(hx_reply_end(r, sink, m, NULL, NULL) == 0);
    hx_reply_close(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const formats[] = { "glm", "hermes", "plain", "glm" };
    message whole = { 0 }, cut = { 0 };
    hx_reply_opt opt = { .find = find };
    hx_json *tools;

    if (size < 2 || hx_json_parse(&tools, HX_STR(tools_json), 0, NULL) != 0)
        return 0;
    opt.format = hx_reply_find(formats[data[0] & 3]);
    opt.ud = data[0] & 4 ? &opt : NULL;
    opt.in_reasoning = data[0] & 8;
    opt.reasoning_off = data[0] & 16;
    opt.tools_off = data[0] & 32;
    opt.tools = data[0] & 64 ? NULL : tools;
    parse(&whole, opt, data + 2, size - 2, SIZE_MAX);
    parse(&cut, opt, data + 2, size - 2, 1 + data[1] % 9);
    hx_assert(whole.all.n == cut.all.n);
    hx_assert(whole.all.n == 0 || memcmp(whole.all.p, cut.all.p, whole.all.n) == 0);
    hx_sb_free(&whole.all);
    hx_sb_free(&whole.args);
    hx_sb_free(&cut.all);
    hx_sb_free(&cut.args);
    hx_json_free(tools);
    return 0;
}
