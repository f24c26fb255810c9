/* linear_decode_resident.cu - linear of up to 16 rows with NVFP4 matrices where all of the x that a
 * CTA multiplies fits into shared memory. From compute capability 9.0 on, and not batch-invariant:
 * linear_decode.cu has the other cases.
 *
 * A CTA walks its tile rows in row blocks of up to 32. Within a block a warp multiplies two tiles
 * at a time (mma.sync): two tile rows of one tile column, which share the fragments of x; or, for
 * the last row of an odd number, two tile columns of that row. The warps of a row divide K:
 *
 *   pair 0 (rows 0, 1)    warps 0, P, 2P, ...        P pairs of rows; warp w has tile columns
 *   pair 1 (rows 2, 3)    warps 1, P + 1, ...        w / P, w / P + warps_per_pair, ...
 *   ...
 *   last row if odd       all remaining warps
 *
 * x arrives once per CTA, in three chunks: the tile columns of all warps' first steps, of their
 * second steps, and the rest. Weights of the next row block are requested before the sums of this
 * one are added up. */
#include "backend/cuda/linear_decode.cuh"

#define WARPS           16
#define THREADS         (32 * WARPS)
#define ROW_BLOCK       (2 * WARPS) /* tile rows at most */
#define STAGES          2           /* of a warp, two tiles each; ring_next counts on it */
#define STAGE_BYTES     (2 * CUDA_TILE_BYTES)
#define X_CHUNKS        3
#define RESIDENT_X_ROWS 16

/* ---- shared memory ---- */

/* Followed by a tile column of zeros, those of x, and the sums. */
struct smem_layout {
    uint64_t full[WARPS][STAGES]; /* barriers of the stages */
    uint64_t x_full[X_CHUNKS];
    float x_scale[RESIDENT_X_ROWS];
    float act_factor[RESIDENT_X_ROWS]; /* that makes SwiGLU f16; 0 for a scale of 0 */
    __align__(128) uint8_t stages[WARPS][STAGES][STAGE_BYTES];
};

CU_DYNAMIC_SMEM(shared, 128);

__device__ static inline struct smem_layout &smem(void)
{
    return *(struct smem_layout *)shared;
}

static inline __host__ __device__ int x_col_bytes(int NT)
{
    return NT * X_F16_TILE_BYTES;
}

/* A tile column of x; column -1 is zeros. */
template <int NT> __device__ static inline uint32_t x_col_at(int col)
{
    return smem_addr(shared) + sizeof(struct smem_layout) + (col + 1) * x_col_bytes(NT);
}

static inline __host__ __device__ int sums_at(int cols, int NT)
{
    return (int)sizeof(struct smem_layout) + (cols + 1) * x_col_bytes(NT);
}

/* ---- work of a warp ---- */

/* Tile rows [row, row + rows). */
struct row_block {
    int row, rows;
    int warps_per_pair; /* of rows */
    int last_row_warps; /* of the last row, if rows is odd */
};

__device__ static inline struct row_block row_block_of(const struct cta_work &cta, int block)
{
    int row = cta.rows.begin + block * ROW_BLOCK, rows = min(ROW_BLOCK, cta.rows.end - row);
    int warps = quotient(ROW_BLOCK, rows);
    warps = min(warps, WARPS);
    return {row, rows, warps, rows % 2 ? WARPS - rows / 2 * warps : 0};
}

/* Steps of a warp in a row block, each with two tiles and two tile columns of x. */
struct warp_work {
    const uint8_t *tiles[2]; /* that are requested next */
    uint32_t x[2];           /* that are multiplied next */
    int steps, to_load;
    int stride;      /* tile columns from a step to the next */
    bool half_first; /* the first step has one tile column only, the other is column -1 */
};

/* Where the last row has an odd number of tile columns, they are preceded by the column of zeros.
 */
