/* megakernel_attention_split.cuh - the decode megakernel: attention over a long context.
 *
 * With more than SHORT_CONTEXT_KEYS keys, CTAs divide the keys of a group of G query heads that
 * share them. In a CTA, some warps have shared memory for a tile of 16 keys and one of 16 values (a
 * slot). The first tiles are loaded during the layer before, the next ones as soon as the slot has
 * been read:
 *
 *   per warp   wait keys -> S = K Q -> load next keys -> weights -> wait values -> Y += V^T W
 *              -> load next values -> ...
 *   per CTA    merge the warps' softmaxes, publish them as tagged values
 *   per head   CTAs with columns of the head in o poll and merge the CTAs' softmaxes
 *
 * Both products run on tensor cores with keys or values as operand A and all heads of the CTA as
 * operand B. B has eight columns: column h (0 to 3) is head h rounded to 16 bits, column h + 4 what
 * rounding left over, so that their sum has twice the digits. */
#pragma once

#include "backend/cuda/megakernel_attention.cuh"

#define BOX_BYTES    2048 /* a bulk tensor copy: 128 bytes each of 16 keys or values */
#define RESIDUAL_COL 4    /* from the column of a head to that of its rounding error */
#define LOG_WEIGHT_MAX                                                                             \
    4.1f /* weights go up to about e^4.1, so that small ones keep their digits                     \
          */

template <enum nbi_dtype T> struct kv_format {
    static constexpr bool BF = T == NBI_BF16;
    static constexpr enum nbi_dtype OPERAND = BF ? NBI_BF16 : NBI_F16;
    static constexpr int ROW_BYTES = HEAD_DIM * (T == NBI_E4M3 ? 1 : 2);
    static constexpr int BOXES = ROW_BYTES / 128;
    static constexpr int TILE_BYTES = BOXES * BOX_BYTES;
};

/* Offset of 16 bytes (a chunk) of a row in a slot: the 128-byte swizzle of bulk tensor copies.
 * Eight rows of an 8 x 8 matrix are in different banks. */
__device__ static inline uint32_t swizzle_128b(int row, int chunk)
{
    return chunk / 8 * BOX_BYTES + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

/* ---- loading keys and values ---- */

/* Shared memory of a warp for a tile of keys, or of values: address and mbarrier. */
struct kv_slot {
    uint32_t at, bar;
};

__device__ static inline struct kv_slot kv_slot_of(const struct context &c, int values)
{
    return {smem_addr(c.kv_tiles() + c.warp * c.m.kv_warp_bytes) + values * (c.m.kv_warp_bytes / 2),
            smem_addr(c.kv_full() + 2 * c.warp + values)};
}

/* The first row of the tile that is loaded for `row`: the last tile of a CTA begins earlier, since
 * the rows after its end may not exist. */
__device__ static inline int tile_begin(const struct kv_split &p, int row)
{
    return min(row, p.end - TILE_KEYS);
}

/* Starts to load keys (or values) `row` to row + 15, if the CTA has any of them. */
template <enum nbi_dtype T>
__device__ static inline void load_kv_tile(const struct context &c, const struct kv_split &p,
                                           int layer, int values, int row)
{
    struct kv_slot to = kv_slot_of(c, values);
    if (row >= p.end)
        return;
    row = tile_begin(p, row);
    copy_expect(to.bar, kv_format<T>::TILE_BYTES);
#if HAS_BULK_COPY
#pragma unroll
    for (int i = 0; i < kv_format<T>::BOXES; i++)
        tensor_copy_elected(to.at + i * BOX_BYTES, c.m.kv_maps + 2 * layer + values,
                            p.kv_head * HEAD_DIM + i * 64, row, to.bar);
#endif
}

/* Loads the first tiles of the next layer's attention: keys during GATE_UP, values during DOWN; for
 * layer 0 both during QKV. More at a time, or later, would make other CTAs wait. */
template <enum nbi_dtype T>
__device__ static inline void prefetch_kv_tiles(const struct context &c, int gemv, int layer,
                                                const struct kv_split &p)
{
    bool first = gemv == QKV && layer == 0, keys = first || gemv == GATE_UP,
         values = first || gemv == DOWN;
    int row = p.begin + c.warp * TILE_KEYS;
    if (gemv == QKV && threadIdx.x < 8) /* norms of queries and keys, for this layer */
        prefetch_l2(c.m.qk_norms + layer * 2 * HEAD_DIM + threadIdx.x * 32);
    layer += !first;
    if (!(keys || values) || layer >= c.m.layer_count || c.warp >= c.m.kv_warps ||
        p.split >= p.splits)
        return;
#if HAS_BULK_COPY
    /* The slots held softmaxes, written by ordinary stores. */
    fence_proxy_async();
#endif
    if (keys)
        load_kv_tile<T>(c, p, layer, 0, row);
    if (values)
        load_kv_tile<T>(c, p, layer, 1, row);
}

/* ---- operands ---- */

/* Stores element d of a query as operand B: word r of lane 4g + t has two elements of column g for
 * step r / 2 of 16 elements. Which two depends on how load_key_operands orders those of keys. */
template <enum nbi_dtype T>
__device__ static inline void store_q_operand(const struct context &c, int head, int d, float v)
{
    using F = struct kv_format<T>;
    int in = d % 16, t = T == NBI_E4M3 ? in / 4 : in % 8 / 2;
    int r = d / 16 % 2 * 2 + (T == NBI_E4M3 ? in % 4 / 2 : in / 8);
    int at = ((d / 32 * 32 + head * 4 + t) * 4 + r) * 2 + d % 2;
    store_f32(c.q_operands(), at, F::OPERAND, v);
    float residual = v - load_f32(c.q_operands(), at, F::OPERAND);
    store_f32(c.q_operands(), at + RESIDUAL_COL * 4 * 4 * 2, F::OPERAND, residual);
}

/* Sixteen keys as operands A of steps 2i and 2i + 1. */
template <enum nbi_dtype T>
__device__ static inline void load_key_operands(uint32_t a[2][4], uint32_t slot, int i, int lane)
{
    int row = lane % 16;
    if (T != NBI_E4M3) {
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_matrices(a[j], slot + swizzle_128b(row, 4 * i + 2 * j + lane / 16));
        return;
    }
    uint32_t w[4];
    load_matrices(w, slot + swizzle_128b(row, 2 * i + lane / 16));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[j / 2][j % 2] = e4m3_to_f16(w[j] & 0xFFFF);
        a[j / 2][j % 2 + 2] = e4m3_to_f16(w[j] >> 16);
    }
}

