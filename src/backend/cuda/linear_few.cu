/* linear_few.cu - products of up to NBI_SMALL_BATCH rows with NVFP4 matrices, on tensor cores.
 *
 * x is rounded to f16 times a power of two per row; weights are exact in f16. A CTA takes blocks of
 * 64 rows of the matrix, a round at a time: four tiles of columns, one for each part, which is two
 * warps with two rows of tiles each. Weights and x go through a ring of stages in shared memory,
 * and a part waits for itself alone.
 *
 * The rounds of all blocks, one behind the other, are cut into as many equal pieces as there are
 * CTAs, wherever that is in a block. Of a block that several have a piece of each leaves its sums,
 * and whoever is last adds them up, in order. Where the cuts are depends on the shapes and the
 * device, so a row of y does not depend on its company. */
#include "backend/cuda/internal.cuh"

#define PARTS       4
#define WARPS       (2 * PARTS)
#define THREADS     (32 * WARPS)
#define BLOCK_TILES 4 /* rows of tiles of a block */
#define BLOCK_ROWS  (BLOCK_TILES * NBI_TILE_ROWS)
#define TILE_WORDS  (NBI_TILE_BYTES / 16) /* of 16 bytes, as all that is copied */
#define SUMS_LINE   (BLOCK_ROWS + 4)      /* so that lanes write to different banks */

static_assert(2 * NBI_CTAS_MAX * BLOCK_ROWS * NBI_SMALL_BATCH * 4 <= NBI_WORKSPACE_BYTES,
              "two sums for each CTA");

struct product {
    float *y[NBI_LINEAR_MAX];
    const uint4 *tiles[NBI_LINEAR_MAX];
    int first[NBI_LINEAR_MAX]; /* block where each matrix begins */
    int rows[NBI_LINEAR_MAX], tile_rows[NBI_LINEAR_MAX];
    float scale[NBI_LINEAR_MAX];
    int count, tile_cols;
    int rounds; /* of a block */
    int blocks; /* of all matrices */
    int total;  /* rounds of all blocks */
    const uint4 *x;
    const float *x_scale;
    float *parts; /* [CTAs, 2, 8 NT, BLOCK_ROWS] for each blockIdx.y */
    int32_t
        *left; /* parts that were left so far, by the first CTA of a block; zeros between calls */
    int N, n_tiles;
    bool add;
};

/* ---- x ---- */

/* Where x comes from, four values at a time. Each gives the bits of the operation that it stands
 * for (rows.cu). */
struct of_rows {
    static constexpr int CTA = 1024;
    const float *x;

    __device__ float begin(int64_t, int64_t) const
    {
        return 1;
    }
    __device__ float4 four(int64_t at, int, float) const
    {
        return *(const float4 *)(x + at);
    }
};

struct of_norm {
    static constexpr int CTA = NBI_NORM_THREADS;
    const float *x;
    const void *w;
    enum nbi_dtype dtype;
    float eps;

    __device__ float begin(int64_t n, int64_t K) const
    {
        return norm_factor(x + n * K, K, eps);
    }
    __device__ float4 four(int64_t at, int k, float f) const
    {
        float4 v = *(const float4 *)(x + at);
        return make_float4(v.x * f * load_float(w, k, dtype), v.y * f * load_float(w, k + 1, dtype),
                           v.z * f * load_float(w, k + 2, dtype),
                           v.w * f * load_float(w, k + 3, dtype));
    }
};

struct of_swiglu {
    static constexpr int CTA = 1024;
    const float *gate, *up;

    __device__ float begin(int64_t, int64_t) const
    {
        return 1;
    }
    __device__ float4 four(int64_t at, int, float) const
    {
        float4 g = *(const float4 *)(gate + at), u = *(const float4 *)(up + at);
        return make_float4(g.x / (1 + expf(-g.x)) * u.x, g.y / (1 + expf(-g.y)) * u.y,
                           g.z / (1 + expf(-g.z)) * u.z, g.w / (1 + expf(-g.w)) * u.w);
    }
};

/* x as f16 in the order in which the product takes it: for each tile of columns and each eight rows
 * the operand B of eight mma.m16n8k16, as four times 16 bytes of each lane. */
