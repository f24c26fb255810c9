/* attention_prefill.cu - attention for prompts on tensor cores (mma.sync).
 *
 * A CTA takes 128 packed rows of one key head: query n, head h of the group is row
 * n * group + h. It walks their keys in tiles of 64, double-buffered in shared memory, with online
 * softmax (FlashAttention 2); each warp has 32 of the rows.
 *
 *   16-bit cache   cp.async straight into the operand layout, two tiles in flight
 *   e4m3           cp.async as stored, then converted to f16
 *   f32            read through registers, rounded to f16
 *
 * q is rounded to the type of the operands, times the scale. In training q and y are bf16: then q
 * is copied, and the scale applied to the scores, so that they are those of the backward pass.
 *
 * With pages a tile is a page; the number of the next page is loaded with the tile before it. */
#include "backend/cuda/attention.cuh"

#define THREADS    128
#define QUERY_ROWS 128 /* packed rows of a CTA, 32 of each warp */
#define TILE_KEYS  NBI_PAGE

/* Shared memory: queries, then keys and values of a tile as 16-bit operands, then of the next tile
 * (DIRECT) or the e4m3 bytes of the next tile. */
template <int D, enum nbi_dtype TYPE>
struct prefill_config {
    static constexpr bool BF = TYPE == NBI_BF16;
    static constexpr int BYTES = TYPE == NBI_F32    ? 4
                                 : TYPE == NBI_E4M3 ? 1
                                                    : 2;
    static constexpr bool DIRECT = BYTES == 2;
    static constexpr int QUERY_BYTES = QUERY_ROWS * D * 2;
    static constexpr int TILE_BYTES = TILE_KEYS * D * 2; /* of keys; the values follow */
    static constexpr int RAW_BYTES = TYPE == NBI_E4M3 ? TILE_KEYS * D : 0;
    static constexpr int SMEM_BYTES =
        QUERY_BYTES + 2 * TILE_BYTES * (DIRECT ? 2 : 1) + 2 * RAW_BYTES;
};

/* Queries [from, to) of a tile that have the same first key lo and one key more each: the first
 * sees keys up to `last`, the last one up to hi. In shared memory, to save registers. */
struct query_run {
    int from, to, last, lo, hi;
    int unmasked;         /* up to this key no row of the tile needs a mask */
    int n0, n1;           /* queries of the tile, those of other runs included */
    const int32_t *pages; /* of the sequence, or NULL */
    int page[2];          /* of tile i at i % 2, and of the next tile */
};

/* Keys and values of a head, and their destination. */
struct kv_source {
    const uint8_t *k, *v; /* row 0 of the KV cache */
    int stride;           /* bytes */
    uint32_t smem;        /* after the queries */
    const struct query_run *run;
};

/* What leads from the rows of tile i to those of the KV cache. */
template <bool PAGED>
__device__ static inline int tile_page_offset(const struct query_run &run, int i)
{
    return PAGED ? run.page[i & 1] * NBI_PAGE - (run.lo + i * TILE_KEYS) : 0;
}

/* Starts the copies of tile i and of the number of the next page. Keys past hi become zeros. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline void load_kv_tile(const struct kv_source &src, int i)
{
    using T = struct prefill_config<D, TYPE>;
    constexpr int CHUNKS = D * T::BYTES / 16; /* of a row */
    int thread = opaque(threadIdx.x), key0 = src.run->lo + i * TILE_KEYS, hi = src.run->hi;
    if (PAGED && thread == 0)
        cp_async_4(smem_addr(&src.run->page[(i + 1) & 1]),
                   src.run->pages + min(key0 + TILE_KEYS, hi) / NBI_PAGE);
    if (T::BYTES == 4)
        return;
    uint32_t to = src.smem + (T::DIRECT ? (i & 1) * 2 * T::TILE_BYTES : 2 * T::TILE_BYTES);
    int page_offset = tile_page_offset<PAGED>(*src.run, i);
