/* linear.cu - y = x W^T: the choice of a kernel, and prefill in bf16.
 *
 *   training                                      linear_train.cu
 *   matmul F32, or what no other takes            f32 on CUDA cores, gemm_f32.cu
 *   NVFP4, N <= NBI_DECODE_LINEAR_ROWS            f16 tensor cores on the tiles, linear_decode.cu
 *   NVFP4, more rows, FP4 tensor cores            cuBLASLt in FP4, linear_prefill_fp4.cu
 *   NVFP4, more rows, others; bf16                cuBLASLt in bf16, here
 *
 * For cuBLASLt in bf16 x is rounded to bf16, and NVFP4 weights are converted, a slice of rows at a
 * time; every NVFP4 value is exact in bf16. The tensor scale becomes the factor of the product. */
#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/train.cuh"

/* ---- x and weights in bf16 for cuBLASLt ---- */

__device__ static inline void store_bf16(__nv_bfloat16 *out, float4 v)
{
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
    *(uint2 *)out = *(const uint2 *)pairs;
}

__global__ static void k_rows_to_bf16(__nv_bfloat16 *out, const float4 *x, int64_t vectors)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < vectors)
        store_bf16(out + 4 * i, x[i]);
}

/* Bit-identical to the operation swiglu (rowwise.cu) before rounding. */
__global__ static void k_swiglu_to_bf16(__nv_bfloat16 *out, const float4 *gate, const float4 *up,
                                        int64_t vectors)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < vectors)
        store_bf16(out + 4 * i, swiglu4(gate[i], up[i]));
}

/* Bit-identical to the operation rmsnorm (rowwise.cu) before rounding. */
__global__ static void __launch_bounds__(NBI_NORM_THREADS)
    k_norm_to_bf16_cta_per_row(__nv_bfloat16 *out, const float *x, const void *w,
                               enum nbi_dtype dtype, float eps, int64_t K)
{
    const float *row = x + blockIdx.x * K;
    float rstd = rmsnorm_rstd(row, K, eps);
    for (int64_t k = threadIdx.x * 4; k < K; k += NBI_NORM_THREADS * 4) {
        float4 v = *(const float4 *)(row + k);
        store_bf16(out + blockIdx.x * K + k, make_float4(v.x * rstd * load_f32(w, k, dtype),
                                                         v.y * rstd * load_f32(w, k + 1, dtype),
                                                         v.z * rstd * load_f32(w, k + 2, dtype),
                                                         v.w * rstd * load_f32(w, k + 3, dtype)));
    }
}

/* Rows [first, first + rows) of a tiled matrix to out [rows, K]. Eight values a thread, so that a
 * warp stores consecutive bytes. */
__global__ static void k_tiles_to_bf16(__nv_bfloat16 *out, const uint8_t *tiles, int64_t first,
                                       int64_t rows, int64_t K)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = K / 8;
    if (i >= rows * per_row)
        return;
    int64_t row = first + i / per_row, k = i % per_row * 8;
    float v[8];
    load_tile4(v, tiles, row, k, K);
    load_tile4(v + 4, tiles, row, k + 4, K);
    __nv_bfloat162 pairs[4];
    for (int j = 0; j < 4; j++)
        pairs[j] = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
    *(uint4 *)(out + (i / per_row) * K + k) = *(const uint4 *)pairs;
}

/* ---- the product ---- */

/* Rows of matrix i from `first` on, a multiple of 128. x is in s->x_f16 as bf16. */
static enum nb_status linear_cublaslt(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                      int64_t first)
{
    const struct nbi_weight *w = &a->w[i];
    struct cublaslt_gemm g = {};
    g.d = at<float>(a->y[i]);
    g.c = a->add ? g.d : NULL;
    g.a = s->x_f16;
    g.b = at<void>(w->data);
    g.M = a->N;
    g.N = g.ldc = g.ldd = w->rows;
    g.K = g.lda = g.ldb = a->K;
    g.scale = w->tensor_scale;
    g.b_transposed = true;
    if (w->dtype != NBI_NVFP4)
        return nbi_cuda_cublaslt_gemm(s, &g);
    int64_t limit = NBI_WEIGHTS_BF16_BYTES / (2 * a->K) / 128 * 128;
    NBI_BUG_IF(limit == 0);
    for (; first < w->rows; first += limit) {
        g.N = w->rows - first < limit ? w->rows - first : limit;
        g.d = at<float>(a->y[i]) + first;
        g.c = a->add ? g.d : NULL;
        g.b = s->weights_bf16;
        CU_LAUNCH(k_tiles_to_bf16, (unsigned)ceil_div(g.N * (a->K / 8), 256), 256, 0, s->queue,
                  (__nv_bfloat16 *)s->weights_bf16, at<uint8_t>(w->data), first, g.N, a->K);
        CU_LAUNCHED();
        NBI_TRY(nbi_cuda_cublaslt_gemm(s, &g));
    }
    return NB_OK;
}

