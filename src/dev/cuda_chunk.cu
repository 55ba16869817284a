/* cuda_chunk.cu - the gated delta rule over many rows on the GPU: prefill of KDA layers in
 * the chunked form (glm5_next.md 4). Called through the operation table in cuda.cu. Never
 * allocates, waits or reads back; spans are read where they are.
 *
 * A span is cut into chunks of up to 64 rows at multiples of 64 of the position. What a
 * chunk needs beside the state is made for all chunks and heads at once (make_chunks) and
 * left in memory as operands of the tensor cores; then each head's state walks over its
 * chunks (walk_chunks). Rows of the state are columns of v, which never meet: a warp has
 * 16 of them, the whole state of these stays in its registers as sums, and what is a sum
 * of one product is an operand of the next as it lies.
 *
 * Factors of products are sums of two tf32, of which the tensor cores take three products: so
 * all is f32 to some 1e-6 (in one product each, rows came out 4e-4 off, and the state 1e-3
 * where keys are alike and nothing decays). Decays are exponentials of differences: exp(G_i - G_j) is never split into exp(G_i) exp(-G_j) but at a row between
 * i and j, where both factors are at most 1. */
#include "dev/cuda_dev.h"

enum {
    CHUNK = HX_PAGE,
    SUB = 16, /* rows of a sub-block: inside, decays move from row to row */
    SUBS = CHUNK / SUB,
    MAKE_WARPS = 8,
    MAKE_THREADS = 32 * MAKE_WARPS,
    MAX_WIDTH = 128,
    A_LD = CHUNK + 4, /* floats; pitches without bank conflicts */
    T_LD = SUB + 4,
    WALK_WARPS = 4,
    WALK_THREADS = 32 * WALK_WARPS,
    WALK_COLS = 16 * WALK_WARPS,
    PIECE = 16 << 10, /* bytes of a record that come to shared memory together */
    MOST_STAGES = 13,
    DECAYS = 4, /* chunks whose decays are in shared memory */
};

typedef struct {
    float *o, *state;
    char *record; /* [chunks of the window, heads] */
    const float *q, *k, *v, *g, *beta;
    int64_t ld;
    int heads, width, stages;
    int first, chunks; /* the window: chunks first … first + chunks - 1 of the call */
} chunk_args;

/* What a chunk of a head leaves. Operands B [n, k] of m16n8k8 lie as [k / 16][n / 8][lane]:
 * lane 4 g + q has row g of n and k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9. Rows are those of the
 * chunk but where said so. */
template <int K> struct chunk_record {
    float4 u[K / 16][8][32];     /* U^T [v, rows] as sums of m16n8 */
    float4 wq[K / 16][2][8][32]; /* -W and q exp(G), [rows, K] */
    float4 m[4][8][32];          /* M [rows, rows] */
    float4 k[4][K / 8][32];      /* (k exp(G_end - G))^T [K, rows] */
    float decay[K];              /* exp(G_end) */

    static constexpr int WQ_PIECES = K / 32, K_PIECES = K / 64;
    static constexpr int PIECES = 1 + WQ_PIECES + 1 + K_PIECES;
};

/* ---- chunks of a call ------------------------------------------------------ */

HX_DEVICE int chunks_of(const hx_span &s)
{
    return s.n_row == 0 ? 0 : (s.pos0 + s.n_row - 1) / CHUNK - s.pos0 / CHUNK + 1;
}

/* First row of chunk i of a span, counted from the span's; and of the next one. */
HX_DEVICE int chunk_begin(const hx_span &s, int i)
{
    return i == 0 ? 0 : min(i * CHUNK - s.pos0 % CHUNK, s.n_row);
}

/* ---- tensor cores ---------------------------------------------------------- */

/* A float as two tf32: 11 bits, and 11 more. */
struct parts {
    uint32_t most, rest;

    parts() = default;
    __device__ __forceinline__ parts(float x)
        : most(hx_bits_of(x) & 0xFFFFE000u), rest(hx_bits_of(x - hx_float_of(most)))
    {
    }
    __device__ __forceinline__ uint32_t of(bool most_of_it) const
    {
        return most_of_it ? most : rest;
    }
};

