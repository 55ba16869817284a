/* cuda_fail.cc - what a user reads when the GPU, its driver or locked memory is not as it should
 * be: cuda.cu and cuda_lane.cu on a CUDA runtime that answers as the test says. Needs nvcc and no
 * GPU; tests/suite_cuda.sh builds and runs it. Where the real runtime's answers differ from these
 * is for tests on a GPU to find. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cuda_runtime_api.h>

#include "dev/cuda_dev.h"

/* ---- the runtime ---------------------------------------------------------- */

static struct {
    cudaError_t count, set, image, alloc, lock, sync; /* what these calls answer */
    cudaError_t sticky;                               /* every call, from now on */
    int n_gpu, driver, major;
    unsigned code, n_attr; /* what the code is for; attributes of the last launch */
    bool warned;
    int64_t n_expert;             /* of a layer, that it is opened for */
    size_t free_bytes, elsewhere; /* the GPU sees host memory so far from where it is */
} gpu;

static cudaError_t say(cudaError_t rc)
{
    return gpu.sticky != cudaSuccess ? gpu.sticky : rc;
}

/* Everything that these files call; handles are never looked into. */
#define OK(name, ...)                                                                    \
    extern "C" cudaError_t CUDARTAPI name(__VA_ARGS__)                                   \
    {                                                                                    \
        return say(cudaSuccess);                                                         \
    }
OK(cudaSetDeviceFlags, unsigned)
OK(cudaStreamDestroy, cudaStream_t)
OK(cudaEventDestroy, cudaEvent_t)
OK(cudaEventRecord, cudaEvent_t, cudaStream_t)
OK(cudaEventQuery, cudaEvent_t)
OK(cudaEventSynchronize, cudaEvent_t)
OK(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
OK(cudaMemsetAsync, void *, int, size_t, cudaStream_t)
OK(cudaMemcpyAsync, void *, const void *, size_t, cudaMemcpyKind, cudaStream_t)
OK(cudaHostUnregister, void *)

extern "C" cudaError_t CUDARTAPI cudaGetLastError(void)
{
    return gpu.sticky;
}

extern "C" cudaError_t CUDARTAPI cudaDriverGetVersion(int *v)
{
    *v = gpu.driver;
    return cudaSuccess;
}

extern "C" cudaError_t CUDARTAPI cudaGetDeviceCount(int *n)
{
    *n = gpu.n_gpu;
    return say(gpu.count);
}

extern "C" cudaError_t CUDARTAPI cudaSetDevice(int)
{
    return say(gpu.set);
}

extern "C" cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Test GPU");
    p->major = gpu.major;
    p->multiProcessorCount = 4;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes *, const void *)
{
    return say(gpu.image);
}

