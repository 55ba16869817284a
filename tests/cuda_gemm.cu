/* cuda_gemm.cu - the CUDA products with many rows against the double reference, their bits
 * in calls of other sizes, and their time. Built by tests/gpu.sh, run on a machine with a
 * GPU. Prints "ok NAME" or "not ok NAME". Arguments: any of check, experts, few, peak, time,
 * moe, none: all; numbers: time only calls of so many rows; KxN: few and time only such. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "dev/cuda.h"
#include "dev/cuda_tensor.h"

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

/* ---- data -------------------------------------------------------------------- */

template <class T> static T *upload(const std::vector<T> &v)
{
    T *p;

    CHECK(cudaMalloc(&p, v.size() * sizeof(T) + 256));
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

/* A matrix of any format on both sides, and its values. */
struct matrix {
    hx_mat host = {}, dev = {};
    std::vector<uint8_t> w;
    std::vector<uint16_t> suh, svh, bias;
    std::vector<float> scale, value;

    matrix(hx_fmt fmt, int64_t n, int64_t k, int k2, hx_codebook cb, uint64_t seed,
           bool with_bias)
    {
        const int64_t n_pad = (n + 127) / 128 * 128, k_pad = (k + 127) / 128 * 128;
        const int each = fmt == HX_FMT_F32 ? 4 : fmt == HX_FMT_FP8 ? 1 : 2;

        host.fmt = fmt;
        host.n = n;
        host.k = k;
        if (fmt == HX_FMT_EXL3) {
            w.resize((size_t)(n_pad * k_pad) / 16 * k2);
            for (size_t i = 0; i + 8 <= w.size(); i += 8) {
                const uint64_t v = hx_rng_at(seed, i);
                memcpy(&w[i], &v, 8);
            }
            for (int64_t i = 0; i < k_pad; i++)
                suh.push_back((uint16_t)(0x3800 + (hx_rng_at(seed + 1, i) & 0x87ff)));
            for (int64_t i = 0; i < n_pad; i++)
                svh.push_back((uint16_t)(0x2400 + (hx_rng_at(seed + 2, i) & 0x87ff)));
            host.n_pad = n_pad;
            host.k_pad = k_pad;
            host.k2 = k2;
            host.codebook = cb;
        } else {
            w.resize((size_t)(n * k * each));
            for (int64_t i = 0; i < n * k; i++) {
                const float v = 0.02f * (float)hx_rng_normal(seed, i);
                const uint16_t h = fmt == HX_FMT_F16 ? hx_f16_from(v) : hx_bf16_from(v);
                const uint8_t b = (uint8_t)(hx_rng_at(seed, i) % 0x78 |
                                            (hx_rng_at(seed, i) >> 32 & 0x80));

                memcpy(&w[(size_t)(i * each)],
                       fmt == HX_FMT_F32   ? (const void *)&v
                       : fmt == HX_FMT_FP8 ? (const void *)&b
                                           : (const void *)&h,
                       (size_t)each);
            }
            host.block_n = host.block_k = 128;
            for (int64_t i = 0; i < ((n + 127) / 128) * ((k + 127) / 128); i++)
                scale.push_back((float)(1e-4 * (1 + hx_rng_unit(seed + 4, i))));
        }
        for (int64_t i = 0; with_bias && i < n; i++)
            bias.push_back((uint16_t)(0x3000 + (hx_rng_at(seed + 3, i) & 0x87ff)));
        dev = host;
        dev.w = upload(w);
        dev.scale = upload(scale);
        dev.suh = upload(suh);
        dev.svh = upload(svh);
        dev.bias = with_bias ? upload(bias) : NULL;
        host.w = w.data();
        host.scale = scale.data();
        host.suh = suh.data();
        host.svh = svh.data();
        host.bias = with_bias ? bias.data() : NULL;
        value.resize((size_t)(n * k));
        hx_err err = {};
        if (hx_mat_expand(&host, value.data(), &err) != 0) {
            printf("not ok expand: %s\n", err.msg);
            exit(1);
        }
    }
    void drop()
    {
        cudaFree((void *)dev.w);
        cudaFree((void *)dev.scale);
        cudaFree((void *)dev.suh);
        cudaFree((void *)dev.svh);
        cudaFree((void *)dev.bias);
    }
    /* W x (+ bias) in double. */
    std::vector<double> times(const double *x) const
    {
        std::vector<double> y((size_t)host.n);

        for (int64_t o = 0; o < host.n; o++) {
            double sum = bias.empty() ? 0 : hx_f16_to(bias[(size_t)o]);

            for (int64_t i = 0; i < host.k; i++)
                sum += (double)value[(size_t)(o * host.k + i)] * x[i];
            y[(size_t)o] = sum;
        }
        return y;
    }
};

static hx_cuda_work work_of(size_t bytes)
{
    hx_cuda_work w = {};

    CHECK(hx_cuda_gpu_read(&w.gpu));
    w.overlap = w.gpu.overlap;
    w.bytes = bytes;
    w.n_ticket = 256;
    CHECK(cudaMalloc(&w.ticket, w.n_ticket * sizeof(int)));
    CHECK(cudaMemset(w.ticket, 0, w.n_ticket * sizeof(int)));
    CHECK(cudaMalloc(&w.p, bytes));
    CHECK(cudaMemset(w.p, 0xff, bytes));
    return w;
}

static double distance(const float *got, const std::vector<double> &want)
{
    double d = 0, s = 0;

    for (size_t i = 0; i < want.size(); i++) {
        d += (got[i] - want[i]) * (got[i] - want[i]);
        s += want[i] * want[i];
    }
    return sqrt(d / s);
}

static const double MOST = 7e-4; /* inputs as halves: 2.8e-4; twice in an expert */

static void verdict(bool ok, const std::string &name, double worst)
{
    printf("%s %s (%.2g)\n", ok ? "ok" : "not ok", name.c_str(), worst);
    fflush(stdout);
}

/* ---- one matrix ----------------------------------------------------------------- */

static void check(hx_fmt fmt, int64_t n, int64_t k, int k2, hx_codebook cb,
                  bool with_bias, size_t work_bytes = 0)
{
    matrix m(fmt, n, k, k2, cb, 100 * n + k2, with_bias);
    const int rows = 333;
    const int64_t ldx = k + 4, ldy = n + 4;
    std::vector<float> x((size_t)(rows * ldx)), all((size_t)(rows * ldy)), got(all);
    hx_cuda_many a = {};
    char name[128];
    double worst = 0;
    bool ok = true;

    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)(hx_rng_normal(7, i) * exp(hx_rng_normal(8, i / (size_t)ldx) * 3));
    for (int64_t i = 0; i < k; i++)
        x[(size_t)(2 * ldx + i)] = 0; /* a row of zeros */
    a.w = &m.dev;
    a.ldx = ldx;
    a.ldy = ldy;
    float *dx = upload(x), *dy = upload(all);
    hx_cuda_work w = work_of(
        work_bytes > 0 ? work_bytes
                       : hx_cuda_many_bytes(&m.dev, rows) +
                             (size_t)((n + 127) / 128 * 128 * (k + 128) * 2 + 4096));
    snprintf(name, sizeof(name), "%s%s%s K=%g %ldx%ld%s", hx_fmt_name(fmt),
             fmt == HX_FMT_EXL3 ? " " : "", fmt == HX_FMT_EXL3 ? cb_name[cb] : "",
             k2 / 2.0, (long)k, (long)n, with_bias ? " bias" : "");
    /* r0: the same row elsewhere in a call must have the same bits */
    struct {
        int r0, n, block, once;
    } calls[] = { { 0, rows, 256, -1 }, { 0, rows, 128, -1 }, { 0, rows, 64, -1 },
                  { 0, rows, 0, -1 },   { 0, rows, 256, 1 },  { 0, rows, 128, 1 },
                  { 0, rows, 64, 1 },   { 0, rows, 0, 0 },    { 0, 1, 0, 0 },
                  { 0, 20, 0, 0 },      { 17, 1, 0, 0 },      { 5, 65, 128, -1 },
                  { 3, 144, 256, -1 },  { 100, 200, 256, 1 }, { 0, 64, 0, 0 },
                  { 70, 37, 0, 0 } };
    for (auto c : calls) {
        CHECK(cudaMemset(dy, 0xff, all.size() * 4));
        a.x = dx + c.r0 * ldx;
        a.y = dy + c.r0 * ldy;
        a.rows = c.n;
        a.block_rows = c.block;
        a.once = c.once;
        CHECK(hx_cuda_rows_many(&a, &w, 0));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(got.data(), dy, got.size() * 4, cudaMemcpyDeviceToHost));
        if (c.n == rows && c.block == 256 && c.once < 0)
            all = got;
        for (int r = 0; r < rows && ok; r++) {
            const float *mine = &got[(size_t)(r * ldy)];
            const bool in = r >= c.r0 && r < c.r0 + c.n;
            std::vector<float> untouched((size_t)ldy);

            memset(untouched.data(), 0xff, (size_t)ldy * 4);
            if (memcmp(mine, in ? &all[(size_t)(r * ldy)] : untouched.data(),
                       (size_t)(in ? n : ldy) * 4) != 0 ||
                memcmp(mine + n, untouched.data(), (size_t)(ldy - n) * 4) != 0) {
                printf("not ok %s: row %d differs in a call of %d from %d, block %d, "
                       "once %d\n",
                       name, r, c.n, c.r0, c.block, c.once);
                ok = false;
            }
        }
    }
    for (int r : { 0, 1, 2, 63, 64, 127, 200, 255, 256, 332 }) {
        std::vector<double> in((size_t)k);

        for (int64_t i = 0; i < k; i++)
            in[(size_t)i] = x[(size_t)(r * ldx + i)];
        const auto want = m.times(in.data());
        const float *mine = &all[(size_t)(r * ldy)];
        double e = r == 2 && !with_bias ? 0 : distance(mine, want);

        for (int64_t o = 0; o < n; o++)
            if (!std::isfinite(mine[o]) || (r == 2 && !with_bias && mine[o] != 0))
                e = 9;
        worst = std::max(worst, e);
    }
    verdict(ok && worst < MOST, name, worst);
    cudaFree(dx);
    cudaFree(dy);
    cudaFree(w.p);
    m.drop();
}

