/* pack_activations.cu - x of decode linears as packed f16 (pack_activations.cuh), from rows, from
 * SwiGLU or from a norm; and the reduction of split-K partial sums.
 *
 * Each row is multiplied by a power of two that brings its amax to [2^13, 2^14): f16 then keeps 11
 * bits of all but the smallest values. A row with a value that is not finite becomes zeros with a
 * scale of NaN, so that its results are NaN and other rows are not affected. */
#include "backend/cuda/async_copy.cuh"
#include "backend/cuda/pack_activations.cuh"

/* ---- reductions over a row ---- */

/* From compute capability 9.0 on a cluster of CTAs works on a row; before, one CTA with as many
 * threads. */
#if __CUDA_ARCH__ >= 900
#define CLUSTERS 1
#else
#define CLUSTERS 0
#endif

#define ROW_THREADS_MAX 1024

/* Index of the thread among those of its row, which has CTAS. */
template <int CTAS> __device__ static inline int thread_of_row(void)
{
    return CLUSTERS ? blockIdx.x % CTAS * blockDim.x + threadIdx.x : threadIdx.x;
}

/* Values of each warp of the row, for two reductions. Every CTA of the cluster has all of them. */
struct row_sums {
    float warp[2][3][ROW_THREADS_MAX / 32];
    uint64_t full[2]; /* barriers that count the bytes which arrive */
};

__device__ static inline struct row_sums &row_sums(void)
{
    __shared__ struct row_sums sums;
    return sums;
}

/* Before the first row_reduce. The cluster barrier is relaxed: by default it would wait for all
 * memory operations. */
