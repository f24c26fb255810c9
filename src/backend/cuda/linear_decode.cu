/* linear_decode.cu - linear of up to NBI_DECODE_LINEAR_ROWS rows with NVFP4 matrices, on f16 tensor
 * cores.
 *
 * in : x packed as f16 times a power of two per row (pack_activations.cu), weights as tiles
 * out: y, or partial sums of it, or SwiGLU packed as x of the next linear
 *
 * linear_decode.cuh says how tiles are divided over CTAs. Inside a CTA, with row groups of
 * GROUP_TILE_ROWS tile rows each:
 *
 *                tile columns of the CTA, dealt out to the splits of K: consecutive ones with
 *                wgmma, one at a time in rotation with mma.sync
 *                +---------+---------+---------+
 *   row group 0  | group 0 | group 2 | group 4 |   "group": a warpgroup that issues wgmma, or one
 *   row group 1  | group 1 | group 3 | group 5 |   warp that issues mma.sync
 *                +---------+---------+---------+
 *                  split 0   split 1   split 2     (warp_split_k = 3)
 *
 * Each warp has a ring of stages in shared memory for its own tiles. The tile columns of x are
 * shared by the row groups of a split; a producer warp loads them, or, with wgmma, the warps of row
 * group 0. At the end of a row block the epilogue adds up the splits in order.
 *
 * Weights do not depend on the previous kernel, so the first stages are requested before
 * pdl_wait() (programmatic dependent launch).
 *
 * With few tile rows and `add`, K is also divided over CTAs (split_k). Each CTA leaves partial
 * sums, which another kernel adds to y in order (struct splitk_partials).
 *
 * Batch invariance: every division above follows from the matrices and the device alone, except
 * for the choice between wgmma and mma.sync, which batch_invariant calls fix.
 * linear_decode_resident is a faster variant for up to 16 rows that is not batch-invariant. */
#include <string.h>

#include "backend/cuda/linear_decode.cuh"
#include "backend/cuda/wgmma.cuh"

#define X_STAGES_MAX 32

/* How warps multiply. With WG (Hopper) a warpgroup issues wgmma on four tile rows: x is read from
 * shared memory by the tensor cores, while the warps convert the next weights. Without, each warp
 * issues mma.sync on two tile rows, which share the fragments of x. */
template <bool WG> struct warp_config {
    static constexpr int WARPS = WG ? 12 : 15; /* that multiply */
    static constexpr int THREADS = WG ? 384 : 512;
    static constexpr int registers(int NT) /* of a thread */
    {
        return WG ? 104 : NT <= 2 ? 80 : 128;
    }
    static constexpr int GROUP_WARPS = WG ? 4 : 1;
    static constexpr int WARP_TILE_ROWS = WG ? 1 : 2;
    static constexpr int GROUP_TILE_ROWS = GROUP_WARPS * WARP_TILE_ROWS;
    static constexpr int ROW_BLOCK = WARPS / GROUP_WARPS * GROUP_TILE_ROWS; /* tile rows at most */
    static constexpr int WARP_SPLIT_K = WG ? 3 : 7;                         /* at most */
    /* The ring of a warp. */
    static constexpr int STAGES = 2;
    static constexpr int STAGE_COLS = WG ? 2 : 1; /* tile columns */
    static constexpr int STAGE_BYTES = WARP_TILE_ROWS * STAGE_COLS * CUDA_TILE_BYTES;
    static constexpr int RINGS_BYTES = WARPS * STAGES * STAGE_BYTES;
    /* Shared memory: a header, the rings, the stages of x. The epilogue reuses rings and x for its
     * sums. The header has the "full" barriers of the rings, the "full" and "empty" barriers of x,
     * the scales of the rows of x, and the factors of the rows of act. */
    static constexpr int WEIGHT_BARRIERS = WARPS * STAGES;
    static constexpr int X_SCALES_AT = (WEIGHT_BARRIERS + 2 * X_STAGES_MAX) * 8;
    static constexpr int ACT_FACTORS_AT = X_SCALES_AT + NBI_DECODE_LINEAR_ROWS * 4;
    static constexpr int HEADER_BYTES =
        (ACT_FACTORS_AT + NBI_DECODE_LINEAR_ROWS * 4) / 128 * 128 + 128;
};

