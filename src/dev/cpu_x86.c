/* cpu_x86.c - the kernels of cpu_matmul.h with AVX2 + FMA + F16C, and those that gain from it with
 * AVX-512 (F, BW, VL, DQ, VBMI, VNNI). Called through hx_mm_avx2 and hx_mm_avx512 only when
 * hx_cpu_has() says so; empty on other machines. Same bits as the plain C.
 *
 * How a tile is decoded. Its 256 weights come from 256 overlapping 16-bit windows of a bit
 * stream; 16 windows in a row (stream positions 32 c + 4 h + 8 q + j) are the weights of one
 * output c + 8 h. States are kept as 16-bit lanes in stream order, so that one vector of
 * activations serves all outputs of a tile row. A shuffle brings the bytes that hold two
 * windows (AVX-512: the windows of a lane) into a register lane, shifts cut them out. The 32-bit
 * product of a state comes from 16-bit multiplications as low and high halves. Everything
 * that depends on the rate alone is folded into constants: each rate has its own copy of
 * the loop, made by inlining with a constant k2. */
#include "dev/cpu_matmul.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "dev/fmt_exl3.h"
#include "dev/fmt_fp8.h"

#define AVX2   __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,"   \
                                     "avx2,fma,f16c")))
#define FLAT   inline __attribute__((always_inline))

enum { BLOCK = HX_MM_BLOCK, COLS = HX_MM_COLS, WIDE = HX_MM_WIDE };

/* ---- geometry of the bit stream -------------------------------------- */

/* Pairs of stream positions (2 i, 2 i + 1) inside an output's part of 64 positions, that is 2 k2
 * bytes: pair i ends at bit (i + 1) k2, and its odd position owns (k2 + 1) / 2 bits. */
static FLAT int pair_end_byte(int k2, int i)
{
    return ((i + 1) * k2 + 7) >> 3;
}

static FLAT int pair_slack(int k2, int i)
{
    return 8 * pair_end_byte(k2, i) - (i + 1) * k2;
}

static FLAT int up4(int n)
{
    return (n + 3) & ~3;
}

/* ---- AVX2: a tile into states ---------------------------------------- */

/* Dword d of a vector holds pair d & 1 of stream lane d >> 1 of output c + 8 h: the pair
 * 4 (d >> 1) + 2 h + (d & 1) of output c's part. */
static FLAT int pair_of(int h, int d)
{
    return 4 * (d >> 1) + 2 * h + (d & 1);
}

/* Where the 16 bytes end from which half s (dwords 4 s …) takes its bits, counted from the start of
 * the output's part rounded down to a word; r is what was cut off (2 for odd outputs of
 * half rates). Up to 3 bits both halves share one source, up to 6 bits both h do. */
static FLAT int source_end(int k2, int r, int h, int s)
{
    if (k2 <= 6)
        return up4(r + 2 * k2);
    if (k2 <= 12)
        return up4(r + (s + 1) * k2);
    return up4(r + pair_end_byte(k2, pair_of(h, 4 * s + 3)));
}

/* 16 bytes of a tile from byte at, which may lie up to 12 bytes before it: a ring. */
static FLAT AVX2 __m128i load_ring(const uint8_t *tile, int bytes, int at)
{
    const __m128i *first = (const void *)tile, *last = (const void *)(tile + bytes - 16);

    switch (at) {
    case -4:
        return _mm_alignr_epi8(_mm_loadu_si128(first), _mm_loadu_si128(last), 12);
    case -8:
        return _mm_alignr_epi8(_mm_loadu_si128(first), _mm_loadu_si128(last), 8);
    case -12:
        return _mm_alignr_epi8(_mm_loadu_si128(first), _mm_loadu_si128(last), 4);
    default:
        return _mm_loadu_si128((const void *)(tile + at));
    }
}

