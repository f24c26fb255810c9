/* gemm_f32.cu - matrix products on CUDA cores: exact ones of f32, and those of bf16 whose shapes
 * cuBLASLt does not take. */
#include "backend/cuda/train.cuh"

#define TILE   64
#define STEP_K 16

/* One operand's part of a step: [k][row of the operand]. */
typedef float tile_step[STEP_K][TILE + 4];

/* Rows [r0, r0 + TILE) of an operand whose K is contiguous; four values a thread. */
template <typename T>
__device__ static inline void load_rows(tile_step &to, const T *p, int64_t ld, int64_t r0,
                                        int64_t rows, int64_t k0, int64_t K)
{
    int row = threadIdx.x / 4, col = threadIdx.x % 4 * 4;
    for (int i = 0; i < 4; i++) {
        int64_t k = k0 + col + i;
        to[col + i][row] = r0 + row < rows && k < K ? to_f32(p[(r0 + row) * ld + k]) : 0;
    }
}

/* The same of an operand whose rows are contiguous, for one k after the other. */
template <typename T>
__device__ static inline void load_columns(tile_step &to, const T *p, int64_t ld, int64_t r0,
                                           int64_t rows, int64_t k0, int64_t K)
{
    int k = threadIdx.x / 16, col = threadIdx.x % 16 * 4;
    for (int i = 0; i < 4; i++) {
        int64_t row = r0 + col + i;
        to[k][col + i] = k0 + k < K && row < rows ? to_f32(p[(k0 + k) * ld + row]) : 0;
    }
}

/* Four values of an NVFP4 matrix. */
__device__ static inline void load_nvfp4(float w[4], const struct gemm_f32 &g, int64_t row,
                                         int64_t col, int64_t cols)
{
    uint32_t codes[4];
    if (g.coded.scales)
        load_coded<4>(w, codes, g.coded, row, col);
    else
        load_tile4(w, (const uint8_t *)g.b, row, col, cols);
}

/* B as rows of weights [N, K]. */
__device__ static inline void load_weight_rows(tile_step &to, const struct gemm_f32 &g, int64_t n0,
                                               int64_t k0)
{
    int row = threadIdx.x / 4, col = threadIdx.x % 4 * 4;
    float w[4] = {};
    if (n0 + row < g.N && g.b_type == NBI_NVFP4 && k0 + col < g.K)
        load_nvfp4(w, g, n0 + row, k0 + col, g.K);
    for (int i = 0; i < 4; i++) {
        int64_t k = k0 + col + i;
        if (g.b_type != NBI_NVFP4 && n0 + row < g.N && k < g.K)
            w[i] = load_f32(g.b, (n0 + row) * g.ldb + k, g.b_type);
        to[col + i][row] = w[i];
    }
}

/* B as weights, or activations, [K, N]. */
__device__ static inline void load_weight_columns(tile_step &to, const struct gemm_f32 &g,
                                                  int64_t n0, int64_t k0)
{
    int k = threadIdx.x / 16, col = threadIdx.x % 16 * 4;
    float w[4] = {};
    if (k0 + k < g.K && g.b_type == NBI_NVFP4 && n0 + col < g.N)
        load_nvfp4(w, g, k0 + k, n0 + col, g.N);
    for (int i = 0; i < 4; i++) {
        int64_t n = n0 + col + i;
        if (g.b_type != NBI_NVFP4 && k0 + k < g.K && n < g.N)
            w[i] = load_f32(g.b, (k0 + k) * g.ldb + n, g.b_type);
        to[k][col + i] = w[i];
    }
}

/* A CTA computes 64 x 64 results, a thread 4 x 4 of them. The order of a sum depends on K alone. */
template <typename A, typename D, bool A_TRANSPOSED, bool B_TRANSPOSED>
__global__ static void k_gemm_f32_tile64(const __grid_constant__ struct gemm_f32 g)
{
    __shared__ tile_step as, bs;
    int64_t m0 = (int64_t)blockIdx.y * TILE, n0 = (int64_t)blockIdx.x * TILE;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < g.K; k0 += STEP_K) {
        if (A_TRANSPOSED)
            load_columns(as, (const A *)g.a, g.lda, m0, g.M, k0, g.K);
        else
            load_rows(as, (const A *)g.a, g.lda, m0, g.M, k0, g.K);
        if (B_TRANSPOSED)
            load_weight_rows(bs, g, n0, k0);
        else
            load_weight_columns(bs, g, n0, k0);
        __syncthreads();
        for (int k = 0; k < STEP_K; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(as[k][ty * 4 + i], bs[k][tx * 4 + j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t m = m0 + ty * 4 + i, n = n0 + tx * 4 + j;
            if (m >= g.M || n >= g.N)
                continue;
            float v = sum[i][j] * g.scale;
            v = g.c ? to_f32(((const D *)g.c)[m * g.ldc + n]) + v : v;
            ((D *)g.d)[m * g.ldd + n] = from_f32<D>(v);
        }
}

template <typename A, typename D, bool A_TRANSPOSED, bool B_TRANSPOSED>
static enum nb_status launch_gemm(struct nbi_stream *s, const struct gemm_f32 *g)
{
    dim3 grid((unsigned)ceil_div(g->N, TILE), (unsigned)ceil_div(g->M, TILE));
    CU_LAUNCH((k_gemm_f32_tile64<A, D, A_TRANSPOSED, B_TRANSPOSED>), grid, 256, 0, s->queue, *g);
    CU_LAUNCHED();
    return NB_OK;
}

template <typename A, typename D>
static enum nb_status gemm(struct nbi_stream *s, const struct gemm_f32 *g)
{
    return g->a_transposed   ? launch_gemm<A, D, true, false>(s, g)
           : g->b_transposed ? launch_gemm<A, D, false, true>(s, g)
                             : launch_gemm<A, D, false, false>(s, g);
}

enum nb_status nbi_cuda_gemm_f32(struct nbi_stream *s, const struct gemm_f32 *g)
{
    NBI_BUG_IF(g->a_transposed && g->b_transposed);
    return !g->a_bf16  ? gemm<float, float>(s, g)
           : g->d_bf16 ? gemm<__nv_bfloat16, __nv_bfloat16>(s, g)
                       : gemm<__nv_bfloat16, float>(s, g);
}
