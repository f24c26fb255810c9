/* attention_decode.cu - attention for decoding: a few rows, each over keys of its own.
 *
 * The query heads that share a key are the rows of a tensor core product, so each key and value is
 * read once, from global memory straight into operands.
 *
 * Rows may differ much in length, so the work is cut by keys: every row into pieces of about the
 * same size, which CTAs take in turn. A row of several pieces gets a part of its result from each
 * (maximum, sum, weighted values); whoever leaves the last part adds them up, in order. All of it
 * is found out on the device: a launch depends on the number of rows and not on their lengths. */
#include "backend/cuda/attention.cuh"
#include "backend/cuda/rope.cuh"

#define FEW_WARPS   4
#define FEW_THREADS (32 * FEW_WARPS)
#define FEW_STEPS   4   /* that a piece takes at least, of each warp */
#define FEW_WORTH   512 /* keys of a piece that several waves of pieces are worth it with */
/* Weights are 2^FEW_LIFT for the largest score: the smaller ones keep their digits in f16. */
#define FEW_LIFT 6.0f

struct few_args {
    struct attend a;       /* a.splits: pieces that there is room for of each row */
    int room;              /* for so many parts */
    unsigned wave;         /* pieces of all key heads that are worked on at once */
    unsigned least;        /* keys of a piece at least */
    struct rope_args rope; /* of the same rows, if N is not 0 */
    struct x_f16 x16;      /* where y goes too, for the product behind; out may be null */
};

/* How a warp divides a step of KEYS keys. Of a key's row lane 4g + t of its column g reads VEC
 * elements at a time, t-th of four; of a value's row, g-th of eight. The order of the elements of
 * a product's sum is free, as long as q has the same, and so is the order of the columns of y. */
template <int D, enum nbi_dtype TYPE>
struct few {
    static constexpr bool BF = TYPE == NBI_BF16;
    static constexpr int BYTES = TYPE == NBI_E4M3 ? 1 : 2;
    static constexpr int REGISTERS = BYTES == 1 ? 168 : 192;
    static constexpr bool EARLY = BYTES > 1; /* there is room for weights of norms all the time */
    static constexpr int CTAS = BYTES == 1 ? 3 : 2; /* on a multiprocessor, by registers */
    static constexpr int KEYS = 32 / BYTES;
    static constexpr int VEC = 16 / BYTES;                  /* of keys */
    static constexpr int K_LOADS = D / (4 * VEC);           /* of a row of keys */
    static constexpr int V_VEC = VEC < D / 8 ? VEC : D / 8; /* of values */
    static constexpr int V_LOADS = D / (8 * V_VEC);
    static constexpr int V_WORDS = V_VEC * BYTES / 4;

    uint32_t k[KEYS / 8][K_LOADS][4];
    uint32_t v[KEYS / 4][V_LOADS][V_WORDS]; /* keys 2t, 2t + 1, 2t + 8, 2t + 9 of each 16 */
    float y[D / 8][4];
    float base, sum; /* of head g; sum of this lane's keys */
};

/* ---- keys and values ---- */

template <int WORDS> __device__ static inline void load_words(uint32_t *out, const void *p)
{
    if (WORDS == 4) {
        uint4 w = *(const uint4 *)p;
        out[0] = w.x, out[1] = w.y, out[2] = w.z, out[3] = w.w;
    } else {
        uint2 w = *(const uint2 *)p;
        out[0] = w.x, out[1] = w.y;
    }
}

/* A step of keys and where it ends; shift leads from its rows to those of the store. */
struct few_step {
    int key, end, shift;
};

