/* megakernel.cuh - the decode megakernel: data, weight pipeline, exchange between CTAs, products.
 *
 * One CTA of 16 warps stays on each multiprocessor for a whole token. A layer is four matrix-vector
 * products (enum gemv), each distributed over all CTAs; the LM head is a fifth. Every warp does the
 * same for its share of a product: read weight tiles from its ring in shared memory, multiply them
 * with x, which all warps of the CTA share, and reduce.
 *
 * Weights. Each warp has a ring of STAGES stages of two tiles. As soon as it has read a stage it
 * starts the copy of the tiles that it needs STAGES stages later, across the ends of products and
 * layers (struct weight_pipeline). So the copies go on while the warp waits for other CTAs.
 *
 *   the warp multiplies   stage 0         stage 1         stage 2
 *   tile pair 0           0               1 (in flight)   2 (in flight)
 *   tile pair 1           3 (in flight)   1               2 (in flight)
 *   tile pair 2           3 (in flight)   4 (in flight)   2
 *   tile pair 3           3               4 (in flight)   5 (in flight)
 *
 * The mbarrier of a stage completes a phase when its tiles have arrived; the parity to wait for
 * flips each time the warp has gone round the ring.
 *
 * Exchange. CTAs exchange data in global memory, without a grid-wide barrier:
 *
 *   tagged value  64 bits: tag << 32 | value. One writer. Readers poll until the tag is that of the
 *                 current round, of which a layer has two. For q, k, v, softmaxes and SwiGLU.
 *   sum           64 bits: value * 2^26 << 10 | generation << 8 | count of tiles added. Writers add
 *                 atomically; readers poll until the count is complete. For the outputs of o and
 *                 down, which all CTAs read. The sum is an integer, so the order of the additions
 *                 does not change it.
 *
 * Neither needs a fence, because value and tag (or count) travel in one word. Memory is reused: a
 * CTA counts itself in struct grid_state once it has read what it needs. */
#pragma once

#include "backend/cuda/async_copy.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/sort_key.cuh"

#define WARPS              16
#define THREADS            (WARPS * 32)
#define HEAD_DIM           128
#define KV_SPLITS_MAX      16  /* CTAs that share the keys of a head */
#define MIN_SPLIT_KEYS     32  /* keys that a CTA should have at least */
#define SHORT_CONTEXT_KEYS 192 /* up to this many keys are not split: each CTA reads all */
#define PAIR               2   /* tiles in a stage, rows of tiles in a row pair */
#define STAGES             3   /* in the ring of a warp */
#define STAGE_BYTES        (PAIR * CUDA_TILE_BYTES)
#define ROW_PAIR_ROWS      (PAIR * CUDA_TILE_ROWS)
#define TILE_KEYS          16 /* keys or values that a warp loads at a time in split attention */
#define SUM_BUFFERS        4  /* vectors of sums, used in turn */

static_assert(WARPS <= KV_SPLITS_MAX && WARPS % 4 == 0,
              "softmaxes of warps have the slots of splits; squares are read four at a time");

/* The products of a layer; LOGITS follows the last layer. */
enum gemv { QKV, O, GATE_UP, DOWN, LOGITS, GEMVS };

/* The matrices of a layer in the order of the products, and the LM head, which every layer's table
 * repeats. QKV stacks the tile rows of q, k and v; GATE_UP interleaves those of gate and up. */
enum matrix { Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ, LM_HEAD, MATRICES };

struct layer {
    const uint8_t *tiles[MATRICES];
    void *k, *v; /* the KV cache */
    float scale[MATRICES];
};

/* ---- distribution of work ---- */

/* The tiles of a product that a CTA multiplies: a rectangle, in rows and columns of tiles. */
struct cta_work {
    int row, rows, col, cols;
};

/* Two neighbouring tile rows of a CTA's rectangle, or its last one alone.
 *
 * Warps take tiles in pairs: one of each row at the same column, so that x is loaded once for both.
 * In a single row a pair is two neighbouring columns, and with an odd number of columns the last
 * tile is loaded twice. Several warps may share a row pair, and a warp may have several: its sums
 * go to consecutive slots, so a row pair is in slot `slot` of its first warp and in slot 0 of the
 * others. */
struct row_pair {
    int tile[PAIR]; /* index of the CTA's first tile of each row in its matrix */
    uint8_t matrix[PAIR];
    uint8_t rows, first_warp, last_warp, slot;
    uint16_t tile_pairs;
};

/* A warp's share of a product: `count` tile pairs, the first of them in this row pair. */
struct warp_work {
    short row_pair, tile_pair;
    int count;
};

/* A CTA's share of attention: keys [begin, end) for some heads, as number `split` of `splits`. */
struct kv_split {
    int split, splits, head, kv_head, begin, end;
};

/* ---- memory ---- */

