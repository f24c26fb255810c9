/* token_steps.cuh - the kernel of token.cu: what it keeps where, how weights come in, products. */
#pragma once

#include "backend/cuda/internal.cuh"

#define WARPS       16
#define THREADS     (WARPS * 32)
#define HEAD        128 /* size of a head */
#define SPLITS_MAX  16  /* blocks that share the rows of a store; warps have places there too */
#define SPLIT_ROWS  32  /* of a store, that a block should have at least in attention */
#define FEW_ROWS    192 /* of a store, that every block of a head goes through by itself */
#define PAIR        2   /* tiles of a stage of the ring, at most: neighbours */
#define RING        3   /* stages of a warp that are on their way */
#define STAGE_BYTES (PAIR * NBI_TILE_BYTES)

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

/* A row of tiles of a block: where it is, and what its warps have of it: the first of them in its
 * slot `slot`, those behind it up to the last in slot 0. */
struct line {
    int tile; /* the block's first in the row, of its matrix */
    uint8_t matrix, first, last, slot;
};

/* What a warp has of a step: tiles from the block's row and column on. */
struct work {
    short row, col;
    int left;
};

/* What a block does in attention: rows [begin, end) of the store for some heads, as the split-th of
 * those that are used. */
struct rows_part {
    int split, used, head, kv, begin, end;
};

/* Pieces of shared memory, as offsets. */
struct places {
    int ring;    /* [WARPS][RING][STAGE_BYTES] */
    int full;    /* uint64 [WARPS][RING]: that a stage has arrived */
    int layers;  /* struct layer [layers] */
    int x;       /* f32 [C]: the residual stream */
    int x16;     /* x of a product: for each two f16, whichever half of B they are of, and zeros */
    int scale;   /* f32 [longest / 16]: what those are to be times */
    int slots;   /* f32 [WARPS][slots][16]: sums of a warp for its rows of tiles, from its first */
    int own;     /* struct part [STEPS] */
    int lines;   /* struct line [STEPS][rows] */
    int work;    /* struct work [STEPS][WARPS] */
    int squares; /* f32 [WARPS]: of the residual stream, by warp */
    int zeros;   /* 64 bytes */
    int turn;    /* f32 [HEAD]: cos, sin */
    int attend;  /* see token_attention.cuh */
    int total;
};

struct model {
    const struct layer *layers;
    const struct part *parts; /* [STEPS][blocks] */
    const float *norms;       /* [layers][2][C], then the last one */
    const float *head_norms;  /* [layers][2][HEAD] of q and k */
    int tile_cols[STEPS];
    int q_end, k_end; /* rows of tiles of q, and of q and k */
    float head_scale;
    enum nbi_dtype embed_type, store;
    const float *frequency;
    float rope_scale, eps, share; /* 1 / C */
    int layer_count, C, F, NH, NKV, V;
    int together;         /* heads of a block in attention over many rows */
    int splits;           /* blocks that share such heads, at most */
    int each;             /* blocks that have the same head in o */
    int slots, row_count; /* rows of tiles in a step, that a warp has and that a block has */
    int longest;
    /* What blocks give each other. */
    float *qkv, *shared;
    unsigned long long *sums[2]; /* [C] of o and of down */
    uint32_t *act;               /* two f16 each, */
    float *act_scale;            /* and what sixteen of them are to be times */
    unsigned *barrier;
    struct places at;
};

struct step_args {
    const void *row; /* of the embedding */
    int position, slot, first, last;
    unsigned epoch; /* barriers passed before, times blocks */
    float *logits;
};

/* ---- shared memory ---- */

static inline int64_t lines(int64_t bytes)
{
    return (bytes + 127) / 128 * 128;
}

#define PART_FLOATS(G) ((G) * (HEAD + 2)) /* a softmax: sums of values, maximum, denominator */

/* Queries, this token's key and value, softmaxes by warp and how they weigh. */
#define ATTEND_FLOATS(G) (((G) + 2) * HEAD + SPLITS_MAX * PART_FLOATS(G) + (G) * (SPLITS_MAX + 2))

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
    p.own = (int)(at += lines((int64_t)WARPS * m.slots * 16 * 4));
    p.lines = (int)(at += lines(STEPS * sizeof(struct part)));
    p.work = (int)(at += lines((int64_t)STEPS * m.row_count * sizeof(struct line)));
    p.squares = (int)(at += lines(STEPS * WARPS * sizeof(struct work)));
    p.zeros = (int)(at += lines(WARPS * 4));
    p.turn = (int)(at += 128);
    p.attend = (int)(at += lines(HEAD * 4));
    p.total = (int)(at += lines(ATTEND_FLOATS(m.together) * 4));
    return p;
}