/* Keys past the end are taken from the last one: their scores will be masked, and what is read is
 * finite where the row is. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_load_keys(struct few<D, TYPE> &f, const uint8_t *k, int stride,
                                            struct few_step at)
{
    using F = struct few<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < F::KEYS / 8; c++) {
        int row_of = min(at.key + 8 * c + g, at.end - 1) + at.shift;
        const uint8_t *row = k + (int64_t)row_of * stride + 16 * t;
#pragma unroll
        for (int i = 0; i < F::K_LOADS; i++)
            load_words<4>(f.k[c][i], row + 64 * i);
    }
}

template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_load_values(struct few<D, TYPE> &f, const uint8_t *v, int stride,
                                              struct few_step at)
{
    using F = struct few<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < F::KEYS / 4; c++) {
        int key = at.key + c / 4 * 16 + c % 4 / 2 * 8 + 2 * t + c % 2;
        int row_of = min(key, at.end - 1) + at.shift;
        const uint8_t *row = v + (int64_t)row_of * stride + F::V_VEC * F::BYTES * g;
#pragma unroll
        for (int i = 0; i < F::V_LOADS; i++)
            load_words<F::V_WORDS>(f.v[c][i], row + 8 * F::V_VEC * F::BYTES * i);
    }
}

/* Where the warps of a CTA meet. */
template <int D> struct few_shared {
    uint4 q[D / 16][32]; /* operands, by lane */
    union {
        struct {
            float turned[FEW_GROUP][D]; /* queries, if they were not rotated before, */
            uint4 own[2][D / 8];        /* and the row's own key and value, as in the store */
        };
        float y[FEW_WARPS][D / 4][34]; /* later: by lane; two more, for who reads it */
    };
    float base[FEW_WARPS][FEW_GROUP], sum[FEW_WARPS][FEW_GROUP];
    int start[NBI_DECODE_ATTENTION_ROWS +
              1]; /* of all pieces, the first of each row; behind them, how many */
    bool last;    /* this CTA has left the last part of a row */
};

static_assert(FEW_WARPS * 64 / 4 * 34 >= FEW_GROUP * SPLITS_MAX, "weights of parts fit into y");

/* Rows 0 to 7 of the operand are the heads rounded to 16 bits, rows 8 to 15 what that leaves over:
 * the sum of both products has about the digits of f32, and costs nothing. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_query(struct few_shared<D> &sh, const float *q, int group,
                                        float scale)
{
    using F = struct few<D, TYPE>;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int s = threadIdx.x / 32; s < D / 16; s += FEW_WARPS) {
        int d = s / (F::VEC / 4) * 4 * F::VEC + t * F::VEC + s % (F::VEC / 4) * 4;
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 x = make_float2(0, 0);
            if (g < group)
                x = *(const float2 *)(q + g * D + d + 2 * i);
            x.x *= scale, x.y *= scale;
            if (!F::BF)
                x.x = fit_f16(x.x), x.y = fit_f16(x.y);
            w[2 * i] = pack<F::BF>(x.x, x.y);
            w[2 * i + 1] = pack_rest<F::BF>(w[2 * i], x.x, x.y);
        }
        sh.q[s][lane] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Scores of head g with keys 8 c + 2t and 8 c + 2t + 1. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_scores(const struct few<D, TYPE> &f,
                                         const struct few_shared<D> &sh, float s[][2])
{
    using F = struct few<D, TYPE>;
    float acc[F::KEYS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t q[4];
        load_shared(q, smem_addr(&sh.q[i][threadIdx.x % 32]));
#pragma unroll
        for (int c = 0; c < F::KEYS / 8; c++) {
            if (F::BYTES == 1) {
                uint32_t w = f.k[c][i / 4][i % 4];
                mma<F::BF>(acc[c], q, e4m3_to_f16(w & 0xFFFF), e4m3_to_f16(w >> 16));
            } else {
                const uint32_t *w = &f.k[c][i / 2][i % 2 * 2];
                mma<F::BF>(acc[c], q, w[0], w[1]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < F::KEYS / 8; c++) {
        s[c][0] = acc[c][0] + acc[c][2];
        s[c][1] = acc[c][1] + acc[c][3];
    }
}

/* Scores become weights; `left` counts the keys from the first of the step on. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_weights(struct few<D, TYPE> &f, float s[][2], int left)
{
    using F = struct few<D, TYPE>;
    int t = threadIdx.x % 4;
    float top = -INFINITY;
#pragma unroll
    for (int c = 0; c < F::KEYS / 8; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (8 * c + 2 * t + e >= left)
                s[c][e] = -INFINITY;
            top = fmaxf(top, s[c][e]);
        }
    top = quad_max(top) - FEW_LIFT;
    float keep = 1;
    if (top > f.base + LAG) {
        keep = fast_exp2(f.base - top);
        f.base = top;
    }
    if (__any_sync(0xFFFFFFFF, keep != 1)) {
        f.sum *= keep;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                f.y[i][e] *= keep;
    }
#pragma unroll
    for (int c = 0; c < F::KEYS / 8; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[c][e] = fast_exp2(s[c][e] - f.base);
            f.sum += s[c][e];
        }
}

/* y += weights times values. The operand wants two keys in a register, the loads gave two elements
 * of one key: bytes are swapped on the way. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_values(struct few<D, TYPE> &f, const float s[][2])
{
    using F = struct few<D, TYPE>;
#pragma unroll
    for (int j = 0; j < F::KEYS / 16; j++) {
        uint32_t p[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *w = s[2 * j + i];
            p[2 * i] = pack<F::BF>(w[0], w[1]);
            p[2 * i + 1] = pack_rest<F::BF>(p[2 * i], w[0], w[1]);
        }
#pragma unroll
        for (int i = 0; i < F::V_LOADS * F::V_WORDS; i++) {
            uint32_t w[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                w[c] = f.v[4 * j + c][i / F::V_WORDS][i % F::V_WORDS];
            if (F::BYTES == 1) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    uint32_t b0 = __byte_perm(w[0], w[1], e ? 0x7362 : 0x5140);
                    uint32_t b1 = __byte_perm(w[2], w[3], e ? 0x7362 : 0x5140);
                    mma<F::BF>(f.y[4 * i + 2 * e], p, e4m3_to_f16(b0 & 0xFFFF),
                               e4m3_to_f16(b1 & 0xFFFF));
                    mma<F::BF>(f.y[4 * i + 2 * e + 1], p, e4m3_to_f16(b0 >> 16),
                               e4m3_to_f16(b1 >> 16));
                }
            } else {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    mma<F::BF>(f.y[2 * i + e], p, __byte_perm(w[0], w[1], e ? 0x7632 : 0x5410),
                               __byte_perm(w[2], w[3], e ? 0x7632 : 0x5410));
            }
        }
    }
}

template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_leave(struct few_shared<D> &sh, struct few<D, TYPE> &f)
{
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum = quad_sum(f.sum);
    if (t == 0) {
        sh.base[warp][g] = f.base;
        sh.sum[warp][g] = sum;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            sh.y[warp][2 * i + e][threadIdx.x % 32] = f.y[i][e] + f.y[i][e + 2];
}

/* Element d of head h of what a warp has left. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline float few_left(const struct few_shared<D> &sh, int warp, int h, int d)
{
    const int V = few<D, TYPE>::V_VEC, i = d / (8 * V) * V + d % V, column = d / V % 8;
    return sh.y[warp][2 * i + column % 2][4 * h + column / 2];
}

/* ---- pieces ---- */