template <class FROM>
__global__ static void k_round_x16(__half *out, float *scale, FROM from, int64_t N, int64_t K,
                                   int tile_cols)
{
    __shared__ float part[32];
    int64_t n = blockIdx.x, n_tiles = (N + 7) / 8, row = n * K;
    int all = tile_cols * (NBI_TILE_COLS / 4), real = n < N ? (int)(K / 4) : 0;
    float amax = 0, f = n < N ? from.begin(n, K) : 0;
    bool odd = false;
    for (int i = threadIdx.x; i < real; i += blockDim.x) {
        float4 v = from.four(row + 4 * i, 4 * i, f);
        amax = fmaxf(amax, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        odd = odd || !isfinite(v.x) || !isfinite(v.y) || !isfinite(v.z) || !isfinite(v.w);
    }
    amax = warp_max(odd ? INFINITY : amax);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = amax;
    __syncthreads();
    amax = warp_max(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
    odd = !isfinite(amax);
    int e = odd || amax == 0 ? 0 : max(ilogbf(amax), -100);
    float up = odd ? 0 : ldexpf(1, 13 - e);
    if (threadIdx.x == 0 && n < N)
        scale[n] = odd ? NAN : ldexpf(1, e - 13);
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        int tile = i / 32, in = i % 32 * 4, lane = (int)(n % 8) * 4 + in / 32, chunk = in % 32 / 8;
        float4 v = make_float4(0, 0, 0, 0);
        if (i < real && !odd)
            v = from.four(row + 4 * i, 4 * i, f);
        __half2 h[2] = {__floats2half2_rn(v.x * up, v.y * up),
                        __floats2half2_rn(v.z * up, v.w * up)};
        *(uint2 *)(out + (((tile * n_tiles + n / 8) * 4 + chunk) * 32 + lane) * 8 + in % 8) =
            *(const uint2 *)h;
    }
}

/* ---- copies ---- */

__device__ static inline void copy_16(uint32_t to, const uint4 *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}

__device__ static inline void copies_end(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

/* All but the last so many groups are there. */
template <int BUT> __device__ static inline void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(BUT) : "memory");
}

/* The two warps of a part meet. */
__device__ static inline void part_sync(int part)
{
    asm volatile("bar.sync %0, 64;" : : "r"(part + 1) : "memory");
}

/* A stage: x of each part [PARTS, NT, 128], then tiles of each warp [WARPS, 2, TILE_WORDS]. */
template <int NT> struct stage {
    static constexpr int X = NT * 128;
    static constexpr int WORDS = PARTS * X + WARPS * 2 * TILE_WORDS;
};

__device__ static inline int matrix_of(const struct product &a, int block)
{
    int m = 0;
    while (m + 1 < a.count && block >= a.first[m + 1])
        m++;
    return m;
}

/* The round that a warp fetches next, by lane: its tiles, and half of its part's x. */
struct ahead {
    const uint4 *tiles, *x;
    int second; /* from its first tile to the other */
    int block, k;
};

/* Rows of tiles that the matrix does not have are taken from others: nobody will look at their
 * sums. */
__device__ static inline void go_to(struct ahead &f, const struct product &a, int block, int k,
                                    int n0)
{
    int lane = threadIdx.x % 32, pair = threadIdx.x / 32 % 2;
    if (block >= a.blocks)
        return; /* nothing will be fetched */
    int m = matrix_of(a, block), row = (block - a.first[m]) * BLOCK_TILES + pair * 2;
    row = min(row, a.tile_rows[m] - 1);
    f.block = block;
    f.k = k;
    f.second = row + 1 < a.tile_rows[m] ? a.tile_cols * TILE_WORDS : 0;
    f.tiles = a.tiles[m] + ((int64_t)row * a.tile_cols + k) * TILE_WORDS + lane;
    f.x = a.x + ((int64_t)k * a.n_tiles + n0) * 128 + pair * 32 + lane;
}

/* Fetches it to a stage, and goes to the one behind. All of NT is fetched; what is beyond x lies in
 * the stream's memory too, and goes to columns that nobody looks at. */
template <int NT>
__device__ static inline void fetch_round(struct ahead &f, const struct product &a, uint32_t to)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / 2, pair = warp % 2;
    uint32_t tiles = to + (PARTS * stage<NT>::X + warp * 2 * TILE_WORDS + lane) * 16;
    uint32_t x = to + (part * stage<NT>::X + pair * 32 + lane) * 16;
    if (f.k < a.tile_cols) {
        const uint4 *tile[2] = {f.tiles, f.tiles + f.second};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            copy_16(tiles + r * NBI_TILE_BYTES, tile[r]);
            copy_16(tiles + r * NBI_TILE_BYTES + 32 * 16, tile[r] + 32);
            if (lane < TILE_WORDS - 64)
                copy_16(tiles + r * NBI_TILE_BYTES + 64 * 16, tile[r] + 64);
        }
