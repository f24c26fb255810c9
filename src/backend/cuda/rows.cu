/* rows.cu - what is done row by row: embedding, norms, rotation, SwiGLU, gathering. */
#include "backend/cuda/internal.cuh"

#define THREADS 256

/* ---- embedding ---- */

__global__ static void k_embed(float *x, const int32_t *ids, const void *table,
                               enum nbi_dtype dtype, int64_t C)
{
    int64_t n = blockIdx.x, row = ids[n];
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        x[n * C + c] = load_float(table, row * C + c, dtype);
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
            out[j / 4] = make_float4(load_float(&piece, j, T), load_float(&piece, j + 1, T),
                                     load_float(&piece, j + 2, T), load_float(&piece, j + 3, T));
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
    float f = norm_factor(row, C, eps);
    if (rstd && threadIdx.x == 0)
        rstd[n] = f;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        y[n * C + c] = row[c] * f * load_float(w, c, dtype);
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
struct heads {
    float *q_out, *rstd_q, *rstd_k;
    void *k_store, *v_store;
    const float *q, *k, *v, *cos, *sin;
    const int32_t *slots;
    const void *q_norm, *k_norm;
    enum nbi_dtype q_type, k_type, store;
    float eps;
    int NH, NKV, D;
    int64_t N;
};

/* One float, or two neighbours, which are aligned. */
template <int W> __device__ static inline void load_some(float v[W], const float *p)
{
    if (W == 2) {
        float2 two = *(const float2 *)p;
        v[0] = two.x, v[W - 1] = two.y;
    } else {
        v[0] = *p;
    }
}

template <int W>
__device__ static inline void store_some(void *p, int64_t i, enum nbi_dtype dtype, const float v[W])
{
    float2 two = make_float2(v[0], v[W - 1]);
    if (W == 1)
        store_float(p, i, dtype, v[0]);
    else if (dtype == NBI_F32)
        *(float2 *)((float *)p + i) = two;
    else if (dtype == NBI_F16)
        *(__half2 *)((__half *)p + i) = __floats2half2_rn(two.x, two.y);
    else if (dtype == NBI_BF16)
        *(__nv_bfloat162 *)((__nv_bfloat16 *)p + i) = __floats2bfloat162_rn(two.x, two.y);
    else
        *(__nv_fp8x2_storage_t *)((uint8_t *)p + i) =
            __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
}

template <int W>
__device__ static void copy_value(const struct heads &a, int64_t n, int h, int lane)
{
    const float *v = a.v + (n * a.NKV + h) * a.D;
    int64_t to = ((int64_t)a.slots[n] * a.NKV + h) * a.D;
    for (int d = W * lane; d < a.D; d += 32 * W) {
        float some[W];
        load_some<W>(some, v + d);
        store_some<W>(a.v_store, to + d, a.store, some);
    }
}

/* A lane has W of the first half of a head at a time, and W of the second. */
template <int W> __global__ static void k_qkv_rope(const __grid_constant__ struct heads a)
{
    next_may_start();
    wait_before();
    int lane = threadIdx.x % 32, per_row = a.NH + 2 * a.NKV, half = a.D / 2;
    unsigned i = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int64_t n = i / per_row;
    int h = (int)(i % per_row);
    if (n >= a.N)
        return;
    if (h >= a.NH + a.NKV) {
        copy_value<W>(a, n, h - a.NH - a.NKV, lane);
        return;
    }
    bool is_key = h >= a.NH;
    if (is_key)
        h -= a.NH;
    int64_t row = is_key ? n * a.NKV + h : n * a.NH + h;
    const float *x = (is_key ? a.k : a.q) + row * a.D;
    float sum = 0, p[W], q[W], c[W], s[W], v[W], w[W];
    const void *norm = is_key ? a.k_norm : a.q_norm;
    enum nbi_dtype type = is_key ? a.k_type : a.q_type, store = is_key ? a.store : NBI_F32;
    for (int d = W * lane; d < a.D; d += 32 * W) {
        load_some<W>(p, x + d);
        for (int j = 0; j < W; j++)
            sum += p[j] * p[j];
    }
    float f = 1.0f / sqrtf(warp_sum(sum) / (float)a.D + a.eps);
    float *rstd = is_key ? a.rstd_k : a.rstd_q;
    if (rstd && lane == 0)
        rstd[row] = f;
    void *out = is_key ? a.k_store : a.q_out;
    int64_t to = is_key ? ((int64_t)a.slots[n] * a.NKV + h) * a.D : row * a.D;
    for (int d = W * lane; d < half; d += 32 * W) {
        load_some<W>(p, x + d);
        load_some<W>(q, x + d + half);
        load_some<W>(c, a.cos + n * half + d);
        load_some<W>(s, a.sin + n * half + d);
        load_floats<W>(v, norm, d, 1, a.D, type);
        load_floats<W>(w, norm, d + half, 1, a.D, type);
        for (int j = 0; j < W; j++) {
            float first = p[j] * f * v[j], second = q[j] * f * w[j];
            p[j] = first * c[j] - second * s[j];
            q[j] = second * c[j] + first * s[j];
        }
        store_some<W>(out, to + d, store, p);
        store_some<W>(out, to + d + half, store, q);
    }
}

enum nb_status nbi_cuda_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    CU_HERE(s);
    struct heads h = {};
    h.q_out = at<float>(a->q_out);
    h.rstd_q = at<float>(a->rstd_q);
    h.rstd_k = at<float>(a->rstd_k);
    h.k_store = at<void>(a->store.k);
    h.v_store = at<void>(a->store.v);
    h.q = at<float>(a->q);
    h.k = at<float>(a->k);
    h.v = at<float>(a->v);
    h.cos = at<float>(a->cos);
    h.sin = at<float>(a->sin);
    h.slots = at<int32_t>(a->slots);
    h.q_norm = at<void>(a->q_norm.data);
    h.k_norm = at<void>(a->k_norm.data);
    h.q_type = a->q_norm.dtype;
    h.k_type = a->k_norm.dtype;
    h.store = a->store.dtype;
    h.eps = a->eps;
    h.NH = (int)a->NH;
    h.NKV = (int)a->NKV;
    h.D = (int)a->D;
    h.N = a->N;
    int64_t warps = a->N * (a->NH + 2 * a->NKV);
    CU_TRY(launch_behind(s, a->D % 4 == 0 ? k_qkv_rope<2> : k_qkv_rope<1>,
                         (unsigned)ceil_div(warps, THREADS / 32), THREADS, 0, h));
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
