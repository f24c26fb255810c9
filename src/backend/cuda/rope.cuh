/* rope.cuh - RMSNorm and rotary embedding of query and key heads, one warp for a head of one row.
 *
 * A lane handles W neighbouring elements of the first half of a head and the W elements they are
 * rotated with in the second half: element i pairs with i + D / 2.
 *
 * There are two versions. rope_head works for every head size and serves the plain operation; the
 * functions on struct head keep a head of D = 64 W in registers and are fused into attention. Both
 * give the same bits, which is why sums and products are spelled out as intrinsics: the compiler
 * must not contract them differently. */
#pragma once

#include "backend/cuda/pack_activations.cuh"

/* W (1 or 2) neighbouring values; two are aligned. */
template <int W> __device__ static inline void load_vec(float v[W], const float *p)
{
    if (W == 2) {
        float2 two = *(const float2 *)p;
        v[0] = two.x, v[W - 1] = two.y;
    } else {
        v[0] = *p;
    }
}

template <int W> __device__ static inline void load_vec(float v[W], const __nv_bfloat16 *p)
{
    if (W == 2) {
        float2 two = __bfloat1622float2(*(const __nv_bfloat162 *)p);
        v[0] = two.x, v[W - 1] = two.y;
    } else {
        v[0] = __bfloat162float(*p);
    }
}

template <int W>
__device__ static inline void store_vec(void *p, int64_t i, enum nbi_dtype dtype, const float v[W])
{
    float2 two = make_float2(v[0], v[W - 1]);
    if (W == 1)
        store_f32(p, i, dtype, v[0]);
    else if (dtype == NBI_F32)
        *(float2 *)((float *)p + i) = two;
    else if (dtype == NBI_F16)
        *(__half2 *)((__half *)p + i) = __floats2half2_rn(two.x, two.y);
    else if (dtype == NBI_BF16)
        *(__nv_bfloat162 *)((__nv_bfloat16 *)p + i) = __floats2bfloat162_rn(two.x, two.y);
    else
        *(__nv_fp8x2_storage_t *)((uint8_t *)p + i) =
            __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
}

__device__ static inline float add_square(float sum, float x)
{
    return __fmaf_rn(x, x, sum);
}

/* 1 / sqrt(mean square + eps) of a head, from each lane's sum of squares. */
__device__ static inline float head_rstd(float sum, int D, float eps)
{
    return 1.0f / sqrtf(__fadd_rn(warp_sum(sum) / (float)D, eps));
}

/* Normalizes the pair (p, q) of a head with factor f and weights (v, w), then rotates it by the
 * angle of cosine c and sine s. */
__device__ static inline void rotate_pair(float &p, float &q, float f, float v, float w, float c,
                                          float s)
{
    float first = __fmul_rn(__fmul_rn(p, f), v), second = __fmul_rn(__fmul_rn(q, f), w);
    p = __fmaf_rn(first, c, -__fmul_rn(second, s));
    q = __fmaf_rn(second, c, __fmul_rn(first, s));
}

/* ---- heads of any size ---- */

/* Writes the head x[D] of row n, normalized and rotated, to out[to], out[to + 1], ... Queries keep
 * their type, f32 or bf16. */
template <int W, typename T>
__device__ static inline void rope_head(const struct rope_args &a, const T *x, bool is_key, int n,
                                        float *rstd, void *out, int64_t to)
{
    enum nbi_dtype q_out_type = sizeof(T) == 4 ? NBI_F32 : NBI_BF16;
    int lane = threadIdx.x % 32, half = a.D / 2;
    float sum = 0, p[W], q[W], c[W], s[W], v[W], w[W];
    const void *norm = is_key ? a.k_norm : a.q_norm;
    enum nbi_dtype type = is_key ? a.k_type : a.q_type, out_type = is_key ? a.kv_type : q_out_type;
    for (int d = W * lane; d < a.D; d += 32 * W) {
        load_vec<W>(p, x + d);
        for (int j = 0; j < W; j++)
            sum = add_square(sum, p[j]);
    }
    float f = head_rstd(sum, a.D, a.eps);
    if (rstd && lane == 0)
        *rstd = f;
    for (int d = W * lane; d < half; d += 32 * W) {
        load_vec<W>(p, x + d);
        load_vec<W>(q, x + d + half);
        load_vec<W>(c, a.cos + (int64_t)n * half + d);
        load_vec<W>(s, a.sin + (int64_t)n * half + d);
        load_f32_n<W>(v, norm, d, 1, a.D, type);
        load_f32_n<W>(w, norm, d + half, 1, a.D, type);
        for (int j = 0; j < W; j++)
            rotate_pair(p[j], q[j], f, v[j], w[j], c[j], s[j]);
        store_vec<W>(out, to + d, out_type, p);
        store_vec<W>(out, to + d + half, out_type, q);
    }
}

