/* spare_test.c - memory kept ready for states: what is given back comes again, no more than
 * some is held, memory that runs out only means that nothing is ready, nothing leaks. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <unistd.h>

#include "spare.c"

#define BYTES 100000

static int n_ready(hx_spare *s)
{
    pthread_mutex_lock(&s->lock);
    const int n = s->n;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static void wait_ready(hx_spare *s, int least, int most)
{
    for (int i = 0; i < 5000 && (n_ready(s) < least || n_ready(s) > most); i++)
        usleep(1000);
    assert_in_range(n_ready(s), least, most);
}

static void test_all(void **state)
{
    const int64_t live = hx_test_live_allocs();
    hx_blob *b[ROOM + 4] = { 0 };
    hx_spare *s;
    hx_err err;

    (void)state;
    assert_int_equal(hx_spare_open(&s, BYTES, &err), 0);
    wait_ready(s, LEAST, LEAST);
    assert_null(hx_spare_take(s, BYTES + 1));
    for (size_t i = 0; i < HX_LEN(b); i++) { /* made anew as they go */
        wait_ready(s, 1, MOST);
        assert_non_null(b[i] = hx_spare_take(s, BYTES - i));
        memset(b[i]->p, (int)i, BYTES);
    }
    for (size_t i = 0; i < HX_LEN(b); i++)
        for (size_t k = 0; k < BYTES; k += 999)
            assert_int_equal(b[i]->p[k], i);
    for (size_t i = 0; i < HX_LEN(b); i++)
        hx_spare_give(s, b[i]);
    wait_ready(s, LEAST, MOST);
    assert_non_null(b[0] = hx_spare_take(s, 1));
    hx_spare_give(s, b[0]);
    wait_ready(s, LEAST, MOST);
    /* No memory: nothing is ready until it is asked for again. */
    for (int i = 0; i < 200; i++) {
        hx_test_fail_at(1);
        if ((b[0] = hx_spare_take(s, BYTES)) != NULL)
            hx_free(b[0]);
    }
    hx_test_fail_at(0);
    hx_spare_close(s);
    assert_int_equal(hx_test_live_allocs(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_all) };

    return cmocka_run_group_tests_name("spare", tests, NULL, NULL);
}
