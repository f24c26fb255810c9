/* token_steps.cuh - the kernel of token.cu: what it keeps where, how weights come in, products. */
#pragma once

#include "backend/cuda/internal.cuh"

#define WARPS       15 /* that compute; one more fetches */
#define THREADS     (WARPS * 32)
#define HEAD        128 /* size of a head */
#define EXTRAS_MAX  15  /* blocks that may share a row of tiles, but one */
#define TOGETHER    6   /* times four values that a thread asks for at a time */
#define SPLIT_ROWS  128 /* of a store, that a block should have at least in attention */
#define PAIR        2   /* tiles of a stage of the ring, at most */
#define STAGE_BYTES (PAIR * NBI_TILE_BYTES)
#define SLOTS       4 /* rows of tiles that a warp may have part of, but in the head */

enum step { QKV, O, GATE_UP, DOWN, LOGITS, STEPS };

/* Matrices of a layer, in the order of the steps; q, k and v lie one behind the other as rows of
 * tiles, gate and up take turns. */
enum matrix { Q_, K_, V_, O_, GATE_, UP_, DOWN_, MATRICES };

struct layer {
    const uint8_t *tiles[MATRICES];
    void *k, *v; /* the stores */
    float scale[MATRICES];
};

/* Tiles of a step for a block: [begin, end), and in which way its first and its last row of tiles
 * are shared with others. */
struct share {
    int begin, end;
    int ordinal; /* blocks before this one that have part of its first row of tiles */
    int after;   /* blocks after this one that have part of its last */
};

/* What a block does in attention: rows [begin, end) of the store for some heads, as the split-th of
 * those that are used. */
struct part_of_attention {
    int split, used, head, kv, begin, end;
};

/* Pieces of shared memory, as offsets. */
struct places {
    int ring;    /* [WARPS][stages][STAGE_BYTES] */
    int counts;  /* int [WARPS][stages]: tiles of a stage */
    int full;    /* uint64 [2][WARPS][stages]: that a stage has arrived, that it has been read */
    int layers;  /* struct layer [layers] */
    int x;       /* f32 [C]: the residual stream */
    int norm;    /* f32 [C]: the weights of the norm that comes next */
    int x16;     /* x of a product: for each two f16, whichever half of B they are of, and zeros */
    int slots;   /* f32 [WARPS][SLOTS][16]: sums of a warp for its rows of tiles, from its first */
    int own;     /* struct share [STEPS] */
    int rows;    /* struct rows [STEPS][WARPS], by warp, then [STEPS], of the block */
    int part;    /* f32 [WARPS]: the squares of the residual stream, by warp */
    int scale;   /* f32 [longest / 16]: of x16, by block */
    int turn;    /* f32 [HEAD]: cos, sin */
    int part_of; /* struct part_of_attention */
    int head_norm; /* f32 [2][HEAD]: of the layer's queries and keys */
    int zeros;     /* 64 bytes */
    int total;
};

struct model {
    const struct layer *layers;
    const struct share *shares; /* [STEPS][blocks] */
    const float *norms;         /* [layers][2][C], then the last one */
    const float *head_norms;    /* [layers][2][HEAD] of q and k */
    int tile_cols[STEPS];
    int q_end, k_end; /* rows of tiles of q, and of q and k */
    const uint8_t *head;
    float head_scale;
    const void *embed;
    enum nbi_dtype embed_type, store;
    const float *frequency;
    float rope_scale, eps;
    int layer_count, C, F, NH, NKV, V, extras, together, splits, stages, longest;
    /* What blocks give each other. */
    float *qkv, *main, *extra, *parts;
    uint32_t *att, *act;          /* two f16 each, */
    float *att_scale, *act_scale; /* and what sixteen of them are to be times */
    unsigned *barrier;
    struct places at;
};

struct step_args {
    int id, position, slot, first, last;
    unsigned epoch; /* barriers passed before, times blocks */
    float *logits;
};

/* ---- shared memory ---- */

static inline int64_t lines(int64_t bytes)
{
    return (bytes + 127) / 128 * 128;
}

/* Rows of tiles that a warp has, from the first to the last. */
struct rows {
    short first, last;
};

