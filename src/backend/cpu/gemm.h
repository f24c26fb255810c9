/* gemm.h - products of matrices in f32, packed and cut to the caches.
 *
 * An element of C is summed over k from front to back in blocks of NBI_GEMM_K, each block's sum by
 * itself; so its bits depend neither on threads nor on the rows and columns beside it. */
#pragma once

#include "backend/backend.h"

/* Blocks that are packed at a time. Multiples of what all kernels take, and of a tile. */
#define NBI_GEMM_M 2160
#define NBI_GEMM_N 2048
#define NBI_GEMM_K 512

/* Floats of a stream's scratch for the operands. */
#define NBI_GEMM_A (NBI_GEMM_M * NBI_GEMM_K)
#define NBI_GEMM_B (NBI_GEMM_N * NBI_GEMM_K)

/* C[M, N] = alpha A[M, K] B[K, N], or C + that with add. */
struct nbi_gemm_f32 {
    float *c; /* [M, N] */
    const float *a;
    int64_t a_row, a_col; /* element (m, k) of A is at m * a_row + k * a_col */
    float alpha;
    const void *b; /* [K, N]: rows of floats, or tiles without their tensor scale */
    enum nbi_dtype dtype;
    int64_t M, N, K;
    bool add;
};

void nbi_cpu_gemm(struct nbi_stream *s, const struct nbi_gemm_f32 *g);