/* An operand A of m16n8k8 from sums of m16n8: rows g, g + 8, and k = 2 q, 2 q + 1. */
struct left {
    parts a[4];

    __device__ __forceinline__ explicit left(const float (&d)[4])
        : a { d[0], d[2], d[1], d[3] }
    {
    }
};

/* An operand B: row g of n, k = 2 q, 2 q + 1. */
struct right {
    parts x, y;

    right() = default;
    __device__ __forceinline__ right(float x, float y) : x(x), y(y)
    {
    }
};

/* d[i] [16, 8] += a [16, 8] b[i] [8, 8]^T from i = first on, but for rest times rest. One
 * product of all after the other, so that no sum waits for itself. */
template <int N>
HX_DEVICE void multiply(float (*d)[4], const left &l, const right (&b)[N], int first = 0)
{
#pragma unroll
    for (int part = 0; part < 3; part++) {
        const bool a_most = part != 0, b_most = part != 1;

#pragma unroll
        for (int i = 0; i < N; i++)
            if (i >= first)
                asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                    : "r"(l.a[0].of(a_most)), "r"(l.a[1].of(a_most)),
                      "r"(l.a[2].of(a_most)), "r"(l.a[3].of(a_most)),
                      "r"(b[i].x.of(b_most)), "r"(b[i].y.of(b_most)));
    }
}

/* d[i] += (a0, a1) b[i], k = 16; b as a record has it, from this lane's part on. */
HX_DEVICE void multiply8(float (*d)[4], const float (*a)[4], const float4 *b,
                         int first = 0)
{
    float4 v[8];

#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = i >= first ? b[i * 32] : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        right r[8];

#pragma unroll
        for (int i = 0; i < 8; i++)
            r[i] = h == 0 ? right(v[i].x, v[i].y) : right(v[i].z, v[i].w);
        multiply(d, left(a[h]), r, first);
    }
}

/* ---- what a chunk needs beside the state ------------------------------------ */

template <int K> struct make_room {
    static constexpr int LD = K + 4;
    float k[CHUNK][LD];
    float g[CHUNK][LD]; /* log decays; from their sums on: summed inside the sub-block */
    float start[SUBS + 1][K]; /* their sum before each sub-block, and over all */
    float a[CHUNK][A_LD];     /* A below the diagonal, M^T on it and above */
    float t[SUBS][SUB][T_LD]; /* (I + A)^-1 of each sub-block */
    float beta[CHUNK], q_scale[CHUNK];
};
static_assert(sizeof(make_room<MAX_WIDTH>) <= HX_CUDA_LEAST_SHARED, "any GPU takes it");

/* One chunk of one head as a block sees it. */
struct chunk_at {
    const chunk_args &a;
    int h, n; /* rows */
    int64_t row;
    bool wide; /* rows can be read 16 bytes at a time */

    __device__ __forceinline__ int64_t in(int i) const
    {
        return (row + i) * a.ld + (int64_t)h * a.width;
    }
    __device__ __forceinline__ float at(const float *p, int i, int d) const
    {
        return i < n && d < a.width ? p[in(i) + d] : 0.0f;
    }
    /* Channels d and d + 1 of row i, d even; 0 past the chunk and the width. */
    __device__ __forceinline__ float2 two(const float *p, int i, int d) const
    {
        if (wide)
            return i < n && d < a.width ? *(const float2 *)(p + in(i) + d)
                                        : make_float2(0, 0);
        return make_float2(at(p, i, d), at(p, i, d + 1));
    }
    /* Channels d … d + 3, d a multiple of 4; p + begin is the head's row. */
    __device__ __forceinline__ void four(const float *p, int64_t begin, int i, int d,
                                         float (&v)[4]) const
    {
        if (wide) {
            const float4 x = i < n && d < a.width ? *(const float4 *)(p + begin + d)
                                                  : make_float4(0, 0, 0, 0);
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
            return;
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            v[e] = i < n && d + e < a.width ? p[begin + d + e] : 0.0f;
    }
};

HX_DEVICE float squares(const float (&v)[4])
{
    return fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], v[0] * v[0])));
}

