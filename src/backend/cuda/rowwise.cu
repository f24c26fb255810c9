/* rowwise.cu - operations that treat each row on its own: embedding, RMSNorm, rotary embedding,
 * SwiGLU, gather and scatter. All are batch-invariant. */
#include "backend/cuda/rope.cuh"
#include "backend/cuda/train.cuh"

#define THREADS 256

/* ---- embedding ---- */

__global__ static void k_embed(float *x, const int32_t *ids, const void *table,
                               enum nbi_dtype dtype, int64_t C)
{
    int64_t n = blockIdx.x, row = ids[n];
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        x[n * C + c] = load_f32(table, row * C + c, dtype);
}

/* 16 bytes a thread. The table may be in host memory, and small reads over PCIe are slow. */
template <enum nbi_dtype T>
__global__ static void k_embed_16_bytes(float *x, const int32_t *ids, const void *table, int64_t C)
{
    constexpr int VALUES = T == NBI_F32 ? 4 : 8;
    int64_t n = blockIdx.x, chunks = C / VALUES;
    const uint4 *row = (const uint4 *)table + ids[n] * chunks;
    for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) {
        const uint4 chunk = row[i];
        float4 *out = (float4 *)(x + n * C + i * VALUES);
#pragma unroll
        for (int j = 0; j < VALUES; j += 4)
            out[j / 4] = make_float4(load_f32(&chunk, j, T), load_f32(&chunk, j + 1, T),
                                     load_f32(&chunk, j + 2, T), load_f32(&chunk, j + 3, T));
    }
}

template <enum nbi_dtype T>
static void embed_16_bytes(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    int64_t chunks = a->C / (T == NBI_F32 ? 4 : 8), threads = ceil_div(chunks, 32) * 32;
    CU_LAUNCH(k_embed_16_bytes<T>, (unsigned)a->N, (unsigned)(threads < 512 ? threads : 512), 0,
              s->queue, at<float>(a->x), at<int32_t>(a->ids), at<void>(a->table.data), a->C);
}

enum nb_status nbi_cuda_embed(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    CU_HERE(s);
    if (a->bf16)
        return nbi_cuda_embed_bf16(s, a);
    uintptr_t alignment = a->x.at | a->table.data.at | nbi_dtype_bytes(a->table.dtype, a->C);
    if (alignment % 16 != 0)
        CU_LAUNCH(k_embed, (unsigned)a->N, THREADS, 0, s->queue, at<float>(a->x),
                  at<int32_t>(a->ids), at<void>(a->table.data), a->table.dtype, a->C);
    else if (a->table.dtype == NBI_F32)
        embed_16_bytes<NBI_F32>(s, a);
    else if (a->table.dtype == NBI_F16)
        embed_16_bytes<NBI_F16>(s, a);
    else
        embed_16_bytes<NBI_BF16>(s, a);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- norms and rotary embedding ---- */

/* The angle is an f32 by contract. Its sine and cosine are computed in double, since sinf and cosf
 * lose digits for large angles. */
__global__ static void k_rope_table(float *cos_out, float *sin_out, const int32_t *positions,
                                    const float *frequency, float scale, int64_t N, int half)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * half)
        return;
    float angle = (float)positions[i / half] * frequency[i % half];
    double s, c;
    sincos((double)angle, &s, &c);
    cos_out[i] = (float)c * scale;
    sin_out[i] = (float)s * scale;
}

enum nb_status nbi_cuda_rope_table(struct nbi_stream *s, const struct nbi_op_rope_table *a)
{
    CU_HERE(s);
    int64_t n = a->N * (a->D / 2);
    CU_LAUNCH(k_rope_table, (unsigned)ceil_div(n, THREADS), THREADS, 0, s->queue, at<float>(a->cos),
              at<float>(a->sin), at<int32_t>(a->positions), at<float>(a->frequency), a->scale, a->N,
              (int)(a->D / 2));
    CU_LAUNCHED();
    return NB_OK;
}

__global__ static void k_rmsnorm_cta_per_row(float *y, float *rstd, const float *x, const void *w,
                                             enum nbi_dtype dtype, float eps, int64_t C)
{
    int64_t n = blockIdx.x;
    const float *row = x + n * C;
    float factor = rmsnorm_rstd(row, C, eps);
    if (rstd && threadIdx.x == 0)
        rstd[n] = factor;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        y[n * C + c] = row[c] * factor * load_f32(w, c, dtype);
}

enum nb_status nbi_cuda_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    CU_HERE(s);
    if (a->bf16)
        return nbi_cuda_rmsnorm_bf16(s, a);
    CU_LAUNCH(k_rmsnorm_cta_per_row, (unsigned)a->N, NBI_NORM_THREADS, 0, s->queue, at<float>(a->y),
              at<float>(a->rstd), at<float>(a->x), at<void>(a->w.data), a->w.dtype, a->eps, a->C);
    CU_LAUNCHED();
    return NB_OK;
}

