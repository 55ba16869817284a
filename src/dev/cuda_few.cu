/* cuda_few.cu - products with up to 64 rows on Hopper (cuda_gemm.h). Called by
 * cuda_gemm.cu. Never allocates, synchronises or reads back.
 *
 * With few rows the decoding is all the work, and 128 outputs a multiprocessor leave most of
 * them idle. So a thread block has 64 outputs, whose weights sixteen warps decode into shared
 * memory, two a stage in turn; the rows, which the two thread blocks of a cluster copy for one
 * another, are the A operand. Sums and their order are the others'. The cluster has a group
 * and rotates its sums; or, where there are few groups and up to 32 rows, half of one: then a
 * thread block has 32 outputs and a warp a stage, the sums go to y as they are, and the last
 * of four rotates them there. Where single groups came in three waves, whose beginnings and
 * ends would not overlap, it has three: a thread block has 192 outputs, six warps a stage. */
#include "dev/cuda_gemm.h"

enum {
    FEW_ROWS = 64,
    FEW_SHARE = 2,   /* thread blocks of a cluster */
    FEW_DECODE = 16, /* warps that decode */
    FEW_AHEAD = 2,   /* turns whose tiles such a warp has on their way */
    FEW_OUT = FEW_ROWS / FEW_SHARE * GROUP * 4,
    FEW_BESIDE = 3072, /* bytes left to a thread block that makes rows to images */

    /* Of a thread block whose cluster has three groups: */
    WIDE = 192, /* outputs */
    WIDE_GROUPS = WIDE * FEW_SHARE / GROUP,
    WIDE_DECODE = 24,
    WIDE_SPARE = 4,                    /* stages beside those being decoded */
    WIDE_PITCH = WIDE * FEW_SHARE + 8, /* floats: eight rows in different banks */
    /* Registers of a thread that multiplies, decodes, copies: 64 of 1,024 threads. */
    WIDE_MULTIPLIES = 136,
    WIDE_DECODES = 56,
    WIDE_COPIES = 40,
};

/* Of a thread block with OUT outputs: warps that decode; teams of them, a stage each in turn;
 * warps, whole groups of four where registers move between these. */
template <int OUT> constexpr int few_decoders = OUT == WIDE ? WIDE_DECODE : FEW_DECODE;
template <int OUT> constexpr int few_teams = 32 * few_decoders<OUT> / OUT;
template <int OUT>
constexpr int few_threads = OUT == WIDE ? (4 + few_decoders<OUT> + 4) / 4 * 128
                                        : 32 * (4 + few_decoders<OUT> + 1);

static __host__ __device__ constexpr int few_x_bytes(int rows)
{
    return (rows + 7) / 8 * 1024;
}

/* Rows whose sums a thread block of a cluster sees out. */
template <int OUT> static __host__ __device__ inline int few_half(int rows)
{
    return OUT == WIDE ? (rows + 15) / 16 * 8 : FEW_ROWS / FEW_SHARE;
}

template <int OUT> static constexpr int few_bytes(int rows, int k2, int stages)
{
    return stages * (few_x_bytes(rows) + OUT * 128 + 3 * 8) +
           few_decoders<OUT> * FEW_AHEAD * 128 * k2 + (OUT == 64 ? FEW_OUT : 0) +
           (OUT == WIDE ? WIDE_GROUPS : 1) * ENDING_BYTES + 8;
}

static_assert(few_bytes<64>(FEW_ROWS, 16, few_teams<64>) + FEW_BESIDE <= 227 * 1024,
              "Hopper takes it at any rate");

/* Shared memory of a thread block. */
struct few {
    uint8_t *x, *weights, *tiles; /* [stages] */
    float *out, *factor, *bias;   /* [half][pitch], [outputs of the groups] */
    uint32_t full, made, empty;   /* [stages] barriers */
    int *last;
    int x_bytes, rank, half, stages;
};

#if HX_WGMMA

/* A float to this place in another thread block of the cluster. */
HX_DEVICE void few_put_at(uint32_t to, int rank, float a)
{
    asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1;\n"
                 "st.shared::cluster.f32 [a], %2;}" ::"r"(to),
                 "r"(rank), "f"(a)
                 : "memory");
}

/* Four 8 x 8 matrices of halves, as mma has them; lane l gives the place of row l % 8 of
 * matrix l / 8. */