/* The bytes of each pair, as a big-endian number that ends with the pair's last byte. */
static FLAT AVX2 __m256i pair_bytes(int k2, int r, int h)
{
#define B(d, b)                                                                          \
    (char)(((r + pair_end_byte(k2, pair_of(h, d)) - 1 - (b)) ^ 3) -                      \
           (source_end(k2, r, h, (d) / 4) - 16))
#define D(d) B(d, 0), B(d, 1), B(d, 2), B(d, 3)
    return _mm256_setr_epi8(D(0), D(1), D(2), D(3), D(4), D(5), D(6), D(7));
#undef D
#undef B
}

static FLAT AVX2 __m256i pair_shifts(int k2, int h, int base, int sign)
{
#define S(d) base + sign *pair_slack(k2, pair_of(h, d))
    return _mm256_setr_epi32(S(0), S(1), S(2), S(3), S(4), S(5), S(6), S(7));
#undef S
}

/* The 16 states of output c + 8 h. */
static FLAT AVX2 __m256i states_avx2(const uint8_t *tile, int k2, int c, int h)
{
    const int bytes = 16 * k2, part = 2 * k2 * c, r = (k2 & 1) != 0 && (c & 1) != 0 ? 2 : 0;
    const int lo = part - r + source_end(k2, r, h, 0) - 16;
    const int hi = part - r + source_end(k2, r, h, 1) - 16;
    const __m128i a = load_ring(tile, bytes, lo), b = load_ring(tile, bytes, hi);
    const __m256i source = k2 <= 6 ? _mm256_broadcastsi128_si256(a) : _mm256_set_m128i(b, a);
    const __m256i pair = _mm256_shuffle_epi8(source, pair_bytes(k2, r, h));
    const __m256i even = _mm256_srlv_epi32(pair, pair_shifts(k2, h, (k2 + 1) / 2, 1));
    const __m256i odd = _mm256_sllv_epi32(pair, pair_shifts(k2, h, 16, -1));

    return _mm256_blend_epi16(even, odd, 0xAA);
}

/* ---- AVX2: states into weights --------------------------------------- */

/* Low and high halves of state * factor. */
typedef struct { __m256i lo, hi; } wide_avx2;

static FLAT AVX2 wide_avx2 multiply_avx2(__m256i s, uint32_t factor)
{
    const __m256i f_lo = _mm256_set1_epi16((int16_t)(factor & 0xFFFF));
    const __m256i f_hi = _mm256_set1_epi16((int16_t)(factor >> 16));

    return (wide_avx2){ _mm256_mullo_epi16(s, f_lo),
                        _mm256_add_epi16(_mm256_mulhi_epu16(s, f_lo), _mm256_mullo_epi16(s, f_hi)) };
}

/* hx_exl3_units() of both halves of the pattern, from the product before its mask: the mantissa
 * times 32 and the exponent as a power of two times 2048 have the value as the high half of
 * their product. The table is indexed by bits 8 … 11. */
static FLAT AVX2 __m256i units_avx2(__m256i x)
{
#define P(n) (char)(8 << (((n) ^ 0xB) >> 2))
    const __m256i power = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12),
                      P(13), P(14), P(15)));
#undef P
    const __m256i index = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi16(0x0F00)),
                                          _mm256_set1_epi16(0x0080));
    const __m256i mantissa =
        _mm256_xor_si256(_mm256_and_si256(_mm256_slli_epi16(x, 5), _mm256_set1_epi16(0x7FE0)),
                         _mm256_set1_epi16((int16_t)(0x8000 | 0x360 << 5)));
    const __m256i mag = _mm256_mulhi_epu16(mantissa, _mm256_shuffle_epi8(power, index));

    return _mm256_sign_epi16(mag, _mm256_or_si256(x, _mm256_set1_epi16(1)));
}

/* By bits 11 … 14 of the magnitude: last place of an fp16, 0 where all integers are fp16, and
 * the bits below it. Entry 0 is 0, which also serves the high bytes. */
#define LAST_PLACE 0, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16, 16
#define BELOW      0, 1, 3, 3, 7, 7, 7, 7, 15, 15, 15, 15, 15, 15, 15, 15

