/* cpu_x86.c - the kernels of cpu_matmul.h with AVX2 + FMA + F16C, and those that gain
 * from it with AVX-512 (F, BW, VL, DQ, VBMI, VNNI). Called through hx_mm_avx2 and
 * hx_mm_avx512 only when hx_cpu_has() says so; empty on other machines. Same bits as the
 * plain C.
 *
 * How a tile is decoded. Its 256 weights come from 256 overlapping 16-bit windows of a
 * bit stream; 16 windows in a row (stream positions 32 c + 4 h + 8 q + j) are the weights
 * of one output c + 8 h. States are kept as 16-bit lanes in stream order, so that one
 * vector of activations serves all outputs of a tile row. A shuffle brings the bytes that
 * hold two windows (AVX-512: the windows of a lane) into a register lane, shifts cut them
 * out. The 32-bit product of a state comes from 16-bit multiplications as low and high
 * halves. Everything that depends on the rate alone is folded into constants: each rate
 * has its own copy of the loop, made by inlining with a constant k2. */
#include "dev/cpu_matmul.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "dev/fmt_exl3.h"
#include "dev/fmt_fp8.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512                                                                           \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,"    \
                          "avx2,fma,f16c")))
#define FLAT inline __attribute__((always_inline))

/* Before loops over arrays of registers, which otherwise would live in memory. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { BLOCK = HX_MM_BLOCK, COLS = HX_MM_COLS, WIDE = HX_MM_WIDE };

/* ---- geometry of the bit stream -------------------------------------- */

/* Pairs of stream positions (2 i, 2 i + 1) inside an output's part of 64 positions, that
 * is 2 k2 bytes: pair i ends at bit (i + 1) k2, and its odd position owns (k2 + 1) / 2
 * bits. */
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

/* Where the 16 bytes end from which half s (dwords 4 s …) takes its bits, counted from
 * the start of the output's part rounded down to a word; r is what was cut off (2 for odd
 * outputs of half rates). Up to 3 bits both halves share one source, up to 6 bits both h
 * do. */
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
#define S(d) ((base) + (sign)*pair_slack(k2, pair_of(h, d)))
    return _mm256_setr_epi32(S(0), S(1), S(2), S(3), S(4), S(5), S(6), S(7));
#undef S
}

/* The 16 states of output c + 8 h. */
static FLAT AVX2 __m256i states_avx2(const uint8_t *tile, int k2, int c, int h)
{
    const int bytes = 16 * k2, part = 2 * k2 * c;
    const int r = (k2 & 1) != 0 && (c & 1) != 0 ? 2 : 0;
    const int lo = part - r + source_end(k2, r, h, 0) - 16;
    const int hi = part - r + source_end(k2, r, h, 1) - 16;
    const __m128i a = load_ring(tile, bytes, lo), b = load_ring(tile, bytes, hi);
    const __m256i source =
        k2 <= 6 ? _mm256_broadcastsi128_si256(a) : _mm256_set_m128i(b, a);
    const __m256i pair = _mm256_shuffle_epi8(source, pair_bytes(k2, r, h));
    const __m256i even = _mm256_srlv_epi32(pair, pair_shifts(k2, h, (k2 + 1) / 2, 1));
    const __m256i odd = _mm256_sllv_epi32(pair, pair_shifts(k2, h, 16, -1));

    return _mm256_blend_epi16(even, odd, 0xAA);
}

/* ---- AVX2: states into weights --------------------------------------- */

/* Low and high halves of state * factor. */
typedef struct {
    __m256i lo, hi;
} wide_avx2;

static FLAT AVX2 wide_avx2 multiply_avx2(__m256i s, uint32_t factor)
{
    const __m256i f_lo = _mm256_set1_epi16((int16_t)(factor & 0xFFFF));
    const __m256i f_hi = _mm256_set1_epi16((int16_t)(factor >> 16));

    return (wide_avx2) { _mm256_mullo_epi16(s, f_lo),
                         _mm256_add_epi16(_mm256_mulhi_epu16(s, f_lo),
                                          _mm256_mullo_epi16(s, f_hi)) };
}

/* The high half of each dword of x, masked as MCG and 3INST do it, as the fp16 that it
 * is: bits 11 … 0 move to their place in an f32, whose upper exponent bits are the same
 * for all patterns. */
#define HALF_MASK 0x81FFE000u
#define HALF_XOR  (0x3E000000u | 0xB60u << 13)

static FLAT AVX2 __m256 half_avx2(__m256i x)
{
    x = _mm256_and_si256(_mm256_srai_epi32(x, 3), _mm256_set1_epi32((int32_t)HALF_MASK));
    return _mm256_castsi256_ps(_mm256_xor_si256(x, _mm256_set1_epi32((int32_t)HALF_XOR)));
}

/* v, rounded to 11 bits, times scale, as integers. The 24 bits of t = 8193 v end where
 * the 11 of v do, so t is 8192 v + rounded v, ties to even; then 8192 v goes again
 * (Veltkamp 1968). */