/* Attention uses the place of x16. */
#define ATTEND_FLOATS(G) (((G) + 2) * HEAD + WARPS * (G) * (HEAD + 2) + (G) * (WARPS + 2))

static struct places places_of(const struct model &m)
{
    struct places p;
    int64_t at = 0, x16 = lines((int64_t)m.longest * 4),
            attend = lines(ATTEND_FLOATS(m.together) * 4);
    p.ring = 0;
    p.full = (int)(at += (int64_t)WARPS * m.stages * STAGE_BYTES);
    p.counts = (int)(at += lines((int64_t)2 * WARPS * m.stages * 8));
    p.layers = (int)(at += lines((int64_t)WARPS * m.stages * 4));
    p.x = (int)(at += lines((int64_t)m.layer_count * sizeof(struct layer)));
    p.norm = (int)(at += lines((int64_t)m.C * 4));
    p.x16 = (int)(at += lines((int64_t)m.C * 4));
    p.slots = (int)(at += x16 > attend ? x16 : attend);
    p.own = (int)(at += lines(WARPS * SLOTS * 16 * 4));
    p.rows = (int)(at += lines(STEPS * sizeof(struct share)));
    p.part = (int)(at += lines(STEPS * (WARPS + 1) * sizeof(struct rows)));
    p.scale = (int)(at += lines(WARPS * 4));
    p.turn = (int)(at += lines(m.longest / 16 * 4));
    p.part_of = (int)(at += lines(HEAD * 4));
    p.head_norm = (int)(at += lines(sizeof(struct part_of_attention)));
    p.zeros = (int)(at += lines(2 * HEAD * 4));
    p.total = (int)(at + 128);
    return p;
}

template <typename T> __device__ static inline T *shared_piece(int at)
{
    extern __shared__ __align__(128) uint8_t memory[];
    return (T *)(memory + at);
}

/* Weights are times 2^-14 in f16. */
#define UNDO 16384.0f

/* All threads that compute; the one warp that fetches does not take part. */
__device__ static inline void sync_block(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

/* ---- the ring ---- */

/* Bulk copies came with compute capability 9.0; the host asks what the kernel was made for. */
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define BULK 1
#else
#define BULK 0
#endif

__device__ static inline uint32_t shared_at(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline void barrier_init(uint64_t *bar)
{
#if BULK
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_at(bar)));
#endif
}

__device__ static inline void fetch_tiles(uint8_t *to, const uint8_t *from, int bytes,
                                          uint64_t *bar)
{
#if BULK
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(bar)),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(shared_at(to)),
                 "l"(from), "r"(bytes), "r"(shared_at(bar))
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