/* Rounds to 11 bits, ties to even. */
static FLAT AVX2 __m256i round_avx2(__m256i v)
{
    const __m256i last = _mm256_broadcastsi128_si256(_mm_setr_epi8(LAST_PLACE));
    const __m256i below = _mm256_broadcastsi128_si256(_mm_setr_epi8(BELOW));
    const __m256i mag = _mm256_abs_epi16(v), index = _mm256_srli_epi16(mag, 11);
    const __m256i cut = _mm256_shuffle_epi8(below, index);
    const __m256i odd =
        _mm256_cmpgt_epi16(_mm256_and_si256(mag, _mm256_shuffle_epi8(last, index)),
                           _mm256_setzero_si256());        /* -1 where odd */
    const __m256i sum =
        _mm256_sub_epi16(_mm256_add_epi16(mag, _mm256_srli_epi16(cut, 1)), odd);

    return _mm256_sign_epi16(_mm256_andnot_si256(cut, sum), v);
}

/* Byte sums for MUL1, integer weights for the others. */
static FLAT AVX2 __m256i weights_avx2(__m256i s, hx_codebook codebook)
{
    if (codebook == HX_CB_MUL1) {
        const __m256i ones = _mm256_set1_epi8(1);
        const wide_avx2 x = multiply_avx2(s, HX_EXL3_MUL1);

        return _mm256_add_epi16(_mm256_maddubs_epi16(x.lo, ones), _mm256_maddubs_epi16(x.hi, ones));
    }
    wide_avx2 x = multiply_avx2(s, codebook == HX_CB_MCG ? HX_EXL3_MCG : HX_EXL3_3INST);

    if (codebook == HX_CB_3INST) {
        const __m256i add_lo = _mm256_set1_epi16((int16_t)(HX_EXL3_3INST_ADD & 0xFFFF));
        const __m256i add_hi = _mm256_set1_epi16((int16_t)(HX_EXL3_3INST_ADD >> 16));

        x.lo = _mm256_add_epi16(x.lo, add_lo);
        /* a carry unless the sum is at least the addend: compares give -1 */
        const __m256i no_carry = _mm256_cmpeq_epi16(_mm256_max_epu16(x.lo, add_lo), x.lo);
        x.hi = _mm256_add_epi16(_mm256_add_epi16(x.hi, add_hi),
                                _mm256_add_epi16(no_carry, _mm256_set1_epi16(1)));
    }
    return round_avx2(_mm256_add_epi16(units_avx2(x.lo), units_avx2(x.hi)));
}

static FLAT AVX2 void put_avx2(const uint8_t *tile, int k2, hx_codebook codebook, int c, int16_t *w)
{
    for (int h = 0; h < 2; h++)
        _mm256_store_si256((void *)(w + 16 * (c + 8 * h)),
                           weights_avx2(states_avx2(tile, k2, c, h), codebook));
}

/* The first outputs may reach back over the start of the ring, the others come in pairs
 * since those of half rates alternate. */
static FLAT AVX2 void decode_rate_avx2(const uint8_t *tile, size_t row_bytes, int k2,
                                       hx_codebook codebook, int16_t *w)
{
    for (int t = 0; t < 8; t++, tile += row_bytes, w += 256) {
        put_avx2(tile, k2, codebook, 0, w);
        put_avx2(tile, k2, codebook, 1, w);
        for (int c = 2; c < 8; c += 2) {
            put_avx2(tile, k2, codebook, c, w);
            put_avx2(tile, k2, codebook, c | 1, w);
        }
    }
}

/* Half rates exist with MUL1 only. */
#define RATES_MUL1(X) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(10) X(12) X(14) X(16)
#define RATES(X)      X(2) X(4) X(6) X(8) X(10) X(12) X(14) X(16)

#define DECODER(isa, name, rates, codebook)                                              \
    static isa void name(const uint8_t *tile, size_t row_bytes, int k2, int16_t *w)      \
    {                                                                                    \
        switch (k2) {                                                                    \
            rates                                                                        \
        }                                                                                \
    }

#define RATE(k2, run, codebook)                                                          \
    case k2:                                                                             \
        run(tile, row_bytes, k2, codebook, w);                                           \
        break;
