/* linear.cu - products.
 *
 * exact: f32 on the plain cores, any type, sums in an order that depends on K alone.
 * Up to NBI_DECODE_LINEAR_ROWS rows of x: tensor cores straight from the tiles, in linear_few.cu.
 * More rows: on FP4 tensor cores where there are such, in blas_fp4.cu. Else the matrix becomes
 * bf16, which is exact too, a slice at a time, and cuBLASLt does the product with x rounded to
 * bf16. */
#include "backend/cuda/cublaslt.cuh"

/* ---- exact ---- */

#define EXACT_TILE 64
#define EXACT_STEP 16

struct exact {
    float *y;
    const float *x;
    const void *w;
    enum nbi_dtype dtype;
    float scale;
    int64_t N, K, O;
    bool add;
};

/* Four values from column k (a multiple of 4) of a row. */
__device__ static void four_of_tiles(float out[4], const uint8_t *tiles, int64_t row, int64_t k,
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

/* Whole blocks of 64 x 64 results, 4 x 4 for a thread. */
__global__ static void k_linear_exact(struct exact a)
{
    __shared__ float xs[EXACT_STEP][EXACT_TILE + 4], ws[EXACT_STEP][EXACT_TILE + 4];
    int64_t n0 = (int64_t)blockIdx.y * EXACT_TILE, o0 = (int64_t)blockIdx.x * EXACT_TILE;
    int tid = threadIdx.x, tx = tid % 16, ty = tid / 16, row = tid / 4, col = tid % 4 * 4;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < a.K; k0 += EXACT_STEP) {
        float w[4] = {};
        if (o0 + row < a.O && a.dtype == NBI_NVFP4 && k0 + col < a.K)
            four_of_tiles(w, (const uint8_t *)a.w, o0 + row, k0 + col, a.K);
        for (int i = 0; i < 4; i++) {
            int64_t k = k0 + col + i;
            if (a.dtype != NBI_NVFP4 && o0 + row < a.O && k < a.K)
                w[i] = load_f32(a.w, (o0 + row) * a.K + k, a.dtype);
            ws[col + i][row] = w[i];
            xs[col + i][row] = n0 + row < a.N && k < a.K ? a.x[(n0 + row) * a.K + k] : 0;
        }
        __syncthreads();
        for (int k = 0; k < EXACT_STEP; k++)
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

static enum nb_status linear_exact(struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    const struct nbi_weight *w = &a->w[i];
    struct exact e = {at<float>(a->y[i]),
                      at<float>(a->x),
                      at<void>(w->data),
                      w->dtype,
                      w->tensor_scale,
                      a->N,
                      a->K,
                      w->rows,
                      a->add};
    dim3 grid((unsigned)ceil_div(w->rows, EXACT_TILE), (unsigned)ceil_div(a->N, EXACT_TILE));
    k_linear_exact<<<grid, 256, 0, s->queue>>>(e);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- many rows: cuBLASLt ---- */

__device__ static inline void store_bf16(__nv_bfloat16 *out, float4 v)
{
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
    *(uint2 *)out = *(const uint2 *)pairs;
}

/* x of a product as bf16, from rows as they are. */
__global__ static void k_round_bf16(__nv_bfloat16 *out, const float4 *x, int64_t fours)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < fours)
        store_bf16(out + 4 * i, x[i]);
}

/* The same from SwiGLU, with the bits of the operation (rows.cu), */
__global__ static void k_swiglu_bf16(__nv_bfloat16 *out, const float4 *gate, const float4 *up,
                                     int64_t fours)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < fours)
        store_bf16(out + 4 * i, swiglu4(gate[i], up[i]));
}

/* and from a norm. */
__global__ static void __launch_bounds__(NBI_NORM_THREADS)
    k_norm_bf16(__nv_bfloat16 *out, const float *x, const void *w, enum nbi_dtype dtype, float eps,
                int64_t K)
{
    const float *row = x + blockIdx.x * K;
    float f = rmsnorm_rstd(row, K, eps);
    for (int64_t k = threadIdx.x * 4; k < K; k += NBI_NORM_THREADS * 4) {
        float4 v = *(const float4 *)(row + k);
        store_bf16(out + blockIdx.x * K + k,
                   make_float4(v.x * f * load_f32(w, k, dtype), v.y * f * load_f32(w, k + 1, dtype),
                               v.z * f * load_f32(w, k + 2, dtype),
                               v.w * f * load_f32(w, k + 3, dtype)));
    }
}

/* Rows [first, first + rows) of tiles as bf16 [rows, K]; a thread for each eight values, so that
 * what a warp writes lies together. */
__global__ static void k_widen_tiles(__nv_bfloat16 *out, const uint8_t *tiles, int64_t first,
                                     int64_t rows, int64_t K)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = K / 8;
    if (i >= rows * per_row)
        return;
    int64_t row = first + i / per_row, k = i % per_row * 8;
    float v[8];
    four_of_tiles(v, tiles, row, k, K);
    four_of_tiles(v + 4, tiles, row, k + 4, K);
    __nv_bfloat162 pairs[4];
    for (int j = 0; j < 4; j++)
        pairs[j] = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
    *(uint4 *)(out + (i / per_row) * K + k) = *(const uint4 *)pairs;
}