__device__ static inline void arrive(uint32_t bar)
{
#if BULK
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

/* What is fetched next for a warp, and where it goes. */
struct feed {
    const uint8_t *from;
    int warp, layer, step;
    int tile, left; /* of the step: the next one, how many */
    int run;        /* of those, how many lie one behind the other; 0: there is no more */
    int stage;
    uint32_t parity; /* of the round of the ring that is written */
};

struct warp_range {
    int begin, end;
};

__device__ static inline struct warp_range range_of(const struct share &s, int warp)
{
    int n = s.end - s.begin;
    return {s.begin + n * warp / WARPS, s.begin + n * (warp + 1) / WARPS};
}

#define SHARED_LIST(X)                                                                             \
    X(uint8_t, ring)                                                                               \
    X(int, counts)                                                                                 \
    X(uint64_t, full)                                                                              \
    X(struct layer, layers)                                                                        \
    X(float4, x)                                                                                   \
    X(float4, norm)                                                                                \
    X(uint4, x16)                                                                                  \
    X(float, slots)                                                                                \
    X(float, scale)                                                                                \
    X(float, part)                                                                                 \
    X(float, turn)                                                                                 \
    X(struct share, own)                                                                           \
    X(struct rows, rows)                                                                           \
    X(struct part_of_attention, part_of)                                                           \
    X(float, head_norm)                                                                            \
    X(uint8_t, zeros)

struct context {
    const struct model &m;
    int stage;       /* to be read next */
    uint32_t parity; /* of the round of the ring that is read */
    unsigned epoch;
    int warp, lane;

    /* Shared memory, by the names of struct places. */
#define X(type, name)                                                                              \
    __device__ type *name() const                                                                  \
    {                                                                                              \
        return shared_piece<type>(m.at.name);                                                      \
    }
    SHARED_LIST(X)
#undef X

    __device__ float *attend() const
    {
        return shared_piece<float>(m.at.x16);
    }

    __device__ struct rows *span() const
    {
        return rows() + STEPS * WARPS;
    }
};

/* Where the next tiles are. Rows of tiles of a matrix follow each other; gate and up take turns. */
__device__ static void feed_run(const struct context &c, struct feed &f)
{
    while (f.left == 0) {
        bool again = f.step == DOWN && f.layer + 1 < c.m.layer_count;
        f.layer += again;
        f.step = again ? QKV : f.step + 1;
        if (f.step == STEPS)
            return;
        struct warp_range r = range_of(c.own()[f.step], f.warp);
        f.left = r.end - r.begin;
        f.tile = r.begin;
    }
    const struct layer &l = c.layers()[f.layer];
    int cols = c.m.tile_cols[f.step], row = f.tile / cols, col = f.tile - row * cols;
    int matrix = f.step == O ? O_ : DOWN_, skip = 0, most = f.left;
    if (f.step == QKV) {
        matrix = row < c.m.q_end ? Q_ : row < c.m.k_end ? K_ : V_;
        skip = matrix == Q_ ? 0 : matrix == K_ ? c.m.q_end : c.m.k_end;
        most = matrix == V_ ? most : (matrix == Q_ ? c.m.q_end : c.m.k_end) * cols - f.tile;
    } else if (f.step == GATE_UP) {
        matrix = row & 1 ? UP_ : GATE_;
        skip = (row + 1) >> 1;
        most = cols - col;
    }
    const uint8_t *tiles = f.step == LOGITS ? c.m.head : l.tiles[matrix];
    f.from = tiles + ((int64_t)(row - skip) * cols + col) * NBI_TILE_BYTES;
    f.run = min(most, f.left);
    f.left -= f.run;
    f.tile += f.run;
}

/* Fetches all that a warp will want, as its ring has room; each lane for another warp. By a warp of
 * its own: a copy that has to queue up keeps only that waiting. */
__device__ static void fetch_all(const struct context &c)
{
    struct feed f = {NULL, c.lane, 0, -1, 0, 0, 0, 0, 1};
    if (c.lane < WARPS)
        feed_run(c, f);
#pragma unroll 1
    while (f.run > 0) {
        int to = f.warp * c.m.stages + f.stage, n = min(f.run, PAIR);
        uint32_t read = shared_at(c.full() + WARPS * c.m.stages + to);
        if (!is_past(read, f.parity)) {
            __nanosleep(20);
            continue;
        }
        c.counts()[to] = n;
        fetch_tiles(c.ring() + to * STAGE_BYTES, f.from, n * NBI_TILE_BYTES, c.full() + to);
        if (++f.stage == c.m.stages) {
            f.stage = 0;
            f.parity ^= 1;
        }
        f.from += STAGE_BYTES;
        f.run -= n;
        if (f.run == 0)
            feed_run(c, f);
    }
}

/* ---- blocks together ---- */

/* All that any block wrote before is there after. */
__device__ static inline void meet(struct context &c)
{
    c.epoch += gridDim.x;
    sync_block();
    if (threadIdx.x == 0) {
        unsigned seen;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(c.m.barrier) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(c.m.barrier)
                         : "memory");
        } while ((int)(seen - c.epoch) < 0);
    }
    sync_block();
}

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

/* Sixteen lanes have a value each, of element `at` of a vector. */
__device__ static inline void give_halves(uint32_t *to, float *scale, int at, float v, bool write)
{
    float amax = isfinite(v) ? fabsf(v) : INFINITY; /* fmaxf passes NaN over */
#pragma unroll
    for (int o = 8; o > 0; o >>= 1)
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, o));
    int e = exponent_of(amax);
    float other = __shfl_xor_sync(0xFFFFFFFF, v, 1), up = power_of_two(13 - e);
    if (write && at % 2 == 0)
        __stcg(to + at / 2, two_halves(v * up, other * up));
    if (write && at % 16 == 0)
        __stcg(scale + at / 16, power_of_two(e - 13) * UNDO);
}

