/* attention_backward_mma.cu - gradients of attention on tensor cores (mma.sync), in bf16.
 *
 * Tiles have 64 queries and 64 keys, and each of the four warps owns 16 of the CTA's rows. Scores
 * and dp = dy v^T of a tile are f32 in registers; from them come p and ds, which are rounded to
 * bf16 in place as the left operands of the products that are summed.
 *
 *   keys      s^T = k q^T and dp^T = v dy^T have keys as rows: dv += p^T dy and dk += ds^T q.
 *             k and v stay in shared memory; queries, with their lse and delta, stream through it,
 *             head after head of the group.
 *   queries   s = q k^T and dp = dy v^T: dq += ds k. q and dy stay in registers, keys and values
 *             stream through two stages.
 *
 * Only tiles at the diagonal and at the edges of documents need masks; tiles without a pair of
 * query and key are not visited. */
#include "backend/cuda/attention_backward.cuh"

#define THREADS 128
#define TILE    NBI_BWD_TILE

template <int D> struct bwd_tile {
    static constexpr int BYTES = TILE * D * 2;
    static constexpr int STATS_BYTES = TILE * (int)sizeof(float2);
    /* Of the kernel that owns keys: q, dy, lse and delta. */
    static constexpr int STAGE_BYTES = 2 * BYTES + STATS_BYTES;
    static constexpr int KEYS_SMEM(int stages)
    {
        return 2 * BYTES + stages * STAGE_BYTES;
    }
    static constexpr int QUERIES_SMEM = 4 * BYTES;
};

/* ---- tiles ---- */

/* Starts the copy of `count` rows of a head, `stride` elements apart; the others become zeros. */
template <int D>
__device__ static inline void load_tile(uint32_t to, const void *rows, int64_t stride, int count)
{
    int thread = opaque(threadIdx.x), row0 = thread / (D / 8), chunk = thread % (D / 8);
    const __nv_bfloat16 *from = (const __nv_bfloat16 *)rows + chunk * 8;
#pragma unroll
    for (int j = 0; j < TILE * D / 8 / THREADS; j++) {
        int row = row0 + j * (THREADS / (D / 8));
        cp_async_16(to + swizzled_at<D>(row, chunk), from + min(row, count - 1) * stride,
                    row < count);
    }
}

/* Where row n of head h starts in an array of rows of `heads` heads. */
template <int D>
__device__ static inline const __nv_bfloat16 *head_at(const void *rows, int n, int heads, int h)
{
    return (const __nv_bfloat16 *)rows + ((int64_t)n * heads + h) * D;
}

template <int COUNT> __device__ static inline void clear(float c[COUNT][4])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[i][e] = 0;
}

/* Columns 16 i to 16 i + 15 of the warp's 16 rows, as a left operand. */
template <int D> __device__ static inline void load_left(uint32_t w[4], uint32_t tile, int i)
{
    int thread = opaque(threadIdx.x), lane = thread % 32;
    load_matrices(w, tile + swizzled_at<D>(thread / 32 * 16 + lane % 16, 2 * i + lane / 16));
}

/* c[16, 64] += columns 16 i to 16 i + 15 of 16 rows, times the same columns of the tile's rows. */
template <int D>
__device__ static inline void add_scores(float c[TILE / 8][4], const uint32_t left[4],
                                         uint32_t tile, int i)
{
    int lane = opaque(threadIdx.x) % 32, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
    for (int n = 0; n < TILE / 16; n++) {
        uint32_t right[4];
        load_matrices(right, tile + swizzled_at<D>(row, 2 * i + chunk) + n * 16 * D * 2);
        mma<true>(c[2 * n], left, right[0], right[1]);
        mma<true>(c[2 * n + 1], left, right[2], right[3]);
    }
}

/* c[16, 64] = the warp's 16 rows of one tile times the rows of another. */
template <int D>
__device__ static inline void scores(float c[TILE / 8][4], uint32_t rows, uint32_t columns)
{
    clear<TILE / 8>(c);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t left[4];
        load_left<D>(left, rows, i);
        add_scores<D>(c, left, columns, i);
    }
}

/* The same with the 16 rows in registers. */
template <int D>
__device__ static inline void scores(float c[TILE / 8][4], const uint32_t rows[D / 16][4],
                                     uint32_t columns)
{
    clear<TILE / 8>(c);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        add_scores<D>(c, rows[i], columns, i);
}