HX_DEVICE void few_put(uint32_t at, const uint32_t r[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* A stage for each team, but where there are many outputs. */
template <int OUT> HX_DEVICE int few_stages(const few &s)
{
    return OUT == WIDE ? s.stages : few_teams<OUT>;
}

/* The rows' copies: a part of each stage, for all. One thread. */
template <int OUT> HX_DEVICE void few_produce(const hx_gemm &p, const few &s)
{
    const int mine = s.x_bytes / FEW_SHARE;
    const uint8_t *from = p.image + s.rank * mine;

    for (int step = 0, at = 0, phase = 1; step < p.steps; step++) {
        hx_bar_wait(s.empty + 8 * at, phase);
        hx_bar_expect(s.full + 8 * at, s.x_bytes);
        hx_bulk_copy_all(hx_shared_of(s.x + at * s.x_bytes + s.rank * mine), from, mine,
                         s.full + 8 * at, FEW_SHARE);
        from += MOST_ROWS * 128;
        if (++at == few_stages<OUT>(s)) {
            at = 0;
            phase ^= 1;
        }
    }
}

/* One of the warps that decode: 32 outputs of the steps of its team. Four tiles are decoded
 * before the first is stored, so that one's waits fall into the others. */
template <class F, int OUT>
HX_DEVICE void few_decode(const hx_gemm &p, const few &s, int mine)
{
    constexpr int teams = few_teams<OUT>, fetches = (8 * F::most + 31) / 32;
    const int team = mine % teams, part = mine / teams;
    const int lane = threadIdx.x & 31, r = lane & 7;
    const int k2 = F::rate(p.k2), row_bytes = 32 * k2, turn_bytes = 4 * row_bytes;
    const int64_t pitch = (int64_t)p.groups * 128 * k2;
    const int turns = (p.steps - team + teams - 1) / teams;
    const uint8_t *from =
        p.w + 4 * team * pitch +
        ((int64_t)blockIdx.x * (OUT / 32) + part) * row_bytes; /* two columns of tiles */
    uint8_t *tiles = s.tiles + mine * FEW_AHEAD * turn_bytes;
    uint32_t to[4]; /* of the inputs 16 i … of the first stage */
    int at = team, round = 0;
    const auto fetch = [&](int turn) {
#pragma unroll
        for (int f = 0; f < fetches; f++) {
            const int i = lane + 32 * f;

            if (i < 8 * k2 && turn < turns)
                hx_copy16(tiles + turn % FEW_AHEAD * turn_bytes + 16 * i,
                          from + ((int64_t)turn * 4 * teams + i / (2 * k2)) * pitch +
                              i % (2 * k2) * 16,
                          true);
        }
        hx_copy_commit();
    };

#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = hx_shared_of(
            image_at<OUT>(s.weights + (OUT == WIDE ? 0 : team * (OUT * 128)), 1,
                          32 * part + (lane & 8) + r, 16 * i + (lane >> 4) * 8));
    for (int turn = 0; turn < FEW_AHEAD; turn++)
        fetch(turn);
    for (int turn = 0; turn < turns; turn++) {
        const uint8_t *tile = tiles + turn % FEW_AHEAD * turn_bytes;
        const int phase = (OUT == WIDE ? round : turn) & 1;

        hx_copy_wait_older<FEW_AHEAD - 1>();
        __syncwarp();
        hx_bar_wait(s.empty + 8 * at, phase ^ 1);
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
            uint32_t a[4][4];

#pragma unroll
            for (int t = 0; t < 4; t++)
                F::decode(tile + (half + t) * (row_bytes / 2), k2, p.cb, lane, a[t]);
#pragma unroll
            for (int t = half; t < half + 4; t++)
                few_put(to[t >> 1] + (OUT == WIDE ? at * (OUT * 128) : 0) +
                            2048 * (t & 1),
                        a[t - half]);
        }
        hx_bar_wait(s.full + 8 * at, phase); /* so that made means both */
        hx_wgmma_wrote();
        __syncwarp();
        if (lane == 0)
            hx_bar_arrive(s.made + 8 * at);
        fetch(turn + FEW_AHEAD);
        if (OUT == WIDE && (at += teams) >= s.stages) {
            at -= s.stages;
            round++;
        }
    }
}

/* Four warps: ROWS rows times OUT outputs; 32 rows are the B operand, so that shared memory
 * is read less. A stage is free when its products have ended: of many outputs at once, of few
 * one step later. */
