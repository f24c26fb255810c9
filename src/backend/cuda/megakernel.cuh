/* megakernel.cuh - the kernel of token.cu: what it keeps where, how weights come in, products. */
#pragma once

#include "backend/cuda/async_copy.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/sort_key.cuh"

#define WARPS       16
#define THREADS     (WARPS * 32)
#define HEAD        128 /* size of a head */
#define SPLITS_MAX  16  /* blocks that share the rows of a store; warps have places there too */
#define SPLIT_ROWS  32  /* of a store, that a block should have at least in attention */
#define FEW_ROWS    192 /* of a store, that every block of a head goes through by itself */
#define PAIR        2   /* tiles of a stage of the ring */
#define RING        3   /* stages of a warp that are on their way */
#define STAGE_BYTES (PAIR * CUDA_TILE_BYTES)
#define LINE_ROWS   (PAIR * CUDA_TILE_ROWS)
#define TILE_KEYS   16 /* keys or values that a warp has at a time, over many rows */
#define SUMS        4  /* places of what blocks add up, in turn */

static_assert(WARPS <= SPLITS_MAX && WARPS % 4 == 0, "places of softmaxes, and of squares by four");

enum step { QKV, O, GATE_UP, DOWN, LOGITS, STEPS };

/* Matrices of a layer, in the order of the steps, and the head, which is the same in all; q, k and
 * v lie one behind the other as rows of tiles, gate and up take turns. */
enum matrix { Q_, K_, V_, O_, GATE_, UP_, DOWN_, HEAD_, MATRICES };

struct layer {
    const uint8_t *tiles[MATRICES];
    void *k, *v; /* the stores */
    float scale[MATRICES];
};

/* Tiles of a step for a block. */
struct part {
    int row, rows, col, cols;
};

/* Two neighbouring rows of tiles of a block, or its last one alone: where they are, and what its
 * warps have of them: the first of them in its slot `slot`, those behind it up to the last in slot
 * 0. Tiles go two at a time, which is a unit: one of each row, or two neighbours of a row that is
 * alone, or the last of its tiles twice. */
struct line {
    int tile[PAIR]; /* the block's first in each row, of its matrix */
    uint8_t matrix[PAIR];
    uint8_t rows, first, last, slot;
    uint16_t units;
};

/* What a warp has of a step: so many units, from one of a line on. */
struct work {
    short line, unit;
    int left;
};

/* What a block does in attention: rows [begin, end) of the store for some heads, as the split-th of
 * those that are used. */
struct rows_part {
    int split, used, head, kv, begin, end;
};

/* Pieces of shared memory, as offsets. */
struct places {
    int ring;     /* [WARPS][RING][STAGE_BYTES] */
    int full;     /* uint64 [WARPS][RING]: that a stage has arrived */
    int layers;   /* struct layer [layers] */
    int x;        /* f32 [C]: the residual stream */
    int x16;      /* x of a product: for each two f16, whichever half of B they are of, and zeros */
    int scale;    /* f32 [longest / 16]: what those are to be times */
    int slots;    /* f32 [WARPS][slots][LINE_ROWS]: sums of a warp for its lines, from its first */
    int own;      /* struct part [STEPS] */
    int lines;    /* struct line [STEPS][line_count] */
    int work;     /* struct work [STEPS][WARPS] */
    int squares;  /* f32 [WARPS]: of the residual stream, by warp */
    int zeros;    /* 64 bytes */
    int turn;     /* f32 [HEAD]: cos, sin */
    int attend;   /* see token_attention.cuh */
    int operands; /* uint4 [HEAD / 32][32]: queries, see token_many.cuh */
    int arrived;  /* uint64 [WARPS][2]: that keys or values of a warp have */
    int rows;     /* [readers][slot_pair]: keys and values, and then softmaxes, by warp */
    int total;
};

/* How often blocks have arrived; the last run in which something was too large or not finite. */
struct alignas(8) news {
    unsigned arrived, odd;
};

/* Keys or values of a layer, as copies of boxes know them. */
struct alignas(128) store_map {
    uint64_t opaque[16];
};

