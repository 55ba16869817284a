/* engine_memory.c - opens the device and shares out its memory: the weights of every step,
 * sequence memory, workspace, what is sampled, routed experts.
 *
 * Called once by engine.c, on the thread that opens. Order matters: each part is told what
 * the ones before it left. Says what does not fit and which option helps; never takes memory
 * later. */
#include "engine/engine.h"

/* Rows of a chunk where a GPU has memory for more than HX_PREFILL_ROWS. Experts that come over
 * a link do so once for each chunk: as many rows as keep the GPU longer than the link (H200:
 * from 12,000 on), and no more, for others wait for a chunk's end; fewer where they are all
 * there. */
#define CHUNK_MAX      16384
#define CHUNK_RESIDENT 8192

static int store_mode(const char *name, hx_store_mode *out, hx_err *err)
{
    *out = HX_MODE_AUTO;
    if (name == NULL || strcmp(name, "auto") == 0)
        return 0;
    *out = HX_MODE_GPU_ONLY;
    return strcmp(name, "gpu-only") == 0
               ? 0
               : hx_fail(err, HX_EARG, "mode %.40s: unknown; there are auto and gpu-only",
                         name);
}

/* Device memory that is free now but for a margin that other programs and the driver may
 * take. */
static int memory_safe(hx_engine *e, uint64_t *safe, hx_err *err)
{
    uint64_t free_bytes, total;
    const int rc = hx_dev_memory(e->dev, &free_bytes, &total, err);

    *safe = rc == 0 && free_bytes > total / 32 ? free_bytes - total / 32 : 0;
    return rc;
}

/* What is left, of what the caller gives or of all. */
static int memory_left(hx_engine *e, const hx_options *opt, uint64_t *left, hx_err *err)
{
    const uint64_t used = e->dev->used_bytes;
    uint64_t safe;
    int rc;

    if ((rc = memory_safe(e, &safe, err)) != 0)
        return rc;
    if (opt->vram_bytes == 0) {
        *left = safe;
        return 0;
    }
    if (opt->vram_bytes < used)
        return hx_fail(
            err, HX_ENOMEM,
            "GPU memory: %.1f GiB are to be used, but what is not routed experts takes "
            "%.1f GiB already; raise --vram, or lower --ctx, --streams or --cache",
            (double)opt->vram_bytes / (1 << 30), (double)used / (1 << 30));
    *left = opt->vram_bytes - used;
    if (*left > safe)
        return hx_fail(
            err, HX_ENOMEM,
            "GPU memory: %.1f GiB are to be used, %.1f are taken and %.1f more "
            "are free; lower --vram or end what else uses the GPU",
            (double)opt->vram_bytes / (1 << 30), (double)used / (1 << 30),
            (double)safe / (1 << 30));
    return 0;
}

int64_t hx_engine_memory_fit(hx_info *info, const hx_cache_want *w)
{
    const int64_t ctx = w->ctx_tokens != 0 ? w->ctx_tokens : info->ctx_trained_tokens,
                  per_seq = (ctx + HX_PAGE - 1) / HX_PAGE;
    const uint64_t least =
        w->ctx_tokens != 0 ? (uint64_t)per_seq * w->page_bytes : w->budget_bytes / 2;
    uint64_t slots;

    while (w->fewer && info->max_streams > 1 &&
           (uint64_t)info->max_streams * w->slot_bytes + least > w->budget_bytes)
        info->max_streams--;
    slots = (uint64_t)info->max_streams * w->slot_bytes;
    const int64_t pages = w->budget_bytes > slots
                              ? (int64_t)HX_MIN((w->budget_bytes - slots) / w->page_bytes,
                                                (uint64_t)(per_seq * info->max_streams))
                              : 0;

    info->ctx_tokens = HX_MIN(ctx, pages * HX_PAGE);
    return w->ctx_tokens != 0 && pages < per_seq ? 0 : pages;
}

/* What sequence memory may take where the user does not say: a quarter of the memory, but
 * half of what weights leave at most. On a GPU a quarter of what weights leave; all experts
 * come first where they fit and leave enough, and a context that the user names may take
 * more. */
