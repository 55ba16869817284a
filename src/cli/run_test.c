/* run_test.c - how `hoist serve` ends: 0 when told to, 1 when its device is lost, with a
 * sentence. cmd_serve() over tests/fake_engine.c; what main.c would give it is here. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "../../tests/fake_engine.c"
#include "run.c"

static hx_engine *fake;

int cli_open_engine(hx_engine **out, const hx_cli *c, hx_load_fn *also, void *ud)
{
    (void)c, (void)also, (void)ud;
    *out = fake = fake_open(4, 8, 1024);
    return 0;
}

void hx_close(hx_engine *e)
{
    fake_close(e);
}

/* Of other commands. */
int cli_reply_open(hx_reply **out, hx_engine *e, const int32_t *ids, int64_t n,
                   hx_err *err)
{
    (void)out, (void)e, (void)ids, (void)n;
    return hx_fail(err, HX_EUNSUP, "not in this test");
}

int cli_reply_feed(hx_reply *r, const hx_event *ev, hx_reply_sink *sink, void *ud,
                   hx_err *err)
{
    (void)r, (void)ev, (void)sink, (void)ud;
    return hx_fail(err, HX_EUNSUP, "not in this test");
}

static void *serve(void *ud)
{
    static const hx_cli c = { .model = "fake", .quiet = true };

    *(int *)ud = cmd_serve(&c);
    return NULL;
}

/* The exit status of a server whose engine has that fault and, but for a lost device, is told
 * to end. */
static int status_with(const char *why)
{
    pthread_t thread;
    sigset_t set;
    int rc = -1;

    fake = NULL;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    assert_int_equal(pthread_create(&thread, NULL, serve, &rc), 0);
    usleep(300000); /* it is up */
    assert_non_null(fake);
    pthread_mutex_lock(&fake->lock);
    fake->fault = why;
    pthread_mutex_unlock(&fake->lock);
    if (why == NULL || strcmp(why, "device") != 0) {
        usleep(500000);
        kill(getpid(), SIGTERM);
    }
    pthread_join(thread, NULL);
    return rc;
}

static void test_status(void **state)
{
    (void)state;
    assert_int_equal(status_with(NULL), 0);
    assert_int_equal(status_with("canary"), 0); /* it may pass */
    assert_int_equal(status_with("device"), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_status) };

    return cmocka_run_group_tests_name("run", tests, NULL, NULL);
}
