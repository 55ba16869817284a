/* canon.h - the canonical arithmetic: what a product with a weight matrix and a routed
 * expert give, bit for bit, whatever the backend, the instruction set and the number of
 * rows. One text for C and CUDA: the backends and their tests include it. It must never
 * depend on more than <math.h> and IEEE single precision: compile with -ffp-contract=off
 * (nvcc --fmad=false), without fast-math or flush-to-zero.
 *
 * EXL3, y = W x for one row of k_pad inputs (0 past k) and n_pad outputs, with
 * P = H128 / sqrt(128) on each aligned group of 128:
 *
 * 1. xr = P (x * suh): fp32 product, butterflies (a, b) -> (a + b, a - b) at distances
 *    1, 2, 4 ... 64, then * HX_CANON_ROOT.
 * 2. Per block of 128 inputs: m = max |xr|, q = m / 32385, a = rint(xr * (32385 / m));
 *    a = q = 0 where m = 0. 32385 = 254 * 127 + 127, so a = 254 i + j with both planes in
 *    -127 ... 127: a CPU multiplies a as int16, a GPU the planes as int8. A = sum of a.
 *    With a NaN or an infinity among the inputs q is NaN or infinite: it cannot get lost.
 * 3. Integer weights w. MUL1: byte sum - 512, weight = k_inv w + 0.01171875, exactly.
 *    MCG, 3INST: weight = w / 8192, exactly. Sums over a block are exact in int32 in any
 *    order. MUL1: I = sum a w (32385 * 512 * 128 < 2^31); the others: Ii = sum i w,
 *    Ij = sum j w.
 * 4. Term of a block. MUL1: t = fma(I, k_inv, 0.01171875 A) q;
 *    the others: t = fma(254, Ii, Ij) (q 2^-13).
 * 5. The terms of an output join in a balanced tree: neighbours, level by level; an odd
 *    last one moves up. So a power of two of blocks, aligned, is a subtree.
 * 6. y = (P yr) * svh (+ bias), P as in 1.
 *
 * F32, F16, BF16, FP8: weights widened to fp32 (FP8: value * scale, one rounding). Per
 * block of 128 inputs (0 past k, and these take part) lane l of 8 sums the inputs
 * 8 t + l, t = 0 ... 15, with fma from 0; lanes join as in hx_canon_lanes(), blocks as in
 * 5; + bias. Transposed (head_matmul): fma over the rows of W in ascending order from 0,
 * in blocks of 128 rows that join as in 5.
 *
 * Expert: h = silu(min(g, L)) * clamp(u, -L, L), then down. */
#ifndef HX_CANON_H
#define HX_CANON_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define HX_HD static __host__ __device__ inline
#else
#define HX_HD static inline
#endif

enum { HX_CANON_BLOCK = 128, HX_CANON_AMAX = 32385 };

#define HX_CANON_ROOT  0.088388347648f      /* 1 / sqrt(128) */
#define HX_CANON_K_INV 0.00676727294921875f /* fp16 0x1EEE */
#define HX_CANON_C2    0.01171875f          /* 1024 k_inv - 10.3828125 + 512 k_inv */
#define HX_CANON_UNIT  0x1p-13f             /* of an MCG or 3INST weight */

HX_HD uint32_t hx_bits_of(float x)
{
    uint32_t u;

    memcpy(&u, &x, sizeof(u));
    return u;
}

HX_HD float hx_float_of(uint32_t u)
{
    float x;

    memcpy(&x, &u, sizeof(x));
    return x;
}

/* ---- steps 1 and 6: the rotation ------------------------------------- */

HX_HD void hx_canon_rotate(float v[128])
{
    for (int w = 1; w < 128; w *= 2)
        for (int i = 0; i < 128; i += 2 * w)
            for (int j = i; j < i + w; j++) {
                const float a = v[j], b = v[j + w];

                v[j] = a + b;
                v[j + w] = a - b;
            }
    for (int i = 0; i < 128; i++)
        v[i] *= HX_CANON_ROOT;
}

/* ---- step 2: activations --------------------------------------------- */

/* Quantises one block and returns A. The maximum is taken over the bits, where a NaN is
 * largest; the comparisons send a NaN to AMAX, as minps and fminf do. */
