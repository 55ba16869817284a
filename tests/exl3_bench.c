/* exl3_bench.c - speed of the CPU products: G weights/s (each weight counted once
 * whatever the number of rows) per rate, codebook, instruction set and rows on one
 * thread, from matrices that together exceed the caches; then the moe operation at the
 * shape of GLM-5.3-Flash with all threads. Not a test. Run: exl3_bench [isa] */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "dev/dev.h"

enum { K = 4096, N = 2048, SET_BYTES = 160 << 20, MAX_ROWS = 512 };

/* One thread is timed by its own clock, so that a busy machine does not spoil the
 * figures. */
static double now(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One block of random memory stands for all matrices; scales of about 1 in fp16. */
typedef struct {
    uint8_t *bytes;
    uint16_t *scale;
    float *x, *y;
    size_t n;
} memory;

static hx_mat matrix(const memory *mem, hx_fmt fmt, int64_t n, int64_t k, int k2,
                     hx_codebook cb, size_t *at)
{
    hx_mat m = { .fmt = fmt,
                 .n = n,
                 .k = k,
                 .n_pad = n,
                 .k_pad = k,
                 .k2 = k2,
                 .codebook = cb,
                 .suh = mem->scale,
                 .svh = mem->scale };
    const size_t bytes =
        fmt == HX_FMT_EXL3 ? (size_t)(n * k / 16 * k2) : (size_t)(n * k * 2);

    if (*at + bytes > mem->n)
        *at = 0;
    m.w = mem->bytes + *at;
    *at += bytes;
    return m;
}

/* Weights per nanosecond. */
static double matmul_speed(hx_dev *d, const memory *mem, hx_fmt fmt, int k2,
                           hx_codebook cb, int64_t rows)
{
    size_t at = 0;
    double t0 = 0, t = 0;
    int64_t n = -2; /* the first two warm up */

    for (; n < 4 || t - t0 < 0.35; n++) {
        const hx_mat m = matrix(mem, fmt, N, K, k2, cb, &at);
        const hx_matmul_args a = { .y = { mem->y, (size_t)rows * N * 4 },
                                   .x = { mem->x, (size_t)rows * K * 4 },
                                   .w = &m,
                                   .rows = rows,
                                   .ldx = K,
                                   .ldy = N };

        if (n == 0)
            t0 = now(CLOCK_THREAD_CPUTIME_ID);
        if (hx_op_matmul(d, &a, NULL) != 0)
            return 0;
        t = now(CLOCK_THREAD_CPUTIME_ID);
    }
    return (double)n * K * N / (t - t0) * 1e-9;
}

static void print_rates(hx_dev *d, const memory *mem)
{
    static const struct {
        const char *name;
        hx_fmt fmt;
        hx_codebook cb;
        int k2;
    } kind[] = {
        { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 2 },  { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 3 },
        { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 4 },  { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 5 },
        { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 6 },  { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 7 },
        { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 8 },  { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 10 },
        { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 12 }, { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 14 },
        { "mul1", HX_FMT_EXL3, HX_CB_MUL1, 16 }, { "mcg", HX_FMT_EXL3, HX_CB_MCG, 6 },
        { "mcg", HX_FMT_EXL3, HX_CB_MCG, 8 },    { "3inst", HX_FMT_EXL3, HX_CB_3INST, 8 },
        { "bf16", HX_FMT_BF16, 0, 32 },
    };
    static const int64_t rows[] = { 1, 2, 4, 8, 64 };

    printf(
        "%s, one thread, [%d, %d], G weights/s at 1, 2, 4, 8 rows; G products/s at 64\n",
        d->isa, N, K);
    for (size_t i = 0; i < HX_LEN(kind); i++) {
        printf("  %-5s %3.1f bits ", kind[i].name, kind[i].k2 / 2.0);
        for (size_t j = 0; j < HX_LEN(rows); j++) {
            printf(" %6.2f",
                   matmul_speed(d, mem, kind[i].fmt, kind[i].k2, kind[i].cb, rows[j]) *
                       (rows[j] == 64 ? 64.0 : 1.0));
            fflush(stdout);
        }
        printf("\n");
    }
}

static void print_moe(hx_dev *d, const memory *mem, int k2, hx_codebook cb, int64_t rows)
{
    enum { ACTIVE = 8, EXPERTS = 32 };
    hx_expert e[EXPERTS];
    static int32_t id[MAX_ROWS * ACTIVE];
    size_t at = 0;
    double t0 = 0, t = 0;
    int64_t n = -1;

    for (int i = 0; i < EXPERTS; i++)
        e[i] = (hx_expert) { matrix(mem, HX_FMT_EXL3, N, K, k2, cb, &at),
                             matrix(mem, HX_FMT_EXL3, N, K, k2, cb, &at),
                             matrix(mem, HX_FMT_EXL3, K, N, k2, cb, &at) };
    for (; n < 2 || t - t0 < 1; n++) {
        const hx_moe_args a = { .y = { mem->y, (size_t)rows * ACTIVE * K * 4 },
                                .x = { mem->x, (size_t)rows * K * 4 },
                                .id = { id, (size_t)rows * ACTIVE * 4 },
                                .expert = e,
                                .n_expert = EXPERTS,
                                .rows = rows,
                                .active = ACTIVE,
                                .limit = 10 };

        for (int64_t i = 0; i < rows * ACTIVE; i++)
            id[i] = (int32_t)((i + n * ACTIVE + (i / ACTIVE) * 5) % EXPERTS);
        if (n == 0)
            t0 = now(CLOCK_MONOTONIC);
        if (hx_op_moe(d, &a, NULL) != 0)
            return;
        t = now(CLOCK_MONOTONIC);
    }
    const double us = (t - t0) / (double)n * 1e6;
    printf("  moe %s %.1f bits, 8 experts of [%d, %d], %d rows: %.0f us, %.1f G "
           "products/s\n",
           cb == HX_CB_MCG ? "mcg" : "mul1", k2 / 2.0, N, K, (int)rows, us,
           (double)(rows * ACTIVE) * 3 * K * N / us * 1e-3);
}

int main(int argc, char **argv)
{
    static const char *const isas[] = { "scalar", "avx2", "avx512" };
    memory mem = { .n = SET_BYTES };
    const hx_dev_limits l = {
        .max_rows = MAX_ROWS, .max_k = K, .max_n = K, .max_active = 8, .max_expert = 32
    };
    hx_err err;

    mem.bytes = hx_map(SET_BYTES, true);
    mem.scale = hx_alloc(K * 2);
    mem.x = hx_alloc((size_t)MAX_ROWS * K * 4);
    mem.y = hx_map((size_t)MAX_ROWS * 8 * K * 4, true);
    if (mem.bytes == NULL || mem.scale == NULL || mem.x == NULL || mem.y == NULL)
        return 1;
    for (size_t i = 0; i < mem.n / 8; i++) {
        const uint64_t v = hx_rng_at(1, i);

        memcpy(mem.bytes + 8 * i, &v, 8);
    }
    for (int i = 0; i < K; i++)
        mem.scale[i] = 0x3C00;
    for (int i = 0; i < MAX_ROWS * K; i++)
        mem.x[i] = (float)hx_rng_unit(2, (uint64_t)i) - 0.5f;
    for (size_t i = 1; i < HX_LEN(isas); i++) {
        hx_dev *d;

        if ((argc > 1 && strcmp(argv[1], isas[i]) != 0))
            continue;
        if (hx_dev_open(&d, &(hx_dev_opt) { "cpu", isas[i], NULL, 1, l }, &err) != 0) {
            printf("%s\n", err.msg);
            continue;
        }
        print_rates(d, &mem);
        hx_dev_close(d);
        if (hx_dev_open(&d, &(hx_dev_opt) { "cpu", isas[i], NULL, 0, l }, &err) != 0)
            continue;
        printf("%s\n", d->text);
        print_moe(d, &mem, 6, HX_CB_MUL1, 1);
        print_moe(d, &mem, 8, HX_CB_MUL1, 1);
        print_moe(d, &mem, 8, HX_CB_MCG, 1);
        print_moe(d, &mem, 6, HX_CB_MUL1, 4);
        print_moe(d, &mem, 6, HX_CB_MUL1, 512);
        hx_dev_close(d);
    }
    hx_unmap(mem.bytes, SET_BYTES);
    hx_unmap(mem.y, (size_t)MAX_ROWS * 8 * K * 4);
    hx_free(mem.scale);
    hx_free(mem.x);
    return 0;
}
