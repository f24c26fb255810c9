/* train_rowwise.cu - gradients of SwiGLU and of the embedding, and the L1 loss. */
#include "backend/cuda/train.cuh"

#define THREADS 256

/* ---- SwiGLU ---- */

template <typename T> struct swiglu_bwd_args {
    T *dgate, *dup;
    const T *dy, *gate, *up;
    int64_t F, ld;
    unsigned chunks; /* CTAs of a row */
};

/* A thread takes V neighbouring values, which it reads before it writes: dgate may be gate. */
template <typename T, int V> __global__ static void k_swiglu_bwd(struct swiglu_bwd_args<T> a)
{
    int64_t n = blockIdx.x / a.chunks;
    int64_t f = ((int64_t)(blockIdx.x % a.chunks) * THREADS + threadIdx.x) * V;
    float d[V], g[V], u[V];
    if (f >= a.F)
        return;
    load_n<V>(d, a.dy + n * a.F + f);
    load_n<V>(g, a.gate + n * a.ld + f);
    load_n<V>(u, a.up + n * a.ld + f);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float s = 1 / (1 + expf(-g[i])), by_up = d[i] * g[i] * s;
        g[i] = d[i] * u[i] * s * (1 + g[i] * (1 - s));
        u[i] = by_up;
    }
    store_n<V>(a.dgate + n * a.ld + f, g);
    store_n<V>(a.dup + n * a.ld + f, u);
}

