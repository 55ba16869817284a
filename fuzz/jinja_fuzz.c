/* jinja_fuzz.c - any template over any variables: it renders or it fails with a sentence,
 * within its limits; the marks cover the text and do not change it.
 *
 * Input: the template, a zero byte, the variables as JSON (a small chat if that is none).
 */
#include "text/text.h"

static const char chat[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi <b> é\"},{\"role\":\"assistant\","
    "\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"a\":"
    "[1,2.5]}}}]},"
    "{\"role\":\"tool\",\"content\":[{\"type\":\"text\",\"text\":\"ok\"}]}],\"tools\":"
    "null,"
    "\"n\":-3,\"s\":\"a,b\",\"big\":123456789012345678901,\"add_generation_prompt\":"
    "true}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *zero = memchr(data, 0, size);
    const size_t n = zero != NULL ? (size_t)(zero - data) : size;
    const hx_str vars = { (const char *)data + n + 1, zero != NULL ? size - n - 1 : 0 };
    const hx_jinja_opt opt = { .max_bytes = 1 << 18, .max_steps = 100000, .now_s = 1 };
    hx_sb text = { 0 }, user = { 0 }, plain = { 0 };
    hx_json *j = NULL;
    hx_jinja *t;
    hx_err err = { 0 };

    if (hx_json_parse(&j, vars, 0, NULL) != 0 || hx_json_kind(j) != HX_JSON_OBJECT) {
        hx_json_free(j);
        hx_assert(hx_json_parse(&j, HX_STR(chat), 0, NULL) == 0);
    }
    int rc = hx_jinja_open(&t, (hx_str) { (const char *)data, n }, "t", &err);
    if (rc == 0) {
        rc = hx_jinja_run(t, j, &opt, &text, &user, &err);
        hx_assert(text.n == user.n && text.n <= opt.max_bytes &&
                  hx_utf8_ok(text.p, text.n));
        for (size_t i = 0; i < user.n; i++)
            hx_assert((uint8_t)user.p[i] <= 1);
        if (rc == 0 && hx_jinja_run(t, j, &opt, &plain, NULL, &err) == 0)
            hx_assert(
                hx_str_eq((hx_str) { text.p, text.n }, (hx_str) { plain.p, plain.n }));
    }
    hx_assert(rc == 0 || (rc < 0 && err.code == rc && err.msg[0] != 0 && rc != HX_EARG));
    hx_jinja_close(t);
    hx_json_free(j);
    hx_sb_free(&text);
    hx_sb_free(&user);
    hx_sb_free(&plain);
    return 0;
}
