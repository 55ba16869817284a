/* cuda_dense.cu - products with many rows of weights that are an image, on Hopper
 * (cuda_gemm.h). Called by cuda_gemm.cu. Never allocates, synchronises or reads back.
 *
 * A thread block multiplies 128 rows with 256 outputs, two groups; the two of a cluster
 * have neighbouring rows and the same outputs, of which each copies a group for both. The
 * rows are the A operand, so that a row's sums lie in four lanes: they are rotated and
 * leave from registers, without a barrier, while the other warps may still multiply. */
#include "dev/cuda_gemm.h"

enum {
    SHARE = 2,
    ROWS = MOST_ROWS / SHARE, /* of a thread block */
    OUTPUTS = 2 * GROUP,
    STAGES = 4,
    BAND = 8,             /* pairs of groups side by side in time */
    X_BYTES = ROWS * 128, /* of a stage */
    W_BYTES = OUTPUTS * 128,
    THREADS = 32 * (WARPS + 4), /* the last four warps copy; registers move by fours */
};

#if HX_WGMMA

/* What is in shared memory. */
struct stages {
    uint8_t *x, *w;       /* [STAGES] */
    uint32_t full, empty; /* [STAGES] barriers */
    int at;
    uint32_t phase;

    __device__ __forceinline__ void next()
    {
        if (++at == STAGES) {
            at = 0;
            phase ^= 1;
        }
    }
};

/* The cluster's piece t: 256 rows of 256 outputs. In bands of eight pairs of groups, so
 * that what runs at a time shares rows and weights in L2 (4, 16 and 32 cost 2, 1 and 3 %,
 * H200). */
struct dense_piece {
    int pair, block;
};

HX_DEVICE bool dense_at(const hx_gemm &p, int t, dense_piece *x)
{
    const int n_block = (p.rows + MOST_ROWS - 1) / MOST_ROWS, n_pair = (p.groups + 1) / 2,
              per_band = n_block * BAND;
    const int band = t / per_band, at = t - band * per_band,
              width = min(BAND, n_pair - band * BAND);

    if (t >= n_block * n_pair)
        return false;
    x->block = at / width;
    x->pair = band * BAND + at % width;
    return true;
}

/* One thread keeps the stages full. */
HX_DEVICE void dense_produce(const hx_gemm &p, stages s, int rank)
{
    dense_piece t;

    for (int i = blockIdx.x / SHARE; dense_at(p, i, &t); i += gridDim.x / SHARE) {
        const uint8_t *x =
            p.image + (int64_t)t.block * p.steps * (MOST_ROWS * 128) + rank * X_BYTES;
        const uint8_t *w =
            p.w + (int64_t)min(2 * t.pair + rank, p.groups - 1) * p.steps * (GROUP * 128);

        for (int step = 0; step < p.steps; step++, s.next()) {
            const uint32_t full = s.full + 8 * s.at;

            hx_bar_wait(s.empty + 8 * s.at, s.phase ^ 1);
            hx_bar_expect(full, X_BYTES + W_BYTES);
            hx_bulk_copy(hx_shared_of(s.x + s.at * X_BYTES), x, X_BYTES, full);
            hx_bulk_copy_all(hx_shared_of(s.w + s.at * W_BYTES + rank * (GROUP * 128)), w,
                             GROUP * 128, full, SHARE);
            x += MOST_ROWS * 128;
            w += GROUP * 128;
        }
    }
}

/* 64 rows times 256 outputs, by four warps. */
HX_DEVICE void dense_multiply(const hx_gemm &p, stages &s, float d[128])
{
    const int lane = threadIdx.x & 31;

    for (int step = 0; step < p.steps; step++, s.next()) {
        const int at = s.at, before = (at == 0 ? STAGES : at) - 1;
        const uint64_t x =
            hx_wgmma_matrix(hx_shared_of(s.x + at * X_BYTES + (threadIdx.x >> 7) * PART));
        const uint64_t w = hx_wgmma_matrix(hx_shared_of(s.w + at * W_BYTES));

        hx_bar_wait(s.full + 8 * at, s.phase);
        hx_wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            hx_wgmma_shared<OUTPUTS>(d, x + 2 * i, w + 2 * i, step + i > 0);
        hx_wgmma_commit();
        hx_wgmma_wait_older();
        if (step > 0 && lane < SHARE)
            hx_bar_arrive_at(s.empty + 8 * before, lane);
    }
    hx_wgmma_wait();
    if (lane < SHARE)
        hx_bar_arrive_at(s.empty + 8 * ((s.at == 0 ? STAGES : s.at) - 1), lane);
#pragma unroll
    for (int i = 0; i < 128; i++)
        HX_PIN(d[i], "f");
}

