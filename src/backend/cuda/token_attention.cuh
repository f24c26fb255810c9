/* token_attention.cuh - the kernel of token.cu: attention of one token. */
#pragma once

#include "backend/cuda/token_steps.cuh"

/* Four values of a row of keys or values. */
template <enum nbi_dtype T> struct loaded {
    uint2 bits;
};

template <> struct loaded<NBI_E4M3> {
    uint32_t bits;
};

template <enum nbi_dtype T> __device__ static inline float4 four(struct loaded<T> v)
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

#define ROWS 4 /* of a store that a warp has at a time, four values of each a lane */

template <enum nbi_dtype T> struct rows_of {
    struct loaded<T> k[ROWS], v[ROWS];
};

/* Where attention keeps things, in floats: queries, this token's key and value (of the store's
 * type), softmaxes by warp. */
template <int G> struct attend_at {
    static const int key = G * HEAD, value = key + HEAD, parts = value + HEAD;
    static const int stride = PART_FLOATS(G);
};

/* Queries of G heads, by a warp each; this token's key and value, by two more if they are asked
 * for, and to the store if `keep`. */
template <enum nbi_dtype T, int G>
__device__ static void prepare_heads(struct context &c, int layer, const struct step_args &a,
                                     const struct rows_part &p, bool keep)
{
    int lane = c.lane, KV = c.m.NKV * HEAD, Q = c.m.NH * HEAD;
    if (c.warp > G + 1 || (c.warp >= G && p.split != p.used - 1))
        return;
    const struct layer &l = c.layers()[layer];
    int64_t to = ((int64_t)a.slot * c.m.NKV + p.kv) * HEAD;
    bool is_q = c.warp < G, is_v = c.warp == G + 1;
    const uint64_t *from =
        c.m.qkv + (is_q ? (p.head + c.warp) * HEAD : Q + is_v * KV + p.kv * HEAD);
    const float *norms = c.m.head_norms + (layer * 2 + !is_q) * HEAD;
    float v[4], norm[4], sum = 0;
    uint32_t raw[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        norm[i] = __ldg(norms + lane + 32 * i);
    take<4>(c, raw, from + lane, 32);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __uint_as_float(raw[i]);
        sum += v[i] * v[i];
    }
    float *own = c.attend() + (is_v ? attend_at<G>::value : attend_at<G>::key);
    if (!is_v) {
        float f = rsqrtf(warp_sum(sum) / HEAD + c.m.eps) * (is_q ? rsqrtf(HEAD) : 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int d = lane + 32 * i;
            float cs = c.turn()[d], sn = c.turn()[HEAD / 2 + d];
            float x = v[i] * f * norm[i], y = v[i + 2] * f * norm[i + 2];
            v[i] = x * cs - y * sn;
            v[i + 2] = y * cs + x * sn;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int d = lane + 32 * i;
        if (is_q)
            c.attend()[c.warp * HEAD + d] = v[i];
        else
            store_float(own, d, T, v[i]);
        if (!is_q && keep)
            store_float(is_v ? l.v : l.k, to + d, T, v[i]);
    }
}

/* Rows `row` to row + 3, as far as they come before the end. */
template <enum nbi_dtype T>
__device__ static inline struct rows_of<T> fetch_rows(const struct context &c, int layer,
                                                      const struct rows_part &p, int row) {
    const int size = T == NBI_E4M3 ? 1 : 2;
    const struct layer &l = c.layers()[layer];
    int64_t at = (((int64_t)row * c.m.NKV + p.kv) * HEAD + c.lane * 4) * size;
    int64_t stride = (int64_t)c.m.NKV * HEAD * size;
    struct rows_of<T> r = {
    };
#pragma unroll
    for (int i = 0; i < ROWS; i++, at += stride)
        if (row + i < p.end) {
            r.k[i] = *(const struct loaded<T> *)((const uint8_t *)l.k + at);
            r.v[i] = *(const struct loaded<T> *)((const uint8_t *)l.v + at);
        }
    return r;
}

/* Asks for the first rows, and the norms of queries and keys. */
template <enum nbi_dtype T>
__device__ static inline void prefetch_rows(const struct context &c, int layer,
                                            const struct rows_part &p)
{
    const int size = T == NBI_E4M3 ? 1 : 2;
    const struct layer &l = c.layers()[layer];
    int row = p.begin + threadIdx.x / 4, part = threadIdx.x % 4;
    int64_t at = (((int64_t)row * c.m.NKV + p.kv) * HEAD + part % 2 * (HEAD / 2)) * size;
    if (row < p.end)
        prefetch((const uint8_t *)(part < 2 ? l.k : l.v) + at);
    if (threadIdx.x < 8)
        prefetch(c.m.head_norms + layer * 2 * HEAD + threadIdx.x * 32);
}

/* The sums of N values over all lanes, one for each lane: value lane / (32 / N). N is a power of
 * two; lanes that differ in MASK and below have not been added up. */
template <int N, int MASK> struct spread {
    __device__ static inline float sum(const float s[N], int lane)
    {
        float half[N / 2];
        bool up = lane & MASK;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float mine = up ? s[i + N / 2] : s[i], other = up ? s[i] : s[i + N / 2];
            half[i] = mine + __shfl_xor_sync(0xFFFFFFFF, other, MASK);
        }
        return spread<N / 2, MASK / 2>::sum(half, lane);
    }
};