#pragma unroll
        for (int i = 0; i < 2 * NT; i++)
            copy_16(x + i * 64 * 16, f.x + i * 64);
    }
    f.k += PARTS;
    f.tiles += PARTS * TILE_WORDS;
    f.x += (int64_t)PARTS * 128 * a.n_tiles;
    if (f.k - part == a.rounds * PARTS)
        go_to(f, a, f.block + 1, part, (int)blockIdx.y * NT);
}

/* ---- sums ---- */

/* Half a tile as operands: a[p] is pair p. */
__device__ static inline void widen_half(uint32_t a[4][4], uint4 codes, const __half2 by[4])
{
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint32_t pair = tile_pair(word[q], p);
            __half2 v = __hmul2(*(__half2 *)&pair, by[q]);
            a[p][q] = *(uint32_t *)&v;
        }
}

/* Adds two tiles times x. All of NT is computed: what is beyond x goes to columns that nobody
 * looks at. */
template <int NT>
__device__ static inline void add_tiles(float acc[2][NT][4], const uint4 *tiles, const uint4 *x)
{
    int lane = threadIdx.x % 32;
    __half2 by[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t s = ((const uint32_t *)(tiles + r * TILE_WORDS + 64))[lane];
#pragma unroll
        for (int q = 0; q < 4; q++) { /* the scale times 2^7, so the weight times 2^-7 */
            uint32_t h = (s >> (8 * q) & 0xFF) * 0x00800080u;
            by[r][q] = __hmul2(*(__half2 *)&h, __float2half2_rn(32768.0f));
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[2][4][4];
#pragma unroll
        for (int r = 0; r < 2; r++)
            widen_half(a[r], tiles[r * TILE_WORDS + half * 32 + lane], by[r]);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            uint4 b0 = x[t * 128 + half * 32 + lane], b1 = x[t * 128 + 64 + half * 32 + lane];
            const uint32_t lo[4] = {b0.x, b0.y, b0.z, b0.w}, hi[4] = {b1.x, b1.y, b1.z, b1.w};
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    mma_f16(acc[r][t], a[r][p], lo[p], hi[p]);
        }
    }
}

/* Sums of parts 0 and 2, and of 1 and 3, as [2, 8 NT, SUMS_LINE]; acc is 0 afterwards. */
template <int NT> __device__ static inline void join_parts(float acc[2][NT][4], float *sums)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / 2, pair = warp % 2;
    int g = lane / 4, t = lane % 4;
    float *to = sums + part % 2 * 8 * NT * SUMS_LINE + 2 * t * SUMS_LINE + pair * 32 + g;
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        if ((part < 2) == (turn == 1))
#pragma unroll
            for (int i = 0; i < 2 * NT * 4; i++) {
                int r = i / (4 * NT), c = i / 4 % NT, j = i % 4;
                float *s = to + (8 * c + j % 2) * SUMS_LINE + r * 16 + j / 2 * 8;
                *s = turn ? acc[r][c][j] + *s : acc[r][c][j];
                acc[r][c][j] = 0;
            }
        __syncthreads();
    }
}

/* ---- blocks ---- */

/* The first round of a CTA, and the CTA of a round. */
__device__ static inline int first_of(const struct product &a, int cta)
{
    return (int)((int64_t)a.total * cta / gridDim.x);
}

__device__ static inline int cta_of(const struct product &a, int round)
{
    return (int)((((int64_t)round + 1) * gridDim.x - 1) / a.total);
}

/* A CTA has pieces of two blocks at most: of one that began before it, and of one that it begins.
 */
template <int NT>
__device__ static inline float *part_of(const struct product &a, int cta, bool begins)
{
    int64_t index = ((int64_t)blockIdx.y * gridDim.x + cta) * 2 + begins;
    return a.parts + index * (8 * NT * BLOCK_ROWS);
}