/* Rows to shared memory: k normalised, g, and what q and v are to be multiplied with. */
template <int K> HX_DEVICE void make_rows(const chunk_at &x, make_room<K> &room)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = 4 * lane;

#pragma unroll 4
    for (int j = 0; j < CHUNK / MAKE_WARPS; j++) {
        const int i = warp + MAKE_WARPS * j;
        const int64_t g_in = ((x.row + i) * x.a.heads + x.h) * x.a.width;
        float q[4], k[4], g[4];

        x.four(x.a.q, x.in(i), i, d, q);
        x.four(x.a.k, x.in(i), i, d, k);
        x.four(x.a.g, g_in, i, d, g);
        const float kk = hx_warp_sum(squares(k)), qq = hx_warp_sum(squares(q));
        const float ks = 1.0f / sqrtf(kk + 1e-6f);
        if (d < K) {
            *(float4 *)&room.k[i][d] =
                make_float4(k[0] * ks, k[1] * ks, k[2] * ks, k[3] * ks);
            *(float4 *)&room.g[i][d] = make_float4(g[0], g[1], g[2], g[3]);
        }
        if (lane == 0) {
            room.q_scale[i] = 1.0f / sqrtf((qq + 1e-6f) * (float)x.a.width);
            room.beta[i] = i < x.n ? x.a.beta[(x.row + i) * x.a.heads + x.h] : 0.0f;
        }
    }
}

/* Sums of 16 values over a warp: lane has that of value lane / 2. */
HX_DEVICE float sums_of_16(float (&s)[16])
{
    const int lane = threadIdx.x & 31;

#pragma unroll
    for (int w = 8; w > 0; w /= 2) {
        const bool high = (lane & 2 * w) != 0;

#pragma unroll
        for (int i = 0; i < w; i++) {
            const float away = high ? s[i] : s[i + w], mine = high ? s[i + w] : s[i];

            s[i] = mine + __shfl_xor_sync(~0u, away, 2 * w);
        }
    }
    return s[0] + __shfl_xor_sync(~0u, s[0], 1);
}

/* A and M inside a sub-block, in fp32. Two warps each: columns j of one parity, k_j with
 * its decay up to row i in registers, four channels a lane. */
template <int K> HX_DEVICE void make_diagonal(const chunk_at &x, make_room<K> &room)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = 4 * lane;
    const int first = (warp >> 1) * SUB, odd = warp & 1;
    float kj[SUB / 2][4] = {};

#pragma unroll 2
    for (int i = 0; i < SUB; i++) {
        const int row = first + i;
        float q[4], k[4] = {}, decay[4], sum[16];

        x.four(x.a.q, x.in(row), row, d, q);
        const float scale = room.q_scale[row];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            k[e] = d < K ? room.k[row][d + e] : 0.0f;
            decay[e] = d < K ? __expf(room.g[row][d + e]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < SUB / 2; j++) {
            float of_k = 0, of_q = 0;

#pragma unroll
            for (int e = 0; e < 4; e++) {
                kj[j][e] = 2 * j + odd == i ? k[e] : kj[j][e] * decay[e];
                of_k = fmaf(k[e], kj[j][e], of_k);
                of_q = fmaf(q[e], kj[j][e], of_q);
            }
            sum[j] = of_k;
            sum[8 + j] = of_q;
        }
        const float s = sums_of_16(sum);
        const int j = 2 * (lane >> 1 & 7) + odd;
        if ((lane & 1) == 0 && lane < 16 && j < i)
            room.a[row][first + j] = s * room.beta[row];
        if ((lane & 1) == 0 && lane >= 16 && j <= i)
            room.a[first + j][row] = s * scale;
    }
}

/* Sums of the log decays inside sub-blocks. */
template <int K> HX_DEVICE void make_sums(make_room<K> &room)
{
    for (int at = threadIdx.x; at < K * SUBS; at += MAKE_THREADS) {
        const int d = at % K, first = at / K * SUB;
        float sum = 0;

#pragma unroll
        for (int i = 0; i < SUB; i++) {
            sum += room.g[first + i][d];
            room.g[first + i][d] = sum;
        }
    }
}