/* Keys of a piece, in whole steps, for a call whose rows see `total` of them together. Rows of any
 * length have at most `most` pieces together if one has total / (most - N + 1) keys: so few rows
 * get one wave of CTAs, and several, which may differ in length, about four of long pieces. */
__device__ static inline int common_piece(const struct few_args &f, unsigned total,
                                          unsigned longest)
{
    unsigned N = f.a.N, step = f.least / (FEW_STEPS * FEW_WARPS), each = total;
    if (N <= f.wave)
        each = (total - 1) / (f.wave - N + 1) + 1;
    if (N > 1)
        each =
            min(each, max((unsigned)FEW_WORTH, (total - 1) / (max(4 * f.wave, 2 * N) - N + 1) + 1));
    each = max(max(each, f.least), longest / (unsigned)f.a.splits + 1);
    return (int)((each + step - 1) / step * step);
}

/* Cuts the rows; a lane of the first warp has two of them. Each has a piece at least. */
__device__ static inline void few_cut(const struct few_args &f, int *start)
{
    int lane = threadIdx.x, count[2], pieces[2];
    unsigned total = 0, longest = 0;
    if (lane >= 32)
        return;
    for (int i = 0; i < 2; i++) {
        int n = 2 * lane + i;
        count[i] = n < f.a.N ? f.a.last[n] - f.a.first[n] + 1 : 0;
        total += min(count[i], 1 << 24); /* of all, in 32 bits */
        longest = max(longest, (unsigned)count[i]);
    }
    total = __reduce_add_sync(0xFFFFFFFF, total);
    longest = __reduce_max_sync(0xFFFFFFFF, longest);
    int each = common_piece(f, total, longest);
    for (int i = 0; i < 2; i++) {
        int size = f.a.batch_invariant ? steady_piece(count[i]) : each;
        pieces[i] = count[i] > 0 ? (count[i] - 1) / size + 1 : 0;
    }
    int sum = pieces[0] + pieces[1], at = sum;
    for (int o = 1; o < 32; o *= 2) {
        int before = __shfl_up_sync(0xFFFFFFFF, at, o);
        at += lane >= o ? before : 0;
    }
    at -= sum;
    for (int i = 0; i < 2; i++) {
        int n = 2 * lane + i;
        if (n < f.a.N)
            start[n] = at;
        at += pieces[i];
        if (n == f.a.N - 1)
            start[f.a.N] = at;
    }
}