/* Tile rows [row, row + rows) and their division over groups of warps: group g has split
 * g / row_groups of row group g % row_groups. */
struct row_block {
    int row, rows, row_groups, warp_split_k;
    int x_stages; /* of each split */
};

template <class C>
__device__ static inline struct row_block row_block_of(const struct linear_args &a,
                                                       const struct cta_work &w, int block)
{
    unsigned count = (unsigned)(w.rows.end - w.rows.begin) >> a.gated;
    struct range r = {0, (int)count};
    if (a.row_blocks > 1)
        r = {(int)(count * block / a.row_blocks), (int)(count * (block + 1) / a.row_blocks)};
    r = tile_rows_of(a, r);
    int rows = r.end - r.begin, groups = (rows + C::GROUP_TILE_ROWS - 1) / C::GROUP_TILE_ROWS;
    int splits = min(quotient(C::WARPS / C::GROUP_WARPS, groups), a.max_warp_split_k);
    return {w.rows.begin + r.begin, rows, groups, splits, quotient(a.x_stages, splits)};
}

/* ---- shared memory ---- */

CU_DYNAMIC_SMEM(shared, 128);

template <class C> __device__ static inline uint32_t x_full(int stage)
{
    return smem_addr(shared) + (C::WEIGHT_BARRIERS + stage) * 8;
}

template <class C> __device__ static inline uint32_t x_empty(int stage)
{
    return smem_addr(shared) + (C::WEIGHT_BARRIERS + X_STAGES_MAX + stage) * 8;
}

/* The full barriers and the stages of a warp. */
struct ring {
    uint32_t full, data;
};

template <class C> __device__ static inline struct ring ring_of(int warp)
{
    uint32_t base = smem_addr(shared);
    return {base + warp * C::STAGES * 8,
            base + C::HEADER_BYTES + warp * C::STAGES * C::STAGE_BYTES};
}

template <class C> __device__ static inline float *x_scales(void)
{
    return (float *)(shared + C::X_SCALES_AT);
}

template <class C> __device__ static inline float *act_factors(void)
{
    return (float *)(shared + C::ACT_FACTORS_AT);
}

/* Scales of the rows of x; of the rows of act the factor that makes them f16, 0 for a row whose
 * scale is 0. */
template <class C, int NT>
__device__ static inline void load_row_scales(const struct linear_args &a)
{
    int n = (int)blockIdx.y * 8 * NT + threadIdx.x;
    float x = 0, act = 0;
    if (threadIdx.x >= 8 * NT)
        return;
    if (n < a.N) {
        x = a.x_scale[n];
        act = a.gated ? a.act.scale[n] : 0;
    }
    x_scales<C>()[threadIdx.x] = x;
    act_factors<C>()[threadIdx.x] = act != 0 ? 1 / act : 0;
}

template <class C, int NT> __device__ static inline uint32_t x_stage_at(int stage)
{
    return smem_addr(shared) + C::HEADER_BYTES + C::RINGS_BYTES + stage * NT * X_F16_TILE_BYTES;
}

/* Barriers of the previous row block. */
template <class C> __device__ static inline void invalidate_barriers(const struct linear_args &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < C::WARPS && lane < C::STAGES)
        mbarrier_inval(ring_of<C>(warp).full + lane * 8);
    if (warp == C::THREADS / 32 - 1 && lane < a.x_stages) {
        mbarrier_inval(x_full<C>(lane));
        mbarrier_inval(x_empty<C>(lane));
    }
}

/* Each warp initializes the barriers of its ring, the last warp those of x. All lanes of all row
 * groups arrive at an empty barrier. */
template <class C>
__device__ static inline void init_barriers(const struct linear_args &a, const struct row_block &b)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < C::WARPS && lane < C::STAGES)
        mbarrier_init(ring_of<C>(warp).full + lane * 8, COPY_ARRIVALS);
    if (warp == C::THREADS / 32 - 1 && lane < a.x_stages) {
        mbarrier_init(x_full<C>(lane), COPY_ARRIVALS);
        mbarrier_init(x_empty<C>(lane), 32 * C::GROUP_WARPS * b.row_groups);
    }
#if HAS_BULK_COPY
    fence_mbarrier_init();
#endif
    __syncwarp();
}

/* ---- weights ---- */