/* So many rows that a thread block has several pieces: the bits of weights decoded while
 * multiplying, some rows against the reference; what lies beside the outputs stays. */
static void check_long(hx_fmt fmt, int64_t n, int64_t k, int rows, bool with_bias)
{
    matrix m(fmt, n, k, fmt == HX_FMT_EXL3 ? 6 : 32, HX_CB_MUL1, 7 * n + k, with_bias);
    const int64_t ldy = n + 4;
    std::vector<float> x((size_t)(rows * k)), want((size_t)(rows * ldy)), got(want);
    hx_cuda_many a = {};
    char name[128];
    double worst = 0;
    bool ok = true;

    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)(hx_rng_normal(7, i) * (1 + (double)(i / (size_t)k % 5)));
    a.w = &m.dev;
    a.x = upload(x);
    a.y = upload(got);
    a.ldx = k;
    a.ldy = ldy;
    a.rows = rows;
    hx_cuda_work w = work_of(hx_cuda_many_bytes(&m.dev, rows));
    snprintf(name, sizeof(name), "%s %ldx%ld%s, %d rows", hx_fmt_name(fmt), (long)k,
             (long)n, with_bias ? " bias" : "", rows);
    for (int once : { -1, 1, 0 }) {
        a.once = once;
        a.block_rows = once < 0 ? 128 : 0;
        CHECK(cudaMemset(a.y, 0xff, got.size() * 4));
        CHECK(hx_cuda_rows_many(&a, &w, 0));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(got.data(), a.y, got.size() * 4, cudaMemcpyDeviceToHost));
        if (once < 0)
            want = got;
        for (int r = 0; r < rows && ok; r++)
            if (memcmp(&want[(size_t)(r * ldy)], &got[(size_t)(r * ldy)],
                       (size_t)ldy * 4) != 0) {
                printf("not ok %s: row %d differs, once %d\n", name, r, once);
                ok = false;
            }
    }
    for (int r = 0; r<rows; r += rows> 1024 ? 509 : 1) {
        std::vector<double> in(&x[(size_t)(r * k)], &x[(size_t)((r + 1) * k)]);
        const double e = distance(&got[(size_t)(r * ldy)], m.times(in.data()));

        worst = std::isfinite(e) ? std::max(worst, e) : 9;
    }
    for (int r = 0; r < rows; r++)
        for (int64_t o = n; o < ldy; o++)
            ok = ok && std::isnan(got[(size_t)(r * ldy + o)]);
    verdict(ok && worst < MOST, name, worst);
    cudaFree((void *)a.x);
    cudaFree(a.y);
    cudaFree(w.p);
    m.drop();
}

