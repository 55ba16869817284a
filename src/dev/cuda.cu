/* cuda.cu - the CUDA device: open and close, its memory, copies, staging of host data,
 * and the operation table. Called through hx_cuda_ops and by ops.c at open and close.
 *
 * One stream per device carries every kernel and every copy, so that put and get are in
 * order with the operations. Nothing here computes. */
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "dev/cuda_tensor.h"

enum {
    OLDEST_CC = 80,     /* int8 matrix units with unsigned operands, cp.async */
    MOST_EXPERTS = 2048 /* of a layer, which a thread block ranks or sorts */
};

/* ---- errors ---------------------------------------------------------- */

/* What to do about it, where more is known than what the driver says. */
static const char *way_out(cudaError_t rc)
{
    static const struct {
        cudaError_t rc;
        const char *text;
    } known[] = {
        { cudaErrorDevicesUnavailable, "another process has the GPU for itself: end it, "
                                       "or allow several (nvidia-smi -c "
                                       "0)" },
        { cudaErrorSystemNotReady,
          "on machines with NVSwitch nvidia-fabricmanager must run" },
        { cudaErrorSystemDriverMismatch,
          "the driver was updated: restart the machine or load its module anew" },
        { cudaErrorUnsupportedPtxVersion,
          "update the driver, or use the portable build" },
        { cudaErrorECCUncorrectable, "its memory is damaged: reset the GPU (nvidia-smi "
                                     "-r) or restart the machine; if "
                                     "it comes again, replace the GPU" },
    };

    for (size_t i = 0; i < HX_LEN(known); i++)
        if (known[i].rc == rc)
            return known[i].text;
    return NULL;
}

/* After some errors every call fails until the process ends. */
static bool is_lost(void)
{
    size_t free_bytes, total;

    cudaGetLastError(); /* what other errors leave */
    const cudaError_t rc = cudaMemGetInfo(&free_bytes, &total);
    return rc != cudaSuccess && rc != cudaErrorStreamCaptureUnsupported;
}

int hx_cuda_fail(hx_err *err, const char *op, cudaError_t rc)
{
    const char *way = way_out(rc);

    if (rc == cudaErrorMemoryAllocation)
        return hx_fail(err, HX_ENOMEM, "%s: the GPU reports: %s", op,
                       cudaGetErrorString(rc));
    if (rc == cudaErrorDevicesUnavailable || !is_lost())
        return hx_fail(err, HX_EDEVICE, "%s: the GPU reports: %s%s%s", op,
                       cudaGetErrorString(rc), way != NULL ? "; " : "",
                       way != NULL ? way : "");
    return hx_fail(
        err, HX_ELOST, "%s: the GPU is lost: %s; %s", op, cudaGetErrorString(rc),
        way != NULL ? way
                    : "the kernel log (dmesg, NVRM: Xid) says more; start this "
                      "program again");
}

/* Why there is no device. */
static int no_device(hx_err *err, const char *name, cudaError_t rc)
{
    int driver = 0, need = CUDART_VERSION;

    cudaDriverGetVersion(&driver);
    if (driver == 0)
        return hx_fail(
            err, HX_EUNSUP,
            "device %s: this machine has no NVIDIA driver; install one (a container "
            "needs --gpus all), or use the device cpu",
            name);
    if (rc == cudaErrorInsufficientDriver)
        return hx_fail(
            err, HX_EUNSUP,
            "device %s: the NVIDIA driver is too old, it serves CUDA %d.%d and "
            "this program needs %d.%d; update the driver",
            name, driver / 1000, driver % 1000 / 10, need / 1000, need % 1000 / 10);
    if (rc != cudaSuccess && rc != cudaErrorNoDevice)
        return hx_fail(err, HX_EDEVICE, "device %s: the NVIDIA driver reports: %s; %s",
                       name, cudaGetErrorString(rc),
                       way_out(rc) != NULL ? way_out(rc) : "or use the device cpu");
    return hx_fail(err, HX_EUNSUP,
                   "device %s: the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES "
                   "set?); use the device cpu",
                   name);
}