HX_HD int32_t hx_canon_quantize(const float xr[128], int16_t a[128], float *q)
{
    const float top = (float)HX_CANON_AMAX;
    const float shift = 12582912.0f; /* 1.5 * 2^23: the sum has no fraction */
    uint32_t peak = 0;
    int32_t sum = 0;

    for (int i = 0; i < 128; i++) {
        const uint32_t u = hx_bits_of(xr[i]) & 0x7FFFFFFFu;

        peak = u > peak ? u : peak;
    }
    const float m = hx_float_of(peak), inv = peak == 0 ? 0.0f : top / m;
    *q = m / top;
    for (int i = 0; i < 128; i++) {
        float v = xr[i] * inv;

        v = v < top ? v : top;
        v = v > -top ? v : -top;
        a[i] = (int16_t)(int32_t)(hx_bits_of(v + shift) - hx_bits_of(shift));
        sum += a[i];
    }
    return sum;
}

/* a = 254 i + j; a tie goes to the smaller |i|. */
HX_HD void hx_canon_planes(int a, int *i, int *j)
{
    const int b = a < 0 ? -a : a, n = (b + 126) / 254;

    *i = a < 0 ? -n : n;
    *j = a - 254 * *i;
}

/* ---- step 4: the term of a block ------------------------------------- */

HX_HD float hx_canon_term_mul1(int32_t sum, int32_t a_sum, float q)
{
    return fmaf((float)sum, HX_CANON_K_INV, HX_CANON_C2 * (float)a_sum) * q;
}

HX_HD float hx_canon_term_half(int32_t sum_i, int32_t sum_j, float q)
{
    return fmaf(254.0f, (float)sum_i, (float)sum_j) * (q * HX_CANON_UNIT);
}

/* ---- step 5: the tree ------------------------------------------------ */

/* Adds term b (called with b = 0, 1, 2, …). level: one float every stride for each bit
 * that the number of terms has; entry l holds a finished subtree of 2^l terms while bit l
 * of b is set. */
HX_HD void hx_canon_tree_add(float *level, int stride, uint32_t b, float t)
{
    for (; (b & 1) != 0; b >>= 1, level += stride)
        t = *level + t;
    *level = t;
}

/* The sum of n terms: what is left joins from the right. */
HX_HD float hx_canon_tree_sum(const float *level, int stride, uint32_t n)
{
    float t = 0;
    bool any = false;

    for (; n != 0; n >>= 1, level += stride)
        if ((n & 1) != 0) {
            t = any ? *level + t : *level;
            any = true;
        }
    return t;
}

/* ---- plain formats --------------------------------------------------- */

HX_HD float hx_canon_lanes(const float l[8])
{
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

/* Block of 128 inputs. */
HX_HD float hx_canon_dot(const float w[128], const float x[128])
{
    float l[8] = { 0 };

    for (int i = 0; i < 128; i++)
        l[i & 7] = fmaf(w[i], x[i], l[i & 7]);
    return hx_canon_lanes(l);
}

/* ---- the activation of an expert ------------------------------------- */

/* exp(x), saturating outside -87 … 88; relative error below 2^-23. x = n ln 2 + r, ln 2
 * in two parts (Cody and Waite 1980); a polynomial in r that is minimax from r^3 on; n is
 * added to the exponent. */
HX_HD float hx_canon_exp(float x)
{
    const float shift = 12582912.0f;

    x = x < 88.0f ? x : 88.0f;
    x = x > -87.0f ? x : -87.0f;
    const float z = fmaf(x, 1.44269504f, shift), n = z - shift;
    const float r = fmaf(n, -1.428606820e-06f, fmaf(n, -0x1.62e4p-1f, x));
    float p = 1.386375749e-3f;

    p = fmaf(p, r, 8.367509581e-3f);
    p = fmaf(p, r, 4.166723788e-2f);
    p = fmaf(p, r, 1.666653454e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return hx_float_of(hx_bits_of(p) + (hx_bits_of(z) << 23));
}

/* limit 0: no clamp. A NaN in g or u stays one. */
HX_HD float hx_canon_act(float g, float u, float limit)
{
    if (limit > 0) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
    }
    return g / (1.0f + hx_canon_exp(-g)) * u;
}

#endif