template <int OUT, int ROWS>
HX_DEVICE void few_multiply(const hx_gemm &p, const few &s, float d[OUT * ROWS / 128])
{
    constexpr int each = OUT == WIDE ? 1 : 4; /* steps of a turn; stages are a multiple */
    constexpr int once = OUT == WIDE ? 64 : OUT;
    /* The shuffles tell the compiler that all lanes have the same. */
    const uint64_t x0 = hx_wgmma_matrix(__shfl_sync(~0u, hx_shared_of(s.x), 0));
    const uint64_t w0 = hx_wgmma_matrix(__shfl_sync(~0u, hx_shared_of(s.weights), 0));
    const uint32_t x_step = s.x_bytes / 16;
    const int lane = threadIdx.x & 31;

    for (int first = 0, at = 0, phase = 0; first < p.steps; first += each) {
        const uint64_t x = x0 + at * x_step, w = w0 + at * (OUT * 128 / 16);

#pragma unroll
        for (int k = 0; k < each; k++) {
            if (first + k >= p.steps)
                break;
            hx_bar_wait(s.made + 8 * (at + k), phase);
            hx_wgmma_begin();
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int n = 0; n < OUT; n += once) {
                    const uint64_t rows = x + k * x_step + 2 * i,
                                   weights = w + (k * OUT + n) * (128 / 16) + 2 * i;

                    if constexpr (ROWS == 32)
                        hx_wgmma_shared<32>(d + n / 4, weights, rows, first + k + i > 0);
                    else
                        hx_wgmma_shared<once>(d + n / 2, rows, weights,
                                              first + k + i > 0);
                }
            hx_wgmma_commit();
            if constexpr (OUT == WIDE) {
                hx_wgmma_wait();
                if (lane < FEW_SHARE)
                    hx_bar_arrive_at(s.empty + 8 * at, lane);
            } else {
                hx_wgmma_wait_older();
                if (first + k > 0 && lane < FEW_SHARE)
                    hx_bar_arrive_at(
                        s.empty + 8 * ((at + k > 0 ? at + k : few_stages<OUT>(s)) - 1),
                        lane);
            }
        }
        at += each;
        if (at == few_stages<OUT>(s)) {
            at = 0;
            phase ^= 1;
        }
    }
    hx_wgmma_wait();
#pragma unroll
    for (int i = 0; i < OUT * ROWS / 128; i++)
        HX_PIN(d[i], "f");
}

/* Sums: those of the first half of the rows go to the thread block of rank 0, the others to
 * rank 1. Of 32 outputs: to y, from y on. */
template <int OUT, int ROWS>
HX_DEVICE void few_put_sums(const hx_gemm &p, const few &s,
                            const float d[OUT * ROWS / 128], float *y)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const auto wide = [&](int row, int col) {
        return hx_shared_of(s.out + (row < s.half ? row : row - s.half) * WIDE_PITCH +
                            OUT * s.rank + col);
    };

#pragma unroll
    for (int i = 0; i < OUT * ROWS / 256; i++) {
        if constexpr (ROWS == 32) {
            const int col = 64 * (i >> 3) + 16 * warp + g + 8 * (i & 1);

#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int row = 8 * (i >> 1 & 3) + 2 * q + c;

                if (row < p.rows)
                    few_put_at(wide(row, col), row >= s.half, d[2 * i + c]);
            }
        } else {
            const int row = 16 * warp + g + 8 * (i & 1), col = 8 * (i >> 1) + 2 * q;

            if constexpr (OUT == 64)
                hx_put_at(hx_shared_of(s.out + row % 32 * GROUP + OUT * s.rank + col),
                          warp >> 1, d[2 * i], d[2 * i + 1]);
            else if (row < p.rows && OUT == WIDE)
                hx_put_at(wide(row, col), row >= s.half, d[2 * i], d[2 * i + 1]);
            else if (row < p.rows)
                *(float2 *)(y + row * p.ldy + col) = make_float2(d[2 * i], d[2 * i + 1]);
        }
    }
}

/* Whether this is the last of a group's thread blocks, once all wrote their sums to y. The
 * four warps. */
HX_DEVICE bool few_is_last(const hx_gemm &p, const few &s, int group)
{
    __threadfence();
    hx_bar_sync(1, 128);
    if (threadIdx.x == 0) {
        *s.last = atomicAdd(&p.ticket[group], 1) == GROUP / 32 - 1;
        if (*s.last)
            p.ticket[group] = 0;
    }
    hx_bar_sync(1, 128);
    __threadfence();
    return *s.last != 0;
}

/* A quarter of a row's sums, in shared memory or, of 32 outputs, in y, leaves rotated. */
template <int OUT>
HX_DEVICE void few_leave(const hx_gemm &p, const few &s, const float *sums, int row,
                         int64_t first, int group = 0)
{
    const int q = threadIdx.x & 3;
    const float sign = (q & 2) != 0 ? -1.0f : 1.0f;
    float v[8][4];

#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 *from = (const float4 *)(sums + 16 * i + 4 * q);

        *(float4 *)v[i] = OUT != 32 ? *from : __ldcg(from);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[i][k] = fmaf(v[i][k], sign, __shfl_xor_sync(~0u, v[i][k], 2));
    rotate_sums(v);
    if (row < p.rows)
        leave(p, v, s.factor + group * GROUP + 4 * q, s.bias + group * GROUP + 4 * q,
              p.scale[row], row, first + 4 * q);
}