/* The tiles of a warp in the order in which it loads and multiplies them. */
template <class C> struct weight_pipeline {
    const uint8_t *tiles[C::WARP_TILE_ROWS]; /* tile column 0 of each tile row */
    struct ring ring;
    int rows;             /* tile rows; 0: this warp has no rows */
    int first, end, step; /* tile columns; step: from a stage to the next */
    int split;            /* of K among warps */
    bool in_row_group_0;
};

template <class C>
__device__ static inline void
weight_pipeline_init(struct weight_pipeline<C> &w, const struct linear_args &a,
                     const struct cta_work &cta, const struct row_block &b)
{
    /* The shuffle tells the compiler that the value is uniform in the warp. */
    int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), group = warp / C::GROUP_WARPS;
    int split = quotient(group, b.row_groups);
    int row = (group - split * b.row_groups) * C::GROUP_TILE_ROWS +
              warp % C::GROUP_WARPS * C::WARP_TILE_ROWS;
    w.ring = ring_of<C>(warp);
    w.rows = max(0, min(C::WARP_TILE_ROWS, b.rows - row));
    w.in_row_group_0 = row == 0;
    w.first = cta.cols.begin + split;
    w.end = split < b.warp_split_k ? cta.cols.end : 0;
    w.step = b.warp_split_k;
    if (C::STAGE_COLS > 1 && split < b.warp_split_k) {
        struct range r = even_range(cta.cols.end - cta.cols.begin, split, b.warp_split_k);
        w.first = cta.cols.begin + r.begin;
        w.end = cta.cols.begin + r.end;
        w.step = C::STAGE_COLS;
    }
    w.split = split;
#pragma unroll
    for (int r = 0; r < C::WARP_TILE_ROWS; r++) {
        struct tile_ref at = tile_ref_of(a, b.row + min(row + r, b.rows - 1));
        w.tiles[r] = a.tiles[at.matrix] + (int64_t)at.row * a.tile_cols * CUDA_TILE_BYTES;
    }
}

/* Starts the copy of the tile columns from col on into a stage. By all lanes of the warp. */
template <class C>
__device__ static inline void load_weights(const struct weight_pipeline<C> &w, int col, int stage)
{
    if (col >= w.end || w.rows == 0)
        return;
    uint32_t full = w.ring.full + stage * 8, to = w.ring.data + stage * C::STAGE_BYTES;
    int bytes = min(C::STAGE_COLS, w.end - col) * CUDA_TILE_BYTES;
    copy_expect(full, w.rows * bytes);
#pragma unroll
    for (int r = 0; r < C::WARP_TILE_ROWS; r++)
        if (r < w.rows)
            copy_async_evict_first(to + r * C::STAGE_COLS * CUDA_TILE_BYTES,
                                   w.tiles[r] + (int64_t)col * CUDA_TILE_BYTES, bytes, full);
    copy_arrive(full);
}

/* ---- x ---- */

/* Tile columns of x still to be loaded, for one split or for all of them in rotation. */
struct x_pipeline {
    int next, end;
    int split, splits, stages; /* split: of the next tile column; stages: of each split */
    struct stage_phase at;
};

/* Starts the copy of the next tile column as soon as its stage is empty. By all lanes of a warp. */
template <class C, int NT>
__device__ static inline void load_x(const struct linear_args &a, struct x_pipeline &x)
{
    int stage = x.split * x.stages + x.at.stage, n0 = (int)blockIdx.y * NT;
    int bytes = min(NT, a.n_tiles - n0) * X_F16_TILE_BYTES;
    uint32_t full = x_full<C>(stage);
    mbarrier_wait(x_empty<C>(stage), x.at.parity);
    copy_expect(full, bytes);
    copy_async(x_stage_at<C, NT>(stage), a.x + (x.next * a.n_tiles + n0) * X_F16_TILE_BYTES, bytes,
               full);
    copy_arrive(full);
    x.next++;
    if (x.splits > 1)
        x.split = x.split + 1 == x.splits ? 0 : x.split + 1;
    if (x.splits == 1 || x.split == 0)
        next_stage(x.at, x.stages);
}

/* ---- mma.sync: a warp alone ---- */

/* Adds half a tile column. A group with one tile row multiplies stale data for the other; those
 * sums are never stored. */
