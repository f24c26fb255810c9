/* pack_activations.cu - x of products of few rows, from rows, SwiGLU or a norm: f16 times a power
 * of two per row, in the order of few.cuh. And sums that products have left to be added up. */
#include "backend/cuda/async_copy.cuh"
#include "backend/cuda/pack_activations.cuh"

/* ---- rows ---- */

/* A row has several CTAs, which are a cluster; before compute capability 9.0 there are none, and it
 * has one of as many threads. */
#if __CUDA_ARCH__ >= 900
#define CLUSTERS 1
#else
#define CLUSTERS 0
#endif

#define ROW_THREADS_MAX 1024

/* Which thread of its row this is, of CTAS. */
template <int CTAS> __device__ static inline int thread_of_row(void)
{
    return CLUSTERS ? blockIdx.x % CTAS * blockDim.x + threadIdx.x : threadIdx.x;
}

/* Where warps of a row leave what they have, twice at most. */
struct row_room {
    float all[2][3][ROW_THREADS_MAX / 32];
    uint64_t arrived[2]; /* as many bytes as there are */
};

__device__ static inline struct row_room &row_room(void)
{
    __shared__ struct row_room room;
    return room;
}

/* Before the first row_total. Barriers of a cluster wait for all memory, unless they are told that
 * they need not. */
__device__ static inline void row_begins(void)
{
#if CLUSTERS
    if (threadIdx.x == 0) {
        mbarrier_init(smem_addr(&row_room().arrived[0]), 1);
        mbarrier_init(smem_addr(&row_room().arrived[1]), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}

/* Sums of a row's threads, and instead of the second the largest; `turn` is another each time.
 * Warps are added up in order, as rmsnorm_rstd does it. */
template <int CTAS, int COUNT> __device__ static inline void row_total(float v[COUNT], int turn)
{
    struct row_room &room = row_room();
    int lane = threadIdx.x % 32, warps = (CLUSTERS ? CTAS : 1) * (int)blockDim.x / 32;
    int warp = thread_of_row<CTAS>() / 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        v[i] = i == 1 ? warp_max(v[i]) : warp_sum(v[i]);
#if CLUSTERS
    uint32_t bar = smem_addr(&room.arrived[turn]), there;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar),
                     "r"(COUNT * 4 * warps)
                     : "memory");
    if (lane < CTAS) {
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(bar), "r"(lane));
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            uint32_t to, here = smem_addr(&room.all[turn][i][warp]);
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(here), "r"(lane));
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 "
                         "[%0], %1, [%2];" ::"r"(to),
                         "f"(v[i]), "r"(there)
                         : "memory");
        }
    }
    mbarrier_wait(bar, 0);
#else
#pragma unroll
    for (int i = 0; i < COUNT && lane == 0; i++)
        room.all[turn][i][warp] = v[i];
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        v[i] = lane < warps ? room.all[turn][i][lane] : 0;
        v[i] = i == 1 ? warp_max(v[i]) : warp_sum(v[i]);
    }
}

/* ---- numbers ---- */

/* What row n is to be times, by the largest in it; 0 if something was not finite, for which amax is
 * infinite or NaN. To `scale`, if `real`, what makes up for it. */
__device__ static inline float x16_factor(float *scale, bool real, int n, float amax)
{
    bool odd = !isfinite(amax);
    int e = odd || amax == 0 ? 0 : max(ilogbf(amax), -100);
    if (threadIdx.x == 0 && real) /* of each CTA, the same */
        scale[n] = odd ? NAN : ldexpf(1, e - 13);
    return odd ? 0 : ldexpf(1, 13 - e);
}

/* Four elements times `up`, to where the first one goes; zeros if that is 0. */
__device__ static inline void put_four(__half *at, float4 v, float up)
{
    __half2 *out = (__half2 *)at;
    out[0] = up == 0 ? __half2() : __floats2half2_rn(v.x * up, v.y * up);
    out[X16_STEP_BYTES / 4] = up == 0 ? __half2() : __floats2half2_rn(v.z * up, v.w * up);
}

