/* weights.h - checkpoints: safetensors files as named tensors, and as matrices and
 * vectors.
 *
 * Part of model.h, which includes it. Tensors are borrowed from mapped files and may have
 * any alignment; what had to be converted is owned by the hx_weights and lives as long.
 * Thread: any one at a time; the find functions and what they return may be shared. */
#ifndef HX_WEIGHTS_H
#define HX_WEIGHTS_H

#include "dev/dev.h"

/* X(safetensors name, bytes of an element) */
#define HX_DTYPES(X)                                                                     \
    X(BOOL, 1)                                                                           \
    X(U8, 1)                                                                             \
    X(I8, 1)                                                                             \
    X(F8_E4M3, 1)                                                                        \
    X(F8_E5M2, 1)                                                                        \
    X(U16, 2)                                                                            \
    X(I16, 2)                                                                            \
    X(F16, 2)                                                                            \
    X(BF16, 2)                                                                           \
    X(U32, 4)                                                                            \
    X(I32, 4)                                                                            \
    X(F32, 4)                                                                            \
    X(U64, 8)                                                                            \
    X(I64, 8)                                                                            \
    X(F64, 8)

typedef enum {
#define X(name, bytes) HX_DT_##name,
    HX_DTYPES(X)
#undef X
        HX_N_DTYPE
} hx_dtype;

#define HX_DIM_MAX 8

typedef struct {
    const char *name; /* NUL-terminated, no control characters */
    const uint8_t *p; /* [bytes] in the mapped file */
    uint64_t bytes;
    int64_t dim[HX_DIM_MAX]; /* outermost first; 0 past n_dim */
    int32_t n_dim;           /* 0: a scalar */
    hx_dtype dtype;
    int32_t file;
} hx_tensor;

typedef struct hx_weights hx_weights;

/* Maps the checkpoint in folder dir: the shards of model.safetensors.index.json, else
 * model.safetensors; mtp.safetensors too when there is one. Every header is checked:
 * afterwards each tensor lies inside its file, its size fits its shape, and no name
 * occurs twice. Reads headers only. *out is freed with hx_weights_close(); NULL on
 * failure. Errors: HX_EIO, HX_EFORMAT, HX_EUNSUP, HX_ELIMIT, HX_ENOMEM. */
int hx_weights_open(hx_weights **out, const char *dir, hx_err *err);
void hx_weights_close(hx_weights *w);

/* Reads all files into the page cache; optional. What is bound afterwards costs no disk
 * access. fn may be NULL. Errors: HX_EIO: a file became shorter or cannot be read. */
int hx_weights_advise(hx_weights *w, hx_load_fn *fn, void *ud, hx_err *err);

const hx_tensor *hx_weights_find(const hx_weights *w, const char *name); /* or NULL */
/* Would hx_weights_mat() find it? */
bool hx_weights_has(const hx_weights *w, const char *key);
int64_t hx_weights_count(const hx_weights *w);
/* Tensor i of 0..count-1: file by file, in the order of their bytes. */
const hx_tensor *hx_weights_at(const hx_weights *w, int64_t i);
uint64_t hx_weights_bytes(const hx_weights *w);                       /* of all tensors */
const char *hx_weights_file(const hx_weights *w, const hx_tensor *t); /* its name */
bool hx_weights_holds(const hx_weights *w, const void *p); /* in a mapped file? */
const char *hx_dtype_name(hx_dtype d);

/* The matrix of linear key, n outputs and k inputs: KEY.trellis with its companions
 * (EXL3), else KEY.weight, else the tensor KEY itself; trailing dimensions of a plain one
 * count as one (convolutions). block_n and block_k are the grid of FP8 scales
 * (weight_block_size; unused otherwise). KEY.bias is taken when present and becomes f16.
 * Errors: HX_EFORMAT, HX_EUNSUP, HX_ENOMEM; *out is zeroed then. */
typedef struct {
    const char *key;
    int64_t n, k;
    int32_t block_n, block_k;
} hx_mat_want;

int hx_weights_mat(hx_weights *w, const hx_mat_want *want, hx_mat *out, hx_err *err);

