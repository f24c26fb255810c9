/* attention_decode.cu - attention for decoding: a few rows, each over keys of its own.
 *
 * The query heads that share a key head form the rows of a tensor core product, so each key and
 * value is read once, from global memory straight into fragments.
 *
 *   rows     n = 0      |---------------------------|            a row of q sees a range of keys
 *            n = 1      |-----|
 *            n = 2      |-------------|
 *
 *   splits   n = 0      |--------|--------|---------|            about the same length for all
 * rows; n = 1      |-----|                                  CTAs take (split, key head) in a n = 2
 * |------|------|                          grid-stride loop
 *
 *   CTA      the four warps take steps of 16 or 32 keys in rotation and merge their results at the
 *            end: that is y, or the partial result of the split (maximum, sum, weighted values)
 *   merge    the CTA that finishes the last split of a row merges its partials, in their order
 *
 * Splits are planned on the device, by every CTA for itself, so a launch depends on the number of
 * rows but not on their lengths and can be replayed in a CUDA graph. */
#include "backend/cuda/attention.cuh"
#include "backend/cuda/rope.cuh"

#define WARPS           4
#define THREADS         (32 * WARPS)
#define MIN_STEPS       4   /* of each warp in a split */
#define LONG_SPLIT_KEYS 512 /* splits this long are worth several waves of CTAs */
/* The largest weight is 2^WEIGHT_LOG2, so that small weights keep their digits in f16. */
#define WEIGHT_LOG2 6.0f

struct decode_args {
    struct attention_args a; /* a.splits: of a row at most */
    int max_partials;        /* that a.partials holds */
    unsigned wave;           /* splits of which all key heads run at once */
    unsigned min_split_keys;
    struct rope_args rope; /* of the same rows, if N is not 0 */
    struct x_f16 y_f16;    /* y packed as x of the next linear; out may be NULL */
};

/* Registers of a warp during a step of STEP_KEYS keys. Lane 4g + t reads VEC elements at a time: of
 * a key (column g of a fragment) the t-th of four, of a value the g-th of eight. So loads have 16
 * bytes; that permutes the K of the products, which is harmless as long as q has the same order,
 * and the columns of y. */
template <int D, enum nbi_dtype TYPE>
struct warp_state {
    static constexpr bool BF = TYPE == NBI_BF16;
    static constexpr int BYTES = TYPE == NBI_E4M3 ? 1 : 2;
    static constexpr int REGISTERS = BYTES == 1 ? 168 : 192;
    static constexpr bool NORMS_EARLY = BYTES > 1; /* registers suffice to keep them throughout */
    static constexpr int CTAS_PER_SM = BYTES == 1 ? 3 : 2; /* as registers allow */
    static constexpr int STEP_KEYS = 32 / BYTES;
    static constexpr int VEC = 16 / BYTES;                  /* of keys */
    static constexpr int K_LOADS = D / (4 * VEC);           /* of a key */
    static constexpr int V_VEC = VEC < D / 8 ? VEC : D / 8; /* of values */
    static constexpr int V_LOADS = D / (8 * V_VEC);
    static constexpr int V_WORDS = V_VEC * BYTES / 4;

