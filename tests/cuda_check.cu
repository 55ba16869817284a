/* cuda_check.cu - the CUDA products against the CPU's canonical arithmetic, bit for bit,
 * and their time. Built and run by tests/gpu.sh on a machine with a GPU. Prints "ok NAME"
 * or "not ok NAME". Arguments: any of check, moe, time, host; none: all. */
#include <stdio.h>
#include <stdlib.h>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "dev/cuda.h"

#define CHECK(call)                                                                      \
    do {                                                                                 \
        cudaError_t rc_ = (call);                                                        \
        if (rc_ != cudaSuccess) {                                                        \
            printf("not ok %s: %s (line %d)\n", #call, cudaGetErrorString(rc_),          \
                   __LINE__);                                                            \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

static const char *cb_name[] = { "3inst", "mcg", "mul1" };
static hx_cuda_gpu gpu;

/* ---- data ------------------------------------------------------------------ */

template <class T> static T *upload(const std::vector<T> &v)
{
    T *p;

    CHECK(cudaMalloc(&p, v.size() * sizeof(T) + 256));
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

struct matrix {
    hx_mat mat = {};
    std::vector<uint8_t> trellis;
    std::vector<uint16_t> suh, svh, bias;

    matrix(int64_t n, int64_t k, int k2, hx_codebook cb, uint64_t seed,
           bool with_bias = false)
    {
        const int64_t n_pad = (n + 127) / 128 * 128, k_pad = (k + 127) / 128 * 128;

        trellis.resize((size_t)(n_pad * k_pad) / 16 * k2);
        for (size_t i = 0; i + 8 <= trellis.size(); i += 8) {
            const uint64_t v = hx_rng_at(seed, i);
            memcpy(&trellis[i], &v, 8);
        }
        for (int64_t i = 0; i < k_pad; i++) /* fp16 of magnitude 0.5 to 2, random sign */
            suh.push_back((uint16_t)(0x3800 + (hx_rng_at(seed + 1, i) & 0x87ff)));
        for (int64_t i = 0; i < n_pad; i++)
            svh.push_back((uint16_t)(0x2400 + (hx_rng_at(seed + 2, i) & 0x87ff)));
        for (int64_t i = 0; with_bias && i < n; i++)
            bias.push_back((uint16_t)(0x3000 + (hx_rng_at(seed + 3, i) & 0x87ff)));
        mat.fmt = HX_FMT_EXL3;
        mat.n = n;
        mat.k = k;
        mat.n_pad = n_pad;
        mat.k_pad = k_pad;
        mat.k2 = k2;
        mat.codebook = cb;
        point();
    }
    void point()
    {
        mat.w = trellis.data();
        mat.suh = suh.data();
        mat.svh = svh.data();
        mat.bias = bias.empty() ? NULL : bias.data();
    }
};

static hx_cuda_work work_of(int64_t n_ticket, size_t bytes)
{
    hx_cuda_work w = {};

    w.gpu = gpu;
    w.overlap = gpu.overlap;
    w.n_ticket = n_ticket;
    w.bytes = bytes;
    CHECK(cudaMalloc(&w.ticket, n_ticket * sizeof(int)));
    CHECK(cudaMemset(w.ticket, 0, n_ticket * sizeof(int)));
    CHECK(cudaMalloc(&w.p, bytes));
    CHECK(cudaMemset(w.p, 0xff, bytes));
    return w;
}

/* Enough for any number of rows. */
static size_t area_bytes(hx_cuda_shape s)
{
    size_t most = 0;

    for (int rows : { 1, 4, 8, 16 }) {
        s.rows = rows;
        most = std::max(most, hx_cuda_area_bytes(&s, &gpu));
    }
    return most;
}

static void drop(hx_cuda_work *w)
{
    cudaFree(w->ticket);
    cudaFree(w->p);
}

static bool same(const char *name, const std::vector<float> &got,
                 const std::vector<float> &want)
{
    int64_t bad = 0, first = 0;

    for (size_t i = got.size(); i-- > 0;)
        if (memcmp(&got[i], &want[i], 4) != 0) {
            bad++;
            first = (int64_t)i;
        }
    if (bad != 0)
        printf("not ok %s: %ld of %zu differ, first at %ld: %.9g, cpu %.9g\n", name,
               (long)bad, got.size(), (long)first, got[first], want[first]);
    return bad == 0;
}

/* Median microseconds of one of the calls that add() puts into a graph. */
static double time_graph(int calls, const std::function<void(int, cudaStream_t)> &add)
{
    cudaStream_t st;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t e0, e1;
    std::vector<float> us;

    CHECK(cudaStreamCreate(&st));
    CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; i++)
        add(i, st);
    CHECK(cudaStreamEndCapture(st, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaEventCreate(&e0));
    CHECK(cudaEventCreate(&e1));
    for (int rep = 0; rep < 7; rep++) {
        float ms;
        CHECK(cudaEventRecord(e0, st));
        CHECK(cudaGraphLaunch(exec, st));
        CHECK(cudaEventRecord(e1, st));
        CHECK(cudaEventSynchronize(e1));
        CHECK(cudaEventElapsedTime(&ms, e0, e1));
        us.push_back(ms * 1000 / calls);
    }
    std::sort(us.begin(), us.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(e0);
    cudaEventDestroy(e1);
    cudaStreamDestroy(st);
    return us[3];
}

/* ---- one matrix -------------------------------------------------------------- */

static void check(hx_dev *cpu, int64_t n, int64_t k, int k2, hx_codebook cb,
                  std::vector<int> row_counts, int quads, int bps, bool with_bias = false)
{
    matrix m(n, k, k2, cb, 100 * n + k2, with_bias);
    hx_cuda_job j = {};
    hx_cuda_shape s = {};
    std::string bad;

    j.trellis = upload(m.trellis);
    j.suh = upload(m.suh);
    j.svh = upload(m.svh);
    j.bias = with_bias ? upload(m.bias) : NULL;
    j.n = j.ldy = n;
    j.k = j.ldx = k;
    s.n_pad = m.mat.n_pad;
    s.k_pad = m.mat.k_pad;
    s.k2 = k2;
    s.slots = HX_CUDA_JOB_ROWS;
    s.n_job = 1;
    s.codebook = cb;
    s.quads = quads;
    s.bps = bps;
    s.rows = 16;
    hx_cuda_work w = work_of(s.n_pad / 128, area_bytes(s));
    for (int rows : row_counts) {
        std::vector<float> x(rows * k), want(rows * n), got(rows * n);
        hx_err err = {};
        hx_matmul_args a = {};
        char name[128];

        for (size_t i = 0; i < x.size(); i++)
            x[i] = (float)hx_rng_normal(7 + rows, i);
        if (rows > 3)
            for (int64_t i = 0; i < k; i++)
                x[2 * k + i] = 0; /* a row of zeros */
        a.y = hx_buf { want.data(), want.size() * 4 };
        a.x = hx_buf { x.data(), x.size() * 4 };
        a.w = &m.mat;
        a.rows = rows;
        a.ldx = k;
        a.ldy = n;
        if (hx_op_matmul(cpu, &a, &err) != 0) {
            printf("not ok cpu: %s\n", err.msg);
            exit(1);
        }
        float *dx = upload(x), *dy = upload(got);
        CHECK(cudaMemset(dy, 0xff, got.size() * 4));
        j.x = dx;
        j.y = dy;
        j.rows = rows;
        CHECK(hx_cuda_rows(&j, &s, &w, 0));
        CHECK(cudaMemcpy(got.data(), dy, got.size() * 4, cudaMemcpyDeviceToHost));
        snprintf(name, sizeof(name), "exl3 %s K=%g %ldx%ld rows %d cut %dx%d",
                 cb_name[cb], k2 / 2.0, (long)k, (long)n, rows, quads, bps);
        if (same(name, got, want))
            printf("ok %s\n", name);
        cudaFree(dx);
        cudaFree(dy);
    }
    drop(&w);
    cudaFree((void *)j.trellis);
    cudaFree((void *)j.suh);
    cudaFree((void *)j.svh);
    cudaFree((void *)j.bias);
}

/* Random trellis words on the device (every word is a valid code). */
static uint8_t *random_trellis(size_t bytes)
{
    static uint8_t *seed;
    const size_t chunk = 8u << 20;
    uint8_t *p;

    if (seed == NULL) {
        std::vector<uint64_t> v(chunk / 8);
        for (size_t i = 0; i < v.size(); i++)
            v[i] = hx_rng_at(99, i);
        seed = (uint8_t *)upload(v);
    }
    CHECK(cudaMalloc(&p, bytes));
    for (size_t at = 0; at < bytes; at += chunk)
        CHECK(cudaMemcpy(p + at, seed, std::min(chunk, bytes - at),
                         cudaMemcpyDeviceToDevice));
    return p;
}

static double time_one(int64_t n, int64_t k, int k2, hx_codebook cb, int rows, int quads,
                       int bps, bool host)
{
    const size_t bytes = (size_t)(n * k) / 16 * k2;
    const int sets = (int)HX_MAX(2, HX_MIN(64, (300u << 20) / bytes));
    std::vector<float> x(rows * k);
    std::vector<uint16_t> scale(HX_MAX(n, k), 0x3c00);
    std::vector<hx_cuda_job> jobs(sets);
    hx_cuda_shape s = {};
    uint8_t *dev = random_trellis(bytes * sets), *pinned = NULL;
    uint16_t *ds = upload(scale);
    float *dy;

    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)hx_rng_normal(7, i);
    float *dx = upload(x);
    CHECK(cudaMalloc(&dy, (size_t)rows * n * 4));
    if (host) {
        CHECK(cudaHostAlloc(&pinned, bytes * sets, cudaHostAllocMapped));
        CHECK(cudaMemcpy(pinned, dev, bytes * sets, cudaMemcpyDeviceToHost));
    }
    for (int i = 0; i < sets; i++) {
        hx_cuda_job j = {};
        j.trellis = (host ? pinned : dev) + i * bytes;
        j.suh = j.svh = ds;
        j.x = dx;
        j.y = dy;
        j.n = j.ldy = n;
        j.k = j.ldx = k;
        j.rows = rows;
        jobs[i] = j;
    }
    s.n_pad = n;
    s.k_pad = k;
    s.k2 = k2;
    s.codebook = cb;
    s.slots = HX_CUDA_JOB_ROWS;
    s.n_job = 1;
    s.quads = quads;
    s.bps = bps;
    hx_cuda_work w = work_of(n / 128, area_bytes(s));
    const double us = time_graph(
        sets, [&](int i, cudaStream_t st) { CHECK(hx_cuda_rows(&jobs[i], &s, &w, st)); });
    drop(&w);
    cudaFree(dev);
    cudaFree(ds);
    cudaFree(dx);
    cudaFree(dy);
    cudaFreeHost(pinned);
    return us;
}

/* ---- experts ---------------------------------------------------------------- */

static void check_moe(hx_dev *cpu, int64_t d, int64_t f, int rows, int active,
                      int n_expert, int k2_gate, int k2_up, int k2_down, hx_codebook cb,
                      bool host)
{
    std::vector<matrix> mats;
    std::vector<hx_expert> experts(n_expert);
    std::vector<hx_cuda_expert> on(n_expert);
    std::vector<float> x(rows * d), want(rows * active * d, -7.0f), got(want);
    std::vector<int32_t> id(rows * active);
    std::vector<void *> pinned;
    hx_err err = {};
    hx_moe_args a = {};
    hx_cuda_moe m = {};
    char name[128];

    mats.reserve(3 * n_expert);
    for (int e = 0; e < n_expert; e++) {
        mats.emplace_back(f, d, k2_gate, cb, 1000 + 10 * e);
        mats.emplace_back(f, d, k2_up, cb, 2000 + 10 * e);
        mats.emplace_back(d, f, k2_down, cb, 3000 + 10 * e);
        hx_cuda_mat *to[3] = { &on[e].gate, &on[e].up, &on[e].down };
        for (int i = 0; i < 3; i++) {
            matrix &mm = mats[3 * e + i];
            mm.point();
            to[i]->suh = upload(mm.suh);
            to[i]->svh = upload(mm.svh);
            if (host) {
                void *h;
                CHECK(cudaHostAlloc(&h, mm.trellis.size(), cudaHostAllocMapped));
                memcpy(h, mm.trellis.data(), mm.trellis.size());
                to[i]->trellis = h;
                pinned.push_back(h);
            } else {
                to[i]->trellis = upload(mm.trellis);
            }
        }
        experts[e].gate = mats[3 * e].mat;
        experts[e].up = mats[3 * e + 1].mat;
        experts[e].down = mats[3 * e + 2].mat;
    }
    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)hx_rng_normal(17, i);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < active; p++)
            id[r * active + p] = (int32_t)((hx_rng_at(23, r) + p * 3) % n_expert);
    id[id.size() / 2] = -1;
    a.y = hx_buf { want.data(), want.size() * 4 };
    a.x = hx_buf { x.data(), x.size() * 4 };
    a.id = hx_buf { id.data(), id.size() * 4 };
    a.expert = experts.data();
    a.n_expert = n_expert;
    a.rows = rows;
    a.active = active;
    a.limit = 10.0f;
    if (hx_op_moe(cpu, &a, &err) != 0) {
        printf("not ok cpu moe: %s\n", err.msg);
        exit(1);
    }
    m.y = upload(got);
    m.x = upload(x);
    m.id = upload(id);
    m.expert = upload(on);
    m.rows = rows;
    m.active = active;
    m.d = m.d_pad = d;
    m.f = m.f_pad = f;
    m.k2_gate = k2_gate;
    m.k2_up = k2_up;
    m.k2_down = k2_down;
    m.codebook = cb;
    m.limit = 10.0f;
    hx_cuda_work w =
        work_of(2 * rows * active * HX_MAX(d, f) / 128, hx_cuda_moe_bytes(&m, &gpu));
    snprintf(name, sizeof(name), "moe %s K=%g/%g/%g %ld-%ld rows %d x %d of %d%s",
             cb_name[cb], k2_gate / 2.0, k2_up / 2.0, k2_down / 2.0, (long)d, (long)f,
             rows, active, n_expert, host ? " host" : "");
    for (int again = 0; again < 2; again++) {
        CHECK(hx_cuda_experts(&m, &w, 0));
        CHECK(cudaMemcpy(got.data(), m.y, got.size() * 4, cudaMemcpyDeviceToHost));
        if (same(name, got, want) && again)
            printf("ok %s\n", name);
    }
    drop(&w);
    for (void *h : pinned)
        cudaFreeHost(h);
}

/* rows of 8 picks of 288 experts, other experts in every call. */
static void time_moe(int k2, hx_codebook cb, int rows, int quads, int bps_in, int bps_out,
                     bool host)
{
    const int64_t d = 4096, f = 2048;
    const int n_expert = host ? 96 : 288, active = 8, calls = 8;
    const size_t part = (size_t)(d * f) / 16 * k2;
    std::vector<hx_cuda_expert> on(n_expert);
    std::vector<uint16_t> scale(d, 0x3c00);
    std::vector<float> x(rows * d);
    uint8_t *dev = random_trellis(3 * part * n_expert), *pinned = NULL, *from = dev;
    hx_cuda_moe m = {};
    double distinct = 0;

    if (host) {
        CHECK(cudaHostAlloc(&pinned, 3 * part * n_expert, cudaHostAllocMapped));
        CHECK(cudaMemcpy(pinned, dev, 3 * part * n_expert, cudaMemcpyDeviceToHost));
        from = pinned;
    }
    uint16_t *ds = upload(scale);
    for (int e = 0; e < n_expert; e++) {
        on[e].gate = hx_cuda_mat { from + 3 * e * part, ds, ds };
        on[e].up = hx_cuda_mat { from + (3 * e + 1) * part, ds, ds };
        on[e].down = hx_cuda_mat { from + (3 * e + 2) * part, ds, ds };
    }
    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)hx_rng_normal(17, i);
    m.x = upload(x);
    m.expert = upload(on);
    CHECK(cudaMalloc(&m.y, (size_t)rows * active * d * 4));
    m.rows = rows;
    m.active = active;
    m.d = m.d_pad = d;
    m.f = m.f_pad = f;
    m.k2_gate = m.k2_up = m.k2_down = k2;
    m.codebook = cb;
    m.limit = 10.0f;
    m.quads = quads;
    m.bps_in = bps_in;
    m.bps_out = bps_out;
    hx_cuda_work w = work_of(2 * rows * active * d / 128, hx_cuda_moe_bytes(&m, &gpu));
    std::vector<int32_t *> ids;
    for (int c = 0; c < calls; c++) {
        std::vector<int32_t> id;
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < active;) {
                const int32_t e =
                    (int32_t)(hx_rng_at(31 + c,
                                        id.size() + 1000 * r + 77 * p + distinct * 13) %
                              n_expert);
                bool seen = false;
                for (int o = 0; o < p; o++)
                    seen = seen || id[r * active + o] == e;
                distinct += seen ? 0.01 : 0;
                if (!seen) {
                    id.push_back(e);
                    p++;
                }
            }
        ids.push_back(upload(id));
        std::sort(id.begin(), id.end());
        distinct = (double)(long)distinct +
                   (double)(std::unique(id.begin(), id.end()) - id.begin());
    }
    const double us = time_graph(calls, [&](int i, cudaStream_t st) {
        hx_cuda_moe c = m;
        c.id = ids[i];
        CHECK(hx_cuda_experts(&c, &w, st));
    });
    const double mb = distinct / calls * 3 * part / 1e6;
    printf("time moe %s %s K=%g %2d tokens cut %dx%d %dx%d: %8.1f us  %5.1f experts "
           "%6.1f GB/s\n",
           cb_name[cb], host ? "host" : "vram", k2 / 2.0, rows, quads, bps_in, quads,
           bps_out, us, distinct / calls, mb / us * 1e3);
    drop(&w);
    cudaFree(dev);
    cudaFreeHost(pinned);
    fflush(stdout);
}