template <typename T> __device__ static inline T *shared_piece(int at)
{
    extern __shared__ __align__(128) uint8_t memory[];
    return (T *)(memory + at);
}

#define SHARED_LIST(X)                                                                             \
    X(uint8_t, ring)                                                                               \
    X(uint64_t, full)                                                                              \
    X(struct layer, layers)                                                                        \
    X(float4, x)                                                                                   \
    X(uint4, x16)                                                                                  \
    X(float, scale)                                                                                \
    X(float, slots)                                                                                \
    X(struct part, own)                                                                            \
    X(struct line, lines)                                                                          \
    X(struct work, work)                                                                           \
    X(float4, squares)                                                                             \
    X(uint4, zeros)                                                                                \
    X(float, turn)                                                                                 \
    X(float, attend)

/* Where the next tile of a warp comes from. */
struct feed {
    const uint8_t *from;
    int layer, step;
    int row, col; /* of the block's part, */
    int cols;     /* which has so many */
    int left;     /* tiles of the step */
};

struct context {
    const struct model &m;
    unsigned epoch;
    int warp, lane;
    uint32_t ring_at, full_at; /* the warp's, in shared memory */
    int next;                  /* stage of the ring to be read */
    uint32_t parity;           /* of the round of the ring that is read */
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

/* A warp's tiles of its block's part, row after row. In the head it has whole rows. */
__host__ __device__ static inline struct range range_of(const struct part &p, int step, int warp)
{
    int n = step == LOGITS ? p.rows : p.rows * p.cols, unit = step == LOGITS ? p.cols : 1;
    return {n * warp / WARPS * unit, n * (warp + 1) / WARPS * unit};
}

/* Row `row` of tiles of the block's part of a step. */
__device__ static struct line line_of(const struct model &m, const struct part &p, int step,
                                      int row)
{
    int n = max(p.rows * p.cols, 1), a = row * p.cols, b = a + p.cols - 1, at = p.row + row;
    int first = (WARPS * (a + 1) + n - 1) / n - 1, last = (WARPS * (b + 1) + n - 1) / n - 1;
    int matrix = step == O ? O_ : step == DOWN ? DOWN_ : HEAD_;
    if (step == QKV) {
        matrix = at < m.q_end ? Q_ : at < m.k_end ? K_ : V_;
        at -= matrix == Q_ ? 0 : matrix == K_ ? m.q_end : m.k_end;
    } else if (step == GATE_UP) {
        matrix = at & 1 ? UP_ : GATE_;
        at >>= 1;
    }
    return {at * m.tile_cols[step] + p.col, (uint8_t)matrix, (uint8_t)first, (uint8_t)last,
            (uint8_t)(row - n * first / WARPS / p.cols)};
}

/* ---- weights on their way ---- */

/* Bulk copies came with compute capability 9.0; the host asks what the kernel was made for. */
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define BULK 1
#else
#define BULK 0
#endif

__device__ static inline void barrier_init(uint64_t *bar)
{
#if BULK
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_at(bar)));
#endif
}

/* By one lane of the warp. */
__device__ static inline void copy_stage(uint32_t to, const uint8_t *from, int bytes, uint32_t bar)
{
#if BULK
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];\n"
                 "}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
#endif
}

/* Whether the phase of that parity is over. */
__device__ static inline bool is_past(uint32_t bar, uint32_t parity)
{
    uint32_t done = 0;
#if BULK
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
#endif
    return done;
}

/* Asks for something that will be wanted soon. */
__device__ static inline void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ static inline const uint8_t *line_at(const struct context &c, const struct feed &f)
{
    struct line l = c.lines()[f.step * c.m.row_count + f.row];
    return c.layers()[f.layer].tiles[l.matrix] + (int64_t)l.tile * NBI_TILE_BYTES;
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
        struct work w = c.work()[f.step * WARPS + c.warp];
        f.cols = c.own()[f.step].cols;
        f.row = w.row;
        f.col = w.col;
        f.left = w.left;
    }
    f.from = line_at(c, f) + f.col * NBI_TILE_BYTES;
}