    uint32_t k[STEP_KEYS / 8][K_LOADS][4];
    uint32_t v[STEP_KEYS / 4][V_LOADS][V_WORDS]; /* keys 2t, 2t + 1, 2t + 8, 2t + 9 of each 16 */
    float y[D / 8][4];
    float base, sum; /* of head g: exponent's base, sum of the weights of this lane's keys */
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

/* Keys [key, end) of which a step takes the first STEP_KEYS; page_offset leads to the KV cache. */
struct key_step {
    int key, end, page_offset;
};

/* Keys past the end repeat the last one. Their scores will be masked, and they are finite if the
 * row is. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void load_keys(struct warp_state<D, TYPE> &state, const uint8_t *k,
                                        int stride, struct key_step at)
{
    using F = struct warp_state<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 8; c++) {
        int kv_row = min(at.key + 8 * c + g, at.end - 1) + at.page_offset;
        const uint8_t *row = k + (int64_t)kv_row * stride + 16 * t;
#pragma unroll
        for (int i = 0; i < F::K_LOADS; i++)
            load_words<4>(state.k[c][i], row + 64 * i);
    }
}

template <int D, enum nbi_dtype TYPE>
__device__ static inline void load_values(struct warp_state<D, TYPE> &state, const uint8_t *v,
                                          int stride, struct key_step at)
{
    using F = struct warp_state<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 4; c++) {
        int key = at.key + c / 4 * 16 + c % 4 / 2 * 8 + 2 * t + c % 2;
        int kv_row = min(key, at.end - 1) + at.page_offset;
        const uint8_t *row = v + (int64_t)kv_row * stride + F::V_VEC * F::BYTES * g;
#pragma unroll
        for (int i = 0; i < F::V_LOADS; i++)
            load_words<F::V_WORDS>(state.v[c][i], row + 8 * F::V_VEC * F::BYTES * i);
    }
}

template <int D> struct smem_layout {
    uint4 q[D / 16][32]; /* fragments, by lane */
    union {
        struct {
            float q_rope[DECODE_GROUP_MAX][D]; /* queries after rope, if it is done here */
            uint4 own_kv[2][D / 8];            /* the row's own key and value, as in the KV cache */
        };
        /* Later: results of the warps, by lane; 34 avoids bank conflicts when they are read. */
        float y[WARPS][D / 4][34];
    };
    float base[WARPS][DECODE_GROUP_MAX], sum[WARPS][DECODE_GROUP_MAX];
    int first_split[NBI_DECODE_ATTENTION_ROWS + 1]; /* of each row; [N]: of all rows */
    bool last;                                      /* this CTA finished the row's last split */
};

static_assert(WARPS * 64 / 4 * 34 >= DECODE_GROUP_MAX * NBI_SPLITS_MAX,
              "weights of partials fit into y");

