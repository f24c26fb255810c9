/* token_attention.cuh - the kernel of token.cu: attention of one token. */
#pragma once

#include "backend/cuda/token_steps.cuh"

template <enum nbi_dtype T> struct loaded {
    uint4 bits;
};

template <> struct loaded<NBI_E4M3> {
    uint2 bits;
};

/* Eight values of a row of keys or values. */
template <enum nbi_dtype T> __device__ static inline void eight(float out[8], struct loaded<T> v)
{
    const uint32_t *w = (const uint32_t *)&v.bits;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f;
        if (T == NBI_F16)
            f = __half22float2(*(const __half2 *)&w[i]);
        else if (T == NBI_BF16)
            f = __bfloat1622float2(*(const __nv_bfloat162 *)&w[i]);
        else
            f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(
                (__nv_fp8x2_storage_t)(w[i / 2] >> (16 * (i & 1))), __NV_E4M3)));
        out[2 * i] = f.x;
        out[2 * i + 1] = f.y;
    }
}

/* Keys and values of a row, for half a warp. */
template <enum nbi_dtype T> struct row_of {
    struct loaded<T> k, v;
};

/* What attention can ask for before the queries are there: the first two rows, and of the norm of
 * queries or keys what the lane will want. */
template <enum nbi_dtype T> struct row_feed {
    struct row_of<T> r0, r1;
    float norm[4];
};

/* Where attention keeps things, in floats: queries, this token's key and value (of the store's
 * type), softmaxes by warp, how they weigh. */
template <int G> struct attend_at {
    static const int key = G * HEAD, value = key + HEAD, parts = value + HEAD;
    static const int stride = PART_FLOATS(G), weights = parts + SPLITS_MAX * stride;
};

/* Queries of G heads, by a warp each; this token's key and value, by two more if they are asked
 * for, and to the store if `keep`. */
