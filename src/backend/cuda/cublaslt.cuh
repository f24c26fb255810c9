/* cublaslt.cuh - products of many rows by cuBLASLt: of bf16, and of NVFP4 on devices that multiply
 * it themselves. */
#pragma once

#include "backend/cuda/internal.cuh"

/* ---- blas.cu ---- */

/* y[N, rows of ldy] = scale x w^T with w [rows, K] and x [N, K] of bf16, or of E2M1 with what more
 * that needs: K a multiple of 32, rows and ldy of 4. */
struct nbi_gemm_four {
    const void *w_scales, *x_scales; /* of blocks, swizzled (tensor/nvfp4.h) */
    const float *scale, *add;        /* of the device, in place of those of nbi_gemm; add: 0 or 1 */
};

struct nbi_gemm {
    float *y;
    const void *w, *x;
    int64_t N, K, rows, ldy;
    float scale;
    bool add;
    const struct nbi_gemm_four *fp4; /* NULL: bf16 */
};

/* Opening finds the library; a stream for many rows does so at once. */
enum nb_status nbi_cuda_blas_open(struct cuda *cuda);
void nbi_cuda_blas_close(struct cuda *cuda);
enum nb_status nbi_cuda_gemm(struct nbi_stream *s, const struct nbi_gemm *g);

/* ---- blas_fp4.cu ---- */

/* The compute capability from which on there are FP4 tensor cores. */
#define NBI_FOUR_CAPABILITY 100

/* Terms of NVFP4 that x becomes, each with a product of its own (tensor/nvfp4.h). */
#define NBI_FOUR_TERMS 2

/* What is to be said about products before anything was tried. */
void nbi_cuda_four_begin(struct cuda *cuda);

/* With the first stream for many rows: FP4 products on a device that should have them are compared
 * with the host's, and be.fp4 becomes whether they are used. What keeps them from it is a
 * warning, not a failure. */
void nbi_cuda_four_try(struct nbi_stream *s);

/* Whether they are used for matrix i. */
bool nbi_cuda_four_fits(const struct nbi_stream *s, const struct nbi_op_linear *a, int i);

/* What x takes in s->x_f16: less than bf16 does, for more rows than NBI_DECODE_LINEAR_ROWS. */
int64_t nbi_cuda_four_bytes(int64_t N, int64_t K);

/* x to s->x_f16, in terms; then matrix i of it up to row *done. That is all of them, or cuBLASLt
 * refused: that is a warning too, and be.fp4 is false from then on. */
enum nb_status nbi_cuda_four_round(struct nbi_stream *s, const struct nbi_op_linear *a);
enum nb_status nbi_cuda_four_linear(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                    int64_t *done);