/* Rows 0 to 7 of the fragment are the heads rounded to 16 bits, rows 8 to 15 their rounding errors.
 * The sum of both products is about as precise as f32, and the rows would be idle otherwise. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void load_query(struct smem_layout<D> &sh, const float *q, int group,
                                         float scale)
{
    using F = struct warp_state<D, TYPE>;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int s = threadIdx.x / 32; s < D / 16; s += WARPS) {
        int d = s / (F::VEC / 4) * 4 * F::VEC + t * F::VEC + s % (F::VEC / 4) * 4;
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 x = make_float2(0, 0);
            if (g < group)
                x = *(const float2 *)(q + g * D + d + 2 * i);
            x.x *= scale, x.y *= scale;
            if (!F::BF)
                x.x = clamp_f16(x.x), x.y = clamp_f16(x.y);
            w[2 * i] = pack<F::BF>(x.x, x.y);
            w[2 * i + 1] = pack_residual<F::BF>(w[2 * i], x.x, x.y);
        }
        sh.q[s][lane] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* s[c]: scores of head g with keys 8 c + 2t and 8 c + 2t + 1. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void qk_mma(const struct warp_state<D, TYPE> &state,
                                     const struct smem_layout<D> &sh, float s[][2])
{
    using F = struct warp_state<D, TYPE>;
    float acc[F::STEP_KEYS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t q[4];
        load_shared(q, smem_addr(&sh.q[i][threadIdx.x % 32]));
#pragma unroll
        for (int c = 0; c < F::STEP_KEYS / 8; c++) {
            if (F::BYTES == 1) {
                uint32_t w = state.k[c][i / 4][i % 4];
                mma<F::BF>(acc[c], q, e4m3_to_f16(w & 0xFFFF), e4m3_to_f16(w >> 16));
            } else {
                const uint32_t *w = &state.k[c][i / 2][i % 2 * 2];
                mma<F::BF>(acc[c], q, w[0], w[1]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 8; c++) {
        s[c][0] = acc[c][0] + acc[c][2];
        s[c][1] = acc[c][1] + acc[c][3];
    }
}

/* Online softmax: scores become weights. `valid` keys are not past the end. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void softmax_step(struct warp_state<D, TYPE> &state, float s[][2],
                                           int valid)
{
    using F = struct warp_state<D, TYPE>;
    int t = threadIdx.x % 4;
    float row_max = -INFINITY;
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 8; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (8 * c + 2 * t + e >= valid)
                s[c][e] = -INFINITY;
            row_max = fmaxf(row_max, s[c][e]);
        }
    row_max = quad_max(row_max) - WEIGHT_LOG2;
    float rescale = 1;
    if (row_max > state.base + RESCALE_LOG2) {
        rescale = exp2_approx(state.base - row_max);
        state.base = row_max;
    }
    if (__any_sync(0xFFFFFFFF, rescale != 1)) {
        state.sum *= rescale;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                state.y[i][e] *= rescale;
    }
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 8; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[c][e] = exp2_approx(s[c][e] - state.base);
            state.sum += s[c][e];
        }
}

/* y += weights times values. A fragment has two keys in a register, the loads gave two elements of
 * one key; byte permutations transpose them. Weights are split like q. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void pv_mma(struct warp_state<D, TYPE> &state, const float s[][2])
{
    using F = struct warp_state<D, TYPE>;
#pragma unroll
    for (int j = 0; j < F::STEP_KEYS / 16; j++) {
        uint32_t p[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *w = s[2 * j + i];
            p[2 * i] = pack<F::BF>(w[0], w[1]);
            p[2 * i + 1] = pack_residual<F::BF>(p[2 * i], w[0], w[1]);
        }
#pragma unroll
        for (int i = 0; i < F::V_LOADS * F::V_WORDS; i++) {
            uint32_t w[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                w[c] = state.v[4 * j + c][i / F::V_WORDS][i % F::V_WORDS];
            if (F::BYTES == 1) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    uint32_t b0 = __byte_perm(w[0], w[1], e ? 0x7362 : 0x5140);
                    uint32_t b1 = __byte_perm(w[2], w[3], e ? 0x7362 : 0x5140);
                    mma<F::BF>(state.y[4 * i + 2 * e], p, e4m3_to_f16(b0 & 0xFFFF),
                               e4m3_to_f16(b1 & 0xFFFF));
                    mma<F::BF>(state.y[4 * i + 2 * e + 1], p, e4m3_to_f16(b0 >> 16),
                               e4m3_to_f16(b1 >> 16));
                }
            } else {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    mma<F::BF>(state.y[2 * i + e], p, __byte_perm(w[0], w[1], e ? 0x7632 : 0x5410),
                               __byte_perm(w[2], w[3], e ? 0x7632 : 0x5410));
            }
        }
    }
}

template <int D, enum nbi_dtype TYPE>
__device__ static inline void store_warp_result(struct smem_layout<D> &sh,
                                                struct warp_state<D, TYPE> &state)
{
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum = quad_sum(state.sum);
    if (t == 0) {
        sh.base[warp][g] = state.base;
        sh.sum[warp][g] = sum;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            sh.y[warp][2 * i + e][threadIdx.x % 32] = state.y[i][e] + state.y[i][e + 2];
}

/* Element d of head h of the result of a warp. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline float warp_result(const struct smem_layout<D> &sh, int warp, int h, int d)
{
    const int V = warp_state<D, TYPE>::V_VEC, i = d / (8 * V) * V + d % V, column = d / V % 8;
    return sh.y[warp][2 * i + column % 2][4 * h + column / 2];
}

/* ---- splits ---- */