struct model {
    const struct layer *layers;
    const struct store_map *maps; /* [layers][2] */
    const struct part *parts;     /* [STEPS][blocks] */
    const float *norms;           /* [layers][2][C], then the last one */
    const float *head_norms;      /* [layers][2][HEAD] of q and k */
    int tile_cols[STEPS];
    int q_end, k_end; /* rows of tiles of q, and of q and k */
    enum nbi_dtype embed_type, store;
    const float *frequency;
    float rope_scale, eps, share; /* 1 / C */
    int layer_count, C, F, NH, NKV, V;
    int together;          /* heads of a block in attention over many rows */
    int splits;            /* blocks that share such heads, at most */
    int readers;           /* warps that read rows then, */
    int slot_pair;         /* each with so many bytes for keys and values */
    int each;              /* blocks that have the same head in o */
    int slots, line_count; /* lines in a step, that a warp has and that a block has */
    int longest;
    /* What blocks give each other. */
    unsigned long long *sums[SUMS]; /* [C] of o and of down in turn */
    /* The lower half of each is a value, the upper one the tag of the layer that it is of. */
    uint64_t *qkv;       /* f32 */
    uint64_t *shared;    /* f32: softmaxes of heads over the rows of a block */
    uint64_t *act;       /* two f16 each, */
    uint64_t *act_scale; /* and what sixteen of them are to be times */
    uint64_t *best;      /* [blocks][WARPS]: the best of the logits, as keys; without tags */
    struct news *news;
    struct places at;
};

/* The token's row of the embedding, where that is on the host. */
#define ROW_MAX 16384

struct row {
    uint8_t bytes[ROW_MAX];
};

struct step_args {
    const void *row; /* of the embedding, or NULL */
    int position, slot, first, last;
    unsigned epoch; /* arrivals before */
    unsigned round; /* of sums */
    float *logits;
};

/* ---- shared memory ---- */

static inline int64_t lines(int64_t bytes)
{
    return (bytes + 127) / 128 * 128;
}

#define PART_FLOATS (HEAD + 2) /* a softmax: sums of values, maximum, denominator */

/* Queries, this token's key and value, softmaxes of a head. */
#define ATTEND_FLOATS(G) (((G) + 2) * HEAD + SPLITS_MAX * PART_FLOATS)

static struct places places_of(const struct model &m)
{
    struct places p;
    int64_t at = 0;
    p.ring = 0;
    p.full = (int)(at += (int64_t)WARPS * RING * STAGE_BYTES);
    p.layers = (int)(at += lines(WARPS * RING * 8));
    p.x = (int)(at += lines((int64_t)m.layer_count * sizeof(struct layer)));
    p.x16 = (int)(at += lines((int64_t)m.C * 4));
    p.scale = (int)(at += lines((int64_t)m.longest * 4));
    p.slots = (int)(at += lines(m.longest / 16 * 4));
    p.own = (int)(at += lines((int64_t)WARPS * m.slots * LINE_ROWS * 4));
    p.lines = (int)(at += lines(STEPS * sizeof(struct part)));
    p.work = (int)(at += lines((int64_t)STEPS * m.line_count * sizeof(struct line)));
    p.squares = (int)(at += lines(STEPS * WARPS * sizeof(struct work)));
    p.zeros = (int)(at += lines(WARPS * 4));
    p.turn = (int)(at += 128);
    p.attend = (int)(at += lines(HEAD * 4));
    p.operands = (int)(at += lines(ATTEND_FLOATS(m.together) * 4));
    p.arrived = (int)(at += HEAD / 32 * 32 * 16);
    p.rows = (int)(at = (at + WARPS * 2 * 8 + 1023) / 1024 * 1024);
    p.total = (int)(at += (int64_t)m.readers * m.slot_pair);
    return p;
}

template <typename T> __device__ static inline T *shared_piece(int at)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    return (T *)(memory + at);
}

#define SHARED_LIST(X)                                                                             \
    X(uint8_t, ring)                                                                               \
    X(uint64_t, full)                                                                              \
    X(struct layer, layers)                                                                        \
    X(float2, x)                                                                                   \
    X(uint4, x16)                                                                                  \
    X(float, scale)                                                                                \
    X(float, slots)                                                                                \
    X(struct part, own)                                                                            \
    X(struct line, lines)                                                                          \
    X(struct work, work)                                                                           \
    X(float4, squares)                                                                             \
    X(uint4, zeros)                                                                                \
    X(float, turn)                                                                                 \
    X(float, attend)                                                                               \
    X(uint4, operands)                                                                             \
    X(uint64_t, arrived)                                                                           \
    X(uint8_t, rows)

