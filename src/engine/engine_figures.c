/* engine_figures.c - what can be observed of an engine, as hoist.h gives it: experts, times of
 * operations, status, streams, metrics for Prometheus.
 *
 * Any thread; what the engine thread changes is copied under engine->lock. Measures nothing
 * by itself. */
#include <stdio.h>

#include "engine/engine.h"

void hx_get_experts(hx_engine *e, hx_experts *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->experts;
    pthread_mutex_unlock(&e->lock);
}

void hx_profile(hx_engine *e, bool on)
{
    pthread_mutex_lock(&e->lock);
    memset(e->times, 0, sizeof e->times);
    atomic_store(&e->profile, on);
    pthread_mutex_unlock(&e->lock);
}

void hx_get_profile(hx_engine *e, hx_op_time out[HX_OP_TIMES])
{
    pthread_mutex_lock(&e->lock);
    memcpy(out, e->times, sizeof e->times);
    pthread_mutex_unlock(&e->lock);
}

void hx_get_status(hx_engine *e, hx_status *out)
{
    const char *text = NULL;

    pthread_mutex_lock(&e->lock);
    *out = (hx_status) { .running = e->n_running,
                         .waiting = e->n_waiting,
                         .pages = e->cache->n_page,
                         .pages_used = e->pages_reserved,
                         .steps = e->steps,
                         .preempted = e->preempted,
                         .prefill_rate = e->prefill_rate,
                         .decode_rate = e->decode_rate };
    hx_reuse_status(e, out);
    if (e->n_waiting > 0 || e->n_running >= e->info.max_streams)
        out->wait_ms = (int64_t)(hx_sched_wait_us(e, e->n_waiting + 1) / 1e3);
    text = hx_health_fault(e, &out->fault);
    if (text != NULL)
        snprintf(out->fault_text, sizeof out->fault_text, "%s", text);
    pthread_mutex_unlock(&e->lock);
}

int64_t hx_get_streams(hx_engine *e, hx_stream_info *out, int64_t cap)
{
    int64_t n = 0;

    pthread_mutex_lock(&e->lock);
    for (const hx_stream *s = e->all; s != NULL; s = s->all_next, n++)
        if (n < cap)
            out[n] =
                (hx_stream_info) { .id = s->order,
                                   .client = s->req.client,
                                   .stage = s->state == HX_SEQ_QUEUED    ? HX_AT_QUEUE
                                            : s->state == HX_SEQ_PREFILL ? HX_AT_PREFILL
                                                                         : HX_AT_DECODE,
                                   .priority = s->req.priority,
                                   .prompt = s->n_prompt,
                                   .cached = s->cached,
                                   .prefilled = s->prefilled,
                                   .generated = s->generated,
                                   .max_new = s->max_new,
                                   .queue = s->queue,
                                   .times = s->times };
    pthread_mutex_unlock(&e->lock);
    return n;
}

static void gauge(hx_sb *b, const char *name, const char *help, int64_t v)
{
    hx_sb_printf(b, "# HELP hoist_%s %s\n# TYPE hoist_%s gauge\nhoist_%s %lld\n", name,
                 help, name, name, (long long)v);
}

/* Bytes and waits of routed experts; how many ran where are counters of base.h. */
static void write_experts(hx_sb *b, const hx_experts *x)
{
    const struct {
        const char *name, *help;
        uint64_t v;
    } all[] = {
        { "experts_link_bytes", "Bytes of experts of decode steps read over the link.",
          (uint64_t)x->link * x->expert_bytes },
        { "experts_lane_bytes", "Bytes of experts of decode steps that the CPU read.",
          (uint64_t)x->lane * x->expert_bytes },
        { "experts_fetch_bytes", "Bytes of experts fetched before they were picked.",
          x->fetch_bytes },
        { "experts_push_bytes", "Bytes of experts moved into GPU memory for decode.",
          x->push_bytes },
        { "experts_stage_bytes", "Bytes of experts copied there for prompts.",
          x->stage_bytes },
        { "experts_wait_us", "Microseconds that the GPU waited for the CPU's experts.",
          (uint64_t)x->wait_us },
        { "experts_lane_us", "Microseconds that the CPU computed experts.",
          (uint64_t)x->lane_us },
    };

    for (size_t i = 0; x->n_expert > 0 && i < HX_LEN(all); i++)
        hx_sb_printf(b,
                     "# HELP hoist_%s_total %s\n# TYPE hoist_%s_total counter\n"
                     "hoist_%s_total %llu\n",
                     all[i].name, all[i].help, all[i].name, all[i].name,
                     (unsigned long long)all[i].v);
}