/* Sixteen values as operands A of elements 32i to 32i + 31: transposed, rows are elements. */
template <enum nbi_dtype T>
__device__ static inline void load_value_operands(uint32_t a[2][4], uint32_t slot, int i, int lane)
{
    if (T != NBI_E4M3) {
        int row = lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_matrices_transposed(a[j], slot + swizzle_128b(row, 4 * i + 2 * j + lane / 8 % 2));
        return;
    }
    uint32_t w[4];
    load_matrices_transposed(w, slot + swizzle_128b(lane % 16, 2 * i + lane / 16));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t v = __byte_perm(w[j], 0, 0x3120);
        a[j / 2][j % 2 * 2] = e4m3_to_f16(v & 0xFFFF);
        a[j / 2][j % 2 * 2 + 1] = e4m3_to_f16(v >> 16);
    }
}

/* The element that row g (or g + 8, if `low`) of operand i of values is. */
template <enum nbi_dtype T> __device__ static inline int element_of(int i, int g, int low)
{
    return T == NBI_E4M3 ? 16 * i + 2 * g + low : 16 * i + 8 * low + g;
}

/* Two weights as a register of operand B: rounded, or in columns 4 to 7 the rounding error. */
template <enum nbi_dtype T>
__device__ static inline uint32_t pack_weights(float a, float b, bool residual)
{
    if (kv_format<T>::BF) {
        __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        float2 f = __bfloat1622float2(h);
        if (residual)
            h = __floats2bfloat162_rn(a - f.x, b - f.y);
        return transpose_8x8(*(uint32_t *)&h);
    }
    __half2 h = __floats2half2_rn(a, b);
    float2 f = __half22float2(h);
    if (residual)
        h = __floats2half2_rn(a - f.x, b - f.y);
    return transpose_8x8(*(uint32_t *)&h);
}

/* ---- a warp's keys ---- */

/* A running softmax of up to four heads, whose weights are relative to e^base. Lane 4g + t has
 * heads 2t % 4 and the next one: of y, rows g and g + 8 of each operand of values; of sum, keys g
 * and g + 8 of each tile. */
struct tile_softmax {
    float y[HEAD_DIM / 16][4], base[2], sum[2];
};

/* Scores of keys g and g + 8 for both heads. */
template <enum nbi_dtype T>
__device__ static inline void score_tile(float s[4], const struct context &c, uint32_t slot)
{
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
        uint32_t a[2][4];
        uint4 q = c.q_operands()[i * 32 + c.lane];
        load_key_operands<T>(a, slot, i, c.lane);
        mma<kv_format<T>::BF>(part[0], a[0], q.x, q.y);
        mma<kv_format<T>::BF>(part[1], a[1], q.z, q.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v = part[0][i] + part[1][i];
        s[i] = v + __shfl_xor_sync(0xFFFFFFFF, v, 2);
    }
}

