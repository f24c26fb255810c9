/* pack_activations.cuh - x of the products of few rows, in the order that their kernels take it. */
#pragma once

#include "backend/cuda/launch.cuh"

/* Shared memory that a product leaves to attention, which starts while it is at work. */
#define BESIDE_BYTES (27 << 10)

/* Into so many slices columns of a product are cut at most. */
#define SLICES_MAX 4

/* ---- x of a product of few rows ---- */

/* x as f16 in the order in which the product takes it: for each tile of columns and each eight rows
 * the operand B of eight steps of a product, with two matrices [8 rows, 8 columns] each. */
struct x16 {
    __half *out;
    float *scale;
    int N, K, tile_cols;
};

/* What a norm says of SwiGLU of two matrices of it, before that is there: by what to round it. */
struct act_bound {
    const float *norms[2]; /* of each matrix, the largest of its rows */
    float *scale;
};

/* Bytes of a column for eight rows. */
#define X16_BYTES 2048

#define X16_STEP_BYTES 256

/* Where element k of row n goes; two lie together. Step s has elements 2s and 2s + 1 of each block:
 * its first matrix those of blocks 0, 2, 4 and 6, its second those of the others (tiles.cuh). */
__device__ static inline __half *x16_at(const struct x16 &to, int n, int k)
{
    int tile = k / CUDA_TILE_COLS, block = k / 16 % 8, step = k % 16 / 2;
    int eight = tile * ((to.N + 7) / 8) + n / 8;
    return to.out + ((eight * 8 + step) * 2 + block % 2) * 64 + n % 8 * 8 + block / 2 * 2 + k % 2;
}

/* From an element to the same one so many tiles of columns on. */
__device__ static inline int x16_tiles(const struct x16 &to, int count)
{
    return count * ((to.N + 7) / 8) * (X16_BYTES / 2);
}

static inline struct x16 x16_of(struct nbi_stream *s, int64_t N, int64_t K)
{
    return {(__half *)s->x_f16, s->x_f16_scale, (int)N, (int)K, tiles_of(0, K).cols};
}

/* The same for SwiGLU, which comes to be while x is read. Columns that make it whole tiles are not
 * written: what is there is finite, zeros or of another time, and meets weights that are zeros. */
static inline struct x16 act16_of(struct nbi_stream *s, int64_t N, int64_t K)
{
    return {(__half *)s->act_f16, s->act_f16_scale, (int)N, (int)K, tiles_of(0, K).cols};
}

/* The larger magnitude; infinite if something is not finite. */
__device__ static inline float larger(float most, float v)
{
    return isfinite(v) ? fmaxf(most, fabsf(v)) : INFINITY;
}

/* Whether a product of a norm gives SwiGLU of its two matrices. */
static inline bool gives_act(const struct nbi_op_linear *a)
{
    return a->act.at && a->count == 2 && a->w[0].rows == a->w[1].rows;
}

/* x_few.cu: x of a product to s->x_f16; of a norm together with what is pending for it. */
enum nb_status nbi_cuda_x_of_rows(struct nbi_stream *s, const struct nbi_op_linear *a);
enum nb_status nbi_cuda_x_of_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                    const struct nbi_op_linear *a);
enum nb_status nbi_cuda_x_of_norm(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                  const struct nbi_op_linear *a, const struct splitk_partials *p);