/* ---- memory ---------------------------------------------------------- */

int hx_cuda_alloc_for(void **out, size_t bytes, const char *what, hx_err *err)
{
    size_t free_bytes = 0, total = 0;
    cudaError_t rc;

    *out = NULL;
    if (bytes == 0 || (rc = cudaMalloc(out, bytes)) == cudaSuccess)
        return 0;
    *out = NULL;
    if (rc != cudaErrorMemoryAllocation)
        return hx_cuda_fail(err, what, rc);
    cudaGetLastError(); /* it would come back at the next launch */
    cudaMemGetInfo(&free_bytes, &total);
    return hx_fail(
        err, HX_ENOMEM,
        "device cuda: no GPU memory for %s: %.1f MiB asked for, %.1f of %.1f are free; "
        "end "
        "what else uses the GPU (nvidia-smi), or lower --ctx, --streams or --cache",
        what, (double)bytes / (1 << 20), (double)free_bytes / (1 << 20),
        (double)total / (1 << 20));
}

int hx_cuda_no_lock(hx_err *err, const char *what, size_t bytes, cudaError_t rc)
{
    struct rlimit l;
    char limit[32];

    if (rc != cudaErrorMemoryAllocation && rc != cudaErrorOperatingSystem)
        return hx_cuda_fail(err, what, rc);
    cudaGetLastError();
    if (getrlimit(RLIMIT_MEMLOCK, &l) != 0 || l.rlim_cur == RLIM_INFINITY)
        snprintf(limit, sizeof limit, "none");
    else
        snprintf(limit, sizeof limit, "%.1f MiB", (double)l.rlim_cur / (1 << 20));
    return hx_fail(
        err, HX_ENOMEM,
        "%s: the system refuses to lock %.1f MiB of host memory (%s); limit on "
        "locked memory: %s, ulimit -l unlimited lifts it; WSL locks at most "
        "half of its memory (.wslconfig)",
        what, (double)bytes / (1 << 20), cudaGetErrorString(rc), limit);
}

/* The calling thread works with this device from here on. */
static hx_cuda *current(hx_dev *d)
{
    cudaSetDevice(hx_cuda_of(d)->device);
    return hx_cuda_of(d);
}

static int dev_alloc(hx_dev *d, hx_buf *out, size_t bytes, hx_err *err)
{
    void *p;
    cudaError_t rc;

    *out = hx_buf { NULL, 0 };
    hx_cuda *c = current(d);
    const int no = hx_cuda_alloc_for(&p, bytes, "a buffer", err);
    if (no != 0)
        return no;
    if (bytes > 0 && (rc = cudaMemsetAsync(p, 0, bytes, c->stream)) != cudaSuccess) {
        cudaFree(p);
        return hx_cuda_fail(err, "alloc", rc);
    }
    *out = hx_buf { p, bytes };
    return 0;
}

/* cudaFree waits for what still runs. */
static void dev_free(hx_dev *d, hx_buf *b)
{
    (void)d;
    if (b->p != NULL)
        cudaFree(b->p);
    *b = hx_buf { NULL, 0 };
}

/* Ordinary memory is taken before this returns; pinned memory must stay as it is until
 * the next get. */
static int dev_put(hx_dev *d, hx_buf to, const void *from, size_t bytes, hx_err *err)
{
    const cudaError_t rc =
        bytes == 0 ? cudaSuccess
                   : cudaMemcpyAsync(to.p, from, bytes, cudaMemcpyHostToDevice,
                                     current(d)->stream);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "put", rc);
}

static int dev_get(hx_dev *d, void *to, hx_buf from, size_t bytes, hx_err *err)
{
    const cudaError_t rc =
        bytes == 0 ? cudaSuccess
                   : cudaMemcpyAsync(to, from.p, bytes, cudaMemcpyDeviceToHost,
                                     current(d)->stream);

    return rc == cudaSuccess ? hx_cuda_sync(d, err) : hx_cuda_fail(err, "get", rc);
}