/* Piece `split` of row n, of `splits`, for one key head: keys [begin, end). Index counts the pieces
 * of all rows and heads, and is where its part goes. */
struct few_piece {
    int n, kvh, split, splits, begin, end, index;
};

/* No piece is empty: a row was cut into `splits` since it has more than splits - 1 times the keys
 * of a piece, and what it is divided into here is no larger. */
__device__ static inline struct few_piece few_piece_at(const struct attend &a, const int *start,
                                                       int index, int step)
{
    struct few_piece p;
    int piece = index / a.NKV, lo = 0, hi = a.N;
    while (hi - lo > 1) {
        int middle = (lo + hi) / 2;
        if (start[middle] <= piece)
            lo = middle;
        else
            hi = middle;
    }
    p.n = lo;
    p.kvh = index - piece * a.NKV;
    p.split = piece - start[lo];
    p.splits = start[lo + 1] - start[lo];
    p.index = index;
    int first = a.first[lo], end = a.last[lo] + 1;
    int each = (end - first + p.splits - 1) / p.splits;
    each = (each + step - 1) / step * step;
    p.begin = first + p.split * each;
    p.end = min(p.begin + each, end);
    return p;
}

/* The parts of head h of a group: values [index][group][D], and behind all of them maximum and sum
 * [index][group]. */
__device__ static inline float *few_part(const struct few_args &f, int index, int h)
{
    return f.a.parts + ((int64_t)index * f.a.group + h) * f.a.D;
}

__device__ static inline float2 *few_sums(const struct few_args &f, int index, int h)
{
    return (float2 *)few_part(f, f.room, 0) + (int64_t)index * f.a.group + h;
}

/* Element d of head h of a group. As an average of what f16 holds it is in the range of f16. */
__device__ static inline void few_put(const struct few_args &f, const struct few_piece &p, int h,
                                      int d, float v)
{
    int head = p.kvh * f.a.group + h;
    f.a.y[((int64_t)p.n * f.a.NH + head) * f.a.D + d] = v;
    if (!f.x16.out)
        return;
    *x_f16_at(f.x16, p.n, head * f.a.D + d) = __float2half_rn(v);
    if (head == 0 && d == 0)
        f.x16.scale[p.n] = 1;
}

/* The warps' results added in order. Some warp had a key, so top is finite. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_finish(const struct few_args &f, struct few_shared<D> &sh,
                                         const struct few_piece &p)
{
    int64_t head0 = (int64_t)p.n * f.a.NH + p.kvh * f.a.group;
    for (int i = threadIdx.x; i < f.a.group * D; i += FEW_THREADS) {
        int h = i / D, d = i % D;
        float top = sh.base[0][h], sum = 0, acc = 0;
#pragma unroll
        for (int w = 1; w < FEW_WARPS; w++)
            top = fmaxf(top, sh.base[w][h]);
#pragma unroll
        for (int w = 0; w < FEW_WARPS; w++) {
            float weight = fast_exp2(sh.base[w][h] - top);
            sum += weight * sh.sum[w][h];
            acc += weight * few_left<D, TYPE>(sh, w, h, d);
        }
        if (p.splits > 1)
            few_part(f, p.index, h)[d] = acc;
        else
            few_put(f, p, h, d, acc / sum);
        if (d == 0 && p.splits > 1)
            *few_sums(f, p.index, h) = make_float2(top, sum);
        else if (d == 0 && f.a.lse)
            f.a.lse[head0 + h] = (top + log2f(sum)) * LN2;
    }
}

/* Whether all parts of the row are there: then nobody else will ask. */
__device__ static inline bool few_all_left(const struct few_args &f, bool *last,
                                           const struct few_piece &p)
{
    __threadfence(); /* this thread's share of the part is there for all to see */
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *left = f.a.left + p.n * f.a.NKV + p.kvh;
        *last = atomicAdd(left, 1) == p.splits - 1;
        if (*last)
            *left = 0;
        __threadfence();
    }
    __syncthreads();
    return *last;
}

