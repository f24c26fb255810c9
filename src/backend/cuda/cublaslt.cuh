/* cublaslt.cuh - matrix products through cuBLASLt, in bf16 and, from compute capability 10.0 on, in
 * FP4. */
#pragma once

#include "backend/cuda/internal.cuh"

/* ---- cublaslt.cu ---- */

/* Operands in E2M1 instead of bf16. K is a multiple of 32, rows and ldy of 4. */
struct cublaslt_fp4 {
    const void *w_scales, *x_scales; /* of blocks of 16, swizzled (tensor/nvfp4.h) */
    const float *scale, *add;        /* on the device; they replace those of cublaslt_gemm */
};

/* y = scale x w^T, or y + scale x w^T with add. w [rows, K] and x [N, K] are bf16 or FP4, y [N,
 * ldy] is f32. */
struct cublaslt_gemm {
    float *y;
    const void *w, *x;
    int64_t N, K, rows, ldy;
    float scale;
    bool add;
    const struct cublaslt_fp4 *fp4; /* NULL: bf16 */
};

/* Loads the library; no-op if it is loaded. A stream for more than NBI_DECODE_LINEAR_ROWS rows does
 * so when it is opened, since loading takes long and may fail. The caller holds cuda->lock. */
enum nb_status nbi_cuda_cublaslt_open(struct cuda *cuda);
void nbi_cuda_cublaslt_close(struct cuda *cuda);
enum nb_status nbi_cuda_cublaslt_gemm(struct nbi_stream *s, const struct cublaslt_gemm *g);

/* ---- linear_prefill_fp4.cu ---- */

/* First compute capability with FP4 tensor cores. */
#define NBI_FP4_MIN_CC 100

/* NVFP4 values whose sum is x; each has a product of its own (nbi_nvfp4_split_hi_lo). */
#define NBI_FP4_TERMS 2

/* Describes the prefill path in be.prefill_path, before the self-test. */
void nbi_cuda_fp4_init(struct cuda *cuda);

/* On a device with FP4 tensor cores the first stream for more than NBI_DECODE_LINEAR_ROWS rows
 * compares products with the host's and sets be.fp4. A failure is a warning, and prefill goes on in
 * bf16. */
void nbi_cuda_fp4_selftest(struct nbi_stream *s);

/* Whether matrix i is multiplied in FP4. */
bool nbi_cuda_fp4_can_run(const struct nbi_stream *s, const struct nbi_op_linear *a, int i);

/* Bytes of x in s->x_f16. With more than NBI_DECODE_LINEAR_ROWS rows that is less than for
 * bf16. */
int64_t nbi_cuda_fp4_x_bytes(int64_t N, int64_t K);

/* x to s->x_f16. */
enum nb_status nbi_cuda_fp4_quantize_x(struct nbi_stream *s, const struct nbi_op_linear *a);

/* Matrix i with that x, up to row *done. If cuBLASLt refuses, *done is less than all rows: the
 * caller does the rest in bf16, the user is warned, and be.fp4 is false from then on. */
enum nb_status nbi_cuda_fp4_linear(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                   int64_t *done);
