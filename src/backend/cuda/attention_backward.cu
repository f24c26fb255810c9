/* attention_backward.cu - gradients of attention: the choice of a kernel, what all of them need of
 * each row, and the generic kernels in f32.
 *
 * in : dy, y, q, k, v and lse of the forward pass; first and end of each row
 * out: dq, dk, dv
 *
 *   tensor cores   attention_backward_mma.cu   bf16, D 64 or 128
 *   generic        here                        any D; reads f32 or bf16, computes in f32
 *
 * The generic kernels are for validation and for unusual head sizes. A CTA owns 32 rows and 128
 * columns of the result, so with D > 128 several CTAs compute the same p and ds. */
#include "backend/cuda/attention_backward.cuh"

/* ---- lse and delta ---- */

#define STATS_THREADS 256

__device__ static inline float2 load_two(const float *p)
{
    return *(const float2 *)p;
}

__device__ static inline float2 load_two(const __nv_bfloat16 *p)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)p);
}

/* A warp for each row, the padding included, of each head. */
template <typename T>
__global__
__launch_bounds__(STATS_THREADS) static void k_attention_bwd_stats(struct attention_bwd_args a)
{
    int64_t warp = (int64_t)blockIdx.x * (STATS_THREADS / 32) + threadIdx.x / 32;
    int n = (int)(warp / a.NH), h = (int)(warp % a.NH), lane = threadIdx.x % 32;
    if (n >= a.padded_rows)
        return;
    float lse = INFINITY, delta = 0;
    if (n < a.N) {
        const T *dy = (const T *)a.dy + warp * a.D, *y = (const T *)a.y + warp * a.D;
        lse = a.lse[warp] * LOG2E;
#pragma unroll 4
        for (int d = 2 * lane; d < a.D; d += 64) {
            float2 u = load_two(dy + d), v = load_two(y + d);
            delta += u.x * v.x + u.y * v.y;
        }
        delta = warp_sum(delta);
    }
    if (lane == 0)
        a.stats[(int64_t)h * a.padded_rows + n] = make_float2(lse, delta);
}

/* ---- the generic kernels ---- */

#define TILE    32
#define THREADS 256
#define CHUNK   32                         /* columns of D at a time */
#define COLUMNS 128                        /* of the result, a CTA */
#define ROWS    (TILE * COLUMNS / THREADS) /* of the result, a thread */

/* Tiles of 32 queries and 32 keys. */
struct generic_smem {
    float q[TILE][CHUNK + 1], dy[TILE][CHUNK + 1], k[TILE][CHUNK + 1], v[TILE][CHUNK + 1];
    /* p and ds; the row is the side that is summed over, the column is the side that is owned. */
    __align__(16) float p[TILE][TILE + 4], ds[TILE][TILE + 4];
};

/* Columns d0 to d0 + 31 of up to 32 rows; zeros past `count` rows and D columns. */
template <typename T>
__device__ static inline void load_chunk(float to[TILE][CHUNK + 1], const T *rows, int64_t stride,
                                         int count, int d0, int D)
{
    int d = threadIdx.x % CHUNK;
#pragma unroll
    for (int row = threadIdx.x / CHUNK; row < TILE; row += THREADS / CHUNK)
        to[row][d] = row < count && d0 + d < D ? (float)rows[row * stride + d0 + d] : 0;
}

/* p and ds of the queries from q0 on and the keys from k0 on, of head h. Owned says which of the
 * two the CTA owns. */