/* Keys of a split, a multiple of the step, for N rows with `total` keys together. If a split has at
 * least total / (S - N + 1) keys, there are at most S splits, whatever the lengths of the rows. One
 * row gets one wave of CTAs; several, which may differ in length, get about four waves as long as
 * splits have LONG_SPLIT_KEYS. */
__device__ static inline int common_split_keys(const struct decode_args &args, unsigned total,
                                               unsigned longest)
{
    unsigned N = args.a.N, step = args.min_split_keys / (MIN_STEPS * WARPS), keys = total;
    if (N <= args.wave)
        keys = (total - 1) / (args.wave - N + 1) + 1;
    if (N > 1)
        keys = min(keys, max((unsigned)LONG_SPLIT_KEYS,
                             (total - 1) / (max(4 * args.wave, 2 * N) - N + 1) + 1));
    keys = max(max(keys, args.min_split_keys), longest / (unsigned)args.a.splits + 1);
    return (int)((keys + step - 1) / step * step);
}

/* Fills first_split. A lane of the first warp plans two rows; each row has at least one split. */
__device__ static inline void plan_splits(const struct decode_args &args, int *first_split)
{
    int lane = threadIdx.x, count[2], splits[2];
    unsigned total = 0, longest = 0;
    if (lane >= 32)
        return;
    for (int i = 0; i < 2; i++) {
        int n = 2 * lane + i;
        count[i] = n < args.a.N ? args.a.last[n] - args.a.first[n] + 1 : 0;
        total += min(count[i], 1 << 24); /* 64 rows fit into 32 bits */
        longest = max(longest, (unsigned)count[i]);
    }
    total = __reduce_add_sync(0xFFFFFFFF, total);
    longest = __reduce_max_sync(0xFFFFFFFF, longest);
    int keys = common_split_keys(args, total, longest);
    for (int i = 0; i < 2; i++) {
        int size = args.a.batch_invariant ? invariant_split_keys(count[i]) : keys;
        splits[i] = count[i] > 0 ? (count[i] - 1) / size + 1 : 0;
    }
    int sum = splits[0] + splits[1], at = sum;
    for (int o = 1; o < 32; o *= 2) {
        int below = __shfl_up_sync(0xFFFFFFFF, at, o);
        at += lane >= o ? below : 0;
    }
    at -= sum;
    for (int i = 0; i < 2; i++) {
        int n = 2 * lane + i;
        if (n < args.a.N)
            first_split[n] = at;
        at += splits[i];
        if (n == args.a.N - 1)
            first_split[args.a.N] = at;
    }
}

/* Split `split` of `splits` of row n for one key head: keys [begin, end). index counts over all
 * rows and key heads, and is where its partials go. */
struct kv_split {
    int n, kvh, split, splits, begin, end, index;
};

/* No split is empty: a row has more than splits - 1 times the planned keys of a split, and dividing
 * it evenly makes splits no longer than planned. */
__device__ static inline struct kv_split kv_split_at(const struct attention_args &a,
                                                     const int *first_split, int index, int step)
{
    struct kv_split p;
    int row_split = index / a.NKV, lo = 0, hi = a.N;
    while (hi - lo > 1) {
        int middle = (lo + hi) / 2;
        if (first_split[middle] <= row_split)
            lo = middle;
        else
            hi = middle;
    }
    p.n = lo;
    p.kvh = index - row_split * a.NKV;
    p.split = row_split - first_split[lo];
    p.splits = first_split[lo + 1] - first_split[lo];
    p.index = index;
    int first = a.first[lo], end = a.last[lo] + 1;
    int keys = (end - first + p.splits - 1) / p.splits;
    keys = (keys + step - 1) / step * step;
    p.begin = first + p.split * keys;
    p.end = min(p.begin + keys, end);
    return p;
}

/* Partials of head h of a group: values [max_partials][group][D], then maximum and sum
 * [max_partials][group]. */
__device__ static inline float *partial_values(const struct decode_args &args, int index, int h)
{
    return args.a.partials + ((int64_t)index * args.a.group + h) * args.a.D;
}