/* Where x comes from, four values at a time. */
struct of_rows {
    const float *x;

    __device__ float4 four(int64_t at) const
    {
        return *(const float4 *)(x + at);
    }
};

/* The bits of the operation (rows.cu). */
struct of_swiglu {
    const float *gate, *up;

    __device__ float4 four(int64_t at) const
    {
        return swiglu4(*(const float4 *)(gate + at), *(const float4 *)(up + at));
    }
};

#define ROUND_CTAS    8 /* of a row */
#define ROUND_THREADS 1024
#define ROUND_FOURS   3 /* of a thread that stay in registers */

/* Up to 12,288 columns are computed once, others twice. */
template <class FROM>
__global__ static void __maxnreg__(48) k_round_x16(const __grid_constant__ struct x16 to, FROM from)
{
    int n = blockIdx.x / (CLUSTERS ? ROUND_CTAS : 1), begin = thread_of_row<ROUND_CTAS>();
    int all = to.tile_cols * (CUDA_TILE_COLS / 4), real = n < to.N ? to.K / 4 : 0;
    const int STEP = ROUND_THREADS;
    int64_t row = (int64_t)n * to.K;
    float4 v[ROUND_FOURS];
    float total[2] = {0, 0}, &amax = total[1], up;
    pdl_trigger();
    row_begins();
    pdl_wait();
#pragma unroll
    for (int j = 0; j < ROUND_FOURS; j++) {
        int i = begin + j * STEP;
        v[j] = i < real ? from.four(row + 4 * i) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < ROUND_FOURS; j++)
        amax = larger(larger(larger(larger(amax, v[j].x), v[j].y), v[j].z), v[j].w);
#pragma unroll 1
    for (int i = begin + ROUND_FOURS * STEP; i < real; i += STEP) {
        float4 w = from.four(row + 4 * i);
        amax = larger(larger(larger(larger(amax, w.x), w.y), w.z), w.w);
    }
    row_total<ROUND_CTAS, 2>(total, 0);
    up = x16_factor(to.scale, real > 0, n, amax);
    __half *out = x16_at(to, n, 4 * begin);
    int step = x16_tiles(to, 4 * STEP / CUDA_TILE_COLS);
#pragma unroll
    for (int j = 0; j < ROUND_FOURS; j++) {
        int i = begin + j * STEP;
        if (i < all)
            put_four(out + j * step, v[j], up);
    }
#pragma unroll 1
    for (int i = begin + ROUND_FOURS * STEP; i < all; i += STEP)
        put_four(x16_at(to, n, 4 * i), i < real ? from.four(row + 4 * i) : make_float4(0, 0, 0, 0),
                 up);
}

/* ---- norms, and sums that are pending ---- */

/* Element c of a row with what is pending for it. */
__device__ static inline float settled(const struct splitk_partials &p, int64_t n, int64_t c,
                                       float v)
{
    float part[SLICES_MAX];
#pragma unroll
    for (int i = 0; i < SLICES_MAX; i++)
        part[i] = i < p.split_k ? p.partials[(i * p.N + n) * p.C + c] : 0;
#pragma unroll
    for (int i = 0; i < SLICES_MAX; i++)
        v = i < p.split_k ? v + part[i] : v;
    return v;
}

__global__ static void k_settle(const __grid_constant__ struct splitk_partials p)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / p.C;
    pdl_trigger();
    pdl_wait();
    if (n < p.N)
        p.y[i] = settled(p, n, i % p.C, p.y[i]);
}

enum nb_status nbi_cuda_finish_pending(struct nbi_stream *s)
{
    struct splitk_partials p = s->pending;
    struct rope_args rope = s->rope;
    s->pending = {};
    s->rope = {};
    if (rope.N > 0)
        NBI_TRY(nbi_cuda_rope_apply(s, &rope));
    if (!p.y)
        return NB_OK;
    CU_TRY(pdl_launch(s, k_settle, (unsigned)ceil_div(p.N * p.C, 256), 256, 0, p));
    return NB_OK;
}