/* ---- x of a product ---- */

/* Two pairs where the products look for them: in the half of B that their block of 16 columns
 * belongs to, and zeros in the other. */
__device__ static inline void put_pairs(struct context &c, int q, uint32_t a, uint32_t b, float by)
{
    c.x16()[q] = q >> 2 & 1 ? make_uint4(0, a, 0, b) : make_uint4(a, 0, b, 0);
    if (q % 4 == 0)
        c.scale()[q / 4] = by;
}

/* Zeros up to whole tiles. */
__device__ static inline void pad_x16(struct context &c, int step, int n)
{
#pragma unroll 1
    for (int q = n / 4 + threadIdx.x; q < c.m.tile_cols[step] * (NBI_TILE_COLS / 4); q += THREADS)
        put_pairs(c, q, 0, 0, 0);
}

__device__ static inline void fetch_16(void *to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_at(to)), "l"(from)
                 : "memory");
}

__device__ static void fetch_norm(struct context &c, int which)
{
    const float4 *w = (const float4 *)(c.m.norms + (int64_t)which * c.m.C);
#pragma unroll 1
    for (int q = threadIdx.x; q < c.m.C / 4; q += THREADS)
        fetch_16(c.norm() + q, w + q);
}

__device__ static inline float4 plus(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Adds what blocks have made of o or down to the residual stream, if there is anything. Puts the
 * stream times a norm's weights to x16, and its squares to part; what the norm divides by is left
 * for the end of the product. */
__device__ static void put_normed(struct context &c, int step, bool add)
{
    float sum = 0;
    int count = c.m.C / 4;
    const float4 *main = (const float4 *)c.m.main, *extra = (const float4 *)c.m.extra;
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 2
    for (int first = 0; first < count; first += THREADS) {
        int q = first + threadIdx.x;
        float4 v = make_float4(0, 0, 0, 0), w = v;
        if (q < count) {
            v = c.x()[q];
            w = c.norm()[q];
            if (add) {
                float4 more = __ldcg(main + q);
#pragma unroll 1
                for (int e = 0; e < c.m.extras; e++)
                    more = plus(more, __ldcg(extra + e * count + q));
                c.x()[q] = v = plus(v, more);
            }
        }
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
        float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
        amax = isfinite(v.x + v.y + v.z + v.w) ? amax : INFINITY;
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, 2));
        int e = exponent_of(amax);
        float up = power_of_two(13 - e);
        if (q < count)
            put_pairs(c, q, two_halves(v.x * up, v.y * up), two_halves(v.z * up, v.w * up),
                      power_of_two(e - 13) * UNDO);
    }
    sum = warp_sum(sum);
    if (c.lane == 0)
        c.part()[c.warp] = sum;
    pad_x16(c, step, c.m.C);
}

/* x16 = what blocks have given as two f16 each. */
__device__ static void put_halves(struct context &c, int step)
{
    const uint2 *from = (const uint2 *)(step == O ? c.m.att : c.m.act);
    const float *scale = step == O ? c.m.att_scale : c.m.act_scale;
    int n = step == O ? c.m.NH * HEAD : c.m.F, count = n / 4;
#pragma unroll 1
    for (int base = threadIdx.x; base < count; base += TOGETHER * THREADS) {
        uint2 w[TOGETHER];
        float by[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) { /* too far: one that others have */
            int q = min(base + j * THREADS, count - 1);
            w[j] = __ldcg(from + q);
            by[j] = __ldcg(scale + q / 4);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
            if (base + j * THREADS < count)
                put_pairs(c, base + j * THREADS, w[j].x, w[j].y, by[j]);
    }
    pad_x16(c, step, n);
}

/* ---- products ---- */

/* Two scales of E4M3. */
__device__ static inline float2 scale_pair(uint32_t two)
{
    return __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3)));
}

/* The lane's part of a tile and of what it is multiplied with, all of shared memory. */
struct tile_at {
    const uint4 *codes; /* [0] and [32] */
    const uint32_t *scales;
    const uint4 *x; /* [4] */
    const float2 *x_scales;
};