/* A warp takes a head of a row. Heads are numbered: queries first, then keys, then values. */
template <int W>
__global__ static void k_qkv_rope_warp_per_head(const __grid_constant__ struct rope_args a)
{
    pdl_trigger();
    pdl_wait();
    int per_row = a.NH + 2 * a.NKV;
    unsigned i = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int n = (int)(i / per_row), h = (int)(i % per_row);
    if (n >= a.N)
        return;
    if (h >= a.NH + a.NKV)
        store_value<W>(a, n, h - a.NH - a.NKV);
    else if (h >= a.NH)
        rope_key<W>(a, n, h - a.NH);
    else
        rope_query<W>(a, n, h, a.q_out + ((int64_t)n * a.NH + h) * a.D);
}

struct rope_args nbi_cuda_rope_args(const struct nbi_op_qkv_rope *a)
{
    struct rope_args r = {};
    r.q_out = at<float>(a->q_out);
    r.rstd_q = at<float>(a->rstd_q);
    r.rstd_k = at<float>(a->rstd_k);
    r.k_cache = at<void>(a->kv.k);
    r.v_cache = at<void>(a->kv.v);
    r.q = at<float>(a->q);
    r.k = at<float>(a->k);
    r.v = at<float>(a->v);
    r.cos = at<float>(a->cos);
    r.sin = at<float>(a->sin);
    r.kv_rows = at<int32_t>(a->kv_rows);
    r.q_norm = at<void>(a->q_norm.data);
    r.k_norm = at<void>(a->k_norm.data);
    r.q_type = a->q_norm.dtype;
    r.k_type = a->k_norm.dtype;
    r.kv_type = a->kv.dtype;
    r.eps = a->eps;
    r.NH = (int)a->NH;
    r.NKV = (int)a->NKV;
    r.D = (int)a->D;
    r.N = (int)a->N;
    return r;
}

enum nb_status nbi_cuda_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    CU_HERE(s);
    const struct rope_args r = nbi_cuda_rope_args(a);
    if (a->bf16 || a->ld > 0)
        return nbi_cuda_qkv_rope_rows(s, a, &r);
    int64_t warps = a->N * (a->NH + 2 * a->NKV);
    /* For head sizes 64 and 128 attention_decode.cu applies rope, too; this has the same bits. */
    bool pairs = a->D % 4 == 0 && a->D != 64;
    CU_TRY(pdl_launch(s, pairs ? k_qkv_rope_warp_per_head<2> : k_qkv_rope_warp_per_head<1>,
                      (unsigned)ceil_div(warps, THREADS / 32), THREADS, 0, r));
    return NB_OK;
}

/* ---- SwiGLU, gather, scatter ---- */

__global__ static void k_swiglu(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = swiglu(gate[i], up[i]);
}

enum nb_status nbi_cuda_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    CU_HERE(s);
    if (a->bf16 || a->ld > 0)
        return nbi_cuda_swiglu_rows(s, a);
    int64_t n = a->N * a->F;
    CU_LAUNCH(k_swiglu, (unsigned)ceil_div(n, THREADS), THREADS, 0, s->queue, at<float>(a->y),
              at<float>(a->gate), at<float>(a->up), n);
    CU_LAUNCHED();
    return NB_OK;
}

/* y[to ? to[i] : i] = x[from ? from[i] : i]; C counts values of type T. */
template <typename T>
__global__ static void k_copy_rows_cta_per_row(T *y, const T *x, const int32_t *to,
                                               const int32_t *from, int64_t C)
{
    int64_t i = blockIdx.x, out = to ? to[i] : i, in = from ? from[i] : i;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        y[out * C + c] = x[in * C + c];
}

/* M rows of C values. */
struct row_copy {
    struct nbi_ptr y, x;
    const int32_t *to, *from; /* or NULL */
    int64_t M, C;
    bool bf16;
};

template <typename T>
static void launch_copy_rows(struct nbi_stream *s, const struct row_copy *a, int64_t bytes)
{
    int64_t C = bytes / (int64_t)sizeof(T);
    CU_LAUNCH(k_copy_rows_cta_per_row<T>, (unsigned)a->M, threads_for(C, THREADS), 0, s->queue,
              at<T>(a->y), at<T>(a->x), a->to, a->from, C);
}

static enum nb_status copy_rows(struct nbi_stream *s, const struct row_copy *a)
{
    int64_t bytes = a->C * (a->bf16 ? 2 : 4);
    if ((a->y.at | a->x.at | (uintptr_t)bytes) % 16 == 0)
        launch_copy_rows<uint4>(s, a, bytes);
    else if (a->bf16)
        launch_copy_rows<uint16_t>(s, a, bytes);
    else
        launch_copy_rows<float>(s, a, bytes);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_gather(struct nbi_stream *s, const struct nbi_op_gather *a)
{
    CU_HERE(s);
    const struct row_copy copy = {a->y, a->x, NULL, at<int32_t>(a->rows), a->M, a->C, a->bf16};
    return copy_rows(s, &copy);
}

enum nb_status nbi_cuda_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a)
{
    CU_HERE(s);
    const struct row_copy copy = {a->y, a->x, at<int32_t>(a->rows), NULL, a->M, a->C, a->bf16};
    return copy_rows(s, &copy);
}