static FLAT AVX2 __m256i round_avx2(__m256 v, float scale)
{
    const __m256 t = _mm256_mul_ps(v, _mm256_set1_ps(8193 * scale));
    const __m256 rest = _mm256_fnmadd_ps(v, _mm256_set1_ps(scale), t);

    return _mm256_cvtps_epi32(_mm256_sub_ps(t, rest));
}

/* Byte sums for MUL1, integer weights for the others. */
static FLAT AVX2 __m256i weights_avx2(__m256i s, hx_codebook codebook)
{
    if (codebook == HX_CB_MUL1) {
        const __m256i ones = _mm256_set1_epi8(1);
        const wide_avx2 x = multiply_avx2(s, HX_EXL3_MUL1);

        return _mm256_add_epi16(_mm256_maddubs_epi16(x.lo, ones),
                                _mm256_maddubs_epi16(x.hi, ones));
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
    const __m256 odd = _mm256_add_ps(half_avx2(x.lo), half_avx2(x.hi));
    const __m256 even = _mm256_add_ps(half_avx2(_mm256_slli_epi32(x.lo, 16)),
                                      half_avx2(_mm256_slli_epi32(x.hi, 16)));

    return _mm256_blend_epi16(round_avx2(even, 0x1p13f), round_avx2(odd, 0x1p29f), 0xAA);
}

static FLAT AVX2 void put_avx2(const uint8_t *tile, int k2, hx_codebook codebook, int c,
                               int16_t *w)
{
    /* not a loop: h must be a constant before anything is folded */
    const __m256i near = weights_avx2(states_avx2(tile, k2, c, 0), codebook);
    const __m256i far = weights_avx2(states_avx2(tile, k2, c, 1), codebook);

    _mm256_store_si256((void *)(w + 16 * c), near);
    _mm256_store_si256((void *)(w + 16 * (c + 8)), far);
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

/* One function per rate and codebook; half rates exist with MUL1 only. */
/* clang-format off */
#define DECODERS(X)                                                                      \
    X(MUL1, 2) X(MUL1, 3) X(MUL1, 4) X(MUL1, 5) X(MUL1, 6) X(MUL1, 7) X(MUL1, 8)         \
    X(MUL1, 10) X(MUL1, 12) X(MUL1, 14) X(MUL1, 16)                                      \
    X(MCG, 2) X(MCG, 4) X(MCG, 6) X(MCG, 8) X(MCG, 10) X(MCG, 12) X(MCG, 14) X(MCG, 16)  \
    X(3INST, 2) X(3INST, 4) X(3INST, 6) X(3INST, 8) X(3INST, 10) X(3INST, 12)            \
    X(3INST, 14) X(3INST, 16)
/* clang-format on */

typedef void decoder(const uint8_t *tile, size_t row_bytes, int16_t *w);

#define X(cb, k2)                                                                        \
    static AVX2 void decode_avx2_##cb##_##k2(const uint8_t *tile, size_t row_bytes,      \
                                             int16_t *w)                                 \
    {                                                                                    \
        decode_rate_avx2(tile, row_bytes, k2, HX_CB_##cb, w);                            \
    }
DECODERS(X)
#undef X

static decoder *const decoders_avx2[HX_N_CB][17] = {
#define X(cb, k2) [HX_CB_##cb][k2] = decode_avx2_##cb##_##k2,
    DECODERS(X)
#undef X
};

static void avx2_decode(const uint8_t *tile, size_t row_bytes, int k2,
                        hx_codebook codebook, int16_t *w)
{
    decoders_avx2[codebook][k2](tile, row_bytes, w);
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

#define ps_load(p)      _mm256_loadu_ps((const void *)(p))
#define ps_zero         _mm256_setzero_ps
#define ps_add          _mm256_add_ps
#define ps_mac(s, w, x) _mm256_fmadd_ps(w, x, s)
#define ps_halves       _mm256_permute2f128_ps
#define ps_dwords       _mm256_shuffle_ps
#define ps_lo64(a, b)                                                                    \
    _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)))
#define ps_hi64(a, b)                                                                    \
    _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)))

#define i16_load(p)      _mm256_loadu_si256((const void *)(p))
#define i16_zero         _mm256_setzero_si256
#define i16_add          _mm256_add_epi32
#define i16_mac(s, w, x) _mm256_add_epi32(s, _mm256_madd_epi16(w, x))
#define i16_halves       _mm256_permute2x128_si256
#define i16_lo64         _mm256_unpacklo_epi64
#define i16_hi64         _mm256_unpackhi_epi64
#define i16_dwords(a, b, n)                                                              \
    _mm256_castps_si256(                                                                 \
        _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), n))

/* The product of 8 outputs of a decoded block with one row, for floats (ps) and integers
 * (i16). The vector of output c at step t lies at w + t * w_step + c * w_out, that of the
 * row at x + 32 t. lanes: sums of the 8 lanes of 8 vectors, in the order of
 * hx_canon_lanes(). Sharing the loads of the weights between two rows gains nothing (Zen
 * 3: 55 G products/s either way). */