/* ---- main -------------------------------------------------------------------- */

typedef std::pair<int64_t, int64_t> shape; /* inputs, outputs */

static void checks(hx_dev *cpu)
{
    for (int k2 : { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 })
        for (hx_codebook cb : { HX_CB_MUL1, HX_CB_MCG, HX_CB_3INST })
            if (cb == HX_CB_MUL1 || k2 % 2 == 0)
                check(cpu, 256, 1536, k2, cb, { 1, 2, 7, 8, 9, 16 }, 0, 0);
    for (int quads : { 1, 2, 4 })
        for (int bps : { 1, 2, 4 }) {
            for (hx_codebook cb : { HX_CB_MUL1, HX_CB_MCG })
                check(cpu, 2048, 4096, 6, cb, { 1, 6, 11 }, quads, bps);
            check(cpu, 1000, 11 * 128 - 28, 6, HX_CB_MUL1, { 1, 5, 16 }, quads, bps,
                  true);
        }
    for (int k2 : { 2, 4, 6, 8, 10, 12, 14, 16 })
        for (int bps : { 1, 2, 4 })
            check(cpu, 380, 19 * 128 - 4, k2, HX_CB_MUL1, { 1 }, 8, bps, true);
    check(cpu, 300 * 128 - 28, 9 * 128 - 100, 6, HX_CB_MUL1, { 6, 16 }, 0, 0,
          true); /* wide */
    check(cpu, 128, 128, 8, HX_CB_MUL1, { 1, 16 }, 0, 0, true);
    check(cpu, 128, 12288, 4, HX_CB_MUL1, { 1, 16 }, 1, 1);
}