/* ---- the choice ---- */

/* cuBLASLt requires rows that are a multiple of 16 bytes. */
static bool is_cublaslt(const struct nbi_op_linear *a, int i)
{
    bool tiles = a->w[i].layout == NBI_WEIGHT_TILES;
    bool bf16 = a->w[i].dtype == NBI_BF16 || (tiles && a->N > NBI_DECODE_LINEAR_ROWS);
    return a->matmul == NBI_MATMUL_FAST && bf16 && a->K % 8 == 0;
}

bool nbi_cuda_is_cublaslt_linear(const struct nbi_stream *s, const struct nbi_op_linear *a)
{
    bool all = !s->limits.training;
    for (int i = 0; i < a->count; i++)
        all = all && is_cublaslt(a, i) && !nbi_cuda_fp4_can_run(s, a, i);
    return all;
}

/* All matrices. x is in s->x_f16 as bf16. */
static enum nb_status run_cublaslt(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    CU_LAUNCHED();
    for (int i = 0; i < a->count; i++)
        NBI_TRY(linear_cublaslt(s, a, i, 0));
    return NB_OK;
}

enum nb_status nbi_cuda_norm_linear_cublaslt(struct nbi_stream *s,
                                             const struct nbi_op_rmsnorm *norm,
                                             const struct nbi_op_linear *a)
{
    CU_LAUNCH(k_norm_to_bf16_cta_per_row, (unsigned)a->N, NBI_NORM_THREADS, 0, s->queue,
              (__nv_bfloat16 *)s->x_f16, at<float>(norm->x), at<void>(norm->w.data), norm->w.dtype,
              norm->eps, a->K);
    return run_cublaslt(s, a);
}

enum nb_status nbi_cuda_swiglu_linear_cublaslt(struct nbi_stream *s,
                                               const struct nbi_op_swiglu *act,
                                               const struct nbi_op_linear *a)
{
    int64_t vectors = a->N * a->K / 4;
    CU_LAUNCH(k_swiglu_to_bf16, (unsigned)ceil_div(vectors, 256), 256, 0, s->queue,
              (__nv_bfloat16 *)s->x_f16, at<float4>(act->gate), at<float4>(act->up), vectors);
    return run_cublaslt(s, a);
}

/* What s->x_f16 holds. */
enum x_format { X_NONE, X_BF16, X_FP4 };

static enum nb_status convert_x(struct nbi_stream *s, const struct nbi_op_linear *a,
                                enum x_format *current, enum x_format wanted)
{
    if (*current == wanted)
        return NB_OK;
    *current = wanted;
    if (wanted == X_FP4)
        return nbi_cuda_fp4_quantize_x(s, a);
    int64_t vectors = a->N * a->K / 4;
    CU_LAUNCH(k_rows_to_bf16, (unsigned)ceil_div(vectors, 256), 256, 0, s->queue,
              (__nv_bfloat16 *)s->x_f16, at<float4>(a->x), vectors);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_linear(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    CU_HERE(s);
    enum x_format x_format = X_NONE;
    if (s->limits.training || a->bf16 || a->r.at || a->ldy[0] > 0)
        return nbi_cuda_linear_train(s, a);
    if (nbi_cuda_is_decode_linear(a))
        return nbi_cuda_linear_decode(s, a);
    for (int i = 0; i < a->count; i++) {
        int64_t done = 0;
        if (nbi_cuda_fp4_can_run(s, a, i)) {
            NBI_TRY(convert_x(s, a, &x_format, X_FP4));
            NBI_TRY(nbi_cuda_fp4_linear(s, a, i, &done));
            if (done == a->w[i].rows)
                continue;
        }
        if (!is_cublaslt(a, i)) {
            NBI_TRY(nbi_cuda_linear_f32(s, a, i));
            continue;
        }
        NBI_TRY(convert_x(s, a, &x_format, X_BF16));
        NBI_TRY(linear_cublaslt(s, a, i, done));
    }
    return NB_OK;
}
