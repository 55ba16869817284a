/* cuda_encode.cu - the EXL3 encoder on a GPU against the one on the host, which
 * exl3_encode_test compares with others: the states of single tiles at every rate and
 * codebook, and whole matrices, byte for byte (check); how long full-size matrices take
 * (time), and what they take it for (profile). Prints "ok NAME" or "not ok NAME". No
 * arguments: check and time. Built by tests/gpu.sh. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <vector>

#include "dev/cuda_dev.h"
#include "dev/enc_ops.h"

static hx_err err;
static hx_dev *gpu;
static hx_pool *pool;
static int bad;

#define MUST(call)                                                                       \
    do {                                                                                 \
        if ((call) != 0) {                                                               \
            printf("not ok %s: %s (line %d)\n", #call, err.msg, __LINE__);               \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

static void result(bool ok, const char *name)
{
    printf("%s %s\n", ok ? "ok" : "not ok", name);
    bad += !ok;
}

/* ---- tiles ------------------------------------------------------------------- */

/* small: as on a card whose multiprocessors have 99 KiB of shared memory. */
static void check_tiles(bool small)
{
    enum { N = 6 };
    static const int rates[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };
    static const char *const name[HX_N_CB] = { "3inst", "mcg", "mul1" };
    static float target[N][256], value[2][N][256];
    static uint16_t state[2][N][256];
    size_t *const shared = &hx_cuda_of(gpu)->gpu.block_bytes;
    const size_t all = *shared;
    char text[64];

    *shared = small ? HX_MIN(all, (size_t)99 << 10) : all;
    for (int cb = 0; cb < HX_N_CB; cb++)
        for (int k2 : rates) {
            if (!hx_trellis_takes((hx_codebook)cb, k2))
                continue;
            for (int i = 0; i < N * 256; i++)
                (&target[0][0])[i] = (i / 256 == N - 1 ? 2.5f : 0.9f) *
                                     (float)hx_rng_normal((uint64_t)k2, (uint64_t)i);
            for (int on = 0; on < 2; on++) {
                hx_enc e = {};

                e.codebook = (hx_codebook)cb;
                e.k2 = k2;
                e.n = e.k = 128;
                MUST(hx_enc_open(&e, pool, on != 0 ? gpu : NULL, &err));
                MUST(e.ops->search(&e, target, N, state[on], value[on], &err));
                hx_enc_close(&e);
            }
            snprintf(text, sizeof text, "tiles_%s_%g%s", name[cb], k2 / 2.0,
                     small ? "_small" : "");
            result(memcmp(state[0], state[1], sizeof state[0]) == 0 &&
                       memcmp(value[0], value[1], sizeof value[0]) == 0,
                   text);
        }
    *shared = all;
}

/* ---- matrices ---------------------------------------------------------------- */

struct matrix {
    std::vector<float> w, h;
    std::vector<uint16_t> trellis, suh, svh;
    hx_exl3_job job;
    hx_exl3_out out;
};

/* Normal weights, some inputs and outputs larger, one of each 0; the Hessian is that of
 * inputs with a common part. */
static matrix make(int64_t n, int64_t k, int k2, hx_codebook cb, bool hessian)
{
    const int64_t n_pad = HX_EXL3_PAD(n), k_pad = HX_EXL3_PAD(k);
    matrix m;

    m.w.resize((size_t)(n * k));
    for (int64_t i = 0; i < n * k; i++) {
        uint64_t x = hx_rng_at(5, (uint64_t)i);
        float sum = -4;

        for (int b = 0; b < 4; b++, x >>= 16)
            sum += (float)(x & 0xFFFF) / 32768; /* of four: near enough to normal */
        m.w[(size_t)i] = i / k == 3 || i % k == 7 ? 0 : .02f * sum * (i % k % 5 ? 1 : 3);
    }
    m.h.resize(hessian ? (size_t)(k_pad * k_pad) : 0);
    for (int64_t i = 0; hessian && i < k; i++)
        for (int64_t j = 0; j < k; j++)
            m.h[(size_t)(i * k_pad + j)] = (i == j ? 1.0f + (float)(i % 3) : 0) +
                                           .6f * (float)(1 + i % 2) * (float)(1 + j % 2) *
                                               expf(-(float)llabs(i - j) / 40);
    m.trellis.resize((size_t)(n_pad * k_pad / 32 * k2));
    m.suh.resize((size_t)k_pad);
    m.svh.resize((size_t)n_pad);
    memset(&m.job, 0, sizeof m.job);
    m.job.n = n;
    m.job.k = k;
    m.job.k2 = k2;
    m.job.codebook = cb;
    m.job.seed = 11;
    return m;
}

