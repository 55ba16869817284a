/* cuda_mla.cu - attention over latents for prefill rows on Hopper: queries and weights as
 * halves, sums f32. Called by mla_attend in cuda_attn.cu, which does all other calls. Never
 * allocates, waits or reads back.
 *
 * All heads of a row attend the same positions, so a row is a product of its own: 64 heads
 * are the 64 rows of wgmma, and the latents of 32 positions at a time are the other operand
 * twice, first with channels as inputs, then with positions. A row's sums follow its own
 * list of positions, 32 after 32.
 *
 * Four warps fetch latents and make them halves; two groups of four multiply. A group has
 * half of the channels: its part of the scores, which the groups then add, and its half of
 * z. So both know all weights and need no second exchange. */
#include "dev/cuda_pages.h"
#include "dev/cuda_tensor.h"

enum {
    HEADS = 64,
    LATENT = 512,
    TILE = 32,             /* positions */
    RING = 4,              /* tiles in shared memory */
    BLOCK = 64,            /* channels of a block: 128 bytes, one swizzle */
    Q_BLOCK = HEADS * 128, /* bytes */
    C_BLOCK = TILE * 128,
    TILE_BYTES = LATENT / BLOCK * C_BLOCK,
    PART_BYTES = 128 * 16 * 4, /* scores of a group, 16 a thread */
    GROUPS = 2,
    WARPS = 4 * GROUPS, /* that multiply */
    THREADS = 32 * (WARPS + 4),
    MEET = 1, /* barrier of the threads that multiply */
};

typedef struct {
    float *z;
    const float *q;
    pick_args pick;
    page_args cache;
    int heads;
    float scale; /* times log2 e */
} mla_args;

typedef struct {
    uint8_t q[LATENT / BLOCK][Q_BLOCK];
    uint8_t c[RING][TILE_BYTES];
    uint8_t part[2][GROUPS][PART_BYTES];
    uint64_t full[RING], empty[RING];
} mla_room;

#if HX_WGMMA

/* One row's heads as a block sees it. */
struct mla_row {
    const mla_args &a;
    mla_room &room;
    position_list l;
    int64_t row;
    int head0, tiles;
};

/* ---- fetching ------------------------------------------------------------ */

/* Two bf16 as halves. */
HX_DEVICE uint32_t halves_of(uint32_t two)
{
    const __half2 h =
        __floats2half2_rn(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));

    return *(const uint32_t *)&h;
}

/* Where the latent of this lane's position of a tile begins, -1 past the end. A warp has
 * eight. at: the position. */
HX_DEVICE int64_t find(const mla_row &x, int tile, int &at)
{
    const int i = tile * TILE + 8 * ((threadIdx.x >> 5) - WARPS) + (threadIdx.x & 7);

    at = i < x.l.n ? position_at(x.l, i) : 0;
    return i < x.l.n ? page_item(x.a.cache, x.l.slot, at, HX_PAGE) : -1;
}

/* Two e4m3 times a power of two, as halves. */
HX_DEVICE uint32_t halves_of_fp8(uint32_t two, __half2 scale)
{
    uint32_t h;

    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((uint16_t)two));
    const __half2 v = __hmul2(*(const __half2 *)&h, scale);
    return *(const uint32_t *)&v;
}

/* As fetch for FP8: latents below 2^-16 in all channels count as 0. */
HX_DEVICE void fetch_fp8(const mla_row &x)
{
    const int lane = threadIdx.x & 31, first = 8 * ((threadIdx.x >> 5) - WARPS);
    const uint8_t *data = (const uint8_t *)x.a.cache.data;
    int pos;
    int64_t from = find(x, 0, pos);

    for (int t = 0; t < x.tiles; t++) {
        const int at = t % RING;
        const float scale =
            from >= 0 ? hx_page_scale(data[page_scale(x.a.cache, from, pos)]) : 0.0f;
        uint4 raw[8];

#pragma unroll
        for (int r = 0; r < 8; r++) {
            const int64_t begin = __shfl_sync(~0u, from, r);

            raw[r] = begin >= 0 && 16 * lane < x.a.cache.width
                         ? __ldcg((const uint4 *)(data + begin + 16 * lane))
                         : make_uint4(0, 0, 0, 0);
        }
        from = find(x, t + 1, pos);
        hx_bar_wait(hx_shared_of(&x.room.empty[at]), (t / RING & 1) ^ 1);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const __half2 by = __float2half2_rn(__shfl_sync(~0u, scale, r));
            const uint4 v = raw[r];
            const int row = first + r;
            uint8_t *to = x.room.c[at] + lane / 4 * C_BLOCK + row * 128;

            /* half of the lanes write their upper piece first: no bank meets another */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int upper = i ^ (lane >> 2 & 1);
                const uint32_t a = upper ? v.z : v.x, b = upper ? v.w : v.y;

                *(uint4 *)(to + 16 * ((2 * lane + upper ^ row) & 7)) =
                    make_uint4(halves_of_fp8(a, by), halves_of_fp8(a >> 16, by),
                               halves_of_fp8(b, by), halves_of_fp8(b >> 16, by));
            }
        }
        hx_wgmma_wrote();
        hx_bar_arrive(hx_shared_of(&x.room.full[at]));
    }
}