template <int K> HX_DEVICE void make_starts(make_room<K> &room)
{
    float sum = 0;

    if (threadIdx.x >= K)
        return;
    for (int s = 0; s <= SUBS; s++) {
        room.start[s][threadIdx.x] = sum;
        sum += s < SUBS ? room.g[s * SUB + SUB - 1][threadIdx.x] : 0.0f;
    }
}

HX_DEVICE float2 load2(const float *p)
{
    return *(const float2 *)p;
}

/* A and M of sub-blocks of rows ri and columns rj, eight columns from c0 on. */
template <int K>
HX_DEVICE void make_pair(const chunk_at &x, make_room<K> &room, int ri, int rj, int c0)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const int i0 = ri * SUB + g, i1 = i0 + 8, j = rj * SUB + c0 + g;
    const float s0 = room.q_scale[i0], s1 = room.q_scale[i1];
    float of_k[1][4] = {}, of_q[1][4] = {};

#pragma unroll 4
    for (int d = 2 * q; d < K; d += 8) {
        const float2 g0 = load2(&room.g[i0][d]), g1 = load2(&room.g[i1][d]);
        const float2 k0 = load2(&room.k[i0][d]), k1 = load2(&room.k[i1][d]);
        const float2 q0 = x.two(x.a.q, i0, d), q1 = x.two(x.a.q, i1, d);
        const float2 kj = load2(&room.k[j][d]), gj = load2(&room.g[j][d]);
        const float2 from = load2(&room.start[rj][d]), to = load2(&room.start[ri][d]);
        const float e0 = __expf(g0.x), f0 = __expf(g0.y), e1 = __expf(g1.x),
                    f1 = __expf(g1.y);
        const right b[1] = { { kj.x * __expf(to.x - from.x - gj.x),
                               kj.y * __expf(to.y - from.y - gj.y) } };

        multiply(of_k, left({ k0.x * e0, k0.y * f0, k1.x * e1, k1.y * f1 }), b);
        multiply(of_q, left({ q0.x * e0, q0.y * f0, q1.x * e1, q1.y * f1 }), b);
    }
    const int at = rj * SUB + c0 + 2 * q;
    *(float2 *)&room.a[i0][at] =
        make_float2(of_k[0][0] * room.beta[i0], of_k[0][1] * room.beta[i0]);
    *(float2 *)&room.a[i1][at] =
        make_float2(of_k[0][2] * room.beta[i1], of_k[0][3] * room.beta[i1]);
    room.a[at][i0] = of_q[0][0] * s0;
    room.a[at + 1][i0] = of_q[0][1] * s0;
    room.a[at][i1] = of_q[0][2] * s1;
    room.a[at + 1][i1] = of_q[0][3] * s1;
}

/* (I + A)^-1 of a sub-block; a lane has a column. */
template <int K> HX_DEVICE void make_inverse(make_room<K> &room, int sub)
{
    const int c = threadIdx.x & 31;
    float x[SUB];

    if (c >= SUB)
        return;
#pragma unroll
    for (int i = 0; i < SUB; i++) {
        x[i] = i == c ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j++)
            x[i] = fmaf(-room.a[sub * SUB + i][sub * SUB + j], x[j], x[i]);
        room.t[sub][i][c] = x[i];
    }
}

/* The six pairs of sub-blocks and the four inverses: 16 tasks for the warps. */
template <int K> HX_DEVICE void make_task(const chunk_at &x, make_room<K> &room, int task)
{
    const int p = task >> 1, ri = p == 0 ? 1 : p < 3 ? 2 : 3;

    if (task >= 12)
        make_inverse<K>(room, task - 12);
    else
        make_pair<K>(x, room, ri, p - ri * (ri - 1) / 2, 8 * (task & 1));
}

/* q exp(G), (k exp(G_end - G))^T and the decay of all rows. */
template <int K>
HX_DEVICE void make_scaled(const chunk_at &x, const make_room<K> &room,
                           chunk_record<K> *to)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;