static double encode(matrix &m, hx_dev *dev)
{
    const int64_t from = hx_now_us();

    m.job.w = m.w.data();
    m.job.h = m.h.empty() ? NULL : m.h.data();
    m.job.dev = dev;
    m.out.trellis = m.trellis.data();
    m.out.suh = m.suh.data();
    m.out.svh = m.svh.data();
    MUST(hx_exl3_encode(&m.job, pool, &m.out, &err));
    return (double)(hx_now_us() - from) / 1e6;
}

/* Prints how far apart they are where they differ. */
static bool same(const matrix &a, const matrix &b)
{
    size_t n = 0;

    for (size_t i = 0; i < a.trellis.size(); i++)
        n += a.trellis[i] != b.trellis[i];
    if (n == 0 && a.suh == b.suh && a.svh == b.svh && a.out.proxy == b.out.proxy &&
        a.out.mse == b.out.mse)
        return true;
    printf("%zu of %zu words differ; suh %d svh %d; gain %g %g; error %.9g %.9g, "
           "weighted %.9g %.9g\n",
           n, a.trellis.size(), a.suh == b.suh, a.svh == b.svh, a.out.gain, b.out.gain,
           a.out.mse, b.out.mse, a.out.proxy, b.out.proxy);
    return false;
}

static void check_matrix(int64_t n, int64_t k, int k2, hx_codebook cb, bool hessian)
{
    matrix a = make(n, k, k2, cb, hessian), b = make(n, k, k2, cb, hessian);
    const double cpu = encode(a, NULL), on_gpu = encode(b, gpu);
    char text[80];

    snprintf(text, sizeof text, "matrix_%lldx%lld_%g%s: %.3f s, host %.2f s",
             (long long)n, (long long)k, k2 / 2.0, hessian ? "_hessian" : "", on_gpu,
             cpu);
    result(same(a, b), text);
}

static void check_matrices(void)
{
    check_matrix(128, 128, 16, HX_CB_MUL1, false);
    check_matrix(200, 136, 8, HX_CB_MCG, true);
    check_matrix(384, 512, 5, HX_CB_MUL1, true);
    check_matrix(512, 640, 6, HX_CB_3INST, true);
    check_matrix(128, 256, 2, HX_CB_MUL1, true);
    check_matrix(4096, 256, 10, HX_CB_MUL1, true); /* more tiles than multiprocessors */

    matrix zero = make(128, 128, 8, HX_CB_MUL1, false), inf = zero;

    std::fill(zero.w.begin(), zero.w.end(), 0.0f);
    encode(zero, gpu);
    result(zero.out.mse == 0 && zero.suh[0] == 0, "matrix_of_zeros");
    inf.w[5] = INFINITY;
    inf.job.w = inf.w.data();
    inf.job.dev = gpu;
    inf.out.trellis = inf.trellis.data();
    inf.out.suh = inf.suh.data();
    inf.out.svh = inf.svh.data();
    result(hx_exl3_encode(&inf.job, pool, &inf.out, &err) == HX_EARG &&
               strstr(err.msg, "[0, 5] is not finite") != NULL,
           "matrix_not_finite");
}