static void checks(void)
{
    for (int k2 : { 6, 8, 12, 2, 3, 4, 5, 7, 10, 14, 16 })
        for (hx_codebook cb : { HX_CB_MUL1, HX_CB_MCG, HX_CB_3INST })
            if (cb == HX_CB_MUL1 || k2 % 2 == 0)
                check(HX_FMT_EXL3, 256, 512, k2, cb, false);
    check(HX_FMT_EXL3, 11 * 128 - 28, 1000, 6, HX_CB_MUL1, true);
    check(HX_FMT_EXL3, 384, 2048, 8, HX_CB_MCG, false);
    check(HX_FMT_EXL3, 384, 2048, 6, HX_CB_MUL1, false, 256 * 2048 * 2 + 4096);
    check(HX_FMT_EXL3, 256, 4096, 6, HX_CB_MUL1, false);
    check(HX_FMT_EXL3, 70 * 128, 384, 6, HX_CB_MUL1,
          false); /* more than multiprocessors */
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const int64_t wide = (prop.multiProcessorCount / 3 + 1) * 3 * 128; /* three groups */
    check(HX_FMT_EXL3, wide, 1024, 6, HX_CB_MUL1, false);
    check(HX_FMT_EXL3, wide - 28, 1000, 12, HX_CB_MCG, true);
    for (hx_fmt f : { HX_FMT_F32, HX_FMT_F16, HX_FMT_BF16, HX_FMT_FP8 }) {
        check(f, 100, 300, 32, HX_CB_MUL1, true);
        check(f, 640, 1024, 32, HX_CB_MUL1, false);
        check(f, 640, 1024, 32, HX_CB_MUL1, false, 1100000);
    }
    check_long(HX_FMT_EXL3, 2048, 1536, 5003, false);
    check_long(HX_FMT_EXL3, 2304 - 21, 256, 8192, true); /* nothing aligned */
    check_long(HX_FMT_BF16, 300, 640, 4097, false);
}