#define PRODUCT(kind, type, steps, w_step, w_out)                                        \
    static FLAT AVX2 type lanes_##kind(const type v[8])                                  \
    {                                                                                    \
        type s[4];                                                                       \
                                                                                         \
        UNROLL                                                                           \
        for (int i = 0; i < 4; i++)                                                      \
            s[i] = kind##_add(kind##_halves(v[i], v[i + 4], 0x20),                       \
                              kind##_halves(v[i], v[i + 4], 0x31));                      \
        const type a = kind##_add(kind##_lo64(s[0], s[1]), kind##_hi64(s[0], s[1]));     \
        const type b = kind##_add(kind##_lo64(s[2], s[3]), kind##_hi64(s[2], s[3]));     \
        return kind##_add(kind##_dwords(a, b, 0x88), kind##_dwords(a, b, 0xDD));         \
    }                                                                                    \
                                                                                         \
    static FLAT AVX2 type dot_##kind(const uint8_t *w, const uint8_t *x)                 \
    {                                                                                    \
        type sum[8];                                                                     \
                                                                                         \
        UNROLL                                                                           \
        for (int i = 0; i < 8; i++)                                                      \
            sum[i] = kind##_zero();                                                      \
        for (int t = 0; t < (steps); t++, w += (w_step), x += 32) {                      \
            UNROLL                                                                       \
            for (int i = 0; i < 8; i++)                                                  \
                sum[i] =                                                                 \
                    kind##_mac(sum[i], kind##_load(w + i * (w_out)), kind##_load(x));    \
        }                                                                                \
        return lanes_##kind(sum);                                                        \
    }

PRODUCT(ps, __m256, 16, 32, 4 * BLOCK)
PRODUCT(i16, __m256i, 8, 512, 32)

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
    return _mm256_mul_ps(_mm256_fmadd_ps(_mm256_set1_ps(254.0f), _mm256_cvtepi32_ps(i),
                                         _mm256_cvtepi32_ps(j)),
                         _mm256_set1_ps(x->q * HX_CANON_UNIT));
}

static FLAT AVX2 void exl3_rows_avx2(const hx_mm_sum *s, bool mul1)
{
    const uint8_t *w = s->w;

    for (int r = 0; r < s->n_row; r++) {
        const hx_mm_exl3 *x = (const void *)(s->x + (size_t)r * s->x_step);
        const uint8_t *a = (const uint8_t *)x->a[0], *j = (const uint8_t *)x->a[1];
        __m256 t[2];

        UNROLL
        for (int half = 0; half < 2; half++) {
            const uint8_t *at = w + half * 8 * 32;
            const __m256i sum = dot_i16(at, a);

            t[half] =
                mul1 ? term_mul1_avx2(sum, x) : term_half_avx2(sum, dot_i16(at, j), x);
        }
        tree_add_avx2(s->tree + (size_t)r * s->tree_step, s->block, t[0], t[1]);
    }
}

static AVX2 void avx2_sum_exl3(const hx_mm_sum *s)
{
    if (s->mul1)
        exl3_rows_avx2(s, true);
    else
        exl3_rows_avx2(s, false);
}

static AVX2 void avx2_sum_plain(const hx_mm_sum *s)
{
    const uint8_t *w = s->w;

    for (int r = 0; r < s->n_row; r++) {
        const uint8_t *x = s->x + (size_t)r * s->x_step;

        tree_add_avx2(s->tree + (size_t)r * s->tree_step, s->block, dot_ps(w, x),
                      dot_ps(w + (size_t)8 * 4 * BLOCK, x));
    }
}

/* WIDE outputs of a row, four vectors. Two rows where there are two: 8 chains hide the
 * latency of an fma. */
static FLAT AVX2 void columns_avx2(const hx_mm_sum *s, int r, int n_row, int n_in)
{
    const float *w = s->w, *x = (const void *)(s->x + (size_t)r * s->x_step);
    const size_t ld = s->x_step / sizeof(float);
    __m256 sum[8];

    UNROLL
    for (int i = 0; i < 4 * n_row; i++)
        sum[i] = _mm256_setzero_ps();
    for (int k = 0; k < n_in; k++, w += WIDE, x++) {
        UNROLL
        for (int i = 0; i < 4 * n_row; i++)
            sum[i] = _mm256_fmadd_ps(_mm256_load_ps(w + i % 4 * 8),
                                     _mm256_broadcast_ss(x + (i < 4 ? 0 : ld)), sum[i]);
    }
    UNROLL
    for (int i = 0; i < 4 * n_row; i++) {
        float *level = s->tree + (size_t)(r + i / 4) * s->tree_step + i % 4 * 8;

        for (uint32_t b = s->block; (b & 1) != 0; b >>= 1, level += WIDE)
            sum[i] = _mm256_add_ps(_mm256_loadu_ps(level), sum[i]);
        _mm256_storeu_ps(level, sum[i]);
    }
}