#pragma unroll 2
    for (int t = warp; t < K / 2; t += MAKE_WARPS) { /* tiles [k / 16][rows / 8] */
        const int i = 8 * (t & 7) + g, d = 16 * (t >> 3) + 2 * q;
        const float *s = room.start[i / SUB], scale = room.q_scale[i];
        const float2 q0 = x.two(x.a.q, i, d), q1 = x.two(x.a.q, i, d + 8);

        to->wq[t >> 3][1][t & 7][lane] =
            make_float4(q0.x * scale * __expf(s[d] + room.g[i][d]),
                        q0.y * scale * __expf(s[d + 1] + room.g[i][d + 1]),
                        q1.x * scale * __expf(s[d + 8] + room.g[i][d + 8]),
                        q1.y * scale * __expf(s[d + 9] + room.g[i][d + 9]));
    }
#pragma unroll 2
    for (int t = warp; t < K / 2; t += MAKE_WARPS) { /* tiles [rows / 16][k / 8] */
        const int r = t / (K / 8), d = 8 * (t % (K / 8)) + g;
        const float end = room.start[SUBS][d] - room.start[r][d];
        float v[4];

#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = 16 * r + 2 * q + (e & 1) + 8 * (e >> 1);

            v[e] = room.k[i][d] * __expf(end - room.g[i][d]);
        }
        to->k[r][t % (K / 8)][lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
    for (int d = threadIdx.x; d < K; d += MAKE_THREADS)
        to->decay[d] = __expf(room.start[SUBS][d]);
}

/* X^T [16, rows] of (I + A) X = x, two at a time, in place; sums of m16n8, [sub-block]
 * [8 rows]. */
template <int K> HX_DEVICE void solve(const make_room<K> &room, float (&x)[2][SUBS][2][4])
{
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;

#pragma unroll
    for (int r = 0; r < SUBS; r++) {
#pragma unroll
        for (int c = 0; c < r; c++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const float *a = &room.a[r * SUB + g][c * SUB + 8 * s + 2 * q];
                const right b[2] = { { -a[0], -a[1] },
                                     { -a[8 * A_LD], -a[8 * A_LD + 1] } };

                multiply(x[0][r], left(x[0][c][s]), b);
                multiply(x[1][r], left(x[1][c][s]), b);
            }
        const float *t = &room.t[r][g][2 * q];
        const right b0[2] = { { t[0], t[1] }, { t[8 * T_LD], t[8 * T_LD + 1] } },
                    b1[1] = { { t[8 * T_LD + 8], t[8 * T_LD + 9] } };
        float y[2][2][4] = {};

#pragma unroll
        for (int i = 0; i < 2; i++) {
            multiply(y[i], left(x[i][r][0]), b0);
            multiply(y[i] + 1, left(x[i][r][1]), b1);
        }
#pragma unroll
        for (int e = 0; e < 16; e++)
            x[e >> 3][r][e >> 2 & 1][e & 3] = y[e >> 3][e >> 2 & 1][e & 3];
    }
}

/* Sums [16 k, 8 rows] as an operand B [rows, 16 k]. */
HX_DEVICE float4 turned(const float (&d)[4])
{
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    float v[4];

#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int from = 4 * (2 * q + (e & 1)) + (g >> 1), r = e & 2;
        const float even = __shfl_sync(~0u, d[r], from),
                    odd = __shfl_sync(~0u, d[r + 1], from);

        v[e] = (g & 1) != 0 ? odd : even;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* W and U, 16 channels of each a warp at a time. */
template <int K>
HX_DEVICE void make_solved(const chunk_at &x, const make_room<K> &room,
                           chunk_record<K> *to)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;

    if (warp >= K / 16)
        return;
    float x_of[2][SUBS][2][4]; /* of W and U */
#pragma unroll
    for (int e = 0; e < SUBS * 8; e++) {
        const int i = 8 * (e >> 2) + 2 * q + (e & 1),
                  d = 16 * warp + g + 8 * (e >> 1 & 1);

        x_of[0][e >> 3][e >> 2 & 1][e & 3] =
            -room.beta[i] * room.k[i][d] * __expf(room.start[e >> 3][d] + room.g[i][d]);
        x_of[1][e >> 3][e >> 2 & 1][e & 3] = room.beta[i] * x.at(x.a.v, i, d);
    }
    solve<K>(room, x_of);
#pragma unroll
    for (int t = 0; t < 8; t++) {
        to->wq[warp][0][t][lane] = turned(x_of[0][t >> 1][t & 1]);
        to->u[warp][t][lane] = *(const float4 *)x_of[1][t >> 1][t & 1];
    }
}

