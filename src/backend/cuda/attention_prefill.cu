/* attention_prefill.cu - attention for prompts: 128 rows of queries against tiles of 64 keys in
 * shared memory. With pages a tile is a page, whose number comes with the tile before. */
#include "backend/cuda/attention.cuh"

#define TILES_THREADS 128
#define TILES_ROWS    128 /* queries times the heads of a group, 32 for each warp */
#define TILES_KEYS    NBI_PAGE

/* Rows of D 16-bit numbers in shared memory, in pieces of 16 bytes; xor keeps those of eight rows
 * in different banks. */
template <int D> __device__ static inline uint32_t piece_at(int row, int piece)
{
    return (uint32_t)(row * D * 2 + ((piece ^ (row & 7)) << 4));
}

/* 16 bytes, or zeros. */
__device__ static inline void copy_16(uint32_t to, const void *from, bool real)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(real ? 16 : 0)
                 : "memory");
}

/* One number. */
__device__ static inline void copy_4(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to), "l"(from) : "memory");
}

__device__ static inline void copies_done(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

__device__ static inline void store_shared(uint32_t to, const uint32_t w[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

/* As load_matrices, with rows and columns exchanged. */
__device__ static inline void load_transposed(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* Shared memory: queries, then keys and values of a tile as 16-bit operands. Floats of 16 bits come
 * as they are, and there is room for two tiles; e4m3 comes into a place of its own first, and f32
 * through registers. */
template <int D, enum nbi_dtype TYPE>
struct tiles {
    static constexpr bool BF = TYPE == NBI_BF16;
    static constexpr int BYTES = TYPE == NBI_F32    ? 4
                                 : TYPE == NBI_E4M3 ? 1
                                                    : 2;
    static constexpr bool DIRECT = BYTES == 2;
    static constexpr int QUERIES = TILES_ROWS * D * 2;
    static constexpr int ONE = TILES_KEYS * D * 2; /* keys of a tile; the values follow */
    static constexpr int RAW = TYPE == NBI_E4M3 ? TILES_KEYS * D : 0;
    static constexpr int SHARED = QUERIES + 2 * ONE * (DIRECT ? 2 : 1) + 2 * RAW;
};

/* Queries from to to - 1: their first key is lo for all; the first of them sees keys up to last,
 * each other one more, up to hi. Kept in shared memory, since registers are short. */
struct tiles_run {
    int from, to, last, lo, hi;
    int open;             /* up to here all rows of the tile see all keys */
    int n0, n1;           /* queries of the tile, those of other runs included */
    const int32_t *pages; /* of their sequence, if there are any */
    int page[2];          /* those of tile i and the next; that of i is at i % 2 */
};

/* Keys and values of a head, and where they go. */
struct tiles_source {
    const uint8_t *k, *v; /* row 0 of the store */
    int stride;           /* bytes */
    uint32_t shared;      /* after the queries */
    const struct tiles_run *run;
};

/* What to add to the rows of tile i for those of the store. */
template <bool PAGED> __device__ static inline int tiles_shift(const struct tiles_run &run, int i)
{
    return PAGED ? run.page[i & 1] * NBI_PAGE - (run.lo + i * TILES_KEYS) : 0;
}

/* Starts the copy of tile i, and of the number of the next page. Keys past hi become zeros. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline void tiles_fetch(const struct tiles_source &src, int i)
{
    using T = struct tiles<D, TYPE>;
    constexpr int PIECES = D * T::BYTES / 16; /* of a row */
    int thread = opaque(threadIdx.x), key0 = src.run->lo + i * TILES_KEYS, hi = src.run->hi;
    if (PAGED && thread == 0)
        copy_4(smem_addr(&src.run->page[(i + 1) & 1]),
               src.run->pages + min(key0 + TILES_KEYS, hi) / NBI_PAGE);
    if (T::BYTES == 4)
        return;
    uint32_t to = src.shared + (T::DIRECT ? (i & 1) * 2 * T::ONE : 2 * T::ONE);
    int shift = tiles_shift<PAGED>(*src.run, i);
#pragma unroll 4
    for (int j = 0; j < TILES_KEYS * PIECES / TILES_THREADS; j++) {
        int at = thread + j * TILES_THREADS, row = at / PIECES, piece = at % PIECES;
        bool real = key0 + row <= hi;
        int64_t from = (int64_t)(min(key0 + row, hi) + shift) * src.stride + piece * 16;
        uint32_t place = T::DIRECT ? piece_at<D>(row, piece) : (uint32_t)at * 16;
        copy_16(to + place, src.k + from, real);
        copy_16(to + place + (T::DIRECT ? T::ONE : T::RAW), src.v + from, real);
    }
}

/* e4m3 in shared memory, keys and values behind them, to f16. */
template <int D> __device__ static inline void tiles_widen(uint32_t to, uint32_t from)
{
    int thread = opaque(threadIdx.x);
#pragma unroll 2
    for (int j = 0; j < 2 * TILES_KEYS * D / 16 / TILES_THREADS; j++) {
        int at = thread + j * TILES_THREADS, row = at / (D / 16), piece = at % (D / 16);
        uint32_t raw[4];
        load_shared(raw, from + at * 16);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = e4m3_to_f16(raw[2 * e + i / 2] >> (i % 2 * 16) & 0xFFFF);
            store_shared(to + piece_at<D>(row, 2 * piece + e), w);
        }
    }
}

/* Eight floats times a factor as a piece. */
template <bool BF> __device__ static inline void store_floats(uint32_t to, const float *p, float by)
{
    float4 x[2] = {__ldg((const float4 *)p), __ldg((const float4 *)p + 1)};
    float f[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] *= by;
        if (!BF)
            f[i] = fit_f16(f[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = pack<BF>(f[2 * i], f[2 * i + 1]);
    store_shared(to, w);
}

/* f32 of tile i, keys and values, to f16. */
template <int D, bool PAGED>
__device__ static inline void tiles_narrow(const struct tiles_source &src, int i)
{
    constexpr int ONE = tiles<D, NBI_F32>::ONE;
    const uint32_t zeros[4] = {0, 0, 0, 0};
    int shift = tiles_shift<PAGED>(*src.run, i);
#pragma unroll 2
    for (int j = 0; j < TILES_KEYS * D / 8 / TILES_THREADS; j++) {
        int at = threadIdx.x + j * TILES_THREADS, row = at / (D / 8), piece = at % (D / 8);
        int key = src.run->lo + i * TILES_KEYS + row;
        uint32_t to = src.shared + piece_at<D>(row, piece);
        if (key <= src.run->hi) {
            int64_t from = (int64_t)(key + shift) * src.stride + piece * 32;
            store_floats<false>(to, (const float *)(src.k + from), 1);
            store_floats<false>(to + ONE, (const float *)(src.v + from), 1);
        } else {
            store_shared(to, zeros);
            store_shared(to + ONE, zeros);
        }
    }
}

/* Waits for tile i of `count`, starts the next and says where the keys are. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline uint32_t tiles_next(const struct tiles_source &src, int i, int count)
{
    using T = struct tiles<D, TYPE>;
    copies_done();
    __syncthreads(); /* tile i is there, and nobody uses the one before any more */
    if (TYPE == NBI_E4M3) {
        tiles_widen<D>(src.shared, src.shared + 2 * T::ONE);
    } else if (TYPE == NBI_F32) {
        tiles_narrow<D, PAGED>(src, i);
    }
    if (!T::DIRECT)
        __syncthreads();
    if (i + 1 < count)
        tiles_fetch<D, TYPE, PAGED>(src, i + 1);
    return src.shared + (T::DIRECT ? (i & 1) * 2 * T::ONE : 0);
}

/* A lane's share of its warp's 32 rows: those of two products, 16 m + 8 e + g each. */
template <int D> struct tiles_rows {
    float y[2][D / 8][4];
    float base[2][2], sum[2][2];
};

/* Scores of the warp's rows with the keys of a tile. */
template <int D, bool BF>
__device__ static inline void tiles_scores(float s[2][TILES_KEYS / 8][4], uint32_t queries,
                                           uint32_t keys)
{
    int thread = opaque(threadIdx.x), lane = thread % 32;
    int q_row = thread / 32 * 32 + lane % 16, q_piece = lane / 16;
    int k_row = lane % 8 + lane / 16 * 8, k_piece = lane / 8 % 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int c = 0; c < TILES_KEYS / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][c][e] = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t q[2][4], k[4];
        load_matrices(q[0], queries + piece_at<D>(q_row, 2 * i + q_piece));
        load_matrices(q[1], queries + piece_at<D>(q_row, 2 * i + q_piece) + 16 * D * 2);
#pragma unroll
        for (int c = 0; c < TILES_KEYS / 16; c++) {
            load_matrices(k, keys + piece_at<D>(k_row, 2 * i + k_piece) + c * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma<BF>(s[m][2 * c], q[m], k[0], k[1]);
                mma<BF>(s[m][2 * c + 1], q[m], k[2], k[3]);
            }
        }
    }
}

/* The rows of a lane, as packed rows of the call: query first, head of the group second. */
__device__ static inline int tiles_row(int row0, int m, int e)
{
    return row0 + (int)threadIdx.x / 32 * 32 + 16 * m + 8 * e + (int)threadIdx.x % 32 / 4;
}

/* Key0 is the first of the tile. Rows that are not of the run see nothing. */
__device__ static inline void tiles_mask(float s[2][TILES_KEYS / 8][4], const struct tiles_run &run,
                                         int row0, int group, int key0)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int n = tiles_row(row0, m, e / 2) / group;
            int limit = n >= run.from && n < run.to ? run.last + n - run.from : -1;
#pragma unroll
            for (int c = 0; c < TILES_KEYS / 8; c++)
                if (key0 + 8 * c + 2 * t + e % 2 > limit)
                    s[m][c][e] = -INFINITY;
        }
}