__device__ static inline float2 *partial_sums(const struct decode_args &args, int index, int h)
{
    return (float2 *)partial_values(args, args.max_partials, 0) + (int64_t)index * args.a.group + h;
}

/* Element d of head h of a group. y is an average of values, so it is in the range of f16 if those
 * are; the scale of the packed row is 1. */
__device__ static inline void store_y(const struct decode_args &args, const struct kv_split &p,
                                      int h, int d, float v)
{
    int head = p.kvh * args.a.group + h;
    args.a.y[((int64_t)p.n * args.a.NH + head) * args.a.D + d] = v;
    if (!args.y_f16.out)
        return;
    *x_f16_at(args.y_f16, p.n, head * args.a.D + d) = __float2half_rn(v);
    if (head == 0 && d == 0)
        args.y_f16.scale[p.n] = 1;
}

/* Merges the results of the warps in order. At least one warp had a key, so row_max is finite. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void merge_warps(const struct decode_args &args, struct smem_layout<D> &sh,
                                          const struct kv_split &p)
{
    int64_t head0 = (int64_t)p.n * args.a.NH + p.kvh * args.a.group;
    for (int i = threadIdx.x; i < args.a.group * D; i += THREADS) {
        int h = i / D, d = i % D;
        float row_max = sh.base[0][h], sum = 0, acc = 0;
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            row_max = fmaxf(row_max, sh.base[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float weight = exp2_approx(sh.base[w][h] - row_max);
            sum += weight * sh.sum[w][h];
            acc += weight * warp_result<D, TYPE>(sh, w, h, d);
        }
        if (p.splits > 1)
            partial_values(args, p.index, h)[d] = acc;
        else
            store_y(args, p, h, d, acc / sum);
        if (d == 0 && p.splits > 1)
            *partial_sums(args, p.index, h) = make_float2(row_max, sum);
        else if (d == 0 && args.a.lse)
            args.a.lse[head0 + h] = (row_max + log2f(sum)) * LN2;
    }
}

/* Counts a finished split. True in the CTA that finishes the last split of a row. */
__device__ static inline bool arrive_last(const struct decode_args &args, bool *last,
                                          const struct kv_split &p)
{
    __threadfence(); /* publishes this thread's part of the partials */
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *arrived = args.a.arrived + p.n * args.a.NKV + p.kvh;
        *last = atomicAdd(arrived, 1) == p.splits - 1;
        if (*last)
            *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return *last;
}

/* y of a row from its partials, in their order. L1 is not coherent with what other CTAs wrote, so
 * they are read with ld.cg. */