template <int W>
__device__ static inline void rope_query(const struct rope_args &a, int n, int h, float *out)
{
    int64_t row = (int64_t)n * a.NH + h;
    rope_head<W>(a, a.q + row * a.D, false, n, a.rstd_q ? a.rstd_q + row : NULL, out, 0);
}

/* To the KV cache. */
template <int W> __device__ static inline void rope_key(const struct rope_args &a, int n, int h)
{
    int64_t row = (int64_t)n * a.NKV + h, to = ((int64_t)a.kv_rows[n] * a.NKV + h) * a.D;
    rope_head<W>(a, a.k + row * a.D, true, n, a.rstd_k ? a.rstd_k + row : NULL, a.k_cache, to);
}

/* Values are neither normalized nor rotated, only converted. */
template <int W, typename T>
__device__ static inline void value_head(const struct rope_args &a, const T *v, int64_t to)
{
    for (int d = W * (threadIdx.x % 32); d < a.D; d += 32 * W) {
        float x[W];
        load_vec<W>(x, v + d);
        store_vec<W>(a.v_cache, to + d, a.kv_type, x);
    }
}

template <int W> __device__ static inline void store_value(const struct rope_args &a, int n, int h)
{
    int64_t to = ((int64_t)a.kv_rows[n] * a.NKV + h) * a.D;
    value_head<W>(a, a.v + ((int64_t)n * a.NKV + h) * a.D, to);
}

/* ---- heads of D = 64 W in registers: all loads are issued at once ---- */

/* A lane's norm weights for (p, q). */
template <int W> struct head_norm {
    float v[W], w[W];
};

/* A lane's elements of both halves, and cosine and sine of their angles. */
template <int W> struct head {
    float p[W], q[W], c[W], s[W];
};

template <int W>
__device__ static inline void load_head_norm(struct head_norm<W> &m, const void *norm,
                                             enum nbi_dtype type)
{
    int d = W * (threadIdx.x % 32);
    load_f32_n<W>(m.v, norm, d, 1, 64 * W, type);
    load_f32_n<W>(m.w, norm, d + 32 * W, 1, 64 * W, type);
}

template <int W>
__device__ static inline void load_head(struct head<W> &h, const struct rope_args &a,
                                        const float *x, int n)
{
    int d = W * (threadIdx.x % 32);
    load_vec<W>(h.p, x + d);
    load_vec<W>(h.q, x + d + 32 * W);
    load_vec<W>(h.c, a.cos + n * 32 * W + d);
    load_vec<W>(h.s, a.sin + n * 32 * W + d);
}

/* Gives p and q the bits of rope_head<W>. */
template <int W>
__device__ static inline void norm_rotate(struct head<W> &h, const struct head_norm<W> &m,
                                          float eps)
{
    float sum = 0;
    for (int j = 0; j < W; j++)
        sum = add_square(sum, h.p[j]);
    for (int j = 0; j < W; j++)
        sum = add_square(sum, h.q[j]);
    float f = head_rstd(sum, 64 * W, eps);
    for (int j = 0; j < W; j++)
        rotate_pair(h.p[j], h.q[j], f, m.v[j], m.w[j], h.c[j], h.s[j]);
}

template <int W>
__device__ static inline void store_head(const struct head<W> &h, void *out, int64_t to,
                                         enum nbi_dtype dtype)
{
    int d = W * (threadIdx.x % 32);
    store_vec<W>(out, to + d, dtype, h.p);
    store_vec<W>(out, to + d + 32 * W, dtype, h.q);
}
