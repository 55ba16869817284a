/* cpu.h - what the CPU files of dev share among themselves; nobody else includes it.
 *
 * cpu.c         every operation that is not a product with a weight matrix; the op table
 * cpu_matmul.c  matmul, head_matmul, moe: canonical arithmetic of every weight format,
 *               plain C for any machine
 * cpu_x86.c     the same inner loops with AVX2 and AVX-512; nothing on other machines */
#ifndef HX_CPU_H
#define HX_CPU_H

#include "dev/dev.h"

/* The operation table of the backend, and how much scratch its largest operation needs.
 */
extern const hx_dev_ops hx_cpu_ops;
size_t hx_cpu_scratch_bytes(const hx_dev_limits *l,
                            int n_thread); /* cpu.c; includes the next */
size_t hx_cpu_matmul_scratch_bytes(const hx_dev_limits *l,
                                   int n_thread); /* cpu_matmul.c */

int hx_cpu_matmul(hx_dev *d, const hx_matmul_args *a, hx_err *err);
int hx_cpu_head_matmul(hx_dev *d, const hx_head_matmul_args *a, hx_err *err);
int hx_cpu_moe(hx_dev *d, const hx_moe_args *a, hx_err *err);

/* Instruction sets, best last. A name the CPU lacks gives NULL. */
typedef enum { HX_ISA_SCALAR, HX_ISA_AVX2, HX_ISA_AVX512, HX_N_ISA } hx_isa;
bool hx_cpu_has(hx_isa isa);

#endif