template <int D>
__device__ static inline void merge_splits(const struct decode_args &args,
                                           struct smem_layout<D> &sh, const struct kv_split &p)
{
    int64_t head0 = (int64_t)p.n * args.a.NH + p.kvh * args.a.group;
    int first = p.index - p.split * args.a.NKV, lane = threadIdx.x % 32;
    float *weight = &sh.y[0][0][0]; /* [group, NBI_SPLITS_MAX] */
    for (int h = threadIdx.x / 32; h < args.a.group; h += WARPS) {
        float row_max = -INFINITY, sum = 0;
        for (int z = lane; z < p.splits; z += 32)
            row_max = fmaxf(row_max, __ldcg(partial_sums(args, first + z * args.a.NKV, h)).x);
        row_max = warp_max(row_max);
        for (int z = lane; z < p.splits; z += 32) {
            float2 partial = __ldcg(partial_sums(args, first + z * args.a.NKV, h));
            float w = exp2f(partial.x - row_max);
            weight[h * NBI_SPLITS_MAX + z] = w;
            sum += w * partial.y;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sh.sum[0][h] = sum;
            if (args.a.lse)
                args.a.lse[head0 + h] = (row_max + log2f(sum)) * LN2;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < args.a.group * D; i += THREADS) {
        int h = i / D, d = i % D;
        const float *values = partial_values(args, first, h) + d;
        int64_t stride = (int64_t)args.a.NKV * args.a.group * D;
        float acc = 0;
#pragma unroll 8
        for (int z = 0; z < p.splits; z++)
            acc += weight[h * NBI_SPLITS_MAX + z] * __ldcg(values + z * stride);
        store_y(args, p, h, d, acc / sh.sum[0][h]);
    }
}

/* ---- a split ---- */

/* The key head in the KV cache, and the next step. */
struct kv_cursor {
    const uint8_t *k, *v;
    const int32_t *pages;
    int stride;
    struct key_step at;
};

/* Weights of the norms of q and k. */
template <int D> struct rope_norms {
    struct head_norm<D / 64> q, k;
};

template <int D>
__device__ static inline void load_rope_norms(struct rope_norms<D> &norms,
                                              const struct rope_args &rope)
{
    load_head_norm(norms.q, rope.q_norm, rope.q_type);
    load_head_norm(norms.k, rope.k_norm, rope.k_type);
}

/* Loads the first keys and values of a split, except for the row's own, which rope has yet to
 * produce. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline void prefetch_split(const struct decode_args &args,
                                             struct warp_state<D, TYPE> &state, struct kv_cursor &s,
                                             const struct kv_split &p)
{
    using F = struct warp_state<D, TYPE>;
    const struct attention_args &a = args.a;
    int64_t head = (int64_t)p.kvh * D * F::BYTES;
    s.k = a.k + head;
    s.v = a.v + head;
    s.pages = PAGED ? a.pages + a.tables[p.n] : NULL;
    s.stride = a.NKV * D * F::BYTES;
    s.at = {p.begin + (int)threadIdx.x / 32 * F::STEP_KEYS, p.end, 0};
    struct key_step complete = s.at; /* without the row's own */
    complete.end -= args.rope.N > 0 && p.split == p.splits - 1;
    if (complete.end == p.begin)
        return;
    if (PAGED)
        complete.page_offset = page_offset(s.pages, min(complete.key, complete.end - 1));
    load_keys(state, s.k, s.stride, complete);
    load_values(state, s.v, s.stride, complete);
}

/* Rope for a split: queries go to shared memory. In the row's last split its own key and value go
 * to the KV cache and to shared memory, too. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void apply_rope(const struct decode_args &args, struct smem_layout<D> &sh,
                                         struct rope_norms<D> norms, const struct kv_split &p)
{
    const int W = D / 64, warp = threadIdx.x / 32, d = W * (threadIdx.x % 32);
    const struct rope_args &a = args.rope;
    const bool own = p.split == p.splits - 1, key = own && warp == WARPS - 1;
    const bool value = own && warp == WARPS - 2;
    const int64_t row = (int64_t)p.n * a.NKV + p.kvh;
    struct head<W> k, v;
    int64_t to = 0;
    if (!warp_state<D, TYPE>::NORMS_EARLY)
        load_rope_norms(norms, a);
    if (key)
        load_head(k, a, a.k + row * D, p.n);
    if (value) {
        load_vec<W>(v.p, a.v + row * D + d);
        load_vec<W>(v.q, a.v + row * D + d + D / 2);
    }
    if (own)
        to = ((int64_t)a.kv_rows[p.n] * a.NKV + p.kvh) * D;
    for (int h = warp; h < args.a.group; h += WARPS) {
        int64_t at = (int64_t)p.n * a.NH + p.kvh * args.a.group + h;
        struct head<W> q;
        load_head(q, a, a.q + at * D, p.n);
        norm_rotate(q, norms.q, a.eps);
        store_head(q, sh.q_rope[h], 0, NBI_F32);
    }
    if (key) {
        norm_rotate(k, norms.k, a.eps);
        store_head(k, sh.own_kv[0], 0, TYPE);
        store_head(k, a.k_cache, to, TYPE);
    }
    if (value) {
        store_head(v, sh.own_kv[1], 0, TYPE);
        store_head(v, a.v_cache, to, TYPE);
    }
    __syncthreads();
}

/* The own key and value of the row into the first step, and into the steps past the end. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void patch_own_kv(struct warp_state<D, TYPE> &state,
                                           const struct smem_layout<D> &sh,
                                           const struct key_step &at)
{
    using F = struct warp_state<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint8_t *k = (const uint8_t *)sh.own_kv[0] + 16 * t;
    const uint8_t *v = (const uint8_t *)sh.own_kv[1] + F::V_VEC * F::BYTES * g;
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 8; c++)
        if (at.key + 8 * c + g >= at.end - 1)
#pragma unroll
            for (int i = 0; i < F::K_LOADS; i++)
                load_words<4>(state.k[c][i], k + 64 * i);
#pragma unroll
    for (int c = 0; c < F::STEP_KEYS / 4; c++)
        if (at.key + c / 4 * 16 + c % 4 / 2 * 8 + 2 * t + c % 2 >= at.end - 1)
#pragma unroll
            for (int i = 0; i < F::V_LOADS; i++)
                load_words<F::V_WORDS>(state.v[c][i], v + 8 * F::V_VEC * F::BYTES * i);
}

/* The warps take steps of the split in rotation. Values load while scores are computed, the next
 * keys while values are used, and the page of the next keys before both. */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__device__ static inline void
