/* rowwise_bf16.cu - operations of rowwise.cu as training needs them: with activations in bf16, or
 * in f32 where q, k and v, or gate and up, are columns of wider rows. In f32 the bits are those of
 * rowwise.cu. */
#include "backend/cuda/rope.cuh"
#include "backend/cuda/train.cuh"

#define THREADS 256

/* ---- embedding ---- */

/* F is the type of the table; a thread takes V neighbouring values. */
template <typename F, int V>
__global__ static void k_embed_bf16(__nv_bfloat16 *x, const int32_t *ids, const F *table, int64_t C)
{
    int64_t n = blockIdx.x, row = ids[n];
    for (int64_t c = (int64_t)threadIdx.x * V; c < C; c += blockDim.x * V) {
        float v[V];
        load_n<V>(v, table + row * C + c);
        store_n<V>(x + n * C + c, v);
    }
}

template <typename F>
static enum nb_status embed_bf16(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    constexpr int V = vector_size<F>();
    bool vectors = is_vectorizable<F>(a->x.at | a->table.data.at, a->C, a->C);
    unsigned threads = threads_for(ceil_div(a->C, vectors ? V : 1), THREADS);
    if (vectors)
        CU_LAUNCH((k_embed_bf16<F, V>), (unsigned)a->N, threads, 0, s->queue,
                  at<__nv_bfloat16>(a->x), at<int32_t>(a->ids), at<F>(a->table.data), a->C);
    else
        CU_LAUNCH((k_embed_bf16<F, 1>), (unsigned)a->N, threads, 0, s->queue,
                  at<__nv_bfloat16>(a->x), at<int32_t>(a->ids), at<F>(a->table.data), a->C);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_embed_bf16(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    return a->table.dtype == NBI_F32   ? embed_bf16<float>(s, a)
           : a->table.dtype == NBI_F16 ? embed_bf16<__half>(s, a)
                                       : embed_bf16<__nv_bfloat16>(s, a);
}

/* ---- RMSNorm ---- */

struct rmsnorm_bf16_args {
    __nv_bfloat16 *y;
    float *rstd; /* or NULL */
    const __nv_bfloat16 *x;
    const void *w;
    enum nbi_dtype dtype; /* of w */
    float eps;
    int64_t C;
};

/* A thread keeps V values of the row in registers and reads the others again. */
template <int V> __global__ static void k_rmsnorm_bf16_cta_per_row(struct rmsnorm_bf16_args a)
{
    __shared__ float part[32];
    const __nv_bfloat16 *row = a.x + blockIdx.x * a.C;
    int64_t first = (int64_t)threadIdx.x * V, step = (int64_t)blockDim.x * V;
    float x[V] = {}, sum = 0;
    for (int64_t c = first; c < a.C; c += step) {
        float v[V];
        load_n<V>(v, row + c);
        for (int i = 0; i < V; i++) {
            sum += v[i] * v[i];
            x[i] = c == first ? v[i] : x[i];
        }
    }
    float rstd = 1.0f / sqrtf(cta_sum(sum, part) / (float)a.C + a.eps);
    if (a.rstd && threadIdx.x == 0)
        a.rstd[blockIdx.x] = rstd;
    for (int64_t c = first; c < a.C; c += step) {
        if (c > first)
            load_n<V>(x, row + c);
        for (int i = 0; i < V; i++)
            x[i] = x[i] * rstd * load_f32(a.w, c + i, a.dtype);
        store_n<V>(a.y + blockIdx.x * a.C + c, x);
    }
}

enum nb_status nbi_cuda_rmsnorm_bf16(struct nbi_stream *s, const struct nbi_op_rmsnorm *op)
{
    constexpr int V = vector_size<__nv_bfloat16>();
    const struct rmsnorm_bf16_args a = {at<__nv_bfloat16>(op->y),
                                        at<float>(op->rstd),
                                        at<__nv_bfloat16>(op->x),
                                        at<void>(op->w.data),
                                        op->w.dtype,
                                        op->eps,
                                        op->C};
    bool vectors = is_vectorizable<__nv_bfloat16>(op->y.at | op->x.at, op->C, op->C);
    unsigned threads = threads_for(ceil_div(op->C, vectors ? V : 1), NBI_NORM_THREADS);
    if (vectors)
        CU_LAUNCH(k_rmsnorm_bf16_cta_per_row<V>, (unsigned)op->N, threads, 0, s->queue, a);
    else
        CU_LAUNCH(k_rmsnorm_bf16_cta_per_row<1>, (unsigned)op->N, threads, 0, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- norm and rotation of heads ---- */

template <typename T> struct rope_rows_args {
    struct rope_args a; /* but for its pointers to q_out, q, k and v */
    T *q_out;
    const T *q, *k, *v;
    int64_t ld_out, ld_q, ld_k, ld_v;
};

/* A warp takes a head of a row. Heads are numbered: queries first, then keys, then values. */
template <typename T, int W>
__global__ static void
k_qkv_rope_rows_warp_per_head(const __grid_constant__ struct rope_rows_args<T> r)
{
    const struct rope_args &a = r.a;
    int per_row = a.NH + 2 * a.NKV, D = a.D;
    int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int n = (int)(i / per_row), h = (int)(i % per_row);
    if (n >= a.N)
        return;
    if (h < a.NH) {
        rope_head<W>(a, r.q + n * r.ld_q + (int64_t)h * D, false, n,
                     a.rstd_q ? a.rstd_q + (int64_t)n * a.NH + h : NULL,
                     r.q_out + n * r.ld_out + (int64_t)h * D, 0);
        return;
    }
    h -= a.NH;
    bool is_key = h < a.NKV;
    h -= is_key ? 0 : a.NKV;
    int64_t to = ((int64_t)a.kv_rows[n] * a.NKV + h) * D;
    if (is_key)
        rope_head<W>(a, r.k + n * r.ld_k + (int64_t)h * D, true, n,
                     a.rstd_k ? a.rstd_k + (int64_t)n * a.NKV + h : NULL, a.k_cache, to);
    else
        value_head<W>(a, r.v + n * r.ld_v + (int64_t)h * D, to);
}

template <typename T>
static enum nb_status rope_rows(struct nbi_stream *s, const struct nbi_op_qkv_rope *op,
                                const struct rope_args *a)
{
    int64_t row_q = op->NH * op->D, row_kv = op->NKV * op->D;
    const struct rope_rows_args<T> r = {
        *a, at<T>(op->q_out), at<T>(op->q), at<T>(op->k), at<T>(op->v),
            op->q_out.at == op->q.at && op->ld > 0 ? op->ld : row_q, op->ld > 0 ? op->ld : row_q,
            op->ld > 0 ? op->ld : row_kv, op->ld > 0 ? op->ld : row_kv
    };
    unsigned ctas = (unsigned)ceil_div(op->N * (op->NH + 2 * op->NKV), THREADS / 32);
    /* The choice of nbi_cuda_qkv_rope, for its bits. */
    if (op->D % 4 == 0 && op->D != 64 && op->ld % 2 == 0)
        CU_LAUNCH((k_qkv_rope_rows_warp_per_head<T, 2>), ctas, THREADS, 0, s->queue, r);
    else
        CU_LAUNCH((k_qkv_rope_rows_warp_per_head<T, 1>), ctas, THREADS, 0, s->queue, r);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_qkv_rope_rows(struct nbi_stream *s, const struct nbi_op_qkv_rope *op,
                                      const struct rope_args *a)
{
    return op->bf16 ? rope_rows<__nv_bfloat16>(s, op, a) : rope_rows<float>(s, op, a);
}

/* ---- SwiGLU ---- */

template <typename T> struct swiglu_rows_args {
    T *y;
    const T *gate, *up;
    int64_t F, ld;
    unsigned chunks; /* CTAs of a row */
};

template <typename T, int V> __global__ static void k_swiglu_rows(struct swiglu_rows_args<T> a)
{
    int64_t n = blockIdx.x / a.chunks;
    int64_t f = ((int64_t)(blockIdx.x % a.chunks) * THREADS + threadIdx.x) * V;
    float g[V], u[V];
    if (f >= a.F)
        return;
    load_n<V>(g, a.gate + n * a.ld + f);
    load_n<V>(u, a.up + n * a.ld + f);
#pragma unroll
    for (int i = 0; i < V; i++)
        g[i] = swiglu(g[i], u[i]);
    store_n<V>(a.y + n * a.F + f, g);
}

template <typename T>
static enum nb_status swiglu_rows(struct nbi_stream *s, const struct nbi_op_swiglu *op)
{
    constexpr int V = vector_size<T>();
    int64_t ld = op->ld > 0 ? op->ld : op->F;
    bool vectors = is_vectorizable<T>(op->y.at | op->gate.at | op->up.at, op->F, ld);
    int64_t chunks = ceil_div(op->F, THREADS * (vectors ? V : 1));
    const struct swiglu_rows_args<T> a = {
        at<T>(op->y), at<T>(op->gate), at<T>(op->up), op->F, ld, (unsigned)chunks
    };
    if (vectors)
        CU_LAUNCH((k_swiglu_rows<T, V>), (unsigned)(op->N * chunks), THREADS, 0, s->queue, a);
    else
        CU_LAUNCH((k_swiglu_rows<T, 1>), (unsigned)(op->N * chunks), THREADS, 0, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_swiglu_rows(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    return a->bf16 ? swiglu_rows<__nv_bfloat16>(s, a) : swiglu_rows<float>(s, a);
}