/* Offsets in shared memory. */
struct smem_layout {
    int stage_data; /* [WARPS][STAGES][STAGE_BYTES] */
    int stage_full; /* uint64 [WARPS][STAGES]: mbarrier of each stage */
    int layers;     /* struct layer [layers] */
    int x;          /* f32 [C]: the residual stream */
    int x_f16;      /* x of the product; see store_x4 */
    int x_scale;    /* f32 [max_k / 16]: scale of each block of x_f16 */
    int warp_sums;  /* f32 [WARPS][warp_row_pairs][ROW_PAIR_ROWS] */
    int cta_plan;   /* struct cta_work [GEMVS] */
    int row_pairs;  /* struct row_pair [GEMVS][row_pairs] */
    int warp_plan;  /* struct warp_work [GEMVS][WARPS] */
    int squares;    /* f32 [WARPS]: sum of squares of the residual stream, by warp */
    int zeros;      /* 64 bytes */
    int rope;       /* f32 [HEAD_DIM]: cosines, then sines */
    int attention;  /* struct attention_smem */
    int q_operands; /* uint4 [HEAD_DIM / 32][32]: queries as operand B, see store_q_operand */
    int kv_full;    /* uint64 [WARPS][2]: mbarriers of a warp's keys and values */
    int kv_tiles;   /* [kv_warps][kv_warp_bytes]: keys and values, later softmaxes, of each warp */
    int total;
};

/* In global memory. */
struct alignas(8) grid_state {
    unsigned arrived;   /* arrivals of CTAs at grid_arrive, over all tokens */
    unsigned nonfinite; /* run_id of the last token with an addend that was too large or NaN */
};

/* A CUtensorMap of a layer's keys or values, for bulk tensor copies. */
struct alignas(128) tensor_map {
    uint64_t opaque[16];
};

/* Kernel parameters that are the same for every token. */
struct model {
    const struct layer *layers;
    const struct tensor_map *kv_maps; /* [layers][2] */
    const struct cta_work *cta_plans; /* [GEMVS][CTAs] */
    const float *norms;               /* [layers][2][C], then the final norm */
    const float *qk_norms;            /* [layers][2][HEAD_DIM] of q and k */
    int tile_cols[GEMVS];
    int q_end, k_end; /* tile rows of q, and of q and k */
    enum nbi_dtype embed_type, kv_type;
    const float *frequency;
    float rope_scale, eps, inv_C;
    int layer_count, C, F, NH, NKV, V;
    int cta_heads;                 /* query heads that a CTA handles together in split attention */
    int max_splits;                /* CTAs that share the keys of such a group of heads */
    int kv_warps;                  /* warps that read keys and values then, */
    int kv_warp_bytes;             /* each with this much shared memory for them */
    int ctas_per_head;             /* CTAs that have the columns of the same head in o */
    int warp_row_pairs, row_pairs; /* the most that a warp, and a CTA, has of a product */
    int max_k;                     /* the longest x_f16 of a product */
    /* Exchange between CTAs. */
    unsigned long long *sums[SUM_BUFFERS]; /* [C], outputs of o and down alternately */
    uint64_t *qkv;                         /* tagged f32 */
    uint64_t *softmaxes;                   /* tagged f32: partial softmaxes of heads, by split */
    uint64_t *act;                         /* tagged pairs of f16: SwiGLU's output, */
    uint64_t *act_scale;                   /* and the scale of each 16 values */
    uint64_t *logit_keys;                  /* [CTAs][WARPS] sort keys of the best logits; no tags */
    struct grid_state *grid;
    struct smem_layout smem;
};

/* The token's row of the embedding as a kernel parameter, for an embedding in host memory. */
#define EMBED_ROW_MAX 16384

struct embed_row {
    uint8_t bytes[EMBED_ROW_MAX];
};

/* Kernel parameters of one token. */
struct step_args {
    const void *row; /* of the embedding; NULL: it is the kernel parameter */
    int position, kv_row, first, last;
    unsigned epoch;     /* grid_state.arrived before this token */
    unsigned sum_round; /* the first round of sums of this token */
    float *logits;
};

/* ---- shared memory ---- */

static inline int64_t align128(int64_t bytes)
{
    return (bytes + 127) / 128 * 128;
}

/* A partial softmax of a head: weighted sums of values, maximum, denominator. */
#define SOFTMAX_FLOATS (HEAD_DIM + 2)

/* Queries of G heads, this token's key and value, partial softmaxes of a head. */
#define ATTENTION_FLOATS(G) (((G) + 2) * HEAD_DIM + KV_SPLITS_MAX * SOFTMAX_FLOATS)

static struct smem_layout smem_layout_of(const struct model &m)
{
    struct smem_layout p;
    int64_t at = 0;
    p.stage_data = 0;
    p.stage_full = (int)(at += (int64_t)WARPS * STAGES * STAGE_BYTES);
    p.layers = (int)(at += align128(WARPS * STAGES * 8));
    p.x = (int)(at += align128((int64_t)m.layer_count * sizeof(struct layer)));
    p.x_f16 = (int)(at += align128((int64_t)m.C * 4));
    p.x_scale = (int)(at += align128((int64_t)m.max_k * 4));
    p.warp_sums = (int)(at += align128(m.max_k / 16 * 4));
    p.cta_plan = (int)(at += align128((int64_t)WARPS * m.warp_row_pairs * ROW_PAIR_ROWS * 4));
    p.row_pairs = (int)(at += align128(GEMVS * sizeof(struct cta_work)));
    p.warp_plan = (int)(at += align128((int64_t)GEMVS * m.row_pairs * sizeof(struct row_pair)));
    p.squares = (int)(at += align128(GEMVS * WARPS * sizeof(struct warp_work)));
    p.zeros = (int)(at += align128(WARPS * 4));
    p.rope = (int)(at += 128);
    p.attention = (int)(at += align128(HEAD_DIM * 4));
    p.q_operands = (int)(at += align128(ATTENTION_FLOATS(m.cta_heads) * 4));
    p.kv_full = (int)(at += HEAD_DIM / 32 * 32 * 16);
    p.kv_tiles = (int)(at = (at + WARPS * 2 * 8 + 1023) / 1024 * 1024);
    p.total = (int)(at += (int64_t)m.kv_warps * m.kv_warp_bytes);
    return p;
}