/* Scores become weights, and what was summed so far is scaled where the base moved. */
template <int D>
__device__ static inline void tiles_weights(float s[2][TILES_KEYS / 8][4], struct tiles_rows<D> &r)
{
    float keep[2][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float top = fmaxf(s[m][0][2 * e], s[m][0][2 * e + 1]);
#pragma unroll
            for (int c = 1; c < TILES_KEYS / 8; c++)
                top = fmaxf(top, fmaxf(s[m][c][2 * e], s[m][c][2 * e + 1]));
            top = quad_max(top);
            keep[m][e] = 1;
            if (top > r.base[m][e] + LAG) {
                keep[m][e] = fast_exp2(r.base[m][e] - top);
                r.base[m][e] = top;
                moved = true;
            }
            /* A row without keys so far has nothing to subtract. */
            float base = r.base[m][e] == -INFINITY ? 0 : r.base[m][e], sum = 0;
#pragma unroll
            for (int c = 0; c < TILES_KEYS / 8; c++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    s[m][c][2 * e + i] = fast_exp2(s[m][c][2 * e + i] - base);
                    sum += s[m][c][2 * e + i];
                }
            r.sum[m][e] = r.sum[m][e] * keep[m][e] + sum;
        }
    if (__any_sync(0xFFFFFFFF, moved)) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < D / 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    r.y[m][i][e] *= keep[m][e / 2];
    }
}