/* y of a row from its parts, in their order. They are read past the nearest cache, which does not
 * know what others wrote. */
template <int D>
__device__ static inline void few_add_up(const struct few_args &f, struct few_shared<D> &sh,
                                         const struct few_piece &p)
{
    int64_t head0 = (int64_t)p.n * f.a.NH + p.kvh * f.a.group;
    int first = p.index - p.split * f.a.NKV, lane = threadIdx.x % 32;
    float *weight = &sh.y[0][0][0]; /* [group, SPLITS_MAX] */
    for (int h = threadIdx.x / 32; h < f.a.group; h += FEW_WARPS) {
        float top = -INFINITY, sum = 0;
        for (int z = lane; z < p.splits; z += 32)
            top = fmaxf(top, __ldcg(few_sums(f, first + z * f.a.NKV, h)).x);
        top = warp_max(top);
        for (int z = lane; z < p.splits; z += 32) {
            float2 part = __ldcg(few_sums(f, first + z * f.a.NKV, h));
            float w = exp2f(part.x - top);
            weight[h * SPLITS_MAX + z] = w;
            sum += w * part.y;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sh.sum[0][h] = sum;
            if (f.a.lse)
                f.a.lse[head0 + h] = (top + log2f(sum)) * LN2;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < f.a.group * D; i += FEW_THREADS) {
        int h = i / D, d = i % D;
        const float *values = few_part(f, first, h) + d;
        int64_t stride = (int64_t)f.a.NKV * f.a.group * D;
        float acc = 0;
#pragma unroll 8
        for (int z = 0; z < p.splits; z++)
            acc += weight[h * SPLITS_MAX + z] * __ldcg(values + z * stride);
        few_put(f, p, h, d, acc / sh.sum[0][h]);
    }
}

/* ---- all of it ---- */

/* What a piece is of the store, and the step that is next. */
struct few_place {
    const uint8_t *k, *v;
    const int32_t *pages;
    int stride;
    struct few_step at;
};

/* The weights of norms. */
template <int D> struct few_norms {
    struct head_norm<D / 64> q, k;
};

template <int D>
__device__ static inline void few_load_norms(struct few_norms<D> &norms,
                                             const struct rope_args &rope)
{
    load_head_norm(norms.q, rope.q_norm, rope.q_type);
    load_head_norm(norms.k, rope.k_norm, rope.k_type);
}

/* Asks for the first keys and values of a piece, but the row's own, which may not be there yet. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline void few_begin(const struct few_args &args, struct few<D, TYPE> &f,
                                        struct few_place &s, const struct few_piece &p)
{
    using F = struct few<D, TYPE>;
    const struct attend &a = args.a;
    int64_t head = (int64_t)p.kvh * D * F::BYTES;
    s.k = a.k + head;
    s.v = a.v + head;
    s.pages = PAGED ? a.pages + a.tables[p.n] : NULL;
    s.stride = a.NKV * D * F::BYTES;
    s.at = {p.begin + (int)threadIdx.x / 32 * F::KEYS, p.end, 0};
    struct few_step there = s.at; /* but the row's own */
    there.end -= args.rope.N > 0 && p.split == p.splits - 1;
    if (there.end == p.begin)
        return;
    if (PAGED)
        there.shift = page_shift(s.pages, min(there.key, there.end - 1));
    few_load_keys(f, s.k, s.stride, there);
    few_load_values(f, s.v, s.stride, there);
}