template <int MASK> struct spread<1, MASK> {
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

__device__ static inline float dot(float4 a, float4 b)
{
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

__device__ static inline void scale_add(float4 &sum, float by, float p, float4 v)
{
    sum = make_float4(fmaf(p, v.x, sum.x * by), fmaf(p, v.y, sum.y * by), fmaf(p, v.z, sum.z * by),
                      fmaf(p, v.w, sum.w * by));
}

/* The softmax of G heads so far: four values of each, and of head lane / (32 / (ROWS G)) % G its
 * maximum and denominator. */
template <int G> struct softmax {
    float4 acc[G];
    float top, sum;
};

/* Up to four rows more, `there` of them. */
template <enum nbi_dtype T, int G>
__device__ static inline void take_rows(struct softmax<G> &s, const float4 q[G],
                                        const struct rows_of<T> &r, int there, int lane)
{
    const int each = 32 / (ROWS * G); /* lanes that have the same row and head */
    float scores[ROWS * G];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float4 k = four<T>(r.k[i]);
#pragma unroll
        for (int h = 0; h < G; h++)
            scores[i * G + h] = dot(q[h], k);
    }
    float score = spread<ROWS * G, 16>::sum(scores, lane);
    bool in = lane / (32 / ROWS) < there;
    float high = in ? fmaxf(s.top, score) : s.top;
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, 16));
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, 8));
    float keep = __expf(s.top - high), p = in ? __expf(score - high) : 0, sum = p;
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 16);
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 8);
    s.top = high;
    s.sum = s.sum * keep + sum;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float4 v = four<T>(r.v[i]);
#pragma unroll
        for (int h = 0; h < G; h++) {
            float by = i == 0 ? __shfl_sync(0xFFFFFFFF, keep, h * each) : 1;
            scale_add(s.acc[h], by, __shfl_sync(0xFFFFFFFF, p, (i * G + h) * each), v);
        }
    }
}

/* Rows [begin, end) of the store for G heads, four a warp at a time, and this token's own. */
template <enum nbi_dtype T, int G>
__device__ static void attend_rows(struct context &c, int layer, const struct rows_part &p,
                                   struct rows_of<T> next)
{
    const int size = T == NBI_E4M3 ? 1 : 2, each = 32 / (ROWS * G);
    struct softmax<G> s = {
    };
    float4 q[G];
    s.top = -1e30f;
#pragma unroll
    for (int h = 0; h < G; h++)
        q[h] = ((const float4 *)(c.attend() + h * HEAD))[c.lane];
    int stop = p.end + (p.split == p.used - 1); /* this token's own row comes last */
#pragma unroll 1
    for (int row = p.begin + c.warp * ROWS; row < stop; row += WARPS * ROWS) {
        struct rows_of<T> now = next;
        next = fetch_rows<T>(c, layer, p, row + WARPS * ROWS);
        if (p.end < stop && p.end - row < ROWS && p.end >= row) {
            const uint8_t *own =
                (const uint8_t *)(c.attend() + attend_at<G>::key) + c.lane * 4 * size;
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (row + i == p.end) {
                    now.k[i] = *(const struct loaded<T> *)own;
                    now.v[i] = *(const struct loaded<T> *)(own + HEAD * 4);
                }
        }
        take_rows<T, G>(s, q, now, stop - row, c.lane);
    }
    float *part = c.attend() + attend_at<G>::parts + c.warp * attend_at<G>::stride;
#pragma unroll
    for (int h = 0; h < G; h++) {
        float2 *to = (float2 *)(part + h * (HEAD + 2));
        to[2 * c.lane] = make_float2(s.acc[h].x, s.acc[h].y);
        to[2 * c.lane + 1] = make_float2(s.acc[h].z, s.acc[h].w);
        if (c.lane == h * each)
            to[HEAD / 2] = make_float2(s.top, s.sum);
    }
}