/* y += weights times the values of a tile. */
template <int D, bool BF>
__device__ static inline void tiles_values(struct tiles_rows<D> &r,
                                           const float s[2][TILES_KEYS / 8][4], uint32_t values)
{
    int lane = opaque(threadIdx.x % 32), row = lane % 16, piece = lane / 16;
#pragma unroll
    for (int c = 0; c < TILES_KEYS / 16; c++) {
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
            load_transposed(v, values + piece_at<D>(row, 2 * i + piece) + c * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma<BF>(r.y[m][2 * i], p[m], v[0], v[1]);
                mma<BF>(r.y[m][2 * i + 1], p[m], v[2], v[3]);
            }
        }
    }
}

/* Packed rows: query first, head of the group second. */
template <int D, bool BF>
__device__ static inline void tiles_load_queries(const struct attend &a, uint32_t to, int row0,
                                                 int kvh)
{
#pragma unroll 4
    for (int j = 0; j < TILES_ROWS * D / 8 / TILES_THREADS; j++) {
        int at = threadIdx.x + j * TILES_THREADS, row = at / (D / 8), piece = at % (D / 8);
        int n = (row0 + row) / a.group, h = kvh * a.group + (row0 + row) % a.group;
        const uint32_t zeros[4] = {0, 0, 0, 0};
        if (n < a.N)
            store_floats<BF>(to + piece_at<D>(row, piece),
                             a.q + ((int64_t)n * a.NH + h) * D + piece * 8, a.scale);
        else
            store_shared(to + piece_at<D>(row, piece), zeros);
    }
}

template <int D>
__device__ static inline void tiles_store(const struct attend &a, struct tiles_rows<D> &r, int row0,
                                          int kvh)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = tiles_row(row0, m, e), n = row / a.group;
            float sum = quad_sum(r.sum[m][e]), by = 1 / sum;
            if (n >= a.N)
                continue;
            int64_t head = (int64_t)n * a.NH + kvh * a.group + row % a.group;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                *(float2 *)(a.y + head * D + 8 * i + 2 * t) =
                    make_float2(r.y[m][i][2 * e] * by, r.y[m][i][2 * e + 1] * by);
            if (a.lse && t == 0)
                a.lse[head] = (r.base[m][e] + log2f(sum)) * LN2;
        }
}

/* Of the queries n0 to n0 + count - 1: bit i of breaks is set where query n0 + i does not simply
 * go on from the one before with one key more. Count is at most 128, one for each thread. */