static void checks_moe(hx_dev *cpu)
{
    check_moe(cpu, 512, 256, 1, 4, 8, 6, 6, 6, HX_CB_MUL1, false);
    check_moe(cpu, 512, 256, 16, 8, 24, 6, 6, 8, HX_CB_MUL1, false);
    check_moe(cpu, 512, 256, 16, 4, 4, 6, 8, 5, HX_CB_MUL1, false);
    check_moe(cpu, 512, 256, 16, 8, 8, 4, 4, 7, HX_CB_MUL1, false);
    check_moe(cpu, 4096, 2048, 9, 8, 16, 6, 12, 12, HX_CB_MUL1, false);
    check_moe(cpu, 384, 640, 7, 2, 5, 8, 8, 8, HX_CB_MCG, true);
    check_moe(cpu, 4096, 2048, 3, 8, 16, 6, 6, 6, HX_CB_MUL1, false);
    check_moe(cpu, 4096, 8192, 9, 1, 1, 6, 6, 6, HX_CB_MUL1,
              false); /* one job of many rows */
}

typedef std::pair<int, int> cut; /* quads, 128-input blocks of a quad */
static const cut cuts[] = { { 1, 1 }, { 1, 2 }, { 1, 4 }, { 2, 1 }, { 2, 2 },
                            { 2, 4 }, { 4, 1 }, { 4, 2 }, { 4, 4 }, { 0, 0 } };