HX_DEVICE void fetch(const mla_row &x)
{
    const int lane = threadIdx.x & 31, first = 8 * ((threadIdx.x >> 5) - WARPS);
    const uint16_t *data = (const uint16_t *)x.a.cache.data;
    int pos;
    int64_t from = find(x, 0, pos);

    for (int t = 0; t < x.tiles; t++) {
        const int at = t % RING;
        uint4 raw[8][2];

#pragma unroll
        for (int r = 0; r < 8; r++) {
            const int64_t begin = __shfl_sync(~0u, from, r);

#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = 256 * i + 8 * lane;

                raw[r][i] = begin >= 0 && c < x.a.cache.width
                                ? __ldcg((const uint4 *)(data + begin + c))
                                : make_uint4(0, 0, 0, 0);
            }
        }
        from = find(x, t + 1, pos);
        hx_bar_wait(hx_shared_of(&x.room.empty[at]), (t / RING & 1) ^ 1);
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int block = 4 * i + lane / 8, row = first + r;
                const uint4 v = raw[r][i];

                *(uint4 *)(x.room.c[at] + block * C_BLOCK + row * 128 +
                           16 * ((lane ^ row) & 7)) =
                    make_uint4(halves_of(v.x), halves_of(v.y), halves_of(v.z),
                               halves_of(v.w));
            }
        hx_wgmma_wrote();
        hx_bar_arrive(hx_shared_of(&x.room.full[at]));
    }
}

/* ---- multiplying ---------------------------------------------------------- */

/* Queries times the scale, as halves. */
HX_DEVICE void load_queries(const mla_row &x)
{
    const int lane = threadIdx.x & 31, width = x.a.cache.width;

#pragma unroll 2
    for (int h = threadIdx.x >> 5; h < HEADS; h += WARPS) {
        const bool in = x.head0 + h < x.a.heads;
        const float *q = x.a.q + (x.row * x.a.heads + x.head0 + h) * width;

#pragma unroll
        for (int i = 0; i < LATENT / 128; i++) {
            const int c = 128 * i + 4 * lane;
            const float4 v =
                in && c < width ? *(const float4 *)(q + c) : make_float4(0, 0, 0, 0);
            __half2 two[2];

            two[0] = __floats2half2_rn(v.x * x.a.scale, v.y * x.a.scale);
            two[1] = __floats2half2_rn(v.z * x.a.scale, v.w * x.a.scale);
            *(uint2 *)(x.room.q[c / BLOCK] + h * 128 + 16 * ((c / 8 ^ h) & 7) +
                       8 * (lane & 1)) = *(const uint2 *)two;
        }
    }
    hx_wgmma_wrote();
    hx_bar_sync(MEET, 32 * WARPS);
}

/* Begins the group's part of a tile's scores. */
HX_DEVICE void begin_scores(const mla_row &x, int t, float (&s)[16])
{
    const int group = threadIdx.x >> 7, at = t % RING;

    hx_bar_wait(hx_shared_of(&x.room.full[at]), t / RING & 1);
#pragma unroll
    for (int b = 0; b < LATENT / BLOCK / GROUPS; b++) {
        const int block = 4 * group + b;
        const uint64_t q = hx_wgmma_matrix(hx_shared_of(x.room.q[block]));
        const uint64_t c = hx_wgmma_matrix(hx_shared_of(x.room.c[at] + block * C_BLOCK));

#pragma unroll
        for (int k = 0; k < 4; k++)
            hx_wgmma_shared<32>(s, q + 2 * k, c + 2 * k, b + k > 0);
    }
    hx_wgmma_commit();
}