/* Where all is, and barriers that wait. */
template <int OUT> HX_DEVICE few few_begin(const hx_gemm &p, uint8_t *shared)
{
    constexpr int groups = OUT == WIDE ? WIDE_GROUPS : 1; /* of the cluster */
    const int tile_bytes = few_decoders<OUT> * FEW_AHEAD * 128 * p.k2;
    few s;

    s.rank = blockIdx.x % FEW_SHARE;
    s.half = few_half<OUT>(p.rows);
    s.stages = p.stages;
    const int stages = few_stages<OUT>(s);
    s.x_bytes = few_x_bytes(p.rows);
    s.x = shared;
    s.weights = s.x + stages * s.x_bytes;
    s.factor = (float *)(s.weights + stages * (OUT * 128) + (OUT == 64 ? FEW_OUT : 0));
    /* The sums of many outputs have the place of the stages, later. */
    s.out = OUT == WIDE ? (float *)shared : s.factor - FEW_OUT / 4;
    s.bias = s.factor + groups * GROUP;
    s.tiles = (uint8_t *)(s.bias + groups * GROUP);
    s.full = hx_shared_of(s.tiles) + tile_bytes;
    s.made = s.full + 8 * stages;
    s.empty = s.made + 8 * stages;
    s.last = (int *)(s.tiles + tile_bytes + 3 * 8 * stages);
    if (threadIdx.x < stages) {
        hx_bar_init(s.full + 8 * threadIdx.x, 1);
        hx_bar_init(s.made + 8 * threadIdx.x, OUT / 32);
        hx_bar_init(s.empty + 8 * threadIdx.x, 4 * FEW_SHARE);
        hx_bar_init_done();
    }
    hx_cluster_meet();
    return s;
}

/* Scales and biases of n outputs from first on. The four warps that multiply. */
HX_DEVICE void few_scales(const hx_gemm &p, const few &s, int64_t first, int n)
{
    for (int i = threadIdx.x; i < n; i += 128) {
        const bool in = first + i < p.n;

        s.factor[i] = in ? hx_half_to(p.svh[first + i]) : 0.0f;
        s.bias[i] = in && p.bias != NULL ? hx_half_to(p.bias[first + i]) : 0.0f;
    }
}

#endif

/* OUT outputs, all rows, up to 64. Grid: two or four for a group; two are a cluster. Shared:
 * few_bytes. Reads its weights once, of the image a half. */
template <class F, int OUT>
__global__ void __launch_bounds__(few_threads<OUT>)
    gemm_few(const __grid_constant__ hx_gemm p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, row = (int)(threadIdx.x >> 2);
    const int64_t first = (int64_t)(blockIdx.x / (GROUP / OUT)) * GROUP;
    const few s = few_begin<OUT>(p, shared);

    if (warp >= 4 + FEW_DECODE) {
        hx_cuda_in_turn();
        if ((threadIdx.x & 31) == 0)
            few_produce<OUT>(p, s);
    } else if (warp >= 4) {
        few_decode<F, OUT>(p, s, warp - 4);
    } else {
        float d[OUT / 2];

        few_scales(p, s, first, GROUP);
        few_multiply<OUT, FEW_ROWS>(p, s, d);
        hx_cuda_after_previous();
        few_put_sums<OUT, FEW_ROWS>(p, s, d, p.y + (int64_t)blockIdx.x * OUT);
    }
    __syncwarp();
    hx_cluster_meet();
    if (warp >= 4)
        return;
    if constexpr (OUT == 64) {
        few_leave<OUT>(p, s, s.out + row * GROUP, 32 * s.rank + row, first);
    } else if (few_is_last(p, s, (int)(first / GROUP))) {
        for (int r = row; r - row < p.rows; r += 32)
            few_leave<OUT>(p, s, p.y + min(r, p.rows - 1) * p.ldy + first, r, first);
    }
#endif
}

/* 192 outputs, up to ROWS rows. Grid: two for three groups, a cluster. Shared and what is
 * read as above. What follows the sums stays with who has registers. */