/* The result of row i % BLOCK_ROWS of a block and column i / BLOCK_ROWS of these. */
template <int NT>
__device__ static inline void put(const struct product &a, int block, int i, float sum)
{
    int m = matrix_of(a, block);
    int row = (block - a.first[m]) * BLOCK_ROWS + i % BLOCK_ROWS;
    int n = (int)blockIdx.y * 8 * NT + i / BLOCK_ROWS;
    if (row >= a.rows[m] || n >= a.N)
        return;
    float v = __fmul_rn(sum, 128.0f * a.scale[m] * a.x_scale[n]);
    float *y = a.y[m] + (int64_t)n * a.rows[m] + row;
    *y = a.add ? *y + v : v;
}

/* Whether all parts of a block are there: then nobody else will ask. */
__device__ static inline bool all_left(const struct product &a, int first, int others)
{
    __shared__ bool last;
    __threadfence(); /* this thread's share of the part is there for all to see */
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *left = a.left + blockIdx.y * gridDim.x + first;
        last = atomicAdd(left, 1) == others;
        if (last)
            *left = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

/* What is known of a block when this CTA's rounds of it are over: all of it, or a part. Parts are
 * read past the nearest cache, which does not know what others wrote. */
template <int NT>
__device__ static inline void end_block(const struct product &a, const float *sums, int block,
                                        bool whole)
{
    const float *second = sums + 8 * NT * SUMS_LINE;
    int first = 0, last = 0;
    if (!whole) {
        first = cta_of(a, block * a.rounds);
        last = cta_of(a, (block + 1) * a.rounds - 1);
    }
    float *part = part_of<NT>(a, blockIdx.x, (int)blockIdx.x == first);
    for (int i = threadIdx.x; i < 8 * NT * BLOCK_ROWS; i += THREADS) {
        int at = i / BLOCK_ROWS * SUMS_LINE + i % BLOCK_ROWS;
        float sum = sums[at] + second[at];
        if (whole)
            put<NT>(a, block, i, sum);
        else
            part[i] = sum;
    }
    if (!whole && all_left(a, first, last - first))
        for (int i = threadIdx.x; i < 8 * NT * BLOCK_ROWS; i += THREADS) {
            float sum = __ldcg(part_of<NT>(a, first, true) + i);
            for (int cta = first + 1; cta <= last; cta++)
                sum += __ldcg(part_of<NT>(a, cta, false) + i);
            put<NT>(a, block, i, sum);
        }
    __syncthreads(); /* the sums were read */
}

template <int NT, int STAGES>
__global__ static void __launch_bounds__(THREADS, 1)
    k_linear_few(const __grid_constant__ struct product a)
{
    extern __shared__ uint4 room[];
    const unsigned words = stage<NT>::WORDS;
    float *sums = (float *)(room + STAGES * words);
    int warp = threadIdx.x / 32, part = warp / 2;
    int begin = first_of(a, blockIdx.x), end = first_of(a, blockIdx.x + 1);
    int block = begin / a.rounds, k = (begin - block * a.rounds) * PARTS + part;
    float acc[2][NT][4] = {};
    uint32_t to = shared_at(room);
    struct ahead f = {};
    go_to(f, a, block, k, (int)blockIdx.y * NT);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end)
            fetch_round<NT>(f, a, to + i * words * 16);
        copies_end();
    }
    unsigned at = 0;
    for (int round = begin; round < end; round++) {
        const uint4 *in = room + at * words;
        copies_wait<STAGES - 2>();
        part_sync(part); /* all copies are there, and the stage before has been used */
        if (round + STAGES - 1 < end)
            fetch_round<NT>(f, a, to + (at + STAGES - 1) % STAGES * words * 16);
        copies_end();
        if (k < a.tile_cols)
            add_tiles<NT>(acc, in + PARTS * stage<NT>::X + warp * 2 * TILE_WORDS,
                          in + part * stage<NT>::X);
        k += PARTS;
        at = (at + 1) % STAGES;
        if (round + 1 == end || k - part == a.rounds * PARTS) {
            join_parts<NT>(acc, sums);
            end_block<NT>(a, sums, block,
                          block * a.rounds >= begin && (block + 1) * a.rounds <= end);
            block++;
            k = part;
        }
    }
}

/* ---- launch ---- */