#define MUL1_RATE_AVX2(k2)  RATE(k2, decode_rate_avx2, HX_CB_MUL1)
#define MCG_RATE_AVX2(k2)   RATE(k2, decode_rate_avx2, HX_CB_MCG)
#define INST3_RATE_AVX2(k2) RATE(k2, decode_rate_avx2, HX_CB_3INST)

DECODER(AVX2, decode_mul1_avx2, RATES_MUL1(MUL1_RATE_AVX2), HX_CB_MUL1)
DECODER(AVX2, decode_mcg_avx2, RATES(MCG_RATE_AVX2), HX_CB_MCG)
DECODER(AVX2, decode_3inst_avx2, RATES(INST3_RATE_AVX2), HX_CB_3INST)

static void avx2_decode(const uint8_t *tile, size_t row_bytes, int k2, hx_codebook codebook,
                        int16_t *w)
{
    static void (*const run[HX_N_CB])(const uint8_t *, size_t, int, int16_t *) = {
        [HX_CB_3INST] = decode_3inst_avx2, [HX_CB_MCG] = decode_mcg_avx2,
        [HX_CB_MUL1] = decode_mul1_avx2,
    };

    run[codebook](tile, row_bytes, k2, w);
}

/* ---- AVX2: sums ------------------------------------------------------ */

/* t is 16 terms of block b. */
static FLAT AVX2 void tree_add_avx2(float *level, uint32_t b, __m256 t0, __m256 t1)
{
    for (; (b & 1) != 0; b >>= 1, level += COLS) {
        t0 = _mm256_add_ps(_mm256_loadu_ps(level), t0);
        t1 = _mm256_add_ps(_mm256_loadu_ps(level + 8), t1);
    }
    _mm256_storeu_ps(level, t0);
    _mm256_storeu_ps(level + 8, t1);
}

/* Sums of the 8 lanes of each of 8 vectors, in the order of hx_canon_lanes(). */
#define LANES_8(name, type, add, lo64, hi64, shuffle)                                    \
    static FLAT AVX2 type name(const type v[8])                                          \
    {                                                                                    \
        type s[4];                                                                       \
        for (int i = 0; i < 4; i++)                                                      \
            s[i] = add(shuffle##_halves(v[i], v[i + 4], 0x20),                           \
                       shuffle##_halves(v[i], v[i + 4], 0x31));                          \
        const type a = add(lo64(s[0], s[1]), hi64(s[0], s[1]));                          \
        const type b = add(lo64(s[2], s[3]), hi64(s[2], s[3]));                          \
        return add(shuffle##_dwords(a, b, 0x88), shuffle##_dwords(a, b, 0xDD));          \
    }

#define ps_halves          _mm256_permute2f128_ps
#define ps_dwords          _mm256_shuffle_ps
#define ps_lo64(a, b)      _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)))
#define ps_hi64(a, b)      _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)))
#define int_halves         _mm256_permute2x128_si256
#define int_dwords(a, b, n)                                                              \
    _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), n))

LANES_8(lanes_ps, __m256, _mm256_add_ps, ps_lo64, ps_hi64, ps)
LANES_8(lanes_int, __m256i, _mm256_add_epi32, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64, int)

/* Outputs c … c + 7 of the block times a. */
static FLAT AVX2 __m256i dot8_avx2(const int16_t *w, int c, const int16_t *a)
{
    __m256i sum[8];

    for (int i = 0; i < 8; i++)
        sum[i] = _mm256_setzero_si256();
    for (int t = 0; t < 8; t++) {
        const __m256i at = _mm256_load_si256((const void *)(a + 16 * t));

        for (int i = 0; i < 8; i++)
            sum[i] = _mm256_add_epi32(
                sum[i],
                _mm256_madd_epi16(_mm256_load_si256((const void *)(w + 256 * t + 16 * (c + i))), at));
    }
    return lanes_int(sum);
}

static FLAT AVX2 __m256 term_mul1_avx2(__m256i sum, const hx_mm_exl3 *x)
{
    const __m256i less = _mm256_set1_epi32((int32_t)(512u * (uint32_t)x->sum));
    const __m256 i = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, less));

    return _mm256_mul_ps(_mm256_fmadd_ps(i, _mm256_set1_ps(HX_CANON_K_INV),
                                         _mm256_set1_ps(HX_CANON_C2 * (float)x->sum)),
                         _mm256_set1_ps(x->q));
}