/* ---- experts ---------------------------------------------------------------------- */

static std::vector<double> expert_of(const matrix *m, const float *x, float limit)
{
    std::vector<double> in((size_t)m[0].host.k);

    for (size_t i = 0; i < in.size(); i++)
        in[i] = x[i];
    auto g = m[0].times(in.data());
    const auto u = m[1].times(in.data());
    for (size_t i = 0; i < g.size(); i++) {
        const double l = limit > 0 ? limit : INFINITY, a = std::min(g[i], l);

        g[i] = a / (1 + exp(-a)) * std::max(std::min(u[i], l), -l);
    }
    return m[2].times(g.data());
}

/* Expert 0 has every other pick; some are left out. */
static std::vector<int32_t> picks(size_t n, int n_expert)
{
    std::vector<int32_t> id(n);

    for (size_t i = 0; i < n; i++) {
        const uint64_t r = hx_rng_at(23, i);

        id[i] = r % 13 == 0  ? -1
                : r % 2 == 0 ? 0
                             : (int32_t)((r >> 8) % (uint64_t)n_expert);
    }
    return id;
}

/* The matrix as an expert's: on the device, or in host memory that the device reads. */
static hx_cuda_mat place(const matrix &m, bool host, std::vector<void *> &pinned)
{
    hx_cuda_mat to = { m.dev.w, m.dev.suh, m.dev.svh };

    if (host) {
        void *h;

        CHECK(cudaHostAlloc(&h, m.w.size(), cudaHostAllocMapped));
        memcpy(h, m.w.data(), m.w.size());
        to.trellis = h;
        pinned.push_back(h);
    }
    return to;
}

static void check_experts(int64_t d, int64_t f, int rows, int active, int n_expert,
                          const int k2[3], hx_codebook cb, bool host)
{
    std::vector<matrix> mats;
    std::vector<hx_cuda_expert> on((size_t)n_expert);
    std::vector<float> x((size_t)(rows * d)), got((size_t)(rows * active * d)), all;
    const std::vector<int32_t> id = picks((size_t)(rows * active), n_expert);
    std::vector<void *> pinned;
    hx_cuda_moe m = {};
    char name[128];
    double worst = 0;
    bool ok = true;

    mats.reserve((size_t)(3 * n_expert));
    for (int e = 0; e < n_expert; e++)
        for (int i = 0; i < 3; i++) {
            hx_cuda_mat *to = i == 0 ? &on[e].gate : i == 1 ? &on[e].up : &on[e].down;

            mats.emplace_back(HX_FMT_EXL3, i == 2 ? d : f, i == 2 ? f : d, k2[i], cb,
                              (uint64_t)(1000 * i + 10 * e), false);
            *to = place(mats.back(), host, pinned);
        }
    for (size_t i = 0; i < x.size(); i++)
        x[i] = (float)hx_rng_normal(17, i);
    m.x = upload(x);
    m.y = upload(got);
    m.id = upload(id);
    m.expert = upload(on);
    m.rows = rows;
    m.active = active;
    m.n_expert = m.end = n_expert;
    m.d = d;
    m.f = f;
    m.d_pad = (d + 127) / 128 * 128;
    m.f_pad = (f + 127) / 128 * 128;
    m.k2_gate = k2[0];
    m.k2_up = k2[1];
    m.k2_down = k2[2];
    m.codebook = cb;
    m.limit = 10.0f;
    snprintf(name, sizeof(name), "experts %s K=%g/%g/%g %ld-%ld rows %d x %d of %d%s",
             cb_name[cb], k2[0] / 2.0, k2[1] / 2.0, k2[2] / 2.0, (long)d, (long)f, rows,
             active, n_expert, host ? " host" : "");
    for (int64_t window : { 0, 256, 512, 0 }) {
        hx_cuda_work w = work_of(hx_cuda_experts_many_bytes(&m, window));

        CHECK(cudaMemset(m.y, 0xff, got.size() * 4));
        CHECK(hx_cuda_experts_many(&m, &w, 0));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(got.data(), m.y, got.size() * 4, cudaMemcpyDeviceToHost));
        if (all.empty())
            all = got;
        if (memcmp(all.data(), got.data(), got.size() * 4) != 0) {
            printf("not ok %s: other bits with windows of %ld\n", name, (long)window);
            ok = false;
        }
        cudaFree(w.p);
    }
    /* one row alone */
    hx_cuda_moe one = m;
    one.rows = 1;
    one.x = m.x + 3 * d;
    one.id = m.id + 3 * active;
    hx_cuda_work w = work_of(hx_cuda_experts_many_bytes(&one, 0));
    CHECK(cudaMemset(m.y, 0xff, got.size() * 4));
    CHECK(hx_cuda_experts_many(&one, &w, 0));
    CHECK(cudaMemcpy(got.data(), m.y, got.size() * 4, cudaMemcpyDeviceToHost));
    if (memcmp(&all[(size_t)(3 * active * d)], got.data(), (size_t)(active * d) * 4) !=
        0) {
        printf("not ok %s: other bits alone\n", name);
        ok = false;
    }
    cudaFree(w.p);
    std::vector<uint32_t> poison((size_t)d, 0xffffffffu);
    for (size_t p = 0; p < id.size(); p++) {
        const float *y = &all[p * (size_t)d];

        if (id[p] < 0) {
            if (memcmp(y, poison.data(), (size_t)d * 4) != 0)
                ok = false;
        } else if (p % 37 == 0 || p + 8 > id.size()) {
            const double e =
                distance(y, expert_of(&mats[(size_t)(3 * id[p])],
                                      &x[p / (size_t)active * (size_t)d], m.limit));
            worst = std::isfinite(e) ? std::max(worst, e) : 9;
        }
    }
    verdict(ok && worst < 2 * MOST, name, worst);
    cudaFree((void *)m.x);
    cudaFree(m.y);
    cudaFree((void *)m.id);
    cudaFree((void *)m.expert);
    for (void *h : pinned)
        cudaFreeHost(h);
    for (auto &mm : mats)
        mm.drop();
}