static int cache_budget(hx_engine *e, const hx_options *opt, hx_cache_want *w,
                        hx_err *err)
{
    uint64_t left, routed;
    int rc;

    w->budget_bytes = opt->cache_bytes;
    if (opt->cache_bytes != 0)
        return 0;
    if (hx_dev_is_host(e->dev)) {
        const uint64_t all = hx_sys_mem_bytes(), weights = e->model->weight_bytes;

        left = all > weights ? all - weights : 0;
        w->budget_bytes = HX_MIN(all / 4, HX_MAX(left / 2, all / 16));
        return 0;
    }
    if ((rc = memory_left(e, opt, &left, err)) != 0 ||
        (rc = hx_model_place_bytes(e->model, HX_PLACE_ROUTED, &routed, err)) != 0)
        return rc;
    w->budget_bytes = left / 4;
    if (left > routed && left - routed > left / 8)
        w->budget_bytes = HX_MIN(left / 4, (left - routed) / 2);
    if (opt->ctx_tokens != 0) {
        const int32_t n = w->fewer ? 1 : e->info.max_streams;
        const uint64_t least =
            (uint64_t)n * w->slot_bytes +
            (uint64_t)((opt->ctx_tokens + HX_PAGE - 1) / HX_PAGE) * w->page_bytes;

        w->budget_bytes = HX_MIN(left, HX_MAX(w->budget_bytes, least));
    }
    return 0;
}

/* Context, slots and pages within the budget. */
static int plan_cache(hx_engine *e, const hx_options *opt, int32_t *n_page, hx_err *err)
{
    const hx_desc *d = &e->model->desc;
    hx_cache_want w = { .slot_bytes = hx_cache_slot_bytes(d),
                        .page_bytes =
                            HX_MAX(hx_cache_page_bytes(d, (hx_cache_fmt)opt->kv), 1),
                        .ctx_tokens = opt->ctx_tokens,
                        .fewer = opt->max_streams == 0 };
    const int64_t ctx = opt->ctx_tokens != 0 ? opt->ctx_tokens : HX_PAGE;
    const int rc = cache_budget(e, opt, &w, err);

    if (rc != 0)
        return rc;
    *n_page = (int32_t)hx_engine_memory_fit(&e->info, &w);
    if (*n_page < 1)
        return hx_fail(
            err, HX_ENOMEM,
            "sequence memory: one sequence of %lld tokens needs %llu MB "
            "beside %llu MB for %d streams, the budget is %llu MB; lower "
            "--ctx or --streams, or raise --cache%s",
            (long long)ctx,
            (unsigned long long)((uint64_t)((ctx + HX_PAGE - 1) / HX_PAGE) *
                                     w.page_bytes >>
                                 20),
            (unsigned long long)((uint64_t)e->info.max_streams * w.slot_bytes >> 20),
            e->info.max_streams, (unsigned long long)(w.budget_bytes >> 20),
            hx_dev_is_host(e->dev) ? "" : " or --vram");
    if (e->info.ctx_tokens > d->ctx_trained)
        hx_log(HX_LOG_WARN,
               "context %lld is longer than the %lld tokens the model was trained on",
               (long long)e->info.ctx_tokens, (long long)d->ctx_trained);
    return 0;
}

/* Routed experts: all on the device where they fit, else in the store. A host device has
 * them where they are, or, told so by vram_bytes, plays the store with an arena that stands
 * for device memory. */
