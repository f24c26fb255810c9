/* megakernel_attention.cuh - the decode megakernel: attention over a short context.
 *
 * Up to SHORT_CONTEXT_KEYS keys, every CTA that has columns of a head in o computes that head by
 * itself, from the keys and values in global memory. Several CTAs then do the same work, but none
 * waits for another. The first half of the file is shared with megakernel_attention_split.cuh,
 * which divides a longer context over CTAs.
 *
 * Softmaxes are computed online: partial ones (weighted sum of values, maximum, denominator) of
 * warps, and of CTAs, are merged at the end. */
#pragma once

#include "backend/cuda/megakernel.cuh"

/* ---- shared with split attention ---- */

/* Four values of a key or value. */
template <enum nbi_dtype T> struct kv4 {
    uint2 bits;
};

template <> struct kv4<NBI_E4M3> {
    uint32_t bits;
};

template <enum nbi_dtype T> __device__ static inline float4 to_float4(struct kv4<T> v)
{
    const uint32_t *w = (const uint32_t *)&v.bits;
    float2 f[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (T == NBI_F16)
            f[i] = __half22float2(*(const __half2 *)&w[i]);
        else if (T == NBI_BF16)
            f[i] = __bfloat1622float2(*(const __nv_bfloat162 *)&w[i]);
        else
            f[i] = __half22float2(__half2(
                __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(w[0] >> (16 * i)), __NV_E4M3)));
    }
    return make_float4(f[0].x, f[0].y, f[1].x, f[1].y);
}

/* Offsets into smem_layout.attention, in floats. Queries of G heads come first, then this token's
 * key and value in the cache's type, then partial softmaxes: of warps in a short context, of CTAs
 * in a split one. Before there are any, their place holds the scores of this token's own key. */
template <int G> struct attention_smem {
    static const int key = G * HEAD_DIM, value = key + HEAD_DIM, softmaxes = value + HEAD_DIM;
};

template <enum nbi_dtype T> /* megakernel_attention_split.cuh */
__device__ static inline void store_q_operand(const struct context &c, int head, int d, float v);

/* Normalizes and rotates the queries of G heads, one warp each. In the CTA that has the last keys,
 * two more warps prepare this token's key and value, and with write_cache store them to the cache.
 * SPLIT: queries are also stored as operands. */