/* ---- time -------------------------------------------------------------------- */

static void time_matrices(void)
{
    static const int64_t shape[][2] = { { 4096, 2048 }, { 2048, 4096 } };

    for (auto &s : shape)
        for (int k2 : { 4, 6, 8 }) {
            matrix m = make(s[0], s[1], k2, HX_CB_MUL1, true);
            double best = 1e9, first = 0;

            for (int i = 0; i < 3; i++) {
                const double t = encode(m, gpu);

                first = i == 0 ? t : first;
                best = HX_MIN(best, t);
            }
            printf("%lld x %lld at %d bits: %.3f s (first %.3f), error %.5f\n",
                   (long long)s[0], (long long)s[1], k2 / 2, best, first, m.out.mse);
            if (k2 == 6)
                result(best < 0.25, "under_a_quarter_second");
        }
}

/* ---- profile: every operation waited for ------------------------------------- */

static hx_enc_ops timed;
static double spent[32];

struct stopwatch {
    int at;
    int64_t from;

    explicit stopwatch(int i) : at(i)
    {
        cudaDeviceSynchronize();
        from = hx_now_us();
    }
    ~stopwatch()
    {
        cudaDeviceSynchronize();
        spent[at] += (double)(hx_now_us() - from) / 1e3;
    }
};

template <int I, auto OP, typename F> struct timing;
template <int I, auto OP, typename R, typename... A> struct timing<I, OP, R (*)(A...)> {
    static R call(A... a)
    {
        stopwatch w(I);

        return (hx_cuda_encode.*OP)(a...);
    }
};

/* clang-format off */
#define PROFILED(X)                                                                      \
    X(0, open) X(1, alloc) X(2, free) X(3, put) X(4, zero) X(5, transpose) X(6, scale)   \
    X(7, subtract) X(8, times) X(9, get_diag) X(10, put_diag) X(11, dot_rows)            \
    X(12, dot_columns) X(13, rotate_right) X(14, rotate_left) X(15, mul) X(16, gram)     \
    X(17, factor) X(18, solve) X(19, normalise) X(20, tiles) X(21, search) X(22, feed)   \
    X(23, close) X(24, get) X(25, copy)
/* clang-format on */

static void profile(void)
{
    matrix m = make(2048, 4096, 6, HX_CB_MUL1, true);
    hx_dev_ops ops = *gpu->ops;
    hx_dev_link link = *ops.link;
    hx_dev dev = *gpu;

#define X(i, op) timed.op = timing<i, &hx_enc_ops::op, decltype(hx_enc_ops::op)>::call;
    PROFILED(X)
#undef X
    link.encode = &timed;
    ops.link = &link;
    dev.ops = &ops;
    encode(m, &dev);
    memset(spent, 0, sizeof spent);
    printf("2048 x 4096 at 3 bits, waiting after each operation: %.3f s; ms:",
           encode(m, &dev));
#define X(i, op) printf(" " #op " %.1f", spent[i]);
    PROFILED(X)
#undef X
    printf("\n");
}

static bool wanted(int argc, char **argv, const char *name, bool by_default)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc == 1 && by_default;
}

int main(int argc, char **argv)
{
    hx_dev_opt opt = {};

    opt.name = "cuda";
    MUST(hx_dev_open(&gpu, &opt, &err));
    MUST(hx_pool_open(&pool, hx_sys_n_cpu(), NULL, &err));
    if (wanted(argc, argv, "check", true)) {
        check_tiles(false);
        check_tiles(true);
        check_matrices();
    }
    if (wanted(argc, argv, "time", true))
        time_matrices();
    if (wanted(argc, argv, "profile", false))
        profile();
    if (wanted(argc, argv, "full", false))
        check_matrix(2048, 2048, 6, HX_CB_MUL1, true);
    hx_pool_close(pool);
    hx_dev_close(gpu);
    return bad != 0;
}