template <int NT>
__device__ static inline struct warp_work
warp_work_of(const struct linear_args &a, const struct cta_work &cta, const struct row_block &b)
{
    /* The shuffle tells the compiler that the value is uniform in the warp. */
    int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), pairs = b.rows / 2;
    int cols = cta.cols.end - cta.cols.begin;
    bool last_row = warp >= pairs * b.warps_per_pair;
    int split = last_row ? warp - pairs * b.warps_per_pair : quotient(warp, pairs);
    int row = b.row + (last_row ? b.rows - 1 : 2 * (warp - split * pairs));
    int first = last_row ? 2 * split - (cols & 1) : split;
    struct warp_work w = {};
    w.stride = last_row ? 2 * b.last_row_warps : b.warps_per_pair;
    if (first < cols && w.stride)
        w.steps = w.to_load = quotient(cols - first + w.stride - 1, w.stride);
    w.half_first = first < 0;
    uint32_t x = x_col_at<NT>(first) + threadIdx.x % 32 * 16;
    w.x[0] = x;
    w.x[1] = last_row ? x + x_col_bytes(NT) : x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        struct tile_ref at = tile_ref_of(a, last_row ? row : row + i);
        w.tiles[i] = a.tiles[at.matrix] +
                     ((int64_t)at.row * a.tile_cols + cta.cols.begin + first + (last_row ? i : 0)) *
                         CUDA_TILE_BYTES;
    }
    return w;
}

/* Starts the copy of the next two tiles, the first of them from `first`. By all lanes. */
__device__ static inline void load_tile_pair(struct warp_work &w, const uint8_t *first, uint32_t to,
                                             uint32_t full)
{
    if (w.to_load == 0)
        return;
    copy_async_two_evict_first(to, first, w.tiles[1], CUDA_TILE_BYTES, full);
    w.tiles[0] += w.stride * CUDA_TILE_BYTES;
    w.tiles[1] += w.stride * CUDA_TILE_BYTES;
    w.to_load--;
}

/* The current stage of a warp, its barrier, and how many stages there were before. */
struct ring {
    uint32_t stage, full;
    uint32_t count;
};

__device__ static inline struct ring ring_init(void)
{
    struct smem_layout &m = smem();
    int warp = threadIdx.x / 32;
    return {smem_addr(m.stages[warp]), smem_addr(m.full[warp]), 0};
}

__device__ static inline void ring_next(struct ring &r)
{
    struct smem_layout &m = smem();
    int warp = threadIdx.x / 32;
    r.count++;
    r.stage = 2 * smem_addr(m.stages[warp]) + STAGE_BYTES - r.stage;
    r.full ^= 8;
}

/* The first two stages of a row block. Column -1 does not exist in the matrix, so the following
 * tile is loaded in its place and multiplied by zeros. */
__device__ static inline void load_first_stages(struct warp_work &w, struct ring r)
{
    load_tile_pair(w, w.half_first ? w.tiles[1] : w.tiles[0], r.stage, r.full);
    ring_next(r);
    load_tile_pair(w, w.tiles[0], r.stage, r.full);
}

/* Starts the copies of all of x. By all lanes of a warp. */
template <int NT>
__device__ static inline void load_x(const struct linear_args &a, const struct cta_work &cta)
{
    const struct row_block b = row_block_of(cta, 0);
    int cols = cta.cols.end - cta.cols.begin, width = max(b.warps_per_pair, 2 * b.last_row_warps);
    const uint8_t *from = a.x + cta.cols.begin * x_col_bytes(NT);
#pragma unroll 1
    for (int i = 0; i < X_CHUNKS; i++) {
        int first = min(i * width, cols), end = i + 1 == X_CHUNKS ? cols : min(first + width, cols);
        uint32_t full = smem_addr(&smem().x_full[i]);
        int at = first * x_col_bytes(NT), bytes = (end - first) * x_col_bytes(NT);
        copy_expect(full, bytes);
        if (bytes > 0)
            copy_async(x_col_at<NT>(first), from + at, bytes, full);
        copy_arrive(full);
    }
}

/* ---- main loop ---- */

/* Half of each of the two tiles. */
template <int NT>
__device__ static inline void mma_half_tiles(float acc[2][NT][4], uint32_t stage,
                                             const uint32_t x[2], int half)
{
    uint32_t w[2][4][4];
    tiles_to_f16<2>(w, stage, half);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t b[4];
                load_matrices(b,
                              x[r] + t * X_F16_TILE_BYTES + (4 * half + 2 * i) * X_F16_STEP_BYTES);
#pragma unroll
                for (int e = 0; e < 2; e++)
                    mma<false>(acc[r][t], w[r][2 * i + e], b[2 * e], b[2 * e + 1]);
            }
}

