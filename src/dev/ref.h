/* ref.h - the reference backend as ops.c sees it; nobody else includes it. */
#ifndef HX_REF_H
#define HX_REF_H

#include "dev/dev.h"

extern const hx_dev_ops hx_ref_ops;

/* Scratch for calls within the limits, with n_thread workers. */
size_t hx_ref_scratch_bytes(const hx_dev_limits *l, int n_thread);

#endif