/* sum[16, D] += weights[16, 64] times the tile's rows. */
template <int D>
__device__ static inline void add_weighted(float sum[D / 8][4], const float weights[TILE / 8][4],
                                           uint32_t tile)
{
    int lane = opaque(threadIdx.x) % 32, row = lane % 16, chunk = lane / 16;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        uint32_t left[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            left[e] = pack<true>(weights[2 * k + e / 2][e % 2 * 2],
                                 weights[2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t right[4];
            load_matrices_transposed(right,
                                     tile + swizzled_at<D>(row, 2 * i + chunk) + k * 16 * D * 2);
            mma<true>(sum[2 * i], left, right[0], right[1]);
            mma<true>(sum[2 * i + 1], left, right[2], right[3]);
        }
    }
}

/* The rows of a warp's fragments: this one and the one 8 further. */
__device__ static inline int fragment_row(void)
{
    int thread = opaque(threadIdx.x);
    return thread / 32 * 16 + thread % 32 / 4;
}

/* Stores the warp's 16 rows of a sum, up to row `rows` of the tile; ld elements between rows. */
template <int D>
__device__ static inline void store_sum(void *to, const float sum[D / 8][4], float factor, int rows,
                                        int64_t ld)
{
    int row = fragment_row(), t = threadIdx.x % 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (row + 8 * e >= rows)
            continue;
        __nv_bfloat16 *at = (__nv_bfloat16 *)to + (row + 8 * e) * ld + 2 * t;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            *(uint32_t *)(at + 8 * i) =
                pack<true>(sum[i][2 * e] * factor, sum[i][2 * e + 1] * factor);
    }
}

/* ---- the kernel that owns keys ---- */

/* Starts the copies of a tile of queries of head h. */
template <int D>
__device__ static inline void load_queries(const struct attention_bwd_args &a, uint32_t to, int h,
                                           int q0)
{
    using T = bwd_tile<D>;
    int count = min(TILE, a.N - q0), thread = opaque(threadIdx.x);
    load_tile<D>(to, head_at<D>(a.q, q0, a.NH, h), (int64_t)a.NH * D, count);
    load_tile<D>(to + T::BYTES, head_at<D>(a.dy, q0, a.NH, h), (int64_t)a.NH * D, count);
    if (thread < T::STATS_BYTES / 16)
        cp_async_16(to + 2 * T::BYTES + thread * 16,
                    a.stats + (int64_t)h * a.padded_rows + q0 + thread * 2);
}

/* Rows are the keys from k0 on, columns the queries from q0 on. */
__device__ static inline void mask_by_key(float s[TILE / 8][4], const struct attention_bwd_args &a,
                                          int k0, int q0)
{
    int key = k0 + fragment_row(), query0 = q0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int begin = key + e / 2 * 8, end = a.end[min(begin, a.N - 1)];
#pragma unroll
        for (int c = 0; c < TILE / 8; c++) {
            int query = query0 + 8 * c + e % 2;
            if (query < begin || query > end)
                s[c][e] = -INFINITY;
        }
    }
}

/* From scores to p. Columns are queries; `stats` is the address of theirs. */
__device__ static inline void weights_by_key(float s[TILE / 8][4], uint32_t stats, float scale)
{
    uint32_t from = stats + opaque(threadIdx.x) % 4 * 16;
#pragma unroll
    for (int c = 0; c < TILE / 8; c++) {
        uint32_t w[4];
        load_shared(w, from + c * 64);
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[c][e] = exp2_approx(fmaf(s[c][e], scale, -__uint_as_float(w[e % 2 * 2])));
    }
}

/* From dp to ds. */
__device__ static inline void gradients_by_key(float dp[TILE / 8][4], const float p[TILE / 8][4],
                                               uint32_t stats)
{
    uint32_t from = stats + opaque(threadIdx.x) % 4 * 16;
#pragma unroll
    for (int c = 0; c < TILE / 8; c++) {
        uint32_t w[4];
        load_shared(w, from + c * 64);
#pragma unroll
        for (int e = 0; e < 4; e++)
            dp[c][e] = p[c][e] * (dp[c][e] - __uint_as_float(w[e % 2 * 2 + 1]));
    }
}