static void checks_experts(void)
{
    const int k333[3] = { 6, 6, 6 }, k346[3] = { 6, 8, 12 }, odd[3] = { 5, 5, 7 };

    check_experts(512, 256, 300, 4, 7, k333, HX_CB_MUL1, false);
    check_experts(512, 256, 300, 4, 7, k346, HX_CB_MCG, false);
    check_experts(384, 640, 100, 2, 5, odd, HX_CB_MUL1, true);
    check_experts(1024, 512, 600, 2, 9, k333, HX_CB_MUL1, true);
    check_experts(300, 200, 100, 3, 4, k333, HX_CB_MUL1, false);
}

/* ---- ceilings -------------------------------------------------------------------- */

static double peak = 700, copy_rate = 4300; /* TFLOP/s, GB/s */

/* Median microseconds of one of the calls that add() puts into a graph. */
static double time_graph(int calls, const std::function<void(int, cudaStream_t)> &add)
{
    /* What ran before may have left the clock low: 42 and 55 us for the same call (H200). */
    usleep(60 * 1000);
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
    for (int rep = 0; rep < 6; rep++) {
        float ms;
        CHECK(cudaEventRecord(e0, st));
        CHECK(cudaGraphLaunch(exec, st));
        CHECK(cudaEventRecord(e1, st));
        CHECK(cudaEventSynchronize(e1));
        CHECK(cudaEventElapsedTime(&ms, e0, e1));
        if (rep > 0)
            us.push_back(ms * 1000 / calls);
    }
    std::sort(us.begin(), us.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(e0);
    cudaEventDestroy(e1);
    cudaStreamDestroy(st);
    return us[2];
}

__global__ void __launch_bounds__(256, 1) burn(const uint4 *data, float *out, int n)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t a[4][4];
    float d[128];

    for (int i = threadIdx.x; i < 2048; i += 256)
        ((uint4 *)shared)[i] = data[i];
    for (int i = 0; i < 16; i++)
        a[i >> 2][i & 3] = ((const uint32_t *)data)[threadIdx.x + 256 * i];
    __syncthreads();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const uint64_t b = hx_wgmma_matrix(hx_shared_of(shared));
    for (int i = 0; i < n; i++) {
        hx_wgmma_begin();
        for (int k = 0; k < 4; k++)
            hx_wgmma<256>(d, a[k], b + 2 * k, i + k > 0);
        hx_wgmma_commit();
        hx_wgmma_wait();
    }
    float sum = 0;
    for (int i = 0; i < 128; i++)
        sum += d[i];
    out[blockIdx.x * 256 + threadIdx.x] = sum;
#endif
}

__global__ void copy_all(uint4 *to, const uint4 *from, int64_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        to[i] = from[i];
}

static void ceilings(void)
{
    const int64_t bytes = (int64_t)1 << 30;
    std::vector<uint16_t> v(32768);
    cudaDeviceProp prop;
    uint4 *from, *to;

    CHECK(cudaGetDeviceProperties(&prop, 0));
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    CHECK(cudaMemset(from, 1, bytes));
    const double us = time_graph(4, [&](int, cudaStream_t st) {
        copy_all<<<132 * 16, 512, 0, st>>>(to, from, bytes / 16);
    });
    copy_rate = 2.0 * bytes / us / 1e3;
    for (size_t i = 0; i < v.size(); i++)
        v[i] = hx_f16_from((float)hx_rng_normal(3, i));
    CHECK(cudaMemcpy(from, v.data(), 65536, cudaMemcpyHostToDevice));
    CHECK(cudaFuncSetAttribute(burn, cudaFuncAttributeMaxDynamicSharedMemorySize, 32768));
    const double t = time_graph(4, [&](int, cudaStream_t st) {
        burn<<<prop.multiProcessorCount, 256, 32768, st>>>(from, (float *)to, 2000);
    });
    CHECK(cudaDeviceSynchronize());
    peak = prop.multiProcessorCount * 2.0 * 2000 * 4 * 64 * 256 * 16 * 2 / t / 1e6;
    printf("ceilings: copy %.0f GB/s, wgmma f16 from one stage %.0f TFLOP/s\n", copy_rate,
           peak);
    fflush(stdout);
    cudaFree(from);
    cudaFree(to);
}