template <typename T> __device__ static inline T *smem_at(int offset)
{
    CU_DYNAMIC_SMEM(memory, 1024);
    return (T *)(memory + offset);
}

#define SMEM_LIST(X)                                                                               \
    X(uint8_t, stage_data)                                                                         \
    X(uint64_t, stage_full)                                                                        \
    X(struct layer, layers)                                                                        \
    X(float2, x)                                                                                   \
    X(uint4, x_f16)                                                                                \
    X(float, x_scale)                                                                              \
    X(float, warp_sums)                                                                            \
    X(struct cta_work, cta_plan)                                                                   \
    X(struct row_pair, row_pairs)                                                                  \
    X(struct warp_work, warp_plan)                                                                 \
    X(float4, squares)                                                                             \
    X(uint4, zeros)                                                                                \
    X(float, rope)                                                                                 \
    X(float, attention)                                                                            \
    X(uint4, q_operands)                                                                           \
    X(uint64_t, kv_full)                                                                           \
    X(uint8_t, kv_tiles)

/* ---- a warp's state ---- */

/* Where the next weight tiles of a warp come from. */
struct weight_pipeline {
    const uint8_t *from[PAIR];
    int stride; /* bytes to the next tile pair */
    int layer, gemv;
    int row_pair, tile_pair;
    int tile_pairs; /* in this row pair */
    int duplicate;  /* the tile pair whose second tile repeats the first, or -1 */
    int left;       /* tile pairs of this product */
};

struct context {
    const struct model &m;
    unsigned epoch;     /* grid_state.arrived once all CTAs have arrived as often as this one */
    unsigned sum_round; /* o or down, whichever is next, adds to the sums of this round */
    unsigned run_id;    /* of this token, see grid_state.nonfinite */
    int warp, lane;
    int work_index;               /* which of the 16 shares of each product this warp takes */
    uint32_t ring_at, full_at;    /* shared memory addresses of the warp's stages and mbarriers */
    uint32_t stage_at, stage_bar; /* the stage to read next, and its mbarrier */
    uint32_t stage_phase;         /* parity of the phase to wait for */
    uint32_t kv_phase;            /* the same for keys and values */
    struct weight_pipeline weights;

    /* Shared memory, by the names of struct smem_layout. */
#define X(type, name)                                                                              \
    __device__ type *name() const                                                                  \
    {                                                                                              \
        return smem_at<type>(m.smem.name);                                                         \
    }
    SMEM_LIST(X)
#undef X
};

/* ---- who multiplies what ---- */

struct range {
    int begin, end;
};

__host__ __device__ static inline int row_pairs_of(const struct cta_work &p)
{
    return (p.rows + PAIR - 1) / PAIR;
}

/* Complete row pairs have p.cols tile pairs each. */
__host__ __device__ static inline int tile_pairs_of(const struct cta_work &p)
{
    return p.rows / PAIR * p.cols + p.rows % PAIR * ((p.cols + PAIR - 1) / PAIR);
}

/* Tile pairs of the i-th warp share of a CTA's work, evenly divided. */
__host__ __device__ static inline struct range warp_range(const struct cta_work &p, int i)
{
    int n = tile_pairs_of(p);
    return {n * i / WARPS, n * (i + 1) / WARPS};
}

/* The matrix that tile row *row of a product belongs to; *row becomes the row within it. */
__device__ static inline int find_matrix(const struct model &m, int gemv, int *row)
{
    if (gemv == GATE_UP) {
        int up = *row & 1;
        *row >>= 1;
        return up ? UP_PROJ : GATE_PROJ;
    }
    if (gemv != QKV)
        return gemv == O ? O_PROJ : gemv == DOWN ? DOWN_PROJ : LM_HEAD;
    int matrix = *row < m.q_end ? Q_PROJ : *row < m.k_end ? K_PROJ : V_PROJ;
    *row -= matrix == Q_PROJ ? 0 : matrix == K_PROJ ? m.q_end : m.k_end;
    return matrix;
}

/* Row pair i of a CTA's work. */
__device__ static struct row_pair make_row_pair(const struct model &m, const struct cta_work &p,
                                                int gemv, int i)
{
    struct row_pair pair = {};
    pair.rows = (uint8_t)min(PAIR, p.rows - i * PAIR);
    pair.tile_pairs = (uint16_t)(pair.rows == PAIR ? p.cols : (p.cols + 1) / 2);
#pragma unroll
    for (int r = 0; r < PAIR; r++) {
        int row = p.row + i * PAIR + min(r, pair.rows - 1);
        pair.matrix[r] = (uint8_t)find_matrix(m, gemv, &row);
        pair.tile[r] = row * m.tile_cols[gemv] + p.col;
    }
    bool any = false;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
        struct range r = warp_range(p, w);
        if (r.end <= max(r.begin, i * p.cols) || r.begin >= (i + 1) * p.cols)
            continue;
        if (!any) {
            pair.first_warp = (uint8_t)w;
            pair.slot = (uint8_t)(i - r.begin / p.cols);
        }
        pair.last_warp = (uint8_t)w;
        any = true;
    }
    return pair;
}