/* What rope has to do for a piece: queries to shared memory, and if the row's own key is in it,
 * that and the value to the store and to shared memory. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_turn(const struct few_args &f, struct few_shared<D> &sh,
                                       struct few_norms<D> norms, const struct few_piece &p)
{
    const int W = D / 64, warp = threadIdx.x / 32, d = W * (threadIdx.x % 32);
    const struct rope_args &a = f.rope;
    const bool own = p.split == p.splits - 1, key = own && warp == FEW_WARPS - 1;
    const bool value = own && warp == FEW_WARPS - 2;
    const int64_t row = (int64_t)p.n * a.NKV + p.kvh;
    struct head<W> k, v;
    int64_t to = 0;
    if (!few<D, TYPE>::EARLY)
        few_load_norms(norms, a);
    if (key)
        load_head(k, a, a.k + row * D, p.n);
    if (value) {
        load_vec<W>(v.p, a.v + row * D + d);
        load_vec<W>(v.q, a.v + row * D + d + D / 2);
    }
    if (own)
        to = ((int64_t)a.kv_rows[p.n] * a.NKV + p.kvh) * D;
    for (int h = warp; h < f.a.group; h += FEW_WARPS) {
        int64_t at = (int64_t)p.n * a.NH + p.kvh * f.a.group + h;
        struct head<W> q;
        load_head(q, a, a.q + at * D, p.n);
        norm_rotate(q, norms.q, a.eps);
        store_head(q, sh.turned[h], 0, NBI_F32);
    }
    if (key) {
        norm_rotate(k, norms.k, a.eps);
        store_head(k, sh.own[0], 0, TYPE);
        store_head(k, a.k_cache, to, TYPE);
    }
    if (value) {
        store_head(v, sh.own[1], 0, TYPE);
        store_head(v, a.v_cache, to, TYPE);
    }
    __syncthreads();
}

/* Of the first step, the row's own key and value: those past the end are taken from it too. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_patch(struct few<D, TYPE> &f, const struct few_shared<D> &sh,
                                        const struct few_step &at)
{
    using F = struct few<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint8_t *k = (const uint8_t *)sh.own[0] + 16 * t;
    const uint8_t *v = (const uint8_t *)sh.own[1] + F::V_VEC * F::BYTES * g;
#pragma unroll
    for (int c = 0; c < F::KEYS / 8; c++)
        if (at.key + 8 * c + g >= at.end - 1)
#pragma unroll
            for (int i = 0; i < F::K_LOADS; i++)
                load_words<4>(f.k[c][i], k + 64 * i);
#pragma unroll
    for (int c = 0; c < F::KEYS / 4; c++)
        if (at.key + c / 4 * 16 + c % 4 / 2 * 8 + 2 * t + c % 2 >= at.end - 1)
#pragma unroll
            for (int i = 0; i < F::V_LOADS; i++)
                load_words<F::V_WORDS>(f.v[c][i], v + 8 * F::V_VEC * F::BYTES * i);
}

/* The warps take steps of the piece in turn. Values are on their way while scores are computed, the
 * next keys while values are used; and their page, which must be known first, before either. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline void few_attend(const struct few_args &args, struct few<D, TYPE> &f,
                                         struct few_shared<D> &sh, struct few_place &s,
                                         const struct few_piece &p)
{
    using F = struct few<D, TYPE>;
    const bool turned = args.rope.N > 0;
    const float *q = args.a.q + ((int64_t)p.n * args.a.NH + p.kvh * args.a.group) * D;
    bool first = true;
    f.base = -INFINITY;
    f.sum = 0;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f.y[i][e] = 0;
    if (turned && p.split == p.splits - 1)
        few_patch(f, sh, s.at);
    few_query<D, TYPE>(sh, turned ? sh.turned[0] : q, args.a.group, args.a.scale);
    __syncthreads();
    while (s.at.key < s.at.end) {
        struct few_step next = {s.at.key + FEW_WARPS * F::KEYS, s.at.end, 0};
        float w[F::KEYS / 8][2];
        if (PAGED)
            next.shift = page_shift(s.pages, min(next.key, s.at.end - 1));
        if (!first)
            few_load_values(f, s.v, s.stride, s.at);
        first = false;
        few_scores(f, sh, w);
        if (next.key < s.at.end)
            few_load_keys(f, s.k, s.stride, next);
        few_weights(f, w, s.at.end - s.at.key);
        few_values(f, w);
        s.at = next;
    }
    few_leave(sh, f);
    __syncthreads();
    few_finish<D, TYPE>(args, sh, p);
}

/* Rows of the store but a row's own were there before the step began, as first, last, pages and
 * tables were: with rope, which says that each row is alone with its store, they are asked for
 * before the kernel waits for the one before it. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__global__ __maxnreg__((few<D, TYPE>::REGISTERS)) static void k_attend_few(
    const __grid_constant__ struct few_args f)
{
    __shared__ struct few_shared<D> sh;
    const bool turns = f.rope.N > 0;
    bool waited = !turns;
    few_norms<D> norms = {};
    pdl_trigger();
    if (!turns)
        pdl_wait();
    else if (few<D, TYPE>::EARLY)
        few_load_norms(norms, f.rope);
    few_cut(f, sh.start);
    __syncthreads();
    for (int i = blockIdx.x; i < sh.start[f.a.N] * f.a.NKV; i += gridDim.x) {
        struct few_piece p = few_piece_at(f.a, sh.start, i, few<D, TYPE>::KEYS);
        struct few_place place;
        struct few<D, TYPE> own;
        few_begin<D, TYPE, PAGED>(f, own, place, p);
        if (!waited)
            pdl_wait();
        waited = true;
        if (turns)
            few_turn<D, TYPE>(f, sh, norms, p);
        few_attend<D, TYPE, PAGED>(f, own, sh, place, p);
        if (p.splits > 1 && few_all_left(f, &sh.last, p))
            few_add_up(f, sh, p);
        __syncthreads(); /* shared memory is free for the next piece */
    }
}