/* Adds the other group's part. */
HX_DEVICE void join_scores(const mla_row &x, int t, float (&s)[16])
{
    const int group = threadIdx.x >> 7, me = threadIdx.x & 127;
    float4 *mine = (float4 *)x.room.part[t & 1][group] + me;
    const float4 *other = (const float4 *)x.room.part[t & 1][group ^ 1] + me;

#pragma unroll
    for (int i = 0; i < 4; i++)
        mine[128 * i] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    hx_bar_sync(MEET, 32 * WARPS);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 v = other[128 * i];

        s[4 * i] += v.x;
        s[4 * i + 1] += v.y;
        s[4 * i + 2] += v.z;
        s[4 * i + 3] += v.w;
    }
}

/* The running softmax of this thread's two heads, g and g + 8 of the warp's 16. */
struct softmax {
    float top[2], mass[2], keep[2];
};

HX_DEVICE uint32_t pair_of(float a, float b)
{
    const __half2 h = __floats2half2_rn(a, b);

    return *(const uint32_t *)&h;
}

/* Scores of n positions become weights. */
HX_DEVICE void soften(softmax &m, float (&s)[16], int n)
{
    const int q = threadIdx.x & 3;

#pragma unroll
    for (int i = 0; i < 16; i++)
        if (8 * (i >> 2) + 2 * q + (i & 1) >= n)
            s[i] = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float best = m.top[r], sum = 0;

#pragma unroll
        for (int i = 0; i < 4; i++)
            best = fmaxf(best, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s[4 * i + 2 * r + e] = exp2f(s[4 * i + 2 * r + e] - best);
                sum += s[4 * i + 2 * r + e];
            }
        m.keep[r] = exp2f(m.top[r] - best);
        m.mass[r] = fmaf(m.mass[r], m.keep[r], sum);
        m.top[r] = best;
    }
}

/* z is the program's again, and so are the registers of the weights that made it: those of
 * the next tile stay f32 until here, or their halves would be written over operands that
 * tensor cores still read. */
HX_DEVICE void take_back(float (&z)[128], float (&s)[16])
{
    hx_wgmma_wait();
#pragma unroll
    for (int i = 0; i < 128; i++)
        HX_PIN(z[i], "f");
#pragma unroll
    for (int i = 0; i < 16; i++)
        HX_PIN(s[i], "f");
}

/* z times what the softmax keeps; most tiles bring no new maximum. */
HX_DEVICE void keep(float (&z)[128], const softmax &m)
{
    if (__all_sync(~0u, m.keep[0] == 1.0f && m.keep[1] == 1.0f))
        return;
#pragma unroll
    for (int i = 0; i < 128; i++)
        z[i] *= m.keep[i >> 1 & 1];
}

HX_DEVICE void store_row(const mla_row &x, const float (&z)[128], softmax &m)
{
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 7,
              h0 = 16 * (threadIdx.x >> 5 & 3) + (lane >> 2);
    const int width = x.a.cache.width;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = x.head0 + h0 + 8 * r;
        float *to = x.a.z + (x.row * x.a.heads + h) * width;

        m.mass[r] += __shfl_xor_sync(~0u, m.mass[r], 1);
        m.mass[r] += __shfl_xor_sync(~0u, m.mass[r], 2);
        const float scale = 1.0f / m.mass[r];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int c = 256 * group + 8 * i + 2 * (lane & 3);

            if (h < x.a.heads && c < width)
                *(float2 *)(to + c) =
                    make_float2(z[4 * i + 2 * r] * scale, z[4 * i + 2 * r + 1] * scale);
        }
    }
}

