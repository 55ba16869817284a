/* quantize.h - what the files of `hoist quantize` share: the plan of a conversion.
 *
 *   quantize.c        the command: checks, resume, the order of things, progress
 *   quantize_plan.c   which tensors become what, bits per matrix, layout of the shards
 *   quantize_out.c    files: shards, journal, configs
 *   quantize_calib.c  calibration rows through the model, Hessians */
#ifndef HX_QUANTIZE_H
#define HX_QUANTIZE_H

#include "cli/cli.h"
#include "model/model.h"

/* ---- plan ---------------------------------------------------------------- */

/* Matrices of one class in one layer have the same rate (a group). */
#define QZ_CLASSES(X)                                                                    \
    X(ATTN, "attention")                                                                 \
    X(DENSE, "dense MLP") X(SHARED, "shared expert") X(ROUTED, "routed experts")

typedef enum {
#define X(id, text) QZ_##id,
    QZ_CLASSES(X)
#undef X
        QZ_N_CLASS
} qz_class;

/* Whose input's Hessian a matrix uses, inside its layer. Expert e's down has QZ_H_EXPERT
 * + e. */
enum { QZ_H_ATTN, QZ_H_QUERY, QZ_H_O, QZ_H_MLP, QZ_H_DOWN, QZ_H_EXPERT, QZ_H_NONE = -1 };

#define QZ_LAYER_HEAD (-1) /* layer of lm_head; n_layer is the MTP block */

/* A matrix that is quantised. */
typedef struct {
    const char *key;    /* in the output */
    const char *src[3]; /* source keys, one under the other */
    int32_t n_src;
    int64_t n, k;
    int32_t layer, class, hess, expert; /* expert -1: none */
    size_t at;                          /* its hx_mat in hx_layer, or in hx_expert */
    int32_t k2;
    int64_t tensor; /* trellis, suh, svh and, unless 3INST, the marker */
    bool done;
} qz_unit;

/* A tensor of the output: of a unit, or copied from the source. */
typedef struct {
    const char *name;
    hx_dtype dtype;
    int64_t dim[HX_DIM_MAX];
    int32_t n_dim;
    uint64_t bytes, offset; /* offset in its file's data */
    int32_t layer, file;
    const hx_tensor *src[3]; /* laid one behind the other; NULL: a unit writes it */
    const hx_tensor *scale;  /* of an FP8 source, which becomes BF16 */
} qz_tensor;

typedef struct {
    char name[48];
    uint64_t bytes; /* of the data */
    hx_sb head;     /* the safetensors header with its length */
    int fd;
} qz_file;

typedef struct {
    double bits; /* wanted average over the groups of the trunk */
    int32_t head_k2;
    hx_codebook codebook;
    bool half_rates;
    uint64_t shard_bytes;
} qz_plan_opt;

typedef struct {
    hx_model *model;
    qz_plan_opt opt;
    hx_arena arena;
    qz_unit *unit;
    int64_t n_unit, cap_unit;
    qz_tensor *tensor;
    int64_t n_tensor, cap_tensor;
    qz_file *file; /* the last is mtp.safetensors where there is an MTP block */
    int32_t n_file;
    bool has_mtp;
    /* How much the answers change with a class's relative squared error in a layer, nats
     * per position, [n_layer + 1][class]; 1 everywhere without calibration. */
    double (*weight)[QZ_N_CLASS];
    int32_t (*rate)[QZ_N_CLASS]; /* k2 per group; 0: no such group */
    double bits;                 /* reached */
} qz_plan;

/* Lists units and copied tensors of a model. Errors: HX_EUNSUP (already quantised),
 * HX_EFORMAT, HX_ENOMEM. */
int qz_plan_open(qz_plan *p, hx_model *m, const qz_plan_opt *opt, hx_err *err);
void qz_plan_close(qz_plan *p);
/* Rates of all groups for the wanted average. Errors: HX_EARG: none within the rates. */
int qz_plan_rates(qz_plan *p, hx_err *err);
/* Bytes of all output tensors at these rates; before the layout. */
uint64_t qz_plan_bytes(const qz_plan *p);
/* Names, sizes and places of all output tensors; headers of the files. */
int qz_plan_layout(qz_plan *p, hx_err *err);
const char *qz_class_name(int class);
const char *qz_codebook_name(hx_codebook cb);
uint32_t qz_codebook_marker(hx_codebook cb); /* 0: none */
bool qz_ends_with(const char *s, const char *tail);