/* ---- weight pipeline ---- */

/* Starts the copy of two tiles to a stage; one elected lane does it. */
__device__ static inline void load_stage(uint32_t to, const uint8_t *const from[PAIR], uint32_t bar)
{
#if HAS_BULK_COPY
    bulk_copy_two_elected<CUDA_TILE_BYTES>(to, from[0], from[1], bar);
#endif
}

/* Sets the pipeline's addresses to its current row pair and tile pair. */
__device__ static inline void pipeline_seek(const struct context &c, struct weight_pipeline &p)
{
    struct row_pair pair = c.row_pairs()[p.gemv * c.m.row_pairs + p.row_pair];
    const struct layer &layer = c.layers()[p.layer];
    p.tile_pairs = pair.tile_pairs;
    p.duplicate = -1;
    p.stride = CUDA_TILE_BYTES;
    if (pair.rows < PAIR) {
        p.stride = STAGE_BYTES;
        pair.tile[0] += p.tile_pair;
        pair.tile[1] += p.tile_pair + 1;
        if (c.cta_plan()[p.gemv].cols % PAIR)
            p.duplicate = pair.tile_pairs - 1;
    }
#pragma unroll
    for (int r = 0; r < PAIR; r++)
        p.from[r] =
            layer.tiles[pair.matrix[r]] + (int64_t)(pair.tile[r] + p.tile_pair) * CUDA_TILE_BYTES;
}

/* Goes on to the next product in which the warp has tiles. After the last one `left` stays 0. */
__device__ static inline void pipeline_next_gemv(const struct context &c, struct weight_pipeline &p)
{
#pragma unroll 1
    while (p.left == 0 && p.gemv < GEMVS) {
        bool next_layer = p.gemv == DOWN && p.layer + 1 < c.m.layer_count;
        p.layer += next_layer;
        p.gemv = next_layer ? QKV : p.gemv + 1;
        if (p.gemv == GEMVS)
            return;
        struct warp_work w = c.warp_plan()[p.gemv * WARPS + c.work_index];
        p.row_pair = w.row_pair;
        p.tile_pair = w.tile_pair;
        p.left = w.count;
    }
    pipeline_seek(c, p);
}

/* Starts the copy of the next tile pair, if there is one, to a stage that all lanes have read. */
__device__ static inline void pipeline_load(struct context &c, uint32_t to, uint32_t bar)
{
    struct weight_pipeline &p = c.weights;
    if (p.left == 0)
        return;
    if (p.tile_pair == p.duplicate)
        p.from[1] = p.from[0];
    load_stage(to, p.from, bar);
    p.from[0] += p.stride;
    p.from[1] += p.stride;
    if (--p.left == 0) {
        pipeline_next_gemv(c, p);
    } else if (++p.tile_pair == p.tile_pairs) {
        p.tile_pair = 0;
        p.row_pair++;
        pipeline_seek(c, p);
    }
}

/* ---- arrivals of CTAs ---- */

__device__ static inline struct grid_state load_grid_state(const struct context &c)
{
    uint64_t both = load_relaxed(c.m.grid);
    return {(uint32_t)both, (uint32_t)(both >> 32)};
}

/* This CTA has read what it needed so far. Once all CTAs have arrived, those words may be reused.
 * It says nothing about what the CTA has written, so no fence is needed: readers look at tags and
 * counts. */
__device__ static inline void grid_arrive(struct context &c)
{
    c.epoch += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0)
        add_relaxed_one(&c.m.grid->arrived);
}

/* ---- sums over CTAs ---- */

/* Bits of a sum: 0-7 count of tiles added so far, 8-9 generation, 10-63 value times SUM_SCALE in
 * two's complement. Each addend is below 2^19 in magnitude, and there are at most 255: that fits 54
 * bits (2^19 * 2^26 * 2^8 = 2^53). The generation changes each time a word is reused. */
#define SUM_COUNT_MAX   255
#define SUM_GEN_SHIFT   8
#define SUM_VALUE_SHIFT 10
#define SUM_SCALE       0x1p26f

/* The buffers are cleared to 0 at the start, which is generation 0 of the first rounds. */
#define FIRST_ROUND SUM_BUFFERS

/* The low bits of a sum of a round with `tiles` tiles added. */
__device__ static inline uint32_t sum_header(unsigned round, int tiles)
{
    return ((round / SUM_BUFFERS - 1) & 3) << SUM_GEN_SHIFT | tiles;
}

/* Adds a warp's result over some tiles to output o. One that does not fit is noted instead, before
 * the count says that it was added. */
__device__ static inline void sum_add(const struct context &c, int o, float v, int tiles)
{
    long long n = 0;
    if (fabsf(v) < 0x1p19f) {
        n = __float2ll_rn(v * SUM_SCALE);
    } else {
        store_relaxed(&c.m.grid->nonfinite, c.run_id);
        __threadfence();
    }
    add_relaxed(c.m.sums[c.sum_round % SUM_BUFFERS] + o,
                (unsigned long long)n << SUM_VALUE_SHIFT | tiles);
}

