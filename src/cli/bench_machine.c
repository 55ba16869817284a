/* bench_machine.c - what a result was measured on: build, processor, clocks, GPU and driver, and
 * the ceilings of memory, measured in the same run. Called by bench.c when it writes JSON.
 * What a machine does not tell is null, never a guess. */
#include <dlfcn.h>
#include <math.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <sys/utsname.h>

#include "cli/bench.h"

/* ---- small files ---------------------------------------------------------- */

/* The first line of a file of /proc or /sys, or of it the text after key and a colon. */
static bool line_of(const char *path, const char *key, char out[160])
{
    char *text = NULL;
    size_t n;
    hx_err err;
    const char *p;

    out[0] = '\0';
    if (hx_file_read(path, 4u << 20, &text, &n, &err) != 0)
        return false;
    p = key != NULL ? strstr(text, key) : text;
    if (p != NULL && key != NULL && (p = strchr(p, ':')) != NULL)
        p += 1 + strspn(p + 1, " \t");
    if (p != NULL)
        snprintf(out, 160, "%.*s", (int)HX_MIN(strcspn(p, "\n"), (size_t)159), p);
    hx_free(text);
    return out[0] != '\0';
}

static void put_text(hx_sb *b, const char *name, const char *value)
{
    hx_sb_printf(b, ",\"%s\":", name);
    if (value != NULL && *value != '\0')
        hx_json_put_str(b, hx_str_c(value));
    else
        hx_sb_str(b, "null");
}

static void put_file(hx_sb *b, const char *name, const char *path, const char *key)
{
    char v[160];

    put_text(b, name, line_of(path, key, v) ? v : NULL);
}

/* ---- build, machine --------------------------------------------------------- */

static void put_build(hx_sb *b)
{
    unsigned char md[SHA256_DIGEST_LENGTH];
    hx_file exe;
    hx_err err;

    hx_sb_str(b, ",\n\"build\":{\"version\":\"" HX_VERSION "\"");
    put_text(b, "compiler", __VERSION__);
    hx_sb_str(b, ",\"binary_sha256\":");
    if (hx_file_map(&exe, "/proc/self/exe", &err) == 0) {
        SHA256(exe.p, exe.n, md);
        hx_sb_char(b, '"');
        for (size_t i = 0; i < sizeof md; i++)
            hx_sb_printf(b, "%02x", md[i]);
        hx_sb_char(b, '"');
        hx_file_unmap(&exe);
    } else {
        hx_sb_str(b, "null");
    }
    hx_sb_char(b, '}');
}

#define CPUFREQ "/sys/devices/system/cpu/cpu0/cpufreq/"

static void put_machine(hx_sb *b)
{
    struct utsname u;

    hx_sb_printf(b, ",\n\"machine\":{\"cpus\":%d,\"memory_bytes\":%llu", hx_sys_n_cpu(),
                 (unsigned long long)hx_sys_mem_bytes());
    put_file(b, "cpu", "/proc/cpuinfo", "model name");
    put_file(b, "mhz_now", "/proc/cpuinfo", "cpu MHz");
    put_file(b, "khz_max", CPUFREQ "cpuinfo_max_freq", NULL);
    put_file(b, "governor", CPUFREQ "scaling_governor", NULL);
    put_file(b, "load", "/proc/loadavg", NULL);
    put_file(b, "huge_pages", "/sys/kernel/mm/transparent_hugepage/enabled", NULL);
    put_text(b, "kernel", uname(&u) == 0 ? u.release : NULL);
    put_text(b, "arch", uname(&u) == 0 ? u.machine : NULL);
    hx_sb_char(b, '}');
}

/* ---- GPU ----------------------------------------------------------------------- */

/* NVML by its stable C ABI: present wherever a driver is. */
static void put_nvml(hx_sb *b)
{
    void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *dev = NULL;
    struct {
        int (*init)(void), (*shutdown)(void);
        int (*handle)(unsigned, void **), (*name)(void *, char *, unsigned);
        int (*clock)(void *, int, unsigned *), (*max_clock)(void *, int, unsigned *);
        int (*power)(void *, unsigned *);
    } f;
    const struct {
        const char *name;
        void *at;
    } symbols[] = { { "nvmlInit_v2", &f.init },
                    { "nvmlShutdown", &f.shutdown },
                    { "nvmlDeviceGetHandleByIndex_v2", &f.handle },
                    { "nvmlDeviceGetName", &f.name },
                    { "nvmlDeviceGetClockInfo", &f.clock },
                    { "nvmlDeviceGetMaxClockInfo", &f.max_clock },
                    { "nvmlDeviceGetPowerManagementLimit", &f.power } };
    enum { CLOCK_SM = 1, CLOCK_MEM = 2 };
    char name[96] = "";
    unsigned v;

    for (size_t i = 0; lib != NULL && i < HX_LEN(symbols); i++) {
        void *p = dlsym(lib, symbols[i].name);

        if (p == NULL) {
            dlclose(lib);
            lib = NULL;
        } else {
            memcpy(symbols[i].at, &p, sizeof p);
        }
    }
    if (lib == NULL)
        return;
    if (f.init() == 0 && f.handle(0, &dev) == 0) {
        put_text(b, "name", f.name(dev, name, sizeof name) == 0 ? name : NULL);
        if (f.clock(dev, CLOCK_SM, &v) == 0)
            hx_sb_printf(b, ",\"sm_mhz_now\":%u", v);
        if (f.max_clock(dev, CLOCK_SM, &v) == 0)
            hx_sb_printf(b, ",\"sm_mhz_max\":%u", v);
        if (f.clock(dev, CLOCK_MEM, &v) == 0)
            hx_sb_printf(b, ",\"memory_mhz_now\":%u", v);
        if (f.power(dev, &v) == 0)
            hx_sb_printf(b, ",\"power_limit_mw\":%u", v);
    }
    f.shutdown();
    dlclose(lib);
}