/* The next tile's scores are made while the weights of this one wait for z. */
HX_DEVICE void attend(const mla_row &x)
{
    const int group = threadIdx.x >> 7;
    softmax m = { { -INFINITY, -INFINITY }, {}, {} };
    float z[128], s[16];

#pragma unroll
    for (int i = 0; i < 128; i++)
        z[i] = 0;
    load_queries(x);
    hx_wgmma_begin();
    begin_scores(x, 0, s);
    hx_wgmma_wait();
    for (int t = 0; t < x.tiles; t++) {
        uint32_t p[2][4]; /* operand A of two products of 16 positions */

#pragma unroll
        for (int i = 0; i < 16; i++)
            HX_PIN(s[i], "f");
        join_scores(x, t, s);
        soften(m, s, x.l.n - t * TILE);
        take_back(z, s);
        if (t > 0 && (threadIdx.x & 31) == 0)
            hx_bar_arrive(hx_shared_of(&x.room.empty[(t - 1) % RING]));
        keep(z, m);
#pragma unroll
        for (int i = 0; i < 8; i++)
            p[i >> 2][i & 3] = pair_of(s[2 * i], s[2 * i + 1]);
        hx_wgmma_begin();
        if (t + 1 < x.tiles)
            begin_scores(x, t + 1, s);
        const uint64_t c = hx_wgmma_turned(
            hx_shared_of(x.room.c[t % RING] + 4 * group * C_BLOCK), C_BLOCK);
        hx_wgmma_turned256(z, p[0], c);
        hx_wgmma_turned256(z, p[1], c + 128);
        hx_wgmma_commit();
        hx_wgmma_wait_older();
    }
    take_back(z, s);
    store_row(x, z, m);
}

#endif

/* One block: one row, 64 heads. Grid (rows, heads / 64). Shared: the queries, four tiles
 * of 32 latents, scores on their way between the groups; 225 KB. Moves the row's latents
 * from the cache of the device, q and z once. */
template <bool FP8>
__global__ void __launch_bounds__(THREADS, 1)
    attend_latents(const mla_args a, const __grid_constant__ hx_cuda_spans spans)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    mla_row x = {
        a,          *(mla_room *)shared,     positions_of(a.pick, spans, blockIdx.x),
        blockIdx.x, HEADS * (int)blockIdx.y, 0
    };

    x.tiles = (x.l.n + TILE - 1) / TILE;
    if (x.tiles == 0)
        return;
    if (threadIdx.x < RING) {
        hx_bar_init(hx_shared_of(&x.room.full[threadIdx.x]), 32 * 4);
        hx_bar_init(hx_shared_of(&x.room.empty[threadIdx.x]), WARPS);
        hx_bar_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= 32 * WARPS) {
        hx_registers_fewer<88>();
        if (FP8)
            fetch_fp8(x);
        else
            fetch(x);
    } else {
        hx_registers_more<208>();
        attend(x);
    }
#else
    __trap(); /* hx_cuda_mla_takes sends nothing here */
#endif
}

bool hx_cuda_mla_takes(const hx_cuda *c, const hx_mla_attend_args *a)
{
    return c->gpu.hopper && c->gpu.block_bytes >= sizeof(mla_room) &&
           a->cache.fmt != HX_CACHE_F32 && a->cache.width <= LATENT &&
           a->cache.width % (a->cache.fmt == HX_CACHE_FP8 ? 16 : 8) == 0 &&
           (((uintptr_t)a->cache.data.p | (uintptr_t)a->q.p | (uintptr_t)a->z.p) & 15) ==
               0;
}

int hx_cuda_mla_rows(hx_cuda *c, const hx_mla_attend_args *a, hx_err *err)
{
    mla_args k = { (float *)a->z.p, (const float *)a->q.p, picks_of(a), {},
                   (int)a->heads,   a->scale * 1.44269504f };
    hx_cuda_spans spans;
    int rc;

    if ((rc = hx_cuda_spans_of(&spans, &a->rows, "mla_attend", err)) != 0 ||
        (rc = pages_of(&k.cache, &a->cache, "mla_attend", err)) != 0)
        return rc;
    const dim3 grid((unsigned)a->rows.n_row, (unsigned)hx_ceil_div(a->heads, HEADS));
    if (k.cache.fp8 != 0)
        HX_LAUNCH(c, "mla_attend", err, attend_latents<true>, grid, THREADS,
                  sizeof(mla_room), k, spans);
    else
        HX_LAUNCH(c, "mla_attend", err, attend_latents<false>, grid, THREADS,
                  sizeof(mla_room), k, spans);
    return 0;
}