__device__ static inline void row_reduce_init(void)
{
#if CLUSTERS
    if (threadIdx.x == 0) {
        mbarrier_init(smem_addr(&row_sums().full[0]), 1);
        mbarrier_init(smem_addr(&row_sums().full[1]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_barrier_relaxed();
#endif
}

/* v[1] becomes its maximum over the threads of a row, the others their sums. Warps are added in
 * order, as in rmsnorm_rstd. `round` is 0 or 1, another for each call. */
template <int CTAS, int COUNT> __device__ static inline void row_reduce(float v[COUNT], int round)
{
    struct row_sums &sums = row_sums();
    int lane = threadIdx.x % 32, warps = (CLUSTERS ? CTAS : 1) * (int)blockDim.x / 32;
    int warp = thread_of_row<CTAS>() / 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        v[i] = i == 1 ? warp_max(v[i]) : warp_sum(v[i]);
#if CLUSTERS
    uint32_t full = smem_addr(&sums.full[round]), remote_full;
    if (threadIdx.x == 0)
        mbarrier_expect(full, COUNT * 4 * warps);
    if (lane < CTAS) { /* to CTA `lane` of the cluster */
        remote_full = map_to_cta(full, lane);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            uint32_t local = smem_addr(&sums.warp[round][i][warp]);
            store_async(map_to_cta(local, lane), v[i], remote_full);
        }
    }
    mbarrier_wait(full, 0);
#else
#pragma unroll
    for (int i = 0; i < COUNT && lane == 0; i++)
        sums.warp[round][i][warp] = v[i];
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        v[i] = lane < warps ? sums.warp[round][i][lane] : 0;
        v[i] = i == 1 ? warp_max(v[i]) : warp_sum(v[i]);
    }
}

/* ---- rounding to f16 ---- */

/* The factor for row n, a power of two, or 0 if amax says that a value was not finite. Its inverse,
 * or NaN, goes to scale[n] if `store`. */
__device__ static inline float row_factor(float *scale, bool store, int n, float amax)
{
    bool nonfinite = !isfinite(amax);
    int e = nonfinite || amax == 0 ? 0 : max(ilogbf(amax), -100);
    if (threadIdx.x == 0 && store) /* all CTAs of the row store the same */
        scale[n] = nonfinite ? NAN : ldexpf(1, e - 13);
    return nonfinite ? 0 : ldexpf(1, 13 - e);
}

/* Elements k to k + 3 times the factor, zeros if that is 0; `at` is where element k goes. */
__device__ static inline void store_packed4(__half *at, float4 v, float factor)
{
    __half2 *out = (__half2 *)at;
    out[0] = factor == 0 ? __half2() : __floats2half2_rn(v.x * factor, v.y * factor);
    out[X_F16_STEP_BYTES / 4] =
        factor == 0 ? __half2() : __floats2half2_rn(v.z * factor, v.w * factor);
}

/* ---- rows and SwiGLU ---- */

/* Sources of x, four values at a time. */
struct rows_source {
    const float *x;

    __device__ float4 load4(int64_t at) const
    {
        return *(const float4 *)(x + at);
    }
};

/* Bit-identical to the operation swiglu (rowwise.cu). */
struct swiglu_source {
    const float *gate, *up;

    __device__ float4 load4(int64_t at) const
    {
        return swiglu4(*(const float4 *)(gate + at), *(const float4 *)(up + at));
    }
};

#define PACK_CTAS    8 /* of a row */
#define PACK_THREADS 1024
#define PACK_VECTORS 3 /* float4 that a thread keeps in registers */

/* A cluster per row. Rows of up to 12,288 columns are read once, longer ones twice. Rows beyond N,
 * which pad to eight, become zeros. */
template <class SOURCE>
__global__ static void __maxnreg__(48)
    k_pack_cluster_per_row(const __grid_constant__ struct x_f16 to, SOURCE source)
{
    int n = blockIdx.x / (CLUSTERS ? PACK_CTAS : 1), begin = thread_of_row<PACK_CTAS>();
    int padded = to.tile_cols * (CUDA_TILE_COLS / 4), valid = n < to.N ? to.K / 4 : 0;
    const int STEP = PACK_THREADS;
    int64_t row = (int64_t)n * to.K;
    float4 v[PACK_VECTORS];
    float total[2] = {0, 0}, &amax = total[1], factor;
    pdl_trigger();
    row_reduce_init();
    pdl_wait();
#pragma unroll
    for (int j = 0; j < PACK_VECTORS; j++) {
        int i = begin + j * STEP;
        v[j] = i < valid ? source.load4(row + 4 * i) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < PACK_VECTORS; j++)
        amax = update_amax(update_amax(update_amax(update_amax(amax, v[j].x), v[j].y), v[j].z),
                           v[j].w);
#pragma unroll 1
    for (int i = begin + PACK_VECTORS * STEP; i < valid; i += STEP) {
        float4 w = source.load4(row + 4 * i);
        amax = update_amax(update_amax(update_amax(update_amax(amax, w.x), w.y), w.z), w.w);
    }
    row_reduce<PACK_CTAS, 2>(total, 0);
    factor = row_factor(to.scale, valid > 0, n, amax);
    __half *out = x_f16_at(to, n, 4 * begin);
    int step = x_f16_tile_cols(to, 4 * STEP / CUDA_TILE_COLS);
#pragma unroll
    for (int j = 0; j < PACK_VECTORS; j++) {
        int i = begin + j * STEP;
        if (i < padded)
            store_packed4(out + j * step, v[j], factor);
    }
#pragma unroll 1
    for (int i = begin + PACK_VECTORS * STEP; i < padded; i += STEP)
        store_packed4(x_f16_at(to, n, 4 * i),
                      i < valid ? source.load4(row + 4 * i) : make_float4(0, 0, 0, 0), factor);
}

/* ---- split-K partial sums ---- */

/* v plus the partials of element c of row n, in the order of the splits. */
__device__ static inline float splitk_reduce(const struct splitk_partials &p, int64_t n, int64_t c,
                                             float v)
{
    float partial[SPLIT_K_MAX];
#pragma unroll
    for (int i = 0; i < SPLIT_K_MAX; i++)
        partial[i] = i < p.split_k ? p.partials[(i * p.N + n) * p.C + c] : 0;
#pragma unroll
    for (int i = 0; i < SPLIT_K_MAX; i++)
        v = i < p.split_k ? v + partial[i] : v;
    return v;
}

__global__ static void k_splitk_reduce(const __grid_constant__ struct splitk_partials p)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / p.C;
    pdl_trigger();
    pdl_wait();
    if (n < p.N)
        p.y[i] = splitk_reduce(p, n, i % p.C, p.y[i]);
}

enum nb_status nbi_cuda_splitk_reduce(struct nbi_stream *s, const struct splitk_partials *p)
{
    if (!p->y)
        return NB_OK;
    CU_TRY(pdl_launch(s, k_splitk_reduce, (unsigned)ceil_div(p->N * p->C, 256), 256, 0, *p));
    return NB_OK;
}