static int place_experts(hx_engine *e, const hx_options *opt, hx_err *err)
{
    hx_store_opt store = { .slot_bytes = opt->vram_bytes,
                           .ram_bytes = opt->ram_bytes,
                           .max_rows = e->info.max_streams,
                           .isa = hx_dev_is_host(e->dev) ? opt->cpu_isa : NULL,
                           .cpus = opt->cpus,
                           .n_threads = opt->n_threads,
                           .trace = opt->trace,
                           .rates = { opt->expert_us[0], opt->expert_us[1],
                                      opt->expert_us[2], opt->expert_us[3],
                                      opt->expert_us[4] } };
    uint64_t need;
    int rc;

    e->info.device_bytes = e->dev->used_bytes;
    if ((rc = store_mode(opt->mode, &store.mode, err)) != 0 ||
        (rc = hx_model_place_bytes(e->model, HX_PLACE_ROUTED, &need, err)) != 0 ||
        need == 0)
        return rc;
    if (hx_dev_is_host(e->dev) && opt->vram_bytes == 0 && opt->ram_bytes != 0)
        return hx_fail(err, HX_EARG,
                       "ram: device %s reads experts where their files lie, there is "
                       "nothing to limit; leave it out",
                       e->dev->ops->name);
    if (hx_dev_is_host(e->dev) && opt->vram_bytes == 0)
        return store.mode == HX_MODE_AUTO
                   ? 0
                   : hx_fail(err, HX_EARG,
                             "mode gpu-only: device %s has no GPU; add --device cuda",
                             e->dev->ops->name);
    if (hx_dev_is_host(e->dev))
        return hx_store_open(&e->model->store, e->model, e->dev, &store, err);
    if ((rc = memory_left(e, opt, &store.slot_bytes, err)) != 0)
        return rc;
    if (need <= store.slot_bytes)
        return hx_model_place(e->model, e->dev, HX_PLACE_ROUTED, err);
    return hx_store_open(&e->model->store, e->model, e->dev, &store, err);
}

static int open_experts(hx_engine *e, const hx_options *opt, hx_err *err)
{
    const int rc = place_experts(e, opt, err);

    if (rc == 0 && e->model->store != NULL)
        hx_store_report(e->model->store, &e->experts);
    else if (rc == 0 && opt->trace != NULL)
        return hx_fail(err, HX_EARG,
                       "trace: every expert lies where it is computed with, so picks are "
                       "not looked at; give --vram less than the experts take");
    return rc;
}

/* The longest chunk, up to most rows, for which so much workspace is enough. */
static int64_t rows_in(const hx_engine *e, int64_t most, uint64_t bytes)
{
    int64_t rows = HX_PREFILL_ROWS;

    most = HX_MIN(most, e->info.ctx_tokens);
    while (rows < most && hx_graph_room(e->prefill, rows + HX_PAGE) <= bytes)
        rows += HX_PAGE;
    return rows;
}

/* A GPU that cannot hold all experts has them brought to it once for each prefill chunk:
 * long chunks, then, in workspace that slots lend. One that holds them takes up to a quarter
 * of what is left for chunks that use it better. */
static int long_chunks(hx_engine *e, const hx_options *opt, hx_err *err)
{
    hx_store *s = e->model->store;
    uint64_t left = 0;
    int rc;

    if (s == NULL && !hx_dev_is_host(e->dev)) {
        if ((rc = memory_safe(e, &left, err)) != 0)
            return rc;
        if (opt->vram_bytes != 0)
            left = HX_MIN(left,
                          opt->vram_bytes - HX_MIN(opt->vram_bytes, e->dev->used_bytes));
    }
    int64_t rows = rows_in(e, CHUNK_RESIDENT, left / 4);
    /* As long as they can get; then whole layers, else as many places for parts as there can
     * be. Where not all of a layer has a place, each window of rows has it come again. */
    for (int64_t k = HX_LEND_PARTS + 2; s != NULL && k >= 2; k--) {
        const int64_t n_part = k > HX_LEND_PARTS + 1 ? 1 : HX_LEND_PARTS,
                      n_place = n_part == 1 ? 2 : k,
                      r = rows_in(e, n_place >= n_part ? CHUNK_MAX : HX_MOE_ROWS,
                                  hx_store_lendable(s, n_part, n_place));

        if (r <= rows)
            continue;
        rows = r;
        hx_store_cut(s, n_part, n_place);
    }
    e->prefill_rows = e->info.chunk_tokens = rows;
    if (s != NULL || rows == HX_PREFILL_ROWS)
        return 0;
    hx_graph_close(e->prefill);
    return hx_graph_open(&e->prefill, e->model, e->dev, e->cache, rows, HX_SCORE_ROWS,
                         e->info.ctx_tokens, err);
}