attend_split(const struct decode_args &args, struct warp_state<D, TYPE> &state,
             struct smem_layout<D> &sh, struct kv_cursor &s, const struct kv_split &p)
{
    using F = struct warp_state<D, TYPE>;
    const bool has_rope = args.rope.N > 0;
    const float *q = args.a.q + ((int64_t)p.n * args.a.NH + p.kvh * args.a.group) * D;
    bool first = true;
    state.base = -INFINITY;
    state.sum = 0;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            state.y[i][e] = 0;
    if (has_rope && p.split == p.splits - 1)
        patch_own_kv(state, sh, s.at);
    load_query<D, TYPE>(sh, has_rope ? sh.q_rope[0] : q, args.a.group, args.a.scale);
    __syncthreads();
    while (s.at.key < s.at.end) {
        struct key_step next = {s.at.key + WARPS * F::STEP_KEYS, s.at.end, 0};
        float w[F::STEP_KEYS / 8][2];
        if (PAGED)
            next.page_offset = page_offset(s.pages, min(next.key, s.at.end - 1));
        if (!first)
            load_values(state, s.v, s.stride, s.at);
        first = false;
        qk_mma(state, sh, w);
        if (next.key < s.at.end)
            load_keys(state, s.k, s.stride, next);
        softmax_step(state, w, s.at.end - s.at.key);
        pv_mma(state, w);
        s.at = next;
    }
    store_warp_result(sh, state);
    __syncthreads();
    merge_warps<D, TYPE>(args, sh, p);
}

/* With rope there is one row per sequence: all rows of the KV cache but each row's own, and first,
 * last, pages and tables, were complete before the step began. So they are read before
 * pdl_wait(). */
template <int D, enum nbi_dtype TYPE, bool PAGED>
__global__ __maxnreg__((warp_state<D, TYPE>::REGISTERS)) static void k_attention_decode(
    const __grid_constant__ struct decode_args args)
{
    __shared__ struct smem_layout<D> sh;
    const bool has_rope = args.rope.N > 0;
    bool waited = !has_rope;
    rope_norms<D> norms = {};
    pdl_trigger();
    if (!has_rope)
        pdl_wait();
    else if (warp_state<D, TYPE>::NORMS_EARLY)
        load_rope_norms(norms, args.rope);
    plan_splits(args, sh.first_split);
    __syncthreads();
    for (int i = blockIdx.x; i < sh.first_split[args.a.N] * args.a.NKV; i += gridDim.x) {
        struct kv_split p = kv_split_at(args.a, sh.first_split, i, warp_state<D, TYPE>::STEP_KEYS);
        struct kv_cursor cursor;
        struct warp_state<D, TYPE> state;
        prefetch_split<D, TYPE, PAGED>(args, state, cursor, p);
        if (!waited)
            pdl_wait();
        waited = true;
        if (has_rope)
            apply_rope<D, TYPE>(args, sh, norms, p);
        attend_split<D, TYPE, PAGED>(args, state, sh, cursor, p);
        if (p.splits > 1 && arrive_last(args, &sh.last, p))
            merge_splits(args, sh, p);
        __syncthreads(); /* shared memory is free for the next split */
    }
}