int hx_cuda_sync(hx_dev *d, hx_err *err)
{
    const cudaError_t rc = cudaStreamSynchronize(hx_cuda_of(d)->stream);

    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, "get", rc);
}

/* ---- host data of a call --------------------------------------------- */

hx_cuda_stage *hx_cuda_stage_take(hx_cuda *c)
{
    hx_cuda_stage *s = &c->stage[c->next_stage];

    c->next_stage = (c->next_stage + 1) % HX_CUDA_STAGES;
    cudaEventSynchronize(s->used);
    return s;
}

cudaError_t hx_cuda_stage_put(hx_cuda *c, hx_cuda_stage *s, size_t n)
{
    return cudaMemcpyAsync(s->dev, s->host, n, cudaMemcpyHostToDevice, c->stream);
}

cudaError_t hx_cuda_stage_done(hx_cuda *c, hx_cuda_stage *s)
{
    return cudaEventRecord(s->used, c->stream);
}

static int stages_open(hx_cuda *c, hx_err *err)
{
    cudaError_t rc;

    for (int i = 0; i < HX_CUDA_STAGES; i++) {
        hx_cuda_stage *s = &c->stage[i];
        void *p;

        if (hx_cuda_alloc_for(&p, c->stage_bytes, "staging", err) != 0)
            return HX_ENOMEM;
        s->dev = (char *)p;
        if ((rc = cudaMallocHost(&p, c->stage_bytes)) != cudaSuccess)
            return hx_cuda_no_lock(err, "staging", c->stage_bytes, rc);
        s->host = (char *)p;
        if ((rc = cudaEventCreateWithFlags(&s->used, cudaEventDisableTiming)) !=
            cudaSuccess)
            return hx_cuda_fail(err, "open", rc);
    }
    return 0;
}

int hx_cuda_spans_of(hx_cuda_spans *out, const hx_rows *r, const char *op, hx_err *err)
{
    out->dev = (const hx_span *)r->dev.p;
    out->n = r->n_span;
    if (out->dev != NULL)
        return 0;
    if (r->n_span > HX_CUDA_SPANS)
        return hx_fail(err, HX_EARG,
                       "%s: %d spans, at most %d go with a call; put them on the device",
                       op, r->n_span, HX_CUDA_SPANS);
    for (int32_t i = 0; i < r->n_span; i++)
        out->in[i] = r->span[i];
    return 0;
}

/* ---- open and close -------------------------------------------------- */

bool hx_cuda_is_there(void)
{
    int n = 0, driver = 0;
    const cudaError_t rc = cudaGetDeviceCount(&n);

    if (rc == cudaSuccess)
        return n > 0;
    cudaGetLastError();
    if (rc != cudaErrorInsufficientDriver)
        return rc != cudaErrorNoDevice;
    cudaDriverGetVersion(&driver); /* 0: its library is missing */
    return driver > 0 || access("/proc/driver/nvidia", F_OK) == 0 ||
           access("/usr/lib/wsl/lib/libcuda.so.1", F_OK) == 0;
}

/* Stands for all kernels: is there code for this GPU in the program? */
__global__ static void probe(void)
{
}

/* What the code that is loaded was compiled for, which the GPU does not say: the driver makes
 * code for it from PTX of an older one where a program has no other, and nothing there waits
 * or knows of clusters. 1: kernels wait for the launch before them; 2: for Hopper. */
static __constant__ int loaded = HX_WGMMA ? 2 : HX_BULK ? 1 : 0;