/* What the kernels here were made for, and so all of them: what a card runs may be code for an
 * older one. */
enum nb_status nbi_cuda_ptx_version(int *out)
{
    struct cudaFuncAttributes code;
    CU_TRY(cudaFuncGetAttributes(&code, k_settle));
    *out = code.ptxVersion;
    return NB_OK;
}

#define NORM_CTAS  4 /* of a row; NBI_NORM_THREADS together */
#define NORM_ITEMS 6 /* of a thread that stay in registers */

struct norm {
    float *x;
    const void *w;
    enum nbi_dtype dtype;
    float eps;
};

/* The first items of a thread in a row: their weights, and x with what is pending. */
struct norm_items {
    float w[NORM_ITEMS], v[NORM_ITEMS];
};

/* So many slices of what is pending are asked for at once: all of them, or, where many rows are at
 * work and have to leave registers to the product behind, half. */
template <int AT_ONCE>
__device__ static inline void settle_items(struct norm_items &t, const struct splitk_partials &p,
                                           float *row, int n, int K)
{
    const float *part = p.partials + n * p.C;
    const int thread = thread_of_row<NORM_CTAS>();
    load_raw<float, NORM_ITEMS>(t.v, row, thread, NBI_NORM_THREADS, K);
#pragma unroll 1
    for (int first = 0; first < p.split_k; first += AT_ONCE) {
        float parts[AT_ONCE][NORM_ITEMS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            load_raw<float, NORM_ITEMS>(parts[i], part + (first + i) * p.N * p.C, thread,
                                        NBI_NORM_THREADS, first + i < p.split_k ? K : 0);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int j = 0; j < NORM_ITEMS; j++)
                t.v[j] = first + i < p.split_k ? t.v[j] + parts[i][j] : t.v[j];
    }
    if (p.split_k)
#pragma unroll
        for (int j = 0; j < NORM_ITEMS; j++)
            if (thread + j * NBI_NORM_THREADS < K)
                row[thread + j * NBI_NORM_THREADS] = t.v[j];
}

/* The square of an element; the magnitude of it times its weight, and the square of that. */
template <bool GATED> __device__ static inline void norm_add(float total[3], float x, float w)
{
    total[0] += x * x;
    total[1] = larger(total[1], x * w);
    if (GATED)
        total[2] += x * w * (x * w);
}

/* x of a norm, as k_round_x16 makes it of others, and the bits of the operation (rows.cu). What is
 * pending for a row of x goes there first. If GATED, a row of SwiGLU of two products of this is no
 * larger than the norm of x, twice, times the largest norm of a row of each matrix. */
