/* cuda_image.cu - rows and weights as halves in the layout that products with many rows
 * have in shared memory. Called by the files of cuda_gemm.h. Never allocates, synchronises
 * or reads back. */
#include "dev/cuda_gemm.h"

enum {
    IMAGE_THREADS = 512, /* most of a row that becomes an image */
    HELD = 4,            /* 128-input blocks of it that a warp keeps */
};

/* ---- rows become an image ------------------------------------------------------ */

/* Four inputs of a row as they come; those past the end are 0. */
struct inputs {
    float4 x, up;
    uint2 suh;
};

HX_DEVICE float4 load4(const float *x, int64_t n)
{
    return make_float4(n > 0 ? x[0] : 0, n > 1 ? x[1] : 0, n > 2 ? x[2] : 0,
                       n > 3 ? x[3] : 0);
}

/* wide: x, up and suh can be read in one piece each, to the end. */
template <bool ACT>
HX_DEVICE inputs load_inputs(const hx_image_in &p, int64_t row, const uint16_t *suh,
                             int64_t at, bool wide)
{
    const float *x = p.x + row * p.ldx + at, *up = ACT ? p.up + row * p.ldx + at : NULL;
    inputs in = {};

    if (wide) {
        in.x = *(const float4 *)x;
        if (ACT)
            in.up = *(const float4 *)up;
        if (suh != NULL)
            in.suh = *(const uint2 *)(suh + at);
        return in;
    }
    in.x = load4(x, p.k - at);
    if (ACT)
        in.up = load4(up, p.k - at);
    if (suh != NULL)
        in.suh = make_uint2(suh[at] | (uint32_t)suh[at + 1] << 16,
                            suh[at + 2] | (uint32_t)suh[at + 3] << 16);
    return in;
}

/* Their activation, times suh. */
template <bool ACT>
HX_DEVICE void values_of(const hx_image_in &p, const inputs &in, bool rotate, float v[4])
{
    const float *x = &in.x.x, *up = &in.up.x;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t h = (i < 2 ? in.suh.x : in.suh.y) >> (16 * (i & 1));

        v[i] = ACT ? hx_canon_act(x[i], up[i], p.limit) : x[i];
        if (rotate)
            v[i] = v[i] * hx_half_to((uint16_t)h);
    }
}

/* A rotation of 128 values, four neighbours a lane, but for the factor. */
HX_DEVICE void rotate_inputs(float v[4])
{
    fold(v[0], v[1]);
    fold(v[2], v[3]);
    fold(v[0], v[2]);
    fold(v[1], v[3]);
#pragma unroll
    for (int w = 1; w < 32; w *= 2) {
        const float sign = (threadIdx.x & w) != 0 ? -1.0f : 1.0f;

#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = fmaf(v[i], sign, __shfl_xor_sync(~0u, v[i], w));
    }
}

/* Four inputs of a block of the row at pos, as halves after the rotation. */
HX_DEVICE void put_inputs(const hx_image_in &p, uint32_t pos, uint32_t block, float v[4],
                          bool rotate, float up)
{
    __half2 h[2];

    if (rotate) {
        rotate_inputs(v);
        up *= HX_CANON_ROOT;
    }
    h[0] = __floats2half2_rn(v[0] * up, v[1] * up);
    h[1] = __floats2half2_rn(v[2] * up, v[3] * up);
    *(uint2 *)image_at<MOST_ROWS>(
        p.image, p.steps, pos, 128 * block + 4 * (threadIdx.x & 31)) = *(const uint2 *)h;
}

/* Inputs whose sum is s add MUL1_REST s to each sum of a group, so 128 times that to the
 * first of its rotation alone; a rotation of inputs adds up to 128 ROOT times its first. */
#define MUL1_FIRST (MUL1_REST * GROUP * GROUP * HX_CANON_ROOT)

/* One block: one position. Grid positions. Reads the row, what its warps cannot keep a
 * second time from the cache, and writes half its bytes. */