/* ---- calibration text ------------------------------------------------------ */

typedef struct {
    int32_t *id; /* all rows, one behind the other */
    int64_t n_id, n_row, cols;
} qz_text; /* every row has cols tokens, the last may have fewer */

/* Rows of a text file, or of a JSON list of lists of ids. Freed with qz_text_free(). */
int qz_text_read(qz_text *t, const char *path, const char *model_dir, int64_t max_rows,
                 int64_t cols, int64_t n_vocab, hx_err *err);
void qz_text_free(qz_text *t);

/* ---- output -------------------------------------------------------------- */

typedef struct {
    char dir[2048];  /* the output folder */
    char work[2100]; /* its subfolder with what is needed until the end */
    int journal;     /* file descriptor */
} qz_out;

/* Writes a whole file under a temporary name and then renames it. */
int qz_write_file(const char *path, const void *p, size_t n, hx_err *err);
int qz_write_at(int fd, const void *p, size_t n, uint64_t at, const char *name,
                hx_err *err);
int qz_read_at(int fd, void *p, size_t n, uint64_t at, const char *name, hx_err *err);

/* Opens the folder: a new or empty one, or, with resume, one whose journal begins with the
 * same settings line. *text: that journal, freed with hx_free(); NULL: it is new. */
int qz_out_open(qz_out *o, const char *dir, const char *settings, bool resume,
                char **text, hx_err *err);
void qz_out_close(qz_out *o);
int qz_out_note(qz_out *o, hx_err *err, const char *fmt, ...) HX_PRINTF(3, 4);

/* Writes b as a file of the folder, whatever came of b, and frees it. */
int qz_out_save(const qz_out *o, const char *name, hx_sb *b, hx_err *err);

int qz_out_files(qz_out *o, qz_plan *p, hx_err *err); /* creates and opens the shards */
int qz_out_copy(const qz_plan *p, hx_err *err);       /* all tensors that are copied */
/* Stores what came out of a unit, and reads it back as a matrix (into *mem, freed with
 * hx_free()). */
int qz_out_unit(qz_plan *p, const qz_unit *u, const uint16_t *trellis,
                const uint16_t *suh, const uint16_t *svh, hx_err *err);
int qz_out_load(qz_plan *p, const qz_unit *u, hx_mat *m, void **mem, hx_err *err);
/* Index, both configs, and all other files of the source folder; then the work folder
 * goes. */
int qz_out_finish(qz_out *o, const qz_plan *p, const char *source, const qz_text *text,
                  hx_err *err);

/* ---- calibration ----------------------------------------------------------- */

typedef struct qz_calib qz_calib;

/* A device and a graph that rows go through. work: folder for activations. */
int qz_calib_open(qz_calib **out, hx_model *m, const qz_text *text, const char *work,
                  const hx_dev_opt *opt, hx_err *err);
void qz_calib_close(qz_calib *c);
hx_dev *qz_calib_dev(const qz_calib *c);
/* Measures weight: the first max_rows rows through the original model, once as they are
 * and once per group with a little noise in its products. */
int qz_calib_weigh(qz_calib *c, double (*weight)[QZ_N_CLASS], int64_t max_rows,
                   hx_err *err);
/* Runs all rows through layer - 1, whose matrices are quantised by now, keeps what comes
 * out, and takes the Hessians of layer's inputs (n_layer: of lm_head's). Both go to the
 * work folder. Layers come in order. */
int qz_calib_pass(qz_calib *c, int64_t layer, hx_err *err);
/* Hessian hess of layer, [k_pad, k_pad] floats from the work folder; freed with
 * hx_free(). */
int qz_calib_hessian(qz_calib *c, int64_t layer, int32_t hess, float **out, hx_err *err);
/* Bytes that the work folder needs at most: in passes, beside the output; and before there
 * is any, to measure weights. */
uint64_t qz_calib_bytes(const hx_model *m, const qz_text *text);
uint64_t qz_calib_weigh_bytes(const hx_model *m, const qz_text *text, int64_t max_rows);

#endif