/* The weights of every step, which a GPU must have. */
static int place_dense(hx_engine *e, const hx_options *opt, hx_err *err)
{
    uint64_t need, free_bytes, total;
    int rc;

    if (hx_dev_is_host(e->dev))
        return 0;
    if ((rc = hx_model_place_bytes(e->model, HX_PLACE_DENSE, &need, err)) != 0 ||
        (rc = hx_dev_memory(e->dev, &free_bytes, &total, err)) != 0)
        return rc;
    if (opt->vram_bytes != 0 && need > opt->vram_bytes)
        return hx_fail(err, HX_ENOMEM,
                       "GPU memory: the weights beside routed experts take %.1f GiB, "
                       "%.1f are to be used; raise --vram",
                       (double)need / (1 << 30), (double)opt->vram_bytes / (1 << 30));
    if (need > free_bytes)
        return hx_fail(err, HX_ENOMEM,
                       "GPU memory: the weights beside routed experts take %.1f GiB, "
                       "%.1f of %.1f GiB are free; end what else uses the GPU, or use "
                       "a larger one",
                       (double)need / (1 << 30), (double)free_bytes / (1 << 30),
                       (double)total / (1 << 30));
    return hx_model_place(e->model, e->dev, HX_PLACE_DENSE, err);
}

int hx_engine_memory_open(hx_engine *e, const hx_options *opt, hx_err *err)
{
    const hx_desc *d = &e->model->desc;
    const int64_t rows = HX_MAX(HX_PREFILL_ROWS, e->info.max_streams),
                  ctx = opt->ctx_tokens != 0 ? opt->ctx_tokens : d->ctx_trained;
    const hx_cache_fmt fmt = (hx_cache_fmt)opt->kv;
    const hx_dev_opt dev = { .name = opt->device,
                             .isa = opt->cpu_isa,
                             .cpus = opt->cpus,
                             .n_threads = opt->n_threads,
                             .limits = hx_model_limits(d, rows, ctx) };
    int32_t n_page = 0;
    int rc;

    if ((rc = hx_dev_open(&e->dev, &dev, err)) != 0 ||
        (rc = place_dense(e, opt, err)) != 0 ||
        (rc = plan_cache(e, opt, &n_page, err)) != 0)
        return rc;
    const int64_t n = e->info.max_streams;
    if ((rc = hx_cache_open(&e->cache, d, e->dev, e->info.max_streams, e->info.ctx_tokens,
                            n_page, fmt, err)) != 0 ||
        (rc = hx_graph_open(&e->decode, e->model, e->dev, e->cache, n, n,
                            e->info.ctx_tokens, err)) != 0 ||
        (rc = hx_graph_open(&e->prefill, e->model, e->dev, e->cache, HX_PREFILL_ROWS,
                            HX_SCORE_ROWS, e->info.ctx_tokens, err)) != 0 ||
        (rc = hx_dev_shared(e->dev, &e->landed[0], sizeof(hx_landing), err)) != 0 ||
        (rc = hx_dev_shared(e->dev, &e->landed[1], sizeof(hx_landing), err)) != 0 ||
        (rc = hx_dev_alloc(e->dev, &e->out_id, (size_t)n * sizeof(int32_t), err)) != 0 ||
        (rc = hx_dev_alloc(e->dev, &e->out_logprob, (size_t)n * sizeof(float), err)) !=
            0 ||
        (rc = hx_dev_alloc(e->dev, &e->out_top,
                           (size_t)n * HX_TOP_MAX * sizeof(hx_choice), err)) != 0)
        return rc;
    e->run_ahead = !hx_dev_is_host(e->dev);
    e->info.cache_bytes = e->cache->bytes;
    e->info.token_bytes = e->cache->page_bytes / HX_PAGE;
    e->info.device = e->dev->text;
    if ((rc = hx_dev_alloc(e->dev, &e->out_scratch,
                           (size_t)n * 2 * (size_t)d->n_vocab * sizeof(float), err)) != 0)
        return rc;
    if ((rc = open_experts(e, opt, err)) != 0 || (rc = long_chunks(e, opt, err)) != 0)
        return rc;
    e->info.work_bytes =
        hx_graph_bytes(e->decode) + hx_graph_bytes(e->prefill) + e->dev->scratch_bytes;
    return 0;
}