template <int D, enum nbi_dtype TYPE>
static enum nb_status launch(struct nbi_stream *s, const struct nbi_op_attention *a,
                             const struct attention_args &k, const struct rope_args &rope,
                             bool *packed)
{
    using F = struct warp_state<D, TYPE>;
    int64_t resident = (int64_t)s->cuda->sms * F::CTAS_PER_SM; /* CTAs that run at once */
    int64_t row_bytes = a->N * a->NH * (D + 2) * (int64_t)sizeof(float);
    int64_t limit = nbi_cuda_attention_bytes(&s->limits) / row_bytes;
    struct decode_args args = {};
    args.a = k;
    args.rope = rope;
    args.a.splits = limit < 1 ? 1 : limit < NBI_SPLITS_MAX ? (int)limit : NBI_SPLITS_MAX;
    args.max_partials = k.N * k.NKV * args.a.splits;
    args.wave = resident > k.NKV ? (unsigned)(resident / k.NKV) : 1;
    args.min_split_keys = MIN_STEPS * WARPS * F::STEP_KEYS;
    NBI_BUG_IF(a->N > NBI_DECODE_ATTENTION_ROWS ||
               (a->batch_invariant && args.a.splits < NBI_INVARIANT_SPLITS));
    int64_t useful = k.N * k.NKV * ceil_div(a->max_keys, args.min_split_keys);
    unsigned grid = (unsigned)(useful < resident ? useful : resident);
    /* f16 and e4m3 values are in the range of f16, so y needs no scale. In other cases
     * pack_activations.cu scales each row by its amax. Batch-invariant calls always take that path,
     * since the same row may also come from a kernel that does not pack. */
    bool small = (TYPE == NBI_F16 || TYPE == NBI_E4M3) && !a->batch_invariant;
    if (packed && small && a->NH * D % CUDA_TILE_COLS == 0 && a->NH * D <= s->limits.K)
        args.y_f16 = x_f16_of(s, a->N, a->NH * D);
    if (k.pages)
        CU_TRY(pdl_launch(s, k_attention_decode<D, TYPE, true>, grid, THREADS, 0, args));
    else
        CU_TRY(pdl_launch(s, k_attention_decode<D, TYPE, false>, grid, THREADS, 0, args));
    if (packed)
        *packed = args.y_f16.out != NULL;
    return NB_OK;
}

template <int D>
static enum nb_status attention_decode(struct nbi_stream *s, const struct nbi_op_attention *a,
                                       const struct attention_args &k, const struct rope_args &rope,
                                       bool *packed)
{
    switch (a->kv.dtype) {
    case NBI_F16:
        return launch<D, NBI_F16>(s, a, k, rope, packed);
    case NBI_BF16:
        return launch<D, NBI_BF16>(s, a, k, rope, packed);
    default:
        return launch<D, NBI_E4M3>(s, a, k, rope, packed);
    }
}

enum nb_status nbi_cuda_attention_decode(struct nbi_stream *s, const struct nbi_op_attention *a,
                                         const struct attention_args &k,
                                         const struct rope_args &rope, bool *packed)
{
    return a->D == 128 ? attention_decode<128>(s, a, k, rope, packed)
                       : attention_decode<64>(s, a, k, rope, packed);
}