/* Asks for one more stage of the ring, if there is something left. All lanes have read the last
 * one. */
__device__ static inline void fetch_stage(struct context &c, int to)
{
    struct feed &f = c.feed;
    if (f.left == 0)
        return;
    int n = min(PAIR, min(f.left, f.cols - f.col));
    copy_stage(c.ring_at + to * STAGE_BYTES, f.from, n * NBI_TILE_BYTES, c.full_at + to * 8);
    f.from += n * NBI_TILE_BYTES;
    f.left -= n;
    f.col += n;
    if (f.left == 0) {
        feed_on(c, f);
    } else if (f.col == f.cols) {
        f.col = 0;
        f.row++;
        f.from = line_at(c, f);
    }
}

/* ---- blocks together ---- */

/* All that any block wrote before arrive is there after wait. */
__device__ static inline void arrive_all(struct context &c)
{
    c.epoch += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(c.m.barrier) : "memory");
}

__device__ static inline void wait_all(struct context &c)
{
    if (threadIdx.x == 0) {
        unsigned seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(c.m.barrier)
                         : "memory");
        } while ((int)(seen - c.epoch) < 0);
    }
    __syncthreads();
}

/* Sums over blocks are of integers, so that their order does not matter: times 2^26. What is not
 * finite or as large as 2^20 counts as 2^29, which nothing else can make up for, and a sum from
 * 2^28 on as NaN; those of 255 blocks still fit 63 bits. */
#define SUM_UNIT 0x1p26f
#define SUM_ODD  (1ll << 55)

__device__ static inline void add_to_sum(const struct context &c, int which, int o, float v)
{
    long long n = fabsf(v) < 0x1p20f ? __float2ll_rn(v * SUM_UNIT) : SUM_ODD;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(c.m.sums[which] + o), "l"(n)
                 : "memory");
}

__device__ static inline float of_sum(unsigned long long v)
{
    int high = (int)(v >> 32);
    return abs(high) < 1 << 22 ? (float)(long long)v * (1 / SUM_UNIT) : NAN;
}

/* For the next layer; all have read them. */
__device__ static inline void clear_sums(const struct context &c, int which)
{
    int begin = c.m.C * (int)blockIdx.x / (int)gridDim.x;
    int end = c.m.C * ((int)blockIdx.x + 1) / (int)gridDim.x;
#pragma unroll 1
    for (int i = begin + (int)threadIdx.x; i < end; i += THREADS)
        __stcg(c.m.sums[which] + i, 0ull);
}

/* ---- x of a product ---- */

/* Weights are times 2^-14 in f16. */
#define UNDO 16384.0f

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
    for (int q = n / 4 + threadIdx.x; q < cols * (NBI_TILE_COLS / 4); q += THREADS)
        put_pairs(c, q, 0, 0, 0);
}

/* The first eight weights of a norm for a thread, which can be asked for early. */
struct norm_feed {
    float4 w0, w1;
};

__device__ static inline struct norm_feed norms_at(const struct context &c, int which, int q)
{
    const float4 *w =
        (const float4 *)(c.m.norms + (int64_t)which * c.m.C) + 2 * min(q, c.m.C / 8 - 1);
    return {__ldg(w), __ldg(w + 1)};
}

/* Eight values of the residual stream. */
struct eight {
    float4 a, b;
};