static FLAT AVX2 __m256 term_half_avx2(__m256i i, __m256i j, const hx_mm_exl3 *x)
{
    return _mm256_mul_ps(
        _mm256_fmadd_ps(_mm256_set1_ps(254.0f), _mm256_cvtepi32_ps(i), _mm256_cvtepi32_ps(j)),
        _mm256_set1_ps(x->q * HX_CANON_UNIT));
}

static AVX2 void avx2_sum_exl3(const hx_mm_sum *s)
{
    const int16_t *w = s->w;

    for (int r = 0; r < s->n_row; r++) {
        const hx_mm_exl3 *x = (const void *)(s->x + (size_t)r * s->x_step);
        __m256 t[2];

        for (int i = 0; i < 2; i++) {
            const __m256i sum = dot8_avx2(w, 8 * i, x->a[0]);

            t[i] = s->mul1 ? term_mul1_avx2(sum, x)
                           : term_half_avx2(sum, dot8_avx2(w, 8 * i, x->a[1]), x);
        }
        tree_add_avx2(s->tree + (size_t)r * s->tree_step, s->block, t[0], t[1]);
    }
}

static AVX2 void avx2_sum_plain(const hx_mm_sum *s)
{
    const float *w = s->w;

    for (int r = 0; r < s->n_row; r++) {
        const float *x = (const void *)(s->x + (size_t)r * s->x_step);
        __m256 t[2];

        for (int half = 0; half < 2; half++) {
            __m256 sum[8];

            for (int i = 0; i < 8; i++)
                sum[i] = _mm256_setzero_ps();
            for (int k = 0; k < BLOCK; k += 8) {
                const __m256 at = _mm256_loadu_ps(x + k);

                for (int i = 0; i < 8; i++)
                    sum[i] = _mm256_fmadd_ps(_mm256_load_ps(w + (8 * half + i) * BLOCK + k), at,
                                             sum[i]);
            }
            t[half] = lanes_ps(sum);
        }
        tree_add_avx2(s->tree + (size_t)r * s->tree_step, s->block, t[0], t[1]);
    }
}

/* Rows r and r + 1 where there are two: 8 chains hide the latency of an fma. */
static FLAT AVX2 void columns_avx2(const hx_mm_sum *s, int n_in, int r, int n_row)
{
    const float *w = s->w, *x = (const void *)(s->x + (size_t)r * s->x_step);
    const size_t ld = s->x_step / sizeof(float);
    __m256 sum[2][4];

    for (int j = 0; j < n_row; j++)
        for (int i = 0; i < 4; i++)
            sum[j][i] = _mm256_setzero_ps();
    for (int k = 0; k < n_in; k++)
        for (int j = 0; j < n_row; j++) {
            const __m256 at = _mm256_broadcast_ss(x + (size_t)j * ld + k);

            for (int i = 0; i < 4; i++)
                sum[j][i] = _mm256_fmadd_ps(_mm256_load_ps(w + k * WIDE + 8 * i), at, sum[j][i]);
        }
    for (int j = 0; j < n_row; j++) {
        float *level = s->tree + (size_t)(r + j) * s->tree_step;

        for (uint32_t b = s->block; (b & 1) != 0; b >>= 1, level += WIDE)
            for (int i = 0; i < 4; i++)
                sum[j][i] = _mm256_add_ps(_mm256_loadu_ps(level + 8 * i), sum[j][i]);
        for (int i = 0; i < 4; i++)
            _mm256_storeu_ps(level + 8 * i, sum[j][i]);
    }
}

static AVX2 void avx2_sum_columns(const hx_mm_sum *s, int n_in)
{
    int r = 0;

    for (; r + 2 <= s->n_row; r += 2)
        columns_avx2(s, n_in, r, 2);
    if (r < s->n_row)
        columns_avx2(s, n_in, r, 1);
}

/* ---- AVX2: rows ------------------------------------------------------ */

static FLAT AVX2 __m256 half8(const void *p, int i)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)((const uint8_t *)p + 2 * i)));
}