/* M as an operand; tiles above the diagonal are never read. */
template <int K> HX_DEVICE void make_inner(const make_room<K> &room, chunk_record<K> *to)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;

    for (int t = warp; t < 32; t += MAKE_WARPS) {
        const int i = 8 * (t & 7) + g;
        float v[4];

        if ((t & 7) < 2 * (t >> 3))
            continue;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int j = 16 * (t >> 3) + 2 * q + (e & 1) + 8 * (e >> 1);

            v[e] = j <= i ? room.a[j][i] : 0.0f;
        }
        to->m[t >> 3][t & 7][lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

/* One block: one chunk of one head. Grid (heads, chunks of the window). Shared: k and the
 * decays of the chunk and its 64 x 64 products, 93 KB. Moves q, k, v and g once, and the
 * record. */
template <int K>
__global__ void __launch_bounds__(MAKE_THREADS, 2)
    make_chunks(const chunk_args a, const __grid_constant__ hx_cuda_spans spans)
{
    extern __shared__ __align__(16) char shared[];
    make_room<K> &room = *(make_room<K> *)shared;
    const int warp = threadIdx.x >> 5;
    chunk_record<K> *to =
        (chunk_record<K> *)a.record + (int64_t)blockIdx.y * a.heads + blockIdx.x;
    int c = a.first + (int)blockIdx.y;
    chunk_at x = { a, (int)blockIdx.x, 0, 0,
                   a.width % 4 == 0 && a.ld % 4 == 0 &&
                       (((uintptr_t)a.q | (uintptr_t)a.k | (uintptr_t)a.g) & 15) == 0 };

    for (int i = 0; i < spans.n && x.n == 0; i++) {
        const hx_span s = hx_span_at(spans, i);
        const int n = chunks_of(s);

        if (c < n) {
            x.row = s.row0 + chunk_begin(s, c);
            x.n = chunk_begin(s, c + 1) - chunk_begin(s, c);
        }
        c -= n;
    }
    if (x.n == 0)
        return;
    make_rows<K>(x, room);
    __syncthreads();
    make_diagonal<K>(x, room);
    __syncthreads();
    make_sums<K>(room);
    __syncthreads();
    make_starts<K>(room);
    __syncthreads();
    make_task<K>(x, room, warp);
    make_task<K>(x, room, warp + MAKE_WARPS);
    make_scaled<K>(x, room, to);
    __syncthreads();
    make_inner<K>(room, to);
    make_solved<K>(x, room, to);
}

/* ---- the state walks ---------------------------------------------------------- */

template <int K> struct walk {
    const chunk_args &a;
    const chunk_record<K> *record; /* the head's in the first chunk */
    int64_t record_pitch;          /* in records */
    int chunks, part, at;          /* at: pieces taken so far */
    char *ring;
    float *decay; /* [DECAYS][K] */

    typedef chunk_record<K> rec;

    /* Begins to copy piece i of all. */
    __device__ __forceinline__ void issue(int i)
    {
        const int c = i / rec::PIECES, p = i % rec::PIECES;
        char *to = ring + i % a.stages * PIECE;

        if (c < chunks) {
            const rec *r = record + c * record_pitch;
            const char *from =
                p == 0 ? (const char *)r->u[4 * part]
                       : (const char *)r->wq + (p - 1) * PIECE; /* wq, m, k in a row */

#pragma unroll
            for (int b = 0; b < PIECE / 16 / WALK_THREADS; b++)
                copy16(to, from, b);
            if (p == 0 && threadIdx.x < K / 4)
                copy16((char *)(decay + c % DECAYS * K), (const char *)r->decay, 0);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    static __device__ __forceinline__ void copy16(char *to, const char *from, int b)
    {
        const int at = 16 * (threadIdx.x + b * WALK_THREADS);

        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         (uint32_t)__cvta_generic_to_shared(to + at)),
                     "l"(__cvta_generic_to_global(from + at))
                     : "memory");
    }
    /* The next piece, this lane's part of each 512 bytes. */
    __device__ __forceinline__ const float4 *take()
    {
        if (a.stages == MOST_STAGES)
            asm volatile("cp.async.wait_group %0;" ::"n"(MOST_STAGES - 2) : "memory");
        else
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        issue(at + a.stages - 1);
        return (const float4 *)(ring + at++ % a.stages * PIECE) + (threadIdx.x & 31);
    }
};

/* Calls f(value, k, v) for the lane's sums of the state S^T, columns from v0 on. */
template <int K, class F> HX_DEVICE void state_visit(float (&s)[K / 8][4], int v0, F f)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;

#pragma unroll
    for (int t = 0; t < K / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(s[t][e], 8 * t + 2 * q + (e & 1), v0 + g + 8 * (e >> 1));
}

/* One chunk: V = U - W S, o = q exp(G) S + M V, S = decay S + k^T V, all transposed. row:
 * the head's output of its first row. */
template <int K>
HX_DEVICE void walk_one(walk<K> &w, float (&s)[K / 8][4], int c, float *o, int n, int v0)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int64_t ldo = (int64_t)w.a.heads * w.a.width;
    const float4 *p = w.take() + warp * 8 * 32;
    float v[8][4], y[8][4] = {};

#pragma unroll
    for (int t = 0; t < 8; t++)
        *(float4 *)v[t] = p[t * 32];
#pragma unroll
    for (int kk = 0; kk < K / 16; kk++) {
        if (kk % 2 == 0)
            p = w.take();
        multiply8(v, s + 2 * kk, p + kk % 2 * 16 * 32);
        multiply8(y, s + 2 * kk, p + (kk % 2 * 16 + 8) * 32);
    }
    p = w.take();
#pragma unroll
    for (int j = 0; j < 4; j++)
        multiply8(y, v + 2 * j, p + j * 8 * 32, 2 * j);
#pragma unroll
    for (int t = 0; t < 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = 8 * t + 2 * q + (e & 1), at = v0 + g + 8 * (e >> 1);

            if (i < n && at < w.a.width)
                o[i * ldo + at] = y[t][e];
        }
    const float *decay = w.decay + c % DECAYS * K;
#pragma unroll
    for (int t = 0; t < K / 8; t++) {
        const float2 d = load2(decay + 8 * t + 2 * q);

        s[t][0] *= d.x;
        s[t][1] *= d.y;
        s[t][2] *= d.x;
        s[t][3] *= d.y;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j % (4 / chunk_record<K>::K_PIECES) == 0)
            p = w.take() - j * (K / 8) * 32;
#pragma unroll
        for (int t = 0; t < K / 8; t += 8)
            multiply8(s + t, v + 2 * j, p + (j * (K / 8) + t) * 32);
    }
}

