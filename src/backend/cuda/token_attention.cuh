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

/* Where attention keeps things, in floats: queries, this token's key and value, parts by warp, how
 * they weigh. */
template <int G> struct attend_at {
    static const int key = G * HEAD, value = key + HEAD, parts = value + HEAD; /* of its type */
    static const int stride = G * (HEAD + 2), weights = parts + WARPS * stride;
};

/* Queries of G heads, by a warp each; this token's key and value, by two more. */
template <enum nbi_dtype T, int G>
__device__ static void prepare_heads(struct context &c, int layer, const struct step_args &a,
                                     int head, int kv, bool newest)
{
    int lane = c.lane, KV = c.m.NKV * HEAD, Q = c.m.NH * HEAD;
    if (c.warp > G + 1 || (c.warp >= G && !newest))
        return;
    const struct layer &l = c.layers()[layer];
    const float *norms = c.head_norm();
    int64_t to = ((int64_t)a.slot * c.m.NKV + kv) * HEAD;
    bool is_q = c.warp < G, is_v = c.warp == G + 1;
    const float *from = c.m.qkv + (is_q ? (head + c.warp) * HEAD : Q + is_v * KV + kv * HEAD);
    float v[4], w[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = norms[(is_q ? 0 : HEAD) + lane + 32 * i];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __ldcg(from + lane + 32 * i);
        sum += v[i] * v[i];
    }
    if (is_v) {
        for (int i = 0; i < 4; i++) {
            store_float(l.v, to + lane + 32 * i, T, v[i]);
            store_float(c.attend() + attend_at<G>::value, lane + 32 * i, T, v[i]);
        }
        return;
    }
    float f = rsqrtf(warp_sum(sum) / HEAD + c.m.eps) * (is_q ? rsqrtf(HEAD) : 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int d = lane + 32 * i;
        float cs = c.turn()[d], sn = c.turn()[HEAD / 2 + d];
        float x = v[i] * f * w[i], y = v[i + 2] * f * w[i + 2];
        float p = x * cs - y * sn, q = y * cs + x * sn;
        float *query = c.attend() + c.warp * HEAD, *key = c.attend() + attend_at<G>::key;
        if (is_q) {
            query[d] = p;
            query[d + HEAD / 2] = q;
        } else {
            store_float(l.k, to + d, T, p);
            store_float(l.k, to + d + HEAD / 2, T, q);
            store_float(key, d, T, p);
            store_float(key, d + HEAD / 2, T, q);
        }
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

/* Rows of keys and values for half a warp: the first is fetched before it is known what for. */
template <enum nbi_dtype T> struct row_feed {
    struct loaded<T> k, v;
};

template <enum nbi_dtype T>
__device__ static inline struct row_feed<T> fetch_row(const struct context &c, int layer, int kv,
                                                      int row, int end) {
    const int size = T == NBI_E4M3 ? 1 : 2;
    const struct layer &l = c.layers()[layer];
    int64_t at = (((int64_t)row * c.m.NKV + kv) * HEAD + c.lane % 16 * 8) * size;
    struct row_feed<T> r = {
    };
    if (row < end) {
        r.k = *(const struct loaded<T> *)((const uint8_t *)l.k + at);
        r.v = *(const struct loaded<T> *)((const uint8_t *)l.v + at);
    }
    return r;
}

/* Rows [begin, end) of the store for G heads, half a warp for a row, and this token's own. */
template <enum nbi_dtype T, int G>
__device__ static void attend_rows(struct context &c, int layer, const struct part_of_attention &p,
                                   struct row_feed<T> next)
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
    for (int row = p.begin + c.warp * 2 + half; row - half < stop; row += WARPS * 2) {
        struct row_feed<T> now = next;
        if (row == p.end && row < stop) {
            const uint8_t *own = (const uint8_t *)(c.attend() + attend_at<G>::key) + d0 * size;
            now.k = *(const struct loaded<T> *)own;
            now.v = *(const struct loaded<T> *)(own + HEAD * 4);
        }
        next = fetch_row<T>(c, layer, p.kv, row + WARPS * 2, p.end);
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

/* How the warps' softmaxes weigh for a head, and behind that their common maximum and sum. A warp
 * for a head. */
template <int G> __device__ static void weigh_parts(struct context &c)
{
    const float *part = c.attend() + attend_at<G>::parts + c.warp * (HEAD + 2);
    float *weights = c.attend() + attend_at<G>::weights + c.warp * (WARPS + 2);
    const float *p = part + c.lane % WARPS * attend_at<G>::stride;
    float top = warp_max(p[HEAD]), w = __expf(p[HEAD] - top);
    float sum = warp_sum(c.lane < WARPS ? w * p[HEAD + 1] : 0);
    if (c.lane < WARPS)
        weights[c.lane] = w;
    if (c.lane == 0) {
        weights[WARPS] = top;
        weights[WARPS + 1] = sum;
    }
}

/* Other blocks' rows, in their order, together with this one's. */
template <int G> __device__ static void join_splits(struct context &c, int head, int used)
{
    const int stride = attend_at<G>::stride;
#pragma unroll 1
    for (int i = threadIdx.x; i < G * HEAD; i += THREADS) {
        int h = i / HEAD, d = i % HEAD;
        const float *parts = c.m.parts + (int64_t)(head / G) * c.m.splits * stride + h * (HEAD + 2);
        float v = 0, top = -1e30f, sum = 0;
#pragma unroll 4
        for (int s = 0; s < used; s++) {
            const float *p = parts + s * stride;
            float at = __ldcg(p + HEAD), high = fmaxf(top, at);
            float keep = __expf(top - high), more = __expf(at - high);
            v = v * keep + __ldcg(p + d) * more;
            sum = sum * keep + __ldcg(p + HEAD + 1) * more;
            top = high;
        }
        give_halves(c.m.att, c.m.att_scale, (head + h) * HEAD + d, __fdividef(v, sum), true);
    }
}

/* Blocks share the rows of a head; the first puts the parts together. `first` are the first rows of
 * the store. */
template <enum nbi_dtype T, int G>
__device__ static void attention(struct context &c, int layer, const struct step_args &a,
                                 struct row_feed<T> first)
{
    const struct part_of_attention part = *c.part_of();
    const int stride = attend_at<G>::stride;
    int split = part.split, head = part.head, used = part.used;
    if (split < used) {
        prepare_heads<T, G>(c, layer, a, head, part.kv, split == used - 1);
        sync_block();
        attend_rows<T, G>(c, layer, part, first);
        sync_block();
        if (c.warp < G)
            weigh_parts<G>(c);
        sync_block();
        float *out = c.m.parts + ((int64_t)(head / G) * c.m.splits + split) * stride;
#pragma unroll 1
        for (int i = threadIdx.x; i < G * HEAD; i += THREADS) {
            int h = i / HEAD, d = i % HEAD;
            const float *w = c.attend() + attend_at<G>::weights + h * (WARPS + 2);
            float v = 0;
#pragma unroll
            for (int p = 0; p < WARPS; p++)
                v += c.attend()[attend_at<G>::parts + p * stride + h * (HEAD + 2) + d] * w[p];
            if (used == 1) {
                give_halves(c.m.att, c.m.att_scale, (head + h) * HEAD + d,
                            __fdividef(v, w[WARPS + 1]), true);
            } else {
                __stcg(out + h * (HEAD + 2) + d, v);
                if (d < 2)
                    __stcg(out + h * (HEAD + 2) + HEAD + d, w[WARPS + d]);
            }
        }
    }
    if (used > 1) {
        meet(c);
        if (split == 0)
            join_splits<G>(c, head, used);
    }
    meet(c);
}