extern "C" cudaError_t CUDARTAPI cudaGetDevice(int *device)
{
    *device = 0;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaMemcpyFromSymbol(void *to, const void *, size_t n, size_t,
                                                      cudaMemcpyKind)
{
    memcpy(to, &gpu.code, n);
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *,
                                                     void **)
{
    gpu.n_attr = c->numAttrs;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *free_bytes = gpu.free_bytes;
    *total = (size_t)24 << 30;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaMalloc(void **p, size_t n)
{
    *p = say(gpu.alloc) == cudaSuccess ? calloc(1, n) : NULL;
    return say(gpu.alloc);
}

extern "C" cudaError_t CUDARTAPI cudaFree(void *p)
{
    free(p);
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaMallocHost(void **p, size_t n)
{
    *p = say(gpu.lock) == cudaSuccess ? calloc(1, n) : NULL;
    return say(gpu.lock);
}

extern "C" cudaError_t CUDARTAPI cudaHostAlloc(void **p, size_t n, unsigned)
{
    return cudaMallocHost(p, n);
}

extern "C" cudaError_t CUDARTAPI cudaFreeHost(void *p)
{
    return cudaFree(p);
}

extern "C" cudaError_t CUDARTAPI cudaHostRegister(void *, size_t, unsigned)
{
    return say(gpu.lock);
}

extern "C" cudaError_t CUDARTAPI cudaHostGetDevicePointer(void **to, void *p, unsigned)
{
    *to = (char *)p + gpu.elsewhere;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    *s = (cudaStream_t)&gpu;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    *e = (cudaEvent_t)&gpu;
    return say(cudaSuccess);
}

extern "C" cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t)
{
    return say(gpu.sync);
}

extern "C" const char *CUDARTAPI cudaGetErrorString(cudaError_t rc)
{
    return rc == cudaErrorMemoryAllocation ? "out of memory" : "as the test says";
}

/* What nvcc's own code calls before main(). */
extern "C" void **__cudaRegisterFatBinary(void *)
{
    return NULL;
}
extern "C" void __cudaRegisterFatBinaryEnd(void **)
{
}
extern "C" void __cudaUnregisterFatBinary(void **)
{
}
extern "C" void __cudaRegisterFunction(void **, const char *, char *, const char *, int,
                                       uint3 *, uint3 *, dim3 *, dim3 *, int *)
{
}
extern "C" void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int)
{
}
extern "C" char __cudaInitModule(void **)
{
    return 1;
}

/* ---- the rest of the device ------------------------------------------------ */

typedef struct {
    int any;
} hx_cuda; /* as cuda_dev.h has it for nvcc */

size_t hx_cuda_ops_scratch_bytes(const hx_dev_limits *)
{
    return 1024;
}
size_t hx_cuda_product_scratch_bytes(const hx_dev_limits *, const hx_cuda_gpu *)
{
    return 1024;
}
size_t hx_cuda_sample_scratch_bytes(const hx_dev_limits *)
{
    return 1024;
}
size_t hx_cuda_attn_scratch_bytes(const hx_dev_limits *)
{
    return 1024;
}
size_t hx_cuda_chunk_scratch_bytes(const hx_dev_limits *)
{
    return 1024;
}
int hx_cuda_tables_open(hx_cuda *, const hx_dev_limits *, hx_err *)
{
    return 0;
}
void hx_cuda_tables_close(hx_cuda *)
{
}

/* ---- checks ------------------------------------------------------------------- */

static int bad;

/* Of one situation: the code, and words of the sentence. */
static void check(const char *name, int rc, int want, const hx_err *err, const char *words)
{
    const bool ok = rc == want && (rc == 0 || strstr(err->msg, words) != NULL);

    if (ok)
        printf("ok cuda_%s\n", name);
    else
        printf("not ok cuda_%s: %d \"%s\", expected %d \"%s\"\n", name, rc,
               rc != 0 ? err->msg : "", want, words);
    bad += !ok;
}

static void well(void)
{
    memset(&gpu, 0, sizeof gpu);
    gpu.n_gpu = 1;
    gpu.driver = CUDART_VERSION;
    gpu.major = 9;
    gpu.free_bytes = (size_t)20 << 30;
}

static int open_it(hx_dev *d, const char *name, hx_err *err)
{
    hx_dev_opt opt = {};

    memset(d, 0, sizeof *d);
    opt.name = name;
    opt.limits.max_expert = gpu.n_expert;
    d->ops = &hx_cuda_ops;
    return hx_cuda_open(d, &opt, err);
}

static void check_open(const char *name, int want, const char *words)
{
    hx_err err = {};
    hx_dev d;

    const int rc = open_it(&d, strcmp(name, "number") == 0 ? "cuda:3" : "cuda", &err);
    check(name, rc, want, &err, words);
    hx_cuda_close(&d);
    well();
}

static void opens(void)
{
    hx_err err = {};

    well();
    check_open("opens", 0, "");
    gpu.driver = 0, gpu.count = cudaErrorInsufficientDriver;
    check_open("no_driver", HX_EUNSUP, "has no NVIDIA driver; install one");
    gpu.driver = 12040, gpu.count = cudaErrorInsufficientDriver;
    check("there_but_old", hx_cuda_is_there() ? 0 : HX_EUNSUP, 0, &err, "");
    check_open("old_driver", HX_EUNSUP, "serves CUDA 12.4 and this program needs 13.");
    gpu.n_gpu = 0, gpu.count = cudaErrorNoDevice;
    check_open("no_gpu", HX_EUNSUP, "sees no GPU (is CUDA_VISIBLE_DEVICES set?)");
    gpu.count = cudaErrorSystemDriverMismatch;
    check_open("driver_updated", HX_EDEVICE, "restart the machine");
    check_open("number", HX_EARG, "there are cuda:0 to cuda:0");
    gpu.major = 7;
    check_open("old_gpu", HX_EUNSUP, "compute capability 7.0, at least 8.0 is needed");
    gpu.n_expert = 2049;
    check_open("experts", HX_EUNSUP, "2049 experts a layer, a GPU takes up to 2048");
    gpu.image = cudaErrorNoKernelImageForDevice;
    check_open("no_code", HX_EUNSUP, "use the portable build");
    gpu.image = cudaErrorUnsupportedPtxVersion;
    check_open("old_compiler", HX_EDEVICE, "update the driver, or use the portable build");
    gpu.set = cudaErrorDevicesUnavailable;
    check_open("busy", HX_EDEVICE, "another process has the GPU for itself");
    gpu.alloc = cudaErrorMemoryAllocation, gpu.free_bytes = 1 << 20;
    check_open("full", HX_ENOMEM, "1.0 of 24576.0 are free; end what else uses the GPU");
    gpu.lock = cudaErrorMemoryAllocation;
    check_open("no_staging", HX_ENOMEM, "staging: the system refuses to lock 1.0 MiB");
    gpu.sticky = cudaErrorECCUncorrectable;
    check_open("ecc_at_open", HX_EDEVICE, "reset the GPU");
}

static void pins(hx_dev *d)
{
    const struct rlimit small = { 8 << 20, 8 << 20 };
    static char page[4096];
    hx_err err = {};
    hx_buf b;

    gpu.lock = cudaErrorMemoryAllocation;
    check("shared", hx_cuda_link.shared(d, &b, 4096, &err), HX_ENOMEM, &err,
          "shared memory: the system refuses");
    setrlimit(RLIMIT_MEMLOCK, &small);
    check("memlock", hx_cuda_link.pin(d, page, sizeof page, &err), HX_ENOMEM, &err,
          "limit on locked memory: 8.0 MiB, ulimit -l unlimited lifts it; WSL locks at most "
          "half");
    well();
    gpu.elsewhere = 64;
    check("addresses", hx_cuda_link.pin(d, page, sizeof page, &err), HX_EUNSUP, &err,
          "other addresses");
    well();
    check("pin", hx_cuda_link.pin(d, page, sizeof page, &err), 0, &err, "");
}

static void losses(hx_dev *d)
{
    char x[64];
    hx_err err = {};
    const hx_buf from = { x, sizeof x };

    gpu.sync = cudaErrorLaunchOutOfResources;
    check("passing", d->ops->get(d, x, from, sizeof x, &err), HX_EDEVICE, &err,
          "get: the GPU reports: as the test says");
    gpu.sticky = cudaErrorLaunchFailure;
    check("xid", d->ops->get(d, x, from, sizeof x, &err), HX_ELOST, &err,
          "the GPU is lost: as the test says; the kernel log (dmesg, NVRM: Xid) says more");
    gpu.sticky = cudaErrorECCUncorrectable;
    check("ecc", d->ops->put(d, from, x, sizeof x, &err), HX_ELOST, &err,
          "if it comes again, replace the GPU");
    well();
}

/* Launches overlap where the code that is loaded waits, whatever the GPU: that from PTX of an
 * older one does not, and is slow enough for a warning. code: as cuda.cu has it. */
static void overlaps(const char *name, int major, unsigned code)
{
    hx_err err = {};
    hx_plan_args a = {};
    hx_dev d;

    gpu.major = major, gpu.code = code, gpu.n_attr = 9;
    a.rows = 1;
    hx_on_log([](void *, int, const char *) { gpu.warned = true; }, NULL);
    int rc = open_it(&d, "cuda", &err);
    if (rc == 0)
        rc = hx_cuda_plan(&d, &a, &err);
    if (rc == 0)
        snprintf(err.msg, sizeof err.msg, "%u attributes%s", gpu.n_attr,
                 gpu.warned ? ", a warning" : "");
    check(name, gpu.n_attr == (code > 0) && gpu.warned == (code == 0) ? rc : -1, 0, &err, "");
    hx_on_log(NULL, NULL);
    hx_cuda_close(&d);
    well();
}

int main(void)
{
    hx_err err = {};
    hx_dev d;

    opens();
    overlaps("ptx_on_hopper", 9, 0);
    overlaps("ptx_on_blackwell", 12, 0);
    overlaps("hopper", 9, 2);
    overlaps("blackwell", 12, 1);
    check("again", open_it(&d, "cuda:0", &err), 0, &err, "");
    pins(&d);
    losses(&d);
    hx_cuda_close(&d);
    return bad != 0;
}