/* Butterfly inside a vector: swapped holds each lane's partner, minus the sign bit where the lane is
 * the second of its pair. */
static FLAT AVX2 __m256 butterfly(__m256 v, __m256 swapped, __m256 minus)
{
    return _mm256_add_ps(swapped, _mm256_xor_ps(v, minus));
}

/* hx_canon_rotate() of v [16]. */
static FLAT AVX2 void rotate_avx2(__m256 v[16])
{
    const __m256 m1 = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    const __m256 m2 = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f);
    const __m256 m4 = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
    const __m256 root = _mm256_set1_ps(HX_CANON_ROOT);

    for (int i = 0; i < 16; i++) {
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0xB1), m1);
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0x4E), m2);
        v[i] = butterfly(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), m4);
    }
    for (int w = 1; w < 16; w *= 2)
        for (int i = 0; i < 16; i++)
            if ((i & w) == 0) {
                const __m256 a = v[i], b = v[i + w];

                v[i] = _mm256_add_ps(a, b);
                v[i + w] = _mm256_sub_ps(a, b);
            }
    for (int i = 0; i < 16; i++)
        v[i] = _mm256_mul_ps(v[i], root);
}

static FLAT AVX2 int32_t sum_dwords(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

static FLAT AVX2 float peak_avx2(const __m256 v[16])
{
    const __m256i mag = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i m = _mm256_setzero_si256();

    for (int i = 0; i < 16; i++)
        m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), mag));
    __m128i p = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    p = _mm_max_epi32(p, _mm_shuffle_epi32(p, 0x4E));
    p = _mm_max_epi32(p, _mm_shuffle_epi32(p, 0xB1));
    return hx_float_of((uint32_t)_mm_cvtsi128_si32(p));
}

/* hx_canon_planes(): |a| + 126 <= 32511 divided by 254, as (n / 2) * 33027 / 2^22; exact below 2^15. */
static FLAT AVX2 __m256i plane_avx2(__m256i a)
{
    const __m256i n = _mm256_add_epi16(_mm256_abs_epi16(a), _mm256_set1_epi16(126));
    const __m256i i = _mm256_mulhi_epu16(_mm256_srli_epi16(n, 1), _mm256_set1_epi16((int16_t)33027));

    return _mm256_sign_epi16(_mm256_srli_epi16(i, 6), a);
}

static AVX2 void avx2_quantize(const float *x, const void *suh, bool mul1, hx_mm_exl3 *out)
{
    const __m256 top = _mm256_set1_ps((float)HX_CANON_AMAX), low = _mm256_set1_ps(-(float)HX_CANON_AMAX);
    __m256i sum = _mm256_setzero_si256();
    __m256 v[16];

    for (int i = 0; i < 16; i++)
        v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), half8(suh, 8 * i));
    rotate_avx2(v);
    const float m = peak_avx2(v), inv = m == 0 ? 0.0f : (float)HX_CANON_AMAX / m;

    for (int t = 0; t < 8; t++) {
        __m256i d[2];

        for (int i = 0; i < 2; i++)
            d[i] = _mm256_cvtps_epi32(_mm256_max_ps(
                _mm256_min_ps(_mm256_mul_ps(v[2 * t + i], _mm256_set1_ps(inv)), top), low));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(d[0], d[1]));
        /* packing leaves inputs 0-3, 8-11 | 4-7, 12-15 */
        const __m256i a = _mm256_shuffle_epi32(_mm256_packs_epi32(d[0], d[1]), 0xD8);
        const __m256i i = plane_avx2(a);

        _mm256_store_si256((void *)(out->a[0] + 16 * t), mul1 ? a : i);
        if (!mul1)
            _mm256_store_si256((void *)(out->a[1] + 16 * t),
                               _mm256_sub_epi16(a, _mm256_mullo_epi16(i, _mm256_set1_epi16(254))));
    }
    out->sum = sum_dwords(sum);
    out->q = m / (float)HX_CANON_AMAX;
}