/* Not 0 if one of two sums is incomplete, that is, has not the header expected. */
__device__ static inline uint32_t sums_missing(const unsigned long long v[2], uint32_t header)
{
    return (((uint32_t)v[0] ^ header) | ((uint32_t)v[1] ^ header)) & ((1 << SUM_VALUE_SHIFT) - 1);
}

/* The value of a sum, still times SUM_SCALE and 2^SUM_VALUE_SHIFT. The header is cleared first,
 * since the generation differs from token to token and would change the rounding. */
__device__ static inline float sum_value(unsigned long long v)
{
    const unsigned long long header = (1 << SUM_VALUE_SHIFT) - 1;
    return (float)(long long)(v & ~header);
}

/* The buffers of sums take turns. In round r, while sums of r - 1 are read:
 *
 *   r - 1     complete, being read
 *   r         being added to
 *   r + 1     cleared now: holds round r - 3, which every CTA had read when it arrived after round
 *             r - 2, and the norm before this one waited for all those arrivals
 *
 * Clearing is an atomic addition of (new header - old word), so it may happen before or after the
 * first additions of round r + 1. Each thread of the grid clears one word at most. */
struct stale_sum {
    unsigned long long *at, value; /* at NULL: this thread has none */
};

__device__ static inline struct stale_sum load_stale_sum(const struct context &c)
{
    int i = (int)(threadIdx.x * gridDim.x + blockIdx.x);
    struct stale_sum old = {c.m.sums[(c.sum_round + 1) % SUM_BUFFERS] + i, 0};
    if (i < c.m.C)
        old.value = load_relaxed(old.at);
    else
        old.at = NULL;
    return old;
}

__device__ static inline void clear_stale_sum(const struct context &c, const struct stale_sum &old)
{
    if (old.at)
        add_relaxed(old.at, sum_header(c.sum_round + 1, 0) - old.value);
}

/* ---- tagged values ---- */

/* The tag changes after every round, that is, twice a layer. Cleared memory has tag 0. */
__device__ static inline uint32_t current_tag(const struct context &c)
{
    return c.epoch + 1;
}

__device__ static inline void publish(const struct context &c, uint64_t *to, uint32_t value)
{
    uint64_t both = (uint64_t)current_tag(c) << 32 | value;
    store_relaxed(to, both);
}

/* Loads a tagged value; returns whether its tag is current. */
template <typename V>
__device__ static inline bool poll_one(const struct context &c, V *out, const uint64_t *from)
{
    static_assert(sizeof(V) == 4, "a float or a word of 32 bits");
    uint64_t both = load_relaxed(from);
    uint32_t value = (uint32_t)both;
    *out = *(V *)&value;
    return both >> 32 == current_tag(c);
}

/* Polls COUNT tagged values, `stride` apart, until all are current. */
template <int COUNT>
__device__ static inline void poll(const struct context &c, uint32_t out[COUNT],
                                   const uint64_t *from, int stride)
{
    bool current;
    do {
        current = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            current &= poll_one(c, &out[i], from + i * stride);
    } while (!current);
}

/* ---- x of a product ---- */

/* The exponent of the largest magnitude of some values; 0 if that is not finite. */
__device__ static inline int exponent_of(float amax)
{
    int e = (int)(__float_as_uint(amax) >> 23) - 127;
    return amax < INFINITY ? max(e, -100) : 0;
}

__device__ static inline float power_of_two(int e)
{
    return __uint_as_float((uint32_t)(127 + e) << 23);
}

__device__ static inline uint32_t pack_f16x2(float a, float b)
{
    __half2 h = __floats2half2_rn(a, b);
    return *(uint32_t *)&h;
}

/* Two values of a block of 16 as f16, and the scale of the block, which includes
 * E2M1_PAIR_SCALE. */
struct f16_pair {
    uint32_t bits;
    float scale;
};

/* Converts a block of 16 values, one per lane. Lanes with even numbers have the result. */
__device__ static inline struct f16_pair to_f16_block(float v)
{
    float amax = isfinite(v) ? fabsf(v) : INFINITY; /* fmaxf would drop NaN */
#pragma unroll
    for (int o = 8; o > 0; o >>= 1)
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, o));
    int e = exponent_of(amax);
    float next = __shfl_xor_sync(0xFFFFFFFF, v, 1), up = power_of_two(13 - e);
    return {pack_f16x2(v * up, next * up), power_of_two(e - 13) * E2M1_PAIR_SCALE};
}

/* Stores values 4q to 4q + 3 of x, two pairs (a, b), as operand B of mma.m16n8k16.
 *
 * B has eight columns and there is one x. So column b gets x of block b of the tile and zeros
 * elsewhere: the product comes out as eight sums, one for each block of 16 columns, and block
 * scales need be applied once per sum. A lane that holds column b needs x of that block in one of
 * its two registers and 0 in the other: the first for even blocks, the second for odd ones. The
 * other lanes read zeros. */
__device__ static inline void store_x4(struct context &c, int q, uint32_t a, uint32_t b,
                                       float scale)
{
    c.x_f16()[q] = q >> 2 & 1 ? make_uint4(0, a, 0, b) : make_uint4(a, 0, b, 0);
    if (q % 4 == 0)
        c.x_scale()[q / 4] = scale;
}