template <class F, int ROWS>
__global__ void __launch_bounds__(few_threads<WIDE>, 1)
    gemm_few_wide(const __grid_constant__ hx_gemm p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, row = (int)(threadIdx.x >> 2);
    const int64_t first = (int64_t)(blockIdx.x / FEW_SHARE) * (WIDE_GROUPS * GROUP);
    const few s = few_begin<WIDE>(p, shared);

    if (warp >= 4) {
        if (warp < 4 + WIDE_DECODE) {
            hx_registers_fewer<WIDE_DECODES>();
            few_decode<F, WIDE>(p, s, warp - 4);
        } else {
            hx_registers_fewer<WIDE_COPIES>();
            if (warp == 4 + WIDE_DECODE) {
                hx_cuda_in_turn();
                if ((threadIdx.x & 31) == 0)
                    few_produce<WIDE>(p, s);
            }
        }
        __syncwarp();
        hx_cluster_meet();
        hx_cluster_meet();
    } else {
        float d[WIDE * ROWS / 128];

        hx_registers_more<WIDE_MULTIPLIES>();
        few_scales(p, s, first, WIDE_GROUPS * GROUP);
        few_multiply<WIDE, ROWS>(p, s, d);
        hx_cuda_after_previous();
        hx_cluster_meet(); /* nobody needs the stages */
        few_put_sums<WIDE, ROWS>(p, s, d, p.y);
        hx_cluster_meet();
        for (int i = row; i < WIDE_GROUPS * s.half; i += 32) {
            const int group = i / s.half, r = i % s.half;

            few_leave<WIDE>(p, s, s.out + r * WIDE_PITCH + group * GROUP,
                            s.rank * s.half + r, first + group * GROUP, group);
        }
    }
#endif
}

/* As many as there is room for, up to WIDE_SPARE more than teams; 0: not one for each. */
template <int OUT> static int few_room(int rows, int k2, int room)
{
    constexpr int teams = few_teams<OUT>;
    int n = teams + (OUT == WIDE ? WIDE_SPARE : 0);

    while (n >= teams && few_bytes<OUT>(rows, k2, n) > room)
        n--;
    return n >= teams ? n : 0;
}

/* kernel has OUT outputs a thread block. */
template <int OUT>
static cudaError_t launch(void (*kernel)(hx_gemm), hx_gemm p, const hx_cuda_work *w,
                          int room, cudaStream_t stream)
{
    p.stages = few_room<OUT>(p.rows, p.k2, room);
    const int bytes = few_bytes<OUT>(p.rows, p.k2, p.stages);
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t cfg = {};
    const cudaError_t rc =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);

    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim = { FEW_SHARE, 1, 1 };
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cfg.gridDim = dim3((unsigned)(p.groups * GROUP / OUT));
    cfg.blockDim = dim3(few_threads<OUT>);
    cfg.dynamicSmemBytes = (size_t)bytes;
    cfg.stream = stream;
    cfg.attrs = attr;
    cfg.numAttrs = w->overlap ? 2 : 1;
    return rc != cudaSuccess ? rc : cudaLaunchKernelEx(&cfg, kernel, p);
}

/* Up to three waves: with more groups the kernel for 64 rows is as fast. */
bool hx_cuda_few_takes(const hx_gemm *p, const hx_cuda_work *w)
{
    return w->gpu.hopper && p->block == NULL && p->rows <= FEW_ROWS &&
           p->block_rows == 0 && p->groups * FEW_SHARE <= 3 * w->gpu.n_sm;
}

cudaError_t hx_cuda_few(hx_gemm *p, const hx_cuda_work *w, hx_codebook codebook,
                        cudaStream_t stream)
{
    const int room = (int)w->gpu.block_bytes - FEW_BESIDE;
    const bool half = p->rows <= 32 && p->groups * (GROUP / 32) <= w->gpu.n_sm &&
                      p->wide && p->n == (int64_t)p->groups * GROUP &&
                      p->groups <= w->n_ticket && few_room<32>(p->rows, p->k2, room) > 0;
    /* All at once, where it were three waves of single groups. */
    const bool wide = p->groups > w->gpu.n_sm && p->groups % WIDE_GROUPS == 0 &&
                      p->groups / WIDE_GROUPS * FEW_SHARE <= w->gpu.n_sm &&
                      few_room<WIDE>(p->rows, p->k2, room) > 0;

    p->cb = hx_cuda_codebook_of(codebook);
    p->ticket = w->ticket;
    return with_exl3(p->k2, codebook, [&](auto f) {
        using F = decltype(f);

        if (wide)
            return launch<WIDE>(p->rows <= 32 ? gemm_few_wide<F, 32>
                                              : gemm_few_wide<F, 64>,
                                *p, w, room, stream);
        return half ? launch<32>(gemm_few<F, 32>, *p, w, room, stream)
                    : launch<64>(gemm_few<F, 64>, *p, w, room, stream);
    });
}