/* A lane's sums of a row and group, output 8 i + 2 q + b at 2 i + b, become outputs
 * 16 m + 8 (q % 2) + 4 (q / 2) + k at 4 m + k: neighbouring lanes exchange halves. Rotated
 * on the way, in the order of rotate_sums. meanwhile(m) is done once for each m, spread
 * over the work. */
template <bool ROTATE, class Do>
HX_DEVICE void turn_sums(float v[32], const Do &meanwhile)
{
    const bool odd = (threadIdx.x & 1) != 0;
    const float sign = (threadIdx.x & 2) != 0 ? -1.0f : 1.0f;

#pragma unroll
    for (int m = 0; m < 8; m++) {
        float *u = v + 4 * m;

        if (ROTATE) {
            fold(u[0], u[2]);
            fold(u[1], u[3]);
            fold(u[0], u[1]);
            fold(u[2], u[3]);
        }
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const float got = __shfl_xor_sync(~0u, odd ? u[b] : u[b + 2], 1);

            if (odd)
                u[b] = got;
            else
                u[b + 2] = got;
            if (ROTATE)
                fold(u[b], u[b + 2]);
        }
        if (m % 2 != 0)
            meanwhile(m / 2);
    }
    if constexpr (ROTATE) {
#pragma unroll
        for (int w = 4; w < 32; w *= 2)
#pragma unroll
            for (int i = 0; i < 32; i++)
                if ((i & w) == 0)
                    fold(v[i], v[i + w]);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (ROTATE)
            v[i] = fmaf(v[i], sign, __shfl_xor_sync(~0u, v[i], 2));
        if (i % 8 == 7)
            meanwhile(4 + i / 8);
    }
}

/* What four outputs are multiplied with: svh, or four floats. */
template <bool ROTATE> struct factor {
    uint2 h;

    template <bool WHOLE> HX_DEVICE factor load(const hx_gemm &p, int64_t col)
    {
        if constexpr (WHOLE) {
            return { __ldg((const uint2 *)(p.svh + col)) };
        } else {
            uint16_t s[4];

#pragma unroll
            for (int k = 0; k < 4; k++)
                s[k] = col + k < p.n ? p.svh[col + k] : (uint16_t)0;
            return { make_uint2(s[0] | (uint32_t)s[1] << 16,
                                s[2] | (uint32_t)s[3] << 16) };
        }
    }
    __device__ __forceinline__ float4 value() const
    {
        const float2 a = __half22float2(*(const __half2 *)&h.x),
                     b = __half22float2(*(const __half2 *)&h.y);

        return make_float4(a.x, a.y, b.x, b.y);
    }
};

template <> struct factor<false> {
    const float4 *from;

    template <bool WHOLE> HX_DEVICE factor load(const hx_gemm &p, int64_t col)
    {
        return { (const float4 *)(p.out_scale + col) };
    }
    __device__ __forceinline__ float4 value() const
    {
        return __ldg(from);
    }
};

/* Some rows' outputs of a lane that leave. */
template <bool ROTATE> struct leaving {
    float v[32];
    const factor<ROTATE> *factors; /* [8] */
    hx_row_scale scale;
    float *y;  /* of output 0 */
    int width; /* outputs from there to the matrix's end; 0: nothing leaves */
};

/* Outputs 16 m … of it. WHOLE: all of the piece's outputs are there, 16 bytes at a time. */
template <bool ROTATE, bool WHOLE>
HX_DEVICE void leave_some(const hx_gemm &p, const leaving<ROTATE> &x, int64_t col, int m)
{
    const float4 f = x.factors[m].value();
    const float4 v = make_float4(
        x.v[4 * m] * (f.x * x.scale.by), x.v[4 * m + 1] * (f.y * x.scale.by),
        x.v[4 * m + 2] * (f.z * x.scale.by), x.v[4 * m + 3] * (f.w * x.scale.by));

    if constexpr (WHOLE) {
        if (x.width > 0)
            *(float4 *)(x.y + 16 * m) = v;
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (16 * m + k < x.width)
                x.y[16 * m + k] = p.bias != NULL
                                      ? (&v.x)[k] + hx_half_to(p.bias[col + 16 * m + k])
                                      : (&v.x)[k];
    }
}

/* 64 rows of a warp group leave, 32 sums of a lane at a time: what is ready is stored while
 * the next are rotated, for a multiprocessor's stores alone take as long (H200). */
template <bool ROTATE, bool WHOLE>
HX_DEVICE void dense_store(const hx_gemm &p, const dense_piece &t, int rank, float d[128])
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
    const int row = t.block * MOST_ROWS + rank * ROWS + 16 * warp + (lane >> 2);
    const int64_t col = (int64_t)t.pair * OUTPUTS + 8 * (q & 1) + 4 * (q >> 1);
    factor<ROTATE> factors[2][8];
    leaving<ROTATE> ready;

    ready.width = 0;