/* Zeros from value n on, up to whole tiles. */
__device__ static inline void pad_x(struct context &c, int n, int cols)
{
#pragma unroll 1
    for (int q = n / 4 + threadIdx.x; q < cols * (CUDA_TILE_COLS / 4); q += THREADS)
        store_x4(c, q, 0, 0, 0);
}

#define NORM_UNROLL 3 /* pairs of values of the residual stream that a thread has at a time */

/* A thread's first weights of a norm, which are loaded early. */
struct norm_weights {
    float2 w[NORM_UNROLL];
};

__device__ static inline struct norm_weights load_norm_weights(const struct context &c, int norm,
                                                               int i)
{
    const float2 *w = (const float2 *)(c.m.norms + (int64_t)norm * c.m.C);
    struct norm_weights out;
#pragma unroll
    for (int j = 0; j < NORM_UNROLL; j++)
        out.w[j] = __ldg(w + min(i + j * THREADS, c.m.C / 2 - 1));
    return out;
}

/* x = RMSNorm of the residual stream, without the division by the root mean square, which the
 * epilogue applies to the product (rmsnorm_rstd). With `sums`, first adds the output of o or down
 * to the residual stream, of which every CTA keeps a copy.
 *
 * Eight lanes have a block of 16 values. All warps of all CTAs do this at the same time while the
 * memory waits, so every instruction counts. */
__device__ static void x_from_norm(struct context &c, bool sums, int norm, struct norm_weights w)
{
    const unsigned long long *from = c.m.sums[(c.sum_round - 1) % SUM_BUFFERS];
    const uint32_t header = sum_header(c.sum_round - 1, c.m.tile_cols[norm % 2 ? O : DOWN]);
    const int count = c.m.C / 2;
    const bool odd_block = threadIdx.x & 8; /* see store_x4 */
    float sum = 0;
    struct stale_sum old = {};
    struct grid_state grid = {};
    if (sums)
        old = load_stale_sum(c);
#pragma unroll 1
    for (int i = threadIdx.x; i - c.lane < count; i += NORM_UNROLL * THREADS) {
        unsigned long long added[NORM_UNROLL][2] = {};
        float2 v[NORM_UNROLL], x[NORM_UNROLL];
        float amax[NORM_UNROLL];
#pragma unroll
        for (int j = 0; j < NORM_UNROLL; j++)
            x[j] = i + j * THREADS < count ? c.x()[i + j * THREADS] : make_float2(0, 0);
        for (uint32_t missing = sums; missing;) { /* issues all loads before it checks one */
#pragma unroll
            for (int j = 0; j < NORM_UNROLL; j++)
                load_relaxed_two(from + 2 * min(i + j * THREADS, count - 1), added[j]);
            if (threadIdx.x == 0)
                grid = load_grid_state(c);
            missing = 0;
#pragma unroll
            for (int j = 0; j < NORM_UNROLL; j++)
                missing |= sums_missing(added[j], header);
        }
        if (i >= NORM_UNROLL * THREADS)
            w = load_norm_weights(c, norm, i);
#pragma unroll
        for (int j = 0; j < NORM_UNROLL; j++) {
            float by = i + j * THREADS < count ? 1 / SUM_SCALE / (1 << SUM_VALUE_SHIFT) : 0;
            x[j].x = fmaf(sum_value(added[j][0]), by, x[j].x);
            x[j].y = fmaf(sum_value(added[j][1]), by, x[j].y);
            sum += x[j].x * x[j].x + x[j].y * x[j].y;
            v[j] = make_float2(x[j].x * w.w[j].x, x[j].y * w.w[j].y);
            amax[j] = fmaxf(fabsf(v[j].x), fabsf(v[j].y)); /* a NaN reaches x_f16 all the same */
        }
#pragma unroll
        for (int o = 1; o < 8; o <<= 1)
#pragma unroll
            for (int j = 0; j < NORM_UNROLL; j++)
                amax[j] = fmaxf(amax[j], __shfl_xor_sync(0xFFFFFFFF, amax[j], o));
#pragma unroll
        for (int j = 0; j < NORM_UNROLL; j++) {
            uint32_t at = i + j * THREADS, e = max(__float_as_uint(amax[j]) >> 23, 27u);
            float up = __uint_as_float((2 * 127 + 13 - e) << 23);
            uint32_t two = pack_f16x2(v[j].x * up, v[j].y * up);
            if (at < count) {
                c.x()[at] = x[j];
                ((uint2 *)c.x_f16())[at] = make_uint2(odd_block ? 0 : two, odd_block ? two : 0);
            }
            if (at < count && threadIdx.x % 8 == 0)
                c.x_scale()[at / 8] = __uint_as_float((e + E2M1_PAIR_EXPONENT - 13) << 23);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0 && sums) {
        while ((int)(grid.arrived - c.epoch) < 0) /* CTAs that have added arrive soon after */
            grid = load_grid_state(c);
        if (norm == 2 * c.m.layer_count) { /* the last chance to see a non-finite addend */
            __threadfence();
            grid = load_grid_state(c);
        }
        sum = grid.nonfinite == c.run_id ? NAN : sum;
    }
    if (c.lane == 0)
        ((float *)c.squares())[c.warp] = sum;
    pad_x(c, c.m.C, c.m.tile_cols[QKV]);
    clear_stale_sum(c, old);
}

/* x of down = the columns of SwiGLU's output that this CTA multiplies. */
__device__ static void x_from_act(struct context &c)
{
    const struct cta_work own = c.cta_plan()[DOWN];
    int begin = own.col * CUDA_TILE_COLS, n = min(own.cols * CUDA_TILE_COLS, c.m.F - begin);
#pragma unroll 1
    for (int q = threadIdx.x; q < n / 4; q += THREADS) {
        const uint64_t *act = c.m.act + begin / 2 + 2 * q;
        uint32_t two[2];
        float scale;
        bool current;
        do {
            current = poll_one(c, &two[0], act);
            current &= poll_one(c, &two[1], act + 1);
            current &= poll_one(c, &scale, c.m.act_scale + begin / 16 + q / 4);
        } while (!current);
        store_x4(c, q, two[0], two[1], scale);
    }
    pad_x(c, n, own.cols);
}

/* ---- products: main loop ---- */

/* Two E4M3 scales. */
__device__ static inline float2 e4m3_pair(uint32_t two)
{
    return __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3)));
}