template <typename T, bool KEYS_OWNED>
__device__ static inline void
generic_tile(struct generic_smem &m, const struct attention_bwd_args &a, int q0, int k0, int h)
{
    int queries = min(TILE, a.N - q0), keys = min(TILE, a.N - k0), D = a.D;
    int i = threadIdx.x / 16, j = threadIdx.x % 16; /* and i + 16, j + 16 */
    int64_t query_at = ((int64_t)q0 * a.NH + h) * D, query_stride = (int64_t)a.NH * D;
    int64_t key_at = ((int64_t)k0 * a.NKV + h / a.group) * D, key_stride = (int64_t)a.NKV * D;
    float s[2][2] = {}, dp[2][2] = {};
    for (int d0 = 0; d0 < D; d0 += CHUNK) {
        __syncthreads(); /* the previous chunk, p and ds have been read */
        load_chunk(m.q, (const T *)a.q + query_at, query_stride, queries, d0, D);
        load_chunk(m.dy, (const T *)a.dy + query_at, query_stride, queries, d0, D);
        load_chunk(m.k, (const T *)a.k + key_at, key_stride, keys, d0, D);
        load_chunk(m.v, (const T *)a.v + key_at, key_stride, keys, d0, D);
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < CHUNK; d++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[e / 2][e % 2] += m.q[i + e / 2 * 16][d] * m.k[j + e % 2 * 16][d];
                dp[e / 2][e % 2] += m.dy[i + e / 2 * 16][d] * m.v[j + e % 2 * 16][d];
            }
    }
    const float2 *stats = a.stats + (int64_t)h * a.padded_rows + q0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int query = i + e / 2 * 16, key = j + e % 2 * 16;
        bool visible = query < queries && key < keys && k0 + key <= q0 + query &&
                       k0 + key >= a.first[q0 + query];
        float p = 0, ds = 0;
        if (visible) {
            float2 row = stats[query];
            p = exp2f(s[e / 2][e % 2] * a.scale_log2 - row.x);
            ds = p * (dp[e / 2][e % 2] - row.y);
        }
        int summed = KEYS_OWNED ? query : key, owned = KEYS_OWNED ? key : query;
        m.p[summed][owned] = p;
        m.ds[summed][owned] = ds;
    }
    __syncthreads();
}

/* sum[r] += weights of the thread's rows times column `column` of the `count` rows of x. */
template <typename T>
__device__ static inline void generic_add(float sum[ROWS], const float weights[TILE][TILE + 4],
                                          const T *x, int64_t stride, int count, int column)
{
    int row0 = threadIdx.x / COLUMNS * ROWS;
    for (int i = 0; i < count; i++) {
        float value = (float)x[i * stride + column];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            sum[r] += weights[i][row0 + r] * value;
    }
}

template <typename T>
__device__ static inline void generic_store(T *to, int64_t ld, const float sum[ROWS], float factor,
                                            int count)
{
    int row0 = threadIdx.x / COLUMNS * ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (row0 + r < count)
            to[(row0 + r) * ld] = (T)(sum[r] * factor);
}

/* Grid: tiles of keys, key heads, columns. */
template <typename T>
__global__
__launch_bounds__(THREADS) static void k_attention_bwd_keys_generic(struct attention_bwd_args a)
{
    __shared__ struct generic_smem m;
    int k0 = blockIdx.x * TILE, kvh = blockIdx.y, keys = min(TILE, a.N - k0);
    int column = blockIdx.z * COLUMNS + threadIdx.x % COLUMNS, last = a.end[k0 + keys - 1];
    float dk[ROWS] = {}, dv[ROWS] = {};
    for (int h = kvh * a.group; h < (kvh + 1) * a.group; h++)
        for (int q0 = k0; q0 <= last; q0 += TILE) {
            int64_t at = ((int64_t)q0 * a.NH + h) * a.D, stride = (int64_t)a.NH * a.D;
            int queries = min(TILE, a.N - q0);
            generic_tile<T, true>(m, a, q0, k0, h);
            if (column >= a.D)
                continue;
            generic_add(dk, m.ds, (const T *)a.q + at, stride, queries, column);
            generic_add(dv, m.p, (const T *)a.dy + at, stride, queries, column);
        }
    if (column >= a.D)
        return;
    int64_t at = (int64_t)k0 * a.ld_dkv + kvh * a.D + column;
    generic_store((T *)a.dk + at, a.ld_dkv, dk, a.scale, keys);
    generic_store((T *)a.dv + at, a.ld_dkv, dv, 1, keys);
}

