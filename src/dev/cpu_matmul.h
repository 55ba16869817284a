/* cpu_matmul.h - the inner loops of cpu_matmul.c, one table per instruction set; shared
 * by cpu_matmul.c (plain C) and cpu_x86.c, nobody else includes it.
 *
 * All work on blocks of 128 inputs and 16 outputs: a kernel decodes the weights of such a
 * block into a buffer that stays in the first-level cache, another multiplies it with any
 * number of rows. What they compute is canon.h; every table gives the same bits. Buffers
 * of ours are 64-byte aligned, what comes from a file is not. */
#ifndef HX_CPU_MATMUL_H
#define HX_CPU_MATMUL_H

#include "dev/canon.h"
#include "dev/cpu.h"

enum {
    HX_MM_BLOCK = HX_CANON_BLOCK, /* inputs */
    HX_MM_COLS = 16,              /* outputs */
    HX_MM_WIDE = 32               /* outputs of a transposed product */
};

/* One row's activations for a block of an EXL3 matrix. a: by tile row, and there in the
 * order in which a tile holds the 16 weights of one output: 2q, 2q + 1, 2q + 8, 2q + 9
 * for q = 0 … 3. MUL1: a in a[0], and a[1] is not there (HX_MM_MUL1_BYTES); MCG, 3INST:
 * planes i and j. */
typedef struct {
    float q;
    int32_t sum;
    int32_t unused[14];
    int16_t a[2][HX_MM_BLOCK];
} hx_mm_exl3;

#define HX_MM_EXL3_BYTES  sizeof(hx_mm_exl3)
#define HX_MM_MUL1_BYTES  offsetof(hx_mm_exl3, a[1])
#define HX_MM_PLAIN_BYTES ((size_t)HX_MM_BLOCK * sizeof(float))

/* Multiplies one decoded block with n_row rows and adds the terms of each row, one per
 * output, to its trees. */
typedef struct {
    /* EXL3: int16 [8 tile rows][16 outputs][16], the byte sum for MUL1, else the integer
     * weight; plain: f32 [16 outputs][128]; transposed: f32 [n_in][32 outputs] */
    const void *w;
    const uint8_t *x; /* block of row 0: hx_mm_exl3, or f32 [128] */
    size_t x_step;    /* bytes from row to row */
    int n_row;
    bool mul1;
    uint32_t block;   /* number of the block, from 0 */
    float *tree;      /* f32 [levels][outputs] of row 0 */
    size_t tree_step; /* floats from row to row */
} hx_mm_sum;

typedef struct {
    /* Rotates and quantises x [128]. */
    void (*quantize)(const float *x, const void *suh, bool mul1, hx_mm_exl3 *out);
    /* 8 tiles, row_bytes apart, into int16 w [8][16][16]. */
    void (*decode)(const uint8_t *tile, size_t row_bytes, int k2, hx_codebook codebook,
                   int16_t *w);
    void (*sum_exl3)(const hx_mm_sum *s);
    /* Both at once for one row of MUL1, whose weights stay in registers. NULL: one after
     * the other. Asks for the tiles that lie ahead bytes further on. */
    void (*one_mul1)(const hx_mm_sum *s, const uint8_t *tile, size_t row_bytes, int k2,
                     size_t ahead);
    /* y [128] = (P y) * svh */
    void (*rotate)(float *y, const void *svh);

    /* n plain weights times scale (1 but for FP8) */
    void (*widen)(float *out, const void *in, hx_fmt fmt, float scale, int n);
    void (*sum_plain)(const hx_mm_sum *s);
    /* sum_plain() straight from BF16 outputs out_bytes apart, 128 inputs each; for few
     * rows, where widening first would cost more than the product. NULL: widen */
    void (*sum_bf16)(const hx_mm_sum *s, size_t out_bytes);
    /* Transposed: fma over the inputs in order */
    void (*sum_columns)(const hx_mm_sum *s, int n_in);

    /* h [128] = hx_canon_act(g, u, limit) */
    void (*act)(float *h, const float *g, const float *u, float limit);
} hx_mm_kernels;

extern const hx_mm_kernels hx_mm_scalar;
#if defined(__x86_64__)
extern const hx_mm_kernels hx_mm_avx2, hx_mm_avx512;
#endif

#endif
