/* train_norm.cu - gradients of RMSNorm, and of the norm and rotation of query and key heads.
 *
 * The gradients of the norms' weights are sums over all rows, taken in two stages (train.cuh). */
#include "backend/cuda/train.cuh"

/* CTAs of the first stage have at least this many tasks each, and are at most so many. The order of
 * sums follows from their number, which must not depend on the device. */
#define TASKS_PER_PART 8
#define PARTS_MAX      512

/* CTAs for `tasks`, each of which leaves sums of some columns in s->workspace. */
static unsigned parts_for(int64_t tasks, int64_t columns)
{
    int64_t parts = ceil_div(tasks, TASKS_PER_PART);
    int64_t limit = NBI_WORKSPACE_BYTES / (columns * (int64_t)sizeof(float));
    limit = limit < PARTS_MAX ? limit : PARTS_MAX;
    return (unsigned)(parts < limit ? parts : limit);
}

/* ---- the second stage ---- */

#define SUM_COLUMNS 32
#define SUM_GROUPS  8

/* Columns [0, split) of the sums are added to first, the others to second. */
struct sum_parts_args {
    float *first, *second;
    const float *partials; /* [parts, columns] */
    int parts, columns, split;
};

/* A CTA takes SUM_COLUMNS columns. Each group of 32 threads adds a piece of the parts, in order;
 * then the pieces are added in order. */
__global__ static void k_sum_parts(struct sum_parts_args a)
{
    __shared__ float piece[SUM_GROUPS][SUM_COLUMNS];
    int group = threadIdx.x / SUM_COLUMNS, lane = threadIdx.x % SUM_COLUMNS;
    int column = blockIdx.x * SUM_COLUMNS + lane;
    int each = (a.parts + SUM_GROUPS - 1) / SUM_GROUPS;
    int end = (group + 1) * each < a.parts ? (group + 1) * each : a.parts;
    float sum = 0;
    if (column < a.columns)
#pragma unroll 8
        for (int p = group * each; p < end; p++)
            sum += a.partials[(int64_t)p * a.columns + column];
    piece[group][lane] = sum;
    __syncthreads();
    if (group > 0 || column >= a.columns)
        return;
    for (int g = 1; g < SUM_GROUPS; g++)
        sum += piece[g][lane];
    float *out = column < a.split ? a.first + column : a.second + column - a.split;
    *out += sum;
}