/* Shared memory addresses of a lane's x and scales for a tile. */
struct x_cursor {
    uint32_t x, scales;
};

/* Multiplies the two tiles of a stage with x and adds the lane's two blocks of rows g and g + 8 to
 * sum: to sum[0] and sum[1] for tiles of TWO_ROWS, which share x, else all to sum[0]. */
template <bool TWO_ROWS>
__device__ static inline void mma_tiles(float2 sum[PAIR], uint32_t tile, uint32_t lane,
                                        struct x_cursor first, struct x_cursor second)
{
    const int stride = CUDA_TILE_BYTES;
    const uint32_t s[PAIR] = {ld_shared(tile + 1024 + 4 * lane),
                              ld_shared(tile + 1024 + 4 * lane + stride)};
    float acc[PAIR][4] = {};
    float2 scale = ld_shared_v2(first.scales),
           scale2 = TWO_ROWS ? scale : ld_shared_v2(second.scales);
    tile += 16 * lane;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 code[PAIR] = {ld_shared_v4(tile + half * 512),
                            ld_shared_v4(tile + half * 512 + stride)};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 x = ld_shared_v4(first.x + half * 32 + i * 16);
            uint4 x2 = TWO_ROWS ? x : ld_shared_v4(second.x + half * 32 + i * 16);
            const uint32_t b[PAIR][4] = {{x.x, x.y, x.z, x.w}, {x2.x, x2.y, x2.z, x2.w}};
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int r = 0; r < PAIR; r++) {
                    const uint32_t a[4] = {
                        e2m1_pair(code[r].x, 2 * i + p), e2m1_pair(code[r].y, 2 * i + p),
                        e2m1_pair(code[r].z, 2 * i + p), e2m1_pair(code[r].w, 2 * i + p)};
                    mma<false>(acc[r], a, b[r][2 * p], b[r][2 * p + 1]);
                }
        }
    }
#pragma unroll
    for (int r = 0; r < PAIR; r++) {
        float2 low = e4m3_pair(s[r] & 0xFFFF), high = e4m3_pair(s[r] >> 16), f = r ? scale2 : scale;
        float2 &to = sum[TWO_ROWS ? r : 0];
        to.x += acc[r][0] * (low.x * f.x) + acc[r][1] * (high.x * f.y);
        to.y += acc[r][2] * (low.y * f.x) + acc[r][3] * (high.y * f.y);
    }
}

/* The factor of RMSNorm, from the squares that x_from_norm left. */
__device__ static inline float rmsnorm_rstd(const struct context &c)
{
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS / 4; i++) {
        float4 v = c.squares()[i];
        sum += (v.x + v.y) + (v.z + v.w);
    }
    return rsqrt_approx(sum * c.m.inv_C + c.m.eps);
}

/* Adds up a row pair's sums over the four lanes that share a row. Lane 4g + t gets the sum of row
 * g + 8 (t % 2) of tile row t / 2. */
__device__ static inline float reduce_quad(const float2 sum[PAIR], int lane)
{
    bool low_row = lane & 1, second = lane & 2;
    float a = (low_row ? sum[0].y : sum[0].x) +
              __shfl_xor_sync(0xFFFFFFFF, low_row ? sum[0].x : sum[0].y, 1);
    float b = (low_row ? sum[1].y : sum[1].x) +
              __shfl_xor_sync(0xFFFFFFFF, low_row ? sum[1].x : sum[1].y, 1);
    return (second ? b : a) + __shfl_xor_sync(0xFFFFFFFF, second ? a : b, 2);
}

/* Stores a warp's sums of a row pair: to its slot, to be reduced over the CTA's warps, or for o and
 * down, times `scale`, to the sums over all CTAs. */
__device__ static inline void store_warp_sum(struct context &c, int gemv, float v, int slot,
                                             int row_pair, float scale, int tiles)
{
    const struct cta_work own = c.cta_plan()[gemv];
    int row = c.lane >> 1 & 1, in = (c.lane >> 2) + 8 * (c.lane & 1);
    if (gemv != O && gemv != DOWN)
        c.warp_sums()[(c.work_index * c.m.warp_row_pairs + slot) * ROW_PAIR_ROWS +
                      row * CUDA_TILE_ROWS + in] = v;
    else if (PAIR * row_pair + row < own.rows)
        sum_add(c, (own.row + PAIR * row_pair + row) * CUDA_TILE_ROWS + in, v * scale, tiles);
}