template <int NT, int STAGES>
static enum nb_status launch(struct nbi_stream *s, const struct product &a, int ctas)
{
    int shared = STAGES * stage<NT>::WORDS * 16 + 2 * 8 * NT * SUMS_LINE * 4;
    dim3 grid((unsigned)ctas, (unsigned)ceil_div(a.n_tiles, NT));
    CU_TRY(cudaFuncSetAttribute(k_linear_few<NT, STAGES>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    k_linear_few<NT, STAGES><<<grid, THREADS, shared, s->queue>>>(a);
    CU_LAUNCHED();
    return NB_OK;
}

/* As many columns at once as there are, where shared memory allows it. */
static enum nb_status launch_for(struct nbi_stream *s, const struct product &a, int ctas)
{
    if (s->cuda->shared < (220 << 10))
        return a.n_tiles <= 1 ? launch<1, 2>(s, a, ctas) : launch<2, 2>(s, a, ctas);
    if (a.n_tiles <= 1)
        return launch<1, 4>(s, a, ctas);
    if (a.n_tiles <= 2)
        return launch<2, 4>(s, a, ctas);
    return a.n_tiles <= 4 ? launch<4, 4>(s, a, ctas) : launch<8, 2>(s, a, ctas);
}

/* x is in s->x16. */
static enum nb_status multiply(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct product p = {};
    int blocks = 0;
    p.tile_cols = tiles_of(0, a->K).cols;
    for (int i = 0; i < a->count; i++) {
        p.y[i] = at<float>(a->y[i]);
        p.tiles[i] = at<const uint4>(a->w[i].data);
        p.rows[i] = (int)a->w[i].rows;
        p.tile_rows[i] = tiles_of(a->w[i].rows, a->K).rows;
        p.scale[i] = a->w[i].tensor_scale;
        p.first[i] = blocks;
        blocks += (int)ceil_div(p.tile_rows[i], BLOCK_TILES);
    }
    p.count = a->count;
    p.rounds = (int)ceil_div(p.tile_cols, PARTS);
    p.blocks = blocks;
    p.total = blocks * p.rounds;
    p.x = (const uint4 *)s->x16;
    p.x_scale = s->x16_scale;
    p.parts = (float *)s->workspace;
    p.left = s->linear_left;
    p.N = (int)a->N;
    p.n_tiles = (int)ceil_div(a->N, 8);
    p.add = a->add;
    int ctas = s->cuda->sms < NBI_CTAS_MAX ? s->cuda->sms : NBI_CTAS_MAX;
    return launch_for(s, p, p.total < ctas ? p.total : ctas);
}

template <class FROM>
static enum nb_status round_and_multiply(struct nbi_stream *s, const struct nbi_op_linear *a,
                                         FROM from)
{
    k_round_x16<<<(unsigned)(ceil_div(a->N, 8) * 8), FROM::CTA, 0, s->queue>>>(
        (__half *)s->x16, s->x16_scale, from, a->N, a->K, tiles_of(0, a->K).cols);
    CU_LAUNCHED();
    return multiply(s, a);
}

bool nbi_cuda_few(const struct nbi_op_linear *a)
{
    bool nvfp4 = true;
    for (int i = 0; i < a->count; i++)
        nvfp4 = nvfp4 && a->w[i].dtype == NBI_NVFP4;
    return !a->exact && nvfp4 && a->N <= NBI_SMALL_BATCH;
}

enum nb_status nbi_cuda_linear_few(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct of_rows from = {at<const float>(a->x)};
    return round_and_multiply(s, a, from);
}

enum nb_status nbi_cuda_norm_linear(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                    const struct nbi_op_linear *a)
{
    CU_HERE(s);
    if (norm->rstd.at || !nbi_cuda_few(a)) {
        NBI_TRY(nbi_cuda_rmsnorm(s, norm));
        return nbi_cuda_linear(s, a);
    }
    struct of_norm from = {at<const float>(norm->x), at<const void>(norm->w.data), norm->w.dtype,
                           norm->eps};
    return round_and_multiply(s, a, from);
}

enum nb_status nbi_cuda_swiglu_linear(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                      const struct nbi_op_linear *a)
{
    CU_HERE(s);
    if (!nbi_cuda_few(a)) {
        NBI_TRY(nbi_cuda_swiglu(s, act));
        return nbi_cuda_linear(s, a);
    }
    struct of_swiglu from = {at<const float>(act->gate), at<const float>(act->up)};
    return round_and_multiply(s, a, from);
}