/* One block: 64 columns of one head of one span, its chunks of the window in order. Grid
 * (heads * K / 64, spans). Shared: stages of 16 KB, four decays. Moves the state in and
 * out, the records once for each block of a head, o once. */
template <int K>
__global__ void __launch_bounds__(WALK_THREADS, 1)
    walk_chunks(const chunk_args a, const __grid_constant__ hx_cuda_spans spans)
{
    extern __shared__ __align__(16) char shared[];
    const int parts = K / WALK_COLS, h = (int)blockIdx.x / parts;
    const hx_span s = hx_span_at(spans, (int32_t)blockIdx.y);
    const int v0 = (int)blockIdx.x % parts * WALK_COLS + 16 * (threadIdx.x >> 5);
    float *state = a.state + ((int64_t)s.slot * a.heads + h) * a.width * a.width;
    const int width = a.width;
    int before = 0;
    float st[K / 8][4];

    for (int i = 0; i < (int)blockIdx.y; i++)
        before += chunks_of(hx_span_at(spans, i));
    const int c0 = max(a.first - before, 0),
              c1 = min(a.first + a.chunks - before, chunks_of(s));
    if (c0 >= c1)
        return;
    walk<K> w = { a,
                  (const chunk_record<K> *)a.record +
                      (int64_t)(before + c0 - a.first) * a.heads + h,
                  a.heads,
                  c1 - c0,
                  (int)blockIdx.x % parts,
                  0,
                  shared,
                  (float *)(shared + a.stages * PIECE) };
    for (int i = 0; i + 1 < a.stages; i++)
        w.issue(i);
    state_visit<K>(st, v0, [&](float &x, int k, int v) {
        x = k < width && v < width ? state[k * width + v] : 0.0f;
    });
    for (int c = c0; c < c1; c++) {
        const int begin = chunk_begin(s, c);

        walk_one<K>(w, st, c - c0,
                    a.o + ((int64_t)(s.row0 + begin) * a.heads + h) * width,
                    chunk_begin(s, c + 1) - begin, v0);
    }
    state_visit<K>(st, v0, [&](float &x, int k, int v) {
        if (k < width && v < width)
            state[k * width + v] = x;
    });
}