/* Multiplies the warp's tiles of a product. */
__device__ static void gemv_mainloop(struct context &c, int gemv, float scale)
{
    const int cols = c.cta_plan()[gemv].cols;
    const struct warp_work w = c.warp_plan()[gemv * WARPS + c.work_index];
    int left = w.count, row_pair = w.row_pair, tile_pair = w.tile_pair;
    /* Lane 4g + t has column g of operand B: x of block g if that is one of its two, else zeros. */
    int g = c.lane >> 2, t = c.lane & 3, stride = g >> 1 == t ? 512 : 0;
    uint32_t zeros = smem_addr(c.zeros()), x_base = stride ? smem_addr(c.x_f16() + g * 4) : zeros;
    uint32_t scales = smem_addr(c.x_scale()) + 8 * t;
#pragma unroll 1
    do { /* a warp without tiles stores zeros */
        const struct row_pair pair = c.row_pairs()[gemv * c.m.row_pairs + row_pair];
        bool single_row = pair.rows < PAIR;
        int col = single_row ? PAIR * tile_pair : tile_pair;
        int count = min(left, pair.tile_pairs - tile_pair);
        struct x_cursor x = {x_base + col * stride, scales + col * 32};
        float2 sum[PAIR] = {};
        int tiles = single_row ? min(PAIR * count, cols - col) : count;
        left -= count;
#pragma unroll 1
        for (; count > 0; count--) {
            while (!mbarrier_try_wait(c.stage_bar, c.stage_phase))
                continue;
            if (!single_row) {
                mma_tiles<true>(sum, c.stage_at, c.lane, x, x);
            } else {
                struct x_cursor second = {x.x + stride, x.scales + 32};
                if (++col == cols) /* the second tile repeats the first: times 0 */
                    second = {zeros, x.scales};
                mma_tiles<false>(sum, c.stage_at, c.lane, x, second);
                x = {x.x + stride, x.scales + 32};
                col++;
            }
            x = {x.x + stride, x.scales + 32};
            __syncwarp();
            pipeline_load(c, c.stage_at, c.stage_bar);
            c.stage_at += STAGE_BYTES;
            c.stage_bar += 8;
            if (c.stage_bar == c.full_at + STAGES * 8) {
                c.stage_at = c.ring_at;
                c.stage_bar = c.full_at;
                c.stage_phase ^= 1;
            }
        }
        if (w.count > 0 || (gemv != O && gemv != DOWN))
            store_warp_sum(c, gemv, reduce_quad(sum, c.lane), row_pair - w.row_pair, row_pair,
                           scale, tiles);
        tile_pair = 0;
        row_pair++;
    } while (left > 0);
}

/* ---- products: epilogue ---- */

/* Row c.lane of a row pair, summed over the CTA's warps. */
__device__ static inline float reduce_warps(const struct context &c, const struct row_pair &pair)
{
    const float *sums = c.warp_sums() + c.lane;
    int stride = c.m.warp_row_pairs * ROW_PAIR_ROWS;
    float v = sums[pair.first_warp * stride + pair.slot * ROW_PAIR_ROWS];
#pragma unroll 2
    for (int w = pair.first_warp + 1; w <= pair.last_warp; w++)
        v += sums[w * stride];
    return v;
}

/* Publishes q, k and v, or SwiGLU of gate and up, or writes logits and each warp's best one. A warp
 * takes a row pair at a time. o and down have no epilogue: their sums are over CTAs. */
__device__ static void gemv_epilogue(struct context &c, int gemv, int layer, float *logits)
{
    const struct cta_work own = c.cta_plan()[gemv];
    float rstd = rmsnorm_rstd(c);
    uint64_t best = 0;
#pragma unroll 1
    for (int i = c.warp; i < row_pairs_of(own); i += WARPS) {
        const struct row_pair &pair = c.row_pairs()[gemv * c.m.row_pairs + i];
        float v = reduce_warps(c, pair) * rstd * c.layers()[layer].scale[pair.matrix[c.lane >> 4]];
        int at = (own.row + PAIR * i) * CUDA_TILE_ROWS + c.lane;
        bool any = c.lane < pair.rows * CUDA_TILE_ROWS;
        if (gemv == QKV && any)
            publish(c, c.m.qkv + at, __float_as_uint(v));
        if (gemv == LOGITS && any && at < c.m.V) {
            logits[at] = v;
            best = max(best, sort_key_of(v, at));
        }
        if (gemv != GATE_UP)
            continue;
        float up = __shfl_xor_sync(0xFFFFFFFF, v, CUDA_TILE_ROWS);
        struct f16_pair two = to_f16_block(__fdividef(v, 1 + __expf(-v)) * up);
        at = (own.row / PAIR + i) * CUDA_TILE_ROWS + c.lane;
        if (c.lane < CUDA_TILE_ROWS && c.lane % 2 == 0)
            publish(c, c.m.act + at / 2, two.bits);
        if (c.lane == 0)
            publish(c, c.m.act_scale + at / CUDA_TILE_ROWS, __float_as_uint(two.scale));
    }
    if (gemv != LOGITS)
        return;
    best = warp_max_key(best);
    if (c.lane == 0)
        c.m.logit_keys[blockIdx.x * WARPS + c.warp] = best;
}