/* Where the next tiles of a warp come from. */
struct feed {
    const uint8_t *from[PAIR];
    int stride; /* to those behind them, in bytes */
    int layer, step;
    int line, unit; /* of the line, */
    int units;      /* which has so many, */
    int twice;      /* and where there is one tile twice, or -1 */
    int left;       /* units of the step */
};

struct context {
    const struct model &m;
    unsigned epoch;
    unsigned round; /* of sums, that this step adds to */
    unsigned run;   /* this token's, see news */
    int warp, lane;
    int share;                 /* which of the warps' shares of work it has */
    uint32_t ring_at, full_at; /* the warp's, in shared memory */
    uint32_t tile_at, bar_at;  /* the stage that is read next, and its barrier */
    uint32_t parity;           /* of the round of the ring that is read */
    uint32_t rows_parity;      /* of keys and values that are read next */
    struct feed feed;

    /* Shared memory, by the names of struct places. */
#define X(type, name)                                                                              \
    __device__ type *name() const                                                                  \
    {                                                                                              \
        return shared_piece<type>(m.at.name);                                                      \
    }
    SHARED_LIST(X)
#undef X
};

/* ---- who has what ---- */

struct range {
    int begin, end;
};

__host__ __device__ static inline int lines_of(const struct part &p)
{
    return (p.rows + PAIR - 1) / PAIR;
}

/* Of the lines before the last one p.cols each. */
__host__ __device__ static inline int units_of(const struct part &p)
{
    return p.rows / PAIR * p.cols + p.rows % PAIR * ((p.cols + PAIR - 1) / PAIR);
}

/* The i-th of the warps' shares of a part, as units. */
__host__ __device__ static inline struct range range_of(const struct part &p, int i)
{
    int n = units_of(p);
    return {n * i / WARPS, n * (i + 1) / WARPS};
}

/* The matrix that row `row` of tiles of a step is of, and where in it. */
__device__ static inline int find_row(const struct model &m, int step, int *row)
{
    if (step == GATE_UP) {
        int up = *row & 1;
        *row >>= 1;
        return up ? UP_ : GATE_;
    }
    if (step != QKV)
        return step == O ? O_ : step == DOWN ? DOWN_ : HEAD_;
    int matrix = *row < m.q_end ? Q_ : *row < m.k_end ? K_ : V_;
    *row -= matrix == Q_ ? 0 : matrix == K_ ? m.q_end : m.k_end;
    return matrix;
}

/* Line i of the block's part of a step. */
__device__ static struct line line_of(const struct model &m, const struct part &p, int step, int i)
{
    struct line l = {};
    l.rows = (uint8_t)min(PAIR, p.rows - i * PAIR);
    l.units = (uint16_t)(l.rows == PAIR ? p.cols : (p.cols + 1) / 2);
#pragma unroll
    for (int r = 0; r < PAIR; r++) {
        int row = p.row + i * PAIR + min(r, l.rows - 1);
        l.matrix[r] = (uint8_t)find_row(m, step, &row);
        l.tile[r] = row * m.tile_cols[step] + p.col;
    }
    bool any = false;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
        struct range r = range_of(p, w);
        if (r.end <= max(r.begin, i * p.cols) || r.begin >= (i + 1) * p.cols)
            continue;
        if (!any) {
            l.first = (uint8_t)w;
            l.slot = (uint8_t)(i - r.begin / p.cols);
        }
        l.last = (uint8_t)w;
        any = true;
    }
    return l;
}

/* ---- weights on their way ---- */

/* Two tiles, by one lane of the warp. */
__device__ static inline void copy_stage(uint32_t to, const uint8_t *const from[PAIR], uint32_t bar)
{
#if HAS_BULK_COPY
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %5;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %4, [%3], %6;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0 + %4], [%2], %4, [%3], %6;\n"
                 "}" ::"r"(to),
                 "l"(from[0]), "l"(from[1]), "r"(bar), "n"(CUDA_TILE_BYTES), "n"(STAGE_BYTES),
                 "l"(L2_EVICT_FIRST)
                 : "memory");
#endif
}