/* Turns scores into weights; rescales the softmax so far if its base must grow. */
__device__ static inline void scores_to_weights(struct tile_softmax &m, float s[4])
{
    float high[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
#pragma unroll
        for (int h = 0; h < 2; h++)
            high[h] = fmaxf(high[h], __shfl_xor_sync(0xFFFFFFFF, high[h], mask));
    high[0] = fmaxf(m.base[0], high[0] - LOG_WEIGHT_MAX);
    high[1] = fmaxf(m.base[1], high[1] - LOG_WEIGHT_MAX);
    if (__any_sync(0xFFFFFFFF, high[0] > m.base[0] || high[1] > m.base[1])) {
        float keep[2] = {__expf(m.base[0] - high[0]), __expf(m.base[1] - high[1])};
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16 * 4; i++)
            m.y[i / 4][i % 4] *= keep[i % 2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            m.sum[h] *= keep[h];
            m.base[h] = high[h];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[i] = __expf(s[i] - m.base[i % 2]);
        m.sum[i % 2] += s[i];
    }
}

/* Writes the warp's softmaxes over its slots, which have been read. */
template <enum nbi_dtype T>
__device__ static inline void store_softmax(const struct context &c, struct tile_softmax &m)
{
    float *part = (float *)(c.kv_tiles() + c.warp * c.m.kv_warp_bytes);
    int g = c.lane / 4, head = c.lane % 2 * 2;
    bool low = c.lane & 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            float mine = low ? m.y[i][h + 2] : m.y[i][h], other = low ? m.y[i][h] : m.y[i][h + 2];
            mine += __shfl_xor_sync(0xFFFFFFFF, other, 2);
            part[(head + h) * SOFTMAX_FLOATS + element_of<T>(i, g, low)] = mine;
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2)
            m.sum[h] += __shfl_xor_sync(0xFFFFFFFF, m.sum[h], mask);
        if (g == 0 && !low)
            *(float2 *)(part + (head + h) * SOFTMAX_FLOATS + HEAD_DIM) =
                make_float2(m.base[h], m.sum[h]);
    }
}

/* A warp's tiles of keys and values. */
template <enum nbi_dtype T>
__device__ static void attend_tiles(struct context &c, int layer, const struct kv_split &p)
{
    const struct kv_slot keys = kv_slot_of(c, 0), values = kv_slot_of(c, 1);
    const int stride = c.m.kv_warps * TILE_KEYS, g = c.lane / 4;
    struct tile_softmax m = {};
    m.base[0] = m.base[1] = -1e30f;
#pragma unroll 1
    for (int row = p.begin + c.warp * TILE_KEYS; row < p.end; row += stride) {
        int overlap = row - tile_begin(p, row); /* rows that belong to another tile */
        float s[4];
        mbarrier_wait(keys.bar, c.kv_phase);
        score_tile<T>(s, c, keys.at);
        __syncwarp();
        load_kv_tile<T>(c, p, layer, 0, row + stride);
        if (overlap > 0)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[i] = g + i / 2 * 8 < overlap ? -INFINITY : s[i];
        scores_to_weights(m, s);
        uint32_t first = pack_weights<T>(s[0], s[1], c.lane & 2),
                 second = pack_weights<T>(s[2], s[3], c.lane & 2);
        mbarrier_wait(values.bar, c.kv_phase);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            uint32_t a[2][4];
            load_value_operands<T>(a, values.at, i, c.lane);
            mma<kv_format<T>::BF>(m.y[2 * i], a[0], first, second);
            mma<kv_format<T>::BF>(m.y[2 * i + 1], a[1], first, second);
        }
        __syncwarp();
        load_kv_tile<T>(c, p, layer, 1, row + stride);
        c.kv_phase ^= 1;
    }
    store_softmax<T>(c, m);
}

/* ---- a CTA's keys ---- */

/* Published softmaxes of a head: the HEAD_DIM values of each split, then maximum and denominator of
 * each split. */
__device__ static inline uint64_t *published_softmaxes(const struct context &c, int head)
{
    return c.m.softmaxes + head * KV_SPLITS_MAX * SOFTMAX_FLOATS;
}

