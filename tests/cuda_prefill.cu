/* cuda_prefill.cu - what prefill needs beside products and experts, on a machine with a GPU:
 * the operations against the double reference (check), and their time at the full size of
 * GLM-5.3-Flash in a call of 8,192 rows that ends at position 32,768 (time). Prints "ok NAME"
 * or "not ok NAME". Arguments: any of small, profile, kda, check, time; none: all. Built by
 * tests/gpu.sh. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "dev/cuda_dev.h"

static hx_err err;
static hx_dev *gpu, *ref;

#define MUST(call)                                                                       \
    do {                                                                                 \
        if ((call) != 0) {                                                               \
            printf("not ok %s: %s (line %d)\n", #call, err.msg, __LINE__);               \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)
#define CHECK(call)                                                                      \
    do {                                                                                 \
        const cudaError_t rc_ = (call);                                                  \
        if (rc_ != cudaSuccess) {                                                        \
            printf("not ok %s: %s (line %d)\n", #call, cudaGetErrorString(rc_),          \
                   __LINE__);                                                            \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

static int argc_;
static char **argv_;

static bool wanted(const char *name)
{
    for (int i = 1; i < argc_; i++)
        if (strcmp(argv_[i], name) == 0)
            return true;
    return argc_ == 1;
}

/* ---- data -------------------------------------------------------------------- */

__global__ void fill_normal(float *p, int64_t n, uint64_t seed, float scale, float shift,
                            bool negative)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = seed + 0x9E3779B97F4A7C15ull * (uint64_t)(i + 1);
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        const float u = ((uint32_t)z + 0.5f) * 0x1p-32f,
                    a = (uint32_t)(z >> 32) * 0x1p-32f;
        const float v = sqrtf(-2 * logf(u)) * cosf(6.2831853f * a) * scale + shift;

        p[i] = negative ? -fabsf(v) : v;
    }
}

__global__ void to_bf16(uint16_t *to, const float *from, int64_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        to[i] = (uint16_t)((__float_as_uint(from[i]) + 0x8000u) >> 16);
}

static uint64_t next_seed = 1;

static hx_buf bytes_of(size_t n)
{
    hx_buf b = {};

    MUST(hx_dev_alloc(gpu, &b, n, &err));
    return b;
}

static hx_buf normals(int64_t n, float scale = 1, float shift = 0, bool negative = false)
{
    hx_buf b = bytes_of((size_t)n * 4);

    fill_normal<<<1024, 256, 0, hx_cuda_of(gpu)->stream>>>(
        (float *)b.p, n, next_seed++ * 977, scale, shift, negative);
    CHECK(cudaGetLastError());
    return b;
}

static hx_buf bf16s(int64_t n, float scale = 1)
{
    hx_buf f = normals(n, scale), b = bytes_of((size_t)n * 2);

    to_bf16<<<1024, 256, 0, hx_cuda_of(gpu)->stream>>>((uint16_t *)b.p, (float *)f.p, n);
    CHECK(cudaGetLastError());
    hx_dev_free(gpu, &f);
    return b;
}

static std::vector<float> floats_of(hx_buf b)
{
    std::vector<float> v(b.n / 4);

    MUST(hx_dev_get(gpu, v.data(), b, b.n, &err));
    return v;
}

static hx_buf host(std::vector<float> &v)
{
    return hx_buf { v.data(), v.size() * 4 };
}

static double distance(const float *got, const float *want, size_t n)
{
    double d = 0, s = 1e-300;

    for (size_t i = 0; i < n; i++) {
        d += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        s += (double)want[i] * want[i];
    }
    return d == d ? sqrt(d / s) : 9;
}