/* Asks for something that will be wanted soon. */
__device__ static inline void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* The feed is at some unit of a line. */
__device__ static inline void feed_line(const struct context &c, struct feed &f)
{
    struct line l = c.lines()[f.step * c.m.line_count + f.line];
    const struct layer &layer = c.layers()[f.layer];
    f.units = l.units;
    f.twice = -1;
    f.stride = CUDA_TILE_BYTES;
    if (l.rows < PAIR) {
        f.stride = STAGE_BYTES;
        l.tile[0] += f.unit;
        l.tile[1] += f.unit + 1;
        if (c.own()[f.step].cols % PAIR)
            f.twice = l.units - 1;
    }
#pragma unroll
    for (int r = 0; r < PAIR; r++)
        f.from[r] = layer.tiles[l.matrix[r]] + (int64_t)(l.tile[r] + f.unit) * CUDA_TILE_BYTES;
}

/* On to the next step in which the warp has something; behind the last one left stays 0. */
__device__ static inline void feed_on(const struct context &c, struct feed &f)
{
#pragma unroll 1
    while (f.left == 0 && f.step < STEPS) {
        bool again = f.step == DOWN && f.layer + 1 < c.m.layer_count;
        f.layer += again;
        f.step = again ? QKV : f.step + 1;
        if (f.step == STEPS)
            return;
        struct work w = c.work()[f.step * WARPS + c.share];
        f.line = w.line;
        f.unit = w.unit;
        f.left = w.left;
    }
    feed_line(c, f);
}

/* Asks for one more stage of the ring, if there is something left. All lanes have read the last
 * one. */
__device__ static inline void fetch_stage(struct context &c, uint32_t to, uint32_t bar)
{
    struct feed &f = c.feed;
    if (f.left == 0)
        return;
    if (f.unit == f.twice)
        f.from[1] = f.from[0];
    copy_stage(to, f.from, bar);
    f.from[0] += f.stride;
    f.from[1] += f.stride;
    if (--f.left == 0) {
        feed_on(c, f);
    } else if (++f.unit == f.units) {
        f.unit = 0;
        f.line++;
        feed_line(c, f);
    }
}

/* ---- blocks together ---- */

__device__ static inline struct news hear_news(const struct context &c)
{
    uint64_t both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(c.m.news) : "memory");
    return {(uint32_t)both, (uint32_t)(both >> 32)};
}

/* What any block had to read before arrive it has read when all have arrived. Nothing is said of
 * what it wrote, so that there is no fence: that has a tag, or a count of what was added up. */
__device__ static inline void arrive_all(struct context &c)
{
    c.epoch += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&c.m.news->arrived)
                     : "memory");
}

/* Sums over blocks are of integers, so that their order does not matter. From the lowest bit: how
 * many tiles they are of, up to 255; the generation, which is another each time that the place is
 * used; the value times 2^26. All that is added is below 2^19, so that it fits. */
#define SUM_TILES   255
#define SUM_GEN_AT  8
#define SUM_VALUE   10
#define SUM_UNIT    0x1p26f
#define FIRST_ROUND SUMS /* finds its places cleared */

/* What a sum of a round looks like below its value. */
__device__ static inline uint32_t sum_state(unsigned round, int tiles)
{
    return ((round / SUMS - 1) & 3) << SUM_GEN_AT | tiles;
}

__device__ static inline void add_word(unsigned long long *to, unsigned long long word)
{
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/* A warp's sum over some tiles. */
__device__ static inline void add_to_sum(const struct context &c, int o, float v, int tiles)
{
    long long n = 0;
    if (fabsf(v) < 0x1p19f) {
        n = __float2ll_rn(v * SUM_UNIT);
    } else {
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(&c.m.news->odd), "r"(c.run)
                     : "memory");
        __threadfence();
    }
    add_word(c.m.sums[c.round % SUMS] + o, (unsigned long long)n << SUM_VALUE | tiles);
}

/* Two sums. */
__device__ static inline void load_sums(const unsigned long long *from, unsigned long long out[2])
{
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(out[0]), "=l"(out[1])
                 : "l"(from)
                 : "memory");
}

/* Whether they are not complete: other bits below the value. */
__device__ static inline uint32_t sums_lack(const unsigned long long v[2], uint32_t state)
{
    return (((uint32_t)v[0] ^ state) | ((uint32_t)v[1] ^ state)) & ((1 << SUM_VALUE) - 1);
}

/* What they are in all: with the bits below, which differ from time to time, it would not be the
 * same each time. */