/* All kernels are compiled for the same architectures, so that of one stands for all. It may be
 * lower than the device's: PTX for an older one is compiled by the driver. */
enum nb_status nbi_cuda_ptx_version(int *out)
{
    struct cudaFuncAttributes attributes;
    CU_TRY(cudaFuncGetAttributes(&attributes, k_splitk_reduce));
    *out = attributes.ptxVersion;
    return NB_OK;
}

/* ---- norms ---- */

#define NORM_CTAS  4 /* of a row; they have NBI_NORM_THREADS together */
#define NORM_ITEMS 6 /* elements that a thread keeps in registers */

struct norm_args {
    float *x;
    const void *w;
    enum nbi_dtype dtype;
    float eps;
};

/* The first elements of a thread in a row. */
struct norm_items {
    float w[NORM_ITEMS], x[NORM_ITEMS];
};

/* Loads x, adds partials and stores x. AT_ONCE splits are in flight: all of them, or half where
 * many rows have to leave registers to the next linear kernel. */
template <int AT_ONCE>
__device__ static inline void load_reduced(struct norm_items &t, const struct splitk_partials &p,
                                           float *row, int n, int K)
{
    const float *first_split = p.partials + n * p.C;
    const int thread = thread_of_row<NORM_CTAS>();
    load_raw<float, NORM_ITEMS>(t.x, row, thread, NBI_NORM_THREADS, K);
#pragma unroll 1
    for (int first = 0; first < p.split_k; first += AT_ONCE) {
        float partials[AT_ONCE][NORM_ITEMS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            load_raw<float, NORM_ITEMS>(partials[i], first_split + (first + i) * p.N * p.C, thread,
                                        NBI_NORM_THREADS, first + i < p.split_k ? K : 0);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int j = 0; j < NORM_ITEMS; j++)
                t.x[j] = first + i < p.split_k ? t.x[j] + partials[i][j] : t.x[j];
    }
    if (p.split_k)
#pragma unroll
        for (int j = 0; j < NORM_ITEMS; j++)
            if (thread + j * NBI_NORM_THREADS < K)
                row[thread + j * NBI_NORM_THREADS] = t.x[j];
}

/* Adds an element to what is reduced over the row: x^2, amax of x w, (x w)^2. */
template <bool GATED> __device__ static inline void norm_add(float total[3], float x, float w)
{
    total[0] += x * x;
    total[1] = update_amax(total[1], x * w);
    if (GATED)
        total[2] += x * w * (x * w);
}

/* RMSNorm of a row, packed; bit-identical to the operation rmsnorm (rowwise.cu) before rounding.
 * Partials are first added to x.
 *
 * If GATED, two matrices multiply the norm n, and SwiGLU of their results is stored packed before
 * its amax is known. By Cauchy-Schwarz |gate| <= |n| |Wgate row|, |up| <= |n| |Wup row| and
 * |swiglu(gate, up)| <= |gate| |up|, so |n|^2 times the largest row norm of each matrix bounds it.
 */
