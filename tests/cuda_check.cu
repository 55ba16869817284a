/* cuda_check.cu - the CUDA products against the CPU's canonical arithmetic, bit for bit, and their
 * time. Built and run by `make test-gpu` on a machine with a GPU. Prints "ok NAME" or "not ok NAME". */
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "dev/cuda.h"

#define CHECK(call)                                                                        \
    do {                                                                                   \
        cudaError_t rc_ = (call);                                                          \
        if (rc_ != cudaSuccess) {                                                          \
            printf("not ok %s: %s (line %d)\n", #call, cudaGetErrorString(rc_), __LINE__); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

struct matrix {
    int64_t n, k;
    int     k2;
    std::vector<uint8_t> trellis;
    std::vector<uint16_t> suh, svh;
};

static matrix make(int64_t n, int64_t k, int k2, uint64_t seed)
{
    matrix m;

    m.n = n;
    m.k = k;
    m.k2 = k2;
    m.trellis.resize((size_t)(n * k) / 16 * k2);
    for (size_t i = 0; i + 8 <= m.trellis.size(); i += 8) {
        const uint64_t v = hx_rng_at(seed, i);
        memcpy(&m.trellis[i], &v, 8);
    }
    for (int64_t i = 0; i < k; i++)      /* fp16 of magnitude 0.5 to 2, random sign */
        m.suh.push_back((uint16_t)(0x3800 + (hx_rng_at(seed + 1, i) & 0x87ff)));
    for (int64_t i = 0; i < n; i++)
        m.svh.push_back((uint16_t)(0x2400 + (hx_rng_at(seed + 2, i) & 0x87ff)));
    return m;
}

template <class T> static T *upload(const std::vector<T> &v)
{
    T *p;

    CHECK(cudaMalloc(&p, v.size() * sizeof(T)));
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

static hx_cuda_job job_of(const matrix &m, int rows, const float *x, float *y)
{
    hx_cuda_job j = {};

    j.trellis = upload(m.trellis);
    j.suh = upload(m.suh);
    j.svh = upload(m.svh);
    j.x = x;
    j.y = y;
    j.ldx = j.k = j.k_pad = m.k;
    j.ldy = j.n = j.n_pad = m.n;
    j.rows = rows;
    return j;
}

static void check(hx_dev *cpu, int64_t n, int64_t k, int k2, int rows, int bps, int n_sm)
{
    const matrix m = make(n, k, k2, 100 * n + k2 + rows);
    std::vector<float> x(rows * k), want(rows * n), got(rows * n);
    hx_err err = {};
    hx_mat mat = {};
    hx_matmul_args a = {};

    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)hx_rng_normal(7, i);
    mat.fmt = HX_FMT_EXL3;
    mat.n = mat.n_pad = n;
    mat.k = mat.k_pad = k;
    mat.w = m.trellis.data();
    mat.suh = m.suh.data();
    mat.svh = m.svh.data();
    mat.k2 = k2;
    mat.codebook = HX_CB_MUL1;
    a.y = hx_buf{ want.data(), want.size() * 4 };
    a.x = hx_buf{ x.data(), x.size() * 4 };
    a.w = &mat;
    a.rows = rows;
    a.ldx = k;
    a.ldy = n;
    if (hx_op_matmul(cpu, &a, &err) != 0) {
        printf("not ok cpu: %s\n", err.msg);
        exit(1);
    }
    float *dx = upload(x), *dy = upload(got);
    std::vector<hx_cuda_job> jobs(1, job_of(m, rows, dx, dy));
    hx_cuda_job *dj = upload(jobs);
    hx_cuda_split sp = { bps != 0 ? bps : hx_cuda_exl3_bps(n, k, 1, n_sm), NULL, NULL };
    const int64_t splits = (k / 128 + sp.bps - 1) / sp.bps;
    CHECK(cudaMalloc(&sp.scratch, (size_t)(n / 128 * splits * 16 * 128) * 4));
    CHECK(cudaMalloc(&sp.ticket, (size_t)(n / 128) * 4));
    CHECK(cudaMemset(sp.ticket, 0, (size_t)(n / 128) * 4));
    CHECK(cudaMemset(dy, 0xff, got.size() * 4));
    CHECK(hx_cuda_exl3_rows(dj, 1, rows, k2, n, k, sp, 0));
    CHECK(cudaMemcpy(got.data(), dy, got.size() * 4, cudaMemcpyDeviceToHost));
    int64_t bad = 0, first = -1;
    for (size_t i = 0; i < got.size(); i++)
        if (memcmp(&got[i], &want[i], 4) != 0) {
            bad++;
            first = first < 0 ? (int64_t)i : first;
        }
    if (bad != 0)
        printf("not ok exl3 K=%g %ldx%ld rows %d bps %d: %ld of %zu differ, first at %ld: %.9g, cpu %.9g\n",
               k2 / 2.0, (long)k, (long)n, rows, sp.bps, (long)bad, got.size(), (long)first, got[first],
               want[first]);
    else
        printf("ok exl3 K=%g %ldx%ld rows %d bps %d\n", k2 / 2.0, (long)k, (long)n, rows, sp.bps);
    cudaFree(dx);
    cudaFree(dy);
    cudaFree((void *)jobs[0].trellis);
    cudaFree((void *)jobs[0].suh);
    cudaFree((void *)jobs[0].svh);
    cudaFree(dj);
    cudaFree(sp.scratch);
    cudaFree(sp.ticket);
}

/* Median microseconds of one product inside a graph of one call per distinct matrix. */
static void time_one(int64_t n, int64_t k, int k2, int rows, int n_sm, int bps, bool host)
{
    const size_t bytes = (size_t)(n * k) / 16 * k2;
    const int sets = (int)HX_MAX(2, HX_MIN(64, (300u << 20) / bytes));
    std::vector<hx_cuda_job> jobs;
    std::vector<float> x(rows * k, 0.5f);
    float *dx = upload(x), *dy;
    hx_cuda_split sp = { bps != 0 ? bps : hx_cuda_exl3_bps(n, k, 1, n_sm), NULL, NULL };
    const int64_t splits = (k / 128 + sp.bps - 1) / sp.bps;
    const matrix m = make(n, k, k2, 5);
    cudaStream_t st;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t e0, e1;
    std::vector<float> us;

    CHECK(cudaMalloc(&dy, (size_t)rows * n * 4));
    for (int i = 0; i < sets; i++) {
        jobs.push_back(job_of(m, rows, dx, dy));
        if (host) {
            void *h;
            CHECK(cudaHostAlloc(&h, bytes, cudaHostAllocMapped));
            memcpy(h, m.trellis.data(), bytes);
            cudaFree((void *)jobs.back().trellis);
            jobs.back().trellis = h;
        }
    }
    hx_cuda_job *dj = upload(jobs);
    CHECK(cudaMalloc(&sp.scratch, (size_t)(n / 128 * splits * 16 * 128) * 4));
    CHECK(cudaMalloc(&sp.ticket, (size_t)(n / 128) * 4));
    CHECK(cudaMemset(sp.ticket, 0, (size_t)(n / 128) * 4));
    CHECK(cudaStreamCreate(&st));
    CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < sets; i++)
        CHECK(hx_cuda_exl3_rows(dj + i, 1, rows, k2, n, k, sp, st));
    CHECK(cudaStreamEndCapture(st, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaEventCreate(&e0));
    CHECK(cudaEventCreate(&e1));
    for (int rep = 0; rep < 9; rep++) {
        float ms;
        CHECK(cudaEventRecord(e0, st));
        CHECK(cudaGraphLaunch(exec, st));
        CHECK(cudaEventRecord(e1, st));
        CHECK(cudaEventSynchronize(e1));
        CHECK(cudaEventElapsedTime(&ms, e0, e1));
        us.push_back(ms * 1000 / sets);
    }
    for (size_t i = 0; i < us.size(); i++)
        for (size_t l = i + 1; l < us.size(); l++)
            if (us[l] < us[i])
                std::swap(us[l], us[i]);
    printf("time %s K=%g %5ldx%-6ld rows %2d bps %d: %7.2f us %7.0f GB/s\n", host ? "host" : "vram", k2 / 2.0,
           (long)k, (long)n, rows, sp.bps, us[4], bytes / us[4] / 1e3);
    for (auto &j : jobs) {
        if (host)
            cudaFreeHost((void *)j.trellis);
        else
            cudaFree((void *)j.trellis);
        cudaFree((void *)j.suh);
        cudaFree((void *)j.svh);
    }
    cudaFree(dj);
    cudaFree(dx);
    cudaFree(dy);
    cudaFree(sp.scratch);
    cudaFree(sp.ticket);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(st);
}

int main(void)
{
    static const int rates[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };
    static const int row_counts[] = { 1, 2, 7, 8, 9, 16 };
    hx_dev_opt opt = {};
    hx_dev *cpu;
    hx_err err = {};
    cudaDeviceProp prop;

    CHECK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors\n", prop.name, prop.multiProcessorCount);
    opt.name = "cpu";
    opt.limits = hx_dev_limits{ 64, 8192, 8192, 1, 1, 1, 1 };
    if (hx_dev_open(&cpu, &opt, &err) != 0) {
        printf("not ok open: %s\n", err.msg);
        return 1;
    }
    printf("against %s\n", cpu->text);
    for (int k2 : rates)
        for (int rows : row_counts)
            check(cpu, 256, 1536, k2, rows, 0, prop.multiProcessorCount);
    for (int bps : { 1, 2, 4, 8 })
        check(cpu, 2048, 4096, 6, 3, bps, prop.multiProcessorCount);
    for (int k2 : { 6, 8, 12 })
        for (auto s : { std::pair<int64_t, int64_t>{ 2048, 4096 }, { 4096, 2048 }, { 8192, 4096 }, { 4096, 8192 },
                        { 24576, 4096 }, { 154880, 4096 } })
            for (int rows : { 1, 4, 8, 16 })
                time_one(s.first, s.second, k2, rows, prop.multiProcessorCount, 0, false);
    for (int bps : { 1, 2, 4, 8 })
        for (auto s : { std::pair<int64_t, int64_t>{ 2048, 4096 }, { 4096, 2048 }, { 24576, 4096 } })
            time_one(s.first, s.second, 6, 1, prop.multiProcessorCount, bps, false);
    for (int k2 : { 6, 8 })
        for (auto s : { std::pair<int64_t, int64_t>{ 2048, 4096 }, { 4096, 2048 }, { 24576, 4096 } })
            for (int rows : { 1, 8 })
                time_one(s.first, s.second, k2, rows, prop.multiProcessorCount, 0, true);
    hx_dev_close(cpu);
    return 0;
}