__device__ static inline float sum_value(unsigned long long v)
{
    const unsigned long long below = (1 << SUM_VALUE) - 1;
    return (float)(long long)(v & ~below);
}

/* A sum of three rounds ago, which all had read when they arrived behind the round after it: the
 * norm before this one has waited for that. It is cleared for the round after this one; that is
 * added to it, so that it need not be done by then. */
struct old_sum {
    unsigned long long *at, value; /* at NULL: this thread has none */
};

__device__ static inline struct old_sum old_sum_of(const struct context &c)
{
    int i = (int)(threadIdx.x * gridDim.x + blockIdx.x);
    struct old_sum old = {c.m.sums[(c.round + 1) % SUMS] + i, 0};
    if (i < c.m.C)
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                     : "=l"(old.value)
                     : "l"(old.at)
                     : "memory");
    else
        old.at = NULL;
    return old;
}

__device__ static inline void clear_sum(const struct context &c, const struct old_sum &old)
{
    if (old.at)
        add_word(old.at, sum_state(c.round + 1, 0) - old.value);
}

/* What few blocks need goes with the tag of the layer, which is another behind each round and never
 * 0. */
__device__ static inline uint32_t tag_of(const struct context &c)
{
    return c.epoch + 1;
}

__device__ static inline void give(const struct context &c, uint64_t *to, uint32_t value)
{
    uint64_t both = (uint64_t)tag_of(c) << 32 | value;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}

/* Such a value, and whether it is of this layer. */
template <typename V>
__device__ static inline bool take_one(const struct context &c, V *out, const uint64_t *from)
{
    static_assert(sizeof(V) == 4, "a float or what has as many bits");
    uint64_t both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
    uint32_t value = (uint32_t)both;
    *out = *(V *)&value;
    return both >> 32 == tag_of(c);
}

/* COUNT values, `step` apart, as soon as they are there. */
template <int COUNT>
__device__ static inline void take(const struct context &c, uint32_t out[COUNT],
                                   const uint64_t *from, int step)
{
    bool there;
    do {
        there = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            there &= take_one(c, &out[i], from + i * step);
    } while (!there);
}

/* ---- x of a product ---- */

/* Weights are times 2^-14 in f16. */
#define UNDO_BITS 14
#define UNDO      16384.0f

/* The power of two that the largest of some values is near; what is not finite stays so. */
__device__ static inline int exponent_of(float amax)
{
    int e = (int)(__float_as_uint(amax) >> 23) - 127;
    return amax < INFINITY ? max(e, -100) : 0;
}

__device__ static inline float power_of_two(int e)
{
    return __uint_as_float((uint32_t)(127 + e) << 23);
}

__device__ static inline uint32_t two_halves(float a, float b)
{
    __half2 h = __floats2half2_rn(a, b);
    return *(uint32_t *)&h;
}

/* Two of sixteen values as f16, and what those are to be times. */
struct halves {
    uint32_t two;
    float by;
};

/* Sixteen lanes have a value each; what counts is in those with even numbers. */
__device__ static inline struct halves halves_of(float v)
{
    float amax = isfinite(v) ? fabsf(v) : INFINITY; /* fmaxf passes NaN over */
#pragma unroll
    for (int o = 8; o > 0; o >>= 1)
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, o));
    int e = exponent_of(amax);
    float other = __shfl_xor_sync(0xFFFFFFFF, v, 1), up = power_of_two(13 - e);
    return {two_halves(v * up, other * up), power_of_two(e - 13) * UNDO};
}

/* Two pairs where the products look for them: in the half of B that their block of 16 columns
 * belongs to, and zeros in the other. */
__device__ static inline void put_pairs(struct context &c, int q, uint32_t a, uint32_t b, float by)
{
    c.x16()[q] = q >> 2 & 1 ? make_uint4(0, a, 0, b) : make_uint4(a, 0, b, 0);
    if (q % 4 == 0)
        c.scale()[q / 4] = by;
}

/* Zeros behind n up to whole tiles. */
__device__ static inline void pad_x16(struct context &c, int n, int cols)
{
#pragma unroll 1
    for (int q = n / 4 + threadIdx.x; q < cols * (CUDA_TILE_COLS / 4); q += THREADS)
        put_pairs(c, q, 0, 0, 0);
}

