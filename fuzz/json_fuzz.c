/* json_fuzz.c - hx_json_parse() on any bytes; what it takes, hx_json_write() must write
 * so that it reads back to the same text. */
#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    hx_sb first = { 0 }, second = { 0 }, python = { 0 };
    hx_json *j, *again;

    if (hx_json_parse(&j, (hx_str) { (const char *)data, size }, 20, NULL) != 0)
        return 0;
    hx_json_write(&first, j);
    hx_json_write_python(&python, j, size % 2 != 0, (int)(size % 3));
    for (size_t i = 0; i < hx_json_len(j); i++)
        hx_json_member(j, i, NULL);
    hx_assert(hx_utf8_ok(first.p, first.n) && hx_utf8_ok(python.p, python.n));
    hx_assert(hx_json_parse(&again, (hx_str) { first.p, first.n }, 20, NULL) == 0);
    hx_json_write(&second, again);
    hx_assert(hx_str_eq((hx_str) { first.p, first.n }, (hx_str) { second.p, second.n }));
    hx_json_free(again);
    hx_assert(hx_json_parse(&again, (hx_str) { python.p, python.n }, 20, NULL) == 0);
    hx_json_free(again);
    hx_json_free(j);
    hx_sb_free(&first);
    hx_sb_free(&second);
    hx_sb_free(&python);
    return 0;
}