static AVX2 void avx2_sum_columns(const hx_mm_sum *s, int n_in)
{
    int r = 0;

    for (; r + 2 <= s->n_row; r += 2)
        columns_avx2(s, r, 2, n_in);
    if (r < s->n_row)
        columns_avx2(s, r, 1, n_in);
}

static FLAT AVX2 __m256 load_bf16(const uint8_t *p)
{
    const __m256i u =
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));

    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}

static AVX2 void avx2_sum_bf16(const hx_mm_sum *s, size_t out_bytes)
{
    for (int r = 0; r < s->n_row; r++) {
        const float *x = (const void *)(s->x + (size_t)r * s->x_step);
        __m256 t[2];

        for (int half = 0; half < 2; half++) {
            const uint8_t *w = (const uint8_t *)s->w + (size_t)half * 8 * out_bytes;
            __m256 sum[8];

            UNROLL
            for (int i = 0; i < 8; i++)
                sum[i] = _mm256_setzero_ps();
            for (int k = 0; k < BLOCK; k += 8) {
                const __m256 v = _mm256_loadu_ps(x + k);

                UNROLL
                for (int i = 0; i < 8; i++)
                    sum[i] = _mm256_fmadd_ps(load_bf16(w + (size_t)i * out_bytes + 2 * k),
                                             v, sum[i]);
            }
            t[half] = lanes_ps(sum);
        }
        tree_add_avx2(s->tree + (size_t)r * s->tree_step, s->block, t[0], t[1]);
    }
}

/* ---- AVX2: rows ------------------------------------------------------ */

static FLAT AVX2 __m256 half8(const void *p, int i)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)((const uint8_t *)p + 2 * i)));
}

/* Butterfly inside a vector: swapped holds each lane's partner, minus the sign bit where
 * the lane is the second of its pair. */
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

    UNROLL
    for (int i = 0; i < 16; i++) {
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0xB1), m1);
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0x4E), m2);
        v[i] = butterfly(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), m4);
    }
    UNROLL
    for (int w = 1; w < 16; w *= 2) {
        UNROLL
        for (int i = 0; i < 16; i++)
            if ((i & w) == 0) {
                const __m256 a = v[i], b = v[i + w];

                v[i] = _mm256_add_ps(a, b);
                v[i + w] = _mm256_sub_ps(a, b);
            }
    }
    UNROLL
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

    UNROLL
    for (int i = 0; i < 16; i++)
        m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), mag));
    __m128i p = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    p = _mm_max_epi32(p, _mm_shuffle_epi32(p, 0x4E));
    p = _mm_max_epi32(p, _mm_shuffle_epi32(p, 0xB1));
    return hx_float_of((uint32_t)_mm_cvtsi128_si32(p));
}

/* hx_canon_planes(): |a| + 126 <= 32511 divided by 254, as (n / 2) * 33027 / 2^22; exact
 * below 2^15. */
static FLAT AVX2 __m256i plane_avx2(__m256i a)
{
    const __m256i n = _mm256_add_epi16(_mm256_abs_epi16(a), _mm256_set1_epi16(126));
    const __m256i i =
        _mm256_mulhi_epu16(_mm256_srli_epi16(n, 1), _mm256_set1_epi16((int16_t)33027));

    return _mm256_sign_epi16(_mm256_srli_epi16(i, 6), a);
}

static AVX2 void avx2_quantize(const float *x, const void *suh, bool mul1,
                               hx_mm_exl3 *out)
{
    const __m256 top = _mm256_set1_ps((float)HX_CANON_AMAX),
                 low = _mm256_set1_ps(-(float)HX_CANON_AMAX);
    __m256i sum = _mm256_setzero_si256();
    __m256 v[16];

    UNROLL
    for (int i = 0; i < 16; i++)
        v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), half8(suh, 8 * i));
    rotate_avx2(v);
    const float m = peak_avx2(v), inv = m == 0 ? 0.0f : (float)HX_CANON_AMAX / m;

    UNROLL
    for (int t = 0; t < 8; t++) {
        __m256i d[2];

        for (int i = 0; i < 2; i++)
            d[i] = _mm256_cvtps_epi32(_mm256_max_ps(
                _mm256_min_ps(_mm256_mul_ps(v[2 * t + i], _mm256_set1_ps(inv)), top),
                low));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(d[0], d[1]));
        /* packing leaves inputs 0-3, 8-11 | 4-7, 12-15 */
        const __m256i a = _mm256_shuffle_epi32(_mm256_packs_epi32(d[0], d[1]), 0xD8);
        const __m256i i = plane_avx2(a);

        _mm256_store_si256((void *)(out->a[0] + 16 * t), mul1 ? a : i);
        if (!mul1)
            _mm256_store_si256(
                (void *)(out->a[1] + 16 * t),
                _mm256_sub_epi16(a, _mm256_mullo_epi16(i, _mm256_set1_epi16(254))));
    }
    out->sum = sum_dwords(sum);
    out->q = m / (float)HX_CANON_AMAX;
}