/* What rows g and g + 8 get from the lane's two blocks. */
__device__ static inline float2 tile_dot(const struct tile_at &at)
{
    float acc[2][4] = {};
    float2 by = *at.x_scales;
    uint32_t s = *at.scales;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 code = at.codes[half * 32], x0 = at.x[half * 2], x1 = at.x[half * 2 + 1];
        const uint32_t word[4] = {code.x, code.y, code.z, code.w};
        const uint32_t b[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint32_t a[4];
#pragma unroll
            for (int q = 0; q < 4; q++)
                a[q] = tile_pair(word[q], p);
            mma_f16(acc[p & 1], a, b[2 * p], b[2 * p + 1]);
        }
    }
    float2 low = scale_pair(s & 0xFFFF), high = scale_pair(s >> 16);
    return make_float2(
        (acc[0][0] + acc[1][0]) * (low.x * by.x) + (acc[0][1] + acc[1][1]) * (high.x * by.y),
        (acc[0][2] + acc[1][2]) * (low.y * by.x) + (acc[0][3] + acc[1][3]) * (high.y * by.y));
}

/* Rows g and g + 8 of a row of tiles, over all the lane's columns. */
__device__ static inline void sum_lanes(float sum[2])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        sum[j] += __shfl_xor_sync(0xFFFFFFFF, sum[j], 1);
        sum[j] += __shfl_xor_sync(0xFFFFFFFF, sum[j], 2);
    }
}

/* What the norm divides by, as a factor. */
__device__ static inline float norm_factor(const struct context &c)
{
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        sum += c.part()[i];
    return rsqrtf(__fdividef(sum, (float)c.m.C) + c.m.eps);
}

/* Where a warp is in a step. */
struct walk {
    int row, first, col, cols, left;
    float sum[2];
};

/* The sums of a row of tiles go to the warp's slots, in order. In the head a warp has many: the
 * first goes to slot 0 and the last to slot 1, as others may have part of them; those between are
 * done with at once. */
__device__ static void flush(struct context &c, struct walk &w, int step, float *logits)
{
    int which = w.row - w.first;
    float factor = 0;
    bool direct = step == LOGITS && which > 0 && w.left > 0;
    sum_lanes(w.sum);
    if (step == LOGITS)
        which = which > 0;
    if (direct)
        factor = norm_factor(c) * c.m.head_scale;
    if (c.lane % 4 == 0)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int r = c.lane / 4 + 8 * j, o = w.row * 16 + r;
            if (!direct)
                c.slots()[(c.warp * SLOTS + which) * 16 + r] = w.sum[j];
            else if (o < c.m.V)
                logits[o] = w.sum[j] * factor;
        }
    w.sum[0] = w.sum[1] = 0;
}

/* One tile more. */
__device__ static inline void walk_on(struct context &c, struct walk &w, float2 more, int step,
                                      float *logits)
{
    w.sum[0] += more.x;
    w.sum[1] += more.y;
    w.left--;
    bool ends = ++w.col == w.cols;
    if (ends || w.left == 0)
        flush(c, w, step, logits);
    if (ends) {
        w.col = 0;
        w.row++;
    }
}

/* The warp's tiles of a step, two at a time where they came so. */
__device__ static void multiply(struct context &c, int step, float *logits)
{
    struct warp_range r = range_of(c.own()[step], c.warp);
    int first = c.rows()[step * WARPS + c.warp].first, cols = c.m.tile_cols[step];
    struct walk w = {first, first, r.begin - first * cols, cols, r.end - r.begin, {0, 0}};
    const uint8_t *ring = c.ring() + c.warp * c.m.stages * STAGE_BYTES;
    uint32_t full = shared_at(c.full() + c.warp * c.m.stages);
    /* Lane 4 g + t has x of block g if that is one of its two. */
    int g = c.lane >> 2, t = c.lane & 3, by = g >> 1 == t ? 32 : 0;
    const uint4 *x = by ? c.x16() + g * 4 : (const uint4 *)c.zeros();
    const float2 *x_scales = (const float2 *)c.scale() + t;
#pragma unroll 1
    while (w.left > 0) {
        int next = w.col + 1 == cols ? 0 : w.col + 1;
        const uint4 *tile = (const uint4 *)(ring + c.stage * STAGE_BYTES);
        const struct tile_at a = {tile + c.lane, (const uint32_t *)(tile + 64) + c.lane,
                                  x + w.col * by, x_scales + w.col * 4};
        tile += NBI_TILE_BYTES / 16;
        const struct tile_at b = {tile + c.lane, (const uint32_t *)(tile + 64) + c.lane,
                                  x + next * by, x_scales + next * 4};
        while (!is_past(full + c.stage * 8, c.parity))
            continue;
        int count = c.counts()[c.warp * c.m.stages + c.stage];
        float2 of_a, of_b;
        if (count == PAIR) {
            of_a = tile_dot(a);
            of_b = tile_dot(b);
        } else {
            of_a = tile_dot(a);
        }
        __syncwarp();
        if (c.lane == 0)
            arrive(full + (WARPS * c.m.stages + c.stage) * 8);
        if (++c.stage == c.m.stages) {
            c.stage = 0;
            c.parity ^= 1;
        }
        walk_on(c, w, of_a, step, logits);
        if (count == PAIR)
            walk_on(c, w, of_b, step, logits);
    }
}