template <bool ACT>
__global__ void __launch_bounds__(IMAGE_THREADS)
    rows_to_image(const __grid_constant__ hx_image_in p)
{
    __shared__ float shared[33], firsts[IMAGE_THREADS / 32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_warp = blockDim.x >> 5;
    const int64_t pos = blockIdx.x;
    const uint16_t *suh = p.suh;
    int64_t row = pos;
    float most = 0, first = 0, held[HELD][4], v[4];
    inputs in[HELD];

    hx_cuda_after_previous();
    hx_cuda_allow_next();
    if (p.pick != NULL) {
        const int32_t pick = p.pick[pos];

        if (pick < 0)
            return;
        if (p.expert != NULL)
            suh = (const uint16_t *)matrix_of(&p.expert[p.id[pick]], p.which)->suh;
        row = p.active > 0 ? pick / p.active : pos;
    }
    const bool rotate = suh != NULL, wide = p.wide && (uintptr_t)suh % 8 == 0;
#pragma unroll
    for (int h = 0; h < HELD; h++) /* all on their way before one is looked at */
        if (2 * (warp + h * n_warp) < p.steps)
            in[h] =
                load_inputs<ACT>(p, row, suh, (warp + h * n_warp) * 128 + 4 * lane, wide);
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (2 * (warp + h * n_warp) < p.steps) {
            values_of<ACT>(p, in[h], rotate, held[h]);
            first += held[h][0];
            for (int i = 0; i < 4; i++)
                most = fmaxf(most, fabsf(held[h][i]));
        }
    for (int b = warp + HELD * n_warp; 2 * b < p.steps; b += n_warp) {
        values_of<ACT>(p,
                       load_inputs<ACT>(p, row, suh, (int64_t)b * 128 + 4 * lane, wide),
                       rotate, v);
        first += v[0];
        for (int i = 0; i < 4; i++)
            most = fmaxf(most, fabsf(v[i]));
    }
    if (lane == 0)
        firsts[warp] = first;
    most = hx_block_max(most, shared);
    /* A rotation of 128 values makes none larger than sqrt(128) times the largest. */
    const float up = up_scale(rotate ? most * 11.5f : most);
    if (threadIdx.x == 0) {
        for (int i = 1; i < n_warp; i++)
            first += firsts[i];
        p.scale[pos] = { (rotate ? HX_CANON_ROOT : 1.0f) *
                             (p.mul1 ? HX_CANON_K_INV : 1.0f) / up,
                         p.mul1 ? MUL1_FIRST * first * up : 0.0f };
    }
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (2 * (warp + h * n_warp) < p.steps)
            put_inputs(p, pos, warp + h * n_warp, held[h], rotate, up);
    for (int b = warp + HELD * n_warp; 2 * b < p.steps; b += n_warp) {
        values_of<ACT>(p,
                       load_inputs<ACT>(p, row, suh, (int64_t)b * 128 + 4 * lane, wide),
                       rotate, v);
        put_inputs(p, pos, b, v, rotate, up);
    }
}

/* positions rows of the image, from act(x, up) or x. */
cudaError_t hx_cuda_image_rows(hx_image_in *p, int64_t positions, const hx_cuda_work *w,
                               cudaStream_t stream)
{
    p->wide = (uintptr_t)p->x % 16 == 0 && (uintptr_t)p->up % 16 == 0 &&
              p->ldx % 4 == 0 && p->k == (int64_t)p->steps * STEP;
    const unsigned warps =
        (unsigned)HX_MIN(hx_ceil_div(p->steps / 2, HELD), IMAGE_THREADS / 32);

    return hx_cuda_launch(w->overlap,
                          p->up != NULL ? rows_to_image<true> : rows_to_image<false>,
                          dim3((unsigned)positions), dim3(32 * warps), 0, stream, *p);
}

/* ---- weights become an image -------------------------------------------------------- */

struct exl3_in {
    const uint8_t *w;      /* the trellis from the first output on */
    int groups, steps, k2; /* groups: of the whole matrix */
    hx_cuda_codebook cb;
    uint8_t *image;
};

/* One block: a step of a group. Grid (groups, steps), 256 threads. Shared: 16 KB of the
 * image, the tiles. Reads each tile once, writes 512 bytes of it. */
template <class F>
__global__ void __launch_bounds__(32 * WARPS)
    exl3_to_image(const __grid_constant__ exl3_in p)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int row_bytes = 128 * p.k2, vectors = row_bytes / 16;
    const int64_t step = blockIdx.y, group = blockIdx.x;
    const uint8_t *from = p.w + (4 * step * p.groups + group) * row_bytes;
    uint8_t *tiles = shared + 2 * PART;

    hx_cuda_allow_next();
    for (int i = threadIdx.x; i < 4 * vectors; i += 32 * WARPS)
        ((uint4 *)tiles)[i] =
            *(const uint4 *)(from + (int64_t)(i / vectors) * p.groups * row_bytes +
                             i % vectors * 16);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 4; t++) {
        uint32_t a[4];

        F::decode(tiles + t * row_bytes + warp * (row_bytes / 8), p.k2, p.cb, lane, a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)image_at<GROUP>(shared, 1, 16 * warp + g + 8 * (i & 1),
                                         16 * t + 2 * q + 8 * (i >> 1)) = a[i];
    }
    __syncthreads();
    hx_cuda_after_previous();
    uint4 *to = (uint4 *)(p.image + (group * p.steps + step) * (GROUP * 128));