static AVX2 void avx2_rotate(float *y, const void *svh)
{
    __m256 v[16];

    for (int i = 0; i < 16; i++)
        v[i] = _mm256_loadu_ps(y + 8 * i);
    rotate_avx2(v);
    for (int i = 0; i < 16; i++)
        _mm256_storeu_ps(y + 8 * i, _mm256_mul_ps(v[i], half8(svh, 8 * i)));
}

/* 8 weights from byte 0 of p on. */
static FLAT AVX2 __m256 widen8(const uint8_t *p, hx_fmt fmt, float scale)
{
    if (fmt == HX_FMT_F32)
        return _mm256_loadu_ps((const void *)p);
    if (fmt == HX_FMT_F16)
        return half8(p, 0);
    if (fmt == HX_FMT_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));

    /* hx_e4m3_to() */
    const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    const __m256i mag = _mm256_and_si256(b, _mm256_set1_epi32(0x7F));
    const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(b, mag), 24);
    const __m256 nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(mag, _mm256_set1_epi32(0x7F)));
    const __m256 v = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(mag, 20)),
                                   _mm256_set1_ps(0x1p120f));

    return _mm256_mul_ps(_mm256_or_ps(_mm256_or_ps(v, _mm256_castsi256_ps(sign)), nan),
                         _mm256_set1_ps(scale));
}

static FLAT AVX2 void widen_avx2(float *out, const uint8_t *p, hx_fmt fmt, int bytes, float scale, int n)
{
    int i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, widen8(p + i * bytes, fmt, scale));
    if (i < n)
        hx_mm_scalar.widen(out + i, p + i * bytes, fmt, scale, n - i);
}

static AVX2 void avx2_widen(float *out, const void *in, hx_fmt fmt, float scale, int n)
{
    switch (fmt) {
    case HX_FMT_F32:
        widen_avx2(out, in, HX_FMT_F32, 4, scale, n);
        break;
    case HX_FMT_F16:
        widen_avx2(out, in, HX_FMT_F16, 2, scale, n);
        break;
    case HX_FMT_BF16:
        widen_avx2(out, in, HX_FMT_BF16, 2, scale, n);
        break;
    default:
        widen_avx2(out, in, HX_FMT_FP8, 1, scale, n);
    }
}

/* hx_canon_exp() */
static FLAT AVX2 __m256 exp_avx2(__m256 x)
{
    static const float c[] = { 8.367509581e-3f, 4.166723788e-2f, 1.666653454e-1f, 0.5f, 1.0f, 1.0f };
    const __m256 shift = _mm256_set1_ps(12582912.0f);
    __m256 p = _mm256_set1_ps(1.386375749e-3f);

    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.0f));
    const __m256 z = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269504f), shift);
    const __m256 n = _mm256_sub_ps(z, shift);
    const __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-1.428606820e-06f),
                                     _mm256_fmadd_ps(n, _mm256_set1_ps(-0x1.62e4p-1f), x));

    for (size_t i = 0; i < HX_LEN(c); i++)
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c[i]));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p),
                                                _mm256_slli_epi32(_mm256_castps_si256(z), 23)));
}

static AVX2 void avx2_act(float *h, const float *g_in, const float *u_in, float limit)
{
    const __m256 top = _mm256_set1_ps(limit), low = _mm256_set1_ps(-limit);

    for (int i = 0; i < BLOCK; i += 8) {
        __m256 g = _mm256_loadu_ps(g_in + i), u = _mm256_loadu_ps(u_in + i);

        if (limit > 0) {        /* a NaN, as second operand, stays */
            g = _mm256_min_ps(top, g);
            u = _mm256_max_ps(low, _mm256_min_ps(top, u));
        }
        const __m256 e = exp_avx2(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
        _mm256_storeu_ps(h + i, _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e)),
                                              u));
    }
}

const hx_mm_kernels hx_mm_avx2 = {
    .quantize = avx2_quantize,
    .decode = avx2_decode,
    .sum_exl3 = avx2_sum_exl3,
    .rotate = avx2_rotate,
    .widen = avx2_widen,
    .sum_plain = avx2_sum_plain,
    .sum_columns = avx2_sum_columns,
    .act = avx2_act,
};
#endif
