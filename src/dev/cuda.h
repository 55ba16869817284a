/* cuda.h - what the CUDA files of dev share among themselves; nobody else includes it. */
#ifndef HX_CUDA_H
#define HX_CUDA_H

#include <cuda_runtime.h>

#include "dev/dev.h"

/* One product with an EXL3 matrix: y[r, 0..n) = W x[r, 0..k) for r < rows. Device memory; trellis
 * 16-byte aligned, it may be pinned host memory. */
typedef struct {
    const void  *trellis, *suh, *svh, *bias;
    const float *x;
    float       *y;
    int64_t      ldx, ldy, n, k, n_pad, k_pad;
    int          rows;
} hx_cuda_job;

/* How the inputs are split over thread blocks, and where they meet. scratch: f32 [jobs, n_pad / 128,
 * splits, 8 or 16 rows, 128]; ticket: int [jobs, n_pad / 128], zero before and after every launch. */
typedef struct {
    int    bps;              /* 128-input blocks of one thread block */
    float *scratch;
    int   *ticket;
} hx_cuda_split;

/* jobs: device array [n_job], all of one rate and shape, MUL1, at most 16 rows each; rows: the most. */
cudaError_t hx_cuda_exl3_rows(const hx_cuda_job *jobs, int n_job, int rows, int k2, int64_t n_pad,
                              int64_t k_pad, hx_cuda_split sp, cudaStream_t stream);
int hx_cuda_exl3_bps(int64_t n_pad, int64_t k_pad, int n_job, int n_sm);

#endif