template <class C, int NT>
__device__ static inline void mma_half_tile(float acc[][NT][4], uint32_t stage, uint32_t x,
                                            int half)
{
    uint32_t w[C::WARP_TILE_ROWS][4][4];
    tiles_to_f16<C::WARP_TILE_ROWS>(w, stage, half);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t b[4];
            load_matrices(b, x + t * X_F16_TILE_BYTES + (4 * half + 2 * i) * X_F16_STEP_BYTES);
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int r = 0; r < C::WARP_TILE_ROWS; r++)
                    mma<false>(acc[r][t], w[r][2 * i + e], b[2 * e], b[2 * e + 1]);
        }
}

template <class C, int NT>
__device__ static inline void mma_warp(float acc[][NT][4], const struct weight_pipeline<C> &w,
                                       int x_stages)
{
    int first_x_stage = w.split * x_stages;
    struct stage_phase x_at = {}, w_at = {};
#pragma unroll 1
    for (int col = w.first; col < w.end; col += w.step) {
        int stage = first_x_stage + x_at.stage;
        mbarrier_wait(w.ring.full + w_at.stage * 8, w_at.parity);
        mbarrier_wait(x_full<C>(stage), x_at.parity);
        uint32_t x = x_stage_at<C, NT>(stage) + threadIdx.x % 32 * 16;
#pragma unroll NT <= 2 ? 2 : 1
        for (int half = 0; half < 2; half++)
            mma_half_tile<C, NT>(acc, w.ring.data + w_at.stage * C::STAGE_BYTES, x, half);
        mbarrier_arrive(x_empty<C>(stage));
        __syncwarp(); /* all lanes have read the stage that is loaded next */
        load_weights(w, col + C::STAGES * w.step, w_at.stage);
        next_stage(w_at, C::STAGES);
        next_stage(x_at, x_stages);
    }
}

/* ---- wgmma: a warpgroup ---- */

/* Issues the four wgmma of half a tile column and commits them as one group. They run
 * asynchronously until wgmma_wait. */
template <int NT>
__device__ static inline void wgmma_half_tile(float acc[NT][4], uint32_t w[4][4], uint32_t x)
{
    wgmma_fence_operand(w);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
        wgmma_f16<NT>(acc, w[i], x + i * (X_F16_STEP_BYTES >> 4), X_F16_TILE_BYTES >> 4);
    wgmma_commit();
}

static_assert(warp_config<true>::STAGES == 2, "one stage is read while the other is loaded");

/* Running wgmma own their registers, so there are two sets of weight fragments. A stage of x is
 * empty when the wgmma on its second half have completed, which the next iteration knows. The warps
 * that load x request the next tile column one iteration later still; otherwise they would wait for
 * slower warpgroups.
 *
 * If ptxas reports that wgmma is serialized here, the overlap is lost; converting weights right
 * before a copy has had that effect. */
template <class C, int NT>
__device__ static inline void mma_warpgroup(float acc[NT][4], const struct weight_pipeline<C> &w,
                                            const struct linear_args &a, struct x_pipeline &x)
{
    int x_stages = x.stages, first_x_stage = x.split * x_stages;
    uint32_t f16[2][4][4], x0, to_empty = 0;
    x0 = wgmma_descriptor(x_stage_at<C, NT>(first_x_stage), X_F16_STEP_BYTES / 2);
    struct stage_phase x_at = {}, w_at = {};
#pragma unroll 1
    for (int i = 0; i < x_stages && x.next < x.end; i++)
        load_x<C, NT>(a, x);
#pragma unroll 1
    for (int col = w.first; col < w.end; col += C::STAGE_COLS) {
        if (col > w.first) {
            __syncwarp(); /* all lanes have read the previous stage */
            load_weights(w, col + C::STAGE_COLS, 1 - w_at.stage);
        }
        if (w.rows > 0) /* otherwise it multiplies stale data, and the sums are never stored */
            mbarrier_wait(w.ring.full + w_at.stage * 8, w_at.parity);
#pragma unroll
        for (int c = 0; c < C::STAGE_COLS; c++) {
            uint32_t tile = w.ring.data + w_at.stage * C::STAGE_BYTES + c * CUDA_TILE_BYTES;
            uint32_t codes[2][4];
            __half2 scales[2];
            if (col + c >= w.first + 2 && x.next < x.end)
                load_x<C, NT>(a, x);
            load_codes(codes[0], tile, 0);
            load_codes(codes[1], tile, 1);
            block_scales_to_f16(scales, load_block_scales(tile));
            wgmma_wait<1>();
            codes_to_f16(f16[0], codes[0], scales);
            mbarrier_wait(x_full<C>(first_x_stage + x_at.stage), x_at.parity);
            /* The shuffle tells the compiler that the value is uniform in the warp. */
            uint32_t b = __shfl_sync(0xFFFFFFFF, x0 + x_at.stage * (NT * X_F16_TILE_BYTES >> 4), 0);
            wgmma_half_tile<NT>(acc, f16[0], b);
            wgmma_wait<1>();
            if (to_empty)
                mbarrier_arrive(to_empty);
            codes_to_f16(f16[1], codes[1], scales);
            wgmma_half_tile<NT>(acc, f16[1], b + 4 * (X_F16_STEP_BYTES >> 4));
            to_empty = x_empty<C>(first_x_stage + x_at.stage);
            next_stage(x_at, x_stages);
            if (col + c + 1 == w.end)
                break;
        }
        next_stage(w_at, C::STAGES);
    }
    wgmma_wait<0>();
    wgmma_fence_operand<NT>(acc);
}