/* Median milliseconds. */
static double ms_of(const std::function<void()> &f, int n = 5)
{
    cudaStream_t s = hx_cuda_of(gpu)->stream;
    std::vector<float> ms;
    cudaEvent_t e0, e1;

    CHECK(cudaEventCreate(&e0));
    CHECK(cudaEventCreate(&e1));
    f();
    for (int i = 0; i < n; i++) {
        float t;

        CHECK(cudaEventRecord(e0, s));
        f();
        CHECK(cudaEventRecord(e1, s));
        CHECK(cudaEventSynchronize(e1));
        CHECK(cudaEventElapsedTime(&t, e0, e1));
        ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    cudaEventDestroy(e0);
    cudaEventDestroy(e1);
    return ms[ms.size() / 2];
}

/* ---- gated delta rule ---------------------------------------------------------- */

struct kda {
    hx_kda_chunk_args a = {};
    hx_buf qkv;
    std::vector<hx_span> span;

    /* decay: the scale of g; alike: how much of a key all keys share */
    kda(std::vector<hx_span> s, int64_t heads, int64_t width, float decay, float alike)
        : span(std::move(s))
    {
        const int64_t hw = heads * width;
        int32_t slots = 1;

        for (const hx_span &x : span) {
            a.rows.n_row = std::max<int64_t>(a.rows.n_row, x.row0 + x.n_row);
            slots = std::max(slots, x.slot + 1);
        }
        a.rows.span = span.data();
        a.rows.n_span = (int32_t)span.size();
        const int64_t r = a.rows.n_row;
        a.heads = heads;
        a.width = width;
        a.ld = 3 * hw;
        qkv = normals(r * a.ld, 1, alike);
        a.q = qkv;
        a.k = hx_buf_at(qkv, (size_t)hw * 4);
        a.v = hx_buf_at(qkv, (size_t)hw * 8);
        a.g = normals(r * hw, decay, 0, true);
        a.beta = normals(r * heads, 0.1f, 0.7f);
        a.o = bytes_of((size_t)(r * hw) * 4);
        a.state = normals(slots * hw * width, 0.3f);
        a.pend = normals(slots * HX_PEND_MAX * heads * (3 * width + 1), 0.08f, 0, true);
    }
    void drop()
    {
        for (hx_buf *b : { &qkv, &a.g, &a.beta, &a.o, &a.state, &a.pend })
            hx_dev_free(gpu, b);
    }
};

static void check_kda(const char *name, std::vector<hx_span> span, int64_t heads,
                      int64_t width, float decay, float alike)
{
    kda x(span, heads, width, decay, alike);
    const int64_t hw = heads * width;
    std::vector<float> qkv = floats_of(x.qkv), g = floats_of(x.a.g),
                       beta = floats_of(x.a.beta), state = floats_of(x.a.state),
                       pend = floats_of(x.a.pend), before = state;
    std::vector<float> o((size_t)(x.a.rows.n_row * hw));
    hx_kda_chunk_args r = x.a;
    double worst = 0;
    bool ok = true;

    r.q = host(qkv);
    r.k = hx_buf_at(r.q, (size_t)hw * 4);
    r.v = hx_buf_at(r.q, (size_t)hw * 8);
    r.g = host(g);
    r.beta = host(beta);
    r.state = host(state);
    r.pend = host(pend);
    r.o = host(o);
    MUST(hx_op_kda_chunk(ref, &r, &err));
    MUST(hx_op_kda_chunk(gpu, &x.a, &err));
    const std::vector<float> mine = floats_of(x.a.o), after = floats_of(x.a.state);
    const double of_o = distance(mine.data(), o.data(), o.size());
    const double of_s = distance(after.data(), state.data(), state.size());
    for (int64_t i = 0; i < x.a.rows.n_row * heads; i++)
        worst = std::max(worst, distance(&mine[(size_t)(i * width)],
                                         &o[(size_t)(i * width)], (size_t)width));
    /* each span alone, cut at multiples of 64 of the position */
    MUST(hx_dev_put(gpu, x.a.state, before.data(), x.a.state.n, &err));
    MUST(hx_dev_put(gpu, x.a.o, o.data(), x.a.o.n, &err));
    for (const hx_span &s : span)
        for (int32_t t = 0, n; t < s.n_row || t == 0; t += n) {
            hx_span part = s;

            n = std::min(s.n_row - t, 64 * (1 + t % 3) - (s.pos0 + t) % 64);
            part.row0 = 0;
            part.n_row = n;
            part.pos0 += t;
            part.commit = t == 0 ? s.commit : 0;
            r = x.a;
            r.rows.span = &part;
            r.rows.n_span = 1;
            r.rows.n_row = n;
            const size_t at = (size_t)(s.row0 + t);
            r.q = hx_buf_at(x.a.q, at * r.ld * 4);
            r.k = hx_buf_at(x.a.k, at * r.ld * 4);
            r.v = hx_buf_at(x.a.v, at * r.ld * 4);
            r.g = hx_buf_at(x.a.g, at * hw * 4);
            r.o = hx_buf_at(x.a.o, at * hw * 4);
            r.beta = hx_buf_at(x.a.beta, at * heads * 4);
            MUST(hx_op_kda_chunk(gpu, &r, &err));
            if (s.n_row == 0)
                break;
        }
    const std::vector<float> cut = floats_of(x.a.o), cut_state = floats_of(x.a.state);
    if (memcmp(cut.data(), mine.data(), x.a.o.n) != 0 ||
        memcmp(cut_state.data(), after.data(), x.a.state.n) != 0) {
        printf("not ok kda_chunk %s: other bits when cut\n", name);
        ok = false;
    }
    /* 2^-22 a product; up to 64 rows build on each other, and 16 chunks. Largest measured:
     * 5.8e-6, of alike keys that nothing decays. */
    printf("%s kda_chunk %s: o %.2g, worst row %.2g, state %.2g\n",
           ok && of_o < 2e-5 && of_s < 2e-5 ? "ok" : "not ok", name, of_o, worst, of_s);
    fflush(stdout);
    x.drop();
}

static void check_kdas(void)
{
    check_kda("64 rows", { { 0, 0, 64, 0, 0 } }, 2, 128, 1, 0);
    check_kda("1 row", { { 0, 0, 1, 0, 0 } }, 2, 128, 1, 0);
    check_kda("strong decay", { { 0, 0, 500, 64, 0 } }, 4, 128, 3, 0);
    check_kda("weak decay", { { 0, 0, 500, 64, 0 } }, 4, 128, 0.01f, 0);
    check_kda("alike keys, weak decay", { { 0, 0, 1000, 0, 0 } }, 4, 128, 0.01f, 2);
    check_kda("alike keys, no decay", { { 0, 0, 1000, 0, 0 } }, 2, 128, 0.0f, 5);
    check_kda("beyond the gate's bound", { { 0, 0, 200, 0, 0 } }, 2, 128, 60, 0);
    check_kda("spans",
              { { 2, 0, 137, 50, 2 },
                { 0, 137, 7, 0, 0 },
                { 1, 144, 0, 9, 3 },
                { 3, 144, 70, 128, 8 } },
              3, 128, 1, 0.5f);
    check_kda("width 64", { { 1, 0, 150, 30, 1 }, { 0, 150, 64, 64, 0 } }, 3, 64, 1, 0);
    check_kda("width 17", { { 1, 0, 150, 30, 1 }, { 0, 150, 64, 64, 0 } }, 3, 17, 1, 0);
    check_kda("width 100", { { 1, 0, 150, 30, 1 }, { 0, 150, 64, 64, 0 } }, 3, 100, 1, 0);
    check_kda("64 heads", { { 0, 0, 1700, 64, 0 } }, 64, 128, 0.5f, 0.2f);
}

static void time_kda(int rows, int spans)
{
    std::vector<hx_span> s;

    for (int i = 0; i < spans; i++)
        s.push_back({ i, i * (rows / spans), rows / spans, 64, 0 });
    kda x(s, 64, 128, 0.5f, 0);
    printf("kda_chunk %d rows, %d spans: %.3f ms\n", rows, spans,
           ms_of([&] { MUST(hx_op_kda_chunk(gpu, &x.a, &err)); }));
    fflush(stdout);
    x.drop();
}

/* ---- the table ------------------------------------------------------------------ */

enum { ROWS = 8192, POS0 = 24576, CTX = POS0 + ROWS, D = 4096, S = 4, HEADS = 64 };

static double total;

/* name, milliseconds a call, calls in a pass over 45 layers */
static void line(const char *name, int calls, const std::function<void()> &f)
{
    const double ms = ms_of(f, 3);

    total += ms * calls;
    printf("%-28s %8.3f ms x %2d = %7.1f ms\n", name, ms, calls, ms * calls);
    fflush(stdout);
}

static hx_span whole = { 0, 0, ROWS, POS0, 0 };

static hx_rows rows_of(void)
{
    return hx_rows { &whole, 1, ROWS, {} };
}

struct pages {
    hx_pages p = {};
    std::vector<int32_t> table;

    pages(int64_t width, int per)
    {
        const int64_t n = CTX / HX_PAGE;

        for (int64_t i = 0; i < n; i++)
            table.push_back((int32_t)((i * 37 + 11) % n));
        p.data = bf16s(n * (HX_PAGE / per) * width);
        p.fmt = HX_CACHE_BF16;
        p.n_page = n;
        p.width = width;
        p.table = table.data();
        p.max_page = n;
        p.table_dev = bytes_of((size_t)n * 4);
        MUST(hx_dev_put(gpu, p.table_dev, table.data(), (size_t)n * 4, &err));
    }
    void drop()
    {
        hx_dev_free(gpu, &p.data);
        hx_dev_free(gpu, &p.table_dev);
    }
};

/* Picks of each row: some pools that it sees, ascending. */
static void fill_picks(std::vector<int32_t> &pick, std::vector<int32_t> &n_pick,
                       const hx_rows &rows, int64_t k, int pool_n)
{
    pick.assign((size_t)(rows.n_row * k), -1);
    n_pick.assign((size_t)rows.n_row, 0);
    for (int i = 0; i < rows.n_span; i++)
        for (int r = 0; r < rows.span[i].n_row; r++) {
            const int64_t row = rows.span[i].row0 + r;
            const int seen = (rows.span[i].pos0 + r + 1) / pool_n;
            const int n = (int)std::min<int64_t>(k, seen);
            int p = 0;

            for (int j = 0; j < n; j++, p++) { /* as many as are left must fit */
                const int spare = seen - p - (n - j);

                p += spare > 0 ? (int)(hx_rng_at(91, (uint64_t)(row * k + j)) %
                                       (uint64_t)(1 + 2 * spare / (n - j + 1)))
                               : 0;
                pick[(size_t)(row * k + j)] = p;
            }
            n_pick[(size_t)row] = n;
        }
}

/* Prefill rows against the decode path, which is within 1e-13 of the reference. */
static void check_mla(const char *name, std::vector<hx_span> span, int64_t heads,
                      int64_t width, int64_t k, float sharp)
{
    hx_mla_attend_args a = {};
    pages latent(width, 1);
    std::vector<int32_t> pick, n_pick;

    for (const hx_span &x : span)
        a.rows.n_row = std::max<int64_t>(a.rows.n_row, x.row0 + x.n_row);
    a.rows.span = span.data();
    a.rows.n_span = (int32_t)span.size();
    a.heads = heads;
    a.cache = latent.p;
    a.pool_n = 4;
    a.k_pick = k;
    a.scale = 1.0f / 16;
    a.q = normals(a.rows.n_row * heads * width, sharp);
    a.z = bytes_of((size_t)(a.rows.n_row * heads * width) * 4);
    if (k > 0) {
        fill_picks(pick, n_pick, a.rows, k, 4);
        a.pick = bytes_of(pick.size() * 4);
        a.n_pick = bytes_of(n_pick.size() * 4);
        MUST(hx_dev_put(gpu, a.pick, pick.data(), a.pick.n, &err));
        MUST(hx_dev_put(gpu, a.n_pick, n_pick.data(), a.n_pick.n, &err));
    }
    MUST(hx_op_mla_attend(gpu, &a, &err));
    const std::vector<float> want = floats_of(a.z);
    a.prefill = true;
    MUST(hx_op_mla_attend(gpu, &a, &err));
    const std::vector<float> got = floats_of(a.z);
    bool ok = true;
    for (int i = 0; i < 10 && ok; i++) { /* a race may need some tries */
        MUST(hx_op_mla_attend(gpu, &a, &err));
        ok = memcmp(floats_of(a.z).data(), got.data(), a.z.n) == 0;
    }
    if (!ok)
        printf("not ok mla_attend %s: other bits when run again\n", name);
    /* each row of the first span alone */
    for (int r = 0; r < span[0].n_row; r += 3) {
        hx_mla_attend_args one = a;
        hx_span s = span[0];
        const size_t at = (size_t)((s.row0 + r) * heads * width);

        s.pos0 += r;
        s.n_row = 1;
        s.row0 = 0;
        one.rows = hx_rows { &s, 1, 1, {} };
        one.q = hx_buf_at(a.q, at * 4);
        one.z = hx_buf_at(a.z, at * 4);
        if (k > 0) {
            one.pick = hx_buf_at(a.pick, (size_t)((span[0].row0 + r) * k) * 4);
            one.n_pick = hx_buf_at(a.n_pick, (size_t)(span[0].row0 + r) * 4);
        }
        MUST(hx_op_mla_attend(gpu, &one, &err));
    }
    const std::vector<float> alone = floats_of(a.z);
    if (memcmp(alone.data(), got.data(), a.z.n) != 0) {
        printf("not ok mla_attend %s: other bits alone\n", name);
        ok = false;
    }
    double worst = 0;
    for (int64_t i = 0; i < a.rows.n_row * heads; i++)
        worst = std::max(worst, distance(&got[(size_t)(i * width)],
                                         &want[(size_t)(i * width)], (size_t)width));
    const double d = distance(got.data(), want.data(), got.size());
    printf("%s mla_attend %s: %.2g, worst row %.2g\n", ok && d < 1e-3 ? "ok" : "not ok",
           name, d, worst);
    fflush(stdout);
    for (hx_buf *b : { &a.q, &a.z, &a.pick, &a.n_pick })
        if (b->p != NULL)
            hx_dev_free(gpu, b);
    latent.drop();
}

static hx_mat mat_of(hx_fmt fmt, int64_t n, int64_t k, const void *w)
{
    hx_mat m = {};

    m.fmt = fmt;
    m.n = n;
    m.k = k;
    m.w = w;
    return m;
}

/* Prefill rows against the canonical arithmetic, which is within 1e-6 of the reference. */
static void check_heads(const char *name, hx_fmt fmt, int64_t rows, int64_t heads,
                        int64_t n, int64_t k, int64_t stride, int64_t first,
                        bool transposed)
{
    const hx_buf w = fmt == HX_FMT_F32 ? normals(heads * stride * k, 0.05f)
                                       : bf16s(heads * stride * k, 0.05f);
    const hx_mat m = mat_of(fmt, heads * stride, k, w.p);
    const int64_t in = transposed ? n : k, out = transposed ? k : n;
    hx_head_matmul_args a = {};

    a.x = normals(rows * heads * in);
    a.y = bytes_of((size_t)(rows * heads * out) * 4);
    a.w = &m;
    a.rows = rows;
    a.heads = heads;
    a.n = n;
    a.stride = stride;
    a.first = first;
    a.transposed = transposed;
    MUST(hx_op_head_matmul(gpu, &a, &err));
    const std::vector<float> want = floats_of(a.y);
    a.prefill = true;
    MUST(hx_op_head_matmul(gpu, &a, &err));
    const std::vector<float> got = floats_of(a.y);
    hx_head_matmul_args one = a;
    one.rows = 1;
    for (int64_t r = 0; r < rows; r += 7) {
        one.x = hx_buf_at(a.x, (size_t)(r * heads * in) * 4);
        one.y = hx_buf_at(a.y, (size_t)(r * heads * out) * 4);
        MUST(hx_op_head_matmul(gpu, &one, &err));
    }
    const std::vector<float> alone = floats_of(a.y);
    const bool same = memcmp(alone.data(), got.data(), a.y.n) == 0;
    const double d = distance(got.data(), want.data(), got.size());
    printf("%s head_matmul %s: %.2g%s\n", same && d < 1e-3 ? "ok" : "not ok", name, d,
           same ? "" : ", other bits alone");
    fflush(stdout);
    hx_dev_free(gpu, &a.x);
    hx_dev_free(gpu, &a.y);
    hx_buf drop = w;
    hx_dev_free(gpu, &drop);
}

static void check_head_all(void)
{
    check_heads("absorbed", HX_FMT_BF16, 300, 64, 256, 512, 512, 0, true);
    check_heads("values", HX_FMT_BF16, 300, 64, 256, 512, 512, 256, false);
    check_heads("odd", HX_FMT_BF16, 77, 3, 40, 72, 90, 11, true);
    check_heads("odd values", HX_FMT_F32, 77, 3, 40, 72, 90, 11, false);
    check_heads("1 row", HX_FMT_BF16, 1, 64, 256, 512, 512, 0, true);
}

static void check_mlas(void)
{
    check_mla("first rows", { { 0, 0, 70, 0, 0 } }, 64, 512, 0, 1);
    check_mla("all positions", { { 0, 0, 40, 1990, 0 } }, 64, 512, 0, 2);
    check_mla("picks", { { 0, 0, 67, 24001, 0 } }, 64, 512, 512, 2);
    check_mla("picks, sharp", { { 0, 0, 67, 24001, 0 } }, 64, 512, 512, 8);
    check_mla("picks, flat", { { 0, 0, 67, 24001, 0 } }, 64, 512, 512, 0.1f);
    check_mla("all multiprocessors", { { 0, 0, 528, 24001, 0 } }, 64, 512, 512, 2);
    check_mla("4 heads of 64", { { 0, 0, 67, 3000, 0 } }, 4, 64, 16, 2);
    check_mla("96 heads of 40", { { 0, 0, 67, 300, 0 } }, 96, 40, 16, 2);
}

/* Rows of a call of many, whose blocks are larger, have the bits of calls of one row. */
static void check_mix(int64_t s, int64_t dim, int64_t rows, hx_fmt fmt)
{
    const int64_t n = s * (2 + s), each[] = { dim, s, s * s, s * dim };
    const hx_buf fn =
        fmt == HX_FMT_F32 ? normals(n * s * dim, 0.01f) : bf16s(n * s * dim, 0.01f);
    const hx_mat m = mat_of(fmt, n, s * dim, fn.p);
    hx_buf first[] = { bytes_of((size_t)(rows * dim) * 4), normals(rows * s),
                       normals(rows * s * s, 0.3f), normals(rows * s * dim) };
    hx_buf got[4], base = normals(n), scale = normals(3), y = normals(rows * dim),
                   w = normals(dim);
    std::vector<float> all[4];
    bool ok = true;

    for (int b = 0; b < 4; b++)
        got[b] = bytes_of(first[b].n);
    for (int64_t step : { rows, (int64_t)1 }) {
        CHECK(cudaDeviceSynchronize()); /* the operations have a stream of their own */
        for (int b = 0; b < 4; b++)
            CHECK(cudaMemcpy(got[b].p, first[b].p, first[b].n, cudaMemcpyDeviceToDevice));
        CHECK(cudaDeviceSynchronize());
        for (int64_t r = 0; r < rows; r += step) {
            const auto at = [&](hx_buf b, int64_t each_row) {
                return hx_buf_at(b, (size_t)(r * each_row) * 4);
            };
            hx_hc_mix_args a = { at(got[0], each[0]),
                                 at(got[1], each[1]),
                                 at(got[2], each[2]),
                                 at(got[3], each[3]),
                                 base,
                                 scale,
                                 &m,
                                 step,
                                 s,
                                 dim,
                                 1e-5f,
                                 1e-6f,
                                 20,
                                 at(y, dim),
                                 w };

            MUST(hx_op_hc_mix(gpu, &a, &err));
        }
        CHECK(cudaDeviceSynchronize());
        for (int b = 0; b < 4; b++)
            if (step == rows)
                all[b] = floats_of(got[b]);
            else
                ok = ok && memcmp(all[b].data(), floats_of(got[b]).data(), got[b].n) == 0;
    }
    for (float v : all[0])
        ok = ok && std::isfinite(v);
    printf("%s hc_mix %ld streams of %ld, %ld rows: bits of single rows\n",
           ok ? "ok" : "not ok", (long)s, (long)dim, (long)rows);
    fflush(stdout);
    for (hx_buf b : { fn, base, scale, y, w })
        hx_dev_free(gpu, &b);
    for (int b = 0; b < 4; b++) {
        hx_dev_free(gpu, &first[b]);
        hx_dev_free(gpu, &got[b]);
    }
}

/* Products of many rows of plain matrices: the bits of single rows. */
static void check_plain(hx_fmt fmt, int64_t rows, int64_t n, int64_t k)
{
    const hx_buf w = fmt == HX_FMT_F32 ? normals(n * k, 0.05f) : bf16s(n * k, 0.05f);
    const hx_mat m = mat_of(fmt, n, k, w.p);
    hx_buf x = normals(rows * (k + 4)), y = bytes_of((size_t)(rows * (n + 3)) * 4);
    hx_matmul_args a = { y, x, &m, rows, k + 4, n + 3, false, NULL };

    CHECK(cudaDeviceSynchronize()); /* the operations have a stream of their own */
    CHECK(cudaMemset(y.p, 0xff, y.n));
    CHECK(cudaDeviceSynchronize());
    MUST(hx_op_matmul(gpu, &a, &err));
    const std::vector<float> got = floats_of(y);
    CHECK(cudaMemset(y.p, 0xff, y.n));
    CHECK(cudaDeviceSynchronize());
    for (int64_t r = 0; r < rows; r++) {
        hx_matmul_args one = a;

        one.rows = 1;
        one.x = hx_buf_at(x, (size_t)(r * a.ldx) * 4);
        one.y = hx_buf_at(y, (size_t)(r * a.ldy) * 4);
        MUST(hx_op_matmul(gpu, &one, &err));
    }
    const bool same = memcmp(got.data(), floats_of(y).data(), y.n) == 0;

    printf("%s matmul %s %ldx%ld, %ld rows: bits of single rows\n",
           same ? "ok" : "not ok", hx_fmt_name(fmt), (long)k, (long)n, (long)rows);
    fflush(stdout);
    hx_buf drop = w;
    for (hx_buf *b : { &x, &y, &drop })
        hx_dev_free(gpu, b);
}

static void time_streams(void)
{
    hx_buf streams = normals((int64_t)ROWS * S * D), x = bytes_of((size_t)ROWS * D * 4),
           y = normals((int64_t)ROWS * D), post = bytes_of(ROWS * S * 4),
           comb = bytes_of(ROWS * S * S * 4), base = normals(S * (2 + S)),
           scale = normals(3), w = normals(D),
           fn = normals((int64_t)S * (2 + S) * S * D, 0.01f);
    const hx_mat m = mat_of(HX_FMT_F32, S * (2 + S), S * D, fn.p);

    line("hc_mix", 90, [&] {
        const hx_hc_mix_args a = { x, post, comb,  streams, base, scale, &m, ROWS,
                                   S, D,    1e-5f, 1e-6f,   20,   y,     w };
        MUST(hx_op_hc_mix(gpu, &a, &err));
    });
    for (hx_buf *b : { &streams, &x, &y, &post, &comb, &base, &scale, &w, &fn })
        hx_dev_free(gpu, b);
}

static void time_linear(void)
{
    const int64_t c = 3 * HEADS * 128;
    hx_buf u = normals(ROWS * c), y = bytes_of((size_t)(ROWS * c) * 4),
           w = normals(c * 4), state = bytes_of((size_t)(3 * c) * 4),
           pend = bytes_of((size_t)(HX_PEND_MAX * c) * 4), a_log = normals(HEADS),
           dt = normals(c / 3), norm = normals(128);

    line("conv_short", 34, [&] {
        const hx_conv_short_args a = { y, u, w, state, pend, rows_of(), c, 4, false };
        MUST(hx_op_conv_short(gpu, &a, &err));
    });
    line("kda_gate", 34, [&] {
        const hx_kda_gate_args a = { y, u, u, u, a_log, dt, ROWS, HEADS, 128, -5 };
        hx_kda_gate_args b = a;
        b.beta = hx_buf_at(y, (size_t)(ROWS * c / 3) * 4);
        MUST(hx_op_kda_gate(gpu, &b, &err));
    });
    line("kda_out", 34, [&] {
        const hx_kda_out_args a = { y, y, u, norm, ROWS, HEADS, 128, 1e-5f };
        MUST(hx_op_kda_out(gpu, &a, &err));
    });
    for (hx_buf *b : { &u, &y, &w, &state, &pend, &a_log, &dt, &norm })
        hx_dev_free(gpu, b);
    kda x({ whole }, HEADS, 128, 0.5f, 0);
    line("kda_chunk", 34, [&] { MUST(hx_op_kda_chunk(gpu, &x.a, &err)); });
    x.drop();
}

static void time_latents(void)
{
    const int64_t seen = CTX / 4, k = 512;
    pages latent(512, 1), pool(128, 4);
    hx_buf q = normals((int64_t)ROWS * HEADS * 512, 0.05f),
           z = bytes_of((size_t)ROWS * HEADS * 512 * 4);
    hx_buf w = bf16s(32768 * 512, 0.02f), iq = normals((int64_t)ROWS * 32 * 128),
           iw = normals(ROWS * 32), score = bytes_of((size_t)(ROWS * seen) * 4),
           pick = bytes_of(ROWS * k * 4), n_pick = bytes_of(ROWS * 4);
    const hx_mat m = mat_of(HX_FMT_BF16, 32768, 512, w.p);

    line("head_matmul, absorbed q", 11, [&] {
        hx_head_matmul_args a = { z, q, &m, ROWS, HEADS, 256, 512, 0, true, true };
        MUST(hx_op_head_matmul(gpu, &a, &err));
    });
    line("head_matmul, values", 11, [&] {
        hx_head_matmul_args a = { z, q, &m, ROWS, HEADS, 256, 512, 256, false, true };
        MUST(hx_op_head_matmul(gpu, &a, &err));
    });
    const double plain = ms_of(
        [&] {
            hx_head_matmul_args a = { z, q, &m, ROWS, HEADS, 256, 512, 0, true, false };
            MUST(hx_op_head_matmul(gpu, &a, &err));
        },
        1);
    printf("  (head_matmul, absorbed, of decode rows: %.1f ms)\n", plain);
    line("latent_append", 11, [&] {
        const hx_latent_append_args a = { q, 512, latent.p, rows_of() };
        MUST(hx_op_latent_append(gpu, &a, &err));
    });
    line("index_score", 11, [&] {
        const hx_index_score_args a = { score, iq, iw,   pool.p, rows_of(),
                                        32,    4,  seen, 0.088f, 0.18f };
        MUST(hx_op_index_score(gpu, &a, &err));
    });
    line("topk", 11, [&] {
        const hx_topk_args a = { pick, n_pick, score, rows_of(), k, 4, seen };
        MUST(hx_op_topk(gpu, &a, &err));
    });
    line("mla_attend, sparse", 11, [&] {
        const hx_mla_attend_args a = { z,     q, pick, n_pick,    latent.p, rows_of(),
                                       HEADS, k, 4,    1.0f / 16, true };
        MUST(hx_op_mla_attend(gpu, &a, &err));
    });
    const double exact = ms_of(
        [&] {
            const hx_mla_attend_args a = { z,     q, pick, n_pick,    latent.p, rows_of(),
                                           HEADS, k, 4,    1.0f / 16, false };
            MUST(hx_op_mla_attend(gpu, &a, &err));
        },
        1);
    printf("  (mla_attend of decode rows: %.1f ms)\n", exact);
    for (hx_buf *b : { &q, &z, &w, &iq, &iw, &score, &pick, &n_pick })
        hx_dev_free(gpu, b);
    latent.drop();
    pool.drop();
}

static void time_experts(void)
{
    const int64_t n = (int64_t)ROWS * 8;
    hx_buf x = normals((int64_t)ROWS * D), part = normals(n * D), weight = normals(n),
           id = bytes_of(n * 4), bias = normals(288, 0.1f),
           score = bytes_of(ROWS * 288 * 4), w = bf16s(288 * D, 0.02f),
           f = normals((int64_t)ROWS * 12288);
    const hx_mat m = mat_of(HX_FMT_BF16, 288, D, w.p);

    line("router", 42, [&] {
        const hx_router_args a = { id, weight, x, bias, score, &m, ROWS, 8, 2.5f };
        MUST(hx_op_router(gpu, &a, &err));
    });
    line("combine", 42, [&] {
        hx_combine_args a = {};
        a.y = a.base = x;
        a.part = part;
        a.weight = weight;
        a.rows = ROWS;
        a.active = 8;
        a.dim = D;
        MUST(hx_op_combine(gpu, &a, &err));
    });
    line("swiglu, 2,048 wide", 42, [&] {
        const hx_swiglu_args a = { f,    f,    hx_buf_at(f, (size_t)ROWS * 2048 * 4),
                                   ROWS, 2048, 10 };
        MUST(hx_op_swiglu(gpu, &a, &err));
    });
    for (hx_buf *b : { &x, &part, &weight, &id, &bias, &score, &w, &f })
        hx_dev_free(gpu, b);
}

int main(int argc, char **argv)
{
    hx_dev_opt opt = {};

    argc_ = argc;
    argv_ = argv;
    opt.name = "ref";
    opt.limits = hx_dev_limits { 4096, 1024, 1024, 8, 8, HEADS, 4096 };
    MUST(hx_dev_open(&ref, &opt, &err));
    opt.name = "cuda";
    opt.limits = hx_dev_limits { ROWS, 16384, 24576, 8, 288, HEADS, CTX };
    MUST(hx_dev_open(&gpu, &opt, &err));
    if (wanted("small")) { /* for compute-sanitizer */
        check_kda("small", { { 1, 0, 70, 30, 1 }, { 0, 70, 64, 64, 0 } }, 2, 128, 1, 0);
        check_heads("small", HX_FMT_BF16, 9, 4, 128, 128, 256, 0, true);
        check_mla("small", { { 0, 0, 4, 301, 0 } }, 64, 512, 16, 2);
    }
    if (wanted("profile")) { /* for ncu */
        check_kda("profile", { { 0, 0, 1536, 64, 0 } }, 64, 128, 0.5f, 0.2f);
        check_mla("profile", { { 0, 0, 528, 24001, 0 } }, 64, 512, 512, 2);
    }
    if (wanted("check") || wanted("kda"))
        check_kdas();
    if (wanted("check")) {
        check_mlas();
        check_head_all();
        check_mix(4, 4096, 1003, HX_FMT_F32);
        check_mix(4, 1000, 300, HX_FMT_BF16);
        check_mix(3, 200, 257, HX_FMT_F32);
        check_mix(8, 512, 259, HX_FMT_F32);
        check_plain(HX_FMT_BF16, 1003, 288, 4096);
        check_plain(HX_FMT_F32, 700, 411, 1000);
        check_plain(HX_FMT_BF16, 8192, 64, 7936);
    }
    if (wanted("time") || wanted("kda")) {
        time_kda(64, 1);
        time_kda(512, 1);
        time_kda(2048, 1);
        time_kda(8192, 1);
        time_kda(8192, 8);
    }
    if (wanted("time")) {
        time_streams();
        time_linear();
        time_latents();
        time_experts();
        printf("%-28s %28.1f ms\n", "all of these", total);
    }
    hx_dev_close(gpu);
    hx_dev_close(ref);
    return 0;
}
