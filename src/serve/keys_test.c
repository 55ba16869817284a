/* keys_test.c - API keys: lines of options and files, who is let in under which name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>

#include "serve/serve.h"

static hx_access check(const hx_keys *k, const char *given, bool admin, const char *want)
{
    const char *name;
    const hx_access a = hx_keys_check(k, hx_str_c(given), admin, &name);

    assert_string_equal(name != NULL ? name : "", want);
    return a;
}

static void test_open(void **state)
{
    hx_keys *k = (hx_keys *)1;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_keys_open(&k, NULL, NULL, &err), 0);
    assert_null(k);
    assert_int_equal(check(k, "anything", false, ""), HX_ACCESS_YES);
    assert_int_equal(check(k, NULL, true, ""), HX_ACCESS_YES);
    assert_int_equal(hx_keys_open(&k, "", NULL, &err), HX_EARG);
    assert_int_equal(hx_keys_open(&k, "# none\n\n \n", NULL, &err), HX_EARG);
    assert_int_equal(hx_keys_open(&k, NULL, "", &err), HX_EARG);
    assert_int_equal(hx_keys_open(&k, "a b", NULL, &err), HX_EARG);
    assert_int_equal(hx_keys_open(&k, "a\x01", NULL, &err), HX_EARG);
    assert_null(k);
}

static void test_lines(void **state)
{
    hx_keys *k;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_keys_open(&k,
                                  "# team\r\nanna=sk-1\r\n\n  sk-2  \nYWJj==\nbob=a=b\n"
                                  "x y=",
                                  NULL, &err),
                     HX_EARG);
    assert_int_equal(hx_keys_open(&k,
                                  "# team\r\nanna=sk-1\r\n\n  sk-2  \nYWJj==\nbob=a=b",
                                  NULL, &err),
                     0);
    assert_int_equal(check(k, "sk-1", false, "anna"), HX_ACCESS_YES);
    assert_int_equal(check(k, "sk-2", false, "key 2"), HX_ACCESS_YES);
    assert_int_equal(check(k, "YWJj==", false, "key 3"), HX_ACCESS_YES);
    assert_int_equal(check(k, "a=b", false, "bob"), HX_ACCESS_YES);
    assert_int_equal(check(k, "anna=sk-1", false, ""), HX_ACCESS_UNKNOWN);
    assert_int_equal(check(k, "sk-", false, ""), HX_ACCESS_UNKNOWN);
    assert_int_equal(check(k, "sk-11", false, ""), HX_ACCESS_UNKNOWN);
    assert_int_equal(check(k, "sk-1sk-1", false, ""), HX_ACCESS_UNKNOWN);
    assert_int_equal(check(k, "", false, ""), HX_ACCESS_UNKNOWN);
    assert_int_equal(check(k, NULL, false, ""), HX_ACCESS_UNKNOWN);
    /* Without an admin key every key opens all. */
    assert_int_equal(check(k, "sk-1", true, "anna"), HX_ACCESS_YES);
    hx_keys_close(k);
}

static void test_admin(void **state)
{
    hx_keys *k;
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_keys_open(&k, "u", "root=1", &err), 0);
    assert_int_equal(check(k, "u", false, "key 1"), HX_ACCESS_YES);
    assert_int_equal(check(k, "u", true, "key 1"), HX_ACCESS_NOT_ADMIN);
    assert_int_equal(check(k, "root=1", true, "admin"), HX_ACCESS_YES);
    assert_int_equal(check(k, "root=1", false, "admin"), HX_ACCESS_YES);
    hx_keys_close(k);
    /* Only an admin key: the rest stays open. */
    assert_int_equal(hx_keys_open(&k, NULL, "r", &err), 0);
    assert_int_equal(check(k, NULL, false, ""), HX_ACCESS_YES);
    assert_int_equal(check(k, "x", true, ""), HX_ACCESS_UNKNOWN);
    assert_int_equal(check(k, "r", true, "admin"), HX_ACCESS_YES);
    hx_keys_close(k);
}

static void test_many(void **state)
{
    hx_sb lines = { 0 };
    hx_keys *k;
    hx_err err = { 0 };
    char key[16];

    (void)state;
    for (int i = 0; i < 256; i++)
        hx_sb_printf(&lines, "n%d=key-%d\n", i, i);
    assert_int_equal(hx_keys_open(&k, lines.p, NULL, &err), 0);
    for (int i = 0; i < 256; i++) {
        char name[16];

        snprintf(key, sizeof key, "key-%d", i);
        snprintf(name, sizeof name, "n%d", i);
        assert_int_equal(check(k, key, false, name), HX_ACCESS_YES);
    }
    hx_keys_close(k);
    lines.n = 0;
    for (int i = 0; i < 512; i++)
        hx_sb_char(&lines, 'k');
    hx_keys *long_key;
    assert_int_equal(hx_keys_open(&long_key, lines.p, NULL, &err), 0);
    assert_int_equal(check(long_key, lines.p, false, "key 1"), HX_ACCESS_YES);
    hx_sb_char(&lines, 'k');
    assert_int_equal(check(long_key, lines.p, false, ""), HX_ACCESS_UNKNOWN);
    hx_keys_close(long_key);
    assert_int_equal(hx_keys_open(&long_key, lines.p, NULL, &err), HX_EARG);
    lines.n = 0;
    for (int i = 0; i < 257; i++)
        hx_sb_printf(&lines, "key-%d\n", i);
    assert_int_equal(hx_keys_open(&k, lines.p, NULL, &err), HX_ELIMIT);
    hx_sb_free(&lines);
    assert_int_equal(hx_test_live_allocs(), 0);
}

static void test_no_memory(void **state)
{
    hx_keys *k;
    hx_err err = { 0 };

    (void)state;
    for (int64_t i = 1;; i++) {
        hx_test_fail_at(i);
        const int rc = hx_keys_open(&k, "a\nb", "c", &err);
        hx_test_fail_at(0);
        if (rc == 0)
            break;
        assert_int_equal(rc, HX_ENOMEM);
        assert_null(k);
        assert_int_equal(hx_test_live_allocs(), 0);
    }
    hx_keys_close(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),      cmocka_unit_test(test_lines),
        cmocka_unit_test(test_admin),     cmocka_unit_test(test_many),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests_name("keys", tests, NULL, NULL);
}