/* The series that dashboards for vLLM ask for, with its meanings. */
static void write_vllm(hx_sb *b, const hx_engine *e, const hx_status *st)
{
    const struct {
        const char *name, *type, *more;
        double v;
    } all[] = {
        { "num_requests_running", "gauge", "", (double)st->running },
        { "num_requests_waiting", "gauge", "", (double)st->waiting },
        { "kv_cache_usage_perc", "gauge", "",
          (double)st->pages_used / (double)HX_MAX(st->pages, 1) },
        { "num_preemptions_total", "counter", "", (double)st->preempted },
        { "prefix_cache_queries_total", "counter", "",
          (double)hx_counted(HX_C_prefix_queries_total) },
        { "prefix_cache_hits_total", "counter", "",
          (double)hx_counted(HX_C_prefix_hits_total) },
        { "prompt_tokens_total", "counter", "",
          (double)hx_counted(HX_C_prompt_tokens_total) },
        { "generation_tokens_total", "counter", "",
          (double)hx_counted(HX_C_generation_tokens_total) },
        { "request_success_total", "counter", ",finished_reason=\"stop\"",
          (double)hx_counted(HX_C_requests_stop_total) },
        { "request_success_total", NULL, ",finished_reason=\"length\"",
          (double)hx_counted(HX_C_requests_length_total) },
        { "request_success_total", NULL, ",finished_reason=\"abort\"",
          (double)hx_counted(HX_C_requests_cancelled_total) },
    };
    char label[300], name[257];
    size_t n = 0;

    /* A label's value must not hold quotes, backslashes or line ends. */
    for (const char *p = e->name; *p != '\0'; p++)
        name[n++] = *p == '"' || *p == '\\' || *p == '\n' ? '_' : *p;
    name[n] = '\0';
    snprintf(label, sizeof label, "model_name=\"%s\"", name);
    for (size_t i = 0; i < HX_LEN(all); i++) {
        if (all[i].type != NULL)
            hx_sb_printf(b, "# TYPE vllm:%s %s\n", all[i].name, all[i].type);
        hx_sb_printf(b, "vllm:%s{%s%s} %.15g\n", all[i].name, label, all[i].more,
                     all[i].v);
    }
    hx_histograms_write(b, "vllm:", label);
}

int64_t hx_metrics(hx_engine *e, char *out, int64_t cap)
{
    hx_sb b = { 0 };
    hx_status st;
    hx_experts x;
    int64_t n;

    hx_get_status(e, &st);
    hx_counters_write(&b);
    gauge(&b, "requests_running", "Requests being computed.", st.running);
    gauge(&b, "requests_waiting", "Requests waiting for a place.", st.waiting);
    gauge(&b, "pages_total", "Pages of sequence memory, 64 tokens each.", st.pages);
    gauge(&b, "pages_used", "Pages reserved by running requests.", st.pages_used);
    gauge(&b, "pages_kept", "Pages kept for later requests, given up on demand.",
          st.pages_kept);
    gauge(&b, "prefix_states", "Kept states.", st.states);
    gauge(&b, "park_ram_bytes", "Host memory of kept states and parked pages.",
          (int64_t)st.ram_bytes);
    gauge(&b, "context_tokens", "Longest sequence.", e->info.ctx_tokens);
    gauge(&b, "resident_memory_bytes", "Memory of the process, mapped weights included.",
          (int64_t)hx_sys_rss_bytes());
    gauge(&b, "healthy", "1 while answers can be had and trusted.", st.fault == NULL);
    gauge(&b, "wait_milliseconds", "What one more request would wait.", st.wait_ms);
    gauge(&b, "prefill_tokens_per_second", "Prompt tokens per second of work on them.",
          (int64_t)st.prefill_rate);
    gauge(&b, "decode_tokens_per_second", "Tokens per second of decode work.",
          (int64_t)st.decode_rate);
    hx_get_experts(e, &x);
    write_experts(&b, &x);
    write_vllm(&b, e, &st);
    n = b.bad ? HX_ENOMEM : (int64_t)b.n;
    if (HX_MIN(n, cap) > 0)
        memcpy(out, b.p, (size_t)HX_MIN(n, cap));
    hx_sb_free(&b);
    return n;
}