#pragma unroll
    for (int u = 0; u < 4; u++) {
        const int c = u / 2, r = row + u % 2 * 8;
        leaving<ROTATE> x;

        if (u % 2 == 0)
#pragma unroll
            for (int m = 0; m < 8; m++)
                factors[c][m] =
                    factor<ROTATE>::template load<WHOLE>(p, col + c * GROUP + 16 * m);
                /* Copies that the compiler cannot see through: with what follows done in the
         * sums' own registers it waits after each wgmma. */
#pragma unroll
        for (int i = 0; i < 32; i++)
            asm volatile("mov.b32 %0, %1;"
                         : "=f"(x.v[i])
                         : "f"(d[64 * c + 4 * (i >> 1) + 2 * (u % 2) + (i & 1)]));
        x.factors = factors[c];
        x.scale = p.scale[min(r, p.rows - 1)];
        x.y = p.y + r * p.ldy + col + c * GROUP;
        x.width = r < p.rows && 2 * t.pair + c < p.groups
                      ? (int)min(p.n - col - c * GROUP, (int64_t)GROUP)
                      : 0;
        turn_sums<ROTATE>(x.v, [&](int m) {
            if (u > 0)
                leave_some<ROTATE, WHOLE>(p, ready, col + (u - 1) / 2 * GROUP, m);
        });
        if (q == 0)
            x.v[0] += x.scale.first;
        ready = x;
    }
#pragma unroll
    for (int m = 0; m < 8; m++)
        leave_some<ROTATE, WHOLE>(p, ready, col + GROUP, m);
}

#endif

/* Eight warps multiply, one thread copies. Grid: clusters of two, as many as fit, each
 * takes pieces in turn. Shared: four stages of 48 KB, their barriers. Moves the image once
 * for every 256 outputs, the weights once for every 256 rows; y once. */
template <bool ROTATE>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_dense(const __grid_constant__ hx_gemm p)
{
#if HX_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, rank = blockIdx.x % SHARE;
    dense_piece t;
    stages s;

    s.x = shared;
    s.w = s.x + STAGES * X_BYTES;
    s.full = hx_shared_of(s.w) + STAGES * W_BYTES;
    s.empty = s.full + 8 * STAGES;
    s.at = 0;
    s.phase = 0;
    if (threadIdx.x < STAGES) {
        hx_bar_init(s.full + 8 * threadIdx.x, 1);
        hx_bar_init(s.empty + 8 * threadIdx.x, WARPS * SHARE);
        hx_bar_init_done();
    }
    hx_cluster_meet();
    hx_cuda_after_previous();
    if (warp >= WARPS) {
        hx_registers_fewer<40>();
        if (threadIdx.x == 32 * WARPS)
            dense_produce(p, s, rank);
    } else {
        hx_registers_more<232>();
        for (int i = blockIdx.x / SHARE; dense_at(p, i, &t); i += gridDim.x / SHARE) {
            float d[128];

            dense_multiply(p, s, d);
            if (p.bias == NULL && p.wide && (t.pair + 1) * OUTPUTS <= p.n)
                dense_store<ROTATE, true>(p, t, rank, d);
            else
                dense_store<ROTATE, false>(p, t, rank, d);
        }
    }
    hx_cluster_meet(); /* none ends while the other reaches into its shared memory */
#endif
}

template <bool ROTATE>
static cudaError_t launch(const hx_gemm &p, const hx_cuda_work *w, cudaStream_t stream)
{
    const int bytes = STAGES * (X_BYTES + W_BYTES + 16);
    const int64_t pieces = hx_ceil_div(p.rows, MOST_ROWS) * hx_ceil_div(p.groups, 2);
    const cudaError_t rc = cudaFuncSetAttribute(
        gemm_dense<ROTATE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t cfg = {};

    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim = { SHARE, 1, 1 };
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cfg.gridDim = dim3((unsigned)(HX_MIN(pieces, (int64_t)w->gpu.n_sm / SHARE) * SHARE));
    cfg.blockDim = dim3(THREADS);
    cfg.dynamicSmemBytes = (size_t)bytes;
    cfg.stream = stream;
    cfg.attrs = attr;
    cfg.numAttrs = w->overlap ? 2 : 1;
    return rc != cudaSuccess ? rc : cudaLaunchKernelEx(&cfg, gemm_dense<ROTATE>, p);
}

cudaError_t hx_cuda_dense(const hx_gemm *p, const hx_cuda_work *w, cudaStream_t stream)
{
    return p->svh != NULL ? launch<true>(*p, w, stream) : launch<false>(*p, w, stream);
}