static void times(void)
{
    printf("cuts: 1x1 1x2 1x4 2x1 2x2 2x4 4x1 4x2 4x4 auto\n");

    const shape shapes[] = { { 4096, 2048 }, { 2048, 4096 },  { 4096, 8192 },
                             { 8192, 4096 }, { 4096, 24576 }, { 4096, 154880 } };

    for (int k2 : { 6, 8, 12 })
        for (shape s : shapes) {
            for (int rows : { 1, 2, 4, 8, 16 }) {
                printf("time vram K=%g %5ldx%-6ld rows %2d us:", k2 / 2.0, (long)s.first,
                       (long)s.second, rows);
                for (cut c : cuts)
                    printf(" %7.2f", time_one(s.second, s.first, k2, HX_CB_MUL1, rows,
                                              c.first, c.second, false));
                printf("\n");
                fflush(stdout);
            }
        }
    for (shape s : shapes)
        for (int rows : { 1, 8 }) {
            printf("time vram mcg K=4 %5ldx%-6ld rows %2d us:", (long)s.first,
                   (long)s.second, rows);
            for (cut c : cuts)
                printf(" %7.2f", time_one(s.second, s.first, 8, HX_CB_MCG, rows, c.first,
                                          c.second, false));
            printf("\n");
        }
}

