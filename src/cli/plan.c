/* plan.c - hoist plan: what a model takes of this machine's memories, what an expert costs on
 * each way, and the speed that follows. Opens the engine, so what it says is measured, and
 * what cannot fit is refused as serve would. */
#include "cli/cli.h"

static void line(const char *name, uint64_t bytes)
{
    char text[32];

    cli_bytes(text, bytes);
    printf("  %-40s %s\n", name, text);
}

static void print_experts(const hx_experts *x, const hx_info *info)
{
    const double layers = (double)x->n_expert / HX_MAX(info->n_expert, 1),
                 picks = layers * info->n_expert_active,
                 share = (double)x->n_slot / HX_MAX(x->n_expert, 1);

    line("experts in GPU memory (slots)", (uint64_t)x->n_slot * x->expert_bytes);
    line("experts in host memory", (uint64_t)x->n_expert * x->expert_bytes);
    printf("an expert of %.2f MB costs, measured now:\n", (double)x->expert_bytes / 1e6);
    printf("  in GPU memory %.1f us", x->us[0]);
    if (x->us[1] > 0)
        printf(", over the link %.1f us (%.1f GB/s)", x->us[1],
               (double)x->expert_bytes / x->us[1] / 1e3);
    if (x->us[2] > 0)
        printf(
            ", on the CPU %.1f us (%.1f GB/s) and %.1f us for each row more, %.0f us to "
            "post",
            x->us[2], (double)x->expert_bytes / x->us[2] / 1e3, x->us[3], x->us[4]);
    printf("\na token picks %.0f experts in %.0f layers; %d of %d have a slot\n", picks,
           layers, x->n_slot, x->n_expert);
    const double hits[] = { share, 0.4, 0.6 };
    for (size_t i = 0; i < HX_LEN(hits); i++) {
        const cli_bound p = cli_step_bound(x, picks * hits[i], picks * (1 - hits[i]));
        const double mb = (double)x->expert_bytes / 1e6;

        if (i == 0 || hits[i] > share)
            printf("  %2.0f %% hits%s: a step reads %.0f MB in GPU memory, %.0f over the "
                   "link, %.0f on the CPU; %.1f ms or more, at most %.1f tok/s; the %s "
                   "limits\n",
                   100 * hits[i], i == 0 ? " (even picks)" : "", p.gpu_mb, p.link * mb,
                   p.lane * mb, p.ms, 1e3 / HX_MAX(p.ms, 1e-3), p.limit);
    }
}

/* For each piece of a long prompt all experts come over the link that have no slot then. */
static void print_prompts(const hx_experts *x, const hx_info *info)
{
    const double s = x->n_expert * x->us[1] * 1e-6;

    if (s > 0)
        printf(
            "long prompts are read %lld tokens at a time; for each of these all experts "
            "come over the link: %.2f s, which allows %.0f tok/s\n",
            (long long)info->chunk_tokens, s, (double)info->chunk_tokens / s);
}

/* What idle conversations may take, and how many of them that is. */
static void print_kept(hx_engine *e, const hx_info *info)
{
    static const int64_t n_tokens[] = { 2000, 20000, 100000 };

    line("host memory for kept states (--park-ram)", info->park_ram_bytes);
    if (info->park_disk_bytes > 0)
        line("disk for them (--park-disk)", info->park_disk_bytes);
    for (size_t i = 0; i < HX_LEN(n_tokens); i++) {
        const int64_t n = HX_MIN(n_tokens[i], info->ctx_tokens);
        const hx_fit f = hx_cache_fit(e, n);

        if (i > 0 && n == HX_MIN(n_tokens[i - 1], info->ctx_tokens))
            break;
        printf("  kept conversations of %lld tokens: %lld in sequence memory, %lld more "
               "in host memory",
               (long long)n, (long long)f.here, (long long)f.in_ram);
        if (info->park_disk_bytes > 0)
            printf(", %lld on disk", (long long)f.on_disk);
        putchar('\n');
    }
}

int cmd_plan(const hx_cli *c)
{
    hx_engine *e;
    hx_experts x;
    hx_info info;
    int rc;

    if ((rc = cli_open_engine(&e, c, NULL, NULL)) != 0)
        return rc;
    hx_get_info(e, &info);
    hx_get_experts(e, &x);
    printf("%s on %s\n", info.name, info.device);
    line("weights", info.weight_bytes);
    line("sequence memory", info.cache_bytes);
    printf("  %-40s %llu bytes\n", "of it a token of context",
           (unsigned long long)info.token_bytes);
    line("workspace", info.work_bytes);
    if (info.device_bytes > 0)
        line("of the device, before routed experts", info.device_bytes);
    printf("  %-40s %lld tokens, %d at a time\n", "context", (long long)info.ctx_tokens,
           info.max_streams);
    print_kept(e, &info);
    if (x.n_slot > 0 || x.n_expert > 0) {
        print_experts(&x, &info);
        print_prompts(&x, &info);
    } else
        printf("all weights lie where they are computed with: no expert moves\n");
    hx_close(e);
    return 0;
}