static AVX2 void avx2_rotate(float *y, const void *svh)
{
    __m256 v[16];

    UNROLL
    for (int i = 0; i < 16; i++)
        v[i] = _mm256_loadu_ps(y + 8 * i);
    rotate_avx2(v);
    UNROLL
    for (int i = 0; i < 16; i++)
        _mm256_storeu_ps(y + 8 * i, _mm256_mul_ps(v[i], half8(svh, 8 * i)));
}

/* 8 weights at p. */
static FLAT AVX2 __m256 widen8(const uint8_t *p, hx_fmt fmt)
{
    if (fmt == HX_FMT_F32)
        return _mm256_loadu_ps((const void *)p);
    if (fmt == HX_FMT_F16)
        return half8(p, 0);
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}

static FLAT AVX2 void widen_avx2(float *out, const void *in, hx_fmt fmt, int bytes, int n)
{
    const uint8_t *p = in;
    int i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, widen8(p + i * bytes, fmt));
    if (i < n)
        hx_mm_scalar.widen(out + i, p + i * bytes, fmt, 1, n - i);
}

/* E4M3 shifted into an fp16 is 2^-8 times its value, subnormals too; only its NaN is
 * another number there. */
static FLAT AVX2 void widen_fp8_avx2(float *out, const uint8_t *p, float scale, int n)
{
    const __m256 times = _mm256_set1_ps(256 * scale);
    int i = 0;

    for (; i + 16 <= n; i += 16) {
        const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(p + i)));
        const __m256i mag =
            _mm256_and_si256(_mm256_slli_epi16(b, 7), _mm256_set1_epi16(0x3F80));
        const __m256i sign =
            _mm256_and_si256(_mm256_slli_epi16(b, 8), _mm256_set1_epi16((int16_t)0x8000));
        const __m256i nan =
            _mm256_srli_epi16(_mm256_cmpeq_epi16(mag, _mm256_set1_epi16(0x3F80)), 1);
        const __m256i h = _mm256_or_si256(_mm256_or_si256(mag, sign), nan);

        _mm256_storeu_ps(
            out + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), times));
        _mm256_storeu_ps(
            out + i + 8,
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), times));
    }
    if (i < n)
        hx_mm_scalar.widen(out + i, p + i, HX_FMT_FP8, scale, n - i);
}

static AVX2 void avx2_widen(float *out, const void *in, hx_fmt fmt, float scale, int n)
{
    switch (fmt) {
    case HX_FMT_F32:
        widen_avx2(out, in, HX_FMT_F32, 4, n);
        break;
    case HX_FMT_F16:
        widen_avx2(out, in, HX_FMT_F16, 2, n);
        break;
    case HX_FMT_BF16:
        widen_avx2(out, in, HX_FMT_BF16, 2, n);
        break;
    default:
        widen_fp8_avx2(out, in, scale, n);
    }
}

/* hx_canon_exp() */
static FLAT AVX2 __m256 exp_avx2(__m256 x)
{
    static const float c[] = {
        8.367509581e-3f, 4.166723788e-2f, 1.666653454e-1f, 0.5f, 1.0f, 1.0f
    };
    const __m256 shift = _mm256_set1_ps(12582912.0f);
    __m256 p = _mm256_set1_ps(1.386375749e-3f);

    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.0f));
    const __m256 z = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269504f), shift);
    const __m256 n = _mm256_sub_ps(z, shift);
    const __m256 r =
        _mm256_fmadd_ps(n, _mm256_set1_ps(-1.428606820e-06f),
                        _mm256_fmadd_ps(n, _mm256_set1_ps(-0x1.62e4p-1f), x));

    for (size_t i = 0; i < HX_LEN(c); i++)
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c[i]));
    return _mm256_castsi256_ps(_mm256_add_epi32(
        _mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(z), 23)));
}

static AVX2 void avx2_act(float *h, const float *g_in, const float *u_in, float limit)
{
    const __m256 top = _mm256_set1_ps(limit), low = _mm256_set1_ps(-limit);

    for (int i = 0; i < BLOCK; i += 8) {
        __m256 g = _mm256_loadu_ps(g_in + i), u = _mm256_loadu_ps(u_in + i);

        if (limit > 0) { /* a NaN, as second operand, stays */
            g = _mm256_min_ps(top, g);
            u = _mm256_max_ps(low, _mm256_min_ps(top, u));
        }
        const __m256 e = exp_avx2(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
        _mm256_storeu_ps(
            h + i,
            _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), u));
    }
}

const hx_mm_kernels hx_mm_avx2 = {
    .quantize = avx2_quantize,
    .decode = avx2_decode,
    .sum_exl3 = avx2_sum_exl3,
    .rotate = avx2_rotate,
    .widen = avx2_widen,
    .sum_plain = avx2_sum_plain,
    .sum_bf16 = avx2_sum_bf16,
    .sum_columns = avx2_sum_columns,
    .act = avx2_act,
};

