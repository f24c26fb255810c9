/* pack_activations.cuh - activations as f16 in the order in which the decode linear kernels load
 * them. */
#pragma once

#include "backend/cuda/launch.cuh"

/* Shared memory that a linear kernel leaves to the attention kernel, which starts while it runs. */
#define ATTENTION_SMEM_BYTES (27 << 10)

/* CTAs that divide the K of a linear at most. */
#define SPLIT_K_MAX 4

/* ---- packed activations ---- */

/* x of a decode linear as f16, times a power of two per row, in the order of fragments B of
 * m16n8k16. For each tile column (128 of K) and each eight rows of x there is a tile of
 * X_F16_TILE_BYTES:
 *
 *   tile (k / 128, n / 8)      8 steps of 256 bytes: step s has elements 2s and 2s + 1 of each of
 *                              the eight blocks of 16, the K of one mma
 *   step                       2 core matrices [8 rows, 8 of K] of 128 bytes: blocks 0, 2, 4, 6
 *                              and blocks 1, 3, 5, 7 (nvfp4_tile.cuh has weights in this order)
 *   core matrix                8 rows of 16 bytes, a pair of elements from each of its blocks
 */
struct x_f16 {
    __half *out;
    float *scale; /* [N]: x is the f16 value times this; NaN where a value was not finite */
    int N, K, tile_cols;
};

#define X_F16_TILE_BYTES 2048
#define X_F16_STEP_BYTES 256

/* What bounds SwiGLU of gate and up before they are known, so that it can be stored as f16: the
 * largest norm of a row of each matrix. `scale` receives the scale of each row. */
struct swiglu_bound {
    const float *norms[2];
    float *scale;
};

/* Where element k of row n goes. Elements k and k + 1 are neighbours if k is even. */
__device__ static inline __half *x_f16_at(const struct x_f16 &x, int n, int k)
{
    int col = k / CUDA_TILE_COLS, block = k / 16 % 8, step = k % 16 / 2;
    int tile = col * ((x.N + 7) / 8) + n / 8;
    return x.out + ((tile * 8 + step) * 2 + block % 2) * 64 + n % 8 * 8 + block / 2 * 2 + k % 2;
}

/* Distance of elements that are `count` tile columns apart. */
__device__ static inline int x_f16_tile_cols(const struct x_f16 &x, int count)
{
    return count * ((x.N + 7) / 8) * (X_F16_TILE_BYTES / 2);
}

static inline struct x_f16 x_f16_of(struct nbi_stream *s, int64_t N, int64_t K)
{
    return {(__half *)s->x_f16, s->x_f16_scale, (int)N, (int)K, tiles_of(0, K).cols};
}

/* SwiGLU, which is written while x is read. Nobody writes the columns that pad K to whole tiles:
 * they hold finite values, zeros or older activations, and the weights there are zeros. */
static inline struct x_f16 act_f16_of(struct nbi_stream *s, int64_t N, int64_t K)
{
    return {(__half *)s->act_f16, s->act_f16_scale, (int)N, (int)K, tiles_of(0, K).cols};
}

/* Largest magnitude so far; infinity once a value is not finite. */
__device__ static inline float update_amax(float amax, float v)
{
    return isfinite(v) ? fmaxf(amax, fabsf(v)) : INFINITY;
}

/* pack_activations.cu: pack x into s->x_f16. pack_norm first adds the split-K partials p to the
 * rows of the norm, if there are any; with `gated`, the scales of act_f16 are made as well. */
enum nb_status nbi_cuda_pack_rows(struct nbi_stream *s, const struct nbi_op_linear *a);
enum nb_status nbi_cuda_pack_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                    const struct nbi_op_linear *a);
enum nb_status nbi_cuda_pack_norm(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                  const struct nbi_op_linear *a, bool gated,
                                  const struct splitk_partials *p);

/* linear_decode.cu: the product of a packed x. With `gated`, x is of pack_norm, the two matrices
 * are gate and up, and SwiGLU of their results is packed into s->act_f16 in place of y. With
 * `pending`, split-K sums may stay partial: *pending says what y lacks. */
enum nb_status nbi_cuda_linear_packed(struct nbi_stream *s, const struct nbi_op_linear *a,
                                      const struct x_f16 &x, bool gated,
                                      struct splitk_partials *pending);