cudaError_t hx_cuda_gpu_read(hx_cuda_gpu *g)
{
    cudaDeviceProp prop;
    int device, code;
    cudaError_t rc = cudaGetDevice(&device);

    if (rc != cudaSuccess ||
        (rc = cudaGetDeviceProperties(&prop, device)) != cudaSuccess ||
        (rc = cudaMemcpyFromSymbol(&code, loaded, sizeof code)) != cudaSuccess)
        return rc;
    *g = hx_cuda_gpu { prop.multiProcessorCount, prop.sharedMemPerBlockOptin,
                       prop.sharedMemPerMultiprocessor, code >= 1, code >= 2 };
    return cudaSuccess;
}

/* N of "cuda" (0) and "cuda:N", or -1. */
static int device_number(const char *name)
{
    int n = 0;

    if (name[4] == 0)
        return 0;
    if (name[4] != ':' || name[5] == 0)
        return -1;
    for (const char *p = name + 5; *p != 0; p++) {
        if (*p < '0' || *p > '9' || n > 1000)
            return -1;
        n = 10 * n + (*p - '0');
    }
    return n;
}

/* Who waits for the device sleeps: experts may need every CPU meanwhile. */
static cudaError_t use_device(int number)
{
    const cudaError_t rc = cudaSetDevice(number);

    if (rc == cudaSuccess && cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync) != rc)
        cudaGetLastError(); /* somebody else's choice stands: only waiting is dearer */
    return rc;
}

/* Finds the GPU and checks that this program can run on it. */
static int find_device(hx_cuda *c, const char *name, cudaDeviceProp *prop, hx_err *err)
{
    const int number = device_number(name);
    cudaFuncAttributes attr;
    int n = 0;
    cudaError_t rc = cudaGetDeviceCount(&n);

    if (rc != cudaSuccess || n == 0)
        return no_device(err, name, rc);
    if (number < 0 || number >= n)
        return hx_fail(err, HX_EARG, "device %s: there are cuda:0 to cuda:%d", name,
                       n - 1);
    if ((rc = use_device(number)) != cudaSuccess ||
        (rc = cudaGetDeviceProperties(prop, number)) != cudaSuccess)
        return hx_cuda_fail(err, name, rc);
    c->device = number;
    if (10 * prop->major + prop->minor < OLDEST_CC)
        return hx_fail(
            err, HX_EUNSUP,
            "device %s: %s has compute capability %d.%d, at least 8.0 is needed; "
            "use the device cpu",
            name, prop->name, prop->major, prop->minor);
    rc = cudaFuncGetAttributes(&attr, probe);
    if (rc == cudaErrorNoKernelImageForDevice || rc == cudaErrorInvalidDeviceFunction)
        return hx_fail(err, HX_EUNSUP,
                       "device %s: this build has no code for %s (compute capability "
                       "%d.%d); use the portable build",
                       name, prop->name, prop->major, prop->minor);
    if (rc == cudaSuccess)
        rc = hx_cuda_gpu_read(&c->gpu);
    return rc == cudaSuccess ? 0 : hx_cuda_fail(err, name, rc);
}

/* Everything a call will need. */
static int memory_open(hx_cuda *c, const hx_dev_limits *l, hx_err *err)
{
    const int64_t widest = HX_MAX(HX_MAX(l->max_k, l->max_n), 128) + 127;
    void *p;
    cudaError_t rc;

    const size_t need[] = { hx_cuda_ops_scratch_bytes(l),
                            hx_cuda_product_scratch_bytes(l, &c->gpu),
                            hx_cuda_sample_scratch_bytes(l),
                            hx_cuda_attn_scratch_bytes(l),
                            hx_cuda_chunk_scratch_bytes(l) };
    for (size_t i = 0; i < HX_LEN(need); i++)
        c->scratch_bytes = HX_MAX(c->scratch_bytes, need[i]);
    if (hx_cuda_alloc_for(&p, c->scratch_bytes, "scratch", err) != 0)
        return HX_ENOMEM;
    c->scratch = (char *)p;
    c->n_ticket = HX_MAX(widest / 128, 2048 * ((l->max_k + 127) / 128));
    if (hx_cuda_alloc_for(&p, (size_t)c->n_ticket * sizeof(int), "tickets", err) != 0)
        return HX_ENOMEM;
    c->ticket = (int *)p;
    if ((rc = cudaMemsetAsync(p, 0, (size_t)c->n_ticket * sizeof(int), c->stream)) !=
        cudaSuccess)
        return hx_cuda_fail(err, "open", rc);
    /* A row's mask, history, biases and bans may each name every id. */
    c->stage_bytes = HX_MAX((size_t)1 << 20, (size_t)widest * 24 + 4096);
    return stages_open(c, err);
}