/* ---- time -------------------------------------------------------------------------- */

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

static float *random_rows(int64_t n)
{
    static float *seed;
    const int64_t chunk = 1 << 20;
    float *p;

    if (seed == NULL) {
        std::vector<float> v((size_t)chunk);
        for (size_t i = 0; i < v.size(); i++)
            v[i] = (float)hx_rng_normal(98, i);
        seed = upload(v);
    }
    CHECK(cudaMalloc(&p, (size_t)n * 4));
    for (int64_t at = 0; at < n; at += chunk)
        CHECK(cudaMemcpy(p + at, seed, (size_t)std::min(chunk, n - at) * 4,
                         cudaMemcpyDeviceToDevice));
    return p;
}

static double time_one(hx_fmt fmt, int64_t n, int64_t k, int k2, hx_codebook cb, int rows,
                       int block, int once = 0)
{
    const size_t bytes =
        fmt == HX_FMT_EXL3 ? (size_t)(n * k) / 16 * k2 : (size_t)(n * k) * 2;
    const int sets = (int)HX_MAX(2, HX_MIN(rows > 256 ? 8 : 32, (150u << 20) / bytes));
    std::vector<uint16_t> scale((size_t)HX_MAX(n, k), 0x3c00);
    uint8_t *dev = random_trellis(bytes * (size_t)sets);
    uint16_t *ds = upload(scale);
    float *dx = random_rows(rows * k), *dy;
    hx_mat m = {};

    CHECK(cudaMalloc(&dy, (size_t)rows * n * 4));
    m.fmt = fmt;
    m.n = m.n_pad = n;
    m.k = m.k_pad = k;
    m.k2 = k2;
    m.codebook = cb;
    m.suh = m.svh = ds;
    hx_cuda_work w = work_of(hx_cuda_many_bytes(&m, rows) + (once > 0 ? 96u << 20 : 0));
    std::vector<hx_mat> mats((size_t)sets, m);
    for (int i = 0; i < sets; i++)
        mats[(size_t)i].w = dev + (size_t)i * bytes;
    const double us = time_graph(sets, [&](int i, cudaStream_t st) {
        hx_cuda_many a = { &mats[(size_t)i], dx, dy, rows, k, n, block, once };
        CHECK(hx_cuda_rows_many(&a, &w, st));
    });
    cudaFree(w.p);
    cudaFree(dev);
    cudaFree(ds);
    cudaFree(dx);
    cudaFree(dy);
    return us;
}

/* The reference on an H200 (exllamav3 1.4.1), by rows. */
static const int n_rows[] = { 32, 64, 128, 512, 2048, 8192 };
static std::vector<int> only; /* of these; empty: all */
static std::string only_shape;
static const struct {
    int64_t k, n;
    int k2;
    double us[6];
} reference[] = {
    { 4096, 2048, 6, { 38, 72, 141, 90, 80, 222 } },
    { 2048, 4096, 6, { 31, 58, 111, 51, 73, 206 } },
    { 4096, 8192, 6, { 62, 120, 234, 123, 249, 793 } },
    { 8192, 4096, 6, { 66, 129, 254, 123, 241, 763 } },
    { 4096, 24576, 6, { 110, 213, 423, 319, 707, 2320 } },
    { 4096, 2048, 8, { 40, 74, 145, 51, 71, 202 } },
    { 2048, 4096, 8, { 31, 59, 114, 82, 78, 217 } },
    { 4096, 8192, 8, { 58, 113, 220, 128, 255, 794 } },
    { 8192, 4096, 8, { 71, 135, 266, 123, 242, 766 } },
    { 4096, 24576, 8, { 133, 261, 518, 359, 719, 2326 } },
    { 4096, 2048, 12, { 40, 76, 148, 73, 73, 222 } },
    { 2048, 4096, 12, { 32, 61, 117, 52, 74, 208 } },
    { 4096, 8192, 12, { 66, 127, 251, 126, 249, 797 } },
    { 8192, 4096, 12, { 71, 138, 271, 125, 247, 767 } },
    { 4096, 24576, 12, { 117, 228, 466, 336, 725, 2410 } },
    { 4096, 154880, 12, { 775, 1520, 3004, 1966, 4612, 0 } },
};

static bool asked(int64_t k, int64_t n)
{
    return only_shape.empty() ||
           only_shape == std::to_string(k) + "x" + std::to_string(n);
}

