/* stats.c - what the server is doing, as JSON: health of the engine, /slots, /stats. Called
 * by server.c's routes; never shows text of a prompt or an answer. */
#include "serve/serve.h"

#define STREAMS_MAX 4096 /* entries of /slots */

void hx_stats_write_health(hx_sb *b, hx_engine *e, bool *healthy)
{
    hx_status st;

    hx_get_status(e, &st);
    *healthy = st.fault == NULL;
    if (*healthy) {
        hx_sb_printf(b,
                     "{\"status\":\"ok\",\"running\":%lld,\"waiting\":%lld,"
                     "\"steps\":%lld}",
                     (long long)st.running, (long long)st.waiting, (long long)st.steps);
        return;
    }
    hx_sb_printf(b, "{\"status\":\"error\",\"reason\":\"%s\",\"message\":", st.fault);
    hx_json_put_str(b, hx_str_c(st.fault_text));
    hx_sb_char(b, '}');
}

static double ms_since(int64_t from_us, int64_t to_us)
{
    return from_us != 0 && to_us != 0 ? (double)(to_us - from_us) / 1e3 : 0;
}

static void write_stream(hx_sb *b, const hx_stream_info *s, int64_t now)
{
    static const char *const stage[] = { "waiting", "prefill", "decode" };
    const hx_times *t = &s->times;
    const int64_t start = t->started_us != 0 ? t->started_us : now,
                  first = t->first_us != 0 ? t->first_us : now;
    const double made_s = (double)(now - first) / 1e6;

    hx_sb_printf(b,
                 "{\"id\":%llu,\"state\":\"%s\",\"is_processing\":%s,\"priority\":%d,"
                 "\"n_prompt\":%lld,\"n_cached\":%lld,\"n_prefilled\":%lld,"
                 "\"n_generated\":%lld,\"n_max\":%lld,\"queue\":%lld,",
                 (unsigned long long)s->id, stage[s->stage],
                 s->stage != HX_AT_QUEUE ? "true" : "false", s->priority,
                 (long long)s->prompt, (long long)s->cached, (long long)s->prefilled,
                 (long long)s->generated, (long long)s->max_new, (long long)s->queue);
    hx_sb_printf(b,
                 "\"queue_ms\":%.1f,\"prefill_ms\":%.1f,\"decode_ms\":%.1f,"
                 "\"tokens_per_second\":%.1f}",
                 ms_since(t->queued_us, start),
                 t->started_us != 0 ? ms_since(start, first) : 0, made_s * 1e3,
                 made_s > 0 ? (double)(s->generated - 1) / made_s : 0);
}

int hx_stats_slots(hx_call *c)
{
    hx_stream_info *all = hx_arena_alloc(&c->arena, STREAMS_MAX * sizeof *all);
    hx_sb b = { 0 };
    int64_t n;

    if (all == NULL)
        return hx_server_problem(c, 503, NULL, "out_of_memory", "slots: no memory");
    n = HX_MIN(hx_get_streams(c->engine, all, STREAMS_MAX), STREAMS_MAX);
    hx_sb_char(&b, '[');
    for (int64_t i = 0; i < n; i++) {
        if (i > 0)
            hx_sb_char(&b, ',');
        write_stream(&b, &all[i], hx_now_us());
    }
    hx_sb_char(&b, ']');
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}

