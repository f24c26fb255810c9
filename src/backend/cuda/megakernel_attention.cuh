/* megakernel_attention.cuh - the kernel of token.cu: attention of one token over few rows, and what
 * that over many (token_many.cuh) has in common with it. */
#pragma once

#include "backend/cuda/megakernel.cuh"

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
 * type), and behind them softmaxes by warp, over many rows by block; before there are any, scores
 * of the own key. */
template <int G> struct attend_at {
    static const int key = G * HEAD, value = key + HEAD, parts = value + HEAD;
};

template <enum nbi_dtype T> /* token_many.cuh */
__device__ static inline void put_operand(const struct context &c, int head, int d, float v);

/* Queries of G heads, by a warp each, as operands too if MANY; this token's key and value, by two
 * more if they are asked for, and to the store if `keep`. */
template <enum nbi_dtype T, int G, bool MANY>
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
            store_f32(own, d, T, v[i]);
        if (is_q && MANY)
            put_operand<T>(c, c.warp, d, v[i]);
        if (!is_q && keep)
            store_f32(is_v ? l.v : l.k, to + d, T, v[i]);
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

/* The softmax of a head so far: four of its values, its maximum and denominator. */
struct softmax {
    float4 acc;
    float top, sum;
};

/* Up to four rows more, `there` of them. */
template <enum nbi_dtype T>
__device__ static inline void take_rows(struct softmax &s, float4 q, const struct rows_of<T> &r,
                                        int there, int lane)
{
    const int each = 32 / ROWS; /* lanes that have the same row */
    float scores[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        scores[i] = dot(q, four<T>(r.k[i]));
    float score = spread<ROWS, 16>::sum(scores, lane);
    bool in = lane / each < there;
    float high = in ? fmaxf(s.top, score) : s.top;
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, 16));
    high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, 8));
    float keep = __expf(s.top - high), p = in ? __expf(score - high) : 0, sum = p;
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 16);
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 8);
    s.top = high;
    s.sum = s.sum * keep + sum;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        scale_add(s.acc, i == 0 ? keep : 1, __shfl_sync(0xFFFFFFFF, p, i * each), four<T>(r.v[i]));
}

/* Rows [begin, end) of the store for a head, four a warp at a time, and this token's own. */
template <enum nbi_dtype T>
__device__ static void attend_rows(struct context &c, int layer, const struct rows_part &p,
                                   struct rows_of<T> next)
{
    const int size = T == NBI_E4M3 ? 1 : 2;
    struct softmax s = {};
    s.top = -1e30f;
    float4 q = ((const float4 *)c.attend())[c.lane];
    int stop = p.end + 1; /* this token's own row comes last */
#pragma unroll 1
    for (int row = p.begin + c.warp * ROWS; row < stop; row += WARPS * ROWS) {
        struct rows_of<T> now = next;
        next = fetch_rows<T>(c, layer, p, row + WARPS * ROWS);
        if (p.end - row < ROWS && p.end >= row) {
            const uint8_t *own =
                (const uint8_t *)(c.attend() + attend_at<1>::key) + c.lane * 4 * size;
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (row + i == p.end) {
                    now.k[i] = *(const struct loaded<T> *)own;
                    now.v[i] = *(const struct loaded<T> *)(own + HEAD * 4);
                }
        }
        take_rows<T>(s, q, now, stop - row, c.lane);
    }
    float *part = c.attend() + attend_at<1>::parts + c.warp * PART_FLOATS;
    ((float2 *)part)[2 * c.lane] = make_float2(s.acc.x, s.acc.y);
    ((float2 *)part)[2 * c.lane + 1] = make_float2(s.acc.z, s.acc.w);
    if (c.lane == 0)
        *(float2 *)(part + HEAD) = make_float2(s.top, s.sum);
}

/* A softmax: the sum of some value, the maximum, the denominator. */
struct joined {
    float v, top, sum;
};

/* Value d over the first, the (first + step)-th and so on of `count` softmaxes, `stride` apart. */
__device__ static inline struct joined join_parts(const float *parts, int stride, int d, int first,
                                                  int step, int count)
{
    struct joined j = {0, -INFINITY, 0};
#pragma unroll 4
    for (int p = 0; p < count; p++)
        j.top = fmaxf(j.top, parts[p * stride + HEAD]);
#pragma unroll 4
    for (int p = first; p < count; p += step) {
        const float *part = parts + p * stride;
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
    struct joined j =
        join_parts(c.attend() + attend_at<1>::parts, PART_FLOATS, d, part, each, count);
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