#pragma unroll 4
    for (int j = 0; j < TILE_KEYS * CHUNKS / THREADS; j++) {
        int at = thread + j * THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
        bool valid = key0 + row <= hi;
        int64_t from = (int64_t)(min(key0 + row, hi) + page_offset) * src.stride + chunk * 16;
        uint32_t offset = T::DIRECT ? swizzled_at<D>(row, chunk) : (uint32_t)at * 16;
        cp_async_16(to + offset, src.k + from, valid);
        cp_async_16(to + offset + (T::DIRECT ? T::TILE_BYTES : T::RAW_BYTES), src.v + from, valid);
    }
}

/* Keys and values of a tile from e4m3 to f16, within shared memory. */
template <int D> __device__ static inline void e4m3_tile_to_f16(uint32_t to, uint32_t from)
{
    int thread = opaque(threadIdx.x);
#pragma unroll 2
    for (int j = 0; j < 2 * TILE_KEYS * D / 16 / THREADS; j++) {
        int at = thread + j * THREADS, row = at / (D / 16), chunk = at % (D / 16);
        uint32_t raw[4];
        load_shared(raw, from + at * 16);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = e4m3_to_f16(raw[2 * e + i / 2] >> (i % 2 * 16) & 0xFFFF);
            store_shared(to + swizzled_at<D>(row, 2 * chunk + e), w);
        }
    }
}

/* Eight floats times a factor, rounded to 16 bits. */
template <bool BF>
__device__ static inline void store_chunk(uint32_t to, const float *p, float factor)
{
    float4 x[2] = {__ldg((const float4 *)p), __ldg((const float4 *)p + 1)};
    float f[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] *= factor;
        if (!BF)
            f[i] = clamp_f16(f[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = pack<BF>(f[2 * i], f[2 * i + 1]);
    store_shared(to, w);
}

/* Keys and values of tile i from f32 in global memory to f16. */
template <int D, bool PAGED>
__device__ static inline void f32_tile_to_f16(const struct kv_source &src, int i)
{
    constexpr int TILE_BYTES = prefill_config<D, NBI_F32>::TILE_BYTES;
    const uint32_t zeros[4] = {0, 0, 0, 0};
    int page_offset = tile_page_offset<PAGED>(*src.run, i);
#pragma unroll 2
    for (int j = 0; j < TILE_KEYS * D / 8 / THREADS; j++) {
        int at = threadIdx.x + j * THREADS, row = at / (D / 8), chunk = at % (D / 8);
        int key = src.run->lo + i * TILE_KEYS + row;
        uint32_t to = src.smem + swizzled_at<D>(row, chunk);
        if (key <= src.run->hi) {
            int64_t from = (int64_t)(key + page_offset) * src.stride + chunk * 32;
            store_chunk<false>(to, (const float *)(src.k + from), 1);
            store_chunk<false>(to + TILE_BYTES, (const float *)(src.v + from), 1);
        } else {
            store_shared(to, zeros);
            store_shared(to + TILE_BYTES, zeros);
        }
    }
}

/* Waits for tile i of `count`, starts the next one and returns the address of the keys. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline uint32_t next_kv_tile(const struct kv_source &src, int i, int count)
{
    using T = struct prefill_config<D, TYPE>;
    cp_async_wait_all();
    __syncthreads(); /* tile i has arrived, and all warps have read the previous one */
    if (TYPE == NBI_E4M3) {
        e4m3_tile_to_f16<D>(src.smem, src.smem + 2 * T::TILE_BYTES);
    } else if (TYPE == NBI_F32) {
        f32_tile_to_f16<D, PAGED>(src, i);
    }
    if (!T::DIRECT)
        __syncthreads();
    if (i + 1 < count)
        load_kv_tile<D, TYPE, PAGED>(src, i + 1);
    return src.smem + (T::DIRECT ? (i & 1) * 2 * T::TILE_BYTES : 0);
}

/* A lane's share of its warp's 32 rows: rows 16 m + 8 e + g of two products m. */
template <int D> struct row_state {
    float y[2][D / 8][4];
    float base[2][2], sum[2][2];
};

/* Scores of the warp's rows with the keys of a tile. */
template <int D, bool BF>
__device__ static inline void qk_mma(float s[2][TILE_KEYS / 8][4], uint32_t queries, uint32_t keys)
{
    int thread = opaque(threadIdx.x), lane = thread % 32;
    int q_row = thread / 32 * 32 + lane % 16, q_chunk = lane / 16;
    int k_row = lane % 8 + lane / 16 * 8, k_chunk = lane / 8 % 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int c = 0; c < TILE_KEYS / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][c][e] = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t q[2][4], k[4];
        load_matrices(q[0], queries + swizzled_at<D>(q_row, 2 * i + q_chunk));
        load_matrices(q[1], queries + swizzled_at<D>(q_row, 2 * i + q_chunk) + 16 * D * 2);
#pragma unroll
        for (int c = 0; c < TILE_KEYS / 16; c++) {
            load_matrices(k, keys + swizzled_at<D>(k_row, 2 * i + k_chunk) + c * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma<BF>(s[m][2 * c], q[m], k[0], k[1]);
                mma<BF>(s[m][2 * c + 1], q[m], k[2], k[3]);
            }
        }
    }
}