/* Adds what blocks have made of o (0) or down (1). */
__device__ static inline struct eight add_sums(const struct context &c, int which, int q)
{
    struct eight v = {c.x()[2 * q], c.x()[2 * q + 1]};
    if (which < 0)
        return v;
    const ulonglong2 *from = (const ulonglong2 *)c.m.sums[which] + 4 * q;
    ulonglong2 m[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        m[i] = __ldcg(from + i);
    v.a = make_float4(v.a.x + of_sum(m[0].x), v.a.y + of_sum(m[0].y), v.a.z + of_sum(m[1].x),
                      v.a.w + of_sum(m[1].y));
    v.b = make_float4(v.b.x + of_sum(m[2].x), v.b.y + of_sum(m[2].y), v.b.z + of_sum(m[3].x),
                      v.b.w + of_sum(m[3].y));
    c.x()[2 * q] = v.a;
    c.x()[2 * q + 1] = v.b;
    return v;
}

__device__ static inline float squares_of(float4 v)
{
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

__device__ static inline float4 times(float4 a, float4 b)
{
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ static inline float largest(float4 v)
{
    float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    return isfinite(v.x + v.y + v.z + v.w) ? amax : INFINITY;
}

/* Adds what blocks have made of o (0) or down (1) to the residual stream, unless `sums` is
 * negative. Puts the stream times a norm's weights to x16, and its squares to squares; what the
 * norm divides by is left for the end of the product. Two threads have a block of 16. */
__device__ static void put_normed(struct context &c, int sums, int norm, struct norm_feed w)
{
    float sum = 0;
    int count = c.m.C / 8;
#pragma unroll 1
    for (int q = threadIdx.x; q - c.lane < count; q += THREADS) {
        bool any = q < count;
        struct eight v = {};
        if (any)
            v = add_sums(c, sums, q);
        if (q >= THREADS)
            w = norms_at(c, norm, q);
        sum += squares_of(v.a) + squares_of(v.b);
        float4 a = times(v.a, w.w0), b = times(v.b, w.w1);
        float amax = fmaxf(largest(a), largest(b));
        int e = exponent_of(fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, 1)));
        float up = power_of_two(13 - e), by = power_of_two(e - 13) * UNDO;
        if (any) {
            put_pairs(c, 2 * q, two_halves(a.x * up, a.y * up), two_halves(a.z * up, a.w * up), by);
            put_pairs(c, 2 * q + 1, two_halves(b.x * up, b.y * up), two_halves(b.z * up, b.w * up),
                      by);
        }
    }
    sum = warp_sum(sum);
    if (c.lane == 0)
        ((float *)c.squares())[c.warp] = sum;
    pad_x16(c, c.m.C, c.m.tile_cols[QKV]);
}

/* x16 = what the block needs of what all have made of gate and up. */
__device__ static void put_act(struct context &c)
{
    const struct part own = c.own()[DOWN];
    int begin = own.col * NBI_TILE_COLS, n = min(own.cols * NBI_TILE_COLS, c.m.F - begin);
    const uint4 *from = (const uint4 *)(c.m.act + begin / 2);
    const float *scale = c.m.act_scale + begin / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < n / 8; i += THREADS) {
        uint4 w = __ldcg(from + i);
        float by = __ldcg(scale + i / 2);
        put_pairs(c, 2 * i, w.x, w.y, by);
        put_pairs(c, 2 * i + 1, w.z, w.w, by);
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

/* What rows g and g + 8 get from the lane's two blocks, all of shared memory. */
__device__ static inline float2 tile_dot(const uint4 *tile, int lane, const uint4 *x,
                                         const float2 *x_scales)
{
    float acc[4] = {};
    float2 by = *x_scales;
    uint32_t s = ((const uint32_t *)(tile - lane + 64))[lane];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 code = tile[half * 32], x0 = x[half * 2], x1 = x[half * 2 + 1];
        const uint32_t word[4] = {code.x, code.y, code.z, code.w};
        const uint32_t b[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint32_t a[4];
#pragma unroll
            for (int q = 0; q < 4; q++)
                a[q] = tile_pair(word[q], p);
            mma_f16(acc, a, b[2 * p], b[2 * p + 1]);
        }
    }
    float2 low = scale_pair(s & 0xFFFF), high = scale_pair(s >> 16);
    return make_float2(acc[0] * (low.x * by.x) + acc[1] * (high.x * by.y),
                       acc[2] * (low.y * by.x) + acc[3] * (high.y * by.y));
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

/* The sums of a row of tiles: to the warp's slot, or as logits. */
__device__ static void flush(struct context &c, float2 sum, int slot, int row, float by,
                             float *logits)
{
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
        sum.x += __shfl_xor_sync(0xFFFFFFFF, sum.x, o);
        sum.y += __shfl_xor_sync(0xFFFFFFFF, sum.y, o);
    }
    if (c.lane % 4 != 0 || (logits && slot < 0))
        return;
    int r = c.lane / 4, o = row * 16 + r;
    if (!logits) {
        float *to = c.slots() + (c.warp * c.m.slots + slot) * 16 + r;
        to[0] = sum.x;
        to[8] = sum.y;
        return;
    }
    if (o < c.m.V)
        logits[o] = sum.x * by;
    if (o + 8 < c.m.V)
        logits[o + 8] = sum.y * by;
}

/* The warp's tiles of a step; `by` is for logits. */
__device__ static void multiply(struct context &c, int step, float by, float *logits)
{
    const struct part own = c.own()[step];
    const struct work w = c.work()[step * WARPS + c.warp];
    int left = w.left, row = w.row, col = w.col;
    /* Lane 4 g + t has x of block g if that is one of its two. */
    int g = c.lane >> 2, t = c.lane & 3, slot = 0, stride = g >> 1 == t ? 32 : 0;
    const uint4 *x_base = stride ? c.x16() + g * 4 : c.zeros();
    const uint4 *ring = (const uint4 *)(c.ring() + c.warp * RING * STAGE_BYTES) + c.lane;
#pragma unroll 1
    do { /* a warp that has none gives zeros */
        int count = min(left, own.cols - col);
        const uint4 *x = x_base + col * stride;
        const float2 *x_scales = (const float2 *)c.scale() + col * 4 + t;
        float2 sum = make_float2(0, 0);
#pragma unroll 1
        for (int i = 0; i < count; i += PAIR) {
            const uint4 *tile = ring + c.next * (STAGE_BYTES / 16);
            while (!is_past(c.full_at + c.next * 8, c.parity))
                continue;
            float2 more = tile_dot(tile, c.lane, x, x_scales);
            if (i + 1 < count) {
                float2 other =
                    tile_dot(tile + NBI_TILE_BYTES / 16, c.lane, x + stride, x_scales + 4);
                more = make_float2(more.x + other.x, more.y + other.y);
            }
            __syncwarp();
            fetch_stage(c, c.next);
            c.parity ^= c.next + 1 == RING;
            c.next = c.next + 1 == RING ? 0 : c.next + 1;
            x += PAIR * stride;
            x_scales += PAIR * 4;
            sum.x += more.x;
            sum.y += more.y;
        }
        flush(c, sum, w.left > 0 ? slot++ : logits ? -1 : 0, own.row + row, by, logits);
        left -= count;
        col = 0;
        row++;
    } while (left > 0);
}

/* Value r of a row of tiles, over the warps of this block. */
__device__ static inline float from_slots(const struct context &c, int step, int row, int r)
{
    struct line s = c.lines()[step * c.m.row_count + row];
    const float *slots = c.slots() + r;
    int stride = c.m.slots * 16;
    float v = slots[s.first * stride + s.slot * 16];
#pragma unroll 2
    for (int w = s.first + 1; w <= s.last; w++)
        v += slots[w * stride];
    return v;
}

/* What a product gives, to those who wait for it; `by` is what a norm divides by, as a factor. */
__device__ static void finish(struct context &c, int step, int layer, float by)
{
    const struct layer &l = c.layers()[layer];
    const struct part own = c.own()[step];
    if (step == O || step == DOWN)
        by = step == O ? l.scale[O_] : l.scale[DOWN_];
#pragma unroll 1
    for (int i = threadIdx.x; i < own.rows * 16; i += THREADS) {
        /* Of gate and up, neighbours have the same row. */
        bool pairs = step == GATE_UP;
        int row = pairs ? i / 32 * 2 + (i & 1) : i / 16, r = pairs ? i / 2 % 16 : i % 16;
        float v = from_slots(c, step, row, r) * by;
        int o = (own.row + row) * 16 + r;
        if (step == QKV) {
            int m = o < c.m.q_end * 16 ? Q_ : o < c.m.k_end * 16 ? K_ : V_;
            __stcg(c.m.qkv + o, v * l.scale[m]);
        } else if (pairs) {
            v *= l.scale[i & 1 ? UP_ : GATE_];
            float up = __shfl_xor_sync(0xFFFFFFFF, v, 1), act = __fdividef(v, 1 + __expf(-v)) * up;
            act = __shfl_sync(0xFFFFFFFF, act, c.lane % 16 * 2); /* where gate was */
            struct halves two = halves_of(act);
            int at = (own.row + row) / 2 * 16 + c.lane % 16;
            if (c.lane < 16 && at % 2 == 0)
                __stcg(c.m.act + at / 2, two.two);
            if (c.lane == 0)
                __stcg(c.m.act_scale + at / 16, two.by);
        } else {
            add_to_sum(c, step == DOWN, o, v);
        }
    }
}