/* A softmax: the sum of some value, the maximum, the denominator. */
struct joined {
    float v, top, sum;
};

/* Value d of head h over the first, the (first + step)-th and so on of `count` softmaxes. */
template <int G>
__device__ static inline struct joined join_parts(const struct context &c, int h, int d, int first,
                                                  int step, int count)
{
    const float *parts = c.attend() + attend_at<G>::parts + h * (HEAD + 2);
    struct joined j = {0, -INFINITY, 0};
#pragma unroll 4
    for (int p = 0; p < count; p++)
        j.top = fmaxf(j.top, parts[p * attend_at<G>::stride + HEAD]);
#pragma unroll 4
    for (int p = first; p < count; p += step) {
        const float *part = parts + p * attend_at<G>::stride;
        float2 own = *(const float2 *)(part + HEAD);
        float w = __expf(own.x - j.top);
        j.sum = fmaf(w, own.y, j.sum);
        j.v = fmaf(w, part[d], j.v);
    }
    return j;
}

/* x16 = the head that `count` softmaxes give. */
__device__ static void put_head(struct context &c, int count)
{
    const int each = THREADS / HEAD; /* threads that have the same value */
    int d = threadIdx.x % HEAD, part = threadIdx.x / HEAD;
    float *values = c.slots(), *sums = (float *)c.squares(), v = 0, sum = 0;
    struct joined j = join_parts<1>(c, 0, d, part, each, count);
    values[threadIdx.x] = j.v;
    if (d == 0)
        sums[part] = j.sum;
    __syncthreads();
    if (part > 0)
        return;
#pragma unroll
    for (int i = 0; i < each; i++) {
        v += values[i * HEAD + d];
        sum += sums[i];
    }
    struct halves two = halves_of(__fdividef(v, sum));
    uint32_t more = __shfl_down_sync(0xFFFFFFFF, two.two, 2);
    if (d % 4 == 0)
        put_pairs(c, d / 4, two.two, more, two.by);
}

/* Where other blocks look for the softmaxes of a head. */
__device__ static inline float *shared_part(const struct context &c, int head, int split)
{
    return c.m.shared + ((int64_t)head * SPLITS_MAX + split) * PART_FLOATS(1);
}

/* This block's rows for G heads, to the others. */
template <enum nbi_dtype T, int G>
__device__ static void attend_part(struct context &c, int layer, const struct step_args &a,
                                   const struct rows_part &p)
{
    struct rows_of<T> first = fetch_rows<T>(c, layer, p, p.begin + c.warp * ROWS);
    prepare_heads<T, G>(c, layer, a, p, p.head % (c.m.NH / c.m.NKV) == 0);
    __syncthreads();
    attend_rows<T, G>(c, layer, p, first);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < G * HEAD; i += THREADS) {
        int h = i / HEAD, d = i % HEAD;
        float *out = shared_part(c, p.head + h, p.split);
        struct joined j = join_parts<G>(c, h, d, 0, 1, WARPS);
        __stcg(out + d, j.v);
        if (d == 0)
            __stcg((float2 *)(out + HEAD), make_float2(j.top, j.sum));
    }
}

/* Attention, as far as the block's part of o needs it: one head. Over few rows (FEW) each block
 * does that head by itself; over many, blocks share the rows of G heads first. */
template <enum nbi_dtype T, int G, bool FEW>
__device__ static void attention(struct context &c, int layer, const struct step_args &a,
                                 const struct rows_part &p)
{
    int head = (int)blockIdx.x / c.m.each;
    bool any = head < c.m.NH;
    if (FEW && any) {
        struct rows_of<T> first = fetch_rows<T>(c, layer, p, p.begin + c.warp * ROWS);
        prepare_heads<T, 1>(c, layer, a, p,
                            head % (c.m.NH / c.m.NKV) == 0 && blockIdx.x % c.m.each == 0);
        __syncthreads();
        attend_rows<T, 1>(c, layer, p, first);
    }
    if (!FEW) {
        if (p.split < p.used)
            attend_part<T, G>(c, layer, a, p);
        arrive_all(c);
        wait_all(c);
        for (int i = threadIdx.x; any && i < p.used * PART_FLOATS(1); i += THREADS)
            c.attend()[attend_at<1>::parts + i] = __ldcg(shared_part(c, head, 0) + i);
    }
    __syncthreads();
    if (any)
        put_head(c, FEW ? min(p.end - p.begin + ROWS, ROWS * WARPS) / ROWS : p.used);
}