/* ---- AVX-512: tiles -------------------------------------------------- */

/* A vector holds stream lanes 8 g … 8 g + 7 as 64-bit lanes: the four positions of half h
 * of each, that is outputs 2 g + 8 h and 2 g + 1 + 8 h. The lanes' bits begin 4 k2 bytes
 * after those of g - 1, and reach back up to 2 bytes. Up to 6 bits the 8 windows of a
 * lane fit into 64 bits. */
static FLAT int lane_end_byte(int k2, int h, int l)
{
    return pair_end_byte(k2, 4 * l + (k2 <= 12 || h == 1 ? 3 : 1));
}

/* Words that are loaded in front of a vector's own: its windows reach back into one; the
 * second half at 8 bits has no use and no room for it. */
static FLAT int lead_words(int k2, int h)
{
    return k2 == 16 && h == 1 ? 0 : 1;
}

static FLAT AVX512 __m512i load_lanes(const uint8_t *tile, int k2, int g, int lead)
{
    const __mmask16 mask = (__mmask16)((1u << HX_MIN(k2 + lead, 16)) - 1);

    if (g > 0 || lead == 0)
        return _mm512_maskz_loadu_epi32(mask, tile + 4 * (k2 * g - lead));

    int32_t last;
    memcpy(&last, tile + 16 * k2 - 4, sizeof(last));
    return _mm512_alignr_epi32(_mm512_maskz_loadu_epi32((__mmask16)(mask >> 1), tile),
                               _mm512_set1_epi32(last), 15);
}

#define BYTES(B) (B(0) | B(1) | B(2) | B(3) | B(4) | B(5) | B(6) | B(7))
#define LANES(k2, h, F)                                                                  \
    _mm512_setr_epi64(F(k2, h, 0), F(k2, h, 1), F(k2, h, 2), F(k2, h, 3), F(k2, h, 4),   \
                      F(k2, h, 5), F(k2, h, 6), F(k2, h, 7))

/* Where the bytes of lane l come from: its 8 last, as a big-endian number. */
static FLAT int64_t lane_bytes(int k2, int h, int l)
{
    const int end = lane_end_byte(k2, h, l), lead = 4 * lead_words(k2, h);

#define B(i) (uint64_t)(uint8_t)(((end - 1 - (i)) ^ 3) + lead) << 8 * (i)
    return (int64_t)BYTES(B);
#undef B
}

/* From which bit each byte of the states of lane l is cut. */
static FLAT int64_t lane_cuts(int k2, int h, int l)
{
    const int end = 8 * lane_end_byte(k2, h, l), first = 8 * l + 4 * h + 1;

#define B(i)                                                                             \
    (uint64_t)(uint8_t)(end - ((first + (i) / 2) * k2 >> 1) + 8 * ((i) % 2)) << 8 * (i)
    return (int64_t)BYTES(B);
#undef B
}

static FLAT AVX512 __m512i states_avx512(__m512i source, int k2, int h)
{
    const __m512i lanes = _mm512_permutexvar_epi8(LANES(k2, h, lane_bytes), source);

    return _mm512_multishift_epi64_epi8(LANES(k2, h, lane_cuts), lanes);
}

/* As half_avx2(); 0x6A is (a & b) ^ c. */
static FLAT AVX512 __m512 half_avx512(__m512i x)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_srai_epi32(x, 3), _mm512_set1_epi32((int32_t)HALF_MASK),
        _mm512_set1_epi32((int32_t)HALF_XOR), 0x6A));
}

/* As round_avx2() */
static FLAT AVX512 __m512i round_avx512(__m512 v, float scale)
{
    const __m512 t = _mm512_mul_ps(v, _mm512_set1_ps(8193 * scale));
    const __m512 rest = _mm512_fnmadd_ps(v, _mm512_set1_ps(scale), t);

    return _mm512_cvtps_epi32(_mm512_sub_ps(t, rest));
}

static FLAT AVX512 __m512i weights_avx512(__m512i s, hx_codebook codebook)
{
    const uint32_t factor = codebook == HX_CB_MUL1  ? HX_EXL3_MUL1
                            : codebook == HX_CB_MCG ? HX_EXL3_MCG
                                                    : HX_EXL3_3INST;
    const __m512i f_lo = _mm512_set1_epi16((int16_t)(factor & 0xFFFF));
    const __m512i f_hi = _mm512_set1_epi16((int16_t)(factor >> 16));
    __m512i lo = _mm512_mullo_epi16(s, f_lo);
    __m512i hi =
        _mm512_add_epi16(_mm512_mulhi_epu16(s, f_lo), _mm512_mullo_epi16(s, f_hi));

    if (codebook == HX_CB_MUL1) {
        const __m512i ones = _mm512_set1_epi8(1);

        return _mm512_add_epi16(_mm512_maddubs_epi16(lo, ones),
                                _mm512_maddubs_epi16(hi, ones));
    }
    if (codebook == HX_CB_3INST) {
        const __m512i add_lo = _mm512_set1_epi16((int16_t)(HX_EXL3_3INST_ADD & 0xFFFF));
        const __m512i add_hi = _mm512_set1_epi16((int16_t)(HX_EXL3_3INST_ADD >> 16));

        lo = _mm512_add_epi16(lo, add_lo);
        hi = _mm512_add_epi16(hi, add_hi);
        hi = _mm512_mask_add_epi16(hi, _mm512_cmplt_epu16_mask(lo, add_lo), hi,
                                   _mm512_set1_epi16(1));
    }
    const __m512 odd = _mm512_add_ps(half_avx512(lo), half_avx512(hi));
    const __m512 even = _mm512_add_ps(half_avx512(_mm512_slli_epi32(lo, 16)),
                                      half_avx512(_mm512_slli_epi32(hi, 16)));

    return _mm512_mask_blend_epi16(0xAAAAAAAAu, round_avx512(even, 0x1p13f),
                                   round_avx512(odd, 0x1p29f));
}

