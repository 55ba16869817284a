/* trace_fuzz.c - any bytes as a trace of picks: parsed or refused, and what is parsed can be
 * replayed. */
#include "model/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    hx_trace_result r;
    hx_trace *t;

    if (hx_trace_parse(&t, (hx_str) { (const char *)data, size }, NULL) != 0)
        return 0;
    for (int p = 0; p < HX_N_TRACE_POLICY; p++)
        if (hx_trace_replay(t, (hx_trace_policy)p, 2, t->n_step / 2, &r, NULL) == 0)
            hx_assert(r.hits >= 0 && r.hits <= r.items);
    hx_trace_close(t);
    return 0;
}