/* ---- epilogue ---- */

/* One tile row and eight rows of x, in the layout of an mma accumulator. */
template <class C, int NT>
__device__ static inline void store_results(const struct linear_args &a, const struct cta_work &cta,
                                            int row, int n0, float4 sum)
{
    struct tile_ref at = tile_ref_of(a, row);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, rows = a.rows[at.matrix];
    int out = at.row * CUDA_TILE_ROWS + g, first = (int)blockIdx.y * 8 * NT + n0 + 2 * t;
    const float scale = 128.0f * a.scale[at.matrix], v[4] = {sum.x, sum.y, sum.z, sum.w};
    bool add = a.add && a.split_k == 1;
    float *y = a.split_k > 1 ? a.partials + (int64_t)cta.split * a.N * rows : a.y[at.matrix];
    float old[4];
    y += (int64_t)first * rows + out;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        bool any = add && first + e % 2 < a.N && out + e / 2 * 8 < rows;
        old[e] = any ? y[e % 2 * rows + e / 2 * 8] : 0;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (first + e % 2 < a.N && out + e / 2 * 8 < rows)
            y[e % 2 * rows + e / 2 * 8] =
                __fmul_rn(v[e], scale * x_scales<C>()[n0 + 2 * t + e % 2]) + old[e];
}

/* SwiGLU of a tile row of gate and up, packed as x of the next linear. Lanes of g and g + 1
 * exchange values so that each stores two neighbours: rows g and g + 1, or g + 8 and g + 9. */
template <class C, int NT>
__device__ static inline void store_swiglu(const struct linear_args &a, int tile_row, int n0,
                                           float4 gate, float4 up)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
        first = (int)blockIdx.y * 8 * NT + n0 + 2 * t;
    int k = tile_row * CUDA_TILE_ROWS + g / 2 * 2 + g % 2 * 8;
    const float gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
    bool odd = g % 2;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float scale = x_scales<C>()[n0 + 2 * t + e], factor = act_factors<C>()[n0 + 2 * t + e];
        float v[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            v[i] = swiglu(__fmul_rn(gates[2 * i + e], 128.0f * a.scale[0] * scale),
                          __fmul_rn(ups[2 * i + e], 128.0f * a.scale[1] * scale));
            /* Zeros where the factor is NaN: the row's scale is NaN too and spoils the results. */
            v[i] = factor > 0 ? v[i] * factor : 0;
        }
        float mine = odd ? v[1] : v[0], other = __shfl_xor_sync(0xFFFFFFFF, odd ? v[0] : v[1], 4);
        if (first + e < a.N)
            *(__half2 *)x_f16_at(a.act, first + e, k) =
                odd ? __floats2half2_rn(other, mine) : __floats2half2_rn(mine, other);
    }
}