/* Real shapes, few rows: the bits of blocks of 64 rows. */
static void checks_few(void)
{
    for (const auto &ref : reference) {
        if (ref.n > 100000 || !asked(ref.k, ref.n))
            continue;
        std::vector<uint16_t> scale;
        char name[64];
        hx_mat m = {};
        bool ok = true;

        for (int64_t i = 0; i < HX_MAX(ref.n, ref.k); i++)
            scale.push_back((uint16_t)(0x3800 + (hx_rng_at(97, i) & 0x87ff)));
        m.fmt = HX_FMT_EXL3;
        m.n = m.n_pad = ref.n;
        m.k = m.k_pad = ref.k;
        m.k2 = ref.k2;
        m.codebook = HX_CB_MUL1;
        m.w = random_trellis((size_t)(ref.n * ref.k) / 16 * (size_t)ref.k2);
        m.suh = m.svh = upload(scale);
        hx_cuda_work w = work_of(hx_cuda_many_bytes(&m, 64));
        std::vector<float> want((size_t)(64 * ref.n)), got(want);
        float *dx = random_rows(64 * ref.k), *dy = upload(got);
        const auto call = [&](int rows, int block, int once, std::vector<float> &y) {
            hx_cuda_many a = { &m, dx, dy, rows, ref.k, ref.n, block, once };

            CHECK(cudaMemset(dy, 0xff, y.size() * 4));
            CHECK(hx_cuda_rows_many(&a, &w, 0));
            CHECK(cudaMemcpy(y.data(), dy, y.size() * 4, cudaMemcpyDeviceToHost));
        };

        call(64, 64, -1, want);
        for (int rows : { 64, 1, 20, 32, 33, 64 }) {
            call(rows, 0, 0, got);
            ok = ok && memcmp(got.data(), want.data(), (size_t)(rows * ref.n) * 4) == 0;
            for (size_t i = (size_t)(rows * ref.n); i < got.size(); i++)
                ok = ok && std::isnan(got[i]);
        }
        snprintf(name, sizeof(name), "few rows K=%g %ldx%ld", ref.k2 / 2.0, (long)ref.k,
                 (long)ref.n);
        verdict(ok, name, 0);
        for (const void *p : { m.w, (const void *)m.suh, (const void *)dx,
                               (const void *)dy, (const void *)w.p })
            cudaFree((void *)p);
    }
}

static bool timed(int rows)
{
    return only.empty() || std::find(only.begin(), only.end(), rows) != only.end();
}

/* Blocks of 64, 128 and 256 rows against each other, and small plain matrices. */
static void times_of_blocks(void)
{
    printf("rows of a thread block 64, 128, 256, decoded while multiplying; the same, "
           "decoded first; K = 3\n");
    for (int rows : { 32, 64, 128, 256, 512, 1024, 2048, 8192 })
        for (auto s : { std::pair<int64_t, int64_t> { 4096, 2048 },
                        { 2048, 4096 },
                        { 4096, 8192 },
                        { 8192, 4096 } }) {
            printf("%4d %5ldx%-6ld", rows, (long)s.first, (long)s.second);
            for (int once : { -1, 1 })
                for (int block : { 64, 128, 256 })
                    printf(" %8.1f", time_one(HX_FMT_EXL3, s.second, s.first, 6,
                                              HX_CB_MUL1, rows, block, once));
            printf("\n");
        }
    for (int rows : { 128, 2048 })
        for (auto s : { std::pair<int64_t, int64_t> { 4096, 128 },
                        { 128, 8192 },
                        { 4096, 64 },
                        { 4096, 4096 } })
            printf("bf16 %ldx%ld rows %d: %.1f us\n", (long)s.first, (long)s.second, rows,
                   time_one(HX_FMT_BF16, s.second, s.first, 32, HX_CB_MUL1, rows, 0));
}

static void times(void)
{
    printf("us (x reference, TFLOP/s)\n%-18s", "K in x out");
    for (int r : n_rows)
        if (timed(r))
            printf("%22d", r);
    printf("\n");
    for (const auto &ref : reference) {
        if (!asked(ref.k, ref.n))
            continue;
        printf("%g %5ldx%-10ld", ref.k2 / 2.0, (long)ref.k, (long)ref.n);
        for (int i = 0; i < 6; i++) {
            if (ref.us[i] == 0 || !timed(n_rows[i]))
                continue;
            const double us =
                time_one(HX_FMT_EXL3, ref.n, ref.k, ref.k2, HX_CB_MUL1, n_rows[i], 0);

            printf("%8.1f (%.2f, %5.1f)", us, us / ref.us[i],
                   2.0 * n_rows[i] * ref.k * ref.n / us / 1e6);
        }
        printf("\n");
        fflush(stdout);
    }
    if (only.empty())
        times_of_blocks();
    fflush(stdout);
}