/* Where experts of decode steps ran; hits are those found in GPU memory. */
static void write_experts(hx_sb *b, hx_engine *e)
{
    hx_experts x;

    hx_get_experts(e, &x);
    if (x.n_expert == 0)
        return;
    const int64_t all = x.here + x.link + x.lane + x.ahead;
    hx_sb_printf(
        b,
        ",\"experts\":{\"slots\":%d,\"total\":%d,\"bytes\":%llu,\"steps\":%lld,"
        "\"picks\":%lld,\"distinct\":%lld,\"here\":%lld,\"link\":%lld,"
        "\"lane\":%lld,\"ahead\":%lld,\"hit_rate\":%.4f,\"moved\":%lld,"
        "\"evicted\":%lld,\"fetch_bytes\":%llu,\"vain_bytes\":%llu,"
        "\"link_bytes\":%llu,\"lane_bytes\":%llu,\"push_bytes\":%llu,"
        "\"stage_bytes\":%llu,\"wait_us\":%lld,\"lane_us\":%lld,\"cost_us\":"
        "{\"here\":%.2f,\"link\":%.2f,\"lane\":%.2f,\"lane_row\":%.2f,"
        "\"post\":%.2f}}",
        x.n_slot, x.n_expert, (unsigned long long)x.expert_bytes, (long long)x.steps,
        (long long)x.picks, (long long)all, (long long)x.here, (long long)x.link,
        (long long)x.lane, (long long)x.ahead, all > 0 ? (double)x.here / (double)all : 0,
        (long long)x.pushed, (long long)x.evicted, (unsigned long long)x.fetch_bytes,
        (unsigned long long)x.vain_bytes, (unsigned long long)x.link * x.expert_bytes,
        (unsigned long long)x.lane * x.expert_bytes, (unsigned long long)x.push_bytes,
        (unsigned long long)x.stage_bytes, (long long)x.wait_us, (long long)x.lane_us,
        x.us[0], x.us[1], x.us[2], x.us[3], x.us[4]);
}

int hx_stats_all(hx_call *c)
{
    const hx_info *i = c->info;
    hx_status st;
    hx_sb b = { 0 };

    hx_get_status(c->engine, &st);
    hx_sb_str(&b, "{\"model\":");
    hx_json_put_str(&b, hx_server_model_name(c->server));
    hx_sb_str(&b, ",\"device\":");
    hx_json_put_str(&b, hx_str_c(i->device));
    hx_sb_printf(&b,
                 ",\"version\":\"" HX_VERSION "\",\"fault\":%s%s%s,\"requests\":{"
                 "\"running\":%lld,\"waiting\":%lld,\"max_running\":%d,"
                 "\"max_waiting\":%lld,\"wait_ms\":%lld,\"total\":%lld,"
                 "\"failed\":%lld,\"cancelled\":%lld,\"preempted\":%lld}",
                 st.fault != NULL ? "\"" : "", st.fault != NULL ? st.fault : "null",
                 st.fault != NULL ? "\"" : "", (long long)st.running,
                 (long long)st.waiting, i->max_streams, (long long)i->max_queue,
                 (long long)st.wait_ms, (long long)hx_counted(HX_C_requests_total),
                 (long long)hx_counted(HX_C_requests_failed_total),
                 (long long)hx_counted(HX_C_requests_cancelled_total),
                 (long long)st.preempted);
    hx_sb_printf(&b,
                 ",\"tokens\":{\"prompt\":%lld,\"generated\":%lld,\"cache_hits\":%lld,"
                 "\"cache_queries\":%lld},\"rates\":{\"prefill\":%.1f,\"decode\":%.1f}",
                 (long long)hx_counted(HX_C_prompt_tokens_total),
                 (long long)hx_counted(HX_C_generation_tokens_total),
                 (long long)hx_counted(HX_C_prefix_hits_total),
                 (long long)hx_counted(HX_C_prefix_queries_total), st.prefill_rate,
                 st.decode_rate);
    hx_sb_printf(&b,
                 ",\"memory\":{\"resident\":%llu,\"weights\":%llu,\"sequences\":%llu,"
                 "\"work\":%llu,\"pages\":%lld,\"pages_used\":%lld},\"kept\":{\"states\":"
                 "%lld,\"pages\":%lld,\"ram\":%llu,\"ram_most\":%llu,\"disk\":%llu,"
                 "\"disk_most\":%llu},\"steps\":%lld,\"connections\":%lld",
                 (unsigned long long)hx_sys_rss_bytes(),
                 (unsigned long long)i->weight_bytes, (unsigned long long)i->cache_bytes,
                 (unsigned long long)i->work_bytes, (long long)st.pages,
                 (long long)st.pages_used, (long long)st.states, (long long)st.pages_kept,
                 (unsigned long long)st.ram_bytes, (unsigned long long)i->park_ram_bytes,
                 (unsigned long long)st.disk_bytes,
                 (unsigned long long)i->park_disk_bytes, (long long)st.steps,
                 (long long)hx_counted(HX_C_http_connections));
    write_experts(&b, c->engine);
    hx_sb_char(&b, '}');
    hx_server_reply_json(c, &b);
    hx_sb_free(&b);
    return 0;
}