#pragma unroll
    for (int i = threadIdx.x; i < GROUP * 128 / 16; i += 32 * WARPS)
        to[i] = ((const uint4 *)shared)[i];
}

struct halves_in {
    hx_plain_mat m;
    int64_t first;    /* output of the first tile */
    int tiles, steps; /* of 16 outputs; of 64 inputs */
    uint8_t *w;       /* the image */
    float *out_scale; /* [16 tiles] */
};

/* One block: the tiles of 16 outputs. Grid tiles, 256 threads. Reads their weights twice,
 * the second time from the cache. */
template <int FMT>
__global__ void __launch_bounds__(ROW_THREADS)
    plain_to_halves(const __grid_constant__ halves_in p)
{
    __shared__ uint32_t most[16];
    __shared__ float up[16];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
              q = lane & 3;
    const int64_t n0 = p.first + (int64_t)blockIdx.x * 16, k = p.m.k;
    const int n_step = (int)((k + 127) / 128 * 8);

    if (threadIdx.x < 16)
        most[threadIdx.x] = 0;
    __syncthreads();
    if (FMT != HX_FMT_F16)
        for (int o = 0; o < 16 && n0 + o < p.m.n; o++) {
            float m = 0;

            for (int64_t i = 8 * threadIdx.x; i < k; i += 8 * ROW_THREADS) {
                float w[8];

                hx_plain_load8<FMT>(w, p.m, n0 + o, i);
                for (int j = 0; j < 8; j++)
                    m = fmaxf(m, fabsf(w[j]));
            }
            m = hx_warp_max(m);
            if (lane == 0)
                atomicMax(&most[o], hx_bits_of(m));
        }
    __syncthreads();
    if (threadIdx.x < 16) {
        up[threadIdx.x] =
            FMT == HX_FMT_F16 ? 1.0f : up_scale(hx_float_of(most[threadIdx.x]));
        p.out_scale[(int64_t)blockIdx.x * 16 + threadIdx.x] = 1.0f / up[threadIdx.x];
    }
    __syncthreads();
    for (int step = warp; step < n_step; step += ROW_THREADS / 32) {
        __half2 h[4];

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int o = g + 8 * (i & 1);
            const int64_t at = 16 * step + 2 * q + 8 * (i >> 1);
            const bool in = n0 + o < p.m.n;

            h[i] = __floats2half2_rn(
                in && at < k ? hx_plain_at<FMT>(p.m, n0 + o, at) * up[o] : 0.0f,
                in && at + 1 < k ? hx_plain_at<FMT>(p.m, n0 + o, at + 1) * up[o] : 0.0f);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(__half2 *)image_at<GROUP>(p.w, p.steps,
                                        (int64_t)blockIdx.x * 16 + g + 8 * (i & 1),
                                        16 * step + 2 * q + 8 * (i >> 1)) = h[i];
    }
}

/* Outputs first … become an image. */
cudaError_t hx_cuda_image_weights(const hx_mat *m, int64_t first, int64_t outputs,
                                  uint8_t *image, float *out_scale, const hx_cuda_work *w,
                                  cudaStream_t stream)
{
    const int steps = (int)(up_128(m->k) / STEP);
    const halves_in in = { hx_plain_of(m), first, (int)(outputs / 16),
                           steps,          image, out_scale };
    const exl3_in tiles = { (const uint8_t *)m->w + first * m->k2,
                            (int)(m->n_pad / GROUP),
                            steps,
                            m->k2,
                            hx_cuda_codebook_of(m->codebook),
                            image };

    if (m->fmt == HX_FMT_EXL3)
        return with_exl3(m->k2, m->codebook, [&](auto f) {
            return hx_cuda_launch(w->overlap, exl3_to_image<decltype(f)>,
                                  dim3((unsigned)(outputs / GROUP), (unsigned)steps),
                                  dim3(32 * WARPS), 2 * PART + 512 * (size_t)m->k2,
                                  stream, tiles);
        });
    HX_PLAIN_SWITCH(m->fmt, return hx_cuda_launch(false, plain_to_halves<FMT>,
                                                  dim3((unsigned)in.tiles),
                                                  dim3(ROW_THREADS), 0, stream, in));
    return cudaSuccess;
}