/* The weights of stream lanes 8 g … 8 g + 7: w[0] those of outputs 2 g and 2 g + 1, w[1]
 * of these + 8. */
static FLAT AVX512 void group_avx512(const uint8_t *tile, int k2, hx_codebook codebook,
                                     int g, __m512i w[2])
{
    const __m512i source = load_lanes(tile, k2, g, lead_words(k2, 0));
    const __m512i again = lead_words(k2, 1) == 1 ? source : load_lanes(tile, k2, g, 0);

    w[0] = weights_avx512(states_avx512(source, k2, 0), codebook);
    w[1] = weights_avx512(states_avx512(again, k2, 1), codebook);
}

static FLAT AVX512 void put_avx512(const uint8_t *tile, int k2, hx_codebook codebook,
                                   int g, int16_t *w)
{
    __m512i two[2];

    group_avx512(tile, k2, codebook, g, two);
    _mm512_store_si512((void *)(w + 32 * g), two[0]);
    _mm512_store_si512((void *)(w + 32 * (g + 4)), two[1]);
}

static FLAT AVX512 void decode_rate_avx512(const uint8_t *tile, size_t row_bytes, int k2,
                                           hx_codebook codebook, int16_t *w)
{
    for (int t = 0; t < 8; t++, tile += row_bytes, w += 256) {
        put_avx512(tile, k2, codebook, 0, w);
        put_avx512(tile, k2, codebook, 1, w);
        put_avx512(tile, k2, codebook, 2, w);
        put_avx512(tile, k2, codebook, 3, w);
    }
}

#define X(cb, k2)                                                                        \
    static AVX512 void decode_avx512_##cb##_##k2(const uint8_t *tile, size_t row_bytes,  \
                                                 int16_t *w)                             \
    {                                                                                    \
        decode_rate_avx512(tile, row_bytes, k2, HX_CB_##cb, w);                          \
    }
DECODERS(X)
#undef X

static decoder *const decoders_avx512[HX_N_CB][17] = {
#define X(cb, k2) [HX_CB_##cb][k2] = decode_avx512_##cb##_##k2,
    DECODERS(X)
#undef X
};

static void avx512_decode(const uint8_t *tile, size_t row_bytes, int k2,
                          hx_codebook codebook, int16_t *w)
{
    decoders_avx512[codebook][k2](tile, row_bytes, w);
}

/* ---- AVX-512: sums --------------------------------------------------- */

/* The sums of the 8 dwords of outputs 2 i and 2 i + 1, which sum[i] holds. */
static FLAT AVX512 __m512i join_avx512(const __m512i sum[8])
{
    __m512i s[4];

    UNROLL
    for (int i = 0; i < 4; i++) /* a quarter per output, 4 i … 4 i + 3 */
        s[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(sum[2 * i], sum[2 * i + 1], 0x88),
                                _mm512_shuffle_i32x4(sum[2 * i], sum[2 * i + 1], 0xDD));
    const __m512 a0 = _mm512_castsi512_ps(_mm512_add_epi32(
        _mm512_unpacklo_epi64(s[0], s[1]), _mm512_unpackhi_epi64(s[0], s[1])));
    const __m512 a1 = _mm512_castsi512_ps(_mm512_add_epi32(
        _mm512_unpacklo_epi64(s[2], s[3]), _mm512_unpackhi_epi64(s[2], s[3])));
    const __m512i across = /* quarter i: outputs i, 4 + i, 8 + i, 12 + i */
        _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a0, a1, 0x88)),
                         _mm512_castps_si512(_mm512_shuffle_ps(a0, a1, 0xDD)));

    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), across);
}

/* The activations of tile row t, twice. */
static FLAT AVX512 __m512i twice_avx512(const int16_t *a, int t)
{
    return _mm512_broadcast_i64x4(_mm256_load_si256((const void *)(a + 16 * t)));
}