#define AHEAD 3 /* pairs of values of the residual stream that a thread has at a time */

/* The first weights of a norm for a thread, which can be asked for early. */
struct norm_feed {
    float2 w[AHEAD];
};

__device__ static inline struct norm_feed norms_at(const struct context &c, int which, int i)
{
    const float2 *w = (const float2 *)(c.m.norms + (int64_t)which * c.m.C);
    struct norm_feed f;
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
        f.w[j] = __ldg(w + min(i + j * THREADS, c.m.C / 2 - 1));
    return f;
}

/* Adds what blocks have made of o or down before to the residual stream, if `sums`. Puts the stream
 * times a norm's weights to x16, and its squares to squares; what the norm divides by is left for
 * the end of the product. Eight lanes have a block of 16. All warps are busy with this at the same
 * time, so that each instruction counts. */
__device__ static void put_normed(struct context &c, bool sums, int norm, struct norm_feed w)
{
    const unsigned long long *from = c.m.sums[(c.round - 1) % SUMS];
    const uint32_t state = sum_state(c.round - 1, c.m.tile_cols[norm % 2 ? O : DOWN]);
    const int count = c.m.C / 2;
    const bool second = threadIdx.x & 8; /* of two blocks of 16 that are the halves of B */
    float sum = 0;
    struct old_sum old = {};
    struct news news = {};
    if (sums)
        old = old_sum_of(c);
#pragma unroll 1
    for (int i = threadIdx.x; i - c.lane < count; i += AHEAD * THREADS) {
        unsigned long long more[AHEAD][2] = {};
        float2 v[AHEAD], x[AHEAD];
        float amax[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            x[j] = i + j * THREADS < count ? c.x()[i + j * THREADS] : make_float2(0, 0);
        for (uint32_t lack = sums; lack;) { /* all are asked for before one is looked at */
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                load_sums(from + 2 * min(i + j * THREADS, count - 1), more[j]);
            if (threadIdx.x == 0)
                news = hear_news(c);
            lack = 0;
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                lack |= sums_lack(more[j], state);
        }
        if (i >= AHEAD * THREADS)
            w = norms_at(c, norm, i);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float by = i + j * THREADS < count ? 1 / SUM_UNIT / (1 << SUM_VALUE) : 0;
            x[j].x = fmaf(sum_value(more[j][0]), by, x[j].x);
            x[j].y = fmaf(sum_value(more[j][1]), by, x[j].y);
            sum += x[j].x * x[j].x + x[j].y * x[j].y;
            v[j] = make_float2(x[j].x * w.w[j].x, x[j].y * w.w[j].y);
            amax[j] = fmaxf(fabsf(v[j].x), fabsf(v[j].y)); /* NaN stays what it is below */
        }
#pragma unroll
        for (int o = 1; o < 8; o <<= 1)
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                amax[j] = fmaxf(amax[j], __shfl_xor_sync(0xFFFFFFFF, amax[j], o));
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            uint32_t at = i + j * THREADS, e = max(__float_as_uint(amax[j]) >> 23, 27u);
            float up = __uint_as_float((2 * 127 + 13 - e) << 23);
            uint32_t two = two_halves(v[j].x * up, v[j].y * up);
            if (at < count) {
                c.x()[at] = x[j];
                ((uint2 *)c.x16())[at] = make_uint2(second ? 0 : two, second ? two : 0);
            }
            if (at < count && threadIdx.x % 8 == 0)
                c.scale()[at / 8] = __uint_as_float((e + UNDO_BITS - 13) << 23);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0 && sums) {
        while ((int)(news.arrived - c.epoch) < 0) /* who has added to sums soon will have */
            news = hear_news(c);
        if (norm == 2 * c.m.layer_count) { /* now what odd sums came with is known for certain */
            __threadfence();
            news = hear_news(c);
        }
        sum = news.odd == c.run ? NAN : sum;
    }
    if (c.lane == 0)
        ((float *)c.squares())[c.warp] = sum;
    pad_x16(c, c.m.C, c.m.tile_cols[QKV]);
    clear_sum(c, old);
}