/* From row `first` of the matrix on, a multiple of 128; x is in s->x_f16 as bf16. */
static enum nb_status linear_large(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                   int64_t first)
{
    const struct nbi_weight *w = &a->w[i];
    struct nbi_gemm g = {at<float>(a->y[i]),
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
        return nbi_cuda_gemm(s, &g);
    int64_t most = NBI_WEIGHTS_BF16_BYTES / (2 * a->K) / 128 * 128;
    NBI_BUG_IF(most == 0);
    for (; first < w->rows; first += most) {
        g.rows = w->rows - first < most ? w->rows - first : most;
        g.y = at<float>(a->y[i]) + first;
        g.w = s->weights_bf16;
        k_widen_tiles<<<(unsigned)ceil_div(g.rows * (a->K / 8), 256), 256, 0, s->queue>>>(
            (__nv_bfloat16 *)s->weights_bf16, at<uint8_t>(w->data), first, g.rows, a->K);
        CU_LAUNCHED();
        NBI_TRY(nbi_cuda_gemm(s, &g));
    }
    return NB_OK;
}

/* ---- which ---- */

/* cuBLASLt wants rows of whole 16 bytes. */
static bool is_large(const struct nbi_op_linear *a, int i)
{
    bool bf16 =
        a->w[i].dtype == NBI_BF16 || (a->w[i].dtype == NBI_NVFP4 && a->N > NBI_DECODE_LINEAR_ROWS);
    return !a->exact && bf16 && a->K % 8 == 0;
}

bool nbi_cuda_is_cublaslt_linear(const struct nbi_stream *s, const struct nbi_op_linear *a)
{
    bool all = true;
    for (int i = 0; i < a->count; i++)
        all = all && is_large(a, i) && !nbi_cuda_four_fits(s, a, i);
    return all;
}

/* All of them, x being in s->x_f16 as bf16. */
static enum nb_status all_large(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    CU_LAUNCHED();
    for (int i = 0; i < a->count; i++)
        NBI_TRY(linear_large(s, a, i, 0));
    return NB_OK;
}

enum nb_status nbi_cuda_norm_linear_cublaslt(struct nbi_stream *s,
                                             const struct nbi_op_rmsnorm *norm,
                                             const struct nbi_op_linear *a)
{
    k_norm_bf16<<<(unsigned)a->N, NBI_NORM_THREADS, 0, s->queue>>>(
        (__nv_bfloat16 *)s->x_f16, at<float>(norm->x), at<void>(norm->w.data), norm->w.dtype,
        norm->eps, a->K);
    return all_large(s, a);
}

enum nb_status nbi_cuda_swiglu_linear_cublaslt(struct nbi_stream *s,
                                               const struct nbi_op_swiglu *act,
                                               const struct nbi_op_linear *a)
{
    int64_t fours = a->N * a->K / 4;
    k_swiglu_bf16<<<(unsigned)ceil_div(fours, 256), 256, 0, s->queue>>>(
        (__nv_bfloat16 *)s->x_f16, at<float4>(act->gate), at<float4>(act->up), fours);
    return all_large(s, a);
}

/* What s->x_f16 holds. */
enum rounded { ROUNDED_NOT, ROUNDED_BF16, ROUNDED_FOUR };

static enum nb_status round_x(struct nbi_stream *s, const struct nbi_op_linear *a, enum rounded *is,
                              enum rounded wanted)
{
    if (*is == wanted)
        return NB_OK;
    *is = wanted;
    if (wanted == ROUNDED_FOUR)
        return nbi_cuda_four_round(s, a);
    int64_t fours = a->N * a->K / 4;
    k_round_bf16<<<(unsigned)ceil_div(fours, 256), 256, 0, s->queue>>>((__nv_bfloat16 *)s->x_f16,
                                                                       at<float4>(a->x), fours);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_linear(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct packed_x r = s->ready;
    CU_HERE(s);
    enum rounded rounded = ROUNDED_NOT;
    if (nbi_cuda_is_decode_linear(a))
        return nbi_cuda_linear_decode(s, a, r.x == at<float>(a->x) && r.N == a->N && r.K == a->K);
    for (int i = 0; i < a->count; i++) {
        int64_t done = 0;
        if (nbi_cuda_four_fits(s, a, i)) {
            NBI_TRY(round_x(s, a, &rounded, ROUNDED_FOUR));
            NBI_TRY(nbi_cuda_four_linear(s, a, i, &done));
            if (done == a->w[i].rows)
                continue;
        }
        if (!is_large(a, i)) {
            NBI_TRY(linear_exact(s, a, i));
            continue;
        }
        NBI_TRY(round_x(s, a, &rounded, ROUNDED_BF16));
        NBI_TRY(linear_large(s, a, i, done));
    }
    return NB_OK;
}