/* ---- launching ------------------------------------------------------------------ */

enum { WINDOW = 24 }; /* chunks whose records are asked for: 220 MB with 64 heads */

static int64_t chunks_at_most(int64_t rows, int64_t spans)
{
    return rows / CHUNK + 2 * spans;
}

size_t hx_cuda_chunk_scratch_bytes(const hx_dev_limits *l)
{
    return (size_t)(HX_MIN(chunks_at_most(l->max_rows, 1), WINDOW) * l->max_heads) *
           sizeof(chunk_record<MAX_WIDTH>);
}

template <int K>
static int chunk_launch(hx_cuda *c, chunk_args k, const hx_cuda_spans *spans,
                        int64_t rows, hx_err *err)
{
    const size_t each = (size_t)k.heads * sizeof(chunk_record<K>);
    const int64_t all = chunks_at_most(rows, spans->n);
    const int64_t fit = HX_MIN((int64_t)(c->scratch_bytes / each), 65535);
    const size_t decays = DECAYS * K * sizeof(float);

    if (fit < 1)
        return hx_fail(err, HX_EARG,
                       "kda_chunk: needs %zu bytes of scratch for %d heads, the device "
                       "was opened with %zu; open it with larger limits",
                       each, k.heads, c->scratch_bytes);
    k.stages = c->gpu.block_bytes >= MOST_STAGES * PIECE + decays ? MOST_STAGES : 3;
    for (int64_t at = 0; at < all; at += fit) {
        k.first = (int)at;
        k.chunks = (int)HX_MIN(fit, all - at);
        HX_LAUNCH(c, "kda_chunk", err, make_chunks<K>,
                  dim3((unsigned)k.heads, (unsigned)k.chunks), MAKE_THREADS,
                  sizeof(make_room<K>), k, *spans);
        HX_LAUNCH(c, "kda_chunk", err, walk_chunks<K>,
                  dim3((unsigned)(k.heads * (K / WALK_COLS)), (unsigned)spans->n),
                  WALK_THREADS, k.stages * PIECE + decays, k, *spans);
    }
    return 0;
}

extern "C" int hx_cuda_kda_chunk(hx_dev *d, const hx_kda_chunk_args *a, hx_err *err)
{
    const hx_kda_gate_args gate = hx_kda_step_gate(a);
    hx_cuda *c = hx_cuda_of(d);
    chunk_args k = {};
    hx_cuda_spans spans;
    int rc;

    if ((a->a_log.p != NULL && (rc = hx_cuda_kda_gate(d, &gate, err)) != 0) ||
        (rc = hx_cuda_kda_fold(d, a, err)) != 0 ||
        (rc = hx_cuda_spans_of(&spans, &a->rows, "kda_chunk", err)) != 0)
        return rc;
    k.o = (float *)a->o.p;
    k.state = (float *)a->state.p;
    k.record = c->scratch;
    k.q = (const float *)a->q.p;
    k.k = (const float *)a->k.p;
    k.v = (const float *)a->v.p;
    k.g = (const float *)a->g.p;
    k.beta = (const float *)a->beta.p;
    k.ld = a->ld;
    k.heads = (int)a->heads;
    k.width = (int)a->width;
    return a->width <= 64 ? chunk_launch<64>(c, k, &spans, a->rows.n_row, err)
                          : chunk_launch<128>(c, k, &spans, a->rows.n_row, err);
}
