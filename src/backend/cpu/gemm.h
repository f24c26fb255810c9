/* gemm.h - matrix products in f32, packed and blocked for the caches.
 *
 * An element of C is summed over k in order, in blocks of NBI_GEMM_K terms whose sums are added in
 * order. Its bits depend neither on threads nor on other rows and columns. */
#pragma once

#include "backend/backend.h"

/* Blocks that are packed at a time: multiples of mr and nr of all microkernels, and of a tile. */
#define NBI_GEMM_M 2160
#define NBI_GEMM_N 2048
#define NBI_GEMM_K 512

/* Floats of packed A and B in a stream's scratch. */
#define NBI_GEMM_A (NBI_GEMM_M * NBI_GEMM_K)
#define NBI_GEMM_B (NBI_GEMM_N * NBI_GEMM_K)

/* C[M, N] = alpha A[M, K] B[K, N], or C + that with add. */
struct nbi_gemm_f32 {
    float *c; /* [M, N] */
    const void *a;
    bool a_bf16;          /* else f32 */
    int64_t a_row, a_col; /* element (m, k) of A is at m * a_row + k * a_col */
    float alpha;
    const void *b; /* [K, N]: rows of floats, or tiles, taken without their tensor scale */
    enum nbi_dtype dtype;
    const struct nbi_weight *scales; /* of this matrix instead of b; NULL: none */
    int64_t M, N, K;
    bool add;
};

void nbi_cpu_gemm(struct nbi_stream *s, const struct nbi_gemm_f32 *g);