void bench_gpu(hx_sb *b)
{
    char driver[160];

    if (!line_of("/proc/driver/nvidia/version", NULL, driver)) {
        hx_sb_str(b, ",\n\"gpu\":null");
        return;
    }
    hx_sb_str(b, ",\n\"gpu\":{\"driver\":");
    hx_json_put_str(b, hx_str_c(driver));
    put_nvml(b);
    hx_sb_char(b, '}');
}

/* ---- ceilings ------------------------------------------------------------------- */

typedef struct {
    uint64_t *a, *b; /* [n] */
    bool copy;
    _Atomic uint64_t sum; /* so that reading is not optimised away */
} stream_job;

static void run_range(void *ud, int64_t begin, int64_t end, int worker)
{
    stream_job *j = ud;
    uint64_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;

    (void)worker;
    if (j->copy) {
        memcpy(j->b + begin, j->a + begin, (size_t)(end - begin) * sizeof *j->a);
        return;
    }
    for (int64_t i = begin; i + 4 <= end; i += 4) {
        s0 += j->a[i];
        s1 += j->a[i + 1];
        s2 += j->a[i + 2];
        s3 += j->a[i + 3];
    }
    atomic_fetch_add(&j->sum, s0 + s1 + s2 + s3);
}

#define CEILING_RUNS 5

/* GB/s over memory far larger than the caches, all threads. A copy counts both ways. */
static void put_ceiling(hx_sb *b, const char *name, hx_pool *pool, stream_job *j,
                        int64_t n)
{
    double v[CEILING_RUNS];
    double lo = INFINITY, hi = 0;

    for (int k = -1; k < CEILING_RUNS; k++) {
        const int64_t start = hx_now_us();

        hx_pool_run(pool, n, 1 << 17, run_range, j);
        if (k >= 0)
            v[k] = (double)n * 8e-3 * (j->copy ? 2 : 1) /
                   (double)HX_MAX(hx_now_us() - start, 1);
    }
    for (int k = 0; k < CEILING_RUNS; k++) {
        lo = HX_MIN(lo, v[k]);
        hi = HX_MAX(hi, v[k]);
    }
    printf("%-44s %12.4g GB/s  (%.4g to %.4g)\n", name, bench_median(v, CEILING_RUNS), lo,
           hi);
    hx_sb_printf(b,
                 ",\"%s\":{\"unit\":\"GB/s\",\"median\":%.5g,\"min\":%.5g,\"max\":%.5g}",
                 name, bench_median(v, CEILING_RUNS), lo, hi);
}

static void put_ceilings(hx_sb *b, int n_threads)
{
    const int64_t n = 32 << 20; /* 256 MiB each */
    stream_job j = { .a = hx_map((size_t)n * 8, true), .b = hx_map((size_t)n * 8, true) };
    hx_pool *pool = NULL;
    hx_err err;

    hx_sb_printf(b, ",\n\"ceilings\":{\"threads\":%d", n_threads);
    if (j.a != NULL && j.b != NULL && hx_pool_open(&pool, n_threads, NULL, &err) == 0) {
        memset(j.a, 1, (size_t)n * 8); /* zero pages would all be one */
        put_ceiling(b, "memory_read", pool, &j, n);
        j.copy = true;
        put_ceiling(b, "memory_copy", pool, &j, n);
    }
    hx_sb_char(b, '}');
    hx_pool_close(pool);
    hx_unmap(j.a, (size_t)n * 8);
    hx_unmap(j.b, (size_t)n * 8);
}

void bench_machine(hx_sb *b, const hx_sb *gpu, int n_threads)
{
    put_build(b);
    put_machine(b);
    if (gpu->n > 0)
        hx_sb_add(b, gpu->p, gpu->n);
    else
        bench_gpu(b);
    put_ceilings(b, n_threads);
}
