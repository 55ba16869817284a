/* loop.c - tells when an answer only repeats itself. Called by generate.c for requests
 * that ask for it; costs about a microsecond per token. Never judges meaning: what
 * repeats a run of tokens exactly and long enough is a loop. */
#include "serve/serve.h"

enum {
    PERIOD_MAX = 512, /* tokens of what is repeated */
    LENGTH_MIN = 256, /* tokens that only repeat */
    TIMES_MIN = 4
};

struct hx_loop {
    int32_t tail[PERIOD_MAX]; /* the last ids, in a ring */
    int32_t run[PERIOD_MAX];  /* [period - 1] how many ids up to the last equal the one so
                               * far before */
    int64_t n;
};

hx_loop *hx_loop_open(void)
{
    return hx_new(hx_loop, 1);
}

void hx_loop_close(hx_loop *l)
{
    hx_free(l);
}

bool hx_loop_feed(hx_loop *l, int32_t id, int32_t *period, int32_t *times)
{
    const int32_t n = (int32_t)HX_MIN(l->n, PERIOD_MAX);
    const int32_t at = (int32_t)(l->n % PERIOD_MAX);

    *period = 0;
    for (int32_t p = 1; p <= n; p++) {
        const int32_t before = l->tail[at >= p ? at - p : at - p + PERIOD_MAX];
        const int32_t run = before == id ? l->run[p - 1] + 1 : 0;

        l->run[p - 1] = run;
        if (*period == 0 && run >= LENGTH_MIN && run >= (TIMES_MIN - 1) * p) {
            *period = p;
            *times = run / p + 1;
        }
    }
    l->tail[at] = id;
    l->n++;
    return *period > 0;
}