template <int NT>
__device__ static inline void mma_row_block(float acc[2][NT][4], struct warp_work &w,
                                            struct ring &r)
{
    int step = w.stride * x_col_bytes(NT);
#pragma unroll 1
    for (int i = 0; i < w.steps; i++) {
        if (i < X_CHUNKS)
            mbarrier_wait(smem_addr(&smem().x_full[i]), 0);
        while (!mbarrier_try_wait(r.full, r.count >> 1 & 1))
            ; /* no __syncwarp: the first ldmatrix brings the lanes together */
#pragma unroll
        for (int half = 0; half < 2; half++)
            mma_half_tiles<NT>(acc, r.stage, w.x, half);
        __syncwarp(); /* all lanes have read the stage */
        load_tile_pair(w, w.tiles[0], r.stage, r.full);
        w.x[0] += step;
        w.x[1] += step;
        ring_next(r);
    }
}

/* ---- epilogue ---- */

/* Accumulators of a warp to sums [WARPS, 2, NT, 32]. Of the last row the two accumulators belong to
 * the same results, and their sum goes to the first. */
template <int NT>
__device__ static inline void store_sums(float acc[2][NT][4], float4 *sums, bool last_row)
{
    float4 *to = sums + threadIdx.x / 32 * 2 * NT * 32 + threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float *u = acc[0][t], *v = acc[1][t];
        if (last_row)
            to[t * 32] = make_float4(u[0] + v[0], u[1] + v[1], u[2] + v[2], u[3] + v[3]);
        else
            to[t * 32] = make_float4(u[0], u[1], u[2], u[3]);
        to[(NT + t) * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

/* Outputs 2j and 2j + 1 of a tile row for row n of x: the splits of K added in order. */
template <int NT>
__device__ static inline float2 add_splits(const float *sums, const struct row_block &b, int row,
                                           int n, int j)
{
    int pairs = b.rows / 2;
    bool last_row = row == 2 * pairs;
    int warp = last_row ? pairs * b.warps_per_pair : row / 2;
    int splits = last_row ? b.last_row_warps : b.warps_per_pair;
    int stride = (last_row ? 1 : pairs) * 2 * NT * 128;
    const float *from = sums + ((warp * 2 + row % 2) * NT + n / 8) * 128 + j % 4 * 32 +
                        n % 8 / 2 * 4 + j / 4 * 2 + n % 2;
    float2 sum = {from[0], from[16]};
#pragma unroll 2
    for (int i = 1; i < splits; i++) {
        from += stride;
        sum.x += from[0];
        sum.y += from[16];
    }
    return sum;
}

__device__ static inline void store_results(const struct linear_args &a, const struct cta_work &cta,
                                            int row, int n, int j, float2 sum)
{
    struct tile_ref at = tile_ref_of(a, row);
    int rows = a.rows[at.matrix], out = at.row * CUDA_TILE_ROWS + 2 * j;
    float scale = 128.0f * a.scale[at.matrix] * smem().x_scale[n];
    float *y = a.split_k > 1 ? a.partials + (int64_t)cta.split * a.N * rows : a.y[at.matrix];
    bool add = a.add && a.split_k == 1;
    y += (int64_t)n * rows + out;
    if (out < rows)
        y[0] = __fmul_rn(sum.x, scale) + (add ? y[0] : 0);
    if (out + 1 < rows)
        y[1] = __fmul_rn(sum.y, scale) + (add ? y[1] : 0);
}

/* SwiGLU packed as x of the next linear. Zeros where the factor is NaN: the row's scale is NaN too
 * and spoils the results. */
__device__ static inline void store_swiglu(const struct linear_args &a, int tile_row, int n, int j,
                                           float2 gate, float2 up)
{
    float scale = 128.0f * smem().x_scale[n], factor = smem().act_factor[n];
    float x = swiglu(__fmul_rn(gate.x, a.scale[0] * scale), __fmul_rn(up.x, a.scale[1] * scale));
    float y = swiglu(__fmul_rn(gate.y, a.scale[0] * scale), __fmul_rn(up.y, a.scale[1] * scale));
    *(__half2 *)x_f16_at(a.act, n, tile_row * CUDA_TILE_ROWS + 2 * j) =
        factor > 0 ? __floats2half2_rn(x * factor, y * factor) : __half2();
}

template <int NT>
__device__ static inline void epilogue(const struct linear_args &a, const struct cta_work &cta,
                                       const struct row_block &b, const float *sums)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < (b.rows >> a.gated) * 64 * NT; i += THREADS) {
        int j = i % 8, n = i / 8 % (8 * NT), row = i / (64 * NT) << a.gated;
        if (n >= a.N)
            continue;
        float2 sum = add_splits<NT>(sums, b, row, n, j);
        if (a.gated)
            store_swiglu(a, (b.row + row) / 2, n, j, sum, add_splits<NT>(sums, b, row + 1, n, j));
        else
            store_results(a, cta, b.row + row, n, j, sum);
    }
}