template <enum nbi_dtype T, int G, bool SPLIT>
__device__ static void prepare_heads(struct context &c, int layer, const struct step_args &a,
                                     const struct kv_split &p, bool write_cache)
{
    int lane = c.lane, KV = c.m.NKV * HEAD_DIM, Q = c.m.NH * HEAD_DIM;
    if (c.warp > G + 1 || (c.warp >= G && p.split != p.splits - 1))
        return;
    const struct layer &l = c.layers()[layer];
    int64_t to = ((int64_t)a.kv_row * c.m.NKV + p.kv_head) * HEAD_DIM;
    bool is_q = c.warp < G, is_v = c.warp == G + 1;
    const uint64_t *from =
        c.m.qkv + (is_q ? (p.head + c.warp) * HEAD_DIM : Q + is_v * KV + p.kv_head * HEAD_DIM);
    const float *norms = c.m.qk_norms + (layer * 2 + !is_q) * HEAD_DIM;
    float v[4], norm[4], sum = 0;
    uint32_t raw[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        norm[i] = __ldg(norms + lane + 32 * i);
    poll<4>(c, raw, from + lane, 32);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __uint_as_float(raw[i]);
        sum += v[i] * v[i];
    }
    float *own = c.attention() + (is_v ? attention_smem<G>::value : attention_smem<G>::key);
    if (!is_v) {
        float f = rsqrtf(warp_sum(sum) / HEAD_DIM + c.m.eps) * (is_q ? rsqrtf(HEAD_DIM) : 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int d = lane + 32 * i;
            float cs = c.rope()[d], sn = c.rope()[HEAD_DIM / 2 + d];
            float x = v[i] * f * norm[i], y = v[i + 2] * f * norm[i + 2];
            v[i] = x * cs - y * sn;
            v[i + 2] = y * cs + x * sn;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int d = lane + 32 * i;
        if (is_q)
            c.attention()[c.warp * HEAD_DIM + d] = v[i];
        else
            store_f32(own, d, T, v[i]);
        if (is_q && SPLIT)
            store_q_operand<T>(c, c.warp, d, v[i]);
        if (!is_q && write_cache)
            store_f32(is_v ? l.v : l.k, to + d, T, v[i]);
    }
}

/* One element of a partial softmax: weighted sum of values, maximum, denominator. */
struct softmax_value {
    float v, max, sum;
};

/* Element d of the merge of softmaxes first, first + step, ... below `count`, `stride` floats
 * apart. The maximum is over all of them, so that results for different `first` can be added. */
__device__ static inline struct softmax_value merge_softmaxes(const float *softmaxes, int stride,
                                                              int d, int first, int step, int count)
{
    struct softmax_value j = {0, -INFINITY, 0};
#pragma unroll 4
    for (int p = 0; p < count; p++)
        j.max = fmaxf(j.max, softmaxes[p * stride + HEAD_DIM]);
#pragma unroll 4
    for (int p = first; p < count; p += step) {
        const float *one = softmaxes + p * stride;
        float2 max_sum = *(const float2 *)(one + HEAD_DIM);
        float w = __expf(max_sum.x - j.max);
        j.sum = fmaf(w, max_sum.y, j.sum);
        j.v = fmaf(w, one[d], j.v);
    }
    return j;
}

/* x of o = the head that `count` partial softmaxes in shared memory merge to. */
__device__ static void x_from_attention(struct context &c, int count)
{
    const int each = THREADS / HEAD_DIM; /* threads that share an element */
    int d = threadIdx.x % HEAD_DIM, part = threadIdx.x / HEAD_DIM;
    float *values = c.warp_sums(), *sums = (float *)c.squares(), v = 0, sum = 0;
    struct softmax_value j = merge_softmaxes(c.attention() + attention_smem<1>::softmaxes,
                                             SOFTMAX_FLOATS, d, part, each, count);
    values[threadIdx.x] = j.v;
    if (d == 0)
        sums[part] = j.sum;
    __syncthreads();
    if (part > 0)
        return;
#pragma unroll
    for (int i = 0; i < each; i++) {
        v += values[i * HEAD_DIM + d];
        sum += sums[i];
    }
    struct f16_pair two = to_f16_block(__fdividef(v, sum));
    uint32_t more = __shfl_down_sync(0xFFFFFFFF, two.bits, 2);
    if (d % 4 == 0)
        store_x4(c, d / 4, two.bits, more, two.scale);
}

/* ---- short context ---- */

#define WARP_KEYS 4 /* keys that a warp has at a time; a lane has four values of each */

template <enum nbi_dtype T> struct warp_keys {
    struct kv4<T> k[WARP_KEYS], v[WARP_KEYS];
};

/* Loads keys and values of `row` to row + 3, those before the end. */
template <enum nbi_dtype T>
__device__ static inline struct warp_keys<T> load_keys(const struct context &c, int layer,
                                                       const struct kv_split &p, int row) {
    const int size = T == NBI_E4M3 ? 1 : 2;
    const struct layer &l = c.layers()[layer];
    int64_t at = (((int64_t)row * c.m.NKV + p.kv_head) * HEAD_DIM + c.lane * 4) * size;
    int64_t stride = (int64_t)c.m.NKV * HEAD_DIM * size;
    struct warp_keys<T> r = {
    };
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++, at += stride)
        if (row + i < p.end) {
            r.k[i] = *(const struct kv4<T> *)((const uint8_t *)l.k + at);
            r.v[i] = *(const struct kv4<T> *)((const uint8_t *)l.v + at);
        }
    return r;
}

/* Prefetches the first keys and values, and the norms of queries and keys, to L2. */
template <enum nbi_dtype T>
__device__ static inline void prefetch_keys(const struct context &c, int layer,
                                            const struct kv_split &p)
{
    const int size = T == NBI_E4M3 ? 1 : 2;
    const struct layer &l = c.layers()[layer];
    int row = p.begin + threadIdx.x / 4, part = threadIdx.x % 4;
    int64_t at =
        (((int64_t)row * c.m.NKV + p.kv_head) * HEAD_DIM + part % 2 * (HEAD_DIM / 2)) * size;
    if (row < p.end)
        prefetch_l2((const uint8_t *)(part < 2 ? l.k : l.v) + at);
    if (threadIdx.x < 8)
        prefetch_l2(c.m.qk_norms + layer * 2 * HEAD_DIM + threadIdx.x * 32);
}