template <enum nbi_dtype T, int G>
__device__ static void prepare_heads(struct context &c, int layer, const struct step_args &a,
                                     const struct rows_part &p, const float norm[4], bool keep)
{
    int lane = c.lane, KV = c.m.NKV * HEAD, Q = c.m.NH * HEAD;
    if (c.warp > G + 1 || (c.warp >= G && p.split != p.used - 1))
        return;
    const struct layer &l = c.layers()[layer];
    int64_t to = ((int64_t)a.slot * c.m.NKV + p.kv) * HEAD;
    bool is_q = c.warp < G, is_v = c.warp == G + 1;
    const float *from = c.m.qkv + (is_q ? (p.head + c.warp) * HEAD : Q + is_v * KV + p.kv * HEAD);
    float v[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = __ldcg(from + lane + 32 * i);
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum += v[i] * v[i];
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

/* The softmax of G heads so far, for eight values of each, by half a warp. */
template <int G> struct softmax {
    float acc[G][8], top[G], sum[G];
};

/* One more row: eight of its key's and of its value's numbers. */
template <int G>
__device__ static inline void take_row(struct softmax<G> &s, const float q[G][8], const float k[8],
                                       const float v[8], bool there)
{
#pragma unroll
    for (int h = 0; h < G; h++) {
        float score = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            score = fmaf(q[h][i], k[i], score);
#pragma unroll
        for (int o = 8; o > 0; o >>= 1)
            score += __shfl_xor_sync(0xFFFFFFFF, score, o);
        float high = there ? fmaxf(s.top[h], score) : s.top[h];
        float keep = __expf(s.top[h] - high), p = there ? __expf(score - high) : 0;
        s.top[h] = high;
        s.sum[h] = s.sum[h] * keep + p;
#pragma unroll
        for (int i = 0; i < 8; i++)
            s.acc[h][i] = s.acc[h][i] * keep + p * v[i];
    }
}

template <enum nbi_dtype T>
__device__ static inline struct row_of<T> fetch_row(const struct context &c, int layer,
                                                    const struct rows_part &p, int row) {
    const int size = T == NBI_E4M3 ? 1 : 2;
    const struct layer &l = c.layers()[layer];
    int64_t at = (((int64_t)row * c.m.NKV + p.kv) * HEAD + c.lane % 16 * 8) * size;
    struct row_of<T> r = {
    };
    if (row < p.end) {
        r.k = *(const struct loaded<T> *)((const uint8_t *)l.k + at);
        r.v = *(const struct loaded<T> *)((const uint8_t *)l.v + at);
    }
    return r;
}

/* Asks for the rows that first_rows will ask for. */
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

template <enum nbi_dtype T>
__device__ static inline struct row_feed<T> first_rows(const struct context &c, int layer,
                                                       const struct rows_part &p, int heads) {
    const float *norm = c.m.head_norms + (layer * 2 + (c.warp >= heads)) * HEAD + c.lane;
    struct row_feed<T> f;
    int row = p.begin + c.warp * 2 + c.lane / 16;
    f.r0 = fetch_row<T>(c, layer, p, row);
    f.r1 = fetch_row<T>(c, layer, p, row + 2 * WARPS);
#pragma unroll
    for (int i = 0; i < 4; i++)
        f.norm[i] = __ldg(norm + 32 * i);
    return f;
}

/* Rows [begin, end) of the store for G heads, half a warp for a row, and this token's own. */
template <enum nbi_dtype T, int G>
__device__ static void attend_rows(struct context &c, int layer, const struct rows_part &p,
                                   struct row_feed<T> feed)
{
    const int size = T == NBI_E4M3 ? 1 : 2;
    int half = c.lane / 16, d0 = c.lane % 16 * 8;
    struct softmax<G> s = {
    };
    float q[G][8], x[8], y[8];
#pragma unroll
    for (int h = 0; h < G; h++) {
        s.top[h] = -1e30f;
        const float4 *from = (const float4 *)(c.attend() + h * HEAD + d0);
        float4 low = from[0], high = from[1];
        q[h][0] = low.x, q[h][1] = low.y, q[h][2] = low.z, q[h][3] = low.w;
        q[h][4] = high.x, q[h][5] = high.y, q[h][6] = high.z, q[h][7] = high.w;
    }
    int stop = p.end + (p.split == p.used - 1); /* this token's own row comes last */
#pragma unroll 1
    for (int row = p.begin + c.warp * 2 + half; row - half < stop; row += 2 * WARPS) {
        struct row_of<T> now = feed.r0;
        feed.r0 = feed.r1;
        feed.r1 = fetch_row<T>(c, layer, p, row + 4 * WARPS);
        if (row == p.end && row < stop) {
            const uint8_t *own = (const uint8_t *)(c.attend() + attend_at<G>::key) + d0 * size;
            now.k = *(const struct loaded<T> *)own;
            now.v = *(const struct loaded<T> *)(own + HEAD * 4);
        }
        eight<T>(x, now.k);
        eight<T>(y, now.v);
        take_row<G>(s, q, x, y, row < stop);
    }
    /* The two halves, then one part for the warp: acc, top, sum. */
    float *part = c.attend() + attend_at<G>::parts + c.warp * attend_at<G>::stride;
#pragma unroll
    for (int h = 0; h < G; h++) {
        float other = __shfl_xor_sync(0xFFFFFFFF, s.top[h], 16), high = fmaxf(s.top[h], other);
        float keep = __expf(s.top[h] - high);
        s.sum[h] *= keep;
        s.sum[h] += __shfl_xor_sync(0xFFFFFFFF, s.sum[h], 16);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s.acc[h][i] *= keep;
            s.acc[h][i] += __shfl_xor_sync(0xFFFFFFFF, s.acc[h][i], 16);
            if (half == 0)
                part[h * (HEAD + 2) + d0 + i] = s.acc[h][i];
        }
        if (c.lane == 0) {
            part[h * (HEAD + 2) + HEAD] = high;
            part[h * (HEAD + 2) + HEAD + 1] = s.sum[h];
        }
    }
}

/* How `count` softmaxes weigh for a head, and behind that their common maximum and denominator. A
 * warp for a head. */
template <int G> __device__ static void weigh_parts(struct context &c, int count)
{
    float *weights = c.attend() + attend_at<G>::weights + c.warp * (SPLITS_MAX + 2);
    const float *p = c.attend() + attend_at<G>::parts + c.warp * (HEAD + 2) +
                     min(c.lane, count - 1) * attend_at<G>::stride;
    float top = warp_max(p[HEAD]), w = __expf(p[HEAD] - top);
    float sum = warp_sum(c.lane < count ? w * p[HEAD + 1] : 0);
    if (c.lane < count)
        weights[c.lane] = w;
    if (c.lane == 0) {
        weights[SPLITS_MAX] = top;
        weights[SPLITS_MAX + 1] = sum;
    }
}

/* Value d of head h over `count` softmaxes. */
template <int G>
__device__ static inline float sum_parts(const struct context &c, int h, int d, int count)
{
    const float *weights = c.attend() + attend_at<G>::weights + h * (SPLITS_MAX + 2);
    const float *parts = c.attend() + attend_at<G>::parts + h * (HEAD + 2) + d;
    float v = 0;
#pragma unroll 4
    for (int p = 0; p < count; p++)
        v += parts[p * attend_at<G>::stride] * weights[p];
    return v;
}

/* x16 = the head that `count` softmaxes give. */
__device__ static void put_head(struct context &c, int count)
{
    if (c.warp == 0)
        weigh_parts<1>(c, count);
    __syncthreads();
    if (threadIdx.x >= HEAD)
        return;
    int d = threadIdx.x;
    float sum = c.attend()[attend_at<1>::weights + SPLITS_MAX + 1];
    struct halves two = halves_of(__fdividef(sum_parts<1>(c, 0, d, count), sum));
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
                                   const struct rows_part &p, struct row_feed<T> first)
{
    prepare_heads<T, G>(c, layer, a, p, first.norm, p.head % (c.m.NH / c.m.NKV) == 0);
    __syncthreads();
    attend_rows<T, G>(c, layer, p, first);
    __syncthreads();
    if (c.warp < G)
        weigh_parts<G>(c, WARPS);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < G * HEAD; i += THREADS) {
        int h = i / HEAD, d = i % HEAD;
        float *out = shared_part(c, p.head + h, p.split);
        __stcg(out + d, sum_parts<G>(c, h, d, WARPS));
        if (d < 2)
            __stcg(out + HEAD + d,
                   c.attend()[attend_at<G>::weights + h * (SPLITS_MAX + 2) + SPLITS_MAX + d]);
    }
}

/* Attention, as far as the block's part of o needs it: one head. Over few rows (FEW) each block
 * does that head by itself; over many, blocks share the rows of G heads first. */
template <enum nbi_dtype T, int G, bool FEW>
__device__ static void attention(struct context &c, int layer, const struct step_args &a,
                                 const struct rows_part &p, struct row_feed<T> first)
{
    int head = (int)blockIdx.x / c.m.each;
    bool any = head < c.m.NH;
    if (FEW && any) {
        prepare_heads<T, 1>(c, layer, a, p, first.norm,
                            head % (c.m.NH / c.m.NKV) == 0 && blockIdx.x % c.m.each == 0);
        __syncthreads();
        attend_rows<T, 1>(c, layer, p, first);
    }
    if (!FEW) {
        if (p.split < p.used)
            attend_part<T, G>(c, layer, a, p, first);
        arrive_all(c);
        wait_all(c);
        for (int i = threadIdx.x; any && i < p.used * PART_FLOATS(1); i += THREADS)
            c.attend()[attend_at<1>::parts + i] = __ldcg(shared_part(c, head, 0) + i);
    }
    __syncthreads();
    if (any)
        put_head(c, FEW ? WARPS : p.used);
}