template <int AT_ONCE, bool GATED>
__device__ static inline void norm_row(const struct x16 &to, const struct norm &a,
                                       const struct splitk_partials &p, const struct act_bound &act,
                                       bool real)
{
    const int FIRST = NORM_ITEMS * NBI_NORM_THREADS;
    int n = blockIdx.x / (CLUSTERS ? NORM_CTAS : 1), thread = thread_of_row<NORM_CTAS>();
    int K = real && n < to.N ? to.K : 0;
    int all = real ? to.tile_cols * CUDA_TILE_COLS : 0;
    float *row = a.x + (int64_t)n * to.K, total[3] = {}, bound = 0;
    struct norm_items t;
    load_f32_n<NORM_ITEMS>(t.w, a.w, thread, NBI_NORM_THREADS, K, a.dtype);
    if (GATED && real)
        bound = *act.norms[0] * *act.norms[1];
    if (real)
        pdl_wait();
    settle_items<AT_ONCE>(t, p, row, n, K);
#pragma unroll
    for (int j = 0; j < NORM_ITEMS; j++)
        norm_add<GATED>(total, t.v[j], t.w[j]);
#pragma unroll 1
    for (int c = thread + FIRST; c < K; c += NBI_NORM_THREADS) {
        float x = settled(p, n, c, row[c]);
        if (p.split_k)
            row[c] = x;
        norm_add<GATED>(total, x, load_f32(a.w, c, a.dtype));
    }
    row_total<NORM_CTAS, GATED ? 3 : 2>(total, real);
    float f = 1.0f / sqrtf(total[0] / (float)to.K + a.eps),
          up = x16_factor(to.scale, K > 0, n, total[1] * f);
    if (GATED)
        x16_factor(act.scale, K > 0, n, total[2] * f * f * bound);
    __half *out = x16_at(to, n, thread);
    int step = x16_tiles(to, NBI_NORM_THREADS / CUDA_TILE_COLS);
#pragma unroll
    for (int j = 0; j < NORM_ITEMS; j++)
        if (thread + j * NBI_NORM_THREADS < all)
            out[j * step] = __float2half_rn(up == 0 ? 0 : t.v[j] * f * t.w[j] * up);
#pragma unroll 1
    for (int c = thread + FIRST; c < all; c += NBI_NORM_THREADS) {
        float x = c < K && up != 0 ? row[c] * f * load_f32(a.w, c, a.dtype) * up : 0;
        *x16_at(to, n, c) = __float2half_rn(x);
    }
}

template <int AT_ONCE, bool GATED>
__global__ static void __maxnreg__(AT_ONCE == SLICES_MAX ? 96 : 64)
    k_norm_x16(const __grid_constant__ struct x16 to, const __grid_constant__ struct norm a,
               const __grid_constant__ struct splitk_partials p,
               const __grid_constant__ struct act_bound act)
{
    pdl_trigger();
    row_begins();
    /* First without data, while the kernel before is at work: what runs once waits for its code. */
#pragma unroll 1
    for (int real = !CLUSTERS; real < 2; real++)
        norm_row<AT_ONCE, GATED>(to, a, p, act, real);
}

/* ---- launch ---- */

template <class FROM>
static enum nb_status round_x(struct nbi_stream *s, const struct nbi_op_linear *a, FROM from)
{
    unsigned rows = (unsigned)ceil_div(a->N, 8) * 8,
             each = s->cuda->ptx_version >= 90 ? ROUND_CTAS : 1;
    CU_TRY(pdl_launch(s, k_round_x16<FROM>, {dim3(rows * each), each}, ROUND_THREADS / (int)each, 0,
                      x16_of(s, a->N, a->K), from));
    return NB_OK;
}

enum nb_status nbi_cuda_x_of_rows(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    return round_x(s, a, of_rows{at<const float>(a->x)});
}

enum nb_status nbi_cuda_x_of_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                    const struct nbi_op_linear *a)
{
    return round_x(s, a, of_swiglu{at<const float>(act->gate), at<const float>(act->up)});
}

enum nb_status nbi_cuda_x_of_norm(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                  const struct nbi_op_linear *a, const struct splitk_partials *p)
{
    struct norm from = {at<float>(norm->x), at<const void>(norm->w.data), norm->w.dtype, norm->eps};
    unsigned rows = (unsigned)ceil_div(a->N, 8) * 8,
             each = s->cuda->ptx_version >= 90 ? NORM_CTAS : 1;
    bool gated = gives_act(a), half = a->N > 32;
    auto kernel = gated  ? half ? k_norm_x16<2, true> : k_norm_x16<SLICES_MAX, true>
                   : half ? k_norm_x16<2, false>
                         : k_norm_x16<SLICES_MAX, false>;
    struct act_bound act = {};
    if (gated)
        act = {{nbi_cuda_max_row_norm(&a->w[0]), nbi_cuda_max_row_norm(&a->w[1])},
               s->act_f16_scale};
    CU_TRY(pdl_launch(s, kernel, {dim3(rows * each), each}, NBI_NORM_THREADS / (int)each, 0,
                      x16_of(s, a->N, a->K), from, *p, act));
    return NB_OK;
}