/* The tile of queries after q0 of head h; the first one is at k0, the last one has row `last`. */
__device__ static inline void next_queries(int *h, int *q0, int k0, int last)
{
    *q0 += TILE;
    if (*q0 > last) {
        *q0 = k0;
        (*h)++;
    }
}

/* Grid: tiles of keys times key heads. The first tiles of a document have the most queries, and
 * come first. */
template <int D, int STAGES>
__global__ __launch_bounds__(THREADS,
                             2) static void k_attention_bwd_keys(struct attention_bwd_args a)
{
    using T = bwd_tile<D>;
    CU_DYNAMIC_SMEM(smem, 128);
    int kvh = blockIdx.x % a.NKV, k0 = blockIdx.x / a.NKV * TILE, keys = min(TILE, a.N - k0);
    uint32_t k = smem_addr(smem), v = k + T::BYTES, stages = v + T::BYTES;
    load_tile<D>(k, head_at<D>(a.k, k0, a.NKV, kvh), (int64_t)a.NKV * D, keys);
    load_tile<D>(v, head_at<D>(a.v, k0, a.NKV, kvh), (int64_t)a.NKV * D, keys);
    if (STAGES == 2)
        load_queries<D>(a, stages, kvh * a.group, k0);

    int last = a.end[k0 + keys - 1], unmasked = a.end[k0];
    int h = kvh * a.group, h_end = h + a.group, q0 = k0, stage = 0;
    float dk[D / 8][4], dv[D / 8][4];
    clear<D / 8>(dk);
    clear<D / 8>(dv);
    while (h < h_end) {
        uint32_t q = stages + stage * T::STAGE_BYTES, dy = q + T::BYTES;
        bool masked = q0 == k0 || q0 + TILE - 1 > unmasked;
        int here = q0;
        float s[TILE / 8][4], dp[TILE / 8][4];
        if (STAGES == 1) {
            __syncthreads(); /* all warps have read the stage */
            load_queries<D>(a, stages, h, q0);
        }
        cp_async_wait_all();
        __syncthreads(); /* the stage has arrived, and all warps have read the other one */
        next_queries(&h, &q0, k0, last);
        if (STAGES == 2) {
            stage ^= 1;
            if (h < h_end)
                load_queries<D>(a, stages + stage * T::STAGE_BYTES, h, q0);
        }
        scores<D>(s, k, q);
        if (masked)
            mask_by_key(s, a, k0, here);
        weights_by_key(s, dy + T::BYTES, a.scale_log2);
        add_weighted<D>(dv, s, dy);
        scores<D>(dp, v, dy);
        gradients_by_key(dp, s, dy + T::BYTES);
        add_weighted<D>(dk, dp, q);
    }
    int64_t at = (int64_t)k0 * a.ld_dkv + kvh * D;
    store_sum<D>((__nv_bfloat16 *)a.dk + at, dk, a.scale, keys, a.ld_dkv);
    store_sum<D>((__nv_bfloat16 *)a.dv + at, dv, 1, keys, a.ld_dkv);
}

/* ---- the kernel that owns queries ---- */

/* Starts the copies of a tile of keys and values. */
template <int D>
__device__ static inline void load_keys(const struct attention_bwd_args &a, uint32_t to, int kvh,
                                        int k0)
{
    int count = min(TILE, a.N - k0);
    load_tile<D>(to, head_at<D>(a.k, k0, a.NKV, kvh), (int64_t)a.NKV * D, count);
    load_tile<D>(to + bwd_tile<D>::BYTES, head_at<D>(a.v, k0, a.NKV, kvh), (int64_t)a.NKV * D,
                 count);
}

/* Rows are the queries from q0 on, columns the keys from k0 on. */
__device__ static inline void mask_by_query(float s[TILE / 8][4],
                                            const struct attention_bwd_args &a, int q0, int k0)
{
    int query = q0 + fragment_row(), key0 = k0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int last = query + e / 2 * 8, first = a.first[min(last, a.N - 1)];
#pragma unroll
        for (int c = 0; c < TILE / 8; c++) {
            int key = key0 + 8 * c + e % 2;
            if (key > last || key < first)
                s[c][e] = -INFINITY;
        }
    }
}

