/* rowwise.cu - what is done row by row: embedding, norms, rotation, SwiGLU, gathering. */
#include "backend/cuda/rope.cuh"

#define THREADS 256

/* ---- embedding ---- */

__global__ static void k_embed(float *x, const int32_t *ids, const void *table,
                               enum nbi_dtype dtype, int64_t C)
{
    int64_t n = blockIdx.x, row = ids[n];
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        x[n * C + c] = load_f32(table, row * C + c, dtype);
}

/* The same by 16 bytes a thread: the table may be on the host, and the bus is slow in small. */
template <enum nbi_dtype T>
__global__ static void k_embed_wide(float *x, const int32_t *ids, const void *table, int64_t C)
{
    constexpr int EACH = T == NBI_F32 ? 4 : 8;
    int64_t n = blockIdx.x, pieces = C / EACH;
    const uint4 *row = (const uint4 *)table + ids[n] * pieces;
    for (int64_t i = threadIdx.x; i < pieces; i += blockDim.x) {
        const uint4 piece = row[i];
        float4 *out = (float4 *)(x + n * C + i * EACH);
#pragma unroll
        for (int j = 0; j < EACH; j += 4)
            out[j / 4] = make_float4(load_f32(&piece, j, T), load_f32(&piece, j + 1, T),
                                     load_f32(&piece, j + 2, T), load_f32(&piece, j + 3, T));
    }
}

template <enum nbi_dtype T>
static void embed_wide(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    int64_t pieces = a->C / (T == NBI_F32 ? 4 : 8), threads = ceil_div(pieces, 32) * 32;
    k_embed_wide<T><<<(unsigned)a->N, (unsigned)(threads < 512 ? threads : 512), 0, s->queue>>>(
        at<float>(a->x), at<int32_t>(a->ids), at<void>(a->table.data), a->C);
}

enum nb_status nbi_cuda_embed(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    CU_HERE(s);
    uintptr_t odd = a->x.at | a->table.data.at | nbi_dtype_bytes(a->table.dtype, a->C);
    if (odd % 16 != 0)
        k_embed<<<(unsigned)a->N, THREADS, 0, s->queue>>>(
            at<float>(a->x), at<int32_t>(a->ids), at<void>(a->table.data), a->table.dtype, a->C);
    else if (a->table.dtype == NBI_F32)
        embed_wide<NBI_F32>(s, a);
    else if (a->table.dtype == NBI_F16)
        embed_wide<NBI_F16>(s, a);
    else
        embed_wide<NBI_BF16>(s, a);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- rotation ---- */

/* The angle is a float by contract; its sine and cosine are taken in double, since that of a large
 * float loses digits otherwise. */
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
    k_rope_table<<<(unsigned)ceil_div(n, THREADS), THREADS, 0, s->queue>>>(
        at<float>(a->cos), at<float>(a->sin), at<int32_t>(a->positions), at<float>(a->frequency),
        a->scale, a->N, (int)(a->D / 2));
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- norms ---- */

__global__ static void k_rmsnorm(float *y, float *rstd, const float *x, const void *w,
                                 enum nbi_dtype dtype, float eps, int64_t C)
{
    int64_t n = blockIdx.x;
    const float *row = x + n * C;
    float f = rmsnorm_rstd(row, C, eps);
    if (rstd && threadIdx.x == 0)
        rstd[n] = f;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        y[n * C + c] = row[c] * f * load_f32(w, c, dtype);
}

enum nb_status nbi_cuda_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    CU_HERE(s);
    k_rmsnorm<<<(unsigned)a->N, NBI_NORM_THREADS, 0, s->queue>>>(
        at<float>(a->y), at<float>(a->rstd), at<float>(a->x), at<void>(a->w.data), a->w.dtype,
        a->eps, a->C);
    CU_LAUNCHED();
    return NB_OK;
}

/* One warp for a head of a row: query heads first, then those of keys and values. */
template <int W> __global__ static void k_qkv_rope(const __grid_constant__ struct rope_args a)
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

enum nb_status nbi_cuda_rope_apply(struct nbi_stream *s, const struct rope_args *h)
{
    int64_t warps = (int64_t)h->N * (h->NH + 2 * h->NKV);
    /* Heads of 64 and 128 in the order of attend_few.cu, so that bits are the same. */
    bool pairs = h->D % 4 == 0 && h->D != 64;
    CU_TRY(pdl_launch(s, pairs ? k_qkv_rope<2> : k_qkv_rope<1>,
                      (unsigned)ceil_div(warps, THREADS / 32), THREADS, 0, *h));
    return NB_OK;
}

enum nb_status nbi_cuda_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    CU_HERE(s);
    struct rope_args h = {};
    h.q_out = at<float>(a->q_out);
    h.rstd_q = at<float>(a->rstd_q);
    h.rstd_k = at<float>(a->rstd_k);
    h.k_cache = at<void>(a->kv.k);
    h.v_cache = at<void>(a->kv.v);
    h.q = at<float>(a->q);
    h.k = at<float>(a->k);
    h.v = at<float>(a->v);
    h.cos = at<float>(a->cos);
    h.sin = at<float>(a->sin);
    h.kv_rows = at<int32_t>(a->kv_rows);
    h.q_norm = at<void>(a->q_norm.data);
    h.k_norm = at<void>(a->k_norm.data);
    h.q_type = a->q_norm.dtype;
    h.k_type = a->k_norm.dtype;
    h.kv_type = a->kv.dtype;
    h.eps = a->eps;
    h.NH = (int)a->NH;
    h.NKV = (int)a->NKV;
    h.D = (int)a->D;
    h.N = (int)a->N;
    if (a->N > NBI_DECODE_ATTENTION_ROWS || h.rstd_q || h.rstd_k)
        return nbi_cuda_rope_apply(s, &h);
    s->rope = h; /* attention takes it along, or whatever comes next does it first */
    return NB_OK;
}

/* ---- the rest ---- */

__global__ static void k_swiglu(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = swiglu(gate[i], up[i]);
}

enum nb_status nbi_cuda_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    CU_HERE(s);
    int64_t n = a->N * a->F;
    k_swiglu<<<(unsigned)ceil_div(n, THREADS), THREADS, 0, s->queue>>>(
        at<float>(a->y), at<float>(a->gate), at<float>(a->up), n);
    CU_LAUNCHED();
    return NB_OK;
}

/* Rows of x to rows of y: y[to ? to[i] : i] = x[from ? from[i] : i]. */
__global__ static void k_move_rows(float *y, const float *x, const int32_t *to, const int32_t *from,
                                   int64_t C)
{
    int64_t i = blockIdx.x, out = to ? to[i] : i, in = from ? from[i] : i;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        y[out * C + c] = x[in * C + c];
}

enum nb_status nbi_cuda_gather(struct nbi_stream *s, const struct nbi_op_gather *a)
{
    CU_HERE(s);
    k_move_rows<<<(unsigned)a->M, THREADS, 0, s->queue>>>(at<float>(a->y), at<float>(a->x), NULL,
                                                          at<int32_t>(a->rows), a->C);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a)
{
    CU_HERE(s);
    k_move_rows<<<(unsigned)a->M, THREADS, 0, s->queue>>>(at<float>(a->y), at<float>(a->x),
                                                          at<int32_t>(a->rows), NULL, a->C);
    CU_LAUNCHED();
    return NB_OK;
}