/* The score of this token's own key, one warp for each head. */
template <enum nbi_dtype T, int G>
__device__ static inline void score_own_key(const struct context &c)
{
    int h = WARPS - 1 - c.warp;
    const float *q = c.attention() + h * HEAD_DIM, *own = c.attention() + attention_smem<G>::key;
    float sum = 0;
    if (h >= G)
        return;
#pragma unroll
    for (int d = c.lane; d < HEAD_DIM; d += 32)
        sum += q[d] * load_f32(own, d, T);
    sum = warp_sum(sum);
    if (c.lane == 0)
        c.attention()[attention_smem<G>::softmaxes + h] = sum;
}

/* Attention of G heads over this CTA's keys; publishes the partial softmaxes. */
template <enum nbi_dtype T, int G>
__device__ static void attend_split(struct context &c, int layer, const struct step_args &a,
                                    const struct kv_split &p)
{
    bool last = p.split == p.splits - 1; /* has this token's own key */
    int count = min((p.end - p.begin + TILE_KEYS - 1) / TILE_KEYS, c.m.kv_warps);
    prepare_heads<T, G, true>(c, layer, a, p, p.head % (c.m.NH / c.m.NKV) == 0);
    __syncthreads();
    if (last)
        score_own_key<T, G>(c);
    if (c.warp < count)
        attend_tiles<T>(c, layer, p);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
        int h = i / HEAD_DIM, d = i % HEAD_DIM;
        uint64_t *values = published_softmaxes(c, p.head + h),
                 *max_sum = values + KV_SPLITS_MAX * HEAD_DIM + 2 * p.split;
        const float *softmaxes = (const float *)c.kv_tiles() + h * SOFTMAX_FLOATS;
        struct softmax_value j = merge_softmaxes(softmaxes, c.m.kv_warp_bytes / 4, d, 0, 1, count);
        if (last) {
            float own = c.attention()[attention_smem<G>::softmaxes + h], top = fmaxf(j.max, own);
            float old = __expf(j.max - top), w = __expf(own - top);
            float v = load_f32(c.attention() + attention_smem<G>::value, d, T);
            j = {fmaf(w, v, j.v * old), top, fmaf(j.sum, old, w)};
        }
        publish(c, values + p.split * HEAD_DIM + d, __float_as_uint(j.v));
        if (d == 0) {
            publish(c, max_sum, __float_as_uint(j.max));
            publish(c, max_sum + 1, __float_as_uint(j.sum));
        }
    }
}

/* Polls the partial softmaxes of a head from all its splits and stores them in shared memory. */
__device__ static inline void poll_softmaxes(const struct context &c, int head, int splits)
{
    const int EACH = KV_SPLITS_MAX * HEAD_DIM / THREADS;
    const uint64_t *from = published_softmaxes(c, head);
    float *to = c.attention() + attention_smem<1>::softmaxes, v[EACH], max_sum;
    int last = splits * HEAD_DIM - 1, i = threadIdx.x;
    bool current;
    do {
        current = poll_one(c, &max_sum,
                           from + (i < 2 * splits ? KV_SPLITS_MAX * HEAD_DIM + i : min(i, last)));
#pragma unroll
        for (int j = 0; j < EACH; j++)
            current &= poll_one(c, &v[j], from + min(i + j * THREADS, last));
    } while (!current);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        int at = i + j * THREADS;
        if (at <= last)
            to[at / HEAD_DIM * SOFTMAX_FLOATS + at % HEAD_DIM] = v[j];
    }
    if (i < 2 * splits)
        to[i / 2 * SOFTMAX_FLOATS + HEAD_DIM + i % 2] = max_sum;
}

/* ---- both kinds ---- */

/* x of o: attention of the one head whose columns of o this CTA multiplies. */
template <enum nbi_dtype T, int G, bool SHORT>
__device__ static void attention(struct context &c, int layer, const struct step_args &a,
                                 const struct kv_split &p)
{
    int head = (int)blockIdx.x / c.m.ctas_per_head, count = p.splits;
    if (!SHORT && p.split < p.splits)
        attend_split<T, G>(c, layer, a, p);
    if (!SHORT)
        __syncthreads(); /* poll_softmaxes overwrites the queries of attend_split */
    if (head >= c.m.NH)
        return;
    if (SHORT) {
        struct warp_keys<T> first = load_keys<T>(c, layer, p, p.begin + c.warp * WARP_KEYS);
        prepare_heads<T, 1, false>(
            c, layer, a, p, head % (c.m.NH / c.m.NKV) == 0 && blockIdx.x % c.m.ctas_per_head == 0);
        __syncthreads();
        attend_short<T>(c, layer, p, first);
        count = min(p.end - p.begin + WARP_KEYS, WARP_KEYS * WARPS) / WARP_KEYS;
    } else {
        poll_softmaxes(c, head, p.splits);
    }
    __syncthreads();
    x_from_attention(c, count);
}