/* Sums of N values over all lanes; lane l gets the sum of value l / (32 / N). N is a power of two.
 * Each step halves the number of values and pairs lanes that differ in MASK, so this takes fewer
 * shuffles than N separate reductions. */
template <int N, int MASK> struct lane_sums {
    __device__ static inline float sum(const float s[N], int lane)
    {
        float half[N / 2];
        bool up = lane & MASK;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float mine = up ? s[i + N / 2] : s[i], other = up ? s[i] : s[i + N / 2];
            half[i] = mine + __shfl_xor_sync(0xFFFFFFFF, other, MASK);
        }
        return lane_sums<N / 2, MASK / 2>::sum(half, lane);
    }
};

template <int MASK> struct lane_sums<1, MASK> {
    __device__ static inline float sum(const float s[1], int lane)
    {
        (void)lane;
        float v = s[0];
#pragma unroll
        for (int mask = MASK; mask > 0; mask /= 2)
            v += __shfl_xor_sync(0xFFFFFFFF, v, mask);
        return v;
    }
};

__device__ static inline float dot4(float4 a, float4 b)
{
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

__device__ static inline void scale_add(float4 &sum, float by, float p, float4 v)
{
    sum = make_float4(fmaf(p, v.x, sum.x * by), fmaf(p, v.y, sum.y * by), fmaf(p, v.z, sum.z * by),
                      fmaf(p, v.w, sum.w * by));
}

/* A lane's part of a running softmax: four values, the maximum, the denominator. */
struct softmax {
    float4 acc;
    float max, sum;
};

/* Adds up to four keys, `valid` of them. */
template <enum nbi_dtype T>
__device__ static inline void softmax_add_keys(struct softmax &s, float4 q,
                                               const struct warp_keys<T> &r, int valid, int lane)
{
    const int each = 32 / WARP_KEYS; /* lanes that get the score of the same key */
    float scores[WARP_KEYS];
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++)
        scores[i] = dot4(q, to_float4<T>(r.k[i]));
    float score = lane_sums<WARP_KEYS, 16>::sum(scores, lane);
    bool in = lane / each < valid;
    float high = in ? fmaxf(s.max, score) : s.max;
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, 16));
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, 8));
    float keep = __expf(s.max - high), p = in ? __expf(score - high) : 0, sum = p;
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 16);
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 8);
    s.max = high;
    s.sum = s.sum * keep + sum;
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++)
        scale_add(s.acc, i == 0 ? keep : 1, __shfl_sync(0xFFFFFFFF, p, i * each),
                  to_float4<T>(r.v[i]));
}

/* Keys [begin, end) and this token's own for one head. Warps take four keys at a time in turn and
 * leave their partial softmaxes in shared memory. `next`: the warp's first keys, loaded already. */
template <enum nbi_dtype T>
__device__ static void attend_short(struct context &c, int layer, const struct kv_split &p,
                                    struct warp_keys<T> next)
{
    const int size = T == NBI_E4M3 ? 1 : 2;
    struct softmax s = {};
    s.max = -1e30f;
    float4 q = ((const float4 *)c.attention())[c.lane];
    int stop = p.end + 1; /* this token's own key comes last */
#pragma unroll 1
    for (int row = p.begin + c.warp * WARP_KEYS; row < stop; row += WARPS * WARP_KEYS) {
        struct warp_keys<T> now = next;
        next = load_keys<T>(c, layer, p, row + WARPS * WARP_KEYS);
        if (p.end - row < WARP_KEYS && p.end >= row) {
            const uint8_t *own =
                (const uint8_t *)(c.attention() + attention_smem<1>::key) + c.lane * 4 * size;
#pragma unroll
            for (int i = 0; i < WARP_KEYS; i++)
                if (row + i == p.end) {
                    now.k[i] = *(const struct kv4<T> *)own;
                    now.v[i] = *(const struct kv4<T> *)(own + HEAD_DIM * 4);
                }
        }
        softmax_add_keys<T>(s, q, now, stop - row, c.lane);
    }
    float *part = c.attention() + attention_smem<1>::softmaxes + c.warp * SOFTMAX_FLOATS;
    ((float2 *)part)[2 * c.lane] = make_float2(s.acc.x, s.acc.y);
    ((float2 *)part)[2 * c.lane + 1] = make_float2(s.acc.z, s.acc.w);
    if (c.lane == 0)
        *(float2 *)(part + HEAD_DIM) = make_float2(s.max, s.sum);
}