/* Packed row of a lane. */
__device__ static inline int packed_row(int row0, int m, int e)
{
    return row0 + (int)threadIdx.x / 32 * 32 + 16 * m + 8 * e + (int)threadIdx.x % 32 / 4;
}

/* key0 is the first key of the tile. Rows outside the run are masked completely. */
__device__ static inline void mask_scores(float s[2][TILE_KEYS / 8][4], const struct query_run &run,
                                          int row0, int group, int key0)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int n = packed_row(row0, m, e / 2) / group;
            int limit = n >= run.from && n < run.to ? run.last + n - run.from : -1;
#pragma unroll
            for (int c = 0; c < TILE_KEYS / 8; c++)
                if (key0 + 8 * c + 2 * t + e % 2 > limit)
                    s[m][c][e] = -INFINITY;
        }
}

/* Online softmax: scores become weights, and earlier sums are rescaled where the base has moved.
 * With BF16 the scores are to be multiplied by `scale`. */
template <int D, bool BF16>
__device__ static inline void softmax_step(float s[2][TILE_KEYS / 8][4], struct row_state<D> &r,
                                           float scale)
{
    float rescale[2][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float row_max = fmaxf(s[m][0][2 * e], s[m][0][2 * e + 1]);
#pragma unroll
            for (int c = 1; c < TILE_KEYS / 8; c++)
                row_max = fmaxf(row_max, fmaxf(s[m][c][2 * e], s[m][c][2 * e + 1]));
            row_max = quad_max(row_max);
            if (BF16)
                row_max *= scale;
            rescale[m][e] = 1;
            if (row_max > r.base[m][e] + RESCALE_LOG2) {
                rescale[m][e] = exp2_approx(r.base[m][e] - row_max);
                r.base[m][e] = row_max;
                moved = true;
            }
            /* A row without keys so far: -inf - -inf would be NaN. */
            float base = r.base[m][e] == -INFINITY ? 0 : r.base[m][e], sum = 0;
#pragma unroll
            for (int c = 0; c < TILE_KEYS / 8; c++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    s[m][c][2 * e + i] = exp2_approx(BF16 ? fmaf(s[m][c][2 * e + i], scale, -base)
                                                          : s[m][c][2 * e + i] - base);
                    sum += s[m][c][2 * e + i];
                }
            r.sum[m][e] = r.sum[m][e] * rescale[m][e] + sum;
        }
    if (__any_sync(0xFFFFFFFF, moved)) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < D / 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    r.y[m][i][e] *= rescale[m][e / 2];
    }
}

/* y += weights times the values of a tile. */
template <int D, bool BF>
__device__ static inline void pv_mma(struct row_state<D> &r, const float s[2][TILE_KEYS / 8][4],
                                     uint32_t values)
{
    int lane = opaque(threadIdx.x % 32), row = lane % 16, chunk = lane / 16;
#pragma unroll
    for (int c = 0; c < TILE_KEYS / 16; c++) {
        uint32_t p[2][4], v[4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *w = s[m][2 * c + i / 2] + i % 2 * 2;
                p[m][i] = pack<BF>(w[0], w[1]);
            }
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            load_matrices_transposed(v,
                                     values + swizzled_at<D>(row, 2 * i + chunk) + c * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma<BF>(r.y[m][2 * i], p[m], v[0], v[1]);
                mma<BF>(r.y[m][2 * i + 1], p[m], v[2], v[3]);
            }
        }
    }
}