/* A small tensor (F32, F16, BF16) of exactly these dimensions as finite f32; dim ends at
 * the first 0. vec: owned by w, 16-byte aligned. copy: to out, of as many floats. Errors:
 * HX_EFORMAT; HX_ENOMEM. */
typedef struct {
    const char *name;
    int64_t dim[HX_DIM_MAX];
} hx_vec_want;

int hx_weights_vec(hx_weights *w, const hx_vec_want *want, hx_buf *out, hx_err *err);
int hx_weights_copy(const hx_weights *w, const hx_vec_want *want, float *out,
                    hx_err *err);

/* ---- checksums (sums.c) ----------------------------------------------- */

#define HX_SUMS_FILE "hoist-checksums.json"

/* A checksum per tensor: XXH3-128, which finds damage, not forgery. */
typedef struct {
    uint64_t lo, hi;
} hx_sum;

/* Of all tensors of a checkpoint; freed with hx_sums_close(). */
typedef struct hx_sums hx_sums;

hx_sum hx_sums_of(const void *p, size_t n);
/* The same, with a call of pause after each piece bytes and after the last; false, and no
 * sum, when pause says false. */
typedef bool hx_sums_pause_fn(void *ud, size_t bytes);
bool hx_sums_of_slowly(const void *p, size_t n, size_t piece, hx_sums_pause_fn *pause,
                       void *ud, hx_sum *out);
/* All tensors of w, whose sums are then put one by one. Errors: HX_ENOMEM. */
int hx_sums_empty(hx_sums **out, const hx_weights *w, hx_err *err);
void hx_sums_put(hx_sums *s, const hx_tensor *t, hx_sum sum);
/* Reads every byte of w. pool and fn may be NULL. Errors: HX_ENOMEM. */
int hx_sums_make(hx_sums **out, const hx_weights *w, hx_pool *pool, hx_load_fn *fn,
                 void *ud, hx_err *err);
/* HX_SUMS_FILE of folder dir. Errors: HX_EIO (none there), HX_EFORMAT, HX_ENOMEM. */
int hx_sums_read(hx_sums **out, const char *dir, hx_err *err);
int hx_sums_write(const hx_sums *s, const char *dir, hx_err *err);
void hx_sums_close(hx_sums *s);
int64_t hx_sums_count(const hx_sums *s);
/* Is sum, of its bytes wherever they lie now (a file, the pinned arena), that of tensor t? Any
 * thread. Errors: HX_EFORMAT: other bytes, or a tensor that has no checksum; names it. */
int hx_sums_check(const hx_sums *s, const hx_tensor *t, hx_sum sum, hx_err *err);
/* Calls bad for every tensor that differs, lacks a checksum, or is gone. have: made from w.
 * Returns how many. */
typedef void hx_sums_bad_fn(void *ud, const char *name, const char *why);
int64_t hx_sums_compare(const hx_sums *want, const hx_sums *have, hx_sums_bad_fn *bad,
                        void *ud);

/* ---- rules (verify.c) ------------------------------------------------- */

typedef struct {
    int64_t n_exl3;  /* matrices, all rules of the format hold */
    int64_t n_mixed; /* layers whose experts have several rates in one projection */
    int64_t n_row, n_drawn; /* rows compared, of so many matrices drawn */
    double worst;           /* their largest error, of the product's size */
} hx_verify_report;

/* Every EXL3 matrix of the checkpoint, whether the model uses it or not. Errors: HX_EFORMAT,
 * HX_EUNSUP: names tensor and rule. */
int hx_verify_rules(hx_weights *w, hx_verify_report *r, hx_err *err);
/* Row n of an EXL3 matrix in double, straight from the format's definition; out [m->k_pad]. */
void hx_verify_row(const hx_mat *m, int64_t n, double *out);
/* Draws n_mat EXL3 matrices and two rows of each, and compares what the CPU's kernels make of
 * them with those rows. Errors: HX_EDEVICE: a product is wrong; names the matrix. HX_ENOMEM. */
int hx_verify_rows(hx_weights *w, int64_t n_mat, uint64_t seed, hx_verify_report *r,
                   hx_err *err);

#endif
