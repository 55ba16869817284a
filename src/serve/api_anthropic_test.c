/* api_anthropic_test.c - signatures of thinking, and the line that Claude Code puts before
 * its prompts. The dialect as a whole is tested in dialect_test.c. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "api_anthropic.c"

/* Vectors of the authors' reference: key 00 01 … 0f, messages 00 01 … of growing length
 * (github.com/veorq/SipHash, vectors.h; the paper's appendix A has that of 15 bytes). */
static void test_sip_hash(void **state)
{
    static const uint64_t key[2] = { 0x0706050403020100, 0x0f0e0d0c0b0a0908 };
    static const struct {
        size_t n;
        uint64_t hash;
    } cases[] = { { 0, 0x726fdb47dd0e0e31 },
                  { 1, 0x74f839c593dc67fd },
                  { 8, 0x93f5f5799a932462 },
                  { 15, 0xa129ca6149be45e5 } };
    char text[16];

    (void)state;
    for (int i = 0; i < 16; i++)
        text[i] = (char)i;
    for (size_t i = 0; i < HX_LEN(cases); i++)
        assert_true(sip_hash(key, (hx_str) { text, cases[i].n }) == cases[i].hash);
}

static void test_sign(void **state)
{
    char a[24], b[24];

    (void)state;
    sign(HX_STR("I think"), a);
    sign(HX_STR("I thinK"), b);
    assert_int_equal(strlen(a), 22);
    assert_int_equal(strncmp(a, "hoist.", 6), 0);
    assert_string_not_equal(a, b);
    sign((hx_str) { NULL, 0 }, b);
    assert_string_not_equal(a, b);
}

static void test_billing(void **state)
{
    static const struct {
        const char *in, *out;
    } cases[] = {
        { "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;", "" },
        { "x-anthropic-billing-header: a\nYou are", "You are" },
        { "x-anthropic-billing-header: a\nx-anthropic-billing-header: b\nYou", "You" },
        { "You are\nx-anthropic-billing-header: a",
          "You are\nx-anthropic-billing-header: a" },
        { "x-anthropic", "x-anthropic" },
        { "", "" },
    };

    (void)state;
    for (size_t i = 0; i < HX_LEN(cases); i++) {
        const hx_str s = without_billing(hx_str_c(cases[i].in));

        assert_true(hx_str_is(s, cases[i].out));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sip_hash),
        cmocka_unit_test(test_sign),
        cmocka_unit_test(test_billing),
    };

    return cmocka_run_group_tests_name("api_anthropic", tests, NULL, NULL);
}
