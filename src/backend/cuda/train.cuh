/* train.cuh - what the kernels of training share: the operations, activations of either type, and
 * sums over a CTA and over CTAs.
 *
 * Sums over rows are taken in two stages: a number of CTAs that does not depend on the device leave
 * partial sums in nbi_stream.workspace, and a second kernel adds those in order. */
#pragma once

#include "backend/cuda/launch.cuh"
#include "backend/cuda/nvfp4_master.cuh"

extern "C" {
#include "backend/ops_train.h"
}

/* ---- train_rowwise.cu ---- */

enum nb_status nbi_cuda_l1(struct nbi_stream *s, const struct nbi_op_l1 *a);
enum nb_status nbi_cuda_embed_bwd(struct nbi_stream *s, const struct nbi_op_embed_bwd *a);
enum nb_status nbi_cuda_swiglu_bwd(struct nbi_stream *s, const struct nbi_op_swiglu_bwd *a);

/* ---- train_norm.cu ---- */

enum nb_status nbi_cuda_rmsnorm_bwd(struct nbi_stream *s, const struct nbi_op_rmsnorm_bwd *a);
enum nb_status nbi_cuda_qkv_rope_bwd(struct nbi_stream *s, const struct nbi_op_qkv_rope_bwd *a);

/* ---- train_loss.cu ---- */

enum nb_status nbi_cuda_xent(struct nbi_stream *s, const struct nbi_op_xent *a);
enum nb_status nbi_cuda_xent_slice(struct nbi_stream *s, const struct nbi_op_xent_slice *a);

/* ---- gemm_f32.cu ---- */

/* d [M, N] = scale A B + c in row-major order, summed in f32 in the order of k. A [M, K] is a, or
 * the transpose of a [K, M]; B [K, N] is b, or the transpose of b [N, K], but not both. The ld are
 * row strides. */
struct gemm_f32 {
    void *d;
    const void *c; /* like d, which it may be; NULL: none */
    const void *a, *b;
    enum nbi_dtype b_type;     /* also NVFP4, in tiles and without the tensor scale */
    struct coded_master coded; /* NVFP4 instead of b; or none */
    int64_t M, N, K;
    int64_t lda, ldb, ldc, ldd;
    float scale;
    bool a_transposed, b_transposed;
    bool a_bf16, d_bf16; /* else f32; d is also the type of c */
};

enum nb_status nbi_cuda_gemm_f32(struct nbi_stream *s, const struct gemm_f32 *g);

/* ---- linear_train.cu ---- */

/* Products of training: activations in bf16, or exact ones in f32; strides, and r. */
enum nb_status nbi_cuda_linear_train(struct nbi_stream *s, const struct nbi_op_linear *a);
/* Matrix i on CUDA cores. */
enum nb_status nbi_cuda_linear_f32(struct nbi_stream *s, const struct nbi_op_linear *a, int i);
enum nb_status nbi_cuda_linear_bwd(struct nbi_stream *s, const struct nbi_op_linear_bwd *a);

/* ---- rowwise_bf16.cu, called by rowwise.cu ---- */

enum nb_status nbi_cuda_embed_bf16(struct nbi_stream *s, const struct nbi_op_embed *a);
enum nb_status nbi_cuda_rmsnorm_bf16(struct nbi_stream *s, const struct nbi_op_rmsnorm *a);
enum nb_status nbi_cuda_qkv_rope_rows(struct nbi_stream *s, const struct nbi_op_qkv_rope *op,
                                      const struct rope_args *a);
enum nb_status nbi_cuda_swiglu_rows(struct nbi_stream *s, const struct nbi_op_swiglu *a);

/* ---- activations in f32 or bf16 ---- */

/* V neighbouring activations, which one instruction loads if they take 16 bytes or less. */
template <typename T, int V> struct packed {
    alignas(sizeof(T) * V) T v[V];
};

/* How many take 16 bytes. */
template <typename T> static constexpr int vector_size(void)
{
    return 16 / (int)sizeof(T);
}

__device__ static inline float to_f32(float x)
{
    return x;
}

__device__ static inline float to_f32(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

__device__ static inline float to_f32(__half x)
{
    return __half2float(x);
}

template <typename T> __device__ static inline T from_f32(float x);

template <> __device__ inline float from_f32<float>(float x)
{
    return x;
}

template <> __device__ inline __nv_bfloat16 from_f32<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

template <int V, typename T> __device__ static inline void load_n(float out[V], const T *p)
{
    const packed<T, V> raw = *(const packed<T, V> *)p;
#pragma unroll
    for (int i = 0; i < V; i++)
        out[i] = to_f32(raw.v[i]);
}

template <int V, typename T> __device__ static inline void store_n(T *p, const float v[V])
{
    packed<T, V> raw;
#pragma unroll
    for (int i = 0; i < V; i++)
        raw.v[i] = from_f32<T>(v[i]);
    *(packed<T, V> *)p = raw;
}

/* Whether rows of `columns` values, `ld` apart, can be read 16 bytes at a time. `addresses` is the
 * bitwise or of all base addresses. */
template <typename T>
static inline bool is_vectorizable(uintptr_t addresses, int64_t columns, int64_t ld)
{
    return addresses % 16 == 0 && columns % vector_size<T>() == 0 && ld % vector_size<T>() == 0;
}

/* Whole warps, at least one, for `count` threads' work, at most `limit`. */
static inline unsigned threads_for(int64_t count, unsigned limit)
{
    int64_t threads = ceil_div(count > 0 ? count : 1, 32) * 32;
    return threads < (int64_t)limit ? (unsigned)threads : limit;
}

/* ---- sums ---- */

/* The sum over a CTA of whole warps, in every thread and in an order that blockDim decides. `part`
 * is shared memory of 32 values, which the next call must not share. */
template <typename F> __device__ static inline F cta_sum(F v, F *part)
{
    int lane = threadIdx.x % 32;
    for (int o = 16; o > 0; o >>= 1)
        v += __shfl_xor_sync(0xFFFFFFFF, v, o);
    if (lane == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < (int)blockDim.x / 32 ? part[lane] : 0;
    for (int o = 16; o > 0; o >>= 1)
        v += __shfl_xor_sync(0xFFFFFFFF, v, o);
    return v;
}