template <int D, enum nbi_dtype TYPE>
static enum nb_status launch_few(struct nbi_stream *s, const struct nbi_op_attention *a,
                                 const struct attend &k, const struct rope_args &rope)
{
    using F = struct few<D, TYPE>;
    int64_t slots = (int64_t)s->cuda->sms * F::CTAS; /* CTAs that are there at once */
    int64_t part = a->N * a->NH * (D + 2) * (int64_t)sizeof(float);
    int64_t most = nbi_cuda_attention_bytes(s->cuda, &s->limits) / part;
    struct few_args f = {};
    f.a = k;
    f.rope = rope;
    f.a.splits = most < 1 ? 1 : most < SPLITS_MAX ? (int)most : SPLITS_MAX;
    f.room = k.N * k.NKV * f.a.splits;
    f.wave = slots > k.NKV ? (unsigned)(slots / k.NKV) : 1;
    f.least = FEW_STEPS * FEW_WARPS * F::KEYS;
    NBI_BUG_IF(a->N > NBI_DECODE_ATTENTION_ROWS ||
               (a->batch_invariant && f.a.splits < STEADY_SPLITS));
    int64_t useful = k.N * k.NKV * ceil_div(a->max_keys, f.least);
    unsigned grid = (unsigned)(useful < slots ? useful : slots);
    /* Values are in the range of f16 then. Others round y by its largest, so that steady ones,
     * which may be among them, do too. */
    bool small = (TYPE == NBI_F16 || TYPE == NBI_E4M3) && !a->batch_invariant;
    if (small && a->NH * D % CUDA_TILE_COLS == 0 && a->NH * D <= s->limits.K)
        f.x16 = x_f16_of(s, a->N, a->NH * D);
    if (k.pages)
        CU_TRY(pdl_launch(s, k_attend_few<D, TYPE, true>, grid, FEW_THREADS, 0, f));
    else
        CU_TRY(pdl_launch(s, k_attend_few<D, TYPE, false>, grid, FEW_THREADS, 0, f));
    if (f.x16.out)
        s->ready = {k.y, a->N, a->NH * D};
    return NB_OK;
}

template <int D>
static enum nb_status attend_few(struct nbi_stream *s, const struct nbi_op_attention *a,
                                 const struct attend &k, const struct rope_args &rope)
{
    switch (a->kv.dtype) {
    case NBI_F16:
        return launch_few<D, NBI_F16>(s, a, k, rope);
    case NBI_BF16:
        return launch_few<D, NBI_BF16>(s, a, k, rope);
    default:
        return launch_few<D, NBI_E4M3>(s, a, k, rope);
    }
}

enum nb_status nbi_cuda_attend_few(struct nbi_stream *s, const struct nbi_op_attention *a,
                                   const struct attend &k, const struct rope_args &rope)
{
    return a->D == 128 ? attend_few<128>(s, a, k, rope) : attend_few<64>(s, a, k, rope);
}