/* x16 = what the block needs of what others have made of gate and up. */
__device__ static void put_act(struct context &c)
{
    const struct part own = c.own()[DOWN];
    int begin = own.col * CUDA_TILE_COLS, n = min(own.cols * CUDA_TILE_COLS, c.m.F - begin);
#pragma unroll 1
    for (int q = threadIdx.x; q < n / 4; q += THREADS) {
        const uint64_t *act = c.m.act + begin / 2 + 2 * q;
        uint32_t two[2];
        float by;
        bool there;
        do {
            there = take_one(c, &two[0], act);
            there &= take_one(c, &two[1], act + 1);
            there &= take_one(c, &by, c.m.act_scale + begin / 16 + q / 4);
        } while (!there);
        put_pairs(c, q, two[0], two[1], by);
    }
    pad_x16(c, n, own.cols);
}

/* ---- products ---- */

/* Two scales of E4M3. */
__device__ static inline float2 scale_pair(uint32_t two)
{
    return __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3)));
}

/* Words of shared memory. */
__device__ static inline uint4 load_four(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

__device__ static inline float2 load_two(uint32_t at)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}

__device__ static inline uint32_t load_one(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

/* What a lane has of x for a tile, in shared memory. */
struct x_part {
    uint32_t x, scales;
};

/* Adds what rows g and g + 8 get from the lane's two blocks of two tiles: of two rows, which have
 * the same x, or of the same row. */
template <bool ROWS>
__device__ static inline void add_tiles(float2 sum[PAIR], uint32_t tile, uint32_t lane,
                                        struct x_part first, struct x_part second)
{
    const int stride = CUDA_TILE_BYTES;
    const uint32_t s[PAIR] = {load_one(tile + 1024 + 4 * lane),
                              load_one(tile + 1024 + 4 * lane + stride)};
    float acc[PAIR][4] = {};
    float2 by = load_two(first.scales), by2 = ROWS ? by : load_two(second.scales);
    tile += 16 * lane;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 code[PAIR] = {load_four(tile + half * 512), load_four(tile + half * 512 + stride)};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 x = load_four(first.x + half * 32 + i * 16);
            uint4 x2 = ROWS ? x : load_four(second.x + half * 32 + i * 16);
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
        float2 low = scale_pair(s[r] & 0xFFFF), high = scale_pair(s[r] >> 16), f = r ? by2 : by;
        float2 &to = sum[ROWS ? r : 0];
        to.x += acc[r][0] * (low.x * f.x) + acc[r][1] * (high.x * f.y);
        to.y += acc[r][2] * (low.y * f.x) + acc[r][3] * (high.y * f.y);
    }
}

/* What the norm divides by, as a factor. */
__device__ static inline float norm_factor(const struct context &c)
{
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS / 4; i++) {
        float4 v = c.squares()[i];
        sum += (v.x + v.y) + (v.z + v.w);
    }
    float factor;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(sum * c.m.share + c.m.eps));
    return factor;
}

/* Sums of a line over the four lanes that have parts of them: lane 4 g + t has that of row g +
 * 8 (t % 2) of row t / 2 of tiles. */
__device__ static inline float line_sum(const float2 sum[PAIR], int lane)
{
    bool odd = lane & 1, up = lane & 2;
    float a =
        (odd ? sum[0].y : sum[0].x) + __shfl_xor_sync(0xFFFFFFFF, odd ? sum[0].x : sum[0].y, 1);
    float b =
        (odd ? sum[1].y : sum[1].x) + __shfl_xor_sync(0xFFFFFFFF, odd ? sum[1].x : sum[1].y, 1);
    return (up ? b : a) + __shfl_xor_sync(0xFFFFFFFF, up ? a : b, 2);
}

/* What a warp has of a line: to its slot, or of o and down, times `by`, to the sums of all blocks.
 */
__device__ static inline void flush(struct context &c, int step, float v, int slot, int line,
                                    float by, int tiles)
{
    const struct part own = c.own()[step];
    int row = c.lane >> 1 & 1, in = (c.lane >> 2) + 8 * (c.lane & 1);
    if (step != O && step != DOWN)
        c.slots()[(c.share * c.m.slots + slot) * LINE_ROWS + row * CUDA_TILE_ROWS + in] = v;
    else if (PAIR * line + row < own.rows)
        add_to_sum(c, (own.row + PAIR * line + row) * CUDA_TILE_ROWS + in, v * by, tiles);
}