/* ---- the kernel ---- */

template <int NT> __device__ static inline void init_smem(void)
{
    struct smem_layout &m = smem();
    uint4 *zeros = (uint4 *)(shared + sizeof m); /* column -1 */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < STAGES)
        mbarrier_init(smem_addr(&m.full[warp][lane]), COPY_ARRIVALS);
    if (threadIdx.x < X_CHUNKS)
        mbarrier_init(smem_addr(&m.x_full[threadIdx.x]), COPY_ARRIVALS);
#if HAS_BULK_COPY
    fence_mbarrier_init();
#endif
    if (threadIdx.x < x_col_bytes(NT) / 16)
        zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

/* NT: tiles of eight rows of x. The register limit leaves room for the small kernels before and
 * after it, so that they can be resident at the same time. */
template <int NT>
__global__ static void __maxnreg__(NT == 1 ? 88 : 80)
    k_linear_resident_x(const __grid_constant__ struct linear_args a)
{
    const struct cta_work cta = cta_work_of(a, (int)blockIdx.x);
    const int warp = threadIdx.x / 32, cols = cta.cols.end - cta.cols.begin;
    float scales[2] = {}; /* of x and of act; they arrive during the first row block */
    struct ring r = ring_init();
    pdl_trigger();
    init_smem<NT>();
    struct warp_work w = warp_work_of<NT>(a, cta, row_block_of(cta, 0));
    load_first_stages(w, r);
    pdl_wait();
    if (threadIdx.x < a.N) {
        scales[0] = a.x_scale[threadIdx.x];
        if (a.gated)
            scales[1] = a.act.scale[threadIdx.x];
    }
    if (warp == WARPS - 1)
        load_x<NT>(a, cta);
#pragma unroll 1
    for (int block = 0;; block++) {
        float acc[2][NT][4] = {};
        float *sums = (float *)(shared + sums_at(cols, NT));
        mma_row_block<NT>(acc, w, r);
        const struct cta_work again = cta_work_of(a, opaque((int)blockIdx.x)); /* saves registers */
        const struct row_block b = row_block_of(again, block);
        const bool last = b.row + b.rows == again.rows.end;
        store_sums<NT>(acc, (float4 *)sums, warp >= b.rows / 2 * b.warps_per_pair);
        if (block == 0 && threadIdx.x < a.N) {
            smem().x_scale[threadIdx.x] = scales[0];
            smem().act_factor[threadIdx.x] = scales[1] != 0 ? 1 / scales[1] : 0;
        }
        if (!last) {
            w = warp_work_of<NT>(a, again, row_block_of(again, block + 1));
            load_first_stages(w, r);
        }
        __syncthreads();
        epilogue<NT>(a, again, b, sums);
        if (last)
            break;
        __syncthreads(); /* the sums were read */
    }
}

/* ---- launch ---- */

static int64_t smem_bytes(const struct linear_args *p)
{
    int64_t cols = ceil_div(p->tile_cols, p->split_k);
    return sums_at((int)cols, p->n_tiles) + WARPS * 2 * p->n_tiles * 512;
}

bool nbi_cuda_resident_fits(const struct nbi_stream *s, const struct linear_args *p)
{
    return s->cuda->ptx_version >= 90 && p->N <= RESIDENT_X_ROWS &&
           smem_bytes(p) <= s->cuda->smem_per_cta - ATTENTION_SMEM_BYTES;
}

template <int NT> static enum nb_status launch(struct nbi_stream *s, const struct linear_args &a)
{
    /* An attribute of the kernel, so the same for all streams. */
    CU_TRY(cudaFuncSetAttribute(k_linear_resident_x<NT>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                s->cuda->smem_per_cta));
    CU_TRY(pdl_launch(s, k_linear_resident_x<NT>, (unsigned)(a.row_ctas * a.split_k), THREADS,
                      (int)smem_bytes(&a), a));
    return NB_OK;
}

enum nb_status nbi_cuda_linear_resident(struct nbi_stream *s, const struct linear_args *p)
{
    return p->n_tiles == 1 ? launch<1>(s, *p) : launch<2>(s, *p);
}