/* The 16 outputs of a block times a; a vector of w holds two. */
static FLAT AVX512 __m512i dot_avx512(const int16_t *w, const int16_t *a)
{
    __m512i sum[8];

    UNROLL
    for (int i = 0; i < 8; i++)
        sum[i] = _mm512_setzero_si512();
    for (int t = 0; t < 8; t++) {
        const __m512i at = twice_avx512(a, t);

        UNROLL
        for (int i = 0; i < 8; i++)
            sum[i] =
                _mm512_dpwssd_epi32(sum[i], _mm512_load_si512(w + 256 * t + 32 * i), at);
    }
    return join_avx512(sum);
}

/* t is 16 terms of block b. */
static FLAT AVX512 void tree_add_avx512(float *level, uint32_t b, __m512 t)
{
    for (; (b & 1) != 0; b >>= 1, level += COLS)
        t = _mm512_add_ps(_mm512_loadu_ps(level), t);
    _mm512_storeu_ps(level, t);
}

/* Adds the terms of row x for the sums of a block. */
static FLAT AVX512 void add_mul1_avx512(float *level, uint32_t b, __m512i sum,
                                        const hx_mm_exl3 *x)
{
    const __m512i less = _mm512_set1_epi32((int32_t)(512u * (uint32_t)x->sum));
    __m512 t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, less)),
                               _mm512_set1_ps(HX_CANON_K_INV),
                               _mm512_set1_ps(HX_CANON_C2 * (float)x->sum));

    tree_add_avx512(level, b, _mm512_mul_ps(t, _mm512_set1_ps(x->q)));
}

static FLAT AVX512 void exl3_rows_avx512(const hx_mm_sum *s, bool mul1)
{
    for (int r = 0; r < s->n_row; r++) {
        const hx_mm_exl3 *x = (const void *)(s->x + (size_t)r * s->x_step);
        float *level = s->tree + (size_t)r * s->tree_step;
        const __m512i i = dot_avx512(s->w, x->a[0]);

        if (mul1) {
            add_mul1_avx512(level, s->block, i, x);
            continue;
        }
        const __m512 t = _mm512_fmadd_ps(_mm512_set1_ps(254.0f), _mm512_cvtepi32_ps(i),
                                         _mm512_cvtepi32_ps(dot_avx512(s->w, x->a[1])));
        tree_add_avx512(level, s->block,
                        _mm512_mul_ps(t, _mm512_set1_ps(x->q * HX_CANON_UNIT)));
    }
}

static AVX512 void avx512_sum_exl3(const hx_mm_sum *s)
{
    if (s->mul1)
        exl3_rows_avx512(s, true);
    else
        exl3_rows_avx512(s, false);
}

static FLAT AVX512 void add_group_avx512(__m512i sum[8], const uint8_t *tile, int k2,
                                         int g, __m512i at)
{
    __m512i two[2];

    group_avx512(tile, k2, HX_CB_MUL1, g, two);
    sum[g] = _mm512_dpwssd_epi32(sum[g], two[0], at);
    sum[g + 4] = _mm512_dpwssd_epi32(sum[g + 4], two[1], at);
}

static FLAT AVX512 void one_rate_avx512(const hx_mm_sum *s, const uint8_t *tile,
                                        size_t row_bytes, int k2, size_t ahead)
{
    const hx_mm_exl3 *x = (const void *)s->x;
    __m512i sum[8];

    UNROLL
    for (int i = 0; i < 8; i++)
        sum[i] = _mm512_setzero_si512();
    for (int t = 0; t < 8; t++, tile += row_bytes) {
        const __m512i at = twice_avx512(x->a[0], t);

        UNROLL
        for (int i = 0; i < 16 * k2; i += 64)
            _mm_prefetch((const char *)tile + ahead + i, _MM_HINT_T0);
        add_group_avx512(sum, tile, k2, 0, at);
        add_group_avx512(sum, tile, k2, 1, at);
        add_group_avx512(sum, tile, k2, 2, at);
        add_group_avx512(sum, tile, k2, 3, at);
    }
    add_mul1_avx512(s->tree, s->block, join_avx512(sum), x);
}

static AVX512 void avx512_one_mul1(const hx_mm_sum *s, const uint8_t *tile,
                                   size_t row_bytes, int k2, size_t ahead)
{
    switch (k2) {
#define X(k2)                                                                            \
    case k2:                                                                             \
        one_rate_avx512(s, tile, row_bytes, k2, ahead);                                  \
        break;
        X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(10) X(12) X(14) X(16)
#undef X
    }
}

/* Plain formats wait for memory with 256 bits already. */
const hx_mm_kernels hx_mm_avx512 = {
    .quantize = avx2_quantize,
    .decode = avx512_decode,
    .sum_exl3 = avx512_sum_exl3,
    .one_mul1 = avx512_one_mul1,
    .rotate = avx2_rotate,
    .widen = avx2_widen,
    .sum_plain = avx2_sum_plain,
    .sum_bf16 = avx2_sum_bf16,
    .sum_columns = avx2_sum_columns,
    .act = avx2_act,
};
#endif