template <int D, bool BF, bool BF16>
__device__ static inline void load_queries(const struct attention_args &a, uint32_t to, int row0,
                                           int kvh)
{
#pragma unroll 4
    for (int j = 0; j < QUERY_ROWS * D / 8 / THREADS; j++) {
        int at = threadIdx.x + j * THREADS, row = at / (D / 8), chunk = at % (D / 8);
        int n = (row0 + row) / a.group, h = kvh * a.group + (row0 + row) % a.group;
        const uint32_t zeros[4] = {0, 0, 0, 0};
        if (BF16)
            cp_async_16(to + swizzled_at<D>(row, chunk),
                        (const __nv_bfloat16 *)a.q + ((int64_t)min(n, a.N - 1) * a.NH + h) * D +
                            chunk * 8,
                        n < a.N);
        else if (n < a.N)
            store_chunk<BF>(to + swizzled_at<D>(row, chunk),
                            a.q + ((int64_t)n * a.NH + h) * D + chunk * 8, a.scale);
        else
            store_shared(to + swizzled_at<D>(row, chunk), zeros);
    }
}

template <int D, bool BF16>
__device__ static inline void store_results(const struct attention_args &a, struct row_state<D> &r,
                                            int row0, int kvh)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = packed_row(row0, m, e), n = row / a.group;
            float sum = quad_sum(r.sum[m][e]), inverse = 1 / sum;
            if (n >= a.N)
                continue;
            int64_t head = (int64_t)n * a.NH + kvh * a.group + row % a.group;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                float lo = r.y[m][i][2 * e] * inverse, hi = r.y[m][i][2 * e + 1] * inverse;
                int64_t at = head * D + 8 * i + 2 * t;
                if (BF16)
                    *(uint32_t *)((__nv_bfloat16 *)a.y + at) = pack<true>(lo, hi);
                else
                    *(float2 *)(a.y + at) = make_float2(lo, hi);
            }
            if (a.lse && t == 0)
                a.lse[head] = (r.base[m][e] + log2f(sum)) * LN2;
        }
}

/* Bit i of breaks: query n0 + i does not continue the run of the one before, with one key more.
 * count <= 128; a thread takes a query. */
template <bool PAGED>
__device__ static inline void find_breaks(const struct attention_args &a, uint32_t breaks[4],
                                          int n0, int count)
{
    int i = threadIdx.x, n = n0 + i;
    bool is_break = i > 0 && i < count &&
                    (a.first[n] != a.first[n - 1] || a.last[n] != a.last[n - 1] + 1 ||
                     (PAGED && a.tables[n] != a.tables[n - 1]));
    uint32_t word = __ballot_sync(0xFFFFFFFF, is_break);
    if (i % 32 == 0)
        breaks[i / 32] = word;
    __syncthreads();
}

/* The run that begins at query `from`. */
template <bool PAGED>
__device__ static inline void query_run_at(struct query_run &run, const struct attention_args &a,
                                           const uint32_t breaks[4], int from)
{
    int count = run.n1 - run.n0 + 1, to = count;
    for (int i = from - run.n0 + 1; i < count; i = (i / 32 + 1) * 32) {
        uint32_t word = breaks[i / 32] >> (i % 32);
        if (word) {
            to = i + __ffs((int)word) - 1;
            break;
        }
    }
    run.from = from;
    run.to = run.n0 + to;
    run.last = a.last[from];
    run.lo = a.first[from];
    if (PAGED) {
        run.pages = a.pages + a.tables[from];
        run.page[0] = run.pages[run.lo / NBI_PAGE];
    }
    run.hi = run.last + run.to - 1 - from;
    run.unmasked = from == run.n0 && to == count ? run.last : -1;
}

/* Grid: tiles of packed rows times key heads. The last tiles come first: they have the most keys,
 * and short ones fill the gaps at the end.
 *
 * The queries of a tile are taken in runs (usually one), so that all keys between the first and the
 * last of a run are seen by some query and hence are finite. Rows outside the run keep their state.
 */