template <typename T>
static enum nb_status swiglu_bwd(struct nbi_stream *s, const struct nbi_op_swiglu_bwd *op)
{
    constexpr int V = vector_size<T>();
    int64_t ld = op->ld > 0 ? op->ld : op->F;
    uintptr_t addresses = op->dgate.at | op->dup.at | op->dy.at | op->gate.at | op->up.at;
    bool vectors = is_vectorizable<T>(addresses, op->F, ld);
    int64_t chunks = ceil_div(op->F, THREADS * (vectors ? V : 1));
    const struct swiglu_bwd_args<T> a = {
        at<T>(op->dgate), at<T>(op->dup), at<T>(op->dy), at<T>(op->gate), at<T>(op->up), op->F, ld,
            (unsigned)chunks
    };
    if (vectors)
        CU_LAUNCH((k_swiglu_bwd<T, V>), (unsigned)(op->N * chunks), THREADS, 0, s->queue, a);
    else
        CU_LAUNCH((k_swiglu_bwd<T, 1>), (unsigned)(op->N * chunks), THREADS, 0, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_swiglu_bwd(struct nbi_stream *s, const struct nbi_op_swiglu_bwd *a)
{
    CU_HERE(s);
    return a->bf16 ? swiglu_bwd<__nv_bfloat16>(s, a) : swiglu_bwd<float>(s, a);
}

/* ---- the embedding ---- */

template <typename T> struct embed_bwd_args {
    float *dtable;
    const int32_t *ids, *order;
    const T *dx;
    int N;
    int64_t C;
    int64_t first, count; /* ids; count 0: all */
};

/* A warp takes 32 V columns of the rows whose id is that of row order[i]: one run in `order`, if i
 * is where the run begins. The table's row is read once, gets the rows in order, and is written
 * once, which gives the bits of adding each row to the table itself. */
template <typename T, int V>
__global__ static void k_embed_bwd_warp_per_run(struct embed_bwd_args<T> a)
{
    int i = blockIdx.x, lane = threadIdx.x % 32;
    int64_t c = ((int64_t)(blockIdx.y * blockDim.x + threadIdx.x)) * V;
    int32_t id = a.ids[a.order[i]];
    float *to = a.dtable + (id - a.first) * a.C + c, sum[V] = {};
    if (i > 0 && a.ids[a.order[i - 1]] == id)
        return;
    if (a.count > 0 && (id < a.first || id >= a.first + a.count))
        return;
    bool inside = c < a.C;
    if (inside)
        load_n<V>(sum, to);
    for (bool more = true; more; i += 32) {
        /* Lane l looks at row i + l of the run; the lanes of the run come first. */
        int row = i + lane < a.N ? a.order[i + lane] : -1;
        unsigned same = __ballot_sync(0xFFFFFFFF, row >= 0 && a.ids[row < 0 ? 0 : row] == id);
        int count = same == 0xFFFFFFFF ? 32 : __ffs((int)~same) - 1;
        more = count == 32;
#pragma unroll 4
        for (int j = 0; j < count; j++) {
            int64_t n = __shfl_sync(0xFFFFFFFF, row, j);
            float d[V];
            if (!inside)
                continue;
            load_n<V>(d, a.dx + n * a.C + c);
            for (int k = 0; k < V; k++)
                sum[k] += d[k];
        }
    }
    if (inside)
        store_n<V>(to, sum);
}

template <typename T, int V>
static void launch_embed_bwd(struct nbi_stream *s, const struct embed_bwd_args<T> &a)
{
    int64_t threads = ceil_div(a.C, V);
    unsigned block = threads_for(threads, 128);
    dim3 grid((unsigned)a.N, (unsigned)ceil_div(threads, block));
    CU_LAUNCH((k_embed_bwd_warp_per_run<T, V>), grid, block, 0, s->queue, a);
}

template <typename T>
static enum nb_status embed_bwd(struct nbi_stream *s, const struct nbi_op_embed_bwd *op)
{
    const struct embed_bwd_args<T> a = {
        at<float>(op->dtable), at<int32_t>(op->ids), at<int32_t>(op->order), at<T>(op->dx),
            (int)op->N, op->C, op->first, op->count
    };
    if (is_vectorizable<float>(op->dtable.at | op->dx.at, op->C, op->C))
        launch_embed_bwd<T, 4>(s, a);
    else
        launch_embed_bwd<T, 1>(s, a);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_embed_bwd(struct nbi_stream *s, const struct nbi_op_embed_bwd *a)
{
    CU_HERE(s);
    return a->bf16 ? embed_bwd<__nv_bfloat16>(s, a) : embed_bwd<float>(s, a);
}

/* ---- distance ---- */

template <typename T> struct l1_args {
    float *loss;
    T *dx;
    const T *x, *target;
    const float *weight;
    float step; /* scale / C */
    int64_t C;
};

/* A CTA takes a row. A non-finite difference gives NaN, as the sign of it would hide it. */
template <typename T> __global__ static void k_l1_cta_per_row(struct l1_args<T> a)
{
    __shared__ double part[32];
    int64_t n = blockIdx.x;
    double sum = 0;
    for (int64_t c = threadIdx.x; c < a.C; c += blockDim.x) {
        int64_t i = n * a.C + c;
        float off = a.weight[n] == 0 ? 0 : to_f32(a.x[i]) - to_f32(a.target[i]);
        sum += (double)fabsf(off);
        if (a.dx)
            a.dx[i] = from_f32<T>(off > 0 ? a.step : off < 0 ? -a.step : 0 * off);
    }
    sum = cta_sum(sum, part);
    if (threadIdx.x == 0)
        a.loss[n] = (float)(sum / (double)a.C);
}

template <typename T> static enum nb_status l1(struct nbi_stream *s, const struct nbi_op_l1 *op)
{
    const struct l1_args<T> a = {
        at<float>(op->loss), at<T>(op->dx), at<T>(op->x), at<T>(op->target), at<float>(op->weight),
            op->scale / (float)op->C, op->C
    };
    CU_LAUNCH(k_l1_cta_per_row<T>, (unsigned)op->N, threads_for(op->C, THREADS), 0, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_l1(struct nbi_stream *s, const struct nbi_op_l1 *a)
{
    CU_HERE(s);
    return a->bf16 ? l1<__nv_bfloat16>(s, a) : l1<float>(s, a);
}