static void times_host(void)
{
    for (int k2 : { 6, 8 })
        for (shape s : { shape { 4096, 2048 }, shape { 2048, 4096 }, shape { 4096, 8192 },
                         shape { 8192, 4096 }, shape { 4096, 24576 } })
            for (int rows : { 1, 8 }) {
                printf("time host K=%g %5ldx%-6ld rows %2d: %5.1f GB/s\n", k2 / 2.0,
                       (long)s.first, (long)s.second, rows,
                       s.first * s.second / 16 * k2 / 1e3 /
                           time_one(s.second, s.first, k2, HX_CB_MUL1, rows, 0, 0, true));
            }
}

int main(int argc, char **argv)
{
    hx_dev_opt opt = {};
    hx_dev *cpu;
    hx_err err = {};
    cudaDeviceProp prop;
    const auto wants = [&](const char *what) {
        return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char *a) {
                   return strcmp(a, what) == 0;
               });
    };

    CHECK(cudaGetDeviceProperties(&prop, 0));
    CHECK(hx_cuda_gpu_read(&gpu));
    printf("%s, %d multiprocessors%s\n", prop.name, gpu.n_sm,
           gpu.hopper ? ", code for Hopper" : "");
    opt.name = "cpu";
    opt.limits = hx_dev_limits { 64, 16384, 16384, 8, 4096, 1, 1 };
    if (hx_dev_open(&cpu, &opt, &err) != 0) {
        printf("not ok open: %s\n", err.msg);
        return 1;
    }
    printf("against %s\n", cpu->text);
    if (wants("check"))
        checks(cpu);
    if (wants("moe"))
        checks_moe(cpu);
    if (wants("time")) {
        times();
        for (int rows : { 1, 2, 4, 8, 16 })
            for (auto c : { std::vector<int> { 0, 0, 0 },
                            { 1, 4, 2 },
                            { 1, 2, 2 },
                            { 2, 2, 2 },
                            { 4, 1, 1 },
                            { 2, 2, 1 } })
                time_moe(6, HX_CB_MUL1, rows, c[0], c[1], c[2], false);
        for (int rows : { 1, 8, 16 })
            time_moe(8, HX_CB_MCG, rows, 0, 0, 0, false);
    }
    if (wants("host")) {
        times_host();
        for (int rows : { 1, 8 })
            time_moe(6, HX_CB_MUL1, rows, 0, 0, 0, true);
    }
    hx_dev_close(cpu);
    return 0;
}