template <int D, enum nbi_dtype TYPE, bool PAGED, bool BF16>
__global__ __launch_bounds__(THREADS, 2) static void k_attention_prefill(struct attention_args a)
{
    using T = struct prefill_config<D, TYPE>;
    CU_DYNAMIC_SMEM(smem, 128);
    __shared__ uint32_t breaks[4];
    __shared__ struct query_run run;
    int kvh = blockIdx.x % a.NKV, row0 = ((gridDim.x - 1 - blockIdx.x) / a.NKV) * QUERY_ROWS;
    int n0 = row0 / a.group, n1 = min((row0 + QUERY_ROWS - 1) / a.group, a.N - 1);
    int64_t head = (int64_t)kvh * D * T::BYTES;
    uint32_t queries = smem_addr(smem);
    struct kv_source src = {};
    src.k = a.k + head;
    src.v = a.v + head;
    src.stride = a.NKV * D * T::BYTES;
    src.smem = queries + T::QUERY_BYTES;
    src.run = &run;

    load_queries<D, T::BF, BF16>(a, queries, row0, kvh);
    if (threadIdx.x == 0) {
        run.n0 = n0;
        run.n1 = n1;
    }
    find_breaks<PAGED>(a, breaks, n0, n1 - n0 + 1);
    struct row_state<D> r;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            r.base[m][e] = -INFINITY;
            r.sum[m][e] = 0;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                r.y[m][i][2 * e] = r.y[m][i][2 * e + 1] = 0;
        }

    for (int from = n0; from <= run.n1; from = run.to) {
        __syncthreads(); /* all warps are done with the previous run */
        if (threadIdx.x == 0)
            query_run_at<PAGED>(run, a, breaks, from);
        __syncthreads();
        int count = (run.hi - run.lo) / TILE_KEYS + 1;
        load_kv_tile<D, TYPE, PAGED>(src, 0);
        for (int i = 0; i < count; i++) {
            float s[2][TILE_KEYS / 8][4];
            uint32_t keys = next_kv_tile<D, TYPE, PAGED>(src, i, count);
            int key0 = run.lo + i * TILE_KEYS;
            qk_mma<D, T::BF>(s, queries, keys);
            if (key0 + TILE_KEYS - 1 > run.unmasked)
                mask_scores(s, run, row0, a.group, key0);
            softmax_step<D, BF16>(s, r, a.scale);
            pv_mma<D, T::BF>(r, s, keys + T::TILE_BYTES);
        }
    }
    store_results<D, BF16>(a, r, row0, opaque(blockIdx.x) % a.NKV);
}

template <int D, enum nbi_dtype TYPE, bool PAGED, bool BF16 = false>
static enum nb_status launch(struct nbi_stream *s, const struct attention_args &k)
{
    auto kernel = k_attention_prefill<D, TYPE, PAGED, BF16>;
    int shared = prefill_config<D, TYPE>::SMEM_BYTES;
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    int64_t grid = ceil_div((int64_t)k.N * k.group, QUERY_ROWS) * k.NKV;
    CU_LAUNCH(kernel, (unsigned)grid, THREADS, shared, s->queue, k);
    CU_LAUNCHED();
    return NB_OK;
}

template <int D, enum nbi_dtype TYPE>
static enum nb_status launch(struct nbi_stream *s, const struct attention_args &k)
{
    return k.pages ? launch<D, TYPE, true>(s, k) : launch<D, TYPE, false>(s, k);
}

template <int D>
static enum nb_status attention_prefill(struct nbi_stream *s, const struct nbi_op_attention *a,
                                        const struct attention_args &k)
{
    if (a->bf16)
        return launch<D, NBI_BF16, false, true>(s, k);
    switch (a->kv.dtype) {
    case NBI_F32:
        return launch<D, NBI_F32>(s, k);
    case NBI_F16:
        return launch<D, NBI_F16>(s, k);
    case NBI_BF16:
        return launch<D, NBI_BF16>(s, k);
    default:
        return launch<D, NBI_E4M3>(s, k);
    }
}

enum nb_status nbi_cuda_attention_prefill(struct nbi_stream *s, const struct nbi_op_attention *a,
                                          const struct attention_args &k)
{
    return a->D == 128 ? attention_prefill<128>(s, a, k) : attention_prefill<64>(s, a, k);
}