/* Row r of a row of tiles over the warps of this block. */
__device__ static float from_slots(const struct context &c, int step, int row, int r)
{
    const struct rows *all = c.rows() + step * WARPS;
    const float *slots = c.slots() + r;
    float v = 0;
#pragma unroll 4
    for (int w = 0; w < WARPS; w++) {
        struct rows of = all[w];
        bool in = row >= of.first && row <= of.last;
        int which = step == LOGITS ? row != of.first : row - of.first;
        float x = slots[(w * SLOTS + (in ? which : 0)) * 16];
        v += in ? x : 0;
    }
    return v;
}

/* Whether a warp had a row of tiles of the head between its first and its last. */
__device__ static bool was_direct(const struct context &c, int row)
{
    bool direct = false;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
        struct rows of = c.rows()[LOGITS * WARPS + w];
        direct = direct || (row > of.first && row < of.last);
    }
    return direct;
}

/* This block's part of o or down: row `row` of tiles, value o. */
__device__ static void give_shared(const struct context &c, int step, int row, int o, float v)
{
    struct share own = c.own()[step];
    int ordinal = row == c.span()[step].first ? own.ordinal : 0;
    int after = row == c.span()[step].last ? own.after : 0;
    float *extra = c.m.extra + o;
    __stcg(ordinal == 0 ? c.m.main + o : extra + (ordinal - 1) * c.m.C, v);
#pragma unroll 1
    for (int e = ordinal; after == 0 && e < c.m.extras; e++)
        __stcg(extra + e * c.m.C, 0.0f);
}

/* What a product gives, to those who wait for it. */
__device__ static void finish(struct context &c, int step, int layer, float *logits)
{
    const struct layer &l = c.layers()[layer];
    int first = c.span()[step].first, count = c.span()[step].last - first + 1;
    float by = step == O ? l.scale[O_] : l.scale[DOWN_];
    if (step == QKV || step == GATE_UP || step == LOGITS)
        by = norm_factor(c);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * 16; i += THREADS) {
        /* Of gate and up, neighbours have the same row. */
        bool pairs = step == GATE_UP;
        int row = first + (pairs ? i / 32 * 2 + (i & 1) : i / 16), r = pairs ? i / 2 % 16 : i % 16;
        float v = from_slots(c, step, row, r) * by;
        int o = row * 16 + r;
        if (step == QKV) {
            int m = row < c.m.q_end ? Q_ : row < c.m.k_end ? K_ : V_;
            __stcg(c.m.qkv + o, v * l.scale[m]);
        } else if (step == GATE_UP) {
            v *= l.scale[i & 1 ? UP_ : GATE_];
            float up = __shfl_xor_sync(0xFFFFFFFF, v, 1), act = __fdividef(v, 1 + __expf(-v)) * up;
            act = __shfl_sync(0xFFFFFFFF, act, c.lane % 16 * 2); /* where gate was */
            give_halves(c.m.act, c.m.act_scale, row / 2 * 16 + c.lane % 16, act, c.lane < 16);
        } else if (step == LOGITS) {
            if (o < c.m.V && !was_direct(c, row))
                logits[o] = v * c.m.head_scale;
        } else {
            give_shared(c, step, row, o, v);
        }
    }
}