/* Grid: tiles of queries, heads, columns. */
template <typename T>
__global__
__launch_bounds__(THREADS) static void k_attention_bwd_queries_generic(struct attention_bwd_args a)
{
    __shared__ struct generic_smem m;
    int q0 = blockIdx.x * TILE, h = blockIdx.y, queries = min(TILE, a.N - q0);
    int column = blockIdx.z * COLUMNS + threadIdx.x % COLUMNS;
    float dq[ROWS] = {};
    for (int k0 = a.first[q0] / TILE * TILE; k0 <= q0; k0 += TILE) {
        int64_t at = ((int64_t)k0 * a.NKV + h / a.group) * a.D, stride = (int64_t)a.NKV * a.D;
        generic_tile<T, false>(m, a, q0, k0, h);
        if (column < a.D)
            generic_add(dq, m.ds, (const T *)a.k + at, stride, min(TILE, a.N - k0), column);
    }
    if (column < a.D)
        generic_store((T *)a.dq + (int64_t)q0 * a.ld_dq + h * a.D + column, a.ld_dq, dq, a.scale,
                      queries);
}

template <typename T>
static enum nb_status attention_bwd_generic(struct nbi_stream *s,
                                            const struct attention_bwd_args &a)
{
    unsigned tiles = (unsigned)ceil_div(a.N, TILE), columns = (unsigned)ceil_div(a.D, COLUMNS);
    CU_LAUNCH(k_attention_bwd_queries_generic<T>, dim3(tiles, (unsigned)a.NH, columns), THREADS, 0,
              s->queue, a);
    CU_LAUNCHED();
    CU_LAUNCH(k_attention_bwd_keys_generic<T>, dim3(tiles, (unsigned)a.NKV, columns), THREADS, 0,
              s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- the choice of a kernel ---- */

template <typename T>
static enum nb_status attention_bwd_stats(struct nbi_stream *s, const struct attention_bwd_args &a)
{
    int64_t warps = (int64_t)a.padded_rows * a.NH;
    CU_LAUNCH(k_attention_bwd_stats<T>, (unsigned)ceil_div(warps, STATS_THREADS / 32),
              STATS_THREADS, 0, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

/* Tensor cores take rows in pieces of 16 bytes, and their results are stored in pairs. */
static bool fits_tensor_cores(const struct attention_bwd_args &a)
{
    uintptr_t in = (uintptr_t)a.q | (uintptr_t)a.dy | (uintptr_t)a.k | (uintptr_t)a.v;
    uintptr_t out = (uintptr_t)a.dq | (uintptr_t)a.dk | (uintptr_t)a.dv;
    return (a.D == 64 || a.D == 128) && in % 16 == 0 && out % 4 == 0 && a.ld_dq % 2 == 0 &&
           a.ld_dkv % 2 == 0;
}

enum nb_status nbi_cuda_attention_bwd(struct nbi_stream *s, const struct nbi_op_attention_bwd *a)
{
    CU_HERE(s);
    if (a->N == 0)
        return NB_OK;
    NBI_BUG_IF(!s->limits.training || a->N > s->limits.N || a->NH > s->limits.heads ||
               a->kv.dtype != (a->bf16 ? NBI_BF16 : NBI_F32));
    struct attention_bwd_args k = {};
    k.dq = at<void>(a->dq);
    k.dk = at<void>(a->dk);
    k.dv = at<void>(a->dv);
    k.dy = at<const void>(a->dy);
    k.y = at<const void>(a->y);
    k.q = at<const void>(a->q);
    k.k = at<const void>(a->kv.k);
    k.v = at<const void>(a->kv.v);
    k.lse = at<const float>(a->lse);
    k.stats = s->attention_stats;
    k.first = at<const int32_t>(a->first);
    k.end = at<const int32_t>(a->end);
    k.N = (int)a->N;
    k.NH = (int)a->NH;
    k.NKV = (int)a->NKV;
    k.D = (int)a->D;
    k.group = (int)(a->NH / a->NKV);
    k.padded_rows = (int)nbi_cuda_bwd_rows(a->N);
    k.ld_dq = (int)(a->ld ? a->ld : a->NH * a->D);
    k.ld_dkv = (int)(a->ld ? a->ld : a->NKV * a->D);
    k.scale = 1 / sqrtf((float)a->D);
    k.scale_log2 = LOG2E / sqrtf((float)a->D);

    if (!a->bf16) {
        NBI_TRY(attention_bwd_stats<float>(s, k));
        return attention_bwd_generic<float>(s, k);
    }
    NBI_TRY(attention_bwd_stats<__nv_bfloat16>(s, k));
    return fits_tensor_cores(k) ? nbi_cuda_attention_bwd_mma(s, k)
                                : attention_bwd_generic<__nv_bfloat16>(s, k);
}