template <bool PAGED>
__device__ static inline void tiles_breaks(const struct attend &a, uint32_t breaks[4], int n0,
                                           int count)
{
    int i = threadIdx.x, n = n0 + i;
    bool cut = i > 0 && i < count &&
               (a.first[n] != a.first[n - 1] || a.last[n] != a.last[n - 1] + 1 ||
                (PAGED && a.tables[n] != a.tables[n - 1]));
    uint32_t word = __ballot_sync(0xFFFFFFFF, cut);
    if (i % 32 == 0)
        breaks[i / 32] = word;
    __syncthreads();
}

/* The run that begins at query `from` of the tile. */
template <bool PAGED>
__device__ static inline void tiles_run_at(struct tiles_run &run, const struct attend &a,
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
    run.open = from == run.n0 && to == count ? run.last : -1;
}

/* Grid: tiles of rows, the last first since they see the most keys, and for each the key heads.
 *
 * A tile's queries are taken in runs with the same first key and one key more for each: all keys
 * from first to the last query's last are then somebody's, hence written. Usually there is one
 * run. Rows that are not of the run keep what they have. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__global__ __launch_bounds__(TILES_THREADS, 2) static void k_attend_tiles(struct attend a)
{
    using T = struct tiles<D, TYPE>;
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint32_t breaks[4];
    __shared__ struct tiles_run run;
    int kvh = blockIdx.x % a.NKV, row0 = ((gridDim.x - 1 - blockIdx.x) / a.NKV) * TILES_ROWS;
    int n0 = row0 / a.group, n1 = min((row0 + TILES_ROWS - 1) / a.group, a.N - 1);
    int64_t head = (int64_t)kvh * D * T::BYTES;
    uint32_t queries = smem_addr(smem);
    struct tiles_source src = {};
    src.k = a.k + head;
    src.v = a.v + head;
    src.stride = a.NKV * D * T::BYTES;
    src.shared = queries + T::QUERIES;
    src.run = &run;

    tiles_load_queries<D, T::BF>(a, queries, row0, kvh);
    if (threadIdx.x == 0) {
        run.n0 = n0;
        run.n1 = n1;
    }
    tiles_breaks<PAGED>(a, breaks, n0, n1 - n0 + 1);
    struct tiles_rows<D> r;
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
        __syncthreads(); /* the run before is done */
        if (threadIdx.x == 0)
            tiles_run_at<PAGED>(run, a, breaks, from);
        __syncthreads();
        int count = (run.hi - run.lo) / TILES_KEYS + 1;
        tiles_fetch<D, TYPE, PAGED>(src, 0);
        for (int i = 0; i < count; i++) {
            float s[2][TILES_KEYS / 8][4];
            uint32_t keys = tiles_next<D, TYPE, PAGED>(src, i, count);
            int key0 = run.lo + i * TILES_KEYS;
            tiles_scores<D, T::BF>(s, queries, keys);
            if (key0 + TILES_KEYS - 1 > run.open)
                tiles_mask(s, run, row0, a.group, key0);
            tiles_weights<D>(s, r);
            tiles_values<D, T::BF>(r, s, keys + T::ONE);
        }
    }
    tiles_store<D>(a, r, row0, opaque(blockIdx.x) % a.NKV);
}

template <int D, enum nbi_dtype TYPE>
static enum nb_status launch_tiles(struct nbi_stream *s, const struct attend &k)
{
    int shared = tiles<D, TYPE>::SHARED;
    auto kernel = k.pages ? k_attend_tiles<D, TYPE, true> : k_attend_tiles<D, TYPE, false>;
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    int64_t grid = ceil_div((int64_t)k.N * k.group, TILES_ROWS) * k.NKV;
    kernel<<<(unsigned)grid, TILES_THREADS, shared, s->queue>>>(k);
    CU_LAUNCHED();
    return NB_OK;
}

template <int D>
static enum nb_status attend_tiles(struct nbi_stream *s, const struct nbi_op_attention *a,
                                   const struct attend &k)
{
    switch (a->kv.dtype) {
    case NBI_F32:
        return launch_tiles<D, NBI_F32>(s, k);
    case NBI_F16:
        return launch_tiles<D, NBI_F16>(s, k);
    case NBI_BF16:
        return launch_tiles<D, NBI_BF16>(s, k);
    default:
        return launch_tiles<D, NBI_E4M3>(s, k);
    }
}

enum nb_status nbi_cuda_attend_tiles(struct nbi_stream *s, const struct nbi_op_attention *a,
                                     const struct attend &k)
{
    return a->D == 128 ? attend_tiles<128>(s, a, k) : attend_tiles<64>(s, a, k);
}