int hx_cuda_open(hx_dev *d, const hx_dev_opt *opt, hx_err *err)
{
    cudaDeviceProp prop;
    hx_cuda *c = hx_new(hx_cuda, 1);
    int rc;

    if (c == NULL)
        return hx_fail(err, HX_ENOMEM, "device %s: no memory for %zu bytes", opt->name,
                       sizeof(*c));
    d->own = c;
    if ((rc = find_device(c, opt->name, &prop, err)) != 0)
        return rc;
    if (opt->isa != NULL)
        return hx_fail(err, HX_EARG,
                       "device %s has no instruction sets to choose from (%s); name the "
                       "device cpu, or leave it out",
                       opt->name, opt->isa);
    if (opt->limits.max_expert > MOST_EXPERTS)
        return hx_fail(err, HX_EUNSUP,
                       "device %s: %lld experts a layer, a GPU takes up to %d; use the "
                       "device cpu",
                       opt->name, (long long)opt->limits.max_expert, MOST_EXPERTS);
    const cudaError_t made = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    if (made != cudaSuccess)
        return hx_cuda_fail(err, opt->name, made);
    if ((rc = hx_cuda_link_open(c, err)) != 0 ||
        (rc = memory_open(c, &opt->limits, err)) != 0 ||
        (rc = hx_cuda_side_open(c, err)) != 0 ||
        (rc = hx_cuda_tables_open(c, &opt->limits, err)) != 0)
        return rc;
    d->used_bytes +=
        c->scratch_bytes + c->side.scratch_bytes + HX_CUDA_STAGES * c->stage_bytes;
    if (prop.major >= 9 && !c->gpu.overlap)
        hx_log(HX_LOG_WARN,
               "device %s: this build has code for older GPUs than %s only: the driver "
               "compiles it, which takes minutes once, and it is slower than that of a "
               "build on this machine",
               opt->name, prop.name);
    d->isa = "cuda";
    snprintf(d->text, sizeof(d->text), "cuda:%d (%.40s)", c->device, prop.name);
    return hx_cuda_sync(d, err);
}

void hx_cuda_close(hx_dev *d)
{
    hx_cuda *c = hx_cuda_of(d);

    if (c == NULL)
        return;
    if (c->stream != NULL)
        cudaStreamSynchronize(c->stream);
    hx_cuda_link_close(c);
    hx_cuda_tables_close(c);
    for (int i = 0; i < HX_CUDA_STAGES; i++) {
        hx_cuda_stage *s = &c->stage[i];

        if (s->used != NULL)
            cudaEventDestroy(s->used);
        if (s->host != NULL)
            cudaFreeHost(s->host);
        if (s->dev != NULL)
            cudaFree(s->dev);
    }
    if (c->ticket != NULL)
        cudaFree(c->ticket);
    if (c->scratch != NULL)
        cudaFree(c->scratch);
    if (c->stream != NULL)
        cudaStreamDestroy(c->stream);
    hx_free(c);
    d->own = NULL;
}

/* In the order of HX_OPS, which is that of hx_dev_ops. */
const hx_dev_ops hx_cuda_ops = { "cuda",        dev_alloc, dev_free,
                                 dev_put,       dev_get,   &hx_cuda_link,
#define X(op, name) name,
                                 HX_CUDA_OPS(X)
#undef X
};