/* The warp's tiles of a step. */
__device__ static void multiply(struct context &c, int step, float by)
{
    const int cols = c.own()[step].cols;
    const struct work w = c.work()[step * WARPS + c.share];
    int left = w.left, line = w.line, unit = w.unit;
    /* Lane 4 g + t has x of block g if that is one of its two. */
    int g = c.lane >> 2, t = c.lane & 3, stride = g >> 1 == t ? 512 : 0;
    uint32_t zeros = smem_addr(c.zeros()), x_base = stride ? smem_addr(c.x16() + g * 4) : zeros;
    uint32_t scales = smem_addr(c.scale()) + 8 * t;
#pragma unroll 1
    do { /* a warp that has none gives zeros */
        const struct line l = c.lines()[step * c.m.line_count + line];
        bool alone = l.rows < PAIR;
        int col = alone ? PAIR * unit : unit, count = min(left, l.units - unit);
        struct x_part x = {x_base + col * stride, scales + col * 32};
        float2 sum[PAIR] = {};
        int tiles = alone ? min(PAIR * count, cols - col) : count;
        left -= count;
#pragma unroll 1
        for (; count > 0; count--) {
            while (!mbarrier_try_wait(c.bar_at, c.parity))
                continue;
            if (!alone) {
                add_tiles<true>(sum, c.tile_at, c.lane, x, x);
            } else {
                struct x_part second = {x.x + stride, x.scales + 32};
                if (++col == cols) /* which there is no more */
                    second = {zeros, x.scales};
                add_tiles<false>(sum, c.tile_at, c.lane, x, second);
                x = {x.x + stride, x.scales + 32};
                col++;
            }
            x = {x.x + stride, x.scales + 32};
            __syncwarp();
            fetch_stage(c, c.tile_at, c.bar_at);
            c.tile_at += STAGE_BYTES;
            c.bar_at += 8;
            if (c.bar_at == c.full_at + RING * 8) {
                c.tile_at = c.ring_at;
                c.bar_at = c.full_at;
                c.parity ^= 1;
            }
        }
        if (w.left > 0 || (step != O && step != DOWN))
            flush(c, step, line_sum(sum, c.lane), line - w.line, line, by, tiles);
        unit = 0;
        line++;
    } while (left > 0);
}

/* Value c.lane of a line, over the warps of this block. */
__device__ static inline float from_slots(const struct context &c, const struct line &l)
{
    const float *slots = c.slots() + c.lane;
    int stride = c.m.slots * LINE_ROWS;
    float v = slots[l.first * stride + l.slot * LINE_ROWS];
#pragma unroll 2
    for (int w = l.first + 1; w <= l.last; w++)
        v += slots[w * stride];
    return v;
}

/* What q, k and v, or gate and up, or the head give, to those who wait for it; a warp for a line.
 * Of the head, also the best. */
__device__ static void finish(struct context &c, int step, int layer, float *logits)
{
    const struct part own = c.own()[step];
    float by = norm_factor(c);
    uint64_t best = 0;
#pragma unroll 1
    for (int i = c.warp; i < lines_of(own); i += WARPS) {
        const struct line &l = c.lines()[step * c.m.line_count + i];
        float v = from_slots(c, l) * by * c.layers()[layer].scale[l.matrix[c.lane >> 4]];
        int at = (own.row + PAIR * i) * CUDA_TILE_ROWS + c.lane;
        bool any = c.lane < l.rows * CUDA_TILE_ROWS;
        if (step == QKV && any)
            give(c, c.m.qkv + at, __float_as_uint(v));
        if (step == LOGITS && any && at < c.m.V) {
            logits[at] = v;
            best = max(best, key_of(v, at));
        }
        if (step != GATE_UP)
            continue;
        float up = __shfl_xor_sync(0xFFFFFFFF, v, CUDA_TILE_ROWS);
        struct halves two = halves_of(__fdividef(v, 1 + __expf(-v)) * up);
        at = (own.row / PAIR + i) * CUDA_TILE_ROWS + c.lane;
        if (c.lane < CUDA_TILE_ROWS && c.lane % 2 == 0)
            give(c, c.m.act + at / 2, two.two);
        if (c.lane == 0)
            give(c, c.m.act_scale + at / CUDA_TILE_ROWS, __float_as_uint(two.by));
    }
    if (step != LOGITS)
        return;
    best = warp_best(best);
    if (c.lane == 0)
        c.m.best[blockIdx.x * WARPS + c.warp] = best;
}
