/* linear.cu - y = x W^T: the choice of a kernel, and the kernels for f32 and for prefill in bf16.
 *
 *   exact, or a type or K that no other takes     f32 on CUDA cores, here
 *   NVFP4, N <= NBI_DECODE_LINEAR_ROWS            f16 tensor cores on the tiles, linear_decode.cu
 *   NVFP4, more rows, FP4 tensor cores            cuBLASLt in FP4, linear_prefill_fp4.cu
 *   NVFP4, more rows, others; bf16                cuBLASLt in bf16, here
 *
 * For cuBLASLt in bf16 x is rounded to bf16, and NVFP4 weights are converted, a slice of rows at a
 * time; every NVFP4 value is exact in bf16. The tensor scale becomes the factor of the product. */
#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/launch.cuh"

/* ---- f32 ---- */

#define F32_TILE   64
#define F32_STEP_K 16

struct linear_f32_args {
    float *y;
    const float *x;
    const void *w;
    enum nbi_dtype dtype;
    float scale;
    int64_t N, K, O;
    bool add;
};

/* Values k to k + 3 of a row of an NVFP4 matrix, without the tensor scale; k is a multiple of 4. */
__device__ static void load_tile4(float out[4], const uint8_t *tiles, int64_t row, int64_t k,
                                  int64_t K)
{
    int64_t tile_cols = (K + CUDA_TILE_COLS - 1) / CUDA_TILE_COLS;
    const uint8_t *t = tiles + (row / 16 * tile_cols + k / 128) * CUDA_TILE_BYTES;
    int r = (int)(row % 16), block = (int)(k % 128) / 16, lane = (r & 7) * 4 + block / 2;
    int quarter = (r >> 3) + 2 * (block & 1), half = (int)(k % 16) / 8;
    uint32_t word = ((const uint32_t *)t)[half * 128 + lane * 4 + quarter];
    float scale = load_f32(t, 1024 + lane * 4 + quarter, NBI_E4M3) * E2M1_PAIR_SCALE;
    for (int i = 0; i < 2; i++) {
        uint32_t pair = e2m1_pair(word, (int)(k % 8) / 2 + i);
        float2 v = __half22float2(*(const __half2 *)&pair);
        out[2 * i] = v.x * scale;
        out[2 * i + 1] = v.y * scale;
    }
}

/* A CTA computes 64 x 64 results, a thread 4 x 4 of them. The order of a sum depends on K alone. */
__global__ static void k_linear_f32_tile64(struct linear_f32_args a)
{
    __shared__ float xs[F32_STEP_K][F32_TILE + 4], ws[F32_STEP_K][F32_TILE + 4];
    int64_t n0 = (int64_t)blockIdx.y * F32_TILE, o0 = (int64_t)blockIdx.x * F32_TILE;
    int tid = threadIdx.x, tx = tid % 16, ty = tid / 16, row = tid / 4, col = tid % 4 * 4;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < a.K; k0 += F32_STEP_K) {
        float w[4] = {};
        if (o0 + row < a.O && a.dtype == NBI_NVFP4 && k0 + col < a.K)
            load_tile4(w, (const uint8_t *)a.w, o0 + row, k0 + col, a.K);
        for (int i = 0; i < 4; i++) {
            int64_t k = k0 + col + i;
            if (a.dtype != NBI_NVFP4 && o0 + row < a.O && k < a.K)
                w[i] = load_f32(a.w, (o0 + row) * a.K + k, a.dtype);
            ws[col + i][row] = w[i];
            xs[col + i][row] = n0 + row < a.N && k < a.K ? a.x[(n0 + row) * a.K + k] : 0;
        }
        __syncthreads();
        for (int k = 0; k < F32_STEP_K; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(xs[k][ty * 4 + i], ws[k][tx * 4 + j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t n = n0 + ty * 4 + i, o = o0 + tx * 4 + j;
            if (n < a.N && o < a.O) {
                float v = sum[i][j] * a.scale;
                a.y[n * a.O + o] = a.add ? a.y[n * a.O + o] + v : v;
            }
        }
}

static enum nb_status linear_f32(struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    const struct nbi_weight *w = &a->w[i];
    struct linear_f32_args args = {at<float>(a->y[i]),
                                   at<float>(a->x),
                                   at<void>(w->data),
                                   w->dtype,
                                   w->tensor_scale,
                                   a->N,
                                   a->K,
                                   w->rows,
                                   a->add};
    dim3 grid((unsigned)ceil_div(w->rows, F32_TILE), (unsigned)ceil_div(a->N, F32_TILE));
    CU_LAUNCH(k_linear_f32_tile64, grid, 256, 0, s->queue, args);
    CU_LAUNCHED();
    return NB_OK;
}

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
    struct cublaslt_gemm g = {at<float>(a->y[i]),
                              at<void>(w->data),
                              s->x_f16,
                              a->N,
                              a->K,
                              w->rows,
                              w->rows,
                              w->tensor_scale,
                              a->add,
                              NULL};
    if (w->dtype != NBI_NVFP4)
        return nbi_cuda_cublaslt_gemm(s, &g);
    int64_t limit = NBI_WEIGHTS_BF16_BYTES / (2 * a->K) / 128 * 128;
    NBI_BUG_IF(limit == 0);
    for (; first < w->rows; first += limit) {
        g.rows = w->rows - first < limit ? w->rows - first : limit;
        g.y = at<float>(a->y[i]) + first;
        g.w = s->weights_bf16;
        CU_LAUNCH(k_tiles_to_bf16, (unsigned)ceil_div(g.rows * (a->K / 8), 256), 256, 0, s->queue,
                  (__nv_bfloat16 *)s->weights_bf16, at<uint8_t>(w->data), first, g.rows, a->K);
        CU_LAUNCHED();
        NBI_TRY(nbi_cuda_cublaslt_gemm(s, &g));
    }
    return NB_OK;
}

/* ---- the choice ---- */

/* cuBLASLt requires rows that are a multiple of 16 bytes. */
static bool is_cublaslt(const struct nbi_op_linear *a, int i)
{
    bool bf16 =
        a->w[i].dtype == NBI_BF16 || (a->w[i].dtype == NBI_NVFP4 && a->N > NBI_DECODE_LINEAR_ROWS);
    return !a->exact && bf16 && a->K % 8 == 0;
}

bool nbi_cuda_is_cublaslt_linear(const struct nbi_stream *s, const struct nbi_op_linear *a)
{
    bool all = true;
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
    struct packed_x packed = s->ready;
    CU_HERE(s);
    enum x_format x_format = X_NONE;
    if (nbi_cuda_is_decode_linear(a))
        return nbi_cuda_linear_decode(
            s, a, packed.x == at<float>(a->x) && packed.N == a->N && packed.K == a->K);
    for (int i = 0; i < a->count; i++) {
        int64_t done = 0;
        if (nbi_cuda_fp4_can_run(s, a, i)) {
            NBI_TRY(convert_x(s, a, &x_format, X_FP4));
            NBI_TRY(nbi_cuda_fp4_linear(s, a, i, &done));
            if (done == a->w[i].rows)
                continue;
        }
        if (!is_cublaslt(a, i)) {
            NBI_TRY(linear_f32(s, a, i));
            continue;
        }
        NBI_TRY(convert_x(s, a, &x_format, X_BF16));
        NBI_TRY(linear_cublaslt(s, a, i, done));
    }
    return NB_OK;
}