/* Accumulators of a warp to sums [WARPS, WARP_TILE_ROWS, NT, 32]. */
template <class C, int NT>
__device__ static inline void store_sums(float acc[][NT][4], float4 *sums)
{
    float4 *to = sums + threadIdx.x / 32 * C::WARP_TILE_ROWS * NT * 32 + threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < C::WARP_TILE_ROWS; r++)
#pragma unroll
        for (int t = 0; t < NT; t++)
            to[(r * NT + t) * 32] =
                make_float4(acc[r][t][0], acc[r][t][1], acc[r][t][2], acc[r][t][3]);
}

/* Adds the splits of K in order. */
__device__ static inline float4 add_splits(const float4 *from, int splits, int stride)
{
    float4 sum = *from;
#pragma unroll 2
    for (int i = 1; i < splits; i++) {
        float4 v = *(from += stride);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    return sum;
}

template <class C, int NT>
__device__ static inline void reduce_and_store(const struct linear_args &a,
                                               const struct cta_work &cta,
                                               const struct row_block &b, const float4 *sums)
{
    int stride = b.row_groups * C::GROUP_TILE_ROWS * NT * 32, step = 1 + a.gated;
    sums += threadIdx.x % 32;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < b.rows / step * NT; i += C::THREADS / 32) {
        int row = i / NT * step, t = i % NT;
        float4 sum = add_splits(sums + (row * NT + t) * 32, b.warp_split_k, stride);
        if (a.gated)
            store_swiglu<C, NT>(
                a, (b.row + row) / 2, t * 8, sum,
                add_splits(sums + ((row + 1) * NT + t) * 32, b.warp_split_k, stride));
        else
            store_results<C, NT>(a, cta, b.row + row, t * 8, sum);
    }
}

/* Results of a row block. Its shape is computed again, which costs fewer registers than keeping it
 * over the main loop. */