/* From scores and dp to ds. Rows are queries. */
__device__ static inline void gradients_by_query(float dp[TILE / 8][4], const float s[TILE / 8][4],
                                                 const float2 stats[2], float scale)
{
#pragma unroll
    for (int c = 0; c < TILE / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            dp[c][e] =
                exp2_approx(fmaf(s[c][e], scale, -stats[e / 2].x)) * (dp[c][e] - stats[e / 2].y);
}

/* Grid: tiles of queries times heads. The last tiles have the most keys, and come first. */
template <int D>
__global__ __launch_bounds__(THREADS,
                             2) static void k_attention_bwd_queries(struct attention_bwd_args a)
{
    using T = bwd_tile<D>;
    CU_DYNAMIC_SMEM(smem, 128);
    int h = blockIdx.x % a.NH, q0 = (gridDim.x - 1 - blockIdx.x) / a.NH * TILE;
    int queries = min(TILE, a.N - q0), kvh = h / a.group;
    int k0 = a.first[q0] / TILE * TILE, unmasked = a.first[q0 + queries - 1];
    uint32_t stages = smem_addr(smem), resident = stages + 2 * T::BYTES;
    load_tile<D>(resident, head_at<D>(a.q, q0, a.NH, h), (int64_t)a.NH * D, queries);
    load_tile<D>(resident + T::BYTES, head_at<D>(a.dy, q0, a.NH, h), (int64_t)a.NH * D, queries);
    load_keys<D>(a, stages, kvh, k0);
    const float2 *at = a.stats + (int64_t)h * a.padded_rows + q0 + fragment_row();
    float2 stats[2] = {at[0], at[8]};
    uint32_t q[D / 16][4], dy[D / 16][4];
    float dq[D / 8][4];
    clear<D / 8>(dq);
    cp_async_wait_all();
    __syncthreads(); /* q and dy have arrived */
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        load_left<D>(q[i], resident, i);
        load_left<D>(dy[i], resident + T::BYTES, i);
    }
    for (int stage = 0; k0 <= q0; k0 += TILE, stage ^= 1) {
        uint32_t k = stages + stage * 2 * T::BYTES, v = k + T::BYTES;
        float s[TILE / 8][4], dp[TILE / 8][4];
        cp_async_wait_all();
        __syncthreads(); /* the stage has arrived, and all warps have read the other one */
        if (k0 < q0)
            load_keys<D>(a, stages + (stage ^ 1) * 2 * T::BYTES, kvh, k0 + TILE);
        scores<D>(s, q, k);
        scores<D>(dp, dy, v);
        if (k0 == q0 || k0 < unmasked)
            mask_by_query(s, a, q0, k0);
        gradients_by_query(dp, s, stats, a.scale_log2);
        add_weighted<D>(dq, dp, k);
    }
    store_sum<D>((__nv_bfloat16 *)a.dq + (int64_t)q0 * a.ld_dq + h * D, dq, a.scale, queries,
                 a.ld_dq);
}

/* ---- launches ---- */

template <int D, int STAGES>
static enum nb_status launch_keys(struct nbi_stream *s, const struct attention_bwd_args &a)
{
    auto kernel = k_attention_bwd_keys<D, STAGES>;
    int smem = bwd_tile<D>::KEYS_SMEM(STAGES);
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    CU_LAUNCH(kernel, (unsigned)(ceil_div(a.N, TILE) * a.NKV), THREADS, smem, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

template <int D>
static enum nb_status attention_bwd(struct nbi_stream *s, const struct attention_bwd_args &a)
{
    auto kernel = k_attention_bwd_queries<D>;
    int smem = bwd_tile<D>::QUERIES_SMEM;
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    CU_LAUNCH(kernel, (unsigned)(ceil_div(a.N, TILE) * a.NH), THREADS, smem, s->queue, a);
    CU_LAUNCHED();
    /* A second CTA on the multiprocessor hides more than a second stage. */
    int limit = s->cuda->smem_per_cta;
    bool two_stages =
        2 * bwd_tile<D>::KEYS_SMEM(2) <= limit || 2 * bwd_tile<D>::KEYS_SMEM(1) > limit;
    return two_stages ? launch_keys<D, 2>(s, a) : launch_keys<D, 1>(s, a);
}

enum nb_status nbi_cuda_attention_bwd_mma(struct nbi_stream *s, const struct attention_bwd_args &a)
{
    return a.D == 128 ? attention_bwd<128>(s, a) : attention_bwd<64>(s, a);
}