static enum nb_status sum_parts(struct nbi_stream *s, const struct sum_parts_args *a)
{
    CU_LAUNCH(k_sum_parts, (unsigned)ceil_div(a->columns, SUM_COLUMNS), SUM_COLUMNS * SUM_GROUPS, 0,
              s->queue, *a);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- RMSNorm ---- */

#define NORM_THREADS 512 /* at most, for a row */

template <typename T> struct rmsnorm_bwd_args {
    T *dx;
    float *partials; /* [gridDim.x, C] */
    const T *dy, *x;
    const float *rstd;
    const void *w;
    enum nbi_dtype dtype; /* of w */
    int64_t N, C;
};

/* CTA p takes rows p, p + gridDim.x, ... A thread has NV times V columns, whose weights and sums
 * stay in registers. */
template <typename T, int V, int NV>
__global__ static void __launch_bounds__(NORM_THREADS)
    k_rmsnorm_bwd_rows_per_cta(struct rmsnorm_bwd_args<T> a)
{
    __shared__ float part[2][32];
    float w[NV][V], dw[NV][V] = {};
    int round = 0;
#pragma unroll
    for (int j = 0; j < NV; j++)
        for (int i = 0; i < V; i++) {
            int64_t c = (int64_t)(j * blockDim.x + threadIdx.x) * V + i;
            w[j][i] = c < a.C ? load_f32(a.w, c, a.dtype) : 0;
        }
    for (int64_t n = blockIdx.x; n < a.N; n += gridDim.x, round ^= 1) {
        float x[NV][V], d[NV][V], dx[NV][V], rstd = a.rstd[n], sum = 0;
#pragma unroll
        for (int j = 0; j < NV; j++) {
            int64_t c = (int64_t)(j * blockDim.x + threadIdx.x) * V;
            if (c >= a.C)
                continue;
            load_n<V>(x[j], a.x + n * a.C + c);
            load_n<V>(d[j], a.dy + n * a.C + c);
            load_n<V>(dx[j], a.dx + n * a.C + c);
            for (int i = 0; i < V; i++) {
                dw[j][i] += d[j][i] * x[j][i] * rstd;
                d[j][i] *= w[j][i];
                sum += d[j][i] * x[j][i];
            }
        }
        float f = cta_sum(sum, part[round]) / (float)a.C * rstd * rstd * rstd;
#pragma unroll
        for (int j = 0; j < NV; j++) {
            int64_t c = (int64_t)(j * blockDim.x + threadIdx.x) * V;
            if (c >= a.C)
                continue;
            for (int i = 0; i < V; i++)
                dx[j][i] += d[j][i] * rstd - x[j][i] * f;
            store_n<V>(a.dx + n * a.C + c, dx[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < NV; j++) {
        int64_t c = (int64_t)(j * blockDim.x + threadIdx.x) * V;
        if (c < a.C)
            store_n<V>(a.partials + blockIdx.x * a.C + c, dw[j]);
    }
}

template <typename T, int V, int NV>
static void launch_rmsnorm_bwd(struct nbi_stream *s, const struct rmsnorm_bwd_args<T> &a)
{
    unsigned threads = threads_for(ceil_div(a.C, V * NV), NORM_THREADS);
    CU_LAUNCH((k_rmsnorm_bwd_rows_per_cta<T, V, NV>), parts_for(a.N, a.C), threads, 0, s->queue, a);
}

template <typename T>
static enum nb_status rmsnorm_bwd(struct nbi_stream *s, const struct nbi_op_rmsnorm_bwd *op)
{
    constexpr int V = vector_size<T>();
    const struct rmsnorm_bwd_args<T> a = {
        at<T>(op->dx), (float *)s->workspace, at<T>(op->dy), at<T>(op->x), at<float>(op->rstd),
            at<void>(op->w.data), op->w.dtype, op->N, op->C
    };
    bool vectors = is_vectorizable<T>(op->dx.at | op->dy.at | op->x.at, op->C, op->C);
    if (op->C > (vectors ? V * 4 : 16) * NORM_THREADS)
        return nbi_fail(NB_EUNSUPPORTED, "a norm of %lld values", (long long)op->C);
    if (!vectors)
        launch_rmsnorm_bwd<T, 1, 16>(s, a);
    else if (op->C <= V * NORM_THREADS)
        launch_rmsnorm_bwd<T, V, 1>(s, a);
    else if (op->C <= 2 * V * NORM_THREADS)
        launch_rmsnorm_bwd<T, V, 2>(s, a);
    else
        launch_rmsnorm_bwd<T, V, 4>(s, a);
    CU_LAUNCHED();
    const struct sum_parts_args sum = {
        at<float>(op->dw), NULL,      (float *)s->workspace, (int)parts_for(op->N, op->C),
        (int)op->C,        (int)op->C};
    return sum_parts(s, &sum);
}

enum nb_status nbi_cuda_rmsnorm_bwd(struct nbi_stream *s, const struct nbi_op_rmsnorm_bwd *a)
{
    CU_HERE(s);
    return a->bf16 ? rmsnorm_bwd<__nv_bfloat16>(s, a) : rmsnorm_bwd<float>(s, a);
}

/* ---- norm and rotation of heads ---- */

#define ROPE_WARPS 8 /* of a CTA, each with one head at a time */

/* Queries or keys. */
template <typename T> struct rope_bwd_heads {
    T *d;
    const T *x;
    const float *rstd;
    const void *w;
    enum nbi_dtype dtype; /* of w */
    int count;            /* heads of a row */
    int64_t ld;
};

template <typename T> struct rope_bwd_args {
    struct rope_bwd_heads<T> q, k;
    const float *cos, *sin;
    float *partials; /* [gridDim.x, 2, D] */
    int64_t N;
    int D;
};

/* Differentiates head h of row n, and adds to dw. A lane has COUNT times W neighbouring elements of
 * the first half, and those of the second half that they are rotated with. */
template <typename T, int W, int COUNT>
__device__ static inline void rope_bwd_head(const struct rope_bwd_args<T> &a,
                                            const struct rope_bwd_heads<T> &of, int64_t n, int h,
                                            float dw[COUNT][2 * W])
{
    int half = a.D / 2, lane = threadIdx.x % 32;
    T *d = of.d + n * of.ld + (int64_t)h * a.D;
    const T *x = of.x + n * of.ld + (int64_t)h * a.D;
    float dv[COUNT][2 * W], xv[COUNT][2 * W], sum = 0, rstd = of.rstd[n * of.count + h];
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        int at = W * (lane + 32 * j);
        float c[W], s[W];
        if (at >= half)
            continue;
        load_n<W>(dv[j], d + at);
        load_n<W>(dv[j] + W, d + half + at);
        load_n<W>(xv[j], x + at);
        load_n<W>(xv[j] + W, x + half + at);
        load_n<W>(c, a.cos + n * half + at);
        load_n<W>(s, a.sin + n * half + at);
        for (int i = 0; i < W; i++) {
            float first = dv[j][i] * c[i] + dv[j][W + i] * s[i];
            float second = dv[j][W + i] * c[i] - dv[j][i] * s[i];
            dw[j][i] += first * xv[j][i] * rstd;
            dw[j][W + i] += second * xv[j][W + i] * rstd;
            dv[j][i] = first * load_f32(of.w, at + i, of.dtype);
            dv[j][W + i] = second * load_f32(of.w, half + at + i, of.dtype);
            sum += dv[j][i] * xv[j][i] + dv[j][W + i] * xv[j][W + i];
        }
    }
    float f = warp_sum(sum) / (float)a.D * rstd * rstd * rstd;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        int at = W * (lane + 32 * j);
        if (at >= half)
            continue;
        for (int i = 0; i < 2 * W; i++)
            dv[j][i] = dv[j][i] * rstd - xv[j][i] * f;
        store_n<W>(d + at, dv[j]);
        store_n<W>(d + half + at, dv[j] + W);
    }
}

/* Adds the warps' sums in order; the first warp writes them to out [D]. */
template <int W, int COUNT>
__device__ static inline void rope_bwd_store(float *out, float *all, float dw[COUNT][2 * W], int D)
{
    int half = D / 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int turn = 0; turn < ROPE_WARPS; turn++) {
        for (int j = 0; j < COUNT && turn == warp; j++)
            for (int i = 0, at = W * (lane + 32 * j); i < W && at < half; i++) {
                float *first = all + at + i, *second = first + half;
                *first = turn > 0 ? *first + dw[j][i] : dw[j][i];
                *second = turn > 0 ? *second + dw[j][W + i] : dw[j][W + i];
            }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < D; i += blockDim.x)
        out[i] = all[i];
    __syncthreads();
}

/* The heads of all rows, queries before keys in each row, in turn over all warps of the grid. */
template <typename T, int W, int COUNT>
__global__ static void __launch_bounds__(32 * ROPE_WARPS)
    k_qkv_rope_bwd_warp_per_head(const __grid_constant__ struct rope_bwd_args<T> a)
{
    CU_DYNAMIC_SMEM(sums, 16);
    float dq[COUNT][2 * W] = {}, dk[COUNT][2 * W] = {};
    int heads = a.q.count + a.k.count;
    int64_t step = (int64_t)gridDim.x * ROPE_WARPS;
    for (int64_t i = (int64_t)blockIdx.x * ROPE_WARPS + threadIdx.x / 32; i < a.N * heads;
         i += step) {
        int64_t n = i / heads;
        int h = (int)(i - n * heads);
        if (h < a.q.count)
            rope_bwd_head<T, W, COUNT>(a, a.q, n, h, dq);
        else
            rope_bwd_head<T, W, COUNT>(a, a.k, n, h - a.q.count, dk);
    }
    float *out = a.partials + (int64_t)blockIdx.x * 2 * a.D;
    rope_bwd_store<W, COUNT>(out, (float *)sums, dq, a.D);
    rope_bwd_store<W, COUNT>(out + a.D, (float *)sums, dk, a.D);
}

template <typename T, int W, int COUNT>
static void launch_rope_bwd(struct nbi_stream *s, const struct rope_bwd_args<T> &a, unsigned parts)
{
    CU_LAUNCH((k_qkv_rope_bwd_warp_per_head<T, W, COUNT>), parts, 32 * ROPE_WARPS,
              a.D * (int)sizeof(float), s->queue, a);
}

template <typename T>
static enum nb_status qkv_rope_bwd(struct nbi_stream *s, const struct nbi_op_qkv_rope_bwd *op)
{
    struct rope_bwd_args<T> a = {
    };
    a.q = {at<T>(op->dq),
           at<T>(op->q),
           at<float>(op->rstd_q),
           at<void>(op->q_norm.data),
           op->q_norm.dtype,
           (int)op->NH,
           op->ld > 0 ? op->ld : op->NH * op->D};
    a.k = {at<T>(op->dk),
           at<T>(op->k),
           at<float>(op->rstd_k),
           at<void>(op->k_norm.data),
           op->k_norm.dtype,
           (int)op->NKV,
           op->ld > 0 ? op->ld : op->NKV * op->D};
    a.cos = at<float>(op->cos);
    a.sin = at<float>(op->sin);
    a.partials = (float *)s->workspace;
    a.N = op->N;
    a.D = (int)op->D;
    unsigned parts = parts_for(ceil_div(op->N * (op->NH + op->NKV), ROPE_WARPS), 2 * op->D);
    bool pairs = op->D % 4 == 0 && op->ld % 2 == 0;
    if (!pairs)
        launch_rope_bwd<T, 1, NBI_HEAD_MAX / 64>(s, a, parts);
    else if (op->D <= 128)
        launch_rope_bwd<T, 2, 1>(s, a, parts);
    else if (op->D <= 256)
        launch_rope_bwd<T, 2, 2>(s, a, parts);
    else
        launch_rope_bwd<T, 2, NBI_HEAD_MAX / 128>(s, a, parts);
    CU_LAUNCHED();
    const struct sum_parts_args sum = {at<float>(op->dq_norm), at<float>(op->dk_norm),
                                       (float *)s->workspace,  (int)parts,
                                       (int)(2 * op->D),       (int)op->D};
    return sum_parts(s, &sum);
}

enum nb_status nbi_cuda_qkv_rope_bwd(struct nbi_stream *s, const struct nbi_op_qkv_rope_bwd *a)
{
    CU_HERE(s);
    NBI_BUG_IF(a->D > NBI_HEAD_MAX);
    return a->bf16 ? qkv_rope_bwd<__nv_bfloat16>(s, a) : qkv_rope_bwd<float>(s, a);
}