static void time_moe(int k2, hx_codebook cb, int rows, bool skewed, int64_t window,
                     double reference_ms)
{
    const int64_t d = 4096, f = 2048;
    const int n_expert = 288, active = 8;
    const size_t part = (size_t)(d * f) / 16 * (size_t)k2;
    std::vector<hx_cuda_expert> on((size_t)n_expert);
    std::vector<uint16_t> scale((size_t)d, 0x3c00);
    std::vector<int32_t> id;
    std::vector<int> count((size_t)n_expert);
    uint8_t *dev = random_trellis(3 * part * n_expert);
    uint16_t *ds = upload(scale);
    hx_cuda_moe m = {};

    for (int e = 0; e < n_expert; e++) {
        on[(size_t)e].gate = hx_cuda_mat { dev + 3 * e * part, ds, ds };
        on[(size_t)e].up = hx_cuda_mat { dev + (3 * e + 1) * part, ds, ds };
        on[(size_t)e].down = hx_cuda_mat { dev + (3 * e + 2) * part, ds, ds };
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < active;) {
            const double u = hx_rng_unit(31, (uint64_t)id.size() * 64 + (uint64_t)p +
                                                 7919u * (uint64_t)count[0]);
            const int e = (int)(n_expert * (skewed ? u * u : u)) % n_expert;
            bool seen = false;

            for (int o = 0; o < p; o++)
                seen = seen || id[(size_t)(r * active + o)] == e;
            count[0]++;
            if (!seen) {
                id.push_back(e);
                p++;
            }
        }
    m.x = random_rows(rows * d);
    m.expert = upload(on);
    m.id = upload(id);
    CHECK(cudaMalloc(&m.y, (size_t)rows * active * d * 4));
    m.rows = rows;
    m.active = active;
    m.n_expert = m.end = n_expert;
    m.d = m.d_pad = d;
    m.f = m.f_pad = f;
    m.k2_gate = m.k2_up = m.k2_down = k2;
    m.codebook = cb;
    m.limit = 10.0f;
    hx_cuda_work w = work_of(hx_cuda_experts_many_bytes(&m, window));
    const double us = time_graph(
        2, [&](int, cudaStream_t st) { CHECK(hx_cuda_experts_many(&m, &w, st)); });
    const double tflops = 6.0 * d * f * rows * active / us / 1e6;
    printf("moe %s K=%g %5d tokens %-7s window %6ld (%5.0f MB): %7.3f ms (x%.2f)  %.0f "
           "TFLOP/s (%.0f%%)\n",
           cb_name[cb], k2 / 2.0, rows, skewed ? "skewed" : "uniform", (long)window,
           (double)w.bytes / 1e6, us / 1e3, us / 1e3 / reference_ms, tflops,
           100 * tflops / peak);
    fflush(stdout);
    cudaFree(w.p);
    cudaFree(dev);
    cudaFree(ds);
    cudaFree((void *)m.x);
    cudaFree((void *)m.expert);
    cudaFree((void *)m.id);
    cudaFree(m.y);
}

static void times_moe(void)
{
    if (!only.empty()) {
        for (bool skewed : { false, true })
            for (int rows : only)
                time_moe(6, HX_CB_MUL1, rows, skewed, 0, INFINITY);
        return;
    }
    for (bool skewed : { false, true }) {
        time_moe(6, HX_CB_MUL1, 256, skewed, 0, 5);
        time_moe(6, HX_CB_MUL1, 1024, skewed, 0, 10.4);
        time_moe(6, HX_CB_MUL1, 4096, skewed, 0, skewed ? 25.3 : 32.7);
        time_moe(6, HX_CB_MUL1, 8192, skewed, 0, skewed ? 33.7 : 36);
        time_moe(8, HX_CB_MCG, 8192, skewed, 0, skewed ? 33.9 : 35.6);
    }
    for (int64_t window : { 8192, 16384, 32768 })
        time_moe(6, HX_CB_MUL1, 8192, false, window, 36);
}

/* For a profiler: few launches. */
static void profile(void)
{
    time_one(HX_FMT_EXL3, 8192, 4096, 6, HX_CB_MUL1, 8192, 256);
    time_one(HX_FMT_EXL3, 8192, 4096, 6, HX_CB_MUL1, 128, 0);
}

int main(int argc, char **argv)
{
    cudaDeviceProp prop;
    const auto wants = [&](const char *what) {
        return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char *a) {
                   return strcmp(a, what) == 0;
               });
    };

    CHECK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors\n", prop.name, prop.multiProcessorCount);
    for (int i = 1; i < argc; i++)
        if (strchr(argv[i], 'x') != NULL && argv[i][0] >= '0' && argv[i][0] <= '9')
            only_shape = argv[i];
        else if (argv[i][0] >= '0' && argv[i][0] <= '9')
            only.push_back((int)strtol(argv[i], NULL, 10));
    if (argc == 2 && strcmp(argv[1], "profile") == 0) {
        profile();
        return 0;
    }
    if (wants("check"))
        checks();
    if (wants("experts"))
        checks_experts();
    if (wants("few"))
        checks_few();
    if (wants("peak"))
        ceilings();
    if (wants("time"))
        times();
    if (wants("moe"))
        times_moe();
    return 0;
}