template <class C, int NT>
__device__ static inline void epilogue(const struct linear_args &a, int block, float acc[][NT][4])
{
    const struct cta_work cta = cta_work_of(a, opaque((int)blockIdx.x));
    const struct row_block b = row_block_of<C>(a, cta, block);
    float4 *sums = (float4 *)(shared + C::HEADER_BYTES);
    int warp = threadIdx.x / 32;
    if (b.warp_split_k == 1 && !a.gated) { /* the accumulators are complete */
#pragma unroll
        for (int r = 0; r < C::WARP_TILE_ROWS; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
                if (warp < C::WARPS && warp * C::WARP_TILE_ROWS + r < b.rows)
                    store_results<C, NT>(
                        a, cta, b.row + warp * C::WARP_TILE_ROWS + r, 8 * t,
                        make_float4(acc[r][t][0], acc[r][t][1], acc[r][t][2], acc[r][t][3]));
        return;
    }
    if (warp < C::WARPS)
        store_sums<C, NT>(acc, sums);
    __syncthreads();
    reduce_and_store<C, NT>(a, cta, b, sums);
}

/* ---- the kernel ---- */

/* Grid: CTAs as in linear_decode.cuh; y: blocks of 8 NT rows of x. The register limit leaves room
 * for the small kernels before and after it, so that they can be resident at the same time; only
 * mma.sync with NT > 2 needs them all. */
template <int NT, bool WG>
__global__ static void __maxnreg__(warp_config<WG>::registers(NT))
    k_linear_decode(const __grid_constant__ struct linear_args a)
{
    using C = warp_config<WG>;
#if defined(__CUDA_ARCH__) && !defined(HAVE_WGMMA)
    if constexpr (WG) {
        __trap(); /* never launched, see use_wgmma */
        return;
    }
#endif
    const bool is_x_producer = threadIdx.x / 32 == C::WARPS; /* exists with mma.sync only */
    pdl_trigger();
#pragma unroll 1
    for (int block = 0; block < a.row_blocks; block++) {
        const struct cta_work cta = cta_work_of(a, opaque((int)blockIdx.x));
        const struct row_block b = row_block_of<C>(a, cta, block);
        float acc[C::WARP_TILE_ROWS][NT][4] = {};
        struct weight_pipeline<C> w = {
        };
        if (block > 0)
            invalidate_barriers<C>(a);
        init_barriers<C>(a, b);
        __syncthreads();
        if (!is_x_producer)
            weight_pipeline_init(w, a, cta, b);
#pragma unroll 1
        for (int i = 0; i < C::STAGES; i++)
            load_weights(w, w.first + i * w.step, i);
        if (block == 0) {
            pdl_wait();
            load_row_scales<C, NT>(a);
        }
        if constexpr (WG) {
            struct x_pipeline x = {w.first, w.end, w.split, 1, b.x_stages, {0, 1}};
            if (!w.in_row_group_0)
                x.end = 0; /* row group 0 loads x for its split */
            mma_warpgroup<C, NT>(acc[0], w, a, x);
        } else if (is_x_producer) {
            struct x_pipeline x = {cta.cols.begin, cta.cols.end, 0,
                                   b.warp_split_k, b.x_stages,   {0, 1}};
            while (x.next < x.end)
                load_x<C, NT>(a, x);
        } else {
            mma_warp<C, NT>(acc, w, b.x_stages);
        }
        __syncthreads(); /* rings and x were read; the epilogue reuses their memory */
        epilogue<C, NT>(a, opaque(block), acc);
        if (block + 1 == a.row_blocks)
            break;
#if HAS_BULK_COPY
        /* Orders the epilogue's accesses before the next bulk copies into the same memory. */
        fence_proxy_async();
#endif
        __syncthreads();
    }
}

/* ---- launch ---- */

/* Up to this many rows mma.sync is faster than wgmma. */
#define WARP_MMA_ROWS 16

/* Whether the device is Hopper and the binary has code for sm_90a. */
static bool use_wgmma(const struct nbi_stream *s, const struct nbi_op_linear *a)
{
    return s->cuda->cc == 90 && strstr(NIBBLE_ARCH, "90a") &&
           (a->batch_invariant || a->N > WARP_MMA_ROWS);
}

/* Stages of x that fit. With wgmma room is left for the attention kernel that follows. */
template <bool WG> static int x_stages_for(const struct nbi_stream *s, int n_tiles)
{
    using C = warp_config<WG>;
    int bytes =
        s->cuda->smem_per_cta - C::HEADER_BYTES - C::RINGS_BYTES - (WG ? ATTENTION_SMEM_BYTES : 0);
    int n = bytes / (n_tiles * X_F16_TILE_BYTES);
    return n < X_STAGES_MAX ? n : X_STAGES_MAX;
}

template <int NT, bool WG> static enum nb_status launch(struct nbi_stream *s, struct linear_args &a)
{
    using C = warp_config<WG>;
    int64_t sums = C::WARPS * C::WARP_TILE_ROWS * NT * 512, cols = ceil_div(a.tile_cols, a.split_k);
    a.x_stages = x_stages_for<WG>(s, NT);
    cols = ceil_div(cols, a.max_warp_split_k) * a.max_warp_split_k;
    a.x_stages = (int)(cols < a.x_stages ? cols : a.x_stages);
    int64_t data = C::RINGS_BYTES + a.x_stages * NT * X_F16_TILE_BYTES,
            bytes = C::HEADER_BYTES + (data > sums ? data : sums);
    NBI_BUG_IF(a.x_stages < a.max_warp_split_k || a.max_warp_split_k < 1 ||
               bytes > s->cuda->smem_per_cta);
    /* With one stage the warps that load x would wait for a stage that they have to empty. */
    NBI_BUG_IF(WG && a.x_stages < 2 * a.max_warp_split_k && cols > a.max_warp_split_k);
    dim3 grid((unsigned)(a.row_ctas * a.split_k), (unsigned)ceil_div(a.n_tiles, NT));
    /* An attribute of the kernel, so the same for all streams. */
    CU_TRY(cudaFuncSetAttribute(k_linear_decode<NT, WG>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                s->cuda->smem_per_cta));
    CU_TRY(pdl_launch(s, k_linear_decode<NT, WG>, grid, C::THREADS, (int)bytes, a));
    return NB_OK;
}

/* Takes as many rows of x together as there are, if shared memory allows it. */
template <bool WG> static enum nb_status launch_for(struct nbi_stream *s, struct linear_args &a)
{
    bool large = s->cuda->smem_per_cta >= (160 << 10);
    a.max_warp_split_k = x_stages_for<WG>(s, large ? 8 : 4);
    a.max_warp_split_k = a.max_warp_split_k < warp_config<WG>::WARP_SPLIT_K
                             ? a.max_warp_split_k
                             : warp_config<WG>::WARP_SPLIT_K;
    return a.n_tiles <= 1             ? launch<1, WG>(s, a)
           : a.n_tiles <= 2           ? launch<2, WG>(s, a)
           : a.n_tiles <= 4 || !large ? launch<4, WG>(s, a)
                                      : launch<8, WG>(s, a);
}

/* Matrices, x and y; how they are divided follows. */
static struct linear_args args_of(struct nbi_stream *s, const struct nbi_op_linear *a,
                                  const struct x_f16 &x, bool gated)
{
    struct linear_args p = {};
    for (int i = 0; i < a->count; i++) {
        struct tile_shape t = tiles_of(a->w[i].rows, a->K);
        p.y[i] = at<float>(a->y[i]);
        p.tiles[i] = at<const uint8_t>(a->w[i].data);
        p.rows[i] = (int)a->w[i].rows;
        p.scale[i] = a->w[i].tensor_scale;
        p.first[i] = p.tile_rows;
        p.tile_rows += t.rows;
        p.tile_cols = t.cols;
    }
    p.count = a->count;
    p.x = (const uint8_t *)x.out;
    p.x_scale = x.scale;
    p.partials = (float *)s->workspace;
    p.N = (int)a->N;
    p.n_tiles = (int)ceil_div(a->N, 8);
    p.add = a->add;
    p.gated = gated;
    if (gated)
        p.act = act_f16_of(s, a->N, a->w[0].rows);
    return p;
}

enum nb_status nbi_cuda_linear_packed(struct nbi_stream *s, const struct nbi_op_linear *a,
                                      const struct x_f16 &x, bool gated,
                                      struct splitk_partials *pending)
{
    const bool wg = use_wgmma(s, a);
    struct linear_args p = args_of(s, a, x, gated);
    p.split_k = 1;
    if (a->add && a->count == 1) { /* bounded for N = 64, so that it does not depend on N */
        int64_t fit = NBI_WORKSPACE_BYTES / (NBI_DECODE_LINEAR_ROWS * 4 * a->w[0].rows);
        int rows =
            wg ? (int)ceil_div(p.tile_rows, warp_config<true>::GROUP_TILE_ROWS) : p.tile_rows;
        p.split_k = choose_split_k(rows, p.tile_cols, s->cuda->sms,
                                   (int)(fit < SPLIT_K_MAX ? fit : SPLIT_K_MAX), false);
    }
    int rows = p.tile_rows >> p.gated, ctas = s->cuda->sms / p.split_k;
    p.row_ctas = rows < ctas ? rows : ctas;
    p.row_split = {rows / p.row_ctas, rows % p.row_ctas};
    p.k_split = {p.tile_cols / p.split_k, p.tile_cols % p.split_k};
    p.row_blocks = (int)ceil_div(ceil_div(rows, p.row_ctas) << p.gated,
                                 wg ? warp_config<true>::ROW_BLOCK : warp_config<false>::ROW_BLOCK);
    NBI_BUG_IF(p.tile_cols * (int64_t)warp_config<true>::WARP_SPLIT_K > 100000);
    if (!a->batch_invariant && nbi_cuda_resident_fits(s, &p))
        NBI_TRY(nbi_cuda_linear_resident(s, &p));
    else
        NBI_TRY(wg ? launch_for<true>(s, p) : launch_for<false>(s, p));
    struct splitk_partials partials = {};
    if (p.split_k > 1)
        partials = {p.y[0], p.partials, p.split_k, a->N, a->w[0].rows};
    if (!pending)
        return nbi_cuda_splitk_reduce(s, &partials);
    *pending = partials;
    return NB_OK;
}

bool nbi_cuda_is_decode_linear(const struct nbi_op_linear *a)
{
    bool tiles = true;
    for (int i = 0; i < a->count; i++)
        tiles = tiles && a->w[i].layout == NBI_WEIGHT_TILES;
    return a->matmul == NBI_MATMUL_FAST && tiles && a->N <= NBI_DECODE_LINEAR_ROWS;
}

enum nb_status nbi_cuda_linear_decode(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    NBI_TRY(nbi_cuda_pack_rows(s, a));
    return nbi_cuda_linear_packed(s, a, x_f16_of(s, a->N, a->K), false, NULL);
}