template <int AT_ONCE, bool GATED>
__device__ static inline void norm_row(const struct x_f16 &to, const struct norm_args &a,
                                       const struct splitk_partials &p,
                                       const struct swiglu_bound &act, bool real)
{
    const int FIRST = NORM_ITEMS * NBI_NORM_THREADS;
    int n = blockIdx.x / (CLUSTERS ? NORM_CTAS : 1), thread = thread_of_row<NORM_CTAS>();
    int K = real && n < to.N ? to.K : 0;
    int padded = real ? to.tile_cols * CUDA_TILE_COLS : 0;
    float *row = a.x + (int64_t)n * to.K, total[3] = {}, bound = 0;
    struct norm_items t;
    load_f32_n<NORM_ITEMS>(t.w, a.w, thread, NBI_NORM_THREADS, K, a.dtype);
    if (GATED && real)
        bound = *act.norms[0] * *act.norms[1];
    if (real)
        pdl_wait();
    load_reduced<AT_ONCE>(t, p, row, n, K);
#pragma unroll
    for (int j = 0; j < NORM_ITEMS; j++)
        norm_add<GATED>(total, t.x[j], t.w[j]);
#pragma unroll 1
    for (int c = thread + FIRST; c < K; c += NBI_NORM_THREADS) {
        float x = splitk_reduce(p, n, c, row[c]);
        if (p.split_k)
            row[c] = x;
        norm_add<GATED>(total, x, load_f32(a.w, c, a.dtype));
    }
    row_reduce<NORM_CTAS, GATED ? 3 : 2>(total, real);
    float rstd = 1.0f / sqrtf(total[0] / (float)to.K + a.eps),
          factor = row_factor(to.scale, K > 0, n, total[1] * rstd);
    if (GATED)
        row_factor(act.scale, K > 0, n, total[2] * rstd * rstd * bound);
    __half *out = x_f16_at(to, n, thread);
    int step = x_f16_tile_cols(to, NBI_NORM_THREADS / CUDA_TILE_COLS);
#pragma unroll
    for (int j = 0; j < NORM_ITEMS; j++)
        if (thread + j * NBI_NORM_THREADS < padded)
            out[j * step] = __float2half_rn(factor == 0 ? 0 : t.x[j] * rstd * t.w[j] * factor);
#pragma unroll 1
    for (int c = thread + FIRST; c < padded; c += NBI_NORM_THREADS) {
        float x = c < K && factor != 0 ? row[c] * rstd * load_f32(a.w, c, a.dtype) * factor : 0;
        *x_f16_at(to, n, c) = __float2half_rn(x);
    }
}

template <int AT_ONCE, bool GATED>
__global__ static void __maxnreg__(AT_ONCE == SPLIT_K_MAX ? 96 : 64)
    k_pack_norm_cluster_per_row(const __grid_constant__ struct x_f16 to,
                                const __grid_constant__ struct norm_args a,
                                const __grid_constant__ struct splitk_partials p,
                                const __grid_constant__ struct swiglu_bound act)
{
    pdl_trigger();
    row_reduce_init();
    /* The first round works on an empty row while the previous kernel runs: it brings the code into
     * the instruction cache, which a kernel that runs once would otherwise wait for. */
#pragma unroll 1
    for (int real = !CLUSTERS; real < 2; real++)
        norm_row<AT_ONCE, GATED>(to, a, p, act, real);
}

/* ---- launch ---- */

template <class SOURCE>
static enum nb_status pack(struct nbi_stream *s, const struct nbi_op_linear *a, SOURCE source)
{
    unsigned rows = (unsigned)ceil_div(a->N, 8) * 8,
             ctas = s->cuda->ptx_version >= 90 ? PACK_CTAS : 1;
    CU_TRY(pdl_launch(s, k_pack_cluster_per_row<SOURCE>, {dim3(rows * ctas), ctas},
                      PACK_THREADS / (int)ctas, 0, x_f16_of(s, a->N, a->K), source));
    return NB_OK;
}

enum nb_status nbi_cuda_pack_rows(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    return pack(s, a, rows_source{at<const float>(a->x)});
}

enum nb_status nbi_cuda_pack_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                    const struct nbi_op_linear *a)
{
    return pack(s, a, swiglu_source{at<const float>(act->gate), at<const float>(act->up)});
}

enum nb_status nbi_cuda_pack_norm(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                  const struct nbi_op_linear *a, bool gated,
                                  const struct splitk_partials *p)
{
    struct norm_args args = {at<float>(norm->x), at<const void>(norm->w.data), norm->w.dtype,
                             norm->eps};
    unsigned rows = (unsigned)ceil_div(a->N, 8) * 8,
             ctas = s->cuda->ptx_version >= 90 ? NORM_CTAS : 1;
    bool half = a->N > 32;
    auto kernel = gated  ? half ? k_pack_norm_cluster_per_row<2, true>
                                : k_pack_norm_cluster_per_row<SPLIT_K_MAX, true>
                   : half ? k_pack_norm_cluster_per_row<2, false>
                         : k_pack_norm_cluster_per_row<SPLIT_K_MAX, false>;
    struct swiglu_bound act = {};
    if (gated)
        act = {{nbi_cuda_max_row_norm(&a->w[0]), nbi_cuda_max_row_norm(&a->w[1])},
               s->act_f16_scale};
    CU_TRY(pdl_launch(s, kernel, {dim3(rows * ctas), ctas}, NBI_NORM_THREADS / (int)ctas, 0,
                      x_f16_of(s, a->N, a->K), args, *p, act));
    return NB_OK;
}
